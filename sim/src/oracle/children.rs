//! What is promised of a group's children: each is created with its group, released in its turn, and stands
//! in one of the group's books.

use std::sync::Arc;

use leasehold_core::JobId;
use leasehold_core::group::record::Mode;
use leasehold_core::job::record::{ChildOutcome, Status};
use leasehold_core::request::Submit;
use leasehold_core::store::{Clock, SCORE_MAX};

use super::facts::Facts;
use super::groups::Book;
use super::{GroupTrack, Oracle, Promise, Track, Violation, broken, object};

impl Oracle {
    /// A child that is there: what it was asked to be. No child without its group.
    pub(super) fn judge_birth(&self, job: JobId, track: &Track, clock: Clock) -> Result<Arc<Submit>, Violation> {
        let Some((id, index)) = job.child_of() else {
            return broken(Promise::ForwardOnly, format!("job {job} is held, and is no child"));
        };
        if track.known && !track.disturbed {
            object(Promise::ForwardOnly, format!("child {job} was created a second time"))?;
        }
        let group = self.groups.get(&id);
        let grown = group.and_then(|g| g.grown).is_some_and(|(change, from)| change == self.change && index >= from);
        let body = group.and_then(|g| g.bodies.get(index as usize)).filter(|_| grown);
        let Some(body) = body else {
            return broken(Promise::OneKeyOneJob, format!("child {job} was created without its group"));
        };
        if track.facts.places.first().map(|p| p.1) != Some(clock) {
            object(Promise::BooksBalance, format!("child {job} is not held since the clock {clock}"))?;
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
            object(Promise::ForwardOnly, what)?;
        }
        if before.main != after.main || after.places.first().map(|p| p.1) != Some(clock) {
            object(Promise::Priority, format!("child {job} was not queued when it was released"))?;
        }
        let skipped = self
            .jobs
            .range(id.child(0)..job)
            .rev()
            .take(8)
            .find(|(_, t)| t.facts.books.iter().any(|b| b.0 == Book::Held) && !t.damaged);
        if let Some((other, _)) = skipped {
            let what = format!("child {job} ({index}) was released while {other} is held");
            object(Promise::Priority, what)?;
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
            object(Promise::FinalizedOnce, what)?;
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
            let through = |g: &GroupTrack| g.facts.main.as_ref().is_none_or(|m| m.expiry.is_some());
            // Its page may be among the commits that the store forgot.
            let beyond = |g: &GroupTrack| {
                g.facts.main.as_ref().and_then(|m| m.value.as_ref()).is_some_and(|group| index >= group.filled)
            };
            // Never created, or removed with its group.
            if gone && group.is_none_or(|g| through(g) || beyond(g)) {
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
}
