//! Goal: whatever becomes of one call to the store, every command has its effect once, and its answer
//! is honest. Method: each command is run once for every call that it makes and every fate of that
//! call: the request lost, the reply lost, or the request stuck and applied much later.
//!
//! C70 of the field cases: a store command is applied and its reply is lost.
#![allow(clippy::panic, clippy::unwrap_used, reason = "a test says what is wrong by panicking")]

mod support;

use leasehold_core::group::record::Mode;
use leasehold_core::ids::{GroupId, JobId, Token};
use leasehold_core::job::record::{Class, ErrorInfo, Status};
use leasehold_core::opaque::{Content, Opaque};
use leasehold_core::request::{
    Acquire, Beat, Claim, Complete, CreateGroup, EventCursor, Fail, Held, SetPool, SlotId, Submit,
};
use leasehold_core::store::{StoreError, keys};
use leasehold_core::{Failure, Input, Outcome, Request, Response, StoreOp};
use support::World;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    RequestLost,
    ReplyLost,
    /// Applied so many milliseconds after the replica gave up on it.
    Stuck(u64),
}

const FATES: [Fate; 5] =
    [Fate::RequestLost, Fate::ReplyLost, Fate::Stuck(500), Fate::Stuck(3_000), Fate::Stuck(20_000)];

fn held(job: JobId, token: Token) -> Held {
    Held { tenant: "default".into(), job, token: Some(token) }
}

fn submit(key: Option<&str>) -> Submit {
    let mut s = Submit::new("default", "q", Content::json("1"));
    s.key = key.map(String::from);
    s.max_attempts = Some(2);
    s
}

fn created(outcome: Outcome) -> JobId {
    match outcome {
        Ok(Response::Created(view)) => view.id,
        other => panic!("{other:?}"),
    }
}

