//! Back-off towards the store, and the breaker that turns an unreachable store into honest 503s.

use super::Now;

/// Failures in a row after which requests are refused at once.
const TRIP: u32 = 3;
const HOLD_MS_FIRST: u64 = 25;
const HOLD_MS_MAX: u64 = 1_000;

#[derive(Clone, Debug, Default, serde::Serialize, serde::Deserialize)]
pub(crate) struct Breaker {
    failures: u32,
    /// Nothing is sent before.
    hold_until: Now,
    /// When the store last answered.
    last_ok: Now,
}

/// What a success ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Recovered {
    pub was_open: bool,
    /// How long the store had not answered.
    pub outage_ms: u64,
}

impl Breaker {
    pub fn failure(&mut self, now: Now, jitter: u64) -> bool {
        self.failures = self.failures.saturating_add(1);
        self.hold_until = now + hold_ms(self.failures) + jitter % (hold_ms(self.failures) / 4 + 1);
        self.failures == TRIP
    }

    pub fn success(&mut self, now: Now) -> Option<Recovered> {
        let failures = core::mem::take(&mut self.failures);
        let outage_ms = now.saturating_sub(self.last_ok);
        self.last_ok = now;
        self.hold_until = 0;
        (failures > 0).then_some(Recovered { was_open: failures >= TRIP, outage_ms })
    }

    pub fn open(&self) -> bool {
        self.failures >= TRIP
    }

    pub fn may_send(&self, now: Now) -> bool {
        now >= self.hold_until
    }

    /// When sending is allowed again, if it is not now.
    pub fn next(&self, now: Now) -> Option<Now> {
        (self.hold_until > now).then_some(self.hold_until)
    }

    pub fn retry_after_ms(&self, now: Now) -> u64 {
        self.hold_until.saturating_sub(now).max(HOLD_MS_MAX)
    }
}

/// Doubling from 25 ms up to a second.
fn hold_ms(failures: u32) -> u64 {
    (HOLD_MS_FIRST << failures.saturating_sub(1).min(10)).min(HOLD_MS_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn back_off_doubles_to_a_second_and_trips_at_three() {
        let holds: alloc::vec::Vec<u64> = (1..9).map(hold_ms).collect();
        assert_eq!(holds, [25, 50, 100, 200, 400, 800, 1_000, 1_000]);
        assert_eq!(hold_ms(u32::MAX), 1_000);
        let mut b = Breaker::default();
        assert_eq!([b.failure(0, 0), b.failure(30, 0), b.failure(90, 0)], [false, false, true]);
        assert!(b.open() && !b.may_send(100) && b.may_send(190));
        assert_eq!(b.success(5_000), Some(Recovered { was_open: true, outage_ms: 5_000 }));
        assert!(!b.open() && b.success(5_001).is_none());
    }
}
