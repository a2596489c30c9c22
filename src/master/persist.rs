//! The one way into a room's history, for events of ours and of others: the state before, the auth rules, the state after,
//! the database, and then the news of it.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use serde_json::json;
use tracing::debug;

use super::{body::Object, homeserver::Homeserver, refusal::Refusal, rooms::RoomLock, wire::Parts};
use crate::core::{
    clock::{self, Millis},
    event::VerifiedEvent,
    id::{EventId, RoomId, ServerName, StateGroup, StickyPosition, StreamOrdering, Token},
    replication::{gap::Group, ids::StaleId, rows},
    room_version::RoomVersion,
    rules::{self, RoomEvent, RulesError},
    state::{
        context::{self, ContextError, NewArrival, StateBefore, StateReader},
        map::{self, NewStateGroup, StateDelta, StateFilter, StateKey, StateMap},
    },
    store::{EventJson, Known, Outcome, PersistEvent, StateChange, StoreError},
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
    /// We made it: then it is not stored. What a client calls it, so that it is made once only.
    Ours(Option<String>),
    /// We made it and another server let it in, and tells the others: if it is not allowed here, it is not stored.
    Joined,
    /// Another server has others learn of it through us: then it is not stored.
    OnBehalfOf(ServerName),
    /// It is in the room whether we like it or not: then it is stored as rejected.
    Elsewhere,
}

/// What became of an event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
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
    #[error("not allowed: {0}")]
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

/// What is stored, and what is known besides: the state after events that are not here, and an event that is about to be.
pub(super) struct Reader<'a> {
    homeserver: &'a Homeserver,
    before: Option<StateGroup>,
    fresh: Option<(EventJson, StateGroup)>,
}

