//! Whether a file is an embedded homeserver's, and its tables.

use sqlx::{Connection, SqliteConnection, sqlite::SqliteConnectOptions};

use super::Sqlite;
use crate::core::store::StoreError;

/// What SQLite keeps in the header of our files, at byte 68: `Brdk`.
pub const APPLICATION_ID: i32 = 0x4272_646b;

/// The steps that lead to the newest schema. `user_version` counts those that were taken.
const STEPS: [&str; 1] = [include_str!("../../../../migrations/sqlite/0001_embedded.sql")];

/// Makes the file if it is not there or empty, and brings one of ours up to date. Any other is left alone.
pub(super) async fn create(options: SqliteConnectOptions) -> Result<(), StoreError> {
    // In SQLite's first kind of journal, which a new file has: with the one used later, the header that tells our files
    // from others would be outside the file for a while.
    let mut connection = SqliteConnection::connect_with(&options).await?;
    let mut transaction = connection.begin_with("BEGIN IMMEDIATE").await?;
    let objects: i64 = sqlx::query_scalar("SELECT count(*) FROM sqlite_schema")
        .fetch_one(&mut *transaction)
        .await?;
    if objects == 0 {
        set_pragma(&mut transaction, "application_id", APPLICATION_ID).await?;
    }
    if is_ours(&mut transaction).await? {
        take_steps(&mut transaction).await?;
    }
    transaction.commit().await?;
    Ok(connection.close().await?)
}

async fn is_ours(connection: &mut SqliteConnection) -> Result<bool, StoreError> {
    let found: i64 = sqlx::query_scalar("PRAGMA application_id")
        .fetch_one(connection)
        .await?;
    Ok(found == i64::from(APPLICATION_ID))
}

/// Takes the steps that have not been taken yet.
async fn take_steps(connection: &mut SqliteConnection) -> Result<(), StoreError> {
    let taken = steps_taken(connection).await?;
    for step in &STEPS[taken..] {
        sqlx::raw_sql(*step).execute(&mut *connection).await?;
    }
    let all = i32::try_from(STEPS.len()).unwrap_or(i32::MAX);
    set_pragma(connection, "user_version", all).await
}

async fn steps_taken(connection: &mut SqliteConnection) -> Result<usize, StoreError> {
    let version: i64 = sqlx::query_scalar("PRAGMA user_version").fetch_one(connection).await?;
    match usize::try_from(version) {
        Ok(taken) if taken <= STEPS.len() => Ok(taken),
        _ => Err(StoreError::Incompatible(format!(
            "the database was made by a newer Burdock (its schema has version {version}, and {} is known here): run that \
             one",
            STEPS.len()
        ))),
    }
}

async fn set_pragma(connection: &mut SqliteConnection, name: &str, value: i32) -> Result<(), StoreError> {
    // A pragma takes no parameters.
    let sql = sqlx::AssertSqlSafe(format!("PRAGMA {name} = {value}"));
    sqlx::query(sql).execute(connection).await?;
    Ok(())
}

impl Sqlite {
    /// Refuses a file that is not an embedded homeserver's.
    pub(super) async fn check_kind(&self) -> Result<(), StoreError> {
        let mut connection = self.readers.acquire().await?;
        if is_ours(&mut connection).await? {
            return Ok(());
        }
        Err(StoreError::Incompatible(format!(
            "{} is no database of an embedded homeserver: name the file that `burdock master` made",
            self.path.display()
        )))
    }

    pub(in crate::core::store) async fn check(&self) -> Result<(), StoreError> {
        self.check_versions().await?;
        // Under another name every event of the database would look like somebody else's, and be passed over for good.
        let stranger: Option<String> =
            sqlx::query_scalar("SELECT name FROM users WHERE substr(name, instr(name, ':') + 1) <> $1 LIMIT 1")
                .bind(self.server_name.as_str())
                .fetch_optional(&self.readers)
                .await?;
        match stranger {
            Some(user) => Err(StoreError::Incompatible(format!(
                "`server_name` is {}, but the database holds the user {user}: it belongs to another homeserver; correct \
                 `server_name` or `database`",
                self.server_name
            ))),
            None => Ok(()),
        }
    }

    pub(in crate::core::store) async fn check_versions(&self) -> Result<(), StoreError> {
        let mut connection = self.readers.acquire().await?;
        steps_taken(&mut connection).await.map(drop)
    }

    pub(in crate::core::store) async fn migrate(&self) -> Result<(), StoreError> {
        let mut transaction = self.write().await?;
        take_steps(&mut transaction).await?;
        Ok(transaction.commit().await?)
    }
}
