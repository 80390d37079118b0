//! Small worlds, exhaustively: every order of messages, every place of a few faults, to closure.
//!
//! Two replicas meet only in the store, so that a small enough world can be walked through whole. At any
//! instant an actor may make its next call, the oldest message on any way between a replica and the store may
//! arrive, and a replica's clock may run on to its next timer; or, as a fault, a message is lost or overtakes
//! another, or a replica dies. Of faults and of jumps of time there are only so many. What was reached before, on whatever way, is not walked again. The
//! oracle looks at every commit and every answer; where nothing more can happen the faults stop, an honest
//! worker finishes what is left, and the run ends as every run does.
//!
//! Calls and their answers, and notifications, arrive at once: they touch one replica only, and meet the
//! other messages in every order anyway, by when they are made.

use std::collections::{BTreeMap, HashSet};
use std::fmt::Write as _;
use std::time::{Duration, Instant};

use leasehold_core::group::record::Mode;
use leasehold_core::opaque::Content;
use leasehold_core::request::{CreateGroup, Leased, SlotId, Submit};
use leasehold_core::{Failure, JobId, Outcome, Request, Response};
use xxhash_rust::xxh3::Xxh3;

use crate::calls::{CallId, Heard};
use crate::choices::Topic;
use crate::oracle::Violation;
use crate::scenarios::{POOL, Script, TENANT, job, keyed, payload};
use crate::sweep;
use crate::trace::{self, Trace};
use crate::world::Event;

/// What an actor does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Do {
    Submit,
    Claim,
    /// What was claimed.
    Complete,
    /// What was claimed, for good.
    Fail,
    /// What was claimed.
    Beat,
    /// The job that was there from the beginning.
    Cancel,
    /// The pool's only slot.
    Acquire,
    /// The slot that was got.
    GiveBack,
}

/// A small world.
#[derive(Clone, Copy, Debug)]
pub struct Scope {
    pub name: &'static str,
    /// Puts into the store what is there from the beginning.
    begin: fn(&mut Script) -> Option<JobId>,
    /// Each calls the replica of its number, and the other one after a call that failed.
    actors: &'static [&'static [Do]],
    pub faults: u8,
    /// How often a replica's clock runs on to its next timer.
    pub jumps: u8,
}

pub const ALL: &[Scope] = &[
    Scope {
        name: "claim",
        begin: one_job,
        actors: &[&[Do::Claim, Do::Complete], &[Do::Claim, Do::Complete]],
        faults: 2,
        jumps: 0,
    },
    Scope { name: "reclaim", begin: one_job, actors: &[&[Do::Claim, Do::Complete], &[]], faults: 2, jumps: 1 },
    Scope { name: "late", begin: one_job, actors: &[&[Do::Claim, Do::Complete], &[Do::Claim]], faults: 0, jumps: 2 },
    Scope { name: "submit", begin: nothing, actors: &[&[Do::Submit], &[Do::Submit]], faults: 2, jumps: 0 },
    Scope { name: "cancel", begin: one_job, actors: &[&[Do::Claim, Do::Complete], &[Do::Cancel]], faults: 2, jumps: 0 },
    Scope { name: "beat", begin: one_job, actors: &[&[Do::Claim, Do::Beat], &[]], faults: 1, jumps: 1 },
    Scope {
        name: "fail",
        begin: one_job,
        actors: &[&[Do::Claim, Do::Fail], &[Do::Claim, Do::Complete]],
        faults: 1,
        jumps: 0,
    },
    Scope {
        name: "group",
        begin: a_group,
        actors: &[&[Do::Claim, Do::Complete], &[Do::Claim, Do::Complete]],
        faults: 1,
        jumps: 0,
    },
    Scope {
        name: "pool",
        begin: a_pool,
        actors: &[&[Do::Acquire, Do::GiveBack], &[Do::Acquire, Do::GiveBack]],
        faults: 2,
        jumps: 0,
    },
];

