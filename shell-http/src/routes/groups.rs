//! A group's result, as one document or a line for each child, sent as it is read.

use std::sync::Arc;

use hyper::HeaderMap;
use hyper::header::{ACCEPT, CACHE_CONTROL, CONTENT_TYPE, HeaderValue};
use leasehold_core::request::{ChildView, GroupView};
use leasehold_core::{Failure, GroupId, Request, Response as Answer};
use tokio::sync::mpsc;

use super::call::App;
use crate::body::{Body, BrokenOff, Piece, Response};
use crate::problem::Problem;
use crate::wire::group;
use crate::wire::submit::TENANT;

/// Children read at once.
const PAGE: usize = 200;
/// Pages that a slow client may be behind before the rest waits for it.
const AHEAD: usize = 2;
/// Tries to read a page, a second apart, before the answer is broken off.
const TRIES: usize = 5;

/// A line for each child, in place of one document.
fn is_lines(headers: &HeaderMap) -> bool {
    headers.get_all(ACCEPT).iter().any(|a| a.to_str().is_ok_and(|a| a.contains("application/x-ndjson")))
}

struct Page {
    group: GroupView,
    children: Vec<ChildView>,
    next: Option<u32>,
}

async fn page(app: &App, id: GroupId, from: u32) -> Result<Page, Failure> {
    let request = Request::Children { tenant: TENANT.into(), group: id, from, limit: PAGE, contents: true };
    match app.driver.ask(request).await? {
        Answer::Children { group, children, next } => Ok(Page { group: *group, children, next }),
        // Never: children are answered with children.
        _ => Err(Failure::OutcomeUnknown { retry_after_ms: 1_000 }),
    }
}

pub async fn result(app: Arc<App>, id: GroupId, headers: &HeaderMap) -> Result<Response, Problem> {
    // What fails before the first byte is answered with a problem.
    let first = page(&app, id, 0).await.map_err(Problem::from)?;
    let lines = is_lines(headers);
    let (pieces, receiver) = mpsc::channel(AHEAD);
    tokio::spawn(async move {
        let gone = pieces.clone();
        tokio::select! {
            () = gone.closed() => {}
            () = send(&app, id, first, lines, pieces) => {}
        }
    });
    let kind = if lines { "application/x-ndjson" } else { "application/json" };
    let mut response = Response::new(Body::stream(receiver));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    Ok(response)
}

/// Sends page by page. If the rest cannot be read the connection is broken off, so that half a result is not
/// taken for a whole one.
async fn send(app: &App, id: GroupId, first: Page, lines: bool, pieces: mpsc::Sender<Piece>) {
    let mut page_now = first;
    let mut out = if lines { Vec::new() } else { group::result_head(&page_now.group) };
    let mut any = false;
    loop {
        for child in &page_now.children {
            if any && !lines {
                out.push(b',');
            }
            any = true;
            group::child_view(&mut out, child);
            if lines {
                out.push(b'\n');
            }
        }
        let Some(next) = page_now.next else { break };
        if pieces.send(Ok(std::mem::take(&mut out).into())).await.is_err() {
            return;
        }
        let mut tries = 0;
        page_now = loop {
            match page(app, id, next).await {
                Ok(page) => break page,
                Err(failure) if failure.retry_after_ms().is_some() && tries < TRIES => {
                    tries += 1;
                    tokio::time::sleep(std::time::Duration::from_secs(1)).await;
                }
                Err(_) => {
                    let _ = pieces.send(Err(BrokenOff)).await;
                    return;
                }
            }
        };
    }
    if !lines {
        out.extend_from_slice(group::RESULT_TAIL);
    }
    let _ = pieces.send(Ok(out.into())).await;
}
