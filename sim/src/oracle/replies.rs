//! honest-replies: every answer must have been true at some instant between request and answer.

use std::collections::BTreeSet;
use std::sync::Arc;

use leasehold_core::event::Kind;
use leasehold_core::ids::GroupId;
use leasehold_core::job::record::{AttemptEnd, Owner, Status};
use leasehold_core::request::{Beat, Claim, JobView, Leased, Submit, Why};
use leasehold_core::store::Clock;
use leasehold_core::store::model::Model;
use leasehold_core::{Failure, JobId, Outcome, Request, Response, Token};

use super::pool_replies::pool_of;
use super::{Moment, Oracle, Promise, Track, Violation, broken, object};
use crate::calls::{CallId, Instant, ItemRef, Ledger, fate};

/// The window of one request, and who it was.
#[derive(Clone, Copy)]
pub(super) struct Window {
    pub item: ItemRef,
    pub from: Instant,
    pub clock: Clock,
    pub answers: u64,
}

pub(super) fn lied(
    window: Window,
    request: &Request,
    outcome: &Outcome,
    why: impl std::fmt::Display,
) -> Result<(), Violation> {
    let what = format!("call {}: {why}; asked {request:?}, answered {outcome:?}", window.item.call);
    object(Promise::HonestReplies, what)
}

impl Oracle {
    pub(super) fn judge_reply(
        &mut self,
        model: &Model,
        ledger: &mut Ledger,
        call: CallId,
        outcome: &Outcome,
        answers: u64,
        _now: u64,
    ) -> Result<(), Violation> {
        let Some(found) = ledger.get(call) else { return Ok(()) };
        let Some((from, _)) = found.arrived else { return Ok(()) };
        let request = found.request.clone();
        let window = |item: u32| Window { item: ItemRef { call, item }, from, clock: model.clock(), answers };
        match (&*request, outcome) {
            (Request::Batch(items), Ok(Response::Batch(outcomes))) => {
                if items.len() != outcomes.len() {
                    let what = format!("{} requests, {} answers", items.len(), outcomes.len());
                    return lied(window(0), &request, outcome, what);
                }
                for (n, (item, outcome)) in items.iter().zip(outcomes).enumerate() {
                    self.judge_item(window(n as u32), item, outcome, ledger)?;
                }
                Ok(())
            }
            (Request::Batch(items), Err(failure)) => {
                for (n, item) in items.iter().enumerate() {
                    self.judge_item(window(n as u32), item, &Err(failure.clone()), ledger)?;
                }
                Ok(())
            }
            _ => self.judge_item(window(0), &request, outcome, ledger),
        }
    }

    fn judge_item(
        &mut self,
        w: Window,
        request: &Request,
        outcome: &Outcome,
        ledger: &mut Ledger,
    ) -> Result<(), Violation> {
        let Some(item) = ledger.item(w.item) else { return Ok(()) };
        let job = job_of(request);
        let group = group_of(request);
        let disturbed = job.and_then(|j| self.jobs.get(&j)).is_some_and(|t| t.disturbed)
            || group.and_then(|g| self.groups.get(&g)).is_some_and(|t| t.disturbed);
        let renews = matches!(request, Request::Heartbeat(_));
        if let Err(failure) = outcome
            && failure.certain()
            && item.effects > 0
            && !renews
            && !disturbed
            && !self.rewound
            && !self.receipt_lost(request)
        {
            return lied(w, request, outcome, "said not to be applied, but it was");
        }
        if let (Ok(response), false) = (outcome, disturbed)
            && let Err(why) = self.judge_shown(w, request, response)
        {
            return lied(w, request, outcome, why);
        }
        match outcome {
            Ok(response) => self.judge_ok(w, request, response, outcome, ledger, disturbed)?,
            Err(failure) if !disturbed => self.judge_failure(w, request, failure, outcome)?,
            Err(_) => {}
        }
        if let Some(item) = ledger.item_mut(w.item) {
            item.fate = fate(outcome);
        }
        Ok(())
    }

