//! The sticky backlog of a destination: what is left in it, what of that may be sent, and how its rows move.

use super::Sqlite;
use crate::core::{
    clock::Millis,
    id::{EventId, RoomId, ServerName, StickyPosition},
    store::{BacklogItem, BacklogPage, BacklogRow, RECENT_JOIN, StoreError, sql},
};

impl Sqlite {
    pub(in crate::core::store) async fn backlog(
        &self,
        destination: &ServerName,
        now: Millis,
    ) -> Result<Vec<BacklogRow>, StoreError> {
        // The members are looked through only for rows that are alive.
        let rows: Vec<(String, i64, bool, Option<String>)> = sqlx::query_as(
            "SELECT b.room_id, b.position, b.alive,
                    CASE WHEN b.alive THEN (
                        SELECT c.event_id FROM current_state_events c JOIN events e ON e.event_id = c.event_id
                        WHERE c.room_id = b.room_id AND c.type = 'm.room.member' AND c.membership = 'join'
                          AND substr(c.state_key, instr(c.state_key, ':') + 1) = $1
                          AND e.received_ts > $3
                        ORDER BY e.stream_ordering DESC LIMIT 1) END
             FROM (SELECT b.room_id, b.sticky_events_stream_position AS position,
                          EXISTS (SELECT 1 FROM sticky_events s
                                  WHERE s.room_id = b.room_id AND s.stream_id >= b.sticky_events_stream_position
                                    AND s.expires_at > $2 AND substr(s.sender, instr(s.sender, ':') + 1) = $4) AS alive
                   FROM destination_rooms_sticky_events_backlog b WHERE b.destination = $1) AS b
             ORDER BY b.room_id",
        )
        .bind(destination.as_str())
        .bind(now.0)
        .bind(now.plus(-RECENT_JOIN).0)
        .bind(self.server_name.as_str())
        .fetch_all(&self.readers)
        .await?;
        if rows.iter().any(|(_, _, alive, _)| !alive) {
            self.delete_drained(destination, now).await?;
        }
        let alive = rows.into_iter().filter(|(_, _, alive, _)| *alive);
        Ok(alive
            .map(|(room, position, _, recent_join)| BacklogRow {
                room_id: room.into(),
                position: StickyPosition(position),
                recent_join: recent_join.map(EventId::from),
            })
            .collect())
    }

    /// Deletes the destination's rows that have nothing alive left. They are looked at again: one may have been written
    /// since.
    async fn delete_drained(&self, destination: &ServerName, now: Millis) -> Result<(), StoreError> {
        let mut tx = self.write().await?;
        sqlx::query(
            "DELETE FROM destination_rooms_sticky_events_backlog AS b
             WHERE b.destination = $1 AND NOT EXISTS (
                SELECT 1 FROM sticky_events s
                WHERE s.room_id = b.room_id AND s.stream_id >= b.sticky_events_stream_position
                  AND s.expires_at > $2 AND substr(s.sender, instr(s.sender, ':') + 1) = $3)",
        )
        .bind(destination.as_str())
        .bind(now.0)
        .bind(self.server_name.as_str())
        .execute(&mut *tx)
        .await?;
        Ok(tx.commit().await?)
    }

