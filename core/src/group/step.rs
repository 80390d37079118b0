//! What is to be done for groups, by whichever replica notices: releasing children, stopping, finalizing;
//! open time-outs; removing groups whose retention has ended.

use alloc::vec;
use alloc::vec::Vec;

use super::change::stop;
use super::record::{Group, GroupStatus, Mode, Stop};
use super::{BOOKS, books, counts, sizes};
use crate::codec::{self, Undecodable};
use crate::event::Kind;
use crate::ids::GroupId;
use crate::job::moves::{self, Home, add, as_read, group_event, put, remove};
use crate::job::operate;
use crate::job::record::{ChildOutcome, Job, Status};
use crate::limits;
use crate::name::Name;
use crate::replica::Mark;
use crate::replica::task::{Cx, Draft, Next, Operation, Plan, decode_record};
use crate::request::{GroupCounts, Response};
use crate::store::{
    Answer, Clock, Each, Entry, Expiry, Guard, Read, Record, SCORE_MAX, Score, ScoreAt, Slice, Snapshot, Source, Span,
    Standing, Take, UpTo, Write, keys,
};

/// One look at the groups that are marked, overdue or past their retention.
#[derive(Clone, Debug, Default, serde::Serialize, serde::Deserialize)]
pub(crate) struct Step {
    marked: Vec<GroupId>,
    /// Those of them that are being stopped: their children are needed.
    stopping: Vec<GroupId>,
    open: Vec<GroupId>,
    ended: Vec<GroupId>,
    looked: bool,
    drafts: Vec<Draft>,
    /// Parallel to `drafts`.
    did: Vec<Did>,
    /// Something was done that may leave more to do.
    pub more: bool,
    /// When the next time-out or retention ends, by the store's clock.
    pub next: Option<Clock>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
enum Did {
    Released,
    Stopped,
    Cancelled,
    Finalized,
    Unmarked,
    Removed,
    /// A child that lived when its group had gone.
    Lost,
}

fn due(index: Name, limit: usize) -> Slice {
    Slice { index, after: None, up_to: UpTo::Clock, limit, give: Vec::new() }
}

/// What stands past the clock: it tells when to look again.
fn soon(index: Name, clock: Clock) -> Slice {
    let past = Name::from_static("\u{7f}");
    Slice { index, after: Some((clock, past)), up_to: UpTo::End, limit: 1, give: Vec::new() }
}

fn children(index: Name, give: Vec<Name>) -> Slice {
    Slice { index, after: None, up_to: UpTo::End, limit: limits::SWEEP_CHILDREN, give }
}

/// What is known of one marked group, of one moment.
struct Seen<'a> {
    id: GroupId,
    group: &'a Record,
    mark: &'a Record,
    counts: GroupCounts,
    /// Held and released children, with job and lease.
    children: Option<[&'a [Entry]; 2]>,
    /// The first dead child.
    dead: Option<&'a Entry>,
    clock: Clock,
}

impl Step {
    fn draft(&mut self, did: Did, draft: Draft) {
        self.drafts.push(draft);
        self.did.push(did);
    }

    /// Everything about the groups found, of one moment.
    fn look(&mut self) -> Next {
        self.looked = true;
        let mut read = Read::default();
        for id in &self.marked {
            read.records.extend([keys::group(*id), keys::mark(*id)]);
            read.counts.extend(sizes(*id));
            read.slices.push(Slice { limit: 1, ..children(keys::done(*id, ChildOutcome::Dead), Vec::new()) });
            if self.stopping.contains(id) {
                let give = || vec![keys::JOB, keys::LEASE];
                read.slices.extend([keys::held(*id), keys::released(*id)].map(|index| children(index, give())));
            }
        }
        read.records.extend(self.open.iter().map(|id| keys::group(*id)));
        for id in &self.ended {
            read.slices.extend(books(*id).map(|index| children(index, vec![keys::JOB])));
        }
        Next::Read(read)
    }

