//! `harness flips`: one bit of a store's files is not what was written. It must be noticed and told, and
//! nothing but what is told may be missing.

use std::collections::BTreeSet;
use std::os::unix::fs::FileExt as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use leasehold_core::Name;
use leasehold_core::store::{Commit, Expiry, Read, SCORE_MAX, Store as _, Txn, Value, Version, Write};
use leasehold_disk::DiskStore;

use crate::cuts::{self, Recorded};
use crate::rng::Rng;
use crate::state;
use crate::trace::Note;

/// What came of flipped bits.
#[derive(Debug, Default)]
pub struct Found {
    pub flips: u64,
    /// The store was not opened, and said why.
    pub refused: u64,
    /// It was opened, and said what it cannot read; everything else was there.
    pub told: u64,
    /// The last group was taken for one that was not finished, and that was told.
    pub last_group: u64,
    /// The bit was one that nothing depends on any more.
    pub unused: u64,
    pub broken: Vec<(u64, String)>,
}

/// Flips a bit at random points of a trace.
///
/// # Errors
/// If the disks cannot be written out.
pub fn flip(recorded: &Recorded, numbers: impl Iterator<Item = u64>) -> Result<Found, String> {
    let mut found = Found::default();
    let mut failure = None;
    let scratch = cuts::scratch().map_err(|e| e.to_string())?;
    cuts::at_points(recorded, &cuts::points(recorded, 14, true, numbers), |number, disk| {
        let Some(Note::Certain(now)) = disk.promise else { return };
        let mut rng = Rng::new(recorded.seed ^ (number << 32), 15);
        let folder = scratch.path().join(format!("flip{number}"));
        let place =
            std::fs::create_dir(&folder).and_then(|()| disk.all(&folder)).and_then(|()| damage(&folder, &mut rng));
        match place {
            Ok(Some(place)) => {
                found.flips += 1;
                if let Err(what) = check(&folder, recorded, now, &mut found) {
                    found.broken.push((number, format!("{place}: {what}")));
                }
            }
            Ok(None) => {}
            Err(error) => failure = Some(error.to_string()),
        }
        let _ = std::fs::remove_dir_all(&folder);
    });
    failure.map_or(Ok(found), Err)
}

/// Flips one bit of one file; says where.
fn damage(folder: &Path, rng: &mut Rng) -> std::io::Result<Option<String>> {
    let mut files: Vec<PathBuf> = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder)? {
            let path = entry?.path();
            match path.is_dir() {
                true => folders.push(path),
                // The lock has no content that matters.
                false if !path.ends_with("lock") => files.push(path),
                false => {}
            }
        }
    }
    files.sort();
    let path = &files[rng.below(files.len() as u64) as usize];
    // Of a journal, the part that was written.
    let len = std::fs::read(path)?.iter().rposition(|b| *b != 0).map_or(0, |last| last + 1);
    if len == 0 {
        return Ok(None);
    }
    let at = rng.below(len as u64);
    let file = std::fs::OpenOptions::new().read(true).write(true).open(path)?;
    let mut byte = [0];
    file.read_exact_at(&mut byte, at)?;
    byte[0] ^= 1 << rng.below(8);
    file.write_all_at(&byte, at)?;
    Ok(Some(format!("{} byte {at} of {len}", path.strip_prefix(folder).unwrap_or(path).display())))
}

fn check(folder: &Path, recorded: &Recorded, now: u32, found: &mut Found) -> Result<(), String> {
    let looked = catch_unwind(AssertUnwindSafe(|| look(folder, recorded, now, found)));
    looked.unwrap_or_else(|_| Err("it panicked".into()))
}

