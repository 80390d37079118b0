//! A lease: what a claim grants, how far it may be extended, and who may use it.
//!
//! **A lease ends when it is reclaimed.** Its score in `leases` only says from when that is allowed;
//! until then its holder may renew, complete, fail or release it.

use super::record::{AttemptEnd, AttemptRecord, ErrorInfo, Job, Lease, ProgressRecord, Terms};
use crate::ids::Token;
use crate::limits::MILLI;
use crate::replica::task::decode_record;
use crate::store::{Clock, Record, Version};

/// A lease as read, with its version and the clock of its grant.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct Granted {
    pub lease: Lease,
    pub version: Version,
    pub at: Clock,
}

impl Granted {
    /// `None` when there is no lease, or none that can be read.
    pub fn read(record: &Record) -> Option<Granted> {
        let (version, lease) = decode_record::<Lease>(record).ok()??;
        Some(Granted { lease, version, at: record.at()? })
    }

    pub fn token(&self) -> Token {
        Token { at: self.at, nonce: self.version }
    }
}

/// Proof that a token was compared with the lease as read. Only [`present`] makes one.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct CurrentToken {
    pub granted: Granted,
}

/// stale-token-refused: a paused worker can wake up after its lease moved, so equality is all that
/// counts; the transaction is then guarded by the lease's version.
pub(crate) fn present(token: Option<Token>, record: &Record) -> Option<CurrentToken> {
    let granted = Granted::read(record)?;
    (token == Some(granted.token())).then_some(CurrentToken { granted })
}

/// How long the lease is extended by: the claim's length, else the job's own, else the queue's.
pub(crate) fn length(lease: &Lease, job: &Job) -> u64 {
    let ms = match job.policy.lease_ms {
        Some(own) if lease.terms == Terms::Standard => own,
        _ => lease.length_ms,
    };
    ms.saturating_mul(MILLI)
}

/// The progress record, if it was reported under that lease. One without a value only says that the
/// lease's end has been set.
pub(crate) fn progress_of(record: &Record, lease: Version) -> Option<(ProgressRecord, Clock)> {
    let (_, progress) = decode_record::<ProgressRecord>(record).ok()??;
    (progress.lease == lease).then_some((progress, record.at()?))
}

/// When the attempt last reported progress, or its grant.
pub(crate) fn heard(record: &Record, granted: &Granted) -> Clock {
    match progress_of(record, granted.version) {
        Some((progress, at)) if !progress.value.is_empty() => at,
        _ => granted.at,
    }
}

fn after(from: Clock, ms: Option<u64>) -> Option<Clock> {
    ms.map(|ms| from.saturating_add(ms.saturating_mul(MILLI)))
}

/// When the attempt must be over whatever it reports.
pub(crate) fn run_deadline(job: &Job, granted_at: Clock) -> Option<Clock> {
    after(granted_at, job.policy.run_timeout_ms)
}

/// When the attempt must be over, by its run and progress deadlines. `heard` is when it last
/// reported progress, or the grant.
pub(crate) fn deadline(job: &Job, granted_at: Clock, heard: Clock) -> Option<Clock> {
    let progress = after(heard, job.policy.progress_timeout_ms);
    [run_deadline(job, granted_at), progress].into_iter().flatten().min()
}

/// The record of an attempt that ends now.
pub(crate) fn attempt(
    job: &Job,
    granted: Option<&Granted>,
    outcome: AttemptEnd,
    clock: Clock,
    error: Option<ErrorInfo>,
) -> AttemptRecord {
    AttemptRecord {
        delivery: job.deliveries.saturating_add(1),
        token: granted.map_or(Token { at: 0, nonce: Version(0) }, Granted::token),
        worker: super::moves::worker_of(granted.map(|g| &g.lease)),
        ended: clock,
        outcome,
        error,
        run_at: None,
    }
}
