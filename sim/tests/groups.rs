//! Cases from the field that concern groups, each with its numbers. Goal: what has gone wrong elsewhere
//! cannot here. Method: scripted worlds in virtual time, with the oracle watching every commit and answer.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]

use leasehold_core::event::Kind;
use leasehold_core::group::record::{GroupStatus, Mode};
use leasehold_core::ids::GroupId;
use leasehold_core::job::record::Status;
use leasehold_core::opaque::Content;
use leasehold_core::request::{CreateGroup, GroupView, Leased, Submit};
use leasehold_core::{Failure, JobId, Request, Response};
use sim::links::Order;
use sim::scenarios::{Script, TENANT, job, payload};

/// Nothing was promised and not kept.
fn kept(s: &Script) {
    assert!(s.broken().is_none(), "{:?}", s.broken());
}

fn world(seed: u64, replicas: usize, lease_s: u64) -> Script {
    let mut s = Script::with(seed, replicas, |setup| setup.config.lease_ms = lease_s * 1_000);
    s.at(30);
    s
}

fn children(n: usize) -> Vec<Submit> {
    (0..n).map(|i| Submit::new("any", "any", payload(&format!("child {i}")))).collect()
}

/// A sealed group of so many children, each with one attempt.
fn asked(n: usize, max_parallel: u64) -> CreateGroup {
    CreateGroup {
        common: Submit { max_attempts: Some(1), ..Submit::new(TENANT, "q", Content::json("null")) },
        children: children(n),
        max_parallel: Some(max_parallel),
        mode: Mode::CollectAll,
        sealed: true,
        open_timeout_ms: None,
    }
}

fn keyed(n: usize, key: &str) -> CreateGroup {
    let mut group = asked(n, 1);
    group.common.key = Some(key.to_owned());
    group
}

fn after_ms(s: &mut Script, ms: u64) {
    let then = s.now_ms() + ms;
    s.at_ms(then);
}

/// Creates a group and lets a replica look at it, which releases what may run.
fn begin(s: &mut Script, asked: &CreateGroup) -> GroupId {
    let id = s.create_group(0, asked).unwrap();
    after_ms(s, 1_500);
    id
}

fn group(s: &mut Script, id: GroupId) -> GroupView {
    s.group(0, id).unwrap()
}

/// Claims and completes until nothing is handed out.
fn work(s: &mut Script) {
    loop {
        let jobs = s.claim(0, "w", 10);
        if jobs.is_empty() {
            return;
        }
        for leased in jobs {
            s.complete(0, &leased).unwrap();
        }
    }
}

/// The claimed job of that child.
fn the(jobs: &[Leased], group: GroupId, child: u32) -> &Leased {
    jobs.iter().find(|j| j.id == group.child(child)).unwrap()
}

#[test]
fn c32_a_child_that_fails_is_an_end_for_its_group() {
    for mode in [Mode::CollectAll, Mode::FailFast] {
        let mut s = world(32, 2, 60);
        let mut asked = asked(4, 3);
        asked.mode = mode;
        // The siblings have attempts left, which one's failure does not touch.
        asked.children[0].max_attempts = Some(3);
        asked.children[2].max_attempts = Some(3);
        let id = begin(&mut s, &asked);
        let jobs = s.claim(1, "w", 10);
        assert_eq!(jobs.len(), 3);
        s.complete(0, the(&jobs, id, 0)).unwrap();
        s.fail(1, the(&jobs, id, 1)).unwrap();
        after_ms(&mut s, 2_000);
        let view = group(&mut s, id);
        if mode == Mode::CollectAll {
            assert_eq!((view.status, s.finalized(0, id)), (GroupStatus::Running, 0));
            assert_eq!(s.status(id.child(2)), Some(Status::Running));
            s.complete(0, the(&jobs, id, 2)).unwrap();
            work(&mut s);
            after_ms(&mut s, 100);
            let view = group(&mut s, id);
            assert_eq!(view.status, GroupStatus::Partial);
            assert_eq!((view.counts.succeeded, view.counts.dead, view.counts.done()), (3, 1, 4));
        } else {
            // Within one tick: the held one is cancelled, and so is the one that runs, which is told.
            assert_eq!((view.status, view.counts.dead, view.counts.cancelled), (GroupStatus::Failed, 1, 2));
            let beat = s.beat(0, the(&jobs, id, 2));
            assert!(matches!(beat, Ok(Response::Beat { cancel_requested: true, .. })), "{beat:?}");
            assert_eq!(s.complete(0, the(&jobs, id, 2)), Err(Failure::JobCancelled));
            assert_eq!(s.status(id.child(2)), Some(Status::Cancelled));
            assert_eq!(s.count(0, id.child(2), Kind::Dead), 0);
        }
        assert_eq!(s.finalized(1, id), 1);
        kept(&s);
    }
}

