//! The rows that events and state are made of, on either engine.

use std::{future::Future, ops::Deref};

use burdock::core::{
    id::{RoomId, StateGroup},
    store::Store,
};

use crate::database::{TestDatabase, quoted};

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

/// Runs `test` on a database of its own of each engine that is offered.
pub async fn with_databases<F: Future<Output = ()>>(test: impl Fn(Fixture) -> F) {
    for database in [Some(TestDatabase::embedded().await), TestDatabase::new().await] {
        let Some(database) = database else { continue };
        let store = database.connect("fed1").await;
        test(Fixture { store, database }).await;
    }
}

/// Runs `test` on a copy of Synapse's database, if one is offered: it is about what an embedded homeserver has not.
pub async fn with_synapses_database<F: Future<Output = ()>>(test: impl Fn(Fixture) -> F) {
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
        let (columns, values) = self.pick(
            (
                "topological_ordering, processed, ",
                format!("{}, true, ", event.ordering),
            ),
            ("instance_name, ", "'master', ".to_owned()),
        );
        let group = event.group.map_or(String::new(), |group| {
            format!(
                "; INSERT INTO event_to_state_groups (event_id, state_group) VALUES ({}, {group})",
                quoted(event.id)
            )
        });
        self.run(&format!(
            "INSERT INTO events ({columns} event_id, stream_ordering, depth, type, state_key, room_id, sender, outlier)
             VALUES ({values} {id}, {ordering}, {ordering}, {kind}, {state_key}, {room}, {sender}, {outlier});
             INSERT INTO event_json (event_id, room_id, internal_metadata, json, format_version)
             VALUES ({id}, {room}, {metadata}, {json}, 3) {group}",
            id = quoted(event.id),
            ordering = event.ordering,
            kind = quoted(event.kind),
            state_key = event.state_key.map_or("NULL".to_owned(), quoted),
            room = quoted(event.room),
            sender = quoted(event.sender),
            outlier = event.outlier,
            metadata = quoted(event.metadata),
            json = quoted(&format!(r#"{{"type":"{}","content":{}}}"#, event.kind, event.content)),
        ))
        .await;
    }

    /// A membership event, as far as state groups look at one.
    pub async fn membership(&self, id: &str, room: &str, user: &str, membership: &str) {
        let (id, room, user, membership) = (quoted(id), quoted(room), quoted(user), quoted(membership));
        self.run(&format!(
            "INSERT INTO room_memberships (event_id, user_id, sender, room_id, membership)
             VALUES ({id}, {user}, {user}, {room}, {membership})"
        ))
        .await;
    }

    /// A state group: the rows (type, state key, event id), on top of `prev` or in full.
    pub async fn group(&self, id: i64, room: &str, prev: Option<i64>, rows: &[(&str, &str, &str)]) -> StateGroup {
        let room = quoted(room);
        let mut sql = vec![format!(
            "INSERT INTO state_groups (id, room_id, event_id) VALUES ({id}, {room}, '$made-for')"
        )];
        if let Some(prev) = prev {
            sql.push(format!(
                "INSERT INTO state_group_edges (state_group, prev_state_group) VALUES ({id}, {prev})"
            ));
        }
        for (kind, key, event) in rows {
            let (kind, key, event) = (quoted(kind), quoted(key), quoted(event));
            sql.push(format!(
                "INSERT INTO state_groups_state (state_group, room_id, type, state_key, event_id)
                 VALUES ({id}, {room}, {kind}, {key}, {event})"
            ));
        }
        self.run(&sql.join(";")).await;
        StateGroup(id)
    }

    /// A change of current state: `user`'s membership event in the room becomes `event` (with its row in `room_memberships`).
    pub async fn change(&self, position: i64, room: &str, user: &str, membership: Option<&str>) {
        let event = membership.map(|membership| format!("${position}-{room}-{user}-{membership}"));
        if let (Some(event), Some(membership)) = (&event, membership) {
            self.membership(event, room, user, membership).await;
        }
        let (room, user) = (quoted(room), quoted(user));
        let event = event.as_deref().map_or("NULL".to_owned(), quoted);
        let its_row = format!("room_id = {room} AND type = 'm.room.member' AND state_key = {user}");
        self.run(&format!(
            "INSERT INTO current_state_delta_stream (stream_id, room_id, type, state_key, event_id, prev_event_id)
             VALUES ({position}, {room}, 'm.room.member', {user}, {event},
                     (SELECT event_id FROM current_state_events WHERE {its_row}));
             DELETE FROM current_state_events WHERE {its_row}"
        ))
        .await;
        if let Some(membership) = membership {
            self.run(&format!(
                "INSERT INTO current_state_events (event_id, room_id, type, state_key, membership)
                 VALUES ({event}, {room}, 'm.room.member', {user}, {})",
                quoted(membership)
            ))
            .await;
        }
    }

    /// A sticky event's row; its ordering is also its position.
    pub async fn sticky(&self, ordering: i32, room: &str, sender: &str, expires_at: i64) {
        self.run(&format!(
            "INSERT INTO sticky_events (stream_id, instance_name, event_id, room_id, event_stream_ordering, sender,
                                        expires_at)
             VALUES ({ordering}, 'master', '$sticky{ordering}', {}, {ordering}, {}, {expires_at})",
            quoted(room),
            quoted(sender),
        ))
        .await;
    }
}
