//! Who is owed what, from the event cursor to the head: the delivery contract as one structure, without I/O.
//!
//! Every event of ours up to the head was entered here. A live destination holds back the cursor until it has accepted
//! its PDUs; one that is behind has rows instead, which the next checkpoint writes in the same transaction that moves
//! the cursor. So at every instant an event is accepted, above the cursor, or on record.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    sync::Arc,
};

use tokio::time::Instant;
use tracing::info;

use super::{
    destination::{Destination, Limits, Step},
    outstanding::Outstanding,
    pace::Seen,
    sticky::backlog::Backlog,
    tables::{BacklogRow, DestinationRow},
    transaction::OwedPdu,
};
use crate::core::{
    clock::Now,
    event::Pdu,
    id::{EventId, RoomId, ServerName, StreamOrdering},
    metrics::DestinationState,
    store::{Checkpoint, DestinationRecord, EventCursor, RetryTimings},
};

/// An event of the stream with the destinations that must get it.
#[derive(Debug)]
pub struct Entry {
    /// The event.
    pub pdu: Arc<OwedPdu>,
    /// Ours to send to, and permitted.
    pub destinations: Vec<ServerName>,
}

/// What a destination's task is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Activity {
    /// There is none.
    None,
    /// It has asked for a step and carries it out.
    Working,
    /// It waits for a time, or to be woken.
    Waiting,
}

/// How a destination's task is brought to look again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wake {
    /// Start one.
    Start(ServerName),
    /// Wake the one that waits.
    Nudge(ServerName),
}

/// Figures of the moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Figures {
    /// Destinations that keep up.
    pub live: usize,
    /// Destinations that are behind and may be tried now.
    pub behind: usize,
    /// Destinations in back-off.
    pub backing_off: usize,
    /// Destinations with a task at work.
    pub working: usize,
    /// PDUs in memory, one for each destination.
    pub queued: usize,
}

#[derive(Debug)]
struct Known {
    destination: Destination,
    activity: Activity,
}

/// The ledger.
#[derive(Debug)]
pub struct Ledger {
    limits: Limits,
    /// Events up to here are entered.
    head: StreamOrdering,
    deltas: Option<StreamOrdering>,
    outstanding: Outstanding,
    /// Events whose hosts are not known yet.
    undecided: BTreeSet<StreamOrdering>,
    destinations: HashMap<ServerName, Known>,
    /// Destinations with something that a checkpoint must write.
    unwritten: HashSet<ServerName>,
    /// The last checkpoint that was written: its cursors.
    written: (StreamOrdering, Option<StreamOrdering>),
}

impl Ledger {
    /// An empty ledger at the position where the process resumes.
    ///
    /// No destination may have a `last_successful` above it that was not written by us: what lies between would not be
    /// sent to it again.
    #[must_use]
    pub fn new(cursor: EventCursor, limits: Limits) -> Self {
        Self {
            limits,
            head: cursor.position,
            deltas: cursor.deltas,
            outstanding: Outstanding::default(),
            undecided: BTreeSet::new(),
            destinations: HashMap::new(),
            unwritten: HashSet::new(),
            written: (cursor.position, cursor.deltas),
        }
    }

    /// Events up to here are entered.
    #[must_use]
    pub fn head(&self) -> StreamOrdering {
        self.head
    }

    /// Just below the lowest event that a live destination has not accepted, or whose hosts are unknown.
    #[must_use]
    pub fn cursor(&self) -> StreamOrdering {
        let undecided = self.undecided.first().copied();
        [self.outstanding.lowest(), undecided]
            .into_iter()
            .flatten()
            .min()
            .map_or(self.head, StreamOrdering::before)
    }

