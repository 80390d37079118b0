//! Goal: `leasehold submit` loses and doubles nothing, whatever becomes of the network, the server or
//! itself, and says what it did. Real processes, and a network that loses what it is told to.

#![allow(clippy::unwrap_used, clippy::panic)]

mod support;

use std::io::Write as _;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use rustix::process::Signal;
use support::cli::{bare, err, leasehold, lines, out, run, signal, worker};
use support::proxy::{Fate, Proxy};
use support::{Folder, Server, until, wait};

const SOON: Duration = Duration::from_secs(20);

fn files(folder: &Folder, n: usize) -> Vec<PathBuf> {
    let dir = folder.path().join("in");
    std::fs::create_dir_all(&dir).unwrap();
    let paths: Vec<PathBuf> = (0..n).map(|n| dir.join(format!("{n}.txt"))).collect();
    for (n, path) in paths.iter().enumerate() {
        std::fs::write(path, format!("text of {n}.txt")).unwrap();
    }
    paths
}

fn count(server: &Server, status: &str) -> u64 {
    server.client().get("/v1/queues/q").json()["counts"][status].as_u64().unwrap_or(0)
}

#[test]
fn files_in_results_out() {
    let folder = Folder::new();
    let server = Server::start(&folder, &[]);
    let paths = files(&folder, 250);
    let results = folder.path().join("out");
    let mut work = worker(&server, &["--concurrency", "8"], "tr a-z A-Z");
    let submit = || {
        leasehold(&server)
            .args(["submit", "--queue", "q", "--key-prefix", "p", "--json", "--wait", "--results"])
            .arg(&results)
            .args(&paths)
            .output()
            .unwrap()
    };
    let first = submit();
    assert!(first.status.success(), "{}", err(&first));
    let said = lines(&first);
    assert_eq!(said.len(), 250);
    assert!(said.iter().all(|l| l["status"] == "succeeded" && l["id"].is_string() && l["name"].is_string()));
    assert!(!err(&first).contains(['\r', '\u{1b}']), "no bar in a pipe: {:?}", err(&first));
    for n in 0..250 {
        let result = std::fs::read_to_string(results.join(format!("{n}.txt.out"))).unwrap();
        assert_eq!(result, format!("TEXT OF {n}.TXT"));
    }
    // A second run submits nothing new.
    assert!(submit().status.success());
    assert_eq!(count(&server, "succeeded"), 250);
    signal(&work, Signal::TERM);
    assert!(wait(&mut work, SOON).success());
}

#[test]
fn lines_are_sent_as_they_come() {
    let folder = Folder::new();
    let server = Server::start(&folder, &[]);
    let mut submit = leasehold(&server);
    submit.args(["submit", "--queue", "q", "--class", "batch", "-"]).stdin(Stdio::piped());
    let mut submit = submit.spawn().unwrap();
    let mut input = submit.stdin.take().unwrap();
    input.write_all(b"plain\n").unwrap();
    until("the line is a job, before there is another", SOON, || count(&server, "queued") == 1);
    input.write_all(b" {\"a\": 1}\r\n\xff\n\nno end").unwrap();
    drop(input);
    let output = submit.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", err(&output));
    let out = out(&output);
    let mut ids: Vec<(&str, &str)> = out.lines().map(|l| l.split_once('\t').unwrap()).collect();
    ids.sort_by_key(|(_, name)| *name);
    assert_eq!(ids.iter().map(|i| i.1).collect::<Vec<_>>(), ["line-1", "line-2", "line-3", "line-4", "line-5"]);
    let mut c = server.client();
    let mut payload = |n: usize| {
        let answer = c.get(&format!("/v1/jobs/{}/payload", ids[n].0));
        (answer.header("content-type").unwrap().to_owned(), answer.body)
    };
    let text = "text/plain; charset=utf-8";
    assert_eq!(payload(0), (text.into(), b"plain".to_vec()));
    assert_eq!(payload(1), ("application/json".into(), b"{\"a\": 1}".to_vec()));
    assert_eq!(payload(2), ("application/octet-stream".into(), b"\xff".to_vec()));
    assert_eq!(payload(3), (text.into(), b"".to_vec()));
    assert_eq!(payload(4), (text.into(), b"no end".to_vec()));
    assert_eq!(server.client().get(&format!("/v1/jobs/{}", ids[0].0)).json()["class"], "batch");
    // Nothing is not a failure, and is said.
    let nothing = run(&server, &["submit", "--queue", "q", "-"]);
    assert!(nothing.status.success() && err(&nothing).contains("nothing to submit"), "{}", err(&nothing));
    let closed = std::process::Command::new("sh")
        .args(["-c", "exec \"$0\" submit --queue q - <&-", support::BINARY])
        .env("LEASEHOLD_SERVER", server.url())
        .output()
        .unwrap();
    assert!(closed.status.success() && err(&closed).contains("nothing to submit"), "{}", err(&closed));
}

