//! Goal: a job that a server runs itself is leased and has its slots in one step, goes only where it may, waits
//! its turn behind whoever waits for a slot, and gives its slots back by whatever way its attempt ends. Method:
//! replicas on one model store, each ending tried in turn; replies lost and repeated.

#![allow(clippy::panic, clippy::unwrap_used, reason = "a test says what is wrong by panicking")]

mod support;

use leasehold_core::dispatch::{Route, Routing, Upstream};
use leasehold_core::group::record::Mode;
use leasehold_core::job::record::{Class, ErrorInfo, Status};
use leasehold_core::opaque::Content;
use leasehold_core::recording::Recorder;
use leasehold_core::request::{
    Acquire, Beat, Complete, CreateGroup, Dispatch, Dispatched, Fail, Finding, GiveBack, Held, HoldUpstream, RequestId,
    SetPool, SlotOf, Submit, Why,
};
use leasehold_core::store::{StoreError, keys};
use leasehold_core::{Config, Failure, Input, JobId, Request, Response, StoreOp};
use support::World;

const T: &str = "default";
const P: &str = "gpu";
const UPSTREAMS: [&str; 2] = ["here", "cloud"];

fn routing() -> Routing {
    let upstream = |name: &str, on_prem| Upstream { name: name.into(), pool: Some(P.into()), on_prem };
    let route = |queue: &str, upstreams: &[&str]| Route {
        queue: queue.into(),
        tenants: vec![T.into(), "kept".into()],
        upstreams: upstreams.iter().map(|u| String::from(*u)).collect(),
    };
    Routing {
        upstreams: vec![upstream("here", true), upstream("cloud", false)],
        routes: vec![route("q", &UPSTREAMS), route("far", &["cloud"])],
        on_prem_tenants: vec!["kept".into()],
    }
}

fn world(total: u64, batch_max: Option<u64>) -> World {
    let mut w = World::with(2, Config { scrub_ms: 0, routing: routing(), ..Config::default() });
    // Past the time in which a replica that has just started takes nobody's place away.
    w.to(10_001);
    set(&mut w, total, batch_max);
    w
}

fn set(w: &mut World, total: u64, batch_max: Option<u64>) {
    let (tenant, pool) = (T.into(), P.into());
    w.call(0, Request::SetPool(SetPool { tenant, pool, total: Some(total), batch_max, lease_ms: None })).unwrap();
}

fn submit(w: &mut World, change: impl FnOnce(&mut Submit)) -> JobId {
    let mut asked = Submit::new(T, "q", Content::json("1"));
    change(&mut asked);
    match w.submit(0, asked) {
        Ok(Response::Created(job)) => job.id,
        other => panic!("{other:?}"),
    }
}

fn asked(upstreams: &[&str], max: usize, wait_ms: u64) -> Request {
    Request::Dispatch(Box::new(Dispatch {
        worker: "server".into(),
        queues: vec![(T.into(), "q".into())],
        upstreams: upstreams.iter().map(|u| String::from(*u)).collect(),
        max,
        wait_ms,
    }))
}

fn dispatch(w: &mut World, at: usize, upstreams: &[&str], max: usize) -> Vec<Dispatched> {
    match w.call(at, asked(upstreams, max, 0)) {
        Ok(Response::Dispatched(found)) => found,
        other => panic!("{other:?}"),
    }
}

fn poll(w: &mut World, at: usize) -> RequestId {
    let id = w.ask(at, asked(&UPSTREAMS, 1, 60_000));
    w.settle();
    id
}

fn had(w: &mut World, at: usize, id: RequestId) -> Option<Vec<Dispatched>> {
    match w.answer(at, id)? {
        Ok(Response::Dispatched(found)) => Some(found),
        other => panic!("{other:?}"),
    }
}

fn held(one: &Dispatched) -> Held {
    Held { tenant: one.tenant.clone(), job: one.job.id, token: Some(one.job.token) }
}

fn beat(w: &mut World, at: usize, one: &Dispatched) -> Result<Response, Failure> {
    w.call(at, Request::Heartbeat(Beat { held: held(one), progress: None, seq: None }))
}

