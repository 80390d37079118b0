//! Fail-open: while the store cannot be reached, a replica admits so many to a pool by itself, if it is
//! configured to. Such a slot is *declared*: its answer says so, and later its record.
//!
//! ```text
//!  asked for, no store, below the bound --> local --the store is back--> entering --> entered
//!                                             |                             |            |
//!                                             +---- given back, or its end comes --------+--> forgotten
//!                                                          (lost: there is no such pool)
//! ```
//!
//! **The bound** counts whoever this replica has admitted and who may still be there, entered or not: a store
//! that comes and goes makes it no larger. A declared slot is entered without asking whether there is room,
//! so nobody else is granted one until there is again. Until it is entered it is known to this replica alone:
//! it refreshes it and takes it back by itself; asked elsewhere, it is lost.

use alloc::collections::BTreeMap;
use alloc::vec;
use alloc::vec::Vec;

use super::record::{Slot, SlotState};
use super::{Spot, of, slot_of};
use crate::failure::Failure;
use crate::job::moves::as_read;
use crate::job::record::Class;
use crate::limits;
use crate::replica::task::{Cx, Draft, Next, Operation, Plan, applied};
use crate::request::{Outcome, Response, SlotId};
use crate::store::{Answer, Clock, Guard, Read, Record, Snapshot, Version, keys};

/// Declared slots that are entered at once.
const PAGE: usize = 100;

/// How many a replica admits to a pool by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FailOpen {
    /// Units at a time.
    pub local: u32,
    /// A slot's lease, unless whoever asks for it says otherwise: the pool's own settings cannot be read.
    pub lease_ms: u64,
}

/// Whom this replica has admitted by itself.
#[derive(Clone, Debug, Default)]
pub(crate) struct Open {
    admitted: BTreeMap<Spot, Admitted>,
}

#[derive(Clone, Debug)]
struct Admitted {
    slot: Slot,
    until: Clock,
    stage: Stage,
    /// Given back while it was being entered.
    over: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Local,
    Entering,
    Entered,
    /// There is no such pool: it can be held no longer, and counts until its holder knows or its time is over.
    Lost,
}

impl Open {
    /// What may still be held of a pool, in units.
    pub fn units(&self, pool: &str, clock: Clock) -> u64 {
        let of_pool = self.admitted.iter().filter(|(spot, _)| spot.pool == pool);
        // What may be entered counts until that is known, also past its time.
        let there = of_pool.filter(|(_, a)| a.until > clock || a.stage == Stage::Entering);
        there.map(|(_, a)| u64::from(a.slot.cost)).sum()
    }

    fn forget_ended(&mut self, clock: Clock) {
        for admitted in self.admitted.values_mut() {
            // Nobody has more than its length left: what the clock was taken to be without the store was wrong.
            admitted.until = admitted.until.min(admitted.slot.end(clock));
        }
        self.admitted.retain(|_, a| a.until > clock || a.stage == Stage::Entering || a.over);
    }

    /// A slot from the replica itself, if there is one below the bound.
    pub(super) fn admit(&mut self, spot: &Spot, slot: Slot, bound: u32, clock: Clock) -> Option<Outcome> {
        self.forget_ended(clock);
        if self.admitted.contains_key(spot) {
            // Another of this name is still there.
            return None;
        }
        if self.units(&spot.pool, clock) + u64::from(slot.cost) > bound.into() {
            return None;
        }
        let until = slot.end(clock);
        let outcome = Ok(spot.had(slot.nonce, slot.state, until));
        self.admitted.insert(spot.clone(), Admitted { slot, until, stage: Stage::Local, over: false });
        Some(outcome)
    }

    /// The answer to whoever asks again for a slot that only this replica knows.
    pub(super) fn again(&self, spot: &Spot, class: Class, cost: u32, clock: Clock) -> Option<Outcome> {
        let had = self.admitted.get(spot).filter(|a| a.is_here() && !a.over && a.until > clock)?;
        let same = (had.slot.class, had.slot.cost) == (class, cost);
        same.then(|| Ok(spot.had(had.slot.nonce, had.slot.state, had.until)))
    }

    /// The answer to a refresh of a slot that only this replica knows.
    pub fn refresh(&mut self, spot: &Spot, id: &SlotId, clock: Clock) -> Option<Outcome> {
        let found = self.admitted.get_mut(spot).filter(|a| id.nonce == Some(a.slot.nonce))?;
        match found.stage {
            // It is being given back.
            _ if found.over => Some(Err(Failure::StoreUnavailable { retry_after_ms: 1_000 })),
            // slot-not-resurrected: whoever comes late gets nothing back here either.
            Stage::Local if found.until > clock => {
                found.until = found.slot.end(clock);
                Some(Ok(Response::SlotRefreshed { expires_at: found.until }))
            }
            Stage::Local | Stage::Lost => {
                self.admitted.remove(spot);
                Some(Err(Failure::SlotLost))
            }
            // Its end is being written: in a moment.
            Stage::Entering => Some(Err(Failure::StoreUnavailable { retry_after_ms: 1_000 })),
            Stage::Entered => None,
        }
    }

