//! What clients hear when something was not done: problem details (RFC 9457).
//!
//! [`of_failure`] is the one table from the core's failures to HTTP.

use std::borrow::Cow;

use hyper::StatusCode;
use hyper::header::{ALLOW, CONNECTION, CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use leasehold_core::Failure;

use crate::body::{Body, Response};
use crate::wire::json::Object;

/// Why a call was not done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Problem {
    /// The replica's word.
    Failure(Failure),
    /// A part of the request is wrong: which one, and what it should be.
    Field {
        field: Cow<'static, str>,
        detail: Cow<'static, str>,
    },
    NotJson {
        detail: String,
    },
    Empty,
    /// The body is the payload, and should be JSON.
    NoPayload,
    UnknownPath,
    WrongMethod {
        allow: String,
    },
    TooLarge {
        max: u64,
        close: bool,
    },
    /// The body did not come in time, or broke off.
    Incomplete,
    /// This is not how HTTP is spoken.
    NotHttp {
        detail: &'static str,
    },
    UriTooLong {
        max: u64,
    },
    /// A browser sent this from another site.
    CrossOrigin,
    /// Bodies in work use all the memory that is set aside for them.
    Busy {
        close: bool,
    },
    /// All connections are taken.
    Crowded,
    /// No upstream has this model, or none that may have the work.
    UnknownModel,
    /// No upstream of the model is called for now.
    UpstreamUnavailable {
        retry_after_ms: u64,
    },
    /// The upstream did not answer, or not with HTTP.
    UpstreamFailed {
        detail: &'static str,
    },
    UpstreamTimeout,
    /// A defect of the server's.
    Internal,
}

impl From<Failure> for Problem {
    fn from(failure: Failure) -> Self {
        Problem::Failure(failure)
    }
}

/// Status, code, title and what to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    pub status: StatusCode,
    pub title: &'static str,
    pub detail: &'static str,
}

const fn row(status: StatusCode, title: &'static str, detail: &'static str) -> Row {
    Row { status, title, detail }
}

