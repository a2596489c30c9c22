//! Events: from what the database stores to the bytes of a PDU.

use bytes::Bytes;

use super::id::{EventId, RoomId};

/// One event's PDU as it goes on the wire, encoded once and shared by all its destinations.
#[derive(Debug, Clone)]
pub struct Pdu {
    /// The event.
    pub event_id: EventId,
    /// Its room.
    pub room_id: RoomId,
    /// When its sender says it was made, ms.
    pub origin_server_ts: i64,
    /// Canonical JSON.
    pub bytes: Bytes,
}
