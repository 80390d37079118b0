//! The audit's part: every entry of every pool's indexes against the record of its slot, a page at a time. Each
//! page is judged in one snapshot. What is past its time is not looked at: it is removed when its turn comes.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::format;
use alloc::string::{String, ToString as _};
use alloc::vec;
use alloc::vec::Vec;

use super::record::{Slot, SlotState};
use super::{record_of, slot_of};
use crate::codec;
use crate::failure::Failure;
use crate::ids::JobId;
use crate::job::lease::Granted;
use crate::job::moves::{as_read, holdings, remove};
use crate::job::record::{AttemptEnd, Class, End, Job};
use crate::name::Name;
use crate::replica::task::{Cx, Draft, Next, Operation, Plan, decode_record};
use crate::request::{Audited, Finding, Response};
use crate::store::{Answer, Clock, Entry, Guard, Place, Read, Record, Score, Slice, Snapshot, UpTo, keys};

/// Entries of one index that a page looks at.
const ENTRIES: usize = 100;
/// Holders, those of class batch, and of each class the line and the deadlines.
const INDEXES: usize = 2 + 2 * Class::ALL.len();

#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
enum Of {
    Holders,
    Batch,
    Waiting(Class),
    Alive(Class),
}

fn of(at: usize) -> Of {
    let class = |n: usize| Class::ALL.get(n / 2).copied().unwrap_or(Class::Batch);
    match at {
        0 => Of::Holders,
        1 => Of::Batch,
        n if n % 2 == 0 => Of::Waiting(class(n - 2)),
        n => Of::Alive(class(n - 2)),
    }
}

fn index(pool: &str, of: Of) -> Name {
    match of {
        Of::Holders => keys::holders(pool),
        Of::Batch => keys::batch(pool),
        Of::Waiting(class) => keys::waiting(pool, class),
        Of::Alive(class) => keys::alive(pool, class),
    }
}

/// Where the walk stands.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
enum Cursor {
    /// After this entry of `pools`.
    Pools(Option<(Score, Name)>),
    /// One pool's indexes: its entry in `pools`, the index, and after which of its members.
    Pool { entry: (Score, Name), index: usize, after: Option<(Score, Name)> },
}

/// What tells a cursor of this walk from those of the others, which are hexadecimal.
const MARK: char = 'p';

fn write(cursor: &Cursor) -> String {
    let hex = codec::encode(cursor).iter().map(|b| format!("{b:02x}")).collect::<String>();
    format!("{MARK}{hex}")
}

fn parse(text: &str) -> Option<Cursor> {
    let hex = text.strip_prefix(MARK)?;
    if hex.is_empty() {
        return Some(Cursor::Pools(None));
    }
    let pairs = hex.as_bytes().chunks(2);
    let digits: Option<Vec<u8>> = pairs
        .map(|pair| if pair.len() == 2 { u8::from_str_radix(core::str::from_utf8(pair).ok()?, 16).ok() } else { None })
        .collect();
    codec::decode(&digits?).ok()
}

#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct Check {
    from: Cursor,
    repair: bool,
    /// The slots of the page, once they are known.
    slots: Option<Vec<Name>>,
    next: Option<Cursor>,
    done: Audited,
    drafts: Vec<Draft>,
    /// Parallel to `drafts`: the finding that each puts right.
    of: Vec<usize>,
}

impl Check {
    /// The cursor of the first page.
    pub fn begin() -> String {
        MARK.to_string()
    }

    /// Whether a cursor is one of this walk.
    pub fn is_own(cursor: &str) -> bool {
        cursor.starts_with(MARK)
    }

    pub fn new(cursor: &str, repair: bool) -> Result<Check, Failure> {
        let from = parse(cursor).ok_or(Failure::BadCursor)?;
        let done = Audited::default();
        Ok(Check { from, repair, slots: None, next: None, done, drafts: Vec::new(), of: Vec::new() })
    }

    /// The page's entries, and with them the slots that are known from the first look.
    fn page(&self) -> Read {
        let Cursor::Pool { entry, index: first, after } = &self.from else {
            let Cursor::Pools(after) = &self.from else { return Read::default() };
            let index = keys::POOLS;
            let next = Slice { index, after: after.clone(), up_to: UpTo::End, limit: 1, give: Vec::new() };
            return Read { slices: vec![next], ..Read::default() };
        };
        let Some(pool) = keys::pool_of(&entry.1) else { return Read::default() };
        let mut after = after.clone();
        let slices = (*first..INDEXES).map(|at| {
            let index = index(&pool, of(at));
            Slice { index, after: after.take(), up_to: UpTo::End, limit: ENTRIES, give: Vec::new() }
        });
        let mut read = Read { slices: slices.collect(), ..Read::default() };
        for slot in self.slots.iter().flatten() {
            read.records.push(record_of(&pool, slot));
            for class in Class::ALL {
                let lines = [keys::waiting(&pool, class), keys::alive(&pool, class)];
                read.members.extend(lines.map(|index| (index, slot.clone())));
            }
        }
        // A job that was cancelled may still hold what its call needs.
        read.records.extend(self.slots.iter().flatten().filter_map(keys::job_of).map(keys::job));
        read
    }

