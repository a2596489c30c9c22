//! Reading state groups.
//!
//! A group is a full snapshot, or a change to the group its edge points to; the value of a key is the row found first on
//! the way from the group along the edges. Ids shrink along that way (Synapse draws them from a sequence), so "found first"
//! is "highest group", and only edges that lead down are followed: one that leads up is damage, and no cycle can hold us.
//! All that is read of a group is read in one statement, that is in one snapshot, because Synapse may turn a change into a
//! full group meanwhile.
//!
//! `LATERAL (... OFFSET 0)` keeps PostgreSQL from scanning whole tables: it cannot know how short a chain is, and these
//! tables hold hundreds of millions of rows.

use super::Postgres;
use crate::core::{
    id::{EventId, RoomId, ServerName, StateGroup},
    store::{HostChanges, StoreError, chain::Chain},
};

macro_rules! with_chain {
    ($rest:literal) => {
        concat!(
            "WITH RECURSIVE walk(g) AS (
                 SELECT $1::bigint
               UNION
                 SELECT p.g FROM walk w CROSS JOIN LATERAL (
                     SELECT e.prev_state_group AS g FROM state_group_edges e
                     WHERE e.state_group = w.g AND e.prev_state_group < w.g OFFSET 0) p
             ),
             chain AS MATERIALIZED (SELECT g FROM walk LIMIT 10001),
             sound AS MATERIALIZED (
                 SELECT count(*) AS length,
                        count((SELECT s.id FROM state_groups s WHERE s.id = c.g)) AS stored,
                        coalesce(bool_or((SELECT max(e.prev_state_group) FROM state_group_edges e
                                          WHERE e.state_group = c.g) >= c.g), false) AS leads_up
                 FROM chain c
             ), ",
            $rest
        )
    };
}

const HOST_CHANGES: &str = with_chain!(
    "base AS MATERIALIZED (SELECT max(g) AS g FROM chain WHERE g = ANY($2)),
     changed AS MATERIALIZED (
         SELECT DISTINCT ON (s.state_key) s.state_key, s.event_id
         FROM chain c CROSS JOIN LATERAL (
             SELECT x.state_group, x.state_key, x.event_id FROM state_groups_state x
             WHERE x.state_group = c.g AND x.type = 'm.room.member' OFFSET 0) s
         WHERE c.g > coalesce((SELECT g FROM base), 0)
         ORDER BY s.state_key, s.state_group DESC
     ),
     change AS (
         SELECT substr(c.state_key, strpos(c.state_key, ':') + 1) AS server,
                count(*) FILTER (WHERE now.membership = 'join') - count(*) FILTER (WHERE was.membership = 'join') AS users
         FROM changed c
         LEFT JOIN LATERAL (
             SELECT m.membership FROM room_memberships m WHERE m.event_id = c.event_id OFFSET 0) now ON true
         LEFT JOIN LATERAL (
             SELECT m.membership FROM (
                 SELECT x.event_id FROM chain b CROSS JOIN LATERAL (
                     SELECT x.state_group, x.event_id FROM state_groups_state x
                     WHERE x.state_group = b.g AND x.type = 'm.room.member' AND x.state_key = c.state_key OFFSET 0) x
                 WHERE (SELECT g FROM base) IS NOT NULL AND b.g <= (SELECT g FROM base)
                 ORDER BY x.state_group DESC LIMIT 1) o
             JOIN room_memberships m ON m.event_id = o.event_id OFFSET 0) was ON true
         WHERE strpos(c.state_key, ':') > 0
         GROUP BY server
     )
     SELECT s.length, s.stored, s.leads_up, b.g, c.server, c.users
     FROM sound s CROSS JOIN base b LEFT JOIN change c ON c.users <> 0"
);

const STATE_EVENT: &str = with_chain!(
    "found AS MATERIALIZED (
         SELECT x.event_id FROM chain c CROSS JOIN LATERAL (
             SELECT x.state_group, x.event_id FROM state_groups_state x
             WHERE x.state_group = c.g AND x.type = $2 AND x.state_key = $3 OFFSET 0) x
         ORDER BY x.state_group DESC LIMIT 1
     )
     SELECT s.length, s.stored, s.leads_up, f.event_id, j.json
     FROM sound s LEFT JOIN found f ON true LEFT JOIN event_json j ON j.event_id = f.event_id"
);