    /// Where a job stood at the instants of the window.
    fn moments(&self, w: Window, job: JobId) -> (Option<&Track>, Vec<&Moment>) {
        let Some(track) = self.jobs.get(&job) else { return (None, Vec::new()) };
        let first = track.moments.iter().rposition(|m| m.change <= w.from.change);
        (Some(track), track.moments[first.unwrap_or(0)..].iter().collect())
    }

    pub(super) fn ever(&self, w: Window, job: JobId, fits: impl Fn(&Moment) -> bool) -> bool {
        self.moments(w, job).1.into_iter().any(fits)
    }

    fn judge_ok(
        &mut self,
        w: Window,
        request: &Request,
        response: &Response,
        outcome: &Outcome,
        ledger: &Ledger,
        disturbed: bool,
    ) -> Result<(), Violation> {
        let lie = |why: &str| lied(w, request, outcome, why);
        match (request, response) {
            (Request::Submit(submit), Response::Created(view)) => self.judge_created(w, submit, view, request, outcome),
            (Request::Submit(submit), Response::Existing(view)) => {
                self.judge_existing(w, submit, view, request, outcome)
            }
            (Request::Claim(claim), Response::Claimed(jobs)) => {
                self.judge_claimed(w, claim, jobs, outcome, request, ledger)
            }
            (Request::Dispatch(asked), Response::Dispatched(found)) => {
                self.judge_dispatched(w, asked, found, request, outcome, ledger)
            }
            (Request::HoldUpstream(_), Response::UpstreamHeld { .. })
            | (Request::FreeUpstream { .. }, Response::UpstreamFreed)
            | (Request::Upstreams, Response::Upstreams(_)) => Ok(()),
            (Request::GiveBack(asked), Response::GivenBack) => self.judge_given_back(w, asked, request, outcome),
            (Request::CreateGroup(asked), Response::GroupCreated(view)) => {
                self.judge_group_created_reply(w, asked, view, request, outcome)
            }
            (Request::CreateGroup(asked), Response::Group(view)) => {
                self.judge_group_existing(w, asked, view, request, outcome)
            }
            (Request::Pools, _) => self.judge_pool_ok(w, request, response, outcome),
            (request, _) if pool_of(request).is_some() => self.judge_pool_ok(w, request, response, outcome),
            _ if disturbed => Ok(()),
            (
                Request::ExtendGroup { .. }
                | Request::SealGroup { .. }
                | Request::CancelGroup { .. }
                | Request::Group { .. }
                | Request::Children { .. },
                _,
            ) => self.judge_group_ok(w, request, response, outcome, ledger),
            (Request::Get { job, .. }, Response::Job(view)) => {
                let seen = |m: &Moment| {
                    m.status == Some(view.status) && (m.attempts, m.deliveries) == (view.attempt, view.deliveries)
                };
                let lost_entry = self.jobs.get(job).is_none_or(|t| t.disturbed);
                if !lost_entry && !self.ever(w, *job, seen) {
                    return lie("it never stood so");
                }
                if self.group_was_gone(w, *job) {
                    return lie("its group was gone");
                }
                Ok(())
            }
            (Request::Why { job, .. }, Response::Why(why)) => {
                let fits = |m: &Moment| {
                    matches!(
                        (why, m.status),
                        (Why::Scheduled { .. }, Some(Status::Scheduled))
                            | (Why::Retrying { .. }, Some(Status::Retrying))
                            | (Why::Held, Some(Status::Held))
                            | (Why::Paused { .. } | Why::Behind { .. } | Why::NoWorker, Some(Status::Queued))
                            | (Why::NoSlot { .. } | Why::OnHold { .. }, Some(Status::Queued))
                            | (Why::Running { .. }, Some(Status::Running))
                    ) || matches!(why, Why::Ended { status } if m.status == Some(*status))
                };
                if !self.ever(w, *job, fits) { lie("it never stood so") } else { Ok(()) }
            }
            (Request::Payload { job, .. }, Response::Content(content)) => {
                let submitted = self.jobs.get(job).and_then(|t| t.submit.as_ref());
                if submitted.is_some_and(|s| s.payload != *content) {
                    lie("another payload was submitted")
                } else {
                    Ok(())
                }
            }
            (Request::Result { job, .. }, Response::Content(content)) => {
                let mark = std::str::from_utf8(&content.data.bytes).ok().and_then(ItemRef::find);
                let by = mark.and_then(|m| ledger.request(m));
                match by {
                    Some(Request::Complete(c)) if c.held.job == *job && c.result.as_ref() == Some(content) => Ok(()),
                    _ => lie("nobody completed it with that result"),
                }
            }
            (Request::Complete(c), Response::Completed) => {
                self.judge_ended_by(w, c.held.job, c.held.token, AttemptEnd::Succeeded, None, request, outcome)
            }
            (Request::Fail(f), Response::Failed { status, run_at }) => self.judge_ended_by(
                w,
                f.held.job,
                f.held.token,
                AttemptEnd::Failed,
                Some((*status, *run_at)),
                request,
                outcome,
            ),
            (Request::Release(held), Response::Released { status }) => {
                self.judge_ended_by(w, held.job, held.token, AttemptEnd::Released, None, request, outcome)?;
                // A history does not keep that the job died of a release: once it lives again, a repeat says "queued".
                let track = self.jobs.get(&held.job).filter(|t| !t.events.contains_key(&Kind::Retried));
                let ended = track.and_then(|t| t.ended.iter().find(|e| Some(e.token) == held.token));
                if ended.is_some_and(|e| e.status != *status) { lie("it went elsewhere") } else { Ok(()) }
            }
            (Request::Heartbeat(beat), Response::Beat { lease_expires_at, cancel_requested }) => {
                self.judge_beat(w, beat, *lease_expires_at, *cancel_requested, request, outcome)
            }
            (Request::Cancel { job, .. }, Response::Job(_)) => {
                let cancelled = |m: &Moment| m.status == Some(Status::Cancelled);
                if !self.ever(w, *job, cancelled) { lie("it was not cancelled") } else { Ok(()) }
            }
            (Request::Retry { .. }, Response::Job(_)) | (Request::Delete { .. }, Response::Deleted) => {
                let done = ledger.item(w.item).is_some_and(|i| i.effects + i.shared > 0);
                if !done { lie("it was not done") } else { Ok(()) }
            }
            (Request::Pause { tenant, queue, .. } | Request::Resume { tenant, queue }, Response::Queue(_)) => {
                let paused = matches!(request, Request::Pause { .. });
                let fact = self.queue_fact(tenant, queue);
                let was = fact.map_or(!paused, |q| q.was(paused, w.from.change) || q.damaged);
                if !was && !self.rewound { lie("the queue never was so") } else { Ok(()) }
            }
            (Request::List(_), Response::Jobs { .. })
            | (Request::Queues { .. }, Response::Queues(_))
            | (Request::Queue { .. } | Request::SetQueue { .. }, Response::Queue(_))
            | (Request::Purge { .. }, Response::Purged { .. })
            | (Request::Events { .. }, Response::Events { .. })
            | (Request::Audit { .. }, Response::Audited(_))
            | (Request::Result { .. }, Response::NoContent)
            | (Request::Ready, Response::Ready)
            | (Request::Drain, Response::Draining) => Ok(()),
            _ => lie("that is no answer to this"),
        }
    }

