//! The checker checked. Goal: each promise is the one that objects when it is broken. Method: a world
//! is brought to some state by the real core, then one transaction or one answer is forged.

use std::sync::Arc;

use leasehold_core::codec;
use leasehold_core::job::record::{AttemptEnd, AttemptRecord, Class, History, Job, KeyRecord, Lease, Owner, Status};
use leasehold_core::request::{Leased, Start, Submit};
use leasehold_core::store::{
    Commit, Each, Expiry, SCORE_MAX, ScoreAt, Source, Store as _, Take, Txn, Value, Version, Write, keys,
};
use leasehold_core::{Failure, JobId, Name, Outcome, Request, Response, Token};

use super::Promise;
use crate::calls::{Caller, Instant};
use crate::scenarios::{Script, TENANT, held, job, keyed};
use crate::setup::SECOND;

const Q: &str = "q";

fn world() -> Script {
    let mut s = Script::new(5, 1);
    s.at(20);
    s
}

fn running() -> (Script, Leased) {
    let mut s = world();
    s.create(0, &keyed("one", "K")).unwrap();
    let leased = s.claim(0, "w", 1).pop().unwrap();
    (s, leased)
}

fn index(class: Class, status: Status) -> Name {
    keys::status(TENANT, Q, class, status)
}

fn txn(writes: Vec<Write>, take: Option<Take>) -> Txn {
    Txn { valid_until: SCORE_MAX, guards: Vec::new(), take, writes }
}

/// Commits a forged transaction; which promise objects?
fn forge_take(s: &mut Script, writes: Vec<Write>, take: Option<Take>) -> Option<Promise> {
    let now = s.world.now;
    s.world.store.tick(now);
    let mut writes = writes;
    // An event, so that its absence is not what is noticed.
    writes.push(Write::Append { log: keys::audit(TENANT), bytes: bytes::Bytes::from_static(b"forged") });
    let txn = Arc::new(txn(writes, take));
    let reply = s.world.store.model.commit(&Commit { txns: vec![txn.clone()], grows: false }).unwrap();
    let world = &mut s.world;
    let judged = world.oracle.commit(&world.store.model, &txn, &reply.answers[0], &mut world.ledger);
    judged.err().map(|v| v.promise)
}

fn forge(s: &mut Script, writes: Vec<Write>) -> Option<Promise> {
    forge_take(s, writes, None)
}

/// Puts an answer into a replica's mouth.
fn answer(s: &mut Script, request: Request, outcome: &Outcome) -> Option<Promise> {
    let call = s.world.ledger.open(Caller::Script, 0, 0, request, s.world.now);
    let (change, clock) = (s.world.oracle.changes(), s.clock());
    let now = s.world.now;
    s.world.ledger.get_mut(call).unwrap().arrived = Some((Instant { change, clock, answers: 0, now }, 0));
    let world = &mut s.world;
    world.oracle.arrives(&world.ledger, call);
    let judged = world.oracle.reply(&world.store.model, &mut world.ledger, call, outcome, 1, now);
    judged.err().map(|v| v.promise)
}

fn put<T: serde_like::Encode>(key: Name, value: &T) -> Write {
    Write::Put { key, version: Version(77), value: Value::Bytes(value.encoded()), expiry: Expiry::Never }
}

/// What the core's codec takes, without naming serde here.
mod serde_like {
    use super::*;
    pub trait Encode {
        fn encoded(&self) -> bytes::Bytes;
    }
    macro_rules! encode {
        ($($t:ty),*) => { $(impl Encode for $t { fn encoded(&self) -> bytes::Bytes { codec::encode(self) } })* };
    }
    encode!(Job, Lease, History, KeyRecord);
}

fn add(index: Name, job: JobId, score: ScoreAt) -> Write {
    Write::Add { index, member: keys::member(job), score, raise: false }
}

fn remove(index: Name, job: JobId) -> Write {
    Write::Remove { index, member: keys::member(job) }
}

fn main(s: &Script, job: JobId) -> Job {
    (**s.world.oracle.facts(job).unwrap().main.as_ref().unwrap().value.as_ref().unwrap()).clone()
}

