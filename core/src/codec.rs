//! The encoding of records: a format byte, postcard, and a check.
//!
//! The format byte names the release of the encoding that wrote the record. A record of a newer
//! format is told apart from a corrupt one: the first means that this replica is too old, the
//! second goes to quarantine.

use alloc::vec::Vec;
use bytes::Bytes;
use xxhash_rust::xxh3::xxh3_64;

/// The format that this build writes and the newest that it reads.
pub const FORMAT: u8 = 1;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Undecodable {
    /// Written by a newer release.
    Newer,
    Corrupt,
}

pub fn encode<T: serde::Serialize>(value: &T) -> Bytes {
    encode_with(value, &[])
}

/// As [`encode`], followed by raw bytes that are not copied through the encoder.
pub fn encode_with<T: serde::Serialize>(value: &T, tail: &[u8]) -> Bytes {
    let mut out = Vec::with_capacity(160 + tail.len());
    out.push(FORMAT);
    let mut out = append(value, out);
    out.extend_from_slice(tail);
    let check = xxh3_64(&out) as u32;
    out.extend_from_slice(&check.to_le_bytes());
    out.into()
}

/// A value's encoding without format and check, behind what is there.
#[must_use]
pub fn append<T: serde::Serialize + ?Sized>(value: &T, out: Vec<u8>) -> Vec<u8> {
    // Writing plain data to a growing vector cannot fail.
    postcard::serialize_with_flavor(value, Growing(out)).unwrap_or_default()
}

/// A vector to which whole slices are copied; postcard's own copies byte by byte.
struct Growing(Vec<u8>);

impl postcard::ser_flavors::Flavor for Growing {
    type Output = Vec<u8>;

    fn try_extend(&mut self, data: &[u8]) -> postcard::Result<()> {
        self.0.extend_from_slice(data);
        Ok(())
    }

    fn try_push(&mut self, data: u8) -> postcard::Result<()> {
        self.0.push(data);
        Ok(())
    }

    fn finalize(self) -> postcard::Result<Vec<u8>> {
        Ok(self.0)
    }
}

pub fn decode<'a, T: serde::Deserialize<'a>>(bytes: &'a [u8]) -> Result<T, Undecodable> {
    match decode_with(bytes)? {
        (value, []) => Ok(value),
        _ => Err(Undecodable::Corrupt),
    }
}

/// Undoes [`encode_with`]: the value and the tail.
pub fn decode_with<'a, T: serde::Deserialize<'a>>(bytes: &'a [u8]) -> Result<(T, &'a [u8]), Undecodable> {
    let (body, check) = bytes.split_last_chunk::<4>().ok_or(Undecodable::Corrupt)?;
    if xxh3_64(body) as u32 != u32::from_le_bytes(*check) {
        return Err(Undecodable::Corrupt);
    }
    match body.split_first() {
        Some((&FORMAT, body)) => postcard::take_from_bytes(body).map_err(|_| Undecodable::Corrupt),
        Some((&format, _)) if format > FORMAT => Err(Undecodable::Newer),
        _ => Err(Undecodable::Corrupt),
    }
}

/// Whether a newer release wrote this record, whatever is in it.
#[must_use]
pub fn is_newer(bytes: &[u8]) -> bool {
    let Some((body, check)) = bytes.split_last_chunk::<4>().filter(|(body, _)| body.first() > Some(&FORMAT)) else {
        return false;
    };
    xxh3_64(body) as u32 == u32::from_le_bytes(*check)
}

/// A record of which is known only that a newer release wrote it.
#[must_use]
pub fn newer() -> Bytes {
    let mut out = alloc::vec![FORMAT + 1];
    let check = xxh3_64(&out) as u32;
    out.extend_from_slice(&check.to_le_bytes());
    out.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::String;

    #[test]
    fn every_flipped_bit_is_noticed() {
        let bytes = encode_with(&(7u32, String::from("seven")), b"tail");
        assert_eq!(decode_with::<(u32, String)>(&bytes), Ok(((7, "seven".into()), &b"tail"[..])));
        for bit in 0..bytes.len() * 8 {
            let mut broken = bytes.to_vec();
            broken[bit / 8] ^= 1 << (bit % 8);
            assert!(decode_with::<(u32, String)>(&broken).is_err(), "bit {bit}");
        }
        for len in 0..bytes.len() {
            assert!(decode_with::<(u32, String)>(&bytes[..len]).is_err(), "length {len}");
        }
    }

    #[test]
    fn a_newer_format_is_not_corrupt() {
        assert_eq!(decode::<u8>(&newer()), Err(Undecodable::Newer));
    }
}