    fn judge_created(
        &mut self,
        w: Window,
        submit: &Submit,
        view: &JobView,
        request: &Request,
        outcome: &Outcome,
    ) -> Result<(), Violation> {
        let Some(track) = self.jobs.get(&view.id) else {
            return lied(w, request, outcome, "acknowledged, but there is no such job");
        };
        if track.by != Some(w.item) && !self.rewound {
            return lied(w, request, outcome, format!("the job is that of {:?}", track.by));
        }
        let same = (&view.queue, view.class, &view.key) == (&submit.queue, submit.class, &submit.key);
        let status = |m: &Moment| m.status == Some(view.status);
        if !track.disturbed && (!same || !self.ever(w, view.id, status)) {
            return lied(w, request, outcome, "the job never was like that");
        }
        Ok(())
    }

    fn judge_existing(
        &mut self,
        w: Window,
        submit: &Submit,
        view: &JobView,
        request: &Request,
        outcome: &Outcome,
    ) -> Result<(), Violation> {
        let key = submit.key.as_ref().and_then(|k| self.key_of(&submit.tenant, k));
        let Some(key) = key else { return lied(w, request, outcome, "the key was never bound") };
        let track = self.jobs.get(&view.id);
        if key.damaged || track.is_none_or(|t| t.disturbed) {
            return Ok(());
        }
        if !key.named_since(w.from.change).any(|owner| owner == Owner::Job(view.id)) {
            return lied(w, request, outcome, "the key did not name that job");
        }
        let same = track.and_then(|t| t.submit.as_ref()).is_some_and(|first| same_body(first, submit));
        if !same {
            object(Promise::OneKeyOneJob, format!("another body was taken for a repeat: {request:?}"))?;
        }
        Ok(())
    }

