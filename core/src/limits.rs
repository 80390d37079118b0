//! Every bound, in one place. Relations between them are asserted at compile time.

/// One second in microseconds, the unit of clocks and scores.
pub const SECOND: u64 = 1_000_000;
/// One millisecond in microseconds.
pub const MILLI: u64 = 1_000;
/// One minute in microseconds.
pub const MINUTE: u64 = 60 * SECOND;

// --- what clients may ask -------------------------------------------------------------------

/// Names of queues, workers, tenants, keys, claim ids: bytes.
pub const NAME_BYTES: usize = 128;
/// Idempotency keys, bytes.
pub const KEY_BYTES: usize = 256;
/// `metadata`, bytes of JSON.
pub const METADATA_BYTES: usize = 4 * 1024;
/// `progress`, bytes of JSON.
pub const PROGRESS_BYTES: usize = 1024;
/// An error as kept: type, message and detail together; what is longer is cut.
pub const ERROR_BYTES: usize = 4 * 1024;
/// A payload or a result, bytes.
pub const PAYLOAD_BYTES: usize = 64 * 1024 * 1024;
/// A reason given for a pause, bytes.
pub const REASON_BYTES: usize = 256;
/// `content_type`, bytes.
pub const CONTENT_TYPE_BYTES: usize = 128;
/// Items in one batch call.
pub const BATCH_ITEMS: usize = 1_000;
/// Queues in one claim.
pub const CLAIM_QUEUES: usize = 32;
/// Jobs in one claim.
pub const CLAIM_JOBS: usize = 1_000;
/// The longest long poll.
pub const WAIT_MS: u64 = 60_000;
/// Payload in one claim's answer; further jobs come with their payload omitted.
pub const CLAIM_BYTES: usize = 64 * 1024 * 1024;
/// Jobs in one page of a list, default and largest.
pub const LIST_DEFAULT: usize = 100;
pub const LIST_MAX: usize = 1_000;
/// Counted attempts a policy may allow.
pub const ATTEMPTS_MAX: u32 = 1_000;
/// Deliveries a policy may allow.
pub const DELIVERIES_MAX: u32 = 10_000;
/// Children in one call.
pub const CHILDREN: usize = 1_000;
/// A group that is not sealed by then is stopped, unless it says otherwise.
pub const OPEN_TIMEOUT_MS: u64 = 3_600_000;
/// Children of one group.
pub const CHILDREN_MAX: u32 = 1_000_000;
/// Slots of one pool.
pub const POOL_TOTAL_MAX: u64 = 100_000;
/// What a job or a slot may cost of a pool.
pub const COST_MAX: u32 = 1_000;
/// Durations that a client may name: leases.
pub const LEASE_MS_MIN: u64 = 100;
pub const LEASE_MS_MAX: u64 = 24 * 3_600_000;
/// Durations that a client may name: delays, deadlines, retention.
pub const DURATION_MS_MAX: u64 = 400 * 24 * 3_600_000;

// --- defaults -------------------------------------------------------------------------------

pub const LEASE_MS: u64 = 30_000;
pub const MAX_ATTEMPTS: u32 = 3;
/// Deliveries that a job may have beyond its counted attempts (releases), unless it says otherwise.
pub const EXTRA_DELIVERIES: u32 = 100;
pub const RETENTION_MS: u64 = 24 * 3_600_000;
pub const BACKOFF_BASE_MS: u64 = 2_000;
pub const BACKOFF_MAX_MS: u64 = 3_600_000;

// --- history --------------------------------------------------------------------------------

/// Attempts kept in full: the first so many, and the last so many.
pub const HISTORY_FIRST: usize = 5;
pub const HISTORY_LAST: usize = 20;

// --- store traffic --------------------------------------------------------------------------

/// Budget of record bytes in one read's answer.
pub const READ_BYTES: usize = 8 * 1024 * 1024;
/// Bytes of one commit, unless a single transaction is larger.
pub const COMMIT_BYTES: usize = 8 * 1024 * 1024;
/// Transactions in one commit.
pub const COMMIT_TXNS: usize = 1_000;
/// Requests whose reads are sent as one.
pub const READ_TASKS: usize = 1_000;
/// A result above this makes its completion a commit that grows.
pub const RESULT_INLINE: usize = 64 * 1024;
/// How long a transaction may be applied after it was made, by the store's clock.
pub const VALID: u64 = 4 * SECOND;
/// A clock older than this is read anew before anything is committed, which bounds what a step of
/// the replica's own clock can add to a `valid_until`.
pub const CLOCK_FRESH_MS: u64 = 2_000;
/// A stub, receipt or ended main record lives at least this long: longer than any `valid_until`.
pub const STUB: u64 = 2 * MINUTE;
/// The receipt of a claim without an id of the client's.
pub const RECEIPT_OWN: u64 = 30 * SECOND;
/// A store that has not answered after this is taken to have lost the request or the reply.
pub const STORE_TIMEOUT_MS: u64 = 2_000;
/// A request is answered by then, come what may (long polls: after their wait).
pub const REQUEST_MS: u64 = 4_800;
/// Times that one request is decided anew after losing a race.
pub const RACES_MAX: u32 = 32;

