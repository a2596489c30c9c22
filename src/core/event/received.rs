//! Is an event from another server what its sender's server signed?

use base64::{Engine, engine::general_purpose::STANDARD_NO_PAD};

use super::{
    EventError, event_id, redaction,
    signing::{check_format, content_hash, signed_form, with_member},
};
use crate::core::{
    canonical_json::{self, Value},
    id::{EventId, ServerName, domain_of},
    room_version::{EventFormat, RoomVersion},
    signing::VerifyKey,
};

/// How many of a server's signatures are looked at.
const MAX_SIGNATURES: usize = 10;

/// An event from elsewhere whose signatures are still to be checked.
#[derive(Debug, Clone)]
pub struct ReceivedEvent {
    event_id: EventId,
    kind: String,
    canonical: String,
    version: RoomVersion,
    signers: Vec<Signer>,
    /// What is kept of it, if its content is not what the hash is of.
    redacted: Option<String>,
}

/// A server that must have signed an event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Signer {
    /// The server.
    pub server: ServerName,
    /// The keys it signed with, as far as the event says: fetch these.
    pub key_ids: Vec<String>,
}

/// An event that its sender's server has signed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VerifiedEvent {
    /// Its id.
    pub event_id: EventId,
    /// Its canonical JSON, with an empty `unsigned`: what came there was nobody's word.
    pub json: String,
    /// The content was not what the hash is of, so only the redacted form is left.
    pub redacted: bool,
}

/// Why an event is not believed. It is to be dropped.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SignatureError {
    /// A server that must have signed it has not.
    #[error("{0} has not signed it")]
    Missing(ServerName),
    /// None of the keys that the server signed with is known.
    #[error("no key is known that {0} signed it with")]
    UnknownKey(ServerName),
    /// A signature is wrong.
    #[error("the signature of {0} is wrong")]
    Wrong(ServerName),
}

impl ReceivedEvent {
    /// Reads an event that claims to be of a room of that version.
    ///
    /// # Errors
    /// If it is not of the form that the room version demands: it is to be dropped.
    pub fn read(json: &str, version: RoomVersion) -> Result<Self, EventError> {
        let canonical = canonical_json::encode(json)?;
        check_format(&canonical, version)?;
        let root = Value::of(&canonical);
        let kind = root
            .get("type")
            .and_then(Value::as_str)
            .ok_or(EventError::Malformed("type"))?;
        let stated = root
            .get("hashes")
            .and_then(|hashes| hashes.get("sha256"))
            .and_then(Value::as_str);
        let redacted = stated
            .is_none_or(|stated| *stated != STANDARD_NO_PAD.encode(content_hash(root)))
            .then(|| {
                let mut kept = String::new();
                redaction::write(&mut kept, root, &kind, version, redaction::For::Wire);
                kept
            });
        let kept = redacted.as_deref().map_or(root, Value::of);
        let signers = servers_that_must_sign(root, kept, &kind, version)?
            .into_iter()
            .map(|server| Signer {
                key_ids: signatures_of(root, &server)
                    .map(|(key_id, _)| key_id.to_owned())
                    .collect(),
                server,
            })
            .collect();
        Ok(Self {
            event_id: event_id(&canonical, version)?,
            kind: kind.into_owned(),
            signers,
            redacted,
            version,
            canonical,
        })
    }

    /// Its id. Not to be relied upon before it is verified.
    #[must_use]
    pub fn event_id(&self) -> &EventId {
        &self.event_id
    }

    /// Who must have signed it. Nobody, if it is an invite to an address that was verified elsewhere: the auth check
    /// looks at that.
    #[must_use]
    pub fn signers(&self) -> &[Signer] {
        &self.signers
    }

    /// Checks signatures and hash. `key` finds a server's key by its id, if it was valid when the event was made.
    ///
    /// # Errors
    /// See [`SignatureError`].
    pub fn verify(self, key: impl Fn(&ServerName, &str) -> Option<VerifyKey>) -> Result<VerifiedEvent, SignatureError> {
        let root = Value::of(&self.canonical);
        let message = signed_form(root, &self.kind, self.version);
        for Signer { server, key_ids } in &self.signers {
            if key_ids.is_empty() {
                return Err(SignatureError::Missing(server.clone()));
            }
            let mut known = signatures_of(root, server)
                .filter_map(|(key_id, signature)| Some((key(server, key_id)?, signature)))
                .peekable();
            if known.peek().is_none() {
                return Err(SignatureError::UnknownKey(server.clone()));
            }
            if !known.any(|(key, signature)| key.verifies(message.as_bytes(), &signature)) {
                return Err(SignatureError::Wrong(server.clone()));
            }
        }
        let redacted = self.redacted.is_some();
        let kept = self.redacted.unwrap_or(self.canonical);
        Ok(VerifiedEvent {
            event_id: self.event_id,
            json: with_member(Value::of(&kept), "unsigned", "{}"),
            redacted,
        })
    }
}

/// The server's ed25519 signatures: key id and signature.
fn signatures_of<'a>(root: Value<'a>, server: &ServerName) -> impl Iterator<Item = (&'a str, String)> + use<'a> {
    root.get("signatures")
        .and_then(|signatures| signatures.get(server.as_str()))
        .and_then(Value::members)
        .into_iter()
        .flatten()
        .filter(|(key_id, _)| key_id.starts_with("ed25519:"))
        .filter_map(|(key_id, signature)| Some((key_id, signature.as_str()?.into_owned())))
        .take(MAX_SIGNATURES)
}

/// `kept` is the form of the event that is kept: what vouches for an invite in its sender's place must be left in it.
fn servers_that_must_sign(
    root: Value<'_>,
    kept: Value<'_>,
    kind: &str,
    version: RoomVersion,
) -> Result<Vec<ServerName>, EventError> {
    let server_of = |user: Option<Value<'_>>, part| {
        let user = user.and_then(Value::as_str).ok_or(EventError::Malformed(part))?;
        let server = domain_of(&user).map(ServerName::from);
        // What is no server name could not be asked for a key (and might not be looked up as a JSON key).
        server
            .filter(|server| server.parts().is_some())
            .ok_or(EventError::Malformed(part))
    };
    let content = root.get("content").ok_or(EventError::Malformed("content"))?;
    let membership = content
        .get("membership")
        .and_then(Value::as_str)
        .filter(|_| kind == "m.room.member");
    let mut servers = Vec::new();
    let vouched_for = kept
        .get("content")
        .and_then(|content| content.get("third_party_invite")?.get("signed")?.members())
        .is_some();
    if membership.as_deref() != Some("invite") || !vouched_for {
        servers.push(server_of(root.get("sender"), "sender")?);
    }
    if version.format() == EventFormat::V1 {
        servers.push(server_of(root.get("event_id"), "event_id")?);
    }
    let authoriser = content.get("join_authorised_via_users_server");
    if version.redaction_keeps_allow() && membership.as_deref() == Some("join") && authoriser.is_some() {
        servers.push(server_of(authoriser, "join_authorised_via_users_server")?);
    }
    servers.sort_unstable();
    servers.dedup();
    Ok(servers)
}