fn complete(w: &mut World, at: usize, one: &Dispatched) {
    let done = Complete { held: held(one), result: None };
    assert_eq!(w.call(at, Request::Complete(Box::new(done))), Ok(Response::Completed));
}

fn in_use(w: &World) -> [usize; 2] {
    [keys::holders(P), keys::batch(P)].map(|index| w.store.members(&index).len())
}

fn hold(w: &mut World, at: usize, upstream: &str, for_ms: u64) {
    let asked = HoldUpstream { upstream: upstream.into(), for_ms };
    assert!(matches!(w.call(at, Request::HoldUpstream(asked)), Ok(Response::UpstreamHeld { .. })));
}

#[test]
fn every_end_of_an_attempt_gives_its_slots_back() {
    type End = fn(&mut World, &Dispatched);
    let ends: [(&str, End); 5] = [
        ("complete", |w, one| complete(w, 0, one)),
        ("complete elsewhere", |w, one| complete(w, 1, one)),
        ("fail", |w, one| {
            let (held, error) = (held(one), ErrorInfo::default());
            let failed = Fail { held, error, retryable: true, retry_in_ms: Some(1) };
            w.call(1, Request::Fail(Box::new(failed))).unwrap();
        }),
        ("release", |w, one| drop(w.call(1, Request::Release(held(one))).unwrap())),
        ("lapse", |w, _| w.to(w.now_ms + 32_000)),
    ];
    for class in [Class::System, Class::Batch] {
        for (name, end) in ends {
            let mut w = world(4, Some(3));
            submit(&mut w, |s| (s.cost, s.class) = (3, class));
            let found = dispatch(&mut w, 0, &UPSTREAMS, 5);
            assert_eq!(found.len(), 1, "{name}");
            let batch = if class == Class::Batch { 3 } else { 0 };
            assert_eq!(in_use(&w), [3, batch], "{name}");
            end(&mut w, &found[0]);
            assert_eq!(in_use(&w), [0, 0], "{name}");
        }
    }
}

fn give_back(one: &Dispatched) -> Request {
    let (class, placed) = (one.job.class, one.placed.clone());
    Request::GiveBack(GiveBack { job: one.job.id, token: one.job.token, class, placed })
}

