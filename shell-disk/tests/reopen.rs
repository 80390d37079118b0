//! Random commits on the model and on the disk store, which is closed or cut off at random points
//! and opened again: every answer, and in the end everything there is, must be the same.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use leasehold_core::store::conformance::random;
use leasehold_core::store::model::Model;
use leasehold_core::store::{Read, Scan, Store};
use leasehold_core::{StoreAnswer, StoreOp};
use leasehold_disk::{DiskStore, Options};
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Step {
    /// Calls by their seeds, in one group.
    Group(Vec<(u64, bool)>),
    Clock(u64),
    Reopen,
    Tidy,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => proptest::collection::vec((any::<u64>(), prop::bool::weighted(0.7)), 1..12).prop_map(Step::Group),
        3 => (1u64..5).prop_map(|n| Step::Clock(n * random::STEP)),
        1 => Just(Step::Clock(200_000_000)),
        2 => Just(Step::Reopen),
        2 => Just(Step::Tidy),
    ];
    proptest::collection::vec(step, 1..40)
}

fn open(path: &Path, clock: &Arc<AtomicU64>) -> DiskStore {
    let clock = clock.clone();
    let now: Arc<dyn Fn() -> u64 + Send + Sync> = Arc::new(move || clock.load(Ordering::SeqCst));
    DiskStore::open(path, Options { clock: Some(now), reserve_bytes: Some(0), ..Options::default() }).expect("it opens")
}

fn scan(store: &mut dyn Store, clock: u64) -> Vec<leasehold_core::Name> {
    let keys = store.read(&Read { scan: Some(Scan { cursor: None, limit: 1_000 }), ..Read::default() });
    let mut keys = keys.expect("it reads").scan.expect("a page").keys;
    // What has expired may be there or not.
    keys.retain(|k| {
        let found = store.read(&Read { records: vec![k.clone()], ..Read::default() }).expect("it reads");
        assert_eq!(found.clock, clock);
        !found.records[0].is_absent()
    });
    keys.sort();
    keys
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, max_shrink_iters: 200, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn a_reopened_store_is_the_model(steps in steps()) {
        let folder = tempfile::tempdir().expect("a folder");
        let now = Arc::new(AtomicU64::new(1_000_000_000));
        let mut model = Model::new(1_000_000_000);
        let mut disk = open(folder.path(), &now);
        for step in steps {
            match step {
                Step::Group(seeds) => {
                    let clock = model.clock();
                    let ops: Vec<(usize, StoreOp)> = seeds
                        .iter()
                        .map(|(seed, commit)| match commit {
                            true => StoreOp::Commit(random::commit(*seed, clock)),
                            false => StoreOp::Read(random::read(*seed, clock)),
                        })
                        .enumerate()
                        .collect();
                    let expect: Vec<_> = ops
                        .iter()
                        .map(|(_, op)| match op {
                            StoreOp::Read(read) => model.read(read).map(StoreAnswer::Read),
                            StoreOp::Commit(commit) => model.commit(commit).map(StoreAnswer::Commit),
                        })
                        .collect();
                    let mut got = vec![None; expect.len()];
                    disk.process(ops, |at, reply| got[at] = Some(reply));
                    let got: Vec<_> = got.into_iter().map(|r| r.expect("each call is answered once")).collect();
                    prop_assert_eq!(got, expect);
                    let (mut a, mut b) = (disk.notified(), model.notified());
                    a.sort();
                    b.sort();
                    prop_assert_eq!(a, b);
                }
                Step::Clock(micros) => {
                    let clock = now.fetch_add(micros, Ordering::SeqCst) + micros;
                    model.set_clock(clock);
                }
                Step::Reopen => {
                    drop(disk);
                    disk = open(folder.path(), &now);
                }
                Step::Tidy => {
                    disk.tidy();
                }
            }
        }
        for reopened in [false, true] {
            if reopened {
                drop(disk);
                disk = open(folder.path(), &now);
            }
            for ask in random::everything() {
                prop_assert_eq!(disk.read(&ask), model.read(&ask));
            }
            let clock = model.clock();
            prop_assert_eq!(scan(&mut disk, clock), scan(&mut model, clock));
            let dump = |books: &leasehold_core::store::engine::Books| -> Vec<_> {
                books.iter().flat_map(|(i, x)| x.iter().map(|(m, s)| (i.clone(), m.clone(), s)).collect::<Vec<_>>()).collect()
            };
            prop_assert_eq!(dump(disk.books()), dump(model.books()));
        }
    }
}

/// Keys are any bytes: one that ends in 0xff once hid those behind it, or kept the store from opening.
#[test]
fn keys_of_any_bytes_are_found_again() {
    use leasehold_core::Name;
    use leasehold_core::store::{Commit, Expiry, Txn, Value, Version, Write};
    let keys: [&[u8]; 9] = [b"a/\xff\xff", b"a/x", b"a/", b"a", b"b/\xff", b"\xff", b"\xff/\xff", b"c/y", b"a0"];
    let folder = tempfile::tempdir().expect("a folder");
    let now = Arc::new(AtomicU64::new(1_000_000_000));
    for n in 1..=keys.len() {
        let keys = &keys[..n];
        let mut disk = open(folder.path(), &now);
        let put = |key: &&[u8]| Write::Put {
            key: Name::new(key),
            version: Version(7),
            value: Value::Bytes("v".into()),
            expiry: Expiry::Never,
        };
        let txn =
            Txn { valid_until: u64::MAX >> 11, guards: Vec::new(), take: None, writes: keys.iter().map(put).collect() };
        disk.commit(&Commit { txns: vec![txn.into()], grows: false }).expect("it commits");
        drop(disk);
        let mut disk = open(folder.path(), &now);
        let records = keys.iter().map(|key| Name::new(key)).collect();
        let found = disk.read(&Read { records, ..Read::default() }).expect("it reads");
        assert!(found.records.iter().all(|r| !r.is_absent()), "{keys:?}");
    }
}
