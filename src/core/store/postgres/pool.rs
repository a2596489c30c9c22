//! The connection to PostgreSQL: how it is opened, what every session is set to, and how a transaction is repeated.

use std::{sync::Arc, time::Duration};

use parking_lot::Mutex;
use sqlx::{
    Connection, PgConnection, PgPool, Transaction,
    postgres::{PgConnectOptions, PgPoolOptions, PgSslMode},
};

use crate::{
    config,
    core::{
        id::{InstanceName, ServerName},
        store::StoreError,
    },
};

/// How often a transaction that met a conflict is tried, as Synapse does.
const ATTEMPTS: u32 = 5;

/// How many rows one statement carries at most.
pub(in crate::core::store) const CHUNK: usize = 10_000;

/// How long a statement waits for a connection, while all are in use or the database is away.
const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(10);

/// A transaction that sits idle this long is ended by the server. Ours never wait for anything but the database.
const IDLE_IN_TRANSACTION: Duration = Duration::from_mins(1);

/// The database of one homeserver, as one sender instance sees it. A clone shares the connections.
#[derive(Clone, Debug)]
pub struct Postgres {
    pub(in crate::core::store) pool: PgPool,
    pub(in crate::core::store) me: InstanceName,
    pub(in crate::core::store) server_name: ServerName,
    /// `allow_unsafe_locale`.
    pub(in crate::core::store) allow_unsafe_locale: bool,
    /// The list of senders that we started under, a name a line; set by `adopt_positions`.
    pub(in crate::core::store) senders: Arc<Mutex<Option<String>>>,
}

impl Postgres {
    /// Opens the database. One connection less than configured is used for statements: `lock_instance` takes
    /// the other.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`] if it cannot be reached, [`StoreError::Incompatible`] for an unknown `sslmode`.
    pub async fn connect(db: &config::Postgres, me: InstanceName, server_name: ServerName) -> Result<Self, StoreError> {
        let options = options(db)?;
        // Tried first without the pool, which would wait for a server that is not there and then not say so.
        PgConnection::connect_with(&options).await?.close().await?;
        let statement_timeout = db.statement_timeout;
        let pool = PgPoolOptions::new()
            .max_connections(db.max_connections.saturating_sub(1).max(1))
            .acquire_timeout(ACQUIRE_TIMEOUT)
            .after_connect(move |connection, _| Box::pin(prepare_session(connection, statement_timeout)))
            .connect_lazy_with(options);
        Ok(Self {
            pool,
            me,
            server_name,
            allow_unsafe_locale: db.allow_unsafe_locale,
            senders: Arc::default(),
        })
    }

    pub(in crate::core::store) async fn close(&self) {
        self.pool.close().await;
    }

    /// A transaction whose statements all see the database as it was at the first of them; a row that another
    /// transaction changed since then cannot be written and ends it with [`StoreError::Conflict`].
    pub(in crate::core::store) async fn begin_snapshot(
        &self,
    ) -> Result<Transaction<'static, sqlx::Postgres>, StoreError> {
        Ok(self.pool.begin_with("BEGIN ISOLATION LEVEL REPEATABLE READ").await?)
    }
}

/// Repeats `attempt` while it ends in a conflict.
pub(in crate::core::store) async fn retrying<T, F>(mut attempt: impl FnMut() -> F) -> Result<T, StoreError>
where
    F: Future<Output = Result<T, StoreError>>,
{
    for _ in 1..ATTEMPTS {
        // Some are 15 kB, and every future on the way to here would hold that twice: also a destination's task, of which
        // there is a new one for nearly every transaction.
        match Box::pin(attempt()).await {
            Err(StoreError::Conflict(reason)) => tracing::debug!(%reason, "repeating a transaction"),
            result => return result,
        }
    }
    Box::pin(attempt()).await
}

