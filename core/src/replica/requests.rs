//! Requests: whether there is room, what they become, and what happens when the asker leaves.

use alloc::boxed::Box;
use alloc::vec::Vec;

use super::op::{self, Op};
use super::step::{Asked, Join, Origin, Replica, State, Task};
use super::task::{Operation as _, TaskId};
use super::{Mark, Output, Outputs};
use crate::failure::Failure;
use crate::job;
use crate::limits;
use crate::pool::open::Released;
use crate::pool::{Acquire, Spot};
use crate::request::{Outcome, Request, RequestId, Response};

/// What was done of a request before the store was asked.
enum Here {
    Nothing,
    Something,
    All(Outcome),
}

impl Replica {
    pub(super) fn request(&mut self, id: RequestId, request: Request, out: &mut Outputs) {
        let here = self.without_store(&request);
        let outcome = match &here {
            Here::All(outcome) => Some(outcome.clone()),
            Here::Nothing => self.admit(&request).err().map(Err),
            // honest-replies: it can no longer be said that nothing was done.
            Here::Something => self.admit(&request).err().map(|refused| {
                Err(Failure::OutcomeUnknown { retry_after_ms: refused.retry_after_ms().unwrap_or(1_000) })
            }),
        };
        if let Some(outcome) = outcome {
            out.push(Output::Reply { id, outcome });
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
            request => {
                self.open(Origin::Request(id), request, out);
                if let (Here::Something, Some(Asked::Task(task))) = (&here, self.requests.get(&id))
                    && let Some(task) = self.tasks.get_mut(task)
                {
                    task.committed = true;
                }
            }
        }
    }

    /// What can be done without the store: about slots that only this replica knows, or grants now.
    fn without_store(&mut self, request: &Request) -> Here {
        if self.config.fail_open.is_empty() {
            return Here::Nothing;
        }
        let clock = self.clock.estimate(self.now);
        let all = |outcome: Option<Outcome>| outcome.map_or(Here::Nothing, Here::All);
        match request {
            Request::RefreshSlot { tenant, pool, slot } => {
                all(self.open.refresh(&Spot::new(tenant, pool, &slot.slot), slot, clock))
            }
            Request::ReleaseSlot { tenant, pool, slot } => {
                match self.open.release(&Spot::new(tenant, pool, &slot.slot), slot) {
                    Released::Here(outcome) => Here::All(outcome),
                    Released::There { taken: false } => Here::Nothing,
                    Released::There { taken: true } => Here::Something,
                }
            }
            Request::Acquire(asked) => {
                let Ok(acquire) = Acquire::new(asked.clone()) else { return Here::Nothing };
                all(acquire.declared(&self.open, clock).or_else(|| self.declare(&acquire)))
            }
            _ => Here::Nothing,
        }
    }

    /// A slot from this replica itself, if the store cannot be reached and the pool is open then.
    fn declare(&mut self, acquire: &Acquire) -> Option<Outcome> {
        let how = self.config.fail_open.get(acquire.pool())?;
        // Whoever has not heard the store's clock cannot say when a slot ends.
        if !self.breaker.open() || !self.started || self.stats.draining {
            return None;
        }
        let clock = self.clock.estimate(self.now);
        let outcome = acquire.declare(&mut self.open, how, &mut self.make, clock);
        match &outcome {
            Some(_) => {
                self.stats.slots_declared += 1;
                self.marks.push(Mark::SlotDeclared);
            }
            None => self.stats.slots_declined += 1,
        }
        outcome
    }

    /// Whoever was asking for a slot when the store went away.
    pub(super) fn declare_instead(&mut self, task: &Task, outcome: Outcome) -> Outcome {
        match (&outcome, &task.op, task.origin) {
            (
                Err(Failure::StoreUnavailable { .. } | Failure::OutcomeUnknown { .. }),
                Op::Acquire(acquire),
                Origin::Request(_),
            ) => self.declare(acquire).unwrap_or(outcome),
            _ => outcome,
        }
    }

