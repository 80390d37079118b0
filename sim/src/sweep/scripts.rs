//! The scenarios of the sweeps: short scripts that go on whatever becomes of a call, as an honest client
//! and an honest worker would. What must hold is the oracle's to say; a script only makes things happen.

use leasehold_core::dispatch::{Route, Routing, Upstream};
use leasehold_core::group::record::Mode;
use leasehold_core::ids::GroupId;
use leasehold_core::job::record::{Backoff, Class, Status};
use leasehold_core::opaque::Content;
use leasehold_core::request::{
    Beat, CreateGroup, Dispatch, Dispatched, EventCursor, Fail, GiveBack, HoldUpstream, Leased, List, SlotId, Start,
    Submit,
};
use leasehold_core::{JobId, Request, Response};

use crate::scenarios::{POOL, Script, TENANT, held, job, keyed, payload};
use crate::setup::SECOND;

/// A named script on so many replicas.
#[derive(Clone, Copy, Debug)]
pub struct Scenario {
    pub name: &'static str,
    pub replicas: usize,
    pub lease_ms: u64,
    /// The queue's jobs may be run by servers, on the one upstream that there is, and its pool fails open.
    pub routed: bool,
    pub run: fn(&mut Script),
}

const fn on(replicas: usize, name: &'static str, run: fn(&mut Script)) -> Scenario {
    Scenario { name, replicas, lease_ms: 6_000, routed: false, run }
}

const fn routed(name: &'static str, run: fn(&mut Script)) -> Scenario {
    Scenario { routed: true, ..on(2, name, run) }
}

/// The upstream of scripts, whose pool is [`POOL`].
const UPSTREAM: &str = "u";

/// Where the scripts' queue may go.
pub fn routing() -> Routing {
    Routing {
        upstreams: vec![Upstream { name: UPSTREAM.into(), pool: Some(POOL.into()), on_prem: true }],
        routes: vec![Route { queue: "q".into(), tenants: vec![TENANT.into()], upstreams: vec![UPSTREAM.into()] }],
        on_prem_tenants: Vec::new(),
    }
}

pub const ALL: &[Scenario] = &[
    on(2, "submit", submit),
    on(2, "submit-with-a-key", submit_with_a_key),
    on(2, "submit-a-batch", submit_a_batch),
    on(2, "submit-for-later", submit_for_later),
    on(2, "claim-and-complete", claim_and_complete),
    on(2, "claim-a-batch", claim_a_batch),
    on(2, "claims-that-race", claims_that_race),
    on(2, "claim-repeated", claim_repeated),
    on(2, "long-poll", long_poll),
    on(2, "heartbeats", heartbeats),
    on(2, "lease-lapses", lease_lapses),
    on(2, "late-holder", late_holder),
    on(2, "fail-and-retry", fail_and_retry),
    on(2, "fail-for-good", fail_for_good),
    on(2, "release", release),
    on(2, "cancel-queued", cancel_queued),
    on(2, "cancel-running", cancel_running),
    on(2, "cancel-against-complete", cancel_against_complete),
    on(2, "retry-the-dead", retry_the_dead),
    on(2, "delete", delete),
    on(2, "pause-and-resume", pause_and_resume),
    on(2, "run-time-out", run_time_out),
    on(2, "progress-time-out", progress_time_out),
    on(2, "queue-deadline", queue_deadline),
    on(2, "key-again", key_again),
    on(2, "retention", retention),
    on(2, "purge", purge),
    on(2, "classes", classes),
    on(2, "drain", drain),
    on(1, "one-replica", claim_and_complete),
    on(2, "reads", reads),
    on(2, "group", group),
    on(2, "group-with-a-key", group_with_a_key),
    on(2, "group-by-pages", group_by_pages),
    on(2, "group-fails-fast", group_fails_fast),
    on(2, "group-cancelled", group_cancelled),
    on(2, "group-ends-twice", group_ends_twice),
    on(3, "group-of-three-replicas", group),
    on(2, "slot", slot),
    on(2, "slot-waited-for", slot_waited_for),
    on(2, "slot-run-out", slot_run_out),
    routed("dispatch", dispatch),
    routed("dispatches-that-race", dispatches_that_race),
    routed("dispatch-cancelled", dispatch_cancelled),
    routed("dispatch-lapses", dispatch_lapses),
    routed("upstream-on-hold", upstream_on_hold),
    routed("fail-open", fail_open),
    routed("fail-open-and-run-out", fail_open_and_run_out),
];

