//! `burdock run`: the parts are put together and kept running.

use std::{process::ExitCode, sync::Arc};

use anyhow::Context;
use rand::{SeedableRng, rngs::SmallRng};
use tokio::{net::TcpListener, runtime::Runtime};
use tokio_util::task::TaskTracker;

use super::{
    check,
    lifecycle::{Ended, Lifecycle},
    logging,
};
use crate::{
    admin::{self, Replication},
    config::Config,
    core::{
        clock,
        metrics::Metrics,
        replication::{self, task},
        shutdown::Shutdown,
        store::Store,
    },
    federation::{client::Client, transaction::TransactionIds},
    sender::{self, destination::Limits, pace, shard::Shard, tables::Tables},
};

/// Runs until a signal or a failure ends it.
pub(super) fn run(config: Config) -> ExitCode {
    let ended = logging::start(&config.own).and_then(|()| {
        let runtime = Runtime::new().context("cannot start the runtime")?;
        let ended = runtime.block_on(live(config));
        // A name look-up that hangs must not hold up the end.
        runtime.shutdown_background();
        ended
    });
    match ended {
        Ok(Ended::Well) => ExitCode::SUCCESS,
        Ok(Ended::Badly) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("burdock: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn live(config: Config) -> anyhow::Result<Ended> {
    for warning in config.warnings.iter().map(String::as_str).chain([check::NOT_SENT]) {
        tracing::warn!("{warning}");
    }
    let lifecycle = Lifecycle::start().context("cannot listen for signals")?;
    let drain = lifecycle.drain().clone();
    // A database that does not answer must not make the process deaf to signals.
    match drain.run_until_cancelled(Box::pin(start(config, &lifecycle))).await {
        Some(started) => started?,
        None => return Ok(Ended::Well),
    }
    lifecycle.ready();
    Ok(lifecycle.finished().await)
}

/// Puts the parts together and sets them going.
async fn start(config: Config, lifecycle: &Lifecycle) -> anyhow::Result<()> {
    let shutdown = Shutdown {
        drain: lifecycle.drain().clone(),
        stop: lifecycle.stop().clone(),
    };
    let metrics = Arc::new(Metrics::new(&config.server_name));

    let database = || format!("database {}", check::database(&config.database));
    let store = Store::connect(&config.database, config.instance.clone(), config.server_name.clone())
        .await
        .with_context(database)?;
    store.check().await.with_context(database)?;
    store.migrate().await?;
    // Before anything is read that another process of our name could still move.
    let lock = store.lock_instance().await?;
    let cursor = store.adopt_positions(&config.replication.sender_instances).await?;
    let positions = replication::start_positions(&store, &config.replication.event_writers).await?;
    let client = Client::new(
        config.server_name.clone(),
        config.signing_key.clone(),
        &config.federation,
        config.own.max_connecting,
    )?;
    let shard = Shard::of(&config.instance, &config.replication.sender_instances)
        .context("our instance name is missing from federation_sender_instances")?;

    let (tables, replication_api) = config
        .own
        .replication_secret
        .clone()
        .map(|secret| {
            let tables = Arc::new(Tables::new(clock::now().wall));
            let feed = Arc::new(tables.feed());
            (tables, Replication::new(feed, secret, shutdown.drain.clone()))
        })
        .unzip();
    if let Some(address) = config.own.listen {
        let listener = TcpListener::bind(address)
            .await
            .with_context(|| format!("cannot listen on {address}"))?;
        let served = admin::serve(listener, Arc::clone(&metrics), replication_api, shutdown.drain.clone());
        lifecycle.spawn("admin", async { Ok(served.await?) });
    }

    // Replication stays up while the sender drains: what it says of back-offs must still be heard.
    let replicating = TaskTracker::new();
    let settings = task::Settings {
        server_name: config.server_name.clone(),
        me: config.instance.clone(),
        redis: config.redis.clone(),
        replication: config.replication.clone(),
    };
    let quiet = shutdown.stop.child_token();
    let subscription = task::start(settings, positions, store.clone(), random()?, &quiet, &replicating);
    let parts = sender::Parts {
        origin: config.server_name.clone(),
        me: config.instance.clone(),
        event_writers: config.replication.event_writers.clone(),
        shard,
        policy: config.retry.clone(),
        limits: Limits {
            pending: config.own.max_pending_pdus,
            age: config.own.max_pending_age,
            bytes: config.own.max_transaction_bytes,
            window: pace::WINDOW,
        },
        sticky: config.sticky_events,
        store: store.clone(),
        client,
        cursor,
        rng: SmallRng::seed_from_u64(random()?),
        transaction_ids: TransactionIds::draw().context("the operating system has no randomness to give")?,
        metrics,
        tables,
        shutdown: shutdown.clone(),
    };
    lifecycle.spawn("sender", async move {
        let ended = tokio::select! {
            ended = sender::run(parts, subscription) => ended.map_err(Into::into),
            lost = lock.watch() => Err(lost.into()),
        };
        quiet.cancel();
        replicating.close();
        replicating.wait().await;
        ended
    });
    tracing::info!(
        server_name = %config.server_name,
        instance = %config.instance,
        cursor = %cursor.position,
        sticky_events = config.sticky_events,
        "started"
    );
    Ok(())
}

fn random() -> anyhow::Result<u64> {
    getrandom::u64().context("the operating system has no randomness to give")
}
