//! Reading events: our own along the stream, any by id with its redactions, and a room's newest.
//!
//! Two traps of Synapse's tables shape the statements: `event_json.json` may hold `\u0000` escapes, so it is never cast to
//! `jsonb`; and `events.rejection_reason` was filled in lazily, so the `rejections` table alone decides.

use std::collections::HashSet;

use super::Postgres;
use crate::core::{
    id::{EventId, RoomId, ServerName, StateGroup, StreamOrdering, domain_of},
    store::{
        EventPage, StoreError, StoredEvent,
        event_row::{EventRow, RedactionRow, stored_event, with_redactions},
        sql,
    },
};

/// How many stream orderings one statement covers, so that a long absence is many short statements.
const STEP: i64 = 10_000;

/// `LATERAL (... OFFSET 0)`: for a long range PostgreSQL would rather scan all of `event_json`, the largest table there is.
macro_rules! select_events {
    ($rest:literal) => {
        concat!(
            "SELECT e.stream_ordering, e.event_id, e.room_id, e.type, e.state_key, e.sender, e.received_ts, r.room_version,
                    j.format_version, j.json, j.internal_metadata, g.state_group, p.event_id IS NOT NULL AS partial_state
             FROM events e
             CROSS JOIN LATERAL (
                 SELECT d.format_version, d.json, d.internal_metadata FROM event_json d
                 WHERE d.event_id = e.event_id OFFSET 0) j
             LEFT JOIN rooms r ON r.room_id = e.room_id
             LEFT JOIN event_to_state_groups g ON g.event_id = e.event_id
             LEFT JOIN partial_state_events p ON p.event_id = e.event_id
             LEFT JOIN rejections x ON x.event_id = e.event_id
             WHERE x.event_id IS NULL AND e.sender IS NOT NULL AND e.stream_ordering IS NOT NULL AND ",
            $rest
        )
    };
}

/// The internal metadata is read through `LIKE` first, so that a remote event costs neither parsing nor its JSON.
const OWN_EVENTS: &str = select_events!(
    "e.stream_ordering > $1 AND e.stream_ordering <= $2 AND NOT e.outlier
     AND (substr(e.sender, strpos(e.sender, ':') + 1) = $3 OR j.internal_metadata LIKE '%\"send_on_behalf_of\"%')
     ORDER BY e.stream_ordering LIMIT $4"
);

const EVENTS_BY_ID: &str = select_events!("e.event_id = ANY($1)");

/// Every claim that one of the events is redacted: by a redaction, or by a ban that redacts all its user sent before.
const REDACTIONS: &str = "
    WITH claim AS (
        SELECT r.redacts AS target, r.event_id AS redaction, r.recheck FROM redactions r WHERE r.redacts = ANY($1)
        UNION ALL
        SELECT e.event_id, b.redacting_event_id, true
        FROM events e JOIN room_ban_redactions b ON b.room_id = e.room_id AND b.user_id = e.sender
        WHERE e.event_id = ANY($1) AND (b.redact_end_ordering IS NULL OR e.stream_ordering < b.redact_end_ordering)
    )
    SELECT c.target, c.recheck, d.room_id, d.sender, j.internal_metadata
    FROM claim c
    LEFT JOIN rejections x ON x.event_id = c.redaction
    LEFT JOIN events d ON d.event_id = c.redaction AND x.event_id IS NULL
    LEFT JOIN event_json j ON j.event_id = d.event_id";

impl Postgres {
    pub(in crate::core::store) fn server_name(&self) -> &ServerName {
        &self.server_name
    }

    pub(in crate::core::store) async fn own_events(
        &self,
        after: StreamOrdering,
        up_to: StreamOrdering,
        limit: i64,
    ) -> Result<EventPage, StoreError> {
        let mut events = Vec::new();
        let mut left = limit;
        let mut low = after.0;
        while low < up_to.0 {
            let high = low.saturating_add(STEP).min(up_to.0);
            let rows: Vec<EventRow> = sqlx::query_as(OWN_EVENTS)
                .bind(low)
                .bind(high)
                .bind(self.server_name.as_str())
                .bind(left)
                .fetch_all(&self.pool)
                .await?;
            left -= i64::try_from(rows.len()).unwrap_or(left);
            for event in rows.into_iter().map(stored_event) {
                low = event.stream_ordering.0;
                let own = domain_of(&event.sender) == Some(self.server_name.as_str());
                if own || event.send_on_behalf_of.is_some() {
                    events.push(event);
                }
            }
            if left <= 0 {
                return Ok(EventPage {
                    events,
                    read_up_to: StreamOrdering(low),
                });
            }
            low = high;
        }
        Ok(EventPage {
            events,
            read_up_to: up_to,
        })
    }

    pub(in crate::core::store) async fn events_by_id(&self, ids: &[EventId]) -> Result<Vec<StoredEvent>, StoreError> {
        if ids.is_empty() {
            return Ok(Vec::new());
        }
        let names: Vec<&str> = ids.iter().map(EventId::as_str).collect();
        let events: Vec<EventRow> = sqlx::query_as(EVENTS_BY_ID).bind(&names).fetch_all(&self.pool).await?;
        let claims: Vec<RedactionRow> = sqlx::query_as(REDACTIONS).bind(&names).fetch_all(&self.pool).await?;
        Ok(with_redactions(ids, events, claims))
    }

    pub(in crate::core::store) async fn forward_extremities(
        &self,
        room_id: &RoomId,
        limit: i64,
    ) -> Result<Vec<(EventId, StreamOrdering, i64)>, StoreError> {
        let rows: Vec<(String, i64, i64)> = sqlx::query_as(sql::FORWARD_EXTREMITIES)
            .bind(room_id.as_str())
            .bind(limit)
            .fetch_all(&self.pool)
            .await?;
        Ok(rows
            .into_iter()
            .map(|(id, ordering, depth)| (id.into(), StreamOrdering(ordering), depth))
            .collect())
    }

    pub(in crate::core::store) async fn room_is_partial(&self, room_id: &RoomId) -> Result<bool, StoreError> {
        Ok(
            sqlx::query_scalar("SELECT EXISTS (SELECT 1 FROM partial_state_rooms WHERE room_id = $1)")
                .bind(room_id.as_str())
                .fetch_one(&self.pool)
                .await?,
        )
    }

    pub(in crate::core::store) async fn erased(&self, senders: &[&str]) -> Result<HashSet<String>, StoreError> {
        if senders.is_empty() {
            return Ok(HashSet::new());
        }
        let rows: Vec<String> = sqlx::query_scalar("SELECT user_id FROM erased_users WHERE user_id = ANY($1)")
            .bind(senders)
            .fetch_all(&self.pool)
            .await?;
        Ok(rows.into_iter().collect())
    }

    pub(in crate::core::store) async fn event_state(
        &self,
        event_id: &EventId,
    ) -> Result<Option<(StateGroup, bool)>, StoreError> {
        let row: Option<(i64, bool)> = sqlx::query_as(
            "SELECT g.state_group, p.event_id IS NOT NULL FROM event_to_state_groups g
             LEFT JOIN partial_state_events p ON p.event_id = g.event_id WHERE g.event_id = $1",
        )
        .bind(event_id.as_str())
        .fetch_optional(&self.pool)
        .await?;
        Ok(row.map(|(group, partial)| (StateGroup(group), partial)))
    }
}
