//! Where an instance resumes, and what happens to the positions when the set of sender instances changed. Without I/O.

use std::collections::{BTreeMap, BTreeSet};

use super::{EventCursor, StoreError};
use crate::core::id::StreamOrdering;

/// A row of our `instances`: name, event cursor, delta cursor, list of senders.
pub(super) type Remembered = (String, Option<i64>, Option<i64>, Option<String>);

/// What the tables hold before we change anything.
#[derive(Debug, Default)]
pub(super) struct Found {
    /// Rows of type `events`.
    events: BTreeMap<String, i64>,
    /// Rows of type `federation`.
    federation: BTreeMap<String, i64>,
    /// What Burdock remembers: event cursor and delta cursor.
    ours: BTreeMap<String, (Option<i64>, Option<i64>)>,
    /// The lists of senders that their positions were kept under.
    senders: BTreeMap<String, String>,
}

/// What follows from it.
#[derive(Debug, PartialEq)]
pub(super) struct Plan {
    pub(super) cursor: EventCursor,
    /// The set of instances changed: every configured one is to be given `cursor`, and this for `federation`.
    pub(super) reset_federation_to: Option<i64>,
}

impl Found {
    /// From rows of `federation_stream_position` (type, instance, position), and of our `instances`.
    pub(super) fn new(positions: &[(String, String, i64)], ours: Vec<Remembered>) -> Self {
        let of_type = |wanted: &str| {
            let rows = positions.iter().filter(|(kind, ..)| kind == wanted);
            rows.map(|(_, name, position)| (name.clone(), *position)).collect()
        };
        Self {
            events: of_type("events"),
            federation: of_type("federation"),
            senders: ours
                .iter()
                .filter_map(|(name, _, _, senders)| Some((name.clone(), senders.clone()?)))
                .collect(),
            ours: ours
                .into_iter()
                .map(|(name, events, deltas, _)| (name, (events, deltas)))
                .collect(),
        }
    }

    /// What a start of `me` under the list `places` does.
    ///
    /// # Errors
    /// [`StoreError::Damaged`] if there is no position to start from, [`StoreError::TakenOver`] if `places` lacks `me`.
    pub(super) fn plan(&self, places: &[&str], me: &str) -> Result<Plan, StoreError> {
        let configured: BTreeSet<&str> = places.iter().copied().collect();
        let senders = places.join("\n");
        let same_senders = configured
            .iter()
            .all(|name| self.senders.get(*name).is_none_or(|was| *was == senders));
        if !configured.contains(me) {
            return Err(StoreError::TakenOver);
        }
        let complete = |rows: &BTreeMap<String, i64>| rows.keys().map(String::as_str).eq(configured.iter().copied());
        if same_senders
            && complete(&self.events)
            && complete(&self.federation)
            && let Some((me, position)) = self.events.get_key_value(me)
        {
            return Ok(Plan {
                cursor: self.lowest([(me, *position)], *position),
                reset_federation_to: None,
            });
        }
        match (self.events.values().min(), self.federation.values().min()) {
            (Some(events), Some(federation)) => Ok(Plan {
                cursor: self.lowest(self.events.iter().map(|(name, position)| (name, *position)), *events),
                reset_federation_to: Some(*federation),
            }),
            _ => Err(StoreError::Damaged {
                table: "federation_stream_position".into(),
                key: "type".into(),
                what: "there is no row of type `events` or none of type `federation`; Synapse makes both with its \
                       schema"
                    .into(),
            }),
        }
    }

