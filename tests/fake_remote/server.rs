//! The fake homeservers: what each answers, and how it can be told to misbehave.

use std::{
    collections::{HashMap, HashSet},
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use base64::{Engine as _, engine::general_purpose::STANDARD_NO_PAD};
use bytes::Bytes;
use ed25519_dalek::{Signer as _, SigningKey};
use hyper::Request;
use parking_lot::Mutex;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tokio::{net::TcpListener, task::JoinHandle};

use super::{
    event::{Identity, Keys, canonical},
    record::{Record, SEND},
    serve::{self, Answer, Site},
    tls::{self, Certificates},
};

/// How a fake server treats transactions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// 200, with every PDU listed.
    Accept,
    /// As [`Mode::Accept`], after this time.
    Slow(Duration),
    /// Takes no connection, for transactions or anything else.
    Down,
    /// Reads the transaction, then closes the connection.
    HangUp,
    /// Reads the transaction, then says nothing.
    Stall,
    /// Answers with this status.
    Refuse(u16),
    /// 200, with no PDU listed, for the next so many transactions; then as [`Mode::Accept`].
    Unlisted { next: u32 },
    /// 200, with an error for every PDU.
    PduErrors,
}

/// A homeserver that is not one.
pub struct FakeServer {
    pub identity: Identity,
    /// All it was sent.
    pub record: Record,
    pub(super) state: Mutex<State>,
}

pub(super) struct State {
    mode: Mode,
    /// Events it can be asked for: its own joins, and what it accepted.
    pub events: HashMap<String, Value>,
    /// Rooms whose join it has not finished: as Synapse does, it skips their PDUs and lists nothing for them.
    pub joining: HashSet<String>,
    /// How often it was asked for an event.
    asked: usize,
}

impl State {
    /// How the transaction that has just come is to be treated.
    fn next_mode(&mut self) -> Mode {
        let mode = self.mode;
        if let Mode::Unlisted { next } = mode {
            self.mode = if next > 1 {
                Mode::Unlisted { next: next - 1 }
            } else {
                Mode::Accept
            };
        }
        mode
    }
}

impl FakeServer {
    /// A server of this name. Requests are checked against these servers' keys.
    pub fn new(name: &str, keys: Arc<Keys>) -> Self {
        let seed = Sha256::digest(name.as_bytes()).into();
        Self {
            identity: Identity {
                name: name.to_owned(),
                key_id: "ed25519:fake".to_owned(),
                key: SigningKey::from_bytes(&seed),
            },
            record: Record::new(name, keys),
            state: Mutex::new(State {
                mode: Mode::Accept,
                events: HashMap::new(),
                joining: HashSet::new(),
                asked: 0,
            }),
        }
    }

    /// Its Matrix name.
    pub fn name(&self) -> &str {
        &self.identity.name
    }

    /// From now on it does this.
    pub fn set_mode(&self, mode: Mode) {
        self.state.lock().mode = mode;
    }

    /// It has dealt with the answer to its `send_join`: from now on it takes the room's PDUs and knows its own join.
    pub fn finish_joining(&self, room_id: &str) -> Instant {
        self.state.lock().joining.remove(room_id);
        Instant::now()
    }

    /// How often it was asked for an event by id.
    pub fn asked_for_events(&self) -> usize {
        self.state.lock().asked
    }

    /// The answer to a request; `None` hangs up.
    pub async fn answer(&self, request: Request<Bytes>) -> Option<Answer> {
        let path = request.uri().path();
        if self.state.lock().mode == Mode::Down {
            return None;
        }
        if path.starts_with(SEND) {
            self.take_transaction(&request).await
        } else if path.starts_with("/_matrix/key/v2/server") {
            Some(serve::json(200, &self.keys()))
        } else if let Some(event_id) = path.strip_prefix("/_matrix/federation/v1/event/") {
            Some(self.event(event_id))
        } else {
            Some(serve::json(
                404,
                &json!({ "errcode": "M_UNRECOGNIZED", "error": "not served here" }),
            ))
        }
    }

    fn keys(&self) -> Value {
        let Identity { name, key_id, key } = &self.identity;
        let mut keys = json!({
            "server_name": name,
            "verify_keys": { key_id: { "key": STANDARD_NO_PAD.encode(key.verifying_key()) } },
            "old_verify_keys": {},
            // Far enough that no clock matters, near enough that Synapse keeps it: it caps the time itself.
            "valid_until_ts": 4_000_000_000_000_u64,
        });
        let signature = STANDARD_NO_PAD.encode(key.sign(&canonical(&keys)).to_bytes());
        keys["signatures"] = json!({ name: { key_id: signature } });
        keys
    }

