//! Where an instance resumes: the rows of `federation_stream_position`, and our own beside them.

use sqlx::PgConnection;

use super::{Postgres, pool::retrying};
use crate::core::{
    id::InstanceName,
    store::{
        EventCursor, StoreError,
        adoption::{Found, Remembered},
    },
};

impl Postgres {
    pub(in crate::core::store) async fn adopt_positions(
        &self,
        configured: &[InstanceName],
    ) -> Result<EventCursor, StoreError> {
        let places: Vec<&str> = configured.iter().map(InstanceName::as_str).collect();
        retrying(|| self.try_adopt_positions(&places)).await
    }

    async fn try_adopt_positions(&self, places: &[&str]) -> Result<EventCursor, StoreError> {
        let mut tx = self.pool.begin().await?;
        // Instances start at the same time, and the second must see what the first one made. Checkpoints wait, reads
        // do not.
        sqlx::query("LOCK TABLE federation_stream_position IN SHARE ROW EXCLUSIVE MODE")
            .execute(&mut *tx)
            .await?;
        let found = read(&mut tx).await?;
        let senders = places.join("\n");
        let plan = found.plan(places, self.me.as_str())?;
        if let Some(federation) = plan.reset_federation_to {
            reset(&mut tx, places, plan.cursor.position.0, federation).await?;
            remember(&mut tx, places, &senders, plan.cursor).await?;
        } else {
            remember_senders(&mut tx, &senders, self.me.as_str()).await?;
        }
        tx.commit().await?;
        // From now on nothing of ours is written once another list has taken over.
        *self.senders.lock() = Some(senders);
        Ok(plan.cursor)
    }
}

async fn read(connection: &mut PgConnection) -> Result<Found, StoreError> {
    let positions: Vec<(String, String, i64)> =
        sqlx::query_as("SELECT type, instance_name, stream_id FROM federation_stream_position")
            .fetch_all(&mut *connection)
            .await?;
    let ours: Vec<Remembered> =
        sqlx::query_as("SELECT instance_name, event_cursor, delta_cursor, senders FROM burdock.instances")
            .fetch_all(connection)
            .await?;
    Ok(Found::new(&positions, ours))
}

/// Gives every configured instance both rows, and takes away all others' (of these types; others are not ours).
async fn reset(connection: &mut PgConnection, names: &[&str], events: i64, federation: i64) -> Result<(), StoreError> {
    sqlx::query(
        "DELETE FROM federation_stream_position \
         WHERE type IN ('events', 'federation') AND instance_name <> ALL($1::text[])",
    )
    .bind(names)
    .execute(&mut *connection)
    .await?;
    sqlx::query(
        "INSERT INTO federation_stream_position (type, instance_name, stream_id) \
         SELECT t.type, n.name, t.lowest \
         FROM (VALUES ('events', $2::int8), ('federation', $3::int8)) AS t (type, lowest), unnest($1::text[]) AS n (name) \
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
    connection: &mut PgConnection,
    places: &[&str],
    senders: &str,
    cursor: EventCursor,
) -> Result<(), StoreError> {
    sqlx::query("DELETE FROM burdock.instances WHERE instance_name <> ALL($1::text[])")
        .bind(places)
        .execute(&mut *connection)
        .await?;
    sqlx::query(
        "INSERT INTO burdock.instances (instance_name, event_cursor, delta_cursor, senders) \
         SELECT name, $2, $3, $4 FROM unnest($1::text[]) AS n (name) \
         ON CONFLICT (instance_name) DO UPDATE \
         SET event_cursor = EXCLUDED.event_cursor, delta_cursor = EXCLUDED.delta_cursor, senders = EXCLUDED.senders",
    )
    .bind(places)
    .bind(cursor.ours.then_some(cursor.position.0))
    .bind(cursor.deltas.map(|deltas| deltas.0))
    .bind(senders)
    .execute(connection)
    .await?;
    Ok(())
}

/// Remembers what list an instance's position is kept under.
async fn remember_senders(connection: &mut PgConnection, senders: &str, me: &str) -> Result<(), StoreError> {
    sqlx::query(
        "INSERT INTO burdock.instances (instance_name, senders) VALUES ($1, $2) \
         ON CONFLICT (instance_name) DO UPDATE SET senders = EXCLUDED.senders",
    )
    .bind(me)
    .bind(senders)
    .execute(connection)
    .await?;
    Ok(())
}
