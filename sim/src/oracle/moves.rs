//! forward-only and its kin: every change of a job is a move of the diagram, with a cause.

use leasehold_core::event::Kind;
use leasehold_core::job::record::{Class, Job, Status, Terms};
use leasehold_core::request::{Start, Submit};
use leasehold_core::store::model::Model;
use leasehold_core::store::{Clock, Take, Taken, keys};
use leasehold_core::{JobId, Request, Token};
use std::collections::BTreeMap;
use std::sync::Arc;

use super::facts::{Facts, Index};
use super::{Grant, Oracle, Promise, Track, Violation, broken, object};
use crate::calls::{ItemRef, Ledger};

use Status::{Cancelled, Dead, Expired, Held, Queued, Retrying, Running, Scheduled};

/// Room for a replica's view of the store's clock, which is as old as its last read, and drifts.
pub(super) const CLOCK_SLACK: u64 = 100_000;

impl Oracle {
    /// Judges what a transaction made of one job; returns how many transitions that was.
    pub(super) fn judge(
        &mut self,
        job: JobId,
        before: &Facts,
        clock: Clock,
        ledger: &mut Ledger,
    ) -> Result<usize, Violation> {
        let Some(mut track) = self.jobs.remove(&job) else { return Ok(0) };
        track.newest.clear();
        let judged = self.judge_track(job, &mut track, before, clock, ledger);
        self.jobs.insert(job, track);
        let transitions = judged?;
        self.count_turns(job, before, clock);
        self.note(job);
        self.check_balance(job, clock)?;
        Ok(transitions)
    }

    fn judge_track(
        &mut self,
        job: JobId,
        track: &mut Track,
        before: &Facts,
        clock: Clock,
        ledger: &mut Ledger,
    ) -> Result<usize, Violation> {
        let after = track.facts.clone();
        if before.main.is_none() && after.main.is_some() {
            // Evicted while it ran, and created anew by its submit, whose evidence went with it.
            track.lease_outlived = before.token();
        }
        let from = before.token().filter(|token| track.lease_outlived != Some(*token));
        let to = after.token().filter(|token| track.lease_outlived != Some(*token));
        if let (Some(from), Some(to)) = (from, to)
            && from != to
        {
            object(Promise::OneLiveLease, format!("job {job} was leased as {to:?} under the lease {from:?}"))?;
        }
        // A grant is judged whatever a fault took from the job before.
        if let (None, Some(token)) = (from, to) {
            self.judge_grant(job, track, before, token, clock, ledger)?;
            return Ok(1);
        }
        if track.excused {
            if let (Some(token), None) = (from, to) {
                self.attempt_over(track, &after, token);
            }
            return Ok(0);
        }
        match (before.status(), after.status()) {
            (None, Some(Queued | Scheduled)) if before.main.is_none() => {
                self.judge_submit(job, track, clock, ledger)?;
            }
            (None, Some(Held)) if before.main.is_none() => {
                self.judge_child(job, track, clock)?;
                return Ok(0);
            }
            (Some(Held), Some(Queued)) => return self.judge_release(job, before, &after, clock).map(|()| 0),
            (Some(Running), Some(to)) if to != Running => self.judge_end(job, track, before, clock, ledger)?,
            (Some(a), Some(b)) if a == b => {
                self.judge_same(job, track, before, clock, ledger)?;
                return Ok(0);
            }
            (Some(from @ (Scheduled | Retrying)), Some(Queued)) => {
                return self.judge_promotion(job, before, &after, from, clock).map(|()| 0);
            }
            (Some(from @ (Scheduled | Queued | Retrying | Held)), Some(Cancelled)) => {
                let stopped = self.group_stopped(job, clock);
                self.cause(job, track, ledger, "cancel or purge", stopped, |request| match request {
                    Request::Cancel { .. } => true,
                    // It may have moved on since the purge saw it.
                    Request::Purge { status, .. } => status.is_terminal() == from.is_terminal(),
                    _ => false,
                })?;
                self.judge_ended(job, track, before, Cancelled, None)?;
                event(track, Kind::Cancelled);
            }
            (Some(Scheduled | Queued | Retrying | Held), Some(Expired)) => {
                if before.ttl.is_none_or(|at| at > clock) && !self.clock_back {
                    object(Promise::ForwardOnly, format!("job {job} expired before its queue deadline"))?;
                }
                self.judge_ended(job, track, before, Expired, None)?;
                event(track, Kind::Expired);
            }
            (Some(Dead | Cancelled | Expired), Some(to @ (Queued | Held)))
                if (to == Held) == job.child_of().is_some() =>
            {
                self.judge_taken_back(job, clock)?;
                self.judge_retry(job, track, before, clock, ledger)?;
            }
            (Some(from), None) if from.is_terminal() => {
                return self.judge_gone(job, track, before, from, clock, ledger);
            }
            // Nothing of its places changed: a key's expiry, or remains that are cleared away.
            (None, None) => return Ok(0),
            (from, to) => {
                let promise = match to {
                    None if after.job(clock).is_none() => Promise::AckedNeverLost,
                    None => Promise::BooksBalance,
                    _ => Promise::ForwardOnly,
                };
                let what = format!(
                    "job {job} went from {from:?} to {to:?}: {} -> {}",
                    before.describe(clock),
                    after.describe(clock)
                );
                object(promise, what)?;
            }
        }
        Ok(1)
    }

