//! The running side of replication: carries out what the reader decides.
//!
//! Three tasks: one listens, one speaks (both of the [`Bus`]), one drives the [`Reader`]. The last never waits for anything
//! slow, so that nothing piles up in front of it: pages are fetched beside it, and what is heard waits, bounded, for whoever
//! uses it.

use std::{sync::Arc, time::Duration};

use tokio::{
    sync::{mpsc, watch},
    task::JoinSet,
    time::{Instant, MissedTickBehavior, interval, sleep_until, timeout},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::{debug, error, warn};

pub use super::heard::Heard;
use crate::{
    config,
    core::{
        clock::Millis,
        id::{InstanceName, ServerName, StickyPosition, StreamOrdering, Token},
        replication::{
            bus::{Bus, BusEvent},
            command::Command,
            gap::{self, Fetch, FetchError, GapSource, Group, Page},
            heard::Waiting,
            http_gaps::HttpGaps,
            outbox::Outbox,
            positions::Positions,
            reader::{Action, Input, Reader, Role, StartPositions},
            redis_bus::RedisBus,
            stream::{Gap, Stream},
            writer::StreamWriter,
        },
        store::CacheRow,
    },
};

/// For one page from the database.
const DATABASE_TIMEOUT: Duration = Duration::from_mins(1);

/// Between looks whether other writers moved our position in the streams that we write too.
const ANNOUNCE_EVERY: Duration = Duration::from_secs(1);

/// Bus events on their way at most.
const BUS_CHANNEL: usize = 1_024;

/// The part of the configuration that replication needs.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The homeserver's name: the channel.
    pub server_name: ServerName,
    /// Our instance.
    pub me: InstanceName,
    /// Redis.
    pub redis: config::Redis,
    /// Where other processes listen.
    pub replication: config::Replication,
}

/// What replication gives to the rest of the process.
#[derive(Debug)]
pub struct Subscription {
    /// `events` is persisted up to here by all writers. Starts at the start-up value; only grows; never beyond the truth.
    pub events_up_to: watch::Receiver<StreamOrdering>,
    /// What others tell us, in order.
    pub heard: mpsc::Receiver<Heard>,
    /// What we tell others.
    pub publisher: Publisher,
}

/// Tells the other processes. Never blocks.
#[derive(Debug, Clone)]
pub struct Publisher(Arc<Outbox>);

impl Publisher {
    pub(super) fn new(outbox: Arc<Outbox>) -> Self {
        Self(outbox)
    }

    /// Publishes a row of the `caches` stream, after its commit. Rows must come in ascending order of their tokens: readers
    /// drop a late one for good. So commit and publish them one after the other.
    pub fn cache_row(&self, row: &CacheRow) {
        self.0.cache_row(row);
    }

    /// Publishes that a server that failed answers again.
    pub fn remote_server_up(&self, server: &ServerName) {
        self.0.say(&Command::RemoteServerUp(server.clone()));
    }
}

/// Starts to take part in replication over Redis, as a sender, until `shutdown` (which comes last: what was given to the
/// [`Publisher`] before is still published). `seed` comes from the operating system's randomness: jitter and transaction
/// ids are made from it.
pub fn start<G: GapSource>(
    settings: Settings,
    start: StartPositions,
    gaps: G,
    seed: u64,
    shutdown: &CancellationToken,
    tracker: &TaskTracker,
) -> Subscription {
    let bus = RedisBus::new(settings.redis, &settings.server_name, seed);
    let http = HttpGaps::new(&settings.replication, seed);
    start_on(bus, settings.me, start, gaps, http, shutdown, tracker)
}

/// The same over any bus.
pub fn start_on<B: Bus, G: GapSource>(
    bus: B,
    me: InstanceName,
    start: StartPositions,
    gaps: G,
    http: HttpGaps,
    shutdown: &CancellationToken,
    tracker: &TaskTracker,
) -> Subscription {
    let (up_to, events_up_to) = watch::channel(start.events.up_to());
    let outbox = Arc::new(Outbox::new(me.clone(), vec![(Stream::Caches, start.caches)]));
    let part = Part {
        me,
        role: Role::Sender,
        caches: start.caches,
        following: Following::Read {
            events: start.events,
            up_to,
        },
        outbox: outbox.clone(),
        gaps,
        http,
    };
    Subscription {
        events_up_to,
        heard: take_part(bus, part, shutdown, tracker),
        publisher: Publisher::new(outbox),
    }
}

