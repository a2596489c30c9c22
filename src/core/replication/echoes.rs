//! Is a `FEDERATION_ACK` under our name an echo of ours, or is a second process at work under our name?
//!
//! Every acknowledgement we publish comes back to us once, unless a connection is lost. So we count what is owed to us.
//! Taking an echo for a twin would stop a healthy process; the other error only delays the discovery by as many
//! acknowledgements of the twin as echoes of ours were lost.

use std::collections::VecDeque;

use crate::core::clock::Millis;

/// After so long an echo cannot come any more over a *new* connection, ms. Far above every timeout on the way out.
const LOST_AFTER: i64 = 600_000;

/// Echoes remembered at most.
const MAX_OWED: usize = 10_000;

/// The echoes that are owed to us: when each acknowledgement was published.
#[derive(Debug, Default)]
pub(super) struct Echoes {
    owed: VecDeque<Millis>,
}

impl Echoes {
    /// We publish an acknowledgement.
    pub fn published(&mut self, now: Millis) {
        if self.owed.len() >= MAX_OWED {
            self.owed.pop_front();
        }
        self.owed.push_back(now);
    }

    /// An acknowledgement under our name was heard. True: it cannot be ours.
    pub fn heard(&mut self) -> bool {
        self.owed.pop_front().is_none()
    }

    /// A new subscription: what was published long before it cannot be heard on it. (On an old connection it can, however
    /// long this process was stopped, so time alone decides nothing.)
    pub fn resubscribed(&mut self, now: Millis) {
        self.owed.retain(|published| now.since(*published) < LOST_AFTER);
    }
}
