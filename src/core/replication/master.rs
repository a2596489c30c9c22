//! What does a master (the process that persists events and handles clients) do in replication?

use std::sync::Arc;

use tokio::sync::watch;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::core::{
    clock::Millis,
    id::{InstanceName, RoomId, ServerName, StickyPosition, StreamOrdering, Token},
    replication::{
        bus::Bus,
        command::Command,
        ephemeral::EphemeralTables,
        feed::{Bell, Table},
        gap::GapSource,
        http_gaps::HttpGaps,
        ids::Ids,
        memory_log::{self, BadQuestion, Updates},
        outbox::Outbox,
        positions::{Position, Positions},
        reader::Role,
        rows::{self, PresenceRow},
        stream::Stream,
        task::{self, Following, Part, Publisher, Subscription},
        writer::{MemoryStream, StreamWriter},
    },
};

/// Where the streams stand, for a master that starts now.
#[derive(Debug, Clone)]
pub struct MasterStart {
    /// Of the writers of `events`.
    pub events: Positions<StreamOrdering>,
    /// Of the writers of `sticky_events`.
    pub sticky_events: Positions<StickyPosition>,
    /// The greatest position of `caches`.
    pub caches: Token,
    /// Above every position of `presence` that any run of this master said before; the wall clock's time will do.
    pub presence: Token,
}

/// A master's part in replication.
#[derive(Debug)]
pub struct Master {
    /// What is heard, and what every process may say.
    pub subscription: Subscription,
    /// Writes.
    pub streams: Arc<MasterStreams>,
}

/// The streams a master writes, and what else only it says.
#[derive(Debug)]
pub struct MasterStreams {
    /// `events`.
    pub events: Arc<StreamWriter<StreamOrdering>>,
    /// `sticky_events`.
    pub sticky_events: Arc<StreamWriter<StickyPosition>>,
    typing: MemoryStream,
    presence: MemoryStream,
    ephemeral: EphemeralTables,
    bell: Bell,
    outbox: Arc<Outbox>,
}

impl MasterStreams {
    /// Publishes who types in a room now.
    pub fn typing(&self, room_id: &RoomId, users: &[String]) {
        self.typing.publish(room_id.as_str(), rows::typing(room_id, users));
        self.ephemeral.typing(room_id, users);
    }

    /// Publishes a user's presence.
    pub fn presence(&self, row: &PresenceRow) {
        self.presence.publish(&row.user_id, rows::presence(row));
        self.ephemeral.presence(row);
    }

    /// Presence and typing as tables that others may follow.
    #[must_use]
    pub fn tables(&self) -> [Arc<dyn Table>; 2] {
        self.ephemeral.all()
    }

    /// Rung when one of these tables changes, or what is persisted goes further.
    #[must_use]
    pub fn bell(&self) -> &Bell {
        &self.bell
    }

    /// Publishes that a persisted change of state brought a server into a room. Synapse 1.163.2 does not know the command:
    /// a worker beside it has no way to say it.
    pub fn new_server_joined(&self, server: &ServerName) {
        self.outbox.say(&Command::NewServerJoined(server.clone()));
    }

    /// Publishes what a [`SyncReports`](super::sync_reports::SyncReports) has to say.
    pub fn user_sync(&self, command: &Command) {
        self.outbox.say(command);
    }

    /// The answer to a reader that missed rows of a stream that is in no database: the stream's name in the path, and the
    /// two query parameters.
    ///
    /// # Errors
    /// A question that is not understood.
    pub fn missed(
        &self,
        stream: &str,
        from_token: Option<&str>,
        upto_token: Option<&str>,
    ) -> Result<Updates, BadQuestion> {
        let (typing, presence) = (self.typing.log.lock(), self.presence.log.lock());
        memory_log::answer(&[&typing, &presence], stream, from_token, upto_token)
    }
}

/// Starts to take part as the master `me`, until `shutdown` (which comes last: what was said before is still published).
pub fn start<B: Bus, G: GapSource>(
    bus: B,
    me: InstanceName,
    start: MasterStart,
    gaps: G,
    shutdown: &CancellationToken,
    tracker: &TaskTracker,
) -> Master {
    let (events, sticky_events) = (Ids::new(&me, start.events), Ids::new(&me, start.sticky_events));
    let written = vec![
        (Stream::Events, events.position().token()),
        (Stream::StickyEvents, sticky_events.position().token()),
        (Stream::Caches, start.caches),
        (Stream::Presence, start.presence),
        (Stream::Typing, Token(0)),
    ];
    let outbox = Arc::new(Outbox::new(me.clone(), written));
    let bell = Bell::default();
    let streams = Arc::new(MasterStreams {
        events: Arc::new(StreamWriter::new(events, outbox.clone())),
        sticky_events: Arc::new(StreamWriter::new(sticky_events, outbox.clone())),
        typing: MemoryStream::new(Stream::Typing, Token(0), outbox.clone()),
        presence: MemoryStream::new(Stream::Presence, start.presence, outbox.clone()),
        // Of a later run the first position is higher, as that of the stream is.
        ephemeral: EphemeralTables::new(Millis(start.presence.0), &bell),
        bell: bell.clone(),
        outbox: outbox.clone(),
    });
    let persisted = (streams.events.up_to(), streams.sticky_events.up_to());
    tracker.spawn(shutdown.clone().run_until_cancelled_owned(ring(bell, persisted)));
    let part = Part {
        me,
        role: Role::Master,
        caches: start.caches,
        following: Following::Written {
            events: streams.events.clone(),
            sticky_events: streams.sticky_events.clone(),
        },
        outbox: outbox.clone(),
        gaps,
        http: HttpGaps::nowhere(),
    };
    let heard = task::take_part(bus, part, shutdown, tracker);
    Master {
        subscription: Subscription {
            events_up_to: streams.events.up_to(),
            heard,
            publisher: Publisher::new(outbox),
        },
        streams,
    }
}

/// Rings whenever more is persisted.
async fn ring(
    bell: Bell,
    (mut events, mut sticky_events): (watch::Receiver<StreamOrdering>, watch::Receiver<StickyPosition>),
) {
    loop {
        let moved = tokio::select! {
            moved = events.changed() => moved,
            moved = sticky_events.changed() => moved,
        };
        if moved.is_err() {
            return;
        }
        bell.ring();
    }
}
