//! `burdock master`: a small homeserver on one folder.
//!
//! Without Redis its sender runs in the same process; with Redis the sender is a process of its own, for which the
//! configuration is written into the folder.

use std::{
    fs::{self, DirBuilder, OpenOptions},
    io::{self, Write},
    net::SocketAddr,
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
};

use anyhow::{Context, bail};
use base64::{Engine, engine::general_purpose::STANDARD_NO_PAD};
use serde_json::{Value, json};

use super::{
    lifecycle::{Ended, Lifecycle},
    listening,
    run::to_the_end,
    sending::{self, Sending},
};
use crate::{
    config::{self, Config, ConfigError, Database, Own, Reach},
    core::{
        clock,
        id::ServerName,
        metrics::Metrics,
        replication::{feed::Feed, http_gaps::HttpGaps, local_bus::LocalBus, redis_bus::RedisBus},
        shutdown::Shutdown,
        signing::SigningKey,
        store::Sqlite,
    },
    master::{self, Certificate, Master, Settings},
    sender::tables::Tables,
};

/// The sender's instance name, in this process or another.
const SENDER: &str = "fed1";

/// What a homeserver is made from.
#[derive(Debug, clap::Args)]
pub struct MasterArgs {
    /// Where it keeps its database and its signing key; made if it is not there
    #[arg(long, value_name = "DIR")]
    dir: PathBuf,
    /// Its Matrix name; other servers look for it at that host and port
    #[arg(long, value_name = "SERVER_NAME")]
    name: String,
    /// Where other servers reach it
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8448")]
    listen: SocketAddr,
    /// The certificate chain it shows them (PEM); without it, something in front must speak TLS
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// The certificate's key (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Where clients reach it, over plain HTTP; nowhere if absent
    #[arg(long, value_name = "ADDRESS")]
    client: Option<SocketAddr>,
    /// Publish to a sender of its own over this Redis (redis://[USER:PASSWORD@]HOST[:PORT][/DB])
    #[arg(long, value_name = "URL")]
    redis: Option<String>,
    /// A file with keys of Synapse's about federation, such as `federation:` and `ip_range_blacklist`; several times
    #[arg(short = 'c', long = "config-path", value_name = "FILE")]
    synapse: Vec<PathBuf>,
    /// Burdock's own settings
    #[arg(long = "config", value_name = "FILE")]
    own: Option<PathBuf>,
    /// Stop when the standard input ends: with the process that holds its other end
    #[arg(long, hide = true)]
    until_stdin_ends: bool,
}

impl MasterArgs {
    pub(super) fn load(&self) -> Result<(Reach, Own), ConfigError> {
        Ok((Reach::load(&self.synapse)?, Own::load(self.own.as_deref())?))
    }
}

/// Runs until a signal or a failure ends it.
pub(super) fn run(args: &MasterArgs, (reach, own): (Reach, Own)) -> ExitCode {
    to_the_end(&own, live(args, reach, own.clone()))
}

async fn live(args: &MasterArgs, reach: Reach, own: Own) -> anyhow::Result<Ended> {
    let lifecycle = Lifecycle::start().context("cannot listen for signals")?;
    let drain = lifecycle.drain().clone();
    match drain
        .run_until_cancelled(Box::pin(start(args, reach, own, &lifecycle)))
        .await
    {
        Some(started) => started?,
        None => return Ok(Ended::Well),
    }
    lifecycle.ready();
    Ok(lifecycle.finished().await)
}

