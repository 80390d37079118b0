//! The end of an attempt and of a job: who caused it, what it counts, and how long what is left of it is kept.

use leasehold_core::event::Kind;
use leasehold_core::job::record::{AttemptEnd, AttemptRecord, Job, Owner, Status};
use leasehold_core::store::Clock;
use leasehold_core::{JobId, Request, Token};

use super::facts::Facts;
use super::moves::{CLOCK_SLACK, event, result_mark};
use super::{EndedAttempt, Oracle, Promise, Track, Violation, broken, object};
use crate::calls::{ItemRef, Ledger};

use Status::{Cancelled, Dead, Expired, Queued, Retrying, Succeeded};

impl Oracle {
    /// The record of the attempt with that token, wherever it is kept.
    fn attempt_of(after: &Facts, token: Token) -> Option<&AttemptRecord> {
        let main = after.main.as_ref()?.value.as_ref()?;
        let last = main.end.as_ref().and_then(|e| e.attempt.as_ref()).filter(|a| a.token == token);
        last.or_else(|| after.history.as_ref()?.value.as_ref()?.by_token(token))
    }

    pub(super) fn attempt_over(&self, track: &mut Track, after: &Facts, token: Token) {
        if let (Some(attempt), Some(status)) = (Self::attempt_of(after, token), after.status()) {
            let (outcome, run_at) = (attempt.outcome, attempt.run_at);
            track.ended.push(EndedAttempt { token, outcome, status, run_at, change: self.change });
        }
    }

    pub(super) fn judge_end(
        &mut self,
        job: JobId,
        track: &mut Track,
        before: &Facts,
        clock: Clock,
        ledger: &mut Ledger,
    ) -> Result<(), Violation> {
        let after = track.facts.clone();
        let to = after.status().unwrap_or(Dead);
        let Some(token) = before.token() else {
            return broken(Promise::BooksBalance, format!("job {job} ran without a lease"));
        };
        let (Some(old), Some(new)) =
            (before.main.as_ref().and_then(|m| m.value.clone()), after.main.as_ref().and_then(|m| m.value.clone()))
        else {
            return broken(Promise::AckedNeverLost, format!("job {job} lost its record at the end of an attempt"));
        };
        if before.main == after.main {
            // Put back as if it had not been taken; nobody may have been told of this lease.
            return self.judge_undone(job, track, before, token, to, ledger);
        }
        let Some(attempt) = Self::attempt_of(&after, token).cloned() else {
            if track.disturbed && self.rewound {
                // The claim was forgotten and came again, at another clock: its holder's token names the first.
                return Ok(());
            }
            let what =
                format!("job {job}: how the attempt of {token:?} ended is not kept, so a repeat cannot be answered");
            return broken(Promise::StaleTokenRefused, what);
        };
        self.attempt_over(track, &after, token);
        self.end_cause(job, track, before, &attempt, to, clock, ledger)?;
        let undelivered = attempt.outcome == AttemptEnd::Expired;
        let counted = old.attempts + u32::from(counts(attempt.outcome));
        let delivered = old.deliveries + u32::from(!undelivered);
        if (new.attempts, new.deliveries) != (counted, delivered) {
            let what = format!(
                "job {job}: attempts {} -> {}, deliveries {} -> {} at {:?}",
                old.attempts, new.attempts, old.deliveries, new.deliveries, attempt.outcome
            );
            object(Promise::BoundedAttempts, what)?;
        }
        if to.is_terminal() {
            self.judge_ended(job, track, before, to, Some(&attempt))?;
        } else if new.attempts >= new.policy.max_attempts || new.deliveries >= new.policy.max_deliveries {
            let what = format!("job {job} goes on after its last attempt: {}", after.describe(clock));
            object(Promise::BoundedAttempts, what)?;
        }
        self.end_events(track, &attempt, to, &new);
        Ok(())
    }

    fn end_events(&self, track: &mut Track, attempt: &AttemptRecord, to: Status, new: &Job) {
        match (attempt.outcome, to) {
            (AttemptEnd::Succeeded, _) => event(track, Kind::Succeeded),
            (AttemptEnd::Cancelled, _) => event(track, Kind::Cancelled),
            (AttemptEnd::Failed, Retrying) => event(track, Kind::Retrying),
            (AttemptEnd::Released, Queued) => event(track, Kind::Released),
            (AttemptEnd::LeaseExpired, _) => event(track, Kind::LeaseExpired),
            (AttemptEnd::TimedOut, _) => event(track, Kind::TimedOut),
            (AttemptEnd::Expired, Expired) => event(track, Kind::Expired),
            (AttemptEnd::Expired, _) if new.end.as_ref().is_some_and(|e| e.reason.as_deref() == Some("lost")) => {
                event(track, Kind::Lost);
            }
            _ => {}
        }
        if to == Dead {
            event(track, Kind::Dead);
        }
    }

