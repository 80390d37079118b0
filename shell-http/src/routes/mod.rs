//! Every call there is. This table is the router and, with [`crate::openapi`], the description.

mod answer;
mod call;
mod events;
mod groups;
mod page;

pub use answer::{batch_answer, item};
pub(crate) use call::refuse;
pub use call::{App, handle};

use std::borrow::Cow;
use std::sync::OnceLock;

use hyper::Method;

use crate::problem::Problem;
use crate::wire::query;

/// What a route does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    Submit,
    SubmitBatch,
    SubmitRaw,
    List,
    Get,
    Payload,
    Result,
    Why,
    Cancel,
    Retry,
    Delete,
    Claim,
    Heartbeat,
    Complete,
    Fail,
    Release,
    Completions,
    Failures,
    Heartbeats,
    Queues,
    Queue,
    SetQueue,
    Pause,
    Resume,
    Purge,
    CreateGroup,
    Group,
    ExtendGroup,
    SealGroup,
    CancelGroup,
    Children,
    GroupResult,
    Pools,
    Pool,
    SetPool,
    DeletePool,
    Acquire,
    RefreshSlot,
    ReleaseSlot,
    Proxy,
    Events,
    Audit,
    Repair,
    JobRecords,
    QueueRecords,
    KeyRecords,
    Quarantine,
    Health,
    Ready,
    Metrics,
    Description,
    Page,
}

impl Call {
    /// Served also when all connections are taken.
    pub const fn tells_health(self) -> bool {
        matches!(self, Call::Health | Call::Ready | Call::Metrics)
    }

    /// Served for as long as the process lives: what ends or extends a lease or a slot, and what tells how the
    /// server is.
    pub const fn goes_on_to_the_end(self) -> bool {
        let leases = matches!(self, Call::Heartbeat | Call::Complete | Call::Fail | Call::Release);
        let slots = matches!(self, Call::RefreshSlot | Call::ReleaseSlot);
        let batches = matches!(self, Call::Heartbeats | Call::Completions | Call::Failures);
        leases || slots || batches || self.tells_health()
    }
}

