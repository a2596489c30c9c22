//! The rig: PostgreSQL, Redis, two real homeservers, and any number of fake ones.
//!
//! `hs1` is the homeserver that the sender under test serves. `hs2` sends for itself and receives behind a [`Gate`]. It
//! is started for the first case that runs, shared by all, and stopped at the end. Nothing of the system is changed:
//! every server's name is a loopback address or `localhost`, with a port.

pub mod client;
pub mod process;
pub mod sender;
pub mod services;
pub mod store;
pub mod synapse;
pub mod traffic;

use std::{
    collections::HashMap,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use tempfile::TempDir;

use self::{
    client::{RoomOptions, User},
    services::{Redis, Services},
    store::As,
    synapse::Synapse,
    traffic::Traffic,
};
use crate::fake_remote::{
    gate::Gate,
    server::{FakeHost, FakeServer},
    tls::Certificates,
};

/// All that a case needs.
pub struct Rig {
    /// Ours: the sender under test serves it.
    pub hs1: Synapse,
    /// The one that receives.
    pub hs2: Synapse,
    /// What comes to `hs2`.
    pub gate: Gate,
    /// hs1's Redis.
    pub redis: Redis,
    /// Alice, of `hs1`.
    pub alice: User,
    /// Bob, of `hs2`.
    pub bob: User,
    services: Services,
    fakes: FakeHost,
    dir: TempDir,
    numbers: AtomicU32,
}

impl Rig {
    /// Starts everything but a sender.
    pub async fn start(services: Services) -> Result<Self> {
        let dir = TempDir::with_prefix_in("e2e.", services.dir())?;
        let certificates = Certificates::new()?;
        let authority = dir.path().join("ca.pem");
        std::fs::write(&authority, &certificates.authority)?;
        std::fs::write(dir.path().join("cert.pem"), &certificates.certificate)?;
        std::fs::write(dir.path().join("key.pem"), &certificates.key)?;
        let http = reqwest::Client::builder().timeout(Duration::from_mins(1)).build()?;

        let redis = Redis::start(dir.path()).await?;
        let (gate_port, fake_port) = (services::free_port()?, services::free_port()?);
        let (hs1, hs2) = tokio::try_join!(
            Synapse::start(
                synapse::Role::Sending { redis: redis.port() },
                dir.path(),
                &services,
                &http
            ),
            Synapse::start(
                synapse::Role::Receiving { public: gate_port },
                dir.path(),
                &services,
                &http
            ),
        )?;
        let keys = [&hs1, &hs2].map(|hs| (hs.name.clone(), hs.identity.key.verifying_key()));
        let keys = Arc::new(HashMap::from(keys));
        let gate = Gate::start(gate_port, &hs2.name, hs2.url.clone(), http, &certificates, keys.clone()).await?;
        let fakes = FakeHost::start(fake_port, &certificates, keys).await?;
        let (alice, bob) = tokio::try_join!(hs1.register("alice"), hs2.register("bob"))?;
        Ok(Self {
            hs1,
            hs2,
            gate,
            redis,
            alice,
            bob,
            services,
            fakes,
            dir,
            numbers: AtomicU32::default(),
        })
    }

    /// Before each case: whatever the last one left broken is put right.
    pub async fn heal(&self) -> Result<()> {
        self.gate.open();
        self.gate.record().forgive();
        self.redis.ensure().await?;
        tokio::try_join!(self.hs1.ensure(), self.hs2.ensure())?;
        Ok(())
    }

    /// Stops everything.
    pub async fn stop(self) {
        self.hs1.stop().await;
        self.hs2.stop().await;
        self.redis.stop().await;
        for hs in [&self.hs1, &self.hs2] {
            if let Err(error) = self.services.drop_database(&hs.store).await {
                eprintln!("the database of {} could not be dropped: {error:#}", hs.name);
            }
        }
        if std::env::var_os("BURDOCK_TEST_KEEP").is_some() {
            eprintln!("kept: {}", self.dir.keep().display());
        }
    }

    /// The folder of configurations and logs.
    pub fn dir(&self) -> PathBuf {
        self.dir.path().to_owned()
    }

    /// A fake server with a new name.
    pub fn fake(&self) -> Result<Arc<FakeServer>> {
        self.fakes.add()
    }

    /// This many fake servers, all joined to a room through hs1.
    pub async fn joined_fakes(&self, count: usize, room_id: &str) -> Result<Vec<Arc<FakeServer>>> {
        let fakes = (0..count).map(|_| self.fake()).collect::<Result<Vec<_>>>()?;
        // Synapse takes one join of a room at a time, but several requests keep it busy.
        for some in fakes.chunks(4) {
            let joins = some.iter().map(|fake| fake.join(&self.hs1.resident, room_id));
            futures_util::future::try_join_all(joins).await?;
        }
        Ok(fakes)
    }

    /// A public room of Alice's that Bob has joined.
    pub async fn shared_room(&self, options: RoomOptions) -> Result<String> {
        let room_id = self.alice.create_room(options).await?;
        self.bob
            .join(&room_id, &self.hs1.name)
            .await
            .context("Bob joins Alice's room")?;
        Ok(room_id)
    }

    /// Alice talks in a room.
    pub fn traffic(&self, room_id: &str) -> Traffic {
        Traffic::start(&self.alice, room_id, Duration::from_millis(100))
    }

    /// Waits until the real server and these fake ones have every message of the room. What they were sent was right.
    pub async fn all_messages_arrive(&self, room_id: &str, fakes: &[Arc<FakeServer>], within: Duration) -> Result<()> {
        let deadline = Instant::now() + within;
        self.all_messages_arrive_at(room_id, fakes, within).await?;
        let messages = self.hs1.store.messages(room_id).await?;
        let left = deadline.saturating_duration_since(Instant::now());
        self.receiver_holds(&messages, left).await
    }

    /// Waits until the real server has these messages. What it was sent was right.
    async fn receiver_holds(&self, messages: &[String], within: Duration) -> Result<()> {
        let held = self.hs2.store.wait_for(messages, As::Event, within).await;
        if held.is_err() {
            let lacks = self.hs2.store.lacks(messages, As::Event).await?;
            let accepted = |id: &&String| self.gate.record().all_accepted_at(std::slice::from_ref(*id)).is_some();
            let accepted = lacks.iter().filter(accepted).count();
            return held.with_context(|| format!("of what it lacks it had accepted {accepted}"));
        }
        self.gate.record().check()
    }

    /// The same of fake servers alone.
    pub async fn all_messages_arrive_at(
        &self,
        room_id: &str,
        fakes: &[Arc<FakeServer>],
        within: Duration,
    ) -> Result<()> {
        let messages = self.hs1.store.messages(room_id).await?;
        let deadline = Instant::now() + within;
        for fake in fakes {
            let left = deadline.saturating_duration_since(Instant::now());
            fake.record.wait_for(&messages, left).await?;
            fake.record.check()?;
        }
        Ok(())
    }

    /// Waits until the real server holds the room's newest message.
    pub async fn newest_message_arrives(&self, room_id: &str, within: Duration) -> Result<()> {
        let messages = self.hs1.store.messages(room_id).await?;
        let newest = &messages[messages.len() - 1..];
        self.receiver_holds(newest, within).await
    }

    /// Waits until the real server has accepted the room's newest message.
    pub async fn newest_message_is_accepted(&self, room_id: &str, within: Duration) -> Result<()> {
        let messages = self.hs1.store.messages(room_id).await?;
        let newest = &messages[messages.len() - 1..];
        self.gate.record().wait_for(newest, within).await?;
        self.gate.record().check()
    }

    /// A number not given before, for names.
    pub fn next_number(&self) -> u32 {
        self.numbers.fetch_add(1, Ordering::Relaxed)
    }

    /// Restarts PostgreSQL; `false` if it is not ours to restart.
    pub async fn restart_postgres(&self) -> Result<bool> {
        self.services.restart_postgres().await
    }
}

/// Waits until something holds; if it does not, the error says what.
pub async fn wait_until(what: &str, within: Duration, holds: impl AsyncFn() -> Result<bool>) -> Result<()> {
    let deadline = Instant::now() + within;
    while !holds().await? {
        ensure!(Instant::now() < deadline, "not within {within:?}: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Ok(())
}
