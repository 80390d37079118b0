//! Time and notifications: who is woken, whose time is over, and when the sweeps run.

use alloc::boxed::Box;
use alloc::vec::Vec;

use super::op::Op;
use super::step::{Origin, READERS_GAP_MS, Replica, SWEEP_GAP_MS, State};
use super::task::{Operation as _, TaskId};
use super::{Outputs, StoreId};
use crate::failure::Failure;
use crate::job::record::Class;
use crate::job::scrub::Scrub;
use crate::limits;
use crate::name::Name;
use crate::store::keys;

/// Jobs mended at once.
const REPAIRS: usize = 100;
/// Marked groups are looked at no more often than this, unless this replica marked one itself.
const GROUPS_GAP_MS: u64 = 10;
/// Between two tries to write down what was granted without the store.
const ENTER_GAP_MS: u64 = 1_000;
/// Topics whose first waiter asks again at one tick.
const SCOUTS: usize = 200;

impl Replica {
    pub(super) fn notified(&mut self, topic: &Name, out: &mut Outputs) {
        if *topic == keys::TOPIC_DUE {
            self.sweeps.next = self.sweeps.next.min((self.sweeps.last + SWEEP_GAP_MS).max(self.now));
        } else if *topic == keys::TOPIC_GROUPS {
            // Another replica's as likely as this one's: they do not all come at once.
            let wait = self.make.up_to(GROUPS_GAP_MS);
            let next = (self.sweeps.groups_last + GROUPS_GAP_MS).max(self.now) + wait;
            self.sweeps.groups_next = self.sweeps.groups_next.min(next);
        } else if topic.starts_with(&keys::POOL) || topic.starts_with(&keys::HOLD) {
            self.notices += 1;
            if self.polling > self.polls.len() {
                self.noticed.insert(topic.clone(), self.notices);
            }
            for class in Class::ALL {
                if let Some(id) = self.polls.first(&keys::line(topic, class)) {
                    self.rouse(id, out);
                }
            }
            // Those who run jobs themselves come after those who wait for slots.
            for id in self.polls.all(topic) {
                self.rouse(id, out);
            }
        } else if topic.starts_with(&keys::GROUP) {
            // Everybody who waits for the group's end is told.
            for id in self.polls.all(topic) {
                self.rouse(id, out);
            }
            if self.polling > self.polls.len() {
                self.missed.insert(topic.clone());
            }
        } else {
            self.wake(topic, out);
        }
    }

    pub(super) fn wake(&mut self, topic: &Name, out: &mut Outputs) {
        match self.polls.first(topic) {
            Some(id) => self.rouse(id, out),
            // Remembered only for a poll that is on its way and may have looked too early.
            None if self.polling > self.polls.len() && topic.starts_with(b"q/") => {
                self.missed.insert(topic.clone());
            }
            None => {}
        }
    }

    /// A waiting poll tries again.
    pub(super) fn rouse(&mut self, id: TaskId, out: &mut Outputs) {
        if self.polls.remove(id) {
            self.act(id, out, |op, cx| op.start(cx));
        }
    }

    pub(super) fn tick(&mut self, out: &mut Outputs) {
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
                task.last_try |= task.poll_end.is_some_and(|end| end <= now);
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
    pub(super) fn expired(&mut self, id: TaskId, out: &mut Outputs) {
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

    /// Whether what was granted without the store can be written down now.
    pub(super) fn enters(&self) -> bool {
        self.sweeps.open.is_none() && !self.breaker.open() && self.open.is_due(self.clock.estimate(self.now))
    }

    pub(super) fn sweep(&mut self, out: &mut Outputs) {
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
            if self.sweeps.pools.is_none() {
                self.sweeps.pools = self.start_sweep(Origin::Pools, Op::Pools(Box::default()), out);
            }
        }
        if self.now >= self.sweeps.open_next && self.enters() {
            self.sweeps.open_next = self.now + ENTER_GAP_MS;
            self.sweeps.open = self.start_sweep(Origin::Open, Op::Enter(Box::default()), out);
        }
        if self.now >= self.sweeps.groups_next && self.sweeps.groups.is_none() {
            let first = self.sweeps.groups_last == 0 && !self.started;
            self.sweeps.groups_last = self.now;
            let pace = self.config.sweep_ms;
            self.sweeps.groups_next = self.now + if first { self.make.up_to(pace) } else { pace };
            self.sweeps.groups = self.start_sweep(Origin::Groups, Op::Groups(Box::default()), out);
        }
        if self.now >= self.sweeps.scouts_next {
            self.sweeps.scouts_next = self.now + self.config.sweep_ms;
            // A notification may have been lost.
            let (scouts, last) = self.polls.scouts(self.sweeps.scouted.as_ref(), SCOUTS);
            self.sweeps.scouted = last;
            for id in scouts {
                self.rouse(id, out);
            }
        }
        // Readers of the audit log wait here, since the store notifies of queues only. They are roused
        // together and not at every commit.
        if self.now >= self.sweeps.readers_next && !self.stirred.is_empty() {
            self.sweeps.readers_next = self.now + READERS_GAP_MS;
            for log in core::mem::take(&mut self.stirred) {
                for id in self.polls.all(&log) {
                    self.rouse(id, out);
                }
            }
        }
        if self.config.scrub_ms > 0 && self.now >= self.sweeps.scrub_next && self.sweeps.scrub.is_none() {
            self.sweeps.scrub_next = self.now + self.config.scrub_ms;
            let op = Op::Scrub(Box::new(Scrub::page(self.sweeps.cursor.clone())));
            self.sweeps.scrub = self.start_sweep(Origin::Scrub, op, out);
        }
        if !self.repairs.is_empty() && self.sweeps.repair.is_none() {
            let ids: Vec<_> = self.repairs.iter().copied().take(REPAIRS).collect();
            self.repairs.retain(|id| !ids.contains(id));
            let op = Op::Scrub(Box::new(Scrub::jobs(ids)));
            self.sweeps.repair = self.start_sweep(Origin::Repair, op, out);
        }
    }

    /// Starts a sweep; remembers it only if it is not over at once.
    pub(super) fn start_sweep(&mut self, origin: Origin, op: Op, out: &mut Outputs) -> Option<TaskId> {
        let id = self.start(origin, op, 0, out);
        self.tasks.contains_key(&id).then_some(id)
    }
}
