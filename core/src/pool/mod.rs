//! Slot pools: capacity that a whole cluster shares, held for a time and waited for in order.
//!
//! How much is in use is not in the pool's record but is the size of an index, so nothing can drift. A holder
//! of cost w is w members of `holders/{pool}` that carry the nonce of its grant, so nobody can renew or
//! release what another holds; each ends at its score by itself. Whoever waits stands in
//! `waiting/{pool}/{class}` in order of arrival, and in `alive/{pool}/{class}` with a deadline that the
//! replica that its caller is connected to renews; each replica grants only to those for whom somebody is
//! still there.
//!
//! **Room is what the index says.** A holder past its time is removed before its room is given to another,
//! in the same commit: then a clock that goes back cannot bring it back to life. Nothing about releasing,
//! renewing or withdrawing depends on the pool's own record.
//!
//! Reading order: [`record`], `acquire`, `hold`, `open`, `settings`, `look`, `tidy`, `audit`.

mod acquire;
mod audit;
mod hold;
mod look;
pub mod open;
pub mod record;
mod settings;
mod tidy;
pub(crate) mod usage;

pub(crate) use acquire::Acquire;
pub(crate) use audit::Check;
pub(crate) use hold::{Refresh, Release};
pub(crate) use look::{All, One};
pub(crate) use open::{Enter, Open};
pub(crate) use settings::{Delete, Set};
pub(crate) use tidy::Tidy;

use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;

use crate::codec::Undecodable;
use crate::failure::Failure;
use crate::job::moves::{put, remove};
use crate::job::record::Class;
use crate::job::sweep::trim;
use crate::limits;
use crate::name::Name;
use crate::replica::task::{Draft, decode_record};
use crate::request::{Response, SlotId};
use crate::store::{Clock, Each, Expiry, Guard, Record, ScoreAt, Source, Span, Standing, Take, Version, Write, keys};
use record::{Pool, Slot, SlotState};

/// The pool behind a record.
pub(crate) fn of(record: &Record) -> Result<(Version, Pool), Failure> {
    match decode_record::<Pool>(record) {
        Ok(Some((version, pool))) if !pool.deleted => Ok((version, pool)),
        Ok(_) => Err(Failure::UnknownPool),
        Err(Undecodable::Newer) => Err(Failure::NewerFormat { retry_after_ms: 10_000 }),
        Err(Undecodable::Corrupt) => Err(Failure::Quarantined),
    }
}

/// Which slot of which pool: what its keys and members are made of.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub(crate) struct Spot {
    pool: String,
    tenant: String,
    slot: String,
}

impl Spot {
    pub fn new(tenant: &str, pool: &str, slot: &str) -> Spot {
        Spot { pool: pool.into(), tenant: tenant.into(), slot: slot.into() }
    }

    fn key(&self) -> Name {
        keys::slot(&self.pool, &self.tenant, &self.slot)
    }

    fn member(&self) -> Name {
        keys::slot_member(&self.tenant, &self.slot)
    }

    /// The answer to whoever holds it.
    fn had(&self, nonce: Version, state: SlotState, expires_at: Clock) -> Response {
        let id = SlotId { slot: self.slot.clone(), nonce: Some(nonce) };
        Response::Slot { pool: self.pool.clone(), id, expires_at, declared: state == SlotState::Declared }
    }

    /// Index and member of each unit that the slot holds when it is granted.
    fn units(&self, slot: &Slot) -> Vec<(Name, Name)> {
        let mut units = Vec::new();
        let batch = (slot.class == Class::Batch).then(|| keys::batch(&self.pool));
        for index in [Some(keys::holders(&self.pool)), batch].into_iter().flatten() {
            let members = keys::holder_members(&self.tenant, &self.slot, slot.nonce, slot.cost);
            units.extend(members.map(|member| (index.clone(), member)));
        }
        units
    }

    /// The writes of a grant.
    fn grant(&self, slot: &Slot, own: Version) -> Vec<Write> {
        let state = if slot.state == SlotState::Declared { SlotState::Declared } else { SlotState::Granted };
        let granted = Slot { state, ..slot.clone() };
        let length = slot.lease_ms.saturating_mul(limits::MILLI);
        let expiry = Expiry::Clock(length.saturating_add(limits::SLOT_KEPT));
        let mut writes = vec![put(self.key(), own, crate::codec::encode(&granted), expiry)];
        writes.extend(self.units(slot).into_iter().map(|(index, member)| Write::Add {
            index,
            member,
            score: ScoreAt::Clock(length),
            raise: false,
        }));
        writes
    }

