//! The checker checked. Goal: each promise is the one that objects when it is broken. Method: a world
//! is brought to some state by the real core, then one transaction or one answer is forged; for what only the calm
//! can break, the world is brought there with something amiss.

use std::collections::BTreeMap;
use std::sync::Arc;

use leasehold_core::codec;
use leasehold_core::event::Kind;
use leasehold_core::group::record::{Group, GroupStatus, Mode};
use leasehold_core::ids::GroupId;
use leasehold_core::job::record::{AttemptEnd, AttemptRecord, Class, History, Job, KeyRecord, Lease, Owner, Status};
use leasehold_core::opaque::Content;
use leasehold_core::pool::record::{Slot, SlotState};
use leasehold_core::request::{CreateGroup, Leased, Start, Submit};
use leasehold_core::store::{
    Commit, Each, Expiry, SCORE_MAX, ScoreAt, Source, Store as _, Take, Txn, Value, Version, Write, keys,
};
use leasehold_core::{Failure, JobId, Name, Outcome, Request, Response, Token};

use super::{Promise, Subject};
use crate::calls::{Caller, Instant};
use crate::scenarios::{POOL, Script, TENANT, held, job, keyed};
use crate::setup::SECOND;
use crate::world::{Event, Phase};

/// Each promise, and what breaks it. One without a case does not compile.
macro_rules! cases {
    ($($promise:ident: $($name:ident)+;)*) => {
        const _: fn(Promise) = |promise| match promise { $(Promise::$promise => ()),* };

        mod objects {
            $($(
                #[test]
                fn $name() {
                    assert_eq!(super::$name(), Some(super::Promise::$promise));
                }
            )+)*
        }
    };
}

cases! {
    AckedNeverLost: a_record_that_goes a_job_that_is_said_to_be_unknown;
    OneKeyOneJob: a_second_binding;
    OneLiveLease: a_second_grant a_lease_that_is_cut an_early_reclaim a_swapped_token a_lease_handed_to_another;
    StaleTokenRefused: an_end_that_is_not_kept;
    ForwardOnly: a_success_that_is_undone;
    BoundedAttempts: an_attempt_that_is_not_counted;
    NoGhosts: another_payload;
    LimitHeld: a_child_too_many a_slot_too_many a_slot_handed_out_twice;
    SlotNotResurrected: a_late_heartbeat;
    FinalizedOnce: a_final_group_that_changes an_end_before_its_children a_final_group_without_its_event;
    Priority: a_higher_class_that_waits;
    NoEarlyRun: an_early_promotion;
    NoSilentStall: no_work_while_there_is_some;
    HonestReplies: a_claim_by_nobody a_claim_that_was_refused an_ok_without_a_commit a_refusal_without_a_cause;
    BooksBalance: a_dropped_entry a_dropped_lease;
    BoundedMetadata: a_receipt_that_is_kept_too_long;
    EventuallyDone: a_job_that_never_ends a_group_that_nobody_moves;
}

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
    encode!(Job, Lease, History, KeyRecord, Group, Slot);
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

fn a_second_grant() -> Option<Promise> {
    let (mut s, leased) = running();
    let second = put(keys::lease(leased.id), &lease(&s, leased.id));
    forge(&mut s, vec![second])
}

fn a_lease_that_is_cut() -> Option<Promise> {
    let (mut s, leased) = running();
    let cut = add(keys::LEASES, leased.id, ScoreAt::Clock(1));
    forge(&mut s, vec![cut])
}

fn an_early_reclaim() -> Option<Promise> {
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
    forge(&mut s, writes)
}

fn attempt(leased: &Leased, outcome: AttemptEnd) -> AttemptRecord {
    AttemptRecord { delivery: 1, token: leased.token, worker: "w".into(), ended: 0, outcome, error: None, run_at: None }
}

fn a_swapped_token() -> Option<Promise> {
    let (mut s, leased) = running();
    let request = s.claim_request("v", 1, 0, None);
    let forged = Leased { token: Token { at: leased.token.at + 1, ..leased.token }, ..leased };
    answer(&mut s, request, &Ok(Response::Claimed(vec![forged])))
}

fn a_lease_handed_to_another() -> Option<Promise> {
    let (mut s, leased) = running();
    let request = s.claim_request("v", 1, 0, None);
    answer(&mut s, request, &Ok(Response::Claimed(vec![leased])))
}

fn a_dropped_entry() -> Option<Promise> {
    let mut s = world();
    let id = s.create(0, &job("one")).unwrap();
    forge(&mut s, vec![remove(index(Class::System, Status::Queued), id)])
}

fn a_dropped_lease() -> Option<Promise> {
    let (mut s, leased) = running();
    forge(&mut s, vec![remove(keys::LEASES, leased.id)])
}

#[test]
fn a_job_in_two_queues_is_noticed() {
    let mut s = world();
    let id = s.create(0, &job("one")).unwrap();
    let twice = add(index(Class::Batch, Status::Queued), id, ScoreAt::Clock(0));
    assert!(forge(&mut s, vec![twice]).is_some());
}

