//! Who asks the servers: submitters, an operator, and workers of bad manners beside the well-behaved
//! processes. Every call is repeated, at one server after the other, until it is answered.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::faults::SERVERS;
use super::lock;
use crate::rng::Rng;
use crate::server::Client;

/// A server answers within five seconds, whatever happens to its store.
const ANSWER: Duration = Duration::from_secs(8);
/// A call that is not answered by then, by anyone, never is.
const PATIENCE: Duration = Duration::from_secs(180);

/// What the clients know: acknowledged, each of it.
#[derive(Debug, Default)]
pub struct Seen {
    pub no_more: AtomicBool,
    pub stop: AtomicBool,
    pub calls: AtomicU64,
    pub repeats: AtomicU64,
    /// Jobs and children, with their payload.
    pub jobs: Mutex<BTreeMap<String, String>>,
    ids: Mutex<Vec<String>>,
    /// Groups, with how many children they have been given.
    pub groups: Mutex<BTreeMap<String, u64>>,
    pub completed: Mutex<BTreeSet<String>>,
    pub cancelled: Mutex<BTreeSet<String>>,
    pub retried: Mutex<BTreeSet<String>>,
    pub deleted: Mutex<BTreeSet<String>>,
    pub broken: Mutex<Vec<String>>,
}

impl Seen {
    pub fn broken(&self, what: String) {
        lock(&self.broken).push(what);
    }

    fn job(&self, id: &str, payload: &str) {
        match lock(&self.jobs).insert(id.into(), payload.into()) {
            None => lock(&self.ids).push(id.into()),
            Some(other) if other != payload => self.broken(format!("{id} is {payload}, and is {other}")),
            Some(_) => {}
        }
    }

    fn any(&self, rng: &mut Rng) -> Option<String> {
        let ids = lock(&self.ids);
        ids.get(rng.below(ids.len() as u64) as usize).cloned()
    }

    fn going(&self) -> bool {
        !self.no_more.load(Ordering::Relaxed)
    }
}

/// A client of all servers.
#[derive(Debug)]
pub struct Caller<'a> {
    clients: Vec<Client>,
    at: usize,
    seen: &'a Seen,
}

