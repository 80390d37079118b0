//! The audit: reads the whole store in pages and says what does not balance.
//!
//! Two walks: over all records, each job's against the places that its state implies; and over all
//! indexes, each member's place against its record. Every page is judged in one snapshot, and every
//! transaction leaves the books balanced, so a live store shows nothing that is only under way. With
//! `repair`, what can be derived from the records is put right by the transactions of the scrub.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::format;
use alloc::string::{String, ToString as _};
use alloc::vec;
use alloc::vec::Vec;

use super::moves::{Home, as_read, remove};
use super::record::{ChildOutcome, Class, Job, KeyRecord, Owner, Status};
use super::scrub::{self, Found};
use crate::codec::{self, Undecodable};
use crate::failure::Failure;
use crate::ids::JobId;
use crate::limits;
use crate::name::Name;
use crate::pool::Check;
use crate::pool::record::{Pool, Slot};
use crate::replica::task::{Cx, Draft, Next, Operation, Plan, decode_record};
use crate::request::{Audited, Finding, Response};
use crate::store::{Answer, Clock, Entry, Guard, Place, Read, Record, Scan, Score, Slice, Snapshot, UpTo, Write, keys};

/// Members of one index that a page looks at.
const ENTRIES: usize = 100;

/// Where the walks stand.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
enum Cursor {
    Records(Option<Vec<u8>>),
    /// After this entry of `names`.
    Queues(Option<(Score, Name)>),
    /// One queue's indexes: its entry in `names`, the index, and after which of its members.
    Queue {
        name: (Score, Name),
        index: usize,
        after: Option<(Score, Name)>,
    },
    /// The indexes that belong to no queue.
    Shared {
        index: usize,
        after: Option<(Score, Name)>,
    },
}

/// The nine status indexes, `leases`, `due`, `ttl` and `names`.
const PLACES: usize = Status::ALL.len() + 4;
/// `held` and `released` of a child's group, and the five of `done`.
const CHILD: usize = 2 + ChildOutcome::ALL.len();
/// Indexes of jobs that belong to no queue.
const SHARED: [Name; 4] = [keys::LEASES, keys::DUE, keys::TTL, keys::QUARANTINE];
const QUEUE_INDEXES: usize = Status::ALL.len() * Class::ALL.len();

fn queue_index(tenant: &str, queue: &str, at: usize) -> (Name, Status) {
    let class = Class::ALL.get(at / Status::ALL.len()).copied().unwrap_or(Class::Batch);
    let status = Status::ALL.get(at % Status::ALL.len()).copied().unwrap_or(Status::Expired);
    (Home { tenant, queue, class }.index(status), status)
}

fn write(cursor: &Cursor) -> String {
    codec::encode(cursor).iter().map(|b| format!("{b:02x}")).collect()
}

fn parse(text: &str) -> Option<Cursor> {
    if !text.len().is_multiple_of(2) {
        return None;
    }
    let digits = text.as_bytes().chunks(2);
    let bytes: Option<Vec<u8>> =
        digits.map(|pair| u8::from_str_radix(core::str::from_utf8(pair).ok()?, 16).ok()).collect();
    codec::decode(&bytes?).ok()
}

#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct Audit {
    from: Cursor,
    repair: bool,
    stage: Stage,
    /// Where the next page begins; `None`: this is the last.
    next: Option<Cursor>,
    ids: Vec<JobId>,
    others: Vec<Name>,
    found: BTreeMap<JobId, Found>,
    done: Audited,
    drafts: Vec<Draft>,
    /// Parallel to `drafts`: the finding that each puts right.
    of: Vec<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
enum Stage {
    Walk,
    Records,
    Places,
    Names,
    Entries,
}

