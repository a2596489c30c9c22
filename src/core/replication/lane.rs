//! What do the lines of one writer about one stream mean, in their order?
//!
//! A lane is *closed* until a POSITION of this connection was dealt with: rows heard before are dropped, as the gap that
//! the POSITION shows brings them. While a gap is being fetched, what is heard waits behind it. (Synapse keeps this per
//! stream; a lane for each writer is compatible, and one writer's gap then neither opens nor blocks another's rows.)

use std::collections::VecDeque;

use serde_json::value::RawValue;

use crate::core::{
    clock::Millis,
    id::{InstanceName, Token},
    replication::{
        gap::{Fetch, Group, Page},
        stream::{Gap, Memory, Stream},
    },
};

/// Bytes of rows that wait behind a gap, or for the end of their batch. Beyond it they are forgotten and fetched later.
const MAX_WAITING: usize = 32 * 1024 * 1024;

/// What a row costs beside its text, bytes; so that many tiny rows are bounded too.
const ROW_OVERHEAD: usize = 64;

/// The first pause after a fetch failed, ms. It doubles each time.
const FIRST_PAUSE: i64 = 1_000;

/// The longest pause, ms.
const LONGEST_PAUSE: i64 = 30_000;

/// What was heard.
#[derive(Debug)]
pub enum Heard {
    /// `POSITION`.
    Position {
        /// No rows between this and `new`.
        prev: Token,
        /// The writer is here.
        new: Token,
    },
    /// `RDATA`.
    Row {
        /// `None`: a later row of the same position follows.
        token: Option<Token>,
        /// The row.
        row: Box<RawValue>,
    },
}

/// What follows from it.
#[derive(Debug)]
pub enum Effect {
    /// These rows are new.
    Rows(Group),
    /// The writer's position is known to be this now.
    Reached(Token),
    /// Ask for this page.
    Fetch(Fetch),
    /// Something was forgotten: only a new POSITION opens the lane again.
    AskAgain,
}

/// One writer of one stream.
#[derive(Debug)]
pub struct Lane {
    stream: Stream,
    writer: InstanceName,
    /// Known up to here. Of a writer not yet heard: where the stream was when we started.
    position: Token,
    heard_before: bool,
    state: State,
    batch: Waiting<Box<RawValue>>,
    /// The key of the last page asked for.
    pages: u64,
}

#[derive(Debug)]
enum State {
    Closed,
    Open,
    Fetching(Box<Fetching>),
}

#[derive(Debug)]
struct Fetching {
    page: Fetch,
    failures: u32,
    retry_at: Option<Millis>,
    waiting: Waiting<Heard>,
}

/// A queue bounded in bytes.
#[derive(Debug)]
struct Waiting<T> {
    items: VecDeque<T>,
    bytes: usize,
    overflowed: bool,
}

impl<T> Default for Waiting<T> {
    fn default() -> Self {
        Self {
            items: VecDeque::new(),
            bytes: 0,
            overflowed: false,
        }
    }
}

impl<T> Waiting<T> {
    fn push(&mut self, item: T, bytes: usize) {
        self.bytes = self.bytes.saturating_add(bytes).saturating_add(ROW_OVERHEAD);
        if self.overflowed || self.bytes > MAX_WAITING {
            self.items = VecDeque::new();
            self.overflowed = true;
        } else {
            self.items.push_back(item);
        }
    }
}

impl Lane {
    /// A closed lane. `start`: where the stream was when we started to follow it. `pages` makes its keys unlike those of
    /// other lanes.
    #[must_use]
    pub fn new(stream: Stream, writer: InstanceName, start: Token, pages: u64) -> Self {
        Self {
            stream,
            writer,
            position: start,
            heard_before: false,
            state: State::Closed,
            batch: Waiting::default(),
            pages,
        }
    }

    /// The connection is gone. A page on its way is forgotten: its answer will name an unknown key.
    pub fn disconnect(&mut self) {
        self.state = State::Closed;
        self.batch = Waiting::default();
    }

    /// Something of this writer about this stream was heard.
    pub fn hear(&mut self, heard: Heard, effects: &mut Vec<Effect>) {
        if let State::Fetching(fetching) = &mut self.state {
            let bytes = match &heard {
                Heard::Position { .. } => 0,
                Heard::Row { row, .. } => row.get().len(),
            };
            fetching.waiting.push(heard, bytes);
            return;
        }
        match heard {
            Heard::Position { prev, new } => self.position_heard(prev, new, effects),
            Heard::Row { token, row } => self.row_heard(token, row, effects),
        }
    }