#[test]
fn c33_nothing_is_tidied_away_that_a_group_still_needs() {
    let mut s = world(33, 2, 300);
    let mut asked = asked(4, 4);
    asked.common.retention_ms = Some(20_000);
    asked.children.iter_mut().for_each(|c| c.retention_ms = Some(0));
    let id = begin(&mut s, &asked);
    let jobs = s.claim(1, "w", 10);
    for child in 0..3 {
        s.complete(0, the(&jobs, id, child)).unwrap();
    }
    // One deleted by hand stays counted.
    let delete = Request::Delete { tenant: TENANT.into(), job: id.child(1) };
    assert_eq!(s.ask(0, delete), Ok(Response::Deleted));
    // One child runs far longer than its own retention and the group's.
    after_ms(&mut s, 200_000);
    assert_eq!(group(&mut s, id).status, GroupStatus::Running);
    assert!(s.get(0, id.child(0)).is_some(), "its retention is the group's, which has not begun");
    s.complete(1, the(&jobs, id, 3)).unwrap();
    after_ms(&mut s, 10_000);
    let view = group(&mut s, id);
    assert_eq!((view.status, view.counts.succeeded), (GroupStatus::Succeeded, 4));
    // At every moment: as long as a child is listed, so is its group.
    let mut gone = false;
    for _ in 0..300 {
        let listed = (0..4).filter(|n| s.get(1, id.child(*n)).is_some()).count();
        match s.group(1, id) {
            Ok(_) => assert!(!gone),
            Err(failure) => {
                assert_eq!((failure, listed), (Failure::UnknownGroup, 0));
                gone = true;
            }
        }
        after_ms(&mut s, 2_000);
    }
    assert!(gone);
    assert_eq!(s.finalized(0, id), 1);
    kept(&s);
}

#[test]
fn c35_a_last_completion_sent_again_finalizes_nothing_again() {
    let mut s = world(35, 2, 30);
    let id = begin(&mut s, &asked(5, 5));
    let jobs = s.claim(0, "w", 10);
    for child in 0..4 {
        s.complete(0, the(&jobs, id, child)).unwrap();
    }
    let last = the(&jobs, id, 4).clone();
    let request = s.complete_request(last.id, last.token);
    s.cut_answers(0, 500);
    let lost = s.send(0, request.clone());
    after_ms(&mut s, 61_000);
    assert!(s.answer(lost).is_none());
    for replica in [0, 1] {
        assert_eq!(s.ask(replica, request.clone()), Ok(Response::Completed));
    }
    let view = group(&mut s, id);
    assert_eq!((view.status, view.counts.in_flight, view.counts.succeeded), (GroupStatus::Succeeded, 0, 5));
    assert_eq!(s.finalized(1, id), 1);
    kept(&s);
}