    // --- submit -------------------------------------------------------------------------------

    fn judge_submit(
        &mut self,
        job: JobId,
        track: &mut Track,
        clock: Clock,
        ledger: &mut Ledger,
    ) -> Result<(), Violation> {
        if track.known && !track.disturbed {
            object(Promise::ForwardOnly, format!("job {job} was created a second time"))?;
        }
        let Some(main) = track.facts.job(clock).cloned() else {
            return broken(Promise::BooksBalance, format!("job {job} was entered without a record"));
        };
        track.known = true;
        track.born = clock;
        let item = main.traceparent.as_deref().and_then(ItemRef::find);
        let Some(item) = item else {
            return broken(Promise::HonestReplies, format!("job {job} was created by nobody: {main:?}"));
        };
        let asked = match ledger.request(item) {
            Some(Request::Submit(submit)) => Arc::new((**submit).clone()),
            other => return broken(Promise::HonestReplies, format!("job {job} was created by {other:?}")),
        };
        self.applied(item, ledger, &job, "submit", track.disturbed)?;
        // With the record of the first went the evidence that there was one.
        let forgot = || self.damaged && self.jobs.values().any(|t| t.by == Some(item) && t.damaged);
        let excused = self.rewound || self.outlived || track.disturbed;
        if !excused && ledger.item(item).is_some_and(|i| i.effects > 1) && !forgot() {
            object(Promise::HonestReplies, format!("one submit created a second job, {job}"))?;
        }
        track.by = Some(item);
        self.as_asked(job, track, &main, &asked, clock, ledger, item)?;
        track.submit = Some(asked);
        event(track, Kind::Submitted);
        Ok(())
    }

    fn judge_child(&mut self, job: JobId, track: &mut Track, clock: Clock) -> Result<(), Violation> {
        let Some(main) = track.facts.job(clock).cloned() else {
            return broken(Promise::BooksBalance, format!("child {job} was entered without a record"));
        };
        let asked = self.judge_birth(job, track, clock)?;
        track.known = true;
        track.born = clock;
        self.is_as_asked(job, track, &main, &asked)?;
        track.submit = Some(asked);
        Ok(())
    }

    fn is_as_asked(&self, job: JobId, track: &Track, main: &Job, asked: &Submit) -> Result<(), Violation> {
        let same = main.tenant == asked.tenant
            && main.queue == asked.queue
            && main.class == asked.class
            && main.key.as_ref().map(|k| &k.0) == asked.key.as_ref()
            && asked.max_attempts.is_none_or(|n| n == main.policy.max_attempts)
            && asked.max_deliveries.is_none_or(|n| n == main.policy.max_deliveries)
            && asked.run_timeout_ms == main.policy.run_timeout_ms
            && asked.progress_timeout_ms == main.policy.progress_timeout_ms
            && asked.queue_ttl_ms == main.policy.queue_ttl_ms
            && asked.retention_ms.is_none_or(|ms| ms == main.policy.retention_ms)
            && asked.key_ttl_ms == main.policy.key_ttl_ms
            && asked.max_age_ms == main.policy.max_age_ms
            && asked.lease_ms == main.policy.lease_ms
            && asked.cost == main.policy.cost
            && (asked.on_prem || self.routing.keeps(&asked.tenant)) == main.policy.on_prem
            && self.routing.can_place(&main.tenant, &main.queue, main.policy.on_prem)
            && (main.attempts, main.deliveries, main.lives) == (0, 0, 0)
            && main.payload_len == asked.payload.data.len() as u64;
        let payload = leasehold_core::job::record::encode_content(&asked.payload);
        let kept = track.facts.payload.as_ref().and_then(|p| p.value.as_ref());
        if !same || kept != Some(&payload) {
            object(Promise::HonestReplies, format!("job {job} is not what was asked for: {asked:?} -> {main:?}"))?;
        }
        Ok(())
    }

