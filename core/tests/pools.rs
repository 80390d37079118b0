//! Goal: a pool's slots are never held by more than it has, go to who is next, and come back by whatever way
//! their holders leave. Method: replicas on one model store; callers that leave at every stage, holders that
//! freeze, entries that are lost.

#![allow(clippy::panic, clippy::unwrap_used, reason = "a test says what is wrong by panicking")]

mod support;

use std::collections::BTreeSet;
use std::sync::Arc;

use leasehold_core::job::record::Class;
use leasehold_core::request::{Acquire, PoolView, RequestId, SetPool, SlotId};
use leasehold_core::store::{Answer, Commit, StoreError, Txn, Write, keys};
use leasehold_core::{Failure, Input, Request, Response, StoreAnswer, StoreOp};
use support::World;

const T: &str = "default";
const P: &str = "gpu";

fn set(w: &mut World, total: u64, batch_max: Option<u64>) {
    let (tenant, pool) = (T.into(), P.into());
    let asked = SetPool { tenant, pool, total: Some(total), batch_max, lease_ms: Some(20_000) };
    w.call(0, Request::SetPool(asked)).unwrap();
}

/// Past the time in which a replica that has just started takes nobody's place away.
fn world(n: usize, total: u64) -> World {
    let mut w = World::new(n);
    w.to(10_001);
    set(&mut w, total, None);
    w
}

fn asked(slot: Option<&str>, class: Class, cost: u32, wait_ms: u64) -> Request {
    Request::Acquire(Box::new(Acquire {
        tenant: T.into(),
        pool: P.into(),
        slot: slot.map(String::from),
        class,
        cost,
        holder: Some("h".into()),
        lease_ms: None,
        wait_ms,
    }))
}

fn take(w: &mut World, at: usize) -> SlotId {
    match w.call(at, asked(None, Class::System, 1, 0)) {
        Ok(Response::Slot { id, .. }) => id,
        other => panic!("{other:?}"),
    }
}

fn ask(w: &mut World, at: usize, class: Class) -> RequestId {
    let id = w.ask(at, asked(None, class, 1, 60_000));
    w.settle();
    id
}

fn had(w: &mut World, at: usize, id: RequestId) -> Option<SlotId> {
    match w.answer(at, id)? {
        Ok(Response::Slot { id, .. }) => Some(id),
        other => panic!("{other:?}"),
    }
}

fn release(w: &mut World, at: usize, slot: &SlotId) {
    let request = Request::ReleaseSlot { tenant: T.into(), pool: P.into(), slot: slot.clone() };
    assert_eq!(w.call(at, request), Ok(Response::SlotReleased));
}

fn refresh(w: &mut World, at: usize, slot: &SlotId) -> Result<(), Failure> {
    w.call(at, Request::RefreshSlot { tenant: T.into(), pool: P.into(), slot: slot.clone() }).map(|_| ())
}

fn view(w: &mut World) -> PoolView {
    match w.call(0, Request::Pool { tenant: T.into(), pool: P.into() }) {
        Ok(Response::Pool(pool)) => *pool,
        other => panic!("{other:?}"),
    }
}

/// Entries of the pool's indexes: holders, those of batch, and for each class who waits and until when.
fn entries(w: &World) -> Vec<usize> {
    let lines = Class::ALL.into_iter().flat_map(|c| [keys::waiting(P, c), keys::alive(P, c)]);
    [keys::holders(P), keys::batch(P)].into_iter().chain(lines).map(|index| w.store.members(&index).len()).collect()
}

