//! The scrub's part for groups: puts back what the books of a group and of its children lack.

use alloc::vec;
use alloc::vec::Vec;

use super::record::Group;
use super::{BOOKS, books, counts, sizes};
use crate::codec::Undecodable;
use crate::event::Kind;
use crate::ids::{GroupId, JobId};
use crate::job::moves::{self, Home, add, as_read, remove};
use crate::job::record::{ChildOutcome, Job, Status};
use crate::job::scrub::Cursor;
use crate::name::Name;
use crate::replica::Mark;
use crate::replica::task::{Cx, Draft, Next, Operation, Plan, decode_record};
use crate::request::Response;
use crate::store::{
    Answer, Clock, Entry, Guard, Place, Read, Record, SCORE_MAX, ScoreAt, Slice, Snapshot, Standing, UpTo, Write, keys,
};

/// Children of one group that are looked for at once, if its books miss some.
const MISSING: u64 = 50;
/// Children of one group whose records are looked for.
const GHOSTS: usize = 20;
const SHARED: [Name; 3] = [keys::GROUPS_DUE, keys::GROUPS_OPEN, keys::GROUPS_ENDED];
/// What is asked of a child: whether its group is past its end, whether it stands among the held jobs, and its
/// places in its group: held, released, and the five of `done`.
const PLACES: usize = 4 + ChildOutcome::ALL.len();

#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct Mend {
    /// Where the scrub goes on afterwards.
    pub cursor: Cursor,
    groups: Vec<GroupId>,
    children: Vec<JobId>,
    /// The children as read first, which tells where they are at home.
    jobs: Option<Vec<(JobId, Job)>>,
    /// Children that may stand nowhere, of groups that miss some.
    missing: Vec<JobId>,
    drafts: Vec<Draft>,
    did: Vec<Mark>,
}

/// A group of one moment.
struct SeenGroup<'a> {
    record: &'a Record,
    mark: &'a Record,
    due: bool,
    open: bool,
    ended: bool,
    sizes: &'a [u64],
    slices: &'a [Vec<Entry>],
}

/// A child of one moment.
struct SeenChild<'a> {
    main: &'a Record,
    lease: &'a Record,
    group: &'a Record,
    group_ended: bool,
    held_status: bool,
    held: bool,
    released: bool,
    done: &'a [Option<Place>],
}

impl Mend {
    pub fn new(cursor: Cursor, groups: Vec<GroupId>, children: Vec<JobId>) -> Mend {
        Mend { cursor, groups, children, jobs: None, missing: Vec::new(), drafts: Vec::new(), did: Vec::new() }
    }

    fn draft(&mut self, draft: Draft, mark: Mark) {
        self.drafts.push(draft);
        self.did.push(mark);
    }

    /// Everything about them, of one moment.
    fn look(&mut self, jobs: Vec<(JobId, Job)>) -> Next {
        let mut read = Read::default();
        for id in &self.groups {
            read.records.extend([keys::group(*id), keys::mark(*id)]);
            read.counts.extend(sizes(*id));
            read.members.extend(SHARED.map(|index| (index, keys::group_member(*id))));
            read.slices.extend([keys::held(*id), keys::released(*id)].map(|index| Slice {
                index,
                after: None,
                up_to: UpTo::End,
                limit: GHOSTS,
                give: vec![keys::JOB, keys::LEASE],
            }));
        }
        for (id, job) in &jobs {
            let Some((group, _)) = id.child_of() else { continue };
            let member = keys::member(*id);
            let home = Home::from(job);
            read.records.extend([keys::job(*id), keys::lease(*id), keys::group(group)]);
            read.members.push((keys::GROUPS_ENDED, keys::group_member(group)));
            read.members.push((home.index(Status::Held), member.clone()));
            read.members.extend([keys::held(group), keys::released(group)].map(|index| (index, member.clone())));
            read.members.extend(ChildOutcome::ALL.map(|o| (keys::done(group, o), member.clone())));
        }
        for id in &self.missing {
            let Some((group, _)) = id.child_of() else { continue };
            let member = keys::member(*id);
            read.records.extend([keys::job(*id), keys::group(group)]);
            read.members.extend(books(group).map(|index| (index, member.clone())));
        }
        self.jobs = Some(jobs);
        Next::Read(read)
    }

