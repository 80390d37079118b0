//! Leasehold over HTTP: the server and the command line.
//!
//! **A shell only translates.** It decodes requests into the core's plain data, hands them to the
//! one loop that owns the replica, encodes what comes back, and counts. If something here needs an
//! `if` about jobs, it belongs in the core.
//!
//! Reading order: [`routes`] (every call there is), [`wire`] (JSON to plain data and back),
//! [`problem`] (what clients hear when something was not done), [`driver`] (the loop), [`serve`] (from
//! start to end), [`connection`] (what one connection may take), [`limits`], [`upstream`] (servers
//! that are called, and slots for calls), [`proxy`],
//! [`dispatch`].

pub mod body;
pub mod cli;
pub mod config;
pub mod connection;
pub mod dispatch;
pub mod drain;
pub mod driver;
pub mod limits;
pub mod listener;
pub mod metrics;
pub mod openapi;
pub mod problem;
pub mod proxy;
pub mod record;
pub mod request_id;
pub mod routes;
pub mod serve;
pub mod store;
pub mod upstream;
pub mod wire;