    fn event(&self, event_id: &str) -> Answer {
        let event_id = event_id.replace("%24", "$");
        let mut state = self.state.lock();
        state.asked += 1;
        let known = state.events.get(&event_id);
        let known = known.filter(|event| !state.joining.contains(event["room_id"].as_str().unwrap_or_default()));
        match known {
            Some(event) => serve::json(
                200,
                &json!({ "origin": self.name(), "origin_server_ts": event["origin_server_ts"], "pdus": [event] }),
            ),
            None => serve::json(
                404,
                &json!({ "errcode": "M_NOT_FOUND", "error": "Could not find event" }),
            ),
        }
    }

    async fn take_transaction(&self, request: &Request<Bytes>) -> Option<Answer> {
        let open = match self.record.begin(request) {
            Ok(open) => open,
            Err(problem) => {
                return Some(serve::json(
                    401,
                    &json!({ "errcode": "M_UNAUTHORIZED", "error": problem }),
                ));
            }
        };
        let mode = self.state.lock().next_mode();
        match mode {
            Mode::Accept | Mode::Down | Mode::Unlisted { .. } | Mode::PduErrors => {}
            Mode::Slow(delay) => tokio::time::sleep(delay).await,
            Mode::HangUp => return None,
            Mode::Stall => std::future::pending().await,
            Mode::Refuse(status) => {
                return Some(serve::json(
                    status,
                    &json!({ "errcode": "M_UNKNOWN", "error": "refused on purpose" }),
                ));
            }
        }
        let body: Value = serde_json::from_slice(request.body()).unwrap_or_default();
        let events = body["pdus"].as_array().into_iter().flatten();
        let mut listed = HashSet::new();
        {
            let mut state = self.state.lock();
            for (pdu, event) in open.pdus().into_iter().zip(events) {
                if matches!(mode, Mode::Unlisted { .. }) || state.joining.contains(&pdu.room_id) {
                    continue;
                }
                if mode != Mode::PduErrors {
                    state.events.insert(pdu.event_id.clone(), event.clone());
                }
                listed.insert(pdu.event_id);
            }
        }
        let result = if mode == Mode::PduErrors {
            json!({ "error": "refused on purpose" })
        } else {
            json!({})
        };
        let results: HashMap<_, _> = listed.iter().map(|id| (id, &result)).collect();
        let answer = serve::json(200, &json!({ "pdus": results }));
        open.accepted(&listed);
        Some(answer)
    }
}

/// The process's fake servers, all behind one port.
pub struct FakeHost {
    port: u16,
    keys: Arc<Keys>,
    servers: Arc<Servers>,
    task: JoinHandle<()>,
}

#[derive(Default)]
struct Servers(Mutex<HashMap<Ipv4Addr, Arc<FakeServer>>>);

impl Servers {
    fn at(&self, local: SocketAddr) -> Option<Arc<FakeServer>> {
        match local {
            SocketAddr::V4(local) => self.0.lock().get(local.ip()).cloned(),
            SocketAddr::V6(_) => None,
        }
    }
}

impl Site for Servers {
    fn is_up(&self, local: SocketAddr) -> bool {
        self.at(local)
            .is_some_and(|server| server.state.lock().mode != Mode::Down)
    }

    async fn answer(&self, local: SocketAddr, request: Request<Bytes>) -> Option<Answer> {
        self.at(local)?.answer(request).await
    }
}

impl FakeHost {
    /// Listens on `port`. Requests are checked against these servers' keys.
    pub async fn start(port: u16, certificates: &Certificates, keys: Arc<Keys>) -> Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).await?;
        let servers = Arc::<Servers>::default();
        Ok(Self {
            port,
            keys,
            task: serve::serve(listener, certificates, servers.clone())?,
            servers,
        })
    }

    /// A new server, with a name never used before.
    pub fn add(&self) -> Result<Arc<FakeServer>> {
        let mut servers = self.servers.0.lock();
        let number = u16::try_from(servers.len()).ok().filter(|n| *n < tls::ADDRESSES);
        let address = tls::address(number.context("no address is left for another fake server")?);
        let server = Arc::new(FakeServer::new(&format!("{address}:{}", self.port), self.keys.clone()));
        servers.insert(address, server.clone());
        Ok(server)
    }
}

impl Drop for FakeHost {
    fn drop(&mut self) {
        self.task.abort();
    }
}
