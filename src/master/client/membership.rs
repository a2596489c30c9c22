//! Coming and going.

use std::sync::Arc;

use axum::extract::State;
use serde_json::json;

use super::authenticated::{JsonBody, User};
use crate::{
    core::id::{RoomId, ServerName, domain_of},
    master::{
        body::{self, Object, Path, Query},
        homeserver::Homeserver,
        local::Draft,
        refusal::{Answer, Json, Refusal},
    },
};

pub(super) async fn join(
    State(homeserver): State<Arc<Homeserver>>,
    Path(room): Path<String>,
    Query(query): Query<Vec<(String, String)>>,
    user: User,
) -> Answer {
    if !room.starts_with('!') {
        return Err(Refusal::not_found("rooms have no aliases here: name the room id"));
    }
    let room = RoomId::from(room);
    let named = query.iter().filter(|(key, _)| key == "via" || key == "server_name");
    let via: Vec<ServerName> = named.map(|(_, server)| ServerName::from(server.as_str())).collect();
    homeserver.join(&user.id, &room, &via).await?;
    Ok(Json(json!({ "room_id": room.as_str() })))
}

pub(super) async fn leave(State(homeserver): State<Arc<Homeserver>>, Path(room): Path<String>, user: User) -> Answer {
    change(&homeserver, &user, room, user.id.clone(), "leave").await
}

pub(super) async fn invite(
    State(homeserver): State<Arc<Homeserver>>,
    Path(room): Path<String>,
    user: User,
    JsonBody(body): JsonBody,
) -> Answer {
    let whom = whom(&body)?;
    // The other server would have to sign it; who is not invited can join a public room all the same.
    if domain_of(&whom) != Some(homeserver.name.as_str()) {
        return Err(Refusal::forbidden(
            "users of other servers cannot be invited from here: have them join a public room",
        ));
    }
    change(&homeserver, &user, room, whom, "invite").await
}

pub(super) async fn kick(
    State(homeserver): State<Arc<Homeserver>>,
    Path(room): Path<String>,
    user: User,
    JsonBody(body): JsonBody,
) -> Answer {
    change(&homeserver, &user, room, whom(&body)?, "leave").await
}

pub(super) async fn ban(
    State(homeserver): State<Arc<Homeserver>>,
    Path(room): Path<String>,
    user: User,
    JsonBody(body): JsonBody,
) -> Answer {
    change(&homeserver, &user, room, whom(&body)?, "ban").await
}

fn whom(body: &Object) -> Result<String, Refusal> {
    let user = body::text(body, "user_id")?;
    user.map(str::to_owned)
        .ok_or_else(|| Refusal::malformed("`user_id` is missing"))
}

async fn change(homeserver: &Arc<Homeserver>, by: &User, room: String, whom: String, membership: &str) -> Answer {
    let room = RoomId::from(room);
    let version = homeserver.users_room(&room).await?;
    homeserver
        .send(&room, version, Draft::membership(&by.id, &whom, membership))
        .await?;
    Ok(Json(json!({})))
}
