//! `harness full`: a real server whose small file system is filled to the last byte under it, with room
//! made again, and kills in between. From the first failed write on nothing may be acknowledged until the
//! store has proven itself, and what was acknowledged before must be there.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{Error, ErrorKind, Result, Write as _};
use std::net::SocketAddr;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::rng::Rng;
use crate::server::{Client, Server};

/// A file system that may be filled: larger ones have other users.
const SMALL_BYTES: u64 = 1024 * 1024 * 1024;
/// What is mounted for it.
const MOUNTED: &str = "size=32m";
/// Sweeps over all calls while the disk is full.
const SWEEPS: u64 = 10;
const PATIENCE: Duration = Duration::from_secs(60);

/// What was seen.
#[derive(Debug, Default)]
pub struct Report {
    pub rounds: u64,
    pub submitted: u64,
    /// Submits refused with `store_full` before anything failed.
    pub refused: u64,
    /// Calls refused from the first failed write on, and how often all were made.
    pub unavailable: u64,
    pub swept: u64,
    pub in_doubt: u64,
    pub killed: u64,
    pub broken: Vec<String>,
}

/// How writes are made to fail.
enum Fault {
    /// A file that takes all the room that there is.
    Ballast(PathBuf),
    /// A limit on the size of files, where nothing can be mounted.
    Limit,
}

impl Fault {
    fn begin(&self, server: &Server) -> Result<()> {
        match self {
            Fault::Ballast(path) => {
                let mut file = File::options().create(true).append(true).open(path)?;
                for len in [256 * 1024, 4_096, 1] {
                    loop {
                        match file.write_all(&vec![1; len]) {
                            Ok(()) => {}
                            Err(error) if error.kind() == ErrorKind::StorageFull => break,
                            Err(error) => return Err(error),
                        }
                    }
                }
                // A file system that takes its time to find out finds out here.
                match file.sync_all() {
                    Err(error) if error.kind() != ErrorKind::StorageFull => Err(error),
                    _ => Ok(()),
                }
            }
            Fault::Limit => server.limit_files(Some(0)),
        }
    }

    fn end(&self, server: &Server) -> Result<()> {
        match self {
            Fault::Ballast(path) => std::fs::remove_file(path),
            Fault::Limit => server.limit_files(None),
        }
    }
}

/// Runs this program again with a small file system of its own, which goes away with it. `None`: nothing
/// can be mounted here.
///
/// # Errors
/// If it cannot be run.
pub fn mounted(more: &[String]) -> Result<Option<u8>> {
    let scratch = tempfile::tempdir()?;
    let inside = |then: &str, more: &[String]| {
        let script = format!("mount -t tmpfs -o {MOUNTED} harness \"$0\" && {then}");
        let mut command = Command::new("unshare");
        command.args(["--mount", "--map-root-user", "sh", "-c", &script]).arg(scratch.path()).args(more);
        command
    };
    match inside("exit 0", &[]).output() {
        Ok(output) if output.status.success() => {}
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
        _ => return Ok(None),
    }
    let own = std::env::current_exe()?.display().to_string();
    let folder = scratch.path().join("store").display().to_string();
    let call = [&[own, "full".into(), "--folder".into(), folder], more].concat();
    let status = inside("exec \"$@\"", &call).status()?;
    let code = status.code().ok_or_else(|| Error::other(format!("ended by signal {:?}", status.signal())))?;
    Ok(Some(code as u8))
}

