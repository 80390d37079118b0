//! Groups: a parent and its children, released some at a time, and final once.
//!
//! A child is a job whose id names its group and its index there. Where the children are is not in the
//! group's record but in indexes, so nothing has to be counted and nothing can drift:
//!
//! ```text
//! create --> held/{group} --step: take, while released/{group} has room--> released/{group}
//!                 |                                                            |
//!                 +----------- the child's end, by whatever way ---------------+--> done/{group}/{outcome}
//! ```
//!
//! **Whoever ends a child marks the group** in the same transaction, and knows nothing more of it. A mark
//! (a record and an entry in `groups/due`) says that there may be something to do; any replica's `step` does
//! it: releases the next children, cancels those of a stopped group, or makes the group final. The mark
//! goes only, at its version, when nothing was left to do, so a crash in between is always found.
//!
//! Reading order: [`record`], `create`, `step`, `change`, `look`, `mend`.

mod change;
mod create;
mod look;
mod mend;
pub mod record;
mod step;

pub(crate) use change::Change;
pub(crate) use create::{Create, Extend};
pub(crate) use look::{Children, Look};
pub(crate) use mend::Mend;
pub(crate) use step::Step;

use crate::codec::Undecodable;
use crate::failure::Failure;
use crate::ids::GroupId;
use crate::job::record::ChildOutcome;
use crate::name::Name;
use crate::replica::task::decode_record;
use crate::request::{GroupCounts, GroupView};
use crate::store::{Record, Span, Version, keys};
use record::Group;

/// The group behind a record, if it is this tenant's.
fn of(record: &Record, tenant: &str) -> Result<(Version, Group), Failure> {
    match decode_record::<Group>(record) {
        Ok(Some((version, group))) if group.tenant == tenant => Ok((version, group)),
        Ok(_) => Err(Failure::UnknownGroup),
        Err(Undecodable::Newer) => Err(Failure::NewerFormat { retry_after_ms: 10_000 }),
        Err(Undecodable::Corrupt) => Err(Failure::Quarantined),
    }
}

/// The indexes that say where a group's children are: each child stands in one.
fn books(id: GroupId) -> impl Iterator<Item = Name> {
    let done = ChildOutcome::ALL.into_iter().map(move |outcome| keys::done(id, outcome));
    [keys::held(id), keys::released(id)].into_iter().chain(done)
}

/// How many [`books`] a group has.
const BOOKS: usize = 2 + ChildOutcome::ALL.len();

/// Their sizes.
fn sizes(id: GroupId) -> impl Iterator<Item = (Name, Span)> {
    books(id).map(|index| (index, Span::All))
}

fn counts(sizes: &[u64]) -> GroupCounts {
    let at = |n: usize| sizes.get(n).copied().unwrap_or(0);
    GroupCounts {
        held: at(0),
        in_flight: at(1),
        succeeded: at(2),
        dead: at(3),
        cancelled: at(4),
        expired: at(5),
        lost: at(6),
    }
}

fn view(id: GroupId, group: &Group, counts: GroupCounts) -> GroupView {
    GroupView {
        id,
        queue: group.queue.clone(),
        class: group.class,
        mode: group.mode,
        max_parallel: group.max_parallel,
        status: group.status(),
        sealed: group.sealed,
        stopped: group.stopped,
        created_at: group.created,
        open_until: group.open_until.filter(|_| !group.sealed),
        ended_at: group.end.map(|(_, at)| at),
        children: group.filled,
        counts,
        key: group.key.as_ref().map(|(key, _)| key.clone()),
    }
}
