//! Getting a slot: at once if there is room and nobody waits before it, else in line.
//!
//! All that this operation knows it reads from the slot's record each time, so whatever became of a
//! transaction of its own whose reply was lost, deciding anew is right. Whoever waits costs a read and a
//! renewal now and then, whatever the length of the line: it is woken when it is first, or about to be.

use alloc::boxed::Box;
use alloc::format;
use alloc::vec;
use alloc::vec::Vec;

use super::open::{FailOpen, Open, in_use};
use super::record::{Pool, Slot, SlotState};
use super::usage::{self, Usage};
use super::{Release, Spot, nobody, of, room, slot_of};
use crate::codec;
use crate::failure::Failure;
use crate::ids::Maker;
use crate::job::check;
use crate::job::moves::{add, as_read, put, remove};
use crate::job::record::Class;
use crate::limits;
use crate::name::Name;
use crate::replica::Op;
use crate::replica::task::{Cx, Draft, Evidence, Next, Operation, Plan, Wait, applied};
use crate::request::{Acquire as Asked, Outcome, Response, SlotId};
use crate::store::{
    Answer, Clock, Expiry, Guard, Place, Read, Record, ScoreAt, Snapshot, Span, Standing, Version, Write, keys,
};

#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct Acquire {
    asked: Box<Asked>,
    spot: Spot,
    stage: Stage,
    /// Notifications that had come before what was read last was asked for.
    since: u64,
    /// Room that was left after the grant, for whoever stands behind.
    left: u64,
    /// It has asked for a place before.
    arrived: bool,
}

#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
enum Stage {
    Look,
    /// Whether a grant still stands.
    Stands {
        version: Version,
        slot: Slot,
    },
    /// The transactions about others come first, so many of them.
    Sent {
        tidied: usize,
        what: Sent,
    },
}

#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
enum Sent {
    /// A grant, then perhaps a place in line.
    Arrive(Grant, Line),
    /// A grant to one that has waited.
    Promote(Grant, Line),
    /// Perhaps a sign of life.
    Renew(Line),
    /// Out of the line, with this answer; none: what is left of a grant that has lapsed.
    End(Option<Failure>),
}

#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
struct Grant {
    nonce: Version,
    length: u64,
    /// Room that is left after it.
    left: u64,
}

/// Waiting in line.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
struct Line {
    /// The slot's record, once there is one.
    found: Option<(Version, Slot)>,
    /// When it began to wait: its turn among this replica's waiters.
    turn: Clock,
    again_ms: u64,
    /// The answer when there is no time left to wait.
    full: Failure,
}

/// What was read, of one moment.
struct Seen<'a> {
    usage: Usage,
    slot: &'a Record,
    /// How long the line is: more than have a deadline when one of these was lost.
    line: u64,
    place: Option<Place>,
    deadline: Option<Place>,
    clock: Clock,
}

impl Acquire {
    pub fn new(asked: Box<Asked>) -> Result<Acquire, Failure> {
        check::name("pool", &asked.pool)?;
        if let Some(slot) = &asked.slot {
            check::name("slot_id", slot)?;
            if SlotId::parse(slot).nonce.is_some() {
                return Err(check::invalid("slot_id", "must not end in a colon and 16 hexadecimal digits".into()));
            }
        }
        if let Some(holder) = &asked.holder {
            check::name("holder", holder)?;
        }
        check::within("cost", Some(asked.cost.into()), 1, limits::COST_MAX.into())?;
        check::within("lease_ms", asked.lease_ms, limits::LEASE_MS_MIN, limits::LEASE_MS_MAX)?;
        check::within("wait_ms", Some(asked.wait_ms), 0, limits::WAIT_MS)?;
        let spot = Spot {
            pool: asked.pool.clone(),
            tenant: asked.tenant.clone(),
            slot: asked.slot.clone().unwrap_or_default(),
        };
        Ok(Acquire { asked, spot, stage: Stage::Look, since: 0, left: 0, arrived: false })
    }

