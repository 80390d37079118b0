//! What the bytes in the folder mean. **Stores written today are read tomorrow**: whatever changes
//! here changes [`FORMAT`].
//!
//! The folder holds `FORMAT` (this version, as text), `lock`, `journal` (see there) and three trees:
//!
//! | tree | key | value |
//! | --- | --- | --- |
//! | `records` | the record's key | frame, then its bytes, or their length if they are kept apart |
//! | `bytes` | the record's key | bytes above [`APART`] |
//! | `small` | `m`, index, member | score |
//! | | `l`, log, sequence number | entry |
//! | | `e`, expiry, record's key | nothing: what to look at when collecting garbage |
//! | | `c` | the largest clock that was handed out |
//!
//! Numbers in keys are big-endian, so that byte order is their order; a name inside a key is preceded
//! by its length, so that no two pairs of names make the same key.

use bytes::{Buf, BufMut, Bytes};
use leasehold_core::Name;
use leasehold_core::store::engine::Head;
use leasehold_core::store::{Clock, LogEntry, LogItem, Score, Version, decode_taken, encode_taken};

/// The version of everything below.
pub(crate) const FORMAT: u32 = 2;

/// Bytes of a record that are more than this are kept apart from its frame: changing its expiry
/// or comparing its version then does not touch them.
pub(crate) const APART: usize = 4 * 1024;

pub(crate) const MEMBER: u8 = b'm';
pub(crate) const LOG: u8 = b'l';
pub(crate) const EXPIRY: u8 = b'e';
pub(crate) const CLOCK_KEY: &[u8] = b"c";

const _: () = assert!(MEMBER != LOG && LOG != EXPIRY && MEMBER != EXPIRY && CLOCK_KEY[0] != MEMBER);
const _: () = assert!(CLOCK_KEY[0] != LOG && CLOCK_KEY[0] != EXPIRY);

const INLINE: u8 = 0;
const SEPARATE: u8 = 1;
/// Larger than any clock.
const NEVER: u64 = u64::MAX;
const FRAME: usize = 1 + 8 + 8 + 8;

pub(crate) fn put_len(out: &mut Vec<u8>, mut n: usize) {
    while n >= 0x80 {
        out.push(n as u8 | 0x80);
        n >>= 7;
    }
    out.push(n as u8);
}

pub(crate) fn get_len(bytes: &mut &[u8]) -> Option<usize> {
    let mut n = 0;
    for shift in (0..63).step_by(7) {
        let (&b, rest) = bytes.split_first()?;
        *bytes = rest;
        n |= usize::from(b & 0x7f) << shift;
        if b < 0x80 {
            return Some(n);
        }
    }
    None
}

fn get_slice<'a>(bytes: &mut &'a [u8]) -> Option<&'a [u8]> {
    let len = get_len(bytes)?;
    let (head, rest) = bytes.split_at_checked(len)?;
    *bytes = rest;
    Some(head)
}

fn tagged(tag: u8, name: &Name, more: usize) -> Vec<u8> {
    let mut key = Vec::with_capacity(4 + name.len() + more);
    key.push(tag);
    put_len(&mut key, name.len());
    key.extend_from_slice(name);
    key
}

pub(crate) fn member_key(index: &Name, member: &Name) -> Vec<u8> {
    let mut key = tagged(MEMBER, index, member.len());
    key.extend_from_slice(member);
    key
}

/// Index and member of a member's key.
pub(crate) fn parse_member(key: &[u8]) -> Option<(&[u8], &[u8])> {
    let (&tag, mut rest) = key.split_first()?;
    let index = get_slice(&mut rest)?;
    (tag == MEMBER).then_some((index, rest))
}

pub(crate) fn parse_score(value: &[u8]) -> Option<Score> {
    Some(Score::from_be_bytes(value.try_into().ok()?))
}

pub(crate) fn log_key(log: &Name, seq: u64) -> Vec<u8> {
    let mut key = tagged(LOG, log, 8);
    key.put_u64(seq);
    key
}

/// Log and sequence number of an entry's key.
pub(crate) fn parse_log(key: &[u8]) -> Option<(&[u8], u64)> {
    let (&tag, mut rest) = key.split_first()?;
    let log = get_slice(&mut rest)?;
    (tag == LOG).then_some((log, parse_score(rest)?))
}

pub(crate) fn expiry_key(expiry: Clock, key: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(9 + key.len());
    out.push(EXPIRY);
    out.put_u64(expiry);
    out.extend_from_slice(key);
    out
}

/// Expiry and record's key.
pub(crate) fn parse_expiry(key: &[u8]) -> Option<(Clock, &[u8])> {
    let (&tag, rest) = key.split_first()?;
    let (expiry, key) = rest.split_at_checked(8)?;
    (tag == EXPIRY).then_some((parse_score(expiry)?, key))
}

