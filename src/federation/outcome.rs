//! What came of a try to reach a server, and what follows from it?

use std::time::Duration;

use super::transaction::Accepted;

/// Longest error code and detail text that are kept, bytes.
const MAX_TEXT_BYTES: usize = 300;

/// A server's wish to be left alone is believed up to this.
const MAX_RETRY_AFTER: Duration = Duration::from_hours(1);

/// What came of one try to send a transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// 2xx with a JSON object: the whole transaction is accepted.
    Accepted(Accepted),
    /// 2xx, but not with a JSON object, or with one that is too large or did not arrive in time.
    Unreadable {
        /// HTTP status.
        status: u16,
        /// What was wrong.
        detail: String,
    },
    /// Any other status; redirects are not followed, because a signature is for one server only.
    Refused {
        /// HTTP status.
        status: u16,
        /// `errcode` of the answer.
        errcode: Option<String>,
        /// `Retry-After`, or `retry_after_ms` of the answer; at most an hour.
        retry_after: Option<Duration>,
    },
    /// No answer.
    Failed {
        /// How far it came.
        stage: Stage,
        /// What went wrong.
        detail: String,
    },
}

/// How far a try came that got no answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Finding an address that may be connected to.
    Lookup,
    /// TCP.
    Connect,
    /// The TLS handshake.
    Tls,
    /// No answer in time.
    Timeout,
    /// The connection broke, or what came over it was not HTTP.
    Http,
}

/// What came of asking a server whether it has an event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EventProbe {
    /// It has it.
    Known,
    /// 404: it does not have it (yet). Synapse 1.163.2 answers so with an empty object.
    NotFound,
    /// It knows no such question.
    Unsupported,
    /// It says anything else, which tells nothing.
    Other(String),
    /// It says nothing.
    NoAnswer(String),
}

/// What follows from a try.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AfterTry {
    /// Nothing: what was sent was accepted.
    Done,
    /// Not accepted, so it stays owed; but the server is up, so there is no back-off.
    Unreadable,
    /// The server is busy, as a rule with an earlier transaction of ours: the same again, shortly.
    Busy,
    /// Another try within the attempt, with the same id and bytes, may help. If none does: back-off.
    Retry,
    /// It may be about the size or content of what was sent: fewer PDUs may pass.
    Content,
    /// The attempt failed: back-off.
    GiveUp,
}

impl Outcome {
    /// What follows for the attempt.
    ///
    /// | outcome | follows |
    /// |---|---|
    /// | accepted | [`AfterTry::Done`] |
    /// | 2xx, unreadable | [`AfterTry::Unreadable`] |
    /// | 429 | [`AfterTry::Busy`] |
    /// | 5xx, no answer | [`AfterTry::Retry`] |
    /// | 400, 413 | [`AfterTry::Content`] |
    /// | any other status | [`AfterTry::GiveUp`] |
    #[must_use]
    pub fn after(&self) -> AfterTry {
        match self {
            Self::Accepted(_) => AfterTry::Done,
            Self::Unreadable { .. } => AfterTry::Unreadable,
            Self::Refused { status: 429, .. } => AfterTry::Busy,
            Self::Refused { status: 500.., .. } | Self::Failed { .. } => AfterTry::Retry,
            Self::Refused { status: 400 | 413, .. } => AfterTry::Content,
            Self::Refused { .. } => AfterTry::GiveUp,
        }
    }

    /// The HTTP status, if there was an answer.
    #[must_use]
    pub fn status(&self) -> Option<u16> {
        match self {
            Self::Accepted(_) => Some(200),
            Self::Unreadable { status, .. } | Self::Refused { status, .. } => Some(*status),
            Self::Failed { .. } => None,
        }
    }

