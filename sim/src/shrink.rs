//! Makes a failing run small: the shortest plan found under which the same promise still breaks.
//!
//! First the world itself is made smaller (fewer replicas, jobs, kinds of faults: the draws of the
//! setup), then whole kinds of faults are silenced, then single ones. What is left is a list of the
//! draws that matter, which a reader can follow.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use crate::choices::{Drawn, Topic};
use crate::plan::Plan;
use crate::report::{self, Options, Outcome};

/// How long it may look.
#[derive(Clone, Copy, Debug)]
pub struct Budget {
    pub runs: u64,
    pub time: Duration,
}

impl Default for Budget {
    fn default() -> Budget {
        Budget { runs: 20_000, time: Duration::from_secs(300) }
    }
}

/// Other seeds that are tried for each smaller world.
const RESEEDS: u64 = 12;

fn is_setup(topic: Topic) -> bool {
    matches!(topic, Topic::Setup | Topic::Swarm)
}

#[derive(Debug)]
pub struct Shrunk {
    pub plan: Plan,
    pub outcome: Outcome,
    pub runs: u64,
}

struct Shrinker<'a> {
    promise: &'static str,
    plan: Plan,
    last: Outcome,
    runs: u64,
    begun: Instant,
    budget: Budget,
    /// More events than this and a candidate is given up.
    events: u64,
    progress: &'a mut dyn FnMut(u64, &Outcome),
}

/// Shrinks a run that broke. `progress` hears of every smaller one.
pub fn shrink(broke: &Outcome, budget: Budget, progress: &mut dyn FnMut(u64, &Outcome)) -> Shrunk {
    let mut shrinker = Shrinker {
        promise: broke.promise(),
        plan: broke.plan.clone(),
        last: broke.clone(),
        runs: 0,
        begun: Instant::now(),
        budget,
        events: broke.counts.events.saturating_mul(2).max(10_000),
        progress,
    };
    shrinker.all();
    Shrunk { plan: shrinker.plan, outcome: shrinker.last, runs: shrinker.runs }
}