    /// A page of the children of groups whose books do not name as many as they have. Where it begins is
    /// drawn, so that all pages come in their turn.
    fn look_for_missing(&mut self, snapshot: &Snapshot, cx: &mut Cx<'_>) {
        let records = snapshot.records.iter().skip(self.children.len());
        for ((id, record), sizes) in self.groups.iter().zip(records).zip(snapshot.counts.chunks(BOOKS)) {
            let Ok(Some((_, group))) = decode_record::<Group>(record) else { continue };
            if group.end.is_some() || sizes.iter().sum::<u64>() >= u64::from(group.filled) {
                continue;
            }
            let pages = u64::from(group.filled).div_ceil(MISSING);
            let first = cx.make.up_to(pages.saturating_sub(1)) * MISSING;
            let last = (first + MISSING).min(group.filled.into());
            self.missing.extend((first as u32..last as u32).map(|index| id.child(index)));
        }
    }

    /// A child that stands nowhere, and has no record or none that can be read, is lost: it would be waited
    /// for for ever.
    fn count_missing(&mut self, records: &[Record], places: &[Option<Place>], cx: &mut Cx<'_>) {
        let missing = core::mem::take(&mut self.missing);
        for ((id, pair), places) in missing.into_iter().zip(records.chunks(2)).zip(places.chunks(BOOKS)) {
            let (Some((parent, _)), [main, group]) = (id.child_of(), pair) else { continue };
            let (Some(version), true) = (group.version(), places.iter().all(Option::is_none)) else { continue };
            let home = decode_record::<Group>(group).ok().flatten();
            let mut guards = vec![Guard::At(keys::group(parent), version)];
            guards.extend(books(parent).map(|index| Guard::Member(index, keys::member(id), Standing::Out)));
            let home = home.as_ref().map(|(_, group)| Home::from(group));
            let own = cx.make.version();
            match decode_record::<Job>(main) {
                Ok(None) => self.draft(moves::lost(id, home, &[], guards, own), Mark::JobLost),
                Err(Undecodable::Corrupt) if !main.is_unread() => {
                    self.draft(moves::quarantine(id, home, main, guards, own), Mark::JobQuarantined);
                }
                // What has a record is put back by it.
                Ok(Some(_)) | Err(_) => {}
            }
        }
    }

    fn judge(&mut self, snapshot: &Snapshot, cx: &mut Cx<'_>) -> Next {
        let (groups, children) = snapshot.records.split_at((self.groups.len() * 2).min(snapshot.records.len()));
        let (shared, places) = snapshot.members.split_at((self.groups.len() * 3).min(snapshot.members.len()));
        let books = shared.chunks(3).zip(snapshot.counts.chunks(BOOKS)).zip(snapshot.slices.chunks(2));
        for ((id, pair), ((shared, sizes), slices)) in self.groups.clone().into_iter().zip(groups.chunks(2)).zip(books)
        {
            let ([record, mark], [due, open, ended]) = (pair, shared) else { continue };
            let (due, open, ended) = (due.is_some(), open.is_some(), ended.is_some());
            self.group(id, &SeenGroup { record, mark, due, open, ended, sizes, slices }, cx);
        }
        let jobs = self.jobs.clone().unwrap_or_default();
        let (children, others) = children.split_at((jobs.len() * 3).min(children.len()));
        let (places, other_places) = places.split_at((jobs.len() * PLACES).min(places.len()));
        self.count_missing(others, other_places, cx);
        for (((id, _), records), places) in jobs.iter().zip(children.chunks(3)).zip(places.chunks(PLACES)) {
            let ([main, lease, group], [ended, held_status, held, released, done @ ..]) = (records, places) else {
                continue;
            };
            let seen = SeenChild {
                main,
                lease,
                group,
                group_ended: ended.is_some(),
                held_status: held_status.is_some(),
                held: held.is_some(),
                released: released.is_some(),
                done,
            };
            self.child(*id, &seen, cx);
        }
        if self.drafts.is_empty() {
            return Next::ok(Response::Ready);
        }
        Next::Commit(Plan::new(core::mem::take(&mut self.drafts)))
    }

