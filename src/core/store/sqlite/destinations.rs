//! What the database knows of destinations: how far they got, their back-off, and which of them are owed something.

use std::collections::HashMap;

use super::{Sqlite, pool::rows};
use crate::core::{
    clock::Millis,
    id::{ServerName, StreamOrdering, Token},
    store::{CacheRow, DestinationRecord, RetryTimings, StoreError, sql},
};

impl Sqlite {
    pub(in crate::core::store) async fn destinations(
        &self,
        names: &[ServerName],
    ) -> Result<HashMap<ServerName, DestinationRecord>, StoreError> {
        type Row = (
            String,
            Option<i64>,
            Option<i64>,
            Option<i64>,
            Option<i64>,
            Option<i64>,
            Option<i64>,
            bool,
        );
        let found: Vec<Row> = sqlx::query_as(
            "SELECT n.value, d.last_successful_stream_ordering, d.retry_last_ts, d.retry_interval, d.failure_ts,
                    (SELECT min(r.stream_ordering) FROM destination_rooms r
                     WHERE r.destination = n.value
                       AND (d.last_successful_stream_ordering IS NULL
                            OR r.stream_ordering > d.last_successful_stream_ordering)),
                    (SELECT max(r.stream_ordering) FROM destination_rooms r
                     WHERE r.destination = n.value
                       AND (d.last_successful_stream_ordering IS NULL
                            OR r.stream_ordering > d.last_successful_stream_ordering)),
                    EXISTS (SELECT 1 FROM destination_rooms_sticky_events_backlog b WHERE b.destination = n.value)
             FROM json_each($1) n LEFT JOIN destinations d ON d.destination = n.value",
        )
        .bind(rows(names.iter().map(ServerName::as_str)))
        .fetch_all(&self.readers)
        .await?;
        let record = |(name, last_successful, last_tried, interval, failing_since, from, up_to, has_backlog): Row| {
            let record = DestinationRecord {
                last_successful: last_successful.map(StreamOrdering),
                retry: RetryTimings {
                    last_tried: Millis(last_tried.unwrap_or(0)),
                    interval: interval.unwrap_or(0),
                    failing_since: failing_since.map(Millis),
                },
                owed_from: from.map(StreamOrdering),
                owed_up_to: up_to.map(StreamOrdering),
                has_backlog,
            };
            (ServerName::from(name), record)
        };
        Ok(found.into_iter().map(record).collect())
    }

    pub(in crate::core::store) async fn successful_beyond(
        &self,
        position: StreamOrdering,
    ) -> Result<Vec<ServerName>, StoreError> {
        let names: Vec<String> = sqlx::query_scalar(sql::SUCCESSFUL_BEYOND)
            .bind(position.0)
            .fetch_all(&self.readers)
            .await?;
        Ok(names.into_iter().map(ServerName::from).collect())
    }

    pub(in crate::core::store) async fn set_retry(
        &self,
        destination: &ServerName,
        timings: RetryTimings,
        now: Millis,
    ) -> Result<Option<CacheRow>, StoreError> {
        let mut tx = self.write().await?;
        let done = sqlx::query(
            "INSERT INTO destinations AS old (destination, retry_last_ts, retry_interval, failure_ts)
             VALUES ($1, $2, $3, $4)
             ON CONFLICT (destination) DO UPDATE
             SET retry_last_ts = EXCLUDED.retry_last_ts, retry_interval = EXCLUDED.retry_interval,
                 failure_ts = EXCLUDED.failure_ts
             WHERE EXCLUDED.retry_interval = 0 OR EXCLUDED.retry_last_ts = 0
                OR old.retry_interval IS NULL OR old.retry_interval < EXCLUDED.retry_interval
                OR old.retry_last_ts < EXCLUDED.retry_last_ts",
        )
        .bind(destination.as_str())
        .bind(timings.last_tried.0)
        .bind(timings.interval)
        .bind(timings.failing_since.map(|since| since.0))
        .execute(&mut *tx)
        .await?;
        if done.rows_affected() == 0 {
            return Ok(None);
        }
        let token: i64 = sqlx::query_scalar(
            "INSERT INTO cache_invalidation_stream_by_instance (instance_name, cache_func, keys, invalidation_ts)
             VALUES ($1, 'get_destination_retry_timings', $2, $3) RETURNING stream_id",
        )
        .bind(self.me.as_str())
        .bind(rows([destination.as_str()]))
        .bind(now.0)
        .fetch_one(&mut *tx)
        .await?;
        tx.commit().await?;
        Ok(Some(CacheRow {
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
            .fetch_all(&self.readers)
            .await?;
        Ok(names.into_iter().map(ServerName::from).collect())
    }
}
