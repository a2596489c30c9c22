//! The sender between them, made as `burdock run` makes it, but for its settings.

use std::{sync::Arc, time::Duration};

use burdock::{
    config::{AddressRanges, Federation, Redis, RedisAddress, Replication, Retry},
    core::{
        clock,
        id::InstanceName,
        metrics::Metrics,
        replication::{self, feed::Bell, task},
        shutdown::Shutdown,
        signing::SigningKey,
        store::Store,
    },
    federation::{client::Client, transaction::TransactionIds},
    sender::{self, Parts, SenderError, destination::Limits, pace, shard::Shard, tables::Tables},
};
use rand::{SeedableRng, rngs::SmallRng};
use tokio::{task::JoinHandle, time::timeout};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    PATIENCE,
    database::US,
    homeserver::{Homeserver, ME},
    remote::{CERTIFICATES, Remote},
    until,
};

/// What a test may want to be different.
pub struct Settings {
    pub whitelist: Option<Vec<String>>,
    pub writers: Vec<InstanceName>,
    /// Back-off: so long each time.
    pub interval: Duration,
    /// Further tries inside one attempt.
    pub retries: u32,
    /// PDUs in memory for one destination.
    pub pending: usize,
    pub max_connecting: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            whitelist: None,
            writers: vec!["master".into()],
            interval: Duration::from_millis(1),
            retries: 0,
            pending: 1_000,
            max_connecting: 10,
        }
    }
}

/// A sender that runs.
pub struct Running {
    pub shutdown: Shutdown,
    /// Ends its part in replication.
    pub quiet: CancellationToken,
    pub metrics: Arc<Metrics>,
    pub tables: Arc<Tables>,
    ended: JoinHandle<Result<(), SenderError>>,
}

/// A Redis that is away.
fn nowhere() -> Redis {
    Redis {
        address: RedisAddress::Tcp {
            host: "127.0.0.1".into(),
            port: 1,
            tls: None,
        },
        username: None,
        password: None,
        dbid: None,
    }
}

/// Starts a sender whose Redis is away.
pub async fn start_alone(store: Store) -> Running {
    start(store, nowhere(), US, Settings::default()).await
}

/// Starts a sender beside the homeserver, and waits until it takes part in replication.
pub async fn start_beside(homeserver: &Homeserver, settings: Settings) -> Running {
    let introductions = homeserver.heard("REPLICATE").len();
    let running = start(
        homeserver.store(ME).await,
        homeserver.redis(),
        &homeserver.channel,
        settings,
    )
    .await;
    until("the sender takes part in replication", async || {
        homeserver.heard("REPLICATE").len() > introductions
    })
    .await;
    running
}

async fn start(store: Store, redis: Redis, channel: &str, settings: Settings) -> Running {
    let replication = Replication {
        sender_instances: vec![ME.into()],
        event_writers: settings.writers.clone(),
        instance_map: vec![],
        secret: None,
    };
    let federation = Federation {
        domain_whitelist: settings
            .whitelist
            .map(|names| names.into_iter().map(Into::into).collect()),
        address_filter: AddressRanges::default(),
        verify_certificates: true,
        unverified_names: vec![],
        custom_ca: Some(vec![CERTIFICATES.authority.clone().into_bytes()]),
        tls_1_3_only: false,
        timeout: Duration::from_mins(1),
    };
    let cursor = store.adopt_positions(&replication.sender_instances).await.unwrap();
    let positions = replication::start_positions(&store, &replication.event_writers)
        .await
        .unwrap();
    let part = task::Settings {
        server_name: channel.into(),
        me: ME.into(),
        redis,
        replication,
    };
    let quiet = CancellationToken::new();
    let subscription = task::start(part, positions, store.clone(), 1, &quiet, &TaskTracker::new());
    let shutdown = Shutdown::default();
    let metrics = Arc::new(Metrics::new(&US.into()));
    let tables = Arc::new(Tables::new(clock::now().wall, Bell::default()));
    let signing_key = SigningKey::from_seed("1", &[1; 32]);
    let parts = Parts {
        origin: US.into(),
        me: ME.into(),
        event_writers: settings.writers,
        shard: Shard::of(&ME.into(), &[ME.into()]).unwrap(),
        policy: Retry {
            min_interval: settings.interval,
            multiplier: 1.0,
            max_interval: settings.interval,
            attempt_retries: settings.retries,
            attempt_max_delay: Duration::from_millis(100),
        },
        limits: Limits {
            pending: settings.pending,
            // Only what a test is about makes a destination fall behind, however slow the machine is.
            age: Duration::from_hours(1),
            bytes: 8_388_608,
            window: pace::WINDOW,
        },
        sticky: true,
        store,
        client: Client::new(US.into(), signing_key, &federation, settings.max_connecting).unwrap(),
        cursor,
        rng: SmallRng::seed_from_u64(1),
        transaction_ids: TransactionIds::draw().unwrap(),
        metrics: Arc::clone(&metrics),
        tables: Some(Arc::clone(&tables)),
        shutdown: shutdown.clone(),
    };
    Running {
        shutdown,
        quiet,
        metrics,
        tables,
        ended: tokio::spawn(sender::run(parts, subscription)),
    }
}

impl Running {
    /// How it ended. It must do so by itself.
    pub async fn ends(self) -> Result<(), SenderError> {
        timeout(PATIENCE, self.ended).await.expect("it ends").unwrap()
    }

    /// Has it end as the first SIGTERM does.
    pub async fn drain(self) {
        self.shutdown.drain.cancel();
        self.leave().await;
    }

    /// Has it end as the second SIGTERM does: what is in flight is dropped.
    pub async fn stop(self) {
        self.shutdown.drain.cancel();
        self.shutdown.stop.cancel();
        self.leave().await;
    }

    async fn leave(self) {
        let quiet = self.quiet.clone();
        self.ends().await.expect("it ends well");
        quiet.cancel();
    }
}

/// Shorthand for servers' names in a setting.
pub fn names(servers: &[&Arc<Remote>]) -> Vec<String> {
    servers.iter().map(|server| server.name.clone()).collect()
}
