//! How fast a destination gets the PDUs of one room. Without I/O.
//!
//! A 200 says that a receiver has queued what it was sent, not that it has worked on it. Synapse 1.163.2 throws a room's
//! events out of that queue when a hundred wait, and keeps only the newest; it then fetches ten of them, and in place of
//! the rest the room's whole state from us. So of a room only so many are sent ahead of what the receiver may be assumed
//! to have worked on; then it is asked (`GET /event`) whether it has the last of them.
//!
//! In a room that has a few events now and then it never comes to that.

use std::{collections::HashMap, time::Duration};

use tokio::time::Instant;

use crate::core::id::{EventId, RoomId};

/// PDUs of a room that a destination is sent ahead of what it has worked on: half of what Synapse bears, because other
/// servers send to it as well.
pub const WINDOW: u32 = 50;

/// What a receiver may be assumed to need for one PDU. (A Synapse that shared two busy cores was seen to need this.)
const PER_PDU: Duration = Duration::from_millis(200);

/// A receiver that does not have what it accepted is asked again for this long; then the next PDUs follow.
const PATIENCE: Duration = Duration::from_secs(10);

/// The first pause between two such questions.
const FIRST_PAUSE: Duration = Duration::from_millis(50);

/// The longest.
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// Rooms in memory before those that are idle are looked for.
const ROOMS: usize = 16;

/// What one destination may still have to work on, by room.
#[derive(Debug)]
pub struct Pace {
    window: u32,
    /// An earlier process of ours may have sent it half a window just before.
    met: Instant,
    rooms: HashMap<RoomId, Room>,
    /// Rooms about which it is being asked.
    asking: HashMap<RoomId, Asking>,
    /// More rooms than this: forget the idle ones.
    tidy_above: usize,
    answered: Option<Instant>,
}

#[derive(Debug)]
struct Room {
    /// When the destination has worked on all it accepted, by what may be assumed.
    idle_from: Instant,
    /// The last PDU that it accepted.
    last: EventId,
}

#[derive(Debug)]
struct Asking {
    next: Instant,
    pause: Duration,
    until: Instant,
}

impl Pace {
    /// That of a destination just met. `window` is [`WINDOW`].
    #[must_use]
    pub fn new(window: u32, now: Instant) -> Self {
        Self {
            window,
            met: now,
            rooms: HashMap::new(),
            asking: HashMap::new(),
            tidy_above: ROOMS,
            answered: None,
        }
    }

    /// When a destination has worked on what an earlier process may have sent it.
    fn idle_at_first(&self) -> Instant {
        self.met + PER_PDU * (self.window / 2)
    }

    /// How many PDUs of `room` may be sent now.
    #[must_use]
    pub fn left(&self, room: &RoomId, now: Instant) -> u32 {
        if self.asking.contains_key(room) {
            return 0;
        }
        let known = self.rooms.get(room);
        let idle_from = known.map_or_else(|| self.idle_at_first(), |known| known.idle_from);
        let ahead = idle_from
            .saturating_duration_since(now)
            .as_millis()
            .div_ceil(PER_PDU.as_millis());
        self.window.saturating_sub(u32::try_from(ahead).unwrap_or(u32::MAX))
    }

    /// PDUs of `room` wait although none may be sent: the destination must be asked. Returns when to look again.
    pub fn ask(&mut self, room: &RoomId, now: Instant) -> Instant {
        let asking = self.asking.entry(room.clone()).or_insert(Asking {
            next: now,
            pause: FIRST_PAUSE,
            until: now + PATIENCE,
        });
        asking.next
    }

    /// The destination accepted a PDU of `room`.
    pub fn accepted(&mut self, room: &RoomId, event: &EventId, now: Instant) {
        if let Some(known) = self.rooms.get_mut(room) {
            known.idle_from = known.idle_from.max(now) + PER_PDU;
            known.last = event.clone();
            return;
        }
        self.tidy(now);
        let new = Room {
            idle_from: now.max(self.idle_at_first()) + PER_PDU,
            last: event.clone(),
        };
        self.rooms.insert(room.clone(), new);
    }

    fn tidy(&mut self, now: Instant) {
        if self.rooms.len() >= self.tidy_above {
            self.rooms
                .retain(|room, known| known.idle_from > now || self.asking.contains_key(room));
            self.tidy_above = ROOMS.max(self.rooms.len() * 2);
        }
    }

    /// An event that the destination should be asked for now, with its room.
    #[must_use]
    pub fn due(&self, now: Instant) -> Option<(RoomId, EventId)> {
        let (room, _) = self.asking.iter().find(|(_, asking)| asking.next <= now)?;
        Some((room.clone(), self.rooms.get(room)?.last.clone()))
    }