impl Scope {
    /// With other bounds.
    pub fn within(self, faults: Option<u8>, jumps: Option<u8>) -> Scope {
        Scope { faults: faults.unwrap_or(self.faults), jumps: jumps.unwrap_or(self.jumps), ..self }
    }
}

/// Calls that an actor makes for one thing, at most.
const TRIES: u8 = 2;
/// Longer than any walk: sweeps come with jumps only.
const SWEEP_MS: u64 = 60_000;

fn nothing(_: &mut Script) -> Option<JobId> {
    None
}

fn one_job(s: &mut Script) -> Option<JobId> {
    s.create(0, &job("the job"))
}

fn a_group(s: &mut Script) -> Option<JobId> {
    let group = CreateGroup {
        common: Submit { max_attempts: Some(2), ..Submit::new(TENANT, "q", Content::json("null")) },
        children: (0..2).map(|i| Submit::new("any", "any", payload(&format!("child {i}")))).collect(),
        max_parallel: Some(1),
        mode: Mode::CollectAll,
        sealed: true,
        open_timeout_ms: None,
    };
    let id = s.create_group(0, &group).ok()?;
    let then = s.now_ms() + 2_000;
    s.at_ms(then);
    Some(id.child(0))
}

/// A pool of one slot.
fn a_pool(s: &mut Script) -> Option<JobId> {
    s.set_pool(0, 1).ok();
    None
}

#[derive(Clone, Debug)]
struct Actor {
    todo: &'static [Do],
    home: usize,
    tries: u8,
    call: Option<CallId>,
    leased: Option<Leased>,
    slot: Option<SlotId>,
    claims: u8,
}

/// One thing that can happen next. Messages are named by their number in the world's order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Move {
    Act(usize),
    /// The oldest one on its way from one to the other.
    Deliver(u64),
    /// One that is not.
    Overtake(u64),
    Lose(u64),
    Crash(usize),
    Jump(usize),
}

#[derive(Clone, Debug)]
struct State {
    script: Script,
    actors: Vec<Actor>,
    job: Option<JobId>,
    faults: u8,
    jumps: u8,
    prints: Prints,
}

/// Fingerprints of the parts, each with what tells that it has changed.
#[derive(Clone, Debug, Default)]
struct Prints {
    hosts: Vec<((u64, u32), u128)>,
    store: (u64, u128),
    messages: BTreeMap<(Way, u64), u128>,
}

/// What a walk came to.
#[derive(Debug, Default)]
pub struct Walk {
    pub states: u64,
    /// States in which nothing more could happen.
    pub ends: u64,
    pub moves: u64,
    pub deepest: usize,
    /// Everything was reached.
    pub closed: bool,
    pub took: Duration,
    pub broken: Option<(Violation, Vec<Move>)>,
}

/// Walks through the whole of a scope, unless it takes longer than that.
pub fn walk(scope: &Scope, limit: Duration, progress: &mut dyn FnMut(&Walk)) -> Walk {
    let begun = Instant::now();
    let mut walk = Walk::default();
    let mut known: HashSet<u128> = HashSet::new();
    let mut ended: HashSet<u128> = HashSet::new();
    let mut first = State::begin(scope, Trace::default());
    known.insert(first.fingerprint());
    // The states on the way, each with what is still to be tried there.
    let mut path: Vec<Move> = Vec::new();
    let mut way: Vec<(State, Vec<Move>)> = Vec::new();
    let moves = first.moves();
    walk.states = 1;
    way.push((first, moves));
    while let Some((state, moves)) = way.last_mut() {
        let Some(next) = moves.pop() else {
            way.pop();
            path.pop();
            continue;
        };
        let mut then = state.clone();
        walk.moves += 1;
        path.push(next);
        then.make(next);
        let fresh = known.insert(then.fingerprint());
        if fresh {
            walk.states += 1;
            walk.deepest = walk.deepest.max(path.len());
        }
        let more = if fresh && then.script.broken().is_none() { then.moves() } else { Vec::new() };
        if fresh && more.is_empty() && then.script.broken().is_none() {
            walk.ends += 1;
            // What actors still know or wanted makes no difference any more.
            if ended.insert(then.fingerprint_of_world()) {
                then.end();
            }
        }
        if let Some(violation) = then.script.broken() {
            walk.broken = Some((violation.clone(), path.clone()));
            break;
        }
        if more.is_empty() {
            path.pop();
        } else {
            way.push((then, more));
        }
        if walk.moves % 4_096 == 0 {
            walk.took = begun.elapsed();
            progress(&walk);
            if walk.took > limit {
                break;
            }
        }
    }
    walk.closed = way.is_empty();
    walk.took = begun.elapsed();
    walk
}

