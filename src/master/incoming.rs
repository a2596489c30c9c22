//! What becomes of the events that another server sends? They are verified, what they follow is fetched if it is not here,
//! and then they go the way of all events.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::Arc,
};

use futures_util::future::join_all;
use serde_json::value::RawValue;
use tokio::time::{Duration, Instant};
use tracing::{debug, info};

use super::{
    federation::come_again,
    homeserver::Homeserver,
    keys::KeyError,
    persist::{Arrival, PersistError, Source, Verdict},
    refusal::Refusal,
    remote,
    wire::Parts,
};
use crate::core::{
    clock::Millis,
    event::{self, EventError, ReceivedEvent, SignatureError, VerifiedEvent},
    id::{EventId, RoomId, ServerName, StateGroup},
    room_version::RoomVersion,
    signing::VerifyKey,
    store::StoreError,
};

/// For one event of a transaction, this many others are fetched at most, in this time.
const MAX_FETCHED: usize = 2_000;
const FETCH_PATIENCE: Duration = Duration::from_secs(60);

/// Events asked for at once.
const PAGE: usize = 100;

/// Events that authorise another and are fetched one by one.
const MAX_AUTH: usize = 200;

/// Why an event was refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused(pub String);

/// Why an event is not believed.
#[derive(Debug, thiserror::Error)]
pub enum Disbelief {
    /// It is no event of its room's version.
    #[error(transparent)]
    Form(#[from] EventError),
    /// Its signatures.
    #[error(transparent)]
    Signature(#[from] SignatureError),
    /// The key to check them with.
    #[error(transparent)]
    Key(#[from] KeyError),
}

/// What has been tried to get what an event follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Tried {
    Events,
    State,
}

/// One event on its way in, with those that must come in before it.
struct Arriving<'a> {
    homeserver: &'a Homeserver,
    origin: &'a ServerName,
    room: &'a RoomId,
    version: RoomVersion,
    /// The lowest first; the one that all this is for is the last.
    queue: VecDeque<(i64, Arrival)>,
    seen: HashSet<EventId>,
    tried: HashMap<EventId, Tried>,
    /// The states before events whose previous ones are not to be had.
    before: HashMap<EventId, StateGroup>,
    until: Instant,
}

impl Homeserver {
    /// Takes in what `origin` sends of one room, in order. Says of each event what became of it.
    ///
    /// # Errors
    /// Nothing was done, and it is to be sent again.
    pub(super) async fn receive(
        self: Arc<Self>,
        origin: ServerName,
        room: RoomId,
        pdus: Vec<String>,
    ) -> Result<Vec<(EventId, Result<(), Refused>)>, Refusal> {
        // Its state is not here before, and the sender must not think that we have what we throw away.
        if !self.rooms.settled(&room).await {
            return Err(come_again("we are still joining that room"));
        }
        let Some(version) = self.version(&room).await? else {
            // Without its version the events have no ids to answer under.
            info!(%origin, %room, events = pdus.len(), "events of an unknown room were passed over");
            return Ok(Vec::new());
        };
        let joined = self.store.server_in_room(&self.name, &room).await?;
        let mut results = Vec::with_capacity(pdus.len());
        for pdu in pdus {
            let Ok(id) = event::event_id(&pdu, version) else {
                debug!(%origin, %room, "a PDU is no event");
                continue;
            };
            let result = if joined {
                self.receive_one(&origin, &room, version, &pdu).await?
            } else {
                Err(Refused("this server is not in that room".into()))
            };
            if let Err(Refused(why)) = &result {
                info!(%origin, %room, event_id = %id, why, "an event was refused");
            }
            results.push((id, result));
        }
        Ok(results)
    }

    /// # Errors
    /// The database's.
    async fn receive_one(
        &self,
        origin: &ServerName,
        room: &RoomId,
        version: RoomVersion,
        pdu: &str,
    ) -> Result<Result<(), Refused>, StoreError> {
        let event = match self.believe(pdu, version).await {
            Ok(event) => event,
            Err(Disbelief::Key(KeyError::Store(error))) => return Err(error),
            Err(error) => return Ok(Err(Refused(error.to_string()))),
        };
        let mut arriving = Arriving {
            homeserver: self,
            origin,
            room,
            version,
            queue: VecDeque::new(),
            seen: HashSet::new(),
            tried: HashMap::new(),
            before: HashMap::new(),
            until: Instant::now() + FETCH_PATIENCE,
        };
        arriving.enqueue(vec![event]);
        match arriving.persist().await {
            Ok(Verdict::Known | Verdict::New) => Ok(Ok(())),
            // It is held, and that it is not shown is no concern of its sender's.
            Ok(Verdict::SoftFailed(why)) => {
                info!(%origin, %room, why, "an event was soft-failed");
                Ok(Ok(()))
            }
            Ok(Verdict::Rejected(why)) => Ok(Err(Refused(format!("not allowed: {why}")))),
            Err(PersistError::Store(error)) => Err(error),
            Err(error) => Ok(Err(Refused(error.to_string()))),
        }
    }