    #[expect(clippy::too_many_arguments)]
    fn as_asked(
        &self,
        job: JobId,
        track: &Track,
        main: &Job,
        asked: &Submit,
        clock: Clock,
        ledger: &Ledger,
        item: ItemRef,
    ) -> Result<(), Violation> {
        self.is_as_asked(job, track, main, asked)?;
        let place = track.facts.places.first().map_or(0, |p| p.1);
        let arrived = ledger.get(item.call).and_then(|c| c.arrived).map_or(0, |a| a.0.clock);
        let earliest = match asked.start {
            Start::Now => clock,
            Start::DelayMs(ms) => clock + ms * 1_000,

            Start::At(at) => at,
        };
        if place < earliest && !self.clock_back {
            object(
                Promise::NoEarlyRun,
                format!(
                    "job {job} is due {} us too early: {:?} at {clock}, asked at {arrived}",
                    earliest - place,
                    asked.start
                ),
            )?;
        }
        if track.facts.status() == Some(Queued) && place != clock {
            object(Promise::Priority, format!("job {job} was queued at {place}, not at the clock {clock}"))?;
        }
        Ok(())
    }

    // --- claim --------------------------------------------------------------------------------

    fn judge_grant(
        &mut self,
        job: JobId,
        track: &mut Track,
        before: &Facts,
        token: Token,
        clock: Clock,
        ledger: &mut Ledger,
    ) -> Result<(), Violation> {
        let Some(record) = track.facts.lease.clone() else { return Ok(()) };
        let Some(lease) = record.value else {
            return broken(Promise::BooksBalance, format!("job {job} has a lease that cannot be read"));
        };
        if let Some(last) = track.grants.last()
            && last.token >= token
            && !self.clock_back
        {
            object(Promise::OneLiveLease, format!("job {job}: token {token:?} does not follow {:?}", last.token))?;
        }
        let item = ItemRef::find(&lease.worker);
        if !track.excused {
            if before.status() != Some(Queued)
                || track.facts.status() != Some(Running)
                || before.main != track.facts.main
            {
                let what = format!("job {job} was leased from {:?}", before.status());
                object(Promise::ForwardOnly, what)?;
            }
            let due = before.places.first().map_or(0, |p| p.1);
            if due > clock && !self.clock_back {
                object(Promise::NoEarlyRun, format!("job {job} was claimed {} us before it is due", due - clock))?;
            }
            if track.facts.places.first().map(|p| p.1) != Some(due) {
                object(Promise::Priority, format!("job {job} forgot its place in the queue at its claim"))?;
            }
            let full = clock.saturating_add(lease.length_ms.saturating_mul(1_000));
            // Whoever claims by name knows the job's deadlines before.
            let full = track.facts.deadline().filter(|_| lease.placed().is_some()).map_or(full, |d| d.min(full));
            if track.facts.leases != Some(full) {
                object(
                    Promise::OneLiveLease,
                    format!("job {job}: its lease ends at {:?}, not {full}", track.facts.leases),
                )?;
            }
            let main = track.facts.main.as_ref().and_then(|m| m.value.clone());
            if let Some(main) = main
                && (main.attempts >= main.policy.max_attempts || main.deliveries >= main.policy.max_deliveries)
            {
                let what = format!("job {job} was claimed once too often: {}", before.describe(clock));
                object(Promise::BoundedAttempts, what)?;
            }
        }
        let paused = self.queue_fact(&lease.tenant, &lease.queue).is_some_and(|q| q.paused() && !q.damaged);
        if paused {
            object(Promise::HonestReplies, format!("job {job} was claimed from {}, which is paused", lease.queue))?;
        }
        let item = match item {
            Some(item) => item,
            None => return broken(Promise::HonestReplies, format!("job {job} was leased to nobody: {lease:?}")),
        };
        match ledger.request(item) {
            Some(Request::Claim(claim)) if claim.tenant == lease.tenant && claim.queues.contains(&lease.queue) => {}
            Some(Request::Dispatch(asked)) if asked.queues.contains(&(lease.tenant.clone(), lease.queue.clone())) => {
                let due = before.places.first().map_or(0, |p| p.1);
                if let (Some(placed), false) = (lease.placed(), track.excused) {
                    self.judge_placed(job, track, &lease, placed, asked, due, clock)?;
                }
            }
            other => return broken(Promise::HonestReplies, format!("job {job} was leased to {other:?}")),
        }
        let forgot = ledger.request(item).is_some_and(|request| self.receipt_lost(request));
        // What was put back since it could not be read is as it was, and a late copy takes it once more: it lapses.
        self.applied(item, ledger, &job, "claim", self.rewound || forgot || self.unread(job))?;
        if let Some(found) = ledger.item_mut(item) {
            found.granted.push(job);
        }
        let most = match ledger.request(item) {
            Some(Request::Claim(claim)) => claim.max,
            Some(Request::Dispatch(asked)) => asked.max,
            _ => usize::MAX,
        };
        // Whoever lost the evidence of what it took takes again.
        if self.granted(item, ledger).len() >= most && !self.rewound && !forgot {
            return broken(
                Promise::HonestReplies,
                format!("call {} was leased more than the {most} asked for", item.call),
            );
        }
        let high = track.facts.leases.unwrap_or(0);
        track.grants.push(Grant { token, by: Some(item), high, told_until: 0, told_to: None, raised: false });
        event(track, Kind::Claimed);
        Ok(())
    }

