//! Replicas on one model store, without faults and without waiting: each call to the store is
//! answered at once, unless the test holds it back.
#![allow(clippy::panic, clippy::unwrap_used, reason = "a test says what is wrong by panicking")]
#![allow(dead_code, reason = "each test file uses its own part")]
use std::collections::VecDeque;

use leasehold_core::request::{Claim, Leased, Submit};
use leasehold_core::store::model::Model;
use leasehold_core::store::{Store as _, StoreError};
use leasehold_core::{
    Config, Input, Now, Outcome, Output, Outputs, Replica, Request, RequestId, Response, StoreAnswer, StoreId, StoreOp,
};

pub const START: u64 = 1_700_000_000_000_000;

pub struct World {
    pub store: Model,
    pub now_ms: u64,
    /// The store's clock was stepped forward by so much.
    pub ahead_ms: u64,
    pub replicas: Vec<One>,
    next_request: u64,
}

pub struct One {
    pub replica: Replica,
    born_ms: u64,
    /// Calls to the store that have not been performed.
    pub calls: VecDeque<(StoreId, StoreOp)>,
    pub replies: Vec<(RequestId, Outcome)>,
    /// It cannot reach the store.
    pub away: bool,
}

impl World {
    pub fn new(n: usize) -> World {
        World::with(n, Config { scrub_ms: 0, ..Config::default() })
    }

    pub fn with(n: usize, config: Config) -> World {
        let mut world =
            World { store: Model::new(START), now_ms: 0, ahead_ms: 0, replicas: Vec::new(), next_request: 0 };
        for i in 0..n {
            world.replicas.push(One::new(&config, i as u8 + 1, 0));
        }
        world.settle();
        world
    }

    /// One more replica, which has not done anything.
    pub fn add(&mut self, config: &Config) {
        let seed = self.replicas.len() as u8 + 1;
        self.replicas.push(One::new(config, seed, self.now_ms));
    }

    /// A replica is replaced by a new one, as after a crash.
    pub fn restart(&mut self, at: usize, seed: u8) {
        self.replicas[at] = One::new(&Config { scrub_ms: 0, ..Config::default() }, seed, self.now_ms);
        self.settle();
    }

    pub fn input(&mut self, at: usize, input: Input) {
        let one = &mut self.replicas[at];
        let now: Now = self.now_ms - one.born_ms;
        let mut out = Outputs::new();
        one.replica.step(now, input, &mut out);
        for o in out {
            match o {
                Output::Store { id, op } => one.calls.push_back((id, op)),
                Output::Reply { id, outcome } => one.replies.push((id, outcome)),
                Output::Mark(_) => {}
            }
        }
    }

    /// Performs one call of a replica and gives it the reply.
    pub fn perform(&mut self, at: usize) -> bool {
        let Some((id, op)) = self.replicas[at].calls.pop_front() else { return false };
        let reply = if self.replicas[at].away { Err(StoreError::Unavailable) } else { self.apply(&op) };
        self.input(at, Input::StoreReply { id, reply });
        for topic in self.store.notified() {
            for i in 0..self.replicas.len() {
                self.input(i, Input::Notified { topic: topic.clone() });
            }
        }
        true
    }

    pub fn apply(&mut self, op: &StoreOp) -> Result<StoreAnswer, StoreError> {
        self.store.set_clock(START + (self.now_ms + self.ahead_ms) * 1_000);
        match op {
            StoreOp::Read(read) => self.store.read(read).map(StoreAnswer::Read),
            StoreOp::Commit(commit) => self.store.commit(commit).map(StoreAnswer::Commit),
        }
    }

    /// Runs until nothing is left to do at this moment.
    pub fn settle(&mut self) {
        for _ in 0..100_000 {
            let mut busy = false;
            for i in 0..self.replicas.len() {
                let one = &self.replicas[i];
                let due = one.replica.next_timer().is_none_or(|t| t <= self.now_ms - one.born_ms);
                if due {
                    self.input(i, Input::Timer);
                    busy = true;
                }
                while self.perform(i) {
                    busy = true;
                }
            }
            if !busy {
                return;
            }
        }
        panic!("never quiet");
    }

    /// Goes to a time, stopping at every timer on the way.
    pub fn to(&mut self, ms: u64) {
        self.settle();
        while self.now_ms < ms {
            let next = self
                .replicas
                .iter()
                .filter_map(|o| o.replica.next_timer().map(|t| t + o.born_ms))
                .min()
                .unwrap_or(ms)
                .clamp(self.now_ms + 1, ms);
            self.now_ms = next;
            self.settle();
        }
    }

    pub fn ask(&mut self, at: usize, request: Request) -> RequestId {
        self.next_request += 1;
        let id = RequestId(self.next_request);
        self.input(at, Input::Request { id, request });
        id
    }

    pub fn answer(&mut self, at: usize, id: RequestId) -> Option<Outcome> {
        let replies = &mut self.replicas[at].replies;
        let found = replies.iter().position(|r| r.0 == id)?;
        Some(replies.remove(found).1)
    }

    /// Asks and runs until it is answered at this moment.
    pub fn call(&mut self, at: usize, request: Request) -> Outcome {
        let id = self.ask(at, request);
        self.settle();
        self.answer(at, id).expect("answered without waiting")
    }

    pub fn submit(&mut self, at: usize, submit: Submit) -> Outcome {
        self.call(at, Request::Submit(Box::new(submit)))
    }

    pub fn claim(&mut self, at: usize, worker: &str, queue: &str, max: usize, lease_ms: Option<u64>) -> Vec<Leased> {
        let claim = Claim {
            tenant: "default".into(),
            worker: worker.into(),
            queues: vec![queue.into()],
            max,
            wait_ms: 0,
            lease_ms,
            claim_id: None,
        };
        match self.call(at, Request::Claim(Box::new(claim))) {
            Ok(Response::Claimed(jobs)) => jobs,
            other => panic!("{other:?}"),
        }
    }
}

impl One {
    fn new(config: &Config, seed: u8, born_ms: u64) -> One {
        let replica = Replica::new(config.clone(), [seed; 32]);
        One { replica, born_ms, calls: VecDeque::new(), replies: Vec::new(), away: false }
    }
}