    /// Reads an event and checks that it is what its sender's server signed.
    pub(super) async fn believe(&self, pdu: &str, version: RoomVersion) -> Result<VerifiedEvent, Disbelief> {
        let received = ReceivedEvent::read(pdu, version)?;
        let parts = Parts::read(pdu).map_err(|_| EventError::Malformed("a part"))?;
        self.verify(received, parts.origin_server_ts).await
    }

    /// Checks an event's signatures, with the keys that were valid when it was made.
    pub(super) async fn verify(&self, event: ReceivedEvent, made: i64) -> Result<VerifiedEvent, Disbelief> {
        let mut keys: HashMap<(ServerName, String), VerifyKey> = HashMap::new();
        for signer in event.signers() {
            let mut failure = None;
            for key_id in &signer.key_ids {
                match self.keys.get(&signer.server, key_id, Millis(made)).await {
                    Ok(key) => {
                        keys.insert((signer.server.clone(), key_id.clone()), key);
                    }
                    Err(error) => failure = Some(error),
                }
            }
            // Which server cannot be reached says more than that its key is not known.
            if let Some(failure) = failure
                && !keys.keys().any(|(server, _)| *server == signer.server)
            {
                return Err(failure.into());
            }
        }
        Ok(event.verify(|server, key_id| keys.get(&(server.clone(), key_id.to_owned())).cloned())?)
    }

    /// Those of the events that can be believed.
    pub(super) async fn believe_all(&self, pdus: &[Box<RawValue>], version: RoomVersion) -> Vec<VerifiedEvent> {
        const AT_ONCE: usize = 16;
        let mut events = Vec::with_capacity(pdus.len());
        for pdus in pdus.chunks(AT_ONCE) {
            for event in join_all(pdus.iter().map(|pdu| self.believe(pdu.get(), version))).await {
                match event {
                    Ok(event) => events.push(event),
                    Err(error) => debug!(%error, "an event that was fetched is not believed"),
                }
            }
        }
        events
    }
}

impl Arriving<'_> {
    /// Takes events among those that must come in before the one that all is for. How many of them are new?
    fn enqueue(&mut self, events: Vec<VerifiedEvent>) -> usize {
        let mut new = 0;
        for event in events {
            let Ok(parts) = Parts::of_room(&event.json, self.room, self.version) else {
                continue;
            };
            if self.seen.insert(event.event_id.clone()) {
                let arrival = Arrival {
                    event_id: event.event_id,
                    json: event.json,
                    source: Source::Elsewhere,
                };
                let place = self.queue.partition_point(|(depth, _)| *depth < parts.depth);
                self.queue.insert(place, (parts.depth, arrival));
                new += 1;
            }
        }
        new
    }

    async fn persist(&mut self) -> Result<Verdict, PersistError> {
        let Some(target) = self.queue.back().map(|(_, arrival)| arrival.event_id.clone()) else {
            return Ok(Verdict::Known);
        };
        loop {
            let (id, outcome) = self.persist_what_can_be().await;
            // Nobody else may wait while others are asked.
            let error = match outcome {
                Ok(persisted) => return Ok(persisted),
                Err(error) => error,
            };
            let helped = match &error {
                PersistError::MissingPrevious(_) => self.fetch_previous(&id).await?,
                PersistError::MissingAuth(missing) => self.fetch_auth(missing.clone()).await?,
                _ => false,
            };
            if !helped {
                if id == target || matches!(error, PersistError::Store(_)) {
                    return Err(error);
                }
                debug!(event_id = %id, %error, "an event that was fetched is left out");
                self.queue.retain(|(_, arrival)| arrival.event_id != id);
            }
        }
    }

    /// Persists one after the other, until one cannot be, or the last one is.
    async fn persist_what_can_be(&mut self) -> (EventId, Result<Verdict, PersistError>) {
        let lock = self.homeserver.rooms.lock(self.room).await;
        loop {
            let Some((_, arrival)) = self.queue.front() else {
                // The last one always ends the loop below.
                return (EventId::from(""), Ok(Verdict::Known));
            };
            let before = self.before.get(&arrival.event_id).copied();
            let result = self.homeserver.persist(&lock, self.version, arrival, before).await;
            if result.is_err() || self.queue.len() == 1 {
                return (arrival.event_id.clone(), result);
            }
            self.queue.pop_front();
        }
    }

