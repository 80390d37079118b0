//! What a read answers: slices, counts, ranks, logs, scans, the budget of bytes (law 8).

use super::*;
use crate::store::port::{LogEntry, LogRead, Scan, Slice, Span, UpTo};
use alloc::collections::BTreeSet;
use alloc::format;

pub(super) const CHECKS: &[Check] = &[
    ("read: answers run parallel to the questions", parallel),
    ("read: the clock never goes back and moves on", clock_moves),
    ("slice: in order of score, then member, at most limit", slice_order),
    ("slice: after is exclusive, also among equal scores", slice_after),
    ("slice: up to a score is inclusive", slice_up_to),
    ("slice: up to the clock gives what is due", slice_due),
    ("slice: gives the records under each prefix, in order", slice_give),
    ("slice: pages of a large index give every member once", slice_pages),
    ("count: all, and those past the clock", counts),
    ("member: rank counts what is before it", ranks),
    ("log: one entry for each commit, in order", log_entries),
    ("log: after is exclusive, limit bounds", log_pages),
    ("log: nothing for what was refused, and logs do not mix", log_refused),
    ("scan: a walk meets every record", scan_all),
    ("scan: a walk meets what stays while others come and go", scan_while_changing),
    ("law 8: records within the budget, the first always, later ones as length", budget),
    ("law 8: the budget goes on from records to slices", budget_slices),
    ("law 8: absent and expired records use no budget", budget_absent),
];

pub(super) fn log(s: &mut dyn TestStore, log: &str, after: u64, limit: usize) -> Vec<LogEntry> {
    let ask = LogRead { log: name(log), after, limit };
    read(s, Read { log: Some(ask), ..Read::default() }).log
}

fn slice(index: &str) -> Slice {
    Slice { index: name(index), after: None, up_to: UpTo::End, limit: 100, give: Vec::new() }
}

fn ask(s: &mut dyn TestStore, slice: Slice) -> Vec<(u64, Name)> {
    let found = read(s, Read { slices: [slice].into(), ..Read::default() }).slices.remove(0);
    found.into_iter().map(|e| (e.score, e.member)).collect()
}

fn names(found: &[(u64, Name)]) -> Vec<&str> {
    found.iter().map(|(_, m)| m.as_str().unwrap_or("?")).collect()
}

fn parallel(s: &mut dyn TestStore) {
    applied(s, txn().put("k", V1, "x").add("i", "a", ScoreAt::Number(1)));
    let ask = Read {
        records: [name("no"), name("k"), name("no")].into(),
        slices: [slice("no"), slice("i")].into(),
        counts: [(name("no"), Span::All), (name("i"), Span::All)].into(),
        members: [(name("no"), name("a")), (name("i"), name("a")), (name("i"), name("no"))].into(),
        ..Read::default()
    };
    let found = read(s, ask);
    assert_eq!(found.records.iter().map(Record::is_absent).collect::<Vec<_>>(), [true, false, true]);
    assert_eq!(found.slices.iter().map(Vec::len).collect::<Vec<_>>(), [0, 1]);
    assert_eq!(found.counts, [0, 1]);
    assert_eq!(found.members, [None, Some(Place { score: 1, rank: 0 }), None]);
    assert!(found.log.is_empty() && found.scan.is_none());
}

fn clock_moves(s: &mut dyn TestStore) {
    let first = clock(s);
    let second = commit(s, [txn()]).clock;
    s.advance(TICK);
    let third = clock(s);
    assert!(first <= second && second + TICK <= third && third <= SCORE_MAX);
}

fn fill(s: &mut dyn TestStore) {
    let all = [("e", 3), ("b", 2), ("a", 3), ("d", 2), ("c", 1), ("f", SCORE_MAX)];
    applied(s, all.iter().fold(txn(), |t, (m, score)| t.add("i", m, ScoreAt::Number(*score))));
}

fn slice_order(s: &mut dyn TestStore) {
    fill(s);
    assert_eq!(names(&ask(s, slice("i"))), ["c", "b", "d", "a", "e", "f"]);
    assert_eq!(names(&ask(s, Slice { limit: 2, ..slice("i") })), ["c", "b"]);
    assert!(ask(s, Slice { limit: 0, ..slice("i") }).is_empty());
}

fn slice_after(s: &mut dyn TestStore) {
    fill(s);
    let after = |score, member: &str| Slice { after: Some((score, name(member))), ..slice("i") };
    assert_eq!(names(&ask(s, after(2, "b"))), ["d", "a", "e", "f"]);
    assert_eq!(names(&ask(s, after(2, ""))), ["b", "d", "a", "e", "f"], "it need not be there");
    assert_eq!(names(&ask(s, after(2, "z"))), ["a", "e", "f"]);
    assert_eq!(names(&ask(s, Slice { limit: 1, ..after(2, "b") })), ["d"]);
    assert!(ask(s, after(SCORE_MAX, "f")).is_empty());
}

