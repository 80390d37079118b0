//! The machine: takes inputs, runs operations, and decides what is sent to the store and when.

use alloc::boxed::Box;
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::vec::Vec;

use super::breaker::Breaker;
use super::clock::StoreClock;
use super::polls::Polls;
use super::task::{Cx, Draft, Evidence, Next, Operation as _, Plan, Queues, TaskId, Verdict, applied};
use super::{Config, Input, Mark, Now, Output, Outputs, Stats, StoreAnswer, StoreId};
use crate::failure::Failure;
use crate::ids::{JobId, Maker};
use crate::job::{self, Cursor, Op};
use crate::limits;
use crate::name::Name;
use crate::request::{Outcome, Request, RequestId, Response};
use crate::store::{Answer, Clock, CommitReply, Read, Record, Snapshot, StoreError, Txn, keys};
use alloc::sync::Arc;

/// One server process: a state machine with inputs, outputs and a clock that is handed in.
///
/// **The law**: [`Replica::step`] is total, deterministic and never blocks.
#[derive(Clone, Debug)]
pub struct Replica {
    pub(super) config: Config,
    make: Maker,
    /// Names this replica in its proof that commits work.
    nonce: u64,
    pub(super) now: Now,
    pub(super) clock: StoreClock,
    pub(super) breaker: Breaker,

    pub(super) tasks: BTreeMap<TaskId, Task>,
    next_task: u64,
    requests: BTreeMap<RequestId, Asked>,
    joins: BTreeMap<u64, Join>,
    deadlines: BTreeSet<(Now, TaskId)>,
    /// Unknown outcomes that can be settled only when their time has passed.
    parked: BTreeSet<(Now, TaskId)>,
    polls: Polls,
    /// Topics notified while a poll was under way and nobody waited.
    missed: BTreeSet<Name>,
    /// Sweeps whose read failed.
    dropped: Vec<TaskId>,
    bytes: usize,

    pub(super) to_read: VecDeque<TaskId>,
    /// Commits that do not grow, and those that do.
    pub(super) to_commit: [VecDeque<TaskId>; 2],
    pub(super) calls: BTreeMap<StoreId, Call>,
    pub(super) next_call: u64,

    queues: Queues,
    pub(super) trims: BTreeMap<Name, usize>,
    repairs: Vec<JobId>,
    marks: Vec<Mark>,
    sweeps: Sweeps,
    started: bool,
    spare_before: Clock,
    spare_until: Clock,
    pub(super) stats: Stats,
}

/// What a request became.
#[derive(Clone, Debug)]
enum Asked {
    Task(TaskId),
    Join(u64),
}

/// A batch: answered when every part is.
#[derive(Clone, Debug)]
struct Join {
    request: RequestId,
    parts: Vec<TaskId>,
    outcomes: Vec<Option<Outcome>>,
    left: usize,
}

/// Who is told the outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Origin {
    Request(RequestId),
    Part {
        join: u64,
        slot: usize,
    },
    /// Nobody any more.
    Orphan,
    Deadlines,
    Names,
    Scrub,
    Repair,
}

impl Origin {
    fn is_sweep(self) -> bool {
        matches!(self, Origin::Deadlines | Origin::Names | Origin::Scrub | Origin::Repair)
    }
}

#[derive(Clone, Debug)]
pub(super) struct Task {
    origin: Origin,
    op: Op,
    pub(super) state: State,
    deadline: Now,
    /// When a long poll's wait is over.
    poll_end: Option<Now>,
    last_try: bool,
    races: u32,
    /// Something of it has been applied, or may have been: it can no longer be said that nothing was.
    committed: bool,
    weight: usize,
}

#[derive(Clone, Debug)]
pub(super) enum State {
    /// To be read, or under way.
    Read {
        read: Read,
        alone: bool,
    },
    /// To be committed, or under way.
    Commit(Pending),
    /// The record is being read that tells whether it was applied, or the time is awaited from which
    /// on that is certain.
    Settle(Pending, Evidence),
    Wait,
    /// Being worked on.
    Busy,
}

/// A commit that is not answered yet.
#[derive(Clone, Debug)]
pub(super) struct Pending {
    pub drafts: Vec<Draft>,
    /// Filled when first sent; sent again unchanged.
    pub txns: Vec<Arc<Txn>>,
    pub grows: bool,
    pub weight: usize,
    evidence: Option<Evidence>,
    pub valid_until: Clock,
    pub under_way: bool,
    /// It was sent and no answer came: it may have been applied, or may still be.
    pub doubt: bool,
}

