//! One call of the port as one call of a script.

use leasehold_core::store::{Answer, Commit, CommitReply, StoreError, Write};
use leasehold_core::{Name, StoreAnswer, StoreOp};
use redis::Value;

use crate::layout::Layout;
use crate::link::{Link, Scripts, Which};
use crate::{Options, decode, encode, fault};

/// What all calls of one process have in common.
#[derive(Debug)]
pub(crate) struct Caller {
    pub layout: Layout,
    pub scripts: Scripts,
    log_keep: u64,
    /// Goes with what this process publishes, so that it can tell its own.
    pub sender: [u8; 8],
}

/// What came of a call.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub reply: Result<StoreAnswer, StoreError>,
    /// The link is of no further use.
    pub reconnect: bool,
    /// Why there is no proper answer.
    pub why: Option<String>,
    /// What is not as it was written.
    pub damaged: Vec<Name>,
    /// What the commit notified.
    pub topics: Vec<Name>,
}

impl Outcome {
    pub fn unavailable() -> Outcome {
        let reply = Err(StoreError::Unavailable);
        Outcome { reply, reconnect: false, why: None, damaged: Vec::new(), topics: Vec::new() }
    }
}

impl Caller {
    pub fn new(options: &Options) -> Caller {
        Caller {
            layout: Layout::new(&options.namespace),
            scripts: Scripts::new(),
            log_keep: options.log_keep.max(1),
            sender: random().to_be_bytes(),
        }
    }

    /// Performs the call. `clock` is used instead of the server's.
    pub async fn perform(&self, link: &mut Link, op: &StoreOp, clock: Option<u64>) -> Outcome {
        let (which, ask) = match op {
            StoreOp::Read(read) => (Which::Read, encode::read(&self.layout, read)),
            StoreOp::Commit(commit) => {
                let which = if commit.grows { Which::Grow } else { Which::Keep };
                (which, encode::commit(&self.layout, commit, self.log_keep))
            }
        };
        let clock = clock.map(|c| c.to_string()).unwrap_or_default();
        let said = link.call(&self.scripts, which, &self.layout, &ask, clock.as_bytes(), &self.sender).await;
        match said {
            Ok(value) => self.answered(op, value),
            Err(error) => {
                let fault = fault::of(&error, true);
                let reply = Err(match (op, fault.error) {
                    // A read changes nothing, so nothing about it can stay unknown.
                    (StoreOp::Read(_), _) => StoreError::Unavailable,
                    (StoreOp::Commit(commit), StoreError::Full) if !commit.grows => StoreError::Unavailable,
                    (StoreOp::Commit(_), error) => error,
                });
                Outcome { reply, reconnect: fault.reconnect, why: Some(fault.text), ..Outcome::unavailable() }
            }
        }
    }

    fn answered(&self, op: &StoreOp, value: Value) -> Outcome {
        let decoded = match op {
            StoreOp::Read(read) => decode::read(&self.layout, read, value)
                .map(|(snapshot, damaged)| (StoreAnswer::Read(snapshot), damaged, Vec::new())),
            StoreOp::Commit(commit) => decode::commit(&self.layout, commit, value).map(|(reply, damaged)| {
                let topics = notified(commit, &reply);
                (StoreAnswer::Commit(reply), damaged, topics)
            }),
        };
        match decoded {
            Ok((answer, damaged, topics)) => Outcome { reply: Ok(answer), damaged, topics, ..Outcome::unavailable() },
            Err(decode::Garbled) => {
                let error = if matches!(op, StoreOp::Read(_)) { StoreError::Unavailable } else { StoreError::Unknown };
                let why = Some("the answer is not what the script gives".into());
                Outcome { reply: Err(error), why, ..Outcome::unavailable() }
            }
        }
    }
}

/// The topics of the transactions that were applied, each once.
fn notified(commit: &Commit, reply: &CommitReply) -> Vec<Name> {
    let mut topics: Vec<Name> = Vec::new();
    for (txn, answer) in commit.txns.iter().zip(&reply.answers) {
        if !matches!(answer, Answer::Applied { .. }) {
            continue;
        }
        for write in &txn.writes {
            if let Write::Notify(topic) = write
                && !topics.contains(topic)
            {
                topics.push(topic.clone());
            }
        }
    }
    topics
}

/// A number that no other process has; not for secrets.
pub(crate) fn random() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    std::hash::RandomState::new().build_hasher().finish()
}
