//! Events made, signed and checked, against what Synapse made.

use serde_json::{Value as Json, json};

use super::{tests::vectors, *};
use crate::core::{
    clock::Millis,
    id::ServerName,
    signing::{SigningKey, VerifyKey},
};

fn key() -> SigningKey {
    SigningKey::from_seed("a_test", &std::array::from_fn(|i| u8::try_from(i).unwrap()))
}

fn origin() -> ServerName {
    "origin.example.com".into()
}

fn find(server: &ServerName, key_id: &str) -> Option<VerifyKey> {
    (*server == origin() && key_id == "ed25519:a_test").then(|| key().verify_key())
}

fn parsed(json: &str) -> Json {
    serde_json::from_str(json).unwrap()
}

fn without(event: &Json, keys: &[&str]) -> Json {
    let mut event = event.clone();
    event
        .as_object_mut()
        .unwrap()
        .retain(|key, _| !keys.contains(&key.as_str()));
    event
}

#[test]
fn a_finished_event_is_the_one_that_synapse_makes() {
    let all = vectors();
    for vector in all["events"].as_array().unwrap() {
        let version = RoomVersion::of(vector["room_version"].as_str().unwrap()).unwrap();
        let pdu = &vector["pdu"];
        let bare = without(pdu, &["hashes", "signatures"]).to_string();
        let made = finish(&bare, version, &origin(), &key()).unwrap();
        assert_eq!(parsed(&made.json), *pdu);
        assert_eq!(made.event_id.as_str(), vector["event_id"].as_str().unwrap());
        assert_eq!(canonical_json::encode(&made.json).unwrap(), made.json);

        let received = ReceivedEvent::read(&pdu.to_string(), version).unwrap();
        assert_eq!(*received.event_id(), made.event_id);
        let verified = received.verify(find).unwrap();
        assert!(!verified.redacted);
        assert_eq!(
            without(&parsed(&verified.json), &["unsigned"]),
            without(pdu, &["unsigned"])
        );
        assert_eq!(parsed(&verified.json)["unsigned"], json!({}));
    }
    // Its `age_ts` beside `unsigned` is not hashed.
    let stored = &all["pdu_unsigned_behaviour"]["stored_event"];
    let made = finish(&stored.to_string(), RoomVersion::of("10").unwrap(), &origin(), &key()).unwrap();
    assert_eq!(parsed(&made.json), *stored);
}

