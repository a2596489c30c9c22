//! How many connections may be in setup at once? After a restart thousands of servers are owed something; opening a
//! connection to each at the same moment would hurt both sides, and dead ones must not keep the live ones waiting.

use std::{collections::HashSet, future::Future, pin::pin, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, sleep},
};

use crate::core::id::ServerName;

/// A try holds its permit no longer than this: a live server has answered the handshake by then, and a dead one must not
/// block the way for its whole timeout.
const LONGEST_HOLD: Duration = Duration::from_secs(3);

/// The pool keeps an idle connection for 120 s: a server is warm for one to two of these.
const WARM: Duration = Duration::from_secs(50);

/// A server that failed is tried again within an attempt for some ten minutes: it is doubtful for one to two of these.
const DOUBTFUL: Duration = Duration::from_secs(600);

/// One permit in so many is for servers that failed lately, and no other: ten thousand that do not answer must not make
/// those wait that do.
const DOUBTFUL_SHARE: usize = 4;

/// Servers remembered in one generation; more than that are forgotten early, which costs them a permit.
const MAX_GENERATION: usize = 65_536;

/// The bound on connections in setup.
pub(super) struct Gate {
    permits: Arc<Semaphore>,
    /// For servers that failed lately. The same ones, if there are too few to share.
    doubtful_permits: Arc<Semaphore>,
    warm: Mutex<Lately>,
    doubtful: Mutex<Lately>,
}

impl Gate {
    /// At most `max` connections in setup, and at least one.
    pub(super) fn new(max: usize, now: Instant) -> Self {
        let max = max.clamp(1, Semaphore::MAX_PERMITS);
        let share = max / DOUBTFUL_SHARE;
        let permits = Arc::new(Semaphore::new(max - share));
        Self {
            doubtful_permits: if share == 0 {
                Arc::clone(&permits)
            } else {
                Arc::new(Semaphore::new(share))
            },
            permits,
            warm: Mutex::new(Lately::new(WARM, now)),
            doubtful: Mutex::new(Lately::new(DOUBTFUL, now)),
        }
    }

    /// There is likely a connection to `destination` in the pool.
    pub(super) fn is_warm(&self, destination: &ServerName, now: Instant) -> bool {
        self.warm.lock().contains(destination, now)
    }

    /// Waits for a permit to set up a connection. `None` only if the gate were closed, which it never is.
    pub(super) async fn permit(&self, destination: &ServerName, now: Instant) -> Option<OwnedSemaphorePermit> {
        let doubtful = self.doubtful.lock().contains(destination, now);
        let permits = if doubtful {
            &self.doubtful_permits
        } else {
            &self.permits
        };
        Arc::clone(permits).acquire_owned().await.ok()
    }

    /// Notes how an exchange with `destination` ended: its connection went back to the pool, or is gone.
    pub(super) fn note(&self, destination: &ServerName, pooled: bool, now: Instant) {
        let (is, is_not) = if pooled {
            (&self.warm, &self.doubtful)
        } else {
            (&self.doubtful, &self.warm)
        };
        is.lock().insert(destination, now);
        is_not.lock().remove(destination);
    }
}

/// Does `work`, and gives the permit back when it is done or [`LONGEST_HOLD`] has passed.
pub(super) async fn holding<T>(permit: Option<OwnedSemaphorePermit>, work: impl Future<Output = T>) -> T {
    let mut work = pin!(work);
    if let Some(permit) = permit {
        tokio::select! {
            biased;
            done = &mut work => return done,
            () = sleep(LONGEST_HOLD) => drop(permit),
        }
    }
    work.await
}

/// Which servers something was lately true of. Two generations of names instead of a time for each keep it bounded
/// without a sweep.
struct Lately {
    /// How long a generation lasts.
    generation: Duration,
    current: HashSet<ServerName>,
    previous: HashSet<ServerName>,
    since: Instant,
}

impl Lately {
    fn new(generation: Duration, now: Instant) -> Self {
        Self {
            generation,
            current: HashSet::new(),
            previous: HashSet::new(),
            since: now,
        }
    }

