//! Ending an attempt on the worker's word: complete, fail, release.

use alloc::boxed::Box;
use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;

use super::attempt::{self, Cause, Running};
use super::handed::HandedOut;
use super::lease::{self, Granted};
use super::look::job_of;
use super::moves::{self, Ending, Home, put};
use super::record::{AttemptEnd, AttemptRecord, History, Job, Status, encode_content};
use super::{check, view};
use crate::dispatch::Change;
use crate::failure::Failure;
use crate::ids::Token;
use crate::limits;
use crate::replica::Op;
use crate::replica::task::{Cx, Evidence, EvidenceKind, Next, Operation, Plan, applied, decode_record};
use crate::request::{Complete, Fail, Held, Response};
use crate::store::{Answer, Clock, Expiry, Guard, Read, Record, Snapshot, Version, keys};

/// The place of the key's guard in a completion: after the lease's and the job's.
const KEY_GUARD: usize = 2;

#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct Finish {
    how: How,
    /// What is answered once the transaction has been applied.
    decided: Option<Response>,
    /// The attempt was tried on this upstream after a hold, and it has answered: the hold is over.
    frees: Option<String>,
    /// The idempotency key was found not to be this job's any more, which stays so.
    keyless: bool,
}

#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
enum How {
    Complete(Box<Complete>),
    Fail(Box<Fail>),
    Release(Held),
}

impl Finish {
    pub fn complete(asked: Box<Complete>) -> Result<Finish, Failure> {
        check::content("result", asked.result.as_ref())?;
        Ok(Finish { how: How::Complete(asked), decided: None, frees: None, keyless: false })
    }

    pub fn fail(mut asked: Box<Fail>) -> Result<Finish, Failure> {
        check::within("retry_in_ms", asked.retry_in_ms, 0, limits::DURATION_MS_MAX)?;
        asked.error = core::mem::take(&mut asked.error).cut();
        Ok(Finish { how: How::Fail(asked), decided: None, frees: None, keyless: false })
    }

    pub fn release(held: Held) -> Finish {
        Finish { how: How::Release(held), decided: None, frees: None, keyless: false }
    }

    fn held(&self) -> &Held {
        match &self.how {
            How::Complete(c) => &c.held,
            How::Fail(f) => &f.held,
            How::Release(h) => h,
        }
    }

    /// The first answer again, if the attempt with this token ended in the same way.
    fn repeated(&self, attempt: &AttemptRecord, ended: bool) -> Option<Response> {
        match (&self.how, attempt.outcome) {
            (How::Complete(_), AttemptEnd::Succeeded) => Some(Response::Completed),
            (How::Fail(_), AttemptEnd::Failed) => {
                let status = if attempt.run_at.is_some() { Status::Retrying } else { Status::Dead };
                Some(Response::Failed { status, run_at: attempt.run_at })
            }
            (How::Release(_), AttemptEnd::Released) => {
                Some(Response::Released { status: if ended { Status::Dead } else { Status::Queued } })
            }
            _ => None,
        }
    }

    /// What a token that is not the present one is told.
    fn late(&self, job: &Job, history: Option<&History>, token: Option<Token>) -> Next {
        let Some(token) = token else { return Next::fail(Failure::LeaseLost) };
        let last = job.end.as_ref().and_then(|e| e.attempt.as_ref());
        if let Some(attempt) = last
            && attempt.token == token
            && let Some(first) = self.repeated(attempt, true)
        {
            return Next::ok(first);
        }
        if let Some(attempt) = history.and_then(|h| h.by_token(token))
            && let Some(first) = self.repeated(attempt, false)
        {
            return Next::ok(first);
        }
        match view::cancelled_under(job, token) {
            true => Next::fail(Failure::JobCancelled),
            false => Next::fail(Failure::LeaseLost),
        }
    }

    /// Ends the job well, by its record and its lease as they were read or handed out.
    fn succeed(&mut self, job: &Job, version: Version, granted: &Granted, clock: Clock, cx: &mut Cx<'_>) -> Next {
        let How::Complete(asked) = &self.how else { return Next::fail(Failure::LeaseLost) };
        let id = asked.held.job;
        let mut leave = moves::leave_running(id, Home::from(job), Some(granted));
        let mut grows = false;
        let own = cx.make.version();
        if let Some(result) = &asked.result {
            // Results that could fill a store must not pass as what drains it.
            grows = result.data.len() > limits::RESULT_INLINE;
            let retention = job.policy.retention_ms.saturating_mul(limits::MILLI);
            // A child's result lives as long as its group.
            let expiry = if id.child_of().is_some() { Expiry::Never } else { Expiry::Clock(retention) };
            leave.push(put(keys::result(id), own, encode_content(result), expiry));
        }
        let ending = Ending {
            status: Status::Succeeded,
            reason: None,
            result_len: asked.result.as_ref().map(|r| r.data.len() as u64),
            attempt: Some(lease::attempt(job, Some(granted), AttemptEnd::Succeeded, clock, None)),
            attempts: job.attempts.saturating_add(1),
            deliveries: job.deliveries.saturating_add(1),
        };
        let guards = vec![Guard::At(keys::lease(id), granted.version)];
        let mut txns = moves::end(id, job, version, own, clock, &ending, guards, leave, cx);
        // One of the two alternatives is enough: whose key is gone comes back for the other, which is rare,
        // and a refused transaction costs a shared store a good part of what an applied one does.
        if txns.len() > 1 {
            txns.remove(usize::from(!self.keyless));
        }
        self.decided = Some(Response::Completed);
        self.frees = probed(granted);
        let evidence = Evidence { key: keys::job(id), own, found: Some(version), kind: EvidenceKind::Job };
        Next::Commit(Plan { txns, grows, evidence: Some(evidence) })
    }

