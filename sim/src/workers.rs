//! Workers: mostly honest, sometimes not. They hang past their lease, complete twice or with an old
//! token, beat late, die with the job in their hands, vanish between claim and answer.

use std::collections::BTreeMap;

use leasehold_core::job::record::{Class, ErrorInfo, Placed};
use leasehold_core::opaque::{Content, Opaque};
use leasehold_core::request::{Beat, Claim, Complete, Dispatch, Fail, GiveBack, Held, HoldUpstream, Leased};
use leasehold_core::{Failure, JobId, Outcome, Request, Response, Token};

use crate::calls::{CallId, Caller, Heard, ItemRef};
use crate::choices::{Choices as _, Topic};
use crate::setup::{MILLI, SECOND};
use crate::world::{Event, Micros, Phase, World};

#[derive(Clone, Debug, Default)]
pub struct Worker {
    /// Only the newest wake-up counts.
    wake: u32,
    pub claiming: Option<CallId>,
    claim: Option<Claim>,
    /// The claim is to be asked again with its id.
    repeat: bool,
    pub held: Vec<Hold>,
    asks: BTreeMap<CallId, Vec<Ask>>,
    /// Tokens of the past, to be tried again.
    old: Vec<(String, JobId, Token)>,
    rests_until: Micros,
    claims: u64,
}

/// A job in a worker's hands, and what it is going to do about it.
#[derive(Clone, Debug)]
pub struct Hold {
    tenant: String,
    job: JobId,
    token: Token,
    lease_us: Micros,
    seq: u64,
    beat_at: Option<Micros>,
    end_at: Option<Micros>,
    end: Act,
    twice: bool,
    tries: u32,
    asked: bool,
    /// The upstream that is called for it and what is held for that, if it was claimed by name …
    placed: Option<(Class, Placed)>,
    /// … and which asks to be left alone.
    busy: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Act {
    Beat,
    Complete,
    Fail,
    Release,
    /// The call is over that was made for a job which was cancelled.
    GiveBack,
}

#[derive(Clone, Debug)]
struct Ask {
    job: JobId,
    token: Token,
    act: Act,
}

impl Worker {
    /// A new, honest process in its place.
    pub fn start_over(&mut self) {
        self.held.clear();
        self.asks.clear();
        self.claiming = None;
        self.rests_until = 0;
    }
}

impl World {
    pub fn start_worker(&mut self, w: usize) {
        self.workers.push(Worker::default());
        let after = self.choices.draw(Topic::Worker.of(w), SECOND);
        self.wake_worker(w, after);
    }

    pub fn wake_worker(&mut self, w: usize, after: Micros) {
        self.workers[w].wake += 1;
        let wake = self.workers[w].wake;
        self.schedule(after, Event::Worker { worker: w as u8, wake });
    }

    fn misbehaves(&mut self, w: usize, milli: u32) -> bool {
        self.phase == Phase::Chaos && self.choices.chance(Topic::Misbehave.of(w), milli)
    }

    pub fn worker_wakes(&mut self, w: usize, wake: u32) {
        if self.workers[w].wake != wake || self.phase == Phase::Quiet {
            return;
        }
        if self.workers[w].rests_until <= self.now {
            self.act(w);
            if self.workers[w].claiming.is_none() && self.workers[w].held.len() < 4 {
                self.claim(w);
            }
        }
        let worker = &self.workers[w];
        let times = worker.held.iter().filter(|h| !h.asked).flat_map(|h| [h.beat_at, h.end_at]).flatten();
        let rest = (worker.rests_until > self.now).then_some(worker.rests_until);
        let next = times.chain(rest).min().unwrap_or(self.now + 5 * SECOND).max(self.now + MILLI);
        self.wake_worker(w, next - self.now);
    }

