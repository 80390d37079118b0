//! `sim`: runs seeds.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use sim::explain;
use sim::focus::Focus;
use sim::oracle::Promise;
use sim::plan::{self, Plan};
use sim::report::{self, Options, Outcome, Soak};
use sim::scope::{self, Scope};
use sim::shrink::{self, Budget};
use sim::soak::{self, Record};
use sim::strikes::Strike;
use sim::sweep::{self, scripts};
use sim::tape::{self, Show};
use sim::trace::Trace;

/// A run is mostly short-lived names, records and lists.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const HELP: &str = "\
sim: Leasehold's seeded simulator

USAGE
  sim --seed N [OPTION]…         one seed: what was drawn, what happened, its digest
  sim --seeds A..B [OPTION]…     many seeds (B excluded) on all cores, to the first failure
  sim --plan FILE [OPTION]…      a seed with overridden draws
  sim shrink --seed N|--plan FILE [--out DIR]
                                 the shortest plan found under which the same promise breaks
  sim sweep [--scenario NAME] [--pairs N] [--every N]
                                 short scripts, each once for every fault at every place, and for pairs
  sim exhaust [--scope NAME] [--minutes N]
                                 small worlds walked through whole: every order, every place of two faults
  sim sweep --scenario NAME --strike FAULT@PLACE…
                                 one of them, with a picture of what happened
  sim soak --minutes N|--hours N --out DIR [--from SEED]
                                 seeds until the time is over, from where the last run on the folder ended;
                                 soak.md and soak.json tell what came of it
  sim explain DIR [--focus WHAT] [--until EVENT]
                                 what --out wrote: the report, whether it still breaks so, what led to it, and the
                                 world before and after
  sim corrupt --seeds A..B       each seed told to the oracle with one place wrong, at many places: which
                                 promise objects
  sim pairs --seeds A..B         runs without faults that differ in one thing, as batching, replicas or clocks:
                                 what comes of the work must be the same
  sim replay FILE… [--trace] [--focus TEXT] [--until STEP] [--only STEP] [--against PROGRAM]
                                 what a server recorded (`leasehold --record`): every output must come again

OPTIONS
  --keep-going          with --seeds: list every failure
  --check-determinism   run each seed again in a second process and compare the digests
  --trace               print every event
  --focus WHAT          with --trace, explain and replay: only what concerns it, and large faults: job:ID, group:ID,
                        call:N, replica:N, or any text
  --until EVENT         stop after so many events
  --out DIR             write report.txt, run.plan, trace.txt, timeline.html (open it in a browser), before.txt and
                        after.txt (the world around the last event), and a recording of each replica
  --mute TOPIC          silence a kind of draw, as store-reply, chaos, crash-step, misbehave
  --blind PROMISE       does not look at that promise: what else would catch a bug?
  --tables              with --seeds: which state each input met, which operation each fault; exit status 14 if a
                        cell without a reason is empty
  --digests             with --seeds: print only a digest for each seed
  --jobs N              threads (default: all cores)
  --minutes N           with shrink: how long it may look (default 5); with exhaust: for each scope (60);
                        with soak: how long it runs (60)
  --only STEP           with replay: that step, and the replica's state after it
  --against PROGRAM     with replay: another build of sim, whose outputs are shown at the first step that differs
  --faults N  --jumps N with exhaust: other bounds than the scope's own
  --pairs N             with sweep: sampled pairs of faults for each scenario (default 200)
  --every N             with sweep: only every n-th place (default 1)
  --store redis://…     run a real Redis beside the model: it must do the same, and the replicas live on it
  --help

EXAMPLES
  cargo run --release -p sim -- --seed 42
  cargo run --release -p sim -- --seeds 0..20000
  cargo run --release -p sim -- --seeds 0..200 --check-determinism
  cargo run --release -p sim -- shrink --seed 42 --out /tmp/42
  cargo run --release -p sim -- soak --hours 8 --out /tmp/soak
  cargo run --release -p sim -- --plan /tmp/42/run.plan --trace --focus call:12
  cargo run --release -p sim -- explain /tmp/42

EXIT STATUS
  0 held, 1 usage, 10 safety, 11 liveness, 12 panic, 13 not deterministic, 14 something was never tried
";

