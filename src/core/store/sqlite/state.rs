//! Reading state groups.
//!
//! A group is a full snapshot, or a change to the group its edge points to; the value of a key is the row found first on
//! the way from the group along the edges. Ids shrink along that way, so "found first" is "highest group", and only edges
//! that lead down are followed. `CROSS JOIN` is SQLite's way to say that the chain is walked first.

use super::{Sqlite, pool::rows};
use crate::core::{
    id::{EventId, RoomId, ServerName, StateGroup},
    store::{HostChanges, StoreError, chain::Chain},
};

macro_rules! with_chain {
    ($rest:literal) => {
        concat!(
            "WITH RECURSIVE chain(g) AS (
                 SELECT $1
               UNION
                 SELECT e.prev_state_group FROM chain c CROSS JOIN state_group_edges e
                 WHERE e.state_group = c.g AND e.prev_state_group < c.g
                 LIMIT 10001
             ),
             sound AS MATERIALIZED (
                 SELECT count(*) AS length, count(s.id) AS stored,
                        coalesce(max(e.prev_state_group >= c.g), false) AS leads_up
                 FROM chain c
                 LEFT JOIN state_groups s ON s.id = c.g
                 LEFT JOIN state_group_edges e ON e.state_group = c.g
             ), ",
            $rest
        )
    };
}

/// `max()` picks the row that the other columns of `changed` are taken from: a promise of SQLite's.
const HOST_CHANGES: &str = with_chain!(
    "base AS MATERIALIZED (SELECT max(g) AS g FROM chain WHERE g IN (SELECT value FROM json_each($2))),
     changed AS MATERIALIZED (
         SELECT s.state_key, s.event_id, max(s.state_group)
         FROM chain c CROSS JOIN state_groups_state s
         WHERE s.state_group = c.g AND s.type = 'm.room.member' AND c.g > coalesce((SELECT g FROM base), 0)
         GROUP BY s.state_key
     ),
     change AS (
         SELECT substr(c.state_key, instr(c.state_key, ':') + 1) AS server,
                sum(coalesce((SELECT m.membership = 'join' FROM room_memberships m WHERE m.event_id = c.event_id), 0)
                    - coalesce((
                        SELECT m.membership = 'join' FROM room_memberships m WHERE m.event_id = (
                            SELECT x.event_id FROM chain b CROSS JOIN state_groups_state x
                            WHERE b.g <= (SELECT g FROM base)
                              AND x.state_group = b.g AND x.type = 'm.room.member' AND x.state_key = c.state_key
                            ORDER BY x.state_group DESC LIMIT 1)), 0)) AS users
         FROM changed c WHERE instr(c.state_key, ':') > 0
         GROUP BY server
     )
     SELECT s.length, s.stored, s.leads_up, b.g, c.server, c.users
     FROM sound s CROSS JOIN base b LEFT JOIN change c ON c.users <> 0"
);

const STATE_EVENT: &str = with_chain!(
    "found AS MATERIALIZED (
         SELECT x.event_id FROM chain c CROSS JOIN state_groups_state x
         WHERE x.state_group = c.g AND x.type = $2 AND x.state_key = $3
         ORDER BY x.state_group DESC LIMIT 1
     )
     SELECT s.length, s.stored, s.leads_up, f.event_id, j.json
     FROM sound s LEFT JOIN found f ON true LEFT JOIN event_json j ON j.event_id = f.event_id"
);

const SERVER_HAS_MEMBER: &str = with_chain!(
    "member AS MATERIALIZED (
         SELECT x.event_id, max(x.state_group) FROM chain c CROSS JOIN state_groups_state x
         WHERE x.state_group = c.g AND x.type = 'm.room.member'
           AND substr(x.state_key, instr(x.state_key, ':') + 1) = $2
         GROUP BY x.state_key
     )
     SELECT s.length, s.stored, s.leads_up,
            EXISTS (SELECT 1 FROM member x JOIN room_memberships m ON m.event_id = x.event_id
                    WHERE m.membership IN (SELECT value FROM json_each($3)))
     FROM sound s"
);

impl Sqlite {
    pub(in crate::core::store) async fn host_changes(
        &self,
        group: StateGroup,
        known: &[StateGroup],
    ) -> Result<HostChanges, StoreError> {
        type Line = (i64, i64, bool, Option<i64>, Option<String>, Option<i64>);
        let lines: Vec<Line> = sqlx::query_as(HOST_CHANGES)
            .bind(group.0)
            .bind(rows(known.iter().map(|group| group.0)))
            .fetch_all(&self.readers)
            .await?;
        let mut found = HostChanges {
            base: None,
            changes: Vec::with_capacity(lines.len()),
        };
        for (length, stored, leads_up, base, server, users) in lines {
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
            .fetch_one(&self.readers)
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
            .bind(rows(memberships))
            .fetch_one(&self.readers)
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
        let found: Vec<(String, String, String)> = sqlx::query_as(
            "SELECT event_id, user_id, membership FROM room_memberships
             WHERE event_id IN (SELECT value FROM json_each($1))",
        )
        .bind(rows(ids.iter().map(|id| id.as_str())))
        .fetch_all(&self.readers)
        .await?;
        Ok(found
            .into_iter()
            .map(|(id, user, membership)| (id.into(), user, membership))
            .collect())
    }

    pub(in crate::core::store) async fn joined_hosts_now(
        &self,
        room_id: &RoomId,
    ) -> Result<Vec<ServerName>, StoreError> {
        let hosts: Vec<String> = sqlx::query_scalar(
            "SELECT DISTINCT substr(state_key, instr(state_key, ':') + 1) AS server FROM current_state_events
             WHERE room_id = $1 AND type = 'm.room.member' AND membership = 'join' AND instr(state_key, ':') > 0
             ORDER BY server",
        )
        .bind(room_id.as_str())
        .fetch_all(&self.readers)
        .await?;
        Ok(hosts.into_iter().map(ServerName::from).collect())
    }
}