fn lease(s: &Script, job: JobId) -> Lease {
    (**s.world.oracle.facts(job).unwrap().lease.as_ref().unwrap().value.as_ref().unwrap()).clone()
}

/// The writes by which a running job leaves that state.
fn leave(job: JobId) -> Vec<Write> {
    vec![Write::Delete(keys::lease(job)), remove(index(Class::System, Status::Running), job), remove(keys::LEASES, job)]
}

#[test]
fn one_live_lease_objects_to_a_second_grant() {
    let (mut s, leased) = running();
    let second = put(keys::lease(leased.id), &lease(&s, leased.id));
    assert_eq!(forge(&mut s, vec![second]), Some(Promise::OneLiveLease));
}

#[test]
fn one_live_lease_objects_to_a_lease_that_is_cut() {
    let (mut s, leased) = running();
    let cut = add(keys::LEASES, leased.id, ScoreAt::Clock(1));
    assert_eq!(forge(&mut s, vec![cut]), Some(Promise::OneLiveLease));
}

#[test]
fn one_live_lease_objects_to_an_early_reclaim() {
    let (mut s, leased) = running();
    let (mut main, mut history) = (main(&s, leased.id), History::default());
    main.attempts = 1;
    main.deliveries = 1;
    history.push(attempt(&leased, AttemptEnd::LeaseExpired));
    let mut writes = leave(leased.id);
    writes.extend([
        put(keys::job(leased.id), &main),
        put(keys::history(leased.id), &history),
        add(index(Class::System, Status::Queued), leased.id, ScoreAt::Of(index(Class::System, Status::Running))),
    ]);
    assert_eq!(forge(&mut s, writes), Some(Promise::OneLiveLease));
}

fn attempt(leased: &Leased, outcome: AttemptEnd) -> AttemptRecord {
    AttemptRecord { delivery: 1, token: leased.token, worker: "w".into(), ended: 0, outcome, error: None, run_at: None }
}

#[test]
fn one_live_lease_objects_to_a_swapped_token() {
    let (mut s, leased) = running();
    let request = s.claim_request("v", 1, 0, None);
    let forged = Leased { token: Token { at: leased.token.at + 1, ..leased.token }, ..leased };
    assert_eq!(answer(&mut s, request, &Ok(Response::Claimed(vec![forged]))), Some(Promise::OneLiveLease));
}

#[test]
fn one_live_lease_objects_when_a_lease_is_handed_to_another() {
    let (mut s, leased) = running();
    let request = s.claim_request("v", 1, 0, None);
    assert_eq!(answer(&mut s, request, &Ok(Response::Claimed(vec![leased]))), Some(Promise::OneLiveLease));
}

#[test]
fn books_balance_objects_to_a_dropped_entry() {
    let mut s = world();
    let id = s.create(0, &job("one")).unwrap();
    let dropped = remove(index(Class::System, Status::Queued), id);
    assert_eq!(forge(&mut s, vec![dropped]), Some(Promise::BooksBalance));
    let mut s = world();
    let id = s.create(0, &job("one")).unwrap();
    let twice = add(index(Class::Batch, Status::Queued), id, ScoreAt::Clock(0));
    assert!(forge(&mut s, vec![twice]).is_some());
    let (mut s, leased) = running();
    assert_eq!(forge(&mut s, vec![remove(keys::LEASES, leased.id)]), Some(Promise::BooksBalance));
}

#[test]
fn one_key_one_job_objects_to_a_second_binding() {
    let (mut s, leased) = running();
    let other = s.create(0, &job("two")).unwrap();
    let record = KeyRecord { owner: Owner::Job(other), fingerprint: 1 };
    assert_eq!(forge(&mut s, vec![put(keys::key(TENANT, "K"), &record)]), Some(Promise::OneKeyOneJob));
    let _ = leased;
}

