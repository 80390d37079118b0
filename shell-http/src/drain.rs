//! Going away in order, so that no client that repeats what is answered 503 meets anything worse.
//!
//! A connection cannot be closed while its client may just be sending into it: that call would be
//! lost. So the client closes it, after an answer that says `Connection: close`:
//!
//! ```text
//! signal   claims and polls get 503 `draining`; everything else is served; each answer is the last of
//!          its connection. Ends when no job is running any more, or near the end of the grace.
//! closing  only what ends or extends a lease is still taken: who wants something else hears to come
//!          later, so that nobody connects when
//! closed   the listener goes. What came before is answered; then idle connections are closed.
//! ```

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use leasehold_core::job::record::Status;
use leasehold_core::{Request, Response};
use tokio::net::TcpStream;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until, timeout, timeout_at};

use crate::connection::{self, Place};
use crate::listener::Door;
use crate::routes::App;
use crate::wire::submit::TENANT;
use crate::wire::view;

/// Between two looks at whether jobs are running.
const LOOK: Duration = Duration::from_millis(250);
/// How long before the listener closes clients hear to come later. It is shorter than the
/// `Retry-After` that they hear.
const CLOSING: Duration = Duration::from_millis(500);
/// From accepting the last connection to the end of waiting for its call.
const LAST_CALL: Duration = Duration::from_millis(200);
/// For giving back the slots of calls that are stopped at the end.
const LAST_SLOTS: Duration = Duration::from_millis(1_500);
/// Kept of the grace for the end, if it is long enough.
const RESERVE: Duration = Duration::from_secs(3);

/// A server at work.
#[derive(Debug)]
pub struct Serving {
    door: Door,
    app: Arc<App>,
    /// Tells connections that the server waits for no more calls.
    ending: watch::Sender<bool>,
    /// Every connection holds a sender: when all are gone, the receiver knows.
    alive: mpsc::Sender<()>,
    all_gone: mpsc::Receiver<()>,
}

impl Serving {
    pub fn new(door: Door, app: Arc<App>) -> Self {
        let (alive, all_gone) = mpsc::channel(1);
        Serving { door, app, ending: watch::Sender::new(false), alive, all_gone }
    }

    /// Takes connections until it is dropped.
    pub async fn serve(&self) {
        loop {
            let (stream, place) = self.door.next().await;
            if place.spare {
                self.app.counters.spare_connections.fetch_add(1, Ordering::Relaxed);
            }
            spawn(stream, place, &self.app, &self.ending, &self.alive);
        }
    }

    /// Ends within the time of grace.
    pub async fn drain(self, grace: Duration) {
        let end = Instant::now() + grace;
        // An answer that is begun at the last moment is also to be read.
        let closing = end.checked_sub(RESERVE.min(grace / 2)).unwrap_or(end);
        self.app.draining.store(true, Ordering::Relaxed);
        tokio::select! {
            () = self.serve() => {}
            // The replica first: polls that wait are answered, and it hands out no more.
            () = async { let _ = self.app.driver.ask(Request::Drain).await; self.idle().await } => {}
            () = sleep_until(closing) => tracing::info!("jobs are still running: their workers go on after the restart"),
        }
        if self.door.open() > 0 {
            self.app.closing.store(true, Ordering::Relaxed);
            // Bounded by the grace, in which there is room for it.
            let _ = timeout(CLOSING.min(grace / 4), self.serve()).await;
        }
        let Serving { door, app, ending, alive, mut all_gone } = self;
        for (stream, place) in door.close() {
            spawn(stream, place, &app, &ending, &alive);
        }
        drop(alive);
        let _ = timeout(LAST_CALL.min(grace / 8), all_gone.recv()).await;
        // Without connections there is nobody to tell.
        let _ = ending.send(true);
        // Calls to upstreams are stopped a moment before, so that their slots are given back.
        let last = end.checked_sub(LAST_SLOTS.min(grace / 8)).unwrap_or(end);
        if timeout_at(last, all_gone.recv()).await.is_ok() {
            return app.gateway.end(end).await;
        }
        // Whoever waits for no upstream has the whole of the grace.
        let (served, ()) = tokio::join!(timeout_at(end, all_gone.recv()), app.gateway.end(end));
        if served.is_err() {
            tracing::warn!("what is in work now is left: the time of grace is over");
        }
    }

    /// Returns when no job is running, or when that cannot be known.
    async fn idle(&self) {
        loop {
            let Ok(Response::Queues(queues)) = self.app.driver.ask(Request::Queues { tenant: TENANT.into() }).await
            else {
                return;
            };
            if queues.iter().all(|q| view::depth(q, |_, s| s == Status::Running) == 0) {
                return;
            }
            tokio::time::sleep(LOOK).await;
        }
    }
}

fn spawn(stream: TcpStream, place: Place, app: &Arc<App>, ending: &watch::Sender<bool>, alive: &mpsc::Sender<()>) {
    let (app, ending, alive) = (app.clone(), ending.subscribe(), alive.clone());
    tokio::spawn(async move {
        connection::serve(stream, app, place, ending).await;
        drop(alive);
    });
}