impl Audit {
    pub fn new(cursor: Option<String>, repair: bool) -> Result<Audit, Failure> {
        let from = match cursor {
            None => Cursor::Records(None),
            Some(text) => parse(&text).ok_or(Failure::BadCursor)?,
        };
        Ok(Audit {
            from,
            repair,
            stage: Stage::Walk,
            next: None,
            ids: Vec::new(),
            others: Vec::new(),
            found: BTreeMap::new(),
            done: Audited::default(),
            drafts: Vec::new(),
            of: Vec::new(),
        })
    }

    fn find(&mut self, subject: impl core::fmt::Display, what: impl Into<String>) -> usize {
        self.done.findings.push(Finding { subject: subject.to_string(), what: what.into(), repaired: false });
        self.done.findings.len() - 1
    }

    fn mend(&mut self, finding: usize, draft: Draft) {
        self.drafts.push(draft);
        self.of.push(finding);
    }

    /// The records of the page, so that it is known where each job is at home.
    fn records(&mut self) -> Next {
        self.stage = Stage::Records;
        let mut records: Vec<Name> = Vec::new();
        for id in &self.ids {
            records.extend([keys::job(*id), keys::lease(*id)]);
        }
        for key in &self.others {
            records.push(key.clone());
            // Whether its job is there.
            records.push(scrub::id_in(key).map_or_else(|| key.clone(), keys::job));
        }
        Next::Read(Read { records, ..Read::default() })
    }

    fn places(&mut self, snapshot: &Snapshot) -> Next {
        let (jobs, others) = snapshot.records.split_at((self.ids.len() * 2).min(snapshot.records.len()));
        let mut read = Read::default();
        for (id, pair) in self.ids.clone().iter().zip(jobs.chunks(2)) {
            let [main, lease] = pair else { continue };
            match decode_record::<Job>(main) {
                Ok(Some((_, job))) => {
                    self.done.jobs += 1;
                    let member = keys::member(*id);
                    let home = Home::from(&job);
                    read.members.extend(Status::ALL.into_iter().map(|s| (home.index(s), member.clone())));
                    read.members.extend(SHARED[..3].iter().map(|i| (i.clone(), member.clone())));
                    read.members.push((keys::NAMES, keys::queue_member(&job.tenant, &job.queue)));
                    if let Some((group, _)) = id.child_of() {
                        read.members.extend([keys::held(group), keys::released(group)].map(|i| (i, member.clone())));
                        let done = ChildOutcome::ALL.into_iter().map(|o| keys::done(group, o));
                        read.members.extend(done.map(|i| (i, member.clone())));
                    }
                    let key = job.key.as_ref().map_or(keys::job(*id), |(key, _)| keys::key(&job.tenant, key));
                    read.records.extend([keys::job(*id), keys::lease(*id), key]);
                    self.found.insert(*id, Found { main: main.clone(), lease: lease.clone(), job });
                }
                // Gone since the page was made.
                Ok(None) => {}
                Err(Undecodable::Newer) => {
                    self.find(id, "written by a newer release: audit it with that release");
                }
                Err(Undecodable::Corrupt) => {
                    self.done.quarantined += 1;
                    self.find(id, "its record cannot be read");
                }
            }
        }
        self.companions(others);
        if self.found.is_empty() {
            return self.finish();
        }
        // Of payloads it is enough that they are there: they come last, and need not be read.
        read.records.extend(self.found.keys().map(|id| keys::payload(*id)));
        self.stage = Stage::Places;
        Next::Read(read)
    }

