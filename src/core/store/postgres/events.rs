//! Reading events: our own along the stream, any by id with its redactions, and a room's newest.
//!
//! Two traps of Synapse's tables shape the statements: `event_json.json` may hold `\u0000` escapes, so it is never cast to
//! `jsonb`; and `events.rejection_reason` was filled in lazily, so the `rejections` table alone decides.

use std::collections::{HashMap, HashSet};

use serde_json::{Map, Value};
use sqlx::{Row, postgres::PgRow};

use super::Postgres;
use crate::core::store::{EventPage, StoreError, StoredEvent};
use crate::core::{
    clock::Millis,
    id::{EventId, RoomId, ServerName, StateGroup, StreamOrdering, domain_of},
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

/// A redaction as it claims to apply to an event.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Redaction {
    /// Synapse does not yet vouch for it.
    recheck: bool,
    /// The redaction event's room and sender; absent if it is unknown or rejected.
    event: Option<(RoomId, String)>,
    /// `internal_metadata.recheck_redaction`: only the sender's own server may have redacted it.
    same_server_only: bool,
}

impl Redaction {
    /// Whether it redacts an event of that room and sender.
    fn applies(&self, room_id: &RoomId, sender: &str) -> bool {
        if !self.recheck {
            return true;
        }
        self.event.as_ref().is_some_and(|(room, redactor)| {
            room == room_id && (!self.same_server_only || domain_of(redactor) == domain_of(sender))
        })
    }
}

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
            let rows = sqlx::query(OWN_EVENTS)
                .bind(low)
                .bind(high)
                .bind(self.server_name.as_str())
                .bind(left)
                .fetch_all(&self.pool)
                .await?;
            for row in &rows {
                let event = stored_event(row)?;
                low = event.stream_ordering.0;
                let own = domain_of(&event.sender) == Some(self.server_name.as_str());
                if own || event.send_on_behalf_of.is_some() {
                    events.push(event);
                }
            }
            left -= i64::try_from(rows.len()).unwrap_or(left);
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
        let mut found = HashMap::with_capacity(ids.len());
        for row in sqlx::query(EVENTS_BY_ID).bind(&names).fetch_all(&self.pool).await? {
            let event = stored_event(&row)?;
            found.insert(event.event_id.clone(), event);
        }
        for (target, redaction) in self.redactions(&names).await? {
            if let Some(event) = found.get_mut(target.as_str()) {
                event.redacted |= event.kind != "m.room.create" && redaction.applies(&event.room_id, &event.sender);
            }
        }
        Ok(ids.iter().filter_map(|id| found.get(id).cloned()).collect())
    }

    async fn redactions(&self, targets: &[&str]) -> Result<Vec<(String, Redaction)>, StoreError> {
        let rows = sqlx::query(REDACTIONS).bind(targets).fetch_all(&self.pool).await?;
        rows.iter()
            .map(|row| {
                let room: Option<&str> = row.try_get("room_id")?;
                let sender: Option<String> = row.try_get("sender")?;
                let metadata: Option<&str> = row.try_get("internal_metadata")?;
                Ok((
                    row.try_get("target")?,
                    Redaction {
                        recheck: row.try_get("recheck")?,
                        event: room.map(RoomId::from).zip(sender),
                        same_server_only: metadata.is_some_and(|text| flag(&parse_metadata(text), "recheck_redaction")),
                    },
                ))
            })
            .collect()
    }

    pub(in crate::core::store) async fn forward_extremities(
        &self,
        room_id: &RoomId,
        limit: i64,
    ) -> Result<Vec<(EventId, StreamOrdering, i64)>, StoreError> {
        let rows: Vec<(String, i64, i64)> = sqlx::query_as(
            "SELECT e.event_id, e.stream_ordering, e.depth
             FROM event_forward_extremities f JOIN events e ON e.event_id = f.event_id
             WHERE f.room_id = $1 AND e.stream_ordering IS NOT NULL
             ORDER BY e.depth DESC, e.stream_ordering DESC LIMIT $2",
        )
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

fn stored_event(row: &PgRow) -> Result<StoredEvent, sqlx::Error> {
    let event_id = EventId::from(row.try_get::<&str, _>("event_id")?);
    let metadata = parse_metadata(row.try_get("internal_metadata")?);
    Ok(StoredEvent {
        stream_ordering: StreamOrdering(row.try_get("stream_ordering")?),
        event_id,
        room_id: RoomId::from(row.try_get::<&str, _>("room_id")?),
        kind: row.try_get("type")?,
        state_key: row.try_get("state_key")?,
        sender: row.try_get("sender")?,
        room_version: row.try_get("room_version")?,
        format_version: row.try_get("format_version")?,
        json: row.try_get("json")?,
        state_group: row.try_get::<Option<i64>, _>("state_group")?.map(StateGroup),
        partial_state: row.try_get("partial_state")?,
        send_on_behalf_of: metadata
            .get("send_on_behalf_of")
            .and_then(Value::as_str)
            .map(ServerName::from),
        out_of_band: flag(&metadata, "out_of_band_membership"),
        proactively_send: metadata.get("proactively_send") != Some(&Value::Bool(false)),
        soft_failed: flag(&metadata, "soft_failed"),
        redacted: false,
        received: row.try_get::<Option<i64>, _>("received_ts")?.map(Millis),
    })
}

/// Metadata that cannot be read counts as empty: every flag has its usual value, and one damaged row holds up no page.
fn parse_metadata(text: &str) -> Map<String, Value> {
    serde_json::from_str(text).unwrap_or_default()
}

fn flag(metadata: &Map<String, Value>, key: &str) -> bool {
    metadata.get(key) == Some(&Value::Bool(true))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn redaction(recheck: bool, event: Option<(&str, &str)>, same_server_only: bool) -> Redaction {
        let event = event.map(|(room, sender)| (room.into(), sender.to_owned()));
        Redaction {
            recheck,
            event,
            same_server_only,
        }
    }

    #[test]
    fn an_unchecked_redaction_applies_only_if_known_and_of_the_same_room_and_server() {
        let room = RoomId::from("!r:ours");
        let applies = |redaction: Redaction| redaction.applies(&room, "@ann:ours");
        assert!(applies(redaction(false, None, false)), "Synapse vouches for it");
        assert!(!applies(redaction(true, None, false)), "unknown or rejected");
        assert!(!applies(redaction(true, Some(("!other:ours", "@ann:ours")), false)));
        assert!(
            applies(redaction(true, Some(("!r:ours", "@mod:theirs")), false)),
            "authorised by power level"
        );
        assert!(!applies(redaction(true, Some(("!r:ours", "@mod:theirs")), true)));
        assert!(applies(redaction(true, Some(("!r:ours", "@bob:ours")), true)));
    }
}
