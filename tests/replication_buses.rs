//! What every bus must do, on each of them: between the parts of one process, and over a Redis.
//!
//! `BURDOCK_TEST_REDIS` says that there is a `redis-server`; each case starts one of its own, to stop and start it.

#[path = "support/redis.rs"]
mod own_redis;

use std::{sync::Arc, time::Duration};

use burdock::{
    config::{Redis, RedisAddress},
    core::{
        clock::Millis,
        id::{InstanceName, ServerName, StickyPosition, StreamOrdering, Token},
        replication::{
            bus::{Bus, BusEvent},
            command::{Command, Device, InstanceId},
            gap::{CacheInvalidation, FetchError, GapSource, Group},
            http_gaps::HttpGaps,
            local_bus::LocalBus,
            master::{self, Master, MasterStart},
            outbox::Outbox,
            positions::Positions,
            reader::StartPositions,
            redis_bus::RedisBus,
            rows,
            sync_reports::{Presence, SyncReports},
            task::{self, Heard, Subscription},
            writer::Write,
        },
        store::CacheRow,
    },
};
use own_redis::{OwnRedis, free_port};
use parking_lot::Mutex;
use rand::{SeedableRng, rngs::StdRng};
use serde_json::json;
use tokio::{sync::mpsc, time::timeout};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

const PATIENCE: Duration = Duration::from_secs(30);

/// Positions of all streams before a case begins.
const START: i64 = 10;

/// A bus, and a way to break it.
trait Net {
    type Bus: Bus;

    fn bus(&self) -> Self::Bus;

    /// `meanwhile` happens unheard: whoever listens loses the connection and finds a new one.
    fn break_while(&mut self, meanwhile: impl FnOnce());
}

impl Net for LocalBus {
    type Bus = Self;

    fn bus(&self) -> Self {
        self.clone()
    }

    fn break_while(&mut self, meanwhile: impl FnOnce()) {
        meanwhile();
        // More than a listener may lag behind, and none is run before this returns.
        (0..20_000).for_each(|_| self.say("NOISE".to_owned()));
    }
}

struct RedisNet {
    port: u16,
    server: Option<OwnRedis>,
}

impl RedisNet {
    fn start() -> Option<Self> {
        if std::env::var("BURDOCK_TEST_REDIS").is_err() {
            eprintln!("skipped: BURDOCK_TEST_REDIS is not set");
            return None;
        }
        let port = free_port();
        let server = Some(OwnRedis::start(port)?);
        Some(Self { port, server })
    }
}

impl Net for RedisNet {
    type Bus = RedisBus;

    fn bus(&self) -> RedisBus {
        let address = RedisAddress::Tcp {
            host: "127.0.0.1".to_owned(),
            port: self.port,
            tls: None,
        };
        let redis = Redis {
            address,
            username: None,
            password: None,
            dbid: None,
        };
        RedisBus::new(redis, &"bus.example".into(), 7)
    }

    fn break_while(&mut self, meanwhile: impl FnOnce()) {
        self.server = None;
        meanwhile();
        self.server = OwnRedis::start(self.port);
    }
}

/// The database: rows of `caches`.
#[derive(Clone, Default)]
struct Table(Arc<Mutex<Vec<CacheRow>>>);

impl GapSource for Table {
    async fn cache_rows(
        &self,
        writer: &InstanceName,
        from: Token,
        to: Token,
        limit: usize,
    ) -> Result<Vec<CacheInvalidation>, FetchError> {
        let table = self.0.lock();
        let rows = table
            .iter()
            .filter(|row| row.writer == *writer && from < row.token && row.token <= to);
        let row = |row: &CacheRow| CacheInvalidation {
            token: row.token,
            func: "get_destination_retry_timings".to_owned(),
            keys: Some(vec![row.destination.as_str().to_owned()]),
            at: Some(row.at),
        };
        Ok(rows.take(limit).map(row).collect())
    }
}

/// The processes of one homeserver.
struct Homeserver {
    table: Table,
    /// The source of ids of `events`.
    sequence: i64,
    writers: Vec<InstanceName>,
    shutdown: CancellationToken,
    tracker: TaskTracker,
}

impl Homeserver {
    fn new(writers: &[&str]) -> Self {
        Self {
            table: Table::default(),
            sequence: START,
            writers: writers.iter().map(|name| InstanceName::from(*name)).collect(),
            shutdown: CancellationToken::new(),
            tracker: TaskTracker::new(),
        }
    }

