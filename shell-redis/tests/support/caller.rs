//! A store's handle, called and waited for.

use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use leasehold_core::store::{
    Answer, Commit, CommitReply, Expiry, Guard, Read, Record, SCORE_MAX, Snapshot, StoreError, Txn, Value, Version,
    Write,
};
use leasehold_core::{Name, StoreAnswer, StoreId, StoreOp};
use leasehold_redis::{ConnectError, Event, Handle, Options, spawn};

pub struct Caller {
    pub handle: Handle,
    events: Receiver<Event>,
    next: u64,
    pub notified: Vec<Name>,
    pub damaged: Vec<Name>,
}

impl Caller {
    pub fn new(url: &str, options: Options) -> Result<Caller, ConnectError> {
        let (sender, events) = channel();
        let sender = Arc::new(Mutex::new(sender));
        let deliver = move |batch: Vec<Event>| {
            let sender = sender.lock().unwrap();
            // Who no longer listens needs no answer.
            batch.into_iter().for_each(|e| drop(sender.send(e)));
        };
        let handle = spawn(&url.parse().unwrap(), options, deliver)?;
        Ok(Caller { handle, events, next: 0, notified: Vec::new(), damaged: Vec::new() })
    }

    pub fn send(&mut self, op: StoreOp) -> StoreId {
        self.next += 1;
        let id = StoreId(self.next);
        assert!(self.handle.send(id, op), "the thread is there");
        id
    }

    /// The answer to a call; notifications on the way are kept.
    pub fn answer(&mut self, want: StoreId) -> Result<StoreAnswer, StoreError> {
        loop {
            match self.events.recv_timeout(super::PATIENCE) {
                Ok(Event::Reply { id, reply }) if id == want => return reply,
                Ok(Event::Reply { .. }) => {}
                Ok(Event::Notified(topic)) => self.notified.push(topic),
                Ok(Event::Damaged(name)) => self.damaged.push(name),
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => panic!("no answer to {want:?}"),
            }
        }
    }

    pub fn commit(&mut self, commit: Commit) -> Result<CommitReply, StoreError> {
        let id = self.send(StoreOp::Commit(commit));
        self.answer(id).map(|a| match a {
            StoreAnswer::Commit(reply) => reply,
            StoreAnswer::Read(_) => panic!("not an answer to a commit"),
        })
    }

    pub fn read(&mut self, read: Read) -> Result<Snapshot, StoreError> {
        let id = self.send(StoreOp::Read(read));
        self.answer(id).map(|a| match a {
            StoreAnswer::Read(snapshot) => snapshot,
            StoreAnswer::Commit(_) => panic!("not an answer to a read"),
        })
    }

    pub fn record(&mut self, key: &str) -> Result<Record, StoreError> {
        let read = Read { records: vec![Name::from(key)], ..Read::default() };
        self.read(read).map(|mut s| s.records.remove(0))
    }

    /// Until the store answers again; what it answers meanwhile must be that it certainly does not.
    pub fn recovers(&mut self) {
        super::wait_for("the store answers again", || match self.read(Read::default()) {
            Ok(_) => Some(()),
            Err(error) => {
                assert_eq!(error, StoreError::Unavailable);
                None
            }
        });
    }

    /// Takes what was notified, waiting a moment for it.
    pub fn hears(&mut self, wait: Duration) -> Vec<Name> {
        while let Ok(event) = self.events.recv_timeout(wait) {
            if let Event::Notified(topic) = event {
                self.notified.push(topic);
                break;
            }
        }
        std::mem::take(&mut self.notified)
    }
}

/// A record under a key, made once.
pub fn create(key: &str, version: u64) -> Txn {
    let value = Value::Bytes(bytes::Bytes::from_static(b"x"));
    let key = Name::from(key);
    Txn {
        valid_until: SCORE_MAX,
        guards: vec![Guard::Absent(key.clone())],
        take: None,
        writes: vec![Write::Put { key, version: Version(version), value, expiry: Expiry::Never }],
    }
}

pub fn write(writes: Vec<Write>) -> Txn {
    Txn { valid_until: SCORE_MAX, guards: Vec::new(), take: None, writes }
}

pub fn commit(txns: Vec<Txn>, grows: bool) -> Commit {
    Commit { txns: txns.into_iter().map(Arc::new).collect(), grows }
}

pub fn applied(reply: Result<CommitReply, StoreError>) -> bool {
    let reply = reply.unwrap();
    reply.answers.iter().all(|a| matches!(a, Answer::Applied { .. }))
}
