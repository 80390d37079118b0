//! Goal: a group's children are released up to its limit, each is counted once by whatever way it ends, and
//! the group is final once, with every outcome in it. Method: replicas on one model store, without faults
//! but for those that a test asks for.

#![allow(clippy::panic, clippy::unwrap_used, reason = "a test says what is wrong by panicking")]

mod support;

use std::sync::Arc;

use leasehold_core::group::record::{GroupStatus, Mode};
use leasehold_core::ids::GroupId;
use leasehold_core::job::record::{ChildOutcome, Class, ErrorInfo, Status};
use leasehold_core::opaque::Content;
use leasehold_core::request::{ChildState, ChildView, Complete, CreateGroup, Fail, GroupView, Held, Leased, Submit};
use leasehold_core::store::{Commit, ScoreAt, Store as _, StoreError, Txn, Write, keys};
use leasehold_core::{Failure, Input, JobId, Name, Request, Response, StoreOp};
use support::World;

const T: &str = "default";

fn children(n: u32) -> Vec<Submit> {
    (0..n).map(|i| Submit::new(T, "q", Content::json(i.to_string()))).collect()
}

fn asked(n: u32, max: u64) -> CreateGroup {
    CreateGroup {
        common: Submit::new(T, "q", Content::json("null")),
        children: children(n),
        max_parallel: Some(max),
        mode: Mode::CollectAll,
        sealed: true,
        open_timeout_ms: None,
    }
}

fn create(w: &mut World, asked: CreateGroup) -> GroupId {
    match w.call(0, Request::CreateGroup(Box::new(asked))) {
        Ok(Response::GroupCreated(group)) => group.id,
        other => panic!("{other:?}"),
    }
}

fn group(w: &mut World, at: usize, id: GroupId) -> GroupView {
    match w.call(at, Request::Group { tenant: T.into(), group: id, wait_ms: 0 }) {
        Ok(Response::Group(group)) => *group,
        other => panic!("{other:?}"),
    }
}

fn all_children(w: &mut World, id: GroupId, contents: bool) -> Vec<ChildView> {
    let (mut all, mut from) = (Vec::new(), 0);
    loop {
        let ask = Request::Children { tenant: T.into(), group: id, from, limit: 7, contents };
        match w.call(0, ask) {
            Ok(Response::Children { children, next, .. }) => {
                all.extend(children);
                match next {
                    Some(next) => from = next,
                    None => return all,
                }
            }
            other => panic!("{other:?}"),
        }
    }
}

fn held(job: &Leased) -> Held {
    Held { tenant: T.into(), job: job.id, token: Some(job.token) }
}

fn complete(w: &mut World, at: usize, job: &Leased) {
    let result = Some(Content::json(format!("\"{}\"", job.id)));
    w.call(at, Request::Complete(Box::new(Complete { held: held(job), result }))).unwrap();
}

fn fail(w: &mut World, job: &Leased) {
    let error = ErrorInfo { message: "no".into(), ..ErrorInfo::default() };
    let fail = Fail { held: held(job), error, retryable: false, retry_in_ms: None };
    w.call(0, Request::Fail(Box::new(fail))).unwrap();
}

fn finalized(w: &mut World) -> usize {
    let ask = Request::Events { tenant: T.into(), after: Default::default(), limit: 1_000, wait_ms: 0 };
    match w.call(0, ask) {
        Ok(Response::Events { events, .. }) => {
            events.iter().filter(|e| e.event.kind.text() == "group.finalized").count()
        }
        other => panic!("{other:?}"),
    }
}

fn balanced(w: &mut World) {
    let mut cursor = None;
    loop {
        match w.call(0, Request::Audit { cursor, repair: false }) {
            Ok(Response::Audited(page)) => {
                assert_eq!(page.findings, []);
                cursor = page.next;
            }
            other => panic!("{other:?}"),
        }
        if cursor.is_none() {
            return;
        }
    }
}