    /// As a server does that runs jobs itself: it claims by name for the upstreams that it can call.
    fn dispatch(&mut self, w: usize) {
        let at = Topic::Dispatcher.of(w);
        let call = self.ledger.next();
        let mut queues = self.all_queues();
        let first = self.choices.draw(at, queues.len() as u64) as usize;
        queues.rotate_left(first);
        queues.truncate(1 + self.choices.draw(at, queues.len() as u64) as usize);
        let mut upstreams: Vec<String> = self.setup.config.routing.upstreams.iter().map(|u| u.name.clone()).collect();
        if self.choices.draw(at, 3) == 2 {
            let gone = self.choices.draw(at, upstreams.len() as u64) as usize;
            upstreams.remove(gone);
        }
        let mut wait_ms = *self.choices.pick(at, &[5_000, 1_000, 0, 20_000]);
        if self.phase != Phase::Chaos {
            // Only what its upstreams have room for comes this way.
            wait_ms = wait_ms.min(1_000);
        }
        let worker = format!("d{w}.{}", ItemRef { call, item: 0 }.mark());
        let max = 1 + self.choices.draw(at, 4) as usize;
        let request = Request::Dispatch(Box::new(Dispatch { worker, queues, upstreams, max, wait_ms }));
        let mut patience = wait_ms * MILLI + 7 * SECOND;
        let vanish = self.setup.manners.vanish;
        if self.misbehaves(w, vanish) {
            patience = self.choices.between(Topic::Misbehave.of(w), MILLI, 3 * SECOND);
        }
        self.workers[w].claim = None;
        self.workers[w].claiming = Some(call);
        let r = self.any_replica(Topic::Dispatcher, w);
        self.call(Caller::Worker(w as u8), 0, r, request, patience);
    }

    /// An upstream that answers 429: it is put on hold, then the job goes back.
    fn hold_upstream(&mut self, w: usize, upstream: String) {
        let at = Topic::Dispatcher.of(w);
        let for_ms = self.choices.between(at, 100, 4_000);
        let call = self.ledger.next();
        self.workers[w].asks.insert(call, Vec::new());
        let r = self.any_replica(Topic::Dispatcher, w);
        let request = match self.choices.draw(at, 8) {
            7 => Request::FreeUpstream { upstream },
            6 => Request::Upstreams,
            _ => Request::HoldUpstream(HoldUpstream { upstream, for_ms }),
        };
        self.call(Caller::Worker(w as u8), 1, r, request, 5 * SECOND);
    }

    fn claim(&mut self, w: usize) {
        let routed = !self.setup.config.routing.routes.is_empty() && !self.workers[w].repeat;
        if routed && self.choices.draw(Topic::Dispatcher.of(w), 4) > 0 {
            return self.dispatch(w);
        }
        let at = Topic::Worker.of(w);
        let call = self.ledger.next();
        let name = format!("w{w}.{}", ItemRef { call, item: 0 }.mark());
        let worker = &mut self.workers[w];
        let claim = match (worker.repeat, worker.claim.take()) {
            (true, Some(mut claim)) => {
                claim.worker = name;
                claim
            }
            _ => {
                worker.claims += 1;
                let number = worker.claims;
                let tenant = self.choices.draw(at, self.setup.tenants as u64);
                let tenant = self.tenant(tenant);
                let first = self.choices.draw(at, self.setup.queues as u64);
                let mut queues: Vec<String> = (0..self.setup.queues as u64)
                    .map(|q| self.queue_name((first + q) % self.setup.queues as u64))
                    .collect();
                if self.phase == Phase::Chaos {
                    queues.truncate(1 + self.choices.draw(at, queues.len() as u64) as usize);
                }
                let mut wait_ms = *self.choices.pick(at, &[5_000, 2_000, 0, 20_000]);
                if self.phase != Phase::Chaos && self.setup.tenants > 1 {
                    wait_ms = wait_ms.min(1_000);
                }
                let with_length = self.choices.draw(at, 4) == 3;
                let length = self.choices.between(at, 500, 8_000);
                Claim {
                    tenant,
                    worker: name,
                    queues,
                    max: 1 + self.choices.draw(at, 4) as usize,
                    wait_ms,
                    lease_ms: with_length.then_some(length),
                    claim_id: (self.choices.draw(at, 3) > 0).then(|| format!("claim {w}.{number}")),
                }
            }
        };
        let mut patience = claim.wait_ms * MILLI + 7 * SECOND;
        let vanish = self.setup.manners.vanish;
        if self.misbehaves(w, vanish) {
            patience = self.choices.between(Topic::Misbehave.of(w), MILLI, 3 * SECOND);
        }
        let worker = &mut self.workers[w];
        worker.repeat = false;
        worker.claim = Some(claim.clone());
        worker.claiming = Some(call);
        let r = self.any_replica(Topic::Worker, w);
        self.call(Caller::Worker(w as u8), 0, r, Request::Claim(Box::new(claim)), patience);
    }

