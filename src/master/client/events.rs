//! Sending events, and reading them.

use std::sync::Arc;

use axum::extract::State;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::authenticated::{JsonBody, User};
use crate::{
    core::{
        clock::{self, Millis},
        id::{EventId, MAX_ID_BYTES, RoomId},
    },
    master::{
        MAX_HELD,
        body::{Object, Path, Query},
        homeserver::Homeserver,
        local::Draft,
        refusal::{Answer, Json, Refusal},
        wire::MAX_STICKY,
    },
};

/// Messages in one answer.
const MAX_MESSAGES: i64 = 1_000;

#[derive(Deserialize)]
pub(super) struct Sticky {
    #[serde(rename = "org.matrix.msc4354.sticky_duration_ms")]
    duration: Option<i64>,
}

impl Sticky {
    /// As the MSC bounds it.
    fn duration(&self) -> Result<Option<i64>, Refusal> {
        match self.duration {
            Some(duration) if !(0..=MAX_STICKY).contains(&duration) => {
                let text = format!("the sticky duration is not from 0 to {MAX_STICKY} ms");
                Err(Refusal::new(
                    axum::http::StatusCode::BAD_REQUEST,
                    "M_INVALID_PARAM",
                    text,
                ))
            }
            duration => Ok(duration),
        }
    }
}

pub(super) async fn send(
    State(homeserver): State<Arc<Homeserver>>,
    Path((room, kind, txn_id)): Path<(String, String, String)>,
    Query(sticky): Query<Sticky>,
    user: User,
    JsonBody(content): JsonBody,
) -> Answer {
    let sticky = sticky.duration()?;
    send_once(&homeserver, &user, room, &kind, &txn_id, &content, sticky).await
}

pub(super) async fn redact(
    State(homeserver): State<Arc<Homeserver>>,
    Path((room, event_id, txn_id)): Path<(String, String, String)>,
    user: User,
    JsonBody(mut content): JsonBody,
) -> Answer {
    content.insert("redacts".into(), event_id.into());
    send_once(&homeserver, &user, room, "m.room.redaction", &txn_id, &content, None).await
}

async fn send_once(
    homeserver: &Arc<Homeserver>,
    user: &User,
    room: String,
    kind: &str,
    txn_id: &str,
    content: &Object,
    sticky: Option<i64>,
) -> Answer {
    if txn_id.len() > MAX_ID_BYTES {
        return Err(Refusal::malformed("the transaction id is too long"));
    }
    let version = homeserver.users_room(&room.as_str().into()).await?;
    let draft = Draft {
        sender: user.id.clone(),
        kind: kind.to_owned(),
        state_key: None,
        content: json!(content).to_string(),
        sticky,
        // As in Synapse it stands for one request of one device.
        txn_id: Some(json!([user.id, user.device, room, kind, txn_id]).to_string()),
    };
    let event_id = homeserver.send(&room.into(), version, draft).await?;
    Ok(Json(json!({ "event_id": event_id.as_str() })))
}

pub(super) async fn set_state_unkeyed(
    homeserver: State<Arc<Homeserver>>,
    Path((room, kind)): Path<(String, String)>,
    user: User,
    content: JsonBody,
) -> Answer {
    set_state(homeserver, Path((room, kind, String::new())), user, content).await
}

pub(super) async fn set_state(
    State(homeserver): State<Arc<Homeserver>>,
    Path((room, kind, state_key)): Path<(String, String, String)>,
    user: User,
    JsonBody(content): JsonBody,
) -> Answer {
    let room = RoomId::from(room);
    let version = homeserver.users_room(&room).await?;
    let draft = Draft::state(&user.id, &kind, &state_key, &Value::Object(content));
    let event_id = homeserver.send(&room, version, draft).await?;
    Ok(Json(json!({ "event_id": event_id.as_str() })))
}

/// An event as clients see it.
pub(super) fn for_client(event_id: &str, json: &str) -> Result<Object, Refusal> {
    let mut event: Object = serde_json::from_str(json).map_err(Refusal::failed)?;
    event.retain(|key, _| {
        !matches!(
            key.as_str(),
            "auth_events" | "prev_events" | "hashes" | "signatures" | "depth"
        )
    });
    event.insert("event_id".into(), event_id.into());
    Ok(event)
}

pub(super) async fn event(
    State(homeserver): State<Arc<Homeserver>>,
    Path((room, event_id)): Path<(String, String)>,
    user: User,
) -> Result<Json<Object>, Refusal> {
    let room = RoomId::from(room);
    homeserver.must_be_joined(&user.id, &room).await?;
    let nothing = || Refusal::not_found("there is no such event in that room");
    let found = homeserver.event(&EventId::from(event_id)).await?.ok_or_else(nothing)?;
    let event = for_client(found.event_id.as_str(), &found.json)?;
    let of_room = event.get("room_id").and_then(Value::as_str) == Some(room.as_str());
    if of_room { Ok(Json(event)) } else { Err(nothing()) }
}

#[derive(Deserialize)]
pub(super) struct Limit {
    limit: Option<i64>,
}

/// The newest messages, in whichever direction they are asked for: there is no paging.
pub(super) async fn messages(
    State(homeserver): State<Arc<Homeserver>>,
    Path(room): Path<String>,
    Query(Limit { limit }): Query<Limit>,
    user: User,
) -> Answer {
    let room = RoomId::from(room);
    homeserver.must_be_joined(&user.id, &room).await?;
    let held = homeserver
        .sqlite
        .held(&room, limit.unwrap_or(10).clamp(0, MAX_MESSAGES))
        .await?;
    let shown = held.iter().rev().filter(|event| !event.soft_failed);
    let chunk: Result<Vec<Object>, _> = shown
        .map(|event| for_client(event.event_id.as_str(), &event.json))
        .collect();
    Ok(Json(json!({ "chunk": chunk?, "start": "newest" })))
}

/// What the room's history really is here.
#[derive(Serialize)]
pub(super) struct Held {
    now: i64,
    events: Vec<HeldEvent>,
}

#[derive(Serialize)]
struct HeldEvent {
    event_id: String,
    r#type: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    state_key: Option<String>,
    sender: String,
    received_ts: i64,
    /// It is sticky now.
    sticky: bool,
    sticky_until_ts: Option<i64>,
    soft_failed: bool,
}

pub(super) async fn held(
    State(homeserver): State<Arc<Homeserver>>,
    Path(room): Path<String>,
    Query(Limit { limit }): Query<Limit>,
    user: User,
) -> Result<Json<Held>, Refusal> {
    let room = RoomId::from(room);
    homeserver.must_be_joined(&user.id, &room).await?;
    let held = homeserver
        .sqlite
        .held(&room, limit.unwrap_or(MAX_HELD).clamp(0, MAX_HELD))
        .await?;
    let Millis(now) = clock::now().wall;
    let events = held.into_iter().map(|event| HeldEvent {
        event_id: event.event_id.as_str().to_owned(),
        r#type: event.kind,
        state_key: event.state_key,
        sender: event.sender,
        received_ts: event.received.0,
        sticky: event.sticky_until.is_some_and(|until| until.0 > now),
        sticky_until_ts: event.sticky_until.map(|until| until.0),
        soft_failed: event.soft_failed,
    });
    Ok(Json(Held {
        now,
        events: events.collect(),
    }))
}