    /// A page arrived.
    pub fn fetched(&mut self, key: u64, page: Page, now: Millis, effects: &mut Vec<Effect>) {
        let State::Fetching(fetching) = &mut self.state else {
            return;
        };
        if fetching.page.key != key {
            return;
        }
        let Fetch { from, to, .. } = fetching.page;
        // Groups may lie above `up_to` and come again: the main process answers so.
        for group in page.groups {
            deliver(self.stream, &mut self.position, group, effects);
        }
        if !page.limited {
            self.caught_up(to, effects);
        } else if page.up_to <= from {
            self.failed(key, now); // "There is more, but not for you" must not become a busy loop.
        } else {
            self.pages = self.pages.wrapping_add(1);
            fetching.page.key = self.pages;
            fetching.page.from = page.up_to;
            fetching.failures = 0;
            effects.push(Effect::Fetch(fetching.page.clone()));
        }
    }

    /// A page could not be had: it is asked for again, later.
    pub fn failed(&mut self, key: u64, now: Millis) {
        if let State::Fetching(fetching) = &mut self.state
            && fetching.page.key == key
        {
            let pause = FIRST_PAUSE << fetching.failures.min(5);
            fetching.failures = fetching.failures.saturating_add(1);
            fetching.retry_at = Some(now.plus(pause.min(LONGEST_PAUSE)));
        }
    }

    /// When [`Self::tick`] has something to do.
    #[must_use]
    pub fn wake_at(&self) -> Option<Millis> {
        match &self.state {
            State::Fetching(fetching) => fetching.retry_at,
            State::Closed | State::Open => None,
        }
    }

    /// Time passed.
    pub fn tick(&mut self, now: Millis, effects: &mut Vec<Effect>) {
        if let State::Fetching(fetching) = &mut self.state
            && fetching.retry_at.is_some_and(|at| at <= now)
        {
            fetching.retry_at = None;
            effects.push(Effect::Fetch(fetching.page.clone()));
        }
    }

    fn position_heard(&mut self, prev: Token, new: Token, effects: &mut Vec<Effect>) {
        let increasing = self.stream.memory() == Memory::Increasing;
        if increasing && new <= self.position && matches!(self.state, State::Open) {
            return;
        }
        // Of a writer not heard before only the stream's start is known, and it may be far below: its next row must
        // not be taken for an old one.
        if increasing && !self.heard_before {
            self.position = self.position.min(new);
            self.heard_before = true;
        }
        self.batch = Waiting::default();
        let gap = self.position < prev && self.position < new;
        if gap && self.stream.gap() != Gap::Nothing {
            self.pages = self.pages.wrapping_add(1);
            let page = Fetch {
                key: self.pages,
                stream: self.stream,
                writer: self.writer.clone(),
                from: self.position,
                to: new,
            };
            effects.push(Effect::Fetch(page.clone()));
            self.state = State::Fetching(Box::new(Fetching {
                page,
                failures: 0,
                retry_at: None,
                waiting: Waiting::default(),
            }));
        } else {
            self.reach(new, effects);
            self.state = State::Open;
        }
    }

    fn row_heard(&mut self, token: Option<Token>, row: Box<RawValue>, effects: &mut Vec<Effect>) {
        if !matches!(self.state, State::Open) {
            return;
        }
        if self.stream.rows_wanted() {
            let bytes = row.get().len();
            self.batch.push(row, bytes);
        }
        let Some(token) = token else {
            return;
        };
        let batch = std::mem::take(&mut self.batch);
        if batch.overflowed {
            self.state = State::Closed;
            effects.push(Effect::AskAgain);
            return;
        }
        let rows = batch.items.into();
        if deliver(self.stream, &mut self.position, Group { token, rows }, effects) {
            effects.push(Effect::Reached(token));
        }
    }

    /// The gap up to `to` is closed: now what was heard meanwhile has its turn.
    fn caught_up(&mut self, to: Token, effects: &mut Vec<Effect>) {
        self.reach(to, effects);
        let State::Fetching(fetching) = std::mem::replace(&mut self.state, State::Open) else {
            return;
        };
        if fetching.waiting.overflowed {
            self.state = State::Closed;
            effects.push(Effect::AskAgain);
            return;
        }
        for heard in fetching.waiting.items {
            self.hear(heard, effects);
        }
    }

    fn reach(&mut self, token: Token, effects: &mut Vec<Effect>) {
        if self.stream.memory() == Memory::Increasing {
            self.position = self.position.max(token);
        }
        effects.push(Effect::Reached(token));
    }
}

/// Hands a group on unless it is known already. True if it was new.
fn deliver(stream: Stream, position: &mut Token, group: Group, effects: &mut Vec<Effect>) -> bool {
    if stream.memory() == Memory::Increasing {
        if group.token <= *position {
            return false;
        }
        *position = group.token;
    }
    if !group.rows.is_empty() {
        effects.push(Effect::Rows(group));
    }
    true
}
