//! The reader in a made-up deployment whose bus loses, repeats and reorders.
//!
//! Writers commit rows of `caches` to a table and take ids of `events` from a sequence, and announce them as Synapse does.
//! The bus keeps the order of one writer's lines about one stream, and nothing else; it may repeat lines; what is said
//! while the subscription is gone is lost, and the reader learns of that only later. Whatever happens, every row of another
//! writer is delivered at least once, and `up_to` reaches the truth without ever being above it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use proptest::prelude::*;

use super::{
    command::Command,
    gap::{CacheInvalidation, Fetch, PAGE, Page, page_of_caches},
    positions::Positions,
    reader::{Action, Input, Reader, Role},
    stream::Stream,
};
use crate::core::{
    clock::Millis,
    id::{StreamOrdering, Token},
};

const WRITERS: [&str; 3] = ["master", "persister", "worker"];
/// The `caches` stream before the reader started. Nothing at or below it is owed.
const START: i64 = 10;

#[derive(Debug, Clone, Copy)]
enum Step {
    /// A writer commits a row of `caches` and publishes it.
    Row(usize),
    /// A writer takes an event id; it will be persisted later.
    Take(usize),
    /// A writer persists its oldest event and publishes it.
    Persist(usize),
    /// A writer says where it is, as idle writers do every second.
    Idle(usize),
    /// The oldest line of one writer's stream arrives.
    Deliver(usize),
    /// It arrives twice.
    Repeat(usize),
    /// The subscription breaks; the reader does not know yet.
    Break,
    /// The reader learns of it and subscribes again.
    Reconnect,
    /// The oldest page asked for arrives.
    FetchSucceeds,
    /// It fails.
    FetchFails,
    /// A second passes.
    Time,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0..3_usize).prop_map(Step::Row),
        3 => (0..2_usize).prop_map(Step::Take),
        3 => (0..2_usize).prop_map(Step::Persist),
        2 => (0..3_usize).prop_map(Step::Idle),
        12 => (0..6_usize).prop_map(Step::Deliver),
        2 => (0..6_usize).prop_map(Step::Repeat),
        1 => Just(Step::Break),
        1 => Just(Step::Reconnect),
        4 => Just(Step::FetchSucceeds),
        1 => Just(Step::FetchFails),
        2 => Just(Step::Time),
    ]
}

struct World {
    reader: Reader,
    /// What the reader was told of `events`.
    events: Positions,
    now: Millis,
    /// The table, by token.
    rows: BTreeMap<i64, usize>,
    last_row: [i64; 3],
    /// Events taken and not persisted, by writer (the third writes no events).
    unfinished: [VecDeque<i64>; 2],
    last_event: i64,
    /// The last position of `events` each said.
    said: [i64; 2],
    /// One queue for each stream and writer: `caches` of 0, 1, 2, then `events` of 0, 1.
    bus: Vec<VecDeque<String>>,
    broken: bool,
    fetches: VecDeque<Fetch>,
    delivered: BTreeSet<i64>,
}

impl World {
    fn new() -> Self {
        let events = Positions::at_start(&[WRITERS[0].into(), WRITERS[1].into()], &[], [StreamOrdering(START)]);
        let mut world = Self {
            reader: Reader::new("fs1".into(), Role::Sender, Token(START)),
            events,
            now: Millis(0),
            rows: BTreeMap::new(),
            last_row: [3, 10, 0],
            unfinished: [VecDeque::new(), VecDeque::new()],
            last_event: START,
            said: [START; 2],
            bus: vec![VecDeque::new(); 6],
            broken: false,
            fetches: VecDeque::new(),
            delivered: BTreeSet::new(),
        };
        world.input(Input::OutboundUp);
        world.input(Input::Subscribed);
        world
    }

    fn input(&mut self, input: Input) {
        for action in self.reader.handle(input, self.now) {
            match action {
                Action::Publish(Command::Replicate) => (0..3).for_each(|writer| self.announce(writer)),
                Action::Fetch(fetch) => self.fetches.push_back(fetch),
                Action::Rows { stream, writer, group } => {
                    assert_eq!(stream, Stream::Caches);
                    assert_eq!(WRITERS[self.rows[&group.token.0]], writer.as_str());
                    self.delivered.insert(group.token.0);
                }
                Action::Reached { writer, token, .. } => {
                    self.events.advance(&writer, StreamOrdering(token.0));
                    let up_to = self.events.up_to();
                    assert!(up_to.0 <= self.truth(), "{up_to} > {}", self.truth());
                }
                _ => {}
            }
        }
    }

