//! Goal: the audit finds every kind of imbalance, names it, and repairs what can be derived; a store that
//! only works shows nothing. Method: a store full of jobs in every state, damaged one thing at a time.

#![allow(clippy::panic, clippy::unwrap_used, reason = "a test says what is wrong by panicking")]

mod support;

use leasehold_core::job::record::{Class, ErrorInfo, Status};
use leasehold_core::opaque::Content;
use leasehold_core::request::{Audited, Complete, Fail, Held, Inspect, SetPool, Start, Submit};
use leasehold_core::store::{Commit, Expiry, ScoreAt, Store as _, Txn, Value, Version, Write, keys};
use leasehold_core::{JobId, Name, Request, Response};
use support::{START, World};

fn submit(w: &mut World, change: impl FnOnce(&mut Submit)) -> JobId {
    let mut asked = Submit::new("default", "q", Content::json("1"));
    change(&mut asked);
    match w.submit(0, asked) {
        Ok(Response::Created(job)) => job.id,
        other => panic!("{other:?}"),
    }
}

/// One job in each status, some with keys and deadlines.
fn full() -> (World, Vec<(Status, JobId)>) {
    let mut w = World::new(1);
    let mut jobs = Vec::new();
    let claim = |w: &mut World, key: &str| {
        let id = submit(w, |s| {
            s.class = Class::Interactive;
            s.key = Some(key.into());
        });
        let leased = w.claim(0, "w", "q", 1, None);
        assert_eq!(leased[0].id, id);
        Held { tenant: "default".into(), job: id, token: Some(leased[0].token) }
    };
    let done = claim(&mut w, "done");
    w.call(0, Request::Complete(Box::new(Complete { held: done.clone(), result: Some(Content::json("2")) }))).unwrap();
    jobs.push((Status::Succeeded, done.job));
    for (retryable, status) in [(true, Status::Retrying), (false, Status::Dead)] {
        let held = claim(&mut w, status.text());
        let job = held.job;
        let fail = Fail { held, error: ErrorInfo::default(), retryable, retry_in_ms: Some(100_000) };
        w.call(0, Request::Fail(Box::new(fail))).unwrap();
        jobs.push((status, job));
    }
    let running = claim(&mut w, "running");
    jobs.push((Status::Running, running.job));
    let cancelled = submit(&mut w, |_| {});
    w.call(0, Request::Cancel { tenant: "default".into(), job: cancelled }).unwrap();
    jobs.push((Status::Cancelled, cancelled));
    let expired = submit(&mut w, |s| s.queue_ttl_ms = Some(10));
    jobs.push((Status::Expired, expired));
    let deleted = submit(&mut w, |_| {});
    w.call(0, Request::Cancel { tenant: "default".into(), job: deleted }).unwrap();
    w.call(0, Request::Delete { tenant: "default".into(), job: deleted }).unwrap();
    w.to(3_000);
    jobs.push((Status::Scheduled, submit(&mut w, |s| s.start = Start::DelayMs(90_000))));
    jobs.push((
        Status::Queued,
        submit(&mut w, |s| {
            s.queue_ttl_ms = Some(80_000);
            s.key = Some("queued".into());
        }),
    ));
    w.to(3_100);
    (w, jobs)
}

fn audit(w: &mut World, repair: bool) -> (Audited, usize) {
    let (mut all, mut cursor, mut pages) = (Audited::default(), None, 0);
    loop {
        let page = match w.call(0, Request::Audit { cursor, repair }) {
            Ok(Response::Audited(page)) => page,
            other => panic!("{other:?}"),
        };
        pages += 1;
        all.records += page.records;
        all.jobs += page.jobs;
        all.entries += page.entries;
        all.quarantined += page.quarantined;
        all.findings.extend(page.findings);
        cursor = page.next;
        if cursor.is_none() {
            return (all, pages);
        }
    }
}

