//! Slots that a replica grants while it cannot reach the store: only then, never more at a time than it may,
//! and written down once the store is back. What is known of them until then only the replica knows, so this
//! is judged by its answers alone.

use leasehold_core::limits;
use leasehold_core::request::SlotId;
use leasehold_core::store::{Clock, keys};
use leasehold_core::{Failure, Outcome, Request, Response};

use crate::calls::CallId;
use crate::oracle::Promise;
use crate::setup::{MILLI, SECOND};
use crate::world::{Micros, World};

/// One that is still there as far as anybody has been told.
#[derive(Clone, Debug)]
pub struct Declared {
    replica: usize,
    epoch: u32,
    tenant: String,
    pool: String,
    id: SlotId,
    cost: u32,
    lease_us: u64,
    /// Its end by the clock of its replica, and by the world's: one of them may have been stepped.
    until: Clock,
    ends: Micros,
    told: Micros,
    /// Since when its replica has the store again, the answers that it had had by then, and the store's changes.
    back: Option<(Micros, u64, u64)>,
    /// Somebody gave back whatever has its name, maybe before it was granted, or it is not known whether that was done.
    maybe_over: bool,
}

/// From when the store is back to when what was granted without it must be written down: a try a second, and a
/// commit whose outcome is unknown until its time has passed …
const WRITTEN_WITHIN: Micros = 7 * SECOND;
/// … which each of several may meet if the store goes on to lose what it is sent, one at a time.
const WRITTEN_AT_LAST: Micros = 15 * SECOND;
/// Good answers that the replica must have had meanwhile.
const ANSWERS: u64 = 20;

impl World {
    /// Of an answer that is about to be sent.
    pub fn judge_declared(&mut self, r: usize, call: CallId, outcome: &Outcome) {
        let Some(request) = self.ledger.get(call).map(|c| c.request.clone()) else { return };
        let epoch = self.hosts[r].epoch;
        match (&*request, outcome) {
            (Request::Acquire(asked), Ok(Response::Slot { id, expires_at, declared: true, .. })) => {
                let Some(replica) = &self.hosts[r].replica else { return };
                if let Some(nonce) = id.nonce {
                    self.oracle.declare(&asked.pool, keys::slot_member(&asked.tenant, &id.slot), nonce);
                }
                let known = self.declared.iter().any(|d| d.id == *id && (&d.pool, d.replica) == (&asked.pool, r));
                // Written down by another replica, and maybe given back since this one read of it.
                let written =
                    self.oracle.was_entered(&asked.pool, &keys::slot_member(&asked.tenant, &id.slot), id.nonce);
                if known || written {
                    return;
                }
                if !replica.stats().breaker_open {
                    let what = format!("call {call}: replica {r} has the store and granted by itself: {outcome:?}");
                    return self.violate(Promise::LimitHeld, what);
                }
                // By the replica's own clock, which may have been another one before it heard the store again.
                let lease_us = asked.lease_ms.unwrap_or(0) * 1_000;
                let begun = expires_at.saturating_sub(lease_us);
                for d in self.declared.iter_mut().filter(|d| (d.replica, d.epoch) == (r, epoch)) {
                    d.until = d.until.min(begun + d.lease_us);
                }
                let bound = self.setup.config.fail_open.get(&asked.pool).map_or(0, |how| how.local);
                self.declared.push(Declared {
                    replica: r,
                    epoch,
                    tenant: asked.tenant.clone(),
                    pool: asked.pool.clone(),
                    id: id.clone(),
                    cost: asked.cost,
                    lease_us,
                    until: *expires_at,
                    ends: self.now + lease_us,
                    told: self.now,
                    back: None,
                    maybe_over: false,
                });
                let here = |d: &&Declared| (d.replica, d.epoch, &d.pool) == (r, epoch, &asked.pool);
                // A clock that is stepped over their ends takes all of them to be over.
                let since = self.hosts[r].undisturbed_since;
                let live = |d: &&Declared| d.until > begun && d.ends > self.now && d.told >= since;
                let there = self.declared.iter().filter(here).filter(live);
                // Whoever gives one back without a nonce gives it back here before the store is asked about its name.
                let held = there.filter(|d| !d.maybe_over && !self.is_being_released(d)).map(|d| d.cost);
                let held: u32 = held.sum();
                if held > bound {
                    let what =
                        format!("call {call}: replica {r} has granted {held} by itself, of {bound}: {outcome:?}");
                    self.violate(Promise::LimitHeld, what);
                }
            }
            (Request::RefreshSlot { tenant, pool, slot }, Ok(Response::SlotRefreshed { expires_at })) => {
                let member = keys::slot_member(tenant, &slot.slot);
                let here = self.declared.iter().find(|d| (&d.pool, &d.id, d.replica) == (pool, slot, r));
                // A clock that was stepped has other ends.
                let since = self.hosts[r].undisturbed_since;
                // Its clock may run slow by a hundredth; and a reply of the store that comes late sets it back by as
                // long as that was on its way.
                let slack = |d: &Declared| d.lease_us / 50 + limits::STORE_TIMEOUT_MS * MILLI + SECOND / 100;
                let lives = here.is_some_and(|d| d.ends + slack(d) >= self.now || d.told < since);
                let local = slot.nonce.is_some_and(|n| self.oracle.is_declared(pool, &member, n));
                // By a clock that has gone back its end may have come once more.
                let lives = lives || self.oracle.clock_back;
                if local && !lives && !self.oracle.was_held(pool, &member, slot.nonce) {
                    let what = format!("call {call}: replica {r} has refreshed what was over: {here:?}, {outcome:?}");
                    return self.violate(Promise::SlotNotResurrected, what);
                }
                // Once it is written down it can be kept elsewhere, where nobody counts it as declared.
                let of = |d: &&mut Declared| (&d.pool, &d.id, d.replica) == (pool, slot, r);
                if let Some(found) = self.declared.iter_mut().find(of) {
                    found.until = found.until.max(*expires_at);
                    found.ends = self.now + found.lease_us;
                    found.maybe_over = false;
                }
            }
            (Request::RefreshSlot { pool, slot, .. }, Err(Failure::SlotLost)) => {
                self.declared.retain(|d| (&d.pool, &d.id, d.replica) != (pool, slot, r));
            }
            (
                Request::ReleaseSlot { tenant, pool, slot },
                Ok(Response::SlotReleased) | Err(Failure::OutcomeUnknown { .. }),
            ) => {
                let certain = outcome.is_ok() && slot.nonce.is_some();
                // Any of its name, if it does not say which.
                self.declared.retain_mut(|d| {
                    let another = (&d.tenant, &d.pool, &d.id.slot) != (tenant, pool, &slot.slot)
                        || d.replica != r
                            && !self.oracle.is_over(pool, &keys::slot_member(tenant, &slot.slot), d.id.nonce)
                        || slot.nonce.is_some_and(|nonce| Some(nonce) != d.id.nonce);
                    d.maybe_over |= !another;
                    another || !certain
                });
            }
            _ => {}
        }
    }