#[test]
fn acked_never_lost_objects_to_a_record_that_goes() {
    let mut s = world();
    let id = s.create(0, &job("one")).unwrap();
    let gone = vec![Write::Delete(keys::job(id)), remove(index(Class::System, Status::Queued), id)];
    assert_eq!(forge(&mut s, gone), Some(Promise::AckedNeverLost));
    let mut s = world();
    let id = s.create(0, &job("one")).unwrap();
    let request = Request::Get { tenant: TENANT.into(), job: id };
    assert_eq!(answer(&mut s, request, &Err(Failure::UnknownJob)), Some(Promise::AckedNeverLost));
}

#[test]
fn no_early_run_objects_to_an_early_promotion() {
    let mut s = world();
    let id = s.create(0, &Submit { start: Start::DelayMs(60_000), ..job("later") }).unwrap();
    let early = vec![
        remove(index(Class::System, Status::Scheduled), id),
        add(index(Class::System, Status::Queued), id, ScoreAt::Of(keys::DUE)),
        remove(keys::DUE, id),
    ];
    assert_eq!(forge(&mut s, early), Some(Promise::NoEarlyRun));
}

/// A take as a claim makes it, from one class only.
fn take(s: &Script, class: Class, worker: &str) -> Take {
    let queued = index(class, Status::Queued);
    let record = Lease {
        worker: worker.into(),
        tenant: TENANT.into(),
        queue: Q.into(),
        class,
        length_ms: 30_000,
        terms: leasehold_core::job::record::Terms::Standard,
    };
    let _ = s;
    let source = Source {
        index: queued.clone(),
        due: false,
        each: vec![
            Each::Add { index: index(class, Status::Running), score: ScoreAt::Of(queued) },
            Each::Add { index: keys::LEASES, score: ScoreAt::Clock(30 * SECOND) },
            Each::Put {
                prefix: keys::LEASE,
                version: Version(9),
                bytes: codec::encode(&record),
                expiry: Expiry::Never,
            },
        ],
    };
    Take { n: 1, from: vec![source], give: Vec::new(), max_bytes: 0 }
}

/// A claim that is under way, and its worker's name.
fn claiming(s: &mut Script) -> String {
    let request = s.claim_request("w", 1, 0, None);
    let Request::Claim(claim) = &request else { panic!("a claim") };
    let worker = claim.worker.clone();
    let call = s.world.ledger.open(Caller::Script, 0, 0, request, s.world.now);
    s.world.ledger.get_mut(call).unwrap().arrived = Some((Instant::default(), 0));
    worker
}

#[test]
fn priority_objects_when_a_higher_class_waits() {
    let mut s = world();
    s.create(0, &Submit { class: Class::Interactive, ..job("urgent") });
    s.create(0, &Submit { class: Class::Batch, ..job("later") });
    let worker = claiming(&mut s);
    let low = take(&s, Class::Batch, &worker);
    assert_eq!(forge_take(&mut s, Vec::new(), Some(low)), Some(Promise::Priority));
    let mut s = world();
    s.create(0, &Submit { class: Class::Interactive, ..job("urgent") });
    let worker = claiming(&mut s);
    let high = take(&s, Class::Interactive, &worker);
    assert_eq!(forge_take(&mut s, Vec::new(), Some(high)), None, "the same take is right if nothing else waits");
}

#[test]
fn honest_replies_object_to_a_claim_by_nobody() {
    let mut s = world();
    s.create(0, &job("one"));
    let by_nobody = take(&s, Class::System, "nobody");
    assert_eq!(forge_take(&mut s, Vec::new(), Some(by_nobody)), Some(Promise::HonestReplies));
}

#[test]
fn honest_replies_object_to_a_claim_that_was_refused() {
    let mut s = world();
    s.create(0, &job("one"));
    let worker = claiming(&mut s);
    let call = s.world.ledger.next() - 1;
    let refused = s.world.ledger.get_mut(call).unwrap();
    refused.items[0].fate = crate::calls::Fate::Refused("store_unavailable");
    let late = take(&s, Class::System, &worker);
    assert_eq!(forge_take(&mut s, Vec::new(), Some(late)), Some(Promise::HonestReplies));
}

