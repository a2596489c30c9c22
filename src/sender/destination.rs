//! One destination's queue: what it must get, what it was sent, whether it keeps up. A state machine without I/O: input
//! and time in, the next step out.
//!
//! A destination is *live* while it takes what it is sent: its PDUs are in memory and hold the event cursor back until
//! they are accepted. When it fails, or falls too far back, it is *behind*: what it is owed becomes `destination_rooms`
//! rows, one a room, and catch-up sends from those. While catch-up makes progress new PDUs are kept in memory again, so
//! that it ends with nothing missed and nothing rushed past.

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
    time::Duration,
};

use tokio::time::Instant;

use super::{
    outstanding::Outstanding,
    pace::Pace,
    sticky::backlog::{Backlog, BacklogStep},
    transaction::{self, Choice, HOLD_LIMIT, OwedPdu, PDU_LIMIT},
};
use crate::core::{
    clock::Now,
    id::{EventId, RoomId, StickyPosition, StreamOrdering},
    metrics::DestinationState,
    store::{DestinationRecord, RetryTimings},
};

/// How long PDUs are kept in memory while their destination catches up.
const CATCH_UP_PATIENCE: Duration = Duration::from_mins(1);

/// A live destination's oldest PDU waits no longer than this, whatever it accepts meanwhile: events above the cursor are
/// read again after a crash.
const LIVE_LIMIT: Duration = Duration::from_mins(5);

/// When a destination stops being live, and how much one transaction holds.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// More PDUs than this in memory: behind.
    pub pending: usize,
    /// Nothing accepted for this long while some wait: behind.
    pub age: Duration,
    /// Bytes of PDUs in one transaction (one PDU that is larger goes alone).
    pub bytes: usize,
    /// PDUs of a room that may be sent ahead of what was worked on: [`super::pace::WINDOW`].
    pub window: u32,
}

