//! Carrying out a backlog step: reading rows, asking whether an event arrived, pushing a page.

use std::time::Duration;

use tracing::{info, warn};

use super::backlog::{Backlog, BacklogStep, UNLISTED_LIMIT};
use crate::{
    core::{
        clock,
        event::Pdu,
        id::{EventId, RoomId, StickyPosition},
        store::{BacklogItem, StoreError},
    },
    federation::{
        outcome::EventProbe,
        transaction::{Accepted, Body},
    },
    sender::{attempt::Attempt, catch_up::encode, timely, worker::Worker},
};

/// How long an answer to whether a joiner has an event is waited for.
const PROBE_TIMEOUT: Duration = Duration::from_secs(10);

/// A page as it goes out.
struct Page {
    pdus: Vec<(StickyPosition, Pdu)>,
    /// Once all of them are accepted, nothing is left below this.
    end: StickyPosition,
    /// There is something at or above `end`.
    more: bool,
}

/// How far an answer takes a room.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Reached {
    /// Past the page.
    End,
    /// Up to a PDU that was left out so often by now.
    LeftOut(StickyPosition, u32),
}

impl Worker {
    /// Carries out a step of the destination's sticky backlog.
    pub(in crate::sender) async fn work_on_backlog(&self, step: BacklogStep) -> Result<(), StoreError> {
        let sender = &self.sender;
        match step {
            BacklogStep::Load => {
                let rows = if sender.sticky {
                    timely(sender.store.backlog(&self.name, clock::now().wall)).await?
                } else {
                    vec![] // the table is left alone
                };
                self.note(|backlog| backlog.loaded(rows, clock::now().at));
                Ok(())
            }
            BacklogStep::Probe { room, event } => {
                if let Some(probe) = self.has_event(&event, PROBE_TIMEOUT).await {
                    // A joiner that is too busy to answer is not ready; what else it may say tells nothing.
                    let has = !matches!(probe, EventProbe::NotFound | EventProbe::NoAnswer(_));
                    self.note(|backlog| backlog.probed(&room, has, clock::now().at));
                }
                Ok(())
            }
            BacklogStep::Push {
                room,
                position,
                limit,
                unlisted,
            } => self.push(&room, position, limit, unlisted).await,
            BacklogStep::Wait(_) | BacklogStep::Nothing => Ok(()),
        }
    }

    fn note<R: Default>(&self, change: impl FnOnce(&mut Backlog) -> R) -> R {
        self.sender.ledger.lock().backlog(&self.name, change)
    }

    async fn push(
        &self,
        room: &RoomId,
        position: StickyPosition,
        limit: usize,
        unlisted: u32,
    ) -> Result<(), StoreError> {
        let store = &self.sender.store;
        // One more than is sent, to know whether that is all.
        let count = i64::try_from(limit + 1).unwrap_or(i64::MAX);
        let found = timely(store.backlog_items(&self.name, room, position, clock::now().wall, count)).await?;
        if !found.joined {
            info!(destination = %self.name, %room, "no longer in the room; its sticky backlog is dropped");
            timely(store.drop_backlog(&self.name, room, position)).await?;
            self.finished(room);
            return Ok(());
        }
        let Some(mut page) = self.page(found.items, limit).await? else {
            self.finished(room);
            return Ok(());
        };
        if page.pdus.is_empty() {
            return self.moved(room, position, &page, &Reached::End).await;
        }
        let bytes: Vec<_> = page.pdus.iter().map(|(_, pdu)| pdu.bytes.clone()).collect();
        let body = Body::build(&self.sender.origin, clock::now().wall, &bytes);
        let sent = self.sender.attempt(&self.name, &body, bytes.len(), &self.nudge);
        match sent.await {
            Attempt::Accepted(accepted) => {
                self.count_errors(&accepted);
                let reached = settle(&page.pdus, &accepted, unlisted);
                self.count(&page.pdus, &accepted, &reached);
                // Nobody must wait until it has what it will never have.
                page.pdus.retain(|(_, pdu)| accepted.took(&pdu.event_id));
                let took = page.pdus.iter().map(|(_, pdu)| pdu);
                self.sender
                    .ledger
                    .lock()
                    .accepted_besides(&self.name, took, clock::now());
                self.moved(room, position, &page, &reached).await
            }
            Attempt::Refused if page.pdus.len() > 1 => {
                let fewer = page.pdus.len() / 2;
                self.note(|backlog| backlog.fewer(room, position, unlisted, fewer, clock::now().at));
                Ok(())
            }
            Attempt::Refused => {
                if self.refuses_only_that().await {
                    self.sender.metrics.sticky_backlog_abandoned.inc();
                    page.pdus.clear();
                    return self.moved(room, position, &page, &Reached::End).await;
                }
                Ok(())
            }
            attempt => {
                self.not_accepted(&attempt).await;
                Ok(())
            }
        }
    }

