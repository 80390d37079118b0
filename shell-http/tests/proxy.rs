//! Goal: a call to a model takes a slot for exactly as long as it lasts: whatever the client, the upstream or
//! the server does, the slot is back. Method: a real server before a real upstream that counts its own
//! requests; each way out of a call is gone, and then the pool is looked at.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]

mod support;

use std::io::{BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use support::upstream::{Upstream, echoed};
use support::{Answer, Client, Folder, Server, raw, read_answer, read_line, until};

const PATIENCE: Duration = Duration::from_secs(30);
/// Until a slot is back after the end of its call.
const BACK: Duration = Duration::from_secs(2);

struct World {
    server: Server,
    upstream: Upstream,
    _folder: Folder,
}

impl World {
    /// A pool of so many slots before one upstream.
    fn new(total: u64, more: &str) -> World {
        let upstream = Upstream::start();
        let folder = Folder::new();
        let toml = format!("{}{}{more}", pool("gpu", total), entry("one", &upstream.url(), "gpu"));
        let server = Server::configured(&folder, &toml);
        let world = World { server, upstream, _folder: folder };
        until("the pool is set", PATIENCE, || world.client().get("/v1/pools/gpu").status == 200);
        world
    }

    fn client(&self) -> Client {
        self.server.client()
    }

    fn call(&self, path: &str) -> Answer {
        self.client().send("POST", &format!("/v1/proxy/m/{path}"), &[], b"{}")
    }

    fn in_use(&self) -> u64 {
        self.client().get("/v1/pools/gpu").json()["in_use"].as_u64().unwrap()
    }

    fn waiting(&self) -> u64 {
        waiting(&mut self.client(), "gpu")
    }

    /// Everything is as if nothing had been.
    fn is_quiet_within(&self, at_most: Duration) {
        until("slots are back", at_most, || (self.in_use(), self.waiting()) == (0, 0));
        until("the upstream has nothing to do", at_most, || self.upstream.now() == 0);
    }

    /// A call under way whose answer nobody has read yet.
    fn begin(&self, path: &str, headers: &str) -> BufReader<TcpStream> {
        let mut stream = raw(self.server.address);
        let head = format!("POST /v1/proxy/m/{path} HTTP/1.1\r\nhost: x\r\n{headers}content-length: 2\r\n\r\n{{}}");
        stream.get_mut().write_all(head.as_bytes()).unwrap();
        stream
    }

    fn begun(&self, path: &str) -> BufReader<TcpStream> {
        let before = self.upstream.total();
        let stream = self.begin(path, "");
        until("the upstream has the call", PATIENCE, || self.upstream.total() > before);
        stream
    }
}

fn pool(name: &str, total: u64) -> String {
    format!("[[pools]]\nname = \"{name}\"\ntotal = {total}\nlease_ms = 6000\n")
}

fn entry(name: &str, url: &str, pool: &str) -> String {
    format!("[[upstreams]]\nname = \"{name}\"\nurl = \"{url}\"\nmodels = [\"m\"]\npool = \"{pool}\"\n")
}

fn waiting(client: &mut Client, pool: &str) -> u64 {
    let look = client.get(&format!("/v1/pools/{pool}")).json();
    look["waiting"].as_object().unwrap().values().filter_map(Value::as_u64).sum()
}

#[test]
fn a_call_is_passed_on_and_its_answer_back() {
    let world = World::new(2, "headers = { x-key = \"of the file\" }\n");
    let headers = [("authorization", "ours"), ("x-other", "1"), ("traceparent", "00-a-b-01"), ("x-request-id", "r1")];
    let answer = world.client().send("PUT", "/v1/proxy/m/echo/a%2Fb?c=d&e", &headers, b"hello");
    assert_eq!(answer.status, 200);
    let seen = echoed(&answer.body);
    assert_eq!((&seen["path"], &seen["body"]), (&json!("/echo/a%2Fb?c=d&e"), &json!("hello")));
    let sent = &seen["headers"];
    for (name, value) in [
        (":method", "PUT"),
        ("x-key", "of the file"),
        ("x-other", "1"),
        ("traceparent", "00-a-b-01"),
        ("x-request-id", "r1"),
        ("leasehold-class", "interactive"),
        ("content-length", "5"),
    ] {
        assert_eq!(sent[name], value, "{name}");
    }
    assert_eq!(sent["authorization"], Value::Null);
    assert_eq!(sent["host"], world.upstream.address.to_string());
    assert_eq!(answer.header("leasehold-queue-position"), Some("0"));
    assert_eq!(answer.header("leasehold-upstream"), Some("one"));
    assert!(answer.header("leasehold-waited-ms").unwrap().parse::<u64>().is_ok());
    for (method, path) in [("GET", "/v1/proxy/m/echo"), ("DELETE", "/v1/proxy/m/"), ("PATCH", "/v1/proxy/m/x")] {
        let answer = world.client().send(method, path, &[], b"");
        assert_eq!((answer.status, echoed(&answer.body)["headers"][":method"].as_str()), (200, Some(method)));
    }
    // What the upstream says is passed back, whatever it is.
    assert_eq!(world.call("status/404").status, 404);
    assert_eq!(world.call("status/500").text(), "answer 500");
    // A large body is streamed, in chunks if it came so.
    let large = vec![b'x'; 3 << 20];
    let answer = world.client().send("POST", "/v1/proxy/m/echo", &[], &large);
    assert_eq!(echoed(&answer.body)["body"].as_str().unwrap().len(), large.len());
    let mut stream = raw(world.server.address);
    let head = "POST /v1/proxy/m/echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n";
    stream.get_mut().write_all(head.as_bytes()).unwrap();
    for _ in 0..40 {
        stream.get_mut().write_all(format!("{:x}\r\n{}\r\n", 1 << 16, "y".repeat(1 << 16)).as_bytes()).unwrap();
    }
    stream.get_mut().write_all(b"0\r\n\r\n").unwrap();
    let answer = read_answer(&mut stream).unwrap();
    assert_eq!(echoed(&answer.body)["body"].as_str().unwrap().len(), 40 << 16);
    world.is_quiet_within(BACK);
}

#[test]
fn what_cannot_be_passed_on_is_refused() {
    let world = World::new(1, "");
    let mut client = world.client();
    let mut code = |method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]| {
        let answer = client.send(method, path, headers, body);
        (answer.status, answer.code())
    };
    let is = |status, code: &str| (status, code.to_owned());
    assert_eq!(code("POST", "/v1/proxy/none/echo", &[], b"{}"), is(404, "unknown_model"));
    assert_eq!(code("POST", "/v1/proxy/m", &[], b"{}"), is(404, "unknown_path"));
    for path in ["/v1/proxy/m/../x", "/v1/proxy/m/a/%2e%2E/x", "/v1/proxy/m/./x"] {
        assert_eq!(code("POST", path, &[], b"{}"), is(404, "unknown_path"), "{path}");
    }
    assert_eq!(code("BREW", "/v1/proxy/m/echo", &[], b""), is(405, "wrong_method"));
    for (name, value) in
        [("leasehold-wait-ms", "60001"), ("leasehold-wait-ms", "-1"), ("leasehold-queue-events", "yes")]
    {
        assert_eq!(code("POST", "/v1/proxy/m/echo", &[(name, value)], b"{}"), is(422, "invalid_field"), "{name}");
    }
    assert_eq!(code("GET", "/v1/proxy/m/echo", &[("leasehold-on-prem", "true")], b""), is(404, "unknown_model"));
    assert_eq!(code("GET", "/v1/proxy/m/echo", &[("origin", "http://evil")], b""), is(403, "cross_origin"));
    let large = vec![0; (16 << 20) + 1];
    assert_eq!(code("POST", "/v1/proxy/m/echo", &[], &large), is(413, "too_large"));
    assert_eq!(world.upstream.total(), 0);
    world.is_quiet_within(BACK);
}