/// One call to the store under way.
#[derive(Clone, Debug)]
pub(super) struct Call {
    pub sent: Now,
    pub what: What,
}

#[derive(Clone, Debug)]
pub(super) enum What {
    /// Parts of the answer go to these, in order.
    Read(Vec<(TaskId, Shape)>),
    /// So many answers go to each, in order; what is left over is nobody's.
    Commit { grows: bool, tasks: Vec<(TaskId, usize)> },
}

/// How much of a merged answer is a task's.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub records: usize,
    pub slices: usize,
    pub counts: usize,
    pub members: usize,
    pub log: bool,
    pub scan: bool,
}

#[derive(Clone, Debug, Default)]
struct Sweeps {
    next: Now,
    last: Now,
    deadlines: Option<TaskId>,
    names: Option<TaskId>,
    scrub: Option<TaskId>,
    repair: Option<TaskId>,
    scrub_next: Now,
    cursor: Cursor,
}

/// Sweeps come no closer together than this.
const SWEEP_GAP_MS: u64 = 50;

impl Replica {
    /// A replica that has just started; its first act will be a read. Two replicas, or two starts
    /// of one, need different seeds.
    pub fn new(config: Config, seed: [u8; 32]) -> Self {
        let mut make = Maker::new(seed);
        let nonce = make.up_to(u64::MAX);
        Replica {
            make,
            nonce,
            now: 0,
            clock: StoreClock::default(),
            breaker: Breaker::default(),
            tasks: BTreeMap::new(),
            next_task: 0,
            requests: BTreeMap::new(),
            joins: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            parked: BTreeSet::new(),
            polls: Polls::default(),
            missed: BTreeSet::new(),
            dropped: Vec::new(),
            bytes: 0,
            to_read: VecDeque::new(),
            to_commit: [VecDeque::new(), VecDeque::new()],
            calls: BTreeMap::new(),
            next_call: 0,
            queues: Queues::default(),
            trims: BTreeMap::new(),
            repairs: Vec::new(),
            marks: Vec::new(),
            sweeps: Sweeps { scrub_next: config.scrub_ms, ..Sweeps::default() },
            started: false,
            spare_before: 0,
            spare_until: 0,
            stats: Stats::default(),
            config,
        }
    }

    /// Takes one input. Total, deterministic, never blocks.
    pub fn step(&mut self, now: Now, input: Input, out: &mut Outputs) {
        self.now = self.now.max(now);
        match input {
            Input::Request { id, request } => self.request(id, request, out),
            Input::Cancelled { id } => self.cancelled(id),
            Input::StoreReply { id, reply } => self.store_reply(id, reply, out),
            Input::Notified { topic } => self.notified(&topic, out),
            Input::Timer => {}
        }
        self.tick(out);
        self.flush(out);
        for mark in self.marks.drain(..) {
            self.stats.newer_format |= mark == Mark::NewerFormat;
            out.push(Output::Mark(mark));
        }
    }

    /// When the next [`Input::Timer`] is wanted; `None` never happens after the first step.
    pub fn next_timer(&self) -> Option<Now> {
        let waiting = !self.to_read.is_empty() || self.to_commit.iter().any(|q| !q.is_empty());
        let sweep = self.sweeps.deadlines.is_none().then_some(self.sweeps.next);
        let scrub = (self.config.scrub_ms > 0 && self.sweeps.scrub.is_none()).then_some(self.sweeps.scrub_next);
        let hold = waiting.then(|| self.breaker.next(self.now)).flatten();
        let timeout = self.calls.values().map(|c| c.sent + limits::STORE_TIMEOUT_MS).min();
        let deadline = self.deadlines.first().map(|d| d.0);
        let parked = self.parked.first().map(|p| p.0);
        [sweep, scrub, hold, timeout, deadline, parked, self.polls.next()].into_iter().flatten().min()
    }

    pub fn stats(&self) -> Stats {
        let mut stats = self.stats;
        stats.in_work = self.in_work() as u64;
        stats.polls = self.polls.len() as u64;
        stats.breaker_open = self.breaker.open();
        stats
    }

    fn in_work(&self) -> usize {
        self.tasks.len().saturating_sub(self.polls.len())
    }

    // --- requests ---------------------------------------------------------------------------