#[test]
fn children_run_in_order_up_to_the_limit_and_the_group_ends_once() {
    let mut w = World::new(3);
    let id = create(&mut w, asked(20, 3));
    let mut seen = Vec::new();
    for round in 0.. {
        let jobs = w.claim(round % 3, "w", "q", 100, None);
        if jobs.is_empty() {
            break;
        }
        assert!(jobs.len() <= 3);
        assert_eq!(group(&mut w, 0, id).counts.in_flight, jobs.len() as u64);
        balanced(&mut w);
        for job in jobs {
            seen.push(job.id);
            complete(&mut w, (round + 1) % 3, &job);
            assert!(w.store.members(&keys::released(id)).len() <= 3);
        }
    }
    assert_eq!(seen, (0..20).map(|i| id.child(i)).collect::<Vec<JobId>>());
    let view = group(&mut w, 1, id);
    assert_eq!((view.status, view.counts.succeeded), (GroupStatus::Succeeded, 20));
    assert_eq!(finalized(&mut w), 1);
    for (i, child) in all_children(&mut w, id, true).iter().enumerate() {
        assert_eq!(child.state, ChildState::Done(ChildOutcome::Succeeded));
        let result = child.result.as_ref().unwrap();
        assert_eq!(&result.data.bytes[..], format!("\"{}\"", id.child(i as u32)).as_bytes());
    }
    balanced(&mut w);
    // A day later nothing is left of it.
    w.to(25 * 3_600_000);
    w.store.collect_garbage();
    assert!(w.store.records(b"group/").next().is_none() && w.store.records(b"result/").next().is_none());
    let gone = w.call(0, Request::Group { tenant: T.into(), group: id, wait_ms: 0 });
    assert_eq!(gone, Err(Failure::UnknownGroup));
    let child = w.call(0, Request::Get { tenant: T.into(), job: id.child(3) });
    assert_eq!(child, Err(Failure::UnknownJob));
    assert_eq!(w.store.records(b"job/").count(), 0);
    for outcome in ChildOutcome::ALL {
        assert_eq!(w.store.members(&keys::done(id, outcome)).len(), 0);
    }
}

#[test]
fn an_empty_group_ends_at_once_and_no_limit_releases_all() {
    let mut w = World::new(1);
    let id = create(&mut w, asked(0, 1));
    w.to(50);
    assert_eq!(group(&mut w, 0, id).status, GroupStatus::Succeeded);
    let id = create(&mut w, CreateGroup { max_parallel: None, ..asked(1_000, 1) });
    w.to(100);
    assert_eq!(group(&mut w, 0, id).counts.in_flight, 1_000);
    assert_eq!(w.claim(0, "w", "q", 1_000, None).len(), 1_000);
}

#[test]
fn every_way_in_which_a_child_ends_counts_once_and_releases_the_next() {
    let mut w = World::new(2);
    let mut ask = asked(9, 1);
    ask.children[3].queue_ttl_ms = Some(60_000);
    ask.common.max_attempts = Some(1);
    ask.common.lease_ms = Some(10_000);
    let id = create(&mut w, ask);
    let next = |w: &mut World| w.claim(0, "w", "q", 5, None).pop();
    let job = next(&mut w).unwrap();
    complete(&mut w, 0, &job);
    let job = next(&mut w).unwrap();
    fail(&mut w, &job);
    // Cancelled while it is queued.
    assert!(w.call(1, Request::Cancel { tenant: T.into(), job: id.child(2) }).is_ok());
    // Its queue deadline, which runs while it is held as well.
    w.to(61_000);
    assert_eq!(group(&mut w, 0, id).counts.expired, 1);
    // A lease that runs out at the last attempt.
    let job = next(&mut w).unwrap();
    assert_eq!(job.id, id.child(4));
    w.to(75_000);
    // A record that vanishes while it is queued is met by the claim.
    assert!(w.store.evict(&keys::job(id.child(5))));
    assert!(next(&mut w).is_none_or(|j| j.id == id.child(6)));
    w.to(77_000);
    let counts = group(&mut w, 0, id).counts;
    assert_eq!((counts.dead, counts.lost, counts.done()), (2, 1, 6));
    // The one that runs, if the claim looked further; else it is claimed now.
    w.to(90_000);
    while group(&mut w, 0, id).counts.done() < 7 {
        let job = next(&mut w).unwrap();
        complete(&mut w, 0, &job);
    }
    // One that is dead and is retried is held again, and counts when it ends the second time.
    let job = next(&mut w).unwrap();
    assert_eq!(job.id, id.child(7));
    let Ok(Response::Job(again)) = w.call(1, Request::Retry { tenant: T.into(), job: id.child(1) }) else { panic!() };
    assert_eq!((again.status, group(&mut w, 0, id).counts.held), (Status::Held, 2));
    complete(&mut w, 0, &job);
    let job = next(&mut w).unwrap();
    assert_eq!(job.id, id.child(1), "in the order of the children");
    complete(&mut w, 0, &job);
    let job = next(&mut w).unwrap();
    // A completion repeated changes no count.
    complete(&mut w, 0, &job);
    complete(&mut w, 1, &job);
    w.to(91_000);
    let view = group(&mut w, 0, id);
    assert_eq!(view.counts.done(), 9, "{:?}", view.counts);
    assert_eq!(view.status, GroupStatus::Partial);
    assert_eq!(finalized(&mut w), 1);
    let late = w.call(0, Request::Retry { tenant: T.into(), job: id.child(2) });
    assert_eq!(late, Err(Failure::NotRetryable), "the group is final");
}

