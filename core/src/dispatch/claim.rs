//! Claiming by name: the heads of the queues are read, and each one for which an upstream has room is moved
//! into a lease together with its slots. Cost, placement and lengths differ from job to job, so this is no take.
//!
//! **What is had is what the leases say.** After the commit the leases of all that were tried are read, with
//! their payloads: those under the own nonce are handed out. So a lost reply needs no evidence of its own.

use alloc::boxed::Box;
use alloc::collections::BTreeSet;
use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;

use super::sight::{Head, Pick, Sight};
use crate::codec;
use crate::event::Kind;
use crate::failure::Failure;
use crate::ids::{JobId, Token};
use crate::job::check;
use crate::job::claim::{put_back, queue_deadline};
use crate::job::handed::HandedOut;
use crate::job::lease::{self, Granted};
use crate::job::moves::{self, Ending, Home, add, remove};
use crate::job::record::{AttemptEnd, Job, Lease, Placed, Status, Terms, decode_content};
use crate::limits;
use crate::name::Name;
use crate::opaque::Opaque;
use crate::replica::Mark;
use crate::replica::task::{Cx, Draft, Evidence, Next, Operation, Plan, Wait, decode_record};
use crate::request::{Dispatch as Asked, Dispatched, Leased, Response};
use crate::store::{Answer, Clock, Expiry, Guard, Read, Record, ScoreAt, Snapshot, Standing, Version, keys};

#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct Dispatch {
    asked: Box<Asked>,
    stage: Stage,
    nonce: Version,
    /// Notifications that had come before what was read last was asked for.
    since: u64,
    tried: Vec<Tried>,
}

#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
enum Stage {
    Look,
    Sent,
    /// The leases of those that were tried.
    Had,
    /// Payloads that did not fit into that answer; the first so many have been asked for.
    Rest(Vec<usize>),
    /// The end of those whose payload is gone.
    Lost,
}

/// A job that was to be claimed, and what is known of it.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
struct Tried {
    id: JobId,
    queue: usize,
    due: Clock,
    job: Option<(Version, Job)>,
    /// The lease, once it is known to be this claim's.
    lease: Option<Lease>,
    at: Clock,
    ends: Clock,
    payload: Record,
}

impl Dispatch {
    pub fn new(mut asked: Box<Asked>) -> Result<Dispatch, Failure> {
        check::name("worker", &asked.worker)?;
        let within = |field, n: usize, most: usize| check::within(field, Some(n as u64), 1, most as u64);
        within("queues", asked.queues.len(), limits::CLAIM_QUEUES)?;
        within("upstreams", asked.upstreams.len(), limits::DISPATCH_UPSTREAMS)?;
        within("max", asked.max, limits::CLAIM_JOBS)?;
        for (tenant, queue) in &asked.queues {
            check::name("tenant", tenant)?;
            check::name("queues", queue)?;
        }
        check::within("wait_ms", Some(asked.wait_ms), 0, limits::WAIT_MS)?;
        let (mut queues, mut upstreams) = (BTreeSet::new(), BTreeSet::new());
        asked.queues.retain(|q| queues.insert(q.clone()));
        asked.upstreams.retain(|u| upstreams.insert(u.clone()));
        Ok(Dispatch { asked, stage: Stage::Look, nonce: Version(0), since: 0, tried: Vec::new() })
    }

    pub fn wait_ms(&self) -> u64 {
        self.asked.wait_ms
    }

    /// Whether as many were had as were asked for, so that there may be more.
    pub fn filled(&self) -> bool {
        self.tried.len() >= self.asked.max
    }

    pub fn topics(&self) -> Vec<Name> {
        self.asked.queues.iter().map(|(tenant, queue)| keys::topic_queue(tenant, queue)).collect()
    }

