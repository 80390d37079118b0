//! What `--trace` prints: a line for everything that crosses a border, short enough to be read.

use leasehold_core::replica::Mark;
use leasehold_core::store::{Answer, Commit, Guard, StoreError, Txn, Write};
use leasehold_core::{Outcome, Request, Response, StoreAnswer, StoreOp};

use crate::setup::SECOND;
use crate::world::{Event, World};

impl World {
    pub fn say(&self, what: &str) {
        if self.trace {
            println!("{:>5}.{:06} #{:<6} {what}", self.now / SECOND, self.now % SECOND, self.counts.events);
        }
    }

    /// What is about to happen.
    pub fn say_event(&self, event: &Event) {
        if !self.trace {
            return;
        }
        match event {
            Event::Arrive { call } => {
                if let Some(c) = self.ledger.get(*call) {
                    self.say(&format!("call {call} {:?} -> r{}: {}", c.caller, c.replica, request(&c.request)));
                }
            }
            Event::Answer { call, heard } => {
                self.say(&format!("call {call} hears {}", short(&format!("{heard:?}"), 160)))
            }
            Event::AtStore { replica, id, op, answer, .. } => {
                let lost = if *answer { "" } else { " (its answer is not sent)" };
                self.say(&format!("r{replica} {} at store: {}{lost}", id.0, operation(op)));
            }
            Event::FromStore { replica, id, reply, .. } => {
                self.say(&format!("r{replica} {} store answers {}", id.0, answered(reply)));
            }
            Event::HangUp { replica, call, .. } => self.say(&format!("r{replica} notices that call {call} hung up")),
            Event::GiveUp { call } if self.ledger.get(*call).is_some_and(|c| c.heard.is_none()) => {
                self.say(&format!("call {call} gives up"));
            }
            Event::Boot { replica, .. } => self.say(&format!("r{replica} starts")),
            Event::Resume { replica, .. } => self.say(&format!("r{replica} goes on")),
            _ => {}
        }
    }

    pub fn say_txn(&self, txn: &Txn, answer: &Answer) {
        if self.trace {
            self.say(&format!("    {} => {}", transaction(txn), verdict(txn, answer)));
        }
    }

    pub fn say_reply(&self, r: usize, call: u32, outcome: &Outcome) {
        if self.trace {
            self.say(&format!("r{r} answers call {call}: {}", short(&reply(outcome), 300)));
        }
    }

    pub fn say_mark(&self, r: usize, mark: Mark) {
        if self.trace {
            self.say(&format!("r{r} mark {mark:?}"));
        }
    }
}

fn short(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

fn request(request: &Request) -> String {
    match request {
        Request::Submit(s) => format!("submit {}/{} {:?} key {:?} {:?}", s.tenant, s.queue, s.class, s.key, s.start),
        Request::Claim(c) => {
            format!(
                "claim {}/{:?} max {} wait {} id {:?} lease {:?}",
                c.tenant, c.queues, c.max, c.wait_ms, c.claim_id, c.lease_ms
            )
        }
        Request::Batch(items) => items.iter().map(self::request).collect::<Vec<_>>().join(" | "),
        other => short(&format!("{other:?}"), 300),
    }
}

fn reply(outcome: &Outcome) -> String {
    match outcome {
        Ok(Response::Created(view)) => format!("created {} {:?}", view.id, view.status),
        Ok(Response::Existing(view)) => format!("existing {} {:?}", view.id, view.status),
        Ok(Response::Job(view)) => {
            format!("job {} {:?} attempt {} delivery {}", view.id, view.status, view.attempt, view.deliveries)
        }
        Ok(Response::Claimed(jobs)) => {
            let jobs: Vec<String> =
                jobs.iter().map(|j| format!("{} {:?} until {}", j.id, j.token, j.lease_expires_at)).collect();
            format!("claimed [{}]", jobs.join(", "))
        }
        Ok(Response::Batch(outcomes)) => outcomes.iter().map(reply).collect::<Vec<_>>().join(" | "),
        other => format!("{other:?}"),
    }
}

fn operation(op: &StoreOp) -> String {
    match op {
        StoreOp::Read(read) => format!(
            "read {} records, {} slices, {} members{}",
            read.records.len(),
            read.slices.len(),
            read.members.len(),
            if read.scan.is_some() { ", scan" } else { "" }
        ),
        StoreOp::Commit(Commit { txns, grows }) => {
            format!("commit of {}{}", txns.len(), if *grows { ", grows" } else { "" })
        }
    }
}

fn answered(reply: &Result<StoreAnswer, StoreError>) -> String {
    match reply {
        Ok(StoreAnswer::Read(snapshot)) => format!("read @{}", snapshot.clock),
        Ok(StoreAnswer::Commit(reply)) => format!("commit @{}", reply.clock),
        Err(error) => format!("{error:?}"),
    }
}

fn transaction(txn: &Txn) -> String {
    let guards: Vec<String> = txn
        .guards
        .iter()
        .map(|g| match g {
            Guard::Absent(key) => format!("no {key}"),
            Guard::At(key, version) => format!("{key}={version:?}"),
            Guard::Member(index, member, standing) => format!("{member} {standing:?} {index}"),
            Guard::Below(index, _, n) => format!("{index}<{n}"),
        })
        .collect();
    let writes: Vec<String> = txn
        .writes
        .iter()
        .filter_map(|w| match w {
            Write::Put { key, version, .. } => Some(format!("put {key}={version:?}")),
            Write::Delete(key) => Some(format!("del {key}")),
            Write::Expire(key, expiry) => Some(format!("expire {key} {expiry:?}")),
            Write::Add { index, score, raise, .. } => {
                Some(format!("{index}{}@{score:?}", if *raise { "^" } else { "+" }))
            }
            Write::Remove { index, .. } => Some(format!("{index}-")),
            Write::Append { .. } | Write::Notify(_) => None,
        })
        .collect();
    let take = txn.take.as_ref().map(|t| format!("take {} of {} ", t.n, t.from.len())).unwrap_or_default();
    format!("<={} [{}] {take}{}", txn.valid_until, guards.join(", "), short(&writes.join(" "), 700))
}

fn verdict(txn: &Txn, answer: &Answer) -> String {
    match answer {
        Answer::Applied { taken } if taken.is_empty() => "applied".into(),
        Answer::Applied { taken } => {
            let taken: Vec<String> = taken.iter().map(|t| format!("{} @{}", t.member, t.score)).collect();
            format!("applied, took {}", taken.join(" "))
        }
        Answer::Refused(n) => format!("refused by guard {n}: {:?}", txn.guards.get(*n)),
        other => format!("{other:?}"),
    }
}
