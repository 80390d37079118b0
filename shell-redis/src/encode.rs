//! Questions as the scripts want them. `read.lua` and `commit.lua` say what each place means.

use std::collections::HashMap;
use std::hash::Hash;

use leasehold_core::Name;
use leasehold_core::store::{
    Commit, Each, Expiry, Guard, Read, SCORE_MAX, ScoreAt, Span, Standing, Take, Txn, UpTo, Value, Version, Write,
    encode_taken,
};

use crate::layout::Layout;
use crate::msgpack::Packer;
use crate::wave::{self, Wave};

/// More than a script could give or take; keeps arithmetic on positions exact.
const LIMIT: usize = 1 << 31;

pub(crate) fn read(layout: &Layout, read: &Read) -> Vec<u8> {
    let (record, index) = (layout.record(), layout.index());
    let mut p = Packer::default();
    p.array(7);
    p.array(read.records.len());
    read.records.iter().for_each(|key| p.raw_parts(&[&record, key]));
    p.array(read.slices.len());
    for slice in &read.slices {
        p.array(6);
        p.raw_parts(&[&index, &slice.index]);
        match &slice.after {
            Some((score, member)) => {
                p.raw((*score).min(SCORE_MAX + 1).to_string().as_bytes());
                p.raw(member);
            }
            None => {
                p.bool(false);
                p.raw(b"");
            }
        }
        match slice.up_to {
            UpTo::End => p.bool(false),
            UpTo::Score(score) => p.raw(score.min(SCORE_MAX).to_string().as_bytes()),
            UpTo::Clock => p.bool(true),
        }
        p.number(slice.limit.min(LIMIT) as u64);
        p.array(slice.give.len());
        slice.give.iter().for_each(|prefix| p.raw_parts(&[&record, prefix]));
    }
    p.array(2 * read.counts.len());
    for (name, span) in &read.counts {
        p.raw_parts(&[&index, name]);
        p.bool(*span == Span::Live);
    }
    p.array(2 * read.members.len());
    for (name, member) in &read.members {
        p.raw_parts(&[&index, name]);
        p.raw(member);
    }
    match &read.log {
        // Nothing comes after the last number, nor is anything asked for.
        Some(log) if log.limit > 0 && log.after < u64::MAX => {
            p.array(3);
            p.raw_parts(&[&layout.log(), &log.log]);
            p.raw(format!("(0-{}", log.after).as_bytes());
            p.number(log.limit.min(LIMIT) as u64);
        }
        _ => p.bool(false),
    }
    match &read.scan {
        Some(scan) => {
            p.array(2);
            p.raw(scan.cursor.as_deref().unwrap_or(b"0"));
            p.number(scan.limit.clamp(1, LIMIT) as u64);
        }
        None => p.bool(false),
    }
    p.number((read.max_bytes as u64).min(SCORE_MAX));
    p.0
}

/// Things that are named once in the question and by number afterwards.
struct Names<K> {
    numbers: HashMap<K, usize>,
    list: Vec<K>,
}

impl<K: Copy + Eq + Hash> Names<K> {
    fn new() -> Self {
        Names { numbers: HashMap::new(), list: Vec::new() }
    }

    /// Lua counts from 1.
    fn number(&mut self, name: K) -> u64 {
        let list = &mut self.list;
        let number = self.numbers.entry(name).or_insert_with(|| {
            list.push(name);
            list.len()
        });
        *number as u64
    }
}

/// A list of one kind, with the transaction of the wave that each entry belongs to.
struct Column<T> {
    entries: Vec<T>,
    own: Vec<u64>,
}

impl<T> Default for Column<T> {
    fn default() -> Self {
        Column { entries: Vec::new(), own: Vec::new() }
    }
}

impl<T> Column<T> {
    fn push(&mut self, entry: T, own: u64) {
        self.entries.push(entry);
        self.own.push(own);
    }

    fn pack(&self, p: &mut Packer, width: usize, mut entry: impl FnMut(&mut Packer, &T)) {
        p.array(width * self.entries.len());
        self.entries.iter().for_each(|e| entry(p, e));
        p.numbers(self.own.iter().copied());
    }
}

/// Columns of one kind by what they are for: an index, an expiry.
struct Columns<K, T> {
    numbers: HashMap<K, usize>,
    list: Vec<(K, Column<T>)>,
}

impl<K: Copy + Eq + Hash, T> Columns<K, T> {
    fn new() -> Self {
        Columns { numbers: HashMap::new(), list: Vec::new() }
    }

    fn of(&mut self, key: K) -> &mut Column<T> {
        let list = &mut self.list;
        let at = *self.numbers.entry(key).or_insert_with(|| {
            list.push((key, Column::default()));
            list.len() - 1
        });
        &mut self.list[at].1
    }
}