fn slice_up_to(s: &mut dyn TestStore) {
    fill(s);
    let up_to = |score| Slice { up_to: UpTo::Score(score), ..slice("i") };
    assert_eq!(names(&ask(s, up_to(2))), ["c", "b", "d"]);
    assert!(ask(s, up_to(0)).is_empty());
    assert_eq!(ask(s, up_to(SCORE_MAX - 1)).len(), 5);
    assert_eq!(names(&ask(s, Slice { after: Some((2, name("b"))), ..up_to(2) })), ["d"]);
    assert!(ask(s, Slice { after: Some((3, name("a"))), ..up_to(2) }).is_empty());
}

fn slice_due(s: &mut dyn TestStore) {
    let far = 50 * TICK;
    let t = txn().add("i", "past", ScoreAt::Number(1)).add("i", "now", ScoreAt::Clock(0));
    applied(s, t.add("i", "later", ScoreAt::Clock(far)));
    let due = || Slice { up_to: UpTo::Clock, ..slice("i") };
    assert_eq!(names(&ask(s, due())), ["past", "now"]);
    s.advance(far);
    assert_eq!(names(&ask(s, due())), ["past", "now", "later"]);
}

fn slice_give(s: &mut dyn TestStore) {
    applied(s, txn().add("i", "a", ScoreAt::Number(1)).add("i", "b", ScoreAt::Number(2)));
    applied(s, txn().put("job/a", V1, "A").put("lease/b", V1, "LB"));
    let give = [name("job/"), name("lease/")].into();
    let found = read(s, Read { slices: [Slice { give, ..slice("i") }].into(), ..Read::default() });
    let shape: Vec<Vec<Option<&[u8]>>> =
        found.slices[0].iter().map(|e| e.records.iter().map(|r| r.bytes().map(|b| &b[..])).collect()).collect();
    assert_eq!(shape, [[Some(&b"A"[..]), None], [None, Some(&b"LB"[..])]]);
}

fn slice_pages(s: &mut dyn TestStore) {
    let all: Vec<T> =
        (0..1_500u64).map(|n| txn().add("i", &format!("m{:04}", n * 7 % 1_500), ScoreAt::Number(n % 10))).collect();
    commit(s, all);
    let mut seen = Vec::new();
    let mut after = None;
    loop {
        let page = ask(s, Slice { after: after.clone(), limit: 97, ..slice("i") });
        after = page.last().cloned();
        seen.extend(page);
        if after.is_none() {
            break;
        }
    }
    assert_eq!(seen.len(), 1_500);
    assert!(seen.windows(2).all(|w| w[0] < w[1]));
    for (rank, (score, member)) in seen.iter().enumerate().step_by(113) {
        let expect = Some(Place { score: *score, rank: rank as u64 });
        assert_eq!(place(s, "i", member.as_str().unwrap_or_default()), expect);
    }
}

fn counts(s: &mut dyn TestStore) {
    let far = 50 * TICK;
    let t = txn().add("i", "past", ScoreAt::Number(1)).add("i", "now", ScoreAt::Clock(0));
    applied(s, t.add("i", "later", ScoreAt::Clock(far)).add("i", "never", ScoreAt::Number(SCORE_MAX)));
    let both = |s: &mut dyn TestStore| {
        let counts = [(name("i"), Span::All), (name("i"), Span::Live)].into();
        read(s, Read { counts, ..Read::default() }).counts
    };
    assert_eq!(both(s), [4, 2]);
    s.advance(far);
    assert_eq!(both(s), [4, 1]);
}

fn ranks(s: &mut dyn TestStore) {
    fill(s);
    for (rank, member) in ["c", "b", "d", "a", "e", "f"].into_iter().enumerate() {
        assert_eq!(place(s, "i", member).map(|p| p.rank), Some(rank as u64));
    }
    applied(s, txn().remove("i", "b"));
    assert_eq!(place(s, "i", "a").map(|p| p.rank), Some(2));
}

fn log_entries(s: &mut dyn TestStore) {
    let first = commit(s, [txn().append("l", "a").append("l", "b"), txn().append("l", "c")]).clock;
    s.advance(TICK);
    let second = commit(s, [txn().append("l", "d")]).clock;
    let log = log(s, "l", 0, 9);
    let shape: Vec<(u64, Vec<&[u8]>)> =
        log.iter().map(|e| (e.at, e.items.iter().map(|i| &i.bytes[..]).collect())).collect();
    assert_eq!(shape, [(first, [&b"a"[..], b"b", b"c"].to_vec()), (second, [&b"d"[..]].to_vec())]);
    assert!(log[0].seq >= 1 && log[1].seq > log[0].seq);
}

fn log_pages(s: &mut dyn TestStore) {
    for n in 0..10 {
        applied(s, txn().append("l", &format!("{n}")));
    }
    let all = log(s, "l", 0, 99);
    assert_eq!(all.len(), 10);
    assert_eq!(log(s, "l", 0, 3), all[..3]);
    assert_eq!(log(s, "l", all[2].seq, 4), all[3..7]);
    assert!(log(s, "l", all[9].seq, 4).is_empty() && log(s, "l", 0, 0).is_empty());
}

