//! Replication over a real Redis: another process of the homeserver is played by a plain Redis client.
//!
//! `BURDOCK_TEST_REDIS`: a running Redis. The restart case starts a `redis-server` of its own.

#[path = "support/redis.rs"]
mod own_redis;

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::{
    Router,
    extract::Path,
    http::{HeaderMap, StatusCode, Uri},
    routing::get,
};
use burdock::{
    config::{Redis, RedisAddress, RedisTls, Replication, ReplicationEndpoint, Secret},
    core::{
        clock::Millis,
        id::{InstanceName, ServerName, StreamOrdering, Token},
        replication::{
            gap::{CacheInvalidation, FetchError, GapSource},
            positions::Positions,
            reader::StartPositions,
            task::{self, Heard, Settings, Subscription},
        },
        store::CacheRow,
    },
};
use futures_util::StreamExt;
use own_redis::{OwnRedis, free_port};
use redis::{
    AsyncCommands, Client,
    aio::{MultiplexedConnection, PubSubStream},
};
use tokio::time::timeout;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

const PATIENCE: Duration = Duration::from_secs(30);

/// The database: rows of `caches` by `master`.
struct Table(Vec<i64>);

impl GapSource for Table {
    async fn cache_rows(
        &self,
        writer: &InstanceName,
        from: Token,
        to: Token,
        limit: usize,
    ) -> Result<Vec<CacheInvalidation>, FetchError> {
        assert_eq!(writer.as_str(), "master");
        let rows = self
            .0
            .iter()
            .filter(|&&token| from.0 < token && token <= to.0)
            .take(limit);
        let row = |token: &i64| CacheInvalidation {
            token: Token(*token),
            func: "f".to_owned(),
            keys: Some(vec![token.to_string()]),
            at: Some(Millis(1)),
        };
        Ok(rows.map(row).collect())
    }
}

/// Another process: hears the channel and speaks on it.
struct Master {
    channel: String,
    heard: PubSubStream,
    outbound: MultiplexedConnection,
}

impl Master {
    async fn join(port: u16, channel: &str) -> Self {
        let client = Client::open(format!("redis://127.0.0.1:{port}/")).unwrap();
        let (mut sink, heard) = client.get_async_pubsub().await.unwrap().split();
        sink.subscribe(channel).await.unwrap();
        let outbound = client.get_multiplexed_async_connection().await.unwrap();
        let channel = channel.to_owned();
        Self {
            channel,
            heard,
            outbound,
        }
    }

    async fn say(&mut self, line: &str) {
        let _: i64 = self.outbound.publish(&self.channel, line).await.unwrap();
    }

    /// The next line on the channel that starts so.
    async fn hears(&mut self, start: &str) -> String {
        let search = async {
            loop {
                let message = self.heard.next().await.expect("the channel ended");
                let line: String = message.get_payload().unwrap();
                if line.starts_with(start) {
                    return line;
                }
            }
        };
        timeout(PATIENCE, search)
            .await
            .unwrap_or_else(|_| panic!("nobody said {start}"))
    }
}

struct Ours {
    subscription: Subscription,
    shutdown: CancellationToken,
    tracker: TaskTracker,
}

impl Ours {
    fn start(port: u16, server_name: &str, table: Vec<i64>, main: ReplicationEndpoint) -> Self {
        let address = RedisAddress::Tcp {
            host: "127.0.0.1".to_owned(),
            port,
            tls: None,
        };
        let redis = Redis {
            address,
            username: None,
            password: None,
            dbid: Some(3),
        };
        Self::start_on(redis, server_name, table, main)
    }

