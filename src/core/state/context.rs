//! The state before an event and after it.
//!
//! The state before is that after its previous events; where those differ, the room forked there, and their states are
//! resolved. An event that is no state event, or is rejected, changes nothing: it shares the group before it, and nothing is
//! stored.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use super::{
    groups::StateGroups,
    map::{self, NewStateGroup, PreviousGroup, StateDelta, StateFilter, StateKey, StateMap},
};
use crate::core::{
    event::NewEvent,
    id::{EventId, RoomId, StateGroup},
    room_version::RoomVersion,
    rules::{self, Resolution, RoomEvent, RulesError, Step},
    store::{EventJson, Store, StoreError},
};

/// Where contexts are computed from: what is stored, and what a caller knows besides.
pub trait StateReader: Sync {
    /// See [`Store::groups_after`].
    fn groups_after(
        &self,
        events: &[EventId],
    ) -> impl Future<Output = Result<HashMap<EventId, StateGroup>, StoreError>> + Send;

    /// See [`StateGroups::state`].
    fn state(&self, group: StateGroup) -> impl Future<Output = Result<Arc<StateMap>, StoreError>> + Send;

    /// See [`StateGroups::part`].
    fn part(
        &self,
        group: StateGroup,
        filter: &StateFilter,
    ) -> impl Future<Output = Result<StateMap, StoreError>> + Send;

    /// See [`Store::events_json`].
    fn events_json(&self, events: &[EventId]) -> impl Future<Output = Result<Vec<EventJson>, StoreError>> + Send;
}

/// What is stored, through the cache of states.
#[derive(Clone, Copy)]
pub struct Stored<'a> {
    /// The database.
    pub store: &'a Store,
    /// The cache.
    pub groups: &'a StateGroups,
}

impl StateReader for Stored<'_> {
    async fn groups_after(&self, events: &[EventId]) -> Result<HashMap<EventId, StateGroup>, StoreError> {
        self.store.groups_after(events).await
    }

    async fn state(&self, group: StateGroup) -> Result<Arc<StateMap>, StoreError> {
        self.groups.state(self.store, group).await
    }

    async fn part(&self, group: StateGroup, filter: &StateFilter) -> Result<StateMap, StoreError> {
        self.groups.part(self.store, group, filter).await
    }

    async fn events_json(&self, events: &[EventId]) -> Result<Vec<EventJson>, StoreError> {
        self.store.events_json(events).await
    }
}

/// Why a context cannot be computed.
#[derive(Debug, thiserror::Error)]
pub enum ContextError {
    /// The state after these previous events is not known: they must be fetched and persisted first.
    #[error("the state after {0:?} is not known")]
    UnknownPrevious(Vec<EventId>),
    /// The rules do not lead to a state, or forbid the event.
    #[error(transparent)]
    Rules(#[from] RulesError),
    /// The database does not answer, or is damaged.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// The event that a context is computed for. (An outlier, whose place in the room is not known, has none.)
#[derive(Debug, Clone, Copy)]
pub struct NewArrival<'a> {
    /// Its id.
    pub event_id: &'a EventId,
    /// Its room.
    pub room_id: &'a RoomId,
    /// The room's version.
    pub version: RoomVersion,
    /// Its key in the room's state, for a state event.
    pub state_key: Option<&'a StateKey>,
    /// Its `prev_events`.
    pub prev_events: &'a [EventId],
}

/// The state before an event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StateBefore {
    /// It is the room's first: nothing.
    Nothing,
    /// That of a stored group.
    Group(StateGroup),
    /// The room forked, and the resolved state is that of none of the groups.
    Resolved {
        /// The group it differs least from.
        from: StateGroup,
        /// In what.
        changes: StateDelta,
        /// The state.
        state: Arc<StateMap>,
    },
}

/// The state before an event and what the event does to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EventContext {
    room_id: RoomId,
    event_id: EventId,
    before: StateBefore,
    change: Option<ChangedEntry>,
}

/// The one entry that a state event changes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChangedEntry {
    /// Its key.
    pub key: StateKey,
    /// The event that stood there: `unsigned.replaces_state`.
    pub replaces: Option<EventId>,
}

/// The state groups of an event. Absent = none: an outlier's, or before a room's first event.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EventGroups {
    /// Before it.
    pub before: Option<StateGroup>,
    /// After it: `event_to_state_groups`.
    pub after: Option<StateGroup>,
}

