//! Reading what changed in rooms' membership (`current_state_delta_stream`), as far as our living sticky events are
//! concerned. The decision which servers are new is `core::state::new_servers`.

use std::collections::{BTreeSet, HashSet};

use sqlx::SqliteConnection;

use super::{Sqlite, pool::rows};
use crate::core::{
    clock::Millis,
    id::{RoomId, ServerName, StreamOrdering, domain_of},
    store::{DeltaScan, MemberDelta, StoreError},
};

impl Sqlite {
    pub(in crate::core::store) async fn member_deltas(
        &self,
        after: StreamOrdering,
        up_to: StreamOrdering,
        now: Millis,
    ) -> Result<DeltaScan, StoreError> {
        // One that reads sees the database as it was at its first statement.
        let mut transaction = self.readers.begin().await?;
        let mut scan = DeltaScan::default();
        let rooms: Vec<String> = sqlx::query_scalar(
            "SELECT DISTINCT room_id FROM sticky_events
             WHERE expires_at > $1 AND substr(sender, instr(sender, ':') + 1) = $2",
        )
        .bind(now.0)
        .bind(self.server_name.as_str())
        .fetch_all(&mut *transaction)
        .await?;
        if rooms.is_empty() {
            return Ok(scan);
        }
        read_deltas(&mut transaction, &rows(&rooms), after, up_to, &mut scan.deltas).await?;
        let newcomers = scan.newcomers();
        if newcomers.is_empty() {
            return Ok(scan);
        }
        let joined_rooms: BTreeSet<&str> = newcomers.iter().map(|(room, _)| room.as_str()).collect();
        let rooms = rows(joined_rooms);
        let newest = StreamOrdering(i64::MAX);
        read_deltas(&mut transaction, &rooms, up_to, newest, &mut scan.deltas).await?;
        scan.steady = steady_servers(&mut transaction, &rooms, &newcomers, &scan.deltas).await?;
        Ok(scan)
    }

    pub(in crate::core::store) async fn first_delta_cursor(
        &self,
        now: Millis,
        persisted: StreamOrdering,
    ) -> Result<StreamOrdering, StoreError> {
        let oldest: Option<i64> = sqlx::query_scalar(
            "SELECT min(event_stream_ordering) FROM sticky_events
             WHERE expires_at > $1 AND substr(sender, instr(sender, ':') + 1) = $2",
        )
        .bind(now.0)
        .bind(self.server_name.as_str())
        .fetch_one(&self.readers)
        .await?;
        Ok(oldest.map_or(persisted, |ordering| StreamOrdering(ordering).before().min(persisted)))
    }
}

async fn read_deltas(
    connection: &mut SqliteConnection,
    rooms: &str,
    after: StreamOrdering,
    up_to: StreamOrdering,
    deltas: &mut Vec<MemberDelta>,
) -> Result<(), StoreError> {
    let found: Vec<(i64, String, String, bool)> = sqlx::query_as(
        "SELECT d.stream_id, d.room_id, d.state_key, coalesce(now.membership = 'join', false)
         FROM current_state_delta_stream d
         LEFT JOIN room_memberships was ON was.event_id = d.prev_event_id
         LEFT JOIN room_memberships now ON now.event_id = d.event_id
         WHERE d.stream_id > $1 AND d.stream_id <= $2 AND d.type = 'm.room.member'
           AND d.room_id IN (SELECT value FROM json_each($3))
           AND coalesce(was.membership = 'join', false) <> coalesce(now.membership = 'join', false)
         ORDER BY d.stream_id",
    )
    .bind(after.0)
    .bind(up_to.0)
    .bind(rooms)
    .fetch_all(connection)
    .await?;
    deltas.extend(found.into_iter().map(|(position, room_id, user, joined)| MemberDelta {
        position: StreamOrdering(position),
        room_id: room_id.into(),
        user,
        joined,
    }));
    Ok(())
}

/// Those of `wanted` with a joined user now that no delta speaks of.
async fn steady_servers(
    connection: &mut SqliteConnection,
    rooms: &str,
    wanted: &BTreeSet<(RoomId, ServerName)>,
    deltas: &[MemberDelta],
) -> Result<HashSet<(RoomId, ServerName)>, StoreError> {
    let joined: Vec<(String, String)> = sqlx::query_as(
        "SELECT room_id, state_key FROM current_state_events
         WHERE room_id IN (SELECT value FROM json_each($1)) AND type = 'm.room.member' AND membership = 'join'",
    )
    .bind(rooms)
    .fetch_all(connection)
    .await?;
    let spoken_of: HashSet<(&str, &str)> = deltas
        .iter()
        .map(|delta| (delta.room_id.as_str(), delta.user.as_str()))
        .collect();
    Ok(joined
        .iter()
        .filter(|(room, user)| !spoken_of.contains(&(room.as_str(), user.as_str())))
        .filter_map(|(room, user)| Some((RoomId::from(room.as_str()), ServerName::from(domain_of(user)?))))
        .filter(|pair| wanted.contains(pair))
        .collect())
}
