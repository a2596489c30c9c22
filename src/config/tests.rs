//! Whole configurations, read from files as at a start: what is understood, and every refusal as an operator reads it.

use std::{fs, path::PathBuf};

use super::*;

const SHARED: &str = "\
server_name: hs1.test
signing_key: ed25519 a_test AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8
database: {name: psycopg2, args: {user: synapse, password: hunter2, dbname: synapse, host: /run/postgresql, cp_max: 5}}
redis: {enabled: true, password: hunter3}
worker_replication_secret: hunter4
instance_map: {main: {host: localhost, port: 9093}}
federation_sender_instances: [fed1, fed2]
";
const WORKER: &str = "worker_app: synapse.app.generic_worker\nworker_name: fed1\n";

/// Writes `files` into a folder and reads those that end in `.yaml` in the order given, and `burdock.toml`.
fn load_files(files: &[(&str, &str)], env: &[(&str, &str)]) -> Result<Config, String> {
    let folder = tempfile::tempdir().expect("a folder");
    for (name, text) in files {
        let text = text.replace("DIR", &folder.path().display().to_string());
        fs::write(folder.path().join(name), text).expect("a file");
    }
    let with_extension = |wanted: &str| -> Vec<PathBuf> {
        let names = files.iter().map(|(name, _)| folder.path().join(name));
        names
            .filter(|path| path.extension().is_some_and(|ext| ext == wanted))
            .collect()
    };
    let env = |name: &str| {
        env.iter()
            .find(|(key, _)| *key == name)
            .map(|(_, value)| (*value).to_owned())
    };
    let own = with_extension("toml");
    Config::load_with(&with_extension("yaml"), own.first().map(PathBuf::as_path), &env)
        .map_err(|e| e.to_string().replace(&folder.path().display().to_string(), "DIR"))
}

/// A working configuration and `extra` in a file after it.
fn load(extra: &str) -> Result<Config, String> {
    load_files(
        &[
            ("homeserver.yaml", SHARED),
            ("fed1.yaml", WORKER),
            ("extra.yaml", extra),
        ],
        &[],
    )
}

fn postgres(config: &Config) -> &Postgres {
    match &config.database {
        Database::Postgres(database) => database,
        Database::Sqlite(path) => panic!("{}", path.display()),
    }
}

fn refusal(extra: &str) -> String {
    text_of(load(extra))
}

fn text_of(refused: Result<Config, String>) -> String {
    refused.map_or_else(|error| error, |config| format!("not refused: {config:?}"))
}

#[test]
fn the_file_of_an_embedded_homeserver_is_known_by_its_header() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("master.db");
    let extra = format!("database: {{name: sqlite3, args: {{database: {}}}}}", file.display());
    let mut header = [0; 100];
    header[..16].copy_from_slice(b"SQLite format 3\0");
    fs::write(&file, header).expect("a file");
    assert!(refusal(&extra).contains("Porting from SQLite"), "Synapse's own");
    header[68..72].copy_from_slice(&crate::core::store::APPLICATION_ID.to_be_bytes());
    fs::write(&file, header).expect("a file");
    let config = load(&extra).expect("valid");
    assert!(matches!(config.database, Database::Sqlite(path) if path == file));
    fs::write(&file, &header[..80]).expect("a file");
    assert!(refusal(&extra).contains("Porting from SQLite"), "cut short");
}

#[test]
fn a_usual_deployment_is_understood() {
    let config = load("").expect("valid");
    assert_eq!(config.server_name.as_str(), "hs1.test");
    assert_eq!(config.instance.as_str(), "fed1");
    assert_eq!(config.signing_key.key_id(), "ed25519:a_test");
    let database = postgres(&config);
    assert_eq!(database.host.as_deref(), Some("/run/postgresql"));
    assert_eq!(database.name, "synapse");
    assert_eq!(database.max_connections, 5);
    assert_eq!(database.statement_timeout, Duration::from_mins(10));
    assert!(matches!(&config.redis.address, RedisAddress::Tcp { host, port: 6379, tls: None } if host == "localhost"));
    assert_eq!(config.redis.password, Some(Secret("hunter3".to_owned())));
    assert_eq!(config.replication.sender_instances, ["fed1".into(), "fed2".into()]);
    assert_eq!(config.replication.event_writers, ["master".into()]);
    let main = ReplicationEndpoint::Tcp {
        host: "localhost".to_owned(),
        port: 9093,
        tls: false,
    };
    assert_eq!(config.replication.instance_map, [("master".into(), main)]);
    assert_eq!(config.replication.secret, Some(Secret("hunter4".to_owned())));
    assert_eq!(config.federation.domain_whitelist, None);
    assert_eq!(config.federation.timeout, Duration::from_mins(1));
    assert_eq!(config.retry.min_interval, Duration::from_mins(10));
    assert_eq!(config.retry.max_interval, Duration::from_hours(7 * 24));
    assert!((config.retry.multiplier - 2.0).abs() < f64::EPSILON);
    assert_eq!(config.retry.attempt_retries, 10);
    assert!(config.federation.verify_certificates);
    assert!(!config.sticky_events);
    assert_eq!(config.own, Own::default());
    assert_eq!(config.warnings, Vec::<String>::new());
}

