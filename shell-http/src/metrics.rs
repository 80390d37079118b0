//! Metrics in Prometheus' text format. Every label has a bounded set of values.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use hyper::StatusCode;
use hyper::header::{CONTENT_TYPE, HeaderValue, X_CONTENT_TYPE_OPTIONS};
use leasehold_core::job::record::{Class, Status};
use leasehold_core::request::QueueView;
use leasehold_core::{Request, Response as Answer, Stats};

use crate::body::{Body, Response};
use crate::routes::{App, ROUTES};
use crate::wire::submit::TENANT;
use crate::wire::view;

/// Queues whose depths are shown; the deepest first.
const QUEUES: usize = 100;
/// Upper ends of the histogram's buckets, in milliseconds.
const BUCKETS: [u64; 9] = [1, 2, 5, 10, 50, 250, 1_000, 5_000, 60_000];
const STATUSES: [u16; 16] = [200, 201, 204, 400, 401, 403, 404, 405, 408, 409, 413, 422, 429, 500, 503, 0];

/// Calls over HTTP.
#[derive(Debug)]
pub struct Counters {
    /// For each route, and last for what was no route.
    routes: Vec<PerRoute>,
    pub connections: AtomicU64,
    pub open_connections: AtomicU64,
}

#[derive(Debug, Default)]
struct PerRoute {
    statuses: [AtomicU64; STATUSES.len()],
    buckets: [AtomicU64; BUCKETS.len()],
    micros: AtomicU64,
}

impl Default for Counters {
    fn default() -> Self {
        Counters::new()
    }
}

impl Counters {
    pub fn new() -> Self {
        let routes = (0..=ROUTES.len()).map(|_| PerRoute::default()).collect();
        Counters { routes, connections: AtomicU64::new(0), open_connections: AtomicU64::new(0) }
    }

    pub fn count(&self, route: Option<usize>, status: StatusCode, took: Duration) {
        let Some(per) = self.routes.get(route.unwrap_or(ROUTES.len())) else { return };
        let status = STATUSES.iter().position(|s| *s == status.as_u16()).unwrap_or(STATUSES.len() - 1);
        per.statuses[status].fetch_add(1, Relaxed);
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        if let Some(bucket) = BUCKETS.iter().position(|ms| micros <= ms * 1_000) {
            per.buckets[bucket].fetch_add(1, Relaxed);
        }
        per.micros.fetch_add(micros, Relaxed);
    }

    fn write(&self, out: &mut String) {
        head(out, "leasehold_http_requests_total", "counter", "Calls answered, by route and status.");
        let named = || self.routes.iter().enumerate().map(|(n, per)| (name(n), per));
        for ((method, path), per) in named() {
            for (status, count) in STATUSES.iter().zip(&per.statuses) {
                let count = count.load(Relaxed);
                if count > 0 {
                    let _ = writeln!(
                        out,
                        "leasehold_http_requests_total{{method=\"{method}\",route=\"{path}\",status=\"{status}\"}} {count}"
                    );
                }
            }
        }
        head(out, "leasehold_http_request_seconds", "histogram", "Time from a call's head to its answer's.");
        for ((method, path), per) in named() {
            let total: u64 = per.statuses.iter().map(|c| c.load(Relaxed)).sum();
            if total == 0 {
                continue;
            }
            let labels = format!("method=\"{method}\",route=\"{path}\"");
            let mut sum = 0;
            for (ms, bucket) in BUCKETS.iter().zip(&per.buckets) {
                sum += bucket.load(Relaxed);
                let le = *ms as f64 / 1_000.0;
                let _ = writeln!(out, "leasehold_http_request_seconds_bucket{{{labels},le=\"{le}\"}} {sum}");
            }
            let seconds = per.micros.load(Relaxed) as f64 / 1e6;
            // A call counted between two loads must not make the last bucket shrink.
            let total = total.max(sum);
            let _ = writeln!(out, "leasehold_http_request_seconds_bucket{{{labels},le=\"+Inf\"}} {total}");
            let _ = writeln!(out, "leasehold_http_request_seconds_sum{{{labels}}} {seconds}");
            let _ = writeln!(out, "leasehold_http_request_seconds_count{{{labels}}} {total}");
        }
        one(
            out,
            "leasehold_http_connections_total",
            "counter",
            "Connections accepted.",
            self.connections.load(Relaxed),
        );
        one(out, "leasehold_http_connections", "gauge", "Connections open.", self.open_connections.load(Relaxed));
    }
}

