//! Pairs of runs without faults that differ in one thing which must not matter: what comes of the work must be
//! the same, job by job and group by group, by the names that those who submitted them gave.
//!
//! What comes of a random world is decided by time in many places: a queue deadline that passes or not, a cancel
//! that meets a completion, a back-off. So the work of a pair is its own, drawn from the seed before anything
//! happens, and its end is decided by itself: each job says what becomes of each of its deliveries; queue deadlines
//! stand only where nobody works, and cancels only on what is not due before the run is over; a group that stops at
//! its first dead child runs one child at a time; nobody else meddles, and all ask again until they are answered.
//! When anything happens, in which order and under which ids may differ, and is not compared.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use leasehold_core::event::Kind;
use leasehold_core::group::record::Mode;
use leasehold_core::ids::GroupId;
use leasehold_core::job::record::{Backoff, Class, ErrorInfo};
use leasehold_core::opaque::Content;
use leasehold_core::request::{
    Acquire, Beat, Claim, Complete, CreateGroup, EventCursor, Fail, Held, Leased, SetPool, SlotId, Start, Submit,
};
use leasehold_core::{JobId, Outcome, Request, Response};

use crate::calls::{CallId, Caller, Heard, ItemRef, again_after};
use crate::choices::{Choices as _, Seeded, Topic};
use crate::clients::{queue_name, tenant_name};
use crate::oracle::Subject;
use crate::report;
use crate::setup::{MILLI, SECOND, Setup};
use crate::world::{Event, Micros, World};

/// What two runs of a pair differ in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Transactions and reads go to the store one by one, one call at a time.
    Unbatched,
    /// One replica instead of three.
    Alone,
    /// Replicas draw other ids, nonces and jitter.
    Ids,
    /// The store's clock is thirty years ahead, those of the replicas run since long before.
    Clocks,
    /// Replicas take few requests at once and refuse the rest.
    Mailbox,
    /// Messages take another time and outputs of a step another order.
    Order,
}

impl Change {
    pub const ALL: [Change; 6] =
        [Change::Unbatched, Change::Alone, Change::Ids, Change::Clocks, Change::Mailbox, Change::Order];

    pub fn text(self) -> &'static str {
        match self {
            Change::Unbatched => "unbatched",
            Change::Alone => "one replica",
            Change::Ids => "other ids",
            Change::Clocks => "other clocks",
            Change::Mailbox => "small mailbox",
            Change::Order => "other order",
        }
    }

    /// A world of that seed, changed so.
    fn world(change: Option<Change>, seed: u64) -> World {
        let mut setup = Setup::quiet(seed, 3);
        setup.tenants = TENANTS;
        setup.config.lease_ms = 10_000;
        setup.config.retention_ms = 20_000;
        setup.config.scrub_ms = 3_000;
        setup.tail = true;
        let mut choices = Seeded::new(seed);
        match change {
            None => {}
            Some(Change::Unbatched) => {
                setup.config.commit_txns = 1;
                setup.config.commits = 1;
                setup.config.reads = 1;
            }
            Some(Change::Alone) => setup.replicas = 1,
            Some(Change::Ids) => {
                let mut other = Seeded::new(!seed);
                for r in 0..setup.replicas {
                    let label = Topic::ReplicaSeed.of(r);
                    (0..4).for_each(|n| choices.set(label, n, other.draw(label, u64::MAX)));
                }
            }
            Some(Change::Clocks) => setup.clocks_from_us = 40 * 86_400 * SECOND,
            Some(Change::Mailbox) => setup.config.mailbox = 4,
            Some(Change::Order) => {
                choices.mute(Topic::Shuffle);
                choices.mute(Topic::Latency);
            }
        }
        let mut world = World::new(setup, choices);
        if change == Some(Change::Clocks) {
            world.store.stepped = 30 * 365 * 86_400 * SECOND as i64;
        }
        world
    }
}