#[test]
fn who_finds_the_pool_full_waits_in_line_or_is_told_its_place() {
    let world = World::new(1, "");
    let first = world.begun("slow");
    // At once, with its place.
    let answer = world.client().send("POST", "/v1/proxy/m/echo", &[("leasehold-wait-ms", "0")], b"{}");
    assert_eq!((answer.status, answer.code()), (429, "pool_full".into()));
    assert_eq!(answer.json()["position"], 1);
    assert!(answer.header("retry-after").unwrap().parse::<u64>().unwrap() >= 1);
    // After its time.
    let begun = Instant::now();
    let answer = world.client().send("POST", "/v1/proxy/m/echo", &[("leasehold-wait-ms", "300")], b"{}");
    assert_eq!(answer.status, 429);
    assert!(begun.elapsed() >= Duration::from_millis(300));
    until("nobody waits", BACK, || world.waiting() == 0);
    // With the slot that comes free.
    let mut second = world.begin("echo", "");
    until("it waits", PATIENCE, || world.waiting() == 1);
    world.upstream.let_go(1);
    let answer = read_answer(&mut second).unwrap();
    assert_eq!((answer.status, answer.header("leasehold-queue-position")), (200, Some("1")));
    assert!(answer.header("leasehold-waited-ms").unwrap().parse::<u64>().unwrap() > 0);
    drop((first, second));
    assert_eq!(world.upstream.counts().most_in_all, 1);
    world.is_quiet_within(BACK);
}

