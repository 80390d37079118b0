//! Short byte strings: record keys, index names, members, log names, topics.

use alloc::string::String;
use alloc::vec::Vec;
use bytes::Bytes;
use core::borrow::Borrow;
use core::ops::Deref;

/// A byte string that is cheap to clone. By convention readable text (`job/01J…`), but the store
/// port treats it as bytes.
#[derive(Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name(Bytes);

impl Name {
    pub const fn from_static(text: &'static str) -> Self {
        Name(Bytes::from_static(text.as_bytes()))
    }

    /// `self` followed by `tail`: how a take's `give` and `each` make keys of members.
    pub fn join(&self, tail: &[u8]) -> Name {
        let mut v = Vec::with_capacity(self.len() + tail.len());
        v.extend_from_slice(self);
        v.extend_from_slice(tail);
        Name(v.into())
    }

    pub fn as_str(&self) -> Option<&str> {
        core::str::from_utf8(&self.0).ok()
    }

    pub fn to_bytes(&self) -> Bytes {
        self.0.clone()
    }
}

impl Deref for Name {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl Borrow<[u8]> for Name {
    fn borrow(&self) -> &[u8] {
        &self.0
    }
}

impl From<String> for Name {
    fn from(s: String) -> Self {
        Name(s.into_bytes().into())
    }
}

impl From<Vec<u8>> for Name {
    fn from(v: Vec<u8>) -> Self {
        Name(v.into())
    }
}

impl From<Bytes> for Name {
    fn from(b: Bytes) -> Self {
        Name(b)
    }
}

impl From<&str> for Name {
    fn from(s: &str) -> Self {
        Name(Bytes::copy_from_slice(s.as_bytes()))
    }
}

impl core::fmt::Debug for Name {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{}", self.0.escape_ascii())
    }
}

impl core::fmt::Display for Name {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{}", self.0.escape_ascii())
    }
}

impl serde::Serialize for Name {
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_bytes(&self.0)
    }
}

impl<'de> serde::Deserialize<'de> for Name {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct V;
        impl serde::de::Visitor<'_> for V {
            type Value = Name;
            fn expecting(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                f.write_str("bytes")
            }
            fn visit_bytes<E: serde::de::Error>(self, v: &[u8]) -> Result<Name, E> {
                Ok(Name(Bytes::copy_from_slice(v)))
            }
        }
        d.deserialize_bytes(V)
    }
}