    #[expect(clippy::too_many_arguments)]
    fn end_cause(
        &mut self,
        job: JobId,
        track: &mut Track,
        before: &Facts,
        attempt: &AttemptRecord,
        to: Status,
        clock: Clock,
        ledger: &mut Ledger,
    ) -> Result<(), Violation> {
        let token = attempt.token;
        let disturbed = track.disturbed;
        match (attempt.outcome, to) {
            (AttemptEnd::Succeeded, Succeeded) => {
                // A result names the call that brought it.
                let result = track.facts.result.as_ref().filter(|r| r.at == clock).and_then(|r| r.value.clone());
                match result.as_deref().and_then(result_mark) {
                    Some(item) => self.applied(item, ledger, &job, "complete", disturbed),
                    None => self.cause(
                        job,
                        track,
                        ledger,
                        "complete",
                        false,
                        |r| matches!(r, Request::Complete(c) if c.held.token == Some(token)),
                    ),
                }
            }
            (AttemptEnd::Failed, Retrying | Dead) => {
                let item = attempt.error.as_ref().and_then(|e| ItemRef::find(&e.message));
                let Some(item) = item else {
                    return broken(Promise::HonestReplies, format!("job {job} failed by nobody's word: {attempt:?}"));
                };
                self.applied(item, ledger, &job, "fail", disturbed)?;
                self.judge_backoff(job, track, before, attempt, to, clock, ledger, item)
            }
            (AttemptEnd::Released, Queued | Dead) => {
                if to == Queued && track.facts.places.first().map(|p| p.1) != before.places.first().map(|p| p.1) {
                    object(Promise::Priority, format!("job {job} did not go back to its place"))?;
                }
                self.cause(
                    job,
                    track,
                    ledger,
                    "release",
                    false,
                    |r| matches!(r, Request::Release(held) if held.token == Some(token)),
                )
            }
            (AttemptEnd::Cancelled, Cancelled) => {
                let stopped = self.group_stopped(job, clock);
                self.cause(job, track, ledger, "cancel", stopped, |r| matches!(r, Request::Cancel { .. }))
            }
            (AttemptEnd::LeaseExpired, Queued | Dead) => {
                if to == Queued && track.facts.places.first().map(|p| p.1) != before.places.first().map(|p| p.1) {
                    object(Promise::Priority, format!("job {job} did not go back to its place"))?;
                }
                self.judge_lapse(job, track, before, token, clock)
            }
            (AttemptEnd::TimedOut, Retrying | Dead) => {
                let deadline = before.deadline();
                // Where the clock has gone back, a deadline that had come when the lease was read may lie
                // ahead again: the attempt is over either way, since its lease is due.
                if deadline.is_none_or(|d| d > clock && !self.clock_back) {
                    object(Promise::ForwardOnly, format!("job {job} timed out before its deadline {deadline:?}"))?;
                }
                Ok(())
            }
            // Found unfit to be handed out.
            (AttemptEnd::Expired, Expired) => {
                let ttl = before.main.as_ref().and_then(|m| m.value.as_ref()).and_then(|j| j.policy.queue_ttl_ms);
                let past = ttl.is_some_and(|ttl| clock + CLOCK_SLACK >= track.born + ttl * 1_000);
                if !past && !self.clock_back {
                    object(Promise::ForwardOnly, format!("job {job} expired before its queue deadline"))?;
                }
                Ok(())
            }
            (outcome, to) => broken(
                Promise::ForwardOnly,
                format!("job {job}: an attempt ended {outcome:?} and the job went to {to:?}"),
            ),
        }
    }

    /// A lease is reclaimed only from its end on, as its holder was told it.
    fn judge_lapse(
        &self,
        job: JobId,
        track: &Track,
        before: &Facts,
        token: Token,
        clock: Clock,
    ) -> Result<(), Violation> {
        let told = track.grants.iter().find(|g| g.token == token).map_or(0, |g| g.told_until);
        let ends = before.leases.unwrap_or(0);
        if ends > clock {
            object(
                Promise::OneLiveLease,
                format!("job {job}: a lease was reclaimed {} us before its end", ends - clock),
            )?;
        }
        if told > clock && !track.disturbed {
            let what =
                format!("job {job}: a lease was reclaimed {} us before the end its holder was told", told - clock);
            object(Promise::OneLiveLease, what)?;
        }
        Ok(())
    }

