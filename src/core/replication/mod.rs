//! Replication: what the processes of one homeserver tell each other.
//!
//! [`command`] is the language, [`stream`] says what is followed, [`positions`] how far every writer is. [`reader`]
//! decides what a line means (one [`lane`] a stream and writer), [`outbox`] what we say and in which order; neither does
//! I/O. [`redis_bus`] and [`http_gaps`] do it, and [`task`] ties all together. [`feed`] is another thing: tables that whoever
//! likes follows over HTTP.

pub mod bus;
pub mod command;
mod echoes;
pub mod feed;
mod from_store;
pub mod gap;
pub mod http_gaps;
pub mod lane;
pub mod outbox;
pub mod positions;
pub mod reader;
pub mod redis_bus;
pub mod stream;
pub mod task;

pub use from_store::start_positions;

#[cfg(test)]
mod scripts;
#[cfg(test)]
mod simulation;
