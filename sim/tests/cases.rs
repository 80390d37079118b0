//! Cases from the field, each with its numbers. Goal: what has gone wrong elsewhere cannot here.
//! Method: scripted worlds in virtual time, with the oracle watching every commit and every answer.

use std::collections::{BTreeMap, BTreeSet};

use leasehold_core::event::Kind;
use leasehold_core::job::record::{AttemptEnd, Backoff, Status};
use leasehold_core::replica::Mark;
use leasehold_core::request::{Leased, Start, Submit};
use leasehold_core::store::keys;
use leasehold_core::{Failure, Outcome, Request, Response};
use sim::calls::Heard;
use sim::links::Order;
use sim::scenarios::{Script, TENANT, held, job, keyed};
use sim::setup::{Regime, SECOND};

/// Nothing was promised and not kept.
fn kept(s: &Script) {
    assert!(s.broken().is_none(), "{:?}", s.broken());
}

/// Two replicas, leases of so many seconds, long enough up that no start's grace is left.
fn world(seed: u64, replicas: usize, lease_s: u64) -> Script {
    let mut s = Script::with(seed, replicas, |setup| setup.config.lease_ms = lease_s * 1_000);
    s.at(30);
    s
}

fn seconds(s: &Script) -> u64 {
    s.now_ms() / 1_000
}

#[test]
fn c01_a_lease_clock_starts_when_work_is_claimed() {
    let mut s = world(1, 2, 2);
    let id = s.create(0, &Submit { start: Start::DelayMs(6_000), ..job("later") }).unwrap();
    let (mut deliveries, mut first) = (0, None);
    for _ in 0..300 {
        for w in 0..3 {
            for leased in s.claim(w % 2, "w", 1) {
                deliveries += 1;
                first.get_or_insert(s.now_ms());
                assert_eq!(s.complete(0, &leased), Ok(Response::Completed));
            }
        }
        let next = s.now_ms() + 200;
        s.at_ms(next);
    }
    assert_eq!(deliveries, 1);
    assert!((36_000..=38_000).contains(&first.unwrap()), "{first:?}");
    let view = s.get(1, id).unwrap();
    assert_eq!((view.status, view.attempt, view.deliveries), (Status::Succeeded, 1, 1));
    kept(&s);
}

#[test]
fn c01b_a_back_off_longer_than_the_lease_is_no_abandoned_lease() {
    let mut s = world(2, 2, 2);
    let backoff = Backoff { base_ms: 6_000, max_ms: 6_000, factor_milli: 2_000, jitter_milli: 0 };
    let id = s.create(0, &Submit { backoff: Some(backoff), ..job("fails once") }).unwrap();
    let first = s.poll(0, "w", 200, 40_000).unwrap();
    s.fail(1, &first).unwrap();
    let failed = s.now_ms();
    let second = s.poll(1, "w", 200, 60_000).unwrap();
    assert!((failed + 6_000..=failed + 8_000).contains(&s.now_ms()), "{}", s.now_ms());
    assert_eq!((second.attempt, second.delivery), (2, 2));
    s.complete(0, &second).unwrap();
    assert!(s.poll(0, "w", 1_000, 100_000).is_none());
    assert_eq!(s.status(id), Some(Status::Succeeded));
    kept(&s);
}

#[test]
fn c02_an_expired_holder_cannot_commit() {
    let mut s = world(3, 2, 10);
    let id = s.create(0, &job("slow")).unwrap();
    let a = s.claim(0, "a", 1).pop().unwrap();
    let taken = s.now_ms();
    let b = s.poll(1, "b", 200, taken + 20_000).unwrap();
    assert!((taken + 10_000..=taken + 12_000).contains(&s.now_ms()), "{}", s.now_ms() - taken);
    assert!(b.token > a.token);
    s.at_ms(taken + 15_000);
    assert_eq!(s.complete(0, &a), Err(Failure::LeaseLost));
    let done = s.world.ledger.next();
    assert_eq!(s.complete(1, &b), Ok(Response::Completed));
    let result = s.ask(0, Request::Result { tenant: TENANT.into(), job: id });
    let Ok(Response::Content(content)) = result else { panic!("{result:?}") };
    assert!(content.data.bytes.ends_with(format!("{done:08x}00000000").as_bytes()), "the result is B's");
    assert_eq!(s.count(0, id, Kind::Succeeded), 1);
    kept(&s);
}

