//! Laws 1, 2, 4: what refuses a transaction, and that a refused one does nothing.

use super::*;
use crate::store::port::{Span, Standing};

pub(super) const CHECKS: &[Check] = &[
    ("guard: absent holds only without a record", absent),
    ("guard: at holds only for exactly this version", at),
    ("guard: out holds only for what is not in the index", out),
    ("guard: first is the lowest score, then the lowest member", first),
    ("guard: live is past the clock, due is at or before it", live_and_due),
    ("guard: below counts all members", below_all),
    ("guard: below live counts only scores past the clock", below_live),
    ("guard: the first that does not hold is named", first_refusal),
    ("guard: an expired record is absent, and at no version", expired),
    ("law 1: a refused transaction writes nothing", all_or_nothing),
    ("law 1: guards look at what was before the transaction's own writes", guards_first),
    ("commit: a transaction sees those before it", in_order),
    ("commit: a refused transaction does not stop the next", independent),
    ("law 4: too late is refused, and nothing else is looked at", too_late),
    ("law 4: valid until the very clock is still in time", just_in_time),
    ("law 6: a full store refuses growth, and only growth", full),
];

fn absent(s: &mut dyn TestStore) {
    assert!(holds(s, Guard::Absent(name("k"))));
    applied(s, txn().put("k", V1, "x"));
    assert!(!holds(s, Guard::Absent(name("k"))));
    applied(s, txn().write(Write::Delete(name("k"))));
    assert!(holds(s, Guard::Absent(name("k"))));
}

fn at(s: &mut dyn TestStore) {
    assert!(!holds(s, Guard::At(name("k"), V1)));
    applied(s, txn().put("k", V1, "x"));
    assert!(holds(s, Guard::At(name("k"), V1)));
    assert!(!holds(s, Guard::At(name("k"), V2)));
    applied(s, txn().put("k", V3, "x"));
    assert!(!holds(s, Guard::At(name("k"), V1)));
    assert!(holds(s, Guard::At(name("k"), V3)), "all 64 bits of a version count");
    assert!(!holds(s, Guard::At(name("k"), Version(u64::MAX - 1))));
}

fn out(s: &mut dyn TestStore) {
    let guard = || Guard::Member(name("i"), name("a"), Standing::Out);
    assert!(holds(s, guard()));
    applied(s, txn().add("i", "b", ScoreAt::Number(1)));
    assert!(holds(s, guard()));
    applied(s, txn().add("i", "a", ScoreAt::Number(1)));
    assert!(!holds(s, guard()));
    applied(s, txn().remove("i", "a"));
    assert!(holds(s, guard()));
}

fn first(s: &mut dyn TestStore) {
    let guard = |m: &str| Guard::Member(name("i"), name(m), Standing::First);
    assert!(!holds(s, guard("a")));
    applied(s, txn().add("i", "b", ScoreAt::Number(5)).add("i", "c", ScoreAt::Number(4)));
    assert!(holds(s, guard("c")));
    assert!(!holds(s, guard("b")));
    applied(s, txn().add("i", "a", ScoreAt::Number(4)));
    assert!(holds(s, guard("a")));
    assert!(!holds(s, guard("c")));
}

fn live_and_due(s: &mut dyn TestStore) {
    let guard = |standing| Guard::Member(name("i"), name("a"), standing);
    assert!(!holds(s, guard(Standing::Live)) && !holds(s, guard(Standing::Due)), "out is neither");
    let far = if s.frozen() { TICK } else { 50 * TICK };
    applied(s, txn().add("i", "a", ScoreAt::Clock(far)));
    assert!(holds(s, guard(Standing::Live)) && !holds(s, guard(Standing::Due)));
    if s.frozen() {
        s.advance(TICK - 1);
        assert!(holds(s, guard(Standing::Live)), "one microsecond before");
        s.advance(1);
    } else {
        s.advance(far);
    }
    assert!(!holds(s, guard(Standing::Live)) && holds(s, guard(Standing::Due)), "at its score it is due");
}

fn below_all(s: &mut dyn TestStore) {
    let guard = |n| Guard::Below(name("i"), Span::All, n);
    assert!(holds(s, guard(1)) && !holds(s, guard(0)));
    applied(s, txn().add("i", "a", ScoreAt::Number(1)).add("i", "b", ScoreAt::Number(SCORE_MAX)));
    assert!(holds(s, guard(3)) && !holds(s, guard(2)));
}