#[test]
fn honest_replies_object_to_an_ok_without_a_commit() {
    let (mut s, leased) = running();
    let complete = s.complete_request(leased.id, leased.token);
    assert_eq!(answer(&mut s, complete, &Ok(Response::Completed)), Some(Promise::HonestReplies));
    let release = Request::Release(held(leased.id, leased.token));
    assert_eq!(answer(&mut s, release, &Err(Failure::LeaseLost)), Some(Promise::HonestReplies));
}

#[test]
fn no_ghosts_object_to_another_payload() {
    let (mut s, leased) = running();
    let request = s.claim_request("v", 1, 0, None);
    let blank = Leased { payload: Some(leasehold_core::opaque::Content::json("null")), ..leased };
    assert_eq!(answer(&mut s, request, &Ok(Response::Claimed(vec![blank]))), Some(Promise::NoGhosts));
}

#[test]
fn bounded_attempts_object_to_an_attempt_that_is_not_counted() {
    let (mut s, leased) = running();
    let ends = leased.lease_expires_at - crate::store::EPOCH + 1;
    s.world.now = ends;
    let (main, mut history) = (main(&s, leased.id), History::default());
    history.push(attempt(&leased, AttemptEnd::LeaseExpired));
    let mut writes = leave(leased.id);
    let mut uncounted = main;
    uncounted.deliveries = 1;
    writes.extend([
        put(keys::job(leased.id), &uncounted),
        put(keys::history(leased.id), &history),
        add(index(Class::System, Status::Queued), leased.id, ScoreAt::Of(index(Class::System, Status::Running))),
    ]);
    assert_eq!(forge(&mut s, writes), Some(Promise::BoundedAttempts));
}

#[test]
fn stale_token_refused_objects_when_an_end_is_not_kept() {
    let (mut s, leased) = running();
    let mut forgotten = main(&s, leased.id);
    forgotten.attempts = 1;
    forgotten.deliveries = 1;
    let mut writes = leave(leased.id);
    writes.extend([
        put(keys::job(leased.id), &forgotten),
        add(index(Class::System, Status::Queued), leased.id, ScoreAt::Of(index(Class::System, Status::Running))),
    ]);
    assert_eq!(forge(&mut s, writes), Some(Promise::StaleTokenRefused));
}

#[test]
fn forward_only_objects_when_a_success_is_undone() {
    let (mut s, leased) = running();
    let before = main(&s, leased.id);
    s.complete(0, &leased).unwrap();
    let undone = vec![
        put(keys::job(leased.id), &before),
        remove(index(Class::System, Status::Succeeded), leased.id),
        add(index(Class::System, Status::Queued), leased.id, ScoreAt::Clock(0)),
    ];
    assert_eq!(forge(&mut s, undone), Some(Promise::ForwardOnly));
}

#[test]
fn slot_not_resurrected_objects_to_a_late_heartbeat() {
    let (mut s, leased) = running();
    s.complete(0, &leased).unwrap();
    let beat = Request::Heartbeat(leasehold_core::request::Beat {
        held: held(leased.id, leased.token),
        progress: None,
        seq: None,
    });
    let revived = Ok(Response::Beat { lease_expires_at: Some(leased.lease_expires_at), cancel_requested: false });
    assert_eq!(answer(&mut s, beat, &revived), Some(Promise::SlotNotResurrected));
}

#[test]
fn no_silent_stall_objects_to_no_work_while_there_is_some() {
    let mut s = world();
    s.create(0, &job("waits"));
    let claim = s.claim_request("w", 1, 0, None);
    assert_eq!(answer(&mut s, claim, &Ok(Response::Claimed(Vec::new()))), Some(Promise::NoSilentStall));
}

#[test]
fn the_whole_store_is_compared_now_and_then() {
    let mut s = world();
    let id = s.create(0, &job("one")).unwrap();
    // Behind the oracle's back.
    s.world.store.model.evict(&keys::payload(id));
    let world = &mut s.world;
    assert!(world.oracle.full(&world.store.model).is_err());
}