#[test]
fn c04_redelivery_is_not_amplified_by_chaining() {
    let mut s = world(4, 2, 5);
    s.create(0, &job("0"));
    // What each worker is busy with, and until when.
    let mut busy: Vec<Option<(u64, Leased)>> = vec![None; 4];
    let mut deliveries: BTreeMap<_, u32> = BTreeMap::new();
    let mut repeated = 0;
    while s.now_ms() < 400_000 {
        for (w, slot) in busy.iter_mut().enumerate() {
            match slot.take() {
                Some((until, leased)) if until <= s.now_ms() => {
                    let generation: u64 = std::str::from_utf8(&leased.payload.as_ref().unwrap().data.bytes)
                        .unwrap()
                        .trim_start_matches("{\"is\":\"")
                        .trim_end_matches("\"}")
                        .parse()
                        .unwrap();
                    if generation < 10 {
                        let next = keyed(&(generation + 1).to_string(), &format!("{}/next", leased.id));
                        repeated += u64::from(matches!(s.submit(w % 2, &next), Ok(Response::Existing(_))));
                    }
                    let _ = s.complete(w % 2, &leased);
                }
                Some(still) => *slot = Some(still),
                None => {
                    if let Some(leased) = s.claim(w % 2, "w", 1).pop() {
                        *deliveries.entry(leased.id).or_default() += 1;
                        *slot = Some((s.now_ms() + 12_000, leased));
                    }
                }
            }
        }
        let next = s.now_ms() + 500;
        s.at_ms(next);
    }
    assert_eq!(s.jobs(), 11);
    assert!(repeated > 0, "the follow-up was asked for more than once");
    assert!(deliveries.values().all(|n| *n <= 3), "{deliveries:?}");
    kept(&s);
}

#[test]
fn c06_sweepers_do_not_race_each_other() {
    for seed in 0..1_000 {
        let mut s = Script::with(seed, 3, |setup| {
            setup.config.lease_ms = 2_000;
            setup.config.scrub_ms = 0;
        });
        s.at(11);
        let id = s.create(0, &job("contested")).unwrap();
        let a = s.claim(0, "a", 1).pop().unwrap();
        // Its lease has run out for all three, who look at it in the same tick as B claims.
        let ends = s.now_ms() + 2_000;
        s.at_ms(ends);
        for r in 0..3 {
            let wait = s.claim_request("b", 1, 2_000, None);
            s.send(r, wait);
        }
        while s.world.oracle.tokens(id).len() < 2 && s.now_ms() < ends + 3_000 {
            s.steps(1);
        }
        let b = s.world.oracle.tokens(id);
        assert_eq!(b.len(), 2, "seed {seed}");
        assert!(b[1] > a.token);
        // B's lease is not cut by a sweeper that still holds the old one in its hands.
        let until = s.now_ms() + 1_000;
        s.at_ms(until);
        assert_eq!(s.status(id), Some(Status::Running), "seed {seed}");
        assert_eq!(s.count(0, id, Kind::LeaseExpired), 1, "seed {seed}");
        kept(&s);
    }
}

#[test]
fn c07_a_completion_is_whole_or_not_at_all() {
    let mut s = world(7, 1, 10);
    let id = s.create(0, &job("done")).unwrap();
    let leased = s.claim(0, "w", 1).pop().unwrap();
    let request = s.complete_request(id, leased.token);
    let call = s.send(0, request);
    let mut acknowledged = 0;
    for after in 0..12 {
        let mut s = s.clone();
        s.steps(after);
        let heard = s.answer(call).cloned();
        s.crash(0, Some(500));
        let crashed = s.now_ms();
        s.at_ms(crashed + 1_000);
        match heard {
            Some(outcome) => {
                assert_eq!(outcome, Ok(Response::Completed));
                acknowledged += 1;
            }
            // The worker has not heard, and asks again with its token.
            None => assert_eq!(s.complete(0, &leased), Ok(Response::Completed), "after {after} events"),
        }
        s.at(90);
        assert_eq!(s.status(id), Some(Status::Succeeded), "after {after} events");
        assert_eq!(s.count(0, id, Kind::LeaseExpired), 0);
        assert_eq!(s.count(0, id, Kind::Succeeded), 1);
        assert!(matches!(s.ask(0, Request::Result { tenant: TENANT.into(), job: id }), Ok(Response::Content(_))));
        kept(&s);
    }
    assert!(acknowledged > 0 && acknowledged < 12);
}

