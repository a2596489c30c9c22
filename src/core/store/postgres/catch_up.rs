//! What a destination that fell behind is owed, and the record of each step it catches up.

use super::{Postgres, pool::retrying};
use crate::core::{
    id::{EventId, RoomId, ServerName, StreamOrdering},
    store::{OwedRoom, StoreError, sql},
};

impl Postgres {
    pub(in crate::core::store) async fn owed_rooms(
        &self,
        destination: &ServerName,
        after: StreamOrdering,
        limit: i64,
    ) -> Result<Vec<OwedRoom>, StoreError> {
        let rows: Vec<(String, i64, Option<String>)> = sqlx::query_as(sql::OWED_ROOMS)
            .bind(destination.as_str())
            .bind(after.0)
            .bind(limit)
            .fetch_all(&self.pool)
            .await?;
        let owed = |(room, ordering, event): (String, i64, Option<String>)| OwedRoom {
            room_id: RoomId::from(room),
            stream_ordering: StreamOrdering(ordering),
            event_id: event.map(EventId::from),
        };
        Ok(rows.into_iter().map(owed).collect())
    }

    pub(in crate::core::store) async fn finish_catch_up_step(
        &self,
        destination: &ServerName,
        old: StreamOrdering,
        new: StreamOrdering,
        sent: &[StreamOrdering],
        mark_sticky: bool,
    ) -> Result<bool, StoreError> {
        let sent: Vec<i64> = sent.iter().map(|ordering| ordering.0).collect();
        retrying(|| self.try_finish_step(destination, old, new, &sent, mark_sticky)).await
    }

    async fn try_finish_step(
        &self,
        destination: &ServerName,
        old: StreamOrdering,
        new: StreamOrdering,
        sent: &[i64],
        mark_sticky: bool,
    ) -> Result<bool, StoreError> {
        let mut tx = self.pool.begin().await?;
        let marked = if mark_sticky {
            // The event at `new` is included: newer ones of its room may have been sent in its place.
            sqlx::query(
                "INSERT INTO destination_rooms_sticky_events_backlog AS old \
                    (destination, room_id, sticky_events_stream_position) \
                 SELECT $1, s.room_id, min(s.stream_id) \
                 FROM destination_rooms r JOIN sticky_events s ON s.room_id = r.room_id \
                 WHERE r.destination = $1 AND r.stream_ordering > $2 \
                   AND s.event_stream_ordering > $2 AND s.event_stream_ordering <= $3 \
                   AND s.event_stream_ordering <> ALL($4::int8[]) \
                   AND substr(s.sender, strpos(s.sender, ':') + 1) = $5 \
                 GROUP BY s.room_id ORDER BY s.room_id \
                 ON CONFLICT (destination, room_id) DO UPDATE SET sticky_events_stream_position = \
                    least(old.sticky_events_stream_position, EXCLUDED.sticky_events_stream_position)",
            )
            .bind(destination.as_str())
            .bind(old.0)
            .bind(new.0)
            .bind(sent)
            .bind(self.server_name.as_str())
            .execute(&mut *tx)
            .await?
            .rows_affected()
        } else {
            0
        };
        sqlx::query(sql::SET_LAST_SUCCESSFUL)
            .bind(destination.as_str())
            .bind(new.0)
            .execute(&mut *tx)
            .await?;
        tx.commit().await?;
        Ok(marked > 0)
    }
}