#[test]
fn a_store_that_works_balances() {
    let (mut w, jobs) = full();
    let (seen, _) = audit(&mut w, false);
    assert_eq!(seen.findings, []);
    // The deleted one has left a stub.
    assert_eq!(seen.jobs, jobs.len() as u64 + 1);
    for (status, id) in jobs {
        match w.call(0, Request::Get { tenant: "default".into(), job: id }) {
            Ok(Response::Job(job)) => assert_eq!(job.status, status),
            other => panic!("{other:?}"),
        }
        match w.call(0, Request::Inspect(Inspect::Job(id))) {
            Ok(Response::Inspected(seen)) => {
                let index = keys::status("default", "q", Class::Interactive, status).to_string();
                let other = keys::status("default", "q", Class::System, status).to_string();
                assert!(seen.places.iter().any(|(i, _)| *i == index || *i == other), "{seen:?}");
                assert!(seen.records.iter().any(|r| r.key == keys::job(id).to_string()));
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn many_pages_see_everything_once() {
    let mut w = World::new(1);
    for n in 0..450 {
        submit(&mut w, |s| s.queue = format!("q{}", n % 3));
    }
    let (seen, pages) = audit(&mut w, false);
    assert_eq!((seen.findings.len(), seen.jobs, seen.entries), (0, 450, 450));
    assert!(pages > 9, "{pages}");
    assert!(w.call(0, Request::Audit { cursor: Some("00".into()), repair: false }).is_err());
}

/// Applies writes that no operation would make.
fn tamper(w: &mut World, writes: Vec<Write>) {
    let txn = Txn { valid_until: START * 2, guards: Vec::new(), take: None, writes };
    w.store.commit(&Commit { txns: vec![txn.into()], grows: false }).unwrap();
}

fn add(index: Name, id: JobId, score: u64) -> Write {
    Write::Add { index, member: keys::member(id), score: ScoreAt::Number(score), raise: false }
}

#[test]
fn every_kind_of_imbalance_is_found_and_what_can_be_derived_repaired() {
    let st = |class, status| keys::status("default", "q", class, status);
    type Damage = Box<dyn Fn(&mut World, &dyn Fn(Status) -> JobId)>;
    let class = |s: Status| match s {
        Status::Succeeded | Status::Retrying | Status::Dead | Status::Running => Class::Interactive,
        _ => Class::System,
    };
    let mut kinds: Vec<(String, Damage, &str, bool)> = Vec::new();
    for status in Status::ALL.into_iter().filter(|s| *s != Status::Held) {
        let index = st(class(status), status);
        kinds.push((
            format!("{} without its place", status.text()),
            Box::new(move |w, of| assert!(w.store.drop_member(&index, &keys::member(of(status))))),
            "stands in no status index",
            true,
        ));
        let other = if status == Status::Queued { Status::Scheduled } else { Status::Queued };
        let extra = st(class(status), other);
        kinds.push((
            format!("{} in two places", status.text()),
            Box::new(move |w, of| tamper(w, vec![add(extra.clone(), of(status), START)])),
            "stands in 2 status indexes",
            true,
        ));
    }
    for (status, index, what) in [
        (Status::Running, keys::LEASES, "its lease has no end"),
        (Status::Scheduled, keys::DUE, "not in `due`"),
        (Status::Retrying, keys::DUE, "not in `due`"),
        (Status::Queued, keys::TTL, "not in `ttl`"),
    ] {
        kinds.push((
            format!("{} not in {index}", status.text()),
            Box::new(move |w, of| assert!(w.store.drop_member(&index, &keys::member(of(status))))),
            what,
            true,
        ));
    }
    for (status, index, what) in [
        (Status::Queued, keys::LEASES, "an entry in `leases`"),
        (Status::Queued, keys::DUE, "wrongly in `due`"),
        (Status::Running, keys::TTL, "wrongly in `ttl`"),
        (Status::Succeeded, keys::LEASES, "has ended, but"),
        (Status::Dead, keys::DUE, "has ended, but"),
    ] {
        kinds.push((
            format!("{} in {index}", status.text()),
            Box::new(move |w, of| tamper(w, vec![add(index.clone(), of(status), START * 2)])),
            what,
            true,
        ));
    }
    type Key = fn(JobId) -> Name;
    for (status, key, what) in [
        (Status::Queued, keys::job as Key, "its record is gone"),
        (Status::Running, keys::job as Key, "its record is gone"),
        (Status::Succeeded, keys::job as Key, "its record is gone"),
    ] {
        kinds.push((
            format!("{} without its record", status.text()),
            Box::new(move |w, of| assert!(w.store.evict(&key(of(status))))),
            what,
            true,
        ));
    }
    for (name, key) in [("queued", keys::payload as Key), ("running", keys::lease as Key)] {
        let status = Status::parse(name).unwrap();
        let what = if name == "queued" { "its payload is gone" } else { "runs without a lease" };
        kinds.push((
            format!("{name} without payload or lease"),
            Box::new(move |w, of| assert!(w.store.evict(&key(of(status))))),
            what,
            // A claim or the sweep meets them and ends them honestly.
            false,
        ));
    }
    kinds.push((
        "unreadable".into(),
        Box::new(|w, of| assert!(w.store.corrupt(&keys::job(of(Status::Queued)), "nonsense".into()))),
        "cannot be read",
        false,
    ));
    kinds.push((
        "key of another".into(),
        Box::new(|w, _| assert!(w.store.evict(&keys::key("default", "queued")))),
        "not bound to it",
        false,
    ));
    kinds.push((
        "name forgotten".into(),
        Box::new(|w, _| assert!(w.store.drop_member(&keys::NAMES, &keys::queue_member("default", "q")))),
        "its queue's name is not known",
        true,
    ));
    kinds.push((
        "receipt for ever".into(),
        Box::new(|w, _| {
            let key = keys::receipt("default", "x");
            let value = Value::Bytes("1".into());
            tamper(w, vec![Write::Put { key, version: Version(1), value, expiry: Expiry::Never }]);
        }),
        "never expires",
        false,
    ));
    for (name, damage, what, repairable) in kinds {
        let (mut w, jobs) = full();
        let of = |status: Status| jobs.iter().find(|(s, _)| *s == status).unwrap().1;
        damage(&mut w, &of);
        let (seen, _) = audit(&mut w, false);
        assert!(seen.findings.iter().any(|f| f.what.contains(what)), "{name}: {:?}", seen.findings);
        assert!(seen.findings.iter().all(|f| !f.repaired), "{name}");
        let (again, _) = audit(&mut w, false);
        assert_eq!(again.findings, seen.findings, "{name}: an audit changes nothing");
        let (mended, _) = audit(&mut w, true);
        // What is put back first shows what else is wrong.
        audit(&mut w, true);
        let (after, _) = audit(&mut w, false);
        assert_eq!(after.findings.is_empty(), repairable, "{name}: {:?} then {:?}", mended.findings, after.findings);
        if repairable {
            assert!(mended.findings.iter().any(|f| f.repaired), "{name}");
        }
    }
}

#[test]
fn what_is_in_quarantine_is_listed() {
    let (mut w, jobs) = full();
    let listed = |w: &mut World| match w.call(0, Request::Inspect(Inspect::Quarantine)) {
        Ok(Response::Inspected(seen)) => seen,
        other => panic!("{other:?}"),
    };
    assert_eq!(listed(&mut w).records, []);
    let id = jobs.iter().find(|(s, _)| *s == Status::Queued).unwrap().1;
    assert!(w.store.corrupt(&keys::job(id), "nonsense".into()));
    // A claim meets it and sets it aside.
    let met = w.call(0, Request::Get { tenant: "default".into(), job: id });
    assert!(met.is_err(), "{met:?}");
    w.claim(0, "w", "q", 10, None);
    let seen = listed(&mut w);
    assert_eq!(seen.records.iter().map(|r| r.key.clone()).collect::<Vec<_>>(), [keys::job(id).to_string()]);
    assert_eq!(seen.counts, [(keys::QUARANTINE.to_string(), 1)]);
}

/// A page holds a payload that leaves no room for what is read after it: that is not damage.
#[test]
fn what_is_not_read_beside_a_large_payload_is_not_unreadable() {
    let mut w = World::new(1);
    let pool = SetPool { tenant: "default".into(), pool: "p".into(), total: Some(2), batch_max: None, lease_ms: None };
    w.call(0, Request::SetPool(pool)).unwrap();
    submit(&mut w, |s| s.payload = Content::binary("a/b", vec![7; 9_000_000]));
    assert_eq!(audit(&mut w, false).0.findings, []);
}
