//! Up to where has every writer of a stream persisted everything?
//!
//! The writers take ids from one sequence and commit in any order. The answer is never below the least position of all
//! writers; beyond that it climbs over ids that have been seen without a hole, so that one idle writer does not pin it.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BinaryHeap},
    fmt::Debug,
};

use crate::core::{
    id::{InstanceName, StickyPosition, StreamOrdering, Token},
    replication::stream::Stream,
};

/// How many seen ids above the answer are remembered. Forgetting one is safe: the answer then waits for the writers'
/// own positions.
const MAX_SEEN: usize = 1_000_000;

/// A position in a stream whose ids several writers take from one source.
pub trait Position: Copy + Ord + Default + Debug + Send + Sync + 'static {
    /// The stream.
    const STREAM: Stream;

    /// The source of its ids in PostgreSQL.
    const SEQUENCE: &'static str;

    /// From what stands on the wire.
    fn at(token: Token) -> Self;

    /// As it stands on the wire.
    fn token(self) -> Token;

    /// The position just below.
    #[must_use]
    fn before(self) -> Self {
        Self::at(Token(self.token().0.saturating_sub(1)))
    }
}

impl Position for StreamOrdering {
    const STREAM: Stream = Stream::Events;
    const SEQUENCE: &'static str = "events_stream_seq";

    fn at(token: Token) -> Self {
        Self(token.0)
    }

    fn token(self) -> Token {
        Token(self.0)
    }
}

impl Position for StickyPosition {
    const STREAM: Stream = Stream::StickyEvents;
    const SEQUENCE: &'static str = "sticky_events_sequence";

    fn at(token: Token) -> Self {
        Self(token.0)
    }

    fn token(self) -> Token {
        Token(self.0)
    }
}

/// The position of every writer, and what follows from them.
#[derive(Debug, Clone)]
pub struct Positions<P = StreamOrdering> {
    writers: BTreeMap<InstanceName, P>,
    seen: BinaryHeap<Reverse<P>>,
    up_to: P,
    greatest: P,
}

impl<P: Position> Positions<P> {
    /// Where reading the tables begins at start-up: the least position that `stored` (rows of `stream_positions`) has for
    /// one of the configured `writers`. `None`: there is none, only the greatest id of each table is wanted.
    #[must_use]
    pub fn oldest_stored(writers: &[InstanceName], stored: &[(InstanceName, P)]) -> Option<P> {
        known(writers, stored).map(|(_, position)| *position).min()
    }

    /// The positions at start-up. `ids`: every id of the stream's tables at or above [`Self::oldest_stored`], in any
    /// order; if that is `None`, the greatest id of each table.
    #[must_use]
    pub fn at_start(writers: &[InstanceName], stored: &[(InstanceName, P)], ids: impl IntoIterator<Item = P>) -> Self {
        let ids = ids.into_iter();
        let mut positions = match Self::oldest_stored(writers, stored) {
            // Synapse's sequences begin with 2: 1 counts as seen.
            None => Self::at(ids.max().unwrap_or(P::at(Token(1)))),
            Some(oldest) => {
                let mut positions = Self::at(oldest);
                for (writer, position) in known(writers, stored) {
                    positions.writers.insert(writer.clone(), *position);
                    positions.greatest = positions.greatest.max(*position);
                }
                let mut ids: Vec<_> = ids.collect();
                ids.sort_unstable();
                for id in ids {
                    positions.saw(id);
                    positions.climb();
                }
                positions
            }
        };
        for writer in writers {
            positions.writers.entry(writer.clone()).or_insert(positions.up_to);
        }
        positions
    }

    fn at(up_to: P) -> Self {
        Self {
            writers: BTreeMap::new(),
            seen: BinaryHeap::new(),
            up_to,
            greatest: up_to,
        }
    }

    /// Everything at or below this is persisted by all writers.
    #[must_use]
    pub fn up_to(&self) -> P {
        self.up_to
    }

    /// The greatest id that is known to be persisted.
    #[must_use]
    pub fn greatest(&self) -> P {
        self.greatest
    }

    /// `writer` has persisted `token` and everything of its own below. A lower token than before changes nothing.
    pub fn advance(&mut self, writer: &InstanceName, token: P) {
        self.note(writer, token);
        self.raise(None);
    }

    /// Like [`Self::advance`], but what follows waits for [`Self::raise`].
    pub(super) fn note(&mut self, writer: &InstanceName, token: P) {
        let position = self.writers.entry(writer.clone()).or_insert(token);
        *position = token.max(*position);
        self.saw(token);
    }

    /// `writer` speaks for itself from now on, by the limit of [`Self::raise`].
    pub(super) fn leave_out(&mut self, writer: &InstanceName) {
        self.writers.remove(writer);
    }

    /// `id` is persisted.
    pub(super) fn saw(&mut self, id: P) {
        self.greatest = self.greatest.max(id);
        if id > self.up_to && self.seen.len() < MAX_SEEN {
            self.seen.push(Reverse(id));
        }
    }