    fn judge(&mut self, snapshot: &Snapshot) -> Next {
        let Cursor::Pool { entry, index: first, .. } = self.from.clone() else { return self.finish() };
        let Some(pool) = keys::pool_of(&entry.1) else { return self.finish() };
        let slots = self.slots.take().unwrap_or_default();
        let (records, jobs) = snapshot.records.split_at(slots.len().min(snapshot.records.len()));
        let jobs: BTreeMap<JobId, &Record> = slots.iter().filter_map(keys::job_of).zip(jobs).collect();
        let places = snapshot.members.chunks(2 * Class::ALL.len());
        let known: BTreeMap<&Name, (&Record, &[Option<Place>])> =
            slots.iter().zip(records.iter().zip(places)).collect();
        let mut left = None;
        for (at, entries) in (first..INDEXES).zip(&snapshot.slices) {
            self.done.entries += entries.len() as u64;
            for entry in entries {
                self.entry(&pool, of(at), entry, &known, &jobs, snapshot.clock);
            }
            if entries.len() >= ENTRIES {
                left = entries.last().map(|e| (at, (e.score, e.member.clone())));
                break;
            }
        }
        self.next = Some(match left {
            Some((index, after)) => Cursor::Pool { entry, index, after: Some(after) },
            None => Cursor::Pools(Some(entry)),
        });
        self.finish()
    }

    fn entry(
        &mut self,
        pool: &str,
        of: Of,
        entry: &Entry,
        known: &BTreeMap<&Name, (&Record, &[Option<Place>])>,
        jobs: &BTreeMap<JobId, &Record>,
        clock: Clock,
    ) {
        let Some(slot) = slot_in(of, &entry.member) else {
            self.find(pool, format!("`{}` is no slot", entry.member));
            return;
        };
        // Entered since the first look.
        let Some((record, places)) = known.get(&slot) else { return };
        if let Some(job) = keys::job_of(&slot) {
            let may_go_on = jobs.get(&job).is_some_and(|main| may_go_on(&entry.member, main));
            if entry.score > clock && !may_go_on {
                self.unit_of_a_job(job, index(pool, of), entry, record);
            }
            return;
        }
        let Ok(found) = slot_of(record) else { return };
        let found = found.map(|(_, slot)| slot);
        let place = |index: usize| places.get(index).copied().flatten();
        let of_class = |class: Class| Class::ALL.iter().position(|c| *c == class).unwrap_or(0) * 2;
        let waits = |class: Class| matches!(&found, Some(Slot { state: SlotState::Waiting { .. }, class: c, .. }) if *c == class);
        let what = match of {
            Of::Holders | Of::Batch if entry.score <= clock || holds(of, &entry.member, found.as_ref()) => return,
            Of::Holders | Of::Batch => "is held, but was not granted so",
            Of::Waiting(class) => match place(of_class(class) + 1) {
                None => "waits without a deadline",
                // Past its deadline it may have outlived its record.
                Some(deadline) if waits(class) || found.is_none() && deadline.score <= clock => return,
                Some(_) => "stands in line, but does not wait",
            },
            Of::Alive(class) if place(of_class(class)).is_none() => "has a deadline, but no place in line",
            Of::Alive(_) => return,
        };
        self.amiss(index(pool, of), &entry.member, what, as_read(keys::slots(pool).join(&slot), record));
    }

    /// What a job holds that a server runs: its lease must say so.
    fn unit_of_a_job(&mut self, job: JobId, index: Name, entry: &Entry, lease: &Record) {
        let unit = (index, entry.member.clone());
        let held = |g: Granted| holdings(job, g.lease.class, g.lease.placed(), g.version).contains(&unit);
        if !Granted::read(lease).is_some_and(held) {
            self.amiss(unit.0, &unit.1, "is held, but its job is not leased so", as_read(keys::lease(job), lease));
        }
    }

    fn amiss(&mut self, index: Name, member: &Name, what: &str, as_read: Guard) {
        let finding = self.find(&index, format!("{member} {what}"));
        self.drafts.push(Draft::new(vec![as_read], vec![remove(index, member)]));
        self.of.push(finding);
    }