    fn request(&mut self, id: RequestId, request: Request, out: &mut Outputs) {
        if let Err(failure) = self.admit(&request) {
            out.push(Output::Reply { id, outcome: Err(failure) });
            return;
        }
        match request {
            Request::Drain => {
                self.drain(out);
                out.push(Output::Reply { id, outcome: Ok(Response::Draining) });
            }
            Request::Batch(items) if items.is_empty() || items.len() > limits::BATCH_ITEMS => {
                let detail = alloc::format!("must be 1 to {} items", limits::BATCH_ITEMS);
                out.push(Output::Reply { id, outcome: Err(job::check::invalid("items", detail)) });
            }
            Request::Batch(items) => {
                self.next_task += 1;
                let join = self.next_task;
                let left = items.len();
                let join_of = Join { request: id, parts: Vec::new(), outcomes: alloc::vec![None; left], left };
                self.joins.insert(join, join_of);
                self.requests.insert(id, Asked::Join(join));
                for (slot, item) in items.into_iter().enumerate() {
                    self.open(Origin::Part { join, slot }, item, out);
                }
            }
            request => self.open(Origin::Request(id), request, out),
        }
    }

    /// Whether there is room, and any sense in trying.
    fn admit(&mut self, request: &Request) -> Result<(), Failure> {
        if matches!(request, Request::Drain) {
            return Ok(());
        }
        let retry_after_ms = self.breaker.retry_after_ms(self.now);
        if self.breaker.open() {
            return Err(Failure::StoreUnavailable { retry_after_ms });
        }
        if self.stats.draining && matches!(request, Request::Claim(_)) {
            return Err(Failure::Draining { retry_after_ms });
        }
        let n = match request {
            Request::Batch(items) => items.len(),
            _ => 1,
        };
        let weight = job::weight(request);
        // What ends or extends a lease is let in when nothing else is: it makes room.
        let share = if job::drains(request) { 2 } else { 1 };
        // One request is always let in, however small the mailbox or large the batch.
        let full = self.in_work() > 0 && self.in_work() + n > self.config.mailbox * share
            || self.bytes > 0 && self.bytes + weight > self.config.mailbox_bytes * share
            || self.polls.len() >= limits::POLLS && matches!(request, Request::Claim(_) | Request::Events { .. });
        if full {
            self.marks.push(Mark::MailboxFull);
            self.stats.refused_mailbox += 1;
            return Err(Failure::MailboxFull { retry_after_ms: 1_000 });
        }
        Ok(())
    }

    fn open(&mut self, origin: Origin, request: Request, out: &mut Outputs) {
        let weight = job::weight(&request);
        match Op::of(request, self.nonce) {
            Err(failure) => {
                self.tell(origin, Err(failure), out);
            }
            Ok(op) => {
                let id = self.start(origin, op, weight, out);
                match origin {
                    Origin::Request(request) if self.tasks.contains_key(&id) => {
                        self.requests.insert(request, Asked::Task(id));
                    }
                    Origin::Part { join, .. } => {
                        if let Some(join) = self.joins.get_mut(&join) {
                            join.parts.push(id);
                        }
                    }
                    _ => {}
                }
            }
        }
    }

    fn start(&mut self, origin: Origin, op: Op, weight: usize, out: &mut Outputs) -> TaskId {
        self.next_task += 1;
        let id = TaskId(self.next_task);
        let wait_ms = match &op {
            Op::Claim(claim) => claim.wait_ms(),
            Op::Events(events) => events.wait_ms(),
            _ => 0,
        };
        let deadline = self.now + wait_ms + limits::REQUEST_MS;
        if !origin.is_sweep() {
            self.deadlines.insert((deadline, id));
        }
        self.bytes += weight;
        let mut task = Task {
            origin,
            op,
            state: State::Busy,
            deadline,
            poll_end: (wait_ms > 0).then_some(self.now + wait_ms),
            last_try: false,
            races: 0,
            committed: false,
            weight,
        };
        let next = self.run(&mut task, |op, cx| op.start(cx));
        self.go(id, task, next, out);
        id
    }

