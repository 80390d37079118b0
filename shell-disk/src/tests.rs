//! What needs a look, or a fault, inside the store.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use leasehold_core::store::{
    Commit, Expiry, Guard, LogRead, Read, SCORE_MAX, ScoreAt, Store, StoreError, Txn, Value, Version, Write,
};
use leasehold_core::{Name, StoreAnswer, StoreId, StoreOp};

use crate::{DiskStore, Event, Options, spawn};

fn put(key: &str, len: usize, expiry: Expiry) -> Write {
    let value = Value::Bytes(vec![7; len].into());
    Write::Put { key: Name::from(key), version: Version(1), value, expiry }
}

fn commit(writes: Vec<Write>) -> Commit {
    let txn = Txn { valid_until: SCORE_MAX, guards: Vec::new(), take: None, writes };
    Commit { txns: vec![Arc::new(txn)], grows: false }
}

fn ask(key: &str) -> Read {
    Read { records: vec![Name::from(key)], ..Read::default() }
}

fn options(clock: &Arc<AtomicU64>) -> Options {
    let clock = clock.clone();
    let now: Arc<dyn Fn() -> u64 + Send + Sync> = Arc::new(move || clock.load(Ordering::SeqCst));
    Options { clock: Some(now), reserve_bytes: Some(0), ..Options::default() }
}

#[test]
fn a_failed_sync_is_unknown_and_then_nothing_works_until_reopened() {
    let folder = tempfile::tempdir().unwrap();
    let mut store = DiskStore::open(folder.path(), Options::default()).unwrap();
    store.commit(&commit(vec![put("before", 1, Expiry::Never)])).unwrap();
    store.fail_sync();
    let ops = vec![
        ("early", StoreOp::Read(ask("x"))),
        ("commit", StoreOp::Commit(commit(vec![put("x", 1, Expiry::Never), Write::Notify(Name::from("t"))]))),
        ("late", StoreOp::Read(ask("x"))),
    ];
    let mut replies = Vec::new();
    store.process(ops, |tag, reply| replies.push((tag, reply.map(|_| ()))));
    assert_eq!(
        replies,
        [("early", Ok(())), ("commit", Err(StoreError::Unknown)), ("late", Err(StoreError::Unavailable))]
    );
    assert!(store.poisoned().is_some_and(|why| why.contains("sync")));
    assert_eq!(store.commit(&commit(vec![put("y", 1, Expiry::Never)])), Err(StoreError::Unavailable));
    assert_eq!(store.read(&ask("before")), Err(StoreError::Unavailable));
    assert!(store.notified().is_empty() && !store.tidy());
    store.close();
    let mut store = store.stop().reopen().unwrap();
    assert!(!store.read(&ask("before")).unwrap().records[0].is_absent());
    assert!(store.read(&ask("y")).unwrap().records[0].is_absent());
    store.commit(&commit(vec![put("y", 1, Expiry::Never)])).unwrap();
}

fn only_file(folder: &std::path::Path) -> std::path::PathBuf {
    let mut files = std::fs::read_dir(folder).unwrap();
    let file = files.next().unwrap().unwrap().path();
    assert!(files.next().is_none());
    file
}

#[test]
fn a_half_written_group_is_there_not_at_all() {
    let folder = tempfile::tempdir().unwrap();
    let mut store = DiskStore::open(folder.path(), Options::default()).unwrap();
    store.commit(&commit(vec![put("first", 10, Expiry::Never)])).unwrap();
    // Two commits in one group, of which the system keeps only the beginning.
    let group = ["a", "b"].map(|k| ((), StoreOp::Commit(commit(vec![put(k, 2_000, Expiry::Never)]))));
    store.process(group.into(), |(), reply| assert!(reply.is_ok()));
    drop(store);
    let journal = only_file(&folder.path().join("journal"));
    let bytes = std::fs::read(&journal).unwrap();
    let end = bytes.iter().rposition(|b| *b != 0).unwrap();
    for lost in [1, 5, 1_000, 3_000] {
        std::fs::remove_dir_all(folder.path().join("journal")).unwrap();
        std::fs::create_dir(folder.path().join("journal")).unwrap();
        let mut torn = bytes.clone();
        torn.truncate(end + 1 - lost);
        std::fs::write(&journal, torn).unwrap();
        let mut store = DiskStore::open(folder.path(), Options::default()).unwrap();
        let there = |store: &mut DiskStore, key: &str| !store.read(&ask(key)).unwrap().records[0].is_absent();
        assert!(there(&mut store, "first"));
        assert_eq!((there(&mut store, "a"), there(&mut store, "b")), (false, false), "{lost} bytes lost");
    }
}

