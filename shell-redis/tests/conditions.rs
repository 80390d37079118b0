//! Each condition that a Redis can be in has its answer: every one is brought about on a real server,
//! through its own commands, by signals, or by a proxy between it and the store.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]

mod support;

use std::thread;
use std::time::{Duration, Instant};

use leasehold_core::Name;
use leasehold_core::store::{Answer, Expiry, Read, Record, ScoreAt, StoreError, Value, Version, Write};
use leasehold_redis::{ConnectError, Options};
use support::caller::{Caller, applied, commit, create, write};
use support::proxy::{Mode, Proxy};
use support::{Server, free_port, wait_for};

fn open(server: &Server) -> Caller {
    Caller::new(&server.url(), Options::default()).unwrap()
}

fn refused(url: &str, options: Options) -> String {
    match Caller::new(url, options) {
        Err(ConnectError::Refused(why)) => why,
        Err(ConnectError::Unreachable(why)) => panic!("not refused but unreachable: {why}"),
        Ok(_) => panic!("not refused"),
    }
}

fn put(key: &str, len: usize) -> Write {
    let value = Value::Bytes(bytes::Bytes::from(vec![7; len]));
    Write::Put { key: Name::from(key), version: Version(1), value, expiry: Expiry::Never }
}

fn add(index: &str, member: &str) -> Write {
    Write::Add { index: Name::from(index), member: Name::from(member), score: ScoreAt::Number(1), raise: false }
}

/// On each release that the tests run on.
fn each(mut test: impl FnMut(&str)) {
    for release in support::releases() {
        eprintln!("{release}");
        test(release);
    }
}

#[test]
fn forgotten_scripts_are_sent_again() {
    each(|release| {
        let server = Server::start(release, &[]);
        let mut store = open(&server);
        for n in 0..5 {
            server.run(&["SCRIPT", "FLUSH"]);
            assert!(applied(store.commit(commit(vec![create(&format!("a{n}"), 1)], true))));
            server.run(&["SCRIPT", "FLUSH"]);
            assert!(applied(store.commit(commit(vec![create(&format!("b{n}"), 1)], false))));
            server.run(&["SCRIPT", "FLUSH"]);
            assert!(!store.record(&format!("b{n}")).unwrap().is_absent());
        }
    });
}

#[test]
fn a_server_that_loads_has_applied_nothing() {
    each(|release| {
        let flags = ["--enable-debug-command", "yes", "--loading-process-events-interval-bytes", "1024"];
        let server = Server::start(release, &flags);
        let mut store = open(&server);
        server.run(&["DEBUG", "POPULATE", "20000"]);
        server.run(&["CONFIG", "SET", "key-load-delay", "200"]);
        let mut client = server.client();
        let reload = thread::spawn(move || support::run(&mut client, &["DEBUG", "RELOAD"]).is_ok());
        wait_for("it says that it loads", || {
            let said = store.commit(commit(vec![create("while loading", 1)], false));
            assert!(!matches!(said, Err(StoreError::Unknown | StoreError::Full)));
            said.is_err().then_some(())
        });
        server_quick(&server);
        store.recovers();
        assert!(reload.join().unwrap());
    });
}

/// Ends the loading soon.
fn server_quick(server: &Server) {
    let mut client = server.client();
    wait_for("it has loaded", || support::run(&mut client, &["CONFIG", "SET", "key-load-delay", "0"]).ok());
}

#[test]
fn a_demoted_server_neither_writes_nor_answers_from_the_past() {
    each(|release| {
        let server = Server::start(release, &[]);
        let mut store = open(&server);
        assert!(applied(store.commit(commit(vec![create("k", 1)], true))));
        server.run(&["REPLICAOF", "127.0.0.1", &free_port().to_string()]);
        for grows in [true, false] {
            let said = store.commit(commit(vec![create("while demoted", 1)], grows));
            assert_eq!(said, Err(StoreError::Unavailable));
        }
        assert_eq!(store.record("k"), Err(StoreError::Unavailable));
        server.run(&["REPLICAOF", "NO", "ONE"]);
        store.recovers();
        assert!(store.record("while demoted").unwrap().is_absent());
    });
}

