//! Reads JSON objects field by field, so that every complaint names its field.
//!
//! A value is kept as its text until it is known what it should be: a payload is never parsed into a
//! tree, only checked to be JSON, and stays a slice of the request's body.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;

use bytes::Bytes;
use serde::de::{Deserializer as _, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

use crate::problem::Problem;
use crate::wire::json;

/// No object here has as many fields. Without a bound, looking for doubles would take for ever.
pub const FIELDS_MAX: usize = 64;

/// The fields of one object, in the order in which they came.
pub type Fields<'a> = Vec<(Cow<'a, str>, &'a RawValue)>;

/// A value and the body it is a slice of.
#[derive(Clone, Copy, Debug)]
pub struct Value<'a> {
    pub field: &'static str,
    pub text: &'a str,
    pub body: &'a Bytes,
}

/// Reads a whole body that must be an object.
pub fn object(body: &Bytes) -> Result<Fields<'_>, Problem> {
    if body.iter().all(u8::is_ascii_whitespace) {
        return Err(Problem::Empty);
    }
    parse_object(body).map_err(|wrong| match wrong {
        // serde_json's message tells the place and never quotes the body.
        Wrong::NotJson(error) => Problem::NotJson { detail: format!("The body is not JSON: {error}.") },
        wrong => Problem::field("", format!("the body {}", wrong.detail())),
    })
}

/// Reads an object that may also be left out altogether.
pub fn optional_object(body: &Bytes) -> Result<Fields<'_>, Problem> {
    match object(body) {
        Err(Problem::Empty) => Ok(Fields::new()),
        other => other,
    }
}

/// Reads an object inside a body, which is known to be JSON.
pub fn inner_object<'a>(value: Value<'a>) -> Result<Fields<'a>, Problem> {
    parse_object(value.text.as_bytes()).map_err(|wrong| Problem::field(value.field, wrong.detail()))
}

/// Why a text is no object that is taken.
enum Wrong {
    NotJson(serde_json::Error),
    NotAnObject,
    Twice(String),
    TooMany,
}

impl Wrong {
    fn detail(&self) -> String {
        match self {
            Wrong::NotJson(_) | Wrong::NotAnObject => "must be a JSON object".into(),
            Wrong::Twice(name) => format!("has the field `{name}` twice"),
            Wrong::TooMany => format!("has more than {FIELDS_MAX} fields"),
        }
    }
}

fn parse_object(text: &[u8]) -> Result<Fields<'_>, Wrong> {
    struct Object<'w>(&'w mut Option<Wrong>);
    impl<'a> Visitor<'a> for Object<'_> {
        type Value = Fields<'a>;
        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an object")
        }
        fn visit_map<A: MapAccess<'a>>(self, mut map: A) -> Result<Fields<'a>, A::Error> {
            let mut fields = Fields::with_capacity(8);
            while let Some(key) = map.next_key::<Key<'a>>()? {
                let wrong = if fields.iter().any(|(k, _)| *k == key.0) {
                    Some(Wrong::Twice(shown(&key.0)))
                } else {
                    (fields.len() >= FIELDS_MAX).then_some(Wrong::TooMany)
                };
                if wrong.is_some() {
                    *self.0 = wrong;
                    return Err(A::Error::custom("refused"));
                }
                fields.push((key.0, map.next_value()?));
            }
            Ok(fields)
        }
    }
    let mut wrong = None;
    let mut deserializer = serde_json::Deserializer::from_slice(text);
    let fields = deserializer.deserialize_map(Object(&mut wrong));
    match fields {
        Ok(fields) => deserializer.end().map(|()| fields).map_err(Wrong::NotJson),
        // A wrong kind of value may still be followed by rubbish; syntax comes first.
        Err(error) if error.is_data() => match serde_json::from_slice::<&RawValue>(text) {
            Ok(_) => Err(wrong.unwrap_or(Wrong::NotAnObject)),
            Err(error) => Err(Wrong::NotJson(error)),
        },
        Err(error) => Err(Wrong::NotJson(error)),
    }
}

/// A key, borrowed unless it is written with escapes.
struct Key<'a>(Cow<'a, str>);

impl<'de> serde::Deserialize<'de> for Key<'de> {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct Text;
        impl<'de> Visitor<'de> for Text {
            type Value = Key<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string")
            }
            fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Key<'de>, E> {
                Ok(Key(Cow::Borrowed(text)))
            }
            fn visit_str<E>(self, text: &str) -> Result<Key<'de>, E> {
                Ok(Key(Cow::Owned(text.to_owned())))
            }
        }
        d.deserialize_str(Text)
    }
}

/// A name that a client made up, as it can stand in an answer.
fn shown(name: &str) -> String {
    name.chars().take(64).flat_map(char::escape_debug).collect()
}

