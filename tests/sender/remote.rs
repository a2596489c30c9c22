//! Other homeservers: each takes down what it is sent, and answers as the test says.
//!
//! The fixtures' events are not signed, so nothing is verified here; `tests/e2e` does that.

use std::{
    collections::{HashMap, HashSet},
    net::{Ipv4Addr, SocketAddr},
    sync::{
        Arc, LazyLock,
        atomic::{AtomicUsize, Ordering},
    },
};

use bytes::Bytes;
use hyper::{Request, header::CONNECTION};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::{net::TcpListener, sync::watch, task::JoinHandle};

use crate::{
    serve::{self, Answer, Site},
    tls::{self, Certificates},
    until,
};

/// What all servers show, and the authority that the sender trusts.
pub static CERTIFICATES: LazyLock<Certificates> = LazyLock::new(|| Certificates::new().unwrap());

/// What becomes of a transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reply {
    /// 200, every PDU listed.
    Accept,
    /// 200, every PDU listed with an error.
    Errors,
    /// This status.
    Refuse(u16),
    /// As [`Reply::Accept`], once the test calls [`Remote::release`].
    Hold,
}

/// A transaction that came, once for each time.
#[derive(Debug, Clone)]
pub struct Transaction {
    pub id: String,
    pub body: Bytes,
    /// Its events' ids.
    pub pdus: Vec<String>,
    pub reply: Reply,
}

/// A server.
pub struct Remote {
    /// Its Matrix name.
    pub name: String,
    state: Mutex<State>,
    released: watch::Sender<bool>,
}

struct State {
    judge: Box<dyn FnMut(&Transaction) -> Reply + Send>,
    connections: usize,
    transactions: Vec<Transaction>,
    accepted: Vec<String>,
    known: HashSet<String>,
    works: bool,
    asked: Vec<String>,
}

impl Remote {
    fn new(name: String) -> Self {
        Self {
            name,
            state: Mutex::new(State {
                judge: Box::new(|_| Reply::Accept),
                connections: 0,
                transactions: vec![],
                accepted: vec![],
                known: HashSet::new(),
                works: true,
                asked: vec![],
            }),
            released: watch::Sender::new(false),
        }
    }

    /// Its user.
    pub fn user(&self) -> String {
        format!("@x:{}", self.name)
    }

    /// From now on transactions are answered so.
    pub fn answers(&self, judge: impl FnMut(&Transaction) -> Reply + Send + 'static) {
        self.state.lock().judge = Box::new(judge);
    }

    /// What is held is accepted.
    pub fn release(&self) {
        self.released.send_replace(true);
    }

    /// It has this event from elsewhere.
    pub fn knows(&self, event_id: &str) {
        self.state.lock().known.insert(event_id.to_owned());
    }

    /// From now on it accepts PDUs and leaves them in its queue.
    pub fn stops_working(&self) {
        self.state.lock().works = false;
    }

    /// It works on its queue again.
    pub fn goes_on_working(&self) {
        let mut state = self.state.lock();
        state.works = true;
        let queued = state.accepted.clone();
        state.known.extend(queued);
    }

    /// How often a connection to it was opened.
    pub fn connections(&self) -> usize {
        self.state.lock().connections
    }

    /// All that came.
    pub fn transactions(&self) -> Vec<Transaction> {
        self.state.lock().transactions.clone()
    }

    /// The PDUs that it accepted, in that order, each as often as it was.
    pub fn accepted(&self) -> Vec<String> {
        self.state.lock().accepted.clone()
    }

    /// The events that it was asked for, in that order.
    pub fn asked(&self) -> Vec<String> {
        self.state.lock().asked.clone()
    }

    /// Waits until it has accepted this event.
    pub async fn accepts(&self, event_id: &str) {
        until(&format!("{} accepts {event_id}", self.name), async || {
            self.state.lock().accepted.iter().any(|id| id == event_id)
        })
        .await;
    }

    /// Waits until so many transactions came.
    pub async fn gets(&self, transactions: usize) {
        until(&format!("{} gets transaction {transactions}", self.name), async || {
            self.state.lock().transactions.len() >= transactions
        })
        .await;
    }

