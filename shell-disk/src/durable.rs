//! What makes a group last: into the journal, synced, then into the trees; from time to time the trees
//! are written as tables and the journal's beginning is removed.
//!
//! The journal covers all trees alike: when a segment is full, **all** trees are sealed and written, so
//! that one which is rarely written to never keeps old segments. A segment is removed only after a
//! later one says, durably, that its groups are in tables.

use std::time::{Duration, Instant};

use leasehold_core::Name;

use crate::folder::{FOLDERS, Folder, OpenError};
use crate::journal::{self, Batch, Journal, PLACES, Place, Unusable};
use crate::store::Options;
use crate::tables::Tables;
use crate::tree::{Broken, Shared, Tree};

/// Segments' worth of journal at which groups wait for the tables.
const LAGGING: u64 = 4;
/// A journal's file grows by so much, unless its segments are smaller.
const STEP: u64 = 4 * 1024 * 1024;
/// Bytes of journal that are left alone while nothing happens.
const IDLE_BYTES: u64 = 512 * 1024;

/// A segment that is complete, with its last group.
#[derive(Clone, Copy, Debug)]
struct Sealed {
    number: u64,
    last: u64,
}

pub(crate) struct Durable {
    trees: [Tree; 3],
    shared: Shared,
    /// `None`: opened for reading only.
    tables: Option<Tables>,
    folder: std::path::PathBuf,
    segment_bytes: u64,
    memory_bytes: u64,
    journal: Option<Journal>,
    sealed: Vec<Sealed>,
    /// Of the next segment, and of the next group.
    next_number: u64,
    next_group: u64,
    /// Groups up to here are in tables, and the journal says so durably.
    told: u64,
    faults: Vec<String>,
    last_group: Instant,
    idle_after: Duration,
    /// The next commit fails as a sync would.
    #[cfg(test)]
    pub(crate) fail: bool,
}

impl Durable {
    /// Reads what is there. Unless it is only to be read, what came from the journal is made durable
    /// anew, in fresh files, before this returns: the one who wrote it may have failed to.
    pub(crate) fn open(folder: &Folder, options: &Options, hold: Duration) -> Result<Durable, OpenError> {
        let io = |error| OpenError::Io { folder: folder.path.clone(), error };
        let broken = |error| OpenError::broken(&folder.path, error);
        let corrupt = |what| OpenError::Corrupt { folder: folder.path.clone(), what };
        let journals = folder.journal();
        let fresh = !options.read_only;
        if fresh {
            folder.make(&FOLDERS)?;
        } else if !Tree::is_there(&folder.tree(Place::Small)) {
            return Err(OpenError::Missing { folder: folder.path.clone() });
        }
        folder.settle(&FOLDERS)?;
        let shared = Shared::new(options.cache_bytes);
        let open = |place| Tree::open(&folder.tree(place), place, &shared);
        let [records, bytes, small] = PLACES.map(open);
        let trees = [records.map_err(broken)?, bytes.map_err(broken)?, small.map_err(broken)?];
        let persisted = trees.each_ref().map(Tree::persisted);
        let found = journal::recover(&journals).map_err(|error| match error {
            Unusable::Io(error) => io(error),
            Unusable::Damaged(what) => corrupt(what),
        })?;
        for group in &found.groups {
            let batch = group.batch().ok_or_else(|| corrupt("the journal has items of an unknown kind".into()))?;
            for (place, key, value) in batch.into_items().filter(|(place, ..)| group.seqno > persisted[*place as usize])
            {
                trees[place as usize].apply(key, value, group.seqno);
            }
        }
        let newest = persisted.into_iter().max().unwrap_or_default();
        // A store has a segment before it has its first table.
        if found.segments.is_empty() && newest > 0 {
            return Err(corrupt("its journal is gone".into()));
        }
        // Nothing is in a table that was not in the journal before: what looks torn was acknowledged.
        if newest > 0 && found.acknowledged.is_some_and(|seqno| newest >= seqno) {
            return Err(corrupt("the journal's last group cannot be read, and tables have a part of it".into()));
        }
        shared.seqno.fetch_max(newest + 1);
        shared.seqno.fetch_max(found.seqno);
        let last = found.next_group - 1;
        let mut faults = Vec::new();
        if found.torn > 0 {
            faults.push(format!(
                "the journal ends in {} bytes of a group that was not written to its end, and so was not acknowledged",
                found.torn
            ));
        }
        let tables = match fresh {
            true => {
                let seqno = shared.seqno.clone();
                Some(Tables::start(trees.clone(), seqno, found.flushed, hold, options.inline).map_err(io)?)
            }
            false => None,
        };
        let mut durable = Durable {
            trees,
            shared,
            tables,
            folder: journals,
            segment_bytes: options.journal_bytes,
            memory_bytes: options.memory_bytes,
            journal: None,
            next_number: found.segments.last().map_or(1, |n| n + 1),
            sealed: found.segments.iter().map(|number| Sealed { number: *number, last }).collect(),
            next_group: found.next_group,
            told: found.flushed,
            faults,
            last_group: Instant::now(),
            idle_after: options.idle_after,
            #[cfg(test)]
            fail: false,
        };
        if fresh && !found.groups.is_empty() {
            // The one who wrote it may have failed to make it durable. In the journal before in any table.
            let (number, step) = (durable.next_number, STEP.min(durable.segment_bytes));
            journal::rewrite(&durable.folder, number, &found.groups, found.flushed, step).map_err(io)?;
            durable.sealed.push(Sealed { number, last });
            durable.next_number += 1;
            durable.begin().map_err(broken)?;
        }
        Ok(durable)
    }

