//! books-balance: each unexpired record stands in exactly the indexes that its state implies.

use leasehold_core::job::record::{Job, Owner, Status};
use leasehold_core::store::model::Model;
use leasehold_core::store::{Clock, SCORE_MAX, keys};
use leasehold_core::{JobId, Name};

use super::facts::Facts;
use super::{Oracle, Promise, Track, Violation, object};

/// Says what is out of balance.
fn wrong(what: impl Into<String>) -> Result<(), String> {
    Err(what.into())
}

impl Oracle {
    /// Whether a job's records and entries agree at that clock.
    pub(super) fn balanced(&self, job: JobId, track: &Track, clock: Clock) -> Result<(), String> {
        let f = &track.facts;
        if !track.known && *f == Facts::default() {
            // Only ever asked for.
            return Ok(());
        }
        if f.quarantined {
            return match f.stands_live() {
                true => wrong("quarantined, and in an index of live jobs"),
                false => Ok(()),
            };
        }
        let Some(main) = f.job(clock) else {
            self.child_balance(job, f, None)?;
            return gone(f, clock);
        };
        let [(place, score)] = f.places.as_slice() else {
            return wrong(format!("stands in {} status indexes", f.places.len()));
        };
        let home = self.indexes.queues.get(usize::from(place.queue));
        if place.class != main.class || home.is_none_or(|q| q.tenant != main.tenant || q.queue != main.queue) {
            return wrong("stands in another queue's or class's index");
        }
        self.child_balance(job, f, Some(place.status))?;
        match &main.end {
            None => self.live_balance(job, track, main, place.status, *score, clock),
            Some(end) => {
                if place.status != end.status {
                    return wrong(format!("ended {} but stands in {}", end.status.text(), place.status.text()));
                }
                let expiry = f.main.as_ref().and_then(|m| m.expiry);
                if job.child_of().is_some() {
                    let kept = [f.payload.as_ref().and_then(|p| p.expiry), f.result.as_ref().and_then(|r| r.expiry)];
                    if expiry.or(kept[0]).or(kept[1]).is_some() || *score != SCORE_MAX {
                        return wrong("a child's records end before its group's");
                    }
                } else if Some(*score) != expiry {
                    return wrong("its place is not scored by its record's expiry");
                }
                if f.lease.is_some() || f.leases.or(f.due).or(f.ttl).is_some() {
                    return wrong("ended, but has a lease or stands in an index of live jobs");
                }
                self.key_balance(job, main, Some(end.status), clock)
            }
        }
    }

    fn live_balance(
        &self,
        job: JobId,
        track: &Track,
        main: &Job,
        status: Status,
        score: u64,
        clock: Clock,
    ) -> Result<(), String> {
        let f = &track.facts;
        if status.is_terminal() {
            return wrong(format!("has not ended but stands in {}", status.text()));
        }
        if f.main.as_ref().is_some_and(|m| m.expiry.is_some()) {
            return wrong("a live job's record expires");
        }
        match &f.payload {
            None => return wrong("a live job without payload"),
            Some(p) if p.expiry.is_some() => return wrong("a live job's payload expires"),
            Some(_) => {}
        }
        let running = status == Status::Running;
        if running != f.lease.is_some() {
            return wrong(format!("{} {} lease record", status.text(), if running { "without" } else { "with" }));
        }
        if running != f.leases.is_some() {
            return wrong(format!("{} and {} `leases`", status.text(), if running { "not in" } else { "in" }));
        }
        let waits = matches!(status, Status::Scheduled | Status::Retrying);
        if waits != f.due.is_some() || (waits && f.due != Some(score)) {
            return wrong(format!("{} @{score} and in `due` @{:?}", status.text(), f.due));
        }
        if !waits && !running && score > clock && !self.clock_back {
            return wrong("queued before it is due");
        }
        if status == Status::Retrying && main.attempts == 0 {
            return wrong("retrying without a failed attempt");
        }
        let deadline = main.policy.queue_ttl_ms.map(|ms| ms.saturating_mul(1_000));
        let fresh = main.deliveries == 0 && !running;
        match (deadline.filter(|_| fresh), f.ttl) {
            (None, None) => {}
            (None, Some(_)) if running || deadline.is_none() => return wrong("in `ttl` without a queue deadline"),
            (None, Some(_)) => return wrong("in `ttl` though it was claimed"),
            // Moved: it was taken, and put back by a replica that knows the clock roughly.
            // Put back by who could not read its deadline; whoever can enters it again.
            (Some(_), None) if self.newer.contains(&keys::job(job)) => {}
            (Some(_), None) => return wrong("not in `ttl` though it was never claimed"),
            (Some(ttl), Some(at)) => {
                let (exact, rough) = (track.born.saturating_add(ttl), main.born.saturating_add(ttl));
                if at != exact && at != rough {
                    return wrong(format!("in `ttl` @{at}, not @{exact}"));
                }
            }
        }
        self.key_balance(job, main, None, clock)
    }