    /// Does what is due for the jobs in hand.
    fn act(&mut self, w: usize) {
        let now = self.now;
        let (mut asks, mut busy) = (Vec::new(), Vec::new());
        for n in 0..self.workers[w].held.len() {
            let hold = &mut self.workers[w].held[n];
            if hold.asked {
                continue;
            }
            if hold.end_at.is_some_and(|at| at <= now) {
                hold.asked = true;
                asks.push((n, hold.end));
                let upstream = hold.placed.as_ref().map(|(_, placed)| placed.upstream.clone());
                busy.extend(upstream.filter(|_| std::mem::take(&mut hold.busy)));
            } else if hold.beat_at.is_some_and(|at| at <= now) {
                hold.beat_at = Some(now + (hold.lease_us / 3).max(MILLI));
                asks.push((n, Act::Beat));
            }
        }
        if asks.is_empty() {
            return;
        }
        for upstream in busy {
            self.hold_upstream(w, upstream);
        }
        if asks.len() > 1 && self.choices.draw(Topic::Worker.of(w), 2) == 1 {
            self.send_acts(w, &asks);
        } else {
            for ask in asks {
                self.send_acts(w, &[ask]);
            }
        }
        // An old token is tried now and then.
        let stale = self.setup.manners.stale_token;
        if !self.workers[w].old.is_empty() && self.misbehaves(w, stale) {
            self.try_old_token(w);
        }
    }

    fn send_acts(&mut self, w: usize, acts: &[(usize, Act)]) {
        let call = self.ledger.next();
        let mut requests = Vec::with_capacity(acts.len());
        let mut asks = Vec::with_capacity(acts.len());
        for (item, (n, act)) in acts.iter().enumerate() {
            let hold = &mut self.workers[w].held[*n];
            hold.seq += 1;
            let (tenant, job, token, seq) = (hold.tenant.clone(), hold.job, hold.token, hold.seq);
            asks.push(Ask { job, token, act: *act });
            let mark = ItemRef { call, item: item as u32 }.mark();
            if *act == Act::Fail && self.phase == Phase::Chaos && job.child_of().is_some() {
                self.retry_soon(tenant.clone(), job);
            }
            let request = match (*act, self.workers[w].held[*n].placed.clone()) {
                (Act::GiveBack, Some((class, placed))) => Request::GiveBack(GiveBack { job, token, class, placed }),
                (act, _) => self.request(w, tenant, job, token, seq, act, &mark),
            };
            requests.push(request);
        }
        self.workers[w].asks.insert(call, asks);
        let request = match requests.pop() {
            Some(one) if requests.is_empty() => one,
            Some(last) => {
                requests.push(last);
                Request::Batch(requests)
            }
            None => return,
        };
        let r = self.any_replica(Topic::Worker, w);
        self.call(Caller::Worker(w as u8), 1, r, request, 7 * SECOND);
    }

    /// An operator who retries what fails, sometimes in the very moment in which its group is finalized.
    fn retry_soon(&mut self, tenant: String, job: JobId) {
        let at = Topic::Meddle.of(0);
        if self.choices.draw(at, 4) == 3 {
            let after = self.choices.between(at, 0, 5 * MILLI);
            self.schedule(after, Event::Retry { tenant, job });
        }
    }

    #[expect(clippy::too_many_arguments)]
    fn request(
        &mut self,
        w: usize,
        tenant: String,
        job: JobId,
        token: Token,
        seq: u64,
        act: Act,
        mark: &str,
    ) -> Request {
        let at = Topic::Worker.of(w);
        let held = Held { tenant, job, token: Some(token) };
        match act {
            Act::Beat => {
                let told = self.choices.draw(at, 3);
                let progress = (told > 0).then(|| Opaque::new(format!("{{\"done\":{seq}}}")));
                let seq = (told > 1).then(|| seq.saturating_sub(self.choices.draw(at, 2)));
                Request::Heartbeat(Beat { held, progress, seq })
            }
            Act::Complete => {
                let result = match self.choices.draw(at, 40) {
                    39 => Some(Content::binary("text/plain", format!("{}r-{mark}", "x".repeat(70_000)))),
                    0..=34 => Some(Content::binary("text/plain", format!("r-{mark}"))),
                    _ => None,
                };
                Request::Complete(Box::new(Complete { held, result }))
            }
            Act::Fail => {
                let error = ErrorInfo { message: format!("e-{mark}"), kind: Some("Sim".into()), detail: None };
                let retryable = self.choices.draw(at, 6) < 5;
                let own = self.choices.draw(at, 4) == 3;
                let retry_in_ms = self.choices.between(at, 0, 4_000);
                Request::Fail(Box::new(Fail { held, error, retryable, retry_in_ms: own.then_some(retry_in_ms) }))
            }
            Act::Release | Act::GiveBack => Request::Release(held),
        }
    }