    fn group(&mut self, id: GroupId, seen: &SeenGroup<'_>, cx: &mut Cx<'_>) {
        let member = keys::group_member(id);
        let out = |index: Name| Guard::Member(index, member.clone(), Standing::Out);
        let (version, group) = match decode_record::<Group>(seen.record) {
            Ok(Some(found)) => found,
            Ok(None) => {
                if let Some(version) = seen.mark.version().filter(|_| !seen.due) {
                    let guards = vec![Guard::Absent(keys::group(id)), Guard::At(keys::mark(id), version)];
                    self.draft(Draft::new(guards, vec![Write::Delete(keys::mark(id))]), Mark::GhostRemoved);
                }
                return;
            }
            Err(_) => return,
        };
        let at = Guard::At(keys::group(id), version);
        if group.end.is_some() {
            if let (Record::Present { expiry: Some(expiry), .. }, false) = (seen.record, seen.ended) {
                let writes = vec![add(keys::GROUPS_ENDED, &member, ScoreAt::Number(*expiry))];
                self.draft(Draft::new(vec![at, out(keys::GROUPS_ENDED)], writes), Mark::JobReindexed);
            }
            return;
        }
        if let (Some(until), false, false) = (group.open_until, group.sealed, seen.open) {
            let writes = vec![add(keys::GROUPS_OPEN, &member, ScoreAt::Number(until))];
            self.draft(Draft::new(vec![at.clone(), out(keys::GROUPS_OPEN)], writes), Mark::JobReindexed);
        }
        let counts = counts(seen.sizes);
        let room = group.max_parallel.is_none_or(|max| counts.in_flight < u64::from(max));
        let through = group.sealed && counts.done() >= u64::from(group.filled);
        if !seen.due && (group.stopped.is_some() || through || room && counts.held > 0) {
            let writes = moves::mark(id, cx.make.version()).into();
            self.draft(Draft::new(vec![at.clone(), out(keys::GROUPS_DUE)], writes), Mark::JobReindexed);
        }
        for entry in seen.slices.iter().flatten() {
            let (Some(child), [main, lease]) = (keys::job_of(&entry.member), &*entry.records) else { continue };
            if main.is_absent() {
                // Done again when the group is final it would mark it.
                let guards = vec![as_read(keys::lease(child), lease), at.clone()];
                let own = cx.make.version();
                self.draft(moves::lost(child, Some(Home::from(&group)), &[], guards, own), Mark::JobLost);
            }
        }
    }

