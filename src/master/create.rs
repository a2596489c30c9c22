//! How does a room begin? One event after the other, each by the rules that those before it set.

use std::sync::Arc;

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use serde_json::{Value, json};

use super::{homeserver::Homeserver, local::Draft, refusal::Refusal};
use crate::core::{id::RoomId, room_version::RoomVersion};

/// Versions of rooms that are made here.
pub const CREATED_VERSIONS: [&str; 2] = ["10", "11"];
/// The one that is made if none is asked for.
pub const DEFAULT_VERSION: &str = "11";

/// What a new room is to be.
#[derive(Debug, Clone)]
pub struct NewRoom {
    /// Who makes it.
    pub creator: String,
    /// One of [`CREATED_VERSIONS`].
    pub version: String,
    /// Who may join.
    pub join_rule: &'static str,
    /// Further state, in this order: type, state key, content.
    pub state: Vec<(String, String, Value)>,
    /// Further content of the create event.
    pub creation_content: super::body::Object,
    /// What of the power levels is not as it is by default.
    pub power_levels: super::body::Object,
}

impl Homeserver {
    /// Makes a room, to its end.
    ///
    /// # Errors
    /// A part of it is not allowed. What came before it is there.
    pub(super) async fn create_room(self: &Arc<Self>, new: NewRoom) -> Result<RoomId, Refusal> {
        let homeserver = Arc::clone(self);
        self.to_its_end(async move { homeserver.create_to_its_end(new).await })
            .await?
    }

    async fn create_to_its_end(&self, new: NewRoom) -> Result<RoomId, Refusal> {
        let version = RoomVersion::of(&new.version).filter(|_| CREATED_VERSIONS.contains(&new.version.as_str()));
        let version = version.ok_or_else(|| {
            let text = format!(
                "rooms of version {:?} are not made here, but of {}",
                new.version,
                CREATED_VERSIONS.join(", ")
            );
            Refusal::new(axum::http::StatusCode::BAD_REQUEST, "M_UNSUPPORTED_ROOM_VERSION", text)
        })?;
        let mut random = [0; 15];
        getrandom::fill(&mut random).map_err(Refusal::failed)?;
        let room = RoomId::from(format!("!{}:{}", URL_SAFE_NO_PAD.encode(random), self.name));
        let creator = new.creator.as_str();

        let mut create = new.creation_content;
        create.insert("room_version".into(), new.version.as_str().into());
        if !version.has_updated_redaction_rules() {
            create.insert("creator".into(), creator.into());
        }
        let mut power_levels = default_power_levels(creator);
        power_levels.extend(new.power_levels);
        let state = |kind: &str, content: Value| Draft::state(creator, kind, "", &content);
        let mut drafts = vec![
            state("m.room.create", Value::Object(create)),
            Draft::membership(creator, creator, "join"),
            state("m.room.power_levels", Value::Object(power_levels)),
        ];
        let mut defaults = vec![
            ("m.room.join_rules", json!({ "join_rule": new.join_rule })),
            ("m.room.history_visibility", json!({ "history_visibility": "shared" })),
        ];
        defaults.retain(|(kind, _)| !new.state.iter().any(|(given, key, _)| given == kind && key.is_empty()));
        drafts.extend(defaults.into_iter().map(|(kind, content)| state(kind, content)));
        drafts.extend(
            new.state
                .iter()
                .map(|(kind, key, content)| Draft::state(creator, kind, key, content)),
        );

        self.sqlite.create_room(&room, &new.version, creator).await?;
        let lock = self.rooms.lock(&room).await;
        for draft in &drafts {
            self.send_locked(&lock, version, draft).await?;
        }
        Ok(room)
    }
}

fn default_power_levels(creator: &str) -> super::body::Object {
    let levels = json!({
        "users": { creator: 100 },
        "users_default": 0,
        "events": {
            "m.room.name": 50,
            "m.room.power_levels": 100,
            "m.room.history_visibility": 100,
            "m.room.tombstone": 100,
            "m.room.server_acl": 100,
        },
        "events_default": 0,
        "state_default": 50,
        "ban": 50,
        "kick": 50,
        "redact": 50,
        "invite": 0,
    });
    match levels {
        Value::Object(levels) => levels,
        _ => super::body::Object::new(),
    }
}