#[test]
fn a_server_busy_with_a_script_has_applied_nothing() {
    each(|release| {
        let server = Server::start(release, &["--busy-reply-threshold", "20"]);
        let mut store = open(&server);
        let mut client = server.client();
        let busy = thread::spawn(move || support::run(&mut client, &["EVAL", "while true do end", "0"]).is_err());
        let mut killer = server.client();
        wait_for("it is busy", || {
            let said = support::run(&mut killer, &["PING"]);
            said.is_err_and(|e| e.code() == Some("BUSY")).then_some(())
        });
        assert_eq!(store.commit(commit(vec![create("k", 1)], true)), Err(StoreError::Unavailable));
        assert_eq!(store.record("k"), Err(StoreError::Unavailable));
        wait_for("it is killed", || support::run(&mut killer, &["SCRIPT", "KILL"]).ok());
        assert!(busy.join().unwrap());
        store.recovers();
        assert!(store.record("k").unwrap().is_absent());
    });
}

#[test]
fn without_memory_it_refuses_growth_and_drains() {
    each(|release| {
        let server = Server::start(release, &["--maxmemory", "20mb", "--maxmemory-policy", "noeviction"]);
        let mut store = open(&server);
        let mut kept = 0;
        let said = loop {
            let said = store.commit(commit(vec![write(vec![put(&format!("k{kept}"), 100_000)])], true));
            if said.is_err() {
                break said;
            }
            kept += 1;
            assert!(kept < 1_000, "20 MB hold less");
        };
        assert_eq!(said, Err(StoreError::Full));
        // What does not grow goes on, also what has to write a little to end well.
        assert!(applied(store.commit(commit(vec![write(vec![put("small", 100), add("i", "small")])], false))));
        assert!(store.record("small").is_ok());
        for n in 0..kept {
            assert!(applied(
                store.commit(commit(vec![write(vec![Write::Delete(Name::from(format!("k{n}")))])], false))
            ));
        }
        assert!(applied(store.commit(commit(vec![create("again", 1)], true))), "there is room again");
    });
}

#[test]
fn refusals_in_any_wording_are_certain_and_pass() {
    let server = Server::start("redis-7.0", &[]);
    let proxy = Proxy::start(server.port);
    let mut store = Caller::new(&proxy.url(), Options::default()).unwrap();
    for line in [
        "READONLY You can't write against a read only replica.",
        "ERR READONLY You can't write against a read only replica.",
        "UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)",
        "LOADING Redis is loading the dataset in memory",
        "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
        "CLUSTERDOWN The cluster is down",
        "CLUSTERDOWN Hash slot not served",
        "MOVED 3999 127.0.0.1:6381",
        "TRYAGAIN Multiple keys request during rehashing of slot",
        "BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.",
        "NOREPLICAS Not enough good replicas to write.",
        "MISCONF Errors writing to the AOF file: No space left on device",
        "NOAUTH Authentication required.",
    ] {
        proxy.set(Mode::Answer(line.into()));
        assert_eq!(store.commit(commit(vec![create(line, 1)], false)), Err(StoreError::Unavailable), "{line}");
        assert_eq!(store.record(line), Err(StoreError::Unavailable), "{line}");
        proxy.set(Mode::Pass);
        store.recovers();
        assert!(store.record(line).unwrap().is_absent(), "{line}");
    }
    proxy.set(Mode::Answer("OOM command not allowed when used memory > 'maxmemory'.".into()));
    assert_eq!(store.commit(commit(vec![create("k", 1)], true)), Err(StoreError::Full));
    assert_eq!(store.commit(commit(vec![create("k", 1)], false)), Err(StoreError::Unavailable));
    proxy.set(Mode::Answer("ERR something new happened script: 0f, on @user_script:1.".into()));
    assert_eq!(store.commit(commit(vec![create("k", 1)], true)), Err(StoreError::Unknown), "it may have written");
}

