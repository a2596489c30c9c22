//! What is shown while the story goes on: bars on a terminal, plain lines otherwise.

use std::io::{IsTerminal, stderr};

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use tokio::time::Instant;

/// The display.
pub struct Progress {
    began: Instant,
    bars: Option<MultiProgress>,
}

/// How far one server is.
pub struct Bar(Option<ProgressBar>);

impl Progress {
    /// Begins now.
    pub fn new(began: Instant) -> Self {
        Self {
            began,
            bars: stderr().is_terminal().then(MultiProgress::new),
        }
    }

    /// When the story began.
    pub fn began(&self) -> Instant {
        self.began
    }

    /// Something happened.
    pub fn say(&self, text: &str) {
        let line = format!("{:6.2} s  {text}", self.began.elapsed().as_secs_f64());
        match &self.bars {
            Some(bars) => {
                // A terminal that cannot be written to is no reason to end.
                let _ = bars.println(line);
            }
            None => eprintln!("{line}"),
        }
    }

    /// A bar for a server that is owed so many events.
    pub fn bar(&self, name: &str, owed: usize) -> Bar {
        let Some(bars) = &self.bars else { return Bar(None) };
        let style = ProgressStyle::with_template("{msg:>24} {bar:40} {pos}/{len}");
        let bar = bars.add(ProgressBar::new(u64::try_from(owed).unwrap_or(u64::MAX)));
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        bar.set_message(name.to_owned());
        Bar(Some(bar))
    }
}

impl Bar {
    /// The server has so many.
    pub fn set(&self, held: usize) {
        if let Some(bar) = &self.0 {
            bar.set_position(u64::try_from(held).unwrap_or(u64::MAX));
        }
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        if let Some(bar) = &self.0 {
            bar.finish_and_clear();
        }
    }
}
