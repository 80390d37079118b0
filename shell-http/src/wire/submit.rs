//! A job as it is submitted: in JSON, or as a raw body with options in the query.

use bytes::Bytes;
use leasehold_core::job::record::{Backoff, Class};
use leasehold_core::limits;
use leasehold_core::opaque::{Content, Opaque};
use leasehold_core::request::{Start, Submit};
use serde_json::value::RawValue;

use super::fields::{self, Value};
use super::{query, time};
use crate::problem::Problem;

/// The tenant of everybody, as long as no tokens are configured.
pub const TENANT: &str = "default";

/// Fields of a job in JSON.
pub const FIELDS: &[&str] = &[
    "queue",
    "payload",
    "payload_base64",
    "content_type",
    "idempotency_key",
    "class",
    "delay_ms",
    "run_at",
    "max_attempts",
    "max_deliveries",
    "max_age_ms",
    "lease_ms",
    "run_timeout_ms",
    "progress_timeout_ms",
    "queue_ttl_ms",
    "retention_ms",
    "key_ttl_ms",
    "backoff",
    "on_prem",
    "cost",
    "metadata",
];

/// Those that say what the job is; the rest are options, allowed in a query too.
const IDENTITY: usize = 5;

pub const BACKOFF: &[&str] = &["base_ms", "max_ms", "factor", "jitter"];

/// What stands in headers.
#[derive(Clone, Debug, Default)]
pub struct Carried {
    pub key: Option<String>,
    pub traceparent: Option<String>,
}

/// Reads a job in JSON.
pub fn json(body: &Bytes, carried: Carried) -> Result<Submit, Problem> {
    from_fields(fields::object(body)?, body, carried)
}

/// Reads one item of a batch.
pub fn item(raw: &RawValue, body: &Bytes, traceparent: Option<String>) -> Result<Submit, Problem> {
    let fields = fields::inner_object(Value::new("jobs", raw, body))?;
    from_fields(fields, body, Carried { key: None, traceparent })
}

fn from_fields(fields: fields::Fields<'_>, body: &Bytes, carried: Carried) -> Result<Submit, Problem> {
    let mut queue = None;
    let mut content = Parts::default();
    let mut key = carried.key;
    let mut options = Submit::new(TENANT, "", Content::json(Bytes::new()));
    for (name, raw) in fields {
        let value = Value::new(fields::known(&name, FIELDS)?, raw, body);
        match value.field {
            "queue" => queue = Some(value.string()?),
            "payload" => content.json = Some(value.json()),
            // Null stands for "not given" in every field that has a default.
            _ if value.is_null() => {}
            "payload_base64" => content.base64 = Some(value.base64()?),
            "content_type" => content.content_type = Some(value.string()?),
            "idempotency_key" => agree(&mut key, value)?,
            _ => option(&mut options, value)?,
        }
    }
    options.queue = fields::required("queue", queue)?;
    options.payload = content.payload()?;
    options.key = key;
    options.traceparent = carried.traceparent;
    Ok(options)
}

/// Takes a key given in the body, which must be that of the header if there is one.
pub fn agree(key: &mut Option<String>, value: Value<'_>) -> Result<(), Problem> {
    let given = value.string()?;
    if key.as_ref().is_some_and(|header| *header != given) {
        return Err(Problem::field(value.field, "differs from the header Idempotency-Key"));
    }
    *key = Some(given);
    Ok(())
}

/// Reads a job whose payload is the whole body.
pub fn raw(
    queue: String,
    content_type: Option<&str>,
    query: &str,
    body: Bytes,
    carried: Carried,
) -> Result<Submit, Problem> {
    let content = match content_type {
        Some(kind) if is_json(kind) => {
            if body.iter().all(u8::is_ascii_whitespace) {
                return Err(Problem::NoPayload);
            }
            // Kept with the white space around it: the bytes as they came.
            serde_json::from_slice::<&RawValue>(&body)
                .map_err(|error| Problem::NotJson { detail: format!("The body is not JSON: {error}.") })?;
            Content::json(body)
        }
        Some(kind) => Content::binary(content_type_of("content_type", kind.to_owned())?, body),
        None => Content::binary("application/octet-stream", body),
    };
    let mut submit = Submit::new(TENANT, queue, content);
    for (name, text) in query::parameters(query)? {
        let field = fields::known(&name, FIELDS.get(IDENTITY..).unwrap_or_default())?;
        // Texts stand bare in a query; everything else is written as in JSON.
        let json = match field {
            "class" | "run_at" => serde_json::to_string(&*text).unwrap_or_default().into(),
            "backoff" | "metadata" => text,
            // White space would be JSON's, and is none of a number's.
            _ if text.trim() != text => return Err(Problem::field(field, "has no value that fits")),
            _ => text,
        };
        let body = Bytes::from(json.into_owned());
        let text = std::str::from_utf8(&body).unwrap_or_default();
        serde_json::from_str::<&RawValue>(text).map_err(|_| Problem::field(field, "has no value that fits"))?;
        option(&mut submit, Value { field, text: text.trim(), body: &body })?;
    }
    submit.key = carried.key;
    submit.traceparent = carried.traceparent;
    Ok(submit)
}

