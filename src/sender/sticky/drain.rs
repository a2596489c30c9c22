//! Carrying out a backlog step: reading rows, asking a joiner, pushing a page.

use tracing::{debug, info, warn};

use super::backlog::{BacklogStep, UNLISTED_LIMIT};
use crate::{
    core::{
        clock,
        event::Pdu,
        id::{RoomId, StickyPosition},
        store::StoreError,
    },
    federation::{
        outcome::EventProbe,
        transaction::{Accepted, Body},
    },
    sender::{
        attempt::{Attempt, PAUSE},
        catch_up::encode,
        destination::PDU_LIMIT,
        worker::Worker,
    },
};

impl Worker {
    /// Carries out a step of the destination's sticky backlog.
    pub(in crate::sender) async fn work_on_backlog(&self, step: BacklogStep) -> Result<(), StoreError> {
        let sender = &self.sender;
        match step {
            BacklogStep::Load => {
                let rows = if sender.sticky {
                    sender.store.backlog(&self.name, clock::now().wall).await?
                } else {
                    vec![] // the table is left alone
                };
                sender.ledger.lock().backlog_loaded(&self.name, rows, clock::now());
                Ok(())
            }
            BacklogStep::Probe { room, join } => {
                let probe = sender.client.has_event(&self.name, &join).await;
                debug!(destination = %self.name, %room, ?probe, "asked the joiner for its join");
                let knows = !matches!(probe, EventProbe::NotFound);
                sender
                    .ledger
                    .lock()
                    .backlog_probed(&self.name, &room, knows, clock::now());
                Ok(())
            }
            BacklogStep::Push {
                room,
                position,
                unlisted,
            } => self.push(&room, position, unlisted).await,
            BacklogStep::Wait(_) | BacklogStep::Nothing => Ok(()),
        }
    }

    async fn push(&self, room: &RoomId, position: StickyPosition, unlisted: u32) -> Result<(), StoreError> {
        let store = &self.sender.store;
        let limit = i64::try_from(PDU_LIMIT).unwrap_or(i64::MAX);
        let page = store
            .backlog_items(&self.name, room, position, clock::now().wall, limit)
            .await?;
        if !page.joined {
            info!(destination = %self.name, %room, "no longer in the room; its sticky backlog is dropped");
            store.drop_backlog(&self.name, room, position).await?;
            self.finished(room);
            return Ok(());
        }
        let Some(last) = page.items.last().map(|item| item.position) else {
            // The row goes with the next look at the table, unless something was added meanwhile.
            self.finished(room);
            self.sender
                .ledger
                .lock()
                .backlog_recorded(&self.name, None, clock::now());
            return Ok(());
        };
        let sendable: Vec<_> = page.items.into_iter().filter(|item| item.sendable).collect();
        let ids: Vec<_> = sendable.iter().map(|item| item.event_id.clone()).collect();
        let events = store.events_by_id(&ids).await?;
        let mut pdus: Vec<(StickyPosition, Pdu)> = vec![];
        for item in &sendable {
            let event = events
                .iter()
                .find(|event| event.event_id == item.event_id && !event.redacted);
            pdus.extend(event.and_then(encode).map(|(_, pdu)| (item.position, pdu)));
        }
        let within = self.fit(&mut pdus);
        let end = if within {
            StickyPosition(last.0 + 1)
        } else {
            StickyPosition(pdus[pdus.len() - 1].0.0 + 1)
        };
        if pdus.is_empty() {
            return self.moved(room, position, end, 0).await;
        }
        let bytes: Vec<_> = pdus.iter().map(|(_, pdu)| pdu.bytes.clone()).collect();
        let body = Body::build(&self.sender.origin, clock::now().wall, &bytes);
        match self.sender.attempt(&self.name, &body, &self.nudge).await {
            Attempt::Accepted(accepted) => {
                self.count_errors(&accepted);
                let (to, left_out) = self.settle(&pdus, &accepted, end, unlisted);
                let sent = pdus.iter().filter(|(at, _)| *at < to).count();
                self.sender.metrics.sticky_backlog_sent.inc_by(sent as u64);
                self.moved(room, position, to, left_out).await
            }
            Attempt::Refused => self.push_singly(room, position, &pdus).await,
            attempt => {
                self.not_accepted(&attempt).await;
                Ok(())
            }
        }
    }