    /// Whether its replica has been asked to take it back, and has not answered.
    fn is_being_released(&self, d: &Declared) -> bool {
        self.hosts[d.replica].open.iter().filter_map(|call| self.ledger.get(*call)).any(|call| match &*call.request {
            Request::ReleaseSlot { tenant, pool, slot } => {
                let nonce = slot.nonce.is_none() || slot.nonce == d.id.nonce;
                (tenant, pool, &slot.slot) == (&d.tenant, &d.pool, &d.id.slot) && nonce
            }
            _ => false,
        })
    }

    /// limit-held: while it is not written down, others are granted the room that it has.
    pub fn written_down(&mut self) {
        let clock = self.store.tick(self.now);
        let now = self.now;
        let f = &self.setup.faults;
        let loses = f.store_request_lost + f.store_reply_lost + f.store_error + f.store_late + f.store_partial > 0;
        let slow = loses || self.setup.config.commit_txns == 1;
        let within = if slow { WRITTEN_AT_LAST } else { WRITTEN_WITHIN };
        let mut late = None;
        self.declared.retain_mut(|d| {
            let host = &self.hosts[d.replica];
            let Some(replica) = host.replica.as_ref().filter(|_| host.epoch == d.epoch) else { return false };
            if replica.stats().breaker_open || host.paused || host.undisturbed_since + within > now {
                d.back = None;
                return true;
            }
            let (since, answers, change) = *d.back.get_or_insert((now, host.answers, self.oracle.changes()));
            let member = keys::slot_member(&d.tenant, &d.id.slot);
            let settled = since + within < now && answers + ANSWERS < host.answers;
            let there = !self.oracle.pool_was_absent(&d.pool, change);
            let held = d.until > clock && d.ends > now;
            if settled && there && held && !d.maybe_over && !self.oracle.was_held(&d.pool, &member, d.id.nonce) {
                late = Some(format!("replica {} has granted {d:?} and not written it down", d.replica));
            }
            held || !settled
        });
        if let Some(what) = late {
            self.violate(Promise::LimitHeld, what);
        }
    }
}