#[test]
fn c09_recovery_is_not_one_shot() {
    for gone_for_ever in [false, true] {
        let mut s = world(9, 2, 60);
        s.create(0, &job("orphan"));
        let leased = s.claim(0, "w", 1).pop().unwrap();
        let taken = s.now_ms();
        s.at_ms(taken + 5_000);
        s.crash(0, Some(1_000));
        s.crash(1, if gone_for_ever { None } else { Some(1_500) });
        s.at_ms(taken + 8_000);
        let again = s.poll(0, "v", 200, taken + 70_000).unwrap();
        assert!((taken + 60_000..=taken + 62_000).contains(&s.now_ms()), "{}", s.now_ms() - taken);
        assert_eq!((again.id, again.attempt), (leased.id, 2));
        kept(&s);
    }
}

#[test]
fn c10_a_heartbeat_does_not_outlive_the_run_deadline() {
    let mut s = world(10, 2, 10);
    let id = s.create(0, &Submit { run_timeout_ms: Some(60_000), ..job("hangs") }).unwrap();
    for attempt in 1..=3 {
        let leased = s.poll(0, "w", 500, 400_000).unwrap();
        assert_eq!(leased.attempt, attempt);
        let granted = s.now_ms();
        let mut beat = granted;
        let lost = loop {
            beat += 3_000;
            s.at_ms(beat);
            match s.beat(1, &leased) {
                Ok(_) => assert!(s.now_ms() < granted + 61_000),
                Err(failure) => break failure,
            }
        };
        assert_eq!(lost, Failure::LeaseLost);
        assert!((granted + 60_000..=granted + 64_000).contains(&s.now_ms()), "{}", s.now_ms() - granted);
        let ended = s.get(0, id).unwrap().attempts.last().cloned().unwrap();
        assert_eq!(ended.outcome, AttemptEnd::TimedOut);
        let took = (ended.ended - leased.token.at) / SECOND;
        assert!((60..=62).contains(&took), "{took}");
    }
    assert_eq!(s.status(id), Some(Status::Dead));
    kept(&s);
}

#[test]
fn c12_a_poison_job_is_bounded_and_stands_in_nobodys_way() {
    let mut s = world(12, 2, 5);
    let poison = s.create(0, &Submit { max_attempts: Some(5), ..job("poison") }).unwrap();
    let good: Vec<Submit> = (0..20).map(|n| job(&format!("good {n}"))).collect();
    let good = s.create_all(1, &good);
    let mut deliveries = 0;
    while s.now_ms() < 120_000 {
        for leased in s.claim(0, "w", 2) {
            if leased.id == poison {
                deliveries += 1;
            } else {
                s.complete(1, &leased).unwrap();
            }
        }
        let next = s.now_ms() + 500;
        s.at_ms(next);
    }
    assert_eq!(deliveries, 5);
    let view = s.get(0, poison).unwrap();
    assert_eq!((view.status, view.reason.as_deref()), (Status::Dead, Some("lease_expired")));
    assert_eq!(good.len(), 20);
    assert!(good.iter().all(|id| s.status(*id) == Some(Status::Succeeded)));
    // And it can be cancelled while a worker has it.
    let other = s.create(0, &job("poison too")).unwrap();
    let leased = s.claim(0, "w", 1).pop().unwrap();
    assert!(matches!(s.cancel(1, other), Ok(Response::Job(view)) if view.status == Status::Cancelled));
    assert_eq!(s.beat(0, &leased), Ok(Response::Beat { lease_expires_at: None, cancel_requested: true }));
    kept(&s);
}

#[test]
fn c14_the_back_off_never_overflows() {
    let mut s = Script::with(14, 1, |setup| {
        setup.config.sweep_ms = 600_000;
        setup.config.scrub_ms = 0;
    });
    s.at(30);
    s.create(0, &Submit { max_attempts: Some(70), ..job("fails") });
    let (mut least, mut delays) = (0, Vec::new());
    for n in 1..=66u32 {
        let leased = s.poll(0, "w", 5_000, u64::MAX).unwrap();
        let before = s.clock();
        let Ok(Response::Failed { status: Status::Retrying, run_at: Some(run_at) }) = s.fail(0, &leased) else {
            panic!("attempt {n}");
        };
        let delay = (run_at - before) / 1_000;
        // The band of the jitter, from the delay without it.
        let plain = (2_000u64 << (n - 1).min(40)).min(3_600_000);
        assert!((plain..=plain * 12 / 10 + 10).contains(&delay), "{n}: {delay}");
        assert!(plain >= least);
        least = plain;
        delays.push(delay);
        let next = s.now_ms() + delay;
        s.at_ms(next);
    }
    assert!(delays[40..].iter().all(|d| *d >= 3_600_000));
    kept(&s);
}