#[derive(Default)]
struct Args {
    seed: Option<u64>,
    seeds: Option<(u64, u64)>,
    plan: Option<Plan>,
    mute: Vec<sim::choices::Topic>,
    blind: Vec<Promise>,
    keep_going: bool,
    check_determinism: bool,
    shrink: bool,
    sweep: bool,
    exhaust: bool,
    soak: bool,
    corrupt: bool,
    in_pairs: bool,
    replay: Option<Vec<PathBuf>>,
    explain: Option<PathBuf>,
    show: Show,
    from: Option<u64>,
    scope: Option<String>,
    faults: Option<u8>,
    jumps: Option<u8>,
    scenario: Option<String>,
    strikes: Vec<Strike>,
    pairs: Option<usize>,
    every: Option<u64>,
    trace: bool,
    focus: Option<Focus>,
    until: Option<u64>,
    out: Option<PathBuf>,
    minutes: Option<u64>,
    digests: bool,
    tables: bool,
    jobs: Option<usize>,
    store: Option<leasehold_redis::Address>,
}

fn parse() -> Result<Option<Args>, String> {
    use lexopt::prelude::*;
    let mut args = Args::default();
    let mut parser = lexopt::Parser::from_env();
    let text = |e: lexopt::Error| e.to_string();
    while let Some(arg) = parser.next().map_err(text)? {
        match arg {
            Long("seed") => args.seed = Some(parser.value().map_err(text)?.parse().map_err(text)?),
            Long("seeds") => {
                let range: String = parser.value().map_err(text)?.parse().map_err(text)?;
                let ends = range.split_once("..").and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
                args.seeds = Some(ends.ok_or_else(|| format!("--seeds {range}: must be A..B"))?);
            }
            Long("plan") => {
                let file: String = parser.value().map_err(text)?.parse().map_err(text)?;
                let plan = std::fs::read_to_string(&file).map_err(|e| format!("{file}: {e}"))?;
                args.plan = Some(Plan::parse(&plan)?);
            }
            Long("mute") => {
                let name: String = parser.value().map_err(text)?.parse().map_err(text)?;
                args.mute.push(plan::topic(&name).ok_or_else(|| format!("--mute {name}: no such topic"))?);
            }
            Long("blind") => {
                let name: String = parser.value().map_err(text)?.parse().map_err(text)?;
                let promise = Promise::ALL.iter().find(|p| p.text() == name);
                args.blind.push(*promise.ok_or_else(|| format!("--blind {name}: no such promise"))?);
            }
            Long("jobs") => args.jobs = Some(parser.value().map_err(text)?.parse().map_err(text)?),
            Long("store") => {
                let url: String = parser.value().map_err(text)?.parse().map_err(text)?;
                args.store = Some(url.parse().map_err(|e| format!("--store: {e}"))?);
            }
            Long("keep-going") => args.keep_going = true,
            Long("check-determinism") => args.check_determinism = true,
            Value(word) if word == "shrink" => args.shrink = true,
            Value(word) if word == "sweep" => args.sweep = true,
            Value(word) if word == "exhaust" => args.exhaust = true,
            Value(word) if word == "soak" => args.soak = true,
            Value(word) if word == "corrupt" => args.corrupt = true,
            Value(word) if word == "pairs" => args.in_pairs = true,
            Value(word) if word == "replay" => args.replay = Some(vec![parser.value().map_err(text)?.into()]),
            Value(word) if word == "explain" => args.explain = Some(parser.value().map_err(text)?.into()),
            Long("only") => args.show.only = Some(parser.value().map_err(text)?.parse().map_err(text)?),
            Long("against") => args.show.against = Some(parser.value().map_err(text)?.into()),
            Long("from") => args.from = Some(parser.value().map_err(text)?.parse().map_err(text)?),
            Long("hours") => {
                let hours: u64 = parser.value().map_err(text)?.parse().map_err(text)?;
                args.minutes = Some(hours.saturating_mul(60));
            }
            Value(word) if word == "run" => {}
            Value(file) if args.replay.is_some() => {
                args.replay.iter_mut().for_each(|all| all.push(file.clone().into()))
            }
            Long("scope") => args.scope = Some(parser.value().map_err(text)?.parse().map_err(text)?),
            Long("faults") => args.faults = Some(parser.value().map_err(text)?.parse().map_err(text)?),
            Long("jumps") => args.jumps = Some(parser.value().map_err(text)?.parse().map_err(text)?),
            Long("scenario") => args.scenario = Some(parser.value().map_err(text)?.parse().map_err(text)?),
            Long("strike") => args.strikes.push(parser.value().map_err(text)?.parse().map_err(text)?),
            Long("pairs") => args.pairs = Some(parser.value().map_err(text)?.parse().map_err(text)?),
            Long("every") => args.every = Some(parser.value().map_err(text)?.parse().map_err(text)?),
            Long("focus") => {
                let what: String = parser.value().map_err(text)?.parse().map_err(text)?;
                args.focus = Some(what.parse()?);
            }
            Long("until") => args.until = Some(parser.value().map_err(text)?.parse().map_err(text)?),
            Long("out") => args.out = Some(parser.value().map_err(text)?.into()),
            Long("minutes") => args.minutes = Some(parser.value().map_err(text)?.parse().map_err(text)?),
            Long("trace") => args.trace = true,
            Long("tables") => args.tables = true,
            Long("digests") => args.digests = true,
            Long("help") | Short('h') => return Ok(None),
            other => return Err(other.unexpected().to_string()),
        }
    }
    Ok(Some(args))
}

