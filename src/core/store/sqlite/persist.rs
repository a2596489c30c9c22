//! An embedded homeserver's writing: events, and the room's current state after them, in one transaction.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};
use sqlx::SqliteConnection;

use super::{Sqlite, current_state, pool::rows};
use crate::core::{
    clock::Millis,
    id::{EventId, RoomId, StateGroup, StickyPosition, StreamOrdering},
    store::{NewServer, StoreError},
};

/// An event as it is to be stored.
#[derive(Debug, Clone)]
pub struct PersistEvent {
    /// Its id.
    pub event_id: EventId,
    /// Its room.
    pub room_id: RoomId,
    /// `type`.
    pub kind: String,
    /// `state_key`, for a state event.
    pub state_key: Option<String>,
    /// Its sender's user id.
    pub sender: String,
    /// `depth`.
    pub depth: i64,
    /// `origin_server_ts`.
    pub sent: Millis,
    /// The whole event.
    pub json: String,
    /// `event_json.format_version`.
    pub format_version: i32,
    /// `event_json.internal_metadata`.
    pub metadata: Map<String, Value>,
    /// Its `prev_events`.
    pub prev_events: Vec<EventId>,
    /// Its `auth_events`.
    pub auth_events: Vec<EventId>,
    /// `content.membership`, for a membership event.
    pub membership: Option<String>,
    /// The event that it redacts.
    pub redacts: Option<EventId>,
    /// When it ceases to be sticky, for a sticky event.
    pub sticky_until: Option<Millis>,
    /// What became of it.
    pub outcome: Outcome,
}

/// What became of an event that was checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// It is part of its room, with this state group after it.
    Accepted(StateGroup),
    /// It is kept, with this state group after it, but nothing is built on it: it is not allowed by the room's current
    /// state.
    SoftFailed(StateGroup),
    /// It is kept to be known again, with the state group before it, and why.
    Rejected(StateGroup, String),
    /// It is kept for its content (somebody's auth or state event), and has no place in the room's history.
    Outlier,
}

/// A key of a room's current state that changes with the events stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateChange {
    /// The room.
    pub room_id: RoomId,
    /// `type`.
    pub kind: String,
    /// `state_key`.
    pub state_key: String,
    /// The event there from now on; `None` if there is none any more.
    pub event_id: Option<EventId>,
}

/// What was stored, and must be published.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Persisted {
    /// The events that were not known before, with their positions, in the order given.
    pub events: Vec<(EventId, StreamOrdering)>,
    /// Those of them that are sticky, with their positions.
    pub sticky: Vec<(EventId, StickyPosition)>,
    /// The servers that the change of state brought into a room where sticky events of ours are alive. They are on record.
    pub new_servers: Vec<NewServer>,
}

impl Sqlite {
    /// Stores `events` in that order, and the changes of current state that they make, all of it or nothing. Events that
    /// are known already are passed over, but for outliers that now have a place: they are stored as new.
    ///
    /// The state groups must be stored before, and the room be created.
    ///
    /// # Errors
    /// [`StoreError::Refused`] if a room has changes and no new event; else those of the database.
    pub async fn persist(
        &self,
        events: &[PersistEvent],
        changes: &[StateChange],
        now: Millis,
    ) -> Result<Persisted, StoreError> {
        let mut tx = self.write().await?;
        let mut persisted = Persisted::default();
        // Where each room's changes stand in the stream: at the first of its new events.
        let mut places: BTreeMap<&RoomId, StreamOrdering> = BTreeMap::new();
        for event in events {
            if !make_room_for(&mut tx, event).await? {
                continue;
            }
            let ordering = self.insert(&mut tx, event, now).await?;
            places.entry(&event.room_id).or_insert(ordering);
            persisted.events.push((event.event_id.clone(), ordering));
            let until = event.sticky_until.filter(|until| *until > now);
            if let Some(until) = until.filter(|_| event.may_be_sent()) {
                let position = self.insert_sticky(&mut tx, event, ordering, until).await?;
                persisted.sticky.push((event.event_id.clone(), position));
            }
            if matches!(event.outcome, Outcome::Accepted(_)) {
                extend_history(&mut tx, event).await?;
            }
        }
        let rooms: BTreeSet<&RoomId> = changes.iter().map(|change| &change.room_id).collect();
        let mut brought = Vec::new();
        for room in rooms {
            let changes: Vec<&StateChange> = changes.iter().filter(|change| change.room_id == *room).collect();
            let place = places.get(room).copied();
            brought.extend(current_state::replace(&mut tx, self, room, &changes, place).await?);
        }
        persisted.new_servers = self.owe_sticky_events(&mut tx, &brought, now).await?;
        self.remember_position(&mut tx, "events", persisted.events.last().map(|(_, at)| at.0))
            .await?;
        self.remember_position(&mut tx, "sticky_events", persisted.sticky.last().map(|(_, at)| at.0))
            .await?;
        tx.commit().await?;
        Ok(persisted)
    }

