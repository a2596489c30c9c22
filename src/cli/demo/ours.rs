//! Our homeserver: a process of its own, so that it can be killed as the system kills.

use std::{
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use anyhow::{Context, bail, ensure};
use reqwest::Method;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tokio::{
    process::{Child, ChildStdin, Command},
    time::{Instant, sleep},
};

use super::certificates::Certificates;
use crate::core::id::RoomId;

/// How long it may take to answer after its start.
const START_LIMIT: Duration = Duration::from_secs(10);

/// Short pauses, so that who was down is soon tried again.
const RETRIES: &str = "\
federation:
  client_timeout: 2s
  max_long_retries: 1
  max_long_retry_delay: 1s
  destination_min_retry_interval: 500
  destination_max_retry_interval: 2s
ip_range_blacklist: []
federation_ip_range_blacklist: []
";

/// A homeserver with Burdock in it.
pub struct Ours {
    /// Its Matrix name.
    pub name: String,
    dir: PathBuf,
    arguments: Vec<String>,
    url: String,
    http: reqwest::Client,
    process: Child,
    /// Its standard input, open as long as this is: to wait for a process closes that by the way.
    stdin: Option<ChildStdin>,
    token: String,
    transactions: u64,
}

impl Ours {
    /// Starts it, with its data in `dir`.
    pub async fn start(dir: &Path, certificates: &Certificates, federation: u16, client: u16) -> anyhow::Result<Self> {
        let name = format!("127.0.0.1:{federation}");
        std::fs::create_dir_all(dir)?;
        let retries = dir.join("retries.yaml");
        std::fs::write(
            &retries,
            format!(
                "{RETRIES}federation_custom_ca_list: [{}]\n",
                Value::from(certificates.authority.to_string_lossy())
            ),
        )?;
        let text = |path: &Path| path.to_string_lossy().into_owned();
        let arguments = vec![
            "master".to_owned(),
            "--dir".to_owned(),
            text(dir),
            "--name".to_owned(),
            name.clone(),
            "--listen".to_owned(),
            format!("127.0.0.1:{federation}"),
            "--tls-cert".to_owned(),
            text(&certificates.certificate),
            "--tls-key".to_owned(),
            text(&certificates.key),
            "--client".to_owned(),
            format!("127.0.0.1:{client}"),
            "-c".to_owned(),
            text(&retries),
            // So that it ends with us, whatever ends us.
            "--until-stdin-ends".to_owned(),
        ];
        let mut process = spawn(dir, &arguments)?;
        let stdin = process.stdin.take();
        let mut ours = Self {
            name,
            dir: dir.to_owned(),
            arguments,
            url: format!("http://127.0.0.1:{client}/_matrix/client"),
            http: reqwest::Client::builder().timeout(Duration::from_secs(10)).build()?,
            process,
            stdin,
            token: String::new(),
            transactions: 0,
        };
        ours.ready().await?;
        Ok(ours)
    }

    async fn ready(&mut self) -> anyhow::Result<()> {
        let began = Instant::now();
        while self.http.get(format!("{}/versions", self.url)).send().await.is_err() {
            if let Some(status) = self.process.try_wait()? {
                bail!("our homeserver ended with {status}:\n{}", self.log());
            }
            ensure!(
                began.elapsed() < START_LIMIT,
                "our homeserver does not answer:\n{}",
                self.log()
            );
            sleep(Duration::from_millis(10)).await;
        }
        Ok(())
    }

    /// The end of what it logged.
    pub fn log(&self) -> String {
        let text = std::fs::read_to_string(self.dir.join("log")).unwrap_or_default();
        let lines: Vec<&str> = text.lines().rev().take(20).collect();
        lines.into_iter().rev().collect::<Vec<_>>().join("\n")
    }

    /// `kill -9`.
    pub async fn kill(&mut self) -> anyhow::Result<()> {
        Ok(self.process.kill().await?)
    }

    /// Starts it again on the same data.
    pub async fn restart(&mut self) -> anyhow::Result<()> {
        self.process = spawn(&self.dir, &self.arguments)?;
        self.stdin = self.process.stdin.take();
        self.ready().await
    }

    /// Tells it to stop, and waits until it has.
    pub async fn stop(mut self) -> anyhow::Result<()> {
        let pid = self
            .process
            .id()
            .and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?));
        kill_process(pid.context("our homeserver has ended already")?, Signal::TERM)?;
        let status = self.process.wait().await?;
        ensure!(status.success(), "our homeserver ended with {status}:\n{}", self.log());
        Ok(())
    }

    async fn request(&self, method: Method, path: &str, body: &Value) -> anyhow::Result<Value> {
        let response = self
            .http
            .request(method, format!("{}/v3{path}", self.url))
            .bearer_auth(&self.token)
            .header("Content-Type", "application/json")
            .body(body.to_string())
            .send()
            .await
            .with_context(|| format!("{path}:\n{}", self.log()))?;
        let status = response.status();
        let text = response.text().await?;
        ensure!(status.is_success(), "{path}: {status} {text}");
        Ok(serde_json::from_str(&text)?)
    }

    /// A user, in whose name all that follows is done.
    pub async fn register(&mut self, user: &str) -> anyhow::Result<()> {
        let body = json!({ "username": user, "auth": { "type": "m.login.dummy" } });
        let answer = self.request(Method::POST, "/register", &body).await?;
        answer["access_token"]
            .as_str()
            .context("no access token")?
            .clone_into(&mut self.token);
        Ok(())
    }

    /// A public room.
    pub async fn create_room(&self) -> anyhow::Result<String> {
        let answer = self
            .request(Method::POST, "/createRoom", &json!({ "preset": "public_chat" }))
            .await?;
        Ok(answer["room_id"].as_str().context("no room id")?.to_owned())
    }

    /// Sends a message, sticky for `sticky` if that is given. Returns its id.
    pub async fn send(&mut self, room: &RoomId, text: &str, sticky: Option<Duration>) -> anyhow::Result<String> {
        self.transactions += 1;
        let query = sticky.map_or_else(String::new, |duration| {
            format!("?org.matrix.msc4354.sticky_duration_ms={}", duration.as_millis())
        });
        let path = format!("/rooms/{room}/send/m.room.message/{}{query}", self.transactions);
        let body = json!({ "msgtype": "m.text", "body": text });
        let answer = self.request(Method::PUT, &path, &body).await?;
        Ok(answer["event_id"].as_str().context("no event id")?.to_owned())
    }
}

fn spawn(dir: &Path, arguments: &[String]) -> anyhow::Result<Child> {
    let log = std::fs::OpenOptions::new()
        .create(true)
        .append(true)
        .open(dir.join("log"))?;
    let program = std::env::current_exe().context("cannot tell where this program is")?;
    Command::new(program)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(log.try_clone()?)
        .stderr(log)
        .kill_on_drop(true)
        .spawn()
        .context("cannot start our homeserver")
}