/// The same way once more, as a text.
pub fn retrace(scope: &Scope, path: &[Move]) -> String {
    let mut out = String::new();
    let mut state = State::begin(scope, Trace { keep: true, ..Trace::default() });
    for one in path {
        let told = state.script.world.trace.kept.len();
        // Writing to a string cannot fail.
        let _ = writeln!(out, "{one:?}");
        state.make(*one);
        for entry in state.script.world.trace.kept.iter().skip(told) {
            let _ = writeln!(out, "    {}", trace::line(entry));
        }
    }
    if state.script.broken().is_none() {
        let _ = writeln!(out, "the end");
        state.end();
    }
    if let Some(violation) = state.script.broken() {
        let _ = writeln!(out, "BROKEN {}: {}", violation.promise.text(), violation.what);
    }
    out
}

impl State {
    fn begin(scope: &Scope, trace: Trace) -> State {
        let mut script = Script::with(1, 2, |setup| {
            setup.config.lease_ms = 6_000;
            setup.config.sweep_ms = SWEEP_MS;
            setup.config.scrub_ms = 0;
            setup.workers = 1;
        });
        for topic in Topic::ALL.iter().filter(|t| **t != Topic::ReplicaSeed) {
            script.world.choices.mute(*topic);
        }
        script.at(100);
        let job = (scope.begin)(&mut script);
        let then = script.now_ms() + 500;
        script.at_ms(then);
        script.world.trace = trace;
        let actor = |home, todo| Actor { todo, home, tries: TRIES, call: None, leased: None, slot: None, claims: 0 };
        let actors = scope.actors.iter().enumerate().map(|(home, todo)| actor(home, *todo)).collect();
        let mut state =
            State { script, actors, job, faults: scope.faults, jumps: scope.jumps, prints: Prints::default() };
        state.settle();
        state
    }

    /// What can happen next.
    fn moves(&self) -> Vec<Move> {
        let mut moves = Vec::new();
        for (n, actor) in self.actors.iter().enumerate() {
            if actor.call.is_none() && !actor.todo.is_empty() {
                moves.push(Move::Act(n));
            }
        }
        let faults = self.faults > 0;
        let mut first = HashSet::new();
        for (seq, event) in self.script.world.pending() {
            let Some(way) = way(event) else { continue };
            if first.insert(way) {
                moves.push(Move::Deliver(seq));
            } else if faults {
                moves.push(Move::Overtake(seq));
            }
            moves.extend(faults.then_some(Move::Lose(seq)));
        }
        let replicas = 0..self.script.world.hosts.len();
        // After the last call has been answered, a fault and a jump change nothing that `end` does not.
        let over = self.actors.iter().all(|a| a.call.is_none() && a.todo.is_empty());
        if faults && !over {
            moves.extend(replicas.clone().map(Move::Crash));
        }
        if self.jumps > 0 && !over {
            moves.extend(replicas.map(Move::Jump));
        }
        moves
    }