/// Computes the state before an event and what the event does to it. Nothing is stored.
///
/// # Errors
/// See [`ContextError`].
pub async fn compute_event_context(
    reader: &impl StateReader,
    event: NewArrival<'_>,
) -> Result<EventContext, ContextError> {
    let before = state_before(reader, event.version, event.prev_events).await?;
    let mut context = EventContext {
        room_id: event.room_id.clone(),
        event_id: event.event_id.clone(),
        before,
        change: None,
    };
    if let Some(key) = event.state_key {
        let replaces = context
            .part(reader, &StateFilter::Keys(vec![key.clone()]))
            .await?
            .remove(key);
        context.change = Some(ChangedEntry {
            key: key.clone(),
            replaces,
        });
    }
    Ok(context)
}

/// The state that an event after these would find: also that which a new event of ours is made in.
///
/// # Errors
/// See [`ContextError`].
pub async fn state_before(
    reader: &impl StateReader,
    version: RoomVersion,
    prev_events: &[EventId],
) -> Result<StateBefore, ContextError> {
    let known = reader.groups_after(prev_events).await?;
    let unknown: Vec<EventId> = prev_events
        .iter()
        .filter(|id| !known.contains_key(*id))
        .cloned()
        .collect();
    if !unknown.is_empty() {
        return Err(ContextError::UnknownPrevious(unknown));
    }
    let mut groups: Vec<StateGroup> = known.into_values().collect();
    groups.sort_unstable();
    groups.dedup();
    match groups[..] {
        [] => Ok(StateBefore::Nothing),
        [group] => Ok(StateBefore::Group(group)),
        _ => resolve_groups(reader, version, &groups).await,
    }
}

async fn resolve_groups(
    reader: &impl StateReader,
    version: RoomVersion,
    groups: &[StateGroup],
) -> Result<StateBefore, ContextError> {
    let mut states = Vec::with_capacity(groups.len());
    for group in groups {
        states.push(reader.state(*group).await?);
    }
    let state = Arc::new(resolve(reader, version, &states).await?);
    // The smallest of the differences, and of equal ones that to the newest group.
    let nearest = groups
        .iter()
        .zip(&states)
        .map(|(group, old)| (*group, map::delta(old, &state)))
        .min_by_key(|(group, changes)| (changes.len(), std::cmp::Reverse(*group)));
    Ok(match nearest {
        None => StateBefore::Nothing,
        Some((group, changes)) if changes.is_empty() => StateBefore::Group(group),
        Some((from, changes)) => StateBefore::Resolved { from, changes, state },
    })
}

/// Resolves states of a room.
///
/// # Errors
/// See [`ContextError`].
pub async fn resolve(
    reader: &impl StateReader,
    version: RoomVersion,
    states: &[Arc<StateMap>],
) -> Result<StateMap, ContextError> {
    let mut resolution = Resolution::new(version, states)?;
    loop {
        match resolution.step()? {
            Step::Done(state) => return Ok(state),
            Step::Needs(ids) => {
                let mut found = events(reader, &ids).await?;
                for id in ids {
                    let event = found.remove(&id);
                    resolution.learn(&id, event);
                }
            }
        }
    }
}

/// The events of those ids, read for the rules; those that are not known are left out.
///
/// # Errors
/// If one of them cannot be read; or if the database does not answer.
pub async fn events(reader: &impl StateReader, ids: &[EventId]) -> Result<BTreeMap<EventId, RoomEvent>, ContextError> {
    let mut events = BTreeMap::new();
    for found in reader.events_json(ids).await? {
        let event = RoomEvent::read(&found.event_id, &found.json, found.rejected)?;
        events.insert(found.event_id, event);
    }
    Ok(events)
}

impl StateBefore {
    /// A part of the state.
    ///
    /// # Errors
    /// Those of the reader.
    pub async fn part(&self, reader: &impl StateReader, filter: &StateFilter) -> Result<StateMap, StoreError> {
        match self {
            Self::Nothing => Ok(StateMap::new()),
            Self::Group(group) => reader.part(*group, filter).await,
            Self::Resolved { state, .. } => Ok(filter.of(state)),
        }
    }

    /// The `auth_events` of a new event.
    ///
    /// # Errors
    /// See [`ContextError`].
    pub async fn auth_events(
        &self,
        reader: &impl StateReader,
        version: RoomVersion,
        event: &NewEvent<'_>,
    ) -> Result<Vec<EventId>, ContextError> {
        let keys = rules::auth_keys(version, event.kind, event.sender, event.state_key, event.content)?;
        let chosen = self.part(reader, &StateFilter::Keys(keys)).await?;
        Ok(chosen.into_values().collect())
    }

