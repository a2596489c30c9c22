//! Where the replication streams stand when we start, and the `caches` rows that a reader missed.

use sqlx::AssertSqlSafe;

use super::Sqlite;
use crate::core::{
    clock::Millis,
    id::{InstanceName, Token},
    replication::{gap::CacheInvalidation, stream::Table},
    store::{StoreError, sql},
};

impl Sqlite {
    pub(in crate::core::store) async fn stored_positions(
        &self,
        stream_name: &str,
    ) -> Result<Vec<(InstanceName, Token)>, StoreError> {
        let rows: Vec<(String, i64)> = sqlx::query_as(sql::STORED_POSITIONS)
            .bind(stream_name)
            .fetch_all(&self.readers)
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
        let tables = self.those_here(tables).await?;
        if tables.is_empty() {
            return Ok(None);
        }
        let sql = AssertSqlSafe(sql::greatest_position(tables));
        let position: Option<i64> = sqlx::query_scalar(sql).fetch_one(&self.readers).await?;
        Ok(position.map(Token))
    }

    pub(in crate::core::store) async fn positions_from(
        &self,
        tables: &[Table],
        from: Token,
        limit: i64,
    ) -> Result<Vec<(Option<InstanceName>, Token)>, StoreError> {
        let tables = self.those_here(tables).await?;
        if tables.is_empty() {
            return Ok(Vec::new());
        }
        let rows: Vec<(i64, Option<String>)> = sqlx::query_as(AssertSqlSafe(sql::positions_from(tables)))
            .bind(from.0)
            .bind(limit)
            .fetch_all(&self.readers)
            .await?;
        Ok(rows
            .into_iter()
            .map(|(id, instance)| (instance.map(InstanceName::from), Token(id)))
            .collect())
    }

    /// A table that the embedded schema has no use for holds no rows either.
    async fn those_here<'a>(&self, tables: &'a [Table]) -> Result<Vec<&'a Table>, StoreError> {
        let here: Vec<String> = sqlx::query_scalar("SELECT name FROM sqlite_schema WHERE type = 'table'")
            .fetch_all(&self.readers)
            .await?;
        let is_here = |table: &&Table| here.iter().any(|name| name == table.name);
        Ok(tables.iter().filter(is_here).collect())
    }

    pub(in crate::core::store) async fn cache_rows(
        &self,
        writer: &InstanceName,
        from: Token,
        to: Token,
        limit: i64,
    ) -> Result<Vec<CacheInvalidation>, StoreError> {
        let rows: Vec<(i64, String, Option<String>, Option<i64>)> = sqlx::query_as(
            "SELECT stream_id, cache_func, keys, invalidation_ts FROM cache_invalidation_stream_by_instance
             WHERE instance_name = $1 AND stream_id > $2 AND stream_id <= $3 ORDER BY stream_id LIMIT $4",
        )
        .bind(writer.as_str())
        .bind(from.0)
        .bind(to.0)
        .bind(limit)
        .fetch_all(&self.readers)
        .await?;
        rows.into_iter()
            .map(|(token, func, keys, at)| {
                let keys: Option<Vec<Option<String>>> =
                    keys.as_deref()
                        .map(serde_json::from_str)
                        .transpose()
                        .map_err(|error| StoreError::Damaged {
                            table: "cache_invalidation_stream_by_instance".into(),
                            key: token.to_string(),
                            what: format!("keys: {error}"),
                        })?;
                Ok(CacheInvalidation {
                    token: Token(token),
                    func,
                    // A NULL among the keys names no entry there could be.
                    keys: keys.map(|keys| keys.into_iter().flatten().collect()),
                    at: at.map(Millis),
                })
            })
            .collect()
    }
}
