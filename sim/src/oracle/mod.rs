//! The oracle: holds the store and the replicas to the promises of DESIGN.md §4, by name.
//!
//! The order of commits is the witness. The oracle follows the changes of records and indexes after
//! every applied transaction ([`facts`]), requires that each is a move of the diagram with a cause
//! ([`moves`]), that the books balance ([`balance`]), and holds every answer against what the store
//! went through between the request and the answer ([`replies`]). It decodes the core's records and
//! spells its keys; it shares none of its transitions.

mod balance;
mod children;
mod ends;
mod facts;
mod group_books;
mod group_replies;
mod groups;
mod keys;
mod moves;
mod placed;
mod pool_replies;
mod pools;
mod replies;
mod states;
mod store;
#[cfg(test)]
mod tests;
mod views;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use leasehold_core::dispatch::{Hold, Routing};
use leasehold_core::event::Kind;
use leasehold_core::ids::GroupId;
use leasehold_core::job::record::{AttemptEnd, Owner, Status};
use leasehold_core::pool::open::FailOpen;
use leasehold_core::request::Submit;
use leasehold_core::store::model::Model;
use leasehold_core::store::{Answer, Clock, Score, Txn, Version};
use leasehold_core::{JobId, Name, Outcome, Request, Token};

use crate::calls::{CallId, ItemRef, Ledger};
use crate::setup::{Regime, Setup};
use crate::tables::Tables;

pub use facts::Facts;
use facts::Indexes;
pub(crate) use groups::GroupTrack;
use keys::{KeyFact, QueueFact};

macro_rules! promises {
    ($($name:ident $text:literal),* $(,)?) => {
        /// The promises, as DESIGN.md §4 names them.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub enum Promise { $($name),* }

        impl Promise {
            pub const ALL: &'static [Promise] = &[$(Promise::$name),*];

            pub fn text(self) -> &'static str {
                match self { $(Promise::$name => $text),* }
            }
        }
    };
}

promises! {
    AckedNeverLost "acked-never-lost",
    OneKeyOneJob "one-key-one-job",
    OneLiveLease "one-live-lease",
    StaleTokenRefused "stale-token-refused",
    ForwardOnly "forward-only",
    BoundedAttempts "bounded-attempts",
    NoGhosts "no-ghosts",
    LimitHeld "limit-held",
    SlotNotResurrected "slot-not-resurrected",
    FinalizedOnce "finalized-once",
    Priority "priority",
    NoEarlyRun "no-early-run",
    NoSilentStall "no-silent-stall",
    HonestReplies "honest-replies",
    BooksBalance "books-balance",
    BoundedMetadata "bounded-metadata",
    EventuallyDone "eventually-done",
}

impl Promise {
    /// Those that only the calm can break.
    pub fn is_liveness(self) -> bool {
        matches!(self, Promise::EventuallyDone | Promise::BoundedMetadata)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    pub promise: Promise,
    pub what: String,
}

thread_local! {
    /// Promises that are not looked at in this thread's run.
    static BLIND: std::cell::Cell<u32> = const { std::cell::Cell::new(0) };
}

/// From now on these promises are not looked at in this thread.
pub fn blind(promises: &[Promise]) {
    BLIND.set(promises.iter().fold(0, |set, promise| set | 1 << *promise as u32));
}

/// Objects, unless that promise is not looked at: then all goes on, so that what else there is to see is seen.
pub(crate) fn object(promise: Promise, what: String) -> Result<(), Violation> {
    if BLIND.get() & 1 << promise as u32 != 0 { Ok(()) } else { broken(promise, what) }
}

pub(crate) fn broken<T>(promise: Promise, what: String) -> Result<T, Violation> {
    Err(Violation { promise, what })
}

/// Whom an event concerns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Subject {
    Job(JobId),
    Group(GroupId),
}

impl Subject {
    pub fn of(owner: Owner) -> Subject {
        match owner {
            Owner::Job(id) => Subject::Job(id),
            Owner::Group(id) => Subject::Group(id),
        }
    }
}

