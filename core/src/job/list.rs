//! Listing jobs by queue and status, in pages.

use alloc::collections::{BTreeSet, VecDeque};
use alloc::format;
use alloc::string::{String, ToString as _};
use alloc::vec;
use alloc::vec::Vec;

use super::check;
use super::moves::Home;
use super::record::{Class, Job, Lease, Status};
use super::view::{view, with_lease};
use crate::failure::Failure;
use crate::limits;
use crate::name::Name;
use crate::replica::task::{Cx, Next, Operation, decode_record};
use crate::request::{JobView, List as Asked, Response};
use crate::store::{Answer, Clock, Read, Score, Slice, Snapshot, Span, UpTo, keys};

#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct List {
    asked: Asked,
    stage: Stage,
    /// Queue, status and class still to be looked through, in order.
    rest: VecDeque<Spot>,
    /// Queues whose indexes have not been counted yet, in order.
    queues: VecDeque<String>,
    names: Names,
    found: Vec<JobView>,
}

#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
enum Stage {
    Names,
    Counts,
    Page,
}

/// One index of the walk, and where in it to go on.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
struct Spot {
    queue: String,
    status: Status,
    class: Class,
    after: Option<(Score, Name)>,
}

impl List {
    pub fn new(asked: Asked) -> Result<List, Failure> {
        if let Some(queue) = &asked.queue {
            check::name("queue", queue)?;
        }
        check::within("limit", Some(asked.limit as u64), 1, limits::LIST_MAX as u64)?;
        if let Some(cursor) = &asked.cursor {
            parse(cursor).ok_or(Failure::BadCursor)?;
        }
        Ok(List {
            asked,
            stage: Stage::Names,
            rest: VecDeque::new(),
            queues: VecDeque::new(),
            names: Names::default(),
            found: Vec::new(),
        })
    }

    fn spots(&self, queues: Vec<String>) -> VecDeque<Spot> {
        let from = self.asked.cursor.as_deref().and_then(parse);
        let order = |s: &Spot| (s.queue.clone(), s.status, s.class);
        let mut spots = VecDeque::new();
        for queue in queues {
            for status in Status::ALL.into_iter().filter(|s| self.asked.status.is_none_or(|a| a == *s)) {
                for class in Class::ALL {
                    let mut spot = Spot { queue: queue.clone(), status, class, after: None };
                    match &from {
                        Some(from) if order(&spot) < order(from) => continue,
                        Some(from) if order(&spot) == order(from) => spot.after = from.after.clone(),
                        _ => {}
                    }
                    spots.push_back(spot);
                }
            }
        }
        spots
    }

    fn index(&self, spot: &Spot) -> Name {
        Home { tenant: &self.asked.tenant, queue: &spot.queue, class: spot.class }.index(spot.status)
    }

    /// Which of the indexes have anything in them: most are empty.
    fn counts(&mut self) -> Next {
        self.stage = Stage::Counts;
        while self.rest.is_empty() {
            if self.queues.is_empty() {
                return self.done(None);
            }
            let n = self.queues.len().min(COUNTED);
            let queues = self.queues.drain(..n).collect();
            self.rest = self.spots(queues);
        }
        let counts = self.rest.iter().map(|s| (self.index(s), Span::All)).collect();
        Next::Read(Read { counts, ..Read::default() })
    }

    fn page(&mut self) -> Next {
        self.stage = Stage::Page;
        let Some(spot) = self.rest.front() else { return self.counts() };
        let slice = Slice {
            index: self.index(spot),
            after: spot.after.clone(),
            up_to: UpTo::End,
            limit: self.asked.limit - self.found.len(),
            give: vec![keys::JOB, keys::LEASE],
        };
        let read = Read { slices: vec![slice], ..Read::default() };
        Next::Read(read)
    }

    fn done(&mut self, next: Option<&Spot>) -> Next {
        Next::ok(Response::Jobs { jobs: core::mem::take(&mut self.found), next: next.map(write) })
    }
}

impl Operation for List {
    fn start(&mut self, _: &mut Cx<'_>) -> Next {
        self.found.clear();
        match &self.asked.queue {
            Some(queue) => {
                self.rest.clear();
                self.queues = VecDeque::from([queue.clone()]);
                self.counts()
            }
            None => {
                self.stage = Stage::Names;
                self.rest.clear();
                self.names = Names::default();
                Next::Read(self.names.page())
            }
        }
    }

