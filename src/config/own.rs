//! Our own keys: the optional TOML file. `config.example.toml` describes each of them.

use std::{
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use serde::{Deserialize, Deserializer, de::Error};
use tracing_subscriber::EnvFilter;

use super::{LogFormat, Own, Secret, duration, error::ConfigError};

/// The file as it is written: a section a struct.
#[derive(Deserialize, Default)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(deny_unknown_fields, default)]
struct OwnFile {
    listen: Listen,
    sender: Sender,
    federation: Federation,
    log: Log,
}

#[derive(Deserialize, Default)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(deny_unknown_fields, default)]
struct Listen {
    #[serde(deserialize_with = "address")]
    address: Option<SocketAddr>,
    #[serde(deserialize_with = "secret")]
    replication_secret: Option<String>,
    replication_secret_path: Option<PathBuf>,
}

#[derive(Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(deny_unknown_fields, default)]
#[expect(clippy::struct_field_names, reason = "the names are the keys of the file")]
struct Sender {
    // Below this not even one PDU of the largest size fits.
    #[serde(deserialize_with = "within::<_, 131_072, 1_073_741_824>")]
    max_transaction_bytes: usize,
    #[serde(deserialize_with = "within::<_, 1, 1_000_000>")]
    max_pending_pdus: usize,
    #[serde(deserialize_with = "age")]
    max_pending_age: Duration,
}

#[derive(Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(deny_unknown_fields, default)]
struct Federation {
    #[serde(deserialize_with = "within::<_, 1, 65_536>")]
    max_connecting: usize,
}

#[derive(Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(deny_unknown_fields, default)]
struct Log {
    format: LogFormat,
    #[serde(deserialize_with = "filter")]
    filter: String,
}

impl Default for Sender {
    fn default() -> Self {
        Self {
            max_transaction_bytes: 8 * 1024 * 1024,
            max_pending_pdus: 1000,
            max_pending_age: Duration::from_mins(1),
        }
    }
}

impl Default for Federation {
    fn default() -> Self {
        Self { max_connecting: 128 }
    }
}

impl Default for Log {
    fn default() -> Self {
        Self {
            format: LogFormat::Text,
            filter: "info,sqlx=warn,ruma_state_res=warn".to_owned(),
        }
    }
}

impl Default for Own {
    fn default() -> Self {
        OwnFile::default().into()
    }
}

impl From<OwnFile> for Own {
    fn from(file: OwnFile) -> Self {
        Self {
            listen: file.listen.address,
            replication_secret: file.listen.replication_secret.map(Secret),
            max_transaction_bytes: file.sender.max_transaction_bytes,
            max_pending_pdus: file.sender.max_pending_pdus,
            max_pending_age: file.sender.max_pending_age,
            max_connecting: file.federation.max_connecting,
            log_format: file.log.format,
            log_filter: file.log.filter,
        }
    }
}

/// The file at `path`, or the defaults.
pub(super) fn read(path: Option<&Path>) -> Result<Own, ConfigError> {
    let Some(path) = path else {
        return Ok(Own::default());
    };
    let text = fs::read_to_string(path).map_err(|e| {
        ConfigError::in_file(
            path,
            format!("cannot be read: {e}"),
            "Check the path given with --config and that the user Burdock runs as may read it",
        )
    })?;
    let mut file = parse(&text).map_err(|e| {
        let place = e.span().map_or(String::new(), |span| {
            let line = text.get(..span.start).unwrap_or_default().matches('\n').count() + 1;
            let mut content = text.lines().nth(line - 1).unwrap_or_default().trim();
            if content.contains("secret") {
                content = content.split('=').next().unwrap_or_default().trim();
            }
            format!("line {line}, `{content}`: ")
        });
        let problem = e.message().trim_end().replace('\n', ", ");
        ConfigError::in_file(
            path,
            format!("{place}{problem}"),
            "`config.example.toml` describes every key",
        )
    })?;
    file.listen.find_secret(path)?;
    Ok(file.into())
}

fn parse(text: &str) -> Result<OwnFile, toml::de::Error> {
    toml::from_str(text)
}

impl Listen {
    /// Reads the secret's file, if it is in one, and checks that it is served where it is known.
    fn find_secret(&mut self, own: &Path) -> Result<(), ConfigError> {
        let wrong = |key: &str, problem: &str, remedy: &str| {
            let key = format!("listen.{key}");
            Err(ConfigError::at_key(&own.display().to_string(), &key, problem, remedy))
        };
        if let Some(path) = &self.replication_secret_path {
            let key = "replication_secret_path";
            if self.replication_secret.is_some() {
                return wrong(key, "is given together with `replication_secret`", "Remove one of them");
            }
            let content = match fs::read_to_string(path) {
                Ok(content) => content.trim().to_owned(),
                Err(e) => {
                    let problem = format!("names `{}`, which cannot be read: {e}", path.display());
                    return wrong(
                        key,
                        &problem,
                        "Check the path and that the user Burdock runs as may read it",
                    );
                }
            };
            if content.is_empty() {
                return wrong(key, "names a file that holds nothing", "Write a secret into it");
            }
            self.replication_secret = Some(content);
        }
        if self.replication_secret.is_some() && self.address.is_none() {
            return wrong(
                "replication_secret",
                "is given, but nothing listens",
                "Set `listen.address`, or remove the secret",
            );
        }
        Ok(())
    }
}

fn within<'de, D: Deserializer<'de>, const MIN: usize, const MAX: usize>(input: D) -> Result<usize, D::Error> {
    let number = usize::deserialize(input)
        .ok()
        .filter(|number| (MIN..=MAX).contains(number));
    number.ok_or_else(|| D::Error::custom(format!("give an integer from {MIN} to {MAX}")))
}

fn address<'de, D: Deserializer<'de>>(input: D) -> Result<Option<SocketAddr>, D::Error> {
    let address = SocketAddr::deserialize(input);
    address
        .map(Some)
        .map_err(|_| D::Error::custom("give an address and a port, for example `127.0.0.1:9090`"))
}

fn secret<'de, D: Deserializer<'de>>(input: D) -> Result<Option<String>, D::Error> {
    // Blanks around it would be lost on the way.
    let secret = String::deserialize(input)
        .ok()
        .filter(|secret| !secret.is_empty() && secret.trim() == secret);
    secret
        .map(Some)
        .ok_or_else(|| D::Error::custom("give a text that is not empty, without blanks around it"))
}

fn age<'de, D: Deserializer<'de>>(input: D) -> Result<Duration, D::Error> {
    let bounds = Duration::from_secs(1)..=Duration::from_hours(1);
    let age = duration::parse(&String::deserialize(input)?).filter(|age| bounds.contains(age));
    age.ok_or_else(|| D::Error::custom("give a length of time from `1s` to `1h`"))
}

fn filter<'de, D: Deserializer<'de>>(input: D) -> Result<String, D::Error> {
    let text = String::deserialize(input)?;
    match EnvFilter::try_new(&text) {
        Ok(_) => Ok(text),
        Err(_) => Err(D::Error::custom(
            "give a filter, for example `info` or `info,burdock::sender=debug`",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXAMPLE: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/config.example.toml"));

    #[test]
    fn the_example_holds_the_defaults() {
        let example = parse(EXAMPLE).expect("the example is valid");
        assert_eq!(Own::from(example), Own::default());
    }

    #[test]
    fn the_example_holds_every_key_once_with_a_reason() {
        let everything = OwnFile {
            listen: Listen {
                address: Some(([127, 0, 0, 1], 9090).into()),
                replication_secret: Some("hunter".to_owned()),
                replication_secret_path: Some("/hunter".into()),
            },
            ..OwnFile::default()
        };
        let keys: Vec<String> = toml::Table::try_from(everything)
            .expect("a table")
            .into_iter()
            .flat_map(|(section, keys)| {
                let keys = keys.as_table().expect("a section").keys().cloned().collect::<Vec<_>>();
                keys.into_iter().map(move |key| format!("{section}.{key}"))
            })
            .collect();

        let mut documented = Vec::new();
        let mut section = "";
        let mut previous = "";
        for line in EXAMPLE.lines() {
            if let Some(name) = line.strip_prefix('[') {
                section = name.trim_end_matches(']');
            } else if let Some((key, _)) = line.trim_start_matches("# ").split_once(" = ") {
                documented.push(format!("{section}.{key}"));
                assert!(previous.starts_with("# "), "`{key}` has no reason above it");
            }
            previous = line;
        }
        documented.sort();
        let mut keys = keys;
        keys.sort();
        assert_eq!(documented, keys);
    }

    #[test]
    fn every_key_is_taken_from_the_file() {
        let text = "[listen]\naddress = '[::1]:1'\nreplication_secret = 'hunter'\n[sender]\nmax_transaction_bytes = 131072\nmax_pending_pdus = 1\n\
                    max_pending_age = '2m'\n[federation]\nmax_connecting = 2\n[log]\nformat = 'json'\nfilter = 'burdock=debug'\n";
        let expected = Own {
            listen: "[::1]:1".parse().ok(),
            replication_secret: Some(Secret("hunter".to_owned())),
            max_transaction_bytes: 131_072,
            max_pending_pdus: 1,
            max_pending_age: Duration::from_mins(2),
            max_connecting: 2,
            log_format: LogFormat::Json,
            log_filter: "burdock=debug".to_owned(),
        };
        assert_eq!(Own::from(parse(text).expect("valid")), expected);
    }
}
