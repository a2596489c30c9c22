//! What is a transaction on the wire? Its body, its id, and what the remote server said of it.

use std::{
    borrow::Cow,
    collections::HashMap,
    sync::atomic::{AtomicU64, Ordering},
};

use bytes::Bytes;
use serde_json::value::RawValue;

use crate::core::{
    canonical_json::push_string,
    clock::Millis,
    id::{EventId, MAX_ID_BYTES, ServerName},
};

/// Longest part of a remote server's error text that is kept, bytes.
const MAX_ERROR_BYTES: usize = 200;

/// A transaction's body: canonical JSON, encoded once. A clone shares the bytes, so destinations that get the same
/// PDUs at the same time can get the same body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Body(Bytes);

impl Body {
    /// The body of a transaction made at `ts` that holds `pdus`, each already canonical.
    #[must_use]
    pub fn build(origin: &ServerName, ts: Millis, pdus: &[Bytes]) -> Self {
        let mut head = String::from(r#"{"origin":"#);
        push_string(&mut head, origin.as_str());
        head.push_str(r#","origin_server_ts":"#);
        head.push_str(&ts.0.to_string());
        head.push_str(r#","pdus":["#);

        let size = head.len() + pdus.iter().map(|pdu| pdu.len() + 1).sum::<usize>() + 2;
        let mut body = Vec::with_capacity(size);
        body.extend_from_slice(head.as_bytes());
        for (index, pdu) in pdus.iter().enumerate() {
            if index > 0 {
                body.push(b',');
            }
            body.extend_from_slice(pdu);
        }
        body.extend_from_slice(b"]}");
        Self(body.into())
    }

    /// Its size, bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a body is never empty")]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// The bytes as sent and signed.
    #[must_use]
    pub fn bytes(&self) -> &Bytes {
        &self.0
    }
}

/// Transaction ids that this process alone uses, and once each: a receiver answers a known id from memory, without
/// looking at the body, so a repeated id would lose what the second body holds.
#[derive(Debug)]
pub struct TransactionIds {
    seed: u64,
    next: AtomicU64,
}

impl TransactionIds {
    /// Ids of a process that drew `seed` when it started.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self {
            seed,
            next: AtomicU64::new(0),
        }
    }

    /// Ids with a seed drawn from the operating system.
    ///
    /// # Errors
    /// When the operating system has no randomness to give.
    pub fn draw() -> Result<Self, getrandom::Error> {
        getrandom::u64().map(Self::new)
    }

    /// An id not given out before: the seed in 16 hex digits, `-`, a counter.
    #[must_use]
    pub fn next_id(&self) -> String {
        format!("{:016x}-{}", self.seed, self.next.fetch_add(1, Ordering::Relaxed))
    }
}

/// What a destination that accepted a transaction said of each PDU.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Accepted {
    /// The events it listed, each with the error it gave, if any. `None` if its `pdus` is missing or no object.
    pub results: Option<HashMap<EventId, Option<String>>>,
}

impl Accepted {
    /// Reads the answer's body; `None` if it is not a JSON object. Whatever else is wrong with it is taken for unsaid,
    /// because the transaction is accepted all the same.
    #[must_use]
    pub fn read(body: &[u8]) -> Option<Self> {
        type Object<'a> = HashMap<Cow<'a, str>, &'a RawValue>;
        fn object(json: &RawValue) -> Option<Object<'_>> {
            serde_json::from_str(json.get()).ok()
        }

        let answer: Object<'_> = serde_json::from_slice(body).ok()?;
        let results = answer.get("pdus").and_then(|pdus| object(pdus)).map(|pdus| {
            let known = pdus.iter().filter(|(id, _)| id.len() <= MAX_ID_BYTES);
            let error = |result| object(result)?.get("error").map(|error| error_text(error));
            known
                .map(|(id, result)| (EventId::from(&**id), error(result)))
                .collect()
        });
        Some(Self { results })
    }

    /// Whether the destination said anything of that event, be it an error.
    #[must_use]
    pub fn lists(&self, event_id: &EventId) -> bool {
        self.results
            .as_ref()
            .is_some_and(|results| results.contains_key(event_id))
    }

    /// Whether the destination listed that event and gave no error for it.
    #[must_use]
    pub fn took(&self, event_id: &EventId) -> bool {
        let result = self.results.as_ref().and_then(|results| results.get(event_id));
        result.is_some_and(Option::is_none)
    }

    /// The events that it gave an error for, with that.
    pub fn errors(&self) -> impl Iterator<Item = (&EventId, &str)> {
        let results = self.results.iter().flatten();
        results.filter_map(|(event_id, error)| Some((event_id, error.as_deref()?)))
    }
}

