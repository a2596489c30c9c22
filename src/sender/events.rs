//! The event loop: from the head of the ledger to the position up to which everything is persisted.

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
    time::Duration,
};

use tokio::{
    sync::watch,
    time::{Instant, sleep, timeout},
};
use tracing::{debug, warn};

use super::{STORE_PATIENCE, Sender, SenderError, ledger::Entry, timely, transaction::OwedPdu};
use crate::core::{
    clock,
    event::{self, ParsedEvent},
    id::{RoomId, ServerName, StreamOrdering},
    replication::start_positions,
    state::recipients::{self, EventFacts, RecipientsError},
    store::{StoreError, StoredEvent},
};

/// Events of ours read at once, at most.
const PAGE: usize = 250;

/// A look without being told: repairs whatever notification was lost.
const SLOW_TICK: Duration = Duration::from_mins(1);

/// An event whose hosts cannot be computed is tried again for this long; then the hosts joined by then stand in.
const HOSTS_PATIENCE: Duration = Duration::from_mins(1);

/// How often such events are tried again.
const DECIDE_INTERVAL: Duration = Duration::from_millis(500);

/// Events that wait for their hosts; beyond this many the loop reads no further.
const UNDECIDED_LIMIT: usize = 1_000;

/// How long the loop waits before it looks again whether the destinations have caught their breath.
const PRESSURE_PAUSE: Duration = Duration::from_millis(20);

/// An event whose hosts are not known yet. Later events of its room wait behind it.
struct Undecided {
    event: StoredEvent,
    parsed: ParsedEvent,
    since: Instant,
}

/// The state of the loop.
pub(super) struct EventLoop {
    sender: Arc<Sender>,
    up_to: watch::Receiver<StreamOrdering>,
    /// Everything up to here is persisted.
    target: StreamOrdering,
    deltas: StreamOrdering,
    /// The last page was full, so there is more to read than there is time for: destinations set the pace.
    full: bool,
    undecided: HashMap<RoomId, VecDeque<Undecided>>,
    /// When they are tried again.
    decide_at: Instant,
    /// When servers that joined were last looked for with success.
    detecting: Instant,
}

impl EventLoop {
    pub(super) fn new(sender: Arc<Sender>, up_to: watch::Receiver<StreamOrdering>, deltas: StreamOrdering) -> Self {
        Self {
            sender,
            target: StreamOrdering(i64::MIN),
            up_to,
            deltas,
            full: true,
            undecided: HashMap::new(),
            decide_at: Instant::now(),
            detecting: Instant::now(),
        }
    }

    /// Runs until replication ends. It can be dropped anywhere.
    ///
    /// # Errors
    ///
    /// [`SenderError::ReplicationEnded`]: nothing would tell of new events any more.
    pub(super) async fn run(mut self) -> Result<(), SenderError> {
        let sender = Arc::clone(&self.sender);
        loop {
            let heard = *self.up_to.borrow_and_update();
            self.target = self.target.max(heard);
            // No limit of time on the whole: what is slow in it has one of its own.
            let advanced = self.advance(self.target).await;
            sender.metrics.database_up.set(i64::from(advanced.is_ok()));
            let pause = match advanced {
                Ok(true) => Duration::ZERO,
                Ok(false) if self.undecided.is_empty() => SLOW_TICK,
                Ok(false) => DECIDE_INTERVAL,
                Err(error) => {
                    warn!(%error, "events cannot be read just now");
                    Duration::from_secs(1)
                }
            };
            if pause.is_zero() {
                continue;
            }
            tokio::select! {
                changed = self.up_to.changed() => if changed.is_err() {
                    return Err(SenderError::ReplicationEnded);
                },
                () = sender.look_at_deltas.notified() => {}
                () = sender.look_for_events.notified() => self.look_for_events().await,
                () = sleep(pause) => if pause == SLOW_TICK { self.look_for_events().await },
            }
        }
    }

    /// Asks the database how far everything is persisted: it may be further than replication told us.
    async fn look_for_events(&mut self) {
        match timely(start_positions(&self.sender.store, &self.sender.event_writers)).await {
            Ok(positions) => self.target = self.target.max(positions.events.up_to()),
            Err(error) => warn!(%error, "how far events are persisted could not be read"),
        }
    }

