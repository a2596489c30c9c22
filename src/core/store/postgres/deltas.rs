//! Reading what changed in rooms' membership (`current_state_delta_stream`), as far as our living sticky events are
//! concerned. The decision which servers are new is `core::state::new_servers`.

use std::collections::{BTreeSet, HashSet};

use sqlx::PgConnection;

use super::Postgres;
use crate::core::{
    clock::Millis,
    id::{RoomId, ServerName, StreamOrdering},
    store::{DeltaScan, MemberDelta, StoreError},
};

/// How many stream positions one statement covers.
const STEP: i64 = 10_000;

impl Postgres {
    pub(in crate::core::store) async fn member_deltas(
        &self,
        after: StreamOrdering,
        up_to: StreamOrdering,
        now: Millis,
    ) -> Result<DeltaScan, StoreError> {
        let mut transaction = self.begin_snapshot().await?;
        let rooms = self.rooms_with_living_sticky_events(&mut transaction, now).await?;
        let mut scan = DeltaScan::default();
        if rooms.is_empty() {
            return Ok(scan);
        }
        read_deltas(&mut transaction, &rooms, after, up_to, &mut scan.deltas).await?;
        let newcomers = scan.newcomers();
        if newcomers.is_empty() {
            return Ok(scan);
        }
        let newest: Option<i64> = sqlx::query_scalar("SELECT max(stream_id) FROM current_state_delta_stream")
            .fetch_one(&mut *transaction)
            .await?;
        let newest = StreamOrdering(newest.unwrap_or_default());
        let rooms: Vec<&str> = newcomers.iter().map(|(room, _)| room.as_str()).collect();
        read_deltas(&mut transaction, &rooms, up_to, newest, &mut scan.deltas).await?;
        scan.steady = steady_servers(&mut transaction, &newcomers, &scan.deltas).await?;
        Ok(scan)
    }

    pub(in crate::core::store) async fn first_delta_cursor(
        &self,
        now: Millis,
        persisted: StreamOrdering,
    ) -> Result<StreamOrdering, StoreError> {
        let oldest: Option<i64> = sqlx::query_scalar(
            "SELECT min(event_stream_ordering)::bigint FROM sticky_events
             WHERE expires_at > $1 AND substr(sender, strpos(sender, ':') + 1) = $2",
        )
        .bind(now.0)
        .bind(self.server_name.as_str())
        .fetch_one(&self.pool)
        .await?;
        Ok(oldest.map_or(persisted, |ordering| StreamOrdering(ordering).before().min(persisted)))
    }

    async fn rooms_with_living_sticky_events(
        &self,
        connection: &mut PgConnection,
        now: Millis,
    ) -> Result<Vec<String>, StoreError> {
        Ok(sqlx::query_scalar(
            "SELECT DISTINCT room_id FROM sticky_events
             WHERE expires_at > $1 AND substr(sender, strpos(sender, ':') + 1) = $2",
        )
        .bind(now.0)
        .bind(self.server_name.as_str())
        .fetch_all(connection)
        .await?)
    }
}

async fn read_deltas<T: AsRef<str>>(
    connection: &mut PgConnection,
    rooms: &[T],
    after: StreamOrdering,
    up_to: StreamOrdering,
    deltas: &mut Vec<MemberDelta>,
) -> Result<(), StoreError> {
    let rooms: Vec<&str> = rooms.iter().map(AsRef::as_ref).collect();
    let mut low = after.0;
    while low < up_to.0 {
        let high = low.saturating_add(STEP).min(up_to.0);
        let rows: Vec<(i64, String, String, bool)> = sqlx::query_as(
            "SELECT d.stream_id, d.room_id, d.state_key, coalesce(now.membership = 'join', false)
             FROM current_state_delta_stream d
             LEFT JOIN room_memberships was ON was.event_id = d.prev_event_id
             LEFT JOIN room_memberships now ON now.event_id = d.event_id
             WHERE d.stream_id > $1 AND d.stream_id <= $2 AND d.type = 'm.room.member' AND d.room_id = ANY($3)
               AND coalesce(was.membership = 'join', false) <> coalesce(now.membership = 'join', false)
             ORDER BY d.stream_id",
        )
        .bind(low)
        .bind(high)
        .bind(&rooms)
        .fetch_all(&mut *connection)
        .await?;
        deltas.extend(rows.into_iter().map(|(position, room_id, user, joined)| MemberDelta {
            position: StreamOrdering(position),
            room_id: room_id.into(),
            user,
            joined,
        }));
        low = high;
    }
    Ok(())
}

/// Those of `wanted` with a joined user now that no delta speaks of.
async fn steady_servers(
    connection: &mut PgConnection,
    wanted: &BTreeSet<(RoomId, ServerName)>,
    deltas: &[MemberDelta],
) -> Result<HashSet<(RoomId, ServerName)>, StoreError> {
    let (rooms, servers): (Vec<&str>, Vec<&str>) = wanted
        .iter()
        .map(|(room, server)| (room.as_str(), server.as_str()))
        .unzip();
    let (delta_rooms, delta_users): (Vec<&str>, Vec<&str>) = deltas
        .iter()
        .map(|delta| (delta.room_id.as_str(), delta.user.as_str()))
        .unzip();
    let rows: Vec<(String, String)> = sqlx::query_as(
        "WITH joined AS MATERIALIZED (
             SELECT room_id, state_key, substr(state_key, strpos(state_key, ':') + 1) AS server
             FROM current_state_events
             WHERE room_id = ANY($1) AND type = 'm.room.member' AND membership = 'join'
         )
         SELECT DISTINCT j.room_id, j.server FROM joined j
         WHERE EXISTS (SELECT 1 FROM unnest($1::text[], $2::text[]) AS w(room_id, server)
                       WHERE w.room_id = j.room_id AND w.server = j.server)
           AND NOT EXISTS (SELECT 1 FROM unnest($3::text[], $4::text[]) AS d(room_id, state_key)
                           WHERE d.room_id = j.room_id AND d.state_key = j.state_key)",
    )
    .bind(&rooms)
    .bind(&servers)
    .bind(&delta_rooms)
    .bind(&delta_users)
    .fetch_all(connection)
    .await?;
    Ok(rows
        .into_iter()
        .map(|(room, server)| (room.into(), server.into()))
        .collect())
}
