//! Cases that other systems failed on in production, on a real Redis: a fail-over that loses what had not
//! been replicated, large backlogs, and what is left when all is over.
//!
//! By default they are small. With their own numbers, which take about a quarter of an hour:
//! `LEASEHOLD_TEST_FULL=1 cargo test --release -p leasehold --test redis_cases -- --test-threads 1 --nocapture`

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]

#[path = "../../shell-redis/tests/support/mod.rs"]
mod redis_server;
mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use redis_server::proxy::Proxy;
use redis_server::{Server as Redis, free_port, wait_for};
use serde_json::Value;
use support::{Client, Server, until};

const PATIENCE: Duration = Duration::from_secs(120);

/// The number of the case, or a smaller one.
fn full<T>(full: T, small: T) -> T {
    if std::env::var_os("LEASEHOLD_TEST_FULL").is_some() { full } else { small }
}

fn serve(url: &str) -> Server {
    Server::on("127.0.0.1:0".parse().unwrap(), url, &[])
}

/// Asks until the answer is not "later"; a call to a server that is there always gets one.
fn insist(client: &mut Client, path: &str, body: &str) -> (u16, Value) {
    let begun = Instant::now();
    loop {
        let answer = client.post(path, body);
        if !matches!(answer.status, 429 | 503) {
            return (answer.status, answer.json());
        }
        assert!(begun.elapsed() < PATIENCE, "{path} is never answered");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn text<'a>(value: &'a Value, field: &str) -> &'a str {
    value[field].as_str().unwrap_or_default()
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map(Vec::as_slice).unwrap_or_default()
}

/// The books of the whole store, as the server sees them.
fn books_balance(client: &mut Client) {
    let mut path = "/v1/audit".to_owned();
    loop {
        let page = client.get(&path).json();
        assert_eq!(list(&page["findings"]).len(), 0, "{page}");
        match page["next"].as_str() {
            Some(next) => path = format!("/v1/audit?cursor={next}"),
            None => return,
        }
    }
}

fn keys(redis: &Redis) -> Vec<String> {
    redis::cmd("KEYS").arg("*").query(&mut redis.client()).unwrap()
}

/// What was acknowledged, and when.
#[derive(Default)]
struct Acknowledged {
    stop: AtomicBool,
    jobs: Mutex<BTreeMap<String, (Instant, String)>>,
    groups: Mutex<BTreeMap<String, u64>>,
    completed: Mutex<BTreeMap<String, Instant>>,
}

