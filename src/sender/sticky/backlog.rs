//! One destination's sticky backlog: which room's turn it is, and when. A state machine without I/O.
//!
//! The database's rows are the backlog; this is what the process remembers of them between two looks. Rooms take turns,
//! a page each, so that a room with thousands of sticky events does not keep the others waiting.

use std::{collections::VecDeque, time::Duration};

use tokio::time::Instant;

use crate::core::{
    id::{EventId, RoomId, StickyPosition},
    store::BacklogRow,
};

/// A joiner that does not know its own join yet is asked again for this long; then the push goes out anyway.
const SETTLE_LIMIT: Duration = Duration::from_mins(1);

/// The longest pause between two such questions: what the joiner's readiness can go unnoticed.
const PROBE_PAUSE: Duration = Duration::from_millis(500);

/// A PDU that the answer leaves out is sent again this often; then it is given up and counted.
pub const UNLISTED_LIMIT: u32 = 5;

/// What a destination's backlog calls for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BacklogStep {
    /// Look at the database's rows.
    Load,
    /// Ask the joiner whether it knows its own join.
    Probe {
        /// The room it joined.
        room: RoomId,
        /// Its join event.
        join: EventId,
    },
    /// Send a page of a room's sticky events.
    Push {
        /// The room.
        room: RoomId,
        /// From here on.
        position: StickyPosition,
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
    /// When this process first heard of it.
    since: Instant,
    /// When it last got further: part of it was accepted, or the joiner said that it is still joining.
    moved: Instant,
}

#[derive(Debug)]
enum RoomState {
    /// Heard of, its row not read yet.
    Unread,
    /// The joiner may still be joining.
    Settling {
        join: EventId,
        position: StickyPosition,
        asked: u32,
        began: Instant,
        next: Instant,
    },
    /// To be sent.
    Ready {
        position: StickyPosition,
        unlisted: u32,
        not_before: Instant,
    },
}

/// One destination's backlog.
#[derive(Debug)]
pub struct Backlog {
    /// There may be rows that were not looked at.
    unread: bool,
    /// Each room once; the front's turn is next.
    rooms: VecDeque<RoomBacklog>,
}

impl Default for Backlog {
    /// A destination that was never looked at: it may have rows.
    fn default() -> Self {
        Self {
            unread: true,
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
            rooms: VecDeque::new(),
        }
    }

    /// Rows may have been added: look again.
    pub fn look_again(&mut self) {
        self.unread = true;
    }

