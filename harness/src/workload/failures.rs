//! The store stops, the process is killed or ends: what is there after that.

use leasehold_core::store::Store as _;
use leasehold_core::store::StoreError;
use leasehold_core::store::model::Model;
use leasehold_disk::DiskStore;

use super::{World, replica};
use crate::interpose;
use crate::state;
use crate::trace::Note;

impl World {
    /// The store has stopped: nothing may be applied until it works again, and then what was in doubt
    /// is there as a whole or not at all.
    fn heal(&mut self, before: Model, old: u32, new: u32, commits: bool, why: String) {
        self.counts.stopped += 1;
        self.counts.in_doubt += u64::from(commits);
        let Some(mut store) = self.store.take() else { return };
        let nothing = leasehold_core::store::Commit { txns: Vec::new(), grows: false };
        match store.commit(&nothing) {
            Err(StoreError::Unavailable) => self.counts.refused_while_stopped += 1,
            other => self.problem(format!("a store that has stopped ({why}) answers {other:?}")),
        }
        let mut rest = store.stop();
        for attempt in 0.. {
            match rest.reopen() {
                Ok(store) => {
                    self.store = Some(store);
                    break;
                }
                Err((again, error)) => {
                    rest = again;
                    if attempt == 5 {
                        interpose::mend();
                    }
                    if attempt == 10 {
                        self.problem(format!("the store does not come back ({why}): {error}"));
                        return;
                    }
                }
            }
        }
        self.recovered(before, old, new);
    }

    /// Finds out which of two states a store has that was opened again.
    fn recovered(&mut self, before: Model, old: u32, new: u32) {
        let Some(store) = self.store.as_mut() else { return };
        let lines = match state::of_disk(store) {
            Ok(lines) => lines,
            Err(error) => return self.problem(format!("an opened store cannot be read: {error:?}")),
        };
        let digest = state::digest(&lines);
        if digest == self.states[new as usize].digest {
            interpose::note(Note::Certain(new));
        } else if digest == state::digest(&state::of_model(&before)) {
            self.model = before;
            interpose::note(Note::Certain(old));
            self.certain();
        } else {
            let expected = state::of_model(&self.model);
            self.problem(format!("a store that was opened again: {}", state::difference(&expected, &lines)));
        }
    }

    /// As `kill -9`: the process is gone at some call to the system, and another one opens the folder.
    pub fn crash(&mut self, after: u64) {
        let short = self.rng.chance(300);
        let kind = interpose::Kind::Any;
        interpose::fault(Some(interpose::Fault { kind, after, times: 0, errno: libc::EIO, short, dead: true }));
        self.dying = true;
        for _ in 0..200 {
            if self.dead {
                break;
            }
            self.step();
        }
        self.store = None;
        interpose::fault(None);
        (self.dying, self.dead) = (false, false);
        self.reopen("after a crash");
    }

    /// An orderly end and a new beginning.
    pub fn close(&mut self) {
        if let Some(mut store) = self.store.take() {
            store.close();
        }
        self.reopen("after an orderly end");
    }

    fn reopen(&mut self, when: &str) {
        self.born_ms = self.now_ms;
        self.calls.clear();
        self.asked.clear();
        self.replica = replica(self.rng.next());
        self.counts.reopened += 1;
        match DiskStore::open(&self.folder, self.shape.options(&self.clock, false)) {
            Ok(store) => self.store = Some(store),
            Err(error) => return self.problem(format!("{when}: {error}")),
        }
        let now = (self.states.len() - 1) as u32;
        let (before, old, new) = self.doubt.take().unwrap_or_else(|| (self.model.clone(), now, now));
        self.recovered(before, old, new);
    }

    /// Lets calls fail from some call on, and the store find its way back. Returns how many failed.
    pub fn fail(&mut self, fault: interpose::Fault, steps: u64) -> u64 {
        interpose::fault(Some(fault));
        for _ in 0..steps {
            self.step();
        }
        let hits = interpose::hits();
        interpose::fault(None);
        hits
    }

    pub(super) fn failed(&mut self, before: Model, old: u32, new: u32, commits: bool, why: String) {
        if self.dying {
            self.doubt = Some((before, old, new));
            self.dead = true;
        } else {
            self.heal(before, old, new, commits, why);
        }
    }
}
