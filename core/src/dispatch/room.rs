//! Whether a job's cost fits into the pools of the upstreams that may run it, and what keeps the first of a queue
//! from being run.

use alloc::collections::BTreeMap;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use super::hold;
use super::routing::{Routing, Upstream};
use crate::failure::Failure;
use crate::job::check;
use crate::job::record::{Class, Job};
use crate::name::Name;
use crate::pool::record::Pool;
use crate::replica::task::decode_record;
use crate::request::Why;
use crate::store::{Clock, Read, Record, Span, keys};

/// What is asked of pools: one of them is to have so much for that class.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Room {
    class: Class,
    cost: u32,
    pools: Vec<String>,
}

impl Room {
    /// `at`: tenant and queue. `None` when nothing is in the way: one slot is asked for, workers run the queue, or an upstream has no pool.
    pub fn of(routing: &Routing, at: (&str, &str), class: Class, on_prem: bool, cost: u32) -> Option<Room> {
        let (tenant, queue) = at;
        if cost <= 1 {
            return None;
        }
        let fit = candidates(routing, tenant, queue, on_prem);
        let pools: Option<Vec<String>> = fit.map(|u| u.pool.clone()).collect();
        pools.filter(|pools| !pools.is_empty()).map(|pools| Room { class, cost, pools })
    }

    /// Records of the pools, for [`Room::lacks`].
    pub fn records(&self) -> impl Iterator<Item = Name> {
        self.pools.iter().map(|pool| keys::pool(pool))
    }

    /// Without this a job would stand first in its queue for ever. A pool that is not there may come yet.
    pub fn lacks(&self, records: &mut impl Iterator<Item = Record>) -> Option<Failure> {
        let mut most = Some((0, ""));
        for (pool, record) in self.pools.iter().zip(records) {
            let there = decode_record::<Pool>(&record).ok().flatten().filter(|(_, pool)| !pool.deleted);
            let has = there.map(|(_, settings)| (settings.most(self.class), pool.as_str()));
            most = most.zip(has).map(|(a, b)| a.max(b));
        }
        let (most, pool) = most.filter(|(most, _)| *most < self.cost)?;
        let detail = format!("is {}, the pool `{pool}` has {most} for class {}", self.cost, self.class.text());
        Some(check::invalid("cost", detail))
    }
}

/// Whether any of these has no room, by the records of all their pools in order.
pub(crate) fn lacking(rooms: &[Room], records: impl IntoIterator<Item = Record>) -> Option<Failure> {
    let mut records = records.into_iter();
    rooms.iter().fold(None, |found, room| {
        let mut own: Vec<Record> = records.by_ref().take(room.pools.len()).collect();
        found.or(room.lacks(&mut own.drain(..)))
    })
}

/// The upstreams by which a job of a tenant's queue may be run.
fn candidates<'a>(
    routing: &'a Routing,
    tenant: &'a str,
    queue: &'a str,
    on_prem: bool,
) -> impl Iterator<Item = &'a Upstream> {
    routing.of(tenant, queue).filter(move |u| u.on_prem || !on_prem)
}

/// Adds what [`stands_in_the_way`] wants to know of the upstreams that may run a job, at the end of records and counts.
pub(crate) fn ask(read: &mut Read, job: &Job, routing: &Routing) {
    for upstream in candidates(routing, &job.tenant, &job.queue, job.policy.on_prem) {
        read.records.push(keys::hold(&upstream.name));
        read.records.extend(upstream.pool.as_deref().map(keys::pool));
        for index in upstream.pool.iter().flat_map(|pool| [keys::holders(pool), keys::batch(pool)]) {
            read.counts.push((index, Span::Live));
        }
    }
}

/// Why none of the upstreams that may run the first job of a queue takes it, if workers do not run it and something
/// is known to be in the way. One that could take it makes this `None`.
pub(crate) fn stands_in_the_way(
    job: &Job,
    routing: &Routing,
    records: &[Record],
    counts: &[u64],
    clock: Clock,
) -> Option<Why> {
    let (mut records, mut counts) = (records.iter(), counts.iter().copied());
    let mut reasons = BTreeMap::new();
    for upstream in candidates(routing, &job.tenant, &job.queue, job.policy.on_prem) {
        let held = hold::of(records.next()?).ok().flatten().map(|(_, hold)| hold.until).filter(|until| *until > clock);
        let full = match &upstream.pool {
            None => None,
            Some(name) => {
                let record = records.next()?;
                let (in_use, batch) = (counts.next()?, counts.next()?);
                let found = decode_record::<Pool>(record).ok().flatten().filter(|(_, pool)| !pool.deleted);
                let (total, most) = found.map_or((0, 0), |(_, pool)| (pool.total, pool.most(job.class)));
                let cost = u64::from(job.policy.cost);
                let fits = in_use + cost <= total.into() && (job.class != Class::Batch || batch + cost <= most.into());
                (!fits).then(|| Why::NoSlot { pool: name.clone(), in_use, total })
            }
        };
        match (held, full) {
            (Some(until), _) => reasons.insert((1, until), Why::OnHold { upstream: upstream.name.clone(), until }),
            (None, Some(full)) => reasons.insert((0, 0), full),
            (None, None) => return None,
        };
    }
    reasons.into_values().next()
}