fn main() -> ExitCode {
    match parse() {
        Ok(None) => {
            print!("{HELP}");
            ExitCode::from(report::HELD)
        }
        Ok(Some(args)) => ExitCode::from(go(&args)),
        Err(error) => usage(&error),
    }
}

fn usage(error: &str) -> ExitCode {
    eprintln!("sim: {error}\n\n{HELP}");
    ExitCode::from(report::USAGE)
}

fn go(args: &Args) -> u8 {
    report::quiet_panics();
    if args.sweep {
        return sweep(args);
    }
    if args.exhaust {
        return exhaust(args);
    }
    if args.soak {
        return soak(args);
    }
    if let Some(files) = &args.replay {
        return replay(args, files);
    }
    if let Some(folder) = &args.explain {
        return explain(args, folder);
    }
    if args.corrupt
        && let Some((from, to)) = args.seeds
    {
        return sim::corrupt::run(from, to, threads(args));
    }
    if args.in_pairs
        && let Some((from, to)) = args.seeds
    {
        return sim::pairs::run_seeds(from, to, threads(args));
    }
    match (args.seeds, args.seed, &args.plan) {
        (Some((from, to)), None, None) => many(args, from, to),
        (None, Some(seed), None) => one(args, Plan::of(seed)),
        (None, None, Some(plan)) => one(args, plan.clone()),
        _ => {
            eprintln!("sim: give one of --seed, --seeds, --plan\n\n{HELP}");
            report::USAGE
        }
    }
}

fn one(args: &Args, mut plan: Plan) -> u8 {
    plan.mute.extend(&args.mute);
    plan.blind.clone_from(&args.blind);
    plan.store = args.store.clone();
    if args.shrink {
        return shrink(args, &plan);
    }
    let from = Instant::now();
    let trace = Trace { print: args.trace, keep: true, focus: args.focus.clone(), kept: Vec::new() };
    let until = args.until.unwrap_or(u64::MAX);
    let outcome = report::run_with(
        &plan,
        &Options { trace, until, tape: args.out.is_some().then_some(u64::MAX), ..Options::default() },
    );
    print!("{}", report::summary(&outcome, Some(from.elapsed())));
    if let Err(error) = artefacts(args, &outcome) {
        eprintln!("sim: {error}");
        return report::USAGE;
    }
    if args.check_determinism && !same_elsewhere(&[(plan.seed, outcome.digest)]) {
        return report::NOT_DETERMINISTIC;
    }
    outcome.status()
}

fn replay(args: &Args, files: &[PathBuf]) -> u8 {
    let focus = args.focus.as_ref().map(Focus::plain).or(args.trace.then(String::new));
    let show = Show { focus, until: args.until, ..args.show.clone() };
    let mut seen = false;
    for file in files {
        if files.len() > 1 {
            println!("{}", file.display());
        }
        match tape::replay(file, &show, &mut |text| println!("{text}")) {
            Ok(tape::End::Same) => seen = true,
            Ok(tape::End::NotThere) => {}
            Ok(tape::End::Differs) => return report::NOT_DETERMINISTIC,
            Err(error) => {
                eprintln!("sim: {error}");
                return report::USAGE;
            }
        }
    }
    if seen { report::HELD } else { report::USAGE }
}

