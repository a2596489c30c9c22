//! The rows that events and state are made of, in a copy of Synapse's database.

use std::{future::Future, ops::Deref};

use burdock::core::{
    id::{RoomId, StateGroup},
    store::Store,
};

use crate::database::TestDatabase;

/// One test's database.
pub struct Fixture {
    pub store: Store,
    database: TestDatabase,
}

impl Deref for Fixture {
    type Target = TestDatabase;

    fn deref(&self) -> &TestDatabase {
        &self.database
    }
}

/// Runs `test` on a database of its own, if one is offered.
pub async fn with_database<F: Future<Output = ()>>(test: impl FnOnce(Fixture) -> F) {
    if let Some(database) = TestDatabase::new().await {
        let store = database.connect("fed1").await;
        test(Fixture { store, database }).await;
    }
}

/// An event to be stored.
pub struct Event<'a> {
    pub id: &'a str,
    ordering: i64,
    room: &'a str,
    kind: &'a str,
    state_key: Option<&'a str>,
    sender: &'a str,
    content: &'a str,
    metadata: &'a str,
    outlier: bool,
    group: Option<i64>,
}

impl<'a> Event<'a> {
    /// A plain message of ours.
    pub fn new(id: &'a str, ordering: i64) -> Self {
        Self {
            id,
            ordering,
            room: "!room",
            kind: "m.room.message",
            state_key: None,
            sender: "@ann:us.example",
            content: "{}",
            metadata: "{}",
            outlier: false,
            group: None,
        }
    }

    pub fn room(self, room: &'a str) -> Self {
        Self { room, ..self }
    }

    pub fn kind(self, kind: &'a str) -> Self {
        Self { kind, ..self }
    }

    pub fn state_key(self, key: &'a str) -> Self {
        Self {
            state_key: Some(key),
            ..self
        }
    }

    pub fn sender(self, sender: &'a str) -> Self {
        Self { sender, ..self }
    }

    pub fn content(self, content: &'a str) -> Self {
        Self { content, ..self }
    }

    pub fn metadata(self, metadata: &'a str) -> Self {
        Self { metadata, ..self }
    }

    pub fn outlier(self) -> Self {
        Self { outlier: true, ..self }
    }

    /// The state group after it.
    pub fn group(self, group: i64) -> Self {
        Self {
            group: Some(group),
            ..self
        }
    }
}

impl Fixture {
    /// Stores a room.
    pub async fn room(&self, room: &str) -> RoomId {
        self.database.room(room).await;
        room.into()
    }

    /// Stores an event, and its state group if it has one.
    pub async fn event(&self, event: Event<'_>) {
        sqlx::query(
            "INSERT INTO events (event_id, stream_ordering, topological_ordering, depth, type, state_key, room_id,
                                 sender, processed, outlier)
             VALUES ($1, $2, $2, $2, $3, $4, $5, $6, true, $7)",
        )
        .bind(event.id)
        .bind(event.ordering)
        .bind(event.kind)
        .bind(event.state_key)
        .bind(event.room)
        .bind(event.sender)
        .bind(event.outlier)
        .execute(&self.pool)
        .await
        .unwrap();
        sqlx::query(
            "INSERT INTO event_json (event_id, room_id, internal_metadata, json, format_version)
             VALUES ($1, $2, $3, $4, 3)",
        )
        .bind(event.id)
        .bind(event.room)
        .bind(event.metadata)
        .bind(format!(r#"{{"type":"{}","content":{}}}"#, event.kind, event.content))
        .execute(&self.pool)
        .await
        .unwrap();
        if let Some(group) = event.group {
            sqlx::query("INSERT INTO event_to_state_groups (event_id, state_group) VALUES ($1, $2)")
                .bind(event.id)
                .bind(group)
                .execute(&self.pool)
                .await
                .unwrap();
        }
    }

    /// A membership event, as far as state groups look at one.
    pub async fn membership(&self, id: &str, room: &str, user: &str, membership: &str) {
        sqlx::query(
            "INSERT INTO room_memberships (event_id, user_id, sender, room_id, membership) VALUES ($1, $2, $2, $3, $4)",
        )
        .bind(id)
        .bind(user)
        .bind(room)
        .bind(membership)
        .execute(&self.pool)
        .await
        .unwrap();
    }

    /// A state group: the rows (type, state key, event id), on top of `prev` or in full.
    pub async fn group(&self, id: i64, room: &str, prev: Option<i64>, rows: &[(&str, &str, &str)]) -> StateGroup {
        sqlx::query("INSERT INTO state_groups (id, room_id, event_id) VALUES ($1, $2, '$made-for')")
            .bind(id)
            .bind(room)
            .execute(&self.pool)
            .await
            .unwrap();
        if let Some(prev) = prev {
            sqlx::query("INSERT INTO state_group_edges (state_group, prev_state_group) VALUES ($1, $2)")
                .bind(id)
                .bind(prev)
                .execute(&self.pool)
                .await
                .unwrap();
        }
        let kinds: Vec<&str> = rows.iter().map(|row| row.0).collect();
        let keys: Vec<&str> = rows.iter().map(|row| row.1).collect();
        let events: Vec<&str> = rows.iter().map(|row| row.2).collect();
        sqlx::query(
            "INSERT INTO state_groups_state (state_group, room_id, type, state_key, event_id)
             SELECT $1, $2, r.* FROM unnest($3::text[], $4::text[], $5::text[]) AS r",
        )
        .bind(id)
        .bind(room)
        .bind(&kinds)
        .bind(&keys)
        .bind(&events)
        .execute(&self.pool)
        .await
        .unwrap();
        StateGroup(id)
    }

    /// A change of current state: `user`'s membership event in the room becomes `event` (with its row in `room_memberships`).
    pub async fn change(&self, position: i64, room: &str, user: &str, membership: Option<&str>) {
        let before: Option<String> = sqlx::query_scalar(
            "DELETE FROM current_state_events WHERE room_id = $1 AND type = 'm.room.member' AND state_key = $2
             RETURNING event_id",
        )
        .bind(room)
        .bind(user)
        .fetch_optional(&self.pool)
        .await
        .unwrap();
        let event = membership.map(|membership| format!("${position}-{room}-{user}-{membership}"));
        if let (Some(event), Some(membership)) = (&event, membership) {
            self.membership(event, room, user, membership).await;
            sqlx::query(
                "INSERT INTO current_state_events (event_id, room_id, type, state_key, membership)
                 VALUES ($1, $2, 'm.room.member', $3, $4)",
            )
            .bind(event)
            .bind(room)
            .bind(user)
            .bind(membership)
            .execute(&self.pool)
            .await
            .unwrap();
        }
        sqlx::query(
            "INSERT INTO current_state_delta_stream (stream_id, room_id, type, state_key, event_id, prev_event_id)
             VALUES ($1, $2, 'm.room.member', $3, $4, $5)",
        )
        .bind(position)
        .bind(room)
        .bind(user)
        .bind(event)
        .bind(before)
        .execute(&self.pool)
        .await
        .unwrap();
    }

    /// A sticky event's row; its ordering is also its position.
    pub async fn sticky(&self, ordering: i32, room: &str, sender: &str, expires_at: i64) {
        sqlx::query(
            "INSERT INTO sticky_events (stream_id, instance_name, event_id, room_id, event_stream_ordering, sender,
                                        expires_at)
             VALUES ($1, 'master', $2, $3, $1, $4, $5)",
        )
        .bind(ordering)
        .bind(format!("$sticky{ordering}"))
        .bind(room)
        .bind(sender)
        .bind(expires_at)
        .execute(&self.pool)
        .await
        .unwrap();
    }
}