#[test]
fn cancel_and_fail_fast_stop_the_rest() {
    for fast in [false, true] {
        let mut w = World::new(2);
        let mode = if fast { Mode::FailFast } else { Mode::CollectAll };
        let id = create(&mut w, CreateGroup { mode, ..asked(600, 3) });
        let jobs = w.claim(0, "w", "q", 3, None);
        complete(&mut w, 0, &jobs[0]);
        if fast {
            fail(&mut w, &jobs[1]);
        } else {
            assert!(w.call(1, Request::CancelGroup { tenant: T.into(), group: id }).is_ok());
        }
        w.to(1_500);
        let view = group(&mut w, 0, id);
        let expected = if fast { GroupStatus::Failed } else { GroupStatus::Cancelled };
        assert_eq!(view.status, expected);
        let ended = view.counts;
        assert_eq!((ended.succeeded, ended.dead, ended.cancelled), (1, u64::from(fast), 599 - u64::from(fast)));
        // The one that ran is told.
        let late = Complete { held: held(&jobs[2]), result: None };
        assert_eq!(w.call(0, Request::Complete(Box::new(late))), Err(Failure::JobCancelled));
        assert_eq!(finalized(&mut w), 1);
        let again = w.call(0, Request::CancelGroup { tenant: T.into(), group: id });
        assert_eq!(again.is_ok(), !fast);
        balanced(&mut w);
    }
}

#[test]
fn c37_an_open_group_is_final_only_when_sealed() {
    let mut w = World::new(2);
    let id = create(&mut w, CreateGroup { sealed: false, ..asked(3, 10) });
    for job in w.claim(0, "w", "q", 10, None) {
        complete(&mut w, 0, &job);
    }
    w.to(5_000);
    assert_eq!((group(&mut w, 0, id).status, finalized(&mut w)), (GroupStatus::Open, 0));
    let page = |from, n| Request::ExtendGroup { tenant: T.into(), group: id, from, children: children(n) };
    assert_eq!(w.call(1, page(4, 2)), Err(Failure::WrongOffset { expected: 3 }));
    assert!(w.call(1, page(3, 2)).is_ok());
    // The same page again changes nothing, one with other content is refused.
    assert!(matches!(w.call(0, page(3, 2)), Ok(Response::Group(g)) if g.children == 5));
    let mut other = children(2);
    other[1].payload = Content::json("other");
    let differs = Request::ExtendGroup { tenant: T.into(), group: id, from: 3, children: other };
    assert_eq!(w.call(0, differs), Err(Failure::ChildDiffers { index: 4 }));
    assert!(w.call(0, Request::SealGroup { tenant: T.into(), group: id }).is_ok());
    assert!(w.call(0, Request::SealGroup { tenant: T.into(), group: id }).is_ok());
    assert_eq!(w.call(1, page(5, 1)), Err(Failure::NotOpen));
    for job in w.claim(0, "w", "q", 10, None) {
        complete(&mut w, 0, &job);
    }
    w.to(5_100);
    assert_eq!((group(&mut w, 0, id).status, finalized(&mut w)), (GroupStatus::Succeeded, 1));
    // b: sealed without children. c: never sealed.
    let b = create(&mut w, CreateGroup { sealed: false, ..asked(0, 10) });
    assert!(w.call(0, Request::SealGroup { tenant: T.into(), group: b }).is_ok());
    let c = create(&mut w, CreateGroup { sealed: false, open_timeout_ms: Some(20_000), ..asked(2, 1) });
    w.to(5_300);
    assert_eq!(group(&mut w, 0, b).status, GroupStatus::Succeeded);
    w.to(27_500);
    assert_eq!(group(&mut w, 0, c).status, GroupStatus::Cancelled);
    balanced(&mut w);
}