const TENANTS: usize = 2;
/// Queues with workers; the one after them has none.
const QUEUES: u64 = 2;
const WORKERS: usize = 4;
const POOL: &str = "p0";
/// Nothing takes longer.
const MOST: Micros = 400 * SECOND;
/// How long callers wait for an answer.
const PATIENCE: Micros = 90 * SECOND;

/// What becomes of one delivery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Act {
    Complete,
    Fail,
    /// For good.
    Refuse,
    Release,
    /// The worker is never heard of again.
    Vanish,
}

/// Who wants what, step by step.
#[derive(Clone, Debug)]
struct Errand {
    name: String,
    tenant: String,
    steps: VecDeque<Step>,
    /// Not before then.
    at: Micros,
    asked: Option<CallId>,
    job: Option<JobId>,
    group: Option<GroupId>,
    slot: Option<SlotId>,
}

#[derive(Clone, Debug)]
enum Step {
    Wait(Micros),
    Submit(Box<Submit>),
    /// Until the job has ended.
    End,
    Payload,
    Result,
    Cancel,
    Retry,
    Create(Box<CreateGroup>),
    Page(u32, Vec<Submit>),
    Seal,
    /// Until the group is final.
    Final,
    Children,
    Acquire(Option<String>, Class, u32),
    Refresh,
    GiveBack,
}

/// All the work of a seed.
#[derive(Clone, Debug, Default)]
struct Work {
    errands: Vec<Errand>,
    /// What becomes of the deliveries of each job and child; those that come after complete.
    acts: BTreeMap<String, Vec<Act>>,
}

// --- what is drawn -----------------------------------------------------------------------------

impl Work {
    fn draw(seed: u64) -> Work {
        let mut c = Seeded::new(seed);
        let mut work = Work::default();
        let at = Topic::Script.of(1);
        for n in 0..c.between(at, 8, 24) {
            work.draw_job(&mut c, n);
        }
        for n in 0..c.between(at, 1, 4) {
            work.draw_group(&mut c, n);
        }
        for n in 0..c.between(at, 0, 5) {
            let name = (c.draw(at, 2) == 1).then(|| format!("slot {n}"));
            let class = *c.pick(at, &[Class::System, Class::Interactive, Class::Batch]);
            let acquire = Step::Acquire(name, class, c.between(at, 1, 2) as u32);
            let steps = vec![acquire, Step::Wait(c.draw(at, 2 * SECOND)), Step::Refresh, Step::GiveBack];
            work.add(&mut c, format!("user {n}"), tenant_name(0), steps);
        }
        work
    }

    fn add(&mut self, c: &mut Seeded, name: String, tenant: String, steps: Vec<Step>) {
        let at = 2 * SECOND + c.draw(Topic::Script.of(2), 10 * SECOND);
        let steps = steps.into();
        self.errands.push(Errand { name, tenant, steps, at, asked: None, job: None, group: None, slot: None });
    }

    /// What becomes of a job's deliveries, and what it must say of itself for that.
    fn draw_acts(&mut self, c: &mut Seeded, name: &str, s: &mut Submit) {
        let at = Topic::Script.of(3);
        let acts: Vec<Act> = (0..c.draw(at, 5))
            .map(|_| *c.pick(at, &[Act::Complete, Act::Fail, Act::Fail, Act::Release, Act::Vanish, Act::Refuse]))
            .collect();
        s.max_attempts = Some(c.between(at, 1, 3) as u32);
        if acts.contains(&Act::Vanish) {
            s.lease_ms = Some(1_500);
        }
        s.backoff = Some(Backoff { base_ms: 200, max_ms: 1_000, factor_milli: 2_000, jitter_milli: 300 });
        self.acts.insert(name.to_owned(), acts);
    }

