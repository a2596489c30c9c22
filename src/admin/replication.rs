//! `GET /_synapse/replication`: the feed's tables over HTTP, for whoever knows the secret.

use std::{fmt, sync::Arc};

use axum::{
    extract::{RawQuery, State},
    http::{HeaderMap, HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde_json::json;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::JSON;
use crate::{
    config::Secret,
    core::replication::feed::{AskError, Feed},
};

/// Where it is asked for.
pub(super) const PATH: &str = "/_synapse/replication";

/// How long one who finds too many others there should wait, ms.
const BUSY_PAUSE: u64 = 1_000;

/// The replication API: what is served, and to whom.
#[derive(Clone)]
pub struct Replication {
    feed: Arc<Feed>,
    secret: Secret,
    shutdown: CancellationToken,
}

impl Replication {
    /// Serves `feed` to whoever knows `secret`, and has nobody wait for news longer than until `shutdown`.
    #[must_use]
    pub fn new(feed: Arc<Feed>, secret: Secret, shutdown: CancellationToken) -> Self {
        Self { feed, secret, shutdown }
    }

    /// Whether the request may ask.
    fn admits(&self, headers: &HeaderMap) -> Result<(), Refusal> {
        let given = headers.get(header::AUTHORIZATION).map(HeaderValue::as_bytes);
        let Some(given) = given.and_then(bearer) else {
            return Err(Refusal::new(
                StatusCode::UNAUTHORIZED,
                "M_MISSING_TOKEN",
                "Send the header `Authorization: Bearer` with the replication secret",
            ));
        };
        // Of digests, so that not even the length shows in the time it takes.
        let digest = |text: &[u8]| Sha256::digest(text);
        if bool::from(digest(given)[..].ct_eq(&digest(self.secret.0.as_bytes())[..])) {
            Ok(())
        } else {
            Err(Refusal::new(
                StatusCode::FORBIDDEN,
                "M_FORBIDDEN",
                "This is not the replication secret",
            ))
        }
    }

    async fn answer(&self, headers: &HeaderMap, query: &str) -> Result<String, Refusal> {
        self.admits(headers)?;
        let request = self.feed.read(form_urlencoded::parse(query.as_bytes()));
        let request = request.map_err(|error| Refusal::new(StatusCode::BAD_REQUEST, "M_INVALID_PARAM", error))?;
        self.feed
            .ask(&request, &self.shutdown)
            .await
            .map_err(|error| match error {
                AskError::Busy => Refusal::new(StatusCode::TOO_MANY_REQUESTS, "M_LIMIT_EXCEEDED", error),
                AskError::Table { .. } => {
                    warn!(%error, "a question over the replication API has no answer");
                    Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, "M_UNKNOWN", error)
                }
            })
    }
}

/// The token of a bearer's header. The scheme's case does not matter.
fn bearer(header: &[u8]) -> Option<&[u8]> {
    let (scheme, token) = header.split_at_checked(b"Bearer ".len())?;
    scheme.eq_ignore_ascii_case(b"Bearer ").then(|| token.trim_ascii())
}

pub(super) async fn ask(
    State(replication): State<Replication>,
    headers: HeaderMap,
    RawQuery(query): RawQuery,
) -> Response {
    match replication.answer(&headers, &query.unwrap_or_default()).await {
        Ok(body) => ([(header::CONTENT_TYPE, JSON)], body).into_response(),
        Err(refusal) => refusal.into_response(),
    }
}

/// An answer that is an error, in Matrix' form.
#[derive(Debug)]
struct Refusal {
    status: StatusCode,
    errcode: &'static str,
    error: String,
}

impl Refusal {
    fn new(status: StatusCode, errcode: &'static str, error: impl fmt::Display) -> Self {
        Self {
            status,
            errcode,
            error: error.to_string(),
        }
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let mut body = json!({"errcode": self.errcode, "error": self.error});
        if self.status == StatusCode::TOO_MANY_REQUESTS {
            body["retry_after_ms"] = BUSY_PAUSE.into();
        }
        (self.status, [(header::CONTENT_TYPE, JSON)], body.to_string()).into_response()
    }
}
