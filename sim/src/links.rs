//! The links: what happens to an envelope between client and replica, and between replica and store.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use leasehold_core::codec;
use leasehold_core::store::{Answer, Commit, CommitReply, Read, Record, Snapshot, Store as _, StoreError, Version};
use leasehold_core::{Input, Name, Outcome, RequestId, StoreAnswer, StoreId, StoreOp};

use crate::calls::{CallId, Caller, Heard, Instant};
use crate::choices::{Choices as _, Topic};
use crate::oracle::Promise;
use crate::setup::{MILLI, SECOND};
use crate::strikes::Kind;
use crate::tables::{Blow, Deed};
use crate::trace::Lane;
use crate::world::{Event, Micros, Phase, World};

/// By how much a late envelope is late: longer than anybody waits for it.
const LATE: Micros = 7 * SECOND;

/// One-way cuts, by replica: nothing passes until then.
#[derive(Clone, Debug)]
pub struct Links {
    pub to_store: Vec<Micros>,
    pub from_store: Vec<Micros>,
    pub to_replica: Vec<Micros>,
    pub from_replica: Vec<Micros>,
    /// Orders of a script for the next commits of any replica, first come, first served.
    pub orders: Vec<Order>,
    /// Something is aimed at that comes twice.
    pub repeats: bool,
    /// Records that a newer release is said to have written, with their versions then, and until when.
    pub newer: BTreeMap<Name, (Version, Micros)>,
    /// What the newest transactions did, where a fail-over may forget it.
    pub newest: VecDeque<Option<Deed>>,
    /// Which transactions of the latest commits were applied, for those that come again.
    done: BTreeMap<(usize, u32, StoreId), Vec<bool>>,
}

/// What a script has planned for a commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    Pass,
    LoseRequest,
    LoseReply,
    /// Arrives so much later; its reply is lost.
    Late(Micros),
    /// Arrives in time, and once more so much later.
    Twice(Micros),
}

impl Links {
    pub fn new(replicas: usize) -> Links {
        let none = vec![0; replicas];
        Links {
            to_store: none.clone(),
            from_store: none.clone(),
            to_replica: none.clone(),
            from_replica: none,
            orders: Vec::new(),
            repeats: false,
            newer: BTreeMap::new(),
            newest: VecDeque::new(),
            done: BTreeMap::new(),
        }
    }

    pub fn heal(&mut self) {
        let replicas = self.to_store.len();
        *self = Links::new(replicas);
    }
}

impl World {
    /// Weights count only while faults are on.
    fn chaotic(&self) -> bool {
        self.phase == Phase::Chaos
    }

    fn store_latency(&mut self, r: usize) -> Micros {
        let mut after = 100 + self.choices.draw(Topic::Latency.of(r), 400);
        if self.chaotic() {
            let most = u64::from(self.setup.faults.store_delay_ms) * MILLI;
            if most > 0 {
                // Mostly short, sometimes long: the square of an even draw.
                let d = self.choices.draw(Topic::StoreDelay.of(r), 1_000);
                after += most * d * d / 1_000_000;
            }
            if self.store.slow_until > self.now {
                after += self.choices.draw(Topic::StoreDelay.of(r), self.store.slow_us + 1);
            }
        }
        after
    }

    fn call_latency(&mut self, r: usize) -> Micros {
        let mut after = 200 + self.choices.draw(Topic::Latency.of(8 + r), 800);
        let most = u64::from(self.setup.faults.call_delay_ms) * MILLI;
        if self.chaotic() && most > 0 {
            let d = self.choices.draw(Topic::CallDelay.of(r), 1_000);
            after += most * d * d / 1_000_000;
        }
        after
    }

    // --- replica to store ---------------------------------------------------------------------

