//! What stands in the store of each job, followed change by change.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use leasehold_core::codec;
use leasehold_core::group::record::Group;
use leasehold_core::ids::GroupId;
use leasehold_core::job::record::{
    ChildOutcome, Class, History, Job, KeyRecord, Lease, ProgressRecord, QueueRecord, Status,
};
use leasehold_core::store::engine::{Change, Effects, Stored};
use leasehold_core::store::model::Model;
use leasehold_core::store::{Clock, Score, Version, keys};
use leasehold_core::{JobId, Name, Token};

use super::groups::{Book, GroupFacts};
use super::keys::KeyFact;
use super::{Moment, Oracle};

/// A record with what it says.
#[derive(Clone, Debug, PartialEq)]
pub struct Rec<T> {
    pub version: Version,
    pub at: Clock,
    pub expiry: Option<Clock>,
    /// `None`: it cannot be read.
    pub value: Option<T>,
}

impl<T> Rec<T> {
    pub fn lives(&self, clock: Clock) -> bool {
        self.expiry.is_none_or(|e| e > clock)
    }
}

/// The status index that a job stands in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    pub queue: u16,
    pub class: Class,
    pub status: Status,
}

/// Everything about one job. Records may have expired: ask with the clock.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Facts {
    pub main: Option<Rec<Arc<Job>>>,
    pub lease: Option<Rec<Arc<Lease>>>,
    pub history: Option<Rec<Arc<History>>>,
    pub progress: Option<Rec<Version>>,
    /// The number of that report, if it has one.
    pub progress_seq: Option<u64>,
    pub payload: Option<Rec<bytes::Bytes>>,
    pub result: Option<Rec<bytes::Bytes>>,
    pub places: Vec<(Place, Score)>,
    pub leases: Option<Score>,
    pub due: Option<Score>,
    pub ttl: Option<Score>,
    pub quarantined: bool,
    /// A child's places in its group's books.
    pub books: Vec<(Book, Score)>,
}

impl Facts {
    /// The job's record, unless it has expired, cannot be read, or is a stub.
    pub fn job(&self, clock: Clock) -> Option<&Arc<Job>> {
        self.main.as_ref().filter(|m| m.lives(clock))?.value.as_ref().filter(|j| !j.deleted)
    }

    pub fn status(&self) -> Option<Status> {
        match self.places.as_slice() {
            [(place, _)] => Some(place.status),
            _ => None,
        }
    }

    pub fn is_live(&self, clock: Clock) -> bool {
        self.job(clock).is_some_and(|j| j.end.is_none()) && !self.quarantined
    }

    /// Whether it stands in any index of live jobs.
    pub fn stands_live(&self) -> bool {
        self.leases.or(self.due).or(self.ttl).is_some() || self.places.iter().any(|(p, _)| !p.status.is_terminal())
    }

    pub fn token(&self) -> Option<Token> {
        self.lease.as_ref().map(|l| Token { at: l.at, nonce: l.version })
    }

    /// When progress was last heard of under the present lease, or its grant.
    pub fn heard(&self) -> Option<Clock> {
        let lease = self.lease.as_ref()?;
        let progress = self.progress.as_ref().filter(|p| p.value == Some(lease.version));
        Some(progress.map_or(lease.at, |p| p.at))
    }

    /// Run and progress deadline of the present lease.
    pub fn deadline(&self) -> Option<Clock> {
        let policy = &self.main.as_ref()?.value.as_ref()?.policy;
        let after = |from: Clock, ms: Option<u64>| ms.map(|ms| from.saturating_add(ms.saturating_mul(1_000)));
        let run = after(self.lease.as_ref()?.at, policy.run_timeout_ms);
        [run, after(self.heard()?, policy.progress_timeout_ms)].into_iter().flatten().min()
    }

