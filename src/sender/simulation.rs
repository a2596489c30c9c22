//! Histories drawn from a seed: events, destinations that fail or refuse, lost answers, back-offs set by other processes,
//! clocks that jump, crashes, checkpoints that come between. After every step the delivery contract is checked: an event is accepted, or on record as owed.
//!
//! A seed that fails goes into `REGRESSIONS`.

mod database;

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
    time::Duration,
};

use rand::{RngExt, SeedableRng, rngs::SmallRng, seq::IndexedRandom};
use tokio::time::Instant;

use self::database::Database;
use super::{
    catch_up::Page,
    destination::{Limits, Step},
    ledger::{Entry, Ledger},
    pace::Seen,
    transaction::OwedPdu,
};
use crate::core::{
    clock::{Millis, Now},
    event::Pdu,
    id::{RoomId, ServerName, StreamOrdering},
    store::{Checkpoint, EventCursor, OwedRoom, RetryTimings},
};

const REGRESSIONS: &[u64] = &[];
const HISTORIES: u64 = 60;
const STEPS: usize = 300;
const LIMITS: Limits = Limits {
    pending: 8,
    age: Duration::from_secs(10),
    bytes: 1_000,
    window: 3,
};

struct Event {
    ordering: StreamOrdering,
    room: RoomId,
    destinations: Vec<ServerName>,
}

struct World {
    rng: SmallRng,
    now: Now,
    events: Vec<Event>,
    /// Those that some destination has not accepted.
    open: Vec<usize>,
    database: Database,
    /// What each destination holds, and how often it got it.
    accepted: HashMap<(ServerName, StreamOrdering), usize>,
    /// Rooms for which catch-up delivered something newer in place of what is below.
    passed: HashMap<(ServerName, RoomId), StreamOrdering>,
    down: BTreeSet<ServerName>,
    /// Never failed, and its answers never got lost.
    faultless: BTreeSet<ServerName>,
    crashed: bool,
    ledger: Ledger,
    undecided: Vec<usize>,
    in_flight: HashMap<ServerName, Vec<Arc<OwedPdu>>>,
    pages: HashMap<ServerName, Page>,
    unwritten: Option<Checkpoint>,
    settling: bool,
    /// Questions whether a destination has what it accepted.
    asked: usize,
}

impl World {
    fn new(seed: u64) -> Self {
        let names: Vec<ServerName> = (0..4).map(|number| format!("s{number}").into()).collect();
        let cursor = EventCursor {
            position: StreamOrdering(0),
            ours: true,
            deltas: None,
        };
        Self {
            rng: SmallRng::seed_from_u64(seed),
            now: Now {
                wall: Millis(1_000_000),
                at: Instant::now(),
            },
            events: vec![],
            open: vec![],
            database: Database::default(),
            accepted: HashMap::new(),
            passed: HashMap::new(),
            down: BTreeSet::new(),
            faultless: names.into_iter().collect(),
            crashed: false,
            ledger: Ledger::new(cursor, LIMITS),
            undecided: vec![],
            in_flight: HashMap::new(),
            pages: HashMap::new(),
            unwritten: None,
            settling: false,
            asked: 0,
        }
    }

    fn names() -> Vec<ServerName> {
        (0..4).map(|number| format!("s{number}").into()).collect()
    }

    fn pass_time(&mut self, ms: u64) {
        self.now.wall = self.now.wall.plus(i64::try_from(ms).unwrap());
        self.now.at += Duration::from_millis(ms);
    }

    fn new_event(&mut self) {
        let ordering =
            StreamOrdering(self.events.last().map_or(0, |last| last.ordering.0) + self.rng.random_range(1..3));
        let room = format!("!{}", self.rng.random_range(0..3)).into();
        let destinations = Self::names()
            .into_iter()
            .filter(|_| self.rng.random_bool(0.6))
            .collect();
        self.open.push(self.events.len());
        self.events.push(Event {
            ordering,
            room,
            destinations,
        });
    }

