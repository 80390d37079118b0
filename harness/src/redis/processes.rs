//! The processes: a Redis, servers with a proxy each, workers. Each may be killed, stopped and started
//! again; one that ends by itself is an error.

use std::fs::File;
use std::io::{Error, Result};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::resp::Connection;

/// How long a process may take to come or to go.
const PATIENCE: Duration = Duration::from_secs(90);
/// How long it may start: a server waits so long for a Redis that is not there, and loads.
const STARTING: Duration = Duration::from_secs(10);

/// A port that others' outgoing connections are not given: a process that is down for a moment finds
/// it free.
///
/// # Errors
/// If there is none.
pub fn port() -> Result<u16> {
    use std::sync::atomic::{AtomicU16, Ordering};
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let first = 15_000 + (std::process::id() % 1_000) as u16 * 15;
    (0..1_000)
        .map(|_| first + NEXT.fetch_add(1, Ordering::Relaxed) % 2_000)
        .find(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok())
        .ok_or_else(|| Error::other("no port is free"))
}

#[derive(Debug)]
pub struct Process {
    name: String,
    program: PathBuf,
    args: Vec<String>,
    log: PathBuf,
    child: Option<Child>,
    started: Instant,
    /// When it was told to end.
    told: Option<Instant>,
}

/// What became of a process by itself.
#[derive(Debug)]
pub enum Ended {
    /// As it was told.
    Told,
    Broken(String),
}

impl Process {
    /// Started; its output is added to a file of that name in the folder.
    ///
    /// # Errors
    /// If it cannot be.
    pub fn start(name: &str, program: &Path, args: Vec<String>, folder: &Path) -> Result<Process> {
        let log = folder.join(format!("{name}.log"));
        let mut process = Process {
            name: name.into(),
            program: program.into(),
            args,
            log,
            child: None,
            started: Instant::now(),
            told: None,
        };
        process.again()?;
        Ok(process)
    }

    /// # Errors
    /// If it cannot be started.
    pub fn again(&mut self) -> Result<()> {
        let log = File::options().create(true).append(true).open(&self.log)?;
        let child = Command::new(&self.program)
            .args(&self.args)
            .env_clear()
            .envs(std::env::var_os("PATH").map(|path| ("PATH", path)))
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .map_err(|e| Error::other(format!("{}: {e}", self.program.display())))?;
        self.child = Some(child);
        self.started = Instant::now();
        self.told = None;
        Ok(())
    }

    pub fn is_there(&self) -> bool {
        self.child.is_some()
    }

    /// Whether it was told to end and has not yet.
    pub fn is_ending(&self) -> bool {
        self.child.is_some() && self.told.is_some()
    }

    /// Whether it has ended, and how.
    pub fn ended(&mut self) -> Option<Ended> {
        let status = self.child.as_mut()?.try_wait().ok()?;
        let Some(status) = status else {
            let late = self.told.is_some_and(|told| told.elapsed() > PATIENCE);
            return late.then(|| {
                // It is told once.
                self.told = None;
                Ended::Broken(format!("{} was told to end, and did not", self.name))
            });
        };
        self.child = None;
        Some(match self.told.take() {
            Some(_) if status.success() => Ended::Told,
            // While it starts it does not listen for signals yet, and the system ends it.
            Some(told) if status.signal() == Some(15) && told < self.started + STARTING => Ended::Told,
            Some(_) => Ended::Broken(format!("{} was told to end, and ended with {status}", self.name)),
            None => Ended::Broken(format!("{} has ended by itself: {status}", self.name)),
        })
    }

