//! Goal: what a server records while it works is enough to have its core do the same again, output by output, and has
//! none of the contents in it. Method: two servers on one Redis under load, one of them killed; a server that is
//! told to end, one whose recordings are many times the limit.

#![allow(clippy::panic, clippy::unwrap_used, reason = "a test says what is wrong by panicking")]

#[path = "../../shell-redis/tests/support/mod.rs"]
mod redis_server;
mod support;

use std::ops::Range;
use std::path::Path;
use std::time::Duration;

use leasehold_core::recording::Player;
use redis_server::Server as Redis;
use serde_json::json;
use support::{Client, Folder, Server, claim};

const PATIENCE: Duration = Duration::from_secs(20);

/// What a server left, the oldest first.
fn recordings(server: &Server, folder: &Path) -> Vec<Vec<u8>> {
    let own = format!("-{}.", server.pid());
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<_> = files.filter(|p| p.to_str().unwrap().contains(&own)).collect();
    files.sort();
    files.iter().map(|path| std::fs::read(path).unwrap()).collect()
}

/// Replays it, and returns the numbers of its steps.
fn replayed(recording: &[u8]) -> Range<u64> {
    let player = Player::new(recording).unwrap();
    let mut steps = player.header.first..player.header.first;
    for played in player {
        assert_eq!(played.same, Ok(()), "{played:?}");
        assert_eq!(played.number, steps.end);
        steps.end += 1;
    }
    steps
}

fn has(recording: &[u8], text: &str) -> bool {
    recording.windows(text.len()).any(|w| w == text.as_bytes())
}

/// Jobs from submit to each of their ends, with contents by which they would be known.
fn work(client: &mut Client, rounds: usize) {
    for n in 0..rounds {
        let body = json!({"queue": "q", "payload": {"secret": "contents-4711"}, "metadata": {"m": "contents-4711"},
            "idempotency_key": format!("key {n}"), "max_attempts": 2});
        // Some of these keys others have used before.
        assert!(matches!(client.post("/v1/jobs", body.to_string()).status, 200 | 201));
        let list: Vec<_> = (0..20).map(|i| json!({"queue": "q", "payload": format!("contents-4711 {i}")})).collect();
        assert_eq!(client.post("/v1/jobs:batch", json!({"jobs": list}).to_string()).status, 200);
        let (id, token) = claim(client, "q");
        let at = format!("/v1/jobs/{id}");
        let told = json!({"token": token, "progress": {"at": "contents-4711"}});
        assert_eq!(client.post(&format!("{at}/heartbeat"), told.to_string()).status, 200);
        let end = match n % 3 {
            0 => ("complete", json!({"token": token, "result": "contents-4711"})),
            1 => ("fail", json!({"token": token, "error": {"message": "contents-4711 \u{e9}"}, "retry_in_ms": 1})),
            _ => ("release", json!({"token": token})),
        };
        assert_eq!(client.post(&format!("{at}/{}", end.0), end.1.to_string()).status, 200, "{}", end.0);
        for path in ["", "/result", "/payload", "/why"] {
            client.get(&format!("{at}{path}"));
        }
        client.get("/v1/jobs?queue=q");
    }
}

#[test]
fn what_two_servers_recorded_on_one_redis_is_replayed_also_that_of_the_killed_one() {
    let redis = Redis::start("redis-7.0", &[]);
    let folder = Folder::new();
    let flags = ["--record", folder.path().to_str().unwrap(), "--lease", "1s"];
    let start = || Server::on("127.0.0.1:0".parse().unwrap(), &redis.url(), &flags);
    let (mut first, mut second) = (start(), start());
    std::thread::scope(|scope| {
        for server in [&first, &second] {
            for _ in 0..3 {
                scope.spawn(|| work(&mut server.client(), 12));
            }
        }
    });
    first.kill();
    // What the killed one had handed out comes back to the other.
    std::thread::sleep(Duration::from_millis(1_500));
    work(&mut second.client(), 6);
    second.signal(rustix::process::Signal::TERM);
    assert!(second.wait(PATIENCE).success());
    for server in [&first, &second] {
        let recording = recordings(server, folder.path()).concat();
        let steps = replayed(&recording).end;
        println!("{steps} steps, {} bytes", recording.len());
        assert!(steps > 500, "{steps}");
        assert!(has(&recording, "key 3") && !has(&recording, "contents-47"), "names are in it, contents are not");
    }
}

#[test]
fn what_is_recorded_is_the_last_that_has_room_whichever_process_made_it() {
    const LIMIT: usize = 400 * 1_024;
    let folder = Folder::new();
    let tapes = folder.path().join("tapes");
    let flags = ["--record", tapes.to_str().unwrap(), "--record-limit", "400KiB"];
    let mut earlier = Server::start(&folder, &flags);
    work(&mut earlier.client(), 3);
    earlier.kill();
    assert!(!recordings(&earlier, &tapes).is_empty());
    let mut server = Server::start(&folder, &flags);
    work(&mut server.client(), 60);
    server.signal(rustix::process::Signal::TERM);
    assert!(server.wait(PATIENCE).success());

    assert_eq!(recordings(&earlier, &tapes).len(), 0, "what is older goes first");
    let parts = recordings(&server, &tapes);
    assert!((5..=8).contains(&parts.len()), "{}", parts.len());
    let bytes: usize = parts.iter().map(Vec::len).sum();
    assert!((LIMIT * 3 / 4..LIMIT * 9 / 8).contains(&bytes), "{bytes}");
    // Each alone, and nothing between them is missing.
    let steps: Vec<_> = parts.iter().map(|part| replayed(part)).collect();
    println!("{steps:?}, {bytes} bytes");
    assert!(steps.windows(2).all(|two| two[0].end == two[1].start), "{steps:?}");
    assert!(steps[0].start > 500, "the beginning has gone: {steps:?}");
}

#[test]
fn a_limit_that_has_no_room_for_a_state_ends_the_recording_and_the_server_goes_on() {
    let folder = Folder::new();
    let tapes = folder.path().join("tapes");
    let server = Server::start(&folder, &["--record", tapes.to_str().unwrap(), "--record-limit", "1KiB"]);
    work(&mut server.client(), 3);
    assert!(recordings(&server, &tapes).concat().len() < 4_096);
    assert_eq!(server.client().get("/readyz").status, 200);
}