#[test]
fn a_cut_before_and_after_the_commit_is_unknown_and_can_be_settled() {
    each(|release| {
        let server = Server::start(release, &[]);
        let proxy = Proxy::start(server.port);
        let mut store = Caller::new(&proxy.url(), Options::default()).unwrap();
        for (mode, was_applied) in [(Mode::CutBeforeCall, false), (Mode::CutBeforeReply, true)] {
            let key = format!("{mode:?}");
            let same = commit(vec![create(&key, 1)], true);
            // The script is known: the call is one line, and its only reply is cut off.
            store.recovers();
            proxy.set(mode);
            assert_eq!(store.commit(same.clone()), Err(StoreError::Unknown));
            assert_eq!(proxy.mode(), Mode::Pass, "it was cut");
            store.recovers();
            assert_eq!(!store.record(&key).unwrap().is_absent(), was_applied);
            // The same again settles it.
            let again = store.commit(same).unwrap().answers.remove(0);
            let expect = if was_applied { Answer::Refused(0) } else { Answer::Applied { taken: Vec::new() } };
            assert_eq!(again, expect);
            assert_eq!(store.record(&key).unwrap().version(), Some(Version(1)));
        }
    });
}

#[test]
fn what_a_stalled_server_finds_later_in_its_buffers_is_refused() {
    each(|release| {
        let server = Server::start(release, &[]);
        let options = Options { reply_timeout: Some(Duration::from_millis(300)), ..Options::default() };
        let mut store = Caller::new(&server.url(), options).unwrap();
        let clock = store.read(Read::default()).unwrap().clock;
        server.signal("STOP");
        let mut late = create("late", 1);
        late.valid_until = clock + 600_000;
        let began = Instant::now();
        assert_eq!(store.commit(commit(vec![late], true)), Err(StoreError::Unknown));
        // Certainly not applied: never sent, for there is no connection.
        wait_for("calls are not sent any more", || {
            let said = store.commit(commit(vec![create("not sent", 1)], true));
            (said == Err(StoreError::Unavailable)).then_some(())
        });
        assert!(began.elapsed() < Duration::from_secs(20), "nothing hangs");
        wait_for("the commit's time has passed", || (began.elapsed() > Duration::from_millis(700)).then_some(()));
        server.signal("CONT");
        store.recovers();
        // The server works off what it was sent in order; what was sent while it stood still came before.
        assert!(store.record("late").unwrap().is_absent());
        assert!(applied(store.commit(commit(vec![create("fresh", 1)], true))));
        assert!(store.record("late").unwrap().is_absent());
    });
}

#[test]
fn notifications_reach_other_servers_also_after_their_connection_was_killed() {
    each(|release| {
        let server = Server::start(release, &[]);
        let (mut one, mut two) = (open(&server), open(&server));
        let tell = |from: &mut Caller, topic: &str| {
            assert!(applied(from.commit(commit(vec![write(vec![Write::Notify(Name::from(topic))])], false))));
        };
        let reaches = |one: &mut Caller, two: &mut Caller, topic: &str| {
            wait_for("it is heard", || {
                tell(one, topic);
                two.hears(Duration::from_millis(50)).contains(&Name::from(topic)).then_some(())
            });
        };
        reaches(&mut one, &mut two, "first");
        tell(&mut one, "own");
        assert!(one.hears(Duration::from_secs(5)).contains(&Name::from("first")), "the own ones need no connection");
        server.run(&["CLIENT", "KILL", "TYPE", "pubsub"]);
        assert!(two.read(Read::default()).is_ok(), "the store itself does not mind");
        reaches(&mut one, &mut two, "second");
    });
}

