//! A replica at work on a store on disk, with clients and workers, from a seed; every call goes to the
//! model as well, and both must answer alike.
//!
//! Before and after each group it is written into the trace which states a power cut may leave.

mod failures;
mod requests;

use std::collections::{BTreeMap, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use leasehold_core::store::model::Model;
use leasehold_core::store::{Store as _, StoreError};
use leasehold_core::{
    Config, Input, JobId, Output, Outputs, Replica, Request, RequestId, Response, StoreAnswer, StoreId, StoreOp, Token,
};
use leasehold_disk::{DiskStore, Options};

use crate::interpose;
use crate::rng::Rng;
use crate::state::{self, Lines};
use crate::trace::Note;

/// The store's clock at the beginning, microseconds.
const START: u64 = 1_700_000_000_000_000;
/// Jobs that are waited for: more are not submitted, so that a state stays small.
const BACKLOG: usize = 60;

/// A state that was promised: its number is its place.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub struct Promised {
    pub digest: u128,
    pub clock: u64,
}

/// How small the store's parts are, and whether it has its threads.
#[derive(Clone, Copy, Debug, serde::Serialize, serde::Deserialize)]
pub struct Shape {
    pub journal_bytes: u64,
    pub memory_bytes: u64,
    pub inline: bool,
}

impl Shape {
    pub fn options(self, clock: &Arc<AtomicU64>, read_only: bool) -> Options {
        let clock = clock.clone();
        Options {
            clock: Some(Arc::new(move || clock.load(Ordering::SeqCst))),
            cache_bytes: 1024 * 1024,
            reserve_bytes: Some(0),
            journal_bytes: self.journal_bytes,
            memory_bytes: self.memory_bytes,
            idle_after: Duration::ZERO,
            inline: self.inline,
            read_only,
            ..Options::default()
        }
    }
}

#[derive(Clone, Copy, Debug, Default, serde::Serialize, serde::Deserialize)]
pub struct Counts {
    pub groups: u64,
    pub submitted: u64,
    pub completed: u64,
    pub reopened: u64,
    pub stopped: u64,
    pub in_doubt: u64,
    pub refused_while_stopped: u64,
}

/// What is left of a world.
pub struct Ended {
    pub states: Vec<Promised>,
    pub lines: BTreeMap<u32, Lines>,
    pub counts: Counts,
    pub problems: Vec<String>,
}

pub struct World {
    folder: PathBuf,
    shape: Shape,
    clock: Arc<AtomicU64>,
    store: Option<DiskStore>,
    model: Model,
    replica: Replica,
    now_ms: u64,
    born_ms: u64,
    calls: VecDeque<(StoreId, StoreOp)>,
    asked: BTreeMap<RequestId, Request>,
    next_request: u64,
    rng: Rng,
    held: Vec<(JobId, Token)>,
    jobs: Vec<JobId>,
    keys: u64,
    completed: BTreeMap<JobId, Token>,
    /// The process is about to be killed, and has been.
    dying: bool,
    dead: bool,
    /// What may have been applied when it was.
    doubt: Option<(Model, u32, u32)>,
    pub states: Vec<Promised>,
    /// What the states hold, if that is to be kept.
    pub lines: Option<BTreeMap<u32, Lines>>,
    pub counts: Counts,
    pub problems: Vec<String>,
}

impl Counts {
    pub fn add(&mut self, other: Counts) {
        self.groups += other.groups;
        self.submitted += other.submitted;
        self.completed += other.completed;
        self.reopened += other.reopened;
        self.stopped += other.stopped;
        self.in_doubt += other.in_doubt;
        self.refused_while_stopped += other.refused_while_stopped;
    }
}

