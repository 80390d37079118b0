//! Jobs: what is stored of one, and every operation on it as guarded transactions.
//!
//! ```text
//!                       +--------------------------- release -------------+
//! submit --> scheduled -+-> queued --claim--> running --complete--> succeeded
//!        \-> held ------+      |  ^            | | |
//!                              |  |            | | +--fail, attempts left--> retrying --due--+
//!                              |  +--lapse-----+ |                                           |
//!                              |  +<-------------|-------------------------------------------+
//!                              |                 +--fail, none left / not retryable--> dead
//!                              +--queue deadline--> expired        cancel (any live) --> cancelled
//! ```
//!
//! Each operation is a small machine: it says what to read, decides from what was read, and knows
//! from the outcome what to answer (`replica::task::Operation`). The replica
//! batches reads and commits of many, repeats what was lost, and settles what is unknown.
//!
//! Reading order: [`record`], `moves` (writes that transitions share), `key`, `submit`, `claim`, `lease`,
//! `handed`, `beat`, `finish`, `attempt`, `operate`, `sweep`, `scrub`, `audit`, `inspect`, `look`, `list`, `queue`, `events`.

pub(crate) mod attempt;
pub(crate) mod audit;
pub(crate) mod beat;
pub(crate) mod check;
pub(crate) mod claim;
pub(crate) mod events;
pub(crate) mod finish;
pub(crate) mod handed;
pub(crate) mod inspect;
pub(crate) mod key;
pub(crate) mod lease;
pub(crate) mod list;
pub(crate) mod look;
pub(crate) mod moves;
pub(crate) mod operate;
pub(crate) mod queue;
pub(crate) mod ready;
pub mod record;
pub mod retry;
pub(crate) mod scrub;
pub(crate) mod submit;
pub(crate) mod sweep;
pub(crate) mod view;

use crate::failure::Failure;
use crate::request;

/// What can be said of a submit without the store.
pub fn validate_submit(submit: &request::Submit) -> Result<(), Failure> {
    submit::validate(submit)
}
