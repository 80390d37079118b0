//! A Redis that forgets its scripts, is promoted, stands still, restarts: clients see 503 for a
//! moment at most, and no job is lost or delivered a second time.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]

#[path = "../../shell-redis/tests/support/mod.rs"]
mod redis_server;
mod support;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use redis_server::proxy::{Mode, Proxy};
use redis_server::{Server as Redis, wait_for};
use support::{Client, Server, claim, status, submit, until};

const PATIENCE: Duration = Duration::from_secs(60);

fn serve(url: &str) -> Server {
    Server::on("127.0.0.1:0".parse().unwrap(), url, &[])
}

#[test]
fn c21_flushed_scripts_are_not_noticed_in_a_thousand_cycles() {
    let redis = Redis::start("redis-7.0", &[]);
    let server = serve(&redis.url());
    let mut client = server.client();
    for n in 0..1_000 {
        if n % 200 == 100 {
            redis.run(&["SCRIPT", "FLUSH"]);
            assert_eq!(client.get("/readyz").status, 200);
        }
        submit(&mut client, r#"{"queue":"q","payload":1}"#);
        let (id, token) = claim(&mut client, "q");
        let answer = client.post(&format!("/v1/jobs/{id}/complete"), format!(r#"{{"token":"{token}"}}"#));
        assert_eq!(answer.status, 200, "{}", answer.json());
    }
}

#[test]
fn c21_readiness_is_that_scripts_run_not_that_the_server_answers() {
    let redis = Redis::start("redis-7.0", &[]);
    let server = serve(&redis.url());
    let mut client = server.client();
    assert_eq!(client.get("/readyz").status, 200);
    redis.run(&["ACL", "SETUSER", "default", "-eval", "-evalsha"]);
    assert_eq!(redis.run(&["PING"]), redis::Value::SimpleString("PONG".into()));
    assert_eq!(client.get("/readyz").status, 503);
    assert_eq!(client.post("/v1/jobs", r#"{"queue":"q","payload":1}"#).status, 503);
    assert_eq!(client.post("/v1/claims", r#"{"worker":"w","queues":["q"]}"#).status, 503, "not: no work");
    redis.run(&["ACL", "SETUSER", "default", "+eval", "+evalsha"]);
    until("it is ready again", PATIENCE, || client.get("/readyz").status == 200);
}

#[test]
fn c21_a_restart_with_its_append_only_file_loses_nothing_and_is_waited_out() {
    let mut redis = Redis::start("redis-7.0", &["--appendonly", "yes", "--appendfsync", "always"]);
    let server = serve(&redis.url());
    let mut client = server.client();
    let ids: BTreeSet<String> = (0..300).map(|_| submit(&mut client, r#"{"queue":"q","payload":{"n":1}}"#)).collect();
    let (running, token) = claim(&mut client, "q");
    redis.stop("KILL");
    for _ in 0..20 {
        let answer = client.post("/v1/jobs", r#"{"queue":"other","payload":1}"#);
        assert_eq!(answer.status, 503, "{}", answer.json());
        assert_eq!(client.post("/v1/claims", r#"{"worker":"w","queues":["q"]}"#).status, 503);
    }
    redis.restart();
    until("it answers again", PATIENCE, || client.get("/readyz").status == 200);
    let done = client.post(&format!("/v1/jobs/{running}/complete"), format!(r#"{{"token":"{token}"}}"#));
    assert_eq!(done.status, 200, "{}", done.json());
    let mut delivered = BTreeSet::from([running]);
    loop {
        let answer = client.post("/v1/claims", r#"{"worker":"w","queues":["q"],"max":100}"#);
        assert_eq!(answer.status, 200);
        let jobs = answer.json()["jobs"].as_array().unwrap().clone();
        if jobs.is_empty() {
            break;
        }
        for job in jobs {
            assert!(delivered.insert(job["id"].as_str().unwrap().to_owned()), "a second delivery: {job}");
            assert_eq!(job["payload"]["n"], 1);
        }
    }
    assert_eq!(delivered, ids);
}

#[test]
fn an_outage_of_thirty_seconds_under_leases_of_sixty_delivers_nothing_twice() {
    let redis = Redis::start("redis-7.0", &[]);
    let servers = [serve(&redis.url()), serve(&redis.url())];
    let mut client = servers[0].client();
    let ids: Vec<String> = (0..20).map(|_| submit(&mut client, r#"{"queue":"q","payload":1}"#)).collect();
    let answer = client.post("/v1/claims", r#"{"worker":"w","queues":["q"],"max":20,"lease_ms":60000}"#);
    let jobs = answer.json()["jobs"].as_array().unwrap().clone();
    assert_eq!(jobs.len(), 20);
    redis.signal("STOP");
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(30) {
        let asked = Instant::now();
        let status = client.post("/v1/claims", r#"{"worker":"x","queues":["q"]}"#).status;
        assert_eq!(status, 503, "never no work for no Redis");
        assert!(asked.elapsed() < Duration::from_secs(8), "nothing hangs");
        std::thread::sleep(Duration::from_millis(500));
    }
    redis.signal("CONT");
    until("both are back", PATIENCE, || servers.iter().all(|s| s.client().get("/readyz").status == 200));
    for server in &servers {
        let answer = server.client().post("/v1/claims", r#"{"worker":"x","queues":["q"],"max":20}"#);
        assert_eq!(answer.json()["jobs"].as_array().unwrap().len(), 0, "{}", answer.json());
    }
    for job in jobs {
        let path = format!("/v1/jobs/{}/complete", job["id"].as_str().unwrap());
        let answer = client.post(&path, format!(r#"{{"token":{}}}"#, job["token"]));
        assert_eq!(answer.status, 200, "{}", answer.json());
    }
    for id in ids {
        let job = client.get(&format!("/v1/jobs/{id}")).json();
        assert_eq!(
            (job["status"].as_str(), job["attempts"].as_array().unwrap().len()),
            (Some("succeeded"), 1),
            "{job}"
        );
    }
}

/// Workers in long polls and a client that creates, both without a pause.
struct Traffic {
    stop: Arc<AtomicBool>,
    threads: Vec<std::thread::JoinHandle<()>>,
    created: Arc<Mutex<Vec<(Instant, String)>>>,
    claimed: Arc<Mutex<Vec<(Instant, String)>>>,
    slowest_ms: Arc<AtomicU64>,
    odd: Arc<Mutex<Vec<String>>>,
}

impl Traffic {
    fn start(server: &Server) -> Traffic {
        let mut traffic = Traffic {
            stop: Arc::default(),
            threads: Vec::new(),
            created: Arc::default(),
            claimed: Arc::default(),
            slowest_ms: Arc::default(),
            odd: Arc::default(),
        };
        for n in 0..3 {
            let mut client = server.client();
            let (stop, created, claimed) = (traffic.stop.clone(), traffic.created.clone(), traffic.claimed.clone());
            let (slowest, odd) = (traffic.slowest_ms.clone(), traffic.odd.clone());
            traffic.threads.push(std::thread::spawn(move || {
                while !stop.load(Ordering::SeqCst) {
                    if n == 0 {
                        create(&mut client, &created, &slowest, &odd)
                    } else {
                        work(&mut client, &claimed, &odd)
                    }
                }
            }));
        }
        traffic
    }

    /// Waits until something created after this moment was claimed, for at most so long.
    fn flows_within(&self, what: &str, at_most: Duration) {
        let from = Instant::now();
        until(what, at_most, || {
            let created = self.created.lock().unwrap().iter().rev().take_while(|c| c.0 > from).count();
            let claimed = self.claimed.lock().unwrap().iter().rev().take_while(|c| c.0 > from).count();
            created > 0 && claimed > 0
        });
    }

    fn end(mut self) -> (usize, usize) {
        self.stop.store(true, Ordering::SeqCst);
        self.threads.drain(..).for_each(|t| t.join().unwrap());
        assert_eq!(*self.odd.lock().unwrap(), Vec::<String>::new());
        let slowest = self.slowest_ms.load(Ordering::SeqCst);
        // The bound is five seconds; the rest is for a machine with other things to do.
        assert!(slowest < 8_000, "a create took {slowest} ms");
        (self.created.lock().unwrap().len(), self.claimed.lock().unwrap().len())
    }
}

fn create(client: &mut Client, created: &Mutex<Vec<(Instant, String)>>, slowest: &AtomicU64, odd: &Mutex<Vec<String>>) {
    let began = Instant::now();
    let answer = client.post("/v1/jobs", r#"{"queue":"q","payload":1}"#);
    slowest.fetch_max(began.elapsed().as_millis() as u64, Ordering::SeqCst);
    match answer.status {
        201 => created.lock().unwrap().push((Instant::now(), answer.json()["id"].as_str().unwrap().into())),
        503 => {}
        status => odd.lock().unwrap().push(format!("a create was answered {status}")),
    }
    std::thread::sleep(Duration::from_millis(5));
}

fn work(client: &mut Client, claimed: &Mutex<Vec<(Instant, String)>>, odd: &Mutex<Vec<String>>) {
    let answer = client.post("/v1/claims", r#"{"worker":"w","queues":["q"],"max":10,"wait_ms":1000}"#);
    match answer.status {
        200 => {
            for job in answer.json()["jobs"].as_array().unwrap() {
                claimed.lock().unwrap().push((Instant::now(), job["id"].as_str().unwrap().into()));
                let path = format!("/v1/jobs/{}/complete", job["id"].as_str().unwrap());
                let status = client.post(&path, format!(r#"{{"token":{}}}"#, job["token"])).status;
                // 404 and 409: what the old primary had acknowledged and not replicated is gone.
                if !matches!(status, 200 | 404 | 409 | 503) {
                    odd.lock().unwrap().push(format!("a completion was answered {status}"));
                }
            }
        }
        503 => std::thread::sleep(Duration::from_millis(50)),
        status => odd.lock().unwrap().push(format!("a claim was answered {status}")),
    }
}

#[test]
fn c20_a_promotion_is_over_five_seconds_after_the_new_primary_takes_writes() {
    let (old, new) = (Redis::start("redis-7.0", &[]), Redis::start("redis-7.0", &[]));
    new.run(&["REPLICAOF", "127.0.0.1", &old.port.to_string()]);
    wait_for("it is a replica", || (new.info("master_link_status") == "up").then_some(()));
    // Stands for the address that moves with the primary.
    let proxy = Proxy::start(old.port);
    let server = serve(&proxy.url());
    let traffic = Traffic::start(&server);
    traffic.flows_within("before", PATIENCE);
    old.run(&["REPLICAOF", "127.0.0.1", &new.port.to_string()]);
    proxy.aim(new.port);
    // Refused by both for a while: answers must be 503 and quick.
    std::thread::sleep(Duration::from_secs(2));
    new.run(&["REPLICAOF", "NO", "ONE"]);
    // Five seconds is the bound; the same again for a machine with other things to do.
    traffic.flows_within("after the promotion", Duration::from_secs(10));
    for wording in [
        "READONLY You can't write against a read only replica.",
        "ERR READONLY You can't write against a read only replica.",
        "UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)",
    ] {
        proxy.set(Mode::Answer(wording.into()));
        until("it is refused", PATIENCE, || server.client().get("/readyz").status == 503);
        proxy.set(Mode::Pass);
        traffic.flows_within(wording, Duration::from_secs(10));
    }
    let (created, claimed) = traffic.end();
    // Before, after the promotion, and after each wording.
    assert!(created >= 5 && claimed >= 5, "{created} created, {claimed} claimed");
    let mut client = server.client();
    let id = submit(&mut client, r#"{"queue":"last","payload":1}"#);
    assert_eq!(status(&mut client, &id), "queued");
}
