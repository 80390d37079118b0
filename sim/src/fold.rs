//! The digest: a rolling hash over everything that happens.
//!
//! What crosses a border of a replica or of the store is folded field by field; what is rare is
//! folded as its debug text.

use std::fmt::Write as _;

use leasehold_core::store::{
    Answer, Commit, Each, Expiry, Guard, Read, Record, ScoreAt, Snapshot, Take, Txn, UpTo, Value, Write,
};
use leasehold_core::{Name, StoreAnswer, StoreOp};
use xxhash_rust::xxh3::Xxh3;

#[derive(Clone)]
pub struct Digest(Xxh3);

impl std::fmt::Debug for Digest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Digest({:016x})", self.value())
    }
}

impl Default for Digest {
    fn default() -> Self {
        Digest(Xxh3::new())
    }
}

impl std::fmt::Write for Digest {
    fn write_str(&mut self, s: &str) -> std::fmt::Result {
        self.0.update(s.as_bytes());
        Ok(())
    }
}

impl Digest {
    pub fn value(&self) -> u64 {
        self.0.digest()
    }

    pub fn num(&mut self, n: u64) {
        self.0.update(&n.to_le_bytes());
    }

    pub fn tag(&mut self, n: u8) {
        self.0.update(&[n]);
    }

    pub fn bytes(&mut self, b: &[u8]) {
        self.num(b.len() as u64);
        self.0.update(b);
    }

    /// Anything rare, by its debug text.
    pub fn text(&mut self, what: &impl std::fmt::Debug) {
        // Writing to a hash cannot fail.
        let _ = write!(self, "{what:?}");
    }

    fn name(&mut self, n: &Name) {
        self.bytes(n);
    }

    pub fn op(&mut self, op: &StoreOp) {
        match op {
            StoreOp::Read(read) => self.read(read),
            StoreOp::Commit(commit) => self.commit(commit),
        }
    }

    fn read(&mut self, read: &Read) {
        self.tag(1);
        self.num(read.records.len() as u64);
        read.records.iter().for_each(|r| self.name(r));
        for slice in &read.slices {
            self.tag(2);
            self.name(&slice.index);
            if let Some((score, member)) = &slice.after {
                self.num(*score);
                self.name(member);
            }
            self.num(match slice.up_to {
                UpTo::End => u64::MAX,
                UpTo::Clock => u64::MAX - 1,
                UpTo::Score(score) => score,
            });
            self.num(slice.limit as u64);
            slice.give.iter().for_each(|g| self.name(g));
        }
        for (index, span) in &read.counts {
            self.tag(3 + *span as u8);
            self.name(index);
        }
        for (index, member) in &read.members {
            self.tag(5);
            self.name(index);
            self.name(member);
        }
        if let Some(log) = &read.log {
            self.name(&log.log);
            self.num(log.after);
            self.num(log.limit as u64);
        }
        if let Some(scan) = &read.scan {
            self.bytes(scan.cursor.as_deref().unwrap_or_default());
            self.num(scan.limit as u64);
        }
        self.num(read.max_bytes as u64);
    }

    fn commit(&mut self, commit: &Commit) {
        self.tag(10 + u8::from(commit.grows));
        commit.txns.iter().for_each(|t| self.txn(t));
    }

    fn txn(&mut self, txn: &Txn) {
        self.num(txn.valid_until);
        for guard in &txn.guards {
            match guard {
                Guard::Absent(key) => {
                    self.tag(20);
                    self.name(key);
                }
                Guard::At(key, version) => {
                    self.tag(21);
                    self.name(key);
                    self.num(version.0);
                }
                Guard::Member(index, member, standing) => {
                    self.tag(22 + *standing as u8);
                    self.name(index);
                    self.name(member);
                }
                Guard::Below(index, span, n) => {
                    self.tag(26 + *span as u8);
                    self.name(index);
                    self.num(*n);
                }
            }
        }
        if let Some(take) = &txn.take {
            self.take(take);
        }
        txn.writes.iter().for_each(|w| self.write(w));
    }

