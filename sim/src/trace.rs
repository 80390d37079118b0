//! What `--trace` prints: a line for everything that crosses a border, short enough to be read.

use leasehold_core::replica::Mark;
use leasehold_core::store::{Answer, Commit, Guard, StoreError, Txn, Write};
use leasehold_core::{Outcome, Request, Response, StoreAnswer, StoreOp};

use crate::calls::{Caller, Heard};
use crate::setup::SECOND;
use crate::world::{Event, Micros, World};

/// A column of the picture: who sends or hears.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Lane {
    Caller(Caller),
    Replica(u8),
    Store,
    /// What happens to all: faults.
    World,
}

impl std::fmt::Display for Lane {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Lane::Caller(Caller::Client(n)) => write!(f, "client{n}"),
            Lane::Caller(Caller::Owner(n)) => write!(f, "owner{n}"),
            Lane::Caller(Caller::Worker(n)) => write!(f, "worker{n}"),
            Lane::Caller(Caller::User(n)) => write!(f, "user{n}"),
            Lane::Caller(Caller::Operator) => f.write_str("operator"),
            Lane::Caller(Caller::Auditor) => f.write_str("auditor"),
            Lane::Caller(Caller::Script) => f.write_str("script"),
            Lane::Replica(n) => write!(f, "r{n}"),
            Lane::Store => f.write_str("store"),
            Lane::World => f.write_str("world"),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// From one lane to another.
    Message,
    /// What a message did where it arrived.
    Effect,
    Mark,
    Fault,
}

#[derive(Clone, Debug)]
pub struct Entry {
    pub at: Micros,
    pub event: u64,
    pub from: Lane,
    pub to: Lane,
    pub kind: Kind,
    pub text: String,
}

/// Where the trace goes; to nobody, unless asked for.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    pub print: bool,
    pub keep: bool,
    /// Only what mentions this, as `job:ID`, `call 12` or any other text.
    pub focus: Option<String>,
    pub kept: Vec<Entry>,
}

impl Trace {
    fn on(&self) -> bool {
        self.print || self.keep
    }

    fn add(&mut self, entry: Entry) {
        if self.focus.as_ref().is_some_and(|focus| !entry.text.contains(focus.as_str()) && entry.kind != Kind::Fault) {
            return;
        }
        if self.print {
            println!("{}", line(&entry));
        }
        if self.keep {
            self.kept.push(entry);
        }
    }
}

/// An entry as a line of text.
pub fn line(entry: &Entry) -> String {
    let (s, us) = (entry.at / SECOND, entry.at % SECOND);
    let text = short(&entry.text, 700);
    match entry.kind {
        Kind::Message => {
            format!("{s:>5}.{us:06} #{:<6} {} -> {}: {text}", entry.event, entry.from, entry.to)
        }
        Kind::Effect => format!("{s:>5}.{us:06} #{:<6}     {text}", entry.event),
        Kind::Mark => format!("{s:>5}.{us:06} #{:<6} {} {text}", entry.event, entry.to),
        Kind::Fault => format!("{s:>5}.{us:06} #{:<6} FAULT {text}", entry.event),
    }
}

impl World {
    fn tell(&mut self, kind: Kind, from: Lane, to: Lane, text: String) {
        self.trace.add(Entry { at: self.now, event: self.counts.events, from, to, kind, text });
    }

    pub fn say_fault(&mut self, text: &str) {
        if self.trace.on() {
            self.tell(Kind::Fault, Lane::World, Lane::World, text.to_owned());
        }
    }

    /// What is about to happen.
    pub fn say_event(&mut self, event: &Event) {
        if !self.trace.on() {
            return;
        }
        let caller =
            |call: &u32| self.ledger.get(*call).map(|c| (Lane::Caller(c.caller), Lane::Replica(c.replica as u8)));
        let (from, to, text) = match event {
            Event::Arrive { call } => {
                let Some(c) = self.ledger.get(*call) else { return };
                let (from, to) = (Lane::Caller(c.caller), Lane::Replica(c.replica as u8));
                (from, to, format!("call {call}: {}", request(&c.request)))
            }
            Event::Answer { call, heard } => {
                let Some((to, from)) = caller(call) else { return };
                let text = match &**heard {
                    Heard::Answer(outcome) => reply(outcome),
                    Heard::NotDelivered => "not delivered".to_owned(),
                    Heard::Nothing => "nothing: the connection broke".to_owned(),
                };
                (from, to, format!("call {call} hears: {text}"))
            }
            Event::AtStore { replica, id, op, answer, .. } => {
                let lost = if *answer { "" } else { " (its answer is not sent)" };
                (Lane::Replica(*replica), Lane::Store, format!("op {}: {}{lost}", id.0, operation(op)))
            }
            Event::FromStore { replica, id, reply, .. } => {
                (Lane::Store, Lane::Replica(*replica), format!("op {}: {}", id.0, answered(reply)))
            }
            Event::HangUp { replica, call, .. } => {
                let from = caller(call).map_or(Lane::World, |(from, _)| from);
                (from, Lane::Replica(*replica), format!("call {call} hung up"))
            }
            Event::GiveUp { call } if self.ledger.get(*call).is_some_and(|c| c.heard.is_none()) => {
                let Some((from, _)) = caller(call) else { return };
                (from, from, format!("call {call}: gives up"))
            }
            Event::Boot { replica, .. } => (Lane::World, Lane::Replica(*replica), "starts".to_owned()),
            Event::Resume { replica, .. } => (Lane::World, Lane::Replica(*replica), "goes on".to_owned()),
            _ => return,
        };
        self.tell(Kind::Message, from, to, text);
    }

    pub fn say_txn(&mut self, r: usize, txn: &Txn, answer: &Answer) {
        if self.trace.on() {
            let text = format!("{} => {}", transaction(txn), verdict(txn, answer));
            self.tell(Kind::Effect, Lane::Replica(r as u8), Lane::Store, text);
        }
    }

    pub fn say_reply(&mut self, r: usize, call: u32, outcome: &Outcome) {
        if self.trace.on() {
            let lane = Lane::Replica(r as u8);
            self.tell(Kind::Effect, lane, lane, format!("answers call {call}: {}", reply(outcome)));
        }
    }

    pub fn say_mark(&mut self, r: usize, mark: Mark) {
        if self.trace.on() {
            let lane = Lane::Replica(r as u8);
            self.tell(Kind::Mark, lane, lane, format!("mark {mark:?}"));
        }
    }
}

pub fn short(text: &str, most: usize) -> String {
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
        other => format!("{other:?}"),
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
    format!("<={} [{}] {take}{}", txn.valid_until, guards.join(", "), writes.join(" "))
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
