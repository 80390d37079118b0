//! Clients that create groups: sealed at once, or open, filled by pages and sealed; with and without keys,
//! asked again through another replica when they have not heard. They wait for the end by long polls, look at
//! children, cancel groups, and cancel, retry and delete single children. Some groups are never sealed.

use std::collections::VecDeque;

use leasehold_core::group::record::Mode;
use leasehold_core::ids::GroupId;
use leasehold_core::job::record::{Backoff, Class, Status};
use leasehold_core::opaque::Content;
use leasehold_core::request::{CreateGroup, Submit};
use leasehold_core::{Failure, JobId, Outcome, Request, Response};

use crate::calls::{Caller, Heard, ItemRef, again_after};
use crate::choices::{Choices as _, Topic};
use crate::setup::{MILLI, SECOND};
use crate::world::{Event, Phase, World};

#[derive(Clone, Debug, Default)]
pub struct Owner {
    /// Groups it still has to create.
    left: usize,
    groups: Vec<Owned>,
    /// What is to be asked again.
    again: VecDeque<usize>,
    /// What was asked for that needs a good answer.
    wants: Vec<Want>,
}

#[derive(Clone, Debug)]
struct Owned {
    asked: CreateGroup,
    tenant: String,
    id: Option<GroupId>,
    filled: u32,
    /// Pages still to be sent, and whether it is to be sealed after them.
    pages: VecDeque<Vec<Submit>>,
    seal: bool,
}

#[derive(Clone, Debug)]
struct Want {
    group: usize,
    what: What,
    tries: u32,
    open: bool,
}

#[derive(Clone, Debug)]
enum What {
    Create,
    Page { from: u32, children: Vec<Submit> },
    Seal,
    Cancel,
}

/// The tag of calls that need no good answer.
const NO_TAG: u64 = 0;

impl World {
    pub fn start_owners(&mut self) {
        for owner in 0..self.setup.owners {
            self.owners.push(Owner { left: self.setup.groups, ..Owner::default() });
            let after = self.choices.draw(Topic::Owner.of(owner), 3 * SECOND);
            self.schedule(after, Event::Owner { owner: owner as u8 });
        }
    }

    pub fn owner_wakes(&mut self, o: usize) {
        let at = Topic::Owner.of(o);
        if let Some(want) = self.owners[o].again.pop_front() {
            self.ask_for(o, want);
        } else if self.phase == Phase::Chaos {
            let create = self.owners[o].left > 0 && self.choices.draw(at, 4) == 0;
            if create || self.owners[o].groups.is_empty() {
                self.create_group(o);
            } else {
                self.tend(o);
            }
        }
        let busy = !self.owners[o].again.is_empty();
        if self.phase == Phase::Chaos || busy {
            let mean = if busy { SECOND } else { self.setup.chaos_us / (16 * self.setup.groups as u64 + 1) };
            let after = 1 + self.choices.draw(at, 2 * mean);
            self.schedule(after, Event::Owner { owner: o as u8 });
        }
    }

    fn draw_child(&mut self, o: usize, text: &str) -> Submit {
        let at = Topic::Owner.of(o);
        let poison = self.choices.chance(at, self.setup.manners.poison);
        let kind = if poison { "poison" } else { "child" };
        let mut s = Submit::new("any", "any", Content::json(format!("{{\"{kind}\":\"{text}\",\"max_parallel\":0}}")));
        match self.choices.draw(at, 12) {
            6 => s.max_attempts = Some(1),
            7 => s.queue_ttl_ms = Some(self.choices.between(at, 500, 10_000)),
            8 => s.run_timeout_ms = Some(self.choices.between(at, 1_000, 8_000)),
            9 => s.lease_ms = Some(self.choices.between(at, 500, 5_000)),
            10 => s.max_deliveries = Some(2),
            11 => s.retention_ms = Some(0),
            _ => {}
        }
        s
    }

    fn draw_children(&mut self, o: usize, text: &str, n: u64) -> Vec<Submit> {
        (0..n).map(|i| self.draw_child(o, &format!("{text}.{i}"))).collect()
    }

