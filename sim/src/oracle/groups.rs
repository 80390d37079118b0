//! limit-held, finalized-once and what else is promised of groups and their children.
//!
//! A group is followed as the jobs are: its record, its mark and its entries; and by how many of its
//! children stand where, which is moved with each child that a transaction touches. What a fault took from
//! a group or from one of its children excuses that group from the balance of its books, its marks, its
//! status and its counts, until all of it is mended; not from being finalized once at most, not from
//! changing afterwards, not from its limit as far as children are concerned that no fault has touched, and
//! not from coming to its end. A group whose own record is gone is excused, with its children, for good.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use leasehold_core::event::Kind;
use leasehold_core::group::record::{Group, GroupStatus, Mode, Stop};
use leasehold_core::ids::GroupId;
use leasehold_core::job::record::{ChildOutcome, Owner, Status};
use leasehold_core::request::{CreateGroup, GroupCounts, Submit};
use leasehold_core::store::{Clock, SCORE_MAX, Score, Version};
use leasehold_core::{JobId, Request};

use super::facts::{Facts, Rec, Touched};
use super::{Oracle, Promise, Subject, Track, Violation, broken};
use crate::calls::{ItemRef, Ledger};

/// Where a child stands in its group's books.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Book {
    Held,
    Released,
    Done(ChildOutcome),
}

/// What stands in the store of a group itself.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GroupFacts {
    pub main: Option<Rec<Arc<Group>>>,
    pub mark: Option<Version>,
    pub due: Option<Score>,
    pub open: Option<Score>,
    pub ended: Option<Score>,
}

impl GroupFacts {
    /// The group's record, unless it has expired or cannot be read.
    pub fn group(&self, clock: Clock) -> Option<&Arc<Group>> {
        self.main.as_ref().filter(|m| m.lives(clock))?.value.as_ref()
    }
}

/// How many children stand where.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    held: i64,
    released: i64,
    done: [i64; ChildOutcome::ALL.len()],
    /// Released and not ended, by their own records and places, whatever the group's books say.
    flying: i64,
}

impl Tally {
    fn add(&mut self, child: &Facts, n: i64) {
        for (book, _) in &child.books {
            match book {
                Book::Held => self.held += n,
                Book::Released => self.released += n,
                Book::Done(outcome) => self.done[*outcome as usize] += n,
            }
        }
        self.flying += if flies(child) { n } else { 0 };
    }

    pub fn take(&mut self, child: &Facts) {
        self.add(child, -1);
    }

    pub fn give(&mut self, child: &Facts) {
        self.add(child, 1);
    }

    fn ended(&self) -> i64 {
        self.done.iter().sum()
    }

    fn counts(&self) -> GroupCounts {
        let done = |outcome: ChildOutcome| self.done[outcome as usize] as u64;
        GroupCounts {
            held: self.held as u64,
            in_flight: self.released as u64,
            succeeded: done(ChildOutcome::Succeeded),
            dead: done(ChildOutcome::Dead),
            cancelled: done(ChildOutcome::Cancelled),
            expired: done(ChildOutcome::Expired),
            lost: done(ChildOutcome::Lost),
        }
    }
}

/// Whether a child is released and has not ended, as its own facts say.
fn flies(child: &Facts) -> bool {
    let lives = child.main.as_ref().and_then(|m| m.value.as_ref()).is_some_and(|j| j.end.is_none() && !j.deleted);
    lives && child.status().is_some_and(|s| !s.is_terminal() && s != Status::Held)
}

/// How a group stood from one change of the store until the next that concerned it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct GroupMoment {
    pub change: u64,
    pub main: Option<Arc<Group>>,
    pub expiry: Option<Clock>,
    pub counts: GroupCounts,
}

/// A group as the oracle has followed it.
#[derive(Clone, Debug, Default)]
pub(crate) struct GroupTrack {
    pub facts: GroupFacts,
    pub tally: Tally,
    pub asked: Option<Arc<CreateGroup>>,
    pub by: Option<ItemRef>,
    /// What each child was asked to be, with what the group gave it.
    pub bodies: Vec<Arc<Submit>>,
    pub moments: Vec<GroupMoment>,
    /// Requests that name it.
    pub askers: Vec<ItemRef>,
    pub events: BTreeMap<Kind, u32>,
    /// The children that the latest change created: that change, and from which index on.
    grown: Option<(u64, u32)>,
    /// Since when there has been something to do for it.
    work_since: Option<Clock>,
    /// A fault took something of it or of a child, and not all of it has been mended.
    pub excused: bool,
    /// A fault once did, or undid something: answers about it may be out of date.
    pub disturbed: bool,
    /// A fault took its record.
    pub lost: bool,
    pub known: bool,
}

