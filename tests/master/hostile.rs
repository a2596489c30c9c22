//! What strangers send that is wrong.

use std::collections::BTreeMap;

use burdock::{
    core::{
        clock,
        event::{self, NewEvent},
        id::{EventId, RoomId, ServerName},
        room_version::RoomVersion,
        signing::SigningKey,
        store::{Sqlite, Store},
    },
    federation::{
        client::{Client, Question, Verb, percent_encoded},
        outcome::Outcome,
        transaction::Body,
    },
};
use bytes::Bytes;
use serde_json::{Value, json};

use super::{
    certificates::Certificates,
    rig::{Server, User, reach},
};

/// A server that others take for `b`, as it signs with `b`'s key.
struct Impostor {
    client: Client,
    name: ServerName,
    key: SigningKey,
    version: RoomVersion,
    room: RoomId,
}

impl Impostor {
    fn of(server: &Server, certificates: &Certificates, room: &RoomId) -> Self {
        let federation = reach(certificates).federation;
        Self {
            client: Client::new(server.name.clone(), server.key.clone(), &federation, 10).expect("a client"),
            name: server.name.clone(),
            key: server.key.clone(),
            version: RoomVersion::of("11").expect("known"),
            room: room.clone(),
        }
    }

    /// An event that follows what the server has, by the rules or not.
    async fn event(&self, from: &Sqlite, sender: &str, kind: &str, state_key: Option<&str>, content: &str) -> String {
        let store = Store::Sqlite(from.clone());
        let newest = store.forward_extremities(&self.room, 10).await.expect("read");
        let prev_events: Vec<EventId> = newest.iter().map(|(id, ..)| id.clone()).collect();
        let state = from.current_state(&self.room).await.expect("read");
        let keys = [
            ("m.room.create", ""),
            ("m.room.power_levels", ""),
            ("m.room.member", sender),
        ];
        let auth_events: Vec<EventId> = keys
            .iter()
            .filter_map(|(kind, key)| state.get(&((*kind).into(), (*key).into())).cloned())
            .collect();
        NewEvent {
            room_id: Some(&self.room),
            kind,
            state_key,
            sender,
            content,
            origin_server_ts: clock::now().wall,
            depth: newest.iter().map(|(_, _, depth)| *depth).max().unwrap_or(0) + 1,
            prev_events: &prev_events,
            auth_events: &auth_events,
            more: &[],
        }
        .json()
    }

    fn signed(&self, json: &str) -> (EventId, String) {
        let signed = event::finish(json, self.version, &self.name, &self.key).expect("an event");
        (signed.event_id, signed.json)
    }

    /// Sends events, and says what was answered of each.
    async fn send(&self, to: &ServerName, txn_id: &str, pdus: &[&str]) -> BTreeMap<EventId, Option<String>> {
        let pdus: Vec<Bytes> = pdus.iter().map(|pdu| Bytes::from((*pdu).to_owned())).collect();
        let body = Body::build(&self.name, clock::now().wall, &pdus);
        match self.client.send(to, txn_id, &body).await {
            Outcome::Accepted(accepted) => accepted
                .results
                .expect("it says what became of each")
                .into_iter()
                .collect(),
            other => panic!("{other:?}"),
        }
    }
}

async fn room_of_two(a: &Server, b: &Server) -> (RoomId, User, User) {
    let (ann, bob) = (a.user("ann").await, b.user("bob").await);
    let room = a.create_room(&ann, json!({})).await;
    b.join(&bob, &room, a).await;
    let met = b.send(&bob, &room, "met", None).await;
    a.waits_for(&room, &[&met]).await;
    (room, ann, bob)
}