/// Prepares a world and gives the command under test.
type Case = (&'static str, fn(&mut World) -> Request);

const CASES: [Case; 31] = [
    ("submit", |_| Request::Submit(Box::new(submit(None)))),
    ("submit with a key", |_| Request::Submit(Box::new(submit(Some("k"))))),
    ("batch of submits", |_| {
        Request::Batch((0..3).map(|i| Request::Submit(Box::new(submit((i > 0).then_some("k"))))).collect())
    }),
    ("claim", |w| {
        created(w.submit(0, submit(None)));
        created(w.submit(0, submit(None)));
        claim(None)
    }),
    ("claim with an id", |w| {
        created(w.submit(0, submit(None)));
        claim(Some("c"))
    }),
    ("heartbeat", |w| {
        let (job, token) = running(w);
        Request::Heartbeat(Beat { held: held(job, token), progress: Some(Opaque::new("7")), seq: Some(1) })
    }),
    ("complete", |w| {
        let (job, token) = running(w);
        Request::Complete(Box::new(Complete { held: held(job, token), result: Some(Content::json("\"r\"")) }))
    }),
    ("fail", |w| {
        let (job, token) = running(w);
        Request::Fail(Box::new(failed(held(job, token), true)))
    }),
    ("fail for good", |w| {
        let (job, token) = running(w);
        Request::Fail(Box::new(failed(held(job, token), false)))
    }),
    ("release", |w| {
        let (job, token) = running(w);
        Request::Release(held(job, token))
    }),
    ("cancel", |w| {
        let job = created(w.submit(0, submit(Some("k"))));
        Request::Cancel { tenant: "default".into(), job }
    }),
    ("retry", |w| {
        let job = created(w.submit(0, submit(Some("k"))));
        w.call(0, Request::Cancel { tenant: "default".into(), job }).unwrap();
        Request::Retry { tenant: "default".into(), job }
    }),
    ("create a group", |_| create(3, true, None)),
    ("create a group with a key", |_| create(3, true, Some("g"))),
    ("create an empty group", |_| create(0, true, None)),
    ("extend a group", |w| {
        let group = grouped(w, create(1, false, None));
        let children = (0..2).map(|_| submit(None)).collect();
        Request::ExtendGroup { tenant: "default".into(), group, from: 1, children }
    }),
    ("seal a group", |w| {
        let group = grouped(w, create(1, false, None));
        Request::SealGroup { tenant: "default".into(), group }
    }),
    ("cancel a group", |w| {
        let group = grouped(w, create(3, true, Some("g")));
        Request::CancelGroup { tenant: "default".into(), group }
    }),
    ("complete the last child", |w| {
        let (job, token) = last_child(w);
        Request::Complete(Box::new(Complete { held: held(job, token), result: Some(Content::json("1")) }))
    }),
    ("fail the last child for good", |w| {
        let (job, token) = last_child(w);
        Request::Fail(Box::new(failed(held(job, token), false)))
    }),
    ("cancel a held child", |w| {
        let group = grouped(w, create(3, true, None));
        Request::Cancel { tenant: "default".into(), job: group.child(2) }
    }),
    ("retry a child", |w| {
        let group = grouped(w, create(3, true, None));
        w.call(0, Request::Cancel { tenant: "default".into(), job: group.child(2) }).unwrap();
        Request::Retry { tenant: "default".into(), job: group.child(2) }
    }),
    ("make a pool", |_| set_pool(4)),
    ("change a pool", |w| {
        w.call(0, set_pool(4)).unwrap();
        set_pool(2)
    }),
    ("delete a pool", |w| {
        w.call(0, set_pool(4)).unwrap();
        Request::DeletePool { pool: "gpu".into() }
    }),
    ("acquire a slot", |w| {
        w.call(0, set_pool(4)).unwrap();
        acquire(None, 2, 0)
    }),
    ("acquire a slot by name", |w| {
        w.call(0, set_pool(4)).unwrap();
        acquire(Some("s"), 1, 0)
    }),
    ("acquire a slot after its holder", |w| {
        w.call(0, set_pool(1)).unwrap();
        let mut first = acquire(None, 1, 0);
        if let Request::Acquire(asked) = &mut first {
            asked.lease_ms = Some(500);
        }
        w.call(0, first).unwrap();
        acquire(None, 1, 20_000)
    }),
    ("refresh a slot", |w| {
        let slot = slot(w);
        Request::RefreshSlot { tenant: "default".into(), pool: "gpu".into(), slot }
    }),
    ("release a slot", |w| {
        let slot = slot(w);
        Request::ReleaseSlot { tenant: "default".into(), pool: "gpu".into(), slot }
    }),
    ("release a slot by name", |w| {
        let slot = SlotId { nonce: None, ..slot(w) };
        Request::ReleaseSlot { tenant: "default".into(), pool: "gpu".into(), slot }
    }),
];

fn set_pool(total: u64) -> Request {
    let (tenant, pool) = ("default".into(), "gpu".into());
    Request::SetPool(SetPool { tenant, pool, total: Some(total), batch_max: Some(1), lease_ms: Some(600_000) })
}

fn acquire(slot: Option<&str>, cost: u32, wait_ms: u64) -> Request {
    Request::Acquire(Box::new(Acquire {
        tenant: "default".into(),
        pool: "gpu".into(),
        slot: slot.map(String::from),
        class: Class::Interactive,
        cost,
        holder: None,
        lease_ms: None,
        wait_ms,
    }))
}

fn slot(w: &mut World) -> SlotId {
    w.call(0, set_pool(4)).unwrap();
    match w.call(0, acquire(Some("s"), 2, 0)) {
        Ok(Response::Slot { id, .. }) => id,
        other => panic!("{other:?}"),
    }
}

fn create(n: usize, sealed: bool, key: Option<&str>) -> Request {
    Request::CreateGroup(Box::new(CreateGroup {
        common: submit(key),
        children: (0..n).map(|_| submit(None)).collect(),
        max_parallel: Some(1),
        mode: Mode::CollectAll,
        sealed,
        open_timeout_ms: None,
    }))
}

fn grouped(w: &mut World, request: Request) -> GroupId {
    match w.call(0, request) {
        Ok(Response::GroupCreated(group)) => group.id,
        other => panic!("{other:?}"),
    }
}

/// The only child that is left of a group, under its lease.
fn last_child(w: &mut World) -> (JobId, Token) {
    grouped(w, create(1, true, None));
    let leased = w.claim(0, "w", "q", 1, Some(600_000));
    (leased[0].id, leased[0].token)
}

fn claim(claim_id: Option<&str>) -> Request {
    Request::Claim(Box::new(Claim {
        tenant: "default".into(),
        worker: "w".into(),
        queues: vec!["q".into()],
        max: 5,
        wait_ms: 0,
        lease_ms: Some(600_000),
        claim_id: claim_id.map(String::from),
    }))
}

fn running(w: &mut World) -> (JobId, Token) {
    let job = created(w.submit(0, submit(Some("k"))));
    let leased = w.claim(0, "w", "q", 1, Some(600_000));
    (job, leased[0].token)
}

fn failed(held: Held, retryable: bool) -> Fail {
    let error = ErrorInfo { message: "boom".into(), ..ErrorInfo::default() };
    Fail { held, error, retryable, retry_in_ms: Some(3_600_000) }
}

/// What happened to jobs, in order, and who holds what in the end: pools have no events.
fn history(w: &mut World) -> Vec<&'static str> {
    let request = Request::Events { tenant: "default".into(), after: EventCursor::default(), limit: 1_000, wait_ms: 0 };
    match w.call(0, request) {
        Ok(Response::Events { events, .. }) => {
            let mut all: Vec<&str> = events.iter().map(|e| e.event.kind.text()).collect();
            all.extend(w.store.members(&keys::holders("gpu")).iter().map(|_| "a unit is held"));
            all.extend(w.store.members(&keys::POOLS).iter().map(|_| "a pool"));
            all.extend(w.store.record(&keys::pool("gpu")).map(|_| "its record"));
            let waiting = w.store.members(&keys::waiting("gpu", Class::Interactive));
            assert!(waiting.is_empty(), "nobody is left in line");
            all
        }
        other => panic!("{other:?}"),
    }
}

