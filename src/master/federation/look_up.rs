//! Other servers look up events and state of rooms they are in.

use std::sync::Arc;

use axum::extract::State;
use serde::{Deserialize, Serialize};
use serde_json::{json, value::RawValue};

use super::authenticated::FromServer;
use crate::{
    core::{
        clock,
        id::{EventId, RoomId, ServerName},
        room_version::RoomVersion,
        state::map::StateMap,
    },
    master::{
        body::{Path, Query},
        homeserver::Homeserver,
        refusal::{Answer, Json, Refusal},
        wire::{self, Parts},
    },
};

/// Events given in one answer to a server that misses some, and ids in its question.
const MAX_MISSING: i64 = 100;
const MAX_ASKED: usize = 100;

#[derive(Deserialize)]
pub(super) struct At {
    event_id: String,
}

#[derive(Deserialize)]
struct Gap {
    earliest_events: Vec<String>,
    latest_events: Vec<String>,
    #[serde(default)]
    limit: Option<i64>,
    #[serde(default)]
    min_depth: i64,
}

#[derive(Serialize)]
pub(super) struct Found {
    origin: String,
    origin_server_ts: i64,
    pdus: Vec<Box<RawValue>>,
}

#[derive(Serialize)]
pub(super) struct Missing {
    events: Vec<Box<RawValue>>,
}

#[derive(Serialize)]
pub(super) struct WholeState {
    pdus: Vec<Box<RawValue>>,
    auth_chain: Vec<Box<RawValue>>,
}

pub(super) async fn event(
    State(homeserver): State<Arc<Homeserver>>,
    Path(event_id): Path<String>,
    from: FromServer,
) -> Result<Json<Found>, Refusal> {
    let nothing = || Refusal::not_found("there is no such event here that you may see");
    let found = homeserver.event(&event_id.into()).await?.ok_or_else(nothing)?;
    let room = Parts::read(&found.json)
        .map_err(Refusal::failed)?
        .room_id()
        .ok_or_else(nothing)?;
    if !homeserver.store.server_in_room(&from.origin, &room).await? {
        return Err(nothing());
    }
    Ok(Json(Found {
        origin: homeserver.name.as_str().to_owned(),
        origin_server_ts: clock::now().wall.0,
        pdus: vec![wire::raw(found.json).map_err(Refusal::failed)?],
    }))
}

pub(super) async fn state_ids(
    State(homeserver): State<Arc<Homeserver>>,
    Path(room): Path<String>,
    Query(At { event_id }): Query<At>,
    from: FromServer,
) -> Answer {
    let state = state_before(&homeserver, &from.origin, room.into(), event_id.into()).await?;
    let ids: Vec<EventId> = state.into_values().collect();
    let chain = homeserver.auth_chain(&ids).await?;
    let texts = |ids: &[EventId]| ids.iter().map(|id| id.as_str().to_owned()).collect::<Vec<_>>();
    Ok(Json(json!({ "pdu_ids": texts(&ids), "auth_chain_ids": texts(&chain) })))
}

pub(super) async fn state(
    State(homeserver): State<Arc<Homeserver>>,
    Path(room): Path<String>,
    Query(At { event_id }): Query<At>,
    from: FromServer,
) -> Result<Json<WholeState>, Refusal> {
    let state = state_before(&homeserver, &from.origin, room.into(), event_id.into()).await?;
    let (pdus, auth_chain) = homeserver.state_and_chain(state).await?;
    Ok(Json(WholeState { pdus, auth_chain }))
}

/// The state before an event, for a server that is in the room.
async fn state_before(
    homeserver: &Homeserver,
    origin: &ServerName,
    room: RoomId,
    event_id: EventId,
) -> Result<StateMap, Refusal> {
    let version = allowed(homeserver, origin, &room).await?;
    let nothing = || Refusal::not_found("there is no such event in that room");
    let found = homeserver.event(&event_id).await?.ok_or_else(nothing)?;
    let parts = Parts::read(&found.json).map_err(Refusal::failed)?;
    if parts.room_id() != Some(room) {
        return Err(nothing());
    }
    homeserver.state_before_event(&parts, version).await
}

/// A server may look into a room that we are in, and that it is in, too.
async fn allowed(homeserver: &Homeserver, origin: &ServerName, room: &RoomId) -> Result<RoomVersion, Refusal> {
    let version = homeserver.our_room(room).await?;
    if homeserver.store.server_in_room(origin, room).await? {
        Ok(version)
    } else {
        Err(Refusal::forbidden("your server is not in that room"))
    }
}

pub(super) async fn missing_events(
    State(homeserver): State<Arc<Homeserver>>,
    Path(room): Path<String>,
    from: FromServer,
) -> Result<Json<Missing>, Refusal> {
    let room = RoomId::from(room);
    let gap: Gap = serde_json::from_str(&from.content).map_err(|error| Refusal::malformed(error.to_string()))?;
    if gap.earliest_events.len() > MAX_ASKED || gap.latest_events.len() > MAX_ASKED {
        return Err(Refusal::malformed(format!("more than {MAX_ASKED} event ids")));
    }
    allowed(&homeserver, &from.origin, &room).await?;
    let ids = |ids: Vec<String>| ids.into_iter().map(EventId::from).collect::<Vec<_>>();
    let (earliest, latest) = (ids(gap.earliest_events), ids(gap.latest_events));
    let limit = gap.limit.unwrap_or(10).clamp(0, MAX_MISSING);
    let found = homeserver
        .sqlite
        .events_between(&room, &earliest, &latest, gap.min_depth, limit)
        .await?;
    let mut events = homeserver.store.events_json(&found).await?;
    events.sort_by_key(|event| found.iter().position(|id| *id == event.event_id));
    let events: Result<_, _> = events.into_iter().map(|event| wire::raw(event.json)).collect();
    Ok(Json(Missing {
        events: events.map_err(Refusal::failed)?,
    }))
}