pub(crate) fn is_json(content_type: &str) -> bool {
    let kind = content_type.split(';').next().unwrap_or_default().trim();
    kind.eq_ignore_ascii_case("application/json")
}

/// A payload or result as its fields come in.
#[derive(Debug, Default)]
pub struct Parts {
    pub json: Option<Bytes>,
    pub base64: Option<Vec<u8>>,
    pub content_type: Option<String>,
}

impl Parts {
    /// A payload, which must be there.
    pub fn payload(self) -> Result<Content, Problem> {
        self.content("payload", "payload_base64")?.ok_or_else(|| {
            Problem::field("payload", "is missing: give `payload`, or `payload_base64` with `content_type`")
        })
    }

    /// Puts them together; `None` if there was none of them.
    pub fn content(self, json: &'static str, base64: &'static str) -> Result<Option<Content>, Problem> {
        match (self.json, self.base64, self.content_type) {
            (None, None, None) => Ok(None),
            (Some(text), None, None) => Ok(Some(Content::json(text))),
            (None, Some(bytes), Some(kind)) => Ok(Some(Content::binary(content_type_of("content_type", kind)?, bytes))),
            (Some(_), Some(_), _) => Err(Problem::field(base64, format!("stands in for `{json}`: give one of them"))),
            (None, Some(_), None) => Err(Problem::field("content_type", format!("is missing beside `{base64}`"))),
            (_, None, Some(_)) => Err(Problem::field("content_type", format!("goes with `{base64}` only"))),
        }
    }
}

/// A content type is sent back in a header: it has to be one.
pub(crate) fn content_type_of(field: &'static str, text: String) -> Result<String, Problem> {
    if text.len() <= limits::CONTENT_TYPE_BYTES && is_media_type(&text) {
        Ok(text)
    } else {
        let most = limits::CONTENT_TYPE_BYTES;
        Err(Problem::field(field, format!("must be a media type of at most {most} characters, as `text/plain`")))
    }
}

/// `type/subtype`, and perhaps parameters, which are not looked into (RFC 9110, 8.3.1).
fn is_media_type(text: &str) -> bool {
    let token =
        |t: &str| !t.is_empty() && t.bytes().all(|b| b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&b));
    let (kind, parameters) = text.split_once(';').unwrap_or((text, ""));
    let named = kind.trim_end_matches(' ').split_once('/').is_some_and(|(main, sub)| token(main) && token(sub));
    named && parameters.bytes().all(|b| (b' '..=b'~').contains(&b))
}

pub fn option(submit: &mut Submit, value: Value<'_>) -> Result<(), Problem> {
    match value.field {
        "class" => submit.class = class(value)?,
        "delay_ms" => start(submit, value.field, Start::DelayMs(value.u64()?))?,
        "run_at" => {
            let clock = time::parse(&value.string()?).ok_or_else(|| Problem::field(value.field, time::WANTED))?;
            start(submit, value.field, Start::At(clock))?;
        }
        "max_attempts" => submit.max_attempts = Some(value.u32()?),
        "max_deliveries" => submit.max_deliveries = Some(value.u32()?),
        "max_age_ms" => submit.max_age_ms = Some(value.u64()?),
        "lease_ms" => submit.lease_ms = Some(value.u64()?),
        "run_timeout_ms" => submit.run_timeout_ms = Some(value.u64()?),
        "progress_timeout_ms" => submit.progress_timeout_ms = Some(value.u64()?),
        "queue_ttl_ms" => submit.queue_ttl_ms = Some(value.u64()?),
        "retention_ms" => submit.retention_ms = Some(value.u64()?),
        "key_ttl_ms" => submit.key_ttl_ms = Some(value.u64()?),
        "backoff" => submit.backoff = Some(backoff(value)?),
        "on_prem" => submit.on_prem = value.bool()?,
        "cost" => submit.cost = value.u32()?,
        "metadata" => submit.metadata = Some(Opaque::new(value.plain_json()?)),
        other => return Err(fields::unknown(other, FIELDS)),
    }
    Ok(())
}

