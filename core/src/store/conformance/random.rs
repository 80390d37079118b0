//! Random reads and commits over few names, so that they meet each other. One seed makes one call:
//! a failing list of seeds shrinks by leaving some out.

use alloc::format;
use alloc::sync::Arc;
use alloc::vec::Vec;
use bytes::Bytes;

use super::super::port::{
    Clock, Commit, Each, Expiry, Guard, LogRead, Read, SCORE_MAX, ScoreAt, Slice, Source, Span, Standing, Take, Txn,
    UpTo, Value, Version, Write,
};
use crate::name::Name;

/// Microseconds between two scores that the generator likes.
pub const STEP: u64 = 100;

/// SplitMix64: enough to spread a seed.
#[derive(Clone, Debug)]
pub struct Rng(pub u64);

impl Rng {
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// From 0 to n - 1.
    pub fn below(&mut self, n: u64) -> u64 {
        self.draw() % n.max(1)
    }

    fn many<T>(&mut self, most: u64, mut one: impl FnMut(&mut Rng) -> T) -> Vec<T> {
        (0..self.below(most + 1)).map(|_| one(self)).collect()
    }
}

/// Any bytes may be in a name; some of these begin with others of them.
const INDEXES: [&[u8]; 4] = [b"i0", b"i1", b"\xff{*}\r\n", b"i1\0"];
const MEMBERS: [&[u8]; 7] = [b"m0", b"m1", b"m", b"m1\0", b"\0", b"\xff\xfe", b"\0\0 %s"];
/// Members of [`CROWD`], many with one score.
const CROWDED: u64 = 400;

/// An index with hundreds of members that share few scores.
pub const CROWD: Name = Name::from_static("crowd");

fn one_of(r: &mut Rng, names: &[&[u8]]) -> Name {
    Name::new(names[r.below(names.len() as u64) as usize])
}

pub fn index(r: &mut Rng) -> Name {
    one_of(r, &INDEXES)
}

pub fn member(r: &mut Rng) -> Name {
    one_of(r, &MEMBERS)
}

fn prefix(r: &mut Rng) -> Name {
    Name::from(["k/", "p/", ""][r.below(3) as usize])
}

/// Keys are what a prefix and a member make, so that takes and slices find them.
pub fn key(r: &mut Rng) -> Name {
    prefix(r).join(&member(r))
}

pub fn log(r: &mut Rng) -> Name {
    Name::from(format!("l{}", r.below(2)))
}

fn version(r: &mut Rng) -> Version {
    Version(1 + r.below(4))
}

fn near(r: &mut Rng, clock: Clock) -> Clock {
    match r.below(12) {
        0 => r.below(3),
        1 => SCORE_MAX - r.below(3),
        2 => u64::MAX,
        _ => (clock + r.below(8) * STEP).saturating_sub(4 * STEP),
    }
}

fn ahead(r: &mut Rng) -> u64 {
    match r.below(12) {
        0 => SCORE_MAX - r.below(2),
        _ => r.below(6) * STEP,
    }
}

fn score(r: &mut Rng, clock: Clock) -> ScoreAt {
    match r.below(3) {
        0 => ScoreAt::Number(near(r, clock)),
        1 => ScoreAt::Clock(ahead(r)),
        _ => ScoreAt::Of(index(r)),
    }
}

fn expiry(r: &mut Rng, clock: Clock) -> Expiry {
    match r.below(3) {
        0 => Expiry::Never,
        1 => Expiry::At(near(r, clock)),
        _ => Expiry::Clock(ahead(r)),
    }
}

fn bytes(r: &mut Rng) -> Bytes {
    // Now and then above the size from which a store may keep bytes elsewhere.
    let len = match r.below(12) {
        0 => 0,
        1 => 5_000,
        _ => 1 + r.below(20),
    };
    Bytes::from((0..len).map(|_| r.draw() as u8).collect::<Vec<u8>>())
}

fn guard(r: &mut Rng) -> Guard {
    match r.below(8) {
        0 | 1 => Guard::Absent(key(r)),
        2 | 3 => Guard::At(key(r), version(r)),
        4 => Guard::Below(index(r), if r.below(2) == 0 { Span::All } else { Span::Live }, r.below(5)),
        _ => {
            let standing = [Standing::Out, Standing::First, Standing::Live, Standing::Due][r.below(4) as usize];
            Guard::Member(index(r), member(r), standing)
        }
    }
}