fn look(folder: &Path, recorded: &Recorded, now: u32, found: &mut Found) -> Result<(), String> {
    let promised = &recorded.states[now as usize];
    let clock = Arc::new(AtomicU64::new(promised.clock));
    let mut store = match DiskStore::open(folder, recorded.shape.options(&clock, false)) {
        Ok(store) => store,
        Err(_) => {
            found.refused += 1;
            return Ok(());
        }
    };
    let mut faults = store.faults();
    let expected = recorded.lines.get(&now).ok_or("a state that was not kept")?;
    let (missing, readable) = missing(&mut store, expected)?;
    let damaged: BTreeSet<String> = store.damaged().iter().map(Name::to_string).collect();
    let tells = |key: &String, line: &str| {
        let entry = key.rsplit_once('#').is_some_and(|(_, seq)| line.starts_with(&format!("log {seq} ")));
        entry || line.starts_with(&format!("record {key} "))
    };
    let untold: Vec<&String> = missing.iter().filter(|line| !damaged.iter().any(|key| tells(key, line))).collect();
    let last_group = faults.iter().any(|f| f.contains(cuts::TORN));
    if missing.is_empty() && readable {
        match faults.is_empty() && damaged.is_empty() {
            true => found.unused += 1,
            false => found.told += 1,
        }
    } else if last_group && now > 0 && before(&mut store, recorded, now)? {
        found.last_group += 1;
        return Ok(());
    } else if !untold.is_empty() {
        return Err(format!("missing, and not told: {untold:?}; faults {faults:?}, damaged {damaged:?}"));
    } else {
        found.told += 1;
    }
    goes_on(&mut store, &mut faults)
}

/// Expected lines that the store does not have, and whether it can be walked through.
fn missing(store: &mut DiskStore, expected: &[String]) -> Result<(Vec<String>, bool), String> {
    let Ok(lines) = state::of_disk(store) else {
        // Record by record: one that cannot be read must not hide the others.
        let mut missing = Vec::new();
        let lines = state::readable(store, expected);
        missing.extend(expected.iter().filter(|l| !lines.contains(*l)).cloned());
        return Ok((missing, false));
    };
    let extra: Vec<&String> =
        lines.iter().filter(|l| expected.binary_search(l).is_err() && !l.contains(" v0 at 0 ")).collect();
    let missing: Vec<String> = expected.iter().filter(|l| lines.binary_search(l).is_err()).cloned().collect();
    match extra.is_empty() || !missing.is_empty() {
        true => Ok((missing, true)),
        false => Err(format!("nobody wrote {extra:?}")),
    }
}

/// Whether the store holds a state before, but for what has expired since.
fn before(store: &mut DiskStore, recorded: &Recorded, now: u32) -> Result<bool, String> {
    let clock = recorded.states[now as usize].clock;
    let lines = state::of_disk(store).map_err(|e| format!("it cannot be read: {e:?}"))?;
    Ok((0..now).rev().take(8).filter_map(|n| recorded.lines.get(&n)).any(|e| state::expired(e, clock) == lines))
}

/// A store with a damaged table goes on: it takes commits, merges what it can, and tells what it cannot.
fn goes_on(store: &mut DiskStore, faults: &mut Vec<String>) -> Result<(), String> {
    for n in 0..40_u64 {
        let key = Name::from(format!("more/{n}"));
        let value = Value::Bytes(vec![n as u8; 3_000].into());
        let put = Write::Put { key: key.clone(), version: Version(n + 1), value, expiry: Expiry::Never };
        let txn = Txn { valid_until: SCORE_MAX, guards: Vec::new(), take: None, writes: vec![put] };
        let commit = Commit { txns: vec![Arc::new(txn)], grows: false };
        store.commit(&commit).map_err(|e| format!("it takes no commit: {e:?}, {:?}", store.poisoned()))?;
        store.tidy();
        let read = Read { records: vec![key], ..Read::default() };
        let found = store.read(&read).map_err(|e| format!("{e:?}, {:?}", store.poisoned()))?;
        if found.records[0].version() != Some(Version(n + 1)) {
            return Err("it does not keep what it is given".into());
        }
    }
    faults.extend(store.faults());
    Ok(())
}
