//! A replica's whole state, without contents: what a recording begins with.
//!
//! What is nowhere in the state by a type of its own is told by where it stands: a field's name, or the key under
//! which a record is to be put. An [`Opaque`](crate::opaque::Opaque) leaves its bytes out by itself.

use alloc::vec::Vec;
use bytes::Bytes;
use serde::Serialize;
use serde::ser::{self, Serializer};

use super::redact::{self, Kind};
use crate::codec;
use crate::name::Name;
use crate::replica::Replica;

pub(super) fn of(replica: &Replica) -> Vec<u8> {
    // Writing plain data to a growing vector cannot fail.
    codec::append(&Without { value: replica, how: How::Plain }, Vec::new())
}

/// What becomes of the bytes and texts in a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    Plain,
    /// Texts are replaced by as many letters.
    Blank,
    /// Texts are left out.
    Clear,
    /// Bytes are a stored record.
    Stored(Kind),
    /// Bytes are a stored record of a kind that is not known here: nothing of it is kept.
    Unknown,
    /// A content, or none.
    Optional,
    /// A content.
    Content,
}

/// How a field is written, in a value that is written so.
fn field(of: &str, name: &str, how: How) -> How {
    match (of, name) {
        ("ErrorInfo", _) => How::Blank,
        ("RecordView", "text") => How::Clear,
        ("Job", "metadata") => How::Optional,
        ("ProgressRecord", "value") => How::Content,
        ("Member", "job") | ("Found", "main") | ("TakeOver", "found") => How::Stored(Kind::Job),
        ("Member" | "Tried", "payload") => How::Stored(Kind::Content),
        ("Found", "lease") => How::Stored(Kind::None),
        ("Entry", "records") => How::Stored(Kind::None),
        ("Record", "bytes") if !matches!(how, How::Stored(_)) => How::Unknown,
        ("Record", _) => how,
        _ => How::Plain,
    }
}

struct Without<'a, T: ?Sized> {
    value: &'a T,
    how: How,
}

impl<T: Serialize + ?Sized> Serialize for Without<'_, T> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        if self.how != How::Content {
            return self.value.serialize(To { to, how: self.how });
        }
        let mut bytes: Vec<u8> = again(self.value)?;
        redact::plain(&mut bytes);
        bytes.serialize(to)
    }
}

/// A value of a type that is known by where it stands.
fn again<T: Serialize + ?Sized, V: serde::de::DeserializeOwned, E: ser::Error>(value: &T) -> Result<V, E> {
    postcard::from_bytes(&codec::append(value, Vec::new())).map_err(E::custom)
}

/// A serializer that hands on all but contents.
struct To<S> {
    to: S,
    how: How,
}

macro_rules! as_they_are {
    ($($method:ident: $type:ty),* $(,)?) => {
        $(fn $method(self, value: $type) -> Result<S::Ok, S::Error> {
            self.to.$method(value)
        })*
    };
}

impl<S: Serializer> Serializer for To<S> {
    type Ok = S::Ok;
    type Error = S::Error;
    type SerializeSeq = Parts<S::SerializeSeq>;
    type SerializeTuple = Parts<S::SerializeTuple>;
    type SerializeTupleStruct = Parts<S::SerializeTupleStruct>;
    type SerializeTupleVariant = Parts<S::SerializeTupleVariant>;
    type SerializeMap = Parts<S::SerializeMap>;
    type SerializeStruct = Parts<S::SerializeStruct>;
    type SerializeStructVariant = Parts<S::SerializeStructVariant>;

    as_they_are! {
        serialize_bool: bool, serialize_i8: i8, serialize_i16: i16, serialize_i32: i32, serialize_i64: i64,
        serialize_i128: i128, serialize_u8: u8, serialize_u16: u16, serialize_u32: u32, serialize_u64: u64,
        serialize_u128: u128, serialize_char: char,
    }

