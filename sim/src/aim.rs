//! Aimed faults: most seeds pick one cell of the tables of what is struck, and see to it that it is reached.
//!
//! Faults that come by chance meet what is frequent; a queue's settings, say, are hardly ever under way when a
//! replica is paused. So a seed draws an operation, a fault, and a side of the commit, and when that operation
//! passes for the n-th time the fault strikes it there. All else is as the seed has it.

use std::sync::Arc;

use leasehold_core::store::Txn;
use leasehold_core::{StoreId, StoreOp};

use crate::choices::{Choices as _, Topic};
use crate::setup::{MILLI, Regime, SECOND, Setup};
use crate::tables::{Blow, Deed, Word as _, deed, mends, never_after, never_before};
use crate::world::{Event, Micros, Phase, World};

#[derive(Clone, Copy, Debug)]
pub struct Aim {
    pub deed: Deed,
    pub blow: Blow,
    /// After the commit, not before.
    pub after: bool,
    /// How often the operation passes unharmed before.
    pub passes: u64,
}

/// Whether an operation can come in a world with this setup.
fn can_come(deed: Deed, setup: &Setup) -> bool {
    use Deed as D;
    match deed {
        D::Lose | D::Mend => setup.regime == Regime::EvictKeys,
        D::GroupCreate | D::GroupExtend | D::GroupSeal | D::GroupStop | D::GroupFinal | D::GroupRemove | D::LetGo => {
            setup.owners > 0
        }
        D::PoolSet | D::SlotGrant | D::SlotWait | D::SlotRefresh | D::SlotRelease => setup.pools > 0,
        D::Dispatch | D::GiveBack | D::Hold => !setup.config.routing.routes.is_empty(),
        _ => true,
    }
}

fn targets(setup: &Setup, mending: bool) -> Vec<(Deed, Blow, bool)> {
    let mut all = Vec::new();
    for deed in Deed::ALL {
        for blow in Blow::ALL {
            let here = can_come(*deed, setup)
                && mends(*deed) == mending
                && (*blow != Blow::Forgotten || setup.regime == Regime::LoseLastCommits);
            if here && never_before(*deed, *blow).is_none() {
                all.push((*deed, *blow, false));
            }
            if here && never_after(*deed, *blow).is_none() {
                all.push((*deed, *blow, true));
            }
        }
    }
    all
}

impl World {
    /// Draws what this seed aims at. 0: at nothing.
    pub fn take_aim(&mut self) {
        let at = Topic::Aim.of(0);
        // What mends is rare, and so is the regime in which it comes.
        let mending = self.setup.regime == Regime::EvictKeys && self.choices.draw(at, 2) == 1;
        let targets = targets(&self.setup, mending);
        let pick = self.choices.draw(at, targets.len() as u64 + 1) as usize;
        let passes = if mending { 0 } else { self.choices.draw(at, 4) };
        if let Some((deed, blow, after)) = pick.checked_sub(1).and_then(|n| targets.get(n).copied()) {
            self.links.repeats = blow == Blow::Repeated;
            self.aim = Some(Aim { deed, blow, after, passes });
        }
    }

    /// Whatever is to be mended has to be broken first.
    pub fn lay_bait(&mut self) {
        match self.aim.map(|aim| aim.deed) {
            Some(Deed::Lose) => self.strike("evict_job"),
            Some(Deed::Mend) if self.choices.draw(Topic::Aim.of(2), 3) == 2 => self.strike("corrupt"),
            Some(Deed::Mend) => self.strike("drop_entry"),
            _ => {}
        }
    }

    /// Whether one of these blows strikes now: the operation passes on that side of its commit.
    pub fn aimed(&mut self, op: &StoreOp, after: bool, blows: &[Blow]) -> Option<Blow> {
        let aim = self.aim.filter(|aim| aim.after == after && blows.contains(&aim.blow))?;
        let StoreOp::Commit(commit) = op else { return None };
        if self.phase != Phase::Chaos || !commit.txns.iter().any(|txn| deed(txn) == aim.deed) {
            return None;
        }
        self.hits(aim)
    }

    fn hits(&mut self, aim: Aim) -> Option<Blow> {
        if aim.passes > 0 {
            self.aim = Some(Aim { passes: aim.passes - 1, ..aim });
            return None;
        }
        self.aim = None;
        self.count_fault("aimed");
        let side = if aim.after { "after" } else { "before" };
        self.say_fault(&format!("aimed at {:?}: {} {side} its commit", aim.deed.text(), aim.blow.text()));
        Some(aim.blow)
    }

