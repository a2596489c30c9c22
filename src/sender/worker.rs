//! One destination's task: asks the ledger for the next step and carries it out, until there is none.

use std::{sync::Arc, time::Duration};

use tokio::{
    sync::Notify,
    time::{Instant, sleep_until},
};
use tracing::{debug, error, warn};

use super::{
    Sender,
    attempt::{Attempt, PAUSE},
    catch_up::Page,
    destination::Step,
    ledger::Wake,
    pace::Seen,
    transaction::OwedPdu,
};
use crate::{
    core::{
        clock,
        id::{EventId, ServerName},
        store::StoreError,
    },
    federation::{
        outcome::EventProbe,
        transaction::{Accepted, Body},
    },
};

/// A task waits for the end of a back-off that is shorter than this; longer ones are found by the scan when they end.
const WORTH_WAITING: Duration = Duration::from_mins(10);

/// How long a destination rests after the database failed us.
const STORE_PAUSE: Duration = Duration::from_secs(2);

/// How long an answer to whether a destination has what it accepted is waited for; other rooms wait meanwhile.
const PACE_TIMEOUT: Duration = Duration::from_secs(2);

/// Whether a task goes on.
pub(super) type Flow = std::ops::ControlFlow<()>;

impl Sender {
    /// Brings destinations' tasks to look again.
    pub(super) fn wake(self: &Arc<Self>, wakes: impl IntoIterator<Item = Wake>) {
        for wake in wakes {
            match wake {
                Wake::Start(name) => self.start_worker(name),
                Wake::Nudge(name) => self.nudge(&name),
            }
        }
    }

    /// Ends whatever a destination's task is waiting for.
    pub(super) fn nudge(&self, name: &ServerName) {
        if let Some(nudge) = self.nudges.lock().get(name) {
            nudge.notify_one();
        }
    }

    fn start_worker(self: &Arc<Self>, name: ServerName) {
        if self.shutdown.drain.is_cancelled() {
            return;
        }
        let nudge = Arc::new(Notify::new());
        self.nudges.lock().insert(name.clone(), Arc::clone(&nudge));
        let worker = Worker {
            sender: Arc::clone(self),
            name,
            nudge,
            page: Page::default(),
        };
        self.tracker.spawn(worker.run());
    }
}

/// A destination's task.
pub(super) struct Worker {
    pub(super) sender: Arc<Sender>,
    pub(super) name: ServerName,
    pub(super) nudge: Arc<Notify>,
    /// Rooms owed, as read; catch-up takes them one by one, in turn with the backlog.
    pub(super) page: Page,
}

impl Drop for Worker {
    fn drop(&mut self) {
        let mut nudges = self.sender.nudges.lock();
        // A successor may have started already, with a bell of its own.
        if nudges
            .get(&self.name)
            .is_some_and(|nudge| Arc::ptr_eq(nudge, &self.nudge))
        {
            nudges.remove(&self.name);
        }
        drop(nudges);
        if std::thread::panicking() {
            error!(destination = %self.name, "the destination's task failed; it rests for a while");
            self.sender
                .ledger
                .lock()
                .failed_task(&self.name, Instant::now() + PAUSE);
        }
    }
}

impl Worker {
    async fn run(mut self) {
        while self.step().await.is_continue() {}
    }

    async fn step(&mut self) -> Flow {
        let sender = Arc::clone(&self.sender);
        if sender.shutdown.drain.is_cancelled() {
            return Flow::Break(());
        }
        let step = sender.ledger.lock().next(&self.name, clock::now());
        let done = match step {
            Step::Idle => return Flow::Break(()),
            Step::Wait(until) => {
                self.wait(until).await;
                Ok(())
            }
            Step::BackOff(wait) => {
                let until = Instant::now() + wait;
                if wait > WORTH_WAITING && sender.ledger.lock().retire(&self.name) {
                    return Flow::Break(());
                }
                self.wait(until).await;
                Ok(())
            }
            Step::Send(pdus) => {
                self.send(&pdus).await;
                Ok(())
            }
            Step::Ask { room, event } => {
                if let Some(probe) = self.has_event(&event, PACE_TIMEOUT).await {
                    let seen = match probe {
                        EventProbe::Known | EventProbe::Unsupported => Seen::Yes,
                        EventProbe::NotFound | EventProbe::Other(_) => Seen::NotYet,
                        EventProbe::NoAnswer(_) => Seen::NoAnswer,
                    };
                    sender.ledger.lock().asked(&self.name, &room, seen, clock::now());
                }
                Ok(())
            }
            Step::Checkpoint => {
                if !sender.checkpoints.request().await {
                    self.rest(STORE_PAUSE);
                }
                Ok(())
            }
            Step::CatchUp {
                after,
                up_to,
                rest_in_memory,
            } => self.catch_up(after, up_to, rest_in_memory).await,
            Step::Backlog(step) => self.work_on_backlog(step).await,
        };
        if let Err(error) = done {
            self.report(&error);
            self.page.clear();
            self.rest(STORE_PAUSE);
        }
        Flow::Continue(())
    }