    /// How long the server asks to be left alone.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Refused { retry_after, .. } => *retry_after,
            _ => None,
        }
    }

    /// Reads a 2xx answer.
    pub(super) fn of_success(status: u16, content_type: Option<&[u8]>, body: &[u8]) -> Self {
        let unreadable = |detail: &str| Self::Unreadable {
            status,
            detail: detail.to_owned(),
        };
        if !content_type.is_some_and(is_json) {
            return unreadable("Content-Type is not application/json");
        }
        Accepted::read(body).map_or_else(|| unreadable("the body is not a JSON object"), Self::Accepted)
    }

    /// Reads any other answer. Its body is empty if it could not be read.
    pub(super) fn of_refusal(status: u16, retry_after: Option<&[u8]>, body: &[u8]) -> Self {
        let error = MatrixError::read(body);
        let header = retry_after.and_then(|value| std::str::from_utf8(value).ok()?.trim().parse().ok());
        let wait = header
            .map(Duration::from_secs)
            .or(error.retry_after_ms.map(Duration::from_millis));
        Self::Refused {
            status,
            errcode: error.errcode,
            retry_after: wait.map(|wait| wait.min(MAX_RETRY_AFTER)),
        }
    }
}

impl EventProbe {
    /// Reads an answer to the request for an event.
    pub(super) fn of_answer(status: u16, body: &[u8]) -> Self {
        if (200..300).contains(&status) {
            return Self::Known;
        }
        let errcode = MatrixError::read(body).errcode;
        match errcode.as_deref() {
            // That is about the endpoint, not about the event.
            Some("M_UNRECOGNIZED") => Self::Unsupported,
            _ if status == 404 => Self::NotFound,
            code => Self::Other(format!("{status} {}", code.unwrap_or_default()).trim_end().to_owned()),
        }
    }
}

/// A Matrix error body, as far as it is used. Each part stands for itself: a wrong type in one does not hide the other.
struct MatrixError {
    errcode: Option<String>,
    retry_after_ms: Option<u64>,
}

impl MatrixError {
    fn read(body: &[u8]) -> Self {
        let answer: serde_json::Map<String, serde_json::Value> = serde_json::from_slice(body).unwrap_or_default();
        let errcode = answer.get("errcode").and_then(serde_json::Value::as_str);
        Self {
            errcode: errcode.map(|code| bounded(code.to_owned())),
            retry_after_ms: answer.get("retry_after_ms").and_then(serde_json::Value::as_u64),
        }
    }
}

/// What a refusal's body says, for people: `errcode` and `error`.
pub(super) fn refusal_text(body: &[u8]) -> String {
    let answer: serde_json::Map<String, serde_json::Value> = serde_json::from_slice(body).unwrap_or_default();
    let text = |key| answer.get(key).and_then(serde_json::Value::as_str);
    let said: Vec<&str> = ["errcode", "error"].into_iter().filter_map(text).collect();
    bounded(said.join(": "))
}

/// `application/json`, with or without parameters.
fn is_json(content_type: &[u8]) -> bool {
    let essence = content_type.split(|&b| b == b';').next().unwrap_or_default();
    essence.trim_ascii().eq_ignore_ascii_case(b"application/json")
}