    fn cancelled(&mut self, id: RequestId) {
        let parts = match self.requests.remove(&id) {
            Some(Asked::Task(task)) => alloc::vec![task],
            Some(Asked::Join(join)) => self.joins.remove(&join).map(|j| j.parts).unwrap_or_default(),
            None => return,
        };
        for part in parts {
            let Some(task) = self.tasks.get_mut(&part) else { continue };
            task.origin = Origin::Orphan;
            let unsent = match &task.state {
                State::Wait => true,
                State::Commit(p) => !task.committed && !p.under_way && !p.doubt,
                State::Read { .. } | State::Settle(..) | State::Busy => false,
            };
            if unsent {
                self.polls.remove(part);
                self.close(part);
            }
        }
    }

    fn drain(&mut self, out: &mut Outputs) {
        self.stats.draining = true;
        for id in self.polls.everyone() {
            self.polls.remove(id);
            let retry_after_ms = 1_000;
            self.finish(id, Err(Failure::Draining { retry_after_ms }), out);
        }
    }

    // --- running operations -----------------------------------------------------------------

    fn run(&mut self, task: &mut Task, f: impl FnOnce(&mut Op, &mut Cx<'_>) -> Next) -> Next {
        let mut cx = Cx {
            clock: self.clock.estimate(self.now),
            fresh: self.clock.fresh(self.now),
            make: &mut self.make,
            config: &self.config,
            queues: &mut self.queues,
            stats: &mut self.stats,
            marks: &mut self.marks,
            trims: &mut self.trims,
            repairs: &mut self.repairs,
            spare_before: self.spare_before,
            spare_until: self.spare_until,
            orphan: task.origin == Origin::Orphan,
            last_try: task.last_try,
        };
        f(&mut task.op, &mut cx)
    }

    /// Does what an operation wants next.
    fn go(&mut self, id: TaskId, mut task: Task, mut next: Next, out: &mut Outputs) {
        loop {
            match next {
                Next::Read(read) => {
                    task.state = State::Read { read, alone: false };
                    self.to_read.push_back(id);
                    break;
                }
                Next::Commit(Plan { txns, grows, evidence }) => {
                    let weight = txns.iter().map(Draft::weight).sum();
                    task.state = State::Commit(Pending {
                        drafts: txns,
                        txns: Vec::new(),
                        grows,
                        weight,
                        evidence,
                        valid_until: 0,
                        under_way: false,
                        doubt: false,
                    });
                    self.to_commit[usize::from(grows)].push_back(id);
                    break;
                }
                Next::Wait(topics) => {
                    let Some(end) = task.poll_end.filter(|_| task.origin != Origin::Orphan) else {
                        self.tasks.insert(id, task);
                        self.finish(id, Ok(Response::Claimed(Vec::new())), out);
                        return;
                    };
                    if self.stats.draining {
                        self.tasks.insert(id, task);
                        self.finish(id, Err(Failure::Draining { retry_after_ms: 1_000 }), out);
                        return;
                    }
                    let missed = topics.iter().find(|t| self.missed.contains(*t)).cloned();
                    if let Some(topic) = missed {
                        self.missed.remove(&topic);
                        next = self.run(&mut task, |op, cx| op.start(cx));
                        continue;
                    }
                    task.state = State::Wait;
                    self.polls.wait(id, topics, end);
                    break;
                }
                Next::Done(outcome) => {
                    self.tasks.insert(id, task);
                    self.finish(id, outcome, out);
                    return;
                }
                Next::Become(op) => {
                    task.op = op;
                    next = self.run(&mut task, |op, cx| op.start(cx));
                }
            }
        }
        self.tasks.insert(id, task);
    }

    /// Takes a task out, lets its operation act, and goes on with what it wants.
    fn act(&mut self, id: TaskId, out: &mut Outputs, f: impl FnOnce(&mut Op, &mut Cx<'_>) -> Next) {
        let Some(mut task) = self.tasks.remove(&id) else { return };
        task.state = State::Busy;
        let next = self.run(&mut task, f);
        self.go(id, task, next, out);
    }

    /// Forgets a task.
    fn close(&mut self, id: TaskId) -> Option<Task> {
        let task = self.tasks.remove(&id)?;
        self.deadlines.remove(&(task.deadline, id));
        self.bytes = self.bytes.saturating_sub(task.weight);
        if self.tasks.len() == self.polls.len() {
            // No poll is on its way: nothing can have been missed.
            self.missed.clear();
        }
        Some(task)
    }

    fn finish(&mut self, id: TaskId, outcome: Outcome, out: &mut Outputs) {
        let Some(task) = self.close(id) else { return };
        let outcome = match outcome {
            // honest-replies: after something was applied, "certainly not" would be a lie.
            Err(failure) if task.committed && failure.retry_after_ms().is_some() => {
                Err(Failure::OutcomeUnknown { retry_after_ms: failure.retry_after_ms().unwrap_or(1_000) })
            }
            outcome => outcome,
        };
        match &task.op {
            // There may be more where a filled claim came from.
            Op::Claim(claim) if claim.filled() => {
                for topic in claim.topics() {
                    self.wake(&topic, out);
                }
            }
            Op::Deadlines(sweep) => {
                let wake = sweep.next.map(|at| {
                    let ms = at.saturating_sub(self.clock.estimate(self.now)) / limits::MILLI;
                    self.now + ms + 1 + self.make.up_to(20)
                });
                if sweep.more {
                    self.sweeps.next = self.now;
                } else if let Some(wake) = wake {
                    self.sweeps.next = self.sweeps.next.min(wake.max(self.now + SWEEP_GAP_MS));
                }
            }
            Op::Names(names) if names.more => self.sweeps.next = self.sweeps.next.min(self.now + SWEEP_GAP_MS),
            Op::Scrub(scrub) if task.origin == Origin::Scrub => self.sweeps.cursor = scrub.cursor.clone(),
            _ => {}
        }
        self.tell(task.origin, outcome, out);
    }

    fn tell(&mut self, origin: Origin, outcome: Outcome, out: &mut Outputs) {
        match origin {
            Origin::Request(id) => {
                self.requests.remove(&id);
                out.push(Output::Reply { id, outcome });
            }
            Origin::Part { join: id, slot } => {
                let Some(join) = self.joins.get_mut(&id) else { return };
                if let Some(place) = join.outcomes.get_mut(slot) {
                    *place = Some(outcome);
                }
                join.left = join.left.saturating_sub(1);
                if join.left == 0
                    && let Some(join) = self.joins.remove(&id)
                {
                    self.requests.remove(&join.request);
                    let outcomes = join.outcomes.into_iter().flatten().collect();
                    out.push(Output::Reply { id: join.request, outcome: Ok(Response::Batch(outcomes)) });
                }
            }
            Origin::Orphan => {}
            Origin::Deadlines => self.sweeps.deadlines = None,
            Origin::Names => self.sweeps.names = None,
            Origin::Scrub => self.sweeps.scrub = None,
            Origin::Repair => self.sweeps.repair = None,
        }
    }

    // --- the store's replies ----------------------------------------------------------------

    fn store_reply(&mut self, id: StoreId, reply: Result<StoreAnswer, StoreError>, out: &mut Outputs) {
        let Some(call) = self.calls.remove(&id) else {
            // Expected: the call was given up, or this is its reply's second coming.
            self.marks.push(Mark::LateReply);
            return;
        };
        match (call.what, reply) {
            (What::Read(parts), Ok(StoreAnswer::Read(snapshot))) => {
                self.heard(snapshot.clock);
                self.distribute(parts, snapshot, out);
            }
            (What::Commit { tasks, .. }, Ok(StoreAnswer::Commit(reply))) => {
                self.heard(reply.clock);
                self.distribute_answers(tasks, reply, out);
            }
            (What::Commit { tasks, .. }, Err(StoreError::Full)) => {
                // A store that says so works.
                self.breaker.success(self.now);
                for (task, _) in tasks {
                    self.refused_full(task, out);
                }
            }
            (what, Err(StoreError::Unavailable)) => self.call_failed(what, false),
            // An answer of the wrong kind says nothing about what was applied.
            (what, Err(StoreError::Unknown | StoreError::Full) | Ok(_)) => self.call_failed(what, true),
        }
    }

    /// The store answered at this clock.
    fn heard(&mut self, clock: Clock) {
        self.clock.observe(clock, self.now);
        let recovered = self.breaker.success(self.now);
        let outage_ms = if self.started {
            let Some(recovered) = recovered else { return };
            if recovered.was_open {
                self.marks.push(Mark::BreakerClosed);
            }
            recovered.outage_ms
        } else {
            self.started = true;
            limits::GRACE_MS
        };
        // Living holders could not renew either: those who held a lease before get time to.
        self.spare_before = clock;
        let spare = outage_ms.min(limits::GRACE_MS) * limits::MILLI;
        self.spare_until = self.spare_until.max(clock.saturating_add(spare));
    }

    fn distribute(&mut self, parts: Vec<(TaskId, Shape)>, mut snapshot: Snapshot, out: &mut Outputs) {
        let clock = snapshot.clock;
        let merged = parts.len() > 1;
        let mut records = snapshot.records.into_iter();
        let mut slices = snapshot.slices.into_iter();
        let mut counts = snapshot.counts.into_iter();
        let mut members = snapshot.members.into_iter();
        for (id, shape) in parts {
            let part = Snapshot {
                clock,
                records: records.by_ref().take(shape.records).collect(),
                slices: slices.by_ref().take(shape.slices).collect(),
                counts: counts.by_ref().take(shape.counts).collect(),
                members: members.by_ref().take(shape.members).collect(),
                log: if shape.log { core::mem::take(&mut snapshot.log) } else { Vec::new() },
                scan: if shape.scan { snapshot.scan.take() } else { None },
            };
            let unread = part.records.iter().any(Record::is_unread)
                || part.slices.iter().flatten().any(|e| e.records.iter().any(Record::is_unread));
            match self.tasks.get_mut(&id).map(|t| &mut t.state) {
                // Others used up the answer's room: again, alone.
                Some(State::Read { alone, .. }) if merged && unread => {
                    *alone = true;
                    self.to_read.push_front(id);
                }
                Some(State::Read { .. }) => self.act(id, out, |op, cx| op.read(part, cx)),
                Some(State::Settle(pending, evidence)) => {
                    let verdict = evidence.judge(part.records.first().unwrap_or(&Record::Absent));
                    let over = clock > pending.valid_until;
                    self.settle(id, verdict, over, clock, out);
                }
                _ => {}
            }
        }
    }

    /// Law 4: what the evidence says about a commit whose outcome was unknown.
    fn settle(&mut self, id: TaskId, verdict: Verdict, over: bool, clock: Clock, out: &mut Outputs) {
        match verdict {
            Verdict::Applied => {
                self.marks.push(Mark::SettledApplied);
                if let Some(task) = self.tasks.get_mut(&id) {
                    task.committed = true;
                }
                self.act(id, out, |op, cx| op.settled(clock, cx));
            }
            Verdict::NotApplied if over => {
                self.marks.push(Mark::SettledNotApplied);
                self.act(id, out, |op, cx| op.start(cx));
            }
            // It may still be on its way: only when its time has passed is it certain.
            Verdict::NotApplied => {
                let wait = match self.tasks.get(&id).map(|t| &t.state) {
                    Some(State::Settle(pending, _)) => pending.valid_until.saturating_sub(clock) / limits::MILLI,
                    _ => 0,
                };
                self.parked.insert((self.now + wait + 1, id));
            }
            Verdict::Unknown => {
                self.marks.push(Mark::SettledUnknown);
                self.finish(id, Err(Failure::OutcomeUnknown { retry_after_ms: 1_000 }), out);
            }
        }
    }

    fn distribute_answers(&mut self, tasks: Vec<(TaskId, usize)>, reply: CommitReply, out: &mut Outputs) {
        let clock = reply.clock;
        let mut answers = reply.answers.into_iter();
        let mut woken = BTreeSet::new();
        for (id, n) in tasks {
            let answers: Vec<Answer> = answers.by_ref().take(n).collect();
            let Some(task) = self.tasks.get_mut(&id) else { continue };
            let State::Commit(pending) = &mut task.state else { continue };
            pending.under_way = false;
            let applied = applied(&answers);
            task.committed |= applied;
            if applied {
                for txn in &pending.txns {
                    woken.extend(txn.writes.iter().filter_map(|w| match w {
                        crate::store::Write::Append { log, .. } => Some(log.clone()),
                        _ => None,
                    }));
                }
            } else if answers.iter().any(|a| matches!(a, Answer::Refused(_))) {
                task.races += 1;
                self.marks.push(Mark::RaceLost);
            }
            let (doubt, races, committed) = (pending.doubt, task.races, task.committed);
            if !applied && doubt {
                // The first sending may have been applied: this refusal may be its own doing.
                task.committed |= pending.evidence.is_none();
                match pending.evidence.clone() {
                    Some(evidence) => self.doubt(id, evidence),
                    None if answers.iter().all(|a| *a == Answer::TooLate) => {
                        self.act(id, out, |op, cx| op.doubtful(cx));
                    }
                    None => self.act(id, out, |op, cx| op.answered(clock, answers, cx)),
                }
            } else if !committed && races > limits::RACES_MAX {
                self.finish(id, Err(Failure::Contended { retry_after_ms: 1_000 }), out);
            } else {
                self.act(id, out, |op, cx| op.answered(clock, answers, cx));
            }
        }
        // Readers of the audit log wait here, since the store notifies of queues only.
        for log in woken {
            for id in self.polls.all(&log) {
                self.rouse(id, out);
            }
        }
    }

    /// The evidence is to be read that tells whether the commit was applied.
    fn doubt(&mut self, id: TaskId, evidence: Evidence) {
        let Some(task) = self.tasks.get_mut(&id) else { return };
        let State::Commit(pending) = core::mem::replace(&mut task.state, State::Busy) else { return };
        task.state = State::Settle(pending, evidence);
        self.to_read.push_back(id);
    }

    fn refused_full(&mut self, id: TaskId, out: &mut Outputs) {
        let Some(task) = self.tasks.get_mut(&id) else { return };
        let State::Commit(pending) = &mut task.state else { return };
        pending.under_way = false;
        self.stats.refused_full += 1;
        match (pending.doubt, pending.evidence.clone()) {
            (true, Some(evidence)) => self.doubt(id, evidence),
            _ => self.finish(id, Err(Failure::StoreFull { retry_after_ms: 5_000 }), out),
        }
    }

    /// A call came to nothing; with `unknown`, its commit may have been applied.
    fn call_failed(&mut self, what: What, unknown: bool) {
        self.stats.store_errors += 1;
        let jitter = self.make.up_to(1_000);
        if self.breaker.failure(self.now, jitter) {
            self.marks.push(Mark::BreakerOpened);
        }
        match what {
            What::Read(parts) => {
                for (id, _) in parts.into_iter().rev() {
                    match self.tasks.get(&id) {
                        // A sweep comes again by itself. Were it kept, one that the store can never
                        // answer would be asked for ever.
                        Some(task) if task.origin.is_sweep() => self.dropped.push(id),
                        Some(Task { state: State::Read { .. } | State::Settle(..), .. }) => {
                            self.to_read.push_front(id);
                        }
                        _ => {}
                    }
                }
            }
            What::Commit { grows, tasks } => {
                if unknown {
                    self.marks.push(Mark::CommitUnknown);
                    self.stats.commits_unknown += 1;
                }
                for (id, _) in tasks.into_iter().rev() {
                    let Some(State::Commit(pending)) = self.tasks.get_mut(&id).map(|t| &mut t.state) else { continue };
                    pending.under_way = false;
                    pending.doubt |= unknown;
                    self.to_commit[usize::from(grows)].push_front(id);
                }
            }
        }
    }

    /// A commit that is not worth sending (again): its time has passed.
    pub(super) fn outdated(&mut self, id: TaskId, out: &mut Outputs) {
        let Some(task) = self.tasks.get_mut(&id) else { return };
        let State::Commit(pending) = &task.state else { return };
        task.committed |= pending.doubt && pending.evidence.is_none();
        match (pending.doubt, pending.evidence.clone()) {
            (true, Some(evidence)) => self.doubt(id, evidence),
            (true, None) => self.act(id, out, |op, cx| op.doubtful(cx)),
            (false, _) => self.act(id, out, |op, cx| op.start(cx)),
        }
    }

    /// While the breaker is open: what certainly has not been applied is refused at once.
    pub(super) fn refuse_waiting(&mut self, out: &mut Outputs) {
        let waiting: Vec<TaskId> = self.to_read.iter().chain(self.to_commit.iter().flatten()).copied().collect();
        for id in waiting {
            let Some(task) = self.tasks.get(&id) else { continue };
            let certain = match &task.state {
                State::Read { .. } => true,
                State::Commit(pending) => !pending.doubt,
                State::Settle(..) | State::Wait | State::Busy => false,
            };
            if certain && !task.origin.is_sweep() {
                let retry_after_ms = self.breaker.retry_after_ms(self.now);
                self.finish(id, Err(Failure::StoreUnavailable { retry_after_ms }), out);
            }
        }
    }

    // --- long polls -------------------------------------------------------------------------

    fn notified(&mut self, topic: &Name, out: &mut Outputs) {
        if *topic == keys::TOPIC_DUE {
            self.sweeps.next = self.sweeps.next.min((self.sweeps.last + SWEEP_GAP_MS).max(self.now));
        } else {
            self.wake(topic, out);
        }
    }

    fn wake(&mut self, topic: &Name, out: &mut Outputs) {
        match self.polls.first(topic) {
            Some(id) => self.rouse(id, out),
            None if self.tasks.len() > self.polls.len() => {
                self.missed.insert(topic.clone());
            }
            None => {}
        }
    }

    /// A waiting poll tries again.
    fn rouse(&mut self, id: TaskId, out: &mut Outputs) {
        if self.polls.remove(id) {
            self.act(id, out, |op, cx| op.start(cx));
        }
    }

    // --- time -------------------------------------------------------------------------------

    fn tick(&mut self, out: &mut Outputs) {
        let now = self.now;
        let lost: Vec<StoreId> =
            self.calls.iter().filter(|(_, c)| c.sent + limits::STORE_TIMEOUT_MS <= now).map(|(id, _)| *id).collect();
        for id in lost {
            if let Some(call) = self.calls.remove(&id) {
                self.call_failed(call.what, true);
            }
        }
        while let Some((_, id)) = self.parked.first().copied().filter(|p| p.0 <= now) {
            self.parked.pop_first();
            if matches!(self.tasks.get(&id).map(|t| &t.state), Some(State::Settle(..))) {
                self.to_read.push_back(id);
            }
        }
        for id in self.polls.ended(now) {
            if let Some(task) = self.tasks.get_mut(&id) {
                task.last_try = true;
            }
            self.rouse(id, out);
        }
        while let Some((_, id)) = self.deadlines.first().copied().filter(|d| d.0 <= now) {
            self.deadlines.pop_first();
            self.expired(id, out);
        }
        for id in core::mem::take(&mut self.dropped) {
            self.finish(id, Err(Failure::StoreUnavailable { retry_after_ms: 0 }), out);
        }
        self.sweep(out);
    }

    /// A request's time is over: it is told what can be said now.
    fn expired(&mut self, id: TaskId, out: &mut Outputs) {
        let Some(task) = self.tasks.get(&id) else { return };
        let may_have_been = match &task.state {
            State::Commit(pending) => pending.doubt || pending.under_way,
            State::Settle(..) => true,
            State::Read { .. } | State::Wait | State::Busy => false,
        };
        let retry_after_ms = self.breaker.retry_after_ms(self.now);
        self.polls.remove(id);
        let failure = match may_have_been {
            true => Failure::OutcomeUnknown { retry_after_ms },
            false => Failure::StoreUnavailable { retry_after_ms },
        };
        self.finish(id, Err(failure), out);
    }

    fn sweep(&mut self, out: &mut Outputs) {
        if self.now >= self.sweeps.next && self.sweeps.deadlines.is_none() {
            let first = self.sweeps.last == 0 && !self.started;
            self.sweeps.last = self.now;
            // Replicas sweep out of step, by their seeds.
            let pace = self.config.sweep_ms;
            self.sweeps.next = self.now + if first { self.make.up_to(pace) } else { pace };
            let op = Op::Deadlines(Box::default());
            self.sweeps.deadlines = self.start_sweep(Origin::Deadlines, op, out);
            if self.sweeps.names.is_none() {
                self.sweeps.names = self.start_sweep(Origin::Names, Op::Names(Box::default()), out);
            }
            // A notification may have been lost.
            for id in self.polls.scouts() {
                self.rouse(id, out);
            }
        }
        if self.config.scrub_ms > 0 && self.now >= self.sweeps.scrub_next && self.sweeps.scrub.is_none() {
            self.sweeps.scrub_next = self.now + self.config.scrub_ms;
            let op = Op::Scrub(Box::new(job::Scrub::page(self.sweeps.cursor.clone())));
            self.sweeps.scrub = self.start_sweep(Origin::Scrub, op, out);
        }
        if !self.repairs.is_empty() && self.sweeps.repair.is_none() {
            let ids = core::mem::take(&mut self.repairs);
            let op = Op::Scrub(Box::new(job::Scrub::jobs(ids)));
            self.sweeps.repair = self.start_sweep(Origin::Repair, op, out);
        }
    }

    /// Starts a sweep; remembers it only if it is not over at once.
    fn start_sweep(&mut self, origin: Origin, op: Op, out: &mut Outputs) -> Option<TaskId> {
        let id = self.start(origin, op, 0, out);
        self.tasks.contains_key(&id).then_some(id)
    }
}
