//! Goal: `kill -9` at any time loses nothing that was acknowledged. Ten times, under 16 clients that
//! submit and 8 workers that claim and complete: every acknowledged job is there with its payload,
//! and no acknowledged completion is undone or run again.

#![allow(clippy::unwrap_used, clippy::panic)]

mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde_json::Value;
use support::{Answer, Client, Folder, Server, until};

const KILLS: u64 = 10;
const SUBMITTERS: usize = 16;
const WORKERS: usize = 8;

#[derive(Default)]
struct Seen {
    stop_submitting: AtomicBool,
    stop: AtomicBool,
    /// Calls that had to be repeated: without any, the test has shown nothing.
    repeats: AtomicU64,
    /// Acknowledged jobs: key to id.
    submitted: Mutex<BTreeMap<String, String>>,
    /// Acknowledged completions: id to token and result.
    completed: Mutex<BTreeMap<String, (String, String)>>,
    violations: Mutex<Vec<String>>,
}

impl Seen {
    fn violation(&self, what: String) {
        self.violations.lock().unwrap().push(what);
    }
}

/// Repeats a call until it is answered with something else than "later".
fn insist(client: &mut Client, seen: &Seen, path: &str, headers: &[(&str, &str)], body: &str) -> Option<Answer> {
    let begun = Instant::now();
    loop {
        match client.try_send("POST", path, headers, body.as_bytes()) {
            Ok(answer) if !matches!(answer.status, 429 | 503) => return Some(answer),
            _ if begun.elapsed() > Duration::from_secs(60) => {
                seen.violation(format!("{path} was never answered"));
                return None;
            }
            _ => {
                seen.repeats.fetch_add(1, Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(20));
            }
        }
    }
}

fn submitter(n: usize, address: SocketAddr, seen: &Seen) {
    let mut client = Client::new(address);
    client.timeout = Duration::from_secs(10);
    for i in 0.. {
        if seen.stop_submitting.load(Ordering::Relaxed) {
            return;
        }
        let key = format!("{n}-{i}");
        let body = format!(r#"{{"queue":"q","payload":"{key}","max_attempts":100}}"#);
        let Some(answer) = insist(&mut client, seen, "/v1/jobs", &[("idempotency-key", &key)], &body) else { return };
        match (answer.status, answer.json()["id"].as_str()) {
            (200 | 201, Some(id)) => {
                seen.submitted.lock().unwrap().insert(key, id.to_owned());
            }
            other => seen.violation(format!("submit {key}: {other:?} {}", answer.json())),
        }
        std::thread::sleep(Duration::from_millis(4));
    }
}

fn worker(n: usize, address: SocketAddr, seen: &Seen) {
    let mut client = Client::new(address);
    client.timeout = Duration::from_secs(10);
    for i in 0.. {
        if seen.stop.load(Ordering::Relaxed) {
            return;
        }
        let claim =
            format!(r#"{{"worker":"w{n}","queues":["q"],"max":5,"wait_ms":200,"lease_ms":5000,"claim_id":"{n}-{i}"}}"#);
        let done_before: BTreeSet<String> = seen.completed.lock().unwrap().keys().cloned().collect();
        let Some(answer) = insist(&mut client, seen, "/v1/claims", &[], &claim) else { return };
        let answer = answer.json();
        for job in answer["jobs"].as_array().map(Vec::as_slice).unwrap_or_default() {
            let (id, token) = (job["id"].as_str().unwrap(), job["token"].as_str().unwrap());
            if done_before.contains(id) {
                seen.violation(format!("{id} was given out after its completion was acknowledged"));
            }
            complete(&mut client, seen, job, id, token, n);
        }
    }
}

fn complete(client: &mut Client, seen: &Seen, job: &Value, id: &str, token: &str, n: usize) {
    let result = format!(r#"{{"of":{},"by":"w{n} {}"}}"#, job["payload"], job["delivery"]);
    let body = format!(r#"{{"token":"{token}","result":{result}}}"#);
    let Some(answer) = insist(client, seen, &format!("/v1/jobs/{id}/complete"), &[], &body) else { return };
    match answer.status {
        200 => {
            let earlier = seen.completed.lock().unwrap().insert(id.to_owned(), (token.to_owned(), result));
            if let Some((other, _)) = earlier.filter(|(other, _)| other != token) {
                seen.violation(format!("{id} was completed under {other} and under {token}"));
            }
        }
        409 => {}
        other => seen.violation(format!("complete {id}: {other} {}", answer.json())),
    }
}

#[test]
fn ten_times_killed_nothing_lost() {
    let folder = Folder::new();
    let mut server = Server::start(&folder, &[]);
    let address = server.address;
    let seen = Seen::default();
    std::thread::scope(|scope| {
        for n in 0..SUBMITTERS {
            let seen = &seen;
            scope.spawn(move || submitter(n, address, seen));
        }
        for n in 0..WORKERS {
            let seen = &seen;
            scope.spawn(move || worker(n, address, seen));
        }
        for round in 0..KILLS {
            // Not always at the same point of whatever has a rhythm.
            std::thread::sleep(Duration::from_millis(400 + round * 73 % 300));
            server.kill();
            server = Server::at(address, &folder, &[]);
        }
        std::thread::sleep(Duration::from_millis(500));
        seen.stop_submitting.store(true, Ordering::Relaxed);
        let mut client = Client::new(address);
        let mut left = || {
            let queue = client.get("/v1/queues/q").json();
            ["queued", "running", "retrying"].iter().filter_map(|s| queue["counts"][s].as_u64()).sum::<u64>()
        };
        let begun = Instant::now();
        while left() > 0 && begun.elapsed() < Duration::from_secs(90) {
            std::thread::sleep(Duration::from_millis(100));
        }
        seen.stop.store(true, Ordering::Relaxed);
    });
    let mut client = Client::new(address);
    let submitted = seen.submitted.lock().unwrap();
    let completed = seen.completed.lock().unwrap();
    let mut violations = seen.violations.lock().unwrap().clone();
    let ids: BTreeSet<&String> = submitted.values().collect();
    if ids.len() != submitted.len() {
        violations.push("two keys have one job".into());
    }
    for (key, id) in submitted.iter() {
        let job = client.get(&format!("/v1/jobs/{id}"));
        if job.status != 200 || job.json()["status"] != "succeeded" {
            violations.push(format!("{key} {id}: {} {}", job.status, job.json()));
            continue;
        }
        let payload = client.get(&format!("/v1/jobs/{id}/payload")).body;
        if payload != format!("\"{key}\"").into_bytes() {
            violations.push(format!("{key} {id}: its payload is {}", String::from_utf8_lossy(&payload)));
        }
        let result = client.get(&format!("/v1/jobs/{id}/result")).body;
        // The answer of the winning completion can itself have been lost to its worker's 409.
        if let Some((_, expected)) = completed.get(id)
            && result != expected.as_bytes()
        {
            violations.push(format!("{key} {id}: {expected} became {}", String::from_utf8_lossy(&result)));
        }
    }
    let repeats = seen.repeats.load(Ordering::Relaxed);
    println!("{} jobs, {} completions acknowledged, {repeats} calls repeated", submitted.len(), completed.len());
    assert!(violations.is_empty(), "{} violations: {:#?}", violations.len(), &violations[..violations.len().min(20)]);
    assert!(submitted.len() > 500 && completed.len() > 500 && repeats > 50, "too little happened");
    until("the server still ends in order", Duration::from_secs(1), || client.get("/readyz").status == 200);
}
