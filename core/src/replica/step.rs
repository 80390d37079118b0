//! The machine: takes inputs, runs operations, and decides what is sent to the store and when.

use alloc::boxed::Box;
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::sync::Arc;
use alloc::vec::Vec;

use super::breaker::Breaker;
use super::clock::StoreClock;
use super::op::Op;
use super::polls::Polls;
use super::task::{Cx, Draft, Evidence, Next, Operation as _, Plan, Queues, TaskId};
use super::{Config, Input, Mark, Now, Output, Outputs, Stats, StoreId};
use crate::failure::Failure;
use crate::ids::{JobId, Maker};
use crate::job::handed::Handed;
use crate::job::scrub::Cursor;
use crate::limits;
use crate::name::Name;
use crate::pool::{Held, Open};
use crate::request::{Outcome, RequestId, Response};
use crate::store::{Clock, Read, Txn};

/// One server process: a state machine with inputs, outputs and a clock that is handed in.
///
/// **The law**: [`Replica::step`] is total, deterministic and never blocks.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub struct Replica {
    pub(super) config: Config,
    pub(super) make: Maker,
    /// Names this replica in its proof that commits work.
    pub(super) nonce: u64,
    pub(super) now: Now,
    pub(super) clock: StoreClock,
    pub(super) breaker: Breaker,

    /// Boxed: a large value would be moved at every turn of its neighbours.
    pub(super) tasks: BTreeMap<TaskId, Box<Task>>,
    pub(super) next_task: u64,
    pub(super) requests: BTreeMap<RequestId, Asked>,
    pub(super) joins: BTreeMap<u64, Join>,
    pub(super) deadlines: BTreeSet<(Now, TaskId)>,
    /// Unknown outcomes that can be settled only when their time has passed.
    pub(super) parked: BTreeSet<(Now, TaskId)>,
    pub(super) polls: Polls,
    /// Topics notified while a poll was under way and nobody waited.
    pub(super) missed: BTreeSet<Name>,
    /// Notifications about pools and upstreams so far …
    pub(super) notices: u64,
    /// … and the last of each pool, while a poll was under way.
    pub(super) noticed: BTreeMap<Name, u64>,
    /// Long polls, waiting or trying.
    pub(super) polling: usize,
    /// Logs that were appended to since their readers were last roused.
    pub(super) stirred: BTreeSet<Name>,
    /// Sweeps whose read failed.
    pub(super) dropped: Vec<TaskId>,
    pub(super) bytes: usize,

    pub(super) to_read: VecDeque<TaskId>,
    /// Commits that do not grow, and those that do.
    pub(super) to_commit: [VecDeque<TaskId>; 2],
    pub(super) calls: BTreeMap<StoreId, Call>,
    pub(super) next_call: u64,

    pub(super) queues: Queues,
    handed: Handed,
    pub(super) held: Held,
    pub(super) open: Open,
    pub(super) trims: BTreeMap<Name, usize>,
    pub(super) repairs: BTreeSet<JobId>,
    pub(super) marks: Vec<Mark>,
    pub(super) sweeps: Sweeps,
    pub(super) started: bool,
    pub(super) spare_before: Clock,
    pub(super) spare_until: Clock,
    pub(super) stats: Stats,
}

/// What a request became.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub(super) enum Asked {
    Task(TaskId),
    Join(u64),
}

/// A batch: answered when every part is.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub(super) struct Join {
    pub(super) request: RequestId,
    pub(super) parts: Vec<TaskId>,
    pub(super) outcomes: Vec<Option<Outcome>>,
    pub(super) left: usize,
}

/// Who is told the outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) enum Origin {
    Request(RequestId),
    Part {
        join: u64,
        slot: usize,
    },
    /// Nobody any more.
    Orphan,
    Deadlines,
    Names,
    Groups,
    Pools,
    Open,
    Scrub,
    Repair,
}

impl Origin {
    pub(super) fn is_sweep(self) -> bool {
        match self {
            Origin::Deadlines
            | Origin::Names
            | Origin::Groups
            | Origin::Pools
            | Origin::Open
            | Origin::Scrub
            | Origin::Repair => true,
            Origin::Request(_) | Origin::Part { .. } | Origin::Orphan => false,
        }
    }
}

#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub(super) struct Task {
    pub(super) origin: Origin,
    pub(super) op: Op,
    pub(super) state: State,
    pub(super) deadline: Now,
    /// When a long poll's wait is over.
    pub(super) poll_end: Option<Now>,
    pub(super) last_try: bool,
    pub(super) races: u32,
    /// Something of it has been applied, or may have been: it can no longer be said that nothing was.
    pub(super) committed: bool,
    pub(super) weight: usize,
}