    fn draw_job(&mut self, c: &mut Seeded, n: u64) {
        let at = Topic::Script.of(4);
        let (name, tenant) = (format!("job {n}"), tenant_name(c.draw(at, TENANTS as u64)));
        let kind = c.draw(at, 10);
        let queue = queue_name(if kind == 8 { QUEUES } else { c.draw(at, QUEUES) });
        let mut s = Submit::new(&tenant, queue, named(&name));
        s.class = *c.pick(at, &[Class::System, Class::Interactive, Class::Batch]);
        s.key = (c.draw(at, 3) > 0 || kind == 7).then(|| format!("key {n}"));
        if c.draw(at, 3) == 2 {
            s.start = Start::DelayMs(c.draw(at, 6_000));
        }
        self.draw_acts(c, &name, &mut s);
        let mut steps = vec![Step::Submit(Box::new(s.clone()))];
        match kind {
            // Once more with its key, and something else with it.
            7 => {
                let other = Submit { payload: named("other"), ..s.clone() };
                steps.extend([Step::Submit(Box::new(s)), Step::Submit(Box::new(other))]);
            }
            // Where nobody works.
            8 => {
                let ttl = Submit { queue_ttl_ms: Some(c.between(at, 1_000, 4_000)), start: Start::Now, ..s };
                steps = vec![Step::Submit(Box::new(ttl))];
            }
            // Not due before all is over.
            9 => {
                let late = Submit { start: Start::DelayMs(10 * MOST / MILLI), ..s };
                steps = vec![Step::Submit(Box::new(late)), Step::Wait(c.draw(at, SECOND)), Step::Cancel];
            }
            _ => {}
        }
        steps.extend([Step::End, Step::Payload, Step::Result]);
        if c.draw(at, 4) == 3 && kind < 7 {
            steps.extend([Step::Retry, Step::End, Step::Result]);
        }
        self.add(c, name, tenant, steps);
    }

    fn draw_group(&mut self, c: &mut Seeded, n: u64) {
        let at = Topic::Script.of(5);
        let (name, tenant) = (format!("group {n}"), tenant_name(c.draw(at, TENANTS as u64)));
        let mut common = Submit::new(&tenant, queue_name(c.draw(at, QUEUES)), Content::json("null"));
        common.class = *c.pick(at, &[Class::System, Class::Interactive, Class::Batch]);
        common.key = (c.draw(at, 2) == 1).then(|| name.clone());
        let mode = *c.pick(at, &[Mode::CollectAll, Mode::FailFast]);
        let parallel = *c.pick(at, &[Some(2), Some(1), Some(4), None]);
        let max_parallel = if mode == Mode::FailFast { Some(1) } else { parallel };
        let sealed = c.draw(at, 2) == 1;
        let mut next = 0;
        let mut page = |work: &mut Work, c: &mut Seeded, least: u64| -> (u32, Vec<Submit>) {
            let from = next;
            let children = (0..c.between(at, least, 6)).map(|_| {
                let child = format!("{name}.{next}");
                let mut own = Submit::new("any", "any", named(&child));
                work.draw_acts(c, &child, &mut own);
                next += 1;
                own
            });
            (from, children.collect())
        };
        let (_, children) = page(self, c, 0);
        let open_timeout_ms = (!sealed).then_some(MOST / MILLI);
        let asked = CreateGroup { common, children, max_parallel, mode, sealed, open_timeout_ms };
        let mut steps = vec![Step::Create(Box::new(asked))];
        if !sealed {
            // A group that stops at its first dead child takes no page after it: so it has none.
            let pages = if mode == Mode::FailFast { 0 } else { c.draw(at, 3) };
            for _ in 0..pages {
                let (from, children) = page(self, c, 1);
                steps.extend([Step::Wait(c.draw(at, 2 * SECOND)), Step::Page(from, children)]);
            }
            steps.push(Step::Seal);
        }
        steps.extend([Step::Final, Step::Children]);
        self.add(c, name, tenant, steps);
    }
}

