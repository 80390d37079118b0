//! Scripted small worlds.
