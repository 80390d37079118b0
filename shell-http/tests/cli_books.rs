//! Goal: an operator can check a store's books and see what it holds, of a server that runs and of a
//! store that does not, without changing anything unless told to. Real servers and real folders,
//! damaged through the store's own port.

#![allow(clippy::unwrap_used, clippy::panic)]

mod support;

use std::path::Path;
use std::process::Output;
use std::time::{Duration, Instant};

use leasehold_core::job::record::{Class, Status};
use leasehold_core::store::{Commit, Txn, Write, keys};
use leasehold_core::{JobId, StoreOp};
use leasehold_disk::{DiskStore, Options};
use rustix::process::Signal;
use support::cli::{bare, err, lines, out, run};
use support::{Folder, Server, claim, submit};

/// A command on a store that no server has.
fn stopped(store: &Path, args: &[&str]) -> Output {
    bare().args(args).args(["--store", &format!("disk:{}", store.display())]).output().unwrap()
}

fn end(mut server: Server) {
    server.signal(Signal::TERM);
    assert!(server.wait(Duration::from_secs(20)).success());
}

#[test]
fn a_live_store_balances_and_can_be_looked_into() {
    let folder = Folder::new();
    let server = Server::start(&folder, &[]);
    let mut c = server.client();
    let id = submit(&mut c, r#"{"queue":"docs","payload":"secret","idempotency_key":"k/1"}"#);
    claim(&mut c, "docs");
    let audit = run(&server, &["audit"]);
    assert!(audit.status.success(), "{}{}", out(&audit), err(&audit));
    assert!(out(&audit).contains("of 1 jobs") && out(&audit).contains("the books balance"), "{}", out(&audit));
    let summary = lines(&run(&server, &["audit", "--json"])).pop().unwrap();
    assert_eq!((summary["balances"].as_bool(), summary["jobs"].as_u64()), (Some(true), Some(1)), "{summary}");

    let job = out(&run(&server, &["inspect", "job", &id]));
    for part in [format!("job/{id}"), format!("lease/{id}"), format!("payload/{id}"), "leases".into()] {
        assert!(job.contains(&part), "{part}: {job}");
    }
    assert!(job.contains("key/default/k%2F1") && job.contains("worker: \"w\""), "{job}");
    assert!(!job.contains("secret"), "payloads are not shown: {job}");
    let json = &lines(&run(&server, &["inspect", "job", &id, "--json"]))[0];
    assert!(json["records"].as_array().unwrap().iter().any(|r| r["key"] == format!("job/{id}")));
    let queue = out(&run(&server, &["inspect", "queue", "docs"]));
    assert!(queue.contains("st/default/docs/system/running  1 members"), "{queue}");
    assert!(out(&run(&server, &["inspect", "key", "k/1"])).contains(&id));
    assert!(out(&run(&server, &["inspect", "names"])).contains("docs"));
    assert!(out(&run(&server, &["inspect", "quarantine"])).contains("nothing is in quarantine"));

    let code = |args: &[&str]| run(&server, args).status.code();
    assert_eq!(code(&["inspect", "queue", "unknown"]), Some(1));
    assert_eq!(code(&["inspect", "key", "unknown"]), Some(1));
    assert_eq!(code(&["inspect", "job", "nonsense"]), Some(2));
    assert_eq!(code(&["inspect", "job"]), Some(2));
    assert_eq!(code(&["inspect", "names", "x"]), Some(2));
    let said = err(&run(&server, &["inspect", "job", "nope"]));
    assert!(said.contains("`nope`") && said.contains("26") && said.lines().count() == 1, "{said}");
    for (what, status, problem) in [
        (["inspect", "queue", "unknown"], Some(1), "unknown_queue"),
        (["inspect", "key", "unknown"], Some(1), "unknown_key"),
        (["inspect", "job", "01J8ZQ3V9K007Q4M2X5N6P7R8S"], Some(1), "unknown_job"),
        (["inspect", "job", "nope"], Some(2), "wrong_usage"),
    ] {
        let output = run(&server, &[&what[..], &["--json"]].concat());
        let said = lines(&output);
        assert_eq!((output.status.code(), said.len(), &said[0]["problem"]["code"]), (status, 1, &problem.into()));
        assert!(!err(&output).is_empty(), "people are told as well");
    }
    let store = folder.path().join("store");
    let held = stopped(&store, &["audit"]);
    assert_eq!(held.status.code(), Some(1));
    assert!(err(&held).contains("in use") && err(&held).contains("--server"), "{}", err(&held));
}

#[test]
fn a_server_that_is_not_there_is_soon_given_up() {
    // A port that was free just now.
    let address = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let begun = Instant::now();
    let output = bare().args(["audit", "--json", "--server", &format!("http://{address}")]).output().unwrap();
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    assert_eq!(output.status.code(), Some(3));
    let said = err(&output);
    assert!(said.contains(&address.to_string()) && said.contains("tried "), "{said}");
    assert_eq!(lines(&output)[0]["problem"]["code"], "unreachable");
    let nowhere = bare().args(["audit", "--json", "--store", "disk:/nowhere/at/all"]).output().unwrap();
    assert_eq!((nowhere.status.code(), &lines(&nowhere)[0]["problem"]["code"]), (Some(1), &"failed".into()));
}

#[test]
fn a_stopped_store_is_looked_into_and_not_changed() {
    let folder = Folder::new();
    let mut server = Server::start(&folder, &[]);
    let mut c = server.client();
    submit(&mut c, r#"{"queue":"q","payload":1}"#);
    let answer = c.post("/v1/claims", r#"{"worker":"w","queues":["q"],"lease_ms":4000}"#).json();
    let leased = answer["jobs"][0]["id"].as_str().unwrap().to_owned();
    let due = submit(&mut c, r#"{"queue":"q","payload":1,"delay_ms":4000}"#);
    // In order it would wait for the job.
    server.kill();
    let store = folder.path().join("store");
    std::thread::sleep(Duration::from_millis(4_100));
    // Both are overdue by now, and a server would act on it.
    for _ in 0..2 {
        let audit = stopped(&store, &["audit", "--json"]);
        assert!(audit.status.success(), "{}{}", out(&audit), err(&audit));
        let found = lines(&audit).pop().unwrap();
        assert_eq!((found["jobs"].as_u64(), found["findings"].as_u64()), (Some(2), Some(0)), "{found}");
        let job = out(&stopped(&store, &["inspect", "job", &leased]));
        assert!(job.contains(&format!("lease/{leased}")) && job.contains("/running"), "{job}");
        let job = out(&stopped(&store, &["inspect", "job", &due]));
        assert!(job.contains("/scheduled") && !job.contains("/queued"), "{job}");
    }
    assert!(out(&stopped(&store, &["inspect", "names"])).contains("q "));
    let nowhere = folder.path().join("nowhere");
    let output = stopped(&nowhere, &["audit"]);
    assert_eq!((output.status.code(), nowhere.exists()), (Some(1), false), "no store is made: {}", err(&output));
    for store in ["mem:", "redis://127.0.0.1:1/0", "nonsense"] {
        assert_eq!(bare().args(["audit", "--store", store]).output().unwrap().status.code(), Some(2), "{store}");
    }
    // The server finds everything as it left it.
    let server = Server::start(&folder, &[]);
    assert!(run(&server, &["audit"]).status.success());
}

#[test]
fn what_does_not_balance_is_found_and_repaired() {
    let folder = Folder::new();
    let server = Server::start(&folder, &[]);
    let id = submit(&mut server.client(), r#"{"queue":"q","payload":1}"#);
    let other = submit(&mut server.client(), r#"{"queue":"q","payload":1}"#);
    end(server);
    let path = folder.path().join("store");
    let job: JobId = id.parse().unwrap();
    let index = keys::status("default", "q", Class::System, Status::Queued);
    let txn = Txn {
        valid_until: u64::MAX >> 11,
        guards: Vec::new(),
        take: None,
        writes: vec![Write::Remove { index, member: keys::member(job) }],
    };
    let mut store = DiskStore::open(&path, Options::default()).unwrap();
    let commit = StoreOp::Commit(Commit { txns: vec![txn.into()], grows: false });
    store.process(vec![((), commit)], |(), reply| assert!(reply.is_ok(), "{reply:?}"));
    store.close();
    drop(store);

    let found = stopped(&path, &["audit", "--json"]);
    assert_eq!(found.status.code(), Some(1), "{}", err(&found));
    let said = lines(&found);
    let (summary, findings) = said.split_last().unwrap();
    assert!(findings.iter().any(|f| f["subject"] == id.as_str() && f["repaired"] == false), "{findings:?}");
    assert!(findings.iter().all(|f| f["subject"] != other.as_str()), "{findings:?}");
    assert_eq!(
        (summary["balances"].as_bool(), summary["findings"].as_u64()),
        (Some(false), Some(findings.len() as u64))
    );
    let plain = stopped(&path, &["audit"]);
    assert!(out(&plain).contains(&id) && out(&plain).contains("do not balance"), "{}", out(&plain));
    assert_eq!(stopped(&path, &["audit"]).status.code(), Some(1), "looking mends nothing");

    let repaired = stopped(&path, &["audit", "--repair"]);
    assert!(repaired.status.success(), "{}{}", out(&repaired), err(&repaired));
    assert!(
        out(&repaired).contains("(repaired)") && out(&repaired).contains("the books balance"),
        "{}",
        out(&repaired)
    );
    assert!(stopped(&path, &["audit"]).status.success());
    let server = Server::start(&folder, &[]);
    assert!(out(&run(&server, &["status", &id])).contains("queued"));
}
