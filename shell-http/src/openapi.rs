//! The description of the API: OpenAPI 3.1, made from the very table that routes.

use std::sync::OnceLock;

use bytes::Bytes;
use serde_json::{Map, Value, json};

use crate::problem::Problem;
use crate::routes::{AnswerBody, Call, ROUTES, Route, Takes};
use crate::wire::view;

const SCHEMAS: &str = include_str!("schemas.json");

/// Problems that any call can answer with: of the connection, the head, the query, the body, the store.
const COMMON: &[u16] = &[400, 403, 408, 413, 414, 422, 429, 500, 503];

/// What clients send: an optional field given as `null` counts as not given.
const REQUESTS: &[&str] = &[
    "Submit",
    "Backoff",
    "Claim",
    "Heartbeat",
    "Complete",
    "Fail",
    "Error",
    "Release",
    "SetQueue",
    "Pause",
    "Purge",
    "SetPool",
    "Acquire",
    "CompletionItem",
    "FailureItem",
    "HeartbeatItem",
];
/// In these fields `null` is a value like any other, or the schema says itself what it allows.
const ANY_JSON: &[&str] = &["payload", "result", "progress", "metadata"];

/// The description as it is served.
pub fn text() -> Bytes {
    static TEXT: OnceLock<Bytes> = OnceLock::new();
    TEXT.get_or_init(|| document().to_string().into()).clone()
}

fn document() -> Value {
    let mut paths: Map<String, Value> = Map::new();
    let schemas = schemas();
    for route in ROUTES {
        let path = paths.entry(route.path).or_insert_with(|| json!({}));
        path[route.method.as_str().to_ascii_lowercase()] = operation(route, &schemas);
    }
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Leasehold",
            "version": env!("CARGO_PKG_VERSION"),
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            "description": "A durable job system. Times are RFC 3339, UTC, with milliseconds; durations are integers \
                ending in _ms; ids and tokens are opaque. A string's `maxLength` counts bytes of UTF-8.",
        },
        "paths": paths,
        "components": {"schemas": schemas, "headers": {
            "RequestId": {
                "description": "The call's name: the client's own, or one made by the server.",
                "required": true,
                "schema": {"type": "string", "minLength": 1, "maxLength": 128},
            },
            "RetryAfter": {
                "description": "Seconds.", "required": true, "schema": {"type": "integer", "minimum": 1},
            },
            "Location": {"description": "The path of what was made.", "required": true, "schema": {"type": "string"}},
        }},
    })
}

/// What is written by hand, and what can be said better by the program.
fn schemas() -> Value {
    let mut schemas: Value = serde_json::from_str(SCHEMAS).unwrap_or_default();
    schemas["Event"]["properties"]["type"]["enum"] = view::event_types().collect();
    schemas["Problem"]["properties"]["code"]["enum"] = Problem::CODES.iter().copied().collect();
    for name in REQUESTS {
        let schema = &mut schemas[name];
        let required: Vec<String> =
            schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str).map(str::to_owned).collect();
        let Some(properties) = schema["properties"].as_object_mut() else { continue };
        for (field, property) in properties {
            if !required.contains(field) && !ANY_JSON.contains(&field.as_str()) {
                *property = json!({"anyOf": [property.take(), {"type": "null"}]});
            }
        }
    }
    schemas
}

