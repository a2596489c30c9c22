//! Which servers have joined users in a state group.
//!
//! A group never changes once made, so what was computed for it stays true. A group that descends from one already known
//! costs the database only what changed between the two; the cache keeps the latest groups of each room for that.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use parking_lot::Mutex;
use tokio::sync::OnceCell;

use crate::core::{
    id::{RoomId, ServerName, StateGroup},
    store::{Store, StoreError},
};

/// How many rooms are remembered.
const MAX_ROOMS: usize = 10_000;

/// How many groups of a room are remembered. More than one, because a room's forks are asked about in turn.
const MAX_GROUPS: usize = 8;

/// The servers with joined users in a room, ours included.
///
/// Kept sorted: small, quick to walk in full (what every event does), and the same order each time.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Hosts(Vec<(ServerName, u32)>);

impl Hosts {
    /// The servers, in name order.
    pub fn iter(&self) -> impl Iterator<Item = &ServerName> {
        self.0.iter().map(|(server, _)| server)
    }

    /// Whether a user of that server is joined.
    #[must_use]
    pub fn contains(&self, server: &str) -> bool {
        self.users(server) > 0
    }

    /// How many users of that server are joined.
    #[must_use]
    pub fn users(&self, server: &str) -> u32 {
        self.0
            .binary_search_by(|(name, _)| name.as_str().cmp(server))
            .map_or(0, |at| self.0[at].1)
    }

    /// The hosts after each of these servers gained (or lost) that many joined users. No server may be named twice.
    fn changed(&self, mut changes: Vec<(ServerName, i64)>) -> Self {
        changes.sort_unstable();
        let mut old = self.0.iter().peekable();
        let mut new = Vec::with_capacity(self.0.len() + changes.len());
        for (server, change) in changes {
            while let Some(entry) = old.next_if(|(name, _)| *name < server) {
                new.push(entry.clone());
            }
            let before = old.next_if(|(name, _)| *name == server).map_or(0, |(_, users)| *users);
            let after = u32::try_from(i64::from(before).saturating_add(change).max(0)).unwrap_or(u32::MAX);
            if after > 0 {
                new.push((server, after));
            }
        }
        new.extend(old.cloned());
        Self(new)
    }
}

/// How hosts were found, counted since the start.
#[derive(Debug, Default)]
pub struct JoinedHostsStats {
    /// They were known.
    pub hits: AtomicU64,
    /// What changed since a known group was read.
    pub incremental: AtomicU64,
    /// All members were read.
    pub full: AtomicU64,
}

/// One group's hosts: being computed, or there.
type Cell = Arc<OnceCell<Arc<Hosts>>>;

/// A room's groups, the one used last at the end.
#[derive(Default)]
struct Room {
    last_used: u64,
    groups: Vec<(StateGroup, Cell)>,
}

#[derive(Default)]
struct Rooms {
    ticks: u64,
    rooms: HashMap<RoomId, Room>,
}

/// The hosts of the groups asked for lately. However many ask for one at once, it is computed once.
#[derive(Default)]
pub struct JoinedHosts {
    rooms: Mutex<Rooms>,
    stats: JoinedHostsStats,
}

impl JoinedHosts {
    /// The hosts of `group`, which is a group of `room`.
    ///
    /// # Errors
    /// `Damaged` if the group or its chain is; or if the database does not answer. The next to ask tries again.
    pub async fn of(&self, store: &Store, room: &RoomId, group: StateGroup) -> Result<Arc<Hosts>, StoreError> {
        let (cell, relatives) = self.rooms.lock().cell(room, group);
        if let Some(hosts) = cell.get() {
            self.stats.hits.fetch_add(1, Ordering::Relaxed);
            return Ok(Arc::clone(hosts));
        }
        cell.get_or_try_init(|| self.compute(store, group, &relatives))
            .await
            .cloned()
    }

    /// How hosts were found so far.
    #[must_use]
    pub fn stats(&self) -> &JoinedHostsStats {
        &self.stats
    }

    async fn compute(
        &self,
        store: &Store,
        group: StateGroup,
        relatives: &[(StateGroup, Arc<Hosts>)],
    ) -> Result<Arc<Hosts>, StoreError> {
        let known: Vec<StateGroup> = relatives.iter().map(|(group, _)| *group).collect();
        let found = store.host_changes(group, &known).await?;
        let base = relatives
            .iter()
            .find(|(group, _)| Some(*group) == found.base)
            .map(|(_, hosts)| hosts);
        let counter = if base.is_some() {
            &self.stats.incremental
        } else {
            &self.stats.full
        };
        counter.fetch_add(1, Ordering::Relaxed);
        Ok(match base {
            Some(hosts) if found.changes.is_empty() => Arc::clone(hosts),
            Some(hosts) => Arc::new(hosts.changed(found.changes)),
            None => Arc::new(Hosts::default().changed(found.changes)),
        })
    }
}

