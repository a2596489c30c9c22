//! Storing state groups, and reading what stands in them.

use std::collections::HashMap;

use sqlx::{Row, SqliteConnection};

use super::{Sqlite, pool::rows, state::with_chain};
use crate::core::{
    id::{EventId, RoomId, StateGroup},
    state::map::{self, NewStateGroup, PreviousGroup, StateFilter, StateKey, StateMap},
    store::{EventJson, StoreError, chain::Chain},
};

/// `max()` picks the row that the other columns are taken from: a promise of SQLite's.
const ALL: &str = with_chain!(
    "found AS MATERIALIZED (
         SELECT x.type, x.state_key, x.event_id, max(x.state_group)
         FROM chain c CROSS JOIN state_groups_state x
         WHERE x.state_group = c.g
         GROUP BY x.type, x.state_key
     )
     SELECT s.length, s.stored, s.leads_up, f.type, f.state_key, f.event_id FROM sound s LEFT JOIN found f ON true"
);

const OF_TYPES: &str = with_chain!(
    "found AS MATERIALIZED (
         SELECT x.type, x.state_key, x.event_id, max(x.state_group)
         FROM json_each($2) k CROSS JOIN chain c CROSS JOIN state_groups_state x
         WHERE x.state_group = c.g AND x.type = k.value
         GROUP BY x.type, x.state_key
     )
     SELECT s.length, s.stored, s.leads_up, f.type, f.state_key, f.event_id FROM sound s LEFT JOIN found f ON true"
);

const UNDER_KEYS: &str = with_chain!(
    "found AS MATERIALIZED (
         SELECT x.type, x.state_key, x.event_id, max(x.state_group)
         FROM json_each($2) k CROSS JOIN chain c CROSS JOIN state_groups_state x
         WHERE x.state_group = c.g AND x.type = k.value ->> 0 AND x.state_key = k.value ->> 1
         GROUP BY x.type, x.state_key
     )
     SELECT s.length, s.stored, s.leads_up, f.type, f.state_key, f.event_id FROM sound s LEFT JOIN found f ON true"
);

/// How many changes the group is away from the full one below it.
const HOPS: &str = "WITH RECURSIVE walk(g, hops) AS (
         SELECT $1, 0
       UNION ALL
         SELECT e.prev_state_group, w.hops + 1 FROM walk w CROSS JOIN state_group_edges e
         WHERE e.state_group = w.g AND w.hops < $2
     )
     SELECT max(hops) FROM walk";

impl Sqlite {
    pub(in crate::core::store) async fn store_state_groups(
        &self,
        groups: &[NewStateGroup],
    ) -> Result<Vec<StateGroup>, StoreError> {
        if groups.is_empty() {
            return Ok(Vec::new());
        }
        let mut transaction = self.write().await?;
        let greatest: i64 = sqlx::query_scalar("SELECT coalesce(max(id), 0) FROM state_groups")
            .fetch_one(&mut *transaction)
            .await?;
        let ids: Vec<StateGroup> = (greatest + 1..).map(StateGroup).take(groups.len()).collect();
        for (index, group) in groups.iter().enumerate() {
            store_group(&mut transaction, ids[index], &ids[..index], group).await?;
        }
        transaction.commit().await?;
        Ok(ids)
    }

    /// Ids are one more than the greatest, so there is nothing to begin.
    #[expect(clippy::unused_async, reason = "the other engine's is")]
    pub(in crate::core::store) async fn begin_state_group_ids(&self) -> Result<(), StoreError> {
        Ok(())
    }

    pub(in crate::core::store) async fn group_state(
        &self,
        group: StateGroup,
        filter: &StateFilter,
    ) -> Result<StateMap, StoreError> {
        read_state(&mut *self.readers.acquire().await?, group, filter).await
    }

    pub(in crate::core::store) async fn groups_after(
        &self,
        events: &[EventId],
    ) -> Result<HashMap<EventId, StateGroup>, StoreError> {
        let found: Vec<(String, i64)> = sqlx::query_as(
            "SELECT event_id, state_group FROM event_to_state_groups
             WHERE event_id IN (SELECT value FROM json_each($1))",
        )
        .bind(rows(events.iter().map(EventId::as_str)))
        .fetch_all(&self.readers)
        .await?;
        let found = found.into_iter();
        Ok(found.map(|(event, group)| (event.into(), StateGroup(group))).collect())
    }

