//! How the process lives and ends: its tasks, the two stages of stopping, and what systemd is told.
//!
//! The first SIGTERM or SIGINT *drains*: nothing new is begun, requests in flight get [`DRAIN`] to end, then what was
//! accepted is checkpointed. A second signal, or [`CHECKPOINT`] more, *stops*: everything ends where it is. A task that
//! fails begins the drain as well, because a sender that goes on without one of its parts loses events quietly.

use std::{
    io,
    panic::AssertUnwindSafe,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use futures_util::FutureExt;
use sd_notify::NotifyState;
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::mpsc,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// What requests in flight get when the drain begins.
pub const DRAIN: Duration = Duration::from_secs(10);
/// What the last checkpoint gets after that.
pub const CHECKPOINT: Duration = Duration::from_secs(5);
/// What tasks get to notice that they must stop at once.
const STOP: Duration = Duration::from_secs(2);

/// The life of the process. Clones share it.
#[derive(Debug, Clone)]
pub struct Lifecycle {
    drain: CancellationToken,
    stop: CancellationToken,
    tasks: TaskTracker,
    failed: Arc<AtomicBool>,
}

/// How the process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// Every task came to its end.
    Well,
    /// A task failed, or did not end when told to.
    Badly,
}

impl Lifecycle {
    /// Begins to listen for signals. Call it once, within a runtime.
    ///
    /// # Errors
    /// If a signal handler cannot be installed.
    pub fn start() -> io::Result<Self> {
        let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        let (sender, signals) = mpsc::channel(4);
        tokio::spawn(async move {
            loop {
                let name = tokio::select! {
                    Some(()) = terminate.recv() => "SIGTERM",
                    Some(()) = interrupt.recv() => "SIGINT",
                    else => return,
                };
                // A full channel holds more signals than anything waits for.
                let _ = sender.try_send(name);
            }
        });
        Ok(Self::with_signals(signals))
    }

    fn with_signals(signals: mpsc::Receiver<&'static str>) -> Self {
        let stop = CancellationToken::new();
        let lifecycle = Self {
            drain: stop.child_token(), // who stops has also stopped beginning new work
            stop,
            tasks: TaskTracker::new(),
            failed: Arc::default(),
        };
        tokio::spawn(lifecycle.clone().conduct(signals));
        lifecycle
    }

    /// Cancelled when nothing new is to be begun. Cancel it to end the process in good order.
    #[must_use]
    pub fn drain(&self) -> &CancellationToken {
        &self.drain
    }

    /// Cancelled when everything is to end at once.
    #[must_use]
    pub fn stop(&self) -> &CancellationToken {
        &self.stop
    }

