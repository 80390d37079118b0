//! Answers of the scripts.

use std::vec::IntoIter;

use bytes::Bytes;
use leasehold_core::Name;
use leasehold_core::store::{
    Answer, Clock, Commit, CommitReply, Entry, LogEntry, LogItem, Place, Read, Record, ScanPage, Score, Snapshot,
    Taken, Version, decode_taken,
};
use redis::Value;

use crate::layout::Layout;

/// The answer is not what the script gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Garbled;

/// Clock, expiry and version in front of a record's bytes.
const HEAD: usize = 24;
/// The expiry of what does not expire.
const NEVER: u64 = u64::MAX;

/// Values one after another.
struct Values(IntoIter<Value>);

impl Values {
    fn next(&mut self) -> Result<Value, Garbled> {
        self.0.next().ok_or(Garbled)
    }

    fn bytes(&mut self) -> Result<Vec<u8>, Garbled> {
        bytes(self.next()?)
    }

    fn number(&mut self) -> Result<u64, Garbled> {
        match self.next()? {
            Value::Int(n) => u64::try_from(n).map_err(|_| Garbled),
            _ => Err(Garbled),
        }
    }

    fn count(&mut self) -> Result<usize, Garbled> {
        usize::try_from(self.number()?).map_err(|_| Garbled)
    }

    fn record(&mut self) -> Result<Record, Garbled> {
        match self.next()? {
            Value::Int(0) => Ok(Record::Absent),
            Value::BulkString(whole) => {
                let head: &[u8; HEAD] = whole.first_chunk().ok_or(Garbled)?;
                let (at, expiry, version) = parse_head(head);
                let bytes = Bytes::from(whole).slice(HEAD..);
                Ok(Record::Present { version, at, expiry, len: bytes.len(), bytes: Some(bytes) })
            }
            Value::Array(parts) => {
                let mut parts = Values(parts.into_iter());
                let head = parts.bytes()?;
                let (at, expiry, version) = parse_head(head.first_chunk().ok_or(Garbled)?);
                Ok(Record::Present { version, at, expiry, len: parts.count()?, bytes: None })
            }
            _ => Err(Garbled),
        }
    }
}

fn bytes(value: Value) -> Result<Vec<u8>, Garbled> {
    match value {
        Value::BulkString(bytes) => Ok(bytes),
        _ => Err(Garbled),
    }
}

fn array(value: Value) -> Result<Values, Garbled> {
    match value {
        Value::Array(values) => Ok(Values(values.into_iter())),
        _ => Err(Garbled),
    }
}

fn parse_head(head: &[u8; HEAD]) -> (Clock, Option<Clock>, Version) {
    let word = |at: usize| {
        let mut word = [0; 8];
        word.copy_from_slice(&head[at..at + 8]);
        u64::from_be_bytes(word)
    };
    let expiry = word(8);
    (word(0), (expiry != NEVER).then_some(expiry), Version(word(16)))
}

/// Redis writes scores as doubles; whole numbers below 2^53 come as digits, or, from some releases,
/// with an exponent.
fn score(text: &[u8]) -> Result<Score, Garbled> {
    let text = std::str::from_utf8(text).map_err(|_| Garbled)?;
    if let Ok(score) = text.parse::<u64>() {
        return Ok(score);
    }
    let score: f64 = text.parse().map_err(|_| Garbled)?;
    if score.fract() != 0.0 || !(0.0..=9_007_199_254_740_992.0).contains(&score) {
        return Err(Garbled);
    }
    Ok(score as u64)
}

/// Clock, and the names of what was found damaged.
fn opening(layout: &Layout, values: &mut Values) -> Result<(Clock, Vec<Name>), Garbled> {
    let clock = score(&values.bytes()?)?;
    let damaged = match values.next()? {
        Value::Array(keys) => keys.into_iter().map(|k| Ok(layout.name(&bytes(k)?))).collect::<Result<_, Garbled>>()?,
        _ => Vec::new(),
    };
    Ok((clock, damaged))
}