    /// A slot without the store, if this replica may admit anybody else by itself.
    pub fn declare(&self, open: &mut Open, how: &FailOpen, make: &mut Maker, clock: Clock) -> Option<Outcome> {
        let name =
            if self.spot.slot.is_empty() { format!("{:016x}", make.version().0) } else { self.spot.slot.clone() };
        let spot = Spot { slot: name, ..self.spot.clone() };
        let slot = Slot {
            state: SlotState::Declared,
            nonce: make.version(),
            class: self.asked.class,
            cost: self.asked.cost,
            lease_ms: self.asked.lease_ms.unwrap_or(how.lease_ms),
            holder: self.asked.holder.clone(),
        };
        open.again(&spot, slot.class, slot.cost, clock)
            .or_else(|| open.admit(&spot, slot, self.in_doubt(), how.local, clock))
    }

    /// The grant that may have been made, or may still be.
    fn in_doubt(&self) -> Option<Version> {
        match &self.stage {
            Stage::Sent { what: Sent::Arrive(grant, _) | Sent::Promote(grant, _), .. } => Some(grant.nonce),
            _ => None,
        }
    }

    /// What was declared under its name and is not in the store yet.
    pub fn declared(&self, open: &Open, clock: Clock) -> Option<Outcome> {
        open.again(&self.spot, self.asked.class, self.asked.cost, clock)
    }

    pub fn pool(&self) -> &str {
        &self.spot.pool
    }

    pub fn wait_ms(&self) -> u64 {
        self.asked.wait_ms
    }

    /// The line in which those stand who come after it, in order, and how many of them may try at once: there
    /// was room left.
    pub fn behind(&self) -> impl Iterator<Item = (Name, u64)> {
        let topic = keys::topic_pool(&self.spot.pool);
        let (class, left) = (self.asked.class, self.left.min(limits::WAITERS_WOKEN));
        let below = Class::ALL.into_iter().filter(move |c| *c >= class && left > 0);
        below.map(move |c| (keys::line(&topic, c), if c == class { left } else { 1 }))
    }

    fn look(&mut self, cx: &Cx<'_>) -> Next {
        self.stage = Stage::Look;
        self.since = cx.notices;
        let pool = &self.spot.pool;
        let mut counts: Vec<(Name, Span)> = usage::counts(pool).collect();
        let lines = [keys::waiting(pool, self.asked.class), keys::alive(pool, self.asked.class)];
        counts.push((keys::waiting(pool, self.asked.class), Span::All));
        Next::Read(Read {
            records: vec![keys::pool(pool), self.spot.key()],
            slices: vec![usage::next_end(pool, cx)],
            counts,
            members: lines.map(|index| (index, self.spot.member())).into(),
            ..Read::default()
        })
    }

    /// Nobody waits for the answer any more. Whatever the slot has become by now, nothing of it stays, unless
    /// it was given a name: then its place, or its grant, is there for a repeat until its time is over.
    fn leave(&self) -> Next {
        match self.asked.slot {
            Some(_) => Next::ok(Response::SlotReleased),
            None => Next::Become(Op::Release(Box::new(Release::of(self.spot.clone())))),
        }
    }

    /// No time is left to wait.
    fn last(&self, cx: &Cx<'_>) -> bool {
        self.asked.wait_ms == 0 || cx.last_try || cx.stats.draining
    }

    /// Whether it must still be told when its asker has gone: it may have left something.
    pub fn leaves_traces(&self) -> bool {
        self.asked.slot.is_none()
    }

