//! honest-replies for groups: every answer must have been true at some instant of its window.

use std::sync::Arc;

use leasehold_core::group::record::{Group, GroupStatus};
use leasehold_core::ids::GroupId;
use leasehold_core::job::record::{Owner, Status};
use leasehold_core::request::{ChildState, ChildView, CreateGroup, GroupCounts, GroupView, Submit};
use leasehold_core::store::Clock;
use leasehold_core::{Failure, JobId, Outcome, Request, Response};

use super::groups::{GroupMoment, GroupTrack};
use super::replies::{Window, lied, same_body};
use super::{Moment, Oracle, Promise, Violation, object};
use crate::calls::{ItemRef, Ledger};

/// Whether the group is there at that clock.
fn there(m: &GroupMoment, clock: u64) -> Option<&Arc<Group>> {
    m.main.as_ref().filter(|_| m.expiry.is_none_or(|e| e > clock))
}

/// Whether a view is what the group was at that moment.
fn shows(m: &GroupMoment, view: &GroupView) -> bool {
    m.main.as_ref().is_some_and(|g| {
        let same = (view.status, view.sealed, view.stopped, view.children, view.max_parallel, view.mode)
            == (g.status(), g.sealed, g.stopped, g.filled, g.max_parallel, g.mode);
        same && view.ended_at == g.end.map(|e| e.1)
            && (&view.queue, view.class) == (&g.queue, g.class)
            && view.key.as_ref() == g.key.as_ref().map(|k| &k.0)
    }) && m.counts == view.counts
}

impl Oracle {
    /// Where a group stood at the instants of the window.
    fn group_moments(&self, w: Window, id: GroupId) -> (Option<&GroupTrack>, &[GroupMoment]) {
        let Some(track) = self.groups.get(&id) else { return (None, &[]) };
        let first = track.moments.iter().rposition(|m| m.change <= w.from.change);
        (Some(track), &track.moments[first.unwrap_or(0)..])
    }

    /// Whether the group of a child was there at no instant of the window.
    pub(super) fn group_was_gone(&self, w: Window, job: JobId) -> bool {
        let Some((id, _)) = job.child_of() else { return false };
        let (track, moments) = self.group_moments(w, id);
        track.is_some_and(|t| !t.disturbed) && !moments.iter().any(|m| there(m, w.from.clock).is_some())
    }

    /// Whether the group of a child was gone at some instant.
    pub(super) fn group_ever_gone(&self, w: Window, job: JobId) -> bool {
        let Some((id, _)) = job.child_of() else { return false };
        let (track, moments) = self.group_moments(w, id);
        track.is_none_or(|t| t.disturbed) || moments.iter().any(|m| there(m, w.clock).is_none())
    }

    /// Whether the group of a child was final, stopped or gone at some instant: it takes nobody back.
    pub(super) fn group_ever_through(&self, w: Window, job: JobId) -> bool {
        let Some((id, _)) = job.child_of() else { return false };
        let (track, moments) = self.group_moments(w, id);
        let through = |m: &GroupMoment| there(m, w.clock).is_none_or(|g| g.end.is_some() || g.stopped.is_some());
        track.is_none_or(|t| t.disturbed) || moments.iter().any(through)
    }

    pub(super) fn judge_group_created_reply(
        &self,
        w: Window,
        asked: &CreateGroup,
        view: &GroupView,
        request: &Request,
        outcome: &Outcome,
    ) -> Result<(), Violation> {
        let Some(track) = self.groups.get(&view.id).filter(|t| t.known) else {
            return lied(w, request, outcome, "acknowledged, but there is no such group");
        };
        if track.by != Some(w.item) && !self.rewound {
            return lied(w, request, outcome, format!("the group is that of {:?}", track.by));
        }
        let n = asked.children.len() as u64;
        let fresh = view.counts == GroupCounts { held: n, ..GroupCounts::default() };
        let status = if asked.sealed { GroupStatus::Running } else { GroupStatus::Open };
        let same = u64::from(view.children) == n && view.status == status && view.key == asked.common.key;
        if !(track.disturbed || fresh && same) {
            return lied(w, request, outcome, "the group never was like that");
        }
        Ok(())
    }

