//! Where connections come in, and how many are let in.
//!
//! Beyond `max_connections` there are a few spare places. Who gets one is answered 503
//! `too_many_connections`, unless it asks after the server's health, and is closed; so a client hears
//! what is the matter, and a health check is never turned away for long. What is beyond those waits in
//! the system's queue.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::Semaphore;

use crate::connection::Place;
use crate::limits::{OTHER_FILES, SPARE_CONNECTIONS};

/// Wait after the system had no more file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Connections that the system keeps for us while we are busy.
const BACKLOG: u32 = 4_096;

pub fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    // A restart does not wait for connections of the process before.
    socket.set_reuseaddr(true)?;
    let named = |e: io::Error| io::Error::new(e.kind(), format!("cannot listen on {address}: {e}"));
    socket.bind(address).map_err(named)?;
    socket.listen(BACKLOG).map_err(named)
}

/// Asks the system for as many files as it gives, and says how many connections that allows.
pub fn room_for(max_connections: usize) -> usize {
    let limit = getrlimit(Resource::Nofile);
    if limit.current != limit.maximum {
        let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
        if let Err(error) = setrlimit(Resource::Nofile, raised) {
            tracing::warn!(%error, "the limit of open files could not be raised");
        }
    }
    // None is no limit.
    let Some(files) = getrlimit(Resource::Nofile).current else { return max_connections };
    let room = connections(files);
    if room < max_connections {
        tracing::warn!(
            "the limit of {files} open files is too low for max_connections = {max_connections}: {room} are \
             served at once. Raise the limit (LimitNOFILE, ulimit -Hn)"
        );
    }
    room.min(max_connections)
}

/// The rest is for the store, and for those that are turned away.
fn connections(files: u64) -> usize {
    let others = OTHER_FILES + SPARE_CONNECTIONS as u64;
    usize::try_from(files.saturating_sub(others).max(files / 4).max(1)).unwrap_or(usize::MAX)
}

/// The listener and its places.
#[derive(Debug)]
pub struct Door {
    listener: TcpListener,
    places: Arc<Semaphore>,
    max: usize,
    crowded: AtomicBool,
}

impl Door {
    pub fn new(listener: TcpListener, max: usize) -> Self {
        let max = max.min(Semaphore::MAX_PERMITS - SPARE_CONNECTIONS);
        let places = Arc::new(Semaphore::new(max + SPARE_CONNECTIONS));
        Door { listener, places, max, crowded: AtomicBool::new(false) }
    }

    /// Connections that are open.
    pub fn open(&self) -> usize {
        (self.max + SPARE_CONNECTIONS).saturating_sub(self.places.available_permits())
    }

    /// The next connection, as soon as there is a place for it. Nothing is lost if this is dropped.
    pub async fn next(&self) -> (TcpStream, Place) {
        loop {
            let Ok(permit) = self.places.clone().acquire_owned().await else {
                // Never: nobody closes it.
                return std::future::pending().await;
            };
            match self.listener.accept().await {
                Ok((stream, _)) => {
                    let spare = self.places.available_permits() < SPARE_CONNECTIONS;
                    self.tell(spare);
                    return (stream, Place { permit, spare });
                }
                Err(error) => {
                    tracing::warn!(%error, "a connection could not be accepted");
                    drop(permit);
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    /// Stops listening. Returns those that the system has let in and nobody has taken yet: they would
    /// be reset with the listener.
    pub fn close(self) -> Vec<(TcpStream, Place)> {
        let Ok(listener) = self.listener.into_std() else { return Vec::new() };
        let mut waiting = Vec::new();
        // The last look and the end stand next to each other.
        while let Ok((stream, _)) = listener.accept() {
            waiting.push(stream);
        }
        drop(listener);
        let taken = |stream: std::net::TcpStream| {
            stream.set_nonblocking(true).ok()?;
            let permit = self.places.clone().try_acquire_owned().ok()?;
            Some((TcpStream::from_std(stream).ok()?, Place { permit, spare: false }))
        };
        waiting.into_iter().filter_map(taken).collect()
    }

    /// Once for each time that it gets crowded.
    fn tell(&self, spare: bool) {
        if spare && !self.crowded.swap(true, Ordering::Relaxed) {
            tracing::warn!("all {} connections are taken: others are told to come again", self.max);
        }
        // Not at each place that gets free: there would be a line for every other connection.
        if self.places.available_permits() > SPARE_CONNECTIONS + self.max / 10 {
            self.crowded.store(false, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_left_for_the_store() {
        for (files, expected) in [(20_000, 19_424), (1_024, 448), (256, 64), (1, 1)] {
            assert_eq!(connections(files), expected);
        }
    }
}
