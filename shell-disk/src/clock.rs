//! The store's clock: the system's, kept from ever going back.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use leasehold_core::store::{Clock, SCORE_MAX};

/// A step back by less than this stops the clock until the system has caught up; after a larger one
/// it goes on from where it was, at its pace, ahead of the system.
const SMALL_STEP: u64 = 1_000_000;

/// Never goes back: not when the system's clock is set back, and, since the largest value handed
/// out is kept in the store, not across restarts.
#[derive(Debug)]
pub(crate) struct SteadyClock {
    last: Clock,
    since: Instant,
}

impl SteadyClock {
    /// Starts at the largest value that was handed out before.
    pub(crate) fn new(last: Clock) -> Self {
        SteadyClock { last, since: Instant::now() }
    }

    pub(crate) fn now(&mut self) -> Clock {
        let elapsed = self.since.elapsed();
        let next = step(self.last, elapsed, wall());
        // Time that has passed while the clock stood still is not made up for later.
        self.since += elapsed;
        self.last = next;
        next
    }
}

fn wall() -> Clock {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, micros)
}

fn micros(d: Duration) -> u64 {
    u64::try_from(d.as_micros()).unwrap_or(SCORE_MAX)
}

/// The next value after `last`, so much later, when the system's clock says `wall`.
fn step(last: Clock, elapsed: Duration, wall: Clock) -> Clock {
    let next = if wall >= last {
        wall
    } else if last - wall < SMALL_STEP {
        last
    } else {
        last.saturating_add(micros(elapsed))
    };
    next.min(SCORE_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn follows_the_system_but_never_back() {
        let second = Duration::from_secs(1);
        assert_eq!(step(10, second, 20), 20, "follows");
        assert_eq!(step(20_000_000, second, 19_500_000), 20_000_000, "waits for a small step back");
        assert_eq!(step(20_000_000, second, 5), 21_000_000, "goes on by itself after a large one");
        assert_eq!(step(SCORE_MAX, second, 5), SCORE_MAX);
        assert_eq!(step(0, second, u64::MAX), SCORE_MAX);
    }

    #[test]
    fn goes_on_from_what_was_handed_out_before_a_restart() {
        let ahead = wall() + 3_600_000_000;
        let mut clock = SteadyClock::new(ahead);
        let first = clock.now();
        assert!(first >= ahead);
        assert!(clock.now() >= first);
        let mut clock = SteadyClock::new(0);
        assert!(clock.now() > 1_600_000_000_000_000);
    }
}