    fn count(&self, clock: Clock, cx: &mut Cx<'_>) {
        if !matches!(self.how, How::Release(_))
            && let Some(token) = self.held().token
        {
            cx.stats.ran.count(clock.saturating_sub(token.at));
        }
        match (&self.how, &self.decided) {
            (How::Complete(_), _) => cx.stats.completed += 1,
            (How::Fail(_), _) => cx.stats.failed += 1,
            (How::Release(_), _) => cx.stats.released += 1,
        }
        if matches!(
            self.decided,
            Some(Response::Failed { status: Status::Dead, .. } | Response::Released { status: Status::Dead })
        ) {
            cx.stats.dead += 1;
        }
    }
}

/// The upstream on which the attempt was the one that tells whether it takes calls again.
fn probed(granted: &Granted) -> Option<String> {
    granted.lease.placed().filter(|placed| placed.probe).map(|placed| placed.upstream.clone())
}

impl Operation for Finish {
    fn start(&mut self, cx: &mut Cx<'_>) -> Next {
        self.decided = None;
        let id = self.held().job;
        if let How::Complete(asked) = &self.how
            && cx.fresh
            && let Some(HandedOut { version, job, granted }) =
                asked.held.token.and_then(|token| cx.handed.take(id, token))
            && job.tenant == asked.held.tenant
        {
            let clock = cx.clock.max(granted.at);
            return self.succeed(&job, version, &granted, clock, cx);
        }
        let mut records = vec![keys::job(id), keys::lease(id)];
        if !matches!(self.how, How::Complete(_)) {
            records.push(keys::history(id));
        }
        Next::Read(Read { records, ..Read::default() })
    }

    fn read(&mut self, snapshot: Snapshot, cx: &mut Cx<'_>) -> Next {
        let held = self.held();
        let (id, token) = (held.job, held.token);
        let mut records = snapshot.records.iter();
        let main = records.next().unwrap_or(&Record::Absent);
        let (version, job) = match job_of(main, &held.tenant) {
            Ok(found) => found,
            Err(failure) => return Next::fail(failure),
        };
        let lease = records.next().unwrap_or(&Record::Absent);
        let history: Option<History> = records.next().and_then(|r| decode_record(r).ok().flatten()).map(|(_, h)| h);
        let Some(current) = lease::present(token, lease) else { return self.late(&job, history.as_ref(), token) };
        let granted = current.granted;
        let clock = snapshot.clock;
        let guards = vec![Guard::At(keys::lease(id), granted.version)];
        let cause = match &self.how {
            How::Complete(_) => return self.succeed(&job, version, &granted, clock, cx),
            How::Fail(asked) => Cause {
                end: AttemptEnd::Failed,
                error: Some(asked.error.clone()),
                retryable: asked.retryable,
                retry_in_ms: asked.retry_in_ms,
            },
            How::Release(_) => Cause::of(AttemptEnd::Released),
        };
        let history = history.unwrap_or_default();
        let running = Running { id, job: &job, version, granted: Some(&granted), history };
        let d = attempt::end(running, &cause, clock, guards, cx);
        // What is refused for good was answered, unlike what may be tried again.
        self.frees = probed(&granted).filter(|_| matches!(&self.how, How::Fail(asked) if !asked.retryable));
        self.decided = Some(match &self.how {
            How::Fail(_) => Response::Failed { status: d.status, run_at: d.run_at },
            _ => Response::Released { status: d.status },
        });
        let evidence = Evidence { key: keys::job(id), own: d.own, found: Some(version), kind: EvidenceKind::Job };
        Next::Commit(Plan { txns: d.drafts, grows: false, evidence: Some(evidence) })
    }

    fn answered(&mut self, clock: Clock, answers: Vec<Answer>, cx: &mut Cx<'_>) -> Next {
        if applied(&answers) {
            return self.settled(clock, cx);
        }
        // After those of the lease and of the job's record comes that of the key.
        self.keyless |= matches!(self.how, How::Complete(_)) && answers.contains(&Answer::Refused(KEY_GUARD));
        self.start(cx)
    }

    fn settled(&mut self, clock: Clock, cx: &mut Cx<'_>) -> Next {
        self.count(clock, cx);
        match (self.decided.take(), self.frees.take()) {
            (Some(response), None) => Next::ok(response),
            (Some(response), Some(upstream)) => Next::Become(Op::Hold(Box::new(Change::free(upstream, response)))),
            (None, _) => Next::fail(Failure::OutcomeUnknown { retry_after_ms: 1_000 }),
        }
    }
}
