//! The trees: sorted tables on disk with what is newer in memory. A thin wrapper around `lsm-tree`.
//!
//! Everything here is written and read by one thread at a time and at the newest state; two more
//! threads write tables (`tables`). A tree whose code panics on what it met on disk is told as an
//! error, like any other damage.

use std::ops::RangeBounds;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use leasehold_core::Name;
use lsm_tree::config::{BloomConstructionPolicy, FilterPolicy, FilterPolicyEntry};
use lsm_tree::{
    AbstractTree, AnyTree, Cache, Config, DescriptorTable, Guard, IterGuardImpl, SeqNo, SequenceNumberCounter, Slice,
};
use xxhash_rust::xxh3::xxh3_128;

use crate::journal::Place;

/// Always the newest.
const NEWEST: SeqNo = SeqNo::MAX;
/// Names the list of a tree's tables.
const CURRENT: &str = "current";
/// Files of tables that are kept open.
const OPEN_FILES: usize = 256;

/// Why something on disk could not be read.
#[derive(Debug)]
pub enum Broken {
    /// The disk does not answer, or not so.
    Io(std::io::Error),
    /// What is on disk is not what was written there.
    Damaged(String),
    /// Bytes that this format does not know.
    Undecodable(Name),
}

impl std::fmt::Display for Broken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Broken::Io(error) => write!(f, "{error}"),
            Broken::Damaged(what) => write!(f, "what is on disk is not what was written there: {what}"),
            Broken::Undecodable(key) => write!(f, "what is stored under {key} cannot be decoded"),
        }
    }
}

impl From<lsm_tree::Error> for Broken {
    fn from(error: lsm_tree::Error) -> Self {
        match error {
            // A table that ends too early is damage, not a disk that fails.
            lsm_tree::Error::Io(error) if error.kind() != std::io::ErrorKind::UnexpectedEof => Broken::Io(error),
            error => Broken::Damaged(format!("{error:?}")),
        }
    }
}

impl From<std::io::Error> for Broken {
    fn from(error: std::io::Error) -> Self {
        Broken::Io(error)
    }
}

/// What a panic said.
pub(crate) fn told(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|s| (*s).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "a panic".into())
}

/// Runs what may panic on bytes that nobody wrote.
pub(crate) fn contained<T, E: Into<Broken>>(f: impl FnOnce() -> Result<T, E>) -> Result<T, Broken> {
    match catch_unwind(AssertUnwindSafe(f)) {
        Ok(result) => result.map_err(Into::into),
        Err(panic) => Err(Broken::Damaged(told(&*panic))),
    }
}

/// What the trees of one store share.
pub(crate) struct Shared {
    pub seqno: SequenceNumberCounter,
    visible: SequenceNumberCounter,
    cache: Arc<Cache>,
    files: Arc<DescriptorTable>,
}

impl Shared {
    pub(crate) fn new(cache_bytes: u64) -> Self {
        Shared {
            seqno: SequenceNumberCounter::new(1),
            visible: SequenceNumberCounter::new(1),
            cache: Arc::new(Cache::with_capacity_bytes(cache_bytes)),
            files: Arc::new(DescriptorTable::new(OPEN_FILES)),
        }
    }
}

#[derive(Clone)]
pub(crate) struct Tree(AnyTree);

impl Tree {
    pub(crate) fn open(path: &Path, place: Place, shared: &Shared) -> Result<Tree, Broken> {
        check_version(path)?;
        let filters = match place {
            // Most keys that are looked up are new ones: every level says for certain, in memory, that
            // it does not have them.
            Place::Records => FilterPolicy::all(FilterPolicyEntry::Bloom(BloomConstructionPolicy::BitsPerKey(12.0))),
            Place::Bytes => FilterPolicy::all(FilterPolicyEntry::Bloom(BloomConstructionPolicy::BitsPerKey(10.0))),
            // Never looked up, only walked.
            Place::Small => FilterPolicy::disabled(),
        };
        contained(|| {
            Config::new(path, shared.seqno.clone(), shared.visible.clone())
                .use_cache(shared.cache.clone())
                .use_descriptor_table(Some(shared.files.clone()))
                .filter_policy(filters)
                .open()
                .map(Tree)
        })
    }

    /// Whether a tree has been made in a folder.
    pub(crate) fn is_there(path: &Path) -> bool {
        path.join(CURRENT).is_file()
    }

    pub(crate) fn get(&self, key: &[u8]) -> Result<Option<Bytes>, Broken> {
        let get = || contained(|| self.0.get(key, NEWEST)).map(|found| found.map(Bytes::from));
        match get() {
            // A sector that cannot be read twice is as good as damaged: one record, not the whole disk.
            Err(Broken::Io(error)) if error.raw_os_error() == Some(rustix::io::Errno::IO.raw_os_error()) => get()
                .map_err(|again| match again {
                    Broken::Io(error) => Broken::Damaged(error.to_string()),
                    damaged => damaged,
                }),
            found => found,
        }
    }

