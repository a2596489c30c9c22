//! The ledger written back: the event cursor, and what is owed below it, in one transaction.

use super::{Sqlite, pool::rows};
use crate::core::store::{Checkpoint, StoreError, sql};

impl Sqlite {
    pub(in crate::core::store) async fn checkpoint(&self, checkpoint: &Checkpoint) -> Result<(), StoreError> {
        let senders = self.senders.lock().clone();
        let mut tx = self.write().await?;
        let done = sqlx::query(sql::MOVE_CURSOR)
            .bind(self.me.as_str())
            .bind(checkpoint.cursor.0)
            .execute(&mut *tx)
            .await?;
        if done.rows_affected() == 0 {
            return Err(StoreError::TakenOver);
        }
        // The other proof: our row is still under the list of senders that we started with. One that was started with
        // another has moved all rows back, for destinations that changed hands; to move ours on would lose them.
        let done = sqlx::query(
            "INSERT INTO instances AS i (instance_name, event_cursor, delta_cursor, senders) VALUES ($1, $2, $3, $4)
             ON CONFLICT (instance_name) DO UPDATE
             SET event_cursor = EXCLUDED.event_cursor, delta_cursor = coalesce(EXCLUDED.delta_cursor, i.delta_cursor)
             WHERE $4 IS NULL OR i.senders IS $4",
        )
        .bind(self.me.as_str())
        .bind(checkpoint.cursor.0)
        .bind(checkpoint.delta_cursor.map(|cursor| cursor.0))
        .bind(senders)
        .execute(&mut *tx)
        .await?;
        if done.rows_affected() == 0 {
            return Err(StoreError::TakenOver);
        }
        let last_successful = checkpoint.last_successful.iter();
        sqlx::query(
            "INSERT INTO destinations (destination, last_successful_stream_ordering)
             SELECT value ->> 0, value ->> 1 FROM json_each($1) WHERE true ORDER BY key
             ON CONFLICT (destination) DO UPDATE
             SET last_successful_stream_ordering = EXCLUDED.last_successful_stream_ordering",
        )
        .bind(rows(
            last_successful.map(|(destination, ordering)| (destination.as_str(), ordering.0)),
        ))
        .execute(&mut *tx)
        .await?;
        let owed = rows(
            checkpoint
                .owed
                .iter()
                .map(|(destination, room, ordering)| (destination.as_str(), room.as_str(), ordering.0)),
        );
        // Their foreign key wants the destinations to be there.
        sqlx::query(
            "INSERT INTO destinations (destination) SELECT value ->> 0 FROM json_each($1) WHERE true
             ON CONFLICT DO NOTHING",
        )
        .bind(&owed)
        .execute(&mut *tx)
        .await?;
        sqlx::query(
            "INSERT INTO destination_rooms AS old (destination, room_id, stream_ordering)
             SELECT value ->> 0, value ->> 1, value ->> 2 FROM json_each($1)
             WHERE EXISTS (SELECT 1 FROM rooms WHERE rooms.room_id = value ->> 1)
             ON CONFLICT (destination, room_id) DO UPDATE
             SET stream_ordering = max(old.stream_ordering, EXCLUDED.stream_ordering)",
        )
        .bind(&owed)
        .execute(&mut *tx)
        .await?;
        Ok(tx.commit().await?)
    }
}
