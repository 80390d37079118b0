//! Servers that Leasehold calls: what they are, whether they answer, and one call to one of them.
//!
//! Reading order: [`settings`], [`Upstream`], [`call`], [`connect`], [`breaker`], [`slot`], [`Gateway`].

pub mod breaker;
pub mod call;
pub mod connect;
pub mod gateway;
pub mod settings;
pub mod slot;

pub use gateway::Gateway;

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use breaker::Breaker;
use connect::Connector;

/// Longest that a `Retry-After` is believed.
pub const HOLD_MAX: Duration = Duration::from_secs(3_600);
/// When to ask again after an upstream that is not well.
const UNWELL: Duration = Duration::from_secs(5);

/// One upstream as this server knows it.
#[derive(Debug)]
pub struct Upstream {
    pub settings: settings::Upstream,
    connector: Connector,
    state: Mutex<State>,
    pub calls: Counts,
}

#[derive(Debug, Default)]
struct State {
    breaker: Breaker,
    /// It has asked to be left alone until then.
    held: Option<Instant>,
    /// Its last health probe did not succeed.
    unwell: bool,
}

impl State {
    fn look(&self, now: Instant) -> Result<(), Instant> {
        match self.held {
            Some(until) if now < until => Err(until),
            _ if self.unwell => Err(now + UNWELL),
            _ => self.breaker.look(now),
        }
    }
}

/// For the metrics.
#[derive(Debug, Default)]
pub struct Counts {
    pub in_flight: AtomicUsize,
    pub answered: AtomicU64,
    pub failed: AtomicU64,
    pub timed_out: AtomicU64,
}

impl Upstream {
    pub fn new(settings: settings::Upstream) -> Result<Upstream, String> {
        let connector = Connector::new(settings.base.clone(), settings.tls_ca.as_deref())
            .map_err(|why| format!("upstream {}: {why}", settings.name))?;
        Ok(Upstream { settings, connector, state: Mutex::default(), calls: Counts::default() })
    }

    pub fn name(&self) -> &str {
        &self.settings.name
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Plain values: a panic elsewhere leaves nothing half done in them.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether it can be called now; `Err` says when to ask again.
    pub fn look(&self, now: Instant) -> Result<(), Instant> {
        self.lock().look(now)
    }

    /// As [`Upstream::look`], and a call follows.
    pub fn admit(&self, now: Instant) -> Result<(), Instant> {
        let mut state = self.lock();
        state.look(now)?;
        state.breaker.admit(now)
    }

    /// It wants to be left alone for so long.
    pub fn hold(&self, pause: Duration, now: Instant) {
        let until = now + pause.min(HOLD_MAX);
        let held = &mut self.lock().held;
        *held = Some(held.map_or(until, |before| before.max(until)));
    }

    /// It has not answered lately.
    pub fn is_open(&self) -> bool {
        self.lock().breaker.is_open()
    }

    /// What its health probe has found.
    pub fn set_well(&self, well: bool) {
        let was = std::mem::replace(&mut self.lock().unwell, !well);
        match (was, well) {
            (false, false) => tracing::warn!(upstream = self.name(), "the upstream is not well: it is not called"),
            (true, true) => tracing::info!(upstream = self.name(), "the upstream is well again"),
            (false, true) | (true, false) => {}
        }
    }

    /// A call was answered.
    pub fn answered(&self) {
        let was = {
            let mut state = self.lock();
            let was = state.breaker.is_open();
            state.breaker.answered();
            was
        };
        if was {
            tracing::info!(upstream = self.name(), "the upstream answers again");
        }
    }

    /// A call was not.
    pub fn failed(&self) {
        if self.lock().breaker.failed(Instant::now()) {
            tracing::warn!(upstream = self.name(), "the upstream does not answer: it is left alone for a while");
        }
    }

    pub fn in_flight(&self) -> usize {
        self.calls.in_flight.load(Ordering::Relaxed)
    }
}