    // --- claims -------------------------------------------------------------------------------

    fn judge_claimed(
        &mut self,
        w: Window,
        claim: &Claim,
        jobs: &[Leased],
        outcome: &Outcome,
        request: &Request,
        ledger: &Ledger,
    ) -> Result<(), Violation> {
        if jobs.len() > claim.max {
            return lied(w, request, outcome, "more than asked for");
        }
        let mut seen = BTreeSet::new();
        let mut order = Vec::new();
        for leased in jobs {
            if !seen.insert(leased.id) {
                object(Promise::OneLiveLease, format!("job {} twice in one claim", leased.id))?;
            }
            order.push(self.judge_leased(w, claim.claim_id.as_ref(), leased, outcome, request, ledger)?);
        }
        let list = |queue: &String| claim.queues.iter().position(|q| q == queue);
        let keys: Vec<_> =
            jobs.iter().zip(&order).filter_map(|(l, score)| Some((l.class, list(&l.queue), (*score)?, l.id))).collect();
        if !keys.is_sorted() && !self.damaged && !self.rewound {
            object(Promise::Priority, format!("a claim's jobs are out of order: {keys:?}"))?;
        }
        // Where a second commit sets the end of its lease, and what became of it was not known in its time, a job is
        // left to lapse.
        let doubtful = |job: &JobId| {
            let submit = self.jobs.get(job).and_then(|t| t.submit.as_ref());
            let own = |s: &Arc<Submit>| s.lease_ms.or(s.run_timeout_ms).or(s.progress_timeout_ms).is_some();
            submit.is_some_and(own) && w.clock.saturating_sub(w.from.clock) > leasehold_core::limits::VALID / 2
        };
        let kept = self.granted(w.item, ledger).into_keys().find(|job| !seen.contains(job) && !doubtful(job));
        if let (Some(job), false) = (kept, self.rewound || self.damaged) {
            return lied(w, request, outcome, format!("job {job} is leased to it and was not handed out"));
        }
        if jobs.is_empty() { self.judge_empty(w, claim, request, outcome, ledger) } else { Ok(()) }
    }

