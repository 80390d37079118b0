//! The take: what it picks, what it does to each, and what it refuses.

use super::*;
use crate::store::port::{LogItem, TakenMember, decode_taken};

pub(super) const CHECKS: &[Check] = &[
    ("take: the first n in order of score, then member; they leave their source", in_order),
    ("take: sources in their order, each used up before the next", sources),
    ("take: due takes only scores at or before the clock", due),
    ("take: nothing found refuses the transaction", empty),
    ("take: guards are looked at before it", guarded),
    ("take: each adds by number, clock, and the score it had", each_add),
    ("take: each removes, puts and deletes under the member's name", each_records),
    ("take: each belongs to its own source only", each_of_source),
    ("take: each of another index is the score there before", each_of_other),
    ("take: back into its own source with a new score", back),
    ("take: gives records as they were before the transaction", give),
    ("take: expired and absent records are given as absent", give_absent),
    ("take: what was taken can be the bytes of a put", taken_value),
    ("take: what was taken is attached to the log", in_log),
    ("take: ordinary writes act after it", writes_after),
    ("take: two in one commit take different members", two_takes),
    ("take: of nothing (n = 0) is empty", none),
    ("law 8: the first record is given whole, later ones within the budget", budget),
];

fn fill(s: &mut dyn TestStore, index: &str, members: &[(&str, u64)]) {
    applied(s, members.iter().fold(txn(), |t, (m, score)| t.add(index, m, ScoreAt::Number(*score))));
}

fn count(s: &mut dyn TestStore, index: &str) -> u64 {
    let counts = [(name(index), crate::store::port::Span::All)].into();
    read(s, Read { counts, ..Read::default() }).counts[0]
}

fn in_order(s: &mut dyn TestStore) {
    fill(s, "q", &[("c", 2), ("b", 2), ("a", 9), ("d", 1)]);
    let taken = applied(s, txn().take(take_of(3, [source("q", &[])])));
    assert_eq!(members(&taken), [(0, "d", 1), (0, "b", 2), (0, "c", 2)]);
    assert_eq!(count(s, "q"), 1);
    let taken = applied(s, txn().take(take_of(3, [source("q", &[])])));
    assert_eq!(members(&taken), [(0, "a", 9)]);
}

fn sources(s: &mut dyn TestStore) {
    fill(s, "high", &[("h1", 50), ("h2", 60)]);
    fill(s, "low", &[("l1", 1), ("l2", 2)]);
    let from = || [source("none", &[]), source("high", &[]), source("low", &[])];
    let taken = applied(s, txn().take(take_of(3, from())));
    assert_eq!(members(&taken), [(1, "h1", 50), (1, "h2", 60), (2, "l1", 1)]);
    let taken = applied(s, txn().take(take_of(3, from())));
    assert_eq!(members(&taken), [(2, "l2", 2)]);
}

fn due(s: &mut dyn TestStore) {
    let far = 50 * TICK;
    applied(s, txn().add("q", "now", ScoreAt::Clock(0)).add("q", "later", ScoreAt::Clock(far)));
    let take = || {
        let source = Source { due: true, ..source("q", &[]) };
        txn().take(take_of(9, [source]))
    };
    let taken = applied(s, take());
    assert_eq!(taken.len(), 1);
    assert_eq!(taken[0].member, name("now"));
    assert_eq!(answer(s, take()), Answer::Empty);
    s.advance(far);
    assert_eq!(applied(s, take()).len(), 1);
}

fn empty(s: &mut dyn TestStore) {
    s.notified();
    let t = txn().take(take_of(3, [source("q", &[])])).put("k", V1, "x").append("log", "x").notify("t");
    assert_eq!(answer(s, t), Answer::Empty);
    assert!(record(s, "k").is_absent() && super::reads::log(s, "log", 0, 9).is_empty() && s.notified().is_empty());
}

fn guarded(s: &mut dyn TestStore) {
    fill(s, "q", &[("a", 1)]);
    let t = txn().guard(Guard::At(name("k"), V1));
    assert_eq!(answer(s, t.clone().take(take_of(1, [source("q", &[])]))), Answer::Refused(0));
    assert_eq!(answer(s, t.take(take_of(1, [source("empty", &[])]))), Answer::Refused(0));
    assert_eq!(count(s, "q"), 1);
}

fn each_add(s: &mut dyn TestStore) {
    fill(s, "q", &[("a", 4), ("b", 5)]);
    let each = [
        Each::Add { index: name("number"), score: ScoreAt::Number(7) },
        Each::Add { index: name("clock"), score: ScoreAt::Clock(9) },
        Each::Add { index: name("of"), score: ScoreAt::Of(name("q")) },
    ];
    let at = commit(s, [txn().take(take_of(2, [source("q", &each)]))]).clock;
    for (member, had) in [("a", 4), ("b", 5)] {
        assert_eq!(score(s, "number", member), Some(7));
        assert_eq!(score(s, "clock", member), Some(at + 9));
        assert_eq!(score(s, "of", member), Some(had));
    }
}

