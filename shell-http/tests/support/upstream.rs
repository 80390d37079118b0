//! A real upstream on a real socket that counts its own requests, and misbehaves as its path says.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use serde_json::{Value, json};

/// What a path makes it do:
///
/// ```text
/// /echo          200: method, path, headers and body as JSON
/// /slow          waits until it is let go, or `?ms=N`, then as /echo
/// /events?n=N    N server-sent events, each after it was let go (or at once with &free)
/// /hang          never answers
/// /half          a head, half of a body, and then nothing
/// /cut           a head, half of a body, and hangs up
/// /close         hangs up instead of an answer
/// /garbage       what is not HTTP
/// /status/N      answers N; with `?after=S` also Retry-After
/// ```
#[derive(Clone)]
pub struct Upstream {
    pub address: SocketAddr,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    counts: Counts,
    /// Those who wait may go, so many of them.
    go: usize,
    /// Every request is answered by what this path would.
    always: Option<String>,
    requests: Vec<Seen>,
}

/// A request as it came.
#[derive(Clone, Debug)]
pub struct Seen {
    pub path: String,
    pub headers: BTreeMap<String, String>,
    pub body: Vec<u8>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub now: BTreeMap<String, usize>,
    pub most: BTreeMap<String, usize>,
    pub most_in_all: usize,
    pub total: usize,
}

impl Counts {
    pub fn in_all(&self) -> usize {
        self.now.values().sum()
    }

    pub fn most_of(&self, class: &str) -> usize {
        self.most.get(class).copied().unwrap_or_default()
    }
}

impl Upstream {
    pub fn start() -> Upstream {
        Upstream::on(TcpListener::bind("127.0.0.1:0").unwrap())
    }

    pub fn on(listener: TcpListener) -> Upstream {
        let upstream = Upstream { address: listener.local_addr().unwrap(), shared: Arc::default() };
        let own = upstream.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let own = own.clone();
                std::thread::spawn(move || {
                    // Whoever hangs up is through.
                    let _ = own.serve(stream);
                });
            }
        });
        upstream
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().unwrap()
    }

    pub fn counts(&self) -> Counts {
        self.lock().counts.clone()
    }

    pub fn now(&self) -> usize {
        self.counts().in_all()
    }

    pub fn total(&self) -> usize {
        self.counts().total
    }

    pub fn last(&self) -> Seen {
        self.lock().requests.last().unwrap().clone()
    }

    pub fn requests(&self) -> Vec<Seen> {
        self.lock().requests.clone()
    }

    /// So many more of those who wait may go on.
    pub fn let_go(&self, n: usize) {
        self.lock().go += n;
        self.shared.changed.notify_all();
    }

    /// From now on every request is answered as this path would be; `None`: by its own path.
    pub fn always(&self, path: Option<&str>) {
        self.lock().always = path.map(str::to_owned);
    }

    /// Waits for its turn, and for the client to go meanwhile.
    fn wait(&self, stream: &TcpStream) -> std::io::Result<()> {
        let mut state = self.lock();
        loop {
            if state.go > 0 {
                state.go -= 1;
                return Ok(());
            }
            (state, _) = self.shared.changed.wait_timeout(state, Duration::from_millis(10)).unwrap();
            if is_gone(stream) {
                return Err(std::io::ErrorKind::ConnectionAborted.into());
            }
        }
    }

    fn serve(&self, stream: TcpStream) -> std::io::Result<()> {
        stream.set_nodelay(true)?;
        let mut reader = BufReader::new(stream);
        while let Some(request) = read(&mut reader)? {
            let class = request.headers.get("leasehold-class").cloned().unwrap_or_default();
            let path = {
                let mut state = self.lock();
                let counts = &mut state.counts;
                counts.total += 1;
                *counts.now.entry(class.clone()).or_default() += 1;
                let now = counts.now[&class];
                let most = counts.most.entry(class.clone()).or_default();
                *most = now.max(*most);
                counts.most_in_all = counts.in_all().max(counts.most_in_all);
                state.requests.push(request.clone());
                state.always.clone().unwrap_or_else(|| request.path.clone())
            };
            let counted = Counted { upstream: self, class };
            self.answer(&path, &request, reader.get_mut(), counted)?;
        }
        Ok(())
    }

    fn answer(&self, path: &str, request: &Seen, stream: &mut TcpStream, counted: Counted<'_>) -> std::io::Result<()> {
        let (path, query) = path.split_once('?').unwrap_or((path, ""));
        let number = |name: &str| -> Option<u64> {
            query.split('&').find_map(|p| p.strip_prefix(name)?.strip_prefix('=')?.parse().ok())
        };
        match path {
            "/slow" => {
                match number("ms") {
                    Some(ms) => std::thread::sleep(Duration::from_millis(ms)),
                    None => self.wait(stream)?,
                }
                // Whoever has read the answer may send the next call before this thread goes on.
                drop(counted);
                echo(request, stream)
            }
            "/events" => {
                let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
                stream.write_all(head.as_bytes())?;
                for n in 0..number("n").unwrap_or(3) {
                    if !query.contains("free") {
                        self.wait(stream)?;
                    }
                    let event = format!("data: {n}\n\n");
                    stream.write_all(format!("{:x}\r\n{event}\r\n", event.len()).as_bytes())?;
                }
                stream.write_all(b"0\r\n\r\n")
            }
            "/hang" => until_gone(stream),
            "/half" => {
                stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf")?;
                until_gone(stream)
            }
            "/cut" => {
                stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf")?;
                Err(std::io::ErrorKind::ConnectionAborted.into())
            }
            "/close" => Err(std::io::ErrorKind::ConnectionAborted.into()),
            "/garbage" => {
                stream.write_all(b"\x16\x03\x01 this is no HTTP\r\n\r\n")?;
                Err(std::io::ErrorKind::ConnectionAborted.into())
            }
            _ => match path.strip_prefix("/status/") {
                Some(status) => {
                    let after = number("after").map(|s| format!("retry-after: {s}\r\n")).unwrap_or_default();
                    let body = format!("answer {status}");
                    let head = format!("HTTP/1.1 {status} x\r\n{after}content-length: {}\r\n\r\n{body}", body.len());
                    stream.write_all(head.as_bytes())
                }
                None => echo(request, stream),
            },
        }
    }
}

