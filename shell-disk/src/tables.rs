//! The two threads that write tables: one writes what was sealed in memory, one merges tables.
//!
//! What they may not do is fail silently. A write or a sync that failed stops the store, like one of
//! the journal's. A table that cannot be read is told and counted; its tree is not merged for a while,
//! and everything else goes on.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use lsm_tree::SequenceNumberCounter;

use crate::journal::{PLACES, Place};
use crate::tree::{Broken, Tree, told};

/// A tree with a table that cannot be read is merged again after so long.
const HELD: Duration = Duration::from_secs(600);
/// With so many parts, writing waits for merging.
const RUNS: usize = 20;
/// Garbage below this is not worth a merge of everything.
const GARBAGE: u64 = 512 * 1024;
/// Bytes that a removed or replaced value is thought to have.
const VALUE: u64 = 200;

/// Work and what came of it, shared by the store's thread and the two.
#[derive(Default)]
struct State {
    /// Groups that are sealed, and those that are in tables.
    sealed: u64,
    flushed: u64,
    /// Merging has been asked for, and everything may be merged.
    merge: bool,
    idle: bool,
    merging: bool,
    held: [Option<Instant>; 3],
    faults: Vec<String>,
    failed: Option<String>,
    /// The failure came from merging: it would come again at once.
    by_merging: bool,
    end: bool,
}

struct Shared {
    state: Mutex<State>,
    wake: Condvar,
    trees: [Tree; 3],
    seqno: SequenceNumberCounter,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Plain values: a panic elsewhere leaves nothing half done in it.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, f: impl FnOnce(&mut State)) {
        f(&mut self.lock());
        self.wake.notify_all();
    }
}

/// The threads. Dropping it ends them after the step that they are at.
pub(crate) struct Tables {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl Tables {
    /// `hold` keeps the merging back for so long. `inline`: without threads, the work is done by whoever
    /// asks for it.
    pub(crate) fn start(
        trees: [Tree; 3],
        seqno: SequenceNumberCounter,
        flushed: u64,
        hold: Duration,
        inline: bool,
    ) -> std::io::Result<Tables> {
        let until = (!hold.is_zero()).then(|| Instant::now() + hold);
        let state = State { sealed: flushed, flushed, held: [until; 3], ..State::default() };
        let shared = Arc::new(Shared { state: Mutex::new(state), wake: Condvar::new(), trees, seqno });
        let mut tables = Tables { shared: shared.clone(), threads: Vec::new() };
        if inline {
            return Ok(tables);
        }
        for (name, work) in [("leasehold-flush", flush as fn(&Shared)), ("leasehold-merge", merge)] {
            let shared = shared.clone();
            let run = move || {
                if let Err(panic) = catch_unwind(AssertUnwindSafe(|| work(&shared))) {
                    shared.change(|s| s.fail(told(&*panic), name == "leasehold-merge"));
                }
            };
            tables.threads.push(std::thread::Builder::new().name(name.into()).spawn(run)?);
        }
        Ok(tables)
    }

    /// What was sealed with a group and before is to be written.
    pub(crate) fn flush(&self, group: u64) {
        self.shared.change(|s| s.sealed = group);
        self.inline(true);
    }

    /// Does what was asked for, if there are no threads for it.
    fn inline(&self, flush: bool) {
        let (sealed, failed) = {
            let state = self.shared.lock();
            (state.sealed, state.failed.is_some())
        };
        if self.threads.is_empty() && !failed {
            if flush {
                flush_once(&self.shared, sealed);
            }
            merge_once(&self.shared);
        }
    }

    /// Groups up to here are in tables.
    pub(crate) fn flushed(&self) -> u64 {
        self.shared.lock().flushed
    }

    /// Whether something sealed is not written yet.
    pub(crate) fn is_flushing(&self) -> bool {
        let state = self.shared.lock();
        state.flushed < state.sealed
    }

    /// Waits until everything sealed is written, or something failed.
    pub(crate) fn wait(&self) {
        let state = self.shared.lock();
        let busy = |s: &mut State| s.flushed < s.sealed && s.failed.is_none();
        drop(self.shared.wake.wait_while(state, busy));
    }

    /// Nothing else is to be done just now: a good time to give back what garbage takes.
    pub(crate) fn idle(&self) {
        if wasteful(&self.shared.trees).is_some() {
            self.shared.change(|s| {
                s.merge = true;
                s.idle = true;
            });
            self.inline(false);
        }
    }