#[test]
fn c15_jobs_that_fail_together_do_not_come_back_together() {
    let mut s = world(15, 2, 60);
    let backoff = Backoff { base_ms: 60_000, max_ms: 3_600_000, factor_milli: 2_000, jitter_milli: 200 };
    let submits: Vec<Submit> = (0..1_000).map(|n| Submit { backoff: Some(backoff), ..job(&n.to_string()) }).collect();
    assert_eq!(s.create_all(0, &submits).len(), 1_000);
    let leased = s.claim(0, "w", 1_000);
    let failed = s.clock();
    let fails = leased.iter().enumerate().map(|(n, l)| s.fail_request(n as u32, l.id, l.token)).collect();
    let Ok(Response::Batch(outcomes)) = s.ask(0, Request::Batch(fails)) else { panic!("no batch") };
    let mut buckets: BTreeMap<u64, u32> = BTreeMap::new();
    for outcome in &outcomes {
        let Ok(Response::Failed { run_at: Some(run_at), .. }) = outcome else { panic!("{outcome:?}") };
        let after = (run_at - failed) / 1_000;
        assert!((60_000..=72_100).contains(&after), "{after}");
        *buckets.entry(after / 1_000).or_default() += 1;
    }
    assert_eq!(outcomes.len(), 1_000);
    assert!(buckets.values().all(|n| *n <= 150), "{buckets:?}");
    // After an outage of ten minutes they are all overdue, and a claim takes no more than it asked for.
    s.cut_store(0, 600).cut_store(1, 600);
    let back = seconds(&s) + 605;
    s.at(back);
    assert_eq!(s.claim(0, "w", 100).len(), 100);
    kept(&s);
}

#[test]
fn c19_only_the_stores_clock_counts() {
    let mut s = world(19, 2, 10);
    s.at(70);
    let later = s.create(0, &Submit { start: Start::DelayMs(60_000), ..job("at 130") }).unwrap();
    s.at(98);
    let id = s.create(0, &job("held")).unwrap();
    let leased = s.claim(1, "w", 1).pop().unwrap();
    let taken = s.now_ms();
    s.at(100).step_clock(1, 3_600);
    // The lease is not cut short by the step; its holder renews it once through the stepped replica.
    s.at_ms(taken + 9_000);
    assert_eq!(s.status(id), Some(Status::Running));
    assert!(matches!(s.beat(1, &leased), Ok(Response::Beat { lease_expires_at: Some(_), .. })));
    let renewed = s.now_ms();
    let again = s.poll(0, "v", 200, renewed + 15_000).unwrap();
    assert_eq!(again.id, id);
    assert!((renewed + 10_000..=renewed + 12_000).contains(&s.now_ms()), "{}", s.now_ms() - renewed);
    s.complete(0, &again).unwrap();
    let due = s.poll(0, "v", 200, 140_000).unwrap();
    assert_eq!(due.id, later);
    assert!((130_000..=132_000).contains(&s.now_ms()), "{}", s.now_ms());
    kept(&s);
}

#[test]
fn c28_a_key_does_not_outlive_its_dead_job() {
    let mut s = world(28, 2, 5);
    let first = s.create(0, &Submit { max_attempts: Some(1), ..keyed("once", "K") }).unwrap();
    s.claim(0, "killed", 1).pop().unwrap();
    let dead = seconds(&s) + 8;
    s.at(dead);
    assert_eq!(s.status(first), Some(Status::Dead));
    let next = s.submit(1, &keyed("again", "K"));
    let Ok(Response::Created(view)) = next else { panic!("{next:?}") };
    assert_ne!(view.id, first);
    // While it waits for its next attempt the key is still its own.
    let leased = s.poll(0, "w", 100, 120_000).unwrap();
    s.fail(0, &leased).unwrap();
    assert_eq!(s.status(view.id), Some(Status::Retrying));
    assert!(matches!(s.submit(1, &keyed("again", "K")), Ok(Response::Existing(v)) if v.id == view.id));
    kept(&s);
}

