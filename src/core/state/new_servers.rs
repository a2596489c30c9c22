//! Which servers a change of current state brought into a room, as far as living sticky events of ours wait for them there.
//!
//! Current state and its changes are read in one look. Replaying the changes from what was joined before the first of
//! them therefore gives the room's servers before each change exactly, whatever order joins are noticed in.

use std::collections::{BTreeSet, HashMap, HashSet};

use super::servers::server_change;
use crate::core::{
    clock::Millis,
    id::{RoomId, ServerName, StreamOrdering, domain_of},
    store::{DeltaScan, NewServer, Store, StoreError},
};

/// What a stretch of the deltas of current state brought.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewServerScan {
    /// Servers new in rooms where a sticky event of ours is alive; in order, none twice, never our own.
    pub found: Vec<NewServer>,
    /// Everything up to here has been read; no change was cut in two.
    pub read_up_to: StreamOrdering,
}

/// Reads the deltas `after` < position <= `up_to`. `up_to` must be persisted: what commits at or below it later is missed.
///
/// # Errors
/// If the database does not answer.
pub async fn new_servers(
    store: &Store,
    after: StreamOrdering,
    up_to: StreamOrdering,
    now: Millis,
) -> Result<NewServerScan, StoreError> {
    let scan = store.member_deltas(after, up_to, now).await?;
    Ok(NewServerScan {
        found: newly_joined(&scan, store.server_name(), up_to),
        read_up_to: after.max(up_to),
    })
}

/// The servers that a change at or below `up_to` brought into a room where they had no joined user before it.
fn newly_joined(scan: &DeltaScan, our_server: &ServerName, up_to: StreamOrdering) -> Vec<NewServer> {
    let mut joined = before_the_first(scan);
    let mut found = BTreeSet::new();
    let in_stretch = scan.deltas.partition_point(|delta| delta.position <= up_to);
    // Rows of one change need not be neighbours where two rooms share a position, so rooms are walked one by one.
    let mut rooms: HashMap<&RoomId, Vec<_>> = HashMap::new();
    for delta in &scan.deltas[..in_stretch] {
        rooms.entry(&delta.room_id).or_default().push(delta);
    }
    for (room_id, deltas) in rooms {
        let present = joined.entry(room_id).or_default();
        for change in deltas.chunk_by(|a, b| a.position == b.position) {
            let users = change.iter().map(|delta| (delta.user.as_str(), delta.joined));
            let brought = server_change(users, |server| present.users(server), our_server);
            found.extend(brought.added.into_iter().map(|server| NewServer {
                server,
                room_id: room_id.clone(),
            }));
            for delta in change {
                present.apply(&delta.user, delta.joined);
            }
        }
    }
    found.into_iter().collect()
}

/// Who is in a room, as far as the scan speaks of it.
#[derive(Default)]
struct Present<'a> {
    /// Servers that never left.
    steady: HashSet<&'a str>,
    /// Joined users that come or go, per server.
    users: HashMap<&'a str, HashSet<&'a str>>,
}

impl<'a> Present<'a> {
    /// How many joined users the server has, where those that never leave count as one.
    fn users(&self, server: &str) -> usize {
        usize::from(self.steady.contains(server)) + self.users.get(server).map_or(0, HashSet::len)
    }

    fn apply(&mut self, user: &'a str, joined: bool) {
        let Some(server) = domain_of(user) else { return };
        let users = self.users.entry(server).or_default();
        if joined {
            users.insert(user);
        } else {
            users.remove(user);
        }
    }
}

