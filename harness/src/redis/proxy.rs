//! A proxy between one server and the Redis, which cuts, delays, holds and drops what goes through it.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use super::lock;

/// Between two looks at whether what is held may go on.
const TICK: Duration = Duration::from_millis(10);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Pass,
    /// Everything comes so much later.
    Delay(Duration),
    /// Nothing goes through either way, and everything does afterwards.
    Stall,
    /// Calls arrive, and answers do not; when this ends the connections are cut.
    Swallow,
    /// Nobody gets through, and nobody stays.
    Refuse,
}

#[derive(Debug)]
struct Shared {
    mode: Mutex<Mode>,
    to: u16,
    ended: AtomicBool,
    next: AtomicU64,
    open: Mutex<BTreeMap<u64, (TcpStream, TcpStream)>>,
}

#[derive(Debug)]
pub struct Proxy {
    pub port: u16,
    shared: Arc<Shared>,
}

impl Proxy {
    /// # Errors
    /// If the port is not free.
    pub fn start(port: u16, to: u16) -> std::io::Result<Proxy> {
        let listener = TcpListener::bind(("127.0.0.1", port))?;
        let shared = Arc::new(Shared {
            mode: Mutex::new(Mode::Pass),
            to,
            ended: AtomicBool::new(false),
            next: AtomicU64::new(0),
            open: Mutex::default(),
        });
        let of = shared.clone();
        thread::spawn(move || {
            for client in listener.incoming() {
                if of.ended.load(Ordering::SeqCst) {
                    return;
                }
                // Whom it cannot connect it hangs up on, as a Redis that is not there would.
                if let Ok(client) = client
                    && *lock(&of.mode) != Mode::Refuse
                {
                    let _ = connect(&of, client);
                }
            }
        });
        Ok(Proxy { port, shared })
    }

    pub fn set(&self, mode: Mode) {
        let before = std::mem::replace(&mut *lock(&self.shared.mode), mode);
        if mode == Mode::Refuse || before == Mode::Swallow {
            self.cut();
        }
    }

    /// Cuts every connection.
    pub fn cut(&self) {
        for (a, b) in lock(&self.shared.open).values() {
            hang_up(a, b);
        }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::SeqCst);
        self.cut();
        // Wakes the listener, so that it sees the end.
        let _ = TcpStream::connect(("127.0.0.1", self.port));
    }
}

fn hang_up(a: &TcpStream, b: &TcpStream) {
    // It may be closed already.
    let _ = a.shutdown(Shutdown::Both);
    let _ = b.shutdown(Shutdown::Both);
}

fn connect(shared: &Arc<Shared>, client: TcpStream) -> std::io::Result<()> {
    let server = TcpStream::connect(("127.0.0.1", shared.to))?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let id = shared.next.fetch_add(1, Ordering::Relaxed);
    lock(&shared.open).insert(id, (client.try_clone()?, server.try_clone()?));
    for (from, to, replies) in [(client.try_clone()?, server.try_clone()?, false), (server, client, true)] {
        let shared = shared.clone();
        thread::spawn(move || {
            pump(&shared, &from, &to, replies);
            hang_up(&from, &to);
            lock(&shared.open).remove(&id);
        });
    }
    Ok(())
}

fn pump(shared: &Shared, mut from: &TcpStream, mut to: &TcpStream, replies: bool) {
    let mut buffer = vec![0; 64 * 1024];
    while let Ok(n @ 1..) = from.read(&mut buffer) {
        let mut waited = Duration::ZERO;
        let passes = loop {
            if shared.ended.load(Ordering::SeqCst) {
                return;
            }
            let mode = *lock(&shared.mode);
            match mode {
                Mode::Delay(time) if waited < time => {}
                Mode::Stall => {}
                Mode::Pass | Mode::Delay(_) => break true,
                Mode::Swallow => break !replies,
                Mode::Refuse => return,
            }
            thread::sleep(TICK);
            waited += TICK;
        };
        if passes && buffer.get(..n).is_none_or(|bytes| to.write_all(bytes).is_err()) {
            return;
        }
    }
}