#[test]
fn c35b_a_last_child_that_runs_twice_counts_once() {
    let mut s = world(36, 2, 10);
    let mut asked = asked(5, 5);
    asked.common.max_attempts = Some(3);
    let id = begin(&mut s, &asked);
    let jobs = s.claim(0, "w", 10);
    for child in 0..4 {
        s.complete(0, the(&jobs, id, child)).unwrap();
    }
    let first = the(&jobs, id, 4).clone();
    let lapsed = s.now_ms() + 30_000;
    let second = s.poll(1, "w2", 200, lapsed).unwrap();
    assert_eq!(second.id, first.id);
    assert_eq!(s.complete(0, &first), Err(Failure::LeaseLost));
    s.complete(1, &second).unwrap();
    assert_eq!(s.complete(0, &first), Err(Failure::LeaseLost));
    after_ms(&mut s, 2_000);
    let view = group(&mut s, id);
    assert_eq!((view.status, view.counts.in_flight, view.counts.succeeded), (GroupStatus::Succeeded, 0, 5));
    assert_eq!(s.finalized(0, id), 1);
    kept(&s);
}

#[test]
fn c35c_many_that_end_at_once_on_two_replicas_finalize_once() {
    for seed in 0..20 {
        let mut s = world(350 + seed, 2, 60);
        let id = begin(&mut s, &asked(20, 20));
        let jobs = s.claim(0, "w", 100);
        assert_eq!(jobs.len(), 20);
        let calls: Vec<_> = jobs
            .iter()
            .enumerate()
            .map(|(n, leased)| {
                let request = s.complete_request(leased.id, leased.token);
                s.send(n % 2, request)
            })
            .collect();
        for call in calls {
            assert_eq!(s.wait(call), Ok(Response::Completed));
        }
        after_ms(&mut s, 2_000);
        let view = group(&mut s, id);
        assert_eq!((view.status, view.counts.succeeded, view.counts.in_flight), (GroupStatus::Succeeded, 20, 0));
        assert_eq!(s.finalized(1, id), 1);
        kept(&s);
    }
}

#[test]
fn c37_an_open_group_does_not_end_before_it_is_sealed() {
    let mut s = world(37, 2, 60);
    let id = s.create_group(0, &CreateGroup { sealed: false, ..asked(3, 10) }).unwrap();
    work(&mut s);
    after_ms(&mut s, 10_000);
    assert_eq!((group(&mut s, id).counts.succeeded, s.finalized(0, id)), (3, 0));
    s.extend(1, id, 3, &children(2)).unwrap();
    work(&mut s);
    after_ms(&mut s, 10_000);
    assert_eq!((group(&mut s, id).counts.succeeded, s.finalized(0, id)), (5, 0));
    s.seal(0, id).unwrap();
    after_ms(&mut s, 2_000);
    assert_eq!((group(&mut s, id).status, s.finalized(0, id)), (GroupStatus::Succeeded, 1));
    // Sealed without a child.
    let b = s.create_group(1, &CreateGroup { sealed: false, ..asked(0, 10) }).unwrap();
    s.seal(1, b).unwrap();
    after_ms(&mut s, 2_000);
    assert_eq!((group(&mut s, b).status, s.finalized(0, b)), (GroupStatus::Succeeded, 1));
    // Its creator is gone before it seals: the group's own time-out ends it.
    let open = CreateGroup { sealed: false, open_timeout_ms: Some(20_000), ..asked(2, 1) };
    let c = s.create_group(1, &open).unwrap();
    s.crash(1, None);
    after_ms(&mut s, 19_000);
    assert_eq!(s.finalized(0, c), 0);
    after_ms(&mut s, 6_000);
    assert_eq!((group(&mut s, c).status, s.finalized(0, c)), (GroupStatus::Cancelled, 1));
    kept(&s);
}

