//! Fail-open: while the store cannot be reached, a replica admits so many to a pool by itself, if it is
//! configured to. Such a slot is *declared*: its answer says so, and later its record.
//!
//! ```text
//!  asked for, no store, below the bound --> local --the store is back--> entering --> entered
//!                                             |                             |            |
//!                                             +---- given back, or its end comes --------+--> forgotten
//!                                     (lost: there is no such pool, or its name is another's by now)
//! ```
//!
//! **The bound** counts whoever this replica has admitted and who may still be there, entered or not: a store
//! that comes and goes makes it no larger. A declared slot is entered without asking whether there is room,
//! so nobody else is granted one until there is again. Until it is entered it is known to this replica alone:
//! it refreshes it and takes it back by itself; asked elsewhere, it is lost.

use alloc::collections::BTreeMap;
use alloc::format;
use alloc::vec;
use alloc::vec::Vec;

use super::record::{Slot, SlotState};
use super::{Spot, of, slot_of};
use crate::failure::Failure;
use crate::job::check;
use crate::job::moves::as_read;
use crate::job::record::Class;
use crate::limits;
use crate::replica::task::{Cx, Draft, Next, Operation, Plan, applied};
use crate::request::{Outcome, Response, SlotId};
use crate::store::{Answer, Clock, Guard, Read, Record, Snapshot, Version, keys};

/// Declared slots that are entered at once.
const PAGE: usize = 100;

/// How many a replica admits to a pool by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct FailOpen {
    /// Units at a time.
    pub local: u32,
    /// A slot's lease, unless whoever asks for it says otherwise: the pool's own settings cannot be read.
    pub lease_ms: u64,
}

/// Whom this replica has admitted by itself.
#[derive(Clone, Debug, Default, serde::Serialize, serde::Deserialize)]
pub(crate) struct Open {
    admitted: BTreeMap<Spot, Admitted>,
}

#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
struct Admitted {
    slot: Slot,
    /// Its end, as its holder was told …
    until: Clock,
    /// … and how long it may be held if whatever is not known of it has happened. So long it counts.
    may_last: Clock,
    stage: Stage,
    /// A grant that had been asked for, and of which it is not known whether the store has made it: it goes with this.
    doubtful: Option<Version>,
    /// Given back, and the store may have something of it.
    over: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
enum Stage {
    Local,
    Entering,
    Entered,
    /// It cannot be entered, since there is no such pool or another holds its name: it can be held no longer, and
    /// counts until its holder knows or its time is over.
    Lost,
}

/// What became of a release.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) enum Released {
    Here(Outcome),
    /// The store has to be asked; something was taken back here, or not.
    There {
        taken: bool,
    },
}

/// From when a commit is put together to when it can be applied no more, if it was sent at once.
const STUCK: u64 = limits::VALID + (limits::CLOCK_FRESH_MS + limits::REQUEST_MS) * limits::MILLI;

impl Open {
    /// What may still be held of a pool, in units.
    pub fn units(&self, pool: &str, clock: Clock) -> u64 {
        let of_pool = self.admitted.iter().filter(|(spot, a)| spot.pool == pool && a.may_last > clock);
        of_pool.map(|(_, a)| u64::from(a.slot.cost)).sum()
    }

    fn forget_ended(&mut self, clock: Clock) {
        for admitted in self.admitted.values_mut() {
            // Nobody has more than its length left: what the clock was taken to be without the store was wrong.
            let end = admitted.slot.end(clock);
            admitted.until = admitted.until.min(end);
            admitted.may_last = admitted.may_last.min(end.saturating_add(STUCK));
            // What may have been granted before is to be looked for.
            admitted.over |= admitted.doubtful.is_some() && admitted.until <= clock;
        }
        self.admitted.retain(|_, a| a.may_last > clock);
    }

    /// A slot from the replica itself, if there is one below the bound.
    pub(super) fn admit(
        &mut self,
        spot: &Spot,
        slot: Slot,
        doubtful: Option<Version>,
        bound: u32,
        clock: Clock,
    ) -> Option<Outcome> {
        self.forget_ended(clock);
        if self.admitted.contains_key(spot) {
            // Another of this name is still there.
            return None;
        }
        if self.units(&spot.pool, clock) + u64::from(slot.cost) > bound.into() {
            return None;
        }
        let until = slot.end(clock);
        let may_last = if doubtful.is_some() { until.saturating_add(STUCK) } else { until };
        let outcome = Ok(spot.had(slot.nonce, slot.state, until));
        let stage = Stage::Local;
        self.admitted.insert(spot.clone(), Admitted { slot, until, may_last, stage, doubtful, over: false });
        Some(outcome)
    }

