//! What a replica is asked and what it answers: plain data, decoded and encoded by the shells.

use alloc::boxed::Box;
use alloc::string::String;
use alloc::vec::Vec;

use crate::failure::Failure;
use crate::group::record::{GroupStatus, Mode, Stop};
use crate::ids::{GroupId, JobId, Token};
use crate::job::record::{AttemptRecord, Backoff, ChildOutcome, Class, ErrorInfo, Placed, Status};
use crate::opaque::{Content, Opaque};
use crate::store::{Clock, LogEntry, Version};

/// Names one request to one replica, given by the shell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
pub struct RequestId(pub u64);

/// The answer to a request.
pub type Outcome = Result<Response, Failure>;

#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Request {
    Submit(Box<Submit>),
    Get {
        tenant: String,
        job: JobId,
    },
    Payload {
        tenant: String,
        job: JobId,
    },
    Result {
        tenant: String,
        job: JobId,
    },
    Why {
        tenant: String,
        job: JobId,
    },
    List(List),
    Cancel {
        tenant: String,
        job: JobId,
    },
    Retry {
        tenant: String,
        job: JobId,
    },
    Delete {
        tenant: String,
        job: JobId,
    },
    Claim(Box<Claim>),
    Heartbeat(Beat),
    Complete(Box<Complete>),
    Fail(Box<Fail>),
    Release(Held),
    Queues {
        tenant: String,
    },
    Queue {
        tenant: String,
        queue: String,
    },
    /// Changes what is given, keeps the rest.
    SetQueue {
        tenant: String,
        queue: String,
        lease_ms: Option<u64>,
    },
    Pause {
        tenant: String,
        queue: String,
        reason: Option<String>,
    },
    Resume {
        tenant: String,
        queue: String,
    },
    Purge {
        tenant: String,
        queue: String,
        status: Status,
    },
    /// Audit events after `after`; waits up to `wait_ms` for the first.
    Events {
        tenant: String,
        after: EventCursor,
        limit: usize,
        wait_ms: u64,
    },
    CreateGroup(Box<CreateGroup>),
    /// More children for an open group, the first with index `from`.
    ExtendGroup {
        tenant: String,
        group: GroupId,
        from: u32,
        children: Vec<Submit>,
    },
    /// An open group has all its children.
    SealGroup {
        tenant: String,
        group: GroupId,
    },
    CancelGroup {
        tenant: String,
        group: GroupId,
    },
    /// Waits up to `wait_ms` for the group's end.
    Group {
        tenant: String,
        group: GroupId,
        wait_ms: u64,
    },
    /// A page of children, from an index on; with `contents` also their results.
    Children {
        tenant: String,
        group: GroupId,
        from: u32,
        limit: usize,
        contents: bool,
    },
    /// Makes a pool, or changes what is given and keeps the rest.
    SetPool(SetPool),
    DeletePool {
        pool: String,
    },
    Pools,
    Pool {
        tenant: String,
        pool: String,
    },
    /// A slot of a pool; waits up to `wait_ms` for one.
    Acquire(Box<Acquire>),
    RefreshSlot {
        tenant: String,
        pool: String,
        slot: SlotId,
    },
    /// Gives back what is held, or leaves the line. Done already when there is neither.
    ReleaseSlot {
        tenant: String,
        pool: String,
        slot: SlotId,
    },
    /// Jobs for this server to run by calling upstreams, as many as there are slots for; waits up to `wait_ms`
    /// for the first.
    Dispatch(Box<Dispatch>),
    /// An upstream takes no calls for a while.
    HoldUpstream(HoldUpstream),
    /// An upstream has answered: its hold is over if its time has come.
    FreeUpstream {
        upstream: String,
    },
    /// The call of a job that was cancelled is over: what was held for it is free for others.
    GiveBack(GiveBack),
    /// Which upstreams are on hold.
    Upstreams,
    /// A page of the check of the whole store; from the beginning without a cursor. With `repair`, what
    /// can be derived is put right.
    Audit {
        cursor: Option<String>,
        repair: bool,
    },
    /// What the store holds of one thing, as it stands there.
    Inspect(Inspect),
    /// Proves that commits work.
    Ready,
    /// From now on: claims are refused, open polls are ended, all else goes on.
    Drain,
    /// Each on its own, answered together in order by [`Response::Batch`]. Not nested.
    Batch(Vec<Request>),
}

