//! Goal: every call of the API refuses every kind of bad input with exactly the status, code and field that
//! `API.md` promises, and is not changed by it. The rows are made from the table of routes and from the
//! served description: a valid call of each route, and then one thing wrong with it at a time. A
//! route without a valid call here fails the test. And: every valid call that changes something is refused
//! while the store cannot write.

#![allow(clippy::unwrap_used, clippy::panic)]

mod support;

use std::cell::RefCell;
use std::time::Duration;

use leasehold_http::routes::{Call, ROUTES, Route, Takes};
use serde_json::{Map, Value, json};
use support::{Answer, Client, Folder, Server, submit, until};

/// A valid call of a route.
struct Sample {
    path: String,
    body: Vec<u8>,
}

/// Makes what a route needs, and calls it.
struct World {
    client: RefCell<Client>,
    description: Value,
}

impl World {
    fn send(&self, method: &str, path: &str, body: &[u8]) -> Answer {
        self.client.borrow_mut().send(method, path, &[("content-type", "application/json")], body)
    }

    fn job(&self) -> String {
        submit(&mut self.client.borrow_mut(), r#"{"queue":"waiting","payload":1}"#)
    }

    fn leased(&self) -> (String, String) {
        let mut client = self.client.borrow_mut();
        submit(&mut client, r#"{"queue":"leased","payload":1}"#);
        let answer = client.post("/v1/claims", r#"{"worker":"w","queues":["leased"],"lease_ms":3600000}"#).json();
        let job = &answer["jobs"][0];
        (job["id"].as_str().unwrap().into(), job["token"].as_str().unwrap().into())
    }

    fn ended(&self, how: &str, body: &str) -> String {
        let (id, token) = self.leased();
        let body = format!(r#"{{"token":"{token}"{body}}}"#);
        assert_eq!(self.send("POST", &format!("/v1/jobs/{id}/{how}"), body.as_bytes()).status, 200);
        id
    }

    fn group(&self, more: &str) -> String {
        let body = format!(r#"{{"queue":"waiting","children":[{{"payload":1}}]{more}}}"#);
        let group = self.send("POST", "/v1/groups", body.as_bytes()).json();
        group["id"].as_str().unwrap().to_owned()
    }

    fn pool(&self, name: &str) -> String {
        assert_eq!(self.send("PUT", &format!("/v1/pools/{name}"), br#"{"total":8}"#).status, 200);
        format!("/v1/pools/{name}")
    }

    /// The path of a slot that is held.
    fn slot(&self) -> String {
        let answer = self.send("POST", &format!("{}/slots", self.pool("p")), br#"{"lease_ms":3600000}"#);
        assert_eq!(answer.status, 201, "{}", answer.text());
        answer.header("location").unwrap().to_owned()
    }

    /// What must stay as it is: each queue's name, its number of jobs (in whatever status: time passes),
    /// and its pause.
    fn books(&self) -> Vec<(String, u64, bool)> {
        let queues = self.send("GET", "/v1/queues", b"").json();
        let jobs = |q: &Value| q["counts"].as_object().unwrap().values().filter_map(Value::as_u64).sum();
        let book = |q: &Value| (q["name"].as_str().unwrap().to_owned(), jobs(q), q["paused"] == true);
        queues["queues"].as_array().unwrap().iter().map(book).collect()
    }

    fn sample(&self, call: Call) -> Option<Sample> {
        let sample = |path: String, body: Value| Some(Sample { path, body: body.to_string().into_bytes() });
        let bare = |path: String| Some(Sample { path, body: Vec::new() });
        let under = |what: &str, mut body: Value| {
            let (id, token) = self.leased();
            body["token"] = token.into();
            sample(format!("/v1/jobs/{id}/{what}"), body)
        };
        let items = |path: &str, mut item: Value| {
            let (id, token) = self.leased();
            item["id"] = id.into();
            item["token"] = token.into();
            sample(path.into(), json!({"items": [item]}))
        };
        let error = json!({"message": "m", "type": "t", "detail": "d"});
        match call {
            Call::Submit => sample("/v1/jobs".into(), json!({"queue": "waiting", "payload": {"a": [1]}})),
            Call::SubmitBatch => sample("/v1/jobs:batch".into(), json!({"jobs": [{"queue": "waiting", "payload": 1}]})),
            Call::SubmitRaw => sample("/v1/queues/waiting/jobs".into(), json!([1])),
            Call::Claim => sample("/v1/claims".into(), json!({"worker": "w", "queues": ["none"]})),
            Call::Heartbeat => under("heartbeat", json!({"progress": 1})),
            Call::Complete => under("complete", json!({"result": 1})),
            Call::Fail => under("fail", json!({"error": error})),
            Call::Release => under("release", json!({})),
            Call::Completions => items("/v1/completions", json!({"result": 1})),
            Call::Failures => items("/v1/failures", json!({"error": error})),
            Call::Heartbeats => items("/v1/heartbeats", json!({"progress": 1})),
            Call::List => bare("/v1/jobs".into()),
            Call::Get => bare(format!("/v1/jobs/{}", self.job())),
            Call::Payload => bare(format!("/v1/jobs/{}/payload", self.job())),
            Call::Result => bare(format!("/v1/jobs/{}/result", self.ended("complete", ",\"result\":1"))),
            Call::Why => bare(format!("/v1/jobs/{}/why", self.job())),
            Call::Cancel => bare(format!("/v1/jobs/{}/cancel", self.job())),
            Call::Retry => {
                let dead = self.ended("fail", r#","error":{"message":"m"},"retryable":false"#);
                bare(format!("/v1/jobs/{dead}/retry"))
            }
            Call::Delete => bare(format!("/v1/jobs/{}", self.ended("complete", ""))),
            Call::JobRecords => bare(format!("/v1/jobs/{}/records", self.job())),
            Call::Queues => bare("/v1/queues".into()),
            Call::Queue => bare("/v1/queues/waiting".into()),
            Call::SetQueue => sample("/v1/queues/waiting".into(), json!({"lease_ms": 60_000})),
            Call::Pause => sample("/v1/queues/waiting/pause".into(), json!({"reason": "r"})),
            Call::Resume => bare("/v1/queues/waiting/resume".into()),
            Call::Purge => sample("/v1/queues/waiting/purge".into(), json!({"status": "expired"})),
            Call::QueueRecords => bare("/v1/queues/waiting/records".into()),
            Call::KeyRecords => {
                self.client.borrow_mut().send(
                    "POST",
                    "/v1/jobs",
                    &[("idempotency-key", "k")],
                    br#"{"queue":"waiting","payload":1}"#,
                );
                bare("/v1/keys/k".into())
            }
            Call::CreateGroup => sample(
                "/v1/groups".into(),
                json!({"queue": "waiting", "children": [{"payload": 1}], "max_parallel": 1}),
            ),
            Call::Group => bare(format!("/v1/groups/{}", self.group(""))),
            Call::ExtendGroup => sample(
                format!("/v1/groups/{}/children", self.group(r#","sealed":false"#)),
                json!({"from": 1, "children": [{"payload": 1}]}),
            ),
            Call::SealGroup => bare(format!("/v1/groups/{}/seal", self.group(r#","sealed":false"#))),
            Call::CancelGroup => bare(format!("/v1/groups/{}/cancel", self.group(""))),
            Call::Children => bare(format!("/v1/groups/{}/children", self.group(""))),
            Call::GroupResult => {
                let id = self.group("");
                self.send("POST", &format!("/v1/groups/{id}/cancel"), b"");
                self.send("GET", &format!("/v1/groups/{id}?wait_ms=10000"), b"");
                bare(format!("/v1/groups/{id}/result"))
            }
            Call::Pools => bare("/v1/pools".into()),
            Call::Pool => bare(self.pool("p")),
            Call::SetPool => sample("/v1/pools/p".into(), json!({"total": 8, "batch_max": 6})),
            Call::DeletePool => bare(self.pool("empty")),
            Call::Acquire => sample(format!("{}/slots", self.pool("p")), json!({"class": "batch", "slot_id": "s"})),
            Call::RefreshSlot => bare(format!("{}/refresh", self.slot())),
            Call::ReleaseSlot => bare(self.slot()),
            Call::Quarantine => bare("/v1/quarantine".into()),
            Call::Events => bare("/v1/events".into()),
            Call::Audit => bare("/v1/audit".into()),
            Call::Repair => bare("/v1/audit:repair".into()),
            Call::Health => bare("/healthz".into()),
            Call::Ready => bare("/readyz".into()),
            Call::Metrics => bare("/metrics".into()),
            Call::Description => bare("/openapi.json".into()),
            Call::Page => bare("/".into()),
            // Without an upstream there is no valid call: see `proxy.rs`.
            Call::Proxy => None,
        }
    }

    /// The schema behind a reference, and of an optional field what it is if it is given.
    fn resolve<'a>(&'a self, mut schema: &'a Value) -> &'a Value {
        loop {
            schema = if let Some(target) = schema["$ref"].as_str() {
                self.description.pointer(target.trim_start_matches('#')).unwrap()
            } else if let Some(first) =
                schema.get("anyOf").and_then(|any| any.get(0)).filter(|_| schema.get("type").is_none())
            {
                first
            } else {
                return schema;
            };
        }
    }
}

/// One thing that is wrong, and the answer that it must get.
struct Wrong {
    method: String,
    path: String,
    body: Vec<u8>,
    status: u16,
    code: &'static str,
    field: Option<String>,
}

struct Rows<'a> {
    route: &'a Route,
    sample: &'a Sample,
    rows: Vec<Wrong>,
}

impl Rows<'_> {
    fn add(&mut self, path: String, body: Vec<u8>, status: u16, code: &'static str, field: Option<&str>) {
        let (method, field) = (self.route.method.to_string(), field.map(str::to_owned));
        self.rows.push(Wrong { method, path, body, status, code, field });
    }

    fn path(&mut self, path: String, status: u16, code: &'static str, field: Option<&str>) {
        self.add(path, self.sample.body.clone(), status, code, field);
    }

    fn body(&mut self, body: impl Into<Vec<u8>>, status: u16, code: &'static str, field: Option<&str>) {
        self.add(self.sample.path.clone(), body.into(), status, code, field);
    }

    fn invalid(&mut self, body: impl Into<Vec<u8>>, field: &str) {
        self.body(body, 422, "invalid_field", Some(field));
    }
}

const LONG: usize = 70_000;

fn paths(rows: &mut Rows<'_>) {
    let path = rows.sample.path.clone();
    for method in ["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW"] {
        let known = |r: &&Route| r.path == rows.route.path && r.method.as_str() == method;
        if !ROUTES.iter().any(|r| known(&r)) {
            let row = Wrong {
                method: method.into(),
                path: path.clone(),
                body: rows.sample.body.clone(),
                status: 405,
                code: "wrong_method",
                field: None,
            };
            rows.rows.push(row);
        }
    }
    for (query, field) in [
        ("colour=1", "colour"),
        ("colour", "colour"),
        ("%00=1", "\\0"),
        ("a%0Ab=1", "a\\nb"),
        ("%3Cscript%3E=1", "<script>"),
        ("%ff=1", ""),
        ("%=1", ""),
        ("x=%zz", ""),
    ] {
        rows.path(format!("{path}?{query}"), 422, "invalid_field", Some(field));
    }
    rows.path(format!("{path}?x={}", "y".repeat(9_000)), 414, "uri_too_long", None);
    if path != "/" {
        rows.path(format!("{path}/"), 404, "unknown_path", None);
        if !["{queue}", "{key}", "{pool}", "{slot}"].iter().any(|name| rows.route.path.ends_with(name)) {
            rows.path(format!("{path}%2f"), 404, "", None);
        }
    }
    let with = |argument: &str| {
        let name = rows.route.path.split('/').find(|s| s.starts_with('{')).unwrap_or_default();
        rows.route.path.replace(name, argument)
    };
    if rows.route.path.contains("{id}") {
        let id = path.split('/').nth(3).unwrap();
        let code = if path.starts_with("/v1/groups") { "unknown_group" } else { "unknown_job" };
        let unknown = ["00000000000000000000000000", "7ZZZZZZZZZZZZZZZZZZZZZZZZZ"];
        let malformed = ["x", "-1", "%00", "%20", "..%2f", "%F0%9F%98%80", "ILOUILOUILOUILOUILOUILOUIL"];
        let near = [id.to_lowercase(), format!("{id}0"), id[1..].to_owned(), format!("{id}%20"), "0".repeat(5_000)];
        for id in unknown.into_iter().chain(malformed).map(str::to_owned).chain(near) {
            rows.path(with(&id), 404, code, None);
        }
        rows.path(with("%ff"), 404, "unknown_path", None);
        rows.path(with(""), 404, "unknown_path", None);
    }
    if rows.route.path.contains("{queue}") {
        for name in
            ["n".repeat(129), "%07".into(), "a%00b".into(), "%C2%85".into(), "%0A".into(), "%E2%82%AC".repeat(43)]
        {
            rows.path(with(&name), 422, "invalid_field", Some("queue"));
        }
        if matches!(rows.route.call, Call::Queue | Call::Purge | Call::QueueRecords) {
            rows.path(with("never%20named"), 404, "unknown_queue", None);
        }
        rows.path(with("%ff"), 404, "unknown_path", None);
        rows.path(with("%F0%28"), 404, "unknown_path", None);
    }
    if rows.route.path.contains("{pool}") {
        let with = |argument: &str| with(argument).replace("{slot}", "s");
        for name in ["n".repeat(129), "%07".into(), "a%00b".into(), "%C2%85".into(), "%E2%82%AC".repeat(43)] {
            rows.path(with(&name), 422, "invalid_field", Some("pool"));
        }
        match rows.route.call {
            Call::Pool | Call::DeletePool | Call::Acquire => rows.path(with("never"), 404, "unknown_pool", None),
            Call::RefreshSlot => rows.path(with("never"), 409, "slot_lost", None),
            _ => {}
        }
        rows.path(with("%ff"), 404, "unknown_path", None);
        rows.path(with(""), 404, "unknown_path", None);
    }
    if rows.route.path.contains("{slot}") {
        let with = |slot: &str| rows.route.path.replace("{pool}", "p").replace("{slot}", slot);
        for name in ["n".repeat(129), "%07".into(), "a%00b".into(), ":0123456789abcdef".into()] {
            rows.path(with(&name), 422, "invalid_field", Some("slot_id"));
        }
        if rows.route.call == Call::RefreshSlot {
            let slot = path.split('/').nth(5).unwrap();
            let (name, nonce) = slot.split_at(slot.len() - 16);
            let other = format!("{name}{}", nonce.chars().rev().collect::<String>());
            for slot in ["x", "x:0123456789abcdef", &name[..name.len() - 3], &other, &format!("{slot}0")] {
                rows.path(with(slot), 409, "slot_lost", None);
            }
        }
        rows.path(with("%ff"), 404, "unknown_path", None);
    }
    for name in rows.route.query {
        let wrong: &[&str] = match *name {
            "queue" => &["", "%07", "%C2%85"],
            "status" | "class" => &["", "lost", "QUEUED", "1"],
            "on_prem" => &["", "1", "yes", "True"],
            "run_at" => &["", "now", "0", "2030-13-01T00:00:00Z", "2030-01-01T00:00:00"],
            "metadata" => &["", "{", "nan", "%00"],
            "backoff" => &["", "1", "[]", "%7B", "%7B%7D%7D"],
            // A cursor is opaque: what is none is told by its own code.
            "cursor" => &[],
            "after" => &["", "1", "-", "1-", "-1", "a-b", "1-1-1", "99999999999999999999-1", "1.0-1"],
            _ => &["", "-1", "1.5", "x", "0x1", "1e3", "%2B1", "99999999999999999999", "%201", "1%00"],
        };
        for value in wrong {
            rows.path(format!("{path}?{name}={value}"), 422, "invalid_field", Some(name));
        }
        let twice = match *name {
            "limit" | "wait_ms" => "1",
            "after" => "0-0",
            _ => "x",
        };
        rows.path(format!("{path}?{name}={twice}&{name}={twice}"), 422, "invalid_field", Some(name));
        if *name == "cursor" {
            for value in ["x", "%00", "0", "%F0%9F%98%80"] {
                rows.path(format!("{path}?cursor={value}"), 422, "bad_cursor", Some("cursor"));
            }
        }
        if *name == "limit" {
            rows.path(format!("{path}?limit=0"), 422, "invalid_field", Some("limit"));
            rows.path(format!("{path}?limit=1001"), 422, "invalid_field", Some("limit"));
        }
    }
}

/// What is wrong with a body whatever it should hold.
fn bodies(rows: &mut Rows<'_>) {
    let sample = String::from_utf8(rows.sample.body.clone()).unwrap();
    let json = match rows.route.takes {
        Takes::Json(_) | Takes::OptionalJson(_) => true,
        // What a GET brings along is nobody's business.
        Takes::Nothing if rows.route.method == "GET" => return,
        Takes::Nothing | Takes::Bytes => false,
    };
    let broken = [
        "{",
        "}",
        "hello",
        "nan",
        "'a'",
        "{a:1}",
        "{\"a\":}",
        "{\"a\":1,}",
        "{\"a\" 1}",
        "\"",
        "[1",
        "01",
        "+1",
        ".5",
        "1.",
    ];
    for text in broken {
        rows.body(text, 400, "not_json", None);
    }
    rows.body(format!("{}{}", "[".repeat(50_000), "]".repeat(49_999)), 400, "not_json", None);
    for bytes in
        [&b"\xff"[..], b"\x00", b"{}\x00", b"\xef\xbb\xbf{}", b"{\"a\":\"\xff\"}", b"{\"a\":\"\x01\"}", b"{} {}"]
    {
        rows.body(bytes, 400, "not_json", None);
    }
    if rows.route.takes != Takes::Bytes {
        for text in ["[]", "1", "-0", "null", "true", "\"x\"", "1e9", "[[[[]]]]"] {
            rows.invalid(text, "");
        }
        let many: Vec<String> = (0..65).map(|n| format!("\"f{n}\":1")).collect();
        rows.invalid(format!("{{{}}}", many.join(",")), "");
    }
    if !json {
        if rows.route.takes == Takes::Nothing {
            rows.invalid(r#"{"colour":1}"#, "colour");
        }
        return;
    }
    if matches!(rows.route.takes, Takes::Json(_)) {
        for text in ["", " ", "\r\n\t "] {
            rows.body(text, 400, "empty_body", None);
        }
    }
    let inside = &sample[1..sample.len() - 1];
    let more = |field: &str| format!("{{{inside},{field}}}");
    rows.body(&sample[..sample.len() - 1], 400, "not_json", None);
    rows.invalid(more(r#""colour":1"#), "colour");
    rows.invalid(more(r#""":1"#), "");
    rows.invalid(more(r#""\u0000":1"#), "\\0");
    rows.invalid(more(r#""<script>":1"#), "<script>");
    rows.invalid(more(&format!(r#""{}":1"#, "k".repeat(LONG))), &"k".repeat(64));
    rows.invalid(more(&format!(r#""deep":{}{}"#, "[".repeat(LONG), "]".repeat(LONG))), "deep");
    let fields: Map<String, Value> = serde_json::from_str(&sample).unwrap();
    for (name, value) in &fields {
        rows.invalid(more(&format!("\"{name}\":{value}")), "");
        let escaped = format!("\\u{:04x}{}", name.as_bytes()[0], &name[1..]);
        rows.invalid(more(&format!("\"{escaped}\":{value}")), "");
    }
    rows.body(" ".repeat(1_048_577), 413, "too_large", None);
}

/// Values that a field of this schema cannot have, as JSON text.
fn wrong_values(schema: &Value) -> Vec<String> {
    let mut out: Vec<String> = Vec::new();
    let mut add = |values: &[&str]| out.extend(values.iter().map(|v| (*v).to_owned()));
    let kind = schema["type"].as_str().unwrap_or_default();
    match kind {
        "string" => add(&["1", "true", "[]", "{}", "-1.5", "[\"a\"]", "\"\\ud800\""]),
        "boolean" => add(&["1", "0", "\"true\"", "[]", "{}"]),
        "integer" => add(&[
            "\"5\"",
            "true",
            "[]",
            "{}",
            "1.5",
            "1.0",
            "1e2",
            "-1",
            "18446744073709551616",
            "1e400",
            "99999999999999999999999",
            "-9223372036854775809",
        ]),
        "number" => add(&["\"5\"", "true", "[]", "{}", "-1", "1e400", "1e300"]),
        "array" => add(&["1", "true", "\"a\"", "{}", "[1]", "[null]", "[[]]"]),
        "object" => add(&["1", "true", "\"a\"", "[]", "{\"a\":1,\"a\":2}"]),
        _ => {}
    }
    if let (Some(most), "string") = (schema["maxLength"].as_u64(), kind) {
        out.push(format!("\"{}\"", "x".repeat(most as usize + 1)));
        // Bytes are counted, not characters.
        out.push(format!("\"{}\"", "é".repeat(most as usize / 2 + 1)));
    }
    if schema["minLength"].as_u64() > Some(0) || schema.get("enum").is_some() || schema.get("format").is_some() {
        out.push("\"\"".into());
    }
    if schema.get("enum").is_some() || schema.get("format").is_some() {
        out.extend(["\"nonsense\"".into(), "\"\\u0000\"".into()]);
    }
    if schema["pattern"].as_str().is_some_and(|p| p.contains("u0000")) {
        out.extend(["\\u0000", "\\u0007", "a\\nb", "\\u007f", "\\u0085"].map(|c| format!("\"{c}\"")));
    }
    if schema.get("contentEncoding").is_some() {
        out.extend(["\"!\"", "\"A\"", "\"AB==\"", "\"AAAA=\"", "\"A-_A\""].map(str::to_owned));
    }
    if kind == "integer" {
        out.extend(schema["minimum"].as_u64().filter(|n| *n > 0).map(|n| (n - 1).to_string()));
        out.extend(schema["maximum"].as_u64().map(|n| (n + 1).to_string()));
    }
    if kind == "number" {
        out.extend(schema["maximum"].as_f64().map(|n| (n + 0.001).to_string()));
        out.extend(schema["minimum"].as_f64().filter(|n| *n > 0.0).map(|n| (n - 0.001).to_string()));
    }
    if kind == "array" {
        out.extend(schema["minItems"].as_u64().filter(|n| *n > 0).map(|_| "[]".to_owned()));
        out.extend(schema["maxItems"].as_u64().map(|n| format!("[{}]", vec!["\"a\""; n as usize + 1].join(","))));
    }
    out
}

/// Bodies with one field wrong, and the field that is to blame.
fn wrong_fields(world: &World, schema: &Value, valid: &Map<String, Value>, prefix: &str) -> Vec<(String, String)> {
    let schema = world.resolve(schema);
    let required: Vec<&str> = schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let mut out = Vec::new();
    let with = |field: &str, text: Option<&str>| {
        let mut fields: Vec<String> =
            valid.iter().filter(|(k, _)| *k != field).map(|(k, v)| format!("\"{k}\":{v}")).collect();
        fields.extend(text.map(|t| format!("\"{field}\":{t}")));
        format!("{{{}}}", fields.join(","))
    };
    for (field, property) in schema["properties"].as_object().into_iter().flatten() {
        let property = world.resolve(property);
        let blame = format!("{prefix}{field}");
        let mut values = wrong_values(property);
        if required.contains(&field.as_str()) {
            out.push((with(field, None), blame.clone()));
            if property["type"].is_string() {
                values.push("null".into());
            }
        }
        for value in values {
            out.push((with(field, Some(&value)), blame.clone()));
        }
        if property["type"] == "object" {
            let inner = valid.get(field).and_then(Value::as_object).cloned().unwrap_or_default();
            for (text, inner_blame) in wrong_fields(world, property, &inner, &format!("{blame}.")) {
                out.push((with(field, Some(&text)), inner_blame));
            }
            out.push((with(field, Some(r#"{"colour":1}"#)), "colour".into()));
        }
    }
    out
}

#[test]
fn every_call_refuses_every_kind_of_bad_input() {
    let folder = Folder::new();
    let server = Server::start(&folder, &["--max-body", "1MiB"]);
    let description = server.client().get("/openapi.json").json();
    let world = World { client: RefCell::new(server.client()), description };
    let mut count = 0;
    let mut failures: Vec<String> = Vec::new();
    for route in ROUTES.iter().filter(|route| route.call != Call::Proxy) {
        let name = format!("{} {}", route.method, route.path);
        let sample = world.sample(route.call).unwrap_or_else(|| panic!("no valid call of {name}: add one"));
        let mut rows = Rows { route, sample: &sample, rows: Vec::new() };
        paths(&mut rows);
        bodies(&mut rows);
        // Items of a batch are answered by themselves.
        let mut items: Vec<(&str, String, String)> = Vec::new();
        if let Takes::Json(schema) | Takes::OptionalJson(schema) = route.takes {
            let valid: Map<String, Value> = serde_json::from_slice(&sample.body).unwrap();
            let schema = &world.description["components"]["schemas"][schema];
            let list = ["jobs", "items"].into_iter().find(|l| schema["properties"].get(l).is_some());
            match list {
                None => {
                    for (body, field) in wrong_fields(&world, schema, &valid, "") {
                        rows.invalid(body, &field);
                    }
                }
                Some(list) => {
                    for value in ["1", "null", "\"a\"", "{}", "[]", "true"] {
                        rows.invalid(format!("{{\"{list}\":{value}}}"), list);
                    }
                    rows.invalid("{}", list);
                    rows.invalid(format!("{{\"{list}\":[{}]}}", vec!["{}"; 1_001].join(",")), list);
                    let item = valid[list][0].as_object().unwrap();
                    let schema = world.resolve(&schema["properties"][list]["items"]);
                    items.extend(wrong_fields(&world, schema, item, "").into_iter().map(|(b, f)| (list, b, f)));
                    items.extend(["1", "null", "[]", "\"a\""].map(|v| (list, v.to_owned(), list.to_owned())));
                }
            }
        }
        let before = world.books();
        for row in &rows.rows {
            let answer = world.send(&row.method, &row.path, &row.body);
            count += 1;
            let body = String::from_utf8_lossy(&row.body[..row.body.len().min(120)]).into_owned();
            let shown = format!("{} {} {body}", row.method, &row.path[..row.path.len().min(120)]);
            let problem: Value = serde_json::from_slice(&answer.body).unwrap_or_default();
            let fits = answer.status == row.status
                && (row.code.is_empty() || problem["code"] == row.code)
                && row.field.as_deref().is_none_or(|f| problem["field"] == f)
                && problem["status"] == row.status
                && answer.header("content-type") == Some("application/problem+json")
                && answer.header("allow").is_some() == (row.status == 405);
            if !fits {
                failures.push(format!(
                    "{shown}\n   expected {} {} {:?}, got {} {problem}",
                    row.status, row.code, row.field, answer.status
                ));
            }
        }
        for (list, item, field) in &items {
            let answer = world.send("POST", &sample.path, format!("{{\"{list}\":[{item}]}}").as_bytes());
            count += 1;
            let result = answer.json()["results"][0].clone();
            // An item names its job itself: what is no id is an unknown job.
            let id_is_none = field == "id" && result["problem"]["code"] == "unknown_job";
            let problem = &result["problem"];
            let fits = answer.status == 200
                && (id_is_none && result["status"] == 404
                    || result["status"] == 422 && problem["code"] == "invalid_field" && problem["field"] == **field);
            if !fits {
                failures
                    .push(format!("{name} item {}\n   expected {field}, got {result}", &item[..item.len().min(120)]));
            }
        }
        if before != world.books() {
            failures.push(format!("{name}: something came through: {before:?} {:?}", world.books()));
        }
        // And the valid call, which nothing of this has spoilt; the type of a JSON body is not looked at.
        let types = if route.takes == Takes::Bytes { "application/json" } else { "image/png" };
        let method = route.method.as_str();
        let answer = world.client.borrow_mut().send(method, &sample.path, &[("content-type", types)], &sample.body);
        if !route.answers.iter().any(|a| a.status == answer.status) {
            failures.push(format!("the valid {name}: {} {}", answer.status, answer.text()));
        }
    }
    println!("{count} bad calls of {} routes", ROUTES.len());
    assert!(failures.is_empty(), "{} of {count}:\n{}", failures.len(), failures.join("\n"));
}

/// Nothing that would change something is done or said to be done while the store cannot write; and
/// readiness says so, from the first failed write until the store is proven.
#[test]
fn c62_while_the_store_cannot_write_every_call_that_changes_something_is_503() {
    let folder = Folder::new();
    let server = Server::limitable(&folder);
    let world = World { client: RefCell::new(server.client()), description: Value::Null };
    let changes: Vec<(&Route, Sample)> = ROUTES
        .iter()
        .filter(|route| route.method != "GET" && route.call != Call::Proxy)
        .map(|route| (route, world.sample(route.call).unwrap_or_else(|| panic!("no sample of {}", route.path))))
        .collect();
    let send = |(route, sample): &(&Route, Sample)| world.send(route.method.as_str(), &sample.path, &sample.body);
    let acknowledged = world.job();
    let before = world.books();
    server.limit_files(Some(0));
    let first = world.send("POST", "/v1/jobs", br#"{"queue":"waiting","payload":1}"#);
    assert_eq!((first.status, first.code()), (503, "outcome_unknown".into()), "the write itself");
    for _ in 0..3 {
        for change in &changes {
            let answer = send(change);
            let refused = answer.status == 503 && answer.code() == "store_unavailable";
            assert!(refused, "{} {}: {} {}", change.0.method, change.1.path, answer.status, answer.text());
            assert!(answer.header("retry-after").is_some(), "{}", change.1.path);
        }
        let ready = world.send("GET", "/readyz", b"");
        assert_eq!((ready.status, ready.code()), (503, "store_unavailable".into()));
        assert_eq!(world.send("GET", "/healthz", b"").status, 200);
        assert!(world.send("GET", "/metrics", b"").text().contains("leasehold_store_poisoned 1"));
    }
    server.limit_files(None);
    until("the store is proven", Duration::from_secs(60), || world.send("GET", "/readyz", b"").status == 200);
    assert!(world.send("GET", "/metrics", b"").text().contains("leasehold_store_poisoned 0"));
    assert_eq!(world.send("GET", &format!("/v1/jobs/{acknowledged}"), b"").status, 200);
    // The one in doubt is there or not; of what was refused nothing is.
    let plain = |mut books: Vec<(String, u64, bool)>| {
        books.iter_mut().filter(|book| book.0 == "waiting").for_each(|book| book.1 = 0);
        books
    };
    let jobs = |books: &[(String, u64, bool)]| books.iter().map(|book| book.1).sum::<u64>();
    let after = world.books();
    assert!(jobs(&after) == jobs(&before) || jobs(&after) == jobs(&before) + 1, "{before:?} {after:?}");
    assert_eq!(plain(after), plain(before));
    for change in &changes {
        let answer = send(change);
        let works = change.0.answers.iter().any(|a| a.status == answer.status);
        assert!(works, "{} {}: {} {}", change.0.method, change.1.path, answer.status, answer.text());
    }
}

#[test]
fn a_token_is_good_for_its_own_lease_only() {
    let folder = Folder::new();
    let server = Server::start(&folder, &[]);
    let world = World { client: RefCell::new(server.client()), description: Value::Null };
    let (id, token) = world.leased();
    let (_, other) = world.leased();
    let flipped = format!("{}{}", &token[..token.len() - 1], if token.ends_with('0') { '1' } else { '0' });
    let long = "0".repeat(100_000);
    for (call, more) in [("heartbeat", ""), ("complete", ""), ("fail", r#","error":{"message":"m"}"#), ("release", "")]
    {
        for wrong in ["", "x", "\\u0000", "😀", &other, &flipped, &token.to_uppercase(), &format!("{token} "), &long]
        {
            let body = format!(r#"{{"token":"{wrong}"{more}}}"#);
            let answer = world.send("POST", &format!("/v1/jobs/{id}/{call}"), body.as_bytes());
            assert_eq!((answer.status, answer.code()), (409, "lease_lost".into()), "{call} {wrong:.40}");
        }
    }
    // Nothing has happened to the lease.
    let done = world.send("POST", &format!("/v1/jobs/{id}/complete"), format!(r#"{{"token":"{token}"}}"#).as_bytes());
    assert_eq!(done.status, 200);
}
