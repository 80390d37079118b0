//! Everything that could have gone otherwise: labelled draws.
//!
//! Each label has a ChaCha stream of its own, seeded from the run's seed and the label, so that a
//! new draw in one place does not reshuffle the rest of the world. **The value 0 is always the
//! harmless choice**; a [`crate::plan::Plan`] can therefore silence a label or set single draws.

use std::collections::BTreeMap;

use rand_chacha::ChaCha8Rng;
use rand_core::{Rng as _, SeedableRng as _};
use xxhash_rust::xxh3::xxh3_64_with_seed;

macro_rules! topics {
    ($($name:ident $text:literal $fault:literal),* $(,)?) => {
        /// What a draw decides.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        #[repr(u8)]
        pub enum Topic { $($name),* }

        impl Topic {
            pub const ALL: &'static [Topic] = &[$(Topic::$name),*];

            pub fn text(self) -> &'static str {
                match self { $(Topic::$name => $text),* }
            }

            /// Whether a value other than 0 is a fault (rather than workload or plain variety).
            pub fn is_fault(self) -> bool {
                match self { $(Topic::$name => $fault),* }
            }
        }
    };
}

topics! {
    Setup "setup" false,
    Swarm "swarm" false,
    ReplicaSeed "replica-seed" false,
    Shuffle "shuffle" false,
    Latency "latency" false,
    StoreRequest "store-request" true,
    StoreReply "store-reply" true,
    StoreDelay "store-delay" true,
    StorePartial "store-partial" true,
    CallLink "call-link" true,
    CallDelay "call-delay" true,
    Notify "notify" true,
    CrashStep "crash-step" true,
    Chaos "chaos" true,
    ChaosTime "chaos-time" false,
    Skew "skew" true,
    Client "client" false,
    Owner "owner" false,
    Worker "worker" false,
    Misbehave "misbehave" true,
    Operator "operator" false,
    Meddle "meddle" false,
    User "user" false,
    Slip "slip" true,
    Pools "pools" false,
    Script "script" false,
    Dispatcher "dispatcher" false,
    Aim "aim" true,
}

/// One stream of draws: a topic and the actor concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Label {
    pub topic: Topic,
    pub actor: u8,
}

impl Topic {
    pub fn of(self, actor: usize) -> Label {
        Label { topic: self, actor: actor as u8 }
    }
}

impl std::fmt::Display for Label {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.topic.text(), self.actor)
    }
}

/// Where decisions come from.
pub trait Choices {
    /// One of `0..n`, 0 being harmless. `n` of 0 counts as 1.
    fn draw(&mut self, label: Label, n: u64) -> u64;

    /// True with so many chances of all; the highest values are.
    fn chance_in(&mut self, label: Label, chances: u64, all: u64) -> bool {
        chances > 0 && self.draw(label, all) >= all.saturating_sub(chances)
    }

    /// True with so many chances in a thousand.
    fn chance(&mut self, label: Label, milli: u32) -> bool {
        self.chance_in(label, u64::from(milli), 1_000)
    }

    /// One of `low..=high`; the low end is the harmless one.
    fn between(&mut self, label: Label, low: u64, high: u64) -> u64 {
        low + self.draw(label, high.saturating_sub(low) + 1)
    }

    /// An element of a list, the first being harmless.
    fn pick<'a, T>(&mut self, label: Label, list: &'a [T]) -> &'a T {
        &list[self.draw(label, list.len() as u64) as usize]
    }
}

#[derive(Clone, Debug)]
struct Stream {
    rng: ChaCha8Rng,
    drawn: u64,
}

/// Draws from a seed, except where a plan says otherwise.
#[derive(Clone, Debug)]
pub struct Seeded {
    seed: u64,
    streams: BTreeMap<Label, Stream>,
    /// Topics whose draws are all 0.
    muted: Vec<Topic>,
    /// Single draws: label and number (from 0) to value.
    set: BTreeMap<(Label, u64), u64>,
    /// What was drawn, when that is asked for; of faults, what was not harmless.
    recorded: Option<Vec<Drawn>>,
}

/// A draw and what came of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drawn {
    pub label: Label,
    pub number: u64,
    pub value: u64,
}