    #[expect(clippy::too_many_arguments)]
    fn judge_backoff(
        &self,
        job: JobId,
        track: &Track,
        before: &Facts,
        attempt: &AttemptRecord,
        to: Status,
        clock: Clock,
        ledger: &Ledger,
        item: ItemRef,
    ) -> Result<(), Violation> {
        let (Some(Request::Fail(fail)), Some(old)) =
            (ledger.request(item), before.main.as_ref().and_then(|m| m.value.as_ref()))
        else {
            return broken(Promise::HonestReplies, format!("job {job} failed by no fail"));
        };
        if to == Dead {
            let last = old.attempts + 1 >= old.policy.max_attempts || old.deliveries + 1 >= old.policy.max_deliveries;
            if fail.retryable && !last && old.policy.max_age_ms.is_none() {
                object(Promise::ForwardOnly, format!("job {job} is dead with attempts left"))?;
            }
            return Ok(());
        }
        if !fail.retryable {
            object(Promise::ForwardOnly, format!("job {job} is tried again though its failure forbids it"))?;
        }
        let policy = &old.policy.backoff;
        let grown = f64::from(policy.factor_milli) / 1_000.0;
        let least = (policy.base_ms as f64 * grown.powi(old.attempts as i32)).min(policy.max_ms as f64) as u64;
        let most = least + 2 + least * u64::from(policy.jitter_milli) / 1_000;
        let (least, most) = fail.retry_in_ms.map_or((least.saturating_sub(2), most), |ms| (ms, ms));
        let arrived = ledger.get(item.call).and_then(|c| c.arrived).map_or(0, |a| a.0.clock);
        let due = track.facts.due.unwrap_or(0);
        let kept = attempt.run_at == Some(due);
        if !self.clock_back && (!kept || due < arrived + least * 1_000 || due > clock + most * 1_000) {
            let what = format!(
                "job {job} is tried again at {due}, not between {} and {}",
                arrived + least * 1_000,
                clock + most * 1_000
            );
            object(Promise::NoEarlyRun, what)?;
        }
        Ok(())
    }

    fn judge_undone(
        &self,
        job: JobId,
        track: &mut Track,
        before: &Facts,
        token: Token,
        to: Status,
        ledger: &Ledger,
    ) -> Result<(), Violation> {
        let same_place = track.facts.places.first().map(|p| p.1) == before.places.first().map(|p| p.1);
        let grant = track.grants.iter().find(|g| g.token == token);
        let told = grant.is_some_and(|g| g.told_to.is_some());
        let gone = grant.and_then(|g| g.by).and_then(|by| ledger.get(by.call)).is_some_and(|c| c.hung_up);
        if to != Queued || !(same_place || track.damaged) || told || !(gone || self.unread(job)) {
            let what = format!("job {job} was put back (told {told}, asker gone {gone}) to {to:?}");
            object(Promise::ForwardOnly, what)?;
        }
        event(track, Kind::Released);
        Ok(())
    }

    /// What holds of every end of a life.
    pub(super) fn judge_ended(
        &self,
        job: JobId,
        track: &Track,
        before: &Facts,
        to: Status,
        attempt: Option<&AttemptRecord>,
    ) -> Result<(), Violation> {
        let old = before.main.as_ref().and_then(|m| m.value.as_ref());
        let new = track.facts.main.as_ref().and_then(|m| m.value.as_ref());
        let (Some(old), Some(new)) = (old, new) else {
            return broken(Promise::AckedNeverLost, format!("job {job} ended without a record"));
        };
        let end = new.end.as_ref();
        if old.end.is_some() || end.map(|e| e.status) != Some(to) || new.lives != old.lives {
            object(Promise::ForwardOnly, format!("job {job} ended {to:?}, its record says {end:?}"))?;
        }
        if end.and_then(|e| e.attempt.as_ref()).map(|a| a.token) != attempt.map(|a| a.token) {
            object(Promise::StaleTokenRefused, format!("job {job} ended by {attempt:?}, its record says {end:?}"))?;
        }
        self.judge_kept(job, &track.facts, new, to)
    }

    /// acked-never-lost: what has ended is kept for its retention, and its record for as long as its key.
    fn judge_kept(&self, job: JobId, facts: &Facts, main: &Job, to: Status) -> Result<(), Violation> {
        let Some(record) = &facts.main else { return Ok(()) };
        let until = |ms: u64| record.at.saturating_add(ms.saturating_mul(1_000));
        let retention = main.policy.retention_ms;
        let key = if main.key.is_some() && to == Succeeded { key_ms(main) } else { 0 };
        let payload = facts.payload.as_ref().map(|r| r.expiry);
        let result = facts.result.as_ref().map(|r| r.expiry);
        let kept = [(Some(record.expiry), retention.max(key)), (payload, retention), (result, retention)];
        for (expiry, ms) in kept {
            if let Some(Some(expiry)) = expiry
                && expiry < until(ms)
            {
                let what =
                    format!("job {job} ended {}; its retention ends {} us too early", to.text(), until(ms) - expiry);
                object(Promise::AckedNeverLost, what)?;
            }
        }
        let bound = main.key.as_ref().filter(|_| to == Succeeded).map(|(key, _)| key);
        bound.map_or(Ok(()), |key| self.judge_bound(&main.tenant, key, Owner::Job(job), until(key_ms(main))))
    }
}

/// For how long the key of a job that has succeeded names it.
fn key_ms(main: &Job) -> u64 {
    main.policy.key_ttl_ms.unwrap_or(main.policy.retention_ms)
}

/// Whether an attempt that ended so uses one up: not when it was given back, cancelled or never run.
fn counts(outcome: AttemptEnd) -> bool {
    match outcome {
        AttemptEnd::Succeeded | AttemptEnd::Failed | AttemptEnd::LeaseExpired | AttemptEnd::TimedOut => true,
        AttemptEnd::Released | AttemptEnd::Cancelled | AttemptEnd::Expired => false,
    }
}
