//! Synapse's database: its schema (read; written only where its own sender writes) and our schema `burdock` in it.

mod backlog;
mod backlog_record;
mod catch_up;
mod checkpoint;
mod deltas;
mod destinations;
mod events;
mod lock;
mod pool;
mod positions;
mod schema;
mod state;
mod streams;

pub use self::{lock::AdvisoryLock, pool::Postgres};