    async fn not_accepted(&self, attempt: &Attempt) {
        match attempt {
            Attempt::Failed | Attempt::Refused => self.sender.back_off(&self.name).await,
            Attempt::Unreadable => self.rest(PAUSE),
            Attempt::Accepted(_) | Attempt::Interrupted => {}
        }
    }

    /// A page was refused, perhaps for one of its PDUs: each goes alone, and one that is refused is given up once
    /// another of them is accepted. If none is, it is the destination that fails.
    async fn push_singly(
        &self,
        room: &RoomId,
        position: StickyPosition,
        pdus: &[(StickyPosition, Pdu)],
    ) -> Result<(), StoreError> {
        let mut reached = position;
        let mut refused = 0;
        for (at, pdu) in pdus {
            let body = Body::build(&self.sender.origin, clock::now().wall, std::slice::from_ref(&pdu.bytes));
            match self.sender.attempt(&self.name, &body, &self.nudge).await {
                Attempt::Accepted(_) => {
                    self.sender.metrics.sticky_backlog_sent.inc();
                    self.sender.metrics.sticky_backlog_abandoned.inc_by(refused);
                    refused = 0;
                    let next = StickyPosition(at.0 + 1);
                    self.moved(room, reached, next, 0).await?;
                    reached = next;
                }
                Attempt::Refused if refused == 0 => refused = 1,
                attempt => {
                    self.not_accepted(&attempt).await;
                    return Ok(());
                }
            }
        }
        if refused > 0 {
            if reached == position {
                self.sender.back_off(&self.name).await;
                return Ok(());
            }
            self.sender.metrics.sticky_backlog_abandoned.inc();
            let last = pdus.last().map_or(reached, |(at, _)| StickyPosition(at.0 + 1));
            self.moved(room, reached, last, 0).await?;
        }
        Ok(())
    }

    /// Cuts the page to what one transaction may hold. Returns whether nothing was cut.
    fn fit(&self, pdus: &mut Vec<(StickyPosition, Pdu)>) -> bool {
        let mut bytes = 0;
        let fits = pdus.iter().take_while(|(_, pdu)| {
            bytes += pdu.bytes.len() + 1;
            bytes <= self.sender.limits.bytes
        });
        let fits = fits.count().max(1);
        let all = fits >= pdus.len();
        pdus.truncate(fits);
        all
    }

    /// How far the answer takes the position, and how often the PDU there was left out by now.
    ///
    /// A joiner that has not finished its join answers 200 and leaves the PDUs out: those were not delivered.
    fn settle(
        &self,
        pdus: &[(StickyPosition, Pdu)],
        accepted: &Accepted,
        end: StickyPosition,
        unlisted: u32,
    ) -> (StickyPosition, u32) {
        for (index, (at, pdu)) in pdus.iter().enumerate() {
            if accepted.lists(&pdu.event_id) {
                continue;
            }
            let times = if index == 0 { unlisted + 1 } else { 1 };
            if times <= UNLISTED_LIMIT {
                return (*at, times);
            }
            warn!(destination = %self.name, event_id = %pdu.event_id, "left out of {times} answers; given up");
            self.sender.metrics.sticky_backlog_abandoned.inc();
        }
        (end, 0)
    }

    async fn moved(
        &self,
        room: &RoomId,
        from: StickyPosition,
        to: StickyPosition,
        left_out: u32,
    ) -> Result<(), StoreError> {
        let moved = from == to || self.sender.store.advance_backlog(&self.name, room, from, to).await?;
        let mut ledger = self.sender.ledger.lock();
        if moved {
            ledger.backlog_moved(&self.name, room, to, left_out, clock::now());
        } else {
            // Something recorded a lower position meanwhile: what was just sent may have to go again, behind that.
            ledger.backlog_recorded(&self.name, None, clock::now());
        }
        Ok(())
    }

    fn finished(&self, room: &RoomId) {
        if let Some(since) = self.sender.ledger.lock().backlog_finished(&self.name, room) {
            self.sender
                .metrics
                .join_to_last_sticky
                .observe(since.elapsed().as_secs_f64());
        }
    }
}
