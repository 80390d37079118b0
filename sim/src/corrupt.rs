//! Corrupted histories: at one place of a run the oracle is told something else than what happened, and a
//! promise must object. It proves the checker as the planted bugs do, from the other side: there the core is
//! wrong, here the witness is.
//!
//! A seed is run once to count the places of each kind of corruption, then once for every place that is tried.
//! Replicas and callers are told the truth, so up to the objection the run is the same; only what is wrong with a
//! commit itself is wrong in the store as well. A corruption that could be true is not a lie: [`excuse`] says which
//! these are, and a run may only pass over those.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::mem::discriminant;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use leasehold_core::job::record::Status;
use leasehold_core::request::{Beat, HoldUpstream, Leased, SetPool, SlotId};
use leasehold_core::store::engine::{Change, Effects};
use leasehold_core::store::{Answer, Commit, Store as _, Txn, Write, keys};
use leasehold_core::{Failure, Outcome, Request, Response, Token};

use crate::calls::{CallId, ItemRef};
use crate::oracle::{Promise, Violation};
use crate::plan::Plan;
use crate::report::{self, Options};
use crate::world::World;

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident $text:literal: $($promise:ident)+;)*) => {
        /// A kind of corruption, and so what its places are.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        #[repr(u8)]
        pub enum Kind { $($(#[$doc])* $name),* }

        impl Kind {
            pub const ALL: &'static [Kind] = &[$(Kind::$name),*];

            pub fn text(self) -> &'static str {
                match self { $(Kind::$name => $text),* }
            }

            /// The promises that may object to it.
            pub fn expected(self) -> &'static [Promise] {
                match self { $(Kind::$name => &[$(Promise::$promise),+]),* }
            }
        }
    };
}

kinds! {
    /// A transaction that was applied: the oracle is not told of it. It may wait for a job that has ended.
    Untold "commit-untold": AckedNeverLost HonestReplies OneLiveLease Priority SlotNotResurrected EventuallyDone;
    /// A transaction that was applied: it was not, and everybody is told that it was.
    Unapplied "commit-unapplied": HonestReplies;
    /// A transaction that was applied: it is applied once more, whatever its guards say.
    Twice "commit-twice": HonestReplies Priority FinalizedOnce ForwardOnly LimitHeld;
    /// A transaction with an event for the audit log: without it.
    EventDropped "event-dropped": HonestReplies FinalizedOnce;
    /// A request reaches its replica: the oracle is not told of it.
    ArrivalUntold "arrival-untold": HonestReplies;
    /// An answer that hands something out: it hands out what another call has been given.
    GrantTwice "grant-twice": OneLiveLease LimitHeld SlotNotResurrected HonestReplies;
    /// An answer that hands something out: with the token of another one.
    TokenSwapped "token-swapped": OneLiveLease HonestReplies;
    /// A change that was acknowledged: the answer is that it was refused.
    OkRefused "ok-to-refusal": HonestReplies SlotNotResurrected;
    /// A request that was certainly refused: the answer is that it was done.
    RefusedOk "refusal-to-ok": HonestReplies OneLiveLease SlotNotResurrected LimitHeld;
    /// Any good answer: instead, the last one to another request of the same kind.
    Misdelivered "answer-misdelivered": HonestReplies OneLiveLease OneKeyOneJob LimitHeld SlotNotResurrected;
}

/// What was hit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hit {
    pub what: String,
    pub call: Option<CallId>,
    /// Why it could be true.
    pub excuse: Option<&'static str>,
}

/// A corruption that is planned, or none where places are counted only.
#[derive(Clone, Debug, Default)]
pub struct Corruption {
    pub planned: Option<(Kind, u64)>,
    pub seen: [u64; Kind::ALL.len()],
    pub hit: Option<Hit>,
    /// Calls of which something in the store is certainly the doing, once the run is over.
    pub effective: BTreeSet<CallId>,
    /// Good answers, the last for each kind of request, with the call.
    answers: Vec<(ItemRef, Arc<Request>, Outcome)>,
}

