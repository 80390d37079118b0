//! The Redis store keeps every law of the port, on each release: with a clock that is handed in, and
//! where that can be told, on the server's own.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]

mod support;

use std::time::Duration;

use leasehold_core::Name;
use leasehold_core::store::conformance::{self, TestStore};
use leasehold_core::store::{Commit, CommitReply, Read, Snapshot, Store, StoreError};
use leasehold_redis::{Options, RedisStore};
use support::Server;

/// A namespace of its own on a server.
struct Fresh<'a> {
    server: &'a Server,
    store: RedisStore,
    clock: Option<u64>,
}

impl Fresh<'_> {
    fn new(server: &Server, clock: Option<u64>) -> Fresh<'_> {
        server.run(&["FLUSHALL"]);
        let mut store = RedisStore::open(&server.address(), Options::default()).unwrap();
        store.set_clock(clock);
        Fresh { server, store, clock }
    }
}

impl Store for Fresh<'_> {
    fn read(&mut self, read: &Read) -> Result<Snapshot, StoreError> {
        let answer = self.store.read(read);
        if answer.is_err() {
            eprintln!("{:?}", self.store.failure());
        }
        answer
    }

    fn commit(&mut self, commit: &Commit) -> Result<CommitReply, StoreError> {
        let answer = self.store.commit(commit);
        if answer.is_err() {
            eprintln!("{:?}", self.store.failure());
        }
        answer
    }

    fn notified(&mut self) -> Vec<Name> {
        self.store.notified()
    }
}

impl TestStore for Fresh<'_> {
    fn advance(&mut self, micros: u64) {
        match &mut self.clock {
            Some(clock) => {
                *clock += micros;
                self.store.set_clock(Some(*clock));
            }
            None => std::thread::sleep(Duration::from_micros(micros)),
        }
    }

    fn frozen(&self) -> bool {
        self.clock.is_some()
    }

    fn set_full(&mut self, full: bool) -> bool {
        self.server.run(&["CONFIG", "SET", "maxmemory", if full { "1" } else { "0" }]);
        true
    }
}

#[test]
fn on_a_clock_that_is_handed_in() {
    for release in support::releases() {
        eprintln!("{release}");
        let server = Server::start(release, &[]);
        conformance::run(|| Fresh::new(&server, Some(1_700_000_000_000_000)));
    }
}

#[test]
fn on_the_servers_clock() {
    for release in support::releases() {
        eprintln!("{release}");
        let server = Server::start(release, &[]);
        conformance::run(|| Fresh::new(&server, None));
    }
}