#[test]
fn c38_the_same_key_is_the_same_group() {
    let mut w = World::new(2);
    let keyed = || {
        let mut ask = asked(2, 1);
        ask.common.key = Some("k".into());
        ask
    };
    let id = create(&mut w, keyed());
    match w.call(1, Request::CreateGroup(Box::new(keyed()))) {
        Ok(Response::Group(group)) => assert_eq!((group.id, group.children), (id, 2)),
        other => panic!("{other:?}"),
    }
    let mut other = keyed();
    other.children.pop();
    assert_eq!(w.call(1, Request::CreateGroup(Box::new(other))), Err(Failure::KeyReused));
    let mut job = Submit::new(T, "q", Content::json("1"));
    job.key = Some("k".into());
    assert_eq!(w.submit(0, job.clone()), Err(Failure::KeyReused));
    job.key = Some("j".into());
    assert!(w.submit(0, job).is_ok());
    let mut taken = asked(1, 1);
    taken.common.key = Some("j".into());
    assert_eq!(w.call(0, Request::CreateGroup(Box::new(taken))), Err(Failure::KeyReused));
    assert!(w.call(0, Request::CancelGroup { tenant: T.into(), group: id }).is_ok());
    w.to(1_000);
    // Its end frees the key.
    assert_ne!(create(&mut w, keyed()), id);
}

#[test]
fn a_waiter_is_told_of_the_end() {
    let mut w = World::new(2);
    let id = create(&mut w, asked(1, 1));
    let waits = [0, 1, 1].map(|at| (at, w.ask(at, Request::Group { tenant: T.into(), group: id, wait_ms: 30_000 })));
    w.to(3_000);
    let job = w.claim(0, "w", "q", 1, None).pop().unwrap();
    complete(&mut w, 0, &job);
    w.to(3_100);
    for (at, wait) in waits {
        match w.answer(at, wait) {
            Some(Ok(Response::Group(group))) => assert_eq!(group.status, GroupStatus::Succeeded),
            other => panic!("{other:?}"),
        }
    }
    let id = create(&mut w, asked(1, 1));
    let late = w.ask(0, Request::Group { tenant: T.into(), group: id, wait_ms: 500 });
    w.to(3_700);
    assert!(matches!(w.answer(0, late), Some(Ok(Response::Group(g))) if g.status == GroupStatus::Running));
}

#[test]
fn bad_groups_are_refused_whole() {
    let mut w = World::new(1);
    let bad = |change: &dyn Fn(&mut CreateGroup)| {
        let mut ask = asked(2, 1);
        change(&mut ask);
        ask
    };
    for (field, ask) in [
        ("max_parallel", bad(&|a| a.max_parallel = Some(0))),
        ("max_parallel", bad(&|a| a.max_parallel = Some(u64::MAX))),
        ("children", bad(&|a| a.children = children(1_001))),
        ("idempotency_key", bad(&|a| a.children[1].key = Some("k".into()))),
        ("max_attempts", bad(&|a| a.children[1].max_attempts = Some(0))),
        ("queue", bad(&|a| a.common.queue = String::new())),
        ("open_timeout_ms", bad(&|a| a.open_timeout_ms = Some(0))),
    ] {
        match w.call(0, Request::CreateGroup(Box::new(ask))) {
            Err(Failure::Invalid { field: blamed, .. }) => assert_eq!(blamed, field),
            other => panic!("{other:?}"),
        }
    }
    assert!(w.store.records(b"job/").next().is_none());
}

fn lose(w: &mut World, index: Name, member: Name) {
    assert!(w.store.drop_member(&index, &member), "{member} stands in {index}");
}

/// What a store may lose, and what the group must still come to.
#[test]
fn whatever_the_books_lose_the_group_ends() {
    type Damage = fn(&mut World, GroupId);
    let kinds: [(&str, Damage); 12] = [
        ("mark's entry", |w, g| lose(w, keys::GROUPS_DUE, keys::group_member(g))),
        ("mark and entry", |w, g| {
            lose(w, keys::GROUPS_DUE, keys::group_member(g));
            assert!(w.store.evict(&keys::mark(g)));
        }),
        ("mark's record", |w, g| assert!(w.store.evict(&keys::mark(g)))),
        ("held entry", |w, g| lose(w, keys::held(g), keys::member(g.child(5)))),
        ("held status", |w, g| {
            let index = keys::status(T, "q", Class::System, Status::Held);
            lose(w, index, keys::member(g.child(5)));
        }),
        ("both of held", |w, g| {
            let index = keys::status(T, "q", Class::System, Status::Held);
            lose(w, index, keys::member(g.child(5)));
            lose(w, keys::held(g), keys::member(g.child(5)));
        }),
        ("released entry", |w, g| lose(w, keys::released(g), keys::member(g.child(2)))),
        ("running status", |w, g| {
            let index = keys::status(T, "q", Class::System, Status::Running);
            lose(w, index, keys::member(g.child(2)));
        }),
        ("done entry", |w, g| lose(w, keys::done(g, ChildOutcome::Succeeded), keys::member(g.child(0)))),
        ("held child", |w, g| assert!(w.store.evict(&keys::job(g.child(5))))),
        ("ended child", |w, g| assert!(w.store.evict(&keys::job(g.child(0))))),
        ("ended child's place", |w, g| {
            let index = keys::status(T, "q", Class::System, Status::Succeeded);
            lose(w, index, keys::member(g.child(0)));
        }),
    ];
    for (name, damage) in kinds {
        let config = leasehold_core::Config { scrub_ms: 100, ..Default::default() };
        let mut w = World::with(2, config);
        let id = create(&mut w, asked(8, 2));
        let first = w.claim(0, "w", "q", 2, None);
        complete(&mut w, 0, &first[0]);
        complete(&mut w, 0, &first[1]);
        let second = w.claim(0, "w", "q", 2, None);
        if name.starts_with("mark") {
            // The step has no chance between mark and loss.
            let result = Some(Content::json("1"));
            let done = Complete { held: held(&second[0]), result };
            let ask = w.ask(0, Request::Complete(Box::new(done)));
            while w.answer(0, ask).is_none() {
                assert!(w.perform(0));
            }
        }
        damage(&mut w, id);
        let mut now = 1_000;
        loop {
            w.to(now);
            now += 1_000;
            for job in w.claim(1, "w", "q", 5, None) {
                complete(&mut w, 1, &job);
            }
            if group(&mut w, 0, id).ended_at.is_some() {
                break;
            }
            assert!(now < 120_000, "{name}: {:?}", group(&mut w, 0, id));
        }
        let view = group(&mut w, 0, id);
        assert_eq!(view.counts.done(), 8, "{name}: {view:?}");
        assert_eq!(finalized(&mut w), 1, "{name}");
    }
}

