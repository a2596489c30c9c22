//! How do our own users' events come to be? Made to follow the room's newest events, signed, and persisted.

use std::sync::Arc;

use serde_json::{Value, json};

use super::{
    homeserver::Homeserver,
    persist::{Arrival, PersistError, Source},
    refusal::Refusal,
    rooms::RoomLock,
};
use crate::core::{
    clock,
    event::{self, EventError, NewEvent, SignedEvent},
    id::{EventId, RoomId},
    room_version::RoomVersion,
    rules::RoomEvent,
    state::context,
};

/// Beyond this no receiver accepts a depth; a room that has come there goes on at it.
const MAX_DEPTH: i64 = 9_007_199_254_740_991;

/// An event that one of our users wants to send.
#[derive(Debug, Clone)]
pub struct Draft {
    /// The user.
    pub sender: String,
    /// `type`
    pub kind: String,
    /// Its state key, for a state event.
    pub state_key: Option<String>,
    /// Its content: a JSON object.
    pub content: String,
    /// How long it is to be sticky, ms.
    pub sticky: Option<i64>,
    /// What the client calls it, among all its requests.
    pub txn_id: Option<String>,
}

impl Draft {
    /// A state event.
    pub fn state(sender: &str, kind: &str, state_key: &str, content: &Value) -> Self {
        Self {
            sender: sender.to_owned(),
            kind: kind.to_owned(),
            state_key: Some(state_key.to_owned()),
            content: content.to_string(),
            sticky: None,
            txn_id: None,
        }
    }

    /// A change of a user's membership.
    pub fn membership(sender: &str, user: &str, membership: &str) -> Self {
        let content = json!({ "membership": membership });
        Self::state(sender, "m.room.member", user, &content)
    }

    /// The event's members beside those that every event has.
    fn more(&self, version: RoomVersion) -> Vec<(&'static str, String)> {
        let mut more = Vec::new();
        if let Some(duration) = self.sticky {
            more.push(("msc4354_sticky", json!({ "duration_ms": duration }).to_string()));
        }
        // From version 11 on what is redacted stands in the content alone.
        if self.kind == "m.room.redaction" && !version.has_updated_redaction_rules() {
            let content: Value = serde_json::from_str(&self.content).unwrap_or_default();
            more.extend(content.get("redacts").map(|redacts| ("redacts", redacts.to_string())));
        }
        more
    }
}

impl Homeserver {
    /// Makes the event and persists it, to its end. Of what a client repeats the event that it made the first time is given.
    ///
    /// # Errors
    /// It is not allowed, or not an event.
    pub(super) async fn send(
        self: &Arc<Self>,
        room: &RoomId,
        version: RoomVersion,
        draft: Draft,
    ) -> Result<EventId, Refusal> {
        let (homeserver, room) = (Arc::clone(self), room.clone());
        let sending = async move {
            let lock = homeserver.rooms.lock(&room).await;
            homeserver.send_locked(&lock, version, &draft).await
        };
        self.to_its_end(sending).await?
    }

    /// The same, by whoever has the room already.
    pub(super) async fn send_locked(
        &self,
        lock: &RoomLock,
        version: RoomVersion,
        draft: &Draft,
    ) -> Result<EventId, Refusal> {
        if let Some(txn_id) = &draft.txn_id
            && let Some(known) = self.sqlite.event_of_transaction(txn_id).await?
        {
            return Ok(known);
        }
        let json = self.template(lock.room(), version, draft).await?;
        let SignedEvent { event_id, json } = event::finish(&json, version, &self.name, &self.key)?;
        let arrival = Arrival {
            event_id: event_id.clone(),
            json,
            source: Source::Ours(draft.txn_id.clone()),
        };
        self.persist(lock, version, &arrival, None).await?;
        Ok(event_id)
    }

    /// The event without hash and signature, as it would be now.
    pub(super) async fn template(&self, room: &RoomId, version: RoomVersion, draft: &Draft) -> Result<String, Refusal> {
        let (prev_events, depth) = self.extremities(room).await?;
        let state = context::state_before(&self.stored(), version, &prev_events).await?;
        let more = draft.more(version);
        let more: Vec<(&str, &str)> = more.iter().map(|(key, json)| (*key, json.as_str())).collect();
        let mut event = NewEvent {
            room_id: Some(room),
            kind: &draft.kind,
            state_key: draft.state_key.as_deref(),
            sender: &draft.sender,
            content: &draft.content,
            origin_server_ts: clock::now().wall,
            depth: depth.saturating_add(1).min(MAX_DEPTH),
            prev_events: &prev_events,
            auth_events: &[],
            more: &more,
        };
        let auth_events = state.auth_events(&self.stored(), version, &event).await?;
        event.auth_events = &auth_events;
        Ok(event.json())
    }

    /// Whether the event would be let in now.
    ///
    /// # Errors
    /// 403 if not.
    pub(super) async fn check_new(
        &self,
        room: &RoomId,
        version: RoomVersion,
        event: &SignedEvent,
    ) -> Result<(), Refusal> {
        let event = RoomEvent::read(&event.event_id, &event.json, false).map_err(PersistError::from)?;
        let now = self.state_now(room, version).await?;
        Ok(now.check_arrival(&self.stored(), version, &event).await?)
    }
}

impl From<EventError> for Refusal {
    fn from(error: EventError) -> Self {
        Self::malformed(error.to_string())
    }
}
