//! A real store beside the model: it is given everything that the model is given, at the same clock,
//! and must answer the same. The replicas live on its answers; the oracle judges the model.
//!
//! Commits go to it whole, so that its own way of putting transactions together is met. Two things are
//! the model's alone: what logs hold (there each transaction has an entry of its own) and the order of a
//! walk over all records.

use std::collections::BTreeSet;
use std::sync::Arc;

use leasehold_core::Name;
use leasehold_core::store::engine::Stored;
use leasehold_core::store::model::Model;
use leasehold_core::store::{
    Answer, Clock, Commit, Expiry, Read, Record, SCORE_MAX, ScoreAt, Slice, Snapshot, Span, Store as _, Txn, UpTo,
    Value, Write,
};
use leasehold_redis::{Address, ConnectError, Options, RedisStore};

/// Records and entries that are written in one commit when the model has been changed from outside.
const PAGE: usize = 500;

#[derive(Debug)]
pub struct Twin {
    store: RedisStore,
}

impl Twin {
    /// In a namespace of the seed's own, emptied.
    ///
    /// # Errors
    /// The server cannot be used.
    pub fn open(address: &Address, seed: u64) -> Result<Twin, ConnectError> {
        let options = Options { namespace: format!("sim-{seed}"), ..Options::default() };
        let mut store = RedisStore::open(address, options.clone())?;
        store.clear()?;
        let store = RedisStore::open(address, options)?;
        Ok(Twin { store })
    }

    /// Its answer to a read, which must be the model's.
    ///
    /// # Errors
    /// What differs.
    pub fn read(&mut self, clock: Clock, ask: &Read, expect: &Snapshot) -> Result<Snapshot, String> {
        self.store.set_clock(Some(clock));
        let ours = Read { log: None, scan: None, ..ask.clone() };
        let got = self.store.read(&ours).map_err(|e| self.failed(&format!("{e:?}")))?;
        let got = Snapshot { log: expect.log.clone(), scan: expect.scan.clone(), ..got };
        if got == *expect { Ok(got) } else { Err(format!("{ask:?} is answered {got:?}, by the model {expect:?}")) }
    }

    /// Its answers to transactions, which must be the model's.
    ///
    /// # Errors
    /// What differs.
    pub fn commit(&mut self, clock: Clock, commit: &Commit, expect: &[Answer]) -> Result<(), String> {
        self.store.set_clock(Some(clock));
        let got = self.store.commit(commit).map_err(|e| self.failed(&format!("{e:?}")))?;
        if got.clock == clock && got.answers == expect {
            return Ok(());
        }
        Err(format!("{commit:?} is answered {got:?}, by the model {expect:?} at {clock}"))
    }

    /// The model was changed by other means than commits.
    ///
    /// # Errors
    /// It could not follow.
    pub fn follow(&mut self, before: &Model, after: &Model) -> Result<(), String> {
        let keys: BTreeSet<&Name> = before.records(b"").chain(after.records(b"")).map(|(key, _)| key).collect();
        let find = |model: &Model, key: &Name| model.records(key).find(|(k, _)| *k == key).map(|(_, r)| r.clone());
        for key in keys {
            let now = find(after, key);
            if find(before, key) != now {
                self.record(key, now)?;
            }
        }
        let indexes: BTreeSet<&Name> =
            before.books().iter().chain(after.books().iter()).map(|(name, _)| name).collect();
        let mut writes = Vec::new();
        for index in indexes {
            let (old, new) = (before.members(index), after.members(index));
            let (old, new): (BTreeSet<_>, BTreeSet<_>) = (old.into_iter().collect(), new.into_iter().collect());
            let remove = |(_, member): &(u64, Name)| Write::Remove { index: index.clone(), member: member.clone() };
            let add = |(score, member): &(u64, Name)| Write::Add {
                index: index.clone(),
                member: member.clone(),
                score: ScoreAt::Number(*score),
                raise: false,
            };
            writes.extend(old.difference(&new).map(remove));
            writes.extend(new.difference(&old).map(add));
        }
        for page in writes.chunks(PAGE) {
            self.write(after.clock(), page.to_vec())?;
        }
        Ok(())
    }

    /// Puts a record as it is, or takes it away.
    fn record(&mut self, key: &Name, record: Option<Stored>) -> Result<(), String> {
        match record {
            None => self.write(0, vec![Write::Delete(key.clone())]),
            Some(Stored { version, at, expiry, bytes }) => {
                let expiry = expiry.map_or(Expiry::Never, Expiry::At);
                // A record says when it was put.
                self.write(at, vec![Write::Put { key: key.clone(), version, value: Value::Bytes(bytes), expiry }])
            }
        }
    }

    fn write(&mut self, clock: Clock, writes: Vec<Write>) -> Result<(), String> {
        let txn = Txn { valid_until: SCORE_MAX, guards: Vec::new(), take: None, writes };
        self.store.set_clock(Some(clock));
        let done = self.store.commit(&Commit { txns: vec![Arc::new(txn)], grows: false });
        done.map(drop).map_err(|e| self.failed(&format!("{e:?}")))
    }

    /// Compares all there is, and leaves nothing behind.
    ///
    /// # Errors
    /// What differs.
    pub fn end(&mut self, model: &mut Model) -> Result<(), String> {
        let clock = model.clock();
        let keys: Vec<Name> = model.records(b"").map(|(key, _)| key.clone()).collect();
        for page in keys.chunks(PAGE) {
            let ask = Read { records: page.to_vec(), max_bytes: usize::MAX, ..Read::default() };
            self.compare(clock, model, &ask)?;
        }
        let indexes: Vec<Name> = model.books().iter().map(|(name, _)| name.clone()).collect();
        for index in indexes {
            let all =
                Slice { index: index.clone(), after: None, up_to: UpTo::End, limit: usize::MAX, give: Vec::new() };
            let counts = vec![(index.clone(), Span::All), (index, Span::Live)];
            let ask = Read { slices: vec![all], counts, ..Read::default() };
            self.compare(clock, model, &ask)?;
        }
        self.nothing_more(clock, model)?;
        self.store.clear().map_err(|e| e.to_string())
    }

    fn compare(&mut self, clock: Clock, model: &mut Model, ask: &Read) -> Result<(), String> {
        let expect = model.read(ask).map_err(|e| format!("{e:?}"))?;
        self.read(clock, ask, &expect).map(drop)
    }

    /// No record that the model does not know: what has expired may be there or not.
    fn nothing_more(&mut self, clock: Clock, model: &Model) -> Result<(), String> {
        let mut cursor = None;
        loop {
            self.store.set_clock(Some(clock));
            let scan = Some(leasehold_core::store::Scan { cursor, limit: PAGE });
            let found =
                self.store.read(&Read { scan, ..Read::default() }).map_err(|e| self.failed(&format!("{e:?}")))?;
            let Some(page) = found.scan else { return Ok(()) };
            let strange: Vec<Name> = page.keys.into_iter().filter(|k| model.record(k).is_none()).collect();
            let ask = Read { records: strange.clone(), ..Read::default() };
            let records = self.store.read(&ask).map_err(|e| self.failed(&format!("{e:?}")))?.records;
            if let Some((key, _)) = strange.iter().zip(records).find(|(_, r)| *r != Record::Absent) {
                return Err(format!("the model has no record {key}"));
            }
            cursor = page.cursor;
            if cursor.is_none() {
                return Ok(());
            }
        }
    }

    fn failed(&self, error: &str) -> String {
        format!("the store does not answer: {error}, {}", self.store.failure().unwrap_or_default())
    }
}
