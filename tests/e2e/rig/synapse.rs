//! A real homeserver: its configuration, start and restart.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context as _, Result};
use base64::{Engine as _, engine::general_purpose::STANDARD_NO_PAD};
use ed25519_dalek::SigningKey;
use serde_json::{Value, json};
use tokio::sync::Mutex;

use super::{
    process::Process,
    services::{Services, free_port},
    store::Store,
};
use crate::fake_remote::{event::Identity, join::Resident};

/// What a homeserver is in the rig.
#[derive(Debug, Clone, Copy)]
pub enum Role {
    /// hs1: has its events sent by the sender under test, over Redis on this port.
    Sending { redis: u16 },
    /// hs2: sends for itself, and is reached on this port, behind which is the gate.
    Receiving { public: u16 },
}

/// A homeserver.
pub struct Synapse {
    /// Its Matrix name.
    pub name: String,
    /// Where it serves clients and federation without TLS.
    pub url: String,
    /// Its database.
    pub store: Store,
    /// Its signing key.
    pub identity: Identity,
    /// How rooms are joined through it.
    pub resident: Resident,
    /// Its homeserver.yaml.
    pub config: PathBuf,
    /// The client for it.
    pub http: reqwest::Client,
    kind: &'static str,
    dir: PathBuf,
    python: PathBuf,
    process: Mutex<Option<Process>>,
}

impl Synapse {
    /// Makes its database and configuration in `dir`, and starts it.
    pub async fn start(role: Role, dir: &Path, services: &Services, http: &reqwest::Client) -> Result<Self> {
        let kind = match role {
            Role::Sending { .. } => "hs1",
            Role::Receiving { .. } => "hs2",
        };
        let store = services.new_database(kind).await?;
        let plain = free_port()?;
        let public = match role {
            Role::Sending { .. } => free_port()?,
            Role::Receiving { public } => public,
        };
        let name = format!("localhost:{public}");
        let identity = new_identity(&name);
        let key = format!("ed25519 {kind} {}\n", STANDARD_NO_PAD.encode(identity.key.as_bytes()));
        fs::write(dir.join(format!("{kind}.key")), key)?;
        fs::write(dir.join("log.yaml"), log_config().to_string())?;

        let mut config = common_config(kind, &name, plain, dir, services, &store);
        if let Role::Sending { redis } = role {
            add_sending_config(&mut config, public, redis, dir)?;
        }
        let path = dir.join(format!("{kind}.yaml"));
        fs::write(&path, serde_json::to_string_pretty(&config)?)?; // JSON is YAML

        let url = format!("http://127.0.0.1:{plain}");
        let homeserver = Self {
            resident: Resident {
                name: name.clone(),
                url: url.clone(),
                http: http.clone(),
            },
            name,
            url,
            store,
            identity,
            config: path,
            http: http.clone(),
            kind,
            dir: dir.to_owned(),
            python: services.python.clone(),
            process: Mutex::default(),
        };
        homeserver.ensure().await?;
        Ok(homeserver)
    }

