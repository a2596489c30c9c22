//! A table that is in no database: rows that come, change and go, each at the position of its last change.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    hash::Hash,
    ops::Bound,
};

use futures_util::{FutureExt as _, future::BoxFuture};
use parking_lot::Mutex;
use serde_json::Value;

use super::table::{Bell, Row, Table, TableError, first_position};
use crate::core::{clock::Millis, id::Token};

/// What the rows of a [`MemoryTable`] are.
pub trait Record: PartialEq + Send + 'static {
    /// The table's name.
    const TABLE: &'static str;
    /// The columns. The first [`Self::KEY_COLUMNS`] tell one row from another; the last must be `deleted`, which the table
    /// itself fills.
    const COLUMNS: &'static [&'static str];
    /// How many columns are the key.
    const KEY_COLUMNS: usize;
    /// The key.
    type Key: Clone + Eq + Hash + Send;

    /// The row's key.
    fn key(&self) -> Self::Key;

    /// A cell for each column but `deleted`.
    fn cells(&self) -> Vec<Value>;
}

/// Rows that are gone are remembered until there are more of them than of the others, and than this.
const GONE_REMEMBERED: usize = 1_000;

/// A table in memory.
///
/// A row whose `deleted` is true says: drop every row that equals this one in the columns where this one is not null. The
/// first row of the table is such a row with nothing but nulls, at the position where the process began; so whoever comes
/// with a position of an earlier process drops all it has.
pub struct MemoryTable<R: Record> {
    bell: Bell,
    rows: Mutex<Rows<R>>,
}

impl<R: Record> MemoryTable<R> {
    /// An empty table of a process that started at `started`.
    #[must_use]
    pub fn new(started: Millis, bell: Bell) -> Self {
        Self::newest(usize::MAX, started, bell)
    }

    /// One that holds no more than the `keep` rows that changed last. What it loses so is not told: whoever follows it keeps
    /// as many.
    #[must_use]
    pub fn newest(keep: usize, started: Millis, bell: Bell) -> Self {
        Self {
            bell,
            rows: Mutex::new(Rows::new(first_position(started).0, keep)),
        }
    }

    /// A row that is new, or not what it was.
    pub fn put(&self, record: R) {
        self.change(|rows| rows.put(record));
    }

    /// The row with this key is gone.
    pub fn remove(&self, key: &R::Key) {
        self.change(|rows| rows.remove(key));
    }

    /// The table holds these rows and no other; what has not changed keeps its position.
    pub fn replace(&self, records: Vec<R>) {
        self.change(|rows| rows.replace(records));
    }

    /// As [`Self::put`], for what changes often and is of no hurry: whoever waits is not told.
    pub fn put_quietly(&self, record: R) {
        self.rows.lock().put(record);
    }

    fn change(&self, change: impl FnOnce(&mut Rows<R>)) {
        let moved = {
            let mut rows = self.rows.lock();
            let before = rows.last;
            change(&mut rows);
            rows.last != before
        };
        if moved {
            self.bell.ring();
        }
    }
}

impl<R: Record> Table for MemoryTable<R> {
    fn name(&self) -> &str {
        R::TABLE
    }

    fn columns(&self) -> &[&str] {
        R::COLUMNS
    }

    fn position(&self) -> Token {
        Token(self.rows.lock().last)
    }

    fn rows(&self, after: Token, up_to: Token, limit: usize) -> BoxFuture<'_, Result<Vec<Row>, TableError>> {
        let rows = self.rows.lock().between(after, up_to, limit);
        std::future::ready(Ok(rows)).boxed()
    }
}

struct Rows<R: Record> {
    keep: usize,
    /// The last position given out.
    last: i64,
    /// Everything was dropped here; all else stands above.
    emptied: i64,
    entries: BTreeMap<i64, Entry<R>>,
    places: HashMap<R::Key, i64>,
    gone: usize,
}

enum Entry<R: Record> {
    Here(R),
    Gone { key: R::Key, cells: Vec<Value> },
}

