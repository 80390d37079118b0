//! A real server in a process of its own, and a plain HTTP client.

#![allow(dead_code, clippy::unwrap_used, clippy::panic)]

pub mod cli;
pub mod proxy;
pub mod upstream;

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use serde_json::Value;

pub const BINARY: &str = env!("CARGO_BIN_EXE_leasehold");

/// A folder that goes away with its owner.
#[derive(Debug)]
pub struct Folder(pub PathBuf);

impl Folder {
    pub fn new() -> Folder {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("leasehold-test-{}-{n}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // A test that failed half way may have left it in any state.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A server process. Killed when dropped.
#[derive(Debug)]
pub struct Server {
    child: Child,
    pub address: SocketAddr,
}

impl Server {
    /// On a free port, with its store in the folder.
    pub fn start(folder: &Folder, flags: &[&str]) -> Server {
        Server::at("127.0.0.1:0".parse().unwrap(), folder, flags)
    }

    /// With a configuration file.
    pub fn configured(folder: &Folder, toml: &str) -> Server {
        let file = folder.path().join("leasehold.toml");
        std::fs::write(&file, toml).unwrap();
        Server::start(folder, &["--config", file.to_str().unwrap()])
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn at(address: SocketAddr, folder: &Folder, flags: &[&str]) -> Server {
        Server::on(address, &format!("disk:{}", folder.path().join("store").display()), flags)
    }

    /// On any store.
    pub fn on(address: SocketAddr, store: &str, flags: &[&str]) -> Server {
        Server::run(Command::new(BINARY), address, store, flags)
    }

    /// One that does not die when [`Server::limit_files`] makes its writes fail.
    pub fn limitable(folder: &Folder) -> Server {
        let mut shell = Command::new("/bin/sh");
        shell.args(["-c", "trap '' XFSZ; exec \"$0\" \"$@\"", BINARY]);
        Server::run(
            shell,
            "127.0.0.1:0".parse().unwrap(),
            &format!("disk:{}", folder.path().join("store").display()),
            &[],
        )
    }

    /// Writes beyond so many bytes of any file fail from now on; `None`: none does.
    pub fn limit_files(&self, bytes: Option<u64>) {
        let pid = i32::try_from(self.child.id()).ok().and_then(rustix::process::Pid::from_raw);
        let limit = rustix::process::Rlimit { current: bytes, maximum: None };
        rustix::process::prlimit(pid, rustix::process::Resource::Fsize, limit).unwrap();
    }

    fn run(mut command: Command, address: SocketAddr, store: &str, flags: &[&str]) -> Server {
        let mut child = command
            .args(["serve", "--listen", &address.to_string(), "--store", store])
            .args(flags)
            .env_clear()
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut log = BufReader::new(child.stderr.take().unwrap());
        let mut line = String::new();
        let mut before = String::new();
        let address = loop {
            line.clear();
            if log.read_line(&mut line).unwrap() == 0 {
                panic!("the server did not start: {before}");
            }
            before.push_str(&line);
            if let Some((_, rest)) = line.split_once("address=") {
                break rest.split_whitespace().next().unwrap().parse().unwrap();
            }
        };
        std::thread::spawn(move || {
            for line in log.lines().map_while(Result::ok) {
                if line.contains("WARN") || line.contains("ERROR") || line.contains("panicked") {
                    eprintln!("server: {line}");
                }
            }
        });
        Server { child, address }
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub fn client(&self) -> Client {
        Client::new(self.address)
    }

    pub fn signal(&self, signal: rustix::process::Signal) {
        let pid = i32::try_from(self.child.id()).ok().and_then(rustix::process::Pid::from_raw);
        rustix::process::kill_process(pid.unwrap(), signal).unwrap();
    }

    /// As the system does it to a process that must go: nothing is run any more.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub fn wait(&mut self, at_most: Duration) -> ExitStatus {
        wait(&mut self.child, at_most)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn wait(child: &mut Child, at_most: Duration) -> ExitStatus {
    let begun = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        assert!(begun.elapsed() < at_most, "the process has not ended within {at_most:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Waits until something holds.
pub fn until(what: &str, at_most: Duration, mut holds: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < at_most, "not within {at_most:?}: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[derive(Clone, Debug)]
pub struct Answer {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Answer {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(k, _)| k.eq_ignore_ascii_case(name)).map(|(_, v)| v.as_str())
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|e| panic!("{e}: {} {}", self.status, String::from_utf8_lossy(&self.body)))
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub fn code(&self) -> String {
        self.json()["code"].as_str().unwrap_or_default().to_owned()
    }
}

/// One connection, kept open.
#[derive(Debug)]
pub struct Client {
    address: SocketAddr,
    stream: Option<BufReader<TcpStream>>,
    pub timeout: Duration,
}

impl Client {
    pub fn new(address: SocketAddr) -> Client {
        Client { address, stream: None, timeout: Duration::from_secs(70) }
    }

    /// Opens the connection, unless it is open.
    pub fn connect(&mut self) -> std::io::Result<()> {
        self.open().map(|_| ())
    }

    pub fn get(&mut self, path: &str) -> Answer {
        self.send("GET", path, &[], b"")
    }

    pub fn post(&mut self, path: &str, body: impl AsRef<str>) -> Answer {
        self.send("POST", path, &[("content-type", "application/json")], body.as_ref().as_bytes())
    }

    pub fn send(&mut self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Answer {
        self.try_send(method, path, headers, body).unwrap()
    }

    pub fn try_post(&mut self, path: &str, body: impl AsRef<str>) -> std::io::Result<Answer> {
        self.try_send("POST", path, &[("content-type", "application/json")], body.as_ref().as_bytes())
    }

    pub fn try_send(
        &mut self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> std::io::Result<Answer> {
        let result = self.exchange(method, path, headers, body);
        if result.is_err() {
            self.stream = None;
        }
        result
    }

    fn exchange(&mut self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> std::io::Result<Answer> {
        let mut head = format!("{method} {path} HTTP/1.1\r\n");
        if headers.iter().all(|h| h.0 != "host") {
            head.push_str(&format!("host: {}\r\n", self.address));
        }
        for (name, value) in headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        head.push_str(&format!("content-length: {}\r\n\r\n", body.len()));
        let stream = self.open()?;
        stream.get_mut().write_all(head.as_bytes())?;
        stream.get_mut().write_all(body)?;
        let answer = read_answer(stream)?;
        if answer.header("connection") == Some("close") {
            self.stream = None;
        }
        Ok(answer)
    }

    fn open(&mut self) -> std::io::Result<&mut BufReader<TcpStream>> {
        if self.stream.is_none() {
            let stream = TcpStream::connect(self.address)?;
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(self.timeout))?;
            self.stream = Some(BufReader::new(stream));
        }
        Ok(self.stream.as_mut().unwrap())
    }
}

pub fn read_answer(stream: &mut BufReader<TcpStream>) -> std::io::Result<Answer> {
    let line = read_line(stream)?;
    let status = line.get(9..12).and_then(|s| s.parse().ok()).ok_or_else(|| std::io::Error::other(line.clone()))?;
    let mut headers = Vec::new();
    loop {
        let line = read_line(stream)?;
        if line.is_empty() {
            break;
        }
        let (name, value) = line.split_once(':').unwrap();
        headers.push((name.to_owned(), value.trim().to_owned()));
    }
    let mut answer = Answer { status, headers, body: Vec::new() };
    let bodyless = matches!(status, 100..=199 | 204 | 304);
    if let Some(len) = answer.header("content-length").filter(|_| !bodyless) {
        answer.body = vec![0; len.parse().unwrap()];
        stream.read_exact(&mut answer.body)?;
    }
    // A stream of events has no end to be waited for.
    let endless = answer.header("content-type") == Some("text/event-stream");
    if answer.header("transfer-encoding") == Some("chunked") && !endless {
        loop {
            let len = usize::from_str_radix(&read_line(stream)?, 16).map_err(std::io::Error::other)?;
            let mut piece = vec![0; len];
            stream.read_exact(&mut piece)?;
            answer.body.extend(piece);
            read_line(stream)?;
            if len == 0 {
                break;
            }
        }
    }
    Ok(answer)
}

pub fn read_line(stream: &mut BufReader<TcpStream>) -> std::io::Result<String> {
    let mut line = String::new();
    if stream.read_line(&mut line)? == 0 {
        return Err(std::io::ErrorKind::UnexpectedEof.into());
    }
    Ok(line.trim_end_matches(['\r', '\n']).to_owned())
}

/// Sends bytes and reads one answer.
pub fn exchange(address: SocketAddr, bytes: &[u8]) -> std::io::Result<Answer> {
    let mut stream = raw(address);
    stream.get_mut().write_all(bytes)?;
    read_answer(&mut stream)
}

/// A bare connection.
pub fn raw(address: SocketAddr) -> BufReader<TcpStream> {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    BufReader::new(stream)
}

/// Whether the server closes the connection, reading until then.
pub fn closes(stream: &mut BufReader<TcpStream>) -> bool {
    let mut rest = Vec::new();
    match stream.read_to_end(&mut rest) {
        Ok(_) => true,
        Err(e) => e.kind() == std::io::ErrorKind::ConnectionReset,
    }
}

/// Submits and gives the id.
pub fn submit(client: &mut Client, body: &str) -> String {
    let answer = client.post("/v1/jobs", body);
    assert_eq!(answer.status, 201, "{}", answer.json());
    answer.json()["id"].as_str().unwrap().to_owned()
}

/// Claims one job that must be there; gives its id and token.
pub fn claim(client: &mut Client, queue: &str) -> (String, String) {
    let answer = client.post("/v1/claims", format!(r#"{{"worker":"w","queues":["{queue}"]}}"#));
    assert_eq!(answer.status, 200, "{}", answer.json());
    let job = &answer.json()["jobs"][0];
    (job["id"].as_str().unwrap().to_owned(), job["token"].as_str().unwrap().to_owned())
}

pub fn status(client: &mut Client, id: &str) -> String {
    client.get(&format!("/v1/jobs/{id}")).json()["status"].as_str().unwrap_or_default().to_owned()
}
