//! Groups: what clients send, and what they are shown.

use bytes::Bytes;
use leasehold_core::group::record::Mode;
use leasehold_core::opaque::Content;
use leasehold_core::request::{ChildView, CreateGroup, GroupView, Submit};
use leasehold_core::{GroupId, limits};
use serde_json::value::RawValue;

use super::fields::{self, Value};
use super::json::{self, Object};
use super::submit::{self, Carried, Parts, TENANT};
use super::view;
use crate::problem::Problem;

/// Fields of a group that are not rules of its children.
pub const GROUP: &[&str] =
    &["queue", "class", "idempotency_key", "children", "max_parallel", "mode", "sealed", "open_timeout_ms"];
/// The rules of children: a child's own, or the group's for all that say nothing.
pub const RULES: &[&str] = &[
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
];
/// Fields of a child that are not its rules. Retention and key are the group's.
pub const CHILD: &[&str] = &["payload", "payload_base64", "content_type", "metadata"];
pub const EXTEND: &[&str] = &["from", "children"];

/// A group's own rules have no place in a child.
const OF_THE_GROUP: &[&str] = &["retention_ms", "key_ttl_ms"];

fn known(name: &str, own: &[&'static str], rules: impl Fn(&str) -> bool) -> Result<&'static str, Problem> {
    let all: Vec<&'static str> = own.iter().chain(RULES.iter().filter(|r| rules(r))).copied().collect();
    all.iter().find(|known| **known == name).copied().ok_or_else(|| fields::unknown(name, &all))
}

pub fn create(body: &Bytes, carried: Carried) -> Result<CreateGroup, Problem> {
    let mut common = Submit::new(TENANT, "", Content::json(Bytes::from_static(b"null")));
    let (mut queue, mut children) = (None, None);
    let (mut max_parallel, mut mode, mut sealed, mut open_timeout_ms) = (None, Mode::CollectAll, true, None);
    let mut key = carried.key;
    for (name, raw) in fields::object(body)? {
        let value = Value::new(known(&name, GROUP, |_| true)?, raw, body);
        match value.field {
            "queue" => queue = Some(value.string()?),
            "children" => children = Some(read_children(value, body)?),
            _ if value.is_null() => {}
            "class" => common.class = submit::class(value)?,
            "max_parallel" => max_parallel = Some(value.u64()?),
            "mode" => {
                mode = Mode::parse(&value.string()?)
                    .ok_or_else(|| Problem::field("mode", "must be one of: collect_all, fail_fast"))?;
            }
            "sealed" => sealed = value.bool()?,
            "open_timeout_ms" => open_timeout_ms = Some(value.u64()?),
            "idempotency_key" => submit::agree(&mut key, value)?,
            _ => submit::option(&mut common, value)?,
        }
    }
    common.queue = fields::required("queue", queue)?;
    common.key = key;
    common.traceparent = carried.traceparent;
    let children = named(fields::required("children", children)?, &common.queue);
    Ok(CreateGroup { common, children, max_parallel, mode, sealed, open_timeout_ms })
}

/// The first index and the children of a page.
pub fn extend(body: &Bytes) -> Result<(u32, Vec<Submit>), Problem> {
    let (mut from, mut children) = (None, None);
    for (name, raw) in fields::object(body)? {
        let value = Value::new(fields::known(&name, EXTEND)?, raw, body);
        match value.field {
            "from" => from = Some(value.u32()?),
            _ => children = Some(read_children(value, body)?),
        }
    }
    let from = fields::required("from", from)?;
    // Their queue is the group's: the name only has to be one.
    Ok((from, named(fields::required("children", children)?, "group")))
}

fn named(mut children: Vec<Submit>, queue: &str) -> Vec<Submit> {
    for child in &mut children {
        child.queue = queue.to_owned();
    }
    children
}

fn read_children(value: Value<'_>, body: &Bytes) -> Result<Vec<Submit>, Problem> {
    let items = value.any_items(limits::CHILDREN)?;
    let numbered = items.into_iter().enumerate();
    let within = |n: usize, problem: Problem| match problem {
        // The child itself is not what it should be.
        Problem::Field { field, detail } if field == value.field => Problem::field(field, format!("[{n}] {detail}")),
        other => other.within(&format!("children[{n}]")),
    };
    numbered.map(|(n, raw)| child(raw, body).map_err(|problem| within(n, problem))).collect()
}

fn child(raw: &RawValue, body: &Bytes) -> Result<Submit, Problem> {
    let mut child = Submit::new(TENANT, "", Content::json(Bytes::new()));
    let mut content = Parts::default();
    for (name, raw) in fields::inner_object(Value::new("children", raw, body))? {
        let value = Value::new(known(&name, CHILD, |rule| !OF_THE_GROUP.contains(&rule))?, raw, body);
        match value.field {
            "payload" => content.json = Some(value.json()),
            _ if value.is_null() => {}
            "payload_base64" => content.base64 = Some(value.base64()?),
            "content_type" => content.content_type = Some(value.string()?),
            _ => submit::option(&mut child, value)?,
        }
    }
    child.payload = content.payload()?;
    Ok(child)
}

pub fn group(out: &mut Vec<u8>, view: &GroupView) {
    let mut object = Object::new(out);
    fields_of(&mut object, view);
    object.end();
}

fn fields_of(object: &mut Object<'_>, view: &GroupView) {
    object.str("id", &view.id.to_string());
    object.str("queue", &view.queue);
    object.str("class", view.class.text());
    object.str("mode", view.mode.text());
    match view.max_parallel {
        Some(n) => object.num("max_parallel", n.into()),
        None => object.null("max_parallel"),
    }
    object.str("status", view.status.text());
    object.bool("sealed", view.sealed);
    if let Some(stop) = view.stopped {
        object.str("stopped", stop.text());
    }
    object.time("created_at", view.created_at);
    if let Some(at) = view.open_until {
        object.time("open_until", at);
    }
    if let Some(at) = view.ended_at {
        object.time("ended_at", at);
    }
    object.num("children", view.children.into());
    let mut counts = Object::new(object.key("counts"));
    let c = &view.counts;
    for (name, n) in [
        ("held", c.held),
        ("in_flight", c.in_flight),
        ("succeeded", c.succeeded),
        ("dead", c.dead),
        ("cancelled", c.cancelled),
        ("expired", c.expired),
        ("lost", c.lost),
    ] {
        counts.num(name, n);
    }
    counts.end();
    if let Some(key) = &view.key {
        object.str("idempotency_key", key);
    }
}

/// The result's head: the group's fields and the beginning of its outcomes.
pub fn result_head(view: &GroupView) -> Vec<u8> {
    let mut out = Vec::with_capacity(512);
    let mut object = Object::new(&mut out);
    fields_of(&mut object, view);
    object.key("outcomes").push(b'[');
    out
}

/// What closes [`result_head`].
pub const RESULT_TAIL: &[u8] = b"]}";

pub fn children(out: &mut Vec<u8>, children: &[ChildView], next: Option<u32>) {
    let mut object = Object::new(out);
    json::array(object.key("children"), children, child_view);
    match next {
        Some(next) => object.str("next", &format!("i{next}")),
        None => object.null("next"),
    }
    object.end();
}

pub fn child_view(out: &mut Vec<u8>, child: &ChildView) {
    let mut object = Object::new(out);
    object.num("index", child.index.into());
    object.id("id", child.id);
    object.str("status", child.state.text());
    object.num("attempts", child.attempts.into());
    if let Some(reason) = &child.reason {
        object.str("reason", reason);
    }
    if let Some(error) = &child.error {
        view::error(object.key("error"), error);
    }
    if let Some(at) = child.ended_at {
        object.time("ended_at", at);
    }
    if let Some(len) = child.result_len {
        object.num("result_bytes", len);
    }
    if let Some(result) = &child.result {
        object.content("result", "result_base64", result);
    }
    object.end();
}

/// A malformed id is an unknown one.
pub fn id(text: &str) -> Result<GroupId, Problem> {
    text.parse().map_err(|_| Problem::Failure(leasehold_core::Failure::UnknownGroup))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(body: &'static str) -> Result<CreateGroup, String> {
        create(&Bytes::from_static(body.as_bytes()), Carried::default()).map_err(|p| match p {
            Problem::Field { field, .. } => field.into_owned(),
            other => other.code().into(),
        })
    }

    #[test]
    fn a_group_with_everything() {
        let group = read(
            r#"{"queue":"q","class":"batch","max_parallel":2,"mode":"fail_fast","sealed":false,"open_timeout_ms":9,
            "max_attempts":4,"retention_ms":8,"children":[{"payload":{"children":[1],"max_parallel":0,"fanout":{}}},
            {"payload_base64":"AA==","content_type":"a/b","max_attempts":1,"metadata":{"m":1}}]}"#,
        )
        .unwrap();
        assert_eq!((group.max_parallel, group.mode, group.sealed), (Some(2), Mode::FailFast, false));
        assert_eq!((group.common.max_attempts, group.children[1].max_attempts), (Some(4), Some(1)));
        // What a payload happens to contain is a payload.
        assert_eq!(&group.children[0].payload.data.bytes[..], br#"{"children":[1],"max_parallel":0,"fanout":{}}"#);
        assert_eq!(read(r#"{"queue":"q","children":[]}"#).unwrap().children.len(), 0);
    }

    #[test]
    fn complaints_name_their_field() {
        for (body, field) in [
            (r#"{"children":[]}"#, "queue"),
            (r#"{"queue":"q"}"#, "children"),
            (r#"{"queue":"q","children":5}"#, "children"),
            (r#"{"queue":"q","children":[{}]}"#, "children[0].payload"),
            (r#"{"queue":"q","children":[{"payload":1},{"payload":1,"queue":"x"}]}"#, "children[1].queue"),
            (r#"{"queue":"q","children":[{"payload":1,"delay_ms":1}]}"#, "children[0].delay_ms"),
            (r#"{"queue":"q","children":[{"payload":1,"retention_ms":1}]}"#, "children[0].retention_ms"),
            (r#"{"queue":"q","children":[],"max_parallel":-1}"#, "max_parallel"),
            (r#"{"queue":"q","children":[],"max_parallel":1.5}"#, "max_parallel"),
            (r#"{"queue":"q","children":[],"max_parallel":"2"}"#, "max_parallel"),
            (r#"{"queue":"q","children":[],"mode":"some"}"#, "mode"),
            (r#"{"queue":"q","children":[],"delay_ms":1}"#, "delay_ms"),
            (r#"{"queue":"q","children":[],"payload":1}"#, "payload"),
        ] {
            assert_eq!(read(body).unwrap_err(), field, "{body}");
        }
    }
}
