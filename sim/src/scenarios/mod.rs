//! Scripted small worlds: the same replicas, store, links and oracle, and a script instead of chance.
//!
//! A script moves the world's time ([`Script::at`]), asks ([`Script::ask`]) or only sends
//! ([`Script::send`]), and breaks things by hand. A [`Script`] can be cloned at any instant, so that a
//! case can try a fault at every event from there on. The oracle watches as ever: [`Script::broken`].

use leasehold_core::event::Kind;
use leasehold_core::ids::GroupId;
use leasehold_core::job::record::{Class, ErrorInfo, Owner, Status};
use leasehold_core::opaque::Content;
use leasehold_core::request::{
    Acquire, Beat, Claim, Complete, CreateGroup, EventCursor, EventView, Fail, GroupView, Held, JobView, Leased,
    SetPool, Submit,
};
use leasehold_core::{Failure, JobId, Outcome, Request, Response, Token};

use crate::calls::{CallId, Caller, Heard, ItemRef};
use crate::choices::Seeded;
use crate::links::Order;
use crate::oracle::Violation;
use crate::setup::{MILLI, SECOND, Setup};
use crate::world::{Event, Micros, World};

pub const TENANT: &str = "default";
/// The pool of scripts.
pub const POOL: &str = "p";

#[derive(Clone, Debug)]
pub struct Script {
    pub world: World,
    /// How long a caller waits for its answer.
    pub patience: Micros,
}

/// A payload of its own for every text.
pub fn payload(text: &str) -> Content {
    Content::json(format!("{{\"is\":{text:?}}}"))
}

/// A job of the default queue and tenant.
pub fn job(text: &str) -> Submit {
    Submit::new(TENANT, "q", payload(text))
}

/// The fields of C01 and its kin: three attempts, 2 s doubling up to an hour.
pub fn keyed(text: &str, key: &str) -> Submit {
    Submit { key: Some(key.to_owned()), ..job(text) }
}

impl Script {
    pub fn new(seed: u64, replicas: usize) -> Script {
        Script::with(seed, replicas, |_| {})
    }

    pub fn with(seed: u64, replicas: usize, change: impl FnOnce(&mut Setup)) -> Script {
        let mut setup = Setup::quiet(seed, replicas);
        change(&mut setup);
        Script { world: World::new(setup, Seeded::new(seed)), patience: 130 * SECOND }
    }

    pub fn broken(&self) -> Option<&Violation> {
        self.world.broken.as_ref()
    }

    // --- time ---------------------------------------------------------------------------------

    /// Lets everything happen up to that second.
    pub fn at(&mut self, second: u64) -> &mut Script {
        self.until(second * SECOND)
    }

    pub fn at_ms(&mut self, ms: u64) -> &mut Script {
        self.until(ms * MILLI)
    }

    pub fn until(&mut self, at: Micros) -> &mut Script {
        self.world.run_until(at);
        self
    }

    pub fn now_ms(&self) -> u64 {
        self.world.now / MILLI
    }

    /// The store's clock.
    pub fn clock(&mut self) -> u64 {
        let now = self.world.now;
        self.world.store.tick(now)
    }

    /// Lets so many events happen.
    pub fn steps(&mut self, n: usize) -> &mut Script {
        for _ in 0..n {
            if !self.world.step() {
                break;
            }
        }
        self
    }

    // --- asking -------------------------------------------------------------------------------

    pub fn send(&mut self, replica: usize, request: Request) -> CallId {
        self.world.call(Caller::Script, 0, replica, request, self.patience)
    }

    /// What a call was answered, as far as its caller has heard.
    pub fn heard(&self, call: CallId) -> Option<&Heard> {
        self.world.ledger.get(call)?.heard.as_ref()
    }

    pub fn answer(&self, call: CallId) -> Option<&Outcome> {
        match self.heard(call) {
            Some(Heard::Answer(outcome)) => Some(outcome),
            _ => None,
        }
    }

    /// Lets the world go on until the call's caller knows more. Nothing heard is an unknown outcome.
    pub fn wait(&mut self, call: CallId) -> Outcome {
        while self.heard(call).is_none() {
            if !self.world.step() {
                break;
            }
        }
        match self.heard(call) {
            Some(Heard::Answer(outcome)) => outcome.clone(),
            Some(Heard::NotDelivered) => Err(Failure::StoreUnavailable { retry_after_ms: 0 }),
            _ => Err(Failure::OutcomeUnknown { retry_after_ms: 0 }),
        }
    }

    pub fn ask(&mut self, replica: usize, request: Request) -> Outcome {
        let call = self.send(replica, request);
        self.wait(call)
    }

    pub fn mark(&self, item: u32) -> String {
        ItemRef { call: self.world.ledger.next(), item }.mark()
    }

    /// The request that the next call makes of a submit.
    pub fn submit_request(&self, submit: &Submit) -> Request {
        Request::Submit(Box::new(Submit { traceparent: Some(format!("t-{}", self.mark(0))), ..submit.clone() }))
    }

