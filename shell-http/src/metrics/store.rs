//! The store as the driver sees it: how long its calls take, and how much is committed at once.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use leasehold_core::store::{Commit, Value, Write};
use leasehold_core::{StoreId, StoreOp};

use super::text::{Histogram, Page, Shape};

/// Microseconds.
static TIMES: Shape = Shape {
    ends: &[
        100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000, 2_000_000,
        5_000_000,
    ],
    scale: 1e6,
};
static TXNS: Shape = Shape { ends: &[1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000], scale: 1.0 };
static BYTES: Shape = Shape {
    ends: &[1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20],
    scale: 1.0,
};

/// What is known of the store from outside.
#[derive(Debug)]
pub struct StoreWatch {
    /// Its folder, if it has one.
    pub folder: Option<PathBuf>,
    /// Records that were found damaged.
    pub damaged: AtomicU64,
    reads: Histogram,
    commits: Histogram,
    commit_txns: Histogram,
    commit_bytes: Histogram,
}

impl StoreWatch {
    pub fn new(folder: Option<PathBuf>) -> Self {
        StoreWatch {
            folder,
            damaged: AtomicU64::new(0),
            reads: Histogram::new(&TIMES),
            commits: Histogram::new(&TIMES),
            commit_txns: Histogram::new(&TXNS),
            commit_bytes: Histogram::new(&BYTES),
        }
    }

    pub(super) fn write(&self, page: &mut Page) {
        page.begin("leasehold_store_read_seconds", "histogram", "Time of a read, from the call to its answer.");
        page.histogram(&[], &self.reads);
        page.begin("leasehold_store_commit_seconds", "histogram", "Time of a commit, its sync included.");
        page.histogram(&[], &self.commits);
        page.begin("leasehold_store_commit_transactions", "histogram", "Transactions in a commit.");
        page.histogram(&[], &self.commit_txns);
        page.begin("leasehold_store_commit_bytes", "histogram", "Bytes of records and events in a commit.");
        page.histogram(&[], &self.commit_bytes);
        let damaged = self.damaged.load(Relaxed);
        page.one("leasehold_store_damaged_total", "counter", "Records found that are not what was written.", damaged);
    }
}

/// The calls under way, to tell how long each took.
#[derive(Debug, Default)]
pub struct Calls(HashMap<StoreId, (Instant, bool)>);

impl Calls {
    pub fn sent(&mut self, id: StoreId, op: &StoreOp, watch: &StoreWatch) {
        if let StoreOp::Commit(commit) = op {
            watch.commit_txns.observe(commit.txns.len() as u64);
            watch.commit_bytes.observe(bytes(commit));
        }
        self.0.insert(id, (Instant::now(), matches!(op, StoreOp::Commit(_))));
    }

    /// A call that the store would not take was none: `answered` is false.
    pub fn over(&mut self, id: StoreId, answered: bool, watch: &StoreWatch) {
        if let Some((sent, is_commit)) = self.0.remove(&id)
            && answered
        {
            let times = if is_commit { &watch.commits } else { &watch.reads };
            times.observe_time(sent.elapsed());
        }
    }
}

/// Without what takes put, whose number is not known here.
fn bytes(commit: &Commit) -> u64 {
    let writes = commit.txns.iter().flat_map(|t| &t.writes);
    let len = |write: &Write| match write {
        Write::Put { value: Value::Bytes(bytes), .. } | Write::Append { bytes, .. } => bytes.len() as u64,
        _ => 0,
    };
    writes.map(len).sum()
}
