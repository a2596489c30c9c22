//! What do clients ask of us? As much of Matrix's client API as it takes to have users who talk.

mod accounts;
mod authenticated;
mod events;
mod membership;
mod rooms;

use std::sync::Arc;

use axum::{
    Router,
    extract::DefaultBodyLimit,
    routing::{get, post, put},
};
use serde_json::json;

use super::{
    homeserver::Homeserver,
    refusal::{Json, unrecognized, wrong_method},
};

/// The client listener's routes.
pub(super) fn routes(homeserver: Arc<Homeserver>) -> Router {
    let versions = json!({
        "versions": ["r0.6.1", "v1.1", "v1.11"],
        "unstable_features": { "org.matrix.msc4354": true },
    });
    let api = Router::new()
        .route("/register", post(accounts::register))
        .route("/account/whoami", get(accounts::whoami))
        .route("/createRoom", post(rooms::create))
        .route("/join/{room_id}", post(membership::join))
        .route("/rooms/{room_id}/join", post(membership::join))
        .route("/rooms/{room_id}/leave", post(membership::leave))
        .route("/rooms/{room_id}/invite", post(membership::invite))
        .route("/rooms/{room_id}/kick", post(membership::kick))
        .route("/rooms/{room_id}/ban", post(membership::ban))
        .route("/rooms/{room_id}/unban", post(membership::kick))
        .route("/rooms/{room_id}/joined_members", get(rooms::joined_members))
        .route("/rooms/{room_id}/send/{kind}/{txn_id}", put(events::send))
        .route("/rooms/{room_id}/redact/{event_id}/{txn_id}", put(events::redact))
        .route("/rooms/{room_id}/state", get(rooms::state))
        .route(
            "/rooms/{room_id}/state/{kind}",
            get(rooms::state_event_unkeyed).put(events::set_state_unkeyed),
        )
        .route(
            "/rooms/{room_id}/state/{kind}/",
            get(rooms::state_event_unkeyed).put(events::set_state_unkeyed),
        )
        .route(
            "/rooms/{room_id}/state/{kind}/{state_key}",
            get(rooms::state_event).put(events::set_state),
        )
        .route("/rooms/{room_id}/event/{event_id}", get(events::event))
        .route("/rooms/{room_id}/messages", get(events::messages));
    Router::new()
        .route("/_matrix/client/versions", get(async || Json(versions)))
        .nest("/_matrix/client/v3", api.clone())
        .nest("/_matrix/client/r0", api)
        .route("/_burdock/rooms/{room_id}/events", get(events::held))
        .fallback(unrecognized)
        .method_not_allowed_fallback(wrong_method)
        // The size is bounded where the body is read.
        .layer(DefaultBodyLimit::disable())
        .with_state(homeserver)
}
