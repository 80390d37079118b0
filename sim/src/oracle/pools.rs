//! Pools: who holds, who waits, and whether every grant was one that could be made. Followed change by change
//! from the records and indexes alone.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use leasehold_core::Name;
use leasehold_core::codec;
use leasehold_core::job::record::Class;
use leasehold_core::pool::record::{Pool, Slot, SlotState};
use leasehold_core::store::engine::{Change, Effects, Stored};
use leasehold_core::store::model::Model;
use leasehold_core::store::{Clock, Score, Version, keys};

use super::facts::Rec;
use super::{Oracle, Promise, Violation, broken, object};
use crate::calls::{CallId, Fate, ItemRef, Ledger};

/// A slot that was granted.
#[derive(Clone, Debug)]
pub(super) struct Held {
    /// From which change on.
    pub since: u64,
    /// Every end that it has had.
    pub ends: BTreeSet<Score>,
    /// The change by which it was given back.
    pub over: Option<u64>,
    pub told: BTreeSet<CallId>,
    pub slot: Arc<Slot>,
}

#[derive(Clone, Debug, Default)]
pub(super) struct PoolFacts {
    pub record: Option<Rec<Pool>>,
    /// From which change on it was there or not.
    pub moments: Vec<(u64, bool)>,
    pub slots: BTreeMap<Name, Rec<Arc<Slot>>>,
    pub holders: BTreeMap<Name, Score>,
    pub batch: BTreeMap<Name, Score>,
    pub waiting: BTreeMap<Class, BTreeMap<Name, Score>>,
    pub alive: BTreeMap<Class, BTreeMap<Name, Score>>,
    pub held: BTreeMap<(Name, Version), Held>,
    /// From which change on each waited.
    pub began: BTreeMap<(Name, Version), u64>,
    /// A fault took something of it: its books need not balance any more, and its line may have gaps. Its
    /// limits are held nevertheless, and nothing comes back.
    pub disturbed: bool,
    /// Slots whose record a fault took.
    pub taken: BTreeSet<Name>,
    /// Units that jobs ever held.
    pub entered: BTreeSet<Name>,
    /// Who could be granted a slot, and since when.
    could: Option<(Name, Clock)>,
}

/// Which index of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Of {
    Holders,
    Batch,
    Waiting(Class),
    Alive(Class),
}

fn index_of(index: &Name) -> Option<(String, Of)> {
    let mut parts = index.as_str()?.split('/');
    let kind = parts.next()?;
    let pool = keys::pool_of(&Name::from(parts.next()?))?;
    let class = parts.next().and_then(Class::parse);
    let of = match (kind, class) {
        ("holders", None) => Of::Holders,
        ("batch", None) => Of::Batch,
        ("waiting", Some(class)) => Of::Waiting(class),
        ("alive", Some(class)) => Of::Alive(class),
        _ => return None,
    };
    Some((pool, of))
}

/// The pool of a record, and the slot's member if it is one.
fn record_of(key: &Name) -> Option<(String, Option<Name>)> {
    let (prefix, rest) = key.as_str()?.split_once('/')?;
    match prefix {
        "pool" => Some((keys::pool_of(&Name::from(rest))?, None)),
        "slot" => {
            let (pool, member) = rest.split_once('/')?;
            Some((keys::pool_of(&Name::from(pool))?, Some(Name::from(member))))
        }
        _ => None,
    }
}

fn read<T>(stored: &Stored, value: Option<T>) -> Rec<T> {
    Rec { version: stored.version, at: stored.at, expiry: stored.expiry, value }
}

fn set(map: &mut BTreeMap<Name, Score>, member: &Name, score: Option<Score>) {
    match score {
        Some(score) => map.insert(member.clone(), score),
        None => map.remove(member),
    };
}

pub(super) fn live(map: &BTreeMap<Name, Score>, clock: Clock) -> usize {
    map.values().filter(|score| **score > clock).count()
}

impl PoolFacts {
    pub fn settings(&self, clock: Clock) -> Option<&Pool> {
        self.record.as_ref().filter(|r| r.lives(clock))?.value.as_ref().filter(|p| !p.deleted)
    }