// --- sweeps ---------------------------------------------------------------------------------

pub const SWEEP_MS: u64 = 1_000;
pub const SWEEP_LEASES: usize = 200;
pub const SWEEP_DUE: usize = 500;
pub const SWEEP_TTL: usize = 200;
pub const SWEEP_NAMES: usize = 20;
/// Groups that one look deals with.
pub const SWEEP_GROUPS: usize = 20;
/// Children of one group released, stopped or removed at once.
pub const SWEEP_CHILDREN: usize = 500;
pub const TRIM: usize = 500;
pub const SCRUB_KEYS: usize = 100;
/// A queue's name is looked at again so long after something was submitted to it.
pub const NAME_IDLE: u64 = MINUTE;
/// Longest wait before leases are reclaimed after an outage, and the wait after a start.
pub const GRACE_MS: u64 = 10_000;
/// Jobs that one call of purge ends or deletes.
pub const PURGE: usize = 200;
/// Pools that one look tidies.
pub const SWEEP_POOLS: usize = 20;
/// Waiters that nobody waits for any more, removed at once.
pub const SWEEP_WAITERS: usize = 100;
/// A pool is tidied so often.
pub const POOL_IDLE: u64 = MINUTE;
/// Names of queues read at once.
pub const QUEUES: usize = 1_000;

// --- waiting for a slot ---------------------------------------------------------------------

/// Whoever waits for a slot is given up after this, unless somebody still waits for it.
pub const WAITER: u64 = 5 * SECOND;
/// A waiter says that it is still there this often.
pub const WAITER_RENEW_MS: u64 = 2_000;
/// Waiters of one replica and class that try at once for the room that is left after a grant.
pub const WAITERS_WOKEN: u64 = 32;
/// A slot's record outlives the slot by this: longer than any `valid_until`.
pub const SLOT_KEPT: u64 = 30 * SECOND;
/// Pools whose holders' times are remembered.
pub const POOL_CACHE: usize = 1_024;
/// Holders of a pool that are shown.
pub const HOLDERS_SHOWN: usize = 100;

// --- upstreams ------------------------------------------------------------------------------

/// Upstreams that one request for jobs may name.
pub const DISPATCH_UPSTREAMS: usize = 32;
/// Heads of one queue and class that are looked at at once.
pub const DISPATCH_HEADS: usize = 32;
/// The longest hold that an upstream may ask for.
pub const HOLD_MS_MAX: u64 = 24 * 3_600_000;
/// A hold is forgotten so long after its time, although no call has succeeded.
pub const HOLD_KEPT: u64 = 60 * MINUTE;

// --- the replica ----------------------------------------------------------------------------

/// Requests in work at once; those that end an attempt may use as many again.
pub const MAILBOX: usize = 8_192;
/// Bytes of payload and result in work at once.
pub const MAILBOX_BYTES: usize = 256 * 1024 * 1024;
/// Long polls waiting at once.
pub const POLLS: usize = 20_000;
/// Queue settings remembered.
pub const QUEUE_CACHE: usize = 4_096;
/// Jobs remembered as they were handed out.
pub const HANDED: usize = 16_384;
/// Bytes of metadata above which a job is not.
pub const HANDED_METADATA: usize = 256;

const _: () = assert!(VALID < RECEIPT_OWN && RECEIPT_OWN < STUB, "what refuses a second application outlives it");
const _: () = assert!(VALID + CLOCK_FRESH_MS * MILLI < STUB, "a clock read late does not outlive a stub");
const _: () = assert!(VALID + SECOND > REQUEST_MS * MILLI, "an unknown outcome is told when its time has passed");
const _: () = assert!(RESULT_INLINE < COMMIT_BYTES && COMMIT_BYTES <= READ_BYTES);
const _: () = assert!(VALID + CLOCK_FRESH_MS * MILLI < SLOT_KEPT && WAITER < SLOT_KEPT);
const _: () = assert!(VALID < WAITER, "a waiter that is removed is not entered again by what was stuck");
const _: () = assert!(WAITER_RENEW_MS * MILLI * 2 < WAITER, "one renewal may be lost");
const _: () = assert!(NAME_IDLE > 2 * VALID, "a name outlives the submit that brought it");
const _: () = assert!(HISTORY_FIRST + HISTORY_LAST < ATTEMPTS_MAX as usize);
