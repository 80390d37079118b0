//! A small share of what the harness does, as a part of every test run. The whole is a command:
//! `cargo run --release -p harness -- help`.

use std::path::Path;
use std::process::Command;

fn run(args: &[&str]) {
    let out = Command::new(env!("CARGO_BIN_EXE_harness")).args(args).output().expect("the harness runs");
    let text = [out.stdout, out.stderr].concat();
    let text = String::from_utf8_lossy(&text);
    println!("{text}");
    assert!(out.status.success() && text.contains("held"), "harness {}", args.join(" "));
}

/// With the server that the run of all tests has built; where only these are run, the harness builds one.
fn run_with_server(args: &[&str]) {
    let server = Path::new(env!("CARGO_BIN_EXE_harness")).with_file_name("leasehold");
    match server.to_str().filter(|_| server.is_file()) {
        Some(server) => run(&[args, &["--server", server]].concat()),
        None => run(args),
    }
}

#[test]
fn c62_on_a_full_disk_nothing_is_acknowledged_until_the_store_is_proven() {
    run_with_server(&["full", "--rounds", "1"]);
}

#[test]
fn c62_a_failed_call_stops_the_store_until_it_is_proven() {
    run(&["faults", "--calls", "120", "--every", "12"]);
}

#[test]
fn c68_power_cuts_lose_nothing_that_was_acknowledged() {
    run(&["cuts", "--cuts", "200", "--each", "50"]);
}

/// A workload with what once kept a store from being opened after a power cut: a group that was not
/// synced before the next one was written.
#[test]
fn c68_what_is_removed_is_synced_too() {
    run(&["cuts", "--seed", "29", "--cuts", "100", "--each", "100"]);
}

#[test]
fn c68_a_flipped_bit_is_told_and_loses_nothing_behind_it() {
    run(&["flips", "--flips", "120", "--each", "60"]);
}

/// Among these is a bit of the last group of a journal, of which one tree had its part in a table already.
#[test]
fn c68_a_group_that_tables_have_a_part_of_is_not_taken_for_a_torn_end() {
    run(&["flips", "--seed", "107", "--flips", "50", "--each", "50"]);
}

#[test]
fn a_killed_server_loses_nothing() {
    run_with_server(&["kill", "--rounds", "5"]);
}

/// With the Redis that the other tests use, which they bring along.
#[test]
fn servers_on_a_redis_lose_nothing_whatever_is_done_to_them() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let servers = root.join("target/servers");
    if !servers.join("redis-7.0").exists() {
        let fetch = Command::new("bash").arg(root.join("shell-redis/tests/servers.sh")).arg(&servers).status();
        assert!(fetch.is_ok_and(|status| status.success()), "the servers cannot be fetched");
    }
    let redis = servers.join("redis-7.0");
    run_with_server(&["redis", "--seconds", "30", "--seed", "3", "--redis", redis.to_str().unwrap_or_default()]);
}

#[test]
fn disk_use_follows_what_lives() {
    run(&["space", "--jobs", "20000", "--events", "1000"]);
}

#[test]
fn random_bodies_are_refused_and_cost_no_memory() {
    run_with_server(&["bodies", "--bodies", "4000"]);
}

#[test]
fn who_only_waits_or_dawdles_is_in_nobodys_way() {
    run_with_server(&[
        "crowd",
        "--idle",
        "300",
        "--polls",
        "60",
        "--slow",
        "20",
        "--submitters",
        "4",
        "--seconds",
        "3",
    ]);
}
