//! What is the state where a room forked? State resolution, version 2 and (in rooms of version 12) 2.1.

use std::{
    cell::RefCell,
    collections::{HashMap, HashSet},
    sync::Arc,
};

use ruma_common::OwnedEventId;
use ruma_events::StateEventType;
use ruma_state_res::utils::event_id_set::EventIdSet;

use super::{RoomEvent, RulesError, event::ruma_id, rules};
use crate::core::{
    id::EventId,
    room_version::RoomVersion,
    state::map::{StateKey, StateMap},
};

/// More events than this are not looked at: such a fork is not resolved.
const MAX_EVENTS: usize = 200_000;

type RumaMap<T> = ruma_state_res::StateMap<T>;

/// One resolution under way. It asks for the events it needs.
pub struct Resolution {
    version: RoomVersion,
    states: Vec<RumaMap<OwnedEventId>>,
    /// What is conflicted in each of `states`.
    conflicted: Vec<Vec<OwnedEventId>>,
    /// What is the same in all.
    common: Vec<OwnedEventId>,
    /// The events learnt; `None` = it is not to be had.
    events: HashMap<OwnedEventId, Option<RoomEvent>>,
    /// Events that were asked for in passing: their auth chains will be needed as well.
    asked: HashSet<OwnedEventId>,
}

/// What comes next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// The state is known.
    Done(StateMap),
    /// These events must be learnt first.
    Needs(Vec<EventId>),
}

impl Resolution {
    /// Begins to resolve these states of a room.
    ///
    /// # Errors
    /// `Unresolvable` for room version 1, and for states that name what is no event id.
    pub fn new(version: RoomVersion, states: &[Arc<StateMap>]) -> Result<Self, RulesError> {
        if rules(version).state_res.v2_rules().is_none() {
            return Err(RulesError::Unresolvable(
                "room version 1 has an algorithm of its own".into(),
            ));
        }
        let states = states
            .iter()
            .map(|state| ruma_state(state))
            .collect::<Result<Vec<_>, _>>()?;
        let same =
            |key: &(StateEventType, String), id: &OwnedEventId| states.iter().all(|state| state.get(key) == Some(id));
        let conflicted = states
            .iter()
            .map(|state| {
                let differs = state.iter().filter(|(key, id)| !same(key, id));
                differs.map(|(_, id)| id.clone()).collect()
            })
            .collect();
        let common = states.first().into_iter().flatten().filter(|(key, id)| same(key, id));
        Ok(Self {
            version,
            conflicted,
            common: common.map(|(_, id)| id.clone()).collect(),
            states,
            events: HashMap::new(),
            asked: HashSet::new(),
        })
    }

    /// Takes the event in, or that it is not to be had. What is not asked for may be given as well.
    pub fn learn(&mut self, event_id: &EventId, event: Option<RoomEvent>) {
        if let Some(id) = ruma_id(event_id) {
            self.events.insert(id, event);
        }
    }

    /// Goes as far as the events learnt allow.
    ///
    /// # Errors
    /// `Unresolvable`.
    pub fn step(&mut self) -> Result<Step, RulesError> {
        if self.events.len() > MAX_EVENTS {
            return Err(RulesError::Unresolvable(format!(
                "more than {MAX_EVENTS} events play a part"
            )));
        }
        let mut missing = HashSet::new();
        self.chain(self.asked.iter().chain(self.conflicted.iter().flatten()), &mut missing);
        if !missing.is_empty() {
            return Ok(needs(&missing));
        }
        let mut chains: Vec<HashSet<OwnedEventId>> = self
            .conflicted
            .iter()
            .map(|ids| self.chain(ids.iter(), &mut missing))
            .collect();
        // What is behind the common part is behind every state, so it takes from the difference of the chains. It is by far the
        // largest part, and most often there is nothing to take from.
        if chains.iter().any(|chain| chain != &chains[0]) {
            let common = self.chain(self.common.iter(), &mut missing);
            if !missing.is_empty() {
                return Ok(needs(&missing));
            }
            for chain in &mut chains {
                chain.extend(common.iter().cloned());
            }
        }
        self.resolve(chains)
    }

