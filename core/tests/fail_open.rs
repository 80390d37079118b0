//! Goal: while the store cannot be reached, a replica admits to an open pool as many as it is told to and no
//! more, ends them at their time, and writes down who is still there when the store is back. Method: replicas
//! on one model store that some of them cannot reach for a while.

#![allow(clippy::panic, clippy::unwrap_used, reason = "a test says what is wrong by panicking")]

mod support;

use leasehold_core::job::record::Class;
use leasehold_core::pool::open::FailOpen;
use leasehold_core::request::{Acquire, SetPool, SlotId};
use leasehold_core::store::{Score, keys};
use leasehold_core::{Config, Failure, Input, Outcome, Request, Response, StoreOp};
use support::World;

const T: &str = "default";
const P: &str = "gpu";
const LEASE_MS: u64 = 6_000;

/// Two replicas, a pool of four, of which each admits two by itself; past the grace of the start.
fn world() -> World {
    let open = [(P.into(), FailOpen { local: 2, lease_ms: LEASE_MS })];
    let config = Config { scrub_ms: 0, fail_open: open.into(), ..Config::default() };
    let mut w = World::with(2, config);
    w.to(10_001);
    for pool in [P, "closed"] {
        let asked = SetPool { tenant: T.into(), pool: pool.into(), total: Some(4), batch_max: None, lease_ms: None };
        w.call(0, Request::SetPool(asked)).unwrap();
    }
    w
}

fn asked(pool: &str, slot: Option<&str>, cost: u32, wait_ms: u64) -> Request {
    Request::Acquire(Box::new(Acquire {
        tenant: T.into(),
        pool: pool.into(),
        slot: slot.map(String::from),
        class: Class::System,
        cost,
        holder: None,
        lease_ms: Some(LEASE_MS),
        wait_ms,
    }))
}

fn had(outcome: &Outcome) -> (SlotId, bool) {
    match outcome {
        Ok(Response::Slot { id, declared, .. }) => (id.clone(), *declared),
        other => panic!("{other:?}"),
    }
}

fn take(w: &mut World, at: usize) -> (SlotId, bool) {
    had(&w.call(at, asked(P, None, 1, 0)))
}

fn refresh(w: &mut World, at: usize, id: &SlotId) -> Outcome {
    w.call(at, Request::RefreshSlot { tenant: T.into(), pool: P.into(), slot: id.clone() })
}

fn release(w: &mut World, at: usize, id: &SlotId) {
    let asked = Request::ReleaseSlot { tenant: T.into(), pool: P.into(), slot: id.clone() };
    assert_eq!(w.call(at, asked), Ok(Response::SlotReleased));
}

/// The store cannot be reached, and the replica knows.
fn away(w: &mut World, at: usize) {
    w.replicas[at].away = true;
    let id = w.ask(at, Request::Pools);
    w.to(w.now_ms + 400);
    assert!(matches!(w.answer(at, id), Some(Err(Failure::StoreUnavailable { .. }))));
    assert!(w.replicas[at].replica.stats().breaker_open);
}

fn back(w: &mut World, at: usize) {
    w.replicas[at].away = false;
    w.to(w.now_ms + 1_500);
    assert!(!w.replicas[at].replica.stats().breaker_open);
}

fn holders(w: &World) -> Vec<Score> {
    let now = support::START + w.now_ms * 1_000;
    w.store.members(&keys::holders(P)).iter().map(|(score, _)| *score).filter(|end| *end > now).collect()
}

fn balanced(w: &mut World) {
    let mut cursor = None;
    loop {
        match w.call(0, Request::Audit { cursor, repair: false }) {
            Ok(Response::Audited(page)) => {
                assert_eq!(page.findings, [], "the books do not balance");
                cursor = page.next;
            }
            other => panic!("{other:?}"),
        }
        if cursor.is_none() {
            return;
        }
    }
}

fn unavailable(outcome: &Outcome) -> bool {
    matches!(outcome, Err(Failure::StoreUnavailable { .. }))
}

