//! The store's connection, its checks of the database, our own schema, and the lock of an instance.

#[macro_use]
#[path = "support/database.rs"]
mod database;

use std::time::Duration;

use burdock::{
    config::{Database, Postgres},
    core::{
        id::{InstanceName, ServerName},
        store::{Store, StoreError},
    },
};
use database::{TestDatabase, US};

async fn connect(config: &Postgres) -> Result<Store, StoreError> {
    let config = Database::Postgres(Box::new(config.clone()));
    Store::connect(&config, InstanceName::from("fed1"), ServerName::from(US)).await
}

/// What `check` refuses a database with, after `sql` was run in it.
async fn refusal(sql: &str) -> Option<String> {
    let db = TestDatabase::new().await?;
    db.run(sql).await;
    match db.connect("fed1").await.check().await {
        Err(StoreError::Incompatible(message)) => Some(message),
        other => panic!("expected a refusal after {sql}: {other:?}"),
    }
}

#[tokio::test]
async fn synapses_database_is_accepted() {
    let Some(db) = TestDatabase::new().await else { return };
    assert_eq!(db.connect("fed1").await.check().await, Ok(()));
    // A newer schema that still admits programs of our version.
    db.run("UPDATE schema_version SET version = 96; UPDATE schema_compat_version SET compat_version = 94")
        .await;
    assert_eq!(db.connect("fed1").await.check().await, Ok(()));
}

#[tokio::test]
async fn a_database_we_do_not_know_is_refused_with_the_remedy() {
    let Some(message) = refusal("UPDATE schema_version SET version = 93").await else {
        return;
    };
    assert!(
        message.contains("version 93, and 94 is needed: upgrade Synapse"),
        "{message}"
    );
    let message = refusal("DELETE FROM schema_version").await.unwrap();
    assert!(message.contains("upgrade Synapse"), "{message}");
    let message = refusal("UPDATE schema_compat_version SET compat_version = 95")
        .await
        .unwrap();
    assert!(
        message.contains("version 95, and this Burdock knows 94: upgrade Burdock"),
        "{message}"
    );
    let message = refusal("DROP TABLE destination_rooms_sticky_events_backlog")
        .await
        .unwrap();
    assert!(
        message.contains("`destination_rooms_sticky_events_backlog` is missing: start Synapse"),
        "{message}"
    );
    let message = refusal("DROP TABLE schema_version").await.unwrap();
    assert!(message.contains("no Synapse schema"), "{message}");
}

#[tokio::test]
async fn an_unsafe_locale_is_refused_unless_it_is_allowed() {
    let Some(db) = TestDatabase::new().await else { return };
    // The catalogue is only what `check` reads; nothing is sorted by it here.
    db.run("UPDATE pg_database SET datcollate = 'C.UTF-8' WHERE datname = current_database()")
        .await;
    let store = db.connect("fed1").await;
    let Err(StoreError::Incompatible(message)) = store.check().await else {
        panic!("not refused")
    };
    assert!(
        message.contains("`C.UTF-8`") && message.contains("allow_unsafe_locale"),
        "{message}"
    );
    let store = connect(&Postgres {
        allow_unsafe_locale: true,
        ..db.server()
    })
    .await;
    assert_eq!(store.unwrap().check().await, Ok(()));
}

#[tokio::test]
async fn who_does_not_answer_is_unavailable() {
    let Some(db) = TestDatabase::new().await else { return };
    let config = Postgres {
        name: "no_such_database".into(),
        ..db.server()
    };
    let result = connect(&config).await;
    let Err(StoreError::Unavailable(message)) = result else {
        panic!("{result:?}")
    };
    assert!(message.contains("no_such_database"), "{message}");
}

#[tokio::test]
async fn a_statement_does_not_wait_for_ever() {
    let Some(db) = TestDatabase::new().await else { return };
    let config = Postgres {
        statement_timeout: Duration::from_millis(50),
        ..db.server()
    };
    let store = connect(&config).await.unwrap();
    let mut other = db.pool().begin().await.unwrap();
    sqlx::query("LOCK TABLE federation_stream_position")
        .execute(&mut *other)
        .await
        .unwrap();
    let Err(StoreError::Refused(message)) = store.adopt_positions(&[InstanceName::from("fed1")]).await else {
        panic!("waited")
    };
    assert!(message.contains("statement timeout"), "{message}");
    assert_eq!(
        db.rows(
            "SELECT DISTINCT application_name FROM pg_stat_activity \
                 WHERE datname = current_database() AND application_name <> ''"
        )
        .await,
        ["(burdock)"]
    );
}

