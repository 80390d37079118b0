//! `harness kill`: the server is killed at random instants, while it serves and while it starts, under
//! clients and workers. Nothing that was acknowledged may be lost, nothing completed twice, and in the
//! end the books must balance.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::rng::Rng;
use crate::server::{Client, Server};

const SUBMITTERS: u64 = 8;
const WORKERS: u64 = 6;
/// Between two jobs of one submitter.
const PAUSE: Duration = Duration::from_millis(8);
/// How long the workers may take to finish what is left.
const DRAIN: Duration = Duration::from_secs(180);

#[derive(Default)]
struct Seen {
    stop_submitting: AtomicBool,
    stop: AtomicBool,
    repeats: AtomicU64,
    /// Acknowledged jobs: key to id.
    submitted: Mutex<BTreeMap<String, String>>,
    /// Acknowledged completions: id to token and result.
    completed: Mutex<BTreeMap<String, (String, String)>>,
    broken: Mutex<Vec<String>>,
}

/// What was seen.
#[derive(Debug, Default)]
pub struct Report {
    pub rounds: u64,
    pub killed_starting: u64,
    pub submitted: u64,
    pub completed: u64,
    pub repeats: u64,
    pub audited: u64,
    pub broken: Vec<String>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Seen {
    fn broken(&self, what: String) {
        lock(&self.broken).push(what);
    }

    fn call(&self, client: &mut Client, path: &str, key: Option<&str>, body: &str) -> Option<(u16, Value)> {
        let mut repeats = 0;
        let answer = client.insist("POST", path, key, body, &mut repeats);
        self.repeats.fetch_add(repeats, Ordering::Relaxed);
        match answer {
            Ok((status, body)) => Some((status, serde_json::from_slice(&body).unwrap_or(Value::Null))),
            Err(error) => {
                self.broken(error.to_string());
                None
            }
        }
    }
}

fn submitter(n: u64, address: SocketAddr, seen: &Seen) {
    let mut client = Client::new(address);
    for i in 0.. {
        if seen.stop_submitting.load(Ordering::Relaxed) {
            return;
        }
        let key = format!("{n}-{i}");
        let body = format!(r#"{{"queue":"q{}","payload":"{key}","max_attempts":1000,"max_deliveries":10000}}"#, n % 3);
        let Some((status, answer)) = seen.call(&mut client, "/v1/jobs", Some(&key), &body) else { return };
        match (status, answer["id"].as_str()) {
            (200 | 201, Some(id)) => {
                lock(&seen.submitted).insert(key, id.to_owned());
            }
            _ => seen.broken(format!("submit {key}: {status} {answer}")),
        }
        std::thread::sleep(PAUSE);
    }
}

fn worker(n: u64, seed: u64, address: SocketAddr, seen: &Seen) {
    let mut client = Client::new(address);
    let mut rng = Rng::new(seed, 100 + n);
    for i in 0.. {
        if seen.stop.load(Ordering::Relaxed) {
            return;
        }
        let body = format!(
            r#"{{"worker":"w{n}","queues":["q0","q1","q2"],"max":5,"wait_ms":100,"lease_ms":4000,"claim_id":"{n}-{i}"}}"#
        );
        let done: BTreeSet<String> = lock(&seen.completed).keys().cloned().collect();
        let Some((_, answer)) = seen.call(&mut client, "/v1/claims", None, &body) else { return };
        for job in answer["jobs"].as_array().map(Vec::as_slice).unwrap_or_default() {
            let (Some(id), Some(token)) = (job["id"].as_str(), job["token"].as_str()) else { continue };
            if done.contains(id) {
                seen.broken(format!("{id} was given out after its completion was acknowledged"));
            }
            if rng.chance(30) {
                let body = format!(r#"{{"token":"{token}","error":{{"message":"again"}},"retry_in_ms":50}}"#);
                seen.call(&mut client, &format!("/v1/jobs/{id}/fail"), None, &body);
            } else {
                complete(&mut client, seen, job, id, token, n);
            }
        }
    }
}

fn complete(client: &mut Client, seen: &Seen, job: &Value, id: &str, token: &str, n: u64) {
    let result = format!(r#"{{"of":{},"by":"w{n} {}"}}"#, job["payload"], job["delivery"]);
    let body = format!(r#"{{"token":"{token}","result":{result}}}"#);
    let Some((status, answer)) = seen.call(client, &format!("/v1/jobs/{id}/complete"), None, &body) else { return };
    match status {
        200 => {
            let earlier = lock(&seen.completed).insert(id.to_owned(), (token.to_owned(), result));
            if let Some((other, _)) = earlier.filter(|(other, _)| other != token) {
                seen.broken(format!("{id} was completed under {other} and under {token}"));
            }
        }
        409 => {}
        _ => seen.broken(format!("complete {id}: {status} {answer}")),
    }
}

/// Kills the server so many times.
///
/// # Errors
/// If it cannot be started.
pub fn kill(binary: &Path, folder: &Path, seed: u64, rounds: u64) -> std::io::Result<Report> {
    let mut rng = Rng::new(seed, 99);
    let started = |address, within| Server::start(binary, address, folder, within);
    let any: SocketAddr = ([127, 0, 0, 1], 0).into();
    let Some(mut server) = started(any, None)? else { return Err(std::io::Error::other("not started")) };
    let address = server.address;
    let seen = Seen::default();
    let mut report = Report::default();
    std::thread::scope(|scope| {
        for n in 0..SUBMITTERS {
            let seen = &seen;
            scope.spawn(move || submitter(n, address, seen));
        }
        for n in 0..WORKERS {
            let seen = &seen;
            scope.spawn(move || worker(n, seed, address, seen));
        }
        let result = (0..rounds).try_for_each(|round| {
            std::thread::sleep(Duration::from_millis(20 + rng.below(500)));
            server.kill()?;
            // Some do not live to serve.
            while rng.chance(250) {
                report.killed_starting += 1;
                started(address, Some(Duration::from_millis(rng.below(120))))?;
            }
            server = started(address, None)?.ok_or_else(|| std::io::Error::other("not started"))?;
            report.rounds += 1;
            if (round + 1) % 20 == 0 {
                let (jobs, done) = (lock(&seen.submitted).len(), lock(&seen.completed).len());
                println!("  {} rounds: {jobs} jobs and {done} completions acknowledged", round + 1);
            }
            Ok(())
        });
        seen.stop_submitting.store(true, Ordering::Relaxed);
        let result = result.and_then(|()| drained(address));
        seen.stop.store(true, Ordering::Relaxed);
        if let Err(error) = &result {
            seen.broken(error.to_string());
        }
        if rounds > report.rounds {
            // Nobody answers those that insist.
            server = started(address, None)?.ok_or_else(|| std::io::Error::other("not started"))?;
        }
        Ok::<_, std::io::Error>(server)
    })
    .and_then(|server| {
        verify(address, &seen, &mut report)?;
        drop(server);
        Ok(report)
    })
}

/// Waits until nothing is left to be run.
fn drained(address: SocketAddr) -> std::io::Result<()> {
    let mut client = Client::new(address);
    let begun = Instant::now();
    loop {
        let queues = client.json("GET", "/v1/queues")?;
        let left: u64 = queues["queues"]
            .as_array()
            .into_iter()
            .flatten()
            .flat_map(|q| ["queued", "running", "retrying", "scheduled"].map(|s| q["counts"][s].as_u64().unwrap_or(0)))
            .sum();
        if left == 0 {
            return Ok(());
        }
        if begun.elapsed() > DRAIN {
            return Err(std::io::Error::other(format!("{left} jobs are never run")));
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn verify(address: SocketAddr, seen: &Seen, report: &mut Report) -> std::io::Result<()> {
    let mut client = Client::new(address);
    let submitted = lock(&seen.submitted);
    let completed = lock(&seen.completed);
    report.submitted = submitted.len() as u64;
    report.completed = completed.len() as u64;
    report.repeats = seen.repeats.load(Ordering::Relaxed);
    report.broken.append(&mut lock(&seen.broken));
    let ids: BTreeSet<&String> = submitted.values().collect();
    if ids.len() != submitted.len() {
        report.broken.push("two keys have one job".into());
    }
    for (key, id) in submitted.iter() {
        let (status, job) = client.insist("GET", &format!("/v1/jobs/{id}"), None, "", &mut 0)?;
        let job: Value = serde_json::from_slice(&job).unwrap_or(Value::Null);
        if status != 200 || job["status"] != "succeeded" {
            report.broken.push(format!("{key} {id}: {status} {job}"));
            continue;
        }
        let (_, payload) = client.insist("GET", &format!("/v1/jobs/{id}/payload"), None, "", &mut 0)?;
        if payload != format!("\"{key}\"").into_bytes() {
            report.broken.push(format!("{key} {id}: its payload is {}", String::from_utf8_lossy(&payload)));
        }
        // The answer of the completion that won can have been lost to its worker's 409.
        if let Some((_, expected)) = completed.get(id) {
            let (_, result) = client.insist("GET", &format!("/v1/jobs/{id}/result"), None, "", &mut 0)?;
            if result != expected.as_bytes() {
                report.broken.push(format!("{key} {id}: {expected} became {}", String::from_utf8_lossy(&result)));
            }
        }
    }
    // Every job that there is, acknowledged or not, and every place in an index.
    let mut path = "/v1/audit".to_owned();
    loop {
        let page = client.json("GET", &path)?;
        report.audited += page["jobs"].as_u64().unwrap_or(0);
        let findings = page["findings"].as_array().map(Vec::as_slice).unwrap_or_default();
        report.broken.extend(findings.iter().map(|f| format!("books: {f}")));
        match page["next"].as_str() {
            Some(next) => path = format!("/v1/audit?cursor={next}"),
            None => break,
        }
    }
    if report.audited < report.submitted {
        report.broken.push(format!("the audit saw {} of {} jobs", report.audited, report.submitted));
    }
    Ok(())
}
