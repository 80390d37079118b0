//! Power cuts, disk faults, flipped bits and kills for Leasehold's embedded store, and faults of every kind
//! for servers on one Redis; each from a seed.

mod bodies;
mod books;
mod crowd;
mod cuts;
mod faults;
mod flips;
mod full;
mod interpose;
mod kill;
mod local;
mod redis;
mod rng;
mod server;
mod space;
mod state;
mod trace;
mod workload;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

const USAGE: &str = "\
usage: harness COMMAND [--seed N] …

  cuts    power cuts at random points of recorded workloads, and again after recovery
            --cuts N (1000)  --each N (200): cuts of one workload  --cut K: only this one of the seed's
            --trace FILE: the workload that an earlier run kept, with --cut K
  flips   one bit of a file is flipped: noticed, told, and nothing else lost
            --flips N (300)  --each N (100)
  faults  each of the first calls to the disk fails in turn, in six ways
            --calls N (200)  --every N (1)
  kill    kill -9 of a real server at random instants, under load
            --rounds N (20)  --server PATH (built beside this one)
  full    a real server on a small file system that is filled under it, until there is room again
            --rounds N (5)  --server PATH  --folder DIR: on a file system below 1 GiB, which is filled;
            without it a small one is mounted for the time, or a limit on the size of files stands in
  space   a job delayed for a month and many short ones: what is on disk in the end
            --jobs N (1000000)  --events N (1000): entries that the log keeps
  bodies  random bodies for every call of a real server: no 5xx, and memory that stays flat
            --bodies N (100000)  --server PATH
  crowd   idle connections, long polls and slow clients beside submits: their times, and the memory
            --idle N (5000)  --polls N (1000)  --slow N (200)  --submitters N (8)  --seconds N (20)  --server PATH
  open    seconds to open a store of many live jobs
            --jobs N (1000000)

  redis   three servers on one Redis and eight workers, all killed, stopped, cut off and started again
            --minutes N (30)  --seconds N: besides, or instead  --server PATH  --redis PATH (redis-server)
            --folder DIR: where the logs and the Redis's file are kept

  --folder DIR   where a store is made (space, open, kill, full; default: a temporary one)
exit: 0 held, 1 usage or the machine, 10 broken";