const SERVER_HAS_MEMBER: &str = with_chain!(
    "member AS MATERIALIZED (
         SELECT DISTINCT ON (s.state_key) s.event_id
         FROM chain c CROSS JOIN LATERAL (
             SELECT x.state_group, x.state_key, x.event_id FROM state_groups_state x
             WHERE x.state_group = c.g AND x.type = 'm.room.member'
               AND substr(x.state_key, strpos(x.state_key, ':') + 1) = $2 OFFSET 0) s
         ORDER BY s.state_key, s.state_group DESC
     )
     SELECT s.length, s.stored, s.leads_up,
            (SELECT count(*) > 0 FROM member x JOIN room_memberships m ON m.event_id = x.event_id
             WHERE m.membership = ANY($3))
     FROM sound s"
);

impl Postgres {
    pub(in crate::core::store) async fn host_changes(
        &self,
        group: StateGroup,
        known: &[StateGroup],
    ) -> Result<HostChanges, StoreError> {
        type Line = (i64, i64, bool, Option<i64>, Option<String>, Option<i64>);
        let known: Vec<i64> = known.iter().map(|group| group.0).collect();
        let rows: Vec<Line> = sqlx::query_as(HOST_CHANGES)
            .bind(group.0)
            .bind(&known)
            .fetch_all(&self.pool)
            .await?;
        let mut found = HostChanges {
            base: None,
            changes: Vec::with_capacity(rows.len()),
        };
        for (length, stored, leads_up, base, server, users) in rows {
            Chain {
                group,
                length,
                stored,
                leads_up,
            }
            .check()?;
            found.base = base.map(StateGroup);
            found.changes.extend(server.map(ServerName::from).zip(users));
        }
        Ok(found)
    }

    pub(in crate::core::store) async fn state_event(
        &self,
        group: StateGroup,
        kind: &str,
        state_key: &str,
    ) -> Result<Option<String>, StoreError> {
        type Line = (i64, i64, bool, Option<String>, Option<String>);
        let (length, stored, leads_up, event_id, json): Line = sqlx::query_as(STATE_EVENT)
            .bind(group.0)
            .bind(kind)
            .bind(state_key)
            .fetch_one(&self.pool)
            .await?;
        Chain {
            group,
            length,
            stored,
            leads_up,
        }
        .check()?;
        match (event_id, json) {
            (Some(key), None) => Err(StoreError::Damaged {
                table: "event_json".to_owned(),
                key,
                what: "a state event has no JSON".to_owned(),
            }),
            (_, json) => Ok(json),
        }
    }

    pub(in crate::core::store) async fn server_has_member(
        &self,
        group: StateGroup,
        server: &ServerName,
        memberships: &[&str],
    ) -> Result<bool, StoreError> {
        let (length, stored, leads_up, has): (i64, i64, bool, bool) = sqlx::query_as(SERVER_HAS_MEMBER)
            .bind(group.0)
            .bind(server.as_str())
            .bind(memberships)
            .fetch_one(&self.pool)
            .await?;
        Chain {
            group,
            length,
            stored,
            leads_up,
        }
        .check()?;
        Ok(has)
    }

    pub(in crate::core::store) async fn memberships(
        &self,
        ids: &[&EventId],
    ) -> Result<Vec<(EventId, String, String)>, StoreError> {
        let names: Vec<&str> = ids.iter().map(|id| id.as_str()).collect();
        let rows: Vec<(String, String, String)> =
            sqlx::query_as("SELECT event_id, user_id, membership FROM room_memberships WHERE event_id = ANY($1)")
                .bind(&names)
                .fetch_all(&self.pool)
                .await?;
        Ok(rows
            .into_iter()
            .map(|(id, user, membership)| (id.into(), user, membership))
            .collect())
    }

    pub(in crate::core::store) async fn joined_hosts_now(
        &self,
        room_id: &RoomId,
    ) -> Result<Vec<ServerName>, StoreError> {
        let rows: Vec<String> = sqlx::query_scalar(
            "SELECT DISTINCT substr(state_key, strpos(state_key, ':') + 1) AS server FROM current_state_events
             WHERE room_id = $1 AND type = 'm.room.member' AND membership = 'join' AND strpos(state_key, ':') > 0
             ORDER BY server",
        )
        .bind(room_id.as_str())
        .fetch_all(&self.pool)
        .await?;
        Ok(rows.into_iter().map(ServerName::from).collect())
    }

    pub(in crate::core::store) async fn partial_room_servers(
        &self,
        room_id: &RoomId,
    ) -> Result<Vec<ServerName>, StoreError> {
        let rows: Vec<String> = sqlx::query_scalar(
            "SELECT server_name FROM partial_state_rooms_servers WHERE room_id = $1 ORDER BY server_name",
        )
        .bind(room_id.as_str())
        .fetch_all(&self.pool)
        .await?;
        Ok(rows.into_iter().map(ServerName::from).collect())
    }
}