fn explain(args: &Args, folder: &Path) -> u8 {
    let show = explain::Show { focus: args.focus.clone(), until: args.until };
    explain::explain(folder, &show, &mut |text| println!("{text}")).unwrap_or_else(|error| {
        eprintln!("sim: {error}");
        report::USAGE
    })
}

fn sweep(args: &Args) -> u8 {
    let only = args.scenario.as_deref();
    let scenario = scripts::ALL.iter().find(|s| Some(s.name) == only);
    if only.is_some() && scenario.is_none() {
        let names: Vec<&str> = scripts::ALL.iter().map(|s| s.name).collect();
        eprintln!("sim: no such scenario; there are {}", names.join(", "));
        return report::USAGE;
    }
    if !args.strikes.is_empty() {
        let Some(scenario) = scenario else {
            eprintln!("sim: --strike needs --scenario");
            return report::USAGE;
        };
        let trace = Trace { print: args.trace, keep: true, focus: args.focus.clone(), kept: Vec::new() };
        let ran = sweep::run(scenario, &args.strikes, trace);
        print!("{}", sweep::failure(&ran));
        println!("{} {}: {} events, {:?}", ran.scenario, ran.promise(), ran.events, ran.marks);
        return sweep::status(&ran);
    }
    let from = Instant::now();
    let mut shown = Instant::now();
    let extent = sweep::Extent {
        only,
        every: args.every.unwrap_or(1),
        pairs: args.pairs.unwrap_or(200),
        seed: args.seed.unwrap_or(1),
        threads: threads(args),
    };
    let swept = sweep::sweep(extent, &mut |done, all, broken| {
        if shown.elapsed() > Duration::from_secs(2) {
            shown = Instant::now();
            eprintln!("{done} of {all} runs, {broken} broken");
        }
    });
    print!("{}", swept.summary(from.elapsed()));
    for ran in swept.broken.iter().take(if args.keep_going { usize::MAX } else { 3 }) {
        // Once more, with its trace.
        let again = scripts::ALL.iter().find(|s| s.name == ran.scenario);
        let kept = Trace { keep: true, ..Trace::default() };
        println!("{}", again.map_or_else(String::new, |s| sweep::failure(&sweep::run(s, &ran.strikes, kept))));
    }
    swept.broken.first().map_or(report::HELD, sweep::status)
}

fn exhaust(args: &Args) -> u8 {
    let chosen: Vec<&Scope> =
        scope::ALL.iter().filter(|s| args.scope.as_deref().is_none_or(|only| only == s.name)).collect();
    if chosen.is_empty() {
        let names: Vec<&str> = scope::ALL.iter().map(|s| s.name).collect();
        eprintln!("sim: no such scope; there are {}", names.join(", "));
        return report::USAGE;
    }
    let limit = Duration::from_secs(60 * args.minutes.unwrap_or(60));
    let next = AtomicUsize::new(0);
    let worst = AtomicU8::new(report::HELD);
    std::thread::scope(|threads_of| {
        for _ in 0..threads(args).min(chosen.len()) {
            threads_of.spawn(|| {
                while let Some(of) = chosen.get(next.fetch_add(1, Ordering::Relaxed)) {
                    worst.fetch_max(exhaust_one(&of.within(args.faults, args.jumps), limit), Ordering::Relaxed);
                }
            });
        }
    });
    worst.load(Ordering::Relaxed)
}

fn exhaust_one(of: &Scope, limit: Duration) -> u8 {
    let mut shown = Instant::now();
    let walk = scope::walk(of, limit, &mut |so_far| {
        if shown.elapsed() > Duration::from_secs(2) {
            shown = Instant::now();
            eprintln!("{}: {} states, {} ends so far", of.name, so_far.states, so_far.ends);
        }
    });
    println!("{} ({} faults, {} jumps of time)", walk.summary(of.name), of.faults, of.jumps);
    let Some((violation, path)) = &walk.broken else { return report::HELD };
    print!("{}", scope::retrace(of, path));
    if violation.promise.is_liveness() { report::LIVENESS } else { report::SAFETY }
}

