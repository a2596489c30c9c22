//! Finding servers that must get our sticky events although they were not in the room when those were sent.

use std::{collections::HashSet, sync::Arc};

use tracing::info;

use crate::{
    core::{
        clock,
        id::{RoomId, ServerName, StickyPosition, StreamOrdering},
        state::new_servers::new_servers,
        store::{NewServer, StoreError},
    },
    sender::{Sender, ledger::Entry, timely},
};

impl Sender {
    /// Looks at the changes of current state up to `up_to`, and records a backlog row for each server that a change
    /// brought into a room.
    ///
    /// The event loop calls this before it enters events up to `up_to`, so that a room's live events already find its
    /// backlog noted.
    pub(in crate::sender) async fn detect_new_servers(
        self: &Arc<Self>,
        deltas: &mut StreamOrdering,
        up_to: StreamOrdering,
    ) -> Result<(), StoreError> {
        while *deltas < up_to {
            let scan = timely(new_servers(&self.store, *deltas, up_to, clock::now().wall)).await?;
            let found: Vec<NewServer> = scan
                .found
                .into_iter()
                .filter(|found| self.may_send_to(&found.server))
                .collect();
            if !found.is_empty() {
                let record = self
                    .store
                    .record_new_servers(&found, scan.read_up_to, clock::now().wall);
                let recorded = timely(record).await?;
                for NewServer { server, room_id } in &recorded {
                    info!(destination = %server, room = %room_id, "new in the room: our sticky events are owed to it");
                }
                self.note_backlog(recorded.iter().map(|new| (&new.server, &new.room_id)))
                    .await?;
            }
            *deltas = scan.read_up_to;
            self.ledger.lock().set_deltas(*deltas);
        }
        Ok(())
    }

    /// A sticky event whose hosts do not include a server that is in the room by now: the event and the join were made
    /// at the same time, and the join's own row may be drained already.
    pub(in crate::sender) async fn record_missed(self: &Arc<Self>, entries: &[&Entry]) -> Result<(), StoreError> {
        let ids: Vec<_> = entries.iter().map(|entry| entry.pdu.pdu.event_id.clone()).collect();
        let positions = timely(self.store.sticky_positions(&ids)).await?;
        let mut missed: Vec<(ServerName, RoomId, StickyPosition)> = vec![];
        for entry in entries {
            let Some(position) = positions.get(&entry.pdu.pdu.event_id) else {
                continue;
            };
            let room = &entry.pdu.pdu.room_id;
            let joined_now = timely(self.store.joined_hosts_now(room)).await?;
            // A room may have tens of thousands of servers.
            let sent_to: HashSet<_> = entry.destinations.iter().collect();
            let left_out = joined_now
                .into_iter()
                .filter(|server| !sent_to.contains(server) && self.may_send_to(server));
            missed.extend(left_out.map(|server| (server, room.clone(), *position)));
        }
        if missed.is_empty() {
            return Ok(());
        }
        timely(self.store.record_missed(&missed)).await?;
        self.note_backlog(missed.iter().map(|(server, room, _)| (server, room)))
            .await
    }

    async fn note_backlog<'a>(
        self: &Arc<Self>,
        rows: impl Iterator<Item = (&'a ServerName, &'a RoomId)> + Clone,
    ) -> Result<(), StoreError> {
        self.introduce(rows.clone().map(|(server, _)| server)).await?;
        for (server, room) in rows {
            let wake = self.ledger.lock().backlog_recorded(server, Some(room), clock::now());
            self.wake(wake);
        }
        Ok(())
    }
}
