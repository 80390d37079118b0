//! The server's process, and calls to it.

use std::io::{BufRead as _, BufReader, Error, Read as _, Result, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

/// The server's binary beside this one; built, if it is not there.
///
/// # Errors
/// If there is no such binary, and it cannot be built.
pub fn binary() -> Result<PathBuf> {
    let own = std::env::current_exe()?;
    let path = own.with_file_name("leasehold");
    let release = own.parent().is_some_and(|p| p.ends_with("release"));
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(["build", "--quiet", "-p", "leasehold"]).current_dir(env!("CARGO_MANIFEST_DIR"));
    if let Some(target) = own.parent().and_then(Path::parent) {
        cargo.arg("--target-dir").arg(target);
    }
    if release {
        cargo.arg("--release");
    }
    match cargo.status() {
        Ok(status) if status.success() && path.is_file() => Ok(path),
        _ if path.is_file() => Ok(path),
        _ => Err(Error::other(format!("there is no {}: give one with --server", path.display()))),
    }
}

/// Killed when dropped.
#[derive(Debug)]
pub struct Server {
    child: Child,
    pub address: SocketAddr,
}

impl Server {
    /// Starts the server, and waits until it serves, unless it is to be killed `within` a time before.
    ///
    /// # Errors
    /// If it ends by itself, or says nothing for a minute.
    pub fn start(
        binary: &Path,
        address: SocketAddr,
        folder: &Path,
        within: Option<Duration>,
    ) -> Result<Option<Server>> {
        let mut child = spawn(Command::new(binary), address, folder)?;
        if let Some(within) = within {
            std::thread::sleep(within);
            child.kill()?;
            child.wait()?;
            return Ok(None);
        }
        Self::serving(child).map(Some)
    }

    /// A server whose files can be limited: it does not die of it.
    ///
    /// # Errors
    /// As [`Server::start`].
    pub fn limitable(binary: &Path, address: SocketAddr, folder: &Path) -> Result<Server> {
        let mut shell = Command::new("/bin/sh");
        shell.args(["-c", "trap '' XFSZ; exec \"$0\" \"$@\""]).arg(binary);
        Self::serving(spawn(shell, address, folder)?)
    }

    /// Writes beyond so many bytes of a file fail from now on; `None`: none does.
    ///
    /// # Errors
    /// What the system says.
    pub fn limit_files(&self, bytes: Option<u64>) -> Result<()> {
        let pid = i32::try_from(self.child.id()).ok().and_then(rustix::process::Pid::from_raw);
        let limit = rustix::process::Rlimit { current: bytes, maximum: None };
        rustix::process::prlimit(pid, rustix::process::Resource::Fsize, limit)?;
        Ok(())
    }

    fn serving(mut child: Child) -> Result<Server> {
        let Some(stderr) = child.stderr.take() else { return Err(Error::other("no log")) };
        let (said, address) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let mut lines = BufReader::new(stderr).lines().map_while(Result::ok);
            let mut before = String::new();
            for line in lines.by_ref() {
                if let Some((_, rest)) = line.split_once("address=") {
                    let address = rest.split_whitespace().next().and_then(|a| a.parse::<SocketAddr>().ok());
                    // Whoever asked may have given up.
                    let _ = said.send(address.ok_or(before));
                    break;
                }
                before.push_str(&line);
            }
            for line in lines.filter(|l| l.contains("ERROR") || l.contains("panicked")) {
                eprintln!("server: {line}");
            }
        });
        match address.recv_timeout(Duration::from_secs(60)) {
            Ok(Ok(address)) => Ok(Server { child, address }),
            other => {
                // It may have ended.
                let _ = child.kill();
                let _ = child.wait();
                Err(Error::other(format!("the server did not start: {other:?}")))
            }
        }
    }

    /// As the system does it to a process that must go: nothing is run any more.
    ///
    /// # Errors
    /// If it had ended by itself.
    pub fn kill(&mut self) -> Result<()> {
        if let Some(status) = self.child.try_wait()? {
            return Err(Error::other(format!("the server had ended by itself: {status}")));
        }
        self.child.kill()?;
        self.child.wait().map(|_| ())
    }
}

fn spawn(mut command: Command, address: SocketAddr, folder: &Path) -> Result<Child> {
    let store = format!("disk:{}", folder.display());
    command
        .args(["serve", "--listen", &address.to_string(), "--store", &store])
        .env_clear()
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
}

