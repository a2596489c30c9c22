//! `redis:`, the bus between the processes of the homeserver.

use super::{Redis, RedisAddress, RedisTls, Secret, error::ConfigError, node::Node, yaml::Layers};

pub(super) fn read(layers: &Layers) -> Result<Redis, ConfigError> {
    let section = layers.get("redis");
    let enabled = section.get("enabled")?;
    if enabled.flag()? != Some(true) {
        return Err(enabled.error(
            "is not `true`",
            "Burdock hears of new events over Redis; set up Redis for Synapse's workers, with `redis: {enabled: true}`",
        ));
    }
    let password = password(&section)?;
    let username = section.get("username")?;
    let username_text = username.text()?;
    if username_text.is_some() && password.is_none() {
        return Err(username.error("is there without a password", "Add `password` or `password_path`"));
    }
    Ok(Redis {
        address: address(&section)?,
        username: username_text,
        password,
        dbid: section.get("dbid")?.integer(0..=i64::MAX)?,
    })
}

fn password(section: &Node<'_>) -> Result<Option<Secret>, ConfigError> {
    let (inline, path) = (section.get("password")?, section.get("password_path")?);
    // An empty password beside a path counts as none for Synapse.
    let inline_secret = inline.secret()?;
    if !path.is_present() {
        return Ok(inline_secret);
    }
    if inline_secret.is_some_and(|secret| !secret.0.is_empty()) {
        return Err(path.error("is there beside `redis.password`", "Keep one of the two"));
    }
    Ok(path.file_content()?.map(|content| Secret(content.trim().to_owned())))
}

fn address(section: &Node<'_>) -> Result<RedisAddress, ConfigError> {
    if let Some(path) = section.get("path")?.text()? {
        return Ok(RedisAddress::Unix(path.into()));
    }
    let tls = match section.get("use_tls")?.flag()? {
        Some(true) => Some(tls(section)?),
        _ => None,
    };
    Ok(RedisAddress::Tcp {
        host: section.get("host")?.text()?.unwrap_or_else(|| "localhost".to_owned()),
        port: section.get("port")?.integer(1..=u16::MAX)?.unwrap_or(6379),
        tls,
    })
}

fn tls(section: &Node<'_>) -> Result<RedisTls, ConfigError> {
    let ca_file = section.get("ca_file")?.readable_path()?;
    let ca_path = section.get("ca_path")?;
    if ca_file.is_none() && ca_path.is_present() {
        return Err(ca_path.error(
            "is not supported by Burdock",
            "Name one file of PEM certificates as `redis.ca_file`; Synapse then uses that as well",
        ));
    }
    let certificate = section.get("certificate_file")?;
    Ok(RedisTls {
        ca_file,
        client: certificate.pair_of_files(&section.get("private_key_file")?)?,
    })
}