#[test]
fn large_files_go_as_they_are_and_batches_fit() {
    let folder = Folder::new();
    let server = Server::start(&folder, &["--max-body", "1MiB"]);
    let dir = folder.path();
    let text = "x".repeat(700_000);
    let json = format!("  [\"{}\"]\n", "y".repeat(300_000));
    for (name, content) in [("big.txt", &text), ("big.json", &json)] {
        std::fs::write(dir.join(name), content).unwrap();
    }
    std::fs::write(dir.join("too.bin"), vec![0; 1_100_000]).unwrap();
    // Together more than one call may carry; each well below.
    let middles: Vec<PathBuf> = (0..12).map(|n| dir.join(format!("{n}.bin"))).collect();
    middles.iter().for_each(|path| std::fs::write(path, vec![1; 200_000]).unwrap());
    let output = leasehold(&server)
        .args(["submit", "--queue", "q", "--json", "--key-prefix", "p", "--delay-ms", "60000", "--max-attempts", "7"])
        .args(["big.txt", "big.json", "too.bin", "missing.txt"].map(|n| dir.join(n)))
        .args(&middles)
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    let said = lines(&output);
    let of = |name: &str| said.iter().find(|l| l["name"].as_str().unwrap().ends_with(name)).unwrap();
    assert_eq!(of("too.bin")["problem"]["status"], 413, "{}", of("too.bin"));
    assert_eq!(of("missing.txt")["problem"]["code"], "unreadable");
    assert!(err(&output).contains("2 of the jobs were not submitted"), "{}", err(&output));
    assert_eq!(count(&server, "scheduled"), 14);
    let mut c = server.client();
    let id = of("big.txt")["id"].as_str().unwrap();
    assert_eq!(c.get(&format!("/v1/jobs/{id}/payload")).body, text.as_bytes());
    let found = c.get(&format!("/v1/jobs/{id}")).json();
    assert_eq!((found["max_attempts"].as_u64(), found["idempotency_key"].is_string()), (Some(7), true), "{found}");
    let id = of("big.json")["id"].as_str().unwrap();
    let payload = c.get(&format!("/v1/jobs/{id}/payload"));
    assert_eq!(payload.header("content-type"), Some("application/json"));
    assert_eq!(payload.body, json.trim().as_bytes());
}

#[test]
fn what_was_not_answered_is_sent_again_and_not_doubled() {
    let folder = Folder::new();
    let server = Server::start(&folder, &[]);
    let proxy = Proxy::before(server.address);
    proxy.strike("/v1/jobs:batch", Fate::Unanswered, 3);
    proxy.strike("/v1/queues/q/jobs", Fate::Unanswered, 1);
    proxy.strike("/v1/jobs:batch", Fate::Unheard, 2);
    let mut paths = files(&folder, 300);
    let big = folder.path().join("big.bin");
    std::fs::write(&big, vec![7; 400_000]).unwrap();
    paths.push(big);
    let output =
        leasehold(&server).env("LEASEHOLD_SERVER", proxy.url()).args(["submit", "--queue", "q"]).args(&paths).output();
    let output = output.unwrap();
    assert!(output.status.success(), "{}", err(&output));
    assert_eq!((out(&output).lines().count(), count(&server, "queued"), proxy.struck()), (301, 301, 6));
    assert!(err(&output).contains("trying again") && err(&output).contains("answers again"), "{}", err(&output));
}

