//! The books as the servers tell them: every event, from the first on. Each must be a step that a life
//! can take, so a job ends once in each life; and none may be missing.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use serde_json::Value;

use super::clients::{Caller, Seen};
use super::lock;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stands {
    Waits,
    Runs,
    Ended,
    Gone,
}

#[derive(Clone, Debug)]
struct Life {
    stands: Stands,
    last: &'static str,
    /// The entry of the log that its last event stands in.
    entry: u64,
    claims: u32,
    /// In its present life: 1 once it has ended.
    ends: u32,
    ever: BTreeMap<&'static str, u32>,
}

#[derive(Debug, Default)]
struct Group {
    children: u64,
    finalized: u32,
}

#[derive(Debug, Default)]
pub struct Books {
    pub events: u64,
    lives: BTreeMap<String, Life>,
    groups: BTreeMap<String, Group>,
    entry: u64,
    pub broken: Vec<String>,
}

const TYPES: [&str; 15] = [
    "job.submitted",
    "job.claimed",
    "job.released",
    "job.lease_expired",
    "job.timed_out",
    "job.retrying",
    "job.succeeded",
    "job.dead",
    "job.cancelled",
    "job.expired",
    "job.retried",
    "job.deleted",
    "job.lost",
    "job.reindexed",
    "job.quarantined",
];

/// Where a step leads; `None` if a life has no such step. `last` is the step before, if it was told in the
/// same entry of the log.
fn step(stands: Stands, kind: &str, last: Option<&str>) -> Option<Stands> {
    use Stands::{Ended, Gone, Runs, Waits};
    Some(match (stands, kind) {
        // How the last attempt ended, and what came of it.
        (Waits, "job.dead") if matches!(last, Some("job.timed_out" | "job.lease_expired" | "job.released")) => Ended,
        (Waits, "job.claimed") => Runs,
        (Runs, "job.released" | "job.lease_expired" | "job.timed_out" | "job.retrying") => Waits,
        (Runs, "job.succeeded" | "job.dead") => Ended,
        (Runs | Waits, "job.cancelled" | "job.expired") => Ended,
        (Ended, "job.retried") => Waits,
        (Ended, "job.deleted") => Gone,
        _ => return None,
    })
}

impl Books {
    /// Reads on until it is told to stop and nothing more comes.
    pub fn follow(mut self, mut caller: Caller<'_>, seen: &Seen) -> Books {
        let mut after = String::new();
        loop {
            // Asked before the page is: what came before the stop is in it.
            let stop = seen.stop.load(Ordering::SeqCst);
            let from = if after.is_empty() { String::new() } else { format!("&after={after}") };
            let wait = if stop { 0 } else { 500 };
            let path = format!("/v1/events?limit=1000&wait_ms={wait}{from}");
            let Some((status, page)) = caller.insist("GET", &path, None, "") else { return self };
            if status != 200 {
                self.broken.push(format!("events: {status} {page}"));
                return self;
            }
            let events = page["events"].as_array().map(Vec::as_slice).unwrap_or_default();
            events.iter().for_each(|event| self.event(event));
            if let Some(next) = page["next"].as_str() {
                after = next.into();
            }
            if stop && events.is_empty() {
                return self;
            }
        }
    }

    fn event(&mut self, event: &Value) {
        self.events += 1;
        let entry = event["id"].as_str().and_then(|id| id.split('-').next()?.parse().ok()).unwrap_or(0);
        if entry != self.entry && entry != self.entry + 1 {
            self.broken.push(format!("entry {entry} of the log comes after {}", self.entry));
        }
        self.entry = entry;
        let told = event["type"].as_str().unwrap_or_default();
        match event["job"].as_str() {
            Some(job) => match TYPES.into_iter().find(|t| *t == told) {
                Some(kind) => self.job(job, kind, event),
                None => self.broken.push(format!("an event of no type: {event}")),
            },
            None => self.group(event["group"].as_str().unwrap_or_default(), told, event),
        }
    }

    fn job(&mut self, id: &str, kind: &'static str, event: &Value) {
        if kind == "job.submitted" {
            self.begin(id, event);
            return;
        }
        let Some(life) = self.lives.get_mut(id) else {
            self.broken.push(format!("{id} was never created: {event}"));
            return;
        };
        *life.ever.entry(kind).or_default() += 1;
        let together = (life.entry == self.entry).then_some(life.last);
        life.entry = self.entry;
        match step(life.stands, kind, together) {
            Some(to) => {
                life.claims += u32::from(kind == "job.claimed");
                life.ends += u32::from(to == Stands::Ended);
                if kind == "job.retried" {
                    life.ends = 0;
                }
                (life.stands, life.last) = (to, kind);
            }
            None => self.broken.push(format!("{id}: {kind} after {}: {event}", life.last)),
        }
    }

