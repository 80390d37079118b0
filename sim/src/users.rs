//! Users of pools: they wait for slots, hold and refresh them, and give them back; some die with a slot in
//! their hands, freeze past its end and come back, give back twice, leave the line at any stage, or ask again
//! elsewhere. And whoever sets the pools: small, shrunk and grown, deleted and made again.

use std::collections::BTreeMap;

use leasehold_core::job::record::Class;
use leasehold_core::request::{Acquire, SetPool, SlotId};
use leasehold_core::{Failure, Outcome, Request, Response};

use crate::calls::{CallId, Caller, Heard, ItemRef};
use crate::choices::{Choices as _, Topic};
use crate::setup::{MILLI, SECOND};
use crate::world::{Event, Micros, Phase, World};

#[derive(Clone, Debug, Default)]
pub struct User {
    /// Only the newest wake-up counts.
    wake: u32,
    /// What it waits for; asked again with the same name until it hears.
    want: Option<Want>,
    asking: Option<CallId>,
    /// The replica that it asked last.
    asked_at: usize,
    held: Option<Hold>,
    /// Slots of the past, to be tried again.
    old: Vec<(Want, SlotId)>,
    calls: BTreeMap<CallId, Act>,
    wants: u64,
}

#[derive(Clone, Debug)]
struct Want {
    tenant: String,
    pool: String,
    name: Option<String>,
    class: Class,
    cost: u32,
    lease_ms: u64,
    wait_ms: u64,
    tries: u32,
}

#[derive(Clone, Debug)]
struct Hold {
    want: Want,
    id: SlotId,
    refresh_at: Micros,
    end_at: Micros,
    /// It dies with it.
    dies: bool,
    /// The replica that granted it without the store: nobody else knows of it yet.
    at: Option<usize>,
    twice: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Act {
    Acquire,
    Refresh,
    Release,
    /// Nobody waits for the answer.
    Aside,
}

/// The longest lease of a slot with a name that is asked for, in milliseconds; of others twice as much.
pub const SLOT_MS: u64 = 6_000;

/// The name of a pool. One of them needs encoding in keys.
pub fn pool_name(n: u64) -> String {
    if n == 1 { "p/1 ü".into() } else { format!("p{n}") }
}

impl World {
    pub fn start_users(&mut self) {
        if self.setup.pools == 0 {
            return;
        }
        for user in 0..self.setup.users {
            self.users.push(User::default());
            let after = self.choices.draw(Topic::User.of(user), 3 * SECOND);
            self.wake_user(user, after);
        }
        self.schedule(0, Event::Pools);
    }

    fn wake_user(&mut self, u: usize, after: Micros) {
        self.users[u].wake += 1;
        let wake = self.users[u].wake;
        self.schedule(after, Event::User { user: u as u8, wake });
    }

    fn slips(&mut self, u: usize, milli: u32) -> bool {
        self.phase == Phase::Chaos && self.choices.chance(Topic::Slip.of(u), milli)
    }

    pub fn user_wakes(&mut self, u: usize, wake: u32) {
        if self.users[u].wake != wake || self.phase == Phase::Quiet {
            return;
        }
        let at = Topic::User.of(u);
        if self.users[u].held.is_some() {
            self.tend_slot(u);
        } else if self.users[u].asking.is_some() {
            // It leaves the line, whatever has become of its place.
            let vanish = self.setup.manners.vanish;
            if let Some(want) = self.users[u].want.clone().filter(|w| w.name.is_some())
                && self.slips(u, vanish)
            {
                let slot = SlotId { slot: want.name.clone().unwrap_or_default(), nonce: None };
                self.send_slot(u, &want, slot, Act::Aside, true);
            }
        } else if self.users[u].want.is_some() || self.phase == Phase::Chaos {
            self.want_slot(u);
        }
        let user = &self.users[u];
        let next = match &user.held {
            Some(hold) => hold.refresh_at.min(hold.end_at).max(self.now + MILLI) - self.now,
            None => 1 + self.choices.draw(at, 2 * SECOND),
        };
        if self.phase == Phase::Chaos || !self.user_is_settled(u) {
            self.wake_user(u, next);
        }
    }

