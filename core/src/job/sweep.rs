//! The sweeps: leases to reclaim, jobs to promote, queue deadlines, names of idle queues. Their cost
//! is what is due, not what exists.

use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;

use super::attempt::{self, Cause, Running};
use super::lease::Granted;
use super::moves::{self, Ending, Home, add, as_read, remove};
use super::record::{AttemptEnd, Class, History, Job, Status};
use crate::codec::Undecodable;
use crate::ids::JobId;
use crate::limits;
use crate::name::Name;
use crate::replica::Mark;
use crate::replica::task::{Cx, Draft, Next, Operation, Plan, QueueInfo, decode_record};
use crate::request::Response;
use crate::store::{
    Answer, Clock, Entry, Guard, Read, Record, ScoreAt, Slice, Snapshot, Source, Span, Standing, Take, UpTo, Write,
    keys,
};

/// Reclaims, promotes and expires what is due.
#[derive(Clone, Debug, Default, serde::Serialize, serde::Deserialize)]
pub(crate) struct Deadlines {
    what: Vec<Did>,
    /// When there will be something to do next, by the store's clock.
    pub next: Option<Clock>,
    /// A page was full: there is more.
    pub more: bool,
    committing: bool,
}

/// What one transaction is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
enum Did {
    Lapsed,
    TimedOut,
    Dead,
    Promoted,
    Expired,
    Lost,
    Quarantined,
    Ghost,
}

fn due_slice(index: Name, limit: usize, give: Vec<Name>) -> Slice {
    Slice { index, after: None, up_to: UpTo::Clock, limit, give }
}

/// A member whose record has vanished, and with it what would tell whose it was. It leaves the deadline
/// indexes; whoever meets it in its status index knows its home, and tells and counts it as lost.
fn vanished(id: JobId, mut guards: Vec<Guard>) -> Draft {
    let member = keys::member(id);
    guards.push(Guard::Absent(keys::job(id)));
    Draft::new(guards, [keys::LEASES, keys::DUE, keys::TTL].map(|index| remove(index, &member)).into())
}

/// The next members whose time has not come: those tell when to look again.
fn soon(index: Name, clock: Clock) -> Slice {
    let past = Name::from_static("\u{7f}");
    Slice { index, after: Some((clock, past)), up_to: UpTo::End, limit: 4, give: Vec::new() }
}

fn due(index: Name, id: JobId) -> Guard {
    Guard::Member(index, keys::member(id), Standing::Due)
}

impl Deadlines {
    fn lapse(&mut self, entry: &Entry, clock: Clock, cx: &mut Cx<'_>) -> Option<Vec<Draft>> {
        let id = keys::job_of(&entry.member)?;
        let [main, lease, progress, history] = &*entry.records else { return None };
        let granted = Granted::read(lease);
        let granted_at = granted.as_ref().map_or(0, |g| g.at);
        if clock < cx.spare_until && granted_at < cx.spare_before {
            // The store could not be reached for a while: living holders renew first.
            return None;
        }
        // Another lease of the same job, or one renewed meanwhile, must not be cut.
        let guards = vec![as_read(keys::lease(id), lease), due(keys::LEASES, id)];
        let home = granted.as_ref().map(|g| Home::from(&g.lease));
        match decode_record::<Job>(main) {
            Ok(None) if home.is_none() => {
                self.what.push(Did::Ghost);
                Some(vec![vanished(id, guards)])
            }
            Ok(None) => {
                self.what.push(Did::Lost);
                Some(vec![moves::lost(id, home, &[], guards, cx.make.version())])
            }
            Err(Undecodable::Newer) => {
                cx.mark(Mark::NewerFormat);
                None
            }
            Err(Undecodable::Corrupt) => {
                self.what.push(Did::Quarantined);
                Some(vec![moves::quarantine(id, home, main, guards, cx.make.version())])
            }
            Ok(Some((_, job))) if job.end.is_some() => {
                // A ghost: its job has ended.
                self.what.push(Did::Ghost);
                let writes = vec![remove(keys::LEASES, &entry.member), Write::Delete(keys::lease(id))];
                let mut guards = guards;
                guards.push(Guard::At(keys::job(id), main.version()?));
                Some(vec![Draft::new(guards, writes)])
            }
            Ok(Some((version, job))) => {
                let history: History = decode_record(history).ok().flatten().map(|(_, h)| h).unwrap_or_default();
                let end = attempt::reclaimed(&job, granted.as_ref(), progress, clock);
                let mut guards = guards;
                if end == AttemptEnd::TimedOut {
                    // A report of progress that came in between moves the deadline.
                    guards.push(as_read(keys::progress(id), progress));
                }
                let running = Running { id, job: &job, version, granted: granted.as_ref(), history };
                let decision = attempt::end(running, &Cause::of(end), clock, guards, cx);
                let did = match (decision.status, end) {
                    (Status::Dead, _) => Did::Dead,
                    (_, AttemptEnd::TimedOut) => Did::TimedOut,
                    _ => Did::Lapsed,
                };
                // Alternatives count once: the second is told apart by its refusal.
                self.what.extend(decision.drafts.iter().map(|_| did));
                Some(decision.drafts)
            }
        }
    }