fn operation(route: &Route, schemas: &Value) -> Value {
    let mut parameters: Vec<Value> = Vec::new();
    for name in route.path.split('/').filter_map(|s| s.strip_prefix('{')?.strip_suffix('}')) {
        // A malformed id is an unknown one: nothing about it is for the client to know.
        let schema = if name == "id" { schema_ref("Id") } else { json!({"type": "string", "minLength": 1}) };
        parameters.push(json!({"name": name, "in": "path", "required": true, "schema": schema}));
    }
    for name in route.query {
        let (schema, what) = parameter(route.call, name, schemas);
        parameters.push(json!({"name": name, "in": "query", "description": what, "schema": schema}));
    }
    let mut header = |name: &str, what: &str, schema: Value| {
        parameters.push(json!({"name": name, "in": "header", "description": what, "schema": schema}));
    };
    if matches!(route.call, Call::Submit | Call::SubmitRaw) {
        let what = "Names the job: a repeat gets the same one (IETF draft Idempotency-Key).";
        header("Idempotency-Key", what, json!({"type": "string", "minLength": 1, "maxLength": 256, "pattern": KEY}));
    }
    if matches!(route.call, Call::Submit | Call::SubmitRaw | Call::SubmitBatch) {
        header("traceparent", "W3C trace context; a malformed one is ignored.", json!({"type": "string"}));
    }
    if route.call == Call::Events {
        let schema = json!({"type": "string", "pattern": EVENT_ID});
        header("Last-Event-ID", "The last event seen, instead of `after`.", schema);
    }
    if route.call == Call::Proxy {
        let wait = json!({"type": "integer", "minimum": 0, "maximum": 60000, "default": 30000});
        header("Leasehold-Wait-Ms", "How long to wait for a slot.", wait);
        header("Leasehold-On-Prem", "Only upstreams that are `on_prem`.", json!({"type": "boolean"}));
        let what = "Answer with server-sent events at once, and tell the place in line while it waits.";
        header("Leasehold-Queue-Events", what, json!({"type": "boolean"}));
    }
    header("X-Request-Id", "Names the call in the server's log.", json!({"type": "string"}));
    let mut operation = json!({
        "operationId": operation_id(route),
        "summary": route.summary,
        "parameters": parameters,
        "responses": responses(route),
    });
    match route.takes {
        Takes::Nothing => {}
        Takes::Json(schema) => operation["requestBody"] = request_body(schema, true),
        Takes::OptionalJson(schema) => operation["requestBody"] = request_body(schema, false),
        Takes::Bytes => {
            let content = json!({"application/json": {"schema": {}}, "application/octet-stream": {}, "*/*": {}});
            operation["requestBody"] = json!({"description": "The payload.", "required": false, "content": content});
        }
    }
    operation
}

fn responses(route: &Route) -> Map<String, Value> {
    let request_id = || json!({"X-Request-Id": {"$ref": "#/components/headers/RequestId"}});
    let mut responses = Map::new();
    for answer in route.answers {
        let mut response = json!({"description": answer.what, "headers": request_id()});
        match answer.body {
            AnswerBody::Nothing => {}
            AnswerBody::Json(schema) => {
                response["content"] = json!({"application/json": {"schema": schema_ref(schema)}})
            }
            AnswerBody::Bytes(media) => response["content"] = json!({media: {}}),
        }
        if route.call == Call::Events {
            response["content"]["text/event-stream"] = json!({"schema": {"type": "string"}});
        }
        if route.call == Call::Claim {
            response["links"] = links();
        }
        if answer.status == 201 {
            response["headers"]["Location"] = json!({"$ref": "#/components/headers/Location"});
        }
        responses.insert(answer.status.to_string(), response);
    }
    for status in COMMON.iter().chain(route.problems) {
        let content = json!({"application/problem+json": {"schema": schema_ref("Problem")}});
        let mut response = json!({"description": reason(*status), "headers": request_id(), "content": content});
        if matches!(status, 429 | 503) {
            response["headers"]["Retry-After"] = json!({"$ref": "#/components/headers/RetryAfter"});
        }
        responses.entry(status.to_string()).or_insert(response);
    }
    responses
}

/// What becomes of a lease.
fn links() -> Value {
    let link = |call: Call, more: Value| {
        let mut body = more;
        body["token"] = "$response.body#/jobs/0/token".into();
        let parameters = json!({"id": "$response.body#/jobs/0/id"});
        json!({"operationId": call_id(call), "parameters": parameters, "requestBody": body})
    };
    json!({
        "complete": link(Call::Complete, json!({"result": null})),
        "heartbeat": link(Call::Heartbeat, json!({})),
        "fail": link(Call::Fail, json!({"error": {"message": "it did not work"}})),
        "release": link(Call::Release, json!({})),
    })
}