impl<R: Record> Rows<R> {
    fn new(first: i64, keep: usize) -> Self {
        debug_assert_eq!(R::COLUMNS.last(), Some(&"deleted"), "{}", R::TABLE);
        Self {
            keep,
            last: first,
            emptied: first,
            entries: BTreeMap::new(),
            places: HashMap::new(),
            gone: 0,
        }
    }

    fn put(&mut self, record: R) {
        let key = record.key();
        let place = self.places.get(&key).copied();
        match place.and_then(|place| self.entries.get(&place)) {
            Some(Entry::Here(known)) if *known == record => return,
            Some(Entry::Gone { .. }) => self.gone -= 1,
            _ => {}
        }
        self.set(place, key, Entry::Here(record));
        if self.entries.len() - self.gone > self.keep {
            let oldest = self.entries.iter().find_map(|(place, entry)| match entry {
                Entry::Here(record) => Some((*place, record.key())),
                Entry::Gone { .. } => None,
            });
            if let Some((place, key)) = oldest {
                self.entries.remove(&place);
                self.places.remove(&key);
            }
        }
    }

    fn remove(&mut self, key: &R::Key) {
        let Some(place) = self.places.get(key).copied() else {
            return;
        };
        let Some(Entry::Here(record)) = self.entries.get(&place) else {
            return;
        };
        let mut cells = record.cells();
        cells.truncate(R::KEY_COLUMNS);
        let key = key.clone();
        self.set(Some(place), key.clone(), Entry::Gone { key, cells });
        self.gone += 1;
        if self.gone > GONE_REMEMBERED.max(self.entries.len() - self.gone) {
            self.forget_the_gone();
        }
    }

    fn replace(&mut self, records: Vec<R>) {
        let kept: HashSet<R::Key> = records.iter().map(Record::key).collect();
        let gone: Vec<R::Key> = self.places.keys().filter(|key| !kept.contains(*key)).cloned().collect();
        for key in gone {
            self.remove(&key);
        }
        for record in records {
            self.put(record);
        }
    }

    fn set(&mut self, old: Option<i64>, key: R::Key, entry: Entry<R>) {
        if let Some(old) = old {
            self.entries.remove(&old);
        }
        self.last += 1;
        self.entries.insert(self.last, entry);
        self.places.insert(key, self.last);
    }

    /// All is dropped, and what is there comes anew, so that nobody needs to be told of what is gone.
    fn forget_the_gone(&mut self) {
        self.last += 1;
        self.emptied = self.last;
        self.gone = 0;
        for entry in std::mem::take(&mut self.entries).into_values() {
            match entry {
                Entry::Here(record) => self.set(None, record.key(), Entry::Here(record)),
                Entry::Gone { key, .. } => {
                    self.places.remove(&key);
                }
            }
        }
    }

    fn between(&self, after: Token, up_to: Token, limit: usize) -> Vec<Row> {
        let emptied = (after.0 < self.emptied && self.emptied <= up_to.0).then(|| Row {
            position: Token(self.emptied),
            cells: Self::deleted(Vec::new()),
        });
        let range = (Bound::Excluded(after.0.min(up_to.0)), Bound::Included(up_to.0));
        let entries = self.entries.range(range).map(|(place, entry)| Row {
            position: Token(*place),
            cells: match entry {
                Entry::Here(record) => {
                    let mut cells = record.cells();
                    cells.push(false.into());
                    cells
                }
                Entry::Gone { cells, .. } => Self::deleted(cells.clone()),
            },
        });
        emptied.into_iter().chain(entries).take(limit).collect()
    }

    fn deleted(mut cells: Vec<Value>) -> Vec<Value> {
        cells.resize(R::COLUMNS.len() - 1, Value::Null);
        cells.push(true.into());
        cells
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[derive(PartialEq)]
    struct Typing(&'static str, i64);

    impl Record for Typing {
        const TABLE: &'static str = "typing";
        const COLUMNS: &'static [&'static str] = &["room_id", "users", "deleted"];
        const KEY_COLUMNS: usize = 1;
        type Key = &'static str;

        fn key(&self) -> &'static str {
            self.0
        }

        fn cells(&self) -> Vec<Value> {
            vec![self.0.into(), self.1.into()]
        }
    }