/// Complains about a field that this object does not have.
pub fn unknown(field: &str, known: &[&str]) -> Problem {
    let name = shown(field);
    match known {
        [] => Problem::field(name, "there is no such field here, and no other"),
        _ => Problem::field(name, format!("there is no such field here; there are: {}", known.join(", "))),
    }
}

/// Finds the field's own name among those known, or complains.
pub fn known(field: &str, known: &'static [&'static str]) -> Result<&'static str, Problem> {
    known.iter().find(|k| **k == field).copied().ok_or_else(|| unknown(field, known))
}

pub fn required<T>(field: &'static str, value: Option<T>) -> Result<T, Problem> {
    value.ok_or_else(|| Problem::field(field, "is missing"))
}

impl<'a> Value<'a> {
    pub fn new(field: &'static str, raw: &'a RawValue, body: &'a Bytes) -> Self {
        Value { field, text: raw.get(), body }
    }

    fn is<T: serde::Deserialize<'a>>(self, what: &'static str) -> Result<T, Problem> {
        serde_json::from_str(self.text).map_err(|_| Problem::field(self.field, what))
    }

    /// An optional field given as null counts as not given.
    pub fn is_null(self) -> bool {
        self.text == "null"
    }

    pub fn string(self) -> Result<String, Problem> {
        self.is("must be a string")
    }

    pub fn bool(self) -> Result<bool, Problem> {
        self.is("must be true or false")
    }

    pub fn u64(self) -> Result<u64, Problem> {
        self.is("must be a whole number that is not negative")
    }

    pub fn u32(self) -> Result<u32, Problem> {
        u32::try_from(self.u64()?).map_err(|_| Problem::field(self.field, "is too large"))
    }

    pub fn usize(self) -> Result<usize, Problem> {
        usize::try_from(self.u64()?).map_err(|_| Problem::field(self.field, "is too large"))
    }

    /// A number that may have decimals, in thousandths.
    pub fn milli(self) -> Result<u32, Problem> {
        let number: f64 = self.is("must be a number")?;
        let milli = (number * 1_000.0).round();
        if milli.is_finite() && (0.0..=f64::from(u32::MAX)).contains(&milli) {
            // In range, so the conversion is exact.
            Ok(milli as u32)
        } else {
            Err(Problem::field(self.field, "must be a number from 0 to 4,000,000"))
        }
    }

    pub fn strings(self) -> Result<Vec<String>, Problem> {
        self.is("must be a list of strings")
    }

    /// The texts of a list's items; at most `max` are looked at.
    pub fn any_items(self, max: usize) -> Result<Vec<&'a RawValue>, Problem> {
        struct Items(usize);
        impl<'a> Visitor<'a> for Items {
            type Value = Vec<&'a RawValue>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list")
            }
            fn visit_seq<A: SeqAccess<'a>>(self, mut list: A) -> Result<Self::Value, A::Error> {
                let mut items = Vec::new();
                while let Some(item) = list.next_element()? {
                    items.push(item);
                    if items.len() > self.0 {
                        return Err(A::Error::custom("too many"));
                    }
                }
                Ok(items)
            }
        }
        let mut deserializer = serde_json::Deserializer::from_str(self.text);
        let bad = |_| Problem::field(self.field, format!("must be a list of at most {max} items"));
        deserializer.deserialize_seq(Items(max)).map_err(bad)
    }

    /// As [`Value::any_items`], but not none.
    pub fn items(self, max: usize) -> Result<Vec<&'a RawValue>, Problem> {
        let bad = || Problem::field(self.field, format!("must be a list of 1 to {max} items"));
        self.any_items(max).ok().filter(|items| !items.is_empty()).ok_or_else(bad)
    }

    /// The value's JSON text as it came, without copying it.
    pub fn json(self) -> Bytes {
        self.body.slice_ref(self.text.as_bytes())
    }

    /// The same value however it was written: keys in order, each once (the last counts), no white space, strings
    /// escaped alike. Numbers stay as they came.
    pub fn plain_json(self) -> Result<Vec<u8>, Problem> {
        let bad = || {
            Problem::field(self.field, format!("must be JSON that any program reads, nested up to {NESTED_MAX} deep"))
        };
        let mut out = Vec::with_capacity(self.text.len());
        plain(self.text, NESTED_MAX, &mut out).map(|()| out).ok_or_else(bad)
    }

    pub fn base64(self) -> Result<Vec<u8>, Problem> {
        use base64::Engine as _;
        let text: Cow<'a, str> = match serde_json::from_str::<&str>(self.text) {
            Ok(text) => text.into(),
            Err(_) => self.string()?.into(),
        };
        base64::engine::general_purpose::STANDARD_PAD_INDIFFERENT
            .decode(text.as_bytes())
            .map_err(|_| Problem::field(self.field, "must be base 64 (RFC 4648, the ordinary alphabet)"))
    }
}

/// How deep lists and objects of metadata may lie in one another.
const NESTED_MAX: usize = 64;

