//! The model store against a reference that shares nothing with it: plain lists, written straight
//! from the port's documentation. Random reads and commits, compared call by call.

#![allow(clippy::unwrap_used, reason = "a test")]

use std::collections::BTreeMap;

use bytes::Bytes;
use leasehold_core::Name;
use leasehold_core::store::conformance::random;
use leasehold_core::store::model::Model;
use leasehold_core::store::*;
use proptest::prelude::*;

#[derive(Clone)]
struct Kept {
    version: Version,
    at: Clock,
    expiry: Option<Clock>,
    bytes: Bytes,
}

#[derive(Clone, Default)]
struct Naive {
    clock: Clock,
    records: BTreeMap<Name, Kept>,
    /// (index, member, score), in no order.
    members: Vec<(Name, Name, Score)>,
    logs: BTreeMap<Name, Vec<LogEntry>>,
    topics: Vec<Name>,
}

impl Naive {
    fn get(&self, key: &Name) -> Option<&Kept> {
        self.records.get(key).filter(|k| k.expiry.is_none() || k.expiry > Some(self.clock))
    }

    fn score(&self, index: &Name, member: &Name) -> Option<Score> {
        self.members.iter().find(|(i, m, _)| i == index && m == member).map(|x| x.2)
    }

    fn sorted(&self, index: &Name) -> Vec<(Score, Name)> {
        let mut all: Vec<_> = self.members.iter().filter(|x| x.0 == *index).map(|x| (x.2, x.1.clone())).collect();
        all.sort();
        all
    }

    fn count(&self, index: &Name, span: Span) -> u64 {
        let all = self.sorted(index);
        all.iter().filter(|x| span == Span::All || x.0 > self.clock).count() as u64
    }

    fn give(&self, left: &mut Option<usize>, key: &Name) -> Record {
        let Some(kept) = self.get(key) else { return Record::Absent };
        let len = kept.bytes.len();
        let Kept { version, at, expiry, bytes } = kept.clone();
        // `left` is the whole budget until the first record was given.
        let (fits, rest) = match *left {
            Some(left) if len > left => (false, 0),
            Some(left) => (true, left - len),
            None => (true, 0),
        };
        *left = Some(rest);
        Record::Present { version, at, expiry, len, bytes: fits.then_some(bytes) }
    }

    fn budget<T>(&self, max: usize, f: impl FnOnce(&mut dyn FnMut(&Name) -> Record) -> T) -> T {
        let mut left = None;
        f(&mut |key| {
            let first = left.is_none();
            let record = self.give(&mut left, key);
            if first && let Record::Present { len, .. } = record {
                left = Some(max.saturating_sub(len));
            }
            record
        })
    }

    fn read(&self, ask: &Read) -> Snapshot {
        let (records, slices) = self.budget(ask.max_bytes, |give| {
            let records = ask.records.iter().map(&mut *give).collect();
            let mut slices = Vec::new();
            for s in &ask.slices {
                let end = match s.up_to {
                    UpTo::End => u64::MAX,
                    UpTo::Score(n) => n,
                    UpTo::Clock => self.clock,
                };
                let all = self.sorted(&s.index).into_iter();
                let run = all.filter(|x| s.after.as_ref().is_none_or(|a| x > a) && x.0 <= end).take(s.limit);
                slices.push(
                    run.map(|(score, member)| {
                        let records = s.give.iter().map(|p| give(&p.join(&member))).collect();
                        Entry { member, score, records }
                    })
                    .collect(),
                );
            }
            (records, slices)
        });
        let log = ask.log.as_ref().map_or(Vec::new(), |l| {
            let all = self.logs.get(&l.log).into_iter().flatten();
            all.filter(|e| e.seq > l.after).take(l.limit).cloned().collect()
        });
        let place = |(index, member): &(Name, Name)| {
            let score = self.score(index, member)?;
            let rank = self.sorted(index).iter().position(|x| x.1 == *member)? as u64;
            Some(Place { score, rank })
        };
        Snapshot {
            clock: self.clock,
            records,
            slices,
            counts: ask.counts.iter().map(|(i, span)| self.count(i, *span)).collect(),
            members: ask.members.iter().map(place).collect(),
            log,
            scan: None,
        }
    }

