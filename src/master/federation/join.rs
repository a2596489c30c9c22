//! Other servers' users join our rooms through us.

use std::sync::Arc;

use axum::{
    extract::State,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use serde::Serialize;
use serde_json::{json, value::RawValue};

use super::authenticated::FromServer;
use crate::{
    core::{
        event::{self, ReceivedEvent},
        id::{EventId, RoomId, domain_of},
        state::map::{StateFilter, StateKey},
    },
    master::{
        body::{Path, Query},
        homeserver::Homeserver,
        local::Draft,
        persist::{Arrival, Source, Verdict},
        refusal::{Json, Refusal, answer},
        wire::{self, Parts},
    },
};

/// What is to be signed by the joiner.
#[derive(Serialize)]
struct Template {
    room_version: String,
    event: Box<RawValue>,
}

/// What the joiner is told of the room.
#[derive(Serialize)]
pub(super) struct Joined {
    origin: String,
    event: Box<RawValue>,
    state: Vec<Box<RawValue>>,
    auth_chain: Vec<Box<RawValue>>,
    members_omitted: bool,
    servers_in_room: Vec<String>,
}

pub(super) async fn make_join(
    State(homeserver): State<Arc<Homeserver>>,
    Path((room, user)): Path<(String, String)>,
    Query(query): Query<Vec<(String, String)>>,
    from: FromServer,
) -> Result<Response, Refusal> {
    let room = RoomId::from(room);
    if domain_of(&user) != Some(from.origin.as_str()) {
        return Err(Refusal::forbidden("the user is not one of your server's"));
    }
    let version = homeserver.our_room(&room).await?;
    let version_id = homeserver.sqlite.room_version(&room).await?.unwrap_or_default();
    // Who names none means version 1.
    if !query
        .iter()
        .any(|(key, offered)| key == "ver" && *offered == version_id)
    {
        let body = json!({
            "errcode": "M_INCOMPATIBLE_ROOM_VERSION",
            "error": format!("the room has version {version_id}, which your server did not offer"),
            "room_version": version_id,
        });
        return Ok(answer(StatusCode::BAD_REQUEST, &body));
    }
    let template = homeserver
        .template(&room, version, &Draft::membership(&user, &user, "join"))
        .await?;
    // As if it were signed, to see whether it would be let in.
    let signed = event::finish(&template, version, &homeserver.name, &homeserver.key)?;
    homeserver.check_new(&room, version, &signed).await?;
    let event = wire::raw(template).map_err(Refusal::failed)?;
    let room_version = version_id;
    Ok(Json(Template { room_version, event }).into_response())
}

pub(super) async fn send_join(
    State(homeserver): State<Arc<Homeserver>>,
    Path((room, event_id)): Path<(String, String)>,
    from: FromServer,
) -> Result<Json<Joined>, Refusal> {
    let (room, event_id) = (RoomId::from(room), EventId::from(event_id));
    let version = homeserver.our_room(&room).await?;
    let malformed = |what: &str| Refusal::malformed(format!("the join: {what}"));
    let received = ReceivedEvent::read(&from.content, version).map_err(|error| malformed(&error.to_string()))?;
    if *received.event_id() != event_id {
        return Err(malformed("its id is another than the path says"));
    }
    let parts = Parts::read(&from.content).map_err(|error| malformed(&error.to_string()))?;
    if parts.membership() != Some("join") || parts.state_key.as_deref() != Some(&parts.sender) {
        return Err(malformed("it is not one"));
    }
    if domain_of(&parts.sender) != Some(from.origin.as_str()) {
        return Err(Refusal::forbidden("the user is not one of your server's"));
    }
    let verified = homeserver.verify(received, parts.origin_server_ts).await;
    let verified = verified.map_err(|error| Refusal::forbidden(error.to_string()))?;
    let arrival = Arrival {
        event_id: verified.event_id,
        json: verified.json,
        source: Source::OnBehalfOf(from.origin),
    };
    let joining = {
        let (homeserver, room) = (Arc::clone(&homeserver), room.clone());
        async move {
            let lock = homeserver.rooms.lock(&room).await;
            // Those who were in the room before; afterwards it could have changed.
            let state = homeserver.state_before_event(&parts, version).await?;
            let stands = match homeserver.persist(&lock, version, &arrival, None).await? {
                Verdict::New => true,
                Verdict::Known => {
                    let key = StateKey::new("m.room.member", &parts.sender);
                    let now = homeserver
                        .current(&room, version, &StateFilter::Keys(vec![key]))
                        .await?;
                    now.values().any(|id| *id == arrival.event_id)
                }
                Verdict::SoftFailed(_) | Verdict::Rejected(_) => false,
            };
            if !stands {
                return Err(Refusal::forbidden("that join was not let in, or is over"));
            }
            Ok::<_, Refusal>((state, arrival.json))
        }
    };
    let (state, json) = homeserver.to_its_end(joining).await??;
    let servers = homeserver.store.joined_hosts_now(&room).await?;
    let (state, auth_chain) = homeserver.state_and_chain(state).await?;
    Ok(Json(Joined {
        origin: homeserver.name.as_str().to_owned(),
        event: wire::raw(json).map_err(Refusal::failed)?,
        state,
        auth_chain,
        members_omitted: false,
        servers_in_room: servers.iter().map(|server| server.as_str().to_owned()).collect(),
    }))
}
