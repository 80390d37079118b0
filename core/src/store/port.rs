//! The store port: what a store is asked, and what it answers.
//!
//! For one shard a store keeps *records* (key → version, the clock when it was put, optional expiry,
//! bytes), *indexes* (name → members ordered by integer score, then by member) and append-only
//! *logs*. **The store knows no jobs**, and it counts nothing: every count is the size of an index.
//!
//! The laws every store keeps (the conformance suite checks them):
//!
//! 1. Within a transaction: all guards first, then the take's choice, then every write.
//! 2. The store's clock is the only clock that decides. It is the same for a whole [`Read`] or
//!    [`Commit`] and is returned with the answer. Scores relative to the clock use it.
//! 3. A version is a nonce chosen by the writer; the store only compares it.
//! 4. A transaction whose `valid_until` is behind the clock is refused as [`Answer::TooLate`].
//! 5. Expiry is logical: a record whose expiry is at or before the clock of *this* call is absent.
//! 6. A commit that does not `grow` is applied also by a store that is full.
//! 7. Scores and clocks are integers from 0 to [`SCORE_MAX`]; a sum beyond is cut to it.
//! 8. Work is bounded in count and in bytes: records are given in order until `max_bytes` is used
//!    up (the first one always), later ones come as their length ([`Record::Present`] without bytes).
//!
//! A commit is a list of transactions. Each is all or nothing; they are applied in order, and a
//! crash may fall between two of them.

use alloc::sync::Arc;
use alloc::vec::Vec;
use bytes::Bytes;

use crate::name::Name;

/// Microseconds since the Unix epoch by the store's clock, or any other integer order.
/// Always at most [`SCORE_MAX`].
pub type Score = u64;
/// Microseconds since the Unix epoch by the store's clock.
pub type Clock = u64;
/// The largest score and clock: 2^53 - 1, exact in every store's number type.
pub const SCORE_MAX: Score = (1 << 53) - 1;

/// A nonce that names one put of one record. Zero is never drawn.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
pub struct Version(pub u64);

impl core::fmt::Debug for Version {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "v{:016x}", self.0)
    }
}

/// A question about one consistent moment of the store. Answered by a [`Snapshot`] whose vectors
/// run parallel to these.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Read {
    pub records: Vec<Name>,
    pub slices: Vec<Slice>,
    pub counts: Vec<(Name, Span)>,
    pub members: Vec<(Name, Name)>,
    pub log: Option<LogRead>,
    pub scan: Option<Scan>,
    /// Budget for record bytes in the answer, `records` first, then `slices` in order (law 8).
    pub max_bytes: usize,
}

impl Default for Read {
    fn default() -> Self {
        Read {
            records: Vec::new(),
            slices: Vec::new(),
            counts: Vec::new(),
            members: Vec::new(),
            log: None,
            scan: None,
            max_bytes: crate::limits::READ_BYTES,
        }
    }
}

/// Which members a count looks at: all, or those whose score lies past the clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub enum Span {
    All,
    Live,
}

/// A run of an index's members in order of (score, member).
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Slice {
    pub index: Name,
    /// Exclusive lower end.
    pub after: Option<(Score, Name)>,
    pub up_to: UpTo,
    pub limit: usize,
    /// For each member, the records under `prefix + member`, in this order.
    pub give: Vec<Name>,
}

/// Inclusive upper end of a [`Slice`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum UpTo {
    End,
    Score(Score),
    /// Members whose score is at or before the clock: those that are due.
    Clock,
}

/// Entries of a log with a sequence number above `after`, at most `limit`.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct LogRead {
    pub log: Name,
    pub after: u64,
    pub limit: usize,
}

/// Record keys in an order of the store's own; a record that is there throughout a whole walk
/// (from cursor `None` until the answer's cursor is `None`) is seen at least once.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Scan {
    pub cursor: Option<Bytes>,
    pub limit: usize,
}