    /// The answer to whoever asks again for a slot that only this replica knows.
    pub(super) fn again(&self, spot: &Spot, class: Class, cost: u32, clock: Clock) -> Option<Outcome> {
        let had = self.admitted.get(spot).filter(|a| a.is_here() && !a.over && a.until > clock)?;
        if (had.slot.class, had.slot.cost) != (class, cost) {
            return Some(Err(in_use(&had.slot)));
        }
        Some(Ok(spot.had(had.slot.nonce, had.slot.state, had.until)))
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
                found.may_last = found.may_last.max(found.until);
                Some(Ok(Response::SlotRefreshed { expires_at: found.until }))
            }
            Stage::Local if found.doubtful.is_some() => {
                found.over = true;
                Some(Err(Failure::SlotLost))
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

    /// Takes back a slot that only this replica knows.
    pub fn release(&mut self, spot: &Spot, id: &SlotId) -> Released {
        let named = |a: &&mut Admitted| id.nonce.is_none_or(|nonce| nonce == a.slot.nonce);
        let Some(found) = self.admitted.get_mut(spot).filter(named) else { return Released::There { taken: false } };
        match found.stage {
            Stage::Entered => Released::There { taken: false },
            // The store may have it, or something of its name: it is taken out as soon as that is known.
            _ if found.stage == Stage::Entering || found.doubtful.is_some() => {
                found.over = true;
                Released::Here(Err(Failure::OutcomeUnknown { retry_after_ms: 1_000 }))
            }
            _ => {
                self.admitted.remove(spot);
                match id.nonce {
                    Some(_) => Released::Here(Ok(Response::SlotReleased)),
                    // Whoever it is that has this name: the store may know another.
                    None => Released::There { taken: true },
                }
            }
        }
    }

    /// Whether something is to be entered, or taken out again.
    pub fn is_due(&self, clock: Clock) -> bool {
        self.admitted.values().any(|a| a.is_due(clock))
    }

    /// An entered one is refreshed, or may come to be.
    pub(super) fn refreshed(&mut self, spot: &Spot, nonce: Option<Version>, until: Clock) {
        if let Some(found) = self.admitted.get_mut(spot).filter(|a| Some(a.slot.nonce) == nonce) {
            found.until = found.until.max(until);
            found.may_last = found.may_last.max(until);
        }
    }

    /// An entered one is over.
    pub(super) fn gone(&mut self, spot: &Spot, nonce: Option<Version>) {
        if self.admitted.get(spot).is_some_and(|a| a.stage == Stage::Entered && Some(a.slot.nonce) == nonce) {
            self.admitted.remove(spot);
        }
    }

    /// Of the one with that nonce, if it is still there.
    fn of(&mut self, spot: &Spot, nonce: Version) -> Option<&mut Admitted> {
        self.admitted.get_mut(spot).filter(|a| a.slot.nonce == nonce)
    }

    /// What was to be entered has certainly not been.
    pub fn not_entered(&mut self, enter: &Enter) {
        for sent in &enter.sent {
            if let Some(found) = self.of(&sent.spot, sent.nonce).filter(|a| a.stage == Stage::Entering) {
                found.stage = Stage::Local;
            }
        }
    }
}

/// That a name is in use for another wish.
pub(super) fn in_use(slot: &Slot) -> Failure {
    let detail = format!("is in use with class {} and cost {}", slot.class.text(), slot.cost);
    check::invalid("slot_id", detail)
}

impl Admitted {
    /// The store may not know it.
    fn is_here(&self) -> bool {
        matches!(self.stage, Stage::Local | Stage::Entering)
    }

