//! What clients are shown. Fields that do not apply are left out.

use leasehold_core::JobId;
use leasehold_core::event::Kind;
use leasehold_core::job::record::{AttemptRecord, Class, ErrorInfo, Owner, Status};
use leasehold_core::request::{EventCursor, EventView, JobView, Leased, QueueView, Why};

use super::json::{self, Object};

pub fn job(out: &mut Vec<u8>, view: &JobView) {
    let mut object = Object::new(out);
    object.id("id", view.id);
    object.str("queue", &view.queue);
    object.str("class", view.class.text());
    object.str("status", view.status.text());
    object.num("attempt", view.attempt.into());
    object.num("max_attempts", view.max_attempts.into());
    object.num("deliveries", view.deliveries.into());
    object.time("created_at", view.created_at);
    object.time("run_at", view.run_at);
    if let Some(at) = view.ended_at {
        object.time("ended_at", at);
    }
    if let Some(reason) = &view.reason {
        object.str("reason", reason);
    }
    json::array(object.key("attempts"), &view.attempts, attempt);
    if view.attempts_omitted > 0 {
        object.num("attempts_omitted", view.attempts_omitted.into());
    }
    if let Some(progress) = &view.progress {
        object.text("progress", &progress.value.bytes);
        if let Some(seq) = progress.seq {
            object.num("progress_seq", seq);
        }
        object.time("progress_at", progress.at);
    }
    if let Some(lease) = &view.lease {
        let mut inner = Object::new(object.key("lease"));
        inner.str("worker", &lease.worker);
        inner.time("granted_at", lease.granted_at);
        inner.time("expires_at", lease.expires_at);
        inner.end();
    }
    if let Some(position) = view.position {
        object.num("position", position);
    }
    if let Some(key) = &view.key {
        object.str("idempotency_key", key);
    }
    object.num("payload_bytes", view.payload_len);
    if let Some(metadata) = &view.metadata {
        object.text("metadata", &metadata.bytes);
    }
    if let Some(traceparent) = &view.traceparent {
        object.str("traceparent", traceparent);
    }
    object.end();
}

/// An attempt that ended. Its token is nobody's business.
fn attempt(out: &mut Vec<u8>, attempt: &AttemptRecord) {
    let mut object = Object::new(out);
    object.num("delivery", attempt.delivery.into());
    object.str("worker", &attempt.worker);
    object.time("ended_at", attempt.ended);
    object.str("outcome", attempt.outcome.text());
    if let Some(info) = &attempt.error {
        error(object.key("error"), info);
    }
    if let Some(at) = attempt.run_at {
        object.time("run_at", at);
    }
    object.end();
}

pub fn error(out: &mut Vec<u8>, info: &ErrorInfo) {
    let mut object = Object::new(out);
    object.str("message", &info.message);
    if let Some(kind) = &info.kind {
        object.str("type", kind);
    }
    if let Some(detail) = &info.detail {
        object.str("detail", detail);
    }
    object.end();
}

pub fn leased(out: &mut Vec<u8>, leased: &Leased) {
    let mut object = Object::new(out);
    object.id("id", leased.id);
    object.str("token", &leased.token.text(leased.id));
    object.num("attempt", leased.attempt.into());
    object.num("delivery", leased.delivery.into());
    object.str("queue", &leased.queue);
    object.str("class", leased.class.text());
    match &leased.payload {
        Some(content) => object.content("payload", "payload_base64", content),
        None => object.bool("payload_omitted", true),
    }
    object.time("lease_expires_at", leased.lease_expires_at);
    if let Some(traceparent) = &leased.traceparent {
        object.str("traceparent", traceparent);
    }
    if let Some(metadata) = &leased.metadata {
        object.text("metadata", &metadata.bytes);
    }
    object.end();
}

/// Room that a leased job's answer needs, roughly.
pub fn leased_len(leased: &Leased) -> usize {
    512 + leased.payload.as_ref().map_or(0, |p| p.data.len() / 3 * 4 + 128)
}

