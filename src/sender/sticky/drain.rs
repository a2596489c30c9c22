//! Carrying out a backlog step: reading rows, asking a joiner, pushing a page.

use tracing::{debug, info, warn};

use super::backlog::{BacklogStep, UNLISTED_LIMIT};
use crate::{
    core::{
        clock,
        event::Pdu,
        id::{EventId, RoomId, StickyPosition},
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
                let settled = settle(&pdus, &accepted, position, end, unlisted);
                let sent = pdus.iter().filter(|(at, _)| *at < settled.to).count();
                self.sender.metrics.sticky_backlog_sent.inc_by(sent as u64);
                self.give_up(&settled.given_up);
                self.moved(room, position, settled.to, settled.left_out).await
            }
            Attempt::Refused => self.push_singly(room, position, &pdus, unlisted).await,
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
        unlisted: u32,
    ) -> Result<(), StoreError> {
        let mut reached = position;
        let mut refused = 0;
        for alone in pdus {
            let (at, pdu) = alone;
            let body = Body::build(&self.sender.origin, clock::now().wall, std::slice::from_ref(&pdu.bytes));
            match self.sender.attempt(&self.name, &body, &self.nudge).await {
                Attempt::Accepted(accepted) => {
                    self.sender.metrics.sticky_backlog_abandoned.inc_by(refused);
                    refused = 0;
                    let next = StickyPosition(at.0 + 1);
                    let settled = settle(std::slice::from_ref(alone), &accepted, position, next, unlisted);
                    self.give_up(&settled.given_up);
                    self.moved(room, reached, settled.to, settled.left_out).await?;
                    if settled.left_out > 0 {
                        return Ok(());
                    }
                    self.sender.metrics.sticky_backlog_sent.inc();
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

    fn give_up(&self, given_up: &[&EventId]) {
        for event_id in given_up {
            warn!(destination = %self.name, %event_id, "left out of answers too often; given up");
        }
        self.sender
            .metrics
            .sticky_backlog_abandoned
            .inc_by(given_up.len() as u64);
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

/// What an answer means for a room's backlog.
#[derive(Debug, PartialEq, Eq)]
struct Settled<'a> {
    /// How far it takes the position.
    to: StickyPosition,
    /// How often the PDU there was left out by now; 0 if none was.
    left_out: u32,
    /// Left out too often.
    given_up: Vec<&'a EventId>,
}

/// Settles what was sent from `position` on, where the first PDU was left out of `unlisted` answers before.
///
/// A joiner that has not finished its join answers 200 and leaves the PDUs out: those were not delivered.
fn settle<'a>(
    pdus: &'a [(StickyPosition, Pdu)],
    accepted: &Accepted,
    position: StickyPosition,
    end: StickyPosition,
    unlisted: u32,
) -> Settled<'a> {
    let mut given_up = vec![];
    for (at, pdu) in pdus.iter().filter(|(_, pdu)| !accepted.lists(&pdu.event_id)) {
        // Not the one that was left out before, if that has expired or was redacted since.
        let left_out = if *at == position { unlisted + 1 } else { 1 };
        if left_out <= UNLISTED_LIMIT {
            return Settled {
                to: *at,
                left_out,
                given_up,
            };
        }
        given_up.push(&pdu.event_id);
    }
    Settled {
        to: end,
        left_out: 0,
        given_up,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pdus(positions: &[i64]) -> Vec<(StickyPosition, Pdu)> {
        let pdu = |position: &i64| Pdu {
            event_id: format!("${position}").into(),
            room_id: "!a".into(),
            origin_server_ts: 0,
            bytes: vec![].into(),
        };
        positions.iter().map(|at| (StickyPosition(*at), pdu(at))).collect()
    }

    /// Where the position goes, how often what is there was left out, and how many were given up.
    fn settled(sent: &[i64], listed: &[i64], position: i64, unlisted: u32) -> (i64, u32, usize) {
        let results = listed.iter().map(|at| (EventId::from(format!("${at}")), None));
        let accepted = Accepted {
            results: Some(results.collect()),
        };
        let pdus = pdus(sent);
        let settled = settle(
            &pdus,
            &accepted,
            StickyPosition(position),
            StickyPosition(100),
            unlisted,
        );
        (settled.to.0, settled.left_out, settled.given_up.len())
    }

    #[test]
    fn the_position_stops_at_what_was_left_out_until_that_is_given_up() {
        assert_eq!(settled(&[5, 6, 7], &[5, 6, 7], 5, 0), (100, 0, 0));
        assert_eq!(settled(&[5, 6, 7], &[5, 7], 5, 0), (6, 1, 0));
        assert_eq!(settled(&[6, 7], &[7], 6, UNLISTED_LIMIT - 1), (6, UNLISTED_LIMIT, 0));
        assert_eq!(settled(&[6, 7], &[7], 6, UNLISTED_LIMIT), (100, 0, 1));
        assert_eq!(settled(&[6, 7], &[], 6, UNLISTED_LIMIT), (7, 1, 1));
    }

    #[test]
    fn one_is_not_given_up_for_another_that_was_left_out_and_has_expired() {
        assert_eq!(settled(&[7], &[], 6, UNLISTED_LIMIT), (7, 1, 0));
    }
}
