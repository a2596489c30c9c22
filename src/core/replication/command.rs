//! What stands in one line of the replication channel?
//!
//! `NAME rest`, the name ending at the first space. Only the commands that a federation sender or a master hears or says
//! are taken apart; all others are [`Command::Unknown`], because every Synapse version adds some.

use std::fmt;

use rand::{Rng, RngExt};
use serde_json::value::RawValue;

use crate::core::{
    clock::Millis,
    id::{InstanceName, ServerName, Token},
};

/// The longest line read, bytes. Synapse sets no limit; the largest rows are EDUs of about 0.5 MB.
pub const MAX_LINE: usize = 4 * 1024 * 1024;

/// The longest server name heard, bytes: 255 of host name, a colon and a port.
const MAX_SERVER_NAME: usize = 261;

/// The longest stream, instance, user or device name heard, bytes.
const MAX_NAME: usize = 255;

/// The longest instance id heard, bytes. All that are known have five.
const MAX_INSTANCE_ID: usize = 64;

/// Names one run of a process in [`Command::UserSync`]: five random letters drawn at its start. (Its instance name is the
/// same after a crash, when nothing of what it said holds any more.)
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct InstanceId(String);

impl InstanceId {
    /// A new one.
    #[must_use]
    pub fn draw(rng: &mut impl Rng) -> Self {
        let letter = |_| char::from(rng.random_range(b'a'..=b'z'));
        Self((0..5).map(letter).collect())
    }
}

impl fmt::Display for InstanceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A client of a user.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Device {
    /// The user.
    pub user_id: String,
    /// The device; `None` if its token has none.
    pub device_id: Option<String>,
}

/// One line.
#[derive(Debug, Clone)]
pub enum Command {
    /// `RDATA <stream> <writer> <token or "batch"> <row>`: a row of a stream.
    Rdata {
        /// The stream's name.
        stream: String,
        /// Who wrote the row.
        writer: InstanceName,
        /// Its position; `None` (`batch`) if a later row of the same position follows.
        token: Option<Token>,
        /// The row, as it was written.
        row: Box<RawValue>,
    },
    /// `POSITION <stream> <writer> <prev> <new>`: the writer is at `new`, and has no rows between `prev` and `new`.
    Position {
        /// The stream's name.
        stream: String,
        /// Whose position.
        writer: InstanceName,
        /// The last position announced before.
        prev: Token,
        /// The position now.
        new: Token,
    },
    /// `REPLICATE `: everybody is asked for the positions of the streams it writes.
    Replicate,
    /// `FEDERATION_ACK <instance> <token>`: a sender has dealt with the `federation` stream up to there.
    FederationAck {
        /// The sender.
        instance: InstanceName,
        /// The position.
        token: Token,
    },
    /// `REMOTE_SERVER_UP <server>`: a server that failed answers again.
    RemoteServerUp(ServerName),
    /// `NEW_SERVER_JOINED <server>`: a server came into one of our rooms. Further words are left for later versions.
    NewServerJoined(ServerName),
    /// `USER_SYNC <instance id> <user> <device or "None"> <start or end> <ms>`: a client began or ceased to ask for news.
    UserSync {
        /// Whom it asks.
        instance: InstanceId,
        /// The client.
        device: Device,
        /// It began.
        syncing: bool,
        /// When it last asked.
        last_sync: Millis,
    },
    /// `CLEAR_USER_SYNC <instance id>`: that process stops, and none of its clients asks for news any more.
    ClearUserSync(InstanceId),
    /// A command that is no business of ours.
    Unknown,
}

/// A line that cannot be taken in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum LineError {
    /// Longer than [`MAX_LINE`]: whatever it held is missed.
    #[error("a line of {0} bytes is longer than {MAX_LINE}")]
    TooLong(usize),
    /// A command we know whose rest does not follow its grammar.
    #[error("malformed {0}")]
    Malformed(&'static str),
}