    fn decide(&mut self, seen: &Seen<'_>, cx: &mut Cx<'_>) -> Next {
        let found = match slot_of(seen.slot) {
            Ok(found) => found.filter(|(_, slot)| slot.state != SlotState::Over),
            Err(failure) => return Next::fail(failure),
        };
        let Some((version, slot)) = found else { return self.arrive(seen, cx) };
        match slot.state {
            _ if slot.class != self.asked.class || slot.cost != self.asked.cost => Next::fail(in_use(&slot)),
            SlotState::Granted | SlotState::Declared => {
                let members = self.spot.units(&slot);
                self.stage = Stage::Stands { version, slot };
                Next::Read(Read { records: vec![self.spot.key()], members, ..Read::default() })
            }
            SlotState::Waiting { since } => self.wait_on(version, slot, since, seen, cx),
            SlotState::Over => self.arrive(seen, cx),
        }
    }

    fn too_dear(&self, pool: &Pool) -> Option<Failure> {
        let (cost, class, most) = (self.asked.cost, self.asked.class, pool.most(self.asked.class));
        let detail = || format!("is {cost}, the pool has {most} for class {}", class.text());
        (cost > most).then(|| check::invalid("cost", detail()))
    }

    fn full(&self, seen: &Seen<'_>, position: u64, cx: &Cx<'_>) -> Failure {
        if cx.stats.draining {
            return Failure::Draining { retry_after_ms: 1_000 };
        }
        let most = seen.usage.pool.most(self.asked.class);
        let estimated_wait_ms = cx.held.estimate_ms(&self.spot.pool, seen.usage.pool.lease_ms, position, most);
        // Whoever gave the slot a name keeps its place if it is back in time.
        let soonest = if self.asked.slot.is_some() { 1_000 } else { estimated_wait_ms };
        Failure::PoolFull { position, estimated_wait_ms, retry_after_ms: soonest.clamp(1_000, 60_000) }
    }

    /// When to look again whatever happens, in microseconds from now.
    fn again(seen: &Seen<'_>, first: bool, cx: &Cx<'_>) -> u64 {
        let pace = limits::WAITER_RENEW_MS * limits::MILLI;
        // A holder that lapses tells nobody: whoever is next looks at that time.
        let ends = if seen.usage.sparing { Some(cx.spare_until) } else { seen.usage.next_end };
        let ends = ends.filter(|_| first).map(|at| at.saturating_sub(seen.clock));
        ends.map_or(pace, |after| after.min(pace)) / limits::MILLI + 1
    }

    /// Neither waiting nor granted: a grant if it may have one now, else a place in line.
    fn arrive(&mut self, seen: &Seen<'_>, cx: &mut Cx<'_>) -> Next {
        if let Some(failure) = self.too_dear(&seen.usage.pool) {
            return Next::fail(failure);
        }
        let (pool, class, cost) = (&self.spot.pool, self.asked.class, self.asked.cost);
        let ahead = seen.usage.waiters(|c| c <= class);
        let free = seen.usage.room(class);
        let full = self.full(seen, ahead + 1, cx);
        let queues = !self.last(cx) || self.asked.slot.is_some();
        if (ahead > 0 || free < cost.into()) && !queues {
            return Next::fail(full);
        }
        let own = cx.make.version();
        let lease_ms = self.asked.lease_ms.unwrap_or(seen.usage.pool.lease_ms);
        let state = SlotState::Waiting { since: seen.clock };
        let slot = Slot { state, nonce: own, class, cost, lease_ms, holder: self.asked.holder.clone() };
        let mut drafts = seen.usage.tidy(pool);
        let tidied = drafts.len();
        let as_it_is = || vec![as_read(self.spot.key(), seen.slot), Guard::At(keys::pool(pool), seen.usage.version)];
        let mut guards = as_it_is();
        guards.extend(nobody(pool, Class::ALL.into_iter().filter(|c| *c <= class)));
        // limit-held: refused if another took the room meanwhile.
        guards.extend(room(pool, &seen.usage.pool, class, cost));
        // Nobody has had a name before that is drawn here.
        let fresh = self.asked.slot.is_none() && !self.arrived;
        let old_places = if fresh { Vec::new() } else { self.spot.old_places() };
        let mut granting = old_places.clone();
        granting.extend(self.spot.grant(&slot, own));
        self.arrived = true;
        drafts.push(Draft::new(guards, granting));
        if queues {
            let mut writes = old_places;
            writes.extend([
                put(self.spot.key(), own, codec::encode(&slot), Expiry::Clock(limits::SLOT_KEPT)),
                add(keys::waiting(pool, class), &self.spot.member(), ScoreAt::Number(seen.clock)),
                add(keys::alive(pool, class), &self.spot.member(), ScoreAt::Clock(limits::WAITER)),
            ]);
            // Of the two the second is refused if the first was applied.
            drafts.push(Draft::new(as_it_is(), writes));
        }
        let length = lease_ms.saturating_mul(limits::MILLI);
        let grant = Grant { nonce: own, length, left: free.saturating_sub(cost.into()) };
        let again_ms = Acquire::again(seen, ahead == 0, cx);
        let line = Line { found: Some((own, slot)), turn: seen.clock, again_ms, full };
        self.stage = Stage::Sent { tidied, what: Sent::Arrive(grant, line) };
        // honest-replies: where no place in line is taken, nothing that is left of it tells that it was refused,
        // and there may come to be room for an earlier copy of it.
        let evidence = (!queues).then(|| Evidence::time(self.spot.key(), own));
        Next::Commit(Plan { txns: drafts, grows: false, evidence })
    }

