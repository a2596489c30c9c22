//! What wakes destinations besides new events: news over replication, and a scan of the database that finds whoever is
//! owed something and due.

use std::{collections::HashSet, sync::Arc, time::Duration};

use tokio::{
    sync::mpsc,
    time::{Instant, MissedTickBehavior, interval, sleep},
};
use tracing::{debug, error, info, warn};

use super::{Sender, SenderError, timely};
use crate::core::{
    clock,
    id::ServerName,
    replication::task::Heard,
    store::{RetryTimings, StoreError},
};

const SCAN_INTERVAL: Duration = Duration::from_mins(1);

/// Destinations woken at once by the scan; how many connect at once is bounded where connections are made.
const SCAN_PAGE: i64 = 500;

/// The cache of other processes that keeps a destination's back-off.
const RETRY_CACHE: &str = "get_destination_retry_timings";

/// How often the database is asked for new events while nobody tells of them.
const POLL_INTERVAL: Duration = Duration::from_secs(2);

/// After Redis is back, Synapse's processes may take this long to be back on it and hear our `REPLICATE`.
const SETTLING: Duration = Duration::from_secs(30);

/// Whether what others say may fail to reach us.
#[derive(Debug, Clone, Copy)]
enum Unheard {
    Still,
    Until(Instant),
}

impl Unheard {
    fn lasts(self, now: Instant) -> bool {
        match self {
            Self::Still => true,
            Self::Until(end) => now < end,
        }
    }
}

/// A Python sender runs under our name.
#[derive(Debug, thiserror::Error)]
#[error(
    "another federation sender runs under our instance name {0}: a FEDERATION_ACK was published that is not ours. \
     Stop it (the systemd unit of the Python worker, most likely) and start burdock again"
)]
pub struct TwinAlive(String);

impl Sender {
    /// Acts on what is heard over replication until the process stops.
    ///
    /// # Errors
    ///
    /// The process must end: a Python sender is alive, or replication is gone.
    pub(super) async fn listen(self: Arc<Self>, mut heard: mpsc::Receiver<Heard>) -> Result<(), SenderError> {
        // While Redis is away, and until Synapse's processes are surely back on it too, the database is asked instead.
        let mut unheard = Unheard::Until(Instant::now() + SETTLING);
        loop {
            let heard = tokio::select! {
                heard = heard.recv() => heard,
                () = sleep(POLL_INTERVAL), if unheard.lasts(Instant::now()) => {
                    self.look_for_events.notify_one();
                    continue;
                }
                () = self.shutdown.drain.cancelled() => return Ok(()),
            };
            match heard {
                None => return self.unless_draining(SenderError::ReplicationEnded),
                Some(Heard::CacheInvalidated { func, keys }) if func == RETRY_CACHE => {
                    for name in keys.into_iter().flatten().take(1) {
                        self.spawn_refresh(name.into());
                    }
                }
                Some(Heard::RemoteServerUp(name)) if self.may_send_to(&name) => {
                    debug!(destination = %name, "seen alive");
                    self.spawn_refresh(name);
                }
                Some(Heard::NewServerJoined(name)) if self.may_send_to(&name) => {
                    // The persister has written the row, or our own look at the deltas does.
                    self.look_at_deltas.notify_one();
                    self.spawn_backlog_look(name);
                }
                Some(Heard::TwinAlive) => {
                    let error = TwinAlive(self.me.to_string());
                    error!(%error, "stopping");
                    return Err(error.into());
                }
                Some(Heard::Disconnected) => {
                    info!("without Redis, the database is asked for new events every two seconds");
                    self.metrics.redis_up.set(0);
                    unheard = Unheard::Still;
                }
                Some(Heard::Connected) => {
                    self.metrics.redis_up.set(1);
                    unheard = Unheard::Until(Instant::now() + SETTLING);
                    // Whoever was seen alive meanwhile is due now.
                    self.scan_now.notify_one();
                }
                Some(Heard::Overrun) => {
                    let backing_off = self.ledger.lock().backing_off(clock::now());
                    for name in backing_off {
                        self.spawn_refresh(name);
                    }
                    self.scan_now.notify_one();
                }
                Some(_) => {}
            }
        }
    }

