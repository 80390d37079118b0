//! What the store does in a second, on this machine's disk.
//!
//! `cargo run --release -p leasehold-disk --example bench -- [folder] [jobs]`; the folder is made
//! anew below the given one (default: a temporary one below the current folder).
#![allow(clippy::print_stdout, clippy::expect_used)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use leasehold_core::store::{
    Commit, Each, Expiry, Guard, Read, SCORE_MAX, ScoreAt, Source, Store, Take, Txn, Value, Version, Write,
};
use leasehold_core::{Name, StoreOp};
use leasehold_disk::{DiskStore, Options};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn name(text: String) -> Name {
    Name::from(text)
}

fn put(key: String, n: u64, len: usize, expiry: Expiry) -> Write {
    let bytes = vec![n as u8; len].into();
    Write::Put { key: name(key), version: Version(n + 1), value: Value::Bytes(bytes), expiry }
}

fn add(index: &str, member: &str, score: u64) -> Write {
    Write::Add { index: Name::from(index), member: Name::from(member), score: ScoreAt::Clock(score), raise: false }
}

fn one(txn: Txn) -> Commit {
    Commit { txns: vec![Arc::new(txn)], grows: true }
}

fn job(n: u64) -> String {
    format!("01J{n:023}")
}

/// As a submit: three records, two entries, one append.
fn submit(n: u64) -> Commit {
    let job = job(n);
    one(Txn {
        valid_until: SCORE_MAX,
        guards: vec![Guard::Absent(name(format!("job/{job}"))), Guard::Absent(name(format!("key/t/{n}")))],
        take: None,
        writes: vec![
            put(format!("job/{job}"), n, 180, Expiry::Never),
            put(format!("payload/{job}"), n, 200, Expiry::Never),
            put(format!("key/t/{n}"), n, 60, Expiry::Never),
            add("st/default/emails/0/queued", &job, 0),
            add("ttl", &job, 3_600_000_000),
            Write::Append { log: Name::from("audit/default"), bytes: vec![1; 60].into() },
        ],
    })
}

/// As a claim: ten leave the queue for three other places, with a lease each, and a receipt.
fn claim(n: u64) -> Commit {
    let each = vec![
        Each::Add {
            index: Name::from("st/default/emails/0/running"),
            score: ScoreAt::Of(Name::from("st/default/emails/0/queued")),
        },
        Each::Add { index: Name::from("leases"), score: ScoreAt::Clock(30_000_000) },
        Each::Remove { index: Name::from("ttl") },
        Each::Put {
            prefix: Name::from("lease/"),
            version: Version(n + 1),
            bytes: vec![2; 90].into(),
            expiry: Expiry::Never,
        },
    ];
    let source = Source { index: Name::from("st/default/emails/0/queued"), due: false, each };
    let receipt = name(format!("claim/default/{n}"));
    one(Txn {
        valid_until: SCORE_MAX,
        guards: vec![Guard::Absent(receipt.clone()), Guard::Absent(Name::from("queue/default/emails"))],
        take: Some(Take {
            n: 10,
            from: vec![source],
            give: vec![Name::from("job/"), Name::from("payload/")],
            max_bytes: 8 << 20,
        }),
        writes: vec![
            Write::Put {
                key: receipt,
                version: Version(n + 1),
                value: Value::Taken,
                expiry: Expiry::Clock(30_000_000),
            },
            Write::Append { log: Name::from("audit/default"), bytes: vec![1; 60].into() },
        ],
    })
}

/// Applies in durable groups of `group`; returns seconds for each group, sorted.
fn run(store: &mut DiskStore, from: u64, count: u64, group: u64, make: impl Fn(u64) -> Commit) -> Vec<f64> {
    let mut times = Vec::new();
    let before = cpu();
    let mut n = from;
    while n < from + count {
        let to = (n + group).min(from + count);
        let ops: Vec<_> = (n..to).map(|n| ((), StoreOp::Commit(make(n)))).collect();
        let start = Instant::now();
        store.process(ops, |(), reply| drop(reply.expect("the store answers")));
        times.push(start.elapsed().as_secs_f64());
        store.notified();
        if times.len().is_multiple_of(16) {
            store.tidy();
        }
        n = to;
    }
    times.sort_by(f64::total_cmp);
    println!("  processor, all threads: {:.1} us for each transaction", (cpu() - before) * 1e6 / count.max(1) as f64);
    times
}

