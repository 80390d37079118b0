//! Queues: depth, pause, settings, purge. A queue exists while there is anything in it, while it is
//! paused, and while it has settings of its own.

use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;

use super::check;
use super::list::Names;
use super::look::head;
use super::moves::{Home, put};
use super::operate;
use super::record::{Class, Job, QueueRecord, Status};
use super::submit::known;
use crate::codec;
use crate::failure::Failure;
use crate::limits;
use crate::replica::task::{
    Cx, Draft, Evidence, EvidenceKind, Next, Operation, Plan, QueueInfo, applied, decode_record,
};
use crate::request::{QueueView, Response};
use crate::store::{Answer, Clock, Expiry, Read, Record, Slice, Snapshot, Span, UpTo, Write, keys};

/// Reads what a queue's view is made of.
fn view_read(tenant: &str, queues: &[String]) -> Read {
    let mut read = Read::default();
    for queue in queues {
        read.records.push(keys::queue(tenant, queue));
        for class in Class::ALL {
            let home = Home { tenant, queue, class };
            for status in Status::ALL {
                read.counts.push((home.index(status), Span::All));
            }
            read.slices.push(head(home.index(Status::Queued)));
        }
        read.members.push((keys::NAMES, keys::queue_member(tenant, queue)));
    }
    read
}

/// The views of those of the queues that exist.
fn views(snapshot: Snapshot, queues: &[String], cx: &mut Cx<'_>) -> Vec<QueueView> {
    let mut counts = snapshot.counts.into_iter();
    let mut slices = snapshot.slices.into_iter();
    let mut views = Vec::new();
    for ((queue, record), name) in queues.iter().zip(&snapshot.records).zip(&snapshot.members) {
        let info = QueueInfo::decode(record).unwrap_or_default();
        let mut depth = Vec::new();
        let mut oldest_due: Option<Clock> = None;
        let mut any = 0;
        for class in Class::ALL {
            for status in Status::ALL {
                let n = counts.next().unwrap_or(0);
                any += n;
                depth.push((class, status, n));
            }
            if let Some(first) = slices.next().and_then(|s| s.into_iter().next()) {
                oldest_due = Some(oldest_due.map_or(first.score, |o| o.min(first.score)));
            }
        }
        if any == 0 && name.is_none() && info.version.is_none() {
            continue;
        }
        views.push(QueueView {
            name: queue.clone(),
            paused: info.record.paused,
            reason: info.record.reason,
            lease_ms: info.record.lease_ms.unwrap_or(cx.config.lease_ms),
            depth,
            oldest_due,
            at: snapshot.clock,
        });
    }
    views
}

/// One queue, or all of a tenant's.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct Queues {
    tenant: String,
    one: Option<String>,
    rest: VecDeque<String>,
    page: Vec<String>,
    found: Vec<QueueView>,
    names: Names,
    named: bool,
}

/// Queues read at once.
const PAGE: usize = 20;

impl Queues {
    pub fn all(tenant: String) -> Queues {
        Queues {
            tenant,
            one: None,
            rest: VecDeque::new(),
            page: Vec::new(),
            found: Vec::new(),
            names: Names::default(),
            named: false,
        }
    }

    pub fn one(tenant: String, queue: String) -> Result<Queues, Failure> {
        check::name("queue", &queue)?;
        Ok(Queues { one: Some(queue), ..Queues::all(tenant) })
    }

    fn next(&mut self) -> Next {
        let n = self.rest.len().min(PAGE);
        self.page = self.rest.drain(..n).collect();
        if self.page.is_empty() {
            return Next::ok(Response::Queues(core::mem::take(&mut self.found)));
        }
        Next::Read(view_read(&self.tenant, &self.page))
    }
}

impl Operation for Queues {
    fn start(&mut self, _: &mut Cx<'_>) -> Next {
        self.found.clear();
        self.named = self.one.is_some();
        match &self.one {
            Some(queue) => {
                self.rest = VecDeque::from([queue.clone()]);
                self.next()
            }
            None => {
                self.names = Names::default();
                Next::Read(self.names.page())
            }
        }
    }

