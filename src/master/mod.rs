//! A small homeserver: users and rooms of its own, joined with those of other servers, on one SQLite file.
//!
//! It is a homeserver's *main process*. What it persists it publishes over a bus; a sender, in this process or another, takes
//! it from there to the other servers.

mod body;
mod client;
mod create;
mod federation;
mod homeserver;
mod incoming;
mod joining;
mod keys;
mod listener;
mod local;
mod persist;
mod refusal;
mod remote;
mod rooms;
mod tables;
mod wire;

use std::{
    net::SocketAddr,
    path::PathBuf,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use tokio::{sync::Mutex, time::interval};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::{info, warn};

pub use self::listener::{Certificate, ListenError};
use self::{
    homeserver::{Counts, Homeserver},
    keys::Keyring,
    listener::Port,
    rooms::Rooms,
};
use crate::{
    config,
    core::{
        clock,
        id::{EventId, InstanceName, RoomId, ServerName, Token},
        replication::{
            self,
            bus::Bus,
            feed::{Bell, Table},
        },
        signing::SigningKey,
        state::groups::StateGroups,
        store::{HeldEvent, InstanceLock, Sqlite, Store, StoreError},
    },
    federation::client::{Client, ClientError},
};

/// The name of a main process in replication.
pub const INSTANCE: &str = "master";

/// How often what has expired is removed from the database, and how long what caches were told is kept.
const CLEANING: Duration = Duration::from_secs(60);
const CACHES_KEPT: i64 = 24 * 3600 * 1000;

/// Connections to other servers in setup at once.
const MAX_CONNECTING: usize = 50;

/// Events that [`Master::held`] tells of at most.
pub const MAX_HELD: i64 = 100_000;

/// What a homeserver is made of.
#[derive(Clone)]
pub struct Settings {
    /// Its name.
    pub name: ServerName,
    /// What it signs with.
    pub key: SigningKey,
    /// Its SQLite file, made if it is not there.
    pub database: PathBuf,
    /// How other servers are reached.
    pub federation: config::Federation,
    /// Where other servers reach it.
    pub listen: SocketAddr,
    /// What it shows them; without one it speaks plain HTTP, and something in front of it must speak TLS.
    pub certificate: Option<Certificate>,
    /// Where clients reach it, over plain HTTP; nowhere if absent.
    pub client: Option<SocketAddr>,
}

/// Why there is no homeserver.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The database.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The settings for reaching others.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// The ports.
    #[error(transparent)]
    Listen(#[from] ListenError),
}

/// What was asked for was not done. The text says why.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Refused(String);

impl From<refusal::Refusal> for Refused {
    fn from(refusal: refusal::Refusal) -> Self {
        Self(refusal.text().to_owned())
    }
}

/// A running homeserver.
pub struct Master {
    homeserver: Arc<Homeserver>,
    ports: Mutex<Ports>,
    shutdown: CancellationToken,
    replicating: TaskTracker,
    _lock: InstanceLock,
}

struct Ports {
    federation: Port,
    client: Option<Port>,
}

impl Master {
    /// Starts a homeserver that publishes over `bus` what it persists.
    ///
    /// # Errors
    /// Why it cannot.
    pub async fn start(settings: Settings, bus: impl Bus) -> Result<Self, StartError> {
        let me = InstanceName::from(INSTANCE);
        let sqlite = Sqlite::create(&settings.database, me.clone(), settings.name.clone()).await?;
        let store = Store::Sqlite(sqlite.clone());
        store.check().await?;
        let lock = store.lock_instance().await?;
        // Positions of `presence` are kept nowhere, and must be above those of an earlier run.
        let presence = Token(clock::now().wall.0);
        let start = replication::master_start(&store, std::slice::from_ref(&me), presence).await?;
        let client = Client::new(
            settings.name.clone(),
            settings.key.clone(),
            &settings.federation,
            MAX_CONNECTING,
        )?;

        let (shutdown, replicating) = (CancellationToken::new(), TaskTracker::new());
        let master = replication::master::start(bus, me, start, store.clone(), &shutdown, &replicating);
        let mut subscription = master.subscription;
        let publisher = subscription.publisher.clone();
        // Nothing of it concerns us, but a channel that nobody empties would fill up.
        replicating.spawn(
            shutdown
                .clone()
                .run_until_cancelled_owned(async move { while subscription.heard.recv().await.is_some() {} }),
        );
        let homeserver = Arc::new(Homeserver {
            keys: Keyring::new(settings.name.clone(), &settings.key, client.clone(), sqlite.clone()),
            name: settings.name,
            key: settings.key,
            store,
            sqlite,
            groups: StateGroups::default(),
            client,
            streams: master.streams,
            publisher,
            retry_writes: tokio::sync::Mutex::default(),
            rooms: Rooms::default(),
            tasks: TaskTracker::new(),
            counts: Counts::default(),
        });
        replicating.spawn(
            shutdown
                .clone()
                .run_until_cancelled_owned(clean(Arc::clone(&homeserver))),
        );
        let routes = federation::routes(Arc::clone(&homeserver));
        let federation = Port::open(settings.listen, settings.certificate.as_ref(), routes).await?;
        let client = match settings.client {
            Some(address) => Some(Port::open(address, None, client::routes(Arc::clone(&homeserver))).await?),
            None => None,
        };
        info!(server_name = %homeserver.name, federation = %federation.address(), "the homeserver is up");
        Ok(Self {
            homeserver,
            ports: Mutex::new(Ports { federation, client }),
            shutdown,
            replicating,
            _lock: lock,
        })
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &ServerName {
        &self.homeserver.name
    }

    /// Where clients reach it.
    pub async fn client_address(&self) -> Option<SocketAddr> {
        self.ports.lock().await.client.as_ref().map(Port::address)
    }

    /// Makes a user, if there is none of that name, and gives the whole user id.
    ///
    /// # Errors
    /// It is no name for a user.
    pub async fn register(&self, localpart: &str) -> Result<String, Refused> {
        Ok(self.homeserver.register(localpart).await?.0)
    }

    /// Has a user of ours join a room, through one of the servers `via` if we are not in it.
    ///
    /// # Errors
    /// It is not allowed, or no server helped.
    pub async fn join(&self, user: &str, room: &RoomId, via: &[ServerName]) -> Result<EventId, Refused> {
        Ok(self.homeserver.join(user, room, via).await?)
    }

    /// Has a user of ours send a message, perhaps a sticky one.
    ///
    /// # Errors
    /// It is not allowed.
    pub async fn send(&self, user: &str, room: &RoomId, message: Message<'_>) -> Result<EventId, Refused> {
        let version = self.homeserver.users_room(room).await?;
        let draft = local::Draft {
            sender: user.to_owned(),
            kind: message.kind.to_owned(),
            state_key: None,
            content: message.content.to_string(),
            sticky: message
                .sticky
                .map(|duration| i64::try_from(duration.as_millis()).unwrap_or(wire::MAX_STICKY)),
            txn_id: None,
        };
        Ok(self.homeserver.send(room, version, draft).await?)
    }

    /// The events of the room's history as it is here, in the order they came, the newest [`MAX_HELD`].
    ///
    /// # Errors
    /// The database's.
    pub async fn held(&self, room: &RoomId) -> Result<Vec<HeldEvent>, StoreError> {
        self.homeserver.sqlite.held(room, MAX_HELD).await
    }

    /// Its tables, which others may follow.
    #[must_use]
    pub fn tables(&self) -> Vec<Arc<dyn Table>> {
        tables::tables(&self.homeserver.sqlite, &self.homeserver.streams)
    }

    /// What is rung when they have changed.
    #[must_use]
    pub fn bell(&self) -> &Bell {
        self.homeserver.streams.bell()
    }

    /// Transactions of other servers that came in since the start.
    #[must_use]
    pub fn transactions(&self) -> u64 {
        self.homeserver.counts.transactions.load(Ordering::Relaxed)
    }

    /// EDUs in them.
    #[must_use]
    pub fn edus(&self) -> u64 {
        self.homeserver.counts.edus.load(Ordering::Relaxed)
    }

    /// Shuts the port that other servers reach it at: for them it is down.
    pub async fn pause(&self) {
        self.ports.lock().await.federation.shut().await;
    }

    /// Opens that port again.
    ///
    /// # Errors
    /// Somebody else has taken it.
    pub async fn resume(&self) -> Result<(), ListenError> {
        self.ports.lock().await.federation.reopen().await
    }

    /// Ends in good order: takes no more, finishes what it has begun, publishes the rest.
    pub async fn stop(self) {
        let Ports { mut federation, client } = self.ports.into_inner();
        federation.shut().await;
        if let Some(mut client) = client {
            client.shut().await;
        }
        self.homeserver.tasks.close();
        self.homeserver.tasks.wait().await;
        self.shutdown.cancel();
        self.replicating.close();
        self.replicating.wait().await;
        self.homeserver.store.close().await;
    }
}

/// A message to a room.
#[derive(Debug, Clone, Copy)]
pub struct Message<'a> {
    /// Its type.
    pub kind: &'a str,
    /// Its content.
    pub content: &'a serde_json::Value,
    /// How long it is sticky, if it is.
    pub sticky: Option<Duration>,
}

/// Removes what has expired, now and then.
async fn clean(homeserver: Arc<Homeserver>) {
    let mut ticks = interval(CLEANING);
    loop {
        ticks.tick().await;
        let now = clock::now().wall;
        if let Err(error) = homeserver.sqlite.forget_old(now, now.plus(-CACHES_KEPT)).await {
            warn!(%error, "what has expired was not removed");
        }
    }
}
