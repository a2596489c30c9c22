//! What a homeserver's clients and operators ask: access tokens, what a client sent before, and what a room holds.

use super::Sqlite;
use crate::core::{
    clock::Millis,
    id::{EventId, RoomId},
    store::StoreError,
};

/// An event that has a place in its room's history.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeldEvent {
    /// Its id.
    pub event_id: EventId,
    /// `type`.
    pub kind: String,
    /// `state_key`, for a state event.
    pub state_key: Option<String>,
    /// Its sender's user id.
    pub sender: String,
    /// When we took it in.
    pub received: Millis,
    /// When it ceases (or ceased) to be sticky; `None` if it never was, or that is long past.
    pub sticky_until: Option<Millis>,
    /// It is kept, but the room's state did not allow it any more when it came.
    pub soft_failed: bool,
    /// Its JSON.
    pub json: String,
}

impl Sqlite {
    /// Gives a user an access token for a device.
    ///
    /// # Errors
    /// Those of the database.
    pub async fn add_token(&self, token: &str, user: &str, device: &str) -> Result<(), StoreError> {
        let mut tx = self.write().await?;
        sqlx::query("INSERT INTO access_tokens (token, user_id, device_id) VALUES ($1, $2, $3)")
            .bind(token)
            .bind(user)
            .bind(device)
            .execute(&mut *tx)
            .await?;
        Ok(tx.commit().await?)
    }

    /// The user and the device that a token is for.
    ///
    /// # Errors
    /// Those of the database.
    pub async fn token_owner(&self, token: &str) -> Result<Option<(String, String)>, StoreError> {
        Ok(
            sqlx::query_as("SELECT user_id, device_id FROM access_tokens WHERE token = $1")
                .bind(token)
                .fetch_optional(&self.readers)
                .await?,
        )
    }

    /// The event that was persisted with `txn_id` in its metadata.
    ///
    /// # Errors
    /// Those of the database.
    pub async fn event_of_transaction(&self, txn_id: &str) -> Result<Option<EventId>, StoreError> {
        let found: Option<String> =
            sqlx::query_scalar("SELECT event_id FROM event_json WHERE iif(json_valid(internal_metadata), internal_metadata ->> '$.txn_id', NULL) = $1")
                .bind(txn_id)
                .fetch_optional(&self.readers)
                .await?;
        Ok(found.map(EventId::from))
    }

    /// The events of the room's history that were not rejected, as they came in, newest `limit` only.
    ///
    /// # Errors
    /// Those of the database.
    pub async fn held(&self, room: &RoomId, limit: i64) -> Result<Vec<HeldEvent>, StoreError> {
        type Line = (
            String,
            String,
            Option<String>,
            String,
            Option<i64>,
            Option<i64>,
            bool,
            String,
        );
        let mut lines: Vec<Line> = sqlx::query_as(
            "SELECT e.event_id, e.type, e.state_key, e.sender, e.received_ts, s.expires_at,
                    coalesce(j.internal_metadata ->> '$.soft_failed', 0), j.json
             FROM events e
             JOIN event_json j ON j.event_id = e.event_id
             LEFT JOIN sticky_events s ON s.event_stream_ordering = e.stream_ordering
             WHERE e.room_id = $1 AND NOT e.outlier
               AND NOT EXISTS (SELECT 1 FROM rejections x WHERE x.event_id = e.event_id)
             ORDER BY e.stream_ordering DESC LIMIT $2",
        )
        .bind(room.as_str())
        .bind(limit)
        .fetch_all(&self.readers)
        .await?;
        lines.reverse();
        let held = |(id, kind, state_key, sender, received, expires, soft_failed, json): Line| HeldEvent {
            event_id: id.into(),
            kind,
            state_key,
            sender,
            received: Millis(received.unwrap_or_default()),
            sticky_until: expires.map(Millis),
            soft_failed,
            json,
        };
        Ok(lines.into_iter().map(held).collect())
    }

    /// The least depth of the room's history as we hold it: where we came in.
    ///
    /// # Errors
    /// Those of the database.
    pub async fn least_depth(&self, room: &RoomId) -> Result<Option<i64>, StoreError> {
        Ok(
            sqlx::query_scalar("SELECT min(depth) FROM events WHERE room_id = $1 AND NOT outlier")
                .bind(room.as_str())
                .fetch_one(&self.readers)
                .await?,
        )
    }
}