#[test]
fn a_running_child_that_lost_its_places_is_not_released_again() {
    let config = leasehold_core::Config { scrub_ms: 100, ..Default::default() };
    let mut w = World::with(2, config);
    let id = create(&mut w, asked(3, 1));
    let first = w.claim(0, "w", "q", 1, None);
    lose(&mut w, keys::released(id), keys::member(id.child(0)));
    lose(&mut w, keys::status(T, "q", Class::System, Status::Running), keys::member(id.child(0)));
    for now in (1_000..20_000).step_by(1_000) {
        w.to(now);
        let others = w.claim(1, "other", "q", 5, None);
        assert!(others.iter().all(|job| job.id != id.child(0)), "at {now}: leased again under a lease");
        others.iter().for_each(|job| complete(&mut w, 1, job));
    }
    complete(&mut w, 0, &first[0]);
    for now in [21_000, 22_000, 23_000] {
        w.to(now);
        for job in w.claim(1, "other", "q", 5, None) {
            complete(&mut w, 1, &job);
        }
    }
    assert_eq!(group(&mut w, 0, id).counts.succeeded, 3);
}

#[test]
fn children_of_a_group_that_vanished_are_told_as_lost() {
    let config = leasehold_core::Config { scrub_ms: 100, ..Default::default() };
    let mut w = World::with(1, config);
    let id = create(&mut w, asked(8, 2));
    let jobs = w.claim(0, "w", "q", 2, None);
    assert!(w.store.evict(&keys::group(id)));
    w.to(5_000);
    let late = Complete { held: held(&jobs[0]), result: None };
    assert!(w.call(0, Request::Complete(Box::new(late))).is_err());
    w.store.collect_garbage();
    for prefix in ["job/", "payload/", "lease/", "mark/"] {
        assert_eq!(w.store.records(prefix.as_bytes()).count(), 0, "{prefix}");
    }
    balanced(&mut w);
}

#[test]
fn ended_children_of_a_group_whose_retention_is_over_are_not_lost() {
    let config = leasehold_core::Config { scrub_ms: 100, retention_ms: 20_000, ..Default::default() };
    let mut w = World::with(1, config);
    let id = create(&mut w, asked(2, 2));
    for job in w.claim(0, "w", "q", 2, None) {
        complete(&mut w, 0, &job);
    }
    w.to(5_000);
    assert_eq!(group(&mut w, 0, id).status, GroupStatus::Succeeded);
    // What the group's removal would find it by, lost just before.
    w.to(119_900);
    lose(&mut w, keys::GROUPS_ENDED, keys::group_member(id));
    w.store.collect_garbage();
    w.to(300_000);
    w.store.collect_garbage();
    assert_eq!(w.store.records(b"job/").count(), 0);
    assert_eq!(w.replicas[0].replica.stats().lost, 0);
    balanced(&mut w);
}

