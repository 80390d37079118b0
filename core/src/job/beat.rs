//! Heartbeats: they raise the end of a lease, and may carry progress.

use alloc::format;
use alloc::vec;
use alloc::vec::Vec;

use super::attempt::{self, Cause, Running};
use super::lease;
use super::look::job_of;
use super::moves::{self, as_read, put};
use super::record::{AttemptEnd, History, ProgressRecord, Status};
use super::{check, view};
use crate::codec;
use crate::failure::Failure;
use crate::limits;
use crate::replica::Mark;
use crate::replica::task::{Cx, Draft, Next, Operation, Plan, applied, decode_record};
use crate::request::{Beat as Asked, Response};
use crate::store::{Answer, Clock, Expiry, Guard, Read, ScoreAt, Snapshot, Standing, Write, keys};

#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct Beat {
    asked: Asked,
    stage: Stage,
}

#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
enum Stage {
    Begin,
    /// Sent; the lease then ends at this clock. From that guard on they are about what is held for the lease.
    Raised(Clock, usize),
    /// A deadline had come: the attempt is over whatever happens to this commit.
    TimedOut {
        dead: bool,
    },
}

impl Beat {
    pub fn new(asked: Asked) -> Result<Beat, Failure> {
        if let Some(p) = &asked.progress
            && p.len() > limits::PROGRESS_BYTES
        {
            let detail = format!("is {} bytes long, at most {} are kept", p.len(), limits::PROGRESS_BYTES);
            return Err(check::invalid("progress", detail));
        }
        Ok(Beat { asked, stage: Stage::Begin })
    }

    /// The history, which can be long, is read only when the attempt has to be ended.
    fn look(&self, history: bool) -> Next {
        let id = self.asked.held.job;
        let mut records = vec![keys::job(id), keys::lease(id), keys::progress(id)];
        if history {
            records.push(keys::history(id));
        }
        Next::Read(Read { records, members: vec![(keys::LEASES, keys::member(id))], ..Read::default() })
    }
}

impl Operation for Beat {
    fn start(&mut self, _: &mut Cx<'_>) -> Next {
        self.stage = Stage::Begin;
        self.look(false)
    }

    fn read(&mut self, snapshot: Snapshot, cx: &mut Cx<'_>) -> Next {
        let [main, lease, reported, history @ ..] = &*snapshot.records else {
            return Next::fail(Failure::UnknownJob);
        };
        let held = &self.asked.held;
        let id = held.job;
        let (version, job) = match job_of(main, &held.tenant) {
            Ok(found) => found,
            Err(failure) => return Next::fail(failure),
        };
        let Some(current) = lease::present(held.token, lease) else {
            let cancelled = held.token.is_some_and(|t| view::cancelled_under(&job, t));
            return match cancelled {
                true => Next::ok(Response::Beat { lease_expires_at: None, cancel_requested: true }),
                false => Next::fail(Failure::LeaseLost),
            };
        };
        let granted = current.granted;
        let clock = snapshot.clock;
        let mine = lease::progress_of(reported, granted.version).map(|(p, _)| p);
        let heard = lease::heard(reported, &granted);
        if lease::deadline(&job, granted.at, heard).is_some_and(|d| clock >= d) {
            let Some(history) = history.first() else { return self.look(true) };
            let history = decode_record::<History>(history).ok().flatten().map(|(_, h)| h).unwrap_or_default();
            // A report of progress that came in between moves the deadline.
            let mut guards = vec![Guard::At(keys::lease(id), granted.version), as_read(keys::progress(id), reported)];
            if snapshot.members.first().is_some_and(Option::is_some) {
                // The clock of the commit decides, not that of the read.
                guards.push(Guard::Member(keys::LEASES, keys::member(id), Standing::Due));
            }
            let running = Running { id, job: &job, version, granted: Some(&granted), history };
            let decision = attempt::end(running, &Cause::of(AttemptEnd::TimedOut), clock, guards, cx);
            self.stage = Stage::TimedOut { dead: decision.status == Status::Dead };
            return Next::Commit(Plan::new(decision.drafts));
        }
        // An older seq extends the lease and changes nothing else.
        let newer = self.asked.progress.is_some()
            && match (self.asked.seq, mine.as_ref().and_then(|p| p.seq)) {
                (Some(seq), Some(before)) => seq > before,
                _ => true,
            };
        let heard = if newer { clock } else { heard };
        let mut ends = clock.saturating_add(lease::length(&granted.lease, &job));
        if let Some(deadline) = lease::deadline(&job, granted.at, heard) {
            ends = ends.min(deadline);
        }
        let stands = snapshot.members.first().copied().flatten().map(|p| p.score);
        // Heartbeats only ever raise a score, so a late one cannot shorten a lease.
        let mut guards = vec![Guard::At(keys::lease(id), granted.version)];
        let mut writes = vec![Write::Add {
            index: keys::LEASES,
            member: keys::member(id),
            score: ScoreAt::Number(ends),
            raise: true,
        }];
        if let (true, Some(value)) = (newer, &self.asked.progress) {
            let record = ProgressRecord { lease: granted.version, seq: self.asked.seq, value: value.bytes.to_vec() };
            guards.push(as_read(keys::progress(id), reported));
            writes.push(put(keys::progress(id), cx.make.version(), codec::encode(&record), Expiry::Never));
        }
        self.stage = Stage::Raised(ends.max(stands.unwrap_or(0)), guards.len());
        for (index, member) in moves::holdings(id, granted.lease.class, granted.lease.placed(), granted.version) {
            // slot-not-resurrected: the clock of the commit decides. A unit that lapsed or was lost has made room
            // for another, so it is never entered anew.
            guards.push(Guard::Member(index.clone(), member.clone(), Standing::Live));
            writes.push(Write::Add { index, member, score: ScoreAt::Number(ends), raise: true });
        }
        Next::Commit(Plan::new(vec![Draft::new(guards, writes)]))
    }

    fn answered(&mut self, _: Clock, answers: Vec<Answer>, cx: &mut Cx<'_>) -> Next {
        match self.stage {
            Stage::TimedOut { dead } => {
                if !applied(&answers) {
                    return self.start(cx);
                }
                cx.mark(Mark::RunTimedOut);
                cx.stats.timed_out += 1;
                cx.stats.dead += u64::from(dead);
                Next::fail(Failure::LeaseLost)
            }
            Stage::Raised(ends, _) if applied(&answers) => {
                cx.stats.heartbeats += 1;
                Next::ok(Response::Beat { lease_expires_at: Some(ends), cancel_requested: false })
            }
            Stage::Raised(_, slots) if matches!(answers.first(), Some(Answer::Refused(n)) if *n >= slots) => {
                cx.stats.slots_lost += 1;
                Next::fail(Failure::SlotLost)
            }
            Stage::Raised(..) | Stage::Begin => self.start(cx),
        }
    }
}