    pub(in crate::core::store) async fn events_json(&self, events: &[EventId]) -> Result<Vec<EventJson>, StoreError> {
        let found: Vec<(String, String, bool)> = sqlx::query_as(
            "SELECT j.event_id, j.json, EXISTS (SELECT 1 FROM rejections r WHERE r.event_id = j.event_id)
             FROM event_json j WHERE j.event_id IN (SELECT value FROM json_each($1))",
        )
        .bind(rows(events.iter().map(EventId::as_str)))
        .fetch_all(&self.readers)
        .await?;
        let event = |(event_id, json, rejected): (String, String, bool)| EventJson {
            event_id: event_id.into(),
            json,
            rejected,
        };
        Ok(found.into_iter().map(event).collect())
    }
}

/// Stores one group; `earlier` are the ids of those before it in the same call.
async fn store_group(
    connection: &mut SqliteConnection,
    id: StateGroup,
    earlier: &[StateGroup],
    group: &NewStateGroup,
) -> Result<(), StoreError> {
    let previous = match group.previous {
        None => None,
        Some(PreviousGroup::Stored(previous)) => Some(previous),
        Some(PreviousGroup::Earlier(index)) => {
            Some(*earlier.get(index).ok_or_else(|| damaged(index, "a group that another is to follow is not stored"))?)
        }
    };
    let mut edge = None;
    let mut state = StateMap::new();
    if let Some(previous) = previous {
        check_previous(connection, previous, &group.room_id).await?;
        let hops = sqlx::query_scalar(HOPS).bind(previous.0).bind(map::MAX_HOPS);
        if group.must_be_full(hops.fetch_one(&mut *connection).await?) {
            state = read_state(connection, previous, &StateFilter::All).await?;
        } else {
            edge = Some(previous);
        }
    }
    map::apply(&mut state, &group.changes);
    sqlx::query("INSERT INTO state_groups (id, room_id, event_id) VALUES ($1, $2, $3)")
        .bind(id.0)
        .bind(group.room_id.as_str())
        .bind(group.event_id.as_str())
        .execute(&mut *connection)
        .await?;
    if let Some(previous) = edge {
        sqlx::query("INSERT INTO state_group_edges (state_group, prev_state_group) VALUES ($1, $2)")
            .bind(id.0)
            .bind(previous.0)
            .execute(&mut *connection)
            .await?;
    }
    sqlx::query(
        "INSERT INTO state_groups_state (state_group, room_id, type, state_key, event_id)
         SELECT $1, $2, value ->> 0, value ->> 1, value ->> 2 FROM json_each($3)",
    )
    .bind(id.0)
    .bind(group.room_id.as_str())
    .bind(rows(state.iter().map(|(key, event)| (&*key.kind, &*key.key, event.as_str()))))
    .execute(&mut *connection)
    .await?;
    Ok(())
}

async fn check_previous(
    connection: &mut SqliteConnection,
    previous: StateGroup,
    room_id: &RoomId,
) -> Result<(), StoreError> {
    let room: Option<String> = sqlx::query_scalar("SELECT room_id FROM state_groups WHERE id = $1")
        .bind(previous.0)
        .fetch_optional(connection)
        .await?;
    match room {
        None => Err(damaged(previous, "a group that another is to follow is not stored")),
        Some(room) if room != room_id.as_str() => {
            Err(damaged(previous, &format!("a group of {room_id} is to follow it, and it is of {room}")))
        }
        Some(_) => Ok(()),
    }
}

fn damaged(key: impl std::fmt::Display, what: &str) -> StoreError {
    StoreError::Damaged {
        table: "state_groups".into(),
        key: key.to_string(),
        what: what.to_owned(),
    }
}

async fn read_state(
    connection: &mut SqliteConnection,
    group: StateGroup,
    filter: &StateFilter,
) -> Result<StateMap, StoreError> {
    let query = match filter {
        StateFilter::All => sqlx::query(ALL).bind(group.0),
        StateFilter::Types(kinds) => sqlx::query(OF_TYPES).bind(group.0).bind(rows(kinds.iter().map(|kind| &**kind))),
        StateFilter::Keys(keys) => {
            let keys = rows(keys.iter().map(|key| (&*key.kind, &*key.key)));
            sqlx::query(UNDER_KEYS).bind(group.0).bind(keys)
        }
    };
    let found = query.fetch_all(connection).await?;
    let mut state = StateMap::new();
    for (index, row) in found.iter().enumerate() {
        if index == 0 {
            Chain {
                group,
                length: row.try_get(0)?,
                stored: row.try_get(1)?,
                leads_up: row.try_get(2)?,
            }
            .check()?;
        }
        let kind: Option<&str> = row.try_get(3)?;
        if let Some(kind) = kind {
            state.insert(StateKey::new(kind, row.try_get(4)?), row.try_get::<&str, _>(5)?.into());
        }
    }
    Ok(state)
}
