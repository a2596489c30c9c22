//! What a homeserver holds, read from its database: exact, and with no client's view in between.

use std::{
    collections::HashSet,
    time::{Duration, Instant},
};

use anyhow::{Result, bail, ensure};
use serde_json::Value;
use sqlx::{
    PgPool,
    postgres::{PgConnectOptions, PgPoolOptions},
};

use super::wait_until;

/// A homeserver's database.
pub struct Store {
    /// Its name.
    pub database: String,
    pool: PgPool,
}

/// How an event can be held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum As {
    /// In the room's history.
    Event,
    /// Besides, among the room's sticky events.
    Sticky,
}

impl Store {
    pub(super) fn new(database: &str, options: PgConnectOptions) -> Self {
        Self {
            database: database.to_owned(),
            pool: PgPoolOptions::new()
                .max_connections(4)
                .acquire_timeout(Duration::from_secs(10))
                .connect_lazy_with(options),
        }
    }

    pub(super) async fn close(&self) {
        self.pool.close().await;
    }

    /// Which of these events it does not hold, in order. Outliers and rejected events are not held.
    pub async fn lacks(&self, event_ids: &[String], how: As) -> Result<Vec<String>> {
        let held: Vec<String> = sqlx::query_scalar(
            "SELECT e.event_id FROM events e
             WHERE e.event_id = ANY ($1) AND NOT e.outlier
               AND NOT EXISTS (SELECT FROM rejections r WHERE r.event_id = e.event_id)
               AND (NOT $2 OR EXISTS (SELECT FROM sticky_events s WHERE s.event_id = e.event_id))",
        )
        .bind(event_ids)
        .bind(how == As::Sticky)
        .fetch_all(&self.pool)
        .await?;
        let held: HashSet<_> = held.into_iter().collect();
        Ok(event_ids.iter().filter(|id| !held.contains(*id)).cloned().collect())
    }

    /// Waits until it holds all of these events.
    pub async fn wait_for(&self, event_ids: &[String], how: As, within: Duration) -> Result<()> {
        let deadline = Instant::now() + within;
        loop {
            // An error counts as "not yet": the database is restarted in some cases.
            let lacks = self.lacks(event_ids, how).await;
            if lacks.as_ref().is_ok_and(Vec::is_empty) {
                return Ok(());
            }
            if Instant::now() > deadline {
                let lacks = lacks?;
                bail!(
                    "{} still lacks {} of {} events (as {how:?}) after {within:?}, the first is {}",
                    self.database,
                    lacks.len(),
                    event_ids.len(),
                    lacks[0],
                );
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// The room's messages that it holds, by when they came. Fails if there is none.
    pub async fn messages(&self, room_id: &str) -> Result<Vec<String>> {
        let ids = sqlx::query_scalar(
            "SELECT event_id FROM events WHERE room_id = $1 AND type = 'm.room.message' AND NOT outlier
             ORDER BY stream_ordering",
        );
        let ids: Vec<String> = ids.bind(room_id).fetch_all(&self.pool).await?;
        ensure!(!ids.is_empty(), "{} holds no message of {room_id}", self.database);
        Ok(ids)
    }

    /// Makes a user an administrator.
    pub async fn make_admin(&self, user_id: &str) -> Result<()> {
        let made = sqlx::query("UPDATE users SET admin = 1 WHERE name = $1").bind(user_id);
        ensure!(
            made.execute(&self.pool).await?.rows_affected() == 1,
            "no user {user_id}"
        );
        Ok(())
    }

    /// An event's content.
    pub async fn content(&self, event_id: &str) -> Result<Value> {
        let json: String = sqlx::query_scalar("SELECT json FROM event_json WHERE event_id = $1")
            .bind(event_id)
            .fetch_one(&self.pool)
            .await?;
        let event: Value = serde_json::from_str(&json)?;
        Ok(event["content"].clone())
    }

    async fn membership(&self, room_id: &str, user_id: &str) -> Result<Option<String>> {
        let membership: Option<Option<String>> = sqlx::query_scalar(
            "SELECT membership FROM current_state_events
             WHERE room_id = $1 AND type = 'm.room.member' AND state_key = $2",
        )
        .bind(room_id)
        .bind(user_id)
        .fetch_optional(&self.pool)
        .await?;
        Ok(membership.flatten())
    }

    /// Waits until it holds this membership of a user, by the room's current state.
    pub async fn wait_for_membership(
        &self,
        room_id: &str,
        user_id: &str,
        membership: &str,
        within: Duration,
    ) -> Result<()> {
        wait_until(&format!("{user_id} has membership {membership}"), within, async || {
            Ok(self.membership(room_id, user_id).await?.as_deref() == Some(membership))
        })
        .await
    }

    /// The id of the event that gives a user's membership in a room, by its current state.
    pub async fn member_event(&self, room_id: &str, user_id: &str) -> Result<String> {
        let id = sqlx::query_scalar(
            "SELECT event_id FROM current_state_events
             WHERE room_id = $1 AND type = 'm.room.member' AND state_key = $2",
        );
        Ok(id.bind(room_id).bind(user_id).fetch_one(&self.pool).await?)
    }
}
