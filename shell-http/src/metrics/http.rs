//! Calls over HTTP, counted by route.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use hyper::StatusCode;

use super::text::{Histogram, Page, Shape};
use crate::routes::ROUTES;

/// Statuses that are counted by themselves; the last is for any other.
const STATUSES: [u16; 17] = [200, 201, 204, 400, 401, 403, 404, 405, 408, 409, 413, 414, 422, 429, 500, 503, 0];
const CLASSES: [&str; 3] = ["2xx", "4xx", "5xx"];

/// Microseconds. Claims and readers of events may wait on purpose for up to a minute.
static TIMES: Shape = Shape {
    ends: &[
        1_000, 2_000, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000, 2_500_000, 5_000_000,
        60_000_000,
    ],
    scale: 1e6,
};

/// Calls over HTTP.
#[derive(Debug)]
pub struct Counters {
    /// For each route, and last for what was no route.
    routes: Vec<PerRoute>,
    pub connections: AtomicU64,
    pub open_connections: AtomicU64,
    /// Connections beyond the limit: told to come again.
    pub spare_connections: AtomicU64,
    /// Calls that ended in a panic.
    pub panics: AtomicU64,
}

#[derive(Debug)]
struct PerRoute {
    statuses: [AtomicU64; STATUSES.len()],
    times: [Histogram; CLASSES.len()],
}

impl PerRoute {
    fn new() -> Self {
        PerRoute { statuses: Default::default(), times: std::array::from_fn(|_| Histogram::new(&TIMES)) }
    }
}

impl Default for Counters {
    fn default() -> Self {
        Counters::new()
    }
}

impl Counters {
    pub fn new() -> Self {
        let routes = (0..=ROUTES.len()).map(|_| PerRoute::new()).collect();
        Counters {
            routes,
            connections: AtomicU64::new(0),
            open_connections: AtomicU64::new(0),
            spare_connections: AtomicU64::new(0),
            panics: AtomicU64::new(0),
        }
    }

    pub fn count(&self, route: Option<usize>, status: StatusCode, took: Duration) {
        let Some(per) = self.routes.get(route.unwrap_or(ROUTES.len())) else { return };
        let at = STATUSES.iter().position(|s| *s == status.as_u16()).unwrap_or(STATUSES.len() - 1);
        per.statuses[at].fetch_add(1, Relaxed);
        let class = match status.as_u16() {
            ..400 => 0,
            400..500 => 1,
            500.. => 2,
        };
        per.times[class].observe_time(took);
    }

    pub(super) fn write(&self, page: &mut Page) {
        page.begin("leasehold_http_requests_total", "counter", "Calls answered, by route and status.");
        let named = || self.routes.iter().enumerate().map(|(n, per)| (name(n), per));
        for ((method, path), per) in named() {
            for (status, count) in STATUSES.iter().zip(&per.statuses) {
                let count = count.load(Relaxed);
                if count > 0 {
                    let status = status.to_string();
                    page.sample(&[("method", method), ("route", path), ("status", &status)], count);
                }
            }
        }
        let help = "Time from a call's head to its answer's, by route and class of status.";
        page.begin("leasehold_http_request_seconds", "histogram", help);
        for ((method, path), per) in named() {
            for (class, times) in CLASSES.iter().zip(&per.times) {
                if !times.is_empty() {
                    page.histogram(&[("method", method), ("route", path), ("status", class)], times);
                }
            }
        }
        let (accepted, open) = (self.connections.load(Relaxed), self.open_connections.load(Relaxed));
        page.one("leasehold_http_connections_total", "counter", "Connections accepted.", accepted);
        page.one("leasehold_http_connections", "gauge", "Connections open.", open);
        let (spare, panics) = (self.spare_connections.load(Relaxed), self.panics.load(Relaxed));
        let help = "Connections beyond `max_connections`, told to come again.";
        page.one("leasehold_http_connections_spare_total", "counter", help, spare);
        page.one("leasehold_http_panics_total", "counter", "Calls that ended in a panic.", panics);
    }
}

fn name(route: usize) -> (&'static str, &'static str) {
    ROUTES.get(route).map_or(("any", "unknown"), |r| (r.method.as_str(), r.path))
}