    fn report(&self, error: &StoreError) {
        warn!(destination = %self.name, %error, "cannot go on just now");
    }

    async fn wait(&self, until: Instant) {
        tokio::select! {
            () = sleep_until(until) => {}
            () = self.nudge.notified() => {}
            () = self.sender.shutdown.drain.cancelled() => {}
        }
    }

    /// What was in flight goes back into the queue; nothing is done for the destination for a while.
    pub(super) fn rest(&self, pause: Duration) {
        self.sender.ledger.lock().paused(&self.name, Instant::now() + pause);
    }

    async fn send(&self, pdus: &[Arc<OwedPdu>]) {
        let sender = &self.sender;
        let body = sender.bodies.of(&sender.origin, pdus, clock::now().wall);
        match sender.attempt(&self.name, &body, pdus.len(), &self.nudge).await {
            Attempt::Accepted(accepted) => {
                self.count_errors(&accepted);
                let took = |id: &EventId| accepted.took(id);
                sender.ledger.lock().accepted(&self.name, took, clock::now());
            }
            Attempt::Refused => {
                let alone = sender.ledger.lock().refused(&self.name);
                if alone && self.refuses_only_that().await {
                    sender.ledger.lock().accepted(&self.name, |_| false, clock::now());
                }
            }
            attempt => self.not_accepted(&attempt).await,
        }
    }

    /// Asks the destination for an event. `None`: the process is stopping.
    pub(super) async fn has_event(&self, event: &EventId, limit: Duration) -> Option<EventProbe> {
        let probe = tokio::select! {
            probe = self.sender.client.has_event(&self.name, event, limit) => probe,
            () = self.sender.shutdown.drain.cancelled() => return None,
        };
        debug!(destination = %self.name, %event, ?probe, "asked whether it has the event");
        Some(probe)
    }

    /// Whether the destination, which refused what was just sent, takes a transaction that holds nothing. If so, the
    /// refusal was about the content, which is given up; if not, the destination fails, and that has been noted.
    pub(super) async fn refuses_only_that(&self) -> bool {
        let empty = Body::build(&self.sender.origin, clock::now().wall, &[]);
        match self.sender.attempt(&self.name, &empty, 0, &self.nudge).await {
            Attempt::Accepted(_) => {
                warn!(destination = %self.name, "it refuses this one PDU, which is given up");
                self.sender.metrics.pdu_errors.inc();
                true
            }
            attempt => {
                self.not_accepted(&attempt).await;
                false
            }
        }
    }

    /// What follows from an attempt that did not end well.
    pub(super) async fn not_accepted(&self, attempt: &Attempt) {
        match attempt {
            Attempt::Failed | Attempt::Refused => self.sender.back_off(&self.name).await,
            Attempt::Unreadable => self.rest(PAUSE),
            // The cursor stays below what is in flight; the next start sends it again.
            Attempt::Accepted(_) | Attempt::Interrupted => {}
        }
    }

    /// An error listed for a PDU is the destination's answer about it: counted, not repeated.
    pub(super) fn count_errors(&self, accepted: &Accepted) {
        for (event_id, error) in accepted.errors() {
            self.sender.metrics.pdu_errors.inc();
            debug!(destination = %self.name, %event_id, error, "PDU answered with an error");
        }
    }
}
