//! What follows from what other servers answer.

use std::time::Duration;

use crate::{
    homeserver::Homeserver,
    remote::{Remotes, Reply, Transaction},
    running::{Settings, start_beside},
    until,
};

/// A server that gives these answers, then accepts; what it got for one message.
async fn tries(homeserver: &mut Homeserver, answers: &'static [u16], settings: Settings) -> Vec<Transaction> {
    let remotes = Remotes::start().await;
    let remote = remotes.add();
    homeserver.room("!a", &[&remote]).await;
    homeserver.all_is_sent().await;
    let message = homeserver.message("!a").await;
    let mut answers = answers.iter();
    remote.answers(move |_| answers.next().map_or(Reply::Accept, |status| Reply::Refuse(*status)));
    let running = start_beside(homeserver, settings).await;
    remote.accepts(&message).await;
    running.drain().await;
    assert_eq!(remote.accepted(), [message]);
    remote.transactions()
}

fn are_the_same(tries: &[Transaction]) -> bool {
    tries
        .iter()
        .all(|one| one.id == tries[0].id && one.body == tries[0].body)
}

#[tokio::test]
async fn a_busy_server_is_asked_again_and_does_not_back_off() {
    let Some(mut homeserver) = Homeserver::new().await else {
        return;
    };
    let tries = tries(&mut homeserver, &[429, 429], Settings::default()).await;
    assert_eq!(tries.len(), 3);
    assert!(are_the_same(&tries), "{tries:?}");
    assert_eq!(homeserver.cache_rows().await, [0_i64; 0]);
}

#[tokio::test]
async fn a_try_that_fails_is_repeated_as_it_was() {
    let Some(mut homeserver) = Homeserver::new().await else {
        return;
    };
    let settings = Settings {
        retries: 2,
        ..Settings::default()
    };
    let tries = tries(&mut homeserver, &[503, 500], settings).await;
    assert_eq!(tries.len(), 3);
    assert!(are_the_same(&tries), "{tries:?}");
    assert_eq!(homeserver.cache_rows().await, [0_i64; 0]);
}

#[tokio::test]
async fn a_refusal_costs_one_step_of_back_off_and_the_next_attempt_is_another_transaction() {
    let Some(mut homeserver) = Homeserver::new().await else {
        return;
    };
    let remotes = Remotes::start().await;
    let remote = remotes.add();
    homeserver.room("!a", &[&remote]).await;
    homeserver.all_is_sent().await;
    let message = homeserver.message("!a").await;
    let mut first = true;
    remote.answers(move |_| {
        if std::mem::take(&mut first) {
            Reply::Refuse(404)
        } else {
            Reply::Hold
        }
    });
    let settings = Settings {
        retries: 2,
        interval: Duration::from_millis(1_234),
        ..Settings::default()
    };
    let running = start_beside(&homeserver, settings).await;
    remote.gets(2).await;
    assert_eq!(homeserver.backoff(&remote).await, 1_234);
    assert_eq!(homeserver.cache_rows().await.len(), 1);
    remote.release();
    remote.accepts(&message).await;
    until("its back-off is over", async || homeserver.backoff(&remote).await == 0).await;
    running.drain().await;
    let ids: Vec<_> = remote.transactions().into_iter().map(|tried| tried.id).collect();
    assert_eq!(ids.len(), 2);
    assert_ne!(ids[0], ids[1]);
    assert_eq!(remote.accepted(), [message]);
}

#[tokio::test]
async fn what_is_too_large_is_halved_until_it_fits() {
    let Some(mut homeserver) = Homeserver::new().await else {
        return;
    };
    let remotes = Remotes::start().await;
    let remote = remotes.add();
    homeserver.room("!a", &[&remote]).await;
    homeserver.all_is_sent().await;
    let messages = homeserver.messages("!a", 20).await;
    remote.answers(|transaction| {
        // Room for about eight.
        if transaction.body.len() > 2_048 {
            Reply::Refuse(413)
        } else {
            Reply::Accept
        }
    });
    let running = start_beside(&homeserver, Settings::default()).await;
    remote.accepts(&messages[19]).await;
    running.drain().await;
    assert_eq!(remote.accepted(), messages);
    let sizes: Vec<_> = remote.transactions().iter().map(|tried| tried.pdus.len()).collect();
    assert_eq!(sizes[..2], [20, 10]);
    assert_eq!(homeserver.cache_rows().await, [0_i64; 0], "that is no failure");
}

#[tokio::test]
async fn what_a_server_cannot_stomach_is_given_up_alone() {
    let Some(mut homeserver) = Homeserver::new().await else {
        return;
    };
    let remotes = Remotes::start().await;
    let remote = remotes.add();
    homeserver.room("!a", &[&remote]).await;
    homeserver.all_is_sent().await;
    let mut messages = homeserver.messages("!a", 20).await;
    let poison = messages.remove(11);
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
    remote.accepts(&messages[18]).await;
    let metrics = running.metrics.clone();
    running.drain().await;
    assert_eq!(remote.accepted(), messages);
    assert_eq!(metrics.pdu_errors.get(), 1);
    assert_eq!(homeserver.cache_rows().await, [0_i64; 0]);
    assert_eq!(homeserver.cursor().await, homeserver.position);
    let tried = remote.transactions();
    assert!(
        tried.iter().any(|tried| tried.pdus == [poison.clone()]),
        "it was tried alone"
    );
}

#[tokio::test]
async fn a_server_that_refuses_everything_is_owed_everything() {
    let Some(mut homeserver) = Homeserver::new().await else {
        return;
    };
    let remotes = Remotes::start().await;
    let remote = remotes.add();
    homeserver.room("!a", &[&remote]).await;
    homeserver.room("!b", &[&remote]).await;
    homeserver.all_is_sent().await;
    let first = homeserver.position + 1;
    homeserver.messages("!a", 5).await;
    homeserver.messages("!b", 3).await;
    remote.answers(|_| Reply::Refuse(400));
    let settings = Settings {
        interval: Duration::from_hours(1),
        ..Settings::default()
    };
    let running = start_beside(&homeserver, settings).await;
    until("it backs off", async || homeserver.backoff(&remote).await > 0).await;
    let metrics = running.metrics.clone();
    running.drain().await;
    assert_eq!(
        homeserver.owed(&remote).await,
        [format!("(!a,{})", first + 4), format!("(!b,{})", first + 7)]
    );
    let destination = "SELECT retry_interval, last_successful_stream_ordering FROM destinations";
    assert_eq!(homeserver.rows(destination).await, [format!("(3600000,{})", first - 1)]);
    assert_eq!(metrics.pdu_errors.get(), 0, "nothing is given up");
    let sizes: Vec<_> = remote.transactions().iter().map(|tried| tried.pdus.len()).collect();
    assert_eq!(sizes, [8, 4, 2, 1, 0]);
}
