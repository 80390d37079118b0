//! Which transactions of a commit can be applied together.
//!
//! A commit's transactions are applied as if one after the other. Two of them that touch nothing in
//! common may as well be applied in one go: all guards of both, then all writes of both, each kind of
//! write in one call. So every transaction is given a **wave**: the first one that comes after every
//! earlier transaction that it depends on. A transaction with a take, whose writes are not known
//! beforehand, or one that writes the same thing twice, has a wave of its own, after all before it
//! and before all that follow.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use leasehold_core::Name;
use leasehold_core::store::{Guard, ScoreAt, Standing, Txn, Write};

/// The transactions of one wave, by position in the commit.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Wave {
    Together(Vec<usize>),
    Alone(usize),
}

/// The last waves in which something was looked at and written; 0 for never.
#[derive(Clone, Copy, Debug, Default)]
struct Touch {
    read: usize,
    written: usize,
    /// All writes of its last wave were plain adds (or all raises): they may follow each other within
    /// one call.
    adds: Option<bool>,
}

#[derive(Debug, Default)]
struct Seen<'a> {
    records: HashMap<&'a [u8], Touch>,
    members: HashMap<(&'a [u8], &'a [u8]), Touch>,
    /// An index as a whole: its first member, its sizes.
    indexes: HashMap<&'a [u8], Touch>,
}

/// Deals the transactions out.
pub(crate) fn deal<T: AsRef<Txn>>(txns: &[T]) -> Vec<Wave> {
    let mut seen = Seen::default();
    let mut waves: Vec<Wave> = Vec::new();
    // No later transaction goes before this wave.
    let mut floor = 1;
    for (at, txn) in txns.iter().enumerate() {
        let txn = txn.as_ref();
        if txn.take.is_some() || !writes_once(&txn.writes) {
            waves.push(Wave::Alone(at));
            floor = waves.len() + 1;
            continue;
        }
        let wave = seen.earliest(txn).max(floor);
        seen.note(txn, wave);
        while waves.len() < wave {
            waves.push(Wave::Together(Vec::new()));
        }
        if let Some(Wave::Together(of)) = waves.get_mut(wave - 1) {
            of.push(at);
        }
    }
    waves
}

/// What a write changes: a record, or a member of an index.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Target<'a> {
    Record(&'a [u8]),
    Member(&'a [u8], &'a [u8]),
}

fn target(write: &Write) -> Option<Target<'_>> {
    match write {
        Write::Put { key, .. } | Write::Delete(key) | Write::Expire(key, _) => Some(Target::Record(key)),
        Write::Add { index, member, .. } | Write::Remove { index, member } => Some(Target::Member(index, member)),
        Write::Append { .. } | Write::Notify(_) => None,
    }
}

/// Whether no two writes change the same thing, so that their order does not matter.
fn writes_once(writes: &[Write]) -> bool {
    if writes.len() <= 24 {
        return writes.iter().enumerate().all(|(i, write)| {
            target(write).is_none_or(|t| writes.iter().take(i).all(|before| target(before) != Some(t)))
        });
    }
    let mut seen = std::collections::HashSet::new();
    writes.iter().filter_map(target).all(|t| seen.insert(t))
}

impl<'a> Seen<'a> {
    fn record(&self, key: &Name) -> Touch {
        self.records.get(&**key).copied().unwrap_or_default()
    }

    fn member(&self, index: &Name, member: &Name) -> Touch {
        self.members.get(&(&**index, &**member)).copied().unwrap_or_default()
    }

    fn index(&self, index: &Name) -> Touch {
        self.indexes.get(&**index).copied().unwrap_or_default()
    }

    /// The first wave in which the transaction sees all that it depends on, and is not seen by those
    /// that came before it.
    fn earliest(&self, txn: &Txn) -> usize {
        let mut wave = 1;
        for guard in &txn.guards {
            wave = wave.max(match guard {
                Guard::Absent(key) | Guard::At(key, _) => self.record(key).written + 1,
                Guard::Member(index, _, Standing::First) | Guard::Below(index, _, _) => self.index(index).written + 1,
                Guard::Member(index, member, _) => self.member(index, member).written + 1,
            });
        }
        for write in &txn.writes {
            match write {
                Write::Put { key, .. } | Write::Delete(key) | Write::Expire(key, _) => {
                    let touch = self.record(key);
                    wave = wave.max(touch.written + 1).max(touch.read);
                }
                Write::Add { index, member, score, raise } => {
                    let touch = self.member(index, member);
                    let of = matches!(score, ScoreAt::Of(_));
                    let follows = !of && touch.adds == Some(*raise);
                    wave = wave.max(touch.written + usize::from(!follows)).max(touch.read).max(self.index(index).read);
                    if let ScoreAt::Of(source) = score {
                        wave = wave.max(self.member(source, member).written + 1);
                    }
                }
                Write::Remove { index, member } => {
                    let touch = self.member(index, member);
                    wave = wave.max(touch.written + 1).max(touch.read).max(self.index(index).read);
                }
                Write::Append { .. } | Write::Notify(_) => {}
            }
        }
        wave
    }