/// One answer that a call can give when it is done.
#[derive(Clone, Copy, Debug)]
pub struct Answer {
    pub status: u16,
    pub what: &'static str,
    pub body: AnswerBody,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnswerBody {
    Nothing,
    /// JSON of the schema with this name.
    Json(&'static str),
    /// Bytes of this media type.
    Bytes(&'static str),
}

/// What a call takes as its body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Takes {
    Nothing,
    Json(&'static str),
    /// May be left out.
    OptionalJson(&'static str),
    Bytes,
}

#[derive(Debug)]
pub struct Route {
    pub method: Method,
    pub path: &'static str,
    pub call: Call,
    pub summary: &'static str,
    pub takes: Takes,
    /// Parameters of the query: their names, as the decoders know them.
    pub query: &'static [&'static str],
    pub answers: &'static [Answer],
    /// Statuses of the problems that it can answer with, besides those that any call can.
    pub problems: &'static [u16],
}

const fn json(status: u16, schema: &'static str, what: &'static str) -> Answer {
    Answer { status, what, body: AnswerBody::Json(schema) }
}
const fn bytes(status: u16, media: &'static str, what: &'static str) -> Answer {
    Answer { status, what, body: AnswerBody::Bytes(media) }
}
const fn nothing(status: u16, what: &'static str) -> Answer {
    Answer { status, what, body: AnswerBody::Nothing }
}

const CREATED: &[Answer] =
    &[json(201, "Job", "the job"), json(200, "Job", "the job that the idempotency key names already")];
const JOB: &[Answer] = &[json(200, "Job", "the job")];
const QUEUE: &[Answer] = &[json(200, "Queue", "the queue")];
const PASSED_ON: &[Answer] = &[bytes(200, "*/*", "what the upstream answers, with its status, as it comes")];
const PROXY_PROBLEMS: &[u16] = &[404, 502, 504];
const PROXY: &str = "Call an upstream that has this model, waiting for a slot of its pool.";
const BATCH_LEASES: &[Answer] = &[json(200, "BatchOutcomes", "an outcome for each item, in order")];
/// Options of a raw submit: those of `wire::submit::FIELDS` that are not the job's identity.
const RAW: &[&str] = match crate::wire::submit::FIELDS.split_at_checked(5) {
    Some((_, options)) => options,
    None => &[],
};

macro_rules! routes {
    ($($method:ident $path:literal $call:ident $takes:expr, $query:expr, $answers:expr, $problems:expr, $summary:expr;)*) => {
        &[$(Route { method: Method::$method, path: $path, call: Call::$call, summary: $summary,
            takes: $takes, query: $query, answers: $answers, problems: $problems }),*]
    };
}

use crate::wire::decode;
use Takes::{Bytes, Json, Nothing, OptionalJson};

/// The table. Calls that come often stand first.
pub static ROUTES: &[Route] = routes! {
    POST "/v1/jobs" Submit Json("Submit"), &[], CREATED, &[409],
        "Submit a job. Repeating it with the same Idempotency-Key gives the same job.";
    POST "/v1/claims" Claim Json("Claim"), &[],
        &[json(200, "Claimed", "the jobs leased; empty when `wait_ms` is over")], &[],
        "Lease jobs, waiting for them up to `wait_ms`.";
    POST "/v1/jobs:batch" SubmitBatch Json("SubmitBatch"), &[],
        &[json(200, "BatchJobs", "an outcome for each job, in order")], &[],
        "Submit 1 to 1,000 jobs, each in a transaction of its own.";
    POST "/v1/completions" Completions Json("Completions"), &[], BATCH_LEASES, &[],
        "Complete up to 1,000 jobs.";
    POST "/v1/failures" Failures Json("Failures"), &[], BATCH_LEASES, &[],
        "Fail up to 1,000 jobs.";
    POST "/v1/heartbeats" Heartbeats Json("Heartbeats"), &[], BATCH_LEASES, &[],
        "Extend the leases of up to 1,000 jobs.";
    GET "/v1/jobs" List Nothing, decode::LIST,
        &[json(200, "Jobs", "a page of jobs, and the cursor of the next page if there is one")], &[],
        "List jobs.";
    GET "/v1/jobs/{id}" Get Nothing, &[], JOB, &[404, 409], "One job.";
    DELETE "/v1/jobs/{id}" Delete Nothing, &[], &[nothing(204, "it is gone")], &[404, 409],
        "Delete a job that has ended.";
    POST "/v1/jobs/{id}/complete" Complete Json("Complete"), &[],
        &[json(200, "Done", "the job has succeeded; also when this token's completion is repeated")], &[404, 409],
        "Complete a job under its lease.";
    POST "/v1/jobs/{id}/heartbeat" Heartbeat Json("Heartbeat"), &[],
        &[json(200, "Beat", "the lease was extended, or its job was cancelled")], &[404, 409],
        "Extend a lease and report progress.";
    POST "/v1/jobs/{id}/fail" Fail Json("Fail"), &[],
        &[json(200, "Failed", "what becomes of the job")], &[404, 409],
        "End an attempt with an error.";
    POST "/v1/jobs/{id}/release" Release Json("Release"), &[],
        &[json(200, "Done", "the job is back in its place; the attempt does not count")], &[404, 409],
        "Give a lease back.";
    GET "/v1/jobs/{id}/payload" Payload Nothing, &[],
        &[bytes(200, "*/*", "the payload as it came")], &[404, 409], "A job's payload.";
    GET "/v1/jobs/{id}/result" Result Nothing, &[],
        &[bytes(200, "*/*", "the result as it came"), nothing(204, "the job succeeded without a result")], &[404, 409],
        "A job's result.";
    GET "/v1/jobs/{id}/why" Why Nothing, &[],
        &[json(200, "Why", "the first thing that keeps the job from running")], &[404, 409],
        "Why a job does not run.";
    POST "/v1/jobs/{id}/cancel" Cancel Nothing, &[], JOB, &[404, 409],
        "Cancel a job for good.";
    POST "/v1/jobs/{id}/retry" Retry Nothing, &[], JOB, &[404, 409],
        "Give a dead, cancelled or expired job a new life.";
    GET "/v1/queues" Queues Nothing, &[],
        &[json(200, "Queues", "every queue that is known")], &[], "All queues.";
    GET "/v1/queues/{queue}" Queue Nothing, &[], QUEUE, &[404], "One queue.";
    PUT "/v1/queues/{queue}" SetQueue Json("SetQueue"), &[], QUEUE, &[], "Change a queue's settings.";
    POST "/v1/queues/{queue}/jobs" SubmitRaw Bytes, RAW, CREATED, &[409],
        "Submit a job whose payload is the whole body.";
    POST "/v1/queues/{queue}/pause" Pause OptionalJson("Pause"), &[], QUEUE, &[],
        "Stop claims from a queue.";
    POST "/v1/queues/{queue}/resume" Resume Nothing, &[], QUEUE, &[404], "Let claims go on.";
    POST "/v1/queues/{queue}/purge" Purge OptionalJson("Purge"), &[],
        &[json(200, "Purged", "the queue, how many were purged, and how many are left for the next call")], &[404],
        "Cancel waiting jobs of a queue, or delete ended ones, a page at a time.";
    POST "/v1/groups" CreateGroup Json("CreateGroup"), &[],
        &[json(201, "Group", "the group"), json(200, "Group", "the group that the idempotency key names already")], &[409],
        "Create a group: children that run `max_parallel` at a time, and one end.";
    GET "/v1/groups/{id}" Group Nothing, decode::GROUP, &[json(200, "Group", "the group")], &[404, 409],
        "One group; with `wait_ms` its end is waited for.";
    POST "/v1/groups/{id}/children" ExtendGroup Json("ExtendGroup"), &[],
        &[json(200, "Group", "the group with these children; also when the page is repeated")], &[404, 409],
        "Add children to an open group, from the index of the next one on.";
    POST "/v1/groups/{id}/seal" SealGroup Nothing, &[], &[json(200, "Group", "the group")], &[404, 409],
        "Say that a group has all its children.";
    POST "/v1/groups/{id}/cancel" CancelGroup Nothing, &[],
        &[json(200, "Group", "the group; it reads `running` until its children are through")], &[404, 409],
        "Cancel a group: those held at once, those that run are told to stop.";
    GET "/v1/groups/{id}/children" Children Nothing, decode::CHILDREN,
        &[json(200, "Children", "a page of children in order, and the cursor of the next page if there is one")], &[404, 409],
        "A group's children in order.";
    GET "/v1/groups/{id}/result" GroupResult Nothing, &[],
        &[json(200, "GroupResult", "the group with every outcome, in order; a line for each child with `Accept: application/x-ndjson`")], &[404, 409],
        "What came of a group, once it is final.";
    GET "/v1/pools" Pools Nothing, &[], &[json(200, "Pools", "every pool")], &[], "All pools.";
    GET "/v1/pools/{pool}" Pool Nothing, &[], &[json(200, "Pool", "the pool, with who holds it")], &[404, 409],
        "One pool.";
    PUT "/v1/pools/{pool}" SetPool Json("SetPool"), &[], &[json(200, "Pool", "the pool")], &[409],
        "Make a pool, or change what is given and keep the rest.";
    DELETE "/v1/pools/{pool}" DeletePool Nothing, &[], &[nothing(204, "it is gone")], &[404, 409],
        "Delete a pool in which nobody holds and nobody waits.";
    POST "/v1/pools/{pool}/slots" Acquire OptionalJson("Acquire"), &[],
        &[json(201, "Slot", "the slot; also when this `slot_id` has it already")], &[404, 409],
        "Get a slot, waiting for it up to `wait_ms`.";
    POST "/v1/pools/{pool}/slots/{slot}/refresh" RefreshSlot Nothing, &[],
        &[json(200, "Refreshed", "the slot was extended by its length")], &[409],
        "Keep a slot.";
    DELETE "/v1/pools/{pool}/slots/{slot}" ReleaseSlot Nothing, &[],
        &[nothing(204, "it is not held, and nobody waits for it")], &[],
        "Give a slot back, or leave the line.";
    GET "/v1/proxy/{model}/{path}" Proxy Bytes, &[], PASSED_ON, PROXY_PROBLEMS, PROXY;
    POST "/v1/proxy/{model}/{path}" Proxy Bytes, &[], PASSED_ON, PROXY_PROBLEMS, PROXY;
    PUT "/v1/proxy/{model}/{path}" Proxy Bytes, &[], PASSED_ON, PROXY_PROBLEMS, PROXY;
    PATCH "/v1/proxy/{model}/{path}" Proxy Bytes, &[], PASSED_ON, PROXY_PROBLEMS, PROXY;
    DELETE "/v1/proxy/{model}/{path}" Proxy Bytes, &[], PASSED_ON, PROXY_PROBLEMS, PROXY;
    OPTIONS "/v1/proxy/{model}/{path}" Proxy Bytes, &[], PASSED_ON, PROXY_PROBLEMS, PROXY;
    GET "/v1/events" Events Nothing, decode::EVENTS,
        &[json(200, "Events", "events after the one named, or a stream of them (`Accept: text/event-stream`)")], &[],
        "What has happened.";
    GET "/v1/audit" Audit Nothing, decode::AUDIT,
        &[json(200, "Audited", "a page of what does not balance, and the cursor of the next page if there is one")], &[],
        "Check the books of the whole store, a page at a time.";
    POST "/v1/audit:repair" Repair Nothing, decode::AUDIT,
        &[json(200, "Audited", "as the audit; what could be derived from the records was put right")], &[],
        "Check the books, and put right what can be derived.";
    GET "/v1/jobs/{id}/records" JobRecords Nothing, &[],
        &[json(200, "Inspected", "records and places, of one moment")], &[404],
        "What the store holds of a job, as it stands there.";
    GET "/v1/queues/{queue}/records" QueueRecords Nothing, &[],
        &[json(200, "Inspected", "records, places and counts, of one moment")], &[404, 422],
        "What the store holds of a queue, as it stands there.";
    GET "/v1/keys/{key}" KeyRecords Nothing, &[],
        &[json(200, "Inspected", "the key's record")], &[404, 422],
        "What an idempotency key is bound to.";
    GET "/v1/quarantine" Quarantine Nothing, &[],
        &[json(200, "Inspected", "up to 1,000 records, and how many there are")], &[],
        "Jobs whose records cannot be read.";
    GET "/healthz" Health Nothing, &[], &[json(200, "Health", "the process lives")], &[], "Whether the process lives.";
    GET "/readyz" Ready Nothing, &[], &[json(200, "Readiness", "commits work")], &[],
        "Whether the store works, by a commit.";
    GET "/metrics" Metrics Nothing, &[],
        &[bytes(200, "text/plain; version=0.0.4", "metrics in Prometheus' text format")], &[], "Metrics.";
    GET "/openapi.json" Description Nothing, &[], &[bytes(200, "application/json", "this description")], &[],
        "The description of all calls.";
    GET "/" Page Nothing, &[], &[bytes(200, "text/html", "a page for people")], &[], "Queues at a glance.";
};

/// The parts of a path that stand for something, in order, decoded. No path has more than two.
pub type Arguments<'a> = [Cow<'a, str>; 2];

struct Entry {
    segments: Vec<&'static str>,
    routes: Vec<usize>,
}

/// The table by number of segments.
fn entries() -> &'static [Vec<Entry>] {
    static ENTRIES: OnceLock<Vec<Vec<Entry>>> = OnceLock::new();
    ENTRIES.get_or_init(|| {
        let mut all: Vec<Vec<Entry>> = Vec::new();
        for (n, route) in ROUTES.iter().enumerate() {
            let segments: Vec<&str> = route.path.split('/').skip(1).collect();
            while all.len() <= segments.len() {
                all.push(Vec::new());
            }
            let of_len = &mut all[segments.len()];
            match of_len.iter_mut().find(|e| e.segments == segments) {
                Some(entry) => entry.routes.push(n),
                None => of_len.push(Entry { segments, routes: vec![n] }),
            }
        }
        all
    })
}

/// Finds the route, by its place in [`ROUTES`], and the path's arguments.
pub fn find<'a>(method: &Method, path: &'a str) -> Result<(usize, Arguments<'a>), Problem> {
    if let Some(tail) = path.strip_prefix(PROXY_PREFIX) {
        return proxied(method, tail);
    }
    let tail = path.strip_prefix('/').ok_or(Problem::UnknownPath)?;
    let len = 1 + tail.bytes().filter(|b| *b == b'/').count();
    for entry in entries().get(len).map(Vec::as_slice).unwrap_or_default() {
        let mut arguments = [""; 2];
        let mut places = arguments.iter_mut();
        let matches = entry.segments.iter().zip(tail.split('/')).all(|(known, given)| {
            if known.starts_with('{') {
                if let Some(place) = places.next() {
                    *place = given;
                }
                !given.is_empty()
            } else {
                *known == given
            }
        });
        if !matches {
            continue;
        }
        let head = *method == Method::HEAD;
        let fits = |n: &&usize| {
            let of = &ROUTES[**n].method;
            of == method || (head && *of == Method::GET)
        };
        let Some(route) = entry.routes.iter().find(fits) else {
            let mut allow: Vec<&str> = entry.routes.iter().map(|n| ROUTES[*n].method.as_str()).collect();
            if allow.contains(&"GET") {
                allow.push("HEAD");
            }
            return Err(Problem::WrongMethod { allow: allow.join(", ") });
        };
        let decode = |argument| query::decode(argument, false).ok_or(Problem::UnknownPath);
        let [first, second] = arguments;
        return Ok((*route, [decode(first)?, decode(second)?]));
    }
    Err(Problem::UnknownPath)
}