/// A job to be created. `None` means the default of API.md.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Submit {
    pub tenant: String,
    pub queue: String,
    pub payload: Content,
    pub key: Option<String>,
    pub class: Class,
    pub start: Start,
    pub max_attempts: Option<u32>,
    pub max_deliveries: Option<u32>,
    pub max_age_ms: Option<u64>,
    pub lease_ms: Option<u64>,
    pub run_timeout_ms: Option<u64>,
    pub progress_timeout_ms: Option<u64>,
    pub queue_ttl_ms: Option<u64>,
    pub retention_ms: Option<u64>,
    pub key_ttl_ms: Option<u64>,
    pub backoff: Option<Backoff>,
    pub on_prem: bool,
    pub cost: u32,
    /// JSON text.
    pub metadata: Option<Opaque>,
    pub traceparent: Option<String>,
}

impl Submit {
    /// A job with every default.
    pub fn new(tenant: impl Into<String>, queue: impl Into<String>, payload: Content) -> Self {
        Submit {
            tenant: tenant.into(),
            queue: queue.into(),
            payload,
            key: None,
            class: Class::System,
            start: Start::Now,
            max_attempts: None,
            max_deliveries: None,
            max_age_ms: None,
            lease_ms: None,
            run_timeout_ms: None,
            progress_timeout_ms: None,
            queue_ttl_ms: None,
            retention_ms: None,
            key_ttl_ms: None,
            backoff: None,
            on_prem: false,
            cost: 1,
            metadata: None,
            traceparent: None,
        }
    }
}

/// A group to be created with its first children.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct CreateGroup {
    /// Tenant, queue, class, key and traceparent are the group's; the rules are those of its children,
    /// unless a child has its own. The payload means nothing.
    pub common: Submit,
    /// A child's tenant, queue, class, key and start mean nothing.
    pub children: Vec<Submit>,
    pub max_parallel: Option<u64>,
    pub mode: Mode,
    pub sealed: bool,
    pub open_timeout_ms: Option<u64>,
}

/// A pool's settings. `None`: as it is, or the default for a new one.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct SetPool {
    /// Who is shown the holders in the answer.
    pub tenant: String,
    pub pool: String,
    pub total: Option<u64>,
    pub batch_max: Option<u64>,
    pub lease_ms: Option<u64>,
}

/// A slot that is wanted.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Acquire {
    pub tenant: String,
    pub pool: String,
    /// A name of the asker's for this slot, so that a repeat continues the wait or gets the same slot.
    pub slot: Option<String>,
    pub class: Class,
    /// Units of the pool, all or none.
    pub cost: u32,
    /// What the asker calls itself; shown to operators.
    pub holder: Option<String>,
    pub lease_ms: Option<u64>,
    pub wait_ms: u64,
}

/// Names a slot, and once it is granted also the grant: `name:nonce`, the nonce in 16 hexadecimal digits. With
/// the nonce it is about that grant and none that comes after it.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct SlotId {
    pub slot: String,
    pub nonce: Option<Version>,
}

impl SlotId {
    /// Any text is one; a name alone is one without a grant.
    pub fn parse(text: &str) -> SlotId {
        let digits = |s: &str| s.len() == 16 && s.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        let (slot, nonce) = match text.rsplit_once(':').filter(|(_, nonce)| digits(nonce)) {
            Some((slot, nonce)) => (slot, u64::from_str_radix(nonce, 16).ok().map(Version)),
            None => (text, None),
        };
        SlotId { slot: slot.into(), nonce }
    }
}

impl core::fmt::Display for SlotId {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self.nonce {
            Some(nonce) => write!(f, "{}:{:016x}", self.slot, nonce.0),
            None => f.write_str(&self.slot),
        }
    }
}

