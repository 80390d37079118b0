//! Claiming: one take moves the first jobs of the queues into leases, conflict-free.
//!
//! The take knows nothing of a job's own lengths and deadlines. Only for jobs that differ a second
//! commit, guarded by the lease, precedes the reply; a crash between the two is a lease that lapses.

use alloc::boxed::Box;
use alloc::collections::BTreeSet;
use alloc::format;
use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;

use super::check;
use super::handed::HandedOut;
use super::lease;
use super::moves::{self, Ending, Home, add};
use super::record::{AttemptEnd, Class, Job, Lease, ProgressRecord, Status, Terms, decode_content};
use crate::codec::{self, Undecodable};
use crate::event::{Item, Kind};
use crate::failure::Failure;
use crate::ids::{JobId, Token};
use crate::limits;
use crate::name::Name;
use crate::replica::Mark;
use crate::replica::task::{Cx, Draft, Evidence, EvidenceKind, Next, Operation, Plan, QueueInfo, Wait, decode_record};
use crate::request::{Claim as Asked, Leased, Response};
use crate::store::{
    Answer, Clock, Each, Expiry, Guard, Read, Record, ScoreAt, Snapshot, Source, Take, Value, Version, Write,
    decode_taken, keys,
};

#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct Claim {
    asked: Box<Asked>,
    stage: Stage,
    nonce: Version,
    /// Parallel to the take's sources.
    sources: Vec<(String, Class, u64)>,
    granted_at: Clock,
    items: Vec<Member>,
    /// Bytes of payload to be answered with.
    bytes: usize,
    /// What it found is another try's, which may have told its asker.
    repeats: bool,
    /// Queues found paused by this very try. That is never remembered beyond it: a paused queue is
    /// left out, so no guard would ever tell that it has been resumed.
    paused: BTreeSet<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
enum Stage {
    /// Queues' settings, and the receipt if the claim has an id.
    Settings(Vec<String>),
    Take,
    /// The receipt, after its guard refused or a lost reply.
    Receipt,
    /// The leases that a receipt names.
    Repeat,
    /// Records that did not fit into the take's answer.
    Rest(Vec<(usize, Part)>),
    /// The second commit: which item each of its transactions is for, and the lease's new end.
    Exceptions(Vec<(usize, Fix)>),
    /// Nobody is there any more to take the jobs.
    Undo,
}

/// What a transaction of the second commit does about one job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
enum Fix {
    /// Its lease ends at this clock; it is handed out.
    Ends(Clock),
    /// It is not handed out.
    Lost,
    Quarantined,
    Expired,
    PutBack,
}

/// Which record of a job is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
enum Part {
    Job,
    /// Read with a job that is read late: the two must be of one moment.
    Lease,
    Payload,
}

/// A member taken, with its records as far as they have been read.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
struct Member {
    id: JobId,
    source: usize,
    score: u64,
    job: Option<Record>,
    payload: Option<Record>,
    lease_ends: Clock,
    /// The lease's end has been set to what the job wants.
    fixed: bool,
    /// Left out of the answer: ended, lost, or not held any more.
    out: bool,
}

impl Member {
    /// Its queue deadline, as far as it can be read.
    fn deadline(&self) -> Option<Clock> {
        let record = self.job.as_ref()?;
        let (_, job) = decode_record::<Job>(record).ok()??;
        queue_deadline(&job, record.at()?)
    }
}

impl Claim {
    pub fn new(asked: Box<Asked>) -> Result<Claim, Failure> {
        check::name("worker", &asked.worker)?;
        if asked.queues.is_empty() || asked.queues.len() > limits::CLAIM_QUEUES {
            let detail = format!("must name 1 to {} queues", limits::CLAIM_QUEUES);
            return Err(check::invalid("queues", detail));
        }
        for queue in &asked.queues {
            check::name("queues", queue)?;
        }
        check::within("max", Some(asked.max as u64), 1, limits::CLAIM_JOBS as u64)?;
        check::within("wait_ms", Some(asked.wait_ms), 0, limits::WAIT_MS)?;
        check::within("lease_ms", asked.lease_ms, limits::LEASE_MS_MIN, limits::LEASE_MS_MAX)?;
        if let Some(id) = &asked.claim_id {
            check::name("claim_id", id)?;
        }
        let mut asked = asked;
        let mut seen = BTreeSet::new();
        asked.queues.retain(|q| seen.insert(q.clone()));
        Ok(Claim {
            asked,
            stage: Stage::Take,
            nonce: Version(0),
            sources: Vec::new(),
            granted_at: 0,
            items: Vec::new(),
            bytes: 0,
            repeats: false,
            paused: BTreeSet::new(),
        })
    }

