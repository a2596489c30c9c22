//! Where log lines go: to standard error, as text or JSON.

use std::io::{IsTerminal, stderr};

use anyhow::Context;
use tracing_subscriber::EnvFilter;

use crate::config::{LogFormat, Own};

/// Sets up logging for the whole process, a panic's message included.
///
/// # Errors
/// If the filter is malformed or logging is set up already.
pub(super) fn start(own: &Own) -> anyhow::Result<()> {
    let filter = EnvFilter::try_new(&own.log_filter).context("[log] filter")?;
    let lines = tracing_subscriber::fmt().with_env_filter(filter).with_writer(stderr);
    let started = match own.log_format {
        LogFormat::Json => lines.json().flatten_event(true).try_init(),
        LogFormat::Text if stderr().is_terminal() => lines.pretty().try_init(),
        LogFormat::Text => lines.with_ansi(false).try_init(),
    };
    started
        .map_err(|e| anyhow::anyhow!(e))
        .context("cannot set up logging")?;
    // The default hook writes several lines of plain text, which no reader of JSON lines understands.
    std::panic::set_hook(Box::new(|panic| {
        let place = panic.location().map(ToString::to_string);
        tracing::error!(
            place,
            "a task panicked: {}",
            panic.payload_as_str().unwrap_or("without a message")
        );
    }));
    Ok(())
}