    /// Whether a group was created with that body.
    pub(super) fn same_group(&self, id: GroupId, asked: &CreateGroup) -> bool {
        let first = self.groups.get(&id).and_then(|t| t.asked.as_ref());
        first.is_some_and(|first| {
            same_body(&first.common, &asked.common)
                && first.children == asked.children
                && (first.max_parallel, first.mode, first.sealed, first.open_timeout_ms)
                    == (asked.max_parallel, asked.mode, asked.sealed, asked.open_timeout_ms)
        })
    }

    pub(super) fn judge_group_existing(
        &self,
        w: Window,
        asked: &CreateGroup,
        view: &GroupView,
        request: &Request,
        outcome: &Outcome,
    ) -> Result<(), Violation> {
        let key = asked.common.key.as_ref().and_then(|k| self.key_of(&asked.common.tenant, k));
        let Some(key) = key else { return lied(w, request, outcome, "the key was never bound") };
        let (track, moments) = self.group_moments(w, view.id);
        if key.damaged || track.is_none_or(|t| t.disturbed) {
            return Ok(());
        }
        if !key.named_since(w.from.change).any(|owner| owner == Owner::Group(view.id)) {
            return lied(w, request, outcome, "the key did not name that group");
        }
        if !self.same_group(view.id, asked) {
            object(Promise::OneKeyOneJob, format!("another body was taken for a repeat: {request:?}"))?;
        }
        if !moments.iter().any(|m| shows(m, view)) {
            return lied(w, request, outcome, "the group never was like that");
        }
        Ok(())
    }

    pub(super) fn judge_group_ok(
        &self,
        w: Window,
        request: &Request,
        response: &Response,
        outcome: &Outcome,
        ledger: &Ledger,
    ) -> Result<(), Violation> {
        let lie = |why: &str| lied(w, request, outcome, why);
        let (Response::Group(view) | Response::Children { group: view, .. }) = response else {
            return lie("that is no answer to this");
        };
        let (Some(track), moments) = self.group_moments(w, view.id) else { return lie("there is no such group") };
        if !moments.iter().any(|m| shows(m, view)) {
            return lie("the group never was like that");
        }
        match (request, response) {
            (Request::Group { group, .. }, Response::Group(_)) if *group == view.id => Ok(()),
            (Request::SealGroup { group, .. }, Response::Group(_)) if *group == view.id => {
                if !view.sealed {
                    lie("it was not sealed")
                } else {
                    Ok(())
                }
            }
            (Request::CancelGroup { group, .. }, Response::Group(_)) if *group == view.id => {
                let through = view.stopped.is_some() || view.status == GroupStatus::Cancelled;
                if !through { lie("it was not stopped") } else { Ok(()) }
            }
            (Request::ExtendGroup { group, from, children, .. }, Response::Group(_)) if *group == view.id => {
                let to = u64::from(*from) + children.len() as u64;
                if u64::from(view.children) < to {
                    return lie("the page is not there");
                }
                if self.differ(track, *from, children).any(|child| self.comparable(group.child(child), w.clock)) {
                    object(Promise::OneKeyOneJob, format!("another page was taken for a repeat: {request:?}"))?;
                }
                Ok(())
            }
            (Request::Children { group, from, .. }, Response::Children { children, next, .. }) if *group == view.id => {
                for (index, child) in (*from..).zip(children) {
                    if child.index != index || child.id != view.id.child(index) {
                        return lie("a child is out of its place");
                    }
                    self.judge_child_view(w, child, request, outcome, ledger)?;
                }
                let last = u64::from(*from) + children.len() as u64;
                let whole = next.map_or(last >= u64::from(view.children), |next| u64::from(next) == last);
                if !whole { lie("children are left out") } else { Ok(()) }
            }
            _ => lie("that is no answer to this"),
        }
    }

