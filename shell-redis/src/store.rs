//! The store seen synchronously, on a clock of its owner's if wanted: for tests, for the simulator,
//! and for whoever looks at a namespace from outside.

use leasehold_core::store::{Commit, CommitReply, Read, Snapshot, Store, StoreError};
use leasehold_core::{Name, StoreAnswer, StoreOp};
use tokio::runtime::Runtime;

use crate::call::{Caller, Outcome};
use crate::link::{ConnectError, Link};
use crate::{Address, Options};

/// A connection that waits for each answer.
#[derive(Debug)]
pub struct RedisStore {
    runtime: Runtime,
    options: Options,
    address: Address,
    caller: Caller,
    link: Option<Link>,
    clock: Option<u64>,
    topics: Vec<Name>,
    damaged: Vec<Name>,
    /// What the last call that failed was told.
    failure: Option<String>,
}

impl RedisStore {
    /// Connects.
    ///
    /// # Errors
    /// Each says what to do.
    pub fn open(address: &Address, options: Options) -> Result<RedisStore, ConnectError> {
        options.check().map_err(ConnectError::Refused)?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|e| ConnectError::Unreachable(e.to_string()))?;
        let mut store = RedisStore {
            runtime,
            caller: Caller::new(&options),
            options,
            address: address.clone(),
            link: None,
            clock: None,
            topics: Vec::new(),
            damaged: Vec::new(),
            failure: None,
        };
        store.link = Some(store.connect()?);
        Ok(store)
    }

    /// From now on this is the clock; `None` for the server's own. With a clock that was given,
    /// nothing expires by itself in the server.
    pub fn set_clock(&mut self, clock: Option<u64>) {
        self.clock = clock;
    }

    /// Names of what was found not to be as it was written, since this was last asked.
    pub fn damaged(&mut self) -> Vec<Name> {
        std::mem::take(&mut self.damaged)
    }

    /// What was said when a call last failed.
    pub fn failure(&self) -> Option<&str> {
        self.failure.as_deref()
    }

    /// Deletes every key of the namespace, its own record included: the store must be opened anew.
    ///
    /// # Errors
    /// Some may be left.
    pub fn clear(&mut self) -> Result<(), ConnectError> {
        if self.link.is_none() {
            self.link = Some(self.connect()?);
        }
        let Some(link) = &mut self.link else { return Ok(()) };
        let cleared = self.runtime.block_on(link.clear(&self.caller.layout));
        self.link = None;
        cleared.map_err(|e| ConnectError::Unreachable(e.to_string()))
    }

    fn connect(&self) -> Result<Link, ConnectError> {
        let servers = self.address.servers().map_err(ConnectError::Refused)?;
        let Caller { layout, scripts, .. } = &self.caller;
        self.runtime.block_on(Link::connect(&self.options, layout, scripts, &servers))
    }

    fn perform(&mut self, op: &StoreOp) -> Result<StoreAnswer, StoreError> {
        if self.link.is_none() {
            self.link = Some(self.connect().map_err(|why| {
                self.failure = Some(why.to_string());
                StoreError::Unavailable
            })?);
        }
        let Some(link) = &mut self.link else { return Err(StoreError::Unavailable) };
        let outcome = self.runtime.block_on(self.caller.perform(link, op, self.clock));
        let Outcome { reply, reconnect, why, damaged, topics } = outcome;
        if reconnect {
            self.link = None;
        }
        if why.is_some() {
            self.failure = why;
        }
        self.damaged.extend(damaged);
        for topic in topics {
            if !self.topics.contains(&topic) {
                self.topics.push(topic);
            }
        }
        reply
    }
}

impl Store for RedisStore {
    fn read(&mut self, read: &Read) -> Result<Snapshot, StoreError> {
        match self.perform(&StoreOp::Read(read.clone()))? {
            StoreAnswer::Read(snapshot) => Ok(snapshot),
            StoreAnswer::Commit(_) => Err(StoreError::Unavailable),
        }
    }

    fn commit(&mut self, commit: &Commit) -> Result<CommitReply, StoreError> {
        match self.perform(&StoreOp::Commit(commit.clone()))? {
            StoreAnswer::Commit(reply) => Ok(reply),
            StoreAnswer::Read(_) => Err(StoreError::Unknown),
        }
    }

    /// Only what this store's own commits notified.
    fn notified(&mut self) -> Vec<Name> {
        std::mem::take(&mut self.topics)
    }
}
