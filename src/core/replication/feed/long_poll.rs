//! The feed: all tables that can be followed, and how a question is answered, at once or when there is news.

use std::{sync::Arc, time::Duration};

use tokio::{
    sync::Semaphore,
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;

use super::{
    answer::Page,
    request::{Request, RequestError},
    streams::{STREAMS, Streams},
    table::{Bell, START, Table, TableError},
};
use crate::core::id::Token;

/// Askers that wait or are answered at once.
const MAX_ASKERS: usize = 64;

/// Tables of one feed.
const MAX_TABLES: usize = 32;

/// Bytes of rows in one answer, shared evenly by the tables asked for. One position is never parted, so it may be more.
const MAX_BYTES: usize = 8 * 1024 * 1024;

/// How long the tables may take to be read.
const READ_LIMIT: Duration = Duration::from_secs(30);

/// Tables that are followed.
pub struct Feed {
    bell: Bell,
    /// The last is `streams`.
    tables: Vec<Arc<dyn Table>>,
    places: Semaphore,
}

/// Why a question has no answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AskError {
    /// Too many ask.
    #[error("{MAX_ASKERS} others ask or wait for news already; try again later")]
    Busy,
    /// A table could not be read.
    #[error("the table `{table}` cannot be read: {error}")]
    Table {
        /// Which.
        table: String,
        /// Why.
        error: TableError,
    },
}

/// A table that is elsewhere than the asker believes.
struct Moved<'a> {
    table: &'a dyn Table,
    after: Token,
    position: Token,
}

impl Feed {
    /// A feed of `tables`; whoever changes one of them rings `bell` afterwards.
    ///
    /// # Panics
    ///
    /// If two have the same name, or one has that of a parameter or of the table `streams`, or there are too many.
    #[must_use]
    pub fn new(bell: Bell, mut tables: Vec<Arc<dyn Table>>) -> Self {
        tables.push(Arc::new(Streams { tables: tables.clone() }));
        assert!(tables.len() <= MAX_TABLES, "at most {MAX_TABLES} tables");
        let mut names: Vec<&str> = tables
            .iter()
            .map(|table| table.name())
            .chain(["timeout", "limit"])
            .collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(
            names.len(),
            tables.len() + 2,
            "names of their own: {names:?}, {STREAMS}"
        );
        Self {
            bell,
            tables,
            places: Semaphore::new(MAX_ASKERS),
        }
    }

    /// Reads the parameters of a query: a table's name and the position last seen for each table, `timeout`, `limit`.
    ///
    /// # Errors
    /// The first that is wrong.
    pub fn read<N: AsRef<str>, V: AsRef<str>>(
        &self,
        parameters: impl IntoIterator<Item = (N, V)>,
    ) -> Result<Request, RequestError> {
        let names: Vec<&str> = self.tables.iter().map(|table| table.name()).collect();
        Request::read(parameters, &names)
    }

    /// Answers as soon as one of the tables asked for is elsewhere than the asker saw it last, or when the asker's time or
    /// `stop` says so: a JSON object with an entry for each table that moved.
    ///
    /// # Errors
    /// Too many ask at once, or a table cannot be read.
    pub async fn ask(&self, request: &Request, stop: &CancellationToken) -> Result<String, AskError> {
        let _place = self.places.try_acquire().map_err(|_| AskError::Busy)?;
        let mut news = self.bell.listen();
        let deadline = sleep(request.timeout);
        tokio::pin!(deadline);
        let mut over = false;
        let moved = loop {
            // Before the look: what changes after it rings again.
            news.borrow_and_update();
            let moved = self.moved(request);
            if over || !moved.is_empty() {
                break moved;
            }
            tokio::select! {
                _ = news.changed() => {}
                () = &mut deadline => over = true,
                () = stop.cancelled() => over = true,
            }
        };
        let bytes = MAX_BYTES / moved.len().max(1);
        let mut entries = Vec::with_capacity(moved.len());
        for moved in moved {
            let name = moved.table.name();
            let entry = timeout(READ_LIMIT, moved.entry(request.limit, bytes)).await;
            let entry = entry.unwrap_or_else(|_| Err(TableError("it does not answer".to_owned())));
            let entry = entry.map_err(|error| AskError::Table {
                table: name.to_owned(),
                error,
            })?;
            entries.push(format!("{}:{entry}", serde_json::Value::from(name)));
        }
        Ok(format!("{{{}}}", entries.join(",")))
    }

    fn moved(&self, request: &Request) -> Vec<Moved<'_>> {
        let asked = request.after.iter().filter_map(|(place, after)| {
            let table: &dyn Table = &**self.tables.get(*place)?;
            Some((table, *after, table.position()))
        });
        let moved = asked.filter(|(_, after, position)| after != position);
        moved
            .map(|(table, after, position)| Moved {
                table,
                // A position that was never given out is of another life of the table, as when the clock was set back
                // while we were stopped. Nothing is known of what that asker has.
                after: if after > position { START } else { after },
                position,
            })
            .collect()
    }
}

impl Moved<'_> {
    async fn entry(&self, limit: usize, bytes: usize) -> Result<String, TableError> {
        let columns = self.table.columns();
        let mut page = Page::new(self.after, self.position, columns.len(), limit, bytes);
        while let Some((after, count)) = page.wants() {
            page.add(&self.table.rows(after, self.position, count).await?)?;
        }
        Ok(page.entry(self.table.name(), columns))
    }
}