    pub fn to_store(&mut self, r: usize, epoch: u32, id: StoreId, op: StoreOp) {
        let order = match &op {
            StoreOp::Commit(_) if !self.links.orders.is_empty() => self.links.orders.remove(0),
            _ => Order::Pass,
        };
        let after = self.store_latency(r);
        let op = Arc::new(op);
        let replica = r as u8;
        let at_store = |answer| Event::AtStore { replica, epoch, id, op: op.clone(), answer, again: false };
        let again = Event::AtStore { replica, epoch, id, op: op.clone(), answer: false, again: true };
        if self.strikes.on {
            if self.struck(Kind::Unavailable) {
                self.blow(Blow::Refused, &op, false);
                return self.reply_to(r, epoch, id, &op, Err(StoreError::Unavailable));
            }
            if self.struck(Kind::RequestLost) {
                self.blow(Blow::RequestLost, &op, false);
                return;
            }
            if self.struck(Kind::RequestLate) {
                self.blow(Blow::RequestLate, &op, false);
                return self.schedule(after + LATE, at_store(true));
            }
            if matches!(&*op, StoreOp::Commit(_)) && self.struck(Kind::Twice) {
                self.schedule(after + 3 * SECOND, again.clone());
            }
        }
        match order {
            Order::Pass => {}
            Order::LoseRequest => return,
            Order::LoseReply => return self.schedule(after, at_store(false)),
            Order::Late(late) => return self.schedule(after + late, at_store(false)),
            Order::Twice(later) => self.schedule(after + later, again.clone()),
        }
        if self.aim.is_some() {
            if !self.aim_at_request(r, epoch, id, &op, after) {
                return;
            }
            if self.aimed(&op, true, &[Blow::Repeated]).is_some() {
                self.schedule(after + 3 * SECOND, again.clone());
            }
        }
        if !self.chaotic() {
            if self.links.to_store[r] <= self.now {
                self.schedule(after, at_store(true));
            } else {
                self.say_request(r, id, "cannot pass");
            }
            return;
        }
        let f = &self.setup.faults;
        let (lost, error, late) = (f.store_request_lost, f.store_error, f.store_late);
        let duplicate = f.store_duplicate;
        let label = Topic::StoreRequest.of(r);
        if self.choices.chance(label, error) {
            // The call fails at once: before it was sent, or after.
            if self.choices.draw(label, 2) == 0 {
                self.blow(Blow::Refused, &op, false);
                self.say_request(r, id, "fails before it is sent");
                return self.reply_to(r, epoch, id, &op, Err(StoreError::Unavailable));
            }
            self.blow(Blow::Broken, &op, false);
            self.reply_to(r, epoch, id, &op, Err(StoreError::Unknown));
            if self.choices.draw(label, 3) > 0 {
                self.say_request(r, id, "fails after it was sent, and arrives");
                self.schedule(after, at_store(false));
            } else {
                self.say_request(r, id, "fails on its way, and is lost");
            }
            return;
        }
        if self.links.to_store[r] > self.now {
            self.say_request(r, id, "is lost on its way");
            return self.blow(Blow::CutOff, &op, false);
        }
        if self.choices.chance(label, lost) {
            self.say_request(r, id, "is lost on its way");
            return self.blow(Blow::RequestLost, &op, false);
        }
        if self.choices.chance(label, late) {
            self.blow(Blow::RequestLate, &op, false);
            let late = self.choices.between(label, 100 * MILLI, 7 * SECOND);
            self.say_request(r, id, &format!("is late by {} ms", late / MILLI));
            return self.schedule(after + late, at_store(true));
        }
        if self.choices.chance(label, duplicate) {
            let later = self.choices.between(label, 0, 6 * SECOND);
            self.say_request(r, id, &format!("will come once more {} ms later", later / MILLI));
            self.schedule(after + later, again);
        }
        self.schedule(after, at_store(true));
    }