/// Tries of one intent.
const TRIES: usize = 12;

impl Script {
    /// Asks one replica after the other until it is answered for certain.
    fn insist(&mut self, first: usize, make: impl Fn(&Script) -> Request) -> Option<Response> {
        let replicas = self.world.hosts.len();
        for n in 0..TRIES {
            if self.broken().is_some() {
                return None;
            }
            let request = make(self);
            match self.ask((first + n) % replicas, request) {
                Ok(response) => return Some(response),
                Err(failure) if failure.retry_after_ms().is_none() => return None,
                Err(_) => self.pass(400),
            }
        }
        None
    }

    fn pass(&mut self, ms: u64) {
        let then = self.now_ms() + ms;
        self.at_ms(then);
    }

    fn put(&mut self, replica: usize, submit: &Submit) -> Option<JobId> {
        match self.insist(replica, |s| s.submit_request(submit))? {
            Response::Created(view) | Response::Existing(view) => Some(view.id),
            _ => None,
        }
    }

    fn take(&mut self, replica: usize, max: usize, wait_ms: u64) -> Vec<Leased> {
        // The same claim, however often it is asked.
        let id = format!("claim-{}", self.world.ledger.next());
        match self.insist(replica, |s| s.claim_request("w", max, wait_ms, Some(&id))) {
            Some(Response::Claimed(jobs)) => jobs,
            _ => Vec::new(),
        }
    }

    fn finish(&mut self, replica: usize, leased: &Leased) -> Option<Response> {
        self.insist(replica, |s| s.complete_request(leased.id, leased.token))
    }

    fn beat_on(&mut self, replica: usize, leased: &Leased, seq: u64) -> Option<Response> {
        self.insist(replica, |_| {
            let progress = Some(Content::json(format!("{seq}")).data);
            Request::Heartbeat(Beat { held: held(leased.id, leased.token), progress, seq: Some(seq) })
        })
    }

    fn fails(&mut self, replica: usize, leased: &Leased, retryable: bool) -> Option<Response> {
        self.insist(replica, |s| match s.fail_request(0, leased.id, leased.token) {
            Request::Fail(fail) => Request::Fail(Box::new(Fail { retryable, ..*fail })),
            other => other,
        })
    }

    /// Claims and completes until nothing is handed out any more.
    fn work(&mut self, replica: usize) {
        for _ in 0..TRIES {
            let jobs = self.take(replica, 2, 0);
            if jobs.is_empty() || self.broken().is_some() {
                return;
            }
            for leased in jobs {
                self.finish(replica, &leased);
            }
        }
    }
}

fn submit(s: &mut Script) {
    s.put(0, &job("a"));
    s.put(1, &job("b"));
}

fn submit_with_a_key(s: &mut Script) {
    let submit = keyed("a", "the-key");
    let first = s.submit_request(&submit);
    s.send(0, first);
    s.put(1, &submit);
    s.put(0, &submit);
    s.put(0, &keyed("another", "the-key"));
}

fn submit_a_batch(s: &mut Script) {
    let jobs: Vec<Submit> = vec![job("a"), keyed("b", "k"), keyed("b", "k"), job("c")];
    s.create_all(0, &jobs);
    s.create_all(1, &jobs);
    s.work(0);
}

fn submit_for_later(s: &mut Script) {
    s.put(0, &Submit { start: Start::DelayMs(3_000), ..job("later") });
    s.take(1, 1, 0);
    s.pass(3_500);
    s.work(1);
}

fn claim_and_complete(s: &mut Script) {
    s.put(0, &job("a"));
    for leased in s.take(0, 1, 0) {
        s.finish(0, &leased);
        s.finish(0, &leased);
    }
}

fn claim_a_batch(s: &mut Script) {
    s.create_all(0, &[job("a"), job("b"), job("c")]);
    let jobs = s.take(1, 10, 0);
    let ends: Vec<Request> = jobs.iter().map(|l| s.complete_request(l.id, l.token)).collect();
    if !ends.is_empty() {
        s.ask(0, Request::Batch(ends)).ok();
    }
    for leased in jobs {
        s.finish(1, &leased);
    }
}

