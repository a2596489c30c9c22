//! Which user sent this request? Taken from the access token.

use std::sync::Arc;

use axum::{
    extract::{FromRequest, FromRequestParts, Request},
    http::{StatusCode, header, request},
};

use crate::master::{
    body::{self, Object},
    homeserver::Homeserver,
    refusal::Refusal,
};

/// Longest body that is read: an event's content at its largest takes less.
const MAX_BODY_BYTES: usize = 256 * 1024;

/// A user of ours, and the device the request came from.
pub(super) struct User {
    pub id: String,
    pub device: String,
}

impl FromRequestParts<Arc<Homeserver>> for User {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut request::Parts, homeserver: &Arc<Homeserver>) -> Result<Self, Refusal> {
        let header = parts
            .headers
            .get(header::AUTHORIZATION)
            .and_then(|value| value.to_str().ok());
        let token = header.and_then(|header| header.strip_prefix("Bearer ")).map(str::trim);
        let missing = || Refusal::new(StatusCode::UNAUTHORIZED, "M_MISSING_TOKEN", "no access token");
        let owner = homeserver.sqlite.token_owner(token.ok_or_else(missing)?).await?;
        let unknown = || {
            Refusal::new(
                StatusCode::UNAUTHORIZED,
                "M_UNKNOWN_TOKEN",
                "the access token is not known",
            )
        };
        let (id, device) = owner.ok_or_else(unknown)?;
        Ok(Self { id, device })
    }
}

/// The request's body: a JSON object. None is an empty one.
pub(super) struct JsonBody(pub Object);

impl<S: Send + Sync> FromRequest<S> for JsonBody {
    type Rejection = Refusal;

    async fn from_request(request: Request, _: &S) -> Result<Self, Refusal> {
        let text = body::read(request.into_body(), MAX_BODY_BYTES).await?;
        Ok(Self(body::object(&text)?))
    }
}
