//! What the rest asks of the database, whichever engine it is.
//!
//! Everything is listed here, with its meaning; how an engine answers is in the folder of its name.

use std::collections::{HashMap, HashSet};

use futures_util::future::Either;

use super::{
    BacklogPage, BacklogRow, CacheRow, Checkpoint, DeltaScan, DestinationRecord, EventCursor, EventJson, EventPage,
    HostChanges, NewServer, OwedRoom, RetryTimings, StoreError, StoredEvent,
    postgres::{AdvisoryLock, Postgres},
    sqlite::{FileLock, Sqlite},
};
use crate::{
    config,
    core::{
        clock::Millis,
        id::{EventId, InstanceName, RoomId, ServerName, StateGroup, StickyPosition, StreamOrdering, Token},
        replication::{gap::CacheInvalidation, stream::Table},
        state::map::{NewStateGroup, StateFilter, StateMap},
    },
};

/// The database of one homeserver, as one process sees it. A clone shares the connections.
#[derive(Clone, Debug)]
pub enum Store {
    /// Synapse's.
    Postgres(Postgres),
    /// An embedded homeserver's.
    Sqlite(Sqlite),
}

/// The lock that says: this process is the instance. Dropping it releases the lock.
pub enum InstanceLock {
    /// A lock of the database server's.
    Postgres(Box<AdvisoryLock>),
    /// A locked file.
    Sqlite(FileLock),
}

impl Store {
    /// Opens the database. Of PostgreSQL one connection less than configured is used for statements:
    /// [`Store::lock_instance`] takes the other.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`] if it cannot be reached, [`StoreError::Incompatible`] for an unknown `sslmode`, or a file
    /// that no embedded homeserver made.
    pub async fn connect(db: &config::Database, me: InstanceName, server_name: ServerName) -> Result<Self, StoreError> {
        Ok(match db {
            config::Database::Postgres(db) => Self::Postgres(Postgres::connect(db, me, server_name).await?),
            config::Database::Sqlite(path) => Self::Sqlite(Sqlite::open(path, me, server_name).await?),
        })
    }

    /// Checks that this is a database we can work with; Synapse's by its own rules for the start of a worker.
    ///
    /// # Errors
    /// [`StoreError::Incompatible`] says what is wrong and what to do.
    pub async fn check(&self) -> Result<(), StoreError> {
        match self {
            Self::Postgres(engine) => engine.check().await,
            Self::Sqlite(engine) => engine.check().await,
        }
    }

    /// Takes the lock of our instance name.
    ///
    /// # Errors
    /// [`StoreError::AlreadyRunning`] if another process has it.
    pub async fn lock_instance(&self) -> Result<InstanceLock, StoreError> {
        Ok(match self {
            Self::Postgres(engine) => InstanceLock::Postgres(Box::new(engine.lock_instance().await?)),
            Self::Sqlite(engine) => InstanceLock::Sqlite(engine.lock_instance()?),
        })
    }

    /// Closes all connections, after the statements that run have ended.
    pub async fn close(&self) {
        match self {
            Self::Postgres(engine) => engine.close().await,
            Self::Sqlite(engine) => engine.close().await,
        }
    }

    /// The homeserver whose database this is.
    #[must_use]
    pub fn server_name(&self) -> &ServerName {
        match self {
            Self::Postgres(engine) => engine.server_name(),
            Self::Sqlite(engine) => engine.server_name(),
        }
    }
}

impl InstanceLock {
    /// Watches over the lock until another process has it. Returns then, with [`StoreError::AlreadyRunning`]; the caller
    /// must stop at once.
    pub async fn watch(self) -> StoreError {
        match self {
            Self::Postgres(lock) => lock.watch().await,
            Self::Sqlite(lock) => lock.watch().await,
        }
    }
}

