//! What a run says.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use leasehold_core::replica::Mark;

use crate::choices::Drawn;
use crate::corrupt::Corruption;
use crate::explain;
use crate::oracle::{self, Promise, Violation};
use crate::picture;
use crate::plan::Plan;
use crate::settings;
use crate::setup::{SECOND, Setup};
use crate::state::Watch;
use crate::tables::Tables;
use crate::tape::Tape;
use crate::timeline;
use crate::trace::{self, Entry, Trace};
use crate::twin::Twin;
use crate::world::{Counts, World};

/// How a run ended.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub plan: Plan,
    pub setup: Setup,
    pub digest: u64,
    pub counts: Counts,
    pub marks: BTreeMap<Mark, u64>,
    pub sim_us: u64,
    pub checks: u64,
    pub jobs: usize,
    pub groups: usize,
    pub broken: Option<Violation>,
    /// The message of a panic, wherever it came from.
    pub panicked: Option<String>,
    /// Stopped after so many events as were allowed, and so proves nothing.
    pub stopped: bool,
    /// What was drawn, if that was asked for; of faults, what was not harmless.
    pub drawn: Vec<Drawn>,
    /// What happened, if it was to be kept.
    pub trace: Vec<Entry>,
    /// Recordings of the replicas' lives, if they were to be made.
    pub tapes: Vec<Tape>,
    /// What met what.
    pub tried: Box<Tables>,
    /// How the world stood, if that was to be written down.
    pub watch: Option<Box<Watch>>,
    /// What the oracle was told wrongly, if that was asked for.
    pub corruption: Option<Box<Corruption>>,
}

/// How a plan is run.
#[derive(Clone, Debug)]
pub struct Options {
    pub trace: Trace,
    pub until: u64,
    pub record: bool,
    /// Replicas are recorded.
    pub tape: Option<u64>,
    /// The world is written down as well.
    pub watch: Option<Box<Watch>>,
    /// The oracle is told something wrong.
    pub corruption: Option<Corruption>,
}

impl Default for Options {
    fn default() -> Options {
        Options { trace: Trace::default(), until: u64::MAX, record: false, tape: None, watch: None, corruption: None }
    }
}

pub const HELD: u8 = 0;
pub const USAGE: u8 = 1;
pub const SAFETY: u8 = 10;
pub const LIVENESS: u8 = 11;
pub const PANIC: u8 = 12;
pub const NOT_DETERMINISTIC: u8 = 13;
pub const UNTRIED: u8 = 14;

impl Outcome {
    pub fn held(&self) -> bool {
        self.status() == HELD
    }

    pub fn status(&self) -> u8 {
        match (&self.panicked, &self.broken) {
            (Some(_), _) => PANIC,
            (None, _) if self.stopped => HELD,
            (None, Some(violation)) if violation.promise.is_liveness() => LIVENESS,
            (None, Some(_)) => SAFETY,
            (None, None) => HELD,
        }
    }

    /// How it ended and at which event.
    pub fn brief(&self) -> String {
        let broke = if self.held() { "" } else { "BROKEN " };
        format!("{broke}{} at event {}", self.promise(), self.counts.events)
    }

    pub fn promise(&self) -> &'static str {
        match (&self.panicked, &self.broken) {
            (Some(_), _) => "panic",
            // What a run that is cut short says of its end means nothing.
            (None, _) if self.stopped => "stopped",
            (None, Some(violation)) => violation.promise.text(),
            (None, None) => "held",
        }
    }
}

/// Runs one plan to its end.
pub fn run(plan: &Plan) -> Outcome {
    run_with(plan, &Options::default())
}

