//! What to send, to whom, when.
//!
//! The event loop reads the homeserver's events and enters them into the ledger; each destination with something to do
//! has a task that asks the ledger for its next step and carries it out; checkpoints write the ledger back.

pub mod attempt;
pub mod backoff;
pub mod bodies;
mod catch_up;
pub mod checkpoint;
pub mod destination;
mod events;
pub mod ledger;
pub mod outstanding;
pub mod pace;
pub mod shard;
#[cfg(test)]
mod simulation;
pub mod sticky;
pub mod tables;
pub mod transaction;
pub mod wake;
mod worker;

use std::{collections::HashMap, sync::Arc, time::Duration};

use parking_lot::Mutex;
use rand::rngs::SmallRng;
use tokio::{
    sync::Notify,
    time::{sleep, timeout},
};
use tokio_util::task::TaskTracker;
use tracing::info;

use self::{
    bodies::Bodies, checkpoint::Checkpoints, destination::Limits, events::EventLoop, ledger::Ledger, shard::Shard,
    tables::Tables, wake::TwinAlive,
};
use crate::{
    config::Retry,
    core::{
        clock,
        id::{InstanceName, ServerName},
        metrics::Metrics,
        replication::task::{Publisher, Subscription},
        shutdown::Shutdown,
        state::joined_hosts::JoinedHosts,
        store::{Checkpoint, EventCursor, Store, StoreError},
    },
    federation::{client::Client, transaction::TransactionIds},
};

/// What a sender is made of.
pub struct Parts {
    /// Our server's name.
    pub origin: ServerName,
    /// Our instance name.
    pub me: InstanceName,
    /// Who writes events.
    pub event_writers: Vec<InstanceName>,
    /// Our share of the destinations.
    pub shard: Shard,
    /// The retry schedule.
    pub policy: Retry,
    /// When a destination is behind.
    pub limits: Limits,
    /// Whether the homeserver keeps sticky events.
    pub sticky: bool,
    /// The database.
    pub store: Store,
    /// The way to other servers.
    pub client: Client,
    /// Where we resume.
    pub cursor: EventCursor,
    /// The source of all randomness.
    pub rng: SmallRng,
    /// Transaction ids.
    pub transaction_ids: TransactionIds,
    /// Figures.
    pub metrics: Arc<Metrics>,
    /// What others may follow, if anybody may.
    pub tables: Option<Arc<Tables>>,
    /// When to stop.
    pub shutdown: Shutdown,
}

/// What requests in flight get to end in, once the process drains.
const DRAIN: Duration = Duration::from_secs(10);

/// How long an answer of the database is waited for. Its own limits end what takes long there; this one ends the waiting
/// for a server that is gone without a word.
const STORE_PATIENCE: Duration = Duration::from_mins(2);

/// What the database answers, in time.
async fn timely<T>(answer: impl Future<Output = Result<T, StoreError>>) -> Result<T, StoreError> {
    match timeout(STORE_PATIENCE, answer).await {
        Ok(answer) => answer,
        Err(_) => Err(StoreError::Unavailable("it does not answer".into())),
    }
}

/// What all tasks share.
struct Sender {
    origin: ServerName,
    me: InstanceName,
    event_writers: Vec<InstanceName>,
    shard: Shard,
    policy: Retry,
    limits: Limits,
    sticky: bool,
    store: Store,
    client: Client,
    joined_hosts: JoinedHosts,
    publisher: Publisher,
    ledger: Mutex<Ledger>,
    /// The bell of each destination's task.
    nudges: Mutex<HashMap<ServerName, Arc<Notify>>>,
    checkpoints: Checkpoints,
    bodies: Bodies,
    transaction_ids: TransactionIds,
    rng: Mutex<SmallRng>,
    metrics: Arc<Metrics>,
    tables: Option<Arc<Tables>>,
    /// The destinations' tasks.
    tracker: TaskTracker,
    /// Whose turn it is to write a back-off.
    retry_writes: tokio::sync::Mutex<()>,
    look_at_deltas: Notify,
    look_for_events: Notify,
    scan_now: Notify,
    shutdown: Shutdown,
}

