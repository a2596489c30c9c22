//! `burdock run`: the parts are put together and kept running.

use std::{process::ExitCode, sync::Arc};

use anyhow::Context;
use tokio::runtime::Runtime;

use super::{
    check,
    lifecycle::{Ended, Lifecycle},
    listening, logging,
    sending::{self, Sending},
};
use crate::{
    config::{Config, Own},
    core::{
        clock,
        metrics::Metrics,
        replication::{feed::Bell, http_gaps::HttpGaps, redis_bus::RedisBus},
        shutdown::Shutdown,
    },
    sender::tables::Tables,
};

/// Runs until a signal or a failure ends it.
pub(super) fn run(config: Config) -> ExitCode {
    let own = config.own.clone();
    to_the_end(&own, live(config))
}

/// Logs as `own` says, and runs `life`.
pub(super) fn to_the_end(own: &Own, life: impl Future<Output = anyhow::Result<Ended>>) -> ExitCode {
    let ended = logging::start(own).and_then(|()| {
        let runtime = Runtime::new().context("cannot start the runtime")?;
        let ended = runtime.block_on(life);
        // A name look-up that hangs must not hold up the end.
        runtime.shutdown_background();
        ended
    });
    match ended {
        Ok(Ended::Well) => ExitCode::SUCCESS,
        Ok(Ended::Badly) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("burdock: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn live(config: Config) -> anyhow::Result<Ended> {
    for warning in config.warnings.iter().map(String::as_str).chain([check::NOT_SENT]) {
        tracing::warn!("{warning}");
    }
    let lifecycle = Lifecycle::start().context("cannot listen for signals")?;
    let drain = lifecycle.drain().clone();
    // A database that does not answer must not make the process deaf to signals.
    match drain.run_until_cancelled(Box::pin(start(config, &lifecycle))).await {
        Some(started) => started?,
        None => return Ok(Ended::Well),
    }
    lifecycle.ready();
    Ok(lifecycle.finished().await)
}

/// Puts the parts together and sets them going.
async fn start(config: Config, lifecycle: &Lifecycle) -> anyhow::Result<()> {
    let shutdown = Shutdown {
        drain: lifecycle.drain().clone(),
        stop: lifecycle.stop().clone(),
    };
    let metrics = Arc::new(Metrics::new(&config.server_name));
    let sending = Sending::from(&config);
    let seed = sending::random()?;
    let bus = RedisBus::new(config.redis, &config.server_name, seed);
    let gaps = HttpGaps::new(&config.replication, seed);
    let tables = config
        .own
        .replication_secret
        .is_some()
        .then(|| Arc::new(Tables::new(clock::now().wall, Bell::default())));
    let feed = tables.as_ref().map(|tables| tables.feed(Vec::new()));
    let own = config.own;
    let sender = sending::prepare(sending, bus, gaps, Arc::clone(&metrics), tables, shutdown.clone()).await?;
    listening::open(&own, metrics, feed, lifecycle).await?;
    lifecycle.spawn("sender", sender);
    Ok(())
}