/// What to do next for a destination.
#[derive(Debug)]
pub enum Step {
    /// Send these, ascending.
    Send(Vec<Arc<OwedPdu>>),
    /// Have a checkpoint write its rows, then ask again.
    Checkpoint,
    /// Send the next of the rooms owed.
    CatchUp {
        /// Rows above this.
        after: StreamOrdering,
        /// Rows up to this.
        up_to: StreamOrdering,
        /// What lies beyond is in memory: with no row left, the destination is live again. If not, it is too early to say:
        /// beyond is an event whose hosts are not known yet, or, after a crash, a row above the head. Such a row stands
        /// for older events too, so it must be caught up from; and not before everything below it was read again.
        rest_in_memory: bool,
    },
    /// Ask whether it has this event; more of the room waits for that.
    Ask {
        /// The room.
        room: RoomId,
        /// What it accepted last.
        event: EventId,
    },
    /// Work on the sticky backlog (never [`BacklogStep::Wait`] or [`BacklogStep::Nothing`]).
    Backlog(BacklogStep),
    /// Nothing before this.
    Wait(Instant),
    /// In back-off for this long.
    BackOff(Duration),
    /// Nothing at all.
    Idle,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Standing {
    Live,
    /// With `fork`, catch-up makes progress: what is owed up to there is rows, what came later is in memory.
    Behind {
        fork: Option<StreamOrdering>,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Turn {
    Main,
    Backlog,
}

/// One destination's queue.
#[derive(Debug)]
pub struct Destination {
    standing: Standing,
    /// Every PDU of this destination up to here was accepted, or catch-up passed it.
    last_successful: Option<StreamOrdering>,
    /// What the database holds of it.
    written: Option<StreamOrdering>,
    /// The highest PDU that was accepted live.
    highest_accepted: StreamOrdering,
    /// The lowest PDU that became a row while the transaction now in flight was; see [`Self::accepted`].
    floor: Option<StreamOrdering>,
    /// Not sent, ascending.
    pending: VecDeque<Arc<OwedPdu>>,
    /// Sent, not answered, ascending.
    in_flight: Vec<Arc<OwedPdu>>,
    /// The PDUs in flight hold the cursor (not so once the destination became behind: then rows stand for them).
    in_flight_holds: bool,
    /// Rows to be written.
    owed: HashMap<RoomId, StreamOrdering>,
    /// The highest of its rows: those that were there when the process first heard of it, and those made since.
    rows_up_to: StreamOrdering,
    retry: RetryTimings,
    /// A pause that is no back-off.
    pause_until: Option<Instant>,
    backlog: Backlog,
    pace: Pace,
    /// PDUs were sent since it was last asked for one: if one of them waits for an answer, it is asked first.
    ask_next: bool,
    turn: Turn,
    /// PDUs in the next transaction: fewer after a refusal that may be about size or content.
    pdu_limit: usize,
    /// When it last accepted something, or began to have something.
    moved: Instant,
}

impl Destination {
    /// A destination as the database knows it.
    #[must_use]
    pub fn new(record: &DestinationRecord, limits: Limits, now: Now) -> Self {
        let behind = record.owed_from.is_some() || record.retry.due(now.wall).is_some();
        // One that was never reached but has rows is caught up from its first row: absent would mean "owed nothing".
        let last_successful = record.last_successful.or(record.owed_from.map(StreamOrdering::before));
        Self {
            standing: if behind {
                Standing::Behind { fork: None }
            } else {
                Standing::Live
            },
            last_successful,
            written: record.last_successful,
            highest_accepted: StreamOrdering(i64::MIN),
            floor: None,
            pending: VecDeque::new(),
            in_flight: Vec::new(),
            in_flight_holds: false,
            owed: HashMap::new(),
            rows_up_to: record.owed_up_to.unwrap_or(StreamOrdering(i64::MIN)),
            retry: record.retry,
            pause_until: None,
            backlog: if record.has_backlog {
                Backlog::default()
            } else {
                Backlog::empty()
            },
            pace: Pace::new(limits.window, now.at),
            ask_next: true,
            turn: Turn::Backlog,
            pdu_limit: PDU_LIMIT,
            moved: now.at,
        }
    }

    /// Its sticky backlog.
    pub fn backlog(&mut self) -> &mut Backlog {
        &mut self.backlog
    }

    /// How fast it gets a room's PDUs.
    pub fn pace(&mut self) -> &mut Pace {
        &mut self.pace
    }

    /// Everything of its own up to here was accepted.
    #[must_use]
    pub fn last_successful(&self) -> Option<StreamOrdering> {
        self.last_successful
    }

    /// Its back-off.
    #[must_use]
    pub fn retry(&self) -> RetryTimings {
        self.retry
    }

    /// Whether it keeps up.
    #[must_use]
    pub fn is_live(&self) -> bool {
        self.standing == Standing::Live
    }

    /// How it stands, as operators are told.
    #[must_use]
    pub fn state(&self, now: Now) -> DestinationState {
        if self.is_live() {
            DestinationState::Live
        } else if self.retry.due(now.wall).is_some() {
            DestinationState::Backoff
        } else {
            DestinationState::Behind
        }
    }

    /// The rooms of its sticky backlog that are known, with their positions if those have been read.
    pub fn backlog_rooms(&self) -> impl Iterator<Item = (&RoomId, Option<StickyPosition>)> {
        self.backlog.rooms()
    }

    /// PDUs in memory that were not accepted.
    #[must_use]
    pub fn queued(&self) -> usize {
        self.pending.len() + self.in_flight.len()
    }

    /// One more PDU that it must get. `undecided` as for [`Self::next`].
    pub fn append(
        &mut self,
        pdu: &Arc<OwedPdu>,
        limits: Limits,
        undecided: Option<StreamOrdering>,
        now: Now,
        outstanding: &mut Outstanding,
    ) {
        let in_memory = match self.standing {
            Standing::Live => true,
            Standing::Behind { fork } => fork.is_some_and(|fork| pdu.ordering > fork),
        };
        if self.last_successful.is_none() {
            let first_owed = undecided.map_or(pdu.ordering, |undecided| undecided.min(pdu.ordering));
            self.last_successful = Some(first_owed.before());
        }
        if !in_memory {
            self.owe(&pdu.pdu.room_id, pdu.ordering);
            if !self.in_flight.is_empty() {
                self.floor = Some(self.floor.map_or(pdu.ordering, |floor| floor.min(pdu.ordering)));
            }
            return;
        }
        if self.pending.is_empty() && self.in_flight.is_empty() {
            self.moved = now.at;
        }
        outstanding.hold(pdu.ordering);
        // Nearly always the newest; a PDU whose hosts took long to find comes late.
        let place = self
            .pending
            .iter()
            .rposition(|other| other.ordering < pdu.ordering)
            .map_or(0, |place| place + 1);
        self.pending.insert(place, Arc::clone(pdu));
        if self.pending.len() > limits.pending {
            self.fall_behind(outstanding);
        }
    }

    fn owe(&mut self, room: &RoomId, ordering: StreamOrdering) {
        self.rows_up_to = self.rows_up_to.max(ordering);
        if let Some(owed) = self.owed.get_mut(room) {
            *owed = ordering.max(*owed);
        } else {
            self.owed.insert(room.clone(), ordering);
        }
    }

    /// Everything in memory becomes rows.
    fn fall_behind(&mut self, outstanding: &mut Outstanding) {
        self.standing = Standing::Behind { fork: None };
        self.pace.stop_asking();
        let dropped: Vec<_> = self.pending.drain(..).collect();
        self.floor = dropped.iter().map(|pdu| pdu.ordering).min();
        for pdu in &dropped {
            outstanding.release(pdu.ordering);
            self.owe(&pdu.pdu.room_id, pdu.ordering);
        }
        for pdu in std::mem::take(&mut self.in_flight) {
            self.owe(&pdu.pdu.room_id, pdu.ordering);
            if self.in_flight_holds {
                outstanding.release(pdu.ordering);
            }
            self.in_flight.push(pdu);
        }
        self.in_flight_holds = false;
    }

    /// Behind, if it takes nothing, or what it has not accepted is too old.
    pub fn enforce_age(&mut self, limits: Limits, now: Now, outstanding: &mut Outstanding) {
        let in_flight = self.in_flight.first().filter(|_| self.in_flight_holds);
        let oldest = [in_flight, self.pending.front()]
            .into_iter()
            .flatten()
            .map(|pdu| pdu.since);
        let Some(oldest) = oldest.min() else { return };
        let too_late = match self.standing {
            Standing::Live => {
                let moved = [self.moved]
                    .into_iter()
                    .chain(self.pace.answered())
                    .fold(oldest, Instant::max);
                // The backlog's rooms are held back by us, not by the destination.
                let held = if self.backlog.holds_any() {
                    HOLD_LIMIT
                } else {
                    Duration::ZERO
                };
                (moved + limits.age + held).min(oldest + LIVE_LIMIT.max(limits.age))
            }
            Standing::Behind { .. } => oldest + CATCH_UP_PATIENCE,
        };
        if now.at > too_late {
            self.fall_behind(outstanding);
        }
    }

    /// Whether reading on should wait for it: it takes what it is sent, but has much to take.
    #[must_use]
    pub fn is_pressed(&self, limits: Limits, now: Now) -> bool {
        self.is_live()
            && self.pending.len() * 2 >= limits.pending
            && now.at.duration_since(self.moved) < Duration::from_secs(1)
    }

    /// The next step. Events up to `head` were entered, but for some whose hosts are not known yet, the lowest of which is
    /// `undecided`: it may turn out to be owed to this destination, so nothing may be recorded as accepted beyond it.
    pub fn next(
        &mut self,
        limits: Limits,
        head: StreamOrdering,
        undecided: Option<StreamOrdering>,
        now: Now,
        outstanding: &mut Outstanding,
    ) -> Step {
        if let Some(due) = self.retry.due(now.wall) {
            self.fall_behind(outstanding);
            return Step::BackOff(Duration::from_millis(due.since(now.wall).unsigned_abs()));
        }
        if let Some(until) = self.pause_until.filter(|until| *until > now.at) {
            return Step::Wait(until);
        }
        if self.backlog.is_unread() {
            // Which rooms must wait for their backlog is not known before.
            return Step::Backlog(self.backlog.next(now.at));
        }
        let mut main = Step::Idle;
        if self.turn == Turn::Main {
            main = self.next_main(limits, head, undecided, now);
            if !matches!(main, Step::Wait(_) | Step::Idle) {
                self.turn = Turn::Backlog;
                return main;
            }
        }
        let backlog = self.backlog.next(now.at);
        if !matches!(backlog, BacklogStep::Wait(_) | BacklogStep::Nothing) {
            self.turn = Turn::Main;
            return Step::Backlog(backlog);
        }
        if self.turn == Turn::Backlog {
            self.turn = Turn::Main;
            main = self.next_main(limits, head, undecided, now);
        }
        match (main, backlog) {
            (Step::Wait(main), BacklogStep::Wait(backlog)) => Step::Wait(main.min(backlog)),
            (Step::Idle, BacklogStep::Wait(until)) => Step::Wait(until),
            (main, _) => main,
        }
    }

    fn next_main(&mut self, limits: Limits, head: StreamOrdering, undecided: Option<StreamOrdering>, now: Now) -> Step {
        if let Standing::Behind { fork } = self.standing {
            if !self.owed.is_empty() {
                return Step::Checkpoint;
            }
            if let Some(after) = self.last_successful {
                let fork = fork.unwrap_or(head);
                let decided = undecided.map_or(fork, StreamOrdering::before);
                let rest_in_memory = decided >= fork && self.rows_up_to <= head;
                return Step::CatchUp {
                    after,
                    up_to: fork.min(decided),
                    rest_in_memory,
                };
            }
            self.standing = Standing::Live; // never owed anything
        }
        self.choose(limits, now)
    }

    /// Takes the PDUs of the next transaction out of the queue.
    fn choose(&mut self, limits: Limits, now: Now) -> Step {
        // In turn, so that rooms about which nothing must be asked do not wait for answers.
        if self.ask_next
            && let Some(question) = self.ask(now)
        {
            return question;
        }
        match transaction::choose(
            &mut self.pending,
            &self.backlog,
            &mut self.pace,
            self.pdu_limit,
            limits.bytes,
            now.at,
        ) {
            Choice::Send(chosen) => {
                self.in_flight.clone_from(&chosen);
                self.in_flight_holds = true;
                self.floor = None;
                self.ask_next = true;
                Step::Send(chosen)
            }
            Choice::HeldUntil(until) => self.ask(now).unwrap_or(Step::Wait(until)),
            Choice::Nothing => Step::Idle,
        }
    }

    fn ask(&mut self, now: Now) -> Option<Step> {
        let (room, event) = self.pace.due(now.at)?;
        self.ask_next = false;
        Some(Step::Ask { room, event })
    }

    /// What was in flight was accepted. `took` tells a PDU that was accepted from one that was refused for good.
    pub fn accepted(
        &mut self,
        took: impl Fn(&EventId) -> bool,
        undecided: Option<StreamOrdering>,
        now: Now,
        outstanding: &mut Outstanding,
    ) {
        self.moved = now.at;
        self.pdu_limit = (self.pdu_limit * 2).min(PDU_LIMIT);
        let sent = std::mem::take(&mut self.in_flight);
        for pdu in &sent {
            self.highest_accepted = self.highest_accepted.max(pdu.ordering);
            if took(&pdu.pdu.event_id) {
                self.pace.accepted(&pdu.pdu.room_id, &pdu.pdu.event_id, now.at);
            }
            if self.in_flight_holds {
                outstanding.release(pdu.ordering);
            }
        }
        self.advance(undecided);
    }

    /// Moves `last_successful` over the contiguous run of its own PDUs that were accepted.
    ///
    /// Contiguous is what counts: PDUs of a room that is held back, or of an event whose hosts were found late, are
    /// accepted after later ones.
    fn advance(&mut self, undecided: Option<StreamOrdering>) {
        let lowest_owed = [self.floor, self.pending.front().map(|pdu| pdu.ordering), undecided];
        let bound = lowest_owed
            .into_iter()
            .flatten()
            .min()
            .map_or(StreamOrdering(i64::MAX), StreamOrdering::before);
        let reached = self.highest_accepted.min(bound);
        if self.last_successful.is_none_or(|last| last < reached) {
            self.last_successful = Some(reached);
        }
    }

    /// The destination refused what was in flight in a way that may be about its size or content. Of several PDUs the
    /// next transaction holds half. Returns whether it was one, which stays in flight: if the destination accepts others
    /// it is given up, as if accepted; if not, the attempt failed.
    pub fn refused(&mut self) -> bool {
        if self.in_flight.len() > 1 {
            self.pdu_limit = self.in_flight.len() / 2;
            self.put_back();
            return false;
        }
        true
    }

    fn put_back(&mut self) {
        let sent = std::mem::take(&mut self.in_flight);
        if self.in_flight_holds {
            for pdu in sent.into_iter().rev() {
                let place = self
                    .pending
                    .iter()
                    .position(|other| other.ordering > pdu.ordering)
                    .unwrap_or(self.pending.len());
                self.pending.insert(place, pdu);
            }
        }
    }

    /// The attempt failed; `retry` is what the database now says.
    pub fn failed(&mut self, retry: RetryTimings, outstanding: &mut Outstanding) {
        self.retry = retry;
        self.fall_behind(outstanding);
        self.in_flight.clear();
        self.pdu_limit = PDU_LIMIT;
    }

    /// The attempt came to nothing, which is no reason for back-off: again, but not before `until`.
    pub fn paused(&mut self, until: Instant) {
        self.put_back();
        self.pause_until = Some(until);
    }

    /// The database's back-off changed.
    pub fn set_retry(&mut self, retry: RetryTimings) {
        self.retry = retry;
    }

    /// Catch-up got as far as `to`, which is written.
    pub fn caught_up_to(&mut self, to: StreamOrdering, head: StreamOrdering, now: Now) {
        self.moved = now.at;
        self.last_successful = Some(to);
        self.written = Some(to);
        if self.standing == (Standing::Behind { fork: None }) && self.rows_up_to <= head {
            self.standing = Standing::Behind { fork: Some(head) };
        }
    }

    /// No rows are left up to `up_to`. Returns whether it is live again: not if more became owed while that was looked up,
    /// be it written by now.
    pub fn caught_up(&mut self, up_to: StreamOrdering) -> bool {
        if self.rows_up_to <= up_to {
            self.standing = Standing::Live;
        }
        self.is_live()
    }

    /// What a checkpoint must write: rows, and `last_successful` if it changed.
    #[must_use]
    pub fn unwritten(&self) -> (&HashMap<RoomId, StreamOrdering>, Option<StreamOrdering>) {
        (
            &self.owed,
            self.last_successful.filter(|last| self.written != Some(*last)),
        )
    }

    /// Whether a checkpoint must write rows.
    #[must_use]
    pub fn has_unwritten_rows(&self) -> bool {
        !self.owed.is_empty()
    }

    /// A checkpoint wrote `last_successful`.
    pub fn wrote_last_successful(&mut self, ordering: StreamOrdering) {
        self.written = Some(ordering);
    }

    /// A checkpoint wrote a row.
    pub fn wrote_owed(&mut self, room: &RoomId, ordering: StreamOrdering) {
        if self.owed.get(room) == Some(&ordering) {
            self.owed.remove(room);
        }
    }
}

#[cfg(test)]
mod tests;
