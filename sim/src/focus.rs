//! What a trace is narrowed down to.

use std::collections::BTreeSet;

use leasehold_core::JobId;
use leasehold_core::ids::GroupId;

use crate::trace::{Entry, Kind, Lane};

/// `job:ID`, `group:ID`, `call:N`, `replica:N`, or any other text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Focus {
    /// A job or a group, and the calls that were seen to be about it. A group's children belong to it.
    Id {
        id: String,
        calls: BTreeSet<u32>,
    },
    Call(u32),
    Replica(u8),
    Text(String),
}

impl std::str::FromStr for Focus {
    type Err = String;

    fn from_str(text: &str) -> Result<Focus, String> {
        let bad = |what: &str| format!("--focus {text}: {what}");
        let id = |id: &str| Focus::Id { id: id.to_owned(), calls: BTreeSet::new() };
        Ok(match text.split_once(':') {
            Some(("job", job)) => {
                job.parse::<JobId>().map_err(|_| bad("is not a job's id"))?;
                id(job)
            }
            Some(("group", group)) => {
                group.parse::<GroupId>().map_err(|_| bad("is not a group's id"))?;
                id(group)
            }
            Some(("call", n)) => Focus::Call(n.trim().parse().map_err(|_| bad("is not a call's number"))?),
            Some(("replica", n)) => {
                let n = n.trim().trim_start_matches('r');
                Focus::Replica(n.parse().map_err(|_| bad("is not a replica's number"))?)
            }
            _ => Focus::Text(text.to_owned()),
        })
    }
}

impl Focus {
    /// Whether an entry is shown; one that is about the job tells which calls are, from then on.
    pub fn takes(&mut self, entry: &Entry) -> bool {
        if entry.kind == Kind::Fault {
            return true;
        }
        match self {
            Focus::Id { id, calls } => {
                let call = call_of(&entry.text);
                let about = mentions(&entry.text, id);
                if about {
                    calls.extend(call);
                }
                about || call.is_some_and(|call| calls.contains(&call))
            }
            Focus::Call(n) => mentions(&entry.text, &format!("call {n}")),
            Focus::Replica(n) => [entry.from, entry.to].contains(&Lane::Replica(*n)),
            Focus::Text(text) => entry.text.contains(text.as_str()),
        }
    }

    /// What a recording says where it is about this.
    pub fn plain(&self) -> String {
        match self {
            Focus::Id { id, .. } => id.clone(),
            Focus::Call(n) => format!("RequestId({n})"),
            Focus::Replica(_) => String::new(),
            Focus::Text(text) => text.clone(),
        }
    }
}

/// The call that an entry is about.
pub fn call_of(text: &str) -> Option<u32> {
    let rest = text.strip_prefix("answers ").unwrap_or(text).strip_prefix("call ")?;
    rest.split([':', ' ']).next()?.parse().ok()
}

/// Whether a text names a subject, and not something longer: "call 1" is not meant by "call 12". A group is meant
/// by its children.
pub fn mentions(text: &str, subject: &str) -> bool {
    text.match_indices(subject).any(|(at, _)| {
        let after = text[at + subject.len()..].chars().next();
        match after {
            Some('-') => subject.parse::<GroupId>().is_ok(),
            Some(c) => !c.is_ascii_alphanumeric(),
            None => true,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::calls::Caller;

    fn entry(text: &str) -> Entry {
        let (from, to) = (Lane::Caller(Caller::Worker(0)), Lane::Replica(1));
        Entry { at: 0, event: 1, from, to, kind: Kind::Message, text: text.to_owned() }
    }

    #[test]
    fn each_kind_takes_what_it_names() {
        const JOB: &str = "01HF7YB0MF00B20JA9CK827G25";
        let focus = |text: &str| text.parse::<Focus>().expect("a focus");
        let mut job = focus(&format!("job:{JOB}"));
        assert!(!job.takes(&entry("call 7 hears: nothing")));
        assert!(job.takes(&entry(&format!("call 7: heartbeat {JOB} token"))));
        assert!(job.takes(&entry("call 7 hears: nothing")) && !job.takes(&entry("call 77 hears: nothing")));
        assert!(focus("call:7").takes(&entry("answers call 7: x")) && !focus("call:7").takes(&entry("call 71: x")));
        assert!(focus("replica:1").takes(&entry("x")) && !focus("replica:r0").takes(&entry("x")));
        assert!(focus("put lease/").takes(&entry("APPLIED: put lease/x")) && !focus("nothing").takes(&entry("x")));
        for bad in ["job:x", "group:x", "call:x", "replica:x"] {
            assert!(bad.parse::<Focus>().is_err(), "{bad}");
        }
    }
}
