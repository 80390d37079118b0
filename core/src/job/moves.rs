//! The writes that several transitions share: leaving a place, ending, being lost.
//!
//! An ending that touches the idempotency key is guarded by the key's version. Where that guard
//! does not hold, the key is not this job's any more, and the same ending without the key is right;
//! both are sent, the second is refused if the first was applied.

use alloc::string::{String, ToString as _};
use alloc::vec;
use alloc::vec::Vec;

use super::lease::Granted;
use super::record::{AttemptRecord, ChildOutcome, Class, End, Job, Lease, Owner, Placed, Status};
use crate::event::{Event, Item, Kind};
use crate::ids::{GroupId, JobId};
use crate::limits;
use crate::name::Name;
use crate::replica::task::{Cx, Draft};
use crate::store::{Clock, Expiry, Guard, Record, SCORE_MAX, ScoreAt, Standing, Value, Version, Write, keys};

/// Where a job is at home: what its index names are made of.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Home<'a> {
    pub tenant: &'a str,
    pub queue: &'a str,
    pub class: Class,
}

impl<'a> From<&'a Job> for Home<'a> {
    fn from(job: &'a Job) -> Self {
        Home { tenant: &job.tenant, queue: &job.queue, class: job.class }
    }
}

impl<'a> From<&'a Lease> for Home<'a> {
    fn from(lease: &'a Lease) -> Self {
        Home { tenant: &lease.tenant, queue: &lease.queue, class: lease.class }
    }
}

impl Home<'_> {
    /// The index of the home's jobs in that status.
    pub fn index(&self, status: Status) -> Name {
        keys::status(self.tenant, self.queue, self.class, status)
    }

    pub fn topic(&self) -> Name {
        keys::topic_queue(self.tenant, self.queue)
    }

    pub fn event(&self, kind: Kind, job: JobId, worker: Option<&str>, reason: Option<&str>) -> Write {
        let event = Event {
            kind,
            of: Owner::Job(job),
            range: None,
            queue: self.queue.into(),
            class: Some(self.class),
            worker: worker.map(String::from),
            reason: reason.map(String::from),
        };
        Write::Append { log: keys::audit(self.tenant), bytes: Item::One(event).encode() }
    }
}

/// The event of a group; `range`: the children that it concerns.
pub(crate) fn group_event(
    kind: Kind,
    group: GroupId,
    home: Home<'_>,
    range: Option<(u32, u32)>,
    reason: Option<&str>,
) -> Write {
    let event = Event {
        kind,
        of: Owner::Group(group),
        range,
        queue: home.queue.into(),
        class: Some(home.class),
        worker: None,
        reason: reason.map(String::from),
    };
    Write::Append { log: keys::audit(home.tenant), bytes: Item::One(event).encode() }
}

pub(crate) fn add(index: Name, member: &Name, score: ScoreAt) -> Write {
    Write::Add { index, member: member.clone(), score, raise: false }
}

pub(crate) fn remove(index: Name, member: &Name) -> Write {
    Write::Remove { index, member: member.clone() }
}

pub(crate) fn put(key: Name, version: Version, bytes: bytes::Bytes, expiry: Expiry) -> Write {
    Write::Put { key, version, value: Value::Bytes(bytes), expiry }
}

/// That the record is still as it was read, whether there or not.
pub(crate) fn as_read(key: Name, record: &Record) -> Guard {
    match record.version() {
        Some(version) => Guard::At(key, version),
        None => Guard::Absent(key),
    }
}

/// The writes by which a running job leaves that state, and gives back what was held for its lease. `granted` is
/// `None` where somebody else ends it than the server that calls its upstream: what is held stands then until the
/// call is over, or the lease would have been.
pub(crate) fn leave_running(id: JobId, home: Home<'_>, granted: Option<&Granted>) -> Vec<Write> {
    let member = keys::member(id);
    let mut writes = vec![
        Write::Delete(keys::lease(id)),
        Write::Delete(keys::progress(id)),
        remove(home.index(Status::Running), &member),
        remove(keys::LEASES, &member),
    ];
    let held = granted.map(|g| give_back(id, g.lease.class, g.lease.placed(), g.version));
    writes.extend(held.into_iter().flatten());
    writes
}