fn named(name: &str) -> Content {
    Content::json(format!("{{\"name\":\"{name}\"}}"))
}

/// The name in a payload.
fn name_in(content: &Content) -> String {
    let text = String::from_utf8_lossy(&content.data.bytes).into_owned();
    text.split('"').nth(3).unwrap_or_default().to_owned()
}

/// What is in a result but for the call that brought it.
fn shown(content: &Content) -> String {
    let text = String::from_utf8_lossy(&content.data.bytes).into_owned();
    text.rsplit_once('-').map_or(String::new(), |(what, _)| what.to_owned())
}

// --- how it is done ----------------------------------------------------------------------------

/// What came of a run: each fact by the name of what it is about.
pub type Facts = BTreeMap<String, String>;

#[derive(Debug, Default)]
struct Worker {
    at: Micros,
    claims: u64,
    claiming: Option<CallId>,
    hands: Vec<Hand>,
}

/// A job in a worker's hands.
#[derive(Debug)]
struct Hand {
    tenant: String,
    leased: Leased,
    act: Act,
    at: Micros,
    /// A heartbeat comes first.
    beats: bool,
    asked: Option<CallId>,
}

struct Run {
    world: World,
    choices: Seeded,
    errands: Vec<Errand>,
    acts: BTreeMap<String, Vec<Act>>,
    workers: Vec<Worker>,
    names: BTreeMap<Subject, String>,
    facts: Facts,
    calls: usize,
}

/// Runs the work of a seed in a world that is changed so. `Err`: a promise was broken.
pub fn run(seed: u64, change: Option<Change>) -> Result<Facts, String> {
    let work = Work::draw(seed);
    let mut run = Run {
        world: Change::world(change, seed),
        choices: Seeded::new(seed),
        errands: work.errands,
        acts: work.acts,
        workers: (0..WORKERS).map(|_| Worker::default()).collect(),
        names: BTreeMap::new(),
        facts: Facts::new(),
        calls: 0,
    };
    run.world.schedule(SECOND, Event::Look);
    run.world.run_until(SECOND);
    let set = SetPool { tenant: tenant_name(0), pool: POOL.into(), total: Some(2), batch_max: None, lease_ms: None };
    run.call(|_| Request::SetPool(set));
    run.all();
    run.events();
    run.world.close();
    match &run.world.broken {
        Some(violation) => Err(format!("{}: {}", violation.promise.text(), violation.what)),
        None => Ok(run.facts),
    }
}

impl Run {
    fn call(&mut self, request: impl FnOnce(&str) -> Request) -> CallId {
        let mark = ItemRef { call: self.world.ledger.next(), item: 0 }.mark();
        self.calls += 1;
        let replica = self.calls % self.world.setup.replicas;
        self.world.call(Caller::Script, 0, replica, request(&mark), PATIENCE)
    }

    /// What was heard of a call, if anything; nothing heard in time is worth asking again.
    fn heard(&self, call: CallId) -> Option<Result<Outcome, Micros>> {
        Some(match self.world.ledger.get(call)?.heard.as_ref()? {
            Heard::Answer(Err(failure)) if again_after(failure).is_some() => {
                Err(again_after(failure).unwrap_or(0).clamp(20, 500) * MILLI)
            }
            Heard::Answer(outcome) => Ok(outcome.clone()),
            Heard::NotDelivered | Heard::Nothing => Err(SECOND),
        })
    }

    /// Lets all of it happen.
    fn all(&mut self) {
        while self.world.broken.is_none() && self.world.now < MOST {
            for n in 0..self.errands.len() {
                self.errand(n);
            }
            for n in 0..self.workers.len() {
                self.worker(n);
            }
            if self.errands.iter().all(|e| e.steps.is_empty()) && self.workers.iter().all(|w| w.hands.is_empty()) {
                return;
            }
            self.world.step();
        }
        let left = self.errands.iter().filter(|e| !e.steps.is_empty());
        let left: Vec<String> = left.map(|e| format!("{} at {:?}", e.name, e.steps.front())).collect();
        self.facts.insert("unfinished".into(), left.join(", "));
    }