    /// Records that are not a job's main one, each with its job's.
    fn companions(&mut self, records: &[Record]) {
        for (key, pair) in core::mem::take(&mut self.others).iter().zip(records.chunks(2)) {
            let [record @ Record::Present { version, expiry, .. }, main] = pair else { continue };
            let version = *version;
            // Another's bytes may have used up the answer's room: what was not read is not unreadable.
            let read = !record.is_unread();
            if key.starts_with(b"key/") && read {
                if let Err(Undecodable::Corrupt) = decode_record::<KeyRecord>(record) {
                    self.find(key, "its record cannot be read");
                }
            } else if let Some(id) = scrub::id_in(key) {
                if main.is_absent() {
                    let finding = self.find(key, "its job is gone");
                    let guards = vec![Guard::Absent(keys::job(id)), Guard::At(key.clone(), version)];
                    self.mend(finding, Draft::new(guards, vec![Write::Delete(key.clone())]));
                }
            } else if key.starts_with(&keys::POOL) && read {
                if let Err(Undecodable::Corrupt) = decode_record::<Pool>(record) {
                    self.find(key, "its record cannot be read");
                }
            } else if key.starts_with(b"slot/") && read {
                if let Err(Undecodable::Corrupt) = decode_record::<Slot>(record) {
                    self.find(key, "its record cannot be read");
                }
                if expiry.is_none() {
                    self.find(key, "never expires");
                }
            } else if (key.starts_with(b"claim/") || key.starts_with(b"ready/")) && expiry.is_none() {
                self.find(key, "never expires");
            }
        }
    }

    fn judge(&mut self, snapshot: &Snapshot, cx: &mut Cx<'_>) -> Next {
        let found = core::mem::take(&mut self.found);
        let (mains, payloads) = snapshot.records.split_at((found.len() * 3).min(snapshot.records.len()));
        let mut rest = snapshot.members.as_slice();
        let ids = self.ids.clone();
        let ids: Vec<JobId> = ids.into_iter().filter(|id| found.contains_key(id)).collect();
        for (id, (records, payload)) in ids.into_iter().zip(mains.chunks(3).zip(payloads)) {
            let (places, others) = rest.split_at(PLACES.min(rest.len()));
            let (child, others) = others.split_at(if id.child_of().is_some() { CHILD } else { 0 }.min(others.len()));
            rest = others;
            let (Some(f), [main, lease, key]) = (found.get(&id), records) else { continue };
            // What changed since it was read belongs to another moment, and is balanced by itself.
            if main.version() != f.main.version() {
                continue;
            }
            let seen = Seen { main, lease, key, payload, places, child, clock: snapshot.clock };
            self.job(id, &f.job, seen, cx);
        }
        self.finish()
    }

    fn job(&mut self, id: JobId, job: &Job, seen: Seen<'_>, cx: &mut Cx<'_>) {
        let before = self.done.findings.len();
        for what in unbalanced(id, job, &seen) {
            self.find(id, what);
        }
        if self.done.findings.len() == before {
            return;
        }
        let mut drafts = Vec::new();
        let found = Found { main: seen.main.clone(), lease: seen.lease.clone(), job: job.clone() };
        let held = id.child_of().is_some() && seen.child.get(1).is_some_and(Option::is_none);
        scrub::mend_job(id, &found, seen.places, held, seen.clock, cx.make, &mut drafts);
        drafts.extend(scrub::clear_job(id, &found, seen.places, seen.clock));
        for draft in drafts {
            self.mend(before, draft);
        }
    }

    /// A page of these indexes, the first from `after` on, with the jobs' records.
    fn entries(&mut self, indexes: impl Iterator<Item = Name>, mut after: Option<(Score, Name)>) -> Next {
        self.stage = Stage::Entries;
        let slices = indexes.map(|index| Slice {
            index,
            after: after.take(),
            up_to: UpTo::End,
            limit: ENTRIES,
            give: vec![keys::JOB, keys::LEASE],
        });
        Next::Read(Read { slices: slices.collect(), ..Read::default() })
    }

    fn names(&mut self, after: Option<(Score, Name)>) -> Next {
        self.stage = Stage::Names;
        let slice = Slice { index: keys::NAMES, after, up_to: UpTo::End, limit: 1, give: Vec::new() };
        Next::Read(Read { slices: vec![slice], ..Read::default() })
    }

