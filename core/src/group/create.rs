//! Creating a group with its first children, and adding more while it is open. Each is one guarded
//! transaction: no group without the children that it says it has, and no child without its group.

use alloc::boxed::Box;
use alloc::format;
use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;

use super::look::Look;
use super::record::{Group, Mode};
use super::{of, view};
use crate::codec;
use crate::dispatch::Routing;
use crate::dispatch::room::{self, Room};
use crate::event::Kind;
use crate::failure::Failure;
use crate::ids::GroupId;
use crate::job::check;
use crate::job::key::{Found, Lookup, TakeOver};
use crate::job::moves::{self, Home, add, group_event, put};
use crate::job::record::{Class, Job, KeyRecord, Owner, Policy, Status, Trail, decode_content, encode_content};
use crate::job::submit;
use crate::limits;
use crate::opaque::{self, Form};
use crate::replica::Op;
use crate::replica::task::{Cx, Draft, Evidence, EvidenceKind, Next, Operation, Plan, applied, decode_record};
use crate::request::{CreateGroup, GroupCounts, Response, Start, Submit};
use crate::store::{Answer, Clock, Expiry, Guard, Read, Record, ScoreAt, Snapshot, Version, Write, keys};

#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct Create {
    asked: Box<CreateGroup>,
    /// While the key is looked up.
    lookup: Option<Lookup>,
    made: Option<(GroupId, Group)>,
    over: Option<TakeOver>,
    /// A child's cost is more than any pool has, unless the group has been created before.
    no_room: Option<Failure>,
}

/// What is compared when a key is used again: the fields with defaults, and the children.
#[derive(serde::Serialize)]
struct Fingerprint<'a> {
    queue: &'a str,
    class: Class,
    mode: Mode,
    max_parallel: Option<u64>,
    sealed: bool,
    open_timeout_ms: Option<u64>,
    /// With the defaults of the contract, not those of this server, which may change.
    policy: Policy,
    children: Vec<ChildFingerprint<'a>>,
}

#[derive(PartialEq, Eq, serde::Serialize)]
struct ChildFingerprint<'a> {
    policy: Policy,
    form: &'a Form,
    payload: u128,
    metadata: Option<u128>,
}

fn child_fingerprint<'a>(child: &'a Submit, base: &Policy) -> ChildFingerprint<'a> {
    ChildFingerprint {
        policy: submit::said(submit::policy(child, base)),
        form: &child.payload.form,
        payload: child.payload.data.hash,
        metadata: child.metadata.as_ref().map(|m| m.hash),
    }
}

/// What can be said of children without the store.
fn validate(children: &[Submit]) -> Result<(), Failure> {
    if children.len() > limits::CHILDREN {
        let (n, most) = (children.len(), limits::CHILDREN);
        let detail = format!("{n} children, at most {most} in one call: create the group unsealed and add pages");
        return Err(check::invalid("children", detail));
    }
    for child in children {
        if child.key.is_some() {
            return Err(check::invalid("idempotency_key", "a child has none: its place in the group names it".into()));
        }
        if child.start != Start::Now {
            return Err(check::invalid("delay_ms", "a child cannot be delayed: the group releases it".into()));
        }
        submit::validate(child)?;
    }
    Ok(())
}

/// What children ask of pools: the dearest of those that may go anywhere, and of those that stay on the premises.
/// `base`: whether all of them stay there, and what each costs that does not say so itself.
fn rooms(routing: &Routing, at: (&str, &str), class: Class, base: (bool, u32), children: &[Submit]) -> Vec<Room> {
    let keeps = base.0 || routing.keeps(at.0);
    let dearest = |on_prem: bool| {
        let costs = children.iter().filter(|c| (keeps || c.on_prem) == on_prem).map(|c| c.cost);
        costs.map(|cost| if cost == 1 { base.1 } else { cost }).max()
    };
    let rooms = [false, true].map(|on_prem| Room::of(routing, at, class, on_prem, dearest(on_prem)?));
    rooms.into_iter().flatten().collect()
}

impl Create {
    pub fn new(asked: Box<CreateGroup>) -> Result<Create, Failure> {
        submit::validate(&asked.common)?;
        if asked.common.start != Start::Now {
            return Err(check::invalid("delay_ms", "a group cannot be delayed".into()));
        }
        validate(&asked.children)?;
        check::within("max_parallel", asked.max_parallel, 1, limits::CHILDREN_MAX.into())?;
        check::within("open_timeout_ms", asked.open_timeout_ms, 1, limits::DURATION_MS_MAX)?;
        Ok(Create { asked, lookup: None, made: None, over: None, no_room: None })
    }

