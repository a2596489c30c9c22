//! How other homeservers are reached, and how often they are tried again.

use std::{fs, time::Duration};

use super::{Federation, Retry, address_ranges, error::ConfigError, yaml::Layers};
use crate::core::id::ServerName;

/// Reads the settings of the HTTP client; `env` looks up an environment variable.
pub(super) fn read(layers: &Layers, env: &dyn Fn(&str) -> Option<String>) -> Result<Federation, ConfigError> {
    refuse_detours(layers, env)?;
    let whitelist = layers.get("federation_domain_whitelist").texts()?;
    Ok(Federation {
        domain_whitelist: whitelist.map(|names| names.into_iter().map(ServerName::from).collect()),
        address_filter: address_ranges::read(layers)?,
        verify_certificates: layers.get("federation_verify_certificates").flag()?.unwrap_or(true),
        unverified_names: layers
            .get("federation_certificate_verification_whitelist")
            .texts()?
            .unwrap_or_default(),
        custom_ca: custom_ca(layers)?,
        tls_1_3_only: tls_1_3_only(layers)?,
        timeout: layers
            .get("federation")
            .get("client_timeout")?
            .duration()?
            .unwrap_or(Duration::from_mins(1)),
    })
}

/// `federation:`, the retry schedule.
pub(super) fn read_retry(layers: &Layers) -> Result<Retry, ConfigError> {
    let section = layers.get("federation");
    let multiplier = section.get("destination_retry_multiplier")?;
    let multiplier_number = multiplier.number()?.unwrap_or(2.0);
    if multiplier_number < 1.0 {
        return Err(multiplier.error(
            "is less than 1",
            "Give a number of 1 or more; waits are multiplied by it",
        ));
    }
    let duration = |key, default| Ok(section.get(key)?.duration()?.unwrap_or(default));
    Ok(Retry {
        min_interval: duration("destination_min_retry_interval", Duration::from_mins(10))?,
        multiplier: multiplier_number,
        max_interval: duration("destination_max_retry_interval", Duration::from_hours(7 * 24))?,
        attempt_retries: section.get("max_long_retries")?.integer(0..=1000)?.unwrap_or(10),
        attempt_max_delay: duration("max_long_retry_delay", Duration::from_mins(1))?,
    })
}

/// An operator who routes federation through something else does not want it to go out directly.
fn refuse_detours(layers: &Layers, env: &dyn Fn(&str) -> Option<String>) -> Result<(), ConfigError> {
    let proxy = layers.get("https_proxy");
    if proxy.is_present() {
        return Err(proxy.error(
            "is set, and Burdock cannot send through a proxy yet",
            "If Burdock may connect directly, set `https_proxy: null` in a file that only Burdock gets as its last -c; else keep Synapse's federation sender",
        ));
    }
    for name in ["https_proxy", "HTTPS_PROXY"] {
        if env(name).is_some_and(|value| !value.is_empty()) {
            return Err(ConfigError::outside(
                "the environment",
                format!("`{name}` is set, and Burdock cannot send through a proxy yet"),
                "If Burdock may connect directly, unset it for this process; else keep Synapse's federation sender",
            ));
        }
    }
    let restricted = layers.get("outbound_federation_restricted_to");
    if restricted.is_present() {
        return Err(restricted.error(
            "is set, and Burdock can neither send through other workers nor serve as their way out yet",
            "Remove it from the file that all processes share, or keep Synapse's federation sender",
        ));
    }
    Ok(())
}

fn custom_ca(layers: &Layers) -> Result<Option<Vec<Vec<u8>>>, ConfigError> {
    let node = layers.get("federation_custom_ca_list");
    let Some(paths) = node.texts()? else {
        return Ok(None);
    };
    if paths.is_empty() {
        return Err(node.error(
            "is empty, so no certificate could be trusted",
            "Name PEM files, or remove the key",
        ));
    }
    let read = |path: &String| {
        let pem = fs::read(path).map_err(|e| node.unreadable(path.as_ref(), &e))?;
        let has_certificate = matches!(rustls_pemfile::certs(&mut pem.as_slice()).next(), Some(Ok(_)));
        if has_certificate {
            return Ok(pem);
        }
        Err(node.error(
            format!("names {path}, which holds no PEM certificate"),
            "Name files of PEM certificates",
        ))
    };
    paths.iter().map(read).collect::<Result<_, _>>().map(Some)
}

fn tls_1_3_only(layers: &Layers) -> Result<bool, ConfigError> {
    let node = layers.get("federation_client_minimum_tls_version");
    match node.literal()?.as_deref() {
        Some("1.3") => Ok(true),
        None | Some("1" | "1.1" | "1.2") => Ok(false),
        Some(_) => Err(node.error("is no version of TLS", "Use 1.2 or 1.3 (1 and 1.1 mean 1.2 here)")),
    }
}