#[test]
fn a_server_that_comes_later_is_waited_for_and_one_that_does_not_is_given_up() {
    let folder = Folder::new();
    // A port that was free just now.
    let address = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let paths = files(&folder, 3);
    let url = format!("http://{address}");
    let mut gives_up = bare();
    gives_up.args(["submit", "--queue", "q", "--server", &url, "--retry-for", "300ms"]).args(&paths);
    let output = gives_up.output().unwrap();
    assert_eq!(output.status.code(), Some(3));
    let said = err(&output);
    assert!(said.contains("cannot be reached") && said.contains("0 of 3 jobs were submitted"), "{said}");
    assert!(said.contains("--key-prefix "), "it says how to go on: {said}");

    let mut waits = bare();
    waits.args(["submit", "--queue", "q", "--server", &url]).args(&paths).stderr(Stdio::piped());
    let mut waits = waits.spawn().unwrap();
    let mut line = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(waits.stderr.take().unwrap()), &mut line).unwrap();
    assert!(line.contains("trying again"), "{line}");
    let server = Server::at(address, &folder, &[]);
    assert!(wait(&mut waits, SOON).success());
    assert_eq!(count(&server, "queued"), 3);
}

#[test]
fn interrupted_it_says_what_was_done_and_how_to_go_on() {
    let folder = Folder::new();
    let server = Server::start(&folder, &[]);
    let proxy = Proxy::before(server.address);
    let paths = files(&folder, 250);
    // The first batch is answered, the second done but not answered, and so on.
    proxy.strike("/v1/jobs:batch", Fate::Silence, usize::MAX);
    let mut submit = leasehold(&server);
    submit.env("LEASEHOLD_SERVER", proxy.url()).args(["submit", "--queue", "q", "--parallel", "1"]).args(&paths);
    let submit = submit.spawn().unwrap();
    until("some are done", SOON, || proxy.struck() == 1 && count(&server, "queued") > 0);
    let done = count(&server, "queued");
    assert!(done < 250, "one call does not carry all");
    signal(&submit, Signal::INT);
    let output = submit.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130));
    let said = err(&output);
    let doubt = format!("0 of 250 jobs were submitted, {done} may have been (no answer came), and no more");
    assert!(said.contains(&doubt), "{said}");
    let prefix = said.split("--key-prefix ").nth(1).unwrap().split_whitespace().next().unwrap();
    let mut again = leasehold(&server);
    again.args(["submit", "--queue", "q", "--key-prefix", prefix]).args(&paths);
    assert!(again.output().unwrap().status.success());
    assert_eq!(count(&server, "queued"), 250);

    // While it waits, all is submitted.
    let mut waits = leasehold(&server);
    waits.args(["submit", "--queue", "q", "--key-prefix", prefix, "--wait"]).args(&paths).stderr(Stdio::piped());
    let waits = waits.spawn().unwrap();
    let repeated = |c: &mut support::Client| {
        let page = String::from_utf8(c.get("/metrics").body).unwrap();
        page.lines().any(|l| {
            l.strip_prefix("leasehold_submits_repeated_total ")
                .is_some_and(|n| n.parse::<u64>().is_ok_and(|n| n >= 250 + done))
        })
    };
    let mut c = server.client();
    until("all are submitted again", SOON, || repeated(&mut c));
    until("it waits", SOON, || {
        let page = String::from_utf8(c.get("/metrics").body).unwrap();
        page.contains("route=\"/v1/jobs/{id}\",status=\"200\"")
    });
    signal(&waits, Signal::TERM);
    let output = waits.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(143));
    assert!(err(&output).contains("all 250 jobs are submitted"), "{}", err(&output));
}