    fn decide(&mut self, snapshot: &Snapshot, cx: &mut Cx<'_>) {
        let mut records = snapshot.records.iter();
        let mut slices = snapshot.slices.iter().map(Vec::as_slice);
        let mut sizes = snapshot.counts.chunks(BOOKS);
        for id in core::mem::take(&mut self.marked) {
            let seen = Seen {
                id,
                group: records.next().unwrap_or(&Record::Absent),
                mark: records.next().unwrap_or(&Record::Absent),
                counts: counts(sizes.next().unwrap_or_default()),
                dead: slices.next().unwrap_or_default().first(),
                children: self
                    .stopping
                    .contains(&id)
                    .then(|| [slices.next(), slices.next()].map(Option::unwrap_or_default)),
                clock: snapshot.clock,
            };
            self.step(&seen, cx);
        }
        for id in core::mem::take(&mut self.open) {
            self.overdue(id, records.next().unwrap_or(&Record::Absent), cx);
        }
        for id in core::mem::take(&mut self.ended) {
            let entries: Vec<&[Entry]> = slices.by_ref().take(BOOKS).collect();
            self.remove(id, &entries);
        }
    }

    fn step(&mut self, seen: &Seen<'_>, cx: &mut Cx<'_>) {
        let (version, group) = match decode_record::<Group>(seen.group) {
            Ok(Some((version, group))) if group.end.is_none() => (version, group),
            Err(Undecodable::Newer) => {
                cx.mark(Mark::NewerFormat);
                return;
            }
            // books-balance: a child that was given up after its group had gone was entered into its books.
            Ok(None) if seen.counts.held + seen.counts.in_flight + seen.counts.done() > 0 => {
                let mut draft = unmark(seen);
                draft.guards.push(Guard::Absent(keys::group(seen.id)));
                draft.writes.push(add(keys::GROUPS_ENDED, &keys::group_member(seen.id), ScoreAt::Clock(0)));
                return self.draft(Did::Unmarked, draft);
            }
            // Final, gone, or not to be read: nothing can be done for it.
            _ => return self.unmark(seen),
        };
        let total = u64::from(group.filled);
        let stopped = group.stopped.is_some();
        if group.mode == Mode::FailFast && seen.counts.dead > 0 && !stopped && seen.counts.done() < total {
            let own = cx.make.version();
            self.more = true;
            let mut draft = stop(seen.id, &group, version, Stop::ChildDead, own);
            // forward-only: a store that has lost its newest commits may not have the dead child any more.
            let dead = keys::done(seen.id, ChildOutcome::Dead);
            draft.guards.extend(seen.dead.map(|e| Guard::Member(dead, e.member.clone(), Standing::Due)));
            self.draft(Did::Stopped, draft);
        } else if (group.sealed || stopped) && seen.counts.done() >= total {
            for draft in finalize(seen, &group, version, cx) {
                self.draft(Did::Finalized, draft);
            }
        } else if stopped {
            self.cancel(seen, &group, version, cx);
        } else {
            self.release(seen, &group, version);
        }
    }

    /// Takes the next children from those held, as many as there is room for.
    fn release(&mut self, seen: &Seen<'_>, group: &Group, version: crate::store::Version) {
        let room = match group.max_parallel {
            Some(max) => u64::from(max).saturating_sub(seen.counts.in_flight),
            None => u64::MAX,
        };
        let n = room.min(seen.counts.held).min(limits::SWEEP_CHILDREN as u64);
        if n == 0 {
            return self.unmark(seen);
        }
        let home = Home::from(group);
        let each = vec![
            Each::Remove { index: home.index(Status::Held) },
            Each::Add { index: home.index(Status::Queued), score: ScoreAt::Clock(0) },
            Each::Add { index: keys::released(seen.id), score: ScoreAt::Number(SCORE_MAX) },
        ];
        let take = Take {
            n: n as usize,
            from: vec![Source { index: keys::held(seen.id), due: false, each }],
            give: Vec::new(),
            max_bytes: 0,
        };
        let mut guards = vec![Guard::At(keys::group(seen.id), version)];
        if let Some(max) = group.max_parallel {
            // limit-held: refused if another replica used the room meanwhile.
            guards.push(Guard::Below(keys::released(seen.id), Span::All, u64::from(max).saturating_sub(n - 1)));
        }
        if group.mode == Mode::FailFast {
            // After a child is dead nobody else is released, before the group is stopped as well.
            guards.push(Guard::Below(keys::done(seen.id, ChildOutcome::Dead), Span::All, 1));
        }
        let writes = vec![Write::Notify(home.topic())];
        let release = Draft { guards, take: Some(take), writes };
        if n < room.min(seen.counts.held) {
            self.more = true;
        } else {
            // The mark goes with the release or not at all: a release that is refused, since another replica
            // used a part of the room, leaves room behind. Whoever ends or comes in between marks anew.
            let mut last = release.clone();
            let unmark = unmark(seen);
            last.guards.extend(unmark.guards);
            last.writes.extend(unmark.writes);
            self.draft(Did::Released, last);
        }
        self.draft(Did::Released, release);
    }