fn findings(w: &mut World) -> Vec<Finding> {
    let (mut found, mut cursor) = (Vec::new(), None);
    loop {
        match w.call(0, Request::Audit { cursor, repair: true }) {
            Ok(Response::Audited(page)) => {
                found.extend(page.findings);
                if page.next.is_none() {
                    return found;
                }
                cursor = page.next;
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_cancelled_job_keeps_its_slots_until_its_call_is_over_or_its_lease_would_be() {
    for class in [Class::System, Class::Batch] {
        let mut w = world(4, Some(3));
        let id = submit(&mut w, |s| (s.cost, s.class, s.lease_ms) = (3, class, Some(8_000)));
        let one = dispatch(&mut w, 0, &UPSTREAMS, 5).remove(0);
        let held = in_use(&w);
        // While the lease stands, nothing is given back under it.
        assert!(matches!(w.call(1, give_back(&one)), Err(Failure::Invalid { field: "token", .. })));
        w.call(1, Request::Cancel { tenant: T.into(), job: id }).unwrap();
        assert_eq!(in_use(&w), held, "the upstream is still being called");
        submit(&mut w, |s| (s.cost, s.class) = (3, class));
        assert!(dispatch(&mut w, 1, &UPSTREAMS, 5).is_empty(), "and nobody else is sent there");
        assert_eq!(findings(&mut w), []);
        // Retried at once: a life of its own, which the old one's slots are not a part of.
        w.call(1, Request::Retry { tenant: T.into(), job: id }).unwrap();
        assert_eq!(findings(&mut w), []);
        assert_eq!(in_use(&w), held);
        assert_eq!(w.call(0, give_back(&one)), Ok(Response::GivenBack));
        assert_eq!(w.call(1, give_back(&one)), Ok(Response::GivenBack), "a repeat is answered the same");
        assert_eq!(in_use(&w), [0, 0]);
        let next = dispatch(&mut w, 1, &UPSTREAMS, 5).remove(0);
        assert_eq!(w.call(0, give_back(&one)), Ok(Response::GivenBack));
        assert_eq!(in_use(&w), held, "another lease's slots are not touched");
        w.call(1, Request::Cancel { tenant: T.into(), job: next.job.id }).unwrap();
        // Its server never says anything.
        w.to(w.now_ms + 40_000);
        assert_eq!(dispatch(&mut w, 0, &UPSTREAMS, 5).len(), 1);
        assert_eq!(findings(&mut w), []);
    }
}

#[test]
fn what_a_job_holds_is_not_given_back_when_its_cancellation_is_lost() {
    let mut w = world(4, Some(3));
    submit(&mut w, |s| (s.cost, s.lease_ms) = (3, Some(8_000)));
    let one = dispatch(&mut w, 0, &UPSTREAMS, 5).remove(0);
    let held = in_use(&w);
    w.call(1, Request::Cancel { tenant: T.into(), job: one.job.id }).unwrap();
    let given = w.ask(0, give_back(&one));
    assert!(w.perform(0), "it has read that the lease is gone");
    while w.store.record(&keys::lease(one.job.id)).is_none() {
        assert_eq!(w.store.lose_newest(1), 1);
    }
    w.settle();
    assert!(matches!(w.answer(0, given), Some(Err(Failure::Invalid { field: "token", .. }))));
    assert_eq!(in_use(&w), held);
    assert_eq!(findings(&mut w), []);
}

#[test]
fn what_a_lost_claim_held_is_not_given_back_once_a_late_copy_of_it_has_come() {
    let mut w = world(4, Some(3));
    submit(&mut w, |s| (s.cost, s.lease_ms) = (3, Some(8_000)));
    let id = w.ask(0, asked(&UPSTREAMS, 1, 0));
    let mut copy = None;
    let one = loop {
        match w.answer(0, id) {
            Some(Ok(Response::Dispatched(mut jobs))) => break jobs.remove(0),
            Some(other) => panic!("{other:?}"),
            None => {
                let next = w.replicas[0].calls.front().map(|(_, op)| op.clone());
                copy = next.filter(|op| matches!(op, StoreOp::Commit(_))).or(copy);
                assert!(w.perform(0));
            }
        }
    };
    let held = in_use(&w);
    while w.store.record(&keys::lease(one.job.id)).is_some() {
        assert_eq!(w.store.lose_newest(1), 1);
    }
    assert_eq!(in_use(&w), [0, 0]);
    w.now_ms += 300;
    w.apply(&copy.unwrap()).unwrap();
    assert_eq!(in_use(&w), held);
    assert!(matches!(w.call(0, give_back(&one)), Err(Failure::Invalid { field: "token", .. })));
    assert_eq!(in_use(&w), held);
}

/// More than one answer of the store has room for: some are read later, while others are known.
#[test]
fn a_state_that_is_recorded_while_payloads_are_read_has_none_of_them() {
    const MARKER: &str = "contents-4711";
    let mut w = world(20, None);
    let large = Content::json(format!("\"{}\"", MARKER.repeat((1 << 20) / MARKER.len())));
    for _ in 0..10 {
        submit(&mut w, |s| s.payload = large.clone());
    }
    let id = w.ask(0, asked(&UPSTREAMS, 10, 0));
    let mut states = 0;
    let found = loop {
        let state = Recorder::begin("this", 0, &w.replicas[0].replica);
        assert!(!state.windows(MARKER.len()).any(|bytes| bytes == MARKER.as_bytes()), "in state {states}");
        states += 1;
        match w.answer(0, id) {
            Some(outcome) => break outcome,
            None => assert!(w.perform(0)),
        }
    };
    assert!(matches!(found, Ok(Response::Dispatched(jobs)) if jobs.len() == 10));
    assert!(states >= 5, "{states}");
}

#[test]
fn no_more_are_claimed_than_there_are_slots_for_and_batch_leaves_its_share() {
    let mut w = world(4, Some(2));
    for class in [Class::Batch, Class::Batch, Class::Batch, Class::Batch] {
        submit(&mut w, |s| s.class = class);
    }
    assert_eq!(dispatch(&mut w, 0, &UPSTREAMS, 9).len(), 2);
    assert_eq!(dispatch(&mut w, 1, &UPSTREAMS, 9).len(), 0);
    for _ in 0..3 {
        submit(&mut w, |s| s.class = Class::Interactive);
    }
    let urgent = dispatch(&mut w, 1, &UPSTREAMS, 9);
    assert_eq!((urgent.len(), in_use(&w)), (2, [4, 2]), "batch jobs do not pass the third");
    assert!(urgent.iter().all(|one| one.job.class == Class::Interactive));
    // Who waits for a slot comes before queued work of its class.
    let wanted = Acquire {
        tenant: T.into(),
        pool: P.into(),
        slot: None,
        class: Class::Interactive,
        cost: 1,
        holder: None,
        lease_ms: None,
        wait_ms: 60_000,
    };
    let call = w.ask(0, Request::Acquire(Box::new(wanted)));
    let next = poll(&mut w, 1);
    complete(&mut w, 1, &urgent[0]);
    assert!(matches!(w.answer(0, call), Some(Ok(Response::Slot { .. }))));
    assert!(had(&mut w, 1, next).is_none());
    complete(&mut w, 0, &urgent[1]);
    let last = had(&mut w, 1, next).expect("the slot that came free wakes whoever runs jobs");
    assert_eq!(last[0].job.class, Class::Interactive);
}

#[test]
fn a_heartbeat_extends_lease_and_slots_and_neither_comes_back_once_it_is_lost() {
    let mut w = world(1, None);
    submit(&mut w, |s| s.lease_ms = Some(2_000));
    let one = dispatch(&mut w, 0, &UPSTREAMS, 1).remove(0);
    for _ in 0..5 {
        w.to(w.now_ms + 1_500);
        assert!(matches!(beat(&mut w, 1, &one), Ok(Response::Beat { lease_expires_at: Some(_), .. })));
    }
    let ends = |w: &World, index| w.store.members(&index)[0].0;
    assert_eq!(ends(&w, keys::holders(P)), ends(&w, keys::LEASES));
    // The slot's entry is lost: its room may be somebody else's now.
    let unit = w.store.members(&keys::holders(P))[0].1.clone();
    assert!(w.store.drop_member(&keys::holders(P), &unit));
    assert_eq!(beat(&mut w, 0, &one), Err(Failure::SlotLost));
    assert_eq!(w.call(0, Request::Release(held(&one))), Ok(Response::Released { status: Status::Queued }));
    // Frozen past its lease: the job and the slot are another's.
    let two = dispatch(&mut w, 1, &UPSTREAMS, 1).remove(0);
    w.to(w.now_ms + 4_000);
    let three = dispatch(&mut w, 0, &UPSTREAMS, 1).remove(0);
    assert_eq!(two.job.id, three.job.id);
    assert_eq!(beat(&mut w, 1, &two), Err(Failure::LeaseLost));
    assert_eq!(in_use(&w), [1, 0]);
}

#[test]
fn work_that_stays_on_the_premises_goes_nowhere_else() {
    let mut w = world(9, None);
    let kept = submit(&mut w, |s| s.on_prem = true);
    assert!(dispatch(&mut w, 0, &["cloud"], 9).is_empty());
    let found = dispatch(&mut w, 0, &UPSTREAMS, 9);
    assert_eq!((found[0].job.id, found[0].placed.upstream.as_str(), found[0].on_prem), (kept, "here", true));

    let far = |tenant: &str, on_prem| {
        let mut asked = Submit::new(tenant, "far", Content::json("1"));
        asked.on_prem = on_prem;
        asked
    };
    assert_eq!(w.submit(0, far(T, true)), Err(Failure::NoPlacement));
    assert_eq!(w.submit(0, far("kept", false)), Err(Failure::NoPlacement), "whatever the job says");
    assert!(w.submit(0, far(T, false)).is_ok());
    // Nobody routes this queue: its workers are where their operator put them.
    let mut other = far(T, true);
    other.queue = "other".into();
    assert!(w.submit(0, other).is_ok());

    let jobs = w.store.records(b"job/").count();
    let group = |children| CreateGroup {
        common: far(T, false),
        children,
        max_parallel: None,
        mode: Mode::CollectAll,
        sealed: false,
        open_timeout_ms: None,
    };
    let refused = w.call(0, Request::CreateGroup(Box::new(group(vec![far(T, false), far(T, true)]))));
    assert_eq!(refused, Err(Failure::NoPlacement));
    let Ok(Response::GroupCreated(open)) = w.call(0, Request::CreateGroup(Box::new(group(vec![far(T, false)])))) else {
        panic!("it can be placed");
    };
    let page = vec![far(T, false), far(T, true)];
    let more = Request::ExtendGroup { tenant: T.into(), group: open.id, from: 1, children: page };
    assert_eq!(w.call(0, more), Err(Failure::NoPlacement));
    assert_eq!(w.store.records(b"job/").count(), jobs + 1, "nothing of what was refused was created");
}

#[test]
fn a_hold_is_everybodys_and_then_one_call_tells() {
    let mut w = world(9, None);
    for _ in 0..4 {
        submit(&mut w, |s| s.on_prem = true);
    }
    let first = dispatch(&mut w, 0, &UPSTREAMS, 1).remove(0);
    hold(&mut w, 0, "here", 3_000);
    // A shorter one does not end it.
    hold(&mut w, 1, "here", 10);
    w.call(0, Request::Release(held(&first))).unwrap();
    let waiting = poll(&mut w, 1);
    w.to(w.now_ms + 2_500);
    assert!(dispatch(&mut w, 0, &UPSTREAMS, 9).is_empty() && had(&mut w, 1, waiting).is_none());
    w.to(w.now_ms + 600);
    let probe = had(&mut w, 1, waiting).expect("whoever waits looks when the hold ends").remove(0);
    assert!(probe.placed.probe && probe.job.id == first.job.id);
    assert!(dispatch(&mut w, 0, &UPSTREAMS, 9).is_empty(), "one at a time");
    let Ok(Response::Upstreams(views)) = w.call(0, Request::Upstreams) else { panic!("no views") };
    assert!(views[0].probing && views[0].held_until.is_some() && views[1].held_until.is_none());
    // It fails: the next is tried.
    let (held_by, error) = (held(&probe), ErrorInfo::default());
    let failed = Fail { held: held_by, error, retryable: true, retry_in_ms: Some(60_000) };
    w.call(1, Request::Fail(Box::new(failed))).unwrap();
    let again = dispatch(&mut w, 0, &UPSTREAMS, 9);
    assert_eq!((again.len(), again[0].placed.probe), (1, true));
    complete(&mut w, 1, &again[0]);
    let rest = dispatch(&mut w, 0, &UPSTREAMS, 9);
    assert_eq!((rest.len(), rest[0].placed.probe), (2, false), "the hold is over");
}

#[test]
fn a_claim_by_name_whose_reply_is_lost_is_had_once() {
    for applied in [true, false] {
        let mut w = world(2, None);
        submit(&mut w, |_| {});
        submit(&mut w, |_| {});
        let call = w.ask(0, asked(&UPSTREAMS, 9, 0));
        loop {
            let (id, op) = w.replicas[0].calls.pop_front().expect("it asks the store");
            if matches!(op, StoreOp::Commit(_)) {
                if applied {
                    w.apply(&op).unwrap();
                }
                w.input(0, Input::StoreReply { id, reply: Err(StoreError::Unknown) });
                break;
            }
            let reply = w.apply(&op);
            w.input(0, Input::StoreReply { id, reply });
        }
        w.to(w.now_ms + 4_500);
        let found = had(&mut w, 0, call).expect("it is answered");
        assert_eq!((found.len(), in_use(&w)), (2, [2, 0]), "applied at first: {applied}");
        for one in &found {
            complete(&mut w, 1, one);
        }
        assert_eq!(in_use(&w), [0, 0]);
    }
}

/// The last slot is somebody's when the claim is sent again, and free when its first copy arrives.
#[test]
fn a_claim_that_was_refused_is_not_applied_behind_its_askers_back() {
    let mut w = world(1, None);
    let job = submit(&mut w, |_| {});
    let call = w.ask(1, asked(&UPSTREAMS, 1, 0));
    let (id, copy) = loop {
        let (id, op) = w.replicas[1].calls.pop_front().expect("it asks the store");
        if matches!(op, StoreOp::Commit(_)) {
            break (id, op);
        }
        let reply = w.apply(&op);
        w.input(1, Input::StoreReply { id, reply });
    };
    let slot = Acquire {
        tenant: T.into(),
        pool: P.into(),
        slot: Some("s".into()),
        class: Class::Interactive,
        cost: 1,
        holder: None,
        lease_ms: None,
        wait_ms: 0,
    };
    let Ok(Response::Slot { id: taken, .. }) = w.call(0, Request::Acquire(Box::new(slot))) else { panic!("no slot") };
    w.input(1, Input::StoreReply { id, reply: Err(StoreError::Unknown) });
    w.to(w.now_ms + 1_500);
    assert_eq!(in_use(&w), [1, 0], "what was sent again was refused");
    w.call(0, Request::ReleaseSlot { tenant: T.into(), pool: P.into(), slot: taken }).unwrap();
    w.apply(&copy).unwrap();
    assert_eq!(in_use(&w), [1, 0], "now its first copy was applied");
    w.to(w.now_ms + 6_000);
    let found = had(&mut w, 1, call).expect("it is answered");
    assert_eq!(found.iter().map(|one| one.job.id).collect::<Vec<_>>(), [job]);
}

#[test]
fn bad_requests_for_jobs_are_refused() {
    let mut w = world(1, None);
    assert_eq!(w.call(0, asked(&["nowhere"], 1, 0)), Err(Failure::UnknownUpstream));
    let nowhere = HoldUpstream { upstream: "nowhere".into(), for_ms: 1 };
    assert_eq!(w.call(0, Request::HoldUpstream(nowhere)), Err(Failure::UnknownUpstream));
    for (field, request) in [
        ("upstreams", asked(&[], 1, 0)),
        ("max", asked(&UPSTREAMS, 0, 0)),
        ("wait_ms", asked(&UPSTREAMS, 1, u64::MAX)),
        ("for_ms", Request::HoldUpstream(HoldUpstream { upstream: "here".into(), for_ms: 0 })),
    ] {
        match w.call(0, request) {
            Err(Failure::Invalid { field: blamed, .. }) => assert_eq!(blamed, field),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_queue_deadline_that_comes_while_the_claim_is_on_its_way_counts() {
    let mut w = world(1, None);
    let job = submit(&mut w, |s| s.queue_ttl_ms = Some(1_000));
    let call = w.ask(0, asked(&UPSTREAMS, 1, 0));
    while !matches!(w.replicas[0].calls.front(), Some((_, StoreOp::Commit(_)))) {
        assert!(w.perform(0));
    }
    w.now_ms += 1_500;
    w.settle();
    assert_eq!(had(&mut w, 0, call), Some(Vec::new()));
    w.to(w.now_ms + 1_500);
    match w.call(0, Request::Get { tenant: T.into(), job }) {
        Ok(Response::Job(view)) => assert_eq!((view.status, view.deliveries), (Status::Expired, 0)),
        other => panic!("{other:?}"),
    }
    assert_eq!(in_use(&w), [0, 0]);
}

/// C16 with its numbers, on a clock that is handed in: an upstream of four slots answers 429 with `Retry-After: 120` for
/// 300 s. Two servers run twenty jobs of one attempt each, and one whose age is limited.
#[test]
fn c16_back_pressure_is_heeded_by_all_replicas_and_costs_no_attempt() {
    const PAUSE_MS: u64 = 120_000;
    const CALL_MS: u64 = 1_000;
    let mut w = world(4, None);
    let begun = w.now_ms;
    // It is first, and so the one that is tried again and again.
    let aged = submit(&mut w, |s| (s.queue, s.max_age_ms) = ("far".into(), Some(150_000)));
    let mut jobs: Vec<JobId> = Vec::new();
    for _ in 0..20 {
        jobs.push(submit(&mut w, |s| (s.queue, s.max_attempts) = ("far".into(), Some(1))));
    }
    let mut polls: [Option<RequestId>; 2] = [None; 2];
    // Until when each call lasts, at which server, and what for.
    let mut calls: Vec<(u64, usize, Dispatched)> = Vec::new();
    let mut began: Vec<u64> = Vec::new();
    let mut first_429 = None;
    let mut refused = 0;
    while w.now_ms < begun + 900_000 {
        for (at, poll) in polls.iter_mut().enumerate() {
            let queues = vec![(T.into(), "far".into())];
            let asked =
                Dispatch { worker: "s".into(), queues, upstreams: vec!["cloud".into()], max: 4, wait_ms: 60_000 };
            let id = *poll.get_or_insert_with(|| w.ask(at, Request::Dispatch(Box::new(asked))));
            w.settle();
            let Some(found) = had(&mut w, at, id) else { continue };
            *poll = None;
            for one in found {
                began.push(w.now_ms);
                calls.push((w.now_ms + CALL_MS, at, one));
            }
        }
        assert!(calls.len() <= 4, "four slots");
        let now = w.now_ms;
        let (over, rest): (Vec<_>, Vec<_>) = calls.into_iter().partition(|(until, ..)| *until <= now);
        calls = rest;
        for (_, at, one) in over {
            if w.now_ms < begun + 300_000 {
                first_429.get_or_insert(w.now_ms);
                refused += 1;
                hold(&mut w, at, "cloud", PAUSE_MS);
                assert!(matches!(w.call(at, Request::Release(held(&one))), Ok(Response::Released { .. })));
            } else {
                complete(&mut w, at, &one);
                let freed = Request::FreeUpstream { upstream: "cloud".into() };
                assert_eq!(w.call(at, freed), Ok(Response::UpstreamFreed));
            }
        }
        let state = |w: &mut World, job| match w.call(0, Request::Get { tenant: T.into(), job }) {
            Ok(Response::Job(job)) => (job.status, job.attempt, job.reason),
            other => panic!("{other:?}"),
        };
        if calls.is_empty() && jobs.iter().all(|job| state(&mut w, *job).0 == Status::Succeeded) {
            assert!(jobs.iter().all(|job| state(&mut w, *job).1 == 1), "a 429 counts as no attempt");
            let (status, _, reason) = state(&mut w, aged);
            assert_eq!((status, reason.as_deref()), (Status::Dead, Some("max_age")), "its age was limited");
            break;
        }
        w.to(w.now_ms + 100);
    }
    let first = first_429.unwrap();
    assert!(w.now_ms < begun + 900_000, "not all had succeeded by then");
    let early = began.iter().filter(|t| **t < first + PAUSE_MS).count();
    assert!(early <= 4, "{early} calls before the pause was over");
    // Afterwards one at a time, and none sooner than a pause after the one before that was refused.
    let probes: Vec<u64> = began.iter().copied().filter(|t| *t >= first + PAUSE_MS && *t < begun + 300_000).collect();
    assert!(probes.windows(2).all(|pair| pair[1] >= pair[0] + PAUSE_MS), "{probes:?}");
    assert_eq!(refused, early + probes.len());
    assert!(!probes.is_empty());
}

fn refused(w: &mut World, asked: Submit) -> String {
    match w.submit(0, asked) {
        Err(Failure::Invalid { field: "cost", detail }) => detail,
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_costs_more_than_any_pool_has_is_refused_and_holds_nobody_up() {
    let mut w = world(4, Some(3));
    let asked = |cost, class, key: Option<&str>| Submit {
        cost,
        class,
        key: key.map(String::from),
        ..Submit::new(T, "q", Content::json("1"))
    };
    assert_eq!(refused(&mut w, asked(5, Class::System, None)), "is 5, the pool `gpu` has 4 for class system");
    assert_eq!(refused(&mut w, asked(4, Class::Batch, Some("k"))), "is 4, the pool `gpu` has 3 for class batch");
    let kept = w.submit(0, asked(4, Class::System, Some("k"))).unwrap();
    // The pool shrinks: what was submitted before is still found by its key, and nothing like it is taken.
    set(&mut w, 3, None);
    let (Response::Created(kept), Response::Existing(again)) =
        (kept, w.submit(1, asked(4, Class::System, Some("k"))).unwrap())
    else {
        panic!("not the same");
    };
    assert_eq!(kept.id, again.id);
    refused(&mut w, asked(4, Class::System, Some("another")));
    let why = |w: &mut World, id| match w.call(1, Request::Why { tenant: T.into(), job: id }) {
        Ok(Response::Why(why)) => why,
        other => panic!("{other:?}"),
    };
    assert_eq!(why(&mut w, kept.id), Why::NoSlot { pool: P.into(), in_use: 0, total: 3 });
    // A queue that workers serve, and a group as a whole.
    w.submit(0, Submit { cost: 900, ..Submit::new(T, "workers", Content::json("1")) }).unwrap();
    let child = |cost| Submit { cost, ..Submit::new(T, "q", Content::json("1")) };
    let group = |children: Vec<Submit>, sealed| CreateGroup {
        common: Submit::new(T, "q", Content::json("1")),
        children,
        mode: Mode::CollectAll,
        max_parallel: None,
        sealed,
        open_timeout_ms: None,
    };
    let create = |w: &mut World, group| w.call(0, Request::CreateGroup(Box::new(group)));
    let before = w.store.records(b"").count();
    assert!(matches!(
        create(&mut w, group(vec![child(1), child(4)], true)),
        Err(Failure::Invalid { field: "cost", .. })
    ));
    assert_eq!(w.store.records(b"").count(), before, "nothing is created");
    let Ok(Response::GroupCreated(open)) = create(&mut w, group(vec![child(3)], false)) else { panic!("not created") };
    let extend = |w: &mut World, children| {
        w.call(0, Request::ExtendGroup { tenant: T.into(), group: open.id, from: 1, children })
    };
    assert!(matches!(extend(&mut w, vec![child(4)]), Err(Failure::Invalid { field: "cost", .. })));
    assert!(matches!(extend(&mut w, vec![child(2)]), Ok(Response::Group(_))));
}

#[test]
fn what_stands_in_the_way_of_the_first_is_told() {
    let mut w = world(1, None);
    let (first, second) = (submit(&mut w, |_| ()), submit(&mut w, |_| ()));
    let why = |w: &mut World, id| match w.call(1, Request::Why { tenant: T.into(), job: id }) {
        Ok(Response::Why(why)) => why,
        other => panic!("{other:?}"),
    };
    assert_eq!(why(&mut w, first), Why::NoWorker);
    assert_eq!(why(&mut w, second), Why::Behind { ahead: 1 });
    let one = dispatch(&mut w, 0, &UPSTREAMS, 1).remove(0);
    assert_eq!(why(&mut w, second), Why::NoSlot { pool: P.into(), in_use: 1, total: 1 });
    let holders = match w.call(0, Request::Pool { tenant: T.into(), pool: P.into() }) {
        Ok(Response::Pool(pool)) => pool.holders,
        other => panic!("{other:?}"),
    };
    let [held] = &*holders else { panic!("{holders:?}") };
    assert_eq!((&held.of, held.holder.as_deref(), held.cost), (&SlotOf::Job(first), Some("server"), 1));
    complete(&mut w, 0, &one);
    hold(&mut w, 0, "here", 5_000);
    assert_eq!(why(&mut w, second), Why::NoWorker, "the other upstream may take it");
    hold(&mut w, 0, "cloud", 3_000);
    assert!(matches!(why(&mut w, second), Why::OnHold { upstream, .. } if upstream == "cloud"));
}
