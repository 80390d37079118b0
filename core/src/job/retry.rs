//! When a failed attempt is tried again.

use super::record::{Backoff, Job};
use crate::ids::Maker;
use crate::limits;
use crate::store::Clock;

/// Delay before the attempt after `failed` failed ones, without jitter: min(base · factorⁿ⁻¹, max).
pub fn delay_ms(backoff: &Backoff, failed: u32) -> u64 {
    // 32 fractional bits, so that a factor near one grows instead of being rounded away.
    let cap = u128::from(backoff.max_ms) << 32;
    let mut delay = u128::from(backoff.base_ms) << 32;
    if backoff.factor_milli > 1_000 && delay > 0 {
        for _ in 1..failed {
            if delay >= cap {
                break;
            }
            delay = delay * u128::from(backoff.factor_milli) / 1_000;
        }
    }
    (delay.min(cap) >> 32) as u64
}

/// The same with jitter: between the delay and (1 + jitter) times the delay.
pub fn jittered_ms(backoff: &Backoff, failed: u32, make: &mut Maker) -> u64 {
    let delay = delay_ms(backoff, failed);
    let band = (u128::from(delay) * u128::from(backoff.jitter_milli) / 1_000) as u64;
    delay.saturating_add(make.up_to(band))
}

/// Whether a job that has failed `attempts` times in `deliveries` claims may not run again.
pub fn exhausted(job: &Job, attempts: u32, deliveries: u32) -> Option<&'static str> {
    if attempts >= job.policy.max_attempts {
        Some("max_attempts")
    } else if deliveries >= job.policy.max_deliveries {
        Some("max_deliveries")
    } else {
        None
    }
}

/// Whether the job's total age is used up at that time.
pub fn too_old(job: &Job, at: Clock) -> bool {
    job.policy.max_age_ms.is_some_and(|age| at >= job.born.saturating_add(age.saturating_mul(limits::MILLI)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIELD: Backoff = Backoff { base_ms: 2_000, max_ms: 3_600_000, factor_milli: 2_000, jitter_milli: 200 };

    /// C14: the exponential never overflows, at any number of failures.
    #[test]
    fn c14_delays_grow_to_the_cap_and_stay_there() {
        let mut last = 0;
        for n in (1..=10_000).chain([u32::MAX]) {
            let delay = delay_ms(&FIELD, n);
            assert!((2_000..=3_600_000).contains(&delay) && delay >= last, "{n}: {delay}");
            last = delay;
        }
        for n in [40, 64, 65, 1_000] {
            assert_eq!(delay_ms(&FIELD, n), 3_600_000);
        }
        assert_eq!([1, 2, 3].map(|n| delay_ms(&FIELD, n)), [2_000, 4_000, 8_000]);
    }

    #[test]
    fn odd_policies_are_harmless() {
        for (base_ms, max_ms, factor_milli) in
            [(0, 0, 0), (1, u64::MAX, 1_001), (u64::MAX, u64::MAX, u32::MAX), (5, 1, 1_000), (0, 9, 3_000)]
        {
            let b = Backoff { base_ms, max_ms, factor_milli, jitter_milli: u32::MAX };
            for n in [0, 1, 2, 50, 100_000] {
                assert!(delay_ms(&b, n) <= max_ms);
                jittered_ms(&b, n, &mut Maker::new([3; 32]));
            }
        }
        // A factor near one still grows.
        let slow = Backoff { base_ms: 1, max_ms: 10, factor_milli: 1_001, jitter_milli: 0 };
        assert_eq!(delay_ms(&slow, 1_000), 2);
    }

    /// C15: jobs that fail together do not come back together.
    #[test]
    fn c15_jitter_spreads_within_its_band() {
        let b = Backoff { base_ms: 60_000, max_ms: 3_600_000, factor_milli: 2_000, jitter_milli: 200 };
        let run = |seed| {
            let mut make = Maker::new([seed; 32]);
            (0..1_000).map(|_| jittered_ms(&b, 1, &mut make)).collect::<alloc::vec::Vec<_>>()
        };
        let delays = run(9);
        assert_eq!(delays, run(9));
        assert!(delays.iter().all(|d| (60_000..=72_000).contains(d)));
        let mut buckets = [0; 13];
        for d in &delays {
            buckets[(*d as usize - 60_000) / 1_000] += 1;
        }
        assert!(buckets.iter().all(|n| *n <= 150), "{buckets:?}");
    }
}
