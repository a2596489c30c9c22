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
