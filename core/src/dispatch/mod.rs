//! Jobs that a server runs itself, by calling upstreams.
//!
//! A server asks for jobs of its routes' queues, for the upstreams that it can call now. Each that it gets is
//! leased to it as to a worker, and has slots of its upstream's pool for as long as the lease stands: one
//! transaction makes both, a heartbeat extends both, and the server that ends the attempt gives the slots back in the
//! transaction that moves the job. Who cancels it leaves them where they are: the call goes on until its server has
//! heard of that, which then gives them back; if it never does, they end when the lease would have.
//!
//! **A slot of a job has no record of its own**: the lease says what is held for it, and the members of
//! `holders/{pool}` carry the lease's nonce, so nothing done under an earlier lease touches them.
//!
//! Reading order: [`Routing`], `sight` (what may be taken), `claim`, `hold`, `leave`, `room`.

mod claim;
mod hold;
mod leave;
pub(crate) mod room;
mod routing;
mod sight;

pub(crate) use claim::Dispatch;
pub use hold::Hold;
pub(crate) use hold::{Change, Holds};
pub(crate) use leave::Leave;
pub use routing::{Route, Routing, Upstream};