/// Index and member of everything that is held for a lease: its units of a pool, and its place as the one call
/// that is tried on an upstream.
pub(crate) fn holdings(id: JobId, class: Class, placed: Option<&Placed>, version: Version) -> Vec<(Name, Name)> {
    let Some(placed) = placed else { return Vec::new() };
    let mut held = Vec::new();
    if let Some(pool) = &placed.pool {
        let batch = (class == Class::Batch).then(|| keys::batch(pool));
        for index in [Some(keys::holders(pool)), batch].into_iter().flatten() {
            held.extend(keys::job_members(id, version, placed.cost).map(|member| (index.clone(), member)));
        }
    }
    if placed.probe {
        held.extend(keys::job_members(id, version, 1).map(|member| (keys::probe(&placed.upstream), member)));
    }
    held
}

/// The writes that give back what was held for a lease, so that others may have it.
pub(crate) fn give_back(id: JobId, class: Class, placed: Option<&Placed>, version: Version) -> Vec<Write> {
    let held = holdings(id, class, placed, version);
    let mut writes: Vec<Write> = held.into_iter().map(|(index, member)| Write::Remove { index, member }).collect();
    if let Some(placed) = placed {
        writes.extend(placed.pool.as_ref().map(|pool| Write::Notify(keys::topic_pool(pool))));
        writes.extend(end_probe(id, placed, version));
    }
    writes
}

/// The writes by which a call is not any more the one that is tried on an upstream.
pub(crate) fn end_probe(id: JobId, placed: &Placed, version: Version) -> Vec<Write> {
    if !placed.probe {
        return Vec::new();
    }
    let index = keys::probe(&placed.upstream);
    let mut writes: Vec<Write> = keys::job_members(id, version, 1).map(|unit| remove(index.clone(), &unit)).collect();
    writes.push(Write::Notify(keys::topic_upstream(&placed.upstream)));
    writes
}

/// The writes by which a job without a lease leaves whatever live place it is in. It names them all,
/// so that no guard has to know which it is, nor whether a lease record was evicted.
pub(crate) fn leave_waiting(id: JobId, home: Home<'_>) -> Vec<Write> {
    let member = keys::member(id);
    let mut writes: Vec<Write> = Status::LIVE.into_iter().map(|s| remove(home.index(s), &member)).collect();
    writes.extend([keys::LEASES, keys::DUE, keys::TTL].map(|index| remove(index, &member)));
    // What an evicted lease left behind would stand in the way of the next.
    writes.push(Write::Delete(keys::progress(id)));
    writes
}

/// The job's record after an attempt that did not end it.
pub(crate) fn put_job(id: JobId, job: &Job, own: Version) -> Write {
    put(keys::job(id), own, crate::codec::encode(job), Expiry::Never)
}

/// The writes that remove a job's records, and the job from every index of jobs if its home is known.
pub(crate) fn forget(id: JobId, home: Option<Home<'_>>) -> Vec<Write> {
    let member = keys::member(id);
    let records = [keys::job, keys::payload, keys::result, keys::history, keys::lease, keys::progress];
    let mut writes: Vec<Write> = records.map(|key| Write::Delete(key(id))).into();
    writes.extend([keys::LEASES, keys::DUE, keys::TTL].map(|index| remove(index, &member)));
    if let Some(home) = home {
        writes.extend(Status::ALL.map(|s| remove(home.index(s), &member)));
    }
    writes
}

/// The writes that say that there may be something to do for a group.
pub(crate) fn mark(group: GroupId, own: Version) -> [Write; 3] {
    [
        put(keys::mark(group), own, bytes::Bytes::new(), Expiry::Never),
        add(keys::GROUPS_DUE, &keys::group_member(group), ScoreAt::Clock(0)),
        Write::Notify(keys::TOPIC_GROUPS),
    ]
}

/// The writes by which a child that ends is counted in its group, which may then release the next or be
/// final. None for a job that is no child.
fn done(id: JobId, outcome: ChildOutcome, own: Version) -> Vec<Write> {
    let Some((group, index)) = id.child_of() else { return Vec::new() };
    let member = keys::member(id);
    let mut writes = vec![remove(keys::held(group), &member), remove(keys::released(group), &member)];
    if outcome == ChildOutcome::Lost {
        // finalized-once: what had ended and vanished afterwards counts once.
        writes.extend(ChildOutcome::ALL.into_iter().map(|o| remove(keys::done(group, o), &member)));
    }
    writes.push(add(keys::done(group, outcome), &member, ScoreAt::Number(index.into())));
    writes.extend(mark(group, own));
    writes
}

