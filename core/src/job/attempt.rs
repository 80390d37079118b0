//! How an attempt ends without ending well: failed, timed out, lapsed, released.

use alloc::string::String;
use alloc::vec::Vec;

use super::lease::{self, Granted};
use super::moves::{self, Ending, Home, add, put, put_job};
use super::record::{AttemptEnd, AttemptRecord, ErrorInfo, History, Job, Status};
use super::retry;
use crate::codec;
use crate::event::Kind;
use crate::ids::JobId;
use crate::limits;
use crate::replica::task::{Cx, Draft};
use crate::store::{Clock, Expiry, Guard, Record, ScoreAt, Version, Write, keys};

/// A running job as read.
pub(crate) struct Running<'a> {
    pub id: JobId,
    pub job: &'a Job,
    pub version: Version,
    /// `None`: the lease's record has vanished.
    pub granted: Option<&'a Granted>,
    pub history: History,
}

/// What ended the attempt.
pub(crate) struct Cause {
    pub end: AttemptEnd,
    pub error: Option<ErrorInfo>,
    pub retryable: bool,
    /// Instead of the policy's back-off.
    pub retry_in_ms: Option<u64>,
}

impl Cause {
    pub fn of(end: AttemptEnd) -> Cause {
        Cause { end, error: None, retryable: true, retry_in_ms: None }
    }
}

/// What was decided: the answer to whoever asked is the same as what is recorded.
#[derive(Clone, Debug)]
pub(crate) struct Decision {
    pub drafts: Vec<Draft>,
    pub own: Version,
    pub status: Status,
    pub run_at: Option<Clock>,
}

/// Ends the attempt: the job is queued again in its old place, waits for its back-off, or is dead.
pub(crate) fn end(running: Running<'_>, cause: &Cause, clock: Clock, guards: Vec<Guard>, cx: &mut Cx<'_>) -> Decision {
    let Running { id, job, version, granted, mut history } = running;
    let own = cx.make.version();
    let home = Home::from(job);
    let member = keys::member(id);
    let attempts = job.attempts.saturating_add(u32::from(cause.end.counts()));
    let deliveries = job.deliveries.saturating_add(1);
    let mut record: AttemptRecord = lease::attempt(job, granted, cause.end, clock, cause.error.clone());

    // A lapse counts and goes back to its old place; a failure or a deadline counts and backs off.
    let backs_off = matches!(cause.end, AttemptEnd::Failed | AttemptEnd::TimedOut);
    let run_at = backs_off.then(|| {
        let ms = cause.retry_in_ms.unwrap_or_else(|| retry::jittered_ms(&job.policy.backoff, attempts, cx.make));
        clock.saturating_add(ms.saturating_mul(limits::MILLI)).min(crate::store::SCORE_MAX)
    });
    let over = if !cause.retryable {
        Some("not_retryable")
    } else if retry::too_old(job, run_at.unwrap_or(clock)) {
        Some("max_age")
    } else {
        retry::exhausted(job, attempts, deliveries)
    };
    if let Some(over) = over {
        // For a poison job the last attempt's end says more than the number of attempts does.
        let reason = match cause.end {
            AttemptEnd::LeaseExpired | AttemptEnd::TimedOut if over == "max_attempts" => cause.end.text(),
            _ => over,
        };
        let ending = Ending {
            status: Status::Dead,
            reason: Some(String::from(reason)),
            result_len: None,
            attempt: Some(record),
            attempts,
            deliveries,
        };
        let mut leave = moves::leave_running(id, home, granted);
        if matches!(cause.end, AttemptEnd::LeaseExpired | AttemptEnd::TimedOut) {
            let worker = moves::worker_of(granted.map(|g| &g.lease));
            leave.push(home.event(kind(cause.end), id, Some(&worker), None));
        }
        let drafts = moves::end(id, job, version, own, clock, &ending, guards, leave, cx);
        return Decision { drafts, own, status: Status::Dead, run_at: None };
    }

    record.run_at = run_at;
    let worker = record.worker.clone();
    history.push(record);
    let mut next = job.clone();
    next.attempts = attempts;
    next.deliveries = deliveries;
    next.trail = job.trail.after(version);
    let status = if let Some(at) = run_at {
        next.due = at;
        Status::Retrying
    } else {
        Status::Queued
    };
    let mut writes = moves::leave_running(id, home, granted);
    writes.push(put_job(id, &next, own));
    writes.push(put(keys::history(id), own, codec::encode(&history), Expiry::Never));
    match run_at {
        // A number, so that reply and record agree.
        Some(at) => {
            writes.push(add(home.index(Status::Retrying), &member, ScoreAt::Number(at)));
            writes.push(add(keys::DUE, &member, ScoreAt::Number(at)));
            writes.push(Write::Notify(keys::TOPIC_DUE));
        }
        None => {
            let old = home.index(Status::Running);
            writes.push(add(home.index(Status::Queued), &member, ScoreAt::Of(old)));
            writes.push(Write::Notify(home.topic()));
        }
    }
    writes.push(home.event(kind(cause.end), id, Some(&worker), None));
    let mut guards = guards;
    guards.push(Guard::At(keys::job(id), version));
    Decision { drafts: alloc::vec![Draft::new(guards, writes)], own, status, run_at }
}

fn kind(end: AttemptEnd) -> Kind {
    match end {
        AttemptEnd::LeaseExpired => Kind::LeaseExpired,
        AttemptEnd::TimedOut => Kind::TimedOut,
        AttemptEnd::Released => Kind::Released,
        AttemptEnd::Failed | AttemptEnd::Succeeded | AttemptEnd::Cancelled | AttemptEnd::Expired => Kind::Retrying,
    }
}

/// What happens to a lease that is reclaimed at this clock: it timed out if a deadline of its own has
/// come, else it lapsed.
pub(crate) fn reclaimed(job: &Job, granted: Option<&Granted>, progress: &Record, clock: Clock) -> AttemptEnd {
    let Some(granted) = granted else { return AttemptEnd::LeaseExpired };
    match lease::deadline(job, granted.at, lease::heard(progress, granted)) {
        Some(deadline) if clock >= deadline => AttemptEnd::TimedOut,
        _ => AttemptEnd::LeaseExpired,
    }
}
