//! The same with the place in line told while it is waited for: server-sent events from the first moment on.
//!
//! ```text
//!   event: leasehold.queue      data: {"position":3,"estimated_wait_ms":900}     as it changes
//!   event: leasehold.started    data: {"position":3,"waited_ms":1012,"upstream":"llm-1"}
//!   … the upstream's own events, as they come …
//! ```
//!
//! The status is 200 before anything is known. So what would have been a problem is the event
//! `leasehold.problem`, and an answer that is not a stream of events is `leasehold.answer`; both are the last.

use std::sync::Arc;

use bytes::Bytes;
use hyper::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderValue};
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::stream::{End, pump};
use super::{Asked, Outgoing, exchange};
use crate::body::{Body, BrokenOff, Piece, Response};
use crate::problem::Problem;
use crate::routes::App;
use crate::upstream::call::{Answer, Rest};
use crate::upstream::gateway::Got;
use crate::upstream::slot::Place;
use crate::wire::json::Object;

const AHEAD: usize = 4;
/// An answer that is not a stream of events is told up to here.
const ANSWER_BYTES: usize = 64 * 1024;

pub fn answer(app: Arc<App>, asked: Asked, outgoing: Outgoing) -> Response {
    let (pieces, receiver) = mpsc::channel(AHEAD);
    tokio::spawn(async move {
        let gone = pieces.clone();
        tokio::select! {
            // What is dropped here is given up: a wait, a call, a slot.
            () = gone.closed() => {}
            () = tell(&app, asked, outgoing, pieces) => {}
        }
    });
    let mut response = Response::new(Body::stream(receiver));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

async fn tell(app: &App, asked: Asked, outgoing: Outgoing, pieces: mpsc::Sender<Piece>) {
    let begun = Instant::now();
    let (told, places) = mpsc::channel(AHEAD);
    let waiting = app.gateway.slot(&asked.upstreams, &asked.holder, asked.wait, Some(told));
    let got = tokio::select! {
        got = waiting => got,
        // Ends with the wait.
        () = tell_places(places, &pieces) => return,
    };
    let result = match got {
        Ok(Got { mut slot, position }) => {
            let waited = begun.elapsed();
            match exchange(app, &asked, outgoing, &mut slot).await {
                Ok((upstream, Answer { head, rest })) => {
                    let started = event("leasehold.started", |object| {
                        object.num("position", position);
                        object.num("waited_ms", u64::try_from(waited.as_millis()).unwrap_or(u64::MAX));
                        object.str("upstream", upstream.name());
                        if slot.declared {
                            object.bool("fail_open", true);
                        }
                    });
                    if pieces.send(Ok(started)).await.is_err() {
                        return;
                    }
                    let kind = head.headers.get(CONTENT_TYPE).and_then(|v| v.to_str().ok()).unwrap_or_default();
                    if head.status.is_success() && kind.starts_with("text/event-stream") {
                        if pump(app, rest, slot, &pieces).await == End::BrokenOff {
                            // The client may have gone too.
                            let _ = pieces.send(Err(BrokenOff)).await;
                        }
                        return;
                    }
                    let (kind, status) = (kind.to_owned(), head.status.as_u16());
                    let stopped = async {
                        tokio::select! {
                            () = slot.lost() => {}
                            () = app.gateway.ended() => {}
                        }
                    };
                    tokio::select! {
                        body = text(rest) => body.map(|body| event("leasehold.answer", |object| {
                            object.num("status", status.into());
                            object.str("content_type", &kind);
                            object.str("body", &body);
                        })),
                        () = stopped => Err(Problem::UpstreamFailed { detail: "The call was stopped" }),
                    }
                }
                Err(problem) => Err(problem),
            }
        }
        Err(failure) => Err(failure.into()),
    };
    let last = result.unwrap_or_else(|problem| {
        let mut out = b"event: leasehold.problem\ndata: ".to_vec();
        problem.write(&mut out);
        out.extend_from_slice(b"\n\n");
        out.into()
    });
    // The client may have gone.
    let _ = pieces.send(Ok(last)).await;
}

/// Never returns as long as places may come.
async fn tell_places(mut places: mpsc::Receiver<Place>, pieces: &mpsc::Sender<Piece>) {
    let mut last = None;
    while let Some(place) = places.recv().await {
        if last.replace(place) == Some(place) {
            continue;
        }
        let told = event("leasehold.queue", |object| {
            object.num("position", place.position);
            object.num("estimated_wait_ms", place.estimated_wait_ms);
        });
        if pieces.send(Ok(told)).await.is_err() {
            return;
        }
    }
    // The wait is over, and its answer is there.
    std::future::pending().await
}

fn event(name: &str, fill: impl FnOnce(&mut Object<'_>)) -> Bytes {
    let mut out = format!("event: {name}\ndata: ").into_bytes();
    let mut object = Object::new(&mut out);
    fill(&mut object);
    object.end();
    out.extend_from_slice(b"\n\n");
    out.into()
}

/// The beginning of a body, as text.
async fn text(mut rest: Rest) -> Result<String, Problem> {
    let mut all = Vec::new();
    while all.len() < ANSWER_BYTES {
        match rest.next().await {
            Ok(Some(piece)) => all.extend_from_slice(&piece),
            Ok(None) => break,
            Err(trouble) => return Err(Problem::UpstreamFailed { detail: trouble.text() }),
        }
    }
    all.truncate(ANSWER_BYTES);
    Ok(String::from_utf8_lossy(&all).into_owned())
}
