//! What a room's state is before and after each event, and what it says: which servers are in the room, who gets an event,
//! who may see one, and which servers a change brings in.

pub mod context;
pub mod groups;
pub mod joined_hosts;
pub mod map;
pub mod new_servers;
pub mod recipients;
pub mod servers;
pub mod visibility;
