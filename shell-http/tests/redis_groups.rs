//! Goal: with three servers on one Redis a group never has more children in flight than its limit, by the
//! store's own books, and is never long below it while work remains; it is final once. Method: workers that claim
//! and complete through any of the servers, and a watcher that asks Redis itself; half-way one server is
//! killed.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]

#[path = "../../shell-redis/tests/support/mod.rs"]
mod redis_server;
mod support;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use redis_server::Server as Redis;
use serde_json::{Value, json};
use support::{Server, until};

const CHILDREN: usize = 600;
const LIMIT: u64 = 7;
const PATIENCE: Duration = Duration::from_secs(60);
/// A place that nobody filled at once is filled by the sweep of any replica that is left, each second; the
/// rest is for a busy machine.
const UNDER_USE: Duration = Duration::from_secs(10);

fn serve(redis: &Redis) -> Server {
    Server::on("127.0.0.1:0".parse().unwrap(), &redis.url(), &[])
}

#[test]
fn three_servers_hold_the_limit_and_reach_it() {
    let redis = Redis::start("redis-7.0", &[]);
    let mut victim = Some(serve(&redis));
    let servers = [serve(&redis), serve(&redis)];
    let mut client = servers[0].client();
    let children: Vec<Value> =
        (0..CHILDREN).map(|n| json!({"payload": n, "max_attempts": 10, "lease_ms": 2_000})).collect();
    let body = json!({"queue": "q", "max_parallel": LIMIT, "children": children}).to_string();
    let group = client.post("/v1/groups", body).json();
    let id = group["id"].as_str().unwrap().to_owned();
    let released = format!("{{lh:0}}i:released/{id}");

    let over = AtomicBool::new(false);
    let done = AtomicUsize::new(0);
    let addresses = [victim.as_ref().unwrap().address, servers[0].address, servers[1].address];
    let (longest, most) = std::thread::scope(|scope| {
        for worker in 0..8 {
            let (over, done) = (&over, &done);
            scope.spawn(move || {
                let mut at = worker;
                while !over.load(Ordering::Relaxed) {
                    at += 1;
                    let mut client = support::Client::new(addresses[at % 3]);
                    let claim = format!(r#"{{"worker":"w{worker}","queues":["q"],"max":2,"wait_ms":300}}"#);
                    // A server that was killed refuses: the next is asked.
                    let Ok(answer) = client.try_post("/v1/claims", claim) else { continue };
                    let jobs = if answer.status == 200 {
                        answer.json()["jobs"].as_array().unwrap().clone()
                    } else {
                        Vec::new()
                    };
                    for job in jobs {
                        let body = json!({"token": job["token"], "result": job["payload"]}).to_string();
                        let path = format!("/v1/jobs/{}/complete", job["id"].as_str().unwrap());
                        for _ in 0..3 {
                            at += 1;
                            let mut client = support::Client::new(addresses[at % 3]);
                            if client.try_post(&path, &body).is_ok_and(|a| a.status == 200) {
                                done.fetch_add(1, Ordering::Relaxed);
                                break;
                            }
                        }
                    }
                }
            });
        }
        let watcher = scope.spawn(|| {
            let mut connection = redis.client();
            let (mut longest, mut most) = (Duration::ZERO, 0_u64);
            let mut full = Instant::now();
            while !over.load(Ordering::Relaxed) {
                let n: u64 = redis::cmd("ZCARD").arg(&released).query(&mut connection).unwrap();
                most = most.max(n);
                // While this holds, there are children that still wait for their place.
                if n == LIMIT || done.load(Ordering::Relaxed) >= CHILDREN - 50 {
                    full = Instant::now();
                }
                longest = longest.max(full.elapsed());
            }
            (longest, most)
        });
        until("half is done", PATIENCE, || done.load(Ordering::Relaxed) > CHILDREN / 2);
        // Whatever it was doing for the group, the others go on with.
        drop(victim.take());
        until("the group is final", PATIENCE, || {
            client.get(&format!("/v1/groups/{id}")).json()["ended_at"].is_string()
        });
        over.store(true, Ordering::Relaxed);
        watcher.join().unwrap()
    });
    assert_eq!(most, LIMIT, "never more, and as many as allowed");
    assert!(longest < UNDER_USE, "below the limit for {longest:?} while children waited");
    let end = client.get(&format!("/v1/groups/{id}")).json();
    assert_eq!((&end["status"], &end["counts"]["succeeded"]), (&json!("succeeded"), &json!(CHILDREN)));
    let result = client.get(&format!("/v1/groups/{id}/result")).json();
    for (n, outcome) in result["outcomes"].as_array().unwrap().iter().enumerate() {
        assert_eq!(outcome["result"], json!(n));
    }
    let events = client.get("/v1/events?limit=1000").text();
    assert!(events.matches("group.finalized").count() <= 1);
}
