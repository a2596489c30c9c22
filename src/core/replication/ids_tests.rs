//! Ids of one stream, alone and between several writers that lose and reorder what they say.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use proptest::prelude::*;
use serde_json::value::RawValue;

use super::*;
use crate::core::id::{StreamOrdering, Token};

fn ids(writers: &[&str], last: i64) -> Ids<StreamOrdering> {
    let writers: Vec<_> = writers.iter().map(|name| InstanceName::from(*name)).collect();
    Ids::new(&writers[0], Positions::at_start(&writers, &[], [StreamOrdering(last)]))
}

fn draw(ids: &mut Ids<StreamOrdering>, drawn: &[i64]) -> WriteKey {
    let key = ids.ask();
    ids.drawn(key, &orderings(drawn)).unwrap();
    key
}

fn orderings(ids: &[i64]) -> Vec<StreamOrdering> {
    ids.iter().copied().map(StreamOrdering).collect()
}

fn group(token: i64, rows: usize) -> Group {
    let row = || RawValue::from_string("[]".to_owned()).unwrap();
    Group {
        token: Token(token),
        rows: (0..rows).map(|_| row()).collect(),
    }
}

fn tokens(ready: &[Ready]) -> Vec<(i64, Option<usize>)> {
    let short = |ready: &Ready| match ready {
        Ready::Rows(group) => (group.token.0, Some(group.rows.len())),
        Ready::Skipped(token) => (token.0, None),
    };
    ready.iter().map(short).collect()
}

fn at(ids: &Ids<StreamOrdering>) -> (i64, i64) {
    (ids.position().0, ids.up_to().0)
}

#[test]
fn rows_wait_for_the_lower_ids() {
    let mut ids = ids(&["a"], 10);
    let first = draw(&mut ids, &[11]);
    let second = draw(&mut ids, &[12, 13]);
    assert!(ids.finish(second, &orderings(&[12, 13]), vec![group(13, 2)]).is_empty());
    assert_eq!(at(&ids), (10, 10));
    let ready = ids.finish(first, &orderings(&[11]), vec![group(11, 1)]);
    assert_eq!(tokens(&ready), [(11, Some(1)), (12, Some(0)), (13, Some(2))]);
    assert_eq!(at(&ids), (13, 13));
}

#[test]
fn a_question_on_its_way_holds_what_it_may_yet_be_given() {
    let mut ids = ids(&["a"], 10);
    let asked = ids.ask();
    let other = draw(&mut ids, &[12]);
    assert!(
        ids.finish(other, &orderings(&[12]), vec![]).is_empty(),
        "11 may come yet"
    );
    assert_eq!(at(&ids), (10, 10));
    ids.drawn(asked, &orderings(&[11])).unwrap();
    assert_eq!(at(&ids), (10, 10));
    assert_eq!(tokens(&ids.abandon(asked, &orderings(&[11]))), [(12, Some(0))]);
    assert_eq!(at(&ids), (12, 12));
}

#[test]
fn an_idle_writer_follows_the_others_and_a_busy_one_does_not() {
    let mut ids = ids(&["a", "b"], 10);
    ids.heard(&"b".into(), StreamOrdering(15));
    assert_eq!(at(&ids), (15, 15));
    let key = draw(&mut ids, &[17]);
    ids.heard(&"b".into(), StreamOrdering(20));
    assert_eq!(at(&ids), (16, 16));
    ids.finish(key, &orderings(&[17]), vec![]);
    assert_eq!(at(&ids), (20, 20));
}

#[test]
fn two_idle_writers_do_not_wait_for_each_other() {
    let mut ids = ids(&["a", "c", "b"], 10);
    ids.heard(&"b".into(), StreamOrdering(12));
    assert_eq!(at(&ids), (12, 10), "11 was abandoned by b; c has not spoken");
    ids.heard(&"c".into(), StreamOrdering(12));
    assert_eq!(at(&ids), (12, 12));
}

#[test]
fn an_abandoned_id_may_come_again_even_before_it_is_known_to_be_abandoned() {
    let mut ids = ids(&["a"], 10);
    let first = draw(&mut ids, &[11]);
    ids.abandon(first, &orderings(&[11]));
    assert_eq!(at(&ids), (10, 10));
    let (first, second) = (ids.ask(), ids.ask());
    ids.drawn(first, &orderings(&[11])).unwrap();
    ids.drawn(second, &orderings(&[11])).unwrap();
    assert!(ids.abandon(first, &orderings(&[11])).is_empty());
    assert_eq!(at(&ids), (10, 10), "the second still has it");
    ids.finish(second, &orderings(&[11]), vec![]);
    assert_eq!(at(&ids), (11, 11));
}

