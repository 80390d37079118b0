//! What a server that wants jobs to run sees of its queues and upstreams at one moment, and what it takes of them.

use alloc::boxed::Box;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec;
use alloc::vec::Vec;

use super::hold::{self, Hold};
use super::routing::Upstream;
use crate::codec::Undecodable;
use crate::failure::Failure;
use crate::ids::JobId;
use crate::job::moves::{self, Ending, Home, as_read, remove};
use crate::job::record::{Class, Job, Status};
use crate::job::sweep::trim;
use crate::limits;
use crate::name::Name;
use crate::pool;
use crate::pool::usage::{self, Usage};
use crate::replica::Mark;
use crate::replica::task::{Cx, Draft, QueueInfo, decode_record};
use crate::request::Dispatch as Asked;
use crate::store::{Clock, Entry, Guard, Read, Slice, Snapshot, Span, Standing, UpTo, Version, keys};

/// One upstream that may be called.
struct Seen<'a> {
    upstream: &'a Upstream,
    hold: Option<(Version, Hold)>,
    /// Calls that are tried on it after a hold, by All and Live.
    probes: [u64; 2],
}

pub(super) struct Sight<'a> {
    upstreams: Vec<Seen<'a>>,
    /// Pools of these, as far as they are there.
    pools: BTreeMap<&'a str, Usage>,
    queues: Vec<QueueInfo>,
    /// Of each queue, by class.
    heads: Vec<[Vec<Entry>; Class::ALL.len()]>,
    clock: Clock,
}

/// What is done about the head of a queue.
pub(super) enum Head {
    Take(Box<Pick>),
    /// It is taken away or ended, by one of these.
    Amiss(Vec<Draft>),
}

/// A job, and the upstream that is to run it.
pub(super) struct Pick {
    pub id: JobId,
    /// Which of the queues asked for.
    pub queue: usize,
    pub version: Version,
    pub job: Job,
    pub due: Clock,
    /// Of its lease, microseconds.
    pub length: u64,
    pub upstream: usize,
    /// The hold after which it is tried.
    pub probe: Option<Version>,
}

/// Heads of one queue and class that are read.
fn heads_read(asked: &Asked) -> usize {
    asked.max.min(limits::DISPATCH_HEADS)
}

/// The names of the pools of the upstreams that were asked for, each once.
fn pools<'a>(asked: &Asked, cx: &Cx<'a>) -> BTreeSet<&'a str> {
    let upstreams = asked.upstreams.iter().filter_map(|name| cx.config.routing.upstream(name));
    upstreams.filter_map(|u| u.pool.as_deref()).collect()
}

impl<'a> Sight<'a> {
    pub fn read(asked: &Asked, cx: &Cx<'a>) -> Read {
        let mut read = Read::default();
        read.records.extend(asked.queues.iter().map(|(tenant, queue)| keys::queue(tenant, queue)));
        read.records.extend(asked.upstreams.iter().map(|name| keys::hold(name)));
        for name in &asked.upstreams {
            read.counts.extend([(keys::probe(name), Span::All), (keys::probe(name), Span::Live)]);
        }
        for pool in pools(asked, cx) {
            read.records.push(keys::pool(pool));
            read.counts.extend(usage::counts(pool));
            read.slices.push(usage::next_end(pool, cx));
        }
        let limit = heads_read(asked);
        for (tenant, queue) in &asked.queues {
            for class in Class::ALL {
                let index = Home { tenant, queue, class }.index(Status::Queued);
                let give = vec![keys::JOB, keys::LEASE];
                read.slices.push(Slice { index, after: None, up_to: UpTo::End, limit, give });
            }
        }
        read
    }