#[test]
fn c29_a_key_is_free_on_every_side_path() {
    let hour = Start::DelayMs(3_600_000);
    let tenant = || TENANT.to_owned();
    type Path = fn(&mut Script, leasehold_core::JobId);
    let paths: [(&str, Submit, Path); 5] = [
        ("cancel", Submit { start: hour, ..keyed("x", "K") }, |s, id| {
            s.cancel(1, id).unwrap();
        }),
        ("delete", Submit { start: hour, ..keyed("x", "K") }, |s, id| {
            s.cancel(1, id).unwrap();
            assert_eq!(s.ask(0, Request::Delete { tenant: TENANT.into(), job: id }), Ok(Response::Deleted));
        }),
        ("purge", Submit { start: hour, ..keyed("x", "K") }, |s, _| {
            let purge = Request::Purge { tenant: TENANT.into(), queue: "q".into(), status: Status::Scheduled };
            assert!(matches!(s.ask(1, purge), Ok(Response::Purged { purged: 1, left: 0, .. })));
        }),
        ("queue deadline", Submit { start: hour, queue_ttl_ms: Some(5_000), ..keyed("x", "K") }, |s, id| {
            let past = s.now_ms() + 7_000;
            s.at_ms(past);
            assert_eq!(s.status(id), Some(Status::Expired));
        }),
        ("retention", Submit { retention_ms: Some(1_000), key_ttl_ms: Some(0), ..keyed("x", "K") }, |s, _| {
            let leased = s.claim(0, "w", 1).pop().unwrap();
            let done = s.complete(0, &leased);
            assert_eq!(done, Ok(Response::Completed), "{:?}", s.broken());
            let past = s.now_ms() + 2_000;
            s.at_ms(past);
        }),
    ];
    for (name, submit, path) in paths {
        let mut s = world(29, 2, 10);
        let old = s.create(0, &submit).unwrap();
        path(&mut s, old);
        let next = s.submit(0, &keyed("other", "K"));
        assert!(matches!(next, Ok(Response::Created(ref v)) if v.id != old), "{name}: {next:?}");
        kept(&s);
    }
    // A late word of the old job's worker does not touch the key that is another's now.
    let mut s = world(29, 2, 10);
    let old = s.create(0, &keyed("x", "K")).unwrap();
    let leased = s.claim(0, "w", 1).pop().unwrap();
    s.cancel(1, old).unwrap();
    let new = s.create(0, &keyed("other", "K")).unwrap();
    assert_eq!(s.complete(1, &leased), Err(Failure::JobCancelled));
    assert_eq!(s.fail(0, &leased), Err(Failure::JobCancelled));
    assert!(matches!(s.submit(1, &keyed("other", "K")), Ok(Response::Existing(v)) if v.id == new));
    assert!(matches!(s.ask(0, Request::Get { tenant: tenant(), job: new }), Ok(Response::Job(_))));
    kept(&s);
}

#[test]
fn c30_a_key_is_checked_and_bound_in_one_step() {
    let mut s = world(30, 2, 10);
    // The first to come is sent through a replica whose answers get lost.
    s.cut_answers(0, 20);
    let calls: Vec<_> = (0..50)
        .map(|n| {
            let request = s.submit_request(&keyed("one", "K"));
            s.send(n % 2, request)
        })
        .collect();
    let wait = s.now_ms() + 3_000;
    s.at_ms(wait);
    let mut created = 0;
    let mut ids = BTreeSet::new();
    let mut see = |outcome: &Outcome| match outcome {
        Ok(Response::Created(v)) => {
            created += 1;
            ids.insert(v.id);
        }
        Ok(Response::Existing(v)) => {
            ids.insert(v.id);
        }
        other => panic!("{other:?}"),
    };
    calls.iter().filter_map(|c| s.answer(*c)).for_each(&mut see);
    // Those who did not hear ask again; so does everybody after a restart.
    let again = s.submit(0, &keyed("one", "K"));
    see(&again);
    s.crash(0, Some(100)).crash(1, Some(100));
    let up = s.now_ms() + 1_000;
    s.at_ms(up);
    let after = s.submit(1, &keyed("one", "K"));
    see(&after);
    assert!(matches!(after, Ok(Response::Existing(_))));
    assert!(created <= 1);
    assert_eq!((ids.len(), s.jobs()), (1, 1));
    assert_eq!(s.submit(0, &keyed("two", "K")), Err(Failure::KeyReused));
    let leased = s.poll(0, "w", 200, 60_000).unwrap();
    s.complete(0, &leased).unwrap();
    assert_eq!(s.submit(1, &keyed("two", "K")), Err(Failure::KeyReused));
    assert!(matches!(s.submit(1, &keyed("one", "K")), Ok(Response::Existing(_))));
    kept(&s);
}

