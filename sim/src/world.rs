//! The world: one plain value, one thread, one heap of events ordered by (time, sequence).
//!
//! Replicas, the store, the links between them, clients, workers, an operator and the ledger of what
//! was acknowledged to whom. Time jumps to the next event. The same setup and the same choices give
//! the same run, event by event.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::sync::Arc;

use leasehold_core::replica::Mark;
use leasehold_core::store::StoreError;
use leasehold_core::{Input, JobId, Name, Request, StoreAnswer, StoreId, StoreOp};

use crate::aim::Aim;
use crate::calls::{CallId, Caller, Heard, Ledger};
use crate::choices::{Choices as _, Seeded, Topic};
use crate::clients::{Client, Operator};
use crate::corrupt::Corruption;
use crate::declared::Declared;
use crate::fold::Digest;
use crate::links::Links;
use crate::oracle::{Oracle, Promise, Violation};
use crate::owners::Owner;
use crate::replicas::Host;
use crate::setup::{MILLI, SECOND, Setup};
use crate::state::Watch;
use crate::store::StoreHost;
use crate::strikes::Strikes;
use crate::tables::Blow;
use crate::tape::Tape;
use crate::trace::Trace;
use crate::users::User;
use crate::workers::Worker;

/// Microseconds since the run began.
pub type Micros = u64;

/// What can happen next.
#[derive(Clone, Debug)]
pub enum Event {
    /// A call reaches its replica.
    Arrive {
        call: CallId,
    },
    /// A replica notices that its caller has gone.
    HangUp {
        replica: u8,
        epoch: u32,
        call: CallId,
    },
    /// A request reaches the store. `answer` is whether its answer goes back to the replica.
    AtStore {
        replica: u8,
        epoch: u32,
        id: StoreId,
        op: Arc<StoreOp>,
        answer: bool,
        again: bool,
    },
    FromStore {
        replica: u8,
        epoch: u32,
        id: StoreId,
        /// What it answers.
        op: Arc<StoreOp>,
        reply: Arc<Result<StoreAnswer, StoreError>>,
    },
    Notify {
        replica: u8,
        epoch: u32,
        topic: Name,
    },
    Timer {
        replica: u8,
        epoch: u32,
        set: u32,
    },
    /// An answer reaches its caller.
    Answer {
        call: CallId,
        heard: Box<Heard>,
    },
    GiveUp {
        call: CallId,
    },
    Boot {
        replica: u8,
        epoch: u32,
    },
    Resume {
        replica: u8,
        epoch: u32,
    },
    Client {
        client: u8,
    },
    Owner {
        owner: u8,
    },
    Worker {
        worker: u8,
        wake: u32,
    },
    User {
        user: u8,
        wake: u32,
    },
    /// Somebody sets pools.
    Pools,
    Operator,
    /// An operator retries this one.
    Retry {
        tenant: String,
        job: JobId,
    },
    Chaos,
    /// An aimed fault strikes a replica.
    Aimed {
        replica: u8,
        epoch: u32,
        blow: Blow,
    },
    /// The store has room again.
    Room,
    /// The oracle looks at what only time can break.
    Look,
    /// Nothing: lets a script's time pass.
    Pass,
}

#[derive(Clone, Debug)]
struct Scheduled {
    at: Micros,
    seq: u64,
    event: Event,
}

impl PartialEq for Scheduled {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.seq) == (other.at, other.seq)
    }
}
impl Eq for Scheduled {}
impl PartialOrd for Scheduled {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Scheduled {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.seq).cmp(&(other.at, other.seq))
    }
}

/// Which part of the run it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Faults on.
    Chaos,
    /// Everything healed; the work must come to its end.
    Calm,
    /// No work left, nobody asks for anything.
    Quiet,
    /// A script drives.
    Script,
}

/// How much happened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub events: u64,
    pub steps: u64,
    pub calls: u64,
    pub commits: u64,
    pub txns_applied: u64,
    pub txns_refused: u64,
    pub reads: u64,
    pub crashes: u64,
    pub submitted: u64,
    pub claimed: u64,
    pub completed: u64,
    /// Slots of pools that their users heard of.
    pub slots: u64,
    /// Large faults by name.
    pub faults: BTreeMap<&'static str, u64>,
}