#[test]
fn events_come_as_they_are_sent() {
    let world = World::new(1, "");
    let mut stream = world.begun("events?n=3");
    let answer = read_answer(&mut stream).unwrap();
    assert_eq!((answer.status, answer.header("content-type")), (200, Some("text/event-stream")));
    for n in 0..3 {
        // The next one has not been sent when this one is read.
        world.upstream.let_go(1);
        read_line(&mut stream).unwrap();
        assert_eq!(read_line(&mut stream).unwrap(), format!("data: {n}"));
        read_line(&mut stream).unwrap();
        read_line(&mut stream).unwrap();
    }
    assert_eq!(read_line(&mut stream).unwrap(), "0");
    world.is_quiet_within(BACK);
}

#[test]
fn who_wants_to_hears_its_place_while_it_waits() {
    let world = World::new(1, "");
    let first = world.begun("slow");
    let mut second = world.begin("slow", "");
    until("it waits", PATIENCE, || world.waiting() == 1);
    let mut third = world.begin("events?n=1&free", "leasehold-queue-events: true\r\n");
    let answer = read_answer(&mut third).unwrap();
    assert_eq!((answer.status, answer.header("content-type")), (200, Some("text/event-stream")));
    let mut next = |name: &str| loop {
        let line = read_line(&mut third).unwrap();
        if line == format!("event: {name}") {
            let data = read_line(&mut third).unwrap();
            return serde_json::from_str::<Value>(data.strip_prefix("data: ").unwrap()).unwrap();
        }
        // Others may stand between: a place is told again when its estimate changes.
        assert!(line != "event: leasehold.problem" && line != "0", "{line}");
    };
    assert_eq!(next("leasehold.queue")["position"], 2);
    until("both wait", PATIENCE, || world.waiting() == 2);
    world.upstream.let_go(1);
    while next("leasehold.queue")["position"] != 1 {}
    world.upstream.let_go(1);
    let started = next("leasehold.started");
    assert_eq!((&started["position"], &started["upstream"]), (&json!(2), &json!("one")));
    let rest: Vec<String> = std::iter::from_fn(|| read_line(&mut third).ok().filter(|l| l != "0")).collect();
    assert!(rest.contains(&"data: 0".to_owned()), "{rest:?}");
    assert_eq!(read_answer(&mut second).unwrap().status, 200);
    drop(first);

    // What would have been a problem, or is no stream of events, is an event too.
    let aloud = |path: &str, wait: u64| {
        let headers = format!("leasehold-queue-events: true\r\nleasehold-wait-ms: {wait}\r\nconnection: close\r\n");
        let mut stream = world.begin(path, &headers);
        let mut all = String::new();
        stream.read_to_string(&mut all).unwrap();
        all
    };
    let answer = aloud("status/418", 9_000);
    assert!(answer.contains("event: leasehold.answer") && answer.contains("\"status\":418"), "{answer}");
    assert!(aloud("close", 9_000).contains("\"code\":\"upstream_failed\""));
    let hold = world.begun("slow");
    let answer = aloud("echo", 1_200);
    assert!(answer.contains("event: leasehold.queue") && answer.contains("\"code\":\"pool_full\""), "{answer}");
    drop(hold);
    world.is_quiet_within(BACK);
}

