//! The suite that every store must pass: each law of the port as small named checks, and random
//! reads and commits for differential tests.
//!
//! A check gets a fresh store and knows nothing of how it is made. Stores whose clock cannot be set
//! wait in [`TestStore::advance`]; what needs a clock that stands still is skipped for them.

mod guards;
pub mod random;
mod reads;
mod takes;
mod writes;

use alloc::sync::Arc;
use alloc::vec::Vec;
use bytes::Bytes;

use super::model::Model;
use super::port::{
    Answer, Clock, Commit, CommitReply, Each, Expiry, Guard, Place, Read, Record, SCORE_MAX, ScoreAt, Snapshot, Source,
    Store, Take, Taken, Txn, Value, Version, Write,
};
use crate::name::Name;

/// A store whose clock a test can move.
pub trait TestStore: Store {
    /// The clock moves on by at least so many microseconds; by exactly so many if it is `frozen`.
    fn advance(&mut self, micros: u64);

    /// Whether the clock stands still between two calls of [`TestStore::advance`].
    fn frozen(&self) -> bool {
        true
    }

    /// Makes the store full, or no longer; returns whether it can be.
    fn set_full(&mut self, full: bool) -> bool {
        let _ = full;
        false
    }

    /// Removes what has expired, if the store has a way to do so on demand.
    fn collect_garbage(&mut self) {}
}

impl TestStore for Model {
    fn advance(&mut self, micros: u64) {
        self.set_clock(self.clock() + micros);
    }

    fn set_full(&mut self, full: bool) -> bool {
        self.full = full;
        true
    }

    fn collect_garbage(&mut self) {
        Model::collect_garbage(self);
    }
}

/// One check: its name, which says the law, and its body.
pub type Check = (&'static str, fn(&mut dyn TestStore));

/// Every check.
pub fn checks() -> impl Iterator<Item = Check> {
    [guards::CHECKS, writes::CHECKS, takes::CHECKS, reads::CHECKS].into_iter().flatten().copied()
}

/// Runs every check on a store of its own, all of them even if some fail.
///
/// # Panics
/// With the names of the checks that failed.
pub fn run<S: TestStore>(mut make: impl FnMut() -> S) {
    let mut failed = Vec::new();
    for (name, check) in checks() {
        let mut store = make();
        let body = std::panic::AssertUnwindSafe(|| check(&mut store));
        if std::panic::catch_unwind(body).is_err() {
            failed.push(name);
        }
    }
    assert!(failed.is_empty(), "the store does not keep: {failed:#?}");
}

// --- short words for the checks ---------------------------------------------------------------

const V1: Version = Version(1);
const V2: Version = Version(2);
const V3: Version = Version(u64::MAX);
/// Time that passes in a check; short, since some stores have to wait for it.
const TICK: u64 = 20_000;

fn name(text: &str) -> Name {
    Name::from(text)
}

#[derive(Clone)]
struct T(Txn);

fn txn() -> T {
    T(Txn { valid_until: SCORE_MAX, guards: Vec::new(), take: None, writes: Vec::new() })
}

impl T {
    fn until(mut self, clock: Clock) -> T {
        self.0.valid_until = clock;
        self
    }

    fn guard(mut self, guard: Guard) -> T {
        self.0.guards.push(guard);
        self
    }

    fn take(mut self, take: Take) -> T {
        self.0.take = Some(take);
        self
    }

    fn write(mut self, write: Write) -> T {
        self.0.writes.push(write);
        self
    }

    fn put(self, key: &str, version: Version, bytes: &str) -> T {
        self.put_until(key, version, bytes, Expiry::Never)
    }

    fn put_until(self, key: &str, version: Version, bytes: &str, expiry: Expiry) -> T {
        let value = Value::Bytes(Bytes::copy_from_slice(bytes.as_bytes()));
        self.write(Write::Put { key: name(key), version, value, expiry })
    }

    fn add(self, index: &str, member: &str, score: ScoreAt) -> T {
        self.write(Write::Add { index: name(index), member: name(member), score, raise: false })
    }

    fn raise(self, index: &str, member: &str, score: ScoreAt) -> T {
        self.write(Write::Add { index: name(index), member: name(member), score, raise: true })
    }

    fn remove(self, index: &str, member: &str) -> T {
        self.write(Write::Remove { index: name(index), member: name(member) })
    }

    fn append(self, log: &str, bytes: &str) -> T {
        self.write(Write::Append { log: name(log), bytes: Bytes::copy_from_slice(bytes.as_bytes()) })
    }

    fn notify(self, topic: &str) -> T {
        self.write(Write::Notify(name(topic)))
    }
}

fn commit(store: &mut dyn TestStore, txns: impl IntoIterator<Item = T>) -> CommitReply {
    let commit = Commit { txns: txns.into_iter().map(|t| Arc::new(t.0)).collect(), grows: false };
    let reply = store.commit(&commit).expect("the store answers");
    assert_eq!(reply.answers.len(), commit.txns.len(), "an answer for each transaction");
    reply
}

fn answer(store: &mut dyn TestStore, txn: T) -> Answer {
    commit(store, [txn]).answers.remove(0)
}

fn applied(store: &mut dyn TestStore, txn: T) -> Vec<Taken> {
    match answer(store, txn) {
        Answer::Applied { taken } => taken,
        other => {
            assert_eq!(other, Answer::Applied { taken: Vec::new() });
            Vec::new()
        }
    }
}

fn holds(store: &mut dyn TestStore, guard: Guard) -> bool {
    match answer(store, txn().guard(guard)) {
        Answer::Applied { .. } => true,
        other => {
            assert_eq!(other, Answer::Refused(0));
            false
        }
    }
}

fn read(store: &mut dyn TestStore, read: Read) -> Snapshot {
    store.read(&read).expect("the store answers")
}

fn clock(store: &mut dyn TestStore) -> Clock {
    read(store, Read::default()).clock
}

fn record(store: &mut dyn TestStore, key: &str) -> Record {
    read(store, Read { records: [name(key)].into(), ..Read::default() }).records.remove(0)
}

fn text(store: &mut dyn TestStore, key: &str) -> Option<Bytes> {
    record(store, key).bytes().cloned()
}

fn place(store: &mut dyn TestStore, index: &str, member: &str) -> Option<Place> {
    read(store, Read { members: [(name(index), name(member))].into(), ..Read::default() }).members.remove(0)
}

fn score(store: &mut dyn TestStore, index: &str, member: &str) -> Option<u64> {
    place(store, index, member).map(|p| p.score)
}

/// A source without further ado.
fn source(index: &str, each: &[Each]) -> Source {
    Source { index: name(index), due: false, each: each.to_vec() }
}

fn take_of(n: usize, from: impl Into<Vec<Source>>) -> Take {
    Take { n, from: from.into(), give: Vec::new(), max_bytes: crate::limits::READ_BYTES }
}

fn members(taken: &[Taken]) -> Vec<(u32, &str, u64)> {
    taken.iter().map(|t| (t.source, t.member.as_str().unwrap_or("?"), t.score)).collect()
}
