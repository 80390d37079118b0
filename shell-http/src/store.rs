//! The stores that the driver can run on, by their address.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

pub use leasehold_disk::Event;

use leasehold_core::store::Store as _;
use leasehold_core::store::model::Model;
use leasehold_core::{StoreAnswer, StoreId, StoreOp};
use leasehold_disk::{DiskStore, Options};

use crate::driver::Deliver;

/// A store that is served by messages: every call sent is answered by exactly one event.
pub trait StoreHandle: Send + 'static {
    /// False: the call was not taken, and nothing will be delivered for it.
    fn send(&self, id: StoreId, op: StoreOp) -> bool;
    /// Why the store does not work at present, if so.
    fn poisoned(&self) -> Option<String>;
    /// What is wrong with how the store is set up, if anything: it works for now.
    fn warning(&self) -> Option<String> {
        None
    }
    /// Where it keeps its files, if it has any.
    fn folder(&self) -> Option<PathBuf>;
    /// Finishes what was sent and makes it durable.
    fn close(self);
}

/// Where a store is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A folder.
    Disk(String),
    /// A Redis or Valkey, which several servers may share.
    Redis(leasehold_redis::Address),
    /// In memory: nothing is kept.
    Memory,
}

impl std::str::FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            Some(("disk", "")) => Err("`disk:` needs a folder: disk:./leasehold-data".into()),
            Some(("disk", path)) => Ok(Address::Disk(path.into())),
            Some(("redis", _)) => Ok(Address::Redis(text.parse()?)),
            Some(("mem", "")) => Ok(Address::Memory),
            _ => Err(format!(
                "`{}` is not a store: disk:FOLDER keeps jobs in a folder, redis://HOST:PORT/DB on a Redis, mem: keeps nothing",
                without_password(text)
            )),
        }
    }
}

/// What was meant as an address may hold a password, and what is said of it may go to a log.
fn without_password(text: &str) -> String {
    match text.rsplit_once('@') {
        Some((before, host)) => {
            let scheme = before.find("://").map_or("", |at| &before[..at + 3]);
            format!("{scheme}***@{host}")
        }
        None => text.to_owned(),
    }
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Address::Disk(path) => write!(f, "disk:{path}"),
            Address::Redis(address) => write!(f, "{address}"),
            Address::Memory => f.write_str("mem:"),
        }
    }
}

/// Any of the stores.
#[derive(Debug)]
pub enum AnyStore {
    Disk { handle: leasehold_disk::Handle, folder: PathBuf },
    Redis(leasehold_redis::Handle),
    Memory(Memory),
}

impl AnyStore {
    pub fn open(address: &Address, redis: &leasehold_redis::Options, deliver: Deliver) -> std::io::Result<AnyStore> {
        match address {
            Address::Disk(path) => {
                let store = DiskStore::open(path, Options::default())
                    .map_err(|e| std::io::Error::other(format!("the store in `{path}` cannot be opened: {e}")))?;
                let handle = leasehold_disk::spawn(store, move |events| deliver.deliver(events));
                Ok(AnyStore::Disk { handle, folder: path.into() })
            }
            Address::Redis(address) => {
                let deliver = move |events: Vec<_>| deliver.deliver(events.into_iter().map(event).collect());
                let handle = leasehold_redis::spawn(address, redis.clone(), deliver)
                    .map_err(|e| std::io::Error::other(format!("the store at `{address}` cannot be used: {e}")))?;
                Ok(AnyStore::Redis(handle))
            }
            Address::Memory => Ok(AnyStore::Memory(Memory::new(deliver))),
        }
    }
}

fn event(event: leasehold_redis::Event) -> Event {
    match event {
        leasehold_redis::Event::Reply { id, reply } => Event::Reply { id, reply },
        leasehold_redis::Event::Notified(topic) => Event::Notified(topic),
        leasehold_redis::Event::Damaged(name) => Event::Damaged(name),
    }
}

impl StoreHandle for AnyStore {
    fn send(&self, id: StoreId, op: StoreOp) -> bool {
        match self {
            AnyStore::Disk { handle, .. } => handle.send(id, op),
            AnyStore::Redis(handle) => handle.send(id, op),
            AnyStore::Memory(memory) => memory.send(id, op),
        }
    }

    fn poisoned(&self) -> Option<String> {
        match self {
            AnyStore::Disk { handle, .. } => handle.poisoned(),
            AnyStore::Redis(handle) => handle.is_gone().then(|| "the store's thread has ended".into()),
            AnyStore::Memory(_) => None,
        }
    }

    fn warning(&self) -> Option<String> {
        match self {
            AnyStore::Redis(handle) => handle.condition().warning,
            AnyStore::Disk { .. } | AnyStore::Memory(_) => None,
        }
    }

    fn folder(&self) -> Option<PathBuf> {
        match self {
            AnyStore::Disk { folder, .. } => Some(folder.clone()),
            AnyStore::Redis(_) | AnyStore::Memory(_) => None,
        }
    }

    fn close(self) {
        match self {
            AnyStore::Disk { handle, .. } => handle.close(),
            AnyStore::Redis(handle) => handle.close(),
            AnyStore::Memory(_) => {}
        }
    }
}

/// The core's model on the wall clock, for tests and for trying things out.
#[derive(Debug)]
pub struct Memory {
    model: Mutex<Model>,
    deliver: Arc<Deliver>,
}

impl Memory {
    pub fn new(deliver: Deliver) -> Self {
        Memory { model: Mutex::new(Model::new(wall_clock())), deliver: Arc::new(deliver) }
    }

    fn send(&self, id: StoreId, op: StoreOp) -> bool {
        let mut model = self.model.lock().unwrap_or_else(PoisonError::into_inner);
        let clock = model.clock().max(wall_clock());
        model.set_clock(clock);
        let reply = match &op {
            StoreOp::Read(read) => model.read(read).map(StoreAnswer::Read),
            StoreOp::Commit(commit) => model.commit(commit).map(StoreAnswer::Commit),
        };
        let mut events = vec![Event::Reply { id, reply }];
        events.extend(model.notified().into_iter().map(Event::Notified));
        drop(model);
        self.deliver.deliver(events);
        true
    }
}

fn wall_clock() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| u64::try_from(d.as_micros()).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_read_back() {
        for text in ["disk:./leasehold-data", "disk:/var/lib/leasehold", "mem:", "redis://127.0.0.1:6379/2"] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
        }
        for text in ["", "disk", "disk:", "mem:x", "redis:", "/tmp/x"] {
            assert!(text.parse::<Address>().is_err(), "{text}");
        }
    }

    #[test]
    fn no_complaint_tells_a_password() {
        for text in [
            "rediss://me:hunter2@a:6379",
            "Redis://:hunter2@a",
            "redis://:hunter2@a:b",
            "redis://:hunter2@a?x",
            "redis://me:hunter2@",
            "redis:me:hunter2@a",
            "me:hunter2@a",
        ] {
            let why = text.parse::<Address>().unwrap_err();
            assert!(!why.contains("hunter2"), "{why}");
        }
        assert!("rediss://me:hunter2@a:1".parse::<Address>().unwrap_err().contains("`rediss://***@a:1`"));
    }
}
