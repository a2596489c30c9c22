//! Which certificates are believed? Builds the HTTP clients: one that verifies, one that does not.

use std::{sync::Arc, time::Duration};

use reqwest::{Certificate, ClientBuilder, redirect, tls::Version};

use super::{addresses::AddressFilter, client::ClientError, resolver::FilteringResolver};
use crate::config::Federation;

/// Longest wait for a TCP connection and its TLS handshake.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);

/// How long an idle connection stays in the pool, and how many for one host.
const IDLE_TIMEOUT: Duration = Duration::from_mins(2);
const IDLE_PER_HOST: usize = 5;

/// The HTTP clients.
pub(super) struct Clients {
    /// Verifies chain and name. Absent if verification is switched off, for then not even the roots need be readable.
    verifying: Option<reqwest::Client>,
    trusting: reqwest::Client,
    /// Lower-case globs of certificate names that are not verified.
    unverified: Vec<String>,
}

impl Clients {
    pub(super) fn new(settings: &Federation, filter: &Arc<AddressFilter>) -> Result<Self, ClientError> {
        // One process-wide choice; it fails only if it is made already, by us or by a test.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let verifying = settings.verify_certificates.then(|| {
            let builder = builder(settings, filter);
            let builder = match &settings.custom_ca {
                Some(files) => builder.tls_certs_only(custom_roots(files)?),
                None => builder,
            };
            builder.build().map_err(ClientError::Tls)
        });
        let trusting = builder(settings, filter).tls_danger_accept_invalid_certs(true);
        Ok(Self {
            verifying: verifying.transpose()?,
            trusting: trusting.build().map_err(ClientError::Tls)?,
            unverified: settings
                .unverified_names
                .iter()
                .map(|glob| glob.to_ascii_lowercase())
                .collect(),
        })
    }

    /// The client for a host whose certificate must be for `name` (lower case).
    pub(super) fn for_name(&self, name: &str) -> &reqwest::Client {
        match &self.verifying {
            Some(verifying) if !self.unverified.iter().any(|glob| glob_matches(glob, name)) => verifying,
            _ => &self.trusting,
        }
    }
}

fn builder(settings: &Federation, filter: &Arc<AddressFilter>) -> ClientBuilder {
    let minimum = if settings.tls_1_3_only {
        Version::TLS_1_3
    } else {
        Version::TLS_1_2
    };
    reqwest::Client::builder()
        .user_agent(concat!("Burdock/", env!("CARGO_PKG_VERSION")))
        // Proxies in front of homeservers route by the Host header, which HTTP/2 does not have.
        .http1_only()
        .redirect(redirect::Policy::none())
        .no_proxy()
        .dns_resolver(FilteringResolver(Arc::clone(filter)))
        .connect_timeout(CONNECT_TIMEOUT)
        .pool_idle_timeout(IDLE_TIMEOUT)
        .pool_max_idle_per_host(IDLE_PER_HOST)
        .tcp_nodelay(true)
        .tls_version_min(minimum)
}

fn custom_roots(files: &[Vec<u8>]) -> Result<Vec<Certificate>, ClientError> {
    let mut roots = Vec::new();
    for file in files {
        let certificates = Certificate::from_pem_bundle(file).map_err(ClientError::CustomCa)?;
        if certificates.is_empty() {
            return Err(ClientError::EmptyCustomCa);
        }
        roots.extend(certificates);
    }
    Ok(roots)
}

/// `*` stands for any text, `?` for one character.
fn glob_matches(glob: &str, name: &str) -> bool {
    let (glob, name) = (glob.as_bytes(), name.as_bytes());
    let (mut at, mut seen) = (0, 0);
    // Where the last `*` is, and how much of the name it has swallowed up to now.
    let mut star: Option<(usize, usize)> = None;
    while seen < name.len() {
        match glob.get(at) {
            Some(b'*') => {
                star = Some((at, seen));
                at += 1;
            }
            Some(&c) if c == b'?' || c == name[seen] => {
                at += 1;
                seen += 1;
            }
            _ => {
                let Some((position, swallowed)) = star else {
                    return false;
                };
                star = Some((position, swallowed + 1));
                at = position + 1;
                seen = swallowed + 1;
            }
        }
    }
    glob[at..].iter().all(|c| *c == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn globs_match_whole_names() {
        for (glob, name) in [
            ("*", ""),
            ("*", "a.b"),
            ("*.example.com", "a.b.example.com"),
            ("a?c*e", "abcde"),
            ("*a*a", "aaaa"),
            ("10.0.0.*", "10.0.0.7"),
            ("a**", "a"),
        ] {
            assert!(glob_matches(glob, name), "{glob} {name}");
        }
        for (glob, name) in [
            ("", "a"),
            ("*.example.com", "example.com"),
            ("a", "ab"),
            ("a?", "a"),
            ("?", ""),
            ("a.c", "abc"),
        ] {
            assert!(!glob_matches(glob, name), "{glob} {name}");
        }
        let slow = format!("{}b", "*a".repeat(50));
        assert!(!glob_matches(&slow, &"a".repeat(200)));
    }
}
