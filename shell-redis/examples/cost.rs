//! `cargo run --release -p leasehold-redis --example cost -- [--jobs N] [--batch N] [--server PATH]`
//!
//! What a job costs the server: a replica submits, claims and completes in batches, one call at a
//! time, on a server of its own with its append-only file synced every second. For each part: calls
//! to the store for each batch, the server's processor time for each job (`INFO`'s used_cpu), jobs a
//! second.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a benchmark that meets a failure has no figure")]

#[path = "../tests/support/mod.rs"]
mod support;

use std::time::Instant;

use leasehold_core::opaque::Content;
use leasehold_core::request::{Claim, Complete, Held, Submit};
use leasehold_core::store::Store as _;
use leasehold_core::{Config, Input, Output, Outputs, Replica, Request, RequestId, Response, StoreAnswer, StoreOp};
use leasehold_redis::{Options, RedisStore};
use support::Server;

struct Bench {
    replica: Replica,
    store: RedisStore,
    start: Instant,
    out: Outputs,
    next: u64,
    calls: u64,
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
            for output in std::mem::take(&mut self.out) {
                match output {
                    Output::Store { id, op } => {
                        self.calls += 1;
                        let reply = match &op {
                            StoreOp::Read(read) => self.store.read(read).map(StoreAnswer::Read),
                            StoreOp::Commit(commit) => self.store.commit(commit).map(StoreAnswer::Commit),
                        };
                        self.step(Input::StoreReply { id, reply });
                    }
                    Output::Reply { outcome: Ok(response), .. } => replies.push(response),
                    Output::Reply { outcome: Err(failure), .. } => panic!("{failure:?} {:?}", self.store.failure()),
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

struct Meter<'a> {
    server: &'a Server,
    cpu: f64,
    began: Instant,
    calls: u64,
}

impl<'a> Meter<'a> {
    fn start(server: &'a Server, bench: &Bench) -> Meter<'a> {
        Meter { server, cpu: cpu(server), began: Instant::now(), calls: bench.calls }
    }

    fn stop(self, what: &str, jobs: usize, batches: usize, bench: &Bench) {
        let seconds = self.began.elapsed().as_secs_f64();
        let cpu = (cpu(self.server) - self.cpu) * 1e6 / jobs as f64;
        let calls = (bench.calls - self.calls) as f64 / batches as f64;
        println!("{what:<16} {calls:>5.2} calls a batch {cpu:>7.2} µs a job {:>9.0} jobs/s", jobs as f64 / seconds);
    }
}

fn cpu(server: &Server) -> f64 {
    ["used_cpu_user", "used_cpu_sys"].iter().map(|f| server.info(f).parse::<f64>().unwrap()).sum()
}

fn main() {
    let (mut jobs, mut batch, mut release) = (100_000, 100, "redis-7.0".to_owned());
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let mut value = || args.next().unwrap_or_else(|| panic!("{arg} needs a value"));
        match &*arg {
            "--jobs" => jobs = value().parse().unwrap(),
            "--batch" => batch = value().parse().unwrap(),
            "--server" => release = value(),
            _ => panic!("there is no {arg}"),
        }
    }
    let server = Server::start(&release, &["--appendonly", "yes", "--appendfsync", "everysec"]);
    let mut bench = Bench {
        replica: Replica::new(Config { mailbox: 1_000_000, ..Config::default() }, [1; 32]),
        store: RedisStore::open(&server.address(), Options::default()).unwrap(),
        start: Instant::now(),
        out: Outputs::new(),
        next: 0,
        calls: 0,
    };
    bench.step(Input::Timer);
    println!("{release} {}, batches of {batch}", server.info("redis_version"));
    for keyed in [false, true] {
        life(&server, &mut bench, jobs, batch, keyed);
    }
    println!("memory {}", server.info("used_memory_human"));
}

fn life(server: &Server, bench: &mut Bench, jobs: usize, batch: usize, keyed: bool) {
    let name = |what: &str| if keyed { format!("{what}, keyed") } else { what.to_owned() };
    let batches = jobs / batch;
    let meter = Meter::start(server, bench);
    for b in 0..batches {
        let submit = |n: usize| {
            let mut submit = Submit::new("default", "q", Content::json("{\"to\":\"someone\",\"n\":12345}"));
            submit.key = keyed.then(|| format!("key-{b}-{n}"));
            Request::Submit(Box::new(submit))
        };
        bench.ask(vec![Request::Batch((0..batch).map(submit).collect())]);
    }
    meter.stop(&name("create"), jobs, batches, bench);
    let mut held = Vec::new();
    let meter = Meter::start(server, bench);
    while held.len() < jobs {
        let claim = Claim {
            tenant: "default".into(),
            worker: "w".into(),
            queues: vec!["q".into()],
            max: batch,
            wait_ms: 0,
            lease_ms: Some(3_600_000),
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
    meter.stop(&name("claim"), jobs, batches, bench);
    let meter = Meter::start(server, bench);
    for page in held.chunks(batch) {
        let complete = |h: &Held| {
            let result = Some(Content::json("{\"ok\":true}"));
            Request::Complete(Box::new(Complete { held: h.clone(), result }))
        };
        bench.ask(vec![Request::Batch(page.iter().map(complete).collect())]);
    }
    meter.stop(&name("complete"), jobs, batches, bench);
}