    /// After how many transactions an aimed cut falls.
    pub fn aimed_cut(&mut self, txns: &[Arc<Txn>]) -> Option<usize> {
        let aim = self.aim.filter(|aim| aim.blow == Blow::Partial && self.phase == Phase::Chaos)?;
        let at = txns.iter().position(|txn| deed(txn) == aim.deed)?;
        let keep = at + usize::from(aim.after);
        if txns.len() < 2 || keep == txns.len() {
            return None;
        }
        self.hits(aim).map(|_| keep)
    }

    /// A request is about to leave its replica, and to arrive after that time; whether it goes.
    pub fn aim_at_request(&mut self, r: usize, epoch: u32, id: StoreId, op: &Arc<StoreOp>, after: Micros) -> bool {
        const BLOWS: [Blow; 9] = [
            Blow::RequestLost,
            Blow::RequestLate,
            Blow::Refused,
            Blow::Broken,
            Blow::CutOff,
            Blow::Crash,
            Blow::Pause,
            Blow::StoreClock,
            Blow::ReplicaClock,
        ];
        let Some(blow) = self.aimed(op, false, &BLOWS) else { return true };
        let replica = r as u8;
        let arrive = Event::AtStore { replica, epoch, id, op: op.clone(), answer: true, again: false };
        match blow {
            Blow::RequestLost => {
                self.say_request(r, id, "is lost on its way");
                self.blow(blow, op, false);
            }
            Blow::RequestLate => {
                self.say_request(r, id, "is late by 7 s");
                self.blow(blow, op, false);
                self.schedule(after + 7 * SECOND, arrive);
            }
            Blow::Refused => {
                self.say_request(r, id, "fails before it is sent");
                self.blow(blow, op, false);
                self.reply_to(r, epoch, id, op, Err(leasehold_core::store::StoreError::Unavailable));
            }
            Blow::Broken => {
                self.say_request(r, id, "fails on its way, and is lost");
                self.blow(blow, op, false);
                self.reply_to(r, epoch, id, op, Err(leasehold_core::store::StoreError::Unknown));
            }
            Blow::CutOff => {
                self.say_request(r, id, "is lost on its way");
                self.blow(blow, op, false);
                self.links.to_store[r] = self.now + 3 * SECOND;
            }
            _ => {
                self.schedule(after / 2, Event::Aimed { replica, epoch, blow });
                return true;
            }
        }
        false
    }

    /// A reply is about to leave the store; whether it goes.
    pub fn aim_at_reply(&mut self, r: usize, epoch: u32, id: StoreId, op: &Arc<StoreOp>) -> bool {
        const BLOWS: [Blow; 8] = [
            Blow::Broken,
            Blow::CutOff,
            Blow::ReplyLost,
            Blow::Crash,
            Blow::Pause,
            Blow::StoreClock,
            Blow::ReplicaClock,
            Blow::Forgotten,
        ];
        let Some(blow) = self.aimed(op, true, &BLOWS) else { return true };
        match blow {
            Blow::ReplyLost => {
                self.say_answer_of(r, id, "is lost on its way");
                self.blow(blow, op, true);
            }
            Blow::Broken => {
                self.say_answer_of(r, id, "is lost on its way");
                self.blow(blow, op, true);
                self.reply_to(r, epoch, id, op, Err(leasehold_core::store::StoreError::Unknown));
            }
            Blow::CutOff => {
                self.say_answer_of(r, id, "is lost on its way");
                self.blow(blow, op, true);
                self.links.from_store[r] = self.now + 3 * SECOND;
            }
            Blow::Forgotten => {
                self.rewind(1);
                return true;
            }
            _ => {
                // Before the reply can have arrived.
                self.schedule(50, Event::Aimed { replica: r as u8, epoch, blow });
                return true;
            }
        }
        false
    }

    /// Strikes a replica, or the store's clock, while the aimed operation is under way.
    pub fn strike_aimed(&mut self, r: usize, epoch: u32, blow: Blow) {
        if self.phase != Phase::Chaos || self.hosts[r].epoch != epoch {
            return;
        }
        let at = Topic::Aim.of(1);
        match blow {
            Blow::Crash => {
                let rest = self.choices.between(at, 10 * MILLI, 8 * SECOND);
                self.crash(r, Some(rest));
            }
            Blow::Pause => {
                let length = self.choices.between(at, 100 * MILLI, 20 * SECOND);
                self.pause(r, length);
            }
            Blow::StoreClock => {
                self.blow_all(blow, None);
                self.store.stepped += self.choices.between(at, 100 * MILLI, 20 * SECOND) as i64;
            }
            Blow::ReplicaClock => {
                let by = self.choices.between(at, 100 * MILLI, 600 * SECOND);
                self.step_clock(r, by);
            }
            _ => {}
        }
    }
}
