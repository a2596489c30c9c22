//! One process an instance name: an advisory lock that lasts as long as its connection.

use std::time::Duration;

use sha2::{Digest, Sha256};
use sqlx::{Connection, PgConnection, postgres::PgConnectOptions};

use super::{Store, StoreError};

/// How long a start waits for the lock: a process that was just killed leaves it within moments.
const WAIT: Duration = Duration::from_secs(2);

/// How often the connection that holds the lock is tried.
const PING_EVERY: Duration = Duration::from_secs(2);

/// A ping, or a reconnect, that takes longer has failed.
const PING_TIMEOUT: Duration = Duration::from_secs(10);

/// The pause between attempts to take the lock again.
const RECONNECT_EVERY: Duration = Duration::from_secs(1);

/// The lock that says: this process is the instance. Dropping it releases the lock.
pub struct InstanceLock {
    connection: PgConnection,
    options: PgConnectOptions,
    key: i64,
    /// The server process that holds the lock for us.
    backend: i32,
}

impl Store {
    /// Takes the lock of our instance name, on a connection of its own.
    ///
    /// # Errors
    /// [`StoreError::AlreadyRunning`] if another process has it.
    pub async fn lock_instance(&self) -> Result<InstanceLock, StoreError> {
        let options = PgConnectOptions::clone(&self.pool.connect_options());
        let key = key(self.server_name.as_str(), self.me.as_str());
        let (connection, backend) = take(&options, key).await?;
        Ok(InstanceLock {
            connection,
            options,
            key,
            backend,
        })
    }
}

impl InstanceLock {
    /// Watches over the lock, taking it again whenever its connection broke, until another process has it. Returns
    /// then, with [`StoreError::AlreadyRunning`]; the caller must stop at once.
    pub async fn watch(mut self) -> StoreError {
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
                Ok(Ok((connection, backend))) => {
                    (self.connection, self.backend) = (connection, backend);
                    tracing::info!("holding the instance lock again");
                    return None;
                }
                // Our own old backend has not noticed yet that its client is gone: nobody else took over.
                Ok(Err(StoreError::AlreadyRunning(holder))) if holder == self.backend => {}
                Ok(Err(lost @ StoreError::AlreadyRunning(_))) => return Some(lost),
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

/// Connects and takes the lock. Also returns the pid of the server process that now holds it.
async fn take(options: &PgConnectOptions, key: i64) -> Result<(PgConnection, i32), StoreError> {
    let mut connection = PgConnection::connect_with(options).await?;
    // The keepalives free the lock soon after the machine of its holder has vanished from the network.
    let backend: i32 = sqlx::query_scalar(
        "SELECT pg_backend_pid() FROM (SELECT set_config('lock_timeout', $1, false), \
                set_config('statement_timeout', '0', false), \
                set_config('tcp_keepalives_idle', '10', false), set_config('tcp_keepalives_interval', '5', false), \
                set_config('tcp_keepalives_count', '3', false)) settings",
    )
    .bind(WAIT.as_millis().to_string())
    .fetch_one(&mut connection)
    .await?;
    match sqlx::query("SELECT pg_advisory_lock($1)")
        .bind(key)
        .execute(&mut connection)
        .await
    {
        Ok(_) => Ok((connection, backend)),
        // lock_not_available: it was waited for in vain.
        Err(sqlx::Error::Database(e)) if e.code().is_some_and(|code| code == "55P03") => {
            Err(holder(&mut connection, key).await?)
        }
        Err(e) => Err(e.into()),
    }
}

/// Who holds the lock that we waited for.
async fn holder(connection: &mut PgConnection, key: i64) -> Result<StoreError, StoreError> {
    // A 64-bit key is listed as its two halves, and with objsubid 1.
    let pid: Option<i32> = sqlx::query_scalar(
        "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted AND objsubid = 1 \
            AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) \
            AND (classid::int8 << 32) | objid::int8 = $1",
    )
    .bind(key)
    .fetch_optional(connection)
    .await?;
    Ok(match pid {
        Some(pid) => StoreError::AlreadyRunning(pid),
        None => StoreError::Conflict("the instance lock was released just after we gave up waiting for it".into()),
    })
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