    fn draw_group(&mut self, o: usize) -> Owned {
        let at = Topic::Owner.of(o);
        let number = self.owners[o].groups.len();
        let tenant = self.choices.draw(at, self.setup.tenants as u64);
        let queue = self.choices.draw(at, self.setup.queues as u64);
        let (tenant, queue) = (self.tenant(tenant), self.queue_name(queue));
        let mut common = Submit::new(&tenant, queue, Content::json("null"));
        common.class = *self.choices.pick(at, &[Class::System, Class::System, Class::Interactive, Class::Batch]);
        if self.choices.chance(at, self.setup.keyed) {
            // Now and then one that a job of a client's has, or may have.
            let with_jobs = self.choices.draw(at, 12) == 11;
            common.key = Some(if with_jobs { format!("key {o}/{number}.0") } else { format!("group {o}/{number}") });
        }
        common.max_attempts = *self.choices.pick(at, &[Some(2), None, Some(1), Some(3)]);
        common.backoff = Some(Backoff { base_ms: 300, max_ms: 3_000, factor_milli: 2_000, jitter_milli: 100 });
        if self.choices.draw(at, 8) == 7 {
            common.queue_ttl_ms = Some(self.choices.between(at, 1_000, 20_000));
        }
        common.retention_ms = *self.choices.pick(at, &[None, Some(0), Some(10_000)]);
        common.key_ttl_ms = *self.choices.pick(at, &[None, None, Some(0), Some(150_000)]);
        let page = |world: &mut World| *world.choices.pick(at, &[3, 1, 0, 2, 5, 8, 12]);
        let n = page(self);
        let children = self.draw_children(o, &format!("{o}.{number}"), n);
        let max_parallel = *self.choices.pick(at, &[Some(2), Some(1), Some(3), None, Some(5), Some(8)]);
        let mode = *self.choices.pick(at, &[Mode::CollectAll, Mode::FailFast]);
        let sealed = self.choices.draw(at, 5) < 3;
        let mut pages = VecDeque::new();
        if !sealed {
            for p in 0..self.choices.draw(at, 4) {
                let n = page(self).max(1);
                pages.push_back(self.draw_children(o, &format!("{o}.{number}/{p}"), n));
            }
        }
        let open_timeout_ms = (!sealed).then(|| self.choices.between(at, 4_000, 40_000));
        let seal = !sealed && self.choices.draw(at, 6) < 5;
        let filled = children.len() as u32;
        let asked = CreateGroup { common, children, max_parallel, mode, sealed, open_timeout_ms };
        Owned { asked, tenant, id: None, filled, pages, seal }
    }

    fn create_group(&mut self, o: usize) {
        let at = Topic::Owner.of(o);
        self.owners[o].left = self.owners[o].left.saturating_sub(1);
        let mut owned = self.draw_group(o);
        let others = self.owners[o].groups.len() as u64;
        if others > 0 && self.choices.draw(at, 8) == 7 {
            // The same again, or something else under the same key.
            let earlier = self.owners[o].groups[self.choices.draw(at, others) as usize].clone();
            if earlier.asked.common.key.is_some() && self.choices.draw(at, 2) == 0 {
                owned = Owned { id: None, ..earlier };
            } else {
                owned.asked.common.key = earlier.asked.common.key;
                owned.asked.common.tenant = earlier.tenant.clone();
                owned.tenant = earlier.tenant;
            }
        }
        self.owners[o].groups.push(owned);
        let group = self.owners[o].groups.len() - 1;
        self.want(o, group, What::Create);
    }

    fn want(&mut self, o: usize, group: usize, what: What) {
        let wants = &mut self.owners[o].wants;
        wants.push(Want { group, what, tries: 0, open: true });
        let want = wants.len() - 1;
        self.ask_for(o, want);
    }

    /// Asks for something, through any replica.
    fn ask_for(&mut self, o: usize, n: usize) {
        let mark = format!("t-{}", ItemRef { call: self.ledger.next(), item: 0 }.mark());
        let want = &mut self.owners[o].wants[n];
        want.tries += 1;
        let (group, what) = (want.group, want.what.clone());
        let owned = &self.owners[o].groups[group];
        let tenant = owned.tenant.clone();
        let request = match (what, owned.id) {
            (What::Create, _) => {
                let mut asked = owned.asked.clone();
                asked.common.traceparent = Some(mark);
                Request::CreateGroup(Box::new(asked))
            }
            (What::Page { from, mut children }, Some(group)) => {
                children.iter_mut().for_each(|c| c.traceparent = Some(mark.clone()));
                Request::ExtendGroup { tenant, group, from, children }
            }
            (What::Seal, Some(group)) => Request::SealGroup { tenant, group },
            (What::Cancel, Some(group)) => Request::CancelGroup { tenant, group },
            (_, None) => return,
        };
        let r = self.any_replica(Topic::Owner, o);
        let patience = self.choices.between(Topic::Owner.of(o), 3 * SECOND, 8 * SECOND);
        self.call(Caller::Owner(o as u8), n as u64 + 1, r, request, patience);
    }

    pub fn owner_hears(&mut self, o: usize, tag: u64, heard: Heard) {
        let n = match tag {
            NO_TAG => return,
            tag => tag as usize - 1,
        };
        let Some(want) = self.owners[o].wants.get(n).filter(|w| w.open).cloned() else { return };
        let keyed = !matches!(want.what, What::Create) || self.owners[o].groups[want.group].asked.common.key.is_some();
        // What is named by its group can be asked for again; what only a key names, with a key.
        let again = match &heard {
            Heard::Answer(Err(failure)) => again_after(failure).is_some() && (keyed || failure.certain()),
            Heard::Answer(Ok(_)) => false,
            Heard::NotDelivered => true,
            Heard::Nothing => keyed,
        };
        if again && want.tries <= 60 {
            let idle = self.owners[o].again.is_empty() && self.phase != Phase::Chaos;
            self.owners[o].again.push_back(n);
            if idle {
                self.schedule(SECOND, Event::Owner { owner: o as u8 });
            }
            return;
        }
        self.owners[o].wants[n].open = false;
        if let Heard::Answer(outcome) = heard {
            self.learn(o, &want, &outcome);
        }
    }

