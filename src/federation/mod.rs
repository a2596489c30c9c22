//! How to talk to one remote server: where it is, what is signed, what its answer means.

pub mod addresses;
pub mod client;
mod gate;
pub mod inbound;
pub mod outcome;
mod resolver;
pub mod server_name;
mod tls;
pub mod transaction;
pub mod x_matrix;