/// Jobs that a server wants to run itself. Each one comes with a slot of its upstream's pool, which it has for
/// as long as its lease: a heartbeat extends both, and whatever ends the attempt gives the slot back.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Dispatch {
    /// What this server calls itself; shown as the worker.
    pub worker: String,
    /// Tenant and name of each, in order; 1 to 32.
    pub queues: Vec<(String, String)>,
    /// Configured upstreams that may be called now, by name; 1 to 32. A job goes to the one that has most room.
    pub upstreams: Vec<String>,
    /// Jobs at most, 1 to 1,000.
    pub max: usize,
    pub wait_ms: u64,
}

/// An upstream asked to be left alone, as by a 429 with `Retry-After`.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct HoldUpstream {
    pub upstream: String,
    /// No replica dispatches anything to it for so long, and then one job at a time until a call has succeeded.
    /// Ask for this first, then release the job that it was called for.
    pub for_ms: u64,
}

/// What was held for a lease that its job does not have any more.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct GiveBack {
    pub job: JobId,
    pub token: Token,
    pub class: Class,
    /// As it was handed out.
    pub placed: Placed,
}

/// When a job may start. A time in the past counts as now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Start {
    Now,
    DelayMs(u64),
    /// By the store's clock, microseconds since the epoch.
    At(Clock),
}

#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct List {
    pub tenant: String,
    pub queue: Option<String>,
    pub status: Option<Status>,
    pub limit: usize,
    /// From an earlier answer.
    pub cursor: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Claim {
    pub tenant: String,
    pub worker: String,
    pub queues: Vec<String>,
    pub max: usize,
    pub wait_ms: u64,
    pub lease_ms: Option<u64>,
    pub claim_id: Option<String>,
}

/// A job and the token of the lease under which the caller holds it. The token is `None` when the
/// text was not a token of this job: it is then certainly not the present one.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Held {
    pub tenant: String,
    pub job: JobId,
    pub token: Option<Token>,
}

#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Beat {
    pub held: Held,
    /// JSON text.
    pub progress: Option<Opaque>,
    pub seq: Option<u64>,
}

#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Complete {
    pub held: Held,
    pub result: Option<Content>,
}

#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Fail {
    pub held: Held,
    pub error: ErrorInfo,
    pub retryable: bool,
    /// Instead of the policy's back-off.
    pub retry_in_ms: Option<u64>,
}

/// A position in the audit log: the log entry, and how many of its events have been seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub struct EventCursor {
    pub seq: u64,
    pub seen: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Response {
    Created(Box<JobView>),
    /// The job that the key named already.
    Existing(Box<JobView>),
    Job(Box<JobView>),
    Content(Content),
    /// The job succeeded without a result.
    NoContent,
    Why(Why),
    Jobs {
        jobs: Vec<JobView>,
        next: Option<String>,
    },
    Claimed(Vec<Leased>),
    Beat {
        lease_expires_at: Option<Clock>,
        cancel_requested: bool,
    },
    Completed,
    Failed {
        status: Status,
        run_at: Option<Clock>,
    },
    /// Back in its place, or dead if it may not be handed out again.
    Released {
        status: Status,
    },
    Deleted,
    Queues(Vec<QueueView>),
    Queue(Box<QueueView>),
    Purged {
        queue: Box<QueueView>,
        purged: u64,
        left: u64,
    },
    Events {
        events: Vec<EventView>,
        next: EventCursor,
    },
    GroupCreated(Box<GroupView>),
    Group(Box<GroupView>),
    Children {
        group: Box<GroupView>,
        children: Vec<ChildView>,
        /// The index to go on from; `None`: these were the last.
        next: Option<u32>,
    },
    Pool(Box<PoolView>),
    Pools(Vec<PoolView>),
    PoolDeleted,
    Slot {
        pool: String,
        id: SlotId,
        expires_at: Clock,
        /// Admitted by the replica itself, since the store cannot be reached.
        declared: bool,
    },
    SlotRefreshed {
        expires_at: Clock,
    },
    SlotReleased,
    Dispatched(Vec<Dispatched>),
    /// The hold's end by the store's clock; later than asked for if it was so before.
    UpstreamHeld {
        until: Clock,
    },
    UpstreamFreed,
    GivenBack,
    /// Those that are configured, in order.
    Upstreams(Vec<UpstreamView>),
    Audited(Audited),
    Inspected(Inspected),
    Ready,
    Draining,
    Batch(Vec<Outcome>),
}