#[test]
fn every_setting_is_taken_from_the_files() {
    let config = load(
        "databases: {a: {name: psycopg2, statement_timeout: 5000, args: {database: d, port: '5433', sslmode: require}}}\n\
         database:\n\
         redis: {enabled: on, path: /run/redis.sock, username: u, password: p, dbid: 3, use_tls: true}\n\
         stream_writers: {events: [w1, w2]}\n\
         instance_map: {main: {path: /run/main.sock}, w1: {host: w1.internal, port: 1, tls: true}}\n\
         federation: {client_timeout: 90s, destination_min_retry_interval: 1000, destination_retry_multiplier: 1.5, \
         max_long_retries: 2, max_long_retry_delay: 5s, destination_max_retry_interval: 1h}\n\
         federation_domain_whitelist: []\n\
         federation_verify_certificates: no\n\
         federation_certificate_verification_whitelist: ['*.test']\n\
         federation_client_minimum_tls_version: 1.3\n\
         federation_ip_range_blacklist: []\n\
         ip_range_whitelist: [127.0.0.1]\n\
         experimental_features: {msc4354_enabled: true}\n",
    )
    .expect("valid");
    let database = postgres(&config);
    assert_eq!((database.name.as_str(), database.port), ("d", Some(5433)));
    assert_eq!(database.ssl_mode.as_deref(), Some("require"));
    assert_eq!(database.statement_timeout, Duration::from_secs(5));
    assert_eq!(database.max_connections, 10);
    assert!(matches!(&config.redis.address, RedisAddress::Unix(path) if path.to_str() == Some("/run/redis.sock")));
    assert_eq!(
        (config.redis.username.as_deref(), config.redis.dbid),
        (Some("u"), Some(3))
    );
    assert_eq!(config.replication.event_writers, ["w1".into(), "w2".into()]);
    let endpoints = &config.replication.instance_map;
    assert!(endpoints.contains(&("master".into(), ReplicationEndpoint::Unix("/run/main.sock".into()))));
    let w1 = ReplicationEndpoint::Tcp {
        host: "w1.internal".to_owned(),
        port: 1,
        tls: true,
    };
    assert!(endpoints.contains(&("w1".into(), w1)));
    assert_eq!(config.federation.timeout, Duration::from_secs(90));
    assert_eq!(config.retry.min_interval, Duration::from_secs(1));
    assert_eq!(config.retry.max_interval, Duration::from_hours(1));
    assert_eq!(config.retry.attempt_max_delay, Duration::from_secs(5));
    assert_eq!(config.retry.attempt_retries, 2);
    assert_eq!(config.federation.domain_whitelist, Some(Vec::new()));
    assert!(!config.federation.verify_certificates);
    assert_eq!(config.federation.unverified_names, ["*.test"]);
    assert!(config.federation.tls_1_3_only);
    assert!(
        config.federation.address_filter.allow.is_empty(),
        "no exceptions beside the federation list"
    );
    let denied: Vec<String> = config
        .federation
        .address_filter
        .deny
        .iter()
        .map(ToString::to_string)
        .collect();
    assert_eq!(denied, ["0.0.0.0/32", "::/128", "::ffff:0.0.0.0/128", "2002::/48"]);
    assert!(config.sticky_events);
}

#[test]
fn private_addresses_are_denied_unless_excepted() {
    let filter = load("ip_range_whitelist: [10.0.0.7]")
        .expect("valid")
        .federation
        .address_filter;
    let holds = |ranges: &[IpNet], address: &str| {
        let address: std::net::IpAddr = address.parse().expect("an address");
        ranges.iter().any(|range| range.contains(&address))
    };
    for address in [
        "127.0.0.1",
        "10.0.0.7",
        "::1",
        "::ffff:192.168.1.1",
        "2002:a00:7::1",
        "fe80::1",
        "0.0.0.0",
        "::",
    ] {
        assert!(holds(&filter.deny, address), "{address}");
    }
    assert!(!holds(&filter.deny, "8.8.8.8"));
    assert!(holds(&filter.allow, "10.0.0.7") && holds(&filter.allow, "::ffff:10.0.0.7"));
    assert!(!holds(&filter.allow, "10.0.0.8"));
}