    /// In line: a grant if it is its turn, else a sign of life now and then.
    fn wait_on(&mut self, version: Version, slot: Slot, since: Clock, seen: &Seen<'_>, cx: &mut Cx<'_>) -> Next {
        let (class, cost) = (slot.class, u64::from(slot.cost));
        if let Some(failure) = self.too_dear(&seen.usage.pool) {
            // The pool has shrunk below what it wants.
            return self.end(&slot, version, Some(failure), cx);
        }
        let rank = seen.place.map_or(0, |p| p.rank);
        let higher = seen.usage.waiters(|c| c < class);
        // Those before it for whom somebody is there each want at least one.
        let ahead = rank.saturating_sub(if seen.usage.sparing { 0 } else { seen.usage.forsaken(class) });
        let free = seen.usage.room(class);
        let line = Line {
            found: Some((version, slot.clone())),
            turn: since,
            again_ms: Acquire::again(seen, ahead + higher == 0, cx),
            full: self.full(seen, higher + ahead + 1, cx),
        };
        let mut drafts = seen.usage.tidy(&self.spot.pool);
        let tidied = drafts.len();
        if seen.place.is_some() && higher == 0 && free >= ahead.saturating_add(cost) {
            let own = cx.make.version();
            drafts.push(self.promote(&slot, version, seen, own));
            let length = slot.lease_ms.saturating_mul(limits::MILLI);
            let grant = Grant { nonce: slot.nonce, length, left: free.saturating_sub(cost) };
            self.stage = Stage::Sent { tidied, what: Sent::Promote(grant, line) };
            // honest-replies: whoever has a name and no time left is told that it holds nothing, though an earlier copy
            // may find room. Without a name it leaves the line, and then none does.
            let told = self.last(cx) && self.asked.slot.is_some();
            let evidence = told.then(|| Evidence::time(self.spot.key(), own));
            return Next::Commit(Plan { txns: drafts, grows: false, evidence });
        }
        let fresh = seen.clock.saturating_add(limits::WAITER - limits::WAITER_RENEW_MS * limits::MILLI / 2);
        let with_deadline = seen.usage.with_deadline(class);
        let amiss = seen.line > with_deadline;
        let stale = amiss || seen.place.is_none() || seen.deadline.is_none_or(|d| d.score <= fresh);
        if stale && !self.last(cx) {
            let mut renew = self.renew(&slot, version, since);
            if amiss {
                // Somebody in line can neither be had nor given up: the pool is to be tidied now.
                renew.writes.push(add(keys::POOLS, &keys::pool_member(&self.spot.pool), ScoreAt::Clock(0)));
            }
            drafts.push(renew);
        }
        if drafts.is_empty() {
            return self.rest(line, cx);
        }
        self.stage = Stage::Sent { tidied, what: Sent::Renew(line) };
        Next::Commit(Plan::new(drafts))
    }

