//! A table's part of an answer: its header, and as many rows as it may hold, cut between positions. Without I/O.

use std::fmt::Write as _;

use super::table::{Row, TableError};
use crate::core::id::Token;

/// Rows read from a table at a time, so that not all that an answer may hold is in memory before it is counted.
const CHUNK: usize = 500;

/// The most rows that one position may have. They must be in one answer, whatever the asker's limit.
const MAX_ROWS_OF_A_POSITION: usize = 10_000;

/// What of a table goes into an answer.
#[derive(Debug)]
pub(super) struct Page {
    up_to: Token,
    columns: usize,
    limit: usize,
    bytes: usize,
    /// Everything up to here is in.
    reached: Token,
    /// The rows as JSON, each after a comma.
    rows: String,
    count: usize,
    /// How many rows to read next; 0 when done.
    read: usize,
}

impl Page {
    /// An empty page for the rows above `after` and up to `up_to`: at most `limit`, and about `bytes` of them, but at least
    /// one position.
    pub(super) fn new(after: Token, up_to: Token, columns: usize, limit: usize, bytes: usize) -> Self {
        Self {
            up_to,
            columns,
            limit,
            bytes,
            reached: after,
            rows: String::new(),
            count: 0,
            read: if after < up_to { CHUNK.min(limit + 1) } else { 0 },
        }
    }

    /// What to read next: rows after this position, so many. `None`: all is there.
    pub(super) fn wants(&self) -> Option<(Token, usize)> {
        (self.read > 0).then_some((self.reached, self.read))
    }

    /// The rows that [`Self::wants`] asked for.
    pub(super) fn add(&mut self, rows: &[Row]) -> Result<(), TableError> {
        self.check(rows)?;
        let whole = match rows.last() {
            // Of the last position there may be more.
            Some(last) if rows.len() >= self.read => rows.partition_point(|row| row.position < last.position),
            _ => {
                self.take(rows);
                if self.read > 0 {
                    self.reached = self.up_to;
                    self.read = 0;
                }
                return Ok(());
            }
        };
        if whole > 0 {
            self.take(&rows[..whole]);
            if self.count >= self.limit {
                self.read = 0;
            } else if self.read > 0 {
                self.read = CHUNK.min(self.limit - self.count + 1);
            }
        } else if self.count > 0 && self.count + rows.len() > self.limit {
            self.read = 0;
        } else if rows.len() > MAX_ROWS_OF_A_POSITION {
            return Err(TableError(format!(
                "more than {MAX_ROWS_OF_A_POSITION} rows at position {}",
                rows[0].position
            )));
        } else {
            self.read = (self.read * 2).min(MAX_ROWS_OF_A_POSITION + 1);
        }
        Ok(())
    }

    fn check(&self, rows: &[Row]) -> Result<(), TableError> {
        let ascending = rows.is_sorted_by_key(|row| row.position);
        let within = rows.first().is_none_or(|row| row.position > self.reached)
            && rows.last().is_none_or(|row| row.position <= self.up_to);
        if !ascending || !within || rows.len() > self.read {
            return Err(TableError(format!(
                "its rows after {} up to {} do not stand between these in order, or are more than {}",
                self.reached, self.up_to, self.read
            )));
        }
        match rows.iter().find(|row| row.cells.len() != self.columns) {
            Some(row) => Err(TableError(format!(
                "a row at {} has {} cells for {} columns",
                row.position,
                row.cells.len(),
                self.columns
            ))),
            None => Ok(()),
        }
    }

    /// Takes whole positions as long as there is room; if that ends before the rows do, the page is done.
    fn take(&mut self, rows: &[Row]) {
        for position in rows.chunk_by(|a, b| a.position == b.position) {
            let before = self.rows.len();
            for row in position {
                self.rows.push(',');
                // Writing into a string cannot fail, and a JSON value can always be written.
                self.rows
                    .push_str(&serde_json::to_string(&row.cells).unwrap_or_default());
            }
            let count = self.count + position.len();
            if self.count > 0 && (count > self.limit || self.rows.len() > self.bytes) {
                self.rows.truncate(before);
                self.read = 0;
                return;
            }
            self.count = count;
            self.reached = position[0].position;
        }
    }