    fn start_on(redis: Redis, server_name: &str, table: Vec<i64>, main: ReplicationEndpoint) -> Self {
        let me = InstanceName::from("fs1");
        let master = InstanceName::from("master");
        let settings = Settings {
            server_name: server_name.into(),
            me: me.clone(),
            redis,
            replication: Replication {
                sender_instances: vec![me],
                event_writers: vec![master.clone()],
                instance_map: vec![(master.clone(), main)],
                secret: Some(Secret("s3cret".to_owned())),
            },
        };
        let start = StartPositions {
            events: Positions::at_start(&[master], &[], [StreamOrdering(10)]),
            caches: Token(10),
        };
        let shutdown = CancellationToken::new();
        let tracker = TaskTracker::new();
        let subscription = task::start(settings, start, Table(table), 42, &shutdown, &tracker);
        Self {
            subscription,
            shutdown,
            tracker,
        }
    }

    async fn hears(&mut self) -> Heard {
        timeout(PATIENCE, self.subscription.heard.recv())
            .await
            .expect("nothing heard")
            .unwrap()
    }

    async fn hears_row(&mut self, key: &str) {
        let keys = Some(vec![key.to_owned()]);
        let func = "f".to_owned();
        assert_eq!(self.hears().await, Heard::CacheInvalidated { func, keys });
    }

    async fn events_reach(&mut self, up_to: i64) {
        let reached = self.subscription.events_up_to.wait_for(|at| at.0 >= up_to);
        assert_eq!(
            *timeout(PATIENCE, reached).await.expect("stays behind").unwrap(),
            StreamOrdering(up_to)
        );
    }

    async fn stop(self) {
        self.shutdown.cancel();
        self.tracker.close();
        timeout(PATIENCE, self.tracker.wait()).await.expect("does not stop");
    }
}

fn test_redis() -> Option<u16> {
    let url = std::env::var("BURDOCK_TEST_REDIS").ok()?;
    let port = url.trim_end_matches('/').rsplit(':').next()?.parse();
    Some(port.expect("BURDOCK_TEST_REDIS must end with a port"))
}

fn nowhere() -> ReplicationEndpoint {
    ReplicationEndpoint::Unix("/nonexistent".into())
}

fn cache_row(token: i64) -> CacheRow {
    CacheRow {
        token: Token(token),
        destination: "remote.example".into(),
        at: Millis(1_753_000_000_000),
        writer: "fs1".into(),
    }
}

