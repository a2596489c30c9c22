//! The one place that reads the system's clocks.

use std::time::{SystemTime, UNIX_EPOCH};

use tokio::time::Instant;

/// Milliseconds since the Unix epoch, as the database and the wire write times.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default, Hash)]
pub struct Millis(pub i64);

impl Millis {
    /// This time and `ms` milliseconds more.
    #[must_use]
    pub fn plus(self, ms: i64) -> Self {
        Self(self.0.saturating_add(ms))
    }

    /// Milliseconds from `earlier` to this time; negative if `earlier` is later.
    #[must_use]
    pub fn since(self, earlier: Self) -> i64 {
        self.0.saturating_sub(earlier.0)
    }
}

/// This moment on both clocks: the wall's, for what is shared with others (and may jump), and the process's own, for how
/// long something took.
#[derive(Clone, Copy, Debug)]
pub struct Now {
    /// The wall clock's time.
    pub wall: Millis,
    /// The monotonic clock's.
    pub at: Instant,
}

/// This moment.
#[must_use]
pub fn now() -> Now {
    #[expect(
        clippy::disallowed_methods,
        reason = "the one reader; all else takes the time as a parameter"
    )]
    let elapsed = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Now {
        wall: Millis(i64::try_from(elapsed.as_millis()).unwrap_or(i64::MAX)),
        at: Instant::now(),
    }
}
