//! Goal: bad input never gets through and always gets an answer that names what is wrong. A table of
//! requests against a real server, and its status, code and field.

#![allow(clippy::unwrap_used, clippy::panic)]

mod support;

use std::io::{BufReader, Write as _};
use std::net::TcpStream;

use support::{Folder, Server, claim, read_answer, submit};

#[test]
fn each_wrong_request_is_answered_with_what_is_wrong() {
    let folder = Folder::new();
    let server = Server::start(&folder, &[]);
    let mut c = server.client();
    let id = submit(&mut c, r#"{"queue":"taken","payload":1}"#);
    let (_, token) = claim(&mut c, "taken");
    let job = |more: &str| format!(r#"{{"queue":"q","payload":1{more}}}"#);
    let long = "n".repeat(129);
    let progress = format!(r#"{{"token":"{token}","progress":"{}"}}"#, "p".repeat(1_100));
    let metadata = job(&format!(r#","metadata":"{}""#, "m".repeat(4_100)));
    let queues = format!(r#"{{"worker":"w","queues":[{}]}}"#, vec!["\"q\""; 33].join(","));
    let jobs = format!(r#"{{"jobs":[{}]}}"#, vec![job(""); 1_001].join(","));
    let on_job = |what: &str| format!("/v1/jobs/{id}/{what}");
    let table: Vec<(&str, String, String, u16, &str, &str)> = vec![
        ("POST", "/v1/jobs".into(), "".into(), 400, "empty_body", ""),
        ("POST", "/v1/jobs".into(), "{".into(), 400, "not_json", ""),
        ("POST", "/v1/jobs".into(), "hello".into(), 400, "not_json", ""),
        ("POST", "/v1/jobs".into(), "{\"queue\":\"q\",\"payload\":nan}".into(), 400, "not_json", ""),
        ("POST", "/v1/jobs".into(), "[]".into(), 422, "invalid_field", ""),
        ("POST", "/v1/jobs".into(), r#"{"payload":1}"#.into(), 422, "invalid_field", "queue"),
        ("POST", "/v1/jobs".into(), r#"{"queue":"q"}"#.into(), 422, "invalid_field", "payload"),
        ("POST", "/v1/jobs".into(), r#"{"queue":"","payload":1}"#.into(), 422, "invalid_field", "queue"),
        ("POST", "/v1/jobs".into(), format!(r#"{{"queue":"{long}","payload":1}}"#), 422, "invalid_field", "queue"),
        ("POST", "/v1/jobs".into(), r#"{"queue":"a\u0007b","payload":1}"#.into(), 422, "invalid_field", "queue"),
        ("POST", "/v1/jobs".into(), job(r#","colour":1"#), 422, "invalid_field", "colour"),
        ("POST", "/v1/jobs".into(), job(r#","queue":"q""#), 422, "invalid_field", ""),
        ("POST", "/v1/jobs".into(), job(r#","max_attempts":0"#), 422, "invalid_field", "max_attempts"),
        ("POST", "/v1/jobs".into(), job(r#","max_attempts":1001"#), 422, "invalid_field", "max_attempts"),
        ("POST", "/v1/jobs".into(), job(r#","lease_ms":1"#), 422, "invalid_field", "lease_ms"),
        ("POST", "/v1/jobs".into(), job(r#","delay_ms":18446744073709551615"#), 422, "invalid_field", "delay_ms"),
        ("POST", "/v1/jobs".into(), job(r#","delay_ms":"5""#), 422, "invalid_field", "delay_ms"),
        ("POST", "/v1/jobs".into(), job(r#","class":"urgent""#), 422, "invalid_field", "class"),
        ("POST", "/v1/jobs".into(), job(r#","run_at":"2300-01-01T00:00:00Z""#), 422, "invalid_field", "run_at"),
        ("POST", "/v1/jobs".into(), job(r#","cost":0"#), 422, "invalid_field", "cost"),
        ("POST", "/v1/jobs".into(), job(r#","backoff":{"factor":0.5}"#), 422, "invalid_field", "backoff.factor"),
        ("POST", "/v1/jobs".into(), metadata, 422, "invalid_field", "metadata"),
        ("POST", "/v1/jobs".into(), job(r#","idempotency_key":"""#), 422, "invalid_field", "idempotency_key"),
        ("POST", "/v1/jobs?x=1".into(), job(""), 422, "invalid_field", "x"),
        ("POST", "/v1/jobs:batch".into(), r#"{"jobs":[]}"#.into(), 422, "invalid_field", "jobs"),
        ("POST", "/v1/jobs:batch".into(), jobs, 422, "invalid_field", "jobs"),
        ("POST", "/v1/jobs:batch".into(), "{}".into(), 422, "invalid_field", "jobs"),
        ("POST", "/v1/queues/q/jobs?max_attempts=0".into(), "1".into(), 422, "invalid_field", "max_attempts"),
        ("POST", "/v1/queues/q/jobs".into(), " ".into(), 400, "empty_body", ""),
        ("POST", "/v1/queues/q/jobs?payload=1".into(), "1".into(), 422, "invalid_field", "payload"),
        ("POST", format!("/v1/queues/{long}/jobs"), "1".into(), 422, "invalid_field", "queue"),
        ("POST", "/v1/claims".into(), r#"{"worker":"w"}"#.into(), 422, "invalid_field", "queues"),
        ("POST", "/v1/claims".into(), r#"{"worker":"w","queues":[]}"#.into(), 422, "invalid_field", "queues"),
        ("POST", "/v1/claims".into(), r#"{"worker":"","queues":["q"]}"#.into(), 422, "invalid_field", "worker"),
        ("POST", "/v1/claims".into(), queues, 422, "invalid_field", "queues"),
        ("POST", "/v1/claims".into(), r#"{"worker":"w","queues":["q"],"max":0}"#.into(), 422, "invalid_field", "max"),
        (
            "POST",
            "/v1/claims".into(),
            r#"{"worker":"w","queues":["q"],"max":1001}"#.into(),
            422,
            "invalid_field",
            "max",
        ),
        (
            "POST",
            "/v1/claims".into(),
            r#"{"worker":"w","queues":["q"],"wait_ms":60001}"#.into(),
            422,
            "invalid_field",
            "wait_ms",
        ),
        (
            "POST",
            "/v1/claims".into(),
            r#"{"worker":"w","queues":["q"],"claim_id":""}"#.into(),
            422,
            "invalid_field",
            "claim_id",
        ),
        ("POST", on_job("heartbeat"), "{}".into(), 422, "invalid_field", "token"),
        ("POST", on_job("heartbeat"), progress, 422, "invalid_field", "progress"),
        ("POST", on_job("heartbeat"), r#"{"token":"x"}"#.into(), 409, "lease_lost", ""),
        ("POST", on_job("fail"), format!(r#"{{"token":"{token}"}}"#), 422, "invalid_field", "error"),
        (
            "POST",
            on_job("fail"),
            format!(r#"{{"token":"{token}","error":{{}}}}"#),
            422,
            "invalid_field",
            "error.message",
        ),
        (
            "POST",
            on_job("complete"),
            format!(r#"{{"token":"{token}","result":1,"content_type":"a/b"}}"#),
            422,
            "invalid_field",
            "content_type",
        ),
        ("POST", on_job("cancel"), r#"{"why":1}"#.into(), 422, "invalid_field", "why"),
        ("GET", "/v1/jobs/nonsense".into(), "".into(), 404, "unknown_job", ""),
        ("GET", format!("/v1/jobs/{}", id.to_lowercase()), "".into(), 404, "unknown_job", ""),
        ("POST", "/v1/jobs/nonsense/complete".into(), r#"{"token":"x"}"#.into(), 404, "unknown_job", ""),
        ("POST", "/v1/jobs/00000000000000000000000000/cancel".into(), "".into(), 404, "unknown_job", ""),
        ("GET", "/v1/jobs?limit=0".into(), "".into(), 422, "invalid_field", "limit"),
        ("GET", "/v1/jobs?limit=1001".into(), "".into(), 422, "invalid_field", "limit"),
        ("GET", "/v1/jobs?limit=ten".into(), "".into(), 422, "invalid_field", "limit"),
        ("GET", "/v1/jobs?status=lost".into(), "".into(), 422, "invalid_field", "status"),
        ("GET", "/v1/jobs?%ff=1".into(), "".into(), 422, "invalid_field", ""),
        ("GET", "/v1/events?after=x".into(), "".into(), 422, "invalid_field", "after"),
        ("PUT", "/v1/queues/q".into(), r#"{"lease_ms":5}"#.into(), 422, "invalid_field", "lease_ms"),
        (
            "POST",
            "/v1/queues/q/pause".into(),
            format!(r#"{{"reason":"{}"}}"#, "r".repeat(300)),
            422,
            "invalid_field",
            "reason",
        ),
        ("POST", "/v1/queues/q/purge".into(), r#"{"status":"some"}"#.into(), 422, "invalid_field", "status"),
        ("GET", "/v1/nothing".into(), "".into(), 404, "unknown_path", ""),
        ("GET", "/v1/queues/%zz".into(), "".into(), 404, "unknown_path", ""),
        ("PATCH", "/v1/jobs".into(), "".into(), 405, "wrong_method", ""),
        ("GET", "/v1/claims".into(), "".into(), 405, "wrong_method", ""),
    ];
    for (method, path, body, expected, code, field) in table {
        let answer = c.send(method, &path, &[("content-type", "application/json")], body.as_bytes());
        let what = format!("{method} {path} {}", &body[..body.len().min(80)]);
        let problem = answer.json();
        assert_eq!((answer.status, problem["code"].as_str()), (expected, Some(code)), "{what}: {problem}");
        assert_eq!(problem["field"].as_str().unwrap_or_default(), field, "{what}: {problem}");
        assert_eq!(problem["status"], expected, "{what}");
        assert_eq!(answer.header("content-type"), Some("application/problem+json"), "{what}");
        assert_eq!(answer.header("allow").is_some(), expected == 405, "{what}");
    }
    let queues = c.get("/v1/queues").json();
    let names: Vec<&str> = queues["queues"].as_array().unwrap().iter().filter_map(|q| q["name"].as_str()).collect();
    assert_eq!(names, ["taken"], "nothing of all this came through");
}

#[test]
fn what_is_said_is_what_is_wrong() {
    let folder = Folder::new();
    let server = Server::start(&folder, &[]);
    let mut c = server.client();
    let late = c.post("/v1/jobs", r#"{"queue":"q","payload":1,"run_at":"2300-01-01T00:00:00Z"}"#).json();
    assert!(late["detail"].as_str().unwrap().contains("2255-06-05T23:47:34.740Z"), "the limit: {late}");
    let twice = [("idempotency-key", "a"), ("idempotency-key", "b")];
    let twice = c.send("POST", "/v1/jobs", &twice, br#"{"queue":"q","payload":1}"#);
    assert_eq!((twice.status, &twice.json()["field"]), (422, &"Idempotency-Key".into()), "it could be either");
    let empty = c.post("/v1/queues/q/jobs", "").json();
    assert!(!empty["detail"].as_str().unwrap().contains("object"), "any JSON would do: {empty}");
}

#[test]
fn a_content_type_makes_no_json_of_what_is_none() {
    let folder = Folder::new();
    let server = Server::start(&folder, &[]);
    let mut c = server.client();
    let id = submit(&mut c, r#"{"queue":"q","payload_base64":"ew==","content_type":"application/json"}"#);
    let leased = c.post("/v1/claims", r#"{"worker":"w","queues":["q"]}"#).json()["jobs"][0].clone();
    assert_eq!((&leased["payload_base64"], leased.get("payload")), (&"ew==".into(), None));
    let result = format!(r#"{{"token":{},"result_base64":"ew==","content_type":"application/json"}}"#, leased["token"]);
    assert_eq!(c.post(&format!("/v1/jobs/{id}/complete"), result).status, 200);
    assert_eq!(c.get(&format!("/v1/jobs/{id}/result")).body, b"{");
}

#[test]
fn a_page_of_another_site_changes_nothing() {
    let folder = Folder::new();
    let server = Server::start(&folder, &[]);
    let mut c = server.client();
    for headers in [[("origin", "http://evil.example")], [("sec-fetch-site", "cross-site")], [("origin", "null")]] {
        let answer = c.send("POST", "/v1/jobs", &headers, br#"{"queue":"q","payload":1}"#);
        assert_eq!((answer.status, answer.code()), (403, "cross_origin".into()), "{headers:?}");
    }
    let own = format!("http://{}", server.address);
    let answer = c.send("POST", "/v1/jobs", &[("origin", &own)], br#"{"queue":"q","payload":1}"#);
    assert_eq!(answer.status, 201);
    // A name that somebody else controls, pointed at this machine: its pages are not ours.
    for host in ["evil.example", "evil.example:7411", "127.0.0.1.evil.example", ""] {
        let answer = c.send("GET", "/v1/queues", &[("host", host), ("sec-fetch-site", "same-origin")], b"");
        assert_eq!((answer.status, answer.code()), (403, "cross_origin".into()), "{host}");
    }
    for host in ["localhost:7411", "127.0.0.1", "[::1]:7411"] {
        let answer = c.send("GET", "/v1/queues", &[("host", host), ("sec-fetch-site", "same-origin")], b"");
        assert_eq!(answer.status, 200, "{host}");
    }
}

#[test]
fn a_body_that_is_too_large_is_answered() {
    let folder = Folder::new();
    let server = Server::start(&folder, &["--max-body", "1MiB"]);
    let mut c = server.client();
    let fits = format!(r#"{{"queue":"q","payload":"{}"}}"#, "x".repeat(1_000_000));
    assert_eq!(c.post("/v1/jobs", fits).status, 201);
    // The client sends all of it before it reads.
    let large = format!(r#"{{"queue":"q","payload":"{}"}}"#, "x".repeat(20_000_000));
    let answer = c.post("/v1/jobs", &large);
    assert_eq!((answer.status, answer.code()), (413, "too_large".into()));
    assert_eq!(c.get("/healthz").status, 200, "and the connection goes on");

    // Without a length, in pieces.
    let mut stream = BufReader::new(TcpStream::connect(server.address).unwrap());
    stream
        .get_mut()
        .write_all(b"POST /v1/queues/q/jobs HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        .unwrap();
    let piece = vec![b'x'; 100_000];
    for _ in 0..50 {
        write!(stream.get_mut(), "{:x}\r\n", piece.len()).unwrap();
        stream.get_mut().write_all(&piece).unwrap();
        stream.get_mut().write_all(b"\r\n").unwrap();
    }
    stream.get_mut().write_all(b"0\r\n\r\n").unwrap();
    assert_eq!(read_answer(&mut stream).unwrap().status, 413);

    // Who asks first is told before it sends.
    let mut stream = BufReader::new(TcpStream::connect(server.address).unwrap());
    let head = "POST /v1/jobs HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 5000000\r\n\r\n";
    stream.get_mut().write_all(head.as_bytes()).unwrap();
    assert_eq!(read_answer(&mut stream).unwrap().status, 413);
}