    pub fn wait_ms(&self) -> u64 {
        self.asked.wait_ms
    }

    /// Whether the claim was filled, so that there may be more where this came from.
    pub fn filled(&self) -> bool {
        self.items.len() >= self.asked.max
    }

    pub fn topics(&self) -> Vec<Name> {
        self.asked.queues.iter().map(|q| keys::topic_queue(&self.asked.tenant, q)).collect()
    }

    fn terms(&self) -> Terms {
        if self.asked.lease_ms.is_some() { Terms::Asked } else { Terms::Standard }
    }

    fn receipt(&self) -> Name {
        match &self.asked.claim_id {
            // Own ids cannot meet the client's: those have a part before the slash.
            Some(id) => keys::receipt(&self.asked.tenant, id),
            None => keys::receipt("", &format!("{:016x}", self.nonce.0)),
        }
    }

    fn take(&mut self, cx: &mut Cx<'_>) -> Next {
        let unknown: Vec<String> = self
            .asked
            .queues
            .iter()
            .filter(|q| !self.paused.contains(*q) && cx.queues.get(&self.asked.tenant, q).is_none())
            .cloned()
            .collect();
        if !unknown.is_empty() {
            let mut records: Vec<Name> = unknown.iter().map(|q| keys::queue(&self.asked.tenant, q)).collect();
            if self.asked.claim_id.is_some() {
                records.push(self.receipt());
            }
            self.stage = Stage::Settings(unknown);
            return Next::Read(Read { records, ..Read::default() });
        }
        self.nonce = cx.make.version();
        let tenant = &self.asked.tenant;
        let mut guards = vec![Guard::Absent(self.receipt())];
        let mut open = Vec::new();
        for queue in &self.asked.queues {
            let Some(info) = cx.queues.get(tenant, queue) else { continue };
            guards.push(info.guard(keys::queue(tenant, queue)));
            let length = self.asked.lease_ms.or(info.record.lease_ms).unwrap_or(cx.config.lease_ms);
            open.push((queue.clone(), length));
        }
        if open.is_empty() {
            return self.nothing(cx);
        }
        self.sources.clear();
        let mut from = Vec::new();
        for class in Class::ALL {
            for (queue, length_ms) in &open {
                let home = Home { tenant, queue, class };
                let lease = Lease {
                    worker: self.asked.worker.clone(),
                    tenant: tenant.clone(),
                    queue: queue.clone(),
                    class,
                    length_ms: *length_ms,
                    terms: self.terms(),
                };
                let queued = home.index(Status::Queued);
                from.push(Source {
                    index: queued.clone(),
                    due: false,
                    each: vec![
                        // The due score goes along, so that a lapse or release finds the old place.
                        Each::Add { index: home.index(Status::Running), score: ScoreAt::Of(queued) },
                        Each::Add {
                            index: keys::LEASES,
                            score: ScoreAt::Clock(length_ms.saturating_mul(limits::MILLI)),
                        },
                        Each::Remove { index: keys::TTL },
                        Each::Put {
                            prefix: keys::LEASE,
                            version: self.nonce,
                            bytes: codec::encode(&lease),
                            expiry: Expiry::Never,
                        },
                    ],
                });
                self.sources.push((queue.clone(), class, *length_ms));
            }
        }
        let longest = open.iter().map(|o| o.1).max().unwrap_or(0).saturating_mul(limits::MILLI);
        let receipt_lives = match self.asked.claim_id {
            Some(_) => longest.max(limits::STUB),
            None => limits::RECEIPT_OWN,
        };
        let event = Item::Claimed {
            worker: self.asked.worker.clone(),
            queues: self.sources.iter().map(|(queue, class, _)| (queue.clone(), *class)).collect(),
        };
        let writes = vec![
            Write::Put {
                key: self.receipt(),
                version: self.nonce,
                value: Value::Taken,
                expiry: Expiry::Clock(receipt_lives),
            },
            Write::Append { log: keys::audit(tenant), bytes: event.encode() },
        ];
        let take =
            Take { n: self.asked.max, from, give: vec![keys::JOB, keys::PAYLOAD], max_bytes: limits::READ_BYTES };
        self.stage = Stage::Take;
        Next::Commit(Plan {
            txns: vec![Draft { guards, take: Some(take), writes }],
            grows: false,
            evidence: Some(Evidence { key: self.receipt(), own: self.nonce, found: None, kind: EvidenceKind::Plain }),
        })
    }

