//! Redis as the bus: one connection that listens and one that speaks.
//!
//! Both reconnect for ever and ask for a sign of life every 30 s, as Synapse's do.

use std::{future::Future, io, sync::Arc, time::Duration};

use futures_util::StreamExt;
use rand::{SeedableRng, rngs::StdRng};
use redis::{
    AsyncConnectionConfig, Client, ClientTlsConfig, ConnectionAddr, IntoConnectionInfo, RedisConnectionInfo,
    RedisError, TlsCertificates, Value,
    aio::{MultiplexedConnection, PubSubSink, PubSubStream},
};
use tokio::{
    sync::mpsc,
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use crate::{
    config::{Redis, RedisAddress, RedisTls},
    core::{
        id::ServerName,
        replication::{
            bus::{Backoff, Bus, BusEvent},
            outbox::{Line, Outbox},
        },
    },
};

/// Between signs of life.
const PING_EVERY: Duration = Duration::from_secs(30);

/// For connecting, and for every answer.
const TIMEOUT: Duration = Duration::from_secs(30);

/// The longest pause before the listening connection tries again.
const LONGEST_PAUSE_INBOUND: Duration = Duration::from_secs(5);

/// The longest pause before the speaking connection tries again.
const LONGEST_PAUSE_OUTBOUND: Duration = Duration::from_secs(10);

/// Why a connection failed or ended.
#[derive(Debug, thiserror::Error)]
enum BusError {
    #[error("{0}")]
    Redis(#[from] RedisError),
    #[error("reading a TLS file: {0}")]
    File(#[from] io::Error),
    #[error("no answer for 30 s")]
    Timeout(#[from] tokio::time::error::Elapsed),
    #[error("the connection ended")]
    Ended,
}

/// A channel of a Redis.
#[derive(Debug, Clone)]
pub struct RedisBus {
    redis: Redis,
    channel: String,
    seed: u64,
}

impl RedisBus {
    /// The channel of the homeserver `server_name`. The pauses between attempts to connect are drawn from `seed`.
    #[must_use]
    pub fn new(redis: Redis, server_name: &ServerName, seed: u64) -> Self {
        let channel = server_name.as_str().to_owned();
        Self { redis, channel, seed }
    }
}

impl Bus for RedisBus {
    async fn listen(self, events: mpsc::Sender<BusEvent>) {
        let Self { redis, channel, seed } = self;
        let mut backoff = Backoff::new(LONGEST_PAUSE_INBOUND, StdRng::seed_from_u64(seed));
        loop {
            match within_timeout(subscribe(&redis, &channel)).await {
                Ok((sink, stream)) => {
                    backoff.reset();
                    info!(channel, "subscribed to Redis");
                    if events.send(BusEvent::Subscribed).await.is_err() {
                        return;
                    }
                    let error = tokio::select! {
                        error = keep_alive(sink) => error,
                        error = pass_on(stream, &events) => error,
                    };
                    warn!(%error, "subscription to Redis lost");
                    if events.send(BusEvent::Lost).await.is_err() {
                        return;
                    }
                }
                Err(error) => warn!(%error, "cannot subscribe to Redis"),
            }
            sleep(backoff.pause()).await;
        }
    }

    async fn speak(self, outbox: Arc<Outbox>, events: mpsc::Sender<BusEvent>, shutdown: CancellationToken) {
        let Self { redis, channel, seed } = self;
        let mut backoff = Backoff::new(LONGEST_PAUSE_OUTBOUND, StdRng::seed_from_u64(seed.wrapping_add(1)));
        while let Some(connected) = shutdown.run_until_cancelled(within_timeout(connect(&redis))).await {
            match connected {
                Ok(connection) => {
                    backoff.reset();
                    debug!("outbound connection to Redis stands");
                    outbox.open();
                    // The reader may be gone already at shutdown; what waits is published all the same.
                    let _ = events.send(BusEvent::OutboundUp).await;
                    let Err((error, unsent)) = publish_all(connection, &channel, &outbox, &shutdown).await else {
                        return;
                    };
                    outbox.close(unsent);
                    warn!(%error, "outbound connection to Redis lost");
                    let _ = events.send(BusEvent::OutboundDown).await;
                }
                Err(error) => warn!(%error, "no outbound connection to Redis"),
            }
            if shutdown.run_until_cancelled(sleep(backoff.pause())).await.is_none() {
                return;
            }
        }
    }
}

async fn within_timeout<T>(connecting: impl Future<Output = Result<T, BusError>>) -> Result<T, BusError> {
    timeout(TIMEOUT, connecting).await?
}

async fn subscribe(redis: &Redis, channel: &str) -> Result<(PubSubSink, PubSubStream), BusError> {
    // Publish and subscribe know no logical databases: SELECT is for the other connection.
    let (mut sink, stream) = client(redis, None).await?.get_async_pubsub().await?.split();
    sink.subscribe(channel).await?;
    Ok((sink, stream))
}

async fn connect(redis: &Redis) -> Result<MultiplexedConnection, BusError> {
    let config = AsyncConnectionConfig::new()
        .set_connection_timeout(Some(TIMEOUT))
        .set_response_timeout(Some(TIMEOUT));
    let client = client(redis, redis.dbid).await?;
    Ok(client.get_multiplexed_async_connection_with_config(&config).await?)
}

/// Pings until no answer comes.
async fn keep_alive(mut sink: PubSubSink) -> BusError {
    loop {
        sleep(PING_EVERY).await;
        match timeout(TIMEOUT, sink.ping::<Value>()).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => return error.into(),
            Err(error) => return error.into(),
        }
    }
}

/// Hands on what is heard until the connection ends.
async fn pass_on(mut stream: PubSubStream, events: &mpsc::Sender<BusEvent>) -> BusError {
    while let Some(message) = stream.next().await {
        let Ok(line) = String::from_utf8(message.get_payload_bytes().to_vec()) else {
            debug!("message that is not UTF-8 ignored");
            continue;
        };
        if events.send(BusEvent::Line(line)).await.is_err() {
            break;
        }
    }
    BusError::Ended
}

/// Publishes until `shutdown` and nothing waits, or until the connection fails; then also gives the lines that may not
/// have arrived.
async fn publish_all(
    mut connection: MultiplexedConnection,
    channel: &str,
    outbox: &Outbox,
    shutdown: &CancellationToken,
) -> Result<(), (BusError, Vec<Line>)> {
    loop {
        let lines = tokio::select! {
            biased;
            lines = outbox.next() => lines,
            () = shutdown.cancelled() => return Ok(()),
            () = sleep(PING_EVERY) => Vec::new(),
        };
        let mut pipe = redis::pipe();
        if lines.is_empty() {
            pipe.cmd("PING");
        }
        for line in &lines {
            pipe.cmd("PUBLISH").arg(channel).arg(&line.text).ignore();
        }
        if let Err(error) = pipe.exec_async(&mut connection).await {
            return Err((error.into(), lines));
        }
    }
}

/// The files are read at every connection, so that a renewed certificate is taken up.
async fn client(redis: &Redis, dbid: Option<i64>) -> Result<Client, BusError> {
    let (addr, tls) = match &redis.address {
        RedisAddress::Unix(path) => (ConnectionAddr::Unix(path.clone()), None),
        RedisAddress::Tcp { host, port, tls: None } => (ConnectionAddr::Tcp(host.clone(), *port), None),
        RedisAddress::Tcp {
            host,
            port,
            tls: Some(tls),
        } => {
            let addr = ConnectionAddr::TcpTls {
                host: host.clone(),
                port: *port,
                insecure: false,
                tls_params: None,
            };
            (addr, Some(certificates(tls).await?))
        }
    };
    // No CLIENT SETINFO: an operator's access list may allow only what Synapse uses.
    let mut settings = RedisConnectionInfo::default()
        .set_skip_set_lib_name()
        .set_db(dbid.unwrap_or(0));
    if let Some(username) = &redis.username {
        settings = settings.set_username(username);
    }
    if let Some(password) = &redis.password {
        settings = settings.set_password(&password.0);
    }
    let info = addr.into_connection_info()?.set_redis_settings(settings);
    Ok(match tls {
        Some(certificates) => Client::build_with_tls(info, certificates)?,
        None => Client::open(info)?,
    })
}

async fn certificates(tls: &RedisTls) -> Result<TlsCertificates, BusError> {
    let root_cert = match &tls.ca_file {
        Some(path) => Some(tokio::fs::read(path).await?),
        None => None,
    };
    let client_tls = match &tls.client {
        Some((certificate, key)) => Some(ClientTlsConfig {
            client_cert: tokio::fs::read(certificate).await?,
            client_key: tokio::fs::read(key).await?,
        }),
        None => None,
    };
    Ok(TlsCertificates { client_tls, root_cert })
}
