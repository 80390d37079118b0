//! The model store: the reference, in memory, on a clock that its owner sets.
//!
//! The simulator and the tests run on it. It can be made to lose its newest commits, to evict or
//! expire any record and to lose an index entry.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;
use bytes::Bytes;
use core::convert::Infallible;
use core::ops::Bound;

use super::engine::{self, Books, Change, Effects, Records, Stored};
use super::port::{Clock, Commit, CommitReply, LogEntry, Read, ScanPage, Score, Snapshot, Store, StoreError};
use crate::name::Name;

/// Commits that can be undone by [`Model::lose_newest`].
const UNDO: usize = 64;
/// Entries that a log keeps.
const LOG_KEEP: usize = 100_000;

#[derive(Clone, Debug, Default)]
pub struct Model {
    clock: Clock,
    books: Books,
    records: Map,
    logs: BTreeMap<Name, Log>,
    topics: Vec<Name>,
    undo: VecDeque<Effects>,
    last: Effects,
    /// As a store at its memory limit: commits that grow are refused.
    pub full: bool,
}

#[derive(Clone, Debug, Default)]
struct Map(BTreeMap<Name, Stored>);

#[derive(Clone, Debug, Default)]
struct Log {
    next: u64,
    entries: VecDeque<LogEntry>,
}

impl Records for Map {
    type Error = Infallible;

    fn get(&self, key: &Name) -> Result<Option<Stored>, Infallible> {
        Ok(self.0.get(key).cloned())
    }

    fn set(&mut self, key: &Name, record: Option<Stored>) -> Result<Option<Stored>, Infallible> {
        Ok(match record {
            Some(record) => self.0.insert(key.clone(), record),
            None => self.0.remove(key),
        })
    }
}

impl Model {
    pub fn new(clock: Clock) -> Self {
        Model { clock, ..Model::default() }
    }

    pub fn clock(&self) -> Clock {
        self.clock
    }

    /// Sets the clock; it may also go back, as a real one may.
    pub fn set_clock(&mut self, clock: Clock) {
        self.clock = clock;
    }

    /// The indexes, for whoever checks them.
    pub fn books(&self) -> &Books {
        &self.books
    }

    /// A record that has not expired, for whoever checks it.
    pub fn record(&self, key: &Name) -> Option<Stored> {
        engine::unexpired(self.records.0.get(key).cloned(), self.clock)
    }

    /// Every record whose key begins so, expired ones included, in order of keys.
    pub fn records(&self, prefix: &[u8]) -> impl Iterator<Item = (&Name, &Stored)> {
        let range = (Bound::Included(prefix), Bound::Unbounded);
        self.records.0.range::<[u8], _>(range).take_while(move |(k, _)| k.starts_with(prefix))
    }

    pub fn logs(&self) -> impl Iterator<Item = (&Name, &VecDeque<LogEntry>)> {
        self.logs.iter().map(|(name, log)| (name, &log.entries))
    }

    /// What the last commit did.
    pub fn last_effects(&self) -> &Effects {
        &self.last
    }

    /// Fault: forgets the newest `n` commits (at most the last 64), as a fail-over to a replica that
    /// lags behind does. Returns how many were forgotten.
    pub fn lose_newest(&mut self, n: usize) -> usize {
        let mut lost = 0;
        while lost < n {
            let Some(effects) = self.undo.pop_back() else { break };
            for change in effects.changes.into_iter().rev() {
                match change {
                    Change::Record { key, old, .. } => {
                        let Ok(_) = self.records.set(&key, old);
                    }
                    Change::Member { index, member, old, .. } => {
                        self.books.set(&index, &member, old);
                    }
                }
            }
            for log in effects.appends.keys() {
                if let Some(log) = self.logs.get_mut(log) {
                    log.entries.pop_back();
                }
            }
            lost += 1;
        }
        lost
    }

    /// Fault: a record disappears, as by eviction. Returns whether it was there.
    pub fn evict(&mut self, key: &Name) -> bool {
        // What was lost stays lost when commits before it are undone.
        self.undo.clear();
        self.records.0.remove(key).is_some()
    }

    /// Fault: an entry disappears from an index. Returns whether it was there.
    pub fn drop_member(&mut self, index: &Name, member: &Name) -> bool {
        self.undo.clear();
        self.books.set(index, member, None).is_some()
    }

    /// Fault: a record's bytes change under it.
    pub fn corrupt(&mut self, key: &Name, bytes: Bytes) -> bool {
        self.undo.clear();
        match self.records.0.get_mut(key) {
            Some(record) => {
                record.bytes = bytes;
                true
            }
            None => false,
        }
    }

    /// Removes expired records, as a store's own garbage collection does. Nothing may notice.
    pub fn collect_garbage(&mut self) {
        let clock = self.clock;
        self.records.0.retain(|_, r| r.expiry.is_none_or(|e| e > clock));
    }

    /// Every member of an index in order, for whoever checks it.
    pub fn members(&self, index: &Name) -> Vec<(Score, Name)> {
        self.books.get(index).map(|i| i.slice(None, super::port::UpTo::End, self.clock, usize::MAX)).unwrap_or_default()
    }

    fn scan(&self, scan: &super::port::Scan) -> ScanPage {
        let after = scan.cursor.clone().map(Name::from);
        let from = match &after {
            None => Bound::Unbounded,
            Some(after) => Bound::Excluded(after),
        };
        let keys: Vec<Name> = self
            .records
            .0
            .range::<Name, _>((from, Bound::Unbounded))
            .take(scan.limit)
            .map(|(k, _)| k.clone())
            .collect();
        let cursor = if keys.len() < scan.limit { None } else { keys.last().map(Name::to_bytes) };
        ScanPage { keys, cursor }
    }
}

impl Store for Model {
    fn read(&mut self, read: &Read) -> Result<Snapshot, StoreError> {
        let Ok(mut snapshot) = engine::read(&self.books, &self.records, self.clock, read);
        if let Some(ask) = &read.log
            && let Some(log) = self.logs.get(&ask.log)
        {
            let from = log.entries.partition_point(|e| e.seq <= ask.after);
            snapshot.log = log.entries.iter().skip(from).take(ask.limit).cloned().collect();
        }
        snapshot.scan = read.scan.as_ref().map(|scan| self.scan(scan));
        Ok(snapshot)
    }

    fn commit(&mut self, commit: &Commit) -> Result<CommitReply, StoreError> {
        if self.full && commit.grows {
            return Err(StoreError::Full);
        }
        let mut effects = Effects::default();
        let Ok(answers) = engine::apply(&mut self.books, &mut self.records, self.clock, commit, &mut effects);
        for (name, items) in &effects.appends {
            let log = self.logs.entry(name.clone()).or_default();
            log.next += 1;
            log.entries.push_back(LogEntry { seq: log.next, at: self.clock, items: items.clone() });
            if log.entries.len() > LOG_KEEP {
                log.entries.pop_front();
            }
        }
        for topic in &effects.topics {
            if !self.topics.contains(topic) {
                self.topics.push(topic.clone());
            }
        }
        self.last = effects.clone();
        self.undo.push_back(effects);
        if self.undo.len() > UNDO {
            self.undo.pop_front();
        }
        Ok(CommitReply { clock: self.clock, answers })
    }

    fn notified(&mut self) -> Vec<Name> {
        core::mem::take(&mut self.topics)
    }
}
