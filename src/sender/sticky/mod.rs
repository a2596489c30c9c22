//! The sticky backlog: every sticky event of ours that is alive reaches every server in the room, a server that has only
//! just joined included (MSC4354).

pub mod backlog;
mod detect;
mod drain;
#[cfg(test)]
mod simulation;