#[test]
fn a_wrong_password_is_told_at_the_start_and_waited_out_later() {
    each(|release| {
        let server = Server::start(release, &["--requirepass", "right"]);
        let url = |password: &str| format!("redis://:{password}@127.0.0.1:{}/0", server.port);
        for wrong in [url("wrong"), server.url()] {
            let why = refused(&wrong, Options::default());
            assert!(!why.contains("wrong@"), "no password in messages: {why}");
        }
        let mut store = Caller::new(&url("right"), Options::default()).unwrap();
        assert!(store.read(Read::default()).is_ok());
        let mut client = support::client(&url("right"));
        support::run(&mut client, &["CONFIG", "SET", "requirepass", "changed"]).unwrap();
        support::run(&mut client, &["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]).unwrap();
        wait_for("it is kept out", || (store.read(Read::default()) == Err(StoreError::Unavailable)).then_some(()));
        let why = wait_for("it says why", || store.handle.condition().unreachable);
        assert!(!why.contains("right"), "no password in messages: {why}");
        support::run(&mut client, &["CONFIG", "SET", "requirepass", "right"]).unwrap();
        store.recovers();
    });
}

#[test]
fn keys_of_a_wrong_type_hurt_only_what_touches_them() {
    each(|release| {
        let server = Server::start(release, &[]);
        let mut store = open(&server);
        server.run(&["SET", "{lh:0}i:bad", "not an index"]);
        server.run(&["SET", "{lh:0}l:bad", "not a log"]);
        server.run(&["RPUSH", "{lh:0}r:bad", "not a record"]);
        let append = Write::Append { log: Name::from("bad"), bytes: bytes::Bytes::from_static(b"x") };
        let txns = vec![
            write(vec![put("one", 1), add("good", "one")]),
            write(vec![put("two", 1), add("good", "two"), add("bad", "two")]),
            write(vec![put("three", 1), append]),
            write(vec![put("four", 1), put("four", 2), add("bad", "four")]),
            write(vec![put("five", 1), add("good", "five")]),
        ];
        let reply = store.commit(commit(txns, true)).unwrap();
        let applied: Vec<bool> = reply.answers.iter().map(|a| matches!(a, Answer::Applied { .. })).collect();
        assert_eq!(applied, [true, false, false, false, true]);
        for (key, there) in [("one", true), ("two", false), ("three", false), ("four", false), ("five", true)] {
            assert_eq!(!store.record(key).unwrap().is_absent(), there, "{key}: all or nothing");
        }
        assert!(store.record("bad").unwrap().is_absent());
        let slice = leasehold_core::store::Slice {
            index: Name::from("bad"),
            after: None,
            up_to: leasehold_core::store::UpTo::End,
            limit: 9,
            give: Vec::new(),
        };
        let found = store.read(Read { slices: vec![slice], ..Read::default() }).unwrap();
        assert!(found.slices[0].is_empty());
        assert!(store.damaged.iter().any(|n| *n == Name::from("bad")), "{:?}", store.damaged);
    });
}

#[test]
fn a_namespace_that_is_not_ours_or_of_a_later_format_is_left_alone() {
    each(|release| {
        let server = Server::start(release, &[]);
        let options = || Options { namespace: "other".into(), ..Options::default() };
        server.run(&["SET", "{other:0}meta", "x"]);
        assert!(refused(&server.url(), options()).contains("not Leasehold's"));
        for (fields, word) in [
            (["format", "2", "shard", "0"], "newer"),
            (["format", "1", "shard", "3"], "shard"),
            (["colour", "red", "shard", "0"], "not Leasehold's"),
        ] {
            server.run(&["DEL", "{other:0}meta"]);
            server.run(&[&["HSET", "{other:0}meta"][..], &fields].concat());
            let why = refused(&server.url(), options());
            assert!(why.contains(word) && why.contains("other"), "{why}");
        }
        assert_eq!(server.run(&["DBSIZE"]), redis::Value::Int(1), "nothing was written");
        server.run(&["DEL", "{other:0}meta"]);
        drop(Caller::new(&server.url(), options()).unwrap());
        drop(Caller::new(&server.url(), options()).unwrap());
    });
}

#[test]
fn an_eviction_policy_that_may_lose_jobs_is_told_or_refused() {
    each(|release| {
        let server = Server::start(release, &["--maxmemory-policy", "allkeys-lru"]);
        let store = open(&server);
        let warning = store.handle.condition().warning.unwrap();
        assert!(warning.contains("allkeys-lru"), "{warning}");
        let strict = Options { require_noeviction: true, ..Options::default() };
        assert!(refused(&server.url(), strict.clone()).contains("noeviction"));
        server.run(&["CONFIG", "SET", "maxmemory-policy", "noeviction"]);
        assert_eq!(Caller::new(&server.url(), strict).unwrap().handle.condition().warning, None);
    });
}

#[test]
fn a_restart_with_its_append_only_file_keeps_everything() {
    each(|release| {
        let mut server = Server::start(release, &["--appendonly", "yes", "--appendfsync", "always"]);
        let mut store = open(&server);
        for n in 0..200 {
            let mut txn = create(&format!("k{n}"), 1);
            txn.writes.push(add("i", &format!("m{n:03}")));
            txn.writes.push(Write::Append { log: Name::from("l"), bytes: bytes::Bytes::from_static(b"event") });
            assert!(applied(store.commit(commit(vec![txn], true))));
        }
        server.stop("KILL");
        wait_for("it is gone", || (store.read(Read::default()) == Err(StoreError::Unavailable)).then_some(()));
        server.restart();
        store.recovers();
        let log = leasehold_core::store::LogRead { log: Name::from("l"), after: 0, limit: 1_000 };
        let read = Read {
            records: (0..200).map(|n| Name::from(format!("k{n}"))).collect(),
            counts: vec![(Name::from("i"), leasehold_core::store::Span::All)],
            log: Some(log),
            ..Read::default()
        };
        let found = store.read(read).unwrap();
        assert!(found.records.iter().all(|r| r.version() == Some(Version(1))));
        assert_eq!((found.counts[0], found.log.len()), (200, 200));
    });
}

#[test]
fn what_has_expired_is_collected_by_the_server_a_minute_later() {
    each(|release| {
        let server = Server::start(release, &[]);
        let mut store = open(&server);
        let ttl = |key: &str| match server.run(&["PTTL", &format!("{{lh:0}}r:{key}")]) {
            redis::Value::Int(ttl) => ttl,
            other => panic!("{other:?}"),
        };
        let expiring = |key: &str, expiry| {
            let value = Value::Bytes(bytes::Bytes::from_static(b"x"));
            Write::Put { key: Name::from(key), version: Version(1), value, expiry }
        };
        let txn = write(vec![expiring("soon", Expiry::Clock(1_000_000)), put("never", 1), put("large", 9_000)]);
        assert!(applied(store.commit(commit(vec![txn], true))));
        let minute = 60_000;
        let soon = ttl("soon");
        // Rounded up to a whole millisecond.
        assert!((minute..=minute + 1_001).contains(&soon), "{soon}");
        assert_eq!((ttl("never"), ttl("large")), (-1, -1));
        let expire = |key: &str, expiry| Write::Expire(Name::from(key), expiry);
        let txn = write(vec![expire("never", Expiry::Clock(5_000_000)), expire("soon", Expiry::Never)]);
        assert!(applied(store.commit(commit(vec![txn], true))));
        assert!((minute..=minute + 5_001).contains(&ttl("never")));
        assert_eq!(ttl("soon"), -1);
        let txn = write(vec![expiring("past", Expiry::At(1)), expire("large", Expiry::At(1))]);
        assert!(applied(store.commit(commit(vec![txn], true))));
        for key in ["past", "large"] {
            assert_eq!(ttl(key), -2, "gone long ago");
            assert!(store.record(key).unwrap().is_absent());
        }
        assert!(matches!(store.record("soon").unwrap(), Record::Present { expiry: None, .. }));
    });
}

#[test]
fn of_several_addresses_the_primary_is_found() {
    let (one, two) = (Server::start("redis-7.0", &[]), Server::start("redis-7.0", &[]));
    two.run(&["REPLICAOF", "127.0.0.1", &one.port.to_string()]);
    let url = format!("redis://127.0.0.1:{},127.0.0.1:{}/0", two.port, one.port);
    let mut store = Caller::new(&url, Options::default()).unwrap();
    assert!(applied(store.commit(commit(vec![create("k", 1)], true))));
    wait_for("it is replicated", || (two.run(&["EXISTS", "{lh:0}r:k"]) == redis::Value::Int(1)).then_some(()));
    two.run(&["REPLICAOF", "NO", "ONE"]);
    one.run(&["REPLICAOF", "127.0.0.1", &two.port.to_string()]);
    assert!(store.commit(commit(vec![create("k2", 1)], true)).is_err());
    store.recovers();
    assert!(!store.record("k").unwrap().is_absent());
    assert!(applied(store.commit(commit(vec![create("k2", 1)], true))));
}

#[test]
fn a_server_that_is_not_there_at_the_start_is_waited_for() {
    let mut server = Server::start("redis-7.0", &[]);
    server.stop("KILL");
    let mut store = open(&server);
    assert_eq!(store.read(Read::default()), Err(StoreError::Unavailable));
    server.restart();
    store.recovers();
}