async fn start(args: &MasterArgs, reach: Reach, own: Own, lifecycle: &Lifecycle) -> anyhow::Result<()> {
    if args.until_stdin_ends {
        let drain = lifecycle.drain().clone();
        std::thread::spawn(move || {
            // An error ends it as well.
            let _ = io::copy(&mut io::stdin(), &mut io::sink());
            drain.cancel();
        });
    }
    let name = ServerName::from(args.name.as_str());
    if name.parts().is_none() {
        bail!("--name {name}: not a server name (a host, and perhaps a port)");
    }
    private_folder(&args.dir).with_context(|| format!("cannot make {}", args.dir.display()))?;
    let key_path = args.dir.join("signing.key");
    let key = signing_key(&key_path).with_context(|| key_path.display().to_string())?;
    let database = args.dir.join("homeserver.db");
    let settings = Settings {
        name: name.clone(),
        key: key.clone(),
        database: database.clone(),
        federation: reach.federation.clone(),
        listen: args.listen,
        certificate: certificate(args)?,
        client: args.client,
    };
    let metrics = Arc::new(Metrics::new(&name));
    let serves_tables = own.replication_secret.is_some();
    let Some(url) = &args.redis else {
        let bus = LocalBus::default();
        let homeserver = Master::start(settings, bus.clone()).await?;
        let tables = serves_tables.then(|| Arc::new(Tables::new(clock::now().wall, homeserver.bell().clone())));
        let feed = tables.as_ref().map(|tables| tables.feed(homeserver.tables()));
        let sending = sender_of(name, key, database, &reach, own.clone());
        let shutdown = Shutdown {
            drain: lifecycle.drain().clone(),
            stop: lifecycle.stop().clone(),
        };
        let sender = sending::prepare(
            sending,
            bus,
            HttpGaps::nowhere(),
            Arc::clone(&metrics),
            tables,
            shutdown,
        )
        .await?;
        listening::open(&own, metrics, feed, lifecycle).await?;
        lifecycle.spawn("sender", sender);
        keep(homeserver, lifecycle);
        return Ok(());
    };
    // The configuration is good only if the database is there.
    Sqlite::create(&database, master::INSTANCE.into(), name.clone()).await?;
    let written = write_configuration(&args.dir, &name, &key_path, &database, url, reach.all)?;
    let config = Config::load(&written, args.own.as_deref())?;
    let bus = RedisBus::new(config.redis, &name, sending::random()?);
    let homeserver = Master::start(settings, bus).await?;
    let feed = serves_tables.then(|| Feed::new(homeserver.bell().clone(), homeserver.tables()));
    listening::open(&own, metrics, feed, lifecycle).await?;
    keep(homeserver, lifecycle);
    let files: Vec<String> = written.iter().map(|file| format!("-c {}", file.display())).collect();
    tracing::info!("its sender is: burdock run {}", files.join(" "));
    Ok(())
}

/// Stops the homeserver when the process drains.
fn keep(homeserver: Master, lifecycle: &Lifecycle) {
    let drain = lifecycle.drain().clone();
    lifecycle.spawn("homeserver", async move {
        drain.cancelled().await;
        homeserver.stop().await;
        Ok(())
    });
}

/// The sender of the homeserver whose database that is.
#[must_use]
pub fn sender_of(name: ServerName, key: SigningKey, database: PathBuf, reach: &Reach, own: Own) -> Sending {
    Sending {
        server_name: name,
        signing_key: key,
        database: Database::Sqlite(database),
        instance: SENDER.into(),
        sender_instances: vec![SENDER.into()],
        event_writers: vec![master::INSTANCE.into()],
        federation: reach.federation.clone(),
        retry: reach.retry.clone(),
        sticky_events: true,
        own,
    }
}

/// The key in that file, which is made if it is not there.
fn signing_key(path: &Path) -> anyhow::Result<SigningKey> {
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let mut seed = [0; 32];
            getrandom::fill(&mut seed).context("the operating system has no randomness to give")?;
            let version = sending::random()? & 0xffff;
            let text = format!("ed25519 a_{version:04x} {}\n", STANDARD_NO_PAD.encode(seed));
            write_secret(path, &text)?;
            text
        }
        Err(error) => return Err(error.into()),
    };
    config::read_signing_key(&text).map_err(anyhow::Error::msg)
}

/// Makes a folder that only we may read, as access tokens are in its database. One that is there is left as it is.
fn private_folder(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// Writes a file that only we may read, whole or not at all.
fn write_secret(path: &Path, text: &str) -> io::Result<()> {
    let unfinished = path.with_extension("new");
    let mut options = OpenOptions::new();
    let mut file = options
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&unfinished)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    fs::rename(unfinished, path)
}

fn certificate(args: &MasterArgs) -> anyhow::Result<Option<Certificate>> {
    let (Some(chain), Some(key)) = (&args.tls_cert, &args.tls_key) else {
        return Ok(None);
    };
    let read = |path: &PathBuf| fs::read(path).with_context(|| path.display().to_string());
    Ok(Some(Certificate {
        chain: read(chain)?,
        key: read(key)?,
    }))
}

