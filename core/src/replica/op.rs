//! Every operation, and which request becomes which.

use alloc::boxed::Box;
use alloc::vec::Vec;

use super::Mark;
use super::task::{Cx, Next, Operation};
use crate::dispatch;
use crate::failure::Failure;
use crate::group;
use crate::job::audit::Audit;
use crate::job::beat::Beat;
use crate::job::check;
use crate::job::claim::Claim;
use crate::job::events::Events;
use crate::job::finish::Finish;
use crate::job::inspect::Inspect;
use crate::job::list::List;
use crate::job::look::Look;
use crate::job::operate::{Operate, What};
use crate::job::queue::{Change, Purge, Queues, Settings};
use crate::job::ready::Ready;
use crate::job::scrub::Scrub;
use crate::job::submit::Submit;
use crate::job::sweep::{Deadlines, Names};
use crate::pool;
use crate::request::{Request, Response};
use crate::store::{Answer, Clock, Record, Snapshot};

/// Every operation.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub(crate) enum Op {
    Submit(Box<Submit>),
    Look(Box<Look>),
    List(Box<List>),
    Claim(Box<Claim>),
    Beat(Box<Beat>),
    Finish(Box<Finish>),
    Operate(Box<Operate>),
    Queues(Box<Queues>),
    Settings(Box<Settings>),
    Purge(Box<Purge>),
    Events(Box<Events>),
    Audit(Box<Audit>),
    Inspect(Box<Inspect>),
    Ready(Ready),
    CreateGroup(Box<group::Create>),
    ExtendGroup(Box<group::Extend>),
    ChangeGroup(group::Change),
    Group(Box<group::Look>),
    Children(Box<group::Children>),
    Groups(Box<group::Step>),
    Mend(Box<group::Mend>),
    SetPool(pool::Set),
    DeletePool(pool::Delete),
    Pool(Box<pool::One>),
    AllPools(pool::All),
    Acquire(Box<pool::Acquire>),
    Refresh(Box<pool::Refresh>),
    Release(Box<pool::Release>),
    Pools(Box<pool::Tidy>),
    Enter(Box<pool::Enter>),
    CheckPools(Box<pool::Check>),
    Dispatch(Box<dispatch::Dispatch>),
    Hold(Box<dispatch::Change>),
    GiveBack(Box<dispatch::Leave>),
    Holds(dispatch::Holds),
    Deadlines(Box<Deadlines>),
    Names(Box<Names>),
    Scrub(Box<Scrub>),
}

