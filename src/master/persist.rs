//! The one way into a room's history, for events of ours and of others: the state before, the auth rules, the state after,
//! the database, and then the news of it.

use std::{collections::HashMap, sync::Arc};

use super::{homeserver::Homeserver, refusal::Refusal, rooms::RoomLock, wire::Parts};
use crate::core::{
    clock::{self, Millis},
    id::{EventId, RoomId, ServerName, StateGroup},
    replication::rows,
    room_version::{EventFormat, RoomVersion},
    rules::{self, RoomEvent, RulesError},
    state::{
        context::{self, ContextError, EventContext, NewArrival, StateBefore, StateReader},
        map::{StateFilter, StateKey, StateMap},
    },
    store::{EventJson, StoreError},
};

/// An event that wants in. Its hash and signatures are known to be right, or of no concern.
#[derive(Debug, Clone)]
pub struct Arrival {
    /// Its id.
    pub event_id: EventId,
    /// Its canonical JSON.
    pub json: String,
    /// Who made it.
    pub source: Source,
}

/// Where an event comes from, and so what happens if it is not allowed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// We made it: then it is not stored. A client may have named it so that it is made once.
    Ours(Option<ClientTransaction>),
    /// Another server has others learn of it through us: then it is not stored.
    OnBehalfOf(ServerName),
    /// It is in the room whether we like it or not: then it is stored as rejected.
    Elsewhere,
}

/// What a client calls a request, so that it can repeat it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientTransaction {
    /// The access token it used.
    pub token: String,
    /// Its name for it.
    pub txn_id: String,
}

/// What became of an event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Persisted {
    /// It is there, and was before.
    Known,
    /// It is there now.
    New,
    /// It is there, but not shown, as the room's state does not allow it any more.
    SoftFailed(String),
    /// It is not allowed.
    Rejected(String),
}

/// Why nothing was persisted.
#[derive(Debug, thiserror::Error)]
pub enum PersistError {
    /// It is not allowed.
    #[error("{0}")]
    Forbidden(String),
    /// It is not an event of this room.
    #[error("{0}")]
    Malformed(String),
    /// These events, which it follows, are not here.
    #[error("it follows events that are not here and were not to be had: {}", list(.0))]
    MissingPrevious(Vec<EventId>),
    /// These events, which authorise it, are not here.
    #[error("it is authorised by events that are not here and were not to be had: {}", list(.0))]
    MissingAuth(Vec<EventId>),
    /// The database.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// The first few ids; the rest would only fill logs.
fn list(ids: &[EventId]) -> String {
    let shown: Vec<&str> = ids.iter().take(5).map(EventId::as_str).collect();
    let more = if ids.len() > shown.len() { ", ..." } else { "" };
    shown.join(", ") + more
}

/// What is stored, and what is known besides: the states after events that are not here, and one event that is about to be.
pub(super) struct Reader<'a> {
    homeserver: &'a Homeserver,
    after: HashMap<EventId, StateGroup>,
    fresh: Option<EventJson>,
}

impl StateReader for Reader<'_> {
    async fn groups_after(&self, events: &[EventId]) -> Result<HashMap<EventId, StateGroup>, StoreError> {
        let mut groups = self.homeserver.stored().groups_after(events).await?;
        for event in events {
            if let Some(group) = self.after.get(event) {
                groups.entry(event.clone()).or_insert(*group);
            }
        }
        Ok(groups)
    }

    async fn state(&self, group: StateGroup) -> Result<Arc<StateMap>, StoreError> {
        self.homeserver.stored().state(group).await
    }

    async fn part(&self, group: StateGroup, filter: &StateFilter) -> Result<StateMap, StoreError> {
        self.homeserver.stored().part(group, filter).await
    }

    async fn events_json(&self, events: &[EventId]) -> Result<Vec<EventJson>, StoreError> {
        let mut found = self.homeserver.stored().events_json(events).await?;
        let fresh = self.fresh.iter().filter(|fresh| events.contains(&fresh.event_id));
        found.extend(fresh.cloned());
        Ok(found)
    }
}