    fn look(&mut self, cx: &mut Cx<'_>) -> Next {
        self.stage = Stage::Look;
        self.tried.clear();
        if cx.stats.newer_format {
            return Next::fail(Failure::NewerFormat { retry_after_ms: 10_000 });
        }
        if self.asked.upstreams.iter().any(|u| cx.config.routing.upstream(u).is_none()) {
            return Next::fail(Failure::UnknownUpstream);
        }
        self.since = cx.notices;
        Next::Read(Sight::read(&self.asked, cx))
    }

    fn decide(&mut self, snapshot: &Snapshot, cx: &mut Cx<'_>) -> Next {
        if cx.orphan {
            return Next::ok(Response::Dispatched(Vec::new()));
        }
        self.nonce = cx.make.version();
        let mut sight = match Sight::of(&self.asked, snapshot, cx) {
            Ok(sight) => sight,
            Err(failure) => return Next::fail(failure),
        };
        let mut drafts = Vec::new();
        let found = sight.choose(&self.asked, cx);
        for head in found {
            match head {
                Head::Take(pick) => {
                    let (id, queue, due) = (pick.id, pick.queue, pick.due);
                    drafts.push(self.claim(*pick, &sight));
                    let (job, lease, payload) = (None, None, Record::Absent);
                    self.tried.push(Tried { id, queue, due, job, lease, at: 0, ends: 0, payload });
                }
                Head::Amiss(amiss) => drafts.extend(amiss),
            }
        }
        if drafts.is_empty() {
            return self.nothing(&sight, cx);
        }
        // First what makes room, and takes away what stands in the way.
        let mut txns = sight.tidy();
        txns.extend(drafts);
        self.stage = Stage::Sent;
        // honest-replies: it may come to be first, or there may come to be room, after it was refused.
        // Of one it is known as soon as its lease is there.
        let own = if self.tried.len() == 1 { self.nonce } else { Version(0) };
        let evidence = self.tried.first().map(|t| Evidence::time(keys::lease(t.id), own));
        Next::Commit(Plan { txns, grows: false, evidence })
    }

    /// The transaction by which one job is leased, with its slots.
    fn claim(&self, pick: Pick, sight: &Sight<'_>) -> Draft {
        let Pick { id, queue, version, job, length, upstream, probe, .. } = pick;
        let home = Home::from(&job);
        let member = keys::member(id);
        let queued = home.index(Status::Queued);
        let lease = Lease {
            worker: self.asked.worker.clone(),
            tenant: job.tenant.clone(),
            queue: job.queue.clone(),
            class: job.class,
            length_ms: length / limits::MILLI,
            terms: Terms::Dispatched(Placed {
                upstream: sight.name(upstream).into(),
                pool: sight.pool(upstream).map(String::from),
                cost: job.policy.cost,
                probe: probe.is_some(),
            }),
        };
        let mut guards = vec![
            Guard::At(keys::job(id), version),
            Guard::Absent(keys::lease(id)),
            // So that after an acknowledged pause nothing is claimed.
            sight.queue(queue).guard(keys::queue(&job.tenant, &job.queue)),
            // priority: the first of its class, while none of a class above stands there.
            Guard::Member(queued.clone(), member.clone(), Standing::First),
        ];
        if job.deliveries == 0 && job.policy.queue_ttl_ms.is_some() {
            // The clock of the commit decides whether its queue deadline has come.
            guards.push(Guard::Member(keys::TTL, member.clone(), Standing::Live));
        }
        guards.extend(sight.guards(upstream, &job, probe));
        let ends = lease::deadline(&job, 0, 0).map_or(length, |most| most.min(length));
        let mut writes = vec![
            remove(queued.clone(), &member),
            // The due score goes along, so that a lapse or release finds the old place.
            add(home.index(Status::Running), &member, ScoreAt::Of(queued)),
            add(keys::LEASES, &member, ScoreAt::Clock(ends)),
            remove(keys::TTL, &member),
            moves::put(keys::lease(id), self.nonce, codec::encode(&lease), Expiry::Never),
            home.event(Kind::Claimed, id, Some(&self.asked.worker), None),
        ];
        let held = moves::holdings(id, lease.class, lease.placed(), self.nonce);
        writes.extend(held.into_iter().map(|(index, member)| add(index, &member, ScoreAt::Clock(ends))));
        Draft::new(guards, writes)
    }