    fn nothing(&mut self, cx: &mut Cx<'_>) -> Next {
        if self.asked.wait_ms == 0 || cx.last_try {
            cx.stats.claims_empty += 1;
            return Next::ok(Response::Claimed(Vec::new()));
        }
        Next::Wait(Wait::on(self.topics()))
    }

    /// The leases of a receipt: those that still stand, never new ones.
    fn repeat(&mut self, record: &Record, cx: &mut Cx<'_>) -> Next {
        let Some(version) = record.version() else { return self.take(cx) };
        let Some(taken) = record.bytes().and_then(|b| decode_taken(b)) else {
            return Next::fail(match record.is_newer() {
                true => Failure::NewerFormat { retry_after_ms: 10_000 },
                false => Failure::Quarantined,
            });
        };
        cx.mark(Mark::ClaimRepeated);
        self.repeats = true;
        self.nonce = version;
        self.items = taken
            .iter()
            .filter_map(|t| {
                let id = keys::job_of(&t.member)?;
                Some(Member {
                    id,
                    source: t.source as usize,
                    score: t.score,
                    job: None,
                    payload: None,
                    lease_ends: 0,
                    fixed: false,
                    out: false,
                })
            })
            .collect();
        self.stage = Stage::Repeat;
        // Lease and job of one moment: the attempt's number is counted from both.
        let records =
            self.items.iter().flat_map(|i| [keys::lease(i.id), keys::progress(i.id), keys::job(i.id)]).collect();
        let members = self.items.iter().map(|i| (keys::LEASES, keys::member(i.id))).collect();
        Next::Read(Read { records, members, ..Read::default() })
    }

    fn repeated(&mut self, snapshot: &Snapshot, cx: &mut Cx<'_>) -> Next {
        let nonce = self.nonce;
        let mut sources = Vec::new();
        let records = snapshot.records.chunks(3);
        for ((item, records), place) in self.items.iter_mut().zip(records).zip(&snapshot.members) {
            let [lease, progress, job] = records else { continue };
            match lease::Granted::read(lease) {
                Some(granted) if granted.version == nonce => {
                    self.granted_at = granted.at;
                    let length = granted.lease.length_ms.saturating_mul(limits::MILLI);
                    item.lease_ends = place.map_or(granted.at.saturating_add(length), |p| p.score);
                    item.fixed = lease::progress_of(progress, nonce).is_some();
                    item.job = Some(job.clone());
                    item.source = sources.len();
                    sources.push((granted.lease.queue, granted.lease.class, granted.lease.length_ms));
                }
                _ => item.out = true,
            }
        }
        self.sources = sources;
        self.items.retain(|i| !i.out);
        self.fetch(cx)
    }