/// The answer to a [`Read`].
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Snapshot {
    pub clock: Clock,
    pub records: Vec<Record>,
    pub slices: Vec<Vec<Entry>>,
    pub counts: Vec<u64>,
    pub members: Vec<Option<Place>>,
    /// Empty when no log was asked for.
    pub log: Vec<LogEntry>,
    /// Keys and the cursor to go on from; `None` when no scan was asked for.
    pub scan: Option<ScanPage>,
}

/// A record as read.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Record {
    Absent,
    Present {
        version: Version,
        /// The store's clock when it was put.
        at: Clock,
        expiry: Option<Clock>,
        len: usize,
        /// `None`: left out because the answer's budget of bytes was used up.
        bytes: Option<Bytes>,
    },
}

impl Snapshot {
    /// Whether a newer release wrote any of its records.
    pub(crate) fn has_newer(&self) -> bool {
        self.records.iter().any(Record::is_newer) || self.slices.iter().flatten().any(Entry::has_newer)
    }
}

impl Entry {
    pub(crate) fn has_newer(&self) -> bool {
        self.records.iter().any(Record::is_newer)
    }
}

impl Record {
    /// Whether a newer release wrote it.
    pub(crate) fn is_newer(&self) -> bool {
        self.bytes().is_some_and(|bytes| crate::codec::is_newer(bytes))
    }

    pub fn version(&self) -> Option<Version> {
        match self {
            Record::Absent => None,
            Record::Present { version, .. } => Some(*version),
        }
    }

    pub fn is_absent(&self) -> bool {
        matches!(self, Record::Absent)
    }

    pub fn is_unread(&self) -> bool {
        matches!(self, Record::Present { bytes: None, .. })
    }

    pub fn bytes(&self) -> Option<&Bytes> {
        match self {
            Record::Present { bytes, .. } => bytes.as_ref(),
            Record::Absent => None,
        }
    }

    pub fn at(&self) -> Option<Clock> {
        match self {
            Record::Present { at, .. } => Some(*at),
            Record::Absent => None,
        }
    }
}

/// One member of a slice.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Entry {
    pub member: Name,
    pub score: Score,
    /// Parallel to the slice's `give`.
    pub records: Vec<Record>,
}

/// Where a member stands in an index; rank 0 is the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Place {
    pub score: Score,
    pub rank: u64,
}

/// What one commit appended to a log: the applied transactions of a commit share one entry.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct LogEntry {
    /// Position in the log, from 1, strictly increasing, not necessarily dense.
    pub seq: u64,
    pub at: Clock,
    pub items: Vec<LogItem>,
}

/// One append: the bytes given, and what the transaction's take took, if it had one.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct LogItem {
    pub bytes: Bytes,
    pub taken: Vec<TakenMember>,
}

/// A member as a take met it, without records.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub struct TakenMember {
    /// Which of the take's sources, by position.
    pub source: u32,
    pub member: Name,
    pub score: Score,
}

#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct ScanPage {
    pub keys: Vec<Name>,
    /// Where to go on; `None`: the walk is complete.
    pub cursor: Option<Bytes>,
}

/// Guarded transactions, applied in order. Answered by a [`CommitReply`].
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Commit {
    /// Shared, so that sending the same transactions again copies nothing.
    pub txns: Vec<Arc<Txn>>,
    /// Whether it may be refused by a store that is full (law 6).
    pub grows: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct CommitReply {
    pub clock: Clock,
    /// Parallel to the commit's transactions.
    pub answers: Vec<Answer>,
}

/// All or nothing.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Txn {
    /// Refused as [`Answer::TooLate`] when the clock is past this.
    pub valid_until: Clock,
    pub guards: Vec<Guard>,
    pub take: Option<Take>,
    pub writes: Vec<Write>,
}

#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Answer {
    Applied {
        /// Empty without a take.
        taken: Vec<Taken>,
    },
    /// The first guard that did not hold, by position.
    Refused(usize),
    /// The take found nothing; nothing was written.
    Empty,
    TooLate,
}

