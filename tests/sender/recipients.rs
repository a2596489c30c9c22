//! Who is sent an event, and when it may go out at all.

use std::time::Duration;

use crate::{
    homeserver::Homeserver,
    remote::Remotes,
    running::{Settings, names, start_beside},
};

#[tokio::test]
async fn a_server_that_is_not_whitelisted_is_not_even_written_down() {
    let Some(mut homeserver) = Homeserver::new().await else {
        return;
    };
    let remotes = Remotes::start().await;
    let (listed, unlisted) = (remotes.add(), remotes.add());
    homeserver.room("!a", &[&listed]).await;
    homeserver.sticky("!a", 1, Duration::from_hours(1)).await;
    homeserver.membership("!a", &unlisted, "join").await;
    let first = homeserver.message("!a").await;
    let whitelist = Some(names(&[&listed]));
    let settings = Settings {
        whitelist,
        ..Settings::default()
    };
    let running = start_beside(&homeserver, settings).await;
    listed.accepts(&first).await;
    let last = homeserver.message("!a").await;
    homeserver.announce().await;
    homeserver.say(&format!("NEW_SERVER_JOINED {}", unlisted.name)).await;
    homeserver.say(&format!("REMOTE_SERVER_UP {}", unlisted.name)).await;
    listed.accepts(&last).await;
    running.drain().await;
    assert_eq!(unlisted.connections(), 0);
    for table in [
        "destinations",
        "destination_rooms",
        "destination_rooms_sticky_events_backlog",
    ] {
        let sql = format!("SELECT * FROM {table} WHERE destination = '{}'", unlisted.name);
        assert_eq!(homeserver.rows(&sql).await, [""; 0], "{table}");
    }
    let successful = format!(
        "SELECT last_successful_stream_ordering FROM destinations WHERE destination = '{}'",
        listed.name
    );
    assert_eq!(homeserver.rows(&successful).await, [format!("({})", &last[1..])]);
}

#[tokio::test]
async fn an_event_above_the_least_position_of_all_writers_waits() {
    let Some(mut homeserver) = Homeserver::new().await else {
        return;
    };
    let remotes = Remotes::start().await;
    let remote = remotes.add();
    homeserver.room("!a", &[&remote]).await;
    homeserver.all_is_sent().await;
    let start = homeserver.position;
    homeserver
        .run(&format!(
            "INSERT INTO stream_positions (stream_name, instance_name, stream_id)
             VALUES ('events', 'w1', {start}), ('events', 'w2', {start})"
        ))
        .await;
    let settings = Settings {
        writers: vec!["w1".into(), "w2".into()],
        ..Settings::default()
    };
    let running = start_beside(&homeserver, settings).await;
    let third = homeserver.message_by("w1", "!a", start + 3).await;
    homeserver
        .say(&format!("POSITION events w1 {start} {}", start + 3))
        .await;
    let first = homeserver.message_by("w2", "!a", start + 1).await;
    homeserver
        .say(&format!("POSITION events w2 {start} {}", start + 1))
        .await;
    remote.accepts(&first).await;
    assert_eq!(
        remote.accepted(),
        std::slice::from_ref(&first),
        "what w2 may still write comes first"
    );
    let second = homeserver.message_by("w2", "!a", start + 2).await;
    homeserver
        .say(&format!("POSITION events w2 {} {}", start + 1, start + 2))
        .await;
    remote.accepts(&third).await;
    assert_eq!(remote.accepted(), [first, second, third]);
    running.drain().await;
    assert_eq!(homeserver.cursor().await, start + 3);
}

#[tokio::test]
async fn while_a_join_of_ours_is_incomplete_its_list_of_servers_counts() {
    let Some(mut homeserver) = Homeserver::new().await else {
        return;
    };
    let remotes = Remotes::start().await;
    let (listed, member) = (remotes.add(), remotes.add());
    homeserver.room("!a", &[&member]).await;
    homeserver.all_is_sent().await;
    let partial = homeserver.message("!a").await;
    homeserver
        .run(&format!(
            "INSERT INTO partial_state_rooms (room_id) VALUES ('!a');
             INSERT INTO partial_state_rooms_servers (room_id, server_name) VALUES ('!a', '{}');
             INSERT INTO partial_state_events (room_id, event_id) VALUES ('!a', '{partial}')",
            listed.name
        ))
        .await;
    let running = start_beside(&homeserver, Settings::default()).await;
    listed.accepts(&partial).await;
    homeserver
        .run("DELETE FROM partial_state_events; DELETE FROM partial_state_rooms_servers; DELETE FROM partial_state_rooms")
        .await;
    let complete = homeserver.message("!a").await;
    homeserver.announce().await;
    member.accepts(&complete).await;
    running.drain().await;
    assert_eq!(listed.accepted(), [partial]);
    assert_eq!(member.accepted(), [complete]);
}
