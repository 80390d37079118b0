//! A setup as a list of settings, and which of them are not the defaults. The default is what a seed gets whose
//! every draw is harmless: one replica, a store that loses nothing, no faults, everybody honest.

use crate::choices::{Choices, Label};
use crate::setup::{SECOND, Setup};

/// Draws nothing but 0.
struct Harmless;

impl Choices for Harmless {
    fn draw(&mut self, _: Label, _: u64) -> u64 {
        0
    }
}

/// Every setting but the faults, by name.
fn listed(s: &Setup) -> Vec<(&'static str, String)> {
    let (c, m) = (&s.config, &s.manners);
    let per_mille = |n: u32| format!("{n}/1000");
    vec![
        ("regime", s.regime.text().to_owned()),
        ("replicas", s.replicas.to_string()),
        ("chaos_s", (s.chaos_us / SECOND).to_string()),
        ("jobs", s.jobs.to_string()),
        ("clients", s.clients.to_string()),
        ("workers", s.workers.to_string()),
        ("owners", s.owners.to_string()),
        ("groups", if s.owners == 0 { "1".into() } else { s.groups.to_string() }),
        ("pools", s.pools.to_string()),
        ("users", if s.pools == 0 { "3".into() } else { s.users.to_string() }),
        ("tenants", s.tenants.to_string()),
        ("queues", s.queues.to_string()),
        ("keyed", per_mille(s.keyed)),
        ("tail", s.tail.to_string()),
        ("chaos_every_ms", (s.chaos_every_us / 1_000).to_string()),
        ("drift_ppm", s.drift_ppm.to_string()),
        ("mailbox", c.mailbox.to_string()),
        ("commits", c.commits.to_string()),
        ("reads", c.reads.to_string()),
        ("commit_txns", c.commit_txns.to_string()),
        ("sweep_ms", c.sweep_ms.to_string()),
        ("scrub_ms", c.scrub_ms.to_string()),
        ("retention_ms", c.retention_ms.to_string()),
        ("lease_ms", c.lease_ms.to_string()),
        ("upstreams", c.routing.upstreams.len().to_string()),
        ("fail_open", c.fail_open.len().to_string()),
        ("hang", per_mille(m.hang)),
        ("die", per_mille(m.die)),
        ("vanish", per_mille(m.vanish)),
        ("twice", per_mille(m.twice)),
        ("stale_token", per_mille(m.stale_token)),
        ("fail", per_mille(m.fail)),
        ("release", per_mille(m.release)),
        ("poison", per_mille(m.poison)),
        ("busy", per_mille(m.busy)),
    ]
}

/// What is not as in the simplest world: name, value and, in brackets, the default.
pub fn differing(setup: &Setup) -> Vec<String> {
    let defaults = listed(&Setup::draw(setup.seed, &mut Harmless));
    let differ = listed(setup).into_iter().zip(defaults).filter(|(is, default)| is != default);
    differ.map(|((name, is), (_, default))| format!("{name} {is} [{default}]")).collect()
}

/// The faults that are on, with their weights.
pub fn faults(setup: &Setup) -> Vec<String> {
    setup.faults.on().iter().map(|(name, weight)| format!("{name} {weight}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Plan;

    #[test]
    fn the_harmless_world_does_not_differ_and_others_do() {
        assert_eq!(differing(&Setup::draw(1, &mut Harmless)), Vec::<String>::new());
        let mut setup = Setup::draw(1, &mut Harmless);
        assert_eq!(faults(&setup), Vec::<String>::new());
        (setup.replicas, setup.config.sweep_ms, setup.faults.crash) = (3, 500, 2);
        assert_eq!(differing(&setup), ["replicas 3 [1]", "sweep_ms 500 [1000]"]);
        assert_eq!(faults(&setup), ["crash 2"]);
        let plan = Plan::parse("mute setup\nmute swarm\nset setup/0#0 = 1\n").expect("a plan");
        assert_eq!(differing(&Setup::draw(0, &mut plan.choices())), ["replicas 2 [1]"]);
    }
}