    /// A request reaches the store. `again`: it did before; what it did then is done once more, which must
    /// change nothing (law 3). A transport that repeats a request on its own, *whatever* became of it, is
    /// outside the contract: a shell must see to it that its client library does not.
    pub fn at_store(&mut self, r: usize, epoch: u32, id: StoreId, op: &Arc<StoreOp>, answer: bool, again: bool) {
        if self.struck(Kind::StoreClock) {
            self.store.stepped += 20 * SECOND as i64;
        }
        if self.struck(Kind::StoreFull) {
            self.store.model.full = true;
            self.schedule(10 * SECOND, Event::Room);
        }
        self.store.tick(self.now);
        match self.aimed(op, false, &[Blow::StoreDown, Blow::StoreFull]) {
            Some(Blow::StoreDown) => self.store.down_until = self.now + 2 * SECOND,
            Some(_) => {
                self.store.model.full = true;
                self.schedule(2 * SECOND, Event::Room);
            }
            None => {}
        }
        if self.store.down_until > self.now {
            let label = Topic::StoreReply.of(r);
            self.blow(Blow::StoreDown, op, false);
            if answer && self.choices.draw(label, 2) == 1 {
                self.reply_to(r, epoch, id, op, Err(StoreError::Unavailable));
            }
            self.say_request(r, id, "finds the store unreachable");
            return;
        }
        let reply = match &**op {
            StoreOp::Read(read) => {
                self.counts.reads += 1;
                let mut answer = self.store.model.read(read);
                if let Ok(expect) = &answer {
                    let theirs = self.store.beside(|twin, model| twin.read(model.clock(), read, expect));
                    if let Some(theirs) = self.agree(theirs) {
                        answer = Ok(theirs);
                    }
                }
                if !self.links.newer.is_empty()
                    && let Ok(answer) = &mut answer
                {
                    self.as_newer(read, answer);
                }
                answer.map(StoreAnswer::Read)
            }
            StoreOp::Commit(commit) => match self.apply(r, commit, (r, epoch, id), again) {
                Some(reply) => reply.map(StoreAnswer::Commit),
                // Cut off half-way: whoever sent it hears nothing.
                None => return self.say_request(r, id, "is cut off between two transactions"),
            },
        };
        if self.broken.is_some() || !answer {
            return;
        }
        let label = Topic::StoreReply.of(r);
        let applied = reply.is_ok();
        if self.aim.is_some() && applied {
            if !self.aim_at_reply(r, epoch, id, op) {
                return;
            }
            if self.aimed(op, true, &[Blow::ReplyTwice]).is_some() {
                self.say_answer_of(r, id, "comes twice");
                self.blow(Blow::ReplyTwice, op, applied);
                self.reply_to(r, epoch, id, op, reply.clone());
            }
        }
        if self.links.from_store[r] > self.now {
            self.say_answer_of(r, id, "is lost on its way");
            return self.blow(Blow::CutOff, op, applied);
        }
        if self.struck(Kind::ReplyLost) {
            self.say_answer_of(r, id, "is lost on its way");
            return self.blow(Blow::ReplyLost, op, applied);
        }
        if self.struck(Kind::Broken) {
            self.blow(Blow::Broken, op, applied);
            return self.reply_to(r, epoch, id, op, Err(StoreError::Unknown));
        }
        if self.struck(Kind::ReplyLate) {
            let (reply, op) = (Arc::new(reply), op.clone());
            return self.schedule(LATE, Event::FromStore { replica: r as u8, epoch, id, op, reply });
        }
        if self.struck(Kind::ReplyTwice) {
            self.blow(Blow::ReplyTwice, op, applied);
            self.reply_to(r, epoch, id, op, reply.clone());
        }
        if self.chaotic() {
            let (lost, twice) = (self.setup.faults.store_reply_lost, self.setup.faults.reply_twice);
            if self.choices.chance(label, lost) {
                // Half the time the shell notices that the connection broke.
                if self.choices.draw(label, 2) == 1 {
                    self.blow(Blow::Broken, op, applied);
                    self.reply_to(r, epoch, id, op, Err(StoreError::Unknown));
                } else if applied {
                    self.blow(Blow::ReplyLost, op, applied);
                }
                self.say_answer_of(r, id, "is lost on its way");
                return;
            }
            if self.choices.chance(label, twice) {
                if applied {
                    self.blow(Blow::ReplyTwice, op, applied);
                }
                self.say_answer_of(r, id, "comes twice");
                self.reply_to(r, epoch, id, op, reply.clone());
            }
        }
        self.reply_to(r, epoch, id, op, reply);
    }

    /// Records that a newer release wrote look so to whoever reads them: these replicas are too old for a while.
    fn as_newer(&self, read: &Read, answer: &mut Snapshot) {
        let newer = |key: &Name, record: &mut Record| {
            if let Record::Present { bytes: Some(bytes), version, .. } = record
                && self.links.newer.get(key).is_some_and(|(of, until)| of == version && *until > self.now)
            {
                *bytes = codec::newer();
            }
        };
        read.records.iter().zip(&mut answer.records).for_each(|(key, record)| newer(key, record));
        for (slice, entries) in read.slices.iter().zip(&mut answer.slices) {
            for entry in entries {
                for (prefix, record) in slice.give.iter().zip(&mut entry.records) {
                    newer(&prefix.join(&entry.member), record);
                }
            }
        }
    }

    pub fn say_request(&mut self, r: usize, id: StoreId, what: &str) {
        self.say_loss(Lane::Replica(r as u8), Lane::Store, || format!("op {}: {what}", id.0));
    }

    pub fn say_answer_of(&mut self, r: usize, id: StoreId, what: &str) {
        self.say_loss(Lane::Store, Lane::Replica(r as u8), || format!("op {}: its answer {what}", id.0));
    }

    pub fn reply_to(
        &mut self,
        r: usize,
        epoch: u32,
        id: StoreId,
        op: &Arc<StoreOp>,
        reply: Result<StoreAnswer, StoreError>,
    ) {
        let after = self.store_latency(r);
        let (reply, op) = (Arc::new(reply), op.clone());
        self.schedule(after, Event::FromStore { replica: r as u8, epoch, id, op, reply });
    }