/// Does it so many times. Without a folder a limit on the size of files stands in for the full disk.
///
/// # Errors
/// If the server cannot be started, or the folder must not be filled.
pub fn full(binary: &Path, folder: Option<&Path>, seed: u64, rounds: u64) -> Result<Report> {
    let scratch = tempfile::tempdir()?;
    let fault = match folder {
        None => Fault::Limit,
        Some(folder) => {
            let above =
                folder.parent().filter(|p| p.is_dir()).ok_or_else(|| Error::other("no folder for the store"))?;
            let found = rustix::fs::statvfs(above)?;
            if found.f_blocks.saturating_mul(found.f_frsize) > SMALL_BYTES {
                return Err(Error::other("that file system is larger than 1 GiB: it would be filled"));
            }
            Fault::Ballast(above.join("ballast"))
        }
    };
    let folder = folder.map_or_else(|| scratch.path().join("store"), Path::to_owned);
    let any: SocketAddr = ([127, 0, 0, 1], 0).into();
    let mut world = World {
        client: Client::new(any),
        acknowledged: BTreeMap::new(),
        doubted: BTreeSet::new(),
        report: Report::default(),
        next: 0,
    };
    let mut server = Server::limitable(binary, any, &folder)?;
    let mut rng = Rng::new(seed, 98);
    for _ in 0..rounds {
        world.client = Client::new(server.address);
        world.round(&mut rng, &fault, &server)?;
        if world.report.rounds % 2 == 1 {
            // Killed while the disk is full, and started when there is room.
            fault.begin(&server)?;
            world.sweep(&fault, &server, None)?;
            server.kill()?;
            if matches!(fault, Fault::Ballast(_)) {
                fault.end(&server)?;
            }
            world.report.killed += 1;
        } else {
            server.kill()?;
        }
        server = Server::limitable(binary, any, &folder)?;
        world.client = Client::new(server.address);
        world.compare()?;
    }
    Ok(world.report)
}

struct World {
    client: Client,
    /// By key, the ids.
    acknowledged: BTreeMap<String, String>,
    doubted: BTreeSet<String>,
    report: Report,
    next: u64,
}

/// What a call was answered.
enum Said {
    Done(Value),
    Full,
    Unavailable,
    InDoubt,
}

impl World {
    fn broken(&mut self, what: String) {
        self.report.broken.push(what);
    }

    fn call(&mut self, method: &str, path: &str, key: Option<&str>, body: &str) -> Result<Said> {
        let (status, body) = self.client.send(method, path, key, body)?;
        let answer: Value = serde_json::from_slice(&body).unwrap_or(Value::Null);
        Ok(match (status, answer["code"].as_str()) {
            (503, Some("store_full")) => Said::Full,
            (503, Some("store_unavailable")) => Said::Unavailable,
            (503, Some("outcome_unknown")) => Said::InDoubt,
            (200 | 201, _) => Said::Done(answer),
            _ => return Err(Error::other(format!("{method} {path}: {status} {answer}"))),
        })
    }

