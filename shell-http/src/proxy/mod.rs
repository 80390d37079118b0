//! `ANY /v1/proxy/{model}/{path}`: a call to an upstream for a caller who waits, under a slot of its pool.
//!
//! ```text
//!   read the body's beginning -> wait for a slot -> call an upstream -> stream its answer -> give the slot back
//! ```
//!
//! The slot's guard is in the hands of whoever has the call: the handler, then the task that streams the answer.
//! Wherever that ends, the slot goes back. Reading order: [`call`], `exchange`, [`headers`], [`stream`], [`aloud`].

mod aloud;
pub mod headers;
mod stream;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hyper::header::{CONNECTION, HeaderName, HeaderValue};
use hyper::http::request::Parts;
use hyper::{HeaderMap, Method, Request};
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::body::{Body, BrokenOff, Coming, Piece, Read, Response};
use crate::problem::Problem;
use crate::request_id::RequestId;
use crate::routes::{App, refuse};
use crate::upstream::Upstream;
use crate::upstream::call::{self, Answer, Trouble};
use crate::upstream::gateway::Got;
use crate::upstream::slot::Slot;
use crate::wire::query;

/// So much of a body is read before a slot is waited for: a client that goes is noticed only once what it has
/// sent has been read.
const SPOOL: usize = 1024 * 1024;
/// How long a slot is waited for, unless the caller says otherwise.
const WAIT_MS: u64 = 30_000;
/// Pieces of a body on their way to an upstream.
const AHEAD: usize = 4;

static WAIT: HeaderName = HeaderName::from_static("leasehold-wait-ms");
static ON_PREM: HeaderName = HeaderName::from_static("leasehold-on-prem");
static QUEUE_EVENTS: HeaderName = HeaderName::from_static("leasehold-queue-events");
static POSITION: HeaderName = HeaderName::from_static("leasehold-queue-position");
static WAITED: HeaderName = HeaderName::from_static("leasehold-waited-ms");
static FAIL_OPEN: HeaderName = HeaderName::from_static("leasehold-fail-open");
static UPSTREAM: HeaderName = HeaderName::from_static("leasehold-upstream");

/// A call that is to be passed on.
struct Asked {
    method: Method,
    /// Path and query below the upstream's base, beginning with a slash.
    target: String,
    /// As they go to whichever upstream it will be.
    headers: HeaderMap,
    upstreams: Vec<Arc<Upstream>>,
    wait: Duration,
    holder: String,
    aloud: bool,
}

/// What the client sends: its beginning, and the rest if it was not all.
struct Outgoing {
    start: Read,
    rest: Option<Coming>,
    max: u64,
}

/// Passes a call on. `path`: what follows the model, as it stands in the URI.
pub async fn call(
    app: &Arc<App>,
    model: &str,
    path: &str,
    parts: &Parts,
    mut coming: Coming,
    id: &RequestId,
) -> Response {
    let asked = match Asked::read(app, model, path, parts, id) {
        Ok(asked) => asked,
        Err(problem) => return refuse(coming, problem).await,
    };
    let max = app.limits.max_body;
    let (start, whole) = match coming.spool(SPOOL, max, &app.budget).await {
        Ok(read) => read,
        Err(problem) => return problem.response(),
    };
    let outgoing = Outgoing { start, rest: (!whole).then_some(coming), max };
    if asked.aloud {
        return aloud::answer(app.clone(), asked, outgoing);
    }
    passed_on(app, asked, outgoing).await.unwrap_or_else(|problem| {
        let mut response = problem.response();
        if !whole {
            // Nobody reads the rest of the body.
            response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        }
        response
    })
}

async fn passed_on(app: &Arc<App>, asked: Asked, outgoing: Outgoing) -> Result<Response, Problem> {
    let begun = Instant::now();
    let Got { mut slot, position } = app.gateway.slot(&asked.upstreams, &asked.holder, asked.wait, None).await?;
    let waited = begun.elapsed();
    let declared = slot.declared;
    let (upstream, answer) = exchange(app, &asked, outgoing, &mut slot).await?;
    let Answer { head, rest } = answer;
    let mut response = Response::new(stream::body(app.clone(), rest, slot));
    *response.status_mut() = head.status;
    let headers = response.headers_mut();
    *headers = headers::back(head.headers);
    headers.insert(&POSITION, position.into());
    headers.insert(&WAITED, u64::try_from(waited.as_millis()).unwrap_or(u64::MAX).into());
    if declared {
        headers.insert(&FAIL_OPEN, HeaderValue::from_static("true"));
    }
    if let Ok(name) = HeaderValue::from_str(upstream.name()) {
        headers.insert(&UPSTREAM, name);
    }
    Ok(response)
}

impl Asked {
    fn read(app: &App, model: &str, path: &str, parts: &Parts, id: &RequestId) -> Result<Asked, Problem> {
        let on_prem = flag(&parts.headers, &ON_PREM)?;
        let upstreams = app.gateway.with_model(model, on_prem);
        if upstreams.is_empty() {
            return Err(Problem::UnknownModel);
        }
        // A path that climbs would leave the upstream's base.
        let climbs = |part| query::decode(part, false).is_none_or(|p| matches!(&*p, "." | ".."));
        if path.split('/').any(climbs) {
            return Err(Problem::UnknownPath);
        }
        usable(&upstreams)?;
        let wait_ms = number(&parts.headers, &WAIT, leasehold_core::limits::WAIT_MS)?.unwrap_or(WAIT_MS);
        let query = parts.uri.query().map(|q| format!("?{q}")).unwrap_or_default();
        Ok(Asked {
            method: parts.method.clone(),
            target: format!("/{path}{query}"),
            headers: headers::on(&parts.headers, id),
            upstreams,
            wait: Duration::from_millis(wait_ms),
            holder: "proxy".into(),
            aloud: flag(&parts.headers, &QUEUE_EVENTS)?,
        })
    }