    fn events(&self) -> Positions {
        Positions::at_start(&self.writers, &[], [StreamOrdering(START)])
    }

    fn sender(&self, net: &impl Net) -> Subscription {
        let start = StartPositions {
            events: self.events(),
            caches: Token(START),
        };
        let http = HttpGaps::nowhere();
        task::start_on(
            net.bus(),
            "fs1".into(),
            start,
            self.table.clone(),
            http,
            &self.shutdown,
            &self.tracker,
        )
    }

    fn master(&self, net: &impl Net, name: &str) -> Master {
        let start = MasterStart {
            events: self.events(),
            sticky_events: Positions::at_start(&self.writers, &[], [StickyPosition(START)]),
            caches: Token(START),
            presence: Token(START),
        };
        master::start(
            net.bus(),
            name.into(),
            start,
            self.table.clone(),
            &self.shutdown,
            &self.tracker,
        )
    }

    /// Commits and publishes a row of `caches`.
    fn cache_row(&self, subscription: &Subscription, writer: &str, token: i64) {
        let row = CacheRow {
            token: Token(token),
            destination: format!("s{token}.example").into(),
            at: Millis(1),
            writer: writer.into(),
        };
        self.table.0.lock().push(row.clone());
        subscription.publisher.cache_row(&row);
    }

    async fn draw(&mut self, master: &Master) -> Write<StreamOrdering> {
        self.sequence += 1;
        let id = StreamOrdering(self.sequence);
        let ids = async { Ok::<_, std::convert::Infallible>(vec![id]) };
        master.streams.events.draw(ids).await.unwrap()
    }

    async fn stop(self) {
        self.shutdown.cancel();
        self.tracker.close();
        timeout(PATIENCE, self.tracker.wait()).await.expect("does not stop");
    }
}

fn finish(write: Write<StreamOrdering>) {
    let event = rows::EventRow {
        event_id: format!("${}", write.ids()[0]).as_str().into(),
        room_id: "!r".into(),
        kind: "m.room.message".to_owned(),
        state_key: None,
        redacts: None,
        relates_to: None,
        membership: None,
        rejected: false,
        outlier: false,
    };
    let token = Token(write.ids()[0].0);
    let rows = vec![rows::event(&event)];
    write.finish(vec![Group { token, rows }]);
}

async fn hears(subscription: &mut Subscription) -> Heard {
    let heard = timeout(PATIENCE, subscription.heard.recv()).await;
    heard.expect("nothing heard").expect("the task ended")
}

async fn hears_row(subscription: &mut Subscription, token: i64) {
    let func = "get_destination_retry_timings".to_owned();
    let keys = Some(vec![format!("s{token}.example")]);
    assert_eq!(hears(subscription).await, Heard::CacheInvalidated { func, keys });
}

async fn events_reach(subscription: &mut Subscription, up_to: i64) {
    let reached = subscription.events_up_to.wait_for(|at| at.0 >= up_to);
    let reached = *timeout(PATIENCE, reached).await.expect("stays behind").unwrap();
    assert_eq!(reached, StreamOrdering(up_to));
}

/// A process that only hears and says lines.
struct Plain {
    events: mpsc::Receiver<BusEvent>,
    outbox: Arc<Outbox>,
}

impl Plain {
    async fn join(net: &impl Net, homeserver: &Homeserver) -> Self {
        let outbox = Arc::new(Outbox::new("plain".into(), vec![]));
        let (sender, mut events) = mpsc::channel(1_024);
        let listen = net.bus().listen(sender.clone());
        homeserver
            .tracker
            .spawn(homeserver.shutdown.clone().run_until_cancelled_owned(listen));
        let speak = net.bus().speak(outbox.clone(), sender, homeserver.shutdown.clone());
        homeserver.tracker.spawn(speak);
        for _ in 0..2 {
            let event = timeout(PATIENCE, events.recv()).await.expect("no connection").unwrap();
            assert!(
                matches!(event, BusEvent::Subscribed | BusEvent::OutboundUp),
                "{event:?}"
            );
        }
        Self { events, outbox }
    }

    async fn hears(&mut self) -> String {
        match timeout(PATIENCE, self.events.recv())
            .await
            .expect("nothing said")
            .unwrap()
        {
            BusEvent::Line(line) => line,
            other => panic!("{other:?}"),
        }
    }