    fn promote(&mut self, entry: &Entry, cx: &mut Cx<'_>) -> Option<Draft> {
        let id = keys::job_of(&entry.member)?;
        let [main, lease] = &*entry.records else { return None };
        // one-live-lease: a ghost in `due` must not queue a job that runs.
        let mut guards = vec![due(keys::DUE, id), as_read(keys::lease(id), lease)];
        match decode_record::<Job>(main) {
            Ok(Some((version, job))) => {
                guards.push(Guard::At(keys::job(id), version));
                if job.end.is_some() || !lease.is_absent() {
                    self.what.push(Did::Ghost);
                    return Some(Draft::new(guards, vec![remove(keys::DUE, &entry.member)]));
                }
                let home = Home::from(&job);
                self.what.push(Did::Promoted);
                let writes = vec![
                    add(home.index(Status::Queued), &entry.member, ScoreAt::Of(keys::DUE)),
                    remove(keys::DUE, &entry.member),
                    remove(home.index(Status::Scheduled), &entry.member),
                    remove(home.index(Status::Retrying), &entry.member),
                    Write::Notify(home.topic()),
                ];
                Some(Draft::new(guards, writes))
            }
            Ok(None) => {
                self.what.push(Did::Ghost);
                Some(vanished(id, guards))
            }
            Err(Undecodable::Newer) => {
                cx.mark(Mark::NewerFormat);
                None
            }
            Err(Undecodable::Corrupt) => {
                self.what.push(Did::Quarantined);
                Some(moves::quarantine(id, None, main, guards, cx.make.version()))
            }
        }
    }

    fn expire(&mut self, entry: &Entry, clock: Clock, cx: &mut Cx<'_>) -> Option<Vec<Draft>> {
        let id = keys::job_of(&entry.member)?;
        let [main, lease] = &*entry.records else { return None };
        let mut guards = vec![due(keys::TTL, id)];
        match decode_record::<Job>(main) {
            Ok(Some((version, job))) if job.end.is_none() && lease.is_absent() => {
                guards.push(Guard::Absent(keys::lease(id)));
                let leave = moves::leave_waiting(id, Home::from(&job));
                let ending = Ending {
                    status: Status::Expired,
                    reason: None,
                    result_len: None,
                    attempt: None,
                    attempts: job.attempts,
                    deliveries: job.deliveries,
                };
                let own = cx.make.version();
                let drafts = moves::end(id, &job, version, own, clock, &ending, guards, leave, cx);
                self.what.extend(drafts.iter().map(|_| Did::Expired));
                Some(drafts)
            }
            Ok(Some((version, _))) => {
                self.what.push(Did::Ghost);
                guards.push(Guard::At(keys::job(id), version));
                Some(vec![Draft::new(guards, vec![remove(keys::TTL, &entry.member)])])
            }
            Ok(None) => {
                self.what.push(Did::Ghost);
                Some(vec![vanished(id, guards)])
            }
            Err(Undecodable::Newer) => {
                cx.mark(Mark::NewerFormat);
                None
            }
            Err(Undecodable::Corrupt) => {
                self.what.push(Did::Quarantined);
                Some(vec![moves::quarantine(id, None, main, guards, cx.make.version())])
            }
        }
    }
}