    /// The request as this upstream gets it.
    fn request(&self, upstream: &Upstream, body: Body) -> Option<Request<Body>> {
        let base = &upstream.settings.base;
        let mut request = Request::new(body);
        *request.method_mut() = self.method.clone();
        *request.uri_mut() = format!("{}{}", base.prefix, self.target).parse().ok()?;
        let headers = request.headers_mut();
        *headers = self.headers.clone();
        headers::configured(headers, &upstream.settings)?;
        Some(request)
    }
}

/// That at least one of them can be called: nobody waits for a slot that would be of no use.
fn usable(upstreams: &[Arc<Upstream>]) -> Result<(), Problem> {
    let now = std::time::Instant::now();
    let mut soonest = None;
    for upstream in upstreams {
        match upstream.look(now) {
            Ok(()) => return Ok(()),
            Err(until) => soonest = Some(soonest.map_or(until, |s: std::time::Instant| s.min(until))),
        }
    }
    let pause = soonest.map_or(Duration::ZERO, |until| until - now);
    let retry_after_ms = u64::try_from(pause.as_millis()).unwrap_or(u64::MAX).max(1);
    Err(Problem::UpstreamUnavailable { retry_after_ms })
}

/// Calls one of the upstreams of the slot's pool, those with fewest calls under way first; another one only as
/// long as nothing was sent.
async fn exchange(
    app: &App,
    asked: &Asked,
    outgoing: Outgoing,
    slot: &mut Slot,
) -> Result<(Arc<Upstream>, Answer), Problem> {
    let mut here: Vec<&Arc<Upstream>> = asked.upstreams.iter().filter(|u| u.settings.pool == slot.pool).collect();
    here.sort_by_key(|u| u.in_flight());
    let mut body = Some(outgoing.body());
    let mut failed = None;
    for upstream in here {
        if upstream.admit(std::time::Instant::now()).is_err() {
            continue;
        }
        let Some(request) = body.take().and_then(|body| asked.request(upstream, body)) else { break };
        let sent = tokio::select! {
            sent = call::send(upstream, request, Some(slot.token())) => sent,
            () = slot.lost() => return Err(Problem::UpstreamFailed { detail: "The slot was lost meanwhile" }),
            () = app.gateway.ended() => {
                return Err(Problem::UpstreamFailed { detail: "The server is going away and has stopped the call" });
            }
        };
        match sent {
            Ok(answer) => {
                if let Some(pause) = call::wants_a_pause(&answer.head) {
                    app.gateway.hold(upstream, pause);
                }
                return Ok((upstream.clone(), answer));
            }
            Err(unanswered) => {
                failed = Some(unanswered.trouble);
                body = unanswered.request.map(Request::into_body);
            }
        }
    }
    match failed {
        Some(Trouble::TimedOut) => Err(Problem::UpstreamTimeout),
        Some(trouble) => Err(Problem::UpstreamFailed { detail: trouble.text() }),
        None => Err(usable(&asked.upstreams).err().unwrap_or(Problem::UpstreamUnavailable { retry_after_ms: 1_000 })),
    }
}

impl Outgoing {
    /// The body for the upstream. What is not read yet is read as the upstream takes it.
    fn body(self) -> Body {
        let Outgoing { start, rest, max } = self;
        let Some(mut rest) = rest else {
            return if start.bytes.is_empty() { Body::empty() } else { Body::full(start.bytes) };
        };
        let (pieces, receiver) = mpsc::channel::<Piece>(AHEAD);
        tokio::spawn(async move {
            let mut seen = start.bytes.len() as u64;
            let mut piece: Bytes = start.bytes;
            while pieces.send(Ok(piece)).await.is_ok() {
                // The upstream may hang up long before the client has sent everything.
                let next = tokio::select! {
                    next = rest.next() => next,
                    () = pieces.closed() => return,
                };
                piece = match next {
                    Ok(None) => return,
                    Ok(Some(piece)) if seen + piece.len() as u64 <= max => piece,
                    Ok(Some(_)) | Err(_) => {
                        // So that half of it is not taken for the whole.
                        let _ = pieces.send(Err(BrokenOff)).await;
                        return;
                    }
                };
                seen += piece.len() as u64;
            }
        });
        Body::stream(receiver)
    }
}

fn text<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Result<Option<&'a str>, Problem> {
    let bad = |_| Problem::field(name.as_str().to_owned(), "must be ASCII");
    headers.get(name).map(|value| value.to_str().map_err(bad)).transpose()
}

fn flag(headers: &HeaderMap, name: &HeaderName) -> Result<bool, Problem> {
    match text(headers, name)? {
        None | Some("false") => Ok(false),
        Some("true") => Ok(true),
        Some(_) => Err(Problem::field(name.as_str().to_owned(), "must be true or false")),
    }
}

fn number(headers: &HeaderMap, name: &HeaderName, most: u64) -> Result<Option<u64>, Problem> {
    let Some(text) = text(headers, name)? else { return Ok(None) };
    match text.parse() {
        Ok(n) if n <= most => Ok(Some(n)),
        _ => Err(Problem::field(name.as_str().to_owned(), format!("must be a whole number up to {most}"))),
    }
}