#[test]
fn sixty_four_who_wait_get_sixty_four_slots() {
    let mut w = world(3, 64);
    let first: Vec<SlotId> = (0..64).map(|n| take(&mut w, n % 3)).collect();
    let waiting: Vec<(usize, RequestId)> = (0..64).map(|n| (n % 3, ask(&mut w, n % 3, Class::System))).collect();
    assert_eq!(view(&mut w).in_use, 64);
    for slot in &first {
        release(&mut w, 1, slot);
    }
    let second: BTreeSet<String> = waiting.iter().map(|(at, id)| had(&mut w, *at, *id).unwrap().to_string()).collect();
    assert_eq!(second.len(), 64);
    assert!(first.iter().all(|slot| !second.contains(&slot.to_string())));
    assert_eq!(entries(&w), [64, 0, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn all_the_room_of_a_pool_that_grows_is_given_out_in_order() {
    let mut w = world(3, 1);
    let holder = take(&mut w, 0);
    let mut waiting = Vec::new();
    for n in 0..200u64 {
        w.to(10_010 + n);
        let class = [Class::Batch, Class::System, Class::Interactive][n as usize % 3];
        waiting.push((class, n as usize % 3, ask(&mut w, n as usize % 3, class)));
    }
    set(&mut w, 101, Some(20));
    waiting.sort_by_key(|(class, _, id)| (*class, *id));
    let got: Vec<bool> = waiting.iter().map(|(_, at, id)| had(&mut w, *at, *id).is_some()).collect();
    // 66 interactive ones, then 34 system ones; 67 wait in class batch.
    assert_eq!(got.iter().take_while(|got| **got).count(), 100);
    assert_eq!(got.iter().filter(|got| **got).count(), 100);
    release(&mut w, 2, &holder);
    assert!(had(&mut w, waiting[100].1, waiting[100].2).is_some());
    set(&mut w, 100_000, Some(20));
    let rest = waiting[101..].iter().filter(|(_, at, id)| had(&mut w, *at, *id).is_some()).count();
    assert_eq!(rest, 32 + 20, "the other system ones, and as many batch ones as may be");
    assert_eq!(view(&mut w).batch_in_use, 20);
}

/// What becomes of one call to the store while the asker leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Works,
    ReplyLost,
    RequestLost,
}

#[test]
fn whoever_leaves_at_any_stage_leaves_nothing() {
    for (room, named) in [(true, false), (false, false), (true, true), (false, true)] {
        for fate in [Fate::Works, Fate::ReplyLost, Fate::RequestLost] {
            for stage in 0..24 {
                let mut w = world(2, 1);
                let holder = (!room).then(|| take(&mut w, 1));
                let id = w.ask(0, asked(named.then_some("n"), Class::System, 1, 60_000));
                let mut freed = false;
                for n in 0..stage {
                    // Each other stage is before a call, and after it.
                    if n % 2 == 0 && w.replicas[0].calls.is_empty() {
                        if !std::mem::replace(&mut freed, true)
                            && let Some(holder) = &holder
                        {
                            let slot = holder.clone();
                            w.ask(1, Request::ReleaseSlot { tenant: T.into(), pool: P.into(), slot });
                            while w.perform(1) {}
                        }
                        w.now_ms += 20;
                        w.input(0, Input::Timer);
                    } else if n % 2 == 0 && n + 2 >= stage && fate != Fate::Works {
                        let (call, op) = w.replicas[0].calls.pop_front().unwrap();
                        if fate == Fate::ReplyLost {
                            w.apply(&op).unwrap();
                        }
                        w.input(0, Input::StoreReply { id: call, reply: Err(StoreError::Unknown) });
                    } else if n % 2 == 0 {
                        w.perform(0);
                    }
                }
                if w.answer(0, id).is_some() {
                    // It was answered before it left.
                    break;
                }
                w.input(0, Input::Cancelled { id });
                let left = w.now_ms;
                // Within the time for which an outcome may be unknown.
                w.to(left + if named { 25_000 } else { 5_000 });
                if let Some(holder) = holder.filter(|_| !freed) {
                    release(&mut w, 1, &holder);
                }
                let after = w.now_ms;
                w.to(after + 10);
                let live = entries(&w);
                let mine: usize = if named { view(&mut w).in_use as usize } else { live[0] };
                assert_eq!(mine, 0, "{room} {named} {fate:?} {stage}: {live:?}");
                assert_eq!(view(&mut w).waiting.iter().map(|w| w.1).sum::<u64>(), 0, "{named} {fate:?} {stage}");
                take(&mut w, 1);
            }
        }
    }
}

#[test]
fn a_holder_that_thaws_after_its_time_is_told_and_gets_nothing_back() {
    let mut w = world(2, 1);
    let Request::Acquire(mut short) = asked(Some("name"), Class::System, 1, 0) else { panic!() };
    short.lease_ms = Some(3_000);
    let Ok(Response::Slot { id: frozen, .. }) = w.call(0, Request::Acquire(short)) else { panic!() };
    let next = ask(&mut w, 1, Class::System);
    // Its refresh was on its way when it froze: it comes to the store when the slot is another's.
    w.ask(0, Request::RefreshSlot { tenant: T.into(), pool: P.into(), slot: frozen.clone() });
    while matches!(w.replicas[0].calls.front(), Some((_, StoreOp::Read(_)))) {
        w.perform(0);
    }
    let (late, op) = w.replicas[0].calls.pop_front().unwrap();
    let before = w.store.members(&keys::holders(P));
    while w.now_ms < 13_500 {
        w.now_ms += 1;
        w.input(1, Input::Timer);
        while w.perform(1) {}
    }
    let new = had(&mut w, 1, next).unwrap();
    let reply = w.apply(&op);
    assert!(matches!(&reply, Ok(StoreAnswer::Commit(c)) if matches!(c.answers[..], [Answer::Refused(_)])));
    w.input(0, Input::StoreReply { id: late, reply });
    assert_ne!(w.store.members(&keys::holders(P)), before);
    assert_eq!(refresh(&mut w, 0, &frozen), Err(Failure::SlotLost));
    release(&mut w, 0, &frozen);
    assert_eq!(refresh(&mut w, 0, &new), Ok(()));
    assert_eq!(entries(&w)[0], 1);
    // The same name again is another grant: the old one neither renews it nor gives it back.
    release(&mut w, 0, &new);
    let Ok(Response::Slot { id: again, .. }) = w.call(1, asked(Some("name"), Class::System, 1, 0)) else { panic!() };
    assert_eq!(refresh(&mut w, 0, &frozen), Err(Failure::SlotLost));
    release(&mut w, 0, &frozen);
    assert_eq!(refresh(&mut w, 0, &again), Ok(()));
}

#[test]
fn two_tenants_and_two_units_with_one_name_do_not_merge() {
    let mut w = world(1, 8);
    let first = take(&mut w, 0);
    for (n, tenant) in ["a", "a/b", "b"].into_iter().enumerate() {
        let Request::Acquire(mut request) = asked(Some("same"), Class::Batch, 2, 0) else { panic!() };
        request.tenant = tenant.into();
        assert!(matches!(w.call(0, Request::Acquire(request)), Ok(Response::Slot { .. })));
        assert_eq!(entries(&w)[..2], [1 + 2 * (n + 1), 2 * (n + 1)]);
    }
    release(&mut w, 0, &first);
    let shown = view(&mut w);
    assert_eq!((shown.in_use, shown.holders.len()), (6, 0), "another tenant's holders are counted, not shown");
    assert!(w.call(0, asked(None, Class::System, 3, 0)).is_err(), "all or none");
}

#[test]
fn the_clock_of_the_store_goes_back_and_nobody_comes_back_to_life() {
    let mut w = world(1, 1);
    let old = take(&mut w, 0);
    w.to(31_000);
    let new = take(&mut w, 0);
    w.now_ms = 29_000;
    assert_eq!(refresh(&mut w, 0, &old), Err(Failure::SlotLost));
    assert_eq!(entries(&w)[0], 1);
    assert_eq!(refresh(&mut w, 0, &new), Ok(()));
}

/// What the audit finds, and whether it put that right.
fn audit(w: &mut World, repair: bool) -> Vec<(String, bool)> {
    let (mut cursor, mut found) = (None, Vec::new());
    loop {
        match w.call(0, Request::Audit { cursor, repair }) {
            Ok(Response::Audited(page)) => {
                found.extend(page.findings.into_iter().map(|f| (format!("{} {}", f.subject, f.what), f.repaired)));
                cursor = page.next;
            }
            other => panic!("{other:?}"),
        }
        if cursor.is_none() {
            return found;
        }
    }
}

#[test]
fn the_audit_finds_what_does_not_balance_and_nothing_else() {
    let mut w = world(1, 500);
    for n in 0..450 {
        let class = Class::ALL[n % 3];
        w.call(0, asked(Some(&format!("s{n:03}")), class, 1 + n as u32 % 2, 0)).unwrap_or(Response::Ready);
    }
    let waiting: Vec<RequestId> = (0..10).map(|_| w.ask(0, asked(None, Class::System, 400, 60_000))).collect();
    w.settle();
    assert!(waiting.len() <= w.store.members(&keys::waiting(P, Class::System)).len());
    assert_eq!(audit(&mut w, false), []);
    // A slot's record vanishes while it is held; a deadline, while somebody waits.
    let held = w.store.members(&keys::batch(P))[0].1.clone();
    let (slot, ..) = keys::holder_of(&held).unwrap();
    w.store.evict(&keys::slots(P).join(&slot));
    let waits = w.store.members(&keys::alive(P, Class::System))[0].1.clone();
    w.store.drop_member(&keys::alive(P, Class::System), &waits);
    let found = audit(&mut w, false);
    let texts: Vec<&str> = found.iter().map(|(what, _)| what.as_str()).collect();
    let units = w.store.members(&keys::holders(P)).iter().filter(|m| m.1.starts_with(&slot)).count();
    assert_eq!(texts.iter().filter(|t| t.contains("was not granted so")).count(), 2 * units, "{texts:?}");
    assert_eq!(texts.iter().filter(|t| t.contains("waits without a deadline")).count(), 1, "{texts:?}");
    assert!(audit(&mut w, true).iter().all(|(_, repaired)| *repaired));
    assert_eq!(audit(&mut w, false), []);
    let whole = Request::Audit { cursor: Some("p00".into()), repair: false };
    assert_eq!(w.call(0, whole), Err(Failure::BadCursor));
}

#[test]
fn what_is_lost_of_a_slot_ends_it_or_is_put_back() {
    // A unit of a holder: its room may have gone to another.
    let mut w = world(1, 3);
    let Ok(Response::Slot { id, .. }) = w.call(0, asked(Some("n"), Class::Batch, 2, 0)) else { panic!() };
    let unit = w.store.members(&keys::holders(P))[1].1.clone();
    w.store.drop_member(&keys::holders(P), &unit);
    let other = w.call(0, asked(None, Class::System, 2, 0));
    assert!(other.is_ok());
    assert_eq!(refresh(&mut w, 0, &id), Err(Failure::SlotLost));
    // Wanted again by name, what is left of it goes first.
    assert!(matches!(w.call(0, asked(Some("n"), Class::Batch, 2, 0)), Err(Failure::PoolFull { position: 1, .. })));
    assert_eq!(entries(&w)[..2], [2, 0]);

    // Who waits: its place, its deadline, its record.
    for what in 0..3 {
        let mut w = world(2, 1);
        let holder = take(&mut w, 0);
        let waiting = ask(&mut w, 1, Class::System);
        let member = w.store.members(&keys::waiting(P, Class::System))[0].1.clone();
        let lost = match what {
            0 => w.store.drop_member(&keys::waiting(P, Class::System), &member),
            1 => w.store.drop_member(&keys::alive(P, Class::System), &member),
            _ => w.store.evict(&keys::slots(P).join(&member)),
        };
        assert!(lost);
        w.to(14_000);
        release(&mut w, 0, &holder);
        w.to(17_000);
        assert!(had(&mut w, 1, waiting).is_some(), "{what}");
        w.to(80_000);
        assert_eq!(entries(&w), [0; 8], "{what}");
    }
}

#[test]
fn what_an_earlier_wait_of_the_same_name_left_takes_nothing_with_it() {
    // It died; nobody came by before its record had expired, and the pool was not tidied.
    let mut w = world(1, 1);
    let holder = take(&mut w, 0);
    let gone = w.ask(0, asked(Some("n"), Class::System, 1, 60_000));
    w.settle();
    w.input(0, Input::Cancelled { id: gone });
    release(&mut w, 0, &holder);
    w.to(51_000);
    assert_eq!(entries(&w), [0, 0, 0, 0, 1, 1, 0, 0]);
    // A replica that has just started removes nobody yet.
    w.restart(0, 9);
    let Ok(Response::Slot { id, .. }) = w.call(0, asked(Some("n"), Class::Batch, 1, 0)) else { panic!() };
    assert_eq!(entries(&w), [1, 1, 0, 0, 0, 0, 0, 0]);
    w.to(65_000);
    assert_eq!(refresh(&mut w, 0, &id), Ok(()));
    w.to(81_000);
    assert_eq!(refresh(&mut w, 0, &id), Ok(()));
}

#[test]
fn one_whose_record_is_lost_while_it_waits_comes_anew_and_leaves_its_old_place() {
    let mut w = world(1, 1);
    let holder = take(&mut w, 0);
    let waits = ask(&mut w, 0, Class::System);
    let (_, member) = w.store.members(&keys::waiting(P, Class::System))[0].clone();
    assert!(w.store.evict(&keys::slots(P).join(&member)));
    release(&mut w, 0, &holder);
    // Looked at in the moment of the grant: what is left behind is tidied away later.
    let until = w.now_ms + 3_000;
    while had(&mut w, 0, waits).is_none() {
        assert!(w.now_ms < until, "it was granted nothing");
        w.to(w.now_ms + 10);
    }
    assert_eq!(entries(&w), [1, 0, 0, 0, 0, 0, 0, 0], "it holds and does not wait");
}

#[test]
fn one_without_a_deadline_does_not_stand_in_the_way_for_ever() {
    let mut w = world(2, 1);
    let holder = take(&mut w, 0);
    let gone = w.ask(1, asked(Some("gone"), Class::System, 1, 60_000));
    w.settle();
    w.input(1, Input::Cancelled { id: gone });
    let member = w.store.members(&keys::waiting(P, Class::System))[0].1.clone();
    w.store.drop_member(&keys::alive(P, Class::System), &member);
    w.to(10_002);
    let next = ask(&mut w, 0, Class::System);
    release(&mut w, 0, &holder);
    assert_eq!(had(&mut w, 0, next), None);
    // Whoever waits behind it has the pool tidied.
    w.to(14_000);
    assert!(had(&mut w, 0, next).is_some());
}

#[test]
fn a_replica_that_dies_stands_in_the_way_for_five_seconds() {
    let mut w = world(2, 1);
    let holder = take(&mut w, 1);
    ask(&mut w, 0, Class::Interactive);
    let next = ask(&mut w, 1, Class::System);
    w.restart(0, 77);
    release(&mut w, 1, &holder);
    w.to(14_900);
    assert_eq!(had(&mut w, 1, next), None);
    w.to(17_100);
    assert!(had(&mut w, 1, next).is_some());
}

/// Calls to the store, and what they ask for, of one command.
fn cost(w: &mut World, request: Request) -> (usize, usize) {
    let id = w.ask(0, request);
    let (mut calls, mut parts) = (0, 0);
    while w.answer(0, id).is_none() {
        match &w.replicas[0].calls.front().unwrap().1 {
            StoreOp::Read(r) => parts += r.records.len() + r.slices.len() + r.counts.len() + r.members.len(),
            StoreOp::Commit(c) => parts += c.txns.iter().map(|t| t.guards.len() + t.writes.len()).sum::<usize>(),
        }
        calls += 1;
        w.perform(0);
    }
    (calls, parts)
}

#[test]
fn what_an_acquire_costs_does_not_depend_on_who_waits() {
    let mut w = world(1, 4);
    for _ in 0..4 {
        take(&mut w, 0);
    }
    let full = |w: &mut World| cost(w, asked(None, Class::System, 1, 0));
    let few = full(&mut w);
    for _ in 0..2_000 {
        w.ask(0, asked(None, Class::System, 1, 60_000));
    }
    while w.perform(0) {}
    assert_eq!(view(&mut w).waiting[1].1, 2_000);
    assert_eq!(full(&mut w), few);
}

#[test]
fn c43_nothing_about_a_release_depends_on_the_settings() {
    let mut w = world(1, 8);
    let slots: Vec<SlotId> = (0..8).map(|_| take(&mut w, 0)).collect();
    w.store.evict(&keys::pool(P));
    for slot in &slots {
        assert_eq!(refresh(&mut w, 0, slot), Ok(()));
        release(&mut w, 0, slot);
    }
    assert_eq!(entries(&w), [0; 8]);
    set(&mut w, 8, None);
    for _ in 0..8 {
        take(&mut w, 0);
    }
}

#[test]
fn c46_batch_leaves_headroom_and_interactive_work_is_next() {
    let mut w = world(2, 10);
    set(&mut w, 10, Some(8));
    let batch: Vec<RequestId> = (0..100).map(|n| ask(&mut w, n % 2, Class::Batch)).collect();
    let mut held: Vec<SlotId> = batch.iter().enumerate().filter_map(|(n, id)| had(&mut w, n % 2, *id)).collect();
    assert_eq!((held.len(), view(&mut w).in_use), (8, 8));
    w.to(15_001);
    let first = ask(&mut w, 0, Class::Interactive);
    assert!(had(&mut w, 0, first).is_some());
    w.to(16_001);
    let three: Vec<RequestId> = (0..3).map(|n| ask(&mut w, n % 2, Class::Interactive)).collect();
    let started = three.iter().enumerate().filter(|(n, id)| had(&mut w, n % 2, **id).is_some()).count();
    assert_eq!((started, view(&mut w).in_use), (1, 10));
    for n in [1, 2] {
        release(&mut w, 0, &held.pop().unwrap());
        assert!(had(&mut w, n % 2, three[n]).is_some(), "the next free slot");
        assert!(view(&mut w).batch_in_use <= 8);
    }
}

#[test]
fn a_sign_of_life_does_not_put_a_holder_into_the_line() {
    let mut w = world(1, 1);
    let before = w.store.records(b"slot/").count();
    take(&mut w, 0);
    let waits = w.ask(0, asked(Some("unit"), Class::System, 1, 60_000));
    // Let in at once, or into the line: which of the two is for the store to say.
    let mut entered = None;
    while w.store.members(&keys::waiting(P, Class::System)).is_empty() {
        entered = w.replicas[0].calls.front().cloned();
        assert!(w.perform(0));
    }
    let renews = |op: &StoreOp| match op {
        StoreOp::Commit(commit) => commit.txns.iter().flat_map(|t| &t.writes).any(|w| matches!(w, Write::Expire(..))),
        StoreOp::Read(_) => false,
    };
    let renewal = loop {
        match w.replicas[0].calls.front().cloned() {
            Some((_, op)) if renews(&op) => break op,
            Some(_) => assert!(w.perform(0)),
            None => {
                w.now_ms += 25;
                w.input(0, Input::Timer);
            }
        }
    };
    // The store loses both, and what entered the line is applied once more: now there is room.
    while w.store.records(b"slot/").count() > before {
        assert_eq!(w.store.lose_newest(1), 1);
    }
    w.apply(&in_time(&entered.unwrap().1)).unwrap();
    assert_eq!(entries(&w), [1, 0, 0, 0, 0, 0, 0, 0]);
    w.apply(&renewal).unwrap();
    assert_eq!(entries(&w), [1, 0, 0, 0, 0, 0, 0, 0]);
    assert!(w.answer(0, waits).is_none());
}

/// The same, however late it comes.
fn in_time(op: &StoreOp) -> StoreOp {
    let StoreOp::Commit(commit) = op else { panic!("{op:?}") };
    let txns = commit.txns.iter().map(|txn| Arc::new(Txn { valid_until: u64::MAX, ..Txn::clone(txn) })).collect();
    StoreOp::Commit(Commit { txns, ..commit.clone() })
}
