//! The validated configuration: Synapse's own YAML files and our optional TOML file become one [`Config`].

mod address_ranges;
mod database;
mod duration;
mod error;
mod node;
mod own;
mod redis;
mod remote;
mod server_name;
mod signing_key;
mod workers;
mod yaml;

#[cfg(test)]
mod tests;

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use ipnet::IpNet;

pub use error::ConfigError;

use crate::core::{
    id::{InstanceName, ServerName},
    signing::SigningKey,
};

/// Everything the process needs to know, checked. Printing it shows no secret.
#[derive(Debug)]
pub struct Config {
    /// Our homeserver's Matrix name (`server_name`).
    pub server_name: ServerName,
    /// Our replication instance name (`worker_name`).
    pub instance: InstanceName,
    /// The first key of `signing_key_path`, or `signing_key`.
    pub signing_key: SigningKey,
    /// PostgreSQL.
    pub database: Database,
    /// Redis.
    pub redis: Redis,
    /// Who writes and who sends, and how to reach them.
    pub replication: Replication,
    /// Talking to other homeservers.
    pub federation: Federation,
    /// The retry schedule.
    pub retry: Retry,
    /// `experimental_features.msc4354_enabled`.
    pub sticky_events: bool,
    /// Our own keys (`burdock.toml`).
    pub own: Own,
    /// What is odd in the files, but does not keep us from starting: sentences for the log.
    pub warnings: Vec<String>,
}

impl Config {
    /// Reads Synapse's files `yaml_paths` (what follows each `-c`, in order; a folder means its `*.yaml`), and our own
    /// TOML file `own`, and checks everything.
    ///
    /// # Errors
    /// The first thing that is wrong: file, key, what is wrong, what to do.
    pub fn load(yaml_paths: &[PathBuf], own: Option<&Path>) -> Result<Self, ConfigError> {
        Self::load_with(yaml_paths, own, &|name| std::env::var(name).ok())
    }

    fn load_with(
        yaml_paths: &[PathBuf],
        own: Option<&Path>,
        env: &dyn Fn(&str) -> Option<String>,
    ) -> Result<Self, ConfigError> {
        let own = own::read(own)?;
        let layers = yaml::Layers::read(yaml_paths)?;
        let server_name = server_name::read(&layers)?;
        let instance = workers::instance(&layers)?;
        let experimental = layers.get("experimental_features");
        let database = database::read(&layers)?;
        let embedded = matches!(database, Database::Sqlite(_));
        Ok(Self {
            database,
            redis: redis::read(&layers)?,
            replication: workers::read(&layers, &instance, embedded)?,
            federation: remote::read(&layers, env)?,
            retry: remote::read_retry(&layers)?,
            sticky_events: experimental.get("msc4354_enabled")?.flag()?.unwrap_or(false),
            signing_key: signing_key::read(&layers, &server_name)?,
            server_name,
            instance,
            own,
            warnings: warnings(layers),
        })
    }
}

/// How other homeservers are reached and tried again: what an embedded homeserver takes from files like Synapse's.
#[derive(Debug, Clone)]
pub struct Reach {
    /// How they are reached.
    pub federation: Federation,
    /// How often they are tried again.
    pub retry: Retry,
    /// All that the files say, for those who read them after us.
    pub all: serde_json::Map<String, serde_json::Value>,
}

impl Reach {
    /// Reads files like Synapse's, laid over each other; with none, all is as Synapse has it by default.
    ///
    /// # Errors
    /// The first thing that is wrong.
    pub fn load(yaml_paths: &[PathBuf]) -> Result<Self, ConfigError> {
        let layers = yaml::Layers::read_if_any(yaml_paths)?;
        Ok(Self {
            federation: remote::read(&layers, &|name| std::env::var(name).ok())?,
            retry: remote::read_retry(&layers)?,
            all: layers.into_values(),
        })
    }
}

impl Own {
    /// Reads our own TOML file; without one, all is as it is by default.
    ///
    /// # Errors
    /// The first thing that is wrong.
    pub fn load(path: Option<&Path>) -> Result<Self, ConfigError> {
        own::read(path)
    }
}

/// The first key of the text of a signing key file.
///
/// # Errors
/// What is wrong with which line. It holds nothing of the file's content.
pub fn read_signing_key(text: &str) -> Result<SigningKey, String> {
    signing_key::parse(text)
}

fn warnings(layers: yaml::Layers) -> Vec<String> {
    let unused = [
        (
            "worker_listeners",
            "Burdock opens none of these listeners; health and metrics are at its own `[listen] address`",
        ),
        (
            "modules",
            "Burdock runs no modules; callbacks on delivery over federation are not called",
        ),
    ];
    let of_keys = unused.iter().filter_map(|(key, what)| layers.get(key).warning(what));
    let of_keys: Vec<String> = of_keys.collect();
    layers.warnings.into_iter().chain(of_keys).collect()
}

/// A string that neither `Debug` nor `Display` reveals.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(pub String);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("(secret)")
    }
}

/// `database:`.
#[derive(Debug, Clone)]
pub enum Database {
    /// `psycopg2`: Synapse's.
    Postgres(Box<Postgres>),
    /// `sqlite3`: the file of an embedded homeserver.
    Sqlite(PathBuf),
}

