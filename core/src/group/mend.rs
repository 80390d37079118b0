//! The scrub's part for groups: puts back what the books of a group and of its children lack.

use alloc::vec;
use alloc::vec::Vec;

use super::record::Group;
use super::{SIZES, counts, sizes};
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

/// Children of one group whose records are looked for.
const GHOSTS: usize = 20;
const SHARED: [Name; 3] = [keys::GROUPS_DUE, keys::GROUPS_OPEN, keys::GROUPS_ENDED];
/// What is asked of a child: whether its group is past its end, whether it stands among the held jobs, and its
/// places in its group: held, released, and the five of `done`.
const PLACES: usize = 4 + ChildOutcome::ALL.len();

#[derive(Clone, Debug)]
pub(crate) struct Mend {
    /// Where the scrub goes on afterwards.
    pub cursor: Cursor,
    groups: Vec<GroupId>,
    children: Vec<JobId>,
    /// The children as read first, which tells where they are at home.
    jobs: Option<Vec<(JobId, Job)>>,
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
        Mend { cursor, groups, children, jobs: None, drafts: Vec::new(), did: Vec::new() }
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
        self.jobs = Some(jobs);
        Next::Read(read)
    }

    fn judge(&mut self, snapshot: &Snapshot, cx: &mut Cx<'_>) -> Next {
        let (groups, children) = snapshot.records.split_at((self.groups.len() * 2).min(snapshot.records.len()));
        let (shared, places) = snapshot.members.split_at((self.groups.len() * 3).min(snapshot.members.len()));
        let books = shared.chunks(3).zip(snapshot.counts.chunks(SIZES)).zip(snapshot.slices.chunks(2));
        for ((id, pair), ((shared, sizes), slices)) in self.groups.clone().into_iter().zip(groups.chunks(2)).zip(books)
        {
            let ([record, mark], [due, open, ended]) = (pair, shared) else { continue };
            let (due, open, ended) = (due.is_some(), open.is_some(), ended.is_some());
            self.group(id, &SeenGroup { record, mark, due, open, ended, sizes, slices }, cx);
        }
        let jobs = self.jobs.clone().unwrap_or_default();
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
            self.draft(Draft::new(vec![at, out(keys::GROUPS_DUE)], writes), Mark::JobReindexed);
        }
        for entry in seen.slices.iter().flatten() {
            let (Some(child), [main, lease]) = (keys::job_of(&entry.member), &*entry.records) else { continue };
            if main.is_absent() {
                let guards = vec![as_read(keys::lease(child), lease)];
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
                    writes.extend(moves::mark(parent, cx.make.version()));
                } else {
                    // limit-held: it is in flight, whatever the books say.
                    guards.push(out(Home::from(&job).index(Status::Held)));
                    writes.push(add(keys::released(parent), &member, ScoreAt::Number(SCORE_MAX)));
                }
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
        guards.push(Guard::Member(keys::GROUPS_ENDED, keys::group_member(parent), Standing::Out));
        let records = [keys::job, keys::payload, keys::result, keys::history, keys::lease, keys::progress];
        let mut writes: Vec<Write> = records.map(|key| Write::Delete(key(id))).into();
        writes.extend(Status::ALL.map(|s| remove(home.index(s), &member)));
        writes.extend([keys::LEASES, keys::DUE, keys::TTL].map(|index| remove(index, &member)));
        writes.extend([keys::held(parent), keys::released(parent)].map(|index| remove(index, &member)));
        writes.extend(ChildOutcome::ALL.map(|o| remove(keys::done(parent, o), &member)));
        writes.push(home.event(Kind::Lost, id, None, Some("group")));
        self.draft(Draft::new(guards, writes), Mark::JobLost);
    }
}

impl Operation for Mend {
    fn start(&mut self, _: &mut Cx<'_>) -> Next {
        self.jobs = None;
        self.drafts.clear();
        self.did.clear();
        let records = self.children.iter().map(|id| keys::job(*id)).collect();
        Next::Read(Read { records, ..Read::default() })
    }

    fn read(&mut self, snapshot: Snapshot, cx: &mut Cx<'_>) -> Next {
        if self.jobs.is_some() {
            return self.judge(&snapshot, cx);
        }
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
