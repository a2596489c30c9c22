//! The running side of replication: carries out what the reader decides.
//!
//! Three tasks: one listens, one speaks ([`redis_bus`]), one drives the [`Reader`]. The last never waits for anything
//! slow, so that nothing piles up in front of it: pages are fetched beside it, and what is heard waits, bounded, for whoever
//! uses it.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use rand::{SeedableRng, rngs::StdRng};
use tokio::{
    sync::{mpsc, watch},
    task::JoinSet,
    time::{Instant, sleep_until, timeout},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::{debug, error, warn};

use crate::{
    config,
    core::{
        clock::Millis,
        id::{InstanceName, ServerName, StreamOrdering},
        replication::{
            bus::BusEvent,
            command::Command,
            gap::{self, Fetch, FetchError, GapSource, Group, Page},
            http_gaps::HttpGaps,
            outbox::Outbox,
            reader::{Action, Input, Reader, StartPositions},
            redis_bus,
            stream::{Gap, Stream},
        },
        store::CacheRow,
    },
};

/// For one page from the database.
const DATABASE_TIMEOUT: Duration = Duration::from_mins(1);

/// Things heard that wait at most.
const MAX_HEARD: usize = 10_000;

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

/// Starts to take part in replication, until `shutdown` (which comes last: what was given to the [`Publisher`] before is
/// still published). `seed` comes from the operating system's randomness: jitter and
/// transaction ids are made from it.
pub fn start<G: GapSource>(
    settings: Settings,
    start: StartPositions,
    gaps: G,
    seed: u64,
    shutdown: &CancellationToken,
    tracker: &TaskTracker,
) -> Subscription {
    let (events, bus) = mpsc::channel(BUS_CHANNEL);
    let (heard, heard_receiver) = mpsc::channel(1);
    let (events_up_to, up_to_receiver) = watch::channel(start.events.up_to());
    let outbox = Arc::new(Outbox::new(settings.me.clone(), start.caches));
    let channel = settings.server_name.as_str().to_owned();

    let mut rng = StdRng::seed_from_u64(seed);
    let listen = redis_bus::listen(
        settings.redis.clone(),
        channel.clone(),
        events.clone(),
        StdRng::from_rng(&mut rng),
    );
    let speak = redis_bus::speak(settings.redis, channel, outbox.clone(), events, rng, shutdown.clone());
    let driver = Driver {
        reader: Reader::new(settings.me, start),
        outbox: outbox.clone(),
        sources: Arc::new(Sources {
            database: gaps,
            http: HttpGaps::new(&settings.replication, seed),
        }),
        fetches: JoinSet::new(),
        events_up_to,
        heard,
        waiting: Waiting::default(),
        started: Instant::now(),
        edus_dropped: 0,
    };
    tracker.spawn(shutdown.clone().run_until_cancelled_owned(listen));
    tracker.spawn(speak);
    tracker.spawn(shutdown.clone().run_until_cancelled_owned(driver.run(bus)));
    Subscription {
        events_up_to: up_to_receiver,
        heard: heard_receiver,
        publisher: Publisher(outbox),
    }
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
    outbox: Arc<Outbox>,
    sources: Arc<Sources<G>>,
    fetches: JoinSet<(Fetch, Result<Page, FetchError>)>,
    events_up_to: watch::Sender<StreamOrdering>,
    heard: mpsc::Sender<Heard>,
    waiting: Waiting,
    started: Instant,
    edus_dropped: u64,
}

impl<G: GapSource> Driver<G> {
    async fn run(mut self, mut bus: mpsc::Receiver<BusEvent>) {
        let heard = self.heard.clone();
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
                Action::EventsUpTo(up_to) => {
                    self.events_up_to.send_replace(up_to);
                }
                Action::ServerUp(server) => self.waiting.push(Heard::RemoteServerUp(server)),
                Action::NewServerJoined(server) => self.waiting.push(Heard::NewServerJoined(server)),
                Action::TwinAlive => self.waiting.push(Heard::TwinAlive),
            }
        }
    }

    fn rows(&mut self, stream: Stream, writer: &InstanceName, group: &Group) {
        match stream {
            Stream::Events => {}
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

/// What was heard and not yet taken.
#[derive(Debug, Default)]
struct Waiting(VecDeque<Heard>);

impl Waiting {
    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn pop(&mut self) -> Option<Heard> {
        self.0.pop_front()
    }

    /// Too much, and only the last word about the connection and a twin stay.
    fn push(&mut self, heard: Heard) {
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