    /// A slot's record, unless it has expired.
    pub fn slot(&self, member: &Name, clock: Clock) -> Option<&Arc<Slot>> {
        self.slots.get(member).filter(|r| r.lives(clock))?.value.as_ref()
    }

    pub(super) fn line(&self, class: Class) -> impl Iterator<Item = (&Name, Score)> {
        self.waiting.get(&class).into_iter().flatten().map(|(member, score)| (member, *score))
    }

    pub(super) fn is_there(&self, class: Class, member: &Name, clock: Clock) -> bool {
        self.alive.get(&class).and_then(|a| a.get(member)).is_some_and(|end| *end > clock)
    }

    fn index(&self, of: Of) -> Option<&BTreeMap<Name, Score>> {
        match of {
            Of::Holders => Some(&self.holders),
            Of::Batch => Some(&self.batch),
            Of::Waiting(class) => self.waiting.get(&class),
            Of::Alive(class) => self.alive.get(&class),
        }
    }

    /// Version and expiry of a slot's record, or of the pool's own.
    fn version(&self, slot: Option<&Name>) -> Option<(Version, Option<Clock>)> {
        match slot {
            Some(member) => self.slots.get(member).map(|r| (r.version, r.expiry)),
            None => self.record.as_ref().map(|r| (r.version, r.expiry)),
        }
    }

    fn score(&self, of: Of, member: &Name) -> Option<Score> {
        self.index(of)?.get(member).copied()
    }

    fn enter(&mut self, of: Of, member: &Name, score: Option<Score>) {
        match of {
            Of::Holders => set(&mut self.holders, member, score),
            Of::Batch => set(&mut self.batch, member, score),
            Of::Waiting(class) => set(self.waiting.entry(class).or_default(), member, score),
            Of::Alive(class) => set(self.alive.entry(class).or_default(), member, score),
        }
    }

    fn take(&mut self, slot: Option<&Name>, stored: Option<&Stored>, change: u64) {
        match slot {
            None => {
                self.record = stored.map(|s| read(s, codec::decode::<Pool>(&s.bytes).ok()));
                let there = self.record.as_ref().is_some_and(|r| r.value.as_ref().is_some_and(|p| !p.deleted));
                self.moments.push((change, there));
            }
            Some(member) => {
                let record = stored.map(|s| read(s, codec::decode::<Slot>(&s.bytes).ok().map(Arc::new)));
                match record {
                    Some(record) => self.slots.insert(member.clone(), record),
                    None => self.slots.remove(member),
                };
            }
        }
    }

