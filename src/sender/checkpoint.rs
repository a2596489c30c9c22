//! The ledger written back to the database: about once a second, when a destination's rows are needed, and at the end.

use std::{sync::Arc, time::Duration};

use tokio::{
    sync::{Notify, watch},
    time::{Instant, MissedTickBehavior, interval},
};
use tracing::{debug, error, warn};

use super::{Sender, ledger::Figures, timely};
use crate::core::{clock, metrics::DestinationState, store::StoreError};

const INTERVAL: Duration = Duration::from_secs(1);

/// A tick that comes so late says that the process was halted, or the database slow.
const HALT: Duration = Duration::from_secs(5);

/// Asks for a checkpoint and waits for it.
#[derive(Debug)]
pub struct Checkpoints {
    requested: Notify,
    /// How many checkpoints have ended, and whether the last one ended well.
    ended: watch::Sender<(u64, bool)>,
}

impl Default for Checkpoints {
    fn default() -> Self {
        Self {
            requested: Notify::new(),
            ended: watch::Sender::new((0, true)),
        }
    }
}

impl Checkpoints {
    /// Waits until a checkpoint that began after this call has ended. Returns whether it ended well.
    pub async fn request(&self) -> bool {
        let mut ended = self.ended.subscribe();
        // One may be under way that looked at the ledger before this call: the one after that has seen it for certain.
        let enough = ended.borrow_and_update().0 + 2;
        loop {
            self.requested.notify_one();
            if ended.changed().await.is_err() {
                return false;
            }
            let (count, well) = *ended.borrow_and_update();
            if count >= enough {
                return well;
            }
        }
    }
}

impl Sender {
    /// Writes checkpoints until the process stops, and a last one then.
    ///
    /// # Errors
    ///
    /// [`StoreError::TakenOver`]: another configuration has our place, so this process must end.
    pub(super) async fn keep_checkpoints(
        self: Arc<Self>,
        workers_done: impl Future<Output = ()>,
    ) -> Result<(), StoreError> {
        let mut ticks = interval(INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        tokio::pin!(workers_done);
        let mut looked = Instant::now();
        let mut well = true;
        loop {
            let ending = tokio::select! {
                _ = ticks.tick() => false,
                // While the database refuses them, those who wait for one must not ask without a pause.
                () = self.checkpoints.requested.notified(), if well => false,
                () = &mut workers_done => true,
            };
            // After a long halt (the machine slept, the process was stopped) everything looks old, though nobody was
            // given the chance to take it.
            if looked.elapsed() < HALT {
                let wakes = self.ledger.lock().enforce_age(clock::now());
                self.wake(wakes);
            }
            looked = Instant::now();
            let outcome = timely(self.write_checkpoint()).await;
            well = outcome.is_ok();
            self.checkpoints.ended.send_modify(|ended| *ended = (ended.0 + 1, well));
            match outcome {
                Err(error @ StoreError::TakenOver) => {
                    error!(%error, "stopping");
                    return Err(error);
                }
                // What is owed stays in memory and above the cursor; the next one writes it.
                Err(error) => warn!(%error, "checkpoint not written"),
                Ok(()) => {}
            }
            self.note_figures();
            if let Some(tables) = &self.tables {
                tables.tick();
            }
            if ending {
                return Ok(());
            }
        }
    }

    async fn write_checkpoint(&self) -> Result<(), StoreError> {
        let Some(checkpoint) = self.ledger.lock().checkpoint() else {
            return Ok(());
        };
        let began = Instant::now();
        let outcome = self.store.checkpoint(&checkpoint).await;
        self.metrics.checkpoint(outcome.is_ok(), began.elapsed());
        outcome?;
        debug!(
            cursor = %checkpoint.cursor,
            rows = checkpoint.owed.len(),
            destinations = checkpoint.last_successful.len(),
            "checkpoint"
        );
        self.ledger.lock().wrote(&checkpoint);
        Ok(())
    }

    fn note_figures(&self) {
        let Figures {
            live,
            behind,
            backing_off,
            working,
            queued,
        } = self.ledger.lock().figures(clock::now());
        self.metrics.set_destinations(DestinationState::Live, live);
        self.metrics.set_destinations(DestinationState::Behind, behind);
        self.metrics.set_destinations(DestinationState::Backoff, backing_off);
        self.metrics
            .pending_destinations
            .set(i64::try_from(working).unwrap_or(i64::MAX));
        self.metrics.pending_pdus.set(i64::try_from(queued).unwrap_or(i64::MAX));
    }
}