    fn note(&mut self, txn: &'a Txn, wave: usize) {
        for guard in &txn.guards {
            let touch = match guard {
                Guard::Absent(key) | Guard::At(key, _) => self.records.entry(key).or_default(),
                Guard::Member(index, _, Standing::First) | Guard::Below(index, _, _) => {
                    self.indexes.entry(index).or_default()
                }
                Guard::Member(index, member, _) => self.members.entry((index, member)).or_default(),
            };
            touch.read = touch.read.max(wave);
        }
        for write in &txn.writes {
            match write {
                Write::Put { key, .. } | Write::Delete(key) | Write::Expire(key, _) => {
                    self.records.entry(key).or_default().written = wave;
                }
                Write::Add { index, member, score, raise } => {
                    let adds = (!matches!(score, ScoreAt::Of(_))).then_some(*raise);
                    self.member_written(index, member, wave, adds);
                    if let ScoreAt::Of(source) = score {
                        let touch = self.members.entry((source, member)).or_default();
                        touch.read = touch.read.max(wave);
                    }
                }
                Write::Remove { index, member } => self.member_written(index, member, wave, None),
                Write::Append { .. } | Write::Notify(_) => {}
            }
        }
    }

    fn member_written(&mut self, index: &'a Name, member: &'a Name, wave: usize, adds: Option<bool>) {
        match self.members.entry((index, member)) {
            Entry::Vacant(vacant) => {
                vacant.insert(Touch { read: 0, written: wave, adds });
            }
            Entry::Occupied(mut occupied) => {
                let touch = occupied.get_mut();
                if touch.written == wave && touch.adds != adds {
                    touch.adds = None;
                } else {
                    touch.adds = adds;
                }
                touch.written = wave;
            }
        }
        let touch = self.indexes.entry(index).or_default();
        touch.written = touch.written.max(wave);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use leasehold_core::store::{Expiry, SCORE_MAX, Take, Value, Version};

    fn n(text: &str) -> Name {
        Name::from(text)
    }

    fn txn(guards: Vec<Guard>, writes: Vec<Write>) -> std::sync::Arc<Txn> {
        std::sync::Arc::new(Txn { valid_until: SCORE_MAX, guards, take: None, writes })
    }

    fn put(key: &str) -> Write {
        Write::Put { key: n(key), version: Version(1), value: Value::Taken, expiry: Expiry::Never }
    }

    fn add(index: &str, member: &str) -> Write {
        Write::Add { index: n(index), member: n(member), score: ScoreAt::Clock(1), raise: false }
    }

    #[test]
    fn what_meets_nothing_goes_together() {
        let one = |id: &str| txn(vec![Guard::Absent(n(id))], vec![put(id), add("queued", id), add("names", "q")]);
        assert_eq!(deal(&[one("a"), one("b"), one("c")]), [Wave::Together(vec![0, 1, 2])]);
    }

    #[test]
    fn alternatives_of_one_job_follow_each_other_and_other_jobs_do_not_wait() {
        let end = |id: &str| txn(vec![Guard::At(n(id), Version(1))], vec![put(id)]);
        let waves = deal(&[end("a"), end("a"), end("b"), end("b")]);
        assert_eq!(waves, [Wave::Together(vec![0, 2]), Wave::Together(vec![1, 3])]);
    }

    #[test]
    fn a_guard_comes_after_what_it_looks_at_and_before_what_comes_later() {
        let free = txn(vec![Guard::Below(n("held"), leasehold_core::store::Span::All, 2)], vec![add("held", "x")]);
        let more = txn(vec![Guard::Below(n("held"), leasehold_core::store::Span::All, 2)], vec![add("held", "y")]);
        assert_eq!(deal(&[free, more]), [Wave::Together(vec![0]), Wave::Together(vec![1])]);
        let looks = txn(vec![Guard::Absent(n("k"))], vec![]);
        assert_eq!(deal(&[looks, txn(vec![], vec![put("k")])]), [Wave::Together(vec![0, 1])]);
    }

    #[test]
    fn takes_and_double_writes_are_alone_and_nothing_passes_them() {
        let take = |n| Take { n, from: Vec::new(), give: Vec::new(), max_bytes: 0 };
        let takes = std::sync::Arc::new(Txn { take: Some(take(1)), ..(*txn(vec![], vec![])).clone() });
        let twice = txn(vec![], vec![put("k"), put("k")]);
        let waves = deal(&[txn(vec![], vec![put("a")]), takes, txn(vec![], vec![put("b")]), twice]);
        assert_eq!(waves, [Wave::Together(vec![0]), Wave::Alone(1), Wave::Together(vec![2]), Wave::Alone(3)]);
    }
}