impl GroupTrack {
    /// What is to be done for the group now, if anything.
    fn work(&self, clock: Clock) -> Option<&'static str> {
        let group = self.facts.group(clock).filter(|g| g.end.is_none())?;
        let t = &self.tally;
        let (ended, filled) = (t.ended(), i64::from(group.filled));
        let stopped = group.stopped.is_some();
        let dead = group.mode == Mode::FailFast && t.done[ChildOutcome::Dead as usize] > 0;
        let room = group.max_parallel.is_none_or(|max| t.released < i64::from(max));
        match () {
            () if (group.sealed || stopped) && ended >= filled => Some("it can be finalized"),
            () if stopped && t.held + t.released > 0 => Some("it is stopped and has children that have not ended"),
            () if dead && !stopped && ended < filled => Some("a child is dead, and it is not stopped"),
            () if !stopped && !dead && t.held > 0 && room => Some("there is room for children that are held"),
            () => None,
        }
    }

    fn describe(&self, clock: Clock) -> String {
        let main = self.facts.group(clock).map(|g| (g.status(), g.filled, g.sealed, g.stopped, g.max_parallel));
        let f = &self.facts;
        let marked = (f.mark.is_some(), f.due.is_some());
        format!("{main:?} {:?} marked {marked:?} open {:?} ended {:?}", self.tally, f.open, f.ended)
    }
}

/// The first and the last child that a group can have.
fn children(group: GroupId) -> std::ops::RangeInclusive<JobId> {
    group.child(0)..=group.child(u32::MAX)
}

/// What a child is asked to be: its own fields, and those of its group.
pub(super) fn child(common: &Submit, own: &Submit) -> Arc<Submit> {
    // An own number of attempts brings a number of deliveries with it.
    let deliveries = if own.max_attempts.is_none() { common.max_deliveries } else { None };
    Arc::new(Submit {
        tenant: common.tenant.clone(),
        queue: common.queue.clone(),
        class: common.class,
        key: None,
        max_attempts: own.max_attempts.or(common.max_attempts),
        max_deliveries: own.max_deliveries.or(deliveries),
        max_age_ms: own.max_age_ms.or(common.max_age_ms),
        lease_ms: own.lease_ms.or(common.lease_ms),
        run_timeout_ms: own.run_timeout_ms.or(common.run_timeout_ms),
        progress_timeout_ms: own.progress_timeout_ms.or(common.progress_timeout_ms),
        queue_ttl_ms: own.queue_ttl_ms.or(common.queue_ttl_ms),
        retention_ms: own.retention_ms.or(common.retention_ms),
        key_ttl_ms: own.key_ttl_ms.or(common.key_ttl_ms),
        backoff: own.backoff.or(common.backoff),
        ..own.clone()
    })
}

impl Oracle {
    /// Judges what a transaction made of one group's record; returns how many transitions that was.
    pub(super) fn judge_group(
        &mut self,
        id: GroupId,
        before: &GroupFacts,
        touched: &Touched,
        clock: Clock,
        ledger: &mut Ledger,
    ) -> Result<usize, Violation> {
        let Some(mut track) = self.groups.remove(&id) else { return Ok(0) };
        let judged = self.judge_group_track(id, &mut track, before, touched, clock, ledger);
        self.groups.insert(id, track);
        judged
    }

