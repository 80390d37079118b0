//! The model store on its host: its clock, and commits applied one transaction at a time, so that
//! the oracle looks between any two of them and a crash can fall there.

use std::sync::{Arc, Mutex, PoisonError};

use leasehold_core::store::model::Model;

use crate::twin::Twin;
use crate::world::Micros;

/// The store's clock when a run begins.
pub const EPOCH: u64 = 1_700_000_000_000_000;

#[derive(Clone, Debug)]
pub struct StoreHost {
    pub model: Model,
    /// By how much the clock has been stepped, microseconds.
    pub stepped: i64,
    /// Unreachable until then.
    pub down_until: Micros,
    /// Slow until then: every call takes up to `slow_us` longer.
    pub slow_until: Micros,
    pub slow_us: Micros,
    /// A real store that must do as the model does.
    pub twin: Option<Arc<Mutex<Twin>>>,
}

impl StoreHost {
    pub fn new() -> StoreHost {
        StoreHost { model: Model::new(EPOCH), stepped: 0, down_until: 0, slow_until: 0, slow_us: 0, twin: None }
    }

    /// Does something with the real store, if there is one.
    pub fn beside<T>(
        &mut self,
        f: impl FnOnce(&mut Twin, &mut Model) -> Result<T, String>,
    ) -> Result<Option<T>, String> {
        let Some(twin) = self.twin.clone() else { return Ok(None) };
        let mut twin = twin.lock().unwrap_or_else(PoisonError::into_inner);
        f(&mut twin, &mut self.model).map(Some)
    }

    /// Sets the model's clock to what it shows at that time.
    pub fn tick(&mut self, now: Micros) -> u64 {
        let clock = (EPOCH + now).saturating_add_signed(self.stepped);
        self.model.set_clock(clock);
        clock
    }
}

impl Default for StoreHost {
    fn default() -> Self {
        StoreHost::new()
    }
}