#[test]
fn whatever_the_upstream_does_the_slot_is_back() {
    let world = World::new(4, "first_byte_timeout = \"400ms\"\ntimeout = \"1s\"\n");
    for (path, status, code) in [
        ("close", 502, "upstream_failed"),
        ("garbage", 502, "upstream_failed"),
        ("hang", 504, "upstream_timeout"),
        ("status/502", 502, ""),
    ] {
        let answer = world.call(path);
        assert_eq!(answer.status, status, "{path}");
        if !code.is_empty() {
            assert_eq!(answer.code(), code, "{path}");
        }
        // Closes the breaker again.
        assert_eq!(world.call("echo").status, 200);
        world.is_quiet_within(BACK);
    }
    // The head has gone out already: half an answer is not taken for the whole.
    for path in ["cut", "half"] {
        let broken = world.client().try_send("POST", &format!("/v1/proxy/m/{path}"), &[], b"{}");
        assert!(broken.is_err(), "{path}: {broken:?}");
        assert_eq!(world.call("echo").status, 200);
        world.is_quiet_within(BACK);
    }
}

#[test]
fn whatever_the_client_does_the_slot_is_back() {
    let world = World::new(1, "");
    // It goes before the head of the answer, in the middle of it, and while it waits in line.
    for path in ["hang", "events?n=9", "half"] {
        drop(world.begun(path));
        world.is_quiet_within(BACK);
    }
    let hold = world.begun("slow");
    for headers in ["", "leasehold-queue-events: true\r\n"] {
        let waits = world.begin("echo", headers);
        until("it waits", PATIENCE, || world.waiting() == 1);
        drop(waits);
        until("it is out of the line", BACK, || world.waiting() == 0);
    }
    drop(hold);
    world.is_quiet_within(BACK);
    // At any moment of a call: the clients go after so long.
    for micros in (0..20_000).step_by(400) {
        let stream = world.begin("slow?ms=2", "");
        std::thread::sleep(Duration::from_micros(micros));
        drop(stream);
    }
    world.is_quiet_within(BACK);
    // A slot goes to the next one only when the upstream is through with the one before.
    assert_eq!(world.upstream.counts().most_in_all, 1);
}

#[test]
fn sixty_four_callers_have_sixty_four_slots_and_no_more() {
    let world = World::new(64, "");
    let streams: Vec<_> = (0..128).map(|_| world.begin("slow", "leasehold-wait-ms: 60000\r\n")).collect();
    until("64 are served and 64 wait", PATIENCE, || (world.upstream.now(), world.waiting()) == (64, 64));
    assert_eq!(world.in_use(), 64);
    world.upstream.let_go(128);
    for mut stream in streams {
        assert_eq!(read_answer(&mut stream).unwrap().status, 200);
    }
    assert_eq!((world.upstream.total(), world.upstream.counts().most_in_all), (128, 64));
    world.is_quiet_within(BACK);
}

