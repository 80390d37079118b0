//! Goal: the server runs the jobs of its routes by calling upstreams: never more at once than the pool has slots,
//! with the result, the retry or the death that the answer means, and nothing stuck whatever the upstream, an
//! operator or a drain does. Method: real servers before a real upstream that counts its own requests.
//!
//! `LEASEHOLD_TEST_FULL=1`: five hundred batch jobs instead of sixty, and longer pauses in C16.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]

#[path = "../../shell-redis/tests/support/mod.rs"]
mod redis_server;
mod support;

use std::io::Write as _;
use std::time::{Duration, Instant};

use redis_server::Server as Redis;
use serde_json::{Value, json};
use support::upstream::{Upstream, echoed};
use support::{Answer, Client, Folder, Server, raw, read_answer, status, submit, until};

const PATIENCE: Duration = Duration::from_secs(60);

fn is_full() -> bool {
    std::env::var_os("LEASEHOLD_TEST_FULL").is_some()
}

struct World {
    servers: Vec<Server>,
    upstream: Upstream,
    toml: String,
    folder: Folder,
    _redis: Option<Redis>,
}

impl World {
    /// Servers that run the queue `work` by one upstream, whose path is `path` unless a test says otherwise.
    fn new(total: u64, batch_max: u64, path: &str, more: &str, redis: Option<Redis>, replicas: usize) -> World {
        let upstream = Upstream::start();
        let toml = format!(
            "grace = \"4s\"\nlease = \"6s\"\n[[pools]]\nname = \"gpu\"\ntotal = {total}\nbatch_max = \
             {batch_max}\n[[upstreams]]\nname = \"one\"\nurl = \"{}\"\npath = \"{path}\"\nmodels = [\"m\"]\npool = \
             \"gpu\"\n{more}[[routes]]\nqueue = \"work\"\nupstreams = [\"one\"]\n",
            upstream.url()
        );
        let mut world = World { servers: Vec::new(), upstream, toml, folder: Folder::new(), _redis: redis };
        for _ in 0..replicas {
            world.start();
        }
        world
    }

    fn start(&mut self) {
        let file = self.folder.path().join("leasehold.toml");
        std::fs::write(&file, &self.toml).unwrap();
        let own = format!("disk:{}", self.folder.path().join("store").display());
        let store = self._redis.as_ref().map_or(own, Redis::url);
        let server = Server::on("127.0.0.1:0".parse().unwrap(), &store, &["--config", file.to_str().unwrap()]);
        until("the pool is set", PATIENCE, || server.client().get("/v1/pools/gpu").status == 200);
        self.servers.push(server);
    }

    fn one(path: &str, more: &str) -> World {
        World::new(4, 4, path, more, None, 1)
    }

    fn client(&self) -> Client {
        self.servers.last().unwrap().client()
    }

