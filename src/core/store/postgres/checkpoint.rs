//! The ledger written back: the event cursor, and what is owed below it, in one transaction.

use std::collections::BTreeMap;

use sqlx::PgConnection;

use super::{Postgres, pool::CHUNK, pool::retrying};
use crate::core::{
    id::{RoomId, ServerName, StreamOrdering},
    store::{Checkpoint, StoreError, sql},
};

impl Postgres {
    pub(in crate::core::store) async fn checkpoint(&self, checkpoint: &Checkpoint) -> Result<(), StoreError> {
        // Sorted, so that two writers of many rows cannot wait for each other in a circle, and unique, because one
        // statement may not write a row twice.
        let last_successful: Vec<(&ServerName, StreamOrdering)> = checkpoint
            .last_successful
            .iter()
            .map(|(destination, ordering)| (destination, *ordering))
            .collect::<BTreeMap<_, _>>()
            .into_iter()
            .collect();
        let mut owed: BTreeMap<(&ServerName, &RoomId), StreamOrdering> = BTreeMap::new();
        for (destination, room, ordering) in &checkpoint.owed {
            let newest = owed.entry((destination, room)).or_insert(*ordering);
            *newest = (*newest).max(*ordering);
        }
        let owed: Vec<_> = owed.into_iter().collect();
        retrying(|| self.try_checkpoint(checkpoint, &last_successful, &owed)).await
    }

    async fn try_checkpoint(
        &self,
        checkpoint: &Checkpoint,
        last_successful: &[(&ServerName, StreamOrdering)],
        owed: &[((&ServerName, &RoomId), StreamOrdering)],
    ) -> Result<(), StoreError> {
        let mut tx = self.pool.begin().await?;
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
        let senders = self.senders.lock().clone();
        let done = sqlx::query(
            "INSERT INTO burdock.instances AS i (instance_name, event_cursor, delta_cursor, senders) \
             VALUES ($1, $2, $3, $4) \
             ON CONFLICT (instance_name) DO UPDATE \
             SET event_cursor = EXCLUDED.event_cursor, delta_cursor = coalesce(EXCLUDED.delta_cursor, i.delta_cursor) \
             WHERE $4 IS NULL OR i.senders IS NOT DISTINCT FROM $4",
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
        for chunk in last_successful.chunks(CHUNK) {
            write_last_successful(&mut tx, chunk).await?;
        }
        for chunk in owed.chunks(CHUNK) {
            write_owed(&mut tx, chunk).await?;
        }
        Ok(tx.commit().await?)
    }
}

async fn write_last_successful(
    connection: &mut PgConnection,
    rows: &[(&ServerName, StreamOrdering)],
) -> Result<(), StoreError> {
    let (destinations, orderings): (Vec<&str>, Vec<i64>) = rows.iter().map(|(d, o)| (d.as_str(), o.0)).unzip();
    sqlx::query(
        "INSERT INTO destinations (destination, last_successful_stream_ordering) \
         SELECT * FROM unnest($1::text[], $2::int8[]) \
         ON CONFLICT (destination) DO UPDATE \
         SET last_successful_stream_ordering = EXCLUDED.last_successful_stream_ordering",
    )
    .bind(destinations)
    .bind(orderings)
    .execute(connection)
    .await?;
    Ok(())
}

async fn write_owed(
    connection: &mut PgConnection,
    rows: &[((&ServerName, &RoomId), StreamOrdering)],
) -> Result<(), StoreError> {
    let mut destinations: Vec<&str> = rows.iter().map(|((destination, _), _)| destination.as_str()).collect();
    let rooms: Vec<&str> = rows.iter().map(|((_, room), _)| room.as_str()).collect();
    let orderings: Vec<i64> = rows.iter().map(|(_, ordering)| ordering.0).collect();
    // EXISTS leaves out purged rooms; one that is purged after this look breaks the foreign key, and the transaction is
    // repeated.
    let owed = sqlx::query(
        "INSERT INTO destination_rooms AS old (destination, room_id, stream_ordering) \
         SELECT o.destination, o.room_id, o.stream_ordering \
         FROM unnest($1::text[], $2::text[], $3::int8[]) AS o (destination, room_id, stream_ordering) \
         WHERE EXISTS (SELECT FROM rooms WHERE rooms.room_id = o.room_id) \
         ORDER BY o.destination, o.room_id \
         ON CONFLICT (destination, room_id) DO UPDATE \
         SET stream_ordering = greatest(old.stream_ordering, EXCLUDED.stream_ordering)",
    )
    .bind(destinations.clone())
    .bind(rooms)
    .bind(orderings);
    // Their foreign key wants the destinations to be there.
    destinations.dedup();
    sqlx::query("INSERT INTO destinations (destination) SELECT * FROM unnest($1::text[]) ON CONFLICT DO NOTHING")
        .bind(destinations)
        .execute(&mut *connection)
        .await?;
    owed.execute(connection).await?;
    Ok(())
}
