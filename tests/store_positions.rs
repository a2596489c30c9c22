//! Where an instance resumes, and the checkpoint, as Synapse's own sender would find them.

#[macro_use]
#[path = "support/database.rs"]
mod database;

use burdock::core::{
    clock::Millis,
    id::{InstanceName, RoomId, ServerName, StreamOrdering},
    store::{Checkpoint, EventCursor, StoreError},
};
use database::TestDatabase;

const POSITIONS: &str = "SELECT * FROM federation_stream_position ORDER BY type, instance_name";
const INSTANCES: &str = "SELECT instance_name, event_cursor, delta_cursor FROM burdock.instances \
     WHERE event_cursor IS NOT NULL OR delta_cursor IS NOT NULL ORDER BY 1";
const DESTINATIONS: &str = "SELECT * FROM destinations ORDER BY 1";
const DESTINATION_ROOMS: &str = "SELECT * FROM destination_rooms ORDER BY 1, 2";

fn names(names: &[&str]) -> Vec<InstanceName> {
    names.iter().map(|name| InstanceName::from(*name)).collect()
}

fn cursor(position: i64, ours: bool, deltas: Option<i64>) -> EventCursor {
    EventCursor {
        position: StreamOrdering(position),
        ours,
        deltas: deltas.map(StreamOrdering),
    }
}

fn at(cursor: i64, delta_cursor: Option<i64>) -> Checkpoint {
    Checkpoint {
        cursor: StreamOrdering(cursor),
        delta_cursor: delta_cursor.map(StreamOrdering),
        ..Checkpoint::default()
    }
}

fn successful(destination: &str, ordering: i64) -> (ServerName, StreamOrdering) {
    (ServerName::from(destination), StreamOrdering(ordering))
}

fn owed(destination: &str, room: &str, ordering: i64) -> (ServerName, RoomId, StreamOrdering) {
    (
        ServerName::from(destination),
        RoomId::from(room),
        StreamOrdering(ordering),
    )
}

on_both_engines! {
async fn the_first_start_takes_over_the_main_processs_positions(db: TestDatabase) {
    let store = db.store("fed1").await;
    db.run("UPDATE federation_stream_position SET stream_id = 40 WHERE type = 'events'")
        .await;
    assert_eq!(
        store.adopt_positions(&names(&["fed1"])).await,
        Ok(cursor(40, false, None))
    );
    assert_eq!(db.rows(POSITIONS).await, ["(events,40,fed1)", "(federation,-1,fed1)"]);
    // Nothing of ours is claimed before it is done.
    assert_eq!(
        store.adopt_positions(&names(&["fed1"])).await,
        Ok(cursor(40, false, None))
    );

    store.checkpoint(&at(41, Some(39))).await.unwrap();
    assert_eq!(
        store.adopt_positions(&names(&["fed1"])).await,
        Ok(cursor(41, true, Some(39)))
    );
    // Synapse's sender was at work meanwhile.
    db.run("UPDATE federation_stream_position SET stream_id = 50 WHERE type = 'events'")
        .await;
    assert_eq!(
        store.adopt_positions(&names(&["fed1"])).await,
        Ok(cursor(50, false, Some(39)))
    );
}
}

on_both_engines! {
async fn a_second_instance_starts_where_the_first_one_was(db: TestDatabase) {
    let (one, two) = (db.store("fed1").await, db.store("fed2").await);
    let both = names(&["fed2", "fed1"]);
    one.adopt_positions(&names(&["fed1"])).await.unwrap();
    one.checkpoint(&at(100, Some(90))).await.unwrap();

    // The first of the new set starts, and gets ahead before the second one does.
    assert_eq!(one.adopt_positions(&both).await, Ok(cursor(100, true, Some(90))));
    one.checkpoint(&at(200, Some(190))).await.unwrap();
    assert_eq!(two.adopt_positions(&both).await, Ok(cursor(100, true, Some(90))));
    assert_eq!(
        db.rows(POSITIONS).await,
        [
            "(events,200,fed1)",
            "(events,100,fed2)",
            "(federation,-1,fed1)",
            "(federation,-1,fed2)"
        ]
    );

    // And back to one: it resumes at the lower one, and the other is out.
    assert_eq!(
        one.adopt_positions(&names(&["fed1"])).await,
        Ok(cursor(100, true, Some(90)))
    );
    assert_eq!(db.rows(POSITIONS).await, ["(events,100,fed1)", "(federation,-1,fed1)"]);
    assert_eq!(db.rows(INSTANCES).await, ["(fed1,100,90)"]);
    assert_eq!(two.checkpoint(&at(300, None)).await, Err(StoreError::TakenOver));
}
}

