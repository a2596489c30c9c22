//! What stands in a state group, from the database or remembered.
//!
//! A group never changes once made, so what was read of it stays true.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use parking_lot::Mutex;

use super::map::{StateFilter, StateMap};
use crate::core::{
    id::StateGroup,
    store::{Store, StoreError},
};

/// How many entries of states are remembered in all (about 100 bytes each).
const MAX_ENTRIES: usize = 300_000;

/// The states of the groups asked for in full lately. It never holds more entries than its bound.
#[derive(Default)]
pub struct StateGroups {
    known: Mutex<Known>,
}

#[derive(Default)]
struct Known {
    ticks: u64,
    entries: usize,
    states: HashMap<StateGroup, (u64, Arc<StateMap>)>,
    /// By last use.
    order: BTreeMap<u64, StateGroup>,
}

impl StateGroups {
    /// All that stands in the group.
    ///
    /// # Errors
    /// `Damaged` if the group or its chain is; or if the database does not answer.
    pub async fn state(&self, store: &Store, group: StateGroup) -> Result<Arc<StateMap>, StoreError> {
        if let Some(state) = self.known.lock().get(group) {
            return Ok(state);
        }
        let state = Arc::new(store.group_state(group, &StateFilter::All).await?);
        self.remember(group, Arc::clone(&state));
        Ok(state)
    }

    /// A part of what stands in the group. Of a group that is not remembered no more than that is read.
    ///
    /// # Errors
    /// `Damaged` if the group or its chain is; or if the database does not answer.
    pub async fn part(&self, store: &Store, group: StateGroup, filter: &StateFilter) -> Result<StateMap, StoreError> {
        let known = self.known.lock().get(group);
        match known {
            Some(state) => Ok(filter.of(&state)),
            None => store.group_state(group, filter).await,
        }
    }

    /// Takes in what a group was just stored with.
    pub fn remember(&self, group: StateGroup, state: Arc<StateMap>) {
        self.known.lock().insert(group, state, MAX_ENTRIES);
    }
}

impl Known {
    fn get(&mut self, group: StateGroup) -> Option<Arc<StateMap>> {
        self.ticks += 1;
        let (used, state) = self.states.get_mut(&group)?;
        self.order.remove(used);
        *used = self.ticks;
        self.order.insert(self.ticks, group);
        Some(Arc::clone(state))
    }

    fn insert(&mut self, group: StateGroup, state: Arc<StateMap>, bound: usize) {
        // An empty state takes a place, too.
        let cost = |state: &StateMap| state.len() + 1;
        if self.states.contains_key(&group) || cost(&state) > bound {
            return;
        }
        self.ticks += 1;
        self.entries += cost(&state);
        self.order.insert(self.ticks, group);
        self.states.insert(group, (self.ticks, state));
        while self.entries > bound
            && let Some((_, oldest)) = self.order.pop_first()
            && let Some((_, state)) = self.states.remove(&oldest)
        {
            self.entries -= cost(&state);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::state::map::StateKey;

    #[test]
    fn what_was_not_used_for_longest_is_forgotten_and_the_bound_holds() {
        let state = |size: usize| {
            let entry = |n: usize| (StateKey::new("t", &n.to_string()), "$e".into());
            Arc::new((0..size).map(entry).collect::<StateMap>())
        };
        let mut known = Known::default();
        known.insert(StateGroup(1), state(4), 16);
        known.insert(StateGroup(2), state(4), 16);
        known.insert(StateGroup(3), state(4), 16);
        assert!(known.get(StateGroup(1)).is_some());
        known.insert(StateGroup(4), state(4), 16);
        assert!(known.get(StateGroup(2)).is_none());
        assert!(
            [1, 3, 4]
                .into_iter()
                .all(|group| known.get(StateGroup(group)).is_some())
        );
        assert_eq!(known.entries, 15);
        known.insert(StateGroup(5), state(16), 16);
        assert!(known.get(StateGroup(5)).is_none(), "too large for any place");
        known.insert(StateGroup(6), state(15), 16);
        assert!(known.get(StateGroup(6)).is_some());
        assert_eq!((known.entries, known.states.len(), known.order.len()), (16, 1, 1));
    }
}
