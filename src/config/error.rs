//! What is wrong with the configuration, said so that an operator can put it right.

use std::{fmt, path::Path};

/// One thing wrong with the configuration: where, what, and what to do. It never holds the value of a secret.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{place}: {problem}. {remedy}.")]
pub struct ConfigError {
    place: String,
    problem: String,
    remedy: String,
}

impl ConfigError {
    /// `file` is wrong as a whole.
    pub(super) fn in_file(file: &Path, problem: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self {
            place: file.display().to_string(),
            problem: problem.into(),
            remedy: remedy.into(),
        }
    }

    /// `key` of `file` is wrong.
    pub(super) fn at_key(
        file: impl fmt::Display,
        key: &str,
        problem: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self {
            place: format!("{file}: `{key}`"),
            problem: problem.into(),
            remedy: remedy.into(),
        }
    }

    /// Something outside the files is wrong.
    pub(super) fn outside(place: &str, problem: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self {
            place: place.to_owned(),
            problem: problem.into(),
            remedy: remedy.into(),
        }
    }
}