/// Who was in each room before the first change: the steady servers, and whoever a user's first change says was joined.
fn before_the_first(scan: &DeltaScan) -> HashMap<&RoomId, Present<'_>> {
    let mut rooms: HashMap<&RoomId, Present<'_>> = HashMap::new();
    for (room_id, server) in &scan.steady {
        rooms.entry(room_id).or_default().steady.insert(server.as_str());
    }
    let mut seen = HashSet::new();
    for delta in &scan.deltas {
        if seen.insert((&delta.room_id, &delta.user)) {
            rooms
                .entry(&delta.room_id)
                .or_default()
                .apply(&delta.user, !delta.joined);
        }
    }
    rooms
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: StreamOrdering = StreamOrdering(i64::MAX);

    /// Changes, as (position, room, user, joined).
    fn scan(deltas: &[(i64, &str, &str, bool)], steady: &[(&str, &str)]) -> DeltaScan {
        let delta = |&(position, room, user, joined): &(i64, &str, &str, bool)| crate::core::store::MemberDelta {
            position: StreamOrdering(position),
            room_id: room.into(),
            user: user.to_owned(),
            joined,
        };
        DeltaScan {
            deltas: deltas.iter().map(delta).collect(),
            steady: steady
                .iter()
                .map(|&(room, server)| (room.into(), server.into()))
                .collect(),
        }
    }

    fn found(scan: &DeltaScan, up_to: StreamOrdering) -> Vec<String> {
        newly_joined(scan, &"us".into(), up_to)
            .iter()
            .map(|new| format!("{} {}", new.room_id, new.server))
            .collect()
    }

    #[test]
    fn the_first_user_of_a_server_makes_it_new() {
        assert_eq!(found(&scan(&[(5, "!r", "@a:s", true)], &[("!r", "us")]), ALL), ["!r s"]);
        assert!(
            found(&scan(&[(5, "!r", "@a:s", true)], &[("!r", "s")]), ALL).is_empty(),
            "another is there"
        );
        assert_eq!(
            found(&scan(&[(5, "!r", "@a:s", true)], &[("!other", "s")]), ALL),
            ["!r s"]
        );
        assert!(found(&scan(&[(5, "!r", "@nowhere", true)], &[]), ALL).is_empty());
    }

    #[test]
    fn two_joins_seen_late_make_it_new_once() {
        let two = [(5, "!r", "@a:s", true), (6, "!r", "@b:s", true)];
        assert_eq!(found(&scan(&two, &[]), ALL), ["!r s"]);
        let one_change = [(5, "!r", "@a:s", true), (5, "!r", "@b:s", true)];
        assert_eq!(found(&scan(&one_change, &[]), ALL), ["!r s"]);
        // Read in two stretches: the second join, beyond the first stretch, is no reason to think the server was there.
        assert_eq!(found(&scan(&two, &[]), StreamOrdering(5)), ["!r s"]);
    }

    #[test]
    fn a_join_that_is_undone_by_now_still_counts() {
        assert_eq!(
            found(&scan(&[(5, "!r", "@a:s", true), (6, "!r", "@a:s", false)], &[]), ALL),
            ["!r s"]
        );
    }

    #[test]
    fn a_server_that_left_wholly_is_new_when_it_returns() {
        let back = [(5, "!r", "@a:s", false), (6, "!r", "@a:s", true)];
        assert_eq!(found(&scan(&back, &[]), ALL), ["!r s"]);
        assert!(found(&scan(&back, &[("!r", "s")]), ALL).is_empty(), "another stayed");
        let swapped = [
            (5, "!r", "@b:s", true),
            (6, "!r", "@a:s", false),
            (7, "!r", "@a:s", true),
        ];
        assert!(
            found(&scan(&swapped, &[]), ALL).is_empty(),
            "a was there when b joined, b when a returned"
        );
    }

    #[test]
    fn the_change_that_brings_us_in_lists_who_was_there_before_us() {
        let ours = [
            (5, "!r", "@a:s", true),
            (5, "!r", "@me:us", true),
            (5, "!r", "@b:t", true),
        ];
        assert!(found(&scan(&ours, &[]), ALL).is_empty());
        assert_eq!(
            found(&scan(&ours, &[("!r", "us")]), ALL),
            ["!r s", "!r t"],
            "we were there: state was reset"
        );
        let later = [&ours[..], &[(6, "!r", "@c:u", true)]].concat();
        assert_eq!(found(&scan(&later, &[]), ALL), ["!r u"]);
    }

    #[test]
    fn our_own_server_is_never_new_and_rooms_are_apart() {
        let deltas = [
            (5, "!q", "@me:us", true),
            (5, "!r", "@a:s", true),
            (6, "!q", "@a:s", true),
        ];
        assert_eq!(found(&scan(&deltas, &[("!q", "us")]), ALL), ["!q s", "!r s"]);
    }
}