    fn try_old_token(&mut self, w: usize) {
        let at = Topic::Misbehave.of(w);
        let n = self.choices.draw(at, self.workers[w].old.len() as u64) as usize;
        let (tenant, job, token) = self.workers[w].old[n].clone();
        let act = *self.choices.pick(at, &[Act::Complete, Act::Beat, Act::Fail, Act::Release]);
        let call = self.ledger.next();
        let mark = ItemRef { call, item: 0 }.mark();
        let request = self.request(w, tenant, job, token, 99, act, &mark);
        self.workers[w].asks.insert(call, Vec::new());
        let r = self.any_replica(Topic::Worker, w);
        self.call(Caller::Worker(w as u8), 1, r, request, 5 * SECOND);
    }

    pub fn worker_hears(&mut self, w: usize, call: CallId, tag: u64, heard: Heard) {
        if tag == 0 {
            return self.claim_heard(w, call, heard);
        }
        let Some(asks) = self.workers[w].asks.remove(&call) else { return };
        match heard {
            Heard::Answer(Ok(Response::Batch(outcomes))) => {
                for (ask, outcome) in asks.iter().zip(outcomes) {
                    self.act_heard(w, ask, Some(&outcome));
                }
            }
            Heard::Answer(outcome) => asks.iter().for_each(|ask| self.act_heard(w, ask, Some(&outcome))),
            Heard::NotDelivered | Heard::Nothing => asks.iter().for_each(|ask| self.act_heard(w, ask, None)),
        }
        self.wake_worker(w, 0);
    }

    fn act_heard(&mut self, w: usize, ask: &Ask, outcome: Option<&Outcome>) {
        let Some(n) = self.workers[w].held.iter().position(|h| h.job == ask.job && h.token == ask.token) else {
            return;
        };
        let twice = self.workers[w].held[n].twice;
        let keep = match outcome {
            Some(Ok(Response::Beat { cancel_requested, .. })) => !cancel_requested,
            Some(Ok(_)) => {
                self.counts.completed += u64::from(ask.act == Act::Complete);
                twice
            }
            Some(Err(failure)) => failure.retry_after_ms().is_some(),
            None => true,
        };
        let again = self.choices.between(Topic::Worker.of(w), 50 * MILLI, SECOND);
        let hold = &mut self.workers[w].held[n];
        hold.tries += 1;
        if !keep && hold.placed.is_some() && hold.end != Act::GiveBack && !matches!(outcome, Some(Ok(r)) if is_end(r)) {
            // It hangs up, and says so; or its process ends first.
            hold.end = Act::GiveBack;
            hold.asked = false;
            hold.beat_at = None;
            hold.end_at = Some(self.now + self.choices.draw(Topic::Dispatcher.of(w), 2 * SECOND));
            if self.choices.draw(Topic::Dispatcher.of(w), 4) < 3 {
                return;
            }
        }
        let hold = &mut self.workers[w].held[n];
        if !keep || hold.tries > 40 {
            let hold = self.workers[w].held.remove(n);
            self.remember(w, hold);
        } else if ask.act != Act::Beat {
            // Asked again with the same token: the answer must be the same.
            hold.twice = false;
            hold.asked = false;
            hold.end_at = Some(self.now + again);
        }
    }

    fn remember(&mut self, w: usize, hold: Hold) {
        let old = &mut self.workers[w].old;
        old.push((hold.tenant, hold.job, hold.token));
        if old.len() > 8 {
            old.remove(0);
        }
    }

