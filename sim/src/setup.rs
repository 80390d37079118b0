//! What one seed draws before anything happens (swarm testing): the topology, the limits, the load,
//! and which faults are on and how heavy. Half of them are off in any seed, so that rare ones are
//! not drowned by common ones.

use leasehold_core::Config;
use leasehold_core::dispatch::{Route, Routing, Upstream};
use leasehold_core::pool::open::FailOpen;

use crate::choices::{Choices, Topic};
use crate::clients::{queue_name, tenant_name};
use crate::users::{SLOT_MS, pool_name};

pub const SECOND: u64 = 1_000_000;
pub const MILLI: u64 = 1_000;

/// What the store may do to what it acknowledged, and so which promises are checked in what form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Regime {
    /// Nothing acknowledged is ever lost: every promise holds for every job.
    Durable,
    /// A fail-over forgets the newest commits. What they touched may be undone, once, as a whole;
    /// everything else, and every later transition of what was touched, is held to the promises.
    LoseLastCommits,
    /// Any record or index entry may vanish. Its job must be reported lost, be mended by the scrub, or
    /// end; it is never handed out without its record and payload. All other jobs are as in `Durable`.
    EvictKeys,
}

impl Regime {
    pub fn text(self) -> &'static str {
        match self {
            Regime::Durable => "Durable",
            Regime::LoseLastCommits => "LoseLastCommits",
            Regime::EvictKeys => "EvictKeys",
        }
    }
}