    fn holds(&self, guard: &Guard) -> bool {
        match guard {
            Guard::Absent(key) => self.get(key).is_none(),
            Guard::At(key, version) => self.get(key).map(|k| k.version) == Some(*version),
            Guard::Below(index, span, n) => self.count(index, *span) < *n,
            Guard::Member(index, member, standing) => {
                let score = self.score(index, member);
                match standing {
                    Standing::Out => score.is_none(),
                    Standing::First => self.sorted(index).first().map(|x| &x.1) == Some(member),
                    Standing::Live => score > Some(self.clock),
                    Standing::Due => score.is_some() && score <= Some(self.clock),
                }
            }
        }
    }

    fn commit(&mut self, commit: &Commit) -> CommitReply {
        let mut appended: BTreeMap<Name, Vec<LogItem>> = BTreeMap::new();
        let answers = commit.txns.iter().map(|t| self.txn(t, &mut appended)).collect();
        for (name, items) in appended {
            let log = self.logs.entry(name).or_default();
            log.push(LogEntry { seq: log.len() as u64 + 1, at: self.clock, items });
        }
        CommitReply { clock: self.clock, answers }
    }

    fn plus(&self, d: u64) -> u64 {
        (u128::from(self.clock) + u128::from(d)).min(u128::from(SCORE_MAX)) as u64
    }

    fn put(&mut self, key: Name, version: Version, bytes: Bytes, expiry: Expiry) {
        let expiry = match expiry {
            Expiry::Never => None,
            Expiry::At(n) => Some(n.min(SCORE_MAX)),
            Expiry::Clock(d) => Some(self.plus(d)),
        };
        self.records.insert(key, Kept { version, at: self.clock, expiry, bytes });
    }

    fn set(&mut self, index: &Name, member: &Name, score: Option<Score>) {
        self.members.retain(|x| x.0 != *index || x.1 != *member);
        self.members.extend(score.map(|s| (index.clone(), member.clone(), s)));
    }

    /// `before` is the store as it was before the transaction.
    fn resolve(&self, score: &ScoreAt, before: &Naive, member: &Name) -> Score {
        match score {
            ScoreAt::Number(n) => (*n).min(SCORE_MAX),
            ScoreAt::Clock(d) => self.plus(*d),
            ScoreAt::Of(index) => before.score(index, member).unwrap_or(self.clock),
        }
    }

    fn txn(&mut self, txn: &Txn, appended: &mut BTreeMap<Name, Vec<LogItem>>) -> Answer {
        if txn.valid_until < self.clock {
            return Answer::TooLate;
        }
        if let Some(at) = txn.guards.iter().position(|g| !self.holds(g)) {
            return Answer::Refused(at);
        }
        let before = self.clone();
        let mut taken = Vec::new();
        if let Some(take) = &txn.take {
            taken = before.budget(take.max_bytes, |give| {
                let mut all = Vec::new();
                for (at, source) in take.from.iter().enumerate() {
                    let members = before.sorted(&source.index).into_iter();
                    all.extend(members.filter(|x| !source.due || x.0 <= before.clock).map(|x| (at, x)));
                }
                all.into_iter()
                    .take(take.n)
                    .map(|(at, (score, member))| {
                        let records = take.give.iter().map(|p| give(&p.join(&member))).collect();
                        Taken { source: at as u32, member, score, records }
                    })
                    .collect()
            });
            if taken.is_empty() {
                return Answer::Empty;
            }
            for t in &taken {
                let source = &take.from[t.source as usize];
                self.set(&source.index, &t.member, None);
                for each in &source.each {
                    match each {
                        Each::Add { index, score } => {
                            let score = self.resolve(score, &before, &t.member);
                            self.set(index, &t.member, Some(score));
                        }
                        Each::Remove { index } => self.set(index, &t.member, None),
                        Each::Put { prefix, version, bytes, expiry } => {
                            self.put(prefix.join(&t.member), *version, bytes.clone(), *expiry);
                        }
                        Each::Delete { prefix } => {
                            self.records.remove(&prefix.join(&t.member));
                        }
                    }
                }
            }
        }
        let members: Vec<TakenMember> =
            taken.iter().map(|t| TakenMember { source: t.source, member: t.member.clone(), score: t.score }).collect();
        for write in &txn.writes {
            match write {
                Write::Put { key, version, value, expiry } => {
                    let bytes = match value {
                        Value::Bytes(bytes) => bytes.clone(),
                        Value::Taken => encode_taken(&members),
                    };
                    self.put(key.clone(), *version, bytes, *expiry);
                }
                Write::Delete(key) => {
                    self.records.remove(key);
                }
                Write::Expire(key, expiry) => {
                    if let Some(Kept { version, at, bytes, .. }) = self.get(key).cloned() {
                        self.put(key.clone(), version, bytes, *expiry);
                        self.records.get_mut(key).unwrap().at = at;
                    }
                }
                Write::Add { index, member, score, raise } => {
                    let score = self.resolve(score, &before, member);
                    let now = self.score(index, member).filter(|now| *raise && *now > score);
                    self.set(index, member, Some(now.unwrap_or(score)));
                }
                Write::Remove { index, member } => self.set(index, member, None),
                Write::Append { log, bytes } => {
                    let item = LogItem { bytes: bytes.clone(), taken: members.clone() };
                    appended.entry(log.clone()).or_default().push(item);
                }
                Write::Notify(topic) => self.topics.push(topic.clone()),
            }
        }
        Answer::Applied { taken }
    }
}

