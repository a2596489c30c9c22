//! Histories drawn from a seed: events, joins, answers that leave events out, looks at the table that are overtaken, crashes.
//! After every step, each sticky event that is owed is delivered, was given up, or is at or above its room's row.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use rand::{RngExt, SeedableRng, rngs::SmallRng};
use tokio::time::Instant;

use super::{
    backlog::{Backlog, BacklogStep, UNLISTED_LIMIT},
    drain::{Reached, settle},
};
use crate::{
    core::{
        event::Pdu,
        id::{EventId, RoomId, StickyPosition},
        store::BacklogRow,
    },
    federation::transaction::Accepted,
};

const HISTORIES: u64 = 300;
const STEPS: usize = 300;

/// What is under way: begun, not ended, so that other things happen in between.
enum UnderWay {
    Load(Vec<BacklogRow>),
    Push {
        room: RoomId,
        from: StickyPosition,
        page: Vec<StickyPosition>,
        more: bool,
        unlisted: u32,
    },
}

struct World {
    rng: SmallRng,
    now: Instant,
    next_position: i64,
    /// The living events of each room.
    events: BTreeMap<RoomId, BTreeSet<StickyPosition>>,
    /// The backlog table's rows of the destination, with the join that made them.
    rows: BTreeMap<RoomId, StickyPosition>,
    joins: HashMap<RoomId, EventId>,
    owed: BTreeSet<(RoomId, StickyPosition)>,
    delivered: BTreeSet<(RoomId, StickyPosition)>,
    /// How often an event was left out of an answer.
    left_out: HashMap<StickyPosition, u32>,
    backlog: Backlog,
    under_way: Option<UnderWay>,
}

impl World {
    fn new(seed: u64) -> Self {
        Self {
            rng: SmallRng::seed_from_u64(seed),
            now: Instant::now(),
            next_position: 2,
            events: BTreeMap::new(),
            rows: BTreeMap::new(),
            joins: HashMap::new(),
            owed: BTreeSet::new(),
            delivered: BTreeSet::new(),
            left_out: HashMap::new(),
            backlog: Backlog::default(),
            under_way: None,
        }
    }

    fn room(&mut self) -> RoomId {
        format!("!{}", self.rng.random_range(0..2)).into()
    }

    /// A row is written as the store does it: the lower position stays.
    fn record(&mut self, room: &RoomId, position: StickyPosition) {
        let row = self.rows.entry(room.clone()).or_insert(position);
        *row = (*row).min(position);
        self.backlog.recorded(room, self.now);
    }

    /// An event of ours; the destination may be in the room although the event's hosts lack it.
    fn event(&mut self) {
        let room = self.room();
        let position = StickyPosition(self.next_position);
        self.next_position += 1;
        self.events.entry(room.clone()).or_default().insert(position);
        if self.rng.random_bool(0.3) {
            self.owed.insert((room.clone(), position));
            self.record(&room, position);
        }
    }

    /// The destination joins (anew), and is owed all that is alive, what it had before included.
    fn join(&mut self) {
        let room = self.room();
        let Some(living) = self.events.get(&room).filter(|living| !living.is_empty()).cloned() else {
            return;
        };
        for position in &living {
            self.owed.insert((room.clone(), *position));
            self.delivered.remove(&(room.clone(), *position));
            self.left_out.remove(position);
        }
        self.joins
            .insert(room.clone(), format!("$join{}", self.next_position).into());
        self.record(&room, *living.first().unwrap());
    }

    fn expire(&mut self) {
        let room = self.room();
        if let Some(oldest) = self.events.get_mut(&room).and_then(BTreeSet::pop_first) {
            self.owed.remove(&(room, oldest));
        }
    }

    fn living(&self, room: &RoomId, from: StickyPosition) -> Vec<StickyPosition> {
        let living = self.events.get(room).into_iter().flatten();
        living.copied().filter(|position| *position >= from).collect()
    }

