//! One connection: how long it may take over each thing, and how it ends.
//!
//! hyper speaks HTTP/1.1; around its socket stands [`Paced`], which knows whether the connection is
//! between calls, in the middle of a head, or in a call, and ends it when that has taken too long.

use std::future::Future as _;
use std::io;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, watch};
use tokio::time::{Instant, Sleep};

use crate::limits::{DROP, LINGER, Limits, SPARE_TIMEOUT};
use crate::routes::{App, handle};

/// What a connection is doing, and since when.
///
/// ```text
///   Idle --first byte--> Head --last byte--> Call --answer sent--> Idle
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Idle,
    Head,
    /// The call has time-outs of its own: for its body, for a poll, for the store.
    Call,
}

/// Shared between a connection's socket and its calls.
#[derive(Debug)]
pub struct Pace {
    now: Mutex<(Phase, Instant)>,
    /// The server waits for no more calls.
    ending: AtomicBool,
}

impl Pace {
    fn new() -> Self {
        Pace { now: Mutex::new((Phase::Idle, Instant::now())), ending: AtomicBool::new(false) }
    }

    fn lock(&self) -> MutexGuard<'_, (Phase, Instant)> {
        // Two plain values: a panic elsewhere leaves nothing half done in them.
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn enter(&self, phase: Phase) {
        *self.lock() = (phase, Instant::now());
    }

    /// Bytes have come.
    fn heard(&self) {
        let mut now = self.lock();
        if now.0 == Phase::Idle {
            *now = (Phase::Head, Instant::now());
        }
    }
}

/// A call in work. Given with the answer's body, it ends when that has been sent or given up.
#[derive(Debug)]
pub struct InCall(Arc<Pace>);

impl Drop for InCall {
    fn drop(&mut self) {
        self.0.enter(Phase::Idle);
    }
}

/// What a call knows of its connection.
#[derive(Clone, Debug)]
pub struct Connection {
    pace: Arc<Pace>,
    /// Beyond the limit: served only to be told so, and for a look at the server's health.
    pub spare: bool,
}

impl Connection {
    pub fn begin(&self) -> InCall {
        self.pace.enter(Phase::Call);
        InCall(self.pace.clone())
    }
}

/// A place among the connections; given back when dropped.
#[derive(Debug)]
pub struct Place {
    pub permit: OwnedSemaphorePermit,
    pub spare: bool,
}

/// Serves one connection to its end. `ending` becomes true when the server stops waiting for calls.
pub async fn serve(stream: TcpStream, app: Arc<App>, place: Place, mut ending: watch::Receiver<bool>) {
    // Answers are small and wait for nothing.
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "a connection was gone at once");
        return;
    }
    app.counters.connections.fetch_add(1, Ordering::Relaxed);
    app.counters.open_connections.fetch_add(1, Ordering::Relaxed);
    let _open = Open(app.clone());
    let pace = Arc::new(Pace::new());
    let connection = Connection { pace: pace.clone(), spare: place.spare };
    let io = TokioIo::new(Paced::new(stream, pace.clone(), Times::of(&app.limits, place.spare)));
    let max_head = usize::try_from(app.limits.max_head).unwrap_or(usize::MAX);
    let service = service_fn(move |request| handle(app.clone(), connection.clone(), request));
    let mut builder = http1::Builder::new();
    // The socket keeps the time, see above.
    builder.header_read_timeout(None).max_header_size(max_head);
    let mut serving = pin!(builder.serve_connection(io, service));
    let result = tokio::select! {
        result = serving.as_mut() => result,
        () = told(&mut ending) => {
            // Not hyper's own way to end: it would not look whether a call has just come.
            pace.ending.store(true, Ordering::Relaxed);
            serving.await
        }
    };
    if let Err(error) = result {
        tracing::debug!(%error, "a connection broke off");
    }
    drop(place);
}

async fn told(ending: &mut watch::Receiver<bool>) {
    // An error means that the server is past caring.
    let _ = ending.wait_for(|e| *e).await;
}

struct Open(Arc<App>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.counters.open_connections.fetch_sub(1, Ordering::Relaxed);
    }
}

#[derive(Clone, Copy, Debug)]
struct Times {
    head: Duration,
    idle: Duration,
    write: Duration,
}

impl Times {
    fn of(limits: &Limits, spare: bool) -> Times {
        let cap = if spare { SPARE_TIMEOUT } else { Duration::MAX };
        Times {
            head: limits.head_timeout.min(cap),
            idle: limits.idle_timeout.min(cap),
            write: limits.write_timeout.min(cap),
        }
    }
}