    async fn answer(&self, request: Request<Bytes>) -> Answer {
        let path = request.uri().path();
        if let Some(event) = path.strip_prefix("/_matrix/federation/v1/event/") {
            let event = event.replace("%24", "$");
            let mut state = self.state.lock();
            let known = state.known.contains(&event);
            state.asked.push(event);
            return if known {
                serve::json(200, &json!({ "pdus": [{}] }))
            } else {
                serve::json(404, &json!({ "errcode": "M_NOT_FOUND", "error": "" }))
            };
        }
        let id = path.strip_prefix("/_matrix/federation/v1/send/");
        let id = id.expect("nothing else is asked of a server").to_owned();
        let body = request.into_body();
        let content: Value = serde_json::from_slice(&body).expect("a transaction is JSON");
        let pdus = content["pdus"].as_array().expect("a transaction has PDUs");
        let name = |pdu: &Value| pdu["content"]["body"].as_str().expect("a fixture's event").to_owned();
        let mut transaction = Transaction {
            id,
            body,
            pdus: pdus.iter().map(name).collect(),
            reply: Reply::Accept,
        };
        let reply = {
            let mut state = self.state.lock();
            transaction.reply = (state.judge)(&transaction);
            state.transactions.push(transaction.clone());
            transaction.reply
        };
        match reply {
            Reply::Accept => {}
            Reply::Errors => {
                let listed: HashMap<_, _> = transaction
                    .pdus
                    .iter()
                    .map(|id| (id, json!({ "error": "no" })))
                    .collect();
                return serve::json(200, &json!({ "pdus": listed }));
            }
            Reply::Refuse(status) => return serve::json(status, &json!({ "errcode": "M_UNKNOWN", "error": "" })),
            Reply::Hold => {
                // It fails only if this server is gone.
                let _ = self.released.subscribe().wait_for(|released| *released).await;
            }
        }
        let mut state = self.state.lock();
        if state.works {
            state.known.extend(transaction.pdus.iter().cloned());
        }
        state.accepted.extend(transaction.pdus.iter().cloned());
        let listed: HashMap<_, _> = transaction.pdus.iter().map(|id| (id, json!({}))).collect();
        serve::json(200, &json!({ "pdus": listed }))
    }
}

/// A test's servers, all behind one port, each at an address of its own.
pub struct Remotes {
    port: u16,
    servers: Arc<Servers>,
    task: JoinHandle<()>,
}

#[derive(Default)]
struct Servers {
    by_address: Mutex<HashMap<Ipv4Addr, Arc<Remote>>>,
    /// Connections opened whose first request is not answered, and the most there ever were at once.
    in_setup: AtomicUsize,
    most_in_setup: AtomicUsize,
}

impl Servers {
    fn at(&self, local: SocketAddr) -> Option<Arc<Remote>> {
        match local {
            SocketAddr::V4(local) => self.by_address.lock().get(local.ip()).cloned(),
            SocketAddr::V6(_) => None,
        }
    }
}

impl Site for Servers {
    fn is_up(&self, local: SocketAddr) -> bool {
        let Some(server) = self.at(local) else { return false };
        server.state.lock().connections += 1;
        let now = self.in_setup.fetch_add(1, Ordering::SeqCst) + 1;
        self.most_in_setup.fetch_max(now, Ordering::SeqCst);
        true
    }

    async fn answer(&self, local: SocketAddr, request: Request<Bytes>) -> Option<Answer> {
        let mut answer = self.at(local)?.answer(request).await;
        // One request a connection, so that a connection's setup ends with its answer.
        answer.headers_mut().insert(CONNECTION, "close".parse().ok()?);
        self.in_setup.fetch_sub(1, Ordering::SeqCst);
        Some(answer)
    }
}

impl Remotes {
    pub async fn start() -> Self {
        let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).await.unwrap();
        let servers = Arc::<Servers>::default();
        Self {
            port: listener.local_addr().unwrap().port(),
            task: serve::serve(listener, &CERTIFICATES, Arc::clone(&servers)).unwrap(),
            servers,
        }
    }

    /// One more server.
    pub fn add(&self) -> Arc<Remote> {
        let mut servers = self.servers.by_address.lock();
        let number = u16::try_from(servers.len()).ok().filter(|n| *n < tls::ADDRESSES);
        let address = tls::address(number.expect("an address is left"));
        let remote = Arc::new(Remote::new(format!("{address}:{}", self.port)));
        servers.insert(address, Arc::clone(&remote));
        remote
    }

    /// The most connections that were ever in setup at once.
    pub fn most_in_setup(&self) -> usize {
        self.servers.most_in_setup.load(Ordering::SeqCst)
    }
}

impl Drop for Remotes {
    fn drop(&mut self) {
        self.task.abort();
    }
}