impl World {
    /// Passes a place and says whether it is the one.
    fn corrupts(&mut self, kind: Kind, what: &str, excuse: Option<&'static str>) -> bool {
        let Some(corruption) = &mut self.corruption else { return false };
        let place = corruption.seen[kind as usize];
        corruption.seen[kind as usize] += 1;
        let now = corruption.planned == Some((kind, place));
        if now {
            corruption.hit = Some(Hit { what: what.to_owned(), call: None, excuse });
        }
        now
    }

    /// Tells the oracle of a transaction, or something else.
    pub fn tell_commit(&mut self, txn: &Arc<Txn>, answer: &Answer) -> Result<(), Violation> {
        let tell = |world: &mut World, txn: &Txn, answer: &Answer| {
            world.oracle.commit(&world.store.model, txn, answer, &mut world.ledger)
        };
        let effects = self.store.model.last_effects();
        if !matches!(answer, Answer::Applied { .. }) || effects.changes.is_empty() {
            return tell(self, txn, answer);
        }
        let (what, appends) = (subject(effects), !effects.appends.is_empty());
        if self.corrupts(Kind::Untold, &what, None) {
            return Ok(());
        }
        let without = |writes: Vec<Write>| Txn { writes, guards: Vec::new(), ..(**txn).clone() };
        if self.corrupts(Kind::Unapplied, &what, None) {
            self.store.model.lose_newest(1);
            self.put(Txn { take: None, ..without(Vec::new()) });
        } else if appends && self.corrupts(Kind::EventDropped, &what, None) {
            self.store.model.lose_newest(1);
            let mut writes = txn.writes.clone();
            let first = writes.iter().position(|w| matches!(w, Write::Append { .. }));
            first.map(|n| writes.remove(n));
            self.put(without(writes));
        }
        tell(self, txn, answer)?;
        if self.corrupts(Kind::Twice, &what, None) {
            let again = without(txn.writes.clone());
            let answer = self.put(again.clone());
            if is_nothing(self.store.model.last_effects()) {
                self.could_be_true("done again it changes nothing");
            }
            return answer.map_or(Ok(()), |answer| tell(self, &again, &answer));
        }
        Ok(())
    }

    fn could_be_true(&mut self, why: &'static str) {
        if let Some(hit) = self.corruption.as_mut().and_then(|c| c.hit.as_mut()) {
            hit.excuse = Some(why);
        }
    }

    /// The run is over: whose doing it was.
    pub fn close_corruption(&mut self) {
        if let Some(corruption) = &mut self.corruption {
            let did = self.ledger.iter().filter(|c| c.items.iter().any(|i| i.effects > 0));
            corruption.effective = did.map(|c| c.id).collect();
        }
    }

    fn put(&mut self, txn: Txn) -> Option<Answer> {
        let commit = Commit { txns: vec![Arc::new(txn)], grows: false };
        self.store.model.commit(&commit).ok()?.answers.pop()
    }

    /// Whether the oracle is not to be told that a request has come.
    pub fn arrives_untold(&mut self, call: CallId) -> bool {
        if self.corruption.is_none() {
            return false;
        }
        let Some(request) = self.ledger.get(call).map(|c| c.request.clone()) else { return false };
        let pool = matches!(&*request, Request::Acquire(_));
        let untold = changes(&request) && !pool && self.corrupts(Kind::ArrivalUntold, name(&request), None);
        if untold {
            self.ledger.get_mut(call).into_iter().for_each(|c| c.arrived = None);
            let hit = self.corruption.as_mut().and_then(|c| c.hit.as_mut());
            hit.into_iter().for_each(|hit| hit.call = Some(call));
        }
        untold
    }

