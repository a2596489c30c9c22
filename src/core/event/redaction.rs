//! What is left of an event when it is redacted? That form is what an event's id is the hash of, and what catch-up sends
//! of an event that has been redacted meanwhile.

use base64::{
    Engine,
    engine::general_purpose::{STANDARD_NO_PAD, URL_SAFE_NO_PAD},
};
use sha2::{Digest, Sha256};

use super::{EventError, ObjectWriter, UNSIGNED_REDACTED, write_unsigned};
use crate::core::{
    canonical_json::{self, Value},
    id::EventId,
    room_version::{EventFormat, RoomVersion},
};

/// The top-level keys that survive, in canonical order; three of them only before version 11.
const KEPT: &[&str] = &[
    "auth_events",
    "content",
    "depth",
    "event_id",
    "hashes",
    "membership",
    "origin",
    "origin_server_ts",
    "prev_events",
    "prev_state",
    "room_id",
    "sender",
    "signatures",
    "state_key",
    "type",
    "unsigned",
];

/// What the redacted form is for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum For {
    /// To be sent.
    Wire,
    /// To be hashed: without `signatures` and `unsigned`.
    Hash,
}

/// Writes the redacted form of the event `root`.
pub(super) fn write(out: &mut String, root: Value<'_>, kind: &str, version: RoomVersion, purpose: For) {
    let mut members = root.members().into_iter().flatten().peekable();
    let mut object = ObjectWriter::new(out);
    for key in KEPT {
        while members.next_if(|(name, _)| name < key).is_some() {}
        let value = members.next_if(|(name, _)| name == key).map(|(_, value)| value);
        match *key {
            "membership" | "origin" | "prev_state" if version.has_updated_redaction_rules() => {}
            "room_id" if version.format() == EventFormat::V4 && kind == "m.room.create" => {}
            "signatures" | "unsigned" if purpose == For::Hash => {}
            "signatures" => object.raw(key, value.map_or("{}", Value::text)),
            "unsigned" => write_unsigned(&mut object, value, UNSIGNED_REDACTED),
            "content" => write_content(&mut object, value, kind, version),
            _ => {
                if let Some(value) = value {
                    object.raw(key, value.text());
                }
            }
        }
    }
    object.end();
}

fn write_content(object: &mut ObjectWriter<'_>, content: Option<Value<'_>>, kind: &str, version: RoomVersion) {
    let mut kept = object.object("content");
    for (key, value) in content.and_then(Value::members).into_iter().flatten() {
        if kind == "m.room.member" && key == "third_party_invite" {
            write_third_party_invite(&mut kept, value, version);
        } else if is_kept(kind, key, version) {
            kept.raw(key, value.text());
        }
    }
    kept.end();
}

/// From version 11 on the signed part of an invite by e-mail address stays, because the invite is authorised by it.
fn write_third_party_invite(content: &mut ObjectWriter<'_>, invite: Value<'_>, version: RoomVersion) {
    if version.has_updated_redaction_rules() && invite.members().is_some() {
        let mut kept = content.object("third_party_invite");
        if let Some(signed) = invite.get("signed") {
            kept.raw("signed", signed.text());
        }
        kept.end();
    }
}

/// The member `key` of the content of an event of type `kind` survives.
fn is_kept(kind: &str, key: &str, version: RoomVersion) -> bool {
    let updated = version.has_updated_redaction_rules();
    match (kind, key) {
        ("m.room.member", "join_authorised_via_users_server") => version.redaction_keeps_join_authorisation(),
        ("m.room.create", key) => updated || key == "creator",
        ("m.room.join_rules", "allow") => version.redaction_keeps_allow(),
        ("m.room.aliases", "aliases") => version.redaction_keeps_aliases(),
        ("m.room.power_levels", "invite") | ("m.room.redaction", "redacts") => updated,
        (
            "m.room.power_levels",
            "ban" | "events" | "events_default" | "kick" | "redact" | "state_default" | "users" | "users_default",
        )
        | ("m.room.member", "membership")
        | ("m.room.join_rules", "join_rule")
        | ("m.room.history_visibility", "history_visibility") => true,
        _ => false,
    }
}

