//! The store: a group of calls is applied in memory, written as one batch, synced once, answered.

use std::collections::{BTreeMap, HashMap};
use std::ops::Bound;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use fjall::{Database, OwnedWriteBatch, PersistMode};
use leasehold_core::store::engine::{self, Books, Change, Effects};
use leasehold_core::store::{
    Clock, Commit, CommitReply, LogEntry, LogItem, LogRead, Read, SCORE_MAX, Scan, ScanPage, Score, Snapshot, Store,
    StoreError,
};
use leasehold_core::{Name, StoreAnswer, StoreOp, limits};

use crate::clock::SteadyClock;
use crate::folder::{Folder, OpenError};
use crate::format::{CLOCK_KEY, decode_log, encode_log, expiry_key, log_key, member_key, parse_expiry, parse_log};
use crate::open;
use crate::shelf::{self, Broken, Shelf};

/// A record is removed so long after its expiry: longer than any clock can be thought to be wrong.
const GARBAGE_AFTER: u64 = limits::MINUTE;
/// Records that one step of housekeeping removes, at least and at most.
const GARBAGE_MIN: usize = 500;
const GARBAGE_MAX: usize = 10_000;
/// Entries that a log may have above what it keeps before they are cut off.
const LOG_SLACK: u64 = 256;
/// Entries of one log that one batch cuts off.
const LOG_CUT: u64 = 1_024;
/// The clock handed out to reads may be so far past the largest one on disk.
const CLOCK_LAG: u64 = 10 * limits::SECOND;
/// Free space is looked at again after so many microseconds.
const SPACE_MICROS: u128 = 500_000;

/// How to open a store.
#[derive(Clone)]
pub struct Options {
    /// Microseconds since the Unix epoch. Without one: the system's clock, kept from ever going
    /// back, also across restarts.
    pub clock: Option<Arc<dyn Fn() -> u64 + Send + Sync>>,
    /// Entries that each log keeps, at least 1.
    pub log_keep: u64,
    /// Memory for blocks read from disk, bytes.
    pub cache_bytes: u64,
    /// With less free space than this, commits that grow are refused ([`StoreError::Full`]) and the
    /// others go on, which drains the store.
    pub reserve_bytes: u64,
}

impl Default for Options {
    fn default() -> Self {
        Options { clock: None, log_keep: 100_000, cache_bytes: 128 * 1024 * 1024, reserve_bytes: 1024 * 1024 * 1024 }
    }
}

impl std::fmt::Debug for Options {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Options")
            .field("own_clock", &self.clock.is_some())
            .field("log_keep", &self.log_keep)
            .field("cache_bytes", &self.cache_bytes)
            .field("reserve_bytes", &self.reserve_bytes)
            .finish()
    }
}

/// The entries that a log has: sequence numbers `first..next`, without gaps.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LogSpan {
    pub first: u64,
    pub next: u64,
}

/// The embedded store. Everything that a commit's answer says is on disk before it is given.
pub struct DiskStore {
    // Dropped in this order: the database before the lock of its folder.
    db: Database,
    shelf: Shelf,
    folder: Folder,
    options: Options,
    clock: SteadyClock,
    books: Books,
    logs: BTreeMap<Name, LogSpan>,
    group: Group,
    topics: Vec<Name>,
    poisoned: Option<String>,
    /// The largest clock handed out, and the largest that is in the database.
    clock_seen: Clock,
    clock_kept: Clock,
    /// Everything with an expiry before this has been looked at.
    garbage_from: Clock,
    /// Expiries that were written since housekeeping last looked.
    expiring: usize,
    space: Option<(Instant, bool)>,
    #[cfg(test)]
    pub(crate) fail_sync: bool,
}

/// What was applied in memory and is not on disk yet.
#[derive(Default)]
struct Group {
    dirty: bool,
    members: HashMap<(Name, Name), Moved>,
    appends: Vec<(Name, u64, Vec<u8>)>,
    topics: Vec<Name>,
}

struct Moved {
    disk: Option<Score>,
    now: Option<Score>,
}

impl std::fmt::Debug for DiskStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DiskStore")
            .field("folder", &self.folder.path)
            .field("options", &self.options)
            .field("poisoned", &self.poisoned)
            .finish_non_exhaustive()
    }
}

