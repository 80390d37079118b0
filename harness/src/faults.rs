//! `harness faults`: a call to the disk fails, each of the first so many in turn.

use crate::cuts;
use crate::interpose::{self, Fault, Kind};
use crate::workload::{Counts, Shape, World};

/// What came of failed calls.
#[derive(Debug, Default)]
pub struct Found {
    pub runs: u64,
    pub failed_calls: u64,
    pub counts: Counts,
    pub broken: Vec<String>,
}

/// The ways in which a call fails.
const WAYS: [(&str, Kind, i32, bool, u64); 6] = [
    ("EIO at a write", Kind::Write, libc::EIO, false, 1),
    ("EIO at a sync", Kind::Sync, libc::EIO, false, 1),
    ("ENOSPC at a write, half of it done", Kind::Write, libc::ENOSPC, true, 2),
    ("ENOSPC at a sync", Kind::Sync, libc::ENOSPC, false, 1),
    ("a disk that is full for a while", Kind::Write, libc::ENOSPC, true, 25),
    ("a disk that is gone for a while", Kind::Any, libc::EIO, false, 25),
];

/// Every call of the first `calls` fails, `every` of them skipped in between.
///
/// # Errors
/// If there is no disk to work on.
pub fn fail(seed: u64, calls: u64, every: u64) -> Result<Found, String> {
    let mut found = Found::default();
    let shape = Shape { journal_bytes: 16 * 1024, memory_bytes: 64 * 1024, inline: true };
    for (what, kind, errno, short, times) in WAYS {
        for after in (0..calls).step_by(every.max(1) as usize) {
            let folder = cuts::scratch().map_err(|e| e.to_string())?;
            let root = folder.path().join("store");
            std::fs::create_dir(&root).map_err(|e| e.to_string())?;
            interpose::start(&root).map_err(|e| e.to_string())?;
            // What is done before the fault is the same each time.
            let run = World::new(&root, shape, seed).and_then(|mut world| {
                let hits = world.fail(Fault { kind, after, times, errno, short, dead: false }, 40 + after / 2);
                (0..10).for_each(|_| world.step());
                world.close();
                // Removing what nobody needs may fail.
                if hits > 0 && world.counts.stopped == 0 && kind == Kind::Sync {
                    world.problems.push("a call failed, and the store went on as if it had not".into());
                }
                match world.problems.is_empty() {
                    true => Ok((hits, world.counts)),
                    false => Err(world.problems.join("; ")),
                }
            });
            interpose::stop();
            found.runs += 1;
            match run {
                Ok((hits, counts)) => {
                    found.failed_calls += hits;
                    found.counts.add(counts);
                }
                Err(error) => found.broken.push(format!("{what}, after {after} calls: {error}")),
            }
        }
    }
    Ok(found)
}