    fn table() -> MemoryTable<Typing> {
        MemoryTable::new(Millis(2), Bell::default())
    }

    fn after<R: Record>(table: &MemoryTable<R>, after: i64) -> Value {
        let up_to = table.position();
        let rows = table.rows.lock().between(Token(after), up_to, usize::MAX);
        rows.into_iter().map(|row| json!([row.position.0, row.cells])).collect()
    }

    #[test]
    fn a_row_stands_where_it_changed_last_and_what_is_gone_says_so() {
        let table = table();
        assert_eq!(after(&table, -1), json!([[2000, [null, null, true]]]));
        table.put(Typing("!a", 1));
        table.put(Typing("!b", 1));
        table.put(Typing("!a", 1));
        assert_eq!(table.position(), Token(2002), "nothing changed");
        table.put(Typing("!a", 2));
        assert_eq!(
            after(&table, 2000),
            json!([[2002, ["!b", 1, false]], [2003, ["!a", 2, false]]])
        );
        table.remove(&"!b");
        table.remove(&"!b");
        table.remove(&"!c");
        assert_eq!(
            after(&table, 1999),
            json!([
                [2000, [null, null, true]],
                [2003, ["!a", 2, false]],
                [2004, ["!b", null, true]]
            ])
        );
        table.put(Typing("!b", 1));
        assert_eq!(after(&table, 2003), json!([[2005, ["!b", 1, false]]]));
    }

    #[test]
    fn a_view_tells_the_differences() {
        let table = table();
        table.replace(vec![Typing("!a", 1), Typing("!b", 1)]);
        table.replace(vec![Typing("!c", 1), Typing("!a", 1)]);
        assert_eq!(
            after(&table, 2001),
            json!([[2003, ["!b", null, true]], [2004, ["!c", 1, false]]])
        );
    }

    #[test]
    fn only_the_newest_are_kept() {
        let table = MemoryTable::newest(2, Millis(0), Bell::default());
        for room in ["!a", "!b", "!a", "!c"] {
            let position = table.position();
            table.put(Typing(room, position.0));
        }
        assert_eq!(after(&table, 0), json!([[3, ["!a", 2, false]], [4, ["!c", 3, false]]]));
    }

    #[test]
    fn the_gone_are_forgotten_in_time_and_everybody_can_tell() {
        #[derive(PartialEq)]
        struct Numbered(i64);
        impl Record for Numbered {
            const TABLE: &'static str = "numbered";
            const COLUMNS: &'static [&'static str] = &["number", "deleted"];
            const KEY_COLUMNS: usize = 1;
            type Key = i64;

            fn key(&self) -> i64 {
                self.0
            }

            fn cells(&self) -> Vec<Value> {
                vec![self.0.into()]
            }
        }
        let table = MemoryTable::new(Millis(0), Bell::default());
        for number in 0..=1_001 {
            table.put(Numbered(number));
        }
        for number in 1..=1_000 {
            table.remove(&number);
        }
        let before = table.position();
        assert_eq!(after(&table, 0).as_array().map(Vec::len), Some(1_002));
        table.remove(&1_001);
        assert_eq!(
            after(&table, before.0),
            json!([[before.0 + 2, [null, true]], [before.0 + 3, [0, false]]])
        );
        let rows = table.rows.lock();
        assert_eq!((rows.places.len(), rows.entries.len(), rows.gone), (1, 1, 0));
    }

    #[test]
    fn a_change_rings_and_what_is_no_change_or_quiet_does_not() {
        let bell = Bell::default();
        let news = bell.listen();
        let table = MemoryTable::new(Millis(0), bell.clone());
        let rang = || news.has_changed().expect("the bell is there");
        table.put_quietly(Typing("!a", 1));
        table.put(Typing("!a", 1));
        table.remove(&"!b");
        assert!(!rang());
        table.put(Typing("!a", 2));
        assert!(rang());
    }
}