#[derive(Clone, Debug)]
pub struct World {
    pub now: Micros,
    pub setup: Setup,
    pub choices: Seeded,
    heap: BinaryHeap<Reverse<Scheduled>>,
    seq: u64,
    pub phase: Phase,
    pub hosts: Vec<Host>,
    /// Whether replicas are recorded, and the recordings of lives that are over.
    pub taping: Option<u64>,
    pub tapes: Vec<Tape>,
    pub store: StoreHost,
    pub links: Links,
    pub ledger: Ledger,
    pub clients: Vec<Client>,
    pub owners: Vec<Owner>,
    pub workers: Vec<Worker>,
    pub users: Vec<User>,
    pub declared: Vec<Declared>,
    pub operator: Operator,
    /// Calls for slots without a name whose callers have gone, and when a replica noticed; only where no fault
    /// can keep it from giving them back.
    pub hung_up: Vec<(CallId, Micros)>,
    pub oracle: Oracle,
    /// The store's clock when the faults stopped.
    pub calm_since: u64,
    pub digest: Digest,
    pub counts: Counts,
    pub marks: BTreeMap<Mark, u64>,
    /// The first promise that was broken.
    pub broken: Option<Violation>,
    /// Promises that are not looked at.
    pub blind: Vec<Promise>,
    pub trace: Trace,
    /// Writes down how the world stands, if anybody wants to know.
    pub watch: Option<Box<Watch>>,
    /// Faults at chosen places.
    pub strikes: Strikes,
    /// The operation that a fault lies in wait for.
    pub aim: Option<Aim>,
    /// What the oracle is told wrongly, where it is being tried.
    pub corruption: Option<Box<Corruption>>,
    /// The run is stopped after so many events.
    pub until: u64,
}

impl World {
    pub fn new(setup: Setup, choices: Seeded) -> World {
        let store = StoreHost::new();
        let oracle = Oracle::new(&setup);
        let mut world = World {
            now: 0,
            phase: if setup.random { Phase::Chaos } else { Phase::Script },
            hosts: Vec::new(),
            taping: None,
            tapes: Vec::new(),
            store,
            links: Links::new(setup.replicas),
            ledger: Ledger::default(),
            clients: Vec::new(),
            owners: Vec::new(),
            calm_since: 0,
            workers: Vec::new(),
            users: Vec::new(),
            declared: Vec::new(),
            operator: Operator::default(),
            hung_up: Vec::new(),
            oracle,
            digest: Digest::default(),
            counts: Counts::default(),
            marks: BTreeMap::new(),
            broken: None,
            blind: Vec::new(),
            trace: Trace::default(),
            watch: None,
            strikes: Strikes::default(),
            aim: None,
            corruption: None,
            until: u64::MAX,
            heap: BinaryHeap::new(),
            seq: 0,
            choices,
            setup,
        };
        for replica in 0..world.setup.replicas {
            world.hosts.push(Host::default());
            let after = if world.setup.random { world.choices.draw(Topic::Latency.of(0), SECOND) } else { 0 };
            world.schedule(after, Event::Boot { replica: replica as u8, epoch: 0 });
        }
        if world.setup.random {
            world.start_load();
            world.start_owners();
            world.start_users();
            world.schedule(SECOND, Event::Look);
            if world.setup.chaos_every_us > 0 {
                world.schedule(world.setup.chaos_every_us, Event::Chaos);
                world.take_aim();
            }
        }
        world
    }

    pub fn schedule(&mut self, after: Micros, event: Event) {
        self.seq += 1;
        self.heap.push(Reverse(Scheduled { at: self.now + after, seq: self.seq, event }));
    }

    /// When the next event is.
    pub fn next_at(&self) -> Option<Micros> {
        self.heap.peek().map(|Reverse(s)| s.at)
    }

    /// Takes the next event; false when there is none or a promise was broken.
    pub fn step(&mut self) -> bool {
        if self.broken.is_some() || self.stopped() {
            return false;
        }
        let Some(Reverse(next)) = self.heap.pop() else { return false };
        self.watch_before();
        self.now = self.now.max(next.at);
        self.happen(next.event);
        self.watch_after();
        self.broken.is_none()
    }

    /// Whether it was stopped before its end, and so proves nothing.
    pub fn stopped(&self) -> bool {
        self.counts.events >= self.until
    }

    /// Runs until that time, inclusive.
    pub fn run_until(&mut self, at: Micros) {
        while self.next_at().is_some_and(|next| next <= at) {
            if !self.step() {
                break;
            }
        }
        if self.broken.is_none() {
            self.now = self.now.max(at);
        }
    }

