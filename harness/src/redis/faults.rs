//! What is done to the processes and their connections, and when: all from the seed.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::rng::Rng;

pub const SERVERS: usize = 3;
pub const WORKERS: usize = 8;

/// Whom a fault concerns: one at a time each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Target {
    Redis,
    Server(usize),
    Worker(usize),
    /// The way from a server to the Redis.
    Way(usize),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// SIGKILL, and started again.
    Kill,
    /// SIGSTOP, and later SIGCONT.
    Stop,
    /// SIGTERM, and started again.
    End,
    Cut,
    Delay,
    Stall,
    Swallow,
    Refuse,
    /// `SCRIPT FLUSH`.
    FlushScripts,
    /// `CLIENT KILL`, of those that wait for notifications.
    KillListeners,
    /// `maxmemory` below what is there.
    Full,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    pub at: Duration,
    pub target: Target,
    pub kind: Kind,
    /// Until it is undone.
    pub lasts: Duration,
}

impl Fault {
    pub fn until(&self) -> Duration {
        self.at + self.lasts
    }

    pub fn name(&self) -> String {
        let whom = match self.target {
            Target::Redis => "redis",
            Target::Server(_) => "server",
            Target::Worker(_) => "worker",
            Target::Way(_) => "way",
        };
        format!("{whom} {:?}", self.kind).to_lowercase()
    }
}

/// The faults of a run of that length, in order: one every half second to four.
pub fn plan(seed: u64, length: Duration) -> Vec<Fault> {
    let mut rng = Rng::new(seed, 1);
    let mut busy: BTreeMap<Target, Duration> = BTreeMap::new();
    let mut faults = Vec::new();
    let mut at = Duration::from_millis(1_000);
    while at < length {
        // A target that is not back yet is left alone; another is drawn.
        for _ in 0..8 {
            let fault = draw(&mut rng, at);
            if busy.get(&fault.target).is_none_or(|until| *until < at) {
                // It gets a moment to come back in.
                busy.insert(fault.target, fault.until() + Duration::from_millis(500));
                faults.push(fault);
                break;
            }
        }
        at += Duration::from_millis(500 + rng.below(3_500));
    }
    faults
}

fn draw(rng: &mut Rng, at: Duration) -> Fault {
    use Kind::{Cut, Delay, End, FlushScripts, Full, Kill, KillListeners, Refuse, Stall, Stop, Swallow};
    let (target, kinds): (Target, &[Kind]) = match rng.below(100) {
        0..=24 => (Target::Redis, &[Kill, Kill, Stop, Stop, End, FlushScripts, KillListeners, Full]),
        25..=49 => (Target::Server(rng.below(SERVERS as u64) as usize), &[Kill, Kill, Stop, End]),
        50..=69 => (Target::Worker(rng.below(WORKERS as u64) as usize), &[Kill, Stop, Stop, End]),
        _ => (Target::Way(rng.below(SERVERS as u64) as usize), &[Cut, Cut, Delay, Stall, Swallow, Swallow, Refuse]),
    };
    let kind = kinds.get(rng.below(kinds.len() as u64) as usize).copied().unwrap_or(Cut);
    let longest = match kind {
        Kill | End => 3_000,
        Stop | Stall => 8_000,
        Delay | Swallow | Refuse | Full => 5_000,
        Cut | FlushScripts | KillListeners => 0,
    };
    let lasts = Duration::from_millis(rng.below(longest + 1));
    Fault { at, target, kind, lasts }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_is_a_plan_and_nobody_is_hit_twice_at_once() {
        let hour = Duration::from_secs(3_600);
        let faults = plan(7, hour);
        assert_eq!(faults, plan(7, hour));
        assert_ne!(faults, plan(8, hour));
        assert!(faults.len() > 1_000, "{}", faults.len());
        for (n, fault) in faults.iter().enumerate() {
            let next = faults.iter().skip(n + 1).find(|f| f.target == fault.target);
            assert!(next.is_none_or(|f| f.at > fault.until()), "{fault:?} {next:?}");
        }
    }
}
