//! Goal: a pool over HTTP is a semaphore for a whole cluster: 64 who wait get 64 distinct slots, whoever leaves
//! at any stage leaves nothing, and a holder that comes back after its time is told. Method: the same
//! bodies against one server with a store on disk and two servers on one Redis.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]

#[path = "../../shell-redis/tests/support/mod.rs"]
mod redis_server;
mod support;

use std::collections::BTreeSet;
use std::io::Write as _;
use std::net::SocketAddr;
use std::time::Duration;

use redis_server::Server as Redis;
use serde_json::{Value, json};
use support::{Client, Folder, Server, raw, until};

const PATIENCE: Duration = Duration::from_secs(30);

/// Servers of one store, which goes away after them.
struct Servers {
    servers: Vec<Server>,
    _folder: Option<Folder>,
    _redis: Option<Redis>,
}

impl Servers {
    fn disk() -> Servers {
        let folder = Folder::new();
        Servers { servers: vec![Server::start(&folder, &[])], _folder: Some(folder), _redis: None }
    }

    fn redis() -> Servers {
        let redis = Redis::start("redis-7.0", &[]);
        let serve = || Server::on("127.0.0.1:0".parse().unwrap(), &redis.url(), &[]);
        Servers { servers: vec![serve(), serve()], _folder: None, _redis: Some(redis) }
    }

    fn at(&self, n: usize) -> SocketAddr {
        self.servers[n % self.servers.len()].address
    }

    fn client(&self, n: usize) -> Client {
        Client::new(self.at(n))
    }

    fn pool(&self, total: u64) {
        let body = json!({"total": total, "lease_ms": 600_000}).to_string();
        assert_eq!(self.client(0).send("PUT", "/v1/pools/gpu", &[], body.as_bytes()).status, 200);
    }

    fn look(&self) -> Value {
        self.client(1).get("/v1/pools/gpu").json()
    }

    fn acquire(&self, n: usize, body: Value) -> support::Answer {
        self.client(n).post("/v1/pools/gpu/slots", body.to_string())
    }

    fn slot(&self, n: usize) -> String {
        // A server that has just started gives nobody the room of what has lapsed.
        let answer = self.acquire(n, json!({"wait_ms": 20_000}));
        assert_eq!(answer.status, 201, "{}", answer.text());
        answer.header("location").unwrap().to_owned()
    }

    fn release(&self, n: usize, slot: &str) {
        assert_eq!(self.client(n).send("DELETE", slot, &[], b"").status, 204);
    }
}

fn both(body: impl Fn(&Servers)) {
    body(&Servers::disk());
    body(&Servers::redis());
}

fn waiting(look: &Value) -> u64 {
    look["waiting"].as_object().unwrap().values().filter_map(Value::as_u64).sum()
}

#[test]
fn sixty_four_who_wait_get_sixty_four_slots() {
    both(|servers| {
        servers.pool(64);
        let first: Vec<String> = (0..64).map(|n| servers.slot(n)).collect();
        let second: BTreeSet<String> = std::thread::scope(|scope| {
            let wait = |n| {
                let answer = servers.acquire(n, json!({"wait_ms": 60_000, "holder": format!("w{n}")}));
                assert_eq!(answer.status, 201, "{}", answer.text());
                answer.json()["id"].as_str().unwrap().to_owned()
            };
            let waiters: Vec<_> = (0..64).map(|n| scope.spawn(move || wait(n))).collect();
            until("all wait", PATIENCE, || waiting(&servers.look()) == 64);
            let look = servers.look();
            assert_eq!((&look["in_use"], look["holders"].as_array().unwrap().len()), (&json!(64), 64));
            for (n, slot) in first.iter().enumerate() {
                servers.release(n, slot);
            }
            waiters.into_iter().map(|w| w.join().unwrap()).collect()
        });
        assert_eq!(second.len(), 64);
        assert!(first.iter().all(|path| !second.iter().any(|id| path.ends_with(&id.replace(':', "%3A")))));
        let look = servers.look();
        assert_eq!((&look["in_use"], waiting(&look)), (&json!(64), 0));
    });
}

