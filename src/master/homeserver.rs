//! What do all parts of one homeserver share?

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use serde_json::value::RawValue;
use tokio_util::task::TaskTracker;

use super::{
    keys::Keyring,
    refusal::Refusal,
    rooms::Rooms,
    wire::{self, Parts},
};
use crate::{
    core::{
        clock,
        id::{EventId, RoomId, ServerName},
        replication::{master::MasterStreams, task::Publisher},
        room_version::RoomVersion,
        signing::SigningKey,
        state::{
            context::{self, ContextError, StateBefore, Stored},
            groups::StateGroups,
            map::{StateFilter, StateMap},
        },
        store::{EventJson, RetryTimings, Sqlite, Store, StoreError},
    },
    federation::client::Client,
};

/// Extremities that a new event of ours names at most.
const MAX_PREVIOUS: i64 = 20;

/// Events of an auth chain at most. A room with more is not served.
const MAX_CHAIN: i64 = 100_000;

/// One homeserver.
pub struct Homeserver {
    /// Its name.
    pub(super) name: ServerName,
    /// What it signs with.
    pub(super) key: SigningKey,
    /// The database, for all that any process reads,
    pub(super) store: Store,
    /// and for what only this one writes.
    pub(super) sqlite: Sqlite,
    /// States read lately.
    pub(super) groups: StateGroups,
    /// The way to other servers.
    pub(super) client: Client,
    /// Who signs with what.
    pub(super) keys: Keyring,
    /// What is said to the other processes.
    pub(super) streams: Arc<MasterStreams>,
    /// What any process may say to the others.
    pub(super) publisher: Publisher,
    /// Whose turn it is to end a back-off.
    pub(super) retry_writes: tokio::sync::Mutex<()>,
    /// Whose turn it is.
    pub(super) rooms: Rooms,
    /// What must not be broken off when the asker goes away.
    pub(super) tasks: TaskTracker,
    /// What came in.
    pub(super) counts: Counts,
}

/// What came in since the start.
#[derive(Debug, Default)]
pub struct Counts {
    /// Transactions of other servers.
    pub transactions: AtomicU64,
    /// EDUs in them; nothing is done with them.
    pub edus: AtomicU64,
}

impl Counts {
    /// One more transaction, with so many EDUs.
    pub(super) fn transaction(&self, edus: usize) {
        self.transactions.fetch_add(1, Ordering::Relaxed);
        self.edus
            .fetch_add(u64::try_from(edus).unwrap_or(u64::MAX), Ordering::Relaxed);
    }
}

