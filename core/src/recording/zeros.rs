//! Runs of zeros, which is what contents are in a recording, written as their length.
//!
//! ```text
//! squeezed = (length of a literal, literal, number of zeros)*      lengths as varints
//! ```

use alloc::vec::Vec;

/// Shorter runs stay in the literal.
const RUN: usize = 16;
/// Nothing that was written is longer: a step has the contents of one request and of one answer, a state those of what
/// is in work.
const MOST: usize = 1 << 30;

pub(super) fn squeeze(bytes: &[u8], out: &mut Vec<u8>) {
    let mut rest = bytes;
    while !rest.is_empty() {
        let (literal, zeros) = split(rest);
        varint(out, literal);
        out.extend_from_slice(rest.get(..literal).unwrap_or_default());
        varint(out, zeros);
        rest = rest.get(literal + zeros..).unwrap_or_default();
    }
}

/// Lengths of what comes before the next run of zeros, and of that.
fn split(bytes: &[u8]) -> (usize, usize) {
    let mut at = 0;
    while let Some(to) = bytes.get(at..).and_then(|rest| rest.iter().position(|b| *b == 0)) {
        let start = at + to;
        let zeros = bytes.get(start..).unwrap_or_default().iter().take_while(|b| **b == 0).count();
        if zeros >= RUN {
            return (start, zeros);
        }
        at = start + zeros;
    }
    (bytes.len(), 0)
}

/// `None`: it was not written by [`squeeze`].
pub(super) fn expand(mut squeezed: &[u8]) -> Option<Vec<u8>> {
    let mut out = Vec::new();
    while !squeezed.is_empty() {
        let literal = unvarint(&mut squeezed)?;
        let (bytes, rest) = squeezed.split_at_checked(literal)?;
        out.extend_from_slice(bytes);
        squeezed = rest;
        let zeros = unvarint(&mut squeezed)?;
        let len = out.len().checked_add(zeros).filter(|len| *len <= MOST)?;
        out.resize(len, 0);
    }
    Some(out)
}

fn varint(out: &mut Vec<u8>, mut n: usize) {
    while n >= 0x80 {
        out.push(n as u8 | 0x80);
        n >>= 7;
    }
    out.push(n as u8);
}

fn unvarint(bytes: &mut &[u8]) -> Option<usize> {
    let mut n = 0usize;
    for shift in (0..35).step_by(7) {
        let (byte, rest) = bytes.split_first()?;
        *bytes = rest;
        n |= usize::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(n);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    #[test]
    fn what_is_squeezed_comes_back_and_zeros_cost_nothing() {
        let long = [vec![7; 300], vec![0; 1 << 20], vec![1, 0, 0, 2], vec![0; 15], vec![3], vec![0; 16]].concat();
        for bytes in [&b""[..], b"abc", &[0; 100], &[0], &[1, 0, 1], &long] {
            let mut squeezed = Vec::new();
            squeeze(bytes, &mut squeezed);
            assert_eq!(expand(&squeezed).as_deref(), Some(bytes));
            assert!(squeezed.len() < 400, "{}", squeezed.len());
        }
    }

    #[test]
    fn what_is_no_such_thing_is_refused() {
        for bytes in [&[5][..], &[1, 9], &[0x80; 9], &[0, 0xff, 0xff, 0xff, 0xff, 0x0f]] {
            assert_eq!(expand(bytes), None, "{bytes:?}");
        }
    }
}