    fn read(&mut self, snapshot: Snapshot, cx: &mut Cx<'_>) -> Next {
        if !self.named {
            if self.names.more(&snapshot, &self.tenant) {
                return Next::Read(self.names.page());
            }
            self.named = true;
            self.rest = core::mem::take(&mut self.names).found.into_iter().collect();
            return self.next();
        }
        let found = views(snapshot, &self.page, cx);
        if self.one.is_some() {
            return match found.into_iter().next() {
                Some(view) => Next::ok(Response::Queue(Box::new(view))),
                None => Next::fail(Failure::UnknownQueue),
            };
        }
        self.found.extend(found);
        self.next()
    }

    fn answered(&mut self, _: Clock, _: Vec<Answer>, cx: &mut Cx<'_>) -> Next {
        self.start(cx)
    }
}

/// Pause, resume, settings: one record, always put.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct Settings {
    tenant: String,
    queue: String,
    change: Change,
    decided: Option<(QueueView, QueueInfo)>,
}

#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub(crate) enum Change {
    Pause(Option<String>),
    Resume,
    Set { lease_ms: Option<u64> },
}

impl Settings {
    pub fn new(tenant: String, queue: String, change: Change) -> Result<Settings, Failure> {
        check::name("queue", &queue)?;
        match &change {
            Change::Pause(Some(reason)) => check::text("reason", reason, limits::REASON_BYTES)?,
            Change::Set { lease_ms } => {
                check::within("lease_ms", *lease_ms, limits::LEASE_MS_MIN, limits::LEASE_MS_MAX)?;
            }
            Change::Pause(None) | Change::Resume => {}
        }
        Ok(Settings { tenant, queue, change, decided: None })
    }
}

impl Operation for Settings {
    fn start(&mut self, _: &mut Cx<'_>) -> Next {
        Next::Read(view_read(&self.tenant, core::slice::from_ref(&self.queue)))
    }

    fn read(&mut self, snapshot: Snapshot, cx: &mut Cx<'_>) -> Next {
        let record = snapshot.records.first().cloned().unwrap_or(Record::Absent);
        let Ok(info) = QueueInfo::decode(&record) else { return Next::fail(Failure::Quarantined) };
        let at = snapshot.clock;
        let mut view =
            views(snapshot, core::slice::from_ref(&self.queue), cx).into_iter().next().unwrap_or_else(|| QueueView {
                name: self.queue.clone(),
                paused: false,
                reason: None,
                lease_ms: cx.config.lease_ms,
                depth: Vec::new(),
                oldest_due: None,
                at,
            });
        let mut next = info.record.clone();
        match &self.change {
            Change::Pause(reason) => {
                next.paused = true;
                next.reason = reason.clone();
            }
            Change::Resume => {
                next.paused = false;
                next.reason = None;
            }
            Change::Set { lease_ms } => next.lease_ms = lease_ms.or(next.lease_ms),
        }
        view.paused = next.paused;
        view.reason = next.reason.clone();
        view.lease_ms = next.lease_ms.unwrap_or(cx.config.lease_ms);
        if next == info.record {
            return Next::ok(Response::Queue(Box::new(view)));
        }
        next.trail = info.version.map_or(next.trail, |v| info.record.trail.after(v));
        let own = cx.make.version();
        let key = keys::queue(&self.tenant, &self.queue);
        let mut writes = vec![
            put(key.clone(), own, codec::encode::<QueueRecord>(&next), Expiry::Never),
            known(&self.tenant, &self.queue),
        ];
        if !next.paused {
            writes.push(Write::Notify(keys::topic_queue(&self.tenant, &self.queue)));
        }
        let draft = Draft::new(vec![info.guard(key.clone())], writes);
        let evidence = Evidence { key, own, found: info.version, kind: EvidenceKind::Queue };
        self.decided = Some((view, QueueInfo { version: Some(own), record: next }));
        Next::Commit(Plan { txns: vec![draft], grows: false, evidence: Some(evidence) })
    }