    fn take(&mut self, take: &Take) {
        self.tag(30);
        self.num(take.n as u64);
        for source in &take.from {
            self.name(&source.index);
            self.tag(u8::from(source.due));
            for each in &source.each {
                match each {
                    Each::Add { index, score } => {
                        self.name(index);
                        self.score(score);
                    }
                    Each::Remove { index } => self.name(index),
                    Each::Put { prefix, version, bytes, expiry } => {
                        self.name(prefix);
                        self.num(version.0);
                        self.bytes(bytes);
                        self.expiry(*expiry);
                    }
                    Each::Delete { prefix } => self.name(prefix),
                }
            }
        }
        take.give.iter().for_each(|g| self.name(g));
        self.num(take.max_bytes as u64);
    }

    fn write(&mut self, write: &Write) {
        match write {
            Write::Put { key, version, value, expiry } => {
                self.tag(40);
                self.name(key);
                self.num(version.0);
                match value {
                    Value::Bytes(bytes) => self.bytes(bytes),
                    Value::Taken => self.tag(0),
                }
                self.expiry(*expiry);
            }
            Write::Delete(key) => {
                self.tag(41);
                self.name(key);
            }
            Write::Expire(key, expiry) => {
                self.tag(42);
                self.name(key);
                self.expiry(*expiry);
            }
            Write::Add { index, member, score, raise } => {
                self.tag(43 + u8::from(*raise));
                self.name(index);
                self.name(member);
                self.score(score);
            }
            Write::Remove { index, member } => {
                self.tag(45);
                self.name(index);
                self.name(member);
            }
            Write::Append { log, bytes } => {
                self.tag(46);
                self.name(log);
                self.bytes(bytes);
            }
            Write::Notify(topic) => {
                self.tag(47);
                self.name(topic);
            }
        }
    }

    fn score(&mut self, score: &ScoreAt) {
        match score {
            ScoreAt::Number(n) => self.num(*n),
            ScoreAt::Clock(d) => {
                self.tag(1);
                self.num(*d);
            }
            ScoreAt::Of(index) => self.name(index),
        }
    }

    fn expiry(&mut self, expiry: Expiry) {
        match expiry {
            Expiry::Never => self.tag(0),
            Expiry::At(n) => self.num(n),
            Expiry::Clock(d) => {
                self.tag(1);
                self.num(d);
            }
        }
    }

    pub fn answer(&mut self, answer: &StoreAnswer) {
        match answer {
            StoreAnswer::Read(snapshot) => self.snapshot(snapshot),
            StoreAnswer::Commit(reply) => {
                self.num(reply.clock);
                for answer in &reply.answers {
                    match answer {
                        Answer::Applied { taken } => {
                            self.tag(50);
                            for t in taken {
                                self.num(u64::from(t.source));
                                self.name(&t.member);
                                self.num(t.score);
                                t.records.iter().for_each(|r| self.record(r));
                            }
                        }
                        Answer::Refused(guard) => {
                            self.tag(51);
                            self.num(*guard as u64);
                        }
                        Answer::Empty => self.tag(52),
                        Answer::TooLate => self.tag(53),
                    }
                }
            }
        }
    }

    fn snapshot(&mut self, snapshot: &Snapshot) {
        self.num(snapshot.clock);
        snapshot.records.iter().for_each(|r| self.record(r));
        for slice in &snapshot.slices {
            self.num(slice.len() as u64);
            for entry in slice {
                self.name(&entry.member);
                self.num(entry.score);
                entry.records.iter().for_each(|r| self.record(r));
            }
        }
        snapshot.counts.iter().for_each(|n| self.num(*n));
        for place in &snapshot.members {
            match place {
                None => self.tag(0),
                Some(place) => {
                    self.num(place.score);
                    self.num(place.rank);
                }
            }
        }
        for entry in &snapshot.log {
            self.num(entry.seq);
            entry.items.iter().for_each(|i| self.bytes(&i.bytes));
        }
        if let Some(page) = &snapshot.scan {
            page.keys.iter().for_each(|k| self.name(k));
        }
    }

    fn record(&mut self, record: &Record) {
        match record {
            Record::Absent => self.tag(0),
            Record::Present { version, at, expiry, len, bytes } => {
                self.num(version.0);
                self.num(*at);
                self.num(expiry.unwrap_or(0));
                self.num(*len as u64);
                self.tag(u8::from(bytes.is_some()));
            }
        }
    }
}