impl Acknowledged {
    fn creates(&self, mut client: Client) {
        for n in 0.. {
            if self.stop.load(Ordering::SeqCst) {
                return;
            }
            let payload = format!("\"{n}-{}\"", "x".repeat(n % 200));
            let (status, job) = insist(&mut client, "/v1/jobs", &format!(r#"{{"queue":"q","payload":{payload}}}"#));
            assert_eq!(status, 201, "{job}");
            self.jobs.lock().unwrap().insert(text(&job, "id").into(), (Instant::now(), payload));
        }
    }

    fn creates_groups(&self, mut client: Client) {
        while !self.stop.load(Ordering::SeqCst) {
            let children = [r#"{"payload":1}"#; 7].join(",");
            let body = format!(r#"{{"queue":"g","max_parallel":2,"children":[{children}]}}"#);
            let (status, group) = insist(&mut client, "/v1/groups", &body);
            assert_eq!(status, 201, "{group}");
            self.groups.lock().unwrap().insert(text(&group, "id").into(), 7);
        }
    }

    /// Completes every second job; the others are left to their leases.
    fn works(&self, mut client: Client) {
        for n in 0.. {
            if self.stop.load(Ordering::SeqCst) {
                return;
            }
            let claim = r#"{"worker":"w","queues":["q","g"],"max":4,"lease_ms":2000}"#;
            let (status, answer) = insist(&mut client, "/v1/claims", claim);
            assert_eq!(status, 200, "{answer}");
            for (k, job) in list(&answer["jobs"]).iter().enumerate() {
                if (n + k) % 2 == 0 {
                    self.complete(&mut client, job);
                }
            }
        }
    }

    fn complete(&self, client: &mut Client, job: &Value) {
        let id = text(job, "id");
        let (status, answer) =
            insist(client, &format!("/v1/jobs/{id}/complete"), &format!(r#"{{"token":{}}}"#, job["token"]));
        match status {
            200 => drop(self.completed.lock().unwrap().insert(id.into(), Instant::now())),
            // Its lease, or the job itself, was not replicated.
            404 | 409 => {}
            _ => panic!("{answer}"),
        }
    }
}

/// Replication is asynchronous: what had not reached the replica is gone after its promotion. Cut off in
/// the midst of traffic, it must be gone as a whole: a job is there with its payload and in its
/// place or not at all, a group has all its children, and a job whose completion was lost runs again.
#[test]
fn c25_what_a_fail_over_loses_is_lost_whole_and_a_lost_completion_runs_again() {
    let (mut old, new) = (Redis::start("redis-7.0", &[]), Redis::start("redis-7.0", &[]));
    let (replication, front) = (Proxy::start(old.port), Proxy::start(old.port));
    new.run(&["REPLICAOF", "127.0.0.1", &replication.port.to_string()]);
    wait_for("it is a replica", || (new.info("master_link_status") == "up").then_some(()));
    let server = serve(&front.url());
    let seen = Acknowledged::default();
    let cut = std::thread::scope(|scope| {
        let clients = [server.client(), server.client(), server.client(), server.client()];
        let [a, b, c, d] = clients;
        scope.spawn(|| seen.creates(a));
        scope.spawn(|| seen.creates_groups(b));
        scope.spawn(|| seen.works(c));
        scope.spawn(|| seen.works(d));
        let flows = |jobs: usize, groups: usize, completed: usize| {
            until("traffic flows", PATIENCE, || {
                seen.jobs.lock().unwrap().len() >= jobs
                    && seen.groups.lock().unwrap().len() >= groups
                    && seen.completed.lock().unwrap().len() >= completed
            });
            (seen.jobs.lock().unwrap().len(), seen.groups.lock().unwrap().len(), seen.completed.lock().unwrap().len())
        };
        let (jobs, groups, completed) = flows(50, 5, 20);
        wait_for("it has come so far", || {
            (new.info("slave_repl_offset").parse::<u64>().unwrap() > 1_000).then_some(())
        });
        // Nothing comes through any more, and nothing new is connected.
        replication.aim(free_port());
        replication.cut();
        let cut = Instant::now();
        std::thread::sleep(full(Duration::from_secs(10), Duration::from_secs(1)));
        flows(jobs + 20, groups + 2, completed + 10);
        old.stop("KILL");
        new.run(&["REPLICAOF", "NO", "ONE"]);
        front.aim(new.port);
        front.cut();
        until("it is ready again", PATIENCE, || server.client().get("/readyz").status == 200);
        let now = flows(0, 0, 0);
        flows(now.0 + 5, now.1 + 1, now.2 + 5);
        seen.stop.store(true, Ordering::SeqCst);
        cut
    });
    let mut client = server.client();
    books_balance(&mut client);
    let all = keys(&new).join("\n");
    let jobs = seen.jobs.into_inner().unwrap();
    let mut lost = 0;
    for (id, (when, payload)) in &jobs {
        match client.get(&format!("/v1/jobs/{id}")).status {
            200 => assert_eq!(client.get(&format!("/v1/jobs/{id}/payload")).text(), *payload),
            404 => {
                assert!(*when >= cut, "{id} had been replicated before the cut");
                assert!(!all.contains(id.as_str()), "something of {id} is left");
                lost += 1;
            }
            status => panic!("{id}: {status}"),
        }
    }
    for (id, children) in seen.groups.into_inner().unwrap() {
        let answer = client.get(&format!("/v1/groups/{id}"));
        if answer.status == 404 {
            assert!(!all.contains(&id), "something of {id} is left");
            lost += 1;
        } else {
            let counts = answer.json()["counts"].as_object().unwrap().values().filter_map(Value::as_u64).sum::<u64>();
            assert_eq!(counts, children, "{}", answer.json());
        }
    }
    // Whose completion was acknowledged and is gone: it waits, or runs under a lease that lapses.
    let completed: BTreeSet<String> = seen.completed.into_inner().unwrap().into_keys().collect();
    let again: BTreeSet<&String> = completed
        .iter()
        .filter(|id| {
            let job = client.get(&format!("/v1/jobs/{id}"));
            job.status == 200 && text(&job.json(), "status") != "succeeded"
        })
        .collect();
    println!("{lost} jobs and groups were lost whole, {} completions", again.len());
    assert!(lost > 0, "nothing was lost: the test shows nothing");
    let mut delivered = BTreeSet::new();
    until("all is done", PATIENCE, || {
        let claim = r#"{"worker":"w","queues":["q","g"],"max":200}"#;
        let (status, answer) = insist(&mut client, "/v1/claims", claim);
        assert_eq!(status, 200, "{answer}");
        for job in list(&answer["jobs"]) {
            delivered.insert(text(job, "id").to_owned());
            let path = format!("/v1/jobs/{}/complete", text(job, "id"));
            assert_eq!(insist(&mut client, &path, &format!(r#"{{"token":{}}}"#, job["token"])).0, 200);
        }
        let queues = client.get("/v1/queues").json();
        let left = |q: &Value| ["held", "queued", "running", "retrying"].map(|s| q["counts"][s].as_u64().unwrap());
        list(&queues["queues"]).iter().flat_map(left).sum::<u64>() == 0
    });
    assert!(again.iter().all(|id| delivered.contains(*id)), "a lost completion means that the job runs again");
    books_balance(&mut client);
}

/// Latency of creations of the highest class, one by one, and what each costs the Redis: median and
/// microseconds of processor time, the best of three.
fn creation(client: &mut Client, redis: &Redis) -> (Duration, f64) {
    let cpu =
        || -> f64 { ["used_cpu_user", "used_cpu_sys"].iter().map(|f| redis.info(f).parse::<f64>().unwrap()).sum() };
    let round = || {
        let before = cpu();
        let mut took: Vec<Duration> = (0..200)
            .map(|_| {
                let begun = Instant::now();
                support::submit(client, r#"{"queue":"q","class":"interactive","payload":1}"#);
                begun.elapsed()
            })
            .collect();
        took.sort_unstable();
        (took[took.len() / 2], (cpu() - before) * 1e6 / took.len() as f64)
    };
    let mut round = round;
    let rounds = [round(), round(), round()];
    (rounds.iter().map(|r| r.0).min().unwrap(), rounds.iter().map(|r| r.1).fold(f64::INFINITY, f64::min))
}

/// Nothing that can be asked costs the Redis more because more is there: lists come in pages, purges in
/// portions, and a creation with a class goes to its place without a walk.
#[test]
fn c26_no_call_grows_with_the_backlog() {
    let jobs = full(200_000, 10_000);
    let redis = Redis::start("redis-7.0", &[]);
    let server = serve(&redis.url());
    let mut client = server.client();
    let empty = creation(&mut client, &redis);
    for more in ["", r#","delay_ms":36000000"#] {
        for _ in 0..jobs / 1_000 {
            let job = format!(r#"{{"queue":"q","payload":1{more}}}"#);
            let body = format!(r#"{{"jobs":[{}]}}"#, vec![job.as_str(); 1_000].join(","));
            assert_eq!(insist(&mut client, "/v1/jobs:batch", &body).0, 200);
        }
    }
    // Microseconds. A machine with other things to do may take the processor away from the small run.
    redis.run(&["CONFIG", "SET", "slowlog-log-slower-than", full("100000", "2000000")]);
    redis.run(&["SLOWLOG", "RESET"]);
    let stop = AtomicBool::new(false);
    let (mut pings, loaded) = std::thread::scope(|scope| {
        let pings = scope.spawn(|| {
            let mut connection = redis.client();
            let mut took = Vec::new();
            while !stop.load(Ordering::SeqCst) {
                let begun = Instant::now();
                redis_server::run(&mut connection, &["PING"]).unwrap();
                took.push(begun.elapsed());
                std::thread::sleep(Duration::from_millis(2));
            }
            took
        });
        let loaded = creation(&mut client, &redis);
        let pages = scope.spawn(|| {
            let mut client = server.client();
            let mut pages = 0;
            while !stop.load(Ordering::SeqCst) || pages == 0 {
                for path in ["/v1/jobs", "/v1/jobs?queue=q&status=queued", "/v1/jobs?status=scheduled"] {
                    let answer = client.get(path).json();
                    let found = list(&answer["jobs"]).len();
                    assert!(found <= 100, "{path}: {found}");
                    pages += 1;
                }
            }
        });
        let first = client.get("/v1/jobs?status=scheduled").json();
        assert!(list(&first["jobs"]).len() == 100 && first["next"].is_string());
        for status in ["queued", "scheduled"] {
            let mut left = u64::MAX;
            while left > 0 {
                let (code, answer) = insist(&mut client, "/v1/queues/q/purge", &format!(r#"{{"status":"{status}"}}"#));
                assert_eq!(code, 200, "{answer}");
                assert!(answer["purged"].as_u64().unwrap() <= 200, "{answer}");
                left = answer["left"].as_u64().unwrap();
            }
        }
        stop.store(true, Ordering::SeqCst);
        pages.join().unwrap();
        (pings.join().unwrap(), loaded)
    });
    pings.sort_unstable();
    let slow = redis.run(&["SLOWLOG", "LEN"]);
    let p99 = pings[pings.len() * 99 / 100];
    println!(
        "{} jobs: create {:?} and {:.0} µs of Redis when empty, {:?} and {:.0} µs when full; PING p99 {p99:?} of {}, slow: {slow:?}",
        2 * jobs,
        empty.0,
        empty.1,
        loaded.0,
        loaded.1,
        pings.len()
    );
    assert_eq!(slow, redis::Value::Int(0), "{:?}", redis.run(&["SLOWLOG", "GET"]));
    assert!(loaded.1 <= 3.0 * empty.1, "{loaded:?} {empty:?}");
    if full(true, false) {
        assert!(p99 < Duration::from_millis(20), "{p99:?}");
        assert!(loaded.0 <= 3 * empty.0, "{loaded:?} {empty:?}");
    }
}

fn number(redis: &Redis, command: &[&str]) -> i64 {
    match redis.run(command) {
        redis::Value::Int(n) => n,
        other => panic!("{command:?}: {other:?}"),
    }
}

/// What the Redis holds besides the log of events, in bytes.
fn memory(redis: &Redis) -> i64 {
    let used: i64 = redis.info("used_memory").parse().unwrap();
    let log = redis.run(&["MEMORY", "USAGE", "{lh:0}l:audit/default", "SAMPLES", "0"]);
    used - if let redis::Value::Int(log) = log { log } else { 0 }
}

/// Jobs with keys, claims of many workers, and groups leave nothing behind but the log, which has its cap.
/// The whole takes the longest of their times: ended records live two minutes, and the Redis forgets
/// them one after. The small run looks that each key that is left has such a time.
#[test]
fn c27_what_is_over_goes() {
    let (jobs, workers, groups) = full((100_000, 1_000, 100), (2_000, 50, 10));
    let redis = Redis::start("redis-7.0", &[]);
    let server = Server::on("127.0.0.1:0".parse().unwrap(), &redis.url(), &["--retention", "60s"]);
    let mut client = server.client();
    live_through(&mut client, "first", 100, 1, 1);
    let (keys_before, before) = (number(&redis, &["DBSIZE"]), memory(&redis));
    live_through(&mut client, "q", jobs, workers, groups);
    let now = redis_time(&redis);
    let mut live = 0;
    for key in keys(&redis) {
        let kept = match key.strip_prefix("{lh:0}").unwrap() {
            "meta" | "l:audit/default" => continue,
            // The queue's own name, and ended jobs and groups until they expire.
            k if k.starts_with("i:") => {
                k == "i:names" || k == "i:groups/ended" || k.starts_with("i:st/") || k.starts_with("i:done/")
            }
            // Children's records go with their group, whose time is in `groups/ended`.
            k => {
                (1..=240_000).contains(&number(&redis, &["PTTL", &key])) || k.contains('-') || k.starts_with("r:queue/")
            }
        };
        assert!(kept, "`{key}` has neither a time nor an owner");
        live += 1;
    }
    let ended: Vec<(String, u64)> = redis::cmd("ZRANGE")
        .arg("{lh:0}i:groups/ended")
        .arg(0)
        .arg(-1)
        .arg("WITHSCORES")
        .query(&mut redis.client())
        .unwrap();
    assert!(ended.len() >= groups && ended.iter().all(|(_, at)| *at < now + 150_000_000), "{ended:?}");
    println!("{jobs} jobs: {live} keys right after, {keys_before} before");
    if full(true, false) {
        std::thread::sleep(Duration::from_secs(300));
        let (after, memory) = (number(&redis, &["DBSIZE"]), memory(&redis));
        let log = number(&redis, &["XLEN", "{lh:0}l:audit/default"]);
        println!(
            "five minutes later: {after} keys; {memory} bytes besides the log, {before} before; {log} entries in the log"
        );
        let left = keys(&redis);
        assert!(after <= keys_before + 50, "{:?}", &left[..left.len().min(100)]);
        assert!(memory as f64 <= 1.1 * before as f64, "{memory} {before}");
        assert!(log <= 100_100, "{log}");
        for key in left {
            let owned = ["meta", "l:audit/default"].iter().any(|k| key.ends_with(k));
            assert!(owned || number(&redis, &["PTTL", &key]) > 0, "`{key}` stays");
        }
    }
}

fn redis_time(redis: &Redis) -> u64 {
    let (seconds, micros): (u64, u64) = redis::cmd("TIME").query(&mut redis.client()).unwrap();
    seconds * 1_000_000 + micros
}

/// Submits with keys, groups of ten, and completes all, each claim by another worker.
fn live_through(client: &mut Client, queue: &str, jobs: usize, workers: usize, groups: usize) {
    for from in (0..jobs).step_by(1_000) {
        let job = |n: usize| format!(r#"{{"queue":"{queue}","idempotency_key":"{queue}-{n}","payload":1}}"#);
        let body: Vec<String> = (from..jobs.min(from + 1_000)).map(job).collect();
        assert_eq!(insist(client, "/v1/jobs:batch", &format!(r#"{{"jobs":[{}]}}"#, body.join(","))).0, 200);
    }
    for _ in 0..groups {
        let children = [r#"{"payload":1}"#; 10].join(",");
        let body = format!(r#"{{"queue":"{queue}","max_parallel":5,"children":[{children}]}}"#);
        assert_eq!(insist(client, "/v1/groups", &body).0, 201);
    }
    let (mut done, mut worker) = (0, 0);
    while done < jobs + 10 * groups {
        worker = (worker + 1) % workers;
        let max = (jobs / workers).clamp(1, 1_000);
        let claim = format!(r#"{{"worker":"{queue}-{worker}","queues":["{queue}"],"max":{max},"wait_ms":5000}}"#);
        let (_, answer) = insist(client, "/v1/claims", &claim);
        let items: Vec<String> =
            list(&answer["jobs"]).iter().map(|j| format!(r#"{{"id":{},"token":{}}}"#, j["id"], j["token"])).collect();
        assert!(!items.is_empty(), "{done} of {jobs} done");
        let (_, answer) = insist(client, "/v1/completions", &format!(r#"{{"items":[{}]}}"#, items.join(",")));
        done += list(&answer["results"]).iter().filter(|r| r["status"] == 200).count();
    }
    until("its groups are final", PATIENCE, || {
        let metrics = client.get("/metrics").text();
        let of = |name: &str| {
            let line = metrics.lines().find_map(|l| l.strip_prefix(name)?.trim().parse::<u64>().ok());
            line.unwrap_or_default()
        };
        of("leasehold_groups_finalized_total ") == of("leasehold_groups_created_total ")
    });
}
