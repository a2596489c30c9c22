//! The replication API from outside: over a real socket, as somebody who follows uses it.

use std::{
    collections::{BTreeMap, VecDeque},
    net::SocketAddr,
    sync::Arc,
};

use burdock::{
    admin::{self, Replication},
    config::Secret,
    core::{
        clock::Millis,
        id::{StreamOrdering, Token},
        metrics::{DestinationState, Metrics},
        replication::{
            ephemeral::{EPHEMERAL_KEPT, TypingRow},
            feed::{Bell, Feed, MemoryTable, Record, Row, Table, TableError},
            rows::PresenceRow,
        },
        store::{CURRENT_STATE_DELTAS, EVENTS, RetryTimings, STICKY_EVENTS},
    },
    sender::tables::{BacklogRow, DestinationRow, TRANSACTIONS_KEPT, TransactionRow},
};
use futures_util::{FutureExt as _, future::BoxFuture};
use parking_lot::Mutex;
use rand::{Rng, RngExt, SeedableRng, rngs::SmallRng};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    task::JoinHandle,
};
use tokio_util::sync::CancellationToken;

const SECRET: &str = "correct horse";

/// A process that serves a feed.
struct Service {
    address: SocketAddr,
    shutdown: CancellationToken,
    serving: JoinHandle<std::io::Result<()>>,
}

impl Service {
    async fn start(feed: Feed) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let shutdown = CancellationToken::new();
        let api = Replication::new(Arc::new(feed), Secret(SECRET.to_owned()), shutdown.clone());
        let metrics = Arc::new(Metrics::new(&"hs1.test".into()));
        Self {
            address,
            shutdown: shutdown.clone(),
            serving: tokio::spawn(admin::serve(listener, metrics, Some(api), shutdown)),
        }
    }

    async fn stop(self) {
        self.shutdown.cancel();
        self.serving.await.expect("no panic").expect("served");
    }
}

/// Status and body of an answer.
async fn request(address: SocketAddr, query: &str, authorization: &str) -> (u16, Value) {
    let mut stream = TcpStream::connect(address).await.expect("a connection");
    let request =
        format!("GET /_synapse/replication{query} HTTP/1.1\r\nHost: x\r\n{authorization}Connection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.expect("written");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.expect("an answer");
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
    assert!(head.contains("content-type: application/json"), "{head}");
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
    (status.expect("a status"), serde_json::from_str(body).expect("JSON"))
}

async fn ask(address: SocketAddr, query: &str) -> Value {
    let (status, body) = request(address, query, &format!("Authorization: Bearer {SECRET}\r\n")).await;
    assert_eq!(status, 200, "{body}");
    body
}

/// What the master has in no database.
#[derive(PartialEq, Clone)]
struct Presence {
    user: String,
    state: &'static str,
}

impl Record for Presence {
    const TABLE: &'static str = "presence";
    const COLUMNS: &'static [&'static str] = &["user_id", "state", "deleted"];
    const KEY_COLUMNS: usize = 1;
    type Key = String;

    fn key(&self) -> String {
        self.user.clone()
    }

    fn cells(&self) -> Vec<Value> {
        vec![self.user.as_str().into(), self.state.into()]
    }
}

/// What the master has in a database, as far as a follower sees it: rows are added, several at a position, and some
/// positions have none.
#[derive(Default)]
struct Events {
    position: i64,
    rows: Vec<Row>,
}

#[derive(Clone, Default)]
struct EventsTable(Arc<Mutex<Events>>);

impl Table for EventsTable {
    fn name(&self) -> &'static str {
        "events"
    }

    fn columns(&self) -> &[&str] {
        &["number"]
    }

    fn position(&self) -> Token {
        Token(self.0.lock().position)
    }

    fn rows(&self, after: Token, up_to: Token, limit: usize) -> BoxFuture<'_, Result<Vec<Row>, TableError>> {
        let events = self.0.lock();
        let rows = events
            .rows
            .iter()
            .filter(|row| row.position > after && row.position <= up_to);
        std::future::ready(Ok(rows.take(limit).cloned().collect())).boxed()
    }
}