#[test]
fn a_source_that_lags_is_an_error() {
    let mut ids = ids(&["a", "c"], 10);
    let key = ids.ask();
    let error = ids.drawn(key, &orderings(&[11, 10])).unwrap_err();
    assert_eq!((error.id, error.known), (10, 10));
    ids.heard(&"b".into(), StreamOrdering(12));
    assert_eq!(at(&ids), (10, 10), "the write is not off yet");
    assert!(ids.abandon(key, &orderings(&[11, 10])).is_empty());
    assert_eq!(at(&ids), (12, 10));
}

#[test]
fn rows_that_wait_are_bounded() {
    let mut ids = ids(&["a"], 0);
    let stuck = draw(&mut ids, &[2]);
    let next = draw(&mut ids, &[3, 4, 5]);
    let rows = vec![group(3, 6_000), group(4, 6_000), group(5, 1)];
    assert!(ids.finish(next, &orderings(&[3, 4, 5]), rows).is_empty());
    let ready = ids.abandon(stuck, &orderings(&[2]));
    assert_eq!(tokens(&ready), [(3, Some(6_000)), (4, None), (5, Some(1))]);
    assert_eq!(ids.rows_waiting, 0);
}

const WRITERS: [&str; 3] = ["a", "b", "c"];

#[derive(Debug, Clone, Copy)]
enum Step {
    /// A writer asks the source, which gives so many ids.
    Ask(usize, i64),
    /// The answer arrives. (The next of that writer's, or the one after.)
    Arrive(usize, usize),
    /// A write ends well, and is published.
    Finish(usize, usize),
    /// A write is rolled back.
    Abandon(usize, usize),
    /// A second is over: a writer says its position.
    Announce(usize),
    /// Something that was said arrives at somebody, perhaps not the oldest.
    Deliver(usize, usize),
    /// It never does.
    Lose(usize, usize),
}

fn step() -> impl Strategy<Value = Step> {
    let writer = || 0..WRITERS.len();
    prop_oneof![
        4 => (writer(), 1..4_i64).prop_map(|(writer, count)| Step::Ask(writer, count)),
        4 => (writer(), 0..2_usize).prop_map(|(writer, pick)| Step::Arrive(writer, pick)),
        4 => (writer(), 0..3_usize).prop_map(|(writer, pick)| Step::Finish(writer, pick)),
        1 => (writer(), 0..3_usize).prop_map(|(writer, pick)| Step::Abandon(writer, pick)),
        3 => writer().prop_map(Step::Announce),
        12 => (0..=WRITERS.len(), 0..3_usize).prop_map(|(hearer, pick)| Step::Deliver(hearer, pick)),
        2 => (0..=WRITERS.len(), 0..3_usize).prop_map(|(hearer, pick)| Step::Lose(hearer, pick)),
    ]
}

struct Write {
    key: WriteKey,
    ids: Vec<StreamOrdering>,
}

/// Three writers, and a process that only reads.
struct World {
    writers: Vec<Ids<StreamOrdering>>,
    reader: Positions,
    /// The sequence.
    last: i64,
    /// Given by the source, and not known to the writer yet.
    answers: Vec<VecDeque<Write>>,
    writing: Vec<Vec<Write>>,
    /// For each process, the reader last: what is on its way to it.
    bus: Vec<Vec<(usize, StreamOrdering)>>,
    committed: BTreeSet<i64>,
    /// The rows each writer has published, in order.
    published: BTreeMap<usize, Vec<i64>>,
}

