//! One attempt at a transaction: its tries, the waits between them, and what its end means for the back-off.

use std::time::Duration;

use tokio::{
    sync::Notify,
    time::{sleep, timeout},
};
use tracing::{debug, info, warn};

use super::{Sender, backoff, tables::TransactionRow};
use crate::{
    core::{
        clock,
        id::ServerName,
        store::{RetryTimings, StoreError},
    },
    federation::{
        outcome::{AfterTry, Outcome},
        transaction::{Accepted, Body},
    },
};

/// How an attempt ended.
#[derive(Debug)]
pub enum Attempt {
    /// Accepted: the transaction is done.
    Accepted(Accepted),
    /// Refused in a way that may be about its size or content (400, 413).
    Refused,
    /// Failed; the destination's back-off is [`Sender::back_off`]'s business.
    Failed,
    /// Answered 2xx without a readable answer: not accepted, and no reason for back-off.
    Unreadable,
    /// The process is stopping.
    Interrupted,
}

impl Attempt {
    /// For the table of transactions.
    fn word(&self) -> &'static str {
        match self {
            Self::Accepted(_) => "accepted",
            Self::Refused => "refused",
            Self::Failed => "failed",
            Self::Unreadable => "unreadable",
            Self::Interrupted => "interrupted",
        }
    }
}

impl Sender {
    /// Sends `body`, which holds so many `pdus`, under a new transaction id until it is accepted or the attempt is over.
    ///
    /// All tries repeat id and bytes, so a receiver that took an earlier one answers from memory.
    pub(super) async fn attempt(&self, destination: &ServerName, body: &Body, pdus: usize, nudge: &Notify) -> Attempt {
        let transaction = self.transaction_ids.next_id();
        let began = clock::now();
        let attempt = self.try_until_over(destination, &transaction, body, nudge).await;
        if let Some(tables) = &self.tables {
            tables.sent(TransactionRow {
                destination: destination.clone(),
                id: transaction.into(),
                pdus,
                bytes: body.len(),
                outcome: attempt.word(),
                duration: began.at.elapsed(),
                began: began.wall,
            });
        }
        attempt
    }

    async fn try_until_over(
        &self,
        destination: &ServerName,
        transaction: &str,
        body: &Body,
        nudge: &Notify,
    ) -> Attempt {
        let mut retries = 0;
        let mut busy = 0;
        loop {
            let outcome = tokio::select! {
                outcome = self.client.send(destination, transaction, body) => outcome,
                () = self.shutdown.stop.cancelled() => return Attempt::Interrupted,
            };
            self.metrics.http_response(outcome.status());
            let wait = match (outcome.after(), outcome) {
                (AfterTry::Done, Outcome::Accepted(accepted)) => {
                    self.metrics.sent_transactions.inc();
                    self.succeeded(destination).await;
                    return Attempt::Accepted(accepted);
                }
                (AfterTry::Busy, outcome) => {
                    busy += 1;
                    debug!(%destination, transaction, ?outcome, "busy with an earlier transaction");
                    backoff::before_asking_a_busy_one(busy, outcome.retry_after(), &self.policy)
                }
                (AfterTry::Retry, outcome) => {
                    retries += 1;
                    if retries == 1 {
                        info!(%destination, transaction, ?outcome, "not reached; trying again");
                    } else {
                        debug!(%destination, transaction, retries, ?outcome, "not reached");
                    }
                    backoff::before_retry(retries, &self.policy, &mut *self.rng.lock())
                }
                (AfterTry::Content, outcome) => {
                    warn!(%destination, transaction, ?outcome, "transaction refused");
                    return Attempt::Refused;
                }
                (AfterTry::Unreadable, outcome) => {
                    warn!(%destination, transaction, ?outcome, "answer not readable");
                    return Attempt::Unreadable;
                }
                (AfterTry::GiveUp | AfterTry::Done, outcome) => {
                    info!(%destination, transaction, ?outcome, "attempt failed");
                    return Attempt::Failed;
                }
            };
            let Some(wait) = wait else {
                info!(%destination, transaction, tries = retries + busy, "attempt failed");
                return Attempt::Failed;
            };
            tokio::select! {
                () = sleep(wait) => {}
                () = nudge.notified() => {} // it was seen alive, or there is news about its back-off
                () = self.shutdown.drain.cancelled() => return Attempt::Interrupted,
            }
        }
    }

    /// The destination answered: whatever back-off it had is over, and other processes are told.
    async fn succeeded(&self, destination: &ServerName) {
        let before = self.ledger.lock().retry(destination);
        if before == RetryTimings::default() {
            return;
        }
        if !self.write_retry(destination, RetryTimings::default()).await {
            return; // the next success tries again
        }
        if before.failing_since.is_some() {
            info!(%destination, "reachable again");
            self.publisher.remote_server_up(destination);
        }
        self.ledger.lock().set_retry(destination, RetryTimings::default());
    }

    /// An attempt failed: one more step of back-off, and what was in memory becomes rows.
    pub(super) async fn back_off(&self, destination: &ServerName) {
        let before = self.ledger.lock().retry(destination);
        let after = backoff::after_failure(before, clock::now().wall, &self.policy, &mut *self.rng.lock());
        // With the database away we keep to it all the same; the next step is written again.
        self.write_retry(destination, after).await;
        info!(%destination, interval_ms = after.interval, "backing off");
        self.ledger.lock().failed(destination, after);
    }

    /// Writes a destination's back-off and publishes that it changed. Returns whether it is written.
    async fn write_retry(&self, destination: &ServerName, timings: RetryTimings) -> bool {
        let write = async {
            // One at a time: readers throw away a row that is published after one with a higher position.
            let _turn = self.retry_writes.lock().await;
            if let Some(row) = self.store.set_retry(destination, timings, clock::now().wall).await? {
                self.publisher.cache_row(&row);
            }
            Ok::<_, StoreError>(())
        };
        match timeout(RETRY_WRITE_PATIENCE, write).await {
            Ok(Ok(())) => true,
            Ok(Err(error)) => {
                warn!(%destination, %error, "back-off not written");
                false
            }
            Err(_) => {
                warn!(%destination, "back-off not written: the database is slow");
                false
            }
        }
    }
}

/// How long a back-off waits to be written. It is known in memory anyway.
const RETRY_WRITE_PATIENCE: Duration = Duration::from_secs(10);

/// A pause after which an attempt that came to nothing is made anew.
pub(super) const PAUSE: Duration = Duration::from_secs(30);
