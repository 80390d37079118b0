//! `cargo run --release -p leasehold-redis --example differ -- [--ops N] [--seed N] [--server PATH] [--disk]`
//!
//! Sends the same random reads and commits to the model store, to Redis and, with `--disk`, to the
//! disk store, and compares every answer. `--server` is a server's binary, or the name of a release
//! (`redis-7.0`, `valkey-9`, `redis-7.4`); it is started on a port of its own.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a tool for developers: what is wrong ends it")]

#[path = "../tests/support/differ.rs"]
mod differ;
#[path = "../tests/support/mod.rs"]
mod support;

use support::Server;

fn main() {
    let (mut ops, mut seed, mut release, mut disk) = (1_000_000, 1, "redis-7.0".to_owned(), false);
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let mut value = || args.next().unwrap_or_else(|| panic!("{arg} needs a value"));
        match &*arg {
            "--ops" => ops = value().parse().unwrap(),
            "--seed" => seed = value().parse().unwrap(),
            "--server" => release = value(),
            "--disk" => disk = true,
            _ => panic!("there is no {arg}"),
        }
    }
    let server = Server::start(&release, &[]);
    let began = std::time::Instant::now();
    let done = differ::run(&server.address(), ops, seed, disk);
    println!("{release} {}: {done:?} in {:?}, no difference", server.info("redis_version"), began.elapsed());
}
