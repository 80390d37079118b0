//! Writes JSON straight into the bytes of an answer.

use std::fmt::Arguments;
use std::io::Write as _;

use leasehold_core::JobId;
use leasehold_core::opaque::{Content, Form};
use leasehold_core::store::Clock;

use super::time;

/// An object being written; [`Object::end`] closes it.
#[derive(Debug)]
#[must_use = "an object that is not ended is not JSON"]
pub struct Object<'a> {
    out: &'a mut Vec<u8>,
    first: bool,
}

impl<'a> Object<'a> {
    pub fn new(out: &'a mut Vec<u8>) -> Self {
        out.push(b'{');
        Object { out, first: true }
    }

    pub fn end(self) {
        self.out.push(b'}');
    }

    /// Writes the key; the caller writes the value. Keys need no escaping.
    pub fn key(&mut self, key: &str) -> &mut Vec<u8> {
        if !std::mem::take(&mut self.first) {
            self.out.push(b',');
        }
        self.out.push(b'"');
        self.out.extend_from_slice(key.as_bytes());
        self.out.extend_from_slice(b"\":");
        self.out
    }

    pub fn str(&mut self, key: &str, value: &str) {
        string(self.key(key), value);
    }

    pub fn num(&mut self, key: &str, value: u64) {
        number(self.key(key), value);
    }

    pub fn bool(&mut self, key: &str, value: bool) {
        self.key(key).extend_from_slice(if value { b"true" } else { b"false" });
    }

    pub fn null(&mut self, key: &str) {
        self.key(key).extend_from_slice(b"null");
    }

    /// JSON text that needs no checking.
    pub fn text(&mut self, key: &str, json: &[u8]) {
        self.key(key).extend_from_slice(json);
    }

    pub fn raw(&mut self, key: &str, json: Arguments<'_>) {
        // Writing to a vector cannot fail.
        let _ = self.key(key).write_fmt(json);
    }

    pub fn time(&mut self, key: &str, clock: Clock) {
        time::write(self.key(key), clock);
    }

    pub fn id(&mut self, key: &str, id: JobId) {
        let out = self.key(key);
        out.push(b'"');
        out.extend_from_slice(&id.text());
        out.push(b'"');
    }

    /// `payload`, or `payload_base64` with `content_type`.
    pub fn content(&mut self, json: &str, base64: &str, content: &Content) {
        match &content.form {
            Form::Json => self.text(json, &content.data.bytes),
            Form::Binary { content_type } => {
                let out = self.key(base64);
                out.push(b'"');
                encode_base64(out, &content.data.bytes);
                out.push(b'"');
                self.str("content_type", content_type);
            }
        }
    }
}

/// Writes `[…]`, each item by `write`.
pub fn array<T>(out: &mut Vec<u8>, items: impl IntoIterator<Item = T>, mut write: impl FnMut(&mut Vec<u8>, T)) {
    out.push(b'[');
    for (n, item) in items.into_iter().enumerate() {
        if n > 0 {
            out.push(b',');
        }
        write(out, item);
    }
    out.push(b']');
}

pub fn string(out: &mut Vec<u8>, value: &str) {
    // Writing text to a vector cannot fail.
    let _ = serde_json::to_writer(out, value);
}

pub fn number(out: &mut Vec<u8>, value: u64) {
    // Writing a number to a vector cannot fail.
    let _ = serde_json::to_writer(out, &value);
}

fn encode_base64(out: &mut Vec<u8>, bytes: &[u8]) {
    use base64::Engine as _;
    let engine = base64::engine::general_purpose::STANDARD;
    let start = out.len();
    out.resize(start + bytes.len().div_ceil(3) * 4, 0);
    // The room is exactly what padded base 64 needs.
    let _ = engine.encode_slice(bytes, &mut out[start..]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_json() {
        let mut out = Vec::new();
        let mut object = Object::new(&mut out);
        object.str("a", "\"\\\n<\u{1}é");
        object.num("b", u64::MAX);
        object.bool("c", true);
        object.null("d");
        object.text("e", b"[1]");
        object.time("f", 1_700_000_000_123_456);
        object.content("g", "g64", &Content::json("{}"));
        object.content("h", "h64", &Content::binary("text/plain", "hello"));
        array(object.key("i"), [1, 2], number);
        object.end();
        let json: serde_json::Value = serde_json::from_slice(&out).unwrap();
        assert_eq!(json["a"], "\"\\\n<\u{1}é");
        assert_eq!(json["b"], u64::MAX);
        assert_eq!(json["f"], "2023-11-14T22:13:20.123Z");
        assert_eq!(json["h64"], "aGVsbG8=");
        assert_eq!(json["content_type"], "text/plain");
        assert_eq!(json["i"], serde_json::json!([1, 2]));
    }
}
