//! A destination that fell behind: for each room it is owed, in stream order, the room's newest events; sticky events
//! that are passed over go into the backlog.

use std::{collections::VecDeque, time::Duration};

use tracing::{info, warn};

use super::{attempt::Attempt, timely, worker::Worker};
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

/// Rows owed to a destination, as read: catch-up takes them one by one, in turn with the backlog.
#[derive(Debug, Default)]
pub(super) struct Page(VecDeque<OwedRoom>);

impl Page {
    /// The first row above `after`; `None` if more must be read.
    pub(super) fn get(&mut self, after: StreamOrdering) -> Option<&OwedRoom> {
        self.0.retain(|row| row.stream_ordering > after);
        self.0.front()
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
        if self.page.get(after).is_none() {
            let rows = timely(sender.store.owed_rooms(&self.name, after, PAGE)).await?;
            self.page.fill(rows, up_to);
        }
        let Some(row) = self.page.get(after).cloned() else {
            if !rest_in_memory {
                self.rest(UNDECIDED_PAUSE);
            } else if sender.ledger.lock().caught_up(&self.name, up_to) {
                info!(destination = %self.name, "caught up");
            }
            return Ok(());
        };

        let mut chosen = self.stand_ins(&row, after).await?;
        // Nearly always one transaction; several only for a destination that refused them together.
        while !chosen.is_empty() {
            let pdus: Vec<_> = chosen.iter().map(|(_, pdu)| pdu.bytes.clone()).collect();
            let body = Body::build(&sender.origin, clock::now().wall, &pdus);
            match sender.attempt(&self.name, &body, pdus.len(), &self.nudge).await {
                Attempt::Accepted(accepted) => {
                    self.count_errors(&accepted);
                    let took = chosen.iter().map(|(_, pdu)| pdu);
                    let took = took.filter(|pdu| accepted.took(&pdu.event_id));
                    sender.ledger.lock().accepted_besides(&self.name, took, clock::now());
                    break;
                }
                // The row's own event, or the newest, alone.
                Attempt::Refused if chosen.len() > 1 => drop(chosen.drain(..chosen.len() - 1)),
                Attempt::Refused if self.refuses_only_that().await => break,
                attempt => {
                    if !matches!(attempt, Attempt::Refused) {
                        self.not_accepted(&attempt).await;
                    }
                    return Ok(());
                }
            }
        }
        let orderings: Vec<_> = chosen.iter().map(|(ordering, _)| *ordering).collect();
        let step = sender
            .store
            .finish_catch_up_step(&self.name, after, row.stream_ordering, &orderings, sender.sticky);
        let marked = timely(step).await?;
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
            return Ok(vec![]); // purged since
        };
        let extremities = timely(store.forward_extremities(&row.room_id, EXTREMITIES)).await?;
        let newest = !extremities.iter().any(|(id, ..)| id == event_id)
            && !timely(store.room_is_partial(&row.room_id)).await?
            // It left, and what came after is none of its business.
            && timely(store.server_in_room(&self.name, &row.room_id)).await?;
        if newest {
            let ids: Vec<_> = extremities
                .into_iter()
                .filter(|(_, ordering, _)| *ordering >= after)
                .map(|(id, ..)| id)
                .collect();
            let mut events = timely(store.events_by_id(&ids)).await?;
            events.sort_by_key(|event| event.stream_ordering);
            let senders: Vec<&str> = events.iter().map(|event| event.sender.as_str()).collect();
            let erased = timely(store.erased(&senders)).await?;
            let mut chosen = vec![];
            for event in &events {
                if erased.contains(&event.sender) || event.soft_failed {
                    continue;
                }
                match timely(visibility::visible_to(
                    store,
                    &self.sender.joined_hosts,
                    event,
                    &self.name,
                ))
                .await
                {
                    Ok(true) => chosen.extend(encode(event)),
                    Ok(false) => {}
                    Err(error) if error.may_pass() => return Err(error),
                    // Damaged state of one event must not hold up all that is owed.
                    Err(error) => warn!(event_id = %event.event_id, %error, "left out of catch-up"),
                }
            }
            if !chosen.is_empty() {
                return Ok(chosen);
            }
        }
        let original = timely(store.events_by_id(std::slice::from_ref(event_id))).await?;
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
