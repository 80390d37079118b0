//! Paths and queries as they stand in a URL.

use std::borrow::Cow;

use super::fields::FIELDS_MAX;
use crate::problem::Problem;

/// Undoes percent-encoding; `None` if it is none, or not UTF-8.
pub fn decode(text: &str, plus: bool) -> Option<Cow<'_, str>> {
    if !text.bytes().any(|b| b == b'%' || (plus && b == b'+')) {
        return Some(Cow::Borrowed(text));
    }
    let mut out = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        out.push(match byte {
            b'%' => {
                let high = char::from(bytes.next()?).to_digit(16)?;
                let low = char::from(bytes.next()?).to_digit(16)?;
                u8::try_from(high * 16 + low).ok()?
            }
            b'+' if plus => b' ',
            other => other,
        });
    }
    String::from_utf8(out).ok().map(Cow::Owned)
}

/// A name and its value.
pub type Parameter<'a> = (Cow<'a, str>, Cow<'a, str>);

/// The parameters of a query, in order, decoded.
pub fn parameters(query: &str) -> Result<Vec<Parameter<'_>>, Problem> {
    let mut out: Vec<Parameter<'_>> = Vec::new();
    for part in query.split('&').filter(|p| !p.is_empty()) {
        let (key, value) = part.split_once('=').unwrap_or((part, ""));
        let (Some(key), Some(value)) = (decode(key, true), decode(value, true)) else {
            return Err(Problem::field("", "the query is not percent-encoded UTF-8"));
        };
        if out.len() >= FIELDS_MAX || out.iter().any(|(k, _)| *k == key) {
            return Err(Problem::field(key.into_owned(), "is given twice, or is one too many"));
        }
        out.push((key, value));
    }
    Ok(out)
}

/// Encodes one part of a path or query.
pub fn encode(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.' | b'~') {
            out.push(char::from(byte));
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_and_back() {
        for text in ["plain", "a/b c+d%é", "😀", ""] {
            assert_eq!(decode(&encode(text), true).as_deref(), Some(text));
        }
        assert_eq!(decode("a+b", false).as_deref(), Some("a+b"));
        assert_eq!(decode("a+b", true).as_deref(), Some("a b"));
        for bad in ["%", "%1", "%zz", "%ff", "%+1"] {
            assert_eq!(decode(bad, false), None, "{bad}");
        }
        assert!(parameters("a=1&a=2").is_err());
        assert_eq!(parameters("&a=1&&b").unwrap().len(), 2);
    }
}