/// A program that keeps a copy by the rules of the documentation, and by nothing else.
#[derive(Clone, Default)]
struct Follower {
    /// The tables with as many key columns (none: rows are only added), and the copy.
    tables: BTreeMap<&'static str, Kept>,
}

#[derive(Clone)]
struct Kept {
    keys: Option<usize>,
    keep: usize,
    position: i64,
    /// Oldest first.
    rows: VecDeque<Vec<Value>>,
}

impl Follower {
    fn of(tables: &[(&'static str, Option<usize>, usize)]) -> Self {
        let copy = |keys, keep| Kept {
            keys,
            keep,
            position: -1,
            rows: VecDeque::new(),
        };
        Self {
            tables: tables
                .iter()
                .map(|(name, keys, keep)| (*name, copy(*keys, *keep)))
                .collect(),
        }
    }

    fn query(&self, more: &str) -> String {
        let tables = self
            .tables
            .iter()
            .map(|(name, copy)| format!("{name}={}&", copy.position));
        format!("?{}{more}", tables.collect::<Vec<_>>().concat())
    }

    /// Takes an answer. Returns whether it brought anything.
    fn take(&mut self, answer: &Value) -> bool {
        let answer = answer.as_object().expect("an object");
        for (name, entry) in answer {
            let entry = entry.as_array().expect("rows");
            let header = entry[0].as_array().expect("a header");
            assert_eq!(header[0], **name);
            assert_eq!(header[2], entry.len() - 1);
            assert_eq!(header[3], header.len() - 4);
            let copy = self.tables.get_mut(name.as_str()).expect("asked for");
            for row in &entry[1..] {
                copy.take(
                    row.as_array().expect("a row"),
                    header[3] == json!(row.as_array().map(Vec::len)),
                );
            }
            copy.position = header[1].as_i64().expect("a position");
        }
        !answer.is_empty()
    }

    async fn catch_up(&mut self, service: &Service, more: &str) {
        for _ in 0..10_000 {
            if !self.take(&ask(service.address, &self.query(more)).await) {
                return;
            }
        }
        panic!("there is no end of it");
    }
}

impl Kept {
    fn take(&mut self, row: &[Value], has_all_columns: bool) {
        assert!(has_all_columns, "{row:?}");
        let Some(keys) = self.keys else {
            self.rows.push_back(row.to_vec());
            return;
        };
        let (deleted, cells) = row.split_last().expect("a column `deleted`");
        if *deleted == json!(true) {
            self.rows.retain(|held| {
                cells
                    .iter()
                    .zip(held)
                    .any(|(cell, held)| !cell.is_null() && cell != held)
            });
        } else {
            self.rows.retain(|held| held[..keys] != cells[..keys]);
            self.rows.push_back(cells.to_vec());
            if self.rows.len() > self.keep {
                self.rows.pop_front();
            }
        }
    }

    fn sorted(&self) -> Vec<Vec<Value>> {
        let mut rows: Vec<_> = self.rows.clone().into();
        rows.sort_by_key(|row| row[0].to_string());
        rows
    }
}

/// A homeserver with what it knows, which it partly forgets when it is restarted.
struct World {
    started: Millis,
    events: EventsTable,
    bell: Bell,
    presence: Arc<MemoryTable<Presence>>,
    truth: BTreeMap<String, &'static str>,
    service: Service,
}

impl World {
    async fn start(started: Millis, events: EventsTable) -> Self {
        let bell = Bell::default();
        let presence = Arc::new(MemoryTable::new(started, bell.clone()));
        let feed = Feed::new(bell.clone(), vec![presence.clone(), Arc::new(events.clone())]);
        Self {
            started,
            events,
            bell,
            presence,
            truth: BTreeMap::new(),
            service: Service::start(feed).await,
        }
    }

    async fn restart(self, started: Millis) -> Self {
        self.service.stop().await;
        Self::start(started, self.events).await
    }

    fn put(&mut self, user: String, state: &'static str) {
        self.truth.insert(user.clone(), state);
        self.presence.put(Presence { user, state });
    }

    fn remove(&mut self, user: &str) {
        self.truth.remove(user);
        self.presence.remove(&user.to_owned());
    }

    fn change(&mut self, rng: &mut impl Rng) {
        let user = format!("@{}", rng.random_range(0..12));
        match rng.random_range(0..40) {
            // So many that the table forgets what is gone.
            0 => {
                for number in 0..1_005 {
                    self.put(format!("@x{number}"), "online");
                }
                for number in 0..1_005 {
                    self.remove(&format!("@x{number}"));
                }
            }
            1..=18 => self.put(user, ["online", "offline"][rng.random_range(0..2)]),
            19..=27 => self.remove(&user),
            _ => {
                let mut events = self.events.0.lock();
                events.position += rng.random_range(1..3);
                let position = Token(events.position);
                for _ in 0..rng.random_range(0..6) {
                    let cells = vec![events.rows.len().into()];
                    events.rows.push(Row { position, cells });
                }
                drop(events);
                self.bell.ring();
            }
        }
    }

    fn check(&self, follower: &Follower) {
        let presence = self.truth.iter().map(|(user, state)| vec![json!(user), json!(state)]);
        assert_eq!(follower.tables["presence"].sorted(), presence.collect::<Vec<_>>());
        let events = self.events.0.lock();
        let events: Vec<_> = events.rows.iter().map(|row| row.cells.clone()).collect();
        assert_eq!(follower.tables["events"].rows, events);
    }
}

async fn history(seed: u64) {
    let rng = &mut SmallRng::seed_from_u64(seed);
    let mut world = World::start(Millis(1_700_000_000_000), EventsTable::default()).await;
    let mut follower = Follower::of(&[("presence", Some(1), usize::MAX), ("events", None, usize::MAX)]);
    let mut saved = follower.clone();
    for _ in 0..150 {
        match rng.random_range(0..20) {
            0 => {
                // The clock may have been set back meanwhile.
                let ms = if rng.random_bool(0.3) {
                    -60_000..-5_000
                } else {
                    1_000..60_000
                };
                let started = world.started.plus(rng.random_range(ms));
                world = world.restart(started).await;
            }
            // The follower is restarted, from what it wrote down last. The positions may be older than the rows, if rows
            // that come twice are known by their key.
            1 => {
                let rows = follower.tables["presence"].rows.clone();
                follower = saved.clone();
                if rng.random() {
                    follower.tables.get_mut("presence").expect("a copy").rows = rows;
                }
            }
            2 => saved = follower.clone(),
            3 => {
                follower.catch_up(&world.service, "limit=2").await;
                world.check(&follower);
            }
            // An answer is lost.
            4 => drop(ask(world.service.address, &follower.query("limit=3")).await),
            5..=8 => {
                let more = format!("limit={}", rng.random_range(1..8));
                follower.take(&ask(world.service.address, &follower.query(&more)).await);
            }
            9 => {
                follower.catch_up(&world.service, "").await;
                let (address, query) = (world.service.address, follower.query("timeout=60000"));
                let waiting = tokio::spawn(async move { ask(address, &query).await });
                if rng.random() {
                    tokio::task::yield_now().await;
                }
                world.put("@news".to_owned(), if rng.random() { "online" } else { "unavailable" });
                world.put("@news".to_owned(), "offline");
                world.put("@news".to_owned(), "busy");
                assert!(follower.take(&waiting.await.expect("no panic")), "there was news");
            }
            _ => world.change(rng),
        }
    }
    follower.catch_up(&world.service, "").await;
    world.check(&follower);
    world.service.stop().await;
}

#[tokio::test]
async fn whoever_follows_keeps_an_exact_copy_through_everything() {
    for seed in 0..25 {
        println!("seed {seed}");
        history(seed).await;
    }
}

#[tokio::test]
async fn the_newest_rows_of_a_bounded_table_are_the_followers_newest() {
    let bell = Bell::default();
    let table = Arc::new(MemoryTable::newest(3, Millis(5), bell.clone()));
    let service = Service::start(Feed::new(bell, vec![table.clone()])).await;
    let mut follower = Follower::of(&[("presence", Some(1), 3)]);
    for asks_after in [1, 2, 7] {
        for number in 0..asks_after {
            let user = format!("@{number}");
            table.put(Presence {
                user,
                state: ["a", "b", "c"][asks_after % 3],
            });
        }
        follower.catch_up(&service, "limit=2").await;
    }
    let users: Vec<_> = follower.tables["presence"]
        .rows
        .iter()
        .map(|row| row[0].clone())
        .collect();
    assert_eq!(users, ["@4", "@5", "@6"]);
    service.stop().await;
}

#[tokio::test]
async fn notice_alone_is_had_from_streams() {
    let mut world = World::start(Millis(7), EventsTable::default()).await;
    let address = world.service.address;
    let first = ask(address, "?streams=-1").await;
    assert_eq!(
        first["streams"],
        json!([
            ["streams", 7000, 2, 2, "name", "position"],
            ["presence", 7000],
            ["events", 0]
        ])
    );
    assert_eq!(ask(address, "?streams=7000").await, json!({}));
    let waiting = tokio::spawn(async move { ask(address, "?streams=7000&timeout=60000&limit=1").await });
    world.put("@ann".to_owned(), "online");
    assert_eq!(
        waiting.await.expect("no panic")["streams"],
        json!([
            ["streams", 7001, 2, 2, "name", "position"],
            ["presence", 7001],
            ["events", 0]
        ])
    );
    world.service.stop().await;
}

#[tokio::test]
async fn so_many_may_wait_and_are_answered_when_the_process_stops() {
    let world = World::start(Millis(7), EventsTable::default()).await;
    let address = world.service.address;
    let wait = || tokio::spawn(async move { ask(address, "?streams=7000&timeout=60000").await });
    let waiting: Vec<_> = (0..64).map(|_| wait()).collect();
    // One more finds no place once all of them wait.
    let bearer = format!("Authorization: Bearer {SECRET}\r\n");
    let refusal = loop {
        let (status, body) = request(address, "?streams=7000", &bearer).await;
        if status != 200 {
            break (status, body["errcode"].clone(), body["retry_after_ms"].clone());
        }
        assert_eq!(body, json!({}));
    };
    assert_eq!(refusal, (429, json!("M_LIMIT_EXCEEDED"), json!(1000)));
    world.service.stop().await;
    for waiting in waiting {
        assert_eq!(waiting.await.expect("no panic"), json!({}));
    }
}

#[tokio::test]
async fn a_bad_question_is_told_what_is_wrong_with_it() {
    let world = World::start(Millis(7), EventsTable::default()).await;
    let bearer = format!("Authorization: Bearer {SECRET}\r\n");
    for (query, authorization, status, errcode, text) in [
        ("?events=-1", "", 401, "M_MISSING_TOKEN", "Authorization"),
        (
            "?events=-1",
            "Authorization: Basic eDp4\r\n",
            401,
            "M_MISSING_TOKEN",
            "Bearer",
        ),
        (
            "?events=-1",
            "Authorization: Bearer correct hors\r\n",
            403,
            "M_FORBIDDEN",
            "secret",
        ),
        (
            "?nothing=-1",
            "Authorization: Bearer correct horse2\r\n",
            403,
            "M_FORBIDDEN",
            "secret",
        ),
        ("", &bearer, 400, "M_INVALID_PARAM", "presence, events, streams"),
        ("?nothing=-1", &bearer, 400, "M_INVALID_PARAM", "`nothing`"),
        ("?events=x", &bearer, 400, "M_INVALID_PARAM", "`events`"),
        ("?events=-1&limit=1e3", &bearer, 400, "M_INVALID_PARAM", "`limit`"),
        (
            "?events=-1&timeout=9999999",
            &bearer,
            400,
            "M_INVALID_PARAM",
            "`timeout`",
        ),
    ] {
        let (given, body) = request(world.service.address, query, authorization).await;
        assert_eq!(
            (given, body["errcode"].as_str()),
            (status, Some(errcode)),
            "{query}: {body}"
        );
        let error = body["error"].as_str().expect("a text");
        assert!(error.contains(text) && !error.contains(SECRET), "{query}: {error}");
    }
    // The scheme's case does not matter, and names may be encoded.
    let (status, body) = request(
        world.service.address,
        "?%65vents=%2D1",
        &bearer.replace("Bearer", "bearer"),
    )
    .await;
    assert_eq!((status, &body["events"][0][1]), (200, &json!(0)));
    world.service.stop().await;
}

const DOCUMENTATION: &str = include_str!("../docs/replication-api.md");

/// What stands in the documentation between fences that say `language`.
fn example(language: &str) -> &'static str {
    let fence = format!("```{language}\n");
    let (_, rest) = DOCUMENTATION.split_once(&fence).expect("an example");
    rest.split_once("```").expect("its end").0
}

#[tokio::test]
async fn the_documented_example_is_what_happens() {
    let bell = Bell::default();
    let destinations = Arc::new(MemoryTable::new(Millis(1_700_000_000_001), bell.clone()));
    let backlog = Arc::new(MemoryTable::new(Millis(1_700_000_000_000), bell.clone()));
    let destination = |name: &str, state, last_successful, retry, queued| DestinationRow {
        destination: name.into(),
        state,
        last_successful: Some(StreamOrdering(last_successful)),
        retry,
        queued,
    };
    let failing = RetryTimings {
        last_tried: Millis(1_700_000_000_321),
        interval: 600_000,
        failing_since: Some(Millis(1_700_000_000_321)),
    };
    let row = BacklogRow {
        destination: "hs2.example".into(),
        room: "!room:hs1.example".into(),
        position: None,
    };
    destinations.put(destination(
        "hs2.example",
        DestinationState::Live,
        4711,
        RetryTimings::default(),
        0,
    ));
    destinations.put(destination("hs3.example", DestinationState::Backoff, 4711, failing, 0));
    destinations.put(destination(
        "hs2.example",
        DestinationState::Live,
        4714,
        RetryTimings::default(),
        2,
    ));
    let key = row.key();
    backlog.put(row);
    backlog.remove(&key);
    let service = Service::start(Feed::new(bell, vec![destinations, backlog])).await;

    let question = example("http").lines().next().expect("a request line");
    let query = question.strip_prefix("GET /_synapse/replication").expect("the path");
    let documented: Value = serde_json::from_str(example("json")).expect("JSON");
    assert_eq!(ask(service.address, query).await, documented);
    service.stop().await;
}

#[test]
fn every_column_is_documented() {
    fn documented(table: &str, columns: &[&str]) {
        let (_, section) = DOCUMENTATION.split_once(&format!("\n`{table}`: ")).expect(table);
        let section = section.split_once("\n| --- | --- |\n").expect("a table").1;
        let section = section.split_once("\n\n").expect("its end").0;
        let named: Vec<&str> = section
            .lines()
            .filter_map(|line| line.split('|').nth(1))
            .flat_map(|names| names.split(',').map(|name| name.trim().trim_matches('`')))
            .collect();
        assert_eq!(named, columns);
    }
    documented(DestinationRow::TABLE, DestinationRow::COLUMNS);
    documented(BacklogRow::TABLE, BacklogRow::COLUMNS);
    documented(TransactionRow::TABLE, TransactionRow::COLUMNS);
    documented(TypingRow::TABLE, TypingRow::COLUMNS);
    documented(PresenceRow::TABLE, PresenceRow::COLUMNS);
    for table in [&EVENTS, &CURRENT_STATE_DELTAS, &STICKY_EVENTS] {
        documented(table.name, table.columns);
    }
    assert!(DOCUMENTATION.contains(&format!("newest {TRANSACTIONS_KEPT} rows")));
    assert!(DOCUMENTATION.contains(&format!("newest {EPHEMERAL_KEPT}")));
}
