//! The homeserver's signing key, and other homeservers' keys.

use base64::{Engine, engine::general_purpose::STANDARD_NO_PAD};
use ed25519_dalek::{Signature, SigningKey as Ed25519Key, VerifyingKey, ed25519::signature::MultipartSigner};

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

/// The public half of a server's key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VerifyKey(VerifyingKey);

impl VerifyKey {
    /// The key of that unpadded base64; `None` if it is none.
    #[must_use]
    pub fn from_base64(text: &str) -> Option<Self> {
        let bytes: [u8; 32] = STANDARD_NO_PAD.decode(text).ok()?.try_into().ok()?;
        VerifyingKey::from_bytes(&bytes).ok().map(Self)
    }

    /// Its unpadded base64.
    #[must_use]
    pub fn to_base64(&self) -> String {
        STANDARD_NO_PAD.encode(self.0.as_bytes())
    }

    /// Whether that (in unpadded base64) is the key's signature over the message.
    #[must_use]
    pub fn verifies(&self, message: &[u8], signature: &str) -> bool {
        let bytes: Option<[u8; 64]> = STANDARD_NO_PAD
            .decode(signature)
            .ok()
            .and_then(|bytes| bytes.try_into().ok());
        bytes.is_some_and(|bytes| self.0.verify_strict(message, &Signature::from_bytes(&bytes)).is_ok())
    }
}