/// Defines each method on [`Store`] as a call of the engine's method of that name: an engine that lacks one does not
/// compile.
macro_rules! each_engine {
    ($($(#[$doc:meta])* fn $name:ident(&self $(, $argument:ident: $kind:ty)* $(,)?) -> $answer:ty;)*) => {
        impl Store {
            $(
                $(#[$doc])*
                // The engine's future itself: an `async fn` around it would hold it twice.
                pub fn $name(&self $(, $argument: $kind)*) -> impl Future<Output = $answer> + Send {
                    match self {
                        Self::Postgres(engine) => Either::Left(engine.$name($($argument),*)),
                        Self::Sqlite(engine) => Either::Right(engine.$name($($argument),*)),
                    }
                }
            )*
        }
    };
}

each_engine! {
    /// Checks the schema's version alone. Ask again whenever the homeserver may have been upgraded under us.
    ///
    /// # Errors
    /// [`StoreError::Incompatible`] says what is wrong and what to do.
    fn check_versions(&self) -> Result<(), StoreError>;

    /// Makes or updates what is ours: the schema `burdock` (nothing of ours is put into Synapse's), or the embedded
    /// homeserver's tables.
    ///
    /// # Errors
    /// [`StoreError::Incompatible`] if we lack the right (its text holds the SQL to run as an administrator) or if the
    /// schema was made by a newer Burdock.
    fn migrate(&self) -> Result<(), StoreError>;

    /// Returns where we resume. If the instances in the table are not the configured ones, or were configured in another
    /// order when they last started (so that destinations belonged to others), all configured ones get
    /// their rows first, at the lowest position of any, so that none of them can skip what the others did before it
    /// started.
    ///
    /// # Errors
    /// [`StoreError::Damaged`] if the table lacks positions to start from, [`StoreError::TakenOver`] if `configured`
    /// lacks our own name.
    fn adopt_positions(&self, configured: &[InstanceName]) -> Result<EventCursor, StoreError>;

    /// The position each writer of a stream last stored (`stream_positions`), with writers that are no longer
    /// configured among them. It may lag behind the tables.
    ///
    /// # Errors
    /// Those of the database.
    fn stored_positions(&self, stream_name: &str) -> Result<Vec<(InstanceName, Token)>, StoreError>;

    /// The greatest position in any of `tables`; `None` if all are empty.
    ///
    /// # Errors
    /// Those of the database.
    fn greatest_position(&self, tables: &[Table]) -> Result<Option<Token>, StoreError>;

    /// The first `limit` distinct positions in any of `tables` from `from` on, ascending, each with its writer (`None`
    /// in rows from before there were several).
    ///
    /// # Errors
    /// Those of the database.
    fn positions_from(
        &self,
        tables: &[Table],
        from: Token,
        limit: i64,
    ) -> Result<Vec<(Option<InstanceName>, Token)>, StoreError>;

    /// The `caches` rows of `writer` above `from`, up to and including `to`, ascending, at most `limit`.
    ///
    /// # Errors
    /// Those of the database.
    fn cache_rows(
        &self,
        writer: &InstanceName,
        from: Token,
        to: Token,
        limit: i64,
    ) -> Result<Vec<CacheInvalidation>, StoreError>;

    /// Events `after` < stream ordering <= `up_to` that are ours or were sent on a server's behalf, ascending, at most
    /// `limit`; outliers and rejected ones left out. `redacted` is not looked up here: the live path sends an event as
    /// it was made.
    ///
    /// If fewer than `limit` were found, everything up to `up_to` has been read.
    ///
    /// # Errors
    /// If the database does not answer.
    fn own_events(&self, after: StreamOrdering, up_to: StreamOrdering, limit: i64) -> Result<EventPage, StoreError>;

    /// The events of those ids in that order; unknown and rejected ones left out. `redacted` says whether a valid
    /// redaction is known; a create event never is.
    ///
    /// # Errors
    /// If the database does not answer.
    fn events_by_id(&self, ids: &[EventId]) -> Result<Vec<StoredEvent>, StoreError>;

    /// The room's forward extremities, deepest first, at most `limit`: id, stream ordering, depth.
    ///
    /// # Errors
    /// If the database does not answer.
    fn forward_extremities(
        &self,
        room_id: &RoomId,
        limit: i64,
    ) -> Result<Vec<(EventId, StreamOrdering, i64)>, StoreError>;

    /// Whether our join of the room is still being completed (a "fast join").
    ///
    /// # Errors
    /// If the database does not answer.
    fn room_is_partial(&self, room_id: &RoomId) -> Result<bool, StoreError>;

    /// Those of the users who asked that what they sent be erased.
    ///
    /// # Errors
    /// If the database does not answer.
    fn erased(&self, senders: &[&str]) -> Result<HashSet<String>, StoreError>;

    /// The state group after the event, and whether it is still incomplete; `None` for an outlier or unknown event.
    ///
    /// # Errors
    /// If the database does not answer.
    fn event_state(&self, event_id: &EventId) -> Result<Option<(StateGroup, bool)>, StoreError>;

    /// The joined users per server in `group`, as the difference to the nearest of `known` that it descends from (the
    /// same room's), or in full if it descends from none.
    ///
    /// # Errors
    /// `Damaged` if the group is not stored, or its chain is broken; or if the database does not answer.
    fn host_changes(&self, group: StateGroup, known: &[StateGroup]) -> Result<HostChanges, StoreError>;

    /// The JSON of the state event under that type and key in the group.
    ///
    /// # Errors
    /// `Damaged` if the group is not stored, its chain is broken, or the event is missing; or if the database does not
    /// answer.
    fn state_event(&self, group: StateGroup, kind: &str, state_key: &str) -> Result<Option<String>, StoreError>;

    /// Stores state groups, in one transaction, and says their ids, which ascend. A group is stored as what it changes, or
    /// in full if it removes a key or a chain of changes would become longer than
    /// [`MAX_HOPS`](crate::core::state::map::MAX_HOPS). Any process may do this, and several at once.
    ///
    /// # Errors
    /// `Damaged` if a previous group is not stored or of another room; `Incompatible` if new ids are not above those there
    /// are; or if the database does not answer.
    fn store_state_groups(&self, groups: &[NewStateGroup]) -> Result<Vec<StateGroup>, StoreError>;

    /// Lets the ids of state groups start above those that are there already, as is needed once in a database that was
    /// filled by copying. Where Synapse ever ran it does this itself, and nothing is done here.
    ///
    /// # Errors
    /// Those of the database.
    fn begin_state_group_ids(&self) -> Result<(), StoreError>;

    /// What stands in the group, as far as it is asked for.
    ///
    /// # Errors
    /// `Damaged` if the group is not stored, or its chain is broken; or if the database does not answer.
    fn group_state(&self, group: StateGroup, filter: &StateFilter) -> Result<StateMap, StoreError>;

    /// The state groups after these events; outliers and unknown events are left out.
    ///
    /// # Errors
    /// Those of the database.
    fn groups_after(&self, events: &[EventId]) -> Result<HashMap<EventId, StateGroup>, StoreError>;

    /// The JSON of those of these events that are stored, outliers and rejected ones included.
    ///
    /// # Errors
    /// Those of the database.
    fn events_json(&self, events: &[EventId]) -> Result<Vec<EventJson>, StoreError>;

    /// Whether a user of that server has one of these memberships in the group.
    ///
    /// # Errors
    /// `Damaged` if the group is not stored, or its chain is broken; or if the database does not answer.
    fn server_has_member(
        &self,
        group: StateGroup,
        server: &ServerName,
        memberships: &[&str],
    ) -> Result<bool, StoreError>;

    /// The membership events among these: id, the user it is about, membership.
    ///
    /// # Errors
    /// If the database does not answer.
    fn memberships(&self, ids: &[&EventId]) -> Result<Vec<(EventId, String, String)>, StoreError>;

    /// The servers with a joined user in the room's current state, ours included, in name order.
    ///
    /// # Errors
    /// If the database does not answer.
    fn joined_hosts_now(&self, room_id: &RoomId) -> Result<Vec<ServerName>, StoreError>;

    /// The servers that a room's incomplete join was told of; empty once the join is complete.
    ///
    /// # Errors
    /// If the database does not answer.
    fn partial_room_servers(&self, room_id: &RoomId) -> Result<Vec<ServerName>, StoreError>;

    /// Reads the membership changes after `after` of rooms that hold a sticky event of ours alive at `now`. All of it is
    /// one look at the database, so that changes and current state fit together. Without such a room, or if no user
    /// joined up to `up_to`, nothing more is read.
    ///
    /// # Errors
    /// If the database does not answer.
    fn member_deltas(&self, after: StreamOrdering, up_to: StreamOrdering, now: Millis) -> Result<DeltaScan, StoreError>;

    /// Where the very first scan of deltas starts: just below the oldest sticky event of ours that is alive at `now`, as
    /// no server that joined before it can miss one; `persisted` (the greatest persisted position) if there is none.
    ///
    /// # Errors
    /// If the database does not answer.
    fn first_delta_cursor(&self, now: Millis, persisted: StreamOrdering) -> Result<StreamOrdering, StoreError>;

    /// Writes all of `checkpoint`, or nothing. The number of statements does not depend on its size (up to 10,000 rows
    /// a statement). What is owed in a room that has been purged is left out.
    ///
    /// # Errors
    /// [`StoreError::TakenOver`] if our position's row is gone; nothing is written then.
    fn checkpoint(&self, checkpoint: &Checkpoint) -> Result<(), StoreError>;

    /// What is known of each of `names`; the default record of those without a row.
    ///
    /// # Errors
    /// Those of the database.
    fn destinations(&self, names: &[ServerName]) -> Result<HashMap<ServerName, DestinationRecord>, StoreError>;

    /// The destinations whose `last_successful` is above `position`.
    ///
    /// # Errors
    /// Those of the database.
    fn successful_beyond(&self, position: StreamOrdering) -> Result<Vec<ServerName>, StoreError>;

    /// Stores a destination's back-off, unless what is stored has been set further by another process meanwhile
    /// (Synapse's rule, which its processes follow too). The row that tells the other processes' caches commits with
    /// it and is returned, to be published. The default timings reset the back-off and are always stored.
    ///
    /// # Errors
    /// Those of the database.
    fn set_retry(
        &self,
        destination: &ServerName,
        timings: RetryTimings,
        now: Millis,
    ) -> Result<Option<CacheRow>, StoreError>;

    /// Up to `limit` destinations that are owed PDUs, or (if `sticky`) have sticky backlog, and are not in back-off, in
    /// the order of their names, from the one that follows `after`. Those of other instances are among them.
    ///
    /// # Errors
    /// Those of the database.
    fn due_destinations(
        &self,
        after: Option<&ServerName>,
        now: Millis,
        limit: i64,
        sticky: bool,
    ) -> Result<Vec<ServerName>, StoreError>;

    /// The rooms in which `destination` is owed something above `after`, in the order of what is owed.
    ///
    /// # Errors
    /// Those of the database.
    fn owed_rooms(
        &self,
        destination: &ServerName,
        after: StreamOrdering,
        limit: i64,
    ) -> Result<Vec<OwedRoom>, StoreError>;

    /// Records that `destination` caught up from `old` to `new`, its `last_successful` from now on.
    ///
    /// Catch-up sends only the newest of each room. With `mark_sticky`, our sticky events that it passed over (above
    /// `old`, up to and including `new`, of rooms that were owed, and not among `sent`) go into the backlog in the
    /// same transaction. Returns whether there were any.
    ///
    /// # Errors
    /// Those of the database.
    fn finish_catch_up_step(
        &self,
        destination: &ServerName,
        old: StreamOrdering,
        new: StreamOrdering,
        sent: &[StreamOrdering],
        mark_sticky: bool,
    ) -> Result<bool, StoreError>;

    /// The rooms in which `destination` has backlog with something alive in it. Rows with nothing left are deleted.
    ///
    /// # Errors
    /// Those of the database.
    fn backlog(&self, destination: &ServerName, now: Millis) -> Result<Vec<BacklogRow>, StoreError>;

    /// Our living sticky events of `room` at `position` and above, up to `limit`, and whether `destination` is (still)
    /// in the room.
    ///
    /// # Errors
    /// Those of the database.
    fn backlog_items(
        &self,
        destination: &ServerName,
        room: &RoomId,
        position: StickyPosition,
        now: Millis,
        limit: i64,
    ) -> Result<BacklogPage, StoreError>;

    /// Whether `server` has a joined user in `room`, or had one when we made a partial-state join that is not yet
    /// complete.
    ///
    /// # Errors
    /// Those of the database.
    fn server_in_room(&self, server: &ServerName, room: &RoomId) -> Result<bool, StoreError>;

    /// Moves a row of the backlog from exactly `from` to `to`: all in between was accepted or left out. Returns false,
    /// and moves nothing, if the row is elsewhere by now (a lower position was recorded meanwhile) or gone.
    ///
    /// # Errors
    /// Those of the database.
    fn advance_backlog(
        &self,
        destination: &ServerName,
        room: &RoomId,
        from: StickyPosition,
        to: StickyPosition,
    ) -> Result<bool, StoreError>;

    /// Deletes the row of a destination that is no longer in the room. Returns false, and deletes nothing, if the row
    /// is not at `position`, or if the destination is (again) in the room.
    ///
    /// # Errors
    /// Those of the database.
    fn drop_backlog(
        &self,
        destination: &ServerName,
        room: &RoomId,
        position: StickyPosition,
    ) -> Result<bool, StoreError>;

    /// Records that all our living sticky events of these rooms are to be sent to these servers, and that the deltas of
    /// current state have been read up to `delta_cursor`, in one transaction. Returns the rows that have something to
    /// send, sorted.
    ///
    /// # Errors
    /// Those of the database.
    fn record_new_servers(
        &self,
        rows: &[NewServer],
        delta_cursor: StreamOrdering,
        now: Millis,
    ) -> Result<Vec<NewServer>, StoreError>;

    /// Records sticky events of ours whose destinations, taken from the state before them, lack a server that is
    /// joined by now. Rooms that have been purged are left out.
    ///
    /// # Errors
    /// Those of the database.
    fn record_missed(&self, rows: &[(ServerName, RoomId, StickyPosition)]) -> Result<(), StoreError>;

    /// Which of these events are sticky events of ours, and where. Expired ones are among them until the homeserver
    /// removes them.
    ///
    /// # Errors
    /// Those of the database.
    fn sticky_positions(&self, event_ids: &[EventId]) -> Result<HashMap<EventId, StickyPosition>, StoreError>;
}