#[tokio::test]
async fn it_takes_part_in_replication() {
    let Some(port) = test_redis() else {
        eprintln!("skipped: BURDOCK_TEST_REDIS is not set");
        return;
    };
    let name = format!("part-{}.example", std::process::id());
    let mut master = Master::join(port, &name).await;
    let mut ours = Ours::start(port, &name, vec![11, 12], nowhere());
    assert_eq!(ours.hears().await, Heard::Connected);
    assert_eq!(master.hears("REPLICATE").await, "REPLICATE ");
    assert_eq!(master.hears("POSITION caches fs1").await, "POSITION caches fs1 10 10");

    master.say("POSITION caches master 12 12").await;
    ours.hears_row("11").await;
    ours.hears_row("12").await;
    master.say(r#"RDATA caches master 14 ["f",["14"],1]"#).await;
    ours.hears_row("14").await;

    master.say("POSITION events master 10 12").await;
    ours.events_reach(12).await;
    master
        .say(r#"RDATA events master 13 ["ev",["$e","!r","m.room.message",null,null,null,null,false,false]]"#)
        .await;
    ours.events_reach(13).await;

    ours.subscription.publisher.cache_row(&cache_row(15));
    assert_eq!(
        master.hears("RDATA caches").await,
        r#"RDATA caches master 14 ["f",["14"],1]"#,
        "the channel has one order"
    );
    assert_eq!(
        master.hears("RDATA caches").await,
        r#"RDATA caches fs1 15 ["get_destination_retry_timings",["remote.example"],1753000000000]"#
    );
    master.say("REPLICATE ").await;
    assert_eq!(
        master.hears("POSITION caches fs1 15").await,
        "POSITION caches fs1 15 15"
    );

    master.say("NEW_SERVER_JOINED new.example").await;
    assert_eq!(ours.hears().await, Heard::NewServerJoined("new.example".into()));
    ours.subscription
        .publisher
        .remote_server_up(&ServerName::from("up.example"));
    assert_eq!(master.hears("REMOTE").await, "REMOTE_SERVER_UP up.example");
    assert_eq!(ours.hears().await, Heard::RemoteServerUp("up.example".into()));

    master.say("POSITION federation master 0 0").await;
    assert_eq!(master.hears("FEDERATION_ACK").await, "FEDERATION_ACK fs1 0");
    master.say("FEDERATION_ACK fs1 0").await;
    assert_eq!(
        ours.hears().await,
        Heard::TwinAlive,
        "our echo is no twin, the other one is"
    );
    ours.stop().await;
}

#[tokio::test]
async fn missed_rows_of_the_federation_stream_come_over_http() {
    let Some(port) = test_redis() else {
        eprintln!("skipped: BURDOCK_TEST_REDIS is not set");
        return;
    };
    let (asked, mut questions) = tokio::sync::mpsc::unbounded_channel();
    let count = Arc::new(AtomicUsize::new(0));
    let answer = move |Path((stream, transaction)): Path<(String, String)>, headers: HeaderMap, uri: Uri| {
        let first = count.fetch_add(1, Ordering::SeqCst) == 0;
        let authorization = headers["authorization"].to_str().unwrap().to_owned();
        asked
            .send((stream, transaction, authorization, uri.query().unwrap().to_owned()))
            .unwrap();
        let body = r#"{"updates":[[1,["e",{}]],[1,["e",{}]],[3,["e",{}]]],"upto_token":3,"limited":false}"#;
        let status = if first {
            StatusCode::INTERNAL_SERVER_ERROR
        } else {
            StatusCode::OK
        };
        async move { (status, body) }
    };
    let app = Router::new().route(
        "/_synapse/replication/get_repl_stream_updates/{stream}/{transaction}",
        get(answer),
    );
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("replication.sock");
    let unix = tokio::net::UnixListener::bind(&path).unwrap();
    let tcp = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let main = ReplicationEndpoint::Tcp {
        host: "127.0.0.1".to_owned(),
        port: tcp.local_addr().unwrap().port(),
        tls: false,
    };
    let servers = [
        tokio::spawn(axum::serve(tcp, app.clone()).into_future()),
        tokio::spawn(axum::serve(unix, app).into_future()),
    ];
    for (case, main) in [main, ReplicationEndpoint::Unix(path)].into_iter().enumerate() {
        let name = format!("http-{case}-{}.example", std::process::id());
        let mut master = Master::join(port, &name).await;
        let mut ours = Ours::start(port, &name, vec![], main);
        assert_eq!(ours.hears().await, Heard::Connected);
        master.hears("REPLICATE").await;
        master.say("POSITION federation master 3 3").await;
        assert_eq!(master.hears("FEDERATION_ACK").await, "FEDERATION_ACK fs1 3");
        let first = questions.recv().await.unwrap();
        let (stream, transaction, authorization, query) = &first;
        assert_eq!((stream.as_str(), transaction.len()), ("federation", 10));
        assert_eq!(authorization, "Bearer s3cret");
        assert_eq!(query, "from_token=0&upto_token=3");
        if case == 0 {
            assert_eq!(
                questions.recv().await.unwrap(),
                first,
                "a retry keeps its transaction id"
            );
        }
        ours.stop().await;
    }
    servers.iter().for_each(tokio::task::JoinHandle::abort);
}

#[tokio::test]
async fn a_restart_of_redis_loses_nothing() {
    if test_redis().is_none() {
        eprintln!("skipped: BURDOCK_TEST_REDIS is not set");
        return;
    }
    let port = free_port();
    let Some(redis) = OwnRedis::start(port) else {
        eprintln!("skipped: there is no redis-server");
        return;
    };
    let name = "restart.example";
    let mut master = Master::join(port, name).await;
    let mut ours = Ours::start(port, name, (11..=250).collect(), nowhere());
    assert_eq!(ours.hears().await, Heard::Connected);
    master.hears("REPLICATE").await;
    master.say("POSITION caches master 10 10").await;
    master.say("POSITION events master 10 20").await;
    ours.events_reach(20).await;

    drop(redis);
    assert_eq!(ours.hears().await, Heard::Disconnected);
    // Rows 11 to 250 and events 21 to 30 happen now, unheard; so does a row of ours.
    ours.subscription.publisher.cache_row(&cache_row(251));

    let _redis = OwnRedis::start(port).expect("it was there a moment ago");
    let mut master = Master::join(port, name).await;
    assert_eq!(ours.hears().await, Heard::Connected);
    // Whether this master was back before our process introduced itself is chance. So the outbound connection is broken
    // once more, and the next row is lost with it: its return asks for all positions, and a POSITION stands for the row.
    let _: i64 = redis::cmd("CLIENT")
        .arg(&["KILL", "TYPE", "normal", "SKIPME", "yes"])
        .query_async(&mut master.outbound)
        .await
        .unwrap();
    ours.subscription.publisher.cache_row(&cache_row(252));
    assert_eq!(
        master.hears("POSITION caches fs1 252").await,
        "POSITION caches fs1 252 252"
    );
    assert_eq!(master.hears("REPLICATE").await, "REPLICATE ");
    master.say("POSITION caches master 250 250").await;
    master.say("POSITION events master 20 30").await;
    for token in 11..=250 {
        ours.hears_row(&token.to_string()).await;
    }
    ours.events_reach(30).await;
    ours.subscription.publisher.cache_row(&cache_row(253));
    master.hears("RDATA caches fs1 253 ").await;
    ours.stop().await;
}

#[tokio::test]
async fn it_connects_by_tls_and_by_unix_socket_as_a_user_with_few_rights() {
    if test_redis().is_none() {
        eprintln!("skipped: BURDOCK_TEST_REDIS is not set");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str| directory.path().join(name);
    let pair = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
    std::fs::write(file("cert.pem"), pair.cert.pem()).unwrap();
    std::fs::write(file("key.pem"), pair.signing_key.serialize_pem()).unwrap();
    let (cert, key, socket) = (file("cert.pem"), file("key.pem"), file("redis.sock"));
    let (port, tls_port) = (free_port(), free_port());
    let text = |path: &std::path::Path| path.to_str().unwrap().to_owned();
    let mut config = vec![
        "--tls-port".to_owned(),
        tls_port.to_string(),
        "--unixsocket".to_owned(),
        text(&socket),
    ];
    for (option, path) in [("cert", &cert), ("key", &key), ("ca-cert", &cert)] {
        config.extend([format!("--tls-{option}-file"), text(path)]);
    }
    // What Synapse itself uses, and nothing else.
    let user = "--user sender on >hunter2 resetchannels &acl.example +publish +subscribe +select +ping";
    config.extend(user.split(' ').map(str::to_owned));
    let config: Vec<_> = config.iter().map(String::as_str).collect();
    let Some(_redis) = OwnRedis::start_with(port, &config) else {
        eprintln!("skipped: there is no redis-server");
        return;
    };
    let tls = RedisTls {
        ca_file: Some(cert.clone()),
        client: Some((cert, key)),
    };
    let tls = RedisAddress::Tcp {
        host: "127.0.0.1".to_owned(),
        port: tls_port,
        tls: Some(tls),
    };
    let mut master = Master::join(port, "acl.example").await;
    for address in [tls, RedisAddress::Unix(socket)] {
        let redis = Redis {
            address,
            username: Some("sender".to_owned()),
            password: Some(Secret("hunter2".to_owned())),
            dbid: Some(3),
        };
        let mut ours = Ours::start_on(redis, "acl.example", vec![], nowhere());
        assert_eq!(ours.hears().await, Heard::Connected);
        master.hears("REPLICATE").await;
        master.say("NEW_SERVER_JOINED a.example").await;
        assert_eq!(ours.hears().await, Heard::NewServerJoined("a.example".into()));
        // What is said just before the end is still published.
        ours.subscription.publisher.cache_row(&cache_row(11));
        ours.stop().await;
        master.hears("RDATA caches fs1 11 ").await;
    }
}
