//! Who sent us this request? The `Authorization: X-Matrix` header of a request that comes in.

use super::x_matrix::Signed;
use crate::core::{
    id::{MAX_ID_BYTES, ServerName},
    signing::VerifyKey,
};

/// Longest header that is read, bytes: three names and a signature, with room for what the future adds.
const MAX_HEADER_BYTES: usize = 2048;

/// Who a request says it is from, not checked yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Credentials {
    /// The server that claims to have sent it.
    pub origin: ServerName,
    /// Which of its keys it signed with.
    pub key_id: String,
    destination: Option<String>,
    signature: String,
}

/// What is wrong with an `Authorization` header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// Another scheme, or not of the form of a header with parameters.
    #[error(
        "the Authorization header is not of the form `X-Matrix origin=\"...\",destination=\"...\",key=\"...\",sig=\"...\"`"
    )]
    Form,
    /// A parameter is missing, empty or too long.
    #[error("the X-Matrix header lacks a usable `{0}`")]
    Parameter(&'static str),
}

impl Credentials {
    /// Reads the header's value.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn parse(header: &str) -> Result<Self, Malformed> {
        let (scheme, rest) = header.trim().split_once(' ').ok_or(Malformed::Form)?;
        if !scheme.eq_ignore_ascii_case("X-Matrix") || header.len() > MAX_HEADER_BYTES {
            return Err(Malformed::Form);
        }
        let (mut origin, mut destination, mut key, mut sig) = (None, None, None, None);
        let mut rest = rest.trim_start();
        while !rest.is_empty() {
            let (name, value, after) = parameter(rest).ok_or(Malformed::Form)?;
            let slot = match name.to_ascii_lowercase().as_str() {
                "origin" => Some(&mut origin),
                "destination" => Some(&mut destination),
                "key" => Some(&mut key),
                "sig" => Some(&mut sig),
                _ => None,
            };
            if let Some(slot) = slot {
                *slot = Some(value);
            }
            rest = after;
        }
        let usable = |value: Option<String>, name| {
            value
                .filter(|value| !value.is_empty() && value.len() <= MAX_ID_BYTES)
                .ok_or(Malformed::Parameter(name))
        };
        let origin = ServerName::from(usable(origin, "origin")?);
        if origin.parts().is_none() {
            return Err(Malformed::Parameter("origin"));
        }
        Ok(Self {
            origin,
            key_id: usable(key, "key")?,
            signature: usable(sig, "sig")?,
            destination,
        })
    }

    /// Whether the request is meant for the server `us`. Old servers do not say.
    #[must_use]
    pub fn are_for(&self, us: &ServerName) -> bool {
        self.destination.as_deref().is_none_or(|name| name == us.as_str())
    }

    /// Whether `key` signed this request to `us`. `uri` is path and query as they came in, `content` the body in its
    /// canonical form.
    #[must_use]
    pub fn hold(&self, key: &VerifyKey, us: &ServerName, method: &str, uri: &str, content: Option<&[u8]>) -> bool {
        let signed = Signed {
            origin: &self.origin,
            destination: us,
            method,
            uri,
            content,
        };
        let (before, after) = signed.around_content();
        let message = [before, content.unwrap_or_default(), after.as_bytes()].concat();
        self.are_for(us) && key.verifies(&message, &self.signature)
    }
}

