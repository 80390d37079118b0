//! Goal: a server that is told to end finishes what is in work, refuses nothing that it has begun,
//! loses nothing, and ends with status 0. Real processes and signals.

#![allow(clippy::unwrap_used, clippy::panic)]

mod support;

use std::io::Write as _;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use support::{Client, Folder, Server, claim, raw, read_answer, read_line, status, submit, until};

#[test]
fn while_it_goes_away_it_finishes_what_it_has_begun() {
    let folder = Folder::new();
    let mut server = Server::start(&folder, &["--grace", "60s"]);
    let mut worker = server.client();
    let id = submit(&mut worker, r#"{"queue":"q","payload":1}"#);
    let (_, token) = claim(&mut worker, "q");
    let mut idle: Vec<Client> = (0..4).map(|_| server.client()).collect();
    for client in &mut idle {
        assert_eq!(client.get("/healthz").status, 200);
    }
    let address = server.address;
    let polls: Vec<_> = (0..4)
        .map(|_| {
            std::thread::spawn(move || {
                Client::new(address).post("/v1/claims", r#"{"worker":"w","queues":["empty"],"wait_ms":60000}"#)
            })
        })
        .collect();
    let waiting = || server.client().get("/metrics").text().contains("leasehold_polls 4");
    until("four polls wait", Duration::from_secs(10), waiting);
    let begun = Instant::now();
    server.signal(Signal::TERM);
    for poll in polls {
        let answer = poll.join().unwrap();
        assert_eq!((answer.status, answer.code()), (503, "draining".into()));
        assert!(answer.header("retry-after").is_some());
    }
    assert!(begun.elapsed() < Duration::from_secs(30), "they did not wait for their time");

    // Over a connection that was idle before, over its successor, and over a new one.
    let claim = r#"{"worker":"w","queues":["q"]}"#;
    for client in [&mut idle[0], &mut server.client()] {
        let refused = client.post("/v1/claims", claim);
        assert_eq!((refused.status, refused.code()), (503, "draining".into()));
        assert_eq!(refused.header("connection"), Some("close"), "the client, not the server, ends a connection");
    }
    let later = submit(&mut idle[1], r#"{"queue":"later","payload":1}"#);
    let ready = idle[2].get("/readyz");
    assert_eq!((ready.status, ready.code()), (503, "draining".into()));
    assert_eq!(server.client().get("/healthz").status, 200);
    let beat = worker.post(&format!("/v1/jobs/{id}/heartbeat"), format!(r#"{{"token":"{token}"}}"#));
    assert_eq!(beat.status, 200, "{}", beat.json());
    let done = idle[3].post(&format!("/v1/jobs/{id}/complete"), format!(r#"{{"token":"{token}","result":1}}"#));
    assert_eq!(done.status, 200, "{}", done.json());

    // Nothing runs any more: it does not wait for the rest of the grace.
    assert!(server.wait(Duration::from_secs(30)).success());
    let server = Server::at(address, &folder, &[]);
    assert_eq!(status(&mut server.client(), &id), "succeeded");
    assert_eq!(status(&mut server.client(), &later), "queued");
}

#[test]
fn what_still_runs_at_the_end_of_the_grace_goes_on_after_the_restart() {
    let folder = Folder::new();
    let mut server = Server::start(&folder, &["--grace", "2s"]);
    let mut c = server.client();
    let id = submit(&mut c, r#"{"queue":"q","payload":1}"#);
    let (_, token) = claim(&mut c, "q");
    let begun = Instant::now();
    server.signal(Signal::TERM);
    assert!(server.wait(Duration::from_secs(30)).success());
    assert!(begun.elapsed() >= Duration::from_millis(900), "it waits for what runs");
    let server = Server::at(server.address, &folder, &[]);
    let mut c = server.client();
    let done = c.post(&format!("/v1/jobs/{id}/complete"), format!(r#"{{"token":"{token}","result":1}}"#));
    assert_eq!(done.status, 200, "{}", done.json());
    assert_eq!(status(&mut c, &id), "succeeded");
}

#[test]
fn whoever_only_looks_on_is_let_go_at_once() {
    let folder = Folder::new();
    let mut server = Server::start(&folder, &["--grace", "60s"]);
    let mut c = server.client();
    let id = submit(&mut c, r#"{"queue":"q","payload":1}"#);
    let (_, token) = claim(&mut c, "q");
    let group = c.post("/v1/groups", r#"{"queue":"g","children":[{"payload":1}]}"#).json()["id"].clone();
    let waits = [format!("/v1/groups/{}?wait_ms=60000", group.as_str().unwrap()), "/v1/events?wait_ms=60000".into()];
    let mut streams: Vec<_> = (0..4).map(|_| raw(server.address)).collect();
    for stream in &mut streams {
        stream.get_mut().write_all(b"GET /v1/events HTTP/1.1\r\nhost: x\r\naccept: text/event-stream\r\n\r\n").unwrap();
        assert_eq!(read_answer(stream).unwrap().status, 200);
    }
    let begun = Instant::now();
    server.signal(Signal::TERM);
    for stream in &mut streams {
        let mut last = false;
        // A whole answer, and not one that breaks off: the last piece is empty.
        while !last {
            last = read_line(stream).unwrap() == "0";
        }
    }
    // The job that runs keeps the server; whoever comes now is not kept waiting with it.
    let polls = |path: &String| server.client().get(path);
    assert_eq!(polls(&format!("{}0", waits[0].trim_end_matches("60000"))).status, 200, "it is told what there is");
    for path in &waits {
        let refused = polls(&if path.contains("events") { format!("{path}&after=9999999-1") } else { path.clone() });
        assert_eq!((refused.status, refused.code()), (503, "draining".into()), "{path}");
    }
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    let done = c.post(&format!("/v1/jobs/{id}/complete"), format!(r#"{{"token":"{token}"}}"#));
    assert_eq!(done.status, 200, "{}", done.json());
    assert!(server.wait(Duration::from_secs(30)).success());
}

#[test]
fn told_twice_it_ends_at_once() {
    let folder = Folder::new();
    let mut server = Server::start(&folder, &["--grace", "60s"]);
    let mut c = server.client();
    let id = submit(&mut c, r#"{"queue":"q","payload":1}"#);
    // Half a request keeps its connection busy.
    let mut slow = std::net::TcpStream::connect(server.address).unwrap();
    std::io::Write::write_all(&mut slow, b"POST /v1/jobs HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{").unwrap();
    std::thread::sleep(Duration::from_millis(300));
    server.signal(Signal::TERM);
    std::thread::sleep(Duration::from_millis(300));
    server.signal(Signal::INT);
    let status_code = server.wait(Duration::from_secs(2));
    assert_eq!(status_code.code(), Some(1));
    let server = Server::start(&folder, &[]);
    assert_eq!(status(&mut server.client(), &id), "queued");
}

#[test]
fn the_time_of_grace_is_kept() {
    let folder = Folder::new();
    let mut server = Server::start(&folder, &["--grace", "1s"]);
    let mut slow = std::net::TcpStream::connect(server.address).unwrap();
    std::io::Write::write_all(&mut slow, b"POST /v1/jobs HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{").unwrap();
    std::thread::sleep(Duration::from_millis(300));
    server.signal(Signal::INT);
    let begun = Instant::now();
    assert!(server.wait(Duration::from_secs(10)).success());
    assert!(begun.elapsed() >= Duration::from_millis(1_000), "the whole of it: {:?}", begun.elapsed());
}

#[test]
fn one_folder_one_server() {
    let folder = Folder::new();
    let _server = Server::start(&folder, &[]);
    let store = format!("disk:{}", folder.path().join("store").display());
    let second = std::process::Command::new(support::BINARY)
        .args(["--listen", "127.0.0.1:0", "--store", &store])
        .output()
        .unwrap();
    assert_eq!(second.status.code(), Some(1));
    let said = String::from_utf8_lossy(&second.stderr);
    assert!(said.contains("store"), "{said}");
}
