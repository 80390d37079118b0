//! One call from its head to its answer.

use std::convert::Infallible;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::Instant;

use hyper::body::Incoming;
use hyper::header::{CACHE_CONTROL, CONNECTION, CONTENT_TYPE, HOST, HeaderName, HeaderValue, ORIGIN};
use hyper::http::request::Parts;
use hyper::{HeaderMap, Method, StatusCode, Version};
use leasehold_core::request::{Inspect, List, SlotId};
use leasehold_core::{Failure, Request, Response as Answer};
use serde_json::value::RawValue;

use super::answer::{self, batch_answer};
use super::{Arguments, Call, ROUTES, Route, Takes, events, find, groups, page};
use crate::body::{self, Body, Budget, Coming, Response};
use crate::connection::Connection;
use crate::driver::Driver;
use crate::limits::Limits;
use crate::metrics::{self, Counters};
use crate::openapi;
use crate::problem::Problem;
use crate::proxy;
use crate::request_id::{RequestId, RequestIds, X_REQUEST_ID};
use crate::upstream::Gateway;
use crate::wire::decode::{self, Question, Under};
use crate::wire::json::Object;
use crate::wire::submit::{self, Carried, TENANT};
use crate::wire::{group, pool};

/// `traceparent` is 55 characters today; a longer one of a later version is carried up to here.
const TRACEPARENT_BYTES: usize = 128;

static IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");
static TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
static SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// What every call needs.
#[derive(Debug)]
pub struct App {
    pub driver: Driver,
    pub limits: Limits,
    /// Browsers are served under loopback names only: a name that somebody else controls could be
    /// pointed here (DNS rebinding), and its pages would pass as this server's own.
    pub loopback_only: bool,
    pub budget: Budget,
    pub counters: Counters,
    pub metrics: metrics::Cache,
    pub gateway: Arc<Gateway>,
    /// Told to end: claims are refused, and each answer is its connection's last.
    pub draining: AtomicBool,
    /// About to stop listening: only what ends or extends a lease is still taken.
    pub closing: AtomicBool,
    pub started: Instant,
    ids: RequestIds,
}

impl App {
    pub fn new(driver: Driver, limits: Limits, loopback_only: bool, gateway: Arc<Gateway>) -> Self {
        App {
            driver,
            budget: Budget::new(usize::try_from(limits.max_body_memory).unwrap_or(usize::MAX)),
            limits,
            loopback_only,
            counters: Counters::new(),
            metrics: metrics::Cache::default(),
            gateway,
            draining: AtomicBool::new(false),
            closing: AtomicBool::new(false),
            started: Instant::now(),
            ids: RequestIds::new(),
        }
    }

    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }
}

/// Answers one request. Every way out is an answer.
pub async fn handle(
    app: std::sync::Arc<App>,
    connection: Connection,
    request: hyper::Request<Incoming>,
) -> Result<Response, Infallible> {
    let in_call = connection.begin();
    let begun = Instant::now();
    let (parts, incoming) = request.into_parts();
    let id = app.ids.of(&parts.headers);
    let found = find(&parts.method, parts.uri.path());
    let route = found.as_ref().ok().map(|(n, _)| *n);
    let answered = caught(async {
        let body = Coming::new(incoming, &parts.headers, &app.limits);
        if connection.spare && !route.is_some_and(|n| ROUTES[n].call.tells_health()) {
            // Its body is left unread: the place is needed for the next one.
            return Problem::Crowded.response();
        }
        if let Some(problem) = malformed(&app, &parts) {
            return refuse(body, problem).await;
        }
        match found {
            Ok((n, arguments)) => {
                call(&app, &ROUTES[n], arguments, &parts, body, &id).await.unwrap_or_else(|problem| problem.response())
            }
            Err(problem) => refuse(body, problem).await,
        }
    });
    let mut response = answered.await.unwrap_or_else(|| {
        app.counters.panics.fetch_add(1, Ordering::Relaxed);
        tracing::error!(request_id = %id, method = %parts.method, route = ?route.map(|n| ROUTES[n].path), "a call has panicked");
        Problem::Internal.response()
    });
    let status = response.status();
    let took = begun.elapsed();
    app.counters.count(route, status, took);
    tracing::debug!(
        request_id = %id,
        method = %parts.method,
        route = route.map_or("unknown", |n| ROUTES[n].path),
        status = status.as_u16(),
        micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX),
        "answered"
    );
    let headers = response.headers_mut();
    headers.insert(&X_REQUEST_ID, id.into());
    if connection.spare || app.is_draining() {
        // Who is told that this was the last answer here sends nothing into a connection that ends.
        headers.insert(CONNECTION, HeaderValue::from_static("close"));
    }
    Ok(response.map(|body| body.ends(in_call)))
}

