//! A slot for one call: waited for, kept while the call lasts, and given back whatever becomes of the call.
//!
//! Each slot has a task of its own, its keeper, which does all three:
//!
//! ```text
//!   asked --granted--> kept --the guard is dropped--> given back
//!     |                 |
//!     |                 +--its time was over--> lost: the call is stopped
//!     +--nobody waits any more--> withdrawn, and the replica leaves nothing of it
//! ```
//!
//! So there is no way out of a call on which the slot stays: its guard goes with the handler, with the answer
//! that is streamed, with a panic. Only a connection that is being closed keeps it for a moment longer.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use leasehold_core::job::record::Class;
use leasehold_core::request::{Acquire, SetPool, SlotId};
use leasehold_core::{Failure, Outcome, Request, Response as Answer};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, sleep, sleep_until};

use super::settings::Pool;
use crate::driver::Driver;
use crate::wire::submit::TENANT;

/// A request that is answered later than this is answered by a failure.
const ANSWERED: Duration = Duration::from_millis(leasehold_core::limits::REQUEST_MS);
/// Between two looks at the place in line, for whoever wants to be told. A place is kept for five seconds.
const TOLD_MS: u64 = 1_000;
/// Between two tries to give a slot back, first and longest.
const AGAIN: Duration = Duration::from_millis(100);
const AGAIN_MAX: Duration = Duration::from_secs(2);

/// A place in line: 1 is next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    pub position: u64,
    pub estimated_wait_ms: u64,
}

/// What is wanted.
#[derive(Clone, Debug)]
pub struct Wanted {
    pub pool: Pool,
    pub class: Class,
    pub cost: u32,
    /// Shown to operators.
    pub holder: String,
    pub wait_ms: u64,
    /// Is told the place in line as it changes.
    pub told: Option<mpsc::Sender<Place>>,
}

/// A slot that is held. It is given back when this is dropped.
#[derive(Debug)]
pub struct Slot {
    pub pool: String,
    /// Granted by this server itself, since the store cannot be reached.
    pub declared: bool,
    lost: watch::Receiver<bool>,
    held: Token,
}

/// The slot is kept as long as one of these lives.
pub type Token = Arc<oneshot::Sender<()>>;

impl Slot {
    /// For whoever may outlive the guard.
    pub fn token(&self) -> Token {
        self.held.clone()
    }

    /// Returns when the slot is no longer ours: what it was held for must stop.
    pub async fn lost(&mut self) {
        // The keeper ends before its slot does only when the process ends.
        let _ = self.lost.wait_for(|lost| *lost).await;
    }
}

/// A slot that is asked for. Dropped, the wish is withdrawn.
#[derive(Debug)]
pub struct Asking(oneshot::Receiver<Result<Slot, Failure>>);

impl Future for Asking {
    type Output = Result<Slot, Failure>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let gone = Err(Failure::Draining { retry_after_ms: 1_000 });
        Pin::new(&mut self.0).poll(cx).map(|answer| answer.unwrap_or(gone))
    }
}

/// Asks for a slot. `alive` is held until nothing is left to be done for it.
pub fn ask(driver: Driver, wanted: Wanted, alive: mpsc::Sender<()>) -> Asking {
    let (answer, asking) = oneshot::channel();
    tokio::spawn(async move {
        keep(&driver, wanted, answer).await;
        drop(alive);
    });
    Asking(asking)
}

async fn keep(driver: &Driver, wanted: Wanted, mut answer: oneshot::Sender<Result<Slot, Failure>>) {
    let asked = Instant::now();
    let outcome = match &wanted.told {
        None => wait(driver, &wanted, &mut answer).await,
        Some(told) => wait_aloud(driver, &wanted, told, &answer).await,
    };
    let (id, declared) = match outcome {
        // Nobody waits.
        None => return,
        Some(Ok(Answer::Slot { id, declared, .. })) => (id, declared),
        Some(outcome) => {
            let failure = outcome.err().unwrap_or(Failure::OutcomeUnknown { retry_after_ms: 1_000 });
            // Whoever asked may have gone.
            let _ = answer.send(Err(failure));
            return;
        }
    };
    let lease = Duration::from_millis(wanted.pool.lease_ms);
    // It was granted at some time before the answer, and perhaps long after it was asked for.
    let until = Instant::now() + lease - asked.elapsed().min(ANSWERED).min(lease / 2);
    let (held, mut released) = oneshot::channel();
    let (lose, lost) = watch::channel(false);
    let slot = Slot { pool: wanted.pool.name.clone(), declared, lost, held: Arc::new(held) };
    // Whoever asked may have gone: then the guard is dropped here.
    let _ = answer.send(Ok(slot));
    tokio::select! {
        _ = &mut released => {}
        () = renew(driver, &wanted, &id, until) => {
            tracing::warn!(pool = wanted.pool.name, "a slot was lost while it was in use: its call is stopped");
            lose.send_replace(true);
        }
    }
    release(driver, &wanted, id).await;
}

