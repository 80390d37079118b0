//! What is stored of a job.
//!
//! **A live job's position is never in its main record**: its status is the one status index it
//! stands in. The main record is written at submit, when an attempt ends, and at the end of the job.

use alloc::string::String;
use alloc::vec::Vec;
use bytes::Bytes;

use crate::codec::{self, Undecodable};
use crate::ids::{GroupId, JobId, Token};
use crate::limits;
use crate::opaque::{Content, Form, Opaque};
use crate::store::{Clock, Version};

/// Order of claiming within a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub enum Class {
    Interactive,
    System,
    Batch,
}

impl Class {
    /// Highest first.
    pub const ALL: [Class; 3] = [Class::Interactive, Class::System, Class::Batch];

    pub fn text(self) -> &'static str {
        match self {
            Class::Interactive => "interactive",
            Class::System => "system",
            Class::Batch => "batch",
        }
    }

    pub fn parse(text: &str) -> Option<Class> {
        Class::ALL.into_iter().find(|c| c.text() == text)
    }
}

/// Where a job stands. See the diagram in `job`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub enum Status {
    Scheduled,
    Held,
    Queued,
    Running,
    Retrying,
    Succeeded,
    Dead,
    Cancelled,
    Expired,
}

impl Status {
    pub const ALL: [Status; 9] = [
        Status::Scheduled,
        Status::Held,
        Status::Queued,
        Status::Running,
        Status::Retrying,
        Status::Succeeded,
        Status::Dead,
        Status::Cancelled,
        Status::Expired,
    ];
    pub const LIVE: [Status; 5] = [Status::Scheduled, Status::Held, Status::Queued, Status::Running, Status::Retrying];
    pub const TERMINAL: [Status; 4] = [Status::Succeeded, Status::Dead, Status::Cancelled, Status::Expired];

    pub fn text(self) -> &'static str {
        match self {
            Status::Scheduled => "scheduled",
            Status::Held => "held",
            Status::Queued => "queued",
            Status::Running => "running",
            Status::Retrying => "retrying",
            Status::Succeeded => "succeeded",
            Status::Dead => "dead",
            Status::Cancelled => "cancelled",
            Status::Expired => "expired",
        }
    }

    pub fn parse(text: &str) -> Option<Status> {
        Status::ALL.into_iter().find(|s| s.text() == text)
    }

    pub fn is_terminal(self) -> bool {
        matches!(self, Status::Succeeded | Status::Dead | Status::Cancelled | Status::Expired)
    }
}

/// How a child of a group ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub enum ChildOutcome {
    Succeeded,
    Dead,
    Cancelled,
    Expired,
    /// Its record vanished or cannot be read.
    Lost,
}

impl ChildOutcome {
    pub const ALL: [ChildOutcome; 5] = [
        ChildOutcome::Succeeded,
        ChildOutcome::Dead,
        ChildOutcome::Cancelled,
        ChildOutcome::Expired,
        ChildOutcome::Lost,
    ];

    pub fn text(self) -> &'static str {
        match self {
            ChildOutcome::Succeeded => "succeeded",
            ChildOutcome::Dead => "dead",
            ChildOutcome::Cancelled => "cancelled",
            ChildOutcome::Expired => "expired",
            ChildOutcome::Lost => "lost",
        }
    }

    /// The outcome of a job that ended with this status; `None` for one that has not ended.
    pub fn of(status: Status) -> Option<ChildOutcome> {
        match status {
            Status::Succeeded => Some(ChildOutcome::Succeeded),
            Status::Dead => Some(ChildOutcome::Dead),
            Status::Cancelled => Some(ChildOutcome::Cancelled),
            Status::Expired => Some(ChildOutcome::Expired),
            Status::Scheduled | Status::Held | Status::Queued | Status::Running | Status::Retrying => None,
        }
    }
}

/// Delay after the n-th failure: min(base · factorⁿ⁻¹, max) · (1 + U[0, jitter]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Backoff {
    pub base_ms: u64,
    pub max_ms: u64,
    /// Thousandths: 2_000 doubles.
    pub factor_milli: u32,
    /// Thousandths: 200 adds up to a fifth.
    pub jitter_milli: u32,
}

impl Default for Backoff {
    fn default() -> Self {
        Backoff {
            base_ms: limits::BACKOFF_BASE_MS,
            max_ms: limits::BACKOFF_MAX_MS,
            factor_milli: 2_000,
            jitter_milli: 200,
        }
    }
}

