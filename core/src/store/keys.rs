//! The key layout: the only place that spells a key. See docs/ARCHITECTURE.md for the table.
//!
//! Names inside keys are percent-encoded, so that `/` only ever separates parts. Job ids stand in
//! keys as they are printed.

use alloc::string::String;
use alloc::vec::Vec;

use crate::ids::{GroupId, JobId};
use crate::job::record::{ChildOutcome, Class, Owner, Status};
use crate::name::Name;
use crate::store::Version;

pub const JOB: Name = Name::from_static("job/");
pub const HISTORY: Name = Name::from_static("history/");
pub const PAYLOAD: Name = Name::from_static("payload/");
pub const RESULT: Name = Name::from_static("result/");
pub const LEASE: Name = Name::from_static("lease/");
pub const PROGRESS: Name = Name::from_static("progress/");
pub const GROUP: Name = Name::from_static("group/");
pub const MARK: Name = Name::from_static("mark/");
/// Before a pool's member: the record of its settings.
pub const POOL: Name = Name::from_static("pool/");
/// Before an upstream's name, encoded: that it takes no calls.
pub const HOLD: Name = Name::from_static("hold/");

/// Index: job @ end of its lease.
pub const LEASES: Name = Name::from_static("leases");
/// Index: job @ when it becomes due; scheduled and retrying.
pub const DUE: Name = Name::from_static("due");
/// Index: job @ queue deadline; never claimed yet.
pub const TTL: Name = Name::from_static("ttl");
/// Index: tenant/queue @ when it is looked at next.
pub const NAMES: Name = Name::from_static("names");
/// Index: group @ when it was marked; there may be something to do for it.
pub const GROUPS_DUE: Name = Name::from_static("groups/due");
/// Index: group @ when it is stopped unless it is sealed before.
pub const GROUPS_OPEN: Name = Name::from_static("groups/open");
/// Index: group @ end of its retention.
pub const GROUPS_ENDED: Name = Name::from_static("groups/ended");
/// Index: pool @ when it is looked at next.
pub const POOLS: Name = Name::from_static("pools");
/// Index: job @ clock; undecodable.
pub const QUARANTINE: Name = Name::from_static("quarantine");

/// The member that stands for a job in every index.
pub fn member(job: JobId) -> Name {
    Name::new(&job.text())
}

/// The job that a member stands for.
pub fn job_of(member: &Name) -> Option<JobId> {
    member.as_str()?.parse().ok()
}

fn of(prefix: &Name, job: JobId) -> Name {
    prefix.join(&job.text())
}

pub fn job(id: JobId) -> Name {
    of(&JOB, id)
}
pub fn history(id: JobId) -> Name {
    of(&HISTORY, id)
}
pub fn payload(id: JobId) -> Name {
    of(&PAYLOAD, id)
}
pub fn result(id: JobId) -> Name {
    of(&RESULT, id)
}
pub fn lease(id: JobId) -> Name {
    of(&LEASE, id)
}
pub fn progress(id: JobId) -> Name {
    of(&PROGRESS, id)
}

/// Record: a group's main record.
pub fn group(id: GroupId) -> Name {
    GROUP.join(&id.text())
}

/// Record: that there may be something to do for a group; only its version counts.
pub fn mark(id: GroupId) -> Name {
    MARK.join(&id.text())
}

/// The member that stands for a group in every index.
pub fn group_member(id: GroupId) -> Name {
    Name::new(&id.text())
}

/// The group that a member stands for.
pub fn group_of(member: &Name) -> Option<GroupId> {
    member.as_str()?.parse().ok()
}

/// Index: child @ index; not released yet.
pub fn held(id: GroupId) -> Name {
    Name::from_static("held/").join(&id.text())
}

/// Index: child; released and not ended. Its size is what `max_parallel` bounds.
pub fn released(id: GroupId) -> Name {
    Name::from_static("released/").join(&id.text())
}

/// Index: child @ index; ended so.
pub fn done(id: GroupId, outcome: ChildOutcome) -> Name {
    Name::from_static("done/").join(&id.text()).join(b"/").join(outcome.text().as_bytes())
}

/// The main record of whom an idempotency key names.
pub fn owner(owner: Owner) -> Name {
    match owner {
        Owner::Job(id) => job(id),
        Owner::Group(id) => group(id),
    }
}

/// `prefix/part/part…`, every part percent-encoded.
fn path(prefix: &str, parts: &[&str]) -> Name {
    let mut out = Vec::with_capacity(prefix.len() + parts.iter().map(|p| p.len() + 1).sum::<usize>());
    out.extend_from_slice(prefix.as_bytes());
    for part in parts {
        out.push(b'/');
        encode(part, &mut out);
    }
    Name::from(out)
}