    pub(crate) fn trees(&self) -> [Tree; 3] {
        self.trees.clone()
    }

    /// Everything so far into tables, and a fresh segment that says so.
    pub(crate) fn begin(&mut self) -> Result<(), Broken> {
        let Some(tables) = &self.tables else { return Err(read_only()) };
        self.trees.iter().for_each(Tree::seal);
        tables.flush(self.next_group - 1);
        tables.wait();
        self.check()?;
        self.segment(self.next_group - 1)?;
        self.forget()
    }

    /// A new segment.
    fn segment(&mut self, flushed: u64) -> Result<(), Broken> {
        let step = STEP.min(self.segment_bytes);
        let seqno = self.shared.seqno.get();
        let fresh = Journal::create(&self.folder, self.next_number, self.next_group, seqno, flushed, step)?;
        self.next_number += 1;
        self.told = flushed;
        if let Some(old) = self.journal.replace(fresh) {
            self.sealed.push(Sealed { number: old.number(), last: self.next_group - 1 });
        }
        Ok(())
    }

    /// Removes the segments that are not needed.
    fn forget(&mut self) -> Result<(), Broken> {
        let told = self.told;
        if self.sealed.iter().any(|s| s.last <= told) {
            journal::remove(&self.folder, self.sealed.iter().filter(|s| s.last <= told).map(|s| s.number))?;
            self.sealed.retain(|s| s.last > told);
        }
        Ok(())
    }

    /// An error if a thread that writes tables has failed.
    fn check(&self) -> Result<(), Broken> {
        match self.failed() {
            Some((why, _)) => Err(Broken::Io(std::io::Error::other(why))),
            None => Ok(()),
        }
    }

    /// Applies a group: it is on disk when this returns. Also one that could well be lost: a later group
    /// that reaches the disk while it does not would look like damage.
    pub(crate) fn commit(&mut self, batch: Batch) -> Result<(), Broken> {
        self.check()?;
        #[cfg(test)]
        if self.fail {
            return Err(Broken::Io(std::io::Error::other("a sync failed: by order of a test")));
        }
        if self.journal.is_none() {
            self.begin()?;
        }
        let Some((journal, tables)) = self.journal.as_mut().zip(self.tables.as_ref()) else { return Err(read_only()) };
        let seqno = self.shared.seqno.next();
        let flushed = tables.flushed();
        journal.append(&batch, seqno, flushed)?;
        self.next_group = journal.next_group();
        self.told = flushed;
        for (place, key, value) in batch.into_items() {
            self.trees[place as usize].apply(key, value, seqno);
        }
        self.last_group = Instant::now();
        self.forget()?;
        self.rotate(self.segment_bytes)
    }

