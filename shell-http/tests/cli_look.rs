//! Goal: what the command line shows is fit for people on a terminal, for programs in a pipe, and ends
//! with a status that says what happened. Real processes, a real terminal, a real shell.

#![allow(clippy::unwrap_used, clippy::panic)]

mod support;

use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader, Read as _};
use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::process::Signal;
use support::cli::{Guarded, bare, err, leasehold, lines, out, run, signal};
use support::{BINARY, Folder, Server, claim, submit, until};

const SOON: Duration = Duration::from_secs(20);

/// Both ends of a terminal.
fn terminal() -> (std::fs::File, OwnedFd) {
    use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
    let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&ours).unwrap();
    unlockpt(&ours).unwrap();
    let name = ptsname(&ours, Vec::new()).unwrap().into_string().unwrap();
    let theirs = std::fs::File::options().read(true).write(true).open(name).unwrap();
    (ours.into(), theirs.into())
}

/// What a command prints on a terminal until it ends.
fn on_terminal(mut command: Command) -> String {
    let (mut ours, theirs) = terminal();
    command.env("TERM", "xterm").stdout(theirs.try_clone().unwrap()).stderr(theirs);
    let mut child = command.spawn().unwrap();
    let pid = rustix::process::Pid::from_child(&child);
    let (ended, is_ended) = std::sync::mpsc::channel::<()>();
    std::thread::spawn(move || {
        // It must not keep the test for ever.
        if is_ended.recv_timeout(3 * SOON) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
            rustix::process::kill_process(pid, Signal::KILL).unwrap();
        }
    });
    // Our own copies of its end must go, or there is no end to read.
    drop(command);
    let mut said = Vec::new();
    let mut piece = [0; 4096];
    // A terminal whose other end is closed gives an error, not an end.
    while let Ok(n @ 1..) = ours.read(&mut piece) {
        said.extend_from_slice(&piece[..n]);
    }
    drop(ended);
    child.wait().unwrap();
    String::from_utf8(said).unwrap()
}