    /// Reads a page. Returns whether there may be more at once.
    async fn advance(&mut self, target: StreamOrdering) -> Result<bool, StoreError> {
        let sender = Arc::clone(&self.sender);
        // Not with every page, or every look at destinations that are out of breath.
        if self.decide_at <= Instant::now() {
            self.decide().await?;
            self.decide_at = Instant::now() + DECIDE_INTERVAL;
        }
        let head = sender.ledger.lock().head();
        if self.full && sender.ledger.lock().is_pressed(clock::now()) {
            sleep(PRESSURE_PAUSE).await;
            return Ok(true);
        }
        if self.undecided.values().map(VecDeque::len).sum::<usize>() >= UNDECIDED_LIMIT {
            return Ok(false);
        }
        // A destination may be half full before it sets the pace: what is read next must fit in above that.
        let limit = i64::try_from(PAGE.min(sender.limits.pending / 2).max(1)).unwrap_or(1);
        let read = async {
            if head < target {
                timely(sender.store.own_events(head, target, limit)).await.map(Some)
            } else {
                Ok(None)
            }
        };
        let deltas = &mut self.deltas;
        let detect = async {
            if sender.sticky {
                sender.detect_new_servers(deltas, target).await
            } else {
                Ok(())
            }
        };
        let (page, detected) = tokio::join!(read, detect);
        match detected {
            Ok(()) => self.detecting = Instant::now(),
            // A short while, so that the events of a room do not overtake the backlog of who joined it.
            Err(error) if error.may_pass() && self.detecting.elapsed() < HOSTS_PATIENCE => return Err(error),
            // The deltas stay unread, for a later look; what is persisted must go out all the same.
            Err(error) => warn!(%error, "servers that joined could not be looked for"),
        }
        let Some(page) = page? else { return Ok(false) };
        let read_up_to = page.read_up_to;
        self.full = i64::try_from(page.events.len()).is_ok_and(|read| read >= limit);
        self.enter(page.events, read_up_to).await?;
        sender.metrics.event_position.set(read_up_to.0);
        Ok(read_up_to < target)
    }

    async fn enter(&mut self, events: Vec<StoredEvent>, read_up_to: StreamOrdering) -> Result<(), StoreError> {
        let sender = Arc::clone(&self.sender);
        let mut entries = vec![];
        let mut sticky = vec![];
        let mut late: Vec<Undecided> = vec![];
        sender.metrics.events_processed.inc_by(events.len() as u64);
        let newest = events.last().and_then(|event| event.received);
        for event in events {
            if !recipients::is_ours_to_send(&event, &sender.origin) {
                continue;
            }
            let parsed = match event::parse(&event) {
                Ok(parsed) => parsed,
                Err(error) => {
                    warn!(event_id = %event.event_id, %error, "stored event cannot be sent");
                    continue;
                }
            };
            let room = &event.room_id;
            let waits = self.undecided.contains_key(room) || late.iter().any(|late| late.event.room_id == *room);
            let hosts = if waits {
                Err(RecipientsError::NotYet)
            } else {
                sender.hosts(&event, &parsed).await
            };
            match hosts {
                Ok(hosts) => {
                    let is_sticky = parsed.sticky;
                    let Some(entry) = sender.entry(&event, parsed, hosts) else {
                        continue;
                    };
                    if is_sticky {
                        sticky.push(entries.len());
                    }
                    entries.push(entry);
                }
                Err(RecipientsError::Store(error)) if error.may_pass() => return Err(error), // the page is read again, whole
                Err(error) => {
                    if !waits {
                        warn!(event_id = %event.event_id, %error, "its hosts are not known yet");
                    }
                    late.push(Undecided {
                        event,
                        parsed,
                        since: Instant::now(),
                    });
                }
            }
        }
        let orderings = late.iter().map(|late| late.event.stream_ordering);
        self.enter_decided(&entries, &sticky, orderings, read_up_to).await?;
        // Not before: after an error the page is read again, whole, and none of it must be there twice.
        for late in late {
            let waiting = self.undecided.entry(late.event.room_id.clone()).or_default();
            waiting.push_back(late);
        }
        if let Some(received) = newest {
            sender.metrics.event_last_ts.set(received.0);
            sender.metrics.event_lag.set(clock::now().wall.since(received));
        }
        Ok(())
    }

