//! Sweeps: every scenario once for each fault at each place where it could strike, and for sampled pairs.
//!
//! Random runs meet a fault at a given place now and then; a sweep leaves none out. A scenario runs once
//! without faults, which tells how many places each kind has; then once for each of them. After the
//! script the faults stop, an honest worker finishes what is left, and the run ends as every run does: the
//! work done within its bound, the events and the books right, and then silence.

pub mod scripts;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use leasehold_core::pool::open::FailOpen;
use leasehold_core::replica::Mark;
use leasehold_core::{Request, Response};

use crate::choices::{Choices as _, Seeded, Topic};
use crate::oracle::{Promise, Violation};
use crate::picture;
use crate::report;
use crate::scenarios::{POOL, Script, TENANT};
use crate::setup::SECOND;
use crate::strikes::{Kind, Strike};
use crate::trace::{Entry, Trace};
use crate::world::Event;
use scripts::Scenario;

/// Callers of a sweep wait so long, a little longer than a replica takes at most.
const PATIENCE: u64 = 9 * SECOND;

/// How one run of a scenario ended.
#[derive(Debug)]
pub struct Ran {
    pub scenario: &'static str,
    pub strikes: Vec<Strike>,
    pub broken: Option<Violation>,
    pub panicked: Option<String>,
    /// Places passed, by kind.
    pub places: [u64; Kind::ALL.len()],
    pub struck: u64,
    pub events: u64,
    pub sim_us: u64,
    pub marks: BTreeMap<Mark, u64>,
    pub trace: Vec<Entry>,
}

impl Ran {
    pub fn held(&self) -> bool {
        self.broken.is_none() && self.panicked.is_none()
    }

    pub fn promise(&self) -> &'static str {
        match (&self.panicked, &self.broken) {
            (Some(_), _) => "panic",
            (None, Some(violation)) => violation.promise.text(),
            (None, None) => "held",
        }
    }
}

/// Runs a scenario with those faults.
pub fn run(scenario: &Scenario, strikes: &[Strike], trace: Trace) -> Ran {
    let mut script = Script::with(1, scenario.replicas, |setup| {
        setup.config.lease_ms = scenario.lease_ms;
        setup.workers = 1;
        if scenario.routed {
            setup.config.routing = scripts::routing();
            setup.config.fail_open.insert(POOL.into(), FailOpen { local: 1, lease_ms: scenario.lease_ms });
        }
    });
    script.patience = PATIENCE;
    script.world.trace = trace;
    let ran = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| play(scenario, strikes, &mut script)));
    let panicked = ran.err().map(|cause| {
        let text = cause.downcast_ref::<String>().cloned();
        text.or_else(|| cause.downcast_ref::<&str>().map(|s| (*s).to_owned())).unwrap_or_default()
    });
    let world = script.world;
    Ran {
        scenario: scenario.name,
        strikes: strikes.to_vec(),
        broken: world.broken,
        panicked,
        places: world.strikes.seen,
        struck: strikes.iter().filter(|s| world.strikes.seen[s.kind as usize] > s.place).count() as u64,
        events: world.counts.events,
        sim_us: world.now,
        marks: world.marks,
        trace: world.trace.kept,
    }
}

fn play(scenario: &Scenario, strikes: &[Strike], s: &mut Script) {
    // Until no start's grace is left.
    s.at(32);
    s.world.schedule(SECOND, Event::Look);
    s.world.strikes.planned = strikes.to_vec();
    s.world.strikes.on = true;
    (scenario.run)(s);
    s.world.strikes.on = false;
    if s.broken().is_none() {
        end(s);
    }
}

/// The faults are over: what is left comes to its end, and the run ends as every run does.
pub fn end(s: &mut Script) {
    s.world.heal();
    // What is still on its way arrives, and what was asked is answered.
    s.until(s.world.now + 12 * SECOND);
    // A pause that came late may have outlived the script's own end of it.
    s.ask(0, Request::Resume { tenant: TENANT.into(), queue: "q".into() }).ok();
    finish(s);
    s.world.close();
}

