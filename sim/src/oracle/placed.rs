//! Jobs that servers run by calling upstreams: whether each was claimed when it might be, where it might go, and
//! with the slots that it costs; and whether these come back with the end of the attempt and never by themselves.

use std::sync::Arc;

use leasehold_core::dispatch::Hold;
use leasehold_core::job::record::{Class, Lease, Placed, Status};
use leasehold_core::request::{Beat, Dispatch, Dispatched, GiveBack};
use leasehold_core::store::engine::{Change, Effects};
use leasehold_core::store::model::Model;
use leasehold_core::store::{Clock, Score, Version, keys};
use leasehold_core::{JobId, Name, Outcome, Request, codec};

use super::facts::{Rec, Touched};
use super::pools::{PoolFacts, live};
use super::replies::{Window, lied};
use super::{Oracle, Promise, Track, Violation, broken, object};
use crate::calls::Ledger;

impl Oracle {
    /// Holds and probes, as a transaction left them.
    pub(super) fn follow_upstreams(&mut self, effects: &Effects) {
        for change in &effects.changes {
            match change {
                Change::Record { key, new, .. } if key.starts_with(b"hold/") => {
                    let record = new.as_ref().map(|s| Rec {
                        version: s.version,
                        at: s.at,
                        expiry: s.expiry,
                        value: codec::decode::<Hold>(&s.bytes).ok(),
                    });
                    match record {
                        Some(record) => self.holds.insert(key.clone(), record),
                        None => self.holds.remove(key),
                    };
                }
                Change::Member { index, member, new, .. } if index.starts_with(b"probe/") => {
                    let probes = self.probes.entry(index.clone()).or_default();
                    match new {
                        Some(score) => probes.insert(member.clone(), *score),
                        None => probes.remove(member),
                    };
                }
                _ => {}
            }
        }
    }

    /// Notes the leases under which jobs were cancelled: what they hold may stay until they would have ended.
    pub(super) fn follow_cut(&mut self, touched: &Touched) {
        for (job, before) in &touched.jobs {
            let Some(facts) = self.jobs.get(job).map(|t| &t.facts) else { continue };
            let end = facts.main.as_ref().and_then(|m| m.value.as_ref()?.end.as_ref().map(|end| end.status));
            if let (Some(lease), None, Some(Status::Cancelled)) = (&before.lease, &facts.lease, end) {
                self.cut.insert((*job, lease.version), self.change);
            }
        }
    }

    /// The store forgot its newest commits.
    pub(super) fn rebuild_upstreams(&mut self, model: &Model) {
        self.holds.clear();
        self.probes.clear();
        for (key, stored) in model.records(b"hold/") {
            let value = codec::decode::<Hold>(&stored.bytes).ok();
            let record = Rec { version: stored.version, at: stored.at, expiry: stored.expiry, value };
            self.holds.insert(key.clone(), record);
        }
        for (index, members) in model.books().iter().filter(|(index, _)| index.starts_with(b"probe/")) {
            let members = members.iter().map(|(member, score)| (member.clone(), score));
            self.probes.insert(index.clone(), members.collect());
        }
    }

    /// What must be so of a job that was claimed by name.
    #[expect(clippy::too_many_arguments)]
    pub(super) fn judge_placed(
        &self,
        job: JobId,
        track: &Track,
        lease: &Lease,
        placed: &Placed,
        asked: &Dispatch,
        due: Score,
        clock: Clock,
    ) -> Result<(), Violation> {
        let Some(main) = track.facts.main.as_ref().and_then(|m| m.value.as_ref()) else { return Ok(()) };
        let upstream = self.routing.upstream(&placed.upstream).filter(|u| asked.upstreams.contains(&u.name));
        let Some(upstream) = upstream else {
            return broken(Promise::HonestReplies, format!("job {job} was placed where nobody asked for: {placed:?}"));
        };
        let routed = self.routing.of(&lease.tenant, &lease.queue).any(|u| u.name == placed.upstream);
        if !routed || main.policy.on_prem && !upstream.on_prem {
            object(Promise::LimitHeld, format!("job {job} ({:?}) went to {upstream:?}", main.policy))?;
        }
        if placed.pool != upstream.pool || placed.cost != main.policy.cost {
            object(Promise::LimitHeld, format!("job {job} of cost {} has {placed:?}", main.policy.cost))?;
        }
        // priority: no job of its queue that stood before it, or in a class above, is left behind.
        let queue = self.indexes.queues.iter().position(|q| q.tenant == lease.tenant && q.queue == lease.queue);
        for (other, t) in self.jobs.iter().filter(|(other, t)| **other != job && !t.excused) {
            for (place, score) in &t.facts.places {
                let waits = place.status == Status::Queued && Some(usize::from(place.queue)) == queue;
                let before = place.class < lease.class || place.class == lease.class && (*score, *other) < (due, job);
                if waits && before {
                    let what = format!("{job} ({:?} @{due}) was claimed by name while {other} waits", lease.class);
                    object(Promise::Priority, what)?;
                }
            }
        }
        // A hold is shared: nothing goes there before its end, and then one call at a time.
        let hold = self.holds.get(&keys::hold(&placed.upstream)).filter(|r| r.lives(clock));
        if hold.is_some_and(|r| r.value.is_none()) {
            return Ok(());
        }
        let until = hold.and_then(|r| r.value).map(|h| h.until);
        let probes = self.probes.get(&keys::probe(&placed.upstream)).map_or(0, |p| live(p, clock));
        if until.is_some_and(|until| until > clock) && !self.clock_back {
            let what = format!("job {job} went to {}, which is on hold until {until:?}", placed.upstream);
            object(Promise::LimitHeld, what)?;
        }
        if until.is_some() != placed.probe || placed.probe && probes != 1 {
            let what = format!("job {job} went to {} held {until:?} as {placed:?}, {probes} probes", placed.upstream);
            object(Promise::LimitHeld, what)?;
        }
        Ok(())
    }