fn claims_that_race(s: &mut Script) {
    s.create_all(0, &[job("a"), job("b"), job("c")]);
    let calls: Vec<_> = (0..2)
        .map(|replica| {
            let request = s.claim_request("w", 2, 0, None);
            s.send(replica, request)
        })
        .collect();
    for call in calls {
        if let Ok(Response::Claimed(jobs)) = s.wait(call) {
            for leased in jobs {
                s.finish(0, &leased);
            }
        }
    }
}

fn claim_repeated(s: &mut Script) {
    s.create_all(0, &[job("a"), job("b")]);
    let first = s.claim_request("w", 1, 0, Some("again"));
    s.send(0, first);
    s.pass(50);
    for replica in [0, 1] {
        let again = s.claim_request("w", 1, 0, Some("again"));
        if let Ok(Response::Claimed(jobs)) = s.ask(replica, again) {
            for leased in jobs {
                s.finish(1, &leased);
            }
        }
    }
}

fn long_poll(s: &mut Script) {
    let request = s.claim_request("w", 1, 4_000, None);
    let call = s.send(0, request);
    s.pass(300);
    s.put(1, &job("a"));
    if let Ok(Response::Claimed(jobs)) = s.wait(call) {
        for leased in jobs {
            s.finish(0, &leased);
        }
    }
}

fn heartbeats(s: &mut Script) {
    s.put(0, &job("long"));
    for leased in s.take(0, 1, 0) {
        for seq in 1..4 {
            s.pass(3_000);
            s.beat_on((seq % 2) as usize, &leased, seq);
        }
        s.finish(1, &leased);
    }
}

fn lease_lapses(s: &mut Script) {
    s.put(0, &job("abandoned"));
    s.take(0, 1, 0);
    s.pass(7_500);
    s.work(1);
}

fn late_holder(s: &mut Script) {
    s.put(0, &job("slow"));
    let first = s.take(0, 1, 0);
    s.pass(7_500);
    let second = s.take(1, 1, 0);
    for leased in first {
        s.beat_on(0, &leased, 1);
        s.finish(0, &leased);
    }
    for leased in second {
        s.finish(1, &leased);
    }
}

fn fail_and_retry(s: &mut Script) {
    let backoff = Backoff { base_ms: 1_000, max_ms: 2_000, factor_milli: 2_000, jitter_milli: 0 };
    s.put(0, &Submit { backoff: Some(backoff), ..job("fails once") });
    for leased in s.take(0, 1, 0) {
        s.fails(1, &leased, true);
    }
    s.pass(2_500);
    s.work(0);
}

fn fail_for_good(s: &mut Script) {
    s.create_all(0, &[Submit { max_attempts: Some(1), ..keyed("once", "k") }, job("not worth it")]);
    for (leased, retryable) in s.take(1, 2, 0).into_iter().zip([true, false]) {
        s.fails(0, &leased, retryable);
    }
    s.put(1, &keyed("once", "k"));
}

fn release(s: &mut Script) {
    s.put(0, &job("given back"));
    for leased in s.take(0, 1, 0) {
        s.insist(1, |_| Request::Release(held(leased.id, leased.token)));
    }
    s.work(1);
}

fn cancel(s: &mut Script, replica: usize, job: JobId) -> Option<Response> {
    s.insist(replica, |_| Request::Cancel { tenant: TENANT.into(), job })
}

fn cancel_queued(s: &mut Script) {
    let waiting = s.put(0, &keyed("not wanted", "k"));
    let delayed = s.put(0, &Submit { start: Start::DelayMs(60_000), ..job("nor this") });
    for job in waiting.into_iter().chain(delayed) {
        cancel(s, 1, job);
        cancel(s, 0, job);
    }
    s.put(1, &keyed("not wanted", "k"));
}

fn cancel_running(s: &mut Script) {
    let Some(job) = s.put(0, &job("stopped")) else { return };
    let jobs = s.take(0, 1, 0);
    cancel(s, 1, job);
    for leased in jobs {
        s.beat_on(0, &leased, 1);
        s.fails(0, &leased, true);
    }
}

