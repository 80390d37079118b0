//! The store's clock as this replica sees it.

use super::Now;
use crate::limits;
use crate::store::Clock;

/// The store's clock as last seen, and what has elapsed since by the replica's own.
#[derive(Clone, Copy, Debug, Default, serde::Serialize, serde::Deserialize)]
pub(crate) struct StoreClock {
    seen: Option<(Clock, Now)>,
}

impl StoreClock {
    /// A reply carried this clock. The time it took to arrive makes the estimate late, never early.
    pub fn observe(&mut self, clock: Clock, now: Now) {
        self.seen = Some((clock, now));
    }

    pub fn estimate(&self, now: Now) -> Clock {
        let Some((clock, at)) = self.seen else { return 0 };
        clock.saturating_add(now.saturating_sub(at).saturating_mul(limits::MILLI))
    }

    /// Whether the estimate is recent enough to make promises by: a step of the replica's own clock
    /// may have added at most [`limits::CLOCK_FRESH_MS`] to it.
    pub fn fresh(&self, now: Now) -> bool {
        self.seen.is_some_and(|(_, at)| now.saturating_sub(at) <= limits::CLOCK_FRESH_MS)
    }
}
