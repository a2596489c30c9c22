//! A room's history as a graph: which events are known, what precedes some, and what they rest on.

use std::collections::HashMap;

use super::{Sqlite, pool::rows};
use crate::core::{
    id::{EventId, RoomId},
    store::StoreError,
};

/// How an event is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Known {
    /// It has a place in its room's history.
    Placed,
    /// It was rejected.
    Rejected,
    /// Only its content is known.
    Outlier,
}

impl Sqlite {
    /// Those of the events that are stored.
    ///
    /// # Errors
    /// Those of the database.
    pub async fn known_events(&self, ids: &[EventId]) -> Result<HashMap<EventId, Known>, StoreError> {
        let found: Vec<(String, bool, bool)> = sqlx::query_as(
            "SELECT e.event_id, e.outlier, x.event_id IS NOT NULL FROM events e
             LEFT JOIN rejections x ON x.event_id = e.event_id
             WHERE e.event_id IN (SELECT value FROM json_each($1))",
        )
        .bind(rows(ids.iter().map(EventId::as_str)))
        .fetch_all(&self.readers)
        .await?;
        let known = |(id, outlier, rejected): (String, bool, bool)| {
            let known = match (rejected, outlier) {
                (true, _) => Known::Rejected,
                (false, true) => Known::Outlier,
                (false, false) => Known::Placed,
            };
            (EventId::from(id), known)
        };
        Ok(found.into_iter().map(known).collect())
    }

    /// The events of `room` that lead to `latest`, those themselves and `earliest` with all before it left out, down to
    /// `min_depth`: at most `limit`, the nearest, in the order of their depth. For `get_missing_events`.
    ///
    /// # Errors
    /// Those of the database.
    pub async fn events_between(
        &self,
        room: &RoomId,
        earliest: &[EventId],
        latest: &[EventId],
        min_depth: i64,
        limit: i64,
    ) -> Result<Vec<EventId>, StoreError> {
        // Walked deepest first, and cut at the limit: a walk in the order of the edges could follow one branch to the
        // room's beginning. `latest` counts for the limit of the walk, and not for the answer's.
        let walked = i64::try_from(latest.len()).unwrap_or(i64::MAX).saturating_add(limit);
        let found: Vec<String> = sqlx::query_scalar(
            "WITH RECURSIVE walk(event_id, depth) AS (
                 SELECT e.event_id, e.depth FROM events e
                 WHERE e.event_id IN (SELECT value FROM json_each($3)) AND e.room_id = $1 AND NOT e.outlier
               UNION
                 SELECT e.event_id, e.depth FROM walk w CROSS JOIN event_edges g CROSS JOIN events e
                 WHERE g.event_id = w.event_id AND e.event_id = g.prev_event_id
                   AND e.room_id = $1 AND NOT e.outlier AND e.depth >= $4
                   AND e.event_id NOT IN (SELECT value FROM json_each($2))
                   AND NOT EXISTS (SELECT 1 FROM rejections x WHERE x.event_id = e.event_id)
                 ORDER BY 2 DESC LIMIT $5
             )
             SELECT event_id FROM (
                 SELECT event_id, depth FROM walk
                 WHERE event_id NOT IN (SELECT value FROM json_each($3))
                 ORDER BY depth DESC, event_id LIMIT $6)
             ORDER BY depth, event_id",
        )
        .bind(room.as_str())
        .bind(rows(earliest.iter().map(EventId::as_str)))
        .bind(rows(latest.iter().map(EventId::as_str)))
        .bind(min_depth)
        .bind(walked)
        .bind(limit)
        .fetch_all(&self.readers)
        .await?;
        Ok(found.into_iter().map(EventId::from).collect())
    }

    /// The events that these rest on, and those rest on, and so forth, as far as they are stored: at most `limit`, without
    /// `ids` themselves unless one rests on another, in the order of their depth.
    ///
    /// # Errors
    /// Those of the database.
    pub async fn auth_chain(&self, ids: &[EventId], limit: i64) -> Result<Vec<EventId>, StoreError> {
        let found: Vec<String> = sqlx::query_scalar(
            "WITH RECURSIVE chain(event_id) AS (
                 SELECT a.auth_id FROM event_auth a WHERE a.event_id IN (SELECT value FROM json_each($1))
               UNION
                 SELECT a.auth_id FROM chain c CROSS JOIN event_auth a WHERE a.event_id = c.event_id
                 LIMIT $2
             )
             SELECT e.event_id FROM chain c CROSS JOIN events e WHERE e.event_id = c.event_id
             ORDER BY e.depth, e.event_id",
        )
        .bind(rows(ids.iter().map(EventId::as_str)))
        .bind(limit)
        .fetch_all(&self.readers)
        .await?;
        Ok(found.into_iter().map(EventId::from).collect())
    }
}