    /// Works out anew up to where all have persisted. `limit`: the position of the writer that was left out.
    pub(super) fn raise(&mut self, limit: Option<P>) {
        let least = self.writers.values().copied().chain(limit).min();
        self.up_to = self.up_to.max(least.unwrap_or(self.up_to));
        self.climb();
    }

    fn climb(&mut self) {
        while let Some(Reverse(lowest)) = self.seen.peek().copied() {
            if lowest.before() > self.up_to {
                break;
            }
            self.up_to = self.up_to.max(lowest);
            self.seen.pop();
        }
    }
}

fn known<'a, P>(
    writers: &'a [InstanceName],
    stored: &'a [(InstanceName, P)],
) -> impl Iterator<Item = &'a (InstanceName, P)> {
    stored.iter().filter(|(name, _)| writers.contains(name))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn names(names: &[&str]) -> Vec<InstanceName> {
        names.iter().map(|name| InstanceName::from(*name)).collect()
    }

    fn stored(rows: &[(&str, i64)]) -> Vec<(InstanceName, StreamOrdering)> {
        rows.iter()
            .map(|(name, position)| (InstanceName::from(*name), StreamOrdering(*position)))
            .collect()
    }

    fn ids(ids: &[i64]) -> Vec<StreamOrdering> {
        ids.iter().copied().map(StreamOrdering).collect()
    }

    #[test]
    fn the_worked_run_of_the_reference() {
        let writers = names(&["a", "b"]);
        let mut positions = Positions::at_start(&writers, &stored(&[("a", 5), ("b", 7)]), []);
        assert_eq!(positions.up_to(), StreamOrdering(5));
        for (writer, token, up_to) in [
            ("a", 6, 6),
            ("b", 9, 6),
            ("a", 8, 9),
            ("a", 12, 9),
            ("b", 10, 10),
            ("b", 11, 12),
        ] {
            positions.advance(&writer.into(), StreamOrdering(token));
            assert_eq!(positions.up_to(), StreamOrdering(up_to), "{writer} to {token}");
        }
    }

    #[test]
    fn at_start_it_climbs_to_the_first_hole() {
        let writers = names(&["a", "b", "new"]);
        let rows = stored(&[("a", 5), ("b", 7), ("gone", 2)]);
        assert_eq!(Positions::oldest_stored(&writers, &rows), Some(StreamOrdering(5)));
        let mut positions = Positions::at_start(&writers, &rows, ids(&[9, 7, 6, 5, 6]));
        assert_eq!(
            positions.up_to(),
            StreamOrdering(7),
            "8 is missing; the writer that is gone holds nothing"
        );
        positions.advance(&"a".into(), StreamOrdering(8));
        assert_eq!(positions.up_to(), StreamOrdering(9), "9 was in the tables");
    }

    #[test]
    fn with_nothing_stored_the_tables_decide() {
        let writers = names(&["master"]);
        assert_eq!(
            Positions::<StreamOrdering>::oldest_stored(&writers, &stored(&[("other", 9)])),
            None
        );
        assert_eq!(
            Positions::<StreamOrdering>::at_start(&writers, &[], ids(&[17, 40])).up_to(),
            StreamOrdering(40)
        );
        assert_eq!(
            Positions::<StreamOrdering>::at_start(&writers, &[], []).up_to(),
            StreamOrdering(1)
        );
    }

    #[test]
    fn the_ends_of_the_number_range_are_harmless() {
        let mut positions = Positions::at_start(&names(&["a", "b"]), &[], []);
        for token in [i64::MAX, i64::MIN, i64::MAX, 2] {
            positions.advance(&"b".into(), StreamOrdering(token));
        }
        assert_eq!(positions.up_to(), StreamOrdering(2));
    }

    proptest! {
        /// Ids are given to writers at random; each writer announces its own in order, the writers interleaved at random.
        #[test]
        fn it_never_passes_a_hole_and_never_goes_down(owners in proptest::collection::vec(0_usize..3, 1..60), picks in proptest::collection::vec(0_usize..3, 0..90)) {
            let writers = names(&["a", "b", "c"]);
            let mut positions = Positions::at_start(&writers, &[], []);
            let mut announced = [1_i64; 3];
            let id = |index: usize| i64::try_from(index).unwrap() + 2;
            for pick in picks {
                let next = (0..owners.len()).find(|&index| owners[index] == pick && id(index) > announced[pick]);
                let first_hole = |announced: &[i64; 3]| {
                    let hole = (0..owners.len()).find(|&index| announced[owners[index]] < id(index));
                    id(hole.unwrap_or(owners.len()))
                };
                // A writer that has nothing left says how far all are: POSITION does that for idle writers.
                announced[pick] = next.map_or(announced[pick].max(first_hole(&announced) - 1), id);
                let before = positions.up_to();
                positions.advance(&writers[pick], StreamOrdering(announced[pick]));
                prop_assert!(positions.up_to() >= before);
                prop_assert!(positions.up_to().0 < first_hole(&announced));
            }
        }
    }
}
