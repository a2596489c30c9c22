//! What the rig stands on: PostgreSQL (given by the environment) and Redis (its own, so that it can be restarted).

use std::{
    net::{Ipv4Addr, TcpListener},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use rand::RngExt as _;
use sqlx::{Connection as _, PgConnection, postgres::PgConnectOptions};
use tokio::sync::Mutex;

use super::{process::Process, store::Store};

/// The services that `tests/run` tells us of.
#[derive(Debug, Clone)]
pub struct Services {
    postgres: PgConnectOptions,
    template: String,
    /// The Python that has Synapse.
    pub python: PathBuf,
    restart: Option<String>,
    dir: PathBuf,
}

impl Services {
    /// From the environment. `Err` names the first variable that is missing.
    pub fn from_env() -> Result<Self, String> {
        let variable = |name: &str| std::env::var(name).map_err(|_| format!("{name} is not set"));
        let postgres = variable("BURDOCK_TEST_PG")?;
        Ok(Self {
            postgres: postgres.parse().map_err(|error| format!("BURDOCK_TEST_PG: {error}"))?,
            template: variable("BURDOCK_TEST_TEMPLATE")?,
            python: variable("BURDOCK_TEST_SYNAPSE")?.into(),
            restart: variable("BURDOCK_TEST_PG_RESTART").ok(),
            dir: std::env::var_os("BURDOCK_TEST_DIR").map_or_else(std::env::temp_dir, PathBuf::from),
        })
    }

    /// Where files may be made.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// PostgreSQL's host, port and user, for a configuration.
    pub fn postgres(&self) -> &PgConnectOptions {
        &self.postgres
    }

    /// A new database with Synapse's schema.
    pub async fn new_database(&self, name: &str) -> Result<Store> {
        let name = format!("e2e_{}_{name}", std::process::id());
        let mut admin = PgConnection::connect_with(&self.postgres)
            .await
            .context("no connection to PostgreSQL")?;
        let sql = format!("CREATE DATABASE {name} TEMPLATE {}", self.template);
        sqlx::query(sqlx::AssertSqlSafe(sql)).execute(&mut admin).await?;
        Ok(Store::new(&name, self.postgres.clone().database(&name)))
    }

    /// Drops a database that was made by [`Services::new_database`].
    pub async fn drop_database(&self, store: &Store) -> Result<()> {
        store.close().await;
        let mut admin = PgConnection::connect_with(&self.postgres).await?;
        let sql = format!("DROP DATABASE {} WITH (FORCE)", store.database);
        sqlx::query(sqlx::AssertSqlSafe(sql)).execute(&mut admin).await?;
        Ok(())
    }

    /// Restarts PostgreSQL; `false` if we were not told how.
    pub async fn restart_postgres(&self) -> Result<bool> {
        let Some(restart) = &self.restart else {
            return Ok(false);
        };
        let mut words = restart.split_whitespace();
        let program = words.next().context("BURDOCK_TEST_PG_RESTART is empty")?;
        let mut command = tokio::process::Command::new(program);
        let status = command
            .args(words)
            .current_dir("/")
            .stdin(Stdio::null())
            .status()
            .await?;
        ensure!(status.success(), "{restart}: {status}");
        Ok(true)
    }
}

/// A port that nobody listens on, below those that the system gives to outgoing connections.
pub fn free_port() -> Result<u16> {
    #[expect(clippy::disallowed_methods, reason = "two runs at once shall not try the same ports")]
    let mut random = rand::rng();
    for _ in 0..1000 {
        let port = random.random_range(20_000..32_000);
        if TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).is_ok() {
            return Ok(port);
        }
    }
    bail!("no free port found")
}

/// The Redis of hs1 and its sender.
pub struct Redis {
    port: u16,
    dir: PathBuf,
    process: Mutex<Option<Process>>,
}

impl Redis {
    /// Starts it on a free port.
    pub async fn start(dir: &Path) -> Result<Self> {
        let redis = Self {
            port: free_port()?,
            dir: dir.to_owned(),
            process: Mutex::default(),
        };
        redis.ensure().await?;
        Ok(redis)
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// Starts it if it does not run.
    pub async fn ensure(&self) -> Result<()> {
        let mut process = self.process.lock().await;
        if process.as_mut().is_some_and(|process| process.ended().is_none()) {
            return Ok(());
        }
        let mut command = Command::new("redis-server");
        command
            .args(["--bind", "127.0.0.1", "--loglevel", "warning", "--port"])
            .arg(self.port.to_string());
        command
            .args(["--save", "", "--appendonly", "no", "--dir"])
            .arg(&self.dir);
        let mut started = Process::spawn(&self.dir, "redis", &mut command)?;
        let address = (Ipv4Addr::LOCALHOST, self.port);
        let is_ready = || async move { tokio::net::TcpStream::connect(address).await.is_ok() };
        started.wait_until(Duration::from_secs(10), is_ready).await?;
        *process = Some(started);
        Ok(())
    }

    /// Stops it.
    pub async fn stop(&self) {
        let process = self.process.lock().await.take();
        if let Some(process) = process {
            let _ = process.stop().await;
        }
    }
}