    /// Reads what is still missing of jobs and payloads, as much as one answer carries.
    fn fetch(&mut self, cx: &mut Cx<'_>) -> Next {
        let mut wanted = Vec::new();
        let mut records = Vec::new();
        let mut planned = self.bytes;
        for (at, item) in self.items.iter().enumerate() {
            let missing = |r: &Option<Record>| r.as_ref().is_none_or(Record::is_unread);
            if missing(&item.job) {
                records.push(keys::job(item.id));
                wanted.push((at, Part::Job));
                records.push(keys::lease(item.id));
                wanted.push((at, Part::Lease));
            }
            if missing(&item.payload) {
                let len = payload_len(item);
                if planned == 0 || planned.saturating_add(len) <= limits::CLAIM_BYTES {
                    planned = planned.saturating_add(len);
                    records.push(keys::payload(item.id));
                    wanted.push((at, Part::Payload));
                }
            }
        }
        if wanted.is_empty() {
            return self.examine(cx);
        }
        self.stage = Stage::Rest(wanted);
        Next::Read(Read { records, ..Read::default() })
    }

    fn fetched(&mut self, wanted: &[(usize, Part)], records: Vec<Record>, cx: &mut Cx<'_>) -> Next {
        for ((at, part), record) in wanted.iter().zip(records) {
            let Some(item) = self.items.get_mut(*at) else { continue };
            match part {
                Part::Job => item.job = Some(record),
                Part::Lease => item.out |= record.version() != Some(self.nonce),
                Part::Payload => {
                    self.bytes += record.bytes().map_or(0, |b| b.len());
                    item.payload = Some(record);
                }
            }
        }
        self.items.retain(|i| !i.out);
        self.fetch(cx)
    }

    /// Finds the jobs that need a second commit.
    fn examine(&mut self, cx: &mut Cx<'_>) -> Next {
        if cx.orphan && self.asked.claim_id.is_none() {
            return self.undo(cx);
        }
        let mut drafts = Vec::new();
        let mut of = Vec::new();
        for at in 0..self.items.len() {
            let Some((found, fix)) = self.exception(at, cx) else { continue };
            let Some(item) = self.items.get_mut(at) else { continue };
            item.out |= !matches!(fix, Fix::Ends(_));
            for draft in found {
                drafts.push(draft);
                of.push((at, fix));
            }
        }
        if drafts.is_empty() {
            return self.reply(cx);
        }
        cx.mark(Mark::ClaimExceptions);
        self.stage = Stage::Exceptions(of);
        Next::Commit(Plan::new(drafts))
    }

    /// What must be done about one job taken before it may be handed out.
    fn exception(&self, at: usize, cx: &mut Cx<'_>) -> Option<(Vec<Draft>, Fix)> {
        let item = self.items.get(at)?;
        let (queue, class, length_ms) = self.sources.get(item.source)?;
        let home = Home { tenant: &self.asked.tenant, queue, class: *class };
        let id = item.id;
        let held = Guard::At(keys::lease(id), self.nonce);
        let record = item.job.as_ref()?;
        if record.is_newer() || item.payload.as_ref().is_some_and(Record::is_newer) {
            cx.mark(Mark::NewerFormat);
            if self.repeats {
                // one-live-lease: whoever asked first may have heard of it, and run it. It is left out, and alone.
                return Some((Vec::new(), Fix::PutBack));
            }
            return Some((vec![put_back(id, home, item.score, held, None, item.deadline())], Fix::PutBack));
        }
        let (version, job) = match decode_record::<Job>(record) {
            Ok(Some(found)) => found,
            Ok(None) => {
                return Some((vec![moves::lost(id, Some(home), &[], vec![held], cx.make.version())], Fix::Lost));
            }
            Err(_) => {
                return Some((
                    vec![moves::quarantine(id, Some(home), record, vec![held], cx.make.version())],
                    Fix::Quarantined,
                ));
            }
        };
        let granted = self.granted(queue, *class, *length_ms);
        let payload_gone = match &item.payload {
            Some(Record::Absent) => true,
            Some(r) => r.bytes().is_some_and(|b| decode_content(b).is_err()),
            None => false,
        };
        if payload_gone {
            // no-ghosts: never run with an empty payload.
            let mut leave = moves::leave_running(id, home, None);
            leave.push(home.event(Kind::Lost, id, None, Some("payload")));
            return Some((
                self.end(id, &job, version, &granted, Status::Dead, Some("lost"), held, leave, cx),
                Fix::Lost,
            ));
        }
        // Until its first attempt ends the record is as it was put when this life began.
        let born = record.at().unwrap_or(job.born);
        let expired = job.deliveries == 0
            && job
                .policy
                .queue_ttl_ms
                .is_some_and(|ttl| self.granted_at >= born.saturating_add(ttl.saturating_mul(limits::MILLI)));
        if expired {
            let leave = moves::leave_running(id, home, None);
            return Some((self.end(id, &job, version, &granted, Status::Expired, None, held, leave, cx), Fix::Expired));
        }
        let default = self.granted_at.saturating_add(length_ms.saturating_mul(limits::MILLI));
        let own = self.granted_at.saturating_add(lease::length(&granted.lease, &job));
        let deadline = lease::deadline(&job, self.granted_at, self.granted_at);
        let ends = deadline.map_or(own, |d| own.min(d));
        if item.fixed || ends == default {
            return None;
        }
        // An empty report of progress tells that this has been done, so that a second application,
        // late, cannot cut a lease that heartbeats have raised since.
        let marker = ProgressRecord { lease: self.nonce, seq: None, value: Vec::new() };
        let guards = vec![held, Guard::Absent(keys::progress(id))];
        let writes = vec![
            add(keys::LEASES, &keys::member(id), ScoreAt::Number(ends)),
            moves::put(keys::progress(id), cx.make.version(), codec::encode(&marker), Expiry::Never),
        ];
        Some((vec![Draft::new(guards, writes)], Fix::Ends(ends)))
    }