fn threads(args: &Args) -> usize {
    args.jobs.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from)).max(1)
}

fn artefacts(args: &Args, outcome: &Outcome) -> Result<(), String> {
    let Some(folder) = &args.out else { return Ok(()) };
    report::write(outcome, folder).map_err(|error| format!("--out {}: {error}", folder.display()))?;
    for tape in &outcome.tapes {
        let path = folder.join(tape.name());
        std::fs::write(&path, tape.parts.concat()).map_err(|error| format!("{}: {error}", path.display()))?;
    }
    let tapes = if outcome.tapes.is_empty() { "" } else { ", and a recording of each replica" };
    println!(
        "written to {}: report.txt, run.plan, trace.txt, timeline.html, before.txt, after.txt{tapes}",
        folder.display()
    );
    Ok(())
}

fn shrink(args: &Args, plan: &Plan) -> u8 {
    let broke = report::run(plan);
    if broke.held() {
        eprintln!("sim: nothing breaks under this plan, so there is nothing to shrink");
        return report::USAGE;
    }
    let mut budget = Budget::default();
    if let Some(minutes) = args.minutes {
        budget.time = Duration::from_secs(60 * minutes);
    }
    let mut shown = Instant::now();
    let shrunk = shrink::shrink(&broke, budget, &mut |runs, smaller| {
        if shown.elapsed() > Duration::from_secs(2) {
            shown = Instant::now();
            eprintln!(
                "{runs} runs: {} still breaks, after {} events, {} draws",
                smaller.promise(),
                smaller.counts.events,
                smaller.plan.set.len()
            );
        }
    });
    let trace = Trace { keep: true, ..Trace::default() };
    let outcome = report::run_with(&shrunk.plan, &Options { trace, ..Options::default() });
    println!(
        "{} broke at event {} and now does at event {}; {} runs\n",
        broke.promise(),
        broke.counts.events,
        outcome.counts.events,
        shrunk.runs
    );
    print!("{}", report::failure(&outcome));
    print!("\n{}", shrunk.plan);
    if let Err(error) = artefacts(args, &outcome) {
        eprintln!("sim: {error}");
        return report::USAGE;
    }
    outcome.status()
}

/// Runs seeds on all threads, and gives what came of each, in no order, until it is told to stop.
fn run_seeds(args: &Args, from: u64, to: u64, stop: &AtomicBool, each: &mut dyn FnMut(Outcome)) {
    let next = AtomicU64::new(from);
    let (sender, receiver) = mpsc::channel::<Outcome>();
    std::thread::scope(|scope| {
        for _ in 0..threads(args) {
            let (sender, next) = (sender.clone(), &next);
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= to {
                        break;
                    }
                    let mut plan = Plan::of(seed);
                    plan.mute.extend(&args.mute);
                    plan.blind.clone_from(&args.blind);
                    plan.store = args.store.clone();
                    if sender.send(report::run(&plan)).is_err() {
                        break;
                    }
                }
            });
        }
        drop(sender);
        receiver.into_iter().for_each(each);
    });
}

/// Seeds of which each is run before the next such number begins.
const SOAK_PAGE: u64 = 64;
/// Seeds that are run in a second process before anything else.
const SOAK_DETERMINISM: u64 = 20;

/// Seeds that broke in a soak of which everything is written down.
const SOAK_KEPT: usize = 10;

fn keep(outcome: &Outcome, folder: &Path, before: usize) {
    let path = folder.join(format!("seed-{}", outcome.plan.seed));
    if before < SOAK_KEPT
        && let Err(error) = report::write(outcome, &path)
    {
        eprintln!("sim: {}: {error}", path.display());
    }
}