macro_rules! faults {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Weights of the faults; 0 is off.
        #[derive(Clone, Debug, Default, PartialEq, Eq)]
        pub struct Faults { $($(#[$doc])* pub $name: u32),* }

        impl Faults {
            /// Name and weight of those that are on.
            pub fn on(&self) -> Vec<(&'static str, u32)> {
                let all = [$((stringify!($name), self.$name)),*];
                all.into_iter().filter(|f| f.1 > 0).collect()
            }
        }
    };
}

faults! {
    // Per mille of envelopes.
    /// A store request is lost on its way.
    store_request_lost,
    /// The store's reply is lost after it was applied.
    store_reply_lost,
    /// What a store request did is done a second time, later.
    store_duplicate,
    /// A store request arrives seconds late, after its sender gave up.
    store_late,
    /// The store is reported unavailable, or the call as broken.
    store_error,
    /// A reply of the store comes twice.
    reply_twice,
    /// A commit is cut between two of its transactions, and the reply is lost.
    store_partial,
    /// Milliseconds by which any store envelope may be late (and so reordered).
    store_delay_ms,
    /// A client's call is lost on its way.
    call_lost,
    /// The answer to a client is lost.
    answer_lost,
    /// Milliseconds by which a client's envelope may be late.
    call_delay_ms,
    /// A notification is lost.
    notify_lost,
    /// Per 10,000 steps: the replica dies between two outputs of the step.
    crash_step,
    // Weights of what happens now and then.
    crash,
    pause,
    cut_store,
    cut_clients,
    store_slow,
    store_down,
    replica_clock,
    store_clock,
    store_clock_back,
    store_full,
    evict,
    drop_entry,
    corrupt,
    lose_commits,
    garbage,
    /// A record is one of a newer release for a while.
    newer,
}

/// How workers and clients behave, per mille.
#[derive(Clone, Debug, Default)]
pub struct Manners {
    pub hang: u32,
    pub die: u32,
    pub vanish: u32,
    pub twice: u32,
    pub stale_token: u32,
    pub fail: u32,
    pub release: u32,
    pub poison: u32,
    /// Upstreams that ask to be left alone for a while.
    pub busy: u32,
}

#[derive(Clone, Debug)]
pub struct Setup {
    pub seed: u64,
    pub replicas: usize,
    pub config: Config,
    pub regime: Regime,
    pub chaos_us: u64,
    pub jobs: usize,
    pub clients: usize,
    /// Clients that create groups, and groups that each creates.
    pub owners: usize,
    pub groups: usize,
    /// Pools, and those who use them.
    pub pools: usize,
    pub users: usize,
    pub workers: usize,
    pub tenants: usize,
    pub queues: usize,
    /// Per mille of submits with an idempotency key.
    pub keyed: u32,
    pub faults: Faults,
    pub manners: Manners,
    /// Mean microseconds between two large faults.
    pub chaos_every_us: u64,
    /// Parts per million by which replicas' clocks are off, at most.
    pub drift_ppm: u64,
    /// What the first replica's clock shows when it starts; the second's twice as much, and so on.
    pub clocks_from_us: u64,
    /// Whether the run goes on until all retention has passed.
    pub tail: bool,
    /// Random clients, workers, operator and chaos; scripts run without.
    pub random: bool,
}

impl Setup {
    /// A quiet world for scripts: no faults, no load of its own.
    pub fn quiet(seed: u64, replicas: usize) -> Setup {
        Setup {
            seed,
            replicas,
            config: Config::default(),
            regime: Regime::Durable,
            chaos_us: 0,
            jobs: 0,
            clients: 0,
            owners: 0,
            groups: 0,
            pools: 0,
            users: 0,
            workers: 0,
            tenants: 1,
            queues: 1,
            keyed: 0,
            faults: Faults::default(),
            manners: Manners::default(),
            chaos_every_us: 0,
            drift_ppm: 0,
            clocks_from_us: 0,
            tail: false,
            random: false,
        }
    }

    pub fn draw(seed: u64, c: &mut impl Choices) -> Setup {
        let at = Topic::Setup.of(0);
        let mut s = Setup::quiet(seed, 1);
        s.random = true;
        s.replicas = *c.pick(at, &[1, 2, 2, 3, 3, 3, 4, 5]);
        s.regime = *c
            .pick(at, &[Regime::Durable, Regime::Durable, Regime::Durable, Regime::LoseLastCommits, Regime::EvictKeys]);
        s.chaos_us = c.between(at, 20, 120) * SECOND;
        s.jobs = c.between(at, 8, 48) as usize;
        s.clients = c.between(at, 1, 3) as usize;
        s.workers = c.between(at, 2, 5) as usize;
        s.tenants = *c.pick(at, &[1, 1, 2]);
        s.queues = c.between(at, 1, 3) as usize;
        s.keyed = *c.pick(at, &[700, 300, 1000, 0]);
        s.tail = c.draw(at, 6) == 5;
        s.config.mailbox = *c.pick(at, &[8_192, 8_192, 64, 6]);
        s.config.commits = *c.pick(at, &[2, 1, 4]);
        s.config.reads = *c.pick(at, &[2, 1, 4]);
        s.config.commit_txns = *c.pick(at, &[1_000, 1_000, 4, 1]);
        s.config.sweep_ms = *c.pick(at, &[1_000, 1_000, 500, 2_000]);
        s.config.scrub_ms = *c.pick(at, &[2_000, 4_000, 6_000]);
        // Where nothing is lost its long reads would be most of a run's cost, and find nothing.
        if s.regime == Regime::Durable && c.draw(at, 4) > 0 {
            s.config.scrub_ms *= 10;
        }
        s.config.retention_ms = *c.pick(at, &[30_000, 60_000, 5_000]);
        s.config.lease_ms = c.between(at, 2_000, 12_000);
        let swarm = Topic::Swarm.of(0);
        // A fifth of the seeds are fault-free: what goes wrong there has no excuse.
        if c.draw(swarm, 5) > 0 {
            s.faults = draw_faults(c, s.regime);
            s.chaos_every_us = c.between(swarm, 3, 20) * SECOND;
            s.drift_ppm = *c.pick(swarm, &[0, 100, 10_000]);
        }
        s.manners = draw_manners(c);
        let groups = Topic::Swarm.of(3);
        s.owners = *c.pick(groups, &[0, 1, 1, 2, 2]);
        s.groups = *c.pick(groups, &[1, 2, 3, 5]);
        let pools = Topic::Swarm.of(4);
        s.pools = *c.pick(pools, &[0, 1, 1, 2]);
        s.users = *c.pick(pools, &[3, 5, 8, 12]);
        if s.pools > 0 && c.draw(pools, 4) > 0 {
            s.config.routing = routing(&s);
        }
        for n in 0..s.pools as u64 {
            if c.draw(pools, 2) == 1 {
                let how = FailOpen { local: c.between(pools, 1, 3) as u32, lease_ms: SLOT_MS };
                s.config.fail_open.insert(pool_name(n), how);
            }
        }
        s
    }
}

/// Two upstreams on the premises, one of them without a pool, and one that is not. That one has a pool of its own,
/// for which nobody else waits. The second queue's work can go there only.
fn routing(s: &Setup) -> Routing {
    let pool = |n: usize| Some(pool_name(n as u64));
    let upstream = |name: &str, pool, on_prem| Upstream { name: name.into(), pool, on_prem };
    let tenants: Vec<String> = (0..s.tenants as u64).map(tenant_name).collect();
    let to = [&["here", "cloud"][..], &["cloud"], &["here", "free"]];
    let routes = (0..s.queues as u64).zip(to).map(|(n, upstreams)| Route {
        queue: queue_name(n),
        tenants: tenants.clone(),
        upstreams: upstreams.iter().map(|u| String::from(*u)).collect(),
    });
    Routing {
        upstreams: vec![
            upstream("here", pool(0), true),
            upstream("cloud", pool(s.pools), false),
            upstream("free", None, true),
        ],
        routes: routes.collect(),
        on_prem_tenants: Vec::new(),
    }
}

fn draw_faults(c: &mut impl Choices, regime: Regime) -> Faults {
    let at = Topic::Swarm.of(1);
    let mut weight = |low: u64, high: u64| -> u32 {
        // Drawn in any case, so that each fault's weight stands in its place of the stream.
        let (on, w) = (c.draw(at, 2), c.between(at, low, high));
        if on == 1 { w as u32 } else { 0 }
    };
    let mut f = Faults {
        store_request_lost: weight(5, 80),
        store_reply_lost: weight(5, 120),
        store_duplicate: weight(5, 100),
        store_late: weight(5, 60),
        store_error: weight(5, 80),
        reply_twice: weight(5, 60),
        store_partial: weight(10, 100),
        store_delay_ms: weight(2, 300),
        call_lost: weight(5, 80),
        answer_lost: weight(5, 80),
        call_delay_ms: weight(2, 500),
        notify_lost: weight(50, 800),
        crash_step: weight(2, 30),
        crash: weight(1, 6),
        pause: weight(1, 6),
        cut_store: weight(1, 6),
        cut_clients: weight(1, 4),
        store_slow: weight(1, 4),
        store_down: weight(1, 3),
        replica_clock: weight(1, 3),
        store_clock: weight(1, 2),
        store_clock_back: weight(1, 2),
        store_full: weight(1, 3),
        evict: weight(2, 10),
        drop_entry: weight(2, 8),
        corrupt: weight(1, 4),
        lose_commits: weight(2, 8),
        garbage: weight(1, 2),
        newer: weight(1, 4),
    };
    // Going back is declared by few runs: it takes away the order of tokens.
    if c.draw(at, 4) != 3 {
        f.store_clock_back = 0;
    }
    if regime != Regime::EvictKeys {
        f.evict = 0;
        f.drop_entry = 0;
        f.corrupt = 0;
    }
    if regime != Regime::LoseLastCommits {
        f.lose_commits = 0;
    }
    f
}

fn draw_manners(c: &mut impl Choices) -> Manners {
    let at = Topic::Swarm.of(2);
    let mut weight = |low: u64, high: u64| -> u32 {
        let (on, w) = (c.draw(at, 2), c.between(at, low, high));
        if on == 1 { w as u32 } else { 0 }
    };
    Manners {
        hang: weight(20, 250),
        die: weight(10, 100),
        vanish: weight(10, 100),
        twice: weight(50, 400),
        stale_token: weight(50, 300),
        fail: weight(50, 500),
        release: weight(20, 200),
        poison: weight(20, 150),
        busy: weight(100, 500),
    }
}
