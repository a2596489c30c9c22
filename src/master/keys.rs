//! Which keys do servers sign with? Our own document, and others' keys: remembered, stored, fetched.

use std::{collections::HashMap, sync::Arc, time::Duration};

use parking_lot::Mutex;
use serde::Deserialize;
use serde_json::json;
use tokio::time::Instant;

use crate::{
    core::{
        canonical_json,
        clock::{self, Millis},
        event::{self, EventError},
        id::{MAX_ID_BYTES, ServerName},
        signing::{SigningKey, VerifyKey},
        store::{RemoteKey, Sqlite, StoreError},
    },
    federation::client::{AskError, Client, Question},
};

/// How long others may rely on what our document says; and the longest we rely on theirs.
const OUR_VALIDITY: i64 = 24 * 3600 * 1000;
const MAX_VALIDITY: i64 = 7 * 24 * 3600 * 1000;

/// A server is not asked again so soon, whatever came of it.
const PAUSE: Duration = Duration::from_secs(30);

/// Longest document that is read, and the most keys that are taken from it.
const MAX_DOCUMENT_BYTES: usize = 64 * 1024;
const MAX_KEYS: usize = 64;

/// Servers remembered; beyond that, those that nobody asks about just now are forgotten (what they said is stored).
const MAX_SERVERS: usize = 10_000;

