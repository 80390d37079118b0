//! Leasehold's embedded store: one folder, one process, everything synced before it is acknowledged.
//!
//! [`DiskStore`] is the store seen synchronously; [`spawn`] gives it a thread of its own, on which
//! everything that is waiting is made durable together by one sync.
//!
//! **Records and logs are on disk; indexes answer from memory** and are rebuilt on opening from a
//! persisted entry each. **The meaning of a read and of a commit is the core's**
//! ([`leasehold_core::store::engine`]); this crate only keeps what it says.

mod store;
mod thread;

pub use store::{DiskStore, OpenError, Options};
pub use thread::{Event, Handle, spawn};
