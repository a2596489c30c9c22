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
use database::{Event, TestDatabase, US};
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
    metrics: Arc<Metrics>,
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
    let metrics = Arc::new(Metrics::new(&US.into()));
    let parts = Parts {
        origin: US.into(),
        me: ME.into(),
        event_writers: vec!["master".into()],
        shard: Shard::of(&ME.into(), &[ME.into()]).unwrap(),
        policy: Retry {
            min_interval: Duration::from_millis(1),
            multiplier: 1.0,
            max_interval: Duration::from_millis(1),
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
        metrics: Arc::clone(&metrics),
        shutdown: shutdown.clone(),
    };
    Running {
        shutdown,
        quiet,
        metrics,
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
    timeout(PATIENCE, db.until_waiting())
        .await
        .expect("the scan waits for the table");
    running.shutdown.drain.cancel();
    let ended = timeout(PATIENCE, running.ended).await.expect("it ends").unwrap();
    assert!(ended.is_ok(), "{ended:?}");
    drop(blocker);
}

#[tokio::test]
async fn what_is_owed_does_not_wait_for_an_event_whose_state_is_damaged() {
    let Some(db) = TestDatabase::new().await else { return };
    let store = db.store(ME).await;
    // Nobody listens there: that it was tried shows by its back-off.
    let remote = "127.0.0.1:1";
    db.room("!a").await;
    db.event(&Event::new("$owed", "!a", "@me:us.example", 2)).await;
    db.member(&Event::new("$join", "!a", &format!("@x:{remote}"), 1), "join")
        .await;
    db.event(&Event::new("$newest", "!a", "@me:us.example", 3)).await;
    db.run(&format!(
        "INSERT INTO event_forward_extremities (event_id, room_id) VALUES ('$newest', '!a');
         INSERT INTO event_to_state_groups (event_id, state_group) VALUES ('$newest', 4711);
         INSERT INTO destinations (destination, last_successful_stream_ordering) VALUES ('{remote}', 1);
         INSERT INTO destination_rooms (destination, room_id, stream_ordering) VALUES ('{remote}', '!a', 2);
         UPDATE federation_stream_position SET stream_id = 3 WHERE type = 'events'"
    ))
    .await;
    let running = start(store).await;
    timeout(PATIENCE, async {
        while db
            .rows("SELECT FROM destinations WHERE retry_interval > 0")
            .await
            .is_empty()
        {}
    })
    .await
    .expect("the owed event is tried");
    running.shutdown.drain.cancel();
    assert!(running.ended.await.unwrap().is_ok());
}

#[tokio::test]
async fn checkpoints_that_fail_are_not_asked_for_without_a_pause() {
    let Some(db) = TestDatabase::new().await else { return };
    let store = db.store(ME).await;
    let remote = "127.0.0.1:1";
    db.room("!a").await;
    db.member(&Event::new("$join", "!a", &format!("@x:{remote}"), 1), "join")
        .await;
    db.event(&Event::new("$event", "!a", "@me:us.example", 2)).await;
    db.run(&format!(
        "UPDATE event_json SET json = replace(json, '\"prev_events\":[]', '\"prev_events\":[\"$join\"]');
         INSERT INTO state_groups (id, room_id, event_id) VALUES (1, '!a', '$join');
         INSERT INTO state_groups_state (state_group, room_id, type, state_key, event_id)
             VALUES (1, '!a', 'm.room.member', '@x:{remote}', '$join');
         INSERT INTO event_to_state_groups (event_id, state_group) VALUES ('$event', 1);
         UPDATE federation_stream_position SET stream_id = 1 WHERE type = 'events';
         CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION $$full$$; END';
         CREATE TRIGGER refuse BEFORE UPDATE ON burdock.instances FOR EACH ROW
             WHEN (NEW.event_cursor > 1) EXECUTE FUNCTION refuse()"
    ))
    .await;
    let running = start(store).await;
    let failed = || {
        let text = running.metrics.exposition();
        let line = text
            .lines()
            .find(|line| line.contains("checkpoints_total") && line.contains("error"));
        line.and_then(|line| line.rsplit(' ').next()?.parse::<u64>().ok())
            .unwrap_or(0)
    };
    let until = async |count| {
        while failed() < count {
            tokio::task::yield_now().await;
        }
    };
    timeout(PATIENCE, until(2))
        .await
        .expect("what is owed cannot be written");
    assert!(timeout(Duration::from_secs(2), until(10)).await.is_err());
    running.shutdown.drain.cancel();
    assert!(running.ended.await.unwrap().is_ok());
}
