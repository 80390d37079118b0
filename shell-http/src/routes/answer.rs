//! From the replica's answers to HTTP's.

use hyper::StatusCode;
use hyper::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderValue, LOCATION, X_CONTENT_TYPE_OPTIONS,
};
use leasehold_core::opaque::Content;
use leasehold_core::request::JobView;
use leasehold_core::{Outcome, Response as Answer};

use crate::body::{self, Body, Response};
use crate::problem::Problem;
use crate::wire::json::{self, Object};
use crate::wire::{group, pool, query, store, view};

/// An answer that was not a failure.
pub fn answer(answer: Answer) -> Response {
    let mut out = Vec::new();
    match answer {
        Answer::Created(job) => {
            let mut response = job_answer(StatusCode::CREATED, &job);
            let mut location = Vec::with_capacity(48);
            location.extend_from_slice(b"/v1/jobs/");
            location.extend_from_slice(&job.id.text());
            if let Ok(value) = HeaderValue::from_bytes(&location) {
                response.headers_mut().insert(LOCATION, value);
            }
            return response;
        }
        Answer::Existing(job) | Answer::Job(job) => return job_answer(StatusCode::OK, &job),
        Answer::Content(content) => return content_answer(content),
        Answer::NoContent | Answer::Deleted => return body::no_content(),
        Answer::Why(why) => view::why(&mut out, &why),
        Answer::Jobs { jobs, next } => {
            let mut object = Object::new(&mut out);
            json::array(object.key("jobs"), &jobs, view::job);
            match next {
                Some(next) => object.str("next", &next),
                None => object.null("next"),
            }
            object.end();
        }
        Answer::Claimed(leased) => {
            out.reserve(16 + leased.iter().map(view::leased_len).sum::<usize>());
            let mut object = Object::new(&mut out);
            json::array(object.key("jobs"), &leased, view::leased);
            object.end();
        }
        Answer::Beat { lease_expires_at, cancel_requested } => {
            let mut object = Object::new(&mut out);
            beat(&mut object, lease_expires_at, cancel_requested);
            object.end();
        }
        Answer::Completed => out.extend_from_slice(b"{\"status\":\"succeeded\"}"),
        Answer::Failed { status, run_at } => {
            let mut object = Object::new(&mut out);
            object.str("status", status.text());
            if let Some(at) = run_at {
                object.time("run_at", at);
            }
            object.end();
        }
        Answer::Released { status } => {
            let mut object = Object::new(&mut out);
            object.str("status", status.text());
            object.end();
        }
        Answer::Queues(queues) => {
            let mut object = Object::new(&mut out);
            json::array(object.key("queues"), &queues, |out, q| view::queue(out, q, |_| {}));
            object.end();
        }
        Answer::Queue(queue) => view::queue(&mut out, &queue, |_| {}),
        Answer::Purged { queue, purged, left } => view::queue(&mut out, &queue, |object| {
            object.num("purged", purged);
            object.num("left", left);
        }),
        Answer::Events { events, next } => {
            let mut object = Object::new(&mut out);
            json::array(object.key("events"), &events, view::event);
            view::cursor(object.key("next"), next);
            object.end();
        }
        Answer::GroupCreated(group) => {
            group::group(&mut out, &group);
            let mut response = body::json(StatusCode::CREATED, out);
            if let Ok(value) = HeaderValue::from_str(&format!("/v1/groups/{}", group.id)) {
                response.headers_mut().insert(LOCATION, value);
            }
            return response;
        }
        Answer::Group(group) => group::group(&mut out, &group),
        Answer::Children { children, next, .. } => group::children(&mut out, &children, next),
        Answer::Pool(found) => pool::view(&mut out, &found, true),
        Answer::Pools(found) => pool::pools(&mut out, &found),
        Answer::PoolDeleted | Answer::SlotReleased => return body::no_content(),
        Answer::Slot { pool: name, id, expires_at, declared } => {
            pool::slot(&mut out, &id, expires_at, declared);
            let mut response = body::json(StatusCode::CREATED, out);
            let (name, id) = (query::encode(&name), query::encode(&id.to_string()));
            if let Ok(value) = HeaderValue::from_str(&format!("/v1/pools/{name}/slots/{id}")) {
                response.headers_mut().insert(LOCATION, value);
            }
            return response;
        }
        Answer::SlotRefreshed { expires_at } => {
            let mut object = Object::new(&mut out);
            object.time("expires_at", expires_at);
            object.end();
        }
        // The server asks for these itself, and no call of the contract does.
        Answer::Dispatched(_)
        | Answer::UpstreamHeld { .. }
        | Answer::UpstreamFreed
        | Answer::GivenBack
        | Answer::Upstreams(_) => {
            return body::no_content();
        }
        Answer::Audited(page) => store::audited(&mut out, &page),
        Answer::Inspected(seen) => store::inspected(&mut out, &seen),
        Answer::Ready => out.extend_from_slice(b"{\"status\":\"ready\"}"),
        Answer::Draining => out.extend_from_slice(b"{\"status\":\"draining\"}"),
        Answer::Batch(outcomes) => {
            return batch_answer(outcomes.into_iter().map(|o| o.map_err(Problem::from)).collect());
        }
    }
    body::json(StatusCode::OK, out)
}