fn each_records(s: &mut dyn TestStore) {
    fill(s, "q", &[("a", 4), ("b", 5), ("c", 6)]);
    fill(s, "ttl", &[("a", 1), ("c", 1)]);
    applied(s, txn().put("old/a", V1, "x").put("old/c", V1, "x").put("new/b", V1, "x"));
    let each = [
        Each::Remove { index: name("ttl") },
        Each::Put {
            prefix: name("new/"),
            version: V2,
            bytes: Bytes::from_static(b"lease"),
            expiry: Expiry::Clock(100 * TICK),
        },
        Each::Delete { prefix: name("old/") },
    ];
    let at = commit(s, [txn().take(take_of(2, [source("q", &each)]))]).clock;
    assert_eq!((score(s, "ttl", "a"), score(s, "ttl", "c")), (None, Some(1)));
    assert!(record(s, "old/a").is_absent() && !record(s, "old/c").is_absent() && record(s, "new/c").is_absent());
    let expect = Record::Present {
        version: V2,
        at,
        expiry: Some(at + 100 * TICK),
        len: 5,
        bytes: Some(Bytes::from_static(b"lease")),
    };
    assert_eq!((record(s, "new/a"), record(s, "new/b")), (expect.clone(), expect));
}

fn each_of_source(s: &mut dyn TestStore) {
    fill(s, "p", &[("a", 4)]);
    fill(s, "q", &[("b", 5)]);
    let add = |index: &str| Each::Add { index: name(index), score: ScoreAt::Number(1) };
    applied(s, txn().take(take_of(2, [source("p", &[add("from-p")]), source("q", &[add("from-q")])])));
    assert_eq!((score(s, "from-p", "a"), score(s, "from-p", "b")), (Some(1), None));
    assert_eq!((score(s, "from-q", "a"), score(s, "from-q", "b")), (None, Some(1)));
}

fn each_of_other(s: &mut dyn TestStore) {
    fill(s, "q", &[("a", 4), ("b", 5)]);
    fill(s, "due", &[("a", 70)]);
    let each = [
        Each::Add { index: name("due"), score: ScoreAt::Number(1) },
        Each::Add { index: name("x"), score: ScoreAt::Of(name("due")) },
    ];
    let at = commit(s, [txn().take(take_of(2, [source("q", &each)]))]).clock;
    assert_eq!((score(s, "x", "a"), score(s, "x", "b")), (Some(70), Some(at)));
    // The same member in both sources: what the first does is not seen by the second.
    fill(s, "p", &[("m", 4)]);
    fill(s, "r", &[("m", 5)]);
    let first = [Each::Add { index: name("y"), score: ScoreAt::Number(1) }];
    let second = [Each::Add { index: name("z"), score: ScoreAt::Of(name("y")) }];
    let reply = commit(s, [txn().take(take_of(2, [source("p", &first), source("r", &second)]))]);
    assert_eq!((score(s, "y", "m"), score(s, "z", "m")), (Some(1), Some(reply.clock)));
}

fn back(s: &mut dyn TestStore) {
    fill(s, "q", &[("a", 4), ("b", 5)]);
    let each = [Each::Add { index: name("q"), score: ScoreAt::Number(6) }];
    let taken = applied(s, txn().take(take_of(1, [source("q", &each)])));
    assert_eq!(members(&taken), [(0, "a", 4)]);
    assert_eq!(place(s, "q", "a"), Some(Place { score: 6, rank: 1 }));
}

fn give(s: &mut dyn TestStore) {
    fill(s, "q", &[("a", 4), ("b", 5)]);
    applied(s, txn().put("job/a", V1, "A").put("job/b", V1, "B").put("payload/a", V1, "PA").put("payload/b", V1, "PB"));
    let each = [
        Each::Put { prefix: name("job/"), version: V2, bytes: Bytes::from_static(b"new"), expiry: Expiry::Never },
        Each::Delete { prefix: name("payload/") },
    ];
    let take = Take { give: [name("job/"), name("payload/")].into(), ..take_of(2, [source("q", &each)]) };
    let taken = applied(s, txn().take(take));
    let bytes = |t: &Taken| t.records.iter().map(|r| r.bytes().cloned().unwrap_or_default()).collect::<Vec<_>>();
    assert_eq!(bytes(&taken[0]), [Bytes::from_static(b"A"), Bytes::from_static(b"PA")]);
    assert_eq!(bytes(&taken[1]), [Bytes::from_static(b"B"), Bytes::from_static(b"PB")]);
    assert_eq!(text(s, "job/a").as_deref(), Some(&b"new"[..]));
}