    fn contains(&mut self, name: &ServerName, now: Instant) -> bool {
        self.turn(now);
        self.current.contains(name) || self.previous.contains(name)
    }

    fn insert(&mut self, name: &ServerName, now: Instant) {
        self.turn(now);
        if self.current.len() < MAX_GENERATION && !self.current.contains(name) {
            self.current.insert(name.clone());
        }
    }

    fn remove(&mut self, name: &ServerName) {
        self.current.remove(name);
        self.previous.remove(name);
    }

    fn turn(&mut self, now: Instant) {
        let age = now.saturating_duration_since(self.since);
        if age < self.generation {
            return;
        }
        self.previous = std::mem::take(&mut self.current);
        if age >= 2 * self.generation {
            self.previous.clear();
        }
        self.since = now;
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use super::*;

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    async fn permit(gate: &Gate, name: &str) -> Option<OwnedSemaphorePermit> {
        gate.permit(&name.into(), Instant::now()).await
    }

    #[tokio::test(start_paused = true)]
    async fn servers_that_failed_keep_none_waiting_that_did_not() {
        let gate = Gate::new(8, Instant::now());
        for dead in ["d1", "d2", "d3"] {
            gate.note(&dead.into(), false, Instant::now());
        }
        let _held = [permit(&gate, "d1").await, permit(&gate, "d2").await];
        let third = tokio::time::timeout(seconds(1), permit(&gate, "d3")).await;
        assert!(third.is_err(), "their share is two of eight");
        let mut others = vec![];
        for number in 0..6 {
            others.push(permit(&gate, &format!("live{number}")).await);
        }
        let seventh = tokio::time::timeout(seconds(1), permit(&gate, "live6")).await;
        assert!(seventh.is_err(), "eight in all");
        others.clear();
        // One that answers again is like any other.
        gate.note(&"d3".into(), true, Instant::now());
        permit(&gate, "d3").await;
    }

    #[test]
    fn warmth_lasts_between_one_and_two_generations() {
        let start = Instant::now();
        let name = ServerName::from("a");
        let mut warmth = Lately::new(WARM, start);
        assert!(!warmth.contains(&name, start));
        warmth.insert(&name, start);
        assert!(warmth.contains(&name, start + seconds(49)));
        assert!(warmth.contains(&name, start + seconds(51)));
        assert!(warmth.contains(&name, start + seconds(99)));
        assert!(!warmth.contains(&name, start + seconds(102)));

        warmth.insert(&name, start + seconds(103));
        assert!(
            !warmth.contains(&name, start + seconds(300)),
            "both generations passed unseen"
        );
        warmth.insert(&name, start + seconds(301));
        warmth.remove(&name);
        assert!(!warmth.contains(&name, start + seconds(301)));
    }

    #[test]
    fn warmth_is_bounded() {
        let start = Instant::now();
        let mut warmth = Lately::new(WARM, start);
        for number in 0..=MAX_GENERATION {
            warmth.insert(&number.to_string().into(), start);
        }
        assert_eq!(warmth.current.len(), MAX_GENERATION);
    }

    #[tokio::test(start_paused = true)]
    async fn a_dead_server_holds_its_permit_for_three_seconds_only() {
        let gate = Gate::new(1, Instant::now());
        let start = Instant::now();
        let dead = tokio::spawn(holding(permit(&gate, "a").await, pending::<()>()));
        holding(permit(&gate, "a").await, async {}).await;
        assert_eq!(start.elapsed(), LONGEST_HOLD);
        dead.abort();
        // The one that was done gave its permit back at once.
        permit(&gate, "a").await;
        assert_eq!(start.elapsed(), LONGEST_HOLD);
    }

    #[tokio::test(start_paused = true)]
    async fn waiting_ends_when_a_permit_is_free() {
        let gate = Gate::new(2, Instant::now());
        let permits = [permit(&gate, "a").await, permit(&gate, "a").await];
        assert!(tokio::time::timeout(seconds(1), permit(&gate, "a")).await.is_err());
        drop(permits);
        assert!(
            tokio::time::timeout(seconds(1), permit(&gate, "a"))
                .await
                .unwrap()
                .is_some()
        );
    }
}