    pub fn submit(&mut self, replica: usize, submit: &Submit) -> Outcome {
        let request = self.submit_request(submit);
        self.ask(replica, request)
    }

    /// Submits until it is answered well; `None` once a promise is broken.
    pub fn create(&mut self, replica: usize, submit: &Submit) -> Option<JobId> {
        while self.broken().is_none() {
            if let Ok(Response::Created(view) | Response::Existing(view)) = self.submit(replica, submit) {
                return Some(view.id);
            }
        }
        None
    }

    /// Many submits in one call.
    pub fn create_all(&mut self, replica: usize, submits: &[Submit]) -> Vec<JobId> {
        let requests = submits
            .iter()
            .enumerate()
            .map(|(n, s)| {
                let traceparent = Some(format!("t-{}", self.mark(n as u32)));
                Request::Submit(Box::new(Submit { traceparent, ..s.clone() }))
            })
            .collect();
        match self.ask(replica, Request::Batch(requests)) {
            Ok(Response::Batch(outcomes)) => outcomes
                .into_iter()
                .filter_map(|o| match o {
                    Ok(Response::Created(view) | Response::Existing(view)) => Some(view.id),
                    _ => None,
                })
                .collect(),
            _ => Vec::new(),
        }
    }

    pub fn claim_request(&self, worker: &str, max: usize, wait_ms: u64, claim_id: Option<&str>) -> Request {
        Request::Claim(Box::new(Claim {
            tenant: TENANT.into(),
            worker: format!("{worker}.{}", self.mark(0)),
            queues: vec!["q".into()],
            max,
            wait_ms,
            lease_ms: None,
            claim_id: claim_id.map(str::to_owned),
        }))
    }

    /// Claims without waiting; a failure is no jobs.
    pub fn claim(&mut self, replica: usize, worker: &str, max: usize) -> Vec<Leased> {
        let request = self.claim_request(worker, max, 0, None);
        match self.ask(replica, request) {
            Ok(Response::Claimed(jobs)) => jobs,
            _ => Vec::new(),
        }
    }

    /// Polls every so many milliseconds until a job is handed out or that time has come.
    pub fn poll(&mut self, replica: usize, worker: &str, every_ms: u64, until_ms: u64) -> Option<Leased> {
        while self.now_ms() <= until_ms && self.broken().is_none() {
            if let Some(leased) = self.claim(replica, worker, 1).pop() {
                return Some(leased);
            }
            let next = self.now_ms() + every_ms;
            self.at_ms(next);
        }
        None
    }

    pub fn complete_request(&self, job: JobId, token: Token) -> Request {
        let result = Some(Content::binary("text/plain", format!("r-{}", self.mark(0))));
        Request::Complete(Box::new(Complete { held: held(job, token), result }))
    }

    pub fn complete(&mut self, replica: usize, leased: &Leased) -> Outcome {
        let request = self.complete_request(leased.id, leased.token);
        self.ask(replica, request)
    }

    pub fn fail_request(&self, item: u32, job: JobId, token: Token) -> Request {
        let error = ErrorInfo { message: format!("e-{}", self.mark(item)), kind: None, detail: None };
        Request::Fail(Box::new(Fail { held: held(job, token), error, retryable: true, retry_in_ms: None }))
    }

    pub fn fail(&mut self, replica: usize, leased: &Leased) -> Outcome {
        let request = self.fail_request(0, leased.id, leased.token);
        self.ask(replica, request)
    }

    pub fn release(&mut self, replica: usize, leased: &Leased) -> Outcome {
        self.ask(replica, Request::Release(held(leased.id, leased.token)))
    }

    pub fn beat(&mut self, replica: usize, leased: &Leased) -> Outcome {
        let beat = Beat { held: held(leased.id, leased.token), progress: None, seq: None };
        self.ask(replica, Request::Heartbeat(beat))
    }

    pub fn cancel(&mut self, replica: usize, job: JobId) -> Outcome {
        self.ask(replica, Request::Cancel { tenant: TENANT.into(), job })
    }

    pub fn get(&mut self, replica: usize, job: JobId) -> Option<JobView> {
        match self.ask(replica, Request::Get { tenant: TENANT.into(), job }) {
            Ok(Response::Job(view)) => Some(*view),
            _ => None,
        }
    }

    /// Where the job stands in the store.
    pub fn status(&self, job: JobId) -> Option<Status> {
        self.world.oracle.status(job)
    }

    /// Jobs that there ever were.
    pub fn jobs(&self) -> usize {
        self.world.oracle.known().count()
    }

    /// All audit events, oldest first.
    pub fn events(&mut self, replica: usize) -> Vec<EventView> {
        let mut all = Vec::new();
        let mut after = EventCursor::default();
        loop {
            let request = Request::Events { tenant: TENANT.into(), after, limit: 100, wait_ms: 0 };
            match self.ask(replica, request) {
                Ok(Response::Events { events, next }) if !events.is_empty() => {
                    after = next;
                    all.extend(events);
                }
                _ => return all,
            }
        }
    }