    /// Judges one job that is handed out; returns the score it stood at.
    pub(super) fn judge_leased(
        &mut self,
        w: Window,
        claim_id: Option<&String>,
        leased: &Leased,
        outcome: &Outcome,
        request: &Request,
        ledger: &Ledger,
    ) -> Result<Option<u64>, Violation> {
        let job = leased.id;
        let held = |m: &Moment| m.token == Some(leased.token);
        if !self.ever(w, job, held) {
            let what = format!("job {job} was handed out under a lease that does not stand: {leased:?}");
            object(Promise::OneLiveLease, what)?;
        }
        let (rewound, damaged) = (self.rewound, self.damaged);
        let Some(track) = self.jobs.get_mut(&job) else { return Ok(None) };
        let Some(submit) = track.submit.clone() else {
            return broken(Promise::NoGhosts, format!("job {job} was handed out, but nobody submitted it"));
        };
        match &leased.payload {
            Some(payload) if *payload != submit.payload => {
                object(Promise::NoGhosts, format!("job {job} was handed out with another payload: {payload:?}"))?;
            }
            _ => {}
        }
        let score = track.facts.places.first().filter(|_| track.facts.token() == Some(leased.token)).map(|p| p.1);
        let Some(grant) = track.grants.iter_mut().find(|g| g.token == leased.token) else {
            return broken(Promise::OneLiveLease, format!("job {job}: that token was never granted: {leased:?}"));
        };
        // Another claim may hand it out again only as a repeat of the one that took it.
        let by = grant.by.and_then(|by| ledger.request(by));
        let repeat = match by {
            Some(Request::Claim(first)) => first.claim_id.is_some() && first.claim_id.as_ref() == claim_id,
            _ => false,
        };
        if grant.by != Some(w.item) && !repeat && !rewound {
            object(
                Promise::OneLiveLease,
                format!("job {job}, leased to {:?}, was handed out to {:?}", grant.by, w.item),
            )?;
        }
        grant.told_to = Some(w.item);
        if leased.lease_expires_at > grant.high {
            let what = format!(
                "job {job}: told to be held until {}, but {} is the most it was",
                leased.lease_expires_at, grant.high
            );
            object(Promise::HonestReplies, what)?;
        }
        grant.told_until = grant.told_until.max(leased.lease_expires_at);
        let token = leased.token;
        let deadline = track.facts.deadline().filter(|_| track.facts.token() == Some(token));
        if deadline.is_some_and(|d| leased.lease_expires_at > d) && !track.disturbed {
            let what = format!(
                "job {job} was handed out until {}, past its run or progress deadline {deadline:?}",
                leased.lease_expires_at
            );
            object(Promise::ForwardOnly, what)?;
        }
        if track.disturbed {
            return Ok(score);
        }
        let numbers = |m: &Moment| held(m) && (m.attempts, m.deliveries) == (leased.attempt, leased.delivery);
        let (max, ttl) = match track.facts.main.as_ref().and_then(|m| m.value.as_ref()) {
            Some(main) => (main.policy.max_attempts, main.policy.queue_ttl_ms),
            None => (u32::MAX, None),
        };
        let born = track.born;
        if leased.attempt > max {
            object(Promise::BoundedAttempts, format!("job {job} was handed out for attempt {}", leased.attempt))?;
        }
        if !self.ever(w, job, numbers) && !damaged {
            lied(w, request, outcome, "attempt and delivery never were so")?;
        }
        let late = leased.delivery == 1 && ttl.is_some_and(|ttl| token.at > born + ttl * 1_000 + 100_000);
        if late && !self.clock_back {
            object(Promise::ForwardOnly, format!("job {job} was handed out after its queue deadline"))?;
        }
        Ok(score)
    }