    /// The entry of the answer: the header row and the rows.
    pub(super) fn entry(&self, name: &str, columns: &[&str]) -> String {
        let mut entry = format!(
            "[[{},{},{},{}",
            serde_json::Value::from(name),
            self.reached,
            self.count,
            columns.len()
        );
        for column in columns {
            let _ = write!(entry, ",{}", serde_json::Value::from(*column));
        }
        entry.push(']');
        entry.push_str(&self.rows);
        entry.push(']');
        entry
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const NO_BOUND: usize = usize::MAX;

    fn rows(positions: &[i64]) -> Vec<Row> {
        let row = |position: &i64| Row {
            position: Token(*position),
            cells: vec![(*position).into()],
        };
        positions.iter().map(row).collect()
    }

    /// Reads from `all` what the page wants.
    fn fill(mut page: Page, all: &[Row]) -> Result<Page, TableError> {
        while let Some((after, count)) = page.wants() {
            let next = all
                .iter()
                .filter(|row| row.position > after && row.position <= page.up_to);
            page.add(&next.take(count).cloned().collect::<Vec<_>>())?;
        }
        Ok(page)
    }

    fn page(after: i64, up_to: i64, limit: usize, bytes: usize, all: &[i64]) -> (i64, String) {
        let page = Page::new(Token(after), Token(up_to), 1, limit, bytes);
        let page = fill(page, &rows(all)).expect("a good table");
        (page.reached.0, page.rows)
    }

    #[test]
    fn a_cut_is_between_positions_and_the_header_says_where() {
        let all = [1, 2, 2, 2, 5];
        assert_eq!(
            page(-1, 9, NO_BOUND - 1, NO_BOUND, &all),
            (9, ",[1],[2],[2],[2],[5]".into())
        );
        assert_eq!(page(-1, 9, 1, NO_BOUND, &all), (1, ",[1]".into()));
        assert_eq!(page(-1, 9, 3, NO_BOUND, &all), (1, ",[1]".into()));
        assert_eq!(
            page(1, 9, 1, NO_BOUND, &all),
            (2, ",[2],[2],[2]".into()),
            "never less than a position"
        );
        assert_eq!(page(-1, 9, 4, NO_BOUND, &all), (2, ",[1],[2],[2],[2]".into()));
        assert_eq!(page(-1, 9, 5, NO_BOUND, &all), (9, ",[1],[2],[2],[2],[5]".into()));
        assert_eq!(page(-1, 9, 5, 8, &all), (1, ",[1]".into()), "bytes");
        assert_eq!(page(-1, 2, 5, NO_BOUND, &all), (2, ",[1],[2],[2],[2]".into()));
        assert_eq!(
            page(5, 9, 5, NO_BOUND, &all),
            (9, String::new()),
            "no rows, but further"
        );
    }

    #[test]
    fn a_position_with_very_many_rows_is_an_error_and_no_endless_answer() {
        let most = vec![3; MAX_ROWS_OF_A_POSITION];
        assert_eq!(page(0, 9, 1, 1, &most).0, 9);
        let more = rows(&vec![3; MAX_ROWS_OF_A_POSITION + 1]);
        let error = fill(Page::new(Token(0), Token(9), 1, 1, 1), &more).expect_err("too many");
        assert!(error.to_string().contains("at position 3"), "{error}");
    }

    #[test]
    fn a_table_that_breaks_its_rules_is_found_out() {
        for (positions, cells) in [(&[2, 1][..], 1), (&[0], 1), (&[10], 1), (&[1], 2)] {
            let mut page = Page::new(Token(0), Token(9), cells, 5, NO_BOUND);
            assert!(page.add(&rows(positions)).is_err(), "{positions:?}");
        }
    }

    #[test]
    fn an_entry_is_a_header_row_and_rows() {
        let page = fill(Page::new(Token(0), Token(9), 1, 2, NO_BOUND), &rows(&[4, 6])).expect("a good table");
        assert_eq!(page.entry("t\"", &["é"]), r#"[["t\"",9,2,1,"é"],[4],[6]]"#);
    }

    proptest! {
        #[test]
        fn page_by_page_everything_is_given_once(
            mut positions in proptest::collection::vec(0..60_i64, 0..1_200),
            limit in 1..700_usize,
            bytes in 1..5_000_usize,
        ) {
            positions.sort_unstable();
            let all = rows(&positions);
            let mut reached = Token(-1);
            let mut given = String::new();
            while reached < Token(100) {
                let page = fill(Page::new(reached, Token(100), 1, limit, bytes), &all).expect("a good table");
                prop_assert!(page.reached > reached);
                let one_position = all.iter().filter(|row| row.position == page.reached).count() == page.count;
                prop_assert!(page.count <= limit || one_position || page.reached == Token(100));
                reached = page.reached;
                given.push_str(&page.rows);
            }
            let each: Vec<String> = positions.iter().map(|position| format!(",[{position}]")).collect();
            prop_assert_eq!(given, each.concat());
        }
    }
}
