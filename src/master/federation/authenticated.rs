//! Which server sent this request? Taken from its signature, before anything else of it is looked at.

use std::sync::Arc;

use axum::{
    extract::{FromRequest, Request},
    http::{StatusCode, header},
};

use crate::{
    core::{canonical_json, clock, id::ServerName},
    federation::inbound::Credentials,
    master::{body, homeserver::Homeserver, refusal::Refusal},
};

/// Longest body that is read: 50 PDUs and 100 EDUs at their largest take less.
const MAX_BODY_BYTES: usize = 16 * 1024 * 1024;

/// A request whose signature holds.
pub(super) struct FromServer {
    /// The server that signed it.
    pub origin: ServerName,
    /// Its body in canonical form; empty if it had none.
    pub content: String,
}

impl FromRequest<Arc<Homeserver>> for FromServer {
    type Rejection = Refusal;

    async fn from_request(request: Request, homeserver: &Arc<Homeserver>) -> Result<Self, Refusal> {
        let (head, content) = request.into_parts();
        let header = head
            .headers
            .get(header::AUTHORIZATION)
            .and_then(|value| value.to_str().ok());
        let header = header.ok_or_else(|| unauthorized("the request is not signed: it has no Authorization header"))?;
        let credentials = Credentials::parse(header).map_err(|error| unauthorized(error.to_string()))?;
        let us = &homeserver.name;
        if !credentials.are_for(us) {
            return Err(unauthorized(format!(
                "the request is signed for another server; this is {us}"
            )));
        }
        if credentials.origin == *us {
            return Err(unauthorized("the request is signed with our own name"));
        }
        let content = body::read(content, MAX_BODY_BYTES).await?;
        let content = if content.is_empty() {
            content
        } else {
            canonical_json::encode(&content)
                .map_err(|error| Refusal::new(StatusCode::BAD_REQUEST, "M_NOT_JSON", format!("the body: {error}")))?
        };
        let now = clock::now().wall;
        let key = homeserver.keys.get(&credentials.origin, &credentials.key_id, now).await;
        let key = key.map_err(|error| unauthorized(error.to_string()))?;
        let uri = head.uri.path_and_query().map_or("/", |uri| uri.as_str());
        let signed = (!content.is_empty()).then_some(content.as_bytes());
        if !credentials.hold(&key, us, head.method.as_str(), uri, signed) {
            return Err(unauthorized("the signature does not fit the request"));
        }
        homeserver.heard_from(&credentials.origin).await?;
        Ok(Self {
            origin: credentials.origin,
            content,
        })
    }
}

fn unauthorized(text: impl Into<String>) -> Refusal {
    Refusal::new(StatusCode::UNAUTHORIZED, "M_UNAUTHORIZED", text)
}
