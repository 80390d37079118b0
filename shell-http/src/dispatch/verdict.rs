//! What an upstream's answer means for its job.

use std::time::Duration;

use bytes::Bytes;
use hyper::StatusCode;
use hyper::header::CONTENT_TYPE;
use hyper::http::response::Parts;
use leasehold_core::job::record::ErrorInfo;
use leasehold_core::opaque::Content;
use serde_json::value::RawValue;

use crate::upstream::call::{Trouble, wants_a_pause};
use crate::wire::submit::{content_type_of, is_json};

/// Of an error's body so much is kept, as text.
pub const HEAD_BYTES: usize = 2 * 1024;

/// What becomes of the job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Done, perhaps without a result.
    Complete(Option<Content>),
    Fail {
        error: ErrorInfo,
        retryable: bool,
    },
    /// The upstream wants to be left alone: the job goes back, and the attempt does not count.
    Pause(Duration),
    /// It was not called, or was stopped: the job goes back.
    Release,
}

/// What an answer means before its body has been read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Meaning {
    Success,
    Pause(Duration),
    Failure { retryable: bool },
}

pub fn meaning(head: &Parts) -> Meaning {
    if let Some(pause) = wants_a_pause(head) {
        return Meaning::Pause(pause);
    }
    let status = head.status;
    let later = [StatusCode::REQUEST_TIMEOUT, StatusCode::TOO_EARLY, StatusCode::TOO_MANY_REQUESTS];
    match status.as_u16() {
        200..=299 => Meaning::Success,
        400..=499 => Meaning::Failure { retryable: later.contains(&status) },
        500..=599 => Meaning::Failure { retryable: true },
        // Nobody here follows a redirection: it would leave the upstream that was configured.
        _ => Meaning::Failure { retryable: false },
    }
}

/// The result of a success.
pub fn result(head: &Parts, body: Bytes) -> Option<Content> {
    if body.is_empty() {
        return None;
    }
    let kind = head.headers.get(CONTENT_TYPE).and_then(|v| v.to_str().ok()).unwrap_or_default();
    if is_json(kind) && serde_json::from_slice::<&RawValue>(&body).is_ok() {
        return Some(Content::json(body));
    }
    let kind = content_type_of("content_type", kind.to_owned());
    Some(Content::binary(kind.unwrap_or_else(|_| "application/octet-stream".into()), body))
}

/// A failure that the upstream told.
pub fn told(head: &Parts, body: &[u8], retryable: bool) -> Verdict {
    let text = String::from_utf8_lossy(&body[..body.len().min(HEAD_BYTES)]).into_owned();
    let status = head.status.as_u16();
    let error = ErrorInfo {
        message: format!("the upstream answered {status}"),
        kind: Some(format!("http_{status}")),
        detail: Some(text).filter(|t| !t.is_empty()),
    };
    Verdict::Fail { error, retryable }
}

/// A failure that the upstream did not tell.
pub fn failed(message: &str, kind: &str, retryable: bool) -> Verdict {
    let error = ErrorInfo { message: message.into(), kind: Some(kind.into()), detail: None };
    Verdict::Fail { error, retryable }
}

pub fn of_trouble(trouble: Trouble) -> Verdict {
    let kind = match trouble {
        Trouble::Unreachable => "upstream_unreachable",
        Trouble::Broken => "upstream_broken",
        Trouble::Garbled => "upstream_garbled",
        Trouble::TimedOut => "upstream_timeout",
    };
    failed(trouble.text(), kind, true)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(status: u16, headers: &[(&str, &str)]) -> Parts {
        let mut builder = hyper::Response::builder().status(status);
        for (name, value) in headers {
            builder = builder.header(*name, *value);
        }
        builder.body(()).unwrap().into_parts().0
    }

    #[test]
    fn statuses_mean_what_the_contract_says() {
        let retryable = |retryable| Meaning::Failure { retryable };
        for (status, headers, expected) in [
            (200, &[][..], Meaning::Success),
            (204, &[][..], Meaning::Success),
            (302, &[][..], retryable(false)),
            (400, &[][..], retryable(false)),
            (404, &[][..], retryable(false)),
            (408, &[][..], retryable(true)),
            (425, &[][..], retryable(true)),
            (429, &[][..], retryable(true)),
            (429, &[("retry-after", "7")][..], Meaning::Pause(Duration::from_secs(7))),
            (429, &[("retry-after", "soon")][..], retryable(true)),
            (422, &[("retry-after", "7")][..], retryable(false)),
            (500, &[][..], retryable(true)),
            (503, &[][..], retryable(true)),
            (503, &[("retry-after", "7")][..], Meaning::Pause(Duration::from_secs(7))),
        ] {
            assert_eq!(meaning(&head(status, headers)), expected, "{status} {headers:?}");
        }
    }

    #[test]
    fn results_keep_their_form() {
        let got = |kind: &str, body: &'static str| result(&head(200, &[("content-type", kind)]), body.into());
        assert_eq!(got("application/json", "{\"a\":1}"), Some(Content::json("{\"a\":1}")));
        assert_eq!(got("text/plain", "a"), Some(Content::binary("text/plain", "a")));
        assert_eq!(got("application/json", "{"), Some(Content::binary("application/json", "{")));
        assert_eq!(got("nonsense", "a"), Some(Content::binary("application/octet-stream", "a")));
        assert_eq!(got("text/plain", ""), None);
    }

    #[test]
    fn an_error_keeps_the_head_of_its_body() {
        let Verdict::Fail { error, retryable } = told(&head(404, &[]), &[b'x'; 10_000], false) else { panic!() };
        assert_eq!((error.kind.as_deref(), retryable), (Some("http_404"), false));
        assert_eq!(error.detail.map(|d| d.len()), Some(HEAD_BYTES));
    }
}
