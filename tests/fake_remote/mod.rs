//! Homeservers that misbehave on demand, for tests in which a real one cannot.
//!
//! One process hosts any number of them: each has a loopback address of its own behind one port, so nothing of the
//! system's configuration has to change. All that is checked of what they receive is computed here anew, with nothing
//! taken from the crate under test.

pub mod event;
pub mod gate;
pub mod join;
pub mod record;
pub mod serve;
pub mod server;
pub mod tls;
