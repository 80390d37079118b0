//! A plan: a seed, and the sparse list of where its draws are overridden. As text, a line each:
//!
//! ```text
//! seed 42
//! mute store-reply
//! set client/0#17 = 3
//! ```
//!
//! `mute` silences every draw of a topic (value 0: harmless), `mute faults` those of all topics that are
//! faults; `set` fixes one draw, counted from 0, muted or not.

use crate::choices::{Drawn, Label, Seeded, Topic};
use crate::oracle::Promise;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    pub seed: u64,
    pub mute: Vec<Topic>,
    pub set: Vec<(Label, u64, u64)>,
    /// Promises that are not looked at, to see what else would catch a bug; no part of the text.
    pub blind: Vec<Promise>,
    /// A real store to run beside the model; no part of the text.
    pub store: Option<leasehold_redis::Address>,
}

impl Plan {
    pub fn of(seed: u64) -> Plan {
        Plan { seed, ..Plan::default() }
    }

    pub fn choices(&self) -> Seeded {
        let mut choices = Seeded::new(self.seed);
        self.mute.iter().for_each(|topic| choices.mute(*topic));
        self.set.iter().for_each(|(label, n, value)| choices.set(*label, *n, *value));
        choices
    }

    /// With one draw left to the seed, or to its topic's silence.
    pub fn without(&self, drawn: Drawn) -> Plan {
        let mut plan = self.clone();
        plan.set.retain(|(label, number, _)| (*label, *number) != (drawn.label, drawn.number));
        plan
    }

    /// With one draw fixed.
    pub fn with(&self, drawn: Drawn, value: u64) -> Plan {
        let mut plan = self.without(drawn);
        plan.set.push((drawn.label, drawn.number, value));
        plan
    }

    /// Any bytes are a plan: two for the seed, then for each draw that is fixed one for its topic, one for its
    /// actor, two for its number and two for its value.
    pub fn from_bytes(bytes: &[u8]) -> Plan {
        let (seed, rest) = bytes.split_at(bytes.len().min(2));
        let mut plan = Plan::of(seed.iter().fold(0, |seed, b| seed << 8 | u64::from(*b)));
        for draw in rest.chunks_exact(6).take(64) {
            let topic = Topic::ALL[usize::from(draw[0]) % Topic::ALL.len()];
            let label = topic.of(usize::from(draw[1] % 16));
            let two = |at: usize| u64::from(u16::from_le_bytes([draw[at], draw[at + 1]]));
            plan.set.push((label, two(2), two(4)));
        }
        plan
    }

    pub fn parse(text: &str) -> Result<Plan, String> {
        let mut plan = Plan::default();
        for (n, line) in text.lines().enumerate() {
            let line = line.split('#').next().filter(|l| !l.contains("set ")).unwrap_or(line).trim();
            let bad = || format!("line {}: cannot read {line:?}", n + 1);
            match line.split_once(' ') {
                None if line.is_empty() => {}
                Some(("seed", seed)) => plan.seed = seed.trim().parse().map_err(|_| bad())?,
                Some(("mute", "faults")) => plan.mute.extend(faults()),
                Some(("mute", name)) => plan.mute.push(topic(name.trim()).ok_or_else(bad)?),
                Some(("set", rest)) => plan.set.push(setting(rest).ok_or_else(bad)?),
                _ => return Err(bad()),
            }
        }
        Ok(plan)
    }
}

impl std::fmt::Display for Plan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "seed {}", self.seed)?;
        let all = faults().all(|topic| self.mute.contains(&topic));
        if all {
            writeln!(f, "mute faults")?;
        }
        for topic in self.mute.iter().filter(|topic| !all || !topic.is_fault()) {
            writeln!(f, "mute {}", topic.text())?;
        }
        for (label, n, value) in &self.set {
            writeln!(f, "set {label}#{n} = {value}")?;
        }
        Ok(())
    }
}

fn faults() -> impl Iterator<Item = Topic> {
    Topic::ALL.iter().copied().filter(|topic| topic.is_fault())
}

pub fn topic(name: &str) -> Option<Topic> {
    Topic::ALL.iter().copied().find(|t| t.text() == name)
}

fn setting(text: &str) -> Option<(Label, u64, u64)> {
    let (draw, value) = text.split_once('=')?;
    let (label, n) = draw.trim().split_once('#')?;
    let (name, actor) = label.split_once('/')?;
    let label = Label { topic: topic(name)?, actor: actor.parse().ok()? };
    Some((label, n.trim().parse().ok()?, value.trim().parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_reads_back() {
        let plan = Plan {
            seed: 7,
            mute: vec![Topic::StoreReply, Topic::Chaos],
            set: vec![(Topic::Client.of(2), 17, 3)],
            ..Plan::default()
        };
        assert_eq!(Plan::parse(&plan.to_string()), Ok(plan));
        assert!(Plan::parse("mute nothing-known").is_err());
        assert_eq!(Plan::parse("# nothing\n\nseed 3\n"), Ok(Plan::of(3)));
    }
}