    fn fingerprint(&self) -> u128 {
        let a = &self.asked;
        let policy = submit::policy(&a.common, &Policy::standard(limits::RETENTION_MS));
        let parts = Fingerprint {
            queue: &a.common.queue,
            class: a.common.class,
            mode: a.mode,
            max_parallel: a.max_parallel,
            sealed: a.sealed,
            open_timeout_ms: a.open_timeout_ms.or((!a.sealed).then_some(limits::OPEN_TIMEOUT_MS)),
            children: a.children.iter().map(|c| child_fingerprint(c, &policy)).collect(),
            policy: submit::said(policy),
        };
        opaque::hash(&codec::encode(&parts))
    }

    /// Whether each child can be run by one of the queue's routes.
    fn can_place(&self, routing: &Routing) -> bool {
        let common = &self.asked.common;
        let on_prem = common.on_prem || routing.keeps(&common.tenant) || self.asked.children.iter().any(|c| c.on_prem);
        routing.can_place(&common.tenant, &common.queue, on_prem)
    }

    fn rooms(&self, routing: &Routing) -> Vec<Room> {
        let common = &self.asked.common;
        let base = (common.on_prem, common.cost);
        rooms(routing, (&common.tenant, &common.queue), common.class, base, &self.asked.children)
    }

    fn look_up(&mut self) -> Next {
        let Some(key) = &self.asked.common.key else { return Next::Read(Read::default()) };
        let lookup = Lookup::new(keys::key(&self.asked.common.tenant, key), self.fingerprint());
        let read = lookup.start();
        self.lookup = Some(lookup);
        Next::Read(read)
    }

    fn commit(&mut self, cx: &mut Cx<'_>) -> Next {
        let own = cx.make.version();
        let id = cx.make.group_id(cx.clock);
        let a = &self.asked;
        let common = &a.common;
        let mut policy = submit::policy(common, &Policy::standard(cx.config.retention_ms));
        policy.on_prem |= cx.config.routing.keeps(&common.tenant);
        let open_ms = a.open_timeout_ms.unwrap_or(limits::OPEN_TIMEOUT_MS).saturating_mul(limits::MILLI);
        let group = Group {
            tenant: common.tenant.clone(),
            queue: common.queue.clone(),
            class: common.class,
            mode: a.mode,
            max_parallel: a.max_parallel.map(|n| n.min(limits::CHILDREN_MAX.into()) as u32),
            policy,
            traceparent: common.traceparent.clone(),
            key: common.key.clone().map(|key| (key, own)),
            created: cx.clock,
            open_until: (!a.sealed).then(|| cx.clock.saturating_add(open_ms)),
            filled: a.children.len() as u32,
            sealed: a.sealed,
            stopped: None,
            end: None,
            trail: Trail::default(),
        };
        let mut guards = vec![Guard::Absent(keys::group(id))];
        let mut writes = vec![put(keys::group(id), own, codec::encode(&group), Expiry::Never)];
        if let Some(key) = &common.key {
            let name = keys::key(&common.tenant, key);
            match &self.over {
                None => guards.push(Guard::Absent(name.clone())),
                Some(over) => guards.extend(over.guards(name.clone())),
            }
            let record = KeyRecord { owner: Owner::Group(id), fingerprint: self.fingerprint() };
            writes.push(put(name, own, codec::encode(&record), Expiry::Never));
        }
        for (index, child) in (0..).zip(&a.children) {
            writes.extend(born(id, &group, index, child, own, cx.clock));
        }
        if !a.sealed {
            writes.push(add(keys::GROUPS_OPEN, &keys::group_member(id), ScoreAt::Clock(open_ms)));
        }
        writes.push(submit::known(&group.tenant, &group.queue));
        writes.push(group_event(Kind::GroupCreated, id, Home::from(&group), Some((0, group.filled)), None));
        writes.extend(moves::mark(id, own));
        self.made = Some((id, group));
        let evidence = Evidence { key: keys::group(id), own, found: None, kind: EvidenceKind::Group };
        Next::Commit(Plan { txns: vec![Draft::new(guards, writes)], grows: true, evidence: Some(evidence) })
    }
}

impl<'a> From<&'a Group> for Home<'a> {
    fn from(group: &'a Group) -> Self {
        Home { tenant: &group.tenant, queue: &group.queue, class: group.class }
    }
}