/// A job's own rules, defaults filled in. Durations in milliseconds.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Policy {
    pub max_attempts: u32,
    pub max_deliveries: u32,
    pub max_age_ms: Option<u64>,
    pub lease_ms: Option<u64>,
    pub run_timeout_ms: Option<u64>,
    pub progress_timeout_ms: Option<u64>,
    pub queue_ttl_ms: Option<u64>,
    pub retention_ms: u64,
    /// `None`: as long as the retention.
    pub key_ttl_ms: Option<u64>,
    pub backoff: Backoff,
    pub on_prem: bool,
    pub cost: u32,
}

impl Policy {
    /// The defaults of the contract, with the server's retention.
    pub fn standard(retention_ms: u64) -> Policy {
        Policy {
            max_attempts: limits::MAX_ATTEMPTS,
            max_deliveries: limits::MAX_ATTEMPTS + limits::EXTRA_DELIVERIES,
            max_age_ms: None,
            lease_ms: None,
            run_timeout_ms: None,
            progress_timeout_ms: None,
            queue_ttl_ms: None,
            retention_ms,
            key_ttl_ms: None,
            backoff: Backoff::default(),
            on_prem: false,
            cost: 1,
        }
    }
}

/// The record `job/{id}`.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Job {
    pub tenant: String,
    pub queue: String,
    pub class: Class,
    pub policy: Policy,
    /// The idempotency key it is bound to, with the version of the key's record.
    pub key: Option<(String, Version)>,
    /// When this life began: the submit or the operator's retry.
    pub born: Clock,
    pub submitted: Clock,
    /// When it became, or becomes, due for the first time or after its last failure.
    pub due: Clock,
    /// Counted attempts that have ended in this life.
    pub attempts: u32,
    /// Claims that have ended in this life.
    pub deliveries: u32,
    /// Operator's retries so far.
    pub lives: u32,
    pub end: Option<End>,
    /// Deleted: nothing but a stub that refuses what was stuck on the way.
    pub deleted: bool,
    pub payload_len: u64,
    pub metadata: Option<Vec<u8>>,
    pub traceparent: Option<String>,
    /// The versions before the record's own, newest first, at most three.
    pub trail: Trail,
}

/// How and when a life ended.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct End {
    pub status: Status,
    pub at: Clock,
    /// Why, for jobs that are dead.
    pub reason: Option<String>,
    /// Bytes of the result, if one was given.
    pub result_len: Option<u64>,
    /// The attempt that ended it, if one was under way: with the token that gets the same answer.
    pub attempt: Option<AttemptRecord>,
}

/// How one attempt ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub enum AttemptEnd {
    Succeeded,
    Failed,
    LeaseExpired,
    TimedOut,
    Released,
    Cancelled,
    Expired,
}

impl AttemptEnd {
    pub fn text(self) -> &'static str {
        match self {
            AttemptEnd::Succeeded => "succeeded",
            AttemptEnd::Failed => "failed",
            AttemptEnd::LeaseExpired => "lease_expired",
            AttemptEnd::TimedOut => "timed_out",
            AttemptEnd::Released => "released",
            AttemptEnd::Cancelled => "cancelled",
            AttemptEnd::Expired => "expired",
        }
    }

    /// Whether it counts towards `max_attempts`.
    pub fn counts(self) -> bool {
        matches!(self, AttemptEnd::Succeeded | AttemptEnd::Failed | AttemptEnd::LeaseExpired | AttemptEnd::TimedOut)
    }
}

/// One claim that has ended.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct AttemptRecord {
    /// Number of the claim in this life, from 1.
    pub delivery: u32,
    pub token: Token,
    pub worker: String,
    pub ended: Clock,
    pub outcome: AttemptEnd,
    pub error: Option<ErrorInfo>,
    /// When the job is tried again, if a failure decided that.
    pub run_at: Option<Clock>,
}

/// An error as kept: cut to [`limits::ERROR_BYTES`] in all.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct ErrorInfo {
    pub message: String,
    pub kind: Option<String>,
    pub detail: Option<String>,
}

impl ErrorInfo {
    /// Cuts to the bound, at character boundaries: the type first, then message, then detail.
    pub fn cut(mut self) -> Self {
        let mut room = limits::ERROR_BYTES;
        let mut cut = |text: &mut String, most: usize| {
            let mut end = text.len().min(most).min(room);
            while !text.is_char_boundary(end) {
                end -= 1;
            }
            text.truncate(end);
            room -= end;
        };
        if let Some(kind) = &mut self.kind {
            cut(kind, limits::NAME_BYTES);
        }
        cut(&mut self.message, limits::ERROR_BYTES);
        if let Some(detail) = &mut self.detail {
            cut(detail, limits::ERROR_BYTES);
        }
        self
    }
}

/// Earlier versions of a main record, newest first: the evidence by which an unknown outcome is
/// settled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Trail([Option<Version>; 3]);