/// What must hold for a transaction to be applied.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Guard {
    /// No unexpired record under this key.
    Absent(Name),
    /// An unexpired record of exactly this version.
    At(Name, Version),
    Member(Name, Name, Standing),
    /// The index has fewer than n members of that span. Room for w more under a limit L is
    /// `Below(.., L - w + 1)`.
    Below(Name, Span, u64),
}

/// How a member must stand in an index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Standing {
    /// Not in it.
    Out,
    /// The first of all.
    First,
    /// In it, its score past the clock.
    Live,
    /// In it, its score at or before the clock.
    Due,
}

#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Write {
    Put {
        key: Name,
        version: Version,
        value: Value,
        expiry: Expiry,
    },
    /// Deleting what is absent does nothing.
    Delete(Name),
    /// Changes only the expiry; nothing if the record is absent.
    Expire(Name, Expiry),
    /// Enters or moves a member. With `raise` a score only ever goes up.
    Add {
        index: Name,
        member: Name,
        score: ScoreAt,
        raise: bool,
    },
    Remove {
        index: Name,
        member: Name,
    },
    Append {
        log: Name,
        bytes: Bytes,
    },
    /// Wakes whoever listens to the topic, best effort.
    Notify(Name),
}

#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Value {
    Bytes(Bytes),
    /// The members that this transaction's take took, encoded by [`encode_taken`].
    Taken,
}

#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum ScoreAt {
    Number(Score),
    /// The clock plus so many microseconds.
    Clock(Score),
    /// The member's score in that index before this transaction; the clock, if it is not there.
    Of(Name),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Expiry {
    Never,
    At(Clock),
    /// The clock plus so many microseconds.
    Clock(Score),
}

/// Picks the first `n` members of the sources, in the order of the sources. Each leaves its source
/// and the source's `each` is done for it. A take that finds nothing refuses its transaction.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Take {
    pub n: usize,
    pub from: Vec<Source>,
    /// For each member taken, the records under `prefix + member` as they were before the
    /// transaction, within `max_bytes` (law 8).
    pub give: Vec<Name>,
    pub max_bytes: usize,
}

#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Source {
    pub index: Name,
    /// Only members whose score is at or before the clock.
    pub due: bool,
    pub each: Vec<Each>,
}

/// A write for every member taken from one source.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Each {
    /// `Of` the source's own index is the score with which the member was taken.
    Add {
        index: Name,
        score: ScoreAt,
    },
    Remove {
        index: Name,
    },
    /// Under the key `prefix + member`.
    Put {
        prefix: Name,
        version: Version,
        bytes: Bytes,
        expiry: Expiry,
    },
    Delete {
        prefix: Name,
    },
}

/// A member taken, with the records asked for.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Taken {
    pub source: u32,
    pub member: Name,
    pub score: Score,
    /// Parallel to the take's `give`.
    pub records: Vec<Record>,
}

/// Why a store did not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub enum StoreError {
    /// Certainly not applied; may work later.
    Unavailable,
    /// Sent, and nothing came back: a commit may have been applied, or may still be.
    Unknown,
    /// Certainly not applied: the store has no room for a commit that grows.
    Full,
}

/// What a store does, seen synchronously. The conformance suite takes any of these; a shell may
/// also serve the port by messages.
pub trait Store {
    fn read(&mut self, read: &Read) -> Result<Snapshot, StoreError>;
    fn commit(&mut self, commit: &Commit) -> Result<CommitReply, StoreError>;
    /// The topics notified since this was last asked, each once.
    fn notified(&mut self) -> Vec<Name>;
}

/// The bytes of a put of [`Value::Taken`]. Stable: stores written today are read tomorrow.
pub fn encode_taken(taken: &[TakenMember]) -> Bytes {
    // postcard's encoding of a plain sequence cannot fail when writing to memory.
    postcard::to_allocvec(taken).map(Bytes::from).unwrap_or_default()
}

/// Reads what [`encode_taken`] wrote.
pub fn decode_taken(bytes: &[u8]) -> Option<Vec<TakenMember>> {
    postcard::from_bytes(bytes).ok()
}