/// Runs the case; the call number `at` of the command (from 0) meets that fate. Returns the outcome,
/// the history, and whether there was such a call.
fn run(case: &Case, fault: Option<(usize, Fate)>) -> (Outcome, Vec<&'static str>, bool) {
    let mut w = World::new(1);
    let request = case.1(&mut w);
    let id = w.ask(0, request);
    let mut calls = 0;
    let mut met = false;
    let mut stuck: Option<(u64, StoreOp)> = None;
    for _ in 0..40_000 {
        if let Some((id, op)) = w.replicas[0].calls.front().cloned() {
            let commit_or_read = calls;
            calls += 1;
            match fault {
                Some((at, fate)) if at == commit_or_read => {
                    met = true;
                    w.replicas[0].calls.pop_front();
                    match fate {
                        Fate::RequestLost => {}
                        Fate::ReplyLost => {
                            w.apply(&op).unwrap();
                        }
                        Fate::Stuck(ms) => stuck = Some((w.now_ms + 2_000 + ms, op)),
                    }
                    w.input(0, Input::StoreReply { id, reply: Err(StoreError::Unknown) });
                }
                _ => {
                    w.perform(0);
                }
            }
            continue;
        }
        if let Some((at, op)) = stuck.take() {
            if at <= w.now_ms {
                w.apply(&op).unwrap();
            } else {
                stuck = Some((at, op));
            }
        }
        if w.now_ms >= 40_000 {
            break;
        }
        w.now_ms += 10;
        w.input(0, Input::Timer);
    }
    assert!(stuck.is_none());
    let outcome = w.answer(0, id).unwrap_or_else(|| panic!("{} never answered with {fault:?}", case.0));
    (outcome, history(&mut w), met)
}

/// A batch is as good as its worst part.
fn flat(outcome: &Outcome) -> Vec<&Outcome> {
    match outcome {
        Ok(Response::Batch(parts)) => parts.iter().collect(),
        _ => vec![outcome],
    }
}