#[test]
fn whoever_leaves_leaves_nothing() {
    both(|servers| {
        servers.pool(4);
        // While it is asked for, with room, at whatever stage.
        for micros in (0..4_000).step_by(100) {
            let mut stream = raw(servers.at(micros / 100));
            let body = r#"{"wait_ms":60000,"lease_ms":1500}"#;
            let head =
                format!("POST /v1/pools/gpu/slots HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", body.len());
            stream.get_mut().write_all(format!("{head}{body}").as_bytes()).unwrap();
            std::thread::sleep(Duration::from_micros(micros as u64));
            // What came before it left is its own to give back: the id is in it.
            stream.get_mut().set_nonblocking(true).unwrap();
            let answer = support::read_answer(&mut stream);
            drop(stream);
            if let Ok(answer) = answer {
                servers.release(0, answer.header("location").unwrap());
            }
        }
        // Nothing waits, and nothing is held but what was on its way to a connection that closed just then, which
        // ends with its lease.
        assert_eq!(waiting(&servers.look()), 0);
        until("nothing is held", Duration::from_secs(4), || servers.look()["in_use"] == 0);

        // While it waits.
        let slots: Vec<String> = (0..4).map(|n| servers.slot(n)).collect();
        let gone: Vec<_> = (0..20)
            .map(|n| {
                let mut stream = raw(servers.at(n));
                let body = r#"{"wait_ms":60000}"#;
                let head =
                    format!("POST /v1/pools/gpu/slots HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", body.len());
                stream.get_mut().write_all(format!("{head}{body}").as_bytes()).unwrap();
                stream
            })
            .collect();
        until("they wait", PATIENCE, || waiting(&servers.look()) == 20);
        drop(gone);
        until("nobody waits", Duration::from_secs(4), || waiting(&servers.look()) == 0);
        slots.iter().for_each(|slot| servers.release(0, slot));
        assert_eq!(servers.look()["in_use"], 0);
        let mut full = servers.client(0);
        (0..4).for_each(|n| drop(servers.slot(n)));
        let answer = full.post("/v1/pools/gpu/slots", r#"{"wait_ms":300}"#);
        assert_eq!((answer.status, answer.code()), (429, "pool_full".into()));
        assert_eq!(answer.json()["position"], 1);
        assert!(answer.json()["estimated_wait_ms"].is_u64() && answer.header("retry-after").is_some());
        assert_eq!(waiting(&servers.look()), 0);
    });
}

#[test]
fn a_holder_that_comes_back_after_its_time_is_told() {
    both(|servers| {
        servers.pool(1);
        let answer = servers.acquire(0, json!({"slot_id": "frozen", "lease_ms": 1_000}));
        let frozen = answer.header("location").unwrap().to_owned();
        assert_eq!(servers.client(1).post(&format!("{frozen}/refresh"), "").status, 200);
        // It does nothing for longer than its lease: the next is given the slot when that is over.
        let next = servers.acquire(1, json!({"wait_ms": 30_000}));
        assert_eq!(next.status, 201);
        let late = servers.client(0).post(&format!("{frozen}/refresh"), "");
        assert_eq!((late.status, late.code()), (409, "slot_lost".into()));
        servers.release(0, &frozen);
        let look = servers.look();
        assert_eq!((&look["in_use"], &look["holders"][0]["id"]), (&json!(1), &next.json()["id"]));
        assert_eq!(servers.client(0).post(&format!("{}/refresh", next.header("location").unwrap()), "").status, 200);
    });
}

#[test]
fn a_wait_goes_on_at_another_server() {
    let servers = Servers::redis();
    servers.pool(1);
    let holder = servers.slot(0);
    let named = json!({"slot_id": "n", "wait_ms": 200});
    let answer = servers.acquire(0, named);
    assert_eq!((answer.status, answer.header("retry-after")), (429, Some("1")));
    std::thread::scope(|scope| {
        let again = scope.spawn(|| servers.acquire(1, json!({"slot_id": "n", "wait_ms": 30_000})));
        let behind = scope.spawn(|| servers.acquire(0, json!({"wait_ms": 30_000})));
        until("both wait", PATIENCE, || waiting(&servers.look()) == 2);
        servers.release(1, &holder);
        let had = again.join().unwrap();
        assert_eq!(had.status, 201);
        assert_eq!(servers.acquire(0, json!({"slot_id": "n"})).json()["id"], had.json()["id"]);
        servers.release(0, had.header("location").unwrap());
        assert_eq!(behind.join().unwrap().status, 201);
    });
}