    pub fn from_store(&mut self, r: usize, epoch: u32, id: StoreId, reply: Arc<Result<StoreAnswer, StoreError>>) {
        match &*reply {
            Ok(answer) => self.digest.add(answer),
            Err(error) => self.digest.num(*error as u64),
        }
        let reply = Arc::try_unwrap(reply).unwrap_or_else(|shared| (*shared).clone());
        self.input(r, epoch, Input::StoreReply { id, reply });
    }

    /// Applies a commit, one transaction after the other, each looked at by the oracle. `None`: the
    /// store was cut off between two of them.
    fn apply(
        &mut self,
        r: usize,
        commit: &Commit,
        call: (usize, u32, StoreId),
        again: bool,
    ) -> Option<Result<CommitReply, StoreError>> {
        self.counts.commits += 1;
        let mut keep = commit.txns.len();
        let partial = self.setup.faults.store_partial;
        if self.chaotic() && keep > 1 && self.choices.chance(Topic::StorePartial.of(r), partial) {
            keep = self.choices.draw(Topic::StorePartial.of(r), keep as u64) as usize;
        }
        if keep > 1 && self.struck(Kind::Partial) {
            keep = 1;
        }
        keep = self.aimed_cut(&commit.txns).unwrap_or(keep);
        if keep < commit.txns.len() {
            for (n, txn) in commit.txns.iter().enumerate() {
                self.blow_txn(Blow::Partial, txn, n < keep);
            }
        }
        let mut answers = Vec::with_capacity(commit.txns.len());
        let mut given = Vec::new();
        let before = if again { self.links.done.remove(&call).unwrap_or_default() } else { Vec::new() };
        for (n, txn) in commit.txns.iter().take(keep).enumerate() {
            if again && !before.get(n).is_some_and(|applied| *applied) {
                continue;
            }
            if again {
                self.blow_txn(Blow::Repeated, txn, true);
            }
            let one = Commit { txns: vec![txn.clone()], grows: commit.grows };
            let mut reply = match self.store.model.commit(&one) {
                Ok(reply) => reply,
                Err(error) => {
                    self.blow_txn(Blow::StoreFull, txn, false);
                    return Some(Err(error));
                }
            };
            let Some(answer) = reply.answers.pop() else { continue };
            given.push(txn.clone());
            self.say_txn(r, txn, &answer);
            let checked = match self.corruption {
                None => self.oracle.commit(&self.store.model, txn, &answer, &mut self.ledger),
                Some(_) => self.tell_commit(txn, &answer),
            };
            match answer {
                Answer::Applied { .. } => self.counts.txns_applied += 1,
                _ => self.counts.txns_refused += 1,
            }
            self.may_be_forgotten(txn, &answer);
            answers.push(answer);
            self.hold(checked);
        }
        let same = Commit { txns: given, grows: commit.grows };
        let theirs = self.store.beside(|twin, model| twin.commit(model.clock(), &same, &answers));
        self.agree(theirs);
        self.notify_all();
        if self.setup.faults.store_duplicate > 0 || self.links.repeats || self.phase == Phase::Script {
            let applied = answers.iter().map(|a| matches!(a, Answer::Applied { .. })).collect();
            self.links.done.insert(call, applied);
        }
        (keep == commit.txns.len()).then(|| Ok(CommitReply { clock: self.store.model.clock(), answers }))
    }

    /// Ends the run if the real store beside the model did not do as it.
    pub fn agree<T>(&mut self, theirs: Result<Option<T>, String>) -> Option<T> {
        theirs.unwrap_or_else(|what| {
            self.violate(Promise::BooksBalance, format!("the stores differ: {what}"));
            None
        })
    }

    fn notify_all(&mut self) {
        for topic in self.store.model.notified() {
            for r in 0..self.hosts.len() {
                let lost = self.setup.faults.notify_lost;
                if self.hosts[r].replica.is_none()
                    || self.links.from_store[r] > self.now
                    || (self.chaotic() && self.choices.chance(Topic::Notify.of(r), lost))
                    || self.struck(Kind::NoticeLost)
                {
                    if self.hosts[r].replica.is_some() {
                        let topic = topic.clone();
                        self.say_loss(Lane::Store, Lane::Replica(r as u8), || format!("notice of {topic} is lost"));
                    }
                    continue;
                }
                let after = self.store_latency(r);
                let epoch = self.hosts[r].epoch;
                self.schedule(after, Event::Notify { replica: r as u8, epoch, topic: topic.clone() });
            }
        }
    }

    // --- caller to replica --------------------------------------------------------------------