    /// What the oracle is told instead of that answer, if it is to be told anything else.
    pub fn corrupt_reply(&mut self, call: CallId, outcome: &Outcome) -> Option<Outcome> {
        self.corruption.as_ref()?;
        let request = self.ledger.get(call)?.request.clone();
        match (&*request, outcome) {
            (Request::Batch(items), Ok(Response::Batch(outcomes))) => {
                let mut told = outcomes.clone();
                let mut wrong = false;
                for (n, (request, outcome)) in items.iter().zip(outcomes).enumerate() {
                    let item = ItemRef { call, item: n as u32 };
                    if let Some(other) = self.corrupt_item(item, &Arc::new(request.clone()), outcome) {
                        told[n] = other;
                        wrong = true;
                    }
                }
                wrong.then_some(Ok(Response::Batch(told)))
            }
            (Request::Batch(_), _) => None,
            _ => self.corrupt_item(ItemRef { call, item: 0 }, &request, outcome),
        }
    }

    fn corrupt_item(&mut self, item: ItemRef, request: &Arc<Request>, outcome: &Outcome) -> Option<Outcome> {
        let what = name(request);
        let mut told = None;
        // What was granted without the store is judged by what the replica says.
        if let Request::RefreshSlot { tenant, pool, slot: SlotId { slot, nonce: Some(nonce) } } = &**request
            && self.oracle.is_declared(pool, &keys::slot_member(tenant, slot), *nonce)
        {
            return None;
        }
        let others = self.corruption.as_ref().map(|c| c.answers.clone()).unwrap_or_default();
        let other = |fits: &dyn Fn(&Request, &Response) -> bool| {
            let found = others.iter().rev().find(|(of, request, outcome)| {
                of.call != item.call && outcome.as_ref().is_ok_and(|response| fits(request, response))
            });
            found.and_then(|(_, _, outcome)| outcome.clone().ok())
        };
        let same = |r: &Request, _: &Response| discriminant(r) == discriminant(&**request);
        let elsewhere = |r: &Request, o: &Response| same(r, o) && about(r) != about(request);
        if let Ok(response) = outcome {
            if let Some(wrong) = other(&same).and_then(|earlier| granted_twice(response, &earlier))
                && self.corrupts(Kind::GrantTwice, what, None)
            {
                told = Some(Ok(wrong));
            }
            if let Some(wrong) = other(&same).and_then(|earlier| swapped(response, &earlier))
                && self.corrupts(Kind::TokenSwapped, what, None)
            {
                told = Some(Ok(wrong));
            }
            let effects = self.ledger.item(item).map_or(0, |i| i.effects);
            let excuse = match &**request {
                Request::Heartbeat(_) => Some("a lease that was renewed may be lost meanwhile"),
                Request::Acquire(asked) if asked.slot.is_some() => Some("what has a name can be asked for again"),
                Request::Acquire(_) => None,
                _ => (effects == 0).then_some("nothing in the store is its doing alone"),
            };
            if changes(request) && gives(response) && self.corrupts(Kind::OkRefused, what, excuse) {
                told = Some(Err(Failure::Contended { retry_after_ms: 1 }));
            }
            if let Some(earlier) = other(&elsewhere).filter(|earlier| earlier != response)
                && self.corrupts(Kind::Misdelivered, what, None)
            {
                told = Some(Ok(earlier));
            }
        }
        if let Err(failure) = outcome
            && failure.certain()
            && let Some(wrong) = done(request, other(&elsewhere), self.store.model.clock())
            && self.corrupts(Kind::RefusedOk, what, None)
        {
            told = Some(Ok(wrong));
        }
        if let (Some(corruption), true) = (&mut self.corruption, outcome.as_ref().is_ok_and(gives)) {
            // A few of each kind are enough.
            let same = |(_, r, _): &(ItemRef, Arc<Request>, Outcome)| discriminant(&**r) == discriminant(&**request);
            if corruption.answers.iter().filter(|a| same(a)).count() > 3
                && let Some(first) = corruption.answers.iter().position(same)
            {
                drop(corruption.answers.remove(first));
            }
            corruption.answers.push((item, request.clone(), outcome.clone()));
        }
        told
    }
}

