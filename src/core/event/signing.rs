//! How is an event hashed and signed? (A redaction is what is signed, so an event stays valid when it is redacted.)

use base64::{Engine, engine::general_purpose::STANDARD_NO_PAD};
use sha2::{Digest, Sha256};

use super::{EventError, ObjectWriter, event_id, redaction};
use crate::core::{
    canonical_json::{self, Value},
    id::{EventId, ServerName},
    room_version::RoomVersion,
    rules,
    signing::SigningKey,
};

/// The first room version whose events must hold no numbers but integers that are exact everywhere.
const STRICT_SINCE: u8 = 6;

/// An event that can be stored and sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SignedEvent {
    /// Its id.
    pub event_id: EventId,
    /// Its canonical JSON.
    pub json: String,
}

/// Makes an event out of one that lacks hash and signature (made by [`NewEvent::json`](super::NewEvent::json), or the
/// template that another server gave for a join).
///
/// # Errors
/// If it is not of the form that the room version demands.
pub fn finish(
    json: &str,
    version: RoomVersion,
    server: &ServerName,
    key: &SigningKey,
) -> Result<SignedEvent, EventError> {
    let canonical = canonical_json::encode(json)?;
    let hash = STANDARD_NO_PAD.encode(content_hash(Value::of(&canonical)));
    let hashed = with_member(Value::of(&canonical), "hashes", &format!("{{\"sha256\":\"{hash}\"}}"));
    sign(&hashed, version, server, key)
}

/// Adds a server's signature to an event, beside those it has.
///
/// # Errors
/// If it is not of the form that the room version demands.
pub fn sign(
    json: &str,
    version: RoomVersion,
    server: &ServerName,
    key: &SigningKey,
) -> Result<SignedEvent, EventError> {
    let canonical = canonical_json::encode(json)?;
    let root = Value::of(&canonical);
    let kind = root
        .get("type")
        .and_then(Value::as_str)
        .ok_or(EventError::Malformed("type"))?;
    let message = signed_form(root, &kind, version);
    let json = with_signature(root, message.as_bytes(), server, key);
    check_format(&json, version)?;
    Ok(SignedEvent {
        event_id: event_id(&json, version)?,
        json,
    })
}

/// Adds a server's signature to an object that is no event, such as its list of keys.
///
/// # Errors
/// If it has no canonical form.
pub fn sign_object(json: &str, server: &ServerName, key: &SigningKey) -> Result<String, EventError> {
    let canonical = canonical_json::encode(json)?;
    let root = Value::of(&canonical);
    let message = signed_object(&canonical);
    Ok(with_signature(root, message.as_bytes(), server, key))
}

/// What the signatures of an object that is no event cover. The object is canonical.
#[must_use]
pub fn signed_object(canonical: &str) -> String {
    without(Value::of(canonical), &["signatures", "unsigned"])
}

/// What an event's signatures cover, and its id is the hash of.
pub(super) fn signed_form(root: Value<'_>, kind: &str, version: RoomVersion) -> String {
    let mut form = String::with_capacity(root.text().len());
    redaction::write(&mut form, root, kind, version, redaction::For::Hash);
    form
}

/// The hash over all that an event says.
pub(super) fn content_hash(root: Value<'_>) -> [u8; 32] {
    // The last three are not the event's own either: old servers put them in after hashing.
    let own = without(
        root,
        &["hashes", "signatures", "unsigned", "age_ts", "destinations", "outlier"],
    );
    Sha256::digest(own).into()
}

/// # Errors
/// If the event is not of the form that the room version demands.
pub(super) fn check_format(json: &str, version: RoomVersion) -> Result<(), EventError> {
    if version.number() >= STRICT_SINCE {
        rules::check_format(json, version)?;
    }
    Ok(())
}

/// The object without some of its members.
fn without(root: Value<'_>, keys: &[&str]) -> String {
    let mut out = String::with_capacity(root.text().len());
    let mut object = ObjectWriter::new(&mut out);
    for (key, value) in root.members().into_iter().flatten() {
        if !keys.contains(&key) {
            object.raw(key, value.text());
        }
    }
    object.end();
    out
}

/// The object with a member set. The key must be one that canonical JSON does not escape.
pub(super) fn with_member(root: Value<'_>, key: &str, value: &str) -> String {
    let mut out = String::with_capacity(root.text().len() + key.len() + value.len() + 4);
    let mut object = ObjectWriter::new(&mut out);
    let mut written = false;
    for (name, old) in root.members().into_iter().flatten() {
        if !written && name >= key {
            object.raw(key, value);
            written = true;
        }
        if name != key {
            object.raw(name, old.text());
        }
    }
    if !written {
        object.raw(key, value);
    }
    object.end();
    out
}

fn with_signature(root: Value<'_>, message: &[u8], server: &ServerName, key: &SigningKey) -> String {
    let signature = STANDARD_NO_PAD.encode(key.sign(&[message]));
    let of_all = object_in(root, "signatures");
    let of_server = with_member(
        object_in(of_all, server.as_str()),
        key.key_id(),
        &format!("\"{signature}\""),
    );
    with_member(root, "signatures", &with_member(of_all, server.as_str(), &of_server))
}

/// The object that is the member `key`, or an empty one.
fn object_in<'a>(root: Value<'a>, key: &str) -> Value<'a> {
    root.get(key)
        .filter(|value| value.members().is_some())
        .unwrap_or(Value::of("{}"))
}