/// A job as its owner sees it. Clocks are the store's, in microseconds.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct JobView {
    pub id: JobId,
    pub queue: String,
    pub class: Class,
    pub status: Status,
    /// Counted attempts, the running one included.
    pub attempt: u32,
    pub max_attempts: u32,
    /// Claims so far, the running one included.
    pub deliveries: u32,
    pub created_at: Clock,
    /// When it became, or becomes, due.
    pub run_at: Clock,
    pub ended_at: Option<Clock>,
    /// Why it ended as it did (`lease_expired`, `failed`, `lost`, …), for jobs that are dead.
    pub reason: Option<String>,
    /// Attempts that ended, oldest first; `attempts_omitted` between the first and the last ones.
    pub attempts: Vec<AttemptRecord>,
    pub attempts_omitted: u32,
    pub progress: Option<Progress>,
    pub lease: Option<LeaseView>,
    /// 1 is next, over all classes of the queue; only while queued.
    pub position: Option<u64>,
    pub key: Option<String>,
    pub payload_len: u64,
    pub metadata: Option<Opaque>,
    pub traceparent: Option<String>,
}

/// A group as its owner sees it.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct GroupView {
    pub id: GroupId,
    pub queue: String,
    pub class: Class,
    pub mode: Mode,
    pub max_parallel: Option<u32>,
    pub status: GroupStatus,
    pub sealed: bool,
    /// Why it was stopped, if it was.
    pub stopped: Option<Stop>,
    pub created_at: Clock,
    pub open_until: Option<Clock>,
    pub ended_at: Option<Clock>,
    /// Children created so far.
    pub children: u32,
    pub counts: GroupCounts,
    pub key: Option<String>,
}

/// A pool as its users see it, of one moment.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct PoolView {
    pub name: String,
    pub total: u32,
    /// `None`: the total.
    pub batch_max: Option<u32>,
    pub lease_ms: u64,
    /// Units held, and those of them held by class batch.
    pub in_use: u64,
    pub batch_in_use: u64,
    pub waiting: Vec<(Class, u64)>,
    /// The first hundred of the asker's tenant to end, when one pool was asked for.
    pub holders: Vec<HolderView>,
}

#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct HolderView {
    pub of: SlotOf,
    pub holder: Option<String>,
    pub class: Class,
    pub cost: u32,
    pub expires_at: Clock,
}

/// What a slot is held for.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum SlotOf {
    /// Whoever asked for it.
    Caller(SlotId),
    /// A job that a server runs.
    Job(JobId),
}

/// Where a group's children are: each in one, as the sizes of indexes at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct GroupCounts {
    pub held: u64,
    /// Released and not ended.
    pub in_flight: u64,
    pub succeeded: u64,
    pub dead: u64,
    pub cancelled: u64,
    pub expired: u64,
    pub lost: u64,
}

impl GroupCounts {
    /// Children that have ended.
    pub fn done(&self) -> u64 {
        self.succeeded + self.dead + self.cancelled + self.expired + self.lost
    }
}

/// One child of a group.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct ChildView {
    pub index: u32,
    pub id: JobId,
    pub state: ChildState,
    pub attempts: u32,
    /// Why it ended as it did, if it did not succeed.
    pub reason: Option<String>,
    /// The last attempt's.
    pub error: Option<ErrorInfo>,
    pub ended_at: Option<Clock>,
    /// Bytes of the result, if one was given.
    pub result_len: Option<u64>,
    /// Only when asked for, and there is one.
    pub result: Option<Content>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum ChildState {
    Held,
    /// Released and not ended.
    InFlight,
    Done(ChildOutcome),
}