/// Whether everything is in the end as it was.
fn is_nothing(effects: &Effects) -> bool {
    let (mut records, mut members) = (BTreeMap::new(), BTreeMap::new());
    for change in &effects.changes {
        match change {
            Change::Record { key, old, new } => records.entry(key).or_insert((old, new)).1 = new,
            Change::Member { index, member, old, new } => members.entry((index, member)).or_insert((old, new)).1 = new,
        }
    }
    records.values().all(|(old, new)| old == new) && members.values().all(|(old, new)| old == new)
}

/// What a transaction did, in a few words: the first job that it moved, or the first thing that it touched.
fn subject(effects: &Effects) -> String {
    let (mut from, mut to, mut first) = (None, None, None);
    for change in &effects.changes {
        match change {
            Change::Record { key, .. } => first = first.or(Some(key)),
            Change::Member { index, old, new, .. } => {
                let status = keys::status_of(index).map(|(.., status)| status);
                match (old, new) {
                    (Some(_), None) => from = from.or(status),
                    (None, Some(_)) => to = to.or(status),
                    _ => {}
                }
                first = first.or(Some(index));
            }
        }
    }
    let text = |status: Option<Status>| status.map_or("none", Status::text);
    match (from, to, first) {
        (None, None, Some(first)) => first.to_string().split('/').next().unwrap_or_default().to_owned(),
        _ => format!("{} to {}", text(from), text(to)),
    }
}

fn name(request: &Request) -> &'static str {
    match request {
        Request::Submit(_) => "submit",
        Request::Get { .. } => "get",
        Request::Payload { .. } => "payload",
        Request::Result { .. } => "result",
        Request::Why { .. } => "why",
        Request::List(_) => "list",
        Request::Cancel { .. } => "cancel",
        Request::Retry { .. } => "retry",
        Request::Delete { .. } => "delete",
        Request::Claim(_) => "claim",
        Request::Heartbeat(_) => "heartbeat",
        Request::Complete(_) => "complete",
        Request::Fail(_) => "fail",
        Request::Release(_) => "release",
        Request::Queues { .. } => "queues",
        Request::Queue { .. } => "queue",
        Request::SetQueue { .. } => "set queue",
        Request::Pause { .. } => "pause",
        Request::Resume { .. } => "resume",
        Request::Purge { .. } => "purge",
        Request::Events { .. } => "events",
        Request::CreateGroup(_) => "create group",
        Request::ExtendGroup { .. } => "extend group",
        Request::SealGroup { .. } => "seal group",
        Request::CancelGroup { .. } => "cancel group",
        Request::Group { .. } => "group",
        Request::Children { .. } => "children",
        Request::SetPool(_) => "set pool",
        Request::DeletePool { .. } => "delete pool",
        Request::Pools => "pools",
        Request::Pool { .. } => "pool",
        Request::Acquire(asked) if asked.slot.is_none() => "acquire unnamed",
        Request::Acquire(_) => "acquire named",
        Request::RefreshSlot { .. } => "refresh slot",
        Request::ReleaseSlot { .. } => "release slot",
        Request::Dispatch(_) => "dispatch",
        Request::HoldUpstream(_) => "hold upstream",
        Request::FreeUpstream { .. } => "free upstream",
        Request::GiveBack(_) => "give back",
        Request::Upstreams => "upstreams",
        Request::Audit { .. } => "audit",
        Request::Inspect(_) => "inspect",
        Request::Ready => "ready",
        Request::Drain => "drain",
        Request::Batch(_) => "batch",
    }
}

/// Jobs that an answer hands out.
fn handed(response: &Response) -> Vec<&Leased> {
    match response {
        Response::Claimed(jobs) => jobs.iter().collect(),
        Response::Dispatched(found) => found.iter().map(|one| &one.job).collect(),
        _ => Vec::new(),
    }
}

/// The answer with what another call has been given.
fn granted_twice(response: &Response, earlier: &Response) -> Option<Response> {
    match (response, earlier) {
        (Response::Claimed(jobs), Response::Claimed(_)) if !jobs.is_empty() => {
            let mut jobs = jobs.clone();
            jobs[0] = (*handed(earlier).first()?).clone();
            Some(Response::Claimed(jobs))
        }
        (Response::Dispatched(found), Response::Dispatched(other)) if !found.is_empty() => {
            let mut found = found.clone();
            found[0] = other.first()?.clone();
            Some(Response::Dispatched(found))
        }
        (Response::Slot { declared: false, .. }, Response::Slot { declared: false, .. }) => {
            (response != earlier).then(|| earlier.clone())
        }
        _ => None,
    }
}