    fn promote(&self, slot: &Slot, version: Version, seen: &Seen<'_>, own: Version) -> Draft {
        let pool = &self.spot.pool;
        let member = self.spot.member();
        let (waiting, alive) = (keys::waiting(pool, slot.class), keys::alive(pool, slot.class));
        let mut guards = vec![
            Guard::At(self.spot.key(), version),
            Guard::At(keys::pool(pool), seen.usage.version),
            // priority: the first of its class, while nobody waits in a class above.
            Guard::Member(waiting.clone(), member.clone(), Standing::First),
            Guard::Member(alive.clone(), member.clone(), Standing::Live),
        ];
        guards.extend(nobody(pool, Class::ALL.into_iter().filter(|c| *c < slot.class)));
        guards.extend(room(pool, &seen.usage.pool, slot.class, slot.cost));
        let mut writes = self.spot.grant(slot, own);
        writes.extend([waiting, alive].map(|index| remove(index, &member)));
        if seen.usage.waiters(|_| true) > 1 {
            // Whoever is next may be another replica's.
            writes.push(Write::Notify(keys::topic_pool(pool)));
        }
        Draft::new(guards, writes)
    }

    /// A sign of life. It names both places, so that one that was lost is put back.
    fn renew(&self, slot: &Slot, version: Version, since: Clock) -> Draft {
        let (pool, member) = (&self.spot.pool, self.spot.member());
        let (index, score) = (keys::alive(pool, slot.class), ScoreAt::Clock(limits::WAITER));
        let writes = vec![
            add(keys::waiting(pool, slot.class), &member, ScoreAt::Number(since)),
            Write::Add { index, member, score, raise: true },
            Write::Expire(self.spot.key(), Expiry::Clock(limits::SLOT_KEPT)),
        ];
        let mut guards = vec![Guard::At(self.spot.key(), version)];
        // Entering the line and being let in at once are alternatives under one version: a store that has lost its
        // newest commits may by now have the other.
        let unit = keys::holder_members(&self.spot.tenant, &self.spot.slot, slot.nonce, 1).next();
        guards.extend(unit.map(|unit| Guard::Member(keys::holders(pool), unit, Standing::Out)));
        Draft::new(guards, writes)
    }

    /// The pool has gone, or cannot be read: whoever waits for it leaves the line.
    fn without_pool(&mut self, record: &Record, failure: Failure, cx: &mut Cx<'_>) -> Next {
        match slot_of(record) {
            Ok(Some((version, slot))) if matches!(slot.state, SlotState::Waiting { .. }) => {
                self.end(&slot, version, Some(failure), cx)
            }
            _ => Next::fail(failure),
        }
    }

    fn end(&mut self, slot: &Slot, version: Version, then: Option<Failure>, cx: &mut Cx<'_>) -> Next {
        let draft = self.spot.end(slot, version, cx.make.version());
        self.stage = Stage::Sent { tidied: 0, what: Sent::End(then) };
        Next::Commit(Plan::new(vec![draft]))
    }

    /// In line, and nothing can be done now.
    fn rest(&mut self, line: Line, cx: &mut Cx<'_>) -> Next {
        if cx.orphan {
            return self.leave();
        }
        if !self.last(cx) {
            let topic = keys::topic_pool(&self.spot.pool);
            return Next::Wait(Wait {
                topics: vec![keys::line(&topic, self.asked.class)],
                turn: Some((line.turn, self.spot.member())),
                again_ms: Some(line.again_ms),
                since: vec![(topic, self.since)],
            });
        }
        match line.found {
            // Without a name nobody can come back for it.
            Some((version, slot)) if self.asked.slot.is_none() => self.end(&slot, version, Some(line.full), cx),
            // Its place is kept for as long as it was last renewed for.
            _ => Next::fail(line.full),
        }
    }

