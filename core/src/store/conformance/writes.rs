//! What each write does: records, expiry (law 5), members, scores (law 7), topics.

use super::*;

pub(super) const CHECKS: &[Check] = &[
    ("put: a record comes back with version, clock, expiry, length and bytes", put),
    ("put: replaces bytes, version and expiry", replace),
    ("put: empty and large bytes come back whole", sizes),
    ("put: any bytes may be in keys, members, names and values", binary),
    ("put: taken without a take is an empty list", taken_without_take),
    ("delete: removes; deleting what is absent does nothing", delete),
    ("law 5: at its expiry a record is absent", expiry),
    ("law 5: a record expires with the clock of the call, collected or not", expiry_and_collection),
    ("law 5: an expiry that has passed makes a record absent at once", expiry_in_the_past),
    ("law 5: what has expired is put anew as if it had never been", put_over_expired),
    ("expire: changes only the expiry", expire),
    ("expire: nothing happens to what is absent or has expired", expire_absent),
    ("add: enters, moves up and down", add),
    ("add: raise never lowers", raise),
    ("add: relative to the clock of the commit", clock_scores),
    ("add: of an index is the score before the transaction", score_of),
    ("add: of an index without the member is the clock", score_of_absent),
    ("law 7: sums and numbers are cut to 2^53 - 1", cut),
    ("remove: takes out one member; the last one empties the index", remove),
    ("writes: act in their order", order),
    ("indexes and records of one name do not meet", namespaces),
    ("notify: each topic once, only for what was applied", notify),
];

fn put(s: &mut dyn TestStore) {
    let at = commit(s, [txn().put_until("k", V1, "bytes", Expiry::Clock(100 * TICK))]).clock;
    let expect = Record::Present {
        version: V1,
        at,
        expiry: Some(at + 100 * TICK),
        len: 5,
        bytes: Some(Bytes::from_static(b"bytes")),
    };
    assert_eq!(record(s, "k"), expect);
    assert!(record(s, "k2").is_absent());
}

fn replace(s: &mut dyn TestStore) {
    applied(s, txn().put_until("k", V1, "one", Expiry::Clock(100 * TICK)));
    s.advance(TICK);
    let at = commit(s, [txn().put("k", V2, "other")]).clock;
    let expect = Record::Present { version: V2, at, expiry: None, len: 5, bytes: Some(Bytes::from_static(b"other")) };
    assert_eq!(record(s, "k"), expect);
}

fn sizes(s: &mut dyn TestStore) {
    for len in [0usize, 1, 1_000, 4_095, 4_096, 4_097, 70_000, 3_000_000, 10, 0] {
        let bytes = Bytes::from((0..len).map(|i| (i * 7 + i / 251) as u8).collect::<Vec<u8>>());
        let value = Value::Bytes(bytes.clone());
        applied(s, txn().write(Write::Put { key: name("k"), version: V1, value, expiry: Expiry::Never }));
        assert_eq!(text(s, "k"), Some(bytes), "{len} bytes");
    }
}

fn binary(s: &mut dyn TestStore) {
    let odd: [&[u8]; 6] = [b"\0", b"\0\0", b"\xff\xff", b"a\0b", b"\r\n {}*$%", b"a"];
    let mut t = txn();
    for (i, bytes) in odd.iter().enumerate() {
        let (key, value) = (Name::from(bytes.to_vec()), Value::Bytes(Bytes::copy_from_slice(bytes)));
        t = t.write(Write::Put { key: key.clone(), version: V1, value, expiry: Expiry::Never });
        for index in odd {
            let index = Name::from(index.to_vec());
            let score = ScoreAt::Number(i as u64);
            t = t.write(Write::Add { index, member: key.clone(), score, raise: false });
        }
        t = t.write(Write::Append { log: key, bytes: Bytes::copy_from_slice(bytes) });
    }
    applied(s, t);
    for (i, bytes) in odd.iter().enumerate() {
        let key = Name::from(bytes.to_vec());
        let ask = Read {
            records: [key.clone()].into(),
            counts: [(key.clone(), super::super::port::Span::All)].into(),
            members: [(key.clone(), key.clone())].into(),
            log: Some(super::super::port::LogRead { log: key, after: 0, limit: 9 }),
            ..Read::default()
        };
        let found = read(s, ask);
        assert_eq!(found.records[0].bytes().map(|b| &b[..]), Some(*bytes));
        assert_eq!(found.counts[0], odd.len() as u64);
        assert_eq!(found.members[0], Some(Place { score: i as u64, rank: i as u64 }));
        assert_eq!(found.log.len(), 1);
        assert_eq!(&found.log[0].items[0].bytes[..], *bytes);
    }
}

fn taken_without_take(s: &mut dyn TestStore) {
    let write = Write::Put { key: name("k"), version: V1, value: Value::Taken, expiry: Expiry::Never };
    applied(s, txn().write(write));
    let bytes = text(s, "k").expect("it was put");
    assert_eq!(super::super::port::decode_taken(&bytes), Some(Vec::new()));
}

