//! Statements that mean the same on both engines.

use crate::core::replication::stream::Table;

pub(super) const STORED_POSITIONS: &str =
    "SELECT instance_name, stream_id FROM stream_positions WHERE stream_name = $1 ORDER BY 1";

pub(super) const SUCCESSFUL_BEYOND: &str =
    "SELECT destination FROM destinations WHERE last_successful_stream_ordering > $1";

pub(super) const OWED_ROOMS: &str = "SELECT r.room_id, r.stream_ordering, e.event_id
     FROM destination_rooms r LEFT JOIN events e ON e.stream_ordering = r.stream_ordering
     WHERE r.destination = $1 AND r.stream_ordering > $2
     ORDER BY r.stream_ordering LIMIT $3";

/// Two branches and not one OR, because a destination can have backlog before it has a row of its own. Each walks its
/// primary key from `$1` and stops at the limit. A last attempt without an interval is no back-off (Synapse's own query
/// passes over such rows for ever).
pub(super) const DUE_DESTINATIONS: &str = "SELECT destination FROM (
         SELECT d.destination FROM destinations d
         WHERE d.destination > $1
           AND (coalesce(d.retry_last_ts, 0) = 0 OR d.retry_last_ts + coalesce(d.retry_interval, 0) <= $2)
           AND EXISTS (SELECT 1 FROM destination_rooms r
                       WHERE r.destination = d.destination
                         AND r.stream_ordering > coalesce(d.last_successful_stream_ordering, 0))
         ORDER BY 1 LIMIT $3) AS owed
     UNION
     SELECT destination FROM (
         SELECT DISTINCT b.destination FROM destination_rooms_sticky_events_backlog b
         LEFT JOIN destinations d ON d.destination = b.destination
         WHERE $4 AND b.destination > $1
           AND (coalesce(d.retry_last_ts, 0) = 0 OR d.retry_last_ts + coalesce(d.retry_interval, 0) <= $2)
         ORDER BY 1 LIMIT $3) AS backlogged
     ORDER BY 1 LIMIT $3";

pub(super) const FORWARD_EXTREMITIES: &str = "SELECT e.event_id, e.stream_ordering, e.depth
     FROM event_forward_extremities f JOIN events e ON e.event_id = f.event_id
     WHERE f.room_id = $1 AND e.stream_ordering IS NOT NULL
     ORDER BY e.depth DESC, e.stream_ordering DESC LIMIT $2";

/// An update and never an upsert: the row of a purged room must not come back.
pub(super) const ADVANCE_BACKLOG: &str =
    "UPDATE destination_rooms_sticky_events_backlog SET sticky_events_stream_position = $4
     WHERE destination = $1 AND room_id = $2 AND sticky_events_stream_position = $3";

/// First in a checkpoint, and also if the cursor has not moved: it is the proof that no other configuration has taken over.
pub(super) const MOVE_CURSOR: &str =
    "UPDATE federation_stream_position SET stream_id = $2 WHERE type = 'events' AND instance_name = $1";

pub(super) const SET_LAST_SUCCESSFUL: &str =
    "INSERT INTO destinations (destination, last_successful_stream_ordering) VALUES ($1, $2)
     ON CONFLICT (destination) DO UPDATE
     SET last_successful_stream_ordering = EXCLUDED.last_successful_stream_ordering";

/// The greatest position in any of the tables.
pub(super) fn greatest_position<'a>(tables: impl IntoIterator<Item = &'a Table>) -> String {
    let tables: Vec<String> = tables
        .into_iter()
        .map(|Table { name, id, .. }| format!("SELECT CAST(max({id}) AS bigint) AS position FROM {name}"))
        .collect();
    format!("SELECT max(position) FROM ({}) AS tables", tables.join(" UNION ALL "))
}

/// The first `$2` positions from `$1` on, each with its writer.
pub(super) fn positions_from<'a>(tables: impl IntoIterator<Item = &'a Table>) -> String {
    // Limited table by table, so that each is read along its index and no further.
    let tables: Vec<String> = tables
        .into_iter()
        .map(|Table { name, id, .. }| {
            format!(
                "SELECT * FROM (SELECT DISTINCT CAST({id} AS bigint) AS id, instance_name FROM {name} WHERE {id} >= $1 \
                                ORDER BY 1, 2 NULLS LAST LIMIT $2) AS of_{name}"
            )
        })
        .collect();
    format!("{} ORDER BY 1, 2 NULLS LAST LIMIT $2", tables.join(" UNION "))
}