/// An event of ours, with the vectors' key.
fn made(kind: &str, content: &str) -> SignedEvent {
    let new = NewEvent {
        room_id: Some(&"!r:x".into()),
        kind,
        state_key: Some("@\"b\u{1}\":é"),
        sender: "@a:origin.example.com",
        content,
        origin_server_ts: Millis(5),
        depth: 3,
        prev_events: &["$p".into(), "$q".into()],
        auth_events: &[],
        more: &[("msc4354_sticky", r#"{"duration_ms":6}"#)],
    };
    finish(&new.json(), RoomVersion::of("10").unwrap(), &origin(), &key()).unwrap()
}

#[test]
fn a_new_event_says_what_it_is_told_to() {
    let event = parsed(&made("m.room.topic", r#"{"topic": "t"}"#).json);
    let expected = json!({
        "type": "m.room.topic", "sender": "@a:origin.example.com", "room_id": "!r:x", "state_key": "@\"b\u{1}\":é",
        "content": {"topic": "t"}, "origin_server_ts": 5, "depth": 3, "prev_events": ["$p", "$q"], "auth_events": [],
        "msc4354_sticky": {"duration_ms": 6},
    });
    assert_eq!(without(&event, &["hashes", "signatures"]), expected);
}

fn read(event: &Json) -> ReceivedEvent {
    ReceivedEvent::read(&event.to_string(), RoomVersion::of("10").unwrap()).unwrap()
}

fn changed(event: &Json, change: &Json) -> Json {
    let mut event = event.clone();
    event
        .as_object_mut()
        .unwrap()
        .extend(change.as_object().unwrap().clone());
    event
}

#[test]
fn an_event_that_was_tampered_with_is_dropped_or_redacted() {
    let event = parsed(&made("m.room.topic", r#"{"topic":"t"}"#).json);
    let verify = |change: Json| read(&changed(&event, &change)).verify(find);
    assert!(
        !verify(json!({"unsigned": {"replaces_state": "$lie"}}))
            .unwrap()
            .redacted
    );

    let other_content = verify(json!({"content": {"topic": "lie"}})).unwrap();
    assert!(other_content.redacted);
    assert_eq!(parsed(&other_content.json)["content"], json!({}));
    assert_eq!(parsed(&other_content.json).get("msc4354_sticky"), None);
    assert_eq!(
        other_content.event_id,
        made("m.room.topic", r#"{"topic":"t"}"#).event_id
    );
    assert!(verify(json!({"msc4354_sticky": {}})).unwrap().redacted);

    assert_eq!(verify(json!({"depth": 4})), Err(SignatureError::Wrong(origin())));
    let other = ServerName::from("other.example");
    assert_eq!(
        verify(json!({"sender": "@a:other.example"})),
        Err(SignatureError::Missing(other))
    );
    let signed = |signatures: Json| verify(json!({"signatures": {"origin.example.com": signatures}}));
    assert_eq!(
        signed(json!({"ed25519:x": "AA"})),
        Err(SignatureError::UnknownKey(origin()))
    );
    assert_eq!(
        signed(json!({"ed25519:a_test": "AA"})),
        Err(SignatureError::Wrong(origin()))
    );
    assert_eq!(
        signed(json!({"rsa:a_test": "AA", "ed25519:n": 1})),
        Err(SignatureError::Missing(origin()))
    );
    assert_eq!(verify(json!({"hashes": {}})), Err(SignatureError::Wrong(origin())));
}

#[test]
fn a_second_signature_stands_beside_the_first() {
    let version = RoomVersion::of("10").unwrap();
    let other = ServerName::from("a.example");
    let content = r#"{"membership":"join","join_authorised_via_users_server":"@u:a.example"}"#;
    let first = made("m.room.member", content);
    let signers = |event: &ReceivedEvent| {
        let one = |signer: &Signer| format!("{} {}", signer.server, signer.key_ids.len());
        event.signers().iter().map(one).collect::<Vec<_>>()
    };
    let once = read(&parsed(&first.json));
    assert_eq!(signers(&once), ["a.example 0", "origin.example.com 1"]);
    assert_eq!(once.verify(find), Err(SignatureError::Missing(other.clone())));

    let second = SigningKey::from_seed("2", &[3; 32]);
    let both = sign(&first.json, version, &other, &second).unwrap();
    assert_eq!(both.event_id, first.event_id);
    let twice = read(&parsed(&both.json));
    assert_eq!(signers(&twice), ["a.example 1", "origin.example.com 1"]);
    let find_both = |server: &ServerName, key_id: &str| {
        find(server, key_id).or_else(|| (*server == other && key_id == "ed25519:2").then(|| second.verify_key()))
    };
    assert!(!twice.verify(find_both).unwrap().redacted);

    let vouched_for = r#"{"membership":"invite","third_party_invite":{"signed":{}}}"#;
    let invite = parsed(&made("m.room.member", vouched_for).json);
    assert!(read(&invite).signers().is_empty());
    // With a wrong hash it is redacted, and nobody vouches for it any more.
    let mut wrong = invite.clone();
    wrong["content"]["x"] = 1.into();
    assert_eq!(signers(&read(&wrong)), ["origin.example.com 1"]);
    for nobody in ["null", "{}", r#"{"signed":null}"#] {
        let content = format!(r#"{{"membership":"invite","third_party_invite":{nobody}}}"#);
        let invite = made("m.room.member", &content);
        assert_eq!(
            signers(&read(&parsed(&invite.json))),
            ["origin.example.com 1"],
            "{nobody}"
        );
    }
    let join = made(
        "m.room.member",
        r#"{"membership":"leave","join_authorised_via_users_server":"@u:a.example"}"#,
    );
    assert_eq!(signers(&read(&parsed(&join.json))), ["origin.example.com 1"]);
}

#[test]
fn what_is_no_event_of_its_room_version_is_refused() {
    let event = parsed(&made("m.room.topic", r#"{"topic":"t"}"#).json);
    let refused = |version: &str, change: Json| {
        ReceivedEvent::read(&changed(&event, &change).to_string(), RoomVersion::of(version).unwrap()).is_err()
    };
    assert!(!refused("10", json!({})));
    assert!(refused("6", json!({"content": {"n": 1.5}})));
    assert!(!refused("5", json!({"content": {"n": 1.5}})));
    assert!(refused("6", json!({"content": {"n": 9_007_199_254_740_992_i64}})));
    assert!(refused("10", json!({"sender": "nobody"})));
    assert!(refused("10", json!({"sender": "@a:x\"y"})));
    assert!(refused("10", json!({"sender": format!("@{}:x", "a".repeat(260))})));
    assert!(refused("10", json!({"content": {"x": "x".repeat(66_000)}})));
    assert!(refused("10", json!({"prev_events": vec!["$p"; 21]})));
    assert!(refused("10", json!({"type": 3})));
}

#[test]
fn an_object_is_signed_without_what_is_not_its_own() {
    let object = r#"{"unsigned":{"b":1},"a":"x","signatures":{"q":{"ed25519:1":"s"}}}"#;
    let signed = parsed(&sign_object(object, &origin(), &key()).unwrap());
    let signature = signed["signatures"]["origin.example.com"]["ed25519:a_test"]
        .as_str()
        .unwrap();
    assert!(key().verify_key().verifies(br#"{"a":"x"}"#, signature));
    assert!(!key().verify_key().verifies(br#"{"a":"y"}"#, signature));
    assert_eq!(signed["signatures"]["q"], json!({"ed25519:1": "s"}));
    let public = public_key();
    assert_eq!(key().verify_key().to_base64(), public);
    assert_eq!(VerifyKey::from_base64(&public), Some(key().verify_key()));
    assert_eq!(VerifyKey::from_base64("AAAA"), None);
}

fn public_key() -> String {
    vectors()["signing_key_file"]["public_key_unpadded_base64"]
        .as_str()
        .unwrap()
        .to_owned()
}