on_both_engines! {
async fn another_order_of_the_same_instances_starts_at_the_lowest(db: TestDatabase) {
    let (one, two) = (db.store("fed1").await, db.store("fed2").await);
    for store in [&one, &two] {
        store.adopt_positions(&names(&["fed1", "fed2"])).await.unwrap();
    }
    one.checkpoint(&at(200, Some(190))).await.unwrap();
    two.checkpoint(&at(100, Some(90))).await.unwrap();
    for (store, resumes) in [
        (&one, cursor(200, true, Some(190))),
        (&two, cursor(100, true, Some(90))),
    ] {
        assert_eq!(store.adopt_positions(&names(&["fed1", "fed2"])).await, Ok(resumes));
    }
    for store in [&one, &two] {
        let lowest = Ok(cursor(100, true, Some(90)));
        assert_eq!(store.adopt_positions(&names(&["fed2", "fed1"])).await, lowest);
    }
}
}

on_both_engines! {
async fn one_that_still_runs_under_the_old_list_writes_nothing_more(db: TestDatabase) {
    let (one, two) = (db.store("fed1").await, db.store("fed2").await);
    for store in [&one, &two] {
        store.adopt_positions(&names(&["fed1", "fed2"])).await.unwrap();
    }
    one.checkpoint(&at(500, Some(500))).await.unwrap();
    two.checkpoint(&at(500, Some(500))).await.unwrap();
    // A third is added, and the first is the first to be started again: destinations move from fed1 to fed2.
    one.adopt_positions(&names(&["fed1", "fed2", "fed3"])).await.unwrap();
    assert_eq!(two.checkpoint(&at(600, Some(600))).await, Err(StoreError::TakenOver));
    let nothing_new = two.record_new_servers(&[], StreamOrdering(600), Millis(1)).await;
    assert_eq!(nothing_new, Err(StoreError::TakenOver));
    let two = db.store("fed2").await;
    let resumed = two.adopt_positions(&names(&["fed1", "fed2", "fed3"])).await;
    assert_eq!(resumed, Ok(cursor(500, true, Some(500))));
    two.checkpoint(&at(600, Some(600))).await.unwrap();
}
}

on_both_engines! {
async fn what_a_foreign_sender_left_is_nobodys_own(db: TestDatabase) {
    let (one, two) = (db.store("fed1").await, db.store("fed2").await);
    let both = names(&["fed1", "fed2"]);
    one.adopt_positions(&names(&["fed1"])).await.unwrap();
    one.checkpoint(&at(100, Some(90))).await.unwrap();
    db.run("UPDATE federation_stream_position SET stream_id = 120 WHERE type = 'events'")
        .await;
    assert_eq!(one.adopt_positions(&both).await, Ok(cursor(120, false, Some(90))));
    assert_eq!(two.adopt_positions(&both).await, Ok(cursor(120, false, Some(90))));
    assert_eq!(db.rows(INSTANCES).await, ["(fed1,,90)", "(fed2,,90)"]);
}
}

on_both_engines! {
async fn instances_that_start_together_agree(db: TestDatabase) {
    let (one, two, three) = (db.store("fed1").await, db.store("fed2").await, db.store("fed3").await);
    db.run("UPDATE federation_stream_position SET stream_id = 7").await;
    let all = names(&["fed1", "fed2", "fed3"]);
    let (a, b, c) = tokio::join!(
        one.adopt_positions(&all),
        two.adopt_positions(&all),
        three.adopt_positions(&all)
    );
    assert_eq!(
        [a, b, c],
        [
            Ok(cursor(7, false, None)),
            Ok(cursor(7, false, None)),
            Ok(cursor(7, false, None))
        ]
    );
    assert_eq!(db.rows(POSITIONS).await.len(), 6);
}
}

on_both_engines! {
async fn a_table_without_positions_is_damaged(db: TestDatabase) {
    let store = db.store("fed1").await;
    db.run("DELETE FROM federation_stream_position").await;
    let Err(StoreError::Damaged { table, .. }) = store.adopt_positions(&names(&["fed1"])).await else {
        panic!("not told")
    };
    assert_eq!(table, "federation_stream_position");
}
}

