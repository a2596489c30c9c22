//! What came with a request? Paths, queries and bodies, bounded in size and time; what is wrong with them is told in Matrix's
//! way.

use std::time::Duration;

use axum::{
    body::{Body, to_bytes},
    extract::{self, FromRequestParts},
    http::{StatusCode, request::Parts},
};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use tokio::time::timeout;

use super::refusal::Refusal;

/// How long a body may take to arrive.
const PATIENCE: Duration = Duration::from_secs(30);

/// A JSON object.
pub type Object = Map<String, Value>;

/// The named parts of the path.
pub struct Path<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned + Send> FromRequestParts<S> for Path<T> {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Refusal> {
        match extract::Path::from_request_parts(parts, state).await {
            Ok(extract::Path(path)) => Ok(Self(path)),
            Err(wrong) => Err(invalid(&wrong.body_text())),
        }
    }
}

/// The query's parameters.
pub struct Query<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequestParts<S> for Query<T> {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Refusal> {
        match extract::Query::from_request_parts(parts, state).await {
            Ok(extract::Query(query)) => Ok(Self(query)),
            Err(wrong) => Err(invalid(&wrong.body_text())),
        }
    }
}

fn invalid(what: &str) -> Refusal {
    Refusal::new(StatusCode::BAD_REQUEST, "M_INVALID_PARAM", what)
}

/// The whole body as text, if it is at most `max` bytes.
pub async fn read(body: Body, max: usize) -> Result<String, Refusal> {
    let too_large = || {
        let text = format!("the body is larger than {max} bytes, or broke off");
        Refusal::new(StatusCode::PAYLOAD_TOO_LARGE, "M_TOO_LARGE", text)
    };
    let Ok(bytes) = timeout(PATIENCE, to_bytes(body, max)).await else {
        let text = format!("the body did not arrive within {PATIENCE:?}");
        return Err(Refusal::new(StatusCode::REQUEST_TIMEOUT, "M_UNKNOWN", text));
    };
    let bytes = bytes.map_err(|_| too_large())?;
    String::from_utf8(bytes.into()).map_err(|_| Refusal::new(StatusCode::BAD_REQUEST, "M_NOT_JSON", "not UTF-8"))
}

/// The JSON object that `text` is; an empty text stands for an empty object.
pub fn object(text: &str) -> Result<Object, Refusal> {
    if text.trim().is_empty() {
        return Ok(Object::new());
    }
    serde_json::from_str(text).map_err(|error| {
        Refusal::new(
            StatusCode::BAD_REQUEST,
            "M_NOT_JSON",
            format!("not a JSON object: {error}"),
        )
    })
}

/// The text at `key`, if it is there.
pub fn text<'a>(object: &'a Object, key: &str) -> Result<Option<&'a str>, Refusal> {
    match object.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(_) => Err(Refusal::malformed(format!("`{key}` is not a string"))),
    }
}