    pub fn describe(&self, clock: Clock) -> String {
        let rel = |at: Score| at as i64 / 1_000 - clock as i64 / 1_000;
        let places: Vec<String> =
            self.places.iter().map(|(p, s)| format!("{}@{:+}ms", p.status.text(), rel(*s))).collect();
        let main = match self.main.as_ref() {
            None => "no record".to_owned(),
            Some(m) => match &m.value {
                None => "unreadable".to_owned(),
                Some(j) => format!(
                    "{}attempts {}/{} deliveries {}/{}{}",
                    if m.lives(clock) { "" } else { "expired, " },
                    j.attempts,
                    j.policy.max_attempts,
                    j.deliveries,
                    j.policy.max_deliveries,
                    j.end.as_ref().map(|e| format!(" ended {} {:?}", e.status.text(), e.reason)).unwrap_or_default()
                ),
            },
        };
        let rest = [("leases", self.leases), ("due", self.due), ("ttl", self.ttl)]
            .into_iter()
            .filter_map(|(n, s)| Some(format!(" {n}@{:+}ms", rel(s?))))
            .collect::<String>();
        let lease = self.lease.as_ref().map(|l| format!(" lease {}", super::short(l.version))).unwrap_or_default();
        let books: String = self.books.iter().map(|(book, _)| format!(" {book:?}")).collect();
        format!("{main}; in [{}]{rest}{lease}{books}", places.join(" "))
    }

    fn moment(&self, change: u64, clock: Clock) -> Moment {
        let main = self.main.as_ref().and_then(|m| m.value.as_ref());
        Moment {
            change,
            status: self.status(),
            token: self.token(),
            present: self.job(clock).is_some(),
            expiry: self.main.as_ref().and_then(|m| m.expiry),
            payload: self.payload.as_ref().map(|p| p.expiry),
            attempts: main.map_or(0, |j| j.attempts) + u32::from(self.lease.is_some()),
            deliveries: main.map_or(0, |j| j.deliveries) + u32::from(self.lease.is_some()),
            deadline: self.deadline(),
        }
    }
}

/// What an index is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Index {
    Status(Place),
    Leases,
    Due,
    Ttl,
    Quarantine,
    /// Of the children of a group.
    Book(GroupId, Book),
    GroupsDue,
    GroupsOpen,
    GroupsEnded,
    Other,
}

/// Group and book of an index of children.
fn book(name: &Name) -> Option<Index> {
    let (kind, rest) = name.as_str()?.split_once('/')?;
    let (group, outcome) = rest.split_once('/').map_or((rest, None), |(group, outcome)| (group, Some(outcome)));
    let book = match (kind, outcome) {
        ("held", None) => Book::Held,
        ("released", None) => Book::Released,
        ("done", Some(text)) => Book::Done(ChildOutcome::ALL.into_iter().find(|o| o.text() == text)?),
        _ => return None,
    };
    Some(Index::Book(group.parse().ok()?, book))
}

/// Names of indexes, read once.
#[derive(Clone, Debug, Default)]
pub(crate) struct Indexes {
    known: BTreeMap<Name, Index>,
    pub queues: Vec<QueueCount>,
}

/// One tenant's queue: how many stand ready, and since which change there was always one.
#[derive(Clone, Debug)]
pub(crate) struct QueueCount {
    pub tenant: String,
    pub queue: String,
    pub ready: usize,
    pub ready_since: u64,
}

impl Indexes {
    pub fn queue(&mut self, tenant: &str, queue: &str) -> u16 {
        let found = self.queues.iter().position(|q| q.tenant == tenant && q.queue == queue);
        found.unwrap_or_else(|| {
            self.queues.push(QueueCount { tenant: tenant.into(), queue: queue.into(), ready: 0, ready_since: 0 });
            self.queues.len() - 1
        }) as u16
    }

    pub fn of(&mut self, name: &Name) -> Index {
        if let Some(index) = self.known.get(name) {
            return *index;
        }
        let index = if let Some((tenant, queue, class, status)) = keys::status_of(name) {
            let queue = self.queue(&tenant, &queue);
            Index::Status(Place { queue, class, status })
        } else if *name == keys::LEASES {
            Index::Leases
        } else if *name == keys::DUE {
            Index::Due
        } else if *name == keys::TTL {
            Index::Ttl
        } else if *name == keys::QUARANTINE {
            Index::Quarantine
        } else if *name == keys::GROUPS_DUE {
            Index::GroupsDue
        } else if *name == keys::GROUPS_OPEN {
            Index::GroupsOpen
        } else if *name == keys::GROUPS_ENDED {
            Index::GroupsEnded
        } else {
            book(name).unwrap_or(Index::Other)
        };
        self.known.insert(name.clone(), index);
        index
    }
}

