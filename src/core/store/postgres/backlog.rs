//! The sticky backlog of a destination: what is left in it, what of that may be sent, and how its rows move.

use super::{Postgres, backlog_record::stored, pool::retrying};
use crate::core::{
    clock::Millis,
    id::{EventId, RoomId, ServerName, StickyPosition},
    store::{BacklogItem, BacklogPage, BacklogRow, RECENT_JOIN, StoreError, sql},
};

impl Postgres {
    pub(in crate::core::store) async fn backlog(
        &self,
        destination: &ServerName,
        now: Millis,
    ) -> Result<Vec<BacklogRow>, StoreError> {
        // The members are looked through only for rows that are alive.
        let rows: Vec<(String, i64, bool, Option<String>)> = sqlx::query_as(
            "SELECT b.room_id, b.sticky_events_stream_position::int8, left_over.alive, \
                    CASE WHEN left_over.alive THEN ( \
                        SELECT c.event_id FROM current_state_events c JOIN events e ON e.event_id = c.event_id \
                        WHERE c.room_id = b.room_id AND c.type = 'm.room.member' AND c.membership = 'join' \
                          AND substr(c.state_key, strpos(c.state_key, ':') + 1) = b.destination \
                          AND e.received_ts > $3 \
                        ORDER BY e.stream_ordering DESC LIMIT 1) END \
             FROM destination_rooms_sticky_events_backlog b, \
                  LATERAL (SELECT EXISTS ( \
                        SELECT FROM sticky_events s \
                        WHERE s.room_id = b.room_id AND s.stream_id >= b.sticky_events_stream_position \
                          AND s.expires_at > $2 AND substr(s.sender, strpos(s.sender, ':') + 1) = $4)) \
                    AS left_over (alive) \
             WHERE b.destination = $1 ORDER BY b.room_id",
        )
        .bind(destination.as_str())
        .bind(now.0)
        .bind(now.plus(-RECENT_JOIN).0)
        .bind(self.server_name.as_str())
        .fetch_all(&self.pool)
        .await?;
        if rows.iter().any(|(_, _, alive, _)| !alive) {
            retrying(|| self.try_delete_drained(destination, now)).await?;
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

    /// Deletes the destination's rows that have nothing alive left.
    async fn try_delete_drained(&self, destination: &ServerName, now: Millis) -> Result<(), StoreError> {
        // In a snapshot: a row that is written while we look, even with the position it had, stands for an event that
        // we did not see. Under READ COMMITTED it would be deleted all the same.
        let mut tx = self.begin_snapshot().await?;
        sqlx::query(
            "DELETE FROM destination_rooms_sticky_events_backlog b \
             WHERE b.destination = $1 AND NOT EXISTS ( \
                SELECT FROM sticky_events s \
                WHERE s.room_id = b.room_id AND s.stream_id >= b.sticky_events_stream_position \
                  AND s.expires_at > $2 AND substr(s.sender, strpos(s.sender, ':') + 1) = $3)",
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
        // A redaction counts if it was found valid (`recheck` is false), or else if it is there, was not rejected, is
        // of this room and, where Synapse left its right open (`recheck_redaction`), comes from the event's own
        // server: ours. A ban may redact all that a user sent before it.
        let rows: Vec<(i64, String, bool)> = sqlx::query_as(
            "SELECT s.stream_id::int8, s.event_id, \
                    coalesce( \
                        NOT e.outlier AND (j.internal_metadata::jsonb ->> 'soft_failed') IS DISTINCT FROM 'true' \
                        AND NOT EXISTS (SELECT FROM rejections x WHERE x.event_id = s.event_id) \
                        AND NOT EXISTS (SELECT FROM erased_users u WHERE u.user_id = s.sender) \
                        AND NOT EXISTS ( \
                            SELECT FROM ( \
                                SELECT r.event_id, r.recheck FROM redactions r WHERE r.redacts = s.event_id \
                                UNION ALL \
                                SELECT ban.redacting_event_id, true FROM room_ban_redactions ban \
                                WHERE ban.room_id = s.room_id AND ban.user_id = s.sender \
                                  AND (ban.redact_end_ordering IS NULL OR e.stream_ordering < ban.redact_end_ordering) \
                            ) AS redaction \
                            WHERE NOT redaction.recheck OR EXISTS ( \
                                SELECT FROM events re JOIN event_json rj ON rj.event_id = re.event_id \
                                WHERE re.event_id = redaction.event_id AND re.room_id = s.room_id \
                                  AND NOT EXISTS (SELECT FROM rejections x WHERE x.event_id = re.event_id) \
                                  AND ((rj.internal_metadata::jsonb ->> 'recheck_redaction') IS DISTINCT FROM 'true' \
                                       OR substr(re.sender, strpos(re.sender, ':') + 1) = $4))), \
                        false) \
             FROM sticky_events s \
             LEFT JOIN events e ON e.event_id = s.event_id \
             LEFT JOIN event_json j ON j.event_id = s.event_id \
             WHERE s.room_id = $1 AND s.stream_id >= $2 AND s.expires_at > $3 \
               AND substr(s.sender, strpos(s.sender, ':') + 1) = $4 \
             ORDER BY s.stream_id LIMIT $5",
        )
        .bind(room.as_str())
        .bind(position.0)
        .bind(now.0)
        .bind(self.server_name.as_str())
        .bind(limit)
        .fetch_all(&self.pool)
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
            "SELECT EXISTS (SELECT FROM current_state_events c \
                            WHERE c.room_id = $2 AND c.type = 'm.room.member' AND c.membership = 'join' \
                              AND substr(c.state_key, strpos(c.state_key, ':') + 1) = $1) \
                 OR EXISTS (SELECT FROM partial_state_rooms_servers p \
                            WHERE p.room_id = $2 AND p.server_name = $1)",
        )
        .bind(server.as_str())
        .bind(room.as_str())
        .fetch_one(&self.pool)
        .await?)
    }

    pub(in crate::core::store) async fn advance_backlog(
        &self,
        destination: &ServerName,
        room: &RoomId,
        from: StickyPosition,
        to: StickyPosition,
    ) -> Result<bool, StoreError> {
        let done = sqlx::query(sql::ADVANCE_BACKLOG)
            .bind(destination.as_str())
            .bind(room.as_str())
            .bind(from.0)
            .bind(stored(to))
            .execute(&self.pool)
            .await?;
        Ok(done.rows_affected() > 0)
    }

    pub(in crate::core::store) async fn drop_backlog(
        &self,
        destination: &ServerName,
        room: &RoomId,
        position: StickyPosition,
    ) -> Result<bool, StoreError> {
        retrying(|| self.try_drop_backlog(destination, room, position)).await
    }

    async fn try_drop_backlog(
        &self,
        destination: &ServerName,
        room: &RoomId,
        position: StickyPosition,
    ) -> Result<bool, StoreError> {
        // Membership is looked at again, and in the snapshot of the delete: a server that joins after this look writes
        // the row again, which either follows the delete or makes it conflict.
        let mut tx = self.begin_snapshot().await?;
        let done = sqlx::query(
            "DELETE FROM destination_rooms_sticky_events_backlog b \
             WHERE b.destination = $1 AND b.room_id = $2 AND b.sticky_events_stream_position = $3 \
               AND NOT EXISTS (SELECT FROM current_state_events c \
                               WHERE c.room_id = $2 AND c.type = 'm.room.member' AND c.membership = 'join' \
                                 AND substr(c.state_key, strpos(c.state_key, ':') + 1) = $1) \
               AND NOT EXISTS (SELECT FROM partial_state_rooms_servers p \
                               WHERE p.room_id = $2 AND p.server_name = $1)",
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