impl Op {
    /// The operation for a request, or what is wrong with it. Not for batches and draining, which
    /// are the replica's own.
    pub fn of(request: Request, nonce: u64) -> Result<Op, Failure> {
        Ok(match request {
            Request::Submit(asked) => Op::Submit(Box::new(Submit::new(asked)?)),
            Request::Get { tenant, job } => Op::Look(Box::new(Look::state(tenant, job))),
            Request::Payload { tenant, job } => Op::Look(Box::new(Look::payload(tenant, job))),
            Request::Result { tenant, job } => Op::Look(Box::new(Look::result(tenant, job))),
            Request::Why { tenant, job } => Op::Look(Box::new(Look::why(tenant, job))),
            Request::List(asked) => Op::List(Box::new(List::new(asked)?)),
            Request::Cancel { tenant, job } => Op::Operate(Box::new(Operate::new(tenant, job, What::Cancel))),
            Request::Retry { tenant, job } => Op::Operate(Box::new(Operate::new(tenant, job, What::Retry))),
            Request::Delete { tenant, job } => Op::Operate(Box::new(Operate::new(tenant, job, What::Delete))),
            Request::Claim(asked) => Op::Claim(Box::new(Claim::new(asked)?)),
            Request::Heartbeat(asked) => Op::Beat(Box::new(Beat::new(asked)?)),
            Request::Complete(asked) => Op::Finish(Box::new(Finish::complete(asked)?)),
            Request::Fail(asked) => Op::Finish(Box::new(Finish::fail(asked)?)),
            Request::Release(held) => Op::Finish(Box::new(Finish::release(held))),
            Request::Queues { tenant } => Op::Queues(Box::new(Queues::all(tenant))),
            Request::Queue { tenant, queue } => Op::Queues(Box::new(Queues::one(tenant, queue)?)),
            Request::SetQueue { tenant, queue, lease_ms } => {
                Op::Settings(Box::new(Settings::new(tenant, queue, Change::Set { lease_ms })?))
            }
            Request::Pause { tenant, queue, reason } => {
                Op::Settings(Box::new(Settings::new(tenant, queue, Change::Pause(reason))?))
            }
            Request::Resume { tenant, queue } => Op::Settings(Box::new(Settings::new(tenant, queue, Change::Resume)?)),
            Request::Purge { tenant, queue, status } => Op::Purge(Box::new(Purge::new(tenant, queue, status)?)),
            Request::Events { tenant, after, limit, wait_ms } => {
                Op::Events(Box::new(Events::new(tenant, after, limit, wait_ms)?))
            }
            Request::CreateGroup(asked) => Op::CreateGroup(Box::new(group::Create::new(asked)?)),
            Request::ExtendGroup { tenant, group, from, children } => {
                Op::ExtendGroup(Box::new(group::Extend::new(tenant, group, from, children)?))
            }
            Request::SealGroup { tenant, group } => Op::ChangeGroup(group::Change::seal(tenant, group)),
            Request::CancelGroup { tenant, group } => Op::ChangeGroup(group::Change::cancel(tenant, group)),
            Request::Group { tenant, group, wait_ms } => Op::Group(Box::new(group::Look::new(tenant, group, wait_ms)?)),
            Request::Children { tenant, group, from, limit, contents } => {
                Op::Children(Box::new(group::Children::new(tenant, group, from, limit, contents)?))
            }
            Request::SetPool(asked) => Op::SetPool(pool::Set::new(asked)?),
            Request::DeletePool { pool } => Op::DeletePool(pool::Delete::new(pool)?),
            Request::Pools => Op::AllPools(pool::All::default()),
            Request::Pool { tenant, pool } => Op::Pool(Box::new(pool::One::new(tenant, pool)?)),
            Request::Acquire(asked) => Op::Acquire(Box::new(pool::Acquire::new(asked)?)),
            Request::RefreshSlot { tenant, pool, slot } => {
                Op::Refresh(Box::new(pool::Refresh::new(tenant, pool, slot)?))
            }
            Request::ReleaseSlot { tenant, pool, slot } => {
                Op::Release(Box::new(pool::Release::new(tenant, pool, slot)?))
            }
            Request::Dispatch(asked) => Op::Dispatch(Box::new(dispatch::Dispatch::new(asked)?)),
            Request::HoldUpstream(asked) => Op::Hold(Box::new(dispatch::Change::hold(asked)?)),
            Request::FreeUpstream { upstream } => {
                Op::Hold(Box::new(dispatch::Change::free(upstream, Response::UpstreamFreed)))
            }
            Request::GiveBack(asked) => Op::GiveBack(Box::new(dispatch::Leave::new(asked)?)),
            Request::Upstreams => Op::Holds(dispatch::Holds),
            Request::Audit { cursor: Some(cursor), repair } if pool::Check::is_own(&cursor) => {
                Op::CheckPools(Box::new(pool::Check::new(&cursor, repair)?))
            }
            Request::Audit { cursor, repair } => Op::Audit(Box::new(Audit::new(cursor, repair)?)),
            Request::Inspect(what) => Op::Inspect(Box::new(Inspect::new(what)?)),
            Request::Ready => Op::Ready(Ready::new(nonce)),
            Request::Drain | Request::Batch(_) => {
                return Err(check::invalid("items", "must not be nested".into()));
            }
        })
    }

    /// Hands on what was read, unless a newer release wrote some of it: what cannot be read is not taken for
    /// absent or corrupt, and not written over.
    pub fn read_known(&mut self, mut snapshot: Snapshot, cx: &mut Cx<'_>) -> Next {
        if !snapshot.has_newer() {
            return self.read(snapshot, cx);
        }
        cx.mark(Mark::NewerFormat);
        match self {
            // These pass over what they cannot read, or tell of it.
            Op::Claim(_)
            | Op::Dispatch(_)
            | Op::Audit(_)
            | Op::CheckPools(_)
            | Op::Inspect(_)
            | Op::Groups(_)
            | Op::Mend(_)
            | Op::Pools(_)
            | Op::Enter(_)
            | Op::Scrub(_) => {}
            Op::Deadlines(_) | Op::Names(_) => {
                snapshot.slices.iter_mut().for_each(|slice| slice.retain(|entry| !entry.has_newer()));
                if snapshot.records.iter().any(Record::is_newer) {
                    return Next::ok(Response::Ready);
                }
            }
            _ => return Next::fail(Failure::NewerFormat { retry_after_ms: 10_000 }),
        }
        self.read(snapshot, cx)
    }

