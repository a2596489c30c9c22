//! Any number of servers behind one TLS port, which note what they are sent and do little else.
//!
//! The time they take is taken from the sender's: nothing is verified here, and an event's id is computed once for all.

use std::{
    borrow::Cow,
    collections::HashMap,
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use bytes::Bytes;
use hyper::{Request, Response, header::CONTENT_TYPE};
use parking_lot::Mutex;
use serde::Deserialize;
use serde_json::{json, value::RawValue};
use tokio::{net::TcpListener, task::JoinHandle};

use crate::{
    fake_remote::{
        event::event_id,
        record::SEND,
        serve::{self, Answer, Site},
        server::FakeServer,
        tls::{Certificates, address},
    },
    rig::services::free_port,
};

/// The servers, listening.
pub struct Sink {
    pub servers: Vec<Arc<FakeServer>>,
    counts: Arc<Counts>,
    task: JoinHandle<()>,
}

struct Counts {
    servers: HashMap<Ipv4Addr, (usize, Arc<FakeServer>)>,
    log: Mutex<Log>,
}

#[derive(Default)]
struct Log {
    /// Every event's place in `ids`, by its content hash.
    known: HashMap<String, usize>,
    ids: Vec<String>,
    received: Received,
}

/// What came since the last [`Sink::reset`].
#[derive(Debug, Default, Clone)]
pub struct Received {
    pub transactions: u32,
    pub pdus: u32,
    /// When which server (its number) got which event (its number in `ids`) first.
    first: HashMap<(usize, usize), Instant>,
}

#[derive(Deserialize)]
struct Transaction<'a> {
    #[serde(borrow)]
    pdus: Vec<&'a RawValue>,
}

#[derive(Deserialize)]
struct Pdu<'a> {
    #[serde(borrow)]
    hashes: Hashes<'a>,
}

#[derive(Deserialize)]
struct Hashes<'a> {
    #[serde(borrow)]
    sha256: Cow<'a, str>,
}

impl Sink {
    /// Starts `count` servers.
    pub async fn start(count: u16, certificates: &Certificates) -> Result<Self> {
        let port = free_port()?;
        let addresses = (0..count).map(address);
        let server = |address| Arc::new(FakeServer::new(&format!("{address}:{port}"), Arc::default()));
        let servers: HashMap<_, _> = addresses
            .enumerate()
            .map(|(number, address)| (address, (number, server(address))))
            .collect();
        let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).await?;
        let counts = Arc::new(Counts {
            servers,
            log: Mutex::default(),
        });
        Ok(Self {
            servers: counts.servers.values().map(|(_, server)| server.clone()).collect(),
            task: serve::serve(listener, certificates, counts.clone())?,
            counts,
        })
    }

    /// Counts anew.
    pub fn reset(&self) {
        self.counts.log.lock().received = Received::default();
    }

    /// Waits until every server has every one of these events (and fails if that takes `within`). What came, and when
    /// the last of them did.
    pub async fn wait_for(&self, event_ids: &[String], within: Duration) -> Result<(Received, Instant)> {
        let deadline = Instant::now() + within;
        let enough = self.servers.len() * event_ids.len();
        loop {
            {
                let log = self.counts.log.lock();
                // A cheap look first: the other one takes its time.
                if log.received.first.len() >= enough
                    && let Some(last) = log.all_at(self.servers.len(), event_ids)
                {
                    return Ok((log.received.clone(), last));
                }
                ensure!(
                    Instant::now() < deadline,
                    "of {enough} receipts {} came within {within:?}",
                    log.received.first.len(),
                );
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

impl Drop for Sink {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Log {
    fn number(&mut self, pdu: &RawValue) -> Result<usize> {
        let hash = serde_json::from_str::<Pdu>(pdu.get())?.hashes.sha256;
        if let Some(number) = self.known.get(hash.as_ref()) {
            return Ok(*number);
        }
        let number = self.ids.len();
        self.ids.push(event_id(&serde_json::from_str(pdu.get())?, 11));
        self.known.insert(hash.into_owned(), number);
        Ok(number)
    }

    /// Notes a transaction, and says what is to be answered.
    fn take(&mut self, server: usize, body: &[u8]) -> Result<String> {
        let now = Instant::now();
        let body: Transaction = serde_json::from_slice(body)?;
        let mut answer = String::from(r#"{"pdus":{"#);
        self.received.transactions += 1;
        for (index, pdu) in body.pdus.into_iter().enumerate() {
            let number = self.number(pdu)?;
            self.received.pdus += 1;
            self.received.first.entry((server, number)).or_insert(now);
            let comma = if index == 0 { "" } else { "," };
            answer.extend([comma, "\"", &self.ids[number], "\":{}"]);
        }
        answer.push_str("}}");
        Ok(answer)
    }

    fn all_at(&self, servers: usize, event_ids: &[String]) -> Option<Instant> {
        let numbers: HashMap<_, _> = self.ids.iter().enumerate().map(|(number, id)| (id, number)).collect();
        let numbers: Vec<usize> = event_ids
            .iter()
            .map(|id| numbers.get(id).copied())
            .collect::<Option<_>>()?;
        let pairs = (0..servers).flat_map(|server| numbers.iter().map(move |number| (server, *number)));
        let times: Option<Vec<Instant>> = pairs.map(|pair| self.received.first.get(&pair).copied()).collect();
        times?.into_iter().max()
    }
}

impl Site for Counts {
    fn is_up(&self, local: SocketAddr) -> bool {
        self.at(local).is_some()
    }

    async fn answer(&self, local: SocketAddr, request: Request<Bytes>) -> Option<Answer> {
        let (number, server) = self.at(local)?;
        let path = request.uri().path();
        if path.starts_with("/_matrix/federation/v1/event/") {
            // What it took it has worked on.
            return Some(serve::json(200, &json!({ "pdus": [{}] })));
        }
        if !path.starts_with(SEND) {
            return server.answer(request).await;
        }
        let answer = self.log.lock().take(*number, request.body()).ok()?;
        let answer = Response::builder()
            .header(CONTENT_TYPE, "application/json")
            .body(answer.into());
        answer.ok()
    }
}

impl Counts {
    fn at(&self, local: SocketAddr) -> Option<&(usize, Arc<FakeServer>)> {
        match local {
            SocketAddr::V4(local) => self.servers.get(local.ip()),
            SocketAddr::V6(_) => None,
        }
    }
}
