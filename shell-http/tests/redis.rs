//! Several servers on one Redis: one key makes one job, each job is delivered once, what vanished is
//! never run blank, and a reclaim never makes anything anew.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]

#[path = "../../shell-redis/tests/support/mod.rs"]
mod redis_server;
mod support;

use std::collections::BTreeMap;
use std::sync::Barrier;
use std::time::Duration;

use redis_server::Server as Redis;
use support::{Client, Server, claim, status, submit, until};

const PATIENCE: Duration = Duration::from_secs(60);

fn serve(redis: &Redis, flags: &[&str]) -> Server {
    Server::on("127.0.0.1:0".parse().unwrap(), &redis.url(), flags)
}

/// Keys of the namespace that name a job.
fn keys_of(redis: &Redis, id: &str) -> Vec<String> {
    let mut client = redis.client();
    redis::cmd("KEYS").arg(format!("*{id}*")).query(&mut client).unwrap()
}

fn events(client: &mut Client, kind: &str) -> usize {
    client.get("/v1/events?limit=1000").text().matches(kind).count()
}

#[test]
fn one_key_makes_one_job_however_many_submit_at_once() {
    for release in redis_server::releases() {
        let redis = Redis::start(release, &[]);
        let servers = [serve(&redis, &[]), serve(&redis, &[])];
        for submitters in [16, 50] {
            let start = Barrier::new(submitters);
            let answers: Vec<(u16, String)> = std::thread::scope(|scope| {
                let one = |n: usize| {
                    let mut client = servers[n % 2].client();
                    let start = &start;
                    scope.spawn(move || {
                        client.connect().unwrap();
                        start.wait();
                        let body =
                            format!(r#"{{"queue":"q{submitters}","idempotency_key":"the-key","payload":{{"n":1}}}}"#);
                        let answer = client.post("/v1/jobs", body);
                        (answer.status, answer.json()["id"].as_str().unwrap().to_owned())
                    })
                };
                let threads: Vec<_> = (0..submitters).map(one).collect();
                threads.into_iter().map(|t| t.join().unwrap()).collect()
            });
            assert_eq!(answers.iter().filter(|a| a.0 == 201).count(), 1, "{answers:?}");
            assert!(answers.iter().all(|a| a.1 == answers[0].1 && matches!(a.0, 200 | 201)), "{answers:?}");
            let list = servers[0].client().get(&format!("/v1/jobs?queue=q{submitters}")).json();
            assert_eq!(list["jobs"].as_array().unwrap().len(), 1);
            // The next round's key must be free again.
            let id = &answers[0].1;
            assert_eq!(servers[1].client().post(&format!("/v1/jobs/{id}/cancel"), "").status, 200);
        }
    }
}

#[test]
fn eight_claimers_get_two_thousand_jobs_each_once() {
    for release in redis_server::releases() {
        let redis = Redis::start(release, &[]);
        let servers = [serve(&redis, &[]), serve(&redis, &[])];
        let mut client = servers[0].client();
        for _ in 0..4 {
            let jobs: Vec<&str> = vec![r#"{"queue":"q","payload":1}"#; 500];
            assert_eq!(client.post("/v1/jobs:batch", format!(r#"{{"jobs":[{}]}}"#, jobs.join(","))).status, 200);
        }
        let delivered: Vec<String> = std::thread::scope(|scope| {
            let claimer = |n: usize| {
                let mut client = servers[n % 2].client();
                scope.spawn(move || {
                    let mut got = Vec::new();
                    loop {
                        let body = format!(r#"{{"worker":"w{n}","queues":["q"],"max":{}}}"#, 1 + n * 3);
                        let answer = client.post("/v1/claims", body);
                        assert_eq!(answer.status, 200);
                        let jobs = answer.json()["jobs"].as_array().unwrap().clone();
                        if jobs.is_empty() {
                            return got;
                        }
                        let items: Vec<String> =
                            jobs.iter().map(|j| format!(r#"{{"id":{},"token":{}}}"#, j["id"], j["token"])).collect();
                        let done = client.post("/v1/completions", format!(r#"{{"items":[{}]}}"#, items.join(",")));
                        assert_eq!(done.status, 200);
                        got.extend(jobs.iter().map(|j| j["id"].as_str().unwrap().to_owned()));
                    }
                })
            };
            let threads: Vec<_> = (0..8).map(claimer).collect();
            threads.into_iter().flat_map(|t| t.join().unwrap()).collect()
        });
        let mut times: BTreeMap<&str, u32> = BTreeMap::new();
        delivered.iter().for_each(|id| *times.entry(id).or_default() += 1);
        assert_eq!((delivered.len(), times.len()), (2_000, 2_000));
        let queue = client.get("/v1/queues/q").json();
        assert!(queue.to_string().contains("2000"), "{queue}");
    }
}

#[test]
fn what_vanished_is_never_handed_out_blank() {
    for release in redis_server::releases() {
        let redis = Redis::start(release, &[]);
        let server = serve(&redis, &[]);
        let mut client = server.client();
        // The job's record.
        let lost = submit(&mut client, r#"{"queue":"a","payload":{"to":"ada"}}"#);
        redis.run(&["DEL", &format!("{{lh:0}}r:job/{lost}")]);
        let answer = client.post("/v1/claims", r#"{"worker":"w","queues":["a"]}"#);
        assert_eq!((answer.status, answer.json()["jobs"].as_array().unwrap().len()), (200, 0), "{}", answer.json());
        assert_eq!(client.get(&format!("/v1/jobs/{lost}")).status, 404);
        assert!(keys_of(&redis, &lost).is_empty(), "nothing of it is left: {:?}", keys_of(&redis, &lost));
        // Its payload.
        let empty = submit(&mut client, r#"{"queue":"b","payload":{"to":"ada"}}"#);
        redis.run(&["DEL", &format!("{{lh:0}}r:payload/{empty}")]);
        let answer = client.post("/v1/claims", r#"{"worker":"w","queues":["b"]}"#);
        assert_eq!((answer.status, answer.json()["jobs"].as_array().unwrap().len()), (200, 0), "{}", answer.json());
        let job = client.get(&format!("/v1/jobs/{empty}")).json();
        assert_eq!((job["status"].as_str(), job["reason"].as_str()), (Some("dead"), Some("lost")), "{job}");
        // Reported, counted, audited.
        let metrics = client.get("/metrics").text();
        assert!(metrics.lines().any(|l| l == "leasehold_jobs_lost_total 2"), "{metrics}");
        assert_eq!(events(&mut client, "job.lost"), 2);
    }
}

#[test]
fn a_reclaim_never_makes_a_job_anew() {
    let redis = Redis::start("redis-7.0", &[]);
    let server = serve(&redis, &[]);
    let mut client = server.client();
    let id = submit(&mut client, r#"{"queue":"q","payload":1,"lease_ms":500}"#);
    let kept = submit(&mut client, r#"{"queue":"q","payload":2,"lease_ms":500}"#);
    assert_eq!(claim(&mut client, "q").0, id);
    assert_eq!(claim(&mut client, "q").0, kept);
    for record in ["job", "payload"] {
        redis.run(&["DEL", &format!("{{lh:0}}r:{record}/{id}")]);
    }
    until("the other's lease has lapsed", PATIENCE, || status(&mut client, &kept) == "queued");
    until("nothing is left of the lost one", PATIENCE, || keys_of(&redis, &id).is_empty());
    assert_eq!(client.get(&format!("/v1/jobs/{id}")).status, 404);
    assert_eq!(claim(&mut client, "q").0, kept);
    let answer = client.post("/v1/claims", r#"{"worker":"w","queues":["q"]}"#);
    assert_eq!(answer.json()["jobs"].as_array().unwrap().len(), 0);
}

#[test]
fn a_submit_at_one_server_wakes_a_claim_at_another() {
    let redis = Redis::start("redis-7.0", &[]);
    let (one, two) = (serve(&redis, &[]), serve(&redis, &[]));
    let mut waiting = two.client();
    let waits = std::thread::spawn(move || {
        let began = std::time::Instant::now();
        let answer = waiting.post("/v1/claims", r#"{"worker":"w","queues":["q"],"wait_ms":30000}"#);
        (answer.json()["jobs"].as_array().unwrap().len(), began.elapsed())
    });
    let mut client = one.client();
    until("the poll waits", PATIENCE, || two.client().get("/metrics").text().lines().any(|l| l == "leasehold_polls 1"));
    submit(&mut client, r#"{"queue":"q","payload":1}"#);
    let (jobs, after) = waits.join().unwrap();
    assert_eq!(jobs, 1);
    assert!(after < Duration::from_secs(25), "it was not the end of the wait");
}

#[test]
fn an_eviction_policy_is_told_by_readiness_and_metrics_or_refused() {
    let redis = Redis::start("redis-7.0", &["--maxmemory-policy", "volatile-lru"]);
    let server = serve(&redis, &[]);
    let mut client = server.client();
    let ready = client.get("/readyz");
    assert_eq!(ready.status, 200);
    assert!(ready.json()["warning"].as_str().unwrap().contains("volatile-lru"), "{}", ready.json());
    assert!(client.get("/metrics").text().lines().any(|l| l == "leasehold_store_warning 1"));
    let refused = std::process::Command::new(support::BINARY)
        .args(["serve", "--listen", "127.0.0.1:0", "--store", &redis.url(), "--require-noeviction"])
        .env_clear()
        .output()
        .unwrap();
    assert!(!refused.status.success());
    assert!(String::from_utf8_lossy(&refused.stderr).contains("volatile-lru"), "{refused:?}");
}
