//! Looking at one job: its state, payload, result, and why it does not run.

use alloc::boxed::Box;
use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;

use super::moves::Home;
use super::record::{Class, History, Job, Lease, ProgressRecord, Status, decode_content};
use super::view::{progress, view, with_history, with_lease};
use crate::dispatch::room;
use crate::failure::Failure;
use crate::ids::JobId;
use crate::limits;
use crate::replica::task::{Cx, Next, Operation, QueueInfo, decode_record};
use crate::request::{JobView, Response, Why};
use crate::store::{Answer, Clock, Place, Read, Record, Slice, Snapshot, Span, UpTo, keys};

#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct Look {
    tenant: String,
    id: JobId,
    what: What,
    /// The job as read first, so that the second read knows the names of its indexes.
    found: Option<Job>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
enum What {
    State,
    Existing,
    Payload,
    Result,
    Why,
}

impl Look {
    fn new(tenant: String, id: JobId, what: What) -> Look {
        Look { tenant, id, what, found: None }
    }
    pub fn state(tenant: String, id: JobId) -> Look {
        Look::new(tenant, id, What::State)
    }
    /// The job that an idempotency key named already.
    pub fn existing(tenant: String, id: JobId) -> Look {
        Look::new(tenant, id, What::Existing)
    }
    pub fn payload(tenant: String, id: JobId) -> Look {
        Look::new(tenant, id, What::Payload)
    }
    pub fn result(tenant: String, id: JobId) -> Look {
        Look::new(tenant, id, What::Result)
    }
    pub fn why(tenant: String, id: JobId) -> Look {
        Look::new(tenant, id, What::Why)
    }

    fn first(&self) -> Read {
        let id = self.id;
        let records = match self.what {
            What::Payload => vec![keys::job(id), keys::payload(id)],
            What::Result => vec![keys::job(id), keys::result(id)],
            What::State | What::Existing | What::Why => {
                vec![keys::job(id), keys::lease(id), keys::progress(id), keys::history(id)]
            }
        };
        self.with_group(Read { records, ..Read::default() })
    }

    /// A child is there as long as its group: the group's record comes last.
    fn with_group(&self, mut read: Read) -> Read {
        read.records.extend(self.id.child_of().map(|(group, _)| keys::group(group)));
        read
    }

    /// The same again with where the job stands.
    fn second(&self, job: &Job, cx: &Cx<'_>) -> Read {
        let member = keys::member(self.id);
        let home = Home::from(job);
        let mut read = self.first();
        read.members = Status::LIVE.into_iter().map(|s| (home.index(s), member.clone())).collect();
        read.members.push((keys::LEASES, member));
        for class in Class::ALL.into_iter().filter(|c| *c < job.class) {
            read.counts.push((Home { class, ..home }.index(Status::Queued), Span::All));
        }
        if self.what == What::Why {
            read.records.insert(4, keys::queue(&job.tenant, &job.queue));
            let group = read.records.split_off(5);
            room::ask(&mut read, job, &cx.config.routing);
            read.records.extend(group);
        }
        read
    }

    /// A content that did not fit in the answer is asked for with room for the largest.
    fn reread(&self, content: crate::name::Name) -> Next {
        Next::Read(self.with_group(Read {
            records: vec![keys::job(self.id), content],
            max_bytes: limits::PAYLOAD_BYTES + limits::READ_BYTES,
            ..Read::default()
        }))
    }

    fn answer(&self, view: JobView) -> Next {
        Next::ok(match self.what {
            What::Existing => Response::Existing(Box::new(view)),
            _ => Response::Job(Box::new(view)),
        })
    }
}

/// The job behind a record, if it is this tenant's.
pub(crate) fn job_of(record: &Record, tenant: &str) -> Result<(crate::store::Version, Job), Failure> {
    match decode_record::<Job>(record) {
        Ok(Some((version, job))) if job.tenant == tenant && !job.deleted => Ok((version, job)),
        Ok(_) => Err(Failure::UnknownJob),
        Err(_) => Err(Failure::Quarantined),
    }
}

/// The status of a job that stands in no index, from what its records say.
pub(crate) fn derived(job: &Job, leased: bool, clock: Clock) -> Status {
    if leased {
        Status::Running
    } else if job.due <= clock {
        Status::Queued
    } else if job.deliveries == 0 {
        Status::Scheduled
    } else {
        Status::Retrying
    }
}

impl Operation for Look {
    fn start(&mut self, _: &mut Cx<'_>) -> Next {
        self.found = None;
        Next::Read(self.first())
    }

