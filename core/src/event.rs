//! The audit log: one event for each transition, appended by the transaction that makes it.

use alloc::string::String;
use alloc::vec::Vec;
use bytes::Bytes;

use crate::codec;
use crate::ids::JobId;
use crate::job::record::{Class, Owner};
use crate::request::{EventCursor, EventView};
use crate::store::LogEntry;

/// What happened. The text is the type in API.md.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub enum Kind {
    Submitted,
    Claimed,
    Released,
    LeaseExpired,
    TimedOut,
    Retrying,
    Succeeded,
    Dead,
    Cancelled,
    Expired,
    Lost,
    Retried,
    Deleted,
    Reindexed,
    Quarantined,
    GroupCreated,
    GroupExtended,
    GroupSealed,
    GroupFinalized,
}

impl Kind {
    pub const ALL: [Kind; 19] = [
        Kind::Submitted,
        Kind::Claimed,
        Kind::Released,
        Kind::LeaseExpired,
        Kind::TimedOut,
        Kind::Retrying,
        Kind::Succeeded,
        Kind::Dead,
        Kind::Cancelled,
        Kind::Expired,
        Kind::Lost,
        Kind::Retried,
        Kind::Deleted,
        Kind::Reindexed,
        Kind::Quarantined,
        Kind::GroupCreated,
        Kind::GroupExtended,
        Kind::GroupSealed,
        Kind::GroupFinalized,
    ];

    pub fn text(self) -> &'static str {
        match self {
            Kind::Submitted => "job.submitted",
            Kind::Claimed => "job.claimed",
            Kind::Released => "job.released",
            Kind::LeaseExpired => "job.lease_expired",
            Kind::TimedOut => "job.timed_out",
            Kind::Retrying => "job.retrying",
            Kind::Succeeded => "job.succeeded",
            Kind::Dead => "job.dead",
            Kind::Cancelled => "job.cancelled",
            Kind::Expired => "job.expired",
            Kind::Lost => "job.lost",
            Kind::Retried => "job.retried",
            Kind::Deleted => "job.deleted",
            Kind::Reindexed => "job.reindexed",
            Kind::Quarantined => "job.quarantined",
            Kind::GroupCreated => "group.created",
            Kind::GroupExtended => "group.extended",
            Kind::GroupSealed => "group.sealed",
            Kind::GroupFinalized => "group.finalized",
        }
    }
}

/// One event. `queue` is empty where it could not be known (a record that vanished).
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Event {
    pub kind: Kind,
    /// Whom it concerns.
    pub of: Owner,
    /// The children created, by index: from the first up to the last excluded.
    pub range: Option<(u32, u32)>,
    pub queue: String,
    pub class: Option<Class>,
    /// The worker concerned, if any.
    pub worker: Option<String>,
    /// Why, in a word, where the kind leaves it open.
    pub reason: Option<String>,
}

/// What one append holds.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) enum Item {
    One(Event),
    /// A claim: an event for each member that the take took. `queues` parallels its sources.
    Claimed {
        worker: String,
        queues: Vec<(String, Class)>,
    },
}

impl Item {
    pub(crate) fn encode(&self) -> Bytes {
        codec::encode(self)
    }
}

/// Of which kind is what one append holds.
#[must_use]
pub fn kind_of(item: &[u8]) -> Option<Kind> {
    match codec::decode::<Item>(item).ok()? {
        Item::One(event) => Some(event.kind),
        Item::Claimed { .. } => Some(Kind::Claimed),
    }
}

/// Unfolds log entries into events after `after`, at most `limit`. Items that cannot be read are
/// passed over. Returns the cursor to go on from.
pub(crate) fn unfold(log: &[LogEntry], after: EventCursor, limit: usize) -> (Vec<EventView>, EventCursor) {
    let mut events = Vec::new();
    let mut next = after;
    for entry in log {
        let skip = if entry.seq == after.seq { after.seen } else { 0 };
        let mut seen = 0u32;
        let mut push = |event: Event| {
            seen += 1;
            if seen > skip && events.len() < limit {
                let id = EventCursor { seq: entry.seq, seen };
                next = id;
                events.push(EventView { id, at: entry.at, event });
            }
        };
        for item in &entry.items {
            match codec::decode::<Item>(&item.bytes) {
                Ok(Item::One(event)) => push(event),
                Ok(Item::Claimed { worker, queues }) => {
                    for taken in &item.taken {
                        let Some(job) = taken.member.as_str().and_then(|s| s.parse::<JobId>().ok()) else { continue };
                        let Some((queue, class)) = queues.get(taken.source as usize) else { continue };
                        push(Event {
                            kind: Kind::Claimed,
                            of: Owner::Job(job),
                            range: None,
                            queue: queue.clone(),
                            class: Some(*class),
                            worker: Some(worker.clone()),
                            reason: None,
                        });
                    }
                }
                Err(_) => {}
            }
        }
        if events.len() >= limit {
            break;
        }
        // An entry read to its end is not read again.
        if seen == 0 || next.seq < entry.seq {
            next = next.max(EventCursor { seq: entry.seq, seen });
        }
    }
    (events, next)
}