    /// A page of the children of a group that was stopped.
    fn cancel(&mut self, seen: &Seen<'_>, group: &Group, group_version: crate::store::Version, cx: &mut Cx<'_>) {
        let Some(children) = seen.children else {
            // Stopped since it was first read.
            self.more = true;
            return;
        };
        let (mut some, mut newer) = (false, false);
        for entry in children.into_iter().flatten() {
            let (Some(id), [main, lease]) = (keys::job_of(&entry.member), &*entry.records) else { continue };
            if main.is_unread() || lease.is_unread() {
                some = true;
                continue;
            }
            if entry.has_newer() {
                // Whoever can read it stops it: the group stays marked.
                newer = true;
                continue;
            }
            match decode_record::<Job>(main) {
                Ok(Some((version, job))) if job.end.is_none() => {
                    some = true;
                    for mut draft in operate::cancel(id, &job, version, lease, seen.clock, cx).0 {
                        // The stop itself may be among the newest commits that a store has lost.
                        draft.guards.push(Guard::At(keys::group(seen.id), group_version));
                        self.draft(Did::Cancelled, draft);
                    }
                }
                Ok(None) => {
                    some = true;
                    // Done again when the group is final it would mark it.
                    let guards = vec![as_read(keys::lease(id), lease), Guard::At(keys::group(seen.id), group_version)];
                    let own = cx.make.version();
                    self.draft(Did::Cancelled, moves::lost(id, Some(Home::from(group)), &[], guards, own));
                }
                // The scrub's.
                Ok(Some(_)) | Err(_) => {}
            }
        }
        if some {
            self.more = true;
        } else if !newer {
            self.unmark(seen);
        }
    }

    fn unmark(&mut self, seen: &Seen<'_>) {
        self.draft(Did::Unmarked, unmark(seen));
    }

    /// A group that was not sealed in time.
    fn overdue(&mut self, id: GroupId, record: &Record, cx: &mut Cx<'_>) {
        let member = keys::group_member(id);
        let due = Guard::Member(keys::GROUPS_OPEN, member.clone(), Standing::Due);
        let mut draft = match decode_record::<Group>(record) {
            Ok(Some((version, group))) if group.end.is_none() && !group.sealed => {
                stop(id, &group, version, Stop::OpenTimeout, cx.make.version())
            }
            Err(Undecodable::Newer) => {
                cx.mark(Mark::NewerFormat);
                return;
            }
            _ => Draft::new(vec![as_read(keys::group(id), record)], vec![remove(keys::GROUPS_OPEN, &member)]),
        };
        draft.guards.push(due);
        self.draft(Did::Stopped, draft);
    }

