//! Jobs that the server runs itself: for each route a loop that takes as many as there are slots for, and for
//! each job a task that calls its upstream.
//!
//! Which job may run now, on which upstream and under which slots is the replica's business. Reading order: [`start`],
//! `run` (one job), `verdict` (what an answer means).

mod run;
mod verdict;

use std::sync::Arc;
use std::time::{Duration, Instant};

use leasehold_core::request::Dispatch;
use leasehold_core::{Failure, Request, Response as Answer};
use tokio::time::sleep;

use crate::driver::Driver;
use crate::upstream::settings::Route;
use crate::upstream::{Gateway, Upstream};

/// Jobs taken at once; their payloads are in memory.
const AT_ONCE: usize = 32;
/// A question for jobs waits so long: then it is looked again which upstreams can be called.
const WAIT_MS: u64 = 5_000;
/// Between two looks while no upstream can be called, or nothing can be asked.
const PAUSE: Duration = Duration::from_millis(500);

/// What the tasks of a server share.
#[derive(Debug)]
struct Work {
    driver: Driver,
    gateway: Arc<Gateway>,
    worker: String,
    /// Bytes of an answer that are kept as a result.
    max_result: u64,
}

/// Runs jobs of the configured routes from now on.
pub fn start(driver: Driver, gateway: Arc<Gateway>, worker: String, max_result: u64) {
    let routes = gateway.routes.clone();
    let work = Arc::new(Work { driver, gateway, worker, max_result });
    for route in routes {
        let work = work.clone();
        tokio::spawn(async move {
            tokio::select! {
                () = take(&work, &route) => {}
                // What a question that is dropped here may have been answered lapses with its lease: the server
                // drains before it ends, and takes nothing then.
                () = work.gateway.ended() => {}
            }
        });
    }
}

/// Takes jobs of one route until the server drains.
async fn take(work: &Arc<Work>, route: &Route) {
    loop {
        let now = Instant::now();
        let usable: Vec<&Arc<Upstream>> =
            work.gateway.upstreams.iter().filter(|u| route.upstreams.iter().any(|n| n == u.name())).collect();
        let usable: Vec<&Arc<Upstream>> = usable.into_iter().filter(|u| u.look(now).is_ok()).collect();
        if usable.is_empty() {
            sleep(PAUSE).await;
            continue;
        }
        // One call tries an upstream that did not answer lately.
        let max = if usable.iter().any(|u| u.is_open()) { 1 } else { AT_ONCE };
        let request = Request::Dispatch(Box::new(Dispatch {
            worker: work.worker.clone(),
            queues: route.tenants.iter().map(|tenant| (tenant.clone(), route.queue.clone())).collect(),
            upstreams: usable.iter().map(|u| u.name().to_owned()).collect(),
            max,
            wait_ms: WAIT_MS,
        }));
        match work.driver.ask(request).await {
            Ok(Answer::Dispatched(jobs)) => {
                for job in jobs {
                    run::start(work.clone(), job);
                }
            }
            Err(Failure::Draining { .. }) => return,
            Ok(_) => sleep(PAUSE).await,
            Err(failure) => {
                tracing::debug!(queue = route.queue, code = failure.code(), "no jobs can be taken for now");
                sleep(PAUSE).await;
            }
        }
    }
}