    fn judge_group_track(
        &mut self,
        id: GroupId,
        track: &mut GroupTrack,
        before: &GroupFacts,
        touched: &Touched,
        clock: Clock,
        ledger: &mut Ledger,
    ) -> Result<usize, Violation> {
        let (Some(old), new) = (before.main.clone(), track.facts.main.clone()) else {
            return match track.facts.main.as_ref().and_then(|m| m.value.clone()) {
                Some(group) => self.judge_group_created(id, track, &group, touched, clock, ledger).map(|()| 1),
                None => Ok(0),
            };
        };
        if Some(&old) == new.as_ref() {
            return Ok(0);
        }
        if track.excused && old.value.as_ref().is_none_or(|g| g.end.is_none()) {
            // Not every change of a group has an event: a stop has none.
            return Ok(0);
        }
        let (Some(old), Some(new)) = (old.value, new.and_then(|r| r.value)) else {
            return broken(Promise::AckedNeverLost, format!("group {id} lost its record"));
        };
        if old.end.is_some() {
            let what = format!("group {id} was changed after it was final: {old:?} -> {new:?}");
            return broken(Promise::FinalizedOnce, what);
        }
        let kept = Group {
            filled: old.filled,
            sealed: old.sealed,
            stopped: old.stopped,
            end: old.end,
            trail: old.trail,
            ..(*new).clone()
        };
        if kept != *old || new.filled < old.filled || (old.sealed && !new.sealed) {
            return broken(Promise::ForwardOnly, format!("group {id} became another: {old:?} -> {new:?}"));
        }
        if new.end.is_some() {
            self.judge_final(id, track, &old, &new, clock)?;
        } else if new.filled > old.filled {
            self.judge_page(id, track, &old, &new, touched, ledger)?;
        } else if new.stopped != old.stopped {
            self.judge_stopped(id, track, before, &old, &new, clock, ledger)?;
            return Ok(0);
        } else if new.sealed && !old.sealed {
            self.group_cause(id, track, ledger, "seal", |r| matches!(r, Request::SealGroup { .. }))?;
            event(track, Kind::GroupSealed);
        } else {
            // Nothing but its version: a child was taken back.
            let back = touched.jobs.iter().any(|(job, facts)| {
                let now = self.jobs.get(job).and_then(|t| t.facts.status());
                job.child_of().is_some_and(|(g, _)| g == id)
                    && facts.status().is_some_and(Status::is_terminal)
                    && now == Some(Status::Held)
            });
            if !back {
                return broken(Promise::ForwardOnly, format!("group {id} was put anew without a reason"));
            }
        }
        Ok(1)
    }

    fn judge_group_created(
        &mut self,
        id: GroupId,
        track: &mut GroupTrack,
        group: &Group,
        touched: &Touched,
        clock: Clock,
        ledger: &mut Ledger,
    ) -> Result<(), Violation> {
        if track.known && !track.disturbed {
            return broken(Promise::ForwardOnly, format!("group {id} was created a second time"));
        }
        let Some(item) = group.traceparent.as_deref().and_then(ItemRef::find) else {
            return broken(Promise::HonestReplies, format!("group {id} was created by nobody: {group:?}"));
        };
        let asked = match ledger.request(item) {
            Some(Request::CreateGroup(asked)) => Arc::new((**asked).clone()),
            other => return broken(Promise::HonestReplies, format!("group {id} was created by {other:?}")),
        };
        self.applied(item, ledger, &id, "creation", track.disturbed)?;
        if !self.rewound && !track.disturbed && ledger.item(item).is_some_and(|i| i.effects > 1) {
            return broken(Promise::HonestReplies, format!("one request created a second group, {id}"));
        }
        let common = &asked.common;
        let same = group.tenant == common.tenant
            && group.queue == common.queue
            && group.class == common.class
            && group.mode == asked.mode
            && group.max_parallel.map(u64::from) == asked.max_parallel
            && group.key.as_ref().map(|k| &k.0) == common.key.as_ref()
            && group.sealed == asked.sealed
            && group.filled as usize == asked.children.len()
            && (group.stopped, group.end) == (None, None)
            && common.retention_ms.is_none_or(|ms| ms == group.policy.retention_ms)
            && common.key_ttl_ms == group.policy.key_ttl_ms;
        if !same {
            return broken(
                Promise::HonestReplies,
                format!("group {id} is not what was asked for: {asked:?} -> {group:?}"),
            );
        }
        let open = asked.open_timeout_ms.filter(|_| !asked.sealed).map(|ms| clock + ms * 1_000);
        if open.is_some() && track.facts.open != open {
            return broken(
                Promise::HonestReplies,
                format!("group {id} is stopped at {:?}, not at {open:?}", track.facts.open),
            );
        }
        track.known = true;
        track.by = Some(item);
        track.bodies = asked.children.iter().map(|own| child(common, own)).collect();
        track.asked = Some(asked);
        event(track, Kind::GroupCreated);
        self.judge_grown(id, track, 0, group.filled, touched)
    }