    fn answered(&mut self, clock: Clock, answers: Vec<Answer>, cx: &mut Cx<'_>) -> Next {
        if applied(&answers) { self.settled(clock, cx) } else { self.start(cx) }
    }

    fn settled(&mut self, _: Clock, cx: &mut Cx<'_>) -> Next {
        let Some((view, _)) = self.decided.take() else {
            return Next::fail(Failure::OutcomeUnknown { retry_after_ms: 1_000 });
        };
        // Read again when it is next needed: somebody may have changed it since.
        cx.queues.forget(&self.tenant, &self.queue);
        Next::ok(Response::Queue(Box::new(view)))
    }
}

/// Cancels what waits, or deletes what has ended, a bounded page at a time.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct Purge {
    tenant: String,
    queue: String,
    status: Status,
    purged: u64,
    /// How many transactions each job of the page has: of its alternatives at most one applies.
    shape: Vec<usize>,
    viewing: bool,
}

impl Purge {
    pub fn new(tenant: String, queue: String, status: Status) -> Result<Purge, Failure> {
        check::name("queue", &queue)?;
        if status == Status::Running {
            let detail = "running jobs are not purged: cancel them one by one, or pause the queue and wait";
            return Err(check::invalid("status", detail.into()));
        }
        Ok(Purge { tenant, queue, status, purged: 0, shape: Vec::new(), viewing: false })
    }

    fn look(&mut self) -> Next {
        self.viewing = true;
        Next::Read(view_read(&self.tenant, core::slice::from_ref(&self.queue)))
    }
}

impl Operation for Purge {
    fn start(&mut self, _: &mut Cx<'_>) -> Next {
        if self.viewing {
            return self.look();
        }
        let slices = Class::ALL
            .into_iter()
            .map(|class| Slice {
                index: Home { tenant: &self.tenant, queue: &self.queue, class }.index(self.status),
                after: None,
                up_to: UpTo::End,
                limit: limits::PURGE,
                give: vec![keys::JOB, keys::LEASE],
            })
            .collect();
        Next::Read(Read { slices, ..Read::default() })
    }

    fn read(&mut self, snapshot: Snapshot, cx: &mut Cx<'_>) -> Next {
        if self.viewing {
            let Some(view) = views(snapshot, core::slice::from_ref(&self.queue), cx).into_iter().next() else {
                return Next::fail(Failure::UnknownQueue);
            };
            let left = view.depth.iter().filter(|d| d.1 == self.status).map(|d| d.2).sum();
            return Next::ok(Response::Purged { queue: Box::new(view), purged: self.purged, left });
        }
        let clock = snapshot.clock;
        let mut drafts = Vec::new();
        self.shape.clear();
        for entry in snapshot.slices.iter().flatten().take(limits::PURGE) {
            let [main, lease] = &*entry.records else { continue };
            let Some(id) = keys::job_of(&entry.member) else { continue };
            let Ok(Some((version, job))) = decode_record::<Job>(main) else { continue };
            let more = match (&job.end, self.status.is_terminal()) {
                (None, false) => operate::cancel(id, &job, version, lease, clock, cx).0,
                (Some(end), true) => operate::delete(id, &job, version, end.status, cx).0,
                _ => continue,
            };
            self.shape.push(more.len());
            drafts.extend(more);
        }
        if drafts.is_empty() {
            return self.look();
        }
        Next::Commit(Plan::new(drafts))
    }

    fn answered(&mut self, _: Clock, answers: Vec<Answer>, _: &mut Cx<'_>) -> Next {
        let mut answers = answers.as_slice();
        for n in &self.shape {
            let (mine, rest) = answers.split_at((*n).min(answers.len()));
            answers = rest;
            self.purged += u64::from(applied(mine));
        }
        self.look()
    }
}