/// Writes what a sender process of its own needs: files like Synapse's. (JSON is YAML.)
fn write_configuration(
    dir: &Path,
    name: &ServerName,
    key: &Path,
    database: &Path,
    redis: &str,
    mut all: serde_json::Map<String, Value>,
) -> anyhow::Result<Vec<PathBuf>> {
    let absolute = |path: &Path| std::path::absolute(path).with_context(|| path.display().to_string());
    let ours = json!({
        "server_name": name.as_str(),
        "signing_key_path": absolute(key)?,
        "database": { "name": "sqlite3", "args": { "database": absolute(database)? } },
        "redis": redis_section(redis)?,
        "send_federation": false,
        "federation_sender_instances": [SENDER],
        "experimental_features": { "msc4354_enabled": true },
    });
    let worker = json!({ "worker_app": "synapse.app.generic_worker", "worker_name": SENDER });
    if let Value::Object(ours) = ours {
        all.extend(ours);
    }
    let mut written = Vec::new();
    for (file, content) in [("homeserver.yaml", Value::Object(all)), ("fed1.yaml", worker)] {
        let path = dir.join(file);
        let text = serde_json::to_string_pretty(&content)? + "\n";
        write_secret(&path, &text).with_context(|| path.display().to_string())?;
        written.push(path);
    }
    Ok(written)
}

/// `redis:` for that URL.
fn redis_section(url: &str) -> anyhow::Result<Value> {
    let parsed = redis::parse_redis_url(url).filter(|parsed| parsed.scheme() == "redis");
    let parsed = parsed.with_context(|| "--redis: not of the form redis://[USER:PASSWORD@]HOST[:PORT][/DB]")?;
    let mut section = json!({
        "enabled": true,
        "host": parsed.host_str().unwrap_or("localhost"),
        "port": parsed.port().unwrap_or(6379),
    });
    if let Some(password) = parsed.password() {
        section["password"] = password.into();
    }
    if !parsed.username().is_empty() {
        section["username"] = parsed.username().into();
    }
    let dbid = parsed.path().trim_matches('/');
    if !dbid.is_empty() {
        section["dbid"] = dbid
            .parse::<i64>()
            .context("--redis: the database is not a number")?
            .into();
    }
    Ok(section)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_new_folder_is_ours_alone() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("new");
        private_folder(&path).expect("made");
        let mode = fs::metadata(&path).expect("there").permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
    }

    #[test]
    fn a_key_is_made_once() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("signing.key");
        let first = signing_key(&path).expect("made");
        let second = signing_key(&path).expect("read");
        assert_eq!(
            (first.key_id(), first.sign(&[b"x"])),
            (second.key_id(), second.sign(&[b"x"]))
        );
        fs::write(&path, "garbage").expect("written");
        assert!(signing_key(&path).is_err(), "a key that cannot be read is not replaced");
    }

    #[tokio::test]
    async fn a_sender_can_be_configured_by_what_is_written() {
        let dir = tempfile::tempdir().expect("a folder");
        let (key, database) = (dir.path().join("signing.key"), dir.path().join("homeserver.db"));
        signing_key(&key).expect("made");
        let name = ServerName::from("127.0.0.1:8448");
        Sqlite::create(&database, master::INSTANCE.into(), name.clone())
            .await
            .expect("made");
        let mut more = serde_json::Map::new();
        more.insert("federation".into(), json!({ "max_long_retries": 3 }));
        let url = "redis://user:pass@redis.example:7000/2";
        let written = write_configuration(dir.path(), &name, &key, &database, url, more).expect("written");
        let config = Config::load(&written, None).expect("good");
        assert_eq!((config.server_name, config.instance.as_str()), (name, SENDER));
        assert!(matches!(config.database, Database::Sqlite(path) if path.ends_with("homeserver.db")));
        assert_eq!(
            (config.retry.attempt_retries, config.redis.dbid, config.sticky_events),
            (3, Some(2), true)
        );
        assert!(redis_section("http://x").is_err() && redis_section("redis://x/y").is_err());
    }
}
