//! How far the event cursor may move: which events are still held back, and by how many.

use std::collections::BTreeMap;

use crate::core::id::StreamOrdering;

/// Events that some live destination has not accepted, each with the number of those.
#[derive(Debug, Default)]
pub struct Outstanding {
    held: BTreeMap<StreamOrdering, usize>,
}

impl Outstanding {
    /// One more holds this event back.
    pub fn hold(&mut self, ordering: StreamOrdering) {
        *self.held.entry(ordering).or_default() += 1;
    }

    /// One fewer does.
    pub fn release(&mut self, ordering: StreamOrdering) {
        let Some(count) = self.held.get_mut(&ordering) else {
            debug_assert!(false, "{ordering} was not held");
            return;
        };
        *count -= 1;
        if *count == 0 {
            self.held.remove(&ordering);
        }
    }

    /// The lowest event that is held back.
    #[must_use]
    pub fn lowest(&self) -> Option<StreamOrdering> {
        self.held.first_key_value().map(|(ordering, _)| *ordering)
    }

    /// How many events are held back.
    #[must_use]
    pub fn len(&self) -> usize {
        self.held.len()
    }

    /// Whether none is.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }
}