#[tokio::test(flavor = "multi_thread")]
async fn each_event_is_answered_for_itself() {
    let certificates = Certificates::new();
    let (a, b) = (
        Server::start(&certificates, 1).await,
        Server::start(&certificates, 2).await,
    );
    let (room, _ann, bob) = room_of_two(&a, &b).await;
    let impostor = Impostor::of(&b, &certificates, &room);
    let stored = Sqlite::open(&a.database(), "reader".into(), a.name.clone())
        .await
        .expect("open");

    let message = |text: &str| json!({ "body": text }).to_string();
    let good = impostor
        .event(&stored, &bob.id, "m.room.message", None, &message("good"))
        .await;
    let (good_id, good) = impostor.signed(&good);
    // Somebody else's key.
    let other = SigningKey::from_seed("a_test", &[77; 32]);
    let forged = impostor
        .event(&stored, &bob.id, "m.room.message", None, &message("forged"))
        .await;
    let forged = event::finish(&forged, impostor.version, &b.name, &other).expect("an event");
    // He is not allowed to.
    let kicking = json!({ "membership": "ban" }).to_string();
    let unauthorised = impostor
        .event(
            &stored,
            &bob.id,
            "m.room.name",
            Some(""),
            &json!({ "name": "mine" }).to_string(),
        )
        .await;
    let (unauthorised_id, unauthorised) = impostor.signed(&unauthorised);
    let ban = impostor
        .event(&stored, &bob.id, "m.room.member", Some("@ann:elsewhere"), &kicking)
        .await;
    let (ban_id, ban) = impostor.signed(&ban);
    // Never in the room.
    let stranger_name = format!("@stranger:{}", b.name);
    let stranger = impostor
        .event(&stored, &stranger_name, "m.room.message", None, &message("hello"))
        .await;
    let (stranger_id, stranger) = impostor.signed(&stranger);
    // It follows what nobody has.
    let mut lost: Value = serde_json::from_str(
        &impostor
            .event(&stored, &bob.id, "m.room.message", None, &message("lost"))
            .await,
    )
    .expect("JSON");
    lost["prev_events"] = json!(["$AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"]);
    let (lost_id, lost) = impostor.signed(&lost.to_string());
    // Changed on the way: only the redacted form is left, and that is taken.
    let changed = impostor
        .event(&stored, &bob.id, "m.room.message", None, &message("as signed"))
        .await;
    let (changed_id, changed) = impostor.signed(&changed);
    let changed = changed.replace("as signed", "as changed");

    let pdus = [
        &good,
        &forged.json,
        &unauthorised,
        &ban,
        &stranger,
        &lost,
        &changed,
        "{}",
        "7",
        r#"{"room_id":"!x"}"#,
    ];
    let answers = impostor.send(&a.name, "1", &pdus.map(|pdu| pdu as &str)).await;
    let why = |id: &EventId| {
        answers
            .get(id)
            .unwrap_or_else(|| panic!("{id} is missing in {answers:?}"))
            .clone()
    };
    assert_eq!(why(&good_id), None);
    assert_eq!(why(&changed_id), None);
    for (id, expected) in [
        (&forged.event_id, "signature"),
        (&unauthorised_id, "not allowed"),
        (&ban_id, "not allowed"),
        (&stranger_id, "not allowed"),
        (&lost_id, "follows events that are not here"),
    ] {
        let why = why(id).unwrap_or_else(|| panic!("{id} was taken"));
        assert!(why.contains(expected), "{why}");
    }
    let held = a.held(&room).await;
    let shown: Vec<&str> = held.iter().map(|event| event.event_id.as_str()).collect();
    assert!(shown.contains(&good_id.as_str()));
    for id in [&forged.event_id, &unauthorised_id, &ban_id, &stranger_id, &lost_id] {
        assert!(!shown.contains(&id.as_str()), "{id}");
    }
    let redacted = held.iter().find(|event| event.event_id == changed_id).expect("held");
    assert!(
        !redacted.json.contains("as changed") && !redacted.json.contains("as signed"),
        "{}",
        redacted.json
    );
    // The same again is answered the same.
    let again = impostor.send(&a.name, "2", &[&good, &unauthorised]).await;
    assert_eq!(again[&good_id], None);
    assert!(again[&unauthorised_id].is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn hostile_requests_get_an_answer_and_harm_nothing() {
    let certificates = Certificates::new();
    let (a, b) = (
        Server::start(&certificates, 1).await,
        Server::start(&certificates, 2).await,
    );
    let (room, ann, bob) = room_of_two(&a, &b).await;
    let impostor = Impostor::of(&b, &certificates, &room);
    let path = percent_encoded(room.as_str());
    let deep = "[".repeat(100_000);
    let bodies: Vec<String> = vec![
        String::new(),
        "{".into(),
        "[]".into(),
        "null".into(),
        r#"{"pdus":7}"#.into(),
        format!(r#"{{"pdus":{deep}"#),
        json!({ "pdus": vec![json!({}); 51] }).to_string(),
        json!({ "edus": vec![json!({}); 101] }).to_string(),
        json!({ "earliest_events": vec!["$x"; 101], "latest_events": [] }).to_string(),
        json!({ "type": "m.room.member", "content": { "membership": "join" }, "sender": bob.id }).to_string(),
    ];
    for (verb, what) in [
        (Verb::Put, "v1/send/txn".to_owned()),
        (Verb::Put, format!("v2/send_join/{path}/$x")),
        (Verb::Put, "v2/send_join/!no/$x".to_owned()),
        (Verb::Post, format!("v1/get_missing_events/{path}")),
        (Verb::Post, "v1/nonsense".to_owned()),
    ] {
        for body in &bodies {
            let question = Question {
                uri: &format!("/_matrix/federation/{what}"),
                body: Some((verb, &Bytes::from(body.clone()))),
                max_answer: 1_000_000,
            };
            let error = match impostor.client.ask(&a.name, question).await {
                Err(error) => error.to_string(),
                // An object in which nothing is asked for is no mistake.
                Ok(_) if what.contains("send/txn") => continue,
                Ok(answer) => panic!("{what} {body:.80}: {}", String::from_utf8_lossy(&answer)),
            };
            assert!(error.starts_with("answered 4"), "{what} {body:.80}: {error}");
        }
    }
    for what in [
        "make_join/!no/@bob:elsewhere".to_owned(),
        format!("make_join/{path}/@bob:elsewhere"),
        format!("make_join/{path}/{}?ver=1", percent_encoded(&bob.id)),
        "event/$nothing".to_owned(),
        "state_ids/!no?event_id=$x".to_owned(),
        format!("state/{path}?event_id=$x"),
        format!("state/{path}"),
        "%00/%ff".to_owned(),
    ] {
        let uri = format!("/_matrix/federation/v1/{what}");
        let question = Question {
            uri: &uri,
            body: None,
            max_answer: 1_000_000,
        };
        let error = impostor
            .client
            .ask(&a.name, question)
            .await
            .expect_err(&what)
            .to_string();
        assert!(error.starts_with("answered 4"), "{what}: {error}");
    }
    for (method, path) in [
        ("POST", "/_matrix/client/v3/createRoom".to_owned()),
        ("PUT", format!("/_matrix/client/v3/rooms/{path}/send/m.x/1")),
        (
            "PUT",
            format!("/_matrix/client/v3/rooms/{path}/state/m.room.power_levels"),
        ),
        ("GET", format!("/_matrix/client/v3/rooms/{path}/state")),
        ("PATCH", "/_matrix/client/v3/createRoom".to_owned()),
        ("GET", "/_matrix/client/v3/sync".to_owned()),
    ] {
        for body in [json!([]), json!("x"), json!({ "preset": 7 }), json!({ "users": 7 })] {
            for token in ["", "nonsense"] {
                let (status, answer) = a.client(method, &path, token, &body).await;
                assert!((400..500).contains(&status), "{method} {path} {answer}");
            }
        }
    }
    let send = format!("/_matrix/client/v3/rooms/{path}/send/m.x/1?org.matrix.msc4354.sticky_duration_ms");
    for wrong in ["=-1", "=3600001", "=x", "=1.5"] {
        let (status, answer) = a.client("PUT", &format!("{send}{wrong}"), &ann.token, &json!({})).await;
        assert_eq!(status, 400, "{wrong} {answer}");
    }
    let path = format!("/_matrix/client/v3/rooms/{path}/send/m.x/2");
    for (content, why) in [
        (json!({ "x": 1.5 }), "no fractions since room version 6"),
        (json!({ "x": "y".repeat(70_000) }), "an event has 65,536 bytes at most"),
    ] {
        let (status, answer) = a.client("PUT", &path, &ann.token, &content).await;
        assert_eq!(status, 400, "{why}: {answer}");
    }
    // It is as it was.
    let after = a.send(&ann, &room, "after", None).await;
    b.waits_for(&room, &[&after]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_must_be_signed_by_who_sends_them() {
    let certificates = Certificates::new();
    let (a, b) = (
        Server::start(&certificates, 1).await,
        Server::start(&certificates, 2).await,
    );
    let federation = reach(&certificates).federation;
    let question = Question {
        uri: "/_matrix/federation/v1/event/$x",
        body: None,
        max_answer: 1_000,
    };
    // It has b's name, and not its key.
    let other = SigningKey::from_seed("a_test", &[9; 32]);
    let forger = Client::new(b.name.clone(), other, &federation, 10).expect("a client");
    let error = forger.ask(&a.name, question).await.expect_err("refused").to_string();
    assert!(error.starts_with("answered 401"), "{error}");
    // Nobody is there who could say what its keys are.
    let nobody = Client::new("127.0.0.1:1".into(), b.key.clone(), &federation, 10).expect("a client");
    let error = nobody.ask(&a.name, question).await.expect_err("refused").to_string();
    assert!(error.starts_with("answered 401"), "{error}");
    let honest = Client::new(b.name.clone(), b.key.clone(), &federation, 10).expect("a client");
    let error = honest
        .ask(&a.name, question)
        .await
        .expect_err("unknown event")
        .to_string();
    assert!(error.starts_with("answered 404"), "{error}");
}
