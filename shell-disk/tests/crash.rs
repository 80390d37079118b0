//! `kill -9` at any instant: a child process commits numbered records in groups, and says which were
//! acknowledged. It is killed at a random moment; whatever was acknowledged must be there, and each
//! transaction whole or not at all.

use std::io::{BufRead, BufReader, Write as _};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use leasehold_core::store::conformance::random::Rng;
use leasehold_core::store::{
    Commit, Expiry, Guard, Read, Record, SCORE_MAX, ScoreAt, Store, Txn, Value, Version, Write,
};
use leasehold_core::{Name, StoreAnswer, StoreId, StoreOp};
use leasehold_disk::{DiskStore, Event, Options, spawn};

const CHILD: &str = "LEASEHOLD_TEST_CRASH";

fn key(n: u64) -> Name {
    Name::from(format!("k/{n:08}"))
}

/// Two records and a member that belong together. The second record is sometimes large.
fn txn(n: u64) -> Commit {
    let put = |key: Name, len: usize| Write::Put {
        key,
        version: Version(n + 1),
        value: Value::Bytes(vec![n as u8; len].into()),
        expiry: Expiry::Never,
    };
    let large = if n.is_multiple_of(50) { 100_000 } else { 100 };
    let txn = Txn {
        valid_until: SCORE_MAX,
        guards: vec![Guard::Absent(key(n))],
        take: None,
        writes: vec![
            put(key(n), 10),
            put(Name::from("p/").join(&key(n)), large),
            Write::Add { index: Name::from("i"), member: key(n), score: ScoreAt::Number(n), raise: false },
            Write::Append { log: Name::from("l"), bytes: n.to_be_bytes().to_vec().into() },
        ],
    };
    Commit { txns: vec![Arc::new(txn)], grows: false }
}

/// Not a test by itself: what the child does until it is killed.
#[test]
fn child_commits() {
    let Ok(path) = std::env::var(CHILD) else { return };
    let from: u64 = std::env::var("FROM").expect("set").parse().expect("a number");
    let store = DiskStore::open(path, Options::default()).expect("it opens");
    let (acks, acked) = std::sync::mpsc::channel();
    let handle = spawn(store, move |events| {
        let mut out = std::io::stdout().lock();
        for event in events {
            if let Event::Reply { id, reply: Ok(StoreAnswer::Commit(_)) } = event {
                writeln!(out, "acked {}", id.0).expect("the parent listens");
                acks.send(()).expect("sent");
            }
        }
        out.flush().expect("the parent listens");
    });
    for n in from.. {
        handle.send(StoreId(n), StoreOp::Commit(txn(n)));
        // Some hundred under way.
        if n >= from + 300 && acked.recv().is_err() {
            return;
        }
    }
}

#[test]
fn what_was_acknowledged_survives_kill_9() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut rng = Rng(std::process::id().into());
    let mut next = 0;
    let mut acked_before = 0;
    for round in 0..8 {
        let mut child = Command::new(std::env::current_exe().expect("this test"))
            .args(["child_commits", "--exact", "--nocapture"])
            .env(CHILD, folder.path())
            .env("FROM", next.to_string())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("it runs");
        let lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        let reader = std::thread::spawn(move || {
            // A line that was cut short by the kill is no acknowledgement.
            lines
                .map_while(Result::ok)
                .filter_map(|l| l.strip_prefix("acked ")?.parse::<u64>().ok())
                .collect::<Vec<_>>()
        });
        std::thread::sleep(Duration::from_millis(60 + rng.below(400)));
        child.kill().expect("killed");
        child.wait().expect("ended");
        let mut acked = reader.join().expect("read");
        acked.pop();
        let mut store = DiskStore::open(folder.path(), Options::default()).expect("it opens after kill -9");
        let acked_now = acked.last().map_or(acked_before, |n| n + 1);
        // Beyond what was acknowledged anything may be there, but whole.
        let mut n = 0;
        let mut there = 0;
        while n < acked_now + 5_000 {
            let keys: Vec<u64> = (n..n + 500).collect();
            let records = keys.iter().flat_map(|n| [key(*n), Name::from("p/").join(&key(*n))]).collect();
            let members = keys.iter().map(|n| (Name::from("i"), key(*n))).collect();
            let found =
                store.read(&Read { records, members, max_bytes: usize::MAX, ..Read::default() }).expect("it reads");
            for (at, n) in keys.iter().enumerate() {
                let (a, b) = (&found.records[2 * at], &found.records[2 * at + 1]);
                let whole = [a.version(), b.version(), found.members[at].map(|p| Version(p.score + 1))];
                if a.is_absent() {
                    assert_eq!(whole, [None; 3], "half of {n}");
                    assert!(*n >= acked_now, "{n} was acknowledged (round {round})");
                } else {
                    assert_eq!(whole, [Some(Version(n + 1)); 3], "half of {n}");
                    let Record::Present { bytes: Some(bytes), .. } = b else { continue };
                    assert!(bytes.iter().all(|b| *b == *n as u8), "{n} holds its bytes");
                    there = there.max(n + 1);
                }
            }
            n += 500;
        }
        next = there;
        acked_before = acked_now;
    }
    assert!(next > 100, "the children got something done ({next})");
}
