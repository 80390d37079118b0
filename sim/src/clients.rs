//! Clients that submit, look, cancel, retry and delete, and go to another replica with the same key
//! when they have not heard; and an operator who pauses, resumes, purges and restarts.

use std::collections::VecDeque;

use leasehold_core::job::record::{Backoff, Class, Status};
use leasehold_core::opaque::{Content, Opaque};
use leasehold_core::request::{EventCursor, List, Start, Submit};
use leasehold_core::{JobId, Outcome, Request, Response};

use crate::calls::{CallId, Caller, Heard, ItemRef, again_after};
use crate::choices::{Choices as _, Topic};
use crate::setup::{MILLI, SECOND};
use crate::world::{Event, Micros, Phase, World};

#[derive(Clone, Debug, Default)]
pub struct Client {
    /// Jobs it still has to submit.
    left: usize,
    /// Jobs it knows.
    pub known: Vec<JobId>,
    /// What it wants to have created; asked again until it hears.
    intents: Vec<Intent>,
    /// Intents to be asked again.
    again: VecDeque<usize>,
    pub cursor: EventCursor,
}

#[derive(Clone, Debug)]
struct Intent {
    submits: Vec<Submit>,
    tries: u32,
    settled: bool,
}

#[derive(Clone, Debug, Default)]
pub struct Operator {
    /// Queues that are still to be resumed before the calm.
    pub to_resume: Vec<(String, String)>,
}

/// Tags of calls that need no follow-up.
const NO_TAG: u64 = 0;
/// The longest back-off of any random job, without jitter, in milliseconds.
pub const MAX_BACKOFF_MS: u64 = 5_000;

pub fn tenant_name(n: u64) -> String {
    if n == 0 { "default".into() } else { format!("t{n}") }
}

pub fn queue_name(n: u64) -> String {
    // One of them needs encoding in keys.
    if n == 2 { "q/ü 2".into() } else { format!("q{n}") }
}

impl World {
    pub fn start_load(&mut self) {
        let (clients, jobs) = (self.setup.clients, self.setup.jobs);
        for client in 0..clients {
            let left = jobs / clients + usize::from(client < jobs % clients);
            self.clients.push(Client { left, ..Client::default() });
            let after = self.choices.draw(Topic::Client.of(client), SECOND);
            self.schedule(after, Event::Client { client: client as u8 });
        }
        for worker in 0..self.setup.workers {
            self.start_worker(worker);
        }
        self.schedule(3 * SECOND, Event::Operator);
    }

    pub fn tenant(&self, n: u64) -> String {
        tenant_name(n)
    }

    pub fn queue_name(&self, n: u64) -> String {
        queue_name(n)
    }

    /// Every tenant and queue that this run uses.
    pub fn all_queues(&self) -> Vec<(String, String)> {
        let (tenants, queues) = (self.setup.tenants as u64, self.setup.queues as u64);
        (0..tenants)
            .flat_map(|t| (0..queues).map(move |q| (t, q)))
            .map(|(t, q)| (self.tenant(t), self.queue_name(q)))
            .collect()
    }

    pub fn any_replica(&mut self, topic: Topic, actor: usize) -> usize {
        self.choices.draw(topic.of(actor), self.setup.replicas as u64) as usize
    }

    pub fn client_wakes(&mut self, c: usize) {
        let at = Topic::Client.of(c);
        if let Some(intent) = self.clients[c].again.pop_front() {
            self.ask(c, intent);
        } else if self.phase == Phase::Chaos {
            let submit = self.clients[c].left > 0 && self.choices.draw(at, 2) == 0;
            if submit { self.submit(c) } else { self.look_or_meddle(c) }
        }
        let busy = !self.clients[c].again.is_empty();
        if self.phase == Phase::Chaos || busy {
            let per = self.setup.jobs / self.setup.clients + 1;
            let mean = if busy { SECOND } else { self.setup.chaos_us / (4 * per as u64) };
            let after = 1 + self.choices.draw(at, 2 * mean);
            self.schedule(after, Event::Client { client: c as u8 });
        }
    }

