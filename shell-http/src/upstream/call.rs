//! One call to an upstream, within its time-outs. Given up, it ends at the upstream too.

use std::fmt;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use hyper::body::{Body as _, Incoming};
use hyper::header::{DATE, RETRY_AFTER};
use hyper::http::response::Parts;
use hyper::{HeaderMap, Request, StatusCode};
use jiff::Timestamp;
use jiff::fmt::rfc2822::DateTimeParser;
use tokio::time::{Instant, timeout_at};

use super::Upstream;
use super::connect::Connection;
use super::slot::Token;
use crate::body::Body;

/// Why there is no answer, or not the whole of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// Nothing was sent.
    Unreachable,
    /// It hung up before the end.
    Broken,
    /// What came is not HTTP.
    Garbled,
    TimedOut,
}

impl Trouble {
    pub const fn text(self) -> &'static str {
        match self {
            Trouble::Unreachable => "The upstream could not be connected to",
            Trouble::Broken => "The upstream hung up before the end of its answer",
            Trouble::Garbled => "What the upstream answered is not HTTP",
            Trouble::TimedOut => "The upstream did not answer in time",
        }
    }
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())
    }
}

/// A call that was not answered.
#[derive(Debug)]
pub struct Unanswered {
    pub trouble: Trouble,
    /// Back again if nothing of it was sent: another upstream can have it.
    pub request: Option<Request<Body>>,
}

/// The head of an answer, and the rest as it comes.
#[derive(Debug)]
pub struct Answer {
    pub head: Parts,
    pub rest: Rest,
}

/// The body of an answer. Dropped before its end, the call is given up.
#[derive(Debug)]
pub struct Rest {
    body: Incoming,
    connection: Option<Connection>,
    under_way: UnderWay,
    until: Instant,
}

/// Counted as long as it lives.
#[derive(Debug)]
struct UnderWay(Arc<Upstream>);

impl UnderWay {
    fn begin(upstream: &Arc<Upstream>) -> UnderWay {
        upstream.calls.in_flight.fetch_add(1, Ordering::Relaxed);
        UnderWay(upstream.clone())
    }

    fn failed(&self, trouble: Trouble) {
        let calls = &self.0.calls;
        let count: &AtomicU64 = if trouble == Trouble::TimedOut { &calls.timed_out } else { &calls.failed };
        count.fetch_add(1, Ordering::Relaxed);
        self.0.failed();
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.calls.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Calls the upstream: the request's URI is a path and a query, and its Host header is set. `held` is held until
/// the upstream is certainly, or almost certainly, through with it.
pub async fn send(
    upstream: &Arc<Upstream>,
    mut request: Request<Body>,
    held: Option<Token>,
) -> Result<Answer, Unanswered> {
    let under_way = UnderWay::begin(upstream);
    let begun = Instant::now();
    let settings = &upstream.settings;
    let until = begun + settings.timeout;
    let first_byte = until.min(begun + settings.first_byte_timeout);
    let mut kept = upstream.connector.kept().await;
    loop {
        let reused = kept.is_some();
        let mut connection = match kept.take() {
            Some(connection) => connection,
            None => match timeout_at(first_byte.min(begun + settings.connect_timeout), upstream.connector.open()).await
            {
                Ok(Ok(connection)) => connection,
                failed => {
                    if let Ok(Err(error)) = failed {
                        tracing::debug!(upstream = upstream.name(), %error, "an upstream could not be connected to");
                    }
                    under_way.failed(Trouble::Unreachable);
                    return Err(Unanswered { trouble: Trouble::Unreachable, request: Some(request) });
                }
            },
        };
        connection.hold(held.clone());
        let trouble = match timeout_at(first_byte, connection.sender.try_send_request(request)).await {
            Ok(Ok(answer)) => {
                upstream.calls.answered.fetch_add(1, Ordering::Relaxed);
                upstream.answered();
                let (head, body) = answer.into_parts();
                return Ok(Answer { head, rest: Rest { body, connection: Some(connection), under_way, until } });
            }
            Ok(Err(mut error)) => match error.take_message() {
                // It was closed in the moment in which it was taken.
                Some(unsent) if reused => {
                    request = unsent;
                    continue;
                }
                _ => of_error(error.error()),
            },
            Err(_) => Trouble::TimedOut,
        };
        under_way.failed(trouble);
        return Err(Unanswered { trouble, request: None });
    }
}

fn of_error(error: &hyper::Error) -> Trouble {
    if error.is_parse() { Trouble::Garbled } else { Trouble::Broken }
}

impl Rest {
    /// The next piece; `None` at the end. Nothing is lost if this is dropped.
    pub async fn next(&mut self) -> Result<Option<Bytes>, Trouble> {
        loop {
            let trouble = match timeout_at(self.until, poll_fn(|cx| Pin::new(&mut self.body).poll_frame(cx))).await {
                Ok(Some(Ok(frame))) => match frame.into_data() {
                    Ok(data) => return Ok(Some(data)),
                    Err(_) => continue,
                },
                Ok(None) => {
                    if let Some(connection) = self.connection.take() {
                        self.under_way.0.connector.keep(connection);
                    }
                    return Ok(None);
                }
                Ok(Some(Err(error))) => of_error(&error),
                Err(_) => Trouble::TimedOut,
            };
            self.connection = None;
            self.under_way.failed(trouble);
            return Err(trouble);
        }
    }
}

/// How long the upstream asks to be left alone, if it does.
pub fn wants_a_pause(head: &Parts) -> Option<Duration> {
    let asks = matches!(head.status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE);
    retry_after(&head.headers).filter(|_| asks)
}

/// Seconds, or a date: that is by the clock of whoever sent it, if its answer tells what that shows.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let text = |name| headers.get(name)?.to_str().ok().map(str::trim);
    let date = |text| DateTimeParser::new().parse_timestamp(text).ok();
    let after = text(RETRY_AFTER)?;
    if let Ok(seconds) = after.parse() {
        return Some(Duration::from_secs(seconds));
    }
    let now = text(DATE).and_then(date).unwrap_or_else(Timestamp::now);
    // A date that has passed still says that this was too much: the next call comes a moment later.
    Some(Duration::try_from(date(after)?.duration_since(now)).unwrap_or_default().max(Duration::from_secs(1)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pause_is_seconds_or_a_date_by_the_clock_of_whoever_sent_it() {
        let asked = |after: &str, date: Option<&str>| {
            let mut headers = HeaderMap::new();
            headers.insert(RETRY_AFTER, after.parse().unwrap());
            date.map(|date| headers.insert(DATE, date.parse().unwrap()));
            retry_after(&headers)
        };
        let seconds = |n| Some(Duration::from_secs(n));
        assert_eq!([asked("120", None), asked(" 0 ", None)], [seconds(120), seconds(0)]);
        let date = Some("Sun, 06 Nov 1994 08:49:37 GMT");
        assert_eq!(asked("Sun, 06 Nov 1994 08:51:37 GMT", date), seconds(120));
        assert_eq!(asked("Sun, 06 Nov 1994 08:49:36 GMT", date), seconds(1));
        assert_eq!(asked("Sun, 06 Nov 1994 08:51:37 GMT", None), seconds(1), "long ago by the clock of this machine");
        assert_eq!([asked("soon", date), asked("-1", None), asked("1.5", None)], [None; 3]);
    }
}