fn start(submit: &mut Submit, field: &'static str, start: Start) -> Result<(), Problem> {
    if submit.start != Start::Now {
        return Err(Problem::field(field, "`delay_ms` and `run_at` exclude each other"));
    }
    submit.start = start;
    Ok(())
}

pub fn class(value: Value<'_>) -> Result<Class, Problem> {
    Class::parse(&value.string()?)
        .ok_or_else(|| Problem::field(value.field, "must be one of: interactive, system, batch"))
}

fn backoff(value: Value<'_>) -> Result<Backoff, Problem> {
    let mut backoff = Backoff::default();
    for (name, raw) in fields::inner_object(value)? {
        let field = fields::known(&name, BACKOFF)?;
        // Named as a client finds it: inside its parent.
        let inner = |field| Value { field, text: raw.get(), body: value.body };
        match field {
            "base_ms" => backoff.base_ms = inner("backoff.base_ms").u64()?,
            "max_ms" => backoff.max_ms = inner("backoff.max_ms").u64()?,
            "factor" => backoff.factor_milli = inner("backoff.factor").milli()?,
            _ => backoff.jitter_milli = inner("backoff.jitter").milli()?,
        }
    }
    Ok(backoff)
}

/// Reads `Idempotency-Key`: a structured field's string in quotes, or bare.
pub fn key(header: &[u8]) -> Result<String, Problem> {
    let bad = || Problem::field("Idempotency-Key", "must be printable ASCII, bare or in double quotes");
    let text = std::str::from_utf8(header).map_err(|_| bad())?.trim();
    let Some(quoted) = text.strip_prefix('"') else { return Ok(text.to_owned()) };
    let mut out = String::with_capacity(quoted.len());
    let mut chars = quoted.chars();
    loop {
        match chars.next().ok_or_else(bad)? {
            '"' => break,
            '\\' => match chars.next() {
                Some(c @ ('"' | '\\')) => out.push(c),
                _ => return Err(bad()),
            },
            c @ ' '..='~' => out.push(c),
            _ => return Err(bad()),
        }
    }
    // Parameters of a structured field are passed over, as its definition asks.
    let rest = chars.as_str().trim_start();
    if rest.is_empty() || rest.starts_with(';') { Ok(out) } else { Err(bad()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(body: &'static str) -> Result<Submit, String> {
        json(&Bytes::from_static(body.as_bytes()), Carried::default()).map_err(|p| match p {
            Problem::Field { field, .. } => field.into_owned(),
            other => other.code().into(),
        })
    }

    #[test]
    fn a_job_with_everything() {
        let submit = read(
            r#"{"queue":"q","payload":{"a":1},"class":"batch","delay_ms":5,"max_attempts":2,"max_deliveries":9,
            "max_age_ms":1,"lease_ms":2,"run_timeout_ms":3,"progress_timeout_ms":4,"queue_ttl_ms":5,"retention_ms":6,
            "key_ttl_ms":7,"backoff":{"base_ms":1,"max_ms":2,"factor":1.5,"jitter":0},"on_prem":true,"cost":3,
            "metadata":{"m":[]},"idempotency_key":"k"}"#,
        )
        .unwrap();
        assert_eq!(submit.queue, "q");
        assert_eq!(&submit.payload.data.bytes[..], b"{\"a\":1}");
        assert_eq!(submit.class, Class::Batch);
        assert_eq!(submit.start, Start::DelayMs(5));
        assert_eq!(submit.backoff, Some(Backoff { base_ms: 1, max_ms: 2, factor_milli: 1_500, jitter_milli: 0 }));
        assert_eq!((submit.on_prem, submit.cost, submit.key.as_deref()), (true, 3, Some("k")));
        assert_eq!(submit.metadata.unwrap().bytes, "{\"m\":[]}");
    }

    #[test]
    fn complaints_name_their_field() {
        let cases = [
            (r#"{"payload":1}"#, "queue"),
            (r#"{"queue":"q"}"#, "payload"),
            (r#"{"queue":1,"payload":1}"#, "queue"),
            (r#"{"queue":null,"payload":1}"#, "queue"),
            (r#"{"queue":"q","payload":1,"colour":1}"#, "colour"),
            (r#"{"queue":"q","payload":1,"payload_base64":"","content_type":"a/b"}"#, "payload_base64"),
            (r#"{"queue":"q","payload_base64":"AA=="}"#, "content_type"),
            (r#"{"queue":"q","payload_base64":"!","content_type":"a/b"}"#, "payload_base64"),
            (r#"{"queue":"q","payload_base64":"AA==","content_type":"a\nb"}"#, "content_type"),
            (r#"{"queue":"q","payload":1,"content_type":"a/b"}"#, "content_type"),
            (r#"{"queue":"q","payload":1,"class":"urgent"}"#, "class"),
            (r#"{"queue":"q","payload":1,"delay_ms":-1}"#, "delay_ms"),
            (r#"{"queue":"q","payload":1,"delay_ms":1.5}"#, "delay_ms"),
            (r#"{"queue":"q","payload":1,"delay_ms":1,"run_at":"2030-01-01T00:00:00Z"}"#, "run_at"),
            (r#"{"queue":"q","payload":1,"run_at":"soon"}"#, "run_at"),
            (r#"{"queue":"q","payload":1,"max_attempts":"3"}"#, "max_attempts"),
            (r#"{"queue":"q","payload":1,"max_attempts":99999999999}"#, "max_attempts"),
            (r#"{"queue":"q","payload":1,"backoff":{"factor":-1}}"#, "backoff.factor"),
            (r#"{"queue":"q","payload":1,"backoff":{"speed":1}}"#, "speed"),
            (r#"{"queue":"q","payload":1,"backoff":5}"#, "backoff"),
            (r#"{"queue":"q","payload":1,"on_prem":"yes"}"#, "on_prem"),
        ];
        for (body, field) in cases {
            assert_eq!(read(body), Err(field.into()), "{body}");
        }
        assert!(read(r#"{"queue":"q","payload":null,"class":null}"#).is_ok());
    }

    #[test]
    fn a_raw_body_with_options() {
        let body = Bytes::from_static(b" {\"a\": 1}\n");
        let options = "class=interactive&delay_ms=10&backoff=%7B%22base_ms%22:5%7D";
        let submit =
            raw("q".into(), Some("application/json; charset=utf-8"), options, body, Carried::default()).unwrap();
        assert_eq!(&submit.payload.data.bytes[..], b" {\"a\": 1}\n", "as it came");
        assert_eq!((submit.class, submit.start), (Class::Interactive, Start::DelayMs(10)));
        assert_eq!(submit.backoff.map(|b| b.base_ms), Some(5));
        for bad in ["class=x", "delay_ms=", "delay_ms=1%202", "queue=q", "x=1", "on_prem=ja", "delay_ms=1&delay_ms=2"] {
            assert!(raw("q".into(), None, bad, Bytes::new(), Carried::default()).is_err(), "{bad}");
        }
    }

    #[test]
    fn media_types() {
        for good in ["a/b", "text/plain; charset=utf-8", "application/vnd.x+json", "text/plain ;x=\"y z\"", "a/b;"] {
            assert!(is_media_type(good), "{good}");
        }
        for bad in ["", "0", "a", "a/", "/b", "a/b/c", "a b/c", "a/b c", "a/b;\n", "a/b; é", " a/b", "<x>/y"] {
            assert!(!is_media_type(bad), "{bad}");
        }
    }

    #[test]
    fn keys_come_quoted_or_bare() {
        for (header, expected) in
            [("abc", "abc"), ("\"abc\"", "abc"), ("\"a\\\"b\\\\\"", "a\"b\\"), ("\"abc\";x=1", "abc"), (" a b ", "a b")]
        {
            assert_eq!(key(header.as_bytes()).as_deref(), Ok(expected));
        }
        for bad in ["\"abc", "\"abc\"x", "\"a\\b\"", "\"a\u{7}\""] {
            assert!(key(bad.as_bytes()).is_err(), "{bad}");
        }
    }
}