fn a_second_binding() -> Option<Promise> {
    let (mut s, _) = running();
    let other = s.create(0, &job("two")).unwrap();
    let record = KeyRecord { owner: Owner::Job(other), fingerprint: 1 };
    forge(&mut s, vec![put(keys::key(TENANT, "K"), &record)])
}

fn a_record_that_goes() -> Option<Promise> {
    let mut s = world();
    let id = s.create(0, &job("one")).unwrap();
    forge(&mut s, vec![Write::Delete(keys::job(id)), remove(index(Class::System, Status::Queued), id)])
}

fn a_job_that_is_said_to_be_unknown() -> Option<Promise> {
    let mut s = world();
    let id = s.create(0, &job("one")).unwrap();
    let request = Request::Get { tenant: TENANT.into(), job: id };
    answer(&mut s, request, &Err(Failure::UnknownJob))
}

fn an_early_promotion() -> Option<Promise> {
    let mut s = world();
    let id = s.create(0, &Submit { start: Start::DelayMs(60_000), ..job("later") }).unwrap();
    let early = vec![
        remove(index(Class::System, Status::Scheduled), id),
        add(index(Class::System, Status::Queued), id, ScoreAt::Of(keys::DUE)),
        remove(keys::DUE, id),
    ];
    forge(&mut s, early)
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

fn a_higher_class_that_waits() -> Option<Promise> {
    let mut s = world();
    s.create(0, &Submit { class: Class::Interactive, ..job("urgent") });
    s.create(0, &Submit { class: Class::Batch, ..job("later") });
    let worker = claiming(&mut s);
    let low = take(&s, Class::Batch, &worker);
    forge_take(&mut s, Vec::new(), Some(low))
}

#[test]
fn the_same_take_is_right_if_nothing_else_waits() {
    let mut s = world();
    s.create(0, &Submit { class: Class::Interactive, ..job("urgent") });
    let worker = claiming(&mut s);
    let high = take(&s, Class::Interactive, &worker);
    assert_eq!(forge_take(&mut s, Vec::new(), Some(high)), None);
}

fn a_claim_by_nobody() -> Option<Promise> {
    let mut s = world();
    s.create(0, &job("one"));
    let by_nobody = take(&s, Class::System, "nobody");
    forge_take(&mut s, Vec::new(), Some(by_nobody))
}

fn a_claim_that_was_refused() -> Option<Promise> {
    let mut s = world();
    s.create(0, &job("one"));
    let worker = claiming(&mut s);
    let call = s.world.ledger.next() - 1;
    let refused = s.world.ledger.get_mut(call).unwrap();
    refused.items[0].fate = crate::calls::Fate::Refused("store_unavailable");
    let late = take(&s, Class::System, &worker);
    forge_take(&mut s, Vec::new(), Some(late))
}

fn an_ok_without_a_commit() -> Option<Promise> {
    let (mut s, leased) = running();
    let complete = s.complete_request(leased.id, leased.token);
    answer(&mut s, complete, &Ok(Response::Completed))
}

fn a_refusal_without_a_cause() -> Option<Promise> {
    let (mut s, leased) = running();
    answer(&mut s, Request::Release(held(leased.id, leased.token)), &Err(Failure::LeaseLost))
}

fn another_payload() -> Option<Promise> {
    let (mut s, leased) = running();
    let request = s.claim_request("v", 1, 0, None);
    let blank = Leased { payload: Some(leasehold_core::opaque::Content::json("null")), ..leased };
    answer(&mut s, request, &Ok(Response::Claimed(vec![blank])))
}

fn an_attempt_that_is_not_counted() -> Option<Promise> {
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
    forge(&mut s, writes)
}

fn an_end_that_is_not_kept() -> Option<Promise> {
    let (mut s, leased) = running();
    let mut forgotten = main(&s, leased.id);
    forgotten.attempts = 1;
    forgotten.deliveries = 1;
    let mut writes = leave(leased.id);
    writes.extend([
        put(keys::job(leased.id), &forgotten),
        add(index(Class::System, Status::Queued), leased.id, ScoreAt::Of(index(Class::System, Status::Running))),
    ]);
    forge(&mut s, writes)
}

fn a_success_that_is_undone() -> Option<Promise> {
    let (mut s, leased) = running();
    let before = main(&s, leased.id);
    s.complete(0, &leased).unwrap();
    let undone = vec![
        put(keys::job(leased.id), &before),
        remove(index(Class::System, Status::Succeeded), leased.id),
        add(index(Class::System, Status::Queued), leased.id, ScoreAt::Clock(0)),
    ];
    forge(&mut s, undone)
}

fn a_late_heartbeat() -> Option<Promise> {
    let (mut s, leased) = running();
    s.complete(0, &leased).unwrap();
    let beat = Request::Heartbeat(leasehold_core::request::Beat {
        held: held(leased.id, leased.token),
        progress: None,
        seq: None,
    });
    let revived = Ok(Response::Beat { lease_expires_at: Some(leased.lease_expires_at), cancel_requested: false });
    answer(&mut s, beat, &revived)
}

fn no_work_while_there_is_some() -> Option<Promise> {
    let mut s = world();
    s.create(0, &job("waits"));
    let claim = s.claim_request("w", 1, 0, None);
    answer(&mut s, claim, &Ok(Response::Claimed(Vec::new())))
}

/// A sealed group of so many children, one at a time.
fn group(children: usize) -> CreateGroup {
    let child = |n| Submit::new("any", "any", Content::json(format!("{{\"child\":{n}}}")));
    CreateGroup {
        common: Submit::new(TENANT, Q, Content::json("null")),
        children: (0..children).map(child).collect(),
        max_parallel: Some(1),
        mode: Mode::CollectAll,
        sealed: true,
        open_timeout_ms: None,
    }
}

/// A group whose first child has been released.
fn in_work() -> (Script, GroupId) {
    let mut s = world();
    let id = s.create_group(0, &group(2)).unwrap();
    s.at(25);
    assert_eq!(s.status(id.child(0)), Some(Status::Queued));
    (s, id)
}

fn record(s: &Script, id: GroupId) -> Group {
    (**s.world.oracle.group(id).unwrap().main.as_ref().unwrap().value.as_ref().unwrap()).clone()
}

fn a_child_too_many() -> Option<Promise> {
    let (mut s, id) = in_work();
    let child = id.child(1);
    let released = vec![
        remove(keys::held(id), child),
        remove(index(Class::System, Status::Held), child),
        add(index(Class::System, Status::Queued), child, ScoreAt::Clock(0)),
        add(keys::released(id), child, ScoreAt::Number(SCORE_MAX)),
    ];
    forge(&mut s, released)
}

/// The scripts' pool of one slot, which is held.
fn a_full_pool() -> (Script, Response) {
    let mut s = world();
    s.set_pool(0, 1).unwrap();
    let acquire = s.acquire_request(None, 0);
    let slot = s.ask(0, acquire).unwrap();
    (s, slot)
}

fn a_slot_too_many() -> Option<Promise> {
    let (mut s, _) = a_full_pool();
    let (nonce, state) = (Version(78), SlotState::Granted);
    let slot = Slot { state, nonce, class: Class::System, cost: 1, lease_ms: 6_000, holder: None };
    let held = keys::holder_members(TENANT, "second", nonce, 1).map(|member| Write::Add {
        index: keys::holders(POOL),
        member,
        score: ScoreAt::Clock(6 * SECOND),
        raise: false,
    });
    let mut writes = vec![put(keys::slot(POOL, TENANT, "second"), &slot)];
    writes.extend(held);
    forge(&mut s, writes)
}

fn a_slot_handed_out_twice() -> Option<Promise> {
    let (mut s, slot) = a_full_pool();
    let Request::Acquire(mut asked) = s.acquire_request(None, 0) else { panic!("an acquire") };
    asked.holder = None;
    answer(&mut s, Request::Acquire(asked), &Ok(slot))
}

fn a_final_group_that_changes() -> Option<Promise> {
    let mut s = world();
    let id = s.create_group(0, &group(0)).unwrap();
    s.at(25);
    let same = record(&s, id);
    assert!(same.end.is_some());
    forge(&mut s, vec![put(keys::group(id), &same)])
}

fn an_end_before_its_children() -> Option<Promise> {
    let (mut s, id) = in_work();
    let clock = s.clock();
    let early = Group { end: Some((GroupStatus::Failed, clock)), ..record(&s, id) };
    forge(&mut s, vec![put(keys::group(id), &early)])
}

fn a_final_group_without_its_event() -> Option<Promise> {
    let mut s = world();
    s.create_group(0, &group(0)).unwrap();
    s.at(25);
    let mut seen = BTreeMap::new();
    for event in s.events(0).into_iter().filter(|e| e.event.kind != Kind::GroupFinalized) {
        *seen.entry((Subject::of(event.event.of), event.event.kind)).or_default() += 1;
    }
    s.world.oracle.audit(&seen).err().map(|v| v.promise)
}

fn a_receipt_that_is_kept_too_long() -> Option<Promise> {
    let mut s = world();
    let expiry = Expiry::Clock(30 * 86_400 * SECOND);
    let value = Value::Bytes(bytes::Bytes::from_static(b"receipt"));
    let receipt = Write::Put { key: keys::receipt(TENANT, "claim"), version: Version(77), value, expiry };
    let commit = Commit { txns: vec![Arc::new(txn(vec![receipt], None))], grows: false };
    s.world.store.model.commit(&commit).unwrap();
    s.world.setup.tail = true;
    s.world.close();
    s.broken().map(|v| v.promise)
}

fn a_job_that_never_ends() -> Option<Promise> {
    let mut s = world();
    // Nobody claims it.
    s.create(0, &job("one")).unwrap();
    s.world.run();
    s.broken().map(|v| v.promise)
}

fn a_group_that_nobody_moves() -> Option<Promise> {
    let mut s = world();
    let request = s.group_request(&group(2));
    s.send(0, request);
    while s.world.oracle.groups() == 0 && s.world.step() {}
    s.crash(0, None);
    s.world.phase = Phase::Calm;
    s.world.calm_since = s.clock();
    s.world.schedule(SECOND, Event::Look);
    s.at(60);
    s.broken().map(|v| v.promise)
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
