//! `cargo run --release -p leasehold-redis --example cost -- [--jobs N] [--batch N] [--server PATH] [--commands]`
//!
//! What a job costs the server: a replica submits, claims and completes in batches, one call at a
//! time, on a server of its own with its append-only file synced every second. For each part: calls
//! to the store for each batch, the server's processor time for each job (`INFO`'s used_cpu), jobs a
//! second; with `--commands` also the commands that the scripts called for each job, with their time.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a benchmark that meets a failure has no figure")]

#[path = "../tests/support/mod.rs"]
mod support;

use std::collections::BTreeMap;
use std::time::Instant;

use leasehold_core::opaque::Content;
use leasehold_core::request::{Claim, Complete, Held, Leased, Submit};
use leasehold_core::store::Store as _;
use leasehold_core::{Config, Input, Output, Outputs, Replica, Request, RequestId, Response, StoreAnswer, StoreOp};
use leasehold_redis::{Options, RedisStore};
use support::Server;

/// Jobs in hand at a time.
const ROUND: usize = 5_000;

struct Bench {
    replica: Replica,
    store: RedisStore,
    start: Instant,
    out: Outputs,
    next: u64,
    calls: u64,
    commands: bool,
    batch: usize,
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

/// What one part of the lives costs, summed over rounds.
struct Meter {
    what: String,
    cpu: f64,
    seconds: f64,
    calls: u64,
    jobs: usize,
    batches: usize,
    /// Calls and microseconds by command.
    commands: BTreeMap<String, (f64, f64)>,
}

impl Meter {
    fn new(what: String) -> Meter {
        Meter { what, cpu: 0.0, seconds: 0.0, calls: 0, jobs: 0, batches: 0, commands: BTreeMap::new() }
    }

    fn measure<T>(&mut self, server: &Server, bench: &mut Bench, jobs: usize, part: impl FnOnce(&mut Bench) -> T) -> T {
        if bench.commands {
            server.run(&["CONFIG", "RESETSTAT"]);
        }
        let (before, calls, began) = (cpu(server), bench.calls, Instant::now());
        let value = part(bench);
        self.seconds += began.elapsed().as_secs_f64();
        self.cpu += cpu(server) - before;
        self.calls += bench.calls - calls;
        self.jobs += jobs;
        self.batches += jobs.div_ceil(bench.batch);
        if bench.commands {
            let redis::Value::BulkString(stats) = server.run(&["INFO", "commandstats"]) else { panic!("INFO") };
            for line in String::from_utf8(stats).unwrap().lines().filter_map(|l| l.strip_prefix("cmdstat_")) {
                let field = |name: &str| -> f64 {
                    let value = line.split([',', ':']).find_map(|f| f.strip_prefix(name)).unwrap_or("0");
                    value.parse().unwrap_or_default()
                };
                let command = self.commands.entry(line.split(':').next().unwrap_or_default().into()).or_default();
                *command = (command.0 + field("calls="), command.1 + field("usec="));
            }
        }
        value
    }

    fn print(&self) {
        let jobs = self.jobs as f64;
        let (calls, cpu) = (self.calls as f64 / self.batches as f64, self.cpu * 1e6 / jobs);
        println!(
            "{:<16} {calls:>5.2} calls a batch {cpu:>7.2} µs a job {:>9.0} jobs/s",
            self.what,
            jobs / self.seconds
        );
        for (command, (calls, usec)) in &self.commands {
            println!("    {command:<16} {:>7.3} calls {:>7.2} µs", calls / jobs, usec / jobs);
        }
    }
}

fn cpu(server: &Server) -> f64 {
    ["used_cpu_user", "used_cpu_sys"].iter().map(|f| server.info(f).parse::<f64>().unwrap()).sum()
}

fn main() {
    let (mut jobs, mut batch, mut release, mut commands) = (100_000, 100, "redis-7.0".to_owned(), false);
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let mut value = || args.next().unwrap_or_else(|| panic!("{arg} needs a value"));
        match &*arg {
            "--jobs" => jobs = value().parse().unwrap(),
            "--batch" => batch = value().parse().unwrap(),
            "--server" => release = value(),
            "--commands" => commands = true,
            _ => panic!("there is no {arg}"),
        }
    }
    // Without rewrites of the file, which come when they come.
    let aof = ["--appendonly", "yes", "--appendfsync", "everysec", "--auto-aof-rewrite-percentage", "0"];
    let server = Server::start(&release, &aof);
    let mut bench = Bench {
        replica: Replica::new(Config { mailbox: 1_000_000, ..Config::default() }, [1; 32]),
        store: RedisStore::open(&server.address(), Options::default()).unwrap(),
        start: Instant::now(),
        out: Outputs::new(),
        next: 0,
        calls: 0,
        commands,
        batch,
    };
    bench.step(Input::Timer);
    println!("{release} {}, batches of {batch}", server.info("redis_version"));
    for keyed in [false, true] {
        life(&server, &mut bench, jobs, keyed);
    }
    println!("memory {}", server.info("used_memory_human"));
}

/// Lives of so many jobs, some thousand at a time, as workers would have them in hand.
fn life(server: &Server, bench: &mut Bench, jobs: usize, keyed: bool) {
    let name = |what: &str| Meter::new(if keyed { format!("{what}, keyed") } else { what.to_owned() });
    let [mut create, mut claim, mut complete] = ["create", "claim", "complete"].map(name);
    for from in (0..jobs).step_by(ROUND) {
        let round = ROUND.min(jobs - from);
        create.measure(server, bench, round, |bench| submit(bench, from, round, keyed));
        let held = claim.measure(server, bench, round, |bench| claim_all(bench, round));
        complete.measure(server, bench, round, |bench| complete_all(bench, &held));
    }
    [create, claim, complete].iter().for_each(Meter::print);
}

fn submit(bench: &mut Bench, from: usize, jobs: usize, keyed: bool) {
    for at in (from..from + jobs).step_by(bench.batch) {
        let submit = |n: usize| {
            let mut submit = Submit::new("default", "q", Content::json("{\"to\":\"someone\",\"n\":12345}"));
            submit.key = keyed.then(|| format!("key-{n}"));
            Request::Submit(Box::new(submit))
        };
        bench.ask(vec![Request::Batch((at..(from + jobs).min(at + bench.batch)).map(submit).collect())]);
    }
}

fn claim_all(bench: &mut Bench, jobs: usize) -> Vec<Held> {
    let mut held = Vec::new();
    while held.len() < jobs {
        let claim = Claim {
            tenant: "default".into(),
            worker: "w".into(),
            queues: vec!["q".into()],
            max: bench.batch,
            wait_ms: 0,
            lease_ms: Some(3_600_000),
            claim_id: None,
        };
        for response in bench.ask(vec![Request::Claim(Box::new(claim))]) {
            if let Response::Claimed(jobs) = response {
                let of = |j: Leased| Held { tenant: "default".into(), job: j.id, token: Some(j.token) };
                held.extend(jobs.into_iter().map(of));
            }
        }
    }
    held
}

fn complete_all(bench: &mut Bench, held: &[Held]) {
    for page in held.chunks(bench.batch) {
        let complete = |h: &Held| {
            let result = Some(Content::json("{\"ok\":true}"));
            Request::Complete(Box::new(Complete { held: h.clone(), result }))
        };
        bench.ask(vec![Request::Batch(page.iter().map(complete).collect())]);
    }
}
