//! Replication's questions to the database: where the streams stand at the start, and rows that were missed.

use super::{
    gap::{CacheInvalidation, FetchError, GapSource},
    positions::Positions,
    reader::StartPositions,
    stream::Stream,
};
use crate::core::{
    id::{InstanceName, StreamOrdering, Token},
    store::{Store, StoreError},
};

/// Positions read at once.
const PAGE: i64 = 10_000;

/// Where the streams stand, for a process that starts now. `writers` are those of `events`.
///
/// # Errors
/// Those of the database.
pub async fn start_positions(store: &Store, writers: &[InstanceName]) -> Result<StartPositions, StoreError> {
    let stored: Vec<_> = match Stream::Events.stored_as() {
        Some(name) => store.stored_positions(name).await?,
        None => vec![],
    };
    let stored: Vec<_> = stored
        .into_iter()
        .map(|(writer, token)| (writer, StreamOrdering(token.0)))
        .collect();
    let tables = Stream::Events.tables();
    let mut ids = vec![];
    match Positions::oldest_stored(writers, &stored) {
        None => ids.extend(store.greatest_position(tables).await?),
        Some(oldest) => {
            let mut from = Token(oldest.0);
            loop {
                let page = store.positions_from(tables, from, PAGE).await?;
                let full = i64::try_from(page.len()).is_ok_and(|read| read >= PAGE);
                ids.extend(page.iter().map(|(_, id)| *id));
                match page.last() {
                    Some((_, last)) if full => from = Token(last.0 + 1),
                    _ => break,
                }
            }
        }
    }
    let ids = ids.into_iter().map(|id| StreamOrdering(id.0));
    Ok(StartPositions {
        events: Positions::at_start(writers, &stored, ids),
        caches: store
            .greatest_position(Stream::Caches.tables())
            .await?
            .unwrap_or_default(),
    })
}

impl GapSource for Store {
    async fn cache_rows(
        &self,
        writer: &InstanceName,
        from: Token,
        to: Token,
        limit: usize,
    ) -> Result<Vec<CacheInvalidation>, FetchError> {
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        Ok(Store::cache_rows(self, writer, from, to, limit).await?)
    }
}