    fn judge_page(
        &mut self,
        id: GroupId,
        track: &mut GroupTrack,
        old: &Group,
        new: &Group,
        touched: &Touched,
        ledger: &mut Ledger,
    ) -> Result<(), Violation> {
        if old.sealed || old.stopped.is_some() || (new.sealed, new.stopped) != (old.sealed, old.stopped) {
            return broken(Promise::ForwardOnly, format!("group {id} grew and was not open: {old:?} -> {new:?}"));
        }
        let first = self.jobs.get(&id.child(old.filled)).and_then(|t| t.facts.main.as_ref()?.value.clone());
        let item = first.and_then(|job| job.traceparent.as_deref().and_then(ItemRef::find));
        let Some(item) = item else {
            return broken(Promise::HonestReplies, format!("group {id} grew by nobody's word: {new:?}"));
        };
        let page = match ledger.request(item) {
            Some(Request::ExtendGroup { group, from, children, .. }) if *group == id && *from == old.filled => {
                children.clone()
            }
            other => return broken(Promise::HonestReplies, format!("group {id} grew by {other:?}")),
        };
        self.applied(item, ledger, &id, "page", track.disturbed)?;
        if page.len() != (new.filled - old.filled) as usize {
            return broken(Promise::HonestReplies, format!("group {id} grew to {}: {page:?}", new.filled));
        }
        let Some(asked) = track.asked.clone() else { return Ok(()) };
        track.bodies.truncate(old.filled as usize);
        track.bodies.extend(page.iter().map(|own| child(&asked.common, own)));
        event(track, Kind::GroupExtended);
        self.judge_grown(id, track, old.filled, new.filled, touched)
    }

    /// one-key-one-job: no group without the children that it says it has.
    fn judge_grown(
        &self,
        id: GroupId,
        track: &mut GroupTrack,
        from: u32,
        to: u32,
        touched: &Touched,
    ) -> Result<(), Violation> {
        track.grown = Some((self.change, from));
        for index in from..to {
            let job = id.child(index);
            let born = touched.jobs.get(&job).is_some_and(|before| before.main.is_none());
            let there = self.jobs.get(&job).is_some_and(|t| t.facts.main.is_some());
            if !born || !there {
                let what = format!("group {id} says that it has {to} children, and {job} was not created with it");
                return broken(Promise::OneKeyOneJob, what);
            }
        }
        Ok(())
    }

    #[expect(clippy::too_many_arguments)]
    fn judge_stopped(
        &self,
        id: GroupId,
        track: &mut GroupTrack,
        before: &GroupFacts,
        old: &Group,
        new: &Group,
        clock: Clock,
        ledger: &mut Ledger,
    ) -> Result<(), Violation> {
        if old.stopped.is_some() {
            return broken(Promise::ForwardOnly, format!("group {id} was stopped again: {old:?} -> {new:?}"));
        }
        match new.stopped {
            Some(Stop::Cancelled) => {
                self.group_cause(id, track, ledger, "cancel", |r| matches!(r, Request::CancelGroup { .. }))
            }
            Some(Stop::OpenTimeout) if old.sealed || before.open.is_none_or(|at| at > clock && !self.clock_back) => {
                broken(Promise::ForwardOnly, format!("group {id} was stopped before its open time-out: {old:?}"))
            }
            Some(Stop::ChildDead)
                if old.mode != Mode::FailFast || track.tally.done[ChildOutcome::Dead as usize] == 0 =>
            {
                broken(Promise::ForwardOnly, format!("group {id} was stopped by a dead child that it has not"))
            }
            _ => Ok(()),
        }
    }

