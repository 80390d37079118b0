//! The scrub: walks all records slowly and puts back index entries that were lost; walks the indexes
//! and removes members whose records are gone.
//!
//! Where a job belongs that stands nowhere: with a lease it is running; due later it is scheduled or
//! retrying; else it is queued, at its due.

use alloc::boxed::Box;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;
use bytes::Bytes;

use super::lease::Granted;
use super::look::derived;
use super::moves::{self, Home, add, as_read, remove};
use super::record::{ChildOutcome, Class, Job, KeyRecord, Status};
use crate::codec::Undecodable;
use crate::event::Kind;
use crate::group::Mend;
use crate::ids::{JobId, Maker};
use crate::limits;
use crate::name::Name;
use crate::replica::task::{Cx, Draft, Next, Operation, Plan, decode_record};
use crate::replica::{Mark, Op};
use crate::request::Response;
use crate::store::{
    Answer, Clock, Entry, Guard, Place, Read, Record, SCORE_MAX, Scan, Score, ScoreAt, Slice, Snapshot, Standing, UpTo,
    Version, Write, keys,
};

/// Where the walks stand.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Cursor {
    records: Option<Bytes>,
    /// The queue done last (by its entry in `names`), the one under way, and the position in its live
    /// indexes. A name's score moves on while its queue is walked, so the latter is kept by name.
    queue: Option<(Score, Name)>,
    current: Option<(Score, Name)>,
    index: usize,
    after: Option<(Score, Name)>,
}

#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct Scrub {
    pub cursor: Cursor,
    stage: Stage,
    /// Jobs asked for by name, instead of a page of the walk.
    only: Vec<JobId>,
    ids: Vec<JobId>,
    keys: Vec<Name>,
    queue: Option<(String, String)>,
    found: BTreeMap<JobId, Found>,
    /// Pools, and the record that each was met in: those that nobody tidies are to be known again.
    pools: BTreeMap<Name, (Name, Version)>,
    /// Idempotency keys, their versions, and the main records of whom they name.
    bound: Vec<(Name, Version, Name)>,
    drafts: Vec<Draft>,
    did: Vec<Mark>,
}

#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub(super) struct Found {
    pub main: Record,
    pub lease: Record,
    pub job: Job,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
enum Stage {
    Walk,
    Records,
    Places,
    Ghosts,
}

impl Scrub {
    pub fn page(cursor: Cursor) -> Scrub {
        Scrub {
            cursor,
            stage: Stage::Walk,
            only: Vec::new(),
            ids: Vec::new(),
            keys: Vec::new(),
            queue: None,
            found: BTreeMap::new(),
            pools: BTreeMap::new(),
            bound: Vec::new(),
            drafts: Vec::new(),
            did: Vec::new(),
        }
    }

    pub fn jobs(ids: Vec<JobId>) -> Scrub {
        Scrub { only: ids, ..Scrub::page(Cursor::default()) }
    }

    fn records(&mut self) -> Next {
        self.stage = Stage::Records;
        let mut records = Vec::new();
        for id in &self.ids {
            records.push(keys::job(*id));
            records.push(keys::lease(*id));
        }
        // Idempotency keys before companions: of these it is enough that they are there.
        self.keys.sort_by_key(|k| !k.starts_with(b"key/"));
        records.extend(self.keys.iter().cloned());
        Next::Read(Read { records, max_bytes: PAGE_BYTES, ..Read::default() })
    }

