//! The model, the disk store and Redis answer alike: a small part of `examples/differ.rs`.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]

#[path = "support/differ.rs"]
mod differ;
mod support;

use support::Server;

/// Operations for each release; `LEASEHOLD_DIFFER_OPS` for more.
const OPS: u64 = 6_000;

#[test]
fn every_store_answers_alike() {
    let ops = std::env::var("LEASEHOLD_DIFFER_OPS").ok().and_then(|n| n.parse().ok()).unwrap_or(OPS);
    for (seed, release) in (1..).zip(support::releases()) {
        let server = Server::start(release, &[]);
        let done = differ::run(&server.address(), ops, seed, true);
        println!("{release}: {done:?}, no difference");
    }
}