fn give_absent(s: &mut dyn TestStore) {
    fill(s, "q", &[("a", 4), ("b", 5)]);
    applied(s, txn().put_until("job/a", V1, "A", Expiry::Clock(TICK)));
    s.advance(TICK);
    let take = Take { give: [name("job/")].into(), ..take_of(2, [source("q", &[])]) };
    let taken = applied(s, txn().take(take));
    assert!(taken.iter().all(|t| t.records == [Record::Absent]));
}

fn taken_members(members: &[(u32, &str, u64)]) -> Vec<TakenMember> {
    members.iter().map(|(source, m, score)| TakenMember { source: *source, member: name(m), score: *score }).collect()
}

fn taken_value(s: &mut dyn TestStore) {
    fill(s, "p", &[("a", 4), ("b", SCORE_MAX)]);
    fill(s, "q", &[("c", 0)]);
    let receipt =
        Write::Put { key: name("claim"), version: V2, value: Value::Taken, expiry: Expiry::Clock(100 * TICK) };
    applied(s, txn().take(take_of(9, [source("p", &[]), source("q", &[])])).write(receipt));
    let bytes = text(s, "claim").expect("it was put");
    assert_eq!(decode_taken(&bytes), Some(taken_members(&[(0, "a", 4), (0, "b", SCORE_MAX), (1, "c", 0)])));
    assert_eq!(record(s, "claim").version(), Some(V2));
}

fn in_log(s: &mut dyn TestStore) {
    fill(s, "q", &[("a", 4), ("b", 5)]);
    let take = |n| txn().take(take_of(n, [source("q", &[])]));
    commit(s, [take(1).append("log", "one").append("log", "two"), txn().append("log", "plain"), take(1)]);
    let log = super::reads::log(s, "log", 0, 9);
    let a = taken_members(&[(0, "a", 4)]);
    let expect = [
        LogItem { bytes: Bytes::from_static(b"one"), taken: a.clone() },
        LogItem { bytes: Bytes::from_static(b"two"), taken: a },
        LogItem { bytes: Bytes::from_static(b"plain"), taken: Vec::new() },
    ];
    assert_eq!(log.len(), 1);
    assert_eq!(log[0].items, expect);
}

fn writes_after(s: &mut dyn TestStore) {
    fill(s, "q", &[("a", 4), ("b", 5)]);
    let each = [Each::Add { index: name("x"), score: ScoreAt::Number(1) }];
    let t = txn().take(take_of(1, [source("q", &each)]));
    let t = t.add("x", "a", ScoreAt::Number(2)).add("q", "b", ScoreAt::Number(9)).add("y", "a", ScoreAt::Of(name("q")));
    applied(s, t);
    assert_eq!((score(s, "x", "a"), score(s, "q", "b")), (Some(2), Some(9)));
    assert_eq!(score(s, "y", "a"), Some(4), "its score before the transaction, though it was taken");
}

fn two_takes(s: &mut dyn TestStore) {
    fill(s, "q", &[("a", 1), ("b", 2), ("c", 3)]);
    let take = || txn().take(take_of(2, [source("q", &[])]));
    let answers = commit(s, [take(), take(), take()]).answers;
    let taken = |a: &Answer| match a {
        Answer::Applied { taken } => taken.len(),
        _ => 0,
    };
    assert_eq!((taken(&answers[0]), taken(&answers[1])), (2, 1));
    assert_eq!(answers[2], Answer::Empty);
}

fn none(s: &mut dyn TestStore) {
    fill(s, "q", &[("a", 1)]);
    assert_eq!(answer(s, txn().take(take_of(0, [source("q", &[])]))), Answer::Empty);
    assert_eq!(answer(s, txn().take(take_of(5, []))), Answer::Empty);
    assert_eq!(count(s, "q"), 1);
}

fn budget(s: &mut dyn TestStore) {
    fill(s, "q", &[("a", 1), ("b", 2), ("c", 3)]);
    applied(s, txn().put("j/a", V1, "0123456789").put("j/b", V1, "0123456789").put("j/c", V1, "0"));
    let take = Take { give: [name("j/")].into(), max_bytes: 5, ..take_of(3, [source("q", &[])]) };
    let taken = applied(s, txn().take(take));
    assert_eq!(taken[0].records[0].bytes().map(|b| b.len()), Some(10), "the first always");
    assert!(matches!(taken[1].records[0], Record::Present { len: 10, bytes: None, .. }));
    assert!(matches!(taken[2].records[0], Record::Present { len: 1, bytes: None, .. }));
}
