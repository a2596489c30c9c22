//! Rooms: making them, and what their state is.

use std::sync::Arc;

use axum::extract::State;
use serde_json::{Value, json};

use super::authenticated::{JsonBody, User};
use crate::{
    core::{
        id::RoomId,
        state::map::{StateFilter, StateKey},
    },
    master::{
        body::{self, Object, Path},
        create::{DEFAULT_VERSION, NewRoom},
        homeserver::Homeserver,
        refusal::{Answer, Json, Refusal},
    },
};

pub(super) async fn create(State(homeserver): State<Arc<Homeserver>>, user: User, JsonBody(body): JsonBody) -> Answer {
    let visibility = if body::text(&body, "visibility")? == Some("public") {
        "public_chat"
    } else {
        "private_chat"
    };
    let join_rule = match body::text(&body, "preset")?.unwrap_or(visibility) {
        "public_chat" => "public",
        "private_chat" | "trusted_private_chat" => "invite",
        other => return Err(Refusal::malformed(format!("preset {other:?} is not known"))),
    };
    let mut state = Vec::new();
    for given in list(&body, "initial_state")? {
        let given = given
            .as_object()
            .ok_or_else(|| Refusal::malformed("`initial_state` holds what is no object"))?;
        let kind = body::text(given, "type")?.ok_or_else(|| Refusal::malformed("a state event lacks its type"))?;
        let content = given.get("content").cloned().unwrap_or_else(|| json!({}));
        state.push((
            kind.to_owned(),
            body::text(given, "state_key")?.unwrap_or_default().to_owned(),
            content,
        ));
    }
    for key in ["name", "topic"] {
        if let Some(text) = body::text(&body, key)? {
            state.push((format!("m.room.{key}"), String::new(), json!({ key: text })));
        }
    }
    let room = homeserver
        .create_room(NewRoom {
            creator: user.id,
            version: body::text(&body, "room_version")?.unwrap_or(DEFAULT_VERSION).to_owned(),
            join_rule,
            state,
            creation_content: object(&body, "creation_content")?,
            power_levels: object(&body, "power_level_content_override")?,
        })
        .await?;
    Ok(Json(json!({ "room_id": room.as_str() })))
}

fn list<'a>(body: &'a Object, key: &str) -> Result<&'a [Value], Refusal> {
    match body.get(key) {
        None | Some(Value::Null) => Ok(&[]),
        Some(Value::Array(list)) => Ok(list),
        Some(_) => Err(Refusal::malformed(format!("`{key}` is not an array"))),
    }
}

fn object(body: &Object, key: &str) -> Result<Object, Refusal> {
    match body.get(key) {
        None | Some(Value::Null) => Ok(Object::new()),
        Some(Value::Object(object)) => Ok(object.clone()),
        Some(_) => Err(Refusal::malformed(format!("`{key}` is not an object"))),
    }
}

impl Homeserver {
    /// Events of the room's current state, as clients see them, for a user who is joined to it.
    pub(super) async fn visible_state(
        &self,
        user: &User,
        room: &RoomId,
        filter: &StateFilter,
    ) -> Result<Vec<Object>, Refusal> {
        self.must_be_joined(&user.id, room).await?;
        let version = self.users_room(room).await?;
        let ids: Vec<_> = self.current(room, version, filter).await?.into_values().collect();
        let events = self.store.events_json(&ids).await?;
        events
            .iter()
            .map(|event| super::events::for_client(event.event_id.as_str(), &event.json))
            .collect()
    }

    /// # Errors
    /// 403 if the user is not joined to the room.
    pub(super) async fn must_be_joined(&self, user: &str, room: &RoomId) -> Result<(), Refusal> {
        let joined = match self.version(room).await? {
            Some(version) => {
                let member = StateFilter::Keys(vec![StateKey::member(user)]);
                let ids: Vec<_> = self.current(room, version, &member).await?.into_values().collect();
                let membership = self.store.memberships(&ids.iter().collect::<Vec<_>>()).await?;
                membership.iter().any(|(_, _, membership)| membership == "join")
            }
            None => false,
        };
        if joined {
            Ok(())
        } else {
            Err(Refusal::forbidden("you are not joined to that room"))
        }
    }
}

pub(super) async fn state(
    State(homeserver): State<Arc<Homeserver>>,
    Path(room): Path<String>,
    user: User,
) -> Result<Json<Vec<Object>>, Refusal> {
    Ok(Json(
        homeserver.visible_state(&user, &room.into(), &StateFilter::All).await?,
    ))
}

pub(super) async fn state_event_unkeyed(
    homeserver: State<Arc<Homeserver>>,
    Path((room, kind)): Path<(String, String)>,
    user: User,
) -> Answer {
    state_event(homeserver, Path((room, kind, String::new())), user).await
}

pub(super) async fn state_event(
    State(homeserver): State<Arc<Homeserver>>,
    Path((room, kind, state_key)): Path<(String, String, String)>,
    user: User,
) -> Answer {
    let filter = StateFilter::Keys(vec![StateKey::new(&kind, &state_key)]);
    let found = homeserver.visible_state(&user, &room.into(), &filter).await?;
    let event = found
        .into_iter()
        .next()
        .ok_or_else(|| Refusal::not_found("no such state event"))?;
    Ok(Json(event.get("content").cloned().unwrap_or_default()))
}

pub(super) async fn joined_members(
    State(homeserver): State<Arc<Homeserver>>,
    Path(room): Path<String>,
    user: User,
) -> Answer {
    let members = StateFilter::Types(vec!["m.room.member".into()]);
    let mut joined = Object::new();
    for event in homeserver.visible_state(&user, &room.into(), &members).await? {
        let content = event
            .get("content")
            .and_then(Value::as_object)
            .cloned()
            .unwrap_or_default();
        if content.get("membership").and_then(Value::as_str) == Some("join")
            && let Some(member) = body::text(&event, "state_key")?
        {
            let name = content.get("displayname").cloned().unwrap_or_default();
            joined.insert(member.to_owned(), json!({ "display_name": name }));
        }
    }
    Ok(Json(json!({ "joined": joined })))
}
