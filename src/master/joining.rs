//! How do our users come into rooms? By an event of ours if we are in the room already; else through a server that is.

use std::sync::Arc;

use serde::Deserialize;
use tracing::{info, warn};

use super::{
    homeserver::Homeserver,
    local::Draft,
    persist::{Arrival, Source},
    refusal::Refusal,
    remote,
    wire::Parts,
};
use crate::core::{
    clock,
    event::{self, SignedEvent},
    id::{EventId, RoomId, ServerName},
    room_version::RoomVersion,
};

/// Versions of rooms that we can be in.
pub const ROOM_VERSIONS: [&str; 7] = ["6", "7", "8", "9", "10", "11", "12"];

/// Servers that a join is tried through.
const MAX_VIA: usize = 10;

/// What counts of the create event's content.
#[derive(Deserialize)]
struct Create {
    content: CreateContent,
}

#[derive(Deserialize)]
struct CreateContent {
    #[serde(default)]
    room_version: Option<String>,
}

impl Homeserver {
    /// Has a user of ours join a room, through one of the servers `via` if we are not in it.
    ///
    /// # Errors
    /// It is not allowed, or no server helped.
    pub(super) async fn join(
        self: &Arc<Self>,
        user: &str,
        room: &RoomId,
        via: &[ServerName],
    ) -> Result<EventId, Refusal> {
        let (homeserver, user, room, via) = (Arc::clone(self), user.to_owned(), room.clone(), via.to_vec());
        self.to_its_end(async move { homeserver.join_to_its_end(&user, &room, &via).await })
            .await?
    }

    async fn join_to_its_end(&self, user: &str, room: &RoomId, via: &[ServerName]) -> Result<EventId, Refusal> {
        // What comes for the room from now on waits until we know its state.
        let _joining = self.rooms.join(room).await;
        if let Some(version) = self.joined_room(room).await? {
            let lock = self.rooms.lock(room).await;
            return self
                .send_locked(&lock, version, &Draft::membership(user, user, "join"))
                .await;
        }
        let others = via.iter().filter(|server| **server != self.name).take(MAX_VIA);
        let mut last =
            Refusal::not_found("this server is not in that room, and no server was named to join it through");
        for server in others {
            match self.join_through(server, user, room).await {
                Ok(event_id) => return Ok(event_id),
                Err(refusal) => {
                    info!(%server, %room, why = refusal.text(), "a room could not be joined");
                    last = refusal;
                }
            }
        }
        Err(last)
    }

    async fn join_through(&self, server: &ServerName, user: &str, room: &RoomId) -> Result<EventId, Refusal> {
        let refused = |error: &dyn std::fmt::Display| Refusal::forbidden(format!("joining through {server}: {error}"));
        let template = remote::make_join(&self.client, server, room, user, &ROOM_VERSIONS).await;
        let template = template.map_err(|error| refused(&error))?;
        let version_id = template
            .room_version
            .filter(|version| ROOM_VERSIONS.contains(&version.as_str()));
        let version_id = version_id.ok_or_else(|| refused(&"the room is of a version that we do not know"))?;
        let version =
            RoomVersion::of(&version_id).ok_or_else(|| refused(&"the room is of a version that we do not know"))?;
        let SignedEvent { event_id, json } = self.own_join(template.event.get(), user, room, version)?;

        let joined = remote::send_join(&self.client, server, room, &event_id, json.clone()).await;
        let joined = joined.map_err(|error| refused(&error))?;
        // From here on the others think that we are in the room.
        let state = self.believe_all(&joined.state, version).await;
        let chain = self.believe_all(&joined.auth_chain, version).await;
        let create = state.iter().find_map(|event| {
            let parts = Parts::of_room(&event.json, room, version).ok()?;
            (parts.kind == "m.room.create" && parts.state_key.as_deref() == Some("")).then_some((parts, event))
        });
        let (create_parts, create) = create.ok_or_else(|| refused(&"the state it gave has no create event"))?;
        let content: Create = serde_json::from_str(&create.json).map_err(|error| refused(&error))?;
        if content.content.room_version.as_deref().unwrap_or("1") != version_id {
            return Err(refused(&"the create event it gave is of another room version"));
        }
        self.sqlite
            .replace_room(room, &version_id, &create_parts.sender)
            .await?;
        let ids: Vec<EventId> = state.iter().map(|event| event.event_id.clone()).collect();
        let lock = self.rooms.lock(room).await;
        self.persist_outliers(&lock, version, chain.into_iter().chain(state).collect())
            .await?;
        let before = self.store_state(&lock, version, &event_id, &ids).await?;
        let arrival = Arrival {
            event_id: event_id.clone(),
            json,
            // It is told to the others by whom we joined through.
            source: Source::Joined,
        };
        if let Err(error) = self.persist(&lock, version, &arrival, Some(before)).await {
            warn!(%room, %error, "a join that a server let in is not allowed by the state it gave");
            return Err(error.into());
        }
        Ok(event_id)
    }

    /// The join that a template is for, and no other event, as ours.
    fn own_join(
        &self,
        template: &str,
        user: &str,
        room: &RoomId,
        version: RoomVersion,
    ) -> Result<SignedEvent, Refusal> {
        let wrong = || Refusal::forbidden("what was to be signed is not the join that was asked for");
        let mut template: serde_json::Map<String, serde_json::Value> =
            serde_json::from_str(template).map_err(|_| wrong())?;
        template.insert("origin_server_ts".into(), clock::now().wall.0.into());
        template.retain(|key, _| !matches!(key.as_str(), "event_id" | "hashes" | "signatures" | "unsigned"));
        let signed = event::finish(
            &serde_json::Value::Object(template).to_string(),
            version,
            &self.name,
            &self.key,
        )?;
        let parts = Parts::of_room(&signed.json, room, version).map_err(|_| wrong())?;
        let is_it =
            parts.membership() == Some("join") && parts.sender == user && parts.state_key.as_deref() == Some(user);
        if is_it { Ok(signed) } else { Err(wrong()) }
    }
}