/// The id of the event `json`: what it names in room versions 1 and 2, the hash of its redacted form later.
///
/// # Errors
/// When the JSON cannot be encoded, or lacks its type or (versions 1 and 2) its id.
pub fn event_id(json: &str, version: RoomVersion) -> Result<EventId, EventError> {
    let canonical = canonical_json::encode(json)?;
    let root = Value::of(&canonical);
    let text_of = |key| root.get(key).and_then(Value::as_str);
    let engine = match version.format() {
        EventFormat::V1 => {
            return text_of("event_id")
                .map(|id| EventId::from(&*id))
                .ok_or(EventError::Malformed("event_id"));
        }
        EventFormat::V2 => STANDARD_NO_PAD,
        EventFormat::V3 | EventFormat::V4 => URL_SAFE_NO_PAD,
    };
    let kind = text_of("type").ok_or(EventError::Malformed("type"))?;
    let mut redacted = String::with_capacity(canonical.len());
    write(&mut redacted, root, &kind, version, For::Hash);
    let mut id = String::from("$");
    engine.encode_string(Sha256::digest(&redacted), &mut id);
    Ok(id.into())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value as Json, json};

    use crate::core::event::{
        parse_redacted,
        tests::{stored, wire, with},
    };

    /// Type, room version, content before and after.
    const REDACTIONS: &[(&str, &str, &str, &str)] = &[
        (
            "m.room.member",
            "8",
            r#"{"membership":"join","join_authorised_via_users_server":"@a:x"}"#,
            r#"{"membership":"join"}"#,
        ),
        (
            "m.room.member",
            "9",
            r#"{"join_authorised_via_users_server":"@a:x"}"#,
            r#"{"join_authorised_via_users_server":"@a:x"}"#,
        ),
        (
            "m.room.member",
            "10",
            r#"{"displayname":"A","third_party_invite":{"signed":{"a":1}}}"#,
            "{}",
        ),
        (
            "m.room.member",
            "11",
            r#"{"third_party_invite":{"display_name":"x","signed":{"a":1}}}"#,
            r#"{"third_party_invite":{"signed":{"a":1}}}"#,
        ),
        (
            "m.room.member",
            "11",
            r#"{"third_party_invite":{"x":1}}"#,
            r#"{"third_party_invite":{}}"#,
        ),
        ("m.room.member", "11", r#"{"third_party_invite":1}"#, "{}"),
        (
            "m.room.create",
            "10",
            r#"{"creator":"@a:x","room_version":"10"}"#,
            r#"{"creator":"@a:x"}"#,
        ),
        (
            "m.room.create",
            "11",
            r#"{"q":1,"room_version":"11"}"#,
            r#"{"q":1,"room_version":"11"}"#,
        ),
        (
            "m.room.join_rules",
            "7",
            r#"{"allow":[],"join_rule":"x"}"#,
            r#"{"join_rule":"x"}"#,
        ),
        (
            "m.room.join_rules",
            "8",
            r#"{"allow":[],"join_rule":"x"}"#,
            r#"{"allow":[],"join_rule":"x"}"#,
        ),
        (
            "m.room.power_levels",
            "10",
            r#"{"ban":1,"events":{},"events_default":2,"invite":3,"kick":4,"notifications":{},"redact":5,"state_default":6,"users":{},"users_default":7}"#,
            r#"{"ban":1,"events":{},"events_default":2,"kick":4,"redact":5,"state_default":6,"users":{},"users_default":7}"#,
        ),
        (
            "m.room.power_levels",
            "11",
            r#"{"invite":0,"notifications":{}}"#,
            r#"{"invite":0}"#,
        ),
        (
            "m.room.aliases",
            "1",
            r##"{"aliases":["#a:x"]}"##,
            r##"{"aliases":["#a:x"]}"##,
        ),
        (
            "m.room.aliases",
            "5",
            r##"{"aliases":["#a:x"]}"##,
            r##"{"aliases":["#a:x"]}"##,
        ),
        ("m.room.aliases", "6", r##"{"aliases":["#a:x"]}"##, "{}"),
        (
            "m.room.history_visibility",
            "1",
            r#"{"history_visibility":"joined","x":1}"#,
            r#"{"history_visibility":"joined"}"#,
        ),
        ("m.room.redaction", "10", r#"{"reason":"r","redacts":"$a"}"#, "{}"),
        (
            "m.room.redaction",
            "11",
            r#"{"reason":"r","redacts":"$a"}"#,
            r#"{"redacts":"$a"}"#,
        ),
        ("m.room.message", "11", r#"{"body":"b","membership":"join"}"#, "{}"),
    ];

    #[test]
    fn redaction_keeps_what_each_version_keeps() {
        for (kind, version, before, after) in REDACTIONS {
            let before: Json = serde_json::from_str(before).unwrap();
            let mut event = with(&json!({"type": kind, "content": before}));
            if *version == "1" {
                event["prev_events"] = json!([]);
                event["auth_events"] = json!([]);
            }
            let content = &wire(&parse_redacted(&stored(&event, version)).unwrap())["content"];
            assert_eq!(&content.to_string(), after, "{kind} in version {version}");
        }
    }

    #[test]
    fn redaction_keeps_the_old_top_level_keys_until_version_10() {
        let event =
            with(&json!({"origin": "x", "membership": "join", "prev_state": [], "redacts": "$a", "age_ts": 1, "k": 2}));
        let keys = |version| {
            let redacted = wire(&parse_redacted(&stored(&event, version)).unwrap());
            redacted
                .as_object()
                .unwrap()
                .keys()
                .cloned()
                .collect::<Vec<_>>()
                .join(" ")
        };
        let new =
            "auth_events content depth hashes origin_server_ts prev_events room_id sender signatures type unsigned";
        assert_eq!(keys("11"), new);
        assert_eq!(
            keys("10"),
            "auth_events content depth hashes membership origin origin_server_ts prev_events prev_state room_id sender \
             signatures type unsigned"
        );
    }
}