on_both_engines! {
async fn a_checkpoint_writes_what_synapses_sender_would_have(db: TestDatabase) {
    let store = db.store("fed1").await;
    store.adopt_positions(&names(&["fed1"])).await.unwrap();
    for room in ["!a", "!b"] {
        db.room(room).await;
    }
    db.run(
        "INSERT INTO destinations VALUES ('behind', 5, 6, 4, 3), ('live', NULL, NULL, NULL, 9);
         INSERT INTO destination_rooms VALUES ('behind', '!a', 30), ('behind', '!b', 10)",
    )
    .await;
    let checkpoint = Checkpoint {
        last_successful: vec![
            successful("live", 20),
            successful("never seen", 11),
            successful("live", 21),
        ],
        owed: vec![
            owed("behind", "!b", 15),
            owed("behind", "!b", 25),
            owed("behind", "!a", 20),
            owed("first contact", "!a", 20),
            owed("first contact", "!purged", 20),
        ],
        ..at(50, Some(49))
    };
    store.checkpoint(&checkpoint).await.unwrap();
    assert_eq!(
        db.rows(DESTINATIONS).await,
        [
            "(behind,5,6,4,3)",
            "(\"first contact\",,,,)",
            "(live,,,,21)",
            "(\"never seen\",,,,11)"
        ]
    );
    assert_eq!(
        db.rows(DESTINATION_ROOMS).await,
        ["(behind,!a,30)", "(behind,!b,25)", "(\"first contact\",!a,20)"]
    );
    assert_eq!(db.rows(INSTANCES).await, ["(fed1,50,49)"]);
    assert_eq!(db.rows(POSITIONS).await, ["(events,50,fed1)", "(federation,-1,fed1)"]);

    // Without a delta cursor the old one stays.
    store.checkpoint(&at(51, None)).await.unwrap();
    assert_eq!(db.rows(INSTANCES).await, ["(fed1,51,49)"]);
    assert_eq!(db.rows(POSITIONS).await, ["(events,51,fed1)", "(federation,-1,fed1)"]);
}
}

on_both_engines! {
async fn a_checkpoint_that_was_overtaken_writes_nothing(db: TestDatabase) {
    let store = db.store("fed1").await;
    let checkpoint = Checkpoint {
        last_successful: vec![successful("a", 1)],
        ..at(5, None)
    };
    assert_eq!(store.checkpoint(&checkpoint).await, Err(StoreError::TakenOver));
    assert_eq!(
        (db.rows(DESTINATIONS).await, db.rows(INSTANCES).await),
        (vec![], vec![])
    );
}
}

#[tokio::test]
async fn a_room_that_is_purged_during_the_checkpoint_is_left_out() {
    let Some(db) = TestDatabase::new().await else { return };
    let store = db.store("fed1").await;
    store.adopt_positions(&names(&["fed1"])).await.unwrap();
    for room in ["!a", "!b"] {
        db.room(room).await;
    }
    let checkpoint = Checkpoint {
        owed: vec![owed("d", "!a", 1), owed("d", "!b", 2)],
        ..at(5, None)
    };
    // The purge has deleted the room but not committed: the checkpoint still sees it, and its foreign key waits.
    let mut purge = db.pool().begin().await.unwrap();
    sqlx::query("DELETE FROM rooms WHERE room_id = '!a'")
        .execute(&mut *purge)
        .await
        .unwrap();
    let committed = async {
        db.until_waiting().await;
        purge.commit().await.unwrap();
    };
    let (written, ()) = tokio::join!(store.checkpoint(&checkpoint), committed);
    assert_eq!(written, Ok(()));
    assert_eq!(db.rows(DESTINATION_ROOMS).await, ["(d,!b,2)"]);
}

on_both_engines! {
async fn a_large_checkpoint_is_one_transaction(db: TestDatabase) {
    let store = db.store("fed1").await;
    store.adopt_positions(&names(&["fed1"])).await.unwrap();
    db.room("!a").await;
    let destinations: Vec<String> = (0..10_001).map(|n| format!("s{n}.example")).collect();
    let checkpoint = Checkpoint {
        last_successful: destinations.iter().map(|name| successful(name, 3)).collect(),
        owed: destinations.iter().map(|name| owed(name, "!a", 4)).collect(),
        ..at(5, None)
    };
    store.checkpoint(&checkpoint).await.unwrap();
    let count = "SELECT count(*), min(last_successful_stream_ordering), min(stream_ordering) \
                 FROM destinations JOIN destination_rooms r USING (destination)";
    assert_eq!(db.rows(count).await, ["(10001,3,4)"]);
    // What wrote each row: the same for all. SQLite does not say it.
    if let Some(count) = db.pick(Some("SELECT count(DISTINCT xmin::text) FROM destination_rooms"), None) {
        assert_eq!(db.rows(count).await, ["(1)"]);
    }
}
}
