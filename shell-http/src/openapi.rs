//! The description of the API: OpenAPI 3.1, made from the very table that routes.

use std::sync::OnceLock;

use bytes::Bytes;
use serde_json::{Map, Value, json};

use crate::routes::{AnswerBody, Call, ROUTES, Route, Takes};
use crate::wire::view;

const SCHEMAS: &str = include_str!("schemas.json");

/// Problems that any call can answer with.
const COMMON: &[u16] = &[429, 503];

/// The description as it is served.
pub fn text() -> Bytes {
    static TEXT: OnceLock<Bytes> = OnceLock::new();
    TEXT.get_or_init(|| document().to_string().into()).clone()
}

fn document() -> Value {
    let mut paths: Map<String, Value> = Map::new();
    for route in ROUTES {
        let path = paths.entry(route.path).or_insert_with(|| json!({}));
        path[route.method.as_str().to_ascii_lowercase()] = operation(route);
    }
    let mut schemas: Value = serde_json::from_str(SCHEMAS).unwrap_or_default();
    schemas["Event"]["properties"]["type"]["enum"] = view::event_types().collect();
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Leasehold",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "A durable job system. Times are RFC 3339, UTC, with milliseconds; durations are integers \
                ending in _ms; ids and tokens are opaque.",
        },
        "paths": paths,
        "components": {"schemas": schemas},
    })
}

fn operation(route: &Route) -> Value {
    let mut parameters: Vec<Value> = Vec::new();
    for name in route.path.split('/').filter_map(|s| s.strip_prefix('{')?.strip_suffix('}')) {
        parameters.push(json!({"name": name, "in": "path", "required": true, "schema": {"type": "string"}}));
    }
    for name in route.query {
        parameters.push(json!({"name": name, "in": "query", "schema": query_schema(name)}));
    }
    if matches!(route.call, Call::Submit | Call::SubmitRaw) {
        let what = "Names the job: a repeat gets the same one (IETF draft Idempotency-Key).";
        let schema = json!({"type": "string"});
        parameters.push(json!({"name": "Idempotency-Key", "in": "header", "description": what, "schema": schema}));
    }
    if matches!(route.call, Call::Submit | Call::SubmitRaw | Call::SubmitBatch) {
        parameters.push(json!({"name": "traceparent", "in": "header", "schema": {"type": "string"}}));
    }
    if route.call == Call::Events {
        parameters.push(json!({"name": "Last-Event-ID", "in": "header", "schema": {"type": "string"}}));
    }
    let mut responses = Map::new();
    for answer in route.answers {
        let mut response = json!({"description": answer.what});
        match answer.body {
            AnswerBody::Nothing => {}
            AnswerBody::Json(schema) => {
                response["content"] = json!({"application/json": {"schema": schema_ref(schema)}})
            }
            AnswerBody::Bytes(media) => response["content"] = json!({media: {}}),
        }
        if route.call == Call::Events {
            response["content"]["text/event-stream"] = json!({"schema": schema_ref("Event")});
        }
        responses.insert(answer.status.to_string(), response);
    }
    let of_body: &[u16] = match route.takes {
        Takes::Nothing => &[],
        Takes::Bytes | Takes::Json(_) | Takes::OptionalJson(_) => &[400, 413, 422],
    };
    let of_query: &[u16] = if route.query.is_empty() { &[] } else { &[422] };
    for status in COMMON.iter().chain(of_body).chain(of_query).chain(route.problems) {
        let content = json!({"application/problem+json": {"schema": schema_ref("Problem")}});
        let response = json!({"description": "not done; see `code`", "content": content});
        responses.entry(status.to_string()).or_insert(response);
    }
    let mut operation = json!({
        "operationId": operation_id(route.call),
        "summary": route.summary,
        "parameters": parameters,
        "responses": responses,
    });
    match route.takes {
        Takes::Nothing => {}
        Takes::Json(schema) => operation["requestBody"] = request_body(schema, true),
        Takes::OptionalJson(schema) => operation["requestBody"] = request_body(schema, false),
        Takes::Bytes => operation["requestBody"] = json!({"required": true, "content": {"*/*": {}}}),
    }
    operation
}

fn request_body(schema: &str, required: bool) -> Value {
    json!({"required": required, "content": {"application/json": {"schema": schema_ref(schema)}}})
}

fn schema_ref(name: &str) -> Value {
    json!({"$ref": format!("#/components/schemas/{name}")})
}

fn query_schema(name: &str) -> Value {
    match name {
        "class" => schema_ref("Class"),
        "status" => schema_ref("Status"),
        "on_prem" => json!({"type": "boolean"}),
        "run_at" => schema_ref("Time"),
        "backoff" | "metadata" => json!({"type": "string", "description": "JSON"}),
        "queue" | "cursor" | "after" => json!({"type": "string"}),
        _ => json!({"type": "integer", "minimum": 0}),
    }
}

/// `SubmitBatch` as `submitBatch`.
fn operation_id(call: Call) -> String {
    let name = format!("{call:?}");
    let mut chars = name.chars();
    chars.next().map(|c| c.to_lowercase().chain(chars).collect()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{decode, submit};
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
        let ids: BTreeSet<String> = ROUTES.iter().map(|r| operation_id(r.call)).collect();
        assert_eq!(ids.len(), ROUTES.len(), "operation ids differ");
    }

    #[test]
    fn every_reference_resolves() {
        let document = document();
        let known = document["components"]["schemas"].as_object().unwrap();
        fn walk(value: &Value, seen: &mut BTreeSet<String>) {
            match value {
                Value::Object(map) => {
                    if let Some(Value::String(target)) = map.get("$ref") {
                        seen.insert(target.trim_start_matches("#/components/schemas/").to_owned());
                    }
                    map.values().for_each(|v| walk(v, seen));
                }
                Value::Array(list) => list.iter().for_each(|v| walk(v, seen)),
                _ => {}
            }
        }
        let mut seen = BTreeSet::new();
        walk(&document, &mut seen);
        let known: BTreeSet<String> = known.keys().cloned().collect();
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
        ] {
            let described: BTreeSet<&str> =
                schemas[schema]["properties"].as_object().unwrap().keys().map(String::as_str).collect();
            assert_eq!(described, fields.iter().copied().collect(), "{schema}");
        }
    }
}
