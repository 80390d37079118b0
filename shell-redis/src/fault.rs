//! What an error means: whether a call was certainly not applied, and whether this connection is of
//! any further use. The wordings differ between releases, proxies and the layers of the server, so
//! the first words decide, wherever they stand.

use leasehold_core::store::StoreError;
use redis::{ErrorKind, RedisError};

/// What became of a call that was not answered as it should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    pub error: StoreError,
    /// The connection, or the server behind it, should be looked for anew.
    pub reconnect: bool,
    pub text: String,
}

/// Refusals before anything was done, for which another connection may find a better server.
const ELSEWHERE: &[&str] =
    &["READONLY", "MASTERDOWN", "CLUSTERDOWN", "MOVED", "ASK", "UNBLOCKED", "NOAUTH", "WRONGPASS", "DENIED"];
/// Refusals before anything was done, that pass.
const LATER: &[&str] = &["LOADING", "BUSY", "TRYAGAIN", "NOREPLICAS", "MISCONF", "NOPERM", "NOSCRIPT", "CROSSSLOT"];

/// `sent`: the call may have left this process.
pub(crate) fn of(error: &RedisError, sent: bool) -> Fault {
    let text = error.to_string();
    let doubtful = if sent { StoreError::Unknown } else { StoreError::Unavailable };
    let Some(words) = said_by_server(error) else {
        return Fault { error: doubtful, reconnect: true, text };
    };
    // What is said from within a script may come after its first writes; these two are said of a
    // script as a whole, also where it stumbles over them.
    let within = words.contains("@user_script");
    if says(&words, &["OOM"]) {
        return Fault { error: StoreError::Full, reconnect: false, text };
    }
    if says(&words, ELSEWHERE) && (!within || says(&words, &["READONLY"])) {
        return Fault { error: StoreError::Unavailable, reconnect: true, text };
    }
    if says(&words, LATER) && !within {
        return Fault { error: StoreError::Unavailable, reconnect: false, text };
    }
    if words.contains("max number of clients") {
        return Fault { error: StoreError::Unavailable, reconnect: true, text };
    }
    Fault { error: doubtful, reconnect: false, text }
}

/// Whether the script was not known, and so not run.
pub(crate) fn is_noscript(error: &RedisError) -> bool {
    said_by_server(error).is_some_and(|words| says(&words, &["NOSCRIPT"]))
}

/// Whether who we are, or what we may do, is not accepted: nothing that waiting would change.
pub(crate) fn is_denied(error: &RedisError) -> bool {
    error.kind() == ErrorKind::AuthenticationFailed
        || said_by_server(error).is_some_and(|words| says(&words, &["WRONGPASS", "NOAUTH", "NOPERM"]))
}

/// The error as the server said it, or nothing if it was not the server.
fn said_by_server(error: &RedisError) -> Option<String> {
    let code = error.code()?;
    Some(format!("{code} {}", error.detail().unwrap_or_default()))
}

/// Whether one of the words begins the error, or comes right after a plain `ERR`.
fn says(words: &str, codes: &[&str]) -> bool {
    let mut first = words.split(|c: char| c.is_ascii_whitespace() || c == ':').filter(|w| !w.is_empty());
    let (one, two) = (first.next().unwrap_or_default(), first.next().unwrap_or_default());
    codes.iter().any(|code| one == *code || (one == "ERR" && two.trim_start_matches('-') == *code))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(line: &str) -> RedisError {
        let value = redis::parse_redis_value(format!("-{line}\r\n").as_bytes()).unwrap();
        value.extract_error().unwrap_err()
    }

    #[test]
    fn each_wording_has_its_meaning() {
        use StoreError::{Full, Unavailable, Unknown};
        let table = [
            ("READONLY You can't write against a read only replica.", Unavailable, true),
            ("READONLY You can't write against a read only replica. script: 0f, on @user_script:9.", Unavailable, true),
            ("ERR READONLY You can't write against a read only replica", Unavailable, true),
            ("READONLY You can not run script with write flag on readonly replica.", Unavailable, true),
            ("UNBLOCKED force unblock from blocking operation, instance state changed", Unavailable, true),
            ("MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.", Unavailable, true),
            ("CLUSTERDOWN The cluster is down", Unavailable, true),
            ("CLUSTERDOWN Hash slot not served", Unavailable, true),
            ("MOVED 3999 127.0.0.1:6381", Unavailable, true),
            ("NOAUTH Authentication required.", Unavailable, true),
            ("LOADING Redis is loading the dataset in memory", Unavailable, false),
            ("LOADING Valkey is loading the dataset in memory", Unavailable, false),
            (
                "BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.",
                Unavailable,
                false,
            ),
            ("TRYAGAIN Multiple keys request during rehashing of slot", Unavailable, false),
            ("NOREPLICAS Not enough good replicas to write.", Unavailable, false),
            (
                "MISCONF Redis is configured to save RDB snapshots, but it's unable to persist to disk.",
                Unavailable,
                false,
            ),
            ("ERR max number of clients reached", Unavailable, true),
            ("OOM command not allowed when used memory > 'maxmemory'.", Full, false),
            ("OOM allow-oom flag is not set on the script, can not run it when used memory > 'maxmemory'", Full, false),
            ("ERR value is not an integer script: 0f, on @user_script:9.", Unknown, false),
            ("NOPERM this user has no permissions script: 0f, on @user_script:9.", Unknown, false),
            ("WRONGTYPE Operation against a key script: 0f, on @user_script:9.", Unknown, false),
            ("ERR Error running script", Unknown, false),
        ];
        for (line, error, reconnect) in table {
            let fault = of(&said(line), true);
            assert_eq!((fault.error, fault.reconnect), (error, reconnect), "{line}");
        }
        assert!(is_noscript(&said("NOSCRIPT No matching script. Please use EVAL.")));
        assert!(is_denied(&said("WRONGPASS invalid username-password pair or user is disabled.")));
    }

    #[test]
    fn without_a_word_from_the_server_only_what_was_not_sent_is_certain() {
        let cut: RedisError = std::io::Error::from(std::io::ErrorKind::ConnectionReset).into();
        assert_eq!((of(&cut, true).error, of(&cut, false).error), (StoreError::Unknown, StoreError::Unavailable));
        assert!(of(&cut, true).reconnect);
    }
}
