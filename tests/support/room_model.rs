//! A room that grows in memory, event by event, each built and checked as a homeserver would.

#![allow(dead_code, reason = "each test program uses a part")]

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use burdock::core::{
    clock::Millis,
    event::{self, NewEvent},
    id::{EventId, RoomId},
    room_version::RoomVersion,
    rules::{self, Resolution, RoomEvent, Step},
    signing::SigningKey,
    state::map::{StateKey, StateMap},
};

/// The server that signs all.
pub const SERVER: &str = "one.example";

/// An event with its state.
pub struct Known {
    pub json: String,
    pub read: RoomEvent,
    pub depth: i64,
    pub after: Arc<StateMap>,
}

pub struct Room {
    pub version: RoomVersion,
    pub id: RoomId,
    pub create: EventId,
    pub key: SigningKey,
    pub events: HashMap<EventId, Known>,
}

/// What an event says.
pub struct Said<'a> {
    pub kind: &'a str,
    pub state_key: Option<&'a str>,
    pub sender: &'a str,
    pub content: &'a str,
    pub at: i64,
}

impl Room {
    /// A room that `creator` just created.
    pub fn create(version: &str, creator: &str) -> Self {
        let key = SigningKey::from_seed("t", &[7; 32]);
        let number = RoomVersion::of(version).unwrap();
        let named = RoomId::from("!r:one.example");
        let content = match number.number() {
            ..=10 => format!(r#"{{"creator":"{creator}","room_version":"{version}"}}"#),
            11.. => format!(r#"{{"room_version":"{version}"}}"#),
        };
        let json = NewEvent {
            room_id: (number.number() < 12).then_some(&named),
            kind: "m.room.create",
            state_key: Some(""),
            sender: creator,
            content: &content,
            origin_server_ts: Millis(1),
            depth: 1,
            prev_events: &[],
            auth_events: &[],
            more: &[],
        }
        .json();
        let made = event::finish(&json, number, &SERVER.into(), &key).unwrap();
        let room_id = match number.number() {
            ..=11 => named,
            12.. => made.event_id.as_str().replacen('$', "!", 1).into(),
        };
        let read = RoomEvent::read(&made.event_id, &made.json, false).unwrap();
        rules::check_auth_events(number, &read, &BTreeMap::new()).unwrap();
        let after = StateMap::from([(StateKey::new("m.room.create", ""), made.event_id.clone())]);
        let known = Known {
            json: made.json,
            read,
            depth: 1,
            after: Arc::new(after),
        };
        Self {
            version: number,
            id: room_id,
            create: made.event_id.clone(),
            key,
            events: HashMap::from([(made.event_id, known)]),
        }
    }

    /// The events as the rules read them.
    pub fn read(&self) -> BTreeMap<EventId, RoomEvent> {
        self.events
            .iter()
            .map(|(id, known)| (id.clone(), known.read.clone()))
            .collect()
    }

    /// Our resolution of these states.
    pub fn resolve(&self, states: &[Arc<StateMap>]) -> StateMap {
        let mut resolution = Resolution::new(self.version, states).unwrap();
        loop {
            match resolution.step().unwrap() {
                Step::Done(state) => return state,
                Step::Needs(ids) => {
                    for id in ids {
                        resolution.learn(&id, self.events.get(&id).map(|known| known.read.clone()));
                    }
                }
            }
        }
    }

    /// The state before an event that follows these.
    pub fn before(&self, prev_events: &[EventId]) -> Arc<StateMap> {
        let states: Vec<_> = prev_events
            .iter()
            .map(|id| Arc::clone(&self.events[id].after))
            .collect();
        match &states[..] {
            [one] => Arc::clone(one),
            _ => Arc::new(self.resolve(&states)),
        }
    }

    /// Adds an event after these, if it is allowed there.
    pub fn add(&mut self, said: &Said<'_>, prev_events: &[EventId]) -> Result<EventId, String> {
        let before = self.before(prev_events);
        let keys = rules::auth_keys(self.version, said.kind, said.sender, said.state_key, said.content)
            .map_err(|error| error.to_string())?;
        let auth_events: Vec<EventId> = keys.iter().filter_map(|key| before.get(key).cloned()).collect();
        let depth = 1 + prev_events
            .iter()
            .map(|id| self.events[id].depth)
            .max()
            .unwrap_or_default();
        let json = NewEvent {
            room_id: Some(&self.id),
            kind: said.kind,
            state_key: said.state_key,
            sender: said.sender,
            content: said.content,
            origin_server_ts: Millis(said.at),
            depth,
            prev_events,
            auth_events: &auth_events,
            more: &[],
        }
        .json();
        let made = event::finish(&json, self.version, &SERVER.into(), &self.key).map_err(|error| error.to_string())?;
        let read = RoomEvent::read(&made.event_id, &made.json, false).map_err(|error| error.to_string())?;
        let known = self.read();
        rules::check_auth_events(self.version, &read, &known).map_err(|error| error.to_string())?;
        rules::auth_check(self.version, &read, &before, &known).map_err(|error| error.to_string())?;
        let mut after = before;
        if let Some(state_key) = said.state_key {
            Arc::make_mut(&mut after).insert(StateKey::new(said.kind, state_key), made.event_id.clone());
        }
        let known = Known {
            json: made.json,
            read,
            depth,
            after,
        };
        self.events.insert(made.event_id.clone(), known);
        Ok(made.event_id)
    }
}

/// A state, readable.
pub fn listed(state: &StateMap) -> BTreeMap<(String, String), String> {
    state
        .iter()
        .map(|(key, id)| ((key.kind.to_string(), key.key.to_string()), id.to_string()))
        .collect()
}