    fn learn(&mut self, o: usize, want: &Want, outcome: &Outcome) {
        let owned = &mut self.owners[o].groups[want.group];
        match (&want.what, outcome) {
            (What::Create, Ok(Response::GroupCreated(view) | Response::Group(view))) => owned.id = Some(view.id),
            (What::Page { from, children }, Ok(_)) => {
                owned.filled = owned.filled.max(from + children.len() as u32);
                if owned.pages.front().is_some_and(|page| page == children) {
                    owned.pages.pop_front();
                }
            }
            (What::Page { .. }, Err(Failure::WrongOffset { expected })) => owned.filled = *expected,
            (What::Page { .. }, Err(_)) => owned.pages.clear(),
            _ => {}
        }
        self.go_on(o, want.group);
    }

    /// The next page, or the seal. Not at once in every case: children may end meanwhile.
    fn go_on(&mut self, o: usize, group: usize) {
        let owned = &mut self.owners[o].groups[group];
        if owned.id.is_none() {
            return;
        }
        if let Some(children) = owned.pages.front().cloned() {
            if self.phase != Phase::Chaos || self.choices.draw(Topic::Owner.of(o), 3) > 0 {
                let from = self.owners[o].groups[group].filled;
                self.want(o, group, What::Page { from, children });
            }
        } else if owned.seal {
            owned.seal = false;
            self.want(o, group, What::Seal);
        }
    }

    /// Anything else that is done with a group.
    fn tend(&mut self, o: usize) {
        let at = Topic::Owner.of(o);
        let groups = self.owners[o].groups.len() as u64;
        // Mostly the newest.
        let back = self.choices.draw(at, groups.min(3));
        let group = (groups - 1 - back) as usize;
        let owned = self.owners[o].groups[group].clone();
        let Some(id) = owned.id else { return };
        let mut tenant = owned.tenant.clone();
        if self.setup.tenants > 1 && self.choices.draw(at, 20) == 19 {
            tenant = "t9".into();
        }
        let child = id.child(self.choices.draw(at, u64::from(owned.filled) + 1) as u32);
        let request = match self.choices.draw(at, 18) {
            0..=2 => Request::Group { tenant, group: id, wait_ms: self.choices.draw(at, 8_000) },
            3 | 4 => {
                let from = self.choices.draw(at, u64::from(owned.filled) + 2) as u32;
                let limit = 1 + self.choices.draw(at, 6) as usize;
                let contents = self.choices.draw(at, 2) == 1;
                Request::Children { tenant, group: id, from, limit, contents }
            }
            5 => match self.choices.draw(at, 3) {
                0 => Request::Get { tenant, job: child },
                1 => Request::Payload { tenant, job: child },
                _ => Request::Result { tenant, job: child },
            },
            6 => Request::Cancel { tenant, job: child },
            // One that has failed, if there is one.
            7..=10 => Request::Retry { tenant, job: self.failed_child(id, owned.filled).unwrap_or(child) },
            11 => Request::Delete { tenant, job: self.failed_child(id, owned.filled).unwrap_or(child) },
            12 => Request::Why { tenant, job: child },
            13 => return self.want(o, group, What::Create),
            14 => return self.odd_page(o, group, &owned),
            15 if self.choices.draw(at, 3) == 0 => return self.want(o, group, What::Cancel),
            16 => return self.want(o, group, What::Seal),
            _ => return self.go_on(o, group),
        };
        let patience = match &request {
            Request::Group { wait_ms, .. } => wait_ms * MILLI + 7 * SECOND,
            _ => self.choices.between(at, SECOND, 8 * SECOND),
        };
        let r = self.any_replica(Topic::Owner, o);
        self.call(Caller::Owner(o as u8), NO_TAG, r, request, patience);
    }

    fn failed_child(&self, group: GroupId, filled: u32) -> Option<JobId> {
        let failed = |s| matches!(s, Status::Dead | Status::Expired | Status::Cancelled);
        (0..filled).map(|i| group.child(i)).find(|job| self.oracle.status(*job).is_some_and(failed))
    }

    /// A page that was sent before, or one that differs from it, leaves a gap or comes too late.
    fn odd_page(&mut self, o: usize, group: usize, owned: &Owned) {
        let at = Topic::Owner.of(o);
        let first = owned.asked.children.clone();
        let (from, children) = match self.choices.draw(at, 4) {
            0 if !first.is_empty() => (0, first),
            1 if !first.is_empty() => (0, self.draw_children(o, "other", first.len() as u64)),
            2 => (owned.filled + 1, self.draw_children(o, "gap", 2)),
            _ => (owned.filled, self.draw_children(o, &format!("{o}.{group}/late"), 1)),
        };
        self.want(o, group, What::Page { from, children });
    }

    /// Whether the owners have nothing left that they wait for.
    pub fn owners_settled(&self) -> bool {
        self.owners.iter().all(|o| o.again.is_empty())
            && self
                .ledger
                .iter()
                .rev()
                .take(400)
                .all(|c| c.heard.is_some() || !matches!(c.caller, Caller::Owner(_)) || c.tag == NO_TAG)
    }
}