#[test]
fn an_open_pool_admits_up_to_its_bound_and_a_closed_one_nobody() {
    let mut w = world();
    assert!(!take(&mut w, 0).1, "with the store nothing is declared");
    away(&mut w, 0);
    let (one, two) = (take(&mut w, 0), take(&mut w, 0));
    assert!(one.1 && two.1 && one.0 != two.0);
    assert!(unavailable(&w.call(0, asked(P, None, 1, 60_000))), "the bound, and no line without the store");
    assert!(unavailable(&w.call(0, asked("closed", None, 1, 0))));
    release(&mut w, 0, &one.0);
    assert!(unavailable(&w.call(0, asked(P, None, 2, 0))), "two more would be three");
    assert!(unavailable(&refresh(&mut w, 0, &one.0)), "given back: this replica knows nothing of it");
    let three = take(&mut w, 0);
    // One is kept, the other is not.
    w.to(w.now_ms + LEASE_MS - 100);
    assert!(refresh(&mut w, 0, &two.0).is_ok());
    w.to(w.now_ms + 200);
    assert_eq!(refresh(&mut w, 0, &three.0), Err(Failure::SlotLost), "its time was over");
    assert!(refresh(&mut w, 0, &two.0).is_ok());
    assert_eq!(w.replicas[0].replica.stats().slots_open, 1);
    take(&mut w, 0);
    assert!(unavailable(&w.call(0, asked(P, None, 1, 0))));
    // The other replica has the store, and has admitted nobody.
    assert!(!take(&mut w, 1).1);
    let stats = w.replicas[0].replica.stats();
    assert_eq!((stats.slots_declared, stats.slots_declined), (4, 3));
}

#[test]
fn who_was_admitted_is_written_down_and_stands_in_the_way_of_others() {
    let mut w = world();
    for _ in 0..3 {
        take(&mut w, 1);
    }
    away(&mut w, 0);
    let (one, two) = (take(&mut w, 0).0, take(&mut w, 0).0);
    assert_eq!(holders(&w).len(), 3);
    back(&mut w, 0);
    assert_eq!(holders(&w).len(), 5, "one more than the pool has");
    balanced(&mut w);
    assert!(matches!(w.call(1, asked(P, None, 1, 0)), Err(Failure::PoolFull { .. })));
    // From now on they are slots like others, whichever replica is asked.
    assert!(refresh(&mut w, 1, &one).is_ok() && refresh(&mut w, 0, &two).is_ok());
    release(&mut w, 1, &one);
    assert!(matches!(w.call(1, asked(P, None, 1, 0)), Err(Failure::PoolFull { .. })));
    release(&mut w, 0, &two);
    assert!(!take(&mut w, 1).1);
    balanced(&mut w);
}

#[test]
fn a_store_that_comes_and_goes_makes_the_bound_no_larger() {
    let mut w = world();
    away(&mut w, 0);
    let (one, two) = (take(&mut w, 0).0, take(&mut w, 0).0);
    back(&mut w, 0);
    assert!(refresh(&mut w, 0, &one).is_ok());
    away(&mut w, 0);
    assert!(unavailable(&w.call(0, asked(P, None, 1, 0))), "both may still be there");
    assert!(unavailable(&refresh(&mut w, 0, &one)), "it is the store's by now");
    w.to(w.now_ms + LEASE_MS);
    assert!(take(&mut w, 0).1, "by now they are not");
    back(&mut w, 0);
    assert_eq!(refresh(&mut w, 0, &two), Err(Failure::SlotLost));
    balanced(&mut w);
}

#[test]
fn whoever_waits_when_the_store_goes_away_is_admitted_and_leaves_the_line() {
    for name in [None, Some("n")] {
        let mut w = world();
        for _ in 0..4 {
            take(&mut w, 1);
        }
        let waits = w.ask(0, asked(P, name, 1, 60_000));
        w.to(w.now_ms + 100);
        assert_eq!(w.answer(0, waits), None);
        assert_eq!(w.store.members(&keys::waiting(P, Class::System)).len(), 1);
        w.replicas[0].away = true;
        w.to(w.now_ms + 4_000);
        let (id, declared) = had(&w.answer(0, waits).unwrap());
        assert!(declared);
        if name.is_some() {
            let again = w.call(0, asked(P, name, 1, 0));
            assert_eq!(had(&again), (id.clone(), true), "the same name, the same slot");
        }
        back(&mut w, 0);
        assert_eq!(holders(&w).len(), 5);
        if name.is_some() {
            assert_eq!(w.store.members(&keys::waiting(P, Class::System)), [], "it does not wait any more");
            let again = w.call(1, asked(P, name, 1, 0));
            assert_eq!(had(&again), (id.clone(), true), "also elsewhere, now that it is written down");
        }
        release(&mut w, 1, &id);
        assert_eq!(holders(&w).len(), 4);
        w.to(w.now_ms + 12_000);
        balanced(&mut w);
    }
}