struct Args {
    command: String,
    seed: u64,
    numbers: Vec<(&'static str, u64)>,
    paths: Vec<(&'static str, PathBuf)>,
}

const NUMBERS: [&str; 16] = [
    "cuts",
    "each",
    "cut",
    "flips",
    "calls",
    "every",
    "rounds",
    "jobs",
    "events",
    "bodies",
    "idle",
    "polls",
    "slow",
    "submitters",
    "minutes",
    "seconds",
];
const PATHS: [&str; 4] = ["server", "folder", "trace", "redis"];

impl Args {
    fn parse() -> Result<Args, lexopt::Error> {
        use lexopt::prelude::*;
        let mut args = Args { command: String::new(), seed: 0, numbers: Vec::new(), paths: Vec::new() };
        let mut parser = lexopt::Parser::from_env();
        while let Some(arg) = parser.next()? {
            match arg {
                Long("seed") => args.seed = parser.value()?.parse()?,
                Long("help") | Short('h') => args.command = "help".into(),
                Value(command) if args.command.is_empty() => args.command = command.string()?,
                Long(name) => {
                    let number = NUMBERS.into_iter().find(|n| *n == name);
                    let path = PATHS.into_iter().find(|n| *n == name);
                    match (number, path) {
                        (Some(name), _) => args.numbers.push((name, parser.value()?.parse()?)),
                        (_, Some(name)) => args.paths.push((name, parser.value()?.into())),
                        _ => return Err(arg.unexpected()),
                    }
                }
                other => return Err(other.unexpected()),
            }
        }
        Ok(args)
    }

    fn number(&self, name: &str) -> Option<u64> {
        self.numbers.iter().rev().find(|(n, _)| *n == name).map(|(_, v)| *v)
    }

    fn path(&self, name: &str) -> Option<&Path> {
        self.paths.iter().rev().find(|(n, _)| *n == name).map(|(_, p)| p.as_path())
    }

    /// A folder to make a store in, and what removes it.
    fn folder(&self) -> Result<(PathBuf, Option<tempfile::TempDir>), String> {
        match self.path("folder") {
            Some(path) => Ok((path.to_owned(), None)),
            None => {
                let temporary = tempfile::tempdir().map_err(|e| e.to_string())?;
                Ok((temporary.path().join("store"), Some(temporary)))
            }
        }
    }
}

fn main() -> ExitCode {
    let args = match Args::parse() {
        Ok(args) => args,
        Err(error) => {
            eprintln!("{error}\n{USAGE}");
            return ExitCode::from(1);
        }
    };
    let begun = Instant::now();
    let result = match args.command.as_str() {
        "cuts" => run_cuts(&args),
        "flips" => run_flips(&args),
        "faults" => run_faults(&args),
        "kill" => run_kill(&args),
        "full" => match run_full(&args) {
            Ok(Full::Elsewhere(code)) => return ExitCode::from(code),
            Ok(Full::Here(broken)) => Ok(broken),
            Err(error) => Err(error),
        },
        "redis" => run_redis(&args),
        "space" => run_space(&args),
        "open" => run_open(&args),
        "bodies" => run_bodies(&args),
        "crowd" => run_crowd(&args),
        "help" => {
            println!("{USAGE}");
            return ExitCode::SUCCESS;
        }
        other => Err(format!("there is no command `{other}`\n{USAGE}")),
    };
    println!("took                     {:.0} s", begun.elapsed().as_secs_f64());
    match result {
        Ok(broken) if broken.is_empty() => {
            println!("held");
            ExitCode::SUCCESS
        }
        Ok(broken) => {
            println!("BROKEN: {}", broken.len());
            broken.iter().take(100).for_each(|what| println!("  {what}"));
            ExitCode::from(10)
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::from(1)
        }
    }
}

type Broken = Result<Vec<String>, String>;

/// The seeds that are run, with the numbers of what is done to each.
fn shares(args: &Args, total: u64, each: u64) -> impl Iterator<Item = (u64, std::ops::Range<u64>)> + use<> {
    let (seed, count) = (args.seed, total.div_ceil(each.max(1)));
    (0..count).map(move |n| (seed + n, 0..each.min(total - n * each)))
}

/// Keeps a workload that cannot be made again: the store's own threads were in it.
fn keep(recorded: &cuts::Recorded) -> String {
    let path = std::env::temp_dir().join(format!("harness-{}.trace", recorded.seed));
    let kept = postcard::to_allocvec(recorded).map_err(|e| e.to_string());
    match kept.and_then(|bytes| std::fs::write(&path, bytes).map_err(|e| e.to_string())) {
        Ok(()) => format!(" --trace {}", path.display()),
        Err(error) => format!(" (the trace could not be kept: {error})"),
    }
}

fn run_cuts(args: &Args) -> Broken {
    let (total, each) = (args.number("cuts").unwrap_or(1_000), args.number("each").unwrap_or(200));
    let only = args.number("cut");
    let (mut all, mut counts, mut broken) = (cuts::Found::default(), workload::Counts::default(), Vec::new());
    let mut hits = 0;
    let shares: Vec<_> = match only {
        Some(cut) => vec![(args.seed, cut..cut + 1)],
        None => shares(args, total, each).collect(),
    };
    for (seed, numbers) in shares {
        let recorded = match args.path("trace") {
            Some(path) => {
                let bytes = std::fs::read(path).map_err(|e| e.to_string())?;
                postcard::from_bytes(&bytes).map_err(|e| e.to_string())?
            }
            None => cuts::record(seed, only.is_some())?,
        };
        let found = cuts::cut(&recorded, numbers)?;
        broken.extend(recorded.problems.iter().map(|what| format!("seed {seed}: {what}")));
        if !found.broken.is_empty() {
            let kept = if recorded.shape.inline { String::new() } else { keep(&recorded) };
            let told = |(cut, what): &(u64, String)| format!("harness cuts --seed {seed} --cut {cut}{kept}: {what}");
            broken.extend(found.broken.iter().map(told));
        }
        counts.add(recorded.counts);
        hits += recorded.hits;
        all.add(found);
        if !broken.is_empty() {
            break;
        }
    }
    println!(
        "groups acknowledged      {}: {} jobs submitted, {} completed",
        counts.groups, counts.submitted, counts.completed
    );
    println!("kills and ends meanwhile {}", counts.reopened);
    println!(
        "calls made to fail       {hits}: {} stops, {} groups in doubt, {} calls refused meanwhile",
        counts.stopped, counts.in_doubt, counts.refused_while_stopped
    );
    println!("power cuts               {} ({} jobs looked at)", all.cuts, all.jobs);
    println!("group under way          {} times there, {} times not, {} times torn", all.whole, all.absent, all.torn);
    println!("went on and cut again    {} stores, four times each", all.again);
    Ok(broken)
}

fn run_flips(args: &Args) -> Broken {
    let (total, each) = (args.number("flips").unwrap_or(300), args.number("each").unwrap_or(100));
    let (mut all, mut broken) = (flips::Found::default(), Vec::new());
    for (seed, numbers) in shares(args, total, each) {
        // Even seeds: without faults.
        let recorded = cuts::record(2 * seed, true)?;
        let found = flips::flip(&recorded, numbers)?;
        let broke = !found.broken.is_empty();
        broken.extend(found.broken.into_iter().map(|(n, what)| format!("seed {seed} flip {n}: {what}")));
        all.flips += found.flips;
        all.refused += found.refused;
        all.told += found.told;
        all.last_group += found.last_group;
        all.unused += found.unused;
        if broke {
            break;
        }
    }
    println!("bits flipped             {}", all.flips);
    println!("not opened, with reason  {}", all.refused);
    println!("opened, and told         {}", all.told);
    println!("taken for a torn end     {} (told)", all.last_group);
    println!("nothing depended on it   {}", all.unused);
    Ok(broken)
}

fn run_faults(args: &Args) -> Broken {
    let (calls, every) = (args.number("calls").unwrap_or(200), args.number("every").unwrap_or(1));
    let found = faults::fail(args.seed, calls, every)?;
    let counts = found.counts;
    println!("runs                     {}, {} calls made to fail", found.runs, found.failed_calls);
    println!(
        "stops                    {}, each followed by a refusal: {}",
        counts.stopped, counts.refused_while_stopped
    );
    println!("groups in doubt          {}, each there as a whole or not at all", counts.in_doubt);
    println!(
        "groups acknowledged      {}: {} jobs submitted, {} completed",
        counts.groups, counts.submitted, counts.completed
    );
    Ok(found.broken)
}

fn run_kill(args: &Args) -> Broken {
    let binary = binary(args)?;
    let (folder, _temporary) = args.folder()?;
    let rounds = args.number("rounds").unwrap_or(20);
    let report = kill::kill(&binary, &folder, args.seed, rounds).map_err(|e| e.to_string())?;
    println!("rounds of kill -9        {}, and {} while it started", report.rounds, report.killed_starting);
    println!("jobs acknowledged        {}", report.submitted);
    println!("completions acknowledged {}", report.completed);
    println!("calls repeated           {}", report.repeats);
    println!("jobs in the audit        {}", report.audited);
    Ok(report.broken)
}

/// Where the file system was filled.
enum Full {
    Here(Vec<String>),
    /// By this program run again, with its exit status.
    Elsewhere(u8),
}

fn run_full(args: &Args) -> Result<Full, String> {
    let binary = binary(args)?;
    let rounds = args.number("rounds").unwrap_or(5);
    let folder = args.path("folder");
    if folder.is_none() {
        let (seed, rounds) = (args.seed.to_string(), rounds.to_string());
        let server = binary.display().to_string();
        let more = ["--seed", &seed, "--rounds", &rounds, "--server", &server].map(str::to_owned);
        if let Some(code) = full::mounted(&more).map_err(|e| e.to_string())? {
            return Ok(Full::Elsewhere(code));
        }
        println!("nothing can be mounted here: a limit on the size of files stands in for a full disk");
    }
    let report = full::full(&binary, folder, args.seed, rounds).map_err(|e| e.to_string())?;
    println!("rounds                   {}, and {} kills while the disk was full", report.rounds, report.killed);
    println!("jobs acknowledged        {}, {} refused as `store_full`", report.submitted, report.refused);
    println!(
        "calls refused as 503     {} of {} sweeps from the first failed write until there was room",
        report.unavailable, report.swept
    );
    println!("submits in doubt         {}", report.in_doubt);
    Ok(Full::Here(report.broken))
}

fn run_redis(args: &Args) -> Broken {
    let leasehold = binary(args)?;
    let (minutes, seconds) = match (args.number("minutes"), args.number("seconds")) {
        (None, None) => (30, 0),
        (minutes, seconds) => (minutes.unwrap_or(0), seconds.unwrap_or(0)),
    };
    let (folder, _temporary) = args.folder()?;
    let options = redis::Options {
        leasehold,
        redis: args.path("redis").unwrap_or(Path::new("redis-server")).to_owned(),
        folder,
        seed: args.seed,
        length: std::time::Duration::from_secs(60 * minutes + seconds),
    };
    redis::run(&options).map_err(|e| e.to_string())
}

fn binary(args: &Args) -> Result<PathBuf, String> {
    match args.path("server") {
        Some(path) => Ok(path.to_owned()),
        None => server::binary().map_err(|e| e.to_string()),
    }
}

/// What the server may grow by between a tenth of the bodies and the last: its store's caches still fill.
const GROWTH_KIB: u64 = 48 * 1024;

fn run_bodies(args: &Args) -> Broken {
    let (folder, _temporary) = args.folder()?;
    let total = args.number("bodies").unwrap_or(100_000);
    let report = bodies::bodies(&binary(args)?, &folder, args.seed, total).map_err(|e| e.to_string())?;
    let [early, half, end] = report.memory;
    println!("calls that take a body   {}", report.endpoints);
    println!(
        "answers                  2xx {}, 4xx {}, 5xx {}",
        report.answers[2], report.answers[4], report.answers[5]
    );
    println!("memory                   {} MiB, {} MiB, {} MiB", early / 1024, half / 1024, end / 1024);
    let mut broken = report.broken;
    if end > early + GROWTH_KIB {
        broken.push("the memory grows with what is refused".to_owned());
    }
    Ok(broken)
}

fn run_crowd(args: &Args) -> Broken {
    let (folder, _temporary) = args.folder()?;
    let number = |name, default| args.number(name).unwrap_or(default);
    let crowd = crowd::Crowd {
        idle: number("idle", 5_000),
        polls: number("polls", 1_000),
        slow: number("slow", 200),
        submitters: number("submitters", 8),
        seconds: number("seconds", 20),
    };
    let report = crowd::crowd(&binary(args)?, &folder, crowd).map_err(|e| e.to_string())?;
    for (name, latency) in [("alone", report.alone), ("crowded", report.crowded)] {
        let ms = |time: std::time::Duration| time.as_secs_f64() * 1e3;
        println!(
            "submits, {name:<15} {} a second; p50 {:.2} ms, p99 {:.2} ms, longest {:.0} ms",
            latency.calls as u64 / crowd.seconds.max(1),
            ms(latency.p50),
            ms(latency.p99),
            ms(latency.longest)
        );
    }
    let [before, with, after] = report.memory;
    println!(
        "memory                   {} MiB, {} MiB with the crowd, {} MiB after it",
        before >> 10,
        with >> 10,
        after >> 10
    );
    println!("slow clients sent away   {}", report.sent_away);
    Ok(report.broken)
}

fn run_space(args: &Args) -> Broken {
    let (folder, _temporary) = args.folder()?;
    let jobs = args.number("jobs").unwrap_or(1_000_000);
    let ratio = space::space(&folder, jobs, args.number("events").unwrap_or(1_000))?;
    Ok(if ratio > 3.0 { vec![format!("{ratio:.2} bytes on disk for each that lives")] } else { Vec::new() })
}

fn run_open(args: &Args) -> Broken {
    let (folder, _temporary) = args.folder()?;
    space::opening(&folder, args.number("jobs").unwrap_or(1_000_000))?;
    Ok(Vec::new())
}
