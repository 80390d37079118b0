//! The phases of a run: chaos; then the faults stop, the world heals, and everything must come to its
//! end within a bound that is computed from the configuration; then nobody asks for anything, and an
//! idle system must be quiet and, once all retention has passed, empty.

use std::collections::BTreeMap;

use leasehold_core::codec;
use leasehold_core::event::Kind;
use leasehold_core::job::record::{Class, QueueRecord, Status};
use leasehold_core::limits;
use leasehold_core::request::EventCursor;
use leasehold_core::store::{Score, keys};
use leasehold_core::{Name, Request, Response};

use crate::calls::{Caller, Heard};
use crate::clients::MAX_BACKOFF_MS;
use crate::oracle::{Promise, Subject};
use crate::setup::{MILLI, SECOND};
use crate::world::{Event, Micros, Phase, World};

/// The longest lease that any claim, job or queue of a random run asks for.
const LEASE_US: Micros = 12 * SECOND;
/// The longest that an ended job or its key is kept in a random run.
const KEPT_US: Micros = 150 * SECOND;

impl World {
    /// Runs all phases.
    pub fn run(&mut self) {
        self.run_until(self.setup.chaos_us);
        if self.broken.is_some() {
            return;
        }
        self.heal();
        self.settle();
        self.finish();
        self.close();
    }

    /// All work is done: the events and the books are looked at, then the silence, then what is left.
    pub fn close(&mut self) {
        self.audit();
        self.quiet();
        self.core_audit();
        if self.setup.tail {
            self.tail();
        }
        if self.broken.is_none() {
            self.store.tick(self.now);
            let checked = self.oracle.full(&self.store.model);
            self.hold(checked);
        }
    }

    /// The faults stop: links and store work, every replica runs, workers are honest.
    pub fn heal(&mut self) {
        self.phase = Phase::Calm;
        self.calm_since = self.store.tick(self.now);
        self.links.heal();
        self.store.down_until = 0;
        self.store.slow_until = 0;
        self.store.model.full = false;
        for r in 0..self.hosts.len() {
            let host = &mut self.hosts[r];
            host.stop_at = None;
            let epoch = host.epoch;
            if host.paused {
                self.resume(r, epoch);
            }
            // A replica that has met records of a newer release claims nothing until it is upgraded.
            if self.hosts[r].replica.as_ref().is_some_and(|r| r.stats().draining || r.stats().newer_format) {
                self.crash(r, None);
            }
            let epoch = self.hosts[r].epoch;
            self.boot(r, epoch);
        }
        for w in 0..self.workers.len() {
            self.workers[w].start_over();
            self.wake_worker(w, 0);
        }
        for client in 0..self.clients.len() {
            self.schedule(0, Event::Client { client: client as u8 });
        }
        for owner in 0..self.owners.len() {
            self.schedule(0, Event::Owner { owner: owner as u8 });
        }
        self.heal_users();
        self.operator.to_resume = self.all_queues();
        // What the operator asked for before, and what is still on its way, comes first.
        self.schedule(15 * SECOND, Event::Operator);
    }

    /// Clients get their answers, the operator resumes all queues.
    fn settle(&mut self) {
        let until = self.now + 90 * SECOND;
        while self.broken.is_none() && !(self.clients_settled() && self.owners_settled() && self.users_settled()) {
            if self.now > until {
                self.violate(Promise::NoSilentStall, "clients ask in vain though nothing is broken any more".into());
                return;
            }
            self.run_until(self.now + SECOND);
        }
    }

