//! A name for each call, for finding it again in the log: the client's own, or one made here.

use std::sync::atomic::{AtomicU64, Ordering};

use hyper::HeaderMap;
use hyper::header::{HeaderName, HeaderValue};

/// Longest name of a client's that is taken over.
const BYTES: usize = 128;

pub static X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Visible ASCII.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestId(HeaderValue);

impl From<RequestId> for HeaderValue {
    fn from(id: RequestId) -> HeaderValue {
        id.0
    }
}

impl std::fmt::Display for RequestId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.0.to_str().unwrap_or_default())
    }
}

/// Makes them: a random part for the process, and a number.
#[derive(Debug)]
pub struct RequestIds {
    process: u32,
    next: AtomicU64,
}

impl RequestIds {
    pub fn new() -> Self {
        // Without randomness two processes may use the same names, which only their logs would show.
        let process = getrandom::u32().unwrap_or(std::process::id());
        RequestIds { process, next: AtomicU64::new(0) }
    }

    /// The client's, if it gave one that can stand in a log; else a new one.
    pub fn of(&self, headers: &HeaderMap) -> RequestId {
        let fits = |v: &&HeaderValue| (1..=BYTES).contains(&v.len()) && v.as_bytes().iter().all(u8::is_ascii_graphic);
        if let Some(given) = headers.get(&X_REQUEST_ID).filter(fits) {
            return RequestId(given.clone());
        }
        let n = self.next.fetch_add(1, Ordering::Relaxed);
        let mut text = [b'0'; 24];
        let digits = |room: &mut [u8], mut number: u64| {
            for place in room.iter_mut().rev() {
                *place = b"0123456789abcdef"[(number % 16) as usize];
                number /= 16;
            }
        };
        let (process, number) = text.split_at_mut(8);
        digits(process, self.process.into());
        digits(number, n);
        RequestId(HeaderValue::from_bytes(&text).unwrap_or_else(|_| HeaderValue::from_static("0")))
    }
}

impl Default for RequestIds {
    fn default() -> Self {
        RequestIds::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clients_own_or_a_new_one() {
        let ids = RequestIds::new();
        let given = |text: &[u8]| {
            let mut headers = HeaderMap::new();
            headers.insert(&X_REQUEST_ID, HeaderValue::from_bytes(text).unwrap());
            ids.of(&headers).to_string()
        };
        assert_eq!(given(b"abc-1"), "abc-1");
        for bad in [&b""[..], b"a b", b"a\tb", &[0xff], &[b'x'; 129]] {
            assert_eq!(given(bad).len(), 24, "{bad:?}");
        }
        assert_ne!(ids.of(&HeaderMap::new()), ids.of(&HeaderMap::new()));
    }
}
