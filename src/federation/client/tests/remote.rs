//! A remote server for tests: real TLS on a real socket, and answers written byte by byte, so that it can misbehave.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::{ServerConfig, pki_types::PrivateKeyDer};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};

/// A certificate authority.
pub struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    pub fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    pub fn pem(&self) -> Vec<u8> {
        self.0.pem().into_bytes()
    }

    /// A server's TLS settings, with a certificate for `name`.
    pub fn server(&self, name: &str, versions: &[&'static rustls::SupportedProtocolVersion]) -> Arc<ServerConfig> {
        let key = KeyPair::generate().unwrap();
        let certificate = CertificateParams::new(vec![name.to_owned()])
            .unwrap()
            .signed_by(&key, &self.0)
            .unwrap();
        let key = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
        let builder = ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()));
        let builder = builder.with_protocol_versions(versions).unwrap().with_no_client_auth();
        Arc::new(builder.with_single_cert(vec![certificate.der().clone()], key).unwrap())
    }
}

/// A request as it came in.
#[derive(Clone, Debug)]
pub struct Seen {
    /// Counts connections from 0.
    pub connection: usize,
    /// Counts requests of this connection from 0.
    pub turn: usize,
    pub head: String,
    pub body: Vec<u8>,
}

impl Seen {
    pub fn header(&self, name: &str) -> Option<&str> {
        let mut lines = self.head.lines().skip(1).filter_map(|line| line.split_once(": "));
        lines.find_map(|(key, value)| key.eq_ignore_ascii_case(name).then_some(value))
    }
}

/// What the server does about a request.
pub enum Reply {
    /// Writes this and waits for the next request.
    Write(Vec<u8>),
    /// Writes this and then nothing more, leaving the connection open.
    Stall(Vec<u8>),
    /// Closes the connection.
    Close,
}

impl Reply {
    pub fn json(status: &str, body: &str) -> Self {
        Self::with(status, "Content-Type: application/json", body)
    }

    pub fn with(status: &str, header: &str, body: &str) -> Self {
        Self::Write(
            format!(
                "HTTP/1.1 {status}\r\n{header}\r\nContent-Length: {}\r\n\r\n{body}",
                body.len()
            )
            .into_bytes(),
        )
    }
}

pub struct Remote {
    pub port: u16,
    pub connections: Arc<AtomicUsize>,
    pub seen: Arc<Mutex<Vec<Seen>>>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Remote {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Remote {
    /// Serves on 127.0.0.1, on a port of its own.
    pub async fn start(tls: Arc<ServerConfig>, answer: impl Fn(&Seen) -> Reply + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let connections = Arc::new(AtomicUsize::new(0));
        let seen = Arc::new(Mutex::new(Vec::new()));
        let (count, log, answer) = (Arc::clone(&connections), Arc::clone(&seen), Arc::new(answer));
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let connection = count.fetch_add(1, Ordering::SeqCst);
                let (tls, log, answer) = (
                    TlsAcceptor::from(Arc::clone(&tls)),
                    Arc::clone(&log),
                    Arc::clone(&answer),
                );
                tokio::spawn(async move {
                    let Ok(mut stream) = tls.accept(stream).await else {
                        return;
                    };
                    let mut turn = 0;
                    while let Some(seen) = read(&mut stream, connection, turn).await {
                        log.lock().push(seen.clone());
                        let (bytes, stall) = match answer(&seen) {
                            Reply::Write(bytes) => (bytes, false),
                            Reply::Stall(bytes) => (bytes, true),
                            Reply::Close => break,
                        };
                        if stream.write_all(&bytes).await.is_err() || stream.flush().await.is_err() {
                            break;
                        }
                        if stall {
                            // Until the client has had enough.
                            let _ = stream.read(&mut [0]).await;
                            break;
                        }
                        turn += 1;
                    }
                });
            }
        });
        Self {
            port,
            connections,
            seen,
            task,
        }
    }

    pub fn connections(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }

    /// The newest request.
    pub fn last(&self) -> Seen {
        self.seen.lock().last().cloned().unwrap()
    }
}

async fn read(stream: &mut TlsStream<TcpStream>, connection: usize, turn: usize) -> Option<Seen> {
    let mut bytes = Vec::new();
    let end = loop {
        if let Some(end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") {
            break end + 4;
        }
        if stream.read_buf(&mut bytes).await.ok()? == 0 {
            return None;
        }
    };
    let mut body = bytes.split_off(end);
    let head = String::from_utf8(bytes).ok()?;
    let mut seen = Seen {
        connection,
        turn,
        head,
        body: Vec::new(),
    };
    let length = seen
        .header("content-length")
        .map_or(0, |length| length.parse().unwrap());
    while body.len() < length {
        if stream.read_buf(&mut body).await.ok()? == 0 {
            return None;
        }
    }
    seen.body = body;
    Some(seen)
}

/// A server that accepts TCP connections and says nothing, not even in TLS.
pub async fn mute() -> (u16, tokio::task::JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let task = tokio::spawn(async move {
        let mut open = Vec::new();
        while let Ok((stream, _)) = listener.accept().await {
            open.push(stream);
        }
    });
    (port, task)
}

/// Long enough for anything on this machine to have happened, short enough for a test.
pub const SHORT: Duration = Duration::from_millis(300);
