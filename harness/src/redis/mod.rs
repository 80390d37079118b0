//! `harness redis`: servers on one Redis, each by a way of its own, under submitters, an operator and
//! workers, while everything is killed, stopped, cut off and started again. In the end every job that
//! was acknowledged must have ended exactly once in the books, and every key in the Redis must be
//! where it belongs.

mod audit;
mod clients;
mod dump;
mod events;
mod faults;
mod processes;
mod proxy;
mod records;
mod report;
mod resp;

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Error, Result};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use clients::{Caller, Seen};
use events::Books;
use faults::{Fault, Kind, SERVERS, Target, WORKERS};
use processes::{Ended, Process};
use proxy::{Mode, Proxy};
use resp::Connection;

const SUBMITTERS: usize = 4;
const RUDE: usize = 2;
/// How long it may take to finish what is left.
const DRAIN: Duration = Duration::from_secs(240);
/// Between two looks at the processes.
const TICK: Duration = Duration::from_millis(20);

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub struct Options {
    pub leasehold: PathBuf,
    pub redis: PathBuf,
    pub folder: PathBuf,
    pub seed: u64,
    pub length: Duration,
}

struct World {
    redis: Process,
    port: u16,
    ways: Vec<Proxy>,
    servers: Vec<Process>,
    workers: Vec<Process>,
    addresses: [SocketAddr; SERVERS],
    faults: BTreeMap<String, u64>,
    /// Those that are to be started again.
    gone: BTreeSet<Target>,
}

/// Runs it and prints what was seen; returns what is broken.
///
/// # Errors
/// If the processes cannot be started, or the folder has something in it: keys of an earlier run would be taken for
/// this one's.
pub fn run(options: &Options) -> Result<Vec<String>> {
    std::fs::create_dir_all(&options.folder)?;
    if std::fs::read_dir(&options.folder)?.next().is_some() {
        return Err(Error::other(format!("{} is not empty", options.folder.display())));
    }
    let mut world = World::start(options)?;
    let seen = Seen::default();
    let addresses = world.addresses;
    let books = std::thread::scope(|scope| {
        let (seen, seed) = (&seen, options.seed);
        let caller = |n: usize| Caller::new(&addresses, n, seen);
        let submitters: Vec<_> = (0..SUBMITTERS)
            .map(|n| {
                let caller = caller(n);
                scope.spawn(move || clients::submitter(n, seed, caller, seen))
            })
            .collect();
        let own = caller(0);
        let operator = scope.spawn(move || clients::operator(seed, own, seen));
        for n in 0..RUDE {
            let caller = caller(n);
            scope.spawn(move || clients::rude(n, seed, caller, seen));
        }
        let own = caller(1);
        let follower = scope.spawn(move || Books::default().follow(own, seen));
        let result = world.suffer(options, seen).and_then(|()| {
            seen.no_more.store(true, Ordering::SeqCst);
            let gone = submitters.into_iter().chain([operator]).all(|t| t.join().is_ok());
            if gone { world.drained(seen) } else { Err(Error::other("a client has panicked")) }
        });
        if let Err(error) = result {
            seen.broken(error.to_string());
            world.relieve();
        }
        seen.no_more.store(true, Ordering::SeqCst);
        world.dismiss(seen);
        seen.stop.store(true, Ordering::SeqCst);
        follower.join().map_err(|_| Error::other("the reader of events has panicked"))
    })?;
    report::report(world, &seen, books, options)
}

impl World {
    fn start(options: &Options) -> Result<World> {
        let port = processes::port()?;
        let redis = processes::redis(&options.redis, port, &options.folder)?;
        let (mut ways, mut servers, mut workers) = (Vec::new(), Vec::new(), Vec::new());
        let mut addresses = [SocketAddr::from(([127, 0, 0, 1], 0)); SERVERS];
        for (n, address) in addresses.iter_mut().enumerate() {
            let way = Proxy::start(processes::port()?, port)?;
            address.set_port(processes::port()?);
            servers.push(processes::server(&options.leasehold, n, *address, way.port, &options.folder)?);
            ways.push(way);
        }
        for address in addresses {
            processes::until("the server listens", || processes::listens(address))?;
        }
        for n in 0..WORKERS {
            let server = addresses[n % SERVERS];
            workers.push(processes::worker(&options.leasehold, n, server, &options.folder)?);
        }
        Ok(World { redis, port, ways, servers, workers, addresses, faults: BTreeMap::new(), gone: BTreeSet::new() })
    }

    fn ask(&self, command: &[&str]) -> Result<resp::Value> {
        Connection::open(self.port, Duration::from_secs(30))?.ask(command)
    }

    /// Lets the planned faults come and go.
    fn suffer(&mut self, options: &Options, seen: &Seen) -> Result<()> {
        let mut coming = faults::plan(options.seed, options.length).into_iter().peekable();
        let mut under_way: Vec<Fault> = Vec::new();
        let begun = Instant::now();
        let mut minute = 1;
        while coming.peek().is_some()
            || !under_way.is_empty()
            || !self.gone.is_empty()
            || begun.elapsed() < options.length
        {
            let now = begun.elapsed();
            let (over, still) = under_way.into_iter().partition(|f: &Fault| f.until() <= now);
            under_way = still;
            for fault in over {
                self.undo(&fault)?;
            }
            while let Some(fault) = coming.next_if(|f| f.at <= now) {
                self.watch(seen)?;
                self.inflict(&fault)?;
                *self.faults.entry(fault.name()).or_default() += 1;
                under_way.push(fault);
            }
            self.watch(seen)?;
            if now > Duration::from_secs(60 * minute) {
                minute += 1;
                let (jobs, done) = (lock(&seen.jobs).len(), self.faults.values().sum::<u64>());
                println!("  {:>4} s: {done} faults, {jobs} jobs acknowledged", now.as_secs());
            }
            std::thread::sleep(TICK);
        }
        Ok(())
    }

