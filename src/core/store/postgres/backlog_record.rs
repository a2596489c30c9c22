//! How rows get into the sticky backlog: a server that joined a room, and an event that raced with a join.
//!
//! A row says: of our sticky events in this room, those at this position and above may be unsent to this destination.
//! Rows are only ever lowered here, and are written even if nothing changes: whoever is about to delete the row as
//! drained, on the strength of an older look, then meets a conflict and looks again.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::{Postgres, pool::CHUNK, pool::retrying};
use crate::core::{
    clock::Millis,
    id::{EventId, RoomId, ServerName, StickyPosition, StreamOrdering},
    store::{NewServer, StoreError},
};

impl Postgres {
    pub(in crate::core::store) async fn record_new_servers(
        &self,
        rows: &[NewServer],
        delta_cursor: StreamOrdering,
        now: Millis,
    ) -> Result<Vec<NewServer>, StoreError> {
        let rows: Vec<&NewServer> = rows.iter().collect::<BTreeSet<_>>().into_iter().collect();
        retrying(|| self.try_record_new_servers(&rows, delta_cursor, now)).await
    }

    async fn try_record_new_servers(
        &self,
        rows: &[&NewServer],
        delta_cursor: StreamOrdering,
        now: Millis,
    ) -> Result<Vec<NewServer>, StoreError> {
        let mut tx = self.pool.begin().await?;
        let mut recorded = Vec::new();
        for chunk in rows.chunks(CHUNK) {
            let touched: Vec<(String, String)> = sqlx::query_as(
                "INSERT INTO destination_rooms_sticky_events_backlog AS old \
                    (destination, room_id, sticky_events_stream_position) \
                 SELECT n.server, n.room_id, min(s.stream_id) \
                 FROM unnest($1::text[], $2::text[]) AS n (server, room_id) \
                 JOIN sticky_events s ON s.room_id = n.room_id \
                 WHERE s.expires_at > $3 AND substr(s.sender, strpos(s.sender, ':') + 1) = $4 \
                   AND EXISTS (SELECT FROM rooms WHERE rooms.room_id = n.room_id) \
                 GROUP BY n.server, n.room_id ORDER BY n.server, n.room_id \
                 ON CONFLICT (destination, room_id) DO UPDATE SET sticky_events_stream_position = \
                    least(old.sticky_events_stream_position, EXCLUDED.sticky_events_stream_position) \
                 RETURNING destination, room_id",
            )
            .bind(chunk.iter().map(|row| row.server.as_str()).collect::<Vec<_>>())
            .bind(chunk.iter().map(|row| row.room_id.as_str()).collect::<Vec<_>>())
            .bind(now.0)
            .bind(self.server_name.as_str())
            .fetch_all(&mut *tx)
            .await?;
            recorded.extend(touched.into_iter().map(|(server, room)| NewServer {
                server: server.into(),
                room_id: room.into(),
            }));
        }
        // As in a checkpoint: not once a sender with another list has moved our cursors back.
        let senders = self.senders.lock().clone();
        let done = sqlx::query(
            "INSERT INTO burdock.instances AS i (instance_name, delta_cursor, senders) VALUES ($1, $2, $3) \
             ON CONFLICT (instance_name) DO UPDATE SET delta_cursor = EXCLUDED.delta_cursor \
             WHERE $3 IS NULL OR i.senders IS NOT DISTINCT FROM $3",
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
        recorded.sort();
        Ok(recorded)
    }

    pub(in crate::core::store) async fn record_missed(
        &self,
        rows: &[(ServerName, RoomId, StickyPosition)],
    ) -> Result<(), StoreError> {
        let mut lowest: BTreeMap<(&ServerName, &RoomId), StickyPosition> = BTreeMap::new();
        for (server, room, position) in rows {
            let kept = lowest.entry((server, room)).or_insert(*position);
            *kept = (*kept).min(*position);
        }
        let lowest: Vec<_> = lowest.into_iter().collect();
        for chunk in lowest.chunks(CHUNK) {
            retrying(|| self.try_record_missed(chunk)).await?;
        }
        Ok(())
    }

    async fn try_record_missed(&self, rows: &[((&ServerName, &RoomId), StickyPosition)]) -> Result<(), StoreError> {
        sqlx::query(
            "INSERT INTO destination_rooms_sticky_events_backlog AS old \
                (destination, room_id, sticky_events_stream_position) \
             SELECT m.server, m.room_id, m.position \
             FROM unnest($1::text[], $2::text[], $3::int4[]) AS m (server, room_id, position) \
             WHERE EXISTS (SELECT FROM rooms WHERE rooms.room_id = m.room_id) \
             ORDER BY m.server, m.room_id \
             ON CONFLICT (destination, room_id) DO UPDATE SET sticky_events_stream_position = \
                least(old.sticky_events_stream_position, EXCLUDED.sticky_events_stream_position)",
        )
        .bind(rows.iter().map(|((server, _), _)| server.as_str()).collect::<Vec<_>>())
        .bind(rows.iter().map(|((_, room), _)| room.as_str()).collect::<Vec<_>>())
        .bind(rows.iter().map(|(_, position)| stored(*position)).collect::<Vec<_>>())
        .execute(&self.pool)
        .await?;
        Ok(())
    }

    pub(in crate::core::store) async fn sticky_positions(
        &self,
        event_ids: &[EventId],
    ) -> Result<HashMap<EventId, StickyPosition>, StoreError> {
        // By way of `events`, because `sticky_events` has no index on the event's id, but one on its ordering.
        let rows: Vec<(String, i64)> = sqlx::query_as(
            "SELECT s.event_id, s.stream_id::int8 \
             FROM events e JOIN sticky_events s ON s.event_stream_ordering = e.stream_ordering \
             WHERE e.event_id = ANY($1) AND substr(s.sender, strpos(s.sender, ':') + 1) = $2",
        )
        .bind(event_ids.iter().map(EventId::as_str).collect::<Vec<_>>())
        .bind(self.server_name.as_str())
        .fetch_all(&self.pool)
        .await?;
        Ok(rows
            .into_iter()
            .map(|(event, position)| (event.into(), StickyPosition(position)))
            .collect())
    }
}

/// A position as Synapse's column holds it, in 32 bits. One beyond them lies above every event there can be, and so
/// does the greatest that fits (an event exactly there would be sent twice).
pub(in crate::core::store) fn stored(position: StickyPosition) -> i32 {
    i32::try_from(position.0).unwrap_or(if position.0 < 0 { i32::MIN } else { i32::MAX })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_position_beyond_32_bits_is_stored_as_the_last_one() {
        assert_eq!(stored(StickyPosition(7)), 7);
        assert_eq!(stored(StickyPosition(i64::from(i32::MAX) + 1)), i32::MAX);
        assert_eq!(stored(StickyPosition(i64::MIN)), i32::MIN);
    }
}
