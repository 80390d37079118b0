//! What an operation is to the replica: reads, decides, commits, settles.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::string::String;
use alloc::vec::Vec;

use super::polls::Turn;
use super::{Config, Mark, Stats};
use crate::codec::{self, Undecodable};
use crate::failure::Failure;
use crate::group::record::Group;
use crate::ids::{JobId, Maker};
use crate::job::handed::Handed;
use crate::job::record::{Job, QueueRecord, Trail};
use crate::limits;
use crate::name::Name;
use crate::pool::record::Pool;
use crate::pool::{Held, Open};
use crate::request::{Outcome, Response};
use crate::store::{Answer, Clock, Guard, Read, Record, Snapshot, Take, Txn, Version, Write};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub(crate) struct TaskId(pub u64);

/// What an operation wants next.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub(crate) enum Next {
    Read(Read),
    Commit(Plan),
    /// Wait, then [`Operation::start`] again.
    Wait(Wait),
    Done(Outcome),
    /// The rest is another operation's.
    Become(super::Op),
}

impl Next {
    pub fn ok(response: Response) -> Next {
        Next::Done(Ok(response))
    }
    pub fn fail(failure: Failure) -> Next {
        Next::Done(Err(failure))
    }
}

/// What a long poll waits for: the first of these.
#[derive(Clone, Debug, Default, serde::Serialize, serde::Deserialize)]
pub(crate) struct Wait {
    /// Whoever has waited longest for a topic is woken first …
    pub topics: Vec<Name>,
    /// … unless each has a turn of its own.
    pub turn: Option<Turn>,
    /// Looks again after so long, if nothing happened.
    pub again_ms: Option<u64>,
    /// Nothing to wait for if one of these topics was notified after that many notifications had come
    /// ([`Cx::notices`]): what was read may be older.
    pub since: Vec<(Name, u64)>,
}

impl Wait {
    pub fn on(topics: Vec<Name>) -> Wait {
        Wait { topics, ..Wait::default() }
    }
}

/// Transactions to commit. When several are given for one effect, at most one of them can apply.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct Plan {
    pub txns: Vec<Draft>,
    /// May be refused by a full store.
    pub grows: bool,
    /// How an unknown outcome is settled; `None`: it is harmless to decide anew.
    pub evidence: Option<Evidence>,
}

impl Plan {
    pub fn new(txns: Vec<Draft>) -> Plan {
        Plan { txns, grows: false, evidence: None }
    }
}

/// A transaction that has no `valid_until` yet: it gets one when it is first sent, from a clock that
/// is fresh then.
#[derive(Clone, Debug, Default, serde::Serialize, serde::Deserialize)]
pub(crate) struct Draft {
    pub guards: Vec<Guard>,
    pub take: Option<Take>,
    pub writes: Vec<Write>,
}

impl Draft {
    pub fn new(guards: Vec<Guard>, writes: Vec<Write>) -> Draft {
        Draft { guards, take: None, writes }
    }

    pub fn seal(self, valid_until: Clock) -> Txn {
        Txn { valid_until, guards: self.guards, take: self.take, writes: self.writes }
    }

    /// Bytes that it brings to the store, roughly.
    pub fn weight(&self) -> usize {
        self.writes.iter().map(|w| 64 + write_bytes(w)).sum()
    }
}

fn write_bytes(write: &Write) -> usize {
    match write {
        Write::Put { value: crate::store::Value::Bytes(b), .. } => b.len(),
        Write::Append { bytes, .. } => bytes.len(),
        _ => 0,
    }
}

