//! A destination that fell behind: for each room it is owed, in stream order, the room's newest events; sticky events
//! that are passed over go into the backlog.

use std::{collections::VecDeque, time::Duration};

use tracing::{debug, warn};

use super::{
    attempt::{Attempt, PAUSE},
    worker::Worker,
};
use crate::{
    core::{
        clock,
        event::{self, Pdu},
        id::StreamOrdering,
        state::visibility,
        store::{OwedRoom, StoreError, StoredEvent},
    },
    federation::transaction::Body,
};

/// Rows read at once.
const PAGE: i64 = 50;

/// Extremities that stand for a room.
const EXTREMITIES: i64 = 10;

/// How long to wait for an event whose hosts are still unknown.
const UNDECIDED_PAUSE: Duration = Duration::from_millis(500);

/// Rows refused in a row that make it the destination's failure rather than the content's.
const REFUSED_ROWS: usize = 2;

/// Rows owed to a destination, as read: catch-up takes them one by one, in turn with the backlog.
#[derive(Debug, Default)]
pub(super) struct Page(VecDeque<OwedRoom>);

impl Page {
    /// The row that follows `skip` others above `after`; `None` if more must be read.
    pub(super) fn get(&mut self, skip: usize, after: StreamOrdering) -> Option<&OwedRoom> {
        self.0.retain(|row| row.stream_ordering > after);
        self.0.get(skip)
    }

    /// Keeps those up to `up_to`. Beyond it rows may still be added between these, by an event whose hosts are found late
    /// or, after a crash, by one that is read again; whoever went from row to row would pass them.
    pub(super) fn fill(&mut self, rows: impl IntoIterator<Item = OwedRoom>, up_to: StreamOrdering) {
        self.0 = rows.into_iter().filter(|row| row.stream_ordering <= up_to).collect();
    }

    /// Forgets what was read.
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}

impl Worker {
    /// Sends what stands for the next room owed, and moves on.
    pub(super) async fn catch_up(
        &mut self,
        after: StreamOrdering,
        up_to: StreamOrdering,
        rest_in_memory: bool,
    ) -> Result<(), StoreError> {
        let sender = self.sender.clone();
        if self.page.get(self.refused_rows, after).is_none() {
            let rows = sender.store.owed_rooms(&self.name, after, PAGE).await?;
            self.page.fill(rows, up_to);
        }
        let Some(row) = self.page.get(self.refused_rows, after).cloned() else {
            if self.refused_rows > 0 {
                self.refused_rows = 0;
                sender.back_off(&self.name).await;
            } else if !rest_in_memory {
                self.rest(UNDECIDED_PAUSE);
            } else if sender.ledger.lock().caught_up(&self.name) {
                debug!(destination = %self.name, "caught up");
            }
            return Ok(());
        };

        let chosen = self.stand_ins(&row, after).await?;
        let orderings: Vec<_> = chosen.iter().map(|(ordering, _)| *ordering).collect();
        if !chosen.is_empty() {
            let pdus: Vec<_> = chosen.into_iter().map(|(_, pdu)| pdu.bytes).collect();
            let body = Body::build(&sender.origin, clock::now().wall, &pdus);
            match sender.attempt(&self.name, &body, &self.nudge).await {
                Attempt::Accepted(accepted) => self.count_errors(&accepted),
                Attempt::Refused => {
                    self.refused_rows += 1;
                    if self.refused_rows >= REFUSED_ROWS {
                        self.refused_rows = 0;
                        sender.back_off(&self.name).await;
                    }
                    return Ok(());
                }
                Attempt::Failed => {
                    self.refused_rows = 0;
                    sender.back_off(&self.name).await;
                    return Ok(());
                }
                Attempt::Unreadable => {
                    self.rest(PAUSE);
                    return Ok(());
                }
                Attempt::Interrupted => return Ok(()),
            }
        }
        self.refused_rows = 0;
        let marked = sender
            .store
            .finish_catch_up_step(&self.name, after, row.stream_ordering, &orderings, sender.sticky)
            .await?;
        let mut ledger = sender.ledger.lock();
        ledger.caught_up_to(&self.name, row.stream_ordering, clock::now());
        if marked {
            ledger.backlog_recorded(&self.name, None, clock::now());
        }
        Ok(())
    }

    /// What is sent for a row: its PDU if it is still among the room's newest events, else those.
    async fn stand_ins(&self, row: &OwedRoom, after: StreamOrdering) -> Result<Vec<(StreamOrdering, Pdu)>, StoreError> {
        let store = &self.sender.store;
        let Some(event_id) = &row.event_id else {
            return Ok(vec![]);
        }; // purged since
        let extremities = store.forward_extremities(&row.room_id, EXTREMITIES).await?;
        let newest = !extremities.iter().any(|(id, ..)| id == event_id)
            && !store.room_is_partial(&row.room_id).await?
            // It left, and what came after is none of its business.
            && store.server_in_room(&self.name, &row.room_id).await?;
        if newest {
            let ids: Vec<_> = extremities
                .into_iter()
                .filter(|(_, ordering, _)| *ordering >= after)
                .map(|(id, ..)| id)
                .collect();
            let mut events = store.events_by_id(&ids).await?;
            events.sort_by_key(|event| event.stream_ordering);
            let senders: Vec<&str> = events.iter().map(|event| event.sender.as_str()).collect();
            let erased = store.erased(&senders).await?;
            let mut chosen = vec![];
            for event in &events {
                if erased.contains(&event.sender) || event.soft_failed {
                    continue;
                }
                if visibility::visible_to(store, &self.sender.joined_hosts, event, &self.name).await? {
                    chosen.extend(encode(event));
                }
            }
            if !chosen.is_empty() {
                return Ok(chosen);
            }
        }
        let original = store.events_by_id(std::slice::from_ref(event_id)).await?;
        Ok(original.iter().filter_map(encode).collect())
    }
}

/// The event as a PDU, redacted if it was.
pub(super) fn encode(event: &StoredEvent) -> Option<(StreamOrdering, Pdu)> {
    let parsed = if event.redacted {
        event::parse_redacted(event)
    } else {
        event::parse(event)
    };
    match parsed {
        Ok(parsed) => parsed.pdu.map(|pdu| (event.stream_ordering, pdu)),
        Err(error) => {
            warn!(event_id = %event.event_id, %error, "stored event cannot be sent");
            None
        }
    }
}