/// The writes that create one child: a job that is held.
fn born(id: GroupId, group: &Group, index: u32, asked: &Submit, own: Version, clock: Clock) -> Vec<Write> {
    let policy = submit::policy(asked, &group.policy);
    let child = id.child(index);
    let member = keys::member(child);
    let ttl = policy.queue_ttl_ms;
    let job = Job {
        tenant: group.tenant.clone(),
        queue: group.queue.clone(),
        class: group.class,
        policy,
        key: None,
        born: clock,
        submitted: clock,
        due: clock,
        attempts: 0,
        deliveries: 0,
        lives: 0,
        end: None,
        deleted: false,
        payload_len: asked.payload.data.len() as u64,
        metadata: asked.metadata.as_ref().map(|m| m.bytes.to_vec()),
        traceparent: asked.traceparent.clone().or_else(|| group.traceparent.clone()),
        trail: Trail::default(),
    };
    let mut writes = Vec::with_capacity(5);
    writes.push(put(keys::job(child), own, codec::encode(&job), Expiry::Never));
    writes.push(put(keys::payload(child), own, encode_content(&asked.payload), Expiry::Never));
    writes.push(add(Home::from(group).index(Status::Held), &member, ScoreAt::Clock(0)));
    writes.push(add(keys::held(id), &member, ScoreAt::Number(index.into())));
    if let Some(ttl) = ttl {
        writes.push(add(keys::TTL, &member, ScoreAt::Clock(ttl.saturating_mul(limits::MILLI))));
    }
    writes
}

impl Operation for Create {
    fn start(&mut self, cx: &mut Cx<'_>) -> Next {
        self.over = None;
        self.lookup = None;
        if !self.can_place(&cx.config.routing) {
            return Next::fail(Failure::NoPlacement);
        }
        let records: Vec<_> = self.rooms(&cx.config.routing).iter().flat_map(Room::records).collect();
        if !cx.fresh || !records.is_empty() {
            return Next::Read(Read { records, ..Read::default() });
        }
        self.commit(cx)
    }

    fn read(&mut self, snapshot: Snapshot, cx: &mut Cx<'_>) -> Next {
        let Some(lookup) = &mut self.lookup else {
            self.no_room = room::lacking(&self.rooms(&cx.config.routing), snapshot.records);
            return match (self.no_room.clone(), &self.asked.common.key) {
                (None, _) => self.commit(cx),
                (Some(failure), None) => Next::fail(failure),
                (Some(_), Some(_)) => self.look_up(),
            };
        };
        match lookup.read(&snapshot, cx) {
            Found::Read(read) => Next::Read(read),
            Found::Existing(Owner::Group(group)) => {
                Next::Become(Op::Group(Box::new(Look::existing(self.asked.common.tenant.clone(), group))))
            }
            // Another kind of body than a group's.
            Found::Existing(Owner::Job(_)) => Next::fail(Failure::KeyReused),
            Found::Free(over) => match (self.no_room.take(), over) {
                (Some(failure), _) => Next::fail(failure),
                (None, None) => self.start(cx),
                (None, over) => {
                    self.over = over;
                    self.commit(cx)
                }
            },
            Found::Failed(failure) => Next::fail(failure),
        }
    }

    fn answered(&mut self, clock: Clock, answers: Vec<Answer>, cx: &mut Cx<'_>) -> Next {
        if applied(&answers) {
            return self.settled(clock, cx);
        }
        match (&self.asked.common.key, answers.first()) {
            (Some(_), Some(Answer::Refused(_))) => self.look_up(),
            _ => self.start(cx),
        }
    }

    fn settled(&mut self, _: Clock, cx: &mut Cx<'_>) -> Next {
        let Some((id, group)) = self.made.take() else { return Next::fail(Failure::Contended { retry_after_ms: 1 }) };
        cx.stats.groups += 1;
        let counts = GroupCounts { held: group.filled.into(), ..GroupCounts::default() };
        Next::ok(Response::GroupCreated(Box::new(view(id, &group, counts))))
    }
}

/// More children for an open group. A page that is there already is compared and changes nothing.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct Extend {
    tenant: String,
    id: GroupId,
    from: u32,
    children: Vec<Submit>,
    /// The page exists: from which of its children on they are still to be compared.
    compared: Option<usize>,
    /// Whether the pools have been read that the children need.
    roomed: bool,
}

impl Extend {
    pub fn new(tenant: String, id: GroupId, from: u32, children: Vec<Submit>) -> Result<Extend, Failure> {
        if children.is_empty() {
            return Err(check::invalid("children", "must not be empty".into()));
        }
        validate(&children)?;
        let last = u64::from(from) + children.len() as u64;
        check::within("from", Some(last), 0, limits::CHILDREN_MAX.into())
            .map_err(|_| check::invalid("from", format!("a group has at most {} children", limits::CHILDREN_MAX)))?;
        Ok(Extend { tenant, id, from, children, compared: None, roomed: false })
    }

    fn to(&self) -> u32 {
        self.from.saturating_add(self.children.len() as u32)
    }

    /// The next of the children that are there already, with the group.
    fn compare(&self, from: usize) -> Next {
        let mut records = vec![keys::group(self.id)];
        for index in (self.from..self.to()).skip(from) {
            let child = self.id.child(index);
            records.extend([keys::job(child), keys::payload(child)]);
        }
        Next::Read(Read { records, ..Read::default() })
    }

