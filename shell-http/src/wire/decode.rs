//! What workers and operators send.

use bytes::Bytes;
use leasehold_core::job::record::{ErrorInfo, Status};
use leasehold_core::opaque::{self, Opaque};
use leasehold_core::request::{Beat, Claim, Complete, EventCursor, Fail, Held, List};
use leasehold_core::{Failure, JobId, Request, Token, limits};
use serde_json::value::RawValue;

use super::fields::{self, Fields, Value};
use super::query;
use super::submit::{Parts, TENANT};
use crate::problem::Problem;

pub const CLAIM: &[&str] = &["worker", "queues", "max", "wait_ms", "lease_ms", "claim_id"];
pub const HEARTBEAT: &[&str] = &["token", "progress", "seq"];
pub const COMPLETE: &[&str] = &["token", "result", "result_base64", "content_type"];
pub const FAIL: &[&str] = &["token", "error", "retryable", "retry_in_ms"];
pub const ERROR: &[&str] = &["message", "type", "detail"];
pub const RELEASE: &[&str] = &["token"];
pub const SET_QUEUE: &[&str] = &["lease_ms"];
pub const PAUSE: &[&str] = &["reason"];
pub const PURGE: &[&str] = &["status"];

/// Jobs in a claim that names no number.
const CLAIM_DEFAULT: usize = 1;
/// Events in an answer, unless asked otherwise; and at most.
const EVENTS_DEFAULT: usize = 100;

pub fn claim(body: &Bytes) -> Result<Claim, Problem> {
    let (mut worker, mut queues) = (None, None);
    let (mut max, mut wait_ms, mut lease_ms, mut claim_id) = (CLAIM_DEFAULT, 0, None, None);
    for (name, raw) in fields::object(body)? {
        let value = Value::new(fields::known(&name, CLAIM)?, raw, body);
        match value.field {
            "worker" => worker = Some(value.string()?),
            "queues" => queues = Some(value.strings()?),
            _ if value.is_null() => {}
            "max" => max = value.usize()?,
            "wait_ms" => wait_ms = value.u64()?,
            "lease_ms" => lease_ms = Some(value.u64()?),
            _ => claim_id = Some(value.string()?),
        }
    }
    let worker = fields::required("worker", worker)?;
    let queues = fields::required("queues", queues)?;
    Ok(Claim { tenant: TENANT.into(), worker, queues, max, wait_ms, lease_ms, claim_id })
}

/// A malformed id is an unknown one.
pub fn job_id(text: &str) -> Result<JobId, Problem> {
    text.parse().map_err(|_| Problem::Failure(Failure::UnknownJob))
}

/// A call that is made under a lease, alone or as an item of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Under {
    Heartbeat,
    Complete,
    Fail,
    Release,
}

impl Under {
    pub const fn fields(self) -> &'static [&'static str] {
        match self {
            Under::Heartbeat => HEARTBEAT,
            Under::Complete => COMPLETE,
            Under::Fail => FAIL,
            Under::Release => RELEASE,
        }
    }

    /// Reads the call for the job that the path names.
    pub fn read(self, id: &str, body: &Bytes) -> Result<Request, Problem> {
        let job = job_id(id)?;
        self.put_together(job, fields::object(body)?, body)
    }

    /// Reads an item of a batch, which names its job itself.
    pub fn item(self, raw: &RawValue, body: &Bytes) -> Result<Request, Problem> {
        let mut fields = fields::inner_object(Value::new("items", raw, body))?;
        let at = fields.iter().position(|(k, _)| k == "id").ok_or_else(|| Problem::field("id", "is missing"))?;
        let (_, id) = fields.swap_remove(at);
        let job = job_id(&Value::new("id", id, body).string()?)?;
        self.put_together(job, fields, body)
    }

    fn put_together(self, job: JobId, fields: Fields<'_>, body: &Bytes) -> Result<Request, Problem> {
        let mut token = None;
        let (mut progress, mut seq) = (None, None);
        let mut result = Parts::default();
        let (mut error, mut retryable, mut retry_in_ms) = (None, true, None);
        for (name, raw) in fields {
            let value = Value::new(fields::known(&name, self.fields())?, raw, body);
            match value.field {
                "token" => token = Some(value.string()?),
                "progress" => progress = Some(Opaque::new(value.json())),
                "result" => result.json = Some(value.json()),
                "error" => error = Some(error_info(value)?),
                _ if value.is_null() => {}
                "seq" => seq = Some(value.u64()?),
                "result_base64" => result.base64 = Some(value.base64()?),
                "content_type" => result.content_type = Some(value.string()?),
                "retryable" => retryable = value.bool()?,
                _ => retry_in_ms = Some(value.u64()?),
            }
        }
        // What is no token of this job is certainly not its present one: the core says so.
        let token = Token::parse(&fields::required("token", token)?, job);
        let held = Held { tenant: TENANT.into(), job, token };
        Ok(match self {
            Under::Heartbeat => Request::Heartbeat(Beat { held, progress, seq }),
            Under::Complete => {
                let result = result.content("result", "result_base64")?;
                Request::Complete(Box::new(Complete { held, result }))
            }
            Under::Fail => {
                let error = fields::required("error", error)?;
                Request::Fail(Box::new(Fail { held, error, retryable, retry_in_ms }))
            }
            Under::Release => Request::Release(held),
        })
    }
}