/// What a fault did to the store.
#[derive(Clone, Debug)]
pub enum Damage {
    Record(Name),
    Entry(Name, Name),
    /// Its bytes are others now.
    Corrupt(Name),
}

/// Where a job stood from one change of the store until the next that concerned it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Moment {
    /// The number of the change that brought it about.
    pub change: u64,
    pub status: Option<Status>,
    pub token: Option<Token>,
    /// Whether there is a main record that is no stub, and when it expires.
    pub present: bool,
    pub expiry: Option<Clock>,
    /// Whether there is a payload, and when it expires.
    pub payload: Option<Option<Clock>>,
    pub attempts: u32,
    pub deliveries: u32,
    /// Run or progress deadline of the lease, if it has one.
    pub deadline: Option<Clock>,
}

/// A lease that was granted.
#[derive(Clone, Debug)]
pub(crate) struct Grant {
    pub token: Token,
    pub by: Option<ItemRef>,
    /// The highest end that its entry in `leases` ever had.
    pub high: Score,
    /// The latest end that anybody was told.
    pub told_until: Clock,
    /// The claim that it was handed out to.
    pub told_to: Option<ItemRef>,
    /// Whether a heartbeat has raised it.
    pub raised: bool,
}

/// An attempt that is over.
#[derive(Clone, Debug)]
pub(crate) struct EndedAttempt {
    pub token: Token,
    pub outcome: AttemptEnd,
    pub status: Status,
    pub run_at: Option<Clock>,
    pub change: u64,
}

/// A job as the oracle has followed it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Track {
    pub facts: Facts,
    pub submit: Option<Arc<Submit>>,
    pub by: Option<ItemRef>,
    /// The store's clock at the submit, and at the beginning of the present life.
    pub born: Clock,
    pub moments: Vec<Moment>,
    pub grants: Vec<Grant>,
    pub ended: Vec<EndedAttempt>,
    /// Requests that name it.
    pub askers: Vec<ItemRef>,
    /// A fault took something of it and it has not been mended: anything may happen to it, except
    /// that it is handed out incomplete or twice.
    pub excused: bool,
    /// A fault once took something of it or undid something: answers about it may be out of date.
    pub disturbed: bool,
    /// A fault once took something of it.
    pub damaged: bool,
    /// The lease that was there when its record, which a fault had taken, was created anew.
    pub lease_outlived: Option<Token>,
    /// What its transitions should have appended.
    pub events: BTreeMap<Kind, u32>,
    /// There was such a job, whatever became of it.
    pub known: bool,
    /// What the latest change that was judged should have appended.
    pub newest: Vec<Kind>,
}

/// Full checks of all books come every so many applied transactions.
const FULL_EVERY: u64 = 512;
/// As many commits as the model can forget.
const RING: usize = 64;

#[derive(Clone, Debug)]
pub struct Oracle {
    regime: Regime,
    pub(crate) jobs: BTreeMap<JobId, Track>,
    pub(crate) groups: BTreeMap<GroupId, GroupTrack>,
    indexes: Indexes,
    keys: BTreeMap<Name, KeyFact>,
    queues: BTreeMap<Name, QueueFact>,
    purges: Vec<ItemRef>,
    pools: BTreeMap<String, pools::PoolFacts>,
    routing: Routing,
    fail_open: BTreeMap<String, FailOpen>,
    /// Slots that a replica said it had granted without the store.
    declared: std::collections::BTreeSet<(String, Name, Version)>,
    /// Holds of upstreams, by key.
    holds: BTreeMap<Name, facts::Rec<Hold>>,
    /// Calls that are tried after a hold, by index.
    probes: BTreeMap<Name, BTreeMap<Name, Score>>,
    /// Leases under which jobs were cancelled, and with which change.
    cut: BTreeMap<(JobId, Version), u64>,
    /// Releases that were asked for: pool, slot, and of which grant.
    releases: Vec<(String, Name, Option<Version>)>,
    /// Counts the changes of the store: applied transactions and faults.
    change: u64,
    /// Jobs that each of the newest commits touched.
    ring: VecDeque<Vec<JobId>>,
    /// The store's clock went back at some time: order by clock is not promised.
    pub(crate) clock_back: bool,
    /// The furthest that the store's clock had come when it went back …
    newest: Clock,
    /// … and whether the transaction that is looked at had been too late by then: whoever has seen that clock was
    /// right to say that it would not be applied.
    outlived: bool,
    damaged: bool,
    /// Records that were once said to be of a newer release.
    pub newer: std::collections::BTreeSet<Name>,
    pub(crate) rewound: bool,
    /// A queue's name was lost.
    name_lost: bool,
    /// The store's clock when commits were last forgotten.
    pub(crate) rewound_at: Clock,
    /// Receipts of claims that the store lost: with them went the evidence of what was applied.
    receipts_lost: std::collections::BTreeSet<Name>,
    checks: u64,
    /// What became of jobs and groups, by how they stood before.
    pub tried: Box<Tables>,
}

