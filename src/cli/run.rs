//! `burdock run`: the parts are put together and kept running.

use std::{process::ExitCode, sync::Arc};

use anyhow::Context;
use tokio::{net::TcpListener, runtime::Runtime};

use super::{
    lifecycle::{Ended, Lifecycle},
    logging,
};
use crate::{admin, config::Config, core::metrics::Metrics};

/// Runs until a signal or a failure ends it.
pub(super) fn run(config: Config) -> ExitCode {
    let ended = logging::start(&config.own).and_then(|()| {
        let runtime = Runtime::new().context("cannot start the runtime")?;
        let ended = runtime.block_on(live(config));
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
    for warning in &config.warnings {
        tracing::warn!("{warning}");
    }
    let lifecycle = Lifecycle::start().context("cannot listen for signals")?;
    let metrics = Arc::new(Metrics::new(&config.server_name));
    if let Some(address) = config.own.listen {
        let listener = TcpListener::bind(address)
            .await
            .with_context(|| format!("cannot listen on {address}"))?;
        let served = admin::serve(listener, Arc::clone(&metrics), lifecycle.drain().clone());
        lifecycle.spawn("admin", async { Ok(served.await?) });
    }
    tracing::info!(server_name = %config.server_name, instance = %config.instance, "started");
    lifecycle.ready();
    Ok(lifecycle.finished().await)
}