    /// priority: what a take left behind in a queue comes after what it took.
    pub(super) fn judge_take(&mut self, model: &Model, take: &Take, taken: &[Taken]) -> Result<(), Violation> {
        let mut last: BTreeMap<u16, (Class, u64, JobId)> = BTreeMap::new();
        for member in taken {
            let Some(source) = take.from.get(member.source as usize) else { continue };
            let Index::Status(place) = self.indexes.of(&source.index) else { continue };
            let Some(job) = keys::job_of(&member.member).filter(|_| place.status == Queued) else { continue };
            let at = (place.class, member.score, job);
            let before = last.entry(place.queue).or_insert(at);
            *before = at.max(*before);
        }
        for (queue, (class, score, job)) in last {
            let Some(home) = self.indexes.queues.get(usize::from(queue)) else { continue };
            for other in Class::ALL.into_iter().filter(|c| *c <= class) {
                let index = keys::status(&home.tenant, &home.queue, other, Queued);
                let Some((first, member)) = model.books().get(&index).and_then(|i| i.first()) else { continue };
                let waits = keys::job_of(member);
                if other < class || waits.is_some_and(|w| (*first, w) < (score, job)) {
                    let what =
                        format!("{job} ({class:?} @{score}) was claimed while {member} ({other:?} @{first}) waits");
                    object(Promise::Priority, what)?;
                }
            }
        }
        Ok(())
    }

    // --- other moves --------------------------------------------------------------------------

    fn judge_promotion(
        &self,
        job: JobId,
        before: &Facts,
        after: &Facts,
        from: Status,
        clock: Clock,
    ) -> Result<(), Violation> {
        let due = before.places.first().map_or(0, |p| p.1);
        if due > clock {
            object(Promise::NoEarlyRun, format!("job {job} left {from:?} {} us before it is due", due - clock))?;
        }
        if after.places.first().map(|p| p.1) != Some(due) || before.main != after.main {
            object(Promise::Priority, format!("job {job} was not queued at its due time"))?;
        }
        Ok(())
    }