    fn submit(&mut self) -> Result<Said> {
        self.next += 1;
        let key = format!("k{}", self.next);
        let body = format!(r#"{{"queue":"full","payload":"{}"}}"#, "x".repeat(3_000));
        let said = self.call("POST", "/v1/jobs", Some(&key), &body)?;
        match &said {
            Said::Done(job) => {
                self.report.submitted += 1;
                self.acknowledged.insert(key, job["id"].as_str().unwrap_or_default().to_owned());
            }
            Said::Full => self.report.refused += 1,
            Said::InDoubt => {
                self.doubted.insert(key);
            }
            Said::Unavailable => {}
        }
        Ok(said)
    }

    /// Each kind of change once; `held` is a lease.
    fn changes(&mut self, held: Option<&(String, String)>) -> Result<Vec<(&'static str, Said)>> {
        let mut said = vec![("submit", self.submit()?)];
        let claim = r#"{"worker":"other","queues":["none"],"max":1}"#;
        said.push(("claim", self.call("POST", "/v1/claims", None, claim)?));
        said.push(("settings", self.call("PUT", "/v1/queues/other", None, r#"{"lease_ms":60000}"#)?));
        said.push(("group", {
            let body = r#"{"queue":"grouped","children":[{"payload":1}]}"#;
            self.call("POST", "/v1/groups", None, body)?
        }));
        if let Some((id, token)) = held {
            let body = format!(r#"{{"token":"{token}","progress":{}}}"#, self.next);
            said.push(("heartbeat", self.call("POST", &format!("/v1/jobs/{id}/heartbeat"), None, &body)?));
        }
        Ok(said)
    }

    /// All changes again and again until the store has stopped; from then on none may be done.
    fn sweep(&mut self, fault: &Fault, server: &Server, held: Option<&(String, String)>) -> Result<()> {
        let begun = Instant::now();
        let (mut stopped, mut sweeps) = (false, 0);
        while sweeps < SWEEPS {
            for (what, said) in self.changes(held)? {
                match said {
                    Said::Unavailable | Said::InDoubt if stopped => self.report.unavailable += 1,
                    Said::Unavailable | Said::InDoubt => stopped = true,
                    // A tidied store gives room back, and has then proven itself in it.
                    Said::Done(_) | Said::Full if stopped && self.ready()? => (stopped, sweeps) = (false, 0),
                    Said::Done(answer) if stopped => {
                        self.broken(format!("after the first failed write: {what} was done: {answer}"));
                    }
                    Said::Full if stopped => {
                        self.broken(format!("after the first failed write: {what} was called `full`"));
                    }
                    // It found room in a block that was there.
                    Said::Done(_) | Said::Full => {}
                }
            }
            if stopped {
                sweeps += 1;
                self.report.swept += 1;
                if self.client.send("GET", "/healthz", None, "")?.0 != 200 {
                    self.broken("it says that its process is not alive".into());
                }
            } else {
                fault.begin(server)?;
            }
            if begun.elapsed() > PATIENCE {
                return Err(Error::other("the full disk does not stop the store"));
            }
        }
        if self.ready()? && matches!(fault, Fault::Limit) {
            self.broken("it says that it is ready while nothing can be written".into());
        }
        Ok(())
    }

    fn ready(&mut self) -> Result<bool> {
        Ok(self.client.send("GET", "/readyz", None, "")?.0 == 200)
    }

    fn round(&mut self, rng: &mut Rng, fault: &Fault, server: &Server) -> Result<()> {
        for _ in 0..20 + rng.below(100) {
            self.submit()?;
        }
        let claim = r#"{"worker":"w","queues":["full"],"max":1,"lease_ms":3600000}"#;
        let held = match self.call("POST", "/v1/claims", None, claim)? {
            Said::Done(answer) => {
                let job = &answer["jobs"][0];
                job["id"].as_str().zip(job["token"].as_str()).map(|(id, token)| (id.to_owned(), token.to_owned()))
            }
            _ => None,
        };
        let held = held.ok_or_else(|| Error::other("nothing could be claimed"))?;
        fault.begin(server)?;
        // The space left is not looked at before every call: these meet the end of the disk.
        for _ in 0..20 {
            self.submit()?;
        }
        self.sweep(fault, server, Some(&held))?;
        fault.end(server)?;
        let begun = Instant::now();
        while !self.ready()? {
            if begun.elapsed() > PATIENCE {
                return Err(Error::other("it does not come back when there is room"));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        // Whoever held a lease still has it.
        let (id, token) = &held;
        let body = format!(r#"{{"token":"{token}"}}"#);
        if !matches!(self.call("POST", &format!("/v1/jobs/{id}/complete"), None, &body)?, Said::Done(_)) {
            self.broken(format!("{id} cannot be completed when there is room again"));
        }
        self.report.rounds += 1;
        Ok(())
    }

    /// The set of jobs is the set acknowledged, and of those in doubt any.
    fn compare(&mut self) -> Result<()> {
        let mut found = BTreeSet::new();
        let mut path = "/v1/jobs?queue=full&limit=1000".to_owned();
        loop {
            let page = self.client.json("GET", &path)?;
            let jobs = page["jobs"].as_array().map(Vec::as_slice).unwrap_or_default();
            found.extend(jobs.iter().filter_map(|job| Some(job["id"].as_str()?.to_owned())));
            match page["next"].as_str() {
                Some(next) => path = format!("/v1/jobs?queue=full&limit=1000&cursor={next}"),
                None => break,
            }
        }
        // A repeat says whether the one in doubt was done; it is from then on.
        for key in std::mem::take(&mut self.doubted) {
            self.report.in_doubt += 1;
            let body = format!(r#"{{"queue":"full","payload":"{}"}}"#, "x".repeat(3_000));
            if let Said::Done(job) = self.call("POST", "/v1/jobs", Some(&key), &body)? {
                let id = job["id"].as_str().unwrap_or_default().to_owned();
                found.insert(id.clone());
                self.acknowledged.insert(key, id);
            }
        }
        let acknowledged: BTreeSet<String> = self.acknowledged.values().cloned().collect();
        let (lost, extra) = (acknowledged.difference(&found).count(), found.difference(&acknowledged).count());
        if lost > 0 || extra > 0 {
            self.broken(format!("{lost} acknowledged jobs are not there; {extra} are there that nobody was told of"));
        }
        Ok(())
    }
}
