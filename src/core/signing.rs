//! Signing keys: the homeserver's own, and those that others' signatures are checked with.

use base64::{Engine, alphabet, engine, engine::DecodePaddingMode};
use ed25519_dalek::{Signature, SigningKey as Ed25519Key, VerifyingKey, ed25519::signature::MultipartSigner};

/// Base64 with or without padding, as others write keys and signatures.
const BASE64: engine::GeneralPurpose = engine::GeneralPurpose::new(
    &alphabet::STANDARD,
    engine::GeneralPurposeConfig::new()
        .with_encode_padding(false)
        .with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// An ed25519 key with its Matrix key id. Printing it shows the id only.
#[derive(Clone)]
pub struct SigningKey {
    key_id: String,
    key: Ed25519Key,
}

impl SigningKey {
    /// The key made from a 32-byte seed, under the id `ed25519:{version}`.
    #[must_use]
    pub fn from_seed(version: &str, seed: &[u8; 32]) -> Self {
        Self {
            key_id: format!("ed25519:{version}"),
            key: Ed25519Key::from_bytes(seed),
        }
    }

    /// `ed25519:VERSION`.
    #[must_use]
    pub fn key_id(&self) -> &str {
        &self.key_id
    }

    /// The key that its signatures are checked with.
    #[must_use]
    pub fn verify_key(&self) -> VerifyKey {
        VerifyKey(self.key.verifying_key())
    }

    /// The signature over the message whose parts these are, one after another.
    #[must_use]
    pub fn sign(&self, parts: &[&[u8]]) -> [u8; 64] {
        self.key.multipart_sign(parts).to_bytes()
    }
}

impl std::fmt::Debug for SigningKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("SigningKey").field(&self.key_id).finish()
    }
}

/// The public half of an ed25519 key: what a signature is checked with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VerifyKey(VerifyingKey);

impl VerifyKey {
    /// The key of that base64 text, if it is one.
    #[must_use]
    pub fn from_base64(text: &str) -> Option<Self> {
        Self::from_bytes(&BASE64.decode(text).ok()?)
    }

    /// The key of these 32 bytes, if it is one.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        VerifyingKey::from_bytes(bytes.try_into().ok()?).ok().map(Self)
    }

    /// Its bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8; 32] {
        self.0.as_bytes()
    }

    /// As it stands in a key document.
    #[must_use]
    pub fn to_base64(&self) -> String {
        BASE64.encode(self.0.as_bytes())
    }

    /// Whether `signature` (base64) is this key's over `message`.
    #[must_use]
    pub fn verifies(&self, message: &[u8], signature: &str) -> bool {
        let bytes = BASE64.decode(signature).ok();
        bytes
            .and_then(|bytes| Signature::from_slice(&bytes).ok())
            .is_some_and(|signature| self.0.verify_strict(message, &signature).is_ok())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signature_holds_for_its_message_and_key_only() {
        let key = SigningKey::from_seed("a", &[7; 32]);
        let signature = BASE64.encode(key.sign(&[b"mess", b"age"]));
        let verify = VerifyKey::from_base64(&key.verify_key().to_base64()).expect("a key");
        assert!(verify.verifies(b"message", &signature));
        assert!(verify.verifies(b"message", &format!("{signature}==")));
        assert!(!verify.verifies(b"another", &signature));
        let other = SigningKey::from_seed("a", &[8; 32]).verify_key();
        assert!(!other.verifies(b"message", &signature));
        for nonsense in ["", "a", "!", &signature[1..]] {
            assert!(!verify.verifies(b"message", nonsense), "{nonsense:?}");
            assert_eq!(VerifyKey::from_base64(nonsense), None, "{nonsense:?}");
        }
    }
}