fn encode(part: &str, out: &mut Vec<u8>) {
    const HEX: &[u8; 16] = b"0123456789ABCDEF";
    let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.' | b'~' | b':');
    let mut rest = part.as_bytes();
    while let Some(at) = rest.iter().position(|b| !plain(*b)) {
        let (clean, other) = rest.split_at(at);
        out.extend_from_slice(clean);
        let Some((b, left)) = other.split_first() else { return };
        out.extend_from_slice(&[b'%', HEX[usize::from(b >> 4)], HEX[usize::from(b & 15)]]);
        rest = left;
    }
    out.extend_from_slice(rest);
}

fn decode(part: &str) -> Option<String> {
    let mut out = Vec::with_capacity(part.len());
    let mut bytes = part.bytes();
    while let Some(b) = bytes.next() {
        if b == b'%' {
            let digit = |b: Option<u8>| char::from(b?).to_digit(16);
            let (high, low) = (digit(bytes.next())?, digit(bytes.next())?);
            out.push((high * 16 + low) as u8);
        } else {
            out.push(b);
        }
    }
    String::from_utf8(out).ok()
}

/// Record: the idempotency key's binding.
pub fn key(tenant: &str, key: &str) -> Name {
    path("key", &[tenant, key])
}

/// Record: the receipt of a claim.
pub fn receipt(tenant: &str, claim: &str) -> Name {
    path("claim", &[tenant, claim])
}

/// Record: a queue's pause and settings.
pub fn queue(tenant: &str, queue: &str) -> Name {
    path("queue", &[tenant, queue])
}

/// The member of [`NAMES`] that stands for a queue.
pub fn queue_member(tenant: &str, queue: &str) -> Name {
    let mut out = Vec::new();
    encode(tenant, &mut out);
    out.push(b'/');
    encode(queue, &mut out);
    Name::from(out)
}

/// Tenant and queue of a member of [`NAMES`].
pub fn queue_of(member: &Name) -> Option<(String, String)> {
    let (tenant, queue) = member.as_str()?.split_once('/')?;
    Some((decode(tenant)?, decode(queue)?))
}

/// Index: the jobs of one queue, class and status. **Every unexpired job stands in exactly one.**
pub fn status(tenant: &str, queue: &str, class: Class, status: Status) -> Name {
    path("st", &[tenant, queue, class.text(), status.text()])
}

/// Tenant, queue, class and status of a status index.
pub fn status_of(index: &Name) -> Option<(String, String, Class, Status)> {
    let mut parts = index.as_str()?.strip_prefix("st/")?.split('/');
    let found =
        (decode(parts.next()?)?, decode(parts.next()?)?, Class::parse(parts.next()?)?, Status::parse(parts.next()?)?);
    parts.next().is_none().then_some(found)
}

/// Log: a tenant's audit events.
pub fn audit(tenant: &str) -> Name {
    path("audit", &[tenant])
}

/// The member of [`POOLS`] that stands for a pool.
pub fn pool_member(pool: &str) -> Name {
    let mut out = Vec::new();
    encode(pool, &mut out);
    Name::from(out)
}

/// The pool of a member of [`POOLS`].
pub fn pool_of(member: &Name) -> Option<String> {
    decode(member.as_str()?)
}

/// Record: a pool's settings.
pub fn pool(pool: &str) -> Name {
    POOL.join(&pool_member(pool))
}

/// Before a slot's member: its record in that pool.
pub fn slots(pool: &str) -> Name {
    path("slot", &[pool, ""])
}

/// The member that stands for a slot in `waiting` and `alive` of its pool.
pub fn slot_member(tenant: &str, slot: &str) -> Name {
    queue_member(tenant, slot)
}

/// Record: one slot of a pool, wanted or held.
pub fn slot(pool: &str, tenant: &str, slot: &str) -> Name {
    path("slot", &[pool, tenant, slot])
}

/// The pool of a record that is its own or one of its slots'.
pub fn pool_in(key: &Name) -> Option<String> {
    let (prefix, rest) = key.as_str()?.split_once('/')?;
    let pool = rest.split('/').next()?;
    ["pool", "slot"].contains(&prefix).then(|| decode(pool))?
}

/// The members of `holders` that stand for a slot under one grant, one for each unit of its cost.
pub fn holder_members(tenant: &str, slot: &str, grant: Version, cost: u32) -> impl Iterator<Item = Name> {
    let slot = slot_member(tenant, slot);
    (1..=cost).map(move |n| Name::from(alloc::format!("{slot}/{:016x}/{n}", grant.0)))
}

