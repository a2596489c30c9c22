//! The table `streams`: the positions of all others, for whoever wants notice only.

use std::sync::Arc;

use futures_util::{FutureExt as _, future::BoxFuture};

use super::table::{Row, Table, TableError};
use crate::core::id::Token;

pub(super) const STREAMS: &str = "streams";

/// The positions of `tables`.
///
/// Its own position is their sum: it moves when any of them does, and means the same after a restart. All its rows stand
/// there, so they are given whole.
pub(super) struct Streams {
    pub(super) tables: Vec<Arc<dyn Table>>,
}

impl Table for Streams {
    fn name(&self) -> &str {
        STREAMS
    }

    fn columns(&self) -> &[&str] {
        &["name", "position"]
    }

    fn position(&self) -> Token {
        let sum = self.tables.iter().map(|table| table.position().0);
        Token(sum.fold(0, i64::saturating_add))
    }

    fn rows(&self, _: Token, up_to: Token, limit: usize) -> BoxFuture<'_, Result<Vec<Row>, TableError>> {
        // One that has moved meanwhile is told with its newer position, and then again.
        let rows = self.tables.iter().take(limit).map(|table| Row {
            position: up_to,
            cells: vec![table.name().into(), table.position().0.into()],
        });
        std::future::ready(Ok(rows.collect())).boxed()
    }
}