    fn judge_retry(
        &mut self,
        job: JobId,
        track: &mut Track,
        before: &Facts,
        clock: Clock,
        ledger: &mut Ledger,
    ) -> Result<(), Violation> {
        self.cause(job, track, ledger, "retry", false, |r| matches!(r, Request::Retry { .. }))?;
        let (old, new) = (before.job(clock), track.facts.job(clock));
        let fresh = new.is_some_and(|n| {
            (n.attempts, n.deliveries, n.lives) == (0, 0, old.map_or(0, |o| o.lives) + 1)
                && n.end.is_none()
                && n.key.is_none()
        });
        if !fresh {
            object(Promise::ForwardOnly, format!("job {job}: a new life that is not new: {new:?}"))?;
        }
        track.born = clock;
        event(track, Kind::Retried);
        Ok(())
    }

    fn judge_gone(
        &mut self,
        job: JobId,
        track: &mut Track,
        before: &Facts,
        from: Status,
        clock: Clock,
        ledger: &mut Ledger,
    ) -> Result<usize, Violation> {
        let score = before.places.first().map_or(0, |p| p.1);
        let expired = before.main.as_ref().is_none_or(|m| !m.lives(clock));
        if score <= clock && expired {
            return Ok(0);
        }
        if self.group_gone(job, clock) && track.facts.main.is_none() {
            return Ok(0);
        }
        let deleted = track.facts.main.as_ref().and_then(|m| m.value.as_ref()).is_some_and(|j| j.deleted);
        if !deleted {
            let what = format!("job {job} left {from:?} before its retention ended");
            object(Promise::AckedNeverLost, what)?;
        }
        self.cause(job, track, ledger, "delete or purge", false, |request| match request {
            Request::Delete { .. } => true,
            // It may have moved on since the purge saw it.
            Request::Purge { status, .. } => status.is_terminal() == from.is_terminal(),
            _ => false,
        })?;
        event(track, Kind::Deleted);
        Ok(1)
    }

    /// The status stayed: leases are renewed, and nothing else moves.
    fn judge_same(
        &mut self,
        job: JobId,
        track: &mut Track,
        before: &Facts,
        clock: Clock,
        ledger: &mut Ledger,
    ) -> Result<(), Violation> {
        let after = track.facts.clone();
        if before.places != after.places {
            object(Promise::Priority, format!("job {job} moved within its index"))?;
        }
        if before.main != after.main {
            let what =
                format!("job {job}'s record changed without a transition: {:?} -> {:?}", before.main, after.main);
            object(Promise::ForwardOnly, what)?;
        }
        if let (Some(old), Some(new)) = (&before.progress, &after.progress)
            && old.value == new.value
            && let (Some(seq), Some(later)) = (before.progress_seq, after.progress_seq)
            && old.version != new.version
            && later <= seq
        {
            let what = format!("job {job}: its report of progress {seq} was overwritten by the older {later}");
            object(Promise::ForwardOnly, what)?;
        }
        let (Some(token), Some(old), Some(new)) = (after.token(), before.leases, after.leases) else { return Ok(()) };
        if new == old {
            return Ok(());
        }
        let (Some(lease), Some(main)) =
            (after.lease.as_ref().and_then(|l| l.value.clone()), after.main.as_ref().and_then(|m| m.value.clone()))
        else {
            return Ok(());
        };
        let own = main.policy.lease_ms.filter(|_| lease.terms == Terms::Standard).unwrap_or(lease.length_ms) * 1_000;
        let deadline = after.deadline();
        let at_grant = deadline.map_or(token.at + own, |d| d.min(token.at + own));
        let Some(grant) = track.grants.iter_mut().find(|g| g.token == token) else { return Ok(()) };
        let forgotten = self.rewound && self.rewound_at >= token.at;
        if new == at_grant && (!grant.raised || forgotten) {
            // The job's own length or deadline, set before the lease is handed out; or by a late copy of that, when what
            // was told of it later has been forgotten.
            return Ok(());
        }
        if new < old && grant.told_until <= new {
            // A repeat of the claim brings it within a deadline before anybody is told of it.
            return Ok(());
        }
        if new < old {
            let what = format!(
                "job {job}: a lease was cut from {old} to {new} (told until {}, raised {}, due at grant {at_grant})",
                grant.told_until, grant.raised
            );
            object(Promise::OneLiveLease, what)?;
        }
        grant.raised = true;
        let cap = deadline.unwrap_or(u64::MAX).min(clock + own);
        if new > cap && !self.clock_back && !track.disturbed {
            let what = format!("job {job}: a lease was raised to {new}, beyond {cap}");
            object(Promise::OneLiveLease, what)?;
        }
        self.cause(
            job,
            track,
            ledger,
            "heartbeat",
            false,
            |r| matches!(r, Request::Heartbeat(b) if b.held.token == Some(token)),
        )
    }

