//! How a sender ends, and that what it waits for holds up nothing else. No Redis and no other server is needed.

use std::time::Duration;

use burdock::sender::SenderError;
use tokio::time::timeout;

use crate::{
    PATIENCE,
    database::{Event, TestDatabase},
    homeserver::ME,
    running::start_alone as start,
    until,
};

#[tokio::test]
async fn one_that_hears_nothing_more_of_replication_ends_badly() {
    let Some(db) = TestDatabase::new().await else { return };
    let running = start(db.store(ME).await).await;
    running.quiet.cancel();
    let ended = running.ends().await;
    assert!(matches!(ended, Err(SenderError::ReplicationEnded)), "{ended:?}");
}

#[tokio::test]
async fn a_slow_statement_does_not_hold_up_the_end() {
    let Some(db) = TestDatabase::new().await else { return };
    let store = db.store(ME).await;
    let mut blocker = db.pool().begin().await.unwrap();
    sqlx::query("LOCK TABLE destination_rooms")
        .execute(&mut *blocker)
        .await
        .unwrap();
    let running = start(store).await;
    timeout(PATIENCE, db.until_waiting())
        .await
        .expect("the scan waits for the table");
    running.drain().await;
    drop(blocker);
}

#[tokio::test]
async fn what_is_owed_does_not_wait_for_an_event_whose_state_is_damaged() {
    let Some(db) = TestDatabase::new().await else { return };
    let store = db.store(ME).await;
    // Nobody listens there: that it was tried shows by its back-off.
    let remote = "127.0.0.1:1";
    db.room("!a").await;
    db.event(&Event::new("$owed", "!a", "@me:us.example", 2)).await;
    db.member(&Event::new("$join", "!a", &format!("@x:{remote}"), 1), "join")
        .await;
    db.event(&Event::new("$newest", "!a", "@me:us.example", 3)).await;
    db.run(&format!(
        "INSERT INTO event_forward_extremities (event_id, room_id) VALUES ('$newest', '!a');
         INSERT INTO event_to_state_groups (event_id, state_group) VALUES ('$newest', 4711);
         INSERT INTO destinations (destination, last_successful_stream_ordering) VALUES ('{remote}', 1);
         INSERT INTO destination_rooms (destination, room_id, stream_ordering) VALUES ('{remote}', '!a', 2);
         UPDATE federation_stream_position SET stream_id = 3 WHERE type = 'events'"
    ))
    .await;
    let running = start(store).await;
    until("the owed event is tried", async || {
        !db.rows("SELECT FROM destinations WHERE retry_interval > 0")
            .await
            .is_empty()
    })
    .await;
    running.drain().await;
}

#[tokio::test]
async fn checkpoints_that_fail_are_not_asked_for_without_a_pause() {
    let Some(db) = TestDatabase::new().await else { return };
    let store = db.store(ME).await;
    let remote = "127.0.0.1:1";
    db.room("!a").await;
    db.member(&Event::new("$join", "!a", &format!("@x:{remote}"), 1), "join")
        .await;
    db.event(&Event::new("$event", "!a", "@me:us.example", 2)).await;
    db.run(&format!(
        "UPDATE event_json SET json = replace(json, '\"prev_events\":[]', '\"prev_events\":[\"$join\"]');
         INSERT INTO state_groups (id, room_id, event_id) VALUES (1, '!a', '$join');
         INSERT INTO state_groups_state (state_group, room_id, type, state_key, event_id)
             VALUES (1, '!a', 'm.room.member', '@x:{remote}', '$join');
         INSERT INTO event_to_state_groups (event_id, state_group) VALUES ('$event', 1);
         UPDATE federation_stream_position SET stream_id = 1 WHERE type = 'events';
         CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION $$full$$; END';
         CREATE TRIGGER refuse BEFORE UPDATE ON burdock.instances FOR EACH ROW
             WHEN (NEW.event_cursor > 1) EXECUTE FUNCTION refuse()"
    ))
    .await;
    let running = start(store).await;
    let failed = || {
        let text = running.metrics.exposition();
        let line = text
            .lines()
            .find(|line| line.contains("checkpoints_total") && line.contains("error"));
        line.and_then(|line| line.rsplit(' ').next()?.parse::<u64>().ok())
            .unwrap_or(0)
    };
    let until = async |count| {
        while failed() < count {
            tokio::task::yield_now().await;
        }
    };
    timeout(PATIENCE, until(2))
        .await
        .expect("what is owed cannot be written");
    assert!(timeout(Duration::from_secs(2), until(10)).await.is_err());
    running.drain().await;
}
