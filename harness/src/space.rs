//! `harness space` and `harness open`: what a store takes on disk, and how long it takes to open one.

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::local::{self, Local};

const DAY_MS: u64 = 24 * 3_600_000;
/// Jobs between two looks at the disk.
const STEP: u64 = 50_000;
const RETENTION_MS: u64 = 1_000;

/// Bytes that the files below a folder take.
pub fn taken(folder: &Path) -> std::io::Result<u64> {
    let mut bytes = 0;
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        match std::fs::symlink_metadata(&path) {
            Ok(found) if found.is_dir() => bytes += taken(&path)?,
            Ok(found) => bytes += 512 * found.blocks(),
            // A table that was merged away just now.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(bytes)
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / 1024.0 / 1024.0
}

/// One job delayed for a month, and many short ones. Returns what the disk holds at the end for each
/// byte that lives.
///
/// # Errors
/// What the store says.
pub fn space(folder: &Path, jobs: u64, events: u64) -> Result<f64, String> {
    let io = |e: std::io::Error| e.to_string();
    let mut local = Local::open(folder, events)?;
    local.submit("later", 1, Some(30 * DAY_MS), RETENTION_MS)?;
    let begun = Instant::now();
    let (mut done, mut most) = (0, 0);
    while done < jobs {
        let n = STEP.min(jobs - done);
        local.submit("short", n, None, RETENTION_MS)?;
        let drained = local.drain("short")?;
        if drained != n {
            return Err(format!("{drained} of {n} jobs were done"));
        }
        done += n;
        // Past the retention and the minutes that an answer is remembered.
        local.pass(5 * 60_000)?;
        while local.store.tidy() {}
        most = most.max(taken(folder).map_err(io)?);
    }
    let worked = begun.elapsed();
    // The places of ended jobs go when their queue is looked at.
    for _ in 0..20 {
        local.pass(61_000)?;
    }
    settle(&mut local)?;
    let (disk, live) = (taken(folder).map_err(io)?, local.store.live_bytes().map_err(|e| format!("{e:?}"))?);
    let members: usize = local.store.books().iter().map(|(_, i)| i.len()).sum();
    local.store.close();
    let closed = taken(folder).map_err(io)?;
    println!("jobs done                {done} in {:.0} s, and one that waits for a month", worked.as_secs_f64());
    println!("entries in indexes       {members}");
    println!("most on disk meanwhile   {:.1} MiB", mib(most));
    println!(
        "lives                    {:.2} MiB ({live} bytes of keys and values; at most {events} log entries)",
        mib(live)
    );
    println!("on disk                  {:.2} MiB; closed {:.2} MiB", mib(disk), mib(closed));
    let ratio = disk as f64 / live as f64;
    println!("on disk for each byte    {ratio:.2}");
    Ok(ratio)
}

/// Housekeeping until there is none left to do.
fn settle(local: &mut Local) -> Result<(), String> {
    let begun = Instant::now();
    let mut quiet = 0;
    while quiet < 12 {
        let more = local.store.tidy();
        if let Some(why) = local.store.poisoned() {
            return Err(why.to_owned());
        }
        quiet = if more || !local.store.is_settled() { 0 } else { quiet + 1 };
        if begun.elapsed() > Duration::from_secs(300) {
            return Err("housekeeping does not end".into());
        }
        std::thread::sleep(Duration::from_millis(if more { 0 } else { 250 }));
    }
    Ok(())
}

/// Opens a store of many live jobs, after an orderly end and after a kill.
///
/// # Errors
/// What the store says.
pub fn opening(folder: &Path, jobs: u64) -> Result<f64, String> {
    let mut local = Local::open(folder, 100_000)?;
    let clock = local.clock.clone();
    local.submit("waiting", jobs, None, DAY_MS)?;
    let mut longest: f64 = 0.0;
    for end in ["a kill", "an orderly end"] {
        if end == "an orderly end" {
            local.store.close();
        }
        drop(local);
        let begun = Instant::now();
        let store =
            leasehold_disk::DiskStore::open(folder, local::options(&clock, 100_000)).map_err(|e| e.to_string())?;
        let seconds = begun.elapsed().as_secs_f64();
        longest = longest.max(seconds);
        let members: usize = store.books().iter().map(|(_, i)| i.len()).sum();
        println!(
            "opened after {end:<15} {seconds:.2} s: {jobs} jobs, {members} entries in indexes, {:.0} MiB on disk",
            mib(taken(folder).map_err(|e| e.to_string())?)
        );
        drop(store);
        local = Local::open(folder, 100_000)?;
    }
    Ok(longest)
}