    /// The event's own rows.
    async fn insert(
        &self,
        connection: &mut SqliteConnection,
        event: &PersistEvent,
        now: Millis,
    ) -> Result<StreamOrdering, StoreError> {
        let (id, room) = (event.event_id.as_str(), event.room_id.as_str());
        let ordering: i64 = sqlx::query_scalar(
            "INSERT INTO events (event_id, room_id, type, state_key, sender, depth, outlier, origin_server_ts, received_ts,
                                 instance_name)
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10) RETURNING stream_ordering",
        )
        .bind(id)
        .bind(room)
        .bind(&event.kind)
        .bind(&event.state_key)
        .bind(&event.sender)
        .bind(event.depth)
        .bind(event.outcome == Outcome::Outlier)
        .bind(event.sent.0)
        .bind(now.0)
        .bind(self.me.as_str())
        .fetch_one(&mut *connection)
        .await?;
        let mut metadata = event.metadata.clone();
        if matches!(event.outcome, Outcome::SoftFailed(_)) {
            metadata.insert("soft_failed".into(), true.into());
        }
        sqlx::query(
            "INSERT INTO event_json (event_id, room_id, internal_metadata, json, format_version)
             VALUES ($1, $2, $3, $4, $5)",
        )
        .bind(id)
        .bind(room)
        .bind(Value::Object(metadata).to_string())
        .bind(&event.json)
        .bind(event.format_version)
        .execute(&mut *connection)
        .await?;
        for (sql, others) in [
            (
                "INSERT INTO event_edges (event_id, prev_event_id) SELECT $1, value FROM json_each($2) WHERE true
                 ON CONFLICT DO NOTHING",
                &event.prev_events,
            ),
            (
                "INSERT INTO event_auth (event_id, auth_id) SELECT $1, value FROM json_each($2) WHERE true
                 ON CONFLICT DO NOTHING",
                &event.auth_events,
            ),
        ] {
            sqlx::query(sql)
                .bind(id)
                .bind(rows(others.iter().map(EventId::as_str)))
                .execute(&mut *connection)
                .await?;
        }
        if let Some(group) = event.state_group() {
            sqlx::query("INSERT INTO event_to_state_groups (event_id, state_group) VALUES ($1, $2)")
                .bind(id)
                .bind(group.0)
                .execute(&mut *connection)
                .await?;
        }
        if let Outcome::Rejected(_, reason) = &event.outcome {
            sqlx::query("INSERT INTO rejections (event_id, reason, last_check) VALUES ($1, $2, $3)")
                .bind(id)
                .bind(reason)
                .bind(now.0.to_string())
                .execute(connection)
                .await?;
            return Ok(StreamOrdering(ordering));
        }
        if let (Some(membership), Some(user)) = (&event.membership, &event.state_key) {
            sqlx::query(
                "INSERT INTO room_memberships (event_id, user_id, sender, room_id, membership, event_stream_ordering)
                 VALUES ($1, $2, $3, $4, $5, $6)",
            )
            .bind(id)
            .bind(user)
            .bind(&event.sender)
            .bind(room)
            .bind(membership)
            .bind(ordering)
            .execute(&mut *connection)
            .await?;
        }
        if let Some(redacts) = &event.redacts {
            sqlx::query("INSERT INTO redactions (event_id, redacts, received_ts) VALUES ($1, $2, $3)")
                .bind(id)
                .bind(redacts.as_str())
                .bind(now.0)
                .execute(connection)
                .await?;
        }
        Ok(StreamOrdering(ordering))
    }

    async fn insert_sticky(
        &self,
        connection: &mut SqliteConnection,
        event: &PersistEvent,
        ordering: StreamOrdering,
        until: Millis,
    ) -> Result<StickyPosition, StoreError> {
        let position: i64 = sqlx::query_scalar(
            "INSERT INTO sticky_events (instance_name, event_id, room_id, event_stream_ordering, sender, expires_at)
             VALUES ($1, $2, $3, $4, $5, $6) RETURNING stream_id",
        )
        .bind(self.me.as_str())
        .bind(event.event_id.as_str())
        .bind(event.room_id.as_str())
        .bind(ordering.0)
        .bind(&event.sender)
        .bind(until.0)
        .fetch_one(connection)
        .await?;
        Ok(StickyPosition(position))
    }

    /// How far we have written a stream.
    async fn remember_position(
        &self,
        connection: &mut SqliteConnection,
        stream: &str,
        position: Option<i64>,
    ) -> Result<(), StoreError> {
        let Some(position) = position else { return Ok(()) };
        sqlx::query(
            "INSERT INTO stream_positions (stream_name, instance_name, stream_id) VALUES ($1, $2, $3)
             ON CONFLICT (stream_name, instance_name) DO UPDATE SET stream_id = EXCLUDED.stream_id",
        )
        .bind(stream)
        .bind(self.me.as_str())
        .bind(position)
        .execute(connection)
        .await?;
        Ok(())
    }

    /// Removes what nobody can ask for any more: sticky events that have expired, and invalidations of caches from before
    /// `caches_before`.
    ///
    /// # Errors
    /// Those of the database.
    pub async fn forget_old(&self, now: Millis, caches_before: Millis) -> Result<(), StoreError> {
        let mut tx = self.write().await?;
        sqlx::query("DELETE FROM sticky_events WHERE expires_at <= $1")
            .bind(now.0)
            .execute(&mut *tx)
            .await?;
        sqlx::query("DELETE FROM cache_invalidation_stream_by_instance WHERE invalidation_ts < $1")
            .bind(caches_before.0)
            .execute(&mut *tx)
            .await?;
        Ok(tx.commit().await?)
    }
}