    /// A page of the children of a group whose retention has ended; at last the group's own entry.
    fn remove(&mut self, id: GroupId, entries: &[&[Entry]]) {
        let member = keys::group_member(id);
        // A store whose clock went back may have the group again.
        let guards =
            vec![Guard::Member(keys::GROUPS_ENDED, member.clone(), Standing::Due), Guard::Absent(keys::group(id))];
        for entry in entries.iter().copied().flatten() {
            let Some(child) = keys::job_of(&entry.member) else { continue };
            let found = match entry.records.first().map_or(Ok(None), decode_record::<Job>) {
                // Not this release's to remove.
                Err(Undecodable::Newer) => continue,
                // One that cannot be read goes as well, as an ordinary job's record does at its expiry.
                Err(Undecodable::Corrupt) | Ok(None) => None,
                Ok(Some(found)) => Some(found),
            };
            let mut writes: Vec<Write> = books(id).map(|index| remove(index, &entry.member)).collect();
            writes.push(remove(keys::QUARANTINE, &entry.member));
            writes.extend(moves::forget(child, found.as_ref().map(|(_, job)| Home::from(job))));
            let mut guards = guards.clone();
            let mut did = Did::Removed;
            if let Some((version, job)) = found.filter(|(_, job)| job.end.is_none()) {
                // no-ghosts: its group has vanished while it lived, and that is told.
                guards.push(Guard::At(keys::job(child), version));
                writes.push(Home::from(&job).event(Kind::Lost, child, None, Some("group")));
                did = Did::Lost;
            }
            self.draft(did, Draft::new(guards, writes));
        }
        if entries.iter().any(|entries| !entries.is_empty()) {
            self.more = true;
            return;
        }
        let mut guards = guards;
        guards.extend(books(id).map(|index| Guard::Below(index, Span::All, 1)));
        self.draft(Did::Removed, Draft::new(guards, vec![remove(keys::GROUPS_ENDED, &member)]));
    }
}

/// The transaction that takes a group's mark away, unless it was marked anew.
fn unmark(seen: &Seen<'_>) -> Draft {
    let writes = vec![Write::Delete(keys::mark(seen.id)), remove(keys::GROUPS_DUE, &keys::group_member(seen.id))];
    let mut guards = vec![as_read(keys::mark(seen.id), seen.mark)];
    // An entry without its record, and the group's version, so that a second application is refused.
    if seen.mark.is_absent() {
        guards.push(as_read(keys::group(seen.id), seen.group));
        guards.push(Guard::Member(keys::GROUPS_DUE, keys::group_member(seen.id), Standing::Due));
    }
    Draft::new(guards, writes)
}

/// How a group ends whose children have all ended.
fn end(group: &Group, counts: &GroupCounts) -> GroupStatus {
    match group.stopped {
        Some(Stop::Cancelled | Stop::OpenTimeout) => GroupStatus::Cancelled,
        Some(Stop::ChildDead) => GroupStatus::Failed,
        None if group.mode == Mode::FailFast && counts.dead > 0 => GroupStatus::Failed,
        None if counts.succeeded == u64::from(group.filled) => GroupStatus::Succeeded,
        None if counts.succeeded == 0 => GroupStatus::Failed,
        None => GroupStatus::Partial,
    }
}

/// finalized-once: while the group's version stands the sum of the outcomes can only grow, since a child's
/// retry puts the group; an entry that was lost delays the end, and never hurries it. That nobody is held or
/// in flight is guarded as well, for a store that has lost its newest commits.
fn finalize(seen: &Seen<'_>, group: &Group, version: crate::store::Version, cx: &mut Cx<'_>) -> Vec<Draft> {
    let own = cx.make.version();
    let id = seen.id;
    let status = end(group, &seen.counts);
    let retention = group.policy.retention_ms;
    let key_ms = match (&group.key, status) {
        (Some(_), GroupStatus::Succeeded) => group.policy.key_ttl_ms.unwrap_or(retention),
        _ => 0,
    };
    let kept = retention.max(key_ms).saturating_mul(limits::MILLI).max(limits::STUB);
    let mut next = group.after(version);
    next.end = Some((status, seen.clock));
    let member = keys::group_member(id);
    let writes = vec![
        put(keys::group(id), own, codec::encode(&next), Expiry::Clock(kept)),
        remove(keys::GROUPS_OPEN, &member),
        add(keys::GROUPS_ENDED, &member, ScoreAt::Clock(kept)),
        Write::Delete(keys::mark(id)),
        remove(keys::GROUPS_DUE, &member),
        group_event(Kind::GroupFinalized, id, Home::from(group), None, Some(status.text())),
        Write::Notify(keys::topic_group(id)),
    ];
    let mut guards = vec![Guard::At(keys::group(id), version)];
    guards.extend([keys::held(id), keys::released(id)].map(|index| Guard::Below(index, Span::All, 1)));
    // Such a store may since have seen a child end otherwise: no outcome has more than was counted, so each has as many.
    let c = &seen.counts;
    for (outcome, n) in ChildOutcome::ALL.into_iter().zip([c.succeeded, c.dead, c.cancelled, c.expired, c.lost]) {
        guards.push(Guard::Below(keys::done(id, outcome), Span::All, n.saturating_add(1)));
    }
    let plain = Draft::new(guards, writes);
    let Some((key, key_version)) = &group.key else { return vec![plain] };
    let key = keys::key(&group.tenant, key);
    let mut with_key = plain.clone();
    with_key.guards.push(Guard::At(key.clone(), *key_version));
    with_key.writes.push(match status {
        GroupStatus::Succeeded => Write::Expire(key, Expiry::Clock(key_ms.saturating_mul(limits::MILLI))),
        _ => Write::Delete(key),
    });
    vec![with_key, plain]
}

fn groups(entries: Option<&Vec<Entry>>) -> Vec<GroupId> {
    entries.into_iter().flatten().filter_map(|e| keys::group_of(&e.member)).collect()
}

impl Operation for Step {
    fn start(&mut self, cx: &mut Cx<'_>) -> Next {
        *self = Step::default();
        Next::Read(Read {
            slices: vec![
                Slice { give: vec![keys::GROUP], ..due(keys::GROUPS_DUE, limits::SWEEP_GROUPS) },
                due(keys::GROUPS_OPEN, limits::SWEEP_GROUPS),
                due(keys::GROUPS_ENDED, 1),
                soon(keys::GROUPS_OPEN, cx.clock),
                soon(keys::GROUPS_ENDED, cx.clock),
            ],
            ..Read::default()
        })
    }

