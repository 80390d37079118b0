//! One call from its head to its answer.

use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use hyper::body::{Body as _, Incoming};
use hyper::header::{CACHE_CONTROL, CONTENT_TYPE, HOST, HeaderName, HeaderValue, ORIGIN};
use hyper::http::request::Parts;
use hyper::{HeaderMap, Method, StatusCode};
use leasehold_core::request::Inspect;
use leasehold_core::{Failure, Request, Response as Answer};
use serde_json::value::RawValue;

use super::answer::{self, batch_answer};
use super::{Argument, Call, ROUTES, Route, Takes, events, find, page};
use crate::body::{self, Body, Budget, Response};
use crate::driver::Driver;
use crate::metrics::{self, Counters};
use crate::openapi;
use crate::problem::Problem;
use crate::wire::decode::{self, Under};
use crate::wire::submit::{self, Carried, TENANT};

/// Memory for large bodies in work together.
const BODIES: usize = 1024 * 1024 * 1024;
/// `traceparent` is 55 characters today; a longer one of a later version is carried up to here.
const TRACEPARENT_BYTES: usize = 128;

static IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");
static TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
static SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// What every call needs.
#[derive(Debug)]
pub struct App {
    pub driver: Driver,
    pub max_body: u64,
    /// Browsers are served under loopback names only: a name that somebody else controls could be
    /// pointed here (DNS rebinding), and its pages would pass as this server's own.
    pub loopback_only: bool,
    pub budget: Budget,
    pub counters: Counters,
    pub metrics: metrics::Cache,
    pub draining: AtomicBool,
    pub started: Instant,
}

impl App {
    pub fn new(driver: Driver, max_body: u64, loopback_only: bool) -> Self {
        App {
            driver,
            max_body,
            loopback_only,
            budget: Budget::new(BODIES),
            counters: Counters::new(),
            metrics: metrics::Cache::default(),
            draining: AtomicBool::new(false),
            started: Instant::now(),
        }
    }

    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }
}

/// Answers one request. Every way out is an answer.
pub async fn handle(app: std::sync::Arc<App>, request: hyper::Request<Incoming>) -> Result<Response, Infallible> {
    let begun = Instant::now();
    let (parts, incoming) = request.into_parts();
    let (route, result) = match find(&parts.method, parts.uri.path()) {
        Ok((n, argument)) => (Some(n), call(&app, &ROUTES[n], argument, &parts, incoming).await),
        Err(problem) => {
            body::forget(incoming, &parts.headers).await;
            (None, Err(problem))
        }
    };
    let response = result.unwrap_or_else(|problem| problem.response());
    app.counters.count(route, response.status(), begun.elapsed());
    Ok(response)
}

async fn call(
    app: &std::sync::Arc<App>,
    route: &Route,
    argument: Argument<'_>,
    parts: &Parts,
    incoming: Incoming,
) -> Result<Response, Problem> {
    let headers = &parts.headers;
    let changes = !matches!(parts.method, Method::GET | Method::HEAD);
    if changes && is_cross_origin(headers) || app.loopback_only && is_rebound(headers) {
        body::forget(incoming, headers).await;
        return Err(Problem::CrossOrigin);
    }
    let query = parts.uri.query().unwrap_or_default();
    let read = if incoming.is_end_stream() {
        body::Read::default()
    } else {
        body::read(incoming, headers, app.max_body, &app.budget).await?
    };
    let body = &read.bytes;
    // Nothing is refused before the body has been read: a connection with half a body in it cannot go on.
    if route.query.is_empty() {
        decode::no_query(query)?;
    }
    if route.takes == Takes::Nothing && !matches!(parts.method, Method::GET | Method::HEAD) {
        decode::nothing(body)?;
    }
    let queue = || argument.clone().into_owned();
    let job = || decode::job_id(&argument);
    let tenant = || TENANT.to_owned();
    let request = match route.call {
        Call::Submit => Request::Submit(Box::new(submit::json(body, carried(headers)?)?)),
        Call::SubmitRaw => {
            let kind = match headers.get(CONTENT_TYPE) {
                None => None,
                Some(value) => Some(value.to_str().map_err(|_| Problem::field("content_type", "must be ASCII"))?),
            };
            let submit = submit::raw(queue(), kind, query, body.clone(), carried(headers)?)?;
            Request::Submit(Box::new(submit))
        }
        Call::SubmitBatch => {
            let traceparent = carried(headers)?.traceparent;
            let items = decode::batch(body, "jobs")?;
            let read = |raw: &RawValue| Ok(Request::Submit(Box::new(submit::item(raw, body, traceparent.clone())?)));
            return batch(app, items, read).await;
        }
        Call::Completions => return batch(app, decode::batch(body, "items")?, |r| Under::Complete.item(r, body)).await,
        Call::Failures => return batch(app, decode::batch(body, "items")?, |r| Under::Fail.item(r, body)).await,
        Call::Heartbeats => return batch(app, decode::batch(body, "items")?, |r| Under::Heartbeat.item(r, body)).await,
        Call::Claim => Request::Claim(Box::new(decode::claim(body)?)),
        Call::Heartbeat => Under::Heartbeat.read(&argument, body)?,
        Call::Complete => Under::Complete.read(&argument, body)?,
        Call::Fail => Under::Fail.read(&argument, body)?,
        Call::Release => Under::Release.read(&argument, body)?,
        Call::List => Request::List(decode::list(query)?),
        Call::Get => Request::Get { tenant: tenant(), job: job()? },
        Call::Payload => Request::Payload { tenant: tenant(), job: job()? },
        Call::Result => Request::Result { tenant: tenant(), job: job()? },
        Call::Why => Request::Why { tenant: tenant(), job: job()? },
        Call::Cancel => Request::Cancel { tenant: tenant(), job: job()? },
        Call::Retry => Request::Retry { tenant: tenant(), job: job()? },
        Call::Delete => Request::Delete { tenant: tenant(), job: job()? },
        Call::Queues => Request::Queues { tenant: tenant() },
        Call::Queue => Request::Queue { tenant: tenant(), queue: queue() },
        Call::SetQueue => decode::set_queue(queue(), body)?,
        Call::Pause => decode::pause(queue(), body)?,
        Call::Resume => Request::Resume { tenant: tenant(), queue: queue() },
        Call::Purge => decode::purge(queue(), body)?,
        Call::Events => {
            let asked = decode::events(query)?;
            if events::is_stream(headers) {
                return events::stream(app.clone(), asked, headers);
            }
            let decode::Events { after, limit, wait_ms } = asked;
            Request::Events { tenant: tenant(), after, limit, wait_ms }
        }
        Call::Audit => Request::Audit { cursor: decode::audit(query)?, repair: false },
        Call::Repair => Request::Audit { cursor: decode::audit(query)?, repair: true },
        Call::JobRecords => Request::Inspect(Inspect::Job(job()?)),
        Call::QueueRecords => Request::Inspect(Inspect::Queue { tenant: tenant(), queue: queue() }),
        Call::KeyRecords => Request::Inspect(Inspect::Key { tenant: tenant(), key: queue() }),
        Call::Health => return Ok(body::json(StatusCode::OK, b"{\"status\":\"ok\"}".to_vec())),
        Call::Ready => Request::Ready,
        Call::Metrics => return Ok(metrics::page(app).await),
        Call::Description => return Ok(description()),
        Call::Page => return page::page(app).await,
    };
    answer::outcome(app.driver.ask(request).await)
}

