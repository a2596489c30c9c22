//! One process an instance name: an advisory lock that lasts as long as its connection.

use std::{fmt, time::Duration};

use sha2::{Digest, Sha256};
use sqlx::{ConnectOptions, Connection, PgConnection, postgres::PgConnectOptions};

use super::Postgres;
use crate::core::store::StoreError;

/// How long a start waits for the lock: a process that was just killed leaves it within moments.
const WAIT: Duration = Duration::from_secs(2);

/// How often the connection that holds the lock is tried.
const PING_EVERY: Duration = Duration::from_secs(2);

/// A ping, or a reconnect, that takes longer has failed.
const PING_TIMEOUT: Duration = Duration::from_secs(10);

/// The pause between attempts to take the lock again.
const RECONNECT_EVERY: Duration = Duration::from_secs(1);

/// The lock that says: this process is the instance. Dropping it releases the lock.
pub struct AdvisoryLock {
    connection: PgConnection,
    options: PgConnectOptions,
    key: i64,
    backend: Backend,
}

/// A server process. With its start, because a restarted server counts its pids anew.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Backend {
    pid: i32,
    /// As PostgreSQL writes it.
    started: String,
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PostgreSQL backend {}", self.pid)
    }
}

/// What came of an attempt to take the lock.
enum Attempt {
    /// It is ours, on this connection.
    Taken(PgConnection, Backend),
    /// It is this one's.
    HeldBy(Backend),
}

impl Postgres {
    pub(in crate::core::store) async fn lock_instance(&self) -> Result<AdvisoryLock, StoreError> {
        // To wait for the lock is what this connection is for.
        let options = PgConnectOptions::clone(&self.pool.connect_options()).disable_statement_logging();
        let key = key(self.server_name.as_str(), self.me.as_str());
        match take(&options, key).await? {
            Attempt::Taken(connection, backend) => Ok(AdvisoryLock {
                connection,
                options,
                key,
                backend,
            }),
            Attempt::HeldBy(backend) => Err(StoreError::AlreadyRunning(backend.to_string())),
        }
    }
}

impl AdvisoryLock {
    /// Takes the lock again whenever its connection broke.
    pub(in crate::core::store) async fn watch(mut self) -> StoreError {
        loop {
            tokio::time::sleep(PING_EVERY).await;
            if let Ok(Ok(())) = tokio::time::timeout(PING_TIMEOUT, self.connection.ping()).await {
                continue;
            }
            tracing::warn!("the connection that holds the instance lock broke; taking the lock again");
            if let Some(lost) = self.retake().await {
                return lost;
            }
        }
    }

    /// Takes the lock on a new connection. `Some` if another process has it.
    async fn retake(&mut self) -> Option<StoreError> {
        loop {
            match tokio::time::timeout(PING_TIMEOUT, take(&self.options, self.key)).await {
                Ok(Ok(Attempt::Taken(connection, backend))) => {
                    (self.connection, self.backend) = (connection, backend);
                    tracing::info!("holding the instance lock again");
                    return None;
                }
                // Our own old backend has not noticed yet that its client is gone: nobody else took over.
                Ok(Ok(Attempt::HeldBy(holder))) if holder == self.backend => {}
                Ok(Ok(Attempt::HeldBy(holder))) => return Some(StoreError::AlreadyRunning(holder.to_string())),
                Ok(Err(error)) => tracing::debug!(%error, "no database yet for the instance lock"),
                Err(_) => tracing::debug!("no database yet for the instance lock: timed out"),
            }
            tokio::time::sleep(RECONNECT_EVERY).await;
        }
    }
}

/// The lock's key: advisory locks have no names, only 64 bits that everyone in the database shares.
fn key(server_name: &str, instance: &str) -> i64 {
    let digest = Sha256::digest(format!("burdock\0{server_name}\0{instance}"));
    digest.iter().take(8).fold(0, |key, byte| key << 8 | i64::from(*byte))
}

/// Connects and tries to take the lock.
async fn take(options: &PgConnectOptions, key: i64) -> Result<Attempt, StoreError> {
    let mut connection = PgConnection::connect_with(options).await?;
    // The keepalives free the lock soon after the machine of its holder has vanished from the network.
    sqlx::query(
        "SELECT set_config('lock_timeout', $1, false), set_config('statement_timeout', '0', false), \
                set_config('tcp_keepalives_idle', '10', false), set_config('tcp_keepalives_interval', '5', false), \
                set_config('tcp_keepalives_count', '3', false)",
    )
    .bind(WAIT.as_millis().to_string())
    .execute(&mut connection)
    .await?;
    match sqlx::query("SELECT pg_advisory_lock($1)")
        .bind(key)
        .execute(&mut connection)
        .await
    {
        Ok(_) => {}
        // lock_not_available: it was waited for in vain.
        Err(sqlx::Error::Database(e)) if e.code().is_some_and(|code| code == "55P03") => {}
        Err(e) => return Err(e.into()),
    }
    // A 64-bit key is listed as its two halves, and with objsubid 1. The start of another role's process is hidden.
    let holder: Option<(i32, String, bool)> = sqlx::query_as(
        "SELECT l.pid, coalesce(a.backend_start::text, ''), l.pid = pg_backend_pid() \
         FROM pg_locks l LEFT JOIN pg_stat_activity a ON a.pid = l.pid \
         WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1 \
           AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database()) \
           AND (l.classid::int8 << 32) | l.objid::int8 = $1",
    )
    .bind(key)
    .fetch_optional(&mut connection)
    .await?;
    match holder {
        Some((pid, started, true)) => Ok(Attempt::Taken(connection, Backend { pid, started })),
        Some((pid, started, false)) => Ok(Attempt::HeldBy(Backend { pid, started })),
        None => Err(StoreError::Conflict(
            "the instance lock was released just after we gave up waiting for it".into(),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_instance_of_each_server_has_a_key_of_its_own() {
        assert_ne!(key("a.example", "fed1"), key("a.example", "fed2"));
        assert_ne!(key("a.example", "fed1"), key("b.example", "fed1"));
        assert_eq!(key("a.example", "fed1"), key("a.example", "fed1"));
    }
}
