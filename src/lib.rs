//! Burdock sends a Matrix homeserver's events to every other homeserver in its rooms.
//!
//! Imports point downwards only: `cli` → `sender`, `master`, `admin` → `federation` → `config` → `core`.
//! `docs/architecture.md` is the map.

pub mod admin;
pub mod cli;
pub mod config;
pub mod core;
pub mod federation;
pub mod master;
pub mod sender;
