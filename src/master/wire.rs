//! What of an event's JSON is read here, and how is it put into an answer?

use serde::Deserialize;
use serde_json::{Value, value::RawValue};

use crate::core::{
    clock::Millis,
    event,
    id::{EventId, RoomId},
    room_version::{EventFormat, RoomVersion},
};

/// Nothing is sticky for longer than an hour, ms.
pub const MAX_STICKY: i64 = 3_600_000;

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
    #[serde(default)]
    redacts: Option<Value>,
    #[serde(default, rename = "msc4354_sticky")]
    sticky: Option<Value>,
}

#[derive(Debug, Clone, Default, Deserialize)]
struct Content {
    #[serde(default)]
    membership: Option<Value>,
    #[serde(default)]
    redacts: Option<Value>,
}

impl Parts {
    /// Reads them.
    ///
    /// # Errors
    /// What is missing.
    pub fn read(json: &str) -> Result<Self, serde_json::Error> {
        serde_json::from_str(json)
    }

    /// Reads an event that must be of that room.
    ///
    /// # Errors
    /// What is wrong.
    pub fn of_room(json: &str, room: &RoomId, version: RoomVersion) -> Result<Self, String> {
        let parts = Self::read(json).map_err(|error| error.to_string())?;
        let of_room = match &parts.room_id {
            Some(named) => named == room.as_str(),
            // The room is named after it.
            None => {
                version.format() == EventFormat::V4
                    && parts.kind == "m.room.create"
                    && event::event_id(json, version).is_ok_and(|id| id.as_str().get(1..) == room.as_str().get(1..))
            }
        };
        if of_room {
            Ok(parts)
        } else {
            Err("it is an event of another room".into())
        }
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

    /// The event that it redacts.
    pub fn redacts(&self, version: RoomVersion) -> Option<EventId> {
        let in_content = version.has_updated_redaction_rules();
        let redacts = if in_content {
            &self.content.redacts
        } else {
            &self.redacts
        };
        let redacts = redacts.as_ref()?.as_str()?;
        (self.kind == "m.room.redaction").then(|| redacts.into())
    }

    /// When it ceases to be sticky, if it is (MSC4354) and was taken in at `received`. An end that is past is none.
    pub fn sticky_until(&self, received: Millis) -> Option<Millis> {
        let duration = self.sticky.as_ref()?.get("duration_ms")?.as_u64()?;
        let duration = i64::try_from(duration).unwrap_or(MAX_STICKY).min(MAX_STICKY);
        let until = Millis(self.origin_server_ts).min(received).plus(duration);
        (until > received).then_some(until)
    }
}

/// A stored event's JSON, to be put into an answer as it is.
///
/// # Errors
/// If it is no JSON: the row is damaged.
pub fn raw(json: String) -> Result<Box<RawValue>, serde_json::Error> {
    RawValue::from_string(json)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(more: &str) -> Parts {
        let json = format!(
            r#"{{"type":"m.test","sender":"@a:b","depth":1,"origin_server_ts":1000,"prev_events":[],"auth_events":[],
                "content":{{}},"room_id":"!r"{more}}}"#
        );
        Parts::read(&json).expect("sound")
    }

    #[test]
    fn stickiness_begins_with_the_earlier_clock_and_lasts_an_hour_at_most() {
        let until = |sticky: &str, received| {
            parts(&format!(r#","msc4354_sticky":{sticky}"#))
                .sticky_until(Millis(received))
                .map(|until| until.0)
        };
        assert_eq!(until(r#"{"duration_ms":500}"#, 1200), Some(1500));
        assert_eq!(until(r#"{"duration_ms":500}"#, 900), Some(1400), "made in the future");
        assert_eq!(until(r#"{"duration_ms":500}"#, 1500), None, "over");
        assert_eq!(until(r#"{"duration_ms":18446744073709551615}"#, 1000), Some(3_601_000));
        for never in [
            r#"{"duration_ms":0}"#,
            r#"{"duration_ms":-5}"#,
            r#"{"duration_ms":"9"}"#,
            "{}",
            "7",
            "null",
        ] {
            assert_eq!(until(never, 1000), None, "{never}");
        }
        assert_eq!(parts("").sticky_until(Millis(0)), None);
    }

    #[test]
    fn an_event_of_another_room_is_not_ours() {
        let version = RoomVersion::of("11").expect("known");
        let json = r#"{"type":"m.room.create","sender":"@a:b","depth":1,"origin_server_ts":1,"prev_events":[],"auth_events":[],"content":{}}"#;
        assert!(Parts::of_room(json, &"!r".into(), version).is_err());
        let twelve = RoomVersion::of("12").expect("known");
        let named_after_it = event::event_id(json, twelve).expect("sound").as_str().replace('$', "!");
        assert!(Parts::of_room(json, &named_after_it.as_str().into(), twelve).is_ok());
        assert!(Parts::of_room(json, &"!r".into(), twelve).is_err());
        let json = json.replace(r#""depth":1"#, r#""depth":1,"room_id":"!r""#);
        assert!(Parts::of_room(&json, &"!r".into(), version).is_ok());
        assert!(Parts::of_room(&json, &"!s".into(), version).is_err());
    }
}
