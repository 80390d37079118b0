//! Goal: the clients of the command line do what a careful hand-written client would: repeat
//! without harm, keep finished results through a restart, stop when told. Real processes.

#![allow(clippy::unwrap_used, clippy::panic)]

mod support;

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::Signal;
use support::{BINARY, Folder, Server, status, submit, until, wait};

fn leasehold(server: &Server) -> Command {
    let mut command = Command::new(BINARY);
    command.env("LEASEHOLD_SERVER", server.url()).stdin(Stdio::null());
    command
}

fn worker(server: &Server, more: &[&str], script: &str) -> Child {
    let mut command = leasehold(server);
    command.args(["work", "--queue", "q"]).args(more).args(["--", "sh", "-c", script]);
    command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

fn signal(child: &Child, signal: Signal) {
    let pid = i32::try_from(child.id()).ok().and_then(rustix::process::Pid::from_raw);
    rustix::process::kill_process(pid.unwrap(), signal).unwrap();
}

#[test]
fn files_in_results_out() {
    let folder = Folder::new();
    let server = Server::start(&folder, &[]);
    let (texts, out) = (folder.path().join("in"), folder.path().join("out"));
    std::fs::create_dir_all(&texts).unwrap();
    let names: Vec<String> = (0..250).map(|n| format!("{n}.txt")).collect();
    for name in &names {
        std::fs::write(texts.join(name), format!("text of {name}")).unwrap();
    }
    let paths = || names.iter().map(|n| texts.join(n));
    let mut work = worker(&server, &["--concurrency", "8"], "tr a-z A-Z");
    let submit = |json: &str| {
        leasehold(&server)
            .args(["submit", "--queue", "q", "--key-prefix", "p", "--wait", "--results"])
            .arg(&out)
            .args([json])
            .args(paths())
            .output()
            .unwrap()
    };
    let first = submit("--json");
    assert!(first.status.success(), "{}", String::from_utf8_lossy(&first.stderr));
    assert_eq!(String::from_utf8_lossy(&first.stdout).lines().count(), 250);
    for name in &names {
        let result = std::fs::read_to_string(out.join(format!("{name}.out"))).unwrap();
        assert_eq!(result, format!("TEXT OF {}", name.to_uppercase()));
    }
    // A second run submits nothing new.
    assert!(submit("--json").status.success());
    let queue = server.client().get("/v1/queues/q").json();
    assert_eq!(queue["counts"]["succeeded"], 250);
    signal(&work, Signal::TERM);
    assert!(wait(&mut work, Duration::from_secs(5)).success());
}

#[test]
fn lines_failures_and_an_idle_end() {
    let folder = Folder::new();
    let server = Server::start(&folder, &[]);
    let mut lines = leasehold(&server);
    lines.args(["submit", "--queue", "q", "--max-attempts", "1", "-"]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut lines = lines.spawn().unwrap();
    std::io::Write::write_all(&mut lines.stdin.take().unwrap(), b"plain\n{\"a\": 1}\nbad\n").unwrap();
    let ids = String::from_utf8(lines.wait_with_output().unwrap().stdout).unwrap();
    let ids: Vec<&str> = ids.lines().map(|l| l.split('\t').next().unwrap()).collect();
    assert_eq!(ids.len(), 3);
    let script =
        "read x; echo \"$LEASEHOLD_QUEUE $LEASEHOLD_ATTEMPT $x\"; [ \"$x\" != bad ] || { echo 'no good' >&2; exit 3; }";
    let mut work = worker(&server, &["--exit-when-idle"], script);
    assert!(wait(&mut work, Duration::from_secs(20)).success());
    let mut c = server.client();
    assert_eq!(c.get(&format!("/v1/jobs/{}/result", ids[0])).body, b"q 1 plain\n");
    assert_eq!(c.get(&format!("/v1/jobs/{}/result", ids[1])).body, b"q 1 {\"a\": 1}\n");
    let dead = c.get(&format!("/v1/jobs/{}", ids[2])).json();
    assert_eq!(dead["status"], "dead");
    assert_eq!(dead["attempts"][0]["error"]["message"], "no good");
    assert_eq!(dead["attempts"][0]["error"]["type"], "exit_3");
    // The lookers.
    let status = leasehold(&server).args(["status", ids[0]]).output().unwrap();
    assert!(String::from_utf8_lossy(&status.stdout).contains("succeeded"));
    let unknown = leasehold(&server).args(["status", "nonsense"]).output().unwrap();
    assert_eq!(unknown.status.code(), Some(1));
    let queues = leasehold(&server).arg("queues").output().unwrap();
    assert!(String::from_utf8_lossy(&queues.stdout).lines().any(|l| l.starts_with("q ")));
    let events = leasehold(&server).args(["events", "--json"]).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&events.stdout).matches("job.submitted").count(), 3);
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
    until("the command runs", Duration::from_secs(5), || started.exists());
    server.kill();
    std::fs::write(&go, "").unwrap();
    std::thread::sleep(Duration::from_secs(2));
    let server = Server::at(address, &folder, &[]);
    let mut c = server.client();
    until("the result is there", Duration::from_secs(15), || status(&mut c, &id) == "succeeded");
    assert_eq!(c.get(&format!("/v1/jobs/{id}/result")).body, b"done\n");
    assert_eq!(c.get(&format!("/v1/jobs/{id}")).json()["deliveries"], 1, "it ran once");
    signal(&work, Signal::INT);
    assert!(wait(&mut work, Duration::from_secs(5)).success());
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
    until("the command runs", Duration::from_secs(5), || started.exists());
    assert!(leasehold(&server).args(["cancel", &id]).output().unwrap().status.success());
    until("the command is ended", Duration::from_secs(5), || ended.exists());
    assert_eq!(status(&mut c, &id), "cancelled");
    signal(&work, Signal::TERM);
    assert!(wait(&mut work, Duration::from_secs(5)).success());
}