impl StateReader for Reader<'_> {
    async fn groups_after(&self, events: &[EventId]) -> Result<HashMap<EventId, StateGroup>, StoreError> {
        let mut groups = self.homeserver.stored().groups_after(events).await?;
        for event in events {
            let fresh = self.fresh.as_ref().filter(|(fresh, _)| fresh.event_id == *event);
            if let Some(group) = fresh.map(|(_, group)| *group).or(self.before) {
                groups.entry(event.clone()).or_insert(group);
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
        let fresh = self.fresh.iter().map(|(fresh, _)| fresh);
        found.extend(fresh.filter(|fresh| events.contains(&fresh.event_id)).cloned());
        Ok(found)
    }
}

impl Homeserver {
    /// Persists an event, and tells the other processes.
    ///
    /// `before` is the state after those events that it follows and that are not here, as another server says.
    ///
    /// # Errors
    /// Why it was not persisted.
    pub(super) async fn persist(
        &self,
        lock: &RoomLock,
        version: RoomVersion,
        arrival: &Arrival,
        before: Option<StateGroup>,
    ) -> Result<Verdict, PersistError> {
        let (id, room) = (&arrival.event_id, lock.room());
        if let Some(known) = self.known(id).await? {
            return Ok(known);
        }
        let parts = Parts::of_room(&arrival.json, room, version).map_err(PersistError::Malformed)?;
        let event = RoomEvent::read(id, &arrival.json, false)?;
        let mut reader = Reader {
            homeserver: self,
            before,
            fresh: None,
        };
        let state_key = parts.state_key.as_deref().map(|key| StateKey::new(&parts.kind, key));
        let prev_events = parts.prev_events();
        // Else the state of another room would become a part of this one's.
        for previous in self.store.events_json(&prev_events).await? {
            Parts::of_room(&previous.json, room, version)
                .map_err(|why| PersistError::Malformed(format!("it follows {}: {why}", previous.event_id)))?;
        }
        let new = NewArrival {
            event_id: id,
            room_id: room,
            version,
            state_key: state_key.as_ref(),
            prev_events: &prev_events,
        };
        let mut context = context::compute_event_context(&reader, new).await?;
        let checked = self.check(&reader, version, &event, context.before()).await;
        let mut verdict = match if_forbidden(checked)? {
            None => Verdict::New,
            Some(why) => {
                context.reject();
                Verdict::Rejected(why)
            }
        };
        let extremities = self.extremities(room).await?.0;
        let now = context::state_before(&reader, version, &extremities).await?;
        if verdict == Verdict::New && now != StateBefore::Nothing && now != *context.before() {
            let checked = now.auth_check(&reader, version, &event).await;
            if let Some(why) = if_forbidden(checked.map_err(PersistError::from))? {
                verdict = Verdict::SoftFailed(why);
            }
        }
        // The state is only what one server says: that must not keep the event out for good.
        if let (Verdict::Rejected(why), Some(_)) = (&verdict, before) {
            return Err(PersistError::Forbidden(why.clone()));
        }
        if let (Verdict::Rejected(why) | Verdict::SoftFailed(why), true) =
            (&verdict, arrival.source != Source::Elsewhere)
        {
            return Err(PersistError::Forbidden(why.clone()));
        }

        let groups = context.store(self.stored()).await?;
        let after = groups
            .after
            .ok_or_else(|| PersistError::Malformed("it has no place in the room".into()))?;
        let outcome = match &verdict {
            Verdict::Rejected(why) => Outcome::Rejected(after, why.clone()),
            Verdict::SoftFailed(_) => Outcome::SoftFailed(after),
            Verdict::New | Verdict::Known => Outcome::Accepted(after),
        };
        let mut changes = StateDelta::new();
        if verdict == Verdict::New {
            let only_follower = extremities.iter().all(|extremity| prev_events.contains(extremity));
            match context.change() {
                // The common case needs no look at the whole state.
                change if only_follower && now == *context.before() => {
                    changes.extend(change.map(|change| (change.key.clone(), Some(id.clone()))));
                }
                _ => {
                    let json = arrival.json.clone();
                    let fresh = EventJson {
                        event_id: id.clone(),
                        json,
                        rejected: false,
                    };
                    reader.fresh = Some((fresh, after));
                    let mut newest: Vec<EventId> = extremities
                        .into_iter()
                        .filter(|extremity| !prev_events.contains(extremity))
                        .collect();
                    newest.push(id.clone());
                    let state = context::state_before(&reader, version, &newest).await?;
                    let old = now.part(&reader, &StateFilter::All).await?;
                    changes = map::delta(&old, &state.part(&reader, &StateFilter::All).await?);
                }
            }
        }
        let mut row = row(arrival, &parts, version, outcome, room);
        if let Some(replaces) = context.change().and_then(|change| change.replaces.as_ref())
            && arrival.source != Source::Elsewhere
        {
            row.json = with_replaced(&row.json, replaces)?;
        }
        self.write(vec![row], changes, room).await?;
        Ok(verdict)
    }

    /// Keeps events outside of the room's order, for what they authorise. Those that are not allowed by what authorises them
    /// are left out.
    pub(super) async fn persist_outliers(
        &self,
        lock: &RoomLock,
        version: RoomVersion,
        events: Vec<VerifiedEvent>,
    ) -> Result<(), PersistError> {
        let room = lock.room();
        let mut sorted: Vec<(Parts, Arrival)> = Vec::with_capacity(events.len());
        for event in events {
            if let Ok(parts) = Parts::of_room(&event.json, room, version) {
                let arrival = Arrival {
                    event_id: event.event_id,
                    json: event.json,
                    source: Source::Elsewhere,
                };
                sorted.push((parts, arrival));
            }
        }
        sorted.sort_by_key(|(parts, _)| parts.depth);
        let ids: Vec<EventId> = sorted.iter().map(|(_, arrival)| arrival.event_id.clone()).collect();
        let mut known: BTreeMap<EventId, RoomEvent> = BTreeMap::new();
        let mut rows = Vec::new();
        let here = self.sqlite.known_events(&ids).await?;
        for (parts, arrival) in sorted {
            if here.contains_key(&arrival.event_id) || known.contains_key(&arrival.event_id) {
                continue;
            }
            let Ok(event) = RoomEvent::read(&arrival.event_id, &arrival.json, false) else {
                continue;
            };
            let named = authorising(version, &event);
            let unknown: Vec<EventId> = named.iter().filter(|id| !known.contains_key(*id)).cloned().collect();
            known.extend(context::events(&self.stored(), &unknown).await?);
            if let Err(error) = check_by_auth_events(version, &event, &known) {
                debug!(%room, event_id = %arrival.event_id, %error, "an event is left out");
                continue;
            }
            rows.push(row(&arrival, &parts, version, Outcome::Outlier, room));
            known.insert(arrival.event_id, event);
        }
        self.write(rows, StateDelta::new(), room).await
    }

    /// Stores a state that another server says stands before an event, as a group; of its events those of the
    /// room that are here.
    pub(super) async fn store_state(
        &self,
        lock: &RoomLock,
        version: RoomVersion,
        event_id: &EventId,
        events: &[EventId],
    ) -> Result<StateGroup, PersistError> {
        let mut state = StateDelta::new();
        for event in self.store.events_json(events).await? {
            let Ok(parts) = Parts::of_room(&event.json, lock.room(), version) else {
                continue;
            };
            if let Some(key) = &parts.state_key
                && !event.rejected
            {
                state.insert(StateKey::new(&parts.kind, key), Some(event.event_id));
            }
        }
        let group = NewStateGroup {
            room_id: lock.room().clone(),
            event_id: event_id.clone(),
            previous: None,
            changes: state,
        };
        let ids = self.store.store_state_groups(&[group]).await?;
        ids.first()
            .copied()
            .ok_or_else(|| PersistError::Malformed("no state".into()))
    }

    /// The one transaction, and the news of it.
    async fn write(&self, rows: Vec<PersistEvent>, changes: StateDelta, room: &RoomId) -> Result<(), PersistError> {
        if rows.is_empty() {
            return Ok(());
        }
        let changes: Vec<StateChange> = changes
            .into_iter()
            .map(|(key, event_id)| StateChange {
                room_id: room.clone(),
                kind: key.kind.to_string(),
                state_key: key.key.to_string(),
                event_id,
            })
            .collect();
        // From here on our positions stay below what the database may give.
        let mut events = self.streams.events.begin();
        let mut sticky = self.streams.sticky_events.begin();
        let persisted = self.sqlite.persist(&rows, &changes, clock::now().wall).await?;
        events
            .drawn(persisted.events.iter().map(|(_, at)| *at).collect())
            .map_err(stale)?;
        sticky
            .drawn(persisted.sticky.iter().map(|(_, at)| *at).collect())
            .map_err(stale)?;
        let by_id: HashMap<&EventId, &PersistEvent> = rows.iter().map(|row| (&row.event_id, row)).collect();
        let group = |(id, at): &(EventId, StreamOrdering)| Group {
            token: Token(at.0),
            rows: by_id
                .get(id)
                .map(|row| rows::event(&announced(row)))
                .into_iter()
                .collect(),
        };
        let sticky_group = |(id, at): &(EventId, StickyPosition)| Group {
            token: Token(at.0),
            rows: vec![rows::sticky_event(room, id)],
        };
        events.finish(persisted.events.iter().map(group).collect());
        sticky.finish(persisted.sticky.iter().map(sticky_group).collect());
        for new in persisted.new_servers {
            self.streams.new_server_joined(&new.server);
        }
        Ok(())
    }

    /// What is known of an event that has its place in the room.
    async fn known(&self, id: &EventId) -> Result<Option<Verdict>, StoreError> {
        let known = self.sqlite.known_events(std::slice::from_ref(id)).await?;
        Ok(match known.get(id) {
            Some(Known::Placed) => Some(Verdict::Known),
            Some(Known::Rejected) => Some(Verdict::Rejected("it was rejected before".into())),
            Some(Known::Outlier) | None => None,
        })
    }

    /// Checks an event by the events that it says authorise it, and by the state before it.
    async fn check(
        &self,
        reader: &Reader<'_>,
        version: RoomVersion,
        event: &RoomEvent,
        before: &StateBefore,
    ) -> Result<(), PersistError> {
        let named = event.auth_events();
        let here = self.sqlite.known_events(&named).await?;
        let missing: Vec<EventId> = named.into_iter().filter(|id| !here.contains_key(id)).collect();
        if !missing.is_empty() {
            return Err(PersistError::MissingAuth(missing));
        }
        Ok(before.check_arrival(reader, version, event).await?)
    }
}

/// Checks an event by the events that it says authorise it; `known` are those that are here.
fn check_by_auth_events(
    version: RoomVersion,
    event: &RoomEvent,
    known: &BTreeMap<EventId, RoomEvent>,
) -> Result<(), PersistError> {
    let named = authorising(version, event);
    let missing: Vec<EventId> = named.iter().filter(|id| !known.contains_key(*id)).cloned().collect();
    if !missing.is_empty() {
        return Err(PersistError::MissingAuth(missing));
    }
    rules::check_auth_events(version, event, known)?;
    let state = named
        .iter()
        .filter_map(|id| Some((known.get(id)?.key_in_state()?, id.clone())));
    Ok(rules::auth_check(version, event, &state.collect(), known)?)
}

/// The events that authorise this one, with the create event that room version 12 leaves unsaid.
fn authorising(version: RoomVersion, event: &RoomEvent) -> Vec<EventId> {
    let mut named = event.auth_events();
    named.extend(event.unsaid_create_event(version));
    named
}

fn row(arrival: &Arrival, parts: &Parts, version: RoomVersion, outcome: Outcome, room: &RoomId) -> PersistEvent {
    let mut metadata = serde_json::Map::new();
    match &arrival.source {
        Source::Ours(Some(txn_id)) => {
            metadata.insert("txn_id".into(), txn_id.as_str().into());
        }
        Source::OnBehalfOf(server) => {
            metadata.insert("send_on_behalf_of".into(), server.as_str().into());
        }
        Source::Joined => {
            metadata.insert("proactively_send".into(), false.into());
        }
        Source::Ours(None) | Source::Elsewhere => {}
    }
    PersistEvent {
        event_id: arrival.event_id.clone(),
        room_id: room.clone(),
        kind: parts.kind.clone(),
        state_key: parts.state_key.clone(),
        sender: parts.sender.clone(),
        depth: parts.depth,
        sent: Millis(parts.origin_server_ts),
        json: arrival.json.clone(),
        format_version: version.format().number(),
        metadata,
        prev_events: parts.prev_events(),
        auth_events: parts.auth_events(),
        membership: parts.membership().map(str::to_owned),
        redacts: parts.redacts(version),
        sticky_until: parts.sticky_until(clock::now().wall),
        outcome,
    }
}

/// The event with the state event that it replaces: a sender tells by it who was in the room before a change of membership.
fn with_replaced(json: &str, replaces: &EventId) -> Result<String, PersistError> {
    let mut event: Object = serde_json::from_str(json).map_err(|error| PersistError::Malformed(error.to_string()))?;
    event.insert("unsigned".into(), json!({ "replaces_state": replaces.as_str() }));
    Ok(json!(event).to_string())
}

/// What the other processes are told of an event.
fn announced(row: &PersistEvent) -> rows::EventRow {
    rows::EventRow {
        event_id: row.event_id.clone(),
        room_id: row.room_id.clone(),
        kind: row.kind.clone(),
        state_key: row.state_key.clone(),
        redacts: row.redacts.clone(),
        relates_to: None,
        membership: row.membership.clone(),
        rejected: matches!(row.outcome, Outcome::Rejected(..)),
        outlier: row.outcome == Outcome::Outlier,
    }
}

/// The database gave a position that it gave before: it is not the one that we started with.
fn stale(error: StaleId) -> PersistError {
    PersistError::Store(StoreError::Damaged {
        table: "events".into(),
        key: "?".into(),
        what: error.to_string(),
    })
}

/// Why it is not allowed, if that is what is wrong.
fn if_forbidden(checked: Result<(), PersistError>) -> Result<Option<String>, PersistError> {
    match checked {
        Ok(()) => Ok(None),
        Err(PersistError::Forbidden(why)) => Ok(Some(why)),
        Err(other) => Err(other),
    }
}

impl From<RulesError> for PersistError {
    fn from(error: RulesError) -> Self {
        match error {
            RulesError::Forbidden(why) => Self::Forbidden(why),
            RulesError::Malformed(what) | RulesError::Unresolvable(what) => Self::Malformed(what),
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
