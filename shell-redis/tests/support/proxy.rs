//! A proxy between a store and its server: passes bytes on, and can cut, withhold and answer itself.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

/// What the proxy does with replies from now on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mode {
    Pass,
    /// The next call of a script is passed on and its reply swallowed; then the connection is cut.
    CutBeforeReply,
    /// The next call of a script is not passed on; the connection is cut.
    CutBeforeCall,
    /// Each call of a script is answered by this line instead of being passed on.
    Answer(String),
}

#[derive(Debug)]
struct Shared {
    mode: Mutex<Mode>,
    target: AtomicU16,
    end: AtomicBool,
    open: Mutex<Vec<TcpStream>>,
}

#[derive(Debug)]
pub struct Proxy {
    pub port: u16,
    shared: Arc<Shared>,
}

impl Proxy {
    pub fn start(target: u16) -> Proxy {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let shared = Arc::new(Shared {
            mode: Mutex::new(Mode::Pass),
            target: AtomicU16::new(target),
            end: AtomicBool::new(false),
            open: Mutex::new(Vec::new()),
        });
        let of = shared.clone();
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                if of.end.load(Ordering::SeqCst) {
                    return;
                }
                let Ok(server) = TcpStream::connect(("127.0.0.1", of.target.load(Ordering::SeqCst))) else { continue };
                let (client2, server2) = (client.try_clone().unwrap(), server.try_clone().unwrap());
                of.open.lock().unwrap().extend([client.try_clone().unwrap(), server.try_clone().unwrap()]);
                let (a, b) = (of.clone(), of.clone());
                let cut = Arc::new(AtomicBool::new(false));
                let cut2 = cut.clone();
                thread::spawn(move || calls(&a, client, server, &cut));
                thread::spawn(move || replies(&b, server2, client2, &cut2));
            }
        });
        Proxy { port, shared }
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}/0", self.port)
    }

    pub fn set(&self, mode: Mode) {
        *self.shared.mode.lock().unwrap() = mode;
    }

    pub fn mode(&self) -> Mode {
        self.shared.mode.lock().unwrap().clone()
    }

    /// New connections go there.
    pub fn aim(&self, target: u16) {
        self.shared.target.store(target, Ordering::SeqCst);
    }

    /// Cuts every connection.
    pub fn cut(&self) {
        for stream in self.shared.open.lock().unwrap().drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.end.store(true, Ordering::SeqCst);
        self.cut();
        // Wakes the listener, so that it sees the end.
        let _ = TcpStream::connect(("127.0.0.1", self.port));
    }
}

fn is_script(bytes: &[u8]) -> bool {
    bytes.windows(7).any(|w| w == b"EVALSHA") || bytes.windows(4).any(|w| w == b"EVAL")
}

fn calls(shared: &Shared, mut from: TcpStream, mut to: TcpStream, cut: &AtomicBool) {
    let mut buffer = vec![0; 64 * 1024];
    while let Ok(n @ 1..) = from.read(&mut buffer) {
        let bytes = &buffer[..n];
        if is_script(bytes) {
            let mut mode = shared.mode.lock().unwrap();
            match mode.clone() {
                Mode::Pass => {}
                Mode::CutBeforeReply => {
                    *mode = Mode::Pass;
                    cut.store(true, Ordering::SeqCst);
                }
                Mode::CutBeforeCall => {
                    *mode = Mode::Pass;
                    break;
                }
                Mode::Answer(line) => {
                    drop(mode);
                    if from.write_all(format!("-{line}\r\n").as_bytes()).is_err() {
                        break;
                    }
                    continue;
                }
            }
        }
        if to.write_all(bytes).is_err() {
            break;
        }
    }
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}

fn replies(_: &Shared, mut from: TcpStream, mut to: TcpStream, cut: &AtomicBool) {
    let mut buffer = vec![0; 64 * 1024];
    while let Ok(n @ 1..) = from.read(&mut buffer) {
        if cut.load(Ordering::SeqCst) || to.write_all(&buffer[..n]).is_err() {
            break;
        }
    }
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}