    fn child(&mut self, id: JobId, seen: &SeenChild<'_>, cx: &mut Cx<'_>) {
        let (Ok(Some((version, job))), Some((parent, index))) = (decode_record::<Job>(seen.main), id.child_of()) else {
            return;
        };
        let member = keys::member(id);
        let out = |index: Name| Guard::Member(index, member.clone(), Standing::Out);
        let mut guards = vec![Guard::At(keys::job(id), version), as_read(keys::lease(id), seen.lease)];
        if seen.group.is_absent() {
            if !seen.group_ended {
                self.orphan(id, &job, guards);
            }
            return;
        }
        let nowhere = seen.done.iter().all(Option::is_none);
        let mut writes = Vec::new();
        match job.end.as_ref().map(|e| ChildOutcome::of(e.status)) {
            Some(Some(outcome)) if nowhere || seen.held || seen.released => {
                writes.extend([remove(keys::held(parent), &member), remove(keys::released(parent), &member)]);
                if nowhere {
                    guards.extend(ChildOutcome::ALL.map(|o| out(keys::done(parent, o))));
                    writes.push(add(keys::done(parent, outcome), &member, ScoreAt::Number(index.into())));
                }
                writes.extend(moves::mark(parent, cx.make.version()));
            }
            None if !seen.held && !seen.released => {
                guards.extend([out(keys::held(parent)), out(keys::released(parent))]);
                if seen.held_status {
                    writes.push(add(keys::held(parent), &member, ScoreAt::Number(index.into())));
                } else {
                    // limit-held: it is in flight, whatever the books say.
                    guards.push(out(Home::from(&job).index(Status::Held)));
                    writes.push(add(keys::released(parent), &member, ScoreAt::Number(SCORE_MAX)));
                }
                // Whoever looks at the group just now has not seen it: the mark must stay, so that a group that was
                // stopped stops it.
                writes.extend(moves::mark(parent, cx.make.version()));
            }
            _ => return,
        }
        writes.push(Home::from(&job).event(Kind::Reindexed, id, None, None));
        self.draft(Draft::new(guards, writes), Mark::JobReindexed);
    }

    /// A child whose group has vanished: nobody would ever ask for it or remove it.
    fn orphan(&mut self, id: JobId, job: &Job, mut guards: Vec<Guard>) {
        let Some((parent, _)) = id.child_of() else { return };
        let member = keys::member(id);
        let home = Home::from(job);
        guards.push(Guard::Absent(keys::group(parent)));
        let mut writes = moves::forget(id, Some(home));
        writes.extend(books(parent).map(|index| remove(index, &member)));
        // What else the group's books name is removed as at the end of its retention.
        writes.push(add(keys::GROUPS_ENDED, &keys::group_member(parent), ScoreAt::Clock(0)));
        if job.end.is_some() {
            // It had ended, and goes with the group, whose entry was lost.
            return self.draft(Draft::new(guards, writes), Mark::GhostRemoved);
        }
        writes.push(home.event(Kind::Lost, id, None, Some("group")));
        self.draft(Draft::new(guards, writes), Mark::JobLost);
    }
}

impl Operation for Mend {
    fn start(&mut self, _: &mut Cx<'_>) -> Next {
        self.jobs = None;
        self.missing.clear();
        self.drafts.clear();
        self.did.clear();
        let mut records: Vec<Name> = self.children.iter().map(|id| keys::job(*id)).collect();
        records.extend(self.groups.iter().map(|id| keys::group(*id)));
        let counts = self.groups.iter().flat_map(|id| sizes(*id)).collect();
        Next::Read(Read { records, counts, ..Read::default() })
    }

    fn read(&mut self, snapshot: Snapshot, cx: &mut Cx<'_>) -> Next {
        if self.jobs.is_some() {
            return self.judge(&snapshot, cx);
        }
        self.look_for_missing(&snapshot, cx);
        let jobs = self.children.iter().zip(&snapshot.records);
        let jobs = jobs.filter_map(|(id, record)| Some((*id, decode_record::<Job>(record).ok()??.1)));
        let jobs = jobs.filter(|(_, job)| !job.deleted).collect();
        self.look(jobs)
    }

    fn answered(&mut self, _: Clock, answers: Vec<Answer>, cx: &mut Cx<'_>) -> Next {
        for (mark, _) in self.did.iter().zip(&answers).filter(|(_, a)| matches!(a, Answer::Applied { .. })) {
            match mark {
                Mark::JobLost => cx.stats.lost += 1,
                Mark::GhostRemoved => cx.stats.ghosts += 1,
                _ => cx.stats.reindexed += 1,
            }
            cx.marks.push(*mark);
        }
        Next::ok(Response::Ready)
    }

    fn doubtful(&mut self, _: &mut Cx<'_>) -> Next {
        Next::ok(Response::Ready)
    }
}