#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
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
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub(super) struct Pending {
    pub drafts: Vec<Draft>,
    /// Filled when first sent; sent again unchanged.
    pub txns: Vec<Arc<Txn>>,
    pub grows: bool,
    pub weight: usize,
    pub(super) evidence: Option<Evidence>,
    pub valid_until: Clock,
    pub under_way: bool,
    /// It was sent and no answer came: it may have been applied, or may still be.
    pub doubt: bool,
}

/// One call to the store under way.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub(super) struct Call {
    pub sent: Now,
    pub what: What,
}

#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub(super) enum What {
    /// Parts of the answer go to these, in order.
    Read(Vec<(TaskId, Shape)>),
    /// So many answers go to each, in order; what is left over is nobody's.
    Commit { grows: bool, tasks: Vec<(TaskId, usize)> },
}

/// How much of a merged answer is a task's.
#[derive(Clone, Copy, Debug, serde::Serialize, serde::Deserialize)]
pub(super) struct Shape {
    pub records: usize,
    pub slices: usize,
    pub counts: usize,
    pub members: usize,
    pub log: bool,
    pub scan: bool,
}

#[derive(Clone, Debug, Default, serde::Serialize, serde::Deserialize)]
pub(super) struct Sweeps {
    pub(super) next: Now,
    pub(super) last: Now,
    pub(super) deadlines: Option<TaskId>,
    pub(super) names: Option<TaskId>,
    pub(super) groups: Option<TaskId>,
    pub(super) pools: Option<TaskId>,
    pub(super) open: Option<TaskId>,
    pub(super) open_next: Now,
    pub(super) groups_next: Now,
    pub(super) groups_last: Now,
    pub(super) scrub: Option<TaskId>,
    pub(super) repair: Option<TaskId>,
    pub(super) scrub_next: Now,
    pub(super) scouts_next: Now,
    /// The last topic that was scouted.
    pub(super) scouted: Option<Name>,
    pub(super) readers_next: Now,
    pub(super) cursor: Cursor,
}

