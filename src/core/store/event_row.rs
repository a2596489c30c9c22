//! An event and its redactions as a statement of either engine returns them.

use std::collections::HashMap;

use serde_json::{Map, Value};

use super::StoredEvent;
use crate::core::{
    clock::Millis,
    id::{EventId, RoomId, ServerName, StateGroup, StreamOrdering, domain_of},
};

/// Stream ordering, id, room, type, state key, sender, received at, room version, format version, JSON, internal metadata,
/// state group, whether its state is partial.
pub(super) type EventRow = (
    i64,
    String,
    String,
    String,
    Option<String>,
    String,
    Option<i64>,
    Option<String>,
    Option<i32>,
    String,
    String,
    Option<i64>,
    bool,
);

/// A claim that an event is redacted: the event, whether it must be looked into, and (unless the redaction is unknown or
/// rejected) the redaction's room, sender and internal metadata.
pub(super) type RedactionRow = (String, bool, Option<String>, Option<String>, Option<String>);

/// A redaction as it claims to apply to an event.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Redaction {
    /// Synapse does not yet vouch for it.
    recheck: bool,
    /// The redaction event's room and sender; absent if it is unknown or rejected.
    event: Option<(RoomId, String)>,
    /// `internal_metadata.recheck_redaction`: only the sender's own server may have redacted it.
    same_server_only: bool,
}

impl Redaction {
    /// Whether it redacts an event of that room and sender.
    fn applies(&self, room_id: &RoomId, sender: &str) -> bool {
        if !self.recheck {
            return true;
        }
        self.event.as_ref().is_some_and(|(room, redactor)| {
            room == room_id && (!self.same_server_only || domain_of(redactor) == domain_of(sender))
        })
    }
}

/// The events in the order of `ids`, each marked if one of the claims is valid. A create event is never redacted.
pub(super) fn with_redactions(ids: &[EventId], events: Vec<EventRow>, claims: Vec<RedactionRow>) -> Vec<StoredEvent> {
    let mut found: HashMap<EventId, StoredEvent> = events
        .into_iter()
        .map(stored_event)
        .map(|event| (event.event_id.clone(), event))
        .collect();
    for (target, recheck, room, sender, metadata) in claims {
        let redaction = Redaction {
            recheck,
            event: room.map(RoomId::from).zip(sender),
            same_server_only: metadata.is_some_and(|text| flag(&parse_metadata(&text), "recheck_redaction")),
        };
        if let Some(event) = found.get_mut(target.as_str()) {
            event.redacted |= event.kind != "m.room.create" && redaction.applies(&event.room_id, &event.sender);
        }
    }
    ids.iter().filter_map(|id| found.get(id).cloned()).collect()
}

/// `redacted` is not known from the row.
pub(super) fn stored_event(row: EventRow) -> StoredEvent {
    let (
        ordering,
        id,
        room,
        kind,
        state_key,
        sender,
        received,
        room_version,
        format_version,
        json,
        metadata,
        group,
        partial,
    ) = row;
    let metadata = parse_metadata(&metadata);
    StoredEvent {
        stream_ordering: StreamOrdering(ordering),
        event_id: id.into(),
        room_id: room.into(),
        kind,
        state_key,
        sender,
        room_version,
        format_version,
        json,
        state_group: group.map(StateGroup),
        partial_state: partial,
        send_on_behalf_of: metadata
            .get("send_on_behalf_of")
            .and_then(Value::as_str)
            .map(ServerName::from),
        out_of_band: flag(&metadata, "out_of_band_membership"),
        proactively_send: metadata.get("proactively_send") != Some(&Value::Bool(false)),
        soft_failed: flag(&metadata, "soft_failed"),
        redacted: false,
        received: received.map(Millis),
    }
}

/// Metadata that cannot be read counts as empty: every flag has its usual value, and one damaged row holds up no page.
fn parse_metadata(text: &str) -> Map<String, Value> {
    serde_json::from_str(text).unwrap_or_default()
}

fn flag(metadata: &Map<String, Value>, key: &str) -> bool {
    metadata.get(key) == Some(&Value::Bool(true))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn redaction(recheck: bool, event: Option<(&str, &str)>, same_server_only: bool) -> Redaction {
        let event = event.map(|(room, sender)| (room.into(), sender.to_owned()));
        Redaction {
            recheck,
            event,
            same_server_only,
        }
    }

    #[test]
    fn an_unchecked_redaction_applies_only_if_known_and_of_the_same_room_and_server() {
        let room = RoomId::from("!r:ours");
        let applies = |redaction: Redaction| redaction.applies(&room, "@ann:ours");
        assert!(applies(redaction(false, None, false)), "Synapse vouches for it");
        assert!(!applies(redaction(true, None, false)), "unknown or rejected");
        assert!(!applies(redaction(true, Some(("!other:ours", "@ann:ours")), false)));
        assert!(
            applies(redaction(true, Some(("!r:ours", "@mod:theirs")), false)),
            "authorised by power level"
        );
        assert!(!applies(redaction(true, Some(("!r:ours", "@mod:theirs")), true)));
        assert!(applies(redaction(true, Some(("!r:ours", "@bob:ours")), true)));
    }
}
