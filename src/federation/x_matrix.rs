//! How does a request prove who sent it? The `Authorization: X-Matrix` header.

use base64::{Engine, engine::general_purpose::STANDARD_NO_PAD};

use crate::core::{canonical_json::push_string, id::ServerName, signing::SigningKey};

/// What of a request is signed.
#[derive(Debug, Clone, Copy)]
pub struct Signed<'a> {
    /// The name of who sends it.
    pub origin: &'a ServerName,
    /// The Matrix name of the server it is for, whatever host that is reached at.
    pub destination: &'a ServerName,
    /// The HTTP method.
    pub method: &'a str,
    /// Path and query exactly as they go out.
    pub uri: &'a str,
    /// The body: canonical JSON.
    pub content: Option<&'a [u8]>,
}

impl Signed<'_> {
    /// The header's value.
    #[must_use]
    pub fn authorization(&self, key: &SigningKey) -> String {
        let (before, after) = self.around_content();
        let content = self.content.unwrap_or_default();
        let signature = STANDARD_NO_PAD.encode(key.sign(&[before, content, after.as_bytes()]));
        // No value can hold a quote: server names are checked before, key ids have no room for one.
        format!(
            r#"X-Matrix origin="{}",key="{}",sig="{signature}",destination="{}""#,
            self.origin,
            key.key_id(),
            self.destination
        )
    }

    /// What stands before and after the content in the canonical JSON of an object with these members. The content is
    /// canonical already, and too large to be copied for each destination.
    pub(super) fn around_content(&self) -> (&'static [u8], String) {
        let (before, comma): (&[u8], _) = match self.content {
            Some(_) => (br#"{"content":"#, ","),
            None => (b"{", ""),
        };
        let mut after = String::with_capacity(128 + self.uri.len());
        after.push_str(comma);
        for (key, value) in [
            (r#""destination":"#, self.destination.as_str()),
            (r#","method":"#, self.method),
            (r#","origin":"#, self.origin.as_str()),
            (r#","uri":"#, self.uri),
        ] {
            after.push_str(key);
            push_string(&mut after, value);
        }
        after.push('}');
        (before, after)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value as Json;

    use super::*;
    use crate::core::canonical_json;

    #[test]
    fn reproduces_the_golden_headers() {
        let vectors: Json =
            serde_json::from_str(include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/vectors.json"))).unwrap();
        let key = SigningKey::from_seed("a_test", &std::array::from_fn(|i| u8::try_from(i).unwrap()));
        for vector in vectors["request_signing"].as_array().unwrap() {
            let text = |name: &str| vector[name].as_str().unwrap();
            let body = match &vector["content"] {
                Json::Null => None,
                content => Some(canonical_json::encode(&content.to_string()).unwrap()),
            };
            assert_eq!(body.as_deref(), vector["body_bytes_utf8"].as_str());
            let signed = Signed {
                origin: &text("origin").into(),
                destination: &text("destination").into(),
                method: text("method"),
                uri: text("uri"),
                content: body.as_deref().map(str::as_bytes),
            };
            let (before, after) = signed.around_content();
            let content = signed.content.unwrap_or_default();
            let bytes = [before, content, after.as_bytes()].concat();
            assert_eq!(String::from_utf8(bytes).unwrap(), text("signed_bytes_utf8"));
            assert_eq!(signed.authorization(&key), vector["authorization"][0].as_str().unwrap());
        }
    }
}
