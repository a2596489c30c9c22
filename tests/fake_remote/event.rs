//! Events: canonical JSON, hashes, ids and signatures, for room versions 6 to 12.

use std::collections::HashMap;

use base64::{
    Engine as _,
    engine::general_purpose::{STANDARD_NO_PAD, URL_SAFE_NO_PAD},
};
use ed25519_dalek::{Signature, Signer as _, SigningKey, VerifyingKey};
use serde_json::{Map, Value, json};
use sha2::{Digest as _, Sha256};

/// A server's name, its key's id and the key.
#[derive(Clone)]
pub struct Identity {
    pub name: String,
    pub key_id: String,
    pub key: SigningKey,
}

/// The verification keys of servers, by server name.
pub type Keys = HashMap<String, VerifyingKey>;

/// Canonical JSON. `serde_json` sorts a map by its keys' bytes and escapes no more than it must, which is all there is
/// to it as long as every number is an integer.
pub fn canonical(value: &Value) -> Vec<u8> {
    serde_json::to_vec(value).expect("a JSON value is serialisable")
}

fn without(object: &Value, keys: &[&str]) -> Value {
    let mut map = object.as_object().cloned().unwrap_or_default();
    map.retain(|key, _| !keys.contains(&key.as_str()));
    Value::Object(map)
}

fn only(object: &Value, keys: &[&str]) -> Value {
    let mut map = object.as_object().cloned().unwrap_or_default();
    map.retain(|key, _| keys.contains(&key.as_str()));
    Value::Object(map)
}

/// What redaction leaves of an event.
pub fn redacted(event: &Value, version: u32) -> Value {
    let mut kept = vec![
        "event_id",
        "sender",
        "room_id",
        "hashes",
        "signatures",
        "content",
        "type",
        "state_key",
        "depth",
        "prev_events",
        "origin_server_ts",
        "auth_events",
    ];
    if version < 11 {
        kept.extend(["prev_state", "membership", "origin"]);
    }
    let mut event = only(event, &kept);
    let content = &event["content"];
    let content = match event["type"].as_str().unwrap_or_default() {
        "m.room.member" => {
            let mut keys = vec!["membership"];
            if version >= 9 {
                keys.push("join_authorised_via_users_server");
            }
            let mut kept = only(content, &keys);
            if version >= 11
                && let Some(invite) = content.get("third_party_invite").filter(|invite| invite.is_object())
            {
                kept["third_party_invite"] = only(invite, &["signed"]);
            }
            kept
        }
        "m.room.create" if version >= 11 => content.clone(),
        "m.room.create" => only(content, &["creator"]),
        "m.room.join_rules" if version >= 8 => only(content, &["join_rule", "allow"]),
        "m.room.join_rules" => only(content, &["join_rule"]),
        "m.room.power_levels" => {
            let mut keys = vec![
                "users",
                "users_default",
                "events",
                "events_default",
                "state_default",
                "ban",
                "kick",
                "redact",
            ];
            if version >= 11 {
                keys.push("invite");
            }
            only(content, &keys)
        }
        "m.room.history_visibility" => only(content, &["history_visibility"]),
        "m.room.redaction" if version >= 11 => only(content, &["redacts"]),
        _ => json!({}),
    };
    event["content"] = content;
    event
}

fn content_hash(event: &Value) -> String {
    let hashed = without(
        event,
        &["age_ts", "unsigned", "signatures", "hashes", "outlier", "destinations"],
    );
    STANDARD_NO_PAD.encode(Sha256::digest(canonical(&hashed)))
}

/// An event's id.
pub fn event_id(event: &Value, version: u32) -> String {
    let hashed = without(
        &redacted(event, version),
        &["signatures", "unsigned", "age_ts", "event_id"],
    );
    format!("${}", URL_SAFE_NO_PAD.encode(Sha256::digest(canonical(&hashed))))
}

fn signed_bytes(event: &Value, version: u32) -> Vec<u8> {
    canonical(&without(
        &redacted(event, version),
        &["signatures", "unsigned", "age_ts"],
    ))
}