impl DiskStore {
    /// Opens the store in a folder, or makes one in a new or empty folder.
    ///
    /// # Errors
    /// Each says what to do.
    pub fn open(path: impl AsRef<Path>, options: Options) -> Result<DiskStore, OpenError> {
        let folder = Folder::hold(path.as_ref())?;
        let open::Opened { db, shelf, books, logs, clock } = open::open(&folder, &options)?;
        Ok(DiskStore {
            db,
            shelf,
            folder,
            options,
            clock: SteadyClock::new(clock),
            books,
            logs,
            group: Group::default(),
            topics: Vec::new(),
            poisoned: None,
            clock_seen: clock,
            clock_kept: clock,
            garbage_from: 0,
            expiring: 0,
            space: None,
            #[cfg(test)]
            fail_sync: false,
        })
    }

    /// Answers calls, in order. Their commits become durable together, by one sync, before any of
    /// them is answered, or any read that may have seen them. Reads before the first commit are
    /// answered before the sync.
    ///
    /// # Errors
    /// [`StoreError::Unknown`]: the sync of this very group failed. [`StoreError::Unavailable`]: an
    /// earlier one did (see [`DiskStore::poisoned`]), or nothing was applied because something could
    /// not be read. [`StoreError::Full`]: the file system is about to be full.
    pub fn process<T>(&mut self, ops: Vec<(T, StoreOp)>, mut reply: impl FnMut(T, Result<StoreAnswer, StoreError>)) {
        let mut waiting = Vec::new();
        for (tag, op) in ops {
            if self.poisoned.is_some() {
                self.settle(&mut waiting, &mut reply);
                reply(tag, Err(StoreError::Unavailable));
                continue;
            }
            let answer = match op {
                StoreOp::Read(read) => {
                    if read.log.is_some() || read.scan.is_some() {
                        // These look at the disk alone.
                        self.settle(&mut waiting, &mut reply);
                    }
                    self.look(&read).map(StoreAnswer::Read)
                }
                StoreOp::Commit(commit) => self.apply(&commit).map(StoreAnswer::Commit),
            };
            if self.group.dirty && answer.is_ok() {
                waiting.push((tag, answer));
            } else {
                reply(tag, answer);
            }
        }
        self.settle(&mut waiting, &mut reply);
        self.shelf.clear();
    }

    /// Why the store does not work any more, if so. Reopening it is the only way out.
    pub fn poisoned(&self) -> Option<&str> {
        self.poisoned.as_deref()
    }

    /// A step of housekeeping, to be called now and then: removes some of what has expired. Returns
    /// whether there is more to do.
    pub fn tidy(&mut self) -> bool {
        if self.poisoned.is_some() {
            return false;
        }
        match self.collect() {
            Ok(more) => more,
            Err(error) => {
                self.poison(format!("housekeeping failed: {error}"));
                false
            }
        }
    }

    /// Writes out what is known of the clock and syncs; what follows finds the store closed.
    pub fn close(&mut self) {
        if self.poisoned.is_none() {
            let mut batch = self.db.batch().durability(Some(PersistMode::SyncAll));
            self.keep_clock(&mut batch);
            match batch.commit().and_then(|()| self.db.persist(PersistMode::SyncAll)) {
                Ok(()) => self.poisoned = Some("the store was closed".into()),
                Err(error) => self.poison(format!("closing failed: {error}")),
            }
        }
    }

    /// Keys of records that were found damaged since this was last asked.
    pub fn damaged(&mut self) -> Vec<Name> {
        self.shelf.take_damaged()
    }

    /// Bytes that the store takes on disk.
    pub fn disk_bytes(&self) -> u64 {
        self.db.disk_space().unwrap_or_default()
    }

    /// Every index, for whoever checks them.
    pub fn books(&self) -> &Books {
        &self.books
    }

    #[cfg(test)]
    pub(crate) fn shelf_for_tests(&self) -> &Shelf {
        &self.shelf
    }

    fn poison(&mut self, why: String) {
        self.poisoned.get_or_insert(why);
    }

    fn tick(&mut self) -> Clock {
        let clock = match &self.options.clock {
            Some(clock) => clock().min(SCORE_MAX),
            None => self.clock.now(),
        };
        self.clock_seen = self.clock_seen.max(clock);
        clock
    }

    fn look(&mut self, read: &Read) -> Result<Snapshot, StoreError> {
        let clock = self.tick();
        let answer = engine::read(&self.books, &self.shelf, clock, read).and_then(|mut snapshot| {
            if let Some(ask) = &read.log {
                snapshot.log = self.log(ask)?;
            }
            if let Some(ask) = &read.scan {
                snapshot.scan = Some(self.scan(ask)?);
            }
            Ok(snapshot)
        });
        // A record that cannot be read hurts this read only; a commit that meets it stops the store.
        answer.map_err(|_| StoreError::Unavailable)
    }