/// What becomes of other writers' positions.
pub(super) enum Following {
    /// Somebody waits for them.
    Read {
        /// Of the writers of `events`.
        events: Positions,
        /// Who waits.
        up_to: watch::Sender<StreamOrdering>,
    },
    /// We write the same streams.
    Written {
        /// `events`.
        events: Arc<StreamWriter<StreamOrdering>>,
        /// `sticky_events`.
        sticky_events: Arc<StreamWriter<StickyPosition>>,
    },
}

impl Following {
    fn reached(&mut self, stream: Stream, writer: &InstanceName, token: Token) {
        match self {
            Self::Read { events, up_to } if stream == Stream::Events => {
                events.advance(writer, StreamOrdering(token.0));
                let now = events.up_to();
                up_to.send_if_modified(|at| std::mem::replace(at, now) != now);
            }
            Self::Read { .. } => {}
            Self::Written { events, sticky_events } => match stream {
                Stream::Events => events.heard(writer, token),
                Stream::StickyEvents => sticky_events.heard(writer, token),
                _ => {}
            },
        }
    }

    fn announce(&self) {
        if let Self::Written { events, sticky_events } = self {
            events.announce();
            sticky_events.announce();
        }
    }
}

/// A process, as replication sees it.
pub(super) struct Part<G> {
    pub me: InstanceName,
    pub role: Role,
    pub caches: Token,
    pub following: Following,
    pub outbox: Arc<Outbox>,
    pub gaps: G,
    pub http: HttpGaps,
}

/// Starts the three tasks.
pub(super) fn take_part<B: Bus, G: GapSource>(
    bus: B,
    part: Part<G>,
    shutdown: &CancellationToken,
    tracker: &TaskTracker,
) -> mpsc::Receiver<Heard> {
    let (events, from_bus) = mpsc::channel(BUS_CHANNEL);
    let (heard, heard_receiver) = mpsc::channel(1);
    let listen = bus.clone().listen(events.clone());
    let speak = bus.speak(part.outbox.clone(), events, shutdown.clone());
    let driver = Driver {
        reader: Reader::new(part.me, part.role, part.caches),
        following: part.following,
        outbox: part.outbox,
        sources: Arc::new(Sources {
            database: part.gaps,
            http: part.http,
        }),
        fetches: JoinSet::new(),
        heard,
        waiting: Waiting::default(),
        started: Instant::now(),
        edus_dropped: 0,
    };
    tracker.spawn(shutdown.clone().run_until_cancelled_owned(listen));
    tracker.spawn(speak);
    tracker.spawn(shutdown.clone().run_until_cancelled_owned(driver.run(from_bus)));
    heard_receiver
}

/// Where pages come from.
struct Sources<G> {
    database: G,
    http: HttpGaps,
}

impl<G: GapSource> Sources<G> {
    async fn fetch(&self, fetch: &Fetch) -> Result<Page, FetchError> {
        match fetch.stream.gap() {
            Gap::Database => {
                let rows = self.database.cache_rows(&fetch.writer, fetch.from, fetch.to, gap::PAGE);
                gap::page_of_caches(fetch, &timeout(DATABASE_TIMEOUT, rows).await??)
            }
            Gap::Http => self.http.fetch(fetch).await,
            Gap::Nothing => Ok(Page {
                groups: Vec::new(),
                up_to: fetch.to,
                limited: false,
            }),
        }
    }
}

struct Driver<G> {
    reader: Reader,
    following: Following,
    outbox: Arc<Outbox>,
    sources: Arc<Sources<G>>,
    fetches: JoinSet<(Fetch, Result<Page, FetchError>)>,
    heard: mpsc::Sender<Heard>,
    waiting: Waiting,
    started: Instant,
    edus_dropped: u64,
}