    /// Whether tables are being merged, or are going to be.
    pub(crate) fn is_merging(&self) -> bool {
        let state = self.shared.lock();
        state.merge || state.merging
    }

    /// Why the store must stop, and whether it was merging that failed.
    pub(crate) fn failed(&self) -> Option<(String, bool)> {
        let state = self.shared.lock();
        state.failed.clone().map(|why| (why, state.by_merging))
    }

    /// What was met and survived since this was last asked.
    pub(crate) fn take_faults(&self) -> Vec<String> {
        std::mem::take(&mut self.shared.lock().faults)
    }
}

impl Drop for Tables {
    fn drop(&mut self) {
        self.shared.change(|s| s.end = true);
        for thread in self.threads.drain(..) {
            // Whatever it died of is in the state.
            let _ = thread.join();
        }
    }
}

impl State {
    fn fail(&mut self, why: String, by_merging: bool) {
        if self.failed.is_none() {
            self.failed = Some(why);
            self.by_merging = by_merging;
        }
    }
}

fn flush(shared: &Shared) {
    loop {
        let state = shared.lock();
        let idle = |s: &mut State| !s.end && (s.flushed >= s.sealed || s.failed.is_some());
        let state = shared.wake.wait_while(state, idle).unwrap_or_else(PoisonError::into_inner);
        if state.end {
            return;
        }
        let sealed = state.sealed;
        drop(state);
        flush_once(shared, sealed);
    }
}

/// Writes what is sealed up to a group.
fn flush_once(shared: &Shared, sealed: u64) {
    for tree in &shared.trees {
        if let Err(error) = tree.flush(shared.seqno.get()) {
            return shared.change(|s| s.fail(format!("a table could not be written: {error}"), false));
        }
    }
    // More parts than can be looked through for every read: let the merging catch up, if it can.
    let behind = |s: &mut State| {
        let crowded = shared.trees.iter().zip(&s.held).any(|(t, held)| held.is_none() && t.runs() >= RUNS);
        crowded && s.merging && !s.end && s.failed.is_none()
    };
    shared.change(|s| s.merge = true);
    drop(shared.wake.wait_while(shared.lock(), behind));
    shared.change(|s| s.flushed = sealed);
}

fn merge(shared: &Shared) {
    loop {
        let state = shared.lock();
        let idle = |s: &mut State| !s.end && (!s.merge || s.failed.is_some());
        let state = shared.wake.wait_while(state, idle).unwrap_or_else(PoisonError::into_inner);
        if state.end {
            return;
        }
        drop(state);
        merge_once(shared);
    }
}

fn merge_once(shared: &Shared) {
    let mut state = shared.lock();
    state.merge = false;
    state.merging = true;
    let everything = std::mem::take(&mut state.idle);
    let now = Instant::now();
    for held in &mut state.held {
        *held = held.filter(|until| *until > now);
    }
    let held = state.held;
    drop(state);
    for ((tree, place), _) in shared.trees.iter().zip(PLACES).zip(held).filter(|(_, held)| held.is_none()) {
        match merge_one(shared, tree, place, everything) {
            Ok(()) => {}
            Err(Broken::Io(error)) => {
                shared.change(|s| s.fail(format!("tables could not be merged: {error}"), true));
                break;
            }
            Err(error) => shared.change(|s| {
                s.held[place as usize] = Some(Instant::now() + HELD);
                s.faults.push(format!("a table of the {place:?} cannot be merged: {error}"));
            }),
        }
    }
    shared.change(|s| s.merging = false);
}

fn merge_one(shared: &Shared, tree: &Tree, place: Place, everything: bool) -> Result<(), Broken> {
    if everything && wasteful(&shared.trees).is_some_and(|places| places.contains(&place)) {
        return tree.compact_all(shared.seqno.get());
    }
    while !shared.lock().end && tree.compact(shared.seqno.get())? {
        shared.wake.notify_all();
    }
    Ok(())
}

/// Trees of which more than a third may be garbage.
fn wasteful(trees: &[Tree; 3]) -> Option<Vec<Place>> {
    let wasteful = |tree: &Tree| {
        let (last, all) = tree.levels();
        let garbage = all - last + VALUE * tree.removals();
        garbage > GARBAGE && 3 * garbage > all
    };
    let places: Vec<Place> = PLACES.into_iter().zip(trees).filter(|(_, t)| wasteful(t)).map(|(p, _)| p).collect();
    (!places.is_empty()).then_some(places)
}
