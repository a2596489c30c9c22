//! Where the replication streams stand when we start, and the `caches` rows that a reader missed.

use sqlx::AssertSqlSafe;

use super::Postgres;
use crate::core::{
    clock::Millis,
    id::{InstanceName, Token},
    replication::{gap::CacheInvalidation, positions::Position, stream::Table},
    store::{StoreError, sql},
};

impl Postgres {
    /// The next ids of a stream, ascending. They are gone for good, whether used or not. (An embedded database has no
    /// such thing: there an id is the row's, given when it is inserted.)
    ///
    /// # Errors
    /// Those of the database.
    pub async fn next_ids<P: Position>(&self, count: u32) -> Result<Vec<P>, StoreError> {
        let ids: Vec<i64> = sqlx::query_scalar("SELECT nextval($1::text::regclass) FROM generate_series(1, $2::int8)")
            .bind(P::SEQUENCE)
            .bind(i64::from(count))
            .fetch_all(&self.pool)
            .await?;
        Ok(ids.into_iter().map(|id| P::at(Token(id))).collect())
    }

    pub(in crate::core::store) async fn stored_positions(
        &self,
        stream_name: &str,
    ) -> Result<Vec<(InstanceName, Token)>, StoreError> {
        let rows: Vec<(String, i64)> = sqlx::query_as(sql::STORED_POSITIONS)
            .bind(stream_name)
            .fetch_all(&self.pool)
            .await?;
        Ok(rows
            .into_iter()
            .map(|(instance, position)| (instance.into(), Token(position)))
            .collect())
    }

    pub(in crate::core::store) async fn greatest_position(
        &self,
        tables: &[Table],
    ) -> Result<Option<Token>, StoreError> {
        if tables.is_empty() {
            return Ok(None);
        }
        let sql = AssertSqlSafe(sql::greatest_position(tables));
        let position: Option<i64> = sqlx::query_scalar(sql).fetch_one(&self.pool).await?;
        Ok(position.map(Token))
    }

    pub(in crate::core::store) async fn positions_from(
        &self,
        tables: &[Table],
        from: Token,
        limit: i64,
    ) -> Result<Vec<(Option<InstanceName>, Token)>, StoreError> {
        let rows: Vec<(i64, Option<String>)> = sqlx::query_as(AssertSqlSafe(sql::positions_from(tables)))
            .bind(from.0)
            .bind(limit)
            .fetch_all(&self.pool)
            .await?;
        Ok(rows
            .into_iter()
            .map(|(id, instance)| (instance.map(InstanceName::from), Token(id)))
            .collect())
    }

    pub(in crate::core::store) async fn cache_rows(
        &self,
        writer: &InstanceName,
        from: Token,
        to: Token,
        limit: i64,
    ) -> Result<Vec<CacheInvalidation>, StoreError> {
        // A NULL among the keys names no entry there could be, and must not make the whole page unreadable.
        sqlx::query_as(
            "SELECT stream_id, cache_func, array_remove(keys, NULL), invalidation_ts \
             FROM cache_invalidation_stream_by_instance \
             WHERE instance_name = $1 AND stream_id > $2 AND stream_id <= $3 ORDER BY stream_id LIMIT $4",
        )
        .bind(writer.as_str())
        .bind(from.0)
        .bind(to.0)
        .bind(limit)
        .fetch_all(&self.pool)
        .await?
        .into_iter()
        .map(|(token, cache_func, keys, at): (i64, _, _, Option<i64>)| {
            Ok(CacheInvalidation {
                token: Token(token),
                func: cache_func,
                keys,
                at: at.map(Millis),
            })
        })
        .collect()
    }
}
