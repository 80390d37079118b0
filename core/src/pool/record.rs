//! What is stored of a pool and of its slots.

use alloc::string::String;

use crate::job::record::{Class, Trail};
use crate::limits;
use crate::store::{Clock, Version};

/// The record `pool/{pool}`. Who holds and who waits is not in it: that is counted by indexes.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Pool {
    /// Slots, at least 1.
    pub total: u32,
    /// Of these, how many may be held by class batch at a time; `None`: all.
    pub batch_max: Option<u32>,
    /// A slot's lease, unless whoever asks for it says otherwise.
    pub lease_ms: u64,
    /// Deleted: nothing but a stub that refuses what was stuck on the way.
    pub deleted: bool,
    pub trail: Trail,
}

impl Pool {
    /// How many slots holders of that class may have together.
    pub fn most(&self, class: Class) -> u32 {
        match class {
            Class::Batch => self.batch_max.unwrap_or(self.total).min(self.total),
            Class::Interactive | Class::System => self.total,
        }
    }
}

/// The record `slot/{pool}/{tenant}/{slot}`.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Slot {
    pub state: SlotState,
    /// Drawn when it was asked for. It names the holder's members in `holders`, so that nothing done for an
    /// earlier holder of the same name touches them.
    pub nonce: Version,
    pub class: Class,
    /// Units of the pool that it takes, all or none.
    pub cost: u32,
    pub lease_ms: u64,
    /// What whoever asked for it calls itself.
    pub holder: Option<String>,
}

impl Slot {
    /// When it ends if it is granted or refreshed now.
    pub(crate) fn end(&self, clock: Clock) -> Clock {
        clock.saturating_add(self.lease_ms.saturating_mul(limits::MILLI))
    }
}

/// ```text
///              room, and nobody before it
/// (absent) ----------------------------------> granted --release--> over
///    |                                          ^   |                ^
///    +--------> waiting --room, first of its----+   +--its end       |
///                  |      class, nobody above          comes: lapsed |
///                  +--withdrawn------------------------------------- +
///                  +--nobody renews it for 5 s--> (absent)
/// ```
///
/// A declared slot is one that was granted without the store, and then written down: it goes the way of a granted one.
///
/// A lapsed slot keeps its record for a while; what makes it lapsed is that its members in `holders` are
/// past their time or gone. Lapsed and over ones may be wanted again: that is another nonce.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum SlotState {
    /// Since when is its score in `waiting`; this is what that was.
    Waiting {
        since: Clock,
    },
    Granted,
    Over,
    /// Granted by a replica itself while the store could not be reached: no room was asked for.
    Declared,
}

impl SlotState {
    /// Granted, and not given back; its time may have come nevertheless.
    pub fn is_held(self) -> bool {
        matches!(self, SlotState::Granted | SlotState::Declared)
    }
}
