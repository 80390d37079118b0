//! Leasehold's store on a shared Redis or Valkey: several servers, one namespace.
//!
//! Everything is done by two scripts, `read.lua` and `commit.lua`, which know as
//! little of jobs as the port does. A call is one round trip whatever its size. Reading order:
//! `layout` (the keys), `wave` (what of a commit can be applied together), `encode`, the scripts,
//! `decode`, `fault` (what an error means), `link` (one connection), [`spawn`] (the thread).

mod address;
mod call;
mod decode;
mod encode;
mod fault;
mod layout;
mod link;
mod listen;
mod msgpack;
mod store;
mod thread;
mod wave;

use std::time::Duration;

pub use address::Address;
pub use link::ConnectError;
pub use store::RedisStore;
pub use thread::{Condition, Event, Handle, spawn};

/// What can be chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Tells several systems on one server apart: letters, digits, `-`, `_`, `.`; see
    /// [`Options::check`].
    pub namespace: String,
    /// Whether a server that may evict is refused, not only reported.
    pub require_noeviction: bool,
    /// Entries that a log keeps, about.
    pub log_keep: u64,
    /// A reply that has not come by then will not be waited for; `None` for the default.
    pub reply_timeout: Option<Duration>,
}

impl Default for Options {
    fn default() -> Self {
        Options { namespace: "lh".into(), require_noeviction: false, log_keep: 100_000, reply_timeout: None }
    }
}

impl Options {
    /// Whether the namespace can be one.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn check(&self) -> Result<(), String> {
        let ok = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        if self.namespace.is_empty() || self.namespace.len() > 64 || !self.namespace.chars().all(ok) {
            return Err(format!(
                "a namespace has 1 to 64 letters, digits, `-`, `_` and `.`, not `{}`",
                self.namespace.escape_debug()
            ));
        }
        Ok(())
    }
}
