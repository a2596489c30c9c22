//! What do the other processes tell us, and what happens if nobody takes it up?

use std::collections::VecDeque;

use tracing::warn;

use crate::core::{
    clock::Millis,
    id::{InstanceName, ServerName, Token},
    replication::command::{Device, InstanceId},
};

/// Things heard that wait at most.
const MAX_HEARD: usize = 10_000;

/// What others tell us.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Heard {
    /// A cache of this name is stale: for these keys, or (`None`) as a whole.
    CacheInvalidated {
        /// `cache_func`.
        func: String,
        /// The keys.
        keys: Option<Vec<String>>,
    },
    /// This server answers again (also the echo of our own word).
    RemoteServerUp(ServerName),
    /// This server came into one of our rooms.
    NewServerJoined(ServerName),
    /// The subscription stands. Rows missed before will be fetched; `RemoteServerUp` and `NewServerJoined` said meanwhile
    /// are lost.
    Connected,
    /// The subscription is gone.
    Disconnected,
    /// Nobody took what was heard for too long, and some of it was thrown away: treat every cache as stale, and every
    /// server as one that may be up or new.
    Overrun,
    /// Another process works under our instance name.
    TwinAlive,
    /// To a master: a sender has dealt with the `federation` stream up to here.
    FederationAck(InstanceName, Token),
    /// To a master: a client began or ceased to ask a process for news.
    UserSync {
        /// The process.
        instance: InstanceId,
        /// The client.
        device: Device,
        /// It began.
        syncing: bool,
        /// When it last asked, by that process's wall clock.
        last_sync: Millis,
    },
    /// To a master: that process stops.
    ClearUserSync(InstanceId),
}

/// What was heard and not yet taken.
#[derive(Debug, Default)]
pub(super) struct Waiting(VecDeque<Heard>);

impl Waiting {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn pop(&mut self) -> Option<Heard> {
        self.0.pop_front()
    }

    /// Too much, and only the last word about the connection and a twin stay.
    pub fn push(&mut self, heard: Heard) {
        if self.0.len() >= MAX_HEARD {
            warn!("what was heard is not taken up; thrown away");
            let connection = |heard: &&Heard| matches!(heard, Heard::Connected | Heard::Disconnected);
            let connection = self.0.iter().rev().find(connection).cloned();
            let twin = self.0.contains(&Heard::TwinAlive).then_some(Heard::TwinAlive);
            self.0 = [Some(Heard::Overrun), connection, twin].into_iter().flatten().collect();
        }
        self.0.push_back(heard);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_overrun_keeps_the_connection_and_the_twin() {
        let mut waiting = Waiting::default();
        waiting.push(Heard::TwinAlive);
        waiting.push(Heard::Connected);
        waiting.push(Heard::Disconnected);
        for _ in 3..=MAX_HEARD {
            waiting.push(Heard::NewServerJoined("a.example".into()));
        }
        let left = [
            Heard::Overrun,
            Heard::Disconnected,
            Heard::TwinAlive,
            Heard::NewServerJoined("a.example".into()),
        ];
        assert_eq!(waiting.0, left);
    }
}
