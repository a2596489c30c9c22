//! A private copy of Synapse's database for one test, and rows to put into it.
//!
//! `BURDOCK_TEST_PG` is a superuser's URL and `BURDOCK_TEST_TEMPLATE` the database to copy; without them a test says
//! that it is skipped.

#![allow(dead_code, reason = "each test program uses a part")]

use std::{
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use burdock::{
    config::{Database, Secret},
    core::{
        id::{InstanceName, ServerName},
        store::Store,
    },
};
use sqlx::{AssertSqlSafe, Connection, PgConnection, PgPool, postgres::PgPoolOptions};

/// Our server in all fixtures.
pub const US: &str = "us.example";

/// A copy of the template, dropped with this value.
pub struct TestDatabase {
    server: Server,
    name: String,
    /// A superuser's connections, for fixtures and for looking.
    pub pool: PgPool,
}

impl TestDatabase {
    /// Copies the template. `None`, said aloud, without the environment that names it.
    pub async fn new() -> Option<Self> {
        static COPIES: AtomicU32 = AtomicU32::new(0);
        let (Ok(url), Ok(template)) = (std::env::var("BURDOCK_TEST_PG"), std::env::var("BURDOCK_TEST_TEMPLATE")) else {
            eprintln!("skipped: BURDOCK_TEST_PG and BURDOCK_TEST_TEMPLATE are not set");
            return None;
        };
        let server = Server::parse(&url);
        let name = format!(
            "burdock_test_{}_{}",
            std::process::id(),
            COPIES.fetch_add(1, Ordering::Relaxed)
        );
        let mut admin = PgConnection::connect(&url).await.expect("BURDOCK_TEST_PG answers");
        sqlx::query(AssertSqlSafe(format!("CREATE DATABASE {name} TEMPLATE {template}")))
            .execute(&mut admin)
            .await
            .expect("the template can be copied");
        let pool = PgPoolOptions::new()
            .connect(&server.url(&name))
            .await
            .expect("the copy can be opened");
        Some(Self { server, name, pool })
    }

    /// The configuration that leads to this copy.
    pub fn config(&self) -> Database {
        Database {
            host: Some(self.server.host.clone()),
            port: Some(self.server.port),
            user: Some(self.server.user.clone()),
            password: self.server.password.clone().map(Secret),
            name: self.name.clone(),
            ssl_mode: None,
            ssl_root_cert: None,
            ssl_client: None,
            max_connections: 6,
            statement_timeout: Duration::from_secs(30),
            allow_unsafe_locale: false,
        }
    }

    /// A store on this copy for the instance `me`, with our schema made.
    pub async fn store(&self, me: &str) -> Store {
        let store = self.connect(me).await;
        store.migrate().await.expect("our schema can be made");
        store
    }

    /// A store on this copy for the instance `me`.
    pub async fn connect(&self, me: &str) -> Store {
        Store::connect(&self.config(), InstanceName::from(me), ServerName::from(US))
            .await
            .expect("the copy answers")
    }

    /// Runs a statement of the test's own.
    pub async fn run(&self, sql: &str) {
        sqlx::raw_sql(AssertSqlSafe(sql))
            .execute(&self.pool)
            .await
            .unwrap_or_else(|e| panic!("{sql}: {e}"));
    }

    /// The rows of `sql`, each as PostgreSQL's text of a row: `(a,1,)`. Sorted as the query says.
    pub async fn rows(&self, sql: &str) -> Vec<String> {
        sqlx::query_scalar(AssertSqlSafe(format!("SELECT (t.*)::text FROM ({sql}) t")))
            .fetch_all(&self.pool)
            .await
            .unwrap_or_else(|e| panic!("{sql}: {e}"))
    }

    /// A room.
    pub async fn room(&self, room: &str) {
        sqlx::query("INSERT INTO rooms (room_id, is_public, creator, room_version) VALUES ($1, false, '', '10')")
            .bind(room)
            .execute(&self.pool)
            .await
            .expect("a room can be inserted");
    }

    /// An event, with its JSON. See [`Event::new`].
    pub async fn event(&self, event: &Event<'_>) {
        sqlx::query(
            "INSERT INTO events (topological_ordering, depth, event_id, type, room_id, processed, outlier, \
                                 origin_server_ts, received_ts, sender, instance_name, stream_ordering, state_key) \
             VALUES ($1, $1, $2, $3, $4, true, $5, $6, $6, $7, 'master', $1, $8)",
        )
        .bind(event.ordering)
        .bind(event.id)
        .bind(event.kind)
        .bind(event.room)
        .bind(event.outlier)
        .bind(event.received_ts)
        .bind(event.sender)
        .bind(event.state_key)
        .execute(&self.pool)
        .await
        .expect("an event can be inserted");
        let json = serde_json::json!({
            "type": event.kind, "room_id": event.room, "sender": event.sender, "state_key": event.state_key,
            "origin_server_ts": event.received_ts, "depth": event.ordering, "content": {}, "auth_events": [],
            "prev_events": [], "hashes": {}, "signatures": {}, "unsigned": {},
        });
        sqlx::query(
            "INSERT INTO event_json (event_id, room_id, internal_metadata, json, format_version) \
             VALUES ($1, $2, $3, $4, 3)",
        )
        .bind(event.id)
        .bind(event.room)
        .bind(event.metadata)
        .bind(json.to_string())
        .execute(&self.pool)
        .await
        .expect("an event's JSON can be inserted");
    }

    /// A membership event of `user` that is the room's current state, with the rows that go with it.
    pub async fn member(&self, event: &Event<'_>, membership: &str) {
        let event = Event {
            kind: "m.room.member",
            state_key: Some(event.sender),
            ..*event
        };
        self.event(&event).await;
        sqlx::query(
            "INSERT INTO room_memberships (event_id, user_id, sender, room_id, membership, event_stream_ordering) \
             VALUES ($1, $2, $2, $3, $4, $5)",
        )
        .bind(event.id)
        .bind(event.sender)
        .bind(event.room)
        .bind(membership)
        .bind(event.ordering)
        .execute(&self.pool)
        .await
        .expect("a membership can be inserted");
        sqlx::query(
            "INSERT INTO current_state_events (event_id, room_id, type, state_key, membership, event_stream_ordering) \
             VALUES ($1, $2, 'm.room.member', $3, $4, $5) \
             ON CONFLICT (room_id, type, state_key) DO UPDATE SET event_id = EXCLUDED.event_id, \
                membership = EXCLUDED.membership, event_stream_ordering = EXCLUDED.event_stream_ordering",
        )
        .bind(event.id)
        .bind(event.room)
        .bind(event.sender)
        .bind(membership)
        .bind(event.ordering)
        .execute(&self.pool)
        .await
        .expect("current state can be inserted");
    }

    /// An event of ours with its row among the sticky events.
    pub async fn sticky(&self, event: &Event<'_>, position: i32, expires_at: i64) {
        self.event(event).await;
        sqlx::query(
            "INSERT INTO sticky_events \
                (stream_id, instance_name, event_id, room_id, event_stream_ordering, sender, expires_at) \
             VALUES ($1, 'master', $2, $3, $4, $5, $6)",
        )
        .bind(position)
        .bind(event.id)
        .bind(event.room)
        .bind(i32::try_from(event.ordering).expect("a sticky event's ordering has 32 bits"))
        .bind(event.sender)
        .bind(expires_at)
        .execute(&self.pool)
        .await
        .expect("a sticky event can be inserted");
    }

    /// Returns once a statement of the store waits for a lock: the moment to do what it races with.
    pub async fn until_waiting(&self) {
        let waiting = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() \
                       AND application_name = 'burdock' AND wait_event_type = 'Lock')";
        while !sqlx::query_scalar::<_, bool>(waiting)
            .fetch_one(&self.pool)
            .await
            .expect("activity can be read")
        {
            tokio::task::yield_now().await;
        }
    }

    /// The sticky backlog, each row as `destination room position`.
    pub async fn backlog(&self) -> Vec<String> {
        sqlx::query_scalar(
            "SELECT concat_ws(' ', destination, room_id, sticky_events_stream_position) \
             FROM destination_rooms_sticky_events_backlog ORDER BY 1",
        )
        .fetch_all(&self.pool)
        .await
        .expect("the backlog can be read")
    }
}

