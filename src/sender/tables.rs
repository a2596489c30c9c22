//! The running sender as tables that others may follow over the replication API: `destinations`, `sticky_backlog`,
//! `transactions`.
//!
//! The first two are views of the ledger. Nothing is noted where events pass: when somebody asks, and at most twice a
//! second, the ledger is looked through, and what is not as it was gets a new position. Who waits for news is woken
//! about once a second.

use std::{
    sync::{Arc, OnceLock, Weak},
    time::Duration,
};

use futures_util::future::BoxFuture;
use parking_lot::Mutex;
use serde_json::Value;
use tokio::time::Instant;

use super::Sender;
use crate::core::{
    clock::{self, Millis},
    id::{RoomId, ServerName, StickyPosition, StreamOrdering, Token},
    metrics::DestinationState,
    replication::feed::{Bell, Feed, MemoryTable, Record, Row, Table, TableError},
    store::RetryTimings,
};

/// The ledger is not looked through again before this.
const PAUSE: Duration = Duration::from_millis(500);

/// Rows of `transactions`. Whoever follows it keeps as many.
pub const TRANSACTIONS_KEPT: usize = 1_000;

/// A row of `destinations`: what the sender believes of one that it has had to do with since it started.
#[derive(Debug, Clone, PartialEq)]
pub struct DestinationRow {
    /// Its name.
    pub destination: ServerName,
    /// How it stands.
    pub state: DestinationState,
    /// Everything of its own up to here was accepted.
    pub last_successful: Option<StreamOrdering>,
    /// Its back-off.
    pub retry: RetryTimings,
    /// PDUs in memory that it has not accepted.
    pub queued: usize,
}

/// A row of `sticky_backlog`: a room whose sticky events a destination is still to get.
#[derive(Debug, Clone, PartialEq)]
pub struct BacklogRow {
    /// Who.
    pub destination: ServerName,
    /// Where.
    pub room: RoomId,
    /// From which on; `None` if that has not been read yet.
    pub position: Option<StickyPosition>,
}

/// A row of `transactions`: one that was sent.
#[derive(Debug, Clone, PartialEq)]
pub struct TransactionRow {
    /// To whom.
    pub destination: ServerName,
    /// Its id.
    pub id: Arc<str>,
    /// PDUs in it.
    pub pdus: usize,
    /// The body's size.
    pub bytes: usize,
    /// How the attempt ended.
    pub outcome: &'static str,
    /// How long it took, with all its tries.
    pub duration: Duration,
    /// When it began.
    pub began: Millis,
}

impl Record for DestinationRow {
    const TABLE: &'static str = "destinations";
    const COLUMNS: &'static [&'static str] = &[
        "destination",
        "state",
        "last_successful_stream_ordering",
        "retry_last_ts",
        "retry_interval",
        "failure_ts",
        "queued",
        "deleted",
    ];
    const KEY_COLUMNS: usize = 1;
    type Key = ServerName;

    fn key(&self) -> ServerName {
        self.destination.clone()
    }

    fn cells(&self) -> Vec<Value> {
        let state = match self.state {
            DestinationState::Live => "live",
            DestinationState::Behind => "behind",
            DestinationState::Backoff => "backing_off",
        };
        vec![
            self.destination.as_str().into(),
            state.into(),
            self.last_successful.map(|ordering| ordering.0).into(),
            self.retry.last_tried.0.into(),
            self.retry.interval.into(),
            self.retry.failing_since.map(|since| since.0).into(),
            self.queued.into(),
        ]
    }
}

impl Record for BacklogRow {
    const TABLE: &'static str = "sticky_backlog";
    const COLUMNS: &'static [&'static str] = &["destination", "room_id", "position", "deleted"];
    const KEY_COLUMNS: usize = 2;
    type Key = (ServerName, RoomId);

    fn key(&self) -> Self::Key {
        (self.destination.clone(), self.room.clone())
    }

    fn cells(&self) -> Vec<Value> {
        vec![
            self.destination.as_str().into(),
            self.room.as_str().into(),
            self.position.map(|position| position.0).into(),
        ]
    }
}