#[test]
fn c70_one_effect_each_whatever_is_lost() {
    let mut unknown = 0;
    let mut runs = 0;
    for case in &CASES {
        let (plain, want, _) = run(case, None);
        assert!(flat(&plain).iter().all(|o| o.is_ok()), "{}: {plain:?}", case.0);
        for fate in FATES {
            for at in 0.. {
                let (outcome, got, met) = run(case, Some((at, fate)));
                if !met {
                    break;
                }
                if at > 12 {
                    // Later calls are the sweeps' own.
                    break;
                }
                runs += 1;
                for part in flat(&outcome) {
                    match part {
                        Ok(_) => {}
                        Err(Failure::OutcomeUnknown { .. }) => unknown += 1,
                        Err(other) => panic!("{} call {at} {fate:?}: {other:?}", case.0),
                    }
                }
                // No more than the plain run's events, in its order; all of them if the answer says so.
                if flat(&outcome).iter().all(|o| o.is_ok()) {
                    let mut sorted = got.clone();
                    sorted.sort_unstable();
                    let mut wanted = want.clone();
                    wanted.sort_unstable();
                    assert_eq!(sorted, wanted, "{} call {at} {fate:?}", case.0);
                } else {
                    assert!(got.len() <= want.len(), "{} call {at} {fate:?}: {got:?}", case.0);
                }
            }
        }
    }
    assert!(runs > 200, "{runs} runs");
    println!("{runs} runs, {unknown} answers unknown");
}

#[test]
fn a_purge_of_a_queue_that_has_gone_since_does_not_deny_what_it_did() {
    let mut world = World::new(1);
    world.submit(0, Submit::new("default", "q", Content::json("1"))).unwrap();
    let purge = Request::Purge { tenant: "default".into(), queue: "q".into(), status: Status::Queued };
    let asked = world.ask(0, purge);
    while !matches!(world.replicas[0].calls.front(), Some((_, StoreOp::Commit(_)))) {
        assert!(world.perform(0));
    }
    let (id, op) = world.replicas[0].calls.pop_front().unwrap();
    world.apply(&op).unwrap();
    world.input(0, Input::StoreReply { id, reply: Err(StoreError::Unknown) });
    // Meanwhile the cancelled job is trimmed, and its queue forgotten.
    let cancelled = keys::status("default", "q", Class::System, Status::Cancelled);
    for (_, member) in world.store.members(&cancelled) {
        assert!(world.store.drop_member(&cancelled, &member));
    }
    assert!(world.store.drop_member(&keys::NAMES, &keys::queue_member("default", "q")));
    world.to(20_000);
    let outcome = world.answer(0, asked);
    assert!(matches!(outcome, Some(Err(Failure::OutcomeUnknown { .. }))), "{outcome:?}");
}

#[test]
fn a_claim_whose_receipt_has_expired_does_not_deny_what_it_took() {
    let mut world = World::new(1);
    world.submit(0, Submit::new("default", "q", Content::json("1"))).unwrap();
    let claim = Claim {
        tenant: "default".into(),
        worker: "w".into(),
        queues: vec!["q".into()],
        max: 1,
        wait_ms: 20_000,
        lease_ms: Some(600_000),
        claim_id: None,
    };
    let asked = world.ask(0, Request::Claim(Box::new(claim)));
    while !world.store.records(b"lease/").any(|_| true) {
        let (id, op) = world.replicas[0].calls.pop_front().unwrap();
        let reply = world.apply(&op);
        let lost = world.store.records(b"lease/").any(|_| true);
        world.input(0, Input::StoreReply { id, reply: if lost { Err(StoreError::Unknown) } else { reply } });
    }
    // The store's clock is stepped over the end of what would tell.
    world.ahead_ms = 40_000;
    world.to(30_000);
    let outcome = world.answer(0, asked);
    assert!(matches!(outcome, Some(Err(Failure::OutcomeUnknown { .. }))), "{outcome:?}");
}