    /// Thinks of one job or a batch of them, and asks for it.
    fn submit(&mut self, c: usize) {
        let at = Topic::Client.of(c);
        let batch = if self.choices.draw(at, 5) == 4 { 2 + self.choices.draw(at, 4) as usize } else { 1 };
        let batch = batch.min(self.clients[c].left);
        let tenant = self.choices.draw(at, self.setup.tenants as u64);
        let tenant = self.tenant(tenant);
        let mut submits = Vec::with_capacity(batch);
        for n in 0..batch {
            submits.push(self.draw_submit(c, &tenant, n));
        }
        // Now and then two items of a batch share a key: with the same body, or with another.
        if batch > 2 && submits[0].key.is_some() && self.choices.draw(at, 3) == 2 {
            submits[1] = submits[0].clone();
        }
        // Or a key is used again for something else, or for the same thing by somebody else.
        if batch == 1 && self.choices.draw(at, 8) == 7 {
            let others = self.clients[c].intents.len() as u64;
            if others > 0 {
                let other = self.choices.draw(at, others) as usize;
                let earlier = self.clients[c].intents[other].submits[0].clone();
                if earlier.key.is_some() && self.choices.draw(at, 2) == 0 {
                    submits[0] = earlier;
                } else {
                    submits[0].key = earlier.key;
                    submits[0].tenant = earlier.tenant;
                }
            }
        }
        self.clients[c].left -= batch;
        self.clients[c].intents.push(Intent { submits, tries: 0, settled: false });
        let intent = self.clients[c].intents.len() - 1;
        self.ask(c, intent);
    }

    fn draw_submit(&mut self, c: usize, tenant: &str, n: usize) -> Submit {
        let at = Topic::Client.of(c);
        let queue = self.choices.draw(at, self.setup.queues as u64);
        let queue = self.queue_name(queue);
        let poison = self.choices.chance(at, self.setup.manners.poison);
        let number = self.clients[c].intents.len();
        let kind = if poison { "poison" } else { "job" };
        let payload = Content::json(format!("{{\"{kind}\":\"{c}.{number}.{n}\"}}"));
        let mut s = Submit::new(tenant, queue, payload);
        if self.choices.chance(at, self.setup.keyed) {
            s.key = Some(format!("key {c}/{number}.{n}"));
        }
        s.class = *self.choices.pick(at, &[Class::System, Class::System, Class::Interactive, Class::Batch]);
        s.start = match self.choices.draw(at, 6) {
            3 => Start::DelayMs(self.choices.between(at, 0, 15_000)),
            4 => {
                let clock = self.store.tick(self.now);
                Start::At(clock + self.choices.draw(at, 10 * SECOND))
            }
            5 => Start::At(self.choices.draw(at, 2) * 1_000),
            _ => Start::Now,
        };
        let one_of = |on: u64, low: u64, high: u64, choices: &mut crate::choices::Seeded| -> Option<u64> {
            // The least allowed is the most telling.
            let (pick, edge) = (choices.draw(at, on), choices.draw(at, 6) == 5);
            let value = choices.between(at, low, high);
            let value = if edge { low } else { value };
            (pick == on - 1).then_some(value)
        };
        let c = &mut self.choices;
        s.max_attempts = one_of(2, 1, 4, c).map(|n| n as u32);
        s.max_deliveries = one_of(5, 1, 4, c).map(|n| n as u32);
        s.max_age_ms = one_of(8, 5_000, 60_000, c);
        s.lease_ms = one_of(4, 500, 10_000, c);
        s.run_timeout_ms = one_of(5, 1_000, 15_000, c);
        s.progress_timeout_ms = one_of(6, 1_000, 8_000, c);
        s.queue_ttl_ms = one_of(5, 500, 30_000, c);
        s.retention_ms = one_of(3, 0, 40_000, c);
        s.key_ttl_ms = one_of(4, 0, 150_000, c);
        s.backoff = one_of(2, 50, 3_000, c).map(|base_ms| Backoff {
            base_ms,
            max_ms: MAX_BACKOFF_MS,
            factor_milli: 2_000,
            jitter_milli: (base_ms % 3) as u32 * 200,
        });
        if s.backoff.is_none() {
            s.backoff = Some(Backoff { base_ms: 500, max_ms: 4_000, factor_milli: 1_500, jitter_milli: 100 });
        }
        // Workers take work whatever it costs and wherever it may run.
        let where_at = Topic::Dispatcher.of(64);
        s.on_prem = c.draw(where_at, 5) == 4;
        s.cost = *c.pick(where_at, &[1, 1, 1, 1, 2]);
        s.metadata = one_of(6, 0, 9, c).map(|n| Opaque::new(format!("{{\"m\":{n}}}")));
        s
    }

