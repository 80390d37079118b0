//! A network between a client and the server that loses what a test wants it to lose.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard};

/// What happens to calls whose path holds a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// The connection breaks before the server hears of it.
    Unheard,
    /// The server does it, and the connection breaks instead of the answer.
    Unanswered,
    /// The server does it, and no answer ever comes.
    Silence,
}

#[derive(Clone, Copy, Debug)]
struct Rule {
    path: &'static str,
    fate: Fate,
    left: usize,
}

#[derive(Debug, Default)]
struct State {
    rules: Vec<Rule>,
    struck: usize,
}

/// Lives as long as the test.
#[derive(Clone, Debug)]
pub struct Proxy {
    pub address: SocketAddr,
    state: Arc<Mutex<State>>,
}

impl Proxy {
    pub fn before(server: SocketAddr) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let proxy = Proxy { address: listener.local_addr().unwrap(), state: Arc::default() };
        let own = proxy.clone();
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let own = own.clone();
                std::thread::spawn(move || {
                    // Whoever hangs up is through.
                    let _ = own.serve(client, server);
                });
            }
        });
        proxy
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// The next so many calls to such a path meet this fate.
    pub fn strike(&self, path: &'static str, fate: Fate, times: usize) {
        self.lock().rules.push(Rule { path, fate, left: times });
    }

    pub fn heal(&self) {
        self.lock().rules.clear();
    }

    /// Calls that have met a fate.
    pub fn struck(&self) -> usize {
        self.lock().struck
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    fn fate(&self, head: &str) -> Option<Fate> {
        let mut state = self.lock();
        let path = head.split(' ').nth(1).unwrap_or_default();
        let rule = state.rules.iter_mut().find(|r| r.left > 0 && path.contains(r.path))?;
        rule.left -= 1;
        let fate = rule.fate;
        state.struck += 1;
        Some(fate)
    }

    fn serve(&self, client: TcpStream, server: SocketAddr) -> std::io::Result<()> {
        let up = TcpStream::connect(server)?;
        client.set_nodelay(true)?;
        up.set_nodelay(true)?;
        let fate = Arc::new(Mutex::new(None));
        let (down, to_client, of_call) = (up.try_clone()?, client.try_clone()?, fate.clone());
        let answers = std::thread::spawn(move || {
            // An end of either side is the end of both.
            let _ = answers(down, &to_client, &of_call);
            let _ = to_client.shutdown(Shutdown::Both);
        });
        let served = self.calls(client, &up, &fate);
        let _ = up.shutdown(Shutdown::Both);
        let _ = answers.join();
        served
    }

    fn calls(&self, client: TcpStream, mut up: &TcpStream, fate: &Mutex<Option<Fate>>) -> std::io::Result<()> {
        let mut client = BufReader::new(client);
        loop {
            let mut call = String::new();
            let mut len = 0;
            loop {
                let start = call.len();
                if client.read_line(&mut call)? == 0 {
                    return Ok(());
                }
                let line = call[start..].trim().to_ascii_lowercase();
                if let Some(value) = line.strip_prefix("content-length:") {
                    len = value.trim().parse().unwrap();
                }
                if line.is_empty() {
                    break;
                }
            }
            let mut body = vec![0; len];
            client.read_exact(&mut body)?;
            let struck = self.fate(&call);
            if struck == Some(Fate::Unheard) {
                return Ok(());
            }
            *fate.lock().unwrap() = struck;
            up.write_all(call.as_bytes())?;
            up.write_all(&body)?;
        }
    }
}

fn answers(mut down: TcpStream, mut client: &TcpStream, fate: &Mutex<Option<Fate>>) -> std::io::Result<()> {
    let mut piece = [0; 16 * 1024];
    loop {
        let n = down.read(&mut piece)?;
        if n == 0 {
            return Ok(());
        }
        match *fate.lock().unwrap() {
            None => client.write_all(&piece[..n])?,
            Some(Fate::Silence) => {}
            Some(Fate::Unanswered | Fate::Unheard) => return Ok(()),
        }
    }
}