fn plain(text: &str, deep: usize, out: &mut Vec<u8>) -> Option<()> {
    let text = text.trim();
    match text.as_bytes().first()? {
        b'{' => {
            let fields: BTreeMap<String, &RawValue> = serde_json::from_str(text).ok().filter(|_| deep > 0)?;
            out.push(b'{');
            for (n, (key, value)) in fields.into_iter().enumerate() {
                if n > 0 {
                    out.push(b',');
                }
                json::string(out, &key);
                out.push(b':');
                plain(value.get(), deep - 1, out)?;
            }
            out.push(b'}');
        }
        b'[' => {
            let items: Vec<&RawValue> = serde_json::from_str(text).ok().filter(|_| deep > 0)?;
            out.push(b'[');
            for (n, item) in items.into_iter().enumerate() {
                if n > 0 {
                    out.push(b',');
                }
                plain(item.get(), deep - 1, out)?;
            }
            out.push(b']');
        }
        b'"' => json::string(out, &serde_json::from_str::<String>(text).ok()?),
        _ => out.extend_from_slice(text.as_bytes()),
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(body: &'static str) -> &'static str {
        object(&Bytes::from_static(body.as_bytes())).map(|_| "ok").unwrap_or_else(|p| p.code())
    }

    #[test]
    fn what_is_an_object() {
        assert_eq!(code("{}"), "ok");
        assert_eq!(code(" {\"a\" : [1, {}], \"b\": null}\n"), "ok");
        assert_eq!(code(""), "empty_body");
        assert_eq!(code("  \n"), "empty_body");
        for bad in ["{", "{}}", "{} {}", "{\"a\":}", "{a:1}", "[1,2", "\u{1}", "{\"a\":\"\\u12\"}", "[] x"] {
            assert_eq!(code(bad), "not_json", "{bad}");
        }
        for wrong in ["[]", "1", "null", "\"x\"", "{\"a\":1,\"a\":2}", "{\"a\":1,\"\\u0061\":2}"] {
            assert_eq!(code(wrong), "invalid_field", "{wrong}");
        }
        let detail = |body: &'static str| match object(&Bytes::from_static(body.as_bytes())) {
            Err(Problem::Field { detail, .. }) => detail.into_owned(),
            other => panic!("{other:?}"),
        };
        assert_eq!(detail("[]"), "the body must be a JSON object");
        assert_eq!(detail("{\"a\":1,\"\\u0061\":2}"), "the body has the field `a` twice");
        assert_eq!(object(&Bytes::from_static(b"{\"a\":\"\xff\"}")).map(|_| ()).unwrap_err().code(), "not_json");
    }

    #[test]
    fn deep_nesting_is_no_recursion() {
        let deep = format!("{{\"payload\":{}{}}}", "[".repeat(1_000_000), "]".repeat(1_000_000));
        assert!(object(&Bytes::from(deep)).is_ok());
    }

    #[test]
    fn a_million_fields_are_refused_early() {
        let many: Vec<String> = (0..1_000_000).map(|n| format!("\"{n}\":0")).collect();
        let begun = std::time::Instant::now();
        assert_eq!(object(&Bytes::from(format!("{{{}}}", many.join(",")))).unwrap_err().code(), "invalid_field");
        assert!(begun.elapsed() < std::time::Duration::from_secs(2));
    }

    #[test]
    fn a_payload_is_a_slice_of_the_body() {
        let body = Bytes::from_static(b"{\"payload\": {\"a\":  1} }");
        let fields = object(&body).unwrap();
        let text = Value::new("payload", fields[0].1, &body).json();
        assert_eq!(&text[..], b"{\"a\":  1}");
        assert_eq!(text.as_ptr(), body[12..].as_ptr());
    }

    #[test]
    fn metadata_is_the_same_however_it_was_written() {
        let plainly = |text: &str| {
            let mut out = Vec::new();
            plain(text, NESTED_MAX, &mut out).map(|()| String::from_utf8(out).unwrap())
        };
        let same = plainly(r#"{"a":[1,2.50,"é\n"],"b":{"c":null}}"#);
        assert!(same.is_some());
        for text in [
            r#" { "b" : { "c" : null } , "a" : [ 1 , 2.50 , "\u00e9\u000a" ] } "#,
            r#"{"a":0,"b":{"c":null},"a":[1,2.50,"é\n"]}"#,
        ] {
            assert_eq!(plainly(text), same, "{text}");
        }
        assert_ne!(plainly("[1,2]"), plainly("[2,1]"));
        assert_ne!(plainly("1.0"), plainly("1"), "numbers stay as they came");
        assert_eq!(plainly(r#""\ud800""#), None);
        assert_eq!(plainly(&format!("{}{}", "[".repeat(300), "]".repeat(300))), None);
        assert!(plainly(&format!("{}{}", "[".repeat(64), "]".repeat(64))).is_some());
    }
}
