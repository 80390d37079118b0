//! The store's replies: dealt out to those who wait, and what a missing or doubtful one means.

use alloc::collections::BTreeSet;
use alloc::vec::Vec;

use super::step::{Origin, Replica, Shape, State, Task, What};
use super::task::{Evidence, Operation as _, TaskId, Verdict, applied};
use super::{Mark, Outputs, StoreAnswer, StoreId};
use crate::failure::Failure;
use crate::limits;
use crate::store::{Answer, Clock, CommitReply, Record, Snapshot, StoreError, Write, keys};

impl Replica {
    pub(super) fn store_reply(&mut self, id: StoreId, reply: Result<StoreAnswer, StoreError>, out: &mut Outputs) {
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
                self.recovered(self.clock.estimate(self.now));
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
    pub(super) fn heard(&mut self, clock: Clock) {
        self.clock.observe(clock, self.now);
        self.recovered(clock);
    }

    /// If the store had not answered for a while, those who held leases before get time to renew.
    fn recovered(&mut self, clock: Clock) {
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
        self.spare_before = clock;
        let spare = outage_ms.min(limits::GRACE_MS) * limits::MILLI;
        self.spare_until = self.spare_until.max(clock.saturating_add(spare));
    }

    pub(super) fn distribute(&mut self, parts: Vec<(TaskId, Shape)>, mut snapshot: Snapshot, out: &mut Outputs) {
        let clock = snapshot.clock;
        let merged = parts.len() > 1;
        let mut records = snapshot.records.into_iter();
        let mut slices = snapshot.slices.into_iter();
        let mut counts = snapshot.counts.into_iter();
        let mut members = snapshot.members.into_iter();
        let mut again = Vec::new();
        for (at, (id, shape)) in parts.into_iter().enumerate() {
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
                // It was first and still did not fit: again, alone.
                Some(State::Read { alone, .. }) if merged && unread && at == 0 => {
                    *alone = true;
                    again.push(id);
                }
                // Others used up the answer's room: again. The first of each round gets what it asked for.
                Some(State::Read { .. } | State::Settle(..)) if merged && unread => again.push(id),
                Some(State::Read { .. }) => self.act(id, out, |op, cx| op.read_known(part, cx)),
                Some(State::Settle(pending, evidence)) => {
                    let over = clock > pending.valid_until;
                    let verdict = match evidence.judge(part.records.first().unwrap_or(&Record::Absent)) {
                        // Had it been applied at once, what tells of it may have expired: the clock was stepped.
                        Verdict::NotApplied if evidence.is_new() && clock > outlived(pending.valid_until) => {
                            Verdict::Unknown
                        }
                        verdict => verdict,
                    };
                    self.settle(id, verdict, over, clock, out);
                }
                _ => {}
            }
        }
        for id in again.into_iter().rev() {
            self.to_read.push_front(id);
        }
    }

    /// Law 4: what the evidence says about a commit whose outcome was unknown.
    pub(super) fn settle(&mut self, id: TaskId, verdict: Verdict, over: bool, clock: Clock, out: &mut Outputs) {
        match verdict {
            Verdict::Applied => {
                self.marks.push(Mark::SettledApplied);
                if let Some(task) = self.tasks.get_mut(&id) {
                    task.committed = true;
                }
                let time = self.settles_by_time(id);
                self.act(id, out, |op, cx| if time { op.doubtful(cx) } else { op.settled(clock, cx) });
            }
            Verdict::NotApplied if over => {
                self.marks.push(Mark::SettledNotApplied);
                let time = self.settles_by_time(id);
                self.act(id, out, |op, cx| if time { op.doubtful(cx) } else { op.start(cx) });
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

    pub(super) fn distribute_answers(&mut self, tasks: Vec<(TaskId, usize)>, reply: CommitReply, out: &mut Outputs) {
        let clock = reply.clock;
        let mut answers = reply.answers.into_iter();
        let mut woken = BTreeSet::new();
        let mut marked = false;
        for (id, n) in tasks {
            let answers: Vec<Answer> = answers.by_ref().take(n).collect();
            let Some(task) = self.tasks.get_mut(&id) else { continue };
            let State::Commit(pending) = &mut task.state else { continue };
            pending.under_way = false;
            let applied = applied(&answers);
            task.committed |= applied;
            if applied {
                for txn in &pending.txns {
                    marked |=
                        txn.writes.iter().any(|w| matches!(w, Write::Notify(topic) if *topic == keys::TOPIC_GROUPS));
                    woken.extend(txn.writes.iter().filter_map(|w| match w {
                        Write::Append { log, .. } => Some(log.clone()),
                        _ => None,
                    }));
                }
            } else if answers.iter().any(|a| matches!(a, Answer::Refused(_))) {
                task.races += 1;
                self.marks.push(Mark::RaceLost);
            }
            let (doubt, races, committed) = (pending.doubt, task.races, task.committed);
            let time = pending.evidence.as_ref().is_some_and(Evidence::is_time);
            // An earlier copy of what was refused may still be on its way.
            let open = time && answers.iter().any(|a| matches!(a, Answer::Refused(_)));
            if doubt && (!applied || open) {
                // The first sending may have been applied: this refusal may be its own doing.
                task.committed |= pending.evidence.as_ref().is_none_or(Evidence::is_time);
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
        if marked {
            // Whoever ended a child releases the next at once.
            self.sweeps.groups_next = self.now;
        }
        self.stirred.extend(woken.into_iter().filter(|log| self.polls.first(log).is_some()));
    }

    fn settles_by_time(&self, id: TaskId) -> bool {
        matches!(self.tasks.get(&id).map(|t| &t.state), Some(State::Settle(_, evidence)) if evidence.is_time())
    }

    /// The evidence is to be read that tells whether the commit was applied.
    pub(super) fn doubt(&mut self, id: TaskId, evidence: Evidence) {
        let Some(task) = self.tasks.get_mut(&id) else { return };
        let State::Commit(pending) = core::mem::replace(&mut task.state, State::Busy) else { return };
        task.state = State::Settle(pending, evidence);
        self.to_read.push_back(id);
    }

    pub(super) fn refused_full(&mut self, id: TaskId, out: &mut Outputs) {
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
    pub(super) fn call_failed(&mut self, what: What, unknown: bool) {
        self.stats.store_errors += 1;
        let jitter = self.make.up_to(1_000);
        if self.breaker.failure(self.now, jitter) {
            self.marks.push(Mark::BreakerOpened);
        }
        match what {
            What::Read(parts) => {
                for (id, _) in parts.into_iter().rev() {
                    match self.tasks.get(&id).map(|task| &**task) {
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
        task.committed |= pending.doubt && pending.evidence.as_ref().is_none_or(Evidence::is_time);
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
            // What waits to be entered must not be when that comes to be possible: it may be over by then.
            if certain && (!task.origin.is_sweep() || task.origin == Origin::Open) {
                let retry_after_ms = self.breaker.retry_after_ms(self.now);
                self.finish(id, Err(Failure::StoreUnavailable { retry_after_ms }), out);
            }
        }
    }
}

/// When the shortest-lived of what tells that a transaction was applied may be gone.
fn outlived(valid_until: Clock) -> Clock {
    valid_until.saturating_sub(limits::VALID).saturating_add(limits::RECEIPT_OWN)
}
