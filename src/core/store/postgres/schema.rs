//! Whether this is a database we can work with, and the making of our own schema `burdock` in it.

use sqlx::{
    Connection, PgConnection, Row, SqlSafeStr,
    migrate::{Migration, MigrationType, Migrator},
};

use super::Postgres;
use crate::core::store::StoreError;

/// The version of Synapse's schema that we know: 1.163.2's.
const SCHEMA_VERSION: i32 = 94;

/// The oldest PostgreSQL that Synapse 1.163.2 supports, as `server_version_num` counts.
const OLDEST_SERVER: i32 = 140_000;

/// Guards the creation of our schema against another instance that starts at the same moment (any number that no one
/// else uses: the letters of the name).
const CREATION_LOCK: i64 = 0x0062_7572_646f_636b;

impl Postgres {
    pub(in crate::core::store) async fn check(&self) -> Result<(), StoreError> {
        // to_regclass looks along the search path, so a Synapse that lives in a schema of its own is found as well.
        let row = sqlx::query(
            "SELECT current_setting('server_version_num')::int4 AS server, \
                    pg_encoding_to_char(d.encoding)::text AS encoding, \
                    d.datcollate::text AS collation, d.datctype::text AS ctype, \
                    to_regclass('schema_version') IS NOT NULL \
                        AND to_regclass('schema_compat_version') IS NOT NULL AS synapse, \
                    to_regclass('destination_rooms_sticky_events_backlog') IS NOT NULL AS backlog \
             FROM pg_database d WHERE d.datname = current_database()",
        )
        .fetch_one(&self.pool)
        .await?;
        let server: i32 = row.try_get("server")?;
        if server < OLDEST_SERVER {
            return incompatible(format!(
                "PostgreSQL {}: at least version 14 is needed; upgrade PostgreSQL",
                server / 10_000
            ));
        }
        let (encoding, collation, ctype): (String, String, String) = (
            row.try_get("encoding")?,
            row.try_get("collation")?,
            row.try_get("ctype")?,
        );
        if encoding != "UTF8" {
            return incompatible(format!(
                "the database's encoding is {encoding}, not UTF8: recreate it as Synapse's PostgreSQL page describes"
            ));
        }
        if !self.allow_unsafe_locale && (collation != "C" || ctype != "C") {
            return incompatible(format!(
                "the database's collation is `{collation}` and its ctype `{ctype}`, not `C`: recreate it as Synapse's \
                 PostgreSQL page describes, or set `allow_unsafe_locale: true` under `database:`"
            ));
        }
        if !row.try_get::<bool, _>("synapse")? {
            return incompatible(
                "the database holds no Synapse schema: start Synapse's main process on it first, or correct \
                 `database:`"
                    .into(),
            );
        }
        self.check_versions().await?;
        self.check_server_name().await?;
        // The last change that belongs to version 94; a database from an early 94 lacks it.
        if !row.try_get::<bool, _>("backlog")? {
            return incompatible(
                "table `destination_rooms_sticky_events_backlog` is missing: start Synapse 1.163.2 or later on this \
                 database once, so that it finishes its schema changes"
                    .into(),
            );
        }
        Ok(())
    }

    /// Under another name every event of the database would look like somebody else's, and be passed over for good.
    async fn check_server_name(&self) -> Result<(), StoreError> {
        let stranger: Option<String> =
            sqlx::query_scalar("SELECT name FROM users WHERE substr(name, strpos(name, ':') + 1) <> $1 LIMIT 1")
                .bind(self.server_name.as_str())
                .fetch_optional(&self.pool)
                .await?;
        match stranger {
            Some(user) => incompatible(format!(
                "`server_name` is {}, but the database holds the user {user}: it belongs to another homeserver; correct \
                 `server_name` or `database`",
                self.server_name
            )),
            None => Ok(()),
        }
    }

    pub(in crate::core::store) async fn check_versions(&self) -> Result<(), StoreError> {
        let (version, compat): (Option<i32>, Option<i32>) = sqlx::query_as(
            "SELECT (SELECT max(version) FROM schema_version), (SELECT max(compat_version) FROM schema_compat_version)",
        )
        .fetch_one(&self.pool)
        .await?;
        let version = version.unwrap_or(0);
        if version < SCHEMA_VERSION {
            return incompatible(format!(
                "Synapse's schema has version {version}, and {SCHEMA_VERSION} is needed: upgrade Synapse to 1.163.2 or \
                 later and start its main process before Burdock"
            ));
        }
        match compat {
            Some(compat) if compat > SCHEMA_VERSION => incompatible(format!(
                "Synapse's schema asks for programs that know version {compat}, and this Burdock knows \
                 {SCHEMA_VERSION}: upgrade Burdock"
            )),
            _ => Ok(()),
        }
    }