    pub fn send_call(&mut self, call: CallId, patience: Micros) {
        let Some(r) = self.ledger.get(call).map(|c| c.replica) else { return };
        self.schedule(patience, Event::GiveUp { call });
        let after = self.call_latency(r);
        let lost = self.setup.faults.call_lost;
        if self.links.to_replica[r] > self.now
            || (self.chaotic() && self.choices.chance(Topic::CallLink.of(r), lost))
            || self.struck(Kind::CallLost)
        {
            if let Some(caller) = self.ledger.get(call).map(|c| c.caller) {
                let (from, to) = (Lane::Caller(caller), Lane::Replica(r as u8));
                self.say_loss(from, to, || format!("call {call}: is lost on its way"));
            }
            return;
        }
        self.schedule(after, Event::Arrive { call });
    }

    pub fn call_arrives(&mut self, call: CallId) {
        let Some(found) = self.ledger.get_mut(call) else { return };
        let r = found.replica;
        let host = &mut self.hosts[r];
        if host.replica.is_none() {
            let after = self.call_latency(r);
            return self.schedule(after, Event::Answer { call, heard: Box::new(Heard::NotDelivered) });
        }
        let clock = self.store.tick(self.now);
        let change = self.oracle.changes();
        found.arrived = Some((Instant { change, clock, answers: host.answers, now: self.now }, host.epoch));
        host.open.insert(call);
        let (epoch, request) = (host.epoch, (*found.request).clone());
        self.digest.add(&request);
        self.meets(call, clock);
        if !self.arrives_untold(call) {
            self.oracle.arrives(&self.ledger, call);
        }
        self.input(r, epoch, Input::Request { id: RequestId(u64::from(call)), request });
    }

    pub fn send_answer(&mut self, r: usize, call: CallId, outcome: Outcome) {
        let after = self.call_latency(r);
        let lost = self.setup.faults.answer_lost;
        if self.links.from_replica[r] > self.now
            || (self.chaotic() && self.choices.chance(Topic::CallLink.of(r), lost))
            || self.struck(Kind::AnswerLost)
        {
            if let Some(caller) = self.ledger.get(call).map(|c| c.caller) {
                let (from, to) = (Lane::Replica(r as u8), Lane::Caller(caller));
                self.say_loss(from, to, || format!("call {call}: its answer is lost on its way"));
            }
            return;
        }
        self.schedule(after, Event::Answer { call, heard: Box::new(Heard::Answer(outcome)) });
    }

    pub fn answer_arrives(&mut self, call: CallId, heard: Heard) {
        let Some(found) = self.ledger.get_mut(call) else { return };
        if found.heard.is_some() {
            return;
        }
        found.heard = Some(heard.clone());
        let (caller, tag) = (found.caller, found.tag);
        match caller {
            Caller::Client(client) => self.client_hears(usize::from(client), call, tag, heard),
            Caller::Owner(owner) => self.owner_hears(usize::from(owner), tag, heard),
            Caller::Worker(worker) => self.worker_hears(usize::from(worker), call, tag, heard),
            Caller::User(user) => self.user_hears(usize::from(user), call, heard),
            Caller::Operator => self.operator_hears(call, tag, heard),
            Caller::Auditor => self.auditor_hears(heard),
            Caller::Script => {}
        }
    }

    /// The caller stops waiting. Sometimes the replica notices that the connection is closed.
    pub fn give_up(&mut self, call: CallId) {
        let Some(found) = self.ledger.get(call) else { return };
        if found.heard.is_some() {
            return;
        }
        let (r, arrived) = (found.replica, found.arrived);
        if let Some((_, epoch)) = arrived
            && self.choices.draw(Topic::CallLink.of(r), 2) == 1
        {
            let after = self.call_latency(r);
            self.schedule(after, Event::HangUp { replica: r as u8, epoch, call });
        }
        self.answer_arrives(call, Heard::Nothing);
    }

    pub fn hang_up_arrives(&mut self, r: usize, epoch: u32, call: CallId) {
        let host = &mut self.hosts[r];
        if host.epoch != epoch || host.replica.is_none() || !host.open.remove(&call) {
            return;
        }
        if let Some(found) = self.ledger.get_mut(call) {
            found.hung_up = true;
        }
        self.outcome_never_known(call);
        let unnamed = self
            .ledger
            .get(call)
            .is_some_and(|c| matches!(&*c.request, leasehold_core::Request::Acquire(asked) if asked.slot.is_none()));
        if unnamed && self.setup.chaos_every_us == 0 {
            self.hung_up.push((call, self.now));
        }
        self.input(r, epoch, Input::Cancelled { id: RequestId(u64::from(call)) });
    }
}
