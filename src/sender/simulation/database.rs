//! The database of the simulated world: what the ledger wrote, and what another start reads.

use std::collections::{BTreeMap, HashMap};

use crate::core::{
    id::{RoomId, ServerName, StreamOrdering},
    store::{Checkpoint, DestinationRecord, RetryTimings},
};

/// What the database holds.
#[derive(Default, Clone)]
pub(super) struct Database {
    pub(super) cursor: StreamOrdering,
    pub(super) last_successful: HashMap<ServerName, StreamOrdering>,
    pub(super) rows: BTreeMap<(ServerName, RoomId), StreamOrdering>,
    pub(super) retry: HashMap<ServerName, RetryTimings>,
}

impl Database {
    pub(super) fn owed_rooms(&self, name: &ServerName, after: Option<StreamOrdering>) -> Vec<(RoomId, StreamOrdering)> {
        let rows = self
            .rows
            .iter()
            .filter(|((to, _), at)| to == name && after.is_none_or(|after| **at > after));
        let mut rows: Vec<_> = rows.map(|((_, room), at)| (room.clone(), *at)).collect();
        rows.sort_by_key(|(_, at)| *at);
        rows
    }

    pub(super) fn record(&self, name: &ServerName) -> DestinationRecord {
        let last_successful = self.last_successful.get(name).copied();
        let rows = self.owed_rooms(name, last_successful);
        DestinationRecord {
            last_successful,
            retry: self.retry.get(name).copied().unwrap_or_default(),
            owed_from: rows.first().map(|(_, at)| *at),
            owed_up_to: rows.last().map(|(_, at)| *at),
            has_backlog: false,
        }
    }

    pub(super) fn write(&mut self, checkpoint: &Checkpoint) {
        assert!(checkpoint.cursor >= self.cursor, "the cursor went back");
        self.cursor = checkpoint.cursor;
        self.last_successful.extend(checkpoint.last_successful.iter().cloned());
        for (name, room, at) in &checkpoint.owed {
            let row = self.rows.entry((name.clone(), room.clone())).or_insert(*at);
            *row = (*row).max(*at);
        }
    }
}