    /// "No work" must have been true, and must have come from the store.
    fn judge_empty(
        &self,
        w: Window,
        claim: &Claim,
        request: &Request,
        outcome: &Outcome,
        ledger: &Ledger,
    ) -> Result<(), Violation> {
        if w.answers <= w.from.answers && !self.cached_pause(claim, w) {
            let what = format!("call {}: \"no work\" without having heard from the store: {request:?}", w.item.call);
            object(Promise::NoSilentStall, what)?;
        }
        // What a repeat answers is what its receipt names; what was taken and found unfit is no work.
        let repeats = claim.claim_id.is_some()
            && ledger.iter().any(|c| {
                c.id != w.item.call && matches!(&*c.request, Request::Claim(o) if o.claim_id == claim.claim_id)
            });
        let took = ledger.item(w.item).is_some_and(|i| !i.granted.is_empty());
        if repeats || took || self.damaged || self.rewound {
            return Ok(());
        }
        for queue in &claim.queues {
            let paused = self.queue_fact(&claim.tenant, queue).is_some_and(|q| q.was(true, w.from.change));
            let ready = self
                .indexes
                .queues
                .iter()
                .find(|q| q.tenant == claim.tenant && q.queue == *queue)
                .is_some_and(|q| q.ready > 0 && q.ready_since <= w.from.change);
            if ready && !paused {
                let what = format!("\"no work\" while {queue} had some all the time: {request:?} -> {outcome:?}");
                object(Promise::NoSilentStall, what)?;
            }
        }
        Ok(())
    }

    /// A queue known to be paused needs no question.
    fn cached_pause(&self, claim: &Claim, w: Window) -> bool {
        claim.queues.iter().all(|q| self.queue_fact(&claim.tenant, q).is_some_and(|q| q.was(true, w.from.change)))
    }

    // --- words about a lease ------------------------------------------------------------------

    #[expect(clippy::too_many_arguments)]
    fn judge_ended_by(
        &self,
        w: Window,
        job: JobId,
        token: Option<Token>,
        how: AttemptEnd,
        told: Option<(Status, Option<Clock>)>,
        request: &Request,
        outcome: &Outcome,
    ) -> Result<(), Violation> {
        let ended = self.jobs.get(&job).and_then(|t| t.ended.iter().find(|e| Some(e.token) == token));
        let Some(ended) = ended else { return lied(w, request, outcome, "the attempt did not end") };
        if ended.outcome != how {
            return lied(w, request, outcome, format!("the attempt ended {:?}", ended.outcome));
        }
        match told {
            Some(told) if told != (ended.status, ended.run_at) => {
                lied(w, request, outcome, format!("it was decided {:?} {:?}", ended.status, ended.run_at))
            }
            _ => Ok(()),
        }
    }

    fn judge_beat(
        &mut self,
        w: Window,
        beat: &Beat,
        expires: Option<Clock>,
        cancelled: bool,
        request: &Request,
        outcome: &Outcome,
    ) -> Result<(), Violation> {
        let job = beat.held.job;
        let Some(expires) = expires else {
            let track = self.jobs.get(&job);
            let by = track.and_then(|t| t.ended.iter().find(|e| Some(e.token) == beat.held.token));
            return match by.map(|e| e.outcome) {
                Some(AttemptEnd::Cancelled) if cancelled => Ok(()),
                other => lied(w, request, outcome, format!("the attempt ended {other:?}")),
            };
        };
        if !self.ever(w, job, |m| m.token.is_some() && m.token == beat.held.token) {
            let what = format!("call {}: a heartbeat revived a lease that was taken back: {request:?}", w.item.call);
            object(Promise::SlotNotResurrected, what)?;
        }
        let grant =
            self.jobs.get_mut(&job).and_then(|t| t.grants.iter_mut().find(|g| Some(g.token) == beat.held.token));
        let Some(grant) = grant else { return lied(w, request, outcome, "that token was never granted") };
        if expires > grant.high {
            return lied(w, request, outcome, format!("the most it was is {}", grant.high));
        }
        grant.told_until = grant.told_until.max(expires);
        Ok(())
    }

    // --- failures that say something about the store ------------------------------------------