    fn inner(&mut self) -> &mut dyn Operation {
        match self {
            Op::Submit(op) => &mut **op,
            Op::Look(op) => &mut **op,
            Op::List(op) => &mut **op,
            Op::Claim(op) => &mut **op,
            Op::Beat(op) => &mut **op,
            Op::Finish(op) => &mut **op,
            Op::Operate(op) => &mut **op,
            Op::Queues(op) => &mut **op,
            Op::Settings(op) => &mut **op,
            Op::Purge(op) => &mut **op,
            Op::Events(op) => &mut **op,
            Op::Audit(op) => &mut **op,
            Op::Inspect(op) => &mut **op,
            Op::Ready(op) => op,
            Op::CreateGroup(op) => &mut **op,
            Op::ExtendGroup(op) => &mut **op,
            Op::ChangeGroup(op) => op,
            Op::Group(op) => &mut **op,
            Op::Children(op) => &mut **op,
            Op::Groups(op) => &mut **op,
            Op::Mend(op) => &mut **op,
            Op::SetPool(op) => op,
            Op::DeletePool(op) => op,
            Op::Pool(op) => &mut **op,
            Op::AllPools(op) => op,
            Op::Acquire(op) => &mut **op,
            Op::Refresh(op) => &mut **op,
            Op::Release(op) => &mut **op,
            Op::Pools(op) => &mut **op,
            Op::Enter(op) => &mut **op,
            Op::CheckPools(op) => &mut **op,
            Op::Dispatch(op) => &mut **op,
            Op::Hold(op) => &mut **op,
            Op::GiveBack(op) => &mut **op,
            Op::Holds(op) => op,
            Op::Deadlines(op) => &mut **op,
            Op::Names(op) => &mut **op,
            Op::Scrub(op) => &mut **op,
        }
    }
}

impl Operation for Op {
    fn start(&mut self, cx: &mut Cx<'_>) -> Next {
        self.inner().start(cx)
    }
    fn read(&mut self, snapshot: Snapshot, cx: &mut Cx<'_>) -> Next {
        self.inner().read(snapshot, cx)
    }
    fn answered(&mut self, clock: Clock, answers: Vec<Answer>, cx: &mut Cx<'_>) -> Next {
        self.inner().answered(clock, answers, cx)
    }
    fn settled(&mut self, clock: Clock, cx: &mut Cx<'_>) -> Next {
        self.inner().settled(clock, cx)
    }
    fn doubtful(&mut self, cx: &mut Cx<'_>) -> Next {
        self.inner().doubtful(cx)
    }
}

/// Bytes that a request brings along.
pub(crate) fn weight(request: &Request) -> usize {
    match request {
        Request::Submit(s) => s.payload.data.len(),
        Request::Complete(c) => c.result.as_ref().map_or(0, |r| r.data.len()),
        Request::CreateGroup(group) => group.children.iter().map(|c| c.payload.data.len()).sum(),
        Request::ExtendGroup { children, .. } => children.iter().map(|c| c.payload.data.len()).sum(),
        Request::Batch(items) => items.iter().map(weight).sum(),
        _ => 0,
    }
}

/// Whether a request ends, extends or gives back what is held: those are let in when others are not.
pub(crate) fn drains(request: &Request) -> bool {
    match request {
        Request::Heartbeat(_) | Request::Complete(_) | Request::Fail(_) | Request::Release(_) | Request::Drain => true,
        Request::RefreshSlot { .. } | Request::ReleaseSlot { .. } => true,
        Request::HoldUpstream(_) | Request::FreeUpstream { .. } | Request::GiveBack(_) => true,
        Request::Batch(items) => items.iter().all(drains),
        _ => false,
    }
}

/// Whether a request may wait long, and so is one of a bounded number.
pub(crate) fn polls(request: &Request) -> bool {
    matches!(request, Request::Claim(_) | Request::Events { .. } | Request::Group { .. } | Request::Acquire(_))
        || matches!(request, Request::Dispatch(_))
}