impl World {
    /// Makes a store in an empty folder.
    ///
    /// # Errors
    /// What the store says.
    pub fn new(folder: &Path, shape: Shape, seed: u64) -> Result<World, String> {
        let clock = Arc::new(AtomicU64::new(START));
        let store = DiskStore::open(folder, shape.options(&clock, false)).map_err(|e| e.to_string())?;
        let mut world = World {
            folder: folder.to_owned(),
            shape,
            clock,
            store: Some(store),
            model: Model::new(START),
            replica: replica(seed),
            now_ms: 0,
            born_ms: 0,
            calls: VecDeque::new(),
            asked: BTreeMap::new(),
            next_request: 0,
            rng: Rng::new(seed, 1),
            held: Vec::new(),
            jobs: Vec::new(),
            keys: 0,
            completed: BTreeMap::new(),
            dying: false,
            dead: false,
            doubt: None,
            states: Vec::new(),
            lines: None,
            counts: Counts::default(),
            problems: Vec::new(),
        };
        world.certain();
        Ok(world)
    }

    fn problem(&mut self, what: String) {
        self.problems.push(what);
    }

    /// Promises the model's present state.
    fn certain(&mut self) {
        let number = self.state(&self.model.clone());
        interpose::note(Note::Certain(number));
    }

    fn state(&mut self, model: &Model) -> u32 {
        let lines = state::of_model(model);
        self.states.push(Promised { digest: state::digest(&lines), clock: model.clock() });
        let number = (self.states.len() - 1) as u32;
        if let Some(kept) = &mut self.lines {
            kept.insert(number, lines);
        }
        number
    }

    fn input(&mut self, input: Input) {
        let mut out = Outputs::new();
        self.replica.step(self.now_ms - self.born_ms, input, &mut out);
        for output in out {
            match output {
                Output::Store { id, op } => self.calls.push_back((id, op)),
                Output::Reply { id, outcome } => {
                    if let (Some(request), Ok(response)) = (self.asked.remove(&id), outcome) {
                        self.answered(&request, response);
                    }
                }
                Output::Mark(_) => {}
            }
        }
    }

    /// Performs what the replica has asked of its store, several calls in one group.
    fn perform(&mut self) {
        while self.store.is_some() {
            // What reads logs and scans ends a group.
            let alone = |op: &StoreOp| matches!(op, StoreOp::Read(r) if r.log.is_some() || r.scan.is_some());
            let mut group = Vec::new();
            while let Some((id, op)) = self.calls.pop_front() {
                let ends = alone(&op);
                if ends && !group.is_empty() {
                    self.calls.push_front((id, op));
                    break;
                }
                group.push((id, op));
                if ends || self.rng.chance(300) {
                    break;
                }
            }
            if group.is_empty() {
                return;
            }
            let before = self.model.clone();
            let expected: Vec<_> = group.iter().map(|(_, op)| answer(&mut self.model, op)).collect();
            let commits = group.iter().any(|(_, op)| matches!(op, StoreOp::Commit(_)));
            let (old, new) = if commits {
                let new = self.state(&self.model.clone());
                interpose::note(Note::Between(new - 1, new));
                (new - 1, new)
            } else {
                let last = (self.states.len() - 1) as u32;
                (last, last)
            };
            let ids: Vec<StoreId> = group.iter().map(|(id, _)| *id).collect();
            let mut replies = BTreeMap::new();
            let Some(store) = self.store.as_mut() else { return };
            store.process(group, |id, reply| {
                replies.insert(id, reply);
            });
            let stopped = store.poisoned().map(str::to_owned);
            let topics = store.notified();
            let doubt = replies.values().any(|r| r.is_err());
            if !doubt {
                if commits {
                    interpose::note(Note::Certain(new));
                    self.counts.groups += 1;
                }
                for (id, expected) in ids.iter().zip(expected) {
                    if replies.get(id) != Some(&expected) {
                        self.problem(format!(
                            "disk and model answer differently:\n{:?}\n{expected:?}",
                            replies.get(id)
                        ));
                    }
                }
            } else if stopped.is_none() {
                self.problem(format!("calls failed on a store that goes on: {replies:?}"));
            }
            if let Some(why) = stopped {
                self.failed(before, old, new, commits, why);
                if self.dead {
                    return;
                }
            }
            for (id, reply) in replies {
                self.input(Input::StoreReply { id, reply });
            }
            for topic in topics {
                self.input(Input::Notified { topic });
            }
            let _ = self.model.notified();
        }
    }