/// Slot's member, grant and unit of a member of `holders`.
pub fn holder_of(member: &Name) -> Option<(Name, Version, u32)> {
    let text = member.as_str()?;
    let (rest, unit) = text.rsplit_once('/')?;
    let (slot, grant) = rest.rsplit_once('/')?;
    let grant = u64::from_str_radix(grant, 16).ok()?;
    Some((Name::from(slot), Version(grant), unit.parse().ok()?))
}

/// Index: holder @ end of its lease, one for each unit of cost. Its size is what `total` bounds.
pub fn holders(pool: &str) -> Name {
    path("holders", &[pool])
}

/// Index: those of [`holders`] whose class is batch. Its size is what `batch_max` bounds.
pub fn batch(pool: &str) -> Name {
    path("batch", &[pool])
}

/// Index: slot @ when it began to wait.
pub fn waiting(pool: &str, class: Class) -> Name {
    path("waiting", &[pool, class.text()])
}

/// Index: waiting slot @ when it is given up unless somebody still waits for it.
pub fn alive(pool: &str, class: Class) -> Name {
    path("alive", &[pool, class.text()])
}

/// Topic: there may be room in the pool.
pub fn topic_pool(pool: &str) -> Name {
    self::pool(pool)
}

/// Where one replica's waiters of one class stand in line; nobody else notifies it.
pub fn line(topic_pool: &Name, class: Class) -> Name {
    topic_pool.join(b"/").join(class.text().as_bytes())
}

/// Record: an upstream that takes no calls.
pub fn hold(upstream: &str) -> Name {
    path("hold", &[upstream])
}

/// Index: the job, with its grant, that is tried on an upstream after a hold @ end of its lease. At most one.
pub fn probe(upstream: &str) -> Name {
    path("probe", &[upstream])
}

/// Topic: an upstream's hold began or is over.
pub fn topic_upstream(upstream: &str) -> Name {
    hold(upstream)
}

/// The members of `holders` and `probe` that stand for a job under one lease, one for each unit of its cost.
/// They cannot meet those of slots, which have a tenant before the name.
pub fn job_members(job: JobId, lease: Version, cost: u32) -> impl Iterator<Item = Name> {
    let job = member(job);
    (1..=cost).map(move |n| Name::from(alloc::format!("{job}/{:016x}/{n}", lease.0)))
}

/// Topic: something became claimable in the queue.
pub fn topic_queue(tenant: &str, queue: &str) -> Name {
    path("q", &[tenant, queue])
}

/// Topic: something was entered in [`DUE`].
pub const TOPIC_DUE: Name = Name::from_static("due");

/// Topic: a group was marked.
pub const TOPIC_GROUPS: Name = Name::from_static("groups");

/// Topic: the group is final.
pub fn topic_group(id: GroupId) -> Name {
    group(id)
}

/// Topic: the job was cancelled while it ran.
pub fn topic_stop(job: JobId) -> Name {
    of(&Name::from_static("stop/"), job)
}

/// Record: a replica's proof that commits work.
pub fn ready(nonce: u64) -> Name {
    Name::from(alloc::format!("ready/{nonce:016x}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_told_apart_whatever_they_contain() {
        for (t, q) in [("a", "b/c"), ("a/b", "c"), ("%2F", "/"), ("é", "\u{1}\n "), ("..", "")] {
            assert_eq!(queue_of(&queue_member(t, q)), Some((t.into(), q.into())));
            let s = status(t, q, Class::Batch, Status::Dead);
            assert_eq!(status_of(&s), Some((t.into(), q.into(), Class::Batch, Status::Dead)));
        }
        assert_ne!(key("a", "b/c"), key("a/b", "c"));
    }

    #[test]
    fn a_slots_members_read_back_whatever_its_names_contain() {
        for (p, t, s) in [("gpu", "a", "b"), ("a/b", "c/", "/1"), ("%", "é", "0000000000000001"), ("..", ":", " ")] {
            assert_eq!(pool_of(&pool_member(p)), Some(p.into()));
            assert_eq!(slots(p).join(&slot_member(t, s)), slot(p, t, s));
            assert_eq!([slot(p, t, s), pool(p)].map(|key| pool_in(&key)), [Some(p.into()), Some(p.into())]);
            for (n, member) in (1..).zip(holder_members(t, s, Version(7), 3)) {
                assert_eq!(holder_of(&member), Some((slot_member(t, s), Version(7), n)));
            }
        }
    }
}