    /// What is on its way and what is set, each with its number.
    pub fn pending(&self) -> Vec<(u64, &Event)> {
        let mut all: Vec<(u64, &Event)> = self.heap.iter().map(|Reverse(s)| (s.seq, &s.event)).collect();
        all.sort_unstable_by_key(|(seq, _)| *seq);
        all
    }

    /// The same with their times, in order.
    pub fn scheduled(&self) -> Vec<(Micros, &Event)> {
        let mut all: Vec<&Scheduled> = self.heap.iter().map(|Reverse(s)| s).collect();
        all.sort_unstable();
        all.into_iter().map(|s| (s.at, &s.event)).collect()
    }

    /// Takes one of them away.
    pub fn take(&mut self, seq: u64) -> Option<Event> {
        let mut found = None;
        self.heap.retain(|Reverse(s)| {
            if s.seq == seq {
                found = Some(s.event.clone());
            }
            s.seq != seq
        });
        found
    }

    /// Lets something happen now that was taken.
    pub fn happens(&mut self, event: Event) {
        self.happen(event);
    }

    /// Time runs on to the next timer of one replica; what else was due by then is late.
    pub fn jump(&mut self, replica: usize) {
        let set = |event: &Event| match event {
            Event::Timer { replica: of, epoch, set } => {
                usize::from(*of) == replica && self.timer_is_set(*of, *epoch, *set)
            }
            _ => false,
        };
        let next = self.heap.iter().find(|Reverse(s)| set(&s.event)).map(|Reverse(s)| (s.at, s.seq));
        if let Some((at, seq)) = next {
            self.now = self.now.max(at);
            if let Some(event) = self.take(seq) {
                self.happen(event);
            }
        }
    }

    fn happen(&mut self, event: Event) {
        if let Event::Timer { replica, epoch, set } = event
            && !self.timer_is_set(replica, epoch, set)
        {
            return;
        }
        self.counts.events += 1;
        self.digest.num(self.now);
        self.say_event(&event);
        match event {
            Event::Arrive { call } => self.call_arrives(call),
            Event::HangUp { replica, epoch, call } => self.hang_up_arrives(usize::from(replica), epoch, call),
            Event::AtStore { replica, epoch, id, op, answer, again } => {
                self.at_store(usize::from(replica), epoch, id, &op, answer, again);
            }
            Event::FromStore { replica, epoch, id, reply, .. } => {
                self.from_store(usize::from(replica), epoch, id, reply);
            }
            Event::Notify { replica, epoch, topic } => {
                self.input(usize::from(replica), epoch, Input::Notified { topic });
            }
            Event::Timer { replica, epoch, .. } => self.input(usize::from(replica), epoch, Input::Timer),
            Event::Answer { call, heard } => self.answer_arrives(call, *heard),
            Event::GiveUp { call } => self.give_up(call),
            Event::Boot { replica, epoch } => self.boot(usize::from(replica), epoch),
            Event::Resume { replica, epoch } => self.resume(usize::from(replica), epoch),
            Event::Client { client } => self.client_wakes(usize::from(client)),
            Event::Owner { owner } => self.owner_wakes(usize::from(owner)),
            Event::Worker { worker, wake } => self.worker_wakes(usize::from(worker), wake),
            Event::User { user, wake } => self.user_wakes(usize::from(user), wake),
            Event::Pools => self.pools_wake(),
            Event::Operator => self.operator_wakes(),
            Event::Retry { tenant, job } => {
                let r = self.any_replica(Topic::Meddle, 1);
                self.call(Caller::Operator, 0, r, Request::Retry { tenant, job }, 6 * SECOND);
            }
            Event::Chaos => self.chaos(),
            Event::Aimed { replica, epoch, blow } => self.strike_aimed(usize::from(replica), epoch, blow),
            Event::Room => self.store.model.full = false,
            Event::Look => self.look(),
            Event::Pass => {}
        }
    }

    /// Notes a broken promise; the first one that is looked at ends the run.
    pub fn hold(&mut self, checked: Result<(), Violation>) {
        if let Err(violation) = checked
            && self.broken.is_none()
            && !self.blind.contains(&violation.promise)
        {
            self.broken = Some(violation);
        }
    }

    pub fn violate(&mut self, promise: Promise, what: String) {
        self.hold(Err(Violation { promise, what }));
    }

    /// Counts a large fault, and says so.
    pub fn fault(&mut self, name: &'static str) {
        self.count_fault(name);
        self.say_fault(name);
    }