#[test]
fn a_child_that_is_given_up_after_its_group_had_gone_leaves_nothing() {
    let config = leasehold_core::Config { scrub_ms: 100, ..Default::default() };
    let mut w = World::with(1, config);
    let id = create(&mut w, asked(1, 1));
    w.to(1_000);
    assert!(w.store.evict(&keys::group(id)) && w.store.evict(&keys::job(id.child(0))));
    w.to(60_000);
    let books = ChildOutcome::ALL.map(|outcome| keys::done(id, outcome));
    assert!(books.iter().all(|book| w.store.members(book).is_empty()), "nobody will ever ask for it");
    balanced(&mut w);
}

#[test]
fn an_ended_child_that_cannot_be_read_leaves_its_place_with_its_group() {
    let config = leasehold_core::Config { scrub_ms: 100, retention_ms: 20_000, ..Default::default() };
    let mut w = World::with(1, config);
    let id = create(&mut w, asked(3, 3));
    for job in w.claim(0, "w", "q", 3, None) {
        complete(&mut w, 0, &job);
    }
    assert!(w.store.corrupt(&keys::job(id.child(1)), "nonsense".into()));
    w.to(10_000);
    // What the group's removal would find it by.
    lose(&mut w, keys::done(id, ChildOutcome::Lost), keys::member(id.child(1)));
    w.to(300_000);
    w.store.collect_garbage();
    let index = keys::status(T, "q", Class::System, Status::Succeeded);
    assert_eq!(w.store.members(&index), [], "what cannot be read stands nowhere but in quarantine");
    assert_eq!(w.store.members(&keys::QUARANTINE).len(), 1);
}

/// What becomes of one call to the store while the group is created.
#[derive(Clone, Copy, Debug)]
enum Fate {
    /// The store says no, or the request never arrives.
    Refused,
    RequestLost,
    ReplyLost,
    /// Applied when its sender has long given up on it.
    Late(u64),
    /// The server dies before the call, or after it and before it hears of it.
    CrashBefore,
    CrashAfter,
}

#[test]
fn a_creation_that_fails_anywhere_and_is_repeated_is_one_whole_group() {
    use leasehold_core::store::StoreError;
    const N: u32 = 200;
    let keyed = || {
        let mut ask = asked(N, 16);
        ask.common.key = Some("k".into());
        Request::CreateGroup(Box::new(ask))
    };
    let fates = [
        Fate::Refused,
        Fate::RequestLost,
        Fate::ReplyLost,
        Fate::Late(500),
        Fate::Late(10_000),
        Fate::CrashBefore,
        Fate::CrashAfter,
    ];
    let mut runs = 0;
    for fate in fates {
        for at in 0..12 {
            let mut w = World::new(2);
            let first = w.ask(0, keyed());
            let mut late: Option<(u64, StoreOp)> = None;
            let mut calls = 0;
            let mut met = false;
            while w.now_ms < 5_000 && !met {
                let Some((id, op)) = w.replicas[0].calls.front().cloned() else {
                    w.now_ms += 10;
                    w.input(0, Input::Timer);
                    continue;
                };
                calls += 1;
                if calls - 1 < at {
                    w.perform(0);
                    continue;
                }
                met = true;
                w.replicas[0].calls.pop_front();
                let reply = |error| Input::StoreReply { id, reply: Err(error) };
                match fate {
                    Fate::Refused => w.input(0, reply(StoreError::Unavailable)),
                    Fate::RequestLost => w.input(0, reply(StoreError::Unknown)),
                    Fate::ReplyLost => {
                        w.apply(&op).unwrap();
                        w.input(0, reply(StoreError::Unknown));
                    }
                    Fate::Late(ms) => {
                        late = Some((w.now_ms + 2_000 + ms, op));
                        w.input(0, reply(StoreError::Unknown));
                    }
                    Fate::CrashBefore => w.restart(0, 77),
                    Fate::CrashAfter => {
                        w.apply(&op).unwrap();
                        w.restart(0, 77);
                    }
                }
            }
            runs += usize::from(met);
            // The client asks again, and through another server.
            let again = w.ask(1, keyed());
            let mut seen = std::collections::BTreeSet::new();
            for _ in 0..4_000 {
                if let Some((_, op)) = late.take_if(|(at, _)| *at <= w.now_ms) {
                    let _ = w.apply(&op);
                }
                w.to(w.now_ms + 50);
                for job in w.claim(0, "w", "q", 64, None) {
                    assert!(seen.insert(job.id), "{} ran twice: {fate:?} at {at}", job.id);
                    complete(&mut w, 1, &job);
                }
                if seen.len() >= N as usize && late.is_none() && w.now_ms > 6_000 {
                    break;
                }
            }
            let ids: Vec<GroupId> = [w.answer(0, first), w.answer(1, again)]
                .into_iter()
                .flatten()
                .filter_map(|answer| match answer {
                    Ok(Response::GroupCreated(group) | Response::Group(group)) => Some(group.id),
                    _ => None,
                })
                .collect();
            assert!(!ids.is_empty() && ids.iter().all(|id| *id == ids[0]), "{fate:?} at {at}: {ids:?}");
            w.to(w.now_ms + 3_000);
            let view = group(&mut w, 1, ids[0]);
            assert_eq!((view.status, view.counts.succeeded), (GroupStatus::Succeeded, N.into()), "{fate:?} at {at}");
            assert_eq!((seen.len(), finalized(&mut w)), (N as usize, 1), "{fate:?} at {at}");
            balanced(&mut w);
        }
    }
    assert!(runs > 30, "{runs}");
}

