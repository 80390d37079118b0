//! How things stand, in a word: for the tables of what was tried.

use leasehold_core::event::{Kind, kind_of};
use leasehold_core::group::record::GroupStatus;
use leasehold_core::ids::GroupId;
use leasehold_core::job::record::{Owner, Status};
use leasehold_core::pool::record::SlotState as Stored;
use leasehold_core::request::SlotId;
use leasehold_core::store::{Clock, Txn, Write, keys};
use leasehold_core::{JobId, Token};

use super::facts::Facts;
use super::groups::GroupFacts;
use super::{GroupTrack, Oracle, Track};
use crate::tables::{GroupState, GroupTurn, JobState, JobTurn, QueueState, SlotState};

impl Facts {
    /// As what it is seen by who looks at the store and knows of no fault.
    fn state(&self, clock: Clock) -> JobState {
        let Some(job) = self.job(clock) else {
            return if self.main.as_ref().is_some_and(|m| m.lives(clock)) {
                JobState::Deleted
            } else {
                JobState::Unknown
            };
        };
        match self.status().or(job.end.as_ref().map(|end| end.status)) {
            None => JobState::Damaged,
            Some(Status::Scheduled) => JobState::Scheduled,
            Some(Status::Held) => JobState::Held,
            Some(Status::Queued) => JobState::Queued,
            Some(Status::Running) if self.leases.is_some_and(|end| end <= clock) => JobState::Overdue,
            Some(Status::Running) => JobState::Running,
            Some(Status::Retrying) => JobState::Retrying,
            Some(Status::Succeeded) => JobState::Succeeded,
            Some(Status::Dead) => JobState::Dead,
            Some(Status::Cancelled) => JobState::Cancelled,
            Some(Status::Expired) => JobState::Expired,
        }
    }
}

impl Track {
    fn state(&self, facts: &Facts, clock: Clock) -> JobState {
        if self.excused || facts.quarantined { JobState::Damaged } else { facts.state(clock) }
    }
}

impl GroupTrack {
    fn state(&self, facts: &GroupFacts, clock: Clock) -> GroupState {
        if self.excused {
            return GroupState::Damaged;
        }
        let Some(group) = facts.group(clock) else { return GroupState::Unknown };
        match group.end.map(|(status, _)| status) {
            Some(GroupStatus::Succeeded) => GroupState::Succeeded,
            Some(GroupStatus::Partial) => GroupState::Partial,
            Some(GroupStatus::Failed) => GroupState::Failed,
            Some(GroupStatus::Cancelled) => GroupState::Cancelled,
            _ if group.stopped.is_some() => GroupState::Stopped,
            _ if group.sealed => GroupState::Sealed,
            _ => GroupState::Open,
        }
    }
}

impl Oracle {
    pub fn job_state(&self, job: JobId, clock: Clock) -> JobState {
        self.jobs.get(&job).map_or(JobState::Unknown, |track| track.state(&track.facts, clock))
    }

    /// Whether a token is that of the job's present lease.
    pub fn is_present(&self, job: JobId, token: Option<Token>) -> bool {
        token.is_some() && self.jobs.get(&job).is_some_and(|track| track.facts.token() == token)
    }

    /// What an idempotency key is bound to.
    pub fn bound_to(&self, tenant: &str, key: &str, clock: Clock) -> Option<Owner> {
        let record = self.key_of(tenant, key)?.record.as_ref().filter(|r| r.lives(clock))?;
        record.value.as_ref().map(|r| r.owner)
    }

    pub fn group_state(&self, group: GroupId, clock: Clock) -> GroupState {
        self.groups.get(&group).map_or(GroupState::Unknown, |track| track.state(&track.facts, clock))
    }

    /// How a slot stands, and whether it is another grant's than the one asked about.
    pub fn slot_state(&self, tenant: &str, pool: &str, slot: &SlotId, clock: Clock) -> (SlotState, bool) {
        let member = keys::slot_member(tenant, &slot.slot);
        let declared = |nonce| self.is_declared(pool, &member, nonce) && !self.was_held(pool, &member, Some(nonce));
        if slot.nonce.is_some_and(declared) {
            return (SlotState::Declared, false);
        }
        let Some(facts) = self.pools.get(pool).filter(|f| f.settings(clock).is_some()) else {
            return (SlotState::NoPool, false);
        };
        let record = facts.slot(&member, clock);
        let other = slot.nonce.is_some() && record.map(|r| r.nonce) != slot.nonce;
        let ends = record.and_then(|r| {
            let mut ends = facts.holders.iter().filter(|(unit, _)| {
                keys::holder_of(unit).is_some_and(|(of, nonce, _)| of == member && nonce == r.nonce)
            });
            ends.next().map(|(_, end)| *end)
        });
        let state = match record.map(|r| &r.state) {
            None | Some(Stored::Over) => SlotState::Absent,
            Some(Stored::Waiting { .. }) => SlotState::Waiting,
            Some(Stored::Granted | Stored::Declared) if ends.is_some_and(|end| end > clock) => SlotState::Held,
            Some(Stored::Granted | Stored::Declared) => SlotState::Overdue,
        };
        (state, other)
    }

