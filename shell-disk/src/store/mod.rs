//! The store: a group of calls is applied in memory, written as one batch, synced once, answered.

mod bounds;
mod garbage;
mod log;
mod options;

use std::collections::{BTreeMap, HashMap};
use std::ops::Bound;
use std::path::Path;
use std::time::{Duration, Instant};

use bytes::Bytes;
use leasehold_core::store::engine::{self, Books, Change, Effects};
use leasehold_core::store::{
    Clock, Commit, CommitReply, Read, SCORE_MAX, Scan, ScanPage, Score, Snapshot, Store, StoreError,
};
use leasehold_core::{Name, StoreAnswer, StoreOp};

use crate::clock::SteadyClock;
use crate::durable::Durable;
use crate::folder::{Folder, OpenError};
use crate::format::{CLOCK_KEY, log_key, member_key};
use crate::journal::{Batch, Place};
use crate::open;
use crate::shelf::Shelf;
use crate::tree::Broken;

pub use options::Options;

/// Entries that a log may have above what it keeps before they are cut off.
const LOG_SLACK: u64 = 256;
/// Entries of one log that one batch cuts off.
const LOG_CUT: u64 = 1_024;
/// How long the merging of tables is held back when it stopped the store: doubled each time.
const HOLD_MIN: Duration = Duration::from_secs(60);
const HOLD_MAX: Duration = Duration::from_secs(24 * 3_600);
/// Free space is looked at again after so many microseconds.
const SPACE_MICROS: u128 = 500_000;
/// What is kept free of a large file system.
const RESERVE_BYTES: u64 = 1024 * 1024 * 1024;

/// The entries that a log has: sequence numbers `first..next`, without gaps.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LogSpan {
    pub first: u64,
    pub next: u64,
}

/// The embedded store. Everything that a commit's answer says is on disk before it is given.
pub struct DiskStore {
    // Dropped in this order: what has files open before the lock of their folder.
    durable: Durable,
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
    /// How long the merging of tables is held back after a reopening that it caused.
    hold: Duration,
}

