//! Every record against the places that it implies, and every place against its record.

use std::collections::BTreeMap;

use super::dump::{Dump, Record};
use super::records::{CLASSES, Group, Job, OUTCOMES, Owner, STATUSES, decode, id};

/// The score of what has no time.
const MAX: u64 = (1 << 53) - 1;
/// A group's mode that stops at its first dead child.
const FAIL_FAST: u32 = 1;
/// The Redis forgets a record a minute after its expiry; so much more is given.
const GARBAGE_MS: u64 = 65_000;

#[derive(Debug, Default)]
pub struct Audited {
    pub jobs: u64,
    pub groups: u64,
    pub companions: u64,
    pub entries: u64,
    pub broken: Vec<String>,
}

struct Auditor<'a> {
    dump: &'a Dump,
    jobs: BTreeMap<&'a str, Job>,
    groups: BTreeMap<&'a str, Group>,
    done: Audited,
}

pub fn audit(dump: &Dump) -> Audited {
    let mut auditor = Auditor { dump, jobs: BTreeMap::new(), groups: BTreeMap::new(), done: Audited::default() };
    auditor.done.broken.extend(dump.broken.iter().cloned());
    for (name, record) in &dump.records {
        match name.split_once('/') {
            Some(("job", id)) => auditor.decoded(name, record, |a, job| drop(a.jobs.insert(id, job))),
            Some(("group", id)) => auditor.decoded(name, record, |a, group| drop(a.groups.insert(id, group))),
            _ => {}
        }
    }
    for (name, record) in &dump.records {
        auditor.record(name, record);
    }
    for (index, members) in &dump.indexes {
        auditor.done.entries += members.len() as u64;
        for (member, score) in members {
            if let Err(what) = auditor.place(index, member, *score) {
                auditor.done.broken.push(format!("{member} stands in {index}, {what}"));
            }
        }
    }
    auditor.done
}

fn expect(holds: bool, otherwise: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(otherwise()) }
}

/// The group and the index of a child.
fn child(id: &str) -> Option<(&str, u64)> {
    let (group, index) = id.split_once('-')?;
    Some((group, index.parse().ok()?))
}

impl<'a> Auditor<'a> {
    fn decoded<T: serde::de::DeserializeOwned>(&mut self, name: &str, record: &Record, put: impl FnOnce(&mut Self, T)) {
        match decode(&record.bytes) {
            Ok(value) => put(self, value),
            Err(why) => self.done.broken.push(format!("{name} cannot be read: {why}")),
        }
    }

    fn record(&mut self, name: &str, record: &Record) {
        let checked = match name.split_once('/') {
            Some(("job", id)) => {
                self.done.jobs += 1;
                self.jobs.get(id).map_or(Ok(()), |job| self.job(id, job, record))
            }
            Some(("group", id)) => {
                self.done.groups += 1;
                self.groups.get(id).map_or(Ok(()), |group| self.group(id, group, record))
            }
            Some((kind, rest)) => {
                self.done.companions += 1;
                self.companion(kind, rest, record)
            }
            None => Err("is nobody's".into()),
        };
        let ttl = match record.expiry {
            None => {
                expect(record.ttl == -1, || format!("never expires, and the Redis forgets it in {} ms", record.ttl))
            }
            Some(expiry) => {
                let rest = (expiry - self.dump.now) / 1_000;
                let right = u64::try_from(record.ttl).is_ok_and(|ttl| ttl > rest && ttl < rest + GARBAGE_MS);
                expect(right, || format!("expires in {rest} ms, and the Redis forgets it in {} ms", record.ttl))
            }
        };
        for what in [checked, ttl].into_iter().filter_map(Result::err) {
            self.done.broken.push(format!("{name} {what}"));
        }
    }