fn write(r: &mut Rng, clock: Clock) -> Write {
    match r.below(12) {
        0..=2 => {
            let value = if r.below(5) == 0 { Value::Taken } else { Value::Bytes(bytes(r)) };
            Write::Put { key: key(r), version: version(r), value, expiry: expiry(r, clock) }
        }
        3 => Write::Delete(key(r)),
        4 => Write::Expire(key(r), expiry(r, clock)),
        5..=8 => Write::Add { index: index(r), member: member(r), score: score(r, clock), raise: r.below(3) == 0 },
        9 => Write::Remove { index: index(r), member: member(r) },
        10 => Write::Append { log: log(r), bytes: bytes(r) },
        _ => Write::Notify(Name::from(format!("t{}", r.below(3)))),
    }
}

fn each(r: &mut Rng, clock: Clock) -> Each {
    match r.below(5) {
        0 | 1 => Each::Add { index: index(r), score: score(r, clock) },
        2 => Each::Remove { index: index(r) },
        3 => Each::Put { prefix: prefix(r), version: version(r), bytes: bytes(r), expiry: expiry(r, clock) },
        _ => Each::Delete { prefix: prefix(r) },
    }
}

fn max_bytes(r: &mut Rng) -> usize {
    if r.below(2) == 0 { crate::limits::READ_BYTES } else { r.below(60) as usize }
}

fn take(r: &mut Rng, clock: Clock) -> Take {
    let mut from: Vec<Source> = Vec::new();
    for _ in 0..=r.below(3) {
        let source = Source { index: index(r), due: r.below(2) == 0, each: r.many(3, |r| each(r, clock)) };
        // Each index is a source once.
        if from.iter().all(|s| s.index != source.index) {
            from.push(source);
        }
    }
    Take { n: r.below(5) as usize, from, give: r.many(2, prefix), max_bytes: max_bytes(r) }
}

fn txn(r: &mut Rng, clock: Clock) -> Txn {
    let valid_until = if r.below(12) == 0 { near(r, clock) } else { SCORE_MAX };
    let guards = if r.below(3) == 0 { r.many(3, guard) } else { Vec::new() };
    let take = (r.below(3) == 0).then(|| take(r, clock));
    Txn { valid_until, guards, take, writes: r.many(6, |r| write(r, clock)) }
}

/// The commit of a seed, for a store that is about at this clock.
pub fn commit(seed: u64, clock: Clock) -> Commit {
    let r = &mut Rng(seed);
    Commit { txns: r.many(4, |r| Arc::new(txn(r, clock))), grows: r.below(2) == 0 }
}

/// The read of a seed. Without a scan, since its order is a store's own.
pub fn read(seed: u64, clock: Clock) -> Read {
    let r = &mut Rng(seed);
    let slice = |r: &mut Rng| Slice {
        index: index(r),
        after: (r.below(3) == 0).then(|| (near(r, clock), member(r))),
        up_to: [UpTo::End, UpTo::Clock, UpTo::Score(near(r, clock))][r.below(3) as usize],
        limit: r.below(6) as usize,
        give: r.many(2, prefix),
    };
    let log = LogRead { log: log(r), after: r.below(10), limit: r.below(6) as usize };
    Read {
        records: r.many(6, key),
        slices: r.many(3, slice),
        counts: r.many(4, |r| (index(r), if r.below(2) == 0 { Span::All } else { Span::Live })),
        members: r.many(4, |r| (index(r), member(r))),
        log: (r.below(3) == 0).then_some(log),
        scan: None,
        max_bytes: max_bytes(r),
    }
}