    fn errand(&mut self, n: usize) {
        let now = self.world.now;
        let heard = match self.errands[n].asked {
            Some(call) => match self.heard(call) {
                None => return,
                heard => heard,
            },
            None => None,
        };
        self.errands[n].asked = None;
        let was_asked = heard.is_some();
        match heard {
            Some(Ok(outcome)) => self.learn(n, &outcome),
            Some(Err(after)) => self.errands[n].at = now + after,
            None => {}
        }
        let e = &mut self.errands[n];
        if let Some(Step::Wait(after)) = e.steps.front() {
            e.at = e.at.max(now) + after;
            e.steps.pop_front();
        }
        if e.at > now {
            if was_asked {
                self.world.schedule(e.at - now, Event::Pass);
            }
            return;
        }
        let e = e.clone();
        let Some(step) = e.steps.front().cloned() else { return };
        let Some(asked) = request(&e, step) else {
            // What it is about was never created: that has been noted.
            self.errands[n].steps.clear();
            return;
        };
        self.errands[n].asked = Some(self.call(|mark| marked(asked, mark)));
    }

    /// Takes an answer; the step is done unless what it waits for has not come.
    fn learn(&mut self, n: usize, outcome: &Outcome) {
        let now = self.world.now;
        let e = &mut self.errands[n];
        let Some(step) = e.steps.front().cloned() else { return };
        let told = match (&step, outcome) {
            (Step::Submit(_), Ok(Response::Created(view) | Response::Existing(view))) => {
                let first = matches!(outcome, Ok(Response::Created(_)));
                let same = e.job.get_or_insert(view.id) == &view.id;
                self.names.insert(Subject::Job(view.id), e.name.clone());
                format!("created {first}, the job {same}")
            }
            (Step::End, Ok(Response::Job(view))) if !view.status.is_terminal() => {
                e.at = now + 300 * MILLI;
                return;
            }
            (Step::End, Ok(Response::Job(view))) => {
                let ends: Vec<_> = view.attempts.iter().map(|a| (a.delivery, a.outcome)).collect();
                let (attempt, deliveries) = (view.attempt, view.deliveries);
                format!("{:?} {:?}: {attempt} attempts, {deliveries} deliveries: {ends:?}", view.status, view.reason)
            }
            (Step::Payload, Ok(Response::Content(content))) => name_in(content),
            (Step::Result, Ok(Response::Content(content))) => shown(content),
            (Step::Cancel | Step::Retry, Ok(Response::Job(view))) => format!("job {:?}", e.job == Some(view.id)),
            (Step::Create(asked), Ok(Response::GroupCreated(view) | Response::Group(view))) => {
                e.group = Some(view.id);
                self.names.insert(Subject::Group(view.id), e.name.clone());
                for index in 0..asked.children.len() as u32 {
                    self.names.insert(Subject::Job(view.id.child(index)), format!("{}.{index}", e.name));
                }
                "created".into()
            }
            (Step::Page(from, children), Ok(Response::Group(view))) => {
                for index in *from..from + children.len() as u32 {
                    self.names.insert(Subject::Job(view.id.child(index)), format!("{}.{index}", e.name));
                }
                format!("{} children", view.children)
            }
            (Step::Final, Ok(Response::Group(view))) if view.ended_at.is_none() => return,
            (Step::Final, Ok(Response::Group(view))) => {
                format!("{:?} {:?}: {} children, {:?}", view.status, view.stopped, view.children, view.counts)
            }
            (Step::Seal, Ok(Response::Group(view))) => format!("sealed {}", view.sealed),
            (Step::Children, Ok(Response::Children { children, .. })) => {
                let each = children.iter().map(|c| {
                    let result = c.result.as_ref().map(shown).unwrap_or_default();
                    format!("{} {} {} {:?} {result}", c.index, c.state.text(), c.attempts, c.reason)
                });
                each.collect::<Vec<_>>().join("; ")
            }
            (Step::Acquire(name, ..), Ok(Response::Slot { id, .. })) => {
                e.slot = Some(id.clone());
                format!("as asked {}", name.as_ref().is_none_or(|name| *name == id.slot))
            }
            (Step::Refresh, Ok(_)) | (Step::GiveBack, Ok(_)) => "done".into(),
            (_, Ok(other)) => format!("{other:?}"),
            (_, Err(failure)) => failure.code().into(),
        };
        let left = e.steps.len();
        e.steps.pop_front();
        self.facts.insert(format!("{} -{left} {}", e.name, verb(&step)), told);
    }