fn cancel_against_complete(s: &mut Script) {
    let Some(job) = s.put(0, &job("either")) else { return };
    for leased in s.take(0, 1, 0) {
        let request = s.complete_request(leased.id, leased.token);
        let call = s.send(0, request);
        cancel(s, 1, job);
        s.wait(call).ok();
        s.finish(1, &leased);
    }
}

fn retry_the_dead(s: &mut Script) {
    let Some(job) = s.put(0, &Submit { max_attempts: Some(1), ..job("fails") }) else { return };
    for leased in s.take(0, 1, 0) {
        s.fails(0, &leased, true);
    }
    s.insist(1, |_| Request::Retry { tenant: TENANT.into(), job });
    s.work(1);
}

fn delete(s: &mut Script) {
    let Some(job) = s.put(0, &keyed("done and gone", "k")) else { return };
    s.work(0);
    s.insist(1, |_| Request::Delete { tenant: TENANT.into(), job });
    s.get(0, job);
    s.put(0, &keyed("done and gone", "k"));
}

fn pause_and_resume(s: &mut Script) {
    s.put(0, &job("waits"));
    s.insist(0, |_| Request::Pause { tenant: TENANT.into(), queue: "q".into(), reason: None });
    s.take(1, 1, 0);
    let request = s.claim_request("w", 1, 5_000, None);
    let call = s.send(1, request);
    s.pass(200);
    s.insist(0, |_| Request::Resume { tenant: TENANT.into(), queue: "q".into() });
    if let Ok(Response::Claimed(jobs)) = s.wait(call) {
        for leased in jobs {
            s.finish(1, &leased);
        }
    }
}

fn run_time_out(s: &mut Script) {
    s.put(0, &Submit { run_timeout_ms: Some(4_000), ..job("too long") });
    for leased in s.take(0, 1, 0) {
        s.pass(2_500);
        s.beat_on(1, &leased, 1);
        s.pass(3_000);
        s.beat_on(0, &leased, 2);
        s.finish(0, &leased);
    }
}

fn progress_time_out(s: &mut Script) {
    s.put(0, &Submit { progress_timeout_ms: Some(3_000), ..job("stuck") });
    for leased in s.take(0, 1, 0) {
        s.pass(2_000);
        s.beat_on(1, &leased, 1);
        s.pass(2_000);
        s.beat_on(0, &leased, 2);
        s.pass(4_500);
        s.finish(0, &leased);
    }
}

fn queue_deadline(s: &mut Script) {
    s.put(0, &Submit { queue_ttl_ms: Some(2_000), ..job("too late") });
    s.put(1, &Submit { queue_ttl_ms: Some(60_000), ..job("in time") });
    s.pass(3_500);
    s.work(1);
}

fn key_again(s: &mut Script) {
    let submit = Submit { key_ttl_ms: Some(2_000), retention_ms: Some(4_000), ..keyed("a", "k") };
    s.put(0, &submit);
    s.work(1);
    s.put(1, &submit);
    s.pass(3_000);
    s.put(0, &submit);
    s.put(1, &submit);
}

fn retention(s: &mut Script) {
    s.put(0, &Submit { retention_ms: Some(2_000), ..keyed("short-lived", "k") });
    s.work(0);
    s.pass(4_500);
    s.put(1, &keyed("short-lived", "k"));
}

fn purge(s: &mut Script) {
    s.create_all(0, &[keyed("a", "k"), job("b"), job("c")]);
    s.take(1, 1, 0);
    s.insist(0, |_| Request::Purge { tenant: TENANT.into(), queue: "q".into(), status: Status::Queued });
    s.put(1, &keyed("a", "k"));
}

fn classes(s: &mut Script) {
    let of = |text: &str, class| Submit { class, ..job(text) };
    s.create_all(0, &[of("b", Class::Batch), of("s", Class::System), of("i", Class::Interactive)]);
    for _ in 0..3 {
        for leased in s.take(1, 1, 0) {
            s.finish(0, &leased);
        }
    }
}

fn drain(s: &mut Script) {
    s.create_all(0, &[job("a"), job("b")]);
    let jobs = s.take(0, 1, 0);
    let request = s.claim_request("w", 1, 4_000, None);
    let call = s.send(0, request);
    s.ask(0, Request::Drain).ok();
    s.wait(call).ok();
    for leased in jobs {
        s.finish(0, &leased);
    }
    s.put(0, &job("still taken"));
    s.crash(0, Some(500));
    s.work(1);
}