impl ChildState {
    pub fn text(self) -> &'static str {
        match self {
            ChildState::Held => "held",
            ChildState::InFlight => "in_flight",
            ChildState::Done(outcome) => outcome.text(),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Progress {
    /// JSON text.
    pub value: Opaque,
    pub seq: Option<u64>,
    pub at: Clock,
}

#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct LeaseView {
    pub worker: String,
    pub granted_at: Clock,
    pub expires_at: Clock,
}

/// The first thing that keeps a job from running.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Why {
    /// Not due yet.
    Scheduled {
        run_at: Clock,
    },
    Retrying {
        run_at: Clock,
        attempt: u32,
    },
    Paused {
        reason: Option<String>,
    },
    /// So many jobs are before it.
    Behind {
        ahead: u64,
    },
    /// It is first: no worker asks for this queue.
    NoWorker,
    /// It is first, and its upstream's pool has no slots for it: none are free, or (`total` 0) there is no such pool.
    NoSlot {
        pool: String,
        in_use: u64,
        total: u32,
    },
    /// It is first, and its upstream has asked to be left alone until then.
    OnHold {
        upstream: String,
        until: Clock,
    },
    Held,
    Running {
        worker: String,
        expires_at: Clock,
    },
    Ended {
        status: Status,
    },
}

/// One leased job as the worker gets it.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Leased {
    pub id: JobId,
    pub token: Token,
    pub attempt: u32,
    pub delivery: u32,
    pub queue: String,
    pub class: Class,
    /// `None`: omitted because the answer grew too large.
    pub payload: Option<Content>,
    pub lease_expires_at: Clock,
    pub traceparent: Option<String>,
    pub metadata: Option<Opaque>,
}

/// One job that this server is to run now.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Dispatched {
    pub tenant: String,
    pub job: Leased,
    /// Which of the upstreams is to be called, and what is held for that.
    pub placed: Placed,
    /// It must not go anywhere else but to an upstream on the premises, as this one is.
    pub on_prem: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct UpstreamView {
    pub name: String,
    /// On hold until then by the store's clock; past: until a call succeeds.
    pub held_until: Option<Clock>,
    /// A call is under way that tells.
    pub probing: bool,
    /// The store's clock at which this was read.
    pub at: Clock,
}

#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct QueueView {
    pub name: String,
    pub paused: bool,
    pub reason: Option<String>,
    pub lease_ms: u64,
    /// For each class, the number of jobs in each status.
    pub depth: Vec<(Class, Status, u64)>,
    /// When the job that has been due longest became due.
    pub oldest_due: Option<Clock>,
    /// The store's clock at which this was read.
    pub at: Clock,
}

/// One audit event.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct EventView {
    /// The cursor that continues after this event: its id.
    pub id: EventCursor,
    pub at: Clock,
    pub event: crate::event::Event,
}

/// What can be looked at as it stands in the store.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Inspect {
    Job(JobId),
    Queue {
        tenant: String,
        queue: String,
    },
    /// An idempotency key.
    Key {
        tenant: String,
        key: String,
    },
    /// The records that are set aside because they cannot be read: the first thousand, and how many
    /// there are.
    Quarantine,
}

/// Records and index entries as they stand in the store, of one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Inspected {
    pub at: Clock,
    pub records: Vec<RecordView>,
    /// Index and score of each place.
    pub places: Vec<(String, u64)>,
    /// Index and number of members.
    pub counts: Vec<(String, u64)>,
}

#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct RecordView {
    pub key: String,
    pub version: u64,
    /// When it was put.
    pub at: Clock,
    pub expires_at: Option<Clock>,
    pub len: usize,
    /// The fields, or why they cannot be shown. Payloads and results are not shown.
    pub text: String,
}

/// A page of the audit.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Audited {
    pub at: Clock,
    /// What was looked at on this page.
    pub records: u64,
    pub jobs: u64,
    pub entries: u64,
    /// Records that cannot be read, which is known: they are set aside.
    pub quarantined: u64,
    pub findings: Vec<Finding>,
    /// `None`: this was the last page.
    pub next: Option<String>,
}

/// Something that does not balance.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Finding {
    /// A job's id, a record's key or an index's name.
    pub subject: String,
    pub what: String,
    pub repaired: bool,
}

/// Used by [`crate::event`] to unfold log entries.
pub type Log = Vec<LogEntry>;