/// What the whole commit names.
struct Commons<'a> {
    layout: Prefixes,
    sets: Names<&'a [u8]>,
    logs: Names<&'a [u8]>,
    topics: Names<&'a [u8]>,
    expiries: Names<(u64, u64)>,
    scores: Names<(u64, u64)>,
}

struct Prefixes {
    record: Vec<u8>,
    index: Vec<u8>,
    log: Vec<u8>,
}

impl<'a> Commons<'a> {
    fn expiry(&mut self, expiry: Expiry) -> u64 {
        self.expiries.number(match expiry {
            Expiry::At(n) => (0, n.min(SCORE_MAX)),
            Expiry::Clock(d) => (1, d.min(SCORE_MAX)),
            Expiry::Never => (2, 0),
        })
    }

    /// `None` for a score that is looked up.
    fn score(&mut self, score: &ScoreAt) -> Option<u64> {
        Some(self.scores.number(match score {
            ScoreAt::Number(n) => (0, (*n).min(SCORE_MAX)),
            ScoreAt::Clock(d) => (1, (*d).min(SCORE_MAX)),
            ScoreAt::Of(_) => return None,
        }))
    }
}

/// A commit for its script. `keep` is how many entries a log keeps, about.
pub(crate) fn commit(layout: &Layout, commit: &Commit, keep: u64) -> Vec<u8> {
    let mut c = Commons {
        layout: Prefixes { record: layout.record(), index: layout.index(), log: layout.log() },
        sets: Names::new(),
        logs: Names::new(),
        topics: Names::new(),
        expiries: Names::new(),
        scores: Names::new(),
    };
    let waves = wave::deal(&commit.txns);
    let mut body = Packer::default();
    body.array(waves.len());
    for wave in &waves {
        match wave {
            Wave::Together(of) => together(&mut body, &mut c, commit, of),
            Wave::Alone(at) => {
                if let Some(txn) = commit.txns.get(*at) {
                    alone(&mut body, &mut c, txn, *at);
                }
            }
        }
    }
    let mut p = Packer(Vec::with_capacity(body.0.len() + 1_024));
    p.array(8);
    p.array(c.sets.list.len());
    c.sets.list.iter().for_each(|name| p.raw_parts(&[&c.layout.index, name]));
    for list in [&c.expiries.list, &c.scores.list] {
        p.array(2 * list.len());
        for (kind, n) in list {
            p.number(*kind);
            p.number(*n);
        }
    }
    p.array(c.logs.list.len());
    c.logs.list.iter().for_each(|name| p.raw_parts(&[&c.layout.log, name]));
    p.array(c.topics.list.len());
    c.topics.list.iter().for_each(|name| p.raw(name));
    p.0.extend_from_slice(&body.0);
    p.number(keep);
    p.number(commit.txns.len() as u64);
    p.0
}

