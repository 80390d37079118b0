//! Goal: what a newer release has written is not taken for absent, corrupt or ended, whoever meets it. Method:
//! each record of a running job in turn is one of a newer release; every request about the job is refused so,
//! sweeps and scrubs pass it over, and when it can be read again the job ends as if nothing had been.
#![allow(clippy::panic, clippy::unwrap_used, reason = "a test says what is wrong by panicking")]

mod support;

use leasehold_core::codec;
use leasehold_core::group::record::Mode;
use leasehold_core::ids::{JobId, Token};
use leasehold_core::opaque::Content;
use leasehold_core::request::{Beat, Claim, Complete, CreateGroup, Fail, Held, Submit};
use leasehold_core::store::{StoreError, keys};
use leasehold_core::{Failure, Input, Name, Outcome, Request, Response, StoreAnswer};
use support::World;

fn running() -> (World, JobId, Token) {
    let mut world = World::new(2);
    let mut submit = Submit::new("default", "q", Content::json("1"));
    submit.key = Some("k".into());
    submit.max_attempts = Some(3);
    world.submit(0, submit).unwrap();
    // A failure first, so that it has a history.
    let first = world.claim(0, "w", "q", 1, Some(60_000)).remove(0);
    let held = Held { tenant: "default".into(), job: first.id, token: Some(first.token) };
    let fail = Fail { held, error: error(), retryable: true, retry_in_ms: Some(1_000) };
    world.call(0, Request::Fail(Box::new(fail))).unwrap();
    world.to(20_000);
    let second = world.claim(0, "w", "q", 1, Some(5_000)).remove(0);
    let held = Held { tenant: "default".into(), job: second.id, token: Some(second.token) };
    let beat = Beat { held, progress: Some(Content::json("1").data), seq: None };
    world.call(0, Request::Heartbeat(beat)).unwrap();
    (world, second.id, second.token)
}

fn error() -> leasehold_core::job::record::ErrorInfo {
    leasehold_core::job::record::ErrorInfo { message: "no".into(), kind: None, detail: None }
}

/// What the store has of jobs; the names of queues are looked at anew now and then.
fn books(world: &World) -> String {
    let mut text = String::new();
    for (key, record) in world.store.records(b"").filter(|(key, _)| !key.starts_with(b"claim/")) {
        text += &format!("{key} {:?} {:?}\n", record.version, record.bytes);
    }
    for (name, index) in world.store.books().iter().filter(|(name, _)| **name != keys::NAMES) {
        text += &format!("{name} {:?}\n", index.iter().collect::<Vec<_>>());
    }
    text
}

#[test]
fn a_request_is_refused() {
    let (_, job, token) = running();
    let held = || Held { tenant: "default".into(), job, token: Some(token) };
    let tenant = || String::from("default");
    let result = Some(Content::json("2"));
    let fail = Fail { held: held(), error: error(), retryable: true, retry_in_ms: None };
    let about_all = [
        Request::Complete(Box::new(Complete { held: held(), result })),
        Request::Fail(Box::new(fail)),
        Request::Release(held()),
        Request::Heartbeat(Beat { held: held(), progress: None, seq: None }),
        Request::Cancel { tenant: tenant(), job },
    ];
    for record in [keys::job(job), keys::lease(job), keys::history(job)] {
        for request in &about_all {
            let (mut world, ..) = running();
            world.store.corrupt(&record, codec::newer());
            let before = books(&world);
            // At the replica that did not hand it out: the other would know enough without a read.
            let outcome = world.call(1, request.clone());
            let refused = matches!(outcome, Err(Failure::NewerFormat { .. })) && books(&world) == before;
            // What does not need the history leaves it as it is.
            let without = outcome.is_ok() && record == keys::history(job) && at(&world, &record) == codec::newer();
            assert!(refused || without, "{record} {request:?} {outcome:?}");
        }
    }
}

#[test]
fn time_passes_it_over() {
    let (_, job, token) = running();
    for record in [keys::job(job), keys::lease(job), keys::history(job), keys::progress(job)] {
        let (mut world, ..) = running();
        let bytes = at(&world, &record);
        world.store.corrupt(&record, codec::newer());
        let before = books(&world);
        // Past the lease's end, and some rounds of the scrub.
        world.to(200_000);
        assert_eq!(books(&world), before, "{record}");
        world.store.corrupt(&record, bytes);
        let held = Held { tenant: "default".into(), job, token: Some(token) };
        world.restart(1, 9);
        let complete = Request::Complete(Box::new(Complete { held, result: None }));
        assert_eq!(world.call(1, complete), Ok(Response::Completed), "{record}");
    }
}

