//! Programs that follow a homeserver's tables over the replication API, by the rules of its documentation alone.

use std::{collections::BTreeMap, convert::Infallible, net::SocketAddr, path::Path, time::Duration};

use burdock::core::replication::feed::Feed;
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Connection, SqliteConnection, sqlite::SqliteConnectOptions};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{
    certificates::Certificates,
    process::{Process, free},
    rig::{PATIENCE, Server, encode, until},
};

const SECRET: &str = "correct horse";

/// The tables that are copied, and how the documentation tells their rows apart.
const TABLES: [(&str, &[&str]); 3] = [
    ("events", &["event_id"]),
    (
        "current_state_delta_stream",
        &["stream_id", "room_id", "type", "state_key"],
    ),
    ("sticky_events", &["stream_id"]),
];

type Rows = BTreeMap<String, BTreeMap<String, Value>>;

/// A copy of the tables: each row by its key, as an object.
#[derive(Debug)]
struct Follower {
    positions: BTreeMap<String, i64>,
    rows: Rows,
}

impl Follower {
    fn new() -> Self {
        Self {
            positions: TABLES.map(|(name, _)| (name.to_owned(), -1)).into(),
            rows: TABLES.map(|(name, _)| (name.to_owned(), BTreeMap::new())).into(),
        }
    }

    fn query(&self, limit: usize, timeout: Duration) -> String {
        let positions = self.positions.iter();
        let positions = positions.map(|(name, position)| format!("{name}={position}&"));
        let positions = positions.collect::<Vec<_>>().concat();
        format!("{positions}limit={limit}&timeout={}", timeout.as_millis())
    }

    /// Takes an answer. Returns whether it brought anything.
    fn take(&mut self, answer: &Value) -> bool {
        let answer = answer.as_object().expect("an object");
        for (name, entry) in answer {
            let (_, keys) = TABLES.iter().find(|(table, _)| table == name).expect("asked for");
            let (header, rows) = entry.as_array().expect("rows").split_first().expect("a header");
            let columns = &header.as_array().expect("a header")[4..];
            for row in rows {
                let cells = row.as_array().expect("cells");
                let row: Value = columns
                    .iter()
                    .zip(cells)
                    .map(|(name, cell)| (text(name), cell.clone()))
                    .collect();
                let copy = self.rows.get_mut(name).expect("asked for");
                copy.insert(key(&row, keys), row);
            }
            self.positions
                .insert(name.clone(), header[1].as_i64().expect("a position"));
        }
        !answer.is_empty()
    }

    fn check(&self, truth: &Rows) {
        for (name, _) in TABLES {
            assert!(self.rows[name] == truth[name], "{name}: {self:?}\n{truth:?}");
        }
    }
}

fn text(value: &Value) -> String {
    value.as_str().expect("a text").to_owned()
}

fn key(row: &Value, columns: &[&str]) -> String {
    columns
        .iter()
        .map(|column| row[column].clone())
        .collect::<Value>()
        .to_string()
}

/// The tables as they stand in the file.
async fn truth(database: &Path) -> Rows {
    let options = SqliteConnectOptions::new().filename(database).read_only(true);
    let mut connection = SqliteConnection::connect_with(&options).await.expect("opened");
    let mut truth = Rows::new();
    for (name, keys) in TABLES {
        let columns = match name {
            "events" => {
                "'stream_ordering', stream_ordering, 'event_id', event_id, 'room_id', room_id, 'type', type,
                 'state_key', state_key, 'sender', sender, 'outlier', json(iif(outlier, 'true', 'false')),
                 'rejected', json(iif(event_id IN (SELECT event_id FROM rejections), 'true', 'false')),
                 'json', (SELECT json FROM event_json j WHERE j.event_id = events.event_id)"
            }
            "sticky_events" => {
                "'stream_id', stream_id, 'event_id', event_id, 'room_id', room_id, 'expires_at', expires_at"
            }
            _ => {
                "'stream_id', stream_id, 'room_id', room_id, 'type', type, 'state_key', state_key,
                 'event_id', event_id, 'prev_event_id', prev_event_id"
            }
        };
        let sql = AssertSqlSafe(format!("SELECT json_object({columns}) FROM {name}"));
        let rows: Vec<String> = sqlx::query_scalar(sql).fetch_all(&mut connection).await.expect("read");
        let rows = rows.iter().map(|row| serde_json::from_str(row).expect("JSON"));
        let rows = rows.map(|row: Value| (key(&row, keys), row)).collect();
        truth.insert(name.to_owned(), rows);
    }
    truth
}

/// Where the API of a process is.
struct Api {
    address: SocketAddr,
    http: reqwest::Client,
}

impl Api {
    async fn try_ask(&self, query: &str) -> Result<Value, reqwest::Error> {
        let request = self
            .http
            .get(format!("http://{}/_synapse/replication?{query}", self.address));
        let answer = request.bearer_auth(SECRET).timeout(PATIENCE * 2).send().await?;
        let answer = answer.error_for_status()?.text().await?;
        Ok(serde_json::from_str(&answer).expect("JSON"))
    }

    async fn ask(&self, query: &str) -> Value {
        until("the API answers", async || self.try_ask(query).await.ok()).await
    }