    /// Checks an event that came in, or that we made, against its own `auth_events` and then the state before it. On
    /// `Rules` it is to be rejected. (If it is not allowed in the *current* state either, which [`StateBefore::auth_check`]
    /// of that says, it is to be soft-failed.)
    ///
    /// # Errors
    /// See [`ContextError`].
    pub async fn check_arrival(
        &self,
        reader: &impl StateReader,
        version: RoomVersion,
        event: &RoomEvent,
    ) -> Result<(), ContextError> {
        let mut ids = event.auth_events();
        ids.extend(event.unsaid_create_event(version));
        let known = events(reader, &ids).await?;
        rules::check_auth_events(version, event, &known)?;
        let state = known
            .iter()
            .filter_map(|(id, known)| Some((known.key_in_state()?, id.clone())));
        rules::auth_check(version, event, &state.collect(), &known)?;
        self.auth_check(reader, version, event).await
    }

    /// Checks an event against the state alone: `Rules` if it is not allowed in it.
    ///
    /// # Errors
    /// See [`ContextError`].
    pub async fn auth_check(
        &self,
        reader: &impl StateReader,
        version: RoomVersion,
        event: &RoomEvent,
    ) -> Result<(), ContextError> {
        let keys = rules::check_keys(version, event)?;
        let state = self.part(reader, &StateFilter::Keys(keys)).await?;
        let ids: Vec<EventId> = state.values().cloned().collect();
        let known = events(reader, &ids).await?;
        Ok(rules::auth_check(version, event, &state, &known)?)
    }
}

impl EventContext {
    /// The state before the event.
    #[must_use]
    pub fn before(&self) -> &StateBefore {
        &self.before
    }

    /// What the event changes; nothing if it is no state event, or was rejected.
    #[must_use]
    pub fn change(&self) -> Option<&ChangedEntry> {
        self.change.as_ref()
    }

    /// The event is not allowed: it stays out of the state.
    pub fn reject(&mut self) {
        self.change = None;
    }

    /// A part of the state before the event.
    ///
    /// # Errors
    /// Those of the reader.
    pub async fn part(&self, reader: &impl StateReader, filter: &StateFilter) -> Result<StateMap, StoreError> {
        self.before.part(reader, filter).await
    }

    /// The groups to be stored, in this order, before the event is: none, one, or two.
    #[must_use]
    pub fn new_groups(&self) -> Vec<NewStateGroup> {
        let group = |previous, changes| NewStateGroup {
            room_id: self.room_id.clone(),
            event_id: self.event_id.clone(),
            previous,
            changes,
        };
        let mut groups = Vec::new();
        let before = match &self.before {
            StateBefore::Nothing => None,
            StateBefore::Group(before) => Some(PreviousGroup::Stored(*before)),
            StateBefore::Resolved { from, changes, .. } => {
                groups.push(group(Some(PreviousGroup::Stored(*from)), changes.clone()));
                Some(PreviousGroup::Earlier(0))
            }
        };
        if let Some(change) = &self.change {
            let changes = StateDelta::from([(change.key.clone(), Some(self.event_id.clone()))]);
            groups.push(group(before, changes));
        }
        groups
    }

    /// The event's groups, once [`EventContext::new_groups`] are stored under `ids`.
    #[must_use]
    pub fn groups(&self, ids: &[StateGroup]) -> EventGroups {
        let mut ids = ids.iter().copied();
        let before = match &self.before {
            StateBefore::Nothing => None,
            StateBefore::Group(group) => Some(*group),
            StateBefore::Resolved { .. } => ids.next(),
        };
        EventGroups {
            before,
            after: ids.next().or(before),
        }
    }

    /// Stores what must be, and says the event's groups.
    ///
    /// # Errors
    /// See [`Store::store_state_groups`].
    pub async fn store(&self, stored: Stored<'_>) -> Result<EventGroups, StoreError> {
        let ids = stored.store.store_state_groups(&self.new_groups()).await?;
        let groups = self.groups(&ids);
        if let (StateBefore::Resolved { state, .. }, Some(before)) = (&self.before, groups.before) {
            stored.groups.remember(before, Arc::clone(state));
        }
        Ok(groups)
    }
}

#[cfg(test)]
mod tests;
