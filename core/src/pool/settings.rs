//! Making, changing and deleting a pool: one record, always put.

use alloc::boxed::Box;
use alloc::format;
use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;

use super::look::One;
use super::record::Pool;
use super::{counted, of, tidy};
use crate::codec::{self, Undecodable};
use crate::failure::Failure;
use crate::job::check;
use crate::job::moves::{add, as_read, put, remove};
use crate::job::record::Trail;
use crate::limits;
use crate::replica::Op;
use crate::replica::task::{Cx, Draft, Evidence, EvidenceKind, Next, Operation, Plan, applied, decode_record};
use crate::request::{Response, SetPool};
use crate::store::{Answer, Clock, Expiry, Guard, Read, Record, ScoreAt, Snapshot, Span, Write, keys};

/// Makes a pool, or changes what is given of one and keeps the rest.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct Set {
    asked: SetPool,
}

impl Set {
    pub fn new(asked: SetPool) -> Result<Set, Failure> {
        check::name("pool", &asked.pool)?;
        check::within("total", asked.total, 1, limits::POOL_TOTAL_MAX)?;
        check::within("batch_max", asked.batch_max, 0, asked.total.unwrap_or(limits::POOL_TOTAL_MAX))?;
        check::within("lease_ms", asked.lease_ms, limits::LEASE_MS_MIN, limits::LEASE_MS_MAX)?;
        Ok(Set { asked })
    }

    fn look(&self) -> Next {
        Next::Become(Op::Pool(Box::new(One::state(self.asked.tenant.clone(), self.asked.pool.clone()))))
    }
}

impl Operation for Set {
    fn start(&mut self, _: &mut Cx<'_>) -> Next {
        Next::Read(Read { records: vec![keys::pool(&self.asked.pool)], ..Read::default() })
    }

    fn read(&mut self, snapshot: Snapshot, cx: &mut Cx<'_>) -> Next {
        let record = snapshot.records.first().unwrap_or(&Record::Absent);
        let found = match decode_record::<Pool>(record) {
            Ok(found) => found,
            Err(Undecodable::Newer) => return Next::fail(Failure::NewerFormat { retry_after_ms: 10_000 }),
            // What cannot be read is put anew.
            Err(Undecodable::Corrupt) => None,
        };
        let before = found.as_ref().map(|(_, pool)| pool).filter(|pool| !pool.deleted);
        let narrow = |n: u64| n.min(limits::POOL_TOTAL_MAX) as u32;
        let Some(total) = self.asked.total.map(narrow).or(before.map(|p| p.total)) else {
            return Next::fail(check::invalid("total", "a new pool needs one".into()));
        };
        let batch_max = self.asked.batch_max.map(narrow).or(before.and_then(|p| p.batch_max));
        if let Some(given) = self.asked.batch_max
            && given > total.into()
        {
            let detail = format!("is {given}, must be from 0 to the total of {total}");
            return Next::fail(check::invalid("batch_max", detail));
        }
        let lease_ms = self.asked.lease_ms.or(before.map(|p| p.lease_ms)).unwrap_or(cx.config.lease_ms);
        let trail = found.as_ref().map_or(Trail::default(), |(version, pool)| pool.trail.after(*version));
        let next = Pool { total, batch_max, lease_ms, deleted: false, trail };
        if before.is_some_and(|b| Pool { trail: b.trail, ..next.clone() } == *b) {
            return self.look();
        }
        let own = cx.make.version();
        let (key, member) = (keys::pool(&self.asked.pool), keys::pool_member(&self.asked.pool));
        let writes = vec![
            put(key.clone(), own, codec::encode(&next), Expiry::Never),
            add(keys::POOLS, &member, ScoreAt::Clock(limits::POOL_IDLE)),
            // It may have grown.
            Write::Notify(keys::topic_pool(&self.asked.pool)),
        ];
        let draft = Draft::new(vec![as_read(key.clone(), record)], writes);
        let evidence = Evidence { key, own, found: record.version(), kind: EvidenceKind::Pool };
        Next::Commit(Plan { txns: vec![draft], grows: false, evidence: Some(evidence) })
    }

    fn answered(&mut self, clock: Clock, answers: Vec<Answer>, cx: &mut Cx<'_>) -> Next {
        if applied(&answers) { self.settled(clock, cx) } else { self.start(cx) }
    }

    fn settled(&mut self, _: Clock, _: &mut Cx<'_>) -> Next {
        self.look()
    }
}

/// Deletes a pool in which nobody holds and nobody waits.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct Delete {
    pool: String,
    /// What is past its time is removed first, since nobody would do so afterwards.
    tidying: bool,
}

impl Delete {
    pub fn new(pool: String) -> Result<Delete, Failure> {
        check::name("pool", &pool)?;
        Ok(Delete { pool, tidying: false })
    }
}

impl Operation for Delete {
    fn start(&mut self, _: &mut Cx<'_>) -> Next {
        let counts = counted(&self.pool).flat_map(|index| [(index.clone(), Span::All), (index, Span::Live)]).collect();
        Next::Read(Read { records: vec![keys::pool(&self.pool)], counts, ..Read::default() })
    }

    fn read(&mut self, snapshot: Snapshot, cx: &mut Cx<'_>) -> Next {
        let (version, settings) = match of(snapshot.records.first().unwrap_or(&Record::Absent)) {
            Ok(found) => found,
            Err(failure) => return Next::fail(failure),
        };
        let (mut live, mut past) = (0, 0);
        for pair in snapshot.counts.chunks(2) {
            let [all, alive] = pair else { continue };
            live += alive;
            past += all - alive;
        }
        if live > 0 {
            return Next::fail(Failure::PoolInUse);
        }
        self.tidying = past > 0;
        if self.tidying {
            return Next::Commit(Plan::new(tidy(&self.pool)));
        }
        let own = cx.make.version();
        let key = keys::pool(&self.pool);
        let mut guards = vec![Guard::At(key.clone(), version)];
        guards.extend(counted(&self.pool).map(|index| Guard::Below(index, Span::All, 1)));
        let stub = Pool { deleted: true, trail: settings.trail.after(version), ..settings };
        let writes = vec![
            put(key.clone(), own, codec::encode(&stub), Expiry::Clock(limits::STUB)),
            remove(keys::POOLS, &keys::pool_member(&self.pool)),
        ];
        let evidence = Evidence { key, own, found: Some(version), kind: EvidenceKind::Pool };
        Next::Commit(Plan { txns: vec![Draft::new(guards, writes)], grows: false, evidence: Some(evidence) })
    }

    fn answered(&mut self, clock: Clock, answers: Vec<Answer>, cx: &mut Cx<'_>) -> Next {
        if applied(&answers) && !self.tidying { self.settled(clock, cx) } else { self.start(cx) }
    }

    fn settled(&mut self, _: Clock, _: &mut Cx<'_>) -> Next {
        Next::ok(Response::PoolDeleted)
    }
}