/// Runs to where the commit stands that enters what was admitted.
fn to_the_entering(w: &mut World) {
    w.replicas[0].away = false;
    for _ in 0..10_000 {
        let enters = |op: &StoreOp| matches!(op, StoreOp::Commit(c) if format!("{c:?}").contains("holders/gpu"));
        if w.replicas[0].calls.front().is_some_and(|(_, op)| enters(op)) {
            return;
        }
        if !w.perform(0) {
            w.now_ms += 5;
            w.input(0, Input::Timer);
        }
    }
    panic!("nothing is entered");
}

#[test]
fn given_back_while_it_is_written_down_it_does_not_stay() {
    let mut w = world();
    away(&mut w, 0);
    let (one, two) = (take(&mut w, 0).0, take(&mut w, 0).0);
    to_the_entering(&mut w);
    // In this moment nothing can be promised.
    let refreshed = w.ask(0, Request::RefreshSlot { tenant: T.into(), pool: P.into(), slot: two.clone() });
    assert!(unavailable(&w.answer(0, refreshed).unwrap()));
    let released = w.ask(0, Request::ReleaseSlot { tenant: T.into(), pool: P.into(), slot: one });
    assert!(matches!(w.answer(0, released), Some(Err(Failure::OutcomeUnknown { .. }))));
    w.settle();
    assert_eq!(holders(&w).len(), 1);
    assert!(refresh(&mut w, 1, &two).is_ok());
    balanced(&mut w);
}

#[test]
fn a_lost_reply_enters_nobody_twice() {
    let mut w = world();
    away(&mut w, 0);
    let one = take(&mut w, 0).0;
    to_the_entering(&mut w);
    let (_, op) = w.replicas[0].calls.pop_front().unwrap();
    w.apply(&op).unwrap();
    w.to(w.now_ms + 5_000);
    assert!(refresh(&mut w, 0, &one).is_ok());
    assert_eq!(holders(&w).len(), 1);
    balanced(&mut w);
    release(&mut w, 0, &one);
    assert_eq!(holders(&w), []);
}

#[test]
fn of_a_pool_that_has_gone_nothing_is_held() {
    let mut w = world();
    away(&mut w, 0);
    let one = take(&mut w, 0).0;
    w.call(1, Request::DeletePool { pool: P.into() }).unwrap();
    back(&mut w, 0);
    assert_eq!(refresh(&mut w, 0, &one), Err(Failure::SlotLost));
    assert_eq!(holders(&w), []);
    balanced(&mut w);
}

#[test]
fn a_replica_that_never_had_a_store_admits_nobody() {
    let open = [(P.into(), FailOpen { local: 2, lease_ms: LEASE_MS })];
    let config = Config { scrub_ms: 0, fail_open: open.into(), ..Config::default() };
    let mut w = World::with(0, Config::default());
    w.add(&config);
    w.replicas[0].away = true;
    w.to(2_000);
    assert!(unavailable(&w.call(0, asked(P, None, 1, 0))));
}

#[test]
fn a_store_that_answers_once_and_goes_away_again_shuts_nobody_out_for_ever() {
    let mut w = world();
    away(&mut w, 0);
    let one = take(&mut w, 0).0;
    take(&mut w, 0);
    to_the_entering(&mut w);
    // The commit is never answered.
    w.replicas[0].calls.clear();
    w.replicas[0].away = true;
    w.to(w.now_ms + 5_000);
    assert!(w.replicas[0].replica.stats().breaker_open);
    assert!(unavailable(&w.call(0, asked(P, None, 1, 0))), "both may be there");
    w.to(w.now_ms + 3 * LEASE_MS);
    assert!(take(&mut w, 0).1 && take(&mut w, 0).1, "by now neither can be");
    assert!(refresh(&mut w, 0, &one).is_err());
    back(&mut w, 0);
    assert_eq!(holders(&w).len(), 2);
    balanced(&mut w);
}