/// The one table. [`Failure::code`] names the code.
pub fn of_failure(failure: &Failure) -> Row {
    use StatusCode as S;
    match failure {
        Failure::Invalid { .. } => {
            row(S::UNPROCESSABLE_ENTITY, "A field is not valid", "Mend the field and send it again.")
        }
        Failure::UnknownJob => row(S::NOT_FOUND, "No such job", "There is no job with this id, or no longer."),
        Failure::UnknownGroup => row(S::NOT_FOUND, "No such group", "There is no group with this id, or no longer."),
        Failure::WrongOffset { .. } => {
            row(S::CONFLICT, "Not the next children", "Send the children from the index that is expected on.")
        }
        Failure::ChildDiffers { .. } => row(
            S::UNPROCESSABLE_ENTITY,
            "A child was created with another body",
            "A page that is repeated must be the same as before; nothing was changed.",
        ),
        Failure::NotOpen => row(
            S::CONFLICT,
            "The group takes no more children",
            "It is sealed, or was stopped. Create another group for what is left.",
        ),
        Failure::NotFinal => {
            row(S::CONFLICT, "The group is not final", "Wait for its end: GET the group with `wait_ms`.")
        }
        Failure::UnknownQueue => row(S::NOT_FOUND, "No such queue", "Nothing is known of a queue with this name."),
        Failure::UnknownPool => row(S::NOT_FOUND, "No such pool", "There is no pool with this name: PUT one."),
        Failure::PoolInUse => row(
            S::CONFLICT,
            "The pool is in use",
            "Somebody holds one of its slots or waits for one. Wait until all are given back.",
        ),
        Failure::PoolFull { .. } => row(
            S::TOO_MANY_REQUESTS,
            "No slot was free in time",
            "Nothing is held. Send it again after the time in Retry-After; with the same `slot_id` within 5 s it \
             keeps its place.",
        ),
        Failure::SlotLost => row(
            S::CONFLICT,
            "The slot is lost",
            "Its time had come, or it was given back. Stop what it was held for; nothing was changed.",
        ),
        Failure::NoPlacement => row(
            S::UNPROCESSABLE_ENTITY,
            "Nowhere to run it",
            "The work must stay on the premises (`on_prem`), and none of the routes of its queue leads to an upstream \
             there. Nothing was created.",
        ),
        Failure::UnknownUpstream => {
            row(S::NOT_FOUND, "No such upstream", "This server's configuration names no upstream so.")
        }
        Failure::UnknownKey => row(S::NOT_FOUND, "No such key", "Nothing is bound to this idempotency key."),
        Failure::BadCursor => {
            row(S::UNPROCESSABLE_ENTITY, "Not a cursor", "Give the `next` of an earlier answer to the same question.")
        }
        Failure::KeyReused => row(
            S::UNPROCESSABLE_ENTITY,
            "The idempotency key was used for something else",
            "The key names a job or a group that was submitted with another body: use another key.",
        ),
        Failure::NoResult => row(
            S::NOT_FOUND,
            "No result",
            "There is no result: the job has not succeeded, or the retention of its result has ended.",
        ),
        Failure::NoPayload => {
            row(S::NOT_FOUND, "No payload", "The payload is gone: its retention has ended, or it was lost.")
        }
        Failure::LeaseLost => row(
            S::CONFLICT,
            "The lease is lost",
            "The token is not the job's present one. Stop working on the job; nothing was changed.",
        ),
        Failure::JobCancelled => {
            row(S::CONFLICT, "The job was cancelled", "Stop working on the job; nothing was changed.")
        }
        Failure::AlreadyTerminal => {
            row(S::CONFLICT, "The job has ended", "The job has ended otherwise already, and stays so.")
        }
        Failure::NotRetryable => row(
            S::CONFLICT,
            "The job cannot be retried",
            "Only jobs that are dead, cancelled or expired and whose payload is kept can be retried.",
        ),
        Failure::NotTerminal => row(S::CONFLICT, "The job has not ended", "Cancel the job before deleting it."),
        Failure::Quarantined => row(
            S::CONFLICT,
            "The job is in quarantine",
            "The job's record cannot be read. It is never run and never deleted; an operator must look.",
        ),
        Failure::MailboxFull { .. } => row(
            S::TOO_MANY_REQUESTS,
            "Too much in work",
            "Certainly not done. Send it again after the time in Retry-After.",
        ),
        Failure::StoreUnavailable { .. } => row(
            S::SERVICE_UNAVAILABLE,
            "The store cannot be reached",
            "Certainly not done. Send it again after the time in Retry-After.",
        ),
        Failure::OutcomeUnknown { .. } => row(
            S::SERVICE_UNAVAILABLE,
            "The outcome is unknown",
            "It may have been done. Repeat it with the same idempotency key, token or claim id.",
        ),
        Failure::StoreFull { .. } => row(
            S::SERVICE_UNAVAILABLE,
            "The store is full",
            "Certainly not done. Send it again later; jobs that are completed or deleted make room.",
        ),
        Failure::Draining { .. } => row(
            S::SERVICE_UNAVAILABLE,
            "The server is going away",
            "Certainly not done. Ask another server, or this one after its restart.",
        ),
        Failure::NewerFormat { .. } => row(
            S::SERVICE_UNAVAILABLE,
            "The server is too old for the store",
            "Certainly not done. The store holds records of a newer release: upgrade this server.",
        ),
        Failure::Contended { .. } => row(
            S::SERVICE_UNAVAILABLE,
            "Lost every race",
            "Certainly not done: other requests for the same thing were always faster. Send it again.",
        ),
    }
}

impl Problem {
    /// Every code there is.
    pub const CODES: &[&str] = &[
        "already_terminal",
        "bad_cursor",
        "child_differs",
        "contended",
        "cross_origin",
        "draining",
        "empty_body",
        "idempotency_key_reused",
        "incomplete_body",
        "internal",
        "invalid_field",
        "job_cancelled",
        "lease_lost",
        "mailbox_full",
        "newer_format",
        "no_payload",
        "no_placement",
        "no_result",
        "not_final",
        "not_http",
        "not_json",
        "not_open",
        "not_retryable",
        "not_terminal",
        "outcome_unknown",
        "pool_full",
        "pool_in_use",
        "quarantined",
        "slot_lost",
        "store_full",
        "store_unavailable",
        "too_large",
        "too_many_connections",
        "unknown_group",
        "unknown_job",
        "unknown_key",
        "unknown_model",
        "unknown_path",
        "unknown_pool",
        "unknown_queue",
        "unknown_upstream",
        "upstream_failed",
        "upstream_timeout",
        "upstream_unavailable",
        "uri_too_long",
        "wrong_method",
        "wrong_offset",
    ];

    pub fn field(field: impl Into<Cow<'static, str>>, detail: impl Into<Cow<'static, str>>) -> Problem {
        Problem::Field { field: field.into(), detail: detail.into() }
    }

    /// The same complaint about something that stands inside of another.
    pub fn within(self, outer: &str) -> Problem {
        match self {
            Problem::Field { field, detail } => Problem::field(format!("{outer}.{field}"), detail),
            other => other,
        }
    }