    /// The writes that remove what an earlier wait of the same name may have left: its record may have expired
    /// before it was removed from the line. With it, the new record would go.
    fn old_places(&self) -> Vec<Write> {
        let member = self.member();
        let line = |class| [keys::waiting(&self.pool, class), keys::alive(&self.pool, class)];
        Class::ALL.into_iter().flat_map(line).map(|index| remove(index, &member)).collect()
    }

    /// The writes that take it out of where it stands.
    fn leave(&self, slot: &Slot) -> Vec<Write> {
        match slot.state {
            SlotState::Waiting { .. } => {
                let lines = [keys::waiting(&self.pool, slot.class), keys::alive(&self.pool, slot.class)];
                lines.map(|index| remove(index, &self.member())).into()
            }
            SlotState::Granted | SlotState::Declared => {
                let units = self.units(slot);
                units.into_iter().map(|(index, member)| Write::Remove { index, member }).collect()
            }
            SlotState::Over => Vec::new(),
        }
    }

    /// The transaction after which a grant is over that nobody knows of.
    fn refuse(&self, nonce: Version, own: Version) -> Draft {
        let state = SlotState::Over;
        let over = Slot { state, nonce, class: Class::System, cost: 1, lease_ms: limits::LEASE_MS_MIN, holder: None };
        self.stub(&over, own)
    }

    /// The transaction after which a slot that has no record is over.
    fn stub(&self, over: &Slot, own: Version) -> Draft {
        let mut writes = self.old_places();
        writes.push(put(self.key(), own, crate::codec::encode(over), Expiry::Clock(limits::SLOT_KEPT)));
        Draft::new(vec![Guard::Absent(self.key())], writes)
    }

    /// The transaction after which the slot is over, whether it was waiting or granted.
    fn end(&self, slot: &Slot, version: Version, own: Version) -> Draft {
        let over = Slot { state: SlotState::Over, ..slot.clone() };
        let stub = Expiry::Clock(limits::SLOT_KEPT);
        let mut writes = vec![put(self.key(), own, crate::codec::encode(&over), stub)];
        writes.extend(self.leave(slot));
        writes.push(Write::Notify(keys::topic_pool(&self.pool)));
        Draft::new(vec![Guard::At(self.key(), version)], writes)
    }
}

/// The record that says what a slot is, or what is held for a job.
fn record_of(pool: &str, slot: &Name) -> Name {
    keys::job_of(slot).map_or_else(|| keys::slots(pool).join(slot), keys::lease)
}

/// A slot's record as read. One that cannot be read says nothing of anybody: whatever it held ends at its
/// time by itself.
fn slot_of(record: &Record) -> Result<Option<(Version, Slot)>, Failure> {
    match decode_record::<Slot>(record) {
        Ok(found) => Ok(found),
        Err(Undecodable::Newer) => Err(Failure::NewerFormat { retry_after_ms: 10_000 }),
        Err(Undecodable::Corrupt) => Ok(None),
    }
}

/// Whether a record says that its pool is there, or that something in it is held or waited for.
pub(crate) fn is_used(key: &Name, record: &Record) -> bool {
    match key.starts_with(&keys::POOL) {
        true => !decode_record::<Pool>(record).is_ok_and(|found| found.is_none_or(|(_, pool)| pool.deleted)),
        false => slot_of(record).is_ok_and(|found| found.is_some_and(|(_, slot)| slot.state != SlotState::Over)),
    }
}

/// That there is room for so much more.
fn room(pool: &str, settings: &Pool, class: Class, cost: u32) -> Vec<Guard> {
    let below = |index, most: u32| Guard::Below(index, Span::All, u64::from((most + 1).saturating_sub(cost)));
    let mut guards = vec![below(keys::holders(pool), settings.total)];
    if class == Class::Batch {
        guards.push(below(keys::batch(pool), settings.most(class)));
    }
    guards
}

