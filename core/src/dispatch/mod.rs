//! Jobs that a server runs itself, by calling upstreams.
//!
//! Reading order: [`routing`](Routing), `hold`.

mod hold;
mod routing;

pub use hold::Hold;
pub(crate) use hold::{Change, Holds};
pub use routing::{Route, Routing, Upstream};