    fn entered(&mut self, snapshot: &Snapshot) -> Next {
        let (name, first) = match &self.from {
            Cursor::Queue { name, index, .. } => (Some(name.clone()), *index),
            Cursor::Shared { index, .. } => (None, *index),
            Cursor::Records(_) | Cursor::Queues(_) => return self.finish(),
        };
        let queue = name.as_ref().and_then(|name| keys::queue_of(&name.1));
        let mut left = None;
        for (index, entries) in (first..).zip(&snapshot.slices) {
            self.done.entries += entries.len() as u64;
            // What did not fit into the answer is read with the next page.
            let read = entries.iter().take_while(|e| !e.records.iter().any(Record::is_unread)).count();
            for entry in entries.iter().take(read) {
                match &queue {
                    Some((tenant, queue)) => {
                        let (key, status) = queue_index(tenant, queue, index);
                        self.entry(entry, &key, Some((tenant, queue, status)), snapshot.clock);
                    }
                    None => {
                        let key = SHARED.get(index).cloned().unwrap_or(keys::QUARANTINE);
                        self.entry(entry, &key, None, snapshot.clock);
                    }
                }
            }
            if read < entries.len() || entries.len() >= ENTRIES {
                // A single entry always fits.
                let last = entries.get(read.max(1) - 1).map(|e| (e.score, e.member.clone()));
                left = Some((index, last));
                break;
            }
        }
        self.next = match (left, name) {
            (Some((index, after)), Some(name)) => Some(Cursor::Queue { name, index, after }),
            (Some((index, after)), None) => Some(Cursor::Shared { index, after }),
            (None, Some(name)) => Some(Cursor::Queues(Some(name))),
            (None, None) => None,
        };
        self.finish()
    }

    /// One member of an index against its record. What a job lacks is found from its record.
    fn entry(&mut self, entry: &Entry, index: &Name, home: Option<(&str, &str, Status)>, clock: Clock) {
        let Some(id) = keys::job_of(&entry.member) else {
            self.find(index, format!("`{}` is not a job", entry.member));
            return;
        };
        let [main, lease] = &*entry.records else { return };
        let what = match decode_record::<Job>(main) {
            Ok(Some((_, job))) => match home {
                Some((tenant, queue, _)) if job.tenant != tenant || job.queue != queue => {
                    format!("stands in {index}, but is at home in {}/{}", job.tenant, job.queue)
                }
                Some((_, _, status)) if job.end.as_ref().is_some_and(|e| e.status != status) => {
                    format!("has ended, but stands in {index}")
                }
                Some((_, _, status)) if job.end.is_none() && status.is_terminal() => {
                    format!("lives, but stands in {index}")
                }
                None if job.end.is_some() => format!("has ended, but stands in {index}"),
                _ => return,
            },
            // Its time is over: it is trimmed when its turn comes.
            Ok(None) if home.is_some_and(|(_, _, status)| status.is_terminal()) && entry.score <= clock => return,
            Ok(None) => format!("stands in {index}, but its record is gone"),
            Err(_) => return,
        };
        let finding = self.find(id, what);
        let guards = vec![as_read(keys::job(id), main), as_read(keys::lease(id), lease)];
        self.mend(finding, Draft::new(guards, vec![remove(index.clone(), &entry.member)]));
    }

    fn finish(&mut self) -> Next {
        if self.repair && !self.drafts.is_empty() {
            return Next::Commit(Plan::new(core::mem::take(&mut self.drafts)));
        }
        self.reply()
    }

    fn reply(&mut self) -> Next {
        let mut done = core::mem::take(&mut self.done);
        // Last come the pools.
        done.next = Some(self.next.take().as_ref().map_or_else(Check::begin, write));
        Next::ok(Response::Audited(done))
    }
}

/// A job's records and places in one snapshot.
struct Seen<'a> {
    main: &'a Record,
    lease: &'a Record,
    /// Its idempotency key's record; without a key its own.
    key: &'a Record,
    payload: &'a Record,
    /// In the nine status indexes, then `leases`, `due`, `ttl`, `names`.
    places: &'a [Option<Place>],
    /// A child's: in `held` and `released` of its group, then in the five of `done`.
    child: &'a [Option<Place>],
    clock: Clock,
}

