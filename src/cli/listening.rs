//! What `[listen]` of our own settings asks for: a port for operators and machines.

use std::sync::Arc;

use anyhow::Context;
use tokio::net::TcpListener;

use super::lifecycle::Lifecycle;
use crate::{
    admin::{self, Replication},
    config::Own,
    core::{metrics::Metrics, replication::feed::Feed},
};

/// Serves health, metrics, and `feed` to whoever knows the secret; nothing if there is no address.
pub(super) async fn open(
    own: &Own,
    metrics: Arc<Metrics>,
    feed: Option<Feed>,
    lifecycle: &Lifecycle,
) -> anyhow::Result<()> {
    let Some(address) = own.listen else { return Ok(()) };
    let listener = TcpListener::bind(address)
        .await
        .with_context(|| format!("cannot listen on {address}"))?;
    let drain = lifecycle.drain();
    let replication = feed.zip(own.replication_secret.clone());
    let replication = replication.map(|(feed, secret)| Replication::new(Arc::new(feed), secret, drain.clone()));
    let served = admin::serve(listener, metrics, replication, drain.clone());
    lifecycle.spawn("admin", async { Ok(served.await?) });
    Ok(())
}