/// A socket that gives up on a peer that takes too long.
#[derive(Debug)]
struct Paced<S> {
    io: S,
    pace: Arc<Pace>,
    times: Times,
    /// Fires at some deadline or before it, and is then set anew: a call that goes quickly does not
    /// touch the timer.
    sleep: Pin<Box<Sleep>>,
    /// Since when the peer has taken nothing of what is being sent.
    stuck: Option<Instant>,
    /// Since when everything has been sent.
    closing: Option<Instant>,
    dropped: u64,
    /// It was closed while it waited for a call: there is no answer to be lost.
    unasked: bool,
}

impl<S> Paced<S> {
    fn new(io: S, pace: Arc<Pace>, times: Times) -> Self {
        let sleep = Box::pin(tokio::time::sleep(times.idle));
        Paced { io, pace, times, sleep, stuck: None, closing: None, dropped: 0, unasked: false }
    }

    /// Whether the deadline has passed; if not, the task is woken when it has.
    fn is_late(&mut self, cx: &mut Context<'_>, deadline: Instant) -> bool {
        if self.sleep.deadline() > deadline {
            self.sleep.as_mut().reset(deadline);
        }
        while self.sleep.as_mut().poll(cx).is_ready() {
            if Instant::now() >= deadline {
                return true;
            }
            self.sleep.as_mut().reset(deadline);
        }
        false
    }

    /// Whether no call is under way and none is waited for. To hyper it is as if the peer had closed.
    fn is_over(&self) -> bool {
        self.pace.ending.load(Ordering::Relaxed) && self.pace.lock().0 == Phase::Idle
    }

    fn read_deadline(&self) -> Option<Instant> {
        let (phase, since) = *self.pace.lock();
        match phase {
            Phase::Idle => Some(since + self.times.idle),
            Phase::Head => Some(since + self.times.head),
            Phase::Call => None,
        }
    }

    fn wrote<T>(&mut self, cx: &mut Context<'_>, result: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if result.is_ready() {
            self.stuck = None;
            return result;
        }
        let since = *self.stuck.get_or_insert_with(Instant::now);
        if self.is_late(cx, since + self.times.write) { Poll::Ready(Err(late())) } else { Poll::Pending }
    }
}

fn late() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "the peer took too long")
}

impl<S: AsyncRead + Unpin> AsyncRead for Paced<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buf.filled().len();
        match Pin::new(&mut this.io).poll_read(cx, buf) {
            Poll::Ready(result) => {
                if buf.filled().len() > before {
                    this.pace.heard();
                }
                Poll::Ready(result)
            }
            Poll::Pending if this.is_over() => {
                this.unasked = true;
                Poll::Ready(Ok(()))
            }
            Poll::Pending => match this.read_deadline() {
                Some(deadline) if this.is_late(cx, deadline) => Poll::Ready(Err(late())),
                _ => Poll::Pending,
            },
        }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Paced<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let result = Pin::new(&mut this.io).poll_write(cx, buf);
        this.wrote(cx, result)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let result = Pin::new(&mut this.io).poll_write_vectored(cx, bufs);
        this.wrote(cx, result)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let result = Pin::new(&mut this.io).poll_flush(cx);
        this.wrote(cx, result)
    }

    /// Says that nothing more comes, and then waits for the peer to close, dropping what it sends:
    /// a socket that is closed with bytes unread is reset, and the peer loses the answer.
    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let since = match this.closing {
            Some(since) => since,
            None => {
                ready!(Pin::new(&mut this.io).poll_shutdown(cx))?;
                *this.closing.insert(Instant::now())
            }
        };
        if this.unasked {
            return Poll::Ready(Ok(()));
        }
        let mut scratch = [0; 8 * 1024];
        loop {
            let mut buf = ReadBuf::new(&mut scratch);
            match Pin::new(&mut this.io).poll_read(cx, &mut buf) {
                Poll::Ready(Ok(())) if !buf.filled().is_empty() && this.dropped <= DROP => {
                    this.dropped += buf.filled().len() as u64;
                }
                Poll::Ready(_) => return Poll::Ready(Ok(())),
                Poll::Pending if this.is_late(cx, since + LINGER) => return Poll::Ready(Ok(())),
                Poll::Pending => return Poll::Pending,
            }
        }
    }
}