/// The answer to a read, and the names of what is not as it was written.
pub(crate) fn read(layout: &Layout, ask: &Read, reply: Value) -> Result<(Snapshot, Vec<Name>), Garbled> {
    let mut v = array(reply)?;
    let (clock, damaged) = opening(layout, &mut v)?;
    let mut out = Snapshot { clock, ..Snapshot::default() };
    for _ in &ask.records {
        out.records.push(v.record()?);
    }
    for slice in &ask.slices {
        let n = v.count()?;
        let mut entries = Vec::with_capacity(n.min(1 << 16));
        for _ in 0..n {
            let member = Name::new(&v.bytes()?);
            let score = score(&v.bytes()?)?;
            let records = slice.give.iter().map(|_| v.record()).collect::<Result<_, _>>()?;
            entries.push(Entry { member, score, records });
        }
        out.slices.push(entries);
    }
    for _ in &ask.counts {
        out.counts.push(v.number()?);
    }
    for _ in &ask.members {
        let place = match v.next()? {
            Value::Nil => None,
            value => Some(Place { score: score(&bytes(value)?)?, rank: v.number()? }),
        };
        out.members.push(place);
    }
    if ask.log.as_ref().is_some_and(|log| log.limit > 0 && log.after < u64::MAX) {
        for _ in 0..v.count()? {
            let id = v.bytes()?;
            let id = std::str::from_utf8(&id).map_err(|_| Garbled)?;
            let seq = id.split_once('-').and_then(|(_, seq)| seq.parse().ok()).ok_or(Garbled)?;
            out.log.push(log_entry(seq, Bytes::from(v.bytes()?))?);
        }
    }
    if ask.scan.is_some() {
        let cursor = Bytes::from(v.bytes()?);
        let n = v.count()?;
        let mut keys = Vec::with_capacity(n.min(1 << 16));
        for _ in 0..n {
            keys.push(layout.record_name(&v.bytes()?).ok_or(Garbled)?);
        }
        out.scan = Some(ScanPage { keys, cursor: (&cursor[..] != b"0").then_some(cursor) });
    }
    Ok((out, damaged))
}

/// Clock, then for each item its length and bytes, the length of what was taken and that.
fn log_entry(seq: u64, value: Bytes) -> Result<LogEntry, Garbled> {
    let mut at = 0usize;
    let mut part = |len: usize| {
        let end = at.checked_add(len).filter(|end| *end <= value.len()).ok_or(Garbled)?;
        let part = value.slice(at..end);
        at = end;
        Ok(part)
    };
    let number = |part: Bytes| part.iter().fold(0u64, |n, b| n << 8 | u64::from(*b));
    let clock = number(part(8)?);
    let mut items = Vec::new();
    let mut left = value.len() - 8;
    while left > 0 {
        let len = number(part(4)?) as usize;
        let bytes = part(len)?;
        let taken_len = number(part(4)?) as usize;
        let taken = part(taken_len)?;
        let taken = if taken.is_empty() { Vec::new() } else { decode_taken(&taken).ok_or(Garbled)? };
        items.push(LogItem { bytes, taken });
        left = left.checked_sub(8 + len + taken_len).ok_or(Garbled)?;
    }
    Ok(LogEntry { seq, at: clock, items })
}

/// The answer to a commit, and the names of what is not as it was written.
pub(crate) fn commit(layout: &Layout, ask: &Commit, reply: Value) -> Result<(CommitReply, Vec<Name>), Garbled> {
    let mut v = array(reply)?;
    let (clock, damaged) = opening(layout, &mut v)?;
    let mut answers = Vec::with_capacity(ask.txns.len());
    for txn in &ask.txns {
        // When all were applied and took nothing, the script says no more.
        let Some(value) = v.0.next() else {
            answers.push(Answer::Applied { taken: Vec::new() });
            continue;
        };
        answers.push(match value {
            Value::Int(0) => Answer::Applied { taken: Vec::new() },
            Value::Int(-1) => Answer::Empty,
            Value::Int(-2) => Answer::TooLate,
            // Something that it would have written is not what it should be; nothing was.
            Value::Int(-3) => Answer::Refused(0),
            Value::Int(n) => Answer::Refused(usize::try_from(n).map_err(|_| Garbled)?.saturating_sub(1)),
            Value::Array(values) => {
                let mut v = Values(values.into_iter());
                let n = v.count()?;
                let give = txn.take.as_ref().map_or(0, |t| t.give.len());
                let mut taken = Vec::with_capacity(n.min(1 << 16));
                for _ in 0..n {
                    taken.push(Taken {
                        source: u32::try_from(v.number()?).map_err(|_| Garbled)?,
                        member: Name::new(&v.bytes()?),
                        score: score(&v.bytes()?)?,
                        records: (0..give).map(|_| v.record()).collect::<Result<_, _>>()?,
                    });
                }
                Answer::Applied { taken }
            }
            _ => return Err(Garbled),
        });
    }
    Ok((CommitReply { clock, answers }, damaged))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scores_come_in_any_spelling() {
        for (text, expect) in
            [("0", 0), ("9007199254740991", 9_007_199_254_740_991), ("1.7e+15", 1_700_000_000_000_000)]
        {
            assert_eq!(score(text.as_bytes()), Ok(expect), "{text}");
        }
        for text in ["", "-1", "1.5", "inf", "nan", "x"] {
            assert_eq!(score(text.as_bytes()), Err(Garbled), "{text}");
        }
    }

    #[test]
    fn a_damaged_log_entry_is_an_error() {
        assert!(log_entry(1, Bytes::from_static(&[0; 8])).is_ok());
        for len in [0, 7, 9, 15] {
            assert_eq!(log_entry(1, Bytes::from(vec![0; len])), Err(Garbled), "{len} bytes");
        }
        assert_eq!(log_entry(1, Bytes::from(vec![0xff; 24])), Err(Garbled));
    }
}
