//! Creating a job: one guarded transaction, sent without reading anything first.

use alloc::boxed::Box;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use super::check;
use super::key::{Found, Lookup, TakeOver};
use super::look::Look;
use super::moves::{Home, add, put};
use super::record::{Job, KeyRecord, Owner, Policy, Status, Trail, encode_content};
use super::view::view;
use crate::codec;
use crate::dispatch::room::{self, Room};
use crate::event::Kind;
use crate::failure::Failure;
use crate::ids::JobId;
use crate::limits;
use crate::opaque::{self, Form};
use crate::replica::Op;
use crate::replica::task::{Cx, Draft, Evidence, EvidenceKind, Next, Operation, Plan, applied};
use crate::request::{Response, Start, Submit as Asked};
use crate::store::{Answer, Clock, Expiry, Guard, Read, ScoreAt, Snapshot, Write, keys};

#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct Submit {
    asked: Box<Asked>,
    stage: Stage,
    /// Set once the job's record has been made.
    made: Option<(JobId, Job)>,
    /// The key names somebody who is gone.
    over: Option<TakeOver>,
    /// Its cost is more than any pool has, unless it has been submitted before.
    no_room: Option<Failure>,
}

#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
enum Stage {
    Clock,
    Sent,
    Key(Lookup),
}

/// What is compared when a key is used again: the fields with defaults, and the payload's bytes.
#[derive(serde::Serialize)]
struct Fingerprint<'a> {
    queue: &'a str,
    class: super::record::Class,
    start: Start,
    /// With the defaults of the contract, not those of this server, which may change.
    policy: Policy,
    form: &'a Form,
    payload: u128,
    metadata: Option<u128>,
}

impl Submit {
    pub fn new(asked: Box<Asked>) -> Result<Submit, Failure> {
        validate(&asked)?;
        Ok(Submit { asked, stage: Stage::Clock, made: None, over: None, no_room: None })
    }

    fn room(&self, cx: &Cx<'_>) -> Option<Room> {
        let (a, routing) = (&self.asked, &cx.config.routing);
        Room::of(routing, (&a.tenant, &a.queue), a.class, a.on_prem || routing.keeps(&a.tenant), a.cost)
    }

    fn look_up(&mut self) -> Next {
        let Some(key) = &self.asked.key else { return Next::Read(Read::default()) };
        let lookup = Lookup::new(keys::key(&self.asked.tenant, key), self.fingerprint());
        let read = lookup.start();
        self.stage = Stage::Key(lookup);
        Next::Read(read)
    }

    fn fingerprint(&self) -> u128 {
        let a = &self.asked;
        let policy = said(policy(a, &Policy::standard(limits::RETENTION_MS)));
        let start = if a.start == Start::DelayMs(0) { Start::Now } else { a.start };
        let parts = Fingerprint {
            queue: &a.queue,
            class: a.class,
            start,
            policy,
            form: &a.payload.form,
            payload: a.payload.data.hash,
            metadata: a.metadata.as_ref().map(|m| m.hash),
        };
        opaque::hash(&codec::encode(&parts))
    }

