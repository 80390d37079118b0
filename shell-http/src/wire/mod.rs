//! Between HTTP's JSON and the core's plain data. Nothing in here decides anything about jobs.

pub mod decode;
pub mod fields;
pub mod group;
pub mod json;
pub mod pool;
pub mod query;
pub mod store;
pub mod submit;
pub mod time;
pub mod view;