    pub fn row(&self) -> Row {
        use StatusCode as S;
        match self {
            Problem::Failure(failure) => of_failure(failure),
            Problem::Field { .. } => {
                row(S::UNPROCESSABLE_ENTITY, "A field is not valid", "Mend the field and send it again.")
            }
            Problem::NotJson { .. } => row(S::BAD_REQUEST, "Not JSON", "Send one JSON value as the body."),
            Problem::Empty => row(S::BAD_REQUEST, "The body is empty", "This call needs a JSON object as its body."),
            Problem::NoPayload => row(
                S::BAD_REQUEST,
                "The body is empty",
                "The body is the payload, and with the content type application/json it has to be JSON: send `null` if \
                 there is nothing to say.",
            ),
            Problem::UnknownPath => row(S::NOT_FOUND, "No such path", "See /openapi.json for what there is."),
            Problem::WrongMethod { .. } => {
                row(S::METHOD_NOT_ALLOWED, "Wrong method", "Use one of the methods in the Allow header.")
            }
            Problem::TooLarge { .. } => {
                row(S::PAYLOAD_TOO_LARGE, "The body is too large", "Send less, or have `max_body` raised.")
            }
            Problem::Incomplete => {
                row(S::REQUEST_TIMEOUT, "The body did not come", "Nothing was done. Send the whole request again.")
            }
            Problem::NotHttp { .. } => row(S::BAD_REQUEST, "Not HTTP", "Send a request as RFC 9112 has it."),
            Problem::UriTooLong { .. } => {
                row(S::URI_TOO_LONG, "The URI is too long", "Send less in the path and the query.")
            }
            Problem::CrossOrigin => row(
                S::FORBIDDEN,
                "From another site",
                "Calls that change something are not taken from pages of other sites.",
            ),
            Problem::Busy { .. } => row(
                S::TOO_MANY_REQUESTS,
                "Too much in work",
                "Certainly not done. Send it again after the time in Retry-After.",
            ),
            Problem::Crowded => row(
                S::SERVICE_UNAVAILABLE,
                "Too many connections",
                "Certainly not done. Send it again after the time in Retry-After, or over a connection that is open.",
            ),
            Problem::UnknownModel => row(
                S::NOT_FOUND,
                "No such model",
                "No upstream has this model, or none that is on_prem if that is asked for. Nothing was sent.",
            ),
            Problem::UpstreamUnavailable { .. } => row(
                S::SERVICE_UNAVAILABLE,
                "No upstream can be called",
                "Each upstream of this model has failed lately or has asked to be left alone. Nothing was sent: send \
                 it again after the time in Retry-After.",
            ),
            Problem::UpstreamFailed { .. } => {
                row(S::BAD_GATEWAY, "The upstream failed", "It may have done some of what it was asked for.")
            }
            Problem::UpstreamTimeout => row(
                S::GATEWAY_TIMEOUT,
                "The upstream took too long",
                "It was hung up on. It may have done some of what it was asked for.",
            ),
            Problem::Internal => row(
                S::INTERNAL_SERVER_ERROR,
                "A defect of the server",
                "It may have been done. Report it with the X-Request-Id of this answer.",
            ),
        }
    }

