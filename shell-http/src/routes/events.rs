//! Events as they happen: server-sent events.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use hyper::HeaderMap;
use hyper::header::{ACCEPT, CACHE_CONTROL, CONTENT_TYPE, HeaderName, HeaderValue};
use leasehold_core::{Request, Response as Answer};
use tokio::sync::mpsc;

use super::call::App;
use crate::body::{Body, Piece, Response};
use crate::problem::Problem;
use crate::wire::decode::{self, Events};
use crate::wire::submit::TENANT;
use crate::wire::view;

/// A comment is sent after so long without an event, so that nobody in between hangs up.
const KEEP_ALIVE_MS: u64 = 15_000;
/// An empty answer that comes sooner is not asked for again at once.
const PAUSE: Duration = Duration::from_secs(1);
/// Pages that a slow client may be behind before the stream waits for it.
const AHEAD: usize = 2;

static LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");

pub fn is_stream(headers: &HeaderMap) -> bool {
    headers.get_all(ACCEPT).iter().any(|a| a.to_str().is_ok_and(|a| a.contains("text/event-stream")))
}

/// What a reader that comes back says it has seen takes the place of `after`.
pub fn resumed(mut asked: Events, headers: &HeaderMap) -> Result<Events, Problem> {
    // An empty one says that nothing has been seen, as the standard has it.
    if let Some(id) = headers.get(&LAST_EVENT_ID).filter(|id| !id.is_empty()) {
        asked.after = decode::cursor("Last-Event-ID", id.to_str().unwrap_or_default())?;
    }
    Ok(asked)
}

pub fn stream(app: Arc<App>, asked: Events) -> Response {
    let (pieces, receiver) = mpsc::channel(AHEAD);
    tokio::spawn(async move {
        let gone = pieces.clone();
        tokio::select! {
            () = gone.closed() => {}
            () = send(&app, asked, pieces) => {}
        }
    });
    let mut response = Response::new(Body::stream(receiver));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

/// Sends until the client goes, the server drains or the store fails; the client comes back with
/// the id of the last event that it has seen.
async fn send(app: &App, mut asked: Events, pieces: mpsc::Sender<Piece>) {
    if pieces.send(Ok(Bytes::from_static(b": leasehold events\n\n"))).await.is_err() {
        return;
    }
    while !app.is_draining() {
        let begun = Instant::now();
        let (after, limit) = (asked.after, asked.limit);
        let request = Request::Events { tenant: TENANT.into(), after, limit, wait_ms: KEEP_ALIVE_MS };
        let Ok(Answer::Events { events, next }) = app.driver.ask(request).await else { return };
        let mut out = Vec::with_capacity(64 + events.len() * 256);
        for event in &events {
            out.extend_from_slice(format!("id: {}-{}\n", event.id.seq, event.id.seen).as_bytes());
            out.extend_from_slice(format!("event: {}\ndata: ", event.event.kind.text()).as_bytes());
            view::event(&mut out, event);
            out.extend_from_slice(b"\n\n");
        }
        if events.is_empty() {
            out.extend_from_slice(b": nothing new\n\n");
            tokio::time::sleep(PAUSE.saturating_sub(begun.elapsed())).await;
        }
        if pieces.send(Ok(out.into())).await.is_err() {
            return;
        }
        asked.after = next;
    }
}
