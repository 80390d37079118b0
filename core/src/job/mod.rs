//! Jobs: what is stored of one, and every operation on it as guarded transactions.
//!
//! ```text
//!                       +--------------------------- release -------------+
//! submit --> scheduled -+-> queued --claim--> running --complete--> succeeded
//!        \-> held ------+      |  ^            | | |
//!                              |  |            | | +--fail, attempts left--> retrying --due--+
//!                              |  +--lapse-----+ |                                           |
//!                              |  +<-------------|-------------------------------------------+
//!                              |                 +--fail, none left / not retryable--> dead
//!                              +--queue deadline--> expired        cancel (any live) --> cancelled
//! ```
//!
//! Each operation is a small machine: it says what to read, decides from what was read, and knows
//! from the outcome what to answer ([`Operation`](crate::replica::task::Operation)). The replica
//! batches reads and commits of many, repeats what was lost, and settles what is unknown.
//!
//! Reading order: [`record`], `moves` (writes that transitions share), `submit`, `claim`, `lease`,
//! `beat`, `finish`, `attempt`, `operate`, `sweep`, `scrub`, `audit`, `inspect`, `look`, `list`, `queue`, `events`.

mod attempt;
mod audit;
mod beat;
pub(crate) mod check;
mod claim;
mod events;
mod finish;
mod inspect;
mod lease;
mod list;
mod look;
mod moves;
mod operate;
mod queue;
mod ready;
pub mod record;
pub mod retry;
mod scrub;
mod submit;
mod sweep;
mod view;

use alloc::boxed::Box;
use alloc::vec::Vec;

use crate::failure::Failure;
use crate::replica::task::{Cx, Next, Operation};
use crate::request::{self, Request};
use crate::store::{Answer, Clock, Snapshot};

pub(crate) use claim::Claim;
pub(crate) use events::Events;
pub(crate) use look::Look;
pub(crate) use scrub::{Cursor, Scrub};
pub(crate) use submit::Submit;
pub(crate) use sweep::{Deadlines, Names, trim};

/// Every operation.
#[derive(Clone, Debug)]
pub(crate) enum Op {
    Submit(Box<Submit>),
    Look(Box<Look>),
    List(Box<list::List>),
    Claim(Box<Claim>),
    Beat(Box<beat::Beat>),
    Finish(Box<finish::Finish>),
    Operate(Box<operate::Operate>),
    Queues(Box<queue::Queues>),
    Settings(Box<queue::Settings>),
    Purge(Box<queue::Purge>),
    Events(Box<Events>),
    Audit(Box<audit::Audit>),
    Inspect(Box<inspect::Inspect>),
    Ready(ready::Ready),
    Deadlines(Box<Deadlines>),
    Names(Box<Names>),
    Scrub(Box<Scrub>),
}

impl Op {
    /// The operation for a request, or what is wrong with it. Not for batches and draining, which
    /// are the replica's own.
    pub fn of(request: Request, nonce: u64) -> Result<Op, Failure> {
        use operate::{Operate, What};
        use queue::{Change, Queues, Settings};
        Ok(match request {
            Request::Submit(asked) => Op::Submit(Box::new(Submit::new(asked)?)),
            Request::Get { tenant, job } => Op::Look(Box::new(Look::state(tenant, job))),
            Request::Payload { tenant, job } => Op::Look(Box::new(Look::payload(tenant, job))),
            Request::Result { tenant, job } => Op::Look(Box::new(Look::result(tenant, job))),
            Request::Why { tenant, job } => Op::Look(Box::new(Look::why(tenant, job))),
            Request::List(asked) => Op::List(Box::new(list::List::new(asked)?)),
            Request::Cancel { tenant, job } => Op::Operate(Box::new(Operate::new(tenant, job, What::Cancel))),
            Request::Retry { tenant, job } => Op::Operate(Box::new(Operate::new(tenant, job, What::Retry))),
            Request::Delete { tenant, job } => Op::Operate(Box::new(Operate::new(tenant, job, What::Delete))),
            Request::Claim(asked) => Op::Claim(Box::new(Claim::new(asked)?)),
            Request::Heartbeat(asked) => Op::Beat(Box::new(beat::Beat::new(asked)?)),
            Request::Complete(asked) => Op::Finish(Box::new(finish::Finish::complete(asked)?)),
            Request::Fail(asked) => Op::Finish(Box::new(finish::Finish::fail(asked)?)),
            Request::Release(held) => Op::Finish(Box::new(finish::Finish::release(held))),
            Request::Queues { tenant } => Op::Queues(Box::new(Queues::all(tenant))),
            Request::Queue { tenant, queue } => Op::Queues(Box::new(Queues::one(tenant, queue)?)),
            Request::SetQueue { tenant, queue, lease_ms } => {
                Op::Settings(Box::new(Settings::new(tenant, queue, Change::Set { lease_ms })?))
            }
            Request::Pause { tenant, queue, reason } => {
                Op::Settings(Box::new(Settings::new(tenant, queue, Change::Pause(reason))?))
            }
            Request::Resume { tenant, queue } => Op::Settings(Box::new(Settings::new(tenant, queue, Change::Resume)?)),
            Request::Purge { tenant, queue, status } => Op::Purge(Box::new(queue::Purge::new(tenant, queue, status)?)),
            Request::Events { tenant, after, limit, wait_ms } => {
                Op::Events(Box::new(Events::new(tenant, after, limit, wait_ms)?))
            }
            Request::Audit { cursor, repair } => Op::Audit(Box::new(audit::Audit::new(cursor, repair)?)),
            Request::Inspect(what) => Op::Inspect(Box::new(inspect::Inspect::new(what)?)),
            Request::Ready => Op::Ready(ready::Ready::new(nonce)),
            Request::Drain | Request::Batch(_) => {
                return Err(check::invalid("items", "must not be nested".into()));
            }
        })
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
        Request::Batch(items) => items.iter().map(weight).sum(),
        _ => 0,
    }
}

/// Whether a request ends, extends or gives back what is held: those are let in when others are not.
pub(crate) fn drains(request: &Request) -> bool {
    match request {
        Request::Heartbeat(_) | Request::Complete(_) | Request::Fail(_) | Request::Release(_) | Request::Drain => true,
        Request::Batch(items) => items.iter().all(drains),
        _ => false,
    }
}

/// What can be said of a submit without the store.
pub fn validate_submit(submit: &request::Submit) -> Result<(), Failure> {
    submit::validate(submit)
}
