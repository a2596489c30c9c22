//! Reading events: our own along the stream, any by id with its redactions, and a room's newest.

use std::collections::HashSet;

use super::{Sqlite, pool::rows};
use crate::core::{
    id::{EventId, RoomId, ServerName, StateGroup, StreamOrdering, domain_of},
    store::{
        EventPage, StoreError, StoredEvent,
        event_row::{EventRow, RedactionRow, stored_event, with_redactions},
        sql,
    },
};

/// An embedded homeserver makes no partial-state joins.
macro_rules! select_events {
    ($rest:literal) => {
        concat!(
            "SELECT e.stream_ordering, e.event_id, e.room_id, e.type, e.state_key, e.sender, e.received_ts, r.room_version,
                    j.format_version, j.json, j.internal_metadata, g.state_group, false
             FROM events e
             JOIN event_json j ON j.event_id = e.event_id
             LEFT JOIN rooms r ON r.room_id = e.room_id
             LEFT JOIN event_to_state_groups g ON g.event_id = e.event_id
             LEFT JOIN rejections x ON x.event_id = e.event_id
             WHERE x.event_id IS NULL AND ",
            $rest
        )
    };
}

const OWN_EVENTS: &str = select_events!(
    "e.stream_ordering > $1 AND e.stream_ordering <= $2 AND NOT e.outlier
     AND (substr(e.sender, instr(e.sender, ':') + 1) = $3 OR j.internal_metadata LIKE '%\"send_on_behalf_of\"%')
     ORDER BY e.stream_ordering LIMIT $4"
);

const EVENTS_BY_ID: &str = select_events!("e.event_id IN (SELECT value FROM json_each($1))");

/// Every claim that one of the events is redacted.
const REDACTIONS: &str = "
    SELECT r.redacts, r.recheck, d.room_id, d.sender, j.internal_metadata
    FROM redactions r
    LEFT JOIN rejections x ON x.event_id = r.event_id
    LEFT JOIN events d ON d.event_id = r.event_id AND x.event_id IS NULL
    LEFT JOIN event_json j ON j.event_id = d.event_id
    WHERE r.redacts IN (SELECT value FROM json_each($1))";

impl Sqlite {
    pub(in crate::core::store) async fn own_events(
        &self,
        after: StreamOrdering,
        up_to: StreamOrdering,
        limit: i64,
    ) -> Result<EventPage, StoreError> {
        let found: Vec<EventRow> = sqlx::query_as(OWN_EVENTS)
            .bind(after.0)
            .bind(up_to.0)
            .bind(self.server_name.as_str())
            .bind(limit)
            .fetch_all(&self.readers)
            .await?;
        let full = i64::try_from(found.len()).is_ok_and(|read| read >= limit);
        let last = found.last().map(|row| StreamOrdering(row.0)).filter(|_| full);
        let own = |event: &StoredEvent| {
            domain_of(&event.sender) == Some(self.server_name.as_str()) || event.send_on_behalf_of.is_some()
        };
        Ok(EventPage {
            events: found.into_iter().map(stored_event).filter(own).collect(),
            read_up_to: last.unwrap_or(up_to),
        })
    }

    pub(in crate::core::store) async fn events_by_id(&self, ids: &[EventId]) -> Result<Vec<StoredEvent>, StoreError> {
        if ids.is_empty() {
            return Ok(Vec::new());
        }
        let names = rows(ids.iter().map(EventId::as_str));
        let events: Vec<EventRow> = sqlx::query_as(EVENTS_BY_ID)
            .bind(&names)
            .fetch_all(&self.readers)
            .await?;
        let claims: Vec<RedactionRow> = sqlx::query_as(REDACTIONS).bind(&names).fetch_all(&self.readers).await?;
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
            .fetch_all(&self.readers)
            .await?;
        Ok(rows
            .into_iter()
            .map(|(id, ordering, depth)| (id.into(), StreamOrdering(ordering), depth))
            .collect())
    }

    #[expect(clippy::unused_async, reason = "the other engine asks its database")]
    pub(in crate::core::store) async fn room_is_partial(&self, _: &RoomId) -> Result<bool, StoreError> {
        Ok(false)
    }

    #[expect(clippy::unused_async, reason = "the other engine asks its database")]
    pub(in crate::core::store) async fn partial_room_servers(&self, _: &RoomId) -> Result<Vec<ServerName>, StoreError> {
        Ok(Vec::new())
    }

    pub(in crate::core::store) async fn erased(&self, senders: &[&str]) -> Result<HashSet<String>, StoreError> {
        if senders.is_empty() {
            return Ok(HashSet::new());
        }
        let erased: Vec<String> =
            sqlx::query_scalar("SELECT user_id FROM erased_users WHERE user_id IN (SELECT value FROM json_each($1))")
                .bind(rows(senders))
                .fetch_all(&self.readers)
                .await?;
        Ok(erased.into_iter().collect())
    }

    pub(in crate::core::store) async fn event_state(
        &self,
        event_id: &EventId,
    ) -> Result<Option<(StateGroup, bool)>, StoreError> {
        let group: Option<i64> =
            sqlx::query_scalar("SELECT state_group FROM event_to_state_groups WHERE event_id = $1")
                .bind(event_id.as_str())
                .fetch_optional(&self.readers)
                .await?;
        Ok(group.map(|group| (StateGroup(group), false)))
    }
}
