//! # Leasehold's core
//!
//! One server process is one [`Replica`]: a state machine with inputs, outputs and a clock that is
//! handed in.
//!
//! **The law.** [`Replica::step`] is total, deterministic and never blocks: the same state and the
//! same `(now, input)` give the same outputs, bit for bit.
//!
//! Reading order: [`store`] (the port: what a store is asked), [`job`] (what is stored of a job and
//! every operation on it as guarded transactions), [`group`] (a parent and its children), [`pool`] (shared capacity), [`dispatch`]
//! (jobs that servers run by calling upstreams), [`replica`] (who runs which operation when),
//! [`request`] and [`failure`] (what clients say and hear), [`limits`].
//!
//! **The core never reads a clock, draws system randomness, or does I/O**; the crate is `no_std`, so
//! the compiler sees to it. **Replicas never talk to each other**: they meet only in the store.

#![no_std]

extern crate alloc;
#[cfg(any(test, feature = "conformance"))]
extern crate std;

pub mod codec;
pub mod dispatch;
pub mod event;
pub mod failure;
pub mod group;
pub mod ids;
pub mod job;
pub mod limits;
mod name;
pub mod opaque;
pub mod pool;
pub mod recording;
pub mod replica;
pub mod request;
pub mod store;

pub use failure::Failure;
pub use ids::{GroupId, JobId, Token};
pub use name::Name;
pub use replica::{Config, Durations, Input, Now, Output, Outputs, Replica, Stats, StoreAnswer, StoreId, StoreOp};
pub use request::{Outcome, Request, RequestId, Response};
