//! Looking at one pool, with who holds it, and at all pools.

use alloc::boxed::Box;
use alloc::string::{String, ToString as _};
use alloc::vec;
use alloc::vec::Vec;

use super::record::Pool;
use super::{counted, of, record_of, slot_of};
use crate::failure::Failure;
use crate::job::check;
use crate::job::lease::Granted;
use crate::job::record::Class;
use crate::limits;
use crate::name::Name;
use crate::replica::task::{Cx, Next, Operation, decode_record};
use crate::request::{HolderView, PoolView, Response, SlotId, SlotOf};
use crate::store::{Answer, Clock, Read, Record, Score, Slice, Snapshot, Span, UpTo, Version, keys};

/// Sizes of holders, of those of class batch, and of the waiters of each class.
const SIZES: usize = 2 + Class::ALL.len();

fn sizes(pool: &str) -> impl Iterator<Item = (Name, Span)> {
    counted(pool).map(|index| (index, Span::Live))
}

fn view(name: &str, pool: &Pool, sizes: &[u64]) -> PoolView {
    let at = |n: usize| sizes.get(n).copied().unwrap_or(0);
    PoolView {
        name: name.to_string(),
        total: pool.total,
        batch_max: pool.batch_max,
        lease_ms: pool.lease_ms,
        in_use: at(0),
        batch_in_use: at(1),
        waiting: (2..).zip(Class::ALL).map(|(n, class)| (class, at(n))).collect(),
        holders: Vec::new(),
    }
}

/// One pool, with the tenant's holders that end first.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct One {
    tenant: String,
    pool: String,
    /// Slots' members, grants and ends, once they are known.
    found: Option<Vec<(Name, Version, Clock)>>,
}

impl One {
    pub fn new(tenant: String, pool: String) -> Result<One, Failure> {
        check::name("pool", &pool)?;
        Ok(One::state(tenant, pool))
    }

    pub fn state(tenant: String, pool: String) -> One {
        One { tenant, pool, found: None }
    }

    fn holder(&self, member: &Name, nonce: Version, expires_at: Clock, record: &Record) -> Option<HolderView> {
        if let Some(job) = keys::job_of(member) {
            let lease = Granted::read(record).filter(|g| g.version == nonce && g.lease.tenant == self.tenant)?.lease;
            let cost = lease.placed()?.cost;
            let (of, holder) = (SlotOf::Job(job), Some(lease.worker));
            return Some(HolderView { of, holder, class: lease.class, cost, expires_at });
        }
        let (tenant, name) = keys::queue_of(member)?;
        let slot = slot_of(record).ok()??.1;
        (slot.state.is_held() && tenant == self.tenant).then_some(HolderView {
            of: SlotOf::Caller(SlotId { slot: name, nonce: Some(slot.nonce) }),
            holder: slot.holder,
            class: slot.class,
            cost: slot.cost,
            expires_at,
        })
    }
}

impl Operation for One {
    fn start(&mut self, cx: &mut Cx<'_>) -> Next {
        self.found = None;
        let slice = Slice {
            index: keys::holders(&self.pool),
            after: Some((cx.clock, Name::from_static("\u{7f}"))),
            up_to: UpTo::End,
            limit: limits::HOLDERS_SHOWN * 10,
            give: Vec::new(),
        };
        Next::Read(Read { records: vec![keys::pool(&self.pool)], slices: vec![slice], ..Read::default() })
    }

    fn read(&mut self, snapshot: Snapshot, _: &mut Cx<'_>) -> Next {
        let Some((first, slots)) = snapshot.records.split_first() else { return Next::fail(Failure::UnknownPool) };
        let pool = match of(first) {
            Ok((_, pool)) => pool,
            Err(failure) => return Next::fail(failure),
        };
        let Some(found) = self.found.take() else {
            let own = keys::slot_member(&self.tenant, "");
            let entries = snapshot.slices.iter().flatten();
            let first_units = entries.filter_map(|e| {
                let (slot, nonce, unit) = keys::holder_of(&e.member)?;
                let may_be_own = e.member.starts_with(&own) || keys::job_of(&slot).is_some();
                (unit == 1 && may_be_own).then_some((slot, nonce, e.score))
            });
            let found: Vec<(Name, Version, Clock)> = first_units.take(limits::HOLDERS_SHOWN).collect();
            let mut records = vec![keys::pool(&self.pool)];
            records.extend(found.iter().map(|(slot, ..)| record_of(&self.pool, slot)));
            self.found = Some(found);
            return Next::Read(Read { records, counts: sizes(&self.pool).collect(), ..Read::default() });
        };
        let mut view = view(&self.pool, &pool, &snapshot.counts);
        let holders = found.iter().zip(slots);
        view.holders =
            holders.filter_map(|((member, nonce, end), record)| self.holder(member, *nonce, *end, record)).collect();
        Next::ok(Response::Pool(Box::new(view)))
    }

    fn answered(&mut self, _: Clock, _: Vec<Answer>, cx: &mut Cx<'_>) -> Next {
        self.start(cx)
    }
}

/// All pools by name, without their holders.
#[derive(Clone, Debug, Default, serde::Serialize, serde::Deserialize)]
pub(crate) struct All {
    after: Option<(Score, Name)>,
    /// The pools of the page whose sizes are being read.
    page: Vec<(String, Pool)>,
    more: bool,
    found: Vec<PoolView>,
}

/// Pools read at once.
const PAGE: usize = 100;

impl All {
    fn next(&mut self) -> Next {
        let slice = Slice {
            index: keys::POOLS,
            after: self.after.clone(),
            up_to: UpTo::End,
            limit: PAGE,
            give: vec![keys::POOL],
        };
        Next::Read(Read { slices: vec![slice], ..Read::default() })
    }

    fn done(&mut self) -> Next {
        self.found.sort_by(|a, b| a.name.cmp(&b.name));
        // A pool moves on in the index when it is tidied: it may have been met twice.
        self.found.dedup_by(|a, b| a.name == b.name);
        Next::ok(Response::Pools(core::mem::take(&mut self.found)))
    }
}

impl Operation for All {
    fn start(&mut self, _: &mut Cx<'_>) -> Next {
        *self = All::default();
        self.next()
    }

    fn read(&mut self, snapshot: Snapshot, _: &mut Cx<'_>) -> Next {
        if self.page.is_empty() {
            let entries = snapshot.slices.first().map(Vec::as_slice).unwrap_or_default();
            self.more = entries.len() >= PAGE;
            self.after = entries.last().map(|e| (e.score, e.member.clone()));
            let pools = entries.iter().filter_map(|e| {
                let (_, pool) = decode_record::<Pool>(e.records.first()?).ok()??;
                Some((keys::pool_of(&e.member)?, pool))
            });
            self.page = pools.filter(|(_, pool)| !pool.deleted).collect();
            if !self.page.is_empty() {
                let counts = self.page.iter().flat_map(|(name, _)| sizes(name)).collect();
                return Next::Read(Read { counts, ..Read::default() });
            }
        }
        for ((name, pool), sizes) in self.page.drain(..).zip(snapshot.counts.chunks(SIZES)) {
            self.found.push(view(&name, &pool, sizes));
        }
        if self.more { self.next() } else { self.done() }
    }

    fn answered(&mut self, _: Clock, _: Vec<Answer>, cx: &mut Cx<'_>) -> Next {
        self.start(cx)
    }
}
