//! The keys of a namespace in the server. See docs/OPERATIONS.md for the table.

use leasehold_core::Name;

/// The format of everything below the prefix, written into the namespace's own record.
pub(crate) const FORMAT: u64 = 1;
/// This release has exactly one shard.
pub(crate) const SHARD: u64 = 0;

/// All keys begin with the shard's hash tag, so that they share a slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    prefix: Vec<u8>,
}

impl Layout {
    pub fn new(namespace: &str) -> Layout {
        Layout { prefix: format!("{{{namespace}:{SHARD}}}").into_bytes() }
    }

    /// `{namespace:shard}`, which every key begins with.
    pub fn prefix(&self) -> &[u8] {
        &self.prefix
    }

    /// What a record's key begins with.
    pub fn record(&self) -> Vec<u8> {
        self.kind(b"r:")
    }

    /// What an index's key begins with.
    pub fn index(&self) -> Vec<u8> {
        self.kind(b"i:")
    }

    /// What a log's key begins with.
    pub fn log(&self) -> Vec<u8> {
        self.kind(b"l:")
    }

    /// The channel that topics are published on.
    pub fn channel(&self) -> Vec<u8> {
        self.kind(b"n")
    }

    /// The namespace's own record: a hash with `format` and `shard`.
    pub fn meta(&self) -> Vec<u8> {
        self.kind(b"meta")
    }

    fn kind(&self, kind: &[u8]) -> Vec<u8> {
        [&self.prefix[..], kind].concat()
    }

    /// A record's name, from its key.
    pub fn record_name(&self, key: &[u8]) -> Option<Name> {
        Some(Name::new(key.strip_prefix(&self.prefix[..])?.strip_prefix(b"r:")?))
    }

    /// What a key below the prefix is called in the log: the name of a record, index or log.
    pub fn name(&self, key: &[u8]) -> Name {
        Name::new(key.strip_prefix(&self.prefix[..]).and_then(|k| k.get(2..)).unwrap_or(key))
    }
}
