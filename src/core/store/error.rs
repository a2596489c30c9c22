//! What can go wrong between us and the database, as far as a caller must tell it apart.

use std::borrow::Cow;

use sqlx::sqlite::SqliteError;

/// Why a question to the database, or a change of it, failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// No connection. Nothing was changed, or it is not known whether it was (the
    /// connection broke at the commit): every change of this store may be repeated.
    #[error("the database failed: {0}")]
    Unavailable(String),
    /// The server is there and refused the statement: asking again is likely to end the same way.
    #[error("the database refused a statement: {0}")]
    Refused(String),
    /// Others' transactions kept getting in the way, or a room was purged under us, at each of several attempts.
    #[error("the database was too busy with conflicting changes: {0}")]
    Conflict(String),
    /// A row breaks what we rely on.
    #[error("table {table}, row {key}: {what}")]
    Damaged {
        /// The table, or the query's column if the row could not be read at all.
        table: String,
        /// Which row.
        key: String,
        /// What is wrong.
        what: String,
    },
    /// This database, or our rights in it, are not what we can work with. The text says what to do.
    #[error("{0}")]
    Incompatible(String),
    /// Our row of `federation_stream_position` is gone, or was moved: a sender with another list of instances took over.
    #[error(
        "a sender with another `federation_sender_instances` has taken over our place; stop all senders, give all the same \
         list, and start them again"
    )]
    TakenOver,
    /// Another process holds this instance's lock: this one.
    #[error("another Burdock runs under this instance name (the lock is held by {0})")]
    AlreadyRunning(String),
}

impl StoreError {
    /// Whether the same question may be answered later: nothing is wrong with what was asked about.
    #[must_use]
    pub fn may_pass(&self) -> bool {
        matches!(self, Self::Unavailable(_) | Self::Conflict(_))
    }
}

/// SQLSTATEs that a repetition of the whole transaction can cure.
const TRANSIENT: [&str; 3] = [
    "40001", // serialization_failure
    "40P01", // deadlock_detected
    "23503", // foreign_key_violation: a room was purged between our look and our write; the next look misses it
];

/// Classes of SQLSTATE that are about the connection or the server's moment, not about the statement.
const PASSING: [&str; 6] = [
    "08",  // connection exception
    "28",  // the user may not connect (now)
    "3D",  // no such database (now)
    "53",  // insufficient resources
    "57P", // operator intervention: shutdown, starting up
    "25",  // the server is read-only: a standby that is being promoted
];

/// What the server said, without the place in its own source that sqlx adds.
fn text(error: &sqlx::Error) -> String {
    match error {
        sqlx::Error::Database(said) => said.message().to_owned(),
        other => other.to_string(),
    }
}

/// A statement met a limit of its own, such as `temp_file_limit`, though the class is that of passing shortages.
const STATEMENT_TOO_LARGE: &str = "53400";

/// SQLite's codes, without what extends them.
fn of_sqlite(code: Option<Cow<'_, str>>, text: String) -> StoreError {
    match code.and_then(|code| code.parse::<i32>().ok()).map(|code| code & 0xff) {
        // Busy, locked: another process has held the file for longer than any write of ours takes.
        Some(5 | 6) => StoreError::Conflict(text),
        // Out of memory, read-only, I/O error, disk full, cannot be opened.
        Some(7 | 8 | 10 | 13 | 14) => StoreError::Unavailable(text),
        _ => StoreError::Refused(text),
    }
}

impl From<sqlx::Error> for StoreError {
    fn from(error: sqlx::Error) -> Self {
        match &error {
            sqlx::Error::Database(e) if e.try_downcast_ref::<SqliteError>().is_some() => {
                of_sqlite(e.code(), text(&error))
            }
            sqlx::Error::Database(e) if e.code().is_some_and(|code| TRANSIENT.contains(&&*code)) => {
                Self::Conflict(text(&error))
            }
            sqlx::Error::Database(e)
                if e.code().is_some_and(|code| {
                    code == STATEMENT_TOO_LARGE || !PASSING.iter().any(|class| code.starts_with(class))
                }) =>
            {
                Self::Refused(text(&error))
            }
            sqlx::Error::ColumnDecode { index, source } => Self::Damaged {
                table: format!("(column {index})"),
                key: "?".into(),
                what: source.to_string(),
            },
            sqlx::Error::PoolTimedOut => Self::Unavailable("no connection to it became free, or could be made".into()),
            _ => Self::Unavailable(text(&error)),
        }
    }
}
