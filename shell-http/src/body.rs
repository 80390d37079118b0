//! Bodies: what comes in, read up to a bound, and what goes out.

use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use hyper::body::{Body as HttpBody, Frame, Incoming, SizeHint};
use hyper::header::{CONTENT_TYPE, EXPECT, HeaderValue};
use hyper::{HeaderMap, StatusCode};
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::connection::InCall;
use crate::limits::{BODY_PROGRESS, DROP, Limits};
use crate::problem::Problem;

pub type Response = hyper::Response<Body>;

/// Bodies below this are not counted against the memory for bodies.
const SMALL: usize = 64 * 1024;

/// An answer's body, and the call that is in work until it has been sent.
#[derive(Debug)]
pub struct Body {
    content: Content,
    call: Option<InCall>,
}

/// Whole, or in pieces as they come.
#[derive(Debug)]
enum Content {
    Full(Option<Bytes>),
    Stream(mpsc::Receiver<Piece>),
}

/// A piece of an answer that is sent as it is read.
pub type Piece = Result<Bytes, BrokenOff>;

/// The rest of an answer cannot be had: its connection is broken off, so that half of it is not taken for the
/// whole.
#[derive(Clone, Copy, Debug)]
pub struct BrokenOff;

impl std::fmt::Display for BrokenOff {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the rest of the answer could not be read")
    }
}

impl std::error::Error for BrokenOff {}

impl Body {
    pub fn empty() -> Body {
        Body { content: Content::Full(None), call: None }
    }

    pub fn full(bytes: impl Into<Bytes>) -> Body {
        Body { content: Content::Full(Some(bytes.into())), call: None }
    }

    pub fn stream(pieces: mpsc::Receiver<Piece>) -> Body {
        Body { content: Content::Stream(pieces), call: None }
    }

    /// The call is over when this body has been sent.
    pub fn ends(mut self, call: InCall) -> Body {
        self.call = Some(call);
        self
    }
}

impl HttpBody for Body {
    type Data = Bytes;
    type Error = BrokenOff;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BrokenOff>>> {
        match &mut self.get_mut().content {
            Content::Full(bytes) => Poll::Ready(bytes.take().map(|b| Ok(Frame::data(b)))),
            Content::Stream(pieces) => pieces.poll_recv(cx).map(|piece| piece.map(|b| b.map(Frame::data))),
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self.content, Content::Full(None))
    }

    fn size_hint(&self) -> SizeHint {
        match &self.content {
            Content::Full(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, Bytes::len) as u64),
            Content::Stream(_) => SizeHint::default(),
        }
    }
}

/// An answer in JSON.
pub fn json(status: StatusCode, out: Vec<u8>) -> Response {
    let mut response = Response::new(Body::full(out));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

pub fn no_content() -> Response {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::NO_CONTENT;
    response
}

/// The memory that large bodies may use together.
#[derive(Clone, Debug)]
pub struct Budget(Arc<AtomicUsize>);

impl Budget {
    pub fn new(bytes: usize) -> Self {
        Budget(Arc::new(AtomicUsize::new(bytes)))
    }

    fn take(&self, bytes: usize) -> Option<Taken> {
        let mut taken = Taken { budget: self.clone(), bytes: 0 };
        taken.more(bytes).then_some(taken)
    }
}

/// Given back when dropped.
#[derive(Debug)]
pub struct Taken {
    budget: Budget,
    bytes: usize,
}

impl Taken {
    fn more(&mut self, bytes: usize) -> bool {
        let taken =
            self.budget.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(bytes)).is_ok();
        if taken {
            self.bytes += bytes;
        }
        taken
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.budget.0.fetch_add(self.bytes, Ordering::Relaxed);
    }
}

/// A body that was read, with its share of the memory.
#[derive(Debug, Default)]
pub struct Read {
    pub bytes: Bytes,
    pub share: Option<Taken>,
}

/// A call's body as it comes in.
#[derive(Debug)]
pub struct Coming {
    body: Incoming,
    /// The client sends nothing before it is told to go on, which reading does.
    waits: bool,
    /// For the next `BODY_PROGRESS` bytes, or the end.
    each: Duration,
    until: Instant,
    since: usize,
}

impl Coming {
    pub fn new(body: Incoming, headers: &HeaderMap, limits: &Limits) -> Self {
        let each = limits.body_timeout;
        let waits = headers.get(EXPECT).is_some();
        Coming { body, waits, each, until: Instant::now() + each, since: 0 }
    }

    /// Reads and drops a body that nobody wants, so that the client gets to read its answer. False if
    /// some of it may be left, so that nothing can follow it.
    pub async fn forget(mut self) -> bool {
        self.body.is_end_stream() || !self.waits && self.drop_rest(0).await
    }

