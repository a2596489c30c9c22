//! A door in front of a real homeserver: writes down what comes to it, and can be shut.

use std::{
    collections::HashSet,
    net::{Ipv4Addr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use anyhow::Result;
use bytes::Bytes;
use hyper::{Request, header::CONTENT_TYPE};
use serde_json::Value;
use tokio::{net::TcpListener, task::JoinHandle};

use super::{
    event::Keys,
    record::{Record, SEND},
    serve::{self, Answer, Site},
    tls::Certificates,
};

/// The server's public side. All it is sent passes here.
pub struct Gate {
    door: Arc<Door>,
    task: JoinHandle<()>,
}

struct Door {
    record: Record,
    open: AtomicBool,
    behind: String,
    http: reqwest::Client,
}

impl Gate {
    /// Listens on `port`, and passes what comes for the server `name` on to the URL `behind`.
    pub async fn start(
        port: u16,
        name: &str,
        behind: String,
        http: reqwest::Client,
        certificates: &Certificates,
        keys: Arc<Keys>,
    ) -> Result<Self> {
        let door = Arc::new(Door {
            record: Record::new(name, keys),
            open: AtomicBool::new(true),
            behind,
            http,
        });
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await?;
        let task = serve::serve(listener, certificates, door.clone())?;
        Ok(Self { door, task })
    }

    /// What was sent to the server.
    pub fn record(&self) -> &Record {
        &self.door.record
    }

    /// The server cannot be reached from now on.
    pub fn shut(&self) {
        self.door.open.store(false, Ordering::SeqCst);
    }

    /// It can be reached again.
    pub fn open(&self) {
        self.door.open.store(true, Ordering::SeqCst);
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Site for Door {
    fn is_up(&self, _local: SocketAddr) -> bool {
        self.open.load(Ordering::SeqCst)
    }

    async fn answer(&self, _local: SocketAddr, request: Request<Bytes>) -> Option<Answer> {
        if !self.open.load(Ordering::SeqCst) {
            return None;
        }
        let transaction = if request.uri().path().starts_with(SEND) {
            self.record.begin(&request).ok()
        } else {
            None
        };
        let (head, body) = request.into_parts();
        let url = format!("{}{}", self.behind, head.uri.path_and_query()?);
        let response = self
            .http
            .request(head.method, url)
            .headers(head.headers)
            .body(body)
            .send()
            .await
            .ok()?;
        let (status, kind) = (response.status(), response.headers().get(CONTENT_TYPE).cloned());
        let body = response.bytes().await.ok()?;
        if let Some(transaction) = transaction
            && status.is_success()
        {
            let answer: Value = serde_json::from_slice(&body).unwrap_or_default();
            let listed: HashSet<String> = answer["pdus"]
                .as_object()
                .map(|pdus| pdus.keys().cloned().collect())
                .unwrap_or_default();
            transaction.accepted(&listed);
        }
        let mut answer = hyper::Response::builder().status(status);
        if let Some(kind) = kind {
            answer = answer.header(CONTENT_TYPE, kind);
        }
        answer.body(body.into()).ok()
    }
}