fn error_info(value: Value<'_>) -> Result<ErrorInfo, Problem> {
    let (mut message, mut kind, mut detail) = (None, None, None);
    for (name, raw) in fields::inner_object(value)? {
        let field = fields::known(&name, ERROR)?;
        let inner = |field| Value { field, text: raw.get(), body: value.body };
        match field {
            "message" => message = Some(inner("error.message").string()?),
            _ if raw.get() == "null" => {}
            "type" => kind = Some(inner("error.type").string()?),
            _ => detail = Some(inner("error.detail").string()?),
        }
    }
    Ok(ErrorInfo { message: fields::required("error.message", message)?, kind, detail })
}

/// The items of a batch: `{"items": […]}` or `{"jobs": […]}`.
pub fn batch<'a>(body: &'a Bytes, list: &'static str) -> Result<Vec<&'a RawValue>, Problem> {
    let mut items = None;
    for (name, raw) in fields::object(body)? {
        if name != list {
            return Err(fields::unknown(&name, &[list]));
        }
        items = Some(Value::new(list, raw, body).items(limits::BATCH_ITEMS)?);
    }
    fields::required(list, items)
}

/// `{lease_ms?}`.
pub fn set_queue(queue: String, body: &Bytes) -> Result<Request, Problem> {
    let mut lease_ms = None;
    for (name, raw) in fields::object(body)? {
        let value = Value::new(fields::known(&name, SET_QUEUE)?, raw, body);
        if !value.is_null() {
            lease_ms = Some(value.u64()?);
        }
    }
    Ok(Request::SetQueue { tenant: TENANT.into(), queue, lease_ms })
}

/// `{reason?}`.
pub fn pause(queue: String, body: &Bytes) -> Result<Request, Problem> {
    let mut reason = None;
    for (name, raw) in fields::optional_object(body)? {
        let value = Value::new(fields::known(&name, PAUSE)?, raw, body);
        if !value.is_null() {
            reason = Some(value.string()?);
        }
    }
    Ok(Request::Pause { tenant: TENANT.into(), queue, reason })
}

/// `{status?}`.
pub fn purge(queue: String, body: &Bytes) -> Result<Request, Problem> {
    let mut status = Status::Queued;
    for (name, raw) in fields::optional_object(body)? {
        let value = Value::new(fields::known(&name, PURGE)?, raw, body);
        if !value.is_null() {
            status = self::status(value.field, &value.string()?)?;
        }
    }
    Ok(Request::Purge { tenant: TENANT.into(), queue, status })
}

/// A body that is not needed may be there, if it is an empty object.
pub fn nothing(body: &Bytes) -> Result<(), Problem> {
    match fields::optional_object(body)?.first() {
        None => Ok(()),
        Some((name, _)) => Err(fields::unknown(name, &[])),
    }
}

fn status(field: &'static str, text: &str) -> Result<Status, Problem> {
    Status::parse(text).ok_or_else(|| {
        let all: Vec<&str> = Status::ALL.iter().map(|s| s.text()).collect();
        Problem::field(field, format!("must be one of: {}", all.join(", ")))
    })
}

fn number<T: std::str::FromStr>(field: &'static str, text: &str) -> Result<T, Problem> {
    // Rust would take a sign.
    let digits = text.bytes().all(|b| b.is_ascii_digit());
    let number = digits.then(|| text.parse().ok()).flatten();
    number.ok_or_else(|| Problem::field(field, "must be a whole number that is not negative"))
}