    /// The lease under which a job holds units, if it is placed in that pool.
    fn holding(&self, job: JobId, pool: &str) -> Option<(Version, Arc<Lease>)> {
        let record = self.jobs.get(&job)?.facts.lease.as_ref()?;
        let lease = record.value.clone()?;
        let here = lease.placed().is_some_and(|placed| placed.pool.as_deref() == Some(pool));
        here.then_some((record.version, lease))
    }

    /// A unit that a job holds was entered, moved, or taken out.
    #[expect(clippy::too_many_arguments)]
    pub(super) fn judge_job_unit(
        &self,
        name: &str,
        facts: &mut PoolFacts,
        before: &PoolFacts,
        job: JobId,
        unit: (&Name, Version),
        ends: (Option<Score>, Option<Score>),
        clock: Clock,
    ) -> Result<(), Violation> {
        let lease = self.holding(job, name).filter(|(version, _)| *version == unit.1);
        let (unit, nonce) = unit;
        match ends {
            (None, Some(_)) => {
                if !facts.entered.insert(unit.clone()) && !self.rewound {
                    let what = format!("pool {name}: {unit} is held again after it had been taken back");
                    object(Promise::SlotNotResurrected, what)?;
                }
                let Some((_, lease)) = lease else {
                    return broken(Promise::LimitHeld, format!("pool {name}: {unit} is held without a lease"));
                };
                self.judge_job_room(name, facts, before, unit, lease.class, clock)
            }
            (Some(old), Some(new)) if old <= clock => {
                let what = format!("pool {name}: {unit} had come to its end {old} and is held until {new}");
                object(Promise::SlotNotResurrected, what)
            }
            (Some(old), Some(new)) if new < old => {
                object(Promise::HonestReplies, format!("pool {name}: {unit} was cut from {old} to {new}"))
            }
            (Some(_), Some(_)) if lease.is_none() => {
                object(Promise::SlotNotResurrected, format!("pool {name}: {unit} was renewed without its lease"))
            }
            (Some(end), None) if end > clock && lease.is_some() => {
                object(Promise::BooksBalance, format!("pool {name}: {unit} was taken from a job that runs"))
            }
            (Some(end), None) if end > clock && self.cut.get(&(job, nonce)) == Some(&self.change) => {
                let what = format!("pool {name}: {unit} was given away with its job's cancellation: its call goes on");
                object(Promise::LimitHeld, what)
            }
            _ => Ok(()),
        }
    }

    fn judge_job_room(
        &self,
        name: &str,
        facts: &PoolFacts,
        before: &PoolFacts,
        unit: &Name,
        class: Class,
        clock: Clock,
    ) -> Result<(), Violation> {
        let Some(pool) = facts.settings(clock) else {
            return broken(Promise::LimitHeld, format!("pool {name}: {unit} is held, but there is no pool"));
        };
        let (held, batch) = (live(&facts.holders, clock), live(&facts.batch, clock));
        let most = pool.batch_max.unwrap_or(pool.total).min(pool.total) as usize;
        if held > pool.total as usize || class == Class::Batch && batch > most {
            let what = format!("{held} held, {batch} of them by class batch, with {unit}, of {pool:?}");
            object(Promise::LimitHeld, format!("pool {name}: {what}"))?;
        }
        if facts.disturbed {
            return Ok(());
        }
        for above in Class::ALL.into_iter().filter(|c| *c <= class) {
            if let Some((other, _)) = before.line(above).find(|(other, _)| before.is_there(above, other, clock)) {
                let what = format!("pool {name}: {unit} of class {} is held while {other} waits", class.text());
                object(Promise::Priority, what)?;
            }
        }
        Ok(())
    }