    async fn hears_until(&mut self, start: &str) -> String {
        loop {
            let line = self.hears().await;
            if line.starts_with(start) {
                return line;
            }
        }
    }
}

/// The echo of its own REPLICATE makes a process announce itself once more. So it heard it, and the answers of others.
async fn it_asks_only_once_it_hears(net: impl Net) {
    let homeserver = Homeserver::new(&["master"]);
    let mut plain = Plain::join(&net, &homeserver).await;
    let mut sender = homeserver.sender(&net);
    assert_eq!(plain.hears_until("REPLICATE").await, "REPLICATE ");
    for _ in 0..2 {
        assert_eq!(plain.hears().await, "POSITION caches fs1 10 10");
    }
    assert_eq!(hears(&mut sender).await, Heard::Connected);
    homeserver.stop().await;
}

async fn lines_keep_their_order_and_come_back_to_who_said_them(net: impl Net) {
    let homeserver = Homeserver::new(&["master"]);
    let mut one = Plain::join(&net, &homeserver).await;
    let mut other = Plain::join(&net, &homeserver).await;
    let name = |number| ServerName::from(format!("s{number}.example"));
    for number in 0..700 {
        one.outbox.say(&Command::RemoteServerUp(name(number)));
    }
    for number in 0..700 {
        let expected = format!("REMOTE_SERVER_UP s{number}.example");
        assert_eq!(one.hears().await, expected);
        assert_eq!(other.hears().await, expected);
    }
    homeserver.stop().await;
}

