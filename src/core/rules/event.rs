//! An event as the rules look at it.

use std::sync::Arc;

use ruma_common::{MilliSecondsSinceUnixEpoch, OwnedEventId, OwnedRoomId, OwnedUserId, RoomId, UserId};
use ruma_events::TimelineEventType;
use ruma_state_res::Event;
use serde::{Deserialize, de::IgnoredAny};
use serde_json::value::RawValue;

use super::RulesError;
use crate::core::{
    id::EventId,
    room_version::{EventFormat, RoomVersion},
    state::map::StateKey,
};

/// An event, read for the rules. A clone shares it.
#[derive(Debug, Clone)]
pub struct RoomEvent(Arc<Parts>);

#[derive(Debug)]
struct Parts {
    id: OwnedEventId,
    json: Json,
    prev_events: Vec<OwnedEventId>,
    auth_events: Vec<OwnedEventId>,
    rejected: bool,
}

#[derive(Debug, Deserialize)]
struct Json {
    room_id: Option<OwnedRoomId>,
    sender: OwnedUserId,
    origin_server_ts: MilliSecondsSinceUnixEpoch,
    #[serde(rename = "type")]
    kind: TimelineEventType,
    state_key: Option<String>,
    content: Box<RawValue>,
    prev_events: Vec<Reference>,
    auth_events: Vec<Reference>,
    redacts: Option<OwnedEventId>,
}

/// An event named by another: by its id, or (room versions 1 and 2) by id and hashes.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Reference {
    Id(OwnedEventId),
    Pair(OwnedEventId, IgnoredAny),
}

impl Reference {
    fn id(&self) -> OwnedEventId {
        match self {
            Self::Id(id) | Self::Pair(id, _) => id.clone(),
        }
    }
}

impl RoomEvent {
    /// Reads the event of that id. `rejected`: it is known not to have been allowed.
    ///
    /// # Errors
    /// `Malformed`.
    pub fn read(event_id: &EventId, json: &str, rejected: bool) -> Result<Self, RulesError> {
        let malformed = |what: String| RulesError::Malformed(format!("{event_id}: {what}"));
        let json: Json = serde_json::from_str(json).map_err(|error| malformed(error.to_string()))?;
        Ok(Self(Arc::new(Parts {
            id: ruma_id(event_id).ok_or_else(|| malformed("not an event id".into()))?,
            prev_events: json.prev_events.iter().map(Reference::id).collect(),
            auth_events: json.auth_events.iter().map(Reference::id).collect(),
            json,
            rejected,
        })))
    }

    /// Its id.
    #[must_use]
    pub fn event_id(&self) -> EventId {
        self.0.id.as_str().into()
    }

    /// The events that authorise it. (Room version 12 leaves the create event unsaid.)
    #[must_use]
    pub fn auth_events(&self) -> Vec<EventId> {
        self.0.auth_events.iter().map(|id| id.as_str().into()).collect()
    }

    /// Its key in a room's state, if it is a state event.
    #[must_use]
    pub fn key_in_state(&self) -> Option<StateKey> {
        let key = self.0.json.state_key.as_deref()?;
        Some(StateKey::new(&self.0.json.kind.to_string(), key))
    }

    /// The create event that its room's id names, in room version 12.
    #[must_use]
    pub fn unsaid_create_event(&self, version: RoomVersion) -> Option<EventId> {
        let room_id = self.0.json.room_id.as_ref()?;
        (version.format() == EventFormat::V4).then(|| format!("${}", room_id.strip_sigil()).into())
    }

    pub(super) fn auth_ids(&self) -> &[OwnedEventId] {
        &self.0.auth_events
    }
}

/// The id as ruma's type.
pub(super) fn ruma_id(event_id: &EventId) -> Option<OwnedEventId> {
    event_id.as_str().try_into().ok()
}

impl Event for RoomEvent {
    type Id = OwnedEventId;

    fn event_id(&self) -> &OwnedEventId {
        &self.0.id
    }

    fn room_id(&self) -> Option<&RoomId> {
        self.0.json.room_id.as_deref()
    }

    fn sender(&self) -> &UserId {
        &self.0.json.sender
    }

    fn origin_server_ts(&self) -> MilliSecondsSinceUnixEpoch {
        self.0.json.origin_server_ts
    }

    fn event_type(&self) -> &TimelineEventType {
        &self.0.json.kind
    }

    fn content(&self) -> &RawValue {
        &self.0.json.content
    }

    fn state_key(&self) -> Option<&str> {
        self.0.json.state_key.as_deref()
    }

    fn prev_events(&self) -> Box<dyn DoubleEndedIterator<Item = &OwnedEventId> + '_> {
        Box::new(self.0.prev_events.iter())
    }

    fn auth_events(&self) -> Box<dyn DoubleEndedIterator<Item = &OwnedEventId> + '_> {
        Box::new(self.0.auth_events.iter())
    }

    fn redacts(&self) -> Option<&OwnedEventId> {
        self.0.json.redacts.as_ref()
    }

    fn rejected(&self) -> bool {
        self.0.rejected
    }
}
