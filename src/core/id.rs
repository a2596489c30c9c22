//! Identifiers as types of their own, so that none can be taken for another.
//!
//! The text types share their bytes (`Arc<str>`): one event's room and its destinations are named in many places at
//! once, and a clone must cost no allocation.

use std::{fmt, net::Ipv6Addr, sync::Arc};

/// The longest identifier Matrix allows, bytes.
pub const MAX_ID_BYTES: usize = 255;

macro_rules! text_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(Arc<str>);

        impl $name {
            /// The identifier's text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl From<&str> for $name {
            fn from(text: &str) -> Self {
                Self(text.into())
            }
        }

        impl From<String> for $name {
            fn from(text: String) -> Self {
                Self(text.into())
            }
        }

        impl AsRef<str> for $name {
            fn as_ref(&self) -> &str {
                &self.0
            }
        }

        impl std::borrow::Borrow<str> for $name {
            fn borrow(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&*self.0, f)
            }
        }
    };
}

text_id! {
    /// A homeserver's Matrix name, exactly as written (`:port` included, never normalised). Compared byte for byte.
    ServerName
}
text_id! {
    /// A room's id. Room version 12 ids have no domain, so never look for one.
    RoomId
}
text_id! {
    /// An event's id.
    EventId
}
text_id! {
    /// A replication instance's name on the wire: a worker's `worker_name`, or `master`.
    InstanceName
}

impl ServerName {
    /// Its host (`[...]` around an IPv6 address kept) and explicit port; `None` if it is not of a server name's form.
    #[must_use]
    pub fn parts(&self) -> Option<(&str, Option<u16>)> {
        let name = self.as_str();
        let host_end = if name.starts_with('[') {
            name.find(']')? + 1
        } else {
            name.find(':').unwrap_or(name.len())
        };
        let (host, rest) = name.split_at(host_end);
        let host_is_valid = match host.strip_prefix('[') {
            Some(address) => address.strip_suffix(']')?.parse::<Ipv6Addr>().is_ok(),
            None => {
                !host.is_empty()
                    && host
                        .bytes()
                        .all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'.')
            }
        };
        if !host_is_valid || name.len() > MAX_ID_BYTES {
            return None;
        }
        if rest.is_empty() {
            return Some((host, None));
        }
        let digits = rest.strip_prefix(':')?;
        let port = digits
            .parse()
            .ok()
            .filter(|port| *port != 0 && digits.bytes().all(|b| b.is_ascii_digit()))?;
        Some((host, Some(port)))
    }
}

/// The server a user id belongs to: what follows the first `:`. `None` if there is no `:`.
#[must_use]
pub fn domain_of(user_id: &str) -> Option<&str> {
    user_id.split_once(':').map(|(_, domain)| domain)
}

macro_rules! number_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
        pub struct $name(pub i64);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

number_id! {
    /// A position in the `events` stream (`events.stream_ordering`; the deltas of current state share it).
    StreamOrdering
}
number_id! {
    /// A position in the `sticky_events` stream. Synapse keeps it in 32 bits.
    StickyPosition
}
number_id! {
    /// A state group's id.
    StateGroup
}
number_id! {
    /// A position in any replication stream, as it stands on the wire.
    Token
}

impl StreamOrdering {
    /// The position just below this one.
    #[must_use]
    pub fn before(self) -> Self {
        Self(self.0.saturating_sub(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_users_domain_is_all_that_follows_the_first_colon() {
        assert_eq!(domain_of("@ann:example.com:8448"), Some("example.com:8448"));
        assert_eq!(domain_of("@ann"), None);
    }

    #[test]
    fn a_server_name_has_a_host_and_perhaps_a_port() {
        let parts = |name: &str| {
            ServerName::from(name)
                .parts()
                .map(|(host, port)| (host.to_owned(), port))
        };
        for (name, host, port) in [
            ("example.com", "example.com", None),
            ("Example-1.com:443", "Example-1.com", Some(443)),
            ("1.2.3.4:8448", "1.2.3.4", Some(8448)),
            ("[::1]", "[::1]", None),
            ("[2001:db8::1]:65535", "[2001:db8::1]", Some(65535)),
            ("example.com.", "example.com.", None),
        ] {
            assert_eq!(parts(name), Some((host.to_owned(), port)), "{name}");
        }
        for name in [
            "",
            ":8448",
            "a:",
            "a:0",
            "a:65536",
            "a:+1",
            "a:1:2",
            "a b",
            "a/b",
            "a\"b",
            "ä",
            "a_b",
            "::1",
            "[::1",
            "[]",
            "[::1]x",
            "[::1]:",
            "[1.2.3.4]",
            "[fe80::1%1]",
            "a@b",
            "\n",
            "a.com\n",
            "[a]:1",
        ] {
            assert_eq!(parts(name), None, "{name:?}");
        }
        assert_eq!(parts(&"a".repeat(255)), Some(("a".repeat(255), None)));
        assert_eq!(parts(&"a".repeat(256)), None);
    }
}