/// Why a key is not to be had.
#[derive(Debug, Clone, thiserror::Error)]
pub enum KeyError {
    /// The server did not answer, or not with a document.
    #[error("the keys of {0} cannot be fetched: {1}")]
    Unreachable(ServerName, AskError),
    /// What it answered is not its document.
    #[error("the key document of {0} is wrong: {1}")]
    Document(ServerName, &'static str),
    /// It has no such key, or that one was not valid then.
    #[error("{0} has no key {1:?} that was valid at the time")]
    Unknown(ServerName, String),
    /// The database.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Our document, `GET /_matrix/key/v2/server`, as of `now`.
pub fn own_document(name: &ServerName, key: &SigningKey, now: Millis) -> Result<String, EventError> {
    let document = json!({
        "server_name": name.as_str(),
        "valid_until_ts": now.plus(OUR_VALIDITY).0,
        "verify_keys": { key.key_id(): { "key": key.verify_key().to_base64() } },
        "old_verify_keys": {},
    });
    event::sign_object(&document.to_string(), name, key)
}

/// Everybody's keys.
pub struct Keyring {
    name: ServerName,
    own: (String, VerifyKey),
    client: Client,
    store: Sqlite,
    servers: Mutex<HashMap<ServerName, Arc<tokio::sync::Mutex<Server>>>>,
}

/// What is known of a server. Its lock is held while it is asked, so that this is done once.
#[derive(Default)]
struct Server {
    loaded: bool,
    keys: HashMap<String, Key>,
    /// When it was last asked, and what came of it if that was nothing.
    asked: Option<(Instant, Option<KeyError>)>,
}

struct Key {
    key: VerifyKey,
    valid_until: Millis,
}

impl Server {
    fn learn(&mut self, keys: Vec<RemoteKey>) {
        self.keys.extend(keys.into_iter().filter_map(
            |RemoteKey {
                 key_id,
                 key,
                 valid_until,
             }| {
                let key = VerifyKey::from_bytes(&key)?;
                Some((key_id, Key { key, valid_until }))
            },
        ));
    }

    fn valid(&self, key_id: &str, at: Millis) -> Option<VerifyKey> {
        let key = self.keys.get(key_id).filter(|key| key.valid_until >= at);
        key.map(|key| key.key.clone())
    }
}

impl Keyring {
    /// The keyring of the server `name`, whose own key is `own`.
    pub fn new(name: ServerName, own: &SigningKey, client: Client, store: Sqlite) -> Self {
        Self {
            name,
            own: (own.key_id().to_owned(), own.verify_key()),
            client,
            store,
            servers: Mutex::default(),
        }
    }

    /// The key of that id, if it was valid `at` that time.
    ///
    /// # Errors
    /// Why it is not to be had. A failure is remembered for a while.
    pub async fn get(&self, server: &ServerName, key_id: &str, at: Millis) -> Result<VerifyKey, KeyError> {
        let unknown = || KeyError::Unknown(server.clone(), key_id.to_owned());
        if *server == self.name {
            return if key_id == self.own.0 {
                Ok(self.own.1.clone())
            } else {
                Err(unknown())
            };
        }
        let entry = self.entry(server);
        let mut known = entry.lock().await;
        if !known.loaded {
            let stored = self.store.remote_keys(server).await?;
            known.learn(stored);
            known.loaded = true;
        }
        if let Some(key) = known.valid(key_id, at) {
            return Ok(key);
        }
        if let Some((when, failure)) = &known.asked
            && when.elapsed() < PAUSE
        {
            return Err(failure.clone().unwrap_or_else(unknown));
        }
        let fetched = self.fetch(server).await;
        known.asked = Some((Instant::now(), fetched.as_ref().err().cloned()));
        let keys = fetched?;
        self.store.store_remote_keys(server, &keys).await?;
        known.learn(keys);
        known.valid(key_id, at).ok_or_else(unknown)
    }

    fn entry(&self, server: &ServerName) -> Arc<tokio::sync::Mutex<Server>> {
        let mut servers = self.servers.lock();
        if servers.len() >= MAX_SERVERS {
            servers.retain(|_, entry| Arc::strong_count(entry) > 1);
        }
        Arc::clone(servers.entry(server.clone()).or_default())
    }

    async fn fetch(&self, server: &ServerName) -> Result<Vec<RemoteKey>, KeyError> {
        let question = Question {
            uri: "/_matrix/key/v2/server",
            body: None,
            max_answer: MAX_DOCUMENT_BYTES,
        };
        let answer = self.client.ask(server, question).await;
        let answer = answer.map_err(|error| KeyError::Unreachable(server.clone(), error))?;
        read(&answer, server, clock::now().wall).map_err(|what| KeyError::Document(server.clone(), what))
    }
}

#[derive(Deserialize)]
struct Document {
    server_name: String,
    valid_until_ts: i64,
    #[serde(default)]
    verify_keys: HashMap<String, NewKey>,
    #[serde(default)]
    old_verify_keys: HashMap<String, OldKey>,
    #[serde(default)]
    signatures: HashMap<String, HashMap<String, String>>,
}

#[derive(Deserialize)]
struct NewKey {
    key: String,
}

#[derive(Deserialize)]
struct OldKey {
    key: String,
    expired_ts: i64,
}

/// The keys that the document of `server` names, if one of them signed it.
fn read(bytes: &[u8], server: &ServerName, now: Millis) -> Result<Vec<RemoteKey>, &'static str> {
    let text = std::str::from_utf8(bytes).map_err(|_| "not UTF-8")?;
    let canonical = canonical_json::encode(text).map_err(|_| "not JSON")?;
    let document: Document = serde_json::from_str(&canonical).map_err(|_| "a part is missing or of the wrong type")?;
    if document.server_name != server.as_str() {
        return Err("it is another server's");
    }
    if document.verify_keys.len() + document.old_verify_keys.len() > MAX_KEYS {
        return Err("it names too many keys");
    }
    let signatures = document.signatures.get(server.as_str());
    let message = event::signed_object(&canonical);
    let valid_until = Millis(document.valid_until_ts).min(now.plus(MAX_VALIDITY));
    let mut signed = false;
    let mut keys = Vec::new();
    for (key_id, NewKey { key }) in document.verify_keys {
        let Some(key) = usable(&key_id, &key) else { continue };
        let signature = signatures.and_then(|signatures| signatures.get(&key_id));
        signed |= signature.is_some_and(|signature| key.verifies(message.as_bytes(), signature));
        keys.push(remote_key(key_id, &key, valid_until));
    }
    if !signed {
        return Err("none of its keys has signed it");
    }
    for (key_id, OldKey { key, expired_ts }) in document.old_verify_keys {
        if let Some(key) = usable(&key_id, &key) {
            keys.push(remote_key(key_id, &key, Millis(expired_ts).min(now)));
        }
    }
    Ok(keys)
}

fn usable(key_id: &str, key: &str) -> Option<VerifyKey> {
    let known = key_id.starts_with("ed25519:") && key_id.len() <= MAX_ID_BYTES;
    known.then(|| VerifyKey::from_base64(key)).flatten()
}

fn remote_key(key_id: String, key: &VerifyKey, valid_until: Millis) -> RemoteKey {
    RemoteKey {
        key_id,
        key: key.as_bytes().to_vec(),
        valid_until,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Millis = Millis(1_700_000_000_000);

    fn key() -> SigningKey {
        SigningKey::from_seed("a", &[1; 32])
    }

    fn signed(document: &serde_json::Value) -> Vec<u8> {
        event::sign_object(&document.to_string(), &"a.example".into(), &key())
            .expect("signed")
            .into_bytes()
    }

    #[test]
    fn what_we_say_of_our_keys_others_believe() {
        let server = ServerName::from("a.example");
        let document = own_document(&server, &key(), NOW).expect("a document");
        let keys = read(document.as_bytes(), &server, NOW).expect("believed");
        let expected = remote_key("ed25519:a".into(), &key().verify_key(), NOW.plus(OUR_VALIDITY));
        assert_eq!(keys, [expected]);
        assert!(read(document.as_bytes(), &"b.example".into(), NOW).is_err());
        let forged = document.replace("valid_until_ts", "valid_until_tz");
        assert!(read(forged.as_bytes(), &server, NOW).is_err());
        let forged = document.replace("1700086400000", "1700086400001");
        assert_eq!(
            read(forged.as_bytes(), &server, NOW),
            Err("none of its keys has signed it")
        );
    }

    #[test]
    fn old_keys_hold_until_they_expired_and_none_for_ever() {
        let server = ServerName::from("a.example");
        let public = key().verify_key().to_base64();
        let document = json!({
            "server_name": "a.example",
            "valid_until_ts": i64::MAX,
            "verify_keys": { "ed25519:a": { "key": public }, "rsa:b": { "key": "x" }, "ed25519:bad": { "key": "x" } },
            "old_verify_keys": { "ed25519:old": { "key": public, "expired_ts": 5 } },
        });
        let mut keys = read(&signed(&document), &server, NOW).expect("believed");
        keys.sort_by(|a, b| a.key_id.cmp(&b.key_id));
        let of: Vec<_> = keys.iter().map(|key| (key.key_id.as_str(), key.valid_until)).collect();
        assert_eq!(of, [("ed25519:a", NOW.plus(MAX_VALIDITY)), ("ed25519:old", Millis(5))]);
    }

    #[test]
    fn hostile_documents_are_refused() {
        let server = ServerName::from("a.example");
        for text in [
            "",
            "[]",
            "{}",
            "\u{0}",
            r#"{"server_name":"a.example","valid_until_ts":"x"}"#,
        ] {
            assert!(read(text.as_bytes(), &server, NOW).is_err(), "{text}");
        }
        assert!(read(b"\xff", &server, NOW).is_err());
        let many: HashMap<String, _> = (0..=MAX_KEYS)
            .map(|n| (format!("ed25519:{n}"), json!({ "key": "x" })))
            .collect();
        let document = json!({ "server_name": "a.example", "valid_until_ts": 1, "verify_keys": many });
        assert_eq!(read(&signed(&document), &server, NOW), Err("it names too many keys"));
    }
}