    /// Counts a large fault that is told by whoever knows more of it.
    pub fn count_fault(&mut self, name: &'static str) {
        *self.counts.faults.entry(name).or_default() += 1;
        self.digest.bytes(name.as_bytes());
    }

    /// Every second: what only time can break.
    fn look(&mut self) {
        self.store.tick(self.now);
        let late = self.unanswered();
        if let Some(call) = late {
            let what = format!("call {call} was not answered in its time: {:?}", self.ledger.get(call));
            self.violate(Promise::NoSilentStall, what);
        }
        if self.phase == Phase::Calm {
            self.idle_groups();
            self.idle_slots();
        }
        self.left_behind();
        self.written_down();
        self.schedule(SECOND, Event::Look);
    }

    /// limit-held, from below: in the calm no group waits longer for its next step than a notification that
    /// was lost, a sweep, and a look that came just too early take.
    fn idle_groups(&mut self) {
        let clock = self.store.tick(self.now);
        let since = self.calm_since + 10 * SECOND;
        let within = 2 * self.setup.config.sweep_ms * MILLI + 3 * SECOND;
        if let Some(what) = self.oracle.idle_group(clock, since, within) {
            self.violate(Promise::EventuallyDone, what);
        }
    }

    /// limit-held, from below: in the calm nobody waits for a slot that is there for longer than a look now and
    /// then, and a look that came just too early, take.
    fn idle_slots(&mut self) {
        let clock = self.store.tick(self.now);
        // Those who started or came back at the end of the faults spare others for a while.
        if clock < self.calm_since + 15 * SECOND {
            return;
        }
        let within =
            2 * leasehold_core::limits::WAITER_RENEW_MS * MILLI + self.setup.config.sweep_ms * MILLI + 3 * SECOND;
        if let Some(what) = self.oracle.idle_slot(clock, within) {
            self.violate(Promise::EventuallyDone, what);
        }
    }

    /// slot-not-resurrected: who hung up has left nothing, where nothing else went wrong.
    fn left_behind(&mut self) {
        let clock = self.store.tick(self.now);
        let within = SECOND;
        let due = self.hung_up.iter().position(|(_, at)| at + within > self.now).unwrap_or(self.hung_up.len());
        for (call, _) in self.hung_up.drain(..due).collect::<Vec<_>>() {
            let found = self.ledger.get(call).map(|c| (c.replica, c.arrived.map(|(_, epoch)| epoch)));
            // A replica that has ended since takes nothing back.
            let lives = found.is_some_and(|(r, epoch)| epoch == self.hosts.get(r).map(|host| host.epoch));
            if lives && let Some(what) = self.oracle.left_by(call, clock) {
                return self.violate(Promise::SlotNotResurrected, what);
            }
        }
    }

    /// A call that a running, undisturbed replica should have answered by now.
    fn unanswered(&self) -> Option<CallId> {
        for (replica, host) in self.hosts.iter().enumerate() {
            if host.replica.is_none() || host.paused {
                continue;
            }
            for call in &host.open {
                let Some(found) = self.ledger.get(*call) else { continue };
                let Some((arrived, _)) = found.arrived else { continue };
                let elapsed = host.elapsed_ms(self.now).saturating_sub(host.elapsed_ms(arrived.now));
                if elapsed > answer_within_ms(&found.request) && host.undisturbed_since <= arrived.now {
                    debug_assert_eq!(found.replica, replica);
                    return Some(*call);
                }
            }
        }
        None
    }

    pub fn call(&mut self, caller: Caller, tag: u64, replica: usize, request: Request, patience: Micros) -> CallId {
        let call = self.ledger.open(caller, tag, replica, request, self.now);
        self.counts.calls += 1;
        self.send_call(call, patience);
        call
    }
}

/// Milliseconds within which a request must be answered (law: come what may), with some slack for
/// the timer's own pace.
pub fn answer_within_ms(request: &Request) -> u64 {
    let wait = match request {
        Request::Claim(claim) => claim.wait_ms,
        Request::Acquire(asked) => asked.wait_ms,
        Request::Dispatch(asked) => asked.wait_ms,
        Request::Events { wait_ms, .. } | Request::Group { wait_ms, .. } => *wait_ms,
        Request::Batch(items) => items.iter().map(answer_within_ms).max().unwrap_or(0),
        _ => 0,
    };
    wait.min(leasehold_core::limits::WAIT_MS) + leasehold_core::limits::REQUEST_MS + 500
}
