//! The sender as a whole, as far as it needs a database and no other server.

#[path = "support/database.rs"]
mod database;

use std::{sync::Arc, time::Duration};

use burdock::{
    config::{AddressRanges, Federation, Redis, RedisAddress, Replication, Retry},
    core::{
        metrics::Metrics,
        replication::{self, task},
        shutdown::Shutdown,
        signing::SigningKey,
        store::Store,
    },
    federation::{client::Client, transaction::TransactionIds},
    sender::{self, Parts, SenderError, destination::Limits, shard::Shard},
};
use database::{TestDatabase, US};
use rand::{SeedableRng, rngs::SmallRng};
use tokio::{task::JoinHandle, time::timeout};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

const ME: &str = "sender";
const PATIENCE: Duration = Duration::from_secs(10);

/// A sender that runs, with a Redis that is away.
struct Running {
    shutdown: Shutdown,
    /// Ends its part in replication.
    quiet: CancellationToken,
    ended: JoinHandle<Result<(), SenderError>>,
}

async fn start(store: Store) -> Running {
    let replication = Replication {
        sender_instances: vec![ME.into()],
        event_writers: vec!["master".into()],
        instance_map: vec![],
        secret: None,
    };
    let federation = Federation {
        domain_whitelist: None,
        address_filter: AddressRanges::default(),
        verify_certificates: true,
        unverified_names: vec![],
        custom_ca: None,
        tls_1_3_only: false,
        timeout: Duration::from_secs(1),
    };
    let redis = Redis {
        address: RedisAddress::Tcp {
            host: "127.0.0.1".into(),
            port: 1,
            tls: None,
        },
        username: None,
        password: None,
        dbid: None,
    };
    let cursor = store.adopt_positions(&replication.sender_instances).await.unwrap();
    let positions = replication::start_positions(&store, &replication.event_writers)
        .await
        .unwrap();
    let settings = task::Settings {
        server_name: US.into(),
        me: ME.into(),
        redis,
        replication,
    };
    let quiet = CancellationToken::new();
    let subscription = task::start(settings, positions, store.clone(), 1, &quiet, &TaskTracker::new());
    let shutdown = Shutdown::default();
    let parts = Parts {
        origin: US.into(),
        me: ME.into(),
        event_writers: vec!["master".into()],
        shard: Shard::of(&ME.into(), &[ME.into()]).unwrap(),
        policy: Retry {
            min_interval: Duration::from_mins(10),
            multiplier: 2.0,
            max_interval: Duration::from_hours(168),
            attempt_retries: 0,
            attempt_max_delay: Duration::from_secs(1),
        },
        limits: Limits {
            pending: 1_000,
            age: Duration::from_secs(10),
            bytes: 8_388_608,
        },
        sticky: true,
        store,
        client: Client::new(US.into(), SigningKey::from_seed("1", &[1; 32]), &federation, 10).unwrap(),
        cursor,
        rng: SmallRng::seed_from_u64(1),
        transaction_ids: TransactionIds::new(1),
        metrics: Arc::new(Metrics::new(&US.into())),
        shutdown: shutdown.clone(),
    };
    Running {
        shutdown,
        quiet,
        ended: tokio::spawn(sender::run(parts, subscription)),
    }
}

#[tokio::test]
async fn one_that_hears_nothing_more_of_replication_ends_badly() {
    let Some(db) = TestDatabase::new().await else { return };
    let running = start(db.store(ME).await).await;
    running.quiet.cancel();
    let ended = timeout(PATIENCE, running.ended).await.expect("it ends").unwrap();
    assert!(matches!(ended, Err(SenderError::ReplicationEnded)), "{ended:?}");
}

#[tokio::test]
async fn a_slow_statement_does_not_hold_up_the_end() {
    let Some(db) = TestDatabase::new().await else { return };
    let store = db.store(ME).await;
    let mut blocker = db.pool.begin().await.unwrap();
    sqlx::query("LOCK TABLE destination_rooms")
        .execute(&mut *blocker)
        .await
        .unwrap();
    let running = start(store).await;
    let waiting = "SELECT FROM pg_locks l JOIN pg_class c ON c.oid = l.relation \
                   WHERE c.relname = 'destination_rooms' AND NOT l.granted \
                     AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())";
    timeout(PATIENCE, async { while db.rows(waiting).await.is_empty() {} })
        .await
        .expect("the scan waits for the table");
    running.shutdown.drain.cancel();
    let ended = timeout(PATIENCE, running.ended).await.expect("it ends").unwrap();
    assert!(ended.is_ok(), "{ended:?}");
    drop(blocker);
}
