//! What waits to be said on the channel, and in which order?
//!
//! Rows that wait are forgotten when the connection is lost or they are too many. The [`Announcer`]'s POSITION then comes
//! before all else: whoever is behind it fetches the gap, where every row was committed before it came here.

use std::collections::VecDeque;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tracing::warn;

use crate::core::{
    id::{InstanceName, Token},
    replication::{announcer::Announcer, command::Command, gap::Group, rows, stream::Stream},
    store::CacheRow,
};

/// Lines that wait at most.
const MAX_WAITING: usize = 10_000;

/// Bytes of lines that wait at most.
const MAX_WAITING_BYTES: usize = 64 * 1024 * 1024;

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
    /// A row of a stream: if it is lost, a POSITION makes up for it.
    Row,
    /// Worth nothing on a later connection.
    Fleeting,
    /// Kept until it is sent.
    Lasting,
}

/// The queue towards the bus. Nothing in it blocks.
#[derive(Debug)]
pub struct Outbox {
    state: Mutex<State>,
    filled: Notify,
}

#[derive(Debug)]
struct State {
    open: bool,
    waiting: VecDeque<Line>,
    bytes: usize,
    announcer: Announcer,
}

impl Outbox {
    /// A closed outbox for the streams that `me` writes, each with a position at or above all rows that it ever wrote,
    /// and below all it will write.
    #[must_use]
    pub fn new(me: InstanceName, streams: Vec<(Stream, Token)>) -> Self {
        let state = State {
            open: false,
            waiting: VecDeque::new(),
            bytes: 0,
            announcer: Announcer::new(me, streams),
        };
        Self {
            state: Mutex::new(state),
            filled: Notify::new(),
        }
    }

    /// Publishes a committed row of `caches`. Rows must come in ascending order: readers drop a late one.
    pub fn cache_row(&self, row: &CacheRow) {
        let rows = vec![rows::caches(row)];
        let token = row.token;
        self.rows(Stream::Caches, Group { token, rows });
    }

    /// Publishes committed rows that share a position, or a position that has none. In ascending order for each stream.
    pub fn rows(&self, stream: Stream, group: Group) {
        let mut state = self.state.lock();
        let commands = state.announcer.rows(stream, group);
        let kind = if matches!(commands[..], [Command::Position { .. }]) {
            Kind::Fleeting
        } else {
            Kind::Row
        };
        self.push(&mut state, &commands, kind);
    }

    /// Publishes our position in a stream if it has moved. What lies between it and the last was ours to give, and empty.
    pub fn moved(&self, stream: Stream, now: Token) {
        let mut state = self.state.lock();
        let command = state.announcer.moved(stream, now);
        self.push(&mut state, command.as_slice(), Kind::Fleeting);
    }

    /// Publishes that there are rows up to `token` which must be fetched.
    pub fn skip(&self, stream: Stream, token: Token) {
        let mut state = self.state.lock();
        let command = state.announcer.skip(stream, token);
        self.push(&mut state, command.as_slice(), Kind::Fleeting);
    }

    /// Publishes a command; while there is no connection, only those about servers are kept for the next.
    pub fn say(&self, command: &Command) {
        let kind = match command {
            Command::RemoteServerUp(_) | Command::NewServerJoined(_) => Kind::Lasting,
            _ => Kind::Fleeting,
        };
        self.push(&mut self.state.lock(), std::slice::from_ref(command), kind);
    }

    /// Publishes where we are in the streams we write, behind the rows that wait: a position is never ahead of them.
    pub fn announce(&self) {
        let mut state = self.state.lock();
        let positions = state.announcer.positions();
        self.push(&mut state, &positions, Kind::Fleeting);
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
        state.retain_lasting();
    }

    /// The next lines to send in one go; waits until there is one.
    pub async fn next(&self) -> Vec<Line> {
        loop {
            {
                let mut state = self.state.lock();
                if state.open && !state.waiting.is_empty() {
                    let count = state.waiting.len().min(MAX_BATCH);
                    let lines: Vec<_> = state.waiting.drain(..count).collect();
                    state.bytes -= bytes(&lines);
                    return lines;
                }
            }
            self.filled.notified().await;
        }
    }

    /// The lines of one call stand side by side.
    fn push(&self, state: &mut State, commands: &[Command], kind: Kind) {
        if commands.is_empty() || (!state.open && kind != Kind::Lasting) {
            return;
        }
        let full =
            |state: &State| state.waiting.len() + commands.len() > MAX_WAITING || state.bytes > MAX_WAITING_BYTES;
        if full(state) && state.open {
            warn!("too much to publish; rows that wait are announced by position instead");
            self.start_over(state);
        }
        if full(state) {
            return;
        }
        for command in commands {
            let text = command.to_string();
            // A newline would end the command for some readers; no text of ours has one, so the name in it is not a name.
            if !text.contains('\n') {
                state.bytes += text.len();
                state.waiting.push_back(Line { text, kind });
            }
        }
        self.filled.notify_one();
    }

    /// Forgets the rows that wait and puts our positions in front of all.
    fn start_over(&self, state: &mut State) {
        state.retain_lasting();
        for command in state.announcer.positions().iter().rev() {
            let text = command.to_string();
            state.bytes += text.len();
            let kind = Kind::Fleeting;
            state.waiting.push_front(Line { text, kind });
        }
        self.filled.notify_one();
    }
}

impl State {
    fn retain_lasting(&mut self) {
        self.waiting.retain(|line| line.kind == Kind::Lasting);
        self.waiting.truncate(MAX_WAITING);
        self.bytes = bytes(&self.waiting);
    }
}

fn bytes<'a>(lines: impl IntoIterator<Item = &'a Line>) -> usize {
    lines.into_iter().map(|line| line.text.len()).sum()
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
        let outbox = Outbox::new("fs1".into(), vec![(Stream::Caches, Token(80))]);
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
        let outbox = Outbox::new("fs1".into(), vec![(Stream::Caches, Token(80))]);
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
        let outbox = Outbox::new("fs1".into(), vec![(Stream::Caches, Token(0))]);
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

    #[test]
    fn more_rows_of_one_position_than_may_wait_become_a_position() {
        let outbox = Outbox::new(
            "master".into(),
            vec![(Stream::Events, Token(5)), (Stream::Typing, Token(0))],
        );
        outbox.open();
        let row = || serde_json::value::RawValue::from_string("[]".to_owned()).unwrap();
        let rows = (0..MAX_WAITING).map(|_| row()).collect();
        let token = Token(6);
        outbox.rows(Stream::Events, Group { token, rows });
        assert_eq!(
            sent(&outbox),
            ["POSITION events master 6 6", "POSITION typing master 0 0"]
        );
        outbox.moved(Stream::Events, Token(6));
        outbox.moved(Stream::Events, Token(8));
        outbox.skip(Stream::Events, Token(9));
        assert_eq!(
            sent(&outbox),
            ["POSITION events master 6 8", "POSITION events master 9 9"]
        );
    }
}