/// What is left of a store that has stopped: the folder, still held, and the clock.
#[derive(Debug)]
pub struct Stopped {
    folder: Folder,
    options: Options,
    clock: SteadyClock,
    clock_seen: Clock,
    hold: Duration,
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
        let folder = Folder::hold(path.as_ref(), options.read_only)?;
        Self::load(folder, options, None, Duration::ZERO).map_err(|(_, error)| error)
    }

    fn load(
        folder: Folder,
        options: Options,
        clock: Option<(SteadyClock, Clock)>,
        hold: Duration,
    ) -> Result<DiskStore, (Box<Stopped>, OpenError)> {
        let opened = match open::open(&folder, &options, hold) {
            Ok(opened) => opened,
            Err(error) => {
                let (clock, clock_seen) = clock.unwrap_or_else(|| (SteadyClock::new(0), 0));
                return Err((Box::new(Stopped { folder, options, clock, clock_seen, hold }), error));
            }
        };
        let open::Opened { durable, shelf, books, logs, clock: kept } = opened;
        let (clock, clock_seen) = clock.unwrap_or_else(|| (SteadyClock::new(kept), kept));
        Ok(DiskStore {
            durable,
            shelf,
            folder,
            options,
            clock,
            books,
            logs,
            group: Group::default(),
            topics: Vec::new(),
            poisoned: None,
            clock_seen: clock_seen.max(kept),
            clock_kept: kept,
            garbage_from: 0,
            expiring: 0,
            space: None,
            hold,
        })
    }

    /// Closes a store that has stopped, without writing anything.
    pub fn stop(self) -> Box<Stopped> {
        let hold = match self.durable.failed() {
            // It would fail again at once: let everything else have its time.
            Some((_, true)) => (2 * self.hold).clamp(HOLD_MIN, HOLD_MAX),
            _ => self.hold,
        };
        let DiskStore { folder, options, clock, clock_seen, .. } = self;
        Box::new(Stopped { folder, options, clock, clock_seen, hold })
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

    /// Why the store does not work any more, if so. The way out: [`DiskStore::stop`], [`Stopped::reopen`].
    pub fn poisoned(&self) -> Option<&str> {
        self.poisoned.as_deref()
    }

    /// A step of housekeeping, to be called now and then: removes some of what has expired. Returns
    /// whether there is more to do.
    pub fn tidy(&mut self) -> bool {
        if self.poisoned.is_some() || self.options.read_only {
            return false;
        }
        let result = self.collect().and_then(|more| self.durable.idle().map(|()| more));
        match result {
            Ok(more) => more,
            Err(error) => {
                self.poison(format!("housekeeping failed: {error}"));
                false
            }
        }
    }

    /// Writes out what is known of the clock, and everything as tables; what follows finds the store
    /// closed.
    pub fn close(&mut self) {
        if self.poisoned.is_some() {
            return;
        }
        let mut batch = Batch::default();
        if !self.options.read_only {
            self.keep_clock(&mut batch);
        }
        let kept = if batch.is_empty() { Ok(()) } else { self.durable.commit(batch) };
        match kept.and_then(|()| self.durable.close()) {
            Ok(()) => self.poisoned = Some("the store was closed".into()),
            Err(error) => self.poison(format!("closing failed: {error}")),
        }
    }

    /// Keys of records that were found damaged since this was last asked.
    pub fn damaged(&mut self) -> Vec<Name> {
        self.shelf.take_damaged()
    }

    /// What was met on disk since this was last asked that is not as it should be, and was survived.
    pub fn faults(&mut self) -> Vec<String> {
        self.durable.take_faults()
    }

    /// Bytes that the store takes on disk.
    pub fn disk_bytes(&self) -> u64 {
        self.durable.disk_bytes()
    }

    /// Bytes of all keys and values: what the store would take without any overhead. Walks through
    /// everything.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`]: something cannot be read.
    pub fn live_bytes(&self) -> Result<u64, StoreError> {
        self.durable.live_bytes().map_err(|_| StoreError::Unavailable)
    }

    /// Whether housekeeping has given back what it can, if nothing else is done.
    pub fn is_settled(&self) -> bool {
        self.durable.is_settled()
    }

    /// Every index, for whoever checks them.
    pub fn books(&self) -> &Books {
        &self.books
    }

    #[cfg(test)]
    pub(crate) fn shelf_for_tests(&self) -> &Shelf {
        &self.shelf
    }

    #[cfg(test)]
    pub(crate) fn fail_sync(&mut self) {
        self.durable.fail = true;
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
        if self.options.read_only {
            return Err(StoreError::Unavailable);
        }
        if !bounds::hold(commit) {
            return Err(StoreError::Unavailable);
        }
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
        let mut batch = Batch::default();
        self.keep_clock(&mut batch);
        for ((index, member), moved) in self.group.members.drain() {
            match moved.now {
                now if now == moved.disk => {}
                Some(score) => {
                    batch.insert(Place::Small, member_key(&index, &member), score.to_be_bytes().to_vec());
                }
                None => batch.remove(Place::Small, member_key(&index, &member)),
            }
        }
        for (log, seq, entry) in self.group.appends.drain(..) {
            batch.insert(Place::Small, log_key(&log, seq), entry);
            if let Some(span) = self.logs.get_mut(&log) {
                let keep_from = span.next.saturating_sub(self.options.log_keep.max(1));
                if keep_from > span.first + LOG_SLACK {
                    let to = keep_from.min(span.first + LOG_CUT);
                    (span.first..to).for_each(|seq| batch.remove(Place::Small, log_key(&log, seq)));
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
        match self.durable.commit(batch) {
            Ok(()) => true,
            Err(error) => {
                self.poison(format!("a commit could not be made durable: {error}"));
                false
            }
        }
    }

    fn keep_clock(&mut self, batch: &mut Batch) {
        if self.clock_seen > self.clock_kept {
            batch.insert(Place::Small, CLOCK_KEY, self.clock_seen.to_be_bytes().to_vec());
            self.clock_kept = self.clock_seen;
        }
    }

    fn scan(&self, ask: &Scan) -> Result<ScanPage, Broken> {
        let from = ask.cursor.clone().map_or(Bound::Unbounded, Bound::Excluded);
        let mut keys = Vec::new();
        for entry in self.shelf.records.range::<Bytes>((from, Bound::Unbounded))?.take(ask.limit) {
            keys.push(Name::new(&entry?.0));
        }
        let cursor = if keys.len() < ask.limit { None } else { keys.last().map(Name::to_bytes) };
        Ok(ScanPage { keys, cursor })
    }

    fn is_full(&mut self) -> bool {
        if let Some((at, full)) = self.space
            && at.elapsed().as_micros() < SPACE_MICROS
        {
            return full;
        }
        let full = rustix::fs::statvfs(&self.folder.path).is_ok_and(|s| {
            let tenth = s.f_blocks.saturating_mul(s.f_frsize) / 10;
            let reserve = self.options.reserve_bytes.unwrap_or(RESERVE_BYTES.min(tenth));
            s.f_bavail.saturating_mul(s.f_frsize) < reserve
        });
        self.space = Some((Instant::now(), full));
        full
    }
}

impl Stopped {
    /// Proves that the disk takes what is written, and opens the store from it.
    ///
    /// # Errors
    /// Each says why the store is not to be trusted yet; try again later.
    pub fn reopen(self: Box<Self>) -> Result<DiskStore, (Box<Stopped>, OpenError)> {
        if let Err(error) = self.folder.probe() {
            let error = OpenError::Io { folder: self.folder.path.clone(), error };
            return Err((self, error));
        }
        let Stopped { folder, options, clock, clock_seen, hold } = *self;
        let mut store = DiskStore::load(folder, options, Some((clock, clock_seen)), hold)?;
        // A fresh segment, whether or not anything had to be recovered.
        match store.durable.begin() {
            Ok(()) => Ok(store),
            Err(error) => {
                let error = OpenError::broken(&store.folder.path, error);
                Err((store.stop(), error))
            }
        }
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
