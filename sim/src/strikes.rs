//! Single faults at chosen places: the n-th time that a fault could strike, it does.
//!
//! Where chance decides nothing, in a scripted world, [`World::strikes`] counts for each kind of fault the
//! places where it could strike, and lets it strike at those that were planned. A script that runs once
//! without any tells how many places there are; a sweep then tries each.

use crate::world::World;

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident $text:literal),* $(,)?) => {
        /// A kind of fault, and so what its places are.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        #[repr(u8)]
        pub enum Kind { $($(#[$doc])* $name),* }

        impl Kind {
            pub const ALL: &'static [Kind] = &[$(Kind::$name),*];

            pub fn text(self) -> &'static str {
                match self { $(Kind::$name => $text),* }
            }
        }
    };
}

kinds! {
    /// Before an output of a step is done: the replica dies, and starts again a second later.
    Crash "crash",
    /// Before an input: the replica is paused for twenty seconds.
    Pause "pause",
    /// A call of the store: never sent, and its replica is told so.
    Unavailable "unavailable",
    /// A call of the store: lost on its way.
    RequestLost "request-lost",
    /// A call of the store: arrives seven seconds late, after its sender gave up.
    RequestLate "request-late",
    /// A commit: what it did is done once more three seconds later.
    Twice "twice",
    /// A commit of several transactions: cut off after the first, and no reply.
    Partial "partial",
    /// A call of the store that was applied: its reply is lost.
    ReplyLost "reply-lost",
    /// A call of the store that was applied: the connection breaks, and its replica is told so.
    Broken "broken",
    /// A call of the store that was applied: its reply comes seven seconds late.
    ReplyLate "reply-late",
    /// A call of the store that was applied: its reply comes twice.
    ReplyTwice "reply-twice",
    /// A notification: lost.
    NoticeLost "notice-lost",
    /// A call of a client: lost on its way.
    CallLost "call-lost",
    /// The answer to a client: lost.
    AnswerLost "answer-lost",
    /// A call that reaches the store: its clock has stepped twenty seconds forward.
    StoreClock "store-clock",
    /// A call that reaches the store: it is full from then on for ten seconds.
    StoreFull "store-full",
}

/// One fault at one place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Strike {
    pub kind: Kind,
    /// Counted from 0.
    pub place: u64,
}

impl std::fmt::Display for Strike {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}@{}", self.kind.text(), self.place)
    }
}

impl std::str::FromStr for Strike {
    type Err = String;

    fn from_str(text: &str) -> Result<Strike, String> {
        let bad = || format!("{text:?} is no fault at a place, as crash@12");
        let (kind, place) = text.split_once('@').ok_or_else(bad)?;
        let kind = Kind::ALL.iter().copied().find(|k| k.text() == kind).ok_or_else(bad)?;
        Ok(Strike { kind, place: place.parse().map_err(|_| bad())? })
    }
}

/// The faults that are planned, and the places passed so far.
#[derive(Clone, Debug, Default)]
pub struct Strikes {
    /// Places are counted, and faults strike.
    pub on: bool,
    pub planned: Vec<Strike>,
    pub seen: [u64; Kind::ALL.len()],
}

impl World {
    /// Passes a place where that fault could strike, and says whether it does.
    pub fn struck(&mut self, kind: Kind) -> bool {
        if !self.strikes.on {
            return false;
        }
        let seen = &mut self.strikes.seen[kind as usize];
        let place = *seen;
        *seen += 1;
        let strikes = self.strikes.planned.contains(&Strike { kind, place });
        if strikes {
            self.fault(kind.text());
        }
        strikes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_strike_reads_back() {
        for kind in Kind::ALL {
            let strike = Strike { kind: *kind, place: 12 };
            assert_eq!(strike.to_string().parse(), Ok(strike));
        }
        assert!("crash".parse::<Strike>().is_err());
        assert!("crash@x".parse::<Strike>().is_err());
        assert!("nothing@1".parse::<Strike>().is_err());
    }
}