/// An honest worker ends what is left.
fn finish(s: &mut Script) {
    let bound = s.world.now + s.world.bound();
    while s.broken().is_none() {
        let clock = s.clock();
        if s.world.oracle.live_count(clock) == 0 {
            return;
        }
        if s.world.now > bound {
            let live = s.world.oracle.live(clock);
            let what = format!("{} jobs are not done long after the fault: {:?}", live.len(), live.first());
            return s.world.violate(Promise::EventuallyDone, what);
        }
        for replica in 0..s.world.hosts.len() {
            let request = s.claim_request("honest", 8, 0, None);
            if let Ok(Response::Claimed(jobs)) = s.ask(replica, request) {
                for leased in jobs {
                    s.complete(replica, &leased).ok();
                }
            }
        }
        let next = s.now_ms() + 500;
        s.at_ms(next);
    }
}

/// What many runs came to.
#[derive(Debug, Default)]
pub struct Sweep {
    pub runs: u64,
    pub events: u64,
    pub sim_us: u64,
    /// Runs by scenario and kind, of single faults.
    pub cells: BTreeMap<(usize, Kind), u64>,
    pub pairs: u64,
    /// Runs whose second fault found no place any more, the first having changed the course.
    pub missed: u64,
    pub marks: BTreeMap<Mark, u64>,
    pub broken: Vec<Ran>,
}

/// Which runs a sweep makes.
#[derive(Clone, Copy, Debug)]
pub struct Extent<'a> {
    /// Only the scenario of that name.
    pub only: Option<&'a str>,
    /// Every n-th place only.
    pub every: u64,
    /// Sampled pairs for each scenario.
    pub pairs: usize,
    /// From which the pairs are drawn.
    pub seed: u64,
    pub threads: usize,
}

/// Runs them. `progress` hears how many of how many are done, and how many broke.
pub fn sweep(extent: Extent<'_>, progress: &mut dyn FnMut(u64, u64, u64)) -> Sweep {
    let mut sweep = Sweep::default();
    let mut work: Vec<(usize, Vec<Strike>)> = Vec::new();
    for (n, scenario) in scripts::ALL.iter().enumerate() {
        if extent.only.is_some_and(|only| only != scenario.name) {
            continue;
        }
        let calm = run(scenario, &[], Trace::default());
        let places = calm.places;
        sweep.add(n, calm);
        let strikes = |kind: &Kind| {
            let kind = *kind;
            (0..places[kind as usize]).step_by(extent.every.max(1) as usize).map(move |place| Strike { kind, place })
        };
        work.extend(Kind::ALL.iter().flat_map(strikes).map(|strike| (n, vec![strike])));
        let mut draws = Seeded::new(extent.seed.wrapping_add(n as u64));
        let at = Topic::Script.of(0);
        let kinds: Vec<Kind> = Kind::ALL.iter().copied().filter(|k| places[*k as usize] > 0).collect();
        for _ in 0..if kinds.is_empty() { 0 } else { extent.pairs } {
            let mut one = || {
                let kind = *draws.pick(at, &kinds);
                Strike { kind, place: draws.draw(at, places[kind as usize]) }
            };
            work.push((n, vec![one(), one()]));
        }
    }
    let next = AtomicUsize::new(0);
    let (sender, receiver) = mpsc::channel();
    std::thread::scope(|scope| {
        for _ in 0..extent.threads.max(1) {
            let (sender, next, work) = (sender.clone(), &next, &work);
            scope.spawn(move || {
                while let Some((n, strikes)) = work.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let ran = run(&scripts::ALL[*n], strikes, Trace::default());
                    if sender.send((*n, ran)).is_err() {
                        break;
                    }
                }
            });
        }
        drop(sender);
        for (done, (n, ran)) in receiver.into_iter().enumerate() {
            sweep.add(n, ran);
            progress(done as u64 + 1, work.len() as u64, sweep.broken.len() as u64);
        }
    });
    sweep.broken.sort_by(|a, b| (a.scenario, &a.strikes).cmp(&(b.scenario, &b.strikes)));
    sweep
}