fn below_live(s: &mut dyn TestStore) {
    let guard = |n| Guard::Below(name("i"), Span::Live, n);
    let far = 50 * TICK;
    applied(s, txn().add("i", "a", ScoreAt::Clock(far)).add("i", "b", ScoreAt::Clock(0)));
    assert!(holds(s, guard(2)) && !holds(s, guard(1)), "a score at the clock is not live");
    s.advance(far);
    assert!(holds(s, guard(1)));
}

fn first_refusal(s: &mut dyn TestStore) {
    let t = txn().guard(Guard::Absent(name("k"))).guard(Guard::At(name("k"), V1)).guard(Guard::Member(
        name("i"),
        name("a"),
        Standing::First,
    ));
    assert_eq!(answer(s, t), Answer::Refused(1));
}

fn expired(s: &mut dyn TestStore) {
    applied(s, txn().put_until("k", V1, "x", Expiry::Clock(10 * TICK)));
    assert!(!holds(s, Guard::Absent(name("k"))) && holds(s, Guard::At(name("k"), V1)));
    s.advance(10 * TICK);
    assert!(holds(s, Guard::Absent(name("k"))) && !holds(s, Guard::At(name("k"), V1)));
}

fn all_or_nothing(s: &mut dyn TestStore) {
    applied(s, txn().put("k", V1, "old").add("i", "a", ScoreAt::Number(1)));
    s.notified();
    let t = txn()
        .guard(Guard::At(name("k"), V2))
        .put("k", V2, "new")
        .put("other", V2, "new")
        .add("i", "a", ScoreAt::Number(2))
        .add("i", "b", ScoreAt::Number(2))
        .write(Write::Delete(name("k")))
        .append("log", "x")
        .notify("topic");
    assert_eq!(answer(s, t), Answer::Refused(0));
    assert_eq!(text(s, "k").as_deref(), Some(&b"old"[..]));
    assert!(record(s, "other").is_absent());
    assert_eq!(score(s, "i", "a"), Some(1));
    assert_eq!(score(s, "i", "b"), None);
    assert!(super::reads::log(s, "log", 0, 10).is_empty());
    assert!(s.notified().is_empty());
}

fn guards_first(s: &mut dyn TestStore) {
    let t = txn().guard(Guard::Absent(name("k"))).put("k", V1, "x").guard(Guard::Below(name("i"), Span::All, 1));
    applied(s, t.add("i", "a", ScoreAt::Number(1)));
    assert_eq!(text(s, "k").as_deref(), Some(&b"x"[..]));
}

fn in_order(s: &mut dyn TestStore) {
    let once = txn().guard(Guard::Absent(name("k"))).put("k", V1, "first");
    let then = txn().guard(Guard::At(name("k"), V1)).put("k", V2, "second");
    let reply = commit(s, [once.clone(), then, once]);
    let done = Answer::Applied { taken: Vec::new() };
    assert_eq!(reply.answers, [done.clone(), done, Answer::Refused(0)]);
    assert_eq!(text(s, "k").as_deref(), Some(&b"second"[..]));
}

fn independent(s: &mut dyn TestStore) {
    let refused = txn().guard(Guard::At(name("k"), V1)).put("x", V1, "x");
    let reply = commit(s, [refused, txn().put("y", V1, "y")]);
    assert_eq!(reply.answers[0], Answer::Refused(0));
    assert_eq!(reply.answers[1], Answer::Applied { taken: Vec::new() });
    assert!(record(s, "x").is_absent() && !record(s, "y").is_absent());
}

fn too_late(s: &mut dyn TestStore) {
    let until = clock(s);
    s.advance(TICK);
    let t = txn().until(until).guard(Guard::At(name("k"), V1)).put("k", V1, "x");
    assert_eq!(answer(s, t), Answer::TooLate);
    assert!(record(s, "k").is_absent());
}

fn just_in_time(s: &mut dyn TestStore) {
    if s.frozen() {
        let now = clock(s);
        applied(s, txn().until(now).put("k", V1, "x"));
        s.advance(1);
        assert_eq!(answer(s, txn().until(now).put("k", V1, "x")), Answer::TooLate);
    }
}

fn full(s: &mut dyn TestStore) {
    if !s.set_full(true) {
        return;
    }
    let growing = Commit { txns: [Arc::new(txn().put("k", V1, "x").0)].into(), grows: true };
    assert_eq!(s.commit(&growing), Err(super::super::port::StoreError::Full));
    assert!(record(s, "k").is_absent());
    applied(s, txn().put("small", V1, "x"));
    s.set_full(false);
    assert!(s.commit(&growing).is_ok());
    assert!(!record(s, "k").is_absent());
}