/// Asks for each item that could be read; the others are answered with what is wrong with them.
async fn batch(
    app: &App,
    items: Vec<&RawValue>,
    read: impl Fn(&RawValue) -> Result<Request, Problem>,
) -> Result<Response, Problem> {
    let mut requests = Vec::with_capacity(items.len());
    let mut outcomes: Vec<Option<Problem>> = Vec::with_capacity(items.len());
    for item in items {
        outcomes.push(match read(item) {
            Ok(request) => {
                requests.push(request);
                None
            }
            Err(problem) => Some(problem),
        });
    }
    let answers = if requests.is_empty() {
        Vec::new()
    } else {
        let count = requests.len();
        match app.driver.ask(Request::Batch(requests)).await {
            Ok(Answer::Batch(answers)) if answers.len() == count => answers,
            Err(failure) => vec![Err(failure); count],
            // Never: a batch is answered item by item.
            Ok(_) => vec![Err(Failure::OutcomeUnknown { retry_after_ms: 1_000 }); count],
        }
    };
    let mut answers = answers.into_iter();
    let merged = outcomes.into_iter().map(|problem| match problem {
        Some(problem) => Err(problem),
        None => match answers.next() {
            Some(outcome) => outcome.map_err(Problem::from),
            None => Err(Failure::OutcomeUnknown { retry_after_ms: 1_000 }.into()),
        },
    });
    Ok(batch_answer(merged.collect()))
}

fn carried(headers: &HeaderMap) -> Result<Carried, Problem> {
    let key = headers.get(&IDEMPOTENCY_KEY).map(|v| submit::key(v.as_bytes())).transpose()?;
    // A malformed traceparent is dropped, as its specification asks.
    let traceparent = headers
        .get(&TRACEPARENT)
        .and_then(|v| v.to_str().ok())
        .filter(|t| (55..=TRACEPARENT_BYTES).contains(&t.len()) && t.bytes().all(|b| b.is_ascii_graphic()))
        .map(str::to_owned);
    Ok(Carried { key, traceparent })
}

/// A page of another site made the browser send this.
fn is_cross_origin(headers: &HeaderMap) -> bool {
    if let Some(site) = headers.get(&SEC_FETCH_SITE) {
        return !matches!(site.as_bytes(), b"same-origin" | b"none");
    }
    let Some(origin) = headers.get(ORIGIN) else { return false };
    let own = headers.get(HOST).and_then(|h| h.to_str().ok()).unwrap_or_default();
    let of = origin.to_str().ok().and_then(|o| o.split_once("://")).map(|(_, host)| host);
    of != Some(own)
}

/// A browser came here under a name that is not a loopback one.
fn is_rebound(headers: &HeaderMap) -> bool {
    let browser = headers.contains_key(&SEC_FETCH_SITE) || headers.contains_key(ORIGIN);
    let host = headers.get(HOST).and_then(|h| h.to_str().ok()).unwrap_or_default();
    let name = match host.strip_prefix('[') {
        Some(v6) => v6.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    let loopback = name == "localhost" || name.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback());
    browser && !loopback
}

fn description() -> Response {
    let mut response = Response::new(Body::full(openapi::text()));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    response
}