/// How a life ends.
#[derive(Clone, Debug)]
pub(crate) struct Ending {
    pub status: Status,
    pub reason: Option<String>,
    /// Bytes of the result, if one was given.
    pub result_len: Option<u64>,
    pub attempt: Option<AttemptRecord>,
    /// Counted attempts and claims at the end.
    pub attempts: u32,
    pub deliveries: u32,
}

/// How long an ended job's main record lives, in microseconds.
pub(crate) fn kept(job: &Job, status: Status) -> u64 {
    let retention = job.policy.retention_ms;
    let key = match status {
        Status::Succeeded if job.key.is_some() => job.policy.key_ttl_ms.unwrap_or(retention),
        _ => 0,
    };
    retention.max(key).saturating_mul(limits::MILLI).max(limits::STUB)
}

/// The transactions that end a job: `guards` and `leave` are the caller's; `own` is the version of
/// the record put. One or two alternatives, see the module's text.
#[expect(clippy::too_many_arguments)]
pub(crate) fn end(
    id: JobId,
    job: &Job,
    version: Version,
    own: Version,
    clock: Clock,
    ending: &Ending,
    guards: Vec<Guard>,
    leave: Vec<Write>,
    cx: &mut Cx<'_>,
) -> Vec<Draft> {
    let home = Home::from(job);
    let kept = kept(job, ending.status);
    let retention = job.policy.retention_ms.saturating_mul(limits::MILLI);
    let mut ended = job.clone();
    ended.attempts = ending.attempts;
    ended.deliveries = ending.deliveries;
    ended.trail = job.trail.after(version);
    ended.end = Some(End {
        status: ending.status,
        at: clock,
        reason: ending.reason.clone(),
        result_len: ending.result_len,
        attempt: ending.attempt.clone(),
    });
    let index = home.index(ending.status);
    let kind = match ending.status {
        Status::Succeeded => Kind::Succeeded,
        Status::Cancelled => Kind::Cancelled,
        Status::Expired => Kind::Expired,
        _ => Kind::Dead,
    };
    let worker = ending.attempt.as_ref().map(|a| a.worker.as_str());

    let mut writes = leave;
    writes.push(home.event(kind, id, worker, ending.reason.as_deref()));
    if let Some(outcome) = ChildOutcome::of(ending.status).filter(|_| id.child_of().is_some()) {
        // A child's records live as long as its group's, whose retention sweep removes them.
        writes.push(put(keys::job(id), own, crate::codec::encode(&ended), Expiry::Never));
        writes.push(add(index, &keys::member(id), ScoreAt::Number(SCORE_MAX)));
        writes.extend(done(id, outcome, own));
    } else {
        writes.extend([
            put(keys::job(id), own, crate::codec::encode(&ended), Expiry::Clock(kept)),
            Write::Expire(keys::payload(id), Expiry::Clock(retention)),
            add(index.clone(), &keys::member(id), ScoreAt::Clock(kept)),
        ]);
        // There is a history as soon as an attempt has ended, in this life or in one before.
        if job.deliveries > 0 || job.lives > 0 {
            writes.push(Write::Expire(keys::history(id), Expiry::Clock(kept)));
        }
        // What a job leaves behind is cleared away by the jobs that end after it.
        *cx.trims.entry(index).or_default() += 2;
    }

    let mut guards = guards;
    guards.push(Guard::At(keys::job(id), version));
    let plain = Draft::new(guards, writes);
    match &job.key {
        None => vec![plain],
        Some((key, key_version)) => {
            let key = keys::key(&job.tenant, key);
            let mut with_key = plain.clone();
            with_key.guards.push(Guard::At(key.clone(), *key_version));
            with_key.writes.push(match ending.status {
                Status::Succeeded => {
                    let ttl = job.policy.key_ttl_ms.unwrap_or(job.policy.retention_ms);
                    Write::Expire(key, Expiry::Clock(ttl.saturating_mul(limits::MILLI)))
                }
                _ => Write::Delete(key),
            });
            vec![with_key, plain]
        }
    }
}

