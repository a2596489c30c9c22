//! Homeservers of ours talk to each other, over real TLS on this machine.

mod certificates;
mod following;
mod hostile;
mod process;
mod rig;
mod talking;
