//! The disk store keeps every law of the port.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use leasehold_core::Name;
use leasehold_core::store::conformance::{self, TestStore};
use leasehold_core::store::{Commit, CommitReply, Read, Snapshot, Store, StoreError};
use leasehold_disk::{DiskStore, Options};

/// A store in a folder of its own, on a clock that stands still.
struct Fresh {
    store: DiskStore,
    clock: Arc<AtomicU64>,
    _folder: tempfile::TempDir,
}

impl Fresh {
    fn new(reserve_bytes: Option<u64>) -> Fresh {
        let folder = tempfile::tempdir().expect("a folder");
        let clock = Arc::new(AtomicU64::new(1_700_000_000_000_000));
        let now = clock.clone();
        let options =
            Options { clock: Some(Arc::new(move || now.load(Ordering::SeqCst))), reserve_bytes, ..Options::default() };
        let store = DiskStore::open(folder.path(), options).expect("it opens");
        Fresh { store, clock, _folder: folder }
    }
}

impl Store for Fresh {
    fn read(&mut self, read: &Read) -> Result<Snapshot, StoreError> {
        self.store.read(read)
    }

    fn commit(&mut self, commit: &Commit) -> Result<CommitReply, StoreError> {
        self.store.commit(commit)
    }

    fn notified(&mut self) -> Vec<Name> {
        self.store.notified()
    }
}

impl TestStore for Fresh {
    fn advance(&mut self, micros: u64) {
        self.clock.fetch_add(micros, Ordering::SeqCst);
    }

    fn collect_garbage(&mut self) {
        while self.store.tidy() {}
    }
}

#[test]
fn the_disk_store_conforms() {
    conformance::run(|| Fresh::new(Some(0)));
}

#[test]
fn without_room_it_refuses_growth_and_only_growth() {
    let mut store = Fresh::new(Some(u64::MAX));
    let commit = |grows| Commit { txns: Vec::new(), grows };
    assert_eq!(store.commit(&commit(true)), Err(StoreError::Full));
    assert!(store.commit(&commit(false)).is_ok());
}