    fn commit(&mut self, cx: &mut Cx<'_>) -> Next {
        let own = cx.make.version();
        let id = cx.make.job_id(cx.clock);
        let a = &self.asked;
        let mut policy = policy(a, &Policy::standard(cx.config.retention_ms));
        policy.on_prem |= cx.config.routing.keeps(&a.tenant);
        let (due, score) = match a.start {
            // no-early-run: the replica's view of the clock may be ahead by what its own was stepped.
            Start::At(at) if at > cx.clock.saturating_sub(limits::CLOCK_FRESH_MS * limits::MILLI) => {
                (at, Some(ScoreAt::Number(at)))
            }
            Start::DelayMs(d) if d > 0 => {
                let d = d.saturating_mul(limits::MILLI);
                (cx.clock.saturating_add(d), Some(ScoreAt::Clock(d)))
            }
            Start::Now | Start::At(_) | Start::DelayMs(_) => (cx.clock, None),
        };
        let job = Job {
            tenant: a.tenant.clone(),
            queue: a.queue.clone(),
            class: a.class,
            policy,
            key: a.key.clone().map(|key| (key, own)),
            born: cx.clock,
            submitted: cx.clock,
            due,
            attempts: 0,
            deliveries: 0,
            lives: 0,
            end: None,
            deleted: false,
            payload_len: a.payload.data.len() as u64,
            metadata: a.metadata.as_ref().map(|m| m.bytes.to_vec()),
            traceparent: a.traceparent.clone(),
            trail: Trail::default(),
        };
        let home = Home::from(&job);
        let member = keys::member(id);
        let mut guards = Vec::with_capacity(3);
        guards.push(Guard::Absent(keys::job(id)));
        let mut writes = Vec::with_capacity(9);
        writes.push(put(keys::job(id), own, codec::encode(&job), Expiry::Never));
        writes.push(put(keys::payload(id), own, encode_content(&a.payload), Expiry::Never));
        if let Some(key) = &a.key {
            let name = keys::key(&a.tenant, key);
            match &self.over {
                None => guards.push(Guard::Absent(name.clone())),
                Some(over) => guards.extend(over.guards(name.clone())),
            }
            let record = KeyRecord { owner: Owner::Job(id), fingerprint: self.fingerprint() };
            writes.push(put(name, own, codec::encode(&record), Expiry::Never));
        }
        match score {
            None => {
                writes.push(add(home.index(Status::Queued), &member, ScoreAt::Clock(0)));
                writes.push(Write::Notify(home.topic()));
            }
            Some(score) => {
                writes.push(add(home.index(Status::Scheduled), &member, score.clone()));
                writes.push(add(keys::DUE, &member, score));
                writes.push(Write::Notify(keys::TOPIC_DUE));
            }
        }
        if let Some(ttl) = job.policy.queue_ttl_ms {
            writes.push(add(keys::TTL, &member, ScoreAt::Clock(ttl.saturating_mul(limits::MILLI))));
        }
        writes.push(known(&a.tenant, &a.queue));
        writes.push(home.event(Kind::Submitted, id, None, None));
        self.made = Some((id, job));
        self.stage = Stage::Sent;
        Next::Commit(Plan {
            txns: alloc::vec![Draft::new(guards, writes)],
            grows: true,
            evidence: Some(Evidence { key: keys::job(id), own, found: None, kind: EvidenceKind::Job }),
        })
    }

    fn created(&mut self, clock: Clock, cx: &mut Cx<'_>) -> Next {
        let Some((id, mut job)) = self.made.take() else { return Next::fail(Failure::Contended { retry_after_ms: 1 }) };
        cx.stats.submitted += 1;
        let status = match self.asked.start {
            Start::DelayMs(d) if d > 0 => {
                job.due = clock.saturating_add(d.saturating_mul(limits::MILLI));
                Status::Scheduled
            }
            Start::At(at) if at == job.due => Status::Scheduled,
            _ => Status::Queued,
        };
        Next::ok(Response::Created(Box::new(view(id, &job, status))))
    }
}

/// A job's rules: its own, and `base` for what it leaves open.
/// A policy as a fingerprint has it: what is said as it would be without being said is not said.
pub(crate) fn said(policy: Policy) -> Policy {
    let key_ttl_ms = policy.key_ttl_ms.filter(|ttl| *ttl != policy.retention_ms);
    Policy { key_ttl_ms, ..policy }
}

pub(crate) fn policy(a: &Asked, base: &Policy) -> Policy {
    let max_attempts = a.max_attempts.unwrap_or(base.max_attempts);
    let max_deliveries = match a.max_attempts {
        Some(n) => n.saturating_add(limits::EXTRA_DELIVERIES),
        None => base.max_deliveries,
    };
    Policy {
        max_attempts,
        max_deliveries: a.max_deliveries.unwrap_or(max_deliveries),
        max_age_ms: a.max_age_ms.or(base.max_age_ms),
        lease_ms: a.lease_ms.or(base.lease_ms),
        run_timeout_ms: a.run_timeout_ms.or(base.run_timeout_ms),
        progress_timeout_ms: a.progress_timeout_ms.or(base.progress_timeout_ms),
        queue_ttl_ms: a.queue_ttl_ms.or(base.queue_ttl_ms),
        retention_ms: a.retention_ms.unwrap_or(base.retention_ms),
        key_ttl_ms: a.key_ttl_ms.or(base.key_ttl_ms),
        backoff: a.backoff.unwrap_or(base.backoff),
        on_prem: a.on_prem || base.on_prem,
        cost: if a.cost == 1 { base.cost } else { a.cost },
    }
}

/// The write that keeps a queue's name for at least a minute.
pub(crate) fn known(tenant: &str, queue: &str) -> Write {
    Write::Add {
        index: keys::NAMES,
        member: keys::queue_member(tenant, queue),
        score: ScoreAt::Clock(limits::NAME_IDLE),
        raise: false,
    }
}

impl Operation for Submit {
    fn start(&mut self, cx: &mut Cx<'_>) -> Next {
        self.over = None;
        let (a, routing) = (&self.asked, &cx.config.routing);
        if !routing.can_place(&a.tenant, &a.queue, a.on_prem || routing.keeps(&a.tenant)) {
            return Next::fail(Failure::NoPlacement);
        }
        let records: Vec<_> = self.room(cx).iter().flat_map(Room::records).collect();
        if !cx.fresh || !records.is_empty() {
            self.stage = Stage::Clock;
            return Next::Read(Read { records, ..Read::default() });
        }
        self.commit(cx)
    }