    fn find(&mut self, subject: impl core::fmt::Display, what: String) -> usize {
        self.done.findings.push(Finding { subject: subject.to_string(), what, repaired: false });
        self.done.findings.len() - 1
    }

    fn finish(&mut self) -> Next {
        if self.repair && !self.drafts.is_empty() {
            return Next::Commit(Plan::new(core::mem::take(&mut self.drafts)));
        }
        self.reply()
    }

    fn reply(&mut self) -> Next {
        let mut done = core::mem::take(&mut self.done);
        done.next = self.next.take().as_ref().map(write);
        Next::ok(Response::Audited(done))
    }
}

/// The slot that an entry stands for.
fn slot_in(of: Of, member: &Name) -> Option<Name> {
    match of {
        Of::Holders | Of::Batch => keys::holder_of(member).map(|(slot, ..)| slot),
        Of::Waiting(_) | Of::Alive(_) => keys::queue_of(member).map(|_| member.clone()),
    }
}

/// Whether a job's record says, or has room for it, that it was cancelled under the lease that a unit belongs to.
fn may_go_on(unit: &Name, main: &Record) -> bool {
    let nonce = keys::holder_of(unit).map(|(_, nonce, _)| nonce);
    match decode_record::<Job>(main) {
        Ok(Some((_, job))) => {
            let cancelled = |end: End| end.attempt.filter(|a| a.outcome == AttemptEnd::Cancelled);
            let under = job.end.and_then(cancelled).map(|a| a.token.nonce);
            job.deleted || job.lives > 0 || under.is_some() && under == nonce
        }
        _ => true,
    }
}

/// Whether a slot's record says that it holds this unit.
fn holds(of: Of, unit: &Name, slot: Option<&Slot>) -> bool {
    let (Some((_, nonce, n)), Some(slot)) = (keys::holder_of(unit), slot) else { return false };
    let granted = slot.state.is_held() && slot.nonce == nonce && n <= slot.cost;
    granted && (of == Of::Holders || slot.class == Class::Batch)
}

impl Operation for Check {
    fn start(&mut self, _: &mut Cx<'_>) -> Next {
        self.slots = None;
        self.next = None;
        self.done = Audited::default();
        self.drafts.clear();
        self.of.clear();
        Next::Read(self.page())
    }

    fn read(&mut self, snapshot: Snapshot, _: &mut Cx<'_>) -> Next {
        self.done.at = snapshot.clock;
        if let Cursor::Pools(_) = &self.from {
            let entry = snapshot.slices.into_iter().flatten().next();
            self.next = entry.map(|e| Cursor::Pool { entry: (e.score, e.member), index: 0, after: None });
            return self.reply();
        }
        if self.slots.is_none() {
            let Cursor::Pool { index: first, .. } = &self.from else { return self.reply() };
            let of_page = (*first..INDEXES).zip(&snapshot.slices);
            let slots: BTreeSet<Name> =
                of_page.flat_map(|(at, es)| es.iter().filter_map(move |e| slot_in(of(at), &e.member))).collect();
            self.slots = Some(slots.into_iter().collect());
            return Next::Read(self.page());
        }
        self.judge(&snapshot)
    }

    fn answered(&mut self, _: Clock, answers: Vec<Answer>, cx: &mut Cx<'_>) -> Next {
        for (finding, answer) in self.of.iter().zip(&answers) {
            if matches!(answer, Answer::Applied { .. })
                && let Some(finding) = self.done.findings.get_mut(*finding)
            {
                finding.repaired = true;
                cx.stats.reindexed += 1;
            }
        }
        self.reply()
    }

    fn doubtful(&mut self, _: &mut Cx<'_>) -> Next {
        // Nothing is said to have been repaired; the next audit tells.
        self.reply()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cursors_read_back_and_nothing_else_does() {
        assert_eq!(parse(&Check::begin()), Some(Cursor::Pools(None)));
        let entry = || (7, keys::pool_member("a/b"));
        for cursor in [Cursor::Pools(Some(entry())), Cursor::Pool { entry: entry(), index: 7, after: Some(entry()) }] {
            assert_eq!(parse(&write(&cursor)), Some(cursor));
        }
        for bad in ["", "q", "p0", "p00", "pé", "p--"] {
            assert_eq!(parse(bad), None, "{bad}");
        }
        assert_eq!(
            (0..INDEXES).map(of).collect::<Vec<_>>()[2..4],
            [Of::Waiting(Class::Interactive), Of::Alive(Class::Interactive)]
        );
    }
}
