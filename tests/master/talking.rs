//! Rooms that several servers are in.

use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::json;

use super::{
    certificates::Certificates,
    rig::{Server, encode, until},
};

#[tokio::test(flavor = "multi_thread")]
async fn messages_go_both_ways_and_everybody_holds_what_is_sticky() {
    let certificates = Certificates::new();
    let (a, b) = (
        Server::start(&certificates, 1).await,
        Server::start(&certificates, 2).await,
    );
    let c = Server::start(&certificates, 3).await;
    let (ann, bob, cid) = (a.user("ann").await, b.user("bob").await, c.user("cid").await);
    let room = a
        .create_room(&ann, json!({ "name": "talk", "room_version": "10" }))
        .await;
    // Before anybody else is there: the joiner gets it all the same.
    let early = a.send(&ann, &room, "early", Some(600_000)).await;
    let plain = a.send(&ann, &room, "plain", None).await;
    b.join(&bob, &room, &a).await;
    let held = b.waits_for(&room, &[&early]).await;
    let early_at_b = held
        .iter()
        .find(|event| event.event_id.as_str() == early)
        .expect("held");
    assert!(early_at_b.sticky_until.is_some());
    assert!(
        !held
            .iter()
            .any(|event| event.event_id.as_str() == plain && event.sticky_until.is_some())
    );

    let from_b = b.send(&bob, &room, "from-b", Some(600_000)).await;
    a.waits_for(&room, &[&from_b]).await;
    // Through one, and the other hears of it.
    c.join(&cid, &room, &b).await;
    c.waits_for(&room, &[&early, &from_b]).await;
    let from_c = c.send(&cid, &room, "from-c", Some(600_000)).await;
    for server in [&a, &b] {
        let held = server.waits_for(&room, &[&from_c]).await;
        for sticky in [&early, &from_b, &from_c] {
            let event = held
                .iter()
                .find(|event| event.event_id.as_str() == *sticky)
                .expect("held");
            assert!(event.sticky_until.is_some(), "{} {}", server.name, event.event_id);
        }
    }
    let state = a.state(&ann, &room).await;
    assert_eq!(state, b.state(&bob, &room).await);
    assert_eq!(state, c.state(&cid, &room).await);
    assert!(a.master().transactions() > 0 && b.master().transactions() > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_is_repeated_makes_one_event_and_not_of_another_device() {
    let a = Server::start(&Certificates::new(), 1).await;
    let (ann, eve) = (a.user("ann").await, a.user("eve").await);
    let room = a.create_room(&ann, json!({})).await;
    let join = format!("/_matrix/client/v3/join/{}", encode(room.as_str()));
    a.ask("POST", &join, &eve.token, &json!({})).await;
    let first = a.send(&ann, &room, "one", None).await;
    assert_eq!(a.send(&ann, &room, "one", None).await, first);
    assert_ne!(a.send(&eve, &room, "one", None).await, first);
    assert_eq!(
        a.held(&room)
            .await
            .iter()
            .filter(|event| event.kind == "m.room.message")
            .count(),
        2
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sticky_event_expires() {
    let a = Server::start(&Certificates::new(), 1).await;
    let ann = a.user("ann").await;
    let room = a.create_room(&ann, json!({})).await;
    let id = a.send(&ann, &room, "short", Some(300)).await;
    let path = format!("/_burdock/rooms/{}/events", encode(room.as_str()));
    let sticky = async || {
        let answer = a.ask("GET", &path, &ann.token, &json!({})).await;
        let events = answer["events"].as_array().expect("a list").clone();
        let event = events
            .into_iter()
            .find(|event| event["event_id"] == json!(id))
            .expect("held");
        event["sticky"].as_bool().expect("said")
    };
    until("it is not sticky any more", async || (!sticky().await).then_some(())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fork_comes_to_the_same_state_everywhere() {
    let certificates = Certificates::new();
    let (a, b) = (
        Server::start(&certificates, 1).await,
        Server::start(&certificates, 2).await,
    );
    let (ann, bob) = (a.user("ann").await, b.user("bob").await);
    let levels = json!({ "users": { &ann.id: 100, &bob.id: 100 } });
    let room = a
        .create_room(&ann, json!({ "power_level_content_override": levels }))
        .await;
    b.join(&bob, &room, &a).await;
    let met = b.send(&bob, &room, "met", None).await;
    a.waits_for(&room, &[&met]).await;

    // Neither hears of the other's.
    a.master().pause().await;
    b.master().pause().await;
    let mut sent = Vec::new();
    for n in 0..3 {
        let name = json!({ "name": format!("a{n}") });
        sent.push(a.set_state(&ann, &room, "m.room.name", &name).await);
        sent.push(a.send(&ann, &room, &format!("a{n}"), None).await);
        let (name, topic) = (json!({ "name": format!("b{n}") }), json!({ "topic": format!("b{n}") }));
        sent.push(b.set_state(&bob, &room, "m.room.name", &name).await);
        sent.push(b.set_state(&bob, &room, "m.room.topic", &topic).await);
    }
    a.master().resume().await.expect("open");
    b.master().resume().await.expect("open");
    let sent: Vec<&str> = sent.iter().map(String::as_str).collect();
    // What each of them sends from now on follows both sides of the fork, once it knows them.
    let after_a = a.send(&ann, &room, "after-a", None).await;
    let after_b = b.send(&bob, &room, "after-b", None).await;
    for server in [&a, &b] {
        server.waits_for(&room, &sent).await;
        server.waits_for(&room, &[&after_a, &after_b]).await;
    }
    let state = a.state(&ann, &room).await;
    assert_eq!(state, b.state(&bob, &room).await);
    assert!(
        state
            .iter()
            .any(|(kind, _, id)| kind == "m.room.topic" && sent.contains(&id.as_str()))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn who_is_banned_is_heard_no_more() {
    let certificates = Certificates::new();
    let (a, b) = (
        Server::start(&certificates, 1).await,
        Server::start(&certificates, 2).await,
    );
    let (ann, bob) = (a.user("ann").await, b.user("bob").await);
    let room = a.create_room(&ann, json!({})).await;
    b.join(&bob, &room, &a).await;
    let met = b.send(&bob, &room, "met", None).await;
    a.waits_for(&room, &[&met]).await;

    // While b does not hear of it, its user goes on talking.
    b.master().pause().await;
    let ban = format!("/_matrix/client/v3/rooms/{}/ban", encode(room.as_str()));
    a.ask("POST", &ban, &ann.token, &json!({ "user_id": bob.id })).await;
    let late = b.send(&bob, &room, "late", Some(600_000)).await;
    let held = a.waits_for(&room, &[&late]).await;
    let event = held.iter().find(|event| event.event_id.as_str() == late).expect("held");
    assert!(event.soft_failed);
    let messages = format!("/_matrix/client/v3/rooms/{}/messages?limit=100", encode(room.as_str()));
    let shown = a.ask("GET", &messages, &ann.token, &json!({})).await.to_string();
    assert!(shown.contains(&met) && !shown.contains(&late), "{shown}");

    b.master().resume().await.expect("open");
    // Under another name each time, or it would be the first one again.
    let tries = AtomicUsize::new(0);
    until("the ban is known at b", async || {
        let txn_id = tries.fetch_add(1, Ordering::Relaxed);
        let path = format!(
            "/_matrix/client/v3/rooms/{}/send/m.room.message/no{txn_id}",
            encode(room.as_str())
        );
        let (status, _) = b.client("PUT", &path, &bob.token, &json!({ "body": "no" })).await;
        (status == 403).then_some(())
    })
    .await;
    let join = format!("/_matrix/client/v3/join/{}?via={}", encode(room.as_str()), a.name);
    let (status, answer) = b.client("POST", &join, &bob.token, &json!({})).await;
    assert_eq!(status, 403, "{answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_sent_to_a_server_that_was_down_arrives_and_a_restart_loses_nothing() {
    let certificates = Certificates::new();
    let (mut a, mut b) = (
        Server::start(&certificates, 1).await,
        Server::start(&certificates, 2).await,
    );
    let (ann, bob) = (a.user("ann").await, b.user("bob").await);
    let room = a.create_room(&ann, json!({})).await;
    b.join(&bob, &room, &a).await;
    let met = b.send(&bob, &room, "met", None).await;
    a.waits_for(&room, &[&met]).await;

    b.stop().await;
    let mut sent = Vec::new();
    for n in 0..30 {
        sent.push(
            a.send(&ann, &room, &format!("down{n}"), (n % 3 == 0).then_some(600_000))
                .await,
        );
    }
    a.stop().await;
    a.resume().await;
    b.resume().await;
    let last = a.send(&ann, &room, "last", None).await;
    sent.push(last);
    let sent: Vec<&str> = sent.iter().map(String::as_str).collect();
    let held = b.waits_for(&room, &sent).await;
    for (n, id) in sent.iter().take(30).enumerate() {
        let event = held.iter().find(|event| event.event_id.as_str() == *id).expect("held");
        assert_eq!(event.sticky_until.is_some(), n % 3 == 0, "{n}");
    }
    assert_eq!(a.state(&ann, &room).await, b.state(&bob, &room).await);
    // The token that was given before still holds, and so does the user.
    let whoami = b
        .ask("GET", "/_matrix/client/v3/account/whoami", &bob.token, &json!({}))
        .await;
    assert_eq!(whoami["user_id"], json!(bob.id));
}