    fn serialize_f32(self, _: f32) -> Result<S::Ok, S::Error> {
        Err(ser::Error::custom("the core has no such number"))
    }
    fn serialize_f64(self, _: f64) -> Result<S::Ok, S::Error> {
        Err(ser::Error::custom("the core has no such number"))
    }
    fn is_human_readable(&self) -> bool {
        self.to.is_human_readable()
    }
    fn serialize_str(self, text: &str) -> Result<S::Ok, S::Error> {
        match self.how {
            How::Blank => self.to.serialize_str(&redact::blank(text)),
            How::Clear => self.to.serialize_str(""),
            _ => self.to.serialize_str(text),
        }
    }
    fn serialize_bytes(self, bytes: &[u8]) -> Result<S::Ok, S::Error> {
        match self.how {
            How::Unknown => self.to.serialize_bytes(&[]),
            How::Stored(kind) => self.to.serialize_bytes(&redact::stored(kind, &Bytes::copy_from_slice(bytes))),
            _ => self.to.serialize_bytes(bytes),
        }
    }
    fn serialize_none(self) -> Result<S::Ok, S::Error> {
        self.to.serialize_none()
    }
    fn serialize_some<T: Serialize + ?Sized>(self, value: &T) -> Result<S::Ok, S::Error> {
        let how = if self.how == How::Optional { How::Content } else { self.how };
        self.to.serialize_some(&Without { value, how })
    }
    fn serialize_unit(self) -> Result<S::Ok, S::Error> {
        self.to.serialize_unit()
    }
    fn serialize_unit_struct(self, name: &'static str) -> Result<S::Ok, S::Error> {
        self.to.serialize_unit_struct(name)
    }
    fn serialize_unit_variant(self, of: &'static str, n: u32, name: &'static str) -> Result<S::Ok, S::Error> {
        self.to.serialize_unit_variant(of, n, name)
    }
    fn serialize_newtype_struct<T: Serialize + ?Sized>(self, name: &'static str, value: &T) -> Result<S::Ok, S::Error> {
        self.to.serialize_newtype_struct(name, &Without { value, how: self.how })
    }
    fn serialize_newtype_variant<T: Serialize + ?Sized>(
        self,
        of: &'static str,
        n: u32,
        name: &'static str,
        value: &T,
    ) -> Result<S::Ok, S::Error> {
        self.to.serialize_newtype_variant(of, n, name, &Without { value, how: self.how })
    }
    fn serialize_seq(self, len: Option<usize>) -> Result<Self::SerializeSeq, S::Error> {
        Ok(Parts::new(self.to.serialize_seq(len)?, "", self.how))
    }
    fn serialize_tuple(self, len: usize) -> Result<Self::SerializeTuple, S::Error> {
        Ok(Parts::new(self.to.serialize_tuple(len)?, "", self.how))
    }
    fn serialize_tuple_struct(self, name: &'static str, len: usize) -> Result<Self::SerializeTupleStruct, S::Error> {
        Ok(Parts::new(self.to.serialize_tuple_struct(name, len)?, name, self.how))
    }
    fn serialize_tuple_variant(
        self,
        of: &'static str,
        n: u32,
        name: &'static str,
        len: usize,
    ) -> Result<Self::SerializeTupleVariant, S::Error> {
        Ok(Parts::new(self.to.serialize_tuple_variant(of, n, name, len)?, of, self.how))
    }
    fn serialize_map(self, len: Option<usize>) -> Result<Self::SerializeMap, S::Error> {
        Ok(Parts::new(self.to.serialize_map(len)?, "", self.how))
    }
    fn serialize_struct(self, name: &'static str, len: usize) -> Result<Self::SerializeStruct, S::Error> {
        Ok(Parts::new(self.to.serialize_struct(name, len)?, name, self.how))
    }
    fn serialize_struct_variant(
        self,
        of: &'static str,
        n: u32,
        name: &'static str,
        len: usize,
    ) -> Result<Self::SerializeStructVariant, S::Error> {
        Ok(Parts::new(self.to.serialize_struct_variant(of, n, name, len)?, of, self.how))
    }
}

/// The parts of a value that has several.
struct Parts<P> {
    to: P,
    of: &'static str,
    how: How,
    /// Of the record that is to be put.
    key: Option<Name>,
}

impl<P> Parts<P> {
    fn new(to: P, of: &'static str, how: How) -> Parts<P> {
        Parts { to, of, how, key: None }
    }

    fn field<'a, T: Serialize + ?Sized, E: ser::Error>(
        &mut self,
        name: &str,
        value: &'a T,
    ) -> Result<Without<'a, T>, E> {
        let mut how = field(self.of, name, self.how);
        match (self.of, name) {
            ("Write", "key") => self.key = Some(again(value)?),
            ("Write", "value") => how = How::Stored(self.key.as_ref().map_or(Kind::None, Kind::of)),
            _ => {}
        }
        Ok(Without { value, how })
    }
}

macro_rules! unnamed {
    ($($kind:ident: $method:ident),* $(,)?) => {
        $(impl<P: ser::$kind> ser::$kind for Parts<P> {
            type Ok = P::Ok;
            type Error = P::Error;
            fn $method<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), P::Error> {
                self.to.$method(&Without { value, how: self.how })
            }
            fn end(self) -> Result<P::Ok, P::Error> {
                self.to.end()
            }
        })*
    };
}

unnamed! {
    SerializeSeq: serialize_element,
    SerializeTuple: serialize_element,
    SerializeTupleStruct: serialize_field,
    SerializeTupleVariant: serialize_field,
}

macro_rules! named {
    ($($kind:ident),* $(,)?) => {
        $(impl<P: ser::$kind> ser::$kind for Parts<P> {
            type Ok = P::Ok;
            type Error = P::Error;
            fn serialize_field<T: Serialize + ?Sized>(
                &mut self,
                name: &'static str,
                value: &T,
            ) -> Result<(), P::Error> {
                let value = self.field(name, value)?;
                self.to.serialize_field(name, &value)
            }
            fn end(self) -> Result<P::Ok, P::Error> {
                self.to.end()
            }
        })*
    };
}

named! { SerializeStruct, SerializeStructVariant }

impl<P: ser::SerializeMap> ser::SerializeMap for Parts<P> {
    type Ok = P::Ok;
    type Error = P::Error;
    fn serialize_key<T: Serialize + ?Sized>(&mut self, key: &T) -> Result<(), P::Error> {
        self.to.serialize_key(key)
    }
    fn serialize_value<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), P::Error> {
        self.to.serialize_value(&Without { value, how: self.how })
    }
    fn end(self) -> Result<P::Ok, P::Error> {
        self.to.end()
    }
}