    pub fn queue_state(&self, tenant: &str, queue: &str) -> QueueState {
        let fact = self.queue_fact(tenant, queue);
        let count = self.indexes.queues.iter().find(|q| q.tenant == tenant && q.queue == queue);
        match (fact, count) {
            (Some(fact), _) if fact.paused() => QueueState::Paused,
            (_, Some(count)) if count.ready > 0 => QueueState::Ready,
            (None, None) => QueueState::Unknown,
            _ => QueueState::Idle,
        }
    }

    /// Counts what a commit made of a group.
    pub(super) fn count_group_turns(&mut self, group: GroupId, before: &GroupFacts, clock: Clock) {
        let Some(track) = self.groups.get(&group) else { return };
        let from = track.state(before, clock);
        let turn = match (before.group(clock), track.facts.group(clock)) {
            (None, Some(_)) => GroupTurn::Created,
            (Some(old), Some(new)) if old.end != new.end => GroupTurn::Finalized,
            (Some(old), Some(new)) if old.stopped != new.stopped => GroupTurn::Stopped,
            (Some(old), Some(new)) if old.filled < new.filled => GroupTurn::Extended,
            (Some(old), Some(new)) if old.sealed != new.sealed => GroupTurn::Sealed,
            _ => return,
        };
        self.tried.group_turns.count(from, turn);
    }

    /// Counts what a commit made of a child, by how its group stands.
    fn count_child(&mut self, job: JobId, before: &Facts, clock: Clock) {
        let (Some((group, _)), Some(track)) = (job.child_of(), self.jobs.get(&job)) else { return };
        let turn = match (before.status(), track.facts.status()) {
            (Some(Status::Held), Some(Status::Queued)) => GroupTurn::ChildLetGo,
            (Some(from), Some(to)) if from.is_terminal() && !to.is_terminal() => GroupTurn::ChildRetried,
            (Some(from), Some(_)) if from.is_terminal() => return,
            (_, Some(Status::Succeeded)) => GroupTurn::ChildSucceeded,
            (_, Some(Status::Dead)) => GroupTurn::ChildDead,
            (_, Some(Status::Cancelled)) => GroupTurn::ChildCancelled,
            (_, Some(Status::Expired)) => GroupTurn::ChildExpired,
            _ => return,
        };
        let state = self.group_state(group, clock);
        self.tried.group_turns.count(state, turn);
    }

    /// Counts what is said of jobs that a fault took something of.
    pub(super) fn count_mended(&mut self, txn: &Txn) {
        for write in &txn.writes {
            let Write::Append { bytes, .. } = write else { continue };
            let turn = match kind_of(bytes) {
                Some(kind @ (Kind::Lost | Kind::Reindexed | Kind::Quarantined)) => JobTurn::of(kind),
                _ => continue,
            };
            self.tried.turns.count(JobState::Damaged, turn);
        }
    }

    /// Counts what a commit made of a job.
    pub(super) fn count_turns(&mut self, job: JobId, before: &Facts, clock: Clock) {
        self.count_child(job, before, clock);
        let Some(track) = self.jobs.get(&job) else { return };
        let (from, after) = (track.state(before, clock), &track.facts);
        for kind in &track.newest {
            self.tried.turns.count(from, JobTurn::of(*kind));
        }
        if !track.newest.is_empty() {
            return;
        }
        let silent = match (before.status(), after.status()) {
            (Some(Status::Scheduled | Status::Retrying), Some(Status::Queued)) => JobTurn::Promoted,
            (Some(Status::Held), Some(Status::Queued)) => JobTurn::LetGo,
            (Some(Status::Running), Some(Status::Running)) if before.leases < after.leases => JobTurn::Extended,
            (Some(_), None) if after.main.is_none() => JobTurn::Removed,
            (None, None) if before.main.is_some() && after.main.is_none() => JobTurn::Removed,
            _ => return,
        };
        self.tried.turns.count(from, silent);
    }
}