    /// Those of `names` that must be looked up in the database before anything is entered for them.
    #[must_use]
    pub fn unknown<'a>(&self, names: impl IntoIterator<Item = &'a ServerName>) -> Vec<ServerName> {
        let unknown: HashSet<_> = names
            .into_iter()
            .filter(|name| !self.destinations.contains_key(*name))
            .collect();
        unknown.into_iter().cloned().collect()
    }

    /// A destination as the database knows it. One that is known already stays as it is.
    pub fn introduce(&mut self, name: ServerName, record: &DestinationRecord, now: Now) {
        let limits = self.limits;
        self.destinations.entry(name).or_insert_with(|| Known {
            destination: Destination::new(record, limits, now),
            activity: Activity::None,
        });
    }

    /// Whether reading on should wait: some destination takes what it is sent but has much to take.
    #[must_use]
    pub fn is_pressed(&self, now: Now) -> bool {
        self.destinations
            .values()
            .any(|known| known.destination.is_pressed(self.limits, now))
    }

    /// The next events of the stream, up to `head`. `undecided` are those of them whose hosts are not known yet; they
    /// follow by [`Self::decide`]. All destinations must be introduced.
    pub fn enter(
        &mut self,
        entries: &[Entry],
        undecided: impl IntoIterator<Item = StreamOrdering>,
        head: StreamOrdering,
        now: Now,
    ) -> Vec<Wake> {
        self.undecided.extend(undecided);
        let wakes = self.append(entries, now);
        self.head = self.head.max(head);
        wakes
    }

    /// The destinations of an event that was undecided.
    pub fn decide(&mut self, entry: Option<&Entry>, ordering: StreamOrdering, now: Now) -> Vec<Wake> {
        let wakes = self.append(entry.map_or(&[], std::slice::from_ref), now);
        self.undecided.remove(&ordering);
        wakes
    }

    fn append(&mut self, entries: &[Entry], now: Now) -> Vec<Wake> {
        let mut wakes = Vec::new();
        let undecided = self.undecided.first().copied();
        for Entry { pdu, destinations } in entries {
            for name in destinations {
                let Some(known) = self.destinations.get_mut(name) else {
                    debug_assert!(false, "{name} was not introduced");
                    continue;
                };
                // After a start, events above the cursor are read again; these it has.
                if known
                    .destination
                    .last_successful()
                    .is_some_and(|last| pdu.ordering <= last)
                {
                    continue;
                }
                let was_live = known.destination.is_live();
                known
                    .destination
                    .append(pdu, self.limits, undecided, now, &mut self.outstanding);
                if was_live && !known.destination.is_live() {
                    info!(destination = %name, limit = self.limits.pending, "behind: too many PDUs wait for it");
                }
                if !self.unwritten.contains(name) {
                    self.unwritten.insert(name.clone());
                }
                // One in back-off is asleep until it is due; new traffic is no reason to look.
                if known.destination.retry().due(now.wall).is_none() {
                    wakes.extend(known.wake(name));
                }
            }
        }
        wakes
    }

    /// Something happened that a destination's task should look at.
    pub fn wake(&mut self, name: &ServerName) -> Option<Wake> {
        self.destinations.get_mut(name)?.wake(name)
    }

    /// A backlog row was recorded (`room` given), or may have been.
    pub fn backlog_recorded(&mut self, name: &ServerName, room: Option<&RoomId>, now: Now) -> Option<Wake> {
        let known = self.destinations.get_mut(name)?;
        match room {
            Some(room) => known.destination.backlog().recorded(room, now.at),
            None => known.destination.backlog().look_again(),
        }
        known.wake(name)
    }

    /// The next step for a destination's task. After [`Step::Idle`] there must be no task.
    pub fn next(&mut self, name: &ServerName, now: Now) -> Step {
        let undecided = self.undecided.first().copied();
        let Some(known) = self.destinations.get_mut(name) else {
            return Step::Idle;
        };
        let step = known
            .destination
            .next(self.limits, self.head, undecided, now, &mut self.outstanding);
        known.activity = match step {
            Step::Idle => Activity::None,
            Step::Wait(_) | Step::BackOff(_) => Activity::Waiting,
            _ => Activity::Working,
        };
        // Its back-off may have made rows of what was in memory, also while it was catching up.
        if known.destination.has_unwritten_rows() && !self.unwritten.contains(name) {
            self.unwritten.insert(name.clone());
        }
        step
    }

    /// The waiting task ends although there is something to do later. Returns whether it may: not if it was woken
    /// meanwhile.
    pub fn retire(&mut self, name: &ServerName) -> bool {
        let Some(known) = self.destinations.get_mut(name) else {
            return true;
        };
        if known.activity == Activity::Working {
            return false;
        }
        known.activity = Activity::None;
        true
    }

    /// The task ended in the middle of a step. What it had in flight goes back, and another may be started after a while.
    pub fn failed_task(&mut self, name: &ServerName, until: Instant) {
        self.paused(name, until);
        if let Some(known) = self.destinations.get_mut(name) {
            known.activity = Activity::None;
        }
    }

    /// What was in flight to a destination was accepted; `took` as for [`Destination::accepted`].
    pub fn accepted(&mut self, name: &ServerName, took: impl Fn(&EventId) -> bool, now: Now) {
        let undecided = self.undecided.first().copied();
        self.change(name, |destination, outstanding| {
            destination.accepted(took, undecided, now, outstanding);
        });
    }

    /// It was refused, perhaps for its size or content (see [`Destination::refused`]). Returns whether it was one PDU.
    pub fn refused(&mut self, name: &ServerName) -> bool {
        self.destinations
            .get_mut(name)
            .is_some_and(|known| known.destination.refused())
    }

    /// The attempt failed, and this is the back-off that the database holds now.
    pub fn failed(&mut self, name: &ServerName, retry: RetryTimings) {
        self.change(name, |destination, outstanding| destination.failed(retry, outstanding));
    }

    /// The attempt came to nothing: again, but not before `until`.
    pub fn paused(&mut self, name: &ServerName, until: Instant) {
        self.change(name, |destination, _| destination.paused(until));
    }

    /// The database's back-off of a destination changed.
    pub fn set_retry(&mut self, name: &ServerName, retry: RetryTimings) -> Option<Wake> {
        let known = self.destinations.get_mut(name)?;
        known.destination.set_retry(retry);
        known.wake(name)
    }

    /// A destination's back-off as just read. Nothing if ours is no longer what it was before the reading: then an
    /// attempt of our own has ended meanwhile, and what was read is older.
    pub fn read_retry(&mut self, name: &ServerName, before: RetryTimings, read: RetryTimings) -> Option<Wake> {
        if self.retry(name) != before {
            return None;
        }
        self.set_retry(name, read)
    }

    /// The destinations in back-off.
    #[must_use]
    pub fn backing_off(&self, now: Now) -> Vec<ServerName> {
        let backing_off = self
            .destinations
            .iter()
            .filter(|(_, known)| known.destination.retry().due(now.wall).is_some());
        backing_off.map(|(name, _)| name.clone()).collect()
    }

    /// A destination's back-off as far as known.
    #[must_use]
    pub fn retry(&self, name: &ServerName) -> RetryTimings {
        self.destinations
            .get(name)
            .map(|known| known.destination.retry())
            .unwrap_or_default()
    }

    /// Catch-up got as far as `to`; the database has it already.
    pub fn caught_up_to(&mut self, name: &ServerName, to: StreamOrdering, now: Now) {
        let head = self.head;
        self.change(name, |destination, _| destination.caught_up_to(to, head, now));
    }

    /// No row up to `up_to` is left for a destination. Returns whether it is live again.
    pub fn caught_up(&mut self, name: &ServerName, up_to: StreamOrdering) -> bool {
        self.destinations
            .get_mut(name)
            .is_some_and(|known| known.destination.caught_up(up_to))
    }

    /// A destination was asked whether it has an event of `room`.
    pub fn asked(&mut self, name: &ServerName, room: &RoomId, seen: Seen, now: Now) {
        if let Some(known) = self.destinations.get_mut(name) {
            known.destination.pace().asked(room, seen, now.at);
        }
    }

    /// A destination accepted PDUs that were not in its queue: of the sticky backlog, or of catch-up.
    pub fn accepted_besides<'a>(&mut self, name: &ServerName, pdus: impl Iterator<Item = &'a Pdu>, now: Now) {
        if let Some(known) = self.destinations.get_mut(name) {
            for pdu in pdus {
                known.destination.pace().accepted(&pdu.room_id, &pdu.event_id, now.at);
            }
        }
    }

    /// What became of a destination's sticky backlog.
    pub fn backlog<R: Default>(&mut self, name: &ServerName, change: impl FnOnce(&mut Backlog) -> R) -> R {
        let known = self.destinations.get_mut(name);
        known.map_or_else(R::default, |known| change(known.destination.backlog()))
    }

    fn change(&mut self, name: &ServerName, change: impl FnOnce(&mut Destination, &mut Outstanding)) {
        if let Some(known) = self.destinations.get_mut(name) {
            change(&mut known.destination, &mut self.outstanding);
            if !self.unwritten.contains(name) {
                self.unwritten.insert(name.clone());
            }
        }
    }

    /// Current-state deltas up to here were looked at.
    pub fn set_deltas(&mut self, position: StreamOrdering) {
        self.deltas = self.deltas.max(Some(position));
    }

    /// Destinations that take nothing, or whose oldest PDU is too old, become behind.
    pub fn enforce_age(&mut self, now: Now) -> Vec<Wake> {
        let mut wakes = Vec::new();
        for (name, known) in &mut self.destinations {
            let was_live = known.destination.is_live();
            known.destination.enforce_age(self.limits, now, &mut self.outstanding);
            if known.destination.has_unwritten_rows() && !self.unwritten.contains(name) {
                self.unwritten.insert(name.clone());
            }
            if was_live != known.destination.is_live() {
                info!(destination = %name, "behind: it does not take what it is sent, or not fast enough");
                wakes.extend(known.wake(name));
            }
        }
        wakes
    }

    /// What the database must be told; `None` if it knows everything.
    #[must_use]
    pub fn checkpoint(&self) -> Option<Checkpoint> {
        let mut checkpoint = Checkpoint {
            cursor: self.cursor(),
            delta_cursor: self.deltas,
            ..Checkpoint::default()
        };
        for name in &self.unwritten {
            let Some(known) = self.destinations.get(name) else {
                continue;
            };
            let (owed, last_successful) = known.destination.unwritten();
            checkpoint
                .owed
                .extend(owed.iter().map(|(room, at)| (name.clone(), room.clone(), *at)));
            checkpoint
                .last_successful
                .extend(last_successful.map(|last| (name.clone(), last)));
        }
        let unchanged = checkpoint.owed.is_empty()
            && checkpoint.last_successful.is_empty()
            && self.written == (checkpoint.cursor, checkpoint.delta_cursor);
        (!unchanged).then_some(checkpoint)
    }

    /// A checkpoint was written.
    pub fn wrote(&mut self, checkpoint: &Checkpoint) {
        self.written = (checkpoint.cursor, checkpoint.delta_cursor);
        for (name, ordering) in &checkpoint.last_successful {
            if let Some(known) = self.destinations.get_mut(name) {
                known.destination.wrote_last_successful(*ordering);
            }
        }
        for (name, room, ordering) in &checkpoint.owed {
            if let Some(known) = self.destinations.get_mut(name) {
                known.destination.wrote_owed(room, *ordering);
            }
        }
        let destinations = &self.destinations;
        self.unwritten.retain(|name| {
            destinations.get(name).is_some_and(|known| {
                let (owed, last_successful) = known.destination.unwritten();
                !owed.is_empty() || last_successful.is_some()
            })
        });
    }

    /// Figures of the moment.
    #[must_use]
    pub fn figures(&self, now: Now) -> Figures {
        let mut figures = Figures::default();
        for known in self.destinations.values() {
            match known.destination.state(now) {
                DestinationState::Live => figures.live += 1,
                DestinationState::Behind => figures.behind += 1,
                DestinationState::Backoff => figures.backing_off += 1,
            }
            figures.working += usize::from(known.activity == Activity::Working);
            figures.queued += known.destination.queued();
        }
        figures
    }

    /// All destinations and their known backlog, as rows of the tables that others may follow.
    #[must_use]
    pub fn rows(&self, now: Now) -> (Vec<DestinationRow>, Vec<BacklogRow>) {
        let mut rows = Vec::with_capacity(self.destinations.len());
        let mut backlog = Vec::new();
        for (name, Known { destination, .. }) in &self.destinations {
            rows.push(DestinationRow {
                destination: name.clone(),
                state: destination.state(now),
                last_successful: destination.last_successful(),
                retry: destination.retry(),
                queued: destination.queued(),
            });
            backlog.extend(destination.backlog_rooms().map(|(room, position)| BacklogRow {
                destination: name.clone(),
                room: room.clone(),
                position,
            }));
        }
        (rows, backlog)
    }
}

impl Known {
    fn wake(&mut self, name: &ServerName) -> Option<Wake> {
        match self.activity {
            Activity::None => {
                self.activity = Activity::Working;
                Some(Wake::Start(name.clone()))
            }
            Activity::Waiting => {
                self.activity = Activity::Working;
                Some(Wake::Nudge(name.clone()))
            }
            Activity::Working => None,
        }
    }
}

#[cfg(test)]
mod tests;
