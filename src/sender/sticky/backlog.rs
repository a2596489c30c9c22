//! One destination's sticky backlog: which room's turn it is, and when. A state machine without I/O.
//!
//! The database's rows are the backlog; this is what the process remembers of them between two looks. Rooms take turns,
//! a page each, so that a room with thousands of sticky events does not keep the others waiting.
//!
//! A 200 says that a receiver has put a page into its queue, not that it has worked on it. Synapse 1.163.2 throws events of
//! a room out of that queue when more than a hundred wait, and sets aside those that come while its join is not quite
//! finished; either way it then fetches what it lacks, and under `joined` visibility it gets redacted copies and takes the
//! real events for known. So every page waits until the receiver has what came before it: its own join, then one event
//! alone, then the last event of each page.

use std::{collections::VecDeque, time::Duration};

use tokio::time::Instant;

use crate::{
    core::{
        id::{EventId, RoomId, StickyPosition},
        store::BacklogRow,
    },
    sender::transaction::PDU_LIMIT,
};

/// A joiner that does not know its own join yet is asked again for this long; then the push goes out anyway.
const JOIN_LIMIT: Duration = Duration::from_mins(1);

/// A receiver that does not know an event that it accepted is asked again for this long; then the next page follows.
const PAGE_LIMIT: Duration = Duration::from_secs(10);

/// The longest pause between two such questions: how long the answer's turning can go unnoticed.
const PROBE_PAUSE: Duration = Duration::from_millis(500);

/// Events in a page.
const PAGE: usize = PDU_LIMIT;

/// A PDU that the answer leaves out is sent again this often; then it is given up and counted.
pub const UNLISTED_LIMIT: u32 = 5;

/// What a destination's backlog calls for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BacklogStep {
    /// Look at the database's rows.
    Load,
    /// Ask the destination whether it has an event.
    Probe {
        /// The room.
        room: RoomId,
        /// Its own join, or what was sent to it last.
        event: EventId,
    },
    /// Send a page of a room's sticky events.
    Push {
        /// The room.
        room: RoomId,
        /// From here on.
        position: StickyPosition,
        /// So many at most.
        limit: usize,
        /// How often the first of them was already left out of an answer.
        unlisted: u32,
    },
    /// Nothing before this.
    Wait(Instant),
    /// Nothing at all.
    Nothing,
}

#[derive(Debug)]
struct RoomBacklog {
    room: RoomId,
    state: RoomState,
    /// The join that was last waited for.
    join: Option<EventId>,
    /// What the next page may hold: one event, until the joiner is seen to have one; less after a refusal.
    limit: usize,
    /// When this process first heard of it.
    since: Instant,
    /// When it last got further: part of it was accepted, or the joiner said that it is still joining.
    moved: Instant,
}

#[derive(Debug)]
enum RoomState {
    /// Heard of, its row not read yet.
    Unread,
    /// The destination must have this event first.
    Awaiting {
        event: EventId,
        position: StickyPosition,
        asked: u32,
        next: Instant,
        until: Instant,
    },
    /// To be sent.
    Ready {
        position: StickyPosition,
        unlisted: u32,
        not_before: Instant,
    },
}

impl RoomState {
    fn awaiting(event: EventId, position: StickyPosition, patience: Duration, now: Instant) -> Self {
        Self::Awaiting {
            event,
            position,
            asked: 0,
            next: now,
            until: now + patience,
        }
    }

    fn ready(position: StickyPosition, unlisted: u32, not_before: Instant) -> Self {
        Self::Ready {
            position,
            unlisted,
            not_before,
        }
    }
}

/// One destination's backlog.
#[derive(Debug)]
pub struct Backlog {
    /// There may be rows that were not looked at.
    unread: bool,
    /// Such may have come since the look that is under way began.
    news: bool,
    /// Each room once; the front's turn is next.
    rooms: VecDeque<RoomBacklog>,
}

impl Default for Backlog {
    /// A destination that was never looked at: it may have rows.
    fn default() -> Self {
        Self {
            unread: true,
            news: false,
            rooms: VecDeque::new(),
        }
    }
}

impl Backlog {
    /// A backlog that is known to have no rows.
    #[must_use]
    pub fn empty() -> Self {
        Self {
            unread: false,
            news: false,
            rooms: VecDeque::new(),
        }
    }

    /// Rows may have been added: look again.
    pub fn look_again(&mut self) {
        self.unread = true;
        self.news = true;
    }

    /// A row for `room` was just recorded. The room's live PDUs wait from now on, before the row is even read.
    pub fn recorded(&mut self, room: &RoomId, now: Instant) {
        self.look_again();
        if self.moved(room).is_none() {
            self.rooms.push_back(RoomBacklog {
                room: room.clone(),
                state: RoomState::Unread,
                join: None,
                limit: PAGE,
                since: now,
                moved: now,
            });
        }
    }

    /// If `room` has sticky events to be sent first: when its backlog last got further.
    #[must_use]
    pub fn moved(&self, room: &RoomId) -> Option<Instant> {
        self.rooms
            .iter()
            .find(|known| known.room == *room)
            .map(|known| known.moved)
    }

    /// Whether there may be rows that were not looked at.
    #[must_use]
    pub fn is_unread(&self) -> bool {
        self.unread
    }