    fn job(&self, id: &str, job: &Job, record: &Record) -> Result<(), String> {
        let stands = self.dump.stands(id);
        let home = |status: &str| {
            format!("st/{}/{}/{}/{status}", job.tenant, job.queue, CLASSES.get(job.class as usize).unwrap_or(&"?"))
        };
        let mut expected = BTreeMap::new();
        let parent = child(id);
        if job.deleted {
            // A child that was deleted still counts.
            let left: Vec<&String> = stands.keys().filter(|i| !i.starts_with("done/")).collect();
            return expect(left.is_empty(), || format!("was deleted, and stands in {left:?}"));
        }
        let there = |kind: &str| self.dump.records.get(&format!("{kind}/{id}"));
        if let Some(end) = &job.end {
            let status = STATUSES.get(end.status as usize).copied().unwrap_or("?");
            expected.insert(home(status), if parent.is_some() { MAX } else { record.expiry.unwrap_or(0) });
            if let Some((group, index)) = parent {
                expected.insert(format!("done/{group}/{status}"), index);
            }
            expect(end.status >= 5, || format!("has ended {status}"))?;
            expect(there("lease").is_none() && there("progress").is_none(), || "has ended, and has a lease".into())?;
            let lasts = record.expiry.is_some() == parent.is_none();
            expect(lasts, || format!("has ended, and expires at {:?}", record.expiry))?;
        } else {
            let now = stands.iter().find_map(|(index, score)| {
                STATUSES.into_iter().take(5).find(|s| *index == home(s)).map(|status| (status, *score))
            });
            let Some((status, score)) = now else { return Err(format!("lives, and stands in {stands:?}")) };
            expected.insert(home(status), score);
            if matches!(status, "scheduled" | "retrying") {
                expected.insert("due".into(), score);
            }
            if status == "running" {
                let end = stands.get("leases").copied().unwrap_or(0);
                expected.insert("leases".into(), end);
                expect(there("lease").is_some(), || "runs without a lease".into())?;
            } else {
                expect(there("lease").is_none(), || format!("is {status}, and has a lease"))?;
            }
            if job.policy.queue_ttl_ms.is_some() && job.deliveries == 0 && status != "running" {
                expected.insert("ttl".into(), stands.get("ttl").copied().unwrap_or(0));
            }
            if let Some((group, index)) = parent {
                let held = status == "held";
                let (name, score) = if held { ("held", index) } else { ("released", MAX) };
                expected.insert(format!("{name}/{group}"), score);
            }
            expect(record.expiry.is_none(), || "lives, and expires".into())?;
            expect(there("payload").is_some_and(|p| p.expiry.is_none()), || "lives without a payload".into())?;
            if let Some((key, version)) = &job.key {
                let bound = self.dump.records.get(&format!("key/{}/{key}", job.tenant));
                expect(bound.is_some_and(|b| b.version == *version), || format!("its key {key} is not bound to it"))?;
            }
        }
        expect(stands == expected, || format!("stands in {stands:?}, and should in {expected:?}"))?;
        let name = format!("{}/{}", job.tenant, job.queue);
        let known = self.dump.indexes.get("names").is_some_and(|names| names.contains_key(&name));
        expect(known, || format!("is in the queue {name}, which is not known"))
    }

    fn group(&self, id: &str, group: &Group, record: &Record) -> Result<(), String> {
        let held = self.dump.size(&format!("held/{id}"));
        let released = self.dump.size(&format!("released/{id}"));
        let done = OUTCOMES.map(|outcome| self.dump.size(&format!("done/{id}/{outcome}")));
        let sum = held + released + done.iter().sum::<u64>();
        expect(sum == u64::from(group.filled), || {
            format!("has {} children: {held} held, {released} released, {done:?} ended", group.filled)
        })?;
        expect(group.max_parallel.is_none_or(|most| released <= most.into()), || format!("has released {released}"))?;
        let stands = self.dump.stands(id);
        let mut expected = BTreeMap::new();
        if let Some((status, _)) = group.end {
            expected.insert("groups/ended".to_owned(), record.expiry.unwrap_or(0));
            expect(held == 0 && released == 0, || format!("is final: {held} held, {released} released"))?;
            let right = match (group.stopped, done) {
                (Some(2), _) => 4,
                (Some(_), _) => 5,
                // The last children were in flight when one died: nothing was left to be stopped.
                (None, [_, dead, ..]) if group.mode == FAIL_FAST && dead > 0 => 4,
                (None, [succeeded, ..]) if succeeded == sum => 2,
                (None, [0, ..]) => 4,
                (None, _) => 3,
            };
            expect(status == right, || format!("has ended {status} with {done:?}, stopped: {:?}", group.stopped))?;
        } else {
            expect(record.expiry.is_none(), || "is not final, and expires".into())?;
            if !group.sealed && group.stopped.is_none() {
                expected.insert("groups/open".into(), group.open_until.unwrap_or(0));
            }
            // The mark may come and go.
            if let Some(score) = stands.get("groups/due") {
                expected.insert("groups/due".into(), *score);
            }
        }
        expect(stands == expected, || format!("stands in {stands:?}, and should in {expected:?}"))
    }

    /// What is there because of something else.
    fn companion(&self, kind: &str, of: &str, record: &Record) -> Result<(), String> {
        match kind {
            "payload" | "result" | "history" | "lease" | "progress" => {
                let Some(job) = self.jobs.get(of) else { return Err("is of a job that is gone".into()) };
                expect(!job.deleted, || "is of a deleted job".into())?;
                let succeeded = job.end.as_ref().is_some_and(|e| e.status == 5);
                expect(kind != "result" || succeeded, || "is of a job that has not succeeded".into())
            }
            "key" => {
                let owner: Owner = decode(&record.bytes)?;
                let (what, owner, key) = match &owner {
                    Owner::Job(n) => ("job", id(*n), self.jobs.get(&*id(*n)).map(|j| &j.key)),
                    Owner::Group(n) => ("group", id(*n), self.groups.get(&*id(*n)).map(|g| &g.key)),
                };
                let Some(key) = key else { return Err(format!("names the {what} {owner}, which is gone")) };
                let bound = key.as_ref().is_some_and(|(key, version)| {
                    of.split_once('/').is_some_and(|(_, k)| k == key) && *version == record.version
                });
                expect(bound, || format!("names the {what} {owner}, whose key is {key:?}"))
            }
            "queue" => {
                let known = self.dump.indexes.get("names").is_some_and(|names| names.contains_key(of));
                expect(known, || "is of a queue that is not known".into())
            }
            "mark" => {
                let due = self.dump.stands(of).contains_key("groups/due");
                expect(due && self.groups.contains_key(of), || "is of a group that is not due".into())
            }
            "claim" | "ready" => expect(record.expiry.is_some(), || "never goes".into()),
            _ => Err("is nobody's".into()),
        }
    }

