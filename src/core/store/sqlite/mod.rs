//! An embedded homeserver's database: one file, with what a small homeserver and its sender need of Synapse's tables.
//!
//! Reading is shared with the other engine through `Store`; the homeserver's own half, which writes events, is
//! [`Sqlite`]'s alone.

mod backlog;
mod backlog_record;
mod catch_up;
mod checkpoint;
mod current_state;
mod deltas;
mod destinations;
mod events;
mod followed;
mod history;
mod holdings;
mod homeserver;
mod lock;
mod persist;
mod pool;
mod positions;
mod schema;
mod state;
mod state_groups;
mod streams;

pub use self::{
    followed::{CURRENT_STATE_DELTAS, EVENTS, FollowedTable, STICKY_EVENTS},
    history::Known,
    holdings::HeldEvent,
    homeserver::RemoteKey,
    lock::FileLock,
    persist::{Outcome, PersistEvent, Persisted, StateChange},
    pool::Sqlite,
    schema::APPLICATION_ID,
};