/// What a status says, and the codes that come with it.
fn reason(status: u16) -> &'static str {
    match status {
        400 => "not JSON, no body where one is needed, or not HTTP: `not_json`, `empty_body`, `not_http`",
        403 => "a browser sent this from another site: `cross_origin`",
        404 => "no such thing, no longer, or its name is malformed: `unknown_…`, `no_payload`, `no_result`",
        408 => "the body did not come in time: `incomplete_body`",
        409 => "the state of the job, group, pool or slot does not allow it; see `code`",
        413 => "the body is too large: `too_large`",
        414 => "path and query are too long: `uri_too_long`",
        422 => "a field or parameter is wrong, see `field`; or `bad_cursor`, `idempotency_key_reused`",
        429 => "too much in work: `mailbox_full`; no slot was free in time: `pool_full`. Certainly not done",
        500 => "a defect of the server's: `internal`",
        502 => "the upstream did not answer, or not with HTTP: `upstream_failed`",
        504 => "the upstream took too long: `upstream_timeout`",
        503 => "not done for now, see `code`; after `outcome_unknown` repeat with the same key, token or claim id",
        _ => "not done; see `code`",
    }
}

fn request_body(schema: &str, required: bool) -> Value {
    json!({"required": required, "content": {"application/json": {"schema": schema_ref(schema)}}})
}

fn schema_ref(name: &str) -> Value {
    json!({"$ref": format!("#/components/schemas/{name}")})
}

const EVENT_ID: &str = "^[0-9]{1,19}-[0-9]{1,9}$";
/// Bare, or a structured field's string in quotes.
const KEY: &str = r#"^([!#-~]|[!#-~][ -~]*[!-~]|"([ !#-\[\]-~]|\\["\\])+")$"#;

/// A parameter of the query, and what it means.
fn parameter(call: Call, name: &str, schemas: &Value) -> (Value, &'static str) {
    let of_submit = |name: &str| {
        let property = &schemas["Submit"]["properties"][name];
        property.get("anyOf").and_then(|any| any.get(0)).unwrap_or(property).clone()
    };
    match (call, name) {
        (Call::SubmitRaw, "backoff" | "metadata") => (json!({"type": "string"}), "As JSON; see Submit."),
        (Call::SubmitRaw, name) => (of_submit(name), "As the field of Submit."),
        (_, "queue") => (schema_ref("Name"), "Of this queue only."),
        (_, "status") => (schema_ref("Status"), "Of this status only."),
        (_, "limit") => (json!({"type": "integer", "minimum": 1, "maximum": 1000, "default": 100}), "At most so many."),
        (_, "cursor") => (json!({"type": "string"}), "The `next` of an earlier answer to the same question."),
        (_, "after") => (json!({"type": "string", "pattern": EVENT_ID}), "The id after which to go on."),
        (_, "wait_ms") => {
            let schema = json!({"type": "integer", "minimum": 0, "maximum": 60000, "default": 0});
            (schema, "How long to wait for something to answer with.")
        }
        _ => (json!({"type": "string"}), ""),
    }
}

/// The call, and of one that has several methods also the method.
fn operation_id(route: &Route) -> String {
    let id = call_id(route.call);
    match route.call {
        Call::Proxy => format!("{id}_{}", route.method.as_str().to_ascii_lowercase()),
        _ => id,
    }
}

