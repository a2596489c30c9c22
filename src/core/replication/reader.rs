//! What must be done about a line of the channel, a lost connection, a page that arrived?
//!
//! The whole reading side without I/O: input and time in, actions out. `reference` semantics are Synapse 1.163.2's, with
//! two differences: a gap that cannot be fetched is tried again instead of leaving the stream deaf, and being connected is
//! kept for each writer.

use std::collections::HashMap;

use tracing::{debug, warn};

use crate::core::{
    clock::Millis,
    id::{InstanceName, ServerName, Token},
    replication::{
        command::{self, Command, Device, InstanceId, LineError},
        echoes::Echoes,
        gap::{Fetch, Group, Page},
        lane::{self, Effect, Lane},
        positions::Positions,
        stream::Stream,
    },
};

/// Writers followed at most, over all streams. Instance names come from the channel.
const MAX_LANES: usize = 1_000;

/// What a process is to the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// It sends to other homeservers: it acknowledges the `federation` stream.
    Sender,
    /// It handles clients and presence: it hears acknowledgements, and whose clients ask for news.
    Master,
}

/// Where reading begins: what the database says at start-up.
#[derive(Debug, Clone)]
pub struct StartPositions {
    /// Of the writers of `events`.
    pub events: Positions,
    /// The greatest `cache_invalidation_stream_by_instance.stream_id` (0 if there is none). Nothing is cached yet, so
    /// what is at or below it is of no interest.
    pub caches: Token,
}

/// What happened.
#[derive(Debug)]
pub enum Input {
    /// The subscription is confirmed.
    Subscribed,
    /// The subscription is gone.
    Lost,
    /// Publishing is possible (again).
    OutboundUp,
    /// It is not.
    OutboundDown,
    /// A line was heard.
    Line(String),
    /// A page asked for by [`Action::Fetch`] arrived.
    Fetched(Fetch, Page),
    /// It could not be had.
    FetchFailed(Fetch),
    /// Nothing but time.
    Tick,
}

/// What to do about it, in this order.
#[derive(Debug)]
pub enum Action {
    /// Publish this.
    Publish(Command),
    /// Publish where we are in the streams we write.
    Announce,
    /// Ask for this page and hand in [`Input::Fetched`] or [`Input::FetchFailed`].
    Fetch(Fetch),
    /// Rows of a stream that are new. At least once, ascending for each writer.
    Rows {
        /// The stream.
        stream: Stream,
        /// Who wrote them.
        writer: InstanceName,
        /// The rows and their position.
        group: Group,
    },
    /// A writer of a stream whose ids several take from one source said its position.
    Reached {
        /// The stream.
        stream: Stream,
        /// The writer.
        writer: InstanceName,
        /// Its position. It may be lower than one said before.
        token: Token,
    },
    /// `REMOTE_SERVER_UP` (also the echo of our own).
    ServerUp(ServerName),
    /// `NEW_SERVER_JOINED`.
    NewServerJoined(ServerName),
    /// Another process acknowledges under our name.
    TwinAlive,
    /// A sender has dealt with the `federation` stream up to here.
    FederationAck(InstanceName, Token),
    /// A client began (true) or ceased to ask a process for news.
    UserSync(InstanceId, Device, bool, Millis),
    /// That process stops.
    ClearUserSync(InstanceId),
}

/// The reading side's state.
#[derive(Debug)]
pub struct Reader {
    me: InstanceName,
    role: Role,
    subscribed: bool,
    outbound: bool,
    caches_start: Token,
    lanes: HashMap<(Stream, InstanceName), Lane>,
    echoes: Echoes,
}

impl Reader {
    /// A reader for the instance `me`, not connected. `caches`: see [`StartPositions::caches`].
    #[must_use]
    pub fn new(me: InstanceName, role: Role, caches: Token) -> Self {
        Self {
            me,
            role,
            subscribed: false,
            outbound: false,
            caches_start: caches,
            lanes: HashMap::new(),
            echoes: Echoes::default(),
        }
    }

    /// When to hand in [`Input::Tick`].
    #[must_use]
    pub fn wake_at(&self) -> Option<Millis> {
        self.lanes.values().filter_map(Lane::wake_at).min()
    }

    /// Takes in what happened at `now` (of a clock that never goes back).
    pub fn handle(&mut self, input: Input, now: Millis) -> Vec<Action> {
        let mut actions = Vec::new();
        match input {
            Input::Subscribed => {
                self.close_lanes();
                self.echoes.resubscribed(now);
                self.subscribed = true;
                self.introduce(&mut actions);
            }
            Input::Lost => {
                self.subscribed = false;
                self.close_lanes();
            }
            Input::OutboundUp => {
                self.outbound = true;
                self.introduce(&mut actions);
            }
            Input::OutboundDown => self.outbound = false,
            Input::Line(line) => self.line(&line, now, &mut actions),
            Input::Fetched(fetch, page) => {
                self.on_lane(fetch.stream, &fetch.writer, now, &mut actions, |lane, effects| {
                    lane.fetched(fetch.key, page, now, effects);
                });
            }
            Input::FetchFailed(fetch) => self.on_lane(fetch.stream, &fetch.writer, now, &mut actions, |lane, _| {
                lane.failed(fetch.key, now);
            }),
            Input::Tick => {
                let due = self
                    .lanes
                    .iter()
                    .filter(|(_, lane)| lane.wake_at().is_some_and(|at| at <= now));
                let due: Vec<_> = due.map(|(key, _)| key.clone()).collect();
                for (stream, writer) in due {
                    self.on_lane(stream, &writer, now, &mut actions, |lane, effects| {
                        lane.tick(now, effects);
                    });
                }
            }
        }
        actions
    }

