//! The database, on either of two engines: Synapse's in PostgreSQL, or an embedded one.
//!
//! `interface.rs` lists what can be asked of it; the rows that are the same whoever answers are here. No `sqlx` type leaves
//! this folder.

mod adoption;
mod chain;
mod error;
mod event_row;
mod interface;
mod postgres;
mod sql;
mod sqlite;

pub use self::{
    error::StoreError,
    interface::{InstanceLock, Store},
    sqlite::{
        APPLICATION_ID, CURRENT_STATE_DELTAS, EVENTS, FollowedTable, HeldEvent, Known, Outcome, PersistEvent,
        Persisted, RemoteKey, STICKY_EVENTS, Sqlite, StateChange,
    },
};
use std::collections::{BTreeSet, HashSet};

use crate::core::{
    clock::Millis,
    id::{EventId, InstanceName, RoomId, ServerName, StateGroup, StickyPosition, StreamOrdering, Token, domain_of},
};

/// A join that we received within this time, in ms, may still be under way at the joiner.
const RECENT_JOIN: i64 = 60_000;

/// An event as stored, with what decides whether and where it is sent.
#[derive(Debug, Clone)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is a flag that the database keeps by itself"
)]
pub struct StoredEvent {
    /// `events.stream_ordering`.
    pub stream_ordering: StreamOrdering,
    /// Its id.
    pub event_id: EventId,
    /// Its room.
    pub room_id: RoomId,
    /// `type`.
    pub kind: String,
    /// `state_key`, for a state event.
    pub state_key: Option<String>,
    /// Its sender's user id.
    pub sender: String,
    /// `rooms.room_version`.
    pub room_version: Option<String>,
    /// `event_json.format_version`; absent = 1.
    pub format_version: Option<i32>,
    /// `event_json.json`.
    pub json: String,
    /// The state group after the event; absent for an outlier.
    pub state_group: Option<StateGroup>,
    /// The event's state is not complete yet (`partial_state_events`).
    pub partial_state: bool,
    /// `internal_metadata.send_on_behalf_of`.
    pub send_on_behalf_of: Option<ServerName>,
    /// `internal_metadata.out_of_band_membership`.
    pub out_of_band: bool,
    /// `internal_metadata.proactively_send`; true if absent.
    pub proactively_send: bool,
    /// `internal_metadata.soft_failed`.
    pub soft_failed: bool,
    /// A valid redaction of it is known.
    pub redacted: bool,
    /// `events.received_ts`.
    pub received: Option<Millis>,
}

/// An event's JSON alone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EventJson {
    /// Its id.
    pub event_id: EventId,
    /// `event_json.json`.
    pub json: String,
    /// It was not allowed (`rejections`).
    pub rejected: bool,
}

/// A page of the events stream.
#[derive(Debug, Clone)]
pub struct EventPage {
    /// Events of ours, or sent on a server's behalf; not rejected; ascending.
    pub events: Vec<StoredEvent>,
    /// Everything up to here has been read.
    pub read_up_to: StreamOrdering,
}

/// A destination's back-off as `destinations` keeps it. All zero or absent = healthy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RetryTimings {
    /// When it was last tried.
    pub last_tried: Millis,
    /// Not again before `last_tried` plus this, ms.
    pub interval: i64,
    /// When it began to fail.
    pub failing_since: Option<Millis>,
}

impl RetryTimings {
    /// When it may be tried again; `None` if it may be now.
    ///
    /// A last try in the future was written by a clock that was wrong, and would hold for as long as that was.
    #[must_use]
    pub fn due(&self, now: Millis) -> Option<Millis> {
        const CLOCKS_DIFFER: i64 = 60_000;
        let due = self.last_tried.plus(self.interval);
        let tried = self.last_tried.0 != 0 && self.last_tried <= now.plus(CLOCKS_DIFFER);
        (tried && due > now).then_some(due)
    }
}

/// What the database knows of a destination.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DestinationRecord {
    /// `last_successful_stream_ordering`.
    pub last_successful: Option<StreamOrdering>,
    /// Its back-off.
    pub retry: RetryTimings,
    /// The lowest of its `destination_rooms.stream_ordering` above `last_successful` (of all, if that is absent): it is
    /// owed something.
    pub owed_from: Option<StreamOrdering>,
    /// The highest of them.
    pub owed_up_to: Option<StreamOrdering>,
    /// It has rows in the sticky backlog.
    pub has_backlog: bool,
}

/// One room of a destination in catch-up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OwedRoom {
    /// The room.
    pub room_id: RoomId,
    /// `destination_rooms.stream_ordering`.
    pub stream_ordering: StreamOrdering,
    /// The event there; absent if it was purged.
    pub event_id: Option<EventId>,
}