/// That nobody waits in one of these classes for whom somebody is there.
fn nobody(pool: &str, classes: impl Iterator<Item = Class>) -> impl Iterator<Item = Guard> {
    classes.map(move |class| Guard::Below(keys::alive(pool, class), Span::Live, 1))
}

/// Removes waiters for whom nobody is there any more, with their places in line and their records.
fn forsake(pool: &str, class: Class) -> Draft {
    let each = vec![Each::Remove { index: keys::waiting(pool, class) }, Each::Delete { prefix: keys::slots(pool) }];
    let source = Source { index: keys::alive(pool, class), due: true, each };
    let take = Take { n: limits::SWEEP_WAITERS, from: vec![source], give: Vec::new(), max_bytes: 0 };
    Draft { guards: Vec::new(), take: Some(take), writes: vec![Write::Notify(keys::topic_pool(pool))] }
}

/// The indexes that have a score for each member's end: holders, and waiters by class.
fn counted(pool: &str) -> impl Iterator<Item = Name> {
    let waiters = Class::ALL.into_iter().map(|class| keys::alive(pool, class));
    [keys::holders(pool), keys::batch(pool)].into_iter().chain(waiters)
}

/// Removes whatever is past its time, a page of each.
fn tidy(pool: &str) -> Vec<Draft> {
    let holders = [keys::holders(pool), keys::batch(pool)].map(|index| trim(index, limits::TRIM));
    holders.into_iter().chain(Class::ALL.into_iter().map(|class| forsake(pool, class))).collect()
}

/// The guards that a grant still stands, every unit of it: one that was lost made room for another.
fn stands(units: &[(Name, Name)]) -> impl Iterator<Item = Guard> {
    units.iter().map(|(index, member)| Guard::Member(index.clone(), member.clone(), Standing::Live))
}

/// How long slots of a pool have been held, as this replica has seen: the estimate of a wait.
#[derive(Clone, Debug, Default, serde::Serialize, serde::Deserialize)]
pub(crate) struct Held {
    mean: BTreeMap<String, u64>,
}

impl Held {
    /// One was given back after so many microseconds.
    fn count(&mut self, pool: &str, micros: u64) {
        if let Some(mean) = self.mean.get_mut(pool) {
            *mean = (*mean / 8).saturating_mul(7).saturating_add(micros / 8);
            return;
        }
        if self.mean.len() >= limits::POOL_CACHE {
            self.mean.clear();
        }
        self.mean.insert(pool.into(), micros);
    }

    /// How long whoever is `position`th in line may have to wait, in milliseconds: so many slots must come
    /// free, and all `most` of them are held for the mean time each.
    fn estimate_ms(&self, pool: &str, lease_ms: u64, position: u64, most: u32) -> u64 {
        let mean = self.mean.get(pool).map_or(lease_ms, |mean| mean / limits::MILLI);
        (mean.saturating_mul(position) / u64::from(most.max(1))).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_estimate_follows_what_was_held() {
        let mut held = Held::default();
        // Nothing seen: as if each lease were used up.
        assert_eq!(held.estimate_ms("p", 8_000, 1, 8), 1_000);
        held.count("p", 800_000);
        assert_eq!([1, 4, 16].map(|n| held.estimate_ms("p", 8_000, n, 8)), [100, 400, 1_600]);
        for _ in 0..100 {
            held.count("p", 80_000);
        }
        let settled = held.estimate_ms("p", 8_000, 8, 8);
        assert!((70..=90).contains(&settled), "{settled}");
        assert_eq!(held.estimate_ms("p", 8_000, 0, 0), 1);
        for n in 0..2 * limits::POOL_CACHE {
            held.count(&alloc::format!("{n}"), u64::MAX);
            held.count(&alloc::format!("{n}"), u64::MAX);
        }
        assert!(held.mean.len() <= limits::POOL_CACHE);
    }

    #[test]
    fn batch_has_its_own_bound_within_the_total() {
        let pool = |batch_max| Pool { total: 8, batch_max, lease_ms: 1, deleted: false, trail: Default::default() };
        let most = |batch_max| Class::ALL.map(|class| pool(batch_max).most(class));
        assert_eq!(
            [most(None), most(Some(6)), most(Some(0)), most(Some(9))],
            [[8, 8, 8], [8, 8, 6], [8, 8, 0], [8, 8, 8]]
        );
    }
}