    /// Seals segment and trees if either has more than its share.
    fn rotate(&mut self, limit: u64) -> Result<(), Broken> {
        let Some((journal, tables)) = self.journal.as_mut().zip(self.tables.as_ref()) else { return Ok(()) };
        let memory: u64 = self.trees.iter().map(Tree::unflushed).sum();
        if journal.len() < limit && memory < self.memory_bytes {
            return Ok(());
        }
        if tables.is_flushing() {
            if journal.len() < LAGGING * self.segment_bytes && memory < LAGGING * self.memory_bytes {
                return Ok(());
            }
            tables.wait();
        }
        let flushed = tables.flushed();
        self.check()?;
        self.segment(flushed)?;
        self.trees.iter().for_each(Tree::seal);
        if let Some(tables) = &self.tables {
            tables.flush(self.next_group - 1);
        }
        Ok(())
    }

    /// Called now and then: gives back what is not needed when nothing has happened for a while.
    pub(crate) fn idle(&mut self) -> Result<(), Broken> {
        self.check()?;
        let Some((journal, tables)) = self.journal.as_mut().zip(self.tables.as_ref()) else { return Ok(()) };
        if self.last_group.elapsed() < self.idle_after || tables.is_flushing() {
            return Ok(());
        }
        let flushed = tables.flushed();
        if self.sealed.iter().any(|s| s.last <= flushed) && self.told < flushed {
            journal.append(&Batch::default(), self.shared.seqno.next(), flushed)?;
            self.next_group = journal.next_group();
            self.told = flushed;
            self.forget()?;
        }
        let tables_bytes: u64 = self.trees.iter().map(Tree::disk_bytes).sum();
        self.rotate(IDLE_BYTES.min(self.segment_bytes).max(tables_bytes / 4))?;
        if let Some(tables) = self.tables.as_ref().filter(|t| !t.is_flushing()) {
            tables.idle();
        }
        Ok(())
    }

    /// Whether there is anything left that [`Durable::idle`] would do, or that it has begun.
    pub(crate) fn is_settled(&self) -> bool {
        let busy = self.tables.as_ref().is_some_and(|t| t.is_flushing() || t.is_merging());
        !busy && self.sealed.is_empty()
    }

    /// Leaves nothing to be replayed.
    pub(crate) fn close(&mut self) -> Result<(), Broken> {
        match self.journal {
            Some(_) => self.begin(),
            None => Ok(()),
        }
    }

    /// Why the store must stop, and whether it was the merging of tables that failed.
    pub(crate) fn failed(&self) -> Option<(String, bool)> {
        self.tables.as_ref().and_then(Tables::failed)
    }

    /// What was met and survived since this was last asked.
    pub(crate) fn take_faults(&mut self) -> Vec<String> {
        let mut faults = std::mem::take(&mut self.faults);
        faults.extend(self.tables.iter().flat_map(Tables::take_faults));
        faults
    }

    pub(crate) fn fault(&mut self, what: String) {
        self.faults.push(what);
    }

    /// Bytes on disk: tables and journal.
    pub(crate) fn disk_bytes(&self) -> u64 {
        let sealed = self.sealed.iter().filter_map(|s| journal::bytes(&self.folder, s.number));
        let tables: u64 = self.trees.iter().map(Tree::disk_bytes).sum();
        tables + sealed.sum::<u64>() + self.journal.as_ref().map_or(0, Journal::len)
    }

    /// Bytes of keys and values that are kept, by walking through all of them.
    pub(crate) fn live_bytes(&self) -> Result<u64, Broken> {
        let mut bytes = 0;
        for tree in &self.trees {
            for item in tree.range::<Name>(..)? {
                let (key, value) = item?;
                bytes += (key.len() + value.len()) as u64;
            }
        }
        Ok(bytes)
    }
}

fn read_only() -> Broken {
    Broken::Io(std::io::Error::other("the store was opened for reading only"))
}