/// A replica looks at the groups, up to the commit that it has decided on.
fn look(w: &mut World, at: usize) {
    w.now_ms += 25;
    w.input(at, Input::Timer);
    while matches!(w.replicas[at].calls.front(), Some((_, StoreOp::Read(_)))) {
        w.perform(at);
    }
    assert!(matches!(w.replicas[at].calls.front(), Some((_, StoreOp::Commit(_)))));
}

#[test]
fn a_release_that_lost_a_race_leaves_the_mark() {
    let mut w = World::new(4);
    let id = create(&mut w, asked(6, 2));
    let jobs = w.claim(0, "w", "q", 2, None);
    // Up to its answer: what the replica does for the group afterwards is held back.
    let ends = |w: &mut World, at: usize, job: &Leased| {
        let result = Some(Content::json("1"));
        let asked = w.ask(at, Request::Complete(Box::new(Complete { held: held(job), result })));
        while w.answer(at, asked).is_none() {
            assert!(w.perform(at));
        }
    };
    ends(&mut w, 2, &jobs[0]);
    // This one sees room for one child, and the other, later, room for two.
    look(&mut w, 1);
    ends(&mut w, 3, &jobs[1]);
    look(&mut w, 0);
    w.perform(1);
    w.perform(0);
    // The second could not release two: room for one is left, and somebody must still know of it.
    assert_eq!(w.store.members(&keys::released(id)).len(), 1);
    assert_eq!(w.store.members(&keys::GROUPS_DUE).len(), 1);
    assert_eq!(w.store.records(b"mark/").count(), 1);
    let later = w.now_ms + 3_000;
    w.to(later);
    assert_eq!(w.store.members(&keys::released(id)).len(), 2);
    balanced(&mut w);
}

#[test]
fn a_child_that_is_put_back_is_seen_by_whoever_looked_before() {
    let mut w = World::new(1);
    w.add(&leasehold_core::Config { scrub_ms: 100, ..Default::default() });
    let id = create(&mut w, asked(1, 1));
    w.claim(0, "w", "q", 1, Some(3_600_000));
    lose(&mut w, keys::released(id), keys::member(id.child(0)));
    let asked = w.ask(0, Request::CancelGroup { tenant: T.into(), group: id });
    while w.answer(0, asked).is_none() {
        assert!(w.perform(0));
    }
    let unmarks = |commit: &Commit| {
        commit
            .txns
            .iter()
            .flat_map(|txn| &txn.writes)
            .any(|w| matches!(w, Write::Delete(key) if *key == keys::mark(id)))
    };
    // It sees that the group is stopped and that no child is left; before it says so one is put back.
    look(&mut w, 0);
    while w.store.members(&keys::released(id)).is_empty() {
        match w.replicas[1].calls.front().cloned() {
            // The other's own look at the groups does not get through.
            Some((id, StoreOp::Commit(commit))) if unmarks(&commit) => {
                w.replicas[1].calls.pop_front();
                w.input(1, Input::StoreReply { id, reply: Err(StoreError::Unavailable) });
            }
            Some(_) => {
                w.perform(1);
            }
            None => {
                w.now_ms += 25;
                w.input(1, Input::Timer);
            }
        }
        assert!(w.now_ms < 4_000);
    }
    w.perform(0);
    assert_eq!(w.store.records(b"mark/").count(), 1);
    let later = w.now_ms + 3_000;
    w.to(later);
    assert_eq!(group(&mut w, 0, id).status, GroupStatus::Cancelled);
    balanced(&mut w);
}

