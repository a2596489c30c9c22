//! An embedded homeserver's database: one file, with what a small homeserver and its sender need of Synapse's tables.
//!
//! Reading is shared with the other engine through `Store`; the homeserver's own half, which writes events, is
//! [`Sqlite`]'s alone.

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

pub use self::{lock::FileLock, pool::Sqlite, schema::APPLICATION_ID};
