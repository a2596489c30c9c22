//! The homeserver's signing key.

use ed25519_dalek::{SigningKey as Ed25519Key, ed25519::signature::MultipartSigner};

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