impl<'a> Caller<'a> {
    pub fn new(addresses: &[SocketAddr; SERVERS], first: usize, seen: &'a Seen) -> Caller<'a> {
        let clients = addresses.iter().map(|a| Client::with_timeout(*a, ANSWER)).collect();
        Caller { clients, at: first % SERVERS, seen }
    }

    /// Repeated until it is answered with something else than "later".
    pub fn insist(&mut self, method: &str, path: &str, key: Option<&str>, body: &str) -> Option<(u16, Value)> {
        let begun = Instant::now();
        while begun.elapsed() < PATIENCE {
            self.seen.calls.fetch_add(1, Ordering::Relaxed);
            let client = self.clients.get_mut(self.at)?;
            match client.send(method, path, key, body) {
                Ok((status, body)) if !matches!(status, 429 | 503) => {
                    return Some((status, serde_json::from_slice(&body).unwrap_or(Value::Null)));
                }
                _ => {
                    self.seen.repeats.fetch_add(1, Ordering::Relaxed);
                    self.at = (self.at + 1) % SERVERS;
                    std::thread::sleep(Duration::from_millis(30));
                }
            }
        }
        self.seen.broken(format!("{method} {path} was not answered in {} s", PATIENCE.as_secs()));
        None
    }

    fn post(&mut self, path: &str, body: &str) -> Option<(u16, Value)> {
        self.insist("POST", path, None, body)
    }
}

/// Fields of a job, drawn once: a repeat must be the same.
fn fields(rng: &mut Rng, name: &str) -> (String, String) {
    let (how, more) = match rng.below(100) {
        0..=9 => ("again", ""),
        10..=14 => ("never", ""),
        15..=20 => ("long", ""),
        21..=22 => ("endless", r#","run_timeout_ms":2500"#),
        _ => ("well", ""),
    };
    let payload = format!(r#"{{"n":"{name}","how":"{how}"}}"#);
    let mut fields = format!(r#""payload":{payload},"max_attempts":4,"backoff":{{"base_ms":100,"max_ms":1000}}{more}"#);
    if rng.chance(150) {
        fields.push_str(r#","retention_ms":1000"#);
    }
    if rng.chance(50) {
        fields.push_str(r#","queue_ttl_ms":700"#);
    }
    (payload, fields)
}

fn home(rng: &mut Rng) -> String {
    let class = ["interactive", "system", "batch"][rng.below(3) as usize];
    format!(r#""queue":"q{}","class":"{class}""#, rng.below(3))
}

fn job(rng: &mut Rng, name: &str) -> (String, String) {
    let (payload, fields) = fields(rng, name);
    let delay = if rng.chance(200) { format!(r#","delay_ms":{}"#, rng.below(3_000)) } else { String::new() };
    (payload, format!("{},{fields}{delay}", home(rng)))
}

pub fn submitter(n: usize, seed: u64, mut caller: Caller<'_>, seen: &Seen) {
    let mut rng = Rng::new(seed, 100 + n as u64);
    let mut i = 0;
    while seen.going() {
        i += 1;
        let name = format!("s{n}-{i}");
        let done = match rng.below(10) {
            0..=5 => single(&mut rng, &mut caller, seen, &name),
            6..=7 => batch(&mut rng, &mut caller, seen, &name),
            _ => group(&mut rng, &mut caller, seen, &name),
        };
        if done.is_none() {
            return;
        }
        std::thread::sleep(Duration::from_millis(200 + rng.below(1_800)));
    }
}

fn single(rng: &mut Rng, caller: &mut Caller<'_>, seen: &Seen, name: &str) -> Option<()> {
    let (payload, fields) = job(rng, name);
    let (status, answer) = caller.insist("POST", "/v1/jobs", Some(name), &format!("{{{fields}}}"))?;
    match (status, answer["id"].as_str()) {
        (200 | 201, Some(id)) => seen.job(id, &payload),
        _ => seen.broken(format!("submit {name}: {status} {answer}")),
    }
    Some(())
}

fn batch(rng: &mut Rng, caller: &mut Caller<'_>, seen: &Seen, name: &str) -> Option<()> {
    let items = 2 + rng.below(18);
    let jobs: Vec<_> = (0..items).map(|k| job(rng, &format!("{name}-{k}"))).collect();
    let mut left: Vec<usize> = (0..jobs.len()).collect();
    while !left.is_empty() {
        let item = |k: &usize| format!(r#"{{"idempotency_key":"{name}-{k}",{}}}"#, jobs[*k].1);
        let body = format!(r#"{{"jobs":[{}]}}"#, left.iter().map(item).collect::<Vec<_>>().join(","));
        let (status, answer) = caller.post("/v1/jobs:batch", &body)?;
        let results = answer["results"].as_array().cloned().unwrap_or_default();
        if status != 200 || results.len() != left.len() {
            seen.broken(format!("batch {name}: {status} {answer}"));
            return Some(());
        }
        // Each item is its own transaction: those that have to come again do.
        left = left
            .into_iter()
            .zip(results)
            .filter_map(|(k, result)| match (result["status"].as_u64(), result["job"]["id"].as_str()) {
                (Some(200 | 201), Some(id)) => {
                    seen.job(id, &jobs[k].0);
                    None
                }
                (Some(429 | 503), _) => Some(k),
                _ => {
                    seen.broken(format!("batch {name}-{k}: {result}"));
                    None
                }
            })
            .collect();
    }
    Some(())
}

/// A group, in one call or by pages; some are cancelled.
fn group(rng: &mut Rng, caller: &mut Caller<'_>, seen: &Seen, name: &str) -> Option<()> {
    let pages = if rng.chance(500) { 1 } else { 2 + rng.below(3) };
    let mode = if rng.chance(300) { "fail_fast" } else { "collect_all" };
    let parallel = 1 + rng.below(5);
    let page = |rng: &mut Rng, p: u64| -> Vec<(String, String)> {
        let children = 1 + rng.below(14);
        (0..children).map(|k| fields(rng, &format!("{name}-{p}-{k}"))).collect()
    };
    let list = |children: &[(String, String)]| {
        // A child's retention is its group's.
        let child = |c: &(String, String)| format!("{{{}}}", c.1.replace(r#","retention_ms":1000"#, ""));
        children.iter().map(child).collect::<Vec<_>>().join(",")
    };
    let first = page(rng, 0);
    let body = format!(
        r#"{{{},"max_parallel":{parallel},"mode":"{mode}","sealed":{},"children":[{}]}}"#,
        home(rng),
        pages == 1,
        list(&first)
    );
    let (status, answer) = caller.insist("POST", "/v1/groups", Some(name), &body)?;
    let (200 | 201, Some(id)) = (status, answer["id"].as_str().map(str::to_owned)) else {
        seen.broken(format!("group {name}: {status} {answer}"));
        return Some(());
    };
    let mut filled = 0;
    let mut add = |children: Vec<(String, String)>| {
        for (payload, _) in children {
            seen.job(&format!("{id}-{filled:07}"), &payload);
            filled += 1;
        }
        lock(&seen.groups).insert(id.clone(), filled);
        filled
    };
    let mut from = add(first);
    for p in 1..pages {
        let children = page(rng, p);
        let body = format!(r#"{{"from":{from},"children":[{}]}}"#, list(&children));
        let (status, answer) = caller.post(&format!("/v1/groups/{id}/children"), &body)?;
        match (status, answer["code"].as_str()) {
            (200, _) => from = add(children),
            // It was stopped by a dead child.
            (409, Some("not_open")) => return Some(()),
            _ => seen.broken(format!("page {p} of {id}: {status} {answer}")),
        }
    }
    let last = if rng.chance(100) { "cancel" } else { "seal" };
    if pages > 1 || last == "cancel" {
        let (status, answer) = caller.post(&format!("/v1/groups/{id}/{last}"), "")?;
        if !matches!((status, answer["code"].as_str()), (200, _) | (409, Some("already_terminal" | "not_open"))) {
            seen.broken(format!("{last} of {id}: {status} {answer}"));
        }
    }
    Some(())
}

/// Cancels, retries, deletes; pauses queues for a moment.
pub fn operator(seed: u64, mut caller: Caller<'_>, seen: &Seen) {
    let mut rng = Rng::new(seed, 200);
    while seen.going() {
        std::thread::sleep(Duration::from_millis(200 + rng.below(1_500)));
        if operate(&mut rng, &mut caller, seen).is_none() {
            return;
        }
    }
}

fn operate(rng: &mut Rng, caller: &mut Caller<'_>, seen: &Seen) -> Option<()> {
    let Some(id) = seen.any(rng) else { return Some(()) };
    let (method, path, done) = match rng.below(10) {
        0..=2 => ("POST", format!("/v1/jobs/{id}/cancel"), Some(&seen.cancelled)),
        3..=5 => ("POST", format!("/v1/jobs/{id}/retry"), Some(&seen.retried)),
        6 => ("DELETE", format!("/v1/jobs/{id}"), Some(&seen.deleted)),
        7..=8 => ("GET", format!("/v1/jobs/{id}/why"), None),
        _ => {
            let queue = rng.below(3);
            caller.post(&format!("/v1/queues/q{queue}/pause"), r#"{"reason":"for a moment"}"#)?;
            std::thread::sleep(Duration::from_millis(rng.below(1_500)));
            caller.post(&format!("/v1/queues/q{queue}/resume"), "")?;
            return Some(());
        }
    };
    let (status, answer) = caller.insist(method, &path, None, "")?;
    match (status, done) {
        (200 | 204, Some(done)) => {
            lock(done).insert(id);
        }
        // Final or not, or its retention is over.
        (200 | 404 | 409, _) => {}
        _ => seen.broken(format!("{method} {path}: {status} {answer}")),
    }
    Some(())
}

/// A worker that forgets, comes late, asks twice and tells wrong tokens.
pub fn rude(n: usize, seed: u64, mut caller: Caller<'_>, seen: &Seen) {
    let mut rng = Rng::new(seed, 300 + n as u64);
    let mut i = 0;
    while !seen.stop.load(Ordering::Relaxed) {
        i += 1;
        let claim = format!(
            r#"{{"worker":"rude-{n}","queues":["q0","q1","q2"],"max":3,"lease_ms":1000,"claim_id":"{seed}-{n}-{i}"}}"#
        );
        let done = lock(&seen.completed).clone();
        let Some((status, answer)) = caller.post("/v1/claims", &claim) else { return };
        if status != 200 {
            seen.broken(format!("claim: {status} {answer}"));
        }
        for job in answer["jobs"].as_array().map(Vec::as_slice).unwrap_or_default() {
            let (Some(id), Some(token)) = (job["id"].as_str(), job["token"].as_str()) else { continue };
            if done.contains(id) {
                seen.broken(format!("{id} was handed out after its completion was acknowledged"));
            }
            if treat(&mut rng, &mut caller, seen, id, token, &job["payload"]).is_none() {
                return;
            }
        }
        std::thread::sleep(Duration::from_millis(300 + rng.below(1_000)));
    }
}

fn treat(rng: &mut Rng, caller: &mut Caller<'_>, seen: &Seen, id: &str, token: &str, payload: &Value) -> Option<()> {
    let path = |call: &str| format!("/v1/jobs/{id}/{call}");
    let held = format!(r#""token":"{token}""#);
    let (call, body) = match rng.below(10) {
        0 => return Some(()),
        1 => ("fail", format!(r#"{{{held},"error":{{"message":"no"}},"retry_in_ms":50}}"#)),
        2 => ("release", format!("{{{held}}}")),
        3 => ("heartbeat", format!(r#"{{{held},"progress":{{"done":1}}}}"#)),
        4 => {
            std::thread::sleep(Duration::from_millis(1_300));
            ("complete", format!(r#"{{{held},"result":{payload}}}"#))
        }
        5 => {
            // Of another lease: the last digits are its check.
            let (rest, last) = token.split_at(token.len().saturating_sub(1));
            let wrong = format!(r#"{{"token":"{rest}{}","result":1}}"#, if last == "0" { "1" } else { "0" });
            let (status, answer) = caller.post(&path("complete"), &wrong)?;
            if !matches!(status, 404 | 409) {
                seen.broken(format!("{id} was completed with a token that is none: {status} {answer}"));
            }
            return Some(());
        }
        _ => ("complete", format!(r#"{{{held},"result":{payload}}}"#)),
    };
    let (status, answer) = caller.post(&path(call), &body)?;
    if !matches!(status, 200 | 404 | 409) {
        seen.broken(format!("{call} {id}: {status} {answer}"));
    }
    if call == "complete" && status == 200 {
        lock(&seen.completed).insert(id.into());
        let (status, answer) = caller.post(&path(call), &body)?;
        if !matches!(status, 200 | 404) {
            seen.broken(format!("{id} was completed, and its repeat is told {status} {answer}"));
        }
    }
    Some(())
}
