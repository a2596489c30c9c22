//! Another homeserver: a real one, with its own database, in this process.

use std::{
    collections::HashMap,
    net::{Ipv4Addr, SocketAddr, TcpListener},
    path::Path,
    time::Duration,
};

use anyhow::{Context, ensure};
use tokio::{
    task::JoinHandle,
    time::{Instant, sleep},
};

use super::{certificates::Certificates, progress::Bar};
use crate::{
    config::{AddressRanges, Federation},
    core::{
        clock::{self, Millis},
        id::{RoomId, ServerName},
        replication::local_bus::LocalBus,
        signing::SigningKey,
    },
    master::{Certificate, Master, Settings},
};

/// How often is looked at what a server holds.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// A port of the loopback that is free now.
pub fn free_port() -> anyhow::Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    Ok(listener.local_addr()?.port())
}

/// A homeserver that receives.
pub struct Remote {
    /// Its Matrix name.
    pub name: String,
    /// When it joined, since the beginning of the story.
    pub joined: Duration,
    /// When it joined, or last came back.
    pub since: Millis,
    server: Master,
    address: SocketAddr,
    silence: Option<JoinHandle<()>>,
}

impl Remote {
    /// Starts it, with its data in `dir`.
    pub async fn start(dir: &Path, certificates: &Certificates) -> anyhow::Result<Self> {
        std::fs::create_dir_all(dir)?;
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, free_port()?));
        let name = address.to_string();
        let mut seed = [0; 32];
        getrandom::fill(&mut seed).context("the operating system has no randomness to give")?;
        let settings = Settings {
            name: ServerName::from(name.as_str()),
            key: SigningKey::from_seed("demo", &seed),
            database: dir.join("homeserver.db"),
            federation: Federation {
                domain_whitelist: None,
                address_filter: AddressRanges::default(),
                verify_certificates: true,
                unverified_names: vec![],
                custom_ca: Some(vec![std::fs::read(&certificates.authority)?]),
                tls_1_3_only: false,
                timeout: Duration::from_secs(3),
            },
            listen: address,
            certificate: Some(Certificate {
                chain: std::fs::read(&certificates.certificate)?,
                key: std::fs::read(&certificates.key)?,
            }),
            client: None,
        };
        Ok(Self {
            server: Master::start(settings, LocalBus::default()).await?,
            name,
            address,
            joined: Duration::ZERO,
            since: Millis(0),
            silence: None,
        })
    }

    /// A user of it joins the room through `via`. `began`: when the story did.
    pub async fn join(&mut self, room: &RoomId, via: &str, began: Instant) -> anyhow::Result<()> {
        let user = self.server.register("bob").await?;
        self.since = clock::now().wall;
        self.joined = began.elapsed();
        let join = self.server.join(&user, room, &[ServerName::from(via)]).await;
        join.with_context(|| format!("{} cannot join", self.name))?;
        Ok(())
    }

    /// The sticky events that it holds as such, with the time when each came.
    pub async fn sticky(&self, room: &RoomId) -> anyhow::Result<HashMap<String, Millis>> {
        let held = self.server.held(room).await?;
        let sticky = held
            .into_iter()
            .filter(|event| event.sticky_until.is_some() && !event.soft_failed);
        Ok(sticky
            .map(|event| (event.event_id.to_string(), event.received))
            .collect())
    }

    /// Waits until it has this event, sticky or not.
    pub async fn has(&self, event: &str, room: &RoomId, within: Duration) -> anyhow::Result<()> {
        let began = Instant::now();
        while !self
            .server
            .held(room)
            .await?
            .iter()
            .any(|held| held.event_id.as_str() == event)
        {
            ensure!(began.elapsed() < within, "{} lacks {event} after {within:?}", self.name);
            sleep(LOOK_EVERY).await;
        }
        Ok(())
    }

    /// Waits until it holds all of these.
    pub async fn holds(
        &self,
        events: &[&str],
        room: &RoomId,
        within: Duration,
        bar: Option<&Bar>,
    ) -> anyhow::Result<()> {
        let began = Instant::now();
        loop {
            let sticky = self.sticky(room).await?;
            let held = events.iter().filter(|id| sticky.contains_key(**id)).count();
            if let Some(bar) = bar {
                bar.set(held);
            }
            if held == events.len() {
                return Ok(());
            }
            ensure!(
                began.elapsed() < within,
                "{} holds {held} of {} sticky events after {within:?}",
                self.name,
                events.len()
            );
            sleep(LOOK_EVERY).await;
        }
    }

    /// Transactions that came to it.
    pub fn transactions(&self) -> u64 {
        self.server.transactions()
    }

    /// It cannot be reached any more.
    pub async fn go_away(&self) {
        self.server.pause().await;
    }

    /// It can be reached again.
    pub async fn come_back(&mut self) -> anyhow::Result<()> {
        self.since = clock::now().wall;
        Ok(self.server.resume().await?)
    }

    /// From now on it takes connections and says nothing on them.
    pub async fn fall_silent(&mut self) -> anyhow::Result<()> {
        self.server.pause().await;
        let listener = tokio::net::TcpListener::bind(self.address)
            .await
            .with_context(|| format!("cannot listen on {}", self.address))?;
        self.silence = Some(tokio::spawn(async move {
            let mut held = vec![];
            while let Ok((connection, _)) = listener.accept().await {
                held.push(connection);
            }
        }));
        Ok(())
    }

    /// Ends it.
    pub async fn stop(self) {
        if let Some(silence) = self.silence {
            silence.abort();
        }
        self.server.stop().await;
    }
}