#[test]
fn c54_cancel_races_with_every_end() {
    let mut s = world(54, 2, 3);
    let id = s.create(0, &Submit { max_attempts: Some(2), ..job("raced") }).unwrap();
    let leased = s.claim(0, "w", 1).pop().unwrap();
    let unknown = {
        let mut other = Script::new(99, 1);
        other.at(1);
        other.create(0, &job("elsewhere")).unwrap()
    };
    assert_eq!(s.cancel(0, unknown), Err(Failure::UnknownJob));
    for name in ["complete", "fail", "lapse"] {
        let mut finals = BTreeSet::new();
        // Either is first by so many events.
        for (cancel_first, after) in [false, true].into_iter().flat_map(|first| (0..14).map(move |n| (first, n))) {
            let mut s = s.clone();
            let cancel = Request::Cancel { tenant: TENANT.into(), job: id };
            if name == "lapse" {
                let ends = leased.lease_expires_at - sim::store::EPOCH;
                s.until(ends - 1_000);
            }
            let early = cancel_first.then(|| s.send(1, cancel.clone()));
            if cancel_first {
                s.steps(after);
            }
            let end = match name {
                "complete" => Some(s.complete_request(id, leased.token)),
                "fail" => Some(s.fail_request(0, id, leased.token)),
                _ => None,
            };
            let end = end.map(|request| s.send(0, request));
            if !cancel_first {
                s.steps(after);
            }
            let cancel = early.unwrap_or_else(|| s.send(1, cancel));
            let cancelled = s.wait(cancel);
            let settled = s.now_ms() + 6_000;
            s.at_ms(settled);
            let status = s.status(id).unwrap();
            finals.insert(status);
            let first = end.and_then(|call| s.answer(call).cloned());
            match status {
                Status::Cancelled => {
                    assert!(matches!(cancelled, Ok(Response::Job(_))), "{name} {after}: {cancelled:?}");
                    assert!(!matches!(first, Some(Ok(Response::Completed))), "{name} {after}");
                    assert!(s.complete(1, &leased).is_err(), "{name} {after}");
                }
                Status::Succeeded => {
                    assert_eq!(cancelled, Err(Failure::AlreadyTerminal), "{name} {after}");
                    assert_eq!(first, Some(Ok(Response::Completed)), "{name} {after}");
                }
                other => panic!("{name} {after}: {other:?}, {cancelled:?}, {first:?}"),
            }
            // A late word changes nothing and schedules nothing.
            assert!(s.claim(0, "v", 1).is_empty());
            assert_eq!(s.status(id), Some(status));
            kept(&s);
        }
        assert!(finals.contains(&Status::Cancelled), "{name}: {finals:?}");
    }
}

#[test]
fn c64_what_a_failover_forgets_leaves_each_job_whole() {
    for seed in 0..60 {
        let mut s = Script::with(seed, 2, |setup| {
            setup.regime = Regime::LoseLastCommits;
            setup.config.lease_ms = 4_000;
        });
        s.at(12);
        let submits: Vec<Submit> = (0..8).map(|n| keyed(&n.to_string(), &format!("k{n}"))).collect();
        for submit in &submits {
            s.create(0, submit);
        }
        let mut highest = None;
        for leased in s.claim(1, "w", 4) {
            highest = highest.max(Some(leased.token));
            let _ = s.complete(0, &leased);
        }
        s.rewind(1 + (seed as usize * 7) % 30);
        let clock = s.clock();
        assert!(s.world.oracle.live(clock).len() <= 8);
        // Clients repeat what they had acknowledged; lost completes are run again, under later tokens.
        for submit in &submits {
            s.create(1, submit);
        }
        let until = s.now_ms() + 60_000;
        while let Some(leased) = s.poll(0, "v", 200, until) {
            assert!(Some(leased.token) > highest, "seed {seed}: {leased:?}");
            let _ = s.complete(1, &leased);
        }
        let clock = s.clock();
        assert_eq!(s.world.oracle.live(clock), Vec::new(), "seed {seed}");
        kept(&s);
    }
}