    fn read(&mut self, snapshot: Snapshot, cx: &mut Cx<'_>) -> Next {
        if !self.looked {
            self.marked = groups(snapshot.slices.first());
            let stopping = |e: &&Entry| {
                let group = e.records.first().and_then(|r| decode_record::<Group>(r).ok().flatten());
                group.is_some_and(|(_, g)| g.stopped.is_some() && g.end.is_none())
            };
            let found = snapshot.slices.first().into_iter().flatten();
            self.stopping = found.filter(stopping).filter_map(|e| keys::group_of(&e.member)).collect();
            self.open = groups(snapshot.slices.get(1));
            self.ended = groups(snapshot.slices.get(2));
            let heads = snapshot.slices.iter().skip(3).flatten();
            self.next = heads.map(|e: &Entry| -> Score { e.score }).filter(|s| *s > snapshot.clock).min();
            self.more = self.marked.len().max(self.open.len()) >= limits::SWEEP_GROUPS || !self.ended.is_empty();
            if self.marked.is_empty() && self.open.is_empty() && self.ended.is_empty() {
                return Next::ok(Response::Ready);
            }
            return self.look();
        }
        self.decide(&snapshot, cx);
        if self.drafts.is_empty() {
            self.more = false;
            return Next::ok(Response::Ready);
        }
        Next::Commit(Plan::new(core::mem::take(&mut self.drafts)))
    }

    fn answered(&mut self, _: Clock, answers: Vec<Answer>, cx: &mut Cx<'_>) -> Next {
        let mut any = false;
        for (did, answer) in self.did.iter().zip(&answers) {
            let Answer::Applied { taken } = answer else { continue };
            any = true;
            match did {
                Did::Released => cx.stats.children_released += taken.len() as u64,
                Did::Finalized => {
                    cx.stats.groups_finalized += 1;
                    cx.mark(Mark::GroupFinalized);
                }
                Did::Stopped => cx.mark(Mark::GroupStopped),
                Did::Cancelled => cx.stats.cancelled += 1,
                Did::Unmarked => {}
                Did::Removed => cx.mark(Mark::GroupRemoved),
                Did::Lost => {
                    cx.stats.lost += 1;
                    cx.mark(Mark::JobLost);
                }
            }
        }
        // Everything refused: another replica is at it.
        self.more &= any;
        Next::ok(Response::Ready)
    }

    fn doubtful(&mut self, _: &mut Cx<'_>) -> Next {
        // Nobody waits for it; the next look meets the same facts.
        Next::ok(Response::Ready)
    }
}