/// The connection's parameters. What the configuration leaves out comes from libpq's environment variables, as it does
/// for Synapse.
fn options(db: &config::Postgres) -> Result<PgConnectOptions, StoreError> {
    let mut options = PgConnectOptions::new().application_name("burdock").database(&db.name);
    if let Some(host) = &db.host {
        // libpq's rule: a path is the directory of a Unix socket.
        options = if host.starts_with('/') {
            options.socket(host)
        } else {
            options.host(host)
        };
    }
    if let Some(port) = db.port {
        options = options.port(port);
    }
    if let Some(user) = &db.user {
        options = options.username(user);
    }
    if let Some(password) = &db.password {
        options = options.password(&password.0);
    }
    if let Some(mode) = &db.ssl_mode {
        let mode: PgSslMode = mode.parse().map_err(|_| {
            StoreError::Incompatible(format!(
                "database: args: sslmode: `{mode}` is none of disable, allow, prefer, require, verify-ca, verify-full"
            ))
        })?;
        options = options.ssl_mode(mode);
    }
    if let Some(path) = &db.ssl_root_cert {
        options = options.ssl_root_cert(path);
    }
    if let Some((certificate, key)) = &db.ssl_client {
        options = options.ssl_client_cert(certificate).ssl_client_key(key);
    }
    Ok(options)
}

/// Sets what the statements of this store rely on. By statement and not as a start-up parameter, because connection
/// poolers refuse unknown ones.
async fn prepare_session(connection: &mut PgConnection, statement_timeout: Duration) -> Result<(), sqlx::Error> {
    // An administrator may have given the role another isolation level: the single statements here are written for
    // READ COMMITTED, and what needs more asks for it.
    sqlx::query(
        "SELECT set_config('default_transaction_isolation', 'read committed', false), \
                set_config('statement_timeout', $1, false), \
                set_config('idle_in_transaction_session_timeout', $2, false)",
    )
    .bind(statement_timeout.as_millis().to_string())
    .bind(IDLE_IN_TRANSACTION.as_millis().to_string())
    .execute(connection)
    .await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::config::{self, Secret};

    fn database() -> config::Postgres {
        config::Postgres {
            host: Some("db.example".into()),
            port: Some(5433),
            user: Some("synapse".into()),
            password: Some(Secret("hush".into())),
            name: "homeserver".into(),
            ssl_mode: Some("verify-full".into()),
            ssl_root_cert: None,
            ssl_client: None,
            max_connections: 10,
            statement_timeout: Duration::from_mins(10),
            allow_unsafe_locale: false,
        }
    }

    #[test]
    fn the_configuration_becomes_the_connections_parameters() {
        let options = options(&database()).unwrap();
        assert_eq!(options.get_host(), "db.example");
        assert_eq!(options.get_port(), 5433);
        assert_eq!(options.get_username(), "synapse");
        assert_eq!(options.get_database(), Some("homeserver"));
        assert_eq!(options.get_application_name(), Some("burdock"));
        assert!(matches!(options.get_ssl_mode(), PgSslMode::VerifyFull));
    }

    #[test]
    fn a_path_as_host_is_a_unix_socket() {
        let options = options(&config::Postgres {
            host: Some("/run/postgresql".into()),
            ..database()
        })
        .unwrap();
        assert_eq!(options.get_socket().unwrap().to_str(), Some("/run/postgresql"));
    }

    #[test]
    fn an_unknown_ssl_mode_is_named() {
        let error = options(&config::Postgres {
            ssl_mode: Some("maybe".into()),
            ..database()
        })
        .unwrap_err();
        assert!(error.to_string().contains("`maybe`"), "{error}");
    }

    #[tokio::test]
    async fn a_conflict_is_tried_five_times_and_no_more() {
        let tries = Cell::new(0);
        let result: Result<(), _> = retrying(|| {
            tries.set(tries.get() + 1);
            async { Err(StoreError::Conflict("40001".into())) }
        })
        .await;
        assert_eq!((tries.get(), result), (5, Err(StoreError::Conflict("40001".into()))));
    }

    #[tokio::test]
    async fn another_error_is_not_repeated() {
        let tries = Cell::new(0);
        let result: Result<(), _> = retrying(|| {
            tries.set(tries.get() + 1);
            async { Err(StoreError::TakenOver) }
        })
        .await;
        assert_eq!((tries.get(), result), (1, Err(StoreError::TakenOver)));
    }
}
