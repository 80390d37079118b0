//! What a replica was told, without contents.

use alloc::string::String;
use alloc::vec::Vec;
use bytes::Bytes;

use crate::codec::{self, Undecodable};
use crate::job::record::{AttemptRecord, ErrorInfo, History, Job, ProgressRecord, decode_content, encode_content};
use crate::name::Name;
use crate::opaque::{Content, Opaque, hash, stand_in};
use crate::replica::{StoreAnswer, StoreOp};
use crate::request::Request;
use crate::store::{Answer, Record, StoreError};

/// What kind of contents a record has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    None,
    Content,
    Job,
    History,
    Progress,
}

impl Kind {
    /// `key`: a record's, or the prefix of some records' keys.
    pub fn of(key: &Name) -> Kind {
        let starts = |prefix: &[u8]| key.starts_with(prefix);
        match () {
            () if starts(b"payload/") || starts(b"result/") => Kind::Content,
            () if starts(b"job/") => Kind::Job,
            () if starts(b"history/") => Kind::History,
            () if starts(b"progress/") => Kind::Progress,
            () => Kind::None,
        }
    }
}

/// The kinds of the records in an answer.
#[derive(Clone, Debug, Default)]
pub(super) struct Shape {
    records: Vec<Kind>,
    /// Of the records of each member, for each slice or for each transaction's take.
    given: Vec<Vec<Kind>>,
}

pub(super) fn shape(op: &StoreOp) -> Shape {
    let kinds = |names: &[Name]| names.iter().map(Kind::of).collect();
    match op {
        StoreOp::Read(read) => {
            Shape { records: kinds(&read.records), given: read.slices.iter().map(|s| kinds(&s.give)).collect() }
        }
        StoreOp::Commit(commit) => {
            let takes = commit.txns.iter().map(|txn| txn.take.as_ref().map(|take| kinds(&take.give)));
            Shape { records: Vec::new(), given: takes.map(Option::unwrap_or_default).collect() }
        }
    }
}

/// An answer that nobody awaits says nothing to the replica, so it is not kept.
pub(super) fn reply(asked: Option<Shape>, reply: &mut Result<StoreAnswer, StoreError>) {
    let Some(shape) = asked else {
        *reply = Err(StoreError::Unknown);
        return;
    };
    match reply {
        Ok(StoreAnswer::Read(snapshot)) => {
            snapshot.records.iter_mut().zip(&shape.records).for_each(|(r, kind)| record(*kind, r));
            for (slice, kinds) in snapshot.slices.iter_mut().zip(&shape.given) {
                slice.iter_mut().for_each(|entry| records(kinds, &mut entry.records));
            }
        }
        Ok(StoreAnswer::Commit(answered)) => {
            for (answer, kinds) in answered.answers.iter_mut().zip(&shape.given) {
                if let Answer::Applied { taken } = answer {
                    taken.iter_mut().for_each(|member| records(kinds, &mut member.records));
                }
            }
        }
        Err(_) => {}
    }
}

fn records(kinds: &[Kind], records: &mut [Record]) {
    records.iter_mut().zip(kinds).for_each(|(r, kind)| record(*kind, r));
}

fn record(kind: Kind, record: &mut Record) {
    if let Record::Present { bytes: Some(bytes), .. } = record
        && kind != Kind::None
    {
        *bytes = stored(kind, bytes);
    }
}

/// What stands for a stored record.
pub(super) fn stored(kind: Kind, bytes: &Bytes) -> Bytes {
    let redacted = match kind {
        Kind::None => Ok(bytes.clone()),
        Kind::Content => decode_content(bytes).map(|Content { form, data }| {
            encode_content(&Content { form, data: Opaque { bytes: stand_in(data.hash, data.len()), ..data } })
        }),
        Kind::Job => codec::decode::<Job>(bytes).map(|mut job| {
            job.metadata.as_mut().into_iter().for_each(plain);
            job.end.iter_mut().filter_map(|end| end.attempt.as_mut()).for_each(attempt);
            codec::encode(&job)
        }),
        Kind::History => codec::decode::<History>(bytes).map(|mut history| {
            history.attempts.iter_mut().for_each(attempt);
            codec::encode(&history)
        }),
        Kind::Progress => codec::decode::<ProgressRecord>(bytes).map(|mut progress| {
            plain(&mut progress.value);
            codec::encode(&progress)
        }),
    };
    match redacted {
        Ok(bytes) => bytes,
        // What cannot be read is not kept either, only that.
        Err(Undecodable::Corrupt) => Bytes::new(),
        Err(Undecodable::Newer) => codec::newer(),
    }
}

pub(super) fn plain(bytes: &mut Vec<u8>) {
    *bytes = stand_in(hash(bytes), bytes.len()).to_vec();
}

pub(super) fn attempt(attempt: &mut AttemptRecord) {
    attempt.error.iter_mut().for_each(error);
}

/// As long as it was: what is kept of an error is cut by its length.
pub(super) fn error(error: &mut ErrorInfo) {
    for text in [Some(&mut error.message), error.kind.as_mut(), error.detail.as_mut()].into_iter().flatten() {
        *text = blank(text);
    }
}

pub(super) fn blank(text: &str) -> String {
    core::iter::repeat_n('x', text.len()).collect()
}

/// Payloads, results, metadata and progress lose their bytes when they are written; texts of errors here.
pub(super) fn request(request: &mut Request) {
    match request {
        Request::Fail(fail) => {
            // Where it is cut depends on its letters.
            fail.error = core::mem::take(&mut fail.error).cut();
            error(&mut fail.error);
        }
        Request::Batch(items) => items.iter_mut().for_each(self::request),
        _ => {}
    }
}