async fn a_master_and_a_sender_work_together(net: impl Net) {
    let mut homeserver = Homeserver::new(&["master"]);
    let mut plain = Plain::join(&net, &homeserver).await;
    let mut sender = homeserver.sender(&net);
    plain.hears_until("POSITION caches fs1").await;
    let mut master = homeserver.master(&net, "master");
    assert_eq!(hears(&mut sender).await, Heard::Connected);
    assert_eq!(hears(&mut master.subscription).await, Heard::Connected);
    for (stream, position) in [
        ("events", 10),
        ("sticky_events", 10),
        ("caches", 10),
        ("presence", 10),
        ("typing", 0),
    ] {
        let line = format!("POSITION {stream} master {position} {position}");
        assert_eq!(plain.hears_until(&format!("POSITION {stream} master")).await, line);
    }

    // Ids end out of order; one is abandoned.
    let (first, second, third) = (
        homeserver.draw(&master).await,
        homeserver.draw(&master).await,
        homeserver.draw(&master).await,
    );
    finish(third);
    drop(second);
    assert_eq!(sender.events_up_to.borrow().0, START);
    finish(first);
    let row = |id: i64| {
        format!(r#"RDATA events master {id} ["ev",["${id}","!r","m.room.message",null,null,null,null,false,false]]"#)
    };
    assert_eq!(plain.hears_until("RDATA events").await, row(11));
    assert_eq!(plain.hears_until("RDATA events").await, row(13));
    events_reach(&mut sender, 13).await;
    events_reach(&mut master.subscription, 13).await;

    // What the one says, the other hears. Nothing is heard of its own rows and positions.
    homeserver.cache_row(&master.subscription, "master", 11);
    hears_row(&mut sender, 11).await;
    homeserver.cache_row(&sender, "fs1", 12);
    hears_row(&mut master.subscription, 12).await;
    master.streams.new_server_joined(&"new.example".into());
    assert_eq!(hears(&mut sender).await, Heard::NewServerJoined("new.example".into()));
    assert_eq!(
        hears(&mut master.subscription).await,
        Heard::NewServerJoined("new.example".into())
    );
    let instance = InstanceName::from("fs1");
    let token = Token(0);
    plain.outbox.say(&Command::FederationAck {
        instance: instance.clone(),
        token,
    });
    assert_eq!(
        hears(&mut master.subscription).await,
        Heard::FederationAck(instance, token)
    );
    assert_eq!(hears(&mut sender).await, Heard::TwinAlive);

    let me = InstanceId::draw(&mut StdRng::seed_from_u64(1));
    let mut reports = SyncReports::new(me.clone(), Presence::Elsewhere);
    let device = Device {
        user_id: "@ann:bus.example".to_owned(),
        device_id: None,
    };
    plain.outbox.say(&reports.started(device.clone(), Millis(5)).unwrap());
    plain.outbox.say(&reports.stopping().unwrap());
    let syncing = Heard::UserSync {
        instance: me.clone(),
        device,
        syncing: true,
        last_sync: Millis(5),
    };
    assert_eq!(hears(&mut master.subscription).await, syncing);
    assert_eq!(hears(&mut master.subscription).await, Heard::ClearUserSync(me));

    master.streams.typing(&"!r".into(), &["@ann:bus.example".to_owned()]);
    let typing = plain.hears_until("RDATA typing").await;
    assert_eq!(typing, r#"RDATA typing master 1 ["!r",["@ann:bus.example"]]"#);
    let [_, table] = master.streams.tables();
    let rows = table.rows(Token(-1), table.position(), 10).await.unwrap();
    let row = [json!("!r"), json!(["@ann:bus.example"]), json!(false)];
    assert_eq!(rows.last().unwrap().cells, row);
    let missed = master.streams.missed("typing", Some("0"), Some("1")).unwrap();
    assert_eq!(
        serde_json::to_string(&missed).unwrap(),
        r#"{"updates":[[1,["!r",["@ann:bus.example"]]]],"upto_token":1,"limited":false}"#
    );
    homeserver.stop().await;
}

/// Only one of two writers has work. The other's position must follow, or the sender would stay behind for ever.
async fn an_idle_writer_does_not_hold_the_others_back(net: impl Net) {
    let mut homeserver = Homeserver::new(&["master", "persister"]);
    let mut idle = homeserver.master(&net, "master");
    let mut busy = homeserver.master(&net, "persister");
    let mut sender = homeserver.sender(&net);
    for subscription in [&mut sender, &mut idle.subscription, &mut busy.subscription] {
        assert_eq!(hears(subscription).await, Heard::Connected);
    }
    let (abandoned, first) = (homeserver.draw(&busy).await, homeserver.draw(&busy).await);
    finish(first);
    drop(abandoned);
    events_reach(&mut sender, 12).await;
    events_reach(&mut idle.subscription, 12).await;
    events_reach(&mut busy.subscription, 12).await;
    homeserver.stop().await;
}

async fn nothing_is_missed_over_a_broken_connection(mut net: impl Net) {
    let mut homeserver = Homeserver::new(&["master"]);
    let mut master = homeserver.master(&net, "master");
    let mut sender = homeserver.sender(&net);
    assert_eq!(hears(&mut sender).await, Heard::Connected);
    assert_eq!(hears(&mut master.subscription).await, Heard::Connected);
    homeserver.cache_row(&master.subscription, "master", 11);
    hears_row(&mut sender, 11).await;
    let write = homeserver.draw(&master).await;
    net.break_while(|| {
        for token in 12..=250 {
            homeserver.cache_row(&master.subscription, "master", token);
        }
        homeserver.cache_row(&sender, "fs1", 251);
        finish(write);
    });
    let mut rows = 12..=250;
    let mut connections = Vec::new();
    while !rows.is_empty() || connections.len() < 2 {
        match hears(&mut sender).await {
            Heard::CacheInvalidated { keys, .. } => {
                let token = rows.next().expect("no further row");
                assert_eq!(keys, Some(vec![format!("s{token}.example")]));
            }
            other => connections.push(other),
        }
    }
    assert_eq!(connections, [Heard::Disconnected, Heard::Connected]);
    events_reach(&mut sender, 11).await;
    let mut heard = Vec::new();
    while heard.len() < 3 {
        heard.push(hears(&mut master.subscription).await);
    }
    let func = "get_destination_retry_timings".to_owned();
    let keys = Some(vec!["s251.example".to_owned()]);
    for expected in [
        Heard::Disconnected,
        Heard::Connected,
        Heard::CacheInvalidated { func, keys },
    ] {
        assert!(heard.contains(&expected), "{expected:?} is not in {heard:?}");
    }
    homeserver.stop().await;
}

macro_rules! on_every_bus {
    ($($case:ident),* $(,)?) => {
        mod in_the_process {
            $(#[tokio::test]
            async fn $case() {
                super::$case(super::LocalBus::default()).await;
            })*
        }

        mod over_redis {
            $(#[tokio::test]
            async fn $case() {
                if let Some(net) = super::RedisNet::start() {
                    super::$case(net).await;
                }
            })*
        }
    };
}

on_every_bus! {
    it_asks_only_once_it_hears,
    lines_keep_their_order_and_come_back_to_who_said_them,
    a_master_and_a_sender_work_together,
    an_idle_writer_does_not_hold_the_others_back,
    nothing_is_missed_over_a_broken_connection,
}