    /// The answer to whoever gives back a slot that only this replica knows.
    pub fn release(&mut self, spot: &Spot, id: &SlotId) -> Option<Outcome> {
        let found = self.admitted.get_mut(spot).filter(|a| id.nonce.is_none_or(|nonce| nonce == a.slot.nonce))?;
        match found.stage {
            Stage::Local | Stage::Lost => {
                self.admitted.remove(spot);
                if id.nonce.is_none() {
                    // Whoever it is that has this name: the store may know another.
                    return None;
                }
            }
            // It is taken out again as soon as it is known to be there.
            Stage::Entering => {
                found.over = true;
                return Some(Err(Failure::OutcomeUnknown { retry_after_ms: 1_000 }));
            }
            Stage::Entered => return None,
        }
        Some(Ok(Response::SlotReleased))
    }

    /// Whether something is to be entered, or taken out again.
    pub fn is_due(&self, clock: Clock) -> bool {
        self.admitted.values().any(|a| a.is_due(clock))
    }

    /// An entered one was refreshed.
    pub(super) fn refreshed(&mut self, spot: &Spot, nonce: Option<Version>, until: Clock) {
        if let Some(found) = self.admitted.get_mut(spot).filter(|a| Some(a.slot.nonce) == nonce) {
            found.until = found.until.max(until);
        }
    }

    /// An entered one is over.
    pub(super) fn gone(&mut self, spot: &Spot, nonce: Option<Version>) {
        if self.admitted.get(spot).is_some_and(|a| a.stage == Stage::Entered && Some(a.slot.nonce) == nonce) {
            self.admitted.remove(spot);
        }
    }
}

impl Admitted {
    /// The store may not know it.
    fn is_here(&self) -> bool {
        matches!(self.stage, Stage::Local | Stage::Entering)
    }

    fn is_due(&self, clock: Clock) -> bool {
        match self.stage {
            Stage::Local => self.until > clock,
            Stage::Entering => true,
            Stage::Entered => self.over,
            Stage::Lost => false,
        }
    }
}

/// Enters what was admitted without the store, once it is back.
#[derive(Clone, Debug, Default)]
pub(crate) struct Enter {
    page: Vec<Spot>,
    /// For each transaction: whose, and until when it is held by it; `None`: it is over.
    sent: Vec<(Spot, Option<u64>)>,
}

impl Enter {
    /// What is to be written about one.
    fn one(&mut self, spot: &Spot, pool: &Record, record: &Record, cx: &mut Cx<'_>) -> Option<Draft> {
        let found = slot_of(record).ok()?;
        let admitted = cx.open.admitted.get_mut(spot)?;
        let own = found.as_ref().filter(|(_, slot)| slot.nonce == admitted.slot.nonce);
        match own {
            Some((version, slot)) if slot.state != SlotState::Over => {
                admitted.stage = Stage::Entered;
                if !admitted.over {
                    return None;
                }
                self.sent.push((spot.clone(), None));
                return Some(spot.end(slot, *version, cx.make.version()));
            }
            None if !admitted.over && admitted.until > cx.clock => {}
            // Over, here or there; or nobody has refreshed it.
            _ => {
                cx.open.admitted.remove(spot);
                return None;
            }
        }
        let version = match of(pool) {
            Ok((version, _)) => version,
            Err(Failure::NewerFormat { .. }) => return None,
            Err(_) => {
                // The pool has gone: nothing is left to be held.
                admitted.stage = Stage::Lost;
                return None;
            }
        };
        admitted.stage = Stage::Entering;
        let guards = vec![as_read(spot.key(), record), Guard::At(keys::pool(&spot.pool), version)];
        // Its wait may have begun when the store was there.
        let mut writes = found.map_or_else(|| spot.old_places(), |(_, before)| spot.leave(&before));
        let slot = admitted.slot.clone();
        writes.extend(spot.grant(&slot, cx.make.version()));
        self.sent.push((spot.clone(), Some(slot.lease_ms.saturating_mul(limits::MILLI))));
        Some(Draft::new(guards, writes))
    }
}

impl Operation for Enter {
    fn start(&mut self, cx: &mut Cx<'_>) -> Next {
        cx.open.forget_ended(cx.clock);
        let due = cx.open.admitted.iter().filter(|(_, a)| a.is_due(cx.clock));
        self.page = due.take(PAGE).map(|(spot, _)| spot.clone()).collect();
        if self.page.is_empty() {
            return Next::ok(Response::Ready);
        }
        let records = self.page.iter().flat_map(|spot| [keys::pool(&spot.pool), spot.key()]).collect();
        Next::Read(Read { records, ..Read::default() })
    }

    fn read(&mut self, snapshot: Snapshot, cx: &mut Cx<'_>) -> Next {
        self.sent.clear();
        let page = core::mem::take(&mut self.page);
        let mut drafts = Vec::new();
        for (spot, records) in page.iter().zip(snapshot.records.chunks(2)) {
            if let [pool, record] = records {
                drafts.extend(self.one(spot, pool, record, cx));
            }
        }
        // What cannot be decided now is for the next time.
        if drafts.is_empty() { Next::ok(Response::Ready) } else { Next::Commit(Plan::new(drafts)) }
    }

    fn answered(&mut self, clock: Clock, answers: Vec<Answer>, cx: &mut Cx<'_>) -> Next {
        for ((spot, length), answer) in core::mem::take(&mut self.sent).into_iter().zip(&answers) {
            if !applied(core::slice::from_ref(answer)) {
                continue;
            }
            match (length, cx.open.admitted.get_mut(&spot)) {
                (Some(length), Some(admitted)) => {
                    admitted.stage = Stage::Entered;
                    admitted.until = clock.saturating_add(length);
                }
                _ => {
                    cx.open.admitted.remove(&spot);
                }
            }
        }
        self.start(cx)
    }
}
