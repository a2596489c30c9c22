//! What do we say on the channel, and in which order?
//!
//! We write one stream, `caches`. Its readers find rows they missed by our POSITION only, and a row that arrives after a
//! lost one hides the loss. So whenever rows may have been lost, what comes first is a POSITION at the last row: whoever
//! is behind it fetches the gap from the database, where every row was committed before it came here.

use std::collections::VecDeque;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tracing::warn;

use crate::core::{
    id::{InstanceName, Token},
    replication::{command::Command, stream::Stream},
    store::CacheRow,
};

/// Lines that wait at most.
const MAX_WAITING: usize = 10_000;

/// Sent in one round trip at most.
const MAX_BATCH: usize = 100;

/// A line to publish.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Line {
    /// Its text.
    pub text: String,
    kind: Kind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// A row of `caches`: if it is lost, a POSITION makes up for it.
    Row,
    /// Worth nothing on a later connection.
    Fleeting,
    /// Kept until it is sent.
    Lasting,
}

/// The queue towards the bus. Nothing in it blocks.
#[derive(Debug)]
pub struct Outbox {
    me: InstanceName,
    state: Mutex<State>,
    filled: Notify,
}

#[derive(Debug)]
struct State {
    open: bool,
    waiting: VecDeque<Line>,
    last: Token,
}

impl Outbox {
    /// A closed outbox. `last`: a position at or above all `caches` rows that `me` ever wrote, and below all it will write.
    #[must_use]
    pub fn new(me: InstanceName, last: Token) -> Self {
        let state = State {
            open: false,
            waiting: VecDeque::new(),
            last,
        };
        Self {
            me,
            state: Mutex::new(state),
            filled: Notify::new(),
        }
    }

    /// Publishes a committed row of `caches`. Rows must come in ascending order: readers drop a late one.
    pub fn cache_row(&self, row: &CacheRow) {
        let mut state = self.state.lock();
        if row.token <= state.last {
            warn!(
                token = row.token.0,
                last = state.last.0,
                "cache invalidation published out of order"
            );
        }
        state.last = state.last.max(row.token);
        let values = ("get_destination_retry_timings", [row.destination.as_str()], row.at.0);
        let Ok(row_json) = serde_json::value::to_raw_value(&values) else {
            return;
        };
        let command = Command::Rdata {
            stream: Stream::Caches.name().to_owned(),
            writer: self.me.clone(),
            token: Some(row.token),
            row: row_json,
        };
        self.push(&mut state, command.to_string(), Kind::Row);
    }

    /// Publishes a command; while there is no connection, only `REMOTE_SERVER_UP` is kept for the next.
    pub fn say(&self, command: &Command) {
        let kind = match command {
            Command::RemoteServerUp(_) => Kind::Lasting,
            _ => Kind::Fleeting,
        };
        self.push(&mut self.state.lock(), command.to_string(), kind);
    }

    /// Publishes where we are in the streams we write, behind the rows that wait.
    pub fn announce(&self) {
        let mut state = self.state.lock();
        let position = self.position(state.last);
        self.push(&mut state, position, Kind::Fleeting);
    }

    /// A connection stands: lines flow.
    pub fn open(&self) {
        let mut state = self.state.lock();
        state.open = true;
        self.start_over(&mut state);
    }

    /// The connection is gone, and `unsent` may not have arrived.
    pub fn close(&self, unsent: Vec<Line>) {
        let mut state = self.state.lock();
        state.open = false;
        for line in unsent.into_iter().rev() {
            state.waiting.push_front(line);
        }
        state.waiting.retain(|line| line.kind == Kind::Lasting);
        state.waiting.truncate(MAX_WAITING);
    }

    /// The next lines to send in one go; waits until there is one.
    pub async fn next(&self) -> Vec<Line> {
        loop {
            {
                let mut state = self.state.lock();
                if state.open && !state.waiting.is_empty() {
                    let count = state.waiting.len().min(MAX_BATCH);
                    return state.waiting.drain(..count).collect();
                }
            }
            self.filled.notified().await;
        }
    }

    fn push(&self, state: &mut State, text: String, kind: Kind) {
        if !state.open && kind != Kind::Lasting {
            return;
        }
        if state.waiting.len() >= MAX_WAITING && state.open {
            warn!("too much to publish; cache rows that wait are announced by position instead");
            self.start_over(state);
        }
        // A newline would end the command for some readers; no text of ours has one, so the name in it is not a name.
        if state.waiting.len() < MAX_WAITING && !text.contains('\n') {
            state.waiting.push_back(Line { text, kind });
            self.filled.notify_one();
        }
    }

    /// Forgets the rows that wait and puts our position in front of all.
    fn start_over(&self, state: &mut State) {
        state.waiting.retain(|line| line.kind == Kind::Lasting);
        let text = self.position(state.last);
        let kind = Kind::Fleeting;
        state.waiting.push_front(Line { text, kind });
        self.filled.notify_one();
    }

    fn position(&self, last: Token) -> String {
        let command = Command::Position {
            stream: Stream::Caches.name().to_owned(),
            writer: self.me.clone(),
            prev: last,
            new: last,
        };
        command.to_string()
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;
    use crate::core::clock::Millis;

    fn row(token: i64) -> CacheRow {
        CacheRow {
            token: Token(token),
            destination: "remote.example".into(),
            at: Millis(1_753_000_000_000),
            writer: "fs1".into(),
        }
    }

    fn sent(outbox: &Outbox) -> Vec<String> {
        let lines = outbox.next().now_or_never().unwrap_or_default();
        lines.into_iter().map(|line| line.text).collect()
    }

    #[test]
    fn rows_are_written_as_synapse_writes_them() {
        let outbox = Outbox::new("fs1".into(), Token(80));
        outbox.open();
        outbox.cache_row(&row(8123));
        outbox.announce();
        assert_eq!(
            sent(&outbox),
            [
                "POSITION caches fs1 80 80",
                r#"RDATA caches fs1 8123 ["get_destination_retry_timings",["remote.example"],1753000000000]"#,
                "POSITION caches fs1 8123 8123",
            ]
        );
        assert!(sent(&outbox).is_empty());
    }

    #[test]
    fn after_a_loss_the_position_comes_before_the_next_row() {
        let outbox = Outbox::new("fs1".into(), Token(80));
        outbox.cache_row(&row(81));
        outbox.say(&Command::Replicate);
        outbox.say(&Command::RemoteServerUp("up.example".into()));
        outbox.open();
        outbox.cache_row(&row(82));
        let lines = outbox.next().now_or_never().unwrap();
        assert_eq!(lines[0].text, "POSITION caches fs1 81 81");
        assert_eq!(lines[1].text, "REMOTE_SERVER_UP up.example");
        outbox.close(lines);
        outbox.cache_row(&row(83));
        outbox.open();
        assert_eq!(
            sent(&outbox),
            ["POSITION caches fs1 83 83", "REMOTE_SERVER_UP up.example"]
        );
    }

    #[test]
    fn too_many_rows_become_a_position() {
        let outbox = Outbox::new("fs1".into(), Token(0));
        outbox.open();
        for token in 1..=20_000 {
            outbox.cache_row(&row(token));
        }
        let mut all = Vec::new();
        loop {
            let lines = sent(&outbox);
            if lines.is_empty() {
                break;
            }
            all.extend(lines);
        }
        assert!(all.len() <= MAX_WAITING);
        let position: i64 = all[0].rsplit(' ').next().unwrap().parse().unwrap();
        assert!(
            all[1].starts_with(&format!("RDATA caches fs1 {position} ")),
            "{} {}",
            all[0],
            all[1]
        );
    }
}
