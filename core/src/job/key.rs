//! Idempotency keys: what is done when a key is bound already.
//!
//! A submit is sent without looking: it is guarded by the key's absence. Only when that guard refuses is
//! the key looked up, and then whom it names.

use alloc::vec;

use super::moves::as_read;
use super::record::{Job, KeyRecord, Owner};
use crate::failure::Failure;
use crate::group::record::Group;
use crate::name::Name;
use crate::replica::Mark;
use crate::replica::task::{Cx, decode_record};
use crate::store::{Guard, Read, Record, Snapshot, Version, keys};

/// The look-up of one key.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct Lookup {
    key: Name,
    fingerprint: u128,
    bound: Option<(KeyRecord, Version)>,
}

/// What the look-up came to.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub(crate) enum Found {
    Read(Read),
    /// The same was asked for before, and this came of it.
    Existing(Owner),
    /// It has been freed meanwhile, or names somebody who is gone.
    Free(Option<TakeOver>),
    Failed(Failure),
}

/// A key that names somebody whose record has vanished.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct TakeOver {
    owner: Name,
    /// What stands there: nothing, or a stub.
    found: Record,
    version: Version,
}

impl TakeOver {
    /// Instead of the key's absence.
    pub fn guards(&self, key: Name) -> [Guard; 2] {
        [as_read(self.owner.clone(), &self.found), Guard::At(key, self.version)]
    }
}

impl Lookup {
    /// `fingerprint` is of what is asked for now.
    pub fn new(key: Name, fingerprint: u128) -> Lookup {
        Lookup { key, fingerprint, bound: None }
    }

    pub fn start(&self) -> Read {
        one(self.key.clone())
    }

    pub fn read(&mut self, snapshot: &Snapshot, cx: &mut Cx<'_>) -> Found {
        let record = snapshot.records.first().unwrap_or(&Record::Absent);
        let Some((bound, version)) = &self.bound else {
            return match decode_record::<KeyRecord>(record) {
                Ok(Some((version, bound))) => {
                    let owner = keys::owner(bound.owner);
                    self.bound = Some((bound, version));
                    Found::Read(one(owner))
                }
                Ok(None) => Found::Free(None),
                Err(_) => Found::Failed(Failure::Quarantined),
            };
        };
        let there = match bound.owner {
            Owner::Job(_) => decode_record::<Job>(record).map(|found| found.is_some_and(|(_, job)| !job.deleted)),
            Owner::Group(_) => decode_record::<Group>(record).map(|found| found.is_some()),
        };
        match there {
            Err(_) => Found::Failed(Failure::Quarantined),
            Ok(true) if bound.fingerprint != self.fingerprint => Found::Failed(Failure::KeyReused),
            Ok(true) => {
                cx.stats.submits_repeated += 1;
                Found::Existing(bound.owner)
            }
            Ok(false) => {
                // acked-never-lost does not cover a record that the store lost; the key must not stay
                // bound to it for ever.
                cx.mark(Mark::KeyTakenOver);
                Found::Free(Some(TakeOver {
                    owner: keys::owner(bound.owner),
                    found: record.clone(),
                    version: *version,
                }))
            }
        }
    }
}

fn one(key: Name) -> Read {
    Read { records: vec![key], ..Read::default() }
}
