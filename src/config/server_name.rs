//! Our own name, and whether it is one.

use std::net::Ipv6Addr;

use super::{error::ConfigError, yaml::Layers};
use crate::core::id::ServerName;

/// `server_name`.
pub(super) fn read(layers: &Layers) -> Result<ServerName, ConfigError> {
    let node = layers.get("server_name");
    let name = node
        .text()?
        .ok_or_else(|| node.missing("Give homeserver.yaml of this homeserver with -c"))?;
    if !is_valid(&name) {
        return Err(node.error(
            "is not a Matrix server name",
            "A server name is a host name or an address, with `:port` if it has one, and no scheme and no path",
        ));
    }
    Ok(name.into())
}

/// The grammar of server names in the Matrix specification (appendices, 4.1), ports from 1 to 65535.
fn is_valid(name: &str) -> bool {
    let (host, port) = match name.rfind(':') {
        Some(colon) if !name.ends_with(']') => (&name[..colon], Some(&name[colon + 1..])),
        _ => (name, None),
    };
    let port_is_valid = port
        .is_none_or(|port| port.bytes().all(|b| b.is_ascii_digit()) && port.parse::<u16>().is_ok_and(|port| port != 0));
    let host_is_valid = match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
        Some(address) => address.parse::<Ipv6Addr>().is_ok(),
        None => host
            .split('.')
            .all(|label| !label.is_empty() && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')),
    };
    host_is_valid && port_is_valid
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_with_and_without_ports() {
        for name in [
            "example.com",
            "localhost",
            "Example.COM:8448",
            "1.2.3.4",
            "1.2.3.4:1",
            "[::1]",
            "[2001:db8::1]:8448",
        ] {
            assert!(is_valid(name), "{name}");
        }
        for name in [
            "",
            ":1",
            "a:",
            "a:0",
            "a:65536",
            "a:+1",
            "a b",
            "a_b",
            "https://a",
            "a/b",
            "a..b",
            "a.",
            "::1",
            "[::1",
            "[x]:1",
            "ä.de",
        ] {
            assert!(!is_valid(name), "{name}");
        }
    }
}