    fn read(&mut self, snapshot: Snapshot, cx: &mut Cx<'_>) -> Next {
        let Stage::Key(lookup) = &mut self.stage else {
            self.no_room = room::lacking(self.room(cx).as_slice(), snapshot.records);
            return match (self.no_room.clone(), &self.asked.key) {
                (None, _) => self.commit(cx),
                (Some(failure), None) => Next::fail(failure),
                (Some(_), Some(_)) => self.look_up(),
            };
        };
        match lookup.read(&snapshot, cx) {
            Found::Read(read) => Next::Read(read),
            Found::Existing(Owner::Job(job)) => {
                Next::Become(Op::Look(Box::new(Look::existing(self.asked.tenant.clone(), job))))
            }
            // Another kind of body than a job's.
            Found::Existing(Owner::Group(_)) => Next::fail(Failure::KeyReused),
            Found::Free(over) => match (self.no_room.take(), over) {
                (Some(failure), _) => Next::fail(failure),
                (None, None) => self.start(cx),
                (None, over) => {
                    self.over = over;
                    self.commit(cx)
                }
            },
            Found::Failed(failure) => Next::fail(failure),
        }
    }

    fn answered(&mut self, clock: Clock, answers: Vec<Answer>, cx: &mut Cx<'_>) -> Next {
        if applied(&answers) {
            return self.created(clock, cx);
        }
        match (&self.asked.key, answers.first()) {
            (Some(_), Some(Answer::Refused(_))) => self.look_up(),
            _ => self.start(cx),
        }
    }

    fn settled(&mut self, clock: Clock, cx: &mut Cx<'_>) -> Next {
        self.created(clock, cx)
    }
}

/// What can be said of a submit without the store.
pub fn validate(s: &Asked) -> Result<(), Failure> {
    check::name("queue", &s.queue)?;
    check::name("tenant", &s.tenant)?;
    if let Some(key) = &s.key {
        check::text("idempotency_key", key, limits::KEY_BYTES)?;
    }
    check::content("payload", Some(&s.payload))?;
    check::within("max_attempts", s.max_attempts.map(u64::from), 1, limits::ATTEMPTS_MAX.into())?;
    check::within("max_deliveries", s.max_deliveries.map(u64::from), 1, limits::DELIVERIES_MAX.into())?;
    check::within("lease_ms", s.lease_ms, limits::LEASE_MS_MIN, limits::LEASE_MS_MAX)?;
    for (field, value, least) in [
        ("max_age_ms", s.max_age_ms, 1),
        ("run_timeout_ms", s.run_timeout_ms, 1),
        ("progress_timeout_ms", s.progress_timeout_ms, 1),
        ("queue_ttl_ms", s.queue_ttl_ms, 1),
        ("retention_ms", s.retention_ms, 0),
        ("key_ttl_ms", s.key_ttl_ms, 0),
    ] {
        check::within(field, value, least, limits::DURATION_MS_MAX)?;
    }
    if let Start::DelayMs(delay) = s.start {
        check::within("delay_ms", Some(delay), 0, limits::DURATION_MS_MAX)?;
    }
    if let Start::At(at) = s.start {
        check::within("run_at", Some(at), 0, crate::store::SCORE_MAX)?;
    }
    if let Some(b) = &s.backoff {
        check::within("backoff.base_ms", Some(b.base_ms), 0, limits::DURATION_MS_MAX)?;
        check::within("backoff.max_ms", Some(b.max_ms), b.base_ms, limits::DURATION_MS_MAX)?;
        check::within("backoff.factor", Some(b.factor_milli.into()), 1_000, 100_000)
            .map_err(|_| Failure::Invalid { field: "backoff.factor", detail: String::from("must be from 1 to 100") })?;
        check::within("backoff.jitter", Some(b.jitter_milli.into()), 0, 1_000)
            .map_err(|_| Failure::Invalid { field: "backoff.jitter", detail: String::from("must be from 0 to 1") })?;
    }
    check::within("cost", Some(s.cost.into()), 1, limits::COST_MAX.into())?;
    if let Some(m) = &s.metadata
        && m.len() > limits::METADATA_BYTES
    {
        return Err(Failure::Invalid {
            field: "metadata",
            detail: format!("is {} bytes long, at most {} are kept", m.len(), limits::METADATA_BYTES),
        });
    }
    if let Some(t) = &s.traceparent {
        check::text("traceparent", t, limits::NAME_BYTES)?;
    }
    Ok(())
}