impl World {
    fn new() -> Self {
        let names: Vec<_> = WRITERS.iter().map(|name| InstanceName::from(*name)).collect();
        let positions = Positions::at_start(&names, &[], []);
        Self {
            writers: names.iter().map(|me| Ids::new(me, positions.clone())).collect(),
            reader: positions,
            last: 1,
            answers: WRITERS.iter().map(|_| VecDeque::new()).collect(),
            writing: WRITERS.iter().map(|_| Vec::new()).collect(),
            bus: vec![Vec::new(); WRITERS.len() + 1],
            committed: BTreeSet::new(),
            published: BTreeMap::new(),
        }
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Ask(writer, count) => {
                let key = self.writers[writer].ask();
                let ids = (self.last + 1..=self.last + count).map(StreamOrdering).collect();
                self.last += count;
                self.answers[writer].push_back(Write { key, ids });
            }
            Step::Arrive(writer, pick) => {
                if let Some(write) = self.answers[writer].remove(pick) {
                    let ready = self.writers[writer].drawn(write.key, &write.ids).unwrap();
                    self.writing[writer].push(write);
                    self.publish(writer, &ready);
                }
            }
            Step::Finish(writer, pick) if pick < self.writing[writer].len() => {
                let write = self.writing[writer].remove(pick);
                self.committed.extend(write.ids.iter().map(|id| id.0));
                let rows = write.ids.iter().map(|id| group(id.0, 1)).collect();
                let ready = self.writers[writer].finish(write.key, &write.ids, rows);
                self.publish(writer, &ready);
            }
            Step::Abandon(writer, pick) if pick < self.writing[writer].len() => {
                let write = self.writing[writer].remove(pick);
                let ready = self.writers[writer].abandon(write.key, &write.ids);
                self.publish(writer, &ready);
            }
            Step::Announce(writer) => self.say(writer, self.writers[writer].position()),
            Step::Deliver(hearer, pick) if pick < self.bus[hearer].len() => {
                let (writer, position) = self.bus[hearer].remove(pick);
                let name = WRITERS[writer].into();
                match self.writers.get_mut(hearer) {
                    Some(ids) => ids.heard(&name, position),
                    None => self.reader.advance(&name, position),
                }
            }
            Step::Lose(hearer, pick) if pick < self.bus[hearer].len() => {
                self.bus[hearer].remove(pick);
            }
            Step::Finish(..) | Step::Abandon(..) | Step::Deliver(..) | Step::Lose(..) => {}
        }
        self.check();
    }

    fn publish(&mut self, writer: usize, ready: &[Ready]) {
        for (token, rows) in tokens(ready) {
            assert_eq!(rows, Some(1));
            self.published.entry(writer).or_default().push(token);
            self.say(writer, StreamOrdering(token));
        }
    }

    fn say(&mut self, writer: usize, position: StreamOrdering) {
        for (hearer, queue) in self.bus.iter_mut().enumerate() {
            if hearer != writer {
                queue.push((writer, position));
            }
        }
    }

    fn open(&self, writer: usize) -> impl Iterator<Item = i64> {
        let open = self.answers[writer].iter().chain(&self.writing[writer]);
        open.flat_map(|write| &write.ids).map(|id| id.0)
    }

    fn check(&self) {
        let lowest = (0..WRITERS.len()).flat_map(|writer| self.open(writer)).min();
        let lowest = lowest.unwrap_or(i64::MAX);
        for (writer, ids) in self.writers.iter().enumerate() {
            assert!(ids.up_to().0 < lowest, "{} {} {lowest}", WRITERS[writer], ids.up_to());
            let own = self.open(writer).min().unwrap_or(i64::MAX);
            assert!(
                ids.position().0 < own,
                "{} says {}, {own} is open",
                WRITERS[writer],
                ids.position()
            );
        }
        assert!(self.reader.up_to().0 < lowest);
        for rows in self.published.values() {
            assert!(rows.is_sorted(), "{rows:?}");
        }
    }

    /// All that was begun ends, and what is said from now on arrives.
    fn settle(&mut self) {
        for writer in 0..WRITERS.len() {
            while !self.answers[writer].is_empty() {
                self.step(Step::Arrive(writer, 0));
            }
            while !self.writing[writer].is_empty() {
                self.step(Step::Finish(writer, 0));
            }
        }
        for _ in 0..3 {
            (0..WRITERS.len()).for_each(|writer| self.step(Step::Announce(writer)));
            for hearer in 0..self.bus.len() {
                while !self.bus[hearer].is_empty() {
                    self.step(Step::Deliver(hearer, 0));
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn no_id_is_passed_before_it_is_finished_and_in_the_end_all_agree(steps in proptest::collection::vec(step(), 0..200)) {
        let mut world = World::new();
        for step in steps {
            world.step(step);
        }
        world.settle();
        let last = world.committed.last().copied().unwrap_or(1);
        for ids in &world.writers {
            prop_assert_eq!(at(ids), (last, last));
        }
        prop_assert_eq!(world.reader.up_to().0, last);
        let published: BTreeSet<i64> = world.published.values().flatten().copied().collect();
        prop_assert_eq!(published, world.committed);
    }
}
