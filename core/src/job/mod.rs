//! Jobs: what is stored of one, and every operation on it.
pub mod record;
