//! The sender's own tables, as one who follows them sees them.

use std::time::Duration;

use burdock::core::replication::feed::Feed;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::{
    homeserver::Homeserver,
    remote::{Remotes, Reply},
    running::{Settings, start_beside},
    until,
};

/// The rows of a table, from the start.
async fn rows(feed: &Feed, table: &str) -> Vec<Value> {
    let request = feed.read([(table, "-1")]).unwrap();
    let answer = feed.ask(&request, &CancellationToken::new()).await.unwrap();
    let mut answer: Value = serde_json::from_str(&answer).unwrap();
    let mut rows = answer[table].as_array_mut().map(std::mem::take).unwrap();
    rows.drain(..1);
    rows
}

#[tokio::test]
async fn they_show_who_keeps_up_who_fails_and_what_was_sent() {
    let Some(mut homeserver) = Homeserver::new().await else {
        return;
    };
    let remotes = Remotes::start().await;
    let (well, ill) = (remotes.add(), remotes.add());
    homeserver.room("!a", &[&well, &ill]).await;
    homeserver.all_is_sent().await;
    homeserver
        .run(&format!(
            "INSERT INTO destination_rooms_sticky_events_backlog VALUES ('{}', '!a', 1)",
            ill.name
        ))
        .await;
    homeserver.sticky("!a", 1, Duration::from_hours(1)).await;
    ill.answers(|_| Reply::Refuse(503));
    let settings = Settings {
        interval: Duration::from_hours(1),
        ..Settings::default()
    };
    let running = start_beside(&homeserver, settings).await;
    let feed = running.tables.feed(Vec::new());
    let last = homeserver.message("!a").await;
    homeserver.announce().await;
    well.accepts(&last).await;

    let last: i64 = last[1..].parse().unwrap();
    until("one is live and one backs off", async || {
        let rows = rows(&feed, "destinations").await;
        let row = |name: &str| rows.iter().find(|row| row[0] == *name).cloned().unwrap_or_default();
        let (well, ill) = (row(&well.name), row(&ill.name));
        well == json!([well[0], "live", last, 0, 0, null, 0, false])
            && ill == json!([ill[0], "backing_off", ill[2], ill[3], 3_600_000, ill[3], 0, false])
    })
    .await;
    assert_eq!(
        rows(&feed, "destinations").await[0],
        json!([null, null, null, null, null, null, null, true])
    );
    let backlog = rows(&feed, "sticky_backlog").await;
    assert_eq!(backlog[1..], [json!([ill.name, "!a", 1, false])]);
    let sent = rows(&feed, "transactions").await;
    let sent_to = |name: &str| sent.iter().filter(|row| row[1] == *name).cloned().collect::<Vec<_>>();
    let pdus: i64 = sent_to(&well.name).iter().filter_map(|row| row[2].as_i64()).sum();
    assert_eq!(pdus, 2, "{sent:?}");
    assert!(sent_to(&well.name).iter().all(|row| row[4] == "accepted"), "{sent:?}");
    assert!(sent_to(&ill.name).iter().all(|row| row[4] == "failed"), "{sent:?}");
    running.drain().await;
}