    fn begin(&mut self, id: &str, event: &Value) {
        let (stands, last, entry) = (Stands::Waits, "job.submitted", self.entry);
        let life = Life { stands, last, entry, claims: 0, ends: 0, ever: BTreeMap::new() };
        if self.lives.insert(id.into(), life).is_some() {
            self.broken.push(format!("{id} was created twice: {event}"));
        }
    }

    fn group(&mut self, id: &str, kind: &str, event: &Value) {
        if matches!(kind, "group.created" | "group.extended") {
            let (from, to) = (event["from"].as_u64().unwrap_or(0), event["to"].as_u64().unwrap_or(0));
            if self.groups.contains_key(id) == (kind == "group.created") {
                self.broken.push(format!("{kind} out of turn: {event}"));
            }
            let group = self.groups.entry(id.into()).or_default();
            if from != group.children || to < from {
                self.broken.push(format!("children out of turn, {} so far: {event}", group.children));
            }
            group.children = to;
            (from..to).for_each(|n| self.begin(&format!("{id}-{n:07}"), event));
        } else if kind == "group.finalized" {
            match self.groups.get_mut(id) {
                Some(group) => group.finalized += 1,
                None => self.broken.push(format!("an unknown group: {event}")),
            }
        }
    }

    /// What was acknowledged must stand in the books, once; and nothing may be under way any more.
    pub fn close(&mut self, seen: &Seen) -> Summary {
        let mut broken = Vec::new();
        let mut summary = Summary { jobs: self.lives.len() as u64, events: self.events, ..Summary::default() };
        for (id, life) in &self.lives {
            summary.deliveries += u64::from(life.claims);
            summary.lapsed += u64::from(life.ever.get("job.lease_expired").copied().unwrap_or(0));
            *summary.ended.entry(life.last).or_default() += 1;
            if !matches!(life.stands, Stands::Ended | Stands::Gone) || life.ends != 1 {
                broken.push(format!("{id} has ended {} times; its last event is {}", life.ends, life.last));
            }
        }
        let did = |id: &String, kind| self.lives.get(id).is_some_and(|l| l.ever.contains_key(kind));
        for id in lock(&seen.jobs).keys() {
            if !self.lives.contains_key(id) {
                broken.push(format!("{id} was acknowledged, and is not in the books"));
            }
        }
        for (what, kind) in [
            (&seen.completed, "job.succeeded"),
            (&seen.cancelled, "job.cancelled"),
            (&seen.retried, "job.retried"),
            (&seen.deleted, "job.deleted"),
        ] {
            let missing = lock(what).iter().filter(|id| !did(id, kind)).cloned().collect::<Vec<_>>();
            broken.extend(missing.into_iter().map(|id| format!("{id} has no {kind}, which was acknowledged")));
        }
        for (id, children) in lock(&seen.groups).iter() {
            match self.groups.get(id) {
                Some(group) if group.children >= *children => {}
                other => broken.push(format!("{id} with {children} children is {other:?} in the books")),
            }
        }
        for (id, group) in &self.groups {
            if group.finalized != 1 {
                broken.push(format!("group {id} was finalized {} times", group.finalized));
            }
        }
        summary.groups = self.groups.len() as u64;
        self.broken.extend(broken);
        summary
    }
}

#[derive(Debug, Default)]
pub struct Summary {
    pub events: u64,
    pub jobs: u64,
    pub groups: u64,
    pub deliveries: u64,
    pub lapsed: u64,
    /// Jobs by their last event.
    pub ended: BTreeMap<&'static str, u64>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn books(types: &[&str]) -> Books {
        let mut books = Books::default();
        for (n, kind) in types.iter().enumerate() {
            books.event(&json!({"id": format!("{}-1", n + 1), "type": kind, "job": "j"}));
        }
        books
    }

    #[test]
    fn a_life_ends_once_and_goes_no_other_way() {
        let lived = ["job.submitted", "job.claimed", "job.retrying", "job.claimed", "job.succeeded"];
        let mut good = books(&lived);
        let summary = good.close(&Seen::default());
        assert!(good.broken.is_empty() && summary.deliveries == 2, "{good:?}");
        for more in ["job.succeeded", "job.claimed", "job.lost", "job.submitted"] {
            let mut bad = books(&[&lived[..], &[more]].concat());
            bad.close(&Seen::default());
            assert!(!bad.broken.is_empty(), "{more}");
        }
        let mut unfinished = books(&lived[..4]);
        unfinished.close(&Seen::default());
        assert_eq!(unfinished.broken.len(), 1);
    }

    #[test]
    fn a_missing_entry_and_a_missing_job_are_told() {
        let mut gap = Books::default();
        gap.event(&json!({"id": "1-1", "type": "job.submitted", "job": "j"}));
        gap.event(&json!({"id": "3-1", "type": "job.claimed", "job": "j"}));
        assert_eq!(gap.broken.len(), 1);
        let seen = Seen::default();
        lock(&seen.jobs).insert("k".into(), String::new());
        let mut none = Books::default();
        none.close(&seen);
        assert_eq!(none.broken.len(), 1);
    }
}