/// `text`, cut to a length that may be logged and kept.
pub(super) fn bounded(mut text: String) -> String {
    text.truncate(text.floor_char_boundary(MAX_TEXT_BYTES));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(status: u16) -> Outcome {
        Outcome::of_refusal(status, None, b"")
    }

    #[test]
    fn what_follows_from_each_outcome() {
        let failed = Outcome::Failed {
            stage: Stage::Connect,
            detail: String::new(),
        };
        assert_eq!(Outcome::Accepted(Accepted::default()).after(), AfterTry::Done);
        assert_eq!(Outcome::of_success(200, None, b"{}").after(), AfterTry::Unreadable);
        assert_eq!(failed.after(), AfterTry::Retry);
        assert_eq!(refused(429).after(), AfterTry::Busy);
        for status in [500, 502, 503, 504, 599] {
            assert_eq!(refused(status).after(), AfterTry::Retry, "{status}");
        }
        for status in [400, 413] {
            assert_eq!(refused(status).after(), AfterTry::Content, "{status}");
        }
        for status in [101, 300, 301, 302, 307, 308, 401, 403, 404, 405, 408, 422, 499] {
            assert_eq!(refused(status).after(), AfterTry::GiveUp, "{status}");
        }
    }

    #[test]
    fn a_success_must_be_a_json_object() {
        let read =
            |content_type: &str, body: &str| Outcome::of_success(200, Some(content_type.as_bytes()), body.as_bytes());
        for content_type in [
            "application/json",
            "Application/JSON ; charset=utf-8",
            "application/json;x",
        ] {
            assert!(
                matches!(read(content_type, "{}"), Outcome::Accepted(_)),
                "{content_type}"
            );
        }
        for content_type in [
            "",
            "text/json",
            "application/jsonp",
            "application/ld+json",
            "text/html; application/json",
        ] {
            assert!(
                matches!(read(content_type, "{}"), Outcome::Unreadable { status: 200, .. }),
                "{content_type}"
            );
        }
        assert!(matches!(read("application/json", "[]"), Outcome::Unreadable { .. }));
        assert!(matches!(
            Outcome::of_success(201, None, b"{}"),
            Outcome::Unreadable { status: 201, .. }
        ));
    }

    #[test]
    fn a_refusal_may_name_its_code_and_a_time() {
        let read = |header: Option<&str>, body: &str| {
            let Outcome::Refused {
                status: 429,
                errcode,
                retry_after,
            } = Outcome::of_refusal(429, header.map(str::as_bytes), body.as_bytes())
            else {
                panic!("not refused");
            };
            (errcode, retry_after.map(|wait| wait.as_millis()))
        };
        let code = Some("M_LIMIT_EXCEEDED".to_owned());
        let body = r#"{"errcode":"M_LIMIT_EXCEEDED","retry_after_ms":1500}"#;
        assert_eq!(read(None, body), (code.clone(), Some(1500)));
        assert_eq!(read(Some(" 7 "), body), (code.clone(), Some(7000)));
        assert_eq!(
            read(Some("Wed, 21 Oct 2015 07:28:00 GMT"), body),
            (code.clone(), Some(1500))
        );
        assert_eq!(read(Some("99999999999"), ""), (None, Some(3_600_000)));
        assert_eq!(
            read(None, r#"{"errcode":"M_LIMIT_EXCEEDED","retry_after_ms":"x"}"#),
            (code, None)
        );
        assert_eq!(read(None, r#"{"errcode":5,"retry_after_ms":-1}"#), (None, None));
        assert_eq!(read(None, "<html>"), (None, None));
        assert_eq!(read(None, r#"["M_LIMIT_EXCEEDED"]"#), (None, None));
        assert_eq!(
            read(None, &format!(r#"{{"errcode":"{}"}}"#, "é".repeat(1000)))
                .0
                .unwrap()
                .len(),
            MAX_TEXT_BYTES
        );
    }

    #[test]
    fn a_probe_tells_apart_not_found_and_the_rest() {
        let other = |text: &str| EventProbe::Other(text.to_owned());
        assert_eq!(EventProbe::of_answer(200, b"junk"), EventProbe::Known);
        assert_eq!(
            EventProbe::of_answer(404, br#"{"errcode":"M_NOT_FOUND"}"#),
            EventProbe::NotFound
        );
        assert_eq!(
            EventProbe::of_answer(404, br#"{"errcode":"M_UNRECOGNIZED"}"#),
            EventProbe::Unsupported
        );
        assert_eq!(
            EventProbe::of_answer(403, br#"{"errcode":"M_NOT_FOUND"}"#),
            other("403 M_NOT_FOUND")
        );
        assert_eq!(EventProbe::of_answer(404, b"{}"), EventProbe::NotFound);
    }
}