/// Sweeps come no closer together than this.
pub(super) const SWEEP_GAP_MS: u64 = 50;
/// Waiting readers of a log are roused no more often than this.
pub(super) const READERS_GAP_MS: u64 = 50;

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
            notices: 0,
            noticed: BTreeMap::new(),
            polling: 0,
            stirred: BTreeSet::new(),
            dropped: Vec::new(),
            bytes: 0,
            to_read: VecDeque::new(),
            to_commit: [VecDeque::new(), VecDeque::new()],
            calls: BTreeMap::new(),
            next_call: 0,
            queues: Queues::default(),
            handed: Handed::default(),
            held: Held::default(),
            open: Open::default(),
            trims: BTreeMap::new(),
            repairs: BTreeSet::new(),
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
            Input::Cancelled { id } => self.cancelled(id, out),
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
        let groups = self.sweeps.groups.is_none().then_some(self.sweeps.groups_next);
        let scrub = (self.config.scrub_ms > 0 && self.sweeps.scrub.is_none()).then_some(self.sweeps.scrub_next);
        let scouts = (self.polls.len() > 0).then_some(self.sweeps.scouts_next);
        let readers = (!self.stirred.is_empty()).then_some(self.sweeps.readers_next);
        let hold = waiting.then(|| self.breaker.next(self.now)).flatten();
        let timeout = self.calls.values().map(|c| c.sent + limits::STORE_TIMEOUT_MS).min();
        let deadline = self.deadlines.first().map(|d| d.0);
        let parked = self.parked.first().map(|p| p.0);
        let open = self.enters().then_some(self.sweeps.open_next);
        [sweep, groups, open, scrub, scouts, readers, hold, timeout, deadline, parked, self.polls.next()]
            .into_iter()
            .flatten()
            .min()
    }

    pub fn stats(&self) -> Stats {
        let mut stats = self.stats;
        stats.in_work = self.in_work() as u64;
        stats.polls = self.polls.len() as u64;
        stats.breaker_open = self.breaker.open();
        let clock = self.clock.estimate(self.now);
        stats.slots_open = self.config.fail_open.keys().map(|pool| self.open.units(pool, clock)).sum();
        stats
    }

    pub(super) fn in_work(&self) -> usize {
        self.tasks.len().saturating_sub(self.polling)
    }

    pub(super) fn run(&mut self, task: &mut Task, f: impl FnOnce(&mut Op, &mut Cx<'_>) -> Next) -> Next {
        let mut cx = Cx {
            clock: self.clock.estimate(self.now),
            fresh: self.clock.fresh(self.now),
            make: &mut self.make,
            config: &self.config,
            queues: &mut self.queues,
            handed: &mut self.handed,
            held: &mut self.held,
            open: &mut self.open,
            notices: self.notices,
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
    pub(super) fn go(&mut self, id: TaskId, mut task: Box<Task>, mut next: Next, out: &mut Outputs) {
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
                Next::Wait(wait) => {
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
                    let late = |(topic, seen): &(Name, u64)| self.noticed.get(topic).is_some_and(|n| n > seen);
                    let missed = wait.topics.iter().find(|t| self.missed.contains(*t)).cloned();
                    if missed.is_some() || wait.since.iter().any(late) {
                        if let Some(topic) = missed {
                            self.missed.remove(&topic);
                        }
                        next = self.run(&mut task, |op, cx| op.start(cx));
                        continue;
                    }
                    task.state = State::Wait;
                    let end = wait.again_ms.map_or(end, |ms| end.min(self.now + ms.max(1)));
                    self.polls.wait(id, wait.topics, wait.turn, end);
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
    pub(super) fn act(&mut self, id: TaskId, out: &mut Outputs, f: impl FnOnce(&mut Op, &mut Cx<'_>) -> Next) {
        let Some(mut task) = self.tasks.remove(&id) else { return };
        task.state = State::Busy;
        let next = self.run(&mut task, f);
        self.go(id, task, next, out);
    }

    /// Forgets a task.
    pub(super) fn close(&mut self, id: TaskId) -> Option<Box<Task>> {
        let task = self.tasks.remove(&id)?;
        self.deadlines.remove(&(task.deadline, id));
        self.bytes = self.bytes.saturating_sub(task.weight);
        self.polling -= usize::from(task.poll_end.is_some());
        if self.polling <= self.polls.len() {
            // No poll is on its way: nothing can have been missed.
            self.missed.clear();
            self.noticed.clear();
        }
        Some(task)
    }

    pub(super) fn finish(&mut self, id: TaskId, outcome: Outcome, out: &mut Outputs) {
        let Some(task) = self.close(id) else { return };
        let outcome = self.declare_instead(&task, outcome);
        let out_of_line = |failure: &Failure| {
            matches!(failure, Failure::PoolFull { .. } | Failure::Draining { .. }) && matches!(task.op, Op::Acquire(_))
        };
        let outcome = match outcome {
            // honest-replies: after something was applied, "certainly not" would be a lie, also when what tells of
            // it cannot be read or has gone; a slot that was waited for and not had is certain.
            Err(failure)
                if task.committed
                    && (failure.retry_after_ms().is_some()
                        || matches!(failure, Failure::Quarantined | Failure::UnknownQueue))
                    && !out_of_line(&failure) =>
            {
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
            Op::Dispatch(dispatch) if dispatch.filled() => {
                for topic in dispatch.topics() {
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
            Op::Groups(step) => {
                if step.more {
                    self.sweeps.groups_next = self.now;
                } else if let Some(at) = step.next {
                    let ms = at.saturating_sub(self.clock.estimate(self.now)) / limits::MILLI;
                    let wake = self.now + ms + 1 + self.make.up_to(20);
                    self.sweeps.groups_next = self.sweeps.groups_next.min(wake);
                }
            }
            Op::Acquire(acquire) => {
                for (line, n) in acquire.behind().collect::<Vec<_>>() {
                    // Each may wait again at once, in its old turn: only those who waited before are woken.
                    let next: Vec<TaskId> = self.polls.line(&line, n as usize);
                    next.into_iter().for_each(|id| self.rouse(id, out));
                }
            }
            Op::Enter(enter) => self.open.not_entered(enter),
            Op::Pools(tidy) if tidy.more => self.sweeps.next = self.sweeps.next.min(self.now + SWEEP_GAP_MS),
            Op::Names(names) if names.more => self.sweeps.next = self.sweeps.next.min(self.now + SWEEP_GAP_MS),
            Op::Scrub(scrub) if task.origin == Origin::Scrub => self.sweeps.cursor = scrub.cursor.clone(),
            Op::Mend(mend) if task.origin == Origin::Scrub => self.sweeps.cursor = mend.cursor.clone(),
            _ => {}
        }
        self.tell(task.origin, outcome, out);
    }

    pub(super) fn tell(&mut self, origin: Origin, outcome: Outcome, out: &mut Outputs) {
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
            Origin::Groups => self.sweeps.groups = None,
            Origin::Pools => self.sweeps.pools = None,
            Origin::Open => self.sweeps.open = None,
            Origin::Scrub => self.sweeps.scrub = None,
            Origin::Repair => self.sweeps.repair = None,
        }
    }
}