impl Drop for TestDatabase {
    /// On a thread of its own: the test's runtime may be in the middle of a panic.
    fn drop(&mut self) {
        let (url, name) = (self.server.url("postgres"), self.name.clone());
        let dropped = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(async {
                let mut admin = PgConnection::connect(&url).await?;
                let sql = AssertSqlSafe(format!("DROP DATABASE IF EXISTS {name} WITH (FORCE)"));
                sqlx::query(sql).execute(&mut admin).await?;
                Ok::<_, Box<dyn std::error::Error + Send + Sync>>(())
            })
        });
        if !matches!(dropped.join(), Ok(Ok(()))) {
            eprintln!("could not drop the test database {}", self.name);
        }
    }
}

/// An event to insert. `..*event` varies one.
#[derive(Clone, Copy)]
pub struct Event<'a> {
    pub id: &'a str,
    pub room: &'a str,
    pub sender: &'a str,
    /// `stream_ordering`, and its depth.
    pub ordering: i64,
    pub kind: &'a str,
    pub state_key: Option<&'a str>,
    /// Also its `origin_server_ts`.
    pub received_ts: i64,
    pub outlier: bool,
    /// `internal_metadata`.
    pub metadata: &'a str,
}

impl<'a> Event<'a> {
    /// A message.
    pub fn new(id: &'a str, room: &'a str, sender: &'a str, ordering: i64) -> Self {
        Self {
            id,
            room,
            sender,
            ordering,
            kind: "m.room.message",
            state_key: None,
            received_ts: 1_000,
            outlier: false,
            metadata: "{}",
        }
    }
}

/// The server of `BURDOCK_TEST_PG`.
struct Server {
    host: String,
    port: u16,
    user: String,
    password: Option<String>,
}

impl Server {
    /// Reads `postgres://user[:password]@host[:port]/...`.
    fn parse(url: &str) -> Self {
        let (user, address) = url
            .split_once("://")
            .and_then(|(_, rest)| rest.split('/').next())
            .and_then(|authority| authority.rsplit_once('@'))
            .expect("BURDOCK_TEST_PG has the form postgres://user@host:port/database");
        let (user, password) = user
            .split_once(':')
            .map_or((user, None), |(user, word)| (user, Some(word.to_owned())));
        let (host, port) = address.split_once(':').unwrap_or((address, "5432"));
        let port = port.parse().expect("BURDOCK_TEST_PG has a port");
        Self {
            host: host.to_owned(),
            port,
            user: user.to_owned(),
            password,
        }
    }

    fn url(&self, database: &str) -> String {
        let word = self
            .password
            .as_ref()
            .map_or_else(String::new, |word| format!(":{word}"));
        format!("postgres://{}{word}@{}:{}/{database}", self.user, self.host, self.port)
    }
}
