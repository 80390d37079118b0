//! How to open a store.

use std::sync::Arc;
use std::time::Duration;

const MIB: u64 = 1024 * 1024;

/// How to open a store.
#[derive(Clone)]
pub struct Options {
    /// Microseconds since the Unix epoch. Without one: the system's clock, kept from ever going
    /// back, also across restarts.
    pub clock: Option<Arc<dyn Fn() -> u64 + Send + Sync>>,
    /// Entries that each log keeps, at least 1.
    pub log_keep: u64,
    /// Memory for blocks read from disk, bytes.
    pub cache_bytes: u64,
    /// With less free space than this, commits that grow are refused
    /// ([`StoreError::Full`](leasehold_core::store::StoreError::Full)) and the others go on, which drains
    /// the store. Without it: 1 GiB, and on a file system below 10 GiB a tenth of that.
    pub reserve_bytes: Option<u64>,
    /// Bytes of a segment of the journal. With a full one everything in memory is written as tables.
    pub journal_bytes: u64,
    /// The same for so much in memory.
    pub memory_bytes: u64,
    /// After so long without a commit the store tidies up what it takes on disk.
    pub idle_after: Duration,
    /// Nothing is made, mended or removed, and commits are refused.
    pub read_only: bool,
    /// Tables are written and merged on the caller's thread: slow, and the same each time.
    pub inline: bool,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            clock: None,
            log_keep: 100_000,
            cache_bytes: 128 * MIB,
            reserve_bytes: None,
            journal_bytes: 64 * MIB,
            memory_bytes: 64 * MIB,
            idle_after: Duration::from_secs(2),
            read_only: false,
            inline: false,
        }
    }
}

impl std::fmt::Debug for Options {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Options")
            .field("own_clock", &self.clock.is_some())
            .field("log_keep", &self.log_keep)
            .field("cache_bytes", &self.cache_bytes)
            .field("reserve_bytes", &self.reserve_bytes)
            .field("journal_bytes", &self.journal_bytes)
            .field("memory_bytes", &self.memory_bytes)
            .field("idle_after", &self.idle_after)
            .field("read_only", &self.read_only)
            .field("inline", &self.inline)
            .finish()
    }
}
