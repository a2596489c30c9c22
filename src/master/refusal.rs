//! What is said to whoever asks for what is not given: Matrix's error answers.

use axum::{
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use serde::Serialize;
use serde_json::{Value, json};
use tracing::error;

/// An answer other than 2xx.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    status: StatusCode,
    errcode: &'static str,
    text: String,
}

impl Refusal {
    /// With this status, error code and text for people.
    pub fn new(status: StatusCode, errcode: &'static str, text: impl Into<String>) -> Self {
        let text = text.into();
        Self { status, errcode, text }
    }

    /// 400 `M_BAD_JSON`: the body, or a parameter, is not of the form it should be.
    pub fn malformed(text: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "M_BAD_JSON", text)
    }

    /// 403 `M_FORBIDDEN`
    pub fn forbidden(text: impl Into<String>) -> Self {
        Self::new(StatusCode::FORBIDDEN, "M_FORBIDDEN", text)
    }

    /// 404 `M_NOT_FOUND`
    pub fn not_found(text: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, "M_NOT_FOUND", text)
    }

    /// 500: it is our fault. The cause is logged, and told, as who runs this server and who uses it are the same.
    pub fn failed(cause: impl std::fmt::Display) -> Self {
        error!(%cause, "a request failed");
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "M_UNKNOWN", cause.to_string())
    }

    /// What it says, for people.
    pub fn text(&self) -> &str {
        &self.text
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        answer(self.status, &json!({ "errcode": self.errcode, "error": self.text }))
    }
}

/// An answer with a JSON body.
pub fn answer(status: StatusCode, body: &impl Serialize) -> Response {
    match serde_json::to_string(body) {
        Ok(body) => (status, [(header::CONTENT_TYPE, "application/json")], body).into_response(),
        Err(error) => Refusal::failed(error).into_response(),
    }
}

/// 200 with a JSON body, or a refusal.
pub type Answer = Result<Json<Value>, Refusal>;

/// 200 with this body.
#[derive(Clone)]
pub struct Json<T>(pub T);

impl<T: Serialize> IntoResponse for Json<T> {
    fn into_response(self) -> Response {
        answer(StatusCode::OK, &self.0)
    }
}

/// For paths that do not exist.
pub async fn unrecognized() -> Refusal {
    Refusal::new(StatusCode::NOT_FOUND, "M_UNRECOGNIZED", "no such endpoint")
}

/// For methods that a path does not know.
pub async fn wrong_method() -> Refusal {
    Refusal::new(StatusCode::METHOD_NOT_ALLOWED, "M_UNRECOGNIZED", "no such method here")
}
