//! Sealing and cancelling a group: one put of its record, and a mark. The rest is the step's.

use alloc::boxed::Box;
use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;

use super::look::Look;
use super::of;
use super::record::{Group, GroupStatus, Stop};
use crate::codec;
use crate::event::Kind;
use crate::failure::Failure;
use crate::ids::GroupId;
use crate::job::moves::{self, Home, group_event, put, remove};
use crate::replica::Op;
use crate::replica::task::{Cx, Draft, Evidence, EvidenceKind, Next, Operation, Plan, applied};
use crate::store::{Answer, Clock, Expiry, Guard, Read, Record, Snapshot, Version, Write, keys};

#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct Change {
    tenant: String,
    id: GroupId,
    what: What,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
enum What {
    Seal,
    Cancel,
}

impl Change {
    pub fn seal(tenant: String, id: GroupId) -> Change {
        Change { tenant, id, what: What::Seal }
    }

    pub fn cancel(tenant: String, id: GroupId) -> Change {
        Change { tenant, id, what: What::Cancel }
    }

    fn look(&self) -> Next {
        Next::Become(Op::Group(Box::new(Look::state(self.tenant.clone(), self.id, 0))))
    }
}

/// The transaction that stops a group, unless it is final or stopped: whoever is held is cancelled then,
/// and whoever runs is told to stop.
pub(super) fn stop(id: GroupId, group: &Group, version: Version, why: Stop, own: Version) -> Draft {
    let mut next = group.after(version);
    next.stopped = Some(why);
    next.sealed = true;
    let mut writes = vec![
        put(keys::group(id), own, codec::encode(&next), Expiry::Never),
        remove(keys::GROUPS_OPEN, &keys::group_member(id)),
    ];
    writes.extend(moves::mark(id, own));
    Draft::new(vec![Guard::At(keys::group(id), version)], writes)
}

fn seal(id: GroupId, group: &Group, version: Version, own: Version) -> Draft {
    let mut next = group.after(version);
    next.sealed = true;
    let mut writes: Vec<Write> = vec![
        put(keys::group(id), own, codec::encode(&next), Expiry::Never),
        remove(keys::GROUPS_OPEN, &keys::group_member(id)),
        group_event(Kind::GroupSealed, id, Home::from(group), Some((0, group.filled)), None),
    ];
    writes.extend(moves::mark(id, own));
    Draft::new(vec![Guard::At(keys::group(id), version)], writes)
}

impl Operation for Change {
    fn start(&mut self, _: &mut Cx<'_>) -> Next {
        Next::Read(Read { records: vec![keys::group(self.id)], ..Read::default() })
    }

    fn read(&mut self, snapshot: Snapshot, cx: &mut Cx<'_>) -> Next {
        let (version, group) = match of(snapshot.records.first().unwrap_or(&Record::Absent), &self.tenant) {
            Ok(found) => found,
            Err(failure) => return Next::fail(failure),
        };
        let own = cx.make.version();
        let draft = match (self.what, group.end.map(|e| e.0), group.stopped) {
            // Sealed again, or for the first time after it was stopped: nothing more can be added.
            (What::Seal, _, _) if group.sealed => return self.look(),
            (What::Seal, _, _) => seal(self.id, &group, version, own),
            (What::Cancel, Some(GroupStatus::Cancelled), _) | (What::Cancel, None, Some(_)) => return self.look(),
            (What::Cancel, Some(_), _) => return Next::fail(Failure::AlreadyTerminal),
            (What::Cancel, None, None) => stop(self.id, &group, version, Stop::Cancelled, own),
        };
        let evidence = Evidence { key: keys::group(self.id), own, found: Some(version), kind: EvidenceKind::Group };
        Next::Commit(Plan { txns: vec![draft], grows: false, evidence: Some(evidence) })
    }

    fn answered(&mut self, clock: Clock, answers: Vec<Answer>, cx: &mut Cx<'_>) -> Next {
        if applied(&answers) { self.settled(clock, cx) } else { self.start(cx) }
    }

    fn settled(&mut self, _: Clock, _: &mut Cx<'_>) -> Next {
        self.look()
    }
}