#[test]
fn c65_a_replica_that_is_cut_off_hands_out_nothing() {
    let mut s = world(65, 2, 10);
    let id = s.create(0, &job("one")).unwrap();
    s.cut_store(1, 60);
    let mut handed_out = 0;
    for n in 0..50u64 {
        s.at_ms(32_000 + n * 1_000);
        let request = s.claim_request("b", 1, 0, None);
        let outcome = s.ask(1, request);
        let refused = matches!(
            outcome,
            Err(Failure::StoreUnavailable { .. } | Failure::OutcomeUnknown { .. } | Failure::MailboxFull { .. })
        );
        assert!(refused, "neither a job nor \"no work\": {outcome:?}");
        let read = s.ask(1, Request::Get { tenant: TENANT.into(), job: id });
        assert!(matches!(read, Err(Failure::StoreUnavailable { .. })), "{read:?}");
        if n == 3 {
            handed_out += s.claim(0, "a", 1).len();
        }
    }
    assert_eq!(handed_out, 1);
    kept(&s);
}

/// A resource outside, written to by workers; with a fence it refuses tokens older than the newest.
fn stale_writes(seed: u64, fenced: bool) -> usize {
    let mut s = Script::with(seed, 2, |setup| setup.config.lease_ms = 5_000);
    s.at(12);
    s.create(0, &Submit { max_attempts: Some(4), ..job("write") });
    let (mut newest, mut stale) = (None, 0);
    let mut late = Vec::new();
    for _ in 0..3 {
        let until = s.now_ms() + 20_000;
        let Some(leased) = s.poll(0, "w", 500, until) else { break };
        // It pauses for 30 s between its claim and its write.
        late.push((s.now_ms() + 30_000, leased.token));
    }
    for (at, token) in late.into_iter().rev() {
        s.at_ms(at);
        if fenced && Some(token) < newest {
            continue;
        }
        stale += usize::from(Some(token) < newest);
        newest = newest.max(Some(token));
    }
    kept(&s);
    stale
}

#[test]
fn c67_tokens_fence_a_resource() {
    assert_eq!((0..100).map(|seed| stale_writes(seed, true)).sum::<usize>(), 0);
    assert!(stale_writes(1, false) > 0, "without the fence the check must object");
}

#[test]
fn c70_a_lost_reply_has_one_effect() {
    for lost in 0..6 {
        for kind in ["create", "claim", "beat", "complete", "fail", "release", "cancel"] {
            let mut s = world(70, 2, 10);
            let id = s.create(0, &keyed("one", "K")).unwrap();
            let leased = (kind != "create" && kind != "claim").then(|| s.claim(0, "w", 1).pop().unwrap());
            let mut orders = vec![Order::Pass; lost];
            orders.push(Order::LoseReply);
            s.orders(&orders);
            let outcome = match (kind, &leased) {
                ("create", _) => s.submit(0, &keyed("two", "L")),
                ("claim", _) => {
                    let request = s.claim_request("w", 1, 0, Some("the claim"));
                    s.ask(0, request)
                }
                ("beat", Some(leased)) => s.beat(0, leased),
                ("complete", Some(leased)) => s.complete(0, leased),
                ("fail", Some(leased)) => s.fail(0, leased),
                ("release", Some(leased)) => s.release(0, leased),
                _ => s.cancel(0, id),
            };
            assert!(outcome.is_ok(), "{kind}, reply {lost} lost: {outcome:?}");
            let after = s.now_ms() + 7_000;
            s.at_ms(after);
            let jobs = if kind == "create" { 2 } else { 1 };
            assert_eq!(s.jobs(), jobs, "{kind}, reply {lost} lost");
            let deliveries = usize::from(kind != "create");
            assert_eq!(s.world.oracle.tokens(id).len(), deliveries, "{kind}, reply {lost} lost");
            for done in [Kind::Succeeded, Kind::Retrying, Kind::Released, Kind::Cancelled, Kind::Claimed] {
                assert!(s.count(1, id, done) <= 1, "{kind}: {done:?}");
            }
            kept(&s);
        }
    }
}

#[test]
fn c71_everything_ends_after_the_faults() {
    for seed in 0..12 {
        let plan = sim::plan::Plan::of(71_000 + seed);
        let mut choices = plan.choices();
        let mut setup = sim::setup::Setup::draw(plan.seed, &mut choices);
        setup.chaos_us = 300 * SECOND;
        setup.chaos_every_us = 10 * SECOND;
        setup.workers = 3;
        let mut world = sim::world::World::new(setup, choices);
        world.run();
        assert_eq!(world.broken, None, "seed {}", plan.seed);
    }
}

