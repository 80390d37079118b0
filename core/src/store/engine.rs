//! The meaning of a read and of a commit, on records that a store keeps somewhere and indexes in
//! memory. The model store and the disk store both run this code; a store that cannot (Redis) is
//! held to it by the conformance suite and by differential tests.

use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec::Vec;
use bytes::Bytes;

pub use super::books::Books;
use super::port::{
    Answer, Clock, Commit, Each, Entry, Expiry, Guard, LogItem, Place, Read, Record, SCORE_MAX, Score, ScoreAt,
    Snapshot, Standing, Take, Taken, TakenMember, Txn, Value, Version, Write, encode_taken,
};
use crate::name::Name;

/// A record as it is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored {
    pub version: Version,
    pub at: Clock,
    pub expiry: Option<Clock>,
    pub bytes: Bytes,
}

/// A record without its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    pub version: Version,
    pub at: Clock,
    pub expiry: Option<Clock>,
    pub len: usize,
}

impl Stored {
    pub fn head(&self) -> Head {
        Head { version: self.version, at: self.at, expiry: self.expiry, len: self.bytes.len() }
    }
}

impl Head {
    /// Law 5: absent once its expiry is not past the clock.
    pub fn is_unexpired(&self, clock: Clock) -> bool {
        self.expiry.is_none_or(|e| e > clock)
    }
}

/// Where the records are.
pub trait Records {
    type Error;

    /// The record as kept, whether or not it has expired.
    fn get(&self, key: &Name) -> Result<Option<Stored>, Self::Error>;

    /// The same without its bytes, for a store that can leave a large record's unread.
    fn head(&self, key: &Name) -> Result<Option<Head>, Self::Error> {
        Ok(self.get(key)?.map(|r| r.head()))
    }

    /// Puts or deletes. Returns what was there, for whoever undoes commits; a store that never does
    /// may spare itself the reading and return `None`.
    fn set(&mut self, key: &Name, record: Option<Stored>) -> Result<Option<Stored>, Self::Error>;

    /// Changes only the expiry of a record that is there. Returns it before and after, on the same
    /// terms as [`Records::set`].
    fn expire(&mut self, key: &Name, expiry: Option<Clock>) -> Result<Option<(Stored, Stored)>, Self::Error> {
        let Some(old) = self.get(key)? else { return Ok(None) };
        let new = Stored { expiry, ..old.clone() };
        self.set(key, Some(new.clone()))?;
        Ok(Some((old, new)))
    }
}

/// One thing that a commit changed, in order. `old` of a record is what [`Records::set`] returned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    Record { key: Name, old: Option<Stored>, new: Option<Stored> },
    Member { index: Name, member: Name, old: Option<Score>, new: Option<Score> },
}

/// What a commit did, for whoever makes it durable, undoes it or watches it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Effects {
    pub changes: Vec<Change>,
    /// At most one new entry for each log; the store gives it its place.
    pub appends: BTreeMap<Name, Vec<LogItem>>,
    pub topics: Vec<Name>,
}

/// Cuts a sum to the range of scores (law 7).
fn plus(clock: Clock, d: Score) -> Score {
    clock.saturating_add(d).min(SCORE_MAX)
}

/// Law 5: absent once its expiry is not past the clock.
pub fn unexpired(record: Option<Stored>, clock: Clock) -> Option<Stored> {
    record.filter(|r| r.head().is_unexpired(clock))
}

/// Hands out records within a budget of bytes (law 8).
struct Budget {
    left: usize,
    first: bool,
}

impl Budget {
    fn new(left: usize) -> Self {
        Budget { left, first: true }
    }

    fn give<R: Records>(&mut self, records: &R, key: &Name, clock: Clock) -> Result<Record, R::Error> {
        if !self.first && self.left == 0 {
            // Nothing but empty bytes would fit: they are not worth reading.
            let head = records.head(key)?.filter(|h| h.is_unexpired(clock));
            return Ok(head.map_or(Record::Absent, |h| Record::Present {
                version: h.version,
                at: h.at,
                expiry: h.expiry,
                len: h.len,
                bytes: (h.len == 0).then(Bytes::new),
            }));
        }
        let Some(r) = unexpired(records.get(key)?, clock) else { return Ok(Record::Absent) };
        let len = r.bytes.len();
        let whole = self.first || len <= self.left;
        if whole {
            self.left = self.left.saturating_sub(len);
            self.first = false;
        } else {
            // Later records stay out too: which ones are given does not depend on their sizes' luck.
            self.left = 0;
        }
        let bytes = whole.then_some(r.bytes);
        Ok(Record::Present { version: r.version, at: r.at, expiry: r.expiry, len, bytes })
    }
}