/// `SubmitBatch` as `submitBatch`.
fn call_id(call: Call) -> String {
    let name = format!("{call:?}");
    let mut chars = name.chars();
    chars.next().map(|c| c.to_lowercase().chain(chars).collect()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{decode, pool, submit};
    use std::collections::BTreeSet;

    #[test]
    fn the_description_is_the_table() {
        let document = document();
        let described: BTreeSet<(String, String)> = document["paths"]
            .as_object()
            .unwrap()
            .iter()
            .flat_map(|(path, methods)| {
                methods.as_object().unwrap().keys().map(move |m| (m.to_uppercase(), path.clone()))
            })
            .collect();
        let routed: BTreeSet<(String, String)> =
            ROUTES.iter().map(|r| (r.method.as_str().to_owned(), r.path.to_owned())).collect();
        assert_eq!(described, routed);
        let ids: BTreeSet<String> = ROUTES.iter().map(operation_id).collect();
        assert_eq!(ids.len(), ROUTES.len(), "operation ids differ");
    }

    #[test]
    fn every_reference_resolves() {
        let document = document();
        fn walk(value: &Value, seen: &mut BTreeSet<String>) {
            match value {
                Value::Object(map) => {
                    if let Some(Value::String(target)) = map.get("$ref") {
                        seen.insert(target.clone());
                    }
                    map.values().for_each(|v| walk(v, seen));
                }
                Value::Array(list) => list.iter().for_each(|v| walk(v, seen)),
                _ => {}
            }
        }
        let mut seen = BTreeSet::new();
        walk(&document, &mut seen);
        let known = ["schemas", "headers"].into_iter().flat_map(|kind| {
            let named = document["components"][kind].as_object().unwrap();
            named.keys().map(move |name| format!("#/components/{kind}/{name}"))
        });
        let known: BTreeSet<String> = known.collect();
        assert_eq!(seen, known, "each schema is used, and each use is a schema");
    }

    #[test]
    fn schemas_have_the_fields_that_are_read() {
        let schemas: Value = serde_json::from_str(SCHEMAS).unwrap();
        for (schema, fields) in [
            ("Submit", submit::FIELDS),
            ("Backoff", submit::BACKOFF),
            ("Claim", decode::CLAIM),
            ("Heartbeat", decode::HEARTBEAT),
            ("Complete", decode::COMPLETE),
            ("Fail", decode::FAIL),
            ("Error", decode::ERROR),
            ("Release", decode::RELEASE),
            ("SetQueue", decode::SET_QUEUE),
            ("Pause", decode::PAUSE),
            ("Purge", decode::PURGE),
            ("SetPool", pool::SET_POOL),
            ("Acquire", pool::ACQUIRE),
        ] {
            let described: BTreeSet<&str> =
                schemas[schema]["properties"].as_object().unwrap().keys().map(String::as_str).collect();
            assert_eq!(described, fields.iter().copied().collect(), "{schema}");
            if let Some(item) = match schema {
                "Complete" => Some("CompletionItem"),
                "Fail" => Some("FailureItem"),
                "Heartbeat" => Some("HeartbeatItem"),
                _ => None,
            } {
                let described: BTreeSet<&str> =
                    schemas[item]["properties"].as_object().unwrap().keys().map(String::as_str).collect();
                assert_eq!(described, fields.iter().copied().chain(["id"]).collect(), "{item}");
            }
        }
    }

    #[test]
    fn every_answer_is_described() {
        let document = document();
        for (path, methods) in document["paths"].as_object().unwrap() {
            for (method, operation) in methods.as_object().unwrap() {
                for (status, response) in operation["responses"].as_object().unwrap() {
                    let what = format!("{method} {path} {status}");
                    let problem = status.as_bytes()[0] >= b'4';
                    let content = response.get("content").and_then(Value::as_object);
                    let is_problem = content.is_some_and(|c| c.keys().eq(["application/problem+json"]));
                    assert_eq!(is_problem, problem, "{what}");
                    assert!(response["headers"]["X-Request-Id"].is_object(), "{what}");
                    let later = matches!(status.as_str(), "429" | "503");
                    assert_eq!(response["headers"].get("Retry-After").is_some(), later, "{what}");
                }
                let parameters = operation["parameters"].as_array().unwrap();
                assert!(parameters.iter().all(|p| p["schema"].is_object()), "{method} {path}");
            }
        }
    }
}