fn soak(args: &Args) -> u8 {
    let Some(folder) = &args.out else {
        eprintln!("sim: soak needs --out DIR, where its state and its reports are kept\n\n{HELP}");
        return report::USAGE;
    };
    let told = |what: &str, error: std::io::Error| {
        eprintln!("sim: {what} {}: {error}", folder.display());
        report::USAGE
    };
    let mut record = match Record::load(folder, args.from.unwrap_or(0)) {
        Ok(record) => record,
        Err(error) => return told("cannot go on from", error),
    };
    record.begin();
    let go_on = AtomicBool::new(false);
    let mut digests = Vec::new();
    run_seeds(args, record.next, record.next + SOAK_DETERMINISM, &go_on, &mut |o| {
        digests.push((o.plan.seed, o.digest))
    });
    digests.sort_unstable();
    if !same_elsewhere(&digests) {
        return report::NOT_DETERMINISTIC;
    }
    let (begun, before) = (Instant::now(), record.took);
    let limit = Duration::from_secs(60 * args.minutes.unwrap_or(60));
    let mut shown = Instant::now();
    while begun.elapsed() < limit {
        let to = record.next + SOAK_PAGE;
        run_seeds(args, record.next, to, &go_on, &mut |outcome| {
            if !outcome.held() {
                println!("{}", report::failure(&outcome));
                keep(&outcome, folder, record.soak.broken.len());
            }
            record.soak.add(&outcome);
        });
        record.next = to;
        record.took = before + begun.elapsed();
        if let Err(error) = record.save(folder) {
            return told("cannot write to", error);
        }
        if shown.elapsed() > Duration::from_secs(10) {
            shown = Instant::now();
            eprintln!("{}", record.progress());
        }
    }
    print!("{}", record.soak.summary(record.took));
    println!("written to {}: soak.md, soak.json, {}", folder.display(), soak::STATE);
    record.soak.status()
}

fn many(args: &Args, from: u64, to: u64) -> u8 {
    let started = Instant::now();
    let mut soak = Soak::default();
    let mut digests = Vec::new();
    let stop = AtomicBool::new(false);
    let mut shown = Instant::now();
    run_seeds(args, from, to, &stop, &mut |outcome| {
        digests.push((outcome.plan.seed, outcome.digest));
        if !outcome.held() && !args.digests {
            println!("{}", report::failure(&outcome));
            if !args.keep_going {
                stop.store(true, Ordering::Relaxed);
            }
        }
        soak.add(&outcome);
        if shown.elapsed() > Duration::from_secs(2) && !args.digests {
            shown = Instant::now();
            let secs = started.elapsed().as_secs_f64();
            eprintln!(
                "{} of {} seeds, {} broken, {:.0} events/s, marks unreached: {:?}",
                soak.seeds,
                to.saturating_sub(from),
                soak.broken.len(),
                soak.events as f64 / secs,
                soak.unreached()
            );
        }
    });
    digests.sort_unstable();
    if args.digests {
        digests.iter().for_each(|(seed, digest)| println!("{seed} digest {digest:016x}"));
        return soak.status();
    }
    print!("{}", soak.summary(started.elapsed()));
    if args.tables {
        print!("\n{}", soak.tried.markdown());
        let (empty, wrong) = (soak.tried.empty(), soak.tried.wrong());
        empty.iter().for_each(|cell| println!("never  {cell}"));
        wrong.iter().for_each(|cell| println!("reached  {cell}"));
        if soak.broken.is_empty() && !(empty.is_empty() && wrong.is_empty()) {
            return report::UNTRIED;
        }
    }
    if args.check_determinism && !same_elsewhere(&digests) {
        return report::NOT_DETERMINISTIC;
    }
    soak.status()
}

/// Runs the same seeds in a second process and compares.
fn same_elsewhere(digests: &[(u64, u64)]) -> bool {
    let (Some(first), Some(last)) = (digests.first(), digests.last()) else { return true };
    let range = format!("{}..{}", first.0, last.0 + 1);
    let output = std::env::current_exe().and_then(|exe| {
        std::process::Command::new(exe).args(["--seeds", &range, "--digests", "--keep-going"]).output()
    });
    let text = match output {
        Ok(output) => String::from_utf8_lossy(&output.stdout).into_owned(),
        Err(error) => {
            eprintln!("sim: a second process could not be run: {error}");
            return false;
        }
    };
    let mut same = true;
    for (seed, digest) in digests {
        let line = format!("{seed} digest {digest:016x}");
        if !text.lines().any(|l| l == line) {
            println!(
                "NOT DETERMINISTIC seed {seed}: {digest:016x} here, there {:?}",
                text.lines().find(|l| l.starts_with(&format!("{seed} ")))
            );
            same = false;
        }
    }
    if same {
        println!("deterministic: {} digests are the same in a second process", digests.len());
    }
    same
}