/// The record that tells whether a transaction was applied.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct Evidence {
    pub key: Name,
    /// The version that the transaction puts there.
    pub own: Version,
    /// The version that it found there; `None`: it was absent.
    pub found: Option<Version>,
    pub kind: EvidenceKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) enum EvidenceKind {
    Job,
    Queue,
    Group,
    Pool,
    /// No trail: only the present version speaks.
    Plain,
    /// Nothing speaks but time: what was refused may be applied when an earlier copy of it arrives, since its
    /// guards can come to hold again. When its time has passed the operation is asked what it finds.
    Time,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) enum Verdict {
    Applied,
    /// Not applied so far; for good only when read after `valid_until`.
    NotApplied,
    Unknown,
}

impl Evidence {
    /// That a record at its own version speaks for it, and else nothing but time.
    pub fn time(key: Name, own: Version) -> Evidence {
        Evidence { key, own, found: None, kind: EvidenceKind::Time }
    }

    /// Whether it speaks by being there.
    pub fn is_new(&self) -> bool {
        self.found.is_none() && !self.is_time()
    }

    pub fn is_time(&self) -> bool {
        self.kind == EvidenceKind::Time
    }

    /// DESIGN's law 4: the own nonce in the trail: applied. The guarded version there and not
    /// followed by the own: not applied. Neither: unknown.
    pub fn judge(&self, record: &Record) -> Verdict {
        if self.is_time() {
            return if record.version() == Some(self.own) { Verdict::Applied } else { Verdict::NotApplied };
        }
        let Some(version) = record.version() else {
            // What was created is never plainly deleted while its transaction may still be on the way.
            return match (self.found, self.kind) {
                (None, _) => Verdict::NotApplied,
                // The record that was there has been forgotten since.
                (Some(_), _) => Verdict::Unknown,
            };
        };
        if version == self.own {
            return Verdict::Applied;
        }
        if Some(version) == self.found {
            return Verdict::NotApplied;
        }
        let trail = match self.kind {
            EvidenceKind::Plain | EvidenceKind::Time => {
                return if self.found.is_none() { Verdict::NotApplied } else { Verdict::Unknown };
            }
            EvidenceKind::Job => record.bytes().and_then(|b| codec::decode::<Job>(b).ok()).map(|j| j.trail),
            EvidenceKind::Group => record.bytes().and_then(|b| codec::decode::<Group>(b).ok()).map(|g| g.trail),
            EvidenceKind::Pool => record.bytes().and_then(|b| codec::decode::<Pool>(b).ok()).map(|p| p.trail),
            EvidenceKind::Queue => record.bytes().and_then(|b| codec::decode::<QueueRecord>(b).ok()).map(|q| q.trail),
        };
        let Some(trail) = trail else { return Verdict::Unknown };
        self.judge_trail(trail)
    }

    fn judge_trail(&self, trail: Trail) -> Verdict {
        let versions: Vec<Version> = trail.iter().collect();
        if versions.contains(&self.own) {
            Verdict::Applied
        } else if self.found.is_some_and(|found| versions.contains(&found)) {
            // Something else followed the version that was guarded.
            Verdict::NotApplied
        } else if self.found.is_none() && versions.len() < 3 {
            // The whole life of the record is in its trail, and the own version is not.
            Verdict::NotApplied
        } else {
            Verdict::Unknown
        }
    }
}

/// What an operation may use.
pub(crate) struct Cx<'a> {
    /// The store's clock, estimated; fresh unless said otherwise.
    pub clock: Clock,
    pub fresh: bool,
    pub make: &'a mut Maker,
    pub config: &'a Config,
    pub queues: &'a mut Queues,
    /// Jobs as they were handed out.
    pub handed: &'a mut Handed,
    pub stats: &'a mut Stats,
    pub marks: &'a mut Vec<Mark>,
    /// Terminal indexes to be trimmed with the next commit, and by how many.
    pub trims: &'a mut BTreeMap<Name, usize>,
    /// Jobs met in no index.
    pub repairs: &'a mut BTreeSet<JobId>,
    /// How long slots of each pool are held.
    pub held: &'a mut Held,
    /// Slots that this replica has granted by itself.
    pub open: &'a mut Open,
    /// Notifications about pools and upstreams that have come.
    pub notices: u64,
    /// Leases granted before this clock …
    pub spare_before: Clock,
    /// … are not reclaimed before this one.
    pub spare_until: Clock,
    /// Nobody waits for the answer any more.
    pub orphan: bool,
    /// The long poll's time is over: this is the last try.
    pub last_try: bool,
}