#[test]
fn what_has_expired_leaves_the_disk_after_a_minute() {
    let folder = tempfile::tempdir().unwrap();
    let clock = Arc::new(AtomicU64::new(1_000_000_000));
    let mut store = DiskStore::open(folder.path(), options(&clock)).unwrap();
    let second = Expiry::Clock(1_000_000);
    let gone = (0..1_200).map(|n| put(&format!("gone{n}"), 10, second)).collect();
    store.commit(&commit(gone)).unwrap();
    store
        .commit(&commit(vec![put("large", 9_000, second), put("again", 10, second), put("moved", 9_000, second)]))
        .unwrap();
    store.commit(&commit(vec![put("again", 10, Expiry::Never)])).unwrap();
    let later = Expiry::Clock(500_000_000);
    store.commit(&commit(vec![Write::Expire(Name::from("moved"), later), put("past", 1, Expiry::At(5))])).unwrap();
    let count = |s: &DiskStore| {
        let shelf = s.shelf_for_tests();
        (shelf.records.len(), shelf.bytes.len())
    };
    clock.fetch_add(30_000_000, Ordering::SeqCst);
    while store.tidy() {}
    assert_eq!(count(&store), (1_203, 2), "the minute has not passed, but for what expired long ago");
    clock.fetch_add(40_000_000, Ordering::SeqCst);
    while store.tidy() {}
    assert_eq!(count(&store), (2, 1));
    drop(store);
    clock.fetch_add(600_000_000, Ordering::SeqCst);
    let mut store = DiskStore::open(folder.path(), options(&clock)).unwrap();
    while store.tidy() {}
    assert_eq!(count(&store), (1, 0), "also what was put before a restart");
    assert!(!store.read(&ask("again")).unwrap().records[0].is_absent());
    assert_eq!(store.shelf_for_tests().small.len(), 1, "only the clock is left");
}

#[test]
fn a_log_keeps_its_newest_entries() {
    let folder = tempfile::tempdir().unwrap();
    let open = || DiskStore::open(folder.path(), Options { log_keep: 100, ..Options::default() }).unwrap();
    let mut store = open();
    let log = Name::from("l");
    let append = |n: u64| Write::Append { log: log.clone(), bytes: n.to_be_bytes().to_vec().into() };
    let all = |store: &mut DiskStore| {
        let ask = Some(LogRead { log: log.clone(), after: 0, limit: 10_000 });
        store.read(&Read { log: ask, ..Read::default() }).unwrap().log.iter().map(|e| e.seq).collect::<Vec<_>>()
    };
    for n in 0..1_000 {
        let ops = (0..3).map(|i| ((), StoreOp::Commit(commit(vec![append(3 * n + i)])))).collect();
        store.process(ops, |(), reply| assert!(reply.is_ok()));
    }
    assert_eq!(all(&mut store), (2_901..=3_000).collect::<Vec<_>>());
    assert!(store.shelf_for_tests().small.len() < 400);
    drop(store);
    let mut store = open();
    assert_eq!(all(&mut store), (2_901..=3_000).collect::<Vec<_>>());
    store.commit(&commit(vec![append(0)])).unwrap();
    assert_eq!(all(&mut store).last(), Some(&3_001));
}

#[test]
fn the_clock_does_not_go_back_over_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let ahead = 4_000_000_000_000_000;
    let clock = Arc::new(AtomicU64::new(ahead));
    let mut store = DiskStore::open(folder.path(), options(&clock)).unwrap();
    store.commit(&commit(vec![put("k", 1, Expiry::Never)])).unwrap();
    drop(store);
    let mut store = DiskStore::open(folder.path(), Options::default()).unwrap();
    let first = store.read(&Read::default()).unwrap().clock;
    assert!(first >= ahead);
    assert!(store.read(&Read::default()).unwrap().clock >= first);
}

#[test]
fn one_write_for_each_key_of_a_group() {
    let folder = tempfile::tempdir().unwrap();
    let mut store = DiskStore::open(folder.path(), Options::default()).unwrap();
    let add =
        |n| Write::Add { index: Name::from("i"), member: Name::from("m"), score: ScoreAt::Number(n), raise: false };
    let remove = || Write::Remove { index: Name::from("i"), member: Name::from("m") };
    let ops = vec![
        ((), StoreOp::Commit(commit(vec![add(1), put("k", 10, Expiry::Never)]))),
        ((), StoreOp::Commit(commit(vec![add(2), put("k", 11, Expiry::Never)]))),
        ((), StoreOp::Commit(commit(vec![remove(), Write::Delete(Name::from("k"))]))),
    ];
    store.process(ops, |(), reply| assert!(reply.is_ok()));
    let shelf = store.shelf_for_tests();
    assert_eq!((shelf.records.entries(), shelf.small.entries()), (0, 1), "only the clock");
}

