//! A room's current state: how a change replaces it, and which servers the change brought in.

use std::collections::{BTreeMap, BTreeSet};

use sqlx::SqliteConnection;

use super::Sqlite;
use crate::core::{
    id::{EventId, RoomId, ServerName, StreamOrdering, domain_of},
    state::servers::ServerChange,
    store::{NewServer, StateChange, StoreError},
};

/// Replaces what `changes` say, with their rows in `current_state_delta_stream` at `place`. Returns the servers that this
/// brought into the room.
pub(super) async fn replace(
    connection: &mut SqliteConnection,
    store: &Sqlite,
    room: &RoomId,
    changes: &[&StateChange],
    place: Option<StreamOrdering>,
) -> Result<Vec<NewServer>, StoreError> {
    let before = joined(connection, room, changes).await?;
    let mut any = false;
    for change in changes {
        let old: Option<String> = sqlx::query_scalar(
            "SELECT event_id FROM current_state_events WHERE room_id = $1 AND type = $2 AND state_key = $3",
        )
        .bind(room.as_str())
        .bind(&change.kind)
        .bind(&change.state_key)
        .fetch_optional(&mut *connection)
        .await?;
        if old.as_deref() == change.event_id.as_ref().map(EventId::as_str) {
            continue;
        }
        let Some(place) = place else {
            return Err(StoreError::Refused(format!(
                "the state of {room} changes, and no event is new that changed it"
            )));
        };
        any = true;
        write(connection, change, old.as_deref(), place, store.me.as_str()).await?;
    }
    if !any {
        return Ok(Vec::new());
    }
    let after = joined(connection, room, changes).await?;
    let brought = ServerChange::between(&before, &after, &store.server_name);
    let new = brought.added.into_iter().map(|server| NewServer {
        server,
        room_id: room.clone(),
    });
    Ok(new.collect())
}

/// Those of the servers whose users' memberships change that have a joined user.
async fn joined(
    connection: &mut SqliteConnection,
    room: &RoomId,
    changes: &[&StateChange],
) -> Result<BTreeSet<ServerName>, StoreError> {
    let members = changes.iter().filter(|change| change.kind == "m.room.member");
    let servers: BTreeSet<&str> = members.filter_map(|change| domain_of(&change.state_key)).collect();
    let found: Vec<String> = sqlx::query_scalar(
        "SELECT DISTINCT substr(state_key, instr(state_key, ':') + 1) AS server FROM current_state_events
         WHERE room_id = $1 AND type = 'm.room.member' AND membership = 'join'
           AND server IN (SELECT value FROM json_each($2))",
    )
    .bind(room.as_str())
    .bind(super::pool::rows(servers))
    .fetch_all(connection)
    .await?;
    Ok(found.into_iter().map(ServerName::from).collect())
}

async fn write(
    connection: &mut SqliteConnection,
    change: &StateChange,
    old: Option<&str>,
    place: StreamOrdering,
    writer: &str,
) -> Result<(), StoreError> {
    let new = change.event_id.as_ref().map(EventId::as_str);
    sqlx::query(
        "INSERT INTO current_state_delta_stream
            (stream_id, room_id, type, state_key, event_id, prev_event_id, instance_name)
         VALUES ($1, $2, $3, $4, $5, $6, $7)",
    )
    .bind(place.0)
    .bind(change.room_id.as_str())
    .bind(&change.kind)
    .bind(&change.state_key)
    .bind(new)
    .bind(old)
    .bind(writer)
    .execute(&mut *connection)
    .await?;
    let Some(new) = new else {
        sqlx::query("DELETE FROM current_state_events WHERE room_id = $1 AND type = $2 AND state_key = $3")
            .bind(change.room_id.as_str())
            .bind(&change.kind)
            .bind(&change.state_key)
            .execute(connection)
            .await?;
        return Ok(());
    };
    sqlx::query(
        "INSERT INTO current_state_events (event_id, room_id, type, state_key, membership, event_stream_ordering)
         VALUES ($1, $2, $3, $4,
                 (SELECT membership FROM room_memberships WHERE event_id = $1),
                 (SELECT stream_ordering FROM events WHERE event_id = $1))
         ON CONFLICT (room_id, type, state_key) DO UPDATE
         SET event_id = EXCLUDED.event_id, membership = EXCLUDED.membership,
             event_stream_ordering = EXCLUDED.event_stream_ordering",
    )
    .bind(new)
    .bind(change.room_id.as_str())
    .bind(&change.kind)
    .bind(&change.state_key)
    .execute(connection)
    .await?;
    Ok(())
}

impl Sqlite {
    /// The room's current state: (type, state key) -> event.
    ///
    /// # Errors
    /// Those of the database.
    pub async fn current_state(&self, room: &RoomId) -> Result<BTreeMap<(String, String), EventId>, StoreError> {
        let found: Vec<(String, String, String)> =
            sqlx::query_as("SELECT type, state_key, event_id FROM current_state_events WHERE room_id = $1")
                .bind(room.as_str())
                .fetch_all(&self.readers)
                .await?;
        Ok(found
            .into_iter()
            .map(|(kind, state_key, event)| ((kind, state_key), event.into()))
            .collect())
    }
}