fn name(route: usize) -> (&'static str, &'static str) {
    ROUTES.get(route).map_or(("any", "unknown"), |r| (r.method.as_str(), r.path))
}

type Row = (&'static str, &'static str, &'static str, fn(&Stats) -> u64);

/// What the replica counts.
const STATS: &[Row] = &[
    ("leasehold_jobs_submitted_total", "counter", "Jobs created.", |s| s.submitted),
    ("leasehold_submits_repeated_total", "counter", "Submits whose key named a job already.", |s| s.submits_repeated),
    ("leasehold_claims_total", "counter", "Claims that leased jobs.", |s| s.claims),
    ("leasehold_claims_empty_total", "counter", "Claims that found nothing.", |s| s.claims_empty),
    ("leasehold_jobs_claimed_total", "counter", "Jobs leased.", |s| s.claimed),
    ("leasehold_heartbeats_total", "counter", "Leases extended.", |s| s.heartbeats),
    ("leasehold_jobs_completed_total", "counter", "Jobs completed.", |s| s.completed),
    ("leasehold_attempts_failed_total", "counter", "Attempts that workers failed.", |s| s.failed),
    ("leasehold_jobs_released_total", "counter", "Leases given back.", |s| s.released),
    ("leasehold_jobs_cancelled_total", "counter", "Jobs cancelled.", |s| s.cancelled),
    ("leasehold_jobs_retried_total", "counter", "Jobs given a new life.", |s| s.retried),
    ("leasehold_jobs_dead_total", "counter", "Jobs that ended dead.", |s| s.dead),
    ("leasehold_jobs_expired_total", "counter", "Jobs whose queue deadline passed.", |s| s.expired),
    ("leasehold_leases_lapsed_total", "counter", "Leases taken back.", |s| s.leases_lapsed),
    ("leasehold_attempts_timed_out_total", "counter", "Attempts ended by a deadline.", |s| s.timed_out),
    ("leasehold_jobs_promoted_total", "counter", "Jobs that became due.", |s| s.promoted),
    ("leasehold_jobs_lost_total", "counter", "Jobs whose record vanished from the store.", |s| s.lost),
    ("leasehold_jobs_reindexed_total", "counter", "Index entries put back.", |s| s.reindexed),
    ("leasehold_jobs_quarantined_total", "counter", "Jobs whose record could not be read.", |s| s.quarantined),
    ("leasehold_ghosts_removed_total", "counter", "Index entries removed whose job was gone.", |s| s.ghosts),
    ("leasehold_store_reads_total", "counter", "Reads sent to the store.", |s| s.reads),
    ("leasehold_store_commits_total", "counter", "Commits sent to the store.", |s| s.commits),
    ("leasehold_store_transactions_total", "counter", "Transactions in those commits.", |s| s.txns),
    ("leasehold_store_outcomes_unknown_total", "counter", "Commits whose outcome was unknown.", |s| s.commits_unknown),
    ("leasehold_store_errors_total", "counter", "Calls that the store did not answer.", |s| s.store_errors),
    ("leasehold_store_full_total", "counter", "Requests refused because the store was full.", |s| s.refused_full),
    ("leasehold_mailbox_full_total", "counter", "Requests refused because too much was in work.", |s| {
        s.refused_mailbox
    }),
    ("leasehold_requests_in_work", "gauge", "Requests in work.", |s| s.in_work),
    ("leasehold_polls", "gauge", "Claims that wait for jobs.", |s| s.polls),
    ("leasehold_breaker_open", "gauge", "1 while the store cannot be reached.", |s| s.breaker_open.into()),
    ("leasehold_newer_format", "gauge", "1 if the store holds records of a newer release.", |s| s.newer_format.into()),
    ("leasehold_draining", "gauge", "1 while the server is going away.", |s| s.draining.into()),
];

pub async fn page(app: &App) -> Response {
    let mut out = String::with_capacity(16 * 1024);
    one(&mut out, "leasehold_up_seconds", "gauge", "Time since the start.", app.started.elapsed().as_secs());
    app.counters.write(&mut out);
    if let Some(look) = app.driver.look().await {
        for (name, kind, help, value) in STATS {
            one(&mut out, name, kind, help, value(&look.stats));
        }
        head(&mut out, "leasehold_marks_total", "counter", "Rare branches taken.");
        for (mark, count) in &look.marks {
            let _ = writeln!(out, "leasehold_marks_total{{mark=\"{}\"}} {count}", snake(&format!("{mark:?}")));
        }
        let poisoned = u64::from(look.store_poisoned.is_some());
        one(&mut out, "leasehold_store_poisoned", "gauge", "1 if the store works no more until a restart.", poisoned);
    }
    if let Ok(Answer::Queues(queues)) = app.driver.ask(Request::Queues { tenant: TENANT.into() }).await {
        write_queues(&mut out, queues);
    }
    let mut response = Response::new(Body::full(out));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8"));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}

fn write_queues(out: &mut String, mut queues: Vec<QueueView>) {
    let live = |q: &QueueView| view::depth(q, |_, s| !s.is_terminal());
    queues.sort_by_key(|q| std::cmp::Reverse(live(q)));
    let omitted = queues.len().saturating_sub(QUEUES) as u64;
    queues.truncate(QUEUES);
    one(out, "leasehold_queues_omitted", "gauge", "Queues whose depths are not shown here.", omitted);
    head(out, "leasehold_queue_jobs", "gauge", "Jobs by queue, class and status.");
    for queue in &queues {
        let name = label(&queue.name);
        for class in Class::ALL {
            for status in Status::ALL {
                let count = view::depth(queue, |c, s| c == class && s == status);
                if count > 0 {
                    let (class, status) = (class.text(), status.text());
                    let _ = writeln!(
                        out,
                        "leasehold_queue_jobs{{queue=\"{name}\",class=\"{class}\",status=\"{status}\"}} {count}"
                    );
                }
            }
        }
    }
    head(out, "leasehold_queue_oldest_seconds", "gauge", "How long the first job has been due.");
    for queue in &queues {
        let age = queue.oldest_due.map_or(0.0, |due| queue.at.saturating_sub(due) as f64 / 1e6);
        let _ = writeln!(out, "leasehold_queue_oldest_seconds{{queue=\"{}\"}} {age}", label(&queue.name));
    }
    head(out, "leasehold_queue_paused", "gauge", "1 while claims are stopped.");
    for queue in &queues {
        let _ = writeln!(out, "leasehold_queue_paused{{queue=\"{}\"}} {}", label(&queue.name), u8::from(queue.paused));
    }
}

fn head(out: &mut String, name: &str, kind: &str, help: &str) {
    let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
}

fn one(out: &mut String, name: &str, kind: &str, help: &str, value: u64) {
    head(out, name, kind, help);
    let _ = writeln!(out, "{name} {value}");
}

fn label(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '"' => out.push_str("\\\""),
            '\n' => out.push_str("\\n"),
            c => out.push(c),
        }
    }
    out
}

fn snake(camel: &str) -> String {
    let mut out = String::with_capacity(camel.len() + 4);
    for (n, c) in camel.chars().enumerate() {
        if c.is_ascii_uppercase() && n > 0 {
            out.push('_');
        }
        out.push(c.to_ascii_lowercase());
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_begin_alike_and_labels_cannot_break_out() {
        assert!(STATS.iter().all(|(name, ..)| name.starts_with("leasehold_")));
        assert!(STATS.iter().all(|(name, kind, ..)| name.ends_with("_total") == (*kind == "counter")));
        assert_eq!(label("a\"}\n\\"), "a\\\"}\\n\\\\");
        assert_eq!(snake("BreakerOpened"), "breaker_opened");
    }
}
