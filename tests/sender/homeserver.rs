//! Synapse, as far as a sender sees it: the rows that it writes, and the channel.

use std::{
    collections::HashMap,
    ops::Deref,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use burdock::{
    config::{Redis, RedisAddress},
    core::clock,
};
use futures_util::StreamExt as _;
use parking_lot::Mutex;
use redis::{AsyncCommands as _, Client, aio::MultiplexedConnection};
use tokio::task::JoinHandle;

use crate::{
    database::{Event, TestDatabase},
    remote::Remote,
    until,
};

/// The instance name of the sender.
pub const ME: &str = "sender";

/// A user of ours.
pub const USER: &str = "@me:us.example";

/// A homeserver. Its events are named by their stream ordering: `$7`.
pub struct Homeserver {
    pub db: TestDatabase,
    /// The channel: no other test's.
    pub channel: String,
    redis_port: u16,
    connection: MultiplexedConnection,
    lines: Arc<Mutex<Vec<String>>>,
    listens: JoinHandle<()>,
    /// The last stream ordering given out.
    pub position: i64,
    announced: i64,
    sticky_position: i32,
    /// Each room's state group.
    groups: HashMap<String, i64>,
}

impl Deref for Homeserver {
    type Target = TestDatabase;

    fn deref(&self) -> &TestDatabase {
        &self.db
    }
}

impl Drop for Homeserver {
    fn drop(&mut self) {
        self.listens.abort();
    }
}

impl Homeserver {
    /// `None`, said aloud, where there is no database or no Redis for tests.
    pub async fn new() -> Option<Self> {
        static CHANNELS: AtomicUsize = AtomicUsize::new(0);
        let Ok(url) = std::env::var("BURDOCK_TEST_REDIS") else {
            eprintln!("skipped: BURDOCK_TEST_REDIS is not set");
            return None;
        };
        let port = url.trim_end_matches('/').rsplit(':').next();
        let redis_port = port
            .and_then(|port| port.parse().ok())
            .expect("BURDOCK_TEST_REDIS ends with a port");
        let db = TestDatabase::new().await?;
        let count = CHANNELS.fetch_add(1, Ordering::Relaxed);
        let channel = format!("sender-{}-{count}.example", std::process::id());
        let client = Client::open(url).unwrap();
        let (mut sink, mut heard) = client.get_async_pubsub().await.expect("Redis answers").split();
        sink.subscribe(&channel).await.unwrap();
        let lines = Arc::<Mutex<Vec<String>>>::default();
        let listens = {
            let lines = Arc::clone(&lines);
            tokio::spawn(async move {
                let _open = sink;
                while let Some(message) = heard.next().await {
                    lines.lock().push(message.get_payload().expect("a line is text"));
                }
            })
        };
        Some(Self {
            db,
            channel,
            redis_port,
            connection: client.get_multiplexed_async_connection().await.unwrap(),
            lines,
            listens,
            position: 0,
            announced: 0,
            sticky_position: 0,
            groups: HashMap::new(),
        })
    }

    /// How the sender reaches Redis.
    pub fn redis(&self) -> Redis {
        Redis {
            address: RedisAddress::Tcp {
                host: "127.0.0.1".into(),
                port: self.redis_port,
                tls: None,
            },
            username: None,
            password: None,
            dbid: None,
        }
    }

    /// Publishes a line.
    pub async fn say(&self, line: &str) {
        let _: i64 = self.connection.clone().publish(&self.channel, line).await.unwrap();
    }

    /// Tells that everything up to the last event is persisted.
    pub async fn announce(&mut self) {
        self.say(&format!("POSITION events master {} {}", self.announced, self.position))
            .await;
        self.announced = self.position;
    }

    /// All lines of the channel that begin so, up to now.
    pub fn heard(&self, start: &str) -> Vec<String> {
        let lines = self.lines.lock();
        lines.iter().filter(|line| line.starts_with(start)).cloned().collect()
    }

    /// Waits for a line that begins so.
    pub async fn hears(&self, start: &str) {
        until(&format!("{start} is said"), async || !self.heard(start).is_empty()).await;
    }

    /// Asks for positions and waits for the sender's. Whatever it said before is heard by then.
    pub async fn asks_for_positions(&self) -> String {
        let own = format!("POSITION caches {ME} ");
        let before = self.heard(&own).len();
        self.say("REPLICATE ").await;
        until("the sender answers REPLICATE", async || self.heard(&own).len() > before).await;
        self.heard(&own).pop().unwrap()
    }

    /// Records that what was sent up to now was sent by whoever was the sender before.
    pub async fn all_is_sent(&self) {
        let position = self.position;
        self.run(&format!(
            "UPDATE federation_stream_position SET stream_id = {position} WHERE type = 'events'"
        ))
        .await;
    }

    /// A room of ours in which these servers are.
    pub async fn room(&mut self, room: &str, members: &[&Arc<Remote>]) {
        self.db.room(room).await;
        self.member(room, USER, "join", 1_000).await;
        for member in members {
            self.member(room, &member.user(), "join", 1_000).await;
        }
    }

    /// A user of the server joins a room, or leaves it, this moment. Returns the event.
    pub async fn membership(&mut self, room: &str, server: &Remote, membership: &str) -> String {
        self.member(room, &server.user(), membership, clock::now().wall.0).await
    }

    async fn member(&mut self, room: &str, user: &str, membership: &str, at: i64) -> String {
        self.position += 1;
        let (position, id) = (self.position, format!("${}", self.position));
        let before = "SELECT event_id FROM current_state_events WHERE type = 'm.room.member'";
        self.run(&format!(
            "INSERT INTO current_state_delta_stream (stream_id, room_id, type, state_key, event_id, prev_event_id)
             VALUES ({position}, '{room}', 'm.room.member', '{user}', '{id}',
                     ({before} AND room_id = '{room}' AND state_key = '{user}'))"
        ))
        .await;
        let event = Event::new(&id, room, user, position);
        self.db
            .member(
                &Event {
                    received_ts: at,
                    ..event
                },
                membership,
            )
            .await;
        self.run(&format!(
            "INSERT INTO state_groups (id, room_id, event_id) VALUES ({position}, '{room}', '{id}');
             INSERT INTO state_groups_state (state_group, room_id, type, state_key, event_id)
                SELECT {position}, room_id, type, state_key, event_id FROM current_state_events WHERE room_id = '{room}';
             INSERT INTO event_to_state_groups (event_id, state_group) VALUES ('{id}', {position})"
        ))
        .await;
        self.groups.insert(room.to_owned(), position);
        self.newest(room, &id).await;
        id
    }

    async fn newest(&self, room: &str, id: &str) {
        self.run(&format!(
            "DELETE FROM event_forward_extremities WHERE room_id = '{room}';
             INSERT INTO event_forward_extremities (event_id, room_id) VALUES ('{id}', '{room}')"
        ))
        .await;
    }

    /// A message of ours.
    pub async fn message(&mut self, room: &str) -> String {
        self.messages(room, 1).await.remove(0)
    }

    /// So many messages of ours.
    pub async fn messages(&mut self, room: &str, count: i64) -> Vec<String> {
        let first = self.position + 1;
        self.position += count;
        self.events(room, first..=self.position, "master", "").await
    }

    /// A message of ours, persisted by that writer, at a position that comes from elsewhere.
    pub async fn message_by(&mut self, writer: &str, room: &str, position: i64) -> String {
        self.position = self.position.max(position);
        self.events(room, position..=position, writer, "").await.remove(0)
    }

    /// So many sticky events of ours that expire after so long.
    pub async fn sticky(&mut self, room: &str, count: i64, lives: Duration) -> Vec<String> {
        let first = self.position + 1;
        self.position += count;
        let duration = r#""msc4354_sticky":{"duration_ms":3600000},"#;
        let ids = self.events(room, first..=self.position, "master", duration).await;
        let expires_at = clock::now().wall.plus(i64::try_from(lives.as_millis()).unwrap()).0;
        let (below, last) = (self.sticky_position, self.position);
        self.run(&format!(
            "INSERT INTO sticky_events
                (stream_id, instance_name, event_id, room_id, event_stream_ordering, sender, expires_at)
             SELECT {below} + n - {first} + 1, 'master', '$' || n, '{room}', n, '{USER}', {expires_at}
             FROM generate_series({first}, {last}) n"
        ))
        .await;
        self.sticky_position += i32::try_from(count).unwrap();
        ids
    }

    /// The time of these sticky events is over.
    pub async fn expire(&self, ids: &[String]) {
        let ids = ids.join("','");
        self.run(&format!(
            "UPDATE sticky_events SET expires_at = 1 WHERE event_id IN ('{ids}')"
        ))
        .await;
    }

    /// Events of ours with `more` in their JSON. An event's content names it, as remotes know it by that.
    async fn events(
        &self,
        room: &str,
        orderings: std::ops::RangeInclusive<i64>,
        writer: &str,
        more: &str,
    ) -> Vec<String> {
        let (first, last) = (*orderings.start(), *orderings.end());
        let group = self.groups[room];
        self.run(&format!(
            r#"INSERT INTO events (topological_ordering, depth, event_id, type, room_id, processed, outlier,
                                   origin_server_ts, received_ts, sender, instance_name, stream_ordering)
               SELECT n, n, '$' || n, 'm.room.message', '{room}', true, false, 1000, 1000, '{USER}', '{writer}', n
               FROM generate_series({first}, {last}) n;
               INSERT INTO event_json (event_id, room_id, internal_metadata, json, format_version)
               SELECT '$' || n, '{room}', '{{}}',
                      '{{"auth_events":[],"content":{{"body":"$' || n || '"}},"depth":' || n || ',"hashes":{{}},{more}' ||
                      '"origin_server_ts":1000,"prev_events":["$before"],"room_id":"{room}","sender":"{USER}",' ||
                      '"signatures":{{}},"type":"m.room.message","unsigned":{{}}}}', 3
               FROM generate_series({first}, {last}) n;
               INSERT INTO event_to_state_groups (event_id, state_group)
               SELECT '$' || n, {group} FROM generate_series({first}, {last}) n"#
        ))
        .await;
        self.newest(room, &format!("${last}")).await;
        orderings.map(|ordering| format!("${ordering}")).collect()
    }

    /// What is recorded as owed to a server: each room with the greatest position owed.
    pub async fn owed(&self, server: &Remote) -> Vec<String> {
        self.rows(&format!(
            "SELECT room_id, stream_ordering FROM destination_rooms r JOIN destinations d USING (destination)
             WHERE destination = '{}' AND stream_ordering > coalesce(last_successful_stream_ordering, 0) ORDER BY 1",
            server.name
        ))
        .await
    }

    /// The server's back-off, ms; 0 if it has none.
    pub async fn backoff(&self, server: &Remote) -> i64 {
        let interval = "SELECT retry_interval FROM destinations WHERE destination = $1";
        sqlx::query_scalar::<_, Option<i64>>(interval)
            .bind(&server.name)
            .fetch_optional(self.pool())
            .await
            .unwrap()
            .flatten()
            .unwrap_or(0)
    }

    /// The positions of the `caches` rows that the sender wrote: one for each time it changed a back-off.
    pub async fn cache_rows(&self) -> Vec<i64> {
        sqlx::query_scalar(
            "SELECT stream_id FROM cache_invalidation_stream_by_instance WHERE instance_name = $1 ORDER BY 1",
        )
        .bind(ME)
        .fetch_all(self.pool())
        .await
        .unwrap()
    }

    /// The sender's cursor.
    pub async fn cursor(&self) -> i64 {
        sqlx::query_scalar(
            "SELECT stream_id FROM federation_stream_position WHERE type = 'events' AND instance_name = $1",
        )
        .bind(ME)
        .fetch_one(self.pool())
        .await
        .unwrap()
    }
}