/// Takes a line apart.
///
/// # Errors
/// [`LineError`] for a line that is too long, and for a known command with a broken rest.
pub fn parse(line: &str) -> Result<Command, LineError> {
    if line.len() > MAX_LINE {
        return Err(LineError::TooLong(line.len()));
    }
    let (name, rest) = line.split_once(' ').unwrap_or((line, ""));
    match name {
        "RDATA" => rdata(rest).ok_or(LineError::Malformed("RDATA")),
        "POSITION" => position(rest).ok_or(LineError::Malformed("POSITION")),
        "REPLICATE" => Ok(Command::Replicate),
        "FEDERATION_ACK" => ack(rest).ok_or(LineError::Malformed("FEDERATION_ACK")),
        "REMOTE_SERVER_UP" => server_name(rest)
            .map(Command::RemoteServerUp)
            .ok_or(LineError::Malformed("REMOTE_SERVER_UP")),
        "NEW_SERVER_JOINED" => server_name(rest.split(' ').next().unwrap_or_default())
            .map(Command::NewServerJoined)
            .ok_or(LineError::Malformed("NEW_SERVER_JOINED")),
        "USER_SYNC" => user_sync(rest).ok_or(LineError::Malformed("USER_SYNC")),
        "CLEAR_USER_SYNC" => instance_id(rest)
            .map(Command::ClearUserSync)
            .ok_or(LineError::Malformed("CLEAR_USER_SYNC")),
        _ => Ok(Command::Unknown),
    }
}

fn rdata(rest: &str) -> Option<Command> {
    let mut words = rest.splitn(4, ' ');
    Some(Command::Rdata {
        stream: short_name(words.next()?)?.to_owned(),
        writer: short_name(words.next()?)?.into(),
        token: match words.next()? {
            "batch" => None,
            number => Some(token(number)?),
        },
        row: serde_json::from_str(words.next()?).ok()?,
    })
}

fn position(rest: &str) -> Option<Command> {
    let mut words = rest.split(' ');
    let command = Command::Position {
        stream: short_name(words.next()?)?.to_owned(),
        writer: short_name(words.next()?)?.into(),
        prev: token(words.next()?)?,
        new: token(words.next()?)?,
    };
    words.next().is_none().then_some(command)
}

fn ack(rest: &str) -> Option<Command> {
    let (instance, number) = rest.split_once(' ')?;
    Some(Command::FederationAck {
        instance: short_name(instance)?.into(),
        token: token(number)?,
    })
}

fn user_sync(rest: &str) -> Option<Command> {
    let mut words = rest.split(' ');
    let command = Command::UserSync {
        instance: instance_id(words.next()?)?,
        device: Device {
            user_id: short_name(words.next()?)?.to_owned(),
            device_id: match short_name(words.next()?)? {
                "None" => None,
                device => Some(device.to_owned()),
            },
        },
        syncing: match words.next()? {
            "start" => true,
            "end" => false,
            _ => return None,
        },
        last_sync: words.next()?.parse().ok().map(Millis)?,
    };
    words.next().is_none().then_some(command)
}

fn instance_id(word: &str) -> Option<InstanceId> {
    let sound = !word.is_empty() && word.len() <= MAX_INSTANCE_ID && !word.contains(' ');
    sound.then(|| InstanceId(word.to_owned()))
}

fn token(word: &str) -> Option<Token> {
    word.parse().ok().map(Token)
}

fn short_name(word: &str) -> Option<&str> {
    (!word.is_empty() && word.len() <= MAX_NAME).then_some(word)
}

fn server_name(word: &str) -> Option<ServerName> {
    let sound = !word.is_empty() && word.len() <= MAX_SERVER_NAME && !word.contains(char::is_whitespace);
    sound.then(|| word.into())
}

