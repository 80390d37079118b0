//! What `--trace` prints: a line for everything that crosses a border, short enough to be read.

use leasehold_core::replica::Mark;
use leasehold_core::request::{CreateGroup, Held};
use leasehold_core::store::{Answer, Commit, Guard, ScoreAt, StoreError, Txn, Version, Write, keys};
use leasehold_core::{Name, Outcome, Request, Response, StoreAnswer, StoreOp};

use crate::calls::{Caller, Heard};
use crate::focus::Focus;
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
    /// A message that is lost, late or falsely said to have failed.
    Loss,
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
    /// Only what concerns this, and large faults.
    pub focus: Option<Focus>,
    pub kept: Vec<Entry>,
}

impl Trace {
    fn on(&self) -> bool {
        self.print || self.keep
    }

    fn add(&mut self, entry: Entry) {
        if self.focus.as_mut().is_some_and(|focus| !focus.takes(&entry)) {
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
        Kind::Loss => format!("{s:>5}.{us:06} #{:<6} {} -x {}: {text}", entry.event, entry.from, entry.to),
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

    /// Something happens to a message on its way.
    pub fn say_loss(&mut self, from: Lane, to: Lane, text: impl FnOnce() -> String) {
        if self.trace.on() {
            self.tell(Kind::Loss, from, to, text());
        }
    }

    /// What is about to happen.
    pub fn say_event(&mut self, event: &Event) {
        if self.trace.on()
            && let Some((from, to, text)) = self.told(event)
        {
            self.tell(Kind::Message, from, to, text);
        }
    }

    /// What is on its way, in order.
    pub fn under_way(&self) -> Vec<(Micros, Lane, Lane, String)> {
        let all = self.scheduled().into_iter();
        all.filter_map(|(at, event)| self.told(event).map(|(from, to, text)| (at, from, to, text))).collect()
    }

    /// An event as a message; not all are.
    fn told(&self, event: &Event) -> Option<(Lane, Lane, String)> {
        let ends =
            |call: &u32| self.ledger.get(*call).map(|c| (Lane::Caller(c.caller), Lane::Replica(c.replica as u8)));
        Some(match event {
            Event::Arrive { call } => {
                let (from, to) = ends(call)?;
                (from, to, format!("call {call}: {}", request(&self.ledger.get(*call)?.request)))
            }
            Event::Answer { call, heard } => {
                let (to, from) = ends(call)?;
                let text = match &**heard {
                    Heard::Answer(outcome) => reply(outcome),
                    Heard::NotDelivered => "not delivered".to_owned(),
                    Heard::Nothing => "nothing: the connection broke".to_owned(),
                };
                (from, to, format!("call {call} hears: {text}"))
            }
            Event::AtStore { replica, id, op, answer, again, .. } => {
                let lost = match (*again, *answer) {
                    (true, _) => " (once more, by a repeated envelope)",
                    (false, false) => " (its answer is not sent)",
                    (false, true) => "",
                };
                (Lane::Replica(*replica), Lane::Store, format!("op {}: {}{lost}", id.0, operation(op)))
            }
            Event::FromStore { replica, id, reply, .. } => {
                (Lane::Store, Lane::Replica(*replica), format!("op {}: {}", id.0, answered(reply)))
            }
            Event::HangUp { replica, call, .. } => {
                let from = ends(call).map_or(Lane::World, |(from, _)| from);
                (from, Lane::Replica(*replica), format!("call {call}: hung up"))
            }
            Event::GiveUp { call } if self.ledger.get(*call).is_some_and(|c| c.heard.is_none()) => {
                let (from, _) = ends(call)?;
                (from, from, format!("call {call}: gives up"))
            }
            Event::Boot { replica, .. } => (Lane::World, Lane::Replica(*replica), "starts".to_owned()),
            Event::Resume { replica, .. } => (Lane::World, Lane::Replica(*replica), "goes on".to_owned()),
            _ => return None,
        })
    }

    pub fn say_txn(&mut self, r: usize, txn: &Txn, answer: &Answer) {
        if self.trace.on() {
            let text = transaction(txn, answer);
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

pub fn request(request: &Request) -> String {
    let held = |held: &Held| {
        let token = held.token.map_or_else(|| "no token".to_owned(), |token| format!("{token:?}"));
        format!("{} {token}", held.job)
    };
    match request {
        Request::Submit(s) => format!("submit {}/{} {:?} key {:?} {:?}", s.tenant, s.queue, s.class, s.key, s.start),
        Request::Claim(c) => {
            format!(
                "claim {}/{:?} max {} wait {} id {:?} lease {:?}",
                c.tenant, c.queues, c.max, c.wait_ms, c.claim_id, c.lease_ms
            )
        }
        Request::Heartbeat(beat) => {
            let seq = beat.seq.map_or_else(String::new, |seq| format!(" progress {seq}"));
            format!("heartbeat {}{seq}", held(&beat.held))
        }
        Request::Complete(done) => format!("complete {}", held(&done.held)),
        Request::Fail(failed) => {
            let retryable = if failed.retryable { "" } else { " for good" };
            format!("fail {}{retryable}", held(&failed.held))
        }
        Request::Release(of) => format!("release {}", held(of)),
        Request::Get { tenant, job } => format!("get {tenant} {job}"),
        Request::Cancel { tenant, job } => format!("cancel {tenant} {job}"),
        Request::Retry { tenant, job } => format!("retry {tenant} {job}"),
        Request::Delete { tenant, job } => format!("delete {tenant} {job}"),
        Request::CreateGroup(asked) => {
            let CreateGroup { common, children, max_parallel, mode, sealed, .. } = &**asked;
            let sealed = if *sealed { "sealed" } else { "open" };
            let (home, n) = (format!("{}/{}", common.tenant, common.queue), children.len());
            format!(
                "create group {home} key {:?} {n} children max_parallel {max_parallel:?} {mode:?} {sealed}",
                common.key
            )
        }
        Request::ExtendGroup { group, from, children, .. } => {
            format!("extend group {group} from {from} by {} children", children.len())
        }
        Request::SealGroup { group, .. } => format!("seal group {group}"),
        Request::CancelGroup { group, .. } => format!("cancel group {group}"),
        Request::Group { group, wait_ms, .. } => format!("group {group} wait {wait_ms}"),
        Request::Children { group, from, limit, .. } => format!("children of {group} from {from} limit {limit}"),
        Request::Acquire(asked) => format!(
            "acquire {} {:?} cost {} wait {}",
            asked.slot.as_ref().map_or_else(
                || format!("a slot of {}", asked.pool),
                |slot| keys::slot(&asked.pool, &asked.tenant, slot).to_string()
            ),
            asked.class,
            asked.cost,
            asked.wait_ms
        ),
        Request::RefreshSlot { tenant, pool, slot } => format!("refresh {}", keys::slot(pool, tenant, &slot.slot)),
        Request::ReleaseSlot { tenant, pool, slot } => format!("give back {}", keys::slot(pool, tenant, &slot.slot)),
        Request::Dispatch(asked) => {
            format!("dispatch to {:?} of {:?} max {} wait {}", asked.upstreams, asked.queues, asked.max, asked.wait_ms)
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

/// Keys of a read that are told.
const NAMED: usize = 12;

fn operation(op: &StoreOp) -> String {
    match op {
        StoreOp::Read(read) => {
            // What is asked for by name, so far as it is not much.
            let names = read.records.iter().chain(read.slices.iter().map(|s| &s.index)).take(NAMED);
            let names: Vec<String> = names.map(ToString::to_string).collect();
            let more = if read.records.len() + read.slices.len() > NAMED { " …" } else { "" };
            format!(
                "read {} records, {} slices, {} members{}: {}{more}",
                read.records.len(),
                read.slices.len(),
                read.members.len(),
                if read.scan.is_some() { ", scan" } else { "" },
                names.join(" ")
            )
        }
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

/// What became of it, what it writes, and on what conditions.
fn transaction(txn: &Txn, answer: &Answer) -> String {
    let guards: Vec<String> = txn.guards.iter().map(guard).collect();
    // What is added comes first: a line on a screen is cut at its end.
    let mut writes: Vec<(u8, String)> = txn
        .writes
        .iter()
        .filter_map(|w| match w {
            Write::Add { index, member, score, raise } => {
                let sign = if *raise { "^" } else { "+" };
                let what = match keys::holder_of(member) {
                    None => member.to_string(),
                    // A holder has a member for each of its units.
                    Some((_, _, unit)) if unit > 1 => return None,
                    Some((holder, nonce, _)) => {
                        let units = txn.writes.iter().filter(|w| is_unit(w, index, &holder, nonce)).count();
                        format!("{holder} of {units}")
                    }
                };
                Some((0, format!("{index}{sign}{what}@{}", at(score))))
            }
            Write::Put { key, version, .. } => Some((1, format!("put {key}={version:?}"))),
            Write::Expire(key, expiry) => Some((2, format!("expire {key} {expiry:?}"))),
            Write::Delete(key) => Some((3, format!("del {key}"))),
            Write::Remove { index, member } => Some((4, format!("{index}-{member}"))),
            Write::Append { .. } | Write::Notify(_) => None,
        })
        .collect();
    writes.sort_by_key(|(order, _)| *order);
    let writes: Vec<String> = writes.into_iter().map(|(_, text)| text).collect();
    let take = txn.take.as_ref().map_or_else(String::new, |t| format!("take {} of {} indexes ", t.n, t.from.len()));
    let writes = if writes.is_empty() && take.is_empty() { "nothing".to_owned() } else { writes.join(" ") };
    format!("{}: {take}{writes} if [{}] by {}", verdict(txn, answer), guards.join(", "), txn.valid_until)
}

fn is_unit(write: &Write, of: &Name, holder: &Name, nonce: Version) -> bool {
    let Write::Add { index, member, .. } = write else { return false };
    index == of && keys::holder_of(member).is_some_and(|(by, under, _)| by == *holder && under == nonce)
}

fn guard(guard: &Guard) -> String {
    match guard {
        Guard::Absent(key) => format!("no {key}"),
        Guard::At(key, version) => format!("{key}={version:?}"),
        Guard::Member(index, member, standing) => format!("{member} {standing:?} {index}"),
        Guard::Below(index, _, n) => format!("{index}<{n}"),
    }
}

fn at(score: &ScoreAt) -> String {
    match score {
        ScoreAt::Number(n) => n.to_string(),
        other => format!("{other:?}"),
    }
}

fn verdict(txn: &Txn, answer: &Answer) -> String {
    match answer {
        Answer::Applied { taken } if taken.is_empty() => "APPLIED".into(),
        Answer::Applied { taken } => {
            let taken: Vec<String> = taken.iter().map(|t| format!("{} @{}", t.member, t.score)).collect();
            format!("APPLIED, took {}", taken.join(" "))
        }
        Answer::Refused(n) => {
            format!("refused, not [{}]", txn.guards.get(*n).map_or_else(|| n.to_string(), guard))
        }
        other => format!("{other:?}"),
    }
}
