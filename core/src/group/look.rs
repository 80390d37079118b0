//! Looking at a group: where its children are, its end, and its children in pages.

use alloc::boxed::Box;
use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;

use super::record::Group;
use super::{BOOKS, books, counts, of, sizes, view};
use crate::failure::Failure;
use crate::ids::{GroupId, JobId};
use crate::job::check;
use crate::job::record::{ChildOutcome, History, Job, decode_content};
use crate::limits;
use crate::replica::task::{Cx, Next, Operation, Wait, decode_record};
use crate::request::{ChildState, ChildView, Response};
use crate::store::{Answer, Clock, Place, Read, Record, Snapshot, keys};

#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct Look {
    tenant: String,
    id: GroupId,
    /// Until it is final.
    wait_ms: u64,
}

impl Look {
    pub fn new(tenant: String, id: GroupId, wait_ms: u64) -> Result<Look, Failure> {
        check::within("wait_ms", Some(wait_ms), 0, limits::WAIT_MS)?;
        Ok(Look { tenant, id, wait_ms })
    }

    pub fn state(tenant: String, id: GroupId, wait_ms: u64) -> Look {
        Look { tenant, id, wait_ms }
    }

    /// The group that an idempotency key named already.
    pub fn existing(tenant: String, id: GroupId) -> Look {
        Look::state(tenant, id, 0)
    }

    pub fn wait_ms(&self) -> u64 {
        self.wait_ms
    }
}

impl Operation for Look {
    fn start(&mut self, _: &mut Cx<'_>) -> Next {
        Next::Read(Read { records: vec![keys::group(self.id)], counts: sizes(self.id).collect(), ..Read::default() })
    }

    fn read(&mut self, snapshot: Snapshot, cx: &mut Cx<'_>) -> Next {
        let group = match of(snapshot.records.first().unwrap_or(&Record::Absent), &self.tenant) {
            Ok((_, group)) => group,
            Err(failure) => return Next::fail(failure),
        };
        if group.end.is_none() && self.wait_ms > 0 && !cx.last_try {
            return Next::Wait(Wait::on(vec![keys::topic_group(self.id)]));
        }
        Next::ok(Response::Group(Box::new(view(self.id, &group, counts(&snapshot.counts)))))
    }

    fn answered(&mut self, _: Clock, _: Vec<Answer>, cx: &mut Cx<'_>) -> Next {
        self.start(cx)
    }
}

/// A page of children in order, each with what came of it.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct Children {
    tenant: String,
    id: GroupId,
    from: u32,
    limit: u32,
    contents: bool,
    /// The group's size once it is known.
    filled: Option<u32>,
}

impl Children {
    pub fn new(tenant: String, id: GroupId, from: u32, limit: usize, contents: bool) -> Result<Children, Failure> {
        check::within("limit", Some(limit as u64), 1, limits::LIST_MAX as u64)?;
        Ok(Children { tenant, id, from, limit: limit as u32, contents, filled: None })
    }

    fn page(&self, filled: u32) -> Read {
        let to = self.from.saturating_add(self.limit).min(filled);
        let mut read =
            Read { records: vec![keys::group(self.id)], counts: sizes(self.id).collect(), ..Read::default() };
        for index in self.from..to {
            let child = self.id.child(index);
            let member = keys::member(child);
            read.records.extend([keys::job(child), keys::history(child)]);
            if self.contents {
                read.records.push(keys::result(child));
            }
            read.members.extend(books(self.id).map(|index| (index, member.clone())));
        }
        if self.limit == 1 {
            // A single result of the largest size comes whole.
            read.max_bytes = limits::PAYLOAD_BYTES + limits::READ_BYTES;
        }
        read
    }

    fn child(&self, index: u32, records: &[Record], places: &[Option<Place>]) -> Option<ChildView> {
        let id: JobId = self.id.child(index);
        let (main, history) = (records.first()?, records.get(1)?);
        let job = decode_record::<Job>(main).ok().flatten().map(|(_, job)| job);
        let history: Option<History> = decode_record(history).ok().flatten().map(|(_, h)| h);
        let end = job.as_ref().and_then(|j| j.end.as_ref());
        let outcome = ChildOutcome::ALL.into_iter().zip(places.iter().skip(2)).find_map(|(o, p)| p.map(|_| o));
        let state = match (outcome.or(end.and_then(|e| ChildOutcome::of(e.status))), places.first()) {
            (Some(outcome), _) => ChildState::Done(outcome),
            (None, Some(Some(_))) => ChildState::Held,
            (None, _) => ChildState::InFlight,
        };
        let last = end.and_then(|e| e.attempt.as_ref());
        let earlier = history.as_ref().and_then(|h| h.attempts.last());
        let failed = !matches!(state, ChildState::Done(ChildOutcome::Succeeded));
        Some(ChildView {
            index,
            id,
            state,
            attempts: job.as_ref().map_or(0, |j| j.attempts),
            reason: end.and_then(|e| e.reason.clone()),
            error: last.or(earlier).filter(|_| failed).and_then(|a| a.error.clone()),
            ended_at: end.map(|e| e.at),
            result_len: end.and_then(|e| e.result_len),
            result: records.get(2).and_then(Record::bytes).and_then(|b| decode_content(b).ok()),
        })
    }

    fn answer(&mut self, group: &Group, snapshot: &Snapshot) -> Next {
        let per_child = 2 + usize::from(self.contents);
        let mut records = snapshot.records.get(1..).unwrap_or_default().chunks(per_child);
        if self.limit > 1 && records.clone().next().is_some_and(|r| r.iter().any(Record::is_unread)) {
            self.limit = 1;
            return Next::Read(self.page(group.filled));
        }
        let mut children = Vec::new();
        for ((index, records), places) in (self.from..).zip(records.by_ref()).zip(snapshot.members.chunks(BOOKS)) {
            // What did not fit into the answer is the next page's.
            if records.iter().any(Record::is_unread) && !children.is_empty() {
                break;
            }
            children.extend(self.child(index, records, places));
        }
        let next = self.from.saturating_add(children.len() as u32);
        Next::ok(Response::Children {
            group: Box::new(view(self.id, group, counts(&snapshot.counts))),
            next: (next < group.filled && !children.is_empty()).then_some(next),
            children,
        })
    }
}

impl Operation for Children {
    fn start(&mut self, _: &mut Cx<'_>) -> Next {
        self.filled = None;
        Next::Read(Read { records: vec![keys::group(self.id)], ..Read::default() })
    }

    fn read(&mut self, snapshot: Snapshot, _: &mut Cx<'_>) -> Next {
        let group = match of(snapshot.records.first().unwrap_or(&Record::Absent), &self.tenant) {
            Ok((_, group)) => group,
            Err(failure) => return Next::fail(failure),
        };
        // Grown since it was first read: the page may have more in it.
        let grown = self.filled.is_some_and(|f| f < group.filled && f < self.from.saturating_add(self.limit));
        if self.filled.is_none() || grown {
            self.filled = Some(group.filled);
            if self.contents && group.end.is_none() {
                return Next::fail(Failure::NotFinal);
            }
            return Next::Read(self.page(group.filled));
        }
        self.answer(&group, &snapshot)
    }

    fn answered(&mut self, _: Clock, _: Vec<Answer>, cx: &mut Cx<'_>) -> Next {
        self.start(cx)
    }
}