    // --- workers ------------------------------------------------------------------------------

    fn worker(&mut self, w: usize) {
        let now = self.world.now;
        if let Some(call) = self.workers[w].claiming
            && let Some(heard) = self.heard(call)
        {
            self.workers[w].claiming = None;
            match heard {
                Ok(Ok(Response::Claimed(jobs))) => jobs.into_iter().for_each(|leased| self.take_up(w, call, leased)),
                Ok(_) => {}
                Err(after) => {
                    self.workers[w].at = now + after;
                    self.world.schedule(after, Event::Pass);
                }
            }
        }
        let over = self.errands.iter().all(|e| e.steps.is_empty());
        let worker = &self.workers[w];
        if worker.claiming.is_none() && worker.at <= now && worker.hands.len() < 3 && !over && now >= SECOND {
            let n = self.workers[w].claims;
            self.workers[w].claims += 1;
            let tenant = tenant_name((n + w as u64) % TENANTS as u64);
            let queues = (0..QUEUES).map(|q| queue_name((q + n) % QUEUES)).collect();
            let max = 1 + w % 3;
            let (lease_ms, claim_id) = (None, None);
            let claim = |mark: &str| Claim {
                tenant,
                worker: format!("w{w}.{mark}"),
                queues,
                max,
                wait_ms: 700,
                lease_ms,
                claim_id,
            };
            let call = self.call(|mark| Request::Claim(Box::new(claim(mark))));
            self.workers[w].claiming = Some(call);
        }
        for h in (0..self.workers[w].hands.len()).rev() {
            self.hand(w, h);
        }
    }

    fn take_up(&mut self, w: usize, call: CallId, leased: Leased) {
        let Some(Request::Claim(claim)) = self.world.ledger.get(call).map(|c| (*c.request).clone()) else { return };
        let name = leased.payload.as_ref().map(name_in).unwrap_or_default();
        let act = self.acts.get(&name).and_then(|acts| acts.get(leased.delivery as usize - 1)).copied();
        let act = act.unwrap_or(Act::Complete);
        if act == Act::Vanish {
            return;
        }
        let after = self.choices.draw(Topic::Script.of(6), 400 * MILLI);
        self.world.schedule(after, Event::Pass);
        let (tenant, at) = (claim.tenant.clone(), self.world.now + after);
        let beats = leased.delivery == 1 && name.len().is_multiple_of(2);
        self.workers[w].hands.push(Hand { tenant, leased, act, at, beats, asked: None });
    }

