//! Bytes to a plan to a world with the whole oracle: a promise that breaks is a crash.

#![no_main]

use libfuzzer_sys::fuzz_target;
use sim::plan::Plan;
use sim::report::{self, Options};

/// Longer runs are cut: coverage is in the beginning, and so is speed.
const EVENTS: u64 = 6_000;

fuzz_target!(|bytes: &[u8]| {
    let plan = Plan::from_bytes(bytes);
    let ran = report::run_with(&plan, &Options { until: EVENTS, ..Options::default() });
    assert!(ran.held(), "{}\nthe plan, for sim --plan:\n{plan}", report::failure(&ran));
});
