//! How rows get into the sticky backlog: a server that joined a room, and an event that raced with a join.
//!
//! A row says: of our sticky events in this room, those at this position and above may be unsent to this destination.

use std::collections::HashMap;

use sqlx::SqliteConnection;

use super::{Sqlite, pool::rows};
use crate::core::{
    clock::Millis,
    id::{EventId, RoomId, ServerName, StickyPosition, StreamOrdering},
    store::{NewServer, StoreError},
};

impl Sqlite {
    pub(in crate::core::store) async fn record_new_servers(
        &self,
        new: &[NewServer],
        delta_cursor: StreamOrdering,
        now: Millis,
    ) -> Result<Vec<NewServer>, StoreError> {
        let senders = self.senders.lock().clone();
        let mut tx = self.write().await?;
        let recorded = self.owe_sticky_events(&mut tx, new, now).await?;
        // As in a checkpoint: not once a sender with another list has moved our cursors back.
        let done = sqlx::query(
            "INSERT INTO instances AS i (instance_name, delta_cursor, senders) VALUES ($1, $2, $3)
             ON CONFLICT (instance_name) DO UPDATE SET delta_cursor = EXCLUDED.delta_cursor
             WHERE $3 IS NULL OR i.senders IS $3",
        )
        .bind(self.me.as_str())
        .bind(delta_cursor.0)
        .bind(senders)
        .execute(&mut *tx)
        .await?;
        if done.rows_affected() == 0 {
            return Err(StoreError::TakenOver);
        }
        tx.commit().await?;
        Ok(recorded)
    }

    /// Records that all our living sticky events of these rooms are to be sent to these servers. Returns the rows that have
    /// something to send, sorted.
    pub(super) async fn owe_sticky_events(
        &self,
        connection: &mut SqliteConnection,
        new: &[NewServer],
        now: Millis,
    ) -> Result<Vec<NewServer>, StoreError> {
        let touched: Vec<(String, String)> = sqlx::query_as(
            "INSERT INTO destination_rooms_sticky_events_backlog AS old
                (destination, room_id, sticky_events_stream_position)
             SELECT n.value ->> 0, n.value ->> 1, min(s.stream_id)
             FROM json_each($1) n JOIN sticky_events s ON s.room_id = n.value ->> 1
             WHERE s.expires_at > $2 AND substr(s.sender, instr(s.sender, ':') + 1) = $3
               AND EXISTS (SELECT 1 FROM rooms WHERE rooms.room_id = n.value ->> 1)
             GROUP BY 1, 2
             ON CONFLICT (destination, room_id) DO UPDATE SET sticky_events_stream_position =
                min(old.sticky_events_stream_position, EXCLUDED.sticky_events_stream_position)
             RETURNING destination, room_id",
        )
        .bind(rows(new.iter().map(|row| (row.server.as_str(), row.room_id.as_str()))))
        .bind(now.0)
        .bind(self.server_name.as_str())
        .fetch_all(connection)
        .await?;
        let touched = touched.into_iter().map(|(server, room)| NewServer {
            server: server.into(),
            room_id: room.into(),
        });
        let mut recorded: Vec<NewServer> = touched.collect();
        recorded.sort();
        Ok(recorded)
    }

    pub(in crate::core::store) async fn record_missed(
        &self,
        missed: &[(ServerName, RoomId, StickyPosition)],
    ) -> Result<(), StoreError> {
        if missed.is_empty() {
            return Ok(());
        }
        let missed = missed
            .iter()
            .map(|(server, room, position)| (server.as_str(), room.as_str(), position.0));
        let mut tx = self.write().await?;
        sqlx::query(
            "INSERT INTO destination_rooms_sticky_events_backlog AS old
                (destination, room_id, sticky_events_stream_position)
             SELECT value ->> 0, value ->> 1, value ->> 2 FROM json_each($1)
             WHERE EXISTS (SELECT 1 FROM rooms WHERE rooms.room_id = value ->> 1)
             ON CONFLICT (destination, room_id) DO UPDATE SET sticky_events_stream_position =
                min(old.sticky_events_stream_position, EXCLUDED.sticky_events_stream_position)",
        )
        .bind(rows(missed))
        .execute(&mut *tx)
        .await?;
        Ok(tx.commit().await?)
    }

    pub(in crate::core::store) async fn sticky_positions(
        &self,
        event_ids: &[EventId],
    ) -> Result<HashMap<EventId, StickyPosition>, StoreError> {
        // By way of `events`, because `sticky_events` has no index on the event's id, but one on its ordering.
        let rows: Vec<(String, i64)> = sqlx::query_as(
            "SELECT s.event_id, s.stream_id
             FROM json_each($1) n JOIN events e ON e.event_id = n.value
             JOIN sticky_events s ON s.event_stream_ordering = e.stream_ordering
             WHERE substr(s.sender, instr(s.sender, ':') + 1) = $2",
        )
        .bind(rows(event_ids.iter().map(EventId::as_str)))
        .bind(self.server_name.as_str())
        .fetch_all(&self.readers)
        .await?;
        Ok(rows
            .into_iter()
            .map(|(event, position)| (event.into(), StickyPosition(position)))
            .collect())
    }
}
