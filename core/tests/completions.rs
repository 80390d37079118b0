//! Goal: a completion at the replica that handed the job out is one commit without a read, and what has
//! changed since is noticed all the same. Method: each way in which the job can have changed, by
//! another replica or behind all backs, before its completion arrives.
#![allow(clippy::panic, clippy::unwrap_used, reason = "a test says what is wrong by panicking")]

mod support;

use leasehold_core::ids::{JobId, Token};
use leasehold_core::opaque::Content;
use leasehold_core::request::{Complete, Held, Submit};
use leasehold_core::store::{Commit, Guard, Read, SCORE_MAX, Store as _, Txn, Write, keys};
use leasehold_core::{Failure, Outcome, Request, Response};
use support::World;

fn submit(world: &mut World, key: Option<&str>) -> JobId {
    let mut submit = Submit::new("default", "q", Content::json("1"));
    submit.key = key.map(String::from);
    match world.submit(0, submit) {
        Ok(Response::Created(view)) => view.id,
        other => panic!("{other:?}"),
    }
}

fn claim(world: &mut World, at: usize) -> (JobId, Token) {
    let jobs = world.claim(at, "w", "q", 1, Some(1_000));
    (jobs[0].id, jobs[0].token)
}

fn held((job, token): (JobId, Token)) -> Held {
    Held { tenant: "default".into(), job, token: Some(token) }
}

fn complete(world: &mut World, at: usize, leased: (JobId, Token)) -> Outcome {
    let result = Some(Content::json("true"));
    world.call(at, Request::Complete(Box::new(Complete { held: held(leased), result })))
}

#[test]
fn where_it_was_handed_out_nothing_is_read() {
    for (at, reads) in [(0, 0), (1, 1)] {
        let mut world = World::new(2);
        submit(&mut world, Some("k"));
        let leased = claim(&mut world, 0);
        let before = world.replicas[at].replica.stats();
        assert_eq!(complete(&mut world, at, leased), Ok(Response::Completed));
        let after = world.replicas[at].replica.stats();
        assert_eq!((after.reads - before.reads, after.commits - before.commits), (reads, 1), "at replica {at}");
        // Its repeat is told by the record.
        assert_eq!(complete(&mut world, at, leased), Ok(Response::Completed));
    }
}

#[test]
fn what_has_changed_since_is_noticed() {
    let mut world = World::new(2);
    let id = submit(&mut world, None);
    let leased = claim(&mut world, 0);
    world.call(1, Request::Cancel { tenant: "default".into(), job: id }).unwrap();
    assert_eq!(complete(&mut world, 0, leased), Err(Failure::JobCancelled));

    let mut world = World::new(2);
    submit(&mut world, None);
    // Past the time in which nothing is taken back.
    world.to(15_000);
    let first = claim(&mut world, 0);
    world.to(20_000);
    let second = claim(&mut world, 1);
    assert_eq!(first.0, second.0);
    assert_eq!(complete(&mut world, 0, first), Err(Failure::LeaseLost));
    assert_eq!(complete(&mut world, 0, second), Ok(Response::Completed));
}

#[test]
fn a_key_that_names_another_job_meanwhile_is_left_alone() {
    let mut world = World::new(1);
    submit(&mut world, Some("k"));
    let leased = claim(&mut world, 0);
    let key = keys::key("default", "k");
    let lose = Txn {
        valid_until: SCORE_MAX,
        guards: Vec::<Guard>::new(),
        take: None,
        writes: vec![Write::Delete(key.clone())],
    };
    world.store.commit(&Commit { txns: vec![lose.into()], grows: false }).unwrap();
    let other = submit(&mut world, Some("k"));
    let read = Read { records: vec![key], ..Read::default() };
    let before = world.store.read(&read).unwrap().records;
    assert_eq!(complete(&mut world, 0, leased), Ok(Response::Completed));
    assert_eq!(world.store.read(&read).unwrap().records, before);
    assert_ne!(other, leased.0);
}