    fn make(&mut self, next: Move) {
        match next {
            Move::Act(n) => self.act(n),
            Move::Deliver(seq) => {
                if let Some(event) = self.script.world.take(seq) {
                    self.script.world.happens(event);
                }
            }
            Move::Overtake(seq) => {
                self.faults = self.faults.saturating_sub(1);
                if let Some(event) = self.script.world.take(seq) {
                    self.script.world.happens(event);
                }
            }
            Move::Lose(seq) => {
                self.faults = self.faults.saturating_sub(1);
                self.script.world.take(seq);
            }
            Move::Crash(r) => {
                self.faults = self.faults.saturating_sub(1);
                self.script.world.crash(r, Some(0));
            }
            Move::Jump(r) => {
                self.jumps = self.jumps.saturating_sub(1);
                self.script.world.jump(r);
            }
        }
        self.settle();
    }

    /// What happens at once: calls and answers arrive, a dead replica starts, actors hear.
    fn settle(&mut self) {
        loop {
            let world = &mut self.script.world;
            let at_once = |event: &Event| {
                matches!(
                    event,
                    Event::Arrive { .. }
                        | Event::Answer { .. }
                        | Event::Notify { .. }
                        | Event::Boot { .. }
                        | Event::HangUp { .. }
                )
            };
            let next = world.pending().into_iter().find(|(_, event)| at_once(event)).map(|(seq, _)| seq);
            match next.and_then(|seq| world.take(seq)) {
                Some(event) => world.happens(event),
                None => break,
            }
            if world.broken.is_some() {
                return;
            }
        }
        for n in 0..self.actors.len() {
            let Some(heard) = self.actors[n].call.and_then(|call| self.script.heard(call)).cloned() else { continue };
            self.actors[n].call = None;
            let outcome = match heard {
                Heard::Answer(outcome) => outcome,
                Heard::NotDelivered | Heard::Nothing => Err(Failure::OutcomeUnknown { retry_after_ms: 0 }),
            };
            self.hears(n, &outcome);
        }
    }

    fn act(&mut self, n: usize) {
        let actor = &self.actors[n];
        let (home, claims) = (actor.home, actor.claims);
        let request = match (actor.todo.first(), &actor.leased) {
            (Some(Do::Submit), _) => self.script.submit_request(&keyed("the job", "the key")),
            (Some(Do::Claim), _) => self.script.claim_request("w", 1, 0, Some(&format!("claim-{n}-{claims}"))),
            (Some(Do::Cancel), _) => match self.job {
                Some(job) => Request::Cancel { tenant: TENANT.into(), job },
                None => return,
            },
            (Some(Do::Acquire), _) => self.script.acquire_request(Some(&format!("user-{n}")), 0),
            (Some(Do::GiveBack), _) => match &actor.slot {
                Some(slot) => Request::ReleaseSlot { tenant: TENANT.into(), pool: POOL.into(), slot: slot.clone() },
                None => return,
            },
            (Some(Do::Complete), Some(leased)) => self.script.complete_request(leased.id, leased.token),
            (Some(Do::Fail), Some(leased)) => self.script.fail_request(0, leased.id, leased.token),
            (Some(Do::Beat), Some(leased)) => {
                let held = crate::scenarios::held(leased.id, leased.token);
                Request::Heartbeat(leasehold_core::request::Beat { held, progress: None, seq: None })
            }
            (None, _) | (_, None) => {
                self.actors[n].todo = &[];
                return;
            }
        };
        self.actors[n].call = Some(self.script.send(home, request));
    }

    fn hears(&mut self, n: usize, outcome: &Outcome) {
        let actor = &mut self.actors[n];
        let done = match outcome {
            Ok(Response::Claimed(jobs)) => match jobs.first() {
                Some(leased) => {
                    actor.leased = Some(leased.clone());
                    actor.claims += 1;
                    true
                }
                // Nothing there: another claim, once.
                None => {
                    actor.claims += 1;
                    false
                }
            },
            Ok(Response::Slot { id, .. }) => {
                actor.slot = Some(id.clone());
                true
            }
            Ok(_) => true,
            // No room: once more, later.
            Err(Failure::PoolFull { .. }) => false,
            Err(failure) if failure.certain() && failure.retry_after_ms().is_none() => true,
            Err(_) => {
                actor.home = 1 - actor.home;
                false
            }
        };
        if done {
            actor.todo = actor.todo.get(1..).unwrap_or_default();
            actor.tries = TRIES;
        } else {
            actor.tries = actor.tries.saturating_sub(1);
            if actor.tries == 0 {
                actor.todo = &[];
            }
        }
    }