    /// Asks for an intent, through any replica, again with the same keys.
    fn ask(&mut self, c: usize, intent: usize) {
        let call = self.ledger.next();
        let Some(found) = self.clients[c].intents.get_mut(intent) else { return };
        found.tries += 1;
        let mut requests: Vec<Request> = found
            .submits
            .iter()
            .enumerate()
            .map(|(item, submit)| {
                let mut submit = submit.clone();
                submit.traceparent = Some(format!("t-{}", ItemRef { call, item: item as u32 }.mark()));
                Request::Submit(Box::new(submit))
            })
            .collect();
        let request = match requests.pop() {
            Some(one) if requests.is_empty() => one,
            Some(last) => {
                requests.push(last);
                Request::Batch(requests)
            }
            None => return,
        };
        let r = self.any_replica(Topic::Client, c);
        let patience = self.choices.between(Topic::Client.of(c), 3 * SECOND, 8 * SECOND);
        self.call(Caller::Client(c as u8), intent as u64 + 1, r, request, patience);
    }

    pub fn client_hears(&mut self, c: usize, _call: CallId, tag: u64, heard: Heard) {
        if tag == NO_TAG {
            if let Heard::Answer(Ok(Response::Events { next, .. })) = heard {
                self.clients[c].cursor = next;
            }
            return;
        }
        let intent = tag as usize - 1;
        let Some(found) = self.clients[c].intents.get(intent) else { return };
        if found.settled {
            return;
        }
        let keyed = found.submits.iter().all(|s| s.key.is_some());
        let mut again = false;
        let mut learned = Vec::new();
        let mut learn = |outcome: &Outcome| match outcome {
            Ok(Response::Created(view) | Response::Existing(view)) => learned.push(view.id),
            Ok(_) => {}
            // Without a key nobody may ask again unless it certainly was not done.
            Err(failure) => again |= again_after(failure).is_some() && (keyed || failure.certain()),
        };
        match &heard {
            Heard::Answer(Ok(Response::Batch(outcomes))) => {
                outcomes.iter().for_each(&mut learn);
                // A batch is asked again as a whole, so only with keys.
                again &= keyed;
            }
            Heard::Answer(outcome) => learn(outcome),
            Heard::NotDelivered => again = true,
            Heard::Nothing => again = keyed,
        }
        for job in learned {
            if !self.clients[c].known.contains(&job) {
                self.clients[c].known.push(job);
            }
        }
        let found = &mut self.clients[c].intents[intent];
        if !again || found.tries > 60 {
            found.settled = true;
            return;
        }
        let idle = self.clients[c].again.is_empty() && self.phase != Phase::Chaos;
        self.clients[c].again.push_back(intent);
        if idle {
            self.schedule(SECOND, Event::Client { client: c as u8 });
        }
    }

    /// Anything else a client may ask for.
    fn look_or_meddle(&mut self, c: usize) {
        let at = Topic::Client.of(c);
        let known = self.clients[c].known.len() as u64;
        let tenant = self.choices.draw(at, self.setup.tenants as u64);
        let queue = self.choices.draw(at, self.setup.queues as u64);
        let (mut tenant, queue) = (self.tenant(tenant), self.queue_name(queue));
        let pick = self.choices.draw(at, 16);
        let job = self.choices.draw(at, known.max(1)) as usize;
        let job = self.clients[c].known.get(job).copied();
        if let Some(job) = job
            && let Some(home) = self.oracle.tenant_of(job)
            && self.choices.draw(at, 20) < 19
        {
            tenant = home;
        }
        let request = match (pick, job) {
            (0 | 1, Some(job)) => Request::Get { tenant, job },
            (2, Some(job)) => Request::Payload { tenant, job },
            (3, Some(job)) => Request::Result { tenant, job },
            (4 | 5, Some(job)) => Request::Why { tenant, job },
            (6 | 7, Some(job)) => Request::Cancel { tenant, job },
            (8 | 9, Some(job)) => Request::Retry { tenant, job },
            (10, Some(job)) => Request::Delete { tenant, job },
            (11, _) => {
                let status = self.choices.draw(at, 10) as usize;
                let status = Status::ALL.get(status).copied();
                let queue = (self.choices.draw(at, 3) > 0).then_some(queue);
                Request::List(List {
                    tenant,
                    queue,
                    status,
                    limit: 1 + (pick as usize + job.map_or(0, |_| 4)),
                    cursor: None,
                })
            }
            (12, _) => Request::Queue { tenant, queue },
            (13, _) => Request::Queues { tenant },
            (14, _) => {
                let wait_ms = self.choices.draw(at, 5_000);
                Request::Events { tenant, after: self.clients[c].cursor, limit: 50, wait_ms }
            }
            _ => Request::Ready,
        };
        let r = self.any_replica(Topic::Client, c);
        let patience = self.choices.between(at, SECOND, 10 * SECOND);
        self.call(Caller::Client(c as u8), NO_TAG, r, request, patience);
    }

