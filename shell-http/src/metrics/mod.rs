//! Metrics in Prometheus' text format. Every label has a bounded set of values, and a scrape costs
//! the store nothing if another one came just before.

mod http;
mod pools;
mod process;
mod queues;
mod store;
mod text;
mod upstreams;

use std::time::{Duration, Instant};

use hyper::header::{CONTENT_TYPE, HeaderValue, X_CONTENT_TYPE_OPTIONS};
use leasehold_core::request::{PoolView, QueueView};
use leasehold_core::{Durations, Request, Response as Answer, Stats};
use tokio::sync::Mutex;

pub use http::Counters;
pub use store::{Calls, StoreWatch};

use crate::body::{Body, Response};
use crate::driver::Look;
use crate::routes::App;
use crate::wire::submit::TENANT;
use process::Facts;
use text::Page;

/// Depths and the system's facts are read anew when they are older than this, however many scrape.
const FRESH: Duration = Duration::from_secs(1);
/// A disk that does not tell its free space by then is left out.
const PATIENCE: Duration = Duration::from_secs(1);

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
    ("leasehold_groups_created_total", "counter", "Groups created.", |s| s.groups),
    ("leasehold_groups_finalized_total", "counter", "Groups that became final.", |s| s.groups_finalized),
    ("leasehold_group_children_released_total", "counter", "Children of groups released.", |s| s.children_released),
    ("leasehold_slots_granted_total", "counter", "Slots of pools granted.", |s| s.slots_granted),
    ("leasehold_slots_refreshed_total", "counter", "Slots extended.", |s| s.slots_refreshed),
    ("leasehold_slots_released_total", "counter", "Slots given back.", |s| s.slots_released),
    ("leasehold_slots_lost_total", "counter", "Refreshes of slots whose time had come.", |s| s.slots_lost),
    ("leasehold_slots_fail_open_total", "counter", "Slots granted without the store.", |s| s.slots_declared),
    ("leasehold_slots_fail_open_refused_total", "counter", "Slots not even granted without the store.", |s| {
        s.slots_declined
    }),
    ("leasehold_slots_fail_open", "gauge", "Units granted without the store that may still be held.", |s| s.slots_open),
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

/// What is read at most once in [`FRESH`].
#[derive(Debug, Default)]
pub struct Cache(Mutex<Option<(Instant, Seen)>>);

#[derive(Clone, Debug, Default)]
struct Seen {
    /// `None`: the store cannot be read.
    queues: Option<Vec<QueueView>>,
    pools: Option<Vec<PoolView>>,
    facts: Facts,
}

impl Cache {
    /// Who comes while another one reads waits for what that one reads.
    async fn seen(&self, app: &App) -> Seen {
        let mut kept = self.0.lock().await;
        if let Some((at, seen)) = &*kept
            && at.elapsed() < FRESH
        {
            return seen.clone();
        }
        let folder = app.driver.store_watch().folder.clone();
        let facts = tokio::task::spawn_blocking(move || Facts::read(folder.as_deref()));
        let (facts, queues, pools) = tokio::join!(
            tokio::time::timeout(PATIENCE, facts),
            app.driver.ask(Request::Queues { tenant: TENANT.into() }),
            app.driver.ask(Request::Pools)
        );
        let pools = match pools {
            Ok(Answer::Pools(pools)) => Some(pools),
            _ => None,
        };
        let queues = match queues {
            Ok(Answer::Queues(queues)) => Some(queues),
            _ => None,
        };
        let seen = Seen { queues, pools, facts: facts.ok().and_then(Result::ok).unwrap_or_default() };
        *kept = Some((Instant::now(), seen.clone()));
        seen
    }
}

pub async fn page(app: &App) -> Response {
    let mut page = Page::new();
    page.begin("leasehold_build_info", "gauge", "What runs; always 1.");
    let debug = if cfg!(debug_assertions) { "debug" } else { "release" };
    page.sample(&[("version", env!("CARGO_PKG_VERSION")), ("build", debug)], 1);
    page.one("leasehold_up_seconds", "gauge", "Time since the start.", app.started.elapsed().as_secs());
    app.counters.write(&mut page);
    let look = app.driver.look().await;
    if let Some(look) = &look {
        write_look(&mut page, look);
    }
    app.driver.store_watch().write(&mut page);
    let seen = app.metrics.seen(app).await;
    seen.facts.write(&mut page);
    queues::write(&mut page, seen.queues);
    pools::write(&mut page, seen.pools);
    upstreams::write(&mut page, &app.gateway);
    let mut response = Response::new(Body::full(page.into_text()));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8"));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}

fn write_look(page: &mut Page, look: &Look) {
    for (name, kind, help, value) in STATS {
        page.one(name, kind, help, value(&look.stats));
    }
    let (waited, ran) = (&look.stats.waited, &look.stats.ran);
    for (name, help, found) in [
        ("leasehold_queue_wait_seconds", "How long jobs had been due when they were handed out.", waited),
        ("leasehold_run_seconds", "How long attempts ran, from lease to completion or failure.", ran),
    ] {
        page.begin(name, "histogram", help);
        page.buckets(&[], &Durations::ENDS, 1e6, found.counts, found.sum);
    }
    page.begin("leasehold_marks_total", "counter", "Rare branches taken.");
    for (mark, count) in &look.marks {
        page.sample(&[("mark", &snake(&format!("{mark:?}")))], count);
    }
    let poisoned = u64::from(look.store_poisoned.is_some());
    page.one("leasehold_store_poisoned", "gauge", "1 while the store has stopped and is being opened anew.", poisoned);
    let warning = u64::from(look.store_warning.is_some());
    page.one("leasehold_store_warning", "gauge", "1 if the store is set up so that it may lose jobs.", warning);
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
    fn names_begin_alike() {
        assert!(STATS.iter().all(|(name, ..)| name.starts_with("leasehold_")));
        assert!(STATS.iter().all(|(name, kind, ..)| name.ends_with("_total") == (*kind == "counter")));
        assert_eq!(snake("BreakerOpened"), "breaker_opened");
    }
}