impl Sweep {
    fn add(&mut self, n: usize, ran: Ran) {
        self.runs += 1;
        self.events += ran.events;
        self.sim_us += ran.sim_us;
        match ran.strikes.as_slice() {
            [] => {}
            [strike] => *self.cells.entry((n, strike.kind)).or_default() += 1,
            _ => self.pairs += 1,
        }
        self.missed += u64::from(ran.struck < ran.strikes.len() as u64);
        for (mark, count) in &ran.marks {
            *self.marks.entry(*mark).or_default() += count;
        }
        if !ran.held() {
            self.broken.push(ran);
        }
    }

    /// Kinds of faults that struck nowhere.
    pub fn unstruck(&self) -> Vec<Kind> {
        Kind::ALL.iter().copied().filter(|kind| !self.cells.keys().any(|(_, k)| k == kind)).collect()
    }

    /// A table of scenarios and faults, in runs, and the sums.
    pub fn summary(&self, took: Duration) -> String {
        let mut out = String::new();
        // Writing to a string cannot fail.
        let _ = write!(out, "{:26}", "places");
        for kind in Kind::ALL {
            let _ = write!(out, " {:>12}", kind.text());
        }
        let _ = writeln!(out);
        for (n, scenario) in scripts::ALL.iter().enumerate() {
            if !self.cells.keys().any(|(of, _)| *of == n) {
                continue;
            }
            let _ = write!(out, "{:26}", scenario.name);
            for kind in Kind::ALL {
                let _ = match self.cells.get(&(n, *kind)) {
                    Some(runs) => write!(out, " {runs:>12}"),
                    None => write!(out, " {:>12}", "-"),
                };
            }
            let _ = writeln!(out);
        }
        let secs = took.as_secs_f64().max(1e-9);
        let _ = writeln!(
            out,
            "{} runs, {} of them with a pair of faults, {} broken; in {} a fault found no place; {} events, {:.1} s, {:.0} events/s, {:.1} h simulated",
            self.runs,
            self.pairs,
            self.broken.len(),
            self.missed,
            self.events,
            secs,
            self.events as f64 / secs,
            self.sim_us as f64 / SECOND as f64 / 3_600.0,
        );
        out
    }
}

/// The exit status of a run.
pub fn status(ran: &Ran) -> u8 {
    match (&ran.panicked, &ran.broken) {
        (Some(_), _) => report::PANIC,
        (None, Some(violation)) if violation.promise.is_liveness() => report::LIVENESS,
        (None, Some(_)) => report::SAFETY,
        (None, None) => report::HELD,
    }
}

/// What broke in one run, and how to see it again.
pub fn failure(ran: &Ran) -> String {
    let mut out = String::new();
    let what = match (&ran.panicked, &ran.broken) {
        (Some(panic), _) => panic.clone(),
        (None, Some(violation)) => violation.what.clone(),
        (None, None) => return out,
    };
    let _ = writeln!(
        out,
        "BROKEN {} in {} at event {}, {}.{:06} s",
        ran.promise(),
        ran.scenario,
        ran.events,
        ran.sim_us / SECOND,
        ran.sim_us % SECOND
    );
    let _ = writeln!(out, "  {what}");
    let strikes: String = ran.strikes.iter().map(|s| format!(" --strike {s}")).collect();
    let _ = writeln!(out, "  cargo run --release -p sim -- sweep --scenario {}{strikes}", ran.scenario);
    if !ran.trace.is_empty() {
        let subjects = ran.broken.as_ref().map(|violation| picture::subjects(&violation.what)).unwrap_or_default();
        let _ = write!(out, "\n{}", picture::picture(&ran.trace, &subjects, 30));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_scenario_holds_without_faults_and_reaches_its_end() {
        for scenario in scripts::ALL {
            let ran = run(scenario, &[], Trace::default());
            assert!(ran.held(), "{}", failure(&ran));
            assert!(ran.places[Kind::Crash as usize] > 0, "{}", scenario.name);
        }
    }

    #[test]
    fn every_kind_of_fault_strikes_somewhere() {
        let extent = Extent { only: Some("group"), every: 7, pairs: 3, seed: 1, threads: 2 };
        let sweep = sweep(extent, &mut |_, _, _| {});
        assert!(sweep.broken.is_empty(), "{}", sweep.broken.first().map(failure).unwrap_or_default());
        assert_eq!(sweep.unstruck(), []);
        assert_eq!(sweep.pairs, 3);
    }
}