/// The first `name=value` of a list (the value a token or in quotes), and what follows its comma.
fn parameter(text: &str) -> Option<(&str, String, &str)> {
    let (name, rest) = text.split_once('=')?;
    let mut value = String::new();
    let rest = if let Some(quoted) = rest.strip_prefix('"') {
        let mut chars = quoted.char_indices();
        let end = loop {
            match chars.next()? {
                (at, '"') => break at + 1,
                (_, '\\') => value.push(chars.next()?.1),
                (_, c) => value.push(c),
            }
        };
        &quoted[end..]
    } else {
        let end = rest.find([',', ' ', '\t']).unwrap_or(rest.len());
        value.push_str(&rest[..end]);
        &rest[end..]
    };
    let rest = rest.trim_start();
    let rest = match rest.strip_prefix(',') {
        Some(rest) => rest.trim_start(),
        None if rest.is_empty() => rest,
        None => return None,
    };
    Some((name.trim(), value, rest))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::signing::SigningKey;

    const URI: &str = "/_matrix/federation/v1/send/1?x=%20";

    fn signed(key: &SigningKey, content: Option<&[u8]>) -> String {
        let (origin, destination) = (ServerName::from("a.example:8448"), ServerName::from("b.example"));
        let signed = Signed {
            origin: &origin,
            destination: &destination,
            method: "PUT",
            uri: URI,
            content,
        };
        signed.authorization(key)
    }

    #[test]
    fn what_one_server_signs_another_believes() {
        let key = SigningKey::from_seed("k", &[1; 32]);
        let header = signed(&key, Some(b"{}"));
        let credentials = Credentials::parse(&header).expect("well-formed");
        assert_eq!(credentials.origin, ServerName::from("a.example:8448"));
        assert_eq!(credentials.key_id, "ed25519:k");
        let us = ServerName::from("b.example");
        let public = key.verify_key();
        assert!(credentials.hold(&public, &us, "PUT", URI, Some(b"{}")));
        assert!(!credentials.hold(&public, &us, "PUT", URI, Some(b"{\"a\":1}")), "body");
        assert!(!credentials.hold(&public, &us, "PUT", URI, None), "no body");
        assert!(!credentials.hold(&public, &us, "GET", URI, Some(b"{}")), "method");
        assert!(!credentials.hold(&public, &us, "PUT", "/x", Some(b"{}")), "uri");
        assert!(
            !credentials.hold(&public, &"c.example".into(), "PUT", URI, Some(b"{}")),
            "destination"
        );
        let other = SigningKey::from_seed("k", &[2; 32]).verify_key();
        assert!(!credentials.hold(&other, &us, "PUT", URI, Some(b"{}")), "key");
        // Who does not say for whom it is still signs for whom it is.
        let silent = header.replace(",destination=\"b.example\"", "");
        let credentials = Credentials::parse(&silent).expect("well-formed");
        assert!(credentials.hold(&public, &us, "PUT", URI, Some(b"{}")));
    }

    #[test]
    fn headers_are_read_as_http_writes_them() {
        for header in [
            r#"X-Matrix origin="a",key="ed25519:1",sig="s",destination="b""#,
            r"x-matrix  origin=a, key=ed25519:1 ,sig=s,destination=b",
            r#"X-Matrix Origin="\a",future="1,\"2",SIG=s,key="ed25519:1",destination="b","#,
        ] {
            let credentials = Credentials::parse(header).expect(header);
            let read = (
                credentials.origin.as_str(),
                credentials.key_id.as_str(),
                credentials.signature.as_str(),
            );
            assert_eq!(read, ("a", "ed25519:1", "s"), "{header}");
            assert!(credentials.are_for(&"b".into()) && !credentials.are_for(&"c".into()));
        }
    }

    #[test]
    fn nonsense_is_refused_with_its_reason() {
        let long = format!("X-Matrix origin=a,key=k,sig={}", "s".repeat(MAX_HEADER_BYTES));
        for (header, expected) in [
            ("", Malformed::Form),
            ("Bearer abc", Malformed::Form),
            ("X-Matrix", Malformed::Form),
            ("X-Matrix origin", Malformed::Form),
            ("X-Matrix origin=\"a", Malformed::Form),
            ("X-Matrix origin=\"a\\", Malformed::Form),
            ("X-Matrix origin=\"a\" key=k", Malformed::Form),
            (&long, Malformed::Form),
            ("X-Matrix key=k,sig=s", Malformed::Parameter("origin")),
            ("X-Matrix origin=a/b,key=k,sig=s", Malformed::Parameter("origin")),
            ("X-Matrix origin=a,sig=s", Malformed::Parameter("key")),
            ("X-Matrix origin=a,key=k,sig=", Malformed::Parameter("sig")),
        ] {
            assert_eq!(Credentials::parse(header), Err(expected), "{header:.60}");
        }
    }
}
