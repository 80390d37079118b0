//! Why a command did not do what it should, and the status with which it ends.

use std::fmt;

use super::client::{Refused, Trouble};

#[derive(Debug)]
pub enum Failed {
    /// Said already.
    Quietly,
    /// Something was refused or went wrong.
    Because(String),
    /// The command line asks for what cannot be.
    Usage(String),
    /// The server cannot be reached, or cannot do it now: later it may.
    Unreachable(String),
    /// Ended by this signal.
    Signal { number: u8, why: String },
}

impl Failed {
    pub fn code(&self) -> u8 {
        match self {
            Failed::Quietly | Failed::Because(_) => 1,
            Failed::Usage(_) => 2,
            Failed::Unreachable(_) => 3,
            // As a shell would report a process that died of it.
            Failed::Signal { number, .. } => 128_u8.saturating_add(*number),
        }
    }
}

impl From<std::io::Error> for Failed {
    fn from(error: std::io::Error) -> Self {
        Failed::Because(error.to_string())
    }
}

impl From<Refused> for Failed {
    fn from(refused: Refused) -> Self {
        Failed::Because(refused.to_string())
    }
}

impl From<Trouble> for Failed {
    fn from(trouble: Trouble) -> Self {
        match trouble {
            Trouble::Connection(why) => Failed::Unreachable(format!(
                "{why}. Is it running? `leasehold` starts one; --server or LEASEHOLD_SERVER names another."
            )),
            Trouble::Later { .. } => Failed::Unreachable(format!("{trouble} Try again later.")),
            Trouble::Refused(refused) => refused.into(),
        }
    }
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failed::Quietly => Ok(()),
            Failed::Because(why) | Failed::Usage(why) | Failed::Unreachable(why) | Failed::Signal { why, .. } => {
                f.write_str(&super::printable(why))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes() {
        let later = Trouble::Later { problem: "503 draining: x.".into(), after: std::time::Duration::ZERO };
        assert_eq!(Failed::from(Trouble::Connection("x".into())).code(), 3);
        assert_eq!(Failed::from(later).code(), 3);
        assert_eq!(Failed::Signal { number: 2, why: String::new() }.code(), 130);
        let refused = Refused { status: hyper::StatusCode::NOT_FOUND, code: "c".into(), detail: "d".into() };
        assert_eq!(Failed::from(Trouble::Refused(refused)).code(), 1);
        assert_eq!((Failed::Usage(String::new()).code(), Failed::Quietly.code()), (2, 1));
    }
}