#[test]
fn a_lost_child_is_counted_once() {
    let counts = |w: &World, id| w.store.members(&keys::done(id, ChildOutcome::Lost)).len();
    for damage in [None, Some(bytes::Bytes::from_static(b"nonsense"))] {
        let mut w = World::with(1, leasehold_core::Config { scrub_ms: 100, ..Default::default() });
        let id = create(&mut w, asked(2, 2));
        match damage {
            None => w.store.evict(&keys::job(id.child(0))),
            Some(bytes) => w.store.corrupt(&keys::job(id.child(0)), bytes),
        };
        // Whatever counts it comes once more when the group is final.
        let mut sent = Vec::new();
        while counts(&w, id) == 0 {
            w.now_ms += 25;
            w.input(0, Input::Timer);
            while let Some((_, op)) = w.replicas[0].calls.front().cloned() {
                let before = counts(&w, id);
                w.perform(0);
                if before < counts(&w, id) {
                    sent.push(op);
                }
            }
            assert!(w.now_ms < 60_000);
        }
        for job in w.claim(0, "w", "q", 2, None) {
            complete(&mut w, 0, &job);
        }
        let last = w.now_ms;
        for now in (last..last + 3_000).step_by(25) {
            w.to(now);
            if w.store.members(&keys::GROUPS_ENDED).len() == 1 {
                break;
            }
        }
        assert_eq!(group(&mut w, 0, id).status, GroupStatus::Partial);
        assert_eq!((sent.len(), counts(&w, id)), (1, 1));
        let StoreOp::Commit(late) = &sent[0] else { panic!("{sent:?}") };
        let in_time = |txn: &Arc<Txn>| Arc::new(Txn { valid_until: u64::MAX, ..Txn::clone(txn) });
        let late = Commit { txns: late.txns.iter().map(in_time).collect(), ..Commit::clone(late) };
        w.store.commit(&late).unwrap();
        assert_eq!(w.store.members(&keys::GROUPS_DUE).len() + w.store.records(b"mark/").count(), 0);
        assert_eq!(counts(&w, id), 1);
    }
}

/// Counted as lost, and put back by whoever had read its record when it could be read.
#[test]
fn a_lost_child_that_comes_back_does_not_keep_its_place() {
    let config = leasehold_core::Config { scrub_ms: 100, ..Default::default() };
    let mut w = World::with(1, config);
    let id = create(&mut w, asked(3, 1));
    assert!(w.store.corrupt(&keys::job(id.child(1)), "nonsense".into()));
    let lost = keys::done(id, ChildOutcome::Lost);
    while w.store.members(&lost).is_empty() {
        let later = w.now_ms + 1_000;
        w.to(later);
        assert!(w.now_ms < 120_000);
    }
    let member = keys::member(id.child(1));
    let back = |index| Write::Add { index, member: member.clone(), score: ScoreAt::Number(1), raise: false };
    let status = keys::status(T, "q", Class::System, Status::Held);
    let writes = vec![back(keys::held(id)), back(status)];
    let txn = Txn { valid_until: u64::MAX, guards: Vec::new(), take: None, writes };
    w.store.commit(&Commit { txns: vec![Arc::new(txn)], grows: false }).unwrap();
    for _ in 0..2 {
        let mut jobs = Vec::new();
        while jobs.is_empty() {
            assert!(w.now_ms < 300_000, "{:?}", group(&mut w, 0, id));
            let later = w.now_ms + 1_000;
            w.to(later);
            jobs = w.claim(0, "w", "q", 3, None);
        }
        complete(&mut w, 0, &jobs.remove(0));
    }
    let later = w.now_ms + 2_000;
    w.to(later);
    assert_eq!((group(&mut w, 0, id).status, w.store.members(&lost).len()), (GroupStatus::Partial, 1));
}

#[test]
fn an_end_that_was_decided_on_what_is_lost_does_not_hold() {
    let mut w = World::new(2);
    let id = create(&mut w, asked(1, 1));
    let job = w.claim(0, "w", "q", 1, Some(3_600_000)).remove(0);
    let done = w.ask(0, Request::Complete(Box::new(Complete { held: held(&job), result: None })));
    while w.answer(0, done).is_none() {
        assert!(w.perform(0));
    }
    look(&mut w, 0);
    // The store loses the success, and the child ends otherwise.
    while w.store.members(&keys::done(id, ChildOutcome::Succeeded)).len() == 1 {
        assert_eq!(w.store.lose_newest(1), 1);
    }
    let error = ErrorInfo { message: "no".into(), kind: None, detail: None };
    let fail = Fail { held: held(&job), error, retryable: false, retry_in_ms: None };
    let failed = w.ask(1, Request::Fail(Box::new(fail)));
    while w.answer(1, failed).is_none() {
        assert!(w.perform(1));
    }
    w.perform(0);
    let later = w.now_ms + 5_000;
    w.to(later);
    let view = group(&mut w, 0, id);
    assert_eq!((view.status, view.counts.dead), (GroupStatus::Failed, 1));
}