    /// Everything up to here is persisted.
    fn truth(&self) -> i64 {
        let unfinished = self.unfinished.iter().filter_map(|ids| ids.front()).min();
        unfinished.map_or(self.last_event, |lowest| lowest - 1)
    }

    /// What a writer may say of itself: its newest event, or (idle) how far it knows all writers to be.
    fn own_position(&self, writer: usize) -> i64 {
        self.said[writer].max(self.truth())
    }

    fn publish(&mut self, queue: usize, line: String) {
        if !self.broken {
            self.bus[queue].push_back(line);
        }
    }

    fn announce(&mut self, writer: usize) {
        let last = self.last_row[writer];
        self.publish(writer, format!("POSITION caches {} {last} {last}", WRITERS[writer]));
        if writer < 2 {
            let new = self.own_position(writer);
            self.publish(
                3 + writer,
                format!("POSITION events {} {} {new}", WRITERS[writer], self.said[writer]),
            );
            self.said[writer] = new;
        }
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Row(writer) => {
                // Tokens come from one sequence, shared by all writers.
                let token = self.last_row.iter().max().unwrap().max(&START) + 1;
                self.rows.insert(token, writer);
                self.last_row[writer] = token;
                self.publish(
                    writer,
                    format!(r#"RDATA caches {} {token} ["f",["k"],1]"#, WRITERS[writer]),
                );
            }
            Step::Take(writer) => {
                self.last_event += 1;
                self.unfinished[writer].push_back(self.last_event);
            }
            Step::Persist(writer) => {
                if let Some(id) = self.unfinished[writer].pop_front() {
                    self.said[writer] = id;
                    self.publish(
                        3 + writer,
                        format!(r#"RDATA events {} {id} ["ev",[]]"#, WRITERS[writer]),
                    );
                }
            }
            Step::Idle(writer) => self.announce(writer),
            Step::Deliver(queue) => {
                if let Some(line) = self.bus[queue].pop_front() {
                    self.input(Input::Line(line));
                }
            }
            Step::Repeat(queue) => {
                if let Some(line) = self.bus[queue].pop_front() {
                    self.input(Input::Line(line.clone()));
                    self.input(Input::Line(line));
                }
            }
            Step::Break => {
                self.broken = true;
                self.bus.iter_mut().for_each(VecDeque::clear);
            }
            Step::Reconnect => {
                self.broken = false;
                self.bus.iter_mut().for_each(VecDeque::clear);
                self.input(Input::Lost);
                self.input(Input::Subscribed);
            }
            Step::FetchSucceeds => {
                if let Some(fetch) = self.fetches.pop_front() {
                    let page = self.page(&fetch);
                    self.input(Input::Fetched(fetch, page));
                }
            }
            Step::FetchFails => {
                if let Some(fetch) = self.fetches.pop_front() {
                    self.input(Input::FetchFailed(fetch));
                }
            }
            Step::Time => {
                self.now = self.now.plus(1_000);
                self.input(Input::Tick);
            }
        }
    }

    fn page(&self, fetch: &Fetch) -> Page {
        let writer = WRITERS.iter().position(|name| *name == fetch.writer.as_str()).unwrap();
        let range = self.rows.range(fetch.from.0 + 1..=fetch.to.0);
        let rows: Vec<_> = range
            .filter(|(_, owner)| **owner == writer)
            .take(PAGE)
            .map(|(token, _)| CacheInvalidation {
                token: Token(*token),
                func: "f".to_owned(),
                keys: None,
                at: None,
            })
            .collect();
        page_of_caches(fetch, &rows).unwrap()
    }

    /// The faults end, and all that is under way arrives.
    fn settle(&mut self) {
        self.step(Step::Reconnect);
        for _ in 0..80 {
            for queue in 0..self.bus.len() {
                while !self.bus[queue].is_empty() {
                    self.step(Step::Deliver(queue));
                }
            }
            while !self.fetches.is_empty() {
                self.step(Step::FetchSucceeds);
            }
            self.step(Step::Time);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn nothing_is_lost_and_nothing_is_believed_too_early(steps in proptest::collection::vec(step(), 0..250)) {
        let mut world = World::new();
        for step in steps {
            world.step(step);
        }
        world.settle();
        let owed: BTreeSet<i64> = world.rows.keys().copied().collect();
        prop_assert_eq!(&world.delivered, &owed);
        prop_assert_eq!(world.events.up_to().0, world.truth());
    }
}

#[test]
fn a_gap_of_many_pages_is_fetched_whole() {
    let mut world = World::new();
    world.step(Step::Deliver(0));
    world.step(Step::Break);
    (0..450).for_each(|_| world.step(Step::Row(0)));
    world.settle();
    assert_eq!(world.delivered.len(), 450);
}
