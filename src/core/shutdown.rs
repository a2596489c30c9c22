//! The two signals by which a process ends.

use tokio_util::sync::CancellationToken;

/// Drain first, stop if that takes too long.
#[derive(Debug, Clone, Default)]
pub struct Shutdown {
    /// Begin nothing new, finish what is in flight, then checkpoint.
    pub drain: CancellationToken,
    /// Drop what is in flight.
    pub stop: CancellationToken,
}