    /// What the take granted to each job of one source.
    fn granted(&self, queue: &str, class: Class, length_ms: u64) -> lease::Granted {
        let lease = Lease {
            worker: self.asked.worker.clone(),
            tenant: self.asked.tenant.clone(),
            queue: queue.into(),
            class,
            length_ms,
            terms: self.terms(),
        };
        lease::Granted { lease, version: self.nonce, at: self.granted_at }
    }

    #[expect(clippy::too_many_arguments)]
    fn end(
        &self,
        id: JobId,
        job: &Job,
        version: Version,
        granted: &lease::Granted,
        status: Status,
        reason: Option<&str>,
        held: Guard,
        leave: Vec<Write>,
        cx: &mut Cx<'_>,
    ) -> Vec<Draft> {
        let ending = Ending {
            status,
            reason: reason.map(String::from),
            result_len: None,
            attempt: Some(lease::attempt(job, Some(granted), AttemptEnd::Expired, self.granted_at, None)),
            attempts: job.attempts,
            deliveries: job.deliveries,
        };
        let own = cx.make.version();
        moves::end(id, job, version, own, self.granted_at, &ending, vec![held], leave, cx)
    }

    /// The jobs go back to their places as if they had not been taken: the asker left before it could
    /// hear of them.
    fn undo(&mut self, cx: &mut Cx<'_>) -> Next {
        cx.mark(Mark::ClaimUndone);
        self.stage = Stage::Undo;
        let mut drafts = Vec::new();
        for item in self.items.iter().filter(|i| !i.out) {
            let Some((queue, class, _)) = self.sources.get(item.source) else { continue };
            let home = Home { tenant: &self.asked.tenant, queue, class: *class };
            let held = Guard::At(keys::lease(item.id), self.nonce);
            drafts.push(put_back(item.id, home, item.score, held, None, item.deadline()));
        }
        if drafts.is_empty() {
            return Next::ok(Response::Claimed(Vec::new()));
        }
        Next::Commit(Plan::new(drafts))
    }

