//! What every part needs and nothing else: identifiers, events, replication, state, the store. It knows neither HTTP
//! to other homeservers nor queues.

pub mod canonical_json;
pub mod clock;
pub mod event;
pub mod id;
pub mod metrics;
pub mod replication;
pub mod room_version;
pub mod rules;
pub mod shutdown;
pub mod signing;
pub mod state;
pub mod store;
