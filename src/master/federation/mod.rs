//! What do other servers ask of us?

mod authenticated;
mod join;
mod look_up;
mod transaction;

use std::sync::Arc;

pub(super) use self::transaction::come_again;
use axum::{
    Router,
    extract::{DefaultBodyLimit, State},
    http::header,
    response::{IntoResponse, Response},
    routing::{get, post, put},
};
use serde_json::json;

use super::{
    homeserver::Homeserver,
    keys,
    refusal::{Json, Refusal, unrecognized, wrong_method},
};
use crate::core::clock;

/// The federation listener's routes.
pub(super) fn routes(homeserver: Arc<Homeserver>) -> Router {
    let version = json!({ "server": { "name": "Burdock", "version": env!("CARGO_PKG_VERSION") } });
    Router::new()
        .route("/_matrix/key/v2/server", get(keys))
        .route("/_matrix/key/v2/server/{key_id}", get(keys))
        .route("/_matrix/federation/v1/version", get(async || Json(version)))
        .route("/_matrix/federation/v1/send/{txn_id}", put(transaction::send))
        .route(
            "/_matrix/federation/v1/make_join/{room_id}/{user_id}",
            get(join::make_join),
        )
        .route(
            "/_matrix/federation/v2/send_join/{room_id}/{event_id}",
            put(join::send_join),
        )
        .route("/_matrix/federation/v1/event/{event_id}", get(look_up::event))
        .route("/_matrix/federation/v1/state/{room_id}", get(look_up::state))
        .route("/_matrix/federation/v1/state_ids/{room_id}", get(look_up::state_ids))
        .route(
            "/_matrix/federation/v1/get_missing_events/{room_id}",
            post(look_up::missing_events),
        )
        .fallback(unrecognized)
        .method_not_allowed_fallback(wrong_method)
        // The size is bounded where the body is read.
        .layer(DefaultBodyLimit::disable())
        .with_state(homeserver)
}

async fn keys(State(homeserver): State<Arc<Homeserver>>) -> Result<Response, Refusal> {
    let document = keys::own_document(&homeserver.name, &homeserver.key, clock::now().wall).map_err(Refusal::failed)?;
    Ok(([(header::CONTENT_TYPE, "application/json")], document).into_response())
}
