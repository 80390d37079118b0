//! Goal: a reader of the audit log sees every event once and in order, whatever its page, and a commit of
//! many transactions is no obstacle. Method: the same log is read with many page sizes.

#![allow(clippy::panic, clippy::unwrap_used, reason = "a test says what is wrong by panicking")]

mod support;

use leasehold_core::opaque::Content;
use leasehold_core::request::{EventCursor, Submit};
use leasehold_core::{Request, Response};
use support::World;

fn read(w: &mut World, limit: usize) -> Vec<(EventCursor, String)> {
    let (mut all, mut after) = (Vec::new(), EventCursor::default());
    loop {
        let request = Request::Events { tenant: "default".into(), after, limit, wait_ms: 0 };
        let Ok(Response::Events { events, next }) = w.call(0, request) else { panic!("no events") };
        assert!(events.len() <= limit);
        if events.is_empty() {
            return all;
        }
        assert_eq!(events.last().map(|e| e.id), Some(next));
        all.extend(events.into_iter().map(|e| (e.id, format!("{} {:?}", e.event.kind.text(), e.event.of))));
        after = next;
    }
}

#[test]
fn every_page_size_shows_the_same_log() {
    let mut w = World::new(1);
    let submit = || Request::Submit(Box::new(Submit::new("default", "q", Content::json("1"))));
    for n in 0..60 {
        w.call(0, submit()).unwrap();
        if n % 10 == 0 {
            w.call(0, Request::Batch((0..150).map(|_| submit()).collect())).unwrap();
            assert_eq!(w.claim(0, "w", "q", 70, None).len(), 70);
        }
    }
    let whole = read(&mut w, 1_000);
    assert_eq!(whole.len(), 60 + 6 * (150 + 70));
    assert!(whole.windows(2).all(|p| p[0].0 < p[1].0));
    for limit in [1, 7, 33, 100, 220] {
        assert_eq!(read(&mut w, limit), whole, "{limit}");
    }
}

#[test]
fn a_reader_that_waits_is_told_soon() {
    let mut w = World::new(1);
    let ask = Request::Events { tenant: "default".into(), after: EventCursor::default(), limit: 5, wait_ms: 9_000 };
    let id = w.ask(0, ask);
    w.to(3_000);
    assert!(w.answer(0, id).is_none());
    w.submit(0, Submit::new("default", "q", Content::json("1"))).unwrap();
    w.to(3_100);
    match w.answer(0, id) {
        Some(Ok(Response::Events { events, .. })) => assert_eq!(events.len(), 1),
        other => panic!("{other:?}"),
    }
}