/// The writes by which everything goes that may still name a job whose record has vanished.
fn vanish(id: JobId, home: Option<Home<'_>>, met_in: &[Name]) -> Vec<Write> {
    let member = keys::member(id);
    let records = [keys::lease, keys::progress, keys::payload, keys::result, keys::history];
    let mut writes: Vec<Write> = records.map(|key| Write::Delete(key(id))).into();
    writes.extend([keys::LEASES, keys::DUE, keys::TTL].map(|index| remove(index, &member)));
    writes.extend(met_in.iter().map(|index| remove(index.clone(), &member)));
    if let Some(home) = home {
        writes.extend(Status::LIVE.into_iter().map(|s| remove(home.index(s), &member)));
    }
    writes
}

/// A member whose job's record has vanished: everything that may still name it goes, and it is told.
/// `home` is where it was met, if that is known; `guards` make a second application do nothing; `own` is a
/// fresh version.
pub(crate) fn lost(id: JobId, home: Option<Home<'_>>, met_in: &[Name], mut guards: Vec<Guard>, own: Version) -> Draft {
    guards.push(Guard::Absent(keys::job(id)));
    let mut writes = vanish(id, home, met_in);
    writes.extend(home.map(|home| home.event(Kind::Lost, id, None, None)));
    writes.extend(done(id, ChildOutcome::Lost, own));
    Draft::new(guards, writes)
}

/// The same where `guards` may hold once more: two alternatives, of which the first clears away what is left of a
/// child that has been counted before.
pub(crate) fn lost_once(
    id: JobId,
    home: Option<Home<'_>>,
    met_in: &[Name],
    guards: Vec<Guard>,
    own: Version,
) -> Vec<Draft> {
    let mut again = Draft::new(guards.clone(), vanish(id, home, met_in));
    again.guards.push(Guard::Absent(keys::job(id)));
    count_once(id, again, lost(id, home, met_in, guards, own))
}

/// finalized-once: a child that was counted as lost is not counted again, which would mark a group that is final by
/// now. The alternative for what was counted comes first: after the other it would apply as well.
fn count_once(id: JobId, mut again: Draft, mut first: Draft) -> Vec<Draft> {
    let Some((group, _)) = id.child_of() else { return vec![first] };
    let counted = |standing| Guard::Member(keys::done(group, ChildOutcome::Lost), keys::member(id), standing);
    again.guards.push(counted(Standing::Due));
    // Where it stands in spite of that it would take a place for ever.
    again.writes.extend([keys::held(group), keys::released(group)].map(|index| remove(index, &keys::member(id))));
    first.guards.push(counted(Standing::Out));
    vec![again, first]
}

/// A job whose record cannot be read leaves every index that is known, and stands in quarantine. The
/// record stays as it is.
pub(crate) fn quarantine(
    id: JobId,
    home: Option<Home<'_>>,
    record: &Record,
    mut guards: Vec<Guard>,
    own: Version,
) -> Draft {
    guards.push(as_read(keys::job(id), record));
    let mut writes = leave_live(id, home);
    writes.extend(home.map(|home| home.event(Kind::Quarantined, id, None, None)));
    writes.extend(done(id, ChildOutcome::Lost, own));
    writes.push(add(keys::QUARANTINE, &keys::member(id), ScoreAt::Clock(0)));
    Draft::new(guards, writes)
}

/// The same where `guards` may hold once more, as [`lost_once`].
pub(crate) fn quarantine_once(
    id: JobId,
    home: Option<Home<'_>>,
    record: &Record,
    guards: Vec<Guard>,
    own: Version,
) -> Vec<Draft> {
    let mut again = Draft::new(guards.clone(), leave_live(id, home));
    again.guards.push(as_read(keys::job(id), record));
    again.writes.push(add(keys::QUARANTINE, &keys::member(id), ScoreAt::Clock(0)));
    count_once(id, again, quarantine(id, home, record, guards, own))
}

/// The writes by which a job that cannot be read leaves every live place that is known.
fn leave_live(id: JobId, home: Option<Home<'_>>) -> Vec<Write> {
    let member = keys::member(id);
    let mut writes: Vec<Write> = [keys::lease(id), keys::progress(id)].into_iter().map(Write::Delete).collect();
    writes.extend([keys::LEASES, keys::DUE, keys::TTL].map(|index| remove(index, &member)));
    if let Some(home) = home {
        writes.extend(Status::LIVE.into_iter().map(|s| remove(home.index(s), &member)));
    }
    writes
}

/// The worker's name in a lease, or nothing when the lease has vanished.
pub(crate) fn worker_of(lease: Option<&Lease>) -> String {
    lease.map(|l| l.worker.to_string()).unwrap_or_default()
}
