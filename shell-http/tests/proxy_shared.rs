//! Goal: servers that share a store share the slots before an upstream: it never sees more calls than the pool
//! has slots, nor more of class batch than it may hold; a caller who waits gets the next free slot before any
//! batch work. And while the store is away callers are told so, and served again after. Method: two servers
//! and one upstream that counts its own requests; batch work by a program that takes its slots by the API.
//!
//! `LEASEHOLD_TEST_FULL=1`: five hundred that wait instead of sixty, and a store that is away for 20 s.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]

#[path = "../../shell-redis/tests/support/mod.rs"]
mod redis_server;
mod support;

use std::io::{BufReader, Write as _};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use redis_server::Server as Redis;
use serde_json::{Value, json};
use support::upstream::Upstream;
use support::{Client, Folder, Server, closes, raw, read_answer, read_line, until};

const PATIENCE: Duration = Duration::from_secs(60);

fn is_full() -> bool {
    std::env::var_os("LEASEHOLD_TEST_FULL").is_some()
}

fn config(upstream: &Upstream, lease_ms: u64) -> String {
    format!(
        "[[pools]]\nname = \"gpu\"\ntotal = 8\nbatch_max = 6\nlease_ms = {lease_ms}\n[[upstreams]]\nname = \
         \"one\"\nurl = \"{}\"\nmodels = [\"m\"]\npool = \"gpu\"\n",
        upstream.url()
    )
}

/// Servers on one store.
fn serve(folder: &Folder, store: Option<&str>, n: usize, toml: &str) -> Vec<Server> {
    let file = folder.path().join("leasehold.toml");
    std::fs::write(&file, toml).unwrap();
    let own = format!("disk:{}", folder.path().join("store").display());
    let flags = ["--config", file.to_str().unwrap()];
    let server = |_| Server::on("127.0.0.1:0".parse().unwrap(), store.unwrap_or(&own), &flags);
    let servers: Vec<Server> = (0..n).map(server).collect();
    for server in &servers {
        until("the pool is set", PATIENCE, || server.client().get("/v1/pools/gpu").status == 200);
    }
    servers
}

fn look(server: &Server) -> Value {
    server.client().get("/v1/pools/gpu").json()
}

/// Calls the upstream itself under a slot of class batch.
fn batch_work(server: &Server, upstream: &Upstream, stop: &AtomicBool) -> bool {
    let mut client = server.client();
    let asked = json!({"class": "batch", "wait_ms": 60_000, "holder": "batch"}).to_string();
    let slot = loop {
        if stop.load(Ordering::Relaxed) {
            return false;
        }
        let answer = client.post("/v1/pools/gpu/slots", &asked);
        match answer.status {
            201 => break answer.header("location").unwrap().to_owned(),
            status => assert_eq!(status, 429, "{}", answer.text()),
        }
    };
    let called = Client::new(upstream.address).send("POST", "/slow?ms=40", &[("leasehold-class", "batch")], b"{}");
    assert_eq!(called.status, 200);
    assert_eq!(client.send("DELETE", &slot, &[], b"").status, 204);
    true
}

