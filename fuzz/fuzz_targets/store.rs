//! Bytes to transactions and reads, on the conformance model and on the store on disk: both answer alike, also
//! after the store was closed and opened again.

#![no_main]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use leasehold_core::store::Store as _;
use leasehold_core::store::conformance::random;
use leasehold_core::store::model::Model;
use leasehold_disk::{DiskStore, Options};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let now = Arc::new(AtomicU64::new(1_000 * random::STEP));
    let folder = tempfile::tempdir().expect("a folder");
    let open = || {
        let now = now.clone();
        let clock: Arc<dyn Fn() -> u64 + Send + Sync> = Arc::new(move || now.load(Ordering::SeqCst));
        DiskStore::open(folder.path(), Options { clock: Some(clock), reserve_bytes: Some(0), ..Options::default() })
            .expect("the store opens")
    };
    let mut disk = open();
    let mut model = Model::new(now.load(Ordering::SeqCst));
    // A byte says what is done, two more what it is about.
    for op in bytes.chunks_exact(3).take(200) {
        let seed = u64::from(u16::from_le_bytes([op[1], op[2]]));
        let clock = now.fetch_add(u64::from(op[0] >> 6) * random::STEP, Ordering::SeqCst)
            + u64::from(op[0] >> 6) * random::STEP;
        model.set_clock(clock);
        match op[0] % 16 {
            0..10 => {
                let commit = random::commit(seed, clock);
                assert_eq!(disk.commit(&commit), model.commit(&commit), "{commit:#?}");
                let (mut told, mut expected) = (disk.notified(), model.notified());
                told.sort();
                expected.sort();
                assert_eq!(told, expected);
            }
            10..15 => {
                let read = random::read(seed, clock);
                assert_eq!(disk.read(&read), model.read(&read), "{read:#?}");
            }
            _ => {
                drop(disk);
                disk = open();
            }
        }
    }
    for read in random::everything() {
        assert_eq!(disk.read(&read), model.read(&read), "{read:#?}");
    }
});