/// The answer with the token of another job that was handed out.
fn swapped(response: &Response, earlier: &Response) -> Option<Response> {
    // Jobs of one claim have one token.
    let another = |own: Token| {
        let all = handed(response).into_iter().skip(1).chain(handed(earlier));
        all.map(|job| job.token).find(|token| *token != own)
    };
    match (response, earlier) {
        (Response::Claimed(jobs), _) if !jobs.is_empty() => {
            let mut jobs = jobs.clone();
            jobs[0].token = another(jobs[0].token)?;
            Some(Response::Claimed(jobs))
        }
        (Response::Dispatched(found), _) if !found.is_empty() => {
            let mut found = found.clone();
            found[0].job.token = another(found[0].job.token)?;
            Some(Response::Dispatched(found))
        }
        (
            Response::Slot { pool, id, expires_at, declared: false },
            Response::Slot { id: other, declared: false, .. },
        ) if id.nonce != other.nonce => {
            let id = SlotId { slot: id.slot.clone(), nonce: other.nonce };
            Some(Response::Slot { pool: pool.clone(), id, expires_at: *expires_at, declared: false })
        }
        _ => None,
    }
}

/// What a request is about; two claims are never about the same.
fn about(request: &Request) -> String {
    match request {
        Request::Get { job, .. }
        | Request::Payload { job, .. }
        | Request::Result { job, .. }
        | Request::Why { job, .. }
        | Request::Cancel { job, .. }
        | Request::Retry { job, .. }
        | Request::Delete { job, .. } => job.to_string(),
        Request::Heartbeat(Beat { held, .. }) | Request::Release(held) => held.job.to_string(),
        Request::Complete(complete) => complete.held.job.to_string(),
        Request::Fail(fail) => fail.held.job.to_string(),
        // A queue is shown without its tenant.
        Request::Queue { queue, .. }
        | Request::SetQueue { queue, .. }
        | Request::Pause { queue, .. }
        | Request::Resume { queue, .. }
        | Request::Purge { queue, .. } => queue.clone(),
        Request::Queues { tenant } | Request::Events { tenant, .. } => tenant.clone(),
        Request::ExtendGroup { group, .. }
        | Request::SealGroup { group, .. }
        | Request::CancelGroup { group, .. }
        | Request::Group { group, .. }
        | Request::Children { group, .. } => group.to_string(),
        Request::SetPool(SetPool { pool, .. }) | Request::DeletePool { pool } | Request::Pool { pool, .. } => {
            pool.clone()
        }
        Request::RefreshSlot { pool, slot, .. } | Request::ReleaseSlot { pool, slot, .. } => format!("{pool} {slot}"),
        Request::HoldUpstream(HoldUpstream { upstream, .. }) | Request::FreeUpstream { upstream } => upstream.clone(),
        Request::Submit(submit) if submit.key.is_some() => format!("{:?}", (&submit.tenant, &submit.key)),
        Request::Acquire(asked) if asked.slot.is_some() => format!("{:?}", (&asked.tenant, &asked.pool, &asked.slot)),
        // A page of the whole store, or all of something.
        Request::Audit { .. } | Request::Pools | Request::Upstreams | Request::Ready | Request::Drain => String::new(),
        other => format!("{other:?}"),
    }
}

/// Whether a request changes something when it is done.
fn changes(request: &Request) -> bool {
    matches!(
        request,
        Request::Submit(_)
            | Request::Claim(_)
            | Request::Dispatch(_)
            | Request::Acquire(_)
            | Request::Cancel { .. }
            | Request::Retry { .. }
            | Request::Delete { .. }
            | Request::Heartbeat(_)
            | Request::Complete(_)
            | Request::Fail(_)
            | Request::Release(_)
            | Request::CreateGroup(_)
            | Request::ExtendGroup { .. }
            | Request::SealGroup { .. }
            | Request::CancelGroup { .. }
    )
}

