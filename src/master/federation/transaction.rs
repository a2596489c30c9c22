//! Other servers send us their events.

use std::{collections::HashMap, sync::Arc};

use axum::{extract::State, http::StatusCode};
use futures_util::future::join_all;
use serde::Deserialize;
use serde_json::{Value, json, value::RawValue};
use tracing::debug;

use super::authenticated::FromServer;
use crate::{
    core::id::RoomId,
    master::{
        body::Path,
        homeserver::Homeserver,
        incoming::Refused,
        refusal::{Answer, Json, Refusal},
    },
};

/// The specification's bounds.
const MAX_PDUS: usize = 50;
const MAX_EDUS: usize = 100;

#[derive(Deserialize)]
struct Transaction {
    #[serde(default)]
    pdus: Vec<Box<RawValue>>,
    #[serde(default)]
    edus: Vec<serde::de::IgnoredAny>,
}

/// What of a PDU says where it belongs.
#[derive(Deserialize)]
struct Address {
    room_id: String,
}

pub(super) async fn send(
    State(homeserver): State<Arc<Homeserver>>,
    Path(_txn_id): Path<String>,
    from: FromServer,
) -> Answer {
    let transaction: Transaction =
        serde_json::from_str(&from.content).map_err(|error| Refusal::malformed(error.to_string()))?;
    let (pdus, edus) = (transaction.pdus.len(), transaction.edus.len());
    if pdus > MAX_PDUS || edus > MAX_EDUS {
        let text = format!("{pdus} PDUs and {edus} EDUs, where {MAX_PDUS} and {MAX_EDUS} are allowed");
        return Err(Refusal::malformed(text));
    }
    homeserver.counts.transaction(edus);

    // In each room in the order they came in; rooms do not wait for each other.
    let mut rooms: HashMap<RoomId, Vec<String>> = HashMap::new();
    for pdu in transaction.pdus {
        match serde_json::from_str::<Address>(pdu.get()) {
            Ok(Address { room_id }) => rooms.entry(room_id.into()).or_default().push(pdu.get().to_owned()),
            // Without a room there is no version, and so no event id to answer under.
            Err(error) => debug!(origin = %from.origin, %error, "a PDU without a room"),
        }
    }
    let worked_on = join_all(rooms.into_iter().map(|(room, pdus)| {
        let (homeserver, origin) = (Arc::clone(&homeserver), from.origin.clone());
        let work = Arc::clone(&homeserver).receive(origin, room, pdus);
        async move { homeserver.to_its_end(work).await }
    }));
    let mut results = serde_json::Map::new();
    for room in worked_on.await {
        for (event_id, result) in room?? {
            let result = match result {
                Ok(()) => json!({}),
                Err(Refused(why)) => json!({ "error": why }),
            };
            results.insert(event_id.as_str().to_owned(), result);
        }
    }
    Ok(Json(json!({ "pdus": Value::Object(results) })))
}

/// The room is not ready yet: the sender is to come again soon.
pub(in crate::master) fn come_again(text: impl Into<String>) -> Refusal {
    Refusal::new(StatusCode::TOO_MANY_REQUESTS, "M_LIMIT_EXCEEDED", text)
}