pub fn run_with(plan: &Plan, options: &Options) -> Outcome {
    let mut choices = plan.choices();
    if options.record {
        choices.record();
    }
    let setup = Setup::draw(plan.seed, &mut choices);
    let mut world = World::new(setup.clone(), choices);
    world.trace = options.trace.clone();
    world.until = options.until;
    world.taping = options.tape;
    world.blind.clone_from(&plan.blind);
    oracle::blind(&plan.blind);
    world.watch.clone_from(&options.watch);
    world.corruption = options.corruption.clone().map(Box::new);
    if let Some(address) = &plan.store {
        match Twin::open(address, plan.seed) {
            Ok(twin) => world.store.twin = Some(Arc::new(Mutex::new(twin))),
            Err(error) => world.violate(Promise::BooksBalance, format!("no store at {address}: {error}")),
        }
    }
    let ran = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| world.run()));
    if world.broken.is_none() {
        let theirs = world.store.beside(|twin, model| twin.end(model));
        world.agree(theirs);
    }
    world.close_corruption();
    // What broke after the last event has no event of its own.
    world.watch_end();
    let panicked = ran.err().map(|cause| {
        let text = cause.downcast_ref::<String>().cloned();
        text.or_else(|| cause.downcast_ref::<&str>().map(|s| (*s).to_owned())).unwrap_or_default()
    });
    Outcome {
        plan: plan.clone(),
        setup,
        digest: world.digest.value(),
        sim_us: world.now,
        checks: world.oracle.checks(),
        tried: std::mem::take(&mut world.oracle.tried),
        jobs: world.oracle.known().count(),
        groups: world.oracle.groups(),
        broken: world.broken.take(),
        panicked,
        stopped: world.stopped(),
        drawn: world.choices.recorded(),
        tapes: world.tapes.drain(..).chain(world.hosts.iter_mut().filter_map(|h| h.tape.take()).map(|t| *t)).collect(),
        trace: std::mem::take(&mut world.trace.kept),
        watch: world.watch,
        corruption: world.corruption.take(),
        counts: world.counts,
        marks: world.marks,
    }
}

/// Silences the message of panics that are caught and reported.
pub fn quiet_panics() {
    std::panic::set_hook(Box::new(|_| {}));
}

/// One screen about one seed.
pub fn summary(o: &Outcome, took: Option<Duration>) -> String {
    let mut out = String::new();
    let s = &o.setup;
    let c = &s.config;
    let w = &mut out;
    // Writing to a string cannot fail.
    let _ = writeln!(
        w,
        "seed {}  {}  {} replicas, {} clients, {} workers",
        s.seed,
        s.regime.text(),
        s.replicas,
        s.clients,
        s.workers
    );
    let _ = writeln!(
        w,
        "config  mailbox {} commits {} reads {} commit_txns {} sweep {} ms scrub {} ms retention {} ms lease {} ms",
        c.mailbox, c.commits, c.reads, c.commit_txns, c.sweep_ms, c.scrub_ms, c.retention_ms, c.lease_ms
    );
    let faults: Vec<String> = s.faults.on().iter().map(|(name, weight)| format!("{name} {weight}")).collect();
    let _ = writeln!(w, "faults on  {}", if faults.is_empty() { "none".into() } else { faults.join(", ") });
    let met: Vec<String> = o.counts.faults.iter().map(|(name, n)| format!("{name} {n}")).collect();
    let _ = writeln!(w, "faults met  {}", if met.is_empty() { "none".into() } else { met.join(", ") });
    let n = &o.counts;
    let _ = writeln!(
        w,
        "counts  {} jobs, {} groups, {} calls, {} handed out, {} completed, {} slots, {} steps, {} reads, {} commits, {} txns applied, {} refused, {} checks",
        o.jobs,
        o.groups,
        n.calls,
        n.claimed,
        n.completed,
        n.slots,
        n.steps,
        n.reads,
        n.commits,
        n.txns_applied,
        n.txns_refused,
        o.checks
    );
    let marks: Vec<String> = o.marks.iter().map(|(mark, n)| format!("{mark:?} {n}")).collect();
    let _ = writeln!(w, "marks  {}", marks.join(", "));
    let _ = write!(w, "{} events, {} simulated s", n.events, o.sim_us / SECOND);
    let _ = match took {
        Some(took) => writeln!(
            w,
            ", {:.1} ms, {:.0} events/s",
            took.as_secs_f64() * 1e3,
            n.events as f64 / took.as_secs_f64().max(1e-9)
        ),
        None => writeln!(w),
    };
    if !o.held() {
        let _ = write!(w, "{}", failure(o));
    }
    if o.stopped {
        let _ = writeln!(w, "stopped after {} events: what would have come is not known", o.counts.events);
    }
    let _ = writeln!(w, "digest {:016x}", o.digest);
    out
}

/// What broke, and how to see it again; with a picture of what led to it, if the trace was kept.
pub fn failure(o: &Outcome) -> String {
    let mut out = verdict(o);
    if !out.is_empty() && !o.trace.is_empty() {
        let _ = write!(out, "\n{}", led_to(o));
    }
    out
}

/// A picture of what led to it.
pub fn led_to(o: &Outcome) -> String {
    let subjects = o.broken.as_ref().map(|violation| picture::subjects(&violation.what)).unwrap_or_default();
    picture::picture(&o.trace, &subjects, SLICE)
}