/// Whether a good answer is more than that there is nothing, and comes from the store.
fn gives(response: &Response) -> bool {
    match response {
        Response::Claimed(_) | Response::Dispatched(_) => !handed(response).is_empty(),
        Response::Slot { declared, .. } => !declared,
        _ => true,
    }
}

/// The good answer to a request that was refused: made up, or that to another request of its kind.
fn done(request: &Request, earlier: Option<Response>, clock: u64) -> Option<Response> {
    let far = clock + 86_400_000_000;
    match request {
        Request::Complete(_) => Some(Response::Completed),
        Request::Fail(_) => Some(Response::Failed { status: Status::Dead, run_at: None }),
        Request::Release(_) => Some(Response::Released { status: Status::Queued }),
        Request::Heartbeat(_) => Some(Response::Beat { lease_expires_at: Some(far), cancel_requested: false }),
        Request::Delete { .. } => Some(Response::Deleted),
        Request::RefreshSlot { .. } => Some(Response::SlotRefreshed { expires_at: far }),
        Request::Claim(_) | Request::Dispatch(_) => earlier.filter(|response| !handed(response).is_empty()),
        _ => earlier,
    }
}

// --- many of them ------------------------------------------------------------------------------

/// One corruption that was tried.
#[derive(Clone, Debug)]
pub struct Tried {
    pub seed: u64,
    pub kind: Kind,
    pub place: u64,
    pub hit: Hit,
    /// Who objected; a panic of the core is an objection as well.
    pub by: Option<String>,
}

impl Tried {
    /// Whether the oracle did not do what it must.
    pub fn missed(&self) -> bool {
        match &self.by {
            None => self.hit.excuse.is_none(),
            Some(by) => by != "panic" && !self.kind.expected().iter().any(|promise| promise.text() == by),
        }
    }
}

/// Tries so many places of each kind in one seed.
pub fn seed(seed: u64, each: u64) -> Vec<Tried> {
    let plan = Plan::of(seed);
    let run = |planned| {
        let corruption = Some(Corruption { planned, ..Corruption::default() });
        report::run_with(&plan, &Options { corruption, ..Options::default() })
    };
    let counted = run(None);
    let (seen, effective) = counted.corruption.as_ref().map(|c| (c.seen, c.effective.clone())).unwrap_or_default();
    let mut tried = Vec::new();
    for kind in Kind::ALL.iter().copied().filter(|_| counted.held()) {
        let places = seen[kind as usize];
        let each = each.min(places);
        for n in 0..each {
            // One in each stretch, not the same in every seed.
            let (from, to) = (places * n / each, places * (n + 1) / each);
            let place = from + seed.wrapping_mul(0x9E37_79B9).wrapping_add(n * 7 + kind as u64) % (to - from);
            let outcome = run(Some((kind, place)));
            let Some(mut hit) = outcome.corruption.as_ref().and_then(|c| c.hit.clone()) else { continue };
            let alone = hit.call.is_none_or(|call| effective.contains(&call));
            let alone = (!alone).then_some("nothing in the store is its doing alone");
            hit.excuse = hit.excuse.or(alone).or_else(|| excuse(kind, &hit.what)).or_else(|| forgiven(&outcome));
            let by = (!outcome.held()).then(|| outcome.promise().to_owned());
            tried.push(Tried { seed, kind, place, hit, by });
        }
    }
    tried
}

