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

#[cfg(test)]
mod tests {
    use futures_util::{FutureExt as _, future::BoxFuture};
    use parking_lot::Mutex;
    use serde_json::{Value, json};
    use tokio::time::Instant;

    use super::*;
    use crate::core::replication::feed::table::Row;

    /// A table with a row at each position above 0.
    struct Counter(&'static str, Mutex<i64>);

    impl Table for Counter {
        fn name(&self) -> &str {
            self.0
        }

        fn columns(&self) -> &[&str] {
            &["number"]
        }

        fn position(&self) -> Token {
            Token(*self.1.lock())
        }

        fn rows(&self, after: Token, up_to: Token, limit: usize) -> BoxFuture<'_, Result<Vec<Row>, TableError>> {
            if self.0 == "broken" {
                return std::future::pending().boxed();
            }
            let rows = (after.0.max(0) + 1..=up_to.0).take(limit).map(|number| Row {
                position: Token(number),
                cells: vec![number.into()],
            });
            std::future::ready(Ok(rows.collect())).boxed()
        }
    }

    fn feed(name: &'static str, position: i64) -> (Arc<Counter>, Bell, Feed) {
        let table = Arc::new(Counter(name, Mutex::new(position)));
        let bell = Bell::default();
        (Arc::clone(&table), bell.clone(), Feed::new(bell, vec![table]))
    }

    async fn ask(feed: &Feed, parameters: &[(&str, &str)]) -> Result<Value, AskError> {
        let request = feed.read(parameters.iter().copied()).expect("a good question");
        let answer = feed.ask(&request, &CancellationToken::new()).await?;
        Ok(serde_json::from_str(&answer).expect("JSON"))
    }

    #[tokio::test(start_paused = true)]
    async fn it_waits_for_news_and_no_longer_than_it_is_asked_to() {
        let (table, bell, feed) = feed("t", 3);
        let began = Instant::now();
        assert_eq!(ask(&feed, &[("t", "3")]).await, Ok(json!({})));
        assert_eq!(began.elapsed(), Duration::ZERO);
        assert_eq!(ask(&feed, &[("t", "3"), ("timeout", "5000")]).await, Ok(json!({})));
        assert_eq!(began.elapsed(), Duration::from_secs(5));
        let asking = ask(&feed, &[("t", "3"), ("timeout", "5000")]);
        tokio::pin!(asking);
        bell.ring();
        assert!(
            timeout(Duration::from_secs(1), &mut asking).await.is_err(),
            "rung for nothing"
        );
        *table.1.lock() = 4;
        bell.ring();
        assert_eq!(asking.await, Ok(json!({"t": [["t", 4, 1, 1, "number"], [4]]})));
        assert_eq!(began.elapsed(), Duration::from_secs(6));
        // The last look, for what changes and does not ring.
        let asking = ask(&feed, &[("t", "4"), ("timeout", "5000")]);
        tokio::pin!(asking);
        assert!(timeout(Duration::from_secs(1), &mut asking).await.is_err());
        *table.1.lock() = 5;
        assert_eq!(asking.await, Ok(json!({"t": [["t", 5, 1, 1, "number"], [5]]})));
    }

    #[tokio::test(start_paused = true)]
    async fn who_waits_is_answered_when_the_process_stops() {
        let (_, _, feed) = feed("t", 3);
        let stop = CancellationToken::new();
        let request = feed.read([("t", "3"), ("timeout", "60000")]).expect("a good question");
        let began = Instant::now();
        let asking = feed.ask(&request, &stop);
        tokio::pin!(asking);
        assert!(timeout(Duration::from_secs(1), &mut asking).await.is_err());
        stop.cancel();
        assert_eq!(asking.await, Ok("{}".to_owned()));
        assert_eq!(began.elapsed(), Duration::from_secs(1));
    }

    #[tokio::test]
    async fn a_position_that_was_never_reached_is_one_of_another_life() {
        let (_, _, feed) = feed("t", 2);
        assert_eq!(
            ask(&feed, &[("t", "9")]).await,
            Ok(json!({"t": [["t", 2, 2, 1, "number"], [1], [2]]}))
        );
    }

    #[tokio::test(start_paused = true)]
    async fn askers_are_counted_and_a_table_that_hangs_is_given_up() {
        let (_, _, feed) = feed("broken", 2);
        let request = feed
            .read([("broken", "2"), ("timeout", "1000")])
            .expect("a good question");
        let stop = CancellationToken::new();
        let mut waiting: Vec<_> = (0..MAX_ASKERS).map(|_| Box::pin(feed.ask(&request, &stop))).collect();
        for asking in &mut waiting {
            assert!(asking.now_or_never().is_none());
        }
        assert_eq!(feed.ask(&request, &stop).await, Err(AskError::Busy));
        drop(waiting);
        let error = ask(&feed, &[("broken", "-1")]).await.expect_err("it hangs");
        assert_eq!(
            error.to_string(),
            "the table `broken` cannot be read: it does not answer"
        );
    }

    #[test]
    #[should_panic(expected = "names of their own")]
    fn a_table_cannot_be_named_like_a_parameter() {
        let _ = feed("limit", 0);
    }
}
