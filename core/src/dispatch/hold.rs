//! Holds: an upstream that asked to be left alone takes no calls of any replica until then, and after that one
//! call at a time until one has succeeded.

use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;

use crate::codec::{self, Undecodable};
use crate::failure::Failure;
use crate::job::check;
use crate::job::moves::{as_read, put};
use crate::limits;
use crate::replica::task::{Cx, Draft, Next, Operation, Plan, applied, decode_record};
use crate::request::{HoldUpstream, Response, UpstreamView};
use crate::store::{Answer, Clock, Expiry, Guard, Read, Record, Snapshot, Span, Version, Write, keys};

/// The record `hold/{upstream}`. It outlives the time that it names, until a call has succeeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Hold {
    pub until: Clock,
}

/// A hold as read. One that cannot be read is over, and the next call tells.
pub(super) fn of(record: &Record) -> Result<Option<(Version, Hold)>, Failure> {
    match decode_record::<Hold>(record) {
        Ok(found) => Ok(found),
        Err(Undecodable::Newer) => Err(Failure::NewerFormat { retry_after_ms: 10_000 }),
        Err(Undecodable::Corrupt) => Ok(record.version().map(|version| (version, Hold { until: 0 }))),
    }
}

/// What is done about one upstream's hold.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct Change {
    upstream: String,
    what: What,
}

#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
enum What {
    /// It begins, or is made longer.
    Hold { for_ms: u64, until: Clock },
    /// A call has succeeded; then this is answered.
    Free(Response),
}

impl Change {
    pub fn hold(asked: HoldUpstream) -> Result<Change, Failure> {
        check::name("upstream", &asked.upstream)?;
        check::within("for_ms", Some(asked.for_ms), 1, limits::HOLD_MS_MAX)?;
        Ok(Change { upstream: asked.upstream, what: What::Hold { for_ms: asked.for_ms, until: 0 } })
    }

    pub fn free(upstream: String, then: Response) -> Change {
        Change { upstream, what: What::Free(then) }
    }
}

impl Operation for Change {
    fn start(&mut self, cx: &mut Cx<'_>) -> Next {
        if cx.config.routing.upstream(&self.upstream).is_none() && matches!(self.what, What::Hold { .. }) {
            return Next::fail(Failure::UnknownUpstream);
        }
        Next::Read(Read { records: vec![keys::hold(&self.upstream)], ..Read::default() })
    }

    fn read(&mut self, snapshot: Snapshot, cx: &mut Cx<'_>) -> Next {
        let record = snapshot.records.first().unwrap_or(&Record::Absent);
        let found = match of(record) {
            Ok(found) => found,
            Err(failure) => return Next::fail(failure),
        };
        let key = keys::hold(&self.upstream);
        match &mut self.what {
            What::Hold { for_ms, until } => {
                let asked = snapshot.clock.saturating_add(for_ms.saturating_mul(limits::MILLI));
                *until = found.map_or(asked, |(_, hold)| hold.until.max(asked));
                let hold = codec::encode(&Hold { until: *until });
                let lives = until.saturating_sub(snapshot.clock).saturating_add(limits::HOLD_KEPT);
                let writes = vec![
                    put(key.clone(), cx.make.version(), hold, Expiry::Clock(lives)),
                    Write::Notify(keys::topic_upstream(&self.upstream)),
                ];
                Next::Commit(Plan::new(vec![Draft::new(vec![as_read(key, record)], writes)]))
            }
            What::Free(then) => match found {
                // A call that had begun before the hold says nothing about the time after it.
                Some((version, hold)) if hold.until <= snapshot.clock => {
                    let writes = vec![Write::Delete(key.clone()), Write::Notify(keys::topic_upstream(&self.upstream))];
                    Next::Commit(Plan::new(vec![Draft::new(vec![Guard::At(key, version)], writes)]))
                }
                _ => Next::ok(then.clone()),
            },
        }
    }

    fn answered(&mut self, _: Clock, answers: Vec<Answer>, cx: &mut Cx<'_>) -> Next {
        match &self.what {
            _ if !applied(&answers) => self.start(cx),
            What::Hold { until, .. } => Next::ok(Response::UpstreamHeld { until: *until }),
            What::Free(then) => Next::ok(then.clone()),
        }
    }
}

/// The holds of all configured upstreams.
#[derive(Clone, Debug, Default, serde::Serialize, serde::Deserialize)]
pub(crate) struct Holds;

impl Operation for Holds {
    fn start(&mut self, cx: &mut Cx<'_>) -> Next {
        let names = || cx.config.routing.upstreams.iter().map(|u| u.name.as_str());
        let records = names().map(keys::hold).collect();
        let counts = names().map(|name| (keys::probe(name), Span::Live)).collect();
        Next::Read(Read { records, counts, ..Read::default() })
    }

    fn read(&mut self, snapshot: Snapshot, cx: &mut Cx<'_>) -> Next {
        let seen = snapshot.records.iter().zip(&snapshot.counts);
        let mut views = Vec::new();
        for (upstream, (record, probes)) in cx.config.routing.upstreams.iter().zip(seen) {
            let held_until = match of(record) {
                Ok(found) => found.map(|(_, hold)| hold.until),
                Err(failure) => return Next::fail(failure),
            };
            let (name, at) = (upstream.name.clone(), snapshot.clock);
            views.push(UpstreamView { name, held_until, probing: *probes > 0, at });
        }
        Next::ok(Response::Upstreams(views))
    }

    fn answered(&mut self, _: Clock, _: Vec<Answer>, cx: &mut Cx<'_>) -> Next {
        self.start(cx)
    }
}