impl Server {
    /// KiB of its memory that are resident.
    ///
    /// # Errors
    /// If the system does not say.
    pub fn resident_kib(&self) -> Result<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = line.and_then(|rest| rest.trim().trim_end_matches("kB").trim().parse().ok());
        kib.ok_or_else(|| Error::other("the server's memory is not known"))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// One connection, kept open.
#[derive(Debug)]
pub struct Client {
    address: SocketAddr,
    timeout: Duration,
    stream: Option<BufReader<TcpStream>>,
}

impl Client {
    pub fn new(address: SocketAddr) -> Client {
        Client::with_timeout(address, Duration::from_secs(15))
    }

    /// How long an answer may take.
    pub fn with_timeout(address: SocketAddr, timeout: Duration) -> Client {
        Client { address, timeout, stream: None }
    }

    /// One call: status and body.
    ///
    /// # Errors
    /// If no answer came: the call may have been done.
    pub fn send(&mut self, method: &str, path: &str, key: Option<&str>, body: &str) -> Result<(u16, Vec<u8>)> {
        self.send_bytes(method, path, key, body.as_bytes())
    }

    /// One call with any body.
    ///
    /// # Errors
    /// If no answer came: the call may have been done.
    pub fn send_bytes(&mut self, method: &str, path: &str, key: Option<&str>, body: &[u8]) -> Result<(u16, Vec<u8>)> {
        let result = self.exchange(method, path, key, body);
        if result.is_err() {
            self.stream = None;
        }
        result
    }

    fn exchange(&mut self, method: &str, path: &str, key: Option<&str>, body: &[u8]) -> Result<(u16, Vec<u8>)> {
        let key = key.map(|k| format!("idempotency-key: {k}\r\n")).unwrap_or_default();
        let (address, len) = (self.address, body.len());
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\n{key}content-length: {len}\r\n\r\n"
        );
        let mut stream = match self.stream.take() {
            Some(stream) => stream,
            None => {
                let stream = TcpStream::connect(address)?;
                stream.set_nodelay(true)?;
                stream.set_read_timeout(Some(self.timeout))?;
                BufReader::new(stream)
            }
        };
        stream.get_mut().write_all(&[head.as_bytes(), body].concat())?;
        let mut line = String::new();
        stream.read_line(&mut line)?;
        let status = line.get(9..12).and_then(|s| s.parse().ok()).ok_or_else(|| Error::other("no answer"))?;
        let (mut len, mut close) = (0, false);
        loop {
            line.clear();
            if stream.read_line(&mut line)? == 0 {
                return Err(Error::other("half an answer"));
            }
            let header = line.trim_end().to_ascii_lowercase();
            match header.split_once(": ") {
                None => break,
                Some(("content-length", n)) => len = n.parse().map_err(Error::other)?,
                Some(("connection", "close")) => close = true,
                Some(_) => {}
            }
        }
        let mut body = vec![0; if status == 204 { 0 } else { len }];
        stream.read_exact(&mut body)?;
        self.stream = (!close).then_some(stream);
        Ok((status, body))
    }

    /// Repeats a call until it is answered with something else than "later"; counts the repeats.
    ///
    /// # Errors
    /// If that takes longer than two minutes.
    pub fn insist(
        &mut self,
        method: &str,
        path: &str,
        key: Option<&str>,
        body: &str,
        repeats: &mut u64,
    ) -> Result<(u16, Vec<u8>)> {
        let begun = Instant::now();
        loop {
            match self.send(method, path, key, body) {
                Ok(answer) if !matches!(answer.0, 429 | 503) => return Ok(answer),
                _ if begun.elapsed() > Duration::from_secs(120) => {
                    return Err(Error::other(format!("{method} {path} was never answered")));
                }
                _ => {
                    *repeats += 1;
                    std::thread::sleep(Duration::from_millis(10));
                }
            }
        }
    }

    /// A call that must be answered with JSON.
    ///
    /// # Errors
    /// If it is not.
    pub fn json(&mut self, method: &str, path: &str) -> Result<Value> {
        let (status, body) = self.insist(method, path, None, "", &mut 0)?;
        match status {
            200 => serde_json::from_slice(&body).map_err(Error::other),
            _ => Err(Error::other(format!("{method} {path}: {status} {}", String::from_utf8_lossy(&body)))),
        }
    }
}
