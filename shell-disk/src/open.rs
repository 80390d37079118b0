//! Opening: the database, and the memory that is rebuilt from it.

use std::collections::BTreeMap;

use fjall::config::{BloomConstructionPolicy, FilterPolicy, FilterPolicyEntry};
use fjall::{Database, KeyspaceCreateOptions, KvSeparationOptions};
use leasehold_core::Name;
use leasehold_core::store::engine::Books;
use leasehold_core::store::{Clock, Score};

use crate::folder::{Folder, OpenError};
use crate::format::{CLOCK_KEY, LOG, MEMBER, log_key, parse_log, parse_member, parse_score};
use crate::shelf::Shelf;
use crate::store::{LogSpan, Options};

const MIB: u64 = 1024 * 1024;
/// Memory for what is not in tables yet, of each keyspace.
const MEMTABLE: u64 = 32 * MIB;
/// Journals are replayed on opening: their size bounds how long that takes.
const JOURNALS: u64 = 256 * MIB;

pub(crate) struct Opened {
    pub db: Database,
    pub shelf: Shelf,
    pub books: Books,
    pub logs: BTreeMap<Name, LogSpan>,
    pub clock: Clock,
}

pub(crate) fn open(folder: &Folder, options: &Options) -> Result<Opened, OpenError> {
    let engine = |error| match error {
        fjall::Error::Locked => OpenError::Held { folder: folder.path.clone() },
        error => OpenError::Engine { folder: folder.path.clone(), error },
    };
    let db = Database::builder(folder.db())
        .cache_size(options.cache_bytes)
        .max_journaling_size(JOURNALS)
        .manual_journal_persist(true)
        .open()
        .map_err(engine)?;
    folder.sync()?;
    let base = || KeyspaceCreateOptions::default().max_memtable_size(MEMTABLE).manual_journal_persist(true);
    // Most keys that are looked up are new ones: every level says for certain, in memory, that it
    // does not have them.
    let filters = FilterPolicy::all(FilterPolicyEntry::Bloom(BloomConstructionPolicy::BitsPerKey(12.0)));
    let records = db.keyspace("records", || base().filter_policy(filters.clone())).map_err(engine)?;
    let bytes =
        db.keyspace("bytes", || base().with_kv_separation(Some(KvSeparationOptions::default()))).map_err(engine)?;
    let small = db.keyspace("small", || base().filter_policy(FilterPolicy::disabled())).map_err(engine)?;
    let shelf = Shelf::new(records, bytes, small).map_err(engine)?;
    let corrupt = |what: &[u8]| OpenError::Corrupt {
        folder: folder.path.clone(),
        what: format!("the entry {} cannot be decoded", what.escape_ascii()),
    };

    let clock = match shelf.small.get(CLOCK_KEY).map_err(engine)? {
        Some(value) => parse_score(&value).ok_or_else(|| corrupt(CLOCK_KEY))?,
        None => 0,
    };
    let mut books = Books::default();
    let mut present: Option<(Name, Vec<(Score, Name)>)> = None;
    for entry in shelf.small.prefix([MEMBER]) {
        let (key, value) = entry.into_inner().map_err(engine)?;
        let (index, member) = parse_member(&key).ok_or_else(|| corrupt(&key))?;
        let score = parse_score(&value).ok_or_else(|| corrupt(&key))?;
        // A copy: the key is a slice of a whole block.
        let member = Name::new(member);
        match &mut present {
            Some((name, members)) if **name == *index => members.push((score, member)),
            _ => {
                let next = (Name::new(index), vec![(score, member)]);
                fill(&mut books, present.replace(next));
            }
        }
    }
    fill(&mut books, present);
    let mut logs = BTreeMap::new();
    let mut from = vec![LOG];
    while let Some(entry) = shelf.small.range(from.clone()..vec![LOG + 1]).next() {
        let key = entry.key().map_err(engine)?;
        let (log, first) = parse_log(&key).ok_or_else(|| corrupt(&key))?;
        let log = Name::new(log);
        let range = log_key(&log, first)..=log_key(&log, u64::MAX);
        let last = shelf.small.range(range).next_back().map(|e| e.key()).transpose().map_err(engine)?;
        let last = last.as_deref().and_then(parse_log).map_or(first, |(_, seq)| seq);
        from = log_key(&log, u64::MAX);
        logs.insert(log, LogSpan { first, next: last + 1 });
    }
    Ok(Opened { db, shelf, books, logs, clock })
}

/// Enters an index's members in their order, which is the cheapest.
fn fill(books: &mut Books, index: Option<(Name, Vec<(Score, Name)>)>) {
    let Some((index, mut members)) = index else { return };
    members.sort_unstable();
    for (score, member) in members {
        books.set(&index, &member, Some(score));
    }
}