    fn judge_final(
        &self,
        id: GroupId,
        track: &mut GroupTrack,
        old: &Group,
        new: &Group,
        clock: Clock,
    ) -> Result<(), Violation> {
        let (t, c) = (&track.tally, track.tally.counts());
        let wrong = |what: &str| {
            broken(Promise::FinalizedOnce, format!("group {id} was finalized {what}: {}", track.describe(clock)))
        };
        if !old.sealed && old.stopped.is_none() {
            return wrong("before it was sealed");
        }
        if (new.filled, new.sealed, new.stopped) != (old.filled, old.sealed, old.stopped) {
            return wrong("and changed");
        }
        if t.held + t.released + t.flying > 0 || t.ended() != i64::from(old.filled) {
            return wrong("before all children have ended");
        }
        let ended = match old.stopped {
            Some(Stop::Cancelled | Stop::OpenTimeout) => GroupStatus::Cancelled,
            Some(Stop::ChildDead) => GroupStatus::Failed,
            None if old.mode == Mode::FailFast && c.dead > 0 => GroupStatus::Failed,
            None if c.succeeded == u64::from(old.filled) => GroupStatus::Succeeded,
            None if c.succeeded > 0 => GroupStatus::Partial,
            None => GroupStatus::Failed,
        };
        if new.end.map(|e| e.0) != Some(ended) {
            return wrong(&format!("as {:?}, not {ended:?}", new.end));
        }
        let retention = old.policy.retention_ms;
        let key = match (&old.key, ended) {
            (Some(_), GroupStatus::Succeeded) => old.policy.key_ttl_ms.unwrap_or(retention),
            _ => 0,
        };
        let until = clock.saturating_add(retention.max(key).saturating_mul(1_000));
        let expiry = track.facts.main.as_ref().and_then(|m| m.expiry);
        if expiry.is_none_or(|at| at < until) {
            let what = format!("group {id} is kept until {expiry:?}, and its retention ends at {until}");
            return broken(Promise::AckedNeverLost, what);
        }
        event(track, Kind::GroupFinalized);
        Ok(())
    }

    /// Some request that fits must be under way, or have ended unknown.
    fn group_cause(
        &self,
        id: GroupId,
        track: &GroupTrack,
        ledger: &mut Ledger,
        what: &str,
        fits: impl Fn(&Request) -> bool,
    ) -> Result<(), Violation> {
        let fitting = |item: &&ItemRef| ledger.may_apply(**item) && ledger.request(**item).is_some_and(&fits);
        let found: Vec<ItemRef> = track.askers.iter().filter(fitting).copied().collect();
        if found.is_empty() && !track.disturbed {
            let what = format!("group {id}: {what} without any request that may still apply");
            return broken(Promise::HonestReplies, what);
        }
        for item in &found {
            if let Some(asker) = ledger.item_mut(*item) {
                let certain = found.len() == 1;
                asker.effects += u32::from(certain);
                asker.shared += u32::from(!certain);
            }
        }
        Ok(())
    }

    // --- children -----------------------------------------------------------------------------

    /// A child that is there: what it was asked to be. No child without its group.
    pub(super) fn judge_birth(&self, job: JobId, track: &Track, clock: Clock) -> Result<Arc<Submit>, Violation> {
        let Some((id, index)) = job.child_of() else {
            return broken(Promise::ForwardOnly, format!("job {job} is held, and is no child"));
        };
        if track.known && !track.disturbed {
            return broken(Promise::ForwardOnly, format!("child {job} was created a second time"));
        }
        let group = self.groups.get(&id);
        let grown = group.and_then(|g| g.grown).is_some_and(|(change, from)| change == self.change && index >= from);
        let body = group.and_then(|g| g.bodies.get(index as usize)).filter(|_| grown);
        let Some(body) = body else {
            return broken(Promise::OneKeyOneJob, format!("child {job} was created without its group"));
        };
        if track.facts.places.first().map(|p| p.1) != Some(clock) {
            return broken(Promise::BooksBalance, format!("child {job} is not held since the clock {clock}"));
        }
        Ok(body.clone())
    }

    /// A held child is released: in its turn, and while its group lets it.
    pub(super) fn judge_release(
        &self,
        job: JobId,
        before: &Facts,
        after: &Facts,
        clock: Clock,
    ) -> Result<(), Violation> {
        let Some((id, index)) = job.child_of() else {
            return broken(Promise::ForwardOnly, format!("job {job} was released, and is no child"));
        };
        let Some(track) = self.groups.get(&id).filter(|t| !t.excused) else { return Ok(()) };
        let state = track.facts.group(clock);
        let dead = track.tally.done[ChildOutcome::Dead as usize] > 0;
        if state.is_none_or(|g| g.end.is_some() || g.stopped.is_some() || (g.mode == Mode::FailFast && dead)) {
            let what = format!("child {job} was released, but its group is through: {}", track.describe(clock));
            return broken(Promise::ForwardOnly, what);
        }
        if before.main != after.main || after.places.first().map(|p| p.1) != Some(clock) {
            return broken(Promise::Priority, format!("child {job} was not queued when it was released"));
        }
        let skipped = self
            .jobs
            .range(id.child(0)..job)
            .rev()
            .take(8)
            .find(|(_, t)| t.facts.books.iter().any(|b| b.0 == Book::Held) && !t.damaged);
        if let Some((other, _)) = skipped {
            let what = format!("child {job} ({index}) was released while {other} is held");
            return broken(Promise::Priority, what);
        }
        Ok(())
    }