    /// The cursor at `position`, the lowest of `sources`. It is our own work only if all of them are, and the deltas
    /// are read from the lowest cursor into them, if all are known.
    fn lowest<'a>(&self, sources: impl IntoIterator<Item = (&'a String, i64)>, position: i64) -> EventCursor {
        let (mut ours, mut deltas) = (true, Some(i64::MAX));
        for (name, source) in sources {
            let (event_cursor, delta_cursor) = self.ours.get(name).copied().unwrap_or_default();
            ours &= event_cursor == Some(source);
            deltas = deltas.zip(delta_cursor).map(|(a, b)| a.min(b));
        }
        EventCursor {
            position: StreamOrdering(position),
            ours,
            deltas: deltas.map(StreamOrdering),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(rows: &[(&str, i64)]) -> BTreeMap<String, i64> {
        rows.iter()
            .map(|(name, position)| ((*name).to_owned(), *position))
            .collect()
    }

    fn found(events: &[(&str, i64)], ours: &[(&str, Option<i64>, Option<i64>)]) -> Found {
        Found {
            events: rows(events),
            federation: rows(events),
            ours: ours
                .iter()
                .map(|(name, event, delta)| ((*name).to_owned(), (*event, *delta)))
                .collect(),
            senders: BTreeMap::new(),
        }
    }

    fn cursor(position: i64, ours: bool, deltas: Option<i64>) -> EventCursor {
        EventCursor {
            position: StreamOrdering(position),
            ours,
            deltas: deltas.map(StreamOrdering),
        }
    }

    fn plan(found: &Found, configured: &[&str]) -> Plan {
        found.plan(configured, "a").unwrap()
    }

    #[test]
    fn an_unchanged_set_resumes_at_its_own_row() {
        let found = found(&[("a", 7), ("b", 3)], &[("a", Some(7), Some(6))]);
        assert_eq!(
            plan(&found, &["b", "a"]),
            Plan {
                cursor: cursor(7, true, Some(6)),
                reset_federation_to: None
            }
        );
    }

    #[test]
    fn a_position_moved_by_synapses_sender_is_not_ours_but_the_deltas_are() {
        let found = found(&[("a", 9)], &[("a", Some(7), Some(6))]);
        assert_eq!(plan(&found, &["a"]).cursor, cursor(9, false, Some(6)));
    }

    #[test]
    fn a_changed_set_starts_at_the_lowest_of_all() {
        let found = found(
            &[("a", 7), ("b", 3)],
            &[("a", Some(7), Some(6)), ("b", Some(3), Some(5))],
        );
        assert_eq!(
            plan(&found, &["a"]),
            Plan {
                cursor: cursor(3, true, Some(5)),
                reset_federation_to: Some(3)
            }
        );
        assert_eq!(plan(&found, &["a", "b", "c"]).cursor, cursor(3, true, Some(5)));
    }

    #[test]
    fn another_order_is_another_set() {
        let mut found = found(
            &[("a", 7), ("b", 3)],
            &[("a", Some(7), Some(6)), ("b", Some(3), Some(5))],
        );
        let kept_under = |name: &str| (name.to_owned(), "a\nb".to_owned());
        found.senders = ["a", "b"].map(kept_under).into();
        assert_eq!(plan(&found, &["a", "b"]).cursor, cursor(7, true, Some(6)));
        assert_eq!(plan(&found, &["b", "a"]).cursor, cursor(3, true, Some(5)));
        assert_eq!(plan(&found, &["b", "a"]).reset_federation_to, Some(3));
    }

    #[test]
    fn a_changed_set_is_ours_only_if_every_member_was() {
        let found = found(&[("a", 7), ("b", 3)], &[("b", Some(3), Some(5))]);
        assert_eq!(plan(&found, &["a"]).cursor, cursor(3, false, None));
    }

    #[test]
    fn a_set_that_lacks_one_kind_of_row_is_completed() {
        let mut found = found(&[("a", 7), ("b", 3)], &[]);
        found.federation = rows(&[("a", 1)]);
        assert_eq!(plan(&found, &["a", "b"]).reset_federation_to, Some(1));
        found.federation = rows(&[]);
        assert!(matches!(found.plan(&["a", "b"], "a"), Err(StoreError::Damaged { .. })));
    }

    #[test]
    fn who_is_not_configured_does_not_start() {
        assert_eq!(found(&[("a", 7)], &[]).plan(&["b"], "a"), Err(StoreError::TakenOver));
    }
}