#[test]
fn jobs_and_queues() {
    let folder = Folder::new();
    let server = Server::start(&folder, &[]);
    let mut c = server.client();
    let dead = submit(&mut c, r#"{"queue":"docs","payload":1,"max_attempts":1,"metadata":{"a":1}}"#);
    let (id, token) = claim(&mut c, "docs");
    let error = r#"{"message":"no\u001b[2J good","type":"t"}"#;
    assert_eq!(c.post(&format!("/v1/jobs/{id}/fail"), format!(r#"{{"token":"{token}","error":{error}}}"#)).status, 200);
    let queued = submit(&mut c, r#"{"queue":"docs","payload":1,"class":"batch"}"#);
    let other = submit(&mut c, r#"{"queue":"mail","payload":1}"#);

    let shown = run(&server, &["status", &dead]);
    assert!(shown.status.success());
    let said = out(&shown);
    assert!(said.starts_with(&format!("{dead}  dead\n")), "{said}");
    assert!(said.contains("delivery 1") && said.contains("failed by w no\u{fffd}[2J good"), "{said}");
    assert!(!said.contains('\u{1b}'), "no colours in a pipe, and none of a job's making");

    let list = run(&server, &["status", "--queue", "docs"]);
    let said = out(&list);
    assert!(said.lines().next().unwrap().starts_with("id "), "{said}");
    assert!(said.contains(&dead) && said.contains(&queued) && !said.contains(&other), "{said}");
    let list = lines(&run(&server, &["status", "--queue", "docs", "--status", "dead", "--json"]));
    assert_eq!((list.len(), list[0]["id"].as_str()), (1, Some(dead.as_str())));
    assert_eq!(lines(&run(&server, &["status", "--queue", "docs", "--limit", "1", "--json"])).len(), 1);

    let table = out(&run(&server, &["queues"]));
    assert_eq!(out(&run(&server, &["status"])).lines().count(), 3);
    let title = table.lines().next().unwrap();
    assert!(title.starts_with("queue  queued  running  succeeded  dead  oldest"), "{table}");
    let paused = run(&server, &["queues", "docs", "--pause", "--reason", "model away", "--json"]);
    assert_eq!(lines(&paused)[0]["pause_reason"], "model away");
    assert!(out(&run(&server, &["queues", "docs"])).contains("paused: model away"));
    let purged = run(&server, &["queues", "docs", "--purge", "--status", "dead", "--json"]);
    assert_eq!(lines(&purged)[0]["purged"], 1);
    assert_eq!(lines(&run(&server, &["cancel", &queued, "--json"]))[0]["status"], "cancelled");
}

#[test]
fn how_commands_end() {
    let folder = Folder::new();
    let mut server = Server::start(&folder, &[]);
    let known = submit(&mut server.client(), r#"{"queue":"q","payload":1}"#);
    let code = |args: &[&str]| run(&server, args).status.code();
    assert_eq!(code(&["status", &known]), Some(0));
    let half = run(&server, &["status", "--json", "nonsense", &known]);
    assert_eq!(half.status.code(), Some(1), "one is not known");
    let said = lines(&half);
    assert_eq!((&said[0]["id"], &said[0]["problem"]["status"]), (&"nonsense".into(), &404.into()));
    assert_eq!(said[1]["id"], known.as_str());
    assert_eq!(code(&["queues", "unknown"]), Some(1));
    assert_eq!(code(&["pools", "unknown"]), Some(1));
    assert_eq!(code(&["cancel", &known]), Some(0));
    assert_eq!(code(&["cancel", &known, "nonsense"]), Some(1));
    assert_eq!(code(&["events", "--after", "nonsense"]), Some(1));
    for (args, problem) in [
        (&["queues", "unknown"][..], "unknown_queue"),
        (&["queues", "unknown", "--purge"], "unknown_queue"),
        (&["pools", "unknown"], "unknown_pool"),
        (&["pools", "unknown", "--delete"], "unknown_pool"),
        (&["pools", "small", "--total", "0"], "invalid_field"),
        (&["events", "--after", "nonsense"], "invalid_field"),
    ] {
        let output = run(&server, &[args, &["--json"]].concat());
        let said = lines(&output);
        assert_eq!((output.status.code(), said.len()), (Some(1), 1), "{args:?}");
        assert_eq!(said[0]["problem"]["code"], problem, "{args:?}: {}", said[0]);
        assert!(said[0]["problem"]["status"].is_number() && said[0]["problem"]["detail"].is_string());
    }
    assert_eq!(code(&["status", "--status", "alive"]), Some(2));
    assert_eq!(code(&["cancel"]), Some(2));
    assert_eq!(code(&["cancel", ""]), Some(2));
    assert_eq!(code(&["queues", ""]), Some(2), "not all of them");
    assert_eq!(code(&["no-such-command"]), Some(2));
    assert_eq!(code(&["config", "--grace", "soon"]), Some(2));
    assert_eq!(code(&["serve", "--listen", "0.0.0.0:0"]), Some(2));
    assert_eq!(code(&["--help"]), Some(0));
    server.kill();
    for args in [
        vec!["status"],
        vec!["status", &known],
        vec!["queues"],
        vec!["pools", "gpu", "--total", "8"],
        vec!["cancel", &known],
        vec!["events"],
        vec!["bench", "--seconds", "1"],
    ] {
        let output = run(&server, &args);
        assert_eq!(output.status.code(), Some(3), "{args:?}: {}", err(&output));
        let said = err(&output);
        assert!(said.contains("cannot be reached") && said.contains("LEASEHOLD_SERVER"), "{args:?}: {said}");
        assert_eq!(said.lines().count(), 1, "{said}");
        let told = lines(&run(&server, &[&args[..], &["--json"]].concat()));
        assert_eq!((told.len(), &told[0]["problem"]["code"]), (1, &"unreachable".into()), "{args:?}");
    }
}

#[test]
fn events_survive_a_restart_without_a_gap_or_a_double() {
    let folder = Folder::new();
    let mut server = Server::start(&folder, &[]);
    let address = server.address;
    let mut follow = leasehold(&server).args(["events", "--follow", "--json"]).spawn().unwrap();
    let mut said = BufReader::new(follow.stdout.take().unwrap()).lines();
    let mut next = || -> serde_json::Value { serde_json::from_str(&said.next().unwrap().unwrap()).unwrap() };
    let mut ids = BTreeSet::new();
    let mut jobs = Vec::new();
    for round in 0..3 {
        for _ in 0..5 {
            let id = submit(&mut server.client(), r#"{"queue":"q","payload":1}"#);
            let event = next();
            assert_eq!((event["type"].as_str(), event["job"].as_str()), (Some("job.submitted"), Some(id.as_str())));
            assert!(ids.insert(event["id"].as_str().unwrap().to_owned()), "{event} came twice");
            jobs.push(id);
        }
        if round < 2 {
            server.kill();
            server = Server::at(address, &folder, &[]);
        }
    }
    signal(&follow, Signal::TERM);
    follow.wait().unwrap();
    // From the middle on, and no more than asked for.
    let all = lines(&run(&server, &["events", "--json"]));
    assert_eq!(all.len(), 15);
    let after = all[9]["id"].as_str().unwrap();
    let rest = lines(&run(&server, &["events", "--json", "--after", after, "--limit", "3"]));
    assert_eq!(rest.iter().map(|e| &e["job"]).collect::<Vec<_>>(), jobs[10..13].iter().collect::<Vec<_>>());
    let plain = out(&run(&server, &["events", "--limit", "1"]));
    assert!(plain.contains("job.submitted") && plain.contains(&jobs[0]), "{plain}");
}

#[test]
fn watching_goes_on_until_all_have_ended() {
    let folder = Folder::new();
    let server = Server::start(&folder, &[]);
    let mut c = server.client();
    let id = submit(&mut c, r#"{"queue":"q","payload":1}"#);
    let mut watch = leasehold(&server).args(["status", &id, "--watch=100ms"]).spawn().unwrap();
    let mut said = BufReader::new(watch.stdout.take().unwrap()).lines().map_while(Result::ok);
    assert_eq!(said.next().unwrap(), format!("{id}  queued"));
    assert!(run(&server, &["cancel", &id]).status.success());
    assert!(said.any(|line| line == format!("{id}  cancelled")));
    assert_eq!(watch.wait().unwrap().code(), Some(0));
    let mut watch = leasehold(&server).args(["queues", "--json", "--watch=100ms"]).spawn().unwrap();
    let mut said = BufReader::new(watch.stdout.take().unwrap()).lines().map_while(Result::ok);
    for _ in 0..2 {
        assert_eq!(serde_json::from_str::<serde_json::Value>(&said.next().unwrap()).unwrap()["name"], "q");
    }
    signal(&watch, Signal::TERM);
    watch.wait().unwrap();
}

#[test]
fn colours_and_bars_only_where_they_belong() {
    let folder = Folder::new();
    let server = Server::start(&folder, &[]);
    let id = submit(&mut server.client(), r#"{"queue":"q","payload":1}"#);
    assert!(run(&server, &["cancel", &id]).status.success());
    let status = |more: &[&str]| {
        let mut command = leasehold(&server);
        command.args(["status", &id]).args(more);
        command
    };
    let coloured = |text: &str| text.contains("\u{1b}[33mcancelled\u{1b}[0m");
    assert!(coloured(&on_terminal(status(&[]))));
    assert!(!on_terminal(status(&["--color", "never"])).contains('\u{1b}'));
    let mut without = status(&[]);
    without.env("NO_COLOR", "1");
    assert!(!on_terminal(without).contains('\u{1b}'));
    let mut forced = status(&["--color=always"]);
    forced.env("NO_COLOR", "1");
    assert!(coloured(&out(&forced.output().unwrap())));
    assert!(!out(&status(&[]).output().unwrap()).contains('\u{1b}'));

    // A bar while a job is waited for, and it is taken away at the end.
    let file = folder.path().join("a.txt");
    std::fs::write(&file, "x").unwrap();
    let mut wait = leasehold(&server);
    wait.args(["submit", "--queue", "w", "--wait"]).arg(&file);
    let address = server.address;
    let looks = move |c: &mut support::Client| -> u32 {
        let page = String::from_utf8(c.get("/metrics").body).unwrap();
        let name = "leasehold_http_requests_total{method=\"GET\",route=\"/v1/jobs/{id}\",status=\"200\"} ";
        page.lines().find_map(|l| l.strip_prefix(name)).map_or(0, |n| n.parse().unwrap())
    };
    let before = looks(&mut server.client());
    let worker = std::thread::spawn(move || {
        let mut c = support::Client::new(address);
        until("it is waited for", SOON, || looks(&mut c) >= before + 4);
        let (id, token) = claim(&mut c, "w");
        assert_eq!(c.post(&format!("/v1/jobs/{id}/complete"), format!(r#"{{"token":"{token}"}}"#)).status, 200);
    });
    let said = on_terminal(wait);
    worker.join().unwrap();
    assert!(said.contains("\r\u{1b}[K[------------------------------] 0 of 1 ended"), "{said:?}");
    assert!(said.contains("\r\u{1b}[Kleasehold: 1 of 1 ended in "), "{said:?}");
}

#[test]
fn configuration_and_measures_as_json() {
    let folder = Folder::new();
    let output = bare().args(["config", "--grace", "3s", "--json"]).output().unwrap();
    let config = &lines(&output)[0];
    assert_eq!((config["grace"].as_str(), config["insecure_listen"].as_bool()), (Some("3000ms"), Some(false)));
    let plain = bare().args(["config", "--grace", "3s"]).output().unwrap();
    assert!(out(&plain).contains("grace = \"3000ms\""));
    let bad = bare().arg("config").env("LEASEHOLD_COLOUR", "x").output().unwrap();
    assert_eq!(bad.status.code(), Some(2));
    assert!(err(&bad).contains("LEASEHOLD_COLOUR"));
    // A worker's command may run the server: what it is told is not configuration.
    let inside = bare().arg("config").env("LEASEHOLD_TOKEN", "x").env("LEASEHOLD_DELIVERY", "1").output().unwrap();
    assert!(inside.status.success(), "{}", err(&inside));
    let bad = bare().args(["--listen", "0.0.0.0:0"]).output().unwrap();
    assert!(err(&bad).contains("--insecure-listen"));
    let bad = bare().args(["config", "--json", "--grace", "a\tb"]).output().unwrap();
    assert_eq!((bad.status.code(), &lines(&bad)[0]["problem"]["code"]), (Some(2), &"wrong_usage".into()));
    assert!(err(&bad).contains("not `a\\tb`"), "{}", err(&bad));
    // Messages go to logs, and what was meant as an address may hold a password.
    let file = folder.path().join("bad.toml");
    std::fs::write(&file, "store = \"redis://:hunter2@a").unwrap();
    for args in [
        vec!["config", "--config", file.to_str().unwrap()],
        vec!["config", "--store", "rediss://:hunter2@a"],
        vec!["config", "--store", "redis://:hunter2@a:b"],
        vec!["config", "--store", "redis://:hunter2@a"],
        vec!["audit", "--store", "redis://:hunter2@a:b"],
        vec!["audit", "--store", "rediss://:hunter2@a"],
    ] {
        let output = bare().args(&args).output().unwrap();
        let said = format!("{}{}", out(&output), err(&output));
        assert!(!said.is_empty() && !said.contains("hunter2"), "{args:?}: {said}");
    }
    // A Redis that is not there is waited for, and the log says which.
    let mut serve = bare();
    serve.args(["--store", "redis://me:hunter2@127.0.0.1:1", "--listen", "127.0.0.1:0"]);
    let mut serve = Guarded(serve.spawn().unwrap());
    let mut log = BufReader::new(serve.stderr.take().unwrap()).lines().map_while(Result::ok);
    let said = log.find(|line| line.contains("address=")).unwrap();
    assert!(said.contains("redis://me:***@127.0.0.1:1") && !said.contains("hunter2"), "{said}");
    drop(serve);
    assert!(log.all(|line| !line.contains("hunter2")));

    let server = Server::start(&folder, &[]);
    let args = ["bench", "--seconds", "1", "--connections", "2", "--only", "submit,drain", "--json"];
    let rows = lines(&run(&server, &args));
    assert_eq!(rows.len(), 2);
    assert!(rows[0]["jobs_per_second"].as_f64().unwrap() > 0.0 && rows[0]["errors"] == 0, "{}", rows[0]);
}

#[test]
fn completions_are_what_a_shell_takes() {
    let complete = |line: &str| -> Vec<String> {
        // As bash calls it: the words, and which of them is being completed.
        let script = r#"
            source <("$BINARY" completions bash) || exit 9
            read -ra COMP_WORDS <<< "$1"
            [[ "$1" == *" " ]] && COMP_WORDS+=("")
            COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
            of=$(complete -p leasehold | sed 's/.*-F \([^ ]*\).*/\1/')
            "$of" leasehold "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
            printf '%s\n' "${COMPREPLY[@]}""#;
        let output = Command::new("bash").args(["-c", script, "bash", line]).env("BINARY", BINARY).output().unwrap();
        assert!(output.status.success() && output.stderr.is_empty(), "{line}: {}", err(&output));
        out(&output).lines().map(str::to_owned).collect()
    };
    let commands = complete("leasehold ");
    for command in ["serve", "config", "submit", "work", "status", "cancel", "queues", "events", "bench", "completions"]
    {
        assert!(commands.iter().any(|c| c == command), "{command}: {commands:?}");
    }
    assert_eq!(complete("leasehold wo"), ["work"]);
    assert_eq!(complete("leasehold work --concur"), ["--concurrency"]);
    assert_eq!(complete("leasehold submit --class "), ["interactive", "system", "batch"]);
    assert!(complete("leasehold queues --purge --status ").contains(&"dead".to_owned()));
    assert_eq!(complete("leasehold completions z"), ["zsh"]);
    // The other shells, as far as can be seen without them.
    for (shell, start) in [("zsh", "#compdef leasehold"), ("fish", "# Print an optspec")] {
        let output = bare().args(["completions", shell]).output().unwrap();
        assert!(out(&output).starts_with(start) && out(&output).contains("concurrency"), "{}", out(&output));
    }
    assert_eq!(bare().args(["completions", "tcsh"]).output().unwrap().status.code(), Some(2));
}

#[test]
fn whoever_has_seen_enough_is_no_failure_worth_a_word() {
    let folder = Folder::new();
    let server = Server::start(&folder, &[]);
    let jobs: Vec<_> = (0..1_000).map(|_| r#"{"queue":"q","payload":1}"#).collect();
    assert_eq!(server.client().post("/v1/jobs:batch", format!(r#"{{"jobs":[{}]}}"#, jobs.join(","))).status, 200);
    let mut events = leasehold(&server);
    let mut events = events.args(["events", "--json"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut first = String::new();
    BufReader::with_capacity(64, events.stdout.take().unwrap()).read_line(&mut first).unwrap();
    let output = events.wait_with_output().unwrap();
    assert_eq!(err(&output), "");
}

#[test]
fn pools() {
    let folder = Folder::new();
    let server = Server::start(&folder, &[]);
    assert!(out(&run(&server, &["pools"])).contains("no pools"));
    let made =
        &lines(&run(&server, &["pools", "gpu", "--total", "8", "--batch-max", "6", "--lease", "5m", "--json"]))[0];
    assert_eq!((&made["total"], &made["batch_max"], &made["lease_ms"]), (&8.into(), &6.into(), &300_000.into()));
    let slot = server.client().post("/v1/pools/gpu/slots", r#"{"holder":"w1","cost":3}"#);
    assert_eq!(slot.status, 201);
    let shrunk = out(&run(&server, &["pools", "gpu", "--total", "2"]));
    assert!(shrunk.contains("w1") && shrunk.contains(slot.json()["id"].as_str().unwrap()), "{shrunk}");
    assert!(out(&run(&server, &["pools"])).lines().nth(1).is_some_and(|l| l.starts_with("gpu ")));
    assert_eq!(run(&server, &["pools", "gpu", "--delete"]).status.code(), Some(1), "it is in use");
    assert_eq!(server.client().send("DELETE", slot.header("location").unwrap(), &[], b"").status, 204);
    assert_eq!(run(&server, &["pools", "gpu", "--delete"]).status.code(), Some(0));
    assert_eq!(run(&server, &["pools", "gpu"]).status.code(), Some(1));
}