    fn entry(&self, index: usize) -> Entry {
        let event = &self.events[index];
        let pdu = Pdu {
            event_id: format!("${}", event.ordering).into(),
            room_id: event.room.clone(),
            origin_server_ts: 0,
            bytes: vec![b'x'; 100].into(),
        };
        let pdu = OwedPdu {
            ordering: event.ordering,
            pdu,
            since: self.now.at,
        };
        Entry {
            pdu: Arc::new(pdu),
            destinations: event.destinations.clone(),
        }
    }

    fn introduce(&mut self) {
        for name in Self::names() {
            let record = self.database.record(&name);
            self.ledger.introduce(name, &record, self.now);
        }
    }

    fn read_events(&mut self) {
        self.introduce();
        let head = self.ledger.head();
        let page: Vec<usize> = (0..self.events.len())
            .filter(|index| self.events[*index].ordering > head)
            .take(5)
            .collect();
        let Some(last) = page.last() else { return };
        let last = self.events[*last].ordering;
        let late: Vec<usize> = page
            .iter()
            .copied()
            .filter(|index| {
                let room = &self.events[*index].room;
                let waits = self.undecided.iter().any(|other| self.events[*other].room == *room);
                waits || self.rng.random_bool(0.1)
            })
            .collect();
        // Later events of a room wait behind an undecided one.
        let late: Vec<usize> = page
            .iter()
            .copied()
            .filter(|index| {
                late.iter()
                    .any(|first| first <= index && self.events[*first].room == self.events[*index].room)
            })
            .collect();
        let entries: Vec<Entry> = page
            .iter()
            .filter(|index| !late.contains(index))
            .map(|index| self.entry(*index))
            .collect();
        let orderings: Vec<_> = late.iter().map(|index| self.events[*index].ordering).collect();
        self.undecided.extend(late);
        self.ledger.enter(&entries, orderings, last, self.now);
    }

    fn decide(&mut self) {
        let Some(first) = self.undecided.first().copied() else {
            return;
        };
        self.undecided.remove(0);
        let entry = self.entry(first);
        self.ledger.decide(Some(&entry), self.events[first].ordering, self.now);
    }

    fn new_retry(&mut self, name: &ServerName) -> RetryTimings {
        self.faultless.remove(name);
        let retry = RetryTimings {
            last_tried: self.now.wall,
            interval: self.rng.random_range(1_000..60_000),
            failing_since: Some(self.now.wall),
        };
        self.database.retry.insert(name.clone(), retry);
        retry
    }

    fn fail(&mut self, name: &ServerName) {
        let retry = self.new_retry(name);
        self.ledger.failed(name, retry);
    }

    /// Another process failed to reach it, or was called by it.
    fn others_set_retry(&mut self, name: &ServerName) {
        if self.rng.random_bool(0.5) {
            let retry = self.new_retry(name);
            self.ledger.set_retry(name, retry);
        } else {
            self.succeed(name);
        }
    }

    fn succeed(&mut self, name: &ServerName) {
        self.database.retry.remove(name);
        self.ledger.set_retry(name, RetryTimings::default());
    }

    /// One step of a destination's task; `false` if it has nothing to do.
    fn work(&mut self, name: &ServerName) -> bool {
        if let Some(pdus) = self.in_flight.remove(name) {
            self.answer(name, &pdus);
            return true;
        }
        match self.ledger.next(name, self.now) {
            Step::Send(pdus) => {
                assert!(pdus.is_sorted_by_key(|pdu| pdu.ordering));
                self.in_flight.insert(name.clone(), pdus);
            }
            Step::Ask { room, .. } => {
                self.asked += 1;
                let seen = [Seen::Yes, Seen::NotYet, Seen::NoAnswer].choose(&mut self.rng).unwrap();
                self.ledger.asked(name, &room, *seen, self.now);
            }
            Step::Checkpoint => self.checkpoint(),
            Step::CatchUp {
                after,
                up_to,
                rest_in_memory,
            } => self.catch_up(name, after, up_to, rest_in_memory),
            Step::Wait(_) | Step::BackOff(_) | Step::Idle => return false,
            Step::Backlog(_) => self.ledger.backlog(name, |backlog| backlog.loaded(vec![], self.now.at)),
        }
        true
    }

