//! Goal: a server that is told to end finishes what is in work, refuses nothing that it has begun,
//! loses nothing, and ends with status 0. Real processes and signals.

#![allow(clippy::unwrap_used, clippy::panic)]

mod support;

use std::time::{Duration, Instant};

use rustix::process::Signal;
use support::{Client, Folder, Server, claim, status, submit};

#[test]
fn told_to_end_it_answers_polls_and_ends() {
    let folder = Folder::new();
    let mut server = Server::start(&folder, &[]);
    let mut c = server.client();
    let id = submit(&mut c, r#"{"queue":"q","payload":1}"#);
    let (_, token) = claim(&mut c, "q");
    let address = server.address;
    let polls: Vec<_> = (0..4)
        .map(|_| {
            std::thread::spawn(move || {
                Client::new(address).post("/v1/claims", r#"{"worker":"w","queues":["empty"],"wait_ms":60000}"#)
            })
        })
        .collect();
    std::thread::sleep(Duration::from_millis(500));
    let begun = Instant::now();
    server.signal(Signal::TERM);
    for poll in polls {
        let answer = poll.join().unwrap();
        assert!(matches!(answer.status, 200 | 503), "{}", answer.status);
        if answer.status == 503 {
            assert_eq!(answer.code(), "draining");
            assert!(answer.header("retry-after").is_some());
        }
    }
    assert!(server.wait(Duration::from_secs(5)).success());
    assert!(begun.elapsed() < Duration::from_secs(5));

    // The lease outlives the server, and the worker's completion is taken by the next one.
    let server = Server::at(address, &folder, &[]);
    let mut c = server.client();
    let done = c.post(&format!("/v1/jobs/{id}/complete"), format!(r#"{{"token":"{token}","result":1}}"#));
    assert_eq!(done.status, 200, "{}", done.json());
    assert_eq!(status(&mut c, &id), "succeeded");
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
    assert!(server.wait(Duration::from_secs(5)).success());
    assert!(begun.elapsed() >= Duration::from_millis(900));
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