fn delete(s: &mut dyn TestStore) {
    applied(s, txn().write(Write::Delete(name("k"))));
    applied(s, txn().put("k", V1, "x").put("k2", V1, "x"));
    applied(s, txn().write(Write::Delete(name("k"))));
    assert!(record(s, "k").is_absent() && !record(s, "k2").is_absent());
}

fn expiry(s: &mut dyn TestStore) {
    let at = commit(s, [txn().put_until("k", V1, "x", Expiry::Clock(10 * TICK))]).clock;
    applied(s, txn().put_until("number", V1, "x", Expiry::At(at + 10 * TICK)));
    assert!(!record(s, "k").is_absent() && !record(s, "number").is_absent());
    if s.frozen() {
        s.advance(10 * TICK - 1);
        assert!(!record(s, "k").is_absent() && !record(s, "number").is_absent(), "one microsecond before");
        s.advance(1);
    } else {
        s.advance(10 * TICK);
    }
    assert!(record(s, "k").is_absent() && record(s, "number").is_absent());
}

fn expiry_and_collection(s: &mut dyn TestStore) {
    let gone = txn().put_until("gone", V1, "x", Expiry::Clock(TICK));
    applied(s, gone.put_until("there", V1, "x", Expiry::Clock(5_000 * TICK)).put("never", V1, "x"));
    s.advance(TICK);
    s.collect_garbage();
    assert!(record(s, "gone").is_absent());
    assert!(!record(s, "there").is_absent() && !record(s, "never").is_absent());
}

fn expiry_in_the_past(s: &mut dyn TestStore) {
    applied(s, txn().put_until("zero", V1, "x", Expiry::At(0)).put_until("now", V1, "x", Expiry::Clock(0)));
    assert!(record(s, "zero").is_absent() && record(s, "now").is_absent());
}

fn put_over_expired(s: &mut dyn TestStore) {
    applied(s, txn().put_until("k", V1, "old", Expiry::Clock(TICK)));
    s.advance(TICK);
    applied(s, txn().guard(Guard::Absent(name("k"))).put("k", V2, "new"));
    s.collect_garbage();
    assert_eq!(text(s, "k").as_deref(), Some(&b"new"[..]));
    s.advance(TICK);
    s.collect_garbage();
    assert_eq!(record(s, "k").version(), Some(V2));
}

fn expire(s: &mut dyn TestStore) {
    let large = "x".repeat(10_000);
    let at = commit(s, [txn().put("k", V1, "x").put("large", V1, &large)]).clock;
    s.advance(TICK);
    let expiring = ["k", "large"].map(|k| Write::Expire(name(k), Expiry::At(at + 500 * TICK)));
    applied(s, expiring.into_iter().fold(txn(), T::write));
    for (key, bytes) in [("k", "x"), ("large", &*large)] {
        let expect = Record::Present {
            version: V1,
            at,
            expiry: Some(at + 500 * TICK),
            len: bytes.len(),
            bytes: Some(Bytes::copy_from_slice(bytes.as_bytes())),
        };
        assert_eq!(record(s, key), expect);
    }
    applied(s, txn().write(Write::Expire(name("k"), Expiry::Never)).write(Write::Expire(name("large"), Expiry::At(1))));
    assert!(matches!(record(s, "k"), Record::Present { expiry: None, .. }));
    assert!(record(s, "large").is_absent());
}

fn expire_absent(s: &mut dyn TestStore) {
    applied(s, txn().write(Write::Expire(name("k"), Expiry::Never)));
    assert!(record(s, "k").is_absent());
    applied(s, txn().put_until("k", V1, "x", Expiry::Clock(TICK)));
    s.advance(TICK);
    applied(s, txn().write(Write::Expire(name("k"), Expiry::Never)));
    assert!(record(s, "k").is_absent(), "what has expired does not come back");
}

fn add(s: &mut dyn TestStore) {
    for n in [5, 9, 9, 2, 0, SCORE_MAX] {
        applied(s, txn().add("i", "a", ScoreAt::Number(n)));
        assert_eq!(place(s, "i", "a"), Some(Place { score: n, rank: 0 }));
    }
    assert!(place(s, "i", "b").is_none() && place(s, "j", "a").is_none());
}

fn raise(s: &mut dyn TestStore) {
    applied(s, txn().raise("i", "a", ScoreAt::Number(5)));
    assert_eq!(score(s, "i", "a"), Some(5), "what is not there enters");
    applied(s, txn().raise("i", "a", ScoreAt::Number(4)));
    assert_eq!(score(s, "i", "a"), Some(5));
    applied(s, txn().raise("i", "a", ScoreAt::Number(6)));
    assert_eq!(score(s, "i", "a"), Some(6));
    let at = commit(s, [txn().raise("i", "a", ScoreAt::Clock(7))]).clock;
    assert_eq!(score(s, "i", "a"), Some(at + 7));
}