impl Record for TransactionRow {
    const TABLE: &'static str = "transactions";
    const COLUMNS: &'static [&'static str] = &[
        "transaction_id",
        "destination",
        "pdus",
        "bytes",
        "outcome",
        "duration_ms",
        "ts",
        "deleted",
    ];
    const KEY_COLUMNS: usize = 1;
    type Key = Arc<str>;

    fn key(&self) -> Arc<str> {
        Arc::clone(&self.id)
    }

    fn cells(&self) -> Vec<Value> {
        vec![
            (*self.id).into(),
            self.destination.as_str().into(),
            self.pdus.into(),
            self.bytes.into(),
            self.outcome.into(),
            u64::try_from(self.duration.as_millis()).unwrap_or(u64::MAX).into(),
            self.began.0.into(),
        ]
    }
}

/// The tables of one sender.
pub struct Tables {
    bell: Bell,
    destinations: MemoryTable<DestinationRow>,
    backlog: MemoryTable<BacklogRow>,
    transactions: MemoryTable<TransactionRow>,
    /// Where the views come from, once the sender runs.
    sender: OnceLock<Weak<Sender>>,
    looked: Mutex<Option<Instant>>,
}

impl Tables {
    /// The tables of a sender that starts now. They ring `bell`.
    #[must_use]
    pub fn new(started: Millis, bell: Bell) -> Self {
        Self {
            destinations: MemoryTable::new(started, bell.clone()),
            backlog: MemoryTable::new(started, bell.clone()),
            transactions: MemoryTable::newest(TRANSACTIONS_KEPT, started, bell.clone()),
            bell,
            sender: OnceLock::new(),
            looked: Mutex::default(),
        }
    }

    /// The feed that serves them, and `others` beside them that ring the same bell.
    #[must_use]
    pub fn feed(self: &Arc<Self>, others: Vec<Arc<dyn Table>>) -> Feed {
        let views: [fn(&Self) -> &dyn Table; 3] = [
            |tables| &tables.destinations,
            |tables| &tables.backlog,
            |tables| &tables.transactions,
        ];
        let views = views.map(|table| -> Arc<dyn Table> {
            let tables = Arc::clone(self);
            Arc::new(View { tables, table })
        });
        Feed::new(self.bell.clone(), views.into_iter().chain(others).collect())
    }

    /// The views are of this sender from now on.
    pub(super) fn show(&self, sender: &Arc<Sender>) {
        let first = self.sender.set(Arc::downgrade(sender)).is_ok();
        debug_assert!(first, "a sender has tables of its own");
    }

    /// There may be something new to see.
    pub(super) fn tick(&self) {
        self.bell.ring();
    }

    /// A transaction was sent.
    pub(super) fn sent(&self, row: TransactionRow) {
        self.transactions.put_quietly(row);
    }

    /// Brings the views up to date.
    fn look(&self) {
        let Some(sender) = self.sender.get().and_then(Weak::upgrade) else {
            return;
        };
        // Held while looking, so that who asks meanwhile sees what is found.
        let mut looked = self.looked.lock();
        let now = clock::now();
        if looked.is_some_and(|last| now.at.duration_since(last) < PAUSE) {
            return;
        }
        let (destinations, backlog) = sender.ledger.lock().rows(now);
        self.destinations.replace(destinations);
        self.backlog.replace(backlog);
        *looked = Some(now.at);
    }
}

/// A table that is brought up to date when it is asked for its position.
struct View {
    tables: Arc<Tables>,
    table: fn(&Tables) -> &dyn Table,
}

impl View {
    fn table(&self) -> &dyn Table {
        (self.table)(&self.tables)
    }
}

impl Table for View {
    fn name(&self) -> &str {
        self.table().name()
    }

    fn columns(&self) -> &[&str] {
        self.table().columns()
    }

    fn position(&self) -> Token {
        self.tables.look();
        self.table().position()
    }

    fn rows(&self, after: Token, up_to: Token, limit: usize) -> BoxFuture<'_, Result<Vec<Row>, TableError>> {
        self.table().rows(after, up_to, limit)
    }
}