/// What is wrong with one job.
fn unbalanced(id: JobId, job: &Job, seen: &Seen<'_>) -> Vec<String> {
    let mut wrong = Vec::new();
    let Some((statuses, [leases, due, ttl, name])) = seen.places.split_at_checked(Status::ALL.len()) else {
        return wrong;
    };
    let stands: Vec<(Status, Score)> =
        Status::ALL.into_iter().zip(statuses).filter_map(|(s, p)| p.map(|p| (s, p.score))).collect();
    let expiry = match seen.main {
        Record::Present { expiry, .. } => *expiry,
        Record::Absent => return wrong,
    };
    if job.deleted {
        if !stands.is_empty() || leases.or(*due).or(*ttl).is_some() {
            wrong.push("was deleted, but stands in an index".into());
        }
        return wrong;
    }
    let (status, score) = match stands.as_slice() {
        [one] => *one,
        [] => return vec!["stands in no status index".into()],
        many => {
            let names: Vec<&str> = many.iter().map(|(s, _)| s.text()).collect();
            return vec![format!("stands in {} status indexes: {}", many.len(), names.join(", "))];
        }
    };
    if name.is_none() {
        wrong.push("its queue's name is not known".into());
    }
    wrong.extend(unbalanced_child(id, status, seen));
    if let Some(end) = &job.end {
        if status != end.status {
            wrong.push(format!("ended {}, but stands in {}", end.status.text(), status.text()));
        } else if Some(score) != expiry && id.child_of().is_none() {
            wrong.push("its place is not scored by its record's expiry".into());
        }
        if !seen.lease.is_absent() || leases.or(*due).or(*ttl).is_some() {
            wrong.push("has ended, but has a lease or stands among live jobs".into());
        }
        return wrong;
    }
    if status.is_terminal() {
        wrong.push(format!("has not ended, but stands in {}", status.text()));
        return wrong;
    }
    if expiry.is_some() {
        wrong.push("lives, but its record expires".into());
    }
    match seen.payload {
        Record::Absent => wrong.push("lives, but its payload is gone".into()),
        Record::Present { expiry: Some(_), .. } => wrong.push("lives, but its payload expires".into()),
        Record::Present { .. } => {}
    }
    let running = status == Status::Running;
    match (running, seen.lease.is_absent(), leases) {
        (true, false, Some(_)) | (false, true, None) => {}
        (true, true, _) => wrong.push("runs without a lease".into()),
        (true, false, None) => wrong.push("runs, but its lease has no end".into()),
        (false, ..) => wrong.push(format!("is {}, but has a lease or an entry in `leases`", status.text())),
    }
    let waits = matches!(status, Status::Scheduled | Status::Retrying);
    if waits != due.is_some() || due.is_some_and(|d| d.score != score) {
        wrong.push(format!("is {}, and {} in `due`", status.text(), if due.is_some() { "wrongly" } else { "not" }));
    }
    let deadline = job.policy.queue_ttl_ms.is_some() && job.deliveries == 0 && !running;
    if deadline != ttl.is_some() {
        wrong.push(format!("is {} in `ttl`", if deadline { "not" } else { "wrongly" }));
    }
    if let Some((key, version)) = &job.key {
        let bound = match decode_record::<KeyRecord>(seen.key) {
            Ok(Some((v, record))) => v == *version && record.owner == Owner::Job(id),
            Ok(None) => false,
            // Too large an answer, or one of a newer release, says nothing.
            Err(Undecodable::Newer) => true,
            Err(Undecodable::Corrupt) => seen.key.is_unread(),
        };
        if !bound {
            wrong.push(format!("its key of {} bytes is not bound to it", key.len()));
        }
    }
    wrong
}