/// Why a sender had to end.
#[derive(Debug, thiserror::Error)]
pub enum SenderError {
    /// The database.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A Python sender under our name.
    #[error(transparent)]
    Twin(#[from] TwinAlive),
    /// The replication task is gone.
    #[error("the replication task ended; see the error logged before")]
    ReplicationEnded,
}

/// Sends until the process is to stop; then finishes what is in flight and writes a last checkpoint.
///
/// # Errors
///
/// Another process has our place: a [`SenderError`] says which.
pub async fn run(parts: Parts, subscription: Subscription) -> Result<(), SenderError> {
    let Parts {
        cursor,
        metrics,
        shutdown,
        ..
    } = &parts;
    let Subscription {
        events_up_to,
        heard,
        publisher,
        ..
    } = subscription;
    let up_to = *events_up_to.borrow();
    // Whoever joined before our oldest living sticky event got them all as they came: a cursor that is older (Synapse's own
    // sender ran for months in between) would only cost time.
    let oldest = timely(parts.store.first_delta_cursor(clock::now().wall, up_to)).await?;
    let deltas = cursor.deltas.map_or(oldest, |deltas| deltas.max(oldest));
    if !cursor.ours {
        take_over(&parts).await?;
    }
    let sender = Arc::new(Sender {
        ledger: Mutex::new(Ledger::new(*cursor, parts.limits)),
        metrics: Arc::clone(metrics),
        shutdown: shutdown.clone(),
        origin: parts.origin,
        me: parts.me,
        event_writers: parts.event_writers,
        shard: parts.shard,
        policy: parts.policy,
        limits: parts.limits,
        sticky: parts.sticky,
        store: parts.store,
        client: parts.client,
        joined_hosts: JoinedHosts::default(),
        publisher,
        nudges: Mutex::default(),
        checkpoints: Checkpoints::default(),
        bodies: Bodies::default(),
        transaction_ids: parts.transaction_ids,
        rng: Mutex::new(parts.rng),
        tables: parts.tables,
        tracker: TaskTracker::new(),
        retry_writes: tokio::sync::Mutex::default(),
        look_at_deltas: Notify::new(),
        look_for_events: Notify::new(),
        scan_now: Notify::new(),
    });
    if let Some(tables) = &sender.tables {
        tables.show(&sender);
    }
    let drain = sender.shutdown.drain.clone();
    let events = Box::pin(EventLoop::new(Arc::clone(&sender), events_up_to, deltas).run());
    // Wherever these are, they end when the process drains: a slow statement must not hold up the last checkpoint.
    let events = async { drain.run_until_cancelled(events).await.unwrap_or(Ok(())) };
    let scan = Arc::clone(&sender).scan();
    let scan = async { drain.run_until_cancelled(scan).await.unwrap_or(Ok(())) };
    let workers_done = {
        let sender = Arc::clone(&sender);
        async move {
            sender.shutdown.drain.cancelled().await;
            sender.tracker.close();
            tokio::select! {
                () = sender.tracker.wait() => {}
                () = sleep(DRAIN) => {}
                () = sender.shutdown.stop.cancelled() => {}
            }
        }
    };
    let listen = Arc::clone(&sender).listen(heard);
    let checkpoints = Arc::clone(&sender).keep_checkpoints(workers_done);
    // Whoever fails has the others drain, and the last checkpoint is still written.
    let (read, scanned, listened, kept) = tokio::join!(
        async { events.await.inspect_err(|_| drain.cancel()) },
        async { scan.await.inspect_err(|_| drain.cancel()) },
        async { listen.await.inspect_err(|_| drain.cancel()) },
        async { checkpoints.await.inspect_err(|_| drain.cancel()) },
    );
    info!(cursor = %sender.ledger.lock().cursor(), "stopped");
    kept?;
    listened?;
    scanned?;
    read
}

/// Makes the positions that another sender left our own.
///
/// Synapse's sender stores a destination's `last_successful` for what it sent last, though an event below it, of another
/// room, may not be sent yet; and after a crash its cursor is below both. Only what is at or below the cursor can be
/// relied on, so everything above it counts as not sent, from this checkpoint on.
async fn take_over(parts: &Parts) -> Result<(), StoreError> {
    let cursor = parts.cursor.position;
    let beyond = timely(parts.store.successful_beyond(cursor)).await?;
    let ours = beyond.into_iter().filter(|name| parts.shard.owns(name));
    let checkpoint = Checkpoint {
        cursor,
        last_successful: ours.map(|name| (name, cursor)).collect(),
        ..Checkpoint::default()
    };
    timely(parts.store.checkpoint(&checkpoint)).await
}

impl Sender {
    /// Whether a destination is ours to send to: our share, and permitted.
    fn may_send_to(&self, name: &ServerName) -> bool {
        self.shard.owns(name) && self.client.denied(name).is_none()
    }

    /// An end is as it should be only while the process drains.
    fn unless_draining(&self, error: SenderError) -> Result<(), SenderError> {
        if self.shutdown.drain.is_cancelled() {
            Ok(())
        } else {
            Err(error)
        }
    }

    /// Has the ledger know these destinations as the database does; one look for all that are new.
    async fn introduce(&self, names: impl IntoIterator<Item = &ServerName>) -> Result<(), StoreError> {
        let unknown = self.ledger.lock().unknown(names);
        if unknown.is_empty() {
            return Ok(());
        }
        let records = timely(self.store.destinations(&unknown)).await?;
        let now = clock::now();
        let mut ledger = self.ledger.lock();
        for name in unknown {
            let record = records.get(&name).cloned().unwrap_or_default();
            ledger.introduce(name, &record, now);
        }
        Ok(())
    }
}
