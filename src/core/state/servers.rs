//! Which servers a change of a room's state brings into the room, and which it takes out.

use std::collections::{BTreeMap, BTreeSet};

use crate::core::id::{ServerName, domain_of};

/// What a change does to the servers of a room. In name order, never our own.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ServerChange {
    /// They have a joined user after it, and had none before.
    pub added: Vec<ServerName>,
    /// They had a joined user before it, and have none after.
    pub removed: Vec<ServerName>,
}

impl ServerChange {
    /// What a change does that leads from servers with joined users to others. (Those that it does not touch may be left
    /// out of both.)
    ///
    /// The change that brings ourselves into a room adds nobody: it lists all members, and they were there before us. As
    /// little does the one that takes us out remove anybody.
    #[must_use]
    pub fn between(before: &BTreeSet<ServerName>, after: &BTreeSet<ServerName>, our_server: &ServerName) -> Self {
        let beyond = |more: &BTreeSet<ServerName>, less: &BTreeSet<ServerName>| {
            let beyond: Vec<ServerName> = more.difference(less).cloned().collect();
            if beyond.contains(our_server) {
                Vec::new()
            } else {
                beyond
            }
        };
        Self {
            added: beyond(after, before),
            removed: beyond(before, after),
        }
    }
}

/// What a change does whose users were joined before it and are not after it, or the other way round (`true`: they are
/// joined now). `users_before` says how many joined users a server had before it.
#[must_use]
pub fn server_change<'a>(
    users: impl IntoIterator<Item = (&'a str, bool)>,
    users_before: impl Fn(&str) -> usize,
    our_server: &ServerName,
) -> ServerChange {
    let mut servers: BTreeMap<&str, (usize, usize)> = BTreeMap::new();
    for (user, joined) in users {
        let Some(server) = domain_of(user) else { continue };
        let (came, left) = servers.entry(server).or_default();
        *(if joined { came } else { left }) += 1;
    }
    let (mut before, mut after) = (BTreeSet::new(), BTreeSet::new());
    for (server, (came, left)) in servers {
        let users = users_before(server);
        if users > 0 {
            before.insert(server.into());
        }
        if users + came > left {
            after.insert(server.into());
        }
    }
    ServerChange::between(&before, &after, our_server)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn change(before: &[(&str, usize)], users: &[(&str, bool)]) -> (String, String) {
        let users_before = |server: &str| before.iter().find(|known| known.0 == server).map_or(0, |known| known.1);
        let change = server_change(users.iter().copied(), users_before, &"us".into());
        let names = |servers: Vec<ServerName>| servers.iter().map(ServerName::as_str).collect::<Vec<_>>().join(" ");
        (names(change.added), names(change.removed))
    }

    fn is(added: &str, removed: &str) -> (String, String) {
        (added.to_owned(), removed.to_owned())
    }

    #[test]
    fn the_first_user_brings_a_server_and_the_last_takes_it_away() {
        assert_eq!(
            change(&[], &[("@a:s", true), ("@b:s", true), ("@nowhere", true)]),
            is("s", "")
        );
        assert_eq!(change(&[("s", 1)], &[("@b:s", true)]), is("", ""));
        assert_eq!(change(&[("s", 2)], &[("@a:s", false)]), is("", ""));
        assert_eq!(
            change(&[("s", 2), ("t", 1)], &[("@a:s", false), ("@b:s", false)]),
            is("", "s")
        );
        assert_eq!(
            change(&[("s", 1)], &[("@a:s", false), ("@b:s", true)]),
            is("", ""),
            "one for the other"
        );
        let all = [("@a:s", false), ("@a:t", true), ("@a:q", true)];
        assert_eq!(change(&[("s", 1), ("us", 1)], &all), is("q t", "s"));
    }

    #[test]
    fn our_own_coming_and_going_is_no_news_of_others() {
        assert_eq!(change(&[], &[("@a:s", true), ("@me:us", true)]), is("", ""));
        assert_eq!(
            change(&[("us", 1)], &[("@a:s", true), ("@b:us", true)]),
            is("s", ""),
            "we were there"
        );
        assert_eq!(
            change(&[("s", 1), ("us", 1)], &[("@a:s", false), ("@me:us", false)]),
            is("", "")
        );
        assert_eq!(
            change(&[("s", 1), ("us", 2)], &[("@a:s", false), ("@me:us", false)]),
            is("", "s")
        );
    }
}