/// The text of an error, which should be a string but need not be.
fn error_text(error: &RawValue) -> String {
    let mut text = serde_json::from_str(error.get()).unwrap_or_else(|_| error.get().to_owned());
    text.truncate(text.floor_char_boundary(MAX_ERROR_BYTES));
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::canonical_json;

    #[test]
    fn a_body_is_canonical_and_holds_the_pdus_as_they_are() {
        let origin = ServerName::from("origin.example.com");
        let pdu = |text: &'static str| Bytes::from_static(text.as_bytes());
        let text = |pdus: &[Bytes]| {
            let body = Body::build(&origin, Millis(1_700_000_000_124), pdus);
            let text = String::from_utf8(body.bytes().to_vec()).unwrap();
            assert_eq!(text.len(), body.len());
            assert_eq!(canonical_json::encode(&text).unwrap(), text);
            text
        };
        assert_eq!(
            text(&[]),
            r#"{"origin":"origin.example.com","origin_server_ts":1700000000124,"pdus":[]}"#
        );
        assert_eq!(
            text(&[pdu(r#"{"a":1}"#), pdu(r#"{"b":"é"}"#)]),
            r#"{"origin":"origin.example.com","origin_server_ts":1700000000124,"pdus":[{"a":1},{"b":"é"}]}"#
        );
    }

    #[test]
    fn ids_are_the_seed_and_a_counter() {
        let ids = TransactionIds::new(0xab);
        assert_eq!(
            [ids.next_id(), ids.next_id()],
            ["00000000000000ab-0", "00000000000000ab-1"]
        );
        let seeds = [
            TransactionIds::draw().unwrap().seed,
            TransactionIds::draw().unwrap().seed,
        ];
        assert_ne!(seeds[0], seeds[1]);
    }

    fn results(body: &str) -> Option<Vec<(String, Option<String>)>> {
        let results = Accepted::read(body.as_bytes()).unwrap().results?;
        let mut results: Vec<_> = results.into_iter().map(|(id, error)| (id.to_string(), error)).collect();
        results.sort();
        Some(results)
    }

    #[test]
    fn an_answer_lists_events_and_errors() {
        let listed = results(r#"{"pdus":{"$a":{},"$b":{"error":"no"},"$c":{"error":{"x":1}},"$d":7,"$\u0065":null}}"#);
        let expected = [
            ("$a", None),
            ("$b", Some("no")),
            ("$c", Some(r#"{"x":1}"#)),
            ("$d", None),
            ("$e", None),
        ];
        assert_eq!(
            listed.unwrap(),
            expected.map(|(id, error)| (id.to_owned(), error.map(str::to_owned)))
        );
        assert_eq!(results(r#"{"pdus":{}}"#), Some(vec![]));
        assert_eq!(results("{}"), None);
        assert_eq!(results(r#"{"pdus":[1],"other":[[[]]]}"#), None);
    }

    #[test]
    fn what_is_no_object_is_not_an_answer() {
        for body in ["", "[]", "null", "OK", "{", "<html>", "{}x", "\"\""] {
            assert_eq!(Accepted::read(body.as_bytes()), None, "{body}");
        }
        assert_eq!(Accepted::read(b"{\"pdus\":\xff}"), None);
    }

    #[test]
    fn what_strangers_write_is_bounded() {
        let long = "é".repeat(MAX_ERROR_BYTES);
        let body = format!(
            r#"{{"pdus":{{"${}":{{}},"$a":{{"error":"{long}"}}}}}}"#,
            "x".repeat(MAX_ID_BYTES)
        );
        let listed = results(&body).unwrap();
        assert_eq!(listed.len(), 1);
        assert_eq!(listed[0].1.as_ref().unwrap().len(), MAX_ERROR_BYTES);
        let deep = format!(r#"{{"pdus":{{"$a":{}{}}}}}"#, "[".repeat(100_000), "]".repeat(100_000));
        assert_eq!(results(&deep).unwrap(), [("$a".to_owned(), None)]);
    }
}