    fn judge_failure(
        &self,
        w: Window,
        request: &Request,
        failure: &Failure,
        outcome: &Outcome,
    ) -> Result<(), Violation> {
        let lie = |why: &str| lied(w, request, outcome, why);
        match (request, failure) {
            (Request::Submit(submit), Failure::KeyReused) => {
                return self.judge_reused(w, submit, request, outcome);
            }
            (Request::Heartbeat(beat), Failure::SlotLost) => return self.judge_slot_lost(w, beat, request, outcome),
            (Request::Submit(submit), Failure::NoPlacement) => {
                let on_prem = submit.on_prem || self.routing.keeps(&submit.tenant);
                if self.routing.can_place(&submit.tenant, &submit.queue, on_prem) {
                    return lie("there is a route for it");
                }
            }
            (Request::CreateGroup(asked), Failure::KeyReused) => {
                return self.judge_reused(w, &asked.common, request, outcome);
            }
            _ => {}
        }
        if let Some(group) = group_of(request) {
            return self.judge_group_failure(w, group, request, failure, outcome);
        }
        if pool_of(request).is_some() {
            return self.judge_pool_failure(w, request, failure, outcome);
        }
        let Some(job) = job_of(request) else { return Ok(()) };
        let (track, moments) = self.moments(w, job);
        let clock = w.clock;
        let ever = |fits: &dyn Fn(&Moment) -> bool| moments.iter().any(|m| fits(m));
        let token = token_of(request);
        match failure {
            Failure::UnknownJob => {
                let other_tenant = track
                    .and_then(|t| t.submit.as_ref())
                    .is_some_and(|s| Some(s.tenant.as_str()) != tenant_of(request));
                let gone = |m: &Moment| !m.present || m.expiry.is_some_and(|e| e <= clock);
                let before = track.is_none_or(|t| t.moments.first().is_none_or(|m| m.change > w.from.change));
                if !other_tenant && !before && !ever(&gone) && !self.group_ever_gone(w, job) {
                    let what = format!("call {}: \"unknown\", but job {job} was there: {request:?}", w.item.call);
                    object(Promise::AckedNeverLost, what)?;
                }
                Ok(())
            }
            Failure::LeaseLost => {
                let Some(token) = token else { return Ok(()) };
                if !ever(&|m| m.token != Some(token) || m.deadline.is_some_and(|d| d <= clock)) {
                    return lie("the lease stood all the time");
                }
                self.judge_first_answer(w, job, token, request)
            }
            Failure::JobCancelled => {
                let by = track.and_then(|t| t.ended.iter().find(|e| Some(e.token) == token));
                if by.is_none_or(|e| e.outcome != AttemptEnd::Cancelled) { lie("it was not cancelled") } else { Ok(()) }
            }
            Failure::AlreadyTerminal => {
                let other = |m: &Moment| m.status.is_some_and(|s| s.is_terminal() && s != Status::Cancelled);
                if !ever(&other) { lie("it had not ended otherwise") } else { Ok(()) }
            }
            Failure::NotRetryable => {
                let not = |m: &Moment| {
                    !matches!(m.status, Some(Status::Dead | Status::Cancelled | Status::Expired))
                        || m.payload.is_none_or(|expiry| expiry.is_some_and(|e| e <= clock))
                };
                if !ever(&not) && !self.group_ever_through(w, job) { lie("it could be retried") } else { Ok(()) }
            }
            Failure::NotTerminal => {
                let lives = |m: &Moment| m.status.is_some_and(|s| !s.is_terminal());
                if !ever(&lives) { lie("it had ended") } else { Ok(()) }
            }
            Failure::NoPayload => {
                let none = |m: &Moment| m.payload.is_none_or(|expiry| expiry.is_some_and(|e| e <= clock));
                if !ever(&none) { lie("there is a payload") } else { Ok(()) }
            }
            _ => Ok(()),
        }
    }