    /// It was asked; `has` is false if it said that it does not have the event.
    pub fn asked(&mut self, room: &RoomId, has: bool, now: Instant) {
        self.answered = Some(now);
        let Some(asking) = self.asking.get_mut(room) else {
            return;
        };
        if has || now >= asking.until {
            self.asking.remove(room);
            if let Some(known) = self.rooms.get_mut(room) {
                known.idle_from = now;
            }
            return;
        }
        asking.next = (now + asking.pause).min(asking.until);
        asking.pause = (asking.pause * 2).min(LONGEST_PAUSE);
    }

    /// When it was last asked: a sign of life while nothing is accepted.
    #[must_use]
    pub fn answered(&self) -> Option<Instant> {
        self.answered
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Scene {
        pace: Pace,
        now: Instant,
        next_look: Instant,
        sent: u32,
    }

    impl Scene {
        /// A destination that was met long ago.
        fn old() -> Self {
            let mut scene = Self::new();
            scene.now += Duration::from_mins(1);
            scene
        }

        fn new() -> Self {
            let now = Instant::now();
            Self {
                pace: Pace::new(WINDOW, now),
                now,
                next_look: now,
                sent: 0,
            }
        }

        /// How many of `count` PDUs of a room go now.
        fn burst(&mut self, room: &str, count: u32) -> u32 {
            let room = RoomId::from(room);
            let left = self.pace.left(&room, self.now);
            for _ in 0..left.min(count) {
                self.sent += 1;
                let event = EventId::from(format!("${}", self.sent).as_str());
                self.pace.accepted(&room, &event, self.now);
            }
            if left < count {
                self.next_look = self.pace.ask(&room, self.now);
            }
            left.min(count)
        }

        fn due(&self) -> Option<String> {
            self.pace.due(self.now).map(|(_, event)| event.to_string())
        }

        fn asked(&mut self, room: &str, has: bool) {
            self.pace.asked(&room.into(), has, self.now);
        }
    }

    #[test]
    fn a_window_then_a_question_then_the_next() {
        let mut scene = Scene::old();
        assert_eq!(scene.burst("!a", 30), 30);
        assert_eq!(scene.due(), None, "nothing waits, so nobody is asked");
        assert_eq!(scene.burst("!a", 200), 20);
        assert_eq!(scene.due().as_deref(), Some("$50"));
        assert_eq!(scene.burst("!b", 10), 10, "another room does not wait");
        scene.asked("!a", true);
        assert_eq!(scene.due(), None);
        assert_eq!(scene.burst("!a", 200), 50);
        assert_eq!(scene.due().as_deref(), Some("$110"));
    }

    #[test]
    fn a_room_with_few_events_a_second_is_never_asked_about() {
        let mut scene = Scene::old();
        for _ in 0..1_000 {
            assert_eq!(scene.burst("!a", 4), 4);
            scene.now += Duration::from_secs(1);
        }
        for _ in 0..10 {
            assert_eq!(scene.burst("!a", 49), 49);
            scene.now += Duration::from_secs(10);
        }
        assert_eq!(scene.due(), None);
    }

    #[test]
    fn of_one_just_met_half_a_window_is_taken_for_queued() {
        let mut scene = Scene::new();
        assert_eq!(scene.burst("!a", 200), 25);
        assert_eq!(scene.due().as_deref(), Some("$25"));
        scene.asked("!a", true);
        assert_eq!(scene.burst("!a", 200), 50);
    }

    #[test]
    fn it_is_asked_again_for_ten_seconds_and_then_sent_more() {
        let mut scene = Scene::old();
        scene.burst("!a", 51);
        let began = scene.now;
        let mut questions = 0;
        while scene.due().is_some() {
            questions += 1;
            scene.asked("!a", false);
            if scene.burst("!a", 1) == 0 {
                scene.now = scene.next_look;
            }
        }
        assert_eq!(scene.now - began, PATIENCE);
        assert!((20..30).contains(&questions), "{questions}");
        assert_eq!(scene.pace.answered(), Some(scene.now));
    }

    #[test]
    fn idle_rooms_are_forgotten() {
        let mut scene = Scene::old();
        scene.burst("!busy", 51);
        for room in 0..10_000 {
            scene.burst(&format!("!{room}"), 1);
            scene.now += Duration::from_millis(100);
        }
        assert!(scene.pace.rooms.len() <= 2 * ROOMS, "{}", scene.pace.rooms.len());
        assert!(scene.pace.rooms.contains_key(&RoomId::from("!busy")));
    }
}