    fn answer(&mut self, name: &ServerName, pdus: &[Arc<OwedPdu>]) {
        if self.down.contains(name) {
            self.fail(name);
            return;
        }
        if self.rng.random_bool(0.02) {
            let until = self.now.at + Duration::from_millis(self.rng.random_range(0..30_000));
            self.ledger.paused(name, until);
            return;
        }
        if self.rng.random_bool(0.05) || pdus.iter().any(|pdu| pdu.ordering.0 % 50 == 0) {
            self.refuse(name, pdus);
            return;
        }
        for pdu in pdus {
            *self.accepted.entry((name.clone(), pdu.ordering)).or_default() += 1;
        }
        if self.rng.random_bool(0.02) {
            self.fail(name); // it took them, but the answer got lost
        } else {
            self.succeed(name);
            self.ledger.accepted(name, |_| true, self.now);
        }
    }

    fn refuse(&mut self, name: &ServerName, pdus: &[Arc<OwedPdu>]) {
        self.faultless.remove(name);
        if !self.ledger.refused(name) {
            return;
        }
        if self.rng.random_bool(0.5) {
            self.fail(name); // it refuses everything
        } else {
            self.accepted.entry((name.clone(), pdus[0].ordering)).or_insert(1); // given up
            self.ledger.accepted(name, |_| false, self.now);
        }
    }

    fn catch_up(&mut self, name: &ServerName, after: StreamOrdering, up_to: StreamOrdering, rest_in_memory: bool) {
        let page = self.pages.entry(name.clone()).or_default();
        if page.get(after).is_none() {
            let rows = self.database.owed_rooms(name, Some(after)).into_iter().take(4);
            let rows = rows.map(|(room_id, stream_ordering)| OwedRoom {
                room_id,
                stream_ordering,
                event_id: None,
            });
            page.fill(rows, up_to);
        }
        let row = page.get(after).map(|row| (row.room_id.clone(), row.stream_ordering));
        self.meanwhile();
        let Some((room, at)) = row else {
            if rest_in_memory {
                self.ledger.caught_up(name, up_to);
            }
            return;
        };
        if self.down.contains(name) {
            self.fail(name);
            return;
        }
        self.succeed(name);
        *self.accepted.entry((name.clone(), at)).or_default() += 1;
        self.passed.insert((name.clone(), room), at);
        self.database.last_successful.insert(name.clone(), at);
        self.ledger.caught_up_to(name, at, self.now);
    }

    /// What others do while a task waits for the database or for an answer.
    fn meanwhile(&mut self) {
        if self.rng.random_bool(0.2) && !self.settling {
            self.new_event();
            self.read_events();
        }
        if self.rng.random_bool(0.1) {
            let _ = self.ledger.enforce_age(self.now);
        }
        if self.rng.random_bool(0.2) {
            self.checkpoint();
        }
    }

    fn checkpoint(&mut self) {
        if let Some(checkpoint) = self.unwritten.take().or_else(|| self.ledger.checkpoint()) {
            self.database.write(&checkpoint);
            self.ledger.wrote(&checkpoint);
        }
    }

    fn crash(&mut self) {
        self.crashed = true;
        // What was sent may have arrived.
        for (name, pdus) in std::mem::take(&mut self.in_flight) {
            if !self.down.contains(&name) && self.rng.random_bool(0.5) {
                for pdu in pdus {
                    *self.accepted.entry((name.clone(), pdu.ordering)).or_default() += 1;
                }
            }
        }
        self.undecided.clear();
        self.unwritten = None;
        self.pages.clear();
        let cursor = EventCursor {
            position: self.database.cursor,
            ours: true,
            deltas: None,
        };
        self.ledger = Ledger::new(cursor, LIMITS);
    }