    pub(in crate::core::store) async fn migrate(&self) -> Result<(), StoreError> {
        // Detached and closed afterwards: neither its search path nor an advisory lock of the migrator's must find
        // its way back into the pool.
        let mut connection = self.pool.acquire().await?.detach();
        let result = migrate_on(&mut connection).await;
        let closed = connection.close().await;
        result?;
        Ok(closed?)
    }
}

fn incompatible<T>(what: String) -> Result<T, StoreError> {
    Err(StoreError::Incompatible(what))
}

async fn migrate_on(connection: &mut PgConnection) -> Result<(), StoreError> {
    let role: String = sqlx::query_scalar("SELECT quote_ident(current_user)")
        .fetch_one(&mut *connection)
        .await?;
    let missing_right = |sql: String| {
        StoreError::Incompatible(format!(
            "Burdock keeps its own tables in the schema `burdock`, and the database user may not make them. Run this \
             in the database as its owner, once: {sql}"
        ))
    };

    // Seen on a live pair: Synapse, too, would then look into our schema first, and take the database for an empty one.
    let shadows: bool =
        sqlx::query_scalar("SELECT current_user = 'burdock' AND current_setting('search_path') LIKE '%$user%'")
            .fetch_one(&mut *connection)
            .await?;
    if shadows {
        return incompatible(
            "the database user is named `burdock`, like our schema, and PostgreSQL looks for tables in the schema of \
             the user's name first: Synapse would no longer find its own. Run this once, and restart Synapse: \
             ALTER ROLE burdock SET search_path = public;"
                .into(),
        );
    }

    // Asked first, because CREATE SCHEMA IF NOT EXISTS demands the right even if there is nothing to create.
    let exists: bool = sqlx::query_scalar("SELECT to_regnamespace('burdock') IS NOT NULL")
        .fetch_one(&mut *connection)
        .await?;
    if !exists {
        // IF NOT EXISTS alone is no protection: of two at once, one fails on a unique index of the catalogue.
        let mut creation = connection.begin().await?;
        sqlx::query("SELECT pg_advisory_xact_lock($1)")
            .bind(CREATION_LOCK)
            .execute(&mut *creation)
            .await?;
        sqlx::query("CREATE SCHEMA IF NOT EXISTS burdock")
            .execute(&mut *creation)
            .await
            .map_err(|e| {
                if lacks_right(&e) {
                    missing_right(format!("CREATE SCHEMA burdock AUTHORIZATION {role};"))
                } else {
                    e.into()
                }
            })?;
        creation.commit().await?;
    }

    // Only ours: the migrator's own table must be looked for and made here and nowhere else.
    sqlx::query("SELECT set_config('search_path', 'burdock', false)")
        .execute(&mut *connection)
        .await?;
    let migrator = Migrator::with_migrations(vec![Migration::new(
        1,
        "instances".into(),
        MigrationType::Simple,
        include_str!("../../../../migrations/postgres/0001_instances.sql").into_sql_str(),
        false,
    )]);
    migrator.run_direct(None, connection, false).await.map_err(|e| match e {
        sqlx::migrate::MigrateError::Execute(e) | sqlx::migrate::MigrateError::ExecuteMigration(e, _)
            if lacks_right(&e) =>
        {
            missing_right(format!("ALTER SCHEMA burdock OWNER TO {role};"))
        }
        sqlx::migrate::MigrateError::VersionMissing(version) => StoreError::Incompatible(format!(
            "the schema `burdock` was made by a newer Burdock (step {version} is unknown here): run that one, or drop \
             the schema, which costs some repeated deliveries"
        )),
        e => StoreError::Unavailable(e.to_string()),
    })
}

/// `insufficient_privilege`; or no schema to create in, which is what one that may not be used counts as in a search path.
fn lacks_right(error: &sqlx::Error) -> bool {
    let code = error.as_database_error().and_then(sqlx::error::DatabaseError::code);
    code.is_some_and(|code| code == "42501" || code == "3F000")
}
