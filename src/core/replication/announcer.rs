//! What do we say of the streams we write: rows, and how far we are?
//!
//! Readers find rows they missed by our POSITION only, and a row that arrives after a lost one hides the loss. So whenever
//! rows may have been lost, a POSITION at the last of them comes before the next row.

use tracing::warn;

use crate::core::{
    id::{InstanceName, Token},
    replication::{command::Command, gap::Group, stream::Stream},
};

/// The streams a process writes, and the last position of each that it announced.
#[derive(Debug)]
pub(super) struct Announcer {
    me: InstanceName,
    streams: Vec<(Stream, Token)>,
}

impl Announcer {
    /// `streams`: each with a position at or above all rows that `me` ever wrote, and below all it will write.
    pub fn new(me: InstanceName, streams: Vec<(Stream, Token)>) -> Self {
        Self { me, streams }
    }

    /// The rows of one position, all but the last marked as `batch`. Without rows, only the position.
    pub fn rows(&mut self, stream: Stream, group: Group) -> Vec<Command> {
        let Group { token, mut rows } = group;
        let Some(final_row) = rows.pop() else {
            return self.moved(stream, token).into_iter().collect();
        };
        let Some(last) = self.last(stream) else {
            return Vec::new();
        };
        if token <= *last {
            warn!(
                stream = stream.name(),
                token = token.0,
                last = last.0,
                "row published out of order"
            );
        }
        *last = token.max(*last);
        let rdata = |token, row| Command::Rdata {
            stream: stream.name().to_owned(),
            writer: self.me.clone(),
            token,
            row,
        };
        let batch = rows.into_iter().map(|row| rdata(None, row));
        batch.chain([rdata(Some(token), final_row)]).collect()
    }

    /// Our position is `now`, and there were no rows since the last. `None`: it has not moved.
    pub fn moved(&mut self, stream: Stream, now: Token) -> Option<Command> {
        let last = self.last(stream)?;
        let prev = *last;
        *last = now.max(prev);
        (now > prev).then(|| self.position(stream, prev, now))
    }

    /// Rows up to `token` will not be published: readers are to fetch them.
    pub fn skip(&mut self, stream: Stream, token: Token) -> Option<Command> {
        let last = self.last(stream)?;
        *last = token.max(*last);
        let last = *last;
        Some(self.position(stream, last, last))
    }

    /// Where we are in all streams.
    pub fn positions(&self) -> Vec<Command> {
        let positions = self.streams.iter();
        positions
            .map(|(stream, last)| self.position(*stream, *last, *last))
            .collect()
    }

    fn position(&self, stream: Stream, prev: Token, new: Token) -> Command {
        Command::Position {
            stream: stream.name().to_owned(),
            writer: self.me.clone(),
            prev,
            new,
        }
    }

    fn last(&mut self, stream: Stream) -> Option<&mut Token> {
        let written = self.streams.iter_mut().find(|(written, _)| *written == stream);
        if written.is_none() {
            warn!(
                stream = stream.name(),
                "not a stream that this process writes; not published"
            );
        }
        written.map(|(_, last)| last)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::value::RawValue;

    use super::*;

    fn group(token: i64, rows: &[&str]) -> Group {
        let row = |row: &&str| RawValue::from_string((*row).to_owned()).unwrap();
        Group {
            token: Token(token),
            rows: rows.iter().map(row).collect(),
        }
    }

    fn text(commands: impl IntoIterator<Item = Command>) -> Vec<String> {
        commands.into_iter().map(|command| command.to_string()).collect()
    }

    #[test]
    fn rows_of_one_position_are_a_batch_and_a_position_without_rows_is_said_all_the_same() {
        let streams = vec![(Stream::Events, Token(7)), (Stream::Typing, Token(0))];
        let mut announcer = Announcer::new("master".into(), streams);
        let positions = ["POSITION events master 7 7", "POSITION typing master 0 0"];
        assert_eq!(text(announcer.positions()), positions);
        assert_eq!(
            text(announcer.rows(Stream::Events, group(9, &["[1]", "[2]", "[3]"]))),
            [
                "RDATA events master batch [1]",
                "RDATA events master batch [2]",
                "RDATA events master 9 [3]"
            ]
        );
        assert_eq!(text(announcer.moved(Stream::Events, Token(9))), [""; 0]);
        assert_eq!(
            text(announcer.moved(Stream::Events, Token(12))),
            ["POSITION events master 9 12"]
        );
        assert_eq!(
            text(announcer.rows(Stream::Events, group(13, &[]))),
            ["POSITION events master 12 13"]
        );
        assert_eq!(
            text(announcer.skip(Stream::Typing, Token(4))),
            ["POSITION typing master 4 4"]
        );
        assert_eq!(
            text(announcer.rows(Stream::Typing, group(5, &["[]"]))),
            ["RDATA typing master 5 []"]
        );
        let positions = ["POSITION events master 13 13", "POSITION typing master 5 5"];
        assert_eq!(text(announcer.positions()), positions);
        assert!(announcer.rows(Stream::Caches, group(1, &["[]"])).is_empty(), "not ours");
    }
}
