//! Which streams are followed or written, and what is peculiar to each?
//!
//! Facts: Synapse 1.163.2. A further stream is a further variant, and an answer in every function below.

/// A stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Stream {
    /// New events and changes of current state. Only its positions matter: the rows are read from the database.
    Events,
    /// New sticky events, numbered apart. As with `events`, only the positions matter.
    StickyEvents,
    /// Invalidated caches. The one stream that a worker writes too.
    Caches,
    /// The main process's in-memory queue for senders. It must be acknowledged.
    Federation,
    /// Who is online. Written only.
    Presence,
    /// Who is typing. Written only.
    Typing,
}

/// Where the rows of a gap come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gap {
    /// Nowhere: the position says it all.
    Nothing,
    /// The database.
    Database,
    /// The writer's replication listener.
    Http,
}

/// How a reader's own position in a stream behaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Memory {
    /// It only grows; what is at or below it is known already.
    Increasing,
    /// It is 0 for ever: the writer counts from 0 again whenever it starts, so every position may be lower than before.
    AlwaysZero,
}

/// A table that holds rows of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Table {
    /// Its name.
    pub name: &'static str,
    /// The column with the position.
    pub id: &'static str,
    /// The column with the writer; NULL in rows from before there were several.
    pub instance: &'static str,
}

impl Stream {
    /// Its name on the wire.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Events => "events",
            Self::StickyEvents => "sticky_events",
            Self::Caches => "caches",
            Self::Federation => "federation",
            Self::Presence => "presence",
            Self::Typing => "typing",
        }
    }

    /// The stream of that name, if it is followed.
    #[must_use]
    pub fn by_name(name: &str) -> Option<Self> {
        [Self::Events, Self::StickyEvents, Self::Caches, Self::Federation]
            .into_iter()
            .find(|stream| stream.name() == name)
    }

    /// Where the rows of a gap come from.
    #[must_use]
    pub fn gap(self) -> Gap {
        match self {
            Self::Events | Self::StickyEvents => Gap::Nothing,
            Self::Caches => Gap::Database,
            Self::Federation | Self::Presence | Self::Typing => Gap::Http,
        }
    }

    /// How our position in it behaves.
    #[must_use]
    pub fn memory(self) -> Memory {
        match self {
            Self::Events | Self::StickyEvents | Self::Caches | Self::Presence => Memory::Increasing,
            Self::Federation | Self::Typing => Memory::AlwaysZero,
        }
    }

    /// Whether what its rows hold is used.
    #[must_use]
    pub fn rows_wanted(self) -> bool {
        self.gap() != Gap::Nothing
    }

    /// Its `stream_positions.stream_name`, if its positions are stored.
    #[must_use]
    pub fn stored_as(self) -> Option<&'static str> {
        match self {
            Self::Events => Some("events"),
            Self::StickyEvents => Some("sticky_events"),
            Self::Presence => Some("presence_stream"),
            Self::Caches | Self::Federation | Self::Typing => None,
        }
    }

    /// The tables that hold its rows.
    #[must_use]
    pub fn tables(self) -> &'static [Table] {
        const fn table(name: &'static str, id: &'static str) -> Table {
            let instance = "instance_name";
            Table { name, id, instance }
        }
        match self {
            Self::Events => {
                const {
                    &[
                        table("events", "stream_ordering"),
                        table("current_state_delta_stream", "stream_id"),
                        table("ex_outlier_stream", "event_stream_ordering"),
                    ]
                }
            }
            Self::Caches => const { &[table("cache_invalidation_stream_by_instance", "stream_id")] },
            Self::StickyEvents => const { &[table("sticky_events", "stream_id")] },
            Self::Presence => const { &[table("presence_stream", "stream_id")] },
            Self::Federation | Self::Typing => &[],
        }
    }
}