    /// Whether an end of a child may be its group's doing.
    pub(super) fn group_stopped(&self, job: JobId, clock: Clock) -> bool {
        let group = job.child_of().and_then(|(id, _)| self.groups.get(&id));
        group.is_some_and(|g| g.excused || g.facts.group(clock).is_some_and(|g| g.stopped.is_some()))
    }

    /// Whether the group of a child is gone, and the child with it.
    pub(super) fn group_gone(&self, job: JobId, clock: Clock) -> bool {
        let group = job.child_of().and_then(|(id, _)| self.groups.get(&id));
        group.is_some_and(|g| g.lost || g.facts.group(clock).is_none())
    }

    /// Whether a child is taken back only by a group that is neither final nor stopped.
    pub(super) fn judge_taken_back(&self, job: JobId, clock: Clock) -> Result<(), Violation> {
        let Some((id, _)) = job.child_of() else { return Ok(()) };
        let Some(track) = self.groups.get(&id).filter(|t| !t.excused) else { return Ok(()) };
        if track.facts.group(clock).is_none_or(|g| g.end.is_some() || g.stopped.is_some()) {
            let what = format!("child {job} began a new life in a group that is through: {}", track.describe(clock));
            return broken(Promise::FinalizedOnce, what);
        }
        Ok(())
    }

    /// Whether a child stands where its state says: held, released, or among those that have ended.
    pub(super) fn child_balance(&self, job: JobId, f: &Facts, status: Option<Status>) -> Result<(), String> {
        let Some((id, index)) = job.child_of() else {
            return if f.books.is_empty() { Ok(()) } else { Err("no child, but in the books of a group".into()) };
        };
        let [(book, score)] = f.books.as_slice() else {
            let gone = status.is_none() && f.books.is_empty();
            let group = self.groups.get(&id);
            // Never created, or removed with its group.
            if gone && group.is_none_or(|g| g.facts.main.as_ref().is_none_or(|m| m.expiry.is_some())) {
                return Ok(());
            }
            return Err(format!("in {} books of its group", f.books.len()));
        };
        let fits = match (status, book) {
            (Some(Status::Held), Book::Held) => true,
            (Some(status), Book::Done(outcome)) => ChildOutcome::of(status) == Some(*outcome),
            (Some(status), Book::Released) => status != Status::Held && !status.is_terminal(),
            // Deleted, and still counted.
            (None, Book::Done(_)) => true,
            _ => false,
        };
        let scored = *score == if *book == Book::Released { SCORE_MAX } else { u64::from(index) };
        match fits && scored {
            true => Ok(()),
            false => Err(format!("is {status:?}, but stands in its group's {book:?} @{score}")),
        }
    }

    // --- the group after the transaction --------------------------------------------------------

    /// What must hold of a group after every transaction that touched it or a child.
    pub(super) fn settle_group(&mut self, id: GroupId, clock: Clock) -> Result<(), Violation> {
        self.check_limit(id)?;
        let Some(track) = self.groups.get(&id) else { return Ok(()) };
        match self.group_balanced(id, track, clock) {
            Ok(()) if track.excused && !track.lost => {
                let mended = !self.jobs.range(children(id)).any(|(_, t)| t.excused);
                if let Some(track) = self.groups.get_mut(&id) {
                    track.excused = !mended;
                }
            }
            Err(what) if !track.excused => {
                let what = format!("group {id}: {what}: {}", track.describe(clock));
                return broken(Promise::BooksBalance, what);
            }
            _ => {}
        }
        self.note_group(id, clock);
        Ok(())
    }

    fn check_limit(&self, id: GroupId) -> Result<(), Violation> {
        let Some(track) = self.groups.get(&id) else { return Ok(()) };
        let Some(max) = track.asked.as_ref().and_then(|a| a.max_parallel) else { return Ok(()) };
        if track.tally.released.max(track.tally.flying) <= max as i64 {
            return Ok(());
        }
        // What a fault made of a child is not the limit's matter.
        let children = || self.jobs.range(children(id)).map(|(_, t)| t).filter(|t| !t.damaged);
        let released = children().filter(|t| t.facts.books.iter().any(|b| b.0 == Book::Released)).count();
        let flying = children().filter(|t| flies(&t.facts)).count();
        if released.max(flying) as u64 > max {
            let what = format!("group {id}: {released} children are released, {flying} in flight, {max} may be");
            return broken(Promise::LimitHeld, what);
        }
        Ok(())
    }