    fn place(&self, index: &str, member: &str, score: u64) -> Result<(), String> {
        let over = score <= self.dump.now;
        let job = self.jobs.contains_key(member);
        match index.split('/').collect::<Vec<_>>()[..] {
            // Those that have expired are swept later.
            ["st", _, _, _, status] if STATUSES.iter().skip(5).any(|s| *s == status) => {
                expect(job || over, || "and its record is gone".into())
            }
            ["st", ..] | ["leases" | "due" | "ttl"] | ["held" | "released", _] => {
                expect(job, || "and its record is gone".into())
            }
            ["done", group, _] => {
                let removed = self.dump.stands(group).contains_key("groups/ended");
                let own = child(member).is_some_and(|(of, index)| of == group && index == score);
                expect(own && (self.groups.contains_key(group) || removed), || "and its group is gone".into())
            }
            ["names"] => expect(member.contains('/'), || "and is no queue".into()),
            ["groups", "due"] => {
                let marked = self.dump.records.contains_key(&format!("mark/{member}"));
                expect(marked, || "without a mark".into())
            }
            ["groups", "open"] => expect(self.groups.contains_key(member), || "and is gone".into()),
            ["groups", "ended"] => expect(self.groups.contains_key(member) || over, || "and is gone".into()),
            ["quarantine"] => Err("and cannot be read".into()),
            _ => Err("and that index is nobody's".into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::records::tests::{encode, job};
    use super::*;

    const NOW: u64 = 1_000_000_000;
    const EXPIRY: u64 = NOW + 60_000_000;
    const ID: &str = "00000000000000000000000007";
    const HOME: &str = "st/default/q/system/succeeded";

    fn record(expiry: Option<u64>, version: u64, bytes: Vec<u8>) -> Record {
        let ttl = expiry.map_or(-1, |e| ((e - NOW) / 1_000).cast_signed() + 60_000);
        Record { expiry, version, bytes, ttl }
    }

    fn stand(dump: &mut Dump, index: &str, member: &str, score: u64) {
        dump.indexes.entry(index.into()).or_default().insert(member.into(), score);
        dump.places.entry(member.into()).or_default().insert(index.into(), score);
    }

    /// An ended job with all that belongs to it.
    fn balanced() -> Dump {
        let mut dump = Dump { now: NOW, ..Dump::default() };
        let main = record(Some(EXPIRY), 3, encode(&job(Some(("k".into(), 9)))));
        dump.records.insert(format!("job/{ID}"), main);
        dump.records.insert(format!("payload/{ID}"), record(Some(EXPIRY), 1, Vec::new()));
        dump.records.insert(format!("result/{ID}"), record(Some(EXPIRY), 3, Vec::new()));
        dump.records.insert("key/default/k".into(), record(Some(EXPIRY), 9, encode(&(Owner::Job(7), 0u128))));
        stand(&mut dump, HOME, ID, EXPIRY);
        stand(&mut dump, "names", "default/q", NOW);
        dump
    }

    #[test]
    fn what_balances_is_passed_and_each_damage_found() {
        let clean = audit(&balanced());
        assert!(clean.broken.is_empty() && clean.jobs == 1 && clean.entries == 2, "{clean:?}");
        type Damage = (&'static str, fn(&mut Dump));
        let damages: [Damage; 11] = [
            ("an entry is missing", |d| drop(d.places.remove(ID))),
            ("a wrong score", |d| stand(d, HOME, ID, EXPIRY + 1)),
            ("it stands elsewhere too", |d| stand(d, "due", ID, NOW)),
            ("an entry of nobody", |d| stand(d, "st/default/q/system/queued", "00000000000000000000000008", NOW)),
            ("the record is gone", |d| drop(d.records.remove(&format!("job/{ID}")))),
            ("a lease is left", |d| drop(d.records.insert(format!("lease/{ID}"), record(None, 1, Vec::new())))),
            ("the key names another", |d| {
                d.records.insert("key/default/k".into(), record(Some(EXPIRY), 9, encode(&(Owner::Job(8), 0u128))));
            }),
            ("the Redis never forgets", |d| {
                d.records.entry(format!("payload/{ID}")).and_modify(|r| r.ttl = -1);
            }),
            ("a bit has flipped", |d| {
                d.records.entry(format!("job/{ID}")).and_modify(|r| r.bytes[5] ^= 4);
            }),
            ("a record of nobody", |d| drop(d.records.insert("what/ever".into(), record(None, 1, Vec::new())))),
            ("the queue is not known", |d| drop(d.indexes.remove("names"))),
        ];
        for (what, damage) in damages {
            let mut dump = balanced();
            damage(&mut dump);
            assert!(!audit(&dump).broken.is_empty(), "{what}");
        }
    }
}
