//! A new event of ours, before it is hashed and signed.

use super::ObjectWriter;
use crate::core::{
    canonical_json::push_string,
    clock::Millis,
    id::{EventId, RoomId},
};

/// A new event of room version 3 or later. The auth events are those that stand in the state before it under
/// [`auth_keys`](crate::core::rules::auth_keys).
#[derive(Debug, Clone)]
pub struct NewEvent<'a> {
    /// Its room; none for a create event of room version 12, which gives the room its id.
    pub room_id: Option<&'a RoomId>,
    /// `type`.
    pub kind: &'a str,
    /// `state_key`, for a state event.
    pub state_key: Option<&'a str>,
    /// The user who sends it.
    pub sender: &'a str,
    /// Its content, a JSON object.
    pub content: &'a str,
    /// When it is made.
    pub origin_server_ts: Millis,
    /// One more than the greatest depth of `prev_events`.
    pub depth: i64,
    /// The room's forward extremities.
    pub prev_events: &'a [EventId],
    /// The events that authorise it.
    pub auth_events: &'a [EventId],
    /// Further members and their JSON, such as `msc4354_sticky`, or `redacts` before room version 11.
    pub more: &'a [(&'a str, &'a str)],
}

impl NewEvent<'_> {
    /// Its JSON, for [`finish`](super::finish).
    #[must_use]
    pub fn json(&self) -> String {
        let mut out = String::new();
        let mut object = ObjectWriter::new(&mut out);
        let mut text = |key: &str, value: &str| {
            let mut quoted = String::new();
            push_string(&mut quoted, value);
            object.raw(key, &quoted);
        };
        text("type", self.kind);
        text("sender", self.sender);
        if let Some(room_id) = self.room_id {
            text("room_id", room_id.as_str());
        }
        if let Some(state_key) = self.state_key {
            text("state_key", state_key);
        }
        object.raw("content", self.content);
        object.raw("origin_server_ts", &self.origin_server_ts.0.to_string());
        object.raw("depth", &self.depth.to_string());
        object.raw("prev_events", &list(self.prev_events));
        object.raw("auth_events", &list(self.auth_events));
        for (key, value) in self.more {
            object.raw(key, value);
        }
        object.end();
        out
    }
}

fn list(ids: &[EventId]) -> String {
    let mut out = String::from("[");
    for (index, id) in ids.iter().enumerate() {
        if index > 0 {
            out.push(',');
        }
        push_string(&mut out, id.as_str());
    }
    out.push(']');
    out
}