    fn reply(&mut self, cx: &mut Cx<'_>) -> Next {
        if cx.orphan && self.asked.claim_id.is_none() {
            // The asker left while the second commit was under way.
            return self.undo(cx);
        }
        let mut jobs = Vec::new();
        for item in self.items.iter().filter(|i| !i.out) {
            let Some((queue, class, length_ms)) = self.sources.get(item.source) else { continue };
            let Some(Ok(Some((version, job)))) = item.job.as_ref().map(decode_record::<Job>) else { continue };
            let payload = match &item.payload {
                Some(Record::Absent) => continue,
                Some(record) => match record.bytes().map(decode_content) {
                    Some(Ok(content)) => Some(content),
                    Some(Err(_)) => continue,
                    None => None,
                },
                None => None,
            };
            let ends = match item.lease_ends {
                0 => self.granted_at.saturating_add(length_ms.saturating_mul(limits::MILLI)),
                ends => ends,
            };
            cx.stats.waited.count(self.granted_at.saturating_sub(item.score));
            jobs.push(Leased {
                id: item.id,
                token: Token { at: self.granted_at, nonce: self.nonce },
                attempt: job.attempts.saturating_add(1),
                delivery: job.deliveries.saturating_add(1),
                queue: queue.clone(),
                class: *class,
                payload,
                lease_expires_at: ends,
                traceparent: job.traceparent.clone(),
                metadata: job.metadata.clone().map(crate::opaque::Opaque::new),
            });
            let granted = self.granted(queue, *class, *length_ms);
            cx.handed.put(item.id, HandedOut { version, job, granted });
        }
        cx.stats.claims += 1;
        cx.stats.claimed += jobs.len() as u64;
        Next::ok(Response::Claimed(jobs))
    }
}

/// What was met is counted once it has been dealt with.
fn count(fix: Fix, cx: &mut Cx<'_>) {
    match fix {
        Fix::Lost => {
            cx.stats.lost += 1;
            cx.mark(Mark::JobLost);
        }
        Fix::Quarantined => {
            cx.stats.quarantined += 1;
            cx.mark(Mark::JobQuarantined);
        }
        Fix::Expired => cx.stats.expired += 1,
        Fix::Ends(_) | Fix::PutBack => {}
    }
}

/// Bytes of a payload that has not been read.
fn payload_len(item: &Member) -> usize {
    match (&item.payload, &item.job) {
        (Some(Record::Present { len, .. }), _) => *len,
        (_, Some(job)) => decode_record::<Job>(job).ok().flatten().map_or(0, |(_, j)| j.payload_len as usize),
        _ => 0,
    }
}

/// When a job that has not been delivered is to be given up, if ever.
pub(crate) fn queue_deadline(job: &Job, born: Clock) -> Option<Clock> {
    let ttl = job.policy.queue_ttl_ms.filter(|_| job.deliveries == 0)?;
    Some(born.saturating_add(ttl.saturating_mul(limits::MILLI)))
}

/// A job that was taken goes back to its place as if it had not been; with its queue deadline, if it has one.
pub(crate) fn put_back(
    id: JobId,
    home: Home<'_>,
    score: u64,
    held: Guard,
    granted: Option<&lease::Granted>,
    deadline: Option<Clock>,
) -> Draft {
    let mut writes = moves::leave_running(id, home, granted);
    writes.extend(deadline.map(|at| add(keys::TTL, &keys::member(id), ScoreAt::Number(at))));
    writes.push(add(home.index(Status::Queued), &keys::member(id), ScoreAt::Number(score)));
    writes.push(home.event(Kind::Released, id, None, Some("undelivered")));
    writes.push(Write::Notify(home.topic()));
    Draft::new(vec![held], writes)
}

impl Operation for Claim {
    fn start(&mut self, cx: &mut Cx<'_>) -> Next {
        self.items.clear();
        self.paused.clear();
        self.bytes = 0;
        self.granted_at = 0;
        self.repeats = false;
        if cx.stats.newer_format {
            return Next::fail(Failure::NewerFormat { retry_after_ms: 10_000 });
        }
        self.take(cx)
    }

    fn read(&mut self, snapshot: Snapshot, cx: &mut Cx<'_>) -> Next {
        match core::mem::replace(&mut self.stage, Stage::Take) {
            Stage::Settings(queues) => {
                let mut records = snapshot.records.iter();
                for (queue, record) in queues.iter().zip(&mut records) {
                    match QueueInfo::decode(record) {
                        Ok(info) if info.record.paused => {
                            self.paused.insert(queue.clone());
                        }
                        Ok(info) => cx.queues.put(&self.asked.tenant, queue, info),
                        Err(Undecodable::Newer) => {
                            cx.mark(Mark::NewerFormat);
                            return Next::fail(Failure::NewerFormat { retry_after_ms: 10_000 });
                        }
                        Err(Undecodable::Corrupt) => return Next::fail(Failure::Quarantined),
                    }
                }
                match records.next() {
                    Some(receipt) if !receipt.is_absent() => self.repeat(receipt, cx),
                    _ => self.take(cx),
                }
            }
            Stage::Receipt => {
                let record = snapshot.records.first().cloned().unwrap_or(Record::Absent);
                self.repeat(&record, cx)
            }
            Stage::Repeat => self.repeated(&snapshot, cx),
            Stage::Rest(wanted) => self.fetched(&wanted, snapshot.records, cx),
            Stage::Take | Stage::Exceptions(_) | Stage::Undo => self.take(cx),
        }
    }

