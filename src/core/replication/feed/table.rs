//! What can be followed: a table whose changes are numbered, and the bell that says that there are some.

use futures_util::future::BoxFuture;
use serde_json::Value;
use tokio::sync::watch;

use crate::core::{clock::Millis, id::Token};

/// The position that an asker names who has seen nothing.
pub const START: Token = Token(-1);

/// A table that others follow.
///
/// What is appended and never changed is a table as it is (events). Of what changes or goes, a row stands at the position of
/// its last change, and what is gone has a row that says so; [`super::MemoryTable`] does both.
pub trait Table: Send + Sync {
    /// Its name: the query parameter by which it is asked for.
    fn name(&self) -> &str;

    /// The names of its columns.
    fn columns(&self) -> &[&str];

    /// Everything up to here can be read. It never goes back. A table that is a view of something brings itself up to date
    /// first.
    fn position(&self) -> Token;

    /// The rows above `after` and up to `up_to`, by ascending position; the first `limit` of them if there are more, be it
    /// in the middle of those of one position. A cell for each column.
    fn rows(&self, after: Token, up_to: Token, limit: usize) -> BoxFuture<'_, Result<Vec<Row>, TableError>>;
}

/// A row with its position.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// Where it stands.
    pub position: Token,
    /// A cell for each column.
    pub cells: Vec<Value>,
}

/// A table that cannot be read, or breaks its own rules.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct TableError(pub String);

/// The first position of a table that is in memory only: above every position that an earlier process gave out, if that
/// made fewer than a thousand changes in each millisecond of its life.
#[must_use]
pub fn first_position(started: Millis) -> Token {
    Token(started.0.saturating_mul(1000))
}

/// What whoever changes a table rings, after the change; those who wait for news then look.
#[derive(Debug, Clone, Default)]
pub struct Bell(watch::Sender<()>);

impl Bell {
    /// There may be news.
    pub fn ring(&self) {
        self.0.send_replace(());
    }

    pub(super) fn listen(&self) -> watch::Receiver<()> {
        self.0.subscribe()
    }
}
