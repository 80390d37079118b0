//! What is answered about pools and slots, held against what they went through.

use leasehold_core::pool::record::SlotState;
use leasehold_core::request::{Acquire, SlotId};
use leasehold_core::store::{Clock, Version, keys};
use leasehold_core::{Failure, Name, Outcome, Request, Response};

use super::pools::{Held, PoolFacts};
use super::replies::{Window, lied};
use super::{Oracle, Promise, Violation, object};
use crate::calls::ItemRef;

/// The pool that a request is about.
pub(super) fn pool_of(request: &Request) -> Option<&str> {
    match request {
        Request::Acquire(asked) => Some(&asked.pool),
        Request::RefreshSlot { pool, .. }
        | Request::ReleaseSlot { pool, .. }
        | Request::Pool { pool, .. }
        | Request::DeletePool { pool } => Some(pool),
        Request::SetPool(asked) => Some(&asked.pool),
        _ => None,
    }
}

impl PoolFacts {
    pub(super) fn was(&self, there: bool, since: u64) -> bool {
        let first = self.moments.iter().rposition(|m| m.0 <= since);
        let before = first.is_none() && !there;
        before || self.moments[first.unwrap_or(0)..].iter().any(|m| m.1 == there)
    }

    /// The latest end that the grant has had, unless it is over.
    fn end(&self, member: &Name, nonce: Version) -> Option<(&Held, Clock)> {
        let held = self.held.get(&(member.clone(), nonce))?;
        Some((held, held.ends.iter().next_back().copied()?))
    }
}

impl Oracle {
    pub(super) fn judge_pool_ok(
        &mut self,
        w: Window,
        request: &Request,
        response: &Response,
        outcome: &Outcome,
    ) -> Result<(), Violation> {
        let lie = |why: &str| lied(w, request, outcome, why);
        let (rewound, clock_back, clock) = (self.rewound, self.clock_back, w.clock);
        if let (Request::Pools, Response::Pools(pools)) = (request, response) {
            let was = |f: &PoolFacts| f.was(true, w.from.change) || f.disturbed || rewound;
            let were = pools.iter().all(|view| self.pools.get(&view.name).is_some_and(was));
            return if were { Ok(()) } else { lie("there never was such a pool") };
        }
        if let (Request::Acquire(_), Response::Slot { declared: true, .. }) = (request, response) {
            // What it is worth the world judges: it knows who could reach the store.
            return Ok(());
        }
        if let (Request::RefreshSlot { tenant, pool, slot }, Response::SlotRefreshed { .. }) = (request, response) {
            let member = keys::slot_member(tenant, &slot.slot);
            let declared = slot.nonce.is_some_and(|nonce| {
                let written = self.pools.get(pool).is_some_and(|f| f.held.contains_key(&(member.clone(), nonce)));
                !written && self.declared.contains(&(pool.clone(), member, nonce))
            });
            if declared {
                return Ok(());
            }
        }
        let Some(facts) = pool_of(request).and_then(|pool| self.pools.get_mut(pool)) else {
            return match (request, response) {
                (Request::ReleaseSlot { .. }, Response::SlotReleased) => Ok(()),
                _ => lie("there never was such a pool"),
            };
        };
        match (request, response) {
            (Request::Acquire(asked), Response::Slot { id, expires_at, .. }) => {
                judge_had(w, facts, asked, id, *expires_at, rewound || clock_back)
                    .or_else(|(promise, why)| object(promise, format!("call {}: {why}: {outcome:?}", w.item.call)))
            }
            (Request::RefreshSlot { tenant, slot, .. }, Response::SlotRefreshed { expires_at }) => {
                let member = keys::slot_member(tenant, &slot.slot);
                let held = slot.nonce.and_then(|nonce| facts.held.get(&(member, nonce)));
                let fits = |h: &Held| {
                    let ends = h.ends.contains(expires_at) && *expires_at > w.from.clock;
                    // After the clock went back an end that stands already may lie further off.
                    let later = clock_back && h.ends.iter().next_back() >= Some(expires_at);
                    h.over.is_none_or(|over| over > w.from.change) && (ends || later)
                };
                if rewound || held.is_some_and(fits) { Ok(()) } else { lie("it was not held until then") }
            }
            (Request::ReleaseSlot { tenant, slot, .. }, Response::SlotReleased) => {
                let member = keys::slot_member(tenant, &slot.slot);
                let Some(record) = facts.slots.get(&member).filter(|r| r.lives(clock)) else { return Ok(()) };
                let Some(found) = record.value.as_ref().filter(|s| s.state != SlotState::Over) else { return Ok(()) };
                // Unless it was asked for after this request had come.
                let key = (member.clone(), found.nonce);
                let began = facts.began.get(&key).or(facts.held.get(&key).map(|held| &held.since));
                let before = began.is_some_and(|began| *began <= w.from.change);
                let named = slot.nonce.is_none_or(|nonce| nonce == found.nonce);
                let ends = facts.end(&member, found.nonce).map(|(_, end)| end);
                let stands = !found.state.is_held() || ends.is_some_and(|end| end > clock);
                if before && named && stands && !rewound && !facts.disturbed {
                    return lie("it is still held or waited for");
                }
                Ok(())
            }
            (Request::SetPool(_) | Request::Pool { .. }, Response::Pool(view)) => {
                let there = facts.was(true, w.from.change) || facts.disturbed || rewound;
                let more = view.batch_in_use > view.in_use && !facts.disturbed;
                let another = pool_of(request) != Some(&view.name);
                if !there || more || another { lie("the pool never was so") } else { Ok(()) }
            }
            (Request::DeletePool { .. }, Response::PoolDeleted) => {
                let gone = facts.was(false, w.from.change) || rewound;
                if gone { Ok(()) } else { lie("the pool was not deleted") }
            }
            _ => lie("that is no answer to this"),
        }
    }