    /// How often that happened to the job.
    pub fn count(&mut self, replica: usize, job: JobId, kind: Kind) -> usize {
        self.events(replica).iter().filter(|e| e.event.of.job() == Some(job) && e.event.kind == kind).count()
    }

    // --- groups -------------------------------------------------------------------------------

    /// The request that the next call makes of a group.
    pub fn group_request(&self, asked: &CreateGroup) -> Request {
        let mut asked = asked.clone();
        asked.common.traceparent = Some(format!("t-{}", self.mark(0)));
        Request::CreateGroup(Box::new(asked))
    }

    pub fn create_group(&mut self, replica: usize, asked: &CreateGroup) -> Result<GroupId, Failure> {
        let request = self.group_request(asked);
        self.ask(replica, request).map(|response| match response {
            Response::GroupCreated(group) | Response::Group(group) => group.id,
            other => unreachable!("{other:?}"),
        })
    }

    pub fn extend(&mut self, replica: usize, group: GroupId, from: u32, children: &[Submit]) -> Outcome {
        let traceparent = Some(format!("t-{}", self.mark(0)));
        let children = children.iter().map(|c| Submit { traceparent: traceparent.clone(), ..c.clone() }).collect();
        self.ask(replica, Request::ExtendGroup { tenant: TENANT.into(), group, from, children })
    }

    pub fn seal(&mut self, replica: usize, group: GroupId) -> Outcome {
        self.ask(replica, Request::SealGroup { tenant: TENANT.into(), group })
    }

    pub fn group(&mut self, replica: usize, group: GroupId) -> Result<GroupView, Failure> {
        self.ask(replica, Request::Group { tenant: TENANT.into(), group, wait_ms: 0 }).map(|response| match response {
            Response::Group(group) => *group,
            other => unreachable!("{other:?}"),
        })
    }

    /// How often the group was finalized.
    pub fn finalized(&mut self, replica: usize, group: GroupId) -> usize {
        self.events(replica)
            .iter()
            .filter(|e| e.event.of == Owner::Group(group) && e.event.kind == Kind::GroupFinalized)
            .count()
    }

    // --- pools --------------------------------------------------------------------------------

    pub fn set_pool(&mut self, replica: usize, total: u64) -> Outcome {
        let set =
            SetPool { tenant: TENANT.into(), pool: POOL.into(), total: Some(total), batch_max: None, lease_ms: None };
        self.ask(replica, Request::SetPool(set))
    }

    /// The request that the next call makes for a slot of the scripts' pool, of 6 s.
    pub fn acquire_request(&self, slot: Option<&str>, wait_ms: u64) -> Request {
        Request::Acquire(Box::new(Acquire {
            tenant: TENANT.into(),
            pool: POOL.into(),
            slot: slot.map(str::to_owned),
            class: Class::Interactive,
            cost: 1,
            holder: Some(format!("h-{}", self.mark(0))),
            lease_ms: Some(6_000),
            wait_ms,
        }))
    }

    // --- breaking things ----------------------------------------------------------------------

    /// The process dies and starts again after so many milliseconds, or never.
    pub fn crash(&mut self, replica: usize, rest_ms: Option<u64>) -> &mut Script {
        self.world.crash(replica, rest_ms.map(|ms| ms * MILLI));
        self
    }

    /// Nothing passes between a replica and the store for so many seconds.
    pub fn cut_store(&mut self, replica: usize, seconds: u64) -> &mut Script {
        let until = self.world.now + seconds * SECOND;
        self.world.links.to_store[replica] = until;
        self.world.links.from_store[replica] = until;
        self
    }

    /// The replica's answers are lost for so many milliseconds.
    pub fn cut_answers(&mut self, replica: usize, ms: u64) -> &mut Script {
        self.world.links.from_replica[replica] = self.world.now + ms * MILLI;
        self
    }

    /// What becomes of the next commits.
    pub fn orders(&mut self, orders: &[Order]) -> &mut Script {
        self.world.links.orders = orders.to_vec();
        self
    }

    /// The replica's own clock steps forward.
    pub fn step_clock(&mut self, replica: usize, seconds: u64) -> &mut Script {
        self.world.step_clock(replica, seconds * SECOND);
        self
    }

    /// The store forgets its newest transactions.
    pub fn rewind(&mut self, n: usize) -> &mut Script {
        self.world.rewind(n);
        self
    }

    /// Makes sure that time passes even if nothing happens.
    pub fn tick(&mut self, after_ms: u64) -> &mut Script {
        self.world.schedule(after_ms * MILLI, Event::Pass);
        self
    }
}

pub fn held(job: JobId, token: Token) -> Held {
    Held { tenant: TENANT.into(), job, token: Some(token) }
}