/// A call by its seed, and how far the clock moves before it.
fn calls() -> impl Strategy<Value = Vec<(u64, bool, u64)>> {
    proptest::collection::vec((any::<u64>(), prop::bool::weighted(0.6), 0u64..4), 1..120)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]
    #[test]
    fn the_model_answers_as_the_documentation_says(calls in calls()) {
        let mut clock = 1_000 * random::STEP;
        let mut model = Model::new(clock);
        let mut naive = Naive { clock, ..Naive::default() };
        for (seed, is_commit, steps) in calls {
            clock += steps * random::STEP;
            model.set_clock(clock);
            naive.clock = clock;
            if is_commit {
                let commit = if seed % 16 == 0 { random::large_commit(seed, clock) } else { random::commit(seed, clock) };
                let expect = naive.commit(&commit);
                let reply = model.commit(&commit).unwrap();
                prop_assert_eq!(reply, expect, "{:#?}", commit);
                let mut topics = model.notified();
                topics.sort();
                let mut expect = std::mem::take(&mut naive.topics);
                expect.sort();
                expect.dedup();
                prop_assert_eq!(topics, expect);
            } else {
                let ask = if seed % 16 == 0 { random::large_read(seed, clock) } else { random::read(seed, clock) };
                prop_assert_eq!(model.read(&ask).unwrap(), naive.read(&ask), "{:#?}", ask);
            }
        }
        for ask in random::everything() {
            prop_assert_eq!(model.read(&ask).unwrap(), naive.read(&ask));
        }
    }

    /// Garbage collection is never noticed.
    #[test]
    fn collecting_what_has_expired_changes_no_answer(calls in calls()) {
        let mut clock = 1_000 * random::STEP;
        let mut kept = Model::new(clock);
        let mut collected = Model::new(clock);
        for (seed, is_commit, steps) in calls {
            clock += steps * random::STEP;
            kept.set_clock(clock);
            collected.set_clock(clock);
            collected.collect_garbage();
            if is_commit {
                let commit = random::commit(seed, clock);
                prop_assert_eq!(kept.commit(&commit), collected.commit(&commit));
            } else {
                let ask = random::read(seed, clock);
                prop_assert_eq!(kept.read(&ask), collected.read(&ask));
            }
        }
    }

    /// Losing the newest commits leaves exactly what was there before them.
    #[test]
    fn losing_commits_restores_what_was_before(calls in calls(), lost in 1usize..60) {
        let clock = 1_000 * random::STEP;
        let mut model = Model::new(clock);
        let dump = |m: &mut Model| random::everything().iter().map(|r| m.read(r).unwrap()).collect::<Vec<_>>();
        let mut states = vec![dump(&mut model)];
        for (seed, _, _) in &calls {
            model.commit(&random::commit(*seed, clock)).unwrap();
            states.push(dump(&mut model));
        }
        let lost = model.lose_newest(lost);
        prop_assert_eq!(&dump(&mut model), &states[states.len() - 1 - lost]);
    }
}