#[test]
fn whoever_was_granted_the_name_meanwhile_keeps_its_slot() {
    let mut w = world();
    away(&mut w, 0);
    let (here, _) = had(&w.call(0, asked(P, Some("n"), 1, 0)));
    // Its answer was lost: it asks again, elsewhere.
    let (there, declared) = had(&w.call(1, asked(P, Some("n"), 1, 0)));
    assert!(!declared);
    let other = w.call(0, asked(P, Some("n"), 2, 0));
    assert!(matches!(other, Err(Failure::Invalid { .. })), "{other:?}");
    back(&mut w, 0);
    assert!(refresh(&mut w, 1, &there).is_ok(), "it was granted, and told");
    assert_eq!(refresh(&mut w, 0, &here), Err(Failure::SlotLost));
    assert_eq!(holders(&w).len(), 1);
    balanced(&mut w);
}

#[test]
fn a_slot_that_another_server_was_given_back_is_not_written_down() {
    let mut w = world();
    away(&mut w, 0);
    let one = take(&mut w, 0).0;
    release(&mut w, 1, &one);
    back(&mut w, 0);
    assert_eq!(holders(&w), []);
    assert_eq!(refresh(&mut w, 0, &one), Err(Failure::SlotLost));
    balanced(&mut w);
}

#[test]
fn giving_back_by_name_alone_says_that_it_cannot_know() {
    let mut w = world();
    away(&mut w, 0);
    had(&w.call(0, asked(P, Some("n"), 1, 0)));
    let asked =
        || Request::ReleaseSlot { tenant: T.into(), pool: P.into(), slot: SlotId { slot: "n".into(), nonce: None } };
    let told = w.call(0, asked());
    assert!(matches!(told, Err(Failure::OutcomeUnknown { .. })), "it has done something: {told:?}");
    assert!(unavailable(&w.call(0, asked())), "there is nothing here any more");
}

#[test]
fn giving_back_by_name_alone_says_so_too_when_the_store_goes_away_meanwhile() {
    let mut w = world();
    away(&mut w, 0);
    had(&w.call(0, asked(P, Some("n"), 1, 0)));
    w.replicas[0].away = false;
    while w.replicas[0].replica.stats().breaker_open {
        w.now_ms += 10;
        w.input(0, Input::Timer);
        w.perform(0);
    }
    assert_eq!(holders(&w), [], "it has not been entered");
    w.replicas[0].away = true;
    let slot = SlotId { slot: "n".into(), nonce: None };
    let told = w.ask(0, Request::ReleaseSlot { tenant: T.into(), pool: P.into(), slot });
    w.to(w.now_ms + 400);
    let told = w.answer(0, told);
    assert!(matches!(told, Some(Err(Failure::OutcomeUnknown { .. }))), "it has done something: {told:?}");
}

#[test]
fn what_was_entered_counts_though_its_reply_was_lost() {
    let mut w = world();
    away(&mut w, 0);
    let one = take(&mut w, 0).0;
    w.to(w.now_ms + LEASE_MS - 1_000);
    to_the_entering(&mut w);
    let (_, op) = w.replicas[0].calls.pop_front().unwrap();
    w.apply(&op).unwrap();
    w.to(w.now_ms + 3_000);
    assert!(refresh(&mut w, 0, &one).is_ok());
    away(&mut w, 0);
    take(&mut w, 0);
    assert!(unavailable(&w.call(0, asked(P, None, 1, 0))), "the first is still there");
}

/// The reply to a grant is lost, and then the store: what was granted then goes with what was granted instead.
#[test]
fn a_grant_in_doubt_does_not_stay_behind() {
    for given_back in [true, false] {
        let mut w = world();
        let id = w.ask(0, asked(P, None, 1, 0));
        for _ in 0..100 {
            let Some((_, op)) = w.replicas[0].calls.front().cloned() else { break };
            if matches!(&op, StoreOp::Commit(c) if format!("{c:?}").contains("holders/gpu")) {
                w.apply(&op).unwrap();
                w.replicas[0].calls.pop_front();
                break;
            }
            w.perform(0);
        }
        assert_eq!(holders(&w).len(), 1);
        w.replicas[0].away = true;
        w.to(w.now_ms + 6_000);
        let (slot, declared) = had(&w.answer(0, id).unwrap());
        assert!(declared);
        if given_back {
            let asked = Request::ReleaseSlot { tenant: T.into(), pool: P.into(), slot: slot.clone() };
            assert!(matches!(w.call(0, asked), Err(Failure::OutcomeUnknown { .. })));
        }
        back(&mut w, 0);
        assert_eq!(holders(&w).len(), usize::from(!given_back));
        assert_eq!(refresh(&mut w, 0, &slot).is_ok(), !given_back);
        balanced(&mut w);
    }
}
