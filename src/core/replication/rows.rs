//! What stands in a row of the streams we write?

use serde::Serialize;
use serde_json::value::{RawValue, to_raw_value};

use crate::core::{
    clock::Millis,
    id::{EventId, RoomId},
    store::CacheRow,
};

/// A new event, or one that is no outlier any more.
#[derive(Debug, Clone)]
pub struct EventRow {
    /// Its id.
    pub event_id: EventId,
    /// Its room.
    pub room_id: RoomId,
    /// Its type.
    pub kind: String,
    /// Its state key.
    pub state_key: Option<String>,
    /// The event it redacts.
    pub redacts: Option<EventId>,
    /// The event it relates to.
    pub relates_to: Option<EventId>,
    /// `membership`, of an `m.room.member` event.
    pub membership: Option<String>,
    /// It failed the auth rules.
    pub rejected: bool,
    /// It is known out of its room's order only.
    pub outlier: bool,
}

/// Whether a user is about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PresenceRow {
    /// The user.
    pub user_id: String,
    /// `online`, `unavailable`, `offline`.
    pub state: String,
    /// The user last did something.
    pub last_active: Millis,
    /// Other servers were last told.
    pub last_federation_update: Millis,
    /// A client last asked for news.
    pub last_user_sync: Millis,
    /// What the user says of it.
    pub status_msg: Option<String>,
    /// The user does something just now.
    pub currently_active: bool,
}

/// A row of `events`.
#[must_use]
pub fn event(row: &EventRow) -> Box<RawValue> {
    json(&(
        "ev",
        (
            row.event_id.as_str(),
            row.room_id.as_str(),
            &row.kind,
            &row.state_key,
            row.redacts.as_ref().map(EventId::as_str),
            row.relates_to.as_ref().map(EventId::as_str),
            &row.membership,
            row.rejected,
            row.outlier,
        ),
    ))
}

/// A row of `sticky_events`.
#[must_use]
pub fn sticky_event(room_id: &RoomId, event_id: &EventId) -> Box<RawValue> {
    json(&(room_id.as_str(), event_id.as_str()))
}

/// A row of `presence`.
#[must_use]
pub fn presence(row: &PresenceRow) -> Box<RawValue> {
    json(&(
        &row.user_id,
        &row.state,
        row.last_active.0,
        row.last_federation_update.0,
        row.last_user_sync.0,
        &row.status_msg,
        row.currently_active,
    ))
}

/// A row of `typing`: all who type in the room now.
#[must_use]
pub fn typing(room_id: &RoomId, users: &[String]) -> Box<RawValue> {
    json(&(room_id.as_str(), users))
}

/// A row of `caches`.
#[must_use]
pub fn caches(row: &CacheRow) -> Box<RawValue> {
    json(&("get_destination_retry_timings", [row.destination.as_str()], row.at.0))
}

fn json(row: &impl Serialize) -> Box<RawValue> {
    to_raw_value(row).expect("strings, numbers and truth values are JSON")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The examples of Synapse's rows.
    #[test]
    fn rows_are_written_as_synapse_writes_them() {
        let ann = "@ann:example.com".to_owned();
        let join = EventRow {
            event_id: "$join".into(),
            room_id: "!r:example.com".into(),
            kind: "m.room.member".to_owned(),
            state_key: Some(ann.clone()),
            redacts: None,
            relates_to: None,
            membership: Some("join".to_owned()),
            rejected: false,
            outlier: false,
        };
        let online = PresenceRow {
            user_id: ann.clone(),
            state: "online".to_owned(),
            last_active: Millis(1_753_000_000_000),
            last_federation_update: Millis(1_753_000_000_100),
            last_user_sync: Millis(1_753_000_000_200),
            status_msg: Some("lunch".to_owned()),
            currently_active: true,
        };
        let room = RoomId::from("!r:example.com");
        for (row, expected) in [
            (
                event(&join),
                r#"["ev",["$join","!r:example.com","m.room.member","@ann:example.com",null,null,"join",false,false]]"#,
            ),
            (
                sticky_event(&room, &"$sticky".into()),
                r#"["!r:example.com","$sticky"]"#,
            ),
            (
                presence(&online),
                r#"["@ann:example.com","online",1753000000000,1753000000100,1753000000200,"lunch",true]"#,
            ),
            (
                typing(&room, &[ann, "@bob:remote.example".to_owned()]),
                r#"["!r:example.com",["@ann:example.com","@bob:remote.example"]]"#,
            ),
        ] {
            assert_eq!(row.get(), expected);
        }
    }
}