    /// Fetches what the event follows; if that is not to be had, the state before it. Is there reason to try again?
    async fn fetch_previous(&mut self, id: &EventId) -> Result<bool, StoreError> {
        let homeserver = self.homeserver;
        if Instant::now() > self.until {
            return Ok(false);
        }
        if !self.tried.contains_key(id) && self.seen.len() < MAX_FETCHED {
            self.tried.insert(id.clone(), Tried::Events);
            let earliest = homeserver.extremities(self.room).await?.0;
            let least = homeserver.sqlite.least_depth(self.room).await?.unwrap_or(0);
            let latest = std::slice::from_ref(id);
            let found = remote::missing_events(
                &homeserver.client,
                self.origin,
                self.room,
                &earliest,
                latest,
                least,
                PAGE,
            )
            .await;
            match found {
                Ok(found) => {
                    let believed = homeserver.believe_all(&found, self.version).await;
                    if self.enqueue(believed) > 0 {
                        return Ok(true);
                    }
                }
                Err(error) => debug!(origin = %self.origin, %error, "missing events were not to be had"),
            }
        }
        if self.tried.insert(id.clone(), Tried::State) == Some(Tried::State) {
            return Ok(false);
        }
        match homeserver
            .fetch_state_before(self.origin, self.room, self.version, id)
            .await
        {
            Ok(group) => {
                self.before.insert(id.clone(), group);
                Ok(true)
            }
            Err(PersistError::Store(error)) => Err(error),
            Err(error) => {
                debug!(origin = %self.origin, %error, "the state before an event was not to be had");
                Ok(false)
            }
        }
    }

    /// Fetches events that authorise others. Are they all there now?
    async fn fetch_auth(&mut self, missing: Vec<EventId>) -> Result<bool, StoreError> {
        if Instant::now() > self.until || missing.iter().any(|id| !self.seen.insert(id.clone())) {
            return Ok(false);
        }
        let fetched = self
            .homeserver
            .fetch_outliers(self.origin, self.room, self.version, missing)
            .await;
        match fetched {
            Ok(lacking) => Ok(lacking.is_empty()),
            Err(PersistError::Store(error)) => Err(error),
            Err(_) => Ok(false),
        }
    }
}

impl Homeserver {
    /// Fetches events, and all that authorise them, as far as they are not here; they are kept outside of the room's order.
    /// Returns those that are not to be had, or not to be believed: the keys of a server that does not answer are not to
    /// be had either, and that must not keep the rest away.
    async fn fetch_outliers(
        &self,
        origin: &ServerName,
        room: &RoomId,
        version: RoomVersion,
        ids: Vec<EventId>,
    ) -> Result<HashSet<EventId>, PersistError> {
        let mut asked: HashSet<EventId> = ids.iter().cloned().collect();
        let mut open = ids;
        let mut fetched = Vec::new();
        let mut lacking = HashSet::new();
        while let Some(id) = open.pop() {
            if fetched.len() + lacking.len() >= MAX_AUTH {
                return Err(PersistError::MissingAuth(vec![id]));
            }
            let event = match remote::event(&self.client, origin, &id).await {
                Ok(found) => self.believe(found.get(), version).await.ok(),
                Err(_) => None,
            };
            let Some(event) = event.filter(|event| event.event_id == id) else {
                lacking.insert(id);
                continue;
            };
            let parts = Parts::read(&event.json).map_err(|error| PersistError::Malformed(error.to_string()))?;
            let named = parts.auth_events();
            let here = self.store.events_json(&named).await?;
            let here: HashSet<EventId> = here.into_iter().map(|event| event.event_id).collect();
            open.extend(
                named
                    .into_iter()
                    .filter(|id| !here.contains(id) && asked.insert(id.clone())),
            );
            fetched.push(event);
        }
        let lock = self.rooms.lock(room).await;
        self.persist_outliers(&lock, version, fetched).await?;
        Ok(lacking)
    }

    /// Asks for the state before an event, and stores it as a group.
    async fn fetch_state_before(
        &self,
        origin: &ServerName,
        room: &RoomId,
        version: RoomVersion,
        id: &EventId,
    ) -> Result<StateGroup, PersistError> {
        let not_to_be_had = |error: &dyn std::fmt::Display| PersistError::Malformed(error.to_string());
        let answer = remote::state_ids(&self.client, origin, room, id).await;
        let answer = answer.map_err(|error| not_to_be_had(&error))?;
        let mut state: Vec<EventId> = answer.pdu_ids.into_iter().map(EventId::from).collect();
        let all: Vec<EventId> = state
            .iter()
            .cloned()
            .chain(answer.auth_chain_ids.into_iter().map(EventId::from))
            .collect();
        let here = self.store.events_json(&all).await?;
        let here: HashSet<EventId> = here.into_iter().map(|event| event.event_id).collect();
        let mut missing: Vec<EventId> = all.into_iter().filter(|id| !here.contains(id)).collect();
        missing.sort_unstable();
        missing.dedup();
        if !missing.is_empty() {
            let lacking = self.fetch_outliers(origin, room, version, missing).await?;
            state.retain(|id| !lacking.contains(id));
        }
        let lock = self.rooms.lock(room).await;
        self.store_state(&lock, version, id, &state).await
    }
}