    /// What of `items` goes out: at most `limit`, and as much as a body may hold. `None` if there are none.
    async fn page(&self, mut items: Vec<BacklogItem>, limit: usize) -> Result<Option<Page>, StoreError> {
        let mut more = items.len() > limit;
        items.truncate(limit);
        let Some(last) = items.last().map(|item| item.position) else {
            return Ok(None);
        };
        let ids: Vec<EventId> = items
            .iter()
            .filter(|item| item.sendable)
            .map(|item| item.event_id.clone())
            .collect();
        let events = timely(self.sender.store.events_by_id(&ids)).await?;
        let mut page = Page {
            pdus: vec![],
            end: StickyPosition(last.0 + 1),
            more,
        };
        let mut bytes = 0;
        for item in items.iter().filter(|item| item.sendable) {
            let event = events
                .iter()
                .find(|event| event.event_id == item.event_id && !event.redacted);
            let Some((_, pdu)) = event.and_then(encode) else {
                continue;
            };
            bytes += pdu.bytes.len() + 1;
            if bytes > self.sender.limits.bytes && !page.pdus.is_empty() {
                page.end = item.position;
                more = true;
                break;
            }
            page.pdus.push((item.position, pdu));
        }
        page.more = more;
        Ok(Some(page))
    }

    fn count(&self, pdus: &[(StickyPosition, Pdu)], accepted: &Accepted, reached: &Reached) {
        let end = match reached {
            Reached::End => StickyPosition(i64::MAX),
            Reached::LeftOut(at, _) => *at,
        };
        let metrics = &self.sender.metrics;
        for (_, pdu) in pdus.iter().filter(|(at, _)| *at < end) {
            if accepted.lists(&pdu.event_id) {
                metrics.sticky_backlog_sent.inc();
            } else {
                warn!(destination = %self.name, event_id = %pdu.event_id, "left out of every answer; given up");
                metrics.sticky_backlog_abandoned.inc();
            }
        }
    }

    async fn moved(
        &self,
        room: &RoomId,
        from: StickyPosition,
        page: &Page,
        reached: &Reached,
    ) -> Result<(), StoreError> {
        let to = match reached {
            Reached::End => page.end,
            Reached::LeftOut(at, _) => *at,
        };
        let moved = from == to || timely(self.sender.store.advance_backlog(&self.name, room, from, to)).await?;
        let now = clock::now().at;
        if !moved {
            // Something recorded a lower position meanwhile: what was just sent may have to go again, behind that.
            self.note(Backlog::look_again);
            return Ok(());
        }
        match reached {
            Reached::LeftOut(at, times) => self.note(|backlog| backlog.left_out(room, *at, *times, now)),
            Reached::End if page.more => {
                let sent = page.pdus.last().map(|(_, pdu)| pdu.event_id.clone());
                self.note(|backlog| backlog.advanced(room, to, sent, now));
            }
            Reached::End => self.finished(room),
        }
        Ok(())
    }

    /// Nothing is left of the room. The row goes with the next look at the table, unless something was added meanwhile.
    fn finished(&self, room: &RoomId) {
        let since = self.note(|backlog| {
            backlog.look_again();
            backlog.finished(room)
        });
        if let Some(since) = since {
            self.sender
                .metrics
                .join_to_last_sticky
                .observe(since.elapsed().as_secs_f64());
        }
    }
}

/// How far the answer takes the position.
///
/// A joiner that has not finished its join answers 200 and leaves the PDUs out: those were not delivered. PDUs that were
/// left out of the same answers are given up together.
pub(super) fn settle(pdus: &[(StickyPosition, Pdu)], accepted: &Accepted, unlisted: u32) -> Reached {
    let Some(first) = pdus.iter().position(|(_, pdu)| !accepted.lists(&pdu.event_id)) else {
        return Reached::End;
    };
    let times = if first == 0 { unlisted + 1 } else { 1 };
    if times > UNLISTED_LIMIT {
        return Reached::End;
    }
    Reached::LeftOut(pdus[first].0, times)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pdus(ids: &[&str]) -> Vec<(StickyPosition, Pdu)> {
        let pdu = |id: &&str| Pdu {
            event_id: (*id).into(),
            room_id: "!a".into(),
            origin_server_ts: 0,
            bytes: bytes::Bytes::new(),
        };
        (10..).map(StickyPosition).zip(ids.iter().map(pdu)).collect()
    }

    fn answer(ids: &[&str]) -> Accepted {
        let results = ids.iter().map(|id| (EventId::from(*id), None)).collect();
        Accepted { results: Some(results) }
    }

    #[test]
    fn what_an_answer_leaves_out_is_not_delivered() {
        let page = pdus(&["$a", "$b", "$c"]);
        assert_eq!(settle(&page, &answer(&["$a", "$b", "$c"]), 0), Reached::End);
        let second = Reached::LeftOut(StickyPosition(11), 1);
        assert_eq!(settle(&page, &answer(&["$a", "$c"]), 3), second);
        let first = Reached::LeftOut(StickyPosition(10), 4);
        assert_eq!(settle(&page, &answer(&["$c"]), 3), first);
        assert_eq!(settle(&page, &Accepted::default(), UNLISTED_LIMIT), Reached::End);
    }
}