    fn read(&mut self, snapshot: Snapshot, cx: &mut Cx<'_>) -> Next {
        let Some(main) = snapshot.records.first() else { return Next::fail(Failure::UnknownJob) };
        if self.id.child_of().is_some() && snapshot.records.last().is_none_or(Record::is_absent) {
            return Next::fail(Failure::UnknownJob);
        }
        let job = match job_of(main, &self.tenant) {
            Ok((_, job)) => job,
            // Deleted since the key was looked at: the submit is to be sent again.
            Err(Failure::UnknownJob) if self.what == What::Existing => {
                return Next::fail(Failure::Contended { retry_after_ms: 100 });
            }
            Err(failure) => return Next::fail(failure),
        };
        let second = snapshot.records.get(1).unwrap_or(&Record::Absent);
        match self.what {
            What::Payload | What::Result => return content(self, &job, second),
            What::State | What::Existing | What::Why => {}
        }
        let history: Option<History> =
            snapshot.records.get(3).and_then(|r| decode_record(r).ok().flatten()).map(|(_, h)| h);
        if let Some(end) = &job.end {
            if self.what == What::Why {
                return Next::ok(Response::Why(Why::Ended { status: end.status }));
            }
            return self.answer(with_history(view(self.id, &job, end.status), history));
        }
        if self.found.is_none() {
            let read = self.second(&job, cx);
            self.found = Some(job);
            return Next::Read(read);
        }
        let lease: Option<(Lease, Clock)> =
            decode_record::<Lease>(second).ok().flatten().and_then(|(_, lease)| second.at().map(|at| (lease, at)));
        let places: Vec<Option<Place>> = snapshot.members;
        let stands = Status::LIVE.into_iter().zip(&places).find_map(|(s, p)| p.map(|p| (s, p)));
        let (status, place) = match stands {
            Some((status, place)) => (status, Some(place)),
            None => {
                cx.repairs.insert(self.id);
                (derived(&job, lease.is_some(), snapshot.clock), None)
            }
        };
        let lease_end = places.get(Status::LIVE.len()).copied().flatten().map(|p| p.score);
        let above = Class::ALL.into_iter().filter(|c| *c < job.class).count();
        let ahead = place.map(|p| p.rank + snapshot.counts.iter().take(above).sum::<u64>());
        if self.what == What::Why {
            let queue = snapshot.records.get(4).and_then(|r| QueueInfo::decode(r).ok()).unwrap_or_default();
            let run_at = place.map_or(job.due, |p| p.score);
            let upstreams = snapshot.records.get(5..).unwrap_or_default();
            let sizes = snapshot.counts.get(above..).unwrap_or_default();
            let why = match why(status, &job, run_at, lease, lease_end, ahead, queue) {
                Why::NoWorker => {
                    let way = room::stands_in_the_way(&job, &cx.config.routing, upstreams, sizes, snapshot.clock);
                    way.unwrap_or(Why::NoWorker)
                }
                why => why,
            };
            return Next::ok(Response::Why(why));
        }
        let mut view = with_history(view(self.id, &job, status), history);
        match status {
            Status::Running => view = with_lease(view, lease, lease_end),
            Status::Queued => view.position = ahead.map(|n| n + 1),
            Status::Scheduled | Status::Retrying => view.run_at = place.map_or(job.due, |p| p.score),
            Status::Held | Status::Succeeded | Status::Dead | Status::Cancelled | Status::Expired => {}
        }
        let reported = snapshot.records.get(2).unwrap_or(&Record::Absent);
        if let (Ok(Some((_, record))), Some(at)) = (decode_record::<ProgressRecord>(reported), reported.at())
            && !record.value.is_empty()
        {
            view.progress = Some(progress(record, at));
        }
        self.answer(view)
    }

    fn answered(&mut self, _: Clock, _: Vec<Answer>, cx: &mut Cx<'_>) -> Next {
        self.start(cx)
    }
}

fn content(look: &Look, job: &Job, record: &Record) -> Next {
    let missing = match look.what {
        What::Result => match job.end.as_ref().map(|e| e.status) {
            Some(Status::Succeeded) => {
                return match record.bytes().map(decode_content) {
                    Some(Ok(content)) => Next::ok(Response::Content(content)),
                    Some(Err(_)) => Next::fail(Failure::Quarantined),
                    // Given, and its retention has ended.
                    None if record.is_absent() && job.end.as_ref().is_some_and(|e| e.result_len.is_some()) => {
                        Next::fail(Failure::NoResult)
                    }
                    None if record.is_absent() => Next::ok(Response::NoContent),
                    None => look.reread(keys::result(look.id)),
                };
            }
            _ => Failure::NoResult,
        },
        _ => Failure::NoPayload,
    };
    match record.bytes().map(decode_content) {
        Some(Ok(content)) if look.what == What::Payload => Next::ok(Response::Content(content)),
        Some(Err(_)) => Next::fail(Failure::Quarantined),
        None if record.is_unread() => look.reread(keys::payload(look.id)),
        _ => Next::fail(missing),
    }
}

fn why(
    status: Status,
    job: &Job,
    run_at: Clock,
    lease: Option<(Lease, Clock)>,
    lease_end: Option<Clock>,
    ahead: Option<u64>,
    queue: QueueInfo,
) -> Why {
    match status {
        Status::Scheduled => Why::Scheduled { run_at },
        Status::Retrying => Why::Retrying { run_at, attempt: job.attempts.saturating_add(1) },
        Status::Held => Why::Held,
        Status::Running => {
            let (worker, granted) = lease.map(|(l, at)| (l.worker, at)).unwrap_or_default();
            Why::Running { worker, expires_at: lease_end.unwrap_or(granted) }
        }
        Status::Queued if queue.record.paused => Why::Paused { reason: queue.record.reason },
        Status::Queued => match ahead {
            Some(ahead) if ahead > 0 => Why::Behind { ahead },
            _ => Why::NoWorker,
        },
        Status::Succeeded | Status::Dead | Status::Cancelled | Status::Expired => Why::Ended { status },
    }
}

/// A slice of everything that stands first in an index.
pub(crate) fn head(index: crate::name::Name) -> Slice {
    Slice { index, after: None, up_to: UpTo::End, limit: 1, give: Vec::new() }
}