pub const LIST: &[&str] = &["queue", "status", "limit", "cursor"];

/// Which jobs are asked for, whatever the page: a cursor belongs to one question, and names it before the store's
/// part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Question(u32);

impl Question {
    fn of(list: &List) -> Question {
        let status = list.status.map_or("", Status::text);
        // A name has no control characters: no two questions are written alike.
        let text = list.queue.as_ref().map_or_else(|| status.to_owned(), |queue| format!("{status}\n{queue}"));
        // So that one is hardly taken for another; nobody is kept out by it.
        Question((opaque::hash(text.as_bytes()) >> 96) as u32)
    }

    pub fn cursor(self, rest: &str) -> String {
        format!("{:08x}.{rest}", self.0)
    }

    fn rest(self, cursor: &str) -> Result<String, Problem> {
        let rest = cursor.split_once('.').filter(|(of, _)| *of == format!("{:08x}", self.0));
        rest.map(|(_, rest)| rest.to_owned()).ok_or(Problem::Failure(Failure::BadCursor))
    }
}

pub fn list(query: &str) -> Result<(List, Question), Problem> {
    let mut list = List { tenant: TENANT.into(), queue: None, status: None, limit: limits::LIST_DEFAULT, cursor: None };
    for (name, text) in query::parameters(query)? {
        match fields::known(&name, LIST)? {
            "queue" => list.queue = Some(text.into_owned()),
            "status" => list.status = Some(status("status", &text)?),
            "limit" => list.limit = number("limit", &text)?,
            _ => list.cursor = Some(text.into_owned()),
        }
    }
    if !(1..=limits::LIST_MAX).contains(&list.limit) {
        return Err(Problem::field("limit", format!("must be from 1 to {}", limits::LIST_MAX)));
    }
    let question = Question::of(&list);
    list.cursor = list.cursor.map(|cursor| question.rest(&cursor)).transpose()?;
    Ok((list, question))
}

pub const GROUP: &[&str] = &["wait_ms"];

/// How long a group's end is waited for.
pub fn group(query: &str) -> Result<u64, Problem> {
    let mut wait_ms = 0;
    for (name, text) in query::parameters(query)? {
        fields::known(&name, GROUP)?;
        wait_ms = number("wait_ms", &text)?;
    }
    Ok(wait_ms)
}

pub const CHILDREN: &[&str] = &["cursor", "limit"];

/// Where a page of children begins, and how many it has.
pub fn children(query: &str) -> Result<(u32, usize), Problem> {
    let (mut from, mut limit) = (0, limits::LIST_DEFAULT);
    for (name, text) in query::parameters(query)? {
        match fields::known(&name, CHILDREN)? {
            "limit" => limit = number("limit", &text)?,
            _ => {
                let index = text.strip_prefix('i').filter(|t| t.bytes().all(|b| b.is_ascii_digit()));
                from = index.and_then(|t| t.parse().ok()).ok_or_else(|| Problem::from(Failure::BadCursor))?;
            }
        }
    }
    Ok((from, limit))
}

pub const AUDIT: &[&str] = &["cursor"];

/// The cursor of an audit's page.
pub fn audit(query: &str) -> Result<Option<String>, Problem> {
    let mut cursor = None;
    for (name, text) in query::parameters(query)? {
        fields::known(&name, AUDIT)?;
        cursor = Some(text.into_owned());
    }
    Ok(cursor)
}

pub const EVENTS: &[&str] = &["after", "limit", "wait_ms"];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Events {
    pub after: EventCursor,
    pub limit: usize,
    pub wait_ms: u64,
}

pub fn events(query: &str) -> Result<Events, Problem> {
    let mut events = Events { after: EventCursor::default(), limit: EVENTS_DEFAULT, wait_ms: 0 };
    for (name, text) in query::parameters(query)? {
        match fields::known(&name, EVENTS)? {
            "after" => events.after = cursor("after", &text)?,
            "limit" => events.limit = number("limit", &text)?,
            _ => events.wait_ms = number("wait_ms", &text)?,
        }
    }
    if !(1..=limits::LIST_MAX).contains(&events.limit) {
        return Err(Problem::field("limit", format!("must be from 1 to {}", limits::LIST_MAX)));
    }
    if events.wait_ms > limits::WAIT_MS {
        return Err(Problem::field("wait_ms", format!("must be at most {}", limits::WAIT_MS)));
    }
    Ok(events)
}