fn acquire(wanted: &Wanted, slot: Option<String>, wait_ms: u64) -> Request {
    Request::Acquire(Box::new(Acquire {
        tenant: TENANT.into(),
        pool: wanted.pool.name.clone(),
        slot,
        class: wanted.class,
        cost: wanted.cost,
        holder: Some(wanted.holder.clone()),
        lease_ms: Some(wanted.pool.lease_ms),
        wait_ms,
    }))
}

/// Waits without a name: whatever the replica was doing for it when its asker goes, it leaves nothing.
async fn wait(
    driver: &Driver,
    wanted: &Wanted,
    answer: &mut oneshot::Sender<Result<Slot, Failure>>,
) -> Option<Outcome> {
    let mut outcome = driver.ask_unless(acquire(wanted, None, wanted.wait_ms), answer.closed()).await?;
    if outcome == Err(Failure::UnknownPool) {
        // Somebody has deleted it, or it was not set yet.
        let _ = driver.ask(set(&wanted.pool)).await;
        outcome = driver.ask_unless(acquire(wanted, None, wanted.wait_ms), answer.closed()).await?;
    }
    Some(outcome)
}

/// Waits under a name, a step at a time, and tells the place in line after each. A step is not broken off: with
/// a name the replica would keep the place for a repeat.
async fn wait_aloud(
    driver: &Driver,
    wanted: &Wanted,
    told: &mpsc::Sender<Place>,
    answer: &oneshot::Sender<Result<Slot, Failure>>,
) -> Option<Outcome> {
    let until = Instant::now() + Duration::from_millis(wanted.wait_ms);
    let mut name = [0; 16];
    if let Err(error) = getrandom::fill(&mut name) {
        tracing::error!(%error, "no randomness from the system");
        return Some(Err(Failure::StoreUnavailable { retry_after_ms: 1_000 }));
    }
    let name = format!("proxy-{:032x}", u128::from_ne_bytes(name));
    let mut step = 0;
    loop {
        let outcome = driver.ask(acquire(wanted, Some(name.clone()), step)).await;
        let left = until.saturating_duration_since(Instant::now());
        match outcome {
            Ok(_) => return Some(outcome),
            Err(Failure::PoolFull { position, estimated_wait_ms, .. }) if !left.is_zero() && !answer.is_closed() => {
                // A reader who is behind is told the next one.
                let _ = told.try_send(Place { position, estimated_wait_ms });
                step = u64::try_from(left.as_millis()).unwrap_or(TOLD_MS).min(TOLD_MS);
            }
            Err(_) => {
                release(driver, wanted, SlotId { slot: name, nonce: None }).await;
                return if answer.is_closed() { None } else { Some(outcome) };
            }
        }
    }
}

/// The request that makes the pool what the configuration says.
pub fn set(pool: &Pool) -> Request {
    Request::SetPool(SetPool {
        tenant: TENANT.into(),
        pool: pool.name.clone(),
        total: Some(pool.total),
        batch_max: Some(pool.batch_max.unwrap_or(pool.total)),
        lease_ms: Some(pool.lease_ms),
    })
}

/// Renews the slot, and returns when it is lost, or may be.
async fn renew(driver: &Driver, wanted: &Wanted, id: &SlotId, mut until: Instant) {
    let lease = Duration::from_millis(wanted.pool.lease_ms);
    let mut next = Instant::now() + lease / 3;
    loop {
        sleep_until(next.min(until)).await;
        let sent = Instant::now();
        let request = Request::RefreshSlot { tenant: TENANT.into(), pool: wanted.pool.name.clone(), slot: id.clone() };
        let outcome = tokio::select! {
            outcome = driver.ask(request) => outcome,
            // slot-not-resurrected: from here on the slot may be somebody else's.
            () = sleep_until(until) => return,
        };
        match outcome {
            Ok(_) => {
                until = sent + lease;
                next = sent + lease / 3;
            }
            Err(Failure::SlotLost) => return,
            // The store cannot be reached, or the outcome is unknown: again, as long as the slot is certainly ours.
            Err(_) => next = Instant::now() + (lease / 6).min(Duration::from_secs(1)),
        }
    }
}

/// Gives it back, however often that must be tried: after its length it is gone by itself.
async fn release(driver: &Driver, wanted: &Wanted, id: SlotId) {
    let until = Instant::now() + Duration::from_millis(wanted.pool.lease_ms);
    let mut pause = AGAIN;
    while Instant::now() < until {
        let request = Request::ReleaseSlot { tenant: TENANT.into(), pool: wanted.pool.name.clone(), slot: id.clone() };
        if driver.ask(request).await.is_ok() {
            return;
        }
        sleep(pause).await;
        pause = (pause * 2).min(AGAIN_MAX);
    }
}