    fn places(&mut self, snapshot: &Snapshot, cx: &mut Cx<'_>) -> Next {
        let (jobs, rest) = snapshot.records.split_at((self.ids.len() * 2).min(snapshot.records.len()));
        let mut read = Read::default();
        let mut known = BTreeSet::new();
        for (id, pair) in self.ids.clone().iter().zip(jobs.chunks(2)) {
            let [main, lease] = pair else { continue };
            if !main.is_absent() {
                known.insert(*id);
            }
            match decode_record::<Job>(main) {
                // Where it stands is judged by its lease.
                _ if lease.is_newer() => cx.mark(Mark::NewerFormat),
                Ok(Some((_, job))) => {
                    let member = keys::member(*id);
                    let home = Home::from(&job);
                    read.members.extend(Status::ALL.into_iter().map(|s| (home.index(s), member.clone())));
                    read.members.extend([keys::LEASES, keys::DUE, keys::TTL].map(|i| (i, member.clone())));
                    read.members.push((keys::NAMES, keys::queue_member(&job.tenant, &job.queue)));
                    read.members.extend(id.child_of().map(|(group, _)| (keys::released(group), member)));
                    self.found.insert(*id, Found { main: main.clone(), lease: lease.clone(), job });
                    // The places are judged against the records of the same moment.
                    read.records.push(keys::job(*id));
                    read.records.push(keys::lease(*id));
                }
                Ok(None) if lease.is_absent() => {}
                // A lease without its job, whose entry in `leases` may be lost as well.
                Ok(None) => {
                    let granted = Granted::read(lease);
                    let home = granted.as_ref().map(|g| Home::from(&g.lease));
                    let guards = vec![as_read(keys::lease(*id), lease)];
                    let drafts = moves::lost_once(*id, home, &[], guards, cx.make.version());
                    self.either(drafts, Mark::JobLost);
                }
                Err(_) if main.is_unread() => {}
                Err(Undecodable::Newer) => cx.mark(Mark::NewerFormat),
                Err(Undecodable::Corrupt) => {
                    let granted = Granted::read(lease);
                    let home = granted.as_ref().map(|g| Home::from(&g.lease));
                    let mut guards = vec![as_read(keys::lease(*id), lease)];
                    guards.push(Guard::Member(keys::QUARANTINE, keys::member(*id), Standing::Out));
                    let own = cx.make.version();
                    self.draft(moves::quarantine(*id, home, main, guards, own), Mark::JobQuarantined);
                }
            }
        }
        // Keys that name somebody who is gone, and companions of a main record that is gone.
        let mut gone = Vec::new();
        for (key, record) in self.keys.iter().zip(rest) {
            let Some(version) = record.version() else { continue };
            if let Some(pool) = keys::pool_in(key) {
                if crate::pool::is_used(key, record) {
                    self.pools.insert(keys::pool_member(&pool), (key.clone(), version));
                }
                continue;
            }
            match decode_record::<KeyRecord>(record) {
                Ok(Some((_, bound))) if key.starts_with(b"key/") => {
                    self.bound.push((key.clone(), version, keys::owner(bound.owner)));
                }
                _ => gone.extend(
                    id_in(key).filter(|id| !known.contains(id)).map(|id| (key.clone(), version, keys::job(id))),
                ),
            }
        }
        for (key, version, owner) in gone {
            self.ownerless(key, version, owner);
        }
        if self.found.is_empty() && self.bound.is_empty() && self.pools.is_empty() {
            return self.ghosts();
        }
        read.members.extend(self.pools.keys().map(|pool| (keys::POOLS, pool.clone())));
        read.records.extend(self.bound.iter().map(|(_, _, owner)| owner.clone()));
        self.stage = Stage::Places;
        Next::Read(read)
    }

    fn ownerless(&mut self, key: Name, version: Version, owner: Name) {
        let guards = vec![Guard::Absent(owner), Guard::At(key.clone(), version)];
        self.draft(Draft::new(guards, vec![Write::Delete(key)]), Mark::GhostRemoved);
    }

    /// Alternatives, at most one of which applies.
    fn either(&mut self, drafts: Vec<Draft>, mark: Mark) {
        drafts.into_iter().for_each(|draft| self.draft(draft, mark));
    }

    fn draft(&mut self, draft: Draft, mark: Mark) {
        self.drafts.push(draft);
        self.did.push(mark);
    }

    fn mend(&mut self, snapshot: &Snapshot, cx: &mut Cx<'_>) {
        let found = core::mem::take(&mut self.found);
        let (jobs, owners) = snapshot.records.split_at((found.len() * 2).min(snapshot.records.len()));
        for ((key, version, owner), record) in core::mem::take(&mut self.bound).into_iter().zip(owners) {
            if record.is_absent() {
                self.ownerless(key, version, owner);
            }
        }
        let pools = core::mem::take(&mut self.pools);
        let (places, known) = snapshot.members.split_at(snapshot.members.len().saturating_sub(pools.len()));
        for ((pool, (key, version)), place) in pools.into_iter().zip(known) {
            if place.is_none() {
                let guards = vec![Guard::At(key, version), Guard::Member(keys::POOLS, pool.clone(), Standing::Out)];
                let draft = Draft::new(guards, vec![add(keys::POOLS, &pool, ScoreAt::Clock(0))]);
                self.draft(draft, Mark::JobReindexed);
            }
        }
        let ids = self.ids.iter().filter(|id| found.contains_key(id));
        let mut drafts = Vec::new();
        let mut rest = places;
        for (id, pair) in ids.zip(jobs.chunks(2)) {
            let (places, others) = rest.split_at(PLACES.min(rest.len()));
            let (released, others) = others.split_at(usize::from(id.child_of().is_some()).min(others.len()));
            rest = others;
            let (Some(f), [main, lease]) = (found.get(id), pair) else { continue };
            if main.version() != f.main.version() || lease.version() != f.lease.version() {
                continue;
            }
            let held = released.first().is_some_and(Option::is_none);
            mend_job(*id, f, places, held, snapshot.clock, cx.make, &mut drafts);
        }
        for draft in drafts {
            self.draft(draft, Mark::JobReindexed);
        }
    }