/// What follows is a model and the whole rest of the path, which the upstream gets as it stands.
const PROXY_PREFIX: &str = "/v1/proxy/";

fn proxied<'a>(method: &Method, tail: &'a str) -> Result<(usize, Arguments<'a>), Problem> {
    let (model, rest) = tail.split_once('/').ok_or(Problem::UnknownPath)?;
    let model = query::decode(model, false).filter(|m| !m.is_empty()).ok_or(Problem::UnknownPath)?;
    let method = if *method == Method::HEAD { &Method::GET } else { method };
    let all = || ROUTES.iter().enumerate().filter(|(_, route)| route.call == Call::Proxy);
    match all().find(|(_, route)| route.method == *method) {
        Some((n, _)) => Ok((n, [model, Cow::Borrowed(rest)])),
        None => {
            let allow: Vec<&str> = all().map(|(_, route)| route.method.as_str()).chain(["HEAD"]).collect();
            Err(Problem::WrongMethod { allow: allow.join(", ") })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_route_is_found_by_its_own_path() {
        for (n, route) in ROUTES.iter().enumerate() {
            let names = ["{queue}", "{key}", "{pool}", "{model}"];
            let path = names.iter().fold(route.path.replace("{id}", "x"), |path, name| path.replace(name, "a%2Fb"));
            let path = path.replace("{slot}", "c%3A").replace("{path}", "c:/d%2Fe/");
            let (found, [argument, second]) = find(&route.method, &path).unwrap();
            assert_eq!(found, n, "{path}");
            let expected = if path.contains("/x") {
                "x"
            } else if path.contains("%2F") {
                "a/b"
            } else {
                ""
            };
            assert_eq!(argument, expected);
            let rest = if route.call == Call::Proxy { "c:/d%2Fe/" } else { "" };
            assert_eq!(second, if path.contains("%3A") { "c:" } else { rest });
        }
    }

    #[test]
    fn what_is_no_route() {
        for path in
            ["", "/v1", "/v1/", "/v1/jobs/", "/v1/queues//pause", "/v1/queues/%ff", "/x", "//", "/v1/jobs/a/b/c"]
        {
            assert_eq!(find(&Method::GET, path).unwrap_err(), Problem::UnknownPath, "{path}");
        }
        let allow = |method, path| match find(&method, path) {
            Err(Problem::WrongMethod { allow }) => allow,
            other => panic!("{other:?}"),
        };
        assert_eq!(allow(Method::PATCH, "/v1/jobs"), "POST, GET, HEAD");
        assert_eq!(allow(Method::GET, "/v1/claims"), "POST");
        assert_eq!(allow(Method::POST, "/v1/jobs/x"), "GET, DELETE, HEAD");
        assert!(find(&Method::HEAD, "/healthz").is_ok());
    }
}