impl PersistEvent {
    fn state_group(&self) -> Option<StateGroup> {
        match self.outcome {
            Outcome::Accepted(group) | Outcome::SoftFailed(group) | Outcome::Rejected(group, _) => Some(group),
            Outcome::Outlier => None,
        }
    }

    /// It has a place in the room, though perhaps nothing is built on it yet.
    fn may_be_sent(&self) -> bool {
        matches!(self.outcome, Outcome::Accepted(_) | Outcome::SoftFailed(_))
    }
}

/// Whether the event is to be stored. An outlier that now has a place is removed first.
async fn make_room_for(connection: &mut SqliteConnection, event: &PersistEvent) -> Result<bool, StoreError> {
    let outlier: Option<bool> = sqlx::query_scalar("SELECT outlier FROM events WHERE event_id = $1")
        .bind(event.event_id.as_str())
        .fetch_optional(&mut *connection)
        .await?;
    match outlier {
        None => return Ok(true),
        // A rejection may come of a state that only one server believes in: what is held stays.
        Some(true) if !matches!(event.outcome, Outcome::Outlier | Outcome::Rejected(..)) => {}
        Some(_) => return Ok(false),
    }
    for table in [
        "events",
        "event_json",
        "event_edges",
        "event_auth",
        "room_memberships",
        "redactions",
        "rejections",
    ] {
        sqlx::query(sqlx::AssertSqlSafe(format!("DELETE FROM {table} WHERE event_id = $1")))
            .bind(event.event_id.as_str())
            .execute(&mut *connection)
            .await?;
    }
    Ok(true)
}

/// Makes an accepted event one of the room's forward extremities, in place of those that it follows.
async fn extend_history(connection: &mut SqliteConnection, event: &PersistEvent) -> Result<(), StoreError> {
    sqlx::query(
        "DELETE FROM event_forward_extremities
         WHERE room_id = $1 AND event_id IN (SELECT value FROM json_each($2))",
    )
    .bind(event.room_id.as_str())
    .bind(rows(event.prev_events.iter().map(EventId::as_str)))
    .execute(&mut *connection)
    .await?;
    // Not if one that follows it came first.
    sqlx::query(
        "INSERT INTO event_forward_extremities (event_id, room_id)
         SELECT $1, $2 WHERE NOT EXISTS (
             SELECT 1 FROM event_edges g
             JOIN events e ON e.event_id = g.event_id
             JOIN event_json j ON j.event_id = g.event_id
             LEFT JOIN rejections x ON x.event_id = g.event_id
             WHERE g.prev_event_id = $1 AND e.room_id = $2 AND NOT e.outlier AND x.event_id IS NULL
               AND (j.internal_metadata ->> '$.soft_failed') IS NOT 1)",
    )
    .bind(event.event_id.as_str())
    .bind(event.room_id.as_str())
    .execute(connection)
    .await?;
    Ok(())
}