    /// A page of one queue's live indexes.
    fn ghosts(&mut self) -> Next {
        if !self.only.is_empty() {
            return self.commit();
        }
        self.stage = Stage::Ghosts;
        if self.queue.is_none() {
            self.queue = self.cursor.current.as_ref().and_then(|(_, member)| keys::queue_of(member));
        }
        let names = Slice {
            index: keys::NAMES,
            after: self.cursor.queue.clone(),
            up_to: UpTo::End,
            limit: 1,
            give: Vec::new(),
        };
        let mut slices = vec![names];
        if let Some((tenant, queue)) = &self.queue {
            // All that is left of the queue's live indexes: most are empty.
            let mut after = self.cursor.after.clone();
            for at in self.cursor.index..WALKED {
                slices.push(Slice {
                    index: walked(tenant, queue, at),
                    after: after.take().or_else(|| begins(at)),
                    up_to: UpTo::End,
                    limit: GHOSTS,
                    give: vec![keys::JOB, keys::LEASE],
                });
            }
        }
        Next::Read(Read { slices, ..Read::default() })
    }

    fn haunted(&mut self, snapshot: &Snapshot, cx: &mut Cx<'_>) -> Next {
        let Some((first, indexes)) = snapshot.slices.split_first() else { return self.commit() };
        let Some((tenant, queue)) = self.queue.clone() else {
            // The cursor stands before the queue to look at.
            let Some(entry) = first.first() else {
                self.cursor.queue = None;
                return self.commit();
            };
            self.queue = keys::queue_of(&entry.member);
            self.cursor.current = Some((entry.score, entry.member.clone()));
            return if self.queue.is_some() { self.ghosts() } else { self.commit() };
        };
        for entries in indexes {
            let at = self.cursor.index;
            for entry in entries {
                self.ghost(entry, &tenant, &queue, at, cx);
            }
            if entries.len() >= GHOSTS {
                // Too long for one page: the next goes on here.
                self.cursor.after = entries.last().map(|e| (e.score, e.member.clone()));
                return self.commit();
            }
            self.cursor.after = None;
            self.cursor.index += 1;
        }
        self.cursor.index = 0;
        self.cursor.queue = self.cursor.current.take();
        self.commit()
    }

    /// One member of a live index, against its record.
    fn ghost(&mut self, entry: &Entry, tenant: &str, queue: &str, at: usize, cx: &mut Cx<'_>) {
        let (Some(id), [main, lease]) = (keys::job_of(&entry.member), &*entry.records) else { return };
        let index = walked(tenant, queue, at);
        if at >= LIVE_INDEXES {
            // books-balance: an ended child whose record has vanished, or cannot be read, has no time at which it
            // is trimmed.
            let gone = matches!(decode_record::<Job>(main), Ok(None) | Err(Undecodable::Corrupt));
            if gone && !main.is_unread() {
                let writes = vec![remove(index, &entry.member)];
                self.draft(Draft::new(vec![as_read(keys::job(id), main)], writes), Mark::GhostRemoved);
            }
            return;
        }
        let class = keys::status_of(&index).map(|(_, _, class, _)| class);
        let home = class.map(|class| Home { tenant, queue, class });
        let guards = vec![as_read(keys::lease(id), lease)];
        match decode_record::<Job>(main) {
            _ if main.is_unread() || lease.is_newer() => {}
            Ok(None) => {
                let own = cx.make.version();
                self.either(moves::lost_once(id, home, core::slice::from_ref(&index), guards, own), Mark::JobLost);
            }
            Ok(Some((version, job))) if job.end.is_some() => {
                let writes = vec![remove(index, &entry.member)];
                self.draft(Draft::new(vec![Guard::At(keys::job(id), version)], writes), Mark::GhostRemoved);
            }
            // Met at a deadline its place was not known: it still stands here.
            Err(Undecodable::Corrupt) => {
                let own = cx.make.version();
                self.either(moves::quarantine_once(id, home, main, guards, own), Mark::JobQuarantined);
            }
            Ok(Some(_)) | Err(Undecodable::Newer) => {}
        }
    }