#[test]
fn the_thread_answers_everything_and_closes() {
    let folder = tempfile::tempdir().unwrap();
    let store = DiskStore::open(folder.path(), Options::default()).unwrap();
    let (sender, events) = std::sync::mpsc::channel();
    let handle = spawn(store, move |batch| batch.into_iter().for_each(|e| sender.send(e).unwrap()));
    for n in 0..1_000u64 {
        let op = match n % 3 {
            0 => StoreOp::Read(ask("k0")),
            _ => StoreOp::Commit(commit(vec![put(&format!("k{n}"), 5, Expiry::Never), Write::Notify(Name::from("t"))])),
        };
        assert!(handle.send(StoreId(n), op));
    }
    assert_eq!(handle.poisoned(), None);
    handle.close();
    let mut ids = Vec::new();
    let mut topics = 0;
    while let Ok(event) = events.recv_timeout(Duration::from_secs(5)) {
        match event {
            Event::Reply { id, reply } => {
                assert_eq!(matches!(reply, Ok(StoreAnswer::Read(_))), id.0.is_multiple_of(3));
                ids.push(id.0);
            }
            other @ (Event::Damaged(_) | Event::Fault(_) | Event::Stopped(_) | Event::Working) => panic!("{other:?}"),
            Event::Notified(topic) => {
                assert_eq!(topic, Name::from("t"));
                topics += 1;
            }
        }
    }
    ids.sort_unstable();
    assert_eq!(ids, (0..1_000).collect::<Vec<_>>());
    assert!(topics >= 1);
    let mut store = DiskStore::open(folder.path(), Options::default()).unwrap();
    assert!(!store.read(&ask("k998")).unwrap().records[0].is_absent());
}

#[test]
fn a_name_that_no_table_can_hold_is_refused_and_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let mut store = DiskStore::open(folder.path(), Options::default()).unwrap();
    let long = "x".repeat(16 * 1024 + 1);
    let add = |index: &str, member: &str| Write::Add {
        index: Name::from(index),
        member: Name::from(member),
        score: ScoreAt::Number(1),
        raise: false,
    };
    let bad = [
        put("", 1, Expiry::Never),
        put(&long, 1, Expiry::Never),
        Write::Delete(Name::from("")),
        Write::Expire(Name::from(""), Expiry::Never),
        add(&long, "m"),
        add("i", &long),
        add("i", ""),
        Write::Append { log: Name::from(&*long), bytes: bytes::Bytes::new() },
    ];
    for write in bad {
        let writes = vec![put("beside", 1, Expiry::Never), write.clone()];
        assert_eq!(store.commit(&commit(writes)), Err(StoreError::Unavailable), "{write:?}");
        assert_eq!(store.poisoned(), None);
    }
    assert!(store.read(&ask("beside")).unwrap().records[0].is_absent());
    assert!(store.read(&ask("")).unwrap().records[0].is_absent());
    // Up to the bound everything is kept, in the longest key that a table gets.
    let longest = &long[1..];
    let append = Write::Append { log: Name::from(longest), bytes: vec![1].into() };
    store
        .commit(&commit(vec![put(longest, 5_000, Expiry::At(SCORE_MAX)), add(longest, longest), append, add("", "m")]))
        .unwrap();
    store.close();
    drop(store);
    let mut store = DiskStore::open(folder.path(), Options::default()).unwrap();
    let members = [(longest, longest), ("", "m")].map(|(i, m)| (Name::from(i), Name::from(m))).to_vec();
    let log = Some(LogRead { log: Name::from(longest), after: 0, limit: 10 });
    let found = store.read(&Read { members, log, ..ask(longest) }).unwrap();
    assert!(!found.records[0].is_absent() && found.members.iter().all(Option::is_some) && found.log.len() == 1);
}

#[test]
fn a_guard_does_not_read_large_bytes() {
    // The bytes are gone: only what asks for them may notice.
    let folder = tempfile::tempdir().unwrap();
    let mut store = DiskStore::open(folder.path(), Options::default()).unwrap();
    store.commit(&commit(vec![put("k", 9_000, Expiry::Never)])).unwrap();
    store.shelf_for_tests().bytes.apply(bytes::Bytes::from_static(b"k"), None, u64::MAX >> 2);
    let guarded = Txn {
        valid_until: SCORE_MAX,
        guards: vec![Guard::At(Name::from("k"), Version(1))],
        take: None,
        writes: vec![Write::Expire(Name::from("k"), Expiry::Clock(1_000_000_000))],
    };
    let reply = store.commit(&Commit { txns: vec![Arc::new(guarded)], grows: false }).unwrap();
    assert!(matches!(reply.answers[0], leasehold_core::store::Answer::Applied { .. }));
    assert!(store.damaged().is_empty());
    let damaged = store.read(&ask("k")).unwrap();
    assert_eq!(damaged.records[0].bytes().map(|b| b.len()), Some(0), "a damaged record is given without its bytes");
    assert_eq!(store.damaged(), [Name::from("k")], "and told");
    assert!(store.read(&ask("other")).is_ok(), "and hurts nobody else");
}