/// The one group of a key, which is whole: repeated until it is answered, run to its end.
fn one_whole_group(s: &mut Script, asked: &CreateGroup, what: &str) {
    let n = asked.children.len();
    let id = (0..20)
        .find_map(|_| {
            after_ms(s, 1_000);
            s.create_group(1, asked).ok()
        })
        .unwrap_or_else(|| panic!("{what}: never created"));
    assert_eq!(s.create_group(1, asked), Ok(id), "{what}");
    for _ in 0..n + 20 {
        work(s);
        after_ms(s, 500);
    }
    let view = s.group(1, id).unwrap();
    assert_eq!((view.status, view.counts.succeeded), (GroupStatus::Succeeded, n as u64), "{what}");
    assert_eq!(s.finalized(1, id), 1, "{what}");
    assert_eq!(s.jobs(), n, "{what}: no child without its group");
    let ran: Vec<JobId> = (0..n as u32).map(|child| id.child(child)).collect();
    assert!(ran.iter().all(|id| s.count(1, *id, Kind::Succeeded) == 1), "{what}");
    kept(s);
}

#[test]
fn c38_a_creation_that_is_repeated_is_one_whole_group() {
    let asked = keyed(2, "G");
    // The answer is lost, once at the caller and once at each commit of the creation.
    let mut s = world(38, 2, 60);
    s.cut_answers(0, 500);
    let request = s.group_request(&asked);
    s.send(0, request);
    after_ms(&mut s, 1_000);
    one_whole_group(&mut s, &asked, "the answer lost");
    for order in [Order::LoseReply, Order::LoseRequest, Order::Late(3_000_000), Order::Twice(2_000_000)] {
        for at in 0..6 {
            let mut s = world(38, 2, 60);
            let mut orders = vec![Order::Pass; at];
            orders.push(order);
            s.orders(&orders);
            let request = s.group_request(&asked);
            s.send(0, request);
            one_whole_group(&mut s, &asked, &format!("{order:?} of commit {at}"));
        }
    }
    // The replica dies after each event of the creation.
    let mut s = world(38, 2, 60);
    let request = s.group_request(&asked);
    s.send(0, request);
    for events in 0..30 {
        let mut s = s.clone();
        s.steps(events);
        s.crash(0, Some(300));
        one_whole_group(&mut s, &asked, &format!("a crash after {events} events"));
    }
}

#[test]
fn c39_children_above_the_capacity_wait_and_do_not_fail() {
    let mut s = world(39, 2, 60);
    let id = s.create_group(0, &asked(11, 11)).unwrap();
    // Four places to run in, each for some seconds.
    let mut places: Vec<Option<(u64, Leased)>> = vec![None; 4];
    while group(&mut s, id).ended_at.is_none() {
        for (n, place) in places.iter_mut().enumerate() {
            match place.take() {
                Some((until, leased)) if until <= s.now_ms() => {
                    s.complete(n % 2, &leased).unwrap();
                }
                None => {
                    let until = s.now_ms() + 3_000 + 500 * n as u64;
                    *place = s.claim(n % 2, "w", 1).pop().map(|leased| (until, leased));
                }
                running => *place = running,
            }
        }
        let running = (0..11).filter(|n| s.status(id.child(*n)) == Some(Status::Running)).count();
        assert!(running <= 4);
        after_ms(&mut s, 100);
        assert!(s.now_ms() < 120_000, "11 children in 4 places");
    }
    let view = group(&mut s, id);
    assert_eq!((view.status, view.counts.succeeded, view.counts.dead), (GroupStatus::Succeeded, 11, 0));
    assert_eq!(s.finalized(1, id), 1);
    let deliveries: usize = (0..11).map(|n| s.world.oracle.tokens(id.child(n)).len()).sum();
    assert_eq!(deliveries, 11, "none was run and put back");
    kept(&s);
}

#[test]
fn a_job_with_a_field_of_a_group_stays_a_job() {
    let mut s = world(40, 1, 60);
    let text = r#"{"fanout":3,"children":[1,2],"max_parallel":0}"#;
    let id = s.create(0, &Submit { payload: Content::json(text), ..job("any") }).unwrap();
    let leased = s.claim(0, "w", 1).pop().unwrap();
    assert_eq!((leased.id, &leased.payload.unwrap().data.bytes[..]), (id, text.as_bytes()));
    kept(&s);
}