    fn group_balanced(&self, id: GroupId, track: &GroupTrack, clock: Clock) -> Result<(), String> {
        let (f, t) = (&track.facts, &track.tally);
        let marked = f.mark.is_some();
        let Some(group) = f.group(clock) else {
            let left = marked || f.due.or(f.open).is_some() || t.held + t.released + t.flying > 0;
            return if left { Err("its record is gone, but not what belongs to it".into()) } else { Ok(()) };
        };
        if t.held + t.released + t.ended() != i64::from(group.filled) {
            return Err(format!("it has {} children", group.filled));
        }
        if marked != f.due.is_some() {
            return Err("its mark is one half only".into());
        }
        let expiry = f.main.as_ref().and_then(|m| m.expiry);
        if group.end.is_some() {
            if marked || f.open.is_some() || expiry.is_none() || f.ended != expiry {
                return Err("it is final, and stands where it should not".into());
            }
        } else if f.ended.or(expiry).is_some() || f.open.is_some() == (group.sealed || group.stopped.is_some()) {
            return Err("it is not final, and stands where it should not".into());
        }
        if let (Some(work), false) = (track.work(clock), marked) {
            return Err(format!("{work}, but it is not marked"));
        }
        self.group_key_balance(id, group, clock)
    }

    fn group_key_balance(&self, id: GroupId, group: &Group, clock: Clock) -> Result<(), String> {
        let Some((key, version)) = &group.key else { return Ok(()) };
        let Some(fact) = self.key_of(&group.tenant, key).filter(|f| !f.damaged) else { return Ok(()) };
        let record = fact.record.as_ref().filter(|r| r.lives(clock) && r.version == *version);
        let mine = record.filter(|r| r.value.as_ref().is_some_and(|v| v.owner == Owner::Group(id)));
        match (group.end.map(|e| e.0), mine) {
            (None, None) => Err(format!("its key {key} is not bound to it")),
            (None, Some(record)) if record.expiry.is_some() => Err("a live group's key expires".into()),
            (Some(GroupStatus::Succeeded), Some(record)) if record.expiry.is_none() => {
                Err("a final group's key never expires".into())
            }
            (Some(status), Some(_)) if status != GroupStatus::Succeeded => {
                Err(format!("ended {}, but its key is still bound to it", status.text()))
            }
            _ => Ok(()),
        }
    }

    fn note_group(&mut self, id: GroupId, clock: Clock) {
        let Some(track) = self.groups.get_mut(&id) else { return };
        track.work_since = track.work(clock).map(|_| track.work_since.unwrap_or(clock));
        self.note_group_moment(id);
    }

    fn note_group_moment(&mut self, id: GroupId) {
        let change = self.change;
        let Some(track) = self.groups.get_mut(&id) else { return };
        let main = track.facts.main.as_ref();
        let moment = GroupMoment {
            change,
            main: main.and_then(|m| m.value.clone()),
            expiry: main.and_then(|m| m.expiry),
            counts: track.tally.counts(),
        };
        if track.moments.last().is_none_or(|last| GroupMoment { change, ..last.clone() } != moment) {
            track.moments.push(moment);
        }
    }

    // --- faults ---------------------------------------------------------------------------------

    pub(super) fn excuse_group(&mut self, id: GroupId) {
        let Some(track) = self.groups.get_mut(&id) else { return };
        track.excused = true;
        track.disturbed = true;
        if track.facts.main.as_ref().is_none_or(|m| m.value.is_none()) && !track.lost {
            track.lost = true;
            for (_, child) in self.jobs.range_mut(children(id)) {
                child.excused = true;
                child.disturbed = true;
                child.damaged = true;
            }
        }
        self.note_group_moment(id);
    }

    /// Takes the groups over as they are after commits were forgotten.
    pub(super) fn rebuild_groups(&mut self, mut fresh: BTreeMap<GroupId, GroupFacts>, clock: Clock) {
        let known: BTreeSet<GroupId> = self.groups.keys().chain(fresh.keys()).copied().collect();
        for id in known {
            let facts = fresh.remove(&id).unwrap_or_default();
            let mut tally = Tally::default();
            for (_, child) in self.jobs.range(children(id)) {
                tally.give(&child.facts);
            }
            let track = self.groups.entry(id).or_default();
            if track.facts != facts || track.tally != tally {
                track.facts = facts;
                track.tally = tally;
                track.disturbed = true;
            }
            self.note_group(id, clock);
        }
    }

