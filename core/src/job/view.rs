//! A job as its owner sees it, put together from what was read.

use alloc::vec::Vec;

use super::record::{AttemptEnd, History, Job, Lease, ProgressRecord, Status};
use crate::ids::JobId;
use crate::opaque::Opaque;
use crate::request::{JobView, LeaseView, Progress};
use crate::store::Clock;

/// The view without lease, history and progress.
pub(crate) fn view(id: JobId, job: &Job, status: Status) -> JobView {
    JobView {
        id,
        queue: job.queue.clone(),
        class: job.class,
        status,
        attempt: job.attempts,
        max_attempts: job.policy.max_attempts,
        deliveries: job.deliveries,
        created_at: job.submitted,
        run_at: job.due,
        ended_at: job.end.as_ref().map(|e| e.at),
        reason: job.end.as_ref().and_then(|e| e.reason.clone()),
        attempts: job.end.as_ref().and_then(|e| e.attempt.clone()).into_iter().collect(),
        attempts_omitted: 0,
        progress: None,
        lease: None,
        position: None,
        key: job.key.as_ref().map(|k| k.0.clone()),
        payload_len: job.payload_len,
        metadata: job.metadata.clone().map(Opaque::new),
        traceparent: job.traceparent.clone(),
    }
}

pub(crate) fn with_history(mut view: JobView, history: Option<History>) -> JobView {
    if let Some(history) = history {
        let last = core::mem::take(&mut view.attempts);
        view.attempts_omitted = history.omitted;
        view.attempts = history.attempts;
        // The attempt that ended the job is in its main record only.
        let fresh: Vec<_> = last.into_iter().filter(|l| view.attempts.iter().all(|a| a.token != l.token)).collect();
        view.attempts.extend(fresh);
    }
    view
}

pub(crate) fn with_lease(mut view: JobView, lease: Option<(Lease, Clock)>, end: Option<Clock>) -> JobView {
    view.attempt = view.attempt.saturating_add(1);
    view.deliveries = view.deliveries.saturating_add(1);
    if let Some((lease, granted_at)) = lease {
        let length = lease.length_ms.saturating_mul(crate::limits::MILLI);
        let expires_at = end.unwrap_or(granted_at.saturating_add(length));
        view.lease = Some(LeaseView { worker: lease.worker, granted_at, expires_at });
    }
    view
}

pub(crate) fn progress(record: ProgressRecord, at: Clock) -> Progress {
    Progress { value: Opaque::new(record.value), seq: record.seq, at }
}

/// Whether an attempt's end was one that a late call with its token is told about as cancelled.
pub(crate) fn cancelled_under(job: &Job, token: crate::ids::Token) -> bool {
    ended_by(job, token) == Some(AttemptEnd::Cancelled)
}

/// How the attempt with this token ended, if it is the one that ended the job.
pub(crate) fn ended_by(job: &Job, token: crate::ids::Token) -> Option<AttemptEnd> {
    let attempt = job.end.as_ref()?.attempt.as_ref()?;
    (attempt.token == token).then_some(attempt.outcome)
}
