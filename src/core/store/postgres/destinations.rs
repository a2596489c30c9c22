//! What the database knows of destinations: how far they got, their back-off, and which of them are owed something.

use std::collections::HashMap;

use sqlx::{Row, postgres::PgRow};

use super::{Postgres, pool::retrying};
use crate::core::{
    clock::Millis,
    id::{ServerName, StreamOrdering, Token},
    store::{CacheRow, DestinationRecord, RetryTimings, StoreError, sql},
};

impl Postgres {
    pub(in crate::core::store) async fn destinations(
        &self,
        names: &[ServerName],
    ) -> Result<HashMap<ServerName, DestinationRecord>, StoreError> {
        let rows = sqlx::query(
            "SELECT n.name, d.last_successful_stream_ordering, d.retry_last_ts, d.retry_interval, d.failure_ts, \
                    owed.owed_from, owed.owed_up_to, \
                    EXISTS (SELECT FROM destination_rooms_sticky_events_backlog b WHERE b.destination = n.name) \
                        AS has_backlog \
             FROM unnest($1::text[]) AS n (name) \
             LEFT JOIN destinations d ON d.destination = n.name \
             CROSS JOIN LATERAL ( \
                 SELECT min(r.stream_ordering) AS owed_from, max(r.stream_ordering) AS owed_up_to \
                 FROM destination_rooms r \
                 WHERE r.destination = n.name \
                   AND (d.last_successful_stream_ordering IS NULL \
                        OR r.stream_ordering > d.last_successful_stream_ordering)) AS owed",
        )
        .bind(names.iter().map(ServerName::as_str).collect::<Vec<_>>())
        .fetch_all(&self.pool)
        .await?;
        rows.iter()
            .map(|row| Ok((row.try_get::<String, _>("name")?.into(), record(row)?)))
            .collect()
    }

    pub(in crate::core::store) async fn successful_beyond(
        &self,
        position: StreamOrdering,
    ) -> Result<Vec<ServerName>, StoreError> {
        let names: Vec<String> = sqlx::query_scalar(sql::SUCCESSFUL_BEYOND)
            .bind(position.0)
            .fetch_all(&self.pool)
            .await?;
        Ok(names.into_iter().map(ServerName::from).collect())
    }

    pub(in crate::core::store) async fn set_retry(
        &self,
        destination: &ServerName,
        timings: RetryTimings,
        now: Millis,
    ) -> Result<Option<CacheRow>, StoreError> {
        // One statement is one transaction: the cache row cannot be missing, nor announce what was not written.
        let attempt = || async {
            let token: Option<i64> = sqlx::query_scalar(
                "WITH written AS ( \
                    INSERT INTO destinations AS old (destination, retry_last_ts, retry_interval, failure_ts) \
                    VALUES ($1, $2, $3, $4) \
                    ON CONFLICT (destination) DO UPDATE \
                    SET retry_last_ts = EXCLUDED.retry_last_ts, retry_interval = EXCLUDED.retry_interval, \
                        failure_ts = EXCLUDED.failure_ts \
                    WHERE EXCLUDED.retry_interval = 0 OR EXCLUDED.retry_last_ts = 0 \
                       OR old.retry_interval IS NULL OR old.retry_interval < EXCLUDED.retry_interval \
                       OR old.retry_last_ts < EXCLUDED.retry_last_ts \
                    RETURNING destination) \
                 INSERT INTO cache_invalidation_stream_by_instance \
                    (stream_id, instance_name, cache_func, keys, invalidation_ts) \
                 SELECT nextval('cache_invalidation_stream_seq'), $5, 'get_destination_retry_timings', \
                        ARRAY[destination], $6 \
                 FROM written RETURNING stream_id",
            )
            .bind(destination.as_str())
            .bind(timings.last_tried.0)
            .bind(timings.interval)
            .bind(timings.failing_since.map(|since| since.0))
            .bind(self.me.as_str())
            .bind(now.0)
            .fetch_optional(&self.pool)
            .await?;
            Ok(token)
        };
        let token = retrying(attempt).await?;
        Ok(token.map(|token| CacheRow {
            token: Token(token),
            destination: destination.clone(),
            at: now,
            writer: self.me.clone(),
        }))
    }

    pub(in crate::core::store) async fn due_destinations(
        &self,
        after: Option<&ServerName>,
        now: Millis,
        limit: i64,
        sticky: bool,
    ) -> Result<Vec<ServerName>, StoreError> {
        let names: Vec<String> = sqlx::query_scalar(sql::DUE_DESTINATIONS)
            .bind(after.map_or("", ServerName::as_str))
            .bind(now.0)
            .bind(limit)
            .bind(sticky)
            .fetch_all(&self.pool)
            .await?;
        Ok(names.into_iter().map(ServerName::from).collect())
    }
}

fn record(row: &PgRow) -> Result<DestinationRecord, StoreError> {
    let number = |column| row.try_get::<Option<i64>, _>(column);
    Ok(DestinationRecord {
        last_successful: number("last_successful_stream_ordering")?.map(StreamOrdering),
        retry: RetryTimings {
            last_tried: Millis(number("retry_last_ts")?.unwrap_or(0)),
            interval: number("retry_interval")?.unwrap_or(0),
            failing_since: number("failure_ts")?.map(Millis),
        },
        owed_from: number("owed_from")?.map(StreamOrdering),
        owed_up_to: number("owed_up_to")?.map(StreamOrdering),
        has_backlog: row.try_get("has_backlog")?,
    })
}
