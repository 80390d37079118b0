//! A digest of an output that is the same at the server, which has contents, and in a replay, which has stand-ins.

use alloc::vec::Vec;

use super::redact::{self, Kind};
use crate::opaque::{Content, Opaque, stand_in};
use crate::replica::{Output, StoreOp};
use crate::request::{ChildView, JobView, Leased, Outcome, Response};
use crate::store::{Txn, Value, Write};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Server,
    Replay,
}

/// Takes contents out of an answer. `bytes` is room to work in.
pub(super) fn of(output: &mut Output, side: Side, bytes: &mut Vec<u8>) -> u64 {
    bytes.clear();
    match output {
        Output::Store { id, op: StoreOp::Read(read) } => add(bytes, &(0u8, id, read)),
        Output::Store { id, op: StoreOp::Commit(commit) } => {
            add(bytes, &(1u8, id, commit.grows, commit.txns.len()));
            commit.txns.iter().for_each(|txn| transaction(bytes, txn, side));
        }
        Output::Reply { id, outcome } => {
            blank(outcome, side);
            add(bytes, &(2u8, id, outcome));
        }
        Output::Mark(mark) => add(bytes, &(3u8, mark)),
    }
    xxhash_rust::xxh3::xxh3_64(bytes)
}

fn add<T: serde::Serialize>(bytes: &mut Vec<u8>, value: &T) {
    // Writing plain data to a growing vector cannot fail.
    *bytes = crate::codec::append(value, core::mem::take(bytes));
}

fn transaction(bytes: &mut Vec<u8>, txn: &Txn, side: Side) {
    add(bytes, &(txn.valid_until, &txn.guards, &txn.take, txn.writes.len()));
    for write in &txn.writes {
        match write {
            Write::Put { key, version, value: Value::Bytes(value), expiry }
                if side == Side::Server && Kind::of(key) != Kind::None =>
            {
                let value = Value::Bytes(redact::stored(Kind::of(key), value));
                add(bytes, &Write::Put { key: key.clone(), version: *version, value, expiry: *expiry });
            }
            write => add(bytes, write),
        }
    }
}

/// Takes contents out of an answer.
fn blank(outcome: &mut Outcome, side: Side) {
    let Ok(response) = outcome else { return };
    match response {
        Response::Created(view) | Response::Existing(view) | Response::Job(view) => job(view, side),
        Response::Jobs { jobs, .. } => jobs.iter_mut().for_each(|view| job(view, side)),
        Response::Content(content) => opaque(&mut content.data, side),
        Response::Claimed(jobs) => jobs.iter_mut().for_each(|one| leased(one, side)),
        Response::Dispatched(jobs) => jobs.iter_mut().for_each(|one| leased(&mut one.job, side)),
        Response::Children { children, .. } => children.iter_mut().for_each(|one| child(one, side)),
        Response::Inspected(seen) => seen.records.iter_mut().for_each(|record| record.text.clear()),
        Response::Batch(outcomes) => outcomes.iter_mut().for_each(|outcome| blank(outcome, side)),
        _ => {}
    }
}

fn job(view: &mut JobView, side: Side) {
    view.attempts.iter_mut().for_each(redact::attempt);
    view.metadata.iter_mut().for_each(|data| opaque(data, side));
    view.progress.iter_mut().for_each(|progress| opaque(&mut progress.value, side));
}

fn leased(one: &mut Leased, side: Side) {
    one.metadata.iter_mut().for_each(|data| opaque(data, side));
    one.payload.iter_mut().for_each(|Content { data, .. }| opaque(data, side));
}

fn child(one: &mut ChildView, side: Side) {
    one.error.iter_mut().for_each(redact::error);
    one.result.iter_mut().for_each(|content| opaque(&mut content.data, side));
}

/// Leaves of a content the hash that its stand-in has room for. An [`Opaque`] is written as hash and length.
fn opaque(data: &mut Opaque, side: Side) {
    let stands = match side {
        Side::Server => stand_in(data.hash, data.len().min(16)),
        Side::Replay => data.bytes.clone(),
    };
    let mut hash = [0; 16];
    hash.iter_mut().zip(stands.iter()).for_each(|(to, from)| *to = *from);
    data.hash = u128::from_le_bytes(hash);
}
