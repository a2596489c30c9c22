//! What is asked for when a position shows that rows were missed, and what comes back.

use std::{error::Error, future::Future};

use serde_json::value::RawValue;

use crate::core::{
    clock::Millis,
    id::{InstanceName, Token},
    replication::stream::Stream,
};

/// Rows asked for at once, as Synapse does.
pub const PAGE: usize = 100;

/// A page of missing rows to fetch: of `writer`, above `from`, up to `to`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fetch {
    /// Names this page; the same for every try, another for every other page.
    pub key: u64,
    /// The stream.
    pub stream: Stream,
    /// Whose rows.
    pub writer: InstanceName,
    /// Exclusive.
    pub from: Token,
    /// Inclusive.
    pub to: Token,
}

/// Rows that share a position.
#[derive(Debug, Clone)]
pub struct Group {
    /// The position.
    pub token: Token,
    /// The rows, each a JSON array.
    pub rows: Vec<Box<RawValue>>,
}

/// A page of missing rows.
#[derive(Debug, Clone)]
pub struct Page {
    /// Ascending.
    pub groups: Vec<Group>,
    /// Everything up to here is in it or in earlier pages.
    pub up_to: Token,
    /// There is more.
    pub limited: bool,
}

/// Why a page could not be had. It is only logged: whatever it is, the page is asked for again.
pub type FetchError = Box<dyn Error + Send + Sync>;

/// A row of `cache_invalidation_stream_by_instance`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheInvalidation {
    /// `stream_id`.
    pub token: Token,
    /// `cache_func`.
    pub func: String,
    /// `keys`; `None`: the whole cache.
    pub keys: Option<Vec<String>>,
    /// `invalidation_ts`.
    pub at: Option<Millis>,
}

/// The database, as the source of missed rows.
pub trait GapSource: Send + Sync + 'static {
    /// The `caches` rows of `writer` with `from < stream_id <= to`, ascending, at most `limit`.
    fn cache_rows(
        &self,
        writer: &InstanceName,
        from: Token,
        to: Token,
        limit: usize,
    ) -> impl Future<Output = Result<Vec<CacheInvalidation>, FetchError>> + Send;
}

/// The page that `rows` of the database, at most [`PAGE`], make for `fetch`.
///
/// # Errors
/// A row that cannot be written as JSON (none is known).
pub fn page_of_caches(fetch: &Fetch, rows: &[CacheInvalidation]) -> Result<Page, FetchError> {
    let limited = rows.len() >= PAGE;
    let groups = rows
        .iter()
        .map(|row| {
            let json = serde_json::value::to_raw_value(&(&row.func, &row.keys, row.at.map(|at| at.0)))?;
            Ok(Group {
                token: row.token,
                rows: vec![json],
            })
        })
        .collect::<Result<Vec<_>, serde_json::Error>>()?;
    let up_to = match rows.last() {
        Some(last) if limited => last.token,
        _ => fetch.to,
    };
    Ok(Page { groups, up_to, limited })
}
