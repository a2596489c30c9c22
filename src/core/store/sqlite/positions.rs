//! Where an instance resumes: the rows of `federation_stream_position`, and our own beside them.

use sqlx::SqliteConnection;

use super::{Sqlite, pool::rows};
use crate::core::{
    id::InstanceName,
    store::{
        EventCursor, StoreError,
        adoption::{Found, Remembered},
    },
};

impl Sqlite {
    pub(in crate::core::store) async fn adopt_positions(
        &self,
        configured: &[InstanceName],
    ) -> Result<EventCursor, StoreError> {
        let places: Vec<&str> = configured.iter().map(InstanceName::as_str).collect();
        let senders = places.join("\n");
        let mut tx = self.write().await?;
        let plan = read(&mut tx).await?.plan(&places, self.me.as_str())?;
        if let Some(federation) = plan.reset_federation_to {
            let names = rows(&places);
            reset(&mut tx, &names, plan.cursor.position.0, federation).await?;
            remember(&mut tx, &names, &senders, plan.cursor).await?;
        } else {
            sqlx::query(
                "INSERT INTO instances (instance_name, senders) VALUES ($1, $2)
                 ON CONFLICT (instance_name) DO UPDATE SET senders = EXCLUDED.senders",
            )
            .bind(self.me.as_str())
            .bind(&senders)
            .execute(&mut *tx)
            .await?;
        }
        tx.commit().await?;
        // From now on nothing of ours is written once another list has taken over.
        *self.senders.lock() = Some(senders);
        Ok(plan.cursor)
    }
}

async fn read(connection: &mut SqliteConnection) -> Result<Found, StoreError> {
    let positions: Vec<(String, String, i64)> =
        sqlx::query_as("SELECT type, instance_name, stream_id FROM federation_stream_position")
            .fetch_all(&mut *connection)
            .await?;
    let ours: Vec<Remembered> =
        sqlx::query_as("SELECT instance_name, event_cursor, delta_cursor, senders FROM instances")
            .fetch_all(connection)
            .await?;
    Ok(Found::new(&positions, ours))
}

/// Gives every configured instance both rows, and takes away all others' (of these types; others are not ours).
async fn reset(connection: &mut SqliteConnection, names: &str, events: i64, federation: i64) -> Result<(), StoreError> {
    sqlx::query(
        "DELETE FROM federation_stream_position
         WHERE type IN ('events', 'federation') AND instance_name NOT IN (SELECT value FROM json_each($1))",
    )
    .bind(names)
    .execute(&mut *connection)
    .await?;
    sqlx::query(
        "INSERT INTO federation_stream_position (type, instance_name, stream_id)
         SELECT t.type, n.value, t.lowest
         FROM (SELECT 'events' AS type, $2 AS lowest UNION ALL SELECT 'federation', $3) AS t, json_each($1) AS n
         WHERE true
         ON CONFLICT (type, instance_name) DO UPDATE SET stream_id = EXCLUDED.stream_id",
    )
    .bind(names)
    .bind(events)
    .bind(federation)
    .execute(connection)
    .await?;
    Ok(())
}

/// Makes our own memory agree. A cursor that is not our work is remembered as none, or else the next instance to start,
/// which finds the set complete, would take it for ours.
async fn remember(
    connection: &mut SqliteConnection,
    names: &str,
    senders: &str,
    cursor: EventCursor,
) -> Result<(), StoreError> {
    sqlx::query("DELETE FROM instances WHERE instance_name NOT IN (SELECT value FROM json_each($1))")
        .bind(names)
        .execute(&mut *connection)
        .await?;
    sqlx::query(
        "INSERT INTO instances (instance_name, event_cursor, delta_cursor, senders)
         SELECT value, $2, $3, $4 FROM json_each($1) WHERE true
         ON CONFLICT (instance_name) DO UPDATE
         SET event_cursor = EXCLUDED.event_cursor, delta_cursor = EXCLUDED.delta_cursor, senders = EXCLUDED.senders",
    )
    .bind(names)
    .bind(cursor.ours.then_some(cursor.position.0))
    .bind(cursor.deltas.map(|deltas| deltas.0))
    .bind(senders)
    .execute(connection)
    .await?;
    Ok(())
}