impl Oracle {
    pub fn new(setup: &Setup) -> Oracle {
        Oracle {
            regime: setup.regime,
            jobs: BTreeMap::new(),
            groups: BTreeMap::new(),
            indexes: Indexes::default(),
            keys: BTreeMap::new(),
            queues: BTreeMap::new(),
            purges: Vec::new(),
            pools: BTreeMap::new(),
            routing: setup.config.routing.clone(),
            fail_open: setup.config.fail_open.clone(),
            declared: std::collections::BTreeSet::new(),
            holds: BTreeMap::new(),
            probes: BTreeMap::new(),
            cut: BTreeMap::new(),
            releases: Vec::new(),
            change: 0,
            ring: VecDeque::new(),
            clock_back: false,
            newest: 0,
            outlived: false,
            damaged: false,
            newer: std::collections::BTreeSet::new(),
            rewound: false,
            rewound_at: 0,
            name_lost: false,
            receipts_lost: std::collections::BTreeSet::new(),
            checks: 0,
            tried: Box::default(),
        }
    }

    pub fn changes(&self) -> u64 {
        self.change
    }

    pub fn checks(&self) -> u64 {
        self.checks
    }

    /// Whether a fault took anything out of the store.
    pub fn damaged(&self) -> bool {
        self.damaged
    }

    pub fn regime(&self) -> Regime {
        self.regime
    }

    pub fn tenant_of(&self, job: JobId) -> Option<String> {
        Some(self.jobs.get(&job)?.submit.as_ref()?.tenant.clone())
    }

    /// A request reaches a replica: from now on it may be the cause of a change.
    pub fn arrives(&mut self, ledger: &Ledger, call: CallId) {
        let Some(call) = ledger.get(call) else { return };
        for (item, request) in call.parts() {
            let job = match request {
                Request::Cancel { job, .. } | Request::Retry { job, .. } | Request::Delete { job, .. } => *job,
                Request::Heartbeat(beat) => beat.held.job,
                Request::Complete(complete) => complete.held.job,
                Request::Fail(fail) => fail.held.job,
                Request::Release(held) => held.job,
                Request::Purge { .. } => {
                    self.purges.push(item);
                    continue;
                }
                Request::ReleaseSlot { tenant, pool, slot } => {
                    self.release_arrives(pool, tenant, slot);
                    continue;
                }
                Request::ExtendGroup { group, .. }
                | Request::SealGroup { group, .. }
                | Request::CancelGroup { group, .. } => {
                    self.groups.entry(*group).or_default().askers.push(item);
                    continue;
                }
                _ => continue,
            };
            self.jobs.entry(job).or_default().askers.push(item);
        }
    }