    /// # Errors
    /// If it is not there.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        let pid = self.child.as_ref().and_then(|c| Pid::from_raw(c.id().cast_signed()));
        let pid = pid.ok_or_else(|| Error::other(format!("{} is not there", self.name)))?;
        kill_process(pid, signal).map_err(Error::from)
    }

    /// As the system does it to a process that must go. Nothing if it is gone.
    ///
    /// # Errors
    /// If it cannot be.
    pub fn kill(&mut self) -> Result<()> {
        let Some(mut child) = self.child.take() else { return Ok(()) };
        child.kill()?;
        child.wait().map(|_| ())
    }

    /// Tells it to end.
    ///
    /// # Errors
    /// If it is not there.
    pub fn tell(&mut self) -> Result<()> {
        self.signal(Signal::TERM)?;
        self.told = Some(Instant::now());
        Ok(())
    }

    /// Tells it to end, and waits for it.
    ///
    /// # Errors
    /// If it does not, or not well.
    pub fn end(&mut self) -> Result<()> {
        self.tell()?;
        loop {
            match self.ended() {
                Some(Ended::Told) => return Ok(()),
                Some(Ended::Broken(what)) => return Err(Error::other(what)),
                None => std::thread::sleep(Duration::from_millis(10)),
            }
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended already; a stopped one is ended all the same.
        let _ = self.kill();
    }
}

/// A Redis that has written to its file what it acknowledges.
///
/// # Errors
/// If it does not come.
pub fn redis(program: &Path, port: u16, folder: &Path) -> Result<Process> {
    let args = ["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", "", "--appendonly", "yes"];
    let mut args: Vec<String> = args.into_iter().map(Into::into).collect();
    args.extend(["--appendfsync", "always", "--maxmemory-policy", "noeviction", "--dir"].map(Into::into));
    args.push(folder.display().to_string());
    let process = Process::start("redis", program, args, folder)?;
    until("the Redis answers", || {
        Connection::open(port, Duration::from_secs(1)).and_then(|mut c| c.ask(&["PING"])).is_ok()
    })?;
    Ok(process)
}

/// A server on its own way to the Redis.
///
/// # Errors
/// If it cannot be started.
pub fn server(binary: &Path, n: usize, address: SocketAddr, redis: u16, folder: &Path) -> Result<Process> {
    let store = format!("redis://127.0.0.1:{redis}/0");
    let address = address.to_string();
    let args = ["serve", "--listen", &address, "--store", &store, "--grace", "4s", "--log", "warn"];
    Process::start(&format!("server-{n}"), binary, args.into_iter().map(Into::into).collect(), folder)
}

/// What a worker does with a payload: the payload says how it ends.
const WORK: &str = r#"read -r job
case $job in
  *'"again"'*) [ "$LEASEHOLD_ATTEMPT" -gt 1 ] || exit 1;;
  *'"never"'*) exit 65;;
  *'"long"'*) sleep 1.5;;
  *'"endless"'*) sleep 60;;
esac
printf %s "$job""#;

/// # Errors
/// If it cannot be started.
pub fn worker(binary: &Path, n: usize, server: SocketAddr, folder: &Path) -> Result<Process> {
    let url = format!("http://{server}");
    let (one, two) = (format!("q{}", n % 3), format!("q{}", (n + 1) % 3));
    let name = format!("worker-{n}");
    let args = [
        "work",
        "--server",
        &url,
        "--queue",
        &one,
        "--queue",
        &two,
        "--concurrency",
        "4",
        "--lease-ms",
        "3000",
        "--worker",
        &name,
        "--",
        "sh",
        "-c",
        WORK,
    ];
    Process::start(&name, binary, args.into_iter().map(Into::into).collect(), folder)
}

pub fn listens(address: SocketAddr) -> bool {
    TcpStream::connect_timeout(&address, Duration::from_secs(1)).is_ok()
}

/// # Errors
/// If it does not come to that.
pub fn until(what: &str, mut holds: impl FnMut() -> bool) -> Result<()> {
    let begun = Instant::now();
    while !holds() {
        if begun.elapsed() > PATIENCE {
            return Err(Error::other(format!("{what}: not within {} s", PATIENCE.as_secs())));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}