    async fn enter_decided(
        &self,
        entries: &[Entry],
        sticky: &[usize],
        late: impl Iterator<Item = StreamOrdering>,
        read_up_to: StreamOrdering,
    ) -> Result<(), StoreError> {
        let sender = &self.sender;
        sender
            .introduce(entries.iter().flat_map(|entry| &entry.destinations))
            .await?;
        if sender.sticky && !sticky.is_empty() {
            let sticky: Vec<&Entry> = sticky.iter().map(|index| &entries[*index]).collect();
            sender.record_missed(&sticky).await?;
        }
        let wakes = sender.ledger.lock().enter(entries, late, read_up_to, clock::now());
        for entry in entries.iter().filter(|entry| !entry.destinations.is_empty()) {
            sender.metrics.sent_pdus.inc();
            sender
                .metrics
                .sent_pdu_destinations
                .inc_by(entry.destinations.len() as u64);
        }
        sender.wake(wakes);
        Ok(())
    }

    /// Tries again the events whose hosts are not known.
    async fn decide(&mut self) -> Result<(), StoreError> {
        let sender = Arc::clone(&self.sender);
        let rooms: Vec<RoomId> = self.undecided.keys().cloned().collect();
        for room in rooms {
            let Some(waiting) = self.undecided.get_mut(&room) else {
                continue;
            };
            while let Some(Undecided { event, parsed, since }) = waiting.front() {
                let hosts = match sender.hosts(event, parsed).await {
                    Ok(hosts) => hosts,
                    Err(RecipientsError::Store(error)) if error.may_pass() => return Err(error),
                    Err(error) if since.elapsed() < HOSTS_PATIENCE => {
                        debug!(event_id = %event.event_id, %error, "its hosts are still not known");
                        break;
                    }
                    Err(error) => {
                        warn!(event_id = %event.event_id, %error, "sent to the servers joined now instead");
                        sender.metrics.hosts_fallback.inc();
                        timely(sender.store.joined_hosts_now(&room)).await?
                    }
                };
                let entry = sender.entry(event, parsed.clone(), hosts);
                if let Some(entry) = &entry {
                    sender.introduce(&entry.destinations).await?;
                    if sender.sticky && parsed.sticky {
                        sender.record_missed(&[entry]).await?;
                    }
                }
                let wakes = sender
                    .ledger
                    .lock()
                    .decide(entry.as_ref(), event.stream_ordering, clock::now());
                sender.wake(wakes);
                waiting.pop_front();
            }
            if waiting.is_empty() {
                self.undecided.remove(&room);
            }
        }
        Ok(())
    }
}

impl Sender {
    async fn hosts(&self, event: &StoredEvent, parsed: &ParsedEvent) -> Result<Vec<ServerName>, RecipientsError> {
        let facts = EventFacts {
            has_prev_events: !parsed.prev_events.is_empty(),
            auth_events: &parsed.auth_events,
            replaces_state: parsed.replaces_state.as_ref(),
            membership: parsed.membership.as_deref(),
        };
        let hosts = recipients::recipients(&self.store, &self.joined_hosts, event, facts);
        // A state that takes so long to read must not hold up other rooms.
        timeout(STORE_PATIENCE, hosts)
            .await
            .unwrap_or(Err(RecipientsError::NotYet))
    }

    fn entry(&self, event: &StoredEvent, parsed: ParsedEvent, hosts: Vec<ServerName>) -> Option<Entry> {
        let pdu = parsed.pdu?;
        let destinations = hosts.into_iter().filter(|host| self.may_send_to(host)).collect();
        let pdu = OwedPdu {
            ordering: event.stream_ordering,
            pdu,
            since: Instant::now(),
        };
        Some(Entry {
            pdu: Arc::new(pdu),
            destinations,
        })
    }
}