/// What a transaction touched, as it was before.
#[derive(Clone, Debug, Default)]
pub(crate) struct Touched {
    pub jobs: BTreeMap<JobId, Facts>,
    pub groups: BTreeMap<GroupId, GroupFacts>,
    pub keys: BTreeMap<Name, Option<Rec<KeyRecord>>>,
    /// Something was not as the last change had left it.
    pub gap: Option<String>,
}

/// Everything about jobs and groups, as the store has it.
#[derive(Debug, Default)]
pub(crate) struct All {
    pub jobs: BTreeMap<JobId, Facts>,
    pub groups: BTreeMap<GroupId, GroupFacts>,
}

fn read<T>(stored: Option<&Stored>, decode: impl Fn(&[u8]) -> Option<T>) -> Option<Rec<T>> {
    stored.map(|s| Rec { version: s.version, at: s.at, expiry: s.expiry, value: decode(&s.bytes) })
}

/// The group that a record belongs to, and whether it is the mark.
fn of_group(key: &Name) -> Option<(GroupId, bool)> {
    let (prefix, rest) = key.as_str()?.split_once('/')?;
    match prefix {
        "group" => Some((rest.parse().ok()?, false)),
        "mark" => Some((rest.parse().ok()?, true)),
        _ => None,
    }
}

impl GroupFacts {
    fn record(&mut self, is_mark: bool, stored: Option<&Stored>) {
        match is_mark {
            true => self.mark = stored.map(|s| s.version),
            false => self.main = read(stored, |b| codec::decode::<Group>(b).ok().map(Arc::new)),
        }
    }

    fn score(&self, index: Index) -> Option<Score> {
        match index {
            Index::GroupsDue => self.due,
            Index::GroupsOpen => self.open,
            Index::GroupsEnded => self.ended,
            _ => None,
        }
    }

    fn enter(&mut self, index: Index, score: Option<Score>) {
        match index {
            Index::GroupsDue => self.due = score,
            Index::GroupsOpen => self.open = score,
            Index::GroupsEnded => self.ended = score,
            _ => {}
        }
    }
}

/// Job and prefix of a companion record's key.
fn companion(key: &Name) -> Option<(&'static str, JobId)> {
    let text = key.as_str()?;
    let (prefix, rest) = text.split_once('/')?;
    let prefix = ["job", "lease", "payload", "result", "history", "progress"].into_iter().find(|p| *p == prefix)?;
    Some((prefix, rest.parse().ok()?))
}

impl Facts {
    /// Version and expiry of a record.
    fn version(&self, prefix: &str) -> Option<(Version, Option<Clock>)> {
        fn of<T>(record: Option<&Rec<T>>) -> Option<(Version, Option<Clock>)> {
            record.map(|r| (r.version, r.expiry))
        }
        match prefix {
            "job" => of(self.main.as_ref()),
            "lease" => of(self.lease.as_ref()),
            "history" => of(self.history.as_ref()),
            "progress" => of(self.progress.as_ref()),
            "payload" => of(self.payload.as_ref()),
            _ => of(self.result.as_ref()),
        }
    }

    fn score(&self, index: Index) -> Option<Score> {
        match index {
            Index::Status(place) => self.places.iter().find(|(p, _)| *p == place).map(|(_, score)| *score),
            Index::Leases => self.leases,
            Index::Due => self.due,
            Index::Ttl => self.ttl,
            Index::Book(_, book) => self.books.iter().find(|(b, _)| *b == book).map(|(_, score)| *score),
            _ => None,
        }
    }

