//! What of an event's JSON is read here, and how is it put into an answer?

use serde::Deserialize;
use serde_json::value::RawValue;

use crate::core::id::{EventId, RoomId};

/// The parts of a sound event that are looked at. (Only its form is known to be right, not that it is allowed.)
#[derive(Debug, Clone, Deserialize)]
pub struct Parts {
    /// Its room. (A create event of room version 12 does not say.)
    #[serde(default)]
    room_id: Option<String>,
    /// `type`
    #[serde(rename = "type")]
    pub kind: String,
    /// Its state key, for a state event.
    pub state_key: Option<String>,
    /// The user who sent it.
    pub sender: String,
    /// The longest way from the room's beginning.
    pub depth: i64,
    /// When its server made it.
    pub origin_server_ts: i64,
    prev_events: Vec<String>,
    auth_events: Vec<String>,
    #[serde(default)]
    content: Content,
}

#[derive(Debug, Clone, Default, Deserialize)]
struct Content {
    #[serde(default)]
    membership: Option<serde_json::Value>,
}

impl Parts {
    /// Reads them.
    ///
    /// # Errors
    /// What is missing.
    pub fn read(json: &str) -> Result<Self, serde_json::Error> {
        serde_json::from_str(json)
    }

    /// Its room.
    pub fn room_id(&self) -> Option<RoomId> {
        self.room_id.as_deref().map(RoomId::from)
    }

    /// The events it follows.
    pub fn prev_events(&self) -> Vec<EventId> {
        self.prev_events.iter().map(|id| EventId::from(id.as_str())).collect()
    }

    /// The events that authorise it.
    pub fn auth_events(&self) -> Vec<EventId> {
        self.auth_events.iter().map(|id| EventId::from(id.as_str())).collect()
    }

    /// `membership`, of an `m.room.member` event.
    pub fn membership(&self) -> Option<&str> {
        let membership = self.content.membership.as_ref()?.as_str()?;
        (self.kind == "m.room.member").then_some(membership)
    }
}

/// A stored event's JSON, to be put into an answer as it is.
///
/// # Errors
/// If it is no JSON: the row is damaged.
pub fn raw(json: String) -> Result<Box<RawValue>, serde_json::Error> {
    RawValue::from_string(json)
}
