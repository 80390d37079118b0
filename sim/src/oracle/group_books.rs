//! A group after every transaction that touched it or a child: its limit, its balance and its marks; what
//! faults excuse; and what the world asks about groups.

use std::collections::{BTreeMap, BTreeSet};

use leasehold_core::event::Kind;
use leasehold_core::group::record::{Group, GroupStatus};
use leasehold_core::ids::GroupId;
use leasehold_core::job::record::Owner;
use leasehold_core::request::GroupCounts;
use leasehold_core::store::Clock;

use super::groups::{Book, GroupFacts, GroupMoment, GroupTrack, Tally, children, flies};
use super::{Oracle, Promise, Subject, Violation, object};

impl Oracle {
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
            // What was decided on what the store has forgotten since may still arrive: a mark that was seen to is
            // the mark of what was forgotten too. The scrub puts it back.
            Err(_) if self.rewound && !track.excused && self.only_unmarked(id, track, clock) => {
                if let Some(track) = self.groups.get_mut(&id) {
                    track.excused = true;
                }
            }
            Err(what) if !track.excused => {
                let what = format!("group {id}: {what}: {}", track.describe(clock));
                object(Promise::BooksBalance, what)?;
            }
            _ => {}
        }
        self.note_group(id, clock);
        Ok(())
    }

    /// Whether soon after a loss of commits nothing is wrong with a group but that its mark is missing.
    fn only_unmarked(&self, id: GroupId, track: &GroupTrack, clock: Clock) -> bool {
        let soon = clock <= self.rewound_at.saturating_add(2 * leasehold_core::limits::VALID);
        let mut marked = track.clone();
        marked.facts.mark = marked.facts.main.as_ref().map(|main| main.version);
        marked.facts.due = Some(clock);
        soon && self.group_balanced(id, &marked, clock).is_ok()
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
            object(Promise::LimitHeld, what)?;
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
                object(Promise::AckedNeverLost, what)?;
            }
            self.settle_group(id, clock)?;
        }
        match fresh.pop_first() {
            Some((id, facts)) => object(Promise::BooksBalance, format!("unknown group {id}: {facts:?}")),
            None => Ok(()),
        }
    }

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
                    object(promise, what)?;
                }
            }
        }
        Ok(())
    }
}