    fn answered(&mut self, clock: Clock, answers: Vec<Answer>, cx: &mut Cx<'_>) -> Next {
        match core::mem::replace(&mut self.stage, Stage::Take) {
            Stage::Exceptions(of) => {
                let mut done: Vec<Option<(bool, Fix)>> = vec![None; self.items.len()];
                for ((at, fix), answer) in of.into_iter().zip(&answers) {
                    let Some(slot) = done.get_mut(at) else { continue };
                    let applied = matches!(answer, Answer::Applied { .. });
                    *slot = Some((slot.is_some_and(|s| s.0) || applied, fix));
                    if applied {
                        count(fix, cx);
                    }
                }
                if done.iter().flatten().any(|(applied, fix)| !applied && matches!(fix, Fix::Ends(_))) {
                    // The lease is gone, or a repeat of this claim was quicker: what stands, counts.
                    self.stage = Stage::Receipt;
                    return Next::Read(Read { records: vec![self.receipt()], ..Read::default() });
                }
                for (item, done) in self.items.iter_mut().zip(done) {
                    if let Some((_, Fix::Ends(ends))) = done {
                        item.lease_ends = ends;
                    }
                }
                if self.items.iter().all(|i| i.out) {
                    // All that was taken was unfit to be handed out: look for more.
                    return self.start(cx);
                }
                self.reply(cx)
            }
            Stage::Undo => Next::ok(Response::Claimed(Vec::new())),
            _ => match answers.into_iter().next() {
                Some(Answer::Applied { taken }) => {
                    self.granted_at = clock;
                    self.items = taken
                        .into_iter()
                        .filter_map(|t| {
                            let mut records = t.records.into_iter();
                            let id = keys::job_of(&t.member)?;
                            Some(Member {
                                id,
                                source: t.source as usize,
                                score: t.score,
                                job: records.next(),
                                payload: records.next(),
                                lease_ends: 0,
                                fixed: false,
                                out: false,
                            })
                        })
                        .collect();
                    self.bytes = self.items.iter().filter_map(|i| i.payload.as_ref()?.bytes()).map(|b| b.len()).sum();
                    self.fetch(cx)
                }
                Some(Answer::Empty) => self.nothing(cx),
                Some(Answer::Refused(0)) if self.asked.claim_id.is_some() => {
                    self.stage = Stage::Receipt;
                    Next::Read(Read { records: vec![self.receipt()], ..Read::default() })
                }
                Some(Answer::Refused(_)) => {
                    for queue in &self.asked.queues {
                        cx.queues.forget(&self.asked.tenant, queue);
                    }
                    self.start(cx)
                }
                _ => self.start(cx),
            },
        }
    }

    fn settled(&mut self, _: Clock, _: &mut Cx<'_>) -> Next {
        self.stage = Stage::Receipt;
        Next::Read(Read { records: vec![self.receipt()], ..Read::default() })
    }

    fn doubtful(&mut self, cx: &mut Cx<'_>) -> Next {
        match core::mem::replace(&mut self.stage, Stage::Take) {
            // Those it was about are left out: their leases lapse and the sweep meets the same facts.
            Stage::Exceptions(of) => {
                for (at, _) in of {
                    if let Some(item) = self.items.get_mut(at) {
                        item.out = true;
                    }
                }
                self.reply(cx)
            }
            Stage::Undo => Next::ok(Response::Claimed(Vec::new())),
            _ => self.start(cx),
        }
    }
}