pub fn why(out: &mut Vec<u8>, why: &Why) {
    let mut object = Object::new(out);
    match why {
        Why::Scheduled { run_at } => {
            object.str("reason", "scheduled");
            object.time("run_at", *run_at);
        }
        Why::Retrying { run_at, attempt } => {
            object.str("reason", "retrying");
            object.time("run_at", *run_at);
            object.num("attempt", (*attempt).into());
        }
        Why::Paused { reason } => {
            object.str("reason", "paused");
            if let Some(reason) = reason {
                object.str("pause_reason", reason);
            }
        }
        Why::Behind { ahead } => {
            object.str("reason", "behind");
            object.num("ahead", *ahead);
        }
        Why::NoWorker => object.str("reason", "no_worker"),
        Why::NoSlot { pool, in_use, total } => {
            object.str("reason", "no_slot");
            object.str("pool", pool);
            object.num("in_use", *in_use);
            object.num("total", (*total).into());
        }
        Why::OnHold { upstream, until } => {
            object.str("reason", "on_hold");
            object.str("upstream", upstream);
            object.time("until", *until);
        }
        Why::Held => object.str("reason", "held"),
        Why::Running { worker, expires_at } => {
            object.str("reason", "running");
            object.str("worker", worker);
            object.time("lease_expires_at", *expires_at);
        }
        Why::Ended { status } => {
            object.str("reason", "ended");
            object.str("status", status.text());
        }
    }
    object.end();
}

/// `more` adds fields of its own.
pub fn queue(out: &mut Vec<u8>, view: &QueueView, more: impl FnOnce(&mut Object<'_>)) {
    let mut object = Object::new(out);
    object.str("name", &view.name);
    object.bool("paused", view.paused);
    if let Some(reason) = &view.reason {
        object.str("pause_reason", reason);
    }
    object.num("lease_ms", view.lease_ms);
    let mut counts = Object::new(object.key("counts"));
    for status in Status::ALL {
        counts.num(status.text(), depth(view, |_, s| s == status));
    }
    counts.end();
    let mut classes = Object::new(object.key("depth"));
    for class in Class::ALL {
        let mut counts = Object::new(classes.key(class.text()));
        for status in Status::ALL {
            counts.num(status.text(), depth(view, |c, s| c == class && s == status));
        }
        counts.end();
    }
    classes.end();
    if let Some(due) = view.oldest_due {
        object.time("oldest_due_at", due);
        object.num("oldest_age_ms", view.at.saturating_sub(due) / 1_000);
    }
    object.time("at", view.at);
    more(&mut object);
    object.end();
}

/// Jobs of the classes and statuses asked for.
pub fn depth(view: &QueueView, wanted: impl Fn(Class, Status) -> bool) -> u64 {
    view.depth.iter().filter(|(c, s, _)| wanted(*c, *s)).map(|(_, _, n)| n).sum()
}

pub fn event(out: &mut Vec<u8>, view: &EventView) {
    let event = &view.event;
    let mut object = Object::new(out);
    cursor(object.key("id"), view.id);
    object.time("at", view.at);
    object.str("type", event.kind.text());
    match event.of {
        Owner::Job(job) => object.id("job", job),
        Owner::Group(group) => object.str("group", &group.to_string()),
    }
    if let Some((group, _)) = event.of.job().and_then(JobId::child_of) {
        object.str("group", &group.to_string());
    }
    if let Some((from, to)) = event.range {
        object.num("from", from.into());
        object.num("to", to.into());
    }
    if !event.queue.is_empty() {
        object.str("queue", &event.queue);
    }
    if let Some(class) = event.class {
        object.str("class", class.text());
    }
    if let Some(worker) = &event.worker {
        object.str("worker", worker);
    }
    if let Some(reason) = &event.reason {
        object.str("reason", reason);
    }
    object.end();
}

pub fn cursor(out: &mut Vec<u8>, cursor: EventCursor) {
    json::string(out, &format!("{}-{}", cursor.seq, cursor.seen));
}

/// Every type that an event can have.
pub fn event_types() -> impl Iterator<Item = &'static str> {
    Kind::ALL.into_iter().map(Kind::text)
}