    /// Everything that a crash at this moment would have to rest on.
    fn check(&mut self) {
        let accepted = &self.accepted;
        let events = &self.events;
        self.open.retain(|index| {
            let Event {
                ordering, destinations, ..
            } = &events[*index];
            !destinations
                .iter()
                .all(|name| accepted.contains_key(&(name.clone(), *ordering)))
        });
        for event in self.open.iter().map(|index| &self.events[*index]) {
            for name in &event.destinations {
                let last_successful = self.database.last_successful.get(name).copied();
                let key = (name.clone(), event.room.clone());
                let accepted = self.accepted.contains_key(&(name.clone(), event.ordering));
                let passed = self.passed.get(&key).is_some_and(|at| *at >= event.ordering);
                let read_again =
                    event.ordering > self.database.cursor && last_successful.is_none_or(|last| last < event.ordering);
                let row = self
                    .database
                    .rows
                    .get(&key)
                    .is_some_and(|at| *at >= event.ordering && last_successful.is_none_or(|last| last < *at));
                assert!(
                    accepted || passed || read_again || row,
                    "{} is lost to {name}: cursor {}, last successful {last_successful:?}",
                    event.ordering,
                    self.database.cursor,
                );
            }
        }
    }

    fn step(&mut self) {
        let names = Self::names();
        let name = names.choose(&mut self.rng).unwrap().clone();
        match self.rng.random_range(0..100) {
            0..25 => self.new_event(),
            25..45 => self.read_events(),
            45..50 => self.decide(),
            50..80 => {
                self.introduce();
                self.work(&name);
            }
            80..86 => self.checkpoint(),
            86..89 => self.unwritten = self.ledger.checkpoint(),
            89..91 => {
                let _ = self.ledger.enforce_age(self.now);
            }
            91..93 => {
                self.down.insert(name);
            }
            93..96 => {
                self.down.remove(&name);
            }
            96..97 => self.crash(),
            97 => {
                self.introduce();
                match self.rng.random_range(0..3) {
                    0 => self.others_set_retry(&name),
                    1 => self.now.wall = self.now.wall.plus(self.rng.random_range(-10_000..10_000)),
                    _ => self.pass_time(70_000),
                }
            }
            _ => {
                let ms = self.rng.random_range(0..5_000);
                self.pass_time(ms);
            }
        }
        self.check();
    }

    /// Everyone is reachable again, and everything runs until nothing is left to do.
    fn settle(&mut self) {
        self.settling = true;
        self.down.clear();
        for _ in 0..120 {
            self.pass_time(1_000);
            self.introduce();
            self.read_events();
            self.decide();
            for name in Self::names() {
                while self.work(&name) && self.rng.random_bool(0.95) {}
            }
            self.checkpoint();
            self.check();
        }
        assert_eq!(self.ledger.cursor(), self.ledger.head());
        assert_eq!(
            self.database.cursor,
            self.events.last().map_or(StreamOrdering(0), |last| last.ordering)
        );
        for event in &self.events {
            for name in &event.destinations {
                let times = self
                    .accepted
                    .get(&(name.clone(), event.ordering))
                    .copied()
                    .unwrap_or_default();
                let passed = self.passed.get(&(name.clone(), event.room.clone()));
                assert!(
                    times > 0 || passed.is_some_and(|at| *at > event.ordering),
                    "{name} lacks {}",
                    event.ordering
                );
                if self.faultless.contains(name) && passed.is_none() {
                    assert!(times > 0, "{name} kept up and lacks {}", event.ordering);
                    assert!(
                        times == 1 || self.crashed,
                        "{name} got {} {times} times",
                        event.ordering
                    );
                }
            }
        }
    }
}

/// Returns how often destinations were asked whether they have what they accepted.
fn run(seed: u64) -> usize {
    let mut world = World::new(seed);
    for _ in 0..STEPS {
        world.step();
    }
    world.settle();
    world.asked
}

#[test]
fn nothing_is_lost_in_any_history() {
    let mut asked = 0;
    for seed in REGRESSIONS.iter().copied().chain(0..HISTORIES) {
        let outcome = std::panic::catch_unwind(|| run(seed));
        assert!(outcome.is_ok(), "seed {seed}");
        asked += outcome.unwrap_or_default();
    }
    assert!(asked > 0, "no room ever had more than the window");
}