    /// A row for `room` was just recorded. The room's live PDUs wait from now on, before the row is even read.
    pub fn recorded(&mut self, room: &RoomId, now: Instant) {
        self.unread = true;
        if self.moved(room).is_none() {
            self.rooms.push_back(RoomBacklog {
                room: room.clone(),
                state: RoomState::Unread,
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

    /// Whether any room does.
    #[must_use]
    pub fn holds_any(&self) -> bool {
        !self.rooms.is_empty()
    }

    /// What to do now.
    pub fn next(&mut self, now: Instant) -> BacklogStep {
        if self.unread {
            return BacklogStep::Load;
        }
        let mut earliest: Option<Instant> = None;
        for turn in 0..self.rooms.len() {
            let (ready_at, step) = match &self.rooms[turn].state {
                RoomState::Unread => continue,
                RoomState::Settling { join, next, .. } => (
                    *next,
                    BacklogStep::Probe {
                        room: self.rooms[turn].room.clone(),
                        join: join.clone(),
                    },
                ),
                RoomState::Ready {
                    position,
                    unlisted,
                    not_before,
                } => {
                    let room = self.rooms[turn].room.clone();
                    (
                        *not_before,
                        BacklogStep::Push {
                            room,
                            position: *position,
                            unlisted: *unlisted,
                        },
                    )
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

    /// The database's rows, as just read. What is known of a room stays, unless its row went back.
    pub fn loaded(&mut self, rows: Vec<BacklogRow>, now: Instant) {
        self.unread = false;
        let mut known = std::mem::take(&mut self.rooms);
        for row in rows {
            let place = known.iter().position(|known| known.room == row.room_id);
            let mut entry = place
                .and_then(|place| known.remove(place))
                .unwrap_or_else(|| RoomBacklog {
                    room: row.room_id.clone(),
                    state: RoomState::Unread,
                    since: now,
                    moved: now,
                });
            match &mut entry.state {
                RoomState::Unread => {
                    entry.state = match row.recent_join {
                        Some(join) => RoomState::Settling {
                            join,
                            position: row.position,
                            asked: 0,
                            began: now,
                            next: now,
                        },
                        None => RoomState::Ready {
                            position: row.position,
                            unlisted: 0,
                            not_before: now,
                        },
                    }
                }
                RoomState::Settling { position, .. } => *position = row.position,
                RoomState::Ready { position, unlisted, .. } => {
                    if *position != row.position {
                        *unlisted = 0;
                    }
                    *position = row.position;
                }
            }
            self.rooms.push_back(entry);
        }
    }

    /// The joiner's answer to a probe: whether it knows its join.
    pub fn probed(&mut self, room: &RoomId, knows: bool, now: Instant) {
        let Some(entry) = self.rooms.iter_mut().find(|known| known.room == *room) else {
            return;
        };
        entry.moved = now;
        let RoomState::Settling {
            position,
            asked,
            began,
            next,
            ..
        } = &mut entry.state
        else {
            return;
        };
        if knows || now.duration_since(*began) >= SETTLE_LIMIT {
            entry.state = RoomState::Ready {
                position: *position,
                unlisted: 0,
                not_before: now,
            };
            return;
        }
        let pause = doubled(*asked).min(PROBE_PAUSE);
        *next = (now + pause).min(*began + SETTLE_LIMIT);
        *asked += 1;
    }

    /// A room's position moved; there may be more.
    pub fn advanced(&mut self, room: &RoomId, to: StickyPosition, now: Instant) {
        if let Some(entry) = self.rooms.iter_mut().find(|known| known.room == *room) {
            entry.moved = now;
        }
        self.set_ready(room, to, 0, now);
    }

    /// The answer left out the PDU at `position`, which is now the first: again, a little later.
    pub fn left_out(&mut self, room: &RoomId, position: StickyPosition, times: u32, now: Instant) {
        self.set_ready(room, position, times, now + doubled(times));
    }

    fn set_ready(&mut self, room: &RoomId, position: StickyPosition, unlisted: u32, not_before: Instant) {
        if let Some(entry) = self.rooms.iter_mut().find(|known| known.room == *room) {
            entry.state = RoomState::Ready {
                position,
                unlisted,
                not_before,
            };
        }
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
mod tests {
    use super::*;

    fn row(room: &str, position: i64, recent_join: Option<&str>) -> BacklogRow {
        BacklogRow {
            room_id: room.into(),
            position: StickyPosition(position),
            recent_join: recent_join.map(Into::into),
        }
    }

    fn push(room: &str, position: i64, unlisted: u32) -> BacklogStep {
        BacklogStep::Push {
            room: room.into(),
            position: StickyPosition(position),
            unlisted,
        }
    }

    #[test]
    fn rooms_take_turns() {
        let now = Instant::now();
        let mut backlog = Backlog::default();
        assert_eq!(backlog.next(now), BacklogStep::Load);
        backlog.loaded(vec![row("!a", 5, None), row("!b", 7, None)], now);
        assert_eq!(backlog.next(now), push("!a", 5, 0));
        backlog.advanced(&"!a".into(), StickyPosition(55), now);
        assert_eq!(backlog.next(now), push("!b", 7, 0));
        backlog.finished(&"!b".into());
        assert_eq!(backlog.next(now), push("!a", 55, 0));
        backlog.finished(&"!a".into());
        assert_eq!(backlog.next(now), BacklogStep::Nothing);
    }

    #[test]
    fn a_joiner_is_asked_for_a_minute_and_then_pushed_to() {
        let start = Instant::now();
        let mut backlog = Backlog::default();
        backlog.loaded(vec![row("!a", 5, Some("$join"))], start);
        let mut now = start;
        let mut asked_at = vec![];
        loop {
            match backlog.next(now) {
                BacklogStep::Probe { room, join } => {
                    assert_eq!(join.as_str(), "$join");
                    asked_at.push(now.duration_since(start).as_millis());
                    backlog.probed(&room, false, now);
                }
                BacklogStep::Wait(until) => now = until,
                step => {
                    assert_eq!(step, push("!a", 5, 0));
                    break;
                }
            }
        }
        assert_eq!(asked_at[..4], [0, 250, 750, 1_250]);
        assert_eq!(asked_at.len(), 122);
        assert_eq!(asked_at.last(), Some(&60_000));
    }

    #[test]
    fn a_joiner_that_knows_its_join_is_pushed_to_at_once() {
        let now = Instant::now();
        let mut backlog = Backlog::default();
        backlog.recorded(&"!a".into(), now);
        assert_eq!(backlog.moved(&"!a".into()), Some(now));
        assert_eq!(backlog.next(now), BacklogStep::Load);
        backlog.loaded(vec![row("!a", 5, Some("$join"))], now);
        assert!(matches!(backlog.next(now), BacklogStep::Probe { .. }));
        backlog.probed(&"!a".into(), true, now);
        assert_eq!(backlog.next(now), push("!a", 5, 0));
    }

    #[test]
    fn what_an_answer_leaves_out_is_sent_again_later_and_others_go_on_meanwhile() {
        let now = Instant::now();
        let mut backlog = Backlog::default();
        backlog.loaded(vec![row("!a", 5, None), row("!b", 7, None)], now);
        assert_eq!(backlog.next(now), push("!a", 5, 0));
        backlog.left_out(&"!a".into(), StickyPosition(6), 1, now);
        assert_eq!(backlog.next(now), push("!b", 7, 0));
        backlog.finished(&"!b".into());
        let BacklogStep::Wait(until) = backlog.next(now) else {
            panic!()
        };
        assert_eq!(until.duration_since(now), Duration::from_millis(500));
        assert_eq!(backlog.next(until), push("!a", 6, 1));
    }

    #[test]
    fn a_row_that_went_back_is_sent_from_there_and_a_row_that_went_is_forgotten() {
        let now = Instant::now();
        let mut backlog = Backlog::default();
        backlog.loaded(vec![row("!a", 50, None), row("!b", 7, None)], now);
        backlog.look_again();
        assert_eq!(backlog.next(now), BacklogStep::Load);
        backlog.loaded(vec![row("!a", 5, None)], now);
        assert_eq!(backlog.next(now), push("!a", 5, 0));
        assert_eq!(backlog.moved(&"!b".into()), None);
    }
}