#[test]
fn a_group_is_one_object() {
    let folder = Folder::new();
    let server = Server::start(&folder, &[]);
    let paths = files(&folder, 2);
    let submit = |more: &[&str]| {
        let mut command = leasehold(&server);
        command.args(["submit", "--queue", "q", "--group", "--json"]).args(more);
        command
    };
    let made = submit(&["--key-prefix", "p"]).args(&paths).output().unwrap();
    let said = lines(&made);
    assert!(made.status.success() && said.len() == 1, "{}", err(&made));
    assert_eq!((&said[0]["children"], &said[0]["sealed"]), (&2.into(), &true.into()), "{}", said[0]);
    let path = format!("/v1/groups/{}", said[0]["id"].as_str().unwrap());
    let other = submit(&["--key-prefix", "p", "--max-parallel", "1"]).args(&paths).output().unwrap();
    let told = lines(&other);
    assert_eq!((other.status.code(), &told[0]["problem"]["code"]), (Some(1), &"idempotency_key_reused".into()));
    // It ends otherwise than well: the group says so, and the status does.
    let waiting = submit(&["--key-prefix", "p", "--wait"]).args(&paths).spawn().unwrap();
    let page = || server.client().get("/metrics").text();
    until("its end is waited for", SOON, || page().contains("leasehold_polls 1"));
    assert_eq!(server.client().post(&format!("{path}/cancel"), "").status, 200);
    let waited = waiting.wait_with_output().unwrap();
    let said = lines(&waited);
    assert_eq!((waited.status.code(), said.len(), &said[0]["status"]), (Some(1), 1, &"cancelled".into()));
    // Nothing came of it: why is told in its place.
    let none = submit(&["missing.txt"]).output().unwrap();
    assert_eq!((none.status.code(), &lines(&none)[0]["problem"]["code"]), (Some(1), &"failed".into()));
}

#[test]
fn whoever_stops_reading_stops_nothing() {
    let folder = Folder::new();
    let server = Server::start(&folder, &[]);
    let paths = files(&folder, 250);
    let mut submit = leasehold(&server);
    submit.args(["submit", "--queue", "q"]).args(&paths).stdout(Stdio::piped());
    let mut submit = submit.spawn().unwrap();
    drop(submit.stdout.take());
    assert!(wait(&mut submit, SOON).success());
    assert_eq!(count(&server, "queued"), 250);
}

#[test]
fn what_fails_is_named() {
    let folder = Folder::new();
    let server = Server::start(&folder, &[]);
    let paths = files(&folder, 3);
    let mut work = worker(&server, &[], "read x; case $x in *1.txt) echo no good >&2; exit 65;; esac");
    let output = leasehold(&server).args(["submit", "--queue", "q", "--wait"]).args(&paths).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(err(&output).contains("1.txt: dead: no good"), "{}", err(&output));
    assert!(err(&output).contains("1 of the jobs did not succeed"), "{}", err(&output));
    assert_eq!(out(&output).lines().filter(|l| l.ends_with("\tsucceeded")).count(), 2);
    signal(&work, Signal::TERM);
    wait(&mut work, SOON);
    // What cannot be is said before anything is sent.
    let path = paths[0].to_str().unwrap();
    for args in [
        vec!["submit", "--queue", "q", path, path],
        vec!["submit", "--queue", "q", "--class", "urgent", path],
        vec!["submit", "--queue", "q", "--results", "x", path],
        vec!["submit", "--queue", "q"],
    ] {
        assert_eq!(run(&server, &args).status.code(), Some(2), "{args:?}");
    }
    let refused = run(&server, &["submit", "--queue", "", path]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(err(&refused).contains("422") && err(&refused).contains("queue"), "{}", err(&refused));
}
