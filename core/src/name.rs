//! Short byte strings: record keys, index names, members, log names, topics.

use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;
use bytes::Bytes;
use core::borrow::Borrow;
use core::cmp::Ordering;
use core::hash::{Hash, Hasher};
use core::ops::Deref;

/// Up to so many bytes are kept in place: every key made of a job's id, and most index names.
const INLINE: usize = 46;

/// A byte string that is cheap to clone. By convention readable text (`job/01J…`), but the store
/// port treats it as bytes. Short ones need no allocation, which is what a transaction's cost is
/// mostly made of.
#[derive(Clone)]
pub struct Name(Repr);

#[derive(Clone)]
enum Repr {
    Inline { len: u8, buf: [u8; INLINE] },
    Shared(Arc<[u8]>),
}

impl Name {
    /// Text of at most 46 bytes; longer text is cut.
    pub const fn from_static(text: &'static str) -> Self {
        let text = text.as_bytes();
        let mut buf = [0; INLINE];
        let mut len = 0;
        while len < text.len() && len < INLINE {
            buf[len] = text[len];
            len += 1;
        }
        Name(Repr::Inline { len: len as u8, buf })
    }

    pub fn new(bytes: &[u8]) -> Self {
        Name::of_parts(bytes, &[])
    }

    /// `self` followed by `tail`: how a take's `give` and `each` make keys of members.
    pub fn join(&self, tail: &[u8]) -> Name {
        Name::of_parts(self, tail)
    }

    fn of_parts(a: &[u8], b: &[u8]) -> Name {
        let len = a.len() + b.len();
        let mut buf = [0; INLINE];
        match buf.get_mut(..len) {
            Some(room) => {
                let (left, right) = room.split_at_mut(a.len());
                left.copy_from_slice(a);
                right.copy_from_slice(b);
                Name(Repr::Inline { len: len as u8, buf })
            }
            None => Name(Repr::Shared(a.iter().chain(b).copied().collect())),
        }
    }

    pub fn as_str(&self) -> Option<&str> {
        core::str::from_utf8(self).ok()
    }

    pub fn to_bytes(&self) -> Bytes {
        Bytes::copy_from_slice(self)
    }
}

impl Deref for Name {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        match &self.0 {
            Repr::Inline { len, buf } => buf.get(..usize::from(*len)).unwrap_or_default(),
            Repr::Shared(bytes) => bytes,
        }
    }
}

impl AsRef<[u8]> for Name {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl Borrow<[u8]> for Name {
    fn borrow(&self) -> &[u8] {
        self
    }
}

impl Default for Name {
    fn default() -> Self {
        Name::from_static("")
    }
}

impl PartialEq for Name {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl Eq for Name {}

impl PartialOrd for Name {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Name {
    fn cmp(&self, other: &Self) -> Ordering {
        (**self).cmp(&**other)
    }
}

impl Hash for Name {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (**self).hash(state);
    }
}

impl From<String> for Name {
    fn from(s: String) -> Self {
        Name::new(s.as_bytes())
    }
}

impl From<Vec<u8>> for Name {
    fn from(v: Vec<u8>) -> Self {
        Name::new(&v)
    }
}

impl From<Bytes> for Name {
    fn from(b: Bytes) -> Self {
        Name::new(&b)
    }
}

impl From<&str> for Name {
    fn from(s: &str) -> Self {
        Name::new(s.as_bytes())
    }
}

impl core::fmt::Debug for Name {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{}", self.escape_ascii())
    }
}

impl core::fmt::Display for Name {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{}", self.escape_ascii())
    }
}

impl serde::Serialize for Name {
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_bytes(self)
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
                Ok(Name::new(v))
            }
        }
        d.deserialize_bytes(V)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_and_long_names_are_told_apart_by_their_bytes_alone() {
        for n in [0, 1, 45, 46, 47, 300] {
            let bytes = alloc::vec![b'x'; n];
            let name = Name::new(&bytes);
            assert_eq!(&*name, &*bytes);
            assert_eq!(Name::new(&bytes[..n / 2]).join(&bytes[n / 2..]), name);
            let longer = name.join(b"!");
            assert!(longer > name && longer != name);
        }
        assert_eq!(core::mem::size_of::<Name>(), 48);
    }
}
