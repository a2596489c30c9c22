//! A database of its own for one test, on either engine, and rows to put into it.
//!
//! PostgreSQL: a private copy of Synapse's database. `BURDOCK_TEST_PG` is a superuser's URL and `BURDOCK_TEST_TEMPLATE` the
//! database to copy; without them a test says that it is skipped. SQLite: an embedded homeserver's file in a temporary
//! folder, which needs nothing.

#![allow(dead_code, reason = "each test program uses a part")]

use std::{
    path::PathBuf,
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use burdock::{
    config::{self, Secret},
    core::{
        id::{InstanceName, ServerName},
        store::{Sqlite, Store},
    },
};
use sqlx::{
    AssertSqlSafe, Column, Connection, Decode, PgConnection, PgPool, Row, SqlitePool, TypeInfo, ValueRef,
    postgres::PgPoolOptions,
    sqlite::{SqliteConnectOptions, SqliteRow},
};

/// Our server in all fixtures.
pub const US: &str = "us.example";

/// A database of one test, removed with this value.
pub struct TestDatabase {
    engine: Engine,
}

enum Engine {
    Postgres {
        server: Server,
        name: String,
        pool: PgPool,
    },
    Sqlite {
        folder: tempfile::TempDir,
        pool: SqlitePool,
    },
}

/// Makes of each `async fn name(db: TestDatabase)` two tests, one an engine.
#[allow(unused_macros, reason = "each test program uses a part")]
macro_rules! on_both_engines {
    ($(async fn $name:ident($db:ident: TestDatabase) $body:block)*) => {
        $(
            mod $name {
                use super::*;

                async fn test($db: TestDatabase) $body

                #[tokio::test]
                async fn postgres() {
                    if let Some(db) = TestDatabase::new().await {
                        Box::pin(test(db)).await;
                    }
                }

                #[tokio::test]
                async fn sqlite() {
                    Box::pin(test(TestDatabase::embedded().await)).await;
                }
            }
        )*
    };
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
        Some(Self {
            engine: Engine::Postgres { server, name, pool },
        })
    }

    /// An embedded homeserver's file.
    pub async fn embedded() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("master.db");
        let made = Sqlite::create(&path, InstanceName::from("master"), ServerName::from(US)).await;
        made.expect("the file can be made");
        let options = SqliteConnectOptions::new().filename(path).foreign_keys(true);
        let pool = SqlitePool::connect_lazy_with(options.busy_timeout(Duration::from_secs(30)));
        Self {
            engine: Engine::Sqlite { folder, pool },
        }
    }

    /// The embedded homeserver's file.
    pub fn path(&self) -> PathBuf {
        match &self.engine {
            Engine::Postgres { .. } => panic!("a database server is no file"),
            Engine::Sqlite { folder, .. } => folder.path().join("master.db"),
        }
    }

    /// A superuser's connections, for a test that is about PostgreSQL.
    pub fn pool(&self) -> &PgPool {
        match &self.engine {
            Engine::Postgres { pool, .. } => pool,
            Engine::Sqlite { .. } => panic!("a file has no superuser"),
        }
    }

    /// The configuration that leads to this database.
    pub fn config(&self) -> config::Database {
        match &self.engine {
            Engine::Postgres { .. } => config::Database::Postgres(Box::new(self.server())),
            Engine::Sqlite { .. } => config::Database::Sqlite(self.path()),
        }
    }

    /// The configuration that leads to this copy of Synapse's database.
    pub fn server(&self) -> config::Postgres {
        let Engine::Postgres { server, name, .. } = &self.engine else {
            panic!("a file has no server")
        };
        config::Postgres {
            host: Some(server.host.clone()),
            port: Some(server.port),
            user: Some(server.user.clone()),
            password: server.password.clone().map(Secret),
            name: name.clone(),
            ssl_mode: None,
            ssl_root_cert: None,
            ssl_client: None,
            max_connections: 6,
            statement_timeout: Duration::from_secs(30),
            allow_unsafe_locale: false,
        }
    }

    /// A store on this database for the instance `me`, with our schema made.
    pub async fn store(&self, me: &str) -> Store {
        let store = self.connect(me).await;
        store.migrate().await.expect("our schema can be made");
        store
    }

    /// A store on this database for the instance `me`.
    pub async fn connect(&self, me: &str) -> Store {
        Store::connect(&self.config(), InstanceName::from(me), ServerName::from(US))
            .await
            .expect("the database answers")
    }

    /// One of `postgres` and `sqlite`, for what differs.
    pub fn pick<T>(&self, postgres: T, sqlite: T) -> T {
        match self.engine {
            Engine::Postgres { .. } => postgres,
            Engine::Sqlite { .. } => sqlite,
        }
    }

    /// Runs statements of the test's own. `burdock.instances` is found on both engines.
    pub async fn run(&self, sql: &str) {
        let result = match &self.engine {
            Engine::Postgres { pool, .. } => sqlx::raw_sql(AssertSqlSafe(sql)).execute(pool).await.map(drop),
            Engine::Sqlite { pool, .. } => sqlx::raw_sql(AssertSqlSafe(sql)).execute(pool).await.map(drop),
        };
        result.unwrap_or_else(|e| panic!("{sql}: {e}"));
    }

    /// The rows of `sql`, each as PostgreSQL's text of a row: `(a,1,)`. Sorted as the query says.
    pub async fn rows(&self, sql: &str) -> Vec<String> {
        let result = match &self.engine {
            Engine::Postgres { pool, .. } => {
                let sql = AssertSqlSafe(format!("SELECT (t.*)::text FROM ({sql}) t"));
                sqlx::query_scalar(sql).fetch_all(pool).await
            }
            Engine::Sqlite { pool, .. } => {
                let sql = AssertSqlSafe(sql.replace("burdock.", ""));
                let rows = sqlx::query(sql).fetch_all(pool).await;
                rows.map(|rows| rows.iter().map(row_text).collect())
            }
        };
        result.unwrap_or_else(|e| panic!("{sql}: {e}"))
    }

    /// A room.
    pub async fn room(&self, room: &str) {
        let room = quoted(room);
        self.run(&format!(
            "INSERT INTO rooms (room_id, creator, room_version) VALUES ({room}, '', '10')"
        ))
        .await;
    }

    /// An event, with its JSON. See [`Event::new`].
    pub async fn event(&self, event: &Event<'_>) {
        let json = serde_json::json!({
            "type": event.kind, "room_id": event.room, "sender": event.sender, "state_key": event.state_key,
            "origin_server_ts": event.received_ts, "depth": event.ordering, "content": {}, "auth_events": [],
            "prev_events": [], "hashes": {}, "signatures": {}, "unsigned": {},
        });
        let (id, room) = (quoted(event.id), quoted(event.room));
        let state_key = event.state_key.map_or("NULL".to_owned(), quoted);
        // What only Synapse's table has.
        let (columns, values) = self.pick(
            (
                "topological_ordering, processed, ",
                format!("{}, true, ", event.ordering),
            ),
            ("", String::new()),
        );
        self.run(&format!(
            "INSERT INTO events ({columns} depth, event_id, type, room_id, outlier, origin_server_ts, received_ts, \
                                 sender, instance_name, stream_ordering, state_key) \
             VALUES ({values} {ordering}, {id}, {kind}, {room}, {outlier}, {ts}, {ts}, {sender}, 'master', {ordering}, \
                     {state_key}); \
             INSERT INTO event_json (event_id, room_id, internal_metadata, json, format_version) \
             VALUES ({id}, {room}, {metadata}, {json}, 3)",
            ordering = event.ordering,
            kind = quoted(event.kind),
            outlier = event.outlier,
            ts = event.received_ts,
            sender = quoted(event.sender),
            metadata = quoted(event.metadata),
            json = quoted(&json.to_string()),
        ))
        .await;
    }

    /// A membership event of `user` that is the room's current state, with the rows that go with it.
    pub async fn member(&self, event: &Event<'_>, membership: &str) {
        let event = Event {
            kind: "m.room.member",
            state_key: Some(event.sender),
            ..*event
        };
        self.event(&event).await;
        let (id, room, user, membership) = (
            quoted(event.id),
            quoted(event.room),
            quoted(event.sender),
            quoted(membership),
        );
        let ordering = event.ordering;
        self.run(&format!(
            "INSERT INTO room_memberships (event_id, user_id, sender, room_id, membership, event_stream_ordering) \
             VALUES ({id}, {user}, {user}, {room}, {membership}, {ordering}); \
             INSERT INTO current_state_events (event_id, room_id, type, state_key, membership, event_stream_ordering) \
             VALUES ({id}, {room}, 'm.room.member', {user}, {membership}, {ordering}) \
             ON CONFLICT (room_id, type, state_key) DO UPDATE SET event_id = EXCLUDED.event_id, \
                membership = EXCLUDED.membership, event_stream_ordering = EXCLUDED.event_stream_ordering"
        ))
        .await;
    }

    /// An event of ours with its row among the sticky events.
    pub async fn sticky(&self, event: &Event<'_>, position: i32, expires_at: i64) {
        self.event(event).await;
        self.run(&format!(
            "INSERT INTO sticky_events \
                (stream_id, instance_name, event_id, room_id, event_stream_ordering, sender, expires_at) \
             VALUES ({position}, 'master', {}, {}, {}, {}, {expires_at})",
            quoted(event.id),
            quoted(event.room),
            event.ordering,
            quoted(event.sender),
        ))
        .await;
    }

    /// Returns once a statement of the store waits for a lock: the moment to do what it races with.
    pub async fn until_waiting(&self) {
        let waiting = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() \
                       AND application_name = 'burdock' AND wait_event_type = 'Lock')";
        while !sqlx::query_scalar::<_, bool>(waiting)
            .fetch_one(self.pool())
            .await
            .expect("activity can be read")
        {
            tokio::task::yield_now().await;
        }
    }

    /// The sticky backlog, each row as `destination room position`.
    pub async fn backlog(&self) -> Vec<String> {
        let rows = self
            .rows(
                "SELECT destination || ' ' || room_id || ' ' || sticky_events_stream_position AS line \
                 FROM destination_rooms_sticky_events_backlog ORDER BY 1",
            )
            .await;
        rows.iter()
            .map(|row| row.trim_matches(['(', ')', '"']).to_owned())
            .collect()
    }
}