    /// One transaction was put to the store.
    pub fn commit(&mut self, model: &Model, txn: &Txn, answer: &Answer, ledger: &mut Ledger) -> Result<(), Violation> {
        let Answer::Applied { taken } = answer else {
            self.remember(Vec::new());
            return Ok(());
        };
        self.change += 1;
        self.checks += 1;
        self.outlived = txn.valid_until < self.newest;
        let clock = model.clock();
        let effects = model.last_effects();
        let touched = self.follow(effects, clock);
        self.remember(touched.jobs.keys().copied().collect());
        if let Some(gap) = touched.gap {
            return broken(Promise::AckedNeverLost, format!("the store changed without a commit: {gap}"));
        }
        if let Some(undone) = store::undone(model, txn, taken) {
            return broken(Promise::HonestReplies, format!("a transaction was not applied, as it was said: {undone}"));
        }
        self.follow_upstreams(effects);
        self.follow_cut(&touched);
        self.judge_pools(effects, clock, ledger)?;
        for (name, before) in &touched.keys {
            self.judge_key(name, before.as_ref(), clock)?;
        }
        let mut transitions = 0;
        for (group, before) in &touched.groups {
            transitions += self.judge_group(*group, before, &touched, clock, ledger)?;
        }
        for (job, before) in &touched.jobs {
            transitions += self.judge(*job, before, clock, ledger)?;
        }
        for group in touched.groups.keys() {
            self.settle_group(*group, clock)?;
        }
        if self.damaged {
            self.count_mended(txn);
        }
        let appended: usize = effects.appends.values().map(Vec::len).sum();
        if transitions > 0 && appended == 0 {
            object(Promise::HonestReplies, format!("a transition without an audit event: {txn:?}"))?;
        }
        if let Some(take) = &txn.take {
            self.judge_take(model, take, taken)?;
        }
        if self.change.is_multiple_of(FULL_EVERY) {
            self.full(model)?;
        }
        Ok(())
    }

    fn remember(&mut self, jobs: Vec<JobId>) {
        self.ring.push_back(jobs);
        if self.ring.len() > RING {
            self.ring.pop_front();
        }
    }

    /// A replica answered a call.
    pub fn reply(
        &mut self,
        model: &Model,
        ledger: &mut Ledger,
        call: CallId,
        outcome: &Outcome,
        answers: u64,
        now: u64,
    ) -> Result<(), Violation> {
        self.checks += 1;
        self.judge_reply(model, ledger, call, outcome, answers, now)
    }

    /// A fault took something out of the store.
    pub fn disturb(&mut self, model: &Model, damage: Damage) {
        self.change += 1;
        self.damaged = true;
        // The model cannot undo across a loss.
        self.ring.clear();
        match damage {
            Damage::Record(key) if key.starts_with(b"claim/") => {
                self.lose_record(&key, None);
                self.receipts_lost.insert(key);
            }
            Damage::Record(key) => {
                self.lose_record(&key, None);
                self.disturb_pool(&key, None);
                self.holds.remove(&key);
            }
            Damage::Corrupt(key) => {
                if let Some(hold) = self.holds.get_mut(&key) {
                    hold.value = None;
                }
                let now = model.records(&key).next().map(|(_, s)| s.clone());
                self.lose_record(&key, now.as_ref());
            }
            Damage::Entry(index, member) => {
                self.name_lost |= index == leasehold_core::store::keys::NAMES;
                self.lose_entry(&index, &member);
                self.disturb_pool(&index, Some(&member));
                if let Some(probes) = self.probes.get_mut(&index) {
                    probes.remove(&member);
                }
            }
        }
    }

    /// Whether the evidence of what a claim took may have been evicted.
    fn receipt_lost(&self, request: &Request) -> bool {
        let Request::Claim(claim) = request else { return false };
        match &claim.claim_id {
            Some(id) => self.receipts_lost.contains(&leasehold_core::store::keys::receipt(&claim.tenant, id)),
            None => self.receipts_lost.iter().any(|key| key.starts_with(b"claim//")),
        }
    }

