//! What do a room version's rules say? Whether an event has the right form, whether it is allowed, and what the state is
//! where the room forked.
//!
//! The rules are `ruma-state-res`'s. None of its types leaves this folder.

mod authorisation;
mod event;
mod resolution;

use ruma_common::{CanonicalJsonObject, room_version_rules::RoomVersionRules};

pub use self::{
    authorisation::{auth_check, auth_keys, check_auth_events, check_keys},
    event::RoomEvent,
    resolution::{Resolution, Step},
};
use crate::core::room_version::RoomVersion;

/// Why an event is not accepted, or a state not resolved.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RulesError {
    /// It is not of the form that the room version demands, and is to be dropped.
    #[error("not an event of this room version: {0}")]
    Malformed(String),
    /// It is not allowed.
    #[error("not allowed: {0}")]
    Forbidden(String),
    /// The fork cannot be resolved.
    #[error("the state cannot be resolved: {0}")]
    Unresolvable(String),
}

fn rules(version: RoomVersion) -> RoomVersionRules {
    match version.number() {
        ..=1 => RoomVersionRules::V1,
        2 => RoomVersionRules::V2,
        3 => RoomVersionRules::V3,
        4 => RoomVersionRules::V4,
        5 => RoomVersionRules::V5,
        6 => RoomVersionRules::V6,
        7 => RoomVersionRules::V7,
        8 => RoomVersionRules::V8,
        9 => RoomVersionRules::V9,
        10 => RoomVersionRules::V10,
        11 => RoomVersionRules::V11,
        12.. => RoomVersionRules::V12,
    }
}

/// Checks sizes, and that the parts every event has are there; and, as from room version 6 on an event must, that it holds
/// no number but integers that are exact everywhere.
///
/// # Errors
/// `Malformed`.
pub fn check_format(json: &str, version: RoomVersion) -> Result<(), RulesError> {
    let event: CanonicalJsonObject =
        serde_json::from_str(json).map_err(|error| RulesError::Malformed(error.to_string()))?;
    ruma_state_res::check_pdu_format(&event, &rules(version).event_format).map_err(RulesError::Malformed)
}