    /// Units of one slot in an index, with their ends.
    pub(super) fn units<'a>(map: &'a BTreeMap<Name, Score>, member: &Name) -> Vec<(Version, u32, Score)> {
        let prefix = member.join(b"/");
        let from = map.range::<Name, _>(prefix.clone()..);
        let of = from.take_while(|(unit, _): &(&'a Name, _)| unit.starts_with(&prefix));
        of.filter_map(|(unit, score)| keys::holder_of(unit).map(|(_, nonce, n)| (nonce, n, *score))).collect()
    }

    /// Whether a slot stands where its record says.
    fn balanced(&self, member: &Name, clock: Clock) -> Result<(), String> {
        let slot = self.slot(member, clock);
        let (held, batch) = (PoolFacts::units(&self.holders, member), PoolFacts::units(&self.batch, member));
        for class in Class::ALL {
            let place = self.waiting.get(&class).and_then(|w| w.get(member));
            let deadline = self.alive.get(&class).and_then(|a| a.get(member));
            let expected = match slot.map(|s| (s.class, s.state)) {
                Some((own, SlotState::Waiting { since })) if own == class => Some(since),
                _ => None,
            };
            // Whoever is past its deadline may have outlived its record.
            let forsaken = expected.is_none() && deadline.is_some_and(|d| *d <= clock) && slot.is_none();
            if !forsaken && (place.copied() != expected || deadline.is_some() != expected.is_some()) {
                return Err(format!("stands in line {place:?} until {deadline:?}, its record says {slot:?}"));
            }
        }
        let past = |units: &[(Version, u32, Score)]| units.iter().all(|(.., end)| *end <= clock);
        let Some(slot) = slot.filter(|s| s.state.is_held()) else {
            return if past(&held) && past(&batch) { Ok(()) } else { Err("holds what was not granted".into()) };
        };
        if past(&held) && past(&batch) {
            return Ok(());
        }
        // What is left of an earlier grant of the name is past its time, and counts for nothing.
        let end = held.iter().map(|u| u.2).find(|end| *end > clock);
        let wanted: BTreeSet<(Version, u32)> = (1..=slot.cost).map(|n| (slot.nonce, n)).collect();
        let has = |units: &[(Version, u32, Score)]| -> BTreeSet<(Version, u32)> {
            units.iter().filter(|u| u.2 > clock && Some(u.2) == end).map(|u| (u.0, u.1)).collect()
        };
        let in_batch = if slot.class == Class::Batch { wanted.clone() } else { BTreeSet::new() };
        match has(&held) == wanted && has(&batch) == in_batch {
            true => Ok(()),
            false => Err(format!("holds {held:?} and of class batch {batch:?}, its record says {slot:?}")),
        }
    }

    /// Who could be granted a slot now, if anybody waits who could.
    fn could_go(&self, clock: Clock) -> Option<Name> {
        let pool = self.settings(clock)?;
        for class in Class::ALL {
            let there = self.line(class).filter(|(member, _)| self.is_there(class, member, clock));
            let Some((member, _)) = there.min_by_key(|(member, since)| (*since, (*member).clone())) else { continue };
            let slot = self.slot(member, clock)?;
            let fits = |map, most: u32| live(map, clock) + slot.cost as usize <= most as usize;
            let batch = class != Class::Batch || fits(&self.batch, pool.batch_max.unwrap_or(pool.total));
            return (fits(&self.holders, pool.total) && batch).then(|| member.clone());
        }
        None
    }
}

/// What one transaction did to one pool.
#[derive(Debug, Default)]
struct Moves {
    records: Vec<(Name, Option<Rec<Arc<Slot>>>)>,
    /// Units that were entered, moved, or taken out: before and after.
    units: Vec<(Name, Option<Score>, Option<Score>)>,
    /// Deadlines of those who left the line.
    left: BTreeMap<Name, Score>,
    touched: BTreeSet<Name>,
    /// As it was.
    before: PoolFacts,
}

impl Oracle {
    /// Takes over and judges what a transaction did to pools.
    pub(super) fn judge_pools(&mut self, effects: &Effects, clock: Clock, ledger: &Ledger) -> Result<(), Violation> {
        let mut moves: BTreeMap<String, Moves> = BTreeMap::new();
        for change in &effects.changes {
            let (pool, record, of) = match change {
                Change::Record { key, .. } => match record_of(key) {
                    Some((pool, member)) => (pool, Some(member), None),
                    None => continue,
                },
                Change::Member { index, .. } => match index_of(index) {
                    Some((pool, of)) => (pool, None, Some(of)),
                    None => continue,
                },
            };
            let facts = self.pools.entry(pool.clone()).or_default();
            let moved = moves.entry(pool).or_insert_with(|| Moves { before: facts.clone(), ..Moves::default() });
            match change {
                Change::Record { key, old, new } => {
                    let member = record.flatten();
                    let known = facts
                        .version(member.as_ref())
                        .filter(|(_, end)| old.is_some() || end.is_none_or(|e| e > clock));
                    let (known, old) = (known.map(|(version, _)| version), old.as_ref().map(|s| s.version));
                    if known != old {
                        let what = format!("{key} was {known:?} and is found to be {old:?}");
                        return broken(Promise::AckedNeverLost, format!("the store changed without a commit: {what}"));
                    }
                    if let Some(member) = &member {
                        moved.records.push((member.clone(), facts.slots.get(member).cloned()));
                        moved.touched.insert(member.clone());
                    }
                    facts.take(member.as_ref(), new.as_ref(), self.change);
                }
                Change::Member { index, member, old, new } => {
                    let Some(of) = of else { continue };
                    let known = facts.score(of, member);
                    if known != *old {
                        let what = format!("{member} in {index} was @{known:?} and is found @{old:?}");
                        return broken(Promise::AckedNeverLost, format!("the store changed without a commit: {what}"));
                    }
                    facts.enter(of, member, *new);
                    let slot = match of {
                        Of::Holders => {
                            moved.units.push((member.clone(), *old, *new));
                            keys::holder_of(member).map(|(slot, ..)| slot)
                        }
                        Of::Batch => keys::holder_of(member).map(|(slot, ..)| slot),
                        Of::Waiting(_) => Some(member.clone()),
                        Of::Alive(_) => {
                            if let (Some(old), None) = (old, new) {
                                moved.left.insert(member.clone(), *old);
                            }
                            Some(member.clone())
                        }
                    };
                    moved.touched.extend(slot);
                }
            }
        }
        for (name, moved) in moves {
            self.judge_pool(&name, &moved, clock, ledger)?;
        }
        Ok(())
    }

    fn judge_pool(&mut self, name: &str, moved: &Moves, clock: Clock, ledger: &Ledger) -> Result<(), Violation> {
        let Some(mut facts) = self.pools.remove(name) else { return Ok(()) };
        let judged = self.judge_moves(name, &mut facts, moved, clock, ledger);
        self.pools.insert(name.to_owned(), facts);
        judged
    }

    fn judge_moves(
        &self,
        name: &str,
        facts: &mut PoolFacts,
        moved: &Moves,
        clock: Clock,
        ledger: &Ledger,
    ) -> Result<(), Violation> {
        let mut granted: BTreeSet<(Name, Version)> = BTreeSet::new();
        let mut over: BTreeSet<Name> = BTreeSet::new();
        let mut declared: BTreeSet<Name> = BTreeSet::new();
        for (member, before) in &moved.records {
            if before.as_ref().map(|r| r.version) == facts.slots.get(member).map(|r| r.version) {
                // Only its expiry.
                continue;
            }
            let before = before.as_ref().filter(|r| r.lives(clock)).and_then(|r| r.value.clone());
            let after = facts.slot(member, clock).cloned();
            let was = before.as_ref().map(|s| s.state);
            match after {
                Some(slot) if slot.state.is_held() => {
                    if slot.state == SlotState::Declared {
                        declared.insert(member.clone());
                    }
                    self.judge_slot_grant(name, facts, moved, member, &slot, before.as_deref(), clock, ledger)?;
                    granted.insert((member.clone(), slot.nonce));
                }
                Some(slot) if slot.state == SlotState::Over => {
                    over.insert(member.clone());
                    self.judge_over(name, facts, moved, member, before.as_deref(), clock)?;
                }
                Some(slot) if was.is_none_or(|was| !matches!(was, SlotState::Waiting { .. })) => {
                    facts.began.insert((member.clone(), slot.nonce), self.change);
                }
                Some(_) => {
                    let what = format!("pool {name}: {member} began to wait anew while it waited");
                    object(Promise::Priority, what)?;
                }
                None => {
                    let there = moved.left.get(member).is_some_and(|end| *end > clock);
                    if there && !facts.disturbed {
                        let what = format!("pool {name}: {member} was taken out of the line though somebody is there");
                        object(Promise::Priority, what)?;
                    }
                }
            }
        }
        for (unit, old, new) in &moved.units {
            let Some((member, nonce, _)) = keys::holder_of(unit) else {
                return broken(Promise::BooksBalance, format!("pool {name}: {unit} is no holder"));
            };
            if let Some(job) = keys::job_of(&member) {
                self.judge_job_unit(name, facts, &moved.before, job, (unit, nonce), (*old, *new), clock)?;
                continue;
            }
            let key = (member.clone(), nonce);
            match (old, new) {
                (None, Some(_)) if !granted.contains(&key) => {
                    let what = format!("pool {name}: {unit} is held again after it had been taken back");
                    object(Promise::SlotNotResurrected, what)?;
                }
                (Some(old), Some(new)) if *old <= clock => {
                    let what = format!("pool {name}: {unit} had come to its end {old} and is held until {new}");
                    object(Promise::SlotNotResurrected, what)?;
                }
                (Some(old), Some(new)) if new < old => {
                    object(Promise::HonestReplies, format!("pool {name}: {unit} was cut from {old} to {new}"))?;
                }
                // What was granted without the store takes the place of a grant of the same name that nobody was told
                // of, or that came of the same wait, which another server went on with.
                (Some(end), None)
                    if *end > clock
                        && !over.contains(&member)
                        && !(declared.contains(&member)
                            && (facts.began.contains_key(&key)
                                || facts.held.get(&key).is_none_or(|h| h.told.is_empty()))) =>
                {
                    let what = format!("pool {name}: {unit} was taken from its holder before its end {end}");
                    object(Promise::BooksBalance, what)?;
                }
                _ => {}
            }
            if let (Some(held), Some(end)) = (facts.held.get_mut(&key), new) {
                held.ends.insert(*end);
            }
        }
        for member in over.iter().chain(&declared) {
            for ((slot, nonce), held) in facts.held.range_mut((member.clone(), Version(0))..) {
                if slot != member {
                    break;
                }
                if !granted.contains(&(slot.clone(), *nonce)) {
                    held.over.get_or_insert(self.change);
                }
            }
        }
        if !facts.disturbed {
            for member in &moved.touched {
                if let Err(what) = self.stands_as_it_says(name, facts, member, clock) {
                    object(Promise::BooksBalance, format!("pool {name}: {member} {what}"))?;
                }
            }
        }
        Ok(())
    }

    #[expect(clippy::too_many_arguments)]
    fn judge_slot_grant(
        &self,
        name: &str,
        facts: &mut PoolFacts,
        moved: &Moves,
        member: &Name,
        slot: &Arc<Slot>,
        before: Option<&Slot>,
        clock: Clock,
        ledger: &Ledger,
    ) -> Result<(), Violation> {
        let key = (member.clone(), slot.nonce);
        // With the record went what refuses a commit that is repeated.
        if facts.held.contains_key(&key) && !self.rewound && !facts.taken.contains(member) {
            let what = format!("pool {name}: {member} was granted a second time: {slot:?}");
            object(Promise::SlotNotResurrected, what)?;
        }
        // limit-held: by what is held at this instant, and by the settings of this instant.
        let Some(pool) = facts.settings(clock) else {
            return broken(Promise::LimitHeld, format!("pool {name}: {member} was granted, but there is no pool"));
        };
        if slot.state == SlotState::Declared {
            // Whoever granted it could ask nobody. Others are granted nothing until there is room again.
            let how = self.fail_open.get(name);
            if how.is_none_or(|how| slot.cost > how.local) {
                object(Promise::LimitHeld, format!("pool {name} is not open, and has {slot:?}"))?;
            }
            if !self.declared.contains(&(name.to_owned(), member.clone(), slot.nonce)) {
                object(Promise::LimitHeld, format!("pool {name}: nobody has declared {slot:?}"))?;
            }
            self.enter_held(facts, key, slot, member);
            return Ok(());
        }
        let (held, batch) = (live(&facts.holders, clock), live(&facts.batch, clock));
        let most = pool.batch_max.unwrap_or(pool.total).min(pool.total) as usize;
        if held > pool.total as usize || slot.class == Class::Batch && batch > most {
            let what = format!("{held} held, {batch} of them by class batch, after {slot:?} was granted of {pool:?}");
            object(Promise::LimitHeld, format!("pool {name}: {what}"))?;
        }
        // priority: whoever is there comes first, by class, then by time.
        let mut waited = None;
        if let Some(before) = before {
            match before.state {
                SlotState::Waiting { since } => waited = Some((since, member)),
                state
                    if state.is_held()
                        && PoolFacts::units(&moved.before.holders, member).iter().any(|u| u.2 > clock) =>
                {
                    let what = format!("pool {name}: {member} was granted while it was held");
                    object(Promise::SlotNotResurrected, what)?;
                }
                SlotState::Granted | SlotState::Declared | SlotState::Over => {}
            }
            let same = (before.nonce, before.class, before.cost) == (slot.nonce, slot.class, slot.cost);
            if waited.is_some() && !same {
                object(Promise::BooksBalance, format!("pool {name}: {before:?} became {slot:?}"))?;
            }
        }
        if !facts.disturbed {
            for class in Class::ALL.into_iter().filter(|c| *c <= slot.class) {
                let first = moved.before.line(class).find(|(other, since)| {
                    let earlier = class < slot.class || waited.is_none_or(|mine| (*since, *other) < mine);
                    *other != member && earlier && moved.before.is_there(class, other, clock)
                });
                if let Some((other, since)) = first {
                    let what = format!("{member} ({waited:?}) was granted while {other} waits since {since}");
                    object(Promise::Priority, format!("pool {name}: {what}"))?;
                }
            }
            let end = clock.saturating_add(slot.lease_ms.saturating_mul(1_000));
            if PoolFacts::units(&facts.holders, member).iter().any(|u| u.0 == slot.nonce && u.2 != end) {
                object(Promise::HonestReplies, format!("pool {name}: {member} was not granted for its length"))?;
            }
        }
        // honest-replies: what was refused for certain has no effect any more.
        let by = slot.holder.as_deref().and_then(ItemRef::find);
        if let Some(by) = by.filter(|by| unnamed(ledger, *by) && !self.rewound && !self.outlived)
            && matches!(ledger.item(by).map(|i| i.fate), Some(Fate::Refused(_)))
        {
            let what = format!("pool {name}: {member} was granted to call {} after it was refused", by.call);
            object(Promise::HonestReplies, what)?;
        }
        self.enter_held(facts, key, slot, member);
        Ok(())
    }

    fn enter_held(&self, facts: &mut PoolFacts, key: (Name, Version), slot: &Arc<Slot>, member: &Name) {
        let end = PoolFacts::units(&facts.holders, member).iter().map(|u| u.2).max();
        let held = Held {
            since: self.change,
            ends: end.into_iter().collect(),
            over: None,
            told: BTreeSet::new(),
            slot: slot.clone(),
        };
        facts.held.insert(key, held);
    }

    fn judge_over(
        &self,
        name: &str,
        facts: &PoolFacts,
        moved: &Moves,
        member: &Name,
        before: Option<&Slot>,
        clock: Clock,
    ) -> Result<(), Violation> {
        let Some(before) = before else { return Ok(()) };
        let was_live = PoolFacts::units(&moved.before.holders, member).iter().any(|u| u.2 > clock);
        let told = facts.held.get(&(member.clone(), before.nonce)).is_some_and(|held| !held.told.is_empty());
        if !before.state.is_held() || !was_live || !told || facts.disturbed || self.rewound {
            return Ok(());
        }
        let asked = self.releases.iter().any(|(pool, slot, nonce)| {
            pool == name && slot == member && nonce.is_none_or(|nonce| nonce == before.nonce)
        });
        if !asked {
            object(Promise::HonestReplies, format!("pool {name}: {member} was given back, but nobody asked"))?;
        }
        Ok(())
    }

    fn stands_as_it_says(&self, name: &str, facts: &PoolFacts, member: &Name, clock: Clock) -> Result<(), String> {
        match keys::job_of(member) {
            Some(job) => self.job_units(name, facts, job, clock),
            None => facts.balanced(member, clock),
        }
    }

    /// Everything about pools, by what the store has.
    pub(super) fn full_pools(&self, model: &Model) -> Result<(), Violation> {
        let clock = model.clock();
        for (name, facts) in self.pools.iter().filter(|(_, facts)| !facts.disturbed) {
            let mut members: BTreeSet<Name> = facts.slots.keys().cloned().collect();
            members.extend(facts.waiting.values().chain(facts.alive.values()).flat_map(|m| m.keys().cloned()));
            let units = facts.holders.keys().chain(facts.batch.keys());
            members.extend(units.filter_map(keys::holder_of).map(|(slot, ..)| slot));
            for member in members {
                if let Err(what) = self.stands_as_it_says(name, facts, &member, clock) {
                    object(Promise::BooksBalance, format!("pool {name}: {member} {what}"))?;
                }
            }
        }
        // Every record and index of every pool is what the commits made of it.
        for (key, stored) in [b"slot/", b"pool/"].into_iter().flat_map(|prefix| model.records(prefix)) {
            let Some((pool, member)) = record_of(key) else { continue };
            let known = self.pools.get(&pool).and_then(|f| f.version(member.as_ref()));
            if known.map(|(version, _)| version) != Some(stored.version) {
                return broken(Promise::AckedNeverLost, format!("{key} changed without a commit: it was {known:?}"));
            }
        }
        let mut known = 0;
        for (index, members) in model.books().iter() {
            let Some((pool, of)) = index_of(index) else { continue };
            known += members.len();
            let facts = self.pools.get(&pool).and_then(|facts| facts.index(of));
            let same = facts.is_some_and(|f| f.iter().map(|(m, s)| (m, *s)).eq(by_name(members)));
            if !same {
                let what = format!("{index} changed without a commit: {facts:?}");
                return broken(Promise::AckedNeverLost, what);
            }
        }
        let maps = |f: &PoolFacts| f.waiting.values().chain(f.alive.values()).map(BTreeMap::len).sum::<usize>();
        let all: usize = self.pools.values().map(|f| f.holders.len() + f.batch.len() + maps(f)).sum();
        if all != known {
            return broken(Promise::AckedNeverLost, format!("pools have {known} entries, and the commits left {all}"));
        }
        Ok(())
    }

    /// A fault took a record or an entry of a pool.
    pub(super) fn disturb_pool(&mut self, key: &Name, member: Option<&Name>) {
        let change = self.change;
        match (member, record_of(key), index_of(key)) {
            (None, Some((pool, slot)), _) => {
                let facts = self.pools.entry(pool).or_default();
                // Nothing but grants depends on the settings.
                facts.disturbed |= slot.is_some();
                facts.taken.extend(slot.clone());
                facts.take(slot.as_ref(), None, change);
            }
            (Some(member), _, Some((pool, of))) => {
                let facts = self.pools.entry(pool).or_default();
                facts.enter(of, member, None);
                facts.disturbed = true;
            }
            _ => {}
        }
    }

    /// The store forgot its newest commits: everything is read anew.
    pub(super) fn rebuild_pools(&mut self, model: &Model) {
        let change = self.change;
        for facts in self.pools.values_mut() {
            let (moments, held) = (std::mem::take(&mut facts.moments), std::mem::take(&mut facts.held));
            let (entered, taken) = (std::mem::take(&mut facts.entered), std::mem::take(&mut facts.taken));
            *facts = PoolFacts { moments, held, entered, taken, disturbed: facts.disturbed, ..PoolFacts::default() };
        }
        for (key, stored) in model.records(b"") {
            let Some((pool, slot)) = record_of(key) else { continue };
            self.pools.entry(pool).or_default().take(slot.as_ref(), Some(stored), change);
        }
        for (index, members) in model.books().iter() {
            let Some((pool, of)) = index_of(index) else { continue };
            let facts = self.pools.entry(pool).or_default();
            members.iter().for_each(|(member, score)| facts.enter(of, member, Some(score)));
        }
        for facts in self.pools.values_mut() {
            if facts.record.is_none() {
                facts.moments.push((change, false));
            }
        }
    }

    /// What is left of the slot that a call asked for which nobody can name but itself.
    pub fn left_by(&self, call: CallId, clock: Clock) -> Option<String> {
        let pools = self.pools.iter().filter(|(_, facts)| !facts.disturbed);
        let mut slots = pools.flat_map(|(name, facts)| facts.slots.keys().map(move |member| (name, facts, member)));
        slots.find_map(|(name, facts, member)| {
            let slot = facts.slot(member, clock).filter(|slot| slot.state != SlotState::Over)?;
            let by = slot.holder.as_deref().and_then(ItemRef::find);
            let live = PoolFacts::units(&facts.holders, member).iter().any(|u| u.2 > clock)
                || facts.is_there(slot.class, member, clock);
            (by?.call == call && live).then(|| format!("pool {name}: {member} is left of call {call}: {slot:?}"))
        })
    }

    // --- what the world asks ------------------------------------------------------------------

    /// Whether a grant was ever in the store.
    pub fn was_held(&self, pool: &str, member: &Name, nonce: Option<Version>) -> bool {
        let facts = self.pools.get(pool);
        let held = |f: &PoolFacts| nonce.is_some_and(|nonce| f.held.contains_key(&(member.clone(), nonce)));
        facts.is_none_or(|f| f.disturbed || held(f))
    }

    /// Whether the store has, or had, that very grant.
    pub fn was_entered(&self, pool: &str, member: &Name, nonce: Option<Version>) -> bool {
        let facts = self.pools.get(pool);
        facts.zip(nonce).is_some_and(|(f, nonce)| f.held.contains_key(&(member.clone(), nonce)))
    }

    /// Whether there was no such pool at some time from that change on.
    pub fn pool_was_absent(&self, pool: &str, since: u64) -> bool {
        self.pools.get(pool).is_none_or(|f| f.was(false, since))
    }

    /// A replica says that it has granted this without the store.
    pub fn declare(&mut self, pool: &str, member: Name, nonce: Version) {
        self.declared.insert((pool.to_owned(), member, nonce));
    }

    pub fn is_declared(&self, pool: &str, member: &Name, nonce: Version) -> bool {
        self.declared.contains(&(pool.to_owned(), member.clone(), nonce))
    }

    /// Whether the store says that a grant is over.
    pub fn is_over(&self, pool: &str, member: &Name, nonce: Option<Version>) -> bool {
        let found = self.pools.get(pool).and_then(|f| f.slots.get(member)).and_then(|r| r.value.as_ref());
        found.is_some_and(|slot| slot.state == SlotState::Over && Some(slot.nonce) == nonce)
    }

    /// Somebody who waits though a slot is there for it, for longer than that.
    pub fn idle_slot(&mut self, clock: Clock, within: u64) -> Option<String> {
        for (name, facts) in self.pools.iter_mut().filter(|(_, facts)| !facts.disturbed) {
            let could = facts.could_go(clock);
            match (&facts.could, could) {
                (Some((member, since)), Some(now)) if *member == now => {
                    if clock.saturating_sub(*since) > within {
                        return Some(format!("pool {name}: {member} could have a slot and waits"));
                    }
                }
                (_, now) => facts.could = now.map(|member| (member, clock)),
            }
        }
        None
    }

    /// Slots that are held or waited for although all users have gone.
    pub fn left_in_pools(&self, clock: Clock) -> Vec<String> {
        let mut left = Vec::new();
        for (name, facts) in &self.pools {
            let held = facts.holders.iter().filter(|(_, end)| **end > clock);
            left.extend(held.map(|(unit, _)| format!("pool {name}: {unit} is held")));
            for class in Class::ALL {
                let there = facts.line(class).filter(|(member, _)| facts.is_there(class, member, clock));
                left.extend(there.map(|(member, _)| format!("pool {name}: {member} waits")));
            }
        }
        left
    }
}

/// The members of an index, in the order of their names.
fn by_name(members: &leasehold_core::store::index::Index) -> impl Iterator<Item = (&Name, Score)> {
    members.iter().collect::<BTreeMap<&Name, Score>>().into_iter()
}

/// Whether the slot that a call asked for has a name of the server's, which nobody else knows.
pub(super) fn unnamed(ledger: &Ledger, by: ItemRef) -> bool {
    use leasehold_core::Request;
    matches!(ledger.request(by), Some(Request::Acquire(asked)) if asked.slot.is_none())
}