impl Rooms {
    /// The group's cell; if nothing is in it yet, also what is known of the room's other groups.
    fn cell(&mut self, room_id: &RoomId, group: StateGroup) -> (Cell, Vec<(StateGroup, Arc<Hosts>)>) {
        self.ticks += 1;
        if !self.rooms.contains_key(room_id) {
            self.make_place();
        }
        let room = self.rooms.entry(room_id.clone()).or_default();
        room.last_used = self.ticks;
        let cell = match room.groups.iter().position(|(known, _)| *known == group) {
            Some(at) => room.groups.remove(at).1,
            None => Cell::default(),
        };
        let relatives = if cell.initialized() {
            Vec::new()
        } else {
            room.groups
                .iter()
                .filter_map(|(group, cell)| Some((*group, Arc::clone(cell.get()?))))
                .collect()
        };
        if room.groups.len() >= MAX_GROUPS {
            room.groups.remove(0);
        }
        room.groups.push((group, Arc::clone(&cell)));
        (cell, relatives)
    }

    /// Forgets the room that was not asked about for longest, if there is no place for another.
    fn make_place(&mut self) {
        if self.rooms.len() < MAX_ROOMS {
            return;
        }
        let oldest = self
            .rooms
            .iter()
            .min_by_key(|(_, room)| room.last_used)
            .map(|(room_id, _)| room_id.clone());
        if let Some(room_id) = oldest {
            self.rooms.remove(&room_id);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    const SERVERS: [&str; 5] = ["a", "b", "b.c", "d", "e:1"];

    proptest! {
        #[test]
        fn changed_hosts_are_a_sorted_map_of_what_is_left(
            steps in prop::collection::vec(prop::collection::btree_map(0..SERVERS.len(), -2..3_i64, 0..5), 0..10),
        ) {
            let mut model = BTreeMap::new();
            let mut hosts = Hosts::default();
            for step in steps {
                for (server, change) in &step {
                    let users = model.entry(SERVERS[*server]).or_insert(0_i64);
                    *users = (*users + change).max(0);
                }
                model.retain(|_, users| *users > 0);
                hosts = hosts.changed(step.into_iter().map(|(at, change)| (SERVERS[at].into(), change)).collect());
                let found: Vec<(&str, i64)> = hosts.0.iter().map(|(name, users)| (name.as_str(), (*users).into())).collect();
                prop_assert_eq!(&found, &model.iter().map(|(name, users)| (*name, *users)).collect::<Vec<_>>());
                for server in SERVERS {
                    prop_assert_eq!(i64::from(hosts.users(server)), model.get(server).copied().unwrap_or(0));
                }
            }
        }
    }

    #[test]
    fn a_room_keeps_the_groups_asked_for_last() {
        let mut rooms = Rooms::default();
        let room = RoomId::from("!room");
        let limit = i64::try_from(MAX_GROUPS).unwrap();
        let fill = |cell: &Cell| cell.set(Arc::default()).unwrap();
        for group in 0..limit {
            fill(&rooms.cell(&room, StateGroup(group)).0);
        }
        assert!(rooms.cell(&room, StateGroup(0)).0.initialized());
        let (new, relatives) = rooms.cell(&room, StateGroup(limit));
        assert_eq!(relatives.len(), MAX_GROUPS, "all it knows may be built upon");
        fill(&new);
        assert!(
            rooms.cell(&room, StateGroup(0)).0.initialized(),
            "it was asked for since"
        );
        assert!(
            !rooms.cell(&room, StateGroup(1)).0.initialized(),
            "the oldest made place"
        );
        assert_eq!(rooms.rooms[&room].groups.len(), MAX_GROUPS);
    }

    #[test]
    fn the_room_not_asked_about_for_longest_makes_place() {
        let mut rooms = Rooms::default();
        let name = |at: usize| RoomId::from(format!("!{at}"));
        for at in 0..MAX_ROOMS {
            rooms.cell(&name(at), StateGroup(1));
        }
        rooms.cell(&name(0), StateGroup(1));
        rooms.cell(&name(MAX_ROOMS), StateGroup(1));
        assert_eq!(rooms.rooms.len(), MAX_ROOMS);
        assert!(rooms.rooms.contains_key(&name(0)) && !rooms.rooms.contains_key(&name(1)));
    }
}