    pub(crate) fn range<K: AsRef<[u8]>>(&self, range: impl RangeBounds<K>) -> Result<Items, Broken> {
        contained(|| Ok::<_, Broken>(Items(self.0.range(range, NEWEST, None))))
    }

    pub(crate) fn apply(&self, key: Bytes, value: Option<Bytes>, seqno: SeqNo) {
        match value {
            Some(value) => self.0.insert(Slice::from(key), Slice::from(value), seqno),
            None => self.0.remove(Slice::from(key), seqno),
        };
    }

    /// Everything put with a sequence number up to this is in tables.
    pub(crate) fn persisted(&self) -> SeqNo {
        self.0.get_highest_persisted_seqno().unwrap_or_default()
    }

    /// Bytes in memory that no table has yet.
    pub(crate) fn unflushed(&self) -> u64 {
        self.0.active_memtable().size()
    }

    /// Ends the present part in memory, so that [`Tree::flush`] writes it.
    pub(crate) fn seal(&self) {
        self.0.rotate_memtable();
    }

    /// Writes what was sealed as tables and syncs them.
    pub(crate) fn flush(&self, seqno: SeqNo) -> Result<(), Broken> {
        contained(|| self.0.flush(&self.0.get_flush_lock(), seqno)).map(|_| ())
    }

    /// One step of merging tables. Returns whether there was something to do.
    pub(crate) fn compact(&self, seqno: SeqNo) -> Result<bool, Broken> {
        let before = self.0.current_version().id();
        contained(|| self.0.compact(Arc::new(lsm_tree::compaction::Leveled::default()), seqno))?;
        Ok(self.0.current_version().id() != before)
    }

    /// Merges everything into one level without what was removed or replaced.
    pub(crate) fn compact_all(&self, seqno: SeqNo) -> Result<(), Broken> {
        contained(|| self.0.major_compact(64 * 1024 * 1024, seqno))
    }

    /// Parts of the tree that every read has to look at.
    pub(crate) fn runs(&self) -> usize {
        self.0.l0_run_count()
    }

    /// Bytes in the last level, and in all of them. What is above the last replaces or removes
    /// something below, or is new.
    pub(crate) fn levels(&self) -> (u64, u64) {
        let version = self.0.current_version();
        let sizes: Vec<u64> = version.iter_levels().map(|level| level.size()).collect();
        (sizes.last().copied().unwrap_or_default(), sizes.iter().sum())
    }

    pub(crate) fn removals(&self) -> u64 {
        self.0.tombstone_count()
    }

    pub(crate) fn disk_bytes(&self) -> u64 {
        self.0.disk_space()
    }

    /// What is kept, with what was replaced and with removals.
    #[cfg(test)]
    pub(crate) fn entries(&self) -> usize {
        self.0.approximate_len()
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.0.len(NEWEST, None).unwrap_or_default()
    }
}

/// Keys and values in order.
pub(crate) struct Items(Box<dyn DoubleEndedIterator<Item = IterGuardImpl> + Send>);

fn step(next: impl FnOnce() -> Option<IterGuardImpl>) -> Option<Result<(Bytes, Bytes), Broken>> {
    match contained(|| next().map(Guard::into_inner).transpose()) {
        Ok(item) => item.map(|(key, value)| Ok((key.into(), value.into()))),
        Err(broken) => Some(Err(broken)),
    }
}

impl Iterator for Items {
    type Item = Result<(Bytes, Bytes), Broken>;

    fn next(&mut self) -> Option<Self::Item> {
        step(|| self.0.next())
    }
}

impl DoubleEndedIterator for Items {
    fn next_back(&mut self) -> Option<Self::Item> {
        step(|| self.0.next_back())
    }
}

/// The list of a tree's tables is kept with a checksum that `lsm-tree` writes and does not look at; and
/// where there is no list, `lsm-tree` makes an empty tree, whatever else is there.
fn check_version(path: &Path) -> Result<(), Broken> {
    let current = match std::fs::read(path.join(CURRENT)) {
        Ok(current) => current,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return check_empty(path),
        Err(error) => return Err(error.into()),
    };
    let Some((id, sum)) = current.split_at_checked(8).and_then(|(id, rest)| Some((id, rest.get(..16)?))) else {
        return Err(Broken::Damaged(format!("{} is too short", path.join(CURRENT).display())));
    };
    let id = u64::from_le_bytes(id.try_into().unwrap_or_default());
    let list = path.join(format!("v{id}"));
    let bytes = std::fs::read(&list).map_err(|e| Broken::Damaged(format!("{}: {e}", list.display())))?;
    if xxh3_128(&bytes).to_le_bytes() != sum {
        return Err(Broken::Damaged(format!("{}: its checksum differs", list.display())));
    }
    Ok(())
}

fn check_empty(path: &Path) -> Result<(), Broken> {
    match std::fs::read_dir(path.join("tables")).and_then(|mut entries| entries.next().transpose()) {
        Ok(None) => Ok(()),
        Ok(Some(_)) => Err(Broken::Damaged(format!("{} is gone", path.join(CURRENT).display()))),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error.into()),
    }
}