fn reads(s: &mut Script) {
    let Some(job) = s.put(0, &keyed("looked at", "k")) else { return };
    s.insist(1, |_| Request::Why { tenant: TENANT.into(), job });
    s.insist(0, |_| {
        Request::List(List { tenant: TENANT.into(), queue: Some("q".into()), status: None, limit: 10, cursor: None })
    });
    s.insist(1, |_| Request::Payload { tenant: TENANT.into(), job });
    s.work(0);
    s.insist(0, |_| Request::Result { tenant: TENANT.into(), job });
    s.insist(1, |_| Request::Queues { tenant: TENANT.into() });
    s.insist(0, |_| Request::Queue { tenant: TENANT.into(), queue: "q".into() });
    let after = EventCursor::default();
    s.insist(1, |_| Request::Events { tenant: TENANT.into(), after, limit: 10, wait_ms: 0 });
    s.insist(0, |_| Request::Audit { cursor: None, repair: false });
    s.insist(1, |_| Request::Ready);
}

// --- groups -----------------------------------------------------------------------------------------

fn children(n: usize) -> Vec<Submit> {
    (0..n).map(|i| Submit::new("any", "any", payload(&format!("child {i}")))).collect()
}

fn asked(n: usize, max_parallel: u64) -> CreateGroup {
    CreateGroup {
        common: Submit { max_attempts: Some(1), ..Submit::new(TENANT, "q", Content::json("null")) },
        children: children(n),
        max_parallel: Some(max_parallel),
        mode: Mode::CollectAll,
        sealed: true,
        open_timeout_ms: None,
    }
}

fn begin(s: &mut Script, asked: &CreateGroup) -> Option<GroupId> {
    match s.insist(0, |s| s.group_request(asked))? {
        Response::GroupCreated(group) | Response::Group(group) => Some(group.id),
        _ => None,
    }
}

/// Works on a group's children for a while, through every replica in turn.
fn run_children(s: &mut Script, rounds: usize) {
    for n in 0..rounds {
        s.pass(600);
        s.work(n % s.world.hosts.len());
    }
}

fn group(s: &mut Script) {
    begin(s, &asked(3, 1));
    run_children(s, 5);
}

fn group_with_a_key(s: &mut Script) {
    let mut asked = asked(3, 2);
    asked.common.key = Some("the-group".into());
    let request = s.group_request(&asked);
    s.send(1, request);
    begin(s, &asked);
    run_children(s, 3);
    begin(s, &asked);
}

fn group_by_pages(s: &mut Script) {
    let Some(group) = begin(s, &CreateGroup { sealed: false, ..asked(0, 2) }) else { return };
    for from in [0, 2] {
        s.insist(1, |s| {
            let traceparent = Some(format!("t-{}", s.mark(0)));
            let children = children(2).into_iter().map(|c| Submit { traceparent: traceparent.clone(), ..c }).collect();
            Request::ExtendGroup { tenant: TENANT.into(), group, from, children }
        });
    }
    s.insist(0, |_| Request::SealGroup { tenant: TENANT.into(), group });
    run_children(s, 4);
}

fn group_fails_fast(s: &mut Script) {
    begin(s, &CreateGroup { mode: Mode::FailFast, ..asked(4, 2) });
    s.pass(1_200);
    let jobs = s.take(0, 2, 0);
    for (n, leased) in jobs.iter().enumerate() {
        if n == 0 {
            s.fails(1, leased, false);
        } else {
            s.beat_on(0, leased, 1);
            s.finish(0, leased);
        }
    }
    run_children(s, 2);
}

fn group_cancelled(s: &mut Script) {
    let Some(group) = begin(s, &asked(4, 2)) else { return };
    s.pass(1_200);
    let jobs = s.take(1, 1, 0);
    s.insist(0, |_| Request::CancelGroup { tenant: TENANT.into(), group });
    for leased in jobs {
        s.fails(1, &leased, true);
    }
    run_children(s, 2);
}