    /// The store forgot its newest commits.
    pub fn rewound(&mut self, model: &Model, lost: usize) {
        self.change += 1;
        self.rewound = true;
        self.rewound_at = model.clock();
        let mut touched = Vec::new();
        for _ in 0..lost {
            touched.extend(self.ring.pop_back().unwrap_or_default());
        }
        self.rebuild(model);
        self.rebuild_pools(model);
        self.rebuild_upstreams(model);
        for job in touched {
            if let Some(track) = self.jobs.get_mut(&job) {
                track.disturbed = true;
            }
            self.note(job);
        }
    }

    /// `newest`: what it showed before.
    pub fn clock_went_back(&mut self, newest: Clock) {
        self.clock_back = true;
        self.newest = self.newest.max(newest);
    }

    // --- what the world asks ------------------------------------------------------------------

    /// Jobs that have not come to an end, with a word about each.
    pub fn live(&self, clock: Clock) -> Vec<(JobId, String)> {
        self.jobs
            .iter()
            .filter(|(_, t)| self.is_to_end(t, clock))
            .map(|(job, t)| (*job, t.facts.describe(clock)))
            .collect()
    }

    /// Whether a job has an end before it. One that nobody can read, in a queue whose name is lost as well, is found
    /// by nobody until the queue is used again.
    fn is_to_end(&self, track: &Track, clock: Clock) -> bool {
        let found = !(track.facts.quarantined && self.name_lost);
        track.facts.is_live(clock) || track.facts.stands_live() && found
    }

    pub fn live_count(&self, clock: Clock) -> usize {
        let jobs = self.jobs.values().filter(|t| self.is_to_end(t, clock));
        jobs.count() + self.live_groups(clock).count()
    }

    /// Every (job, facts) for whoever computes a bound.
    pub fn live_facts(&self, clock: Clock) -> impl Iterator<Item = (&Facts, Option<&Arc<Submit>>)> {
        self.jobs.values().filter(move |t| t.facts.is_live(clock)).map(|t| (&t.facts, t.submit.as_ref()))
    }

    pub fn status(&self, job: JobId) -> Option<Status> {
        self.jobs.get(&job)?.facts.status()
    }

    pub fn facts(&self, job: JobId) -> Option<&Facts> {
        self.jobs.get(&job).map(|t| &t.facts)
    }

    /// Jobs that there ever were.
    pub fn known(&self) -> impl Iterator<Item = JobId> {
        self.jobs.iter().filter(|(_, t)| t.known).map(|(job, _)| *job)
    }

    /// Whether a record is a quarantined job's, and so kept for an operator to look at.
    pub fn is_quarantined(&self, key: &Name) -> bool {
        let job = key.as_str().and_then(|k| k.rsplit('/').next()?.parse().ok());
        let job = job.or_else(|| self.keys.get(key)?.record.as_ref()?.value.as_ref()?.owner.job());
        job.and_then(|job| self.jobs.get(&job)).is_some_and(|t| t.facts.quarantined)
    }

    /// Tokens granted for a job, oldest first.
    pub fn tokens(&self, job: JobId) -> Vec<Token> {
        self.jobs.get(&job).map(|t| t.grants.iter().map(|g| g.token).collect()).unwrap_or_default()
    }

    /// Whether the events that were read are those of the transitions that happened.
    pub fn audit(&self, seen: &BTreeMap<(Subject, Kind), u32>) -> Result<(), Violation> {
        if self.rewound {
            return Ok(());
        }
        self.audit_groups(seen)?;
        for (job, track) in &self.jobs {
            if track.disturbed {
                continue;
            }
            for kind in Kind::ALL {
                let expected = track.events.get(&kind).copied().unwrap_or(0);
                let found = seen.get(&(Subject::Job(*job), kind)).copied().unwrap_or(0);
                if expected != found {
                    let what = format!("job {job}: {expected} transitions, {found} events of kind {}", kind.text());
                    object(Promise::HonestReplies, what)?;
                }
            }
        }
        Ok(())
    }
}

/// A nonce in short, for messages.
pub(crate) fn short(version: Version) -> String {
    format!("{:04x}", version.0 >> 48)
}
