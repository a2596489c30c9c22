//! Destinations that are owed much, or are many.

use std::time::Duration;

use crate::{
    homeserver::Homeserver,
    remote::{Remotes, Reply},
    running::{Settings, start_beside},
    until,
};

#[tokio::test]
async fn a_server_that_was_never_reached_is_caught_up_without_any_traffic() {
    let Some(mut homeserver) = Homeserver::new().await else {
        return;
    };
    let remotes = Remotes::start().await;
    let remote = remotes.add();
    for room in ["!a", "!b"] {
        homeserver.room(room, &[&remote]).await;
    }
    let owed = [homeserver.message("!b").await, homeserver.message("!a").await];
    homeserver.all_is_sent().await;
    homeserver
        .run(&format!(
            "INSERT INTO destinations (destination) VALUES ('{0}');
             INSERT INTO destination_rooms (destination, room_id, stream_ordering)
             VALUES ('{0}', '!a', {2}), ('{0}', '!b', {1})",
            remote.name,
            &owed[0][1..],
            &owed[1][1..]
        ))
        .await;
    let running = start_beside(&homeserver, Settings::default()).await;
    remote.accepts(&owed[1]).await;
    running.drain().await;
    assert_eq!(remote.accepted(), owed);
    let destination = "SELECT last_successful_stream_ordering FROM destinations";
    assert_eq!(homeserver.rows(destination).await, [format!("({})", &owed[1][1..])]);
}

#[tokio::test]
async fn nobody_falls_behind_for_our_absence_however_little_is_kept_for_it() {
    let Some(mut homeserver) = Homeserver::new().await else {
        return;
    };
    let remotes = Remotes::start().await;
    let remote = remotes.add();
    homeserver.room("!a", &[&remote]).await;
    homeserver.all_is_sent().await;
    let messages = homeserver.messages("!a", 300).await;
    let settings = Settings {
        pending: 100,
        ..Settings::default()
    };
    let running = start_beside(&homeserver, settings).await;
    remote.accepts(&messages[299]).await;
    running.drain().await;
    assert!(remote.accepted() == messages, "each once, in order");
}

#[tokio::test]
async fn a_dead_server_costs_no_memory_and_holds_nothing_up() {
    let Some(mut homeserver) = Homeserver::new().await else {
        return;
    };
    let remotes = Remotes::start().await;
    let (dead, alive) = (remotes.add(), remotes.add());
    homeserver.room("!a", &[&dead, &alive]).await;
    homeserver.all_is_sent().await;
    let messages = homeserver.messages("!a", 5_000).await;
    dead.answers(|_| Reply::Hold);
    let settings = Settings {
        pending: 500,
        ..Settings::default()
    };
    let running = start_beside(&homeserver, settings).await;
    alive.accepts(&messages[4_999]).await;
    // The cursor passes what is a row by then.
    until("the dead server is behind", async || {
        homeserver.cursor().await == homeserver.position
    })
    .await;
    until("its queue is let go", async || running.metrics.pending_pdus.get() <= 50).await;
    assert_eq!(homeserver.owed(&dead).await, [format!("(!a,{})", homeserver.position)]);
    assert_eq!(dead.transactions().len(), 1);
    running.stop().await;
}

#[tokio::test]
async fn all_that_are_due_are_tried_at_once_but_for_the_bound_on_connections() {
    const SERVERS: usize = 700;
    let Some(mut homeserver) = Homeserver::new().await else {
        return;
    };
    let remotes = Remotes::start().await;
    let servers: Vec<_> = (0..SERVERS).map(|_| remotes.add()).collect();
    homeserver.room("!a", &[&servers[0]]).await;
    let owed = homeserver.message("!a").await;
    homeserver.all_is_sent().await;
    let names = servers.iter().map(|server| format!("('{}')", server.name));
    homeserver
        .run(&format!(
            "INSERT INTO destinations (destination) VALUES {};
             INSERT INTO destination_rooms (destination, room_id, stream_ordering)
             SELECT destination, '!a', {} FROM destinations",
            names.collect::<Vec<_>>().join(","),
            &owed[1..]
        ))
        .await;
    let settings = Settings {
        max_connecting: 8,
        ..Settings::default()
    };
    let running = start_beside(&homeserver, settings).await;
    until("all have what they are owed", async || {
        servers.iter().all(|server| server.accepted() == [owed.clone()])
    })
    .await;
    assert!(
        (2..=8).contains(&remotes.most_in_setup()),
        "{}",
        remotes.most_in_setup()
    );
    running.drain().await;
    assert_eq!(
        servers.iter().map(|server| server.connections()).sum::<usize>(),
        SERVERS
    );
}

#[tokio::test]
async fn a_server_gets_no_more_of_a_room_than_it_can_be_working_on() {
    let Some(mut homeserver) = Homeserver::new().await else {
        return;
    };
    let remotes = Remotes::start().await;
    let remote = remotes.add();
    homeserver.room("!a", &[&remote]).await;
    homeserver.room("!b", &[&remote]).await;
    homeserver.all_is_sent().await;
    let mut messages = homeserver.messages("!a", 130).await;
    let other = homeserver.message("!b").await;
    remote.stops_working();
    let running = start_beside(&homeserver, Settings::default()).await;
    remote.accepts(&other).await;
    until("it is asked again and again", async || remote.asked().len() > 3).await;
    let first = remote.accepted().len() - 1; // the other room did not wait
    assert!((25..=50).contains(&first), "half a window is taken for queued: {first}");
    assert!(remote.asked().iter().all(|event| *event == messages[first - 1]));

    remote.goes_on_working();
    remote.accepts(&messages[129]).await;
    running.drain().await;
    messages.insert(first, other);
    assert!(remote.accepted() == messages, "each once, in order");
    let sizes: Vec<_> = remote.transactions().iter().map(|sent| sent.pdus.len()).collect();
    let windows = std::iter::successors(Some(130 - first), |left| left.checked_sub(50).filter(|left| *left > 0));
    let expected: Vec<_> = std::iter::once(first + 1)
        .chain(windows.map(|left| left.min(50)))
        .collect();
    assert_eq!(sizes, expected);
}

#[tokio::test]
async fn one_whose_back_off_ends_after_our_start_is_tried_when_it_ends() {
    let Some(mut homeserver) = Homeserver::new().await else {
        return;
    };
    let remotes = Remotes::start().await;
    let remote = remotes.add();
    homeserver.room("!a", &[&remote]).await;
    let owed = homeserver.message("!a").await;
    homeserver.all_is_sent().await;
    let now = burdock::core::clock::now();
    homeserver
        .run(&format!(
            "INSERT INTO destinations (destination, retry_last_ts, retry_interval, failure_ts, last_successful_stream_ordering)
             VALUES ('{0}', {1}, 3000, {1}, 0);
             INSERT INTO destination_rooms (destination, room_id, stream_ordering) VALUES ('{0}', '!a', {2})",
            remote.name,
            now.wall.0,
            &owed[1..]
        ))
        .await;
    let running = start_beside(&homeserver, Settings::default()).await;
    remote.accepts(&owed).await;
    assert!(now.at.elapsed() >= Duration::from_secs(3), "not before it ends");
    running.drain().await;
}
