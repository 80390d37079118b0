//! Everything that a store holds, as one number: for the store on disk, through its port, and for the
//! model.

use std::collections::BTreeSet;

use leasehold_core::Name;
use leasehold_core::store::engine::Books;
use leasehold_core::store::model::Model;
use leasehold_core::store::{Clock, LogEntry, LogRead, Read, Record, Scan, Store as _, StoreError, keys};
use leasehold_disk::DiskStore;
use xxhash_rust::xxh3::{Xxh3Default, xxh3_64};

/// The tenant of every job here.
pub const TENANT: &str = "default";

/// What is compared, line by line, so that a difference can be told.
pub type Lines = Vec<String>;

fn record(key: &Name, version: u64, at: Clock, expiry: Option<Clock>, bytes: &[u8]) -> String {
    format!("record {key} v{version:x} at {at} until {expiry:?}: {} bytes {:016x}", bytes.len(), xxh3_64(bytes))
}

fn members(books: &Books, lines: &mut Lines) {
    for (index, members) in books.iter() {
        lines.extend(members.iter().map(|(member, score)| format!("index {index}: {member} @{score}")));
    }
}

fn log(entries: impl IntoIterator<Item = LogEntry>, lines: &mut Lines) {
    lines.extend(entries.into_iter().map(|e| format!("log {} at {}: {:?}", e.seq, e.at, e.items)));
}

fn sorted(mut lines: Lines) -> Lines {
    lines.sort_unstable();
    lines
}

/// What the model holds at its clock.
pub fn of_model(model: &Model) -> Lines {
    let clock = model.clock();
    let mut lines: Lines = model
        .records(b"")
        .filter(|(_, r)| r.expiry.is_none_or(|e| e > clock))
        .map(|(key, r)| record(key, r.version.0, r.at, r.expiry, &r.bytes))
        .collect();
    members(model.books(), &mut lines);
    for (_, entries) in model.logs() {
        log(entries.iter().cloned(), &mut lines);
    }
    sorted(lines)
}

/// What a store holds at the clock that it is given.
///
/// # Errors
/// What the store says when something cannot be read.
pub fn of_disk(store: &mut DiskStore) -> Result<Lines, StoreError> {
    let mut lines = Lines::new();
    let mut cursor = None;
    loop {
        let scan = Some(Scan { cursor, limit: 1_000 });
        let page = store.read(&Read { scan, ..Read::default() })?.scan.ok_or(StoreError::Unknown)?;
        let read = Read { records: page.keys.clone(), max_bytes: usize::MAX, ..Read::default() };
        for (key, found) in page.keys.iter().zip(store.read(&read)?.records) {
            if let Record::Present { version, at, expiry, bytes: Some(bytes), .. } = found {
                lines.push(record(key, version.0, at, expiry, &bytes));
            }
        }
        cursor = page.cursor;
        if cursor.is_none() {
            break;
        }
    }
    members(store.books(), &mut lines);
    let ask = Some(LogRead { log: keys::audit(TENANT), after: 0, limit: usize::MAX });
    log(store.read(&Read { log: ask, ..Read::default() })?.log, &mut lines);
    Ok(sorted(lines))
}

/// The lines without the records that have expired at a clock.
pub fn expired(lines: &Lines, clock: Clock) -> Lines {
    let until = |line: &str| line.split_once(" until Some(")?.1.split_once(')')?.0.parse::<Clock>().ok();
    let gone = |line: &&String| line.starts_with("record ") && until(line).is_some_and(|e| e <= clock);
    lines.iter().filter(|line| !gone(line)).cloned().collect()
}

/// Of expected lines, those that are so, each looked for by itself.
pub fn readable(store: &mut DiskStore, expected: &[String]) -> BTreeSet<String> {
    let mut lines = Lines::new();
    members(store.books(), &mut lines);
    let ask = Some(LogRead { log: keys::audit(TENANT), after: 0, limit: usize::MAX });
    if let Ok(found) = store.read(&Read { log: ask, ..Read::default() }) {
        log(found.log, &mut lines);
    }
    for key in expected.iter().filter_map(|l| l.strip_prefix("record ")?.split(' ').next()) {
        let records = vec![Name::from(key)];
        let Ok(found) = store.read(&Read { records, max_bytes: usize::MAX, ..Read::default() }) else { continue };
        if let Some(Record::Present { version, at, expiry, bytes: Some(bytes), .. }) = found.records.first() {
            lines.push(record(&Name::from(key), version.0, *at, *expiry, bytes));
        }
    }
    lines.into_iter().collect()
}

pub fn digest(lines: &Lines) -> u128 {
    let mut hash = Xxh3Default::new();
    for line in lines {
        hash.update(line.as_bytes());
        hash.update(b"\n");
    }
    hash.digest128()
}

/// The first lines that only one of two has.
pub fn difference(expected: &Lines, found: &Lines) -> String {
    let missing: Vec<_> = expected.iter().filter(|l| found.binary_search(l).is_err()).collect();
    let extra: Vec<_> = found.iter().filter(|l| expected.binary_search(l).is_err()).collect();
    let some = |lines: &[&String]| lines.iter().take(6).map(|l| format!("\n      {l}")).collect::<String>();
    format!("{} lines missing:{}\n    {} too many:{}", missing.len(), some(&missing), extra.len(), some(&extra))
}
