//! limit-held, finalized-once and what else is promised of groups and their children.
//!
//! A group is followed as the jobs are: its record, its mark and its entries; and by how many of its
//! children stand where, which is moved with each child that a transaction touches. What a fault took from
//! a group or from one of its children excuses that group from the balance of its books, its marks, its
//! status and its counts, until all of it is mended; not from being finalized once at most, not from
//! changing afterwards, not from its limit as far as children are concerned that no fault has touched, and
//! not from coming to its end. A group whose own record is gone is excused, with its children, for good.

use std::collections::BTreeMap;
use std::sync::Arc;

use leasehold_core::event::Kind;
use leasehold_core::group::record::{Group, GroupStatus, Mode, Stop};
use leasehold_core::ids::GroupId;
use leasehold_core::job::record::{ChildOutcome, Owner, Status};
use leasehold_core::request::{CreateGroup, GroupCounts, Submit};
use leasehold_core::store::{Clock, Score, Version};
use leasehold_core::{JobId, Request};

use super::facts::{Facts, Rec, Touched};
use super::{Oracle, Promise, Violation, broken, object};
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
    pub(super) held: i64,
    pub(super) released: i64,
    pub(super) done: [i64; ChildOutcome::ALL.len()],
    /// Released and not ended, by their own records and places, whatever the group's books say.
    pub(super) flying: i64,
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

    pub(super) fn ended(&self) -> i64 {
        self.done.iter().sum()
    }

    pub(super) fn counts(&self) -> GroupCounts {
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
pub(super) fn flies(child: &Facts) -> bool {
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
    pub(super) grown: Option<(u64, u32)>,
    /// Since when there has been something to do for it.
    pub(super) work_since: Option<Clock>,
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
    pub(super) fn work(&self, clock: Clock) -> Option<&'static str> {
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

    pub(super) fn describe(&self, clock: Clock) -> String {
        let main = self.facts.group(clock).map(|g| (g.status(), g.filled, g.sealed, g.stopped, g.max_parallel));
        let f = &self.facts;
        let marked = (f.mark.is_some(), f.due.is_some());
        format!("{main:?} {:?} marked {marked:?} open {:?} ended {:?}", self.tally, f.open, f.ended)
    }
}

/// The first and the last child that a group can have.
pub(super) fn children(group: GroupId) -> std::ops::RangeInclusive<JobId> {
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
        self.count_group_turns(id, before, clock);
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
            // A page is what was asked for all the same: its children are judged by it.
            if let (Some(old), Some(new)) = (&old.value, new.as_ref().and_then(|r| r.value.as_ref()))
                && new.filled > old.filled
            {
                self.judge_page(id, track, old, new, touched, ledger)?;
            }
            // Not every change of a group has an event: a stop has none.
            return Ok(0);
        }
        let (Some(old), Some(new)) = (old.value, new.and_then(|r| r.value)) else {
            return broken(Promise::AckedNeverLost, format!("group {id} lost its record"));
        };
        if old.end.is_some() {
            let what = format!("group {id} was changed after it was final: {old:?} -> {new:?}");
            object(Promise::FinalizedOnce, what)?;
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
            object(Promise::ForwardOnly, format!("group {id} became another: {old:?} -> {new:?}"))?;
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
                object(Promise::ForwardOnly, format!("group {id} was put anew without a reason"))?;
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
            object(Promise::ForwardOnly, format!("group {id} was created a second time"))?;
        }
        let Some(item) = group.traceparent.as_deref().and_then(ItemRef::find) else {
            return broken(Promise::HonestReplies, format!("group {id} was created by nobody: {group:?}"));
        };
        let asked = match ledger.request(item) {
            Some(Request::CreateGroup(asked)) => Arc::new((**asked).clone()),
            other => return broken(Promise::HonestReplies, format!("group {id} was created by {other:?}")),
        };
        self.applied(item, ledger, &id, "creation", track.disturbed)?;
        // With the record of the first went the evidence that there was one.
        let forgot = || self.damaged && self.groups.values().any(|t| t.by == Some(item) && t.disturbed);
        if !self.rewound && !track.disturbed && ledger.item(item).is_some_and(|i| i.effects > 1) && !forgot() {
            object(Promise::HonestReplies, format!("one request created a second group, {id}"))?;
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
            object(Promise::HonestReplies, format!("group {id} is not what was asked for: {asked:?} -> {group:?}"))?;
        }
        let open = asked.open_timeout_ms.filter(|_| !asked.sealed).map(|ms| clock + ms * 1_000);
        if open.is_some() && track.facts.open != open {
            object(
                Promise::HonestReplies,
                format!("group {id} is stopped at {:?}, not at {open:?}", track.facts.open),
            )?;
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
            object(Promise::ForwardOnly, format!("group {id} grew and was not open: {old:?} -> {new:?}"))?;
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
            object(Promise::HonestReplies, format!("group {id} grew to {}: {page:?}", new.filled))?;
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
                object(Promise::OneKeyOneJob, what)?;
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
            object(Promise::ForwardOnly, format!("group {id} was stopped again: {old:?} -> {new:?}"))?;
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
            object(Promise::AckedNeverLost, what)?;
        }
        event(track, Kind::GroupFinalized);
        let bound = old.key.as_ref().filter(|_| ended == GroupStatus::Succeeded).map(|(key, _)| key);
        let until = clock.saturating_add(key.saturating_mul(1_000));
        bound.map_or(Ok(()), |key| self.judge_bound(&old.tenant, key, Owner::Group(id), until))
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
            object(Promise::HonestReplies, what)?;
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
}

fn event(track: &mut GroupTrack, kind: Kind) {
    *track.events.entry(kind).or_default() += 1;
}