fn job_answer(status: StatusCode, job: &JobView) -> Response {
    let mut out = Vec::with_capacity(512);
    view::job(&mut out, job);
    body::json(status, out)
}

/// Bytes that somebody sent are given back so that no browser takes them for a page of this site.
fn content_answer(content: Content) -> Response {
    let kind = HeaderValue::from_str(content.content_type())
        .unwrap_or_else(|_| HeaderValue::from_static("application/octet-stream"));
    let mut response = Response::new(Body::full(content.data.bytes));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, kind);
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(CONTENT_SECURITY_POLICY, HeaderValue::from_static("default-src 'none'; sandbox"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

fn beat(object: &mut Object<'_>, lease_expires_at: Option<u64>, cancel_requested: bool) {
    match lease_expires_at {
        Some(at) => object.time("lease_expires_at", at),
        None => object.null("lease_expires_at"),
    }
    object.bool("cancel_requested", cancel_requested);
}

/// The answer to a batch. It fails as a whole only if every item fails for want of the store.
pub fn batch_answer(outcomes: Vec<Result<Answer, Problem>>) -> Response {
    if let Some(problem) = common_outage(&outcomes) {
        return problem.response();
    }
    let mut out = Vec::with_capacity(16 + outcomes.len() * 64);
    let mut object = Object::new(&mut out);
    json::array(object.key("results"), &outcomes, item);
    object.end();
    body::json(StatusCode::OK, out)
}

fn common_outage(outcomes: &[Result<Answer, Problem>]) -> Option<&Problem> {
    let outage = |outcome: &'_ Result<Answer, Problem>, status: StatusCode| {
        outcome.as_ref().is_err_and(|problem| problem.status() == status)
    };
    let first = outcomes.first()?.as_ref().err()?;
    let status = first.status();
    let later = matches!(status, StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS);
    (later && outcomes.iter().all(|o| outage(o, status))).then_some(first)
}

/// One item of a batch's answer.
pub fn item(out: &mut Vec<u8>, outcome: &Result<Answer, Problem>) {
    let mut object = Object::new(out);
    match outcome {
        Err(problem) => {
            object.num("status", problem.status().as_u16().into());
            problem.write(object.key("problem"));
        }
        Ok(Answer::Created(job)) => {
            object.num("status", 201);
            view::job(object.key("job"), job);
        }
        Ok(Answer::Existing(job)) => {
            object.num("status", 200);
            view::job(object.key("job"), job);
        }
        Ok(Answer::Beat { lease_expires_at, cancel_requested }) => {
            object.num("status", 200);
            beat(&mut object, *lease_expires_at, *cancel_requested);
        }
        Ok(Answer::Failed { status, run_at }) => {
            object.num("status", 200);
            object.str("job_status", status.text());
            if let Some(at) = run_at {
                object.time("run_at", *at);
            }
        }
        Ok(_) => object.num("status", 200),
    }
    object.end();
}

/// An outcome as an answer of its own.
pub fn outcome(outcome: Outcome) -> Result<Response, Problem> {
    Ok(answer(outcome?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use leasehold_core::Failure;

    #[test]
    fn a_batch_fails_as_a_whole_only_if_every_item_does() {
        let down = || Err(Problem::from(Failure::StoreUnavailable { retry_after_ms: 10 }));
        let lost = || Err(Problem::from(Failure::LeaseLost));
        assert_eq!(batch_answer(vec![down(), down()]).status(), 503);
        assert_eq!(batch_answer(vec![down(), lost()]).status(), 200);
        assert_eq!(batch_answer(vec![lost(), lost()]).status(), 200);
        assert_eq!(batch_answer(vec![Ok(Answer::Completed), down()]).status(), 200);
        let mut out = Vec::new();
        item(&mut out, &lost());
        let json: serde_json::Value = serde_json::from_slice(&out).unwrap();
        assert_eq!((&json["status"], &json["problem"]["code"]), (&409.into(), &"lease_lost".into()));
    }
}