    /// How long everything may take from now on.
    pub fn bound(&mut self) -> Micros {
        let clock = self.store.tick(self.now);
        let sweep = self.setup.config.sweep_ms * MILLI;
        let backoff = MAX_BACKOFF_MS * MILLI * 14 / 10;
        let (mut longest, mut most) = (0, 0);
        let mut jobs = 0;
        for (facts, _) in self.oracle.live_facts(clock) {
            let Some(job) = facts.job(clock) else { continue };
            let left = u64::from(job.policy.max_attempts.saturating_sub(job.attempts));
            let attempt = LEASE_US + backoff + 4 * sweep + 2 * SECOND;
            let waits = facts.due.map_or(0, |due| due.saturating_sub(clock));
            longest = longest.max(waits + left * attempt);
            most = most.max(left * attempt);
            jobs += 1;
        }
        // A group's children run in waves as wide as its limit, the last from when it is no longer open.
        let waves = self.oracle.group_waves(clock);
        let groups = waves.iter().map(|(_, open, waves)| open + waves * (most + 2 * sweep)).max().unwrap_or(0);
        longest += groups;
        let records = self.store.model.records(b"").count() as u64;
        // A lost entry is put back by the scrub, which must come round.
        let mut pages = 0;
        if self.oracle.damaged() {
            // Its second walk looks at one live index of one queue at a time.
            let indexes = Status::LIVE.len() * Class::ALL.len();
            pages += (self.setup.queues * self.setup.tenants * indexes) as u64;
        }
        if self.oracle.damaged() || self.oracle.rewound || !self.setup.random {
            pages += records / limits::SCRUB_KEYS as u64 + 2;
        }
        let scrub = pages * self.setup.config.scrub_ms * MILLI * 2;
        let grace = limits::GRACE_MS * MILLI + 2 * sweep;
        grace + LEASE_US + longest + jobs * 6 * SECOND / self.setup.workers.max(1) as u64 + scrub + 60 * SECOND
    }

    /// eventually-done: every job reaches its end.
    fn finish(&mut self) {
        let bound = self.now + self.bound();
        while self.broken.is_none() {
            let clock = self.store.tick(self.now);
            let in_pools = self.oracle.left_in_pools(clock);
            if self.oracle.live_count(clock) == 0 && in_pools.is_empty() {
                return;
            }
            if self.now > bound {
                let live = self.oracle.live(clock);
                let groups = self.oracle.live_group_texts(clock);
                let mut some: Vec<String> = live.iter().take(5).map(|(job, what)| format!("{job}: {what}")).collect();
                some.extend(groups.iter().take(3).cloned());
                some.extend(in_pools.iter().take(3).cloned());
                let what = format!(
                    "{} jobs, {} groups and {} slots are not done {} s after the last fault: {}",
                    live.len(),
                    groups.len(),
                    in_pools.len(),
                    (self.now - self.setup.chaos_us) / SECOND,
                    some.join("; ")
                );
                return self.violate(Promise::EventuallyDone, what);
            }
            self.run_until(self.now + SECOND);
        }
    }

    /// Reads all events of all tenants and compares them with what happened.
    fn audit(&mut self) {
        let mut seen: BTreeMap<(Subject, Kind), u32> = BTreeMap::new();
        let mut last: BTreeMap<String, EventCursor> = BTreeMap::new();
        for n in 0..self.setup.tenants as u64 {
            let tenant = self.tenant(n);
            let mut after = EventCursor::default();
            for _ in 0..10_000 {
                let request = Request::Events { tenant: tenant.clone(), after, limit: 37, wait_ms: 0 };
                let Some((events, next)) = self.events_page(request) else { break };
                for event in &events {
                    *seen.entry((Subject::of(event.event.of), event.event.kind)).or_default() += 1;
                    if event.id <= after && after != EventCursor::default() {
                        self.violate(Promise::HonestReplies, format!("event {:?} comes after {after:?}", event.id));
                    }
                }
                if events.is_empty() {
                    break;
                }
                after = next;
            }
            last.insert(tenant, after);
        }
        if self.broken.is_none() {
            let checked = self.oracle.audit(&seen);
            self.hold(checked);
        }
    }

    fn events_page(&mut self, request: Request) -> Option<(Vec<leasehold_core::request::EventView>, EventCursor)> {
        match self.auditor_asks(&request) {
            Some(Response::Events { events, next }) => Some((events, next)),
            _ => None,
        }
    }

    /// The core's own check of the whole store, through one replica: where no fault took anything out of
    /// the store there is nothing to be found.
    fn core_audit(&mut self) {
        let mut cursor = None;
        for _ in 0..10_000 {
            if self.broken.is_some() {
                return;
            }
            let request = Request::Audit { cursor: cursor.take(), repair: false };
            let Some(Response::Audited(page)) = self.auditor_asks(&request) else { return };
            if let (Some(finding), false) = (page.findings.first(), self.oracle.damaged()) {
                let what = format!("the audit finds {}: {}", finding.subject, finding.what);
                return self.violate(Promise::BooksBalance, what);
            }
            match page.next {
                Some(next) => cursor = Some(next),
                None => return,
            }
        }
        self.violate(Promise::NoSilentStall, "the audit does not come to its end".into());
    }