    fn want_slot(&mut self, u: usize) {
        let at = Topic::User.of(u);
        let mut want = match self.users[u].want.take() {
            Some(want) => want,
            None => {
                self.users[u].wants += 1;
                let number = self.users[u].wants;
                let named = self.choices.draw(at, 3) > 0;
                // Now and then a name that this user, or another, has had before.
                let who = if self.choices.draw(at, 12) == 11 { 0 } else { u as u64 };
                let number = if self.choices.draw(at, 6) == 5 { 1 } else { number };
                let tenant = self.choices.draw(at, self.setup.tenants as u64);
                Want {
                    tenant: self.tenant(tenant),
                    pool: pool_name(self.choices.draw(at, self.setup.pools as u64)),
                    name: named.then(|| format!("u{who}/{number}")),
                    class: *self.choices.pick(at, &[Class::System, Class::Batch, Class::Interactive]),
                    cost: *self.choices.pick(at, &[1, 1, 1, 2, 3]),
                    lease_ms: self.choices.between(at, 300, if named { SLOT_MS } else { 2 * SLOT_MS }),
                    wait_ms: *self.choices.pick(at, &[5_000, 0, 20_000, 1_000]),
                    tries: 0,
                }
            }
        };
        want.tries += 1;
        let call = self.ledger.next();
        let request = Request::Acquire(Box::new(Acquire {
            tenant: want.tenant.clone(),
            pool: want.pool.clone(),
            slot: want.name.clone(),
            class: want.class,
            cost: want.cost,
            holder: Some(format!("h-{}", ItemRef { call, item: 0 }.mark())),
            lease_ms: Some(want.lease_ms),
            wait_ms: want.wait_ms,
        }));
        let mut patience = want.wait_ms * MILLI + 7 * SECOND;
        // What a slot without a name leaves behind nobody can give back.
        let vanish = self.setup.manners.vanish * if want.name.is_none() { 8 } else { 3 };
        if self.slips(u, vanish) {
            // In the very moment of the grant, or while it waits.
            let most = *self.choices.pick(Topic::Slip.of(u), &[3 * SECOND, 3 * MILLI]);
            patience = self.choices.between(Topic::Slip.of(u), MILLI, most);
        }
        self.users[u].want = Some(want);
        self.users[u].asking = Some(call);
        self.users[u].calls.insert(call, Act::Acquire);
        let r = self.any_replica(Topic::User, u);
        self.users[u].asked_at = r;
        self.call(Caller::User(u as u8), 0, r, request, patience);
    }

    /// Refreshes or gives back what is due.
    fn tend_slot(&mut self, u: usize) {
        let now = self.now;
        let Some(hold) = self.users[u].held.clone() else { return };
        if hold.end_at <= now {
            if hold.dies {
                self.forget_slot(u);
                return;
            }
            self.send_slot(u, &hold.want, hold.id, Act::Release, true);
            if let Some(hold) = &mut self.users[u].held {
                hold.end_at = now + 2 * SECOND;
            }
        } else if hold.refresh_at <= now {
            self.send_slot(u, &hold.want, hold.id, Act::Refresh, false);
            if let Some(hold) = &mut self.users[u].held {
                hold.refresh_at = now + hold.want.lease_ms * MILLI / 3;
            }
        }
        // One of the past is refreshed or given back now and then.
        let stale = self.setup.manners.stale_token;
        if !self.users[u].old.is_empty() && self.slips(u, stale) {
            let at = Topic::Slip.of(u);
            let n = self.choices.draw(at, self.users[u].old.len() as u64) as usize;
            let (want, id) = self.users[u].old[n].clone();
            let release = self.choices.draw(at, 2) == 1;
            self.send_slot(u, &want, id, Act::Aside, release);
        }
    }

    fn send_slot(&mut self, u: usize, want: &Want, slot: SlotId, act: Act, release: bool) {
        let call = self.ledger.next();
        let (tenant, pool) = (want.tenant.clone(), want.pool.clone());
        let request = match release {
            true => Request::ReleaseSlot { tenant, pool, slot },
            false => Request::RefreshSlot { tenant, pool, slot },
        };
        self.users[u].calls.insert(call, act);
        let own = self.users[u].held.as_ref().and_then(|hold| hold.at).filter(|_| act != Act::Aside);
        let r = own.unwrap_or_else(|| self.any_replica(Topic::User, u));
        self.call(Caller::User(u as u8), 0, r, request, 6 * SECOND);
    }

    fn forget_slot(&mut self, u: usize) {
        let user = &mut self.users[u];
        user.want = None;
        if let Some(hold) = user.held.take() {
            user.old.push((hold.want, hold.id));
            if user.old.len() > 6 {
                user.old.remove(0);
            }
        }
    }