    /// Starts it if it does not run.
    pub async fn ensure(&self) -> Result<()> {
        let mut process = self.process.lock().await;
        if process.as_mut().is_some_and(|process| process.ended().is_none()) {
            return Ok(());
        }
        let mut command = Command::new(&self.python);
        command
            .args(["-m", "synapse.app.homeserver", "-c"])
            .arg(&self.config)
            .current_dir(&self.dir);
        let mut started = Process::spawn(&self.dir, self.kind, &mut command)?;
        started
            .wait_until(Duration::from_secs(90), || answers(&self.http, &self.url))
            .await?;
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

/// Whether an HTTP listener of Synapse or of a sender answers.
pub async fn answers(http: &reqwest::Client, url: &str) -> bool {
    let response = http
        .get(format!("{url}/health"))
        .timeout(Duration::from_secs(5))
        .send()
        .await;
    response.is_ok_and(|response| response.status().is_success())
}

fn new_identity(name: &str) -> Identity {
    let seed: [u8; 32] = rand::random();
    let kind_of_key = name.rsplit(':').next().unwrap_or_default();
    Identity {
        name: name.to_owned(),
        key_id: format!("ed25519:{kind_of_key}"),
        key: SigningKey::from_bytes(&seed),
    }
}

/// Synapse logs warnings to its standard error, which is its log file here.
fn log_config() -> Value {
    json!({
        "version": 1,
        "formatters": { "precise": { "format": "%(asctime)s %(name)s %(levelname)s %(message)s" } },
        "handlers": { "console": { "class": "logging.StreamHandler", "formatter": "precise" } },
        "root": { "level": "WARNING", "handlers": ["console"] },
        "disable_existing_loggers": false,
    })
}

fn common_config(kind: &str, name: &str, plain: u16, dir: &Path, services: &Services, store: &Store) -> Value {
    let postgres = services.postgres();
    let unlimited = json!({ "per_second": 100_000, "burst_count": 100_000 });
    let mut config = json!({
        "server_name": name,
        "report_stats": false,
        "pid_file": dir.join(format!("{kind}.pid")),
        "log_config": dir.join("log.yaml"),
        "media_store_path": dir.join(format!("{kind}-media")),
        "signing_key_path": dir.join(format!("{kind}.key")),
        "macaroon_secret_key": kind,
        "form_secret": kind,
        "enable_registration": true,
        "enable_registration_without_verification": true,
        "bcrypt_rounds": 4,
        "presence": { "enabled": false },
        "trusted_key_servers": [],
        "suppress_key_server_warning": true,
        "ip_range_blacklist": [],
        "federation_ip_range_blacklist": [],
        "federation_custom_ca_list": [dir.join("ca.pem")],
        "experimental_features": { "msc4354_enabled": true, "msc4140_enabled": true },
        // Short, so that what was down is soon tried again.
        "federation": {
            "client_timeout": "10s",
            "max_long_retries": 1,
            "max_long_retry_delay": "1s",
            "destination_min_retry_interval": "1s",
            "destination_max_retry_interval": "4s",
        },
        "listeners": [{
            "port": plain,
            "type": "http",
            "bind_addresses": ["127.0.0.1"],
            "resources": [{ "names": ["client", "federation"] }],
        }],
        "database": {
            "name": "psycopg2",
            "args": {
                "host": postgres.get_host(),
                "port": postgres.get_port(),
                "user": postgres.get_username(),
                "database": store.database,
                "cp_min": 2,
                "cp_max": 10,
            },
        },
        "rc_federation": { "sleep_limit": 100_000, "reject_limit": 100_000, "concurrent": 100 },
        "rc_login": { "address": unlimited, "account": unlimited, "failed_attempts": unlimited },
        "rc_joins": { "local": unlimited, "remote": unlimited },
        "rc_invites": { "per_room": unlimited, "per_user": unlimited, "per_issuer": unlimited },
    });
    for limit in [
        "rc_message",
        "rc_registration",
        "rc_admin_redaction",
        "rc_joins_per_room",
        "rc_room_creation",
    ] {
        config[limit] = unlimited.clone();
    }
    config
}

fn add_sending_config(config: &mut Value, public: u16, redis: u16, dir: &Path) -> Result<()> {
    let replication = free_port()?;
    let listeners = config["listeners"].as_array_mut().context("no listeners")?;
    listeners.push(json!({
        "port": public,
        "type": "http",
        "tls": true,
        "bind_addresses": ["127.0.0.1"],
        "resources": [{ "names": ["client", "federation"] }],
    }));
    listeners.push(json!({
        "port": replication,
        "type": "http",
        "bind_addresses": ["127.0.0.1"],
        "resources": [{ "names": ["replication"] }],
    }));
    config["tls_certificate_path"] = json!(dir.join("cert.pem"));
    config["tls_private_key_path"] = json!(dir.join("key.pem"));
    config["send_federation"] = json!(false);
    config["federation_sender_instances"] = json!(["fed1"]);
    config["redis"] = json!({ "enabled": true, "host": "127.0.0.1", "port": redis });
    config["worker_replication_secret"] = json!("shared by the rig's processes");
    config["instance_map"] = json!({ "main": { "host": "127.0.0.1", "port": replication } });
    Ok(())
}
