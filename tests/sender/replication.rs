//! What is heard on the channel, and what is said there.

use std::time::Duration;

use burdock::{
    core::{clock, store::StoreError},
    sender::SenderError,
};

use tokio::time::timeout;

use crate::{
    PATIENCE,
    homeserver::{Homeserver, ME},
    remote::{Remotes, Reply},
    running::{Settings, start_beside},
    until,
};

#[tokio::test]
async fn news_of_a_new_server_has_its_backlog_sent_at_once() {
    let Some(mut homeserver) = Homeserver::new().await else {
        return;
    };
    let remotes = Remotes::start().await;
    let remote = remotes.add();
    homeserver.room("!a", &[&remote]).await;
    let sticky = homeserver.sticky("!a", 2, Duration::from_hours(1)).await;
    homeserver.all_is_sent().await;
    let message = homeserver.message("!a").await;
    let running = start_beside(&homeserver, Settings::default()).await;
    remote.accepts(&message).await;
    // Looks at the whole table, of which there are some after a start, pass over who backs off in the table's opinion.
    // The sender does not know of that.
    homeserver
        .run(&format!(
            "INSERT INTO destinations (destination, retry_last_ts, retry_interval) VALUES ('{0}', {1}, 3600000)
             ON CONFLICT (destination) DO UPDATE
             SET retry_last_ts = EXCLUDED.retry_last_ts, retry_interval = EXCLUDED.retry_interval;
             INSERT INTO destination_rooms_sticky_events_backlog VALUES ('{0}', '!a', 1)",
            remote.name,
            clock::now().wall.0
        ))
        .await;
    homeserver.say(&format!("NEW_SERVER_JOINED {} !a", remote.name)).await;
    remote.accepts(&sticky[1]).await;
    assert_eq!(remote.accepted(), [&[message], &sticky[..]].concat());
    until("nothing is left of the backlog", async || {
        homeserver.backlog().await.is_empty()
    })
    .await;
    running.drain().await;
}

/// Both ways in which other processes tell that a server was heard of, and one that the sender has not met yet.
#[tokio::test]
async fn a_back_off_that_another_process_ended_is_over() {
    let Some(mut homeserver) = Homeserver::new().await else {
        return;
    };
    let remotes = Remotes::start().await;
    let (by_cache, by_command, not_met) = (remotes.add(), remotes.add(), remotes.add());
    homeserver.room("!b", &[&not_met]).await;
    let owed_before = homeserver.message("!b").await;
    homeserver.room("!a", &[&by_cache, &by_command]).await;
    homeserver.all_is_sent().await;
    let now = clock::now().wall.0;
    for server in [&by_cache, &by_command, &not_met] {
        homeserver
            .run(&format!(
                "INSERT INTO destinations (destination, retry_last_ts, retry_interval, failure_ts)
                 VALUES ('{}', {now}, 3600000, {now})",
                server.name
            ))
            .await;
    }
    homeserver
        .run(&format!(
            "INSERT INTO destination_rooms (destination, room_id, stream_ordering) VALUES ('{}', '!b', {})",
            not_met.name,
            &owed_before[1..]
        ))
        .await;
    let owed = homeserver.message("!a").await;
    let running = start_beside(&homeserver, Settings::default()).await;
    for server in [&by_cache, &by_command] {
        until("it is recorded as owed", async || {
            !homeserver.owed(server).await.is_empty()
        })
        .await;
    }
    assert_eq!(by_cache.connections() + by_command.connections(), 0);

    let reset = "UPDATE destinations SET retry_last_ts = 0, retry_interval = 0, failure_ts = NULL WHERE destination =";
    homeserver.run(&format!("{reset} '{}'", by_cache.name)).await;
    homeserver.say("POSITION caches master 0 0").await;
    homeserver
        .say(&format!(
            r#"RDATA caches master 1 ["get_destination_retry_timings",["{}"],1]"#,
            by_cache.name
        ))
        .await;
    by_cache.accepts(&owed).await;
    assert_eq!(by_command.connections(), 0);

    for (server, owed) in [(by_command, owed), (not_met, owed_before)] {
        homeserver.run(&format!("{reset} '{}'", server.name)).await;
        homeserver.say(&format!("REMOTE_SERVER_UP {}", server.name)).await;
        server.accepts(&owed).await;
    }
    running.drain().await;
    assert_eq!(homeserver.cache_rows().await, [0_i64; 0], "none of it was our doing");
}

