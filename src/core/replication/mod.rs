//! Replication: what the processes of one homeserver tell each other.
//!
//! [`command`] is the language, [`stream`] says what is followed or written, [`positions`] how far every writer is.
//!
//! Reading: [`reader`] decides what a line means (one [`lane`] a stream and writer). Writing: [`ids`] decides when an id
//! may be announced, `announcer` what is said of it, [`outbox`] in which order; [`memory_log`] answers who missed what is
//! in no database. [`sync_reports`] and [`syncing`] are the two ends of `USER_SYNC`. None of these does I/O.
//!
//! [`redis_bus`], [`local_bus`] and [`http_gaps`] do it; [`writer`], [`task`] and [`master`] tie all together.
//! [`feed`] is another thing: tables that whoever likes follows over HTTP. [`ephemeral`] has two of a master's.

mod announcer;
pub mod bus;
pub mod command;
mod echoes;
pub mod ephemeral;
pub mod feed;
mod from_store;
pub mod gap;
mod heard;
pub mod http_gaps;
pub mod ids;
pub mod lane;
pub mod local_bus;
pub mod master;
pub mod memory_log;
pub mod outbox;
pub mod positions;
pub mod reader;
pub mod redis_bus;
pub mod rows;
pub mod stream;
pub mod sync_reports;
pub mod syncing;
pub mod task;
pub mod writer;

pub use from_store::{master_start, start_positions};

#[cfg(test)]
mod scripts;
#[cfg(test)]
mod simulation;
