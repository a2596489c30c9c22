//! Golden vectors made by Synapse 1.163.2, and the rules they do not reach.

use base64::{Engine, engine::general_purpose::STANDARD_NO_PAD};
use serde_json::{Value as Json, json};

use super::*;
use crate::core::{id::StreamOrdering, signing::SigningKey};

pub(super) fn vectors() -> Json {
    serde_json::from_str(include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/vectors.json"))).unwrap()
}

/// `json` as a row of the database, in a room of that version.
pub(super) fn stored(json: &Json, room_version: &str) -> StoredEvent {
    let text = |key: &str| json[key].as_str().map(str::to_owned);
    StoredEvent {
        stream_ordering: StreamOrdering(1),
        event_id: "$id".into(),
        room_id: text("room_id").unwrap_or_default().into(),
        kind: text("type").unwrap_or_default(),
        state_key: text("state_key"),
        sender: text("sender").unwrap_or_default(),
        room_version: Some(room_version.to_owned()),
        format_version: RoomVersion::of(room_version).map(|version| version.format().number()),
        json: json.to_string(),
        state_group: None,
        partial_state: false,
        send_on_behalf_of: None,
        out_of_band: false,
        proactively_send: true,
        soft_failed: false,
        redacted: false,
        received: None,
    }
}

fn message() -> Json {
    json!({
        "type": "m.room.message", "sender": "@a:x", "room_id": "!r:x", "content": {"body": "hi"}, "depth": 3,
        "origin_server_ts": 5, "prev_events": ["$p"], "auth_events": ["$q"], "hashes": {}, "signatures": {}, "unsigned": {},
    })
}

pub(super) fn with(extra: &Json) -> Json {
    let mut event = message();
    event
        .as_object_mut()
        .unwrap()
        .extend(extra.as_object().unwrap().clone());
    event
}

/// The PDU's JSON. It must already be canonical.
pub(super) fn wire(parsed: &ParsedEvent) -> Json {
    let text = std::str::from_utf8(&parsed.pdu.as_ref().unwrap().bytes).unwrap();
    assert_eq!(canonical_json::encode(text).unwrap(), text);
    serde_json::from_str(text).unwrap()
}

fn ids(list: &Json) -> Vec<EventId> {
    list.as_array()
        .unwrap()
        .iter()
        .map(|id| id.as_str().unwrap().into())
        .collect()
}

#[test]
fn reproduces_the_golden_events() {
    let key = SigningKey::from_seed("a_test", &std::array::from_fn(|i| u8::try_from(i).unwrap()));
    for vector in vectors()["events"].as_array().unwrap() {
        let id = vector["room_version"].as_str().unwrap();
        let version = RoomVersion::of(id).unwrap();
        let pdu = &vector["pdu"];
        assert_eq!(
            version.format().number(),
            i32::try_from(vector["event_format"].as_i64().unwrap()).unwrap()
        );

        let mut event = stored(pdu, id);
        event.room_id = vector["room_id"].as_str().unwrap().into();
        let parsed = parse(&event).unwrap();
        assert_eq!(&wire(&parsed), pdu);
        assert_eq!(parsed.prev_events, ids(&vector["prev_event_ids"]));
        assert_eq!(parsed.auth_events, ids(&vector["auth_event_ids"]));
        assert_eq!(parsed.sticky, pdu.get("msc4354_sticky").is_some());
        assert_eq!(parsed.membership.as_deref(), pdu["content"]["membership"].as_str());
        assert_eq!(
            parsed.replaces_state.as_ref().map(EventId::as_str),
            pdu["unsigned"]["replaces_state"].as_str()
        );
        let sent = parsed.pdu.unwrap();
        assert_eq!(
            (sent.event_id.as_str(), sent.origin_server_ts),
            ("$id", pdu["origin_server_ts"].as_i64().unwrap())
        );

        let redacted = parse_redacted(&event).unwrap();
        assert_eq!(wire(&redacted), vector["redacted_pdu"]);
        assert!(!redacted.sticky);

        assert_eq!(
            event_id(&event.json, version).unwrap().as_str(),
            vector["event_id"].as_str().unwrap()
        );
        let redacted_json = vector["redacted_pdu"].to_string();
        assert_eq!(
            event_id(&redacted_json, version).unwrap().as_str(),
            vector["redacted_event_id"].as_str().unwrap()
        );

        let mut hashed = String::new();
        let canonical = canonical_json::encode(&event.json).unwrap();
        redaction::write(
            &mut hashed,
            Value::of(&canonical),
            &event.kind,
            version,
            redaction::For::Hash,
        );
        assert_eq!(hashed, vector["reference_hash_input_utf8"].as_str().unwrap());
        // An event's signature covers the same bytes.
        let signature = pdu["signatures"]["origin.example.com"]["ed25519:a_test"]
            .as_str()
            .unwrap();
        assert_eq!(STANDARD_NO_PAD.encode(key.sign(&[hashed.as_bytes()])), signature);
    }
}

#[test]
fn unsigned_tells_what_synapse_tells() {
    let vector = &vectors()["pdu_unsigned_behaviour"];
    let parsed = parse(&stored(&vector["stored_event"], "10")).unwrap();
    assert_eq!(wire(&parsed), vector["on_wire_pdu_in_transaction"]);
    assert_eq!(parsed.replaces_state, Some("$X".into()));
}

#[test]
fn null_members_of_unsigned_disappear() {
    let event = with(&json!({"unsigned": {"prev_content": null, "replaces_state": null, "age_ts": 4}}));
    let parsed = parse(&stored(&event, "10")).unwrap();
    assert_eq!(wire(&parsed)["unsigned"], json!({"age_ts": 4}));
    assert_eq!(parsed.replaces_state, None);
    let redacted = parse_redacted(&stored(&event, "10")).unwrap();
    assert_eq!(wire(&redacted)["unsigned"], json!({"age_ts": 4}));
}

#[test]
fn missing_unsigned_and_signatures_become_empty() {
    for extra in [
        json!({}),
        json!({"zzz": 1, "soft": 1}),
        json!({"signatures": {"x": {}}}),
        json!({"unsigned": 1}),
    ] {
        let mut event = message();
        event
            .as_object_mut()
            .unwrap()
            .retain(|key, _| key != "signatures" && key != "unsigned");
        event
            .as_object_mut()
            .unwrap()
            .extend(extra.as_object().unwrap().clone());
        let mut expected = event.clone();
        expected["unsigned"] = json!({});
        if expected.get("signatures").is_none() {
            expected["signatures"] = json!({});
        }
        assert_eq!(wire(&parse(&stored(&event, "10")).unwrap()), expected);
        let redacted = wire(&parse_redacted(&stored(&event, "10")).unwrap());
        assert_eq!(
            (&redacted["unsigned"], &redacted["signatures"]),
            (&json!({}), &expected["signatures"])
        );
    }
}

#[test]
fn unknown_keys_and_odd_numbers_stay() {
    let mut event = stored(&with(&json!({"custom": [1]})), "5");
    event.json = event
        .json
        .replace("\"hi\"", "[1.10, 1E16, 123456789012345678901234567890, -0]");
    let parsed = parse(&event).unwrap();
    let text = String::from_utf8(parsed.pdu.unwrap().bytes.to_vec()).unwrap();
    assert!(
        text.contains(r#""content":{"body":[1.1,1e+16,123456789012345678901234567890,0]},"custom":[1],"#),
        "{text}"
    );
}

#[test]
fn stickiness_follows_the_golden_vectors() {
    for vector in vectors()["sticky_duration"].as_array().unwrap() {
        let parsed = parse(&stored(&with(&vector["extra"]), "11")).unwrap();
        assert_eq!(parsed.sticky, !vector["sticky_duration_ms"].is_null(), "{vector}");
    }
    let huge = stored(&with(&json!({"msc4354_sticky": {"duration_ms": 1}})), "11");
    let huge = StoredEvent {
        json: huge
            .json
            .replace("\"duration_ms\":1", "\"duration_ms\":99999999999999999999"),
        ..huge
    };
    assert!(parse(&huge).unwrap().sticky);
    for bad in [
        json!(1),
        json!([]),
        json!({}),
        json!({"duration_ms": true}),
        json!({"duration_ms": null}),
        json!(null),
    ] {
        assert!(
            !parse(&stored(&with(&json!({"msc4354_sticky": bad})), "11"))
                .unwrap()
                .sticky,
            "{bad}"
        );
    }
}

#[test]
fn an_event_of_unsendable_depth_has_no_pdu() {
    let vector = &vectors()["depth_filter"];
    assert_eq!(vector["dropped"], true);
    let sendable = |depth: &Json| {
        parse(&stored(&with(&json!({"depth": depth})), "10"))
            .unwrap()
            .pdu
            .is_some()
    };
    assert!(!sendable(&vector["depth"]));
    assert!(!sendable(&json!(-9_007_199_254_740_992_i64)));
    assert!(!sendable(&json!(null)) && !sendable(&json!("3")) && !sendable(&json!(true)));
    assert!(sendable(&json!(9_007_199_254_740_991_i64)) && sendable(&json!(-9_007_199_254_740_991_i64)));
    let mut without = message();
    without.as_object_mut().unwrap().remove("depth");
    assert_eq!(parse(&stored(&without, "10")).unwrap().pdu, None);
}

#[test]
fn an_event_that_does_not_fit_its_room_is_refused() {
    let event = stored(&message(), "10");
    let refused = |event: StoredEvent| parse(&event).unwrap_err();
    assert_eq!(
        refused(StoredEvent {
            room_version: Some("99".into()),
            ..event.clone()
        }),
        EventError::UnknownRoomVersion(Some("99".into()))
    );
    assert_eq!(
        refused(StoredEvent {
            room_version: None,
            ..event.clone()
        }),
        EventError::UnknownRoomVersion(None)
    );
    assert_eq!(
        refused(StoredEvent {
            format_version: None,
            ..event.clone()
        }),
        EventError::FormatMismatch { expected: 3, found: 1 }
    );
    let malformed = |key: &str, value: Json| refused(stored(&with(&json!({key: value})), "10"));
    assert_eq!(
        malformed("prev_events", json!([1])),
        EventError::Malformed("prev_events")
    );
    assert_eq!(
        malformed("auth_events", json!({})),
        EventError::Malformed("auth_events")
    );
    assert_eq!(
        malformed("origin_server_ts", json!("5")),
        EventError::Malformed("origin_server_ts")
    );
    assert_eq!(
        refused(StoredEvent {
            json: "[]".into(),
            ..event.clone()
        }),
        EventError::Malformed("json")
    );
    assert!(matches!(
        refused(StoredEvent {
            json: "{".into(),
            ..event
        }),
        EventError::Canonical(_)
    ));
}

#[test]
fn a_membership_in_a_room_of_unrecorded_version_is_guessed_by_its_format() {
    let member = with(&json!({"type": "m.room.member", "state_key": "@a:x", "content": {"membership": "leave"}}));
    for format_version in [Some(2), Some(3), Some(4)] {
        let event = StoredEvent {
            room_version: None,
            format_version,
            ..stored(&member, "5")
        };
        assert_eq!(parse(&event).unwrap().membership.as_deref(), Some("leave"));
    }
    let old = with(&json!({"type": "m.room.member", "prev_events": [["$p:x", {}]], "auth_events": []}));
    let event = StoredEvent {
        room_version: None,
        format_version: None,
        ..stored(&old, "1")
    };
    assert_eq!(parse(&event).unwrap().prev_events, vec![EventId::from("$p:x")]);
}