    fn record(&mut self, prefix: &str, stored: Option<&Stored>) {
        match prefix {
            "job" => self.main = read(stored, |b| codec::decode::<Job>(b).ok().map(Arc::new)),
            "lease" => self.lease = read(stored, |b| codec::decode::<Lease>(b).ok().map(Arc::new)),
            "history" => self.history = read(stored, |b| codec::decode::<History>(b).ok().map(Arc::new)),
            "progress" => {
                // One without a value is no report: it marks that the lease's end has been set.
                let report = |b: &[u8]| codec::decode::<ProgressRecord>(b).ok().filter(|p| !p.value.is_empty());
                self.progress_seq = stored.and_then(|s| report(&s.bytes)?.seq);
                self.progress = read(stored, |b| report(b).map(|p| p.lease));
            }
            "payload" => self.payload = read(stored, |b| Some(bytes::Bytes::copy_from_slice(b))),
            _ => self.result = read(stored, |b| Some(bytes::Bytes::copy_from_slice(b))),
        }
    }

    fn enter(&mut self, index: Index, score: Option<Score>) {
        match index {
            Index::Status(place) => {
                self.places.retain(|(p, _)| *p != place);
                if let Some(score) = score {
                    self.places.push((place, score));
                }
            }
            Index::Leases => self.leases = score,
            Index::Due => self.due = score,
            Index::Ttl => self.ttl = score,
            Index::Quarantine => self.quarantined = score.is_some(),
            Index::Book(_, book) => {
                self.books.retain(|(b, _)| *b != book);
                if let Some(score) = score {
                    self.books.push((book, score));
                    self.books.sort_unstable();
                }
            }
            Index::GroupsDue | Index::GroupsOpen | Index::GroupsEnded | Index::Other => {}
        }
    }
}

impl Oracle {
    /// Takes over what a transaction changed; returns how it was before.
    pub(super) fn follow(&mut self, effects: &Effects, clock: Clock) -> Touched {
        let mut touched = Touched::default();
        for change in &effects.changes {
            if let Some(gap) = self.gap(change, clock) {
                touched.gap.get_or_insert(gap);
            }
            match change {
                Change::Record { key, new, .. } => self.follow_record(key, new.as_ref(), &mut touched),
                Change::Member { index, member, old, new } => {
                    let at = self.indexes.of(index);
                    self.count(at, *old, *new);
                    match at {
                        Index::Other => {}
                        Index::GroupsDue | Index::GroupsOpen | Index::GroupsEnded => {
                            let Some(group) = keys::group_of(member) else { continue };
                            self.touch_group(group, &mut touched).enter(at, *new);
                        }
                        _ => {
                            let Some(job) = keys::job_of(member) else { continue };
                            self.touch(job, &mut touched).enter(at, *new);
                        }
                    }
                }
            }
        }
        self.tally_touched(&mut touched);
        touched
    }

    /// What a change says was there, if that is not what the last one left.
    fn gap(&mut self, change: &Change, clock: Clock) -> Option<String> {
        match change {
            Change::Record { key, old, .. } => {
                let known = if let Some((prefix, job)) = companion(key) {
                    self.jobs.get(&job).and_then(|t| t.facts.version(prefix))
                } else if let Some((group, is_mark)) = of_group(key) {
                    self.groups.get(&group).and_then(|t| match is_mark {
                        true => t.facts.mark.map(|version| (version, None)),
                        false => t.facts.main.as_ref().map(|r| (r.version, r.expiry)),
                    })
                } else if key.starts_with(b"key/") {
                    let record = self.keys.get(key).and_then(|fact| fact.record.as_ref());
                    record.map(|r| (r.version, r.expiry))
                } else {
                    return None;
                };
                // What has expired the store may have collected.
                let known = known.filter(|(_, expiry)| old.is_some() || expiry.is_none_or(|e| e > clock));
                let (known, old) = (known.map(|(version, _)| version), old.as_ref().map(|s| s.version));
                (known != old).then(|| format!("{key} was {known:?} and is found to be {old:?}"))
            }
            Change::Member { index, member, old, .. } => {
                let at = self.indexes.of(index);
                let known = match at {
                    Index::Other => return None,
                    Index::GroupsDue | Index::GroupsOpen | Index::GroupsEnded => {
                        let facts = keys::group_of(member).and_then(|group| self.groups.get(&group)).map(|t| &t.facts);
                        facts.and_then(|f| f.score(at))
                    }
                    Index::Quarantine => return None,
                    _ => {
                        let facts = keys::job_of(member).and_then(|job| self.jobs.get(&job)).map(|t| &t.facts);
                        facts.and_then(|f| f.score(at))
                    }
                };
                (known != *old).then(|| format!("{member} in {index} was @{known:?} and is found @{old:?}"))
            }
        }
    }

