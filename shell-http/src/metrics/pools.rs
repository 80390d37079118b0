//! Pools by name. Names are operators': only so many are shown, those with most in use or waiting.

use leasehold_core::request::PoolView;

use super::text::Page;

/// Pools that are shown.
const POOLS: usize = 100;

fn waiting(pool: &PoolView) -> u64 {
    pool.waiting.iter().map(|(_, n)| n).sum()
}

/// Those shown, and how many are not.
fn shown(mut pools: Vec<PoolView>) -> (Vec<PoolView>, usize) {
    pools.sort_by_key(|pool| std::cmp::Reverse(pool.in_use + waiting(pool)));
    let omitted = pools.len().saturating_sub(POOLS);
    pools.truncate(POOLS);
    (pools, omitted)
}

/// `None`: the store cannot be read, and nothing is said.
pub(super) fn write(page: &mut Page, pools: Option<Vec<PoolView>>) {
    let known = pools.is_some();
    let (pools, omitted) = shown(pools.unwrap_or_default());
    page.begin("leasehold_pools_omitted", "gauge", "Pools that are not shown: those with least in use.");
    if known {
        page.sample(&[], omitted);
    }
    page.begin("leasehold_pool_size", "gauge", "Units of the pool.");
    for pool in &pools {
        page.sample(&[("pool", &pool.name)], pool.total);
    }
    page.begin("leasehold_pool_in_use", "gauge", "Units held.");
    for pool in &pools {
        page.sample(&[("pool", &pool.name)], pool.in_use);
    }
    page.begin("leasehold_pool_batch_in_use", "gauge", "Units held by class batch.");
    for pool in &pools {
        page.sample(&[("pool", &pool.name)], pool.batch_in_use);
    }
    page.begin("leasehold_pool_waiting", "gauge", "Who waits for a slot, by class.");
    for pool in &pools {
        for (class, n) in &pool.waiting {
            page.sample(&[("pool", &pool.name), ("class", class.text())], n);
        }
    }
}

#[cfg(test)]
mod tests {
    use leasehold_core::job::record::Class;

    use super::*;

    #[test]
    fn only_so_many_are_shown() {
        let pool = |n: u64| PoolView {
            name: format!("p{n}"),
            total: 1_000,
            batch_max: None,
            lease_ms: 1,
            in_use: n,
            batch_in_use: 0,
            waiting: vec![(Class::Batch, n % 2)],
            holders: Vec::new(),
        };
        let (pools, omitted) = shown((0..150).map(pool).collect());
        assert_eq!((pools.len(), omitted), (POOLS, 50));
        assert!(pools.iter().all(|p| p.in_use >= 49));
    }
}