    fn hand(&mut self, w: usize, h: usize) {
        let now = self.world.now;
        if let Some(call) = self.workers[w].hands[h].asked {
            match self.heard(call) {
                None => return,
                Some(Err(after)) => {
                    self.world.schedule(after, Event::Pass);
                    let hand = &mut self.workers[w].hands[h];
                    (hand.asked, hand.at) = (None, now + after);
                }
                Some(Ok(Ok(_))) if self.workers[w].hands[h].beats => {
                    let hand = &mut self.workers[w].hands[h];
                    (hand.asked, hand.beats) = (None, false);
                }
                Some(Ok(outcome)) => {
                    let hand = self.workers[w].hands.remove(h);
                    if let Err(failure) = outcome {
                        let name = hand.leased.payload.as_ref().map(name_in).unwrap_or_default();
                        self.facts.insert(format!("{name} refused"), failure.code().into());
                    }
                    return;
                }
            }
        }
        let hand = &self.workers[w].hands[h];
        if hand.at > now {
            return;
        }
        let held = Held { tenant: hand.tenant.clone(), job: hand.leased.id, token: Some(hand.leased.token) };
        let (act, beats) = (hand.act, hand.beats);
        let name = hand.leased.payload.as_ref().map(name_in).unwrap_or_default();
        let call = self.call(|mark| {
            let error = |kind: &str| ErrorInfo { message: format!("e-{mark}"), kind: Some(kind.into()), detail: None };
            let fail = |retryable| Fail { held: held.clone(), error: error("Own"), retryable, retry_in_ms: None };
            match act {
                _ if beats => Request::Heartbeat(Beat { held, progress: None, seq: None }),
                Act::Fail => Request::Fail(Box::new(fail(true))),
                Act::Refuse => Request::Fail(Box::new(fail(false))),
                Act::Release => Request::Release(held),
                Act::Complete | Act::Vanish => {
                    let result = Some(Content::binary("text/plain", format!("result of {name}-{mark}")));
                    Request::Complete(Box::new(Complete { held, result }))
                }
            }
        });
        self.workers[w].hands[h].asked = Some(call);
    }

    /// How often what happened to whom, as the audit log has it.
    fn events(&mut self) {
        let mut counts: BTreeMap<(String, Kind), u64> = BTreeMap::new();
        for n in 0..TENANTS as u64 {
            let (tenant, mut after) = (tenant_name(n), EventCursor::default());
            while self.world.broken.is_none() {
                let asked = Request::Events { tenant: tenant.clone(), after, limit: 100, wait_ms: 0 };
                let call = self.call(|_| asked);
                while self.heard(call).is_none() && self.world.step() {}
                match self.heard(call) {
                    Some(Ok(Ok(Response::Events { events, next }))) if !events.is_empty() => {
                        after = next;
                        for event in events {
                            let name = self.names.get(&Subject::of(event.event.of)).cloned().unwrap_or_default();
                            *counts.entry((name, event.event.kind)).or_default() += 1;
                        }
                    }
                    Some(Err(wait)) => self.world.run_until(self.world.now + wait),
                    _ => break,
                }
            }
        }
        for ((name, kind), n) in counts {
            self.facts.insert(format!("{name} events {}", kind.text()), n.to_string());
        }
    }
}

fn verb(step: &Step) -> &'static str {
    match step {
        Step::Wait(_) => "waits",
        Step::Submit(_) => "is submitted",
        Step::End => "ends",
        Step::Payload => "payload",
        Step::Result => "result",
        Step::Cancel => "is cancelled",
        Step::Retry => "is retried",
        Step::Create(_) => "is created",
        Step::Page(..) => "grows",
        Step::Seal => "is sealed",
        Step::Final => "is final",
        Step::Children => "children",
        Step::Acquire(..) => "acquires",
        Step::Refresh => "refreshes",
        Step::GiveBack => "gives back",
    }
}

