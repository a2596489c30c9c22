//! Storing state groups, and reading what stands in them.

use std::collections::HashMap;

use sqlx::{PgConnection, Row};

use super::{
    Postgres,
    pool::{CHUNK, retrying},
    state::with_chain,
};
use crate::core::{
    id::{EventId, RoomId, StateGroup},
    state::map::{self, NewStateGroup, StateFilter, StateMap},
    store::{
        EventJson, StoreError,
        chain::{self, Chain},
    },
};

const ALL: &str = with_chain!(
    "found AS MATERIALIZED (
         SELECT DISTINCT ON (s.type, s.state_key) s.type, s.state_key, s.event_id
         FROM chain c CROSS JOIN LATERAL (
             SELECT x.state_group, x.type, x.state_key, x.event_id FROM state_groups_state x
             WHERE x.state_group = c.g OFFSET 0) s
         ORDER BY s.type, s.state_key, s.state_group DESC
     )
     SELECT s.length, s.stored, s.leads_up, f.type, f.state_key, f.event_id FROM sound s LEFT JOIN found f ON true"
);

const OF_TYPES: &str = with_chain!(
    "found AS MATERIALIZED (
         SELECT DISTINCT ON (s.type, s.state_key) s.type, s.state_key, s.event_id
         FROM chain c CROSS JOIN LATERAL (
             SELECT x.state_group, x.type, x.state_key, x.event_id FROM state_groups_state x
             WHERE x.state_group = c.g AND x.type = ANY($2) OFFSET 0) s
         ORDER BY s.type, s.state_key, s.state_group DESC
     )
     SELECT s.length, s.stored, s.leads_up, f.type, f.state_key, f.event_id FROM sound s LEFT JOIN found f ON true"
);

const UNDER_KEYS: &str = with_chain!(
    "found AS MATERIALIZED (
         SELECT DISTINCT ON (k.type, k.state_key) k.type, k.state_key, s.event_id
         FROM unnest($2::text[], $3::text[]) AS k(type, state_key) CROSS JOIN chain c CROSS JOIN LATERAL (
             SELECT x.state_group, x.event_id FROM state_groups_state x
             WHERE x.state_group = c.g AND x.type = k.type AND x.state_key = k.state_key OFFSET 0) s
         ORDER BY k.type, k.state_key, s.state_group DESC
     )
     SELECT s.length, s.stored, s.leads_up, f.type, f.state_key, f.event_id FROM sound s LEFT JOIN found f ON true"
);

impl Postgres {
    pub(in crate::core::store) async fn store_state_groups(
        &self,
        groups: &[NewStateGroup],
    ) -> Result<Vec<StateGroup>, StoreError> {
        if groups.is_empty() {
            return Ok(Vec::new());
        }
        retrying(|| async {
            let mut transaction = self.pool.begin().await?;
            let mut ids = new_ids(&mut transaction, groups.len()).await?;
            ids.sort_unstable();
            for (index, group) in groups.iter().enumerate() {
                store_group(&mut transaction, ids[index], &ids[..index], group).await?;
            }
            transaction.commit().await?;
            Ok(ids)
        })
        .await
    }

    pub(in crate::core::store) async fn begin_state_group_ids(&self) -> Result<(), StoreError> {
        sqlx::query(
            "SELECT setval('state_group_id_seq', greatest(max(id), (SELECT last_value FROM state_group_id_seq)))
             FROM state_groups HAVING max(id) IS NOT NULL AND to_regclass('schema_version') IS NULL",
        )
        .execute(&self.pool)
        .await?;
        Ok(())
    }

    pub(in crate::core::store) async fn group_state(
        &self,
        group: StateGroup,
        filter: &StateFilter,
    ) -> Result<StateMap, StoreError> {
        read_state(&mut *self.pool.acquire().await?, group, filter).await
    }

    pub(in crate::core::store) async fn groups_after(
        &self,
        events: &[EventId],
    ) -> Result<HashMap<EventId, StateGroup>, StoreError> {
        let names: Vec<&str> = events.iter().map(EventId::as_str).collect();
        let rows: Vec<(String, i64)> =
            sqlx::query_as("SELECT event_id, state_group FROM event_to_state_groups WHERE event_id = ANY($1)")
                .bind(&names)
                .fetch_all(&self.pool)
                .await?;
        Ok(rows
            .into_iter()
            .map(|(event, group)| (event.into(), StateGroup(group)))
            .collect())
    }

    pub(in crate::core::store) async fn events_json(&self, events: &[EventId]) -> Result<Vec<EventJson>, StoreError> {
        let names: Vec<&str> = events.iter().map(EventId::as_str).collect();
        let rows: Vec<(String, String, bool)> = sqlx::query_as(
            "SELECT j.event_id, j.json, EXISTS (SELECT 1 FROM rejections r WHERE r.event_id = j.event_id)
             FROM event_json j WHERE j.event_id = ANY($1)",
        )
        .bind(&names)
        .fetch_all(&self.pool)
        .await?;
        Ok(rows
            .into_iter()
            .map(|(event_id, json, rejected)| EventJson {
                event_id: event_id.into(),
                json,
                rejected,
            })
            .collect())
    }
}