impl Trail {
    /// The trail of the record that replaces one of version `current` with this trail.
    pub fn after(self, current: Version) -> Trail {
        let [a, b, _] = self.0;
        Trail([Some(current), a, b])
    }

    pub fn iter(self) -> impl Iterator<Item = Version> {
        self.0.into_iter().flatten()
    }
}

/// The record `history/{id}`.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct History {
    /// The first [`limits::HISTORY_FIRST`], then the last [`limits::HISTORY_LAST`].
    pub attempts: Vec<AttemptRecord>,
    /// Those left out between them.
    pub omitted: u32,
}

impl History {
    pub fn push(&mut self, attempt: AttemptRecord) {
        self.attempts.push(attempt);
        if self.attempts.len() > limits::HISTORY_FIRST + limits::HISTORY_LAST {
            self.attempts.remove(limits::HISTORY_FIRST);
            self.omitted = self.omitted.saturating_add(1);
        }
    }

    pub fn by_token(&self, token: Token) -> Option<&AttemptRecord> {
        self.attempts.iter().rev().find(|a| a.token == token)
    }
}

/// The record `lease/{id}`: put by the claim's take, the same bytes for every job of one source.
/// Its version is the claim's nonce; its clock is the grant.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Lease {
    pub worker: String,
    pub tenant: String,
    pub queue: String,
    pub class: Class,
    pub length_ms: u64,
    pub terms: Terms,
}

/// How a lease was made. The first two are encoded as a truth value was before there was a third.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Terms {
    /// With the queue's length: the job's own replaces it.
    Standard,
    /// The claim asked for this length: the job's own does not replace it.
    Asked,
    /// By name, for the server itself to run it, with a slot of its upstream's pool. The length is the job's.
    Dispatched(Placed),
}

/// Where a server runs a job, and what it holds for that as long as the lease stands.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Placed {
    pub upstream: String,
    /// Whose slots it has, if the upstream has a pool …
    pub pool: Option<String>,
    /// … and how many.
    pub cost: u32,
    /// It is tried on the upstream after a hold.
    pub probe: bool,
}

impl Lease {
    /// Where it is being run, if a server runs it.
    pub fn placed(&self) -> Option<&Placed> {
        match &self.terms {
            Terms::Standard | Terms::Asked => None,
            Terms::Dispatched(placed) => Some(placed),
        }
    }
}

/// The record `progress/{id}`.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct ProgressRecord {
    /// The lease under which it was reported.
    pub lease: Version,
    pub seq: Option<u64>,
    pub value: Vec<u8>,
}

/// Whom an idempotency key names: jobs and groups share one key space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Owner {
    Job(JobId),
    Group(GroupId),
}

impl Owner {
    pub fn job(self) -> Option<JobId> {
        match self {
            Owner::Job(id) => Some(id),
            Owner::Group(_) => None,
        }
    }
}

/// The record `key/{tenant}/{key}`; bound while it is there.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct KeyRecord {
    pub owner: Owner,
    pub fingerprint: u128,
}

/// The record `queue/{tenant}/{queue}`: always put, never plainly deleted while the name is known.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct QueueRecord {
    pub paused: bool,
    pub reason: Option<String>,
    pub lease_ms: Option<u64>,
    pub trail: Trail,
}

/// Encodes a payload or result with its form.
pub fn encode_content(content: &Content) -> Bytes {
    codec::encode_with(&content.form, &content.data.bytes)
}

/// Undoes [`encode_content`] without copying the content.
pub fn decode_content(bytes: &Bytes) -> Result<Content, Undecodable> {
    let (form, tail) = codec::decode_with::<Form>(bytes)?;
    Ok(Content { form, data: Opaque::new(bytes.slice_ref(tail)) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_huge_error_is_cut_to_its_bound() {
        let huge = ErrorInfo { message: "é".repeat(5_000_000), kind: Some("k".repeat(500)), detail: Some("d".into()) };
        let cut = huge.cut();
        assert_eq!(cut.kind.as_deref(), Some("k".repeat(128).as_str()));
        assert_eq!(cut.message.len(), 4096 - 128);
        assert_eq!(cut.detail.as_deref(), Some(""));
    }

    #[test]
    fn history_keeps_first_and_last() {
        let mut h = History::default();
        for n in 1..=1_000u32 {
            h.push(AttemptRecord {
                delivery: n,
                token: Token { at: n.into(), nonce: Version(1) },
                worker: String::new(),
                ended: 0,
                outcome: AttemptEnd::Failed,
                error: None,
                run_at: None,
            });
        }
        let kept: Vec<u32> = h.attempts.iter().map(|a| a.delivery).collect();
        assert_eq!(kept, (1..=5).chain(981..=1_000).collect::<Vec<_>>());
        assert_eq!(h.omitted, 975);
    }
}