    fn commit(&mut self) -> Next {
        if self.drafts.is_empty() {
            return self.groups();
        }
        Next::Commit(Plan::new(core::mem::take(&mut self.drafts)))
    }

    /// The books of the groups that were met on this page.
    fn groups(&mut self) -> Next {
        let mut groups: BTreeSet<_> = self.ids.iter().filter_map(|id| Some(id.child_of()?.0)).collect();
        let of = |key: &Name| keys::group_of(&Name::new(key.strip_prefix(&*keys::GROUP)?));
        groups.extend(self.keys.iter().filter_map(of));
        if groups.is_empty() {
            return Next::ok(Response::Ready);
        }
        let children = self.ids.iter().copied().filter(|id| id.child_of().is_some()).collect();
        Next::Become(Op::Mend(Box::new(Mend::new(self.cursor.clone(), groups.into_iter().collect(), children))))
    }
}

/// The nine status indexes, `leases`, `due`, `ttl` and `names`.
const PLACES: usize = Status::ALL.len() + 4;
/// Indexes of live jobs that a queue has.
const LIVE_INDEXES: usize = Status::LIVE.len() * Class::ALL.len();
/// Bytes of records that a page reads.
const PAGE_BYTES: usize = 2 * 1024 * 1024;
/// Members of one of them that a page looks at.
const GHOSTS: usize = 20;

/// Indexes of a queue that are walked: first those of live jobs, then those of ended ones.
const WALKED: usize = LIVE_INDEXES + Status::TERMINAL.len() * Class::ALL.len();

fn walked(tenant: &str, queue: &str, at: usize) -> Name {
    let (statuses, at) = match at.checked_sub(LIVE_INDEXES) {
        Some(at) => (&Status::TERMINAL[..], at),
        None => (&Status::LIVE[..], at),
    };
    let class = Class::ALL.get(at / statuses.len()).copied().unwrap_or(Class::Batch);
    let status = statuses.get(at % statuses.len()).copied().unwrap_or(Status::Queued);
    Home { tenant, queue, class }.index(status)
}

/// Where the walk of an index begins. Ended jobs are trimmed at their time; only children have none.
fn begins(at: usize) -> Option<(Score, Name)> {
    (at >= LIVE_INDEXES).then(|| (SCORE_MAX - 1, Name::from_static("\u{7f}")))
}