    fn submit(&self, more: &str) -> String {
        submit(&mut self.client(), &format!(r#"{{"queue":"work","payload":{{"n":1}}{more}}}"#))
    }

    fn job(&self, id: &str) -> Value {
        self.client().get(&format!("/v1/jobs/{id}")).json()
    }

    fn is(&self, id: &str, wanted: &str) {
        until(wanted, PATIENCE, || status(&mut self.client(), id) == wanted);
    }

    fn result(&self, id: &str) -> Answer {
        self.client().get(&format!("/v1/jobs/{id}/result"))
    }

    fn is_quiet_within(&self, at_most: Duration) {
        until("slots are back", at_most, || self.client().get("/v1/pools/gpu").json()["in_use"] == 0);
        until("the upstream has nothing to do", at_most, || self.upstream.now() == 0);
    }
}

#[test]
fn jobs_of_a_route_are_run_and_their_results_kept() {
    let world = World::one("/echo", "headers = { x-key = \"of the file\" }\n");
    let mut client = world.client();
    let trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    let raw = client.send(
        "POST",
        "/v1/queues/work/jobs?class=batch",
        &[("content-type", "image/png"), ("traceparent", trace)],
        b"\x89PNG",
    );
    assert_eq!(raw.status, 201, "{}", raw.text());
    let id = raw.json()["id"].as_str().unwrap().to_owned();
    world.is(&id, "succeeded");
    let result = world.result(&id);
    assert_eq!(result.header("content-type"), Some("application/json"));
    let seen = echoed(&result.body);
    assert_eq!(seen["path"], "/echo");
    for (name, value) in [
        (":method", "POST"),
        ("content-type", "image/png"),
        ("traceparent", trace),
        ("leasehold-job-id", id.as_str()),
        ("leasehold-class", "batch"),
        ("leasehold-attempt", "1"),
        ("x-key", "of the file"),
    ] {
        assert_eq!(seen["headers"][name], value, "{name}");
    }
    assert_eq!(world.upstream.last().body, b"\x89PNG");
    assert_eq!(seen["headers"]["leasehold-token"].as_str().unwrap().len(), 38);
    // JSON goes as JSON.
    let id = world.submit("");
    world.is(&id, "succeeded");
    assert_eq!(world.upstream.last().headers["content-type"], "application/json");
    assert_eq!(world.upstream.last().body, br#"{"n":1}"#);
    world.is_quiet_within(Duration::from_secs(2));
}

#[test]
fn what_an_upstream_answers_decides_what_becomes_of_the_job() {
    let world = World::one("/echo", "first_byte_timeout = \"300ms\"\ntimeout = \"1s\"\n");
    let attempt = |id: &str| world.job(id)["attempts"][0].clone();
    for (path, kind, ends) in [
        ("/status/404", "http_404", "dead"),
        ("/status/302", "http_302", "dead"),
        ("/status/408", "http_408", "retrying"),
        ("/status/429", "http_429", "retrying"),
        ("/status/500", "http_500", "retrying"),
        ("/close", "upstream_broken", "retrying"),
        ("/cut", "upstream_broken", "retrying"),
        ("/garbage", "upstream_garbled", "retrying"),
        ("/hang", "upstream_timeout", "retrying"),
        ("/half", "upstream_timeout", "retrying"),
    ] {
        world.upstream.always(Some(path));
        let id = world.submit(r#","backoff":{"base_ms":600000}"#);
        until(path, PATIENCE, || status(&mut world.client(), &id) == ends);
        let attempt = attempt(&id);
        assert_eq!(attempt["error"]["type"], kind, "{path}: {attempt}");
        if path.starts_with("/status") {
            assert_eq!(attempt["error"]["detail"], format!("answer {}", &path[8..]), "{attempt}");
        }
        until("its slot is back", Duration::from_secs(2), || world.client().get("/v1/pools/gpu").json()["in_use"] == 0);
        // The next one is run at once; and the breaker has no reason to open.
        world.upstream.always(None);
        let next = world.submit("");
        world.is(&next, "succeeded");
    }
    // What fails is tried again, until it may no more.
    world.upstream.always(Some("/status/500"));
    let id = world.submit(r#","max_attempts":2,"backoff":{"base_ms":100}"#);
    world.is(&id, "dead");
    assert_eq!(world.job(&id)["attempts"].as_array().unwrap().len(), 2);
    world.is_quiet_within(Duration::from_secs(2));
}

#[test]
fn a_cancelled_job_is_hung_up_on() {
    let world = World::one("/hang", "");
    let id = world.submit("");
    until("it is called", PATIENCE, || world.upstream.now() == 1);
    assert_eq!(world.client().post(&format!("/v1/jobs/{id}/cancel"), "").status, 200);
    world.is_quiet_within(Duration::from_secs(10));
    assert_eq!(status(&mut world.client(), &id), "cancelled");
}

/// Each is cancelled while it is called: its slot is nobody else's before the upstream was hung up on.
#[test]
fn jobs_that_are_cancelled_in_a_row_do_not_pile_up_at_the_upstream() {
    let world = World::new(2, 2, "/hang", "", None, 1);
    let ids: Vec<String> = (0..6).map(|_| world.submit("")).collect();
    for id in &ids {
        world.is(id, "running");
        assert_eq!(world.client().post(&format!("/v1/jobs/{id}/cancel"), "").status, 200);
    }
    world.is_quiet_within(Duration::from_secs(5));
    let counts = world.upstream.counts();
    println!("{} calls, at most {} at once", counts.total, counts.most_in_all);
    assert!(counts.total >= 4 && counts.most_in_all <= 2, "{counts:?}");
}

#[test]
fn a_job_that_has_had_its_time_is_hung_up_on_before_the_next_is_called() {
    let world = World::new(1, 1, "/hang", "", None, 1);
    let more = r#","run_timeout_ms":1500,"max_attempts":1"#;
    let ids: Vec<String> = (0..3).map(|_| world.submit(more)).collect();
    for id in &ids {
        world.is(id, "dead");
        let attempts = world.job(id)["attempts"].clone();
        assert_eq!(attempts[0]["outcome"], "timed_out", "{attempts}");
    }
    world.is_quiet_within(Duration::from_secs(2));
    let counts = world.upstream.counts();
    assert_eq!((counts.total, counts.most_in_all), (3, 1), "{counts:?}");
}

#[test]
fn a_pool_that_was_deleted_is_set_anew_and_what_it_has_no_room_for_is_refused() {
    let world = World::one("/echo", "");
    assert_eq!(world.client().send("DELETE", "/v1/pools/gpu", &[], b"").status, 204);
    let id = world.submit("");
    world.is(&id, "succeeded");
    let too_much = world.client().post("/v1/jobs", r#"{"queue":"work","payload":1,"cost":5}"#);
    assert_eq!((too_much.status, &too_much.json()["code"]), (422, &json!("invalid_field")), "{}", too_much.text());
    assert!(too_much.text().contains("the pool `gpu` has 4"), "{}", too_much.text());
}

#[test]
fn a_drain_gives_back_what_it_cannot_finish() {
    let mut world = World::one("/hang", "");
    let id = world.submit("");
    until("it is called", PATIENCE, || world.upstream.now() == 1);
    world.servers[0].signal(rustix::process::Signal::TERM);
    assert!(world.servers[0].wait(Duration::from_secs(20)).success());
    until("the upstream was hung up on", Duration::from_secs(2), || world.upstream.now() == 0);
    world.upstream.always(Some("/echo"));
    world.start();
    world.is(&id, "succeeded");
    let job = world.job(&id);
    assert_eq!((&job["attempt"], &job["deliveries"]), (&json!(1), &json!(2)), "the attempt does not count: {job}");
}

/// Two replicas, a pool of 8 with 6 for batch, and callers among the batch jobs that wait.
fn never_more_than_its_slots(redis: Option<Redis>, replicas: usize) {
    let world = World::new(8, 6, "/slow?ms=40", "", redis, replicas);
    let jobs = if is_full() { 500 } else { 60 };
    let mut client = world.client();
    let list: Vec<Value> = (0..jobs).map(|n| json!({"queue": "work", "payload": n, "class": "batch"})).collect();
    assert_eq!(client.post("/v1/jobs:batch", json!({"jobs": list}).to_string()).status, 200);
    until("they are run", PATIENCE, || world.upstream.counts().most_of("batch") > 0);
    let mut calls: Vec<_> = (0..12)
        .map(|n| {
            let mut stream = raw(world.servers[n % replicas].address);
            stream.get_mut().write_all(b"GET /v1/proxy/m/slow?ms=60 HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
            stream
        })
        .collect();
    for call in &mut calls {
        let answer = read_answer(call).unwrap();
        assert_eq!(answer.status, 200, "{}", answer.text());
    }
    let waiting = client.get("/v1/queues/work").json()["counts"]["queued"].as_u64().unwrap();
    println!("{waiting} of {jobs} batch jobs still waited when the last of the callers was answered");
    assert!(waiting > 0, "callers did not wait for batch work");
    until("all have succeeded", PATIENCE, || client.get("/v1/queues/work").json()["counts"]["succeeded"] == jobs);
    let counts = world.upstream.counts();
    println!(
        "at most {} at once, of class batch {}, {} in all",
        counts.most_in_all,
        counts.most_of("batch"),
        counts.total
    );
    assert!(counts.most_in_all <= 8 && counts.most_of("batch") <= 6, "{counts:?}");
    assert_eq!(counts.total, jobs + 12, "each was sent once");
    world.is_quiet_within(Duration::from_secs(2));
}

#[test]
fn an_upstream_never_sees_more_jobs_than_slots_on_redis() {
    never_more_than_its_slots(Some(Redis::start("redis-7.0", &[])), 2);
}

#[test]
fn an_upstream_never_sees_more_jobs_than_slots_on_disk() {
    never_more_than_its_slots(None, 1);
}

/// C16, its minutes as seconds: an upstream that answers 429 with Retry-After is left alone by all replicas, tried by one job
/// at a time after that, and costs no attempt.
#[test]
fn c16_back_pressure_is_heeded() {
    let after = if is_full() { 12 } else { 3 };
    let world = World::new(4, 4, "/echo", "", Some(Redis::start("redis-7.0", &[])), 2);
    world.upstream.always(Some(&format!("/status/429?after={after}")));
    let begun = Instant::now();
    let ids: Vec<String> = (0..20).map(|_| world.submit(r#","max_attempts":1"#)).collect();
    until("the first is called", PATIENCE, || world.upstream.total() > 0);
    let first = Instant::now();
    let pause = Duration::from_secs(after);
    // Looked at until shortly before the pause is over.
    while first.elapsed() < pause - Duration::from_millis(300) {
        let seen = world.upstream.total();
        assert!(seen <= 4, "{seen} calls in {:?}", first.elapsed());
        std::thread::sleep(Duration::from_millis(50));
    }
    let before = world.upstream.total();
    // Two and a half pauses: at most one call each.
    std::thread::sleep(pause * 2 + pause / 2);
    let probes = world.upstream.total() - before;
    println!("{before} calls before the pause was over, then {probes} in two and a half pauses");
    assert!((1..=3).contains(&probes), "{probes} probes");
    world.upstream.always(None);
    for id in &ids {
        world.is(id, "succeeded");
        assert_eq!(world.job(id)["attempt"], 1);
    }
    println!("all 20 succeeded after {:?}", begun.elapsed());
    assert!(begun.elapsed() < pause * 8 + Duration::from_secs(10));
    world.is_quiet_within(Duration::from_secs(2));
}

/// What one server's caller was told by the upstream, all servers heed, and the jobs wait.
#[test]
fn what_a_caller_of_the_proxy_was_told_everybody_heeds() {
    let world = World::new(4, 4, "/echo", "", Some(Redis::start("redis-7.0", &[])), 2);
    world.upstream.always(Some("/status/429?after=3"));
    let call = |at: usize| world.servers[at].client().send("GET", "/v1/proxy/m/echo", &[], b"");
    assert_eq!(call(0).status, 429, "it is passed on");
    let told = Instant::now();
    world.upstream.always(None);
    let id = world.submit("");
    std::thread::sleep(Duration::from_millis(1_500));
    let answer = call(1);
    assert_eq!((answer.status, answer.code().as_str()), (503, "upstream_unavailable"), "{}", answer.text());
    assert_eq!(world.upstream.total(), 1, "nobody has called it since");
    world.is(&id, "succeeded");
    assert!(told.elapsed() >= Duration::from_millis(2_900), "{:?}", told.elapsed());
    until("it is called again", PATIENCE, || call(1).status == 200);
}
