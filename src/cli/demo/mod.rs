//! `burdock demo`: the main job told live, with real homeservers in two processes and nothing else on the machine.

mod certificates;
mod ours;
mod progress;
mod remote;
mod story;
mod table;

use std::{io::Write, path::PathBuf, process::ExitCode, time::Duration};

use anyhow::Context;
use tempfile::TempDir;
use tokio::{
    runtime::Runtime,
    signal::unix::{SignalKind, signal},
    time::{Instant, timeout},
};

use self::progress::Progress;

/// How long the story may take.
const LIMIT: Duration = Duration::from_secs(30);

/// The same with more servers or events than by default.
const LARGE_LIMIT: Duration = Duration::from_mins(5);

/// What can be chosen.
#[derive(Debug, clap::Args)]
pub struct DemoArgs {
    /// Which events are sent when is drawn from this number
    #[arg(long, default_value_t = 1, value_name = "NUMBER")]
    pub seed: u64,
    /// Other servers in the room: one goes away for a while, one never answers, the others join late
    #[arg(long, default_value_t = 3, value_name = "N", value_parser = clap::value_parser!(u16).range(3..=30))]
    pub servers: u16,
    /// Sticky events that our server sends
    #[arg(long, default_value_t = 120, value_name = "N", value_parser = clap::value_parser!(u16).range(4..=1000))]
    pub sticky: u16,
    /// Keep databases and logs in this folder, which must not exist yet
    #[arg(long, value_name = "DIR")]
    pub keep: Option<PathBuf>,
}

/// Tells the story. The exit code is 0 only if everything owed arrived.
pub(super) fn run(args: &DemoArgs) -> ExitCode {
    match tell(args) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("burdock: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn tell(args: &DemoArgs) -> anyhow::Result<bool> {
    // The client of our homeserver speaks plain HTTP; its library wants to know all the same. It fails only if one is set.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let runtime = Runtime::new().context("cannot start the runtime")?;
    // Removed at the end, also if that is a failure.
    let folder = tempfile::tempdir().context("cannot make a temporary folder")?;
    let dir = match &args.keep {
        Some(keep) => {
            std::fs::create_dir(keep).with_context(|| format!("cannot make the folder {}", keep.display()))?;
            keep.canonicalize()?
        }
        None => folder.path().to_owned(),
    };
    let progress = Progress::new(Instant::now());
    let limit = if args.servers <= 3 && args.sticky <= 120 {
        LIMIT
    } else {
        LARGE_LIMIT
    };
    let ending = runtime.block_on(async {
        // Before anything is started that must not be left behind.
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut terminate = signal(SignalKind::terminate())?;
        let mut hang_up = signal(SignalKind::hangup())?;
        tokio::select! {
            ending = timeout(limit, story::tell(args, &dir, &progress)) => {
                ending.with_context(|| format!("the story was not over after {limit:?}"))?
            }
            _ = interrupt.recv() => Err(anyhow::anyhow!("interrupted")),
            _ = terminate.recv() => Err(anyhow::anyhow!("told to stop")),
            _ = hang_up.recv() => Err(anyhow::anyhow!("the terminal is gone")),
        }
    });
    // Those that still write to the folder come first.
    runtime.shutdown_timeout(Duration::from_secs(5));
    remove(folder);
    let ending = ending?;
    std::io::stdout().write_all(table::table(&ending.rows).as_bytes())?;
    if let Some(keep) = &args.keep {
        eprintln!("databases and logs: {}", keep.display());
    }
    Ok(ending.complete)
}

/// Removes the folder. A homeserver that was stopped in the middle may write for another moment.
fn remove(folder: TempDir) {
    let path = folder.path().to_owned();
    let mut removed = folder.close();
    for _ in 0..40 {
        if removed.is_ok() || !path.exists() {
            return;
        }
        std::thread::sleep(Duration::from_millis(50));
        removed = std::fs::remove_dir_all(&path);
    }
    if let Err(error) = removed {
        eprintln!("burdock: {} is left: {error}", path.display());
    }
}
