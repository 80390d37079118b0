//! The books: whether each job stands where its records say, looked at from outside, with code of its own.

use leasehold_core::job::record::{Job, KeyRecord, Owner, Status};
use leasehold_core::store::{Read, Record, Scan, Snapshot, Store as _, keys};
use leasehold_core::{JobId, Name, codec};
use leasehold_disk::DiskStore;

/// Jobs looked at, and what is wrong.
#[derive(Debug, Default)]
pub struct Audit {
    pub jobs: u64,
    pub wrong: Vec<String>,
}

/// Looks at every job of a store.
pub fn audit(store: &mut DiskStore) -> Audit {
    let mut audit = Audit::default();
    let mut cursor = None;
    loop {
        let scan = Some(Scan { cursor, limit: 1_000 });
        let page = match store.read(&Read { scan, ..Read::default() }) {
            Ok(Snapshot { scan: Some(page), .. }) => page,
            other => {
                audit.wrong.push(format!("the store cannot be walked through: {:?}", other.err()));
                return audit;
            }
        };
        for key in &page.keys {
            let id = key.strip_prefix(&b"job/"[..]).and_then(|member| keys::job_of(&Name::new(member)));
            if let Some(id) = id
                && let Err(what) = job(store, id, &mut audit.jobs)
            {
                audit.wrong.push(format!("{id}: {what}"));
            }
        }
        cursor = page.cursor;
        if cursor.is_none() {
            break;
        }
    }
    ghosts(store, &mut audit);
    audit
}

/// Members of status indexes whose job is gone.
fn ghosts(store: &mut DiskStore, audit: &mut Audit) {
    let members: Vec<(Name, Name, u64)> = store
        .books()
        .iter()
        .filter(|(index, _)| keys::status_of(index).is_some())
        .flat_map(|(index, members)| members.iter().map(|(m, s)| (index.clone(), m.clone(), s)).collect::<Vec<_>>())
        .collect();
    for (index, member, score) in members {
        let Some(id) = keys::job_of(&member) else { continue };
        let found = store.read(&Read { records: vec![keys::job(id)], ..Read::default() });
        // The places of ended jobs are swept some time after their records have expired.
        let swept_later = keys::status_of(&index).is_some_and(|(.., s)| s.is_terminal());
        match found {
            Ok(s) if s.records[0].is_absent() && !(swept_later && score <= s.clock) => {
                audit.wrong.push(format!("{member} stands in {index} and is gone"));
            }
            _ => {}
        }
    }
}

fn job(store: &mut DiskStore, id: JobId, count: &mut u64) -> Result<(), String> {
    let records = vec![keys::job(id), keys::lease(id), keys::payload(id)];
    let first = store.read(&Read { records, ..Read::default() }).map_err(|e| format!("{e:?}"))?;
    let [main, lease, payload] = &first.records[..] else { return Err("an answer of another length".into()) };
    let Some(bytes) = main.bytes() else { return Ok(()) };
    *count += 1;
    let main_record: Job = codec::decode(bytes).map_err(|e| format!("its record cannot be decoded: {e:?}"))?;
    let member = keys::member(id);
    let place = |s| (keys::status(&main_record.tenant, &main_record.queue, main_record.class, s), member.clone());
    let mut members: Vec<_> = Status::ALL.map(place).into();
    members.extend([keys::LEASES, keys::DUE].map(|index| (index, member.clone())));
    let keyed = main_record.key.as_ref().map(|(key, _)| keys::key(&main_record.tenant, key));
    let ask = Read { members, records: keyed.into_iter().collect(), ..Read::default() };
    let second = store.read(&ask).map_err(|e| format!("{e:?}"))?;
    let stands: Vec<Status> =
        Status::ALL.into_iter().zip(&second.members).filter(|(_, m)| m.is_some()).map(|(s, _)| s).collect();
    let [leases, due] = [second.members[9].is_some(), second.members[10].is_some()];
    if main_record.deleted {
        return expect(stands.is_empty(), || format!("deleted, and stands in {stands:?}"));
    }
    let [status] = stands[..] else { return Err(format!("stands in {stands:?}")) };
    match &main_record.end {
        Some(end) => {
            expect(end.status == status, || format!("ended {:?} and stands in {status:?}", end.status))?;
            expect(lease.is_absent() && !leases && !due, || format!("ended {status:?}, with a lease or due"))?;
        }
        None => {
            expect(!status.is_terminal(), || format!("has not ended and stands in {status:?}"))?;
            expect(matches!(payload, Record::Present { expiry: None, .. }), || "lives without a payload".into())?;
            let running = status == Status::Running;
            let agree = running != lease.is_absent() && running == leases;
            expect(agree, || format!("{status:?}, lease {}, in `leases` {leases}", !lease.is_absent()))?;
            let waits = matches!(status, Status::Scheduled | Status::Retrying);
            expect(waits == due, || format!("{status:?}, in `due` {due}"))?;
        }
    }
    let Some((key, version)) = &main_record.key else { return Ok(()) };
    let bound = match second.records.first() {
        Some(Record::Present { version: at, bytes: Some(bytes), .. }) if at == version => {
            let key: KeyRecord = codec::decode(bytes).map_err(|e| format!("its key cannot be decoded: {e:?}"))?;
            key.owner == Owner::Job(id)
        }
        _ => false,
    };
    let free = matches!(status, Status::Dead | Status::Cancelled | Status::Expired);
    expect(bound || main_record.end.is_some(), || format!("its key {key} is not bound to it"))?;
    expect(!(bound && free), || format!("ended {status:?}, and its key {key} is bound to it"))
}

fn expect(holds: bool, otherwise: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(otherwise()) }
}
