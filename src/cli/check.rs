//! `burdock check`: what the configuration means, for the operator's eyes.

use std::fmt::{Display, Write};

use crate::config::{Config, Database, Redis, RedisAddress};

/// What an operator who only sees this process, and not its README, must know.
pub(super) const NOT_SENT: &str = "EDUs are not sent yet: no to-device messages (end-to-end encryption with other \
                                   servers' users needs them), no device lists, receipts, typing or presence";

/// A line a subject, without secrets; warnings first.
pub(super) fn summary(config: &Config) -> String {
    let mut text = String::new();
    for warning in config.warnings.iter().map(String::as_str).chain([NOT_SENT]) {
        line(&mut text, "warning", warning);
    }
    line(&mut text, "server", &config.server_name);
    line(&mut text, "instance", &config.instance);
    line(&mut text, "signing key", config.signing_key.key_id());
    line(&mut text, "database", database(&config.database));
    line(&mut text, "redis", redis(&config.redis));
    line(&mut text, "senders", list(&config.replication.sender_instances));
    line(&mut text, "event writers", list(&config.replication.event_writers));
    line(
        &mut text,
        "sticky events",
        if config.sticky_events {
            "on"
        } else {
            "off (msc4354_enabled)"
        },
    );
    match config.own.listen {
        Some(address) => line(&mut text, "health and metrics", format_args!("http://{address}")),
        None => line(&mut text, "health and metrics", "off ([listen] address)"),
    }
    let replication_api = match config.own.replication_secret {
        Some(_) => "on",
        None => "off ([listen] replication_secret)",
    };
    line(&mut text, "replication API", replication_api);
    text
}

fn line(text: &mut String, subject: &str, what: impl Display) {
    // Writing into a `String` does not fail.
    let _ = writeln!(text, "{subject}: {what}");
}

fn list(names: &[impl Display]) -> String {
    names.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// The database, for messages.
pub(super) fn database(database: &Database) -> String {
    let database = match database {
        Database::Postgres(database) => database,
        Database::Sqlite(path) => return format!("file {}", path.display()),
    };
    let host = database.host.as_deref().unwrap_or("the local socket");
    let port = database.port.map_or(String::new(), |port| format!(" port {port}"));
    let user = database
        .user
        .as_ref()
        .map_or(String::new(), |user| format!(" as {user}"));
    format!("{} at {host}{port}{user}", database.name)
}

fn redis(redis: &Redis) -> String {
    match &redis.address {
        RedisAddress::Unix(path) => path.display().to_string(),
        RedisAddress::Tcp { host, port, tls } => {
            let tls = if tls.is_some() { " with TLS" } else { "" };
            let dbid = redis.dbid.map_or(String::new(), |dbid| format!(" database {dbid}"));
            format!("{host} port {port}{dbid}{tls}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_summary_says_what_counts_and_no_secret() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("hs.yaml");
        let yaml = "server_name: hs1.test\nworker_name: fed1\nfederation_sender_instances: [fed1, fed2]\n\
                    signing_key: ed25519 a_test AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8\n\
                    database: {name: psycopg2, args: {user: synapse, password: hunter2, dbname: synapse, host: pg, port: 5433}}\n\
                    redis: {enabled: true, password: hunter3}\nworker_replication_secret: hunter4\n\
                    instance_map: {main: {host: localhost, port: 9093}}\nmodules: [{module: a}]\n";
        std::fs::write(&file, yaml).expect("a file");
        let config = Config::load(std::slice::from_ref(&file), None).expect("valid");
        let shown = summary(&config).replace(&folder.path().display().to_string(), "DIR");
        insta::assert_snapshot!(shown);
    }
}