    fn read(&mut self, snapshot: Snapshot, _: &mut Cx<'_>) -> Next {
        match self.stage {
            Stage::Names => {
                if self.names.more(&snapshot, &self.asked.tenant) {
                    return Next::Read(self.names.page());
                }
                self.queues = core::mem::take(&mut self.names).found.into_iter().collect();
                self.counts()
            }
            Stage::Counts => {
                let mut counts = snapshot.counts.into_iter();
                self.rest.retain(|_| counts.next().unwrap_or(0) > 0);
                self.page()
            }
            Stage::Page => {
                let Some(mut spot) = self.rest.pop_front() else { return self.done(None) };
                let entries = snapshot.slices.into_iter().next().unwrap_or_default();
                let full = entries.len() >= self.asked.limit - self.found.len();
                for entry in entries {
                    let unread = entry.records.iter().any(crate::store::Record::is_unread);
                    if unread {
                        // The answer's budget of bytes is used up: the rest comes with the next page.
                        if !self.found.is_empty() {
                            return self.done(Some(&spot));
                        }
                        self.rest.push_front(spot);
                        return self.page();
                    }
                    spot.after = Some((entry.score, entry.member.clone()));
                    let Some(id) = keys::job_of(&entry.member) else { continue };
                    let mut records = entry.records.iter();
                    let job = records.next().and_then(|r| decode_record::<Job>(r).ok().flatten());
                    // A ghost: its record has expired or vanished.
                    let Some((_, job)) = job else { continue };
                    let mut view = view(id, &job, spot.status);
                    if spot.status == Status::Running {
                        let record = records.next();
                        let lease = record.and_then(|r| Some((decode_record::<Lease>(r).ok()??.1, r.at()?)));
                        view = with_lease(view, lease, None);
                    }
                    if matches!(spot.status, Status::Scheduled | Status::Retrying) {
                        view.run_at = entry.score;
                    }
                    self.found.push(view);
                }
                if self.found.len() >= self.asked.limit {
                    return self.done(Some(&spot));
                }
                if full {
                    self.rest.push_front(spot);
                }
                self.page()
            }
        }
    }

    fn answered(&mut self, _: Clock, _: Vec<Answer>, cx: &mut Cx<'_>) -> Next {
        self.start(cx)
    }
}

/// Queues whose indexes are counted in one read.
const COUNTED: usize = 20;

/// A walk over the names of all queues, which are kept together for all tenants. A name only ever moves
/// ahead in it: one that does so during the walk is met again, and none is missed.
#[derive(Clone, Debug, Default, serde::Serialize, serde::Deserialize)]
pub(crate) struct Names {
    after: Option<(Score, Name)>,
    /// The tenant's, in order of name.
    pub found: BTreeSet<String>,
}

impl Names {
    pub fn page(&self) -> Read {
        let slice = Slice {
            index: keys::NAMES,
            after: self.after.clone(),
            up_to: UpTo::End,
            limit: limits::QUEUES,
            give: Vec::new(),
        };
        Read { slices: vec![slice], ..Read::default() }
    }

    /// Takes in a page; whether there is another.
    pub fn more(&mut self, snapshot: &Snapshot, tenant: &str) -> bool {
        let entries = snapshot.slices.first().map(Vec::as_slice).unwrap_or_default();
        let queues = entries.iter().filter_map(|e| keys::queue_of(&e.member));
        self.found.extend(queues.filter(|(t, _)| t == tenant).map(|(_, queue)| queue));
        self.after = entries.last().map(|e| (e.score, e.member.clone()));
        entries.len() >= limits::QUEUES
    }
}

/// A cursor as text: queue in hexadecimal, status, class, score, member.
fn write(spot: &Spot) -> String {
    let queue: String = spot.queue.bytes().map(|b| format!("{b:02x}")).collect();
    let (score, member) = match &spot.after {
        Some((score, member)) => (score.to_string(), member.to_string()),
        None => (String::new(), String::new()),
    };
    format!("{queue}.{}.{}.{score}.{member}", spot.status.text(), spot.class.text())
}

fn parse(cursor: &str) -> Option<Spot> {
    let mut parts = cursor.split('.');
    let hex = parts.next()?.as_bytes();
    if hex.len() % 2 != 0 {
        return None;
    }
    let queue: Option<Vec<u8>> = hex
        .chunks(2)
        .map(|pair| core::str::from_utf8(pair).ok().and_then(|p| u8::from_str_radix(p, 16).ok()))
        .collect();
    let queue = String::from_utf8(queue?).ok()?;
    let status = Status::parse(parts.next()?)?;
    let class = Class::parse(parts.next()?)?;
    let (score, member) = (parts.next()?, parts.next()?);
    if parts.next().is_some() {
        return None;
    }
    let after = match (score, member) {
        ("", "") => None,
        (score, member) => {
            let id: crate::ids::JobId = member.parse().ok()?;
            Some((score.parse().ok()?, keys::member(id)))
        }
    };
    Some(Spot { queue, status, class, after })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cursors_read_back_and_nothing_else_does() {
        let id = crate::ids::Maker::new([5; 32]).job_id(7);
        for after in [None, Some((9, keys::member(id)))] {
            let spot = Spot { queue: "a.b/é".into(), status: Status::Dead, class: Class::Batch, after };
            assert_eq!(parse(&write(&spot)), Some(spot));
        }
        for bad in ["", "x", "6", "zz.dead.batch..", "61.dead.batch.1.nonsense", "61.dead.batch...", "é.dead.batch.."]
        {
            assert_eq!(parse(bad), None, "{bad}");
        }
    }
}