    pub fn user_hears(&mut self, u: usize, call: CallId, heard: Heard) {
        let Some(act) = self.users[u].calls.remove(&call) else { return };
        // Who was refused, or finds nobody there, does not ask again at once: nothing new would come of it.
        let refused = act == Act::Acquire && matches!(heard, Heard::NotDelivered | Heard::Answer(Err(_)));
        let outcome = match heard {
            Heard::Answer(outcome) => Some(outcome),
            Heard::NotDelivered | Heard::Nothing => None,
        };
        let after = if refused { self.choices.between(Topic::User.of(u), 50 * MILLI, SECOND) } else { MILLI };
        match act {
            Act::Acquire if self.users[u].asking == Some(call) => self.slot_heard(u, outcome),
            Act::Refresh if matches!(outcome, Some(Err(Failure::SlotLost))) => self.forget_slot(u),
            Act::Release => match outcome {
                Some(Ok(_)) => {
                    let again = self.users[u].held.take_if(|hold| std::mem::take(&mut hold.twice));
                    if let Some(hold) = again {
                        self.send_slot(u, &hold.want.clone(), hold.id.clone(), Act::Aside, true);
                        self.users[u].held = Some(hold);
                    }
                    self.forget_slot(u);
                }
                // Asked again, until it is certain.
                _ => {
                    let again = self.now + SECOND;
                    if let Some(hold) = &mut self.users[u].held {
                        hold.end_at = hold.end_at.min(again);
                    }
                }
            },
            Act::Acquire | Act::Refresh | Act::Aside => {}
        }
        if !self.user_is_settled(u) || self.phase == Phase::Chaos {
            self.wake_user(u, after);
        }
    }

    fn slot_heard(&mut self, u: usize, outcome: Option<Outcome>) {
        let at = Topic::User.of(u);
        self.users[u].asking = None;
        let Some(want) = self.users[u].want.clone() else { return };
        match outcome {
            Some(Ok(Response::Slot { id, declared, .. })) => {
                self.counts.slots += 1;
                let manners = self.setup.manners.clone();
                let lease = want.lease_ms * MILLI;
                let mut hold = Hold {
                    refresh_at: self.now + lease / 3,
                    end_at: self.now + self.choices.draw(at, if declared { 20 * SECOND } else { 4 * SECOND }),
                    at: declared.then_some(self.users[u].asked_at),
                    dies: self.slips(u, manners.die),
                    twice: self.slips(u, manners.twice),
                    want,
                    id,
                };
                if self.slips(u, manners.hang) {
                    // It freezes, and goes on as if nothing had been.
                    let thaw = self.now + lease + self.choices.draw(Topic::Slip.of(u), 3 * SECOND);
                    hold.refresh_at = thaw;
                    hold.end_at = thaw + self.choices.draw(Topic::Slip.of(u), SECOND);
                }
                if self.phase != Phase::Chaos {
                    hold.end_at = self.now;
                }
                self.users[u].held = Some(hold);
            }
            // In time it keeps its place, if it has a name.
            Some(Err(Failure::PoolFull { .. })) | None if want.name.is_some() && want.tries < 6 => {
                if self.phase != Phase::Chaos || self.choices.draw(at, 4) == 3 {
                    self.users[u].want = None;
                }
            }
            Some(Err(Failure::OutcomeUnknown { .. })) if want.name.is_some() && want.tries < 6 => {}
            _ => self.users[u].want = None,
        }
    }

    fn user_is_settled(&self, u: usize) -> bool {
        let user = &self.users[u];
        user.held.is_none() && user.asking.is_none() && user.want.is_none()
    }

    /// Whether no user holds anything or waits for anything.
    pub fn users_settled(&self) -> bool {
        (0..self.users.len()).all(|u| self.user_is_settled(u))
    }

    pub fn heal_users(&mut self) {
        for u in 0..self.users.len() {
            let now = self.now;
            if let Some(hold) = &mut self.users[u].held {
                hold.dies = false;
                hold.end_at = hold.end_at.min(now + SECOND);
            }
            self.wake_user(u, 0);
        }
    }

    /// Sets a pool, or looks at it.
    pub fn pools_wake(&mut self) {
        let at = Topic::Pools.of(0);
        if self.phase != Phase::Chaos {
            return;
        }
        let own = usize::from(!self.setup.config.routing.routes.is_empty());
        let n = self.choices.draw(at, (self.setup.pools + own) as u64);
        let (tenant, pool) = (self.tenant(0), pool_name(n));
        let request = match self.choices.draw(at, 12) {
            0..=7 => {
                let total = self.choices.between(at, 1, 5);
                let batch = self.choices.draw(at, 4) == 3;
                let batch_max = batch.then(|| total.min(2));
                Request::SetPool(SetPool { tenant, pool, total: Some(total), batch_max, lease_ms: Some(SLOT_MS) })
            }
            8 | 9 => Request::Pool { tenant, pool },
            10 => Request::Pools,
            _ => Request::DeletePool { pool },
        };
        let r = self.any_replica(Topic::Pools, 0);
        self.call(Caller::Operator, 0, r, request, 6 * SECOND);
        let after = 1 + self.choices.draw(at, 5 * SECOND);
        self.schedule(after, Event::Pools);
    }
}