#[test]
fn the_old_kind_of_sender_stands_alone() {
    let worker = "worker_app: synapse.app.federation_sender\nsend_federation: false\nfederation_sender_instances:\n";
    let config = load_files(&[("homeserver.yaml", SHARED), ("fed1.yaml", worker)], &[]).expect("valid");
    assert_eq!(config.instance.as_str(), "synapse.app.federation_sender");
    assert_eq!(config.replication.sender_instances, [config.instance]);
}

#[test]
fn secrets_and_the_key_may_be_files() {
    let files = [
        ("homeserver.yaml", SHARED),
        (
            "fed1.yaml",
            "worker_name: fed1\nsigning_key:\nworker_replication_secret:\nworker_replication_secret_path: DIR/secret\n\
             redis: {enabled: true, password: '', password_path: DIR/secret}\n",
        ),
        ("secret", " from a file \n"),
        (
            "burdock.toml",
            "[listen]\naddress = '[::1]:1'\nreplication_secret_path = 'DIR/secret'\n",
        ),
        (
            "hs1.test.signing.key",
            "ed25519 a_file AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8\n",
        ),
    ];
    let config = load_files(&files, &[]).expect("valid");
    assert_eq!(config.redis.password, Some(Secret("from a file".to_owned())));
    assert_eq!(config.replication.secret, Some(Secret("from a file".to_owned())));
    assert_eq!(config.own.replication_secret, Some(Secret("from a file".to_owned())));
    assert_eq!(config.signing_key.key_id(), "ed25519:a_file");
}

#[test]
fn what_we_leave_undone_is_warned_of() {
    let config = load("modules: [{module: a.b}]\nworker_listeners: [{type: metrics, port: 1}]\nspam_checker: {}\n");
    let warnings = config.expect("valid").warnings;
    let texts: Vec<&str> = warnings
        .iter()
        .filter_map(|text| text.split_once("extra.yaml: "))
        .map(|(_, text)| text)
        .collect();
    insta::assert_snapshot!(texts.join("\n"));
}

#[test]
fn printing_a_configuration_shows_no_secret() {
    let shown = format!("{:?}", load("").expect("valid"));
    for secret in ["hunter", "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8"] {
        assert!(!shown.contains(secret), "{shown}");
    }
}

#[test]
fn no_error_shows_a_secret() {
    let secret = "hunter";
    for extra in [
        "redis: {enabled: true, password: {a: hunter}}",
        "redis: {enabled: true, password: [hunter]}",
        "redis: hunter",
        "redis: {enabled: hunter}",
        "redis: {enabled: true, password: hunter, password_path: /x}",
        "redis:\n  enabled: true\n password: hunter\n",
        "redis:\n  password: \"hunter\n",
        "redis:\n\tpassword: hunter\n",
        "redis: {password: *hunter}",
        "redis: {password: !!binary hunter}",
        "redis: {password: !!int hunter}",
        "redis: {<<: hunter}",
        "hunter",
        "- hunter",
        "database: {name: psycopg2, args: {dbname: x, password: 1.5e3}}",
        "database: {name: psycopg2, args: {dsn: 'password=hunter'}}",
        "database: {name: psycopg2, args: 'password=hunter'}",
        "worker_replication_secret: [hunter]",
        "worker_replication_secret: hunter\nworker_replication_secret_path: /x",
        "signing_key: ed25519 a_1 hunter",
        "signing_key: hunter",
        "signing_key: [hunter]",
        "https_proxy: http://user:hunter@proxy",
    ] {
        let refusal = refusal(extra);
        assert!(
            !refusal.contains("not refused") && !refusal.contains(secret),
            "{extra}: {refusal}"
        );
    }
    let env = load_files(
        &[("homeserver.yaml", SHARED), ("fed1.yaml", WORKER)],
        &[("https_proxy", "http://u:hunter@p")],
    );
    assert!(!env.expect_err("a proxy").contains(secret));
}