#[test]
fn a_job_is_not_lost_with_a_payload_that_cannot_be_read() {
    let (mut world, job, _) = running();
    let bytes = at(&world, &keys::payload(job));
    world.store.corrupt(&keys::payload(job), codec::newer());
    // Its lease lapses, and it is offered again.
    world.to(60_000);
    let outcome = ask(&mut world);
    assert!(outcome.is_err(), "{outcome:?}");
    let seen = world.call(1, Request::Get { tenant: "default".into(), job });
    assert!(format!("{seen:?}").contains("status: Queued"), "{seen:?}");
    world.store.corrupt(&keys::payload(job), bytes);
    world.restart(0, 9);
    assert_eq!(world.claim(0, "w", "q", 1, Some(1_000)).len(), 1);
}

#[test]
fn a_stopped_group_leaves_what_it_cannot_read_to_others() {
    let mut world = World::new(1);
    let child = || Submit::new("default", "q", Content::json("1"));
    let asked = CreateGroup {
        common: child(),
        children: vec![child()],
        max_parallel: None,
        mode: Mode::CollectAll,
        sealed: true,
        open_timeout_ms: None,
    };
    let Ok(Response::GroupCreated(group)) = world.call(0, Request::CreateGroup(Box::new(asked))) else {
        panic!("it is created")
    };
    world.to(2_000);
    let leased = world.claim(0, "w", "q", 1, Some(600_000)).remove(0);
    let bytes = at(&world, &keys::lease(leased.id));
    world.store.corrupt(&keys::lease(leased.id), codec::newer());
    world.call(0, Request::CancelGroup { tenant: "default".into(), group: group.id }).unwrap();
    world.to(60_000);
    assert_eq!(at(&world, &keys::lease(leased.id)), codec::newer());
    world.store.corrupt(&keys::lease(leased.id), bytes);
    world.restart(0, 9);
    world.to(90_000);
    let seen = world.call(0, Request::Get { tenant: "default".into(), job: leased.id });
    assert!(format!("{seen:?}").contains("status: Cancelled"), "{seen:?}");
}

#[test]
fn what_is_put_back_keeps_its_queue_deadline() {
    let mut world = World::new(1);
    let mut submit = Submit::new("default", "q", Content::json("1"));
    submit.queue_ttl_ms = Some(30_000);
    let Ok(Response::Created(view)) = world.submit(0, submit) else { panic!("it is created") };
    let before = world.store.books().score(&keys::TTL, &keys::member(view.id));
    world.store.corrupt(&keys::payload(view.id), codec::newer());
    assert!(ask(&mut world).is_err());
    assert!(before.is_some());
    assert_eq!(world.store.books().score(&keys::TTL, &keys::member(view.id)), before);
}

#[test]
fn a_claim_does_not_deny_what_it_took() {
    for bytes in [codec::newer(), "nonsense".into()] {
        let mut world = World::new(1);
        world.submit(0, Submit::new("default", "q", Content::json("1"))).unwrap();
        let asked = world.ask(0, claim());
        while !world.store.records(b"claim/").any(|_| true) {
            // Whatever is applied, its reply is lost.
            let Some((id, op)) = world.replicas[0].calls.pop_front() else { panic!("nothing is taken") };
            let reply = world.apply(&op).and_then(|answer| match answer {
                StoreAnswer::Commit(_) => Err(StoreError::Unknown),
                read => Ok(read),
            });
            world.input(0, Input::StoreReply { id, reply });
        }
        let receipt = world.store.records(b"claim/").next().unwrap().0.clone();
        world.store.corrupt(&receipt, bytes);
        world.to(20_000);
        let outcome = world.answer(0, asked);
        assert!(matches!(outcome, Some(Err(Failure::OutcomeUnknown { .. }))), "{outcome:?}");
        assert_eq!(world.store.records(b"lease/").count(), 1);
    }
}

#[test]
fn a_repeated_claim_leaves_alone_what_the_first_may_have_told() {
    let mut world = World::new(2);
    world.submit(0, Submit::new("default", "q", Content::json("1"))).unwrap();
    let named = || match claim() {
        Request::Claim(asked) => Request::Claim(Box::new(Claim { claim_id: Some("id".into()), ..*asked })),
        other => other,
    };
    let Ok(Response::Claimed(jobs)) = world.call(0, named()) else { panic!("it is claimed") };
    assert_eq!(jobs.len(), 1);
    world.store.corrupt(&keys::job(jobs[0].id), codec::newer());
    assert_eq!(world.call(1, named()), Ok(Response::Claimed(Vec::new())));
    assert_eq!(world.store.records(b"lease/").count(), 1);
}

/// A claim that may be refused.
fn ask(world: &mut World) -> Outcome {
    world.call(0, claim())
}

fn claim() -> Request {
    let asked = Claim {
        tenant: "default".into(),
        queues: vec!["q".into()],
        worker: "w".into(),
        max: 1,
        wait_ms: 0,
        lease_ms: None,
        claim_id: None,
    };
    Request::Claim(Box::new(asked))
}

fn at(world: &World, key: &Name) -> bytes::Bytes {
    world.store.records(key).next().unwrap().1.bytes.clone()
}