    fn claim_heard(&mut self, w: usize, call: CallId, heard: Heard) {
        let worker = &mut self.workers[w];
        if worker.claiming != Some(call) {
            return;
        }
        worker.claiming = None;
        let at = Topic::Worker.of(w);
        let (tenant, with_id) =
            worker.claim.as_ref().map_or((String::new(), false), |c| (c.tenant.clone(), c.claim_id.is_some()));
        let unknown = matches!(heard, Heard::Nothing | Heard::Answer(Err(Failure::OutcomeUnknown { .. })));
        let mut after = 0;
        match heard {
            Heard::Answer(Ok(Response::Claimed(jobs))) => {
                if jobs.is_empty() {
                    after = 100 * MILLI;
                }
                for job in jobs {
                    self.take_up(w, &tenant, &job);
                }
            }
            Heard::Answer(Ok(Response::Dispatched(found))) => {
                after = 100 * MILLI;
                for one in found {
                    self.take_up(w, &one.tenant, &one.job);
                    let busy = self.setup.manners.busy;
                    let busy = self.misbehaves(w, busy);
                    let held =
                        self.workers[w].held.iter_mut().find(|h| h.token == one.job.token && h.job == one.job.id);
                    if let Some(hold) = held {
                        hold.placed = Some((one.job.class, one.placed));
                        hold.busy = busy;
                        hold.end = if busy { Act::Release } else { hold.end };
                    }
                }
            }
            _ => after = self.choices.between(at, 100 * MILLI, 2 * SECOND),
        }
        if unknown && with_id && self.choices.draw(at, 4) < 3 {
            self.workers[w].repeat = true;
        }
        let die = self.setup.manners.die;
        if self.misbehaves(w, die) {
            self.worker_dies(w);
            return;
        }
        self.wake_worker(w, after);
    }

    /// Everything in its hands is forgotten; another worker takes its place, maybe under its name.
    fn worker_dies(&mut self, w: usize) {
        let rest = self.choices.between(Topic::Misbehave.of(w), 100 * MILLI, 5 * SECOND);
        let held = std::mem::take(&mut self.workers[w].held);
        for hold in held {
            self.remember(w, hold);
        }
        self.workers[w].rests_until = self.now + rest;
        self.wake_worker(w, rest);
    }

    /// Decides what to do with a job that was handed out.
    fn take_up(&mut self, w: usize, tenant: &str, job: &Leased) {
        self.counts.claimed += 1;
        let at = Topic::Worker.of(w);
        let poison = job.payload.as_ref().is_some_and(|p| p.data.bytes.starts_with(b"{\"poison\""));
        if poison {
            self.fault("poison");
            // The process is gone before it can say anything.
            return self.worker_dies(w);
        }
        let lease_us = job.lease_expires_at.saturating_sub(job.token.at);
        let manners = self.setup.manners.clone();
        let mut hold = Hold {
            tenant: tenant.to_owned(),
            job: job.id,
            token: job.token,
            lease_us,
            seq: 0,
            beat_at: None,
            end_at: Some(self.now + self.choices.draw(at, 800 * MILLI)),
            end: Act::Complete,
            twice: false,
            tries: 0,
            asked: false,
            placed: None,
            busy: false,
        };
        if self.misbehaves(w, manners.hang) {
            // Past its lease, with or without a beat in between, or for good.
            let late = self.choices.between(Topic::Misbehave.of(w), 0, 8 * SECOND);
            hold.end_at = Some(self.now + lease_us + late);
            hold.beat_at = late.is_multiple_of(3).then_some(self.now + lease_us + late / 2);
            if late.is_multiple_of(5) {
                hold.end_at = Some(self.now + 60 * SECOND);
            }
        } else if self.phase == Phase::Chaos && self.choices.draw(at, 4) == 3 {
            // A long one, kept alive by heartbeats.
            hold.end_at = Some(self.now + self.choices.draw(at, 3 * lease_us + 1));
            hold.beat_at = Some(self.now + lease_us / 3);
        }
        if self.misbehaves(w, manners.fail) {
            hold.end = Act::Fail;
        } else if self.misbehaves(w, manners.release) {
            hold.end = Act::Release;
        }
        hold.twice = self.misbehaves(w, manners.twice);
        self.workers[w].held.retain(|h| h.job != job.id || h.token != job.token);
        self.workers[w].held.push(hold);
    }
}

/// Whether an answer says that the attempt is over by the worker's own word.
fn is_end(answer: &Response) -> bool {
    !matches!(answer, Response::Beat { .. })
}
