//! The store port, its key layout, and the reference implementation.

mod books;
#[cfg(feature = "conformance")]
pub mod conformance;
pub mod engine;
pub mod index;
pub mod keys;
pub mod model;
mod port;

pub use port::*;
