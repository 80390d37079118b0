//! Whether an upstream is called at all. An upstream that does not answer is left alone for a while, so that
//! nobody's slot is spent on waiting for it; then one call tries it.
//!
//! ```text
//!              failed, FAILURES in a row                  the pause is over, one call
//!   Closed ------------------------------------> Open -----------------------------------> Trying
//!     ^                                           ^                                          |  |
//!     |                                           +---- failed: twice the pause -------------+  |
//!     +------------------------------------------------- answered -----------------------------+
//! ```

use std::time::{Duration, Instant};

/// Failures in a row that open it.
pub const FAILURES: u32 = 5;
pub const PAUSE_MIN: Duration = Duration::from_secs(1);
pub const PAUSE_MAX: Duration = Duration::from_secs(30);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Closed {
        failures: u32,
    },
    Open {
        until: Instant,
        pause: Duration,
    },
    /// One call is under way, which may never say what became of it: it is not waited for longer than so.
    Trying {
        until: Instant,
        pause: Duration,
    },
}

/// Time comes from the caller, and does not go back.
#[derive(Clone, Debug)]
pub struct Breaker {
    state: State,
}

impl Default for Breaker {
    fn default() -> Self {
        Breaker { state: State::Closed { failures: 0 } }
    }
}

impl Breaker {
    /// Whether a call could be made: `Err` says when to ask again.
    pub fn look(&self, now: Instant) -> Result<(), Instant> {
        match self.state {
            State::Open { until, .. } | State::Trying { until, .. } if now < until => Err(until),
            State::Closed { .. } | State::Open { .. } | State::Trying { .. } => Ok(()),
        }
    }

    /// A call is about to be made. After a pause this is the one that tries.
    pub fn admit(&mut self, now: Instant) -> Result<(), Instant> {
        self.look(now)?;
        if let State::Open { pause, .. } | State::Trying { pause, .. } = self.state {
            self.state = State::Trying { until: now + pause, pause };
        }
        Ok(())
    }

    /// The upstream has answered, whatever it said.
    pub fn answered(&mut self) {
        self.state = State::Closed { failures: 0 };
    }

    /// It has not answered. True if that is news: it is left alone from now on.
    pub fn failed(&mut self, now: Instant) -> bool {
        match self.state {
            State::Closed { failures } if failures + 1 < FAILURES => {
                self.state = State::Closed { failures: failures + 1 };
                false
            }
            State::Closed { .. } => {
                self.state = State::Open { until: now + PAUSE_MIN, pause: PAUSE_MIN };
                true
            }
            // Of a call that was made before it opened.
            State::Open { .. } => false,
            State::Trying { pause, .. } => {
                let pause = (pause * 2).min(PAUSE_MAX);
                self.state = State::Open { until: now + pause, pause };
                false
            }
        }
    }

    pub fn is_open(&self) -> bool {
        !matches!(self.state, State::Closed { .. })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn opened(now: Instant) -> Breaker {
        let mut breaker = Breaker::default();
        let told: Vec<bool> = (0..FAILURES).map(|_| breaker.failed(now)).collect();
        assert_eq!(told.iter().filter(|t| **t).count(), 1);
        assert!(told[FAILURES as usize - 1]);
        breaker
    }

    #[test]
    fn it_opens_after_failures_in_a_row_only() {
        let now = Instant::now();
        let mut breaker = Breaker::default();
        for _ in 0..10 {
            for _ in 1..FAILURES {
                assert!(!breaker.failed(now));
                assert_eq!(breaker.admit(now), Ok(()));
            }
            breaker.answered();
        }
        assert!(!breaker.is_open());
        assert_eq!(opened(now).admit(now), Err(now + PAUSE_MIN));
    }

    #[test]
    fn one_call_tries_it_after_the_pause() {
        let now = Instant::now();
        let mut breaker = opened(now);
        let later = now + PAUSE_MIN;
        assert_eq!(breaker.look(later), Ok(()), "looking is no call");
        assert_eq!(breaker.admit(later), Ok(()));
        assert_eq!(breaker.admit(later), Err(later + PAUSE_MIN), "the second one waits for the first");
        breaker.answered();
        assert_eq!(breaker.admit(later), Ok(()));
        assert!(!breaker.is_open());
    }

    #[test]
    fn the_pause_grows_up_to_its_bound() {
        let mut now = Instant::now();
        let mut breaker = opened(now);
        let mut pauses = Vec::new();
        for _ in 0..8 {
            let until = breaker.admit(now).unwrap_err();
            pauses.push((until - now).as_secs());
            now = until;
            assert_eq!(breaker.admit(now), Ok(()));
            breaker.failed(now);
        }
        assert_eq!(pauses, [1, 2, 4, 8, 16, 30, 30, 30]);
    }

    #[test]
    fn a_try_without_an_end_does_not_close_it_for_ever() {
        let now = Instant::now();
        let mut breaker = opened(now);
        assert_eq!(breaker.admit(now + SECOND), Ok(()));
        assert_eq!(breaker.admit(now + 2 * SECOND), Ok(()));
        assert!(breaker.is_open());
    }

    #[test]
    fn late_failures_of_earlier_calls_do_not_prolong_the_pause() {
        let now = Instant::now();
        let mut breaker = opened(now);
        assert!(!breaker.failed(now + SECOND / 2));
        assert_eq!(breaker.admit(now + SECOND), Ok(()));
    }
}
