//! What a room's state says: which servers are in it, who gets an event, who may see one, and which servers a change
//! brought in.

pub mod joined_hosts;
pub mod new_servers;
pub mod recipients;
pub mod visibility;
