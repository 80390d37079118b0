//! Why a command did not do what it should, and the status with which it ends.

use std::fmt;

use serde_json::{Value, json};

use super::client::{Refused, Trouble};

#[derive(Debug)]
pub enum Failed {
    /// Said already.
    Quietly,
    /// Something went wrong.
    Because(String),
    /// The server, or the store that was asked in its place, said no.
    Refused(Refused),
    /// The command line asks for what cannot be.
    Usage(String),
    /// The server cannot be reached, or cannot do it now: later it may. `said` is what it said, if it did.
    Unreachable { why: String, said: Option<Refused> },
    /// Ended by this signal.
    Signal { number: u8, why: String },
}

impl Failed {
    pub fn code(&self) -> u8 {
        match self {
            Failed::Quietly | Failed::Because(_) | Failed::Refused(_) => 1,
            Failed::Usage(_) => 2,
            Failed::Unreachable { .. } => 3,
            // As a shell would report a process that died of it.
            Failed::Signal { number, .. } => 128_u8.saturating_add(*number),
        }
    }

    /// As it is shown with `--json`, unless it was shown already: as a problem, with the server's status and code
    /// if it is the server's.
    pub fn json(&self) -> Option<Value> {
        let ours = |code: &str, why: &str| json!({"code": code, "detail": why});
        let problem = match self {
            Failed::Quietly => return None,
            Failed::Because(why) => ours("failed", why),
            Failed::Usage(why) => ours("wrong_usage", why),
            Failed::Unreachable { said: None, why } => ours("unreachable", why),
            Failed::Refused(refused) | Failed::Unreachable { said: Some(refused), .. } => refused.json(),
            Failed::Signal { why, .. } => ours("interrupted", why),
        };
        Some(json!({"problem": problem}))
    }
}

impl From<std::io::Error> for Failed {
    fn from(error: std::io::Error) -> Self {
        Failed::Because(error.to_string())
    }
}

impl From<Refused> for Failed {
    fn from(refused: Refused) -> Self {
        Failed::Refused(refused)
    }
}

impl From<Trouble> for Failed {
    fn from(trouble: Trouble) -> Self {
        match trouble {
            Trouble::Connection(why) => Failed::Unreachable {
                why: format!(
                    "{why}. Is it running? `leasehold` starts one; --server or LEASEHOLD_SERVER names another."
                ),
                said: None,
            },
            Trouble::Later { ref refused, .. } => {
                Failed::Unreachable { why: format!("{trouble} Try again later."), said: Some(refused.clone()) }
            }
            Trouble::Refused(refused) => refused.into(),
        }
    }
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failed::Quietly => Ok(()),
            Failed::Refused(refused) => f.write_str(&escaped(&refused.to_string())),
            Failed::Because(why)
            | Failed::Usage(why)
            | Failed::Unreachable { why, .. }
            | Failed::Signal { why, .. } => f.write_str(&escaped(why)),
        }
    }
}

/// On one line, and whatever stands in it can be read: a name that is not known may well be so for a tab in it.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_control() {
            out.extend(c.escape_debug());
        } else {
            out.push(c);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes() {
        let refused = |status| Refused { status, code: "c".into(), detail: "d".into() };
        let later = || Trouble::Later {
            refused: refused(hyper::StatusCode::SERVICE_UNAVAILABLE),
            after: std::time::Duration::ZERO,
        };
        assert_eq!(Failed::from(Trouble::Connection("x".into())).code(), 3);
        assert_eq!(Failed::from(later()).code(), 3);
        assert_eq!(Failed::Signal { number: 2, why: String::new() }.code(), 130);
        assert_eq!(Failed::from(Trouble::Refused(refused(hyper::StatusCode::NOT_FOUND))).code(), 1);
        assert_eq!((Failed::Usage(String::new()).code(), Failed::Quietly.code()), (2, 1));
        let problem = |failed: Failed| failed.json().map(|j| j["problem"].clone());
        assert_eq!(problem(Failed::Quietly), None);
        assert_eq!(problem(later().into()), Some(json!({"status": 503, "code": "c", "detail": "d"})));
        assert_eq!(problem(Failed::Because("x".into())), Some(json!({"code": "failed", "detail": "x"})));
    }

    #[test]
    fn what_is_said_is_one_line() {
        assert_eq!(Failed::Because("a\u{1b}[2J\nb \u{e9}".into()).to_string(), "a\\u{1b}[2J\\nb \u{e9}");
    }
}
