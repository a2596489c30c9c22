//! What is asked: which tables after which positions, how long to wait, how many rows. Reads the query, bounds everything.

use std::{collections::HashSet, time::Duration};

use super::table::START;
use crate::core::id::Token;

/// The longest wait for news.
pub const MAX_TIMEOUT: Duration = Duration::from_mins(2);

/// Rows of a table in one answer, unless the asker says otherwise.
pub const DEFAULT_LIMIT: usize = 1_000;

/// The most that an asker may say.
pub const MAX_LIMIT: usize = 10_000;

/// So much of what a stranger wrote is repeated to them, characters.
const EXCERPT: usize = 100;

/// A question.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// The tables asked for, by their place in the feed, and what the asker saw last of each.
    pub(super) after: Vec<(usize, Token)>,
    pub(super) timeout: Duration,
    pub(super) limit: usize,
}

/// What is wrong with a question.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// No such table.
    #[error("there is no table `{name}`; there are: {tables}")]
    UnknownTable {
        /// As asked.
        name: String,
        /// All there are.
        tables: String,
    },
    /// A parameter that comes twice.
    #[error("the parameter `{0}` is given twice")]
    Twice(String),
    /// A value that is none.
    #[error("the parameter `{name}` must be {wanted}, and is `{value}`")]
    BadValue {
        /// The parameter.
        name: String,
        /// What it may be.
        wanted: String,
        /// What it is.
        value: String,
    },
    /// No table is asked for.
    #[error("no table is asked for; give a parameter for each, with the position last seen (-1: from the start): {0}")]
    NoTable(String),
}

impl Request {
    /// Reads the parameters of a query. `tables` are the names of those that there are.
    pub(super) fn read<N: AsRef<str>, V: AsRef<str>>(
        parameters: impl IntoIterator<Item = (N, V)>,
        tables: &[&str],
    ) -> Result<Self, RequestError> {
        let mut request = Self {
            after: Vec::new(),
            timeout: Duration::ZERO,
            limit: DEFAULT_LIMIT,
        };
        // Ends at the first that is unknown or there twice, so what it holds is bounded.
        let mut seen = HashSet::new();
        for (name, value) in parameters {
            let (name, value) = (name.as_ref(), value.as_ref());
            match name {
                "timeout" => {
                    let most = i64::try_from(MAX_TIMEOUT.as_millis()).unwrap_or(i64::MAX);
                    let ms = number(name, value, "milliseconds", 0, most)?;
                    request.timeout = Duration::from_millis(ms.unsigned_abs());
                }
                "limit" => {
                    let most = i64::try_from(MAX_LIMIT).unwrap_or(i64::MAX);
                    let limit = number(name, value, "a number of rows", 1, most)?;
                    request.limit = usize::try_from(limit).unwrap_or(MAX_LIMIT);
                }
                _ => {
                    let Some(place) = tables.iter().position(|table| *table == name) else {
                        return Err(RequestError::UnknownTable {
                            name: excerpt(name),
                            tables: tables.join(", "),
                        });
                    };
                    let after = number(name, value, "a position", START.0, i64::MAX)?;
                    request.after.push((place, Token(after)));
                }
            }
            if !seen.insert(name.to_owned()) {
                return Err(RequestError::Twice(name.to_owned()));
            }
        }
        if request.after.is_empty() {
            return Err(RequestError::NoTable(tables.join(", ")));
        }
        Ok(request)
    }
}

fn number(name: &str, value: &str, what: &str, least: i64, most: i64) -> Result<i64, RequestError> {
    let number = value.parse().ok().filter(|number| (least..=most).contains(number));
    number.ok_or_else(|| RequestError::BadValue {
        name: name.to_owned(),
        wanted: match most {
            i64::MAX => format!("{what}: an integer, at least {least}"),
            _ => format!("{what}: an integer from {least} to {most}"),
        },
        value: excerpt(value),
    })
}

fn excerpt(text: &str) -> String {
    text.chars().take(EXCERPT).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLES: [&str; 2] = ["events", "streams"];

    fn read(parameters: &[(&str, &str)]) -> Result<Request, String> {
        Request::read(parameters.iter().copied(), &TABLES).map_err(|error| error.to_string())
    }

    #[test]
    fn tables_with_positions_and_bounds_for_all_else() {
        assert_eq!(
            read(&[
                ("streams", "-1"),
                ("timeout", "120000"),
                ("events", "7"),
                ("limit", "10000")
            ]),
            Ok(Request {
                after: vec![(1, Token(-1)), (0, Token(7))],
                timeout: MAX_TIMEOUT,
                limit: MAX_LIMIT,
            })
        );
        assert_eq!(
            read(&[("events", "0")]),
            Ok(Request {
                after: vec![(0, Token(0))],
                timeout: Duration::ZERO,
                limit: DEFAULT_LIMIT,
            })
        );
    }

    #[test]
    fn what_is_wrong_is_named() {
        let long = "é".repeat(1_000);
        let cases: [(&[(&str, &str)], &str); 13] = [
            (
                &[("event", "1")],
                "there is no table `event`; there are: events, streams",
            ),
            (&[(&long, "1")], &format!("`{}`;", "é".repeat(EXCERPT))),
            (
                &[("events", "x")],
                "the parameter `events` must be a position: an integer, at least -1, and is `x`",
            ),
            (&[("events", "-2")], "`events`"),
            (&[("events", "")], "`events`"),
            (&[("events", "9223372036854775808")], "`events`"),
            (&[("events", &long)], &format!("`{}`", "é".repeat(EXCERPT))),
            (&[("events", "1"), ("events", "1")], "`events` is given twice"),
            (
                &[("events", "1"), ("limit", "0")],
                "`limit` must be a number of rows: an integer from 1 to 10000",
            ),
            (&[("events", "1"), ("limit", "10001")], "`limit`"),
            (
                &[("events", "1"), ("timeout", "-1")],
                "`timeout` must be milliseconds: an integer from 0 to 120000",
            ),
            (&[("events", "1"), ("timeout", "120001")], "`timeout`"),
            (&[("timeout", "1")], "no table is asked for"),
        ];
        for (parameters, expected) in cases {
            let error = read(parameters).expect_err(expected);
            assert!(error.contains(expected), "{error}");
        }
    }
}