/// Where PostgreSQL is (libpq's names in `args`).
#[derive(Debug, Clone)]
pub struct Postgres {
    /// Host name, address, or a directory that holds a Unix socket.
    pub host: Option<String>,
    /// Port; PostgreSQL's 5432 if absent.
    pub port: Option<u16>,
    /// `user`.
    pub user: Option<String>,
    /// `password`.
    pub password: Option<Secret>,
    /// `dbname` or `database`.
    pub name: String,
    /// `sslmode`, as libpq spells it.
    pub ssl_mode: Option<String>,
    /// `sslrootcert`.
    pub ssl_root_cert: Option<PathBuf>,
    /// `sslcert` and `sslkey`.
    pub ssl_client: Option<(PathBuf, PathBuf)>,
    /// `cp_max`, at least 2 (one connection holds the instance lock); 10 if absent.
    pub max_connections: u32,
    /// `statement_timeout`, ms.
    pub statement_timeout: Duration,
    /// `allow_unsafe_locale`.
    pub allow_unsafe_locale: bool,
}

/// `redis:`.
#[derive(Debug, Clone)]
pub struct Redis {
    /// Where it listens.
    pub address: RedisAddress,
    /// `username`.
    pub username: Option<String>,
    /// `password` or the content of `password_path`.
    pub password: Option<Secret>,
    /// Logical database for the outbound connection.
    pub dbid: Option<i64>,
}

/// Where Redis listens.
#[derive(Debug, Clone)]
pub enum RedisAddress {
    /// `path`.
    Unix(PathBuf),
    /// `host` and `port`.
    Tcp {
        /// Host.
        host: String,
        /// Port.
        port: u16,
        /// TLS (`use_tls`), with its files.
        tls: Option<RedisTls>,
    },
}

/// The TLS files of `redis:`.
#[derive(Debug, Clone, Default)]
pub struct RedisTls {
    /// `ca_file`.
    pub ca_file: Option<PathBuf>,
    /// `certificate_file` and `private_key_file`.
    pub client: Option<(PathBuf, PathBuf)>,
}

/// Writers, senders and where they listen.
#[derive(Debug, Clone)]
pub struct Replication {
    /// `federation_sender_instances`, in file order. Ours is among them.
    pub sender_instances: Vec<InstanceName>,
    /// `stream_writers.events`; `master` if absent.
    pub event_writers: Vec<InstanceName>,
    /// `instance_map`, with `main` under its wire name `master`.
    pub instance_map: Vec<(InstanceName, ReplicationEndpoint)>,
    /// `worker_replication_secret` or the content of its `_path`.
    pub secret: Option<Secret>,
}

/// Where a replication HTTP listener is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReplicationEndpoint {
    /// `host`, `port`, `tls`.
    Tcp {
        /// Host.
        host: String,
        /// Port.
        port: u16,
        /// TLS.
        tls: bool,
    },
    /// `path`.
    Unix(PathBuf),
}

/// How other homeservers are reached.
#[derive(Debug, Clone)]
pub struct Federation {
    /// `federation_domain_whitelist`: absent = all, empty = none.
    pub domain_whitelist: Option<Vec<ServerName>>,
    /// Addresses never connected to.
    pub address_filter: AddressRanges,
    /// `federation_verify_certificates`.
    pub verify_certificates: bool,
    /// `federation_certificate_verification_whitelist`: globs of names that are not verified.
    pub unverified_names: Vec<String>,
    /// `federation_custom_ca_list`: the PEM files' contents, which replace the system's roots.
    pub custom_ca: Option<Vec<Vec<u8>>>,
    /// `federation_client_minimum_tls_version` is 1.3 (anything lower means 1.2 here).
    pub tls_1_3_only: bool,
    /// `federation.client_timeout`.
    pub timeout: Duration,
}

/// The ranges of `federation_ip_range_blacklist`, `ip_range_blacklist` and `ip_range_whitelist`, each IPv4 range also in
/// its IPv6 forms (mapped, compatible, 6to4). `0.0.0.0` and `::` are always among the denied.
#[derive(Debug, Clone, Default)]
pub struct AddressRanges {
    /// Denied.
    pub deny: Vec<IpNet>,
    /// Exceptions to `deny` (empty if `federation_ip_range_blacklist` is set).
    pub allow: Vec<IpNet>,
}

/// The retry schedule: `federation:` in homeserver.yaml.
#[derive(Debug, Clone)]
pub struct Retry {
    /// `destination_min_retry_interval`.
    pub min_interval: Duration,
    /// `destination_retry_multiplier`.
    pub multiplier: f64,
    /// `destination_max_retry_interval`.
    pub max_interval: Duration,
    /// `max_long_retries`: further tries inside one attempt.
    pub attempt_retries: u32,
    /// `max_long_retry_delay`: the longest wait between them.
    pub attempt_max_delay: Duration,
}

/// Our own keys, each with its default.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Own {
    /// `[listen] address`: where `/health` and `/metrics` are served; not served if absent.
    pub listen: Option<SocketAddr>,
    /// `[listen] replication_secret` or the content of its `_path`: who knows it may ask the replication API, which is not
    /// served without.
    pub replication_secret: Option<Secret>,
    /// `[sender] max_transaction_bytes`.
    pub max_transaction_bytes: usize,
    /// `[sender] max_pending_pdus`: a destination with more unsent PDUs is behind.
    pub max_pending_pdus: usize,
    /// `[sender] max_pending_age`: so is one that has accepted nothing for this long while some wait.
    pub max_pending_age: Duration,
    /// `[federation] max_connecting`: connections in setup at once.
    pub max_connecting: usize,
    /// `[log] format`.
    pub log_format: LogFormat,
    /// `[log] filter`: tracing's filter syntax.
    pub log_filter: String,
}

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// Pretty on a terminal, plain lines otherwise.
    Text,
    /// One JSON object a line.
    Json,
}