    /// A live job's key is bound to it; an ended one's has an end, or is free.
    fn key_balance(&self, job: JobId, main: &Job, end: Option<Status>, clock: Clock) -> Result<(), String> {
        let Some((key, version)) = &main.key else { return Ok(()) };
        let Some(fact) = self.key_of(&main.tenant, key).filter(|f| !f.damaged) else { return Ok(()) };
        let mine = fact
            .record
            .as_ref()
            .filter(|r| r.lives(clock) && r.version == *version)
            .filter(|r| r.value.as_ref().is_some_and(|v| v.owner == Owner::Job(job)));
        match (end, mine) {
            (None, None) => wrong(format!("its key {key} is not bound to it")),
            (None, Some(record)) if record.expiry.is_some() => wrong("a live job's key expires"),
            (Some(Status::Succeeded), Some(record)) if record.expiry.is_none() => {
                wrong("an ended job's key never expires")
            }
            (Some(status), Some(_)) if status != Status::Succeeded => {
                wrong(format!("ended {}, but its key is still bound to it", status.text()))
            }
            _ => Ok(()),
        }
    }

    /// Checks one job after a transaction touched it.
    pub(super) fn check_balance(&mut self, job: JobId, clock: Clock) -> Result<(), Violation> {
        let Some(track) = self.jobs.get(&job) else { return Ok(()) };
        let orphan = job.child_of().and_then(|(g, _)| self.groups.get(&g)).is_some_and(|g| g.lost);
        match self.balanced(job, track, clock) {
            Ok(()) => {
                // What was decided before its bytes changed can still be applied to a quarantined one.
                if track.excused
                    && !track.facts.quarantined
                    && !orphan
                    && let Some(track) = self.jobs.get_mut(&job)
                {
                    track.excused = false;
                }
                Ok(())
            }
            Err(_) if track.excused => Ok(()),
            Err(what) => {
                let what = format!("job {job}: {what} ({})", track.facts.describe(clock));
                object(Promise::BooksBalance, what)
            }
        }
    }

    /// Reads the whole store and compares it with what was followed; every book must balance.
    pub fn full(&mut self, model: &Model) -> Result<(), Violation> {
        let clock = model.clock();
        self.full_pools(model)?;
        let mut fresh = self.read_all(model);
        self.full_groups(&mut fresh.groups, clock)?;
        let jobs: Vec<JobId> = self.jobs.keys().copied().collect();
        for job in &jobs {
            let found = fresh.jobs.remove(job).unwrap_or_default();
            let Some(track) = self.jobs.get_mut(job) else { continue };
            if track.facts != found {
                // The store's own collection of what has expired is no change.
                if collected(&track.facts, &found, clock) {
                    track.facts = found;
                } else {
                    let what = format!(
                        "job {job} changed without a commit: {} -> {}",
                        track.facts.describe(clock),
                        found.describe(clock)
                    );
                    object(Promise::AckedNeverLost, what)?;
                }
            }
            self.check_balance(*job, clock)?;
        }
        if let Some((job, facts)) = fresh.jobs.pop_first() {
            object(Promise::BooksBalance, format!("unknown job {job}: {}", facts.describe(clock)))?;
        }
        if !self.damaged {
            self.names(model)?;
        }
        Ok(())
    }

    /// Every queue with anything in it is known by name.
    fn names(&self, model: &Model) -> Result<(), Violation> {
        for (index, _) in model.books().iter() {
            if let Some((tenant, queue, _, _)) = keys::status_of(index) {
                let member: Name = keys::queue_member(&tenant, &queue);
                if model.books().score(&keys::NAMES, &member).is_none() {
                    object(Promise::BooksBalance, format!("{index} has members, but its queue no name"))?;
                }
            }
        }
        Ok(())
    }
}

/// A job without record: nothing but a place that waits to be trimmed may be left.
fn gone(f: &Facts, clock: Clock) -> Result<(), String> {
    if f.lease.is_some() || f.leases.or(f.due).or(f.ttl).is_some() {
        return wrong("no record, but a lease or an entry among live jobs");
    }
    let stub = f.main.as_ref().is_some_and(|m| m.lives(clock));
    for (place, score) in &f.places {
        if stub || !place.status.is_terminal() || *score > clock {
            return wrong(format!("no record, but it stands in {} @{score}", place.status.text()));
        }
    }
    let main_left = f.main.as_ref().is_some_and(|m| !m.lives(clock));
    match &f.payload {
        Some(p) if p.expiry.is_none() && !main_left => wrong("a payload without its job"),
        _ => Ok(()),
    }
}

/// Whether the only difference is that expired records are gone.
fn collected(before: &Facts, after: &Facts, clock: Clock) -> bool {
    let mut expected = before.clone();
    macro_rules! drop_expired {
        ($($field:ident),*) => {
            $(if after.$field.is_none() && expected.$field.as_ref().is_some_and(|r| !r.lives(clock)) {
                expected.$field = None;
            })*
        };
    }
    drop_expired!(main, lease, history, progress, payload, result);
    expected == *after
}