impl Cx<'_> {
    pub fn mark(&mut self, mark: Mark) {
        self.marks.push(mark);
    }
}

/// One request's, or one sweep's, way through the store.
pub(crate) trait Operation {
    /// From the beginning, also after a lost race.
    fn start(&mut self, cx: &mut Cx<'_>) -> Next;

    /// What was read.
    fn read(&mut self, snapshot: Snapshot, cx: &mut Cx<'_>) -> Next;

    /// Every transaction of the plan has been answered for certain.
    fn answered(&mut self, clock: Clock, answers: Vec<Answer>, cx: &mut Cx<'_>) -> Next;

    /// The outcome was unknown and has been settled: it was applied.
    fn settled(&mut self, clock: Clock, cx: &mut Cx<'_>) -> Next {
        let _ = (clock, cx);
        Next::fail(Failure::OutcomeUnknown { retry_after_ms: 1_000 })
    }

    /// The outcome is unknown and there is no evidence to read.
    fn doubtful(&mut self, cx: &mut Cx<'_>) -> Next {
        self.start(cx)
    }
}

/// Whether one of the alternatives was applied.
pub(crate) fn applied(answers: &[Answer]) -> bool {
    answers.iter().any(|a| matches!(a, Answer::Applied { .. }))
}

/// Queue settings as last read, so that a claim need not read them: its guards tell if they are old.
#[derive(Clone, Debug, Default, serde::Serialize, serde::Deserialize)]
pub(crate) struct Queues {
    known: BTreeMap<(String, String), QueueInfo>,
}

/// The record `queue/…` with its version; a queue without one has the defaults.
#[derive(Clone, Debug, Default, serde::Serialize, serde::Deserialize)]
pub(crate) struct QueueInfo {
    pub version: Option<Version>,
    pub record: QueueRecord,
}

impl QueueInfo {
    pub fn decode(record: &Record) -> Result<QueueInfo, Undecodable> {
        match (record.version(), record.bytes()) {
            (Some(version), Some(bytes)) => Ok(QueueInfo { version: Some(version), record: codec::decode(bytes)? }),
            _ => Ok(QueueInfo::default()),
        }
    }

    /// That the queue's record is still as it was read.
    pub fn guard(&self, key: Name) -> Guard {
        match self.version {
            Some(version) => Guard::At(key, version),
            None => Guard::Absent(key),
        }
    }
}

impl Queues {
    pub fn get(&self, tenant: &str, queue: &str) -> Option<&QueueInfo> {
        // The pair is rebuilt for the look-up: cheap next to what a claim costs.
        self.known.get(&(String::from(tenant), String::from(queue)))
    }

    pub fn put(&mut self, tenant: &str, queue: &str, info: QueueInfo) {
        if self.known.len() >= limits::QUEUE_CACHE {
            self.known.clear();
        }
        self.known.insert((tenant.into(), queue.into()), info);
    }

    pub fn forget(&mut self, tenant: &str, queue: &str) {
        self.known.remove(&(String::from(tenant), String::from(queue)));
    }
}

/// A record that must be there and readable.
pub(crate) fn decode_record<T: for<'a> serde::Deserialize<'a>>(
    record: &Record,
) -> Result<Option<(Version, T)>, Undecodable> {
    match record {
        Record::Absent => Ok(None),
        Record::Present { version, bytes: Some(bytes), .. } => Ok(Some((*version, codec::decode(bytes)?))),
        Record::Present { bytes: None, .. } => Err(Undecodable::Corrupt),
    }
}
