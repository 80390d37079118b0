//! What an owner or operator does to one job: cancel, retry, delete.

use alloc::boxed::Box;
use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;

use super::lease::{self, Granted};
use super::look::job_of;
use super::moves::{self, Ending, Home, add, as_read, put, put_job, remove};
use super::record::{AttemptEnd, ChildOutcome, History, Job, Status};
use super::view::{view, with_history};
use crate::codec;
use crate::event::Kind;
use crate::failure::Failure;
use crate::group::record::Group;
use crate::ids::JobId;
use crate::limits;
use crate::replica::task::{Cx, Draft, Evidence, EvidenceKind, Next, Operation, Plan, applied, decode_record};
use crate::request::{JobView, Response};
use crate::store::{Answer, Clock, Expiry, Guard, Read, Record, ScoreAt, Snapshot, Version, Write, keys};

#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct Operate {
    tenant: String,
    id: JobId,
    what: What,
    decided: Option<Response>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) enum What {
    Cancel,
    Retry,
    Delete,
}

impl Operate {
    pub fn new(tenant: String, id: JobId, what: What) -> Operate {
        Operate { tenant, id, what, decided: None }
    }

    fn view(&self, job: &Job, status: Status, history: Option<History>) -> Box<JobView> {
        Box::new(with_history(view(self.id, job, status), history))
    }
}

/// The transactions that cancel a live job, and the version they put.
pub(crate) fn cancel(
    id: JobId,
    job: &Job,
    version: Version,
    lease_record: &Record,
    clock: Clock,
    cx: &mut Cx<'_>,
) -> (Vec<Draft>, Version, Ending) {
    let home = Home::from(job);
    let own = cx.make.version();
    // Read as absent or as this very lease: a claim or lapse in between is met by the guard.
    let guards = vec![as_read(keys::lease(id), lease_record)];
    let granted = Granted::read(lease_record);
    let running = !lease_record.is_absent();
    let (leave, attempt) = if running {
        // limit-held: the call goes on until its server has heard of this.
        let mut leave = moves::leave_running(id, home, None);
        let placed = granted.as_ref().and_then(|g| Some((g.lease.placed()?, g.version)));
        leave.extend(placed.into_iter().flat_map(|(placed, nonce)| moves::end_probe(id, placed, nonce)));
        leave.push(Write::Notify(keys::topic_stop(id)));
        (leave, Some(lease::attempt(job, granted.as_ref(), AttemptEnd::Cancelled, clock, None)))
    } else {
        (moves::leave_waiting(id, home), None)
    };
    let ending = Ending {
        status: Status::Cancelled,
        reason: None,
        result_len: None,
        attempt,
        attempts: job.attempts,
        deliveries: job.deliveries.saturating_add(u32::from(running)),
    };
    let drafts = moves::end(id, job, version, own, clock, &ending, guards, leave, cx);
    (drafts, own, ending)
}

/// The transactions that delete an ended job: a stub stays for as long as anything that was stuck on
/// the way could still be applied.
pub(crate) fn delete(id: JobId, job: &Job, version: Version, status: Status, cx: &mut Cx<'_>) -> (Vec<Draft>, Version) {
    let home = Home::from(job);
    let own = cx.make.version();
    let mut stub = job.clone();
    stub.deleted = true;
    stub.metadata = None;
    stub.trail = job.trail.after(version);
    let writes = vec![
        put(keys::job(id), own, codec::encode(&stub), Expiry::Clock(limits::STUB)),
        Write::Delete(keys::payload(id)),
        Write::Delete(keys::result(id)),
        Write::Delete(keys::history(id)),
        remove(home.index(status), &keys::member(id)),
        home.event(Kind::Deleted, id, None, None),
    ];
    let plain = Draft::new(vec![Guard::At(keys::job(id), version)], writes);
    let drafts = match &job.key {
        None => vec![plain],
        Some((key, key_version)) => {
            let key = keys::key(&job.tenant, key);
            let mut with_key = plain.clone();
            with_key.guards.push(Guard::At(key.clone(), *key_version));
            with_key.writes.push(Write::Delete(key));
            vec![with_key, plain]
        }
    };
    (drafts, own)
}

