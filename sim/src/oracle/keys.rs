//! one-key-one-job: what each idempotency key is bound to; and whether each queue is paused.

use leasehold_core::job::record::KeyRecord;
use leasehold_core::store::Clock;
use leasehold_core::{JobId, Name};

use super::facts::Rec;
use super::{Oracle, Promise, Violation, broken};

#[derive(Clone, Debug, Default)]
pub(crate) struct KeyFact {
    pub record: Option<Rec<KeyRecord>>,
    /// From which change on it named which job.
    pub moments: Vec<(u64, Option<JobId>)>,
    /// A fault took it or its past.
    pub damaged: bool,
}

impl KeyFact {
    pub fn note(&mut self, change: u64) {
        let named = self.record.as_ref().and_then(|r| r.value.as_ref()?.owner.job());
        self.moments.push((change, named));
    }

    /// The jobs that it named at some time since that change.
    pub fn named_since(&self, change: u64) -> impl Iterator<Item = JobId> {
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
        let Some(job) = old.owner.job() else { return Ok(()) };
        let Some(track) = self.jobs.get(&job) else { return Ok(()) };
        if track.excused || fact.damaged {
            return Ok(());
        }
        // Facts are already those after the transaction.
        let Some(main) = track.facts.job(clock) else { return Ok(()) };
        let freed = match &main.end {
            None => false,
            Some(end) => {
                let by_end = end.status != leasehold_core::job::record::Status::Succeeded;
                by_end || track.facts.status().is_none()
            }
        };
        // An operator's retry gives the key up before; so a live job's key is never moved or freed.
        if freed {
            return Ok(());
        }
        broken(
            Promise::OneKeyOneJob,
            format!("{name} was bound to {} ({}) and now names {new:?}", job, track.facts.describe(clock)),
        )
    }

    pub(super) fn key_of(&self, tenant: &str, key: &str) -> Option<&KeyFact> {
        self.keys.get(&leasehold_core::store::keys::key(tenant, key))
    }

    pub(super) fn queue_fact(&self, tenant: &str, queue: &str) -> Option<&QueueFact> {
        self.queues.get(&leasehold_core::store::keys::queue(tenant, queue))
    }
}
