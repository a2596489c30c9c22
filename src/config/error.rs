//! What is wrong with the configuration, said so that an operator can put it right.

use std::{fmt, path::Path};

/// One thing wrong with the configuration: where, what, and what to do. It never holds the value of a secret.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ConfigError(String);

impl ConfigError {
    /// `key` of `file` is wrong; `problem` goes on with the sentence that the key begins.
    pub(super) fn at_key(file: &str, key: &str, problem: impl fmt::Display, remedy: impl fmt::Display) -> Self {
        Self(format!("{file}: `{key}` {problem}. {remedy}."))
    }

    /// `file` is wrong as a whole.
    pub(super) fn in_file(file: &Path, problem: impl fmt::Display, remedy: impl fmt::Display) -> Self {
        Self::outside(&file.display().to_string(), problem, remedy)
    }

    /// Something outside the files is wrong.
    pub(super) fn outside(place: &str, problem: impl fmt::Display, remedy: impl fmt::Display) -> Self {
        Self(format!("{place}: {problem}. {remedy}."))
    }
}