#[test]
fn c73_an_acknowledged_create_exists() {
    let mut s = world(73, 1, 10);
    let request = s.submit_request(&keyed("one", "K"));
    let call = s.send(0, request);
    for after in 0..10 {
        let mut s = s.clone();
        s.steps(after);
        let heard = s.heard(call).cloned();
        s.crash(0, Some(300));
        let up = s.now_ms() + 6_000;
        s.at_ms(up);
        if let Some(Heard::Answer(Ok(Response::Created(view)))) = heard {
            assert!(s.get(0, view.id).is_some(), "after {after} events");
        }
        let again = s.create(0, &keyed("one", "K")).unwrap();
        assert_eq!((s.jobs(), s.status(again)), (1, Some(Status::Queued)), "after {after} events");
        kept(&s);
    }
}

#[test]
fn c75_a_seed_is_the_same_every_time() {
    for seed in 0..40 {
        let plan = sim::plan::Plan::of(seed);
        let (a, b) = (sim::report::run(&plan), sim::report::run(&plan));
        assert_eq!((a.digest, a.counts.events), (b.digest, b.counts.events), "seed {seed}");
    }
}

#[test]
fn a_lease_in_nobodys_hands_is_of_no_use() {
    let mut s = world(80, 1, 10);
    let id = s.create(0, &job("one")).unwrap();
    let leased = s.claim(0, "w", 1).pop().unwrap();
    let wrong = leasehold_core::Token { at: leased.token.at + 1, ..leased.token };
    assert_eq!(s.ask(0, Request::Release(held(id, wrong))), Err(Failure::LeaseLost));
    assert_eq!(s.status(id), Some(Status::Running));
    kept(&s);
}

#[test]
fn a_key_of_a_vanished_job_is_free_again() {
    let mut s = Script::with(81, 2, |setup| setup.regime = Regime::EvictKeys);
    s.at(12);
    let old = s.create(0, &keyed("one", "K")).unwrap();
    s.world.evict_key(&keys::job(old));
    let next = s.submit(1, &keyed("one", "K"));
    assert!(matches!(next, Ok(Response::Created(ref v)) if v.id != old), "{next:?}");
    assert!(s.world.marks.contains_key(&Mark::KeyTakenOver));
    // What is left of the old one is met by the claim, told as lost, and not handed out.
    let leased = s.claim(0, "w", 10);
    assert_eq!(leased.len(), 1);
    assert_ne!(leased[0].id, old);
    assert_eq!(s.count(0, old, Kind::Lost), 1);
    kept(&s);
}

#[test]
fn a_record_that_cannot_be_read_is_put_aside() {
    let mut s = Script::with(82, 1, |setup| setup.regime = Regime::EvictKeys);
    s.at(12);
    let (bad, good) = (s.create(0, &job("bad")).unwrap(), s.create(0, &job("good")).unwrap());
    s.world.corrupt_key(&keys::job(bad), bytes::Bytes::from_static(b"\x01nonsense"));
    let leased = s.claim(0, "w", 10);
    assert_eq!(leased.iter().map(|l| l.id).collect::<Vec<_>>(), [good]);
    assert_eq!(s.ask(0, Request::Get { tenant: TENANT.into(), job: bad }), Err(Failure::Quarantined));
    assert_eq!(s.count(0, bad, Kind::Quarantined), 1);
    kept(&s);
}

#[test]
fn a_record_of_a_newer_release_stops_the_claims_of_this_one() {
    let mut s = Script::with(83, 1, |setup| setup.regime = Regime::EvictKeys);
    s.at(12);
    let id = s.create(0, &job("newer")).unwrap();
    let mut newer = s.world.store.model.record(&keys::job(id)).unwrap().bytes.to_vec();
    newer.truncate(newer.len() - 4);
    newer[0] += 1;
    let check = xxhash_rust::xxh3::xxh3_64(&newer) as u32;
    newer.extend_from_slice(&check.to_le_bytes());
    s.world.corrupt_key(&keys::job(id), newer.into());
    assert!(s.claim(0, "w", 10).is_empty());
    let request = s.claim_request("w", 1, 0, None);
    assert!(matches!(s.ask(0, request), Err(Failure::NewerFormat { .. })));
    // It is neither run nor put aside: another replica will know it.
    let later = s.now_ms() + 90_000;
    s.at_ms(later);
    assert_eq!(s.count(0, id, Kind::Quarantined), 0);
    assert!(matches!(s.status(id), Some(Status::Queued | Status::Running)));
    kept(&s);
}
