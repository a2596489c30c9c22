//! What do we ask of other servers? Typed questions, bounded answers.

use bytes::Bytes;
use serde::Deserialize;
use serde_json::{json, value::RawValue};

use crate::{
    core::{
        canonical_json,
        id::{EventId, RoomId, ServerName},
    },
    federation::client::{AskError, Client, Question, Verb, percent_encoded},
};

/// Longest answers that are read, bytes: of a room's whole state, and of anything else.
const MAX_STATE_BYTES: usize = 64 * 1024 * 1024;
const MAX_ANSWER_BYTES: usize = 8 * 1024 * 1024;

/// What a join is made from.
#[derive(Debug, Deserialize)]
pub struct Template {
    /// The room's version; 1 if it is not said.
    #[serde(default)]
    pub room_version: Option<String>,
    /// The event, without hash and signature.
    pub event: Box<RawValue>,
}

/// What a resident server says of a room to whoever joined it.
#[derive(Debug, Deserialize)]
pub struct Joined {
    /// The state before the join.
    pub state: Vec<Box<RawValue>>,
    /// What authorises it.
    pub auth_chain: Vec<Box<RawValue>>,
}

#[derive(Deserialize)]
struct Events {
    events: Vec<Box<RawValue>>,
}

#[derive(Deserialize)]
struct Pdus {
    pdus: Vec<Box<RawValue>>,
}

/// The state before an event.
#[derive(Debug, Deserialize)]
pub struct StateIds {
    /// Its events.
    pub pdu_ids: Vec<String>,
    /// What authorises them.
    pub auth_chain_ids: Vec<String>,
}

fn read<'a, T: Deserialize<'a>>(answer: &'a [u8]) -> Result<T, AskError> {
    serde_json::from_slice(answer).map_err(|error| AskError::Unreadable(error.to_string()))
}

fn path(version: &str, what: &str, room: &RoomId, id: &str) -> String {
    let (room, id) = (percent_encoded(room.as_str()), percent_encoded(id));
    format!("/_matrix/federation/{version}/{what}/{room}/{id}")
}

async fn get(client: &Client, server: &ServerName, uri: &str, max_answer: usize) -> Result<Vec<u8>, AskError> {
    let body = None;
    client.ask(server, Question { uri, body, max_answer }).await
}

/// Asks for a join of `user` to be signed.
pub async fn make_join(
    client: &Client,
    server: &ServerName,
    room: &RoomId,
    user: &str,
    versions: &[&str],
) -> Result<Template, AskError> {
    let versions: Vec<String> = versions.iter().map(|version| format!("ver={version}")).collect();
    let uri = format!("{}?{}", path("v1", "make_join", room, user), versions.join("&"));
    read(&get(client, server, &uri, MAX_ANSWER_BYTES).await?)
}

/// Hands the signed join in.
pub async fn send_join(
    client: &Client,
    server: &ServerName,
    room: &RoomId,
    event_id: &EventId,
    event: String,
) -> Result<Joined, AskError> {
    let question = Question {
        uri: &path("v2", "send_join", room, event_id.as_str()),
        body: Some((Verb::Put, &Bytes::from(event))),
        max_answer: MAX_STATE_BYTES,
    };
    read(&client.ask(server, question).await?)
}

/// The events between `earliest` and `latest`, at most `limit` and not below `min_depth`.
pub async fn missing_events(
    client: &Client,
    server: &ServerName,
    room: &RoomId,
    earliest: &[EventId],
    latest: &[EventId],
    min_depth: i64,
    limit: usize,
) -> Result<Vec<Box<RawValue>>, AskError> {
    let ids = |ids: &[EventId]| ids.iter().map(|id| id.as_str().to_owned()).collect::<Vec<_>>();
    let body = json!({
        "earliest_events": ids(earliest),
        "latest_events": ids(latest),
        "limit": limit,
        "min_depth": min_depth,
    });
    let body = canonical_json::encode(&body.to_string()).map_err(|error| AskError::Unreadable(error.to_string()))?;
    let room = percent_encoded(room.as_str());
    let question = Question {
        uri: &format!("/_matrix/federation/v1/get_missing_events/{room}"),
        body: Some((Verb::Post, &Bytes::from(body))),
        max_answer: MAX_ANSWER_BYTES,
    };
    let answer = client.ask(server, question).await?;
    let mut events = read::<Events>(&answer)?.events;
    events.truncate(limit);
    Ok(events)
}

/// One event.
pub async fn event(client: &Client, server: &ServerName, event_id: &EventId) -> Result<Box<RawValue>, AskError> {
    let uri = format!("/_matrix/federation/v1/event/{}", percent_encoded(event_id.as_str()));
    let answer = get(client, server, &uri, MAX_ANSWER_BYTES).await?;
    let pdu = read::<Pdus>(&answer)?.pdus.into_iter().next();
    pdu.ok_or_else(|| AskError::Unreadable("it holds no event".into()))
}

/// The ids of the state before an event.
pub async fn state_ids(
    client: &Client,
    server: &ServerName,
    room: &RoomId,
    event_id: &EventId,
) -> Result<StateIds, AskError> {
    let (room, event_id) = (percent_encoded(room.as_str()), percent_encoded(event_id.as_str()));
    let uri = format!("/_matrix/federation/v1/state_ids/{room}?event_id={event_id}");
    read(&get(client, server, &uri, MAX_ANSWER_BYTES).await?)
}
