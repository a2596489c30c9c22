//! Replication's questions to the database: where the streams stand at the start, and rows that were missed.

use super::{
    gap::{CacheInvalidation, FetchError, GapSource},
    master::MasterStart,
    positions::{Position, Positions},
    reader::StartPositions,
    stream::Stream,
};
use crate::core::{
    id::{InstanceName, Token},
    store::{Store, StoreError},
};

/// Positions read at once.
const PAGE: i64 = 10_000;

/// Where the streams stand, for a sender that starts now. `writers` are those of `events`.
///
/// # Errors
/// Those of the database.
pub async fn start_positions(store: &Store, writers: &[InstanceName]) -> Result<StartPositions, StoreError> {
    Ok(StartPositions {
        events: positions(store, writers).await?,
        caches: caches(store).await?,
    })
}

/// Where the streams stand, for a master that starts now. `writers` are those of `events`; `presence`: see
/// [`MasterStart::presence`].
///
/// # Errors
/// Those of the database.
pub async fn master_start(store: &Store, writers: &[InstanceName], presence: Token) -> Result<MasterStart, StoreError> {
    Ok(MasterStart {
        events: positions(store, writers).await?,
        sticky_events: positions(store, writers).await?,
        caches: caches(store).await?,
        presence,
    })
}

async fn caches(store: &Store) -> Result<Token, StoreError> {
    let greatest = store.greatest_position(Stream::Caches.tables()).await?;
    Ok(greatest.unwrap_or_default())
}

async fn positions<P: Position>(store: &Store, writers: &[InstanceName]) -> Result<Positions<P>, StoreError> {
    let stored = match P::STREAM.stored_as() {
        Some(name) => store.stored_positions(name).await?,
        None => vec![],
    };
    let stored: Vec<_> = stored
        .into_iter()
        .map(|(writer, token)| (writer, P::at(token)))
        .collect();
    let tables = P::STREAM.tables();
    let mut ids = vec![];
    match Positions::oldest_stored(writers, &stored) {
        None => {
            ids.extend(store.greatest_position(tables).await?);
            ids.push(below_the_first(store));
        }
        Some(oldest) => {
            let mut from = oldest.token();
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
    Ok(Positions::at_start(writers, &stored, ids.into_iter().map(P::at)))
}

/// The position of a stream in which nothing was ever written: Synapse's sequences begin with 2, an embedded database with 1.
fn below_the_first(store: &Store) -> Token {
    match store {
        Store::Postgres(_) => Token(1),
        Store::Sqlite(_) => Token(0),
    }
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