    fn nothing(&mut self, sight: &Sight<'_>, cx: &mut Cx<'_>) -> Next {
        if self.asked.wait_ms == 0 || cx.last_try {
            cx.stats.claims_empty += 1;
            return Next::ok(Response::Dispatched(Vec::new()));
        }
        let mut topics = self.topics();
        topics.extend(sight.topics());
        let since = sight.topics().map(|topic| (topic, self.since)).collect();
        Next::Wait(Wait { topics, again_ms: sight.again_ms(cx), since, ..Wait::default() })
    }

    /// Reads what became of those that were tried.
    fn had(&mut self) -> Next {
        self.stage = Stage::Had;
        let mut read = Read::default();
        // Payloads last: what does not fit into one answer is read next.
        read.records.extend(self.tried.iter().flat_map(|t| [keys::lease(t.id), keys::job(t.id)]));
        read.records.extend(self.tried.iter().map(|t| keys::payload(t.id)));
        read.members.extend(self.tried.iter().map(|t| (keys::LEASES, keys::member(t.id))));
        Next::Read(read)
    }

    fn seen(&mut self, snapshot: Snapshot, cx: &mut Cx<'_>) -> Next {
        let (pairs, payloads) = snapshot.records.split_at((2 * self.tried.len()).min(snapshot.records.len()));
        let rest = payloads.iter().zip(&snapshot.members);
        for ((tried, pair), (payload, place)) in self.tried.iter_mut().zip(pairs.chunks(2)).zip(rest) {
            let [lease, job] = pair else { continue };
            // A job that has vanished meanwhile is left to whoever reclaims its lease.
            if let (Some(granted), Ok(Some(job))) = (Granted::read(lease), decode_record::<Job>(job))
                && granted.version == self.nonce
            {
                tried.at = granted.at;
                tried.ends = place.map_or(granted.at, |p| p.score);
                tried.lease = Some(granted.lease);
                tried.job = Some(job);
                tried.payload = payload.clone();
            }
        }
        self.tried.retain(|t| t.lease.is_some());
        if self.tried.is_empty() {
            // Others were quicker, or there was only something to put right.
            return self.look(cx);
        }
        self.fetch(cx)
    }

    /// Reads payloads that are still missing, as much as one answer carries.
    fn fetch(&mut self, cx: &mut Cx<'_>) -> Next {
        let have = |t: &Tried| t.payload.bytes().map_or(0, |b| b.len());
        let mut planned: usize = self.tried.iter().map(have).sum();
        let mut wanted = Vec::new();
        for (at, tried) in self.tried.iter().enumerate() {
            if let Record::Present { len, bytes: None, .. } = &tried.payload
                && (planned == 0 || planned.saturating_add(*len) <= limits::CLAIM_BYTES)
            {
                planned = planned.saturating_add(*len);
                wanted.push(at);
            }
        }
        if wanted.is_empty() {
            return self.examine(cx);
        }
        let records = wanted.iter().filter_map(|at| self.tried.get(*at)).map(|t| keys::payload(t.id)).collect();
        self.stage = Stage::Rest(wanted);
        Next::Read(Read { records, ..Read::default() })
    }

