//! Bytes that the core carries and never looks into.

use alloc::string::String;
use bytes::Bytes;

/// A payload, a result, metadata: hashed at the edge; the core decides by length and hash only.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Opaque {
    pub hash: u128,
    pub bytes: Bytes,
}

impl Opaque {
    pub fn new(bytes: impl Into<Bytes>) -> Self {
        let bytes = bytes.into();
        Opaque { hash: hash(&bytes), bytes }
    }

    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }
}

/// In a recording contents are left out: their hash and length are all that the core decides by. What is read back
/// is a stand-in of that hash and length.
impl serde::Serialize for Opaque {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        (self.hash, self.bytes.len()).serialize(to)
    }
}

impl<'de> serde::Deserialize<'de> for Opaque {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let (hash, len) = <(u128, usize)>::deserialize(from)?;
        if len > crate::limits::PAYLOAD_BYTES {
            return Err(serde::de::Error::custom("a content is longer than any can be"));
        }
        Ok(Opaque { hash, bytes: stand_in(hash, len) })
    }
}

/// Bytes that stand for a content in a recording: as much of its hash as fits, then zeros.
pub fn stand_in(hash: u128, len: usize) -> Bytes {
    let mut bytes = alloc::vec![0; len];
    let hash = hash.to_le_bytes();
    for (to, from) in bytes.iter_mut().zip(hash) {
        *to = from;
    }
    bytes.into()
}

/// XXH3, 128 bits. Stored (in fingerprints), so it stays as it is.
pub fn hash(bytes: &[u8]) -> u128 {
    xxhash_rust::xxh3::xxh3_128(bytes)
}

/// How a content came, and so how it is given to JSON clients.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Form {
    /// Valid JSON text: embedded as it is.
    Json,
    /// Anything else: as base64, with its content type.
    Binary { content_type: String },
}

/// A payload or result with its form.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Content {
    pub form: Form,
    pub data: Opaque,
}

impl Content {
    /// The caller has checked that the text is one valid JSON value.
    pub fn json(text: impl Into<Bytes>) -> Self {
        Content { form: Form::Json, data: Opaque::new(text) }
    }

    pub fn binary(content_type: impl Into<String>, bytes: impl Into<Bytes>) -> Self {
        Content { form: Form::Binary { content_type: content_type.into() }, data: Opaque::new(bytes) }
    }

    pub fn content_type(&self) -> &str {
        match &self.form {
            Form::Json => "application/json",
            Form::Binary { content_type } => content_type,
        }
    }
}
