//! What operators and machines ask of a running process: health, metrics, and tables to follow.

mod replication;

use std::{io, sync::Arc, time::Duration};

use axum::{
    Router,
    extract::State,
    http::{StatusCode, header},
    response::IntoResponse,
    routing::get,
};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

pub use replication::Replication;

use crate::core::metrics::Metrics;

/// How long an answer under way may still take when we stop.
const LINGER: Duration = Duration::from_secs(1);
const TEXT: &str = "text/plain; charset=utf-8";
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const JSON: &str = "application/json";

/// Serves `GET /health`, `GET /metrics`, and the replication API if there is one, on `listener` until `shutdown`.
///
/// # Errors
/// What accepting connections gives.
pub async fn serve(
    listener: TcpListener,
    metrics: Arc<Metrics>,
    replication: Option<Replication>,
    shutdown: CancellationToken,
) -> io::Result<()> {
    let routes = routes(metrics, replication);
    let serving = axum::serve(listener, routes).with_graceful_shutdown(shutdown.clone().cancelled_owned());
    let too_long = async {
        shutdown.cancelled().await;
        tokio::time::sleep(LINGER).await;
    };
    tokio::select! {
        served = serving => served,
        () = too_long => Ok(()),
    }
}

fn routes(metrics: Arc<Metrics>, replication: Option<Replication>) -> Router {
    let followed = replication.map_or_else(Router::new, |replication| {
        Router::new().route(replication::PATH, get(replication::ask).with_state(replication))
    });
    followed
        // As at Synapse's workers: that the process answers is all it says.
        .route("/health", get(async || ([(header::CONTENT_TYPE, TEXT)], "OK")))
        .route("/metrics", get(exposition))
        .with_state(metrics)
        .method_not_allowed_fallback(async || unrecognized(StatusCode::METHOD_NOT_ALLOWED))
        .fallback(async || unrecognized(StatusCode::NOT_FOUND))
}

async fn exposition(State(metrics): State<Arc<Metrics>>) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, OPEN_METRICS)], metrics.exposition())
}

fn unrecognized(status: StatusCode) -> impl IntoResponse {
    let body = r#"{"errcode":"M_UNRECOGNIZED","error":"Unrecognized request"}"#;
    (status, [(header::CONTENT_TYPE, JSON)], body)
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::TcpStream,
        task::JoinHandle,
    };

    use super::*;

    async fn start() -> (std::net::SocketAddr, CancellationToken, JoinHandle<io::Result<()>>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let shutdown = CancellationToken::new();
        let metrics = Arc::new(Metrics::new(&"hs1.test".into()));
        (
            address,
            shutdown.clone(),
            tokio::spawn(serve(listener, metrics, None, shutdown)),
        )
    }

    /// Status line, content type, body.
    async fn ask(address: std::net::SocketAddr, request: &str) -> (String, String, String) {
        let mut stream = TcpStream::connect(address).await.expect("a connection");
        let request = format!("{request} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.expect("written");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.expect("an answer");
        let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
        let content_type = head
            .lines()
            .find_map(|line| line.strip_prefix("content-type: "))
            .unwrap_or_default();
        (
            head.lines().next().unwrap_or_default().to_owned(),
            content_type.to_owned(),
            body.to_owned(),
        )
    }

    #[tokio::test]
    async fn health_metrics_and_nothing_else() {
        let (address, shutdown, serving) = start().await;
        let (status, content_type, body) = ask(address, "GET /health").await;
        assert_eq!(
            (status.as_str(), content_type.as_str(), body.as_str()),
            ("HTTP/1.1 200 OK", TEXT, "OK")
        );
        let (status, content_type, body) = ask(address, "GET /metrics").await;
        assert_eq!(
            (status.as_str(), content_type.as_str()),
            ("HTTP/1.1 200 OK", OPEN_METRICS)
        );
        assert!(
            body.contains("burdock_checkpoints_total{") && body.ends_with("# EOF\n"),
            "{body}"
        );
        for (request, expected) in [
            ("GET /health/x", "404"),
            ("GET /", "404"),
            ("GET /_synapse/replication?streams=-1", "404"),
            ("POST /health", "405"),
        ] {
            let (status, _, body) = ask(address, request).await;
            assert!(
                status.contains(expected) && body.contains("M_UNRECOGNIZED"),
                "{request}: {status} {body}"
            );
        }
        shutdown.cancel();
        serving.await.expect("no panic").expect("served");
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_left_open_does_not_hold_up_the_stop() {
        let (address, shutdown, serving) = start().await;
        let mut half = TcpStream::connect(address).await.expect("a connection");
        half.write_all(b"GET /health HTTP/1.1\r\n").await.expect("written");
        shutdown.cancel();
        serving.await.expect("no panic").expect("served");
    }
}