#[tokio::test]
async fn our_schema_is_made_once_and_nothing_is_put_into_synapses() {
    let Some(db) = TestDatabase::new().await else { return };
    let tables = "SELECT table_schema, table_name FROM information_schema.tables \
                  WHERE table_schema NOT IN ('pg_catalog', 'information_schema') ORDER BY 1, 2";
    let before = db.rows(tables).await;
    // Instances that start at the same moment.
    let stores = [
        db.connect("fed1").await,
        db.connect("fed2").await,
        db.connect("fed3").await,
    ];
    let (a, b, c) = tokio::join!(stores[0].migrate(), stores[1].migrate(), stores[2].migrate());
    assert_eq!([a, b, c], [Ok(()), Ok(()), Ok(())]);
    assert_eq!(stores[0].migrate().await, Ok(()));
    let after: Vec<String> = db
        .rows(tables)
        .await
        .into_iter()
        .filter(|table| !before.contains(table))
        .collect();
    assert_eq!(after, ["(burdock,_sqlx_migrations)", "(burdock,instances)"]);
}

#[tokio::test]
async fn a_schema_of_a_newer_burdock_is_refused() {
    let Some(db) = TestDatabase::new().await else { return };
    let store = db.store("fed1").await;
    db.run("INSERT INTO burdock._sqlx_migrations VALUES (99, 'later', now(), true, '', 0)")
        .await;
    let Err(StoreError::Incompatible(message)) = store.migrate().await else {
        panic!("not refused")
    };
    assert!(message.contains("newer Burdock (step 99"), "{message}");
}

#[tokio::test]
async fn a_missing_right_is_answered_with_the_sql_to_run() {
    let Some(db) = TestDatabase::new().await else { return };
    let role = format!("burdock_poor_{}", std::process::id());
    db.run(&format!(
        "CREATE ROLE \"{role}\" LOGIN; GRANT SELECT ON ALL TABLES IN SCHEMA public TO \"{role}\""
    ))
    .await;
    let config = Postgres {
        user: Some(role.clone()),
        ..db.server()
    };
    let store = connect(&config).await.unwrap();

    let Err(StoreError::Incompatible(message)) = store.migrate().await else {
        panic!("not refused")
    };
    let remedy = format!("CREATE SCHEMA burdock AUTHORIZATION {role};");
    assert!(message.ends_with(&remedy), "{message}");

    // Half of it done: the schema is there, but not the role's.
    db.run("CREATE SCHEMA burdock").await;
    let Err(StoreError::Incompatible(message)) = store.migrate().await else {
        panic!("not refused")
    };
    let remedy = format!("ALTER SCHEMA burdock OWNER TO {role};");
    assert!(message.ends_with(&remedy), "{message}");
    db.run(&remedy).await;
    assert_eq!(store.migrate().await, Ok(()));

    store.close().await;
    db.run(&format!(
        "DROP SCHEMA burdock CASCADE; DROP OWNED BY \"{role}\"; DROP ROLE \"{role}\""
    ))
    .await;
}

on_both_engines! {
async fn an_instance_runs_once(db: TestDatabase) {
    let (first, twin, other) = (
        db.connect("fed1").await,
        db.connect("fed1").await,
        db.connect("fed2").await,
    );
    let lock = first.lock_instance().await.unwrap();
    assert!(matches!(twin.lock_instance().await, Err(StoreError::AlreadyRunning(_))));
    let _other = other
        .lock_instance()
        .await
        .expect("another instance has a lock of its own");
    drop(lock);
    twin.lock_instance().await.expect("a lock ends with what holds it");
}
}

/// Ends the backends that hold advisory locks, as a restart of the server does.
async fn break_locks(db: &TestDatabase) {
    db.rows(
        "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND database = \
             (SELECT oid FROM pg_database WHERE datname = current_database())",
    )
    .await;
}

#[tokio::test]
async fn a_broken_lock_is_taken_again_and_a_lost_one_is_told() {
    let Some(db) = TestDatabase::new().await else { return };
    let (first, twin) = (db.connect("fed1").await, db.connect("fed1").await);
    let mut watch = Box::pin(first.lock_instance().await.unwrap().watch());

    // It notices, and holds the lock again: the twin is still refused.
    break_locks(&db).await;
    assert!(tokio::time::timeout(Duration::from_secs(4), &mut watch).await.is_err());
    assert!(matches!(twin.lock_instance().await, Err(StoreError::AlreadyRunning(_))));

    // The twin is faster.
    break_locks(&db).await;
    let _twins = twin.lock_instance().await.unwrap();
    let lost = tokio::time::timeout(Duration::from_secs(20), watch)
        .await
        .expect("the loss is noticed");
    assert!(matches!(lost, StoreError::AlreadyRunning(_)), "{lost}");
}

on_both_engines! {
async fn the_database_of_another_homeserver_is_refused(db: TestDatabase) {
    let store = db.store("fed1").await;
    db.run(&format!("INSERT INTO users (name) VALUES ('@ann:{US}')")).await;
    assert_eq!(store.check().await, Ok(()));
    db.run("INSERT INTO users (name) VALUES ('@bob:else.example')").await;
    let Err(StoreError::Incompatible(message)) = store.check().await else {
        panic!("accepted")
    };
    assert!(message.contains("@bob:else.example"), "{message}");
    assert!(message.contains(US), "{message}");
}
}
