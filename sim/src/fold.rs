//! The digest: a rolling hash over everything that happens.
//!
//! What crosses a border of a replica or of the store is encoded as a recording encodes it, and hashed.

use serde::Serialize;
use xxhash_rust::xxh3::xxh3_64_with_seed;

#[derive(Clone, Debug, Default)]
pub struct Digest {
    value: u64,
    /// Room for what is encoded, kept so that it is not allocated anew.
    room: Vec<u8>,
}

impl Digest {
    pub fn value(&self) -> u64 {
        self.value
    }

    pub fn bytes(&mut self, bytes: &[u8]) {
        self.value = xxh3_64_with_seed(bytes, self.value);
    }

    pub fn num(&mut self, n: u64) {
        self.bytes(&n.to_le_bytes());
    }

    pub fn add(&mut self, what: &impl Serialize) {
        let mut room = std::mem::take(&mut self.room);
        room.clear();
        self.room = leasehold_core::codec::append(what, room);
        self.value = xxh3_64_with_seed(&self.room, self.value);
    }
}