    /// stale-token-refused: the call that ended an attempt, repeated with its token, gets its first
    /// answer as long as that is remembered.
    fn judge_first_answer(&self, w: Window, job: JobId, token: Token, request: &Request) -> Result<(), Violation> {
        let how = match request {
            Request::Complete(_) => AttemptEnd::Succeeded,
            Request::Fail(_) => AttemptEnd::Failed,
            Request::Release(_) => AttemptEnd::Released,
            _ => return Ok(()),
        };
        let Some(track) = self.jobs.get(&job) else { return Ok(()) };
        let Some(at) = track.ended.iter().position(|e| e.token == token && e.outcome == how) else { return Ok(()) };
        // The first five and the last twenty attempts are remembered.
        let remembered = track.ended.len() - at <= 20;
        if track.ended[at].change <= w.from.change && remembered {
            let what = format!("call {}: a repeat was refused, its first answer forgotten: {request:?}", w.item.call);
            object(Promise::StaleTokenRefused, what)?;
        }
        Ok(())
    }

    fn judge_reused(&self, w: Window, submit: &Submit, request: &Request, outcome: &Outcome) -> Result<(), Violation> {
        let key = submit.key.as_ref().and_then(|k| self.key_of(&submit.tenant, k));
        let Some(key) = key else { return lied(w, request, outcome, "the key was never bound") };
        let other = key.named_since(w.from.change).any(|owner| match (owner, request) {
            (Owner::Job(job), Request::Submit(_)) => {
                let first = self.jobs.get(&job).and_then(|t| t.submit.as_ref());
                first.is_none_or(|first| !same_body(first, submit))
            }
            (Owner::Group(group), Request::CreateGroup(asked)) => !self.same_group(group, asked),
            // Another kind of body.
            _ => true,
        });
        if !other && !key.damaged {
            return lied(w, request, outcome, "the key names nobody with another body");
        }
        Ok(())
    }
}

/// Whether two submits are the same but for what names the call.
pub(super) fn same_body(a: &Submit, b: &Submit) -> bool {
    let bare = |s: &Submit| Submit { traceparent: None, ..s.clone() };
    bare(a) == bare(b)
}

fn group_of(request: &Request) -> Option<GroupId> {
    match request {
        Request::ExtendGroup { group, .. }
        | Request::SealGroup { group, .. }
        | Request::CancelGroup { group, .. }
        | Request::Group { group, .. }
        | Request::Children { group, .. } => Some(*group),
        _ => None,
    }
}

fn job_of(request: &Request) -> Option<JobId> {
    match request {
        Request::Get { job, .. }
        | Request::Payload { job, .. }
        | Request::Result { job, .. }
        | Request::Why { job, .. }
        | Request::Cancel { job, .. }
        | Request::Retry { job, .. }
        | Request::Delete { job, .. } => Some(*job),
        Request::Heartbeat(beat) => Some(beat.held.job),
        Request::Complete(complete) => Some(complete.held.job),
        Request::Fail(fail) => Some(fail.held.job),
        Request::Release(held) => Some(held.job),
        _ => None,
    }
}

fn held_of(request: &Request) -> Option<&leasehold_core::request::Held> {
    match request {
        Request::Heartbeat(beat) => Some(&beat.held),
        Request::Complete(complete) => Some(&complete.held),
        Request::Fail(fail) => Some(&fail.held),
        Request::Release(held) => Some(held),
        _ => None,
    }
}

fn token_of(request: &Request) -> Option<Token> {
    held_of(request)?.token
}

fn tenant_of(request: &Request) -> Option<&str> {
    match request {
        Request::Get { tenant, .. }
        | Request::Payload { tenant, .. }
        | Request::Result { tenant, .. }
        | Request::Why { tenant, .. }
        | Request::Cancel { tenant, .. }
        | Request::Retry { tenant, .. }
        | Request::Delete { tenant, .. } => Some(tenant),
        _ => held_of(request).map(|h| h.tenant.as_str()),
    }
}
