//! How does a process write a stream: ids taken, rows committed, rows and positions announced?

use std::{fmt, sync::Arc};

use parking_lot::Mutex;
use serde_json::value::RawValue;
use tokio::sync::watch;

use crate::core::{
    id::{InstanceName, Token},
    replication::{
        gap::Group,
        ids::{Ids, Ready, StaleId, WriteKey},
        memory_log::MemoryLog,
        outbox::Outbox,
        positions::Position,
        stream::Stream,
    },
};

/// A stream in the database whose ids several writers take from one source.
#[derive(Debug)]
pub struct StreamWriter<P> {
    ids: Mutex<Ids<P>>,
    outbox: Arc<Outbox>,
    up_to: watch::Sender<P>,
}

/// Why a write got no ids.
#[derive(Debug, thiserror::Error)]
pub enum DrawError<E> {
    /// The source failed.
    #[error("{0}")]
    Source(E),
    /// It gave out what is known already.
    #[error(transparent)]
    Stale(#[from] StaleId),
}

impl<P: Position> StreamWriter<P> {
    /// `outbox` must know the stream, at the position of `ids`.
    pub(super) fn new(ids: Ids<P>, outbox: Arc<Outbox>) -> Self {
        let (up_to, _) = watch::channel(ids.up_to());
        let ids = Mutex::new(ids);
        Self { ids, outbox, up_to }
    }

    /// Up to where all writers have persisted everything.
    #[must_use]
    pub fn up_to(&self) -> watch::Receiver<P> {
        self.up_to.subscribe()
    }

    /// Begins a write. Must come *before* the source of ids is asked: from here on our position stays below what it may
    /// answer.
    pub fn begin(self: &Arc<Self>) -> Write<P> {
        Write {
            key: self.ids.lock().ask(),
            ids: Vec::new(),
            writer: Arc::clone(self),
        }
    }

    /// Begins a write and asks `source` for its ids.
    ///
    /// # Errors
    /// The source's, and an id that is too low.
    pub async fn draw<E>(
        self: &Arc<Self>,
        source: impl Future<Output = Result<Vec<P>, E>>,
    ) -> Result<Write<P>, DrawError<E>> {
        let mut write = self.begin();
        write.drawn(source.await.map_err(DrawError::Source)?)?;
        Ok(write)
    }

    /// Publishes our position, if it has moved. Called about once a second: then other writers' ids move it, too.
    pub(super) fn announce(&self) {
        let ids = self.ids.lock();
        self.outbox.moved(P::STREAM, ids.position().token());
    }

    /// Another writer said its position.
    pub(super) fn heard(&self, writer: &InstanceName, token: Token) {
        let mut ids = self.ids.lock();
        ids.heard(writer, P::at(token));
        self.publish(&ids, Vec::new());
    }

    /// Takes the lock along, so that rows and positions keep their order.
    fn publish(&self, ids: &Ids<P>, ready: Vec<Ready>) {
        for ready in ready {
            match ready {
                Ready::Rows(group) => self.outbox.rows(P::STREAM, group),
                Ready::Skipped(token) => self.outbox.skip(P::STREAM, token),
            }
        }
        let up_to = ids.up_to();
        self.up_to.send_if_modified(|at| std::mem::replace(at, up_to) != up_to);
    }
}

/// One write. Dropped, it is abandoned: drop it only once its transaction is surely rolled back, for from then on readers
/// may pass its ids. (After an error of the commit itself, look first whether the rows are there.)
#[must_use = "dropped, the write is abandoned"]
pub struct Write<P: Position> {
    writer: Arc<StreamWriter<P>>,
    key: WriteKey,
    ids: Vec<P>,
}

impl<P: Position> Write<P> {
    /// The source answered (or a function that also wrote the rows, and gives the ids it took).
    ///
    /// # Errors
    /// An id that is too low. Nothing must be committed under it.
    pub fn drawn(&mut self, ids: Vec<P>) -> Result<(), StaleId> {
        let mut state = self.writer.ids.lock();
        let ready = state.drawn(self.key, &ids)?;
        self.ids = ids;
        self.writer.publish(&state, ready);
        Ok(())
    }

    /// The ids, as the source gave them.
    #[must_use]
    pub fn ids(&self) -> &[P] {
        &self.ids
    }

    /// The transaction is committed, and these are the rows of its ids. They are published as soon as nothing below is
    /// unfinished.
    pub fn finish(self, rows: Vec<Group>) {
        let mut ids = self.writer.ids.lock();
        let ready = ids.finish(self.key, &self.ids, rows);
        self.writer.publish(&ids, ready);
    }
}

impl<P: Position> Drop for Write<P> {
    /// Of a finished write nothing is left to abandon.
    fn drop(&mut self) {
        let mut ids = self.writer.ids.lock();
        let ready = ids.abandon(self.key, &self.ids);
        self.writer.publish(&ids, ready);
    }
}

impl<P: Position> fmt::Debug for Write<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Write")
            .field("key", &self.key)
            .field("ids", &self.ids)
            .finish_non_exhaustive()
    }
}

/// A stream that is in no database.
#[derive(Debug)]
pub(super) struct MemoryStream {
    stream: Stream,
    pub log: Mutex<MemoryLog>,
    outbox: Arc<Outbox>,
}

impl MemoryStream {
    /// `outbox` must know the stream, at `start`.
    pub fn new(stream: Stream, start: Token, outbox: Arc<Outbox>) -> Self {
        let log = Mutex::new(MemoryLog::new(stream, start));
        Self { stream, log, outbox }
    }

    /// Publishes a row that says all of `key`.
    pub fn publish(&self, key: &str, row: Box<RawValue>) {
        let mut log = self.log.lock();
        let token = log.push(key, row.clone());
        let rows = vec![row];
        self.outbox.rows(self.stream, Group { token, rows });
    }
}