/// The last two children end through two replicas at once.
fn group_ends_twice(s: &mut Script) {
    let Some(group) = begin(s, &asked(2, 2)) else { return };
    s.pass(1_200);
    let jobs = s.take(0, 2, 0);
    let calls: Vec<_> = jobs
        .iter()
        .enumerate()
        .map(|(n, leased)| {
            let request = s.complete_request(leased.id, leased.token);
            s.send(n % 2, request)
        })
        .collect();
    for call in calls {
        s.wait(call).ok();
    }
    for leased in jobs {
        s.finish(1, &leased);
    }
    s.insist(0, |_| Request::Group { tenant: TENANT.into(), group, wait_ms: 2_000 });
    s.insist(1, |_| Request::Children { tenant: TENANT.into(), group, from: 0, limit: 10, contents: true });
}

// --- pools ------------------------------------------------------------------------------------------

fn acquire(s: &mut Script, replica: usize, name: &str, wait_ms: u64) -> Option<SlotId> {
    match s.insist(replica, |s| s.acquire_request(Some(name), wait_ms))? {
        Response::Slot { id, .. } => Some(id),
        _ => None,
    }
}

fn give_back(s: &mut Script, replica: usize, slot: &SlotId) {
    s.insist(replica, |_| Request::ReleaseSlot { tenant: TENANT.into(), pool: POOL.into(), slot: slot.clone() });
}

fn refresh(s: &mut Script, replica: usize, slot: &SlotId) {
    s.insist(replica, |_| Request::RefreshSlot { tenant: TENANT.into(), pool: POOL.into(), slot: slot.clone() });
}

fn slot(s: &mut Script) {
    s.set_pool(0, 1).ok();
    let Some(slot) = acquire(s, 0, "a", 0) else { return };
    acquire(s, 1, "b", 0);
    s.pass(3_000);
    refresh(s, 1, &slot);
    give_back(s, 0, &slot);
    if let Some(slot) = acquire(s, 1, "b", 0) {
        give_back(s, 1, &slot);
        give_back(s, 0, &slot);
    }
}

fn slot_waited_for(s: &mut Script) {
    s.set_pool(1, 1).ok();
    let Some(slot) = acquire(s, 0, "a", 0) else { return };
    let calls: Vec<_> = [(1, "b"), (0, "c")]
        .into_iter()
        .map(|(replica, name)| {
            let request = s.acquire_request(Some(name), 4_000);
            s.send(replica, request)
        })
        .collect();
    s.pass(500);
    give_back(s, 1, &slot);
    for call in calls {
        if let Ok(Response::Slot { id, .. }) = s.wait(call) {
            give_back(s, 0, &id);
        }
    }
}

/// A holder that comes back when its slot has run out and another has it.
fn slot_run_out(s: &mut Script) {
    s.set_pool(0, 1).ok();
    let Some(late) = acquire(s, 0, "a", 0) else { return };
    s.pass(7_500);
    let other = acquire(s, 1, "b", 2_000);
    refresh(s, 0, &late);
    give_back(s, 0, &late);
    if let Some(other) = other {
        refresh(s, 1, &other);
        give_back(s, 0, &other);
    }
}

// --- jobs that servers run ---------------------------------------------------------------------------

fn dispatch_request(s: &Script, max: usize, wait_ms: u64) -> Request {
    let worker = format!("d-{}", s.mark(0));
    let queues = vec![(TENANT.into(), "q".into())];
    Request::Dispatch(Box::new(Dispatch { worker, queues, upstreams: vec![UPSTREAM.into()], max, wait_ms }))
}

/// Once: a server whose call had no answer looks for other work.
fn take_for(s: &mut Script, replica: usize, max: usize) -> Vec<Dispatched> {
    let request = dispatch_request(s, max, 0);
    match s.ask(replica, request) {
        Ok(Response::Dispatched(jobs)) => jobs,
        _ => Vec::new(),
    }
}

fn put_two(s: &mut Script) {
    s.set_pool(0, 1).ok();
    s.put(0, &job("a"));
    s.put(1, &job("b"));
}

fn dispatch(s: &mut Script) {
    put_two(s);
    for replica in [0, 1, 0] {
        for had in take_for(s, replica, 2) {
            s.pass(2_000);
            s.beat_on(replica, &had.job, 1);
            s.finish(replica, &had.job);
        }
    }
}