    /// Every group's facts and counts against the store.
    pub(super) fn full_groups(
        &mut self,
        fresh: &mut BTreeMap<GroupId, GroupFacts>,
        clock: Clock,
    ) -> Result<(), Violation> {
        let known: Vec<GroupId> = self.groups.keys().copied().collect();
        for id in known {
            let found = fresh.remove(&id).unwrap_or_default();
            let Some(track) = self.groups.get_mut(&id) else { continue };
            // The store's own collection of what has expired is no change.
            if found.main.is_none() && track.facts.main.as_ref().is_some_and(|m| !m.lives(clock)) {
                track.facts.main = None;
            }
            if track.facts != found {
                let what = format!("group {id} changed without a commit: {:?} -> {found:?}", track.facts);
                return broken(Promise::AckedNeverLost, what);
            }
            self.settle_group(id, clock)?;
        }
        match fresh.pop_first() {
            Some((id, facts)) => broken(Promise::BooksBalance, format!("unknown group {id}: {facts:?}")),
            None => Ok(()),
        }
    }

    // --- what the world asks ----------------------------------------------------------------------

    /// Groups that are not final.
    pub(crate) fn live_groups(&self, clock: Clock) -> impl Iterator<Item = (GroupId, &GroupTrack)> {
        let lives = move |t: &GroupTrack| t.facts.group(clock).is_some_and(|g| g.end.is_none());
        self.groups.iter().filter(move |(_, t)| lives(t)).map(|(id, t)| (*id, t))
    }

    /// Groups that there ever were.
    pub fn groups(&self) -> usize {
        self.groups.values().filter(|t| t.known).count()
    }

    pub fn group(&self, id: GroupId) -> Option<&GroupFacts> {
        self.groups.get(&id).map(|t| &t.facts)
    }

    /// The group's children by what became of them, as the store's books have it.
    pub fn group_counts(&self, id: GroupId) -> Option<GroupCounts> {
        self.groups.get(&id).map(|t| t.tally.counts())
    }

    /// A group's children that no commit has ended for `within`, though there was something to do.
    pub fn idle_group(&self, clock: Clock, since: Clock, within: u64) -> Option<String> {
        let late = |t: &GroupTrack| t.work_since.is_some_and(|at| at.max(since) + within < clock);
        let found = self.live_groups(clock).find(|(_, t)| !t.excused && late(t));
        let (id, track) = found?;
        let why = track.work(clock)?;
        Some(format!("group {id}: for {within} us {why}: {}", track.describe(clock)))
    }

    pub fn live_group_texts(&self, clock: Clock) -> Vec<String> {
        self.live_groups(clock).map(|(id, t)| format!("group {id}: {}", t.describe(clock))).collect()
    }

    /// For whoever computes a bound: until when it may be open, and in how many waves its children run.
    pub fn group_waves(&self, clock: Clock) -> Vec<(GroupId, u64, u64)> {
        let waves = |t: &GroupTrack| {
            let left = (t.tally.held + t.tally.released).max(0) as u64;
            let max = t.facts.group(clock).and_then(|g| g.max_parallel).map_or(u64::MAX, u64::from);
            left.div_ceil(max)
        };
        let opens = |t: &GroupTrack| t.facts.open.map_or(0, |at| at.saturating_sub(clock));
        self.live_groups(clock).map(|(id, t)| (id, opens(t), waves(t))).collect()
    }

    pub(super) fn audit_groups(&self, seen: &BTreeMap<(Subject, Kind), u32>) -> Result<(), Violation> {
        for (id, track) in self.groups.iter().filter(|(_, t)| !t.disturbed) {
            for kind in Kind::ALL {
                let expected = track.events.get(&kind).copied().unwrap_or(0);
                let found = seen.get(&(Subject::Group(*id), kind)).copied().unwrap_or(0);
                if expected != found {
                    let promise = match kind {
                        Kind::GroupFinalized => Promise::FinalizedOnce,
                        _ => Promise::HonestReplies,
                    };
                    let what = format!("group {id}: {expected} transitions, {found} events of kind {}", kind.text());
                    return broken(promise, what);
                }
            }
        }
        Ok(())
    }
}

fn event(track: &mut GroupTrack, kind: Kind) {
    *track.events.entry(kind).or_default() += 1;
}
