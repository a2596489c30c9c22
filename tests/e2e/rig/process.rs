//! Processes that are stopped whatever happens.
//!
//! Each is ended when its guard is dropped. A signal to the test process ends them through [`kill_all`], and should
//! the test process itself be killed, `tests/run` finds their ids as the names of files in a folder.

use std::{
    collections::BTreeSet,
    fs::{self, File, OpenOptions},
    io::{Read as _, Seek as _, SeekFrom},
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::LazyLock,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use parking_lot::Mutex;

static RUNNING: LazyLock<Mutex<BTreeSet<u32>>> = LazyLock::new(Mutex::default);

/// A running process.
pub struct Process {
    name: String,
    log: PathBuf,
    child: Child,
}

fn pid_file(pid: u32) -> Option<PathBuf> {
    std::env::var_os("BURDOCK_TEST_DIR").map(|dir| Path::new(&dir).join("pids").join(pid.to_string()))
}

/// Kills every process that runs.
pub fn kill_all() {
    for pid in RUNNING.lock().iter() {
        signal("KILL", *pid);
    }
}

fn signal(name: &str, pid: u32) {
    let _ = Command::new("kill")
        .args([format!("-{name}"), pid.to_string()])
        .stderr(Stdio::null())
        .status();
}

impl Process {
    /// Starts a process whose output is added to `{name}.log` in `dir`.
    pub fn spawn(dir: &Path, name: &str, command: &mut Command) -> Result<Self> {
        let log = dir.join(format!("{name}.log"));
        let output = OpenOptions::new().create(true).append(true).open(&log)?;
        command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
        // In a group of its own, so that a Ctrl-C reaches it through us only.
        let child = command
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot run {command:?}"))?;
        RUNNING.lock().insert(child.id());
        if let Some(file) = pid_file(child.id()) {
            File::create(file)?;
        }
        Ok(Self {
            name: name.to_owned(),
            log,
            child,
        })
    }

    /// Waits until `is_ready` says so. Fails if the process ends, or after `within`.
    pub async fn wait_until<F: Future<Output = bool>>(
        &mut self,
        within: Duration,
        is_ready: impl Fn() -> F,
    ) -> Result<()> {
        let deadline = Instant::now() + within;
        loop {
            if let Some(status) = self.ended() {
                bail!("{} ended with {status} at its start", self.name);
            }
            if is_ready().await {
                return Ok(());
            }
            if Instant::now() > deadline {
                bail!("{} was not ready within {within:?}", self.name);
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Its process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends it a signal.
    pub fn signal(&self, name: &str) {
        signal(name, self.id());
    }

    /// How it ended, if it did.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    /// Asks it to end, and kills it if it has not after 20 s. Fails if it had to be killed.
    pub async fn stop(mut self) -> Result<ExitStatus> {
        self.signal("TERM");
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            if let Some(status) = self.ended() {
                return Ok(status);
            }
            if Instant::now() > deadline {
                bail!("{} did not end within 20 s of a SIGTERM", self.name);
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// `kill -9`.
    pub fn kill(self) {
        drop(self);
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        RUNNING.lock().remove(&self.id());
        if let Some(file) = pid_file(self.id()) {
            let _ = fs::remove_file(file);
        }
        if std::thread::panicking() {
            eprintln!("the log of {} is {}", self.name, self.log.display());
        }
    }
}

/// The end of every log in `dir`, for a look at what went wrong.
pub fn log_tails(dir: &Path) -> String {
    let mut text = String::new();
    let mut logs: Vec<_> = fs::read_dir(dir)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .collect();
    logs.retain(|path| path.extension().is_some_and(|extension| extension == "log"));
    logs.sort();
    for log in logs {
        let tail = tail(&log, 3_000).unwrap_or_default();
        if !tail.trim().is_empty() {
            text.extend(["--- the end of ", &log.to_string_lossy(), "\n", &tail, "\n"]);
        }
    }
    text
}

fn tail(log: &Path, bytes: u64) -> Result<String> {
    let mut file = File::open(log)?;
    let start = file.metadata()?.len().saturating_sub(bytes);
    file.seek(SeekFrom::Start(start))?;
    let mut text = Vec::new();
    file.read_to_end(&mut text)?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}