/// What broke, in a few lines.
pub fn verdict(o: &Outcome) -> String {
    let mut out = String::new();
    let at = format!("event {}, {}.{:06} s", o.counts.events, o.sim_us / SECOND, o.sim_us % SECOND);
    let what = match (&o.panicked, &o.broken) {
        (Some(panic), _) => panic.clone(),
        (None, Some(violation)) => violation.what.clone(),
        (None, None) => return out,
    };
    let _ = writeln!(out, "BROKEN {} at {at}", o.promise());
    out.push_str(&wrapped("", trace::short(&what, 600).split(' '), " "));
    if let Some(says) = says(o.promise()) {
        out.push_str(&wrapped("promised  ", says.split(' '), " "));
    }
    let blind: String = o.plan.blind.iter().map(|promise| format!(" --blind {}", promise.text())).collect();
    let _ = match o.plan.mute.is_empty() && o.plan.set.is_empty() {
        true => writeln!(out, "  replay    cargo run --release -p sim -- --seed {}{blind}", o.plan.seed),
        false => writeln!(out, "  replay    cargo run --release -p sim -- --plan {PLAN}"),
    };
    let listed = |name: &str, all: Vec<String>| match all.is_empty() {
        true => format!("  {name}none\n"),
        false => wrapped(name, all.iter().map(String::as_str), ", "),
    };
    out.push_str(&listed("differs   ", settings::differing(&o.setup)));
    out.push_str(&listed("faults    ", settings::faults(&o.setup)));
    let met: Vec<String> = o.counts.faults.iter().map(|(name, n)| format!("{name} {n}")).collect();
    out.push_str(&listed("met       ", met));
    out
}

/// The plan that a failure tells to replay; a folder that is written has it by its path.
const PLAN: &str = "FILE";
/// Columns of a screen.
const SCREEN: usize = 160;

/// A list over as many lines as it needs.
fn wrapped<'a>(name: &str, all: impl Iterator<Item = &'a str>, between: &str) -> String {
    let indent = 2 + name.len();
    let mut out = format!("  {name}");
    let mut column = indent;
    for (n, item) in all.enumerate() {
        let width = item.chars().count() + between.len();
        if n > 0 {
            out.push_str(between.trim_end());
            if column + width > SCREEN {
                out.push_str(&format!("\n{}", " ".repeat(indent)));
                column = indent;
            } else {
                out.push(' ');
            }
        }
        out.push_str(item);
        column += width;
    }
    out + "\n"
}

/// What a promise says, as docs/INVARIANTS.md has it: its first clause.
fn says(promise: &str) -> Option<&'static str> {
    let head = format!("| `{promise}` | ");
    let all = PROMISES.lines().find_map(|line| line.strip_prefix(&head)?.split(" | ").next())?;
    all.split([';', '.']).next()
}

const PROMISES: &str = include_str!("../../docs/INVARIANTS.md");

/// What tells this build from another: a hash of the program.
pub fn build() -> String {
    static BUILD: OnceLock<String> = OnceLock::new();
    let hash = || {
        let program = std::env::current_exe().and_then(std::fs::read).unwrap_or_default();
        format!("sim {} {:016x}", env!("CARGO_PKG_VERSION"), xxhash_rust::xxh3::xxh3_64(&program))
    };
    BUILD.get_or_init(hash).clone()
}

/// Everything about a run, as files in a folder. It is run once more, with all that is written down.
///
/// # Errors
/// If a file cannot be written.
pub fn write(o: &Outcome, folder: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(folder)?;
    let events = o.counts.events;
    let until = if o.stopped { events } else { u64::MAX };
    // Beside a real store nothing is run twice.
    let watched = o.plan.store.is_none().then(|| explain::watched(&o.plan, until, events, true));
    let watched = watched.as_ref().unwrap_or(o);
    let plan = folder.join("run.plan");
    std::fs::write(folder.join("report.txt"), report(watched, &plan))?;
    std::fs::write(&plan, format!("# {}\n{}", o.brief(), o.plan))?;
    let lines: String = watched.trace.iter().map(|entry| trace::line(entry) + "\n").collect();
    std::fs::write(folder.join("trace.txt"), lines)?;
    explain::worlds(watched, folder, None)?;
    std::fs::write(folder.join("timeline.html"), timeline::html(watched))
}

/// The report of a folder: of a failure all that is needed to understand it on one screen.
fn report(o: &Outcome, plan: &Path) -> String {
    let command = format!("--plan {}", plan.display());
    let text = match o.held() {
        true => summary(o, None),
        false => format!("{}digest {:016x}\n", failure(o), o.digest),
    };
    let text = text.replace(&format!("--plan {PLAN}"), &command);
    format!("{text}verdict {}\nbuild {}\n", o.brief(), build())
}