/// A text as SQL writes it.
pub fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "''"))
}

/// A row as PostgreSQL would write it.
fn row_text(row: &SqliteRow) -> String {
    let values = row.columns().iter().map(|column| {
        let value = row.try_get_raw(column.ordinal()).expect("the column is there");
        if value.is_null() {
            return String::new();
        }
        if value.type_info().name() == "INTEGER" {
            return <i64 as Decode<sqlx::Sqlite>>::decode(value)
                .expect("an integer")
                .to_string();
        }
        let text = <String as Decode<sqlx::Sqlite>>::decode(value).expect("a text");
        if text.is_empty() || text.contains(|c: char| c.is_whitespace() || "(),\"\\".contains(c)) {
            format!("\"{}\"", text.replace('"', "\"\""))
        } else {
            text
        }
    });
    format!("({})", values.collect::<Vec<_>>().join(","))
}

impl Drop for TestDatabase {
    /// On a thread of its own: the test's runtime may be in the middle of a panic.
    fn drop(&mut self) {
        let Engine::Postgres { server, name, .. } = &self.engine else {
            return;
        };
        let (url, copy) = (server.url("postgres"), name.clone());
        let dropped = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(async {
                let mut admin = PgConnection::connect(&url).await?;
                let sql = AssertSqlSafe(format!("DROP DATABASE IF EXISTS {copy} WITH (FORCE)"));
                sqlx::query(sql).execute(&mut admin).await?;
                Ok::<_, Box<dyn std::error::Error + Send + Sync>>(())
            })
        });
        if !matches!(dropped.join(), Ok(Ok(()))) {
            eprintln!("could not drop the test database {name}");
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