    /// Whether a job holds in a pool what its lease says, all of it or nothing.
    pub(super) fn job_units(&self, name: &str, facts: &PoolFacts, job: JobId, clock: Clock) -> Result<(), String> {
        if self.jobs.get(&job).is_none_or(|t| t.damaged) {
            return Ok(());
        }
        let member = keys::member(job);
        let of = |map| -> Vec<(Version, u32, Score)> {
            let units = PoolFacts::units(map, &member).into_iter();
            units.filter(|u| u.2 > clock && !self.cut.contains_key(&(job, u.0))).collect()
        };
        let (held, batch) = (of(&facts.holders), of(&facts.batch));
        if held.is_empty() && batch.is_empty() {
            return Ok(());
        }
        let Some((version, lease)) = self.holding(job, name) else {
            return Err(format!("holds {held:?} without a lease"));
        };
        let cost = lease.placed().map_or(0, |placed| placed.cost);
        let whole = |units: &[(Version, u32, Score)]| {
            let end = units.first().map(|u| u.2);
            units.len() == cost as usize && units.iter().all(|u| u.0 == version && Some(u.2) == end)
        };
        let in_batch = if lease.class == Class::Batch { whole(&batch) } else { batch.is_empty() };
        match whole(&held) && in_batch {
            true => Ok(()),
            false => Err(format!("holds {held:?} and of class batch {batch:?}, its lease says {lease:?}")),
        }
    }

    // --- answers ------------------------------------------------------------------------------

    pub(super) fn judge_dispatched(
        &mut self,
        w: Window,
        asked: &Dispatch,
        found: &[Dispatched],
        request: &Request,
        outcome: &Outcome,
        ledger: &Ledger,
    ) -> Result<(), Violation> {
        if found.len() > asked.max {
            return lied(w, request, outcome, "more than asked for");
        }
        for one in found {
            self.judge_leased(w, None, &one.job, outcome, request, ledger)?;
            let here = self.routing.upstream(&one.placed.upstream);
            if one.on_prem && here.is_none_or(|u| !u.on_prem) {
                object(Promise::LimitHeld, format!("job {} was sent off the premises: {one:?}", one.job.id))?;
            }
        }
        Ok(())
    }

    /// What is said to have been given back is not held any more, and does not come back.
    pub(super) fn judge_given_back(
        &self,
        w: Window,
        asked: &GiveBack,
        request: &Request,
        outcome: &Outcome,
    ) -> Result<(), Violation> {
        let member = keys::member(asked.job);
        for (name, facts) in self.pools.iter().filter(|(_, facts)| !facts.disturbed && !self.rewound) {
            if PoolFacts::units(&facts.holders, &member).iter().any(|u| u.0 == asked.token.nonce) {
                return lied(w, request, outcome, format!("pool {name} holds it"));
            }
        }
        Ok(())
    }

    /// "Slot lost" must have been true: what stands now has stood all the time.
    pub(super) fn judge_slot_lost(
        &self,
        w: Window,
        beat: &Beat,
        request: &Request,
        outcome: &Outcome,
    ) -> Result<(), Violation> {
        let job = beat.held.job;
        for (name, facts) in self.pools.iter().filter(|(_, facts)| !facts.disturbed) {
            let Some((version, lease)) = self.holding(job, name) else { continue };
            let current = self.jobs.get(&job).and_then(|t| t.facts.token()) == beat.held.token;
            let member = keys::member(job);
            let there =
                PoolFacts::units(&facts.holders, &member).iter().filter(|u| u.0 == version && u.2 > w.clock).count();
            let Some(placed) = lease.placed() else { continue };
            let mut probes = self.probes.get(&keys::probe(&placed.upstream)).into_iter().flatten();
            let unit =
                |probe: &Name| keys::holder_of(probe).is_some_and(|(of, nonce, _)| of == member && nonce == version);
            let tried = !placed.probe || probes.any(|(probe, end)| unit(probe) && *end > w.clock);
            if current && tried && there == placed.cost as usize && !self.clock_back {
                return lied(w, request, outcome, "its slots stand");
            }
        }
        Ok(())
    }
}