impl<G: GapSource> Driver<G> {
    async fn run(mut self, mut bus: mpsc::Receiver<BusEvent>) {
        let heard = self.heard.clone();
        let mut announce = interval(ANNOUNCE_EVERY);
        announce.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let writes = matches!(self.following, Following::Written { .. });
        loop {
            let wake_at = self.wake_at();
            let input = tokio::select! {
                event = bus.recv() => match event {
                    Some(event) => self.bus_event(event),
                    None => return,
                },
                Some(result) = self.fetches.join_next() => match result {
                    Ok((fetch, Ok(page))) => Input::Fetched(fetch, page),
                    Ok((fetch, Err(error))) => {
                        warn!(stream = fetch.stream.name(), writer = %fetch.writer, from = fetch.from.0, %error,
                            "missed rows cannot be fetched; trying again");
                        Input::FetchFailed(fetch)
                    }
                    // Only at the end of the runtime: a fetch is never aborted before, and does not panic.
                    Err(error) => {
                        error!(%error, "fetching missed rows ended");
                        continue;
                    }
                },
                () = sleep_until(wake_at.unwrap_or(self.started)), if wake_at.is_some() => Input::Tick,
                _ = announce.tick(), if writes => {
                    self.following.announce();
                    continue;
                }
                Ok(permit) = heard.reserve(), if !self.waiting.is_empty() => {
                    if let Some(heard) = self.waiting.pop() {
                        permit.send(heard);
                    }
                    continue;
                }
            };
            self.handle(input);
        }
    }

    fn now(&self) -> Millis {
        Millis(i64::try_from(self.started.elapsed().as_millis()).unwrap_or(i64::MAX))
    }

    fn wake_at(&self) -> Option<Instant> {
        let Millis(at) = self.reader.wake_at()?;
        Some(self.started + Duration::from_millis(u64::try_from(at).unwrap_or_default()))
    }

    fn bus_event(&mut self, event: BusEvent) -> Input {
        match event {
            BusEvent::Subscribed => {
                self.waiting.push(Heard::Connected);
                Input::Subscribed
            }
            BusEvent::Lost => {
                self.waiting.push(Heard::Disconnected);
                Input::Lost
            }
            BusEvent::OutboundUp => Input::OutboundUp,
            BusEvent::OutboundDown => Input::OutboundDown,
            BusEvent::Line(line) => Input::Line(line),
        }
    }

    fn handle(&mut self, input: Input) {
        for action in self.reader.handle(input, self.now()) {
            match action {
                Action::Publish(command) => self.outbox.say(&command),
                Action::Announce => self.outbox.announce(),
                Action::Fetch(fetch) => {
                    debug!(stream = fetch.stream.name(), writer = %fetch.writer, from = fetch.from.0, to = fetch.to.0,
                        "fetching missed rows");
                    let sources = self.sources.clone();
                    self.fetches.spawn(async move {
                        let result = sources.fetch(&fetch).await;
                        (fetch, result)
                    });
                }
                Action::Rows { stream, writer, group } => self.rows(stream, &writer, &group),
                Action::Reached { stream, writer, token } => self.following.reached(stream, &writer, token),
                Action::ServerUp(server) => self.waiting.push(Heard::RemoteServerUp(server)),
                Action::NewServerJoined(server) => self.waiting.push(Heard::NewServerJoined(server)),
                Action::TwinAlive => self.waiting.push(Heard::TwinAlive),
                Action::FederationAck(instance, token) => self.waiting.push(Heard::FederationAck(instance, token)),
                Action::UserSync(instance, device, syncing, last_sync) => self.waiting.push(Heard::UserSync {
                    instance,
                    device,
                    syncing,
                    last_sync,
                }),
                Action::ClearUserSync(instance) => self.waiting.push(Heard::ClearUserSync(instance)),
            }
        }
    }

    fn rows(&mut self, stream: Stream, writer: &InstanceName, group: &Group) {
        match stream {
            Stream::Events | Stream::StickyEvents | Stream::Presence | Stream::Typing => {}
            Stream::Caches => {
                for row in &group.rows {
                    match serde_json::from_str::<(String, Option<Vec<String>>, Option<i64>)>(row.get()) {
                        Ok((func, keys, _)) => self.waiting.push(Heard::CacheInvalidated { func, keys }),
                        Err(error) => warn!(%writer, token = group.token.0, %error, "row of caches not understood"),
                    }
                }
            }
            Stream::Federation => {
                if self.edus_dropped == 0 {
                    warn!(%writer, "the main process hands over EDUs, which are not sent yet");
                }
                self.edus_dropped += u64::try_from(group.rows.len()).unwrap_or_default();
                debug!(dropped = self.edus_dropped, "EDUs of the main process not sent");
            }
        }
    }
}