    fn touch(&mut self, job: JobId, touched: &mut Touched) -> &mut Facts {
        let track = self.jobs.entry(job).or_default();
        touched.jobs.entry(job).or_insert_with(|| track.facts.clone());
        &mut track.facts
    }

    fn touch_group(&mut self, group: GroupId, touched: &mut Touched) -> &mut GroupFacts {
        let track = self.groups.entry(group).or_default();
        touched.groups.entry(group).or_insert_with(|| track.facts.clone());
        &mut track.facts
    }

    /// Moves what was touched in its group's counts; a group whose child was touched is touched as well.
    fn tally_touched(&mut self, touched: &mut Touched) {
        for (job, before) in &touched.jobs {
            let Some((group, _)) = job.child_of() else { continue };
            let Some(after) = self.jobs.get(job).map(|t| &t.facts) else { continue };
            let track = self.groups.entry(group).or_default();
            touched.groups.entry(group).or_insert_with(|| track.facts.clone());
            track.tally.take(before);
            track.tally.give(after);
        }
    }

    fn follow_record(&mut self, key: &Name, new: Option<&Stored>, touched: &mut Touched) {
        if let Some((prefix, job)) = companion(key) {
            self.touch(job, touched).record(prefix, new);
        } else if let Some((group, is_mark)) = of_group(key) {
            self.touch_group(group, touched).record(is_mark, new);
        } else if key.starts_with(b"key/") {
            let fact = self.keys.entry(key.clone()).or_default();
            touched.keys.entry(key.clone()).or_insert_with(|| fact.record.clone());
            fact.record = read(new, |b| codec::decode::<KeyRecord>(b).ok());
            fact.note(self.change);
        } else if key.starts_with(b"queue/") {
            let paused = new.and_then(|s| codec::decode::<QueueRecord>(&s.bytes).ok()).is_some_and(|q| q.paused);
            self.queues.entry(key.clone()).or_default().note(self.change, paused);
        }
    }

    fn count(&mut self, index: Index, old: Option<Score>, new: Option<Score>) {
        let Index::Status(Place { queue, status: Status::Queued, .. }) = index else { return };
        let Some(count) = self.indexes.queues.get_mut(usize::from(queue)) else { return };
        match (old, new) {
            (None, Some(_)) => {
                if count.ready == 0 {
                    count.ready_since = self.change;
                }
                count.ready += 1;
            }
            (Some(_), None) => count.ready = count.ready.saturating_sub(1),
            _ => {}
        }
    }

    /// Notes where a job stands now.
    pub(super) fn note(&mut self, job: JobId) {
        let change = self.change;
        let Some(track) = self.jobs.get_mut(&job) else { return };
        // A stub or an expired record is told apart by the asker's clock; here only by its flags.
        let moment = track.facts.moment(change, 0);
        if track.moments.last().is_none_or(|last| Moment { change, ..last.clone() } != moment) {
            track.moments.push(moment);
        }
        if let (Some(token), Some(end)) = (track.facts.token(), track.facts.leases)
            && let Some(grant) = track.grants.iter_mut().find(|g| g.token == token)
        {
            grant.high = grant.high.max(end);
        }
    }

