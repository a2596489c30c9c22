//! What of the homeserver can be followed over the replication API: the tables of its database, presence and typing.

use std::sync::Arc;

use futures_util::{FutureExt as _, future::BoxFuture};
use tokio::sync::watch;

use crate::core::{
    id::Token,
    replication::{
        feed::{Row, Table, TableError},
        master::MasterStreams,
        positions::Position,
    },
    store::{CURRENT_STATE_DELTAS, EVENTS, FollowedTable, STICKY_EVENTS, Sqlite},
};

/// A table of the database, and how far it is written.
struct Stored<P> {
    table: &'static FollowedTable,
    sqlite: Sqlite,
    persisted: watch::Receiver<P>,
}

impl<P: Position> Table for Stored<P> {
    fn name(&self) -> &str {
        self.table.name
    }

    fn columns(&self) -> &[&str] {
        self.table.columns
    }

    fn position(&self) -> Token {
        self.persisted.borrow().token()
    }

    fn rows(&self, after: Token, up_to: Token, limit: usize) -> BoxFuture<'_, Result<Vec<Row>, TableError>> {
        let rows = self.sqlite.followed(self.table, after, up_to, limit);
        rows.map(|rows| rows.map_err(|error| TableError(error.to_string())))
            .boxed()
    }
}

/// The tables of a homeserver.
pub(super) fn tables(sqlite: &Sqlite, streams: &MasterStreams) -> Vec<Arc<dyn Table>> {
    let mut tables = vec![
        stored(&EVENTS, sqlite, streams.events.up_to()),
        stored(&CURRENT_STATE_DELTAS, sqlite, streams.events.up_to()),
        stored(&STICKY_EVENTS, sqlite, streams.sticky_events.up_to()),
    ];
    tables.extend(streams.tables());
    tables
}

fn stored<P: Position>(
    table: &'static FollowedTable,
    sqlite: &Sqlite,
    persisted: watch::Receiver<P>,
) -> Arc<dyn Table> {
    Arc::new(Stored {
        table,
        sqlite: sqlite.clone(),
        persisted,
    })
}