/// An event's id: `seq-seen`.
pub fn cursor(field: &'static str, text: &str) -> Result<EventCursor, Problem> {
    let parse = || {
        let (seq, seen) = text.split_once('-')?;
        Some(EventCursor { seq: number(field, seq).ok()?, seen: number(field, seen).ok()? })
    };
    parse().ok_or_else(|| Problem::field(field, "must be an event's id from an earlier answer"))
}

/// Calls without parameters take none.
pub fn no_query(query: &str) -> Result<(), Problem> {
    match query::parameters(query)?.first() {
        None => Ok(()),
        Some((name, _)) => Err(fields::unknown(name, &[])),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn field<T: std::fmt::Debug>(result: Result<T, Problem>) -> String {
        match result.unwrap_err() {
            Problem::Field { field, .. } => field.into_owned(),
            other => other.code().into(),
        }
    }

    #[test]
    fn claims() {
        let read = |text: &'static str| claim(&Bytes::from_static(text.as_bytes()));
        let claim =
            read(r#"{"worker":"w","queues":["a","b"],"max":7,"wait_ms":9,"claim_id":"c","lease_ms":null}"#).unwrap();
        assert_eq!((claim.max, claim.wait_ms, claim.lease_ms, claim.queues.len()), (7, 9, None, 2));
        for (body, expected) in [
            (r#"{"queues":["a"]}"#, "worker"),
            (r#"{"worker":"w"}"#, "queues"),
            (r#"{"worker":"w","queues":"a"}"#, "queues"),
            (r#"{"worker":"w","queues":[1]}"#, "queues"),
            (r#"{"worker":"w","queues":["a"],"max":-1}"#, "max"),
            (r#"{"worker":"w","queues":["a"],"maximum":1}"#, "maximum"),
        ] {
            assert_eq!(field(read(body)), expected, "{body}");
        }
    }

    #[test]
    fn items_name_their_job_first() {
        let id = "01J8ZQ3V9K007Q4M2X5N6P7R8S";
        let body = Bytes::from(format!(
            r#"{{"items":[{{"id":"{id}","token":"x"}},{{"token":"x"}},{{"id":"nope","token":"x"}},7,{{"id":"{id}"}}]}}"#
        ));
        let items = batch(&body, "items").unwrap();
        let read: Vec<_> = items.into_iter().map(|raw| Under::Complete.item(raw, &body)).collect();
        assert!(
            matches!(&read[0], Ok(Request::Complete(c)) if c.held.token.is_none() && c.result.is_none()),
            "{read:?}"
        );
        let problems: Vec<String> = read.into_iter().skip(1).map(field).collect();
        assert_eq!(problems, ["id", "unknown_job", "items", "token"]);
        for (body, expected) in [("{}", "items"), ("{\"items\":[]}", "items"), ("{\"items\":{}}", "items")] {
            assert_eq!(field(batch(&Bytes::from_static(body.as_bytes()), "items")), expected);
        }
    }

    #[test]
    fn queries() {
        assert_eq!(list("status=dead&limit=5&queue=a%2Fb").unwrap().0.queue.as_deref(), Some("a/b"));
        for (query, expected) in [
            ("limit=0", "limit"),
            ("limit=1001", "limit"),
            ("limit=%2B1", "limit"),
            ("status=no", "status"),
            ("x=1", "x"),
        ] {
            assert_eq!(field(list(query)), expected);
        }
        let cursor = list("status=dead&queue=q").unwrap().1.cursor("x.y");
        let next = |query: &str| list(&format!("{query}&cursor={cursor}")).map(|(list, _)| list.cursor);
        assert_eq!(next("queue=q&status=dead&limit=7"), Ok(Some("x.y".into())), "the same question");
        for other in ["", "queue=q", "status=dead", "queue=q&status=held", "queue=r&status=dead"] {
            assert_eq!(field(next(other)), "bad_cursor", "{other}");
        }
        for bad in ["cursor=", "cursor=x.y", "cursor=."] {
            assert_eq!(field(list(bad)), "bad_cursor", "{bad}");
        }
        assert_eq!(events("after=7-2").unwrap().after, EventCursor { seq: 7, seen: 2 });
        for query in ["after=7", "after=-", "after=7-x", "after=%2B7-2"] {
            assert_eq!(field(events(query)), "after");
        }
    }
}
