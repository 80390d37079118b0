//! The same random reads and commits to the model, the disk store and Redis, every answer compared,
//! and now and then all that there is.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use leasehold_core::Name;
use leasehold_core::store::conformance::random::{self, Rng};
use leasehold_core::store::model::Model;
use leasehold_core::store::{Read, Scan, Store};
use leasehold_disk::DiskStore;
use leasehold_redis::{Address, Options, RedisStore};

/// Operations on one fresh set of stores.
const ROUND: u64 = 50_000;
/// Operations between two looks at everything.
const DUMP: u64 = 500;

/// What was done.
#[derive(Clone, Copy, Debug, Default)]
pub struct Done {
    pub commits: u64,
    pub reads: u64,
    pub dumps: u64,
}

/// Runs so many operations; each seed makes the same ones.
///
/// # Panics
/// At the first difference, with the operation.
pub fn run(address: &Address, ops: u64, seed: u64, with_disk: bool) -> Done {
    let mut done = Done::default();
    let mut draw = Rng(seed);
    let mut left = ops;
    while left > 0 {
        let ops = left.min(ROUND);
        round(address, ops, &mut draw, with_disk, &mut done);
        left -= ops;
    }
    done
}

fn round(address: &Address, ops: u64, draw: &mut Rng, with_disk: bool, done: &mut Done) {
    let mut server = redis::Client::open(address.to_url()).unwrap().get_connection().unwrap();
    let () = redis::cmd("FLUSHALL").query(&mut server).unwrap();
    let mut clock = 1_000 * random::STEP;
    let mut model = Model::new(clock);
    let mut redis = RedisStore::open(address, Options::default()).unwrap();
    let disk_clock = Arc::new(AtomicU64::new(clock));
    let folder = tempfile::tempdir().unwrap();
    let mut disk = with_disk.then(|| {
        let now = disk_clock.clone();
        let clock: Arc<dyn Fn() -> u64 + Send + Sync> = Arc::new(move || now.load(Ordering::SeqCst));
        let options = leasehold_disk::Options { clock: Some(clock), reserve_bytes: Some(0), ..Default::default() };
        DiskStore::open(folder.path(), options).unwrap()
    });
    for n in 0..ops {
        clock += draw.below(4) * random::STEP;
        model.set_clock(clock);
        redis.set_clock(Some(clock));
        disk_clock.store(clock, Ordering::SeqCst);
        let seed = draw.draw();
        let large = draw.below(40) == 0;
        if draw.below(10) < 6 {
            let commit = if large { random::large_commit(seed, clock) } else { random::commit(seed, clock) };
            let expect = model.commit(&commit);
            let mut topics = model.notified();
            topics.sort();
            let check = |name: &str, store: &mut dyn Store| {
                let got = store.commit(&commit);
                assert_eq!(got, expect, "{name} at {clock}: {commit:#?}");
                let mut told = store.notified();
                told.sort();
                assert_eq!(told, topics, "{name} at {clock}: {commit:#?}");
            };
            check("redis", &mut redis);
            if let Some(disk) = &mut disk {
                check("disk", disk);
            }
            done.commits += 1;
        } else {
            let read = if large { random::large_read(seed, clock) } else { random::read(seed, clock) };
            compare(&mut model, &mut redis, disk.as_mut(), &read);
            done.reads += 1;
        }
        if n % DUMP == DUMP - 1 || n == ops - 1 {
            for read in random::everything() {
                compare(&mut model, &mut redis, disk.as_mut(), &read);
            }
            assert_eq!(keys(&mut redis), keys(&mut model), "all record keys");
            done.dumps += 1;
        }
    }
}

fn compare(model: &mut Model, redis: &mut RedisStore, disk: Option<&mut DiskStore>, read: &Read) {
    let expect = model.read(read);
    let got = redis.read(read);
    assert_eq!(got, expect, "redis: {read:#?} {:?}", redis.failure());
    if let Some(disk) = disk {
        assert_eq!(disk.read(read), expect, "disk: {read:#?}");
    }
}

/// Every record's key, by a walk.
fn keys(store: &mut dyn Store) -> Vec<Name> {
    let (mut all, mut cursor) = (Vec::new(), None);
    loop {
        let read = Read { scan: Some(Scan { cursor, limit: 100 }), ..Read::default() };
        let page = store.read(&read).unwrap().scan.unwrap();
        all.extend(page.keys);
        cursor = page.cursor;
        if cursor.is_none() {
            all.sort();
            all.dedup();
            return all;
        }
    }
}