impl fmt::Display for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rdata {
                stream,
                writer,
                token,
                row,
            } => match token {
                Some(token) => write!(f, "RDATA {stream} {writer} {token} {row}"),
                None => write!(f, "RDATA {stream} {writer} batch {row}"),
            },
            Self::Position {
                stream,
                writer,
                prev,
                new,
            } => write!(f, "POSITION {stream} {writer} {prev} {new}"),
            // Synapse writes the space after the name too.
            Self::Replicate => f.write_str("REPLICATE "),
            Self::FederationAck { instance, token } => write!(f, "FEDERATION_ACK {instance} {token}"),
            Self::RemoteServerUp(server) => write!(f, "REMOTE_SERVER_UP {server}"),
            Self::NewServerJoined(server) => write!(f, "NEW_SERVER_JOINED {server}"),
            Self::UserSync {
                instance,
                device: Device { user_id, device_id },
                syncing,
                last_sync: Millis(last_sync),
            } => {
                let device_id = device_id.as_deref().unwrap_or("None");
                let state = if *syncing { "start" } else { "end" };
                write!(f, "USER_SYNC {instance} {user_id} {device_id} {state} {last_sync}")
            }
            Self::ClearUserSync(instance) => write!(f, "CLEAR_USER_SYNC {instance}"),
            Self::Unknown => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_lines_of_the_reference_come_back_as_they_were() {
        for line in [
            "REPLICATE ",
            "POSITION events master 1042 1042",
            "POSITION caches fs1 88 88",
            r#"RDATA events master 1043 ["ev",["$abc","!room:example.com","m.room.message",null,null,null,null,false,false]]"#,
            r#"RDATA device_lists master batch ["@ann:example.com",false,true]"#,
            r#"RDATA caches master 8121 ["get_user_by_id",null,1753000000000]"#,
            "FEDERATION_ACK fs1 0",
            "REMOTE_SERVER_UP matrix.remote.example",
            "NEW_SERVER_JOINED remote.example:8448",
            "USER_SYNC qWeRt @ann:example.com PHONE start 1753000000000",
            "USER_SYNC qWeRt @ann:example.com None end 1753000000500",
            "CLEAR_USER_SYNC qWeRt",
        ] {
            assert_eq!(parse(line).unwrap().to_string(), line);
        }
    }

    #[test]
    fn what_is_not_ours_is_unknown_and_what_is_broken_an_error() {
        for line in [
            "",
            " ",
            "USER_IP a b",
            "rdata x",
            "NEW_ACTIVE_TASK abc",
            "SERVER example.com",
        ] {
            assert!(matches!(parse(line), Ok(Command::Unknown)), "{line:?}");
        }
        for line in [
            "RDATA",
            "RDATA events master",
            "RDATA events master 1",
            "RDATA events master x []",
            "RDATA events master 1 [",
            "RDATA events master 1 NaN",
            "RDATA  master 1 []",
            "POSITION events master 1",
            "POSITION events master 1 2 3",
            "POSITION events master 1 99999999999999999999",
            "FEDERATION_ACK fs1",
            "FEDERATION_ACK fs1 1 2",
            "REMOTE_SERVER_UP ",
            "REMOTE_SERVER_UP a b",
            "NEW_SERVER_JOINED",
            "USER_SYNC a b c start",
            "USER_SYNC a b c begin 1",
            "USER_SYNC a b  start 1",
            "USER_SYNC a b c start 1 2",
            "CLEAR_USER_SYNC",
            "CLEAR_USER_SYNC a b",
        ] {
            assert!(matches!(parse(line), Err(LineError::Malformed(_))), "{line:?}");
        }
        assert!(matches!(parse("REPLICATE"), Ok(Command::Replicate)));
        let Ok(Command::NewServerJoined(server)) = parse("NEW_SERVER_JOINED a.example !r:example.com 17") else {
            panic!("further words belong to later versions");
        };
        assert_eq!(server.as_str(), "a.example");
        assert_eq!(
            parse(&"x".repeat(MAX_LINE + 1)).unwrap_err(),
            LineError::TooLong(MAX_LINE + 1)
        );
    }

    proptest! {
        #[test]
        fn no_input_panics(line in r"(RDATA|POSITION|FEDERATION_ACK|REMOTE_SERVER_UP|NEW_SERVER_JOINED|REPLICATE|USER_SYNC|CLEAR_USER_SYNC)? ?\PC{0,60}") {
            let _ = parse(&line);
        }

        #[test]
        fn what_parses_is_written_the_same(
            stream in "[a-z_]{1,12}", writer in "[a-z0-9]{1,8}", token in proptest::option::of(any::<i64>()),
            prev in any::<i64>(), row in "[^\\p{C}\"\\\\]{0,20}",
        ) {
            let token = token.map_or_else(|| "batch".to_owned(), |token| token.to_string());
            for line in [format!("RDATA {stream} {writer} {token} [\"{row}\"]"), format!("POSITION {stream} {writer} {prev} 7")] {
                prop_assert_eq!(parse(&line).unwrap().to_string(), line);
            }
        }
    }
}
