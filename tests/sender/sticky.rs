//! Sticky events: who must still be sent them, and in which order with all else.

use std::time::Duration;

use crate::{
    homeserver::Homeserver,
    remote::{Remotes, Reply},
    running::{Settings, start_beside},
    until,
};

const HOUR: Duration = Duration::from_hours(1);

#[tokio::test]
async fn a_server_that_returns_is_sent_the_living_ones_again_once_it_has_its_join() {
    let Some(mut homeserver) = Homeserver::new().await else {
        return;
    };
    let remotes = Remotes::start().await;
    let remote = remotes.add();
    homeserver.room("!a", &[&remote]).await;
    homeserver.all_is_sent().await;
    let dead = homeserver.sticky("!a", 1, HOUR).await;
    let living = homeserver.sticky("!a", 3, HOUR).await;
    let running = start_beside(&homeserver, Settings::default()).await;
    remote.accepts(&living[2]).await;
    let first_time = remote.accepted();
    assert_eq!(first_time, [&dead[..], &living].concat());

    homeserver.expire(&dead).await;
    homeserver.membership("!a", &remote, "leave").await;
    let join = homeserver.membership("!a", &remote, "join").await;
    homeserver.announce().await;
    until("it is asked twice for its join", async || {
        remote.asked() == [join.clone(), join.clone()]
    })
    .await;
    let live = homeserver.message("!a").await;
    homeserver.announce().await;
    assert_eq!(remote.accepted(), first_time, "it does not know its join yet");
    remote.knows(&join);
    remote.accepts(&live).await;
    running.drain().await;
    assert_eq!(remote.accepted()[4..], [&living[..], &[live]].concat());
    let pushed: Vec<_> = remote.transactions().iter().map(|sent| sent.pdus.len()).collect();
    assert_eq!(pushed[pushed.len() - 3..], [1, 2, 1], "one event alone first");
    assert_eq!(homeserver.backlog().await, [""; 0]);
}

#[tokio::test]
async fn what_expires_while_a_server_fails_is_not_sent_to_it() {
    let Some(mut homeserver) = Homeserver::new().await else {
        return;
    };
    let remotes = Remotes::start().await;
    let remote = remotes.add();
    homeserver.room("!a", &[&remote]).await;
    let short = homeserver.sticky("!a", 1, HOUR).await;
    let long = homeserver.sticky("!a", 1, HOUR).await;
    homeserver.all_is_sent().await;
    homeserver
        .run(&format!(
            "INSERT INTO destination_rooms_sticky_events_backlog VALUES ('{}', '!a', 1)",
            remote.name
        ))
        .await;
    remote.answers(|_| Reply::Refuse(503));
    let running = start_beside(&homeserver, Settings::default()).await;
    remote.gets(1).await;
    assert_eq!(remote.transactions()[0].pdus, [&short[..], &long].concat());
    homeserver.expire(&short).await;
    // What comes next may be made of an older look at the table; what comes after that is not.
    remote.gets(remote.transactions().len() + 2).await;
    remote.answers(|_| Reply::Accept);
    remote.accepts(&long[0]).await;
    running.drain().await;
    assert_eq!(remote.accepted(), long);
}

#[tokio::test]
async fn a_live_event_does_not_overtake_the_backlog_through_a_restart() {
    let Some(mut homeserver) = Homeserver::new().await else {
        return;
    };
    let remotes = Remotes::start().await;
    let remote = remotes.add();
    homeserver.room("!a", &[]).await;
    let sticky = homeserver.sticky("!a", 60, HOUR).await;
    homeserver.all_is_sent().await;
    let join = homeserver.membership("!a", &remote, "join").await;
    remote.knows(&join);
    let live = homeserver.message("!a").await;
    remote.answers(|transaction| {
        if transaction.pdus.len() == 50 {
            Reply::Hold
        } else {
            Reply::Accept
        }
    });
    let running = start_beside(&homeserver, Settings::default()).await;
    remote.gets(2).await;
    running.stop().await;
    assert_eq!(remote.accepted(), sticky[..1]);
    assert_eq!(homeserver.backlog().await, [format!("{} !a 2", remote.name)]);

    remote.answers(|_| Reply::Accept);
    let running = start_beside(&homeserver, Settings::default()).await;
    remote.accepts(&live).await;
    running.drain().await;
    assert_eq!(remote.accepted(), [&sticky[..], &[live]].concat());
    assert_eq!(homeserver.backlog().await, [""; 0]);
}

#[tokio::test]
async fn a_sticky_event_that_a_server_cannot_stomach_is_given_up_alone() {
    let Some(mut homeserver) = Homeserver::new().await else {
        return;
    };
    let remotes = Remotes::start().await;
    let remote = remotes.add();
    homeserver.room("!a", &[&remote]).await;
    let mut sticky = homeserver.sticky("!a", 10, HOUR).await;
    homeserver.all_is_sent().await;
    homeserver
        .run(&format!(
            "INSERT INTO destination_rooms_sticky_events_backlog VALUES ('{}', '!a', 1)",
            remote.name
        ))
        .await;
    let poison = sticky.remove(4);
    {
        let poison = poison.clone();
        remote.answers(move |transaction| {
            if transaction.pdus.contains(&poison) {
                Reply::Refuse(400)
            } else {
                Reply::Accept
            }
        });
    }
    let running = start_beside(&homeserver, Settings::default()).await;
    remote.accepts(&sticky[8]).await;
    until("nothing is left of the backlog", async || {
        homeserver.backlog().await.is_empty()
    })
    .await;
    let metrics = running.metrics.clone();
    running.drain().await;
    assert_eq!(remote.accepted(), sticky);
    assert_eq!(metrics.sticky_backlog_abandoned.get(), 1);
    assert_eq!(homeserver.cache_rows().await, [0_i64; 0]);
    assert!(!remote.asked().contains(&poison), "nobody waits until it has that");
}

#[tokio::test]
async fn nobody_waits_until_a_server_has_what_it_answered_with_an_error() {
    let Some(mut homeserver) = Homeserver::new().await else {
        return;
    };
    let remotes = Remotes::start().await;
    let remote = remotes.add();
    homeserver.room("!a", &[&remote]).await;
    let sticky = homeserver.sticky("!a", 51, HOUR).await;
    homeserver.all_is_sent().await;
    homeserver
        .run(&format!(
            "INSERT INTO destination_rooms_sticky_events_backlog VALUES ('{}', '!a', 1)",
            remote.name
        ))
        .await;
    remote.answers(|transaction| {
        if transaction.pdus.len() == 50 {
            Reply::Errors
        } else {
            Reply::Accept
        }
    });
    let running = start_beside(&homeserver, Settings::default()).await;
    remote.accepts(&sticky[50]).await;
    running.drain().await;
    assert_eq!(remote.accepted(), sticky[50..]);
    assert_eq!(remote.asked(), [""; 0]);
}
