//! `database:`, or the one entry of `databases:` that holds everything: where PostgreSQL is, or the file of an embedded
//! homeserver.

use std::{
    fs::File,
    io::Read,
    path::{Path, PathBuf},
    time::Duration,
};

use super::{Database, Postgres, error::ConfigError, node::Node, yaml::Layers};
use crate::core::store::APPLICATION_ID;

/// How long the header of an SQLite file is, and where in it `application_id` stands.
const HEADER: usize = 100;
const APPLICATION_ID_AT: usize = 68;

/// What Synapse sets when `statement_timeout` is absent.
const STATEMENT_TIMEOUT: Duration = Duration::from_mins(10);
const SSL_MODES: [&str; 6] = ["disable", "allow", "prefer", "require", "verify-ca", "verify-full"];
/// Parameters of libpq that change neither where nor as whom nor how safely we connect.
const WITHOUT_EFFECT: [&str; 10] = [
    "application_name",
    "client_encoding",
    "connect_timeout",
    "fallback_application_name",
    "gssencmode",
    "keepalives",
    "keepalives_count",
    "keepalives_idle",
    "keepalives_interval",
    "tcp_user_timeout",
];

pub(super) fn read(layers: &Layers) -> Result<Database, ConfigError> {
    let section = section(layers)?;
    let engine = section.get("name")?;
    let args = section.get("args")?;
    let name = engine.text()?;
    if name.as_deref() == Some("sqlite3")
        && let Some(path) = args.get("database")?.text()?.map(PathBuf::from)
        && is_embedded(&path)
    {
        return Ok(Database::Sqlite(path));
    }
    if name.as_deref() != Some("psycopg2") {
        return Err(engine.error(
            "is not `psycopg2`",
            "Burdock runs beside a Synapse on PostgreSQL, as every Synapse worker does; move the homeserver to \
             PostgreSQL first (Synapse's documentation: \"Porting from SQLite\")",
        ));
    }
    for (key, arg) in args.entries()? {
        check_supported(key, &arg)?;
    }
    let user = args.get("user")?.text()?;
    let name = match (args.get("dbname")?.text()?, args.get("database")?.text()?) {
        (Some(name), _) | (None, Some(name)) => name,
        // libpq's own rule.
        (None, None) => user.clone().ok_or_else(|| section_key_missing(&args, "dbname"))?,
    };
    let host = args.get("host")?;
    let host_text = host.text()?;
    if host_text.as_ref().is_some_and(|host| host.contains(',')) {
        return Err(host.error("is a list of hosts", "Name one host"));
    }
    let ssl_mode = args.get("sslmode")?;
    let ssl_mode_text = ssl_mode.text()?;
    if ssl_mode_text
        .as_ref()
        .is_some_and(|mode| !SSL_MODES.contains(&mode.as_str()))
    {
        return Err(ssl_mode.error("is not a mode of libpq", format!("Use one of {}", SSL_MODES.join(", "))));
    }
    Ok(Database::Postgres(Box::new(Postgres {
        host: host_text,
        port: args.get("port")?.integer(1..=u16::MAX)?,
        user,
        password: args.get("password")?.secret()?,
        name,
        ssl_mode: ssl_mode_text,
        ssl_root_cert: args.get("sslrootcert")?.readable_path()?,
        ssl_client: args.get("sslcert")?.pair_of_files(&args.get("sslkey")?)?,
        // One connection holds the lock on our instance name for good.
        max_connections: args.get("cp_max")?.integer(1..=1000)?.unwrap_or(10).max(2),
        statement_timeout: section
            .get("statement_timeout")?
            .duration()?
            .unwrap_or(STATEMENT_TIMEOUT),
        allow_unsafe_locale: section.get("allow_unsafe_locale")?.flag()?.unwrap_or(false),
    })))
}

/// Whether the file says in its header that Burdock made it for an embedded homeserver.
fn is_embedded(path: &Path) -> bool {
    let mut header = [0; HEADER];
    let read = File::open(path).and_then(|mut file| file.read_exact(&mut header));
    read.is_ok()
        && header.starts_with(b"SQLite format 3\0")
        && header[APPLICATION_ID_AT..][..4] == APPLICATION_ID.to_be_bytes()
}

fn section_key_missing(args: &Node<'_>, key: &str) -> ConfigError {
    match args.get(key) {
        Ok(node) => node.missing("Name the database that Synapse uses"),
        Err(error) => error,
    }
}

fn section(layers: &Layers) -> Result<Node<'_>, ConfigError> {
    let (one, several) = (layers.get("database"), layers.get("databases"));
    match (one.is_present(), several.is_present()) {
        (true, false) => return Ok(one),
        (false, false) => return Err(one.missing("Give homeserver.yaml of this homeserver with -c")),
        (true, true) => {
            return Err(several.error(
                "is there beside `database`",
                "Keep the one of the two that holds the data",
            ));
        }
        (false, true) => {}
    }
    for (_, entry) in several.entries()? {
        let stores = entry.get("data_stores")?.texts()?;
        // Synapse's default is both.
        if stores.is_none_or(|stores| ["main", "state"].iter().all(|store| stores.iter().any(|s| s == store))) {
            return Ok(entry);
        }
    }
    Err(several.error(
        "has no entry whose `data_stores` are both `main` and `state`",
        "Burdock cannot read a homeserver that is split over two databases; keep Synapse's own federation sender",
    ))
}

fn check_supported(key: &str, arg: &Node<'_>) -> Result<(), ConfigError> {
    const USED: [&str; 10] = [
        "host",
        "port",
        "user",
        "password",
        "dbname",
        "database",
        "sslmode",
        "sslrootcert",
        "sslcert",
        "sslkey",
    ];
    // `cp_*` are the settings of Synapse's connection pool.
    if key.starts_with("cp_") || USED.contains(&key) || WITHOUT_EFFECT.contains(&key) {
        return Ok(());
    }
    Err(arg.error(
        "is not supported by Burdock",
        "Say the same with host, port, user, password, dbname and the ssl parameters, in a file of its own for \
         Burdock if need be (a later `-c` replaces the whole `database`)",
    ))
}