impl Homeserver {
    /// Persists an event, and tells the other processes.
    ///
    /// `after` holds the state after events that it follows and that are not here, as another server says.
    ///
    /// # Errors
    /// Why it was not persisted.
    pub(super) async fn persist(
        &self,
        lock: &RoomLock,
        version: RoomVersion,
        arrival: &Arrival,
        after: HashMap<EventId, StateGroup>,
    ) -> Result<Persisted, PersistError> {
        let id = &arrival.event_id;
        let room = lock.room();
        if let Some(known) = self.known(id).await? {
            return Ok(known);
        }
        let parts = Parts::read(&arrival.json).map_err(|error| PersistError::Malformed(error.to_string()))?;
        if parts.room_id().is_some_and(|named| named != *room) {
            return Err(PersistError::Malformed("it is an event of another room".into()));
        }
        let event = RoomEvent::read(id, &arrival.json, false)?;
        let mut reader = Reader { homeserver: self, after, fresh: None };

        let prev_events = parts.prev_events();
        let state_key = parts.state_key.as_deref().map(|key| StateKey::new(&parts.kind, key));
        let mut context = context::compute_event_context(&reader, NewArrival {
            event_id: id,
            room_id: room,
            version,
            state_key: state_key.as_ref(),
            prev_events: &prev_events,
        })
        .await?;
        let rejected = match self.check(&reader, room, version, &event, &parts, &context).await {
            Err(PersistError::Forbidden(why)) if arrival.source == Source::Elsewhere => {
                context.reject();
                Some(why)
            }
            checked => {
                checked?;
                None
            }
        };

        let extremities = self.extremities(room).await?.0;
        let now = context::state_before(&reader, version, &extremities).await?;
        let soft_failed = if rejected.is_some() || *context.before() == now || now == StateBefore::Nothing {
            None
        } else {
            forbidden(now.auth_check(&reader, version, &event).await)?
        };
        if let (Some(why), true) = (&soft_failed, arrival.source != Source::Elsewhere) {
            return Err(PersistError::Forbidden(why.clone()));
        }

        let groups = context.store(self.stored()).await?;
        todo!()
    }

    /// What is known of an event that is in its room's order already.
    async fn known(&self, id: &EventId) -> Result<Option<Persisted>, StoreError> {
        let ids = std::slice::from_ref(id);
        if self.store.groups_after(ids).await?.is_empty() {
            return Ok(None);
        }
        let found = self.store.events_json(ids).await?;
        let rejected = found.iter().any(|event| event.rejected);
        Ok(Some(if rejected {
            Persisted::Rejected("it was rejected before".into())
        } else {
            Persisted::Known
        }))
    }

    /// Checks an event by the events that it says authorise it, and by the state before it.
    async fn check(
        &self,
        reader: &Reader<'_>,
        room: &RoomId,
        version: RoomVersion,
        event: &RoomEvent,
        parts: &Parts,
        context: &EventContext,
    ) -> Result<(), PersistError> {
        let named = parts.auth_events();
        let mut ids = named.clone();
        if version.format() == EventFormat::V4
            && parts.kind != "m.room.create"
            && let Some(create) = room.as_str().strip_prefix('!')
        {
            ids.push(format!("${create}").into());
        }
        let known = context::events(reader, &ids).await?;
        let missing: Vec<EventId> = named.into_iter().filter(|id| !known.contains_key(id)).collect();
        if !missing.is_empty() {
            return Err(PersistError::MissingAuth(missing));
        }
        rules::check_auth_events(version, event, &known)?;
        let state = known.iter().filter_map(|(id, event)| Some((event.key()?, id.clone())));
        let state: StateMap = state.collect();
        rules::auth_check(version, event, &state, &known)?;
        Ok(context.before().auth_check(reader, version, event).await?)
    }
}

/// Why it is not allowed, if that is what is wrong.
fn forbidden(checked: Result<(), ContextError>) -> Result<Option<String>, PersistError> {
    match checked.map_err(PersistError::from) {
        Ok(()) => Ok(None),
        Err(PersistError::Forbidden(why)) => Ok(Some(why)),
        Err(other) => Err(other),
    }
}

impl From<RulesError> for PersistError {
    fn from(error: RulesError) -> Self {
        match error {
            RulesError::Malformed(what) => Self::Malformed(what),
            RulesError::Forbidden(why) => Self::Forbidden(why),
            RulesError::Unresolvable(what) => Self::Malformed(what),
        }
    }
}

impl From<ContextError> for PersistError {
    fn from(error: ContextError) -> Self {
        match error {
            ContextError::UnknownPrevious(ids) => Self::MissingPrevious(ids),
            ContextError::Rules(error) => error.into(),
            ContextError::Store(error) => error.into(),
        }
    }
}

impl From<PersistError> for Refusal {
    fn from(error: PersistError) -> Self {
        match error {
            PersistError::Forbidden(why) => Self::forbidden(why),
            PersistError::Store(error) => Self::failed(error),
            other => Self::malformed(other.to_string()),
        }
    }
}