fn clock_scores(s: &mut dyn TestStore) {
    let before = clock(s);
    s.advance(TICK);
    let reply = commit(s, [txn().add("i", "a", ScoreAt::Clock(0)), txn().add("i", "b", ScoreAt::Clock(3))]);
    assert!(reply.clock >= before + TICK);
    assert_eq!(score(s, "i", "a"), Some(reply.clock));
    assert_eq!(score(s, "i", "b"), Some(reply.clock + 3), "one clock for the whole commit");
}

fn score_of(s: &mut dyn TestStore) {
    applied(s, txn().add("i", "a", ScoreAt::Number(5)).add("j", "a", ScoreAt::Number(6)));
    // Each gets what the other had: both are looked up before either is written.
    applied(s, txn().add("i", "a", ScoreAt::Of(name("j"))).add("j", "a", ScoreAt::Of(name("i"))));
    assert_eq!((score(s, "i", "a"), score(s, "j", "a")), (Some(6), Some(5)));
    applied(s, txn().remove("i", "a").add("i", "a", ScoreAt::Of(name("i"))));
    assert_eq!(score(s, "i", "a"), Some(6));
}

fn score_of_absent(s: &mut dyn TestStore) {
    let at = commit(s, [txn().add("i", "a", ScoreAt::Of(name("nowhere")))]).clock;
    assert_eq!(score(s, "i", "a"), Some(at));
    let at = commit(s, [txn().add("j", "b", ScoreAt::Number(1)).add("i", "b", ScoreAt::Of(name("j")))]).clock;
    assert_eq!(score(s, "i", "b"), Some(at), "before this transaction it was not there");
}

fn cut(s: &mut dyn TestStore) {
    let t = txn().add("i", "a", ScoreAt::Clock(SCORE_MAX)).add("i", "b", ScoreAt::Clock(u64::MAX));
    let t = t.add("i", "c", ScoreAt::Number(u64::MAX)).add("i", "d", ScoreAt::Number(SCORE_MAX - 1));
    applied(s, t.put_until("k", V1, "x", Expiry::Clock(SCORE_MAX)).put_until("l", V1, "x", Expiry::At(u64::MAX)));
    for member in ["a", "b", "c"] {
        assert_eq!(score(s, "i", member), Some(SCORE_MAX));
    }
    assert_eq!(place(s, "i", "d"), Some(Place { score: SCORE_MAX - 1, rank: 0 }), "exact to the last unit");
    for key in ["k", "l"] {
        assert!(matches!(record(s, key), Record::Present { expiry: Some(SCORE_MAX), .. }));
    }
}

fn remove(s: &mut dyn TestStore) {
    applied(s, txn().remove("i", "a"));
    applied(s, txn().add("i", "a", ScoreAt::Number(1)).add("i", "b", ScoreAt::Number(2)));
    applied(s, txn().remove("i", "a"));
    assert_eq!(place(s, "i", "a"), None);
    assert_eq!(place(s, "i", "b"), Some(Place { score: 2, rank: 0 }));
    applied(s, txn().remove("i", "b"));
    let counts = [(name("i"), super::super::port::Span::All)].into();
    assert_eq!(read(s, Read { counts, ..Read::default() }).counts, [0]);
}

fn order(s: &mut dyn TestStore) {
    let t = txn().put("k", V1, "one").write(Write::Delete(name("k"))).put("k", V2, "two");
    let t = t.put("gone", V1, "x").write(Write::Delete(name("gone")));
    let t = t.add("i", "a", ScoreAt::Number(1)).remove("i", "a").add("i", "a", ScoreAt::Number(2));
    applied(s, t.add("i", "b", ScoreAt::Number(1)).remove("i", "b"));
    assert_eq!((record(s, "k").version(), record(s, "gone").version()), (Some(V2), None));
    assert_eq!((score(s, "i", "a"), score(s, "i", "b")), (Some(2), None));
}

fn namespaces(s: &mut dyn TestStore) {
    applied(s, txn().put("x", V1, "record").add("x", "x", ScoreAt::Number(1)).append("x", "log").notify("x"));
    applied(s, txn().write(Write::Delete(name("x"))));
    assert!(record(s, "x").is_absent());
    assert_eq!(score(s, "x", "x"), Some(1));
    applied(s, txn().remove("x", "x").put("x", V1, "again"));
    assert_eq!(super::reads::log(s, "x", 0, 9).len(), 1);
    assert!(!record(s, "x").is_absent());
    // Names that only together are the same bytes.
    applied(s, txn().add("ab", "c", ScoreAt::Number(1)).add("a", "bc", ScoreAt::Number(2)));
    assert_eq!((score(s, "ab", "c"), score(s, "a", "bc")), (Some(1), Some(2)));
}

fn notify(s: &mut dyn TestStore) {
    s.notified();
    let refused = txn().guard(Guard::At(name("k"), V1)).notify("never");
    commit(s, [txn().notify("a").notify("b").notify("a"), refused, txn().notify("b")]);
    applied(s, txn().notify("a"));
    let mut topics = s.notified();
    topics.sort();
    assert_eq!(topics, [name("a"), name("b")]);
    assert!(s.notified().is_empty());
}
