//! Random bodies for every call that takes one: no answer may say that the server failed, and its memory
//! must not grow with what it refuses.

use std::io::{Error, Result};
use std::net::SocketAddr;
use std::path::Path;

use serde_json::Value;

use crate::rng::Rng;
use crate::server::{Client, Server};

const CLIENTS: u64 = 4;
/// Bytes that are JSON more often than chance would have it.
const PIECES: [&str; 24] = [
    "{",
    "}",
    "[",
    "]",
    ":",
    ",",
    "\"",
    "\\u0000",
    "null",
    "true",
    "-1",
    "1e400",
    "0.5",
    "18446744073709551616",
    "\"queue\"",
    "\"payload\"",
    "\"jobs\"",
    "\"token\"",
    "\"worker\"",
    "\"queues\"",
    "\"children\"",
    "\"max_parallel\"",
    "\"\u{fffd}\"",
    " ",
];
/// Bodies that are well formed, to be spoilt at random places.
const WELL_FORMED: [&str; 7] = [
    r#"{"queue":"q","payload":{"a":[1,2,3]},"max_attempts":3,"delay_ms":10}"#,
    r#"{"jobs":[{"queue":"q","payload":1},{"queue":"r","payload":"x"}]}"#,
    r#"{"worker":"w","queues":["q","r"],"max":5,"wait_ms":0}"#,
    r#"{"token":"1-2-3","result":{"ok":true}}"#,
    r#"{"token":"1-2-3","error":{"message":"no","type":"E"},"retryable":true}"#,
    r#"{"queue":"q","max_parallel":2,"children":[{"payload":1},{"payload":2}],"mode":"fail_fast"}"#,
    r#"{"children":[{"payload":1}],"from":0}"#,
];

#[derive(Debug, Default)]
pub struct Report {
    /// Calls by the hundred of their status.
    pub answers: [u64; 6],
    pub endpoints: usize,
    /// KiB of the server that are resident: after a tenth of the bodies, after half, at the end.
    pub memory: [u64; 3],
    pub broken: Vec<String>,
}

/// # Errors
/// If the server does not start, or ends.
pub fn bodies(binary: &Path, folder: &Path, seed: u64, total: u64) -> Result<Report> {
    let any = SocketAddr::from(([127, 0, 0, 1], 0));
    let Some(server) = Server::start(binary, any, folder, None)? else { return Err(Error::other("no server")) };
    let mut client = Client::new(server.address);
    let (_, answer) = client.send("POST", "/v1/jobs", None, r#"{"queue":"q","payload":1}"#)?;
    let job: Value = serde_json::from_slice(&answer).map_err(Error::other)?;
    let (_, answer) = client.send("POST", "/v1/groups", None, r#"{"queue":"q","sealed":false}"#)?;
    let group: Value = serde_json::from_slice(&answer).map_err(Error::other)?;
    let calls = calls(&client.json("GET", "/openapi.json")?, &job, &group);
    let mut report = Report { endpoints: calls.len(), ..Report::default() };
    let shares = [total / 10, total / 2 - total / 10, total - total / 2];
    for (n, share) in shares.into_iter().enumerate() {
        let results: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..CLIENTS)
                .map(|c| {
                    let rng = Rng::new(seed, n as u64 * CLIENTS + c);
                    let (calls, address) = (&calls, server.address);
                    scope.spawn(move || send(address, calls, rng, share.div_ceil(CLIENTS)))
                })
                .collect();
            threads.into_iter().map(std::thread::ScopedJoinHandle::join).collect()
        });
        for result in results {
            let (answers, broken) = result.map_err(|_| Error::other("a client panicked"))?;
            report.answers.iter_mut().zip(answers).for_each(|(all, n)| *all += n);
            report.broken.extend(broken);
        }
        if let Some(kib) = report.memory.get_mut(n) {
            *kib = server.resident_kib()?;
        }
    }
    let (status, _) = client.send("GET", "/readyz", None, "")?;
    if status != 200 {
        report.broken.push(format!("/readyz says {status} afterwards"));
    }
    Ok(report)
}

/// Every call of the description that takes a body: method and path, with ids of what there is.
fn calls(openapi: &Value, job: &Value, group: &Value) -> Vec<(String, String)> {
    let mut calls = Vec::new();
    let id = |of: &Value| of.get("id").and_then(Value::as_str).unwrap_or_default().to_owned();
    for (path, methods) in openapi.get("paths").and_then(Value::as_object).into_iter().flatten() {
        let own = if path.contains("/groups/") { id(group) } else { id(job) };
        let real: Vec<&str> =
            path.split('/').map(|part| if part.starts_with('{') { own.as_str() } else { part }).collect();
        for (method, call) in methods.as_object().into_iter().flatten() {
            if call.get("requestBody").is_some() {
                calls.push((method.to_ascii_uppercase(), real.join("/")));
            }
        }
    }
    calls
}

fn send(address: SocketAddr, calls: &[(String, String)], mut rng: Rng, n: u64) -> ([u64; 6], Vec<String>) {
    let mut client = Client::new(address);
    let (mut answers, mut broken) = ([0; 6], Vec::new());
    for _ in 0..n {
        let Some((method, path)) = calls.get(rng.below(calls.len() as u64) as usize) else { break };
        let body = body(&mut rng);
        match client.send_bytes(method, path, None, &body) {
            Ok((status, answer)) => {
                if let Some(count) = answers.get_mut(usize::from(status / 100)) {
                    *count += 1;
                }
                if !(200..500).contains(&status) {
                    let (sent, said) = (String::from_utf8_lossy(&body), String::from_utf8_lossy(&answer));
                    broken.push(format!("{method} {path} {sent:?}: {status} {said}"));
                }
            }
            Err(error) => {
                let sent = String::from_utf8_lossy(&body);
                broken.push(format!("{method} {path} {sent:?}: not answered: {error}"));
            }
        }
        if broken.len() > 5 {
            break;
        }
    }
    (answers, broken)
}

fn body(rng: &mut Rng) -> Vec<u8> {
    let pick =
        |rng: &mut Rng, of: &[&'static str]| of.get(rng.below(of.len() as u64) as usize).copied().unwrap_or_default();
    match rng.below(5) {
        0 => (0..rng.below(2_000)).map(|_| rng.next() as u8).collect(),
        1 => (0..rng.below(60)).flat_map(|_| pick(rng, &PIECES).bytes()).collect(),
        // Deep, and never closed or closed too often.
        2 => {
            let (open, depth) = (pick(rng, &["[", "{\"a\":", "{\"payload\":["]), rng.below(3_000) as usize);
            let close = "]".repeat(rng.below(3_000) as usize);
            format!("{}{close}", open.repeat(depth)).into_bytes()
        }
        _ => {
            let mut body = pick(rng, &WELL_FORMED).as_bytes().to_vec();
            for _ in 0..=rng.below(4) {
                let at = rng.below(body.len() as u64) as usize;
                match (rng.below(4), body.get_mut(at)) {
                    (0, Some(byte)) => *byte = rng.next() as u8,
                    (1, Some(_)) => body.truncate(at),
                    (2, Some(_)) => body.splice(at..at, pick(rng, &PIECES).bytes()).for_each(drop),
                    (_, Some(_)) => body.splice(at..=at, None).for_each(drop),
                    (_, None) => {}
                }
            }
            body
        }
    }
}