impl Shrinker<'_> {
    fn all(&mut self) {
        // One pass may open the way for another.
        for _ in 0..3 {
            let before = self.plan.clone();
            self.setup();
            self.topics();
            self.single();
            self.values();
            if self.plan == before || self.over() {
                break;
            }
        }
        self.plan.set.sort_unstable();
    }

    fn over(&self) -> bool {
        self.runs >= self.budget.runs || self.begun.elapsed() >= self.budget.time
    }

    fn run(&mut self, plan: &Plan, record: bool) -> Outcome {
        self.runs += 1;
        report::run_with(plan, &Options { until: self.events, record, ..Options::default() })
    }

    /// Takes the plan if the same promise breaks.
    fn take(&mut self, plan: Plan) -> bool {
        if self.over() || plan == self.plan {
            return false;
        }
        let outcome = self.run(&plan, false);
        let breaks = outcome.promise() == self.promise;
        if breaks {
            self.plan = plan;
            (self.progress)(self.runs, &outcome);
            self.last = outcome;
        }
        breaks
    }

    /// What the plan draws before the promise breaks.
    fn drawn(&mut self) -> Vec<Drawn> {
        let plan = self.plan.clone();
        self.run(&plan, true).drawn
    }

    /// All draws of the setup as a list, so that the rest can be drawn from another seed.
    fn listed(&mut self) {
        let mut plan = self.plan.clone();
        for drawn in self.drawn() {
            if is_setup(drawn.label.topic) && drawn.value > 0 {
                plan = plan.with(drawn, drawn.value);
            }
        }
        let topics = [Topic::Setup, Topic::Swarm].into_iter().filter(|t| !plan.mute.contains(t)).collect::<Vec<_>>();
        plan.mute.extend(topics);
        self.take(plan);
    }

    /// The setup's draws: 0, and else half. A smaller world may need another course of events to break, so
    /// that some are tried.
    fn setup(&mut self) {
        self.listed();
        self.pieces();
        let mut at = 0;
        while let Some((label, number, value)) = self.plan.set.get(at).copied() {
            let drawn = Drawn { label, number, value };
            if !is_setup(label.topic) || value == 0 {
                at += 1;
            } else if self.take_reseeded(&self.plan.without(drawn), RESEEDS) {
                // What was next is in its place now.
            } else if value > 1 && self.take_reseeded(&self.plan.with(drawn, value / 2), RESEEDS) {
                // It is the last one now, and its turn comes again.
            } else {
                at += 1;
            }
        }
    }

    /// Many of the setup's draws at once, ever smaller pieces: most worlds need few of them.
    fn pieces(&mut self) {
        let mut size = self.plan.set.len() / 2;
        while size > 1 && !self.over() {
            let mut at = 0;
            while at < self.plan.set.len() && !self.over() {
                let mut less = self.plan.clone();
                let end = (at + size).min(less.set.len());
                let piece: Vec<_> = less.set.drain(at..end).filter(|s| !is_setup(s.0.topic)).collect();
                less.set.splice(at..at, piece);
                if less.set.len() == self.plan.set.len() || !self.take_reseeded(&less, 2) {
                    at = end;
                }
            }
            size /= 2;
        }
    }

    fn take_reseeded(&mut self, plan: &Plan, reseeds: u64) -> bool {
        let seed = plan.seed;
        (0..=reseeds).any(|n| self.take(Plan { seed: seed.wrapping_add(n * 1_000_003), ..plan.clone() }))
    }

    fn topics(&mut self) {
        for topic in Topic::ALL.iter().copied().filter(|t| t.is_fault()) {
            if self.plan.mute.contains(&topic) {
                continue;
            }
            let mut less = self.plan.clone();
            less.mute.push(topic);
            less.set.retain(|(label, ..)| label.topic != topic);
            self.take(less);
        }
    }

    /// From "all faults but silenced kinds" to "no faults but these", and fewer and fewer of these.
    fn single(&mut self) {
        let mut plan = self.plan.clone();
        let (faults, others): (Vec<_>, Vec<_>) = plan.set.into_iter().partition(|(label, ..)| label.topic.is_fault());
        plan.set = others;
        let mut these: Vec<(crate::choices::Label, u64, u64)> = self
            .drawn()
            .into_iter()
            .filter(|d| d.label.topic.is_fault())
            .map(|d| (d.label, d.number, d.value))
            .collect();
        these
            .extend(faults.into_iter().filter(|f| !these.iter().any(|t| (t.0, t.1) == (f.0, f.1))).collect::<Vec<_>>());
        // The setup's draws stay as they are: silent but for the listed ones.
        plan.mute.retain(|t| !t.is_fault());
        plan.mute.extend(Topic::ALL.iter().copied().filter(|t| t.is_fault()));
        let with = |some: &[(crate::choices::Label, u64, u64)]| {
            let mut plan = plan.clone();
            plan.set.extend_from_slice(some);
            plan
        };
        if with(&these) != self.plan && !self.take(with(&these)) {
            return;
        }
        // Leave out ever smaller pieces (delta debugging).
        let mut pieces = 2;
        while !these.is_empty() && !self.over() {
            let size = these.len().div_ceil(pieces);
            let mut left_out = false;
            let mut at = 0;
            while at < these.len() && !self.over() {
                let mut less = these.clone();
                less.drain(at..(at + size).min(these.len()));
                if self.take(with(&less)) {
                    these = less;
                    left_out = true;
                } else {
                    at += size;
                }
            }
            if size == 1 && !left_out {
                break;
            }
            pieces = if left_out { pieces.max(2) } else { pieces * 2 }.min(these.len().max(1));
        }
    }

    /// Smaller values of what is left.
    fn values(&mut self) {
        let faults: BTreeSet<_> = self.plan.set.iter().filter(|s| s.0.topic.is_fault()).copied().collect();
        for (label, number, mut value) in faults {
            while value > 1 {
                let drawn = Drawn { label, number, value };
                if !self.take(self.plan.with(drawn, value / 2)) {
                    break;
                }
                value /= 2;
            }
        }
    }
}