    fn process(&mut self, target: Target) -> Option<&mut Process> {
        match target {
            Target::Redis => Some(&mut self.redis),
            Target::Server(n) => self.servers.get_mut(n),
            Target::Worker(n) => self.workers.get_mut(n),
            Target::Way(_) => None,
        }
    }

    fn inflict(&mut self, fault: &Fault) -> Result<()> {
        if let Target::Way(n) = fault.target {
            let Some(way) = self.ways.get(n) else { return Ok(()) };
            match fault.kind {
                Kind::Delay => way.set(Mode::Delay(Duration::from_millis(50 + fault.lasts.as_millis() as u64 / 4))),
                Kind::Stall => way.set(Mode::Stall),
                Kind::Swallow => way.set(Mode::Swallow),
                Kind::Refuse => way.set(Mode::Refuse),
                _ => way.cut(),
            }
            return Ok(());
        }
        // What the Redis does not answer because it is being started did not happen.
        match fault.kind {
            Kind::FlushScripts => drop(self.ask(&["SCRIPT", "FLUSH"])),
            Kind::KillListeners => drop(self.ask(&["CLIENT", "KILL", "TYPE", "pubsub"])),
            Kind::Full => drop(self.ask(&["CONFIG", "SET", "maxmemory", "1mb"])),
            _ => {
                let Some(process) = self.process(fault.target) else { return Ok(()) };
                match fault.kind {
                    // It has not come back from the last time.
                    _ if !process.is_there() => {}
                    // Told twice, a server goes at once.
                    Kind::End if process.is_ending() => {}
                    Kind::Kill => process.kill()?,
                    Kind::Stop => process.signal(Signal::STOP)?,
                    _ => process.tell()?,
                }
            }
        }
        Ok(())
    }

    fn undo(&mut self, fault: &Fault) -> Result<()> {
        if let Target::Way(n) = fault.target {
            if let Some(way) = self.ways.get(n) {
                way.set(Mode::Pass);
            }
            return Ok(());
        }
        match fault.kind {
            // It may still be reading its file.
            Kind::Full => {
                processes::until("there is room again", || self.ask(&["CONFIG", "SET", "maxmemory", "0"]).is_ok())?
            }
            Kind::Kill | Kind::End => drop(self.gone.insert(fault.target)),
            Kind::Stop => {
                if let Some(process) = self.process(fault.target).filter(|p| p.is_there()) {
                    process.signal(Signal::CONT)?;
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// A process that ends by itself is an error, and is started again.
    fn watch(&mut self, seen: &Seen) -> Result<()> {
        let all = [&mut self.redis].into_iter().chain(&mut self.servers).chain(&mut self.workers);
        for process in all {
            if let Some(Ended::Broken(what)) = process.ended() {
                seen.broken(what);
                if !process.is_there() {
                    process.again()?;
                }
            }
        }
        // One that was told to end may take its time, which others' faults lengthen.
        for target in std::mem::take(&mut self.gone) {
            match self.process(target) {
                Some(process) if process.is_ending() => drop(self.gone.insert(target)),
                // It had not come back when the fault came, and has by now.
                Some(process) if process.is_there() => {}
                Some(process) => process.again()?,
                None => {}
            }
        }
        Ok(())
    }

    /// Everything goes on, whatever was done to it.
    fn relieve(&mut self) {
        self.ways.iter().for_each(|way| way.set(Mode::Pass));
        for process in [&self.redis].into_iter().chain(&self.servers).chain(&self.workers) {
            // It may not be there.
            let _ = process.signal(Signal::CONT);
        }
    }

    /// Waits until nothing is left to be run, and no group to be dealt with.
    fn drained(&mut self, seen: &Seen) -> Result<()> {
        let begun = Instant::now();
        let mut caller = Caller::new(&self.addresses, 0, seen);
        for queue in 0..3 {
            caller.insist("POST", &format!("/v1/queues/q{queue}/resume"), None, "");
        }
        loop {
            self.watch(seen)?;
            let left = live(&mut caller);
            let due = self.ask(&["ZCARD", "{lh:0}i:groups/due"]).map_or(1, |n| n.number());
            if left == Some(0) && due == 0 {
                return Ok(());
            }
            if begun.elapsed() > DRAIN {
                let what = format!("{left:?} jobs are never run, {due} groups never dealt with");
                return Err(Error::other(format!("{what} in {} s", DRAIN.as_secs())));
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// The workers are told to end.
    fn dismiss(&mut self, seen: &Seen) {
        for worker in &mut self.workers {
            if let Err(error) = worker.end() {
                seen.broken(error.to_string());
            }
        }
    }
}

/// Jobs that have not ended.
fn live(caller: &mut Caller<'_>) -> Option<u64> {
    let (_, answer) = caller.insist("GET", "/v1/queues", None, "")?;
    let live = ["scheduled", "held", "queued", "running", "retrying"];
    let of = |q: &serde_json::Value| live.iter().map(|s| q["counts"][*s].as_u64().unwrap_or(1)).sum::<u64>();
    Some(answer["queues"].as_array()?.iter().map(of).sum())
}
