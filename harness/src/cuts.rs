//! `harness cuts`: power cuts, at random points of what a store did to its disk.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use leasehold_core::Name;
use leasehold_core::store::{Commit, Expiry, SCORE_MAX, Store as _, Txn, Value, Version, Write};
use leasehold_disk::DiskStore;

use crate::interpose::{self, Fault, Kind};
use crate::rng::Rng;
use crate::trace::{Disk, Note, Op};
use crate::workload::{Counts, Ended, Promised, Shape, World};
use crate::{books, state};

/// A group that was under way when the power went: told, and no damage.
pub const TORN: &str = "not written to its end";
/// Keys of what is written after a cut.
const EXTRA: &str = "extra/";

/// What happened to a store, and what it promised.
#[derive(serde::Serialize, serde::Deserialize)]
pub struct Recorded {
    pub seed: u64,
    pub ops: Vec<Op>,
    pub states: Vec<Promised>,
    pub shape: Shape,
    pub counts: Counts,
    pub problems: Vec<String>,
    /// Failed calls.
    pub hits: u64,
    /// What the states hold, if that was kept.
    pub lines: BTreeMap<u32, state::Lines>,
}

/// A folder in memory, if there is one: a cut is a store of its own.
pub fn scratch() -> std::io::Result<tempfile::TempDir> {
    let memory = Path::new("/dev/shm");
    let builder = || tempfile::Builder::new().prefix("leasehold-harness-").to_owned();
    if memory.is_dir() { builder().tempdir_in(memory) } else { builder().tempdir() }
}

pub fn shape(rng: &mut Rng) -> Shape {
    let journal_bytes = [16, 64, 256][rng.below(3) as usize] * 1024;
    let memory_bytes = [32, 128, 512][rng.below(3) as usize] * 1024;
    Shape { journal_bytes, memory_bytes, inline: rng.chance(500) }
}

/// Runs a workload and records what it does to its disk. With odd seeds calls fail now and then. With
/// `keep` the states are kept, not only their digests.
///
/// # Errors
/// If there is no disk to work on.
pub fn record(seed: u64, keep: bool) -> Result<Recorded, String> {
    let faults = seed % 2 == 1;
    let mut rng = Rng::new(seed, 10);
    let shape = shape(&mut rng);
    let folder = scratch().map_err(|e| e.to_string())?;
    let root = folder.path().join("store");
    std::fs::create_dir(&root).map_err(|e| e.to_string())?;
    interpose::start(&root).map_err(|e| e.to_string())?;
    let mut hits = 0;
    let world = World::new(&root, shape, seed).map(|mut world| {
        world.lines = keep.then(BTreeMap::new);
        let mut left = 250 + rng.below(500);
        while left > 0 && world.problems.is_empty() && !world.is_stuck() {
            left -= 1;
            world.step();
            if rng.chance(15) {
                world.crash(rng.below(60));
            } else if rng.chance(8) {
                world.close();
            } else if faults && rng.chance(40) {
                let errno = [libc::EIO, libc::ENOSPC][rng.below(2) as usize];
                let kind = [Kind::Write, Kind::Sync, Kind::Any][rng.below(3) as usize];
                let (after, times) = (rng.below(40), [1, 1, 3, 20][rng.below(4) as usize]);
                hits += world.fail(Fault { kind, after, times, errno, short: rng.chance(300), dead: false }, 30);
            }
        }
        world.end()
    });
    let ops = interpose::stop();
    let Ended { states, lines, counts, problems } = world?;
    Ok(Recorded { seed, ops, states, shape, counts, problems, hits, lines })
}

/// What was found on the disks that cuts left.
#[derive(Debug, Default)]
pub struct Found {
    pub cuts: u64,
    pub jobs: u64,
    /// Groups that were under way and are there, and are not.
    pub whole: u64,
    pub absent: u64,
    pub torn: u64,
    /// Stores that went on for some groups after the cut, and were cut again.
    pub again: u64,
    /// By number of the cut.
    pub broken: Vec<(u64, String)>,
}

impl Found {
    pub fn add(&mut self, other: Found) {
        self.cuts += other.cuts;
        self.jobs += other.jobs;
        self.whole += other.whole;
        self.absent += other.absent;
        self.torn += other.torn;
        self.again += other.again;
        self.broken.extend(other.broken);
    }
}

