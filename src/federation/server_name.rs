//! Where is a server? From its Matrix name to the host and port to connect to.

use std::net::{IpAddr, Ipv4Addr};

use crate::core::id::ServerName;

/// Where homeservers listen unless their name says otherwise.
const DEFAULT_PORT: u16 = 8448;

/// Why a server is never contacted. What is owed to it is dropped, without back-off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Denied {
    /// The name is not a server name.
    #[error("not a valid server name")]
    Grammar,
    /// `federation_domain_whitelist` does not list it.
    #[error("not in federation_domain_whitelist")]
    NotWhitelisted,
    /// It is our own name.
    #[error("our own name")]
    Ourselves,
}

/// Where to connect for a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// The host, which is also what its certificate must be for.
    pub host: Host,
    /// The TCP port.
    pub port: u16,
}

/// A host to connect to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Host {
    /// The name is an address itself: nothing to look up.
    Address(IpAddr),
    /// A DNS name.
    Name(String),
}

impl Target {
    /// Where the server of that name is, from the name alone. Delegation (`.well-known`, SRV), which concerns names
    /// without a port only, would come between this and the connection.
    ///
    /// # Errors
    /// [`Denied::Grammar`].
    pub fn of(name: &ServerName) -> Result<Self, Denied> {
        let (host, port) = name.parts().ok_or(Denied::Grammar)?;
        Ok(Self {
            host: Host::of(host)?,
            port: port.unwrap_or(DEFAULT_PORT),
        })
    }
}

impl Host {
    fn of(host: &str) -> Result<Self, Denied> {
        if let Some(address) = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
            return address.parse().map(Self::Address).map_err(|_| Denied::Grammar);
        }
        if let Ok(address) = host.parse::<Ipv4Addr>() {
            return Ok(Self::Address(address.into()));
        }
        // URLs and resolvers read `127.1`, `0x7f000001` and `2130706433` as addresses. No top-level domain looks like
        // that, and taken for a name it would pass the check for addresses.
        let last = host
            .strip_suffix('.')
            .unwrap_or(host)
            .rsplit('.')
            .next()
            .unwrap_or_default();
        let is_number = last.bytes().all(|b| b.is_ascii_digit())
            || last
                .strip_prefix("0x")
                .or(last.strip_prefix("0X"))
                .is_some_and(|hex| hex.bytes().all(|b| b.is_ascii_hexdigit()));
        if is_number {
            Err(Denied::Grammar)
        } else {
            Ok(Self::Name(host.to_owned()))
        }
    }

    /// As it stands in a URL.
    #[must_use]
    pub fn in_url(&self) -> String {
        match self {
            Self::Address(IpAddr::V6(address)) => format!("[{address}]"),
            Self::Address(IpAddr::V4(address)) => address.to_string(),
            Self::Name(name) => name.clone(),
        }
    }

    /// As a certificate names it.
    #[must_use]
    pub fn in_certificate(&self) -> String {
        match self {
            Self::Address(address) => address.to_string(),
            Self::Name(name) => name.to_ascii_lowercase(),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use reqwest::Url;

    use super::*;

    fn target(name: &str) -> Result<(Host, u16), Denied> {
        Target::of(&name.into()).map(|target| (target.host, target.port))
    }

    #[test]
    fn names_and_addresses_with_and_without_a_port() {
        let name = |name: &str| Host::Name(name.to_owned());
        let address = |text: &str| Host::Address(text.parse().unwrap());
        assert_eq!(target("example.com"), Ok((name("example.com"), 8448)));
        assert_eq!(target("example.com:443"), Ok((name("example.com"), 443)));
        assert_eq!(target("1.2.3.4"), Ok((address("1.2.3.4"), 8448)));
        assert_eq!(target("1.2.3.4:1"), Ok((address("1.2.3.4"), 1)));
        assert_eq!(target("[::1]"), Ok((address("::1"), 8448)));
        assert_eq!(target("[2001:db8::1]:9"), Ok((address("2001:db8::1"), 9)));
        assert_eq!(target("0xample"), Ok((name("0xample"), 8448)));
    }

    #[test]
    fn what_a_resolver_might_take_for_an_address_is_denied() {
        for name in [
            "127.1",
            "2130706433",
            "0x7f000001",
            "0X7F.1",
            "a.0x",
            "1.2.3.4.",
            "010.0.0.1",
            "1.2.3.4.5",
            "a.b.1",
            ".",
        ] {
            assert_eq!(target(name), Err(Denied::Grammar), "{name}");
        }
        assert_eq!(target("exa mple"), Err(Denied::Grammar));
    }

    proptest! {
        #[test]
        fn a_url_sees_the_same_kind_of_host(name in r"[0-9A-Fa-fxX.:\[\]-]{1,16}|[a-z0-9.-]{1,12}(:[0-9]{1,5})?") {
            let Ok(target) = Target::of(&name.as_str().into()) else { return Ok(()) };
            let Ok(url) = Url::parse(&format!("https://{}:{}/", target.host.in_url(), target.port)) else { return Ok(()) };
            let literal = url.host_str().unwrap().trim_matches(['[', ']']).parse::<IpAddr>().ok();
            match target.host {
                Host::Address(address) => prop_assert_eq!(literal, Some(address)),
                Host::Name(_) => prop_assert_eq!(literal, None),
            }
        }
    }
}