/// The places 1 to 8 of a wave: positions, times, guards.
fn guards<'a>(p: &mut Packer, c: &mut Commons<'a>, txns: &[(usize, &'a Txn)]) {
    p.array(12);
    p.numbers(txns.iter().map(|(at, _)| *at as u64 + 1));
    let until = |t: &Txn| t.valid_until.min(SCORE_MAX + 1);
    p.numbers(txns.iter().map(|(_, t)| until(t)));
    p.number(txns.iter().map(|(_, t)| until(t)).min().unwrap_or(SCORE_MAX + 1));
    let mut keys: Vec<(&Name, Option<Version>)> = Vec::new();
    let (mut own, mut places) = (Vec::new(), Vec::new());
    let mut others: Vec<(u64, u64, &Guard)> = Vec::new();
    for (number, (_, txn)) in (1u64..).zip(txns) {
        for (place, guard) in (1u64..).zip(&txn.guards) {
            let (key, version) = match guard {
                Guard::Absent(key) => (key, None),
                Guard::At(key, version) => (key, Some(*version)),
                _ => {
                    others.push((number, place, guard));
                    continue;
                }
            };
            keys.push((key, version));
            own.push(number);
            places.push(place);
        }
    }
    p.array(keys.len());
    keys.iter().for_each(|(key, _)| p.raw_parts(&[&c.layout.record, key]));
    p.array(keys.len());
    for (_, version) in &keys {
        match version {
            Some(version) => p.raw(&version.0.to_be_bytes()),
            None => p.bool(false),
        }
    }
    p.numbers(own.into_iter());
    p.numbers(places.into_iter());
    p.array(others.len());
    for (number, place, guard) in others {
        p.array(5);
        p.number(number);
        p.number(place);
        match guard {
            Guard::Member(index, member, standing) => {
                p.number(match standing {
                    Standing::Out => 1,
                    Standing::First => 2,
                    Standing::Live => 3,
                    Standing::Due => 4,
                });
                p.number(c.sets.number(index));
                p.raw(member);
            }
            Guard::Below(index, span, n) => {
                p.number(if *span == Span::All { 5 } else { 6 });
                p.number(c.sets.number(index));
                p.number((*n).min(SCORE_MAX));
            }
            // Sorted out above.
            Guard::Absent(_) | Guard::At(..) => p.array(0),
        }
    }
}

fn bytes_of(value: &Value) -> bytes::Bytes {
    match value {
        Value::Bytes(bytes) => bytes.clone(),
        // Without a take.
        Value::Taken => encode_taken(&[]),
    }
}

/// An item of a log entry up to what was taken.
fn framed(bytes: &[u8]) -> [u8; 4] {
    (bytes.len() as u32).to_be_bytes()
}

fn together<'a>(p: &mut Packer, c: &mut Commons<'a>, commit: &'a Commit, of: &[usize]) {
    let txns: Vec<(usize, &Txn)> = of.iter().filter_map(|at| Some((*at, &**commit.txns.get(*at)?))).collect();
    guards(p, c, &txns);
    p.bool(false);
    p.bool(false);
    let mut puts: Columns<u64, (&Name, Version, bytes::Bytes)> = Columns::new();
    let mut dels: Column<&Name> = Column::default();
    let mut expires: Column<(&Name, u64)> = Column::default();
    let mut adds: Columns<(u64, bool), (u64, &Name)> = Columns::new();
    let mut removes: Columns<u64, &Name> = Columns::new();
    let mut appends: Columns<u64, &bytes::Bytes> = Columns::new();
    let mut tells: Columns<u64, ()> = Columns::new();
    let mut looked_up: Vec<(u64, u64, &Name, u64, bool)> = Vec::new();
    for (own, (_, txn)) in (1u64..).zip(&txns) {
        for write in &txn.writes {
            match write {
                Write::Put { key, version, value, expiry } => {
                    puts.of(c.expiry(*expiry)).push((key, *version, bytes_of(value)), own);
                }
                Write::Delete(key) => dels.push(key, own),
                Write::Expire(key, expiry) => expires.push((key, c.expiry(*expiry)), own),
                Write::Add { index, member, score, raise } => {
                    let set = c.sets.number(index);
                    match (score, c.score(score)) {
                        (ScoreAt::Of(source), _) => {
                            looked_up.push((own, set, member, c.sets.number(source), *raise));
                        }
                        (_, Some(score)) => adds.of((set, *raise)).push((score, member), own),
                        (_, None) => {}
                    }
                }
                Write::Remove { index, member } => removes.of(c.sets.number(index)).push(member, own),
                Write::Append { log, bytes } => appends.of(c.logs.number(log)).push(bytes, own),
                Write::Notify(topic) => tells.of(c.topics.number(topic)).push((), own),
            }
        }
    }
    let record = &c.layout.record;
    p.array(8);
    p.array(puts.list.len());
    for (expiry, column) in &puts.list {
        p.array(3);
        p.number(*expiry);
        column.pack(p, 2, |p, (key, version, bytes)| {
            p.raw_parts(&[record, key]);
            p.raw_parts(&[&version.0.to_be_bytes(), bytes]);
        });
    }
    p.array(2);
    dels.pack(p, 1, |p, key| p.raw_parts(&[record, key]));
    p.array(2);
    expires.pack(p, 2, |p, (key, expiry)| {
        p.raw_parts(&[record, key]);
        p.number(*expiry);
    });
    p.array(adds.list.len());
    for ((set, raise), column) in &adds.list {
        p.array(4);
        p.number(*set);
        p.bool(*raise);
        column.pack(p, 2, |p, (score, member)| {
            p.number(*score);
            p.raw(member);
        });
    }
    p.array(removes.list.len());
    for (set, column) in &removes.list {
        p.array(3);
        p.number(*set);
        column.pack(p, 1, |p, member| p.raw(member));
    }
    p.array(appends.list.len());
    for (log, column) in &appends.list {
        p.array(3);
        p.number(*log);
        column.pack(p, 1, |p, bytes| p.raw_parts(&[&framed(bytes), bytes, &[0; 4]]));
    }
    p.array(tells.list.len());
    for (topic, column) in &tells.list {
        p.array(2);
        p.number(*topic);
        p.numbers(column.own.iter().copied());
    }
    p.array(looked_up.len());
    for (own, set, member, source, raise) in looked_up {
        p.array(5);
        p.number(own);
        p.number(set);
        p.raw(member);
        p.number(source);
        p.bool(raise);
    }
    p.bool(false);
}