    fn apply(&mut self, commit: &Commit) -> Result<CommitReply, StoreError> {
        if commit.grows && self.is_full() {
            return Err(StoreError::Full);
        }
        let clock = self.tick();
        let mut effects = Effects::default();
        let answers = match engine::apply(&mut self.books, &mut self.shelf, clock, commit, &mut effects) {
            Ok(answers) => answers,
            Err(error) => {
                // Memory is ahead of the disk now, by half a commit. Nothing of it was written.
                self.poison(format!("a commit met what cannot be read: {error}"));
                return Err(StoreError::Unavailable);
            }
        };
        let Effects { changes, appends, topics } = effects;
        self.group.dirty |= self.shelf.is_changed() || !changes.is_empty() || !appends.is_empty() || !topics.is_empty();
        for change in changes {
            if let Change::Member { index, member, old, new } = change {
                self.group
                    .members
                    .entry((index, member))
                    .and_modify(|m| m.now = new)
                    .or_insert(Moved { disk: old, now: new });
            }
        }
        for (log, items) in appends {
            self.append(log, clock, &items);
        }
        for topic in topics {
            if !self.group.topics.contains(&topic) {
                self.group.topics.push(topic);
            }
        }
        Ok(CommitReply { clock, answers })
    }

    fn append(&mut self, log: Name, clock: Clock, items: &[LogItem]) {
        let span = self.logs.entry(log.clone()).or_insert(LogSpan { first: 1, next: 1 });
        let seq = span.next;
        span.next += 1;
        self.group.appends.push((log, seq, encode_log(clock, items)));
    }

    /// Makes the group durable and answers what waited for it.
    fn settle<T>(
        &mut self,
        waiting: &mut Vec<(T, Result<StoreAnswer, StoreError>)>,
        reply: &mut impl FnMut(T, Result<StoreAnswer, StoreError>),
    ) {
        let unwritten = self.poisoned.is_some();
        let done = !unwritten && (!self.group.dirty || self.write());
        if done {
            let topics = std::mem::take(&mut self.group.topics);
            for topic in topics {
                if !self.topics.contains(&topic) {
                    self.topics.push(topic);
                }
            }
        }
        self.group = Group::default();
        for (tag, answer) in waiting.drain(..) {
            let answer = match answer {
                Ok(StoreAnswer::Commit(_)) if !done && !unwritten => Err(StoreError::Unknown),
                Ok(_) if !done => Err(StoreError::Unavailable),
                answer => answer,
            };
            reply(tag, answer);
        }
    }

    /// One batch, one sync. Returns whether it is on disk for certain.
    fn write(&mut self) -> bool {
        let mut batch = OwnedWriteBatch::with_capacity(self.db.clone(), 16 + 2 * self.group.members.len())
            .durability(Some(PersistMode::SyncData));
        self.keep_clock(&mut batch);
        let small = self.shelf.small.clone();
        for ((index, member), moved) in self.group.members.drain() {
            match moved.now {
                now if now == moved.disk => {}
                Some(score) => batch.insert(&small, member_key(&index, &member), score.to_be_bytes().to_vec()),
                None => batch.remove(&small, member_key(&index, &member)),
            }
        }
        for (log, seq, entry) in self.group.appends.drain(..) {
            batch.insert(&small, log_key(&log, seq), entry);
            if let Some(span) = self.logs.get_mut(&log) {
                let keep_from = span.next.saturating_sub(self.options.log_keep.max(1));
                if keep_from > span.first + LOG_SLACK {
                    let to = keep_from.min(span.first + LOG_CUT);
                    (span.first..to).for_each(|seq| batch.remove(&small, log_key(&log, seq)));
                    span.first = to;
                }
            }
        }
        let (mut earliest, mut count) = (Clock::MAX, 0);
        self.shelf.write(&mut batch, |expiry| {
            earliest = earliest.min(expiry);
            count += 1;
        });
        self.garbage_from = self.garbage_from.min(earliest);
        self.expiring += count;
        // A sync that failed is never tried again: the system may have thrown away what it could not
        // write, and say the next time that all is well.
        #[cfg(test)]
        if self.fail_sync {
            self.poison("a sync failed: by order of a test".into());
            return false;
        }
        match batch.commit() {
            Ok(()) => true,
            Err(error) => {
                self.poison(format!("a commit could not be made durable: {error}"));
                false
            }
        }
    }

