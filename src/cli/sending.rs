//! A sender is put together and kept running, over whichever bus.

use std::sync::Arc;

use anyhow::Context;
use rand::{SeedableRng, rngs::SmallRng};
use tokio_util::task::TaskTracker;

use super::check;
use crate::{
    config::{Config, Database, Federation, Own, Retry},
    core::{
        id::{InstanceName, ServerName},
        metrics::Metrics,
        replication::{self, bus::Bus, http_gaps::HttpGaps, task},
        shutdown::Shutdown,
        signing::SigningKey,
        store::Store,
    },
    federation::{client::Client, transaction::TransactionIds},
    sender::{self, destination::Limits, pace, shard::Shard, tables::Tables},
};

/// What decides what a sender does.
#[derive(Debug, Clone)]
pub struct Sending {
    /// The homeserver's name.
    pub server_name: ServerName,
    /// What it signs with.
    pub signing_key: SigningKey,
    /// Its database.
    pub database: Database,
    /// The sender's instance name.
    pub instance: InstanceName,
    /// All senders of the homeserver.
    pub sender_instances: Vec<InstanceName>,
    /// Who writes events.
    pub event_writers: Vec<InstanceName>,
    /// How other servers are reached.
    pub federation: Federation,
    /// How often they are tried again.
    pub retry: Retry,
    /// The homeserver keeps sticky events.
    pub sticky_events: bool,
    /// Our own settings.
    pub own: Own,
}

impl From<&Config> for Sending {
    fn from(config: &Config) -> Self {
        Self {
            server_name: config.server_name.clone(),
            signing_key: config.signing_key.clone(),
            database: config.database.clone(),
            instance: config.instance.clone(),
            sender_instances: config.replication.sender_instances.clone(),
            event_writers: config.replication.event_writers.clone(),
            federation: config.federation.clone(),
            retry: config.retry.clone(),
            sticky_events: config.sticky_events,
            own: config.own.clone(),
        }
    }
}

/// Puts a sender together. What is returned is its run, until `shutdown`.
///
/// # Errors
/// Why it cannot run.
pub async fn prepare(
    sending: Sending,
    bus: impl Bus,
    gaps: HttpGaps,
    metrics: Arc<Metrics>,
    tables: Option<Arc<Tables>>,
    shutdown: Shutdown,
) -> anyhow::Result<impl Future<Output = anyhow::Result<()>> + Send + 'static> {
    let database = || format!("database {}", check::database(&sending.database));
    let store = Store::connect(&sending.database, sending.instance.clone(), sending.server_name.clone())
        .await
        .with_context(database)?;
    store.check().await.with_context(database)?;
    store.migrate().await?;
    // Before anything is read that another process of our name could still move.
    let lock = store.lock_instance().await?;
    let cursor = store.adopt_positions(&sending.sender_instances).await?;
    let positions = replication::start_positions(&store, &sending.event_writers).await?;
    let client = Client::new(
        sending.server_name.clone(),
        sending.signing_key.clone(),
        &sending.federation,
        sending.own.max_connecting,
    )?;
    let shard = Shard::of(&sending.instance, &sending.sender_instances)
        .context("our instance name is missing from federation_sender_instances")?;

    // Replication stays up while the sender drains: what it says of back-offs must still be heard.
    let replicating = TaskTracker::new();
    let quiet = shutdown.stop.child_token();
    let me = sending.instance.clone();
    let subscription = task::start_on(bus, me, positions, store.clone(), gaps, &quiet, &replicating);
    tracing::info!(
        server_name = %sending.server_name,
        instance = %sending.instance,
        cursor = %cursor.position,
        sticky_events = sending.sticky_events,
        "started"
    );
    let parts = sender::Parts {
        origin: sending.server_name,
        me: sending.instance,
        event_writers: sending.event_writers,
        shard,
        policy: sending.retry,
        limits: Limits {
            pending: sending.own.max_pending_pdus,
            age: sending.own.max_pending_age,
            bytes: sending.own.max_transaction_bytes,
            window: pace::WINDOW,
        },
        sticky: sending.sticky_events,
        store,
        client,
        cursor,
        rng: SmallRng::seed_from_u64(random()?),
        transaction_ids: TransactionIds::draw().context("the operating system has no randomness to give")?,
        metrics,
        tables,
        shutdown,
    };
    Ok(async move {
        let ended = tokio::select! {
            ended = sender::run(parts, subscription) => ended.map_err(Into::into),
            lost = lock.watch() => Err(lost.into()),
        };
        quiet.cancel();
        replicating.close();
        replicating.wait().await;
        ended
    })
}

/// Randomness of the operating system's.
pub(super) fn random() -> anyhow::Result<u64> {
    getrandom::u64().context("the operating system has no randomness to give")
}