#[test]
fn refusals_read_well() {
    let cases = [
        // Which homeserver, which process.
        "server_name:",
        "server_name: https://hs1.test",
        "worker_name:\nworker_app:",
        "worker_app: synapse.app.homeserver",
        "worker_name: fed3",
        "federation_sender_instances: fed1",
        "federation_sender_instances: [fed1, fed1]",
        "federation_sender_instances: [fed1, 1.5]",
        "federation_sender_instances:",
        "federation_sender_instances:\nworker_app: synapse.app.federation_sender",
        "stream_writers: {events: fed1}",
        "pusher_instances: [fed1]",
        "stream_writers: {events: []}",
        // How the processes talk.
        "redis:",
        "redis: {enabled: false}",
        "redis: {enabled: 'true'}",
        "redis: {enabled: true, username: u}",
        "redis: {enabled: true, password: p, password_path: /p}",
        "redis: {enabled: true, password_path: DIR/absent}",
        "redis: {enabled: true, port: 70000}",
        "redis: {enabled: true, use_tls: true, ca_path: /certs}",
        "redis: {enabled: true, use_tls: true, certificate_file: DIR/extra.yaml}",
        "instance_map:",
        "instance_map: {main: {host: a}}",
        "worker_replication_http_port: 1",
        "worker_replication_secret_path: /secret",
        // The key.
        "signing_key:",
        "signing_key:\nsigning_key_path: DIR/extra.yaml",
        "signing_key: ed25519 a_1",
        // The database.
        "database:",
        "database: {name: sqlite3, args: {database: hs.db}}",
        "database: {name: psycopg2}",
        "database: {name: psycopg2, args: {dbname: d, host: 'a,b'}}",
        "database: {name: psycopg2, args: {dbname: d, sslmode: maybe}}",
        "database: {name: psycopg2, args: {dbname: d, options: -c search_path=x}}",
        "database: {name: psycopg2, args: {dbname: d}, statement_timeout: 1.5}",
        "databases: {a: {name: psycopg2}}",
        "database:\ndatabases: {a: {name: psycopg2, data_stores: [main]}, b: {name: psycopg2, data_stores: [state]}}",
        // The world outside.
        "https_proxy: proxy:3128",
        "outbound_federation_restricted_to: [fed1]",
        "federation: {client_timeout: 10ms}",
        "federation: {destination_retry_multiplier: 0.5}",
        "federation: {max_long_retries: -1}",
        "federation: [1]",
        "federation_domain_whitelist: remote.test",
        "federation_verify_certificates: maybe",
        "federation_custom_ca_list: []",
        "federation_custom_ca_list: [DIR/absent.pem]",
        "federation_custom_ca_list: [DIR/extra.yaml]",
        "federation_client_minimum_tls_version: 2",
        "ip_range_blacklist: [everything]",
        "experimental_features: {msc4354_enabled: 1}",
        // Files that are no configuration.
        "redis: {enabled: true\nserver_name: x",
        "a: b: c",
        "just words",
    ];
    let texts: Vec<String> = cases
        .iter()
        .map(|case| format!("{case}\n=> {}\n", refusal(case)))
        .collect();
    insta::assert_snapshot!(texts.join("\n"));
}

#[test]
fn refusals_outside_the_yaml_read_well() {
    let shared = [("homeserver.yaml", SHARED), ("fed1.yaml", WORKER)];
    let own = |text| {
        let files: Vec<_> = shared.into_iter().chain([("burdock.toml", text)]).collect();
        load_files(&files, &[])
    };
    let absent =
        |paths: &[PathBuf], own: Option<&Path>| Config::load_with(paths, own, &|_| None).map_err(|e| e.to_string());
    let results = vec![
        load_files(&[], &[]),
        load_files(&shared, &[("HTTPS_PROXY", "http://proxy:3128")]),
        absent(&["/absent/homeserver.yaml".into()], None),
        absent(&[], Some(Path::new("/absent/burdock.toml"))),
        own("[sender]\nmax_pending_pdu = 1\n"),
        own("[sendr]\n"),
        own("[sender]\nmax_pending_pdus = 0\n"),
        own("[sender]\nmax_pending_pdus = 'many'\n"),
        own("[sender]\nmax_pending_age = '10 s'\n"),
        own("[sender]\nmax_pending_age = '2h'\n"),
        own("[listen]\naddress = 'localhost:9090'\n"),
        own("[listen]\naddress = '[::1]:1'\nreplication_secret = 7654321\n"),
        own("[listen]\naddress = '[::1]:1'\nreplication_secret = ''\n"),
        own("[listen]\naddress = '[::1]:1'\nreplication_secret = 'hunter\n"),
        own("[listen]\nreplication_secret = 'hunter'\n"),
        own("[listen]\nreplication_secret = 'hunter'\nreplication_secret_path = '/x'\n"),
        own("[listen]\nreplication_secret_path = '/absent/secret'\n"),
        own("[log]\nformat = 'xml'\n"),
        own("[log]\nfilter = 'burdock=loud'\n"),
        own("[log]\nfilter = 'info'\nfilter = 'warn'\n"),
        own("[log\n"),
    ];
    let texts: Vec<String> = results.into_iter().map(text_of).collect();
    insta::assert_snapshot!(texts.join("\n\n"));
}
