//! A homeserver with its sender, in this process; and what a client says to it.

use std::{
    net::{Ipv4Addr, SocketAddr},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use burdock::{
    cli::{master::sender_of, sending},
    config::{AddressRanges, Own, Reach},
    core::{
        id::{RoomId, ServerName},
        metrics::Metrics,
        replication::{http_gaps::HttpGaps, local_bus::LocalBus},
        shutdown::Shutdown,
        signing::SigningKey,
        store::HeldEvent,
    },
    master::{Master, Settings},
};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::{net::TcpListener, task::JoinHandle, time::Instant};

use super::certificates::Certificates;

/// What anything may take, on a machine that does much else.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A homeserver that can be stopped and started again.
pub struct Server {
    pub name: ServerName,
    pub key: SigningKey,
    pub reach: Reach,
    settings: Settings,
    running: Option<Running>,
    http: reqwest::Client,
    _folder: Arc<TempDir>,
}

struct Running {
    master: Master,
    shutdown: Shutdown,
    sender: JoinHandle<anyhow::Result<()>>,
}

/// How everybody in a test reaches everybody.
pub fn reach(certificates: &Certificates) -> Reach {
    let mut reach = Reach::load(&[]).expect("defaults");
    reach.federation.address_filter = AddressRanges::default();
    reach.federation.custom_ca = Some(vec![certificates.authority.clone()]);
    reach.federation.timeout = Duration::from_secs(20);
    reach.retry.attempt_max_delay = Duration::from_millis(50);
    reach.retry.min_interval = Duration::from_millis(200);
    reach.retry.max_interval = Duration::from_millis(500);
    reach
}

impl Server {
    pub async fn start(certificates: &Certificates, number: u8) -> Self {
        // The HTTP client of the tests needs one; it fails only where there is one already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        // The name holds the port, so it must be known before the server listens there.
        let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a port");
        let listen = free.local_addr().expect("an address");
        drop(free);
        let folder = Arc::new(tempfile::tempdir().expect("a folder"));
        let name = ServerName::from(listen.to_string());
        let key = SigningKey::from_seed("a_test", &[number; 32]);
        let reach = reach(certificates);
        let settings = Settings {
            name: name.clone(),
            key: key.clone(),
            database: folder.path().join("homeserver.db"),
            federation: reach.federation.clone(),
            listen,
            certificate: Some(certificates.servers.clone()),
            client: Some(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))),
        };
        let mut server = Self {
            name,
            key,
            reach,
            settings,
            running: None,
            http: reqwest::Client::new(),
            _folder: folder,
        };
        server.resume().await;
        server
    }

    pub fn database(&self) -> PathBuf {
        self.settings.database.clone()
    }

    pub fn master(&self) -> &Master {
        &self.running.as_ref().expect("it runs").master
    }

    /// Starts it (again).
    pub async fn resume(&mut self) {
        let bus = LocalBus::default();
        let master = Master::start(self.settings.clone(), bus.clone())
            .await
            .expect("started");
        let own = Own::load(None).expect("defaults");
        let sending = sender_of(self.name.clone(), self.key.clone(), self.database(), &self.reach, own);
        let (metrics, shutdown) = (Arc::new(Metrics::new(&self.name)), Shutdown::default());
        let sender = sending::prepare(sending, bus, HttpGaps::nowhere(), metrics, None, shutdown.clone()).await;
        self.running = Some(Running {
            master,
            shutdown,
            sender: tokio::spawn(sender.expect("a sender")),
        });
    }

    /// Stops it in good order.
    pub async fn stop(&mut self) {
        let Running {
            master,
            shutdown,
            sender,
        } = self.running.take().expect("it runs");
        shutdown.drain.cancel();
        sender.await.expect("no panic").expect("a good end");
        master.stop().await;
    }

    /// One request of a client; `token` may be empty.
    pub async fn client(&self, method: &str, path: &str, token: &str, body: &Value) -> (u16, Value) {
        let address = self.master().client_address().await.expect("clients are served");
        let request = self
            .http
            .request(method.parse().expect("a method"), format!("http://{address}{path}"));
        let request = if token.is_empty() {
            request
        } else {
            request.bearer_auth(token)
        };
        let response = request.body(body.to_string()).send().await.expect("an answer");
        let status = response.status().as_u16();
        (
            status,
            serde_json::from_str(&response.text().await.expect("a body")).expect("JSON"),
        )
    }

    /// The same, if it must go well.
    pub async fn ask(&self, method: &str, path: &str, token: &str, body: &Value) -> Value {
        let (status, answer) = self.client(method, path, token, body).await;
        assert_eq!(status, 200, "{method} {path}: {answer}");
        answer
    }

    pub async fn user(&self, name: &str) -> User {
        let body = json!({ "username": name, "auth": { "type": "m.login.dummy" } });
        let answer = self.ask("POST", "/_matrix/client/v3/register", "", &body).await;
        User {
            id: answer["user_id"].as_str().expect("an id").to_owned(),
            token: answer["access_token"].as_str().expect("a token").to_owned(),
        }
    }

    pub async fn create_room(&self, user: &User, more: Value) -> RoomId {
        let mut body = json!({ "preset": "public_chat" });
        body.as_object_mut()
            .expect("an object")
            .extend(more.as_object().expect("an object").clone());
        let answer = self
            .ask("POST", "/_matrix/client/v3/createRoom", &user.token, &body)
            .await;
        answer["room_id"].as_str().expect("an id").into()
    }

    pub async fn join(&self, user: &User, room: &RoomId, via: &Server) {
        let path = format!(
            "/_matrix/client/v3/join/{}?server_name={}",
            encode(room.as_str()),
            via.name
        );
        self.ask("POST", &path, &user.token, &json!({})).await;
    }

    pub async fn send(&self, user: &User, room: &RoomId, text: &str, sticky: Option<u64>) -> String {
        let sticky = sticky
            .map(|ms| format!("?org.matrix.msc4354.sticky_duration_ms={ms}"))
            .unwrap_or_default();
        let path = format!(
            "/_matrix/client/v3/rooms/{}/send/m.room.message/{text}{sticky}",
            encode(room.as_str())
        );
        let body = json!({ "msgtype": "m.text", "body": text });
        let answer = self.ask("PUT", &path, &user.token, &body).await;
        answer["event_id"].as_str().expect("an id").to_owned()
    }

    pub async fn set_state(&self, user: &User, room: &RoomId, kind: &str, content: &Value) -> String {
        let path = format!("/_matrix/client/v3/rooms/{}/state/{kind}", encode(room.as_str()));
        let answer = self.ask("PUT", &path, &user.token, content).await;
        answer["event_id"].as_str().expect("an id").to_owned()
    }

    /// The room's current state: type, state key, event id; sorted.
    pub async fn state(&self, user: &User, room: &RoomId) -> Vec<(String, String, String)> {
        let path = format!("/_matrix/client/v3/rooms/{}/state", encode(room.as_str()));
        let answer = self.ask("GET", &path, &user.token, &json!({})).await;
        let text = |event: &Value, key: &str| event[key].as_str().expect("a text").to_owned();
        let events = answer.as_array().expect("an array").iter();
        let mut state: Vec<_> = events
            .map(|event| (text(event, "type"), text(event, "state_key"), text(event, "event_id")))
            .collect();
        state.sort();
        state
    }

    pub async fn held(&self, room: &RoomId) -> Vec<HeldEvent> {
        self.master().held(room).await.expect("read")
    }

    /// Waits until it holds these events of the room.
    pub async fn waits_for(&self, room: &RoomId, events: &[&str]) -> Vec<HeldEvent> {
        until(&format!("{} holds {events:?}", self.name), async || {
            let held = self.held(room).await;
            let all = events
                .iter()
                .all(|id| held.iter().any(|event| event.event_id.as_str() == *id));
            all.then_some(held)
        })
        .await
    }
}

pub struct User {
    pub id: String,
    pub token: String,
}

/// Asks again and again until there is an answer.
pub async fn until<T>(what: &str, ask: impl AsyncFn() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(answer) = ask().await {
            return answer;
        }
        assert!(start.elapsed() < PATIENCE, "in vain: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

pub fn encode(text: &str) -> String {
    burdock::federation::client::percent_encoded(text)
}