impl Homeserver {
    /// What is stored, as contexts are computed from it.
    pub(super) fn stored(&self) -> Stored<'_> {
        Stored {
            store: &self.store,
            groups: &self.groups,
        }
    }

    /// Does it to its end, even if whoever waits for it goes away.
    pub(super) async fn to_its_end<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Result<T, Refusal> {
        self.tasks.spawn(work).await.map_err(Refusal::failed)
    }

    /// A server that asks something is up: a back-off from it ends, and the sender hears of it.
    pub(super) async fn heard_from(&self, server: &ServerName) -> Result<(), StoreError> {
        let healthy = RetryTimings::default();
        let records = self.store.destinations(std::slice::from_ref(server)).await?;
        if records.get(server).is_none_or(|record| record.retry == healthy) {
            return Ok(());
        }
        // Rows of caches must be published in the order of their commits.
        let _turn = self.retry_writes.lock().await;
        if let Some(row) = self.store.set_retry(server, healthy, clock::now().wall).await? {
            self.publisher.cache_row(&row);
        }
        self.publisher.remote_server_up(server);
        Ok(())
    }

    /// The room's version, if the room is known.
    pub(super) async fn version(&self, room: &RoomId) -> Result<Option<RoomVersion>, StoreError> {
        let version = self.sqlite.room_version(room).await?;
        Ok(version.and_then(|version| RoomVersion::of(&version)))
    }

    /// The version of the room, if one of our users is joined to it.
    pub(super) async fn joined_room(&self, room: &RoomId) -> Result<Option<RoomVersion>, StoreError> {
        match self.version(room).await? {
            Some(version) if self.store.server_in_room(&self.name, room).await? => Ok(Some(version)),
            _ => Ok(None),
        }
    }

    /// The same, for other servers.
    ///
    /// # Errors
    /// 404 if we are not in the room.
    pub(super) async fn our_room(&self, room: &RoomId) -> Result<RoomVersion, Refusal> {
        let version = self.joined_room(room).await?;
        version.ok_or_else(|| Refusal::not_found("this server is not in that room"))
    }

    /// The same, for our users.
    ///
    /// # Errors
    /// 403 if none of them is in the room.
    pub(super) async fn users_room(&self, room: &RoomId) -> Result<RoomVersion, Refusal> {
        let version = self.joined_room(room).await?;
        version.ok_or_else(|| Refusal::forbidden("you are not joined to that room"))
    }

    /// An event, whether it is in its room's order or not. Rejected ones are left out.
    pub(super) async fn event(&self, id: &EventId) -> Result<Option<EventJson>, StoreError> {
        let found = self.store.events_json(std::slice::from_ref(id)).await?;
        Ok(found.into_iter().find(|event| !event.rejected))
    }

    /// The newest events of the room, which new ones follow, and the greatest depth among them.
    pub(super) async fn extremities(&self, room: &RoomId) -> Result<(Vec<EventId>, i64), StoreError> {
        let found = self.store.forward_extremities(room, MAX_PREVIOUS).await?;
        let depth = found.iter().map(|(_, _, depth)| *depth).max().unwrap_or(0);
        Ok((found.into_iter().map(|(id, ..)| id).collect(), depth))
    }

    /// The room's state as it is now.
    pub(super) async fn state_now(&self, room: &RoomId, version: RoomVersion) -> Result<StateBefore, ContextError> {
        let (extremities, _) = self.extremities(room).await?;
        context::state_before(&self.stored(), version, &extremities).await
    }

    /// A part of it.
    pub(super) async fn current(
        &self,
        room: &RoomId,
        version: RoomVersion,
        filter: &StateFilter,
    ) -> Result<StateMap, ContextError> {
        let state = self.state_now(room, version).await?;
        Ok(state.part(&self.stored(), filter).await?)
    }

    /// The whole state before an event.
    pub(super) async fn state_before_event(&self, parts: &Parts, version: RoomVersion) -> Result<StateMap, Refusal> {
        match context::state_before(&self.stored(), version, &parts.prev_events()).await {
            Ok(state) => Ok(state.part(&self.stored(), &StateFilter::All).await?),
            Err(ContextError::UnknownPrevious(_)) => {
                Err(Refusal::not_found("the state before that event is not known here"))
            }
            Err(error) => Err(error.into()),
        }
    }

    /// What authorises these events, and what authorises that, and so on.
    pub(super) async fn auth_chain(&self, ids: &[EventId]) -> Result<Vec<EventId>, Refusal> {
        let chain = self.sqlite.auth_chain(ids, MAX_CHAIN).await?;
        if i64::try_from(chain.len()).is_ok_and(|length| length < MAX_CHAIN) {
            Ok(chain)
        } else {
            Err(Refusal::failed("the room's auth chain is too long to be served"))
        }
    }

    /// A state's events and what authorises them, as they go into an answer.
    pub(super) async fn state_and_chain(&self, state: StateMap) -> Result<(Pdus, Pdus), Refusal> {
        let ids: Vec<EventId> = state.into_values().collect();
        let chain = self.auth_chain(&ids).await?;
        Ok((self.pdus(&ids).await?, self.pdus(&chain).await?))
    }

    /// Events, as they go into an answer.
    pub(super) async fn pdus(&self, ids: &[EventId]) -> Result<Pdus, Refusal> {
        let events = self.store.events_json(ids).await?;
        let pdus: Result<Pdus, _> = events.into_iter().map(|event| wire::raw(event.json)).collect();
        pdus.map_err(Refusal::failed)
    }
}

/// Events in an answer.
pub(super) type Pdus = Vec<Box<RawValue>>;

impl From<StoreError> for Refusal {
    fn from(error: StoreError) -> Self {
        Self::failed(error)
    }
}

impl From<ContextError> for Refusal {
    fn from(error: ContextError) -> Self {
        match error {
            ContextError::Rules(error) => Self::forbidden(error.to_string()),
            other => Self::failed(other),
        }
    }
}
