//! Where the replication streams stand when we start, and the `caches` rows that a reader missed.

use sqlx::AssertSqlSafe;

use super::Postgres;
use crate::core::store::StoreError;
use crate::core::{
    clock::Millis,
    id::{InstanceName, Token},
    replication::{gap::CacheInvalidation, stream::Table},
};

impl Postgres {
    pub(in crate::core::store) async fn stored_positions(
        &self,
        stream_name: &str,
    ) -> Result<Vec<(InstanceName, Token)>, StoreError> {
        let rows: Vec<(String, i64)> =
            sqlx::query_as("SELECT instance_name, stream_id FROM stream_positions WHERE stream_name = $1 ORDER BY 1")
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
        let columns: Vec<String> = tables
            .iter()
            .map(|Table { name, id, .. }| format!("(SELECT max({id}) FROM {name})"))
            .collect();
        // `greatest` passes over NULLs.
        let sql = format!("SELECT greatest(NULL::int8, {})::int8", columns.join(", "));
        let position: Option<i64> = sqlx::query_scalar(AssertSqlSafe(sql)).fetch_one(&self.pool).await?;
        Ok(position.map(Token))
    }

    pub(in crate::core::store) async fn positions_from(
        &self,
        tables: &[Table],
        from: Token,
        limit: i64,
    ) -> Result<Vec<(Option<InstanceName>, Token)>, StoreError> {
        // Limited table by table, so that each is read along its index and no further.
        let parts: Vec<String> = tables
            .iter()
            .map(|Table { name, id, .. }| {
                format!(
                    "(SELECT DISTINCT {id}::int8 AS id, instance_name FROM {name} WHERE {id} >= $1 \
                      ORDER BY 1, 2 LIMIT $2)"
                )
            })
            .collect();
        let sql = format!("{} ORDER BY 1, 2 LIMIT $2", parts.join(" UNION "));
        let rows: Vec<(i64, Option<String>)> = sqlx::query_as(AssertSqlSafe(sql))
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
