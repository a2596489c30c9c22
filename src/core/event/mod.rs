//! What does a stored event look like on the wire, and what else does the sender read out of it? How is a new one made,
//! and one from another server checked?
//!
//! The JSON is brought into canonical form once; everything else is read from, or copied out of, that text. The bytes are
//! then shared by all destinations, because a transaction's body is a concatenation of canonical PDUs.

mod build;
mod received;
mod redaction;
mod signing;
#[cfg(test)]
mod signing_tests;
#[cfg(test)]
mod tests;

use bytes::Bytes;

use crate::core::{
    canonical_json::{self, CanonicalError, Value},
    id::{EventId, RoomId},
    room_version::{EventFormat, RoomVersion},
    rules::RulesError,
    store::StoredEvent,
};

pub use self::{
    build::NewEvent,
    received::{ReceivedEvent, SignatureError, Signer, VerifiedEvent},
    redaction::event_id,
    signing::{SignedEvent, finish, sign, sign_object, signed_object},
};

/// Largest integer that every JSON implementation holds, and so the largest depth a receiver accepts.
const MAX_DEPTH: f64 = 9_007_199_254_740_991.0;

/// What of `unsigned` other servers are told. The rest (`age`, `redacted_because`, `transaction_id`, ...) is for our own
/// clients.
const UNSIGNED_ON_WIRE: &[&str] = &[
    "age_ts",
    "invite_room_state",
    "knock_room_state",
    "prev_content",
    "prev_sender",
    "replaces_state",
];

/// What of it is left when the event is redacted.
const UNSIGNED_REDACTED: &[&str] = &["age_ts", "replaces_state"];

/// One event's PDU as it goes on the wire, encoded once and shared by all its destinations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pdu {
    /// The event's id.
    pub event_id: EventId,
    /// Its room.
    pub room_id: RoomId,
    /// When its sender's server made it, ms since the epoch.
    pub origin_server_ts: i64,
    /// Its canonical JSON.
    pub bytes: Bytes,
}

/// What the sender reads out of an event's JSON on the way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParsedEvent {
    /// `None` when its `depth` is missing or beyond what a receiver accepts: such an event counts as sent and is not.
    pub pdu: Option<Pdu>,
    /// The events it follows.
    pub prev_events: Vec<EventId>,
    /// The events that authorise it, with the create event that room version 12 leaves unsaid.
    pub auth_events: Vec<EventId>,
    /// `unsigned.replaces_state`: the state event it replaced.
    pub replaces_state: Option<EventId>,
    /// `content.membership`.
    pub membership: Option<String>,
    /// It carries a valid sticky duration (`msc4354_sticky`, Synapse's name for MSC4354's key).
    pub sticky: bool,
}

