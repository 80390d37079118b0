//! Goal: every call of the API does what it says, against a real server with a store on disk.

#![allow(clippy::unwrap_used, clippy::panic)]

mod support;

use std::io::{BufReader, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use support::{Client, Folder, Server, claim, read_line, status, submit};

#[test]
fn a_job_from_submit_to_result() {
    let folder = Folder::new();
    let server = Server::start(&folder, &[]);
    let mut c = server.client();
    let trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let body = br#"{"queue":"q","payload":{"b": 1,"a":2},"metadata":{"who":"me"},"class":"batch"}"#;
    let answer = c.send("POST", "/v1/jobs", &[("traceparent", trace), ("idempotency-key", "\"k1\"")], body);
    assert_eq!(answer.status, 201);
    let job = answer.json();
    let id = job["id"].as_str().unwrap();
    assert_eq!(answer.header("location"), Some(format!("/v1/jobs/{id}").as_str()));
    assert_eq!((&job["status"], &job["class"], &job["queue"]), (&json!("queued"), &json!("batch"), &json!("q")));

    // The same key: the same job, however its JSON is laid out; another body is refused.
    let again = br#"{"class":"batch", "metadata":{"who":"me"}, "payload":{"b": 1,"a":2}, "queue":"q"}"#;
    let answer = c.send("POST", "/v1/jobs", &[("idempotency-key", "k1")], again);
    assert_eq!((answer.status, &answer.json()["id"]), (200, &job["id"]));
    let answer = c.send("POST", "/v1/jobs", &[("idempotency-key", "k1")], br#"{"queue":"q","payload":3}"#);
    assert_eq!((answer.status, answer.code()), (422, "idempotency_key_reused".into()));

    let seen = c.get(&format!("/v1/jobs/{id}")).json();
    assert_eq!((&seen["position"], &seen["metadata"]), (&json!(1), &json!({"who": "me"})));
    let payload = c.get(&format!("/v1/jobs/{id}/payload"));
    assert_eq!(payload.body, br#"{"b": 1,"a":2}"#, "as it came, byte for byte");
    assert_eq!(payload.header("content-type"), Some("application/json"));
    let early = c.get(&format!("/v1/jobs/{id}/result"));
    assert_eq!((early.status, early.code()), (404, "no_result".into()));
    let detail = early.json()["detail"].as_str().unwrap().to_owned();
    assert!(detail.contains("not succeeded") && detail.contains("retention"), "it can be either: {detail}");
    assert_eq!(c.get(&format!("/v1/jobs/{id}/why")).json()["reason"], "no_worker");

    let answer = c.post("/v1/claims", r#"{"worker":"w1","queues":["q"],"lease_ms":60000,"claim_id":"c1"}"#);
    let leased = &answer.json()["jobs"][0];
    assert_eq!((&leased["id"], &leased["traceparent"]), (&job["id"], &json!(trace)));
    assert!(String::from_utf8_lossy(&answer.body).contains(r#""payload":{"b": 1,"a":2}"#));
    let token = leased["token"].as_str().unwrap();
    let repeat = c.post("/v1/claims", r#"{"worker":"w1","queues":["q"],"lease_ms":60000,"claim_id":"c1"}"#);
    assert_eq!(repeat.json()["jobs"][0]["token"], token, "the same claim gets the same lease");

    let beat = format!(r#"{{"token":"{token}","progress":{{"pct":50}},"seq":2}}"#);
    let beat = c.post(&format!("/v1/jobs/{id}/heartbeat"), beat).json();
    assert_eq!(beat["cancel_requested"], false);
    assert!(beat["lease_expires_at"].is_string());
    let seen = c.get(&format!("/v1/jobs/{id}")).json();
    assert_eq!((&seen["status"], &seen["progress"]), (&json!("running"), &json!({"pct": 50})));
    assert_eq!(seen["lease"]["worker"], "w1");
    assert_eq!(c.get(&format!("/v1/jobs/{id}/why")).json()["reason"], "running");

    let wrong = c.post(&format!("/v1/jobs/{id}/complete"), r#"{"token":"nonsense"}"#);
    assert_eq!((wrong.status, wrong.code()), (409, "lease_lost".into()));
    let done = format!(r#"{{"token":"{token}","result":{{"n": 7}}}}"#);
    assert_eq!(c.post(&format!("/v1/jobs/{id}/complete"), &done).status, 200);
    let other = format!(r#"{{"token":"{token}","result":8}}"#);
    assert_eq!(c.post(&format!("/v1/jobs/{id}/complete"), other).status, 200, "a repeat changes nothing");
    assert_eq!(c.get(&format!("/v1/jobs/{id}/result")).body, br#"{"n": 7}"#);
    assert_eq!(status(&mut c, id), "succeeded");
    let late = c.post(&format!("/v1/jobs/{id}/cancel"), "");
    assert_eq!((late.status, late.code()), (409, "already_terminal".into()));

    let deleted = c.send("DELETE", &format!("/v1/jobs/{id}"), &[], b"");
    assert_eq!(deleted.status, 204);
    assert_eq!(c.get(&format!("/v1/jobs/{id}")).status, 404);
}

#[test]
fn bytes_stay_bytes() {
    let folder = Folder::new();
    let server = Server::start(&folder, &[]);
    let mut c = server.client();
    let bytes: Vec<u8> = (0..=255).collect();
    let headers = [("content-type", "application/x-thing"), ("idempotency-key", "raw")];
    let answer = c.send("POST", "/v1/queues/a%2Fb/jobs?class=interactive&max_attempts=1", &headers, &bytes);
    assert_eq!(answer.status, 201, "{}", answer.json());
    let job = answer.json();
    assert_eq!((&job["queue"], &job["class"], &job["max_attempts"]), (&json!("a/b"), &json!("interactive"), &json!(1)));
    let id = job["id"].as_str().unwrap();
    let payload = c.get(&format!("/v1/jobs/{id}/payload"));
    assert_eq!((payload.header("content-type"), &payload.body), (Some("application/x-thing"), &bytes));
    assert_eq!(payload.header("x-content-type-options"), Some("nosniff"));
    let leased = c.post("/v1/claims", r#"{"worker":"w","queues":["a/b"]}"#).json()["jobs"][0].clone();
    assert_eq!(leased["content_type"], "application/x-thing");
    assert!(leased["payload_base64"].as_str().unwrap().starts_with("AAECAwQF"));
    let token = leased["token"].as_str().unwrap();
    let done = format!(r#"{{"token":"{token}","result_base64":"aGk=","content_type":"text/html"}}"#);
    assert_eq!(c.post(&format!("/v1/jobs/{id}/complete"), done).status, 200);
    let result = c.get(&format!("/v1/jobs/{id}/result"));
    assert_eq!((result.header("content-type"), result.body.as_slice()), (Some("text/html"), b"hi".as_slice()));
    assert!(result.header("content-security-policy").unwrap().contains("sandbox"));

    // Without a result: 204.
    let id = submit(&mut c, r#"{"queue":"q","payload":null}"#);
    let (_, token) = claim(&mut c, "q");
    c.post(&format!("/v1/jobs/{id}/complete"), format!(r#"{{"token":"{token}"}}"#));
    assert_eq!(c.get(&format!("/v1/jobs/{id}/result")).status, 204);
}

#[test]
fn failures_retries_and_releases() {
    let folder = Folder::new();
    let server = Server::start(&folder, &[]);
    let mut c = server.client();
    let id = submit(&mut c, r#"{"queue":"q","payload":1,"max_attempts":2}"#);
    let (_, token) = claim(&mut c, "q");
    let fail = |token: &str, more: &str| {
        format!(r#"{{"token":"{token}","error":{{"message":"no <luck>","type":"bad"}}{more}}}"#)
    };
    let failed = c.post(&format!("/v1/jobs/{id}/fail"), fail(&token, r#","retry_in_ms":0"#)).json();
    assert_eq!(failed["status"], "retrying");
    support::until("the job is due again", Duration::from_secs(5), || status(&mut c, &id) == "queued");
    let (_, token) = claim(&mut c, "q");
    let released = c.post(&format!("/v1/jobs/{id}/release"), format!(r#"{{"token":"{token}"}}"#));
    assert_eq!(released.status, 200);
    let (_, token) = claim(&mut c, "q");
    let failed = c.post(&format!("/v1/jobs/{id}/fail"), fail(&token, "")).json();
    assert_eq!(failed["status"], "dead");
    let job = c.get(&format!("/v1/jobs/{id}")).json();
    let outcomes: Vec<&str> =
        job["attempts"].as_array().unwrap().iter().filter_map(|a| a["outcome"].as_str()).collect();
    assert_eq!(outcomes.iter().filter(|o| **o == "failed").count(), 2, "{job}");
    assert_eq!(job["attempts"][0]["error"], json!({"message": "no <luck>", "type": "bad"}));
    assert_eq!(job["deliveries"], 3);

    assert_eq!(c.post(&format!("/v1/jobs/{id}/retry"), "").json()["status"], "queued");
    let twice = c.post(&format!("/v1/jobs/{id}/retry"), "");
    assert_eq!((twice.status, twice.code()), (409, "not_retryable".into()));
    let cancelled = c.post(&format!("/v1/jobs/{id}/cancel"), "").json();
    assert_eq!(cancelled["status"], "cancelled");
    assert_eq!(c.post(&format!("/v1/jobs/{id}/cancel"), "").status, 200);
}

#[test]
fn a_cancelled_job_tells_its_worker() {
    let folder = Folder::new();
    let server = Server::start(&folder, &[]);
    let mut c = server.client();
    let id = submit(&mut c, r#"{"queue":"q","payload":1}"#);
    let (_, token) = claim(&mut c, "q");
    assert_eq!(c.post(&format!("/v1/jobs/{id}/cancel"), "").status, 200);
    let beat = c.post(&format!("/v1/jobs/{id}/heartbeat"), format!(r#"{{"token":"{token}"}}"#)).json();
    assert_eq!(beat, json!({"lease_expires_at": null, "cancel_requested": true}));
    let late = c.post(&format!("/v1/jobs/{id}/complete"), format!(r#"{{"token":"{token}","result":1}}"#));
    assert_eq!((late.status, late.code()), (409, "job_cancelled".into()));
}

#[test]
fn batches_answer_item_by_item() {
    let folder = Folder::new();
    let server = Server::start(&folder, &[]);
    let mut c = server.client();
    let body = r#"{"jobs":[{"queue":"q","payload":1,"idempotency_key":"a"},{"queue":"","payload":1},
        {"payload":2},{"queue":"q","payload":1,"idempotency_key":"a"},7,{"queue":"q","payload":3}]}"#;
    let results = c.post("/v1/jobs:batch", body).json()["results"].clone();
    let statuses: Vec<u64> = results.as_array().unwrap().iter().filter_map(|r| r["status"].as_u64()).collect();
    assert_eq!(statuses, [201, 422, 422, 200, 422, 201]);
    assert_eq!(results[0]["job"]["id"], results[3]["job"]["id"]);
    assert_eq!(results[1]["problem"]["field"], "queue");

    let leased = c.post("/v1/claims", r#"{"worker":"w","queues":["q"],"max":10}"#).json()["jobs"].clone();
    let leased = leased.as_array().unwrap();
    assert_eq!(leased.len(), 2);
    let item = |n: usize, more: Value| {
        let mut item = json!({"id": leased[n]["id"], "token": leased[n]["token"]});
        item.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        item
    };
    let beats = json!({"items": [item(0, json!({"progress": 1})), {"id": "x", "token": "y"}]});
    let results = c.post("/v1/heartbeats", beats.to_string()).json()["results"].clone();
    assert_eq!((&results[0]["status"], &results[1]["status"]), (&json!(200), &json!(404)));
    assert_eq!(results[0]["cancel_requested"], false);
    let done = json!({"items": [item(0, json!({"result": "r"})), item(0, json!({"colour": 1}))]});
    let results = c.post("/v1/completions", done.to_string()).json()["results"].clone();
    assert_eq!(results[0], json!({"status": 200}));
    assert_eq!(results[1]["problem"]["field"], "colour");
    let failed = json!({"items": [item(1, json!({"error": {"message": "m"}, "retryable": false}))]});
    let results = c.post("/v1/failures", failed.to_string()).json()["results"].clone();
    assert_eq!(results, json!([{"status": 200, "job_status": "dead"}]));
}

#[test]
fn lists_go_page_by_page() {
    let folder = Folder::new();
    let server = Server::start(&folder, &[]);
    let mut c = server.client();
    let ids: std::collections::BTreeSet<String> =
        (0..25).map(|n| submit(&mut c, &format!(r#"{{"queue":"q{}","payload":{n}}}"#, n % 2))).collect();
    let mut seen = std::collections::BTreeSet::new();
    let mut cursor = String::new();
    loop {
        let page = c.get(&format!("/v1/jobs?limit=7{cursor}")).json();
        let jobs = page["jobs"].as_array().unwrap();
        assert!(jobs.len() <= 7);
        seen.extend(jobs.iter().map(|j| j["id"].as_str().unwrap().to_owned()));
        match page["next"].as_str() {
            Some(next) => cursor = format!("&cursor={next}"),
            None => break,
        }
    }
    assert_eq!(seen, ids);
    let page = c.get("/v1/jobs?queue=q0&status=queued").json();
    assert_eq!(page["jobs"].as_array().unwrap().len(), 13);
    let of_q0 = c.get("/v1/jobs?queue=q0&limit=1").json()["next"].as_str().unwrap().to_owned();
    assert_eq!(
        c.get(&format!("/v1/jobs?queue=q0&limit=1000&cursor={of_q0}")).json()["jobs"].as_array().unwrap().len(),
        12
    );
    for other in [
        "cursor=nonsense".into(),
        format!("cursor={of_q0}"),
        format!("queue=q1&cursor={of_q0}"),
        format!("queue=q0&status=queued&cursor={of_q0}"),
    ] {
        let bad = c.get(&format!("/v1/jobs?{other}"));
        assert_eq!((bad.status, bad.code()), (422, "bad_cursor".into()), "{other}");
    }
}

#[test]
fn queues_are_paused_resumed_and_purged() {
    let folder = Folder::new();
    let server = Server::start(&folder, &[]);
    let mut c = server.client();
    assert_eq!(c.get("/v1/queues/q").code(), "unknown_queue");
    let first = submit(&mut c, r#"{"queue":"q","payload":1}"#);
    submit(&mut c, r#"{"queue":"q","payload":2,"class":"interactive"}"#);
    let set = c.send("PUT", "/v1/queues/q", &[], br#"{"lease_ms":5000}"#).json();
    assert_eq!(set["lease_ms"], 5_000);
    let paused = c.post("/v1/queues/q/pause", r#"{"reason":"new <model>"}"#).json();
    assert_eq!((&paused["paused"], &paused["pause_reason"]), (&json!(true), &json!("new <model>")));
    assert_eq!(c.post("/v1/claims", r#"{"worker":"w","queues":["q"]}"#).json()["jobs"], json!([]));
    assert_eq!(c.get(&format!("/v1/jobs/{first}/why")).json()["reason"], "paused");
    let page = c.get("/");
    assert!(String::from_utf8_lossy(&page.body).contains("new &lt;model&gt;"));
    assert!(page.header("content-security-policy").is_some());
    assert_eq!(c.post("/v1/queues/q/resume", "").json()["paused"], false);
    let queue = c.get("/v1/queues/q").json();
    assert_eq!((&queue["counts"]["queued"], &queue["depth"]["interactive"]["queued"]), (&json!(2), &json!(1)));
    let purged = c.post("/v1/queues/q/purge", "").json();
    assert_eq!((&purged["purged"], &purged["left"], &purged["name"]), (&json!(2), &json!(0), &json!("q")));
    assert_eq!(status(&mut c, &first), "cancelled");
    assert_eq!(c.post("/v1/queues/q/purge", r#"{"status":"running"}"#).status, 422);
    assert_eq!(c.post("/v1/queues/q/purge", r#"{"status":"cancelled"}"#).json()["purged"], 2);
    let all = c.get("/v1/queues").json();
    assert!(all["queues"].as_array().unwrap().iter().any(|q| q["name"] == "q"));
}

#[test]
fn a_claim_waits_for_work() {
    let folder = Folder::new();
    let server = Server::start(&folder, &[]);
    let mut c = server.client();
    let begun = Instant::now();
    let empty = c.post("/v1/claims", r#"{"worker":"w","queues":["q"],"wait_ms":300}"#);
    assert_eq!(empty.json()["jobs"], json!([]));
    assert!(begun.elapsed() >= Duration::from_millis(290));
    let address = server.address;
    let waiting = std::thread::spawn(move || {
        let answer = Client::new(address).post("/v1/claims", r#"{"worker":"w","queues":["q"],"wait_ms":20000}"#);
        (answer.json(), Instant::now())
    });
    std::thread::sleep(Duration::from_millis(300));
    let id = submit(&mut c, r#"{"queue":"q","payload":1}"#);
    let submitted = Instant::now();
    let (answer, at) = waiting.join().unwrap();
    assert_eq!(answer["jobs"][0]["id"], id);
    assert!(at.saturating_duration_since(submitted) < Duration::from_millis(500), "it is woken, not polled");
}

#[test]
fn a_client_that_hangs_up_leaves_no_lease() {
    let folder = Folder::new();
    let server = Server::start(&folder, &[]);
    let mut gone = TcpStream::connect(server.address).unwrap();
    let body = r#"{"worker":"w","queues":["q"],"wait_ms":60000}"#;
    write!(gone, "POST /v1/claims HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{body}", body.len()).unwrap();
    std::thread::sleep(Duration::from_millis(300));
    drop(gone);
    std::thread::sleep(Duration::from_millis(300));
    let mut c = server.client();
    let id = submit(&mut c, r#"{"queue":"q","payload":1}"#);
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(status(&mut c, &id), "queued");
}

#[test]
fn events_as_pages_and_as_a_stream() {
    let folder = Folder::new();
    let server = Server::start(&folder, &[]);
    let mut c = server.client();
    let id = submit(&mut c, r#"{"queue":"q","payload":1}"#);
    let page = c.get("/v1/events?limit=1").json();
    assert_eq!((&page["events"][0]["type"], &page["events"][0]["job"]), (&json!("job.submitted"), &json!(id)));
    let next = page["next"].as_str().unwrap().to_owned();
    assert_eq!(page["events"][0]["id"], next);

    let mut stream = BufReader::new(TcpStream::connect(server.address).unwrap());
    stream.get_ref().set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let head =
        format!("GET /v1/events HTTP/1.1\r\nhost: x\r\naccept: text/event-stream\r\nlast-event-id: {next}\r\n\r\n");
    stream.get_mut().write_all(head.as_bytes()).unwrap();
    std::thread::sleep(Duration::from_millis(200));
    claim(&mut c, "q");
    let mut lines = Vec::new();
    while !lines.iter().any(|l: &String| l.starts_with("data: ")) {
        lines.push(read_line(&mut stream).unwrap());
    }
    assert!(lines[0].contains("200"), "{lines:?}");
    assert!(lines.iter().any(|l| l.eq_ignore_ascii_case("content-type: text/event-stream")));
    let data: Value = serde_json::from_str(lines.last().unwrap().trim_start_matches("data: ")).unwrap();
    assert_eq!((&data["type"], &data["job"], &data["worker"]), (&json!("job.claimed"), &json!(id), &json!("w")));
    assert!(lines.contains(&format!("id: {}", data["id"].as_str().unwrap())));
    assert!(lines.contains(&"event: job.claimed".to_owned()));
}

#[test]
fn health_metrics_and_description() {
    let folder = Folder::new();
    let server = Server::start(&folder, &[]);
    let mut c = server.client();
    submit(&mut c, r#"{"queue":"q\"x","payload":1}"#);
    assert_eq!(c.get("/healthz").json()["status"], "ok");
    assert_eq!(c.get("/readyz").json()["status"], "ready");
    let metrics = c.get("/metrics");
    assert!(metrics.header("content-type").unwrap().starts_with("text/plain"));
    let text = String::from_utf8(metrics.body).unwrap();
    assert!(text.contains("\nleasehold_jobs_submitted_total 1\n"), "{text}");
    assert!(text.contains("\nleasehold_jobs_lost_total 0\n"));
    assert!(text.contains(r#"leasehold_queue_jobs{queue="q\"x",class="system",status="queued"} 1"#), "{text}");
    for line in text.lines().filter(|l| !l.starts_with('#')) {
        assert!(line.starts_with("leasehold_"), "{line}");
        assert!(line.rsplit_once(' ').unwrap().1.parse::<f64>().is_ok(), "{line}");
    }
    let description = c.get("/openapi.json").json();
    assert!(description["paths"]["/v1/jobs"]["post"].is_object());
}
