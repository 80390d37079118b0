//! one-key-one-job: what each idempotency key is bound to; and whether each queue is paused.

use leasehold_core::Name;
use leasehold_core::group::record::GroupStatus;
use leasehold_core::ids::GroupId;
use leasehold_core::job::record::{KeyRecord, Owner, Status};
use leasehold_core::store::Clock;

use super::facts::Rec;
use super::{Oracle, Promise, Violation, object};

#[derive(Clone, Debug, Default)]
pub(crate) struct KeyFact {
    pub record: Option<Rec<KeyRecord>>,
    /// From which change on it named whom.
    pub moments: Vec<(u64, Option<Owner>)>,
    /// A fault took it or its past.
    pub damaged: bool,
}

impl KeyFact {
    pub fn note(&mut self, change: u64) {
        let named = self.record.as_ref().and_then(|r| Some(r.value.as_ref()?.owner));
        self.moments.push((change, named));
    }

    /// Whom it named at some time since that change.
    pub fn named_since(&self, change: u64) -> impl Iterator<Item = Owner> {
        let first = self.moments.iter().rposition(|m| m.0 <= change).unwrap_or(0);
        self.moments[first..].iter().filter_map(|m| m.1)
    }
}

#[derive(Clone, Debug, Default)]
pub(crate) struct QueueFact {
    /// From which change on it was paused or not.
    pub moments: Vec<(u64, bool)>,
    pub damaged: bool,
}

impl QueueFact {
    pub fn note(&mut self, change: u64, paused: bool) {
        self.moments.push((change, paused));
    }

    pub fn paused(&self) -> bool {
        self.moments.last().is_some_and(|m| m.1)
    }

    /// Whether it was so at some time since that change.
    pub fn was(&self, paused: bool, change: u64) -> bool {
        let first = self.moments.iter().rposition(|m| m.0 <= change);
        let before = first.is_none() && !paused;
        before || self.moments[first.unwrap_or(0)..].iter().any(|m| m.1 == paused)
    }
}

impl Oracle {
    /// A key's record changed: a bound key is freed or moved only with its job's end or loss.
    pub(super) fn judge_key(
        &mut self,
        name: &Name,
        before: Option<&Rec<KeyRecord>>,
        clock: Clock,
    ) -> Result<(), Violation> {
        let Some(fact) = self.keys.get(name) else { return Ok(()) };
        let Some(old) = before.filter(|b| b.lives(clock)).and_then(|b| b.value.as_ref()) else { return Ok(()) };
        let new = fact.record.as_ref().and_then(|r| r.value.as_ref());
        // Still there, if maybe with an end of its own.
        if new.is_some_and(|n| n.owner == old.owner) {
            return Ok(());
        }
        if fact.damaged {
            return Ok(());
        }
        // Facts are already those after the transaction.
        let (freed, who) = match old.owner {
            Owner::Job(job) => {
                let Some(track) = self.jobs.get(&job).filter(|t| !t.excused) else { return Ok(()) };
                let Some(main) = track.facts.job(clock) else { return Ok(()) };
                // An operator's retry gives the key up before; so a live job's key is never moved or freed.
                let by_end = main.end.as_ref().map(|e| e.status != Status::Succeeded);
                let freed = by_end.is_some_and(|by_end| by_end || track.facts.status().is_none());
                (freed, format!("job {job} ({})", track.facts.describe(clock)))
            }
            Owner::Group(group) => (self.group_freed(group, clock), format!("group {group}")),
        };
        if freed {
            return Ok(());
        }
        object(Promise::OneKeyOneJob, format!("{name} was bound to {who} and now names {new:?}"))
    }

    /// The key of what has succeeded names it as long as was promised.
    pub(super) fn judge_bound(&self, tenant: &str, key: &str, owner: Owner, until: Clock) -> Result<(), Violation> {
        let Some(record) = self.key_of(tenant, key).filter(|fact| !fact.damaged).and_then(|fact| fact.record.as_ref())
        else {
            return Ok(());
        };
        match record.expiry {
            Some(end) if end < until && record.value.as_ref().is_some_and(|r| r.owner == owner) => {
                let what = format!("key {key} of {owner:?} is free {} us too early", until - end);
                object(Promise::OneKeyOneJob, what)
            }
            _ => Ok(()),
        }
    }

    /// Whether a group may have given its key up.
    fn group_freed(&self, group: GroupId, clock: Clock) -> bool {
        let Some(track) = self.groups.get(&group).filter(|t| !t.excused) else { return true };
        match track.facts.group(clock) {
            None => true,
            Some(main) => main.end.is_some_and(|(status, _)| status != GroupStatus::Succeeded),
        }
    }

    pub(super) fn key_of(&self, tenant: &str, key: &str) -> Option<&KeyFact> {
        self.keys.get(&leasehold_core::store::keys::key(tenant, key))
    }

    pub(super) fn queue_fact(&self, tenant: &str, queue: &str) -> Option<&QueueFact> {
        self.queues.get(&leasehold_core::store::keys::queue(tenant, queue))
    }
}
