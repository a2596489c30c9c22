//! What else is asked of other servers than to take a transaction?

use bytes::Bytes;
use reqwest::Method;

use super::{Answer, Client, is_success};
use crate::{
    core::id::ServerName,
    federation::outcome::{Stage, refusal_text},
};

/// A request for which the answer's content counts. What is asked may be asked twice: the connection may die under it.
#[derive(Debug, Clone, Copy)]
pub struct Question<'a> {
    /// Path and query, percent-encoded.
    pub uri: &'a str,
    /// Canonical JSON, with the method that it asks for.
    pub body: Option<(Verb, &'a Bytes)>,
    /// Longest answer that is read, bytes.
    pub max_answer: usize,
}

/// The method of a request with a body; without one it is GET.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verb {
    /// PUT
    Put,
    /// POST
    Post,
}

/// Why there is no answer to use.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AskError {
    /// An answer other than 2xx.
    #[error("answered {status} {said}")]
    Refused {
        /// HTTP status.
        status: u16,
        /// `errcode` and `error` of the answer, as far as they are there.
        said: String,
    },
    /// 2xx, but the body could not be read.
    #[error("the answer cannot be used: {0}")]
    Unreadable(String),
    /// No answer.
    #[error("no answer ({stage:?}): {detail}")]
    Failed {
        /// How far it came.
        stage: Stage,
        /// What went wrong.
        detail: String,
    },
}

impl Client {
    /// One try to ask a server. Returns the body of a 2xx.
    ///
    /// # Errors
    /// Why there is none.
    pub async fn ask(&self, destination: &ServerName, question: Question<'_>) -> Result<Vec<u8>, AskError> {
        let Question { uri, body, max_answer } = question;
        let method = match body {
            None => Method::GET,
            Some((Verb::Put, _)) => Method::PUT,
            Some((Verb::Post, _)) => Method::POST,
        };
        let body = body.map(|(_, body)| body);
        match self
            .exchange(destination, method, uri, body, max_answer, self.0.timeout)
            .await
        {
            Ok(Answer { status, body, .. }) if is_success(status) => body.map_err(AskError::Unreadable),
            Ok(Answer { status, body, .. }) => Err(AskError::Refused {
                status,
                said: refusal_text(&body.unwrap_or_default()),
            }),
            Err(failure) => Err(AskError::Failed {
                stage: failure.stage,
                detail: failure.detail,
            }),
        }
    }
}
