//! What a room's state is: which event stands under each pair of type and state key.

use std::{collections::BTreeMap, sync::Arc};

use crate::core::id::{EventId, RoomId, StateGroup};

/// A state event's type and state key.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StateKey {
    /// `type`.
    pub kind: Arc<str>,
    /// `state_key`.
    pub key: Arc<str>,
}

impl StateKey {
    /// The pair of these.
    #[must_use]
    pub fn new(kind: &str, key: &str) -> Self {
        Self {
            kind: kind.into(),
            key: key.into(),
        }
    }

    /// A user's membership.
    #[must_use]
    pub fn member(user: &str) -> Self {
        Self::new("m.room.member", user)
    }
}

/// The event under each key.
pub type StateMap = BTreeMap<StateKey, EventId>;

/// What differs from another state: the event that stands under a key now, or none where one stood.
pub type StateDelta = BTreeMap<StateKey, Option<EventId>>;

/// What makes `new` out of `old`.
#[must_use]
pub fn delta(old: &StateMap, new: &StateMap) -> StateDelta {
    let set = new.iter().filter(|(key, event)| old.get(*key) != Some(*event));
    let gone = old.keys().filter(|key| !new.contains_key(*key));
    set.map(|(key, event)| (key.clone(), Some(event.clone())))
        .chain(gone.map(|key| (key.clone(), None)))
        .collect()
}

/// Makes the changes.
pub fn apply(state: &mut StateMap, changes: &StateDelta) {
    for (key, event) in changes {
        match event {
            Some(event) => state.insert(key.clone(), event.clone()),
            None => state.remove(key),
        };
    }
}

/// Which part of a state is asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StateFilter {
    /// All of it.
    All,
    /// What stands under these keys.
    Keys(Vec<StateKey>),
    /// What is of these types.
    Types(Vec<Arc<str>>),
}

impl StateFilter {
    /// The part of `state` that is asked for.
    #[must_use]
    pub fn of(&self, state: &StateMap) -> StateMap {
        let entry = |(key, event): (&StateKey, &EventId)| (key.clone(), event.clone());
        match self {
            Self::All => state.clone(),
            Self::Keys(keys) => keys
                .iter()
                .filter_map(|key| state.get_key_value(key))
                .map(entry)
                .collect(),
            Self::Types(kinds) => state
                .iter()
                .filter(|(key, _)| kinds.contains(&key.kind))
                .map(entry)
                .collect(),
        }
    }
}

/// A state group's predecessor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PreviousGroup {
    /// It is stored.
    Stored(StateGroup),
    /// It is that one of the same call; it comes earlier.
    Earlier(usize),
}

/// How many changes a group may be away from the full one below it: each costs every reader a step.
pub const MAX_HOPS: i64 = 100;

/// A state group to be stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewStateGroup {
    /// Its room.
    pub room_id: RoomId,
    /// The event it is made for.
    pub event_id: EventId,
    /// The group it differs from, of the same room; absent = from an empty state.
    pub previous: Option<PreviousGroup>,
    /// In what it differs.
    pub changes: StateDelta,
}

impl NewStateGroup {
    /// Whether it must be stored in full and not as what it changes, if the previous group is that many changes away from
    /// a full one.
    #[must_use]
    pub fn must_be_full(&self, hops_of_previous: i64) -> bool {
        hops_of_previous >= MAX_HOPS || self.changes.values().any(Option::is_none)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn state() -> impl Strategy<Value = StateMap> {
        let entry = (0..4_u8, 0..3_u8, 0..9_u8).prop_map(|(kind, key, event)| {
            (
                StateKey::new(&format!("t{kind}"), &key.to_string()),
                EventId::from(format!("${event}")),
            )
        });
        prop::collection::btree_map(
            entry.clone().prop_map(|entry| entry.0),
            entry.prop_map(|entry| entry.1),
            0..10,
        )
    }

    proptest! {
        #[test]
        fn a_delta_makes_the_one_out_of_the_other_and_names_no_more_than_it_must(old in state(), new in state()) {
            let changes = delta(&old, &new);
            let mut made = old.clone();
            apply(&mut made, &changes);
            prop_assert_eq!(&made, &new);
            for (key, event) in &changes {
                prop_assert_ne!(old.get(key), event.as_ref());
            }
        }
    }

    #[test]
    fn a_filter_takes_its_part() {
        let entry = |kind, key, event| (StateKey::new(kind, key), EventId::from(event));
        let state = StateMap::from([entry("a", "", "$1"), entry("a", "x", "$2"), entry("b", "", "$3")]);
        let found = |filter: StateFilter| {
            filter
                .of(&state)
                .into_values()
                .map(|id| id.to_string())
                .collect::<Vec<_>>()
        };
        assert_eq!(found(StateFilter::All), ["$1", "$2", "$3"]);
        let keys = vec![StateKey::new("a", "x"), StateKey::new("c", ""), StateKey::new("b", "")];
        assert_eq!(found(StateFilter::Keys(keys)), ["$2", "$3"]);
        assert_eq!(found(StateFilter::Types(vec!["a".into(), "c".into()])), ["$1", "$2"]);
    }
}
