//! # Leasehold's simulator
//!
//! N replicas, their clients, workers and clocks, and the model store, in one thread, from one seed,
//! with faults between all of them; and an oracle that holds every commit and every answer to the
//! promises of DESIGN.md §4. Any seed replays its run, bit for bit.
//!
//! Reading order: [`setup`] (what a seed draws), [`world`] (the event loop), [`replicas`], [`links`] and
//! [`store`] (what happens to what a replica says), [`faults`], [`clients`], [`owners`] of groups and [`workers`] (the load),
//! [`oracle`] (what must hold), [`liveness`] (the phases of a run), [`scenarios`] (scripted worlds), [`sweep`] (every
//! fault at every place of them), [`aim`] and [`tables`] (that nothing is left untried), [`scope`] (small worlds, exhaustively), [`pairs`] (runs that must come to the same),
//! [`corrupt`] (whether the oracle objects).

pub mod aim;
pub mod calls;
pub mod choices;
pub mod clients;
pub mod corrupt;
pub mod declared;
pub mod explain;
pub mod faults;
pub mod focus;
pub mod fold;
pub mod links;
pub mod liveness;
pub mod oracle;
pub mod owners;
pub mod pairs;
pub mod picture;
pub mod plan;
pub mod replicas;
pub mod report;
pub mod scenarios;
pub mod scope;
pub mod settings;
pub mod setup;
pub mod shrink;
pub mod soak;
pub mod state;
pub mod store;
pub mod strikes;
pub mod sweep;
pub mod tables;
pub mod tape;
pub mod timeline;
pub mod trace;
pub mod tried;
pub mod twin;
pub mod users;
pub mod workers;
pub mod world;