    // --- operator -----------------------------------------------------------------------------

    pub fn operator_wakes(&mut self) {
        let at = Topic::Operator.of(0);
        let r = self.any_replica(Topic::Operator, 0);
        if self.phase != Phase::Chaos {
            if self.now < self.setup.chaos_us + 15 * SECOND {
                return;
            }
            if let Some((tenant, queue)) = self.operator.to_resume.last().cloned() {
                self.call(Caller::Operator, 1, r, Request::Resume { tenant, queue }, 8 * SECOND);
            }
            return;
        }
        let tenant = self.choices.draw(at, self.setup.tenants as u64);
        let queue = self.choices.draw(at, self.setup.queues as u64);
        let (tenant, queue) = (self.tenant(tenant), self.queue_name(queue));
        let request = match self.choices.draw(at, 12) {
            4 => Some(Request::Pause { tenant, queue, reason: Some("because".into()) }),
            5 | 6 => Some(Request::Resume { tenant, queue }),
            7 => {
                let lease_ms = Some(self.choices.between(at, 1_000, 10_000));
                Some(Request::SetQueue { tenant, queue, lease_ms })
            }
            8 => {
                let status = *self.choices.pick(at, &Status::ALL);
                Some(Request::Purge { tenant, queue, status })
            }
            9 | 10 => self.meddle(tenant),
            11 if self.setup.replicas > 1 => {
                // A rolling restart: drain, then stop.
                let after = self.choices.between(at, SECOND, 4 * SECOND);
                self.call(Caller::Operator, 0, r, Request::Drain, 4 * SECOND);
                self.schedule(after, Event::Operator);
                self.operator_restarts(r, after);
                None
            }
            _ => None,
        };
        if let Some(request) = request {
            self.call(Caller::Operator, 0, r, request, 6 * SECOND);
        }
        let after = self.choices.between(at, SECOND, 8 * SECOND);
        self.schedule(after, Event::Operator);
    }

    /// The process is stopped a while after its drain; modelled as a pause in front of a crash.
    fn operator_restarts(&mut self, r: usize, _after: Micros) {
        let rest = self.choices.between(Topic::Operator.of(0), 500 * MILLI, 3 * SECOND);
        self.hosts[r].stop_at = Some(self.now + 3 * SECOND);
        self.hosts[r].stop_rest = rest;
    }

    /// Cancels, retries or deletes some job of anybody's.
    fn meddle(&mut self, tenant: String) -> Option<Request> {
        let at = Topic::Operator.of(0);
        let c = self.choices.draw(at, self.clients.len() as u64) as usize;
        let n = self.choices.draw(at, self.clients[c].known.len().max(1) as u64) as usize;
        let job = self.clients[c].known.get(n).copied()?;
        let tenant = self.oracle.tenant_of(job).unwrap_or(tenant);
        Some(match self.choices.draw(at, 3) {
            0 => Request::Retry { tenant, job },
            1 => Request::Cancel { tenant, job },
            _ => Request::Delete { tenant, job },
        })
    }

    pub fn operator_hears(&mut self, _call: CallId, tag: u64, heard: Heard) {
        if tag != 1 {
            return;
        }
        if matches!(heard, Heard::Answer(Ok(_))) {
            self.operator.to_resume.pop();
        }
        self.schedule(100 * MILLI, Event::Operator);
    }

    /// Whether clients and operator have nothing left that they wait for.
    pub fn clients_settled(&self) -> bool {
        self.operator.to_resume.is_empty()
            && self.clients.iter().all(|c| c.again.is_empty())
            && self
                .ledger
                .iter()
                .rev()
                .take(400)
                .all(|c| c.heard.is_some() || !matches!(c.caller, Caller::Client(_)) || c.tag == NO_TAG)
    }
}
