//! Goal: whatever a peer does to its connection costs the server a bounded time and a place, and
//! nobody else anything. Bare sockets against a real server with short time-outs.

#![allow(clippy::unwrap_used, clippy::panic)]

mod support;

use std::io::{BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use support::{Folder, Server, closes, exchange, raw, read_answer, read_line, submit, until};

const HEALTH: &[u8] = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n";

fn head(line: &str, headers: &str) -> Vec<u8> {
    format!("{line} HTTP/1.1\r\nhost: x\r\n{headers}\r\n").into_bytes()
}

/// The write half, to send more.
fn send(stream: &mut BufReader<TcpStream>, bytes: &[u8]) {
    stream.get_mut().write_all(bytes).unwrap();
}

#[test]
fn slow_peers_are_given_up() {
    let folder = Folder::new();
    let toml =
        "head_timeout = \"500ms\"\nidle_timeout = \"1500ms\"\nbody_timeout = \"700ms\"\nwrite_timeout = \"700ms\"";
    let server = Server::configured(&folder, toml);
    let mut fine = server.client();
    assert_eq!(fine.get("/healthz").status, 200);

    // A head that never ends, though something comes all the time.
    let begun = Instant::now();
    let mut slow = raw(server.address);
    let mut more = slow.get_ref().try_clone().unwrap();
    let drip = std::thread::spawn(move || {
        let _ = more.write_all(b"GET /healthz HTTP/1.1\r\n");
        while more.write_all(b"x: y\r\n").is_ok() {
            std::thread::sleep(Duration::from_millis(50));
        }
    });
    assert!(closes(&mut slow));
    assert!(begun.elapsed() >= Duration::from_millis(450), "not before its time");
    drop(slow);
    drip.join().unwrap();

    // One that says nothing, and one that has had its answer.
    let begun = Instant::now();
    let mut silent = raw(server.address);
    assert!(closes(&mut silent));
    assert!(begun.elapsed() >= Duration::from_millis(1_400));
    let mut idle = raw(server.address);
    send(&mut idle, HEALTH);
    assert_eq!(read_answer(&mut idle).unwrap().status, 200);
    let begun = Instant::now();
    assert!(closes(&mut idle));
    assert!(begun.elapsed() >= Duration::from_millis(1_300));

    // A body that stops, and one that comes a byte at a time: told so.
    for pause in [None, Some(Duration::from_millis(50))] {
        let mut slow = raw(server.address);
        send(&mut slow, &head("POST /v1/jobs", "content-length: 100000\r\n"));
        let mut more = slow.get_ref().try_clone().unwrap();
        let drip = std::thread::spawn(move || {
            while pause.is_some_and(|p| {
                more.write_all(b" ").is_ok() && {
                    std::thread::sleep(p);
                    true
                }
            }) {}
        });
        let answer = read_answer(&mut slow).unwrap();
        assert_eq!((answer.status, answer.code()), (408, "incomplete_body".into()));
        assert_eq!(answer.header("connection"), Some("close"));
        assert!(closes(&mut slow));
        drop(slow);
        drip.join().unwrap();
    }

    // A reader that does not read: 12 MB do not fit into what the system buffers.
    let body = format!(r#"{{"queue":"large","payload":"{}"}}"#, "x".repeat(12_000_000));
    let large = submit(&mut server.client(), &body);
    let mut reader = raw(server.address);
    send(&mut reader, &head(&format!("GET /v1/jobs/{large}/payload"), ""));
    let open = || {
        let metrics = server.client().get("/metrics").text();
        let line = metrics.lines().find(|l| l.starts_with("leasehold_http_connections ")).unwrap();
        line.rsplit(' ').next().unwrap().parse::<u64>().unwrap()
    };
    // Only the connection that asks is left.
    until("the reader is given up", Duration::from_secs(20), || open() == 1);
    let mut rest = Vec::new();
    let got = reader.read_to_end(&mut rest).map_or(rest.len(), |n| n);
    assert!(got < 12_000_000, "{got}");
}

#[test]
fn when_all_places_are_taken_others_are_told_and_health_is_answered() {
    let folder = Folder::new();
    let server = Server::configured(&folder, "max_connections = 8");
    let mut taken: Vec<_> = (0..8).map(|_| raw(server.address)).collect();
    for one in &mut taken {
        send(one, HEALTH);
        assert_eq!(read_answer(one).unwrap().status, 200);
    }
    let job = br#"{"queue":"q","payload":1}"#;
    for _ in 0..200 {
        let answer = server.client().send("POST", "/v1/jobs", &[], job);
        assert_eq!((answer.status, answer.code()), (503, "too_many_connections".into()));
        assert_eq!(answer.header("retry-after"), Some("1"));
        assert_eq!(answer.header("connection"), Some("close"));
        assert_eq!(server.client().get("/healthz").status, 200);
    }
    assert_eq!(server.client().get("/readyz").status, 200);
    assert!(server.client().get("/metrics").text().contains("leasehold_http_connections_spare_total 402"));
    // Nobody who holds a place has noticed.
    for one in &mut taken {
        send(one, HEALTH);
        assert_eq!(read_answer(one).unwrap().status, 200);
    }
    // Nor can the spare places be held: those who do are closed, and a check that waited is answered.
    let _holders: Vec<_> = (0..100).map(|_| raw(server.address)).collect();
    assert_eq!(exchange(server.address, HEALTH).unwrap().status, 200);
    drop(taken);
    until("places are free again", Duration::from_secs(30), || {
        server.client().try_send("POST", "/v1/jobs", &[], job).is_ok_and(|a| a.status == 201)
    });
}

#[test]
fn heads_have_bounds() {
    let folder = Folder::new();
    let server = Server::start(&folder, &[]);
    let get = |line: &str, headers: &str| exchange(server.address, &head(line, headers)).unwrap();
    let long = "x".repeat(8_200);
    let answer = get(&format!("GET /v1/jobs?cursor={long}"), "");
    assert_eq!((answer.status, answer.code()), (414, "uri_too_long".into()));
    let fits = "x".repeat(8_000);
    assert_eq!(get(&format!("GET /v1/jobs?cursor={fits}"), "").code(), "bad_cursor");
    assert_eq!(get("GET /healthz", &format!("a: {}\r\n", "x".repeat(60_000))).status, 200);
    assert_eq!(get("GET /healthz", &format!("a: {}\r\n", "x".repeat(70_000))).status, 431);
    assert_eq!(get("GET /healthz", &"a: b\r\n".repeat(90)).status, 200);
    assert_eq!(get("GET /healthz", &"a: b\r\n".repeat(101)).status, 431);
    // The answer arrives although the client goes on sending: a megabyte of headers.
    let mut stream = raw(server.address);
    let mut more = stream.get_ref().try_clone().unwrap();
    let flood = std::thread::spawn(move || {
        let _ = more.write_all(b"GET /healthz HTTP/1.1\r\nhost: x\r\n");
        let _ = more.write_all("a: b\r\n".repeat(170_000).as_bytes());
    });
    assert_eq!(read_answer(&mut stream).unwrap().status, 431);
    flood.join().unwrap();
}

#[test]
fn what_is_not_http_is_refused() {
    let folder = Folder::new();
    let server = Server::start(&folder, &[]);
    let status = |bytes: &[u8]| exchange(server.address, bytes).map_or(0, |a| a.status);
    for (bytes, expected) in [
        (&b"GET /healthz HTTP/1.1\r\n\r\n"[..], 400),
        (b"GET /healthz HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nhost: a b\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nhost: <script>\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nhost:\r\n\r\n", 200),
        (b"GET /healthz HTTP/1.0\r\n\r\n", 200),
        (b"GET http://x/healthz HTTP/1.1\r\nhost: x\r\n\r\n", 200),
        (b"OPTIONS * HTTP/1.1\r\nhost: x\r\n\r\n", 404),
        (b"OPTIONS /healthz HTTP/1.1\r\nhost: x\r\n\r\n", 405),
        (b"CONNECT x:80 HTTP/1.1\r\nhost: x\r\n\r\n", 404),
        (b"GET /healthz HTTP/1.1\r\nhost: x\r\nno colon\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nhost : x\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nhost: x\r\n folded: y\r\n\r\n", 400),
        (b"GET /he\x01lthz HTTP/1.1\r\nhost: x\r\n\r\n", 400),
        (b"GET /healthz HTTP/3.0\r\nhost: x\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        // HTTP/2 is not spoken here: closed at once.
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 0),
        (b"POST /v1/jobs HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n123456", 400),
        (b"POST /v1/jobs HTTP/1.1\r\nhost: x\r\ncontent-length: +5\r\n\r\n12345", 400),
        (b"POST /v1/jobs HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999999999999\r\n\r\n12345", 400),
        (b"POST /v1/jobs HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip\r\n\r\n12345", 400),
        (b"POST /v1/jobs HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked, gzip\r\n\r\n12345", 400),
        (b"POST /v1/jobs HTTP/1.0\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST /v1/jobs HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n", 400),
        (b"POST /v1/jobs HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\n", 400),
    ] {
        let what = String::from_utf8_lossy(bytes);
        assert_eq!(status(bytes), expected, "{what}");
    }
    assert_eq!(server.client().get("/v1/queues").json()["queues"], serde_json::json!([]), "nothing came through");

    // Two lengths that contradict each other: the chunks count, and nothing after them is a request.
    for lengths in
        ["content-length: 3\r\ntransfer-encoding: chunked\r\n", "transfer-encoding: chunked\r\ncontent-length: 3\r\n"]
    {
        let mut stream = raw(server.address);
        let mut bytes = head("POST /v1/jobs", lengths);
        bytes.extend_from_slice(b"2\r\n{}\r\n0\r\n\r\n");
        bytes.extend_from_slice(HEALTH);
        send(&mut stream, &bytes);
        assert_eq!(read_answer(&mut stream).unwrap().status, 422);
        let mut rest = String::new();
        assert_eq!(stream.read_to_string(&mut rest).map(|_| rest).unwrap_or_default(), "");
    }
}

#[test]
fn calls_on_one_connection_are_answered_in_order() {
    let folder = Folder::new();
    let server = Server::start(&folder, &[]);
    // A hundred at once, of all kinds.
    let mut bytes = Vec::new();
    for n in 0..100 {
        let body = format!(r#"{{"queue":"q","payload":{n}}}"#);
        match n % 5 {
            0 => bytes.extend_from_slice(&head("GET /v1/jobs/nonsense", "")),
            1 => {
                bytes.extend_from_slice(&head("POST /v1/jobs", &format!("content-length: {}\r\n", body.len())));
                bytes.extend_from_slice(body.as_bytes());
            }
            2 => {
                bytes.extend_from_slice(&head("POST /v1/jobs", "transfer-encoding: chunked\r\n"));
                let (a, b) = body.split_at(7);
                let chunks = format!("{:x}\r\n{a}\r\n{:X};ext=1\r\n{b}\r\n0\r\ntrailer: x\r\n\r\n", a.len(), b.len());
                bytes.extend_from_slice(chunks.as_bytes());
            }
            3 => bytes.extend_from_slice(&head("HEAD /v1/queues", "")),
            _ => {
                bytes.extend_from_slice(&head("POST /v1/nothing", "content-length: 3\r\n"));
                bytes.extend_from_slice(b"GET");
            }
        }
    }
    let mut stream = raw(server.address);
    send(&mut stream, &bytes);
    for n in 0..100 {
        if n % 5 == 3 {
            // A HEAD's answer has a length and no body.
            assert!(read_line(&mut stream).unwrap().starts_with("HTTP/1.1 200"), "{n}");
            while !read_line(&mut stream).unwrap().is_empty() {}
            continue;
        }
        let answer = read_answer(&mut stream).unwrap();
        assert_eq!(answer.status, [404, 201, 201, 0, 404][n % 5], "{n}");
    }
    // The connection goes on, and so it does with a slow call in front.
    let claim = r#"{"worker":"w","queues":["none"],"wait_ms":300}"#;
    let mut two = head("POST /v1/claims", &format!("content-length: {}\r\n", claim.len()));
    two.extend_from_slice(claim.as_bytes());
    two.extend_from_slice(HEALTH);
    send(&mut stream, &two);
    assert_eq!(read_answer(&mut stream).unwrap().json()["jobs"], serde_json::json!([]));
    assert_eq!(read_answer(&mut stream).unwrap().json()["status"], "ok");
    send(&mut stream, &head("GET /healthz", "connection: close\r\n"));
    assert_eq!(read_answer(&mut stream).unwrap().status, 200);
    assert!(closes(&mut stream));
}

#[test]
fn who_asks_before_sending_is_told_to_go_on() {
    let folder = Folder::new();
    let server = Server::start(&folder, &["--max-body", "1MiB"]);
    let body = r#"{"queue":"q","payload":1}"#;
    let mut stream = raw(server.address);
    send(&mut stream, &head("POST /v1/jobs", &format!("expect: 100-continue\r\ncontent-length: {}\r\n", body.len())));
    assert_eq!(read_answer(&mut stream).unwrap().status, 100);
    send(&mut stream, body.as_bytes());
    assert_eq!(read_answer(&mut stream).unwrap().status, 201);
    // Refused without being told to go on; the connection cannot be used for anything else.
    for (line, length, expected) in [("POST /v1/jobs", 2_000_000, 413), ("POST /v1/nothing", 10, 404)] {
        let mut stream = raw(server.address);
        send(&mut stream, &head(line, &format!("expect: 100-continue\r\ncontent-length: {length}\r\n")));
        let answer = read_answer(&mut stream).unwrap();
        assert_eq!(answer.status, expected);
        assert_eq!(answer.header("connection"), Some("close"));
        assert!(closes(&mut stream));
    }
}

#[test]
fn sizes_at_their_bounds() {
    let folder = Folder::new();
    let server = Server::start(&folder, &["--max-body", "100000"]);
    let mut c = server.client();
    let text = |len: usize| {
        let frame = r#"{"queue":"q","payload":""}"#.len();
        format!(r#"{{"queue":"q","payload":"{}"}}"#, "x".repeat(len - frame))
    };
    assert_eq!(c.post("/v1/jobs", text(100_000)).status, 201);
    let answer = c.post("/v1/jobs", text(100_001));
    assert_eq!((answer.status, answer.code()), (413, "too_large".into()));
    assert_eq!(c.send("POST", "/v1/queues/q/jobs", &[], &vec![b'x'; 100_000]).status, 201);
    assert_eq!(c.send("POST", "/v1/queues/q/jobs", &[], &vec![b'x'; 100_001]).status, 413);

    // An error of 10 MB is cut to its bound, at a character's end.
    let folder = Folder::new();
    let server = Server::start(&folder, &[]);
    let mut c = server.client();
    let id = submit(&mut c, r#"{"queue":"q","payload":1}"#);
    let (_, token) = support::claim(&mut c, "q");
    let error = "é".repeat(5_000_000);
    let body = format!(r#"{{"token":"{token}","error":{{"message":"{error}","type":"{error}","detail":"{error}"}}}}"#);
    assert_eq!(c.post(&format!("/v1/jobs/{id}/fail"), &body).status, 413, "30 MB are too much for a body");
    let body = format!(r#"{{"token":"{token}","error":{{"message":"{error}","type":"t"}}}}"#);
    assert_eq!(c.post(&format!("/v1/jobs/{id}/fail"), &body).status, 200);
    let job = c.get(&format!("/v1/jobs/{id}"));
    let kept = job.json()["attempts"][0]["error"].clone();
    let message = kept["message"].as_str().unwrap();
    assert!((4_000..=4_096).contains(&message.len()), "{}", message.len());
    assert!(message.chars().all(|c| c == 'é'));
    assert!(job.body.len() < 8_192);
}

#[test]
fn every_call_has_a_name() {
    let folder = Folder::new();
    let server = Server::start(&folder, &[]);
    let mut c = server.client();
    let mine = c.send("GET", "/healthz", &[("x-request-id", "mine-1")], b"");
    assert_eq!(mine.header("x-request-id"), Some("mine-1"));
    let made = |c: &mut support::Client, path| c.get(path).header("x-request-id").unwrap().to_owned();
    let (a, b) = (made(&mut c, "/healthz"), made(&mut c, "/v1/nothing"));
    assert_ne!(a, b);
    assert_eq!(a.len(), 24);
    let odd = c.send("GET", "/healthz", &[("x-request-id", "a b")], b"");
    assert_eq!(odd.header("x-request-id").map(str::len), Some(24));
}