    /// Nothing more can happen here: the faults are over, and what is left comes to its end.
    fn end(&mut self) {
        sweep::end(&mut self.script);
    }

    /// Two states with the same fingerprint go on in the same ways.
    fn fingerprint(&mut self) -> u128 {
        let world = self.fingerprint_of_world();
        of(&(world, &self.actors, self.faults, self.jumps))
    }

    /// Most of it is as it was before the last move: one replica, or the store, has changed.
    fn fingerprint_of_world(&mut self) -> u128 {
        let (world, prints) = (&self.script.world, &mut self.prints);
        prints.hosts.resize(world.hosts.len(), ((0, 0), 0));
        for (host, print) in world.hosts.iter().zip(&mut prints.hosts) {
            let version = (host.inputs, host.epoch);
            if print.0 != version || print.1 == 0 {
                *print = (version, of(&(&host.replica, host.timer, host.epoch)));
            }
        }
        if prints.store.0 != world.counts.commits || prints.store.1 == 0 {
            prints.store = (world.counts.commits, of(&world.store.model));
        }
        let mut messages = BTreeMap::new();
        for (seq, event) in world.pending() {
            if let Some(way) = way(event) {
                let known = prints.messages.remove(&(way, seq));
                messages.insert((way, seq), known.unwrap_or_else(|| of(event)));
            }
        }
        prints.messages = messages;
        let hosts: Vec<u128> = prints.hosts.iter().map(|(_, print)| *print).collect();
        // In their order on each way; their numbers mean nothing.
        let messages: Vec<&u128> = prints.messages.values().collect();
        of(&(hosts, prints.store.1, world.now, world.store.stepped, messages))
    }
}

/// A replica's way to the store, or from there.
type Way = (u8, bool);

fn way(event: &Event) -> Option<Way> {
    match event {
        Event::AtStore { replica, .. } => Some((*replica, true)),
        Event::FromStore { replica, .. } => Some((*replica, false)),
        _ => None,
    }
}

fn of(what: &impl std::fmt::Debug) -> u128 {
    let mut text = Fingerprint(Xxh3::new());
    // Hashing cannot fail.
    let _ = write!(text, "{what:?}");
    text.0.digest128()
}

struct Fingerprint(Xxh3);

impl std::fmt::Write for Fingerprint {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        self.0.update(text.as_bytes());
        Ok(())
    }
}

impl Walk {
    pub fn summary(&self, name: &str) -> String {
        format!(
            "{name:8} {} states, {} moves, {} ends, {} deep, {:.1} s: {}",
            self.states,
            self.moves,
            self.ends,
            self.deepest,
            self.took.as_secs_f64(),
            match (&self.broken, self.closed) {
                (Some((violation, _)), _) => format!("BROKEN {}", violation.promise.text()),
                (None, true) => "closed, held".to_owned(),
                (None, false) => "not closed in its time".to_owned(),
            }
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_scopes_close() {
        for (name, faults) in [("claim", 0), ("fail", 0), ("submit", 1)] {
            for scope in ALL.iter().filter(|s| s.name == name) {
                let walk = walk(&scope.within(Some(faults), Some(0)), Duration::MAX, &mut |_| {});
                assert!(walk.broken.is_none() && walk.closed, "{}", walk.summary(name));
                assert!(walk.states > 300 && walk.ends > 10, "{}", walk.summary(name));
            }
        }
    }
}