/// Answers a read, except its log and its scan, which the store adds.
pub fn read<R: Records>(books: &Books, records: &R, clock: Clock, read: &Read) -> Result<Snapshot, R::Error> {
    let mut budget = Budget::new(read.max_bytes);
    let mut out = Snapshot { clock, ..Snapshot::default() };
    out.records.reserve(read.records.len());
    for key in &read.records {
        out.records.push(budget.give(records, key, clock)?);
    }
    for slice in &read.slices {
        let mut entries = Vec::new();
        for (score, member) in books.slice(slice, clock) {
            let mut given = Vec::with_capacity(slice.give.len());
            for prefix in &slice.give {
                given.push(budget.give(records, &prefix.join(&member), clock)?);
            }
            entries.push(Entry { member, score, records: given });
        }
        out.slices.push(entries);
    }
    out.counts = read.counts.iter().map(|(index, span)| books.count(index, *span, clock)).collect();
    out.members = read.members.iter().map(|(index, member)| -> Option<Place> { books.place(index, member) }).collect();
    Ok(out)
}

/// Applies a commit's transactions in order. On an error of the records the commit is half applied
/// in memory: the store must then throw its memory away.
pub fn apply<R: Records>(
    books: &mut Books,
    records: &mut R,
    clock: Clock,
    commit: &Commit,
    effects: &mut Effects,
) -> Result<Vec<Answer>, R::Error> {
    let mut answers = Vec::with_capacity(commit.txns.len());
    let mut run = Run { books, records, clock, effects };
    for txn in &commit.txns {
        answers.push(run.txn(txn)?);
    }
    Ok(answers)
}

struct Run<'a, R: Records> {
    books: &'a mut Books,
    records: &'a mut R,
    clock: Clock,
    effects: &'a mut Effects,
}

