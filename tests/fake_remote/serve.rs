//! An HTTPS listener that hands whole requests to a [`Site`], which may also hang up.

use std::{net::SocketAddr, sync::Arc};

use anyhow::Result;
use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::{Request, Response, body::Incoming, header::CONTENT_TYPE, service::service_fn};
use hyper_util::rt::TokioIo;
use rustls::{
    ServerConfig,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
};
use serde_json::Value;
use tokio::{net::TcpListener, task::JoinHandle};
use tokio_rustls::TlsAcceptor;

use super::tls::Certificates;

/// An answer of ours.
pub type Answer = Response<Full<Bytes>>;

/// What a listener serves.
pub trait Site: Send + Sync + 'static {
    /// Whether a connection to this address is taken at all; if not, it is closed before the TLS handshake.
    fn is_up(&self, local: SocketAddr) -> bool;

    /// The answer to a request to this address; `None` closes the connection instead.
    fn answer(&self, local: SocketAddr, request: Request<Bytes>) -> impl Future<Output = Option<Answer>> + Send;
}

/// An answer with a JSON body.
pub fn json(status: u16, body: &Value) -> Answer {
    Response::builder()
        .status(status)
        .header(CONTENT_TYPE, "application/json")
        .body(Full::from(body.to_string()))
        .expect("the parts of an answer are valid")
}

/// Serves `site` on `listener` until the task is aborted.
pub fn serve<S: Site>(listener: TcpListener, certificates: &Certificates, site: Arc<S>) -> Result<JoinHandle<()>> {
    let chain = CertificateDer::pem_slice_iter(certificates.certificate.as_bytes()).collect::<Result<Vec<_>, _>>()?;
    let key = PrivateKeyDer::from_pem_slice(certificates.key.as_bytes())?;
    let config = ServerConfig::builder()
        .with_no_client_auth()
        .with_single_cert(chain, key)?;
    let acceptor = TlsAcceptor::from(Arc::new(config));
    Ok(tokio::spawn(async move {
        loop {
            let Ok((stream, _)) = listener.accept().await else {
                continue;
            };
            let Ok(local) = stream.local_addr() else { continue };
            if !site.is_up(local) {
                continue;
            }
            let (acceptor, site) = (acceptor.clone(), site.clone());
            tokio::spawn(async move {
                let _ = stream.set_nodelay(true);
                // A client that goes away is no concern of ours: the sender's log tells what it saw.
                let Ok(stream) = acceptor.accept(stream).await else {
                    return;
                };
                let service = service_fn(move |request| answer(site.clone(), local, request));
                let builder = hyper::server::conn::http1::Builder::new();
                let _ = builder.serve_connection(TokioIo::new(stream), service).await;
            });
        }
    }))
}

async fn answer<S: Site>(site: Arc<S>, local: SocketAddr, request: Request<Incoming>) -> Result<Answer> {
    let (head, body) = request.into_parts();
    let body = body.collect().await?.to_bytes();
    let answer = site.answer(local, Request::from_parts(head, body)).await;
    answer.ok_or_else(|| anyhow::anyhow!("hung up on purpose"))
}
