//! When the chain of changes that makes up a state group can be trusted.

use super::StoreError;
use crate::core::id::StateGroup;

/// A longer chain is damage: Synapse cuts them at 100, apart from those it makes in one batch. The walk below stops one
/// beyond.
const MAX_CHAIN: i64 = 10_000;

/// What is known of a chain before what it holds is trusted.
pub(super) struct Chain {
    pub(super) group: StateGroup,
    pub(super) length: i64,
    pub(super) stored: i64,
    pub(super) leads_up: bool,
}

impl Chain {
    /// # Errors
    /// [`StoreError::Damaged`] says how it is broken.
    pub(super) fn check(&self) -> Result<(), StoreError> {
        let damaged = |table: &str, what: &str| StoreError::Damaged {
            table: table.to_owned(),
            key: self.group.to_string(),
            what: what.to_owned(),
        };
        if self.length > MAX_CHAIN {
            return Err(damaged(
                "state_group_edges",
                "the chain of changes is longer than 10,000",
            ));
        }
        if self.leads_up {
            return Err(damaged(
                "state_group_edges",
                "the chain of changes leads to a group made later",
            ));
        }
        if self.stored < self.length {
            return Err(damaged("state_groups", "a group of the chain of changes is missing"));
        }
        Ok(())
    }
}