    /// Asks until it is answered well.
    fn auditor_asks(&mut self, request: &Request) -> Option<Response> {
        for _ in 0..10 {
            let call = self.call(Caller::Auditor, 0, 0, request.clone(), 8 * SECOND);
            while self.broken.is_none() && self.ledger.get(call).is_some_and(|c| c.heard.is_none()) {
                if !self.step() {
                    return None;
                }
            }
            if let Some(Heard::Answer(Ok(response))) = self.ledger.get(call).and_then(|c| c.heard.clone()) {
                return Some(response);
            }
            self.run_until(self.now + SECOND);
        }
        if self.broken.is_none() {
            self.violate(Promise::NoSilentStall, format!("nothing is broken any more, and no answer to {request:?}"));
        }
        None
    }

    pub fn auditor_hears(&mut self, _heard: Heard) {}

    /// Nobody asks any more: open polls end in their time, and the system falls silent.
    fn quiet(&mut self) {
        if self.broken.is_some() {
            return;
        }
        self.phase = Phase::Quiet;
        self.run_until(self.now + 32 * SECOND);
        let open: usize = self.hosts.iter().map(|h| h.open.len()).sum();
        if open > 0 && self.broken.is_none() {
            self.violate(Promise::NoSilentStall, format!("{open} calls are open though nobody waits any more"));
        }
        let (before, from) = (self.counts.steps, self.now);
        self.run_until(self.now + 30 * SECOND);
        let steps = self.counts.steps - before;
        let per = |ms: u64| (self.now - from) / (ms.max(1) * MILLI) + 1;
        // A look at the deadlines, the names, the groups and the pools: a timer or so each, a read, maybe a commit.
        // A page of the scrub has up to four reads and a commit, and as much again for the groups on it.
        let each = per(self.setup.config.sweep_ms) * 10 + per(self.setup.config.scrub_ms) * 12 + 20;
        let most = each * self.hosts.len() as u64;
        if steps > most && self.broken.is_none() {
            self.violate(Promise::EventuallyDone, format!("idle, and yet {steps} steps in 30 s, more than {most}"));
        }
    }

    /// bounded-metadata: when all retention is over, nothing of the work is left.
    fn tail(&mut self) {
        if self.broken.is_some() {
            return;
        }
        self.run_until(self.now + KEPT_US + limits::STUB + 4 * limits::NAME_IDLE + 10 * SECOND);
        self.store.tick(self.now);
        let before = self.before();
        self.store.model.collect_garbage();
        self.follow(before);
        let mut left: Vec<String> = self
            .store
            .model
            .records(b"")
            .filter(|(key, _)| {
                ![&b"queue/"[..], b"ready/", b"pool/", b"hold/"].iter().any(|kept| key.starts_with(kept))
            })
            .filter(|(key, _)| !self.oracle.is_quarantined(key))
            .map(|(key, _)| key.to_string())
            .collect();
        for (index, members) in self.store.model.books().iter() {
            // A probe of a job that nobody could read is past its end, and goes when the upstream is next looked at.
            let probe = self.oracle.damaged() && index.starts_with(b"probe/");
            let unread = members.iter().all(|(member, _)| self.oracle.is_quarantined(member));
            if ![keys::NAMES, keys::POOLS, keys::QUARANTINE].contains(index) && !probe && !unread {
                let first = members.first().map(|(s, m): &(Score, _)| format!("{m} @{s}"));
                left.push(format!("{index}: {first:?}"));
            }
        }
        // A queue's name is kept as long as there is something in it, or it has settings of its own.
        let names: Vec<Name> = self
            .store
            .model
            .books()
            .get(&keys::NAMES)
            .into_iter()
            .flat_map(|i| i.iter())
            .map(|(m, _)| m.clone())
            .collect();
        for name in names {
            let key = keys::queue_of(&name).map(|(tenant, queue)| keys::queue(&tenant, &queue));
            let record = key
                .and_then(|key| self.store.model.records(&key).find(|(k, _)| **k == key).map(|(_, s)| s.bytes.clone()));
            let settings = record.and_then(|bytes| codec::decode::<QueueRecord>(&bytes).ok());
            if settings.is_none_or(|s| !s.paused && s.lease_ms.is_none()) {
                left.push(format!("the name {name}"));
            }
        }
        // What an undone commit or an eviction left over is found by the scrub or not at all.
        if !left.is_empty() && self.broken.is_none() {
            let some: Vec<&str> = left.iter().take(6).map(String::as_str).collect();
            let what = format!("{} things are left when all retention is over: {}", left.len(), some.join(", "));
            self.violate(Promise::BoundedMetadata, what);
        }
    }
}
