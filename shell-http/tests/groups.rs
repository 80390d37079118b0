//! Goal: groups over HTTP do what API.md says, against a real server with a store on disk.

#![allow(clippy::unwrap_used, clippy::panic)]

mod support;

use serde_json::{Value, json};
use support::{Client, Folder, Server, cli};

fn complete(c: &mut Client, job: &Value, result: &Value) {
    let id = job["id"].as_str().unwrap();
    let body = json!({"token": job["token"], "result": result}).to_string();
    assert_eq!(c.post(&format!("/v1/jobs/{id}/complete"), body).status, 200);
}

fn claims(c: &mut Client) -> Vec<Value> {
    let answer = c.post("/v1/claims", r#"{"worker":"w","queues":["q"],"max":10,"wait_ms":2000}"#);
    answer.json()["jobs"].as_array().unwrap().clone()
}

#[test]
fn a_group_from_its_creation_to_its_result() {
    let folder = Folder::new();
    let server = Server::start(&folder, &[]);
    let mut c = server.client();
    let children: Vec<Value> = (0..5).map(|n| json!({"payload": {"n": n, "max_parallel": 0}})).collect();
    let body = json!({"queue": "q", "max_parallel": 2, "max_attempts": 1, "children": children}).to_string();
    let answer = c.send("POST", "/v1/groups", &[("idempotency-key", "g1")], body.as_bytes());
    assert_eq!(answer.status, 201);
    let group = answer.json();
    let id = group["id"].as_str().unwrap().to_owned();
    assert_eq!(answer.header("location"), Some(format!("/v1/groups/{id}").as_str()));
    assert_eq!(
        (&group["status"], &group["children"], &group["counts"]["held"]),
        (&json!("running"), &json!(5), &json!(5))
    );
    let again = c.send("POST", "/v1/groups", &[("idempotency-key", "g1")], body.as_bytes());
    assert_eq!((again.status, &again.json()["id"]), (200, &group["id"]));
    let early = c.get(&format!("/v1/groups/{id}/result"));
    assert_eq!((early.status, early.code()), (409, "not_final".into()));

    let mut seen = Vec::new();
    while seen.len() < 5 {
        let got = claims(&mut c);
        assert!((1..=2).contains(&got.len()), "two at a time: {got:?}");
        for job in got {
            let n = job["payload"]["n"].as_u64().unwrap();
            assert_eq!(job["id"], format!("{id}-{n:07}"));
            if n == 3 {
                let body = json!({"token": job["token"], "error": {"message": "no"}}).to_string();
                assert_eq!(c.post(&format!("/v1/jobs/{}/fail", job["id"].as_str().unwrap()), body).status, 200);
            } else {
                complete(&mut c, &job, &json!({"square": n * n}));
            }
            seen.push(n);
        }
    }
    seen.sort_unstable();
    assert_eq!(seen, [0, 1, 2, 3, 4]);
    let end = c.get(&format!("/v1/groups/{id}?wait_ms=5000")).json();
    assert_eq!(
        (&end["status"], &end["counts"]["succeeded"], &end["counts"]["dead"]),
        (&json!("partial"), &json!(4), &json!(1))
    );
    let result = c.get(&format!("/v1/groups/{id}/result")).json();
    assert_eq!(result["outcomes"].as_array().unwrap().len(), 5);
    assert_eq!(result["outcomes"][4]["result"], json!({"square": 16}));
    assert_eq!(
        (&result["outcomes"][3]["status"], &result["outcomes"][3]["error"]["message"]),
        (&json!("dead"), &json!("no"))
    );
    let lines = c.send("GET", &format!("/v1/groups/{id}/result"), &[("accept", "application/x-ndjson")], b"");
    assert_eq!(lines.header("content-type"), Some("application/x-ndjson"));
    let lines: Vec<Value> =
        String::from_utf8(lines.body).unwrap().lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    assert_eq!(json!(lines), result["outcomes"]);
    let page = c.get(&format!("/v1/groups/{id}/children?limit=3")).json();
    assert_eq!((page["children"].as_array().unwrap().len(), &page["next"]), (3, &json!("i3")));
    let events = c.get("/v1/events?limit=1000").json();
    let of = |kind: &str| events["events"].as_array().unwrap().iter().filter(|e| e["type"] == kind).count();
    assert_eq!((of("group.created"), of("group.finalized"), of("job.submitted")), (1, 1, 0));
    let created = events["events"].as_array().unwrap().iter().find(|e| e["type"] == "group.created").unwrap();
    assert_eq!((&created["group"], &created["from"], &created["to"]), (&json!(id), &json!(0), &json!(5)));
}

#[test]
fn an_open_group_takes_pages_until_it_is_sealed() {
    let folder = Folder::new();
    let server = Server::start(&folder, &[]);
    let mut c = server.client();
    let group = c.post("/v1/groups", r#"{"queue":"q","sealed":false,"children":[]}"#).json();
    assert_eq!((&group["status"], &group["sealed"]), (&json!("open"), &json!(false)));
    let path = format!("/v1/groups/{}", group["id"].as_str().unwrap());
    let page = r#"{"from":0,"children":[{"payload":1},{"payload_base64":"AAE=","content_type":"application/x-y"}]}"#;
    for _ in 0..2 {
        let answer = c.post(&format!("{path}/children"), page);
        assert_eq!((answer.status, &answer.json()["children"]), (200, &json!(2)));
    }
    let gap = c.post(&format!("{path}/children"), r#"{"from":3,"children":[{"payload":1}]}"#);
    assert_eq!((gap.status, gap.code(), &gap.json()["expected"]), (409, "wrong_offset".into(), &json!(2)));
    let other = c.post(&format!("{path}/children"), r#"{"from":0,"children":[{"payload":2}]}"#);
    assert_eq!((other.status, other.code(), &other.json()["index"]), (422, "child_differs".into(), &json!(0)));
    assert_eq!(c.post(&format!("{path}/seal"), "").json()["status"], "running");
    let late = c.post(&format!("{path}/children"), r#"{"from":2,"children":[{"payload":1}]}"#);
    assert_eq!((late.status, late.code()), (409, "not_open".into()));
    let got = claims(&mut c);
    assert_eq!((&got[0]["payload"], &got[1]["payload_base64"]), (&json!(1), &json!("AAE=")));
    assert_eq!(c.post(&format!("{path}/cancel"), "").status, 200);
    let end = c.get(&format!("{path}?wait_ms=5000")).json();
    assert_eq!(
        (&end["status"], &end["stopped"], &end["counts"]["cancelled"]),
        (&json!("cancelled"), &json!("cancelled"), &json!(2))
    );
    let beat = json!({"token": got[0]["token"]}).to_string();
    let beat = c.post(&format!("/v1/jobs/{}/heartbeat", got[0]["id"].as_str().unwrap()), beat).json();
    assert_eq!(beat["cancel_requested"], true);
}

#[test]
fn bad_groups_are_refused_before_anything_is_created() {
    let folder = Folder::new();
    let server = Server::start(&folder, &[]);
    let mut c = server.client();
    for (body, field) in [
        (r#"{"queue":"q","children":[{"payload":1}],"max_parallel":0}"#, "max_parallel"),
        (r#"{"queue":"q","children":[{"payload":1}],"max_parallel":-1}"#, "max_parallel"),
        (r#"{"queue":"q","children":[{"payload":1}],"max_parallel":1.5}"#, "max_parallel"),
        (r#"{"queue":"q","children":[{"payload":1}],"max_parallel":"2"}"#, "max_parallel"),
        (r#"{"queue":"q","children":[{}]}"#, "children[0].payload"),
        (r#"{"queue":"q","children":[{"payload":1},{"payload":1,"max_attempts":0}]}"#, "max_attempts"),
        (r#"{"queue":"q"}"#, "children"),
        (r#"{"queue":"q","children":[],"fanout":1}"#, "fanout"),
    ] {
        let answer = c.post("/v1/groups", body);
        assert_eq!((answer.status, &answer.json()["field"]), (422, &json!(field)), "{body}");
    }
    let many = json!({"queue": "q", "children": vec![json!({"payload": 1}); 1_001]}).to_string();
    assert_eq!((c.post("/v1/groups", many).status, &c.get("/v1/queues").json()["queues"]), (422, &json!([])));
    for path in
        ["/v1/groups/x", "/v1/groups/01HF7YAT0003NSVAMSW2100000", "/v1/groups/01HF7YAT0003NSVAMSW2100000/result"]
    {
        let answer = c.get(path);
        assert_eq!((answer.status, answer.code()), (404, "unknown_group".into()), "{path}");
    }
}

#[test]
fn the_command_line_makes_a_group_of_files_and_fetches_what_came_of_it() {
    let folder = Folder::new();
    let server = Server::start(&folder, &[]);
    let files: Vec<String> = (0..30)
        .map(|n| {
            let path = folder.path().join(format!("file-{n}.txt"));
            std::fs::write(&path, format!("text {n}")).unwrap();
            path.to_str().unwrap().to_owned()
        })
        .collect();
    let results = folder.path().join("out");
    let mut worker = cli::worker(&server, &["--concurrency", "4"], "tr a-z A-Z");
    let mut args = vec!["submit", "--queue", "q", "--group", "--max-parallel", "3", "--key-prefix", "run-1"];
    args.extend(["--wait", "--results", results.to_str().unwrap(), "--json"]);
    args.extend(files.iter().map(String::as_str));
    let first = cli::run(&server, &args);
    assert_eq!(first.status.code(), Some(0), "{}", cli::err(&first));
    let group = cli::lines(&first).remove(0);
    assert_eq!((&group["status"], &group["counts"]["succeeded"]), (&json!("succeeded"), &json!(30)));
    for n in 0..30 {
        let text = std::fs::read_to_string(results.join(format!("file-{n}.txt.out"))).unwrap();
        assert_eq!(text, format!("TEXT {n}"));
    }
    // The same command again is the same group.
    let again = cli::run(&server, &args);
    assert_eq!((again.status.code(), &cli::lines(&again)[0]["id"]), (Some(0), &group["id"]), "{}", cli::err(&again));
    // With another number of files it is another group's, and says so.
    let other = cli::run(&server, &args[..args.len() - 1]);
    assert_eq!(other.status.code(), Some(0), "a page that is part of the first: {}", cli::err(&other));
    let _ = worker.kill();
    let _ = worker.wait();
    // A file that is not there: no group.
    let missing = cli::run(&server, &["submit", "--queue", "q", "--group", "/no/such/file"]);
    assert_eq!(missing.status.code(), Some(1));
    assert!(cli::err(&missing).contains("/no/such/file"));
    let odd = cli::run(&server, &["submit", "--queue", "q", "--max-parallel", "3", &files[0]]);
    assert_eq!(odd.status.code(), Some(2));
}
