//! Goal: `leasehold work` does what a careful hand-written worker would: claims that can be repeated,
//! renewals, finished results kept through a restart, commands ended when their lease is. Real
//! processes, and a network that loses what it is told to.

#![allow(clippy::unwrap_used, clippy::panic)]

mod support;

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;
use support::cli::{Guarded, err, leasehold, lines, out, run, signal, worker};
use support::proxy::{Fate, Proxy};
use support::{Client, Folder, Server, status, submit, until, wait};

const SOON: Duration = Duration::from_secs(20);

fn job(client: &mut Client, id: &str) -> Value {
    client.get(&format!("/v1/jobs/{id}")).json()
}

/// Whether the process that wrote its id there still runs.
fn is_alive(file: &Path) -> bool {
    let pid = std::fs::read_to_string(file).unwrap();
    // A zombie has ended, and waits for a parent that may not look.
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.trim())).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| !rest.is_empty() && !rest.trim_start().starts_with('Z'))
}

#[test]
fn a_command_is_told_what_it_works_on() {
    let folder = Folder::new();
    let server = Server::start(&folder, &[]);
    let mut c = server.client();
    let trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let headers = [("content-type", "text/x-mine"), ("traceparent", trace)];
    let id = c.send("POST", "/v1/queues/q/jobs", &headers, b"raw bytes").json()["id"].as_str().unwrap().to_owned();
    let script = "cat; env | grep -E '^(LEASEHOLD_|TRACEPARENT)' | sort";
    let output = leasehold(&server)
        .args(["work", "--queue", "q", "--exit-when-idle", "--json", "--", "sh", "-c", script])
        .env("TRACEPARENT", "the worker's own")
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", err(&output));
    let said = String::from_utf8(c.get(&format!("/v1/jobs/{id}/result")).body).unwrap();
    let (payload, env) = said.split_at("raw bytes".len());
    assert_eq!(payload, "raw bytes");
    let env: Vec<(&str, &str)> = env.lines().filter_map(|l| l.split_once('=')).collect();
    let of = |name: &str| env.iter().find(|(k, _)| *k == name).map(|(_, v)| *v);
    assert_eq!(of("LEASEHOLD_JOB_ID"), Some(id.as_str()));
    assert_eq!((of("LEASEHOLD_ATTEMPT"), of("LEASEHOLD_DELIVERY")), (Some("1"), Some("1")));
    assert_eq!((of("LEASEHOLD_QUEUE"), of("LEASEHOLD_CONTENT_TYPE")), (Some("q"), Some("text/x-mine")));
    assert_eq!((of("LEASEHOLD_SERVER"), of("TRACEPARENT")), (Some(server.url().as_str()), Some(trace)));
    // The token is the lease's: the call that ended the attempt can be repeated with it.
    let token = of("LEASEHOLD_TOKEN").unwrap();
    assert_eq!(c.post(&format!("/v1/jobs/{id}/complete"), format!(r#"{{"token":"{token}"}}"#)).status, 200);
    let line = &lines(&output)[0];
    assert_eq!((line["id"].as_str(), line["outcome"].as_str()), (Some(id.as_str()), Some("succeeded")));
}

#[test]
fn how_a_command_ends_decides() {
    let folder = Folder::new();
    let server = Server::start(&folder, &[]);
    let mut c = server.client();
    let mut end = |code: u8, more: &[&str]| {
        let id = submit(&mut c, &format!(r#"{{"queue":"q","payload":{code}}}"#));
        let script = "read c; echo first >&2; echo last $c >&2; [ $c != 0 ] || kill -9 $$; exit $c";
        let mut args = vec!["work", "--queue", "q", "--exit-when-idle"];
        args.extend(more);
        args.extend(["--", "sh", "-c", script]);
        let output = run(&server, &args);
        assert!(output.status.success(), "{}", err(&output));
        let found = job(&mut c, &id);
        let error = &found["attempts"][0]["error"];
        let text = |v: &Value| v.as_str().unwrap_or_default().to_owned();
        c.post(&format!("/v1/jobs/{id}/cancel"), "");
        (text(&found["status"]), text(&error["type"]), text(&error["message"]), text(&found["reason"]))
    };
    let (status, kind, message, _) = end(1, &[]);
    assert_eq!((status.as_str(), kind.as_str(), message.as_str()), ("retrying", "exit_1", "first\nlast 1"));
    let (status, kind, _, reason) = end(65, &[]);
    assert_eq!((status.as_str(), kind.as_str(), reason.as_str()), ("dead", "exit_65", "not_retryable"));
    let (status, kind, ..) = end(65, &["--not-retryable", "3,4"]);
    assert_eq!((status.as_str(), kind.as_str()), ("retrying", "exit_65"));
    let (status, kind, ..) = end(4, &["--not-retryable", "3,4"]);
    assert_eq!((status.as_str(), kind.as_str()), ("dead", "exit_4"));
    let (status, kind, ..) = end(0, &[]);
    assert_eq!((status.as_str(), kind.as_str()), ("retrying", "signal_9"));
}

#[test]
fn a_command_that_takes_too_long_is_ended_with_all_that_it_started() {
    let folder = Folder::new();
    let server = Server::start(&folder, &[]);
    let mut c = server.client();
    let id = submit(&mut c, r#"{"queue":"q","payload":1,"max_attempts":1}"#);
    let pid = folder.path().join("pid");
    let script = format!("echo nearly >&2; sleep 600 & echo $! > {}; wait", pid.display());
    let mut work = worker(&server, &["--timeout", "500ms", "--exit-when-idle"], &script);
    assert!(wait(&mut work, SOON).success());
    let found = job(&mut c, &id);
    assert_eq!(
        (found["status"].as_str(), found["attempts"][0]["error"]["type"].as_str()),
        (Some("dead"), Some("timeout"))
    );
    assert_eq!(found["attempts"][0]["error"]["message"], "the command ran for longer than 500ms\nnearly");
    until("its child is gone", SOON, || !is_alive(&pid));
}

#[test]
fn what_stays_in_the_background_is_not_waited_for() {
    let folder = Folder::new();
    let server = Server::start(&folder, &[]);
    let mut c = server.client();
    let id = submit(&mut c, r#"{"queue":"q","payload":1}"#);
    let pid = folder.path().join("pid");
    let script = format!("sleep 600 & echo $! > {}; echo done", pid.display());
    let mut work = worker(&server, &["--exit-when-idle"], &script);
    assert!(wait(&mut work, SOON).success());
    assert_eq!(c.get(&format!("/v1/jobs/{id}/result")).body, b"done\n");
    let sleeper = std::fs::read_to_string(&pid).unwrap().trim().parse().unwrap();
    rustix::process::kill_process(rustix::process::Pid::from_raw(sleeper).unwrap(), Signal::KILL).unwrap();
}

#[test]
fn queues_in_their_order() {
    let folder = Folder::new();
    let server = Server::start(&folder, &[]);
    let mut c = server.client();
    for queue in ["later", "first", "later", "first"] {
        submit(&mut c, &format!(r#"{{"queue":"{queue}","payload":1}}"#));
    }
    let args = ["work", "--queue", "first", "--queue", "later", "--exit-when-idle", "--json", "--", "true"];
    let output = run(&server, &args);
    let order: Vec<_> = lines(&output).iter().map(|l| l["queue"].as_str().unwrap().to_owned()).collect();
    assert_eq!(order, ["first", "first", "later", "later"]);
    assert!(err(&output).contains("4 succeeded, 0 failed"), "{}", err(&output));
}

#[test]
fn a_finished_result_survives_a_restart_of_the_server() {
    let folder = Folder::new();
    let mut server = Server::start(&folder, &[]);
    let address = server.address;
    let id = submit(&mut server.client(), r#"{"queue":"q","payload":"x"}"#);
    let started = folder.path().join("started");
    let go = folder.path().join("go");
    let script =
        format!("touch {}; while [ ! -e {} ]; do sleep 0.05; done; echo done", started.display(), go.display());
    let mut work = worker(&server, &["--lease-ms", "30000"], &script);
    until("the command runs", SOON, || started.exists());
    server.kill();
    std::fs::write(&go, "").unwrap();
    std::thread::sleep(Duration::from_secs(2));
    let server = Server::at(address, &folder, &[]);
    let mut c = server.client();
    until("the result is there", SOON, || status(&mut c, &id) == "succeeded");
    assert_eq!(c.get(&format!("/v1/jobs/{id}/result")).body, b"done\n");
    assert_eq!(job(&mut c, &id)["deliveries"], 1, "it ran once");
    signal(&work, Signal::INT);
    assert!(wait(&mut work, SOON).success());
}

#[test]
fn a_claim_whose_answer_was_lost_is_repeated() {
    let folder = Folder::new();
    let server = Server::start(&folder, &[]);
    let proxy = Proxy::before(server.address);
    let mut c = server.client();
    let id = submit(&mut c, r#"{"queue":"q","payload":"x"}"#);
    proxy.strike("/v1/claims", Fate::Unanswered, 2);
    // So are completions.
    proxy.strike("/complete", Fate::Unanswered, 1);
    let mut work = leasehold(&server)
        .args(["work", "--queue", "q", "--exit-when-idle", "--", "true"])
        .env("LEASEHOLD_SERVER", proxy.url())
        .spawn()
        .unwrap();
    assert!(wait(&mut work, SOON).success());
    assert_eq!(proxy.struck(), 3);
    let found = job(&mut c, &id);
    assert_eq!((found["status"].as_str(), found["deliveries"].as_u64()), (Some("succeeded"), Some(1)), "{found}");
}

#[test]
fn while_heartbeats_fail_nothing_more_is_claimed() {
    let folder = Folder::new();
    let server = Server::start(&folder, &[]);
    let proxy = Proxy::before(server.address);
    let mut c = server.client();
    let (first, go) = (submit(&mut c, r#"{"queue":"q","payload":1}"#), folder.path().join("go"));
    let script = format!("while [ ! -e {} ]; do sleep 0.05; done", go.display());
    let work = leasehold(&server)
        .args(["work", "--queue", "q", "--concurrency", "2", "--lease-ms", "1200", "--", "sh", "-c", &script])
        .env("LEASEHOLD_SERVER", proxy.url())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut work = Guarded(work);
    until("the first runs", SOON, || status(&mut c, &first) == "running");
    proxy.strike("/heartbeat", Fate::Unheard, usize::MAX);
    until("heartbeats fail", SOON, || proxy.struck() >= 3);
    let second = submit(&mut c, r#"{"queue":"q","payload":2}"#);
    let so_far = proxy.struck();
    until("they still fail", SOON, || proxy.struck() >= so_far + 8);
    assert_eq!(job(&mut c, &second)["deliveries"], 0, "a slot is free, but it is not claimed");
    proxy.heal();
    until("it is claimed", SOON, || job(&mut c, &second)["deliveries"] != 0);
    std::fs::write(&go, "").unwrap();
    until("it is done", SOON, || status(&mut c, &second) == "succeeded");
    signal(&work, Signal::TERM);
    assert!(wait(&mut work, SOON).success());
}

#[test]
fn a_command_whose_lease_is_lost_is_ended() {
    let folder = Folder::new();
    let server = Server::start(&folder, &[]);
    let proxy = Proxy::before(server.address);
    let mut c = server.client();
    let id = submit(&mut c, r#"{"queue":"q","payload":"x"}"#);
    let (started, ended) = (folder.path().join("started"), folder.path().join("ended"));
    let script = format!(
        "trap 'touch {}; exit 1' TERM; touch {}; while :; do sleep 0.05; done",
        ended.display(),
        started.display()
    );
    let mut work = leasehold(&server)
        .args(["work", "--queue", "q", "--lease-ms", "600", "--json", "--", "sh", "-c", &script])
        .env("LEASEHOLD_SERVER", proxy.url())
        .spawn()
        .unwrap();
    until("the command runs", SOON, || started.exists());
    proxy.strike("/heartbeat", Fate::Unheard, usize::MAX);
    until("the lease lapses", SOON, || status(&mut c, &id) == "queued");
    assert!(!ended.exists(), "the server cannot tell the worker");
    // Somebody else takes it.
    support::claim(&mut c, "q");
    proxy.heal();
    until("the command is ended", SOON, || ended.exists());
    signal(&work, Signal::TERM);
    assert!(wait(&mut work, SOON).success());
    let output = work.wait_with_output().unwrap();
    let line = &lines(&output)[0];
    assert_eq!(line["outcome"], "lost", "{line}");
    assert!(line["why"].as_str().unwrap().contains("lease_lost"), "{line}");
}

#[test]
fn a_cancelled_job_ends_its_command() {
    let folder = Folder::new();
    let server = Server::start(&folder, &[]);
    let mut c = server.client();
    let id = submit(&mut c, r#"{"queue":"q","payload":"x"}"#);
    let (started, ended) = (folder.path().join("started"), folder.path().join("ended"));
    let script = format!(
        "trap 'touch {}; exit 1' TERM; touch {}; while :; do sleep 0.05; done",
        ended.display(),
        started.display()
    );
    let mut work = worker(&server, &["--lease-ms", "900"], &script);
    until("the command runs", SOON, || started.exists());
    assert!(run(&server, &["cancel", &id]).status.success());
    until("the command is ended", SOON, || ended.exists());
    assert_eq!(status(&mut c, &id), "cancelled");
    signal(&work, Signal::TERM);
    assert!(wait(&mut work, SOON).success());
}

#[test]
fn told_to_end_it_gives_back_what_has_not_begun() {
    let folder = Folder::new();
    let server = Server::start(&folder, &[]);
    let proxy = Proxy::before(server.address);
    let mut c = server.client();
    // The leases are given, and the worker does not hear of them.
    proxy.strike("/v1/claims", Fate::Silence, 1);
    let ids: Vec<String> = (0..3).map(|n| submit(&mut c, &format!(r#"{{"queue":"q","payload":{n}}}"#))).collect();
    let mut work = leasehold(&server)
        .args(["work", "--queue", "q", "--concurrency", "3", "--json", "--", "sh", "-c", "sleep 60"])
        .env("LEASEHOLD_SERVER", proxy.url())
        .spawn()
        .unwrap();
    until("they are leased", SOON, || ids.iter().all(|id| status(&mut c, id) == "running"));
    signal(&work, Signal::TERM);
    assert!(wait(&mut work, SOON).success());
    for id in &ids {
        let found = job(&mut c, id);
        assert_eq!((found["status"].as_str(), found["attempt"].as_u64()), (Some("queued"), Some(0)), "{found}");
    }
    let output = work.wait_with_output().unwrap();
    assert!(lines(&output).iter().all(|l| l["outcome"] == "released"), "{}", out(&output));
    assert!(err(&output).contains("3 given back"), "{}", err(&output));
}

#[test]
fn told_to_end_it_finishes_and_told_twice_it_gives_back() {
    let folder = Folder::new();
    let server = Server::start(&folder, &[]);
    let mut c = server.client();
    let started = folder.path().join("started");
    let script = format!("touch {}; sleep 1; echo ok", started.display());
    let id = submit(&mut c, r#"{"queue":"q","payload":"x"}"#);
    let mut work = worker(&server, &[], &script);
    until("the command runs", SOON, || started.exists());
    let next = submit(&mut c, r#"{"queue":"q","payload":"y"}"#);
    signal(&work, Signal::TERM);
    assert!(wait(&mut work, SOON).success());
    assert_eq!((status(&mut c, &id), status(&mut c, &next)), ("succeeded".into(), "queued".into()));

    // What does not want to end is made to, with all that it has started.
    let pid = folder.path().join("pid");
    let script = format!("trap '' TERM; sleep 600 & echo $! > {}; wait; wait", pid.display());
    let mut command = leasehold(&server);
    command.args(["work", "--queue", "q", "--", "sh", "-c", &script]);
    let mut work = command.spawn().unwrap();
    until("the command runs", SOON, || std::fs::read_to_string(&pid).is_ok_and(|t| t.ends_with('\n')));
    let mut said = std::io::BufReader::new(work.stderr.take().unwrap());
    let mut line = String::new();
    for word in ["what runs is finished", "what runs is ended"] {
        signal(&work, Signal::TERM);
        line.clear();
        std::io::BufRead::read_line(&mut said, &mut line).unwrap();
        assert!(line.contains(word), "{line}");
    }
    assert!(wait(&mut work, SOON).success());
    until("what it started is gone", SOON, || !is_alive(&pid));
    let found = job(&mut c, &next);
    assert_eq!((found["status"].as_str(), found["attempt"].as_u64()), (Some("queued"), Some(0)), "{found}");
}

#[test]
fn a_command_that_cannot_be_started_costs_no_attempt() {
    let folder = Folder::new();
    let server = Server::start(&folder, &[]);
    let mut c = server.client();
    let id = submit(&mut c, r#"{"queue":"q","payload":"x"}"#);
    let output = run(&server, &["work", "--queue", "q", "--", "/no/such/command"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(err(&output).contains("/no/such/command"));
    let found = job(&mut c, &id);
    assert_eq!((found["status"].as_str(), found["attempt"].as_u64()), (Some("queued"), Some(0)), "{found}");
    // A claim that is refused is not repeated for ever.
    let output = run(&server, &["work", "--queue", "", "--", "true"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(err(&output).contains("422"), "{}", err(&output));
}