fn shared(store: Option<&str>, replicas: usize) {
    let upstream = Upstream::start();
    let folder = Folder::new();
    let servers = serve(&folder, store, replicas, &config(&upstream, 30_000));
    let waiters = if is_full() { 500 } else { 60 };
    let (stop, done) = (AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for n in 0..waiters {
            let (servers, upstream, stop, done) = (&servers, &upstream, &stop, &done);
            scope.spawn(move || {
                if batch_work(&servers[n % replicas], upstream, stop) {
                    done.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        until("batch work waits", PATIENCE, || {
            look(&servers[0])["waiting"]["batch"].as_u64() >= Some(waiters as u64 / 2)
        });
        // The two slots that batch may not have, and then the next ones that come free.
        let mut calls: Vec<_> = (0..12)
            .map(|n| {
                let mut stream = raw(servers[n % replicas].address);
                stream.get_mut().write_all(b"GET /v1/proxy/m/slow?ms=100 HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
                stream
            })
            .collect();
        for call in &mut calls {
            let answer = read_answer(call).unwrap();
            assert_eq!(answer.status, 200, "{}", answer.text());
            let position = answer.header("leasehold-queue-position").unwrap().parse::<u64>().unwrap();
            assert!(position <= 12, "nobody of batch stands before it: {position}");
        }
        let left = waiters - done.load(Ordering::Relaxed);
        println!("{left} of {waiters} were still to be done when the last of the callers was answered");
        assert!(left > 0, "callers did not wait for batch work");
    });
    let counts = upstream.counts();
    println!(
        "at most {} at once, of class batch {}, {} in all",
        counts.most_in_all,
        counts.most_of("batch"),
        counts.total
    );
    assert_eq!(done.load(Ordering::Relaxed), waiters);
    assert_eq!(counts.total, waiters + 12);
    assert!(counts.most_in_all <= 8, "{counts:?}");
    assert_eq!(counts.most_of("batch"), 6, "{counts:?}");
    until("every slot is back", Duration::from_secs(2), || look(&servers[0])["in_use"] == 0);
}

#[test]
fn an_upstream_never_sees_more_calls_than_slots_on_redis() {
    let redis = Redis::start("redis-7.0", &[]);
    shared(Some(&redis.url()), 2);
}

#[test]
fn an_upstream_never_sees_more_calls_than_slots_on_disk() {
    shared(None, 1);
}

#[test]
fn while_the_store_is_away_callers_are_told_and_then_served_again() {
    let away = if is_full() { Duration::from_secs(20) } else { Duration::from_secs(4) };
    let upstream = Upstream::start();
    let folder = Folder::new();
    let redis = Redis::start("redis-7.0", &[]);
    let servers = serve(&folder, Some(&redis.url()), 2, &config(&upstream, 30_000));
    // One call is under way all the time: its slot outlives the outage.
    let mut long = raw(servers[0].address);
    long.get_mut().write_all(b"GET /v1/proxy/m/slow HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
    until("it is called", PATIENCE, || upstream.now() == 1);
    let call = |n: usize| servers[n % 2].client().send("GET", "/v1/proxy/m/echo", &[], b"");
    assert_eq!(call(0).status, 200);
    redis.signal("STOP");
    let begun = Instant::now();
    let mut refused = 0;
    for n in 0.. {
        if begun.elapsed() >= away {
            break;
        }
        let answer = call(n);
        // One that was already asked for when the store stopped may have been granted.
        assert!(matches!(answer.code().as_str(), "store_unavailable" | "outcome_unknown"), "{}", answer.text());
        assert_eq!(answer.status, 503);
        assert!(answer.header("retry-after").is_some());
        refused += 1;
    }
    redis.signal("CONT");
    println!("{refused} calls were refused in {:?}", begun.elapsed());
    assert!(refused > 0);
    for n in 0..2 {
        until("it serves again", PATIENCE, || call(n).status == 200);
    }
    upstream.let_go(1);
    assert_eq!(read_answer(&mut long).unwrap().status, 200);
    // A grant that the store made for one who was told 503 ends by itself.
    until("every slot is back", PATIENCE, || look(&servers[0])["in_use"] == 0);
}

/// While the store is away, an open pool serves as many as each server may admit by itself, and a closed one nobody;
/// both recover by themselves, and what was admitted is in the way of others until it ends.
#[test]
fn while_the_store_is_away_an_open_pool_serves_within_its_bound() {
    let away = if is_full() { Duration::from_secs(20) } else { Duration::from_secs(5) };
    for signals in [["STOP", "CONT"], ["KILL", ""]] {
        let (open, closed) = (Upstream::start(), Upstream::start());
        let folder = Folder::new();
        let mut redis = Redis::start("redis-7.0", &["--appendonly", "yes"]);
        let toml = format!(
            "[[pools]]\nname = \"gpu\"\ntotal = 8\nlease_ms = 20000\nfail_open = true\nfail_open_local = 3\n\
             [[pools]]\nname = \"closed\"\ntotal = 8\n\
             [[upstreams]]\nname = \"o\"\nurl = \"{}\"\nmodels = [\"open\"]\npool = \"gpu\"\n\
             [[upstreams]]\nname = \"c\"\nurl = \"{}\"\nmodels = [\"closed\"]\npool = \"closed\"\n",
            open.url(),
            closed.url()
        );
        let servers = serve(&folder, Some(&redis.url()), 2, &toml);
        for server in &servers {
            for model in ["open", "closed"] {
                let answer = server.client().send("GET", &format!("/v1/proxy/{model}/echo"), &[], b"");
                assert_eq!((answer.status, answer.header("leasehold-fail-open")), (200, None));
            }
        }
        match signals[0] {
            "KILL" => redis.stop("KILL"),
            signal => redis.signal(signal),
        }
        let begun = Instant::now();
        let stop = AtomicBool::new(false);
        let (served, refused, shut) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for n in 0..16 {
                let (servers, stop, served, refused, shut) = (&servers, &stop, &served, &refused, &shut);
                scope.spawn(move || {
                    let mut client = servers[n % 2].client();
                    let model = if n < 12 { "open" } else { "closed" };
                    while !stop.load(Ordering::Relaxed) {
                        let answer = client.send("GET", &format!("/v1/proxy/{model}/slow?ms=50"), &[], b"");
                        match (answer.status, answer.header("leasehold-fail-open")) {
                            (200, Some("true")) if model == "open" => served.fetch_add(1, Ordering::Relaxed),
                            (503, None) if answer.header("retry-after").is_some() => {
                                std::thread::sleep(Duration::from_millis(20));
                                if model == "open" { refused } else { shut }.fetch_add(1, Ordering::Relaxed)
                            }
                            other => panic!("{model}: {other:?} {}", answer.text()),
                        };
                    }
                });
            }
            std::thread::sleep(away);
            // Those that wait for the store now are answered before it is there again.
            stop.store(true, Ordering::Relaxed);
        });
        println!("{served:?} served, {refused:?} refused, {shut:?} of the closed pool, in {:?}", begun.elapsed());
        assert!(served.into_inner() > 0 && refused.into_inner() > 0 && shut.into_inner() > 0);
        let most = open.counts().most_in_all;
        assert!((1..=6).contains(&most), "three at each server, and not {most}");
        assert_eq!(closed.now(), 0);
        // One is still there when the store is back.
        let mut long = raw(servers[0].address);
        long.get_mut().write_all(b"GET /v1/proxy/open/slow HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
        until("it is called", PATIENCE, || open.now() == 1);
        let health = servers[0].client().get("/healthz").json();
        assert_eq!(health["fail_open"], 1, "{health}");
        match signals[1] {
            "" => redis.restart(),
            signal => redis.signal(signal),
        }
        for server in &servers {
            for model in ["open", "closed"] {
                until("it serves as before", PATIENCE, || {
                    let answer = server.client().send("GET", &format!("/v1/proxy/{model}/echo"), &[], b"");
                    answer.status == 200 && answer.header("leasehold-fail-open").is_none()
                });
            }
        }
        let in_use = || servers[1].client().get("/v1/pools/gpu").json()["in_use"].clone();
        until("what was admitted is written down", PATIENCE, || in_use() == 1);
        open.let_go(1);
        assert_eq!(read_answer(&mut long).unwrap().status, 200);
        until("every slot is back", PATIENCE, || in_use() == 0);
    }
}

/// C47: whatever ends a call, its slot is back and the next one is served at once; and what a server held that was
/// killed, or stood still, comes back by itself and is not revived.
#[test]
fn c47_slots_are_back_after_every_abnormal_end() {
    const LEASE: Duration = Duration::from_secs(3);
    let upstream = Upstream::start();
    let folder = Folder::new();
    let redis = Redis::start("redis-7.0", &[]);
    let toml = config(&upstream, 3_000).replace("total = 8", "total = 10") + "first_byte_timeout = \"150ms\"\n";
    let mut servers = serve(&folder, Some(&redis.url()), 2, &toml);
    let begin = |server: &Server, path: &str| {
        let mut stream = raw(server.address);
        stream.get_mut().write_all(format!("GET /v1/proxy/m/{path} HTTP/1.1\r\nhost: x\r\n\r\n").as_bytes()).unwrap();
        stream
    };
    let call = |server: &Server, path: &str| {
        server.client().try_send("GET", &format!("/v1/proxy/m/{path}"), &[], b"").map_or(0, |answer| answer.status)
    };
    for (path, status) in [("close", 502), ("status/502", 502), ("hang", 504), ("cut", 0), ("half", -1)] {
        for _ in 0..10 {
            if status < 0 {
                // The client goes in the middle of the answer.
                assert_eq!(read_head(&mut begin(&servers[0], path)), 200);
            } else {
                assert_eq!(i32::from(call(&servers[0], path)), status, "{path}");
            }
            assert_eq!(call(&servers[0], "echo"), 200, "the next one, after {path}");
        }
        until("slots are back", Duration::from_secs(2), || look(&servers[1])["in_use"] == 0);
    }
    // Ten under way at a server that is killed.
    let held: Vec<_> = (0..10).map(|_| begin(&servers[0], "half")).collect();
    until("ten are under way", PATIENCE, || look(&servers[1])["in_use"] == 10);
    servers[0].kill();
    until("slots are back", LEASE + Duration::from_secs(1), || look(&servers[1])["in_use"] == 0);
    assert_eq!(call(&servers[1], "echo"), 200);
    drop(held);
    // Ten under way at a server that stands still until their slots have gone, and then goes on.
    servers.push(serve(&folder, Some(&redis.url()), 1, &toml).remove(0));
    let mut held: Vec<_> = (0..10).map(|_| begin(&servers[2], "half")).collect();
    held.iter_mut().for_each(|stream| assert_eq!(read_head(stream), 200));
    servers[2].signal(rustix::process::Signal::STOP);
    until("slots are back", LEASE + Duration::from_secs(1), || look(&servers[1])["in_use"] == 0);
    let mut others: Vec<_> = (0..10).map(|_| begin(&servers[1], "half")).collect();
    others.iter_mut().for_each(|stream| assert_eq!(read_head(stream), 200));
    servers[2].signal(rustix::process::Signal::CONT);
    // Its calls are stopped, and the others' slots are not touched by that.
    assert!(held.iter_mut().all(closes), "half an answer is broken off");
    assert_eq!(look(&servers[1])["in_use"], 10);
    drop(others);
    until("slots are back", Duration::from_secs(2), || look(&servers[1])["in_use"] == 0);
}

/// The status of an answer whose body is still to come.
fn read_head(stream: &mut BufReader<TcpStream>) -> u16 {
    let status = read_line(stream).unwrap()[9..12].parse().unwrap();
    while !read_line(stream).unwrap().is_empty() {}
    status
}
