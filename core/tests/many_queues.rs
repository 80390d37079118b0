//! Goal: a tenant's queues and jobs are found however many names others have. Method: one tenant fills the
//! store with names, another submits afterwards.

#![allow(clippy::panic, clippy::unwrap_used, reason = "a test says what is wrong by panicking")]

mod support;

use leasehold_core::opaque::Content;
use leasehold_core::request::{List, Submit};
use leasehold_core::{Request, Response};
use support::World;

#[test]
fn a_queue_is_seen_among_thousands_of_another_tenant() {
    let mut w = World::new(1);
    for n in 0..2_500 {
        assert!(w.submit(0, Submit::new("a", format!("q{n}"), Content::json("1"))).is_ok());
    }
    w.to(1_000);
    assert!(w.submit(0, Submit::new("b", "mine", Content::json("1"))).is_ok());
    let names = |w: &mut World, tenant: &str| match w.call(0, Request::Queues { tenant: tenant.into() }) {
        Ok(Response::Queues(queues)) => queues.len(),
        other => panic!("{other:?}"),
    };
    assert_eq!((names(&mut w, "a"), names(&mut w, "b")), (2_500, 1));
    let list = List { tenant: "b".into(), queue: None, status: None, limit: 10, cursor: None };
    match w.call(0, Request::List(list)) {
        Ok(Response::Jobs { jobs, next: None }) => assert_eq!(jobs.len(), 1),
        other => panic!("{other:?}"),
    }
    // All of the other's, page by page, each once.
    let (mut seen, mut cursor) = (std::collections::BTreeSet::new(), None);
    loop {
        let list = List { tenant: "a".into(), queue: None, status: None, limit: 1_000, cursor };
        match w.call(0, Request::List(list)) {
            Ok(Response::Jobs { jobs, next }) => {
                seen.extend(jobs.iter().map(|j| j.id));
                cursor = next;
            }
            other => panic!("{other:?}"),
        }
        if cursor.is_none() {
            break;
        }
    }
    assert_eq!(seen.len(), 2_500);
    // And the names go as fast as they came.
    for job in seen {
        assert!(w.call(0, Request::Cancel { tenant: "a".into(), job }).is_ok());
        assert!(w.call(0, Request::Delete { tenant: "a".into(), job }).is_ok());
    }
    w.to(140_000);
    assert_eq!(names(&mut w, "a"), 0);
}