    pub(in crate::core::store) async fn backlog_items(
        &self,
        destination: &ServerName,
        room: &RoomId,
        position: StickyPosition,
        now: Millis,
        limit: i64,
    ) -> Result<BacklogPage, StoreError> {
        // Asked before the events are read: who has left by then is sent nothing that came after.
        let joined = self.server_in_room(destination, room).await?;
        // A redaction counts if it was found valid (`recheck` is 0), or else if it is there, was not rejected, is of this
        // room and, where its right was left open (`recheck_redaction`), comes from the event's own server: ours.
        let rows: Vec<(i64, String, bool)> = sqlx::query_as(
            "SELECT s.stream_id, s.event_id,
                    coalesce(
                        NOT e.outlier AND (j.internal_metadata ->> '$.soft_failed') IS NOT 1
                        AND NOT EXISTS (SELECT 1 FROM rejections x WHERE x.event_id = s.event_id)
                        AND NOT EXISTS (SELECT 1 FROM erased_users u WHERE u.user_id = s.sender)
                        AND NOT EXISTS (
                            SELECT 1 FROM redactions r
                            WHERE r.redacts = s.event_id AND (NOT r.recheck OR EXISTS (
                                SELECT 1 FROM events re JOIN event_json rj ON rj.event_id = re.event_id
                                WHERE re.event_id = r.event_id AND re.room_id = s.room_id
                                  AND NOT EXISTS (SELECT 1 FROM rejections x WHERE x.event_id = re.event_id)
                                  AND ((rj.internal_metadata ->> '$.recheck_redaction') IS NOT 1
                                       OR substr(re.sender, instr(re.sender, ':') + 1) = $4)))),
                        false)
             FROM sticky_events s
             LEFT JOIN events e ON e.event_id = s.event_id
             LEFT JOIN event_json j ON j.event_id = s.event_id
             WHERE s.room_id = $1 AND s.stream_id >= $2 AND s.expires_at > $3
               AND substr(s.sender, instr(s.sender, ':') + 1) = $4
             ORDER BY s.stream_id LIMIT $5",
        )
        .bind(room.as_str())
        .bind(position.0)
        .bind(now.0)
        .bind(self.server_name.as_str())
        .bind(limit)
        .fetch_all(&self.readers)
        .await?;
        let items = rows.into_iter().map(|(position, event, sendable)| BacklogItem {
            position: StickyPosition(position),
            event_id: event.into(),
            sendable,
        });
        Ok(BacklogPage {
            items: items.collect(),
            joined,
        })
    }

    pub(in crate::core::store) async fn server_in_room(
        &self,
        server: &ServerName,
        room: &RoomId,
    ) -> Result<bool, StoreError> {
        Ok(sqlx::query_scalar(
            "SELECT EXISTS (SELECT 1 FROM current_state_events c
                            WHERE c.room_id = $2 AND c.type = 'm.room.member' AND c.membership = 'join'
                              AND substr(c.state_key, instr(c.state_key, ':') + 1) = $1)",
        )
        .bind(server.as_str())
        .bind(room.as_str())
        .fetch_one(&self.readers)
        .await?)
    }

    pub(in crate::core::store) async fn advance_backlog(
        &self,
        destination: &ServerName,
        room: &RoomId,
        from: StickyPosition,
        to: StickyPosition,
    ) -> Result<bool, StoreError> {
        let mut tx = self.write().await?;
        let done = sqlx::query(sql::ADVANCE_BACKLOG)
            .bind(destination.as_str())
            .bind(room.as_str())
            .bind(from.0)
            .bind(to.0)
            .execute(&mut *tx)
            .await?;
        tx.commit().await?;
        Ok(done.rows_affected() > 0)
    }

    pub(in crate::core::store) async fn drop_backlog(
        &self,
        destination: &ServerName,
        room: &RoomId,
        position: StickyPosition,
    ) -> Result<bool, StoreError> {
        let mut tx = self.write().await?;
        let done = sqlx::query(
            "DELETE FROM destination_rooms_sticky_events_backlog
             WHERE destination = $1 AND room_id = $2 AND sticky_events_stream_position = $3
               AND NOT EXISTS (SELECT 1 FROM current_state_events c
                               WHERE c.room_id = $2 AND c.type = 'm.room.member' AND c.membership = 'join'
                                 AND substr(c.state_key, instr(c.state_key, ':') + 1) = $1)",
        )
        .bind(destination.as_str())
        .bind(room.as_str())
        .bind(position.0)
        .execute(&mut *tx)
        .await?;
        tx.commit().await?;
        Ok(done.rows_affected() > 0)
    }
}
