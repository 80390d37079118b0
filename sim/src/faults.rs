//! The large faults: what happens to machines, clocks, links and the store now and then while the
//! chaos lasts. Small ones (a lost envelope) are drawn where the envelope is sent.

use leasehold_core::Name;
use leasehold_core::store::model::Model;

use crate::choices::{Choices as _, Label, Topic};
use crate::oracle::Damage;
use crate::setup::{MILLI, Regime, SECOND};
use crate::tables::Blow;
use crate::world::{Event, Phase, World};

impl World {
    pub fn chaos(&mut self) {
        if self.phase != Phase::Chaos {
            return;
        }
        for r in 0..self.hosts.len() {
            if self.hosts[r].stop_at.is_some_and(|at| at <= self.now) {
                self.hosts[r].stop_at = None;
                let rest = self.hosts[r].stop_rest;
                self.crash(r, Some(rest));
            }
        }
        let at = Topic::Chaos.of(0);
        let f = &self.setup.faults;
        let weights: [(u32, &'static str); 15] = [
            (f.crash, "crash"),
            (f.pause, "pause"),
            (f.cut_store, "cut_store"),
            (f.cut_clients, "cut_clients"),
            (f.store_slow, "store_slow"),
            (f.store_down, "store_down"),
            (f.replica_clock, "replica_clock"),
            (f.store_clock, "store_clock"),
            (f.store_clock_back, "store_clock_back"),
            (f.store_full, "store_full"),
            (f.evict, "evict"),
            (f.drop_entry, "drop_entry"),
            (f.corrupt, "corrupt"),
            (f.lose_commits, "lose_commits"),
            (f.newer, "newer"),
        ];
        let garbage = f.garbage > 0;
        let total: u32 = weights.iter().map(|w| w.0).sum();
        // 0, and so what a silenced draw gives, is no fault at all.
        let mut pick = self.choices.draw(at, u64::from(total) * 5 / 4 + 1);
        let mut chosen = None;
        for (weight, name) in weights {
            let weight = u64::from(weight);
            if pick > 0 && pick <= weight {
                chosen = Some(name);
                break;
            }
            pick = pick.saturating_sub(weight);
        }
        if let Some(name) = chosen {
            self.strike(name);
        }
        self.lay_bait();
        if garbage && self.choices.draw(at, 4) == 3 {
            self.store.tick(self.now);
            let before = self.before();
            self.store.model.collect_garbage();
            self.follow(before);
        }
        let every = self.setup.chaos_every_us;
        let after = 1 + self.choices.draw(Topic::ChaosTime.of(0), 2 * every);
        self.schedule(after, Event::Chaos);
    }

    pub fn strike(&mut self, name: &'static str) {
        self.count_fault(name);
        let at = Topic::Chaos.of(1);
        let r = self.choices.draw(at, self.hosts.len() as u64) as usize;
        let until = |world: &mut World, most: u64| world.now + world.choices.between(at, 100 * MILLI, most);
        let ms = |us: u64| us / MILLI;
        let to_come = |end: u64, world: &World| ms(end.saturating_sub(world.now));
        let ways = |way: u64| ["both ways", "from it only", "to it only"][way.min(2) as usize];
        let told = match name {
            "crash" => {
                let rest = self.choices.between(at, 10 * MILLI, 20 * SECOND);
                self.crash(r, Some(rest));
                format!("crash of r{r} for {} ms", ms(rest))
            }
            "pause" => {
                let length = self.choices.between(at, 100 * MILLI, 30 * SECOND);
                self.pause(r, length);
                format!("pause of r{r} for {} ms", ms(length))
            }
            "cut_store" => {
                let (end, way) = (until(self, 30 * SECOND), self.choices.draw(at, 3));
                if way != 1 {
                    self.links.to_store[r] = end;
                }
                if way != 2 {
                    self.links.from_store[r] = end;
                }
                format!("cut_store: r{r} and the store, {}, for {} ms", ways(way), to_come(end, self))
            }
            "cut_clients" => {
                let (end, way) = (until(self, 30 * SECOND), self.choices.draw(at, 3));
                if way != 1 {
                    self.links.to_replica[r] = end;
                }
                if way != 2 {
                    self.links.from_replica[r] = end;
                }
                format!("cut_clients: r{r} and its callers, {}, for {} ms", ways(way), to_come(end, self))
            }
            "store_slow" => {
                self.store.slow_until = until(self, 40 * SECOND);
                self.store.slow_us = self.choices.between(at, 10 * MILLI, 3 * SECOND);
                let (by, length) = (ms(self.store.slow_us), to_come(self.store.slow_until, self));
                format!("store_slow by up to {by} ms for {length} ms")
            }
            "store_down" => {
                self.store.down_until = until(self, 60 * SECOND);
                format!("store_down for {} ms", to_come(self.store.down_until, self))
            }
            "replica_clock" => {
                let by = self.choices.between(at, 100 * MILLI, 3_600 * SECOND);
                self.step_clock(r, by);
                format!("replica_clock: r{r}'s clock steps by {} ms", ms(by))
            }
            "store_clock" => {
                let by = self.choices.between(at, 100 * MILLI, 20 * SECOND);
                self.blow_all(Blow::StoreClock, None);
                self.store.stepped += by as i64;
                format!("store_clock steps by {} ms", ms(by))
            }
            "store_clock_back" => {
                let by = self.choices.between(at, MILLI, 3 * SECOND);
                let newest = self.store.tick(self.now);
                self.blow_all(Blow::StoreClock, None);
                self.store.stepped -= by as i64;
                self.store.tick(self.now);
                self.oracle.clock_went_back(newest);
                format!("store_clock_back by {} ms", ms(by))
            }
            "store_full" => {
                self.store.model.full = true;
                let after = self.choices.between(at, 100 * MILLI, 20 * SECOND);
                self.schedule(after, Event::Room);
                format!("store_full for {} ms", ms(after))
            }
            // These say themselves what they hit.
            "evict" => return self.evict(),
            "evict_job" => return self.evict_job(),
            "drop_entry" => return self.drop_entry(),
            "corrupt" => return self.corrupt(),
            "lose_commits" => return self.lose_commits(),
            "newer" => return self.newer(),
            _ => name.to_owned(),
        };
        self.say_fault(&told);
    }

    /// The model as it is, if a real store has to be changed as it will be.
    pub fn before(&self) -> Option<Model> {
        self.store.twin.is_some().then(|| self.store.model.clone())
    }

    /// The real store, if there is one, goes the same way.
    pub fn follow(&mut self, before: Option<Model>) {
        let Some(before) = before else { return };
        let theirs = self.store.beside(|twin, after| twin.follow(&before, after));
        self.agree(theirs);
    }

    /// A rolling upgrade has gone further than these replicas: any record is of a format that they cannot read,
    /// until they are upgraded as well. They leave it as it is.
    fn newer(&mut self) {
        let at = Topic::Chaos.of(6);
        let Some(key) = self.any_record(at) else { return };
        let until = self.now + self.choices.between(at, 500 * MILLI, 15 * SECOND);
        let Some(version) = self.store.model.record(&key).map(|r| r.version) else { return };
        self.say_fault(&format!("newer {key}"));
        self.oracle.newer.insert(key.clone());
        self.links.newer.insert(key, (version, until));
    }

    fn evict_job(&mut self) {
        let keys: Vec<Name> = self.store.model.records(b"job/").map(|(k, _)| k.clone()).collect();
        let at = self.choices.draw(Topic::Aim.of(2), keys.len().max(1) as u64) as usize;
        if let Some(key) = keys.get(at) {
            self.evict_key(key);
        }
    }

    /// Any record vanishes.
    fn evict(&mut self) {
        debug_assert_eq!(self.setup.regime, Regime::EvictKeys);
        if let Some(key) = self.any_record(Topic::Chaos.of(2)) {
            self.evict_key(&key);
        }
    }

    fn any_record(&mut self, at: Label) -> Option<Name> {
        // By kind first, so that rare kinds are met as well.
        let prefixes: [&[u8]; 13] = [
            b"job/",
            b"payload/",
            b"lease/",
            b"key/",
            b"history/",
            b"progress/",
            b"claim/",
            b"queue/",
            b"result/",
            b"group/",
            b"mark/",
            b"slot/",
            b"pool/",
        ];
        let prefix = *self.choices.pick(at, &prefixes);
        let keys: Vec<Name> = self.store.model.records(prefix).map(|(k, _)| k.clone()).collect();
        keys.get(self.choices.draw(at, keys.len().max(1) as u64) as usize).cloned()
    }

    pub fn evict_key(&mut self, key: &Name) {
        self.store.tick(self.now);
        self.digest.bytes(key);
        self.say_fault(&format!("evict {key}"));
        let before = self.before();
        self.store.model.evict(key);
        self.follow(before);
        self.oracle.disturb(&self.store.model, Damage::Record(key.clone()));
    }

    /// A job's record can no longer be read.
    fn corrupt(&mut self) {
        let at = Topic::Chaos.of(5);
        let keys: Vec<Name> = self.store.model.records(b"job/").map(|(k, _)| k.clone()).collect();
        let Some(key) = keys.get(self.choices.draw(at, keys.len().max(1) as u64) as usize) else { return };
        self.corrupt_key(key, bytes::Bytes::from_static(b"\x01garbage"));
    }

    pub fn corrupt_key(&mut self, key: &Name, bytes: bytes::Bytes) {
        self.store.tick(self.now);
        self.digest.bytes(key);
        self.say_fault(&format!("corrupt {key}"));
        let before = self.before();
        self.store.model.corrupt(key, bytes);
        self.follow(before);
        self.oracle.disturb(&self.store.model, Damage::Corrupt(key.clone()));
    }

    /// Any entry of any index vanishes.
    fn drop_entry(&mut self) {
        let at = Topic::Chaos.of(3);
        let indexes: Vec<Name> = self.store.model.books().iter().map(|(name, _)| name.clone()).collect();
        let Some(index) = indexes.get(self.choices.draw(at, indexes.len().max(1) as u64) as usize) else { return };
        let members = self.store.model.members(index);
        let Some((_, member)) = members.get(self.choices.draw(at, members.len().max(1) as u64) as usize) else {
            return;
        };
        self.drop_member(index, member);
    }

    pub fn drop_member(&mut self, index: &Name, member: &Name) {
        self.store.tick(self.now);
        self.digest.bytes(index);
        self.digest.bytes(member);
        self.say_fault(&format!("drop {member} from {index}"));
        let before = self.before();
        self.store.model.drop_member(index, member);
        self.follow(before);
        self.oracle.disturb(&self.store.model, Damage::Entry(index.clone(), member.clone()));
    }

    /// A fail-over to a copy that lags behind.
    fn lose_commits(&mut self) {
        let n = self.choices.between(Topic::Chaos.of(4), 1, 40) as usize;
        self.rewind(n);
    }

    pub fn rewind(&mut self, n: usize) {
        self.store.tick(self.now);
        let before = self.before();
        let lost = self.store.model.lose_newest(n);
        self.follow(before);
        self.forgotten(lost);
        self.digest.num(lost as u64);
        self.say_fault(&format!("{lost} commits are forgotten"));
        self.oracle.rewound(&self.store.model, lost);
    }
}
