//! Goal: a restart is no event for a client that repeats what is answered 503 and what cannot
//! connect. Five times SIGTERM under 16 clients that submit and 8 workers that claim and complete: each
//! time the server ends with 0 within its grace, no call that was sent is left without an answer, no
//! job is lost, and none is run twice.

#![allow(clippy::unwrap_used, clippy::panic)]

mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{SocketAddr, TcpListener};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value;
use support::{Answer, Client, Folder, Server, until};

const RESTARTS: usize = 5;
const GRACE: Duration = Duration::from_secs(20);
const SUBMITTERS: usize = 16;
const WORKERS: usize = 8;

#[derive(Default)]
struct Seen {
    stop_submitting: AtomicBool,
    stop: AtomicBool,
    /// Calls that were answered 503, and connects that were refused.
    draining: AtomicU64,
    refused: AtomicU64,
    submitted: Mutex<BTreeSet<String>>,
    /// How often each job was run.
    runs: Mutex<BTreeMap<String, u64>>,
    errors: Mutex<Vec<String>>,
}

impl Seen {
    fn error(&self, what: String) {
        self.errors.lock().unwrap().push(what);
    }
}

/// Connects and calls until the answer is not 503. Everything else that goes wrong is an error.
fn insist(client: &mut Client, seen: &Seen, path: &str, body: &str) -> Option<Answer> {
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(120) {
        if client.connect().is_err() {
            seen.refused.fetch_add(1, Ordering::Relaxed);
            std::thread::sleep(Duration::from_millis(50));
            continue;
        }
        match client.try_send("POST", path, &[("content-type", "application/json")], body.as_bytes()) {
            Ok(answer) if answer.status == 503 => {
                seen.draining.fetch_add(1, Ordering::Relaxed);
                let wait = answer.header("retry-after").and_then(|s| s.parse().ok()).unwrap_or(0);
                assert!(wait > 0, "{}", answer.json());
                std::thread::sleep(Duration::from_secs(wait));
            }
            Ok(answer) => return Some(answer),
            Err(error) => {
                seen.error(format!("{path} {body}: {error}"));
                return None;
            }
        }
    }
    seen.error(format!("{path} was never answered"));
    None
}

fn submitter(n: usize, address: SocketAddr, seen: &Seen) {
    let mut client = Client::new(address);
    for i in 0.. {
        if seen.stop_submitting.load(Ordering::Relaxed) {
            return;
        }
        // No key: a call that was done and not answered, or done twice, would show.
        let body = format!(r#"{{"queue":"q","payload":"{n}-{i}","max_attempts":1}}"#);
        let Some(answer) = insist(&mut client, seen, "/v1/jobs", &body) else { return };
        if answer.status != 201 {
            return seen.error(format!("submit: {} {}", answer.status, answer.json()));
        }
        seen.submitted.lock().unwrap().insert(answer.json()["id"].as_str().unwrap().to_owned());
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn worker(n: usize, address: SocketAddr, seen: &Seen) {
    let mut client = Client::new(address);
    let claim = format!(r#"{{"worker":"w{n}","queues":["q"],"max":4,"wait_ms":500,"lease_ms":60000}}"#);
    while !seen.stop.load(Ordering::Relaxed) {
        let Some(answer) = insist(&mut client, seen, "/v1/claims", &claim) else { return };
        let jobs: Vec<Value> = answer.json()["jobs"].as_array().cloned().unwrap_or_default();
        for job in &jobs {
            let id = job["id"].as_str().unwrap();
            *seen.runs.lock().unwrap().entry(id.to_owned()).or_default() += 1;
            let body = format!(r#"{{"token":{},"result":{n}}}"#, job["token"]);
            let Some(done) = insist(&mut client, seen, &format!("/v1/jobs/{id}/complete"), &body) else { return };
            if done.status != 200 {
                seen.error(format!("complete {id}: {} {}", done.status, done.json()));
            }
        }
    }
}

/// Below the ports that the system gives to clients: a client that connects to a port on which nobody
/// listens could otherwise be connected to itself.
fn free_port() -> SocketAddr {
    let first = 20_000 + u16::try_from(std::process::id() % 10_000).unwrap();
    (first..first + 1_000)
        .map(|port| SocketAddr::from(([127, 0, 0, 1], port)))
        .find(|address| TcpListener::bind(address).is_ok())
        .unwrap()
}

#[test]
fn five_restarts_under_load_are_no_event() {
    let folder = Folder::new();
    let address = free_port();
    let seen = Seen::default();
    let mut took = Vec::new();
    std::thread::scope(|scope| {
        let mut server = Server::at(address, &folder, &[]);
        let seen = &seen;
        let submitters: Vec<_> = (0..SUBMITTERS).map(|n| scope.spawn(move || submitter(n, address, seen))).collect();
        let workers: Vec<_> = (0..WORKERS).map(|n| scope.spawn(move || worker(n, address, seen))).collect();
        let submitted = || seen.submitted.lock().unwrap().len();
        for _ in 0..RESTARTS {
            let before = submitted();
            until("the load goes on", Duration::from_secs(60), || {
                submitted() > before + 200 || !seen.errors.lock().unwrap().is_empty()
            });
            let begun = Instant::now();
            server.signal(Signal::TERM);
            assert!(server.wait(GRACE).success(), "ended with 0 within the grace");
            took.push(begun.elapsed().as_millis());
            server = Server::at(address, &folder, &[]);
        }
        seen.stop_submitting.store(true, Ordering::Relaxed);
        submitters.into_iter().for_each(|t| t.join().unwrap());
        until("every job has been run", Duration::from_secs(120), || {
            seen.runs.lock().unwrap().len() >= submitted() || !seen.errors.lock().unwrap().is_empty()
        });
        seen.stop.store(true, Ordering::Relaxed);
        workers.into_iter().for_each(|t| t.join().unwrap());
        let queue = server.client().get("/v1/queues/q").json();
        let succeeded = queue["counts"]["succeeded"].as_u64().unwrap();
        let submitted = submitted();
        println!(
            "{RESTARTS} restarts in {took:?} ms: {submitted} submitted, {succeeded} succeeded, {} answered 503, {} \
             connects refused",
            seen.draining.load(Ordering::Relaxed),
            seen.refused.load(Ordering::Relaxed)
        );
        assert_eq!(*seen.errors.lock().unwrap(), Vec::<String>::new());
        assert_eq!(succeeded, submitted as u64, "each job that was acknowledged has succeeded, and there is no other");
        let runs = seen.runs.lock().unwrap();
        assert!(runs.values().all(|n| *n == 1), "none was run twice");
        assert!(runs.keys().eq(seen.submitted.lock().unwrap().iter()));
        assert!(seen.draining.load(Ordering::Relaxed) > 0, "without any, the test has shown nothing");
    });
}