    pub fn code(&self) -> &'static str {
        match self {
            Problem::Failure(failure) => failure.code(),
            Problem::Field { .. } => "invalid_field",
            Problem::NotJson { .. } => "not_json",
            Problem::Empty | Problem::NoPayload => "empty_body",
            Problem::UnknownPath => "unknown_path",
            Problem::WrongMethod { .. } => "wrong_method",
            Problem::TooLarge { .. } => "too_large",
            Problem::Incomplete => "incomplete_body",
            Problem::NotHttp { .. } => "not_http",
            Problem::UriTooLong { .. } => "uri_too_long",
            Problem::CrossOrigin => "cross_origin",
            Problem::Busy { .. } => "mailbox_full",
            Problem::Crowded => "too_many_connections",
            Problem::UnknownModel => "unknown_model",
            Problem::UpstreamUnavailable { .. } => "upstream_unavailable",
            Problem::UpstreamFailed { .. } => "upstream_failed",
            Problem::UpstreamTimeout => "upstream_timeout",
            Problem::Internal => "internal",
        }
    }

    pub fn status(&self) -> StatusCode {
        self.row().status
    }

    /// Seconds, rounded up; on every 429 and 503.
    pub fn retry_after(&self) -> Option<u64> {
        match self {
            Problem::Failure(failure) => failure.retry_after_ms().map(|ms| ms.div_ceil(1_000).max(1)),
            Problem::UpstreamUnavailable { retry_after_ms } => Some(retry_after_ms.div_ceil(1_000).max(1)),
            Problem::Busy { .. } | Problem::Crowded => Some(1),
            _ => None,
        }
    }

    /// As JSON, also for one item of a batch.
    pub fn write(&self, out: &mut Vec<u8>) {
        let Row { status, title, detail } = self.row();
        let mut object = Object::new(out);
        object.raw("type", format_args!("\"urn:leasehold:problem:{}\"", self.code()));
        object.str("title", title);
        object.num("status", u64::from(status.as_u16()));
        object.str("code", self.code());
        match self {
            Problem::Failure(Failure::Invalid { field, detail }) => {
                object.str("detail", detail);
                object.str("field", field);
            }
            Problem::Failure(Failure::WrongOffset { expected }) => {
                object.str("detail", detail);
                object.num("expected", (*expected).into());
            }
            Problem::Failure(Failure::ChildDiffers { index }) => {
                object.str("detail", detail);
                object.str("field", "children");
                object.num("index", (*index).into());
            }
            Problem::Failure(Failure::PoolFull { position, estimated_wait_ms, .. }) => {
                object.str("detail", detail);
                object.num("position", *position);
                object.num("estimated_wait_ms", *estimated_wait_ms);
            }
            Problem::Failure(Failure::BadCursor) => {
                object.str("detail", detail);
                object.str("field", "cursor");
            }
            Problem::Field { field, detail } => {
                object.str("detail", detail);
                object.str("field", field);
            }
            Problem::NotJson { detail } => object.str("detail", detail),
            Problem::NotHttp { detail } => object.str("detail", detail),
            Problem::UpstreamFailed { detail: what } => object.str("detail", &format!("{what}. {detail}")),
            Problem::UriTooLong { max } => object.str("detail", &format!("A URI may have {max} bytes. {detail}")),
            Problem::TooLarge { max, .. } => object.str("detail", &format!("A body may have {max} bytes. {detail}")),
            _ => object.str("detail", detail),
        }
        if let Some(seconds) = self.retry_after() {
            object.num("retry_after_s", seconds);
        }
        object.end();
    }

    pub fn response(&self) -> Response {
        let mut out = Vec::with_capacity(320);
        self.write(&mut out);
        let mut response = Response::new(Body::full(out));
        *response.status_mut() = self.status();
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        if let Some(seconds) = self.retry_after() {
            headers.insert(RETRY_AFTER, HeaderValue::from(seconds));
        }
        match self {
            Problem::WrongMethod { allow } => {
                if let Ok(allow) = HeaderValue::from_str(allow) {
                    headers.insert(ALLOW, allow);
                }
            }
            Problem::TooLarge { close: true, .. }
            | Problem::Busy { close: true }
            | Problem::Incomplete
            | Problem::NotHttp { .. }
            | Problem::Crowded => {
                headers.insert(CONNECTION, HeaderValue::from_static("close"));
            }
            _ => {}
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> Vec<Failure> {
        let retry_after_ms = 1_001;
        vec![
            Failure::Invalid { field: "queue", detail: "must not be empty".into() },
            Failure::UnknownJob,
            Failure::UnknownQueue,
            Failure::UnknownPool,
            Failure::PoolInUse,
            Failure::SlotLost,
            Failure::NoPlacement,
            Failure::UnknownUpstream,
            Failure::PoolFull { position: 3, estimated_wait_ms: 7, retry_after_ms },
            Failure::BadCursor,
            Failure::KeyReused,
            Failure::NoResult,
            Failure::NoPayload,
            Failure::LeaseLost,
            Failure::JobCancelled,
            Failure::AlreadyTerminal,
            Failure::NotRetryable,
            Failure::NotTerminal,
            Failure::Quarantined,
            Failure::MailboxFull { retry_after_ms },
            Failure::StoreUnavailable { retry_after_ms },
            Failure::OutcomeUnknown { retry_after_ms },
            Failure::StoreFull { retry_after_ms },
            Failure::Draining { retry_after_ms },
            Failure::NewerFormat { retry_after_ms },
            Failure::Contended { retry_after_ms },
        ]
    }

    #[test]
    fn the_table_keeps_its_word() {
        let expected = [
            422, 404, 404, 404, 409, 409, 422, 404, 429, 422, 422, 404, 404, 409, 409, 409, 409, 409, 409, 429, 503,
            503, 503, 503, 503, 503,
        ];
        for (failure, expected) in all().into_iter().zip(expected) {
            let problem = Problem::from(failure.clone());
            assert_eq!(problem.status().as_u16(), expected, "{failure:?}");
            let response = problem.response();
            let retry = response.headers().get(RETRY_AFTER).map(|v| v.to_str().unwrap().to_owned());
            assert_eq!(retry.as_deref(), matches!(expected, 429 | 503).then_some("2"), "{failure:?}");
            let mut out = Vec::new();
            problem.write(&mut out);
            let json: serde_json::Value = serde_json::from_slice(&out).unwrap();
            assert_eq!(json["code"], failure.code());
            assert!(Problem::CODES.contains(&failure.code()), "{failure:?}");
            assert_eq!(json["status"], expected);
            assert!(json["detail"].as_str().is_some_and(|d| !d.is_empty()), "{failure:?}");
            assert_eq!(json.get("field").is_some(), matches!(failure, Failure::Invalid { .. } | Failure::BadCursor));
        }
    }
}