    /// Compares what was read; children that did not fit into the answer are read next.
    fn compared(&mut self, from: usize, group: &Group, records: &[Record]) -> Next {
        let mut done = from;
        for (asked, pair) in self.children.iter().skip(from).zip(records.chunks(2)) {
            let [main, payload] = pair else { break };
            let index = self.from + done as u32;
            if main.is_unread() || payload.is_unread() {
                break;
            }
            let Ok(job) = decode_record::<Job>(main) else { return Next::fail(Failure::Quarantined) };
            // One that is gone was created, and has been deleted or lost since: it is not created again.
            if let Some((_, job)) = job {
                let content = payload.bytes().and_then(|b| decode_content(b).ok());
                let same = submit::said(job.policy.clone()) == submit::said(submit::policy(asked, &group.policy))
                    && job.payload_len == asked.payload.data.len() as u64
                    && (job.deleted || job.metadata.as_deref() == asked.metadata.as_ref().map(|m| &*m.bytes))
                    && content.is_none_or(|c| c.form == asked.payload.form && c.data.bytes == asked.payload.data.bytes);
                if !same {
                    return Next::fail(Failure::ChildDiffers { index });
                }
            }
            done += 1;
        }
        if done < self.children.len() && done > from {
            self.compared = Some(done);
            return self.compare(done);
        }
        Next::Become(Op::Group(Box::new(Look::state(self.tenant.clone(), self.id, 0))))
    }
}

impl Operation for Extend {
    fn start(&mut self, _: &mut Cx<'_>) -> Next {
        self.compared = None;
        self.roomed = false;
        Next::Read(Read { records: vec![keys::group(self.id)], ..Read::default() })
    }

    fn read(&mut self, snapshot: Snapshot, cx: &mut Cx<'_>) -> Next {
        let Some((first, rest)) = snapshot.records.split_first() else { return Next::fail(Failure::UnknownGroup) };
        let (version, group) = match of(first, &self.tenant) {
            Ok(found) => found,
            Err(failure) => return Next::fail(failure),
        };
        if let Some(from) = self.compared {
            return self.compared(from, &group, rest);
        }
        if self.to() <= group.filled {
            self.compared = Some(0);
            return self.compare(0);
        }
        if self.from != group.filled {
            return Next::fail(Failure::WrongOffset { expected: group.filled });
        }
        if group.sealed || group.stopped.is_some() || group.end.is_some() {
            return Next::fail(Failure::NotOpen);
        }
        let on_prem = group.policy.on_prem || self.children.iter().any(|c| c.on_prem);
        if !cx.config.routing.can_place(&group.tenant, &group.queue, on_prem) {
            return Next::fail(Failure::NoPlacement);
        }
        let base = (group.policy.on_prem, group.policy.cost);
        let rooms = rooms(&cx.config.routing, (&group.tenant, &group.queue), group.class, base, &self.children);
        if !rooms.is_empty() && !core::mem::replace(&mut self.roomed, true) {
            let mut records = vec![keys::group(self.id)];
            records.extend(rooms.iter().flat_map(Room::records));
            return Next::Read(Read { records, ..Read::default() });
        }
        if let Some(failure) = room::lacking(&rooms, rest.iter().cloned()) {
            return Next::fail(failure);
        }
        let own = cx.make.version();
        let mut next = group.after(version);
        next.filled = self.to();
        let mut writes = vec![put(keys::group(self.id), own, codec::encode(&next), Expiry::Never)];
        for (index, child) in (self.from..).zip(&self.children) {
            writes.extend(born(self.id, &group, index, child, own, snapshot.clock));
        }
        writes.push(submit::known(&group.tenant, &group.queue));
        let range = Some((self.from, self.to()));
        writes.push(group_event(Kind::GroupExtended, self.id, Home::from(&group), range, None));
        writes.extend(moves::mark(self.id, own));
        let draft = Draft::new(vec![Guard::At(keys::group(self.id), version)], writes);
        let evidence = Evidence { key: keys::group(self.id), own, found: Some(version), kind: EvidenceKind::Group };
        Next::Commit(Plan { txns: vec![draft], grows: true, evidence: Some(evidence) })
    }

    fn answered(&mut self, clock: Clock, answers: Vec<Answer>, cx: &mut Cx<'_>) -> Next {
        if applied(&answers) { self.settled(clock, cx) } else { self.start(cx) }
    }

    fn settled(&mut self, _: Clock, _: &mut Cx<'_>) -> Next {
        Next::Become(Op::Group(Box::new(Look::state(self.tenant.clone(), self.id, 0))))
    }
}