fn log_refused(s: &mut dyn TestStore) {
    let refused = txn().guard(Guard::At(name("k"), V1)).append("l", "never");
    commit(s, [refused.clone(), txn().append("m", "m")]);
    commit(s, [refused]);
    assert!(log(s, "l", 0, 9).is_empty() && log(s, "none", 0, 9).is_empty());
    assert_eq!(log(s, "m", 0, 9).len(), 1);
}

fn walk(s: &mut dyn TestStore, mut between: impl FnMut(&mut dyn TestStore, usize)) -> BTreeSet<Name> {
    let mut seen = BTreeSet::new();
    let mut cursor = None;
    for page in 0..10_000 {
        let scan = Some(Scan { cursor, limit: 10 });
        let found = read(s, Read { scan, ..Read::default() }).scan.expect("a page");
        seen.extend(found.keys);
        cursor = found.cursor;
        if cursor.is_none() {
            return seen;
        }
        between(s, page);
    }
    assert!(cursor.is_none(), "a walk ends");
    seen
}

fn scan_all(s: &mut dyn TestStore) {
    assert!(walk(s, |_, _| ()).is_empty());
    for count in [1, 9, 10, 11, 137] {
        applied(s, (0..count).fold(txn(), |t, n| t.put(&format!("k{n}"), V1, "x")));
        let seen = walk(s, |_, _| ());
        assert!((0..count).all(|n| seen.contains(&name(&format!("k{n}")))), "{count} records");
        assert_eq!(seen.len(), count);
    }
}

fn scan_while_changing(s: &mut dyn TestStore) {
    let t = (0..80).fold(txn(), |t, n| t.put(&format!("stay{n:02}"), V1, "x").put(&format!("go{n:02}"), V1, "x"));
    applied(s, t);
    let seen = walk(s, |s, page| {
        let t = (0..5).fold(txn(), |t, n| t.put(&format!("new{page}-{n}"), V1, "x"));
        let t = (0..8).fold(t, |t, n| t.write(Write::Delete(name(&format!("go{:02}", (page * 8 + n) % 80)))));
        if page < 40 {
            applied(s, t.put(&format!("stay{:02}", page % 80), V2, "changed"));
        }
    });
    assert!((0..80).all(|n| seen.contains(&name(&format!("stay{n:02}")))));
}

/// Which records came whole (`Some(true)`), as their length, or not at all.
fn whole(records: &[Record]) -> Vec<Option<bool>> {
    records
        .iter()
        .map(|r| match r {
            Record::Absent => None,
            Record::Present { bytes, .. } => Some(bytes.is_some()),
        })
        .collect()
}

fn budget(s: &mut dyn TestStore) {
    applied(s, txn().put("five", V1, "01234").put("ten", V1, "0123456789").put("one", V1, "0"));
    let ask = |s: &mut dyn TestStore, keys: &[&str], max_bytes| {
        let records = keys.iter().map(|k| name(k)).collect();
        whole(&read(s, Read { records, max_bytes, ..Read::default() }).records)
    };
    assert_eq!(ask(s, &["ten", "five", "one"], 0), [Some(true), Some(false), Some(false)]);
    assert_eq!(ask(s, &["five", "five", "one"], 10), [Some(true), Some(true), Some(false)]);
    assert_eq!(ask(s, &["five", "ten", "one"], 10), [Some(true), Some(false), Some(false)]);
    assert_eq!(ask(s, &["five", "ten", "one"], 16), [Some(true), Some(true), Some(true)]);
    let len = match read(s, Read { records: [name("one"), name("ten")].into(), max_bytes: 1, ..Read::default() })
        .records
        .remove(1)
    {
        Record::Present { len, bytes: None, version: V1, .. } => len,
        _ => 0,
    };
    assert_eq!(len, 10);
}

fn budget_slices(s: &mut dyn TestStore) {
    applied(s, txn().put("k/a", V1, "01234").put("k/b", V1, "01234").add("i", "a", ScoreAt::Number(1)));
    applied(s, txn().add("i", "b", ScoreAt::Number(2)));
    let give: Vec<Name> = [name("k/")].into();
    let ask = Read {
        records: [name("k/a")].into(),
        slices: [Slice { give: give.clone(), ..slice("i") }, Slice { give, ..slice("i") }].into(),
        max_bytes: 12,
        ..Read::default()
    };
    let found = read(s, ask);
    let all: Vec<Record> =
        found.records.into_iter().chain(found.slices.into_iter().flatten().flat_map(|e| e.records)).collect();
    assert_eq!(whole(&all), [Some(true), Some(true), Some(false), Some(false), Some(false)]);
}

fn budget_absent(s: &mut dyn TestStore) {
    applied(s, txn().put_until("old", V1, "0123456789", Expiry::Clock(TICK)).put("five", V1, "01234"));
    s.advance(TICK);
    let records = [name("none"), name("old"), name("five"), name("five")].into();
    let found = read(s, Read { records, max_bytes: 2, ..Read::default() }).records;
    assert_eq!(whole(&found), [None, None, Some(true), Some(false)]);
}
