//! Why a request was not done, by who must act.

use alloc::string::String;

/// Path of a field in a request.
pub type Field = &'static str;

/// In a recorded state it is a text. It is leaked: there are few, in a program that replays and ends.
fn field<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Field, D::Error> {
    <String as serde::Deserialize>::deserialize(from).map(|text| &*text.leak())
}

/// Each variant says whether the request was applied, and what the caller does next. The shell
/// turns it into a status in one table; [`Failure::code`] is the stable name.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Failure {
    /// The caller's fault, certainly not applied: mend `field` and send again.
    Invalid {
        #[serde(deserialize_with = "field")]
        field: Field,
        detail: String,
    },
    /// There is no such job (or it is another tenant's).
    UnknownJob,
    /// There is no such group (or it is another tenant's).
    UnknownGroup,
    /// The group's next child has index `expected`: send from there on.
    WrongOffset { expected: u32 },
    /// The child with this index was created with another body.
    ChildDiffers { index: u32 },
    /// The group takes no more children: it is sealed, stopped or final.
    NotOpen,
    /// The group is not final: it has no result yet.
    NotFinal,
    /// There is no such pool.
    UnknownPool,
    /// Somebody holds or waits for a slot of the pool: it is not deleted.
    PoolInUse,
    /// No slot was free in time: `position` 1 is next. A repeat with the same slot id within five seconds keeps
    /// its place.
    PoolFull { position: u64, estimated_wait_ms: u64, retry_after_ms: u64 },
    /// The slot's time had come, or it was given back: stop what it was held for.
    SlotLost,
    /// The work must stay on the premises, and none of the queue's routes leads to an upstream there.
    NoPlacement,
    /// There is no such upstream in this server's configuration.
    UnknownUpstream,
    /// There is no such queue.
    UnknownQueue,
    /// The idempotency key is not bound to anything.
    UnknownKey,
    /// The cursor was not given out by this call.
    BadCursor,
    /// The idempotency key names a job with another body: use another key.
    KeyReused,
    /// The job has no result: it has not succeeded.
    NoResult,
    /// The payload is gone: its retention has ended, or it was lost.
    NoPayload,
    /// The token is not the job's present one: stop working on the job.
    LeaseLost,
    /// The job was cancelled under this lease: stop working on the job.
    JobCancelled,
    /// The job has ended already, otherwise than asked.
    AlreadyTerminal,
    /// Only dead, cancelled and expired jobs whose payload is still there can be retried.
    NotRetryable,
    /// Only ended jobs can be deleted: cancel it first.
    NotTerminal,
    /// The job's record cannot be read; an operator must look.
    Quarantined,
    /// Too much is in work here: certainly not applied; again after `retry_after_ms`.
    MailboxFull { retry_after_ms: u64 },
    /// The store cannot be reached: certainly not applied; again after `retry_after_ms`.
    StoreUnavailable { retry_after_ms: u64 },
    /// May have been applied: repeat with the same key, token or claim id.
    OutcomeUnknown { retry_after_ms: u64 },
    /// The store has no room for more: certainly not applied.
    StoreFull { retry_after_ms: u64 },
    /// This replica is going away: certainly not applied; ask another one.
    Draining { retry_after_ms: u64 },
    /// The store holds records of a newer release: this replica claims nothing. Upgrade it.
    NewerFormat { retry_after_ms: u64 },
    /// Lost every race against other requests for the same thing: certainly not applied.
    Contended { retry_after_ms: u64 },
}

impl Failure {
    /// The stable code of API.md.
    pub fn code(&self) -> &'static str {
        match self {
            Failure::Invalid { .. } => "invalid_field",
            Failure::UnknownJob => "unknown_job",
            Failure::UnknownGroup => "unknown_group",
            Failure::WrongOffset { .. } => "wrong_offset",
            Failure::ChildDiffers { .. } => "child_differs",
            Failure::NotOpen => "not_open",
            Failure::NotFinal => "not_final",
            Failure::UnknownPool => "unknown_pool",
            Failure::PoolInUse => "pool_in_use",
            Failure::PoolFull { .. } => "pool_full",
            Failure::SlotLost => "slot_lost",
            Failure::NoPlacement => "no_placement",
            Failure::UnknownUpstream => "unknown_upstream",
            Failure::UnknownQueue => "unknown_queue",
            Failure::UnknownKey => "unknown_key",
            Failure::BadCursor => "bad_cursor",
            Failure::KeyReused => "idempotency_key_reused",
            Failure::NoResult => "no_result",
            Failure::NoPayload => "no_payload",
            Failure::LeaseLost => "lease_lost",
            Failure::JobCancelled => "job_cancelled",
            Failure::AlreadyTerminal => "already_terminal",
            Failure::NotRetryable => "not_retryable",
            Failure::NotTerminal => "not_terminal",
            Failure::Quarantined => "quarantined",
            Failure::MailboxFull { .. } => "mailbox_full",
            Failure::StoreUnavailable { .. } => "store_unavailable",
            Failure::OutcomeUnknown { .. } => "outcome_unknown",
            Failure::StoreFull { .. } => "store_full",
            Failure::Draining { .. } => "draining",
            Failure::NewerFormat { .. } => "newer_format",
            Failure::Contended { .. } => "contended",
        }
    }

    pub fn retry_after_ms(&self) -> Option<u64> {
        match self {
            Failure::PoolFull { retry_after_ms, .. }
            | Failure::MailboxFull { retry_after_ms }
            | Failure::StoreUnavailable { retry_after_ms }
            | Failure::OutcomeUnknown { retry_after_ms }
            | Failure::StoreFull { retry_after_ms }
            | Failure::Draining { retry_after_ms }
            | Failure::NewerFormat { retry_after_ms }
            | Failure::Contended { retry_after_ms } => Some(*retry_after_ms),
            _ => None,
        }
    }

    /// Whether the request certainly changed nothing.
    pub fn certain(&self) -> bool {
        !matches!(self, Failure::OutcomeUnknown { .. })
    }
}
