//! Showing an operator what the store holds of one thing, as it stands there.

use alloc::format;
use alloc::string::{String, ToString as _};
use alloc::vec;
use alloc::vec::Vec;

use super::check;
use super::look::head;
use super::moves::Home;
use super::record::{Class, History, Job, KeyRecord, Lease, ProgressRecord, QueueRecord, Status};
use crate::codec::{self, Undecodable};
use crate::failure::Failure;
use crate::limits;
use crate::name::Name;
use crate::replica::task::{Cx, Next, Operation, decode_record};
use crate::request::{Inspect as Asked, Inspected, RecordView, Response};
use crate::store::{Answer, Clock, Read, Record, Slice, Snapshot, Span, keys};

/// Records in quarantine that are shown.
const QUARANTINED: usize = 1_000;

#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct Inspect {
    asked: Asked,
    read: Read,
    /// The first read of a job tells where it is at home.
    placed: bool,
}

impl Inspect {
    pub fn new(asked: Asked) -> Result<Inspect, Failure> {
        match &asked {
            Asked::Job(_) | Asked::Quarantine => {}
            Asked::Queue { tenant, queue } => {
                check::name("tenant", tenant)?;
                check::name("queue", queue)?;
            }
            Asked::Key { tenant, key } => {
                check::name("tenant", tenant)?;
                check::text("key", key, limits::KEY_BYTES)?;
            }
        }
        Ok(Inspect { asked, read: Read::default(), placed: false })
    }

    fn view(&self, snapshot: &Snapshot) -> Inspected {
        let records = self.read.records.iter().zip(&snapshot.records).filter_map(|(key, record)| show(key, record));
        let members = snapshot.slices.iter().flatten();
        let set_aside = members.filter_map(|e| show(&keys::JOB.join(&e.member), e.records.first()?));
        let places = self.read.members.iter().zip(&snapshot.members);
        let counts = self.read.counts.iter().zip(&snapshot.counts);
        Inspected {
            at: snapshot.clock,
            records: records.chain(set_aside).collect(),
            places: places.filter_map(|((index, _), p)| p.map(|p| (index.to_string(), p.score))).collect(),
            counts: counts.filter(|(_, n)| **n > 0).map(|((index, _), n)| (index.to_string(), *n)).collect(),
        }
    }
}

fn show(key: &Name, record: &Record) -> Option<RecordView> {
    let Record::Present { version, at, expiry, len, bytes } = record else { return None };
    let text = match bytes {
        None => "not read: too large for one answer".into(),
        Some(bytes) => text(key, bytes).unwrap_or_else(|why| match why {
            Undecodable::Newer => "written by a newer release".into(),
            Undecodable::Corrupt => "cannot be read: its check does not match its bytes".into(),
        }),
    };
    Some(RecordView { key: key.to_string(), version: version.0, at: *at, expires_at: *expiry, len: *len, text })
}

fn text(key: &Name, bytes: &[u8]) -> Result<String, Undecodable> {
    let kind = key.as_str().and_then(|k| k.split_once('/')).map_or("", |(kind, _)| kind);
    Ok(match kind {
        "job" => format!("{:#?}", codec::decode::<Job>(bytes)?),
        "lease" => format!("{:#?}", codec::decode::<Lease>(bytes)?),
        "history" => format!("{:#?}", codec::decode::<History>(bytes)?),
        "key" => format!("{:#?}", codec::decode::<KeyRecord>(bytes)?),
        "queue" => format!("{:#?}", codec::decode::<QueueRecord>(bytes)?),
        "progress" => {
            let progress = codec::decode::<ProgressRecord>(bytes)?;
            format!("lease: {:?}, seq: {:?}, {} bytes", progress.lease, progress.seq, progress.value.len())
        }
        _ => "not shown".into(),
    })
}

impl Operation for Inspect {
    fn start(&mut self, _: &mut Cx<'_>) -> Next {
        self.placed = false;
        self.read = match &self.asked {
            Asked::Job(id) => {
                let id = *id;
                let records = [keys::job, keys::lease, keys::progress, keys::history, keys::payload, keys::result];
                Read { records: records.map(|key| key(id)).into(), ..Read::default() }
            }
            Asked::Key { tenant, key } => Read { records: vec![keys::key(tenant, key)], ..Read::default() },
            Asked::Quarantine => {
                let all = Slice { limit: QUARANTINED, give: vec![keys::JOB], ..head(keys::QUARANTINE) };
                Read { slices: vec![all], counts: vec![(keys::QUARANTINE, Span::All)], ..Read::default() }
            }
            Asked::Queue { tenant, queue } => {
                let mut read = Read { records: vec![keys::queue(tenant, queue)], ..Read::default() };
                for class in Class::ALL {
                    let home = Home { tenant, queue, class };
                    read.counts.extend(Status::ALL.into_iter().map(|s| (home.index(s), Span::All)));
                }
                read.members.push((keys::NAMES, keys::queue_member(tenant, queue)));
                read
            }
        };
        Next::Read(self.read.clone())
    }

    fn read(&mut self, snapshot: Snapshot, _: &mut Cx<'_>) -> Next {
        if let (Asked::Job(id), false) = (&self.asked, self.placed) {
            self.placed = true;
            let member = keys::member(*id);
            let shared = [keys::LEASES, keys::DUE, keys::TTL, keys::QUARANTINE];
            self.read.members = shared.into_iter().map(|index| (index, member.clone())).collect();
            let job = snapshot.records.first().and_then(|r| decode_record::<Job>(r).ok().flatten());
            if let Some((_, job)) = job {
                let home = Home::from(&job);
                self.read.members.extend(Status::ALL.into_iter().map(|s| (home.index(s), member.clone())));
                self.read.records.extend(job.key.as_ref().map(|(key, _)| keys::key(&job.tenant, key)));
            }
            return Next::Read(self.read.clone());
        }
        let view = self.view(&snapshot);
        if !view.records.is_empty() || !view.places.is_empty() || !view.counts.is_empty() {
            return Next::ok(Response::Inspected(view));
        }
        match &self.asked {
            Asked::Job(_) => Next::fail(Failure::UnknownJob),
            Asked::Queue { .. } => Next::fail(Failure::UnknownQueue),
            Asked::Key { .. } => Next::fail(Failure::UnknownKey),
            Asked::Quarantine => Next::ok(Response::Inspected(view)),
        }
    }

    fn answered(&mut self, _: Clock, _: Vec<Answer>, cx: &mut Cx<'_>) -> Next {
        self.start(cx)
    }
}