    pub(super) fn lose_record(&mut self, key: &Name, left: Option<&Stored>) {
        let mut touched = Touched::default();
        self.follow_record(key, left, &mut touched);
        self.tally_touched(&mut touched);
        for job in touched.jobs.keys() {
            self.excuse(*job);
        }
        for group in touched.groups.keys() {
            self.excuse_group(*group);
        }
        if let Some(fact) = self.keys.get_mut(key) {
            fact.damaged = true;
        }
        if let Some(fact) = self.queues.get_mut(key) {
            fact.damaged = true;
        }
    }

    pub(super) fn lose_entry(&mut self, index: &Name, member: &Name) {
        let at = self.indexes.of(index);
        self.count(at, Some(0), None);
        let mut touched = Touched::default();
        if let Some(group) = keys::group_of(member) {
            self.touch_group(group, &mut touched).enter(at, None);
            self.excuse_group(group);
        }
        let Some(job) = keys::job_of(member).filter(|_| at != Index::Other) else { return };
        self.touch(job, &mut touched).enter(at, None);
        self.tally_touched(&mut touched);
        self.excuse(job);
        if let Some((group, _)) = job.child_of() {
            self.excuse_group(group);
        }
    }

    fn excuse(&mut self, job: JobId) {
        if let Some(track) = self.jobs.get_mut(&job) {
            track.excused = true;
            track.disturbed = true;
            track.damaged = true;
        }
        self.note(job);
    }

    /// Reads everything anew from the store.
    pub(super) fn rebuild(&mut self, model: &Model) {
        let mut fresh = self.read_all(model);
        let jobs: BTreeSet<JobId> = self.jobs.keys().chain(fresh.jobs.keys()).copied().collect();
        for job in jobs {
            let facts = fresh.jobs.remove(&job).unwrap_or_default();
            let track = self.jobs.entry(job).or_default();
            if track.facts != facts {
                track.facts = facts;
                track.disturbed = true;
                // A life that had begun may have been undone.
                if let Some(main) = &track.facts.main
                    && main.value.as_ref().is_some_and(|j| j.deliveries == 0)
                {
                    track.born = main.at;
                }
                self.note(job);
            }
        }
        self.rebuild_groups(fresh.groups, model.clock());
        for (key, fact) in &mut self.keys {
            let record = model.records(key).find(|(k, _)| *k == key).map(|(_, s)| s);
            *fact = KeyFact { record: read(record, |b| codec::decode(b).ok()), ..KeyFact::default() };
            fact.damaged = true;
        }
        for (key, fact) in &mut self.queues {
            let record = model.records(key).find(|(k, _)| *k == key).map(|(_, s)| s.bytes.clone());
            let paused = record.and_then(|b| codec::decode::<QueueRecord>(&b).ok()).is_some_and(|q| q.paused);
            fact.note(self.change, paused);
        }
        for at in 0..self.indexes.queues.len() {
            let (tenant, queue) = (self.indexes.queues[at].tenant.clone(), self.indexes.queues[at].queue.clone());
            let ready = Class::ALL
                .into_iter()
                .filter_map(|c| model.books().get(&keys::status(&tenant, &queue, c, Status::Queued)))
                .map(leasehold_core::store::index::Index::len)
                .sum();
            self.indexes.queues[at].ready = ready;
            self.indexes.queues[at].ready_since = self.change;
        }
    }

    /// Every job's and group's facts as the store has them.
    pub(super) fn read_all(&mut self, model: &Model) -> All {
        let mut all = All::default();
        for (key, stored) in model.records(b"") {
            if let Some((prefix, job)) = companion(key) {
                all.jobs.entry(job).or_default().record(prefix, Some(stored));
            } else if let Some((group, is_mark)) = of_group(key) {
                all.groups.entry(group).or_default().record(is_mark, Some(stored));
            }
        }
        for (name, index) in model.books().iter() {
            let at = self.indexes.of(name);
            if at == Index::Other {
                continue;
            }
            for (member, score) in index.iter() {
                if let Some(job) = keys::job_of(member) {
                    all.jobs.entry(job).or_default().enter(at, Some(score));
                } else if let Some(group) = keys::group_of(member) {
                    all.groups.entry(group).or_default().enter(at, Some(score));
                }
            }
        }
        all
    }
}