    /// no-ghosts: what has no payload is never run.
    fn examine(&mut self, cx: &mut Cx<'_>) -> Next {
        let mut drafts = Vec::new();
        let nonce = self.nonce;
        for tried in core::mem::take(&mut self.tried) {
            if let (true, Some((_, job)), Some(lease)) = (tried.payload.is_newer(), &tried.job, &tried.lease) {
                let granted = Granted { lease: lease.clone(), version: nonce, at: tried.at };
                let held = Guard::At(keys::lease(tried.id), nonce);
                let deadline = queue_deadline(job, job.born);
                drafts.push(put_back(tried.id, Home::from(job), tried.due, held, Some(&granted), deadline));
                cx.mark(Mark::NewerFormat);
                continue;
            }
            let gone = match &tried.payload {
                Record::Absent => true,
                record => record.bytes().is_some_and(|b| decode_content(b).is_err()),
            };
            let (Some((version, job)), Some(lease), true) = (&tried.job, &tried.lease, gone) else {
                self.tried.push(tried);
                continue;
            };
            let (id, home) = (tried.id, Home::from(job));
            let granted = Granted { lease: lease.clone(), version: nonce, at: tried.at };
            let mut leave = moves::leave_running(id, home, Some(&granted));
            leave.push(home.event(Kind::Lost, id, None, Some("payload")));
            let ending = Ending {
                status: Status::Dead,
                reason: Some("lost".into()),
                result_len: None,
                attempt: Some(lease::attempt(job, Some(&granted), AttemptEnd::Expired, tried.at, None)),
                attempts: job.attempts,
                deliveries: job.deliveries,
            };
            let own = cx.make.version();
            let held = vec![Guard::At(keys::lease(id), nonce)];
            drafts.extend(moves::end(id, job, *version, own, tried.at, &ending, held, leave, cx));
            cx.stats.lost += 1;
            cx.mark(Mark::JobLost);
        }
        if drafts.is_empty() {
            return self.reply(cx);
        }
        self.stage = Stage::Lost;
        Next::Commit(Plan::new(drafts))
    }

    fn reply(&mut self, cx: &mut Cx<'_>) -> Next {
        if self.tried.is_empty() {
            return self.look(cx);
        }
        let mut found = Vec::new();
        for tried in &self.tried {
            let (Some((version, job)), Some(lease)) = (&tried.job, &tried.lease) else { continue };
            let Some(placed) = lease.placed().cloned() else { continue };
            let payload = tried.payload.bytes().and_then(|bytes| decode_content(bytes).ok());
            cx.stats.waited.count(tried.at.saturating_sub(tried.due));
            found.push(Dispatched {
                tenant: job.tenant.clone(),
                job: Leased {
                    id: tried.id,
                    token: Token { at: tried.at, nonce: self.nonce },
                    attempt: job.attempts.saturating_add(1),
                    delivery: job.deliveries.saturating_add(1),
                    queue: job.queue.clone(),
                    class: job.class,
                    payload,
                    lease_expires_at: tried.ends,
                    traceparent: job.traceparent.clone(),
                    metadata: job.metadata.clone().map(Opaque::new),
                },
                placed,
                on_prem: job.policy.on_prem,
            });
            let granted = Granted { lease: lease.clone(), version: self.nonce, at: tried.at };
            cx.handed.put(tried.id, HandedOut { version: *version, job: job.clone(), granted });
        }
        cx.stats.claims += 1;
        cx.stats.claimed += found.len() as u64;
        Next::ok(Response::Dispatched(found))
    }
}

impl Operation for Dispatch {
    fn start(&mut self, cx: &mut Cx<'_>) -> Next {
        self.look(cx)
    }

    fn read(&mut self, snapshot: Snapshot, cx: &mut Cx<'_>) -> Next {
        match core::mem::replace(&mut self.stage, Stage::Look) {
            Stage::Look | Stage::Sent | Stage::Lost => self.decide(&snapshot, cx),
            Stage::Had => self.seen(snapshot, cx),
            Stage::Rest(wanted) => {
                for (at, record) in wanted.into_iter().zip(snapshot.records) {
                    if let Some(tried) = self.tried.get_mut(at) {
                        tried.payload = record;
                    }
                }
                self.fetch(cx)
            }
        }
    }

    fn answered(&mut self, _: Clock, _: Vec<Answer>, cx: &mut Cx<'_>) -> Next {
        match self.stage {
            Stage::Lost => self.reply(cx),
            _ if self.tried.is_empty() => self.look(cx),
            _ => self.had(),
        }
    }

    fn doubtful(&mut self, cx: &mut Cx<'_>) -> Next {
        self.answered(0, Vec::new(), cx)
    }
}
