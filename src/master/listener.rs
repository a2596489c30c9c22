//! How do connections come in? A TCP port, with TLS or without, that can be shut and opened again.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use rustls::{
    ServerConfig,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    time::{sleep, timeout},
};
use tokio_rustls::TlsAcceptor;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::{debug, warn};

/// Connections open at once on one port.
const MAX_CONNECTIONS: usize = 1_000;

/// What a TLS handshake may take, and then the head of a request.
const HANDSHAKE: Duration = Duration::from_secs(10);
const REQUEST_HEAD: Duration = Duration::from_secs(120); // a connection in a pool is idle that long

/// What answers under way get when the port is shut.
const LINGER: Duration = Duration::from_secs(5);

/// Pause after a connection could not be taken (no file descriptors are left, as a rule).
const BREATHER: Duration = Duration::from_millis(100);

/// A certificate chain and its key, both PEM.
#[derive(Clone)]
pub struct Certificate {
    /// The chain, the server's own certificate first.
    pub chain: Vec<u8>,
    /// Its private key.
    pub key: Vec<u8>,
}

/// Why a port cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// The address cannot be had.
    #[error("cannot listen on {0}: {1}")]
    Bind(SocketAddr, io::Error),
    /// The certificate or its key is not what it should be.
    #[error("the TLS certificate or its key cannot be used: {0}")]
    Certificate(String),
}

/// A port that is open or shut.
pub struct Port {
    address: SocketAddr,
    tls: Option<TlsAcceptor>,
    routes: Router,
    open: Option<Open>,
}

/// What runs while a port is open.
struct Open {
    shut: CancellationToken,
    tasks: TaskTracker,
}

impl Port {
    /// Opens `address` (port 0: any that is free) and serves `routes` there.
    ///
    /// # Errors
    /// Why that cannot be done.
    pub async fn open(
        address: SocketAddr,
        certificate: Option<&Certificate>,
        routes: Router,
    ) -> Result<Self, ListenError> {
        let mut port = Self {
            address,
            tls: certificate.map(acceptor).transpose()?,
            routes,
            open: None,
        };
        port.reopen().await?;
        Ok(port)
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Opens it again at the same address, if it is shut.
    ///
    /// # Errors
    /// [`ListenError::Bind`] if the address was taken meanwhile.
    pub async fn reopen(&mut self) -> Result<(), ListenError> {
        if self.open.is_some() {
            return Ok(());
        }
        let listener = TcpListener::bind(self.address).await;
        let listener = listener.map_err(|error| ListenError::Bind(self.address, error))?;
        self.address = listener.local_addr().unwrap_or(self.address);
        let open = Open {
            shut: CancellationToken::new(),
            tasks: TaskTracker::new(),
        };
        open.tasks.spawn(accept(
            listener,
            self.tls.clone(),
            self.routes.clone(),
            open.shut.clone(),
            open.tasks.clone(),
        ));
        self.open = Some(open);
        Ok(())
    }

    /// Shuts it: no connection is taken, those that are idle end, those with a request under way soon after.
    pub async fn shut(&mut self) {
        if let Some(open) = self.open.take() {
            open.shut.cancel();
            open.tasks.close();
            open.tasks.wait().await;
        }
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        if let Some(open) = &self.open {
            open.shut.cancel();
        }
    }
}

fn acceptor(certificate: &Certificate) -> Result<TlsAcceptor, ListenError> {
    let wrong = |error: &dyn std::fmt::Display| ListenError::Certificate(error.to_string());
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&certificate.chain).collect();
    let key = PrivateKeyDer::from_pem_slice(&certificate.key).map_err(|error| wrong(&error))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| wrong(&error))?
        .with_no_client_auth()
        .with_single_cert(chain.map_err(|error| wrong(&error))?, key)
        .map_err(|error| wrong(&error))?;
    Ok(TlsAcceptor::from(Arc::new(config)))
}

async fn accept(
    listener: TcpListener,
    tls: Option<TlsAcceptor>,
    routes: Router,
    shut: CancellationToken,
    tasks: TaskTracker,
) {
    let permits = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let accepting = async {
        loop {
            let Ok(permit) = Arc::clone(&permits).acquire_owned().await else {
                return;
            };
            let stream = match listener.accept().await {
                Ok((stream, _)) => stream,
                Err(error) => {
                    warn!(%error, "a connection could not be taken");
                    sleep(BREATHER).await;
                    continue;
                }
            };
            let connection = serve(stream, tls.clone(), routes.clone(), shut.clone());
            tasks.spawn(async move {
                connection.await;
                drop(permit);
            });
        }
    };
    shut.run_until_cancelled(accepting).await;
}

async fn serve(stream: TcpStream, tls: Option<TlsAcceptor>, routes: Router, shut: CancellationToken) {
    let _ = stream.set_nodelay(true);
    let Some(tls) = tls else {
        return speak(stream, routes, shut).await;
    };
    match shut.run_until_cancelled(timeout(HANDSHAKE, tls.accept(stream))).await {
        Some(Ok(Ok(stream))) => speak(stream, routes, shut).await,
        Some(Ok(Err(error))) => debug!(%error, "a TLS handshake failed"),
        Some(Err(_)) | None => {}
    }
}

async fn speak(stream: impl AsyncRead + AsyncWrite + Unpin, routes: Router, shut: CancellationToken) {
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(REQUEST_HEAD)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(routes));
    let mut connection = std::pin::pin!(connection);
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = shut.cancelled() => {
            connection.as_mut().graceful_shutdown();
            timeout(LINGER, connection).await.unwrap_or(Ok(()))
        }
    };
    if let Err(error) = ended {
        debug!(%error, "a connection ended");
    }
}
