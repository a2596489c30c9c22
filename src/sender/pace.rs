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

/// A receiver that does not have what it accepted is asked again for this long; then a few more PDUs follow.
const PATIENCE: Duration = Duration::from_secs(10);

/// So often in a row; then it is taken for one that will never have it, and left in peace for [`RESPITE`].
const PATIENCES: u32 = 6;

/// How long a room goes unpaced then.
const RESPITE: Duration = Duration::from_mins(10);

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
    /// An earlier process of ours may have sent it something just before: half a window is taken for queued.
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
    /// How often in a row it did not have that within [`PATIENCE`].
    waited: u32,
    /// It is sent all as it comes until then.
    unpaced_until: Option<Instant>,
}

/// What a destination says when it is asked for an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Seen {
    /// It has it, or knows no such question.
    Yes,
    /// Anything else.
    NotYet,
    /// Nothing.
    NoAnswer,
}

#[derive(Debug)]
struct Asking {
    next: Instant,
    pause: Duration,
    until: Instant,
}

impl Room {
    fn is_remembered(&self, now: Instant) -> bool {
        self.idle_from > now || self.unpaced_until.is_some_and(|until| until > now)
    }
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
        if known
            .and_then(|known| known.unpaced_until)
            .is_some_and(|until| now < until)
        {
            return u32::MAX;
        }
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
            waited: 0,
            unpaced_until: None,
        };
        self.rooms.insert(room.clone(), new);
    }

    fn tidy(&mut self, now: Instant) {
        if self.rooms.len() >= self.tidy_above {
            self.rooms
                .retain(|room, known| known.is_remembered(now) || self.asking.contains_key(room));
            self.tidy_above = ROOMS.max(self.rooms.len() * 2);
        }
    }

    /// An event that the destination should be asked for now, with its room.
    #[must_use]
    pub fn due(&self, now: Instant) -> Option<(RoomId, EventId)> {
        let due = self.asking.iter().filter(|(_, asking)| asking.next <= now);
        let (room, _) = due.min_by_key(|(_, asking)| asking.next)?;
        Some((room.clone(), self.rooms.get(room)?.last.clone()))
    }

    /// It was asked.
    pub fn asked(&mut self, room: &RoomId, seen: Seen, now: Instant) {
        if seen != Seen::NoAnswer {
            self.answered = Some(now);
        }
        let (Some(asking), Some(known)) = (self.asking.get_mut(room), self.rooms.get_mut(room)) else {
            return;
        };
        if seen == Seen::Yes {
            self.asking.remove(room);
            known.idle_from = now;
            known.waited = 0;
            return;
        }
        if now >= asking.until {
            self.asking.remove(room);
            known.waited += 1;
            if known.waited < PATIENCES {
                // So few that one which works on one a second gets to the end of what it has.
                known.idle_from = now + PER_PDU * (self.window - self.window / 5);
            } else {
                known.waited = 0;
                known.unpaced_until = Some(now + RESPITE);
            }
            return;
        }
        asking.next = (now + asking.pause).min(asking.until);
        asking.pause = (asking.pause * 2).min(LONGEST_PAUSE);
    }

    /// Nothing waits any more.
    pub fn stop_asking(&mut self) {
        self.asking.clear();
    }

    /// When it last answered: a sign of life while nothing is accepted.
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

        fn asked(&mut self, room: &str, seen: Seen) {
            self.pace.asked(&room.into(), seen, self.now);
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
        scene.asked("!a", Seen::Yes);
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
        scene.asked("!a", Seen::Yes);
        assert_eq!(scene.burst("!a", 200), 50);
    }

    /// Asks until more may be sent. Returns how long that took, and the questions.
    fn wait(scene: &mut Scene, seen: Seen) -> (Duration, usize) {
        let began = scene.now;
        let mut questions = 0;
        while scene.due().is_some() {
            questions += 1;
            scene.asked("!a", seen);
            scene.now = scene
                .pace
                .asking
                .values()
                .next()
                .map_or(scene.now, |asking| asking.next);
        }
        (scene.now - began, questions)
    }

    #[test]
    fn one_that_does_not_have_it_yet_gets_a_few_more_after_ten_seconds() {
        let mut scene = Scene::old();
        scene.burst("!a", 51);
        let (waited, questions) = wait(&mut scene, Seen::NotYet);
        assert_eq!(waited, PATIENCE);
        assert!((20..30).contains(&questions), "{questions}");
        assert_eq!(scene.pace.answered(), Some(scene.now));
        assert_eq!(scene.burst("!a", 200), 10);
        assert_eq!(scene.due().as_deref(), Some("$60"));
    }

    #[test]
    fn one_that_never_has_it_is_left_in_peace_for_a_while() {
        let mut scene = Scene::old();
        assert_eq!(scene.burst("!a", 500), 50);
        for _ in 1..PATIENCES {
            wait(&mut scene, Seen::NoAnswer);
            assert_eq!(scene.burst("!a", 500), 10);
        }
        wait(&mut scene, Seen::NoAnswer);
        assert_eq!(scene.pace.answered(), None);
        assert_eq!(scene.burst("!a", 500), 500);
        scene.now += RESPITE;
        assert_eq!(scene.burst("!a", 500), 50);
    }

    #[test]
    fn no_question_is_forgotten_for_others() {
        let mut scene = Scene::old();
        for room in ["!a", "!b", "!c"] {
            scene.burst(room, 51);
            scene.now += Duration::from_millis(1);
        }
        let mut asked = vec![];
        for _ in 0..6 {
            let (room, _) = scene.pace.due(scene.now).expect("one is due");
            asked.push(room.to_string());
            scene.pace.asked(&room, Seen::NotYet, scene.now);
            scene.now += Duration::from_secs(1);
        }
        assert_eq!(asked, ["!a", "!b", "!c", "!a", "!b", "!c"]);
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
