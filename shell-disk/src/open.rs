//! Opening: the database, and the memory that is rebuilt from it.

use std::collections::BTreeMap;
use std::time::Duration;

use leasehold_core::Name;
use leasehold_core::store::engine::Books;
use leasehold_core::store::{Clock, Score};

use crate::durable::Durable;
use crate::folder::{Folder, OpenError};
use crate::format::{CLOCK_KEY, LOG, MEMBER, log_key, parse_log, parse_member, parse_score};
use crate::shelf::Shelf;
use crate::store::{LogSpan, Options};

pub(crate) struct Opened {
    pub durable: Durable,
    pub shelf: Shelf,
    pub books: Books,
    pub logs: BTreeMap<Name, LogSpan>,
    pub clock: Clock,
}

/// `hold`: tables are not merged for so long.
pub(crate) fn open(folder: &Folder, options: &Options, hold: Duration) -> Result<Opened, OpenError> {
    let engine = |error| OpenError::broken(&folder.path, error);
    let mut durable = Durable::open(folder, options, hold)?;
    let shelf = Shelf::new(durable.trees()).map_err(engine)?;
    if let Some(why) = shelf.unsure() {
        durable.fault(why);
    }
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
    for entry in shelf.small.range([MEMBER]..[MEMBER + 1]).map_err(engine)? {
        let (key, value) = entry.map_err(engine)?;
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
    while let Some(entry) = shelf.small.range(from.clone()..vec![LOG + 1]).map_err(engine)?.next() {
        let (key, _) = entry.map_err(engine)?;
        let (log, first) = parse_log(&key).ok_or_else(|| corrupt(&key))?;
        let log = Name::new(log);
        let range = log_key(&log, first)..=log_key(&log, u64::MAX);
        let last = shelf.small.range(range).map_err(engine)?.next_back().transpose().map_err(engine)?;
        let last = last.as_ref().and_then(|(key, _)| parse_log(key)).map_or(first, |(_, seq)| seq);
        from = log_key(&log, u64::MAX);
        logs.insert(log, LogSpan { first, next: last + 1 });
    }
    Ok(Opened { durable, shelf, books, logs, clock })
}

/// Enters an index's members in their order, which is the cheapest.
fn fill(books: &mut Books, index: Option<(Name, Vec<(Score, Name)>)>) {
    let Some((index, mut members)) = index else { return };
    members.sort_unstable();
    for (score, member) in members {
        books.set(&index, &member, Some(score));
    }
}
