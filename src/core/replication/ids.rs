//! Which position may a writer say of itself while it has ids in flight, and up to where have all persisted?
//!
//! The writers of a stream take ids from one source (a sequence; on SQLite the greatest id and one more, inside the
//! writing transaction). An id of the source is greater than every id that was known to be persisted when it was asked.
//! Everything rests on that: a writer with nothing in flight may say the greatest position it knows of anybody, for what
//! it will ever write lies above. One with something in flight stays below that. So the minimum over all writers moves
//! though only one of them writes.
//!
//! A finished id waits for the lower ones that are unfinished, and its rows with it: readers drop what comes late.
//! An id that was abandoned was never there. It holds nothing back, and the source may give it out again.

use std::collections::{BTreeMap, BTreeSet};

use crate::core::{
    id::{InstanceName, Token},
    replication::{
        gap::Group,
        positions::{Position, Positions},
    },
};

/// Rows that wait for unfinished ids below them at most. What is beyond is announced by position alone.
const MAX_WAITING: usize = 10_000;

/// Names one write, from the question for its ids to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct WriteKey(u64);

/// The source gave out an id that readers take for known already, so its rows would be dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "id {id} of stream {stream} is not above {known}, which is persisted already: the source of ids (its sequence) lags \
     behind the tables and must be set past their greatest id"
)]
pub struct StaleId {
    /// The stream.
    pub stream: &'static str,
    /// The id.
    pub id: i64,
    /// What it should be above.
    pub known: i64,
}

/// What to publish, in this order.
#[derive(Debug)]
pub enum Ready {
    /// Rows that share a position.
    Rows(Group),
    /// A position whose rows were too many to keep.
    Skipped(Token),
}

/// The ids of one stream, as one of its writers sees them.
#[derive(Debug)]
pub struct Ids<P> {
    /// What was heard of the others, and seen of our own.
    positions: Positions<P>,
    /// Ours are finished up to here, and it is persisted itself, by whomever.
    own: P,
    /// Questions to the source on their way, each with a position that its ids will be above.
    asked: BTreeMap<WriteKey, P>,
    unfinished: BTreeSet<(P, WriteKey)>,
    /// Finished, and something below is not.
    finished: BTreeMap<P, Ready>,
    rows_waiting: usize,
    last_key: u64,
}

impl<P: Position> Ids<P> {
    /// The ids as `me` finds them at its start, having nothing in flight.
    #[must_use]
    pub fn new(me: &InstanceName, mut positions: Positions<P>) -> Self {
        positions.leave_out(me);
        let own = positions.greatest();
        let mut ids = Self {
            positions,
            own,
            asked: BTreeMap::new(),
            unfinished: BTreeSet::new(),
            finished: BTreeMap::new(),
            rows_waiting: 0,
            last_key: 0,
        };
        ids.settle();
        ids
    }

    /// What we may say of ourselves: everything of ours up to here is finished, and nothing will follow below.
    #[must_use]
    pub fn position(&self) -> P {
        self.own.max(self.positions.up_to())
    }

    /// Everything at or below this is persisted by all writers.
    #[must_use]
    pub fn up_to(&self) -> P {
        self.positions.up_to()
    }

    /// The source is about to be asked.
    pub fn ask(&mut self) -> WriteKey {
        self.last_key += 1;
        let key = WriteKey(self.last_key);
        self.asked.insert(key, self.known());
        key
    }

    /// It answered. Gives what can be published now.
    ///
    /// # Errors
    /// An id that is too low; the write must be abandoned.
    pub fn drawn(&mut self, key: WriteKey, ids: &[P]) -> Result<Vec<Ready>, StaleId> {
        let Some(known) = self.asked.get(&key).copied() else {
            return Ok(Vec::new());
        };
        if let Some(id) = ids.iter().find(|id| **id <= known) {
            return Err(StaleId {
                stream: P::STREAM.name(),
                id: id.token().0,
                known: known.token().0,
            });
        }
        self.asked.remove(&key);
        self.unfinished.extend(ids.iter().map(|id| (*id, key)));
        Ok(self.settle())
    }

    /// The write is committed, with these rows. Gives what can be published now.
    pub fn finish(&mut self, key: WriteKey, ids: &[P], rows: Vec<Group>) -> Vec<Ready> {
        self.asked.remove(&key);
        for id in ids {
            if self.unfinished.remove(&(*id, key)) {
                let empty = Group {
                    token: id.token(),
                    rows: Vec::new(),
                };
                self.finished.insert(*id, Ready::Rows(empty));
            }
        }
        for group in rows {
            let Some(waiting) = self.finished.get_mut(&P::at(group.token)) else {
                continue;
            };
            if self.rows_waiting + group.rows.len() > MAX_WAITING {
                *waiting = Ready::Skipped(group.token);
            } else {
                self.rows_waiting += group.rows.len();
                *waiting = Ready::Rows(group);
            }
        }
        self.settle()
    }

    /// The write is off: nothing of it was or will be committed. Gives what can be published now.
    pub fn abandon(&mut self, key: WriteKey, ids: &[P]) -> Vec<Ready> {
        self.asked.remove(&key);
        for id in ids {
            self.unfinished.remove(&(*id, key));
        }
        self.settle()
    }

    /// Another writer said its position.
    pub fn heard(&mut self, writer: &InstanceName, position: P) {
        self.positions.note(writer, position);
        self.settle();
    }

    /// The greatest id that is known to be given out and not abandoned.
    fn known(&self) -> P {
        let unfinished = self.unfinished.last().map(|(id, _)| *id);
        let finished = self.finished.last_key_value().map(|(id, _)| *id);
        let known = [unfinished, finished].into_iter().flatten().max();
        self.position()
            .max(self.positions.greatest())
            .max(known.unwrap_or_default())
    }

    /// No id of ours in flight is at or below this. `None`: nothing is in flight.
    fn limit(&self) -> Option<P> {
        let unfinished = self.unfinished.first().map(|(id, _)| id.before());
        self.asked.values().copied().chain(unfinished).min()
    }

    fn settle(&mut self) -> Vec<Ready> {
        let limit = self.limit();
        let mut ready = Vec::new();
        while let Some(entry) = self.finished.first_entry() {
            if limit.is_some_and(|limit| *entry.key() > limit) {
                break;
            }
            let (id, waiting) = entry.remove_entry();
            self.own = self.own.max(id);
            self.positions.saw(id);
            if let Ready::Rows(group) = &waiting {
                self.rows_waiting -= group.rows.len();
            }
            ready.push(waiting);
        }
        if limit.is_none() {
            self.own = self.own.max(self.positions.greatest());
        }
        self.positions.raise(Some(limit.unwrap_or(self.own)));
        ready
    }
}

#[cfg(test)]
#[path = "ids_tests.rs"]
mod tests;