#[test]
fn told_to_end_a_worker_finishes_and_told_twice_it_gives_back() {
    let folder = Folder::new();
    let server = Server::start(&folder, &[]);
    let mut c = server.client();
    let started = folder.path().join("started");
    let script = format!("touch {}; sleep 1; echo ok", started.display());
    let id = submit(&mut c, r#"{"queue":"q","payload":"x"}"#);
    let mut work = worker(&server, &[], &script);
    until("the command runs", Duration::from_secs(5), || started.exists());
    let next = submit(&mut c, r#"{"queue":"q","payload":"y"}"#);
    signal(&work, Signal::TERM);
    assert!(wait(&mut work, Duration::from_secs(5)).success());
    assert_eq!((status(&mut c, &id), status(&mut c, &next)), ("succeeded".into(), "queued".into()));

    std::fs::remove_file(&started).unwrap();
    let script = format!("touch {}; sleep 60", started.display());
    let mut work = worker(&server, &[], &script);
    until("the command runs", Duration::from_secs(5), || started.exists());
    signal(&work, Signal::TERM);
    std::thread::sleep(Duration::from_millis(200));
    signal(&work, Signal::TERM);
    wait(&mut work, Duration::from_secs(8));
    let job = c.get(&format!("/v1/jobs/{next}")).json();
    assert_eq!((job["status"].as_str(), job["attempt"].as_u64()), (Some("queued"), Some(0)), "{job}");
}

#[test]
fn what_cannot_work_says_so() {
    let folder = Folder::new();
    let server = Server::start(&folder, &[]);
    let mut c = server.client();
    let id = submit(&mut c, r#"{"queue":"q","payload":"x"}"#);
    let output = leasehold(&server).args(["work", "--queue", "q", "--", "/no/such/command"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("/no/such/command"));
    assert_eq!(status(&mut c, &id), "queued", "it was given back");
    let bad = Command::new(BINARY).args(["--listen", "0.0.0.0:0"]).output().unwrap();
    assert_eq!(bad.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&bad.stderr).contains("--insecure-listen"));
    let bad = Command::new(BINARY).args(["config"]).env("LEASEHOLD_COLOUR", "x").output().unwrap();
    assert!(String::from_utf8_lossy(&bad.stderr).contains("LEASEHOLD_COLOUR"));
    let good = Command::new(BINARY).args(["config", "--grace", "3s"]).output().unwrap();
    assert!(String::from_utf8_lossy(&good.stdout).contains("grace = \"3000ms\""));
}
