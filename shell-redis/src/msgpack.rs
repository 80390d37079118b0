//! The part of MessagePack that a question to a script needs; `cmsgpack` in the server reads it.

/// Writes values one after another; whoever writes an array says first how long it is.
#[derive(Debug, Default)]
pub(crate) struct Packer(pub Vec<u8>);

impl Packer {
    pub fn array(&mut self, len: usize) {
        match len {
            0..=15 => self.0.push(0x90 | len as u8),
            16..=0xffff => {
                self.0.push(0xdc);
                self.0.extend_from_slice(&(len as u16).to_be_bytes());
            }
            _ => {
                self.0.push(0xdd);
                self.0.extend_from_slice(&(len as u32).to_be_bytes());
            }
        }
    }

    pub fn raw(&mut self, bytes: &[u8]) {
        self.raw_parts(&[bytes]);
    }

    /// One string made of several parts.
    pub fn raw_parts(&mut self, parts: &[&[u8]]) {
        let len: usize = parts.iter().map(|p| p.len()).sum();
        match len {
            0..=31 => self.0.push(0xa0 | len as u8),
            32..=0xff => self.0.extend_from_slice(&[0xd9, len as u8]),
            0x100..=0xffff => {
                self.0.push(0xda);
                self.0.extend_from_slice(&(len as u16).to_be_bytes());
            }
            _ => {
                self.0.push(0xdb);
                self.0.extend_from_slice(&(len as u32).to_be_bytes());
            }
        }
        parts.iter().for_each(|p| self.0.extend_from_slice(p));
    }

    /// A number that is exact as a double: at most 2^53.
    pub fn number(&mut self, n: u64) {
        match n {
            0..=127 => self.0.push(n as u8),
            128..=0xffff => {
                self.0.push(0xcd);
                self.0.extend_from_slice(&(n as u16).to_be_bytes());
            }
            0x1_0000..=0xffff_ffff => {
                self.0.push(0xce);
                self.0.extend_from_slice(&(n as u32).to_be_bytes());
            }
            _ => {
                self.0.push(0xcf);
                self.0.extend_from_slice(&n.to_be_bytes());
            }
        }
    }

    pub fn bool(&mut self, b: bool) {
        self.0.push(if b { 0xc3 } else { 0xc2 });
    }

    pub fn numbers(&mut self, list: impl ExactSizeIterator<Item = u64>) {
        self.array(list.len());
        list.for_each(|n| self.number(n));
    }
}