struct Counted<'a> {
    upstream: &'a Upstream,
    class: String,
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        if let Some(now) = self.upstream.lock().counts.now.get_mut(&self.class) {
            *now -= 1;
        }
    }
}

fn echo(request: &Seen, stream: &mut TcpStream) -> std::io::Result<()> {
    let body = json!({
        "path": request.path,
        "headers": request.headers,
        "body": String::from_utf8_lossy(&request.body),
    });
    let body = body.to_string();
    let head = format!("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n", body.len());
    stream.write_all(format!("{head}{body}").as_bytes())
}

fn is_gone(stream: &TcpStream) -> bool {
    stream.set_nonblocking(true).unwrap();
    let gone = match stream.peek(&mut [0]) {
        Ok(n) => n == 0,
        Err(error) => error.kind() != std::io::ErrorKind::WouldBlock,
    };
    stream.set_nonblocking(false).unwrap();
    gone
}

fn until_gone(stream: &mut TcpStream) -> std::io::Result<()> {
    let mut rest = [0; 64];
    while stream.read(&mut rest)? > 0 {}
    Err(std::io::ErrorKind::ConnectionAborted.into())
}

fn read(reader: &mut BufReader<TcpStream>) -> std::io::Result<Option<Seen>> {
    let mut line = String::new();
    if reader.read_line(&mut line)? == 0 {
        return Ok(None);
    }
    let mut request = Seen {
        path: line.split(' ').nth(1).unwrap_or_default().to_owned(),
        headers: BTreeMap::from([(":method".into(), line.split(' ').next().unwrap_or_default().to_owned())]),
        body: Vec::new(),
    };
    loop {
        line.clear();
        reader.read_line(&mut line)?;
        let Some((name, value)) = line.trim_end().split_once(':') else { break };
        request.headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
    }
    if request.headers.contains_key("transfer-encoding") {
        loop {
            line.clear();
            reader.read_line(&mut line)?;
            let size = usize::from_str_radix(line.trim(), 16).map_err(std::io::Error::other)?;
            let from = request.body.len();
            request.body.resize(from + size, 0);
            reader.read_exact(&mut request.body[from..])?;
            line.clear();
            reader.read_line(&mut line)?;
            if size == 0 {
                break;
            }
        }
    } else if let Some(len) = request.headers.get("content-length") {
        request.body.resize(len.parse().unwrap(), 0);
        reader.read_exact(&mut request.body)?;
    }
    Ok(Some(request))
}

/// The body of an answer of /echo.
pub fn echoed(body: &[u8]) -> Value {
    serde_json::from_slice(body).unwrap()
}