    /// Whether there is room, and any sense in trying.
    pub(super) fn admit(&mut self, request: &Request) -> Result<(), Failure> {
        if matches!(request, Request::Drain) {
            return Ok(());
        }
        let retry_after_ms = self.breaker.retry_after_ms(self.now);
        if self.breaker.open() {
            return Err(Failure::StoreUnavailable { retry_after_ms });
        }
        if self.stats.draining && matches!(request, Request::Claim(_) | Request::Acquire(_) | Request::Dispatch(_)) {
            return Err(Failure::Draining { retry_after_ms });
        }
        let n = match request {
            Request::Batch(items) => items.len(),
            _ => 1,
        };
        let weight = op::weight(request);
        // What ends or extends a lease is let in when nothing else is: it makes room.
        let share = if op::drains(request) { 2 } else { 1 };
        // One request is always let in, however small the mailbox or large the batch.
        let full = self.in_work() > 0 && self.in_work() + n > self.config.mailbox * share
            || self.bytes > 0 && self.bytes + weight > self.config.mailbox_bytes * share
            || self.polling >= limits::POLLS && op::polls(request);
        if full {
            self.marks.push(Mark::MailboxFull);
            self.stats.refused_mailbox += 1;
            return Err(Failure::MailboxFull { retry_after_ms: 1_000 });
        }
        Ok(())
    }

    pub(super) fn open(&mut self, origin: Origin, request: Request, out: &mut Outputs) {
        let weight = op::weight(&request);
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

    pub(super) fn start(&mut self, origin: Origin, op: Op, weight: usize, out: &mut Outputs) -> TaskId {
        self.next_task += 1;
        let id = TaskId(self.next_task);
        let wait_ms = match &op {
            Op::Claim(claim) => claim.wait_ms(),
            Op::Events(events) => events.wait_ms(),
            Op::Group(look) => look.wait_ms(),
            Op::Acquire(acquire) => acquire.wait_ms(),
            Op::Dispatch(dispatch) => dispatch.wait_ms(),
            _ => 0,
        };
        let deadline = self.now + wait_ms + limits::REQUEST_MS;
        if !origin.is_sweep() {
            self.deadlines.insert((deadline, id));
        }
        self.bytes += weight;
        self.polling += usize::from(wait_ms > 0);
        let mut task = Box::new(Task {
            origin,
            op,
            state: State::Busy,
            deadline,
            poll_end: (wait_ms > 0).then_some(self.now + wait_ms),
            last_try: false,
            races: 0,
            committed: false,
            weight,
        });
        let next = self.run(&mut task, |op, cx| op.start(cx));
        self.go(id, task, next, out);
        id
    }

    pub(super) fn cancelled(&mut self, id: RequestId, out: &mut Outputs) {
        let parts = match self.requests.remove(&id) {
            Some(Asked::Task(task)) => alloc::vec![task],
            Some(Asked::Join(join)) => self.joins.remove(&join).map(|j| j.parts).unwrap_or_default(),
            None => return,
        };
        for part in parts {
            let Some(task) = self.tasks.get_mut(&part) else { continue };
            task.origin = Origin::Orphan;
            if matches!((&task.op, &task.state), (Op::Acquire(acquire), State::Wait) if acquire.leaves_traces()) {
                // slot-not-resurrected: its place in line goes with whoever wanted it, and so does a grant that
                // is under way. That takes its own time.
                self.deadlines.remove(&(task.deadline, part));
                task.deadline = self.now + limits::REQUEST_MS;
                self.deadlines.insert((task.deadline, part));
                self.rouse(part, out);
                continue;
            }
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

    pub(super) fn drain(&mut self, out: &mut Outputs) {
        self.stats.draining = true;
        for id in self.polls.everyone() {
            if matches!(self.tasks.get(&id).map(|t| &t.op), Some(Op::Acquire(_))) {
                // It leaves the line before it answers.
                self.rouse(id, out);
                continue;
            }
            self.polls.remove(id);
            let retry_after_ms = 1_000;
            self.finish(id, Err(Failure::Draining { retry_after_ms }), out);
        }
    }
}
