//! Upstreams by name: as many as the configuration has.

use std::sync::atomic::Ordering;

use super::text::Page;
use crate::upstream::Gateway;

pub(super) fn write(page: &mut Page, gateway: &Gateway) {
    page.begin("leasehold_upstream_calls", "gauge", "Calls to the upstream that are under way.");
    for upstream in &gateway.upstreams {
        page.sample(&[("upstream", upstream.name())], upstream.in_flight());
    }
    page.begin("leasehold_upstream_open", "gauge", "1 while the upstream is left alone because it did not answer.");
    for upstream in &gateway.upstreams {
        page.sample(&[("upstream", upstream.name())], u64::from(upstream.is_open()));
    }
    page.begin("leasehold_upstream_calls_total", "counter", "Calls to the upstream, by what became of them.");
    for upstream in &gateway.upstreams {
        let calls = &upstream.calls;
        for (outcome, count) in
            [("answered", &calls.answered), ("failed", &calls.failed), ("timed_out", &calls.timed_out)]
        {
            page.sample(&[("upstream", upstream.name()), ("outcome", outcome)], count.load(Ordering::Relaxed));
        }
    }
}