impl<R: Records> Run<'_, R> {
    fn txn(&mut self, txn: &Arc<Txn>) -> Result<Answer, R::Error> {
        if self.clock > txn.valid_until {
            return Ok(Answer::TooLate);
        }
        for (i, guard) in txn.guards.iter().enumerate() {
            if !self.holds(guard)? {
                return Ok(Answer::Refused(i));
            }
        }
        let taken = match &txn.take {
            None => Vec::new(),
            Some(take) => match self.choose(take)? {
                taken if taken.is_empty() => return Ok(Answer::Empty),
                taken => taken,
            },
        };
        // Scores "before this transaction" are looked up before anything is written.
        let before: Vec<Option<Score>> = txn
            .writes
            .iter()
            .map(|w| match w {
                Write::Add { member, score: ScoreAt::Of(index), .. } => self.books.score(index, member),
                _ => None,
            })
            .collect();
        if let Some(take) = &txn.take {
            self.each(take, &taken)?;
        }
        let members = || -> Vec<TakenMember> {
            taken.iter().map(|t| TakenMember { source: t.source, member: t.member.clone(), score: t.score }).collect()
        };
        for (write, before) in txn.writes.iter().zip(before) {
            match write {
                Write::Put { key, version, value, expiry } => {
                    let bytes = match value {
                        Value::Bytes(bytes) => bytes.clone(),
                        Value::Taken => encode_taken(&members()),
                    };
                    self.put(key, *version, bytes, *expiry)?;
                }
                Write::Delete(key) => self.set(key, None)?,
                Write::Expire(key, expiry) => {
                    if self.head(key)?.is_some()
                        && let Some((old, new)) = self.records.expire(key, self.expiry(*expiry))?
                    {
                        self.effects.changes.push(Change::Record { key: key.clone(), old: Some(old), new: Some(new) });
                    }
                }
                Write::Add { index, member, score, raise } => {
                    let mut score = self.score(score, before);
                    if *raise && let Some(now) = self.books.score(index, member) {
                        score = score.max(now);
                    }
                    self.member(index, member, Some(score));
                }
                Write::Remove { index, member } => self.member(index, member, None),
                Write::Append { log, bytes } => {
                    let item = LogItem { bytes: bytes.clone(), taken: members() };
                    self.effects.appends.entry(log.clone()).or_default().push(item);
                }
                Write::Notify(topic) => {
                    if !self.effects.topics.contains(topic) {
                        self.effects.topics.push(topic.clone());
                    }
                }
            }
        }
        Ok(Answer::Applied { taken })
    }

    fn head(&self, key: &Name) -> Result<Option<Head>, R::Error> {
        Ok(self.records.head(key)?.filter(|h| h.is_unexpired(self.clock)))
    }

    fn holds(&self, guard: &Guard) -> Result<bool, R::Error> {
        Ok(match guard {
            Guard::Absent(key) => self.head(key)?.is_none(),
            Guard::At(key, version) => self.head(key)?.is_some_and(|h| h.version == *version),
            Guard::Member(index, member, standing) => match standing {
                Standing::Out => self.books.score(index, member).is_none(),
                Standing::First => self.books.get(index).and_then(|i| i.first()).is_some_and(|k| k.1 == *member),
                Standing::Live => self.books.score(index, member).is_some_and(|s| s > self.clock),
                Standing::Due => self.books.score(index, member).is_some_and(|s| s <= self.clock),
            },
            Guard::Below(index, span, n) => self.books.count(index, *span, self.clock) < *n,
        })
    }

    /// The first `n` members over the sources, with the records asked for.
    fn choose(&self, take: &Take) -> Result<Vec<Taken>, R::Error> {
        let mut budget = Budget::new(take.max_bytes);
        let mut taken: Vec<Taken> = Vec::new();
        for (at, source) in take.from.iter().enumerate() {
            let left = take.n.saturating_sub(taken.len());
            if left == 0 {
                break;
            }
            let up_to = if source.due { super::port::UpTo::Clock } else { super::port::UpTo::End };
            let Some(index) = self.books.get(&source.index) else { continue };
            for (score, member) in index.slice(None, up_to, self.clock, left) {
                let mut records = Vec::with_capacity(take.give.len());
                for prefix in &take.give {
                    records.push(budget.give(&*self.records, &prefix.join(&member), self.clock)?);
                }
                taken.push(Taken { source: at as u32, member, score, records });
            }
        }
        Ok(taken)
    }

    fn each(&mut self, take: &Take, taken: &[Taken]) -> Result<(), R::Error> {
        // Scores "before this transaction", also for a member that stands in two sources.
        let before: Vec<Vec<Option<Score>>> = taken
            .iter()
            .map(|t| {
                let each = take.from.get(t.source as usize).map_or(&[][..], |s| &s.each);
                each.iter()
                    .map(|e| match e {
                        Each::Add { score: ScoreAt::Of(index), .. } => self.books.score(index, &t.member),
                        _ => None,
                    })
                    .collect()
            })
            .collect();
        for (t, before) in taken.iter().zip(before) {
            let Some(source) = take.from.get(t.source as usize) else { continue };
            self.member(&source.index, &t.member, None);
            for (each, before) in source.each.iter().zip(before) {
                match each {
                    Each::Add { index, score } => {
                        let score = self.score(score, before);
                        self.member(index, &t.member, Some(score));
                    }
                    Each::Remove { index } => self.member(index, &t.member, None),
                    Each::Put { prefix, version, bytes, expiry } => {
                        self.put(&prefix.join(&t.member), *version, bytes.clone(), *expiry)?;
                    }
                    Each::Delete { prefix } => self.set(&prefix.join(&t.member), None)?,
                }
            }
        }
        Ok(())
    }

    fn score(&self, score: &ScoreAt, before: Option<Score>) -> Score {
        match score {
            ScoreAt::Number(n) => (*n).min(SCORE_MAX),
            ScoreAt::Clock(d) => plus(self.clock, *d),
            ScoreAt::Of(_) => before.unwrap_or(self.clock),
        }
    }

    fn expiry(&self, expiry: Expiry) -> Option<Clock> {
        match expiry {
            Expiry::Never => None,
            Expiry::At(n) => Some(n.min(SCORE_MAX)),
            Expiry::Clock(d) => Some(plus(self.clock, d)),
        }
    }

    fn put(&mut self, key: &Name, version: Version, bytes: Bytes, expiry: Expiry) -> Result<(), R::Error> {
        let record = Stored { version, at: self.clock, expiry: self.expiry(expiry), bytes };
        self.set(key, Some(record))
    }

    fn set(&mut self, key: &Name, new: Option<Stored>) -> Result<(), R::Error> {
        let old = self.records.set(key, new.clone())?;
        if old.is_some() || new.is_some() {
            self.effects.changes.push(Change::Record { key: key.clone(), old, new });
        }
        Ok(())
    }

    fn member(&mut self, index: &Name, member: &Name, new: Option<Score>) {
        let old = self.books.set(index, member, new);
        if old != new {
            self.effects.changes.push(Change::Member { index: index.clone(), member: member.clone(), old, new });
        }
    }
}