#[test]
fn upstreams_of_a_model_share_its_calls_by_their_free_slots() {
    let (small, large) = (Upstream::start(), Upstream::start());
    let folder = Folder::new();
    let toml =
        [pool("small", 1), pool("large", 3), entry("s", &small.url(), "small"), entry("l", &large.url(), "large")]
            .concat();
    let server = Server::configured(&folder, &toml);
    until("the pools are set", PATIENCE, || {
        server.client().get("/v1/pools").json()["pools"].as_array().unwrap().len() == 2
    });
    let begin = || {
        let mut stream = raw(server.address);
        stream.get_mut().write_all(b"GET /v1/proxy/m/slow HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
        stream
    };
    let mut streams: Vec<_> = (0..4).map(|_| begin()).collect();
    until("each slot is used", PATIENCE, || (small.now(), large.now()) == (1, 3));
    // The fifth waits for whichever comes free first, and is out of the other line then.
    let mut fifth = begin();
    until("it waits for both", PATIENCE, || {
        (waiting(&mut server.client(), "small"), waiting(&mut server.client(), "large")) == (1, 1)
    });
    small.let_go(2);
    let answer = read_answer(&mut fifth).unwrap();
    assert_eq!((answer.status, answer.header("leasehold-upstream")), (200, Some("s")));
    until("nobody waits", BACK, || waiting(&mut server.client(), "large") == 0);
    large.let_go(3);
    for stream in &mut streams {
        assert_eq!(read_answer(stream).unwrap().status, 200);
    }
    assert_eq!((small.counts().most_in_all, large.counts().most_in_all), (1, 3));
}

#[test]
fn an_upstream_that_does_not_answer_is_left_alone_and_found_again() {
    // Nobody listens there yet.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let folder = Folder::new();
    let toml = pool("gpu", 4) + &entry("one", &format!("http://{address}"), "gpu");
    let server = Server::configured(&folder, &toml);
    until("the pool is set", PATIENCE, || server.client().get("/v1/pools/gpu").status == 200);
    let call = || server.client().send("GET", "/v1/proxy/m/echo", &[], b"");
    for _ in 0..5 {
        assert_eq!((call().status, call().code().is_empty()), (502, false));
        if call().status == 503 {
            break;
        }
    }
    let refused = call();
    assert_eq!((refused.status, refused.code()), (503, "upstream_unavailable".into()));
    assert!(refused.header("retry-after").is_some());
    let upstream = Upstream::on(TcpListener::bind(address).unwrap());
    until("it is tried again", PATIENCE, || call().status == 200);
    // It asks to be left alone: what it says is passed on, and nobody else is sent there.
    upstream.always(Some("/status/429?after=1"));
    let answer = call();
    assert_eq!((answer.status, answer.header("retry-after")), (429, Some("1")));
    let total = upstream.total();
    assert_eq!(call().status, 503);
    assert_eq!(upstream.total(), total);
    upstream.always(None);
    until("it is called again", PATIENCE, || call().status == 200);
}

#[test]
fn a_call_that_cannot_reach_one_upstream_goes_to_the_next() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let nobody = format!("http://{}", listener.local_addr().unwrap());
    drop(listener);
    let world = World::new(2, &entry("two", &nobody, "gpu"));
    for _ in 0..10 {
        assert_eq!(world.call("echo").status, 200);
    }
    world.is_quiet_within(BACK);
}

#[test]
fn a_drain_ends_calls_and_gives_their_slots_back() {
    let upstream = Upstream::start();
    let folder = Folder::new();
    let toml = format!("grace = \"2s\"\n{}{}", pool("gpu", 2), entry("one", &upstream.url(), "gpu"))
        .replace("lease_ms = 6000", "lease_ms = 600000");
    let mut server = Server::configured(&folder, &toml);
    until("the pool is set", PATIENCE, || server.client().get("/v1/pools/gpu").status == 200);
    let begin = |path: &str| {
        let mut stream = raw(server.address);
        stream.get_mut().write_all(format!("GET /v1/proxy/m/{path} HTTP/1.1\r\nhost: x\r\n\r\n").as_bytes()).unwrap();
        stream
    };
    let (mut short, mut long) = (begin("slow"), begin("hang"));
    until("both are called", PATIENCE, || upstream.now() == 2);
    server.signal(rustix::process::Signal::TERM);
    // What ends in time is answered.
    upstream.let_go(1);
    assert_eq!(read_answer(&mut short).unwrap().status, 200);
    assert!(server.wait(Duration::from_secs(20)).success());
    assert!(read_answer(&mut long).map_or(true, |answer| answer.status == 502));
    let server = Server::configured(&folder, &toml);
    until("no slot is held", BACK, || server.client().get("/v1/pools/gpu").json()["in_use"] == 0);
}
