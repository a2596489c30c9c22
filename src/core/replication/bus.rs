//! What is a bus, and how does it return after a failure?

use std::{future::Future, sync::Arc, time::Duration};

use rand::{RngExt, rngs::StdRng};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::core::replication::outbox::Outbox;

/// What carries the lines between the processes of one homeserver. It keeps the order of one speaker's lines, brings
/// everybody's own lines back, and keeps nothing for who is not there.
pub trait Bus: Clone + Send + 'static {
    /// Tells `events` what is heard, for ever. Ends when `events` is closed.
    fn listen(self, events: mpsc::Sender<BusEvent>) -> impl Future<Output = ()> + Send + 'static;

    /// Publishes what comes into `outbox`, until `shutdown`; then what still waits there, if a connection stands.
    fn speak(
        self,
        outbox: Arc<Outbox>,
        events: mpsc::Sender<BusEvent>,
        shutdown: CancellationToken,
    ) -> impl Future<Output = ()> + Send + 'static;
}

/// What happens on the bus.
#[derive(Debug)]
pub enum BusEvent {
    /// The subscription is confirmed: what is published from now on arrives.
    Subscribed,
    /// It is gone: what is published until the next confirmation is missed.
    Lost,
    /// Publishing is possible.
    OutboundUp,
    /// It is not.
    OutboundDown,
    /// A line was published by somebody, perhaps ourselves.
    Line(String),
}

/// The pauses between attempts to connect: 1 s, growing by the factor e, within 12 % of it, never ending. These are
/// Synapse's.
#[derive(Debug)]
pub struct Backoff {
    next: f64,
    longest: f64,
    rng: StdRng,
}

const FIRST: f64 = 1.0;
const JITTER: f64 = 0.12;

impl Backoff {
    /// Pauses of about `longest` at most.
    #[must_use]
    pub fn new(longest: Duration, rng: StdRng) -> Self {
        Self {
            next: FIRST,
            longest: longest.as_secs_f64(),
            rng,
        }
    }

    /// The connection stood: the next pause is the shortest again.
    pub fn reset(&mut self) {
        self.next = FIRST;
    }

    /// How long to wait now.
    pub fn pause(&mut self) -> Duration {
        let pause = self.next;
        self.next = (pause * std::f64::consts::E).min(self.longest);
        let factor = 1.0 - JITTER + 2.0 * JITTER * self.rng.random::<f64>();
        Duration::from_secs_f64((pause * factor).min(self.longest))
    }
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;

    use super::*;

    #[test]
    fn pauses_grow_to_the_longest_and_start_again() {
        let mut backoff = Backoff::new(Duration::from_secs(5), StdRng::seed_from_u64(7));
        for expected in [1.0_f64, std::f64::consts::E, 5.0, 5.0] {
            let pause = backoff.pause().as_secs_f64();
            assert!(
                (expected * 0.879..=(expected * 1.121).min(5.0)).contains(&pause),
                "{pause}"
            );
        }
        backoff.reset();
        assert!(backoff.pause() < Duration::from_millis(1_121));
    }
}