fn dispatches_that_race(s: &mut Script) {
    put_two(s);
    let calls: Vec<_> = [0, 1]
        .into_iter()
        .map(|replica| {
            let request = dispatch_request(s, 2, 0);
            s.send(replica, request)
        })
        .collect();
    for call in calls {
        if let Ok(Response::Dispatched(jobs)) = s.wait(call) {
            for had in jobs {
                s.finish(0, &had.job);
            }
        }
    }
    s.pass(7_500);
}

fn hang_up(s: &mut Script, replica: usize, had: &Dispatched, class: Class) {
    s.insist(replica, |_| {
        let (job, token, placed) = (had.job.id, had.job.token, had.placed.clone());
        Request::GiveBack(GiveBack { job, token, class, placed })
    });
}

fn dispatch_cancelled(s: &mut Script) {
    put_two(s);
    for had in take_for(s, 0, 1) {
        cancel(s, 1, had.job.id);
        take_for(s, 1, 1);
        s.beat_on(0, &had.job, 1);
        hang_up(s, 0, &had, Class::System);
    }
    for had in take_for(s, 1, 1) {
        s.finish(1, &had.job);
    }
}

/// A server that comes back when its job's lease has run out and another server has it.
fn dispatch_lapses(s: &mut Script) {
    put_two(s);
    let late = take_for(s, 0, 1);
    s.pass(7_500);
    let other = take_for(s, 1, 1);
    for had in &late {
        s.beat_on(0, &had.job, 1);
        hang_up(s, 0, had, Class::System);
        s.finish(0, &had.job);
    }
    for had in &other {
        s.finish(1, &had.job);
    }
}

fn upstream_on_hold(s: &mut Script) {
    put_two(s);
    s.set_pool(0, 2).ok();
    for had in take_for(s, 0, 1) {
        s.insist(0, |_| Request::HoldUpstream(HoldUpstream { upstream: UPSTREAM.into(), for_ms: 1_000 }));
        s.insist(0, |_| Request::Release(held(had.job.id, had.job.token)));
    }
    s.pass(1_200);
    // One is tried first.
    let probe = take_for(s, 0, 2);
    take_for(s, 1, 2);
    for had in probe {
        s.finish(0, &had.job);
        s.insist(0, |_| Request::FreeUpstream { upstream: UPSTREAM.into() });
    }
    for had in take_for(s, 1, 2) {
        s.finish(1, &had.job);
    }
}

/// A slot while the store is away, from one replica: nobody else knows of it.
fn acquire_alone(s: &mut Script, replica: usize, name: &str) -> Option<SlotId> {
    for _ in 0..TRIES {
        let request = s.acquire_request(Some(name), 0);
        match s.ask(replica, request) {
            Ok(Response::Slot { id, .. }) => return Some(id),
            _ => s.pass(400),
        }
    }
    None
}

fn fail_open(s: &mut Script) {
    s.set_pool(0, 1).ok();
    acquire(s, 0, "before", 0).iter().for_each(|slot| give_back(s, 0, slot));
    s.world.store.down_until = s.world.now + 6 * SECOND;
    let (first, second) = (acquire_alone(s, 0, "a"), acquire_alone(s, 0, "b"));
    s.pass(1_000);
    first.iter().for_each(|slot| refresh(s, 0, slot));
    s.world.store.down_until = 0;
    // It is written down.
    s.pass(2_500);
    first.iter().for_each(|slot| refresh(s, 1, slot));
    let other = acquire(s, 1, "c", 0);
    for slot in first.iter().chain(&second).chain(&other) {
        give_back(s, 0, slot);
    }
    acquire(s, 1, "d", 0).iter().for_each(|slot| give_back(s, 1, slot));
}

/// Its holder comes back when it has run out, and the store has given the name to another meanwhile.
fn fail_open_and_run_out(s: &mut Script) {
    s.set_pool(0, 1).ok();
    acquire(s, 0, "before", 0).iter().for_each(|slot| give_back(s, 0, slot));
    s.world.store.down_until = s.world.now + 3 * SECOND;
    let late = acquire_alone(s, 0, "a");
    let other = acquire(s, 1, "a", 2_000);
    s.pass(7_500);
    for slot in late.iter().chain(&other) {
        refresh(s, 0, slot);
        give_back(s, 1, slot);
    }
}
