//! What goes into a destination's next transaction: the oldest PDUs that may go now, as many as it may hold.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use tokio::time::Instant;

use super::{pace::Pace, sticky::backlog::Backlog};
use crate::core::{
    event::Pdu,
    id::{RoomId, StreamOrdering},
};

/// A room's live PDUs wait for the room's sticky backlog until that has not got further for this long.
pub const HOLD_PATIENCE: Duration = Duration::from_secs(10);

/// They wait this long at most.
pub const HOLD_LIMIT: Duration = Duration::from_mins(1);

/// PDUs in one transaction, by the specification.
pub const PDU_LIMIT: usize = 50;

/// A PDU of the log, shared by all its destinations.
#[derive(Debug)]
pub struct OwedPdu {
    /// Its place in the stream.
    pub ordering: StreamOrdering,
    /// What goes on the wire.
    pub pdu: Pdu,
    /// When it was entered.
    pub since: Instant,
}

/// What may be sent now.
#[derive(Debug)]
pub enum Choice {
    /// These, ascending; they are out of the queue.
    Send(Vec<Arc<OwedPdu>>),
    /// Nothing before this: all that is queued waits for sticky events of its rooms, or until the destination has worked on
    /// what it was sent before.
    HeldUntil(Instant),
    /// Nothing is queued.
    Nothing,
}

/// Takes at most `count` PDUs of about `bytes` together out of `pending`. One that is larger goes alone.
pub fn choose(
    pending: &mut VecDeque<Arc<OwedPdu>>,
    backlog: &Backlog,
    pace: &mut Pace,
    count: usize,
    bytes: usize,
    now: Instant,
) -> Choice {
    let mut held_until: Option<Instant> = None;
    let mut chosen: Vec<Arc<OwedPdu>> = Vec::new();
    // Of each room, how many may go, and until when the rest waits. Nearly always one or two rooms.
    let mut left: Vec<(RoomId, u32, Instant)> = Vec::new();
    let mut size = 0;
    let mut index = 0;
    while index < pending.len() && chosen.len() < count && size < bytes {
        let pdu = &pending[index];
        let room = &pdu.pdu.room_id;
        let mut hold = release(pdu, backlog).filter(|release| *release > now);
        if hold.is_none() {
            let known = left.iter().position(|(known, ..)| known == room).unwrap_or_else(|| {
                let number = pace.left(room, now);
                let until = if number == 0 { pace.ask(room, now) } else { now };
                left.push((room.clone(), number, until));
                left.len() - 1
            });
            let (_, number, until) = &mut left[known];
            if *number == 0 {
                hold = Some(*until);
            } else {
                *number -= 1;
            }
        }
        if let Some(until) = hold {
            held_until = Some(held_until.map_or(until, |held| held.min(until)));
            index += 1;
            continue;
        }
        size += pdu.pdu.bytes.len() + 1;
        if size > bytes && !chosen.is_empty() {
            break;
        }
        chosen.extend(pending.remove(index));
    }
    if !chosen.is_empty() {
        return Choice::Send(chosen);
    }
    held_until.map_or(Choice::Nothing, Choice::HeldUntil)
}

/// Until when a PDU waits for its room's backlog, if there is one.
fn release(pdu: &OwedPdu, backlog: &Backlog) -> Option<Instant> {
    let moved = backlog.moved(&pdu.pdu.room_id)?;
    let patience = moved.max(pdu.since) + HOLD_PATIENCE;
    Some(patience.min(pdu.since + HOLD_LIMIT))
}