impl Seeded {
    pub fn new(seed: u64) -> Self {
        Seeded { seed, streams: BTreeMap::new(), muted: Vec::new(), set: BTreeMap::new(), recorded: None }
    }

    pub fn mute(&mut self, topic: Topic) {
        self.muted.push(topic);
    }

    pub fn set(&mut self, label: Label, n: u64, value: u64) {
        self.set.insert((label, n), value);
    }

    /// Keeps a list of what is drawn from now on.
    pub fn record(&mut self) {
        self.recorded = Some(Vec::new());
    }

    pub fn recorded(&mut self) -> Vec<Drawn> {
        self.recorded.take().unwrap_or_default()
    }

    /// 32 bytes for a new replica.
    pub fn seed32(&mut self, label: Label) -> [u8; 32] {
        let mut out = [0; 32];
        for part in out.chunks_exact_mut(8) {
            part.copy_from_slice(&self.draw(label, u64::MAX).to_le_bytes());
        }
        out
    }
}

impl Choices for Seeded {
    fn draw(&mut self, label: Label, n: u64) -> u64 {
        let seed = self.seed;
        let stream = self.streams.entry(label).or_insert_with(|| {
            let from = xxh3_64_with_seed(format!("{label}").as_bytes(), seed);
            Stream { rng: ChaCha8Rng::seed_from_u64(from), drawn: 0 }
        });
        let number = stream.drawn;
        stream.drawn += 1;
        // Drawn in any case, so that a muted draw does not shift the later ones.
        let raw = stream.rng.next_u64();
        let set = if self.set.is_empty() { None } else { self.set.get(&(label, number)) };
        let value = match set {
            Some(value) => (*value).min(n.saturating_sub(1)),
            None if self.muted.contains(&label.topic) => 0,
            None => ((u128::from(raw) * u128::from(n)) >> 64) as u64,
        };
        if let Some(recorded) = &mut self.recorded
            && (value > 0 || !label.topic.is_fault())
        {
            recorded.push(Drawn { label, number, value });
        }
        value
    }

    fn chance_in(&mut self, label: Label, chances: u64, all: u64) -> bool {
        let recorded = self.recorded.as_ref().map(Vec::len);
        let hit = chances > 0 && self.draw(label, all) >= all.saturating_sub(chances);
        // What did not happen is as harmless as 0.
        if let (Some(recorded), Some(before), false) = (&mut self.recorded, recorded, hit) {
            recorded.truncate(before);
        }
        hit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_do_not_disturb_each_other() {
        let (mut a, mut b) = (Seeded::new(7), Seeded::new(7));
        let label = Topic::Client.of(1);
        let first: Vec<u64> = (0..50).map(|_| a.draw(label, 1_000)).collect();
        let second: Vec<u64> = (0..50)
            .map(|_| {
                b.draw(Topic::Client.of(2), 9);
                b.draw(label, 1_000)
            })
            .collect();
        assert_eq!(first, second);
        assert_ne!(first, (0..50).map(|_| Seeded::new(8).draw(label, 1_000)).collect::<Vec<_>>());
    }

    #[test]
    fn a_muted_topic_is_harmless_and_shifts_nothing() {
        let (mut a, mut b) = (Seeded::new(3), Seeded::new(3));
        b.mute(Topic::Chaos);
        b.set(Topic::Client.of(0), 1, 4);
        assert!((0..20).all(|_| b.draw(Topic::Chaos.of(0), 1_000) == 0));
        let (x, y): (Vec<_>, Vec<_>) =
            (0..9).map(|_| (a.draw(Topic::Client.of(0), 5), b.draw(Topic::Client.of(0), 5))).unzip();
        assert_eq!(y[1], 4);
        assert_eq!((x[0], &x[2..]), (y[0], &y[2..]));
    }

    #[test]
    fn chances_are_about_right() {
        let mut c = Seeded::new(1);
        let hits = (0..10_000).filter(|_| c.chance(Topic::Notify.of(0), 250)).count();
        assert!((2_300..2_700).contains(&hits), "{hits}");
        assert!(!(0..1_000).any(|_| c.chance(Topic::Notify.of(0), 0)));
    }
}