impl Operate {
    #[expect(clippy::too_many_arguments)]
    /// The transaction that begins a new life, its version, and the job as it is then.
    fn retry(
        &self,
        job: &Job,
        version: Version,
        mut history: History,
        payload: &Record,
        group: Option<(Version, Group)>,
        clock: Clock,
        cx: &mut Cx<'_>,
    ) -> (Draft, Version, Job, History) {
        let own = cx.make.version();
        let id = self.id;
        let member = keys::member(id);
        let home = Home::from(job);
        let mut next = job.clone();
        next.born = clock;
        next.due = clock;
        next.attempts = 0;
        next.deliveries = 0;
        next.lives = job.lives.saturating_add(1);
        next.end = None;
        next.key = None;
        next.trail = job.trail.after(version);
        let end = job.end.as_ref();
        let status = end.map_or(Status::Dead, |e| e.status);
        // Whoever ended the old life may still repeat that call, and is to get its first answer.
        history.attempts.retain(|a| end.and_then(|e| e.attempt.as_ref()).is_none_or(|l| l.token != a.token));
        if let Some(last) = end.and_then(|e| e.attempt.clone()) {
            history.push(last);
        }
        let mut writes = vec![
            put_job(id, &next, own),
            Write::Expire(keys::payload(id), Expiry::Never),
            put(keys::history(id), own, codec::encode(&history), Expiry::Never),
            Write::Delete(keys::result(id)),
            remove(home.index(status), &member),
            super::submit::known(&job.tenant, &job.queue),
            home.event(Kind::Retried, id, None, None),
        ];
        if let Some(ttl) = job.policy.queue_ttl_ms {
            writes.push(add(keys::TTL, &member, ScoreAt::Clock(ttl.saturating_mul(limits::MILLI))));
        }
        let mut guards = vec![Guard::At(keys::job(id), version), as_read(keys::payload(id), payload)];
        match (id.child_of(), group) {
            (Some((parent, index)), Some((group_version, group))) => {
                // finalized-once: with the group's version whoever counted its ended children before is
                // refused. The child is held again, and released in its turn.
                guards.push(Guard::At(keys::group(parent), group_version));
                writes.push(put(keys::group(parent), own, codec::encode(&group.after(group_version)), Expiry::Never));
                writes.extend(ChildOutcome::of(status).map(|old| remove(keys::done(parent, old), &member)));
                writes.push(add(home.index(Status::Held), &member, ScoreAt::Clock(0)));
                writes.push(add(keys::held(parent), &member, ScoreAt::Number(index.into())));
                writes.extend(moves::mark(parent, own));
            }
            _ => {
                writes.push(add(home.index(Status::Queued), &member, ScoreAt::Clock(0)));
                writes.push(Write::Notify(home.topic()));
            }
        }
        (Draft::new(guards, writes), own, next, history)
    }
}

impl Operation for Operate {
    fn start(&mut self, _: &mut Cx<'_>) -> Next {
        self.decided = None;
        let id = self.id;
        let mut records = vec![keys::job(id), keys::lease(id), keys::history(id)];
        if self.what == What::Retry {
            records.extend(id.child_of().map(|(group, _)| keys::group(group)));
            records.push(keys::payload(id));
            // The payload is last and need not be read: that it is there is enough.
            return Next::Read(Read { records, max_bytes: 256 * 1024, ..Read::default() });
        }
        Next::Read(Read { records, ..Read::default() })
    }

    fn read(&mut self, snapshot: Snapshot, cx: &mut Cx<'_>) -> Next {
        let mut records = snapshot.records.iter();
        let mut next = || records.next().unwrap_or(&Record::Absent);
        let (main, lease, history) = (next(), next(), next());
        let parent = (self.what == What::Retry && self.id.child_of().is_some()).then(&mut next);
        let payload = next();
        let (version, job) = match job_of(main, &self.tenant) {
            Ok(found) => found,
            Err(failure) => return Next::fail(failure),
        };
        let history: Option<History> = decode_record(history).ok().flatten().map(|(_, h)| h);
        let clock = snapshot.clock;
        let ended = job.end.as_ref().map(|e| e.status);
        let (txns, own, decided) = match (self.what, ended) {
            (What::Cancel, None) => {
                let (drafts, own, ending) = cancel(self.id, &job, version, lease, clock, cx);
                let mut after = job.clone();
                after.attempts = ending.attempts;
                after.deliveries = ending.deliveries;
                after.end = Some(super::record::End {
                    status: ending.status,
                    at: clock,
                    reason: ending.reason,
                    result_len: None,
                    attempt: ending.attempt,
                });
                (drafts, own, Response::Job(self.view(&after, Status::Cancelled, history)))
            }
            (What::Cancel, Some(Status::Cancelled)) => {
                return Next::ok(Response::Job(self.view(&job, Status::Cancelled, history)));
            }
            (What::Cancel, Some(_)) => return Next::fail(Failure::AlreadyTerminal),
            (What::Retry, Some(Status::Dead | Status::Cancelled | Status::Expired)) if !payload.is_absent() => {
                let before = history.unwrap_or_default();
                let group = match parent.map(decode_record::<Group>) {
                    None => None,
                    Some(Ok(Some((v, group)))) if group.end.is_none() && group.stopped.is_none() => Some((v, group)),
                    // A group that is final, or is being stopped, takes nobody back.
                    Some(_) => return Next::fail(Failure::NotRetryable),
                };
                let status = if group.is_some() { Status::Held } else { Status::Queued };
                let (draft, own, after, history) = self.retry(&job, version, before, payload, group, clock, cx);
                (vec![draft], own, Response::Job(self.view(&after, status, Some(history))))
            }
            (What::Retry, _) => return Next::fail(Failure::NotRetryable),
            (What::Delete, Some(status)) => {
                let (drafts, own) = delete(self.id, &job, version, status, cx);
                (drafts, own, Response::Deleted)
            }
            (What::Delete, None) => return Next::fail(Failure::NotTerminal),
        };
        self.decided = Some(decided);
        // A retry keeps a payload and so fills a store no further.
        let evidence = Evidence { key: keys::job(self.id), own, found: Some(version), kind: EvidenceKind::Job };
        Next::Commit(Plan { txns, grows: false, evidence: Some(evidence) })
    }

    fn answered(&mut self, clock: Clock, answers: Vec<Answer>, cx: &mut Cx<'_>) -> Next {
        if applied(&answers) { self.settled(clock, cx) } else { self.start(cx) }
    }

    fn settled(&mut self, _: Clock, cx: &mut Cx<'_>) -> Next {
        match self.what {
            What::Cancel => cx.stats.cancelled += 1,
            What::Retry => cx.stats.retried += 1,
            What::Delete => {}
        }
        match self.decided.take() {
            Some(response) => Next::ok(response),
            None => Next::fail(Failure::OutcomeUnknown { retry_after_ms: 1_000 }),
        }
    }
}