async fn new_ids(connection: &mut PgConnection, count: usize) -> Result<Vec<StateGroup>, StoreError> {
    let ids: Vec<i64> = sqlx::query_scalar("SELECT nextval('state_group_id_seq') FROM generate_series(1, $1)")
        .bind(i64::try_from(count).unwrap_or(i64::MAX))
        .fetch_all(connection)
        .await?;
    Ok(ids.into_iter().map(StateGroup).collect())
}

/// Stores one group; `earlier` are the ids of those before it in the same call.
async fn store_group(
    connection: &mut PgConnection,
    id: StateGroup,
    earlier: &[StateGroup],
    group: &NewStateGroup,
) -> Result<(), StoreError> {
    let mut edge = None;
    let mut rows = StateMap::new();
    if let Some(previous) = chain::previous(group, earlier)? {
        check_previous(connection, id, previous, &group.room_id).await?;
        if group.must_be_full(hops(connection, previous).await?) {
            rows = read_state(connection, previous, &StateFilter::All).await?;
        } else {
            edge = Some(previous);
        }
    }
    map::apply(&mut rows, &group.changes);
    write(connection, id, group, edge, &rows).await
}

/// Also keeps it from being deleted before we commit.
async fn check_previous(
    connection: &mut PgConnection,
    id: StateGroup,
    previous: StateGroup,
    room_id: &RoomId,
) -> Result<(), StoreError> {
    let room: Option<String> = sqlx::query_scalar("SELECT room_id FROM state_groups WHERE id = $1 FOR SHARE")
        .bind(previous.0)
        .fetch_optional(connection)
        .await?;
    chain::may_follow(previous, room.as_deref(), room_id)?;
    if previous >= id {
        return Err(StoreError::Incompatible(format!(
            "sequence state_group_id_seq gave {id}, and there is a state group {previous}; stop all writers and run: \
             SELECT setval('state_group_id_seq', (SELECT max(id) FROM state_groups))"
        )));
    }
    Ok(())
}

/// How many changes the group is away from the full one below it. Beyond the bound it is not counted any further.
async fn hops(connection: &mut PgConnection, group: StateGroup) -> Result<i64, StoreError> {
    Ok(sqlx::query_scalar(
        "WITH RECURSIVE walk(g, hops) AS (
             SELECT $1::bigint, 0::bigint
           UNION ALL
             SELECT p.g, w.hops + 1 FROM walk w CROSS JOIN LATERAL (
                 SELECT e.prev_state_group AS g FROM state_group_edges e WHERE e.state_group = w.g OFFSET 0) p
             WHERE w.hops < $2
         )
         SELECT max(hops) FROM walk",
    )
    .bind(group.0)
    .bind(map::MAX_HOPS)
    .fetch_one(connection)
    .await?)
}

async fn write(
    connection: &mut PgConnection,
    id: StateGroup,
    group: &NewStateGroup,
    edge: Option<StateGroup>,
    rows: &StateMap,
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
    let rows: Vec<_> = rows.iter().collect();
    for rows in rows.chunks(CHUNK) {
        let kinds: Vec<&str> = rows.iter().map(|(key, _)| &*key.kind).collect();
        let keys: Vec<&str> = rows.iter().map(|(key, _)| &*key.key).collect();
        let events: Vec<&str> = rows.iter().map(|(_, event)| event.as_str()).collect();
        sqlx::query(
            "INSERT INTO state_groups_state (state_group, room_id, type, state_key, event_id)
             SELECT $1, $2, r.* FROM unnest($3::text[], $4::text[], $5::text[]) AS r",
        )
        .bind(id.0)
        .bind(group.room_id.as_str())
        .bind(&kinds)
        .bind(&keys)
        .bind(&events)
        .execute(&mut *connection)
        .await?;
    }
    Ok(())
}

async fn read_state(
    connection: &mut PgConnection,
    group: StateGroup,
    filter: &StateFilter,
) -> Result<StateMap, StoreError> {
    let (kinds, keys): (Vec<&str>, Vec<&str>) = match filter {
        StateFilter::All => Default::default(),
        StateFilter::Types(kinds) => (kinds.iter().map(|kind| &**kind).collect(), Vec::new()),
        StateFilter::Keys(keys) => keys.iter().map(|key| (&*key.kind, &*key.key)).unzip(),
    };
    let query = match filter {
        StateFilter::All => sqlx::query(ALL).bind(group.0),
        StateFilter::Types(_) => sqlx::query(OF_TYPES).bind(group.0).bind(&kinds),
        StateFilter::Keys(_) => sqlx::query(UNDER_KEYS).bind(group.0).bind(&kinds).bind(&keys),
    };
    let rows = query.fetch_all(connection).await?;
    let mut state = StateMap::new();
    for (index, row) in rows.iter().enumerate() {
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
            state.insert(
                map::StateKey::new(kind, row.try_get(4)?),
                row.try_get::<&str, _>(5)?.into(),
            );
        }
    }
    Ok(state)
}