    /// Runs a task that the process does not end without. If it returns an error or panics, the drain begins and the
    /// process ends badly.
    pub fn spawn<F>(&self, name: &'static str, task: F)
    where
        F: Future<Output = anyhow::Result<()>> + Send + 'static,
    {
        let lifecycle = self.clone();
        self.tasks.spawn(async move {
            match AssertUnwindSafe(task).catch_unwind().await {
                Ok(Ok(())) => return,
                Ok(Err(error)) => tracing::error!(task = name, "failed: {error:#}"),
                Err(_) => tracing::error!(task = name, "panicked"),
            }
            lifecycle.failed.store(true, Ordering::Relaxed);
            lifecycle.drain.cancel();
        });
    }

    /// Tells systemd that the start is over, and keeps its watchdog quiet from now on for as long as the runtime runs.
    pub fn ready(&self) {
        notify(NotifyState::Ready);
        if let Some(limit) = sd_notify::watchdog_enabled() {
            tokio::spawn(async move {
                let mut ticks = tokio::time::interval((limit / 2).max(Duration::from_millis(1)));
                loop {
                    ticks.tick().await;
                    notify(NotifyState::Watchdog);
                }
            });
        }
    }

    /// Waits for the drain to begin and then for every task to end, at most until a little after the stop.
    pub async fn finished(self) -> Ended {
        self.drain.cancelled().await;
        notify(NotifyState::Stopping);
        self.tasks.close();
        let out_of_patience = async {
            self.stop.cancelled().await;
            tokio::time::sleep(STOP).await;
        };
        let all_ended = tokio::select! {
            () = self.tasks.wait() => true,
            () = out_of_patience => false,
        };
        if !all_ended {
            tracing::error!(tasks = self.tasks.len(), "tasks did not end in time");
        }
        // Whoever cut the drain short left requests and checkpoint where they were; that is what was asked for.
        if all_ended && !self.failed.load(Ordering::Relaxed) {
            Ended::Well
        } else {
            Ended::Badly
        }
    }

    /// Turns signals and time into the two stages.
    async fn conduct(self, mut signals: mpsc::Receiver<&'static str>) {
        tokio::select! {
            Some(signal) = signals.recv() => tracing::info!(signal, "draining"),
            () = self.drain.cancelled() => {}
        }
        self.drain.cancel();
        tokio::select! {
            Some(signal) = signals.recv() => tracing::warn!(signal, "stopping at once"),
            () = tokio::time::sleep(DRAIN + CHECKPOINT) => tracing::warn!("draining took too long, stopping at once"),
        }
        self.stop.cancel();
    }
}

fn notify(state: NotifyState<'_>) {
    if let Err(error) = sd_notify::notify(&[state]) {
        tracing::warn!(%error, "cannot reach systemd");
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    fn start() -> (mpsc::Sender<&'static str>, Lifecycle) {
        let (signals, receiver) = mpsc::channel(4);
        (signals, Lifecycle::with_signals(receiver))
    }

    #[tokio::test(start_paused = true)]
    async fn the_first_signal_lets_tasks_end_in_their_own_time() {
        let (signals, lifecycle) = start();
        let begun = Instant::now();
        let drain = lifecycle.drain().clone();
        lifecycle.spawn("sender", async move {
            drain.cancelled().await;
            tokio::time::sleep(Duration::from_secs(12)).await;
            Ok(())
        });
        let stop = lifecycle.stop().clone();
        signals.send("SIGTERM").await.expect("heard");
        assert_eq!(lifecycle.finished().await, Ended::Well);
        assert_eq!(begun.elapsed().as_secs(), 12);
        assert!(!stop.is_cancelled());
    }

    #[tokio::test(start_paused = true)]
    async fn the_second_signal_stops_at_once() {
        let (signals, lifecycle) = start();
        let begun = Instant::now();
        let stop = lifecycle.stop().clone();
        lifecycle.spawn("sender", async move {
            stop.cancelled().await;
            Ok(())
        });
        for _ in 0..2 {
            signals.send("SIGTERM").await.expect("heard");
        }
        assert_eq!(lifecycle.finished().await, Ended::Well);
        assert_eq!(begun.elapsed().as_secs(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_task_that_does_not_end_is_left_behind() {
        let (signals, lifecycle) = start();
        let begun = Instant::now();
        lifecycle.spawn("stuck", std::future::pending());
        signals.send("SIGINT").await.expect("heard");
        assert_eq!(lifecycle.finished().await, Ended::Badly);
        assert_eq!(begun.elapsed(), DRAIN + CHECKPOINT + STOP);
    }

    #[tokio::test(start_paused = true)]
    async fn a_failed_task_drains_the_others_and_ends_badly() {
        for panics in [false, true] {
            let (_signals, lifecycle) = start();
            let drain = lifecycle.drain().clone();
            lifecycle.spawn("other", async move {
                drain.cancelled().await;
                Ok(())
            });
            lifecycle.spawn("failing", async move {
                assert!(!panics, "as the test wants it");
                anyhow::bail!("out of luck")
            });
            assert_eq!(lifecycle.finished().await, Ended::Badly);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_task_that_is_done_ends_nothing() {
        let (_signals, lifecycle) = start();
        lifecycle.spawn("short", async { Ok(()) });
        let waited = tokio::time::timeout(Duration::from_hours(1), lifecycle.clone().finished()).await;
        assert!(waited.is_err());
        lifecycle.drain().cancel();
        assert_eq!(lifecycle.finished().await, Ended::Well);
    }
}