    pub fn of(asked: &Asked, snapshot: &Snapshot, cx: &mut Cx<'a>) -> Result<Sight<'a>, Failure> {
        let mut records = snapshot.records.iter();
        let mut counts = &*snapshot.counts;
        let mut slices = snapshot.slices.iter();
        let mut queues = Vec::new();
        for record in records.by_ref().take(asked.queues.len()) {
            match QueueInfo::decode(record) {
                Ok(info) => queues.push(info),
                Err(Undecodable::Newer) => {
                    cx.mark(Mark::NewerFormat);
                    return Err(Failure::NewerFormat { retry_after_ms: 10_000 });
                }
                Err(Undecodable::Corrupt) => return Err(Failure::Quarantined),
            }
        }
        let mut upstreams = Vec::new();
        for (name, record) in asked.upstreams.iter().zip(records.by_ref().take(asked.upstreams.len())) {
            let (probes, rest) = counts.split_at(2.min(counts.len()));
            counts = rest;
            let Some(upstream) = cx.config.routing.upstream(name) else { return Err(Failure::UnknownUpstream) };
            let probes = [probes.first(), probes.get(1)].map(|n| n.copied().unwrap_or(0));
            upstreams.push(Seen { upstream, hold: hold::of(record)?, probes });
        }
        let mut found = BTreeMap::new();
        for (name, record) in pools(asked, cx).into_iter().zip(records) {
            let (sizes, rest) = counts.split_at(usage::COUNTS.min(counts.len()));
            counts = rest;
            let end = slices.next().and_then(|s| s.first()).map(|e| e.score);
            match pool::of(record) {
                Ok((version, settings)) => {
                    found.insert(name, Usage::new(settings, version, sizes, end, snapshot.clock, cx));
                }
                // A pool that has not been made yet has no room.
                Err(Failure::UnknownPool | Failure::Quarantined) => {}
                Err(failure) => return Err(failure),
            }
        }
        let mut heads = Vec::new();
        for _ in &asked.queues {
            heads.push(Class::ALL.map(|_| slices.next().cloned().unwrap_or_default()));
        }
        Ok(Sight { upstreams, pools: found, queues, heads, clock: snapshot.clock })
    }

    pub fn name(&self, upstream: usize) -> &str {
        self.upstreams.get(upstream).map_or("", |seen| seen.upstream.name.as_str())
    }

    pub fn pool(&self, upstream: usize) -> Option<&str> {
        self.upstreams.get(upstream)?.upstream.pool.as_deref()
    }

    pub fn queue(&self, queue: usize) -> QueueInfo {
        self.queues.get(queue).cloned().unwrap_or_default()
    }

    /// What is done now: class by class, queue by queue, each queue up to the first that must wait.
    pub fn choose(&mut self, asked: &Asked, cx: &mut Cx<'_>) -> Vec<Head> {
        let mut chosen = Vec::new();
        let mut left = asked.max;
        let mut blocked: BTreeSet<usize> =
            (0..).zip(&self.queues).filter(|(_, info)| info.record.paused).map(|(n, _)| n).collect();
        let heads = core::mem::take(&mut self.heads);
        for (at, class) in Class::ALL.into_iter().enumerate() {
            for (queue, (heads, (tenant, name))) in heads.iter().zip(&asked.queues).enumerate() {
                let entries = heads.get(at).map(Vec::as_slice).unwrap_or_default();
                let home = Home { tenant, queue: name, class };
                for entry in entries {
                    if left == 0 || blocked.contains(&queue) {
                        break;
                    }
                    match self.head(queue, home, entry, cx) {
                        Some(head) => {
                            left -= usize::from(matches!(head, Head::Take(_)));
                            chosen.push(head);
                        }
                        // priority: nobody behind it in this queue passes it.
                        None => {
                            blocked.insert(queue);
                        }
                    }
                }
                if entries.len() >= heads_read(asked) {
                    // There may be more of this class, which come before those of the next.
                    blocked.insert(queue);
                }
            }
        }
        chosen
    }

    fn head(&mut self, queue: usize, met: Home<'_>, entry: &Entry, cx: &mut Cx<'_>) -> Option<Head> {
        let id = keys::job_of(&entry.member)?;
        let [record, lease] = &*entry.records else { return None };
        if record.is_unread() || lease.is_unread() {
            return None;
        }
        let as_leased = as_read(keys::lease(id), lease);
        let (version, job) = match decode_record::<Job>(record) {
            Ok(Some(found)) => found,
            Ok(None) => {
                return Some(Head::Amiss(moves::lost_once(id, Some(met), &[], vec![as_leased], cx.make.version())));
            }
            Err(Undecodable::Newer) => {
                cx.mark(Mark::NewerFormat);
                return None;
            }
            Err(Undecodable::Corrupt) => {
                let own = cx.make.version();
                return Some(Head::Amiss(moves::quarantine_once(id, Some(met), record, vec![as_leased], own)));
            }
        };
        let home = Home::from(&job);
        if job.end.is_some() || !lease.is_absent() {
            // one-live-lease: a ghost; its job has ended, or runs.
            let guards = vec![Guard::At(keys::job(id), version), as_leased];
            let ghost = Draft::new(guards, vec![remove(home.index(Status::Queued), &entry.member)]);
            return Some(Head::Amiss(vec![ghost]));
        }
        let born = record.at().unwrap_or(job.born);
        let over = |ms: u64| self.clock >= born.saturating_add(ms.saturating_mul(limits::MILLI));
        if job.deliveries == 0 && job.policy.queue_ttl_ms.is_some_and(over) {
            return Some(Head::Amiss(self.expire(id, &job, version, cx)));
        }
        let info = self.queue(queue);
        let length_ms = job.policy.lease_ms.or(info.record.lease_ms).unwrap_or(cx.config.lease_ms);
        let (upstream, probe) = self.place(&job, cx)?;
        if let Some(seen) = self.upstreams.get_mut(upstream) {
            seen.probes[1] += u64::from(probe.is_some());
            if let Some(usage) = seen.upstream.pool.as_deref().and_then(|pool| self.pools.get_mut(pool)) {
                usage.take(job.class, job.policy.cost);
            }
        }
        let length = length_ms.saturating_mul(limits::MILLI);
        Some(Head::Take(Box::new(Pick { id, queue, version, job, due: entry.score, length, upstream, probe })))
    }

    /// The upstream that has most room for a job, and the hold after which it is tried there.
    fn place(&self, job: &Job, cx: &Cx<'_>) -> Option<(usize, Option<Version>)> {
        let routing = &cx.config.routing;
        let on_prem = job.policy.on_prem || routing.keeps(&job.tenant);
        let mut best: Option<(u64, usize, Option<Version>)> = None;
        for (at, seen) in self.upstreams.iter().enumerate() {
            let of_route = routing.of(&job.tenant, &job.queue).any(|u| u.name == seen.upstream.name);
            if !of_route || on_prem && !seen.upstream.on_prem {
                continue;
            }
            let probe = match &seen.hold {
                None => None,
                Some((version, hold)) if hold.until <= self.clock && seen.probes[1] == 0 => Some(*version),
                Some(_) => continue,
            };
            let room = match &seen.upstream.pool {
                None => u64::MAX,
                Some(pool) => {
                    let Some(usage) = self.pools.get(pool.as_str()) else { continue };
                    // Whoever waits for a slot comes before queued work of its class.
                    if usage.waiters(|c| c <= job.class) > 0 || usage.room(job.class) < job.policy.cost.into() {
                        continue;
                    }
                    usage.room(job.class)
                }
            };
            if best.is_none_or(|(most, ..)| room > most) {
                best = Some((room, at, probe));
            }
        }
        best.map(|(_, at, probe)| (at, probe))
    }

    /// What must be so of the other classes, of the upstream and of its pool when a job is claimed.
    pub fn guards(&self, upstream: usize, job: &Job, probe: Option<Version>) -> Vec<Guard> {
        let home = |class| Home { tenant: &job.tenant, queue: &job.queue, class };
        let above = Class::ALL.into_iter().filter(|c| *c < job.class);
        let mut guards: Vec<Guard> =
            above.map(|class| Guard::Below(home(class).index(Status::Queued), Span::All, 1)).collect();
        let name = self.name(upstream);
        match probe {
            None => guards.push(Guard::Absent(keys::hold(name))),
            Some(version) => {
                guards.extend([Guard::At(keys::hold(name), version), Guard::Below(keys::probe(name), Span::Live, 1)]);
            }
        }
        if let Some(pool) = self.pool(upstream)
            && let Some(usage) = self.pools.get(pool)
        {
            guards.extend(usage.guards(pool, job.class, job.policy.cost, |class| class <= job.class));
        }
        guards
    }

    fn expire(&self, id: JobId, job: &Job, version: Version, cx: &mut Cx<'_>) -> Vec<Draft> {
        let ending = Ending {
            status: Status::Expired,
            reason: None,
            result_len: None,
            attempt: None,
            attempts: job.attempts,
            deliveries: job.deliveries,
        };
        let own = cx.make.version();
        let guards = vec![
            Guard::Absent(keys::lease(id)),
            // The clock of the commit decides.
            Guard::Member(keys::TTL, keys::member(id), Standing::Due),
        ];
        let leave = moves::leave_waiting(id, Home::from(job));
        moves::end(id, job, version, own, self.clock, &ending, guards, leave, cx)
    }

    /// Removes what is past its time, so that its room is free.
    pub fn tidy(&self) -> Vec<Draft> {
        let mut drafts: Vec<Draft> = self.pools.iter().flat_map(|(name, usage)| usage.tidy(name)).collect();
        let past = self.upstreams.iter().filter(|seen| seen.probes[0] > seen.probes[1]);
        drafts.extend(past.map(|seen| trim(keys::probe(&seen.upstream.name), limits::TRIM)));
        drafts
    }

    /// What tells that there may be room.
    pub fn topics(&self) -> impl Iterator<Item = Name> {
        let pools = self.pools.keys().map(|name| keys::topic_pool(name));
        pools.chain(self.upstreams.iter().map(|seen| keys::topic_upstream(&seen.upstream.name)))
    }

    /// When to look again whatever happens: a hold that ends and a holder that lapses tell nobody.
    pub fn again_ms(&self, cx: &Cx<'_>) -> Option<u64> {
        let holds = self.upstreams.iter().filter_map(|seen| seen.hold.as_ref().map(|(_, hold)| hold.until));
        let ends = self.pools.values().filter_map(|u| if u.sparing { Some(cx.spare_until) } else { u.next_end });
        let next = holds.chain(ends).filter(|at| *at > self.clock).min()?;
        Some((next - self.clock) / limits::MILLI + 1)
    }
}
