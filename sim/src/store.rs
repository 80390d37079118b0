//! The model store on its host: its clock, and commits applied one transaction at a time, so that
//! the oracle looks between any two of them and a crash can fall there.

use leasehold_core::store::model::Model;

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
}

impl StoreHost {
    pub fn new() -> StoreHost {
        StoreHost { model: Model::new(EPOCH), stepped: 0, down_until: 0, slow_until: 0, slow_us: 0 }
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
