//! Holding a slot: refreshing it while it is held, and giving it back. Neither looks at the pool's settings.

use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;

use super::record::{Slot, SlotState};
use super::{Spot, slot_of, stands};
use crate::failure::Failure;
use crate::job::check;
use crate::limits;
use crate::replica::task::{Cx, Draft, Next, Operation, Plan, applied};
use crate::request::{Response, SlotId};
use crate::store::{Answer, Clock, Expiry, Guard, Read, Record, ScoreAt, Snapshot, Version, Write};

fn spot(tenant: String, pool: String, slot: String) -> Result<Spot, Failure> {
    check::name("pool", &pool)?;
    check::name("slot_id", &slot)?;
    Ok(Spot { pool, tenant, slot })
}

fn look(spot: &Spot) -> Next {
    Next::Read(Read { records: vec![spot.key()], ..Read::default() })
}

fn found(snapshot: &Snapshot) -> Result<Option<(Version, Slot)>, Failure> {
    slot_of(snapshot.records.first().unwrap_or(&Record::Absent))
}

/// Extends a grant by its length, as long as it has not come to its end by the store's clock.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct Refresh {
    spot: Spot,
    nonce: Option<Version>,
    length: u64,
}

impl Refresh {
    pub fn new(tenant: String, pool: String, id: SlotId) -> Result<Refresh, Failure> {
        Ok(Refresh { spot: spot(tenant, pool, id.slot)?, nonce: id.nonce, length: 0 })
    }
}

impl Operation for Refresh {
    fn start(&mut self, _: &mut Cx<'_>) -> Next {
        look(&self.spot)
    }

    fn read(&mut self, snapshot: Snapshot, cx: &mut Cx<'_>) -> Next {
        let (version, slot) = match found(&snapshot) {
            Ok(Some(found)) => found,
            Ok(None) => return lost(cx),
            Err(failure) => return Next::fail(failure),
        };
        if !slot.state.is_held() || self.nonce != Some(slot.nonce) {
            return lost(cx);
        }
        self.length = slot.lease_ms.saturating_mul(limits::MILLI);
        // Whatever becomes of this.
        cx.open.refreshed(&self.spot, self.nonce, slot.end(cx.clock).saturating_add(limits::VALID));
        let units = self.spot.units(&slot);
        let mut guards = vec![Guard::At(self.spot.key(), version)];
        // slot-not-resurrected: the clock of the commit decides. A unit that lapsed or was lost has made room
        // for another, so it is never entered anew.
        guards.extend(stands(&units));
        let expiry = Expiry::Clock(self.length.saturating_add(limits::SLOT_KEPT));
        let mut writes = vec![Write::Expire(self.spot.key(), expiry)];
        writes.extend(units.into_iter().map(|(index, member)| Write::Add {
            index,
            member,
            score: ScoreAt::Clock(self.length),
            raise: true,
        }));
        Next::Commit(Plan::new(vec![Draft::new(guards, writes)]))
    }

    fn answered(&mut self, clock: Clock, answers: Vec<Answer>, cx: &mut Cx<'_>) -> Next {
        match answers.first() {
            Some(Answer::Applied { .. }) => {
                cx.stats.slots_refreshed += 1;
                cx.open.refreshed(&self.spot, self.nonce, clock.saturating_add(self.length));
                Next::ok(Response::SlotRefreshed { expires_at: clock.saturating_add(self.length) })
            }
            // Refused by the record, which comes first: it may have been looked at too early.
            Some(Answer::Refused(n)) if *n > 0 => lost(cx),
            _ => self.start(cx),
        }
    }
}

fn lost(cx: &mut Cx<'_>) -> Next {
    cx.stats.slots_lost += 1;
    Next::fail(Failure::SlotLost)
}

/// Gives a slot back, or takes one out of the line. What is not there any more needs neither.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct Release {
    spot: Spot,
    /// Which holder it is about, and nobody who comes after; `None`: whoever is met first.
    nonce: Option<Version>,
    /// It waited, or has been held for so long.
    held: Option<u64>,
}

impl Release {
    pub fn new(tenant: String, pool: String, id: SlotId) -> Result<Release, Failure> {
        Ok(Release { nonce: id.nonce, ..Release::of(spot(tenant, pool, id.slot)?) })
    }

    pub(super) fn of(spot: Spot) -> Release {
        Release { spot, nonce: None, held: None }
    }
}

impl Operation for Release {
    fn start(&mut self, _: &mut Cx<'_>) -> Next {
        look(&self.spot)
    }

    fn read(&mut self, snapshot: Snapshot, cx: &mut Cx<'_>) -> Next {
        let found = match found(&snapshot) {
            Ok(found) => found,
            Err(failure) => return Next::fail(failure),
        };
        let Some((version, slot)) = found.filter(|(_, slot)| slot.state != SlotState::Over) else {
            cx.open.gone(&self.spot, self.nonce);
            let absent = snapshot.records.first().is_none_or(Record::is_absent);
            return match self.nonce {
                // slot-not-resurrected: another server may have granted it without the store, and still mean to
                // write that down.
                Some(nonce) if absent && cx.config.fail_open.contains_key(&self.spot.pool) => {
                    Next::Commit(Plan::new(vec![self.spot.refuse(nonce, cx.make.version())]))
                }
                _ => Next::ok(Response::SlotReleased),
            };
        };
        if *self.nonce.get_or_insert(slot.nonce) != slot.nonce {
            return Next::ok(Response::SlotReleased);
        }
        let granted_at = snapshot.records.first().and_then(Record::at).unwrap_or(snapshot.clock);
        self.held = slot.state.is_held().then(|| snapshot.clock.saturating_sub(granted_at));
        let draft = self.spot.end(&slot, version, cx.make.version());
        Next::Commit(Plan::new(vec![draft]))
    }

    fn answered(&mut self, _: Clock, answers: Vec<Answer>, cx: &mut Cx<'_>) -> Next {
        if !applied(&answers) {
            return self.start(cx);
        }
        cx.open.gone(&self.spot, self.nonce);
        if let Some(micros) = self.held {
            cx.held.count(&self.spot.pool, micros);
            cx.stats.slots_released += 1;
        }
        Next::ok(Response::SlotReleased)
    }
}
