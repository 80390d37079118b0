//! Batching: many requests' reads go as one, many requests' transactions as one commit.
//!
//! Nothing waits for company: a request that finds a place for its commit goes at once, and those
//! that arrive while commits are under way form the next. Latency is low when idle, throughput high
//! when busy, and there is no timer to tune.

use alloc::sync::Arc;
use alloc::vec::Vec;

use super::step::{Call, Replica, Shape, State, What};
use super::task::TaskId;
use super::{Output, Outputs, StoreId, StoreOp};
use crate::job::sweep::trim;
use crate::limits;
use crate::store::{Commit, Read};

/// Reads passed over while one is put together.
const ASIDE: usize = 64;
/// Terminal indexes trimmed along with one commit.
const TRIMS: usize = 8;

impl Replica {
    /// Sends what may be sent.
    pub(super) fn flush(&mut self, out: &mut Outputs) {
        if self.breaker.open() {
            self.refuse_waiting(out);
        }
        while self.may_call() && self.under_way(None) < self.config.reads.max(1) {
            if !self.send_read(out) {
                break;
            }
        }
        if self.to_commit.iter().all(|q| q.is_empty()) {
            return;
        }
        if !self.clock.fresh(self.now) {
            // A valid_until is only made from a clock that was heard lately.
            if self.may_call() && self.under_way(None) == 0 {
                self.call(What::Read(Vec::new()), StoreOp::Read(Read::default()), out);
            }
            return;
        }
        for grows in [false, true] {
            while self.may_call() && self.under_way(Some(grows)) < self.config.commits.max(1) {
                if !self.send_commit(grows, out) {
                    break;
                }
            }
        }
        // Those found outdated may want to read.
        while self.may_call() && self.under_way(None) < self.config.reads.max(1) {
            if !self.send_read(out) {
                break;
            }
        }
    }

    /// Whether the store may be called now: while the breaker is open, one call at a time.
    fn may_call(&self) -> bool {
        self.breaker.may_send(self.now) && (self.calls.is_empty() || !self.breaker.open())
    }

    /// Reads (`None`) or commits of one kind under way.
    fn under_way(&self, commit: Option<bool>) -> usize {
        let same = |what: &What| match what {
            What::Read(_) => commit.is_none(),
            What::Commit { grows, .. } => commit == Some(*grows),
        };
        self.calls.values().filter(|c| same(&c.what)).count()
    }

    fn call(&mut self, what: What, op: StoreOp, out: &mut Outputs) {
        self.next_call += 1;
        let id = StoreId(self.next_call);
        match &op {
            StoreOp::Read(_) => self.stats.reads += 1,
            StoreOp::Commit(commit) => {
                self.stats.commits += 1;
                self.stats.txns += commit.txns.len() as u64;
            }
        }
        self.calls.insert(id, Call { sent: self.now, what });
        out.push(Output::Store { id, op });
    }

    /// Sends the waiting reads as one; false if there were none.
    fn send_read(&mut self, out: &mut Outputs) -> bool {
        let mut merged = Read::default();
        let mut parts: Vec<(TaskId, Shape)> = Vec::new();
        let mut aside = Vec::new();
        while parts.len() < limits::READ_TASKS {
            let Some(id) = self.to_read.pop_front() else { break };
            let Some(task) = self.tasks.get(&id) else { continue };
            let evidence;
            let (read, alone) = match &task.state {
                State::Read { read, alone } => (read, *alone),
                State::Settle(_, what) => {
                    evidence = Read { records: alloc::vec![what.key.clone()], ..Read::default() };
                    (&evidence, false)
                }
                State::Commit(_) | State::Wait | State::Busy => continue,
            };
            let shape = Shape {
                records: read.records.len(),
                slices: read.slices.len(),
                counts: read.counts.len(),
                members: read.members.len(),
                log: read.log.is_some(),
                scan: read.scan.is_some(),
            };
            // A scan goes alone: what it meets must not keep others from their answers.
            let special = shape.scan || read.max_bytes != limits::READ_BYTES;
            let clash = shape.log && merged.log.is_some() || shape.scan && merged.scan.is_some();
            if !parts.is_empty() && (alone || special || clash) {
                // It steps aside; what comes after it may still fit.
                aside.push(id);
                if aside.len() >= ASIDE {
                    break;
                }
                continue;
            }
            merged.records.extend(read.records.iter().cloned());
            merged.slices.extend(read.slices.iter().cloned());
            merged.counts.extend(read.counts.iter().cloned());
            merged.members.extend(read.members.iter().cloned());
            if shape.log {
                merged.log = read.log.clone();
            }
            if shape.scan {
                merged.scan = read.scan.clone();
            }
            if special {
                merged.max_bytes = read.max_bytes;
            }
            parts.push((id, shape));
            if alone || special {
                break;
            }
        }
        for id in aside.into_iter().rev() {
            self.to_read.push_front(id);
        }
        if parts.is_empty() {
            return false;
        }
        self.call(What::Read(parts), StoreOp::Read(merged), out);
        true
    }

    /// Sends the waiting transactions of one kind as one commit; false if there were none.
    fn send_commit(&mut self, grows: bool, out: &mut Outputs) -> bool {
        let clock = self.clock.estimate(self.now);
        let mut txns = Vec::new();
        let mut tasks: Vec<(TaskId, usize)> = Vec::new();
        let mut bytes = 0;
        let mut outdated = Vec::new();
        while let Some(id) = self.to_commit[usize::from(grows)].pop_front() {
            let Some(State::Commit(pending)) = self.tasks.get_mut(&id).map(|t| &mut t.state) else { continue };
            if pending.under_way || pending.grows != grows {
                continue;
            }
            let n = pending.drafts.len().max(pending.txns.len());
            let full = txns.len() + n > self.config.commit_txns || bytes + pending.weight > limits::COMMIT_BYTES;
            if full && !tasks.is_empty() {
                self.to_commit[usize::from(grows)].push_front(id);
                break;
            }
            if pending.txns.is_empty() {
                pending.valid_until = clock.saturating_add(limits::VALID);
                let valid_until = pending.valid_until;
                pending.txns = pending.drafts.drain(..).map(|d| Arc::new(d.seal(valid_until))).collect();
            } else if clock > pending.valid_until {
                outdated.push(id);
                continue;
            }
            pending.under_way = true;
            bytes += pending.weight;
            txns.extend(pending.txns.iter().cloned());
            tasks.push((id, n));
        }
        for id in outdated {
            self.outdated(id, out);
        }
        if tasks.is_empty() {
            return false;
        }
        if !grows {
            for _ in 0..TRIMS {
                let Some((index, n)) = self.trims.pop_first() else { break };
                let txn = trim(index, n.min(limits::TRIM)).seal(clock.saturating_add(limits::VALID));
                txns.push(Arc::new(txn));
            }
        }
        self.call(What::Commit { grows, tasks }, StoreOp::Commit(Commit { txns, grows }), out);
        true
    }
}