/// What the ledger has the database remember, in one transaction.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Checkpoint {
    /// The event cursor.
    pub cursor: StreamOrdering,
    /// The cursor into current-state deltas.
    pub delta_cursor: Option<StreamOrdering>,
    /// `last_successful_stream_ordering` of destinations where it changed. Written as given.
    pub last_successful: Vec<(ServerName, StreamOrdering)>,
    /// `destination_rooms` rows; the greater of old and new stays.
    pub owed: Vec<(ServerName, RoomId, StreamOrdering)>,
}

/// Where an instance resumes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EventCursor {
    /// All events up to here are accepted or on record.
    pub position: StreamOrdering,
    /// Burdock wrote this position and every `last_successful` of our destinations since, so what lies at or below a
    /// destination's `last_successful` was accepted by it.
    pub ours: bool,
    /// Where to resume in current-state deltas; absent on the very first start.
    pub deltas: Option<StreamOrdering>,
}

/// A row of the sticky backlog.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BacklogRow {
    /// The room.
    pub room_id: RoomId,
    /// Our sticky events of the room at or above this may be unsent.
    pub position: StickyPosition,
    /// The newest join event of one of the destination's users in the room, if we received it lately: the destination
    /// may still be busy joining.
    pub recent_join: Option<EventId>,
}

/// One of our sticky events in a room's backlog.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BacklogItem {
    /// Its position in the sticky stream.
    pub position: StickyPosition,
    /// The event.
    pub event_id: EventId,
    /// It may be sent: it is there, neither rejected, redacted nor soft-failed, and its sender is not erased. If not,
    /// pass over it.
    pub sendable: bool,
}

/// What a room's backlog holds for a destination.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BacklogPage {
    /// Ascending. Alive and ours. The position after the last one stands for "nothing below here is left".
    pub items: Vec<BacklogItem>,
    /// The destination has a joined user in the room.
    pub joined: bool,
}

/// A server that a state change brought into a room.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct NewServer {
    /// The server.
    pub server: ServerName,
    /// The room.
    pub room_id: RoomId,
}

/// A row of the `caches` stream that we wrote and must now publish.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheRow {
    /// Its position.
    pub token: Token,
    /// The destination whose timings changed.
    pub destination: ServerName,
    /// When, as written.
    pub at: Millis,
    /// Who wrote it: our name.
    pub writer: InstanceName,
}

/// How the number of joined users of each server in a group differs from a base.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostChanges {
    /// The group it is compared with: one of those asked about; absent = compared with an empty room.
    pub base: Option<StateGroup>,
    /// Servers whose number of joined users differs, and by how much. No server twice, no zeros.
    pub changes: Vec<(ServerName, i64)>,
}

/// A user joined a room or ceased to be joined, in the room's current state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemberDelta {
    /// `stream_id`: rows with the same one in a room were committed as one change.
    pub position: StreamOrdering,
    /// The room.
    pub room_id: RoomId,
    /// The member.
    pub user: String,
    /// They are joined after it, and were not before; or the other way round.
    pub joined: bool,
}

/// What is needed to tell which servers a stretch of changes brought into rooms.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeltaScan {
    /// The stretch's changes in rooms with a living sticky event of ours, ascending. For the rooms that somebody joined also
    /// the changes *after* the stretch, to the newest there is: what current state was before is known from them.
    pub deltas: Vec<MemberDelta>,
    /// Servers that had a joined user in the room at every instant: one who is joined now and in none of `deltas`.
    pub steady: HashSet<(RoomId, ServerName)>,
}

impl DeltaScan {
    /// Rooms that users joined, with those users' servers.
    pub(in crate::core::store) fn newcomers(&self) -> BTreeSet<(RoomId, ServerName)> {
        self.deltas
            .iter()
            .filter(|delta| delta.joined)
            .filter_map(|delta| Some((delta.room_id.clone(), ServerName::from(domain_of(&delta.user)?))))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_back_off_lasts_from_the_last_try_unless_that_is_yet_to_come() {
        let timings = RetryTimings {
            last_tried: Millis(1_000_000),
            interval: 600_000,
            failing_since: None,
        };
        assert_eq!(timings.due(Millis(1_000_000)), Some(Millis(1_600_000)));
        assert_eq!(timings.due(Millis(1_600_000)), None);
        assert_eq!(timings.due(Millis(950_000)), Some(Millis(1_600_000)));
        assert_eq!(timings.due(Millis(900_000)), None);
        assert_eq!(RetryTimings::default().due(Millis(0)), None);
    }
}
