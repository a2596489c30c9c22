//! When the chain of changes that makes up a state group can be trusted, and when it may be made longer.

use super::StoreError;
use crate::core::{
    id::{RoomId, StateGroup},
    state::map::{NewStateGroup, PreviousGroup},
};

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

/// Whether a group of `room_id` may follow `previous`, which is stored for `room_of_previous` (if it is stored).
///
/// # Errors
/// [`StoreError::Damaged`] if not.
pub(super) fn may_follow(
    previous: StateGroup,
    room_of_previous: Option<&str>,
    room_id: &RoomId,
) -> Result<(), StoreError> {
    let damaged = |what: String| StoreError::Damaged {
        table: "state_groups".to_owned(),
        key: previous.to_string(),
        what,
    };
    match room_of_previous {
        None => Err(damaged("a group that another is to follow is missing".to_owned())),
        Some(room) if room != room_id.as_str() => Err(damaged(format!(
            "a group of room {room} is to be followed by one of {room_id}"
        ))),
        Some(_) => Ok(()),
    }
}

/// The group that a new one follows; `earlier` are the ids of those stored before it in the same call.
///
/// # Errors
/// [`StoreError::Damaged`] if there is none.
pub(super) fn previous(group: &NewStateGroup, earlier: &[StateGroup]) -> Result<Option<StateGroup>, StoreError> {
    match group.previous {
        None => Ok(None),
        Some(PreviousGroup::Stored(previous)) => Ok(Some(previous)),
        Some(PreviousGroup::Earlier(index)) => match earlier.get(index) {
            Some(previous) => Ok(Some(*previous)),
            None => Err(StoreError::Damaged {
                table: "state_groups".to_owned(),
                key: format!("(number {} of one call)", earlier.len()),
                what: format!("it is to follow number {index}, which does not come before it"),
            }),
        },
    }
}
