//! Why did a request get no answer? Reads the HTTP library's errors.

use std::{
    error::Error,
    fmt::Display,
    io::{self, ErrorKind},
};

use crate::federation::outcome::{Stage, bounded};

/// A request that got no answer.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) stage: Stage,
    pub(super) detail: String,
}

impl Failure {
    pub(super) fn new(stage: Stage, detail: impl Display) -> Self {
        Self {
            stage,
            detail: bounded(detail.to_string()),
        }
    }

    pub(super) fn of(error: reqwest::Error) -> Self {
        let error = error.without_url();
        let stage = if error.is_timeout() {
            Stage::Timeout
        } else if error.is_dns() {
            Stage::Lookup
        } else if chain(&error).any(<dyn Error>::is::<rustls::Error>) {
            Stage::Tls
        } else if error.is_connect() {
            Stage::Connect
        } else {
            Stage::Http
        };
        Self::new(stage, chain_text(&error))
    }
}

/// The connection was set up and then ended before any part of an answer came.
pub(super) fn connection_died(error: &reqwest::Error) -> bool {
    let ended = |kind| {
        matches!(
            kind,
            ErrorKind::ConnectionReset
                | ErrorKind::ConnectionAborted
                | ErrorKind::BrokenPipe
                | ErrorKind::UnexpectedEof
        )
    };
    !error.is_connect()
        && chain(error).any(|error| {
            error
                .downcast_ref::<hyper::Error>()
                .is_some_and(|error| error.is_incomplete_message() || error.is_canceled() || error.is_closed())
                || error
                    .downcast_ref::<io::Error>()
                    .is_some_and(|error| ended(error.kind()))
        })
}

/// The error and its causes. An I/O error hides the error it was made from (as TLS does), so that one is looked up.
fn chain<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    std::iter::successors(Some(error), |&error| {
        let hidden = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
        match hidden {
            Some(hidden) => Some(hidden),
            None => error.source(),
        }
    })
}

/// What the error and its causes say, outermost first, without repetition.
pub(super) fn chain_text(error: &(dyn Error + 'static)) -> String {
    let mut text = String::new();
    for part in chain(error).map(ToString::to_string) {
        if text.ends_with(&part) {
            continue;
        }
        if !text.is_empty() {
            text.push_str(": ");
        }
        text.push_str(&part);
    }
    text
}