    /// Reads a whole body of at most `max` bytes.
    pub async fn read(mut self, max: u64, budget: &Budget) -> Result<Read, Problem> {
        let hint = self.body.size_hint();
        if hint.lower() > max {
            return Err(Problem::TooLarge { max, close: !self.forget().await });
        }
        let exact = hint.exact().and_then(|n| usize::try_from(n).ok());
        let mut share = None;
        if let Some(len) = exact
            && len > SMALL
        {
            share = budget.take(len);
            if share.is_none() {
                return Err(Problem::Busy { close: !self.forget().await });
            }
        }
        let Some(first) = self.next().await? else { return Ok(Read { bytes: Bytes::new(), share }) };
        if self.body.is_end_stream() && first.len() as u64 <= max {
            return Ok(Read { bytes: first, share });
        }
        let mut all = BytesMut::with_capacity(exact.unwrap_or(first.len() * 2));
        let mut piece = Some(first);
        while let Some(bytes) = piece {
            let seen = all.len() as u64 + bytes.len() as u64;
            if seen > max {
                drop((all, share));
                return Err(Problem::TooLarge { max, close: !self.drop_rest(seen).await });
            }
            all.extend_from_slice(&bytes);
            let counted = share.as_ref().map_or(SMALL, |s| s.bytes);
            if all.len() > counted {
                let fits = match &mut share {
                    Some(share) => share.more(all.len() - counted + SMALL),
                    None => {
                        share = budget.take(all.len() + SMALL);
                        share.is_some()
                    }
                };
                if !fits {
                    drop((all, share));
                    return Err(Problem::Busy { close: !self.drop_rest(seen).await });
                }
            }
            piece = self.next().await?;
        }
        Ok(Read { bytes: all.freeze(), share })
    }

    /// Reads at most about `most` bytes, and `false` if there is more. Of a body that says that it is larger than
    /// `max` nothing is read but what lets the client see its answer.
    pub async fn spool(&mut self, most: usize, max: u64, budget: &Budget) -> Result<(Read, bool), Problem> {
        if self.body.size_hint().lower() > max {
            return Err(Problem::TooLarge { max, close: self.waits || !self.drop_rest(0).await });
        }
        let mut all = BytesMut::new();
        let mut share: Option<Taken> = None;
        while all.len() < most {
            let Some(piece) = self.next().await? else { return Ok((Read { bytes: all.freeze(), share }, true)) };
            let fits = all.len() + piece.len() <= SMALL
                || match &mut share {
                    Some(share) => share.more(piece.len()),
                    None => {
                        share = budget.take(all.len() + piece.len());
                        share.is_some()
                    }
                };
            let seen = (all.len() + piece.len()) as u64;
            if seen > max {
                return Err(Problem::TooLarge { max, close: !self.drop_rest(seen).await });
            }
            if !fits {
                return Err(Problem::Busy { close: !self.drop_rest(seen).await });
            }
            all.extend_from_slice(&piece);
        }
        Ok((Read { bytes: all.freeze(), share }, false))
    }

    /// The next piece of data; trailers are passed over.
    pub async fn next(&mut self) -> Result<Option<Bytes>, Problem> {
        loop {
            let frame = poll_fn(|cx| Pin::new(&mut self.body).poll_frame(cx));
            match tokio::time::timeout_at(self.until, frame).await {
                Ok(None) => return Ok(None),
                Ok(Some(Ok(frame))) => {
                    let Ok(data) = frame.into_data() else { continue };
                    self.since += data.len();
                    if self.since >= BODY_PROGRESS {
                        self.until = Instant::now() + self.each;
                        self.since = 0;
                    }
                    return Ok(Some(data));
                }
                Ok(Some(Err(error))) if is_malformed(&error) => {
                    return Err(Problem::NotHttp { detail: "The body's chunks are not well formed." });
                }
                Ok(Some(Err(_))) | Err(_) => return Err(Problem::Incomplete),
            }
        }
    }

    /// Reads and forgets what is left. False if it was too much or broke off.
    async fn drop_rest(&mut self, mut seen: u64) -> bool {
        while seen <= DROP {
            match self.next().await {
                Ok(None) => return true,
                Ok(Some(bytes)) => seen += bytes.len() as u64,
                Err(_) => return false,
            }
        }
        false
    }
}

/// Wrong in itself, and not only broken off.
fn is_malformed(error: &hyper::Error) -> bool {
    let source = std::error::Error::source(error).and_then(|e| e.downcast_ref::<io::Error>());
    source.is_some_and(|e| matches!(e.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData))
}
