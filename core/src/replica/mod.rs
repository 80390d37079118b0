//! One server process as a state machine.

mod batch;
mod breaker;
mod clock;
mod op;
mod polls;
mod replies;
mod requests;
mod step;
pub(crate) mod task;
mod timers;

use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::vec::Vec;

pub(crate) use op::Op;
pub use step::Replica;

use crate::dispatch::Routing;
use crate::name::Name;
use crate::pool::open::FailOpen;
use crate::request::{Outcome, Request, RequestId};
use crate::store::{Commit, CommitReply, Read, Snapshot, StoreError};

/// Milliseconds since this replica started, by a clock that only goes forward. Absolute time is the
/// store's: its clock as last seen plus what has elapsed since. **A replica's wall clock is never
/// consulted.**
pub type Now = u64;

/// Names one call to the store; its reply carries the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
pub struct StoreId(pub u64);

/// What a shell tells the replica.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Input {
    Request {
        id: RequestId,
        request: Request,
    },
    /// The asker has gone: no reply is wanted any more. What was sent may still be applied.
    Cancelled {
        id: RequestId,
    },
    StoreReply {
        id: StoreId,
        reply: Result<StoreAnswer, StoreError>,
    },
    /// Somebody's commit notified this topic. Best effort: one may be lost or come twice.
    Notified {
        topic: Name,
    },
    /// The time that [`Replica::next_timer`] named has come. Harmless at any other time.
    Timer,
}

#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum StoreAnswer {
    Read(Snapshot),
    Commit(CommitReply),
}

#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum StoreOp {
    Read(Read),
    Commit(Commit),
}

/// What the replica wants done. **The order of the outputs of one step means nothing.**
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Output {
    Store {
        id: StoreId,
        op: StoreOp,
    },
    /// Each request is answered exactly once, unless it was cancelled.
    Reply {
        id: RequestId,
        outcome: Outcome,
    },
    /// Something rare that a log should tell and a simulator should reach.
    Mark(Mark),
}

pub type Outputs = Vec<Output>;

/// A rare branch: logged, counted, and to be reached by the simulator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub enum Mark {
    BreakerOpened,
    BreakerClosed,
    /// The store's reply came after its time-out, or twice.
    LateReply,
    /// A commit's outcome is unknown: it is sent again.
    CommitUnknown,
    /// An unknown outcome was settled from evidence: it had been applied.
    SettledApplied,
    /// … it had certainly not been applied.
    SettledNotApplied,
    /// … and could not be.
    SettledUnknown,
    /// A transaction lost a race and was decided anew.
    RaceLost,
    LeaseLapsed,
    RunTimedOut,
    JobLost,
    JobReindexed,
    JobQuarantined,
    NewerFormat,
    GhostRemoved,
    /// A claim needed a second commit for jobs that differ.
    ClaimExceptions,
    /// A claim's receipt answered its repeat.
    ClaimRepeated,
    /// The asker went away after jobs were taken: they were put back.
    ClaimUndone,
    MailboxFull,
    /// A slot was granted without the store.
    SlotDeclared,
    KeyTakenOver,
    GroupStopped,
    GroupFinalized,
    GroupRemoved,
}

/// What differs between deployments.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Config {
    /// Requests in work at once.
    pub mailbox: usize,
    /// Bytes of payloads and results in work at once.
    pub mailbox_bytes: usize,
    /// Commits under way at once, for each of growing and not growing.
    pub commits: usize,
    /// Reads under way at once.
    pub reads: usize,
    /// Transactions in one commit.
    pub commit_txns: usize,
    /// Between two looks at the deadlines.
    pub sweep_ms: u64,
    /// Between two pages of the scrub; 0 turns it off.
    pub scrub_ms: u64,
    /// A job's retention, unless it says otherwise.
    pub retention_ms: u64,
    /// A queue's lease length, unless it or the claim says otherwise.
    pub lease_ms: u64,
    /// The shard served; this release has only 0.
    pub shard: u8,
    /// Upstreams and routes.
    pub routing: Routing,
    /// Pools to which this replica admits some by itself while the store cannot be reached.
    pub fail_open: BTreeMap<String, FailOpen>,
}

impl Default for Config {
    fn default() -> Self {
        use crate::limits as l;
        Config {
            mailbox: l::MAILBOX,
            mailbox_bytes: l::MAILBOX_BYTES,
            commits: 2,
            reads: 2,
            commit_txns: l::COMMIT_TXNS,
            sweep_ms: l::SWEEP_MS,
            scrub_ms: 1_000,
            retention_ms: l::RETENTION_MS,
            lease_ms: l::LEASE_MS,
            shard: crate::ids::SHARD,
            routing: Routing::default(),
            fail_open: BTreeMap::new(),
        }
    }
}

/// Counts since the replica started, and gauges of now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Stats {
    pub submitted: u64,
    pub submits_repeated: u64,
    pub claims: u64,
    pub claims_empty: u64,
    pub claimed: u64,
    pub heartbeats: u64,
    pub completed: u64,
    pub failed: u64,
    pub released: u64,
    pub cancelled: u64,
    pub retried: u64,
    pub dead: u64,
    pub expired: u64,
    pub leases_lapsed: u64,
    pub timed_out: u64,
    pub promoted: u64,
    pub lost: u64,
    pub reindexed: u64,
    pub quarantined: u64,
    pub groups: u64,
    pub groups_finalized: u64,
    pub children_released: u64,
    pub slots_granted: u64,
    pub slots_refreshed: u64,
    pub slots_released: u64,
    /// Refreshed after their time had come.
    pub slots_lost: u64,
    /// Granted without the store …
    pub slots_declared: u64,
    /// … or not even so: the bound was reached.
    pub slots_declined: u64,
    /// Units that this replica has granted without the store and that may still be held.
    pub slots_open: u64,
    pub ghosts: u64,
    pub reads: u64,
    pub commits: u64,
    pub txns: u64,
    pub commits_unknown: u64,
    pub store_errors: u64,
    /// Requests refused because the store was full.
    pub refused_full: u64,
    /// Requests refused because the mailbox was full.
    pub refused_mailbox: u64,
    /// How long jobs had been due when they were handed out.
    pub waited: Durations,
    /// How long attempts ran that their workers completed or failed.
    pub ran: Durations,
    /// Gauges.
    pub in_work: u64,
    pub polls: u64,
    pub breaker_open: bool,
    pub newer_format: bool,
    pub draining: bool,
}

/// Times by the store's clock, counted by their length.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Durations {
    /// Those up to each of [`Durations::ENDS`] and past the one before it; last those above all.
    pub counts: [u64; Durations::ENDS.len() + 1],
    /// All together, microseconds.
    pub sum: u64,
}

impl Durations {
    /// Microseconds.
    pub const ENDS: [u64; 12] = {
        use crate::limits::{MILLI, MINUTE, SECOND};
        [
            5 * MILLI,
            25 * MILLI,
            100 * MILLI,
            500 * MILLI,
            SECOND,
            5 * SECOND,
            15 * SECOND,
            MINUTE,
            10 * MINUTE,
            60 * MINUTE,
            360 * MINUTE,
            1_440 * MINUTE,
        ]
    };

    pub(crate) fn count(&mut self, micros: u64) {
        let at = Self::ENDS.partition_point(|end| *end < micros);
        if let Some(count) = self.counts.get_mut(at) {
            *count += 1;
            self.sum = self.sum.saturating_add(micros);
        }
    }
}