    fn judge_child_view(
        &self,
        w: Window,
        child: &ChildView,
        request: &Request,
        outcome: &Outcome,
        ledger: &Ledger,
    ) -> Result<(), Violation> {
        let Some(track) = self.jobs.get(&child.id).filter(|t| !t.disturbed) else { return Ok(()) };
        let fits = |m: &Moment| match (child.state, m.status) {
            (ChildState::Held, Some(Status::Held)) => true,
            (ChildState::InFlight, Some(s)) => !s.is_terminal() && s != Status::Held,
            (ChildState::Done(outcome), Some(s)) => leasehold_core::job::record::ChildOutcome::of(s) == Some(outcome),
            // Deleted: it still counts as what it was.
            (ChildState::Done(_), None) => true,
            _ => false,
        };
        if !self.ever(w, child.id, fits) {
            return lied(w, request, outcome, format!("child {} never stood so", child.id));
        }
        let Some(result) = &child.result else { return Ok(()) };
        let mark = std::str::from_utf8(&result.data.bytes).ok().and_then(ItemRef::find);
        match mark.and_then(|m| ledger.request(m)) {
            Some(Request::Complete(c)) if c.held.job == child.id && c.result.as_ref() == Some(result) => Ok(()),
            _ => lied(w, request, outcome, format!("nobody completed {:?} so", track.by)),
        }
    }

    /// Whether anything is left of a child to compare with: of one that was deleted there is not.
    fn comparable(&self, child: JobId, clock: Clock) -> bool {
        self.jobs.get(&child).is_some_and(|t| t.facts.job(clock).is_some())
    }

    /// The children of a page that were created with another body.
    fn differ<'a>(&self, track: &'a GroupTrack, from: u32, page: &'a [Submit]) -> impl Iterator<Item = u32> + 'a {
        let common = track.asked.as_ref().map(|asked| &asked.common);
        (from..).zip(page).filter_map(move |(index, own)| {
            let body = track.bodies.get(index as usize)?;
            (!same_body(body, &super::groups::child(common?, own))).then_some(index)
        })
    }

    pub(super) fn judge_group_failure(
        &self,
        w: Window,
        id: GroupId,
        request: &Request,
        failure: &Failure,
        outcome: &Outcome,
    ) -> Result<(), Violation> {
        let lie = |why: &str| lied(w, request, outcome, why);
        let (track, moments) = self.group_moments(w, id);
        let ever =
            |fits: &dyn Fn(&Group) -> bool| moments.iter().any(|m| there(m, w.from.clock).is_some_and(|g| fits(g)));
        match failure {
            Failure::UnknownGroup => {
                let other = track
                    .and_then(|t| t.asked.as_ref())
                    .is_some_and(|a| Some(a.common.tenant.as_str()) != tenant(request));
                let before = track.is_none_or(|t| t.moments.first().is_none_or(|m| m.change > w.from.change));
                let gone = moments.iter().any(|m| there(m, w.clock).is_none());
                if !other && !before && !gone {
                    let what = format!("call {}: \"unknown\", but group {id} was there: {request:?}", w.item.call);
                    object(Promise::AckedNeverLost, what)?;
                }
                Ok(())
            }
            Failure::WrongOffset { expected } => {
                let Request::ExtendGroup { from, .. } = request else { return lie("nothing was to be added") };
                let at = |g: &Group| g.filled == *expected && *from != *expected;
                if !ever(&at) { lie("it never had so many children") } else { Ok(()) }
            }
            Failure::ChildDiffers { index } => {
                let Request::ExtendGroup { from, children, .. } = request else {
                    return lie("nothing was to be added");
                };
                let differ: Vec<u32> = track.into_iter().flat_map(|t| self.differ(t, *from, children)).collect();
                let first = differ.iter().find(|child| self.comparable(id.child(**child), w.clock));
                if !differ.contains(index) || first.is_some_and(|first| first < index) {
                    return lie(&format!("the first that differs is {first:?}"));
                }
                Ok(())
            }
            Failure::NotOpen => {
                if !ever(&|g| g.sealed || g.stopped.is_some() || g.end.is_some()) {
                    lie("it was open")
                } else {
                    Ok(())
                }
            }
            Failure::NotFinal => {
                if !ever(&|g| g.end.is_none()) {
                    lie("it was final")
                } else {
                    Ok(())
                }
            }
            Failure::AlreadyTerminal => {
                let other = |g: &Group| g.end.is_some_and(|e| e.0 != GroupStatus::Cancelled);
                if !ever(&other) { lie("it had not ended otherwise") } else { Ok(()) }
            }
            _ => Ok(()),
        }
    }
}

fn tenant(request: &Request) -> Option<&str> {
    match request {
        Request::ExtendGroup { tenant, .. }
        | Request::SealGroup { tenant, .. }
        | Request::CancelGroup { tenant, .. }
        | Request::Group { tenant, .. }
        | Request::Children { tenant, .. } => Some(tenant),
        _ => None,
    }
}