/// Which corruptions could be true, or are of what no promise is about, whatever run they are in.
fn excuse(kind: Kind, what: &str) -> Option<&'static str> {
    match (kind, what) {
        (Kind::Untold, "names" | "pools" | "ready" | "claim") => {
            Some("no answer depends on it, and it is not followed")
        }
        (Kind::Untold, "hold" | "probe") => Some("a hold only forbids"),
        (Kind::Untold, "queue") => Some("of a queue's settings only the pause is followed"),
        (Kind::Untold, "slot") => Some("what remains of a slot that is over ends by itself"),
        (Kind::RefusedOk, "release slot") => Some("what is not held any more is given back"),
        (Kind::RefusedOk | Kind::Misdelivered, "list") => Some("whether a list is whole is not followed"),
        (Kind::RefusedOk | Kind::Misdelivered, "why") => Some("how many are before a job is not followed"),
        (Kind::Misdelivered, "hold upstream") => Some("a hold may be longer than asked for"),
        (Kind::Misdelivered, "heartbeat") => Some("a lease may last longer than was told"),
        _ => None,
    }
}

/// What the store did in this run that lets the oracle forgive.
fn forgiven(outcome: &report::Outcome) -> Option<&'static str> {
    let met = |names: &[&str]| names.iter().any(|name| outcome.counts.faults.contains_key(name));
    if met(&["lose_commits"]) {
        Some("the store forgot its newest commits")
    } else if met(&["evict", "drop_entry", "corrupt"]) {
        Some("a fault took something out of the store")
    } else {
        None
    }
}

/// Tries many seeds on so many threads, and says when each is done.
pub fn seeds(from: u64, to: u64, each: u64, threads: usize, done: &(dyn Fn(u64) + Sync)) -> Vec<Tried> {
    let (next, all) = (AtomicU64::new(from), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let n = next.fetch_add(1, Ordering::Relaxed);
                    if n >= to {
                        return;
                    }
                    let tried = seed(n, each);
                    done(n);
                    all.lock().unwrap_or_else(PoisonError::into_inner).extend(tried);
                }
            });
        }
    });
    let mut all = all.into_inner().unwrap_or_else(PoisonError::into_inner);
    all.sort_by_key(|t| (t.kind, t.seed, t.place));
    all
}

/// Corruption, who objected and how often, and why nobody did.
pub fn table(tried: &[Tried]) -> String {
    let mut out = format!("{:<20} {:>6} {:>8}  by\n", "corruption", "tried", "noticed");
    for kind in Kind::ALL {
        let of: Vec<&Tried> = tried.iter().filter(|t| t.kind == *kind).collect();
        let mut by: BTreeMap<&str, u64> = BTreeMap::new();
        let mut passed: BTreeMap<(&str, &str), u64> = BTreeMap::new();
        for t in &of {
            match &t.by {
                Some(promise) => *by.entry(promise).or_default() += 1,
                None => *passed.entry((t.hit.excuse.unwrap_or("NO REASON"), &t.hit.what)).or_default() += 1,
            }
        }
        let noticed = of.iter().filter(|t| t.by.is_some()).count();
        let by: Vec<String> = by.iter().map(|(promise, n)| format!("{promise} {n}")).collect();
        // Writing to a string cannot fail.
        let _ = writeln!(out, "{:<20} {:>6} {:>8}  {}", kind.text(), of.len(), noticed, by.join(", "));
        let mut reasons: BTreeMap<&str, Vec<String>> = BTreeMap::new();
        for ((reason, what), n) in passed {
            reasons.entry(reason).or_default().push(format!("{what} {n}"));
        }
        for (reason, what) in reasons {
            let _ = writeln!(out, "{:>38}{reason}: {}", "", what.join(", "));
        }
    }
    for t in tried.iter().filter(|t| t.missed()) {
        let by = t.by.as_deref().unwrap_or("nobody");
        let _ = writeln!(out, "MISSED seed {} {}@{} ({}): {by}", t.seed, t.kind.text(), t.place, t.hit.what);
    }
    out
}

/// Places of each kind that are tried in each seed.
const EACH: u64 = 3;

/// Tries seeds and prints what came of it; an exit status.
pub fn run(from: u64, to: u64, threads: usize) -> u8 {
    let tried = seeds(from, to, EACH, threads, &|n| eprintln!("seed {n} done"));
    print!("{}", table(&tried));
    if tried.iter().any(Tried::missed) { report::SAFETY } else { report::HELD }
}