    /// Asks everybody for positions, and says ours. Only once both connections stand: asked without a subscription, the
    /// answers would be missed. Both connections' returns lead here, as either may have swallowed the last attempt.
    fn introduce(&self, actions: &mut Vec<Action>) {
        if self.subscribed && self.outbound {
            actions.extend([Action::Publish(Command::Replicate), Action::Announce]);
        }
    }

    fn close_lanes(&mut self) {
        for lane in self.lanes.values_mut() {
            lane.disconnect();
        }
    }

    fn line(&mut self, line: &str, now: Millis, actions: &mut Vec<Action>) {
        let command = match command::parse(line) {
            Ok(command) => command,
            Err(error @ LineError::TooLong(_)) => {
                // Its row is missed, and whose it was is not known: all gaps are fetched.
                warn!(%error, "asking for all positions anew");
                self.close_lanes();
                self.introduce(actions);
                return;
            }
            Err(error) => {
                warn!(%error, "line ignored");
                return;
            }
        };
        match command {
            Command::Rdata {
                stream,
                writer,
                token,
                row,
            } => self.hear(&stream, &writer, lane::Heard::Row { token, row }, now, actions),
            Command::Position {
                stream,
                writer,
                prev,
                new,
            } => self.hear(&stream, &writer, lane::Heard::Position { prev, new }, now, actions),
            Command::Replicate => actions.push(Action::Announce),
            Command::FederationAck { instance, token } => match self.role {
                Role::Sender if instance == self.me && self.echoes.heard() => actions.push(Action::TwinAlive),
                Role::Sender => {}
                Role::Master => actions.push(Action::FederationAck(instance, token)),
            },
            Command::UserSync {
                instance,
                device,
                syncing,
                last_sync,
            } if self.role == Role::Master => {
                actions.push(Action::UserSync(instance, device, syncing, last_sync));
            }
            Command::ClearUserSync(instance) if self.role == Role::Master => {
                actions.push(Action::ClearUserSync(instance));
            }
            Command::UserSync { .. } | Command::ClearUserSync(_) => {}
            Command::RemoteServerUp(server) => actions.push(Action::ServerUp(server)),
            Command::NewServerJoined(server) => actions.push(Action::NewServerJoined(server)),
            Command::Unknown => debug!(command = line.split(' ').next(), "unknown command ignored"),
        }
    }

    fn hear(
        &mut self,
        stream: &str,
        writer: &InstanceName,
        heard: lane::Heard,
        now: Millis,
        actions: &mut Vec<Action>,
    ) {
        let Some(stream) = Stream::by_name(stream) else {
            return;
        };
        let not_ours = stream == Stream::Federation && self.role == Role::Master;
        if *writer == self.me || !self.subscribed || not_ours {
            return;
        }
        let key = (stream, writer.clone());
        if !self.lanes.contains_key(&key) {
            if self.lanes.len() >= MAX_LANES {
                warn!(stream = stream.name(), %writer, "too many writers; ignored");
                return;
            }
            let start = match stream {
                Stream::Caches => self.caches_start,
                _ => Token(0),
            };
            let first_key = u64::try_from(self.lanes.len()).unwrap_or_default() << 32;
            self.lanes
                .insert(key, Lane::new(stream, writer.clone(), start, first_key));
        }
        self.on_lane(stream, writer, now, actions, |lane, effects| lane.hear(heard, effects));
    }

    /// Does something with a lane and turns its effects into actions.
    fn on_lane(
        &mut self,
        stream: Stream,
        writer: &InstanceName,
        now: Millis,
        actions: &mut Vec<Action>,
        act: impl FnOnce(&mut Lane, &mut Vec<Effect>),
    ) {
        let Some(lane) = self.lanes.get_mut(&(stream, writer.clone())) else {
            return;
        };
        let mut effects = Vec::new();
        act(lane, &mut effects);
        for effect in effects {
            match effect {
                Effect::Rows(group) => actions.push(Action::Rows {
                    stream,
                    writer: writer.clone(),
                    group,
                }),
                Effect::Reached(token) => self.reached(stream, writer, token, now, actions),
                Effect::Fetch(fetch) => actions.push(Action::Fetch(fetch)),
                Effect::AskAgain => {
                    warn!(stream = stream.name(), %writer, "too many rows at once; they are fetched instead");
                    if self.outbound {
                        actions.push(Action::Publish(Command::Replicate));
                    }
                }
            }
        }
    }

    fn reached(&mut self, stream: Stream, writer: &InstanceName, token: Token, now: Millis, actions: &mut Vec<Action>) {
        match stream {
            Stream::Events | Stream::StickyEvents => actions.push(Action::Reached {
                stream,
                writer: writer.clone(),
                token,
            }),
            Stream::Federation if self.outbound => {
                self.echoes.published(now);
                let instance = self.me.clone();
                actions.push(Action::Publish(Command::FederationAck { instance, token }));
            }
            // Unsaid, the acknowledgement comes up again with the POSITION that our next REPLICATE brings.
            Stream::Federation | Stream::Caches | Stream::Presence | Stream::Typing => {}
        }
    }
}