/// The transactions that put back what one job lacks. `places`: in the nine status indexes, then in
/// `leases`, `due`, `ttl` and `names`; `held`: it is a child that is not released.
pub(super) fn mend_job(
    id: JobId,
    found: &Found,
    places: &[Option<Place>],
    held: bool,
    clock: Clock,
    make: &mut Maker,
    drafts: &mut Vec<Draft>,
) {
    let Found { main, lease, job } = found;
    let (Some(version), Some((statuses, rest))) = (main.version(), places.split_at_checked(Status::ALL.len())) else {
        return;
    };
    let [leases, due, ttl, name] = rest else { return };
    let home = Home::from(job);
    let member = keys::member(id);
    let as_it_is = || vec![Guard::At(keys::job(id), version), as_read(keys::lease(id), lease)];
    let out = |index: Name| Guard::Member(index, member.clone(), Standing::Out);
    let granted = Granted::read(lease);
    let lease_end = granted.as_ref().map(|g| g.at.saturating_add(super::lease::length(&g.lease, job)));

    if name.is_none() {
        let index = keys::queue_member(&job.tenant, &job.queue);
        let guards = vec![Guard::At(keys::job(id), version), Guard::Member(keys::NAMES, index, Standing::Out)];
        drafts.push(Draft::new(guards, vec![super::submit::known(&job.tenant, &job.queue)]));
    }
    let put_back = |status: Status, score: Score, more: Vec<Write>| {
        let mut guards = as_it_is();
        guards.extend(Status::ALL.into_iter().map(|s| out(home.index(s))));
        let mut writes = vec![add(home.index(status), &member, ScoreAt::Number(score))];
        writes.extend(more);
        writes.push(home.event(Kind::Reindexed, id, None, None));
        if status == Status::Queued {
            writes.push(Write::Notify(home.topic()));
        }
        Draft::new(guards, writes)
    };
    let stands = Status::ALL.into_iter().zip(statuses).find_map(|(s, p)| p.map(|p| (s, p)));
    if let Some(end) = &job.end {
        if stands.is_none() && !job.deleted {
            let Record::Present { expiry, .. } = main else { return };
            drafts.push(put_back(end.status, expiry.unwrap_or(clock), Vec::new()));
        }
        return;
    }
    let waits = |score: Score| add(keys::DUE, &member, ScoreAt::Number(score));
    match stands {
        None => {
            // one-live-lease: whoever has a lease runs, whether its group knows that it was released or not.
            let held = held && granted.is_none();
            let status = if held { Status::Held } else { derived(job, granted.is_some(), clock) };
            let more = match status {
                Status::Held => match id.child_of() {
                    // Whoever looks at the group just now has not seen it: the mark must stay.
                    Some((group, index)) => {
                        let mut more = vec![add(keys::held(group), &member, ScoreAt::Number(index.into()))];
                        more.extend(moves::mark(group, make.version()));
                        more
                    }
                    None => Vec::new(),
                },
                Status::Running if leases.is_none() => {
                    lease_end.map(|end| add(keys::LEASES, &member, ScoreAt::Number(end))).into_iter().collect()
                }
                Status::Scheduled | Status::Retrying => vec![waits(job.due)],
                _ => Vec::new(),
            };
            let mut draft = put_back(status, job.due, more);
            if let (Status::Held, Some((group, _))) = (status, id.child_of()) {
                // A record that can be read no more has the same version: its child may have been counted meanwhile.
                draft.guards.push(out(keys::done(group, ChildOutcome::Lost)));
            }
            drafts.push(draft);
        }
        Some((Status::Running, _)) if leases.is_none() => {
            // Without its entry it would never be reclaimed. Without its lease it is reclaimed now.
            let mut guards = as_it_is();
            guards.push(out(keys::LEASES));
            let writes = vec![
                add(keys::LEASES, &member, ScoreAt::Number(lease_end.unwrap_or(clock))),
                home.event(Kind::Reindexed, id, None, None),
            ];
            drafts.push(Draft::new(guards, writes));
        }
        Some((status @ (Status::Scheduled | Status::Retrying), place)) if due.is_none() => {
            let mut guards = as_it_is();
            // books-balance: a promotion changes no record, so it must still stand there.
            let standing = if place.score > clock { Standing::Live } else { Standing::Due };
            guards.push(Guard::Member(home.index(status), member.clone(), standing));
            guards.push(out(keys::DUE));
            let writes = vec![waits(place.score), home.event(Kind::Reindexed, id, None, None)];
            drafts.push(Draft::new(guards, writes));
        }
        Some((Status::Queued | Status::Scheduled, _)) if ttl.is_none() && job.deliveries == 0 => {
            if let Some(ms) = job.policy.queue_ttl_ms {
                let mut guards = as_it_is();
                guards.push(out(keys::TTL));
                let born = main.at().unwrap_or(job.born);
                let deadline = born.saturating_add(ms.saturating_mul(limits::MILLI));
                let writes = vec![
                    add(keys::TTL, &member, ScoreAt::Number(deadline)),
                    home.event(Kind::Reindexed, id, None, None),
                ];
                drafts.push(Draft::new(guards, writes));
            }
        }
        Some(_) => {}
    }
}