/// `None` if it panicked.
async fn caught<T>(call: impl Future<Output = T>) -> Option<T> {
    let mut call = pin!(call);
    // What a call shares with others is behind locks and atomics, and is looked at by others also
    // while it runs; what is its own is dropped with it.
    std::future::poll_fn(|cx| match catch_unwind(AssertUnwindSafe(|| call.as_mut().poll(cx))) {
        Ok(Poll::Ready(value)) => Poll::Ready(Some(value)),
        Ok(Poll::Pending) => Poll::Pending,
        Err(_) => Poll::Ready(None),
    })
    .await
}

/// Refuses a call after its body has been read: a connection with half a body in it cannot go on.
pub(crate) async fn refuse(body: Coming, problem: Problem) -> Response {
    let read = body.forget().await;
    let mut response = problem.response();
    if !read {
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

/// What is wrong with a request's head that hyper lets pass.
fn malformed(app: &App, parts: &Parts) -> Option<Problem> {
    let mut hosts = parts.headers.get_all(HOST).iter();
    let (first, second) = (hosts.next(), hosts.next());
    if second.is_some() || first.is_none() && parts.version == Version::HTTP_11 {
        return Some(Problem::NotHttp { detail: "A request has exactly one Host header." });
    }
    if first.is_some_and(|h| !is_host(h.as_bytes())) {
        return Some(Problem::NotHttp { detail: "The Host header is not a host and a port." });
    }
    let len = parts.uri.path_and_query().map_or(0, |p| p.as_str().len()) as u64;
    (len > app.limits.max_uri).then_some(Problem::UriTooLong { max: app.limits.max_uri })
}

/// A name or an address, and perhaps a port. Empty is allowed (RFC 9110, 7.2).
fn is_host(host: &[u8]) -> bool {
    host.len() <= 512 && host.iter().all(|b| b.is_ascii_alphanumeric() || b"-._~!$&'()*+,;=%:[]".contains(b))
}

async fn call(
    app: &Arc<App>,
    route: &Route,
    [argument, second]: Arguments<'_>,
    parts: &Parts,
    coming: Coming,
    id: &RequestId,
) -> Result<Response, Problem> {
    let headers = &parts.headers;
    let changes = !matches!(parts.method, Method::GET | Method::HEAD);
    // A call that is passed on takes a slot, whatever its method.
    let changes = changes || route.call == Call::Proxy;
    if changes && is_cross_origin(headers) || app.loopback_only && is_rebound(headers) {
        return Ok(refuse(coming, Problem::CrossOrigin).await);
    }
    if route.call == Call::Proxy {
        return Ok(match app.closing.load(Ordering::Relaxed) {
            true => refuse(coming, Failure::Draining { retry_after_ms: 1_000 }.into()).await,
            false => proxy::call(app, &argument, &second, parts, coming, id).await,
        });
    }
    let query = parts.uri.query().unwrap_or_default();
    let read = coming.read(app.limits.max_body, &app.budget).await?;
    let body = &read.bytes;
    if app.closing.load(Ordering::Relaxed) && !route.call.goes_on_to_the_end() {
        return Err(Failure::Draining { retry_after_ms: 1_000 }.into());
    }
    // Nothing is refused before the body has been read: a connection with half a body in it cannot go on.
    if route.query.is_empty() {
        decode::no_query(query)?;
    }
    if route.takes == Takes::Nothing && !matches!(parts.method, Method::GET | Method::HEAD) {
        decode::nothing(body)?;
    }
    let name = || argument.clone().into_owned();
    let job = || decode::job_id(&argument);
    let tenant = || TENANT.to_owned();
    let request = match route.call {
        Call::Submit => Request::Submit(Box::new(submit::json(body, carried(headers)?)?)),
        Call::SubmitRaw => {
            let kind = match headers.get(CONTENT_TYPE) {
                None => None,
                Some(value) => Some(value.to_str().map_err(|_| Problem::field("content_type", "must be ASCII"))?),
            };
            let submit = submit::raw(name(), kind, query, body.clone(), carried(headers)?)?;
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
        Call::List => return list(app, decode::list(query)?).await,
        Call::Get => Request::Get { tenant: tenant(), job: job()? },
        Call::Payload => Request::Payload { tenant: tenant(), job: job()? },
        Call::Result => Request::Result { tenant: tenant(), job: job()? },
        Call::Why => Request::Why { tenant: tenant(), job: job()? },
        Call::Cancel => Request::Cancel { tenant: tenant(), job: job()? },
        Call::Retry => Request::Retry { tenant: tenant(), job: job()? },
        Call::Delete => Request::Delete { tenant: tenant(), job: job()? },
        Call::Queues => Request::Queues { tenant: tenant() },
        Call::Queue => Request::Queue { tenant: tenant(), queue: name() },
        Call::SetQueue => decode::set_queue(name(), body)?,
        Call::Pause => decode::pause(name(), body)?,
        Call::Resume => Request::Resume { tenant: tenant(), queue: name() },
        Call::Purge => decode::purge(name(), body)?,
        Call::CreateGroup => Request::CreateGroup(Box::new(group::create(body, carried(headers)?)?)),
        Call::Group => {
            Request::Group { tenant: tenant(), group: group::id(&argument)?, wait_ms: decode::group(query)? }
        }
        Call::ExtendGroup => {
            let (from, children) = group::extend(body)?;
            Request::ExtendGroup { tenant: tenant(), group: group::id(&argument)?, from, children }
        }
        Call::SealGroup => Request::SealGroup { tenant: tenant(), group: group::id(&argument)? },
        Call::CancelGroup => Request::CancelGroup { tenant: tenant(), group: group::id(&argument)? },
        Call::Children => {
            let (from, limit) = decode::children(query)?;
            Request::Children { tenant: tenant(), group: group::id(&argument)?, from, limit, contents: false }
        }
        Call::GroupResult => return groups::result(app.clone(), group::id(&argument)?, headers).await,
        Call::Pools => Request::Pools,
        Call::Pool => Request::Pool { tenant: tenant(), pool: name() },
        Call::SetPool => pool::set(name(), body)?,
        Call::DeletePool => Request::DeletePool { pool: name() },
        Call::Acquire => pool::acquire(name(), body)?,
        Call::RefreshSlot => Request::RefreshSlot { tenant: tenant(), pool: name(), slot: SlotId::parse(&second) },
        Call::ReleaseSlot => Request::ReleaseSlot { tenant: tenant(), pool: name(), slot: SlotId::parse(&second) },
        Call::Events => {
            let asked = events::resumed(decode::events(query)?, headers)?;
            if events::is_stream(headers) {
                return Ok(events::stream(app.clone(), asked));
            }
            let decode::Events { after, limit, wait_ms } = asked;
            Request::Events { tenant: tenant(), after, limit, wait_ms }
        }
        Call::Audit => Request::Audit { cursor: decode::audit(query)?, repair: false },
        Call::Repair => Request::Audit { cursor: decode::audit(query)?, repair: true },
        Call::JobRecords => Request::Inspect(Inspect::Job(job()?)),
        Call::QueueRecords => Request::Inspect(Inspect::Queue { tenant: tenant(), queue: name() }),
        Call::Quarantine => Request::Inspect(Inspect::Quarantine),
        Call::KeyRecords => Request::Inspect(Inspect::Key { tenant: tenant(), key: name() }),
        Call::Health => return Ok(health(app).await),
        // Whoever sends work here by this answer must stop before the listener does.
        Call::Ready if app.is_draining() => return Err(Failure::Draining { retry_after_ms: 1_000 }.into()),
        Call::Ready => return ready(app).await,
        Call::Metrics => return Ok(metrics::page(app).await),
        Call::Description => return Ok(description()),
        Call::Page => return page::page(app).await,
        // Passed on above.
        Call::Proxy => return Err(Problem::Internal),
    };
    answer::outcome(app.driver.ask(request).await)
}

const HEALTH_WAITS: std::time::Duration = std::time::Duration::from_millis(200);

/// That the process lives, and what it has granted by itself, if it may.
async fn health(app: &App) -> Response {
    let mut out = Vec::new();
    let mut object = Object::new(&mut out);
    object.str("status", "ok");
    // That the process lives is told also when the core has much to do.
    if app.gateway.may_fail_open()
        && let Ok(Some(look)) = tokio::time::timeout(HEALTH_WAITS, app.driver.look()).await
    {
        object.num("fail_open", look.stats.slots_open);
    }
    object.end();
    body::json(StatusCode::OK, out)
}

/// Readiness, and with it what is wrong with how the store is set up, although it works for now.
async fn ready(app: &App) -> Result<Response, Problem> {
    let warning = app.driver.look().await.and_then(|look| look.store_warning);
    let answer = answer::outcome(app.driver.ask(Request::Ready).await)?;
    let Some(warning) = warning else { return Ok(answer) };
    let mut out = Vec::new();
    let mut object = Object::new(&mut out);
    object.str("status", "ready");
    object.str("warning", &warning);
    object.end();
    Ok(body::json(answer.status(), out))
}

/// A page of jobs. Its cursor names the question, so that it is not taken for a place in the answer to another.
async fn list(app: &App, (asked, question): (List, Question)) -> Result<Response, Problem> {
    let answer = match app.driver.ask(Request::List(asked)).await? {
        Answer::Jobs { jobs, next } => Answer::Jobs { jobs, next: next.map(|n| question.cursor(&n)) },
        other => other,
    };
    Ok(answer::answer(answer))
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
    let mut keys = headers.get_all(&IDEMPOTENCY_KEY).iter();
    let key = keys.next().map(|v| submit::key(v.as_bytes())).transpose()?;
    if keys.next().is_some() {
        return Err(Problem::field("Idempotency-Key", "is given twice"));
    }
    // One that is none is dropped, as its specification asks.
    let mut traces = headers.get_all(&TRACEPARENT).iter();
    let trace = traces.next().filter(|_| traces.next().is_none()).and_then(|v| v.to_str().ok());
    let traceparent = trace.filter(|t| is_traceparent(t)).map(str::to_owned);
    Ok(Carried { key, traceparent })
}

/// `version-trace-parent-flags` in lower case (W3C Trace Context, 3.2.2). A later version may have more behind that.
fn is_traceparent(text: &str) -> bool {
    let mut parts = text.splitn(5, '-');
    let mut hex = |len: usize| {
        let part = parts.next().filter(|p| p.len() == len)?;
        part.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')).then_some(part)
    };
    let (Some(version), Some(trace), Some(parent), Some(_)) = (hex(2), hex(32), hex(16), hex(2)) else { return false };
    let is_named = |id: &str| id.bytes().any(|b| b != b'0');
    let fits = match version {
        "ff" => false,
        "00" => parts.next().is_none(),
        _ => text.len() <= TRACEPARENT_BYTES && text.bytes().all(|b| b.is_ascii_graphic()),
    };
    fits && is_named(trace) && is_named(parent)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_panic_ends_its_own_call_only() {
        let mut polls = 0;
        let panics = caught(std::future::poll_fn(|cx| {
            polls += 1;
            if polls == 2 {
                panic!("on purpose");
            }
            cx.waker().wake_by_ref();
            Poll::<()>::Pending
        }));
        assert_eq!(panics.await, None);
        assert_eq!(caught(async { 7 }).await, Some(7));
    }

    #[test]
    fn traceparents() {
        let (trace, parent) = ("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7");
        let (no_trace, no_parent) = ("0".repeat(32), "0".repeat(16));
        for good in [format!("00-{trace}-{parent}-01"), format!("cc-{trace}-{parent}-00-what-comes-later")] {
            assert!(is_traceparent(&good), "{good}");
        }
        for bad in [
            String::new(),
            format!("00-{no_trace}-{parent}-01"),
            format!("00-{trace}-{no_parent}-01"),
            format!("ff-{trace}-{parent}-01"),
            format!("00-{trace}-{parent}-01-more"),
            format!("00-{trace}-{parent}"),
            format!("00-{}-{parent}-01", trace.to_uppercase()),
            format!("00-{trace}-{parent}-0g"),
            format!("01-{trace}-{parent}-01-{}", "x".repeat(TRACEPARENT_BYTES)),
            format!("00_{trace}_{parent}_01"),
        ] {
            assert!(!is_traceparent(&bad), "{bad}");
        }
    }

    #[test]
    fn hosts() {
        for host in ["", "localhost", "localhost:7411", "127.0.0.1", "[::1]:7411", "a_b-c.example"] {
            assert!(is_host(host.as_bytes()), "{host}");
        }
        for host in ["a b", "a/b", "a@b", "<x>", "\"", "h\u{e9}"] {
            assert!(!is_host(host.as_bytes()), "{host}");
        }
    }
}
