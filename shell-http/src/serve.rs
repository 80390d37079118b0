//! The server: open the store, listen, and go away in order.

use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use leasehold_core::Request;
use tokio::net::{TcpListener, TcpStream};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{mpsc, watch};

use crate::config::Config;
use crate::driver::{self, Running};
use crate::routes::{App, handle};
use crate::store::{Address, AnyStore};

/// A connection on which no call's head comes for so long is closed.
const IDLE: Duration = Duration::from_secs(120);
/// Wait after the system had no more file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Between two looks at whether the replica lives.
const PULSE: Duration = Duration::from_secs(1);
/// Connections that the system keeps for us while we are busy.
const BACKLOG: u32 = 4_096;

/// Serves until a signal ends it. Blocks.
pub fn serve(config: &Config) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().thread_name("leasehold-http").enable_all().build()?;
    // The address first: a second server must not wait for the store's lock to learn that it is one.
    let listener = runtime.block_on(async { bind(config) })?;
    let address = listener.local_addr()?;
    let running = driver::start(config.core(), driver::seed()?, |deliver| AnyStore::open(&config.store, deliver))?;
    let app = Arc::new(App::new(running.driver(), config.max_body, !config.insecure_listen));
    if config.store == Address::Memory {
        tracing::warn!("the store is in memory: every job is gone when this process ends");
    }
    if !address.ip().is_loopback() {
        tracing::warn!(%address, "others can reach this server, and nobody has to say who they are");
    }
    tracing::info!(%address, store = %config.store, "leasehold {} listens", env!("CARGO_PKG_VERSION"));
    let ended = runtime.block_on(run(listener, app, config.grace));
    stop(runtime, running);
    tracing::info!("ended");
    ended
}

/// The store is closed after the last handler, and before the process ends.
fn stop(runtime: tokio::runtime::Runtime, running: Running) {
    runtime.shutdown_timeout(Duration::from_millis(100));
    running.stop();
}

fn bind(config: &Config) -> io::Result<TcpListener> {
    let socket =
        if config.listen.is_ipv4() { tokio::net::TcpSocket::new_v4() } else { tokio::net::TcpSocket::new_v6() }?;
    // A restart does not wait for connections of the process before.
    socket.set_reuseaddr(true)?;
    let named = |e: io::Error| io::Error::new(e.kind(), format!("cannot listen on {}: {e}", config.listen));
    socket.bind(config.listen).map_err(named)?;
    socket.listen(BACKLOG).map_err(named)
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

async fn run(listener: TcpListener, app: Arc<App>, grace: Duration) -> io::Result<()> {
    let mut signals = Signals::new()?;
    let (drain, draining) = watch::channel(false);
    // Every connection holds a sender: when all are gone, the receiver knows.
    let (alive, mut all_gone) = mpsc::channel::<()>(1);
    let mut pulse = tokio::time::interval(PULSE);
    let mut poisoned = false;
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    tokio::spawn(connection(stream, app.clone(), draining.clone(), alive.clone()));
                }
                Err(error) => {
                    tracing::warn!(%error, "a connection could not be accepted");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            },
            () = signals.next() => break,
            _ = pulse.tick() => {
                let Some(look) = app.driver.look().await else {
                    return Err(io::Error::other("the replica has failed: this process can do nothing more"));
                };
                if let Some(why) = look.store_poisoned.filter(|_| !poisoned) {
                    // The process stays, to say so honestly: every call is answered 503.
                    tracing::error!("the store works no more until this process is restarted: {why}");
                    poisoned = true;
                }
            },
        }
    }
    tracing::info!(grace_s = grace.as_secs(), "told to end: what is in work is finished");
    drop((listener, alive, draining));
    app.draining.store(true, Ordering::Relaxed);
    let finish = async {
        // The replica first, so that polls that wait are answered; then no new calls.
        let _ = app.driver.ask(Request::Drain).await;
        // Without connections there is nobody to tell.
        let _ = drain.send(true);
        all_gone.recv().await;
    };
    tokio::select! {
        () = finish => {}
        () = tokio::time::sleep(grace) => tracing::warn!("what is in work now is left: the time of grace is over"),
        () = signals.next() => {
            tracing::warn!("told to end again: at once");
            std::process::exit(1);
        }
    }
    Ok(())
}

async fn connection(stream: TcpStream, app: Arc<App>, mut draining: watch::Receiver<bool>, alive: mpsc::Sender<()>) {
    // Answers are small and wait for nothing.
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "a connection was gone at once");
        return;
    }
    app.counters.connections.fetch_add(1, Ordering::Relaxed);
    app.counters.open_connections.fetch_add(1, Ordering::Relaxed);
    let _open = Open(app.clone());
    let service = service_fn(move |request| handle(app.clone(), request));
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(IDLE);
    let mut connection = pin!(builder.serve_connection(TokioIo::new(stream), service));
    let result = tokio::select! {
        result = connection.as_mut() => result,
        () = drained(&mut draining) => {
            // The call in work is still answered, and then the connection closed.
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = result {
        tracing::debug!(%error, "a connection broke off");
    }
    drop(alive);
}

async fn drained(draining: &mut watch::Receiver<bool>) {
    // An error means that the server is past caring.
    let _ = draining.wait_for(|d| *d).await;
}

struct Open(Arc<App>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.counters.open_connections.fetch_sub(1, Ordering::Relaxed);
    }
}