/// The disk at some points of a trace, in order.
pub fn at_points(recorded: &Recorded, points: &BTreeMap<usize, Vec<u64>>, mut f: impl FnMut(u64, &Disk)) {
    let mut losses = Rng::new(recorded.seed, 11);
    let mut disk = Disk::default();
    for (at, op) in recorded.ops.iter().enumerate() {
        disk.apply(op, &mut losses);
        for cut in points.get(&at).into_iter().flatten() {
            f(*cut, &disk);
        }
    }
}

/// Random points of a trace at which something has been promised; if so asked, only those at which no
/// group is under way.
pub fn points(
    recorded: &Recorded,
    label: u64,
    certain: bool,
    numbers: impl Iterator<Item = u64>,
) -> BTreeMap<usize, Vec<u64>> {
    let mut promise = None;
    let mut possible = Vec::new();
    for (at, op) in recorded.ops.iter().enumerate() {
        if let Op::Note(note) = op {
            promise = Some(*note);
        }
        if promise.is_some_and(|p| !certain || matches!(p, Note::Certain(_))) {
            possible.push(at);
        }
    }
    let mut points: BTreeMap<usize, Vec<u64>> = BTreeMap::new();
    for number in numbers {
        let at = Rng::new(recorded.seed ^ (number << 32), label).below(possible.len() as u64) as usize;
        points.entry(possible.get(at).copied().unwrap_or_default()).or_default().push(number);
    }
    points
}

/// Cuts the power at random points of a trace.
///
/// # Errors
/// If the disks cannot be written out.
pub fn cut(recorded: &Recorded, numbers: impl Iterator<Item = u64>) -> Result<Found, String> {
    let mut found = Found::default();
    let scratch = scratch().map_err(|e| e.to_string())?;
    let mut failure = None;
    at_points(recorded, &points(recorded, 12, false, numbers), |cut, disk| {
        let mut rng = Rng::new(recorded.seed ^ (cut << 32), 13);
        let folder = scratch.path().join(format!("cut{cut}"));
        let made = std::fs::create_dir(&folder).and_then(|()| disk.cut(&mut rng, &folder));
        if let Err(error) = made {
            failure = Some(error.to_string());
            return;
        }
        found.cuts += 1;
        let result = check(&folder, recorded, disk.promise, &mut found).and_then(|now| match rng.chance(100) {
            true => go_on(&folder, recorded, now, &mut rng, &mut found),
            false => Ok(()),
        });
        if let Err(what) = result {
            found.broken.push((cut, what));
        }
        if std::fs::remove_dir_all(&folder).is_err() {
            failure = Some("a folder cannot be removed".into());
        }
    });
    failure.map_or(Ok(found), Err)
}

fn open(folder: &Path, recorded: &Recorded, clock: &Arc<AtomicU64>, read_only: bool) -> Result<DiskStore, String> {
    DiskStore::open(folder, recorded.shape.options(clock, read_only)).map_err(|e| e.to_string())
}

fn matches(store: &mut DiskStore, clock: &AtomicU64, promised: &Promised) -> Result<bool, String> {
    clock.store(promised.clock, Ordering::SeqCst);
    let lines = state::of_disk(store).map_err(|e| format!("it cannot be read: {e:?}"))?;
    Ok(state::digest(&lines) == promised.digest)
}

/// Opens what a cut left. Returns the number of the state that it holds.
fn check(folder: &Path, recorded: &Recorded, promise: Option<Note>, found: &mut Found) -> Result<u32, String> {
    let clock = Arc::new(AtomicU64::new(0));
    let mut store = open(folder, recorded, &clock, false)?;
    let (old, new) = match promise {
        Some(Note::Between(old, new)) => (old, new),
        Some(Note::Certain(now)) => (now, now),
        None => return Err("nothing was promised yet".into()),
    };
    let state = |n: u32| &recorded.states[n as usize];
    let is_new = matches(&mut store, &clock, state(new))?;
    let now = if is_new { new } else { old };
    if !is_new && (old == new || !matches(&mut store, &clock, state(old))?) {
        return Err(match old == new {
            true => format!("what was acknowledged (state {new}) is not what it holds"),
            false => format!("what it holds is neither state {old} nor {new}"),
        } + &told(&mut store, recorded, new));
    }
    if old != new {
        *(if is_new { &mut found.whole } else { &mut found.absent }) += 1;
    }
    let faults = store.faults();
    found.torn += faults.iter().filter(|f| f.contains(TORN)).count() as u64;
    if let Some(fault) = faults.iter().find(|f| !f.contains(TORN)) {
        return Err(format!("a fault on a disk without damage: {fault}"));
    }
    let audit = books::audit(&mut store);
    found.jobs += audit.jobs;
    if !audit.wrong.is_empty() {
        return Err(format!("books: {}", audit.wrong.join("; ")));
    }
    // What was found once is found again, also by one who only looks.
    drop(store);
    let mut store = open(folder, recorded, &clock, true)?;
    match matches(&mut store, &clock, state(now))? {
        true => Ok(now),
        false => Err("it holds something else when it is opened again".into()),
    }
}

