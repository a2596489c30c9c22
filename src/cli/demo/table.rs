//! The end of the story: who was owed what, and got it.

use std::{fmt::Write, time::Duration};

/// What came to one server.
#[derive(Debug, Clone)]
pub struct Row {
    pub server: String,
    pub role: &'static str,
    /// Since the beginning.
    pub joined: Duration,
    /// Sticky events that must have come.
    pub owed: usize,
    /// Those of them that did, and are held as sticky events.
    pub delivered: usize,
    /// Sticky events that expired before they could be sent to it.
    pub expired: usize,
    pub transactions: u64,
    /// From its join, or its return, to the last of them.
    pub delay: Option<Duration>,
}

const HEAD: [&str; 8] = [
    "server",
    "what it did",
    "joined",
    "owed",
    "delivered",
    "expired",
    "transactions",
    "join or return to last sticky event",
];

/// The rows as text.
pub fn table(rows: &[Row]) -> String {
    let seconds = |time: Duration| format!("{:.2} s", time.as_secs_f64());
    let mut lines: Vec<[String; 8]> = vec![HEAD.map(str::to_owned)];
    lines.extend(rows.iter().map(|row| {
        [
            row.server.clone(),
            row.role.to_owned(),
            seconds(row.joined),
            row.owed.to_string(),
            row.delivered.to_string(),
            row.expired.to_string(),
            row.transactions.to_string(),
            row.delay.map_or_else(|| "-".to_owned(), seconds),
        ]
    }));
    let widths: Vec<usize> = (0..HEAD.len())
        .map(|column| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0))
        .collect();
    let mut text = String::new();
    for line in &lines {
        for (column, (cell, width)) in line.iter().zip(&widths).enumerate() {
            let gap = if column == 0 { "" } else { "  " };
            // Words to the left, figures to the right.
            let written = if column < 2 {
                write!(text, "{gap}{cell:<width$}")
            } else {
                write!(text, "{gap}{cell:>width$}")
            };
            debug_assert!(written.is_ok(), "a String takes all that is written");
        }
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_stand_under_each_other() {
        let row = |server: &str, role, owed, delay| Row {
            server: server.to_owned(),
            role,
            joined: Duration::from_millis(12_345),
            owed,
            delivered: owed,
            expired: 6,
            transactions: 5,
            delay,
        };
        let rows = [
            row("127.0.0.1:1", "joined late", 54, Some(Duration::from_millis(844))),
            row("127.0.0.1:12345", "never answered", 1_000, None),
        ];
        insta::assert_snapshot!(table(&rows));
    }
}
