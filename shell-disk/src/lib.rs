//! Leasehold's embedded store: one folder, one process, everything synced before it is acknowledged.
//!
//! [`DiskStore`] is the store seen synchronously; [`spawn`] gives it a thread of its own, on which
//! everything that is waiting is made durable together by one sync.
//!
//! **Records and logs are on disk; indexes answer from memory** and are rebuilt on opening from a
//! persisted entry each. **The meaning of a read and of a commit is the core's**
//! ([`leasehold_core::store::engine`]); this crate only keeps what it says.
//!
//! What can go wrong, and what is said: a write or a sync that fails makes its whole group `Unknown` and
//! stops the store, until [`Stopped::reopen`] has proven the disk and opened it from there ([`spawn`]'s
//! thread does that by itself); a store short of space refuses what grows; a damaged record hurts the
//! read that asks for it; damage that would lose something acknowledged keeps the store from opening.
//!
//! Reading order: `store` (a group of calls, from memory to disk), `shelf` (records, through what the
//! group has changed of them), `durable` (a group's way into journal and tables), `journal`, `tree`,
//! `tables` (the threads), `format` (what the bytes mean), `open`, `folder`, `clock`, `thread`.

mod clock;
mod durable;
mod folder;
mod format;
mod journal;
mod open;
mod shelf;
mod store;
mod tables;
#[cfg(test)]
mod tests;
mod thread;
mod tree;

pub use folder::OpenError;
pub use store::{DiskStore, Options, Stopped};
pub use thread::{Event, Handle, spawn};