/// What is wrong with a child's place in its group.
fn unbalanced_child(id: JobId, status: Status, seen: &Seen<'_>) -> Option<String> {
    id.child_of()?;
    let (places, done) = seen.child.split_at_checked(2)?;
    let mut stands: Vec<&str> =
        ["held", "released"].into_iter().zip(places).filter_map(|(name, p)| p.map(|_| name)).collect();
    stands.extend(ChildOutcome::ALL.into_iter().zip(done).filter_map(|(o, p)| p.map(|_| o.text())));
    let expected = match (ChildOutcome::of(status), status) {
        (Some(outcome), _) => outcome.text(),
        (None, Status::Held) => "held",
        (None, _) => "released",
    };
    (stands != [expected]).then(|| format!("is {}, but stands in its group's [{}]", status.text(), stands.join(", ")))
}

impl Operation for Audit {
    fn start(&mut self, _: &mut Cx<'_>) -> Next {
        self.done = Audited::default();
        self.drafts.clear();
        self.of.clear();
        self.found.clear();
        self.next = None;
        match self.from.clone() {
            Cursor::Records(cursor) => {
                self.stage = Stage::Walk;
                let scan = Scan { cursor: cursor.map(Into::into), limit: limits::SCRUB_KEYS };
                Next::Read(Read { scan: Some(scan), ..Read::default() })
            }
            Cursor::Queues(after) => self.names(after),
            Cursor::Queue { name, index, after } => match keys::queue_of(&name.1) {
                Some((tenant, queue)) => {
                    self.entries((index..QUEUE_INDEXES).map(|at| queue_index(&tenant, &queue, at).0), after)
                }
                None => self.names(Some(name)),
            },
            Cursor::Shared { index, after } => self.entries(SHARED.into_iter().skip(index), after),
        }
    }

    fn read(&mut self, snapshot: Snapshot, cx: &mut Cx<'_>) -> Next {
        self.done.at = snapshot.clock;
        match self.stage {
            Stage::Walk => {
                let page = snapshot.scan.unwrap_or_else(|| crate::store::ScanPage { keys: Vec::new(), cursor: None });
                self.next = Some(match page.cursor {
                    Some(cursor) => Cursor::Records(Some(cursor.to_vec())),
                    None => Cursor::Queues(None),
                });
                self.done.records += page.keys.len() as u64;
                let (main, others): (Vec<Name>, Vec<Name>) =
                    page.keys.into_iter().partition(|k| k.starts_with(b"job/"));
                let ids: BTreeSet<JobId> = main.iter().filter_map(scrub::id_in).collect();
                self.ids = ids.into_iter().collect();
                self.others = others;
                // Those that are looked into before those of which it is enough that they are there.
                self.others.sort_by_key(|key| scrub::id_in(key).is_some());
                if self.ids.is_empty() && self.others.is_empty() { self.finish() } else { self.records() }
            }
            Stage::Records => self.places(&snapshot),
            Stage::Places => self.judge(&snapshot, cx),
            Stage::Names => {
                let entry = snapshot.slices.into_iter().flatten().next();
                self.next = Some(match entry {
                    Some(e) => Cursor::Queue { name: (e.score, e.member), index: 0, after: None },
                    None => Cursor::Shared { index: 0, after: None },
                });
                self.finish()
            }
            Stage::Entries => self.entered(&snapshot),
        }
    }

    fn answered(&mut self, _: Clock, answers: Vec<Answer>, cx: &mut Cx<'_>) -> Next {
        for (finding, answer) in self.of.iter().zip(&answers) {
            if matches!(answer, Answer::Applied { .. })
                && let Some(finding) = self.done.findings.get_mut(*finding)
            {
                finding.repaired = true;
                cx.stats.reindexed += 1;
            }
        }
        self.reply()
    }

    fn doubtful(&mut self, _: &mut Cx<'_>) -> Next {
        // Nothing is said to have been repaired; the next audit tells.
        self.reply()
    }
}
