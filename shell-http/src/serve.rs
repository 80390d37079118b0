//! The server: open the store, listen, and go away in order.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::config::Config;
use crate::dispatch;
use crate::drain::Serving;
use crate::driver::{self, Running};
use crate::listener::{self, Door};
use crate::routes::App;
use crate::store::{Address, AnyStore};
use crate::upstream::Gateway;

/// Between two looks at whether the replica lives.
const PULSE: Duration = Duration::from_secs(1);

/// Serves until a signal ends it. Blocks.
pub fn serve(config: &Config) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().thread_name("leasehold-http").enable_all().build()?;
    // The address first: a second server must not wait for the store's lock to learn that it is one.
    let listener = runtime.block_on(async { listener::bind(config.listen) })?;
    let address = listener.local_addr()?;
    let max_connections = listener::room_for(config.limits.max_connections);
    let running = driver::start(config.core(), driver::seed()?, config.record().as_ref(), |deliver| {
        AnyStore::open(&config.store, &config.redis, deliver)
    })?;
    let gateway = Gateway::new(&config.gateway, running.driver()).map_err(io::Error::other)?;
    let app = Arc::new(App::new(running.driver(), config.limits.clone(), !config.insecure_listen, Arc::new(gateway)));
    if config.store == Address::Memory {
        tracing::warn!("the store is in memory: every job is gone when this process ends");
    }
    if !address.ip().is_loopback() {
        tracing::warn!(%address, "others can reach this server, and nobody has to say who they are");
    }
    tracing::info!(%address, store = %config.store, "leasehold {} listens", env!("CARGO_PKG_VERSION"));
    let worker = format!("leasehold@{address}");
    let ended = runtime.block_on(run(listener, app, max_connections, config.grace, worker));
    stop(runtime, running);
    tracing::info!("ended");
    ended
}

/// The store is closed after the last handler, and before the process ends.
fn stop(runtime: tokio::runtime::Runtime, running: Running) {
    runtime.shutdown_timeout(Duration::from_millis(100));
    running.stop();
}

struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> io::Result<Self> {
        Ok(Signals { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

/// `worker`: what this server calls itself where it runs jobs.
async fn run(
    listener: TcpListener,
    app: Arc<App>,
    max_connections: usize,
    grace: Duration,
    worker: String,
) -> io::Result<()> {
    let mut signals = Signals::new()?;
    app.gateway.start();
    dispatch::start(app.driver.clone(), app.gateway.clone(), worker, app.limits.max_body);
    let serving = Serving::new(Door::new(listener, max_connections), app.clone());
    tokio::select! {
        () = serving.serve() => {}
        error = watch_over(&app) => return Err(error),
        () = signals.next() => {}
    }
    tracing::info!(grace_s = grace.as_secs(), "told to end: what is in work is finished");
    tokio::select! {
        // A drain has an end of its own, within the time of grace.
        () = serving.drain(grace) => Ok(()),
        () = signals.next() => {
            tracing::warn!("told to end again: at once");
            std::process::exit(1);
        }
    }
}

/// Returns when the replica has failed.
async fn watch_over(app: &App) -> io::Error {
    let mut pulse = tokio::time::interval(PULSE);
    loop {
        pulse.tick().await;
        // A store that has stopped is no reason to end: calls are answered 503 until it works again.
        if app.driver.look().await.is_none() {
            return io::Error::other("the replica has failed: this process can do nothing more");
        }
    }
}