    fn resolve(&mut self, chains: Vec<HashSet<OwnedEventId>>) -> Result<Step, RulesError> {
        let rules = rules(self.version);
        let state_res = rules
            .state_res
            .v2_rules()
            .ok_or_else(|| RulesError::Unresolvable("the room version has an algorithm of its own".into()))?;
        let missing = RefCell::new(HashSet::new());
        let resolved = ruma_state_res::resolve(
            &rules.authorization,
            state_res,
            &self.states,
            chains.into_iter().map(|chain| chain.into_iter().collect()).collect(),
            |id| {
                let event = self.events.get(id);
                if event.is_none() {
                    missing.borrow_mut().insert(id.to_owned());
                }
                event.cloned().flatten()
            },
            |conflicted| Some(self.between(conflicted.values().flatten())),
        );
        let missing = missing.into_inner();
        if !missing.is_empty() {
            let step = needs(&missing);
            self.asked.extend(missing);
            return Ok(step);
        }
        let resolved = resolved.map_err(|error| RulesError::Unresolvable(error.to_string()))?;
        Ok(Step::Done(
            resolved
                .iter()
                .map(|((kind, key), id)| (StateKey::new(&kind.to_string(), key), id.as_str().into()))
                .collect(),
        ))
    }

    /// The events that authorise `ids`, and those that authorise them, and so on. What must be learnt to say so, `ids`
    /// themselves included, goes into `missing`.
    fn chain<'a>(
        &self,
        ids: impl Iterator<Item = &'a OwnedEventId>,
        missing: &mut HashSet<OwnedEventId>,
    ) -> HashSet<OwnedEventId> {
        let mut chain = HashSet::new();
        let mut open: Vec<&OwnedEventId> = ids.collect::<Vec<_>>();
        let mut seen: HashSet<&OwnedEventId> = open.iter().copied().collect();
        while let Some(id) = open.pop() {
            match self.events.get(id) {
                None => {
                    missing.insert(id.clone());
                }
                Some(None) => {}
                Some(Some(event)) => {
                    // The map's own copy of the event lives as long as the walk.
                    for auth in event.auth_ids() {
                        chain.insert(auth.clone());
                        if seen.insert(auth) {
                            open.push(auth);
                        }
                    }
                }
            }
        }
        chain
    }

    /// The events on the ways from one of these events to another along `auth_events`, both ends included.
    fn between<'a>(&self, ids: impl Iterator<Item = &'a OwnedEventId>) -> EventIdSet<OwnedEventId> {
        let ids: Vec<&OwnedEventId> = ids.collect();
        let reachable = self.chain(ids.iter().copied(), &mut HashSet::new());
        let mut authorises: HashMap<&OwnedEventId, Vec<&OwnedEventId>> = HashMap::new();
        for id in reachable.iter().chain(ids.iter().copied()) {
            let event = self.events.get(id).and_then(Option::as_ref);
            for auth in event.iter().flat_map(|event| event.auth_ids()) {
                authorises.entry(auth).or_default().push(id);
            }
        }
        let mut open = ids.clone();
        let mut found: HashSet<&OwnedEventId> = ids.into_iter().collect();
        while let Some(id) = open.pop() {
            for later in authorises.get(id).into_iter().flatten() {
                if found.insert(later) {
                    open.push(later);
                }
            }
        }
        found.into_iter().cloned().collect()
    }
}

fn needs(missing: &HashSet<OwnedEventId>) -> Step {
    let mut ids: Vec<EventId> = missing.iter().map(|id| id.as_str().into()).collect();
    ids.sort_unstable();
    Step::Needs(ids)
}

fn ruma_state(state: &StateMap) -> Result<RumaMap<OwnedEventId>, RulesError> {
    state
        .iter()
        .map(|(key, id)| {
            let ruma = ruma_id(id)
                .ok_or_else(|| RulesError::Unresolvable(format!("the state names {id}: not an event id")))?;
            Ok(((StateEventType::from(&*key.kind), key.key.to_string()), ruma))
        })
        .collect()
}