/// Why an event cannot be sent, made or taken in.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EventError {
    /// Its room's version is not known (or not recorded): to be treated as if the event did not exist, as Synapse does.
    #[error("room version {0:?} is not known")]
    UnknownRoomVersion(Option<String>),
    /// It is not of the form that its room's version demands: to be treated as if it did not exist, as Synapse does.
    #[error("event format {found} where the room version demands {expected}")]
    FormatMismatch {
        /// The format its room's version demands.
        expected: i32,
        /// `event_json.format_version`.
        found: i32,
    },
    /// Its JSON cannot be encoded.
    #[error(transparent)]
    Canonical(#[from] CanonicalError),
    /// It breaks a rule that its room's version has for the form of events.
    #[error(transparent)]
    Rules(#[from] RulesError),
    /// A part of it is missing or of the wrong type.
    #[error("{0} is missing or malformed")]
    Malformed(&'static str),
}

/// The event as it is sent while it is live, whether redacted since or not.
///
/// # Errors
/// When the event must be treated as nonexistent, or its row is broken.
pub fn parse(event: &StoredEvent) -> Result<ParsedEvent, EventError> {
    read(event, false)
}

/// The redacted form of the event, for catch-up when it has been redacted since.
///
/// # Errors
/// When the event must be treated as nonexistent, or its row is broken.
pub fn parse_redacted(event: &StoredEvent) -> Result<ParsedEvent, EventError> {
    read(event, true)
}

fn read(event: &StoredEvent, redacted: bool) -> Result<ParsedEvent, EventError> {
    let version = version(event)?;
    let canonical = canonical_json::encode(&event.json)?;
    let parts = Parts::of(Value::of(&canonical))?;

    let prev_events = references(parts.prev_events, version).ok_or(EventError::Malformed("prev_events"))?;
    let mut auth_events = references(parts.auth_events, version).ok_or(EventError::Malformed("auth_events"))?;
    if version.format() == EventFormat::V4 && event.kind != "m.room.create" {
        let create = event
            .room_id
            .as_str()
            .strip_prefix('!')
            .ok_or(EventError::Malformed("room_id"))?;
        auth_events.push(format!("${create}").into());
    }
    let origin_server_ts = parts.origin_server_ts.and_then(Value::as_i64);
    let origin_server_ts = origin_server_ts.ok_or(EventError::Malformed("origin_server_ts"))?;

    let pdu = depth_is_sendable(parts.depth).then(|| {
        let mut wire = String::with_capacity(canonical.len() + 32);
        if redacted {
            redaction::write(&mut wire, parts.root, &event.kind, version, redaction::For::Wire);
        } else {
            write_wire(&mut wire, parts.root);
        }
        Pdu {
            event_id: event.event_id.clone(),
            room_id: event.room_id.clone(),
            origin_server_ts,
            bytes: Bytes::from(wire),
        }
    });
    let text_of = |part: Option<Value<'_>>, key| part?.get(key)?.as_str().map(std::borrow::Cow::into_owned);
    Ok(ParsedEvent {
        pdu,
        prev_events,
        auth_events,
        replaces_state: text_of(parts.unsigned, "replaces_state").map(EventId::from),
        membership: text_of(parts.content, "membership"),
        sticky: !redacted && parts.sticky.is_some_and(is_sticky),
    })
}

/// The rules that hold for the event.
fn version(event: &StoredEvent) -> Result<RoomVersion, EventError> {
    let found = event.format_version.unwrap_or(1);
    let Some(id) = &event.room_version else {
        if event.kind == "m.room.member" {
            return Ok(RoomVersion::guessed_from_format(found));
        }
        return Err(EventError::UnknownRoomVersion(None));
    };
    let version = RoomVersion::of(id).ok_or_else(|| EventError::UnknownRoomVersion(Some(id.clone())))?;
    let expected = version.format().number();
    if found == expected {
        Ok(version)
    } else {
        Err(EventError::FormatMismatch { expected, found })
    }
}

/// The top-level parts of an event that we look into.
struct Parts<'a> {
    root: Value<'a>,
    auth_events: Option<Value<'a>>,
    content: Option<Value<'a>>,
    depth: Option<Value<'a>>,
    origin_server_ts: Option<Value<'a>>,
    prev_events: Option<Value<'a>>,
    sticky: Option<Value<'a>>,
    unsigned: Option<Value<'a>>,
}

impl<'a> Parts<'a> {
    fn of(root: Value<'a>) -> Result<Self, EventError> {
        let mut parts = Self {
            root,
            auth_events: None,
            content: None,
            depth: None,
            origin_server_ts: None,
            prev_events: None,
            sticky: None,
            unsigned: None,
        };
        for (key, value) in root.members().ok_or(EventError::Malformed("json"))? {
            let part = match key {
                "auth_events" => &mut parts.auth_events,
                "content" => &mut parts.content,
                "depth" => &mut parts.depth,
                "msc4354_sticky" => &mut parts.sticky,
                "origin_server_ts" => &mut parts.origin_server_ts,
                "prev_events" => &mut parts.prev_events,
                "unsigned" => &mut parts.unsigned,
                _ => continue,
            };
            *part = Some(value);
        }
        Ok(parts)
    }
}

/// The ids that `prev_events` or `auth_events` names.
fn references(list: Option<Value<'_>>, version: RoomVersion) -> Option<Vec<EventId>> {
    let pairs = version.format() == EventFormat::V1;
    list?
        .elements()?
        .map(|item| {
            let id = if pairs { item.elements()?.next()? } else { item };
            id.as_str().map(|id| EventId::from(&*id))
        })
        .collect()
}

/// Synapse leaves an event with another depth out of its transactions without a word, and receivers refuse it.
fn depth_is_sendable(depth: Option<Value<'_>>) -> bool {
    // Below the bound a double is exact, and whatever rounds to the bound was outside of it already.
    depth
        .and_then(|depth| depth.text().parse::<f64>().ok())
        .is_some_and(|depth| depth.abs() <= MAX_DEPTH)
}

/// A duration that is no integer, or negative, makes no sticky event. One that is too long is capped, not refused, and so
/// its size does not matter here.
fn is_sticky(sticky: Value<'_>) -> bool {
    sticky
        .get("duration_ms")
        .is_some_and(|duration| duration.text().bytes().all(|b| b.is_ascii_digit()))
}

/// The event as it is, but for what `unsigned` may tell.
fn write_wire(out: &mut String, root: Value<'_>) {
    let mut object = ObjectWriter::new(out);
    let mut signatures = false;
    let mut unsigned = false;
    for (key, value) in root.members().into_iter().flatten() {
        // Receivers expect both to be there, so what is missing is put in, where the order of keys wants it.
        if !signatures && key >= "signatures" {
            signatures = true;
            if key != "signatures" {
                object.raw("signatures", "{}");
            }
        }
        if !unsigned && key >= "unsigned" {
            unsigned = true;
            write_unsigned(&mut object, (key == "unsigned").then_some(value), UNSIGNED_ON_WIRE);
            if key == "unsigned" {
                continue;
            }
        }
        object.raw(key, value.text());
    }
    if !signatures {
        object.raw("signatures", "{}");
    }
    if !unsigned {
        write_unsigned(&mut object, None, UNSIGNED_ON_WIRE);
    }
    object.end();
}

/// The member `unsigned` with those of the keys in `keep` that are not null.
fn write_unsigned(object: &mut ObjectWriter<'_>, unsigned: Option<Value<'_>>, keep: &[&str]) {
    let mut inner = object.object("unsigned");
    for (key, value) in unsigned.and_then(Value::members).into_iter().flatten() {
        if keep.contains(&key) && !value.is_null() {
            inner.raw(key, value.text());
        }
    }
    inner.end();
}

/// Writes a canonical object member by member; whoever calls keeps the order of keys.
struct ObjectWriter<'a> {
    out: &'a mut String,
    empty: bool,
}

impl<'a> ObjectWriter<'a> {
    fn new(out: &'a mut String) -> Self {
        out.push('{');
        Self { out, empty: true }
    }

    fn key(&mut self, key: &str) {
        if !self.empty {
            self.out.push(',');
        }
        self.empty = false;
        self.out.push('"');
        self.out.push_str(key);
        self.out.push_str("\":");
    }

    /// A member whose key and value are canonical already.
    fn raw(&mut self, key: &str, value: &str) {
        self.key(key);
        self.out.push_str(value);
    }

    /// A member that is an object; it must be ended before this one goes on.
    fn object(&mut self, key: &str) -> ObjectWriter<'_> {
        self.key(key);
        ObjectWriter::new(self.out)
    }

    fn end(self) {
        self.out.push('}');
    }
}
