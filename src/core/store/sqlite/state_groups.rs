//! Storing state groups, and reading what stands in them.

use std::collections::HashMap;

use sqlx::{Row, SqliteConnection};

use super::{Sqlite, pool::rows, state::with_chain};
use crate::core::{
    id::{EventId, StateGroup},
    state::map::{self, NewStateGroup, StateFilter, StateKey, StateMap},
    store::{
        EventJson, StoreError,
        chain::{self, Chain},
    },
};

// `max()` picks the row that the other columns are taken from: a promise of SQLite's.
const ALL: &str = with_chain!(
    "found AS MATERIALIZED (
         SELECT x.type, x.state_key, x.event_id, max(x.state_group)
         FROM chain c CROSS JOIN state_groups_state x WHERE x.state_group = c.g
         GROUP BY x.type, x.state_key
     )
     SELECT s.length, s.stored, s.leads_up, f.type, f.state_key, f.event_id FROM sound s LEFT JOIN found f ON true"
);

const OF_TYPES: &str = with_chain!(
    "found AS MATERIALIZED (
         SELECT x.type, x.state_key, x.event_id, max(x.state_group)
         FROM chain c CROSS JOIN json_each($2) k CROSS JOIN state_groups_state x
         WHERE x.state_group = c.g AND x.type = k.value
         GROUP BY x.type, x.state_key
     )
     SELECT s.length, s.stored, s.leads_up, f.type, f.state_key, f.event_id FROM sound s LEFT JOIN found f ON true"
);

const UNDER_KEYS: &str = with_chain!(
    "found AS MATERIALIZED (
         SELECT x.type, x.state_key, x.event_id, max(x.state_group)
         FROM chain c CROSS JOIN json_each($2) k CROSS JOIN state_groups_state x
         WHERE x.state_group = c.g AND x.type = k.value ->> 0 AND x.state_key = k.value ->> 1
         GROUP BY x.type, x.state_key
     )
     SELECT s.length, s.stored, s.leads_up, f.type, f.state_key, f.event_id FROM sound s LEFT JOIN found f ON true"
);

impl Sqlite {
    pub(in crate::core::store) async fn store_state_groups(
        &self,
        groups: &[NewStateGroup],
    ) -> Result<Vec<StateGroup>, StoreError> {
        if groups.is_empty() {
            return Ok(Vec::new());
        }
        let mut tx = self.write().await?;
        // Nobody else writes before we commit, so no other process can come to the same ids.
        let newest: Option<i64> = sqlx::query_scalar("SELECT max(id) FROM state_groups")
            .fetch_one(&mut *tx)
            .await?;
        let mut next = newest.unwrap_or_default();
        let mut ids = Vec::with_capacity(groups.len());
        for group in groups {
            next += 1;
            store_group(&mut tx, StateGroup(next), &ids, group).await?;
            ids.push(StateGroup(next));
        }
        tx.commit().await?;
        Ok(ids)
    }

    /// The largest id plus one always is above those there are.
    #[expect(clippy::unused_async, reason = "the other engine has something to do")]
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
        Ok(found
            .into_iter()
            .map(|(event, group)| (event.into(), StateGroup(group)))
            .collect())
    }

    pub(in crate::core::store) async fn events_json(&self, events: &[EventId]) -> Result<Vec<EventJson>, StoreError> {
        let found: Vec<(String, String, bool)> = sqlx::query_as(
            "SELECT j.event_id, j.json, EXISTS (SELECT 1 FROM rejections r WHERE r.event_id = j.event_id)
             FROM event_json j WHERE j.event_id IN (SELECT value FROM json_each($1))",
        )
        .bind(rows(events.iter().map(EventId::as_str)))
        .fetch_all(&self.readers)
        .await?;
        Ok(found
            .into_iter()
            .map(|(event_id, json, rejected)| EventJson {
                event_id: event_id.into(),
                json,
                rejected,
            })
            .collect())
    }
}

/// Stores one group; `earlier` are the ids of those before it in the same call.
async fn store_group(
    connection: &mut SqliteConnection,
    id: StateGroup,
    earlier: &[StateGroup],
    group: &NewStateGroup,
) -> Result<(), StoreError> {
    let mut edge = None;
    let mut state = StateMap::new();
    if let Some(previous) = chain::previous(group, earlier)? {
        let room: Option<String> = sqlx::query_scalar("SELECT room_id FROM state_groups WHERE id = $1")
            .bind(previous.0)
            .fetch_optional(&mut *connection)
            .await?;
        chain::may_follow(previous, room.as_deref(), &group.room_id)?;
        if group.must_be_full(hops(connection, previous).await?) {
            state = read_state(connection, previous, &StateFilter::All).await?;
        } else {
            edge = Some(previous);
        }
    }
    map::apply(&mut state, &group.changes);
    write(connection, id, group, edge, &state).await
}

/// How many changes the group is away from the full one below it. Beyond the bound it is not counted any further.
async fn hops(connection: &mut SqliteConnection, group: StateGroup) -> Result<i64, StoreError> {
    Ok(sqlx::query_scalar(
        "WITH RECURSIVE walk(g, hops) AS (
             SELECT $1, 0
           UNION ALL
             SELECT e.prev_state_group, w.hops + 1 FROM walk w CROSS JOIN state_group_edges e
             WHERE e.state_group = w.g AND w.hops < $2
         )
         SELECT max(hops) FROM walk",
    )
    .bind(group.0)
    .bind(map::MAX_HOPS)
    .fetch_one(connection)
    .await?)
}

async fn write(
    connection: &mut SqliteConnection,
    id: StateGroup,
    group: &NewStateGroup,
    edge: Option<StateGroup>,
    state: &StateMap,
) -> Result<(), StoreError> {
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
    let entries = state.iter().map(|(key, event)| (&*key.kind, &*key.key, event.as_str()));
    sqlx::query(
        "INSERT INTO state_groups_state (state_group, room_id, type, state_key, event_id)
         SELECT $1, $2, value ->> 0, value ->> 1, value ->> 2 FROM json_each($3)",
    )
    .bind(id.0)
    .bind(group.room_id.as_str())
    .bind(rows(entries))
    .execute(&mut *connection)
    .await?;
    Ok(())
}

async fn read_state(
    connection: &mut SqliteConnection,
    group: StateGroup,
    filter: &StateFilter,
) -> Result<StateMap, StoreError> {
    let query = match filter {
        StateFilter::All => sqlx::query(ALL).bind(group.0),
        StateFilter::Types(kinds) => sqlx::query(OF_TYPES)
            .bind(group.0)
            .bind(rows(kinds.iter().map(|kind| &**kind))),
        StateFilter::Keys(keys) => sqlx::query(UNDER_KEYS)
            .bind(group.0)
            .bind(rows(keys.iter().map(|key| (&*key.kind, &*key.key)))),
    };
    let lines = query.fetch_all(connection).await?;
    let mut state = StateMap::new();
    for (index, line) in lines.iter().enumerate() {
        if index == 0 {
            Chain {
                group,
                length: line.try_get(0)?,
                stored: line.try_get(1)?,
                leads_up: line.try_get(2)?,
            }
            .check()?;
        }
        let kind: Option<&str> = line.try_get(3)?;
        if let Some(kind) = kind {
            let key = StateKey::new(kind, line.try_get(4)?);
            state.insert(key, line.try_get::<&str, _>(5)?.into());
        }
    }
    Ok(state)
}