impl Operation for Deadlines {
    fn start(&mut self, cx: &mut Cx<'_>) -> Next {
        *self = Deadlines::default();
        Next::Read(Read {
            slices: vec![
                // Leases last: after an outage a page of them may be spared and use up the answer's room.
                due_slice(keys::DUE, limits::SWEEP_DUE, vec![keys::JOB, keys::LEASE]),
                due_slice(keys::TTL, limits::SWEEP_TTL, vec![keys::JOB, keys::LEASE]),
                due_slice(
                    keys::LEASES,
                    limits::SWEEP_LEASES,
                    vec![keys::JOB, keys::LEASE, keys::PROGRESS, keys::HISTORY],
                ),
                soon(keys::LEASES, cx.clock),
                soon(keys::DUE, cx.clock),
                soon(keys::TTL, cx.clock),
            ],
            ..Read::default()
        })
    }

    fn read(&mut self, snapshot: Snapshot, cx: &mut Cx<'_>) -> Next {
        let clock = snapshot.clock;
        let [due, ttl, leases, heads @ ..] = &*snapshot.slices else { return Next::ok(Response::Ready) };
        let mut drafts = Vec::new();
        for entry in leases.iter().filter(|e| readable(e)) {
            drafts.extend(self.lapse(entry, clock, cx).into_iter().flatten());
        }
        for entry in due.iter().filter(|e| readable(e)) {
            drafts.extend(self.promote(entry, cx));
        }
        for entry in ttl.iter().filter(|e| readable(e)) {
            drafts.extend(self.expire(entry, clock, cx).into_iter().flatten());
        }
        self.next = heads.iter().flatten().map(|e| e.score).filter(|s| *s > clock).min();
        self.more = !drafts.is_empty()
            && (leases.len() >= limits::SWEEP_LEASES
                || due.len() >= limits::SWEEP_DUE
                || ttl.len() >= limits::SWEEP_TTL
                || [leases, due, ttl].into_iter().flatten().any(|e| !readable(e)));
        if drafts.is_empty() {
            return Next::ok(Response::Ready);
        }
        self.committing = true;
        Next::Commit(Plan::new(drafts))
    }

    fn answered(&mut self, _: Clock, answers: Vec<Answer>, cx: &mut Cx<'_>) -> Next {
        for (did, _) in self.what.iter().zip(&answers).filter(|(_, a)| matches!(a, Answer::Applied { .. })) {
            let (count, mark) = match did {
                Did::Lapsed => (&mut cx.stats.leases_lapsed, Some(Mark::LeaseLapsed)),
                Did::TimedOut => (&mut cx.stats.timed_out, Some(Mark::RunTimedOut)),
                Did::Dead => (&mut cx.stats.dead, None),
                Did::Promoted => (&mut cx.stats.promoted, None),
                Did::Expired => (&mut cx.stats.expired, None),
                Did::Lost => (&mut cx.stats.lost, Some(Mark::JobLost)),
                Did::Quarantined => (&mut cx.stats.quarantined, Some(Mark::JobQuarantined)),
                Did::Ghost => (&mut cx.stats.ghosts, Some(Mark::GhostRemoved)),
            };
            *count += 1;
            cx.marks.extend(mark);
        }
        Next::ok(Response::Ready)
    }

    fn doubtful(&mut self, _: &mut Cx<'_>) -> Next {
        // Nobody waits for it; the next look meets the same facts.
        Next::ok(Response::Ready)
    }
}

/// Whether everything asked for of an entry came within the answer's budget.
fn readable(entry: &Entry) -> bool {
    !entry.records.iter().any(Record::is_unread)
}

