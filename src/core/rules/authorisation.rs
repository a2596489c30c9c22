//! Is an event allowed, and by which others?

use std::collections::BTreeMap;

use ruma_common::UserId;
use ruma_events::TimelineEventType;
use ruma_state_res::{auth_types_for_event, check_state_dependent_auth_rules, check_state_independent_auth_rules};
use serde_json::value::RawValue;

use super::{RoomEvent, RulesError, rules};
use crate::core::{
    id::EventId,
    room_version::RoomVersion,
    state::map::{StateKey, StateMap},
};

/// The keys of the state before an event whose events it must name as `auth_events`.
///
/// # Errors
/// `Malformed` if what the choice depends on is.
pub fn auth_keys(
    version: RoomVersion,
    kind: &str,
    sender: &str,
    state_key: Option<&str>,
    content: &str,
) -> Result<Vec<StateKey>, RulesError> {
    let sender = <&UserId>::try_from(sender).map_err(|error| RulesError::Malformed(format!("sender: {error}")))?;
    let content: &RawValue =
        serde_json::from_str(content).map_err(|error| RulesError::Malformed(format!("content: {error}")))?;
    let kind = TimelineEventType::from(kind);
    let chosen = auth_types_for_event(&kind, sender, state_key, content, &rules(version).authorization)
        .map_err(RulesError::Malformed)?;
    Ok(chosen
        .iter()
        .map(|(kind, key)| StateKey::new(&kind.to_string(), key))
        .collect())
}

/// The keys that [`auth_check`] looks at: those of [`auth_keys`], and the create event in any room version.
///
/// # Errors
/// `Malformed` if what the choice depends on is.
pub fn check_keys(version: RoomVersion, event: &RoomEvent) -> Result<Vec<StateKey>, RulesError> {
    use ruma_state_res::Event;
    let mut keys = auth_keys(
        version,
        &event.event_type().to_string(),
        event.sender().as_str(),
        Event::state_key(event),
        event.content().get(),
    )?;
    let create = StateKey::new("m.room.create", "");
    if !keys.contains(&create) {
        keys.push(create);
    }
    Ok(keys)
}

/// Checks what needs no state: that a create event is sound, and that another names as `auth_events` none but those it
/// should, none of them twice, none rejected. `known` holds those it names, and the room's create event.
///
/// # Errors
/// `Forbidden`: the event is to be rejected.
pub fn check_auth_events(
    version: RoomVersion,
    event: &RoomEvent,
    known: &BTreeMap<EventId, RoomEvent>,
) -> Result<(), RulesError> {
    check_state_independent_auth_rules(&rules(version).authorization, event, |id| {
        known.get(id.as_str()).cloned()
    })
    .map_err(RulesError::Forbidden)
}

/// Checks an event against a state: that of its own `auth_events`, then that before it (on failure of either it is rejected),
/// then the current one (on failure it is soft-failed). `state` is that state at [`check_keys`], `known` its events.
///
/// # Errors
/// `Forbidden`.
pub fn auth_check(
    version: RoomVersion,
    event: &RoomEvent,
    state: &StateMap,
    known: &BTreeMap<EventId, RoomEvent>,
) -> Result<(), RulesError> {
    check_state_dependent_auth_rules(&rules(version).authorization, event, |kind, key| {
        let id = state.get(&StateKey::new(&kind.to_string(), key))?;
        known.get(id).cloned()
    })
    .map_err(RulesError::Forbidden)
}