    /// Synapse may be upgraded while we run, and with it the database under us.
    async fn check_versions(&self) -> Result<(), SenderError> {
        match timely(self.store.check_versions()).await {
            Err(error @ StoreError::Incompatible(_)) => {
                error!(%error, "stopping");
                Err(error.into())
            }
            Err(error) => {
                warn!(%error, "the version of Synapse's schema could not be read");
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }

    /// Reads a destination's back-off anew, and wakes it if it may be tried.
    fn spawn_refresh(self: &Arc<Self>, name: ServerName) {
        if self.ledger.lock().unknown([&name]).is_empty() {
            let sender = Arc::clone(self);
            self.tracker.spawn(async move {
                if let Err(error) = sender.refresh(&name).await {
                    warn!(destination = %name, %error, "its back-off could not be read");
                }
            });
        } else {
            // Not in memory: the scan finds it if it is owed anything.
            self.scan_now.notify_one();
        }
    }

    async fn refresh(self: &Arc<Self>, name: &ServerName) -> Result<(), StoreError> {
        let before = self.ledger.lock().retry(name);
        let records = timely(self.store.destinations(std::slice::from_ref(name))).await?;
        let retry = records.get(name).map(|record| record.retry).unwrap_or_default();
        let wake = self.ledger.lock().read_retry(name, before, retry);
        self.wake(wake);
        // A reset by another process means the destination was heard: end the wait between two tries, too.
        if retry == RetryTimings::default() && before != retry {
            self.nudge(name);
        }
        Ok(())
    }

    fn spawn_backlog_look(self: &Arc<Self>, name: ServerName) {
        let sender = Arc::clone(self);
        self.tracker.spawn(async move {
            match sender.introduce([&name]).await {
                Ok(()) => {
                    let wake = sender.ledger.lock().backlog_recorded(&name, None, clock::now());
                    sender.wake(wake);
                }
                Err(error) => warn!(destination = %name, %error, "cannot look at its backlog just now"),
            }
        });
    }

    /// Looks through the database for destinations that are owed something and due: at the start, every minute, and
    /// when replication was lost for a while.
    ///
    /// # Errors
    ///
    /// Synapse was upgraded beyond what we know: the process must end.
    pub(super) async fn scan(self: Arc<Self>) -> Result<(), SenderError> {
        let mut ticks = interval(SCAN_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = ticks.tick() => {}
                () = self.scan_now.notified() => {}
            }
            self.check_versions().await?;
            let began = Instant::now();
            match self.scan_once().await {
                Ok(woken) => debug!(woken, ms = began.elapsed().as_millis(), "scanned for due destinations"),
                Err(error) => warn!(%error, "scan for due destinations failed"),
            }
            // However often it is asked for, the scan must not become the database's main work.
            let rest = began.elapsed().clamp(Duration::from_millis(200), SCAN_INTERVAL);
            sleep(rest).await;
        }
    }

    async fn scan_once(self: &Arc<Self>) -> Result<usize, StoreError> {
        let mut after = None;
        let mut woken = 0;
        // Whose back-off ends before the next look has a task that waits for it; of others nobody would think in time.
        let next_look = i64::try_from(SCAN_INTERVAL.as_millis()).unwrap_or(i64::MAX);
        let by_then = clock::now().wall.plus(next_look);
        loop {
            let due = timely(
                self.store
                    .due_destinations(after.as_ref(), by_then, SCAN_PAGE, self.sticky),
            )
            .await?;
            let Some(last) = due.last().cloned() else {
                return Ok(woken);
            };
            let ours: HashSet<_> = due.iter().filter(|name| self.may_send_to(name)).collect();
            self.introduce(ours.iter().copied()).await?;
            for name in ours {
                // What we believe is older than what the database says: the news of it was lost.
                if self.ledger.lock().retry(name).due(clock::now().wall).is_some() {
                    self.refresh(name).await?;
                }
                let wake = self.ledger.lock().backlog_recorded(name, None, clock::now());
                woken += usize::from(wake.is_some());
                self.wake(wake);
            }
            after = Some(last);
        }
    }
}