    /// Leaves the store as it is, as a crash would.
    pub fn end(self) -> Ended {
        let World { states, lines, counts, problems, .. } = self;
        Ended { states, lines: lines.unwrap_or_default(), counts, problems }
    }

    pub fn is_stuck(&self) -> bool {
        self.store.is_none()
    }

    /// One thing that happens.
    pub fn step(&mut self) {
        if self.dead {
            return;
        }
        match self.rng.below(20) {
            0 => {
                let ms = self.pick(&[1, 50, 400, 1_500]);
                self.pass(ms);
            }
            1 if self.rng.chance(500) => {
                // Long enough for leases to lapse, or for what has expired to be removed.
                let ms = self.pick(&[5_000, 40_000, 90_000]);
                self.pass(ms);
                self.tidy();
            }
            1 | 2 => self.tidy(),
            _ => {
                for _ in 0..=self.rng.below(4) {
                    let request = self.request();
                    self.next_request += 1;
                    let id = RequestId(self.next_request);
                    self.asked.insert(id, request.clone());
                    self.input(Input::Request { id, request });
                }
            }
        }
        self.settle();
    }

    fn pick(&mut self, of: &[u64]) -> u64 {
        of[self.rng.below(of.len() as u64) as usize]
    }

    fn settle(&mut self) {
        for _ in 0..1_000 {
            let now = self.now_ms - self.born_ms;
            if self.replica.next_timer().is_some_and(|at| at <= now) {
                self.input(Input::Timer);
            }
            if self.calls.is_empty() || self.dead {
                return;
            }
            self.perform();
        }
    }

    fn pass(&mut self, ms: u64) {
        self.now_ms += ms;
        let clock = START + 1_000 * self.now_ms;
        self.clock.store(clock, Ordering::SeqCst);
        self.model.set_clock(clock);
        self.certain();
    }

    fn tidy(&mut self) {
        let Some(store) = self.store.as_mut() else { return };
        store.tidy();
        let faults = store.faults();
        let stopped = store.poisoned().map(str::to_owned);
        if let Some(why) = stopped {
            let now = (self.states.len() - 1) as u32;
            self.failed(self.model.clone(), now, now, false, why);
        } else if let Some(fault) = faults.into_iter().find(|f| !f.contains("not written to its end")) {
            self.problem(format!("a fault on a disk without damage: {fault}"));
        }
    }

    fn answered(&mut self, request: &Request, response: Response) {
        match (request, response) {
            (_, Response::Created(job)) => {
                self.counts.submitted += 1;
                self.jobs.push(job.id);
                if self.jobs.len() > 4 * BACKLOG {
                    self.jobs.remove(0);
                }
            }
            (_, Response::Claimed(jobs)) => {
                for job in jobs {
                    if self.completed.contains_key(&job.id) {
                        self.problem(format!("{} was handed out after its completion was acknowledged", job.id));
                    }
                    self.held.push((job.id, job.token));
                }
            }
            (Request::Complete(complete), Response::Completed) => {
                self.counts.completed += 1;
                let (job, token) = (complete.held.job, complete.held.token);
                if let Some(token) = token
                    && let Some(other) = self.completed.insert(job, token)
                    && other != token
                {
                    self.problem(format!("{job} was completed under two tokens"));
                }
            }
            (Request::Batch(requests), Response::Batch(outcomes)) => {
                for (request, outcome) in requests.iter().zip(outcomes) {
                    if let Ok(response) = outcome {
                        self.answered(request, response);
                    }
                }
            }
            _ => {}
        }
    }
}

fn replica(seed: u64) -> Replica {
    let mut bytes = [7; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    Replica::new(Config { scrub_ms: 0, ..Config::default() }, bytes)
}

fn answer(model: &mut Model, op: &StoreOp) -> Result<StoreAnswer, StoreError> {
    match op {
        StoreOp::Read(read) => model.read(read).map(StoreAnswer::Read),
        StoreOp::Commit(commit) => model.commit(commit).map(StoreAnswer::Commit),
    }
}
