//! The bus between the parts of one process: a master and a sender that were started together.

use std::sync::Arc;

use tokio::sync::{
    broadcast::{self, error::RecvError},
    mpsc,
};
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::core::replication::{
    bus::{Bus, BusEvent},
    outbox::Outbox,
};

/// Lines that wait for the slowest listener. One that is further behind loses them, as if its connection had broken.
const CAPACITY: usize = 16_384;

/// A channel in memory. Whoever has a clone can take part.
#[derive(Debug, Clone)]
pub struct LocalBus(broadcast::Sender<String>);

impl Default for LocalBus {
    fn default() -> Self {
        Self(broadcast::Sender::new(CAPACITY))
    }
}

impl LocalBus {
    /// Publishes a line.
    pub fn say(&self, line: String) {
        // That nobody listens is no error: nothing is kept for who is not there.
        let _ = self.0.send(line);
    }
}

impl Bus for LocalBus {
    async fn listen(self, events: mpsc::Sender<BusEvent>) {
        loop {
            let mut lines = self.0.subscribe();
            if events.send(BusEvent::Subscribed).await.is_err() {
                return;
            }
            loop {
                match lines.recv().await {
                    Ok(line) => {
                        if events.send(BusEvent::Line(line)).await.is_err() {
                            return;
                        }
                    }
                    Err(RecvError::Lagged(missed)) => {
                        warn!(
                            missed,
                            "lines between the parts of this process were missed; asking for positions anew"
                        );
                        break;
                    }
                    Err(RecvError::Closed) => return,
                }
            }
            if events.send(BusEvent::Lost).await.is_err() {
                return;
            }
        }
    }

    async fn speak(self, outbox: Arc<Outbox>, events: mpsc::Sender<BusEvent>, shutdown: CancellationToken) {
        outbox.open();
        // The reader may be gone already at shutdown; what waits is published all the same.
        let _ = events.send(BusEvent::OutboundUp).await;
        loop {
            let lines = tokio::select! {
                biased;
                lines = outbox.next() => lines,
                () = shutdown.cancelled() => return,
            };
            for line in lines {
                self.say(line.text);
            }
        }
    }
}
