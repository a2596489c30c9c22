//! Tables as others follow them: the rows between two positions of their stream, in order.

use super::Sqlite;
use crate::core::{id::Token, replication::feed::Row, store::StoreError};

/// A table to which rows are only added, each with a position.
#[derive(Debug)]
pub struct FollowedTable {
    /// Its name.
    pub name: &'static str,
    /// Its columns.
    pub columns: &'static [&'static str],
    /// Gives each row's position, and its cells as an array in JSON.
    sql: &'static str,
}

/// Every event that was stored, at its place in the stream.
pub const EVENTS: FollowedTable = FollowedTable {
    name: "events",
    columns: &[
        "stream_ordering",
        "event_id",
        "room_id",
        "type",
        "state_key",
        "sender",
        "outlier",
        "rejected",
        "json",
    ],
    sql: "SELECT e.stream_ordering,
              json_array(e.stream_ordering, e.event_id, e.room_id, e.type, e.state_key, e.sender,
                         json(iif(e.outlier, 'true', 'false')), json(iif(x.event_id IS NULL, 'false', 'true')), j.json)
          FROM events e
          JOIN event_json j ON j.event_id = e.event_id
          LEFT JOIN rejections x ON x.event_id = e.event_id
          WHERE e.stream_ordering > $1 AND e.stream_ordering <= $2
          ORDER BY e.stream_ordering LIMIT $3",
};

/// Every change of a room's current state, at the place in the stream of the events that made it.
pub const CURRENT_STATE_DELTAS: FollowedTable = FollowedTable {
    name: "current_state_delta_stream",
    columns: &["stream_id", "room_id", "type", "state_key", "event_id", "prev_event_id"],
    sql: "SELECT stream_id, json_array(stream_id, room_id, type, state_key, event_id, prev_event_id)
          FROM current_state_delta_stream
          WHERE stream_id > $1 AND stream_id <= $2
          ORDER BY stream_id, rowid LIMIT $3",
};

/// Every sticky event, until it expires.
pub const STICKY_EVENTS: FollowedTable = FollowedTable {
    name: "sticky_events",
    columns: &["stream_id", "event_id", "room_id", "expires_at"],
    sql: "SELECT stream_id, json_array(stream_id, event_id, room_id, expires_at)
          FROM sticky_events
          WHERE stream_id > $1 AND stream_id <= $2
          ORDER BY stream_id LIMIT $3",
};

impl Sqlite {
    /// The first `limit` rows of `table` above `after` and up to `up_to`.
    ///
    /// # Errors
    /// Those of the database.
    pub async fn followed(
        &self,
        table: &FollowedTable,
        after: Token,
        up_to: Token,
        limit: usize,
    ) -> Result<Vec<Row>, StoreError> {
        let found: Vec<(i64, String)> = sqlx::query_as(table.sql)
            .bind(after.0)
            .bind(up_to.0)
            .bind(i64::try_from(limit).unwrap_or(i64::MAX))
            .fetch_all(&self.readers)
            .await?;
        let row = |(position, cells): (i64, String)| {
            let cells = serde_json::from_str(&cells).map_err(|error| StoreError::Damaged {
                table: table.name.to_owned(),
                key: position.to_string(),
                what: error.to_string(),
            })?;
            Ok(Row {
                position: Token(position),
                cells,
            })
        };
        found.into_iter().map(row).collect()
    }
}
