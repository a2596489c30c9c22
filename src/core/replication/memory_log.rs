//! What does a reader get that missed rows of a stream which is in no database?
//!
//! Each row of `typing` says all of its room, and each of `presence` all of its user. So only the latest of each is kept,
//! and a reader that missed several gets what holds now. This is the answer to
//! `GET /_synapse/replication/get_repl_stream_updates/<stream>/<transaction>`.

use std::{
    collections::{BTreeMap, HashMap},
    ops::Bound::{Excluded, Included},
};

use serde::Serialize;
use serde_json::value::RawValue;

use crate::core::{
    id::Token,
    replication::{gap, stream::Stream},
};

/// Rows kept of one stream. Beyond it, the oldest is forgotten: what a room or a user did so long ago is over by itself.
const MAX_ROWS: usize = 100_000;

/// The latest rows of one stream.
#[derive(Debug)]
pub struct MemoryLog {
    stream: Stream,
    last: Token,
    rows: BTreeMap<Token, (String, Box<RawValue>)>,
    /// Where the row of a key is.
    keys: HashMap<String, Token>,
    max_rows: usize,
}

/// An answer. Its names are those on the wire.
#[derive(Debug, Serialize)]
pub struct Updates {
    #[serde(rename = "updates")]
    rows: Vec<(i64, Box<RawValue>)>,
    upto_token: i64,
    limited: bool,
}

/// A question that has no answer. Its status is 400.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadQuestion {
    /// No such stream is kept here.
    #[error("stream {0} is not written here")]
    UnknownStream(String),
    /// A position is missing or no number.
    #[error("query parameter {0} must be an integer")]
    BadToken(&'static str),
}

impl MemoryLog {
    /// Nothing yet. `start`: rows come above it. Readers of `presence` do not go back, so it must be above all positions
    /// that the process had before it was restarted; those of `typing` do, and it may be 0.
    #[must_use]
    pub fn new(stream: Stream, start: Token) -> Self {
        Self {
            stream,
            last: start,
            rows: BTreeMap::new(),
            keys: HashMap::new(),
            max_rows: MAX_ROWS,
        }
    }

    /// The position of the last row.
    #[must_use]
    pub fn position(&self) -> Token {
        self.last
    }

    /// Keeps a row that says all of `key`, and gives its position.
    pub fn push(&mut self, key: &str, row: Box<RawValue>) -> Token {
        self.last = Token(self.last.0 + 1);
        if let Some(before) = self.keys.insert(key.to_owned(), self.last) {
            self.rows.remove(&before);
        }
        self.rows.insert(self.last, (key.to_owned(), row));
        if self.rows.len() > self.max_rows
            && let Some((_, (key, _))) = self.rows.pop_first()
        {
            self.keys.remove(&key);
        }
        self.last
    }

    /// The rows above `from`, up to `to`, one page of them. A reader that is further than we are (this process was
    /// restarted) gets nothing, and goes back to `to`.
    #[must_use]
    pub fn updates(&self, from: Token, to: Token) -> Updates {
        let above = (from < to).then(|| self.rows.range((Excluded(from), Included(to))));
        let mut above = above.into_iter().flatten().map(|(token, (_, row))| (token.0, row));
        let rows: Vec<_> = above
            .by_ref()
            .take(gap::PAGE)
            .map(|(token, row)| (token, row.clone()))
            .collect();
        let limited = above.next().is_some();
        let upto_token = match rows.last() {
            Some((token, _)) if limited => *token,
            _ => to.0,
        };
        Updates {
            rows,
            upto_token,
            limited,
        }
    }
}

/// The answer to a question as it came: the stream's name in the path, and the two query parameters.
///
/// # Errors
/// A question that is not understood.
pub fn answer(
    logs: &[&MemoryLog],
    stream: &str,
    from_token: Option<&str>,
    upto_token: Option<&str>,
) -> Result<Updates, BadQuestion> {
    let log = logs.iter().find(|log| log.stream.name() == stream);
    let log = log.ok_or_else(|| BadQuestion::UnknownStream(stream.chars().take(64).collect()))?;
    let token = |name, text: Option<&str>| {
        let token = text.and_then(|text| text.parse().ok()).map(Token);
        token.ok_or(BadQuestion::BadToken(name))
    };
    Ok(log.updates(token("from_token", from_token)?, token("upto_token", upto_token)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(text: &str) -> Box<RawValue> {
        RawValue::from_string(text.to_owned()).unwrap()
    }

    fn json(updates: &Updates) -> String {
        serde_json::to_string(updates).unwrap()
    }

    #[test]
    fn a_reader_gets_what_holds_now() {
        let mut log = MemoryLog::new(Stream::Typing, Token(0));
        for (key, text) in [
            ("!a", r#"["!a",["@x"]]"#),
            ("!b", r#"["!b",["@x"]]"#),
            ("!a", r#"["!a",[]]"#),
        ] {
            log.push(key, row(text));
        }
        let all = r#"{"updates":[[2,["!b",["@x"]]],[3,["!a",[]]]],"upto_token":3,"limited":false}"#;
        assert_eq!(json(&log.updates(Token(0), Token(3))), all);
        assert_eq!(json(&answer(&[&log], "typing", Some("0"), Some("3")).unwrap()), all);
        let nothing = |to| format!(r#"{{"updates":[],"upto_token":{to},"limited":false}}"#);
        assert_eq!(
            json(&log.updates(Token(0), Token(1))),
            nothing(1),
            "the later row comes by itself"
        );
        assert_eq!(json(&log.updates(Token(3), Token(3))), nothing(3));
        assert_eq!(
            json(&log.updates(Token(9), Token(3))),
            nothing(3),
            "this process was restarted"
        );
        assert_eq!(json(&log.updates(Token(i64::MAX), Token(i64::MIN))), nothing(i64::MIN));
    }

    #[test]
    fn pages_follow_each_other() {
        let mut log = MemoryLog::new(Stream::Presence, Token(1_000));
        for user in 0..250 {
            log.push(&format!("@{user}"), row("[]"));
        }
        let (mut from, to, mut got) = (Token(1_000), log.position(), Vec::new());
        loop {
            let page = log.updates(from, to);
            assert!(page.rows.len() <= gap::PAGE);
            got.extend(page.rows.iter().map(|(token, _)| *token));
            from = Token(page.upto_token);
            if !page.limited {
                break;
            }
        }
        assert_eq!(from, to);
        assert_eq!(got, (1_001..=1_250).collect::<Vec<_>>());
    }

    #[test]
    fn it_is_bounded_and_bad_questions_are_told_what_is_wrong() {
        let mut log = MemoryLog::new(Stream::Typing, Token(0));
        log.max_rows = 3;
        for key in ["!a", "!b", "!a", "!c", "!d"] {
            log.push(key, row("[]"));
        }
        assert_eq!((log.rows.len(), log.keys.len()), (3, 3));
        assert_eq!(log.updates(Token(0), Token(5)).rows[0].0, 3, "!b was the oldest");
        let ask = |stream, from, to| answer(&[&log], stream, from, to).unwrap_err().to_string();
        assert_eq!(
            ask("presence", Some("0"), Some("3")),
            "stream presence is not written here"
        );
        assert_eq!(
            ask("typing", None, Some("3")),
            "query parameter from_token must be an integer"
        );
        assert_eq!(
            ask("typing", Some("0"), Some("x")),
            "query parameter upto_token must be an integer"
        );
    }
}