/// A record's value, with its bytes or (`None`) without.
pub(crate) fn encode_record(head: &Head, bytes: Option<&[u8]>) -> Vec<u8> {
    let mut out = Vec::with_capacity(FRAME + bytes.map_or(8, <[u8]>::len));
    out.push(if bytes.is_some() { INLINE } else { SEPARATE });
    out.put_u64_le(head.version.0);
    out.put_u64_le(head.at);
    out.put_u64_le(head.expiry.unwrap_or(NEVER));
    match bytes {
        Some(bytes) => out.extend_from_slice(bytes),
        None => out.put_u64_le(head.len as u64),
    }
    out
}

/// A record's frame, and its bytes unless they are kept apart.
pub(crate) fn decode_record(value: &Bytes) -> Option<(Head, Option<Bytes>)> {
    let mut frame = value.get(..FRAME)?;
    let kind = frame.get_u8();
    let version = Version(frame.get_u64_le());
    let at = frame.get_u64_le();
    let expiry = Some(frame.get_u64_le()).filter(|e| *e != NEVER);
    match kind {
        INLINE => {
            let bytes = value.slice(FRAME..);
            Some((Head { version, at, expiry, len: bytes.len() }, Some(bytes)))
        }
        SEPARATE => {
            let len = u64::from_le_bytes(value.get(FRAME..)?.try_into().ok()?);
            Some((Head { version, at, expiry, len: usize::try_from(len).ok()? }, None))
        }
        _ => None,
    }
}

pub(crate) fn encode_log(at: Clock, items: &[LogItem]) -> Vec<u8> {
    let mut out = Vec::with_capacity(16 + items.iter().map(|i| 8 + i.bytes.len() + 48 * i.taken.len()).sum::<usize>());
    out.put_u64(at);
    put_len(&mut out, items.len());
    for item in items {
        put_len(&mut out, item.bytes.len());
        out.extend_from_slice(&item.bytes);
        let taken = encode_taken(&item.taken);
        put_len(&mut out, taken.len());
        out.extend_from_slice(&taken);
    }
    out
}

pub(crate) fn decode_log(seq: u64, value: &[u8]) -> Option<LogEntry> {
    let (at, mut rest) = value.split_at_checked(8)?;
    let count = get_len(&mut rest)?;
    let mut items = Vec::new();
    for _ in 0..count {
        let bytes = Bytes::copy_from_slice(get_slice(&mut rest)?);
        items.push(LogItem { bytes, taken: decode_taken(get_slice(&mut rest)?)? });
    }
    rest.is_empty().then_some(())?;
    Some(LogEntry { seq, at: parse_score(at)?, items })
}

#[cfg(test)]
mod tests {
    use super::*;
    use leasehold_core::store::TakenMember;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn keys_and_values_come_back(
            name in proptest::collection::vec(any::<u8>(), 0..300),
            tail in proptest::collection::vec(any::<u8>(), 0..40),
            n in any::<u64>(),
            expiry in proptest::option::of(0u64..1 << 53),
        ) {
            let (index, member) = (Name::from(name.clone()), Name::from(tail.clone()));
            let key = member_key(&index, &member);
            prop_assert_eq!(parse_member(&key), Some((&name[..], &tail[..])));
            let key = log_key(&index, n);
            prop_assert_eq!(parse_log(&key), Some((&name[..], n)));
            let key = expiry_key(n, &name);
            prop_assert_eq!(parse_expiry(&key), Some((n, &name[..])));
            let head = Head { version: Version(n), at: n >> 11, expiry, len: tail.len() };
            let inline = Bytes::from(encode_record(&head, Some(&tail)));
            prop_assert_eq!(decode_record(&inline), Some((head, Some(Bytes::from(tail.clone())))));
            let apart = Bytes::from(encode_record(&head, None));
            prop_assert_eq!(decode_record(&apart), Some((head, None)));
            let taken = vec![TakenMember { source: 3, member, score: n >> 11 }];
            let items = vec![LogItem { bytes: Bytes::from(name), taken }, LogItem { bytes: Bytes::new(), taken: vec![] }];
            let entry = LogEntry { seq: 7, at: n >> 11, items };
            prop_assert_eq!(decode_log(7, &encode_log(entry.at, &entry.items)), Some(entry));
        }

        #[test]
        fn any_bytes_decode_to_something_or_nothing(bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
            let _ = (parse_member(&bytes), parse_log(&bytes), parse_expiry(&bytes), decode_log(1, &bytes));
            let _ = decode_record(&Bytes::from(bytes));
        }
    }
}