    fn keep_clock(&mut self, batch: &mut OwnedWriteBatch) {
        if self.clock_seen > self.clock_kept {
            batch.insert(&self.shelf.small, CLOCK_KEY, self.clock_seen.to_be_bytes().to_vec());
            self.clock_kept = self.clock_seen;
        }
    }

    fn log(&self, ask: &LogRead) -> Result<Vec<LogEntry>, Broken> {
        let Some(span) = self.logs.get(&ask.log) else { return Ok(Vec::new()) };
        let first = span.first.max(span.next.saturating_sub(self.options.log_keep.max(1)));
        let from = ask.after.saturating_add(1).max(first);
        let mut out = Vec::new();
        if from >= span.next {
            return Ok(out);
        }
        let range = log_key(&ask.log, from)..log_key(&ask.log, span.next);
        for entry in self.shelf.small.range(range).take(ask.limit) {
            let (key, value) = entry.into_inner()?;
            let entry = parse_log(&key).and_then(|(_, seq)| decode_log(seq, &value));
            out.push(entry.ok_or_else(|| Broken::Undecodable(ask.log.clone()))?);
        }
        Ok(out)
    }

    fn scan(&self, ask: &Scan) -> Result<ScanPage, Broken> {
        let from = ask.cursor.clone().map_or(Bound::Unbounded, Bound::Excluded);
        let mut keys = Vec::new();
        for entry in self.shelf.records.range::<Bytes, _>((from, Bound::Unbounded)).take(ask.limit) {
            keys.push(Name::new(&entry.key()?));
        }
        let cursor = if keys.len() < ask.limit { None } else { keys.last().map(Name::to_bytes) };
        Ok(ScanPage { keys, cursor })
    }

    /// Removes records that expired more than a minute ago, oldest first.
    fn collect(&mut self) -> Result<bool, Broken> {
        let clock = self.tick();
        let until = clock.saturating_sub(GARBAGE_AFTER);
        let limit = (2 * std::mem::take(&mut self.expiring)).clamp(GARBAGE_MIN, GARBAGE_MAX);
        let mut batch = self.db.batch().durability(Some(PersistMode::Buffer));
        let mut met = 0;
        let mut from = self.garbage_from.min(until);
        for entry in self.shelf.small.range(expiry_key(from, b"")..expiry_key(until, b"")).take(limit) {
            let entry = entry.key()?;
            let parsed = parse_expiry(&entry).map(|(expiry, key)| (expiry, Name::new(key)));
            let (expiry, key) = parsed.ok_or_else(|| Broken::Undecodable(Name::new(&entry)))?;
            // The record may have been put anew, or its expiry moved: then another entry speaks of it.
            if let Some(head) = self.shelf.head_on_disk(&key)?.filter(|h| h.expiry == Some(expiry)) {
                self.shelf.forget(&key);
                shelf::remove(&self.shelf.records, &self.shelf.bytes, &mut batch, &key, shelf::is_apart(&head));
            }
            batch.remove(&self.shelf.small, entry);
            from = expiry;
            met += 1;
        }
        if self.clock_seen > self.clock_kept + CLOCK_LAG {
            self.keep_clock(&mut batch);
        }
        // Not synced: what is lost of this is collected again.
        batch.commit()?;
        self.garbage_from = if met < limit { self.garbage_from.max(until) } else { from };
        Ok(met == limit)
    }

    fn is_full(&mut self) -> bool {
        if let Some((at, full)) = self.space
            && at.elapsed().as_micros() < SPACE_MICROS
        {
            return full;
        }
        let full = rustix::fs::statvfs(&self.folder.path)
            .is_ok_and(|s| s.f_bavail.saturating_mul(s.f_frsize) < self.options.reserve_bytes);
        self.space = Some((Instant::now(), full));
        full
    }
}

impl Store for DiskStore {
    fn read(&mut self, read: &Read) -> Result<Snapshot, StoreError> {
        if self.poisoned.is_some() {
            return Err(StoreError::Unavailable);
        }
        let answer = self.look(read);
        self.shelf.clear();
        answer
    }

    fn commit(&mut self, commit: &Commit) -> Result<CommitReply, StoreError> {
        let mut answer = Err(StoreError::Unavailable);
        self.process(vec![((), StoreOp::Commit(commit.clone()))], |(), reply| {
            answer = reply.and_then(|a| match a {
                StoreAnswer::Commit(reply) => Ok(reply),
                StoreAnswer::Read(_) => Err(StoreError::Unknown),
            });
        });
        answer
    }

    fn notified(&mut self) -> Vec<Name> {
        std::mem::take(&mut self.topics)
    }
}