    /// Whether a replica may have been too old to read something of a running job: what it could not read it may
    /// not hand out.
    pub(super) fn unread(&self, job: JobId) -> bool {
        [keys::job, keys::lease, keys::payload, keys::progress].iter().any(|key| self.newer.contains(&key(job)))
    }

    /// Jobs that are leased to a request now and that it has to hand out: not those with a queue deadline, which may
    /// have passed when they were taken.
    pub(super) fn granted(&self, item: ItemRef, ledger: &Ledger) -> BTreeMap<JobId, Token> {
        let granted = ledger.item(item).map(|i| i.granted.as_slice()).unwrap_or_default();
        let leased = |job: &JobId| {
            let track = self.jobs.get(job).filter(|t| !t.disturbed && !self.unread(*job))?;
            track.submit.as_ref().filter(|s| s.queue_ttl_ms.is_none())?;
            let grant = track.grants.last().filter(|g| g.by == Some(item))?;
            (track.facts.token() == Some(grant.token)).then_some((*job, grant.token))
        };
        granted.iter().filter_map(leased).collect()
    }

    // --- causes -------------------------------------------------------------------------------

    /// A request that is named by what it wrote: it must still be allowed to have effects.
    pub(super) fn applied(
        &self,
        item: ItemRef,
        ledger: &mut Ledger,
        subject: &dyn std::fmt::Display,
        what: &str,
        disturbed: bool,
    ) -> Result<(), Violation> {
        if !ledger.may_apply(item) && !disturbed && !self.outlived {
            let fate = ledger.item(item).map(|i| i.fate);
            let what = format!("{what} of call {} was applied to {subject} after it was answered {fate:?}", item.call);
            object(Promise::HonestReplies, what)?;
        }
        if let Some(found) = ledger.item_mut(item) {
            found.effects += 1;
        }
        Ok(())
    }

    /// Some request that fits must be under way, or have ended unknown; `otherwise`: it may also have had
    /// another cause.
    pub(super) fn cause(
        &self,
        job: JobId,
        track: &Track,
        ledger: &mut Ledger,
        what: &str,
        otherwise: bool,
        fits: impl Fn(&Request) -> bool,
    ) -> Result<(), Violation> {
        let home = track.facts.main.as_ref().and_then(|m| m.value.clone());
        let purges = self.purges.iter().filter(|p| {
            matches!((ledger.request(**p), &home), (Some(Request::Purge { tenant, queue, .. }), Some(home))
                if *tenant == home.tenant && *queue == home.queue)
        });
        let fitting: Vec<ItemRef> = track
            .askers
            .iter()
            .chain(purges)
            .copied()
            .filter(|item| ledger.may_apply(*item) && ledger.request(*item).is_some_and(&fits))
            .collect();
        match fitting.as_slice() {
            [] if track.disturbed || otherwise => Ok(()),
            [] => broken(Promise::HonestReplies, format!("job {job}: {what} without any request that may still apply")),
            [one] if !otherwise => {
                if let Some(item) = ledger.item_mut(*one) {
                    item.effects += 1;
                }
                Ok(())
            }
            several => {
                for one in several {
                    if let Some(item) = ledger.item_mut(*one) {
                        item.shared += 1;
                    }
                }
                Ok(())
            }
        }
    }
}

pub(super) fn event(track: &mut Track, kind: Kind) {
    track.newest.push(kind);
    *track.events.entry(kind).or_default() += 1;
}

/// The request that a stored result names.
pub(super) fn result_mark(stored: &[u8]) -> Option<ItemRef> {
    let content = leasehold_core::job::record::decode_content(&bytes::Bytes::copy_from_slice(stored)).ok()?;
    ItemRef::find(std::str::from_utf8(&content.data.bytes).ok()?)
}