fn alone<'a>(p: &mut Packer, c: &mut Commons<'a>, txn: &'a Txn, at: usize) {
    guards(p, c, &[(at, txn)]);
    let mut body = Packer::default();
    let (mut sets, mut logs) = (Vec::new(), Vec::new());
    match &txn.take {
        Some(found) => take(&mut body, c, found, &mut sets),
        None => body.bool(false),
    }
    body.array(txn.writes.len());
    for write in &txn.writes {
        alone_write(&mut body, c, write, txn.take.is_some(), &mut sets, &mut logs);
    }
    p.numbers(sets.into_iter());
    p.numbers(logs.into_iter());
    p.0.extend_from_slice(&body.0);
}

fn alone_write<'a>(
    p: &mut Packer,
    c: &mut Commons<'a>,
    write: &'a Write,
    takes: bool,
    sets: &mut Vec<u64>,
    logs: &mut Vec<u64>,
) {
    match write {
        Write::Put { key, version, value, expiry } => {
            let expiry = c.expiry(*expiry);
            p.array(4);
            let taken = takes && *value == Value::Taken;
            p.number(if taken { 2 } else { 1 });
            p.raw_parts(&[&c.layout.record, key]);
            p.number(expiry);
            let bytes = if taken { bytes::Bytes::new() } else { bytes_of(value) };
            p.raw_parts(&[&version.0.to_be_bytes(), &bytes]);
        }
        Write::Delete(key) => {
            p.array(2);
            p.number(3);
            p.raw_parts(&[&c.layout.record, key]);
        }
        Write::Expire(key, expiry) => {
            let expiry = c.expiry(*expiry);
            p.array(3);
            p.number(4);
            p.raw_parts(&[&c.layout.record, key]);
            p.number(expiry);
        }
        Write::Add { index, member, score, raise } => {
            let set = c.sets.number(index);
            sets.push(set);
            match (score, c.score(score)) {
                (ScoreAt::Of(source), _) => {
                    let source = c.sets.number(source);
                    sets.push(source);
                    p.array(5);
                    p.number(7);
                    p.number(set);
                    p.raw(member);
                    p.number(source);
                    p.bool(*raise);
                }
                (_, score) => {
                    p.array(4);
                    p.number(if *raise { 6 } else { 5 });
                    p.number(set);
                    p.raw(member);
                    p.number(score.unwrap_or_default());
                }
            }
        }
        Write::Remove { index, member } => {
            let set = c.sets.number(index);
            sets.push(set);
            p.array(3);
            p.number(8);
            p.number(set);
            p.raw(member);
        }
        Write::Append { log, bytes } => {
            let log = c.logs.number(log);
            logs.push(log);
            p.array(3);
            p.number(9);
            p.number(log);
            p.raw_parts(&[&framed(bytes), bytes]);
        }
        Write::Notify(topic) => {
            p.array(2);
            p.number(10);
            p.number(c.topics.number(topic));
        }
    }
}

fn take<'a>(p: &mut Packer, c: &mut Commons<'a>, take: &'a Take, sets: &mut Vec<u64>) {
    p.array(5);
    p.number(take.n.min(LIMIT) as u64);
    p.array(take.from.len());
    let mut prefixes: Vec<&Name> = Vec::new();
    for source in &take.from {
        let set = c.sets.number(&source.index);
        sets.push(set);
        p.array(3);
        p.number(set);
        p.bool(source.due);
        p.array(source.each.len());
        for each in &source.each {
            match each {
                Each::Add { index, score } => {
                    let set = c.sets.number(index);
                    sets.push(set);
                    let number = c.score(score);
                    p.array(3);
                    p.number(if number.is_some() { 1 } else { 2 });
                    p.number(set);
                    match score {
                        ScoreAt::Of(of) => {
                            let of = c.sets.number(of);
                            sets.push(of);
                            p.number(of);
                        }
                        _ => p.number(number.unwrap_or_default()),
                    }
                }
                Each::Remove { index } => {
                    let set = c.sets.number(index);
                    sets.push(set);
                    p.array(2);
                    p.number(3);
                    p.number(set);
                }
                Each::Put { prefix, version, bytes, expiry } => {
                    let expiry = c.expiry(*expiry);
                    prefixes.push(prefix);
                    p.array(4);
                    p.number(4);
                    p.raw_parts(&[&c.layout.record, prefix]);
                    p.number(expiry);
                    p.raw_parts(&[&version.0.to_be_bytes(), bytes]);
                }
                Each::Delete { prefix } => {
                    prefixes.push(prefix);
                    p.array(2);
                    p.number(5);
                    p.raw_parts(&[&c.layout.record, prefix]);
                }
            }
        }
    }
    p.array(take.give.len());
    take.give.iter().for_each(|prefix| p.raw_parts(&[&c.layout.record, prefix]));
    p.number((take.max_bytes as u64).min(SCORE_MAX));
    // One prefix that goes on from another: two members may then make the same key.
    let meet = |a: &Name, b: &Name| a.len() != b.len() && a.starts_with(b);
    p.bool(prefixes.iter().any(|a| prefixes.iter().any(|b| meet(a, b))));
}