    /// Follows for as long as it is let, also while nobody answers.
    async fn follow(&self, follower: &mut Follower, limit: usize) -> Infallible {
        loop {
            match self.try_ask(&follower.query(limit, PATIENCE)).await {
                Ok(answer) => drop(follower.take(&answer)),
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        }
    }

    async fn catch_up(&self, follower: &mut Follower) {
        while follower.take(&self.ask(&follower.query(2, Duration::ZERO)).await) {}
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn who_follows_a_living_homeserver_keeps_an_exact_copy_of_its_tables() {
    let folder = tempfile::tempdir().expect("a folder");
    let (federation, client, address) = (free(), free(), free());
    let own = folder.path().join("burdock.toml");
    let settings = format!("[listen]\naddress = '{address}'\nreplication_secret = '{SECRET}'\n");
    std::fs::write(&own, settings).expect("written");
    let more = ["--config".as_ref(), own.as_os_str()];
    let start = || Process::start_with(folder.path(), federation, client, &more);
    let mut process = start().await;
    let api = Api {
        address,
        http: process.http.clone(),
    };
    let health = format!("http://{address}/health");
    let health = until("it says so", async || api.http.get(&health).send().await.ok()).await;
    assert!(health.status().is_success());
    let database = folder.path().join("homeserver.db");

    // Two that follow all the time, one of them in small bites, and one that looks only now and then.
    let (mut small, mut large, mut late) = (Follower::new(), Follower::new(), Follower::new());
    let (token, room) = process.user_with_room().await;
    for round in 0..3 {
        let writing = async {
            for n in 0..6 {
                let sent = process.send(&token, &room, &format!("{round}-{n}")).await;
                sent.expect("sent");
                let path = format!("/_matrix/client/v3/rooms/{}/state/m.room.topic", encode(&room));
                let topic = json!({ "topic": format!("\"{round}\" \u{0} é {n}") });
                process.ask("PUT", &path, &token, &topic).await;
            }
        };
        tokio::select! {
            () = writing => {}
            never = api.follow(&mut small, 1) => match never {},
            never = api.follow(&mut large, 1_000) => match never {},
        }
        if round == 1 {
            process.kill();
            drop(process);
        } else {
            assert!(process.terminate().await.success());
        }
        process = start().await;
        // The rest, and with a longer wait than patience: it is what happens that ends it.
        for (which, follower) in [&mut small, &mut large].into_iter().enumerate() {
            api.catch_up(follower).await;
            let (query, began) = (follower.query(7, PATIENCE + PATIENCE / 2), Instant::now());
            let name = format!("news-{round}-{which}");
            let (answer, sent) = tokio::join!(api.ask(&query), process.send(&token, &room, &name));
            assert!(began.elapsed() < PATIENCE, "it was woken");
            follower.take(&answer);
            let sent = sent.expect("sent");
            api.catch_up(follower).await;
            assert!(
                follower.rows["events"]
                    .values()
                    .any(|row| row["event_id"] == json!(sent))
            );
        }
        for follower in [&mut small, &mut large, &mut late] {
            api.catch_up(follower).await;
            follower.check(&truth(&database).await);
        }
    }
    for (name, least) in [
        ("events", 3 * 14),
        ("current_state_delta_stream", 18),
        ("sticky_events", 3 * 8),
    ] {
        assert!(late.rows[name].len() >= least, "{name}: {late:?}");
    }
    // The sender's are there too.
    let sender = api.ask("destinations=-1&sticky_backlog=-1&transactions=-1").await;
    assert_eq!(sender.as_object().map(serde_json::Map::len), Some(3), "{sender}");
    assert!(process.terminate().await.success());
}

#[tokio::test(flavor = "multi_thread")]
async fn events_known_out_of_order_and_those_of_others_are_followed_too() {
    let certificates = Certificates::new();
    let (ours, other) = (
        Server::start(&certificates, 1).await,
        Server::start(&certificates, 2).await,
    );
    let feed = Feed::new(ours.master().bell().clone(), ours.master().tables());
    let stop = CancellationToken::new();
    let ask = async |follower: &Follower, timeout| {
        let query = follower.query(2, timeout);
        let query = query.split('&').filter_map(|parameter| parameter.split_once('='));
        let answer = feed.ask(&feed.read(query).expect("a good question"), &stop).await;
        serde_json::from_str::<Value>(&answer.expect("an answer")).expect("JSON")
    };
    let (ann, bob) = (ours.user("ann").await, other.user("bob").await);
    let room = other.create_room(&bob, json!({})).await;
    let mut follower = Follower::new();
    let talk = async {
        other.send(&bob, &room, "before", Some(600_000)).await;
        ours.join(&ann, &room, &other).await;
        let theirs = other.send(&bob, &room, "theirs", Some(600_000)).await;
        ours.waits_for(&room, &[&theirs]).await;
        ours.send(&ann, &room, "mine", None).await;
    };
    let following = async {
        loop {
            let answer = ask(&follower, PATIENCE).await;
            follower.take(&answer);
        }
    };
    tokio::select! {
        () = talk => {}
        () = following => {}
    }
    // What of it is told and what is in the file may differ for a moment.
    let began = Instant::now();
    loop {
        let answer = ask(&follower, Duration::ZERO).await;
        if !follower.take(&answer) {
            let truth = truth(&ours.database()).await;
            if follower.rows == truth || began.elapsed() > PATIENCE {
                follower.check(&truth);
                break;
            }
        }
    }
    let events = &follower.rows["events"];
    assert!(events.values().any(|row| row["outlier"] == json!(true)), "{events:?}");
    assert!(!follower.rows["current_state_delta_stream"].is_empty() && !follower.rows["sticky_events"].is_empty());
}