#[tokio::test]
async fn the_end_of_a_back_off_of_ours_is_told_once_and_after_it_is_written() {
    let Some(mut homeserver) = Homeserver::new().await else {
        return;
    };
    let remotes = Remotes::start().await;
    let remote = remotes.add();
    homeserver.room("!a", &[&remote]).await;
    homeserver.all_is_sent().await;
    let message = homeserver.message("!a").await;
    let mut failures = 0;
    remote.answers(move |_| {
        failures += 1;
        if failures <= 3 { Reply::Refuse(404) } else { Reply::Hold }
    });
    let running = start_beside(&homeserver, Settings::default()).await;
    remote.gets(4).await;
    homeserver.asks_for_positions().await;
    assert_eq!(homeserver.heard("REMOTE_SERVER_UP"), [""; 0]);
    assert_eq!(
        homeserver.heard("RDATA caches").len(),
        3,
        "one for each step of back-off"
    );
    remote.answers(|_| Reply::Accept);
    let mut blocker = homeserver.pool().begin().await.unwrap();
    sqlx::query("LOCK TABLE cache_invalidation_stream_by_instance IN EXCLUSIVE MODE")
        .execute(&mut *blocker)
        .await
        .unwrap();
    remote.release();
    timeout(PATIENCE, homeserver.until_waiting())
        .await
        .expect("the end of the back-off is to be written");
    homeserver.asks_for_positions().await;
    assert_eq!(homeserver.heard("REMOTE_SERVER_UP"), [""; 0], "it is not written yet");
    blocker.rollback().await.unwrap();
    let up = format!("REMOTE_SERVER_UP {}", remote.name);
    homeserver.hears(&up).await;
    let destination = "SELECT retry_last_ts, retry_interval, failure_ts FROM destinations";
    assert_eq!(homeserver.rows(destination).await, ["(0,0,)"]);

    remote.accepts(&message).await;
    let last = homeserver.message("!a").await;
    homeserver.announce().await;
    remote.accepts(&last).await;
    let position = homeserver.asks_for_positions().await;
    assert_eq!(homeserver.heard("REMOTE_SERVER_UP"), [up]);
    let rows = homeserver.cache_rows().await;
    assert_eq!(rows.len(), 4);
    let lines: Vec<_> = homeserver.heard("RDATA caches");
    for (line, token) in lines.iter().zip(&rows) {
        let start = format!(
            r#"RDATA caches {ME} {token} ["get_destination_retry_timings",["{}"],"#,
            remote.name
        );
        assert!(line.starts_with(&start), "{line} for {start}");
    }
    assert_eq!(lines.len(), rows.len());
    assert_eq!(position, format!("POSITION caches {ME} {0} {0}", rows[3]));
    running.drain().await;
}

#[tokio::test]
async fn an_acknowledgement_that_is_not_ours_ends_it() {
    let Some(homeserver) = Homeserver::new().await else {
        return;
    };
    let running = start_beside(&homeserver, Settings::default()).await;
    homeserver.say("FEDERATION_ACK another 5").await;
    homeserver.asks_for_positions().await;
    homeserver.say(&format!("FEDERATION_ACK {ME} 5")).await;
    let error = running.ends().await.expect_err("a twin is alive");
    let text = error.to_string();
    assert!(
        text.starts_with("another federation sender runs under our instance name sender"),
        "{text}"
    );
}

#[tokio::test]
async fn it_ends_when_its_place_is_taken() {
    let Some(mut homeserver) = Homeserver::new().await else {
        return;
    };
    let remotes = Remotes::start().await;
    let remote = remotes.add();
    homeserver.room("!a", &[&remote]).await;
    homeserver.all_is_sent().await;
    let running = start_beside(&homeserver, Settings::default()).await;
    let message = homeserver.message("!a").await;
    homeserver.announce().await;
    remote.accepts(&message).await;
    homeserver.run("DELETE FROM federation_stream_position").await;
    homeserver.message("!a").await;
    homeserver.announce().await;
    let ended = running.ends().await;
    assert!(
        matches!(ended, Err(SenderError::Store(StoreError::TakenOver))),
        "{ended:?}"
    );
}