/// The transaction that takes a job out of the places where it does not belong, if there are any.
pub(super) fn clear_job(id: JobId, found: &Found, places: &[Option<Place>], clock: Clock) -> Option<Draft> {
    let Found { main, lease, job } = found;
    let (statuses, [leases, due, ttl, _]) = places.split_at_checked(Status::ALL.len())? else { return None };
    let home = Home::from(job);
    let stands = || Status::ALL.into_iter().zip(statuses).filter_map(|(s, p)| p.map(|p| (s, p)));
    let keep = match &job.end {
        _ if job.deleted => None,
        Some(end) => Some(end.status),
        None if !lease.is_absent() => Some(Status::Running),
        None => {
            // Running without its lease is the sweep's: it counts the attempt.
            let mut live = stands().filter(|(s, _)| !s.is_terminal());
            let mut waiting = live.clone().filter(|(s, _)| *s != Status::Running);
            match (waiting.next(), waiting.next(), live.next()) {
                (Some((one, _)), None, _) => Some(one),
                (None, _, Some(_)) => Some(Status::Running),
                _ => Some(derived(job, false, clock)),
            }
        }
    };
    let waits = matches!(keep, Some(Status::Scheduled | Status::Retrying));
    let fresh = job.end.is_none() && keep != Some(Status::Running) && job.deliveries == 0;
    let mut out: Vec<Name> = stands().filter(|(s, _)| Some(*s) != keep).map(|(s, _)| home.index(s)).collect();
    out.extend(leases.filter(|_| keep != Some(Status::Running)).map(|_| keys::LEASES));
    out.extend(due.filter(|_| !waits).map(|_| keys::DUE));
    out.extend(ttl.filter(|_| !fresh || job.policy.queue_ttl_ms.is_none()).map(|_| keys::TTL));
    if out.is_empty() {
        return None;
    }
    let member = keys::member(id);
    let mut guards = vec![Guard::At(keys::job(id), main.version()?), as_read(keys::lease(id), lease)];
    // It must still stand where it belongs: a promotion or an operator's change alters no record.
    if let Some((status, place)) = stands().find(|(s, _)| Some(*s) == keep) {
        let standing = if place.score > clock { Standing::Live } else { Standing::Due };
        guards.push(Guard::Member(home.index(status), member.clone(), standing));
    }
    let mut writes: Vec<Write> = out.into_iter().map(|index| remove(index, &member)).collect();
    writes.push(home.event(Kind::Reindexed, id, None, None));
    Some(Draft::new(guards, writes))
}

/// The job that a record's key names.
pub(super) fn id_in(key: &Name) -> Option<JobId> {
    let (prefix, id) = key.as_str()?.split_once('/')?;
    ["job", "lease", "progress", "payload", "result", "history"].contains(&prefix).then(|| id.parse().ok())?
}

impl Operation for Scrub {
    fn start(&mut self, _: &mut Cx<'_>) -> Next {
        self.stage = Stage::Walk;
        self.found.clear();
        self.bound.clear();
        self.pools.clear();
        self.drafts.clear();
        self.did.clear();
        if !self.only.is_empty() {
            self.ids = self.only.clone();
            return self.records();
        }
        let scan = Scan { cursor: self.cursor.records.clone(), limit: limits::SCRUB_KEYS };
        Next::Read(Read { scan: Some(scan), ..Read::default() })
    }

    fn read(&mut self, snapshot: Snapshot, cx: &mut Cx<'_>) -> Next {
        match self.stage {
            Stage::Walk => {
                let page = snapshot.scan.unwrap_or_else(|| crate::store::ScanPage { keys: Vec::new(), cursor: None });
                self.cursor.records = page.cursor;
                let ids: BTreeSet<JobId> = page.keys.iter().filter_map(id_in).collect();
                self.ids = ids.into_iter().collect();
                let others = |k: &Name| !k.starts_with(b"job/") && !k.starts_with(b"lease/");
                self.keys = page.keys.into_iter().filter(others).collect();
                if self.ids.is_empty() && self.keys.is_empty() { self.ghosts() } else { self.records() }
            }
            Stage::Records => self.places(&snapshot, cx),
            Stage::Places => {
                self.mend(&snapshot, cx);
                self.ghosts()
            }
            Stage::Ghosts => self.haunted(&snapshot, cx),
        }
    }

    fn answered(&mut self, _: Clock, answers: Vec<Answer>, cx: &mut Cx<'_>) -> Next {
        for (mark, _) in self.did.iter().zip(&answers).filter(|(_, a)| matches!(a, Answer::Applied { .. })) {
            match mark {
                Mark::JobReindexed => cx.stats.reindexed += 1,
                Mark::JobLost => cx.stats.lost += 1,
                Mark::JobQuarantined => cx.stats.quarantined += 1,
                _ => cx.stats.ghosts += 1,
            }
            cx.marks.push(*mark);
        }
        self.groups()
    }

    fn doubtful(&mut self, _: &mut Cx<'_>) -> Next {
        Next::ok(Response::Ready)
    }
}