    fn granted(&mut self, grant: &Grant, clock: Clock, cx: &mut Cx<'_>) -> Next {
        cx.stats.slots_granted += 1;
        if cx.orphan {
            return self.leave();
        }
        self.left = grant.left;
        let expires_at = clock.saturating_add(grant.length);
        Next::ok(self.spot.had(grant.nonce, SlotState::Granted, expires_at))
    }
}

impl Operation for Acquire {
    fn start(&mut self, cx: &mut Cx<'_>) -> Next {
        if self.spot.slot.is_empty() {
            self.spot.slot = format!("{:016x}", cx.make.version().0);
        }
        self.look(cx)
    }

    fn read(&mut self, snapshot: Snapshot, cx: &mut Cx<'_>) -> Next {
        if cx.orphan {
            return self.leave();
        }
        let [first, slot_record] = match &*snapshot.records {
            [first] => [first, &Record::Absent],
            [first, second, ..] => [first, second],
            [] => [&Record::Absent, &Record::Absent],
        };
        if let Stage::Stands { version, slot } = core::mem::replace(&mut self.stage, Stage::Look) {
            if first.version() != Some(version) {
                return self.look(cx);
            }
            let ends = snapshot.members.iter().map(|p| p.map(|p| p.score).filter(|end| *end > snapshot.clock));
            return match ends.collect::<Option<Vec<Clock>>>().and_then(|ends| ends.into_iter().min()) {
                Some(expires_at) => Next::ok(self.spot.had(slot.nonce, slot.state, expires_at)),
                // Lapsed, or a unit of it was lost: the rest of it goes, and then it is wanted anew.
                None => self.end(&slot, version, None, cx),
            };
        }
        let (version, pool) = match of(first) {
            Ok(found) => found,
            Err(failure) => return self.without_pool(slot_record, failure, cx),
        };
        let (line, counts) = snapshot.counts.split_last().unwrap_or((&0, &[]));
        let next_end = snapshot.slices.iter().flatten().next().map(|e| e.score);
        let seen = Seen {
            usage: Usage::new(pool, version, counts, next_end, snapshot.clock, cx),
            slot: slot_record,
            line: *line,
            place: snapshot.members.first().copied().flatten(),
            deadline: snapshot.members.get(1).copied().flatten(),
            clock: snapshot.clock,
        };
        self.decide(&seen, cx)
    }

    fn answered(&mut self, clock: Clock, answers: Vec<Answer>, cx: &mut Cx<'_>) -> Next {
        let Stage::Sent { tidied, what } = core::mem::replace(&mut self.stage, Stage::Look) else {
            return self.start(cx);
        };
        let (others, own) = answers.split_at(tidied.min(answers.len()));
        let done = |at: usize| matches!(own.get(at), Some(Answer::Applied { .. }));
        match what {
            Sent::Arrive(grant, _) | Sent::Promote(grant, _) if done(0) => self.granted(&grant, clock, cx),
            Sent::Arrive(_, line) if done(1) => self.rest(line, cx),
            Sent::End(Some(failure)) if done(0) => Next::fail(failure),
            // Others' places were taken away: it may be its turn now.
            Sent::Promote(..) | Sent::Renew(_) if applied(others) => self.look(cx),
            Sent::Promote(_, line) => self.rest(line, cx),
            Sent::Renew(line) if done(0) || own.is_empty() => self.rest(line, cx),
            Sent::Arrive(..) | Sent::Renew(_) | Sent::End(_) => self.look(cx),
        }
    }
}