/// How a store differs from a state, if what that holds was kept.
fn told(store: &mut DiskStore, recorded: &Recorded, number: u32) -> String {
    match (recorded.lines.get(&number), state::of_disk(store)) {
        (Some(expected), Ok(found)) => format!(":\n    {}", state::difference(expected, &found)),
        _ => String::new(),
    }
}

fn extra(n: u64) -> Commit {
    let put = |part: &str, len: usize| Write::Put {
        key: Name::from(format!("{EXTRA}{n}/{part}")),
        version: Version(n + 1),
        value: Value::Bytes(vec![n as u8; len].into()),
        expiry: Expiry::Never,
    };
    let writes = vec![put("a", 100), put("b", 6_000)];
    Commit {
        txns: vec![Arc::new(Txn { valid_until: SCORE_MAX, guards: Vec::new(), take: None, writes })],
        grows: false,
    }
}

/// The store that was recovered goes on, and the power is cut again: what it recovered, and what it has
/// acknowledged since, must be there.
fn go_on(folder: &Path, recorded: &Recorded, now: u32, rng: &mut Rng, found: &mut Found) -> Result<(), String> {
    let promised = &recorded.states[now as usize];
    let clock = Arc::new(AtomicU64::new(promised.clock));
    interpose::start(folder).map_err(|e| e.to_string())?;
    let worked = open(folder, recorded, &clock, false).and_then(|mut store| {
        interpose::note(Note::Certain(0));
        (0..4).try_for_each(|n| {
            interpose::note(Note::Between(n, n + 1));
            store.commit(&extra(n.into())).map_err(|e| format!("after a cut it does not take a commit: {e:?}"))?;
            interpose::note(Note::Certain(n + 1));
            store.tidy();
            Ok(())
        })
    });
    let ops = interpose::stop();
    worked?;
    found.again += 1;
    let began = ops.iter().position(|op| *op == Op::Note(Note::Certain(0))).unwrap_or_default();
    for n in 0..4 {
        let at = began as u64 + rng.below((ops.len() - began) as u64);
        let mut disk = Disk::default();
        ops.iter().take(at as usize + 1).for_each(|op| disk.apply(op, &mut Rng::new(0, 0)));
        let again = folder.with_extension(format!("again{n}"));
        let result = std::fs::create_dir(&again).and_then(|()| disk.cut(rng, &again)).map_err(|e| e.to_string());
        let result = result.and_then(|()| check_again(&again, recorded, now, disk.promise));
        let _ = std::fs::remove_dir_all(&again);
        result.map_err(|what| format!("cut again: {what}"))?;
    }
    Ok(())
}

fn check_again(folder: &Path, recorded: &Recorded, now: u32, promise: Option<Note>) -> Result<(), String> {
    let promised = &recorded.states[now as usize];
    let clock = Arc::new(AtomicU64::new(promised.clock));
    let mut store = open(folder, recorded, &clock, false)?;
    let lines = state::of_disk(&mut store).map_err(|e| format!("it cannot be read: {e:?}"))?;
    let (extra, lines): (Vec<_>, Vec<_>) = lines.into_iter().partition(|l| l.starts_with(&format!("record {EXTRA}")));
    if state::digest(&lines) != promised.digest {
        return Err("what had been recovered is not there any more".into());
    }
    let (least, most) = match promise {
        Some(Note::Between(old, new)) => (old, new),
        Some(Note::Certain(now)) => (now, now),
        None => (0, 0),
    };
    let groups = extra.len() as u32 / 2;
    let whole = extra.len() % 2 == 0
        && (0..groups).all(|n| extra.iter().filter(|l| l.starts_with(&format!("record {EXTRA}{n}/"))).count() == 2);
    match whole && (least..=most).contains(&groups) {
        true => Ok(()),
        false => Err(format!("of {least} to {most} groups it has {extra:?}")),
    }
}