/// Lines of the picture of a failure, so that it fits a screen.
pub const SLICE: usize = 32;

/// What many seeds came to.
#[derive(Clone, Debug, Default)]
pub struct Soak {
    pub seeds: u64,
    pub events: u64,
    pub sim_us: u64,
    pub jobs: u64,
    pub groups: u64,
    pub slots: u64,
    pub checks: u64,
    pub marks: BTreeMap<Mark, u64>,
    pub faults: BTreeMap<String, u64>,
    pub broken: Vec<Broken>,
    pub tried: Tables,
}

/// A seed under which a promise broke.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Broken {
    pub seed: u64,
    pub event: u64,
    pub status: u8,
    pub promise: String,
}

/// Every mark that there is.
pub const MARKS: [Mark; 24] = [
    Mark::BreakerOpened,
    Mark::BreakerClosed,
    Mark::LateReply,
    Mark::CommitUnknown,
    Mark::SettledApplied,
    Mark::SettledNotApplied,
    Mark::SettledUnknown,
    Mark::RaceLost,
    Mark::LeaseLapsed,
    Mark::RunTimedOut,
    Mark::JobLost,
    Mark::JobReindexed,
    Mark::JobQuarantined,
    Mark::NewerFormat,
    Mark::GhostRemoved,
    Mark::ClaimExceptions,
    Mark::ClaimRepeated,
    Mark::ClaimUndone,
    Mark::MailboxFull,
    Mark::SlotDeclared,
    Mark::KeyTakenOver,
    Mark::GroupStopped,
    Mark::GroupFinalized,
    Mark::GroupRemoved,
];

impl Soak {
    pub fn add(&mut self, o: &Outcome) {
        self.seeds += 1;
        self.events += o.counts.events;
        self.sim_us += o.sim_us;
        self.jobs += o.jobs as u64;
        self.groups += o.groups as u64;
        self.slots += o.counts.slots;
        self.checks += o.checks;
        self.tried.add(&o.tried);
        for (mark, n) in &o.marks {
            *self.marks.entry(*mark).or_default() += n;
        }
        for (fault, n) in &o.counts.faults {
            *self.faults.entry((*fault).to_owned()).or_default() += n;
        }
        if !o.held() {
            let (seed, promise) = (o.plan.seed, o.promise().to_owned());
            self.broken.push(Broken { seed, event: o.counts.events, status: o.status(), promise });
        }
    }

    pub fn unreached(&self) -> Vec<Mark> {
        MARKS.into_iter().filter(|m| !self.marks.contains_key(m)).collect()
    }

    /// The worst exit status of those that broke.
    pub fn status(&self) -> u8 {
        self.broken.first().map_or(HELD, |b| b.status)
    }

    pub fn summary(&self, took: Duration) -> String {
        let secs = took.as_secs_f64().max(1e-9);
        let mut out = String::new();
        let _ = writeln!(
            out,
            "{} seeds, {} broken; {} jobs, {} groups, {} slots, {} events, {} checks; {:.1} s, {:.0} events/s, {:.0} simulated s/s ({:.1} h simulated)",
            self.seeds,
            self.broken.len(),
            self.jobs,
            self.groups,
            self.slots,
            self.events,
            self.checks,
            secs,
            self.events as f64 / secs,
            self.sim_us as f64 / SECOND as f64 / secs,
            self.sim_us as f64 / SECOND as f64 / 3_600.0,
        );
        let faults: Vec<String> = self.faults.iter().map(|(name, n)| format!("{name} {n}")).collect();
        let _ = writeln!(out, "faults  {}", faults.join(", "));
        let marks: Vec<String> = self.marks.iter().map(|(mark, n)| format!("{mark:?} {n}")).collect();
        let _ = writeln!(out, "marks reached  {}", marks.join(", "));
        let unreached: Vec<String> = self.unreached().iter().map(|m| format!("{m:?}")).collect();
        let _ = writeln!(
            out,
            "marks unreached  {}",
            if unreached.is_empty() { "none".into() } else { unreached.join(", ") }
        );
        let mut kinds: BTreeMap<&str, Vec<u64>> = BTreeMap::new();
        for b in &self.broken {
            kinds.entry(&b.promise).or_default().push(b.seed);
        }
        for (promise, seeds) in kinds {
            let some: Vec<String> = seeds.iter().take(8).map(u64::to_string).collect();
            let _ = writeln!(out, "broken {promise}: {} seeds, {}", seeds.len(), some.join(" "));
        }
        out
    }
}