/// Asks for all there can be: every key, index and log of this generator.
pub fn everything() -> Vec<Read> {
    let members: Vec<Name> = MEMBERS.iter().map(|m| Name::new(m)).collect();
    let indexes: Vec<Name> = INDEXES.iter().map(|i| Name::new(i)).chain([CROWD]).collect();
    let keys = ["k/", "p/", ""].iter().flat_map(|p| members.iter().map(|m| Name::from(*p).join(m)));
    let all = |index: &Name| Slice {
        index: index.clone(),
        after: None,
        up_to: UpTo::End,
        limit: usize::MAX,
        give: Vec::new(),
    };
    let log = |n: u64| Some(LogRead { log: Name::from(format!("l{n}")), after: 0, limit: usize::MAX });
    let spans = [Span::All, Span::Live];
    [
        Read {
            records: keys.collect(),
            slices: indexes.iter().map(all).collect(),
            counts: indexes.iter().flat_map(|i| spans.map(|s| (i.clone(), s))).collect(),
            members: indexes.iter().flat_map(|i| members.iter().map(|m| (i.clone(), m.clone()))).collect(),
            log: log(0),
            ..Read::default()
        },
        Read { log: log(1), ..Read::default() },
    ]
    .into()
}

fn crowded(r: &mut Rng) -> Name {
    // In no order of their numbers, and some with a byte that no text has.
    let n = r.below(CROWDED);
    Name::new(&[&b"c"[..], &(n.wrapping_mul(0x9e37) as u16).to_le_bytes(), b"\x80"].concat())
}

/// Fills and drains [`CROWD`], and writes records large enough for a budget of bytes to matter.
pub fn large_commit(seed: u64, clock: Clock) -> Commit {
    let r = &mut Rng(seed);
    let mut writes: Vec<Write> = Vec::new();
    let score = |r: &mut Rng| match r.below(3) {
        0 => ScoreAt::Number(SCORE_MAX - r.below(2)),
        1 => ScoreAt::Clock(0),
        _ => ScoreAt::Number(clock.saturating_sub(r.below(2) * STEP)),
    };
    let score = score(r);
    for _ in 0..r.below(150) {
        let member = crowded(r);
        writes.push(match r.below(8) {
            0 | 1 => Write::Remove { index: CROWD, member },
            _ => Write::Add { index: CROWD, member, score: score.clone(), raise: r.below(4) == 0 },
        });
    }
    if r.below(3) == 0 {
        let len = [20_000, 300_000, 8_168, 8_169][r.below(4) as usize];
        let value = Value::Bytes(Bytes::from(alloc::vec![r.draw() as u8; len]));
        writes.push(Write::Put { key: key(r), version: version(r), value, expiry: expiry(r, clock) });
    }
    let each = r.many(3, |r| each(r, clock));
    let source = Source { index: CROWD, due: r.below(2) == 0, each };
    let others = Source { index: index(r), due: r.below(2) == 0, each: Vec::new() };
    let n = r.below(60) as usize;
    let take = Take { n, from: [source, others].into(), give: r.many(2, prefix), max_bytes: max_bytes(r) };
    let plain = |take, writes| Arc::new(Txn { valid_until: SCORE_MAX, guards: Vec::new(), take, writes });
    let mut txns: Vec<Arc<Txn>> = writes.chunks(1 + r.below(60) as usize).map(|w| plain(None, w.to_vec())).collect();
    if r.below(3) == 0 {
        txns.push(plain(Some(take), Vec::new()));
    }
    Commit { txns, grows: true }
}

/// Looks into [`CROWD`] between equal scores, and at large records under small budgets.
pub fn large_read(seed: u64, clock: Clock) -> Read {
    let r = &mut Rng(seed);
    let budgets = [0, 100, 20_000, 25_000, 350_000, 8_168, 8_169, 16_336];
    let slice = |r: &mut Rng| Slice {
        index: CROWD,
        after: (r.below(4) != 0).then(|| (near(r, clock), crowded(r))),
        up_to: [UpTo::End, UpTo::Clock, UpTo::Score(near(r, clock))][r.below(3) as usize],
        limit: r.below(500) as usize,
        give: Vec::new(),
    };
    Read {
        records: r.many(20, key),
        slices: r.many(3, slice),
        counts: [(CROWD, Span::All), (CROWD, Span::Live)].into(),
        members: r.many(30, |r| (CROWD, crowded(r))),
        max_bytes: budgets[r.below(8) as usize],
        ..Read::default()
    }
}