/// Gives an event its content hash and `identity`'s signature.
pub fn sign(event: &mut Value, version: u32, identity: &Identity) {
    event["hashes"] = json!({ "sha256": content_hash(event) });
    let signature = identity.key.sign(&signed_bytes(event, version)).to_bytes();
    event["signatures"] = json!({ &identity.name: { &identity.key_id: STANDARD_NO_PAD.encode(signature) } });
}

/// Whether an event is signed by its sender's server and its content is what was hashed. A server whose key is not
/// among `keys` is taken at its word.
pub fn verify(event: &Value, version: u32, keys: &Keys) -> Result<(), String> {
    let server = event["sender"].as_str().and_then(|sender| sender.split_once(':'));
    let (_, server) = server.ok_or("no sender")?;
    if event["hashes"]["sha256"].as_str() != Some(&content_hash(event)) {
        return Err("its content hash is wrong".to_owned());
    }
    let Some(key) = keys.get(server) else {
        return Ok(());
    };
    let signatures = event["signatures"][server]
        .as_object()
        .ok_or("not signed by its sender's server")?;
    let message = signed_bytes(event, version);
    let good = signatures
        .values()
        .filter_map(Value::as_str)
        .any(|signature| verifies(key, &message, signature));
    if good {
        Ok(())
    } else {
        Err("its signature is wrong".to_owned())
    }
}

fn verifies(key: &VerifyingKey, message: &[u8], signature: &str) -> bool {
    STANDARD_NO_PAD
        .decode(signature)
        .ok()
        .and_then(|bytes| Signature::from_slice(&bytes).ok())
        .is_some_and(|signature| key.verify_strict(message, &signature).is_ok())
}

fn request_object(method: &str, uri: &str, origin: &str, destination: &str, content: Option<&Value>) -> Value {
    let mut object = Map::new();
    object.insert("method".to_owned(), method.into());
    object.insert("uri".to_owned(), uri.into());
    object.insert("origin".to_owned(), origin.into());
    object.insert("destination".to_owned(), destination.into());
    if let Some(content) = content {
        object.insert("content".to_owned(), content.clone());
    }
    Value::Object(object)
}

/// The `Authorization` header of a request.
pub fn authorization(
    identity: &Identity,
    method: &str,
    uri: &str,
    destination: &str,
    content: Option<&Value>,
) -> String {
    let object = request_object(method, uri, &identity.name, destination, content);
    let signature = STANDARD_NO_PAD.encode(identity.key.sign(&canonical(&object)).to_bytes());
    let (name, key_id) = (&identity.name, &identity.key_id);
    format!(r#"X-Matrix origin="{name}",key="{key_id}",sig="{signature}",destination="{destination}""#)
}

/// The origin of a request with this `Authorization` header, if its signature holds.
pub fn check_authorization(
    header: &str,
    method: &str,
    uri: &str,
    destination: &str,
    content: Option<&Value>,
    keys: &Keys,
) -> Result<String, String> {
    let parameters: HashMap<&str, &str> = header
        .strip_prefix("X-Matrix ")
        .ok_or("no X-Matrix header")?
        .split(',')
        .filter_map(|part| part.split_once('='))
        .map(|(name, value)| (name, value.trim_matches('"')))
        .collect();
    let parameter = |name| {
        parameters
            .get(name)
            .copied()
            .ok_or(format!("X-Matrix header without {name}"))
    };
    let origin = parameter("origin")?;
    if parameter("destination")? != destination {
        return Err(format!(
            "signed for {:?} instead of {destination}",
            parameters["destination"]
        ));
    }
    let key = keys
        .get(origin)
        .ok_or(format!("a request by {origin:?}, whom nobody here knows"))?;
    let message = canonical(&request_object(method, uri, origin, destination, content));
    if verifies(key, &message, parameter("sig")?) {
        Ok(origin.to_owned())
    } else {
        Err(format!("the signature of {origin}'s request is wrong"))
    }
}