    /// The rooms, with their positions if those have been read.
    pub fn rooms(&self) -> impl Iterator<Item = (&RoomId, Option<StickyPosition>)> {
        self.rooms.iter().map(|known| {
            let position = match &known.state {
                RoomState::Unread => None,
                RoomState::Awaiting { position, .. } | RoomState::Ready { position, .. } => Some(*position),
            };
            (&known.room, position)
        })
    }

    /// Whether any room has.
    #[must_use]
    pub fn holds_any(&self) -> bool {
        !self.rooms.is_empty()
    }

    /// What to do now.
    pub fn next(&mut self, now: Instant) -> BacklogStep {
        if self.unread {
            self.news = false;
            return BacklogStep::Load;
        }
        let mut earliest: Option<Instant> = None;
        for turn in 0..self.rooms.len() {
            let room = self.rooms[turn].room.clone();
            let (ready_at, step) = match &self.rooms[turn].state {
                RoomState::Unread => continue,
                RoomState::Awaiting { event, next, .. } => {
                    let event = event.clone();
                    (*next, BacklogStep::Probe { room, event })
                }
                RoomState::Ready {
                    position,
                    unlisted,
                    not_before,
                } => {
                    let step = BacklogStep::Push {
                        room,
                        position: *position,
                        limit: self.rooms[turn].limit,
                        unlisted: *unlisted,
                    };
                    (*not_before, step)
                }
            };
            if ready_at <= now {
                self.rooms.rotate_left(turn + 1);
                return step;
            }
            earliest = Some(earliest.map_or(ready_at, |earliest| earliest.min(ready_at)));
        }
        earliest.map_or(BacklogStep::Nothing, BacklogStep::Wait)
    }

    /// The database's rows, as just read. What is known of a room stays, unless its row went back, or its joiner joined
    /// anew.
    pub fn loaded(&mut self, rows: Vec<BacklogRow>, now: Instant) {
        self.unread = self.news;
        let mut known = std::mem::take(&mut self.rooms);
        for row in rows {
            let place = known.iter().position(|known| known.room == row.room_id);
            let mut entry = place
                .and_then(|place| known.remove(place))
                .unwrap_or_else(|| RoomBacklog {
                    room: row.room_id.clone(),
                    state: RoomState::Unread,
                    join: None,
                    limit: PAGE,
                    since: now,
                    moved: now,
                });
            if let Some(join) = row.recent_join.filter(|join| entry.join.as_ref() != Some(join)) {
                entry.state = RoomState::awaiting(join.clone(), row.position, JOIN_LIMIT, now);
                entry.limit = 1;
                entry.join = Some(join);
            }
            match &mut entry.state {
                RoomState::Unread => entry.state = RoomState::ready(row.position, 0, now),
                RoomState::Awaiting { position, .. } => *position = row.position,
                RoomState::Ready { position, unlisted, .. } => {
                    if *position != row.position {
                        *unlisted = 0;
                    }
                    *position = row.position;
                }
            }
            self.rooms.push_back(entry);
        }
        if self.news {
            // Their rows may have been recorded after the look.
            known.retain(|known| matches!(known.state, RoomState::Unread));
            self.rooms.append(&mut known);
        }
    }

    /// The answer to a probe: whether the destination has the event.
    pub fn probed(&mut self, room: &RoomId, has: bool, now: Instant) {
        let Some(entry) = self.entry(room) else { return };
        entry.moved = now;
        let RoomState::Awaiting {
            position,
            asked,
            next,
            until,
            ..
        } = &mut entry.state
        else {
            return;
        };
        if has || now >= *until {
            entry.state = RoomState::ready(*position, 0, now);
            return;
        }
        let pause = doubled(*asked).min(PROBE_PAUSE);
        *next = (now + pause).min(*until);
        *asked += 1;
    }

    /// A room's position moved, and there may be more. `sent` is the last event that was accepted, if any was.
    pub fn advanced(&mut self, room: &RoomId, to: StickyPosition, sent: Option<EventId>, now: Instant) {
        let Some(entry) = self.entry(room) else { return };
        entry.moved = now;
        entry.state = match sent {
            Some(event) => {
                entry.limit = PAGE;
                RoomState::awaiting(event, to, PAGE_LIMIT, now)
            }
            None => RoomState::ready(to, 0, now),
        };
    }

    /// The answer left out the PDU at `position`, which is now the first: again, a little later.
    pub fn left_out(&mut self, room: &RoomId, position: StickyPosition, times: u32, now: Instant) {
        let Some(entry) = self.entry(room) else { return };
        entry.state = RoomState::ready(position, times, now + doubled(times));
    }

    /// A page was refused, perhaps for its size or one of its PDUs: a smaller one.
    pub fn fewer(&mut self, room: &RoomId, position: StickyPosition, unlisted: u32, limit: usize, now: Instant) {
        let Some(entry) = self.entry(room) else { return };
        entry.limit = limit.max(1);
        entry.state = RoomState::ready(position, unlisted, now);
    }

    fn entry(&mut self, room: &RoomId) -> Option<&mut RoomBacklog> {
        self.rooms.iter_mut().find(|known| known.room == *room)
    }

    /// Nothing is left of this room. Returns since when it was known.
    pub fn finished(&mut self, room: &RoomId) -> Option<Instant> {
        let place = self.rooms.iter().position(|known| known.room == *room)?;
        self.rooms.remove(place).map(|entry| entry.since)
    }
}

/// 0.25, 0.5, 1, 2, 4 s ...
fn doubled(times: u32) -> Duration {
    Duration::from_millis(250 << times.min(8))
}

#[cfg(test)]
mod tests;