    pub(super) fn judge_pool_failure(
        &self,
        w: Window,
        request: &Request,
        failure: &Failure,
        outcome: &Outcome,
    ) -> Result<(), Violation> {
        let lie = |why: &str| lied(w, request, outcome, why);
        let Some(facts) = pool_of(request).and_then(|pool| self.pools.get(pool)) else { return Ok(()) };
        if self.rewound || facts.disturbed {
            return Ok(());
        }
        match (request, failure) {
            (_, Failure::UnknownPool) => match facts.was(false, w.from.change) {
                true => Ok(()),
                false => lie("the pool was there all the time"),
            },
            (Request::RefreshSlot { tenant, slot, .. }, Failure::SlotLost) => {
                let member = keys::slot_member(tenant, &slot.slot);
                let stands = slot.nonce.and_then(|nonce| facts.end(&member, nonce)).is_some_and(|(held, end)| {
                    held.since <= w.from.change && held.over.is_none() && end > w.clock && !self.clock_back
                });
                if stands { lie("it was held all the time") } else { Ok(()) }
            }
            (Request::Acquire(asked), failure) if failure.certain() && asked.slot.is_none() => {
                // slot-not-resurrected: who was refused has left nothing behind.
                let left = facts.slots.iter().find(|(_, record)| {
                    record.lives(w.clock)
                        && record.value.as_ref().is_some_and(|slot| {
                            slot.state != SlotState::Over
                                && slot.holder.as_deref().and_then(ItemRef::find) == Some(w.item)
                        })
                });
                match left {
                    Some((member, _)) => {
                        let what = format!("call {} was refused and {member} is left: {outcome:?}", w.item.call);
                        object(Promise::SlotNotResurrected, what)
                    }
                    None => Ok(()),
                }
            }
            _ => Ok(()),
        }
    }

    pub(super) fn release_arrives(&mut self, pool: &str, tenant: &str, slot: &SlotId) {
        self.releases.push((pool.to_owned(), keys::slot_member(tenant, &slot.slot), slot.nonce));
    }
}

type Why = (Promise, String);

/// A slot was handed out: it was granted so, to nobody else, and not before it was over.
fn judge_had(
    w: Window,
    facts: &mut PoolFacts,
    asked: &Acquire,
    id: &SlotId,
    expires_at: Clock,
    excused: bool,
) -> Result<(), Why> {
    let member = keys::slot_member(&asked.tenant, &id.slot);
    let held = id.nonce.and_then(|nonce| facts.held.get_mut(&(member, nonce)));
    let Some(held) = held else {
        return Err((Promise::HonestReplies, "it was not granted".into()));
    };
    if (held.slot.class, held.slot.cost) != (asked.class, asked.cost) {
        return Err((Promise::HonestReplies, "it is another slot than was asked for".into()));
    }
    if asked.slot.as_ref().is_some_and(|name| *name != id.slot) {
        return Err((Promise::HonestReplies, "it has another name".into()));
    }
    if excused {
        held.told.insert(w.item.call);
        return Ok(());
    }
    if held.over.is_some_and(|over| over <= w.from.change) || expires_at <= w.from.clock {
        return Err((Promise::SlotNotResurrected, "it was over before it was asked for".into()));
    }
    if !held.ends.contains(&expires_at) {
        return Err((Promise::HonestReplies, "it does not end then".into()));
    }
    if asked.slot.is_none() && !held.told.is_empty() {
        return Err((Promise::LimitHeld, "it was handed out twice".into()));
    }
    held.told.insert(w.item.call);
    Ok(())
}
