//! What the core itself costs: submits, claims and completions through one replica on the model store,
//! without network and disk. `cargo run --release -p leasehold-core --example cycle`
#![allow(clippy::panic, reason = "a benchmark that meets a failure has no figure")]

use std::time::Instant;

use leasehold_core::opaque::Content;
use leasehold_core::request::{Claim, Complete, Held, Submit};
use leasehold_core::store::Store as _;
use leasehold_core::store::model::Model;
use leasehold_core::{Config, Input, Output, Outputs, Replica, Request, RequestId, Response, StoreAnswer, StoreOp};

struct Bench {
    replica: Replica,
    store: Model,
    start: Instant,
    out: Outputs,
    next: u64,
}

impl Bench {
    /// Asks all at once and runs until all are answered.
    fn ask(&mut self, requests: Vec<Request>) -> Vec<Response> {
        let mut replies = Vec::new();
        let n = requests.len();
        for request in requests {
            self.next += 1;
            let id = RequestId(self.next);
            self.step(Input::Request { id, request });
        }
        while replies.len() < n {
            let out = std::mem::take(&mut self.out);
            for output in out {
                match output {
                    Output::Store { id, op } => {
                        self.store.set_clock(1_700_000_000_000_000 + self.start.elapsed().as_micros() as u64);
                        let reply = match &op {
                            StoreOp::Read(read) => self.store.read(read).map(StoreAnswer::Read),
                            StoreOp::Commit(commit) => self.store.commit(commit).map(StoreAnswer::Commit),
                        };
                        self.step(Input::StoreReply { id, reply });
                    }
                    Output::Reply { outcome: Ok(response), .. } => replies.push(response),
                    Output::Reply { outcome: Err(failure), .. } => panic!("{failure:?}"),
                    Output::Mark(_) => {}
                }
            }
        }
        replies
    }

    fn step(&mut self, input: Input) {
        self.replica.step(self.start.elapsed().as_millis() as u64, input, &mut self.out);
    }
}

fn main() {
    let n = 200_000;
    let mut bench = Bench {
        replica: Replica::new(Config { mailbox: 1_000_000, ..Config::default() }, [1; 32]),
        store: Model::new(1_700_000_000_000_000),
        start: Instant::now(),
        out: Outputs::new(),
        next: 0,
    };
    bench.step(Input::Timer);
    for group in [1, 64] {
        let from = Instant::now();
        for _ in 0..n / group {
            let submits = (0..group)
                .map(|_| {
                    let submit = Submit::new("default", "q", Content::json("{\"to\":\"someone\",\"n\":12345}"));
                    Request::Submit(Box::new(submit))
                })
                .collect();
            bench.ask(submits);
        }
        report("submit", group, n, from);
    }
    let mut held = Vec::new();
    let from = Instant::now();
    while held.len() < n {
        let claim = Claim {
            tenant: "default".into(),
            worker: "w".into(),
            queues: vec!["q".into()],
            max: 100,
            wait_ms: 0,
            lease_ms: None,
            claim_id: None,
        };
        for response in bench.ask(vec![Request::Claim(Box::new(claim))]) {
            if let Response::Claimed(jobs) = response {
                held.extend(jobs.into_iter().map(|j| Held {
                    tenant: "default".into(),
                    job: j.id,
                    token: Some(j.token),
                }));
            }
        }
    }
    report("claim, 100 at once", 1, held.len(), from);
    let from = Instant::now();
    for page in held.chunks(100) {
        let items = page
            .iter()
            .map(|h| {
                let result = Some(Content::json("{\"ok\":true}"));
                Request::Complete(Box::new(Complete { held: h.clone(), result }))
            })
            .collect();
        bench.ask(vec![Request::Batch(items)]);
    }
    report("complete, 100 at once", 1, held.len(), from);
}

fn report(what: &str, group: usize, n: usize, from: Instant) {
    let each = from.elapsed().as_nanos() as usize / n;
    println!("{what:<24} groups of {group:<4} {each:>6} ns each");
}