    fn is_due(&self, clock: Clock) -> bool {
        match self.stage {
            Stage::Local => self.over || self.until > clock,
            Stage::Entering => true,
            Stage::Entered => self.over,
            Stage::Lost => false,
        }
    }
}

/// A transaction about one of them.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
struct Sent {
    spot: Spot,
    nonce: Version,
    /// It is held for so long by it; `None`: it is over.
    length: Option<u64>,
}

/// Enters what was admitted without the store, once it is back.
#[derive(Clone, Debug, Default, serde::Serialize, serde::Deserialize)]
pub(crate) struct Enter {
    page: Vec<Spot>,
    sent: Vec<Sent>,
}

impl Enter {
    /// What is to be written about one.
    fn one(&mut self, spot: &Spot, pool: &Record, record: &Record, cx: &mut Cx<'_>) -> Option<Draft> {
        let found = slot_of(record).ok()?;
        let admitted = cx.open.admitted.get_mut(spot)?;
        let nonce = admitted.slot.nonce;
        // Held until then, as its record tells by its own end.
        let ends = match record {
            Record::Present { expiry: Some(expiry), .. } => expiry.saturating_sub(limits::SLOT_KEPT),
            _ => 0,
        };
        let held = found.as_ref().filter(|(_, slot)| slot.state.is_held());
        if let Some((version, slot)) = held.filter(|(_, slot)| slot.nonce == nonce) {
            admitted.stage = Stage::Entered;
            admitted.until = admitted.until.max(ends);
            admitted.may_last = admitted.may_last.max(ends);
            if !admitted.over {
                return None;
            }
            self.sent.push(Sent { spot: spot.clone(), nonce, length: None });
            return Some(spot.end(slot, *version, cx.make.version()));
        }
        let over_there = found.as_ref().is_some_and(|(_, slot)| slot.nonce == nonce);
        if admitted.over && admitted.doubtful.is_some() && !over_there {
            // What was asked for before goes with it, and comes no more.
            let doubtful = admitted.doubtful;
            let draft = match &found {
                Some((version, slot)) if Some(slot.nonce) == doubtful && slot.state != SlotState::Over => {
                    spot.end(slot, *version, cx.make.version())
                }
                None => {
                    let over = Slot { state: SlotState::Over, ..admitted.slot.clone() };
                    spot.stub(&over, cx.make.version())
                }
                // Somebody else's by now.
                Some(_) => {
                    cx.open.admitted.remove(spot);
                    return None;
                }
            };
            self.sent.push(Sent { spot: spot.clone(), nonce, length: None });
            return Some(draft);
        }
        if over_there || admitted.over || admitted.until <= cx.clock {
            // Over, here or there; or nobody has refreshed it.
            cx.open.admitted.remove(spot);
            return None;
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
        if held.is_some_and(|(_, slot)| ends > cx.clock && Some(slot.nonce) != admitted.doubtful) {
            // slot-not-resurrected: somebody was granted a slot of this name, and holds it.
            admitted.stage = Stage::Lost;
            return None;
        }
        admitted.stage = Stage::Entering;
        let length = admitted.slot.lease_ms.saturating_mul(limits::MILLI);
        admitted.may_last = admitted.may_last.max(cx.clock.saturating_add(STUCK).saturating_add(length));
        let guards = vec![as_read(spot.key(), record), Guard::At(keys::pool(&spot.pool), version)];
        // Its wait may have begun when the store was there.
        let mut writes = found.map_or_else(|| spot.old_places(), |(_, before)| spot.leave(&before));
        let slot = admitted.slot.clone();
        writes.extend(spot.grant(&slot, cx.make.version()));
        self.sent.push(Sent { spot: spot.clone(), nonce, length: Some(length) });
        Some(Draft::new(guards, writes))
    }
}

impl Operation for Enter {
    fn start(&mut self, cx: &mut Cx<'_>) -> Next {
        // Of what was sent before, nothing is certain until it is read.
        self.sent.clear();
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
        for (Sent { spot, nonce, length }, answer) in core::mem::take(&mut self.sent).into_iter().zip(&answers) {
            let Some(admitted) = cx.open.of(&spot, nonce).filter(|_| applied(core::slice::from_ref(answer))) else {
                continue;
            };
            match length {
                Some(length) => {
                    admitted.stage = Stage::Entered;
                    admitted.until = clock.saturating_add(length);
                    admitted.may_last = admitted.until;
                }
                None => {
                    cx.open.admitted.remove(&spot);
                }
            }
        }
        self.start(cx)
    }
}