fn request(e: &Errand, step: Step) -> Option<Request> {
    let (tenant, pool) = (e.tenant.clone(), POOL.to_owned());
    Some(match step {
        Step::Wait(_) => return None,
        Step::Submit(submit) => Request::Submit(submit),
        Step::End => Request::Get { tenant, job: e.job? },
        Step::Payload => Request::Payload { tenant, job: e.job? },
        Step::Result => Request::Result { tenant, job: e.job? },
        Step::Cancel => Request::Cancel { tenant, job: e.job? },
        Step::Retry => Request::Retry { tenant, job: e.job? },
        Step::Create(asked) => Request::CreateGroup(asked),
        Step::Page(from, children) => Request::ExtendGroup { tenant, group: e.group?, from, children },
        Step::Seal => Request::SealGroup { tenant, group: e.group? },
        Step::Final => Request::Group { tenant, group: e.group?, wait_ms: 5_000 },
        Step::Children => Request::Children { tenant, group: e.group?, from: 0, limit: 100, contents: true },
        Step::Acquire(slot, class, cost) => Request::Acquire(Box::new(Acquire {
            tenant,
            pool,
            slot,
            class,
            cost,
            holder: None,
            lease_ms: Some(8_000),
            wait_ms: 20_000,
        })),
        Step::Refresh => Request::RefreshSlot { tenant, pool, slot: e.slot.clone()? },
        Step::GiveBack => Request::ReleaseSlot { tenant, pool, slot: e.slot.clone()? },
    })
}

/// With the mark of its call, by which the oracle knows who wrote what.
fn marked(mut request: Request, mark: &str) -> Request {
    let trace = Some(format!("t-{mark}"));
    match &mut request {
        Request::Submit(submit) => submit.traceparent = trace,
        Request::CreateGroup(asked) => asked.common.traceparent = trace,
        Request::ExtendGroup { children, .. } => children.iter_mut().for_each(|c| c.traceparent = trace.clone()),
        Request::Acquire(asked) => asked.holder = Some(format!("h-{mark}")),
        _ => {}
    }
    request
}

// --- what is compared --------------------------------------------------------------------------

/// The runs of a seed that came out otherwise, each with the first facts that differ; and how many were compared.
pub fn seed(seed: u64) -> (Vec<(Option<Change>, String)>, usize) {
    let base = match run(seed, None) {
        Ok(base) => base,
        Err(what) => return (vec![(None, what)], 0),
    };
    let unfinished = base.get("unfinished").map(|left| (None, format!("unfinished: {left}")));
    let mut wrong: Vec<_> = unfinished.into_iter().collect();
    for change in Change::ALL {
        match run(seed, Some(change)) {
            Ok(other) if other == base => {}
            Ok(other) => wrong.push((Some(change), differences(&base, &other))),
            Err(what) => wrong.push((Some(change), what)),
        }
    }
    (wrong, base.len())
}

fn differences(base: &Facts, other: &Facts) -> String {
    let mut out = String::new();
    let none = "nothing".to_owned();
    let names: BTreeSet<&String> = base.keys().chain(other.keys()).collect();
    for name in names.into_iter().filter(|name| base.get(*name) != other.get(*name)).take(6) {
        let [a, b] = [base, other].map(|facts| facts.get(name).unwrap_or(&none));
        // Writing to a string cannot fail.
        let _ = write!(out, "\n    {name}: {a} / {b}");
    }
    out
}

/// Runs the pairs of many seeds and prints what differs; an exit status.
pub fn run_seeds(from: u64, to: u64, threads: usize) -> u8 {
    let (next, facts, wrong) = (AtomicU64::new(from), AtomicUsize::new(0), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let n = next.fetch_add(1, Ordering::Relaxed);
                    if n >= to {
                        return;
                    }
                    let (different, compared) = seed(n);
                    facts.fetch_add(compared, Ordering::Relaxed);
                    wrong.fetch_add(different.len(), Ordering::Relaxed);
                    for (change, what) in different {
                        println!("DIFFERENT seed {n}, {}: {what}", change.map_or("as it is", Change::text));
                    }
                }
            });
        }
    });
    let (seeds, wrong) = (to.saturating_sub(from), wrong.into_inner());
    let pairs = seeds * Change::ALL.len() as u64;
    let facts = facts.into_inner();
    println!("{seeds} seeds, {pairs} pairs over {facts} facts, {wrong} different");
    if wrong > 0 { report::SAFETY } else { report::HELD }
}