    fn begin(&mut self) {
        match self.backlog.next(self.now) {
            BacklogStep::Load => {
                let empty: Vec<RoomId> = self.rows.keys().cloned().collect();
                let empty = empty
                    .into_iter()
                    .filter(|room| self.living(room, self.rows[room]).is_empty());
                for room in empty.collect::<Vec<_>>() {
                    self.rows.remove(&room);
                }
                let rows = self.rows.iter().map(|(room, position)| BacklogRow {
                    room_id: room.clone(),
                    position: *position,
                    recent_join: self.joins.get(room).cloned(),
                });
                self.under_way = Some(UnderWay::Load(rows.collect()));
            }
            BacklogStep::Probe { room, .. } => {
                let has = self.rng.random_bool(0.7);
                self.backlog.probed(&room, has, self.now);
            }
            BacklogStep::Push {
                room,
                position,
                limit,
                unlisted,
            } => {
                // Small pages, so that there are several.
                let limit = limit.min(3);
                let mut page = self.living(&room, position);
                let more = page.len() > limit;
                page.truncate(limit);
                if page.is_empty() {
                    self.backlog.look_again();
                    self.backlog.finished(&room);
                    return;
                }
                self.under_way = Some(UnderWay::Push {
                    room,
                    from: position,
                    page,
                    more,
                    unlisted,
                });
            }
            BacklogStep::Wait(until) => self.now = until,
            BacklogStep::Nothing => {}
        }
    }

    fn end(&mut self, under_way: UnderWay) {
        match under_way {
            UnderWay::Load(rows) => self.backlog.loaded(rows, self.now),
            UnderWay::Push {
                room,
                from,
                page,
                more,
                unlisted,
            } => {
                let pdus: Vec<(StickyPosition, Pdu)> = page.iter().map(|at| (*at, pdu(&room, *at))).collect();
                let listed: Vec<StickyPosition> = page.iter().copied().filter(|_| self.rng.random_bool(0.8)).collect();
                for position in &page {
                    if listed.contains(position) {
                        self.delivered.insert((room.clone(), *position));
                    } else {
                        *self.left_out.entry(*position).or_default() += 1;
                    }
                }
                let results = listed.iter().map(|at| (pdu(&room, *at).event_id, None)).collect();
                let reached = settle(&pdus, &Accepted { results: Some(results) }, unlisted);
                self.moved(&room, from, &page, more, &reached);
            }
        }
    }

    /// As `drain.rs` does it, with the table's compare-and-set.
    fn moved(&mut self, room: &RoomId, from: StickyPosition, page: &[StickyPosition], more: bool, reached: &Reached) {
        let end = StickyPosition(page.last().unwrap().0 + 1);
        let to = match reached {
            Reached::End => end,
            Reached::LeftOut(at, _) => *at,
        };
        if from != to {
            match self.rows.get_mut(room) {
                Some(row) if *row == from => *row = to,
                _ => return self.backlog.look_again(),
            }
        }
        match reached {
            Reached::LeftOut(at, times) => self.backlog.left_out(room, *at, *times, self.now),
            Reached::End if more => {
                let sent = page.last().map(|at| pdu(room, *at).event_id);
                self.backlog.advanced(room, to, sent, self.now);
            }
            Reached::End => {
                self.backlog.look_again();
                self.backlog.finished(room);
            }
        }
    }

    fn crash(&mut self) {
        self.under_way = None;
        self.backlog = Backlog::default();
    }

    fn work(&mut self) {
        match self.under_way.take() {
            Some(under_way) => self.end(under_way),
            None => self.begin(),
        }
    }

    fn check(&self) {
        for owed in self.owed.difference(&self.delivered) {
            let (room, position) = owed;
            let given_up = self.left_out.get(position).is_some_and(|times| *times > UNLISTED_LIMIT);
            let on_record = self.rows.get(room).is_some_and(|row| row <= position);
            assert!(
                given_up || on_record,
                "{position:?} of {room} is lost: {:?}",
                self.rows.get(room)
            );
        }
    }

    fn step(&mut self) {
        match self.rng.random_range(0..100) {
            0..15 => self.event(),
            15..18 => self.join(),
            18..22 => self.expire(),
            22..23 => self.crash(),
            _ => self.work(),
        }
        self.check();
    }

    fn settle(&mut self) {
        for _ in 0..20_000 {
            self.work();
            self.check();
            if self.under_way.is_none() && self.backlog.next(self.now) == BacklogStep::Nothing {
                break;
            }
        }
        assert!(self.rows.is_empty(), "rows are left: {:?}", self.rows);
    }
}

fn pdu(room: &RoomId, at: StickyPosition) -> Pdu {
    Pdu {
        event_id: format!("${}", at.0).into(),
        room_id: room.clone(),
        origin_server_ts: 0,
        bytes: bytes::Bytes::new(),
    }
}

#[test]
fn no_sticky_event_is_lost_in_any_history() {
    for seed in 0..HISTORIES {
        let outcome = std::panic::catch_unwind(|| {
            let mut world = World::new(seed);
            for _ in 0..STEPS {
                world.step();
            }
            world.settle();
        });
        assert!(outcome.is_ok(), "seed {seed}");
    }
}