/// Seconds of processor time that this process has used, all threads.
fn cpu() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = stat.rsplit_once(')').map_or("", |(_, rest)| rest).split_whitespace();
    // Fields 14 and 15, in hundredths on every usual system.
    fields.skip(11).take(2).filter_map(|f| f.parse::<f64>().ok()).sum::<f64>() / 100.0
}

fn tell(what: &str, count: u64, times: &[f64]) {
    let sum: f64 = times.iter().sum();
    let at = |q: f64| 1e3 * times.get(((times.len() - 1) as f64 * q) as usize).copied().unwrap_or_default();
    println!(
        "{what:<44} {:>9.0} txns/s   group ms: median {:.3}, 99% {:.3}, max {:.1}",
        count as f64 / sum,
        at(0.5),
        at(0.99),
        at(1.0)
    );
}

fn resident_mib() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:")).unwrap_or_default();
    line.trim().trim_end_matches(" kB").parse::<f64>().unwrap_or_default() / 1024.0
}

fn main() {
    let mut args = std::env::args().skip(1);
    let first = args.next();
    if first.as_deref() == Some("--open") {
        return reopen(&args.next().expect("a folder"));
    }
    let base = first.unwrap_or_else(|| ".".into());
    let jobs: u64 = args.next().and_then(|n| n.parse().ok()).unwrap_or(1_000_000);
    let folder = tempfile::Builder::new().prefix("leasehold-bench-").tempdir_in(base).expect("a folder");
    let open = || DiskStore::open(folder.path(), Options::default()).expect("it opens");
    let mut store = open();
    let mut n = 0;
    for (group, count) in [(1, 3_000), (10, 20_000), (100, 100_000)] {
        let times = run(&mut store, n, count, group, submit);
        tell(&format!("submit, durable groups of {group}"), count, &times);
        n += count;
    }
    // Leave a thousand: what is beyond is taken in large claims.
    let drain = Commit {
        txns: vec![Arc::new(Txn {
            valid_until: SCORE_MAX,
            guards: Vec::new(),
            take: Some(Take {
                n: (n - 1_500) as usize,
                from: vec![Source { index: Name::from("st/default/emails/0/queued"), due: false, each: Vec::new() }],
                give: Vec::new(),
                max_bytes: 0,
            }),
            writes: Vec::new(),
        })],
        grows: false,
    };
    store.commit(&drain).expect("the store answers");
    let times = run(&mut store, 1_000_000, 50, 1, claim);
    tell("claim of 10 at a backlog of 1,000 to 1,500", 50, &times);

    let times = run(&mut store, n, jobs.saturating_sub(n), 100, submit);
    tell(&format!("submit up to {jobs} jobs, groups of 100"), jobs.saturating_sub(n), &times);
    let backlog = store.read(&Read {
        counts: vec![(Name::from("st/default/emails/0/queued"), leasehold_core::store::Span::All)],
        ..Read::default()
    });
    let backlog = backlog.expect("it reads").counts[0];
    // Until the tables that the submits have left are put in order.
    std::thread::sleep(Duration::from_secs(5));
    let times = run(&mut store, 2_000_000, 500, 1, claim);
    tell(&format!("claim of 10 at a backlog of {backlog}"), 500, &times);
    let times = run(&mut store, 3_000_000, 2_000, 20, claim);
    tell("claim of 10, durable groups of 20", 2_000, &times);
    let start = Instant::now();
    let reads = 20_000;
    for n in 0..reads {
        let job = job(n * 7_919 % jobs);
        let records = vec![name(format!("job/{job}")), name(format!("payload/{job}"))];
        let found = store.read(&Read { records, ..Read::default() }).expect("it reads");
        assert!(found.records.iter().all(|r| !r.is_absent()));
    }
    println!("{:<44} {:>9.0} reads/s", "random reads of 2 records", reads as f64 / start.elapsed().as_secs_f64());
    println!("on disk {} MiB, resident {:.0} MiB", store.disk_bytes() >> 20, resident_mib());
    store.close();
    drop(store);
    // In a process of its own, whose memory is only what opening takes.
    let this = std::env::current_exe().expect("this program");
    let child = std::process::Command::new(this).arg("--open").arg(folder.path()).status();
    assert!(child.is_ok_and(|s| s.success()));
}

fn reopen(folder: &str) {
    let start = Instant::now();
    let store = DiskStore::open(folder, Options::default()).expect("it opens");
    let took = start.elapsed().as_secs_f64();
    let entries: usize = store.books().iter().map(|(_, i)| i.len()).sum();
    println!("reopened in {took:.2} s with {entries} index entries, resident {:.0} MiB", resident_mib());
}
