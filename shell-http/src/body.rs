//! Bodies: what comes in, read up to a bound, and what goes out.

use std::convert::Infallible;
use std::future::poll_fn;
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

use crate::problem::Problem;

pub type Response = hyper::Response<Body>;

/// What follows a body that is too large is read and dropped up to here, so that the client gets to
/// read its answer.
const DROP: u64 = 64 * 1024 * 1024;
/// Longest pause within a body.
const PAUSE: Duration = Duration::from_secs(30);
/// Bodies below this are not counted against the memory for bodies.
const SMALL: usize = 64 * 1024;

/// An answer's body: whole, or in pieces as they come.
#[derive(Debug)]
pub enum Body {
    Full(Option<Bytes>),
    Stream(mpsc::Receiver<Bytes>),
}

impl Body {
    pub fn empty() -> Body {
        Body::Full(None)
    }

    pub fn full(bytes: impl Into<Bytes>) -> Body {
        Body::Full(Some(bytes.into()))
    }
}

impl HttpBody for Body {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match self.get_mut() {
            Body::Full(bytes) => Poll::Ready(bytes.take().map(|b| Ok(Frame::data(b)))),
            Body::Stream(pieces) => pieces.poll_recv(cx).map(|piece| piece.map(|b| Ok(Frame::data(b)))),
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, Body::Full(None))
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Body::Full(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, Bytes::len) as u64),
            Body::Stream(_) => SizeHint::default(),
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

/// Reads and drops a body that nobody wants, so that the client gets to read its answer.
pub async fn forget(mut body: Incoming, headers: &HeaderMap) {
    if !body.is_end_stream() && headers.get(EXPECT).is_none() {
        drop_rest(&mut body, 0).await;
    }
}

/// Reads a whole body of at most `max` bytes.
pub async fn read(mut body: Incoming, headers: &HeaderMap, max: u64, budget: &Budget) -> Result<Read, Problem> {
    let hint = body.size_hint();
    if hint.lower() > max {
        // Who waits to be told to go on has not sent anything yet.
        let waits = headers.get(EXPECT).is_some();
        let close = waits || !drop_rest(&mut body, 0).await;
        return Err(Problem::TooLarge { max, close });
    }
    let mut share = None;
    if let Some(len) = hint.exact().and_then(|n| usize::try_from(n).ok())
        && len > SMALL
    {
        share = Some(budget.take(len).ok_or(Problem::Busy)?);
    }
    let Some(first) = next(&mut body).await? else { return Ok(Read { bytes: Bytes::new(), share }) };
    if body.is_end_stream() && first.len() as u64 <= max {
        return Ok(Read { bytes: first, share });
    }
    let mut all = BytesMut::with_capacity(hint.exact().map_or(first.len() * 2, |n| n as usize));
    let mut piece = Some(first);
    while let Some(bytes) = piece {
        if all.len() as u64 + bytes.len() as u64 > max {
            let seen = all.len() as u64 + bytes.len() as u64;
            drop((all, share));
            let close = !drop_rest(&mut body, seen).await;
            return Err(Problem::TooLarge { max, close });
        }
        all.extend_from_slice(&bytes);
        let counted = share.as_ref().map_or(SMALL, |s| s.bytes);
        if all.len() > counted {
            let more = all.len() - counted + SMALL;
            match &mut share {
                None => share = Some(budget.take(all.len() + SMALL).ok_or(Problem::Busy)?),
                Some(share) => {
                    if !share.more(more) {
                        return Err(Problem::Busy);
                    }
                }
            }
        }
        piece = next(&mut body).await?;
    }
    Ok(Read { bytes: all.freeze(), share })
}

/// The next piece of data; trailers are passed over.
async fn next(body: &mut Incoming) -> Result<Option<Bytes>, Problem> {
    loop {
        let frame = poll_fn(|cx| Pin::new(&mut *body).poll_frame(cx));
        match tokio::time::timeout(PAUSE, frame).await {
            Ok(None) => return Ok(None),
            Ok(Some(Ok(frame))) => {
                if let Ok(data) = frame.into_data() {
                    return Ok(Some(data));
                }
            }
            Ok(Some(Err(_))) | Err(_) => return Err(Problem::Incomplete),
        }
    }
}

/// Reads and forgets what is left. False if it was too much or broke off.
async fn drop_rest(body: &mut Incoming, mut seen: u64) -> bool {
    while seen <= DROP {
        match next(body).await {
            Ok(None) => return true,
            Ok(Some(bytes)) => seen += bytes.len() as u64,
            Err(_) => return false,
        }
    }
    false
}
