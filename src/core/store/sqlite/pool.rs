//! The connections to the file: several that read, and one that writes, because SQLite admits one writer at a time.

use std::{path::Path, sync::Arc, time::Duration};

use parking_lot::Mutex;
use serde::Serialize;
use sqlx::{
    SqlitePool, Transaction,
    sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous},
};

use crate::core::{
    id::{InstanceName, ServerName},
    store::StoreError,
};

/// How long a write waits for those of other processes, and for ours before it. None takes longer than moments.
const WRITE_TIMEOUT: Duration = Duration::from_mins(1);

/// How long a read waits for a connection.
const READ_TIMEOUT: Duration = Duration::from_secs(10);

/// How many reads run at once.
const READERS: u32 = 4;

/// The database of an embedded homeserver, as one process sees it. A clone shares the connections.
#[derive(Clone, Debug)]
pub struct Sqlite {
    pub(super) readers: SqlitePool,
    /// One connection: whoever waits for it waits in line, and meets no lock but those of other processes.
    writer: SqlitePool,
    pub(super) path: Arc<Path>,
    pub(super) me: InstanceName,
    pub(super) server_name: ServerName,
    /// The list of senders that we started under, a name a line; set by `adopt_positions`.
    pub(super) senders: Arc<Mutex<Option<String>>>,
}

impl Sqlite {
    /// Opens the file of an embedded homeserver.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`] if it cannot be opened, [`StoreError::Incompatible`] if it is no such file.
    pub async fn open(path: &Path, me: InstanceName, server_name: ServerName) -> Result<Self, StoreError> {
        let options = options(path);
        let store = Self {
            readers: SqlitePoolOptions::new()
                .max_connections(READERS)
                .acquire_timeout(READ_TIMEOUT)
                .connect_lazy_with(options.clone().pragma("query_only", "ON")),
            writer: SqlitePoolOptions::new()
                .max_connections(1)
                .acquire_timeout(WRITE_TIMEOUT)
                .connect_lazy_with(options.journal_mode(SqliteJournalMode::Wal)),
            path: path.into(),
            me,
            server_name,
            senders: Arc::default(),
        };
        store.check_kind().await?;
        // Now, so that the journal is what the readers need.
        drop(store.writer.acquire().await?);
        Ok(store)
    }

    /// Opens the file of an embedded homeserver, and makes it first if there is none.
    ///
    /// # Errors
    /// As [`Sqlite::open`].
    pub async fn create(path: &Path, me: InstanceName, server_name: ServerName) -> Result<Self, StoreError> {
        super::schema::create(options(path).create_if_missing(true)).await?;
        Self::open(path, me, server_name).await
    }

    pub(in crate::core::store) async fn close(&self) {
        self.readers.close().await;
        self.writer.close().await;
    }

    pub(in crate::core::store) fn server_name(&self) -> &ServerName {
        &self.server_name
    }

    /// A transaction that writes. What it reads nobody changes before it ends.
    pub(super) async fn write(&self) -> Result<Transaction<'static, sqlx::Sqlite>, StoreError> {
        // One that began by reading could not write any more once another process had written.
        Ok(self.writer.begin_with("BEGIN IMMEDIATE").await?)
    }
}

fn options(path: &Path) -> SqliteConnectOptions {
    SqliteConnectOptions::new()
        .filename(path)
        .busy_timeout(WRITE_TIMEOUT)
        .foreign_keys(true)
        // What has been sent to others must not be gone after a power cut.
        .synchronous(SqliteSynchronous::Full)
}

/// Rows as one parameter, to be read with `json_each`.
pub(super) fn rows<T: Serialize>(rows: impl IntoIterator<Item = T>) -> String {
    let rows: Vec<T> = rows.into_iter().collect();
    serde_json::to_string(&rows).expect("texts and numbers have a form in JSON")
}