/// Trims the terminal indexes of queues whose time has come, and forgets the names of idle ones.
#[derive(Clone, Debug, Default, serde::Serialize, serde::Deserialize)]
pub(crate) struct Names {
    queues: Vec<(String, String)>,
    members: Vec<Name>,
    /// A trim was full: there is more.
    pub more: bool,
}

/// Removes members whose time has passed. Harmless to repeat; refused when there are none.
pub(crate) fn trim(index: Name, n: usize) -> Draft {
    let source = Source { index, due: true, each: Vec::new() };
    let take = Take { n, from: vec![source], give: Vec::new(), max_bytes: 0 };
    Draft { guards: Vec::new(), take: Some(take), writes: Vec::new() }
}

impl Names {
    fn indexes(tenant: &str, queue: &str) -> Vec<(Name, Status)> {
        Class::ALL
            .into_iter()
            .flat_map(|class| Status::ALL.into_iter().map(move |status| (class, status)))
            .map(|(class, status)| (Home { tenant, queue, class }.index(status), status))
            .collect()
    }
}

impl Operation for Names {
    fn start(&mut self, _: &mut Cx<'_>) -> Next {
        *self = Names::default();
        let slice = due_slice(keys::NAMES, limits::SWEEP_NAMES, Vec::new());
        Next::Read(Read { slices: vec![slice], ..Read::default() })
    }

    fn read(&mut self, snapshot: Snapshot, _: &mut Cx<'_>) -> Next {
        if self.queues.is_empty() {
            let mut read = Read::default();
            for entry in snapshot.slices.iter().flatten() {
                let Some((tenant, queue)) = keys::queue_of(&entry.member) else { continue };
                read.records.push(keys::queue(&tenant, &queue));
                for (index, status) in Names::indexes(&tenant, &queue) {
                    read.counts.push((index.clone(), Span::All));
                    if status.is_terminal() {
                        read.counts.push((index, Span::Live));
                    }
                }
                self.queues.push((tenant, queue));
                self.members.push(entry.member.clone());
            }
            if self.queues.is_empty() {
                return Next::ok(Response::Ready);
            }
            self.more = self.queues.len() >= limits::SWEEP_NAMES;
            return Next::Read(read);
        }
        let mut counts = snapshot.counts.into_iter();
        let mut drafts = Vec::new();
        for (((tenant, queue), member), record) in self.queues.iter().zip(&self.members).zip(&snapshot.records) {
            let key = keys::queue(tenant, queue);
            let info = QueueInfo::decode(record).unwrap_or_default();
            // A queue that is paused or has settings of its own is not idle.
            let kept = info.version.is_some() && (info.record.paused || info.record.lease_ms.is_some());
            let due = Guard::Member(keys::NAMES, member.clone(), Standing::Due);
            let mut guards = vec![due.clone()];
            let mut total = 0;
            let mut full = false;
            for (index, status) in Names::indexes(tenant, queue) {
                let all = counts.next().unwrap_or(0);
                total += all;
                if status.is_terminal() {
                    let past = all.saturating_sub(counts.next().unwrap_or(0));
                    full |= past > limits::TRIM as u64;
                    if past > 0 {
                        drafts.push(trim(index.clone(), limits::TRIM));
                    }
                }
                guards.push(Guard::Below(index, Span::All, 1));
            }
            if total == 0 && !kept {
                guards.push(as_read(key.clone(), record));
                let writes = vec![remove(keys::NAMES, member), Write::Delete(key)];
                drafts.push(Draft::new(guards, writes));
            } else {
                let next = if full { 0 } else { limits::NAME_IDLE };
                self.more |= full;
                drafts.push(Draft::new(vec![due], vec![add(keys::NAMES, member, ScoreAt::Clock(next))]));
            }
        }
        Next::Commit(Plan::new(drafts))
    }

    fn answered(&mut self, _: Clock, _: Vec<Answer>, _: &mut Cx<'_>) -> Next {
        Next::ok(Response::Ready)
    }

    fn doubtful(&mut self, _: &mut Cx<'_>) -> Next {
        Next::ok(Response::Ready)
    }
}
