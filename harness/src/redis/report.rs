//! What is looked at in the end: the books, payloads and results, what the servers count, their own
//! audit, and every key in the Redis.

use std::io::Result;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::clients::{Caller, Seen};
use super::events::Books;
use super::resp::Connection;
use super::{Options, World, lock, records};
use crate::server::Client;

/// Closes the books, ends the servers, audits what is left, prints all of it; returns what is broken.
///
/// # Errors
/// If it cannot be looked at.
pub fn report(mut world: World, seen: &Seen, mut books: Books, options: &Options) -> Result<Vec<String>> {
    let mut redis = Connection::open(world.port, Duration::from_secs(60))?;
    let summary = books.close(seen);
    let mut broken = std::mem::take(&mut *lock(&seen.broken));
    broken.append(&mut books.broken);
    let results = verify(&world, seen, &mut broken);
    counted(&world, seen, &mut redis, &mut broken)?;
    let own = own_audit(&world, &options.leasehold, &mut broken)?;
    for server in &mut world.servers {
        if let Err(error) = server.end() {
            broken.push(error.to_string());
        }
    }
    let dump = super::dump::dump(&mut redis)?;
    let mut audited = super::audit::audit(&dump);
    broken.append(&mut audited.broken);
    let panics = panics(&options.folder, &mut broken)?;

    let count = |n: &std::sync::atomic::AtomicU64| n.load(Ordering::Relaxed);
    println!("faults                   {}", world.faults.values().sum::<u64>());
    for (name, n) in &world.faults {
        println!("  {name:<22} {n}");
    }
    println!("calls                    {}, {} of them repeats", count(&seen.calls), count(&seen.repeats));
    println!(
        "acknowledged             {} jobs, {} groups; {} completions by the rude",
        lock(&seen.jobs).len(),
        lock(&seen.groups).len(),
        lock(&seen.completed).len()
    );
    println!(
        "the operator             {} cancelled, {} retried, {} deleted",
        lock(&seen.cancelled).len(),
        lock(&seen.retried).len(),
        lock(&seen.deleted).len()
    );
    println!(
        "the books                {} events: {} jobs in {} deliveries, {} leases lapsed; {} groups",
        summary.events, summary.jobs, summary.deliveries, summary.lapsed, summary.groups
    );
    for (kind, n) in &summary.ended {
        println!("  {kind:<22} {n}");
    }
    println!("results compared         {results}");
    println!("leasehold audit          {own}");
    println!(
        "keys in the redis        {}: {} jobs, {} groups, {} other records, {} expired; {} entries in {} indexes",
        dump.keys,
        audited.jobs,
        audited.groups,
        audited.companions,
        dump.expired,
        audited.entries,
        dump.indexes.len()
    );
    println!("panics                   {panics}");
    Ok(broken)
}

/// The same JSON: who reads and writes it may order its fields.
fn same(body: &[u8], payload: &str) -> bool {
    let read = serde_json::from_slice::<serde_json::Value>(body).ok();
    read.is_some() && read == serde_json::from_str(payload).ok()
}

/// Payload and result of what succeeded are what was submitted.
fn verify(world: &World, seen: &Seen, broken: &mut Vec<String>) -> u64 {
    let mut client = Client::with_timeout(world.addresses[0], Duration::from_secs(30));
    let mut compared = 0;
    for (id, payload) in lock(&seen.jobs).iter() {
        for what in ["payload", "result"] {
            match client.send("GET", &format!("/v1/jobs/{id}/{what}"), None, "") {
                Ok((200, body)) if body == payload.as_bytes() || same(&body, payload) => compared += 1,
                // It has not succeeded, or its retention is over.
                Ok((404, _)) => {}
                Ok((status, body)) => {
                    broken.push(format!("{what} of {id}: {status} {}", String::from_utf8_lossy(&body)));
                }
                Err(error) => broken.push(format!("{what} of {id}: {error}")),
            }
        }
    }
    compared
}

/// What the servers count of ended jobs and groups is the size of the indexes.
fn counted(world: &World, seen: &Seen, redis: &mut Connection, broken: &mut Vec<String>) -> Result<()> {
    let mut caller = Caller::new(&world.addresses, 1, seen);
    for queue in ["q0", "q1", "q2"] {
        let mut last = String::new();
        // What has expired may be cleared away between two looks.
        let agree = (0..20).any(|_| {
            let told = caller.insist("GET", &format!("/v1/queues/{queue}"), None, "").map(|(_, body)| body);
            let told = told.unwrap_or_default();
            last = told["counts"].to_string();
            records::STATUSES.iter().all(|status| {
                let size = |class: &&str| {
                    let index = format!("{{lh:0}}i:st/default/{queue}/{class}/{status}");
                    redis.ask(&["ZCARD", &index]).map_or(-1, |n| n.number())
                };
                told["counts"][*status].as_i64() == Some(records::CLASSES.iter().map(size).sum())
            })
        });
        if !agree {
            broken.push(format!("the queue {queue} counts {last}, and its indexes do not"));
        }
    }
    for (id, children) in lock(&seen.groups).iter() {
        let Some((status, group)) = caller.insist("GET", &format!("/v1/groups/{id}"), None, "") else { continue };
        let sizes = records::OUTCOMES.map(|o| {
            let index = format!("{{lh:0}}i:done/{id}/{o}");
            (o, redis.ask(&["ZCARD", &index]).map_or(-1, |n| n.number()))
        });
        let agree = sizes.iter().all(|(o, n)| group["counts"][*o].as_i64() == Some(*n));
        let all = sizes.iter().map(|(_, n)| n).sum::<i64>();
        if status != 200 || !agree || all < children.cast_signed() || group["ended_at"].is_null() {
            broken.push(format!("group {id} with {children} children: {status} {group}, and its indexes {sizes:?}"));
        }
    }
    Ok(())
}

/// What the server's own audit says.
fn own_audit(world: &World, leasehold: &Path, broken: &mut Vec<String>) -> Result<String> {
    let url = format!("http://{}", world.addresses[0]);
    let out = Command::new(leasehold)
        .args(["audit", "--quiet", "--server", &url])
        .env_clear()
        .stdin(Stdio::null())
        .output()?;
    let text = String::from_utf8_lossy(&[out.stdout, out.stderr].concat()).trim().to_owned();
    if !out.status.success() {
        broken.push(format!("leasehold audit: {}: {text}", out.status));
    }
    Ok(text.lines().last().unwrap_or_default().to_owned())
}

fn panics(folder: &Path, broken: &mut Vec<String>) -> Result<u64> {
    let mut panics = 0;
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_some_and(|e| e == "log") {
            for line in std::fs::read_to_string(&path)?.lines().filter(|l| l.contains("panicked")) {
                panics += 1;
                broken.push(format!("{}: {line}", path.display()));
            }
        }
    }
    Ok(panics)
}
